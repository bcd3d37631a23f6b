//! `quipu nbd` with the NBD programs of others at the other end.

use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

#[path = "../../../../abi/types/testing/needs.rs"]
#[expect(dead_code, reason = "no test here needs the C compiler")]
mod needs;

mod attach;
mod order;
mod peers;
mod queue_pairs;
mod tls;

/// A server that ends with the test.
struct Server {
    process: Child,
    uri: String,
}

impl Server {
    fn start(arguments: &[&str]) -> Self {
        Self::start_under(&[], arguments)
    }

    /// The same, as the arguments of another program.
    fn start_under(program: &[&str], arguments: &[&str]) -> Self {
        let quipu = [env!("CARGO_BIN_EXE_quipu"), "nbd", "serve"];
        let line = [program, &quipu, arguments].concat();
        let mut process = Command::new(line[0])
            .args(&line[1..])
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        BufReader::new(process.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
        let uri = line.trim().rsplit(' ').next().unwrap().to_owned();
        assert!(uri.contains("://"), "{line}");
        Self { process, uri }
    }

    fn tcp(arguments: &[&str]) -> Self {
        Self::start(&[&["--listen", "127.0.0.1:0"], arguments].concat())
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// A folder of a test's own, removed at its end.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        let folder = format!("quipu-nbd-{name}-{}", std::process::id());
        let folder = std::env::temp_dir().join(folder);
        fs::create_dir_all(&folder).unwrap();
        Self(folder)
    }

    fn file(&self, name: &str) -> String {
        self.0.join(name).to_str().unwrap().to_owned()
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// A program that ends with the test.
struct Program(Child);

impl Drop for Program {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn is_there(program: &str, package: &str) -> bool {
    let folders = ["/usr/bin", "/usr/sbin", "/bin", "/sbin"];
    needs::met(folders.iter().any(|folder| Path::new(folder).join(program).exists()), package)
}

/// Runs a program to its end and returns what it printed.
fn run(program: &str, arguments: &[&str]) -> String {
    let outcome = Command::new(program).args(arguments).stdin(Stdio::null()).output().unwrap();
    let text = String::from_utf8_lossy(&outcome.stdout).into_owned();
    let errors = String::from_utf8_lossy(&outcome.stderr);
    assert!(outcome.status.success(), "{program} {arguments:?}: {text}{errors}");
    text
}

fn quipu(arguments: &[&str]) -> String {
    run(env!("CARGO_BIN_EXE_quipu"), &[&["nbd"], arguments].concat())
}

/// Runs `quipu nbd`, which has to fail, and to say why.
fn refused(arguments: &[&str], why: &str) {
    let outcome = Command::new(env!("CARGO_BIN_EXE_quipu"))
        .arg("nbd")
        .args(arguments)
        .stdin(Stdio::null())
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&outcome.stderr).into_owned();
    assert!(!outcome.status.success() && text.contains(why), "{text}");
}

/// Bytes without a pattern that a shifted copy would share.
fn content(length: usize) -> Vec<u8> {
    let mut state = 1_u32;
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 24) as u8
    };
    (0..length).map(|_| next()).collect()
}

#[test]
fn libnbd_describes_and_copies_a_disk() {
    if !is_there("nbdcopy", "libnbd-bin") {
        return;
    }
    let folder = Folder::new("libnbd");
    let server = Server::tcp(&["--memory", "9M", "--export", "a disk"]);
    assert!(server.uri.ends_with("/a%20disk"), "{}", server.uri);
    let told = run("nbdinfo", &[&server.uri]);
    assert!(
        told.contains("export-size: 9437184") && told.contains("can_multi_conn: true"),
        "{told}"
    );
    assert!(run("nbdinfo", &["--map", &server.uri]).contains("hole,zero"));
    let (source, target) = (folder.file("source"), folder.file("target"));
    fs::write(&source, content(9 << 20)).unwrap();
    run("nbdcopy", &[&source, &server.uri]);
    run("nbdcopy", &[&server.uri, &target]);
    assert!(fs::read(&source).unwrap() == fs::read(&target).unwrap());
    let listed = quipu(&["info", "--list", &server.uri]);
    assert!(listed.contains("\"a disk\""), "{listed}");
}

#[test]
fn qemu_reads_what_it_wrote_also_over_a_unix_socket() {
    if !is_there("qemu-io", "qemu-utils") {
        return;
    }
    let folder = Folder::new("qemu");
    let (disk, socket) = (folder.file("disk"), folder.file("socket"));
    fs::write(&disk, vec![0; 4 << 20]).unwrap();
    let server = Server::start(&[&disk, "--unix", &socket]);
    let work = [
        "write -P 0x5a 4096 8192",
        "write -f -P 0x11 1048576 1048576",
        "read -P 0x5a 4096 8192",
        "read -P 0 0 4096",
        "write -z 4096 4096",
        "discard 1048576 65536",
        "flush",
        "read -P 0 4096 4096",
        "read -P 0x11 1179648 65536",
        "aio_read -P 0x5a 8192 4096",
        "aio_read -P 0x11 2031616 65536",
        "aio_flush",
    ];
    let mut arguments = vec!["-f", "raw"];
    for command in &work {
        arguments.extend(["-c", command]);
    }
    arguments.push(&server.uri);
    let told = run("qemu-io", &arguments);
    assert!(!told.contains("failed"), "{told}");
    assert_eq!(fs::read(&disk).unwrap()[8192], 0x5a);
    let map = run("qemu-img", &["map", "--output=json", "-f", "raw", &server.uri]);
    assert!(map.contains("\"length\""), "{map}");
    assert!(run("qemu-img", &["info", "-f", "raw", &server.uri]).contains("4 MiB"));
}

#[test]
fn nbdkit_serves_a_disk_that_is_copied() {
    if !is_there("nbdkit", "nbdkit") {
        return;
    }
    let folder = Folder::new("nbdkit");
    let (socket, target) = (folder.file("socket"), folder.file("target"));
    let command = format!(
        "{} nbd copy 'nbd+unix:///?socket={socket}' {target} && \
         {} nbd info --json 'nbd+unix:///?socket={socket}'",
        env!("CARGO_BIN_EXE_quipu"),
        env!("CARGO_BIN_EXE_quipu")
    );
    let told = run("nbdkit", &["-U", &socket, "pattern", "5M", "--run", &command]);
    assert!(told.contains("\"size\":5242880"), "{told}");
    // The pattern plugin's words are their own offsets.
    let data = fs::read(&target).unwrap();
    assert_eq!(data.len(), 5 << 20);
    for (index, word) in data.chunks_exact(8).enumerate() {
        assert_eq!(u64::from_be_bytes(word.try_into().unwrap()), index as u64 * 8);
    }
}

#[test]
fn fio_verifies_random_writes() {
    if !is_there("fio", "fio") {
        return;
    }
    let server = Server::tcp(&["--memory", "16M"]);
    let uri = format!("--uri={}", server.uri);
    let told = run(
        "fio",
        &[
            "--name=t",
            "--ioengine=nbd",
            &uri,
            "--rw=randwrite",
            "--bs=4k",
            "--iodepth=16",
            "--size=16M",
            "--verify=crc32c",
            "--verify_state_save=0",
            "--output-format=terse",
        ],
    );
    assert!(told.contains(";t;"), "{told}");
}

#[test]
fn two_of_ours_copy_and_refuse() {
    let folder = Folder::new("ours");
    let (source, target) = (folder.file("source"), folder.file("target"));
    let mut bytes = content(3 << 20);
    bytes.resize(8 << 20, 0);
    fs::write(&source, &bytes).unwrap();
    let (from, to) = (Server::tcp(&[&source, "--read-only"]), Server::tcp(&["--memory", "8M"]));
    let told = quipu(&["copy", "--json", &from.uri, &to.uri]);
    assert!(told.contains("\"bytes\":8388608"), "{told}");
    quipu(&["copy", &to.uri, &target]);
    assert!(fs::read(&target).unwrap() == bytes);

    refused(&["copy", &to.uri, &from.uri], "not complete");
    let small = Server::tcp(&["--memory", "1M"]);
    refused(&["copy", &to.uri, &small.uri], "too small");
    refused(&["info", "nbd://127.0.0.1:1/"], "refused");
    refused(&["info", &format!("{}other", small.uri)], "no export");
    refused(&["serve", "/no/such/file"], "cannot open");
}

#[test]
fn a_stranger_who_sends_noise_harms_nobody_else() {
    use std::io::Write;
    let server = Server::tcp(&["--memory", "1M"]);
    let place = server.uri.trim_start_matches("nbd://").trim_end_matches('/').to_owned();
    for noise in [&[0_u8; 64][..], &[0xff; 64], b"GET / HTTP/1.0\r\n\r\n", &[0, 0, 0, 3, 0x49]] {
        let mut stream = std::net::TcpStream::connect(&place).unwrap();
        let mut greeting = [0; 18];
        stream.read_exact(&mut greeting).unwrap();
        let _ = stream.write_all(noise);
        let _ = stream.shutdown(std::net::Shutdown::Write);
        let mut rest = Vec::new();
        let _ = stream.read_to_end(&mut rest);
    }
    assert!(quipu(&["info", &server.uri]).contains("1048576"));
}
