//! Two hosts: network namespaces that the test makes. Connections between them stay with the kernel's TCP.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

#[path = "../../types/testing/cdylib.rs"]
mod cdylib;
#[path = "../../types/testing/needs.rs"]
mod needs;

/// A shell in namespaces of its own.
fn unshared() -> Command {
    let mut command = Command::new("unshare");
    command.args(["--user", "--map-root-user", "--net", "--mount", "sh"]);
    command
}

fn text(output: &Output) -> String {
    let out = String::from_utf8_lossy(&output.stdout);
    format!("{out}{}", String::from_utf8_lossy(&output.stderr))
}

#[test]
fn connections_between_hosts_stay_with_the_kernel() {
    let probe =
        "ip link add v0 type veth peer name v1 && mount -t tmpfs none /dev/shm && nsenter -V";
    let can = unshared().args(["-c", probe]).output();
    let can = can.is_ok_and(|output| output.status.success());
    if !needs::met(can, "iproute2 (and user namespaces)") {
        return;
    }
    let Some(mut compiler) = needs::compiler() else { return };
    let tests = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests");
    let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR"));
    let program = folder.join("sockets-hosts");
    compiler.args(["-O1", "-Wall", "-Wextra", "-Werror", "-o"]).arg(&program);
    assert!(compiler.arg(tests.join("c/hosts.c")).status().unwrap().success());
    let library = cdylib::built(&["-p", "quipu-sockets-preload"], "quipu_sockets_preload");
    let mut command = unshared();
    command.arg(tests.join("two-hosts.sh")).arg(&program).arg(library).current_dir(&folder);
    let said = text(&command.env_remove("LD_PRELOAD").output().unwrap());
    // The library at both ends, at the server's, at the client's, at none. 3: the other end is not on this
    // host. -1: no report, since the library is not there.
    let expected: String = ["10.9.0.1", "fd09::1"]
        .map(|address| {
            let ends = ["done 3 0", "done -1 0"];
            let lines =
                ends.map(|server| ends.map(|client| format!("{address}: {server}, {client}\n")));
            lines.concat().concat()
        })
        .concat();
    assert_eq!(said, expected);
}
