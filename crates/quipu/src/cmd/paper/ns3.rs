//! Compiles and runs our program for ns-3, for step V4 of the validation ladder.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use quipu_paper::ns3::{LIBRARIES, Ns3, PACKAGES, PATHS, SOURCE};

/// Compiles the program and runs it for all paths.
pub(super) fn run() -> Ns3 {
    match transfers() {
        Ok(found) => found,
        Err(error) => Ns3::Failed(error.to_string()),
    }
}

/// A folder that only this user may use, for the time of the run.
struct Folder(PathBuf);

impl Folder {
    fn new() -> io::Result<Self> {
        use std::os::unix::fs::DirBuilderExt;
        let folder = std::env::temp_dir().join(format!("quipu-ns3-{}", std::process::id()));
        // It fails if there is such a folder, which may be another user's.
        fs::DirBuilder::new().mode(0o700).create(&folder)?;
        Ok(Self(folder))
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn transfers() -> io::Result<Ns3> {
    let folder = Folder::new()?;
    let (source, program) = (folder.0.join("bulk.cc"), folder.0.join("bulk"));
    fs::write(&source, SOURCE)?;
    let compiled = match compile(&source, &program) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            return Ok(Ns3::Missing(format!(
                "there is no c++; Debian: apt-get install {PACKAGES}"
            )));
        }
        other => other?,
    };
    let why = String::from_utf8_lossy(&compiled.stderr);
    if !compiled.status.success() {
        let is_missing = why.lines().any(|line| {
            (line.contains("ns3/") && line.contains("No such file"))
                || line.contains("cannot find -lns3")
        });
        let last = why.lines().last().unwrap_or_default();
        return Ok(match is_missing {
            true => {
                Ns3::Missing(format!("ns-3 is not installed; Debian: apt-get install {PACKAGES}"))
            }
            false => Ns3::Failed(format!("our program for ns-3 does not compile: {last}")),
        });
    }
    let mut outputs = Vec::new();
    for path in PATHS {
        let ran = Command::new(&program).args(path.arguments()).stdin(Stdio::null()).output()?;
        if !ran.status.success() {
            let why = String::from_utf8_lossy(&ran.stderr).trim().to_owned();
            return Ok(Ns3::Failed(format!(
                "our program for ns-3 ended with {}: {why}",
                ran.status
            )));
        }
        outputs.push(String::from_utf8_lossy(&ran.stdout).into_owned());
    }
    Ok(Ns3::Ran(outputs))
}

fn compile(source: &Path, program: &Path) -> io::Result<Output> {
    let libraries = LIBRARIES.map(|name| format!("-l{name}"));
    let mut command = Command::new("c++");
    command.args(["-std=c++17", "-O1", "-o"]).arg(program).arg(source).args(libraries);
    command.env("LC_ALL", "C").stdin(Stdio::null()).output()
}
