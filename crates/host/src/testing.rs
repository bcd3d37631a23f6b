//! What tests of several modules share.

use std::process::Command;

/// Lets this process, of one test alone, have so many descriptors.
pub(crate) fn limit_descriptors(most: u64) {
    let limit = libc::rlimit { rlim_cur: most, rlim_max: most };
    // SAFETY: the kernel reads one struct.
    assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit) }, 0);
}

/// Runs a test, `test` being its whole name, again in a process of its own, where this is true: children of
/// fork would keep the sockets and locks of other tests for as long as they live.
pub(crate) fn is_alone(test: &str) -> bool {
    const ALONE: &str = "QUIPU_TEST_ALONE";
    if std::env::var_os(ALONE).is_some() {
        return true;
    }
    let mut command = Command::new(std::env::current_exe().unwrap());
    let output = command.args(["--exact", test, "--nocapture"]).env(ALONE, "1").output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(said.contains("1 passed"), "{said}{}", String::from_utf8_lossy(&output.stderr));
    false
}
