//! What tests need that a system may not have. Included by path, since it belongs to no library.

use std::env;

/// Whether something is there for a test; if not, says which package has it. `make check`, which installs
/// those packages, sets `QUIPU_TEST_ALL`: then a test that cannot do its work fails.
pub fn met(is_there: bool, package: &str) -> bool {
    if !is_there {
        assert!(env::var_os("QUIPU_TEST_ALL").is_none(), "this test needs the package {package}");
        eprintln!("skipped: {package} is not installed");
    }
    is_there
}
