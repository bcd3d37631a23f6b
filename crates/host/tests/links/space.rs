//! Network namespaces for tests: a test runs again, in a process of its own in a new namespace, where it may
//! make interfaces. Without the right to that it is skipped, and says so.

use std::process::Command;

/// Set for the run inside.
const INSIDE: &str = "INSIDE_A_NAMESPACE";

/// A command in a new network namespace: as root there if not here.
fn unshare() -> Command {
    let mut command = Command::new("unshare");
    // SAFETY: takes nothing and cannot fail.
    let root = unsafe { libc::geteuid() } == 0;
    command.arg(if root { "-n" } else { "-rn" });
    command
}

/// Runs the test `name` in a namespace of its own: true inside of it. Outside it waits for the one inside.
pub fn inside(name: &str) -> bool {
    if std::env::var_os(INSIDE).is_some() {
        ip("link set lo up");
        return true;
    }
    let possible = unshare().args(["ip", "link", "set", "lo", "up"]).output();
    if !possible.is_ok_and(|output| output.status.success()) {
        println!("SKIPPED: no network namespaces here");
        return false;
    }
    let output = unshare()
        .arg(std::env::current_exe().unwrap())
        .args(["--exact", name, "--nocapture"])
        .env(INSIDE, "1")
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{said}{}", String::from_utf8_lossy(&output.stderr));
    if let Some(line) = said.lines().find(|line| line.starts_with("SKIPPED")) {
        println!("{line}");
    }
    false
}

/// Runs `ip` with these arguments.
pub fn ip(arguments: &str) {
    let status = Command::new("ip").args(arguments.split_whitespace()).status().unwrap();
    assert!(status.success(), "ip {arguments}");
}

/// Takes this thread's capabilities away (capset(2)).
pub fn drop_rights() {
    /// _LINUX_CAPABILITY_VERSION_3.
    const VERSION: u32 = 0x2008_0522;
    let (header, nothing) = ([VERSION, 0], [0u32; 6]);
    // SAFETY: the kernel reads a header and two sets of three words from live arrays.
    let done = unsafe {
        libc::syscall(libc::SYS_capset, (&raw const header).cast_mut(), &raw const nothing)
    };
    assert_eq!(done, 0, "{}", std::io::Error::last_os_error());
}
