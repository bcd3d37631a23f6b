//! What users type wrongly: the command says what failed, why, and what to do, and its exit code is not 0.

use std::path::PathBuf;
use std::process::{self, Command, Output, Stdio};
use std::{env, fs, str};

/// A folder that goes with the test.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        let folder = env::temp_dir().join(format!("quipu-wrong-{name}-{}", process::id()));
        fs::create_dir(&folder).unwrap();
        Self(folder)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn quipu(line: &str) -> Command {
    let mut words = line.split_whitespace().peekable();
    let mut command = Command::new(env!("CARGO_BIN_EXE_quipu"));
    while let Some((name, value)) = words.peek().and_then(|word| word.split_once('=')) {
        if !name.starts_with("QUIPU_") {
            break;
        }
        command.env(name, value);
        words.next();
    }
    command.args(words).stdin(Stdio::null());
    command
}

/// Asserts the exit code of a line and that its error message contains all of some parts.
fn assert_refused(line: &str, code: i32, parts: &[&str]) {
    let Output { status, stderr, .. } = quipu(line).output().unwrap();
    let text = str::from_utf8(&stderr).unwrap();
    assert_eq!(status.code(), Some(code), "{line}: {text}");
    for part in parts {
        assert!(text.contains(part), "{line}: {part:?} is not in {text}");
    }
}

#[test]
fn numbers_and_addresses() {
    assert_refused("top --interval x", 2, &["'x'", "--interval", "not a whole number"]);
    assert_refused("devices --address hello", 2, &["hello", "not an IP address, such as"]);
    assert_refused("nbd serve --memory 1M --listen here", 2, &["not an address with a port"]);
    assert_refused("sim --seeds 0", 2, &["--seeds"]);
    assert_refused("am bench --rounds 0", 2, &["--rounds"]);
}

#[test]
fn variables_of_sockets() {
    let parts = ["QUIPU_SOCKETS=off", "set it to never, or unset it"];
    assert_refused("QUIPU_SOCKETS=off sockets -- true", 2, &parts);
    let parts = ["QUIPU_SDP_ZCOPY=64K", "a number of bytes"];
    assert_refused("QUIPU_SDP_ZCOPY=64K sockets --sdp -- true", 2, &parts);
}

#[test]
fn hosts_of_a_job() {
    let folder = Folder::new("hosts");
    let file = folder.0.join("hosts");
    fs::write(&file, "# none\n").unwrap();
    let line = format!("spmd --hostfile {} -- true", file.display());
    assert_refused(&line, 2, &["no host is named", "one on each line"]);
    let line = "spmd -n 2 --ssh /no/such/ssh --hosts x,y -- true";
    assert_refused(line, 125, &["\"/no/such/ssh\"", "reach x"]);
}

#[test]
fn interfaces() {
    let run = |options: &str| format!("ipoib --address 10.7.0.1/24 {options} -- true");
    assert_refused(&run("--interface a-name-of-20-letters"), 2, &["1 to 15 bytes"]);
    let parts = ["gateway 10.9.0.1", "none of the networks of --address"];
    assert_refused(&run("--gateway 10.9.0.1"), 2, &parts);
    assert_refused(&run("--gateway fe80::1"), 2, &["none of the networks"]);
}

#[test]
fn configurations_that_cannot_be_read() {
    assert_refused("qos check /no/such", 1, &["/no/such", "a file that you can read"]);
}

#[test]
fn disks() {
    let folder = Folder::new("disks");
    let file = folder.0.join("disk");
    fs::write(&file, [7; 4096]).unwrap();
    let file = file.display();
    assert_refused(&format!("nbd copy {file} {file}"), 1, &["to itself", "another target"]);
    let line = format!("nbd serve --memory 1M --unix {file}");
    assert_refused(&line, 1, &["A file that is no socket is there"]);
    assert_refused("nbd serve --memory 0", 2, &["at least one byte"]);
    assert_refused("nbd serve --memory 1M --listen 192.0.2.250:0", 1, &["an address of this host"]);
    assert_refused("nbd serve --memory 1M --unix /no/such/s", 1, &["a folder that exists"]);
    assert_refused(&format!("nbd serve {}", folder.0.display()), 1, &["a regular file"]);
    assert_refused("nbd info nbd://nosuch.invalid", 1, &["nosuch.invalid", "Check the address"]);
    let unix = "nbd info nbd+unix:///?socket=/no/such";
    assert_refused(unix, 1, &["the path of the server's socket"]);
    let rdma = "QUIPU_ADDRESS=127.0.0.1 nbd info nbd+rdma://127.0.0.1:1";
    assert_refused(rdma, 1, &["no program listens at that port", "nbd serve --rdma"]);
    assert_refused(&format!("paper qpip --out {file}/x"), 1, &["a folder that you may write to"]);
    assert_refused("nbd copy /no/such x", 1, &["/no/such", "exists"]);
}
