//! For the tests of the C libraries: cargo builds no cdylib for a test, so a test asks it to.
//! Included by path, since it belongs to no library.

use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::OnceLock;

/// Builds a package and gives the file of its library, `lib<name>.so`. Each test program asks for
/// one package only, as often as it likes.
pub fn built(package: &str, name: &str) -> PathBuf {
    static DONE: OnceLock<PathBuf> = OnceLock::new();
    let file = DONE.get_or_init(|| {
        let build = Command::new(env!("CARGO"))
            .args([
                "build",
                "-q",
                "-p",
                package,
                "--message-format=json-render-diagnostics",
            ])
            .current_dir(env!("CARGO_MANIFEST_DIR"))
            .stderr(Stdio::inherit())
            .output()
            .expect("cargo runs");
        assert!(build.status.success(), "cargo build -p {package}");
        let messages = String::from_utf8(build.stdout).expect("cargo writes text");
        let suffix = format!("/lib{name}.so");
        // Of cargo's messages only one string is wanted, so they are not parsed further.
        let found = messages.split('"').find(|text| text.ends_with(&suffix));
        PathBuf::from(found.expect("cargo names the library"))
    });
    file.clone()
}
