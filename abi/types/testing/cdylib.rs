//! For the tests of the C libraries: cargo builds no cdylib for a test, so a test asks it to.
//! Included by path, since it belongs to no library.

use std::env;
use std::path::PathBuf;
use std::process::{Command, Stdio};

/// Runs `cargo build` with arguments that name what to build, and gives the file of its library,
/// `lib<name>.so`. `make check`, which tests the whole workspace and sets `QUIPU_TEST_ALL`, has just built
/// all but that file, with the features that all packages together ask of their dependencies; one
/// package alone asks for fewer, so that everything it needs would be built once more.
pub fn built(what: &[&str], name: &str) -> PathBuf {
    let workspace = env::var_os("QUIPU_TEST_ALL").is_some();
    let what = if workspace { &["--workspace", "--all-targets"] } else { what };
    let mut build = Command::new(env!("CARGO"));
    // What cargo says of the package that it tests would have some build scripts run again, and all that
    // depends on them built again.
    let names = env::vars_os().filter_map(|(name, _)| name.into_string().ok());
    for name in names.filter(|name| {
        ["CARGO_PKG_", "CARGO_MANIFEST_"].iter().any(|start| name.starts_with(start))
    }) {
        build.env_remove(name);
    }
    let build = build
        .args(["build", "-q", "--message-format=json-render-diagnostics"])
        .args(what)
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .stderr(Stdio::inherit())
        .output()
        .expect("cargo runs");
    assert!(build.status.success(), "cargo build {what:?}");
    let messages = String::from_utf8(build.stdout).expect("cargo writes text");
    let suffix = format!("/lib{name}.so");
    // Of cargo's messages only one string is wanted, so they are not parsed further.
    let found = messages.split('"').find(|text| text.ends_with(&suffix));
    PathBuf::from(found.expect("cargo names the library"))
}
