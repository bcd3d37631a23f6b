//! What tests need that a system may not have. Included by path, since it belongs to no library.

use std::env;
use std::process::Command;

/// Whether something is there for a test; if not, says which package has it. `make check`, which installs
/// those packages, sets `QUIPU_TEST_ALL`: then a test that cannot do its work fails.
pub fn met(is_there: bool, package: &str) -> bool {
    if !is_there {
        assert!(env::var_os("QUIPU_TEST_ALL").is_none(), "this test needs the package {package}");
        eprintln!("skipped: {package} is not installed");
    }
    is_there
}

/// The C compiler. None where it compiles for another machine than this test was compiled for, as where the
/// test runs under an emulator.
pub fn compiler() -> Option<Command> {
    let said = Command::new("cc").arg("-dumpmachine").output().expect("cc");
    let machine = String::from_utf8_lossy(&said.stdout);
    let same = machine.starts_with(env::consts::ARCH);
    if !same {
        eprintln!("skipped: cc compiles for {}, not for {}", machine.trim(), env::consts::ARCH);
    }
    same.then(|| Command::new("cc"))
}
