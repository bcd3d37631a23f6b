//! Which programs and cargo components there are.

use std::env;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// Where a program lies, by PATH and the folders for administrators.
pub(crate) fn find(program: &str) -> Option<PathBuf> {
    let path = env::var_os("PATH").unwrap_or_default();
    let extra = ["/usr/sbin", "/sbin"].map(PathBuf::from);
    env::split_paths(&path).chain(extra).map(|dir| dir.join(program)).find(|file| is_program(file))
}

fn is_program(file: &Path) -> bool {
    use std::os::unix::fs::PermissionsExt;
    file.metadata().is_ok_and(|data| data.is_file() && data.permissions().mode() & 0o111 != 0)
}

/// Whether `cargo NAME` works. A component of rustup that is missing is added if rustup is there.
pub(crate) fn cargo_has(name: &str, component: Option<&str>) -> bool {
    let works = || {
        let mut command = crate::cargo();
        command.args([name, "--version"]).stdout(Stdio::null()).stderr(Stdio::null());
        command.status().is_ok_and(|status| status.success())
    };
    if works() {
        return true;
    }
    component.is_some_and(add) && works()
}

/// Whether rustc has the standard library for that target.
pub(crate) fn has_target(triple: &str) -> bool {
    let mut command = Command::new("rustc");
    command.args(["--print", "target-libdir", "--target", triple]).stderr(Stdio::null());
    let Ok(output) = command.output() else { return false };
    let folder = String::from_utf8_lossy(&output.stdout);
    output.status.success() && Path::new(folder.trim()).is_dir()
}

/// The machine that rustc runs on, by its name for it.
pub(crate) fn host() -> Option<String> {
    let output = Command::new("rustc").arg("-vV").output().ok()?;
    let text = String::from_utf8(output.stdout).ok()?;
    text.lines().find_map(|line| line.strip_prefix("host: ")).map(str::to_owned)
}

/// The program of rustc's own LLVM that puts profiles together. It is a component of rustup, which is added
/// where it is missing.
pub(crate) fn llvm_profdata(host: &str) -> Option<PathBuf> {
    let mut command = Command::new("rustc");
    command.args(["--print", "target-libdir", "--target", host]);
    let libraries = command.output().ok().filter(|output| output.status.success())?;
    let libraries = String::from_utf8(libraries.stdout).ok()?;
    let program = Path::new(libraries.trim()).with_file_name("bin").join("llvm-profdata");
    (program.is_file() || add("llvm-tools") && program.is_file()).then_some(program)
}

/// Adds a component of the toolchain, if rustup is there.
fn add(component: &str) -> bool {
    if find("rustup").is_none() {
        return false;
    }
    println!("adding the component {component} with rustup");
    let added = Command::new("rustup").args(["component", "add", component]).status();
    added.is_ok_and(|status| status.success())
}
