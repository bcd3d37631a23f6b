//! What the tests share that run C programs over this library.

use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::OnceLock;
use std::{env, fs};

#[path = "../../../../types/testing/cdylib.rs"]
mod cdylib;
#[path = "../../../../types/testing/needs.rs"]
pub mod needs;
#[path = "../../../../types/testing/network.rs"]
mod network;

/// A folder with the libraries under the names that programs look for.
pub struct Folder(PathBuf);

impl Folder {
    /// Makes a folder of that name with the facade and an engine: what cargo is to build, and the
    /// name of its library.
    pub fn new(name: &str, engine: &[&str], library: &str) -> Self {
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
        let _ = fs::remove_dir_all(&folder);
        fs::create_dir_all(&folder).unwrap();
        // Files, not links: the facade looks for the engine where it was itself loaded from.
        let facade = cdylib::built(&["-p", "quipu-ibverbs"], "ibverbs");
        fs::copy(facade, folder.join("libibverbs.so.1")).unwrap();
        symlink("libibverbs.so.1", folder.join("libibverbs.so")).unwrap();
        let engine = cdylib::built(engine, library);
        fs::copy(engine, folder.join("libquipu_engine.so")).unwrap();
        Self(folder)
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.0
    }

    /// Has a program find our library in place of the system's.
    pub fn put_in_front(&self, command: &mut Command) {
        let preload = self.0.join("libibverbs.so.1");
        command.env("LD_LIBRARY_PATH", &self.0).env("LD_PRELOAD", preload);
    }

    /// Runs a program with our library in place of the system's, at the address of a loopback of its own.
    pub fn run_alone(&self, program: impl AsRef<Path>, variables: &[(&str, &str)]) -> Output {
        let mut command = Command::new(program.as_ref());
        network::of_its_own(&mut command);
        self.put_in_front(
            command.env("QUIPU_ADDRESS", "127.0.0.1").envs(variables.iter().copied()),
        );
        command.output().expect("the program starts")
    }

    /// Runs a program with our library in place of the system's.
    pub fn run(&self, program: impl AsRef<Path>, arguments: &[&str]) -> Output {
        let mut command = Command::new(program.as_ref());
        self.put_in_front(command.args(arguments));
        command.output().expect("the program starts")
    }
}

/// The facade over the real engine.
pub fn over_engine() -> &'static Folder {
    static FOLDER: OnceLock<Folder> = OnceLock::new();
    FOLDER.get_or_init(|| Folder::new("engine", &["-p", "quipu-engine"], "quipu_engine"))
}

/// Compiles `c/<name>.c`; none where the headers are not installed, or the compiler is for another machine.
pub fn compiled(name: &str) -> Option<PathBuf> {
    if !needs::met(Path::new("/usr/include/infiniband/verbs.h").exists(), "libibverbs-dev") {
        return None;
    }
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("tests/c/{name}.c"));
    let program = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    let arguments = ["-Wall", "-Wextra", "-Werror", "-O1", "-g", "-o"];
    let mut compile = needs::compiler()?;
    compile.args(arguments).arg(&program).arg(source).args(["-libverbs", "-lpthread"]);
    assert!(compile.status().expect("cc").success());
    Some(program)
}

/// What a run printed; it must have succeeded.
pub fn printed(output: Output) -> String {
    let complaint = String::from_utf8_lossy(&output.stderr);
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{text}\n{complaint}");
    text.into_owned()
}
