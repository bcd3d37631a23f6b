//! `quipu splitc cc`: runs the preprocessor, the translator, the system's compiler and the linker.

use std::ffi::{OsStr, OsString};
use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};

use crate::{join_strings, translate};

/// The headers and the start-up code of programs.
const FILES: [(&str, &str); 3] = [
    ("split-c/split-c.h", include_str!("../include/split-c/split-c.h")),
    ("split-c/control.h", include_str!("../include/split-c/control.h")),
    ("start.c", include_str!("../include/start.c")),
];
/// C as programs of the 1990s use it, and the C of today as far as the two go together. Common variables and
/// fixed addresses are what those programs are built on.
const DIALECT: [&str; 4] = ["-std=gnu99", "-fgnu89-inline", "-fcommon", "-fno-pie"];
const QUIET: [&str; 2] = ["-Wno-implicit-int", "-Wno-implicit-function-declaration"];

/// Why nothing was compiled.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DriverError {
    /// The command line makes no sense.
    #[error("{0}")]
    Usage(String),
    /// A file cannot be read or written.
    #[error("{}: {source}", file.display())]
    File {
        /// Which.
        file: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The system's compiler cannot be run.
    #[error(
        "cannot run the C compiler {command:?}: {source}; install one (apt-get install gcc), or name one in CC"
    )]
    Compiler {
        /// Its name.
        command: String,
        /// Why.
        source: io::Error,
    },
    /// The program has an error.
    #[error(transparent)]
    Program(#[from] crate::Error),
}

/// What the command line asks for.
#[derive(Debug, Default)]
struct Request {
    inputs: Vec<PathBuf>,
    output: Option<PathBuf>,
    /// Stop after compiling.
    objects_only: bool,
    /// Stop after translating.
    translate_only: bool,
    /// For all steps, the preprocessor's, and the linker's.
    common: Vec<OsString>,
    preprocess: Vec<OsString>,
    link: Vec<OsString>,
}

/// A folder for what lies between the steps; removed at the end.
struct Scratch(PathBuf);

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// Compiles and links as a C compiler does with these arguments. `library` is the folder of
/// `libsplitc.so`. The exit code: that of the step that failed, or 0.
///
/// # Errors
/// If the arguments make no sense, a file cannot be read, or the program cannot be translated.
pub fn run(args: &[OsString], library: &Path) -> Result<u8, DriverError> {
    let request = Request::parse(args)?;
    let scratch = Scratch::new()?;
    let mut objects = Vec::new();
    for (number, input) in request.inputs.iter().enumerate() {
        if input.extension().is_none_or(|extension| extension != "sc") {
            objects.push(input.clone());
            continue;
        }
        let text = match request.translated(input, &scratch.0)? {
            Ok(text) => text,
            Err(code) => return Ok(code),
        };
        if request.translate_only {
            let written = match &request.output {
                Some(file) => fs::write(file, text),
                None => io::stdout().write_all(text.as_bytes()),
            };
            written.map_err(|source| DriverError::File { file: input.clone(), source })?;
            continue;
        }
        let object = match (&request.output, request.objects_only) {
            (Some(output), true) => output.clone(),
            (None, true) => {
                PathBuf::from(input.file_stem().unwrap_or_default()).with_extension("o")
            }
            _ => scratch.0.join(format!("{number}.o")),
        };
        let code = request.compile(&text, &scratch.0.join(format!("{number}.i")), &object)?;
        if code != 0 {
            return Ok(code);
        }
        objects.push(object);
    }
    if request.objects_only || request.translate_only {
        return Ok(0);
    }
    request.link(&objects, &scratch.0, library)
}

impl Scratch {
    fn new() -> Result<Self, DriverError> {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = format!("quipu-splitc-{}-{number}", std::process::id());
        let folder = std::env::temp_dir().join(name);
        let make = |file: &Path, text: &str| {
            if let Some(parent) = file.parent() {
                fs::create_dir_all(parent)?;
            }
            fs::write(file, text)
        };
        let failed = |file: &Path| {
            let file = file.to_owned();
            move |source| DriverError::File { file, source }
        };
        // Nobody else's folder: it must not be there.
        fs::create_dir(&folder).map_err(failed(&folder))?;
        let scratch = Self(folder);
        for (name, text) in FILES {
            let file = scratch.0.join(name);
            make(&file, text).map_err(failed(&file))?;
        }
        Ok(scratch)
    }
}

fn compiler() -> String {
    std::env::var("CC").ok().filter(|name| !name.is_empty()).unwrap_or_else(|| "cc".into())
}

fn run_compiler(command: &mut Command) -> Result<u8, DriverError> {
    let status = command.status().map_err(not_run)?;
    Ok(status.code().map_or(1, |code| code.clamp(0, 255) as u8))
}

fn not_run(source: io::Error) -> DriverError {
    DriverError::Compiler { command: compiler(), source }
}

impl Request {
    fn parse(args: &[OsString]) -> Result<Self, DriverError> {
        let mut request = Self::default();
        let mut args = args.iter();
        while let Some(arg) = args.next() {
            let text = arg.to_string_lossy();
            let mut value = || {
                let missing = || DriverError::Usage(format!("the option {text} has no value"));
                args.next().cloned().ok_or_else(missing)
            };
            match &text[..] {
                "-o" => request.output = Some(value()?.into()),
                "-c" => request.objects_only = true,
                "--translate" => request.translate_only = true,
                "-I" | "-D" | "-U" | "-include" | "-isystem" | "-iquote" => {
                    let value = value()?;
                    request.preprocess.extend([arg.clone(), value]);
                }
                "-L" | "-l" | "-Xlinker" => {
                    let value = value()?;
                    request.link.extend([arg.clone(), value]);
                }
                _ if ["-I", "-D", "-U"].iter().any(|option| text.starts_with(option)) => {
                    request.preprocess.push(arg.clone());
                }
                _ if ["-L", "-l", "-Wl,"].iter().any(|option| text.starts_with(option)) => {
                    request.link.push(arg.clone());
                }
                "-E" | "-S" | "-fpie" | "-fPIE" | "-pie" => {
                    return Err(DriverError::Usage(format!("the option {text} is not supported")));
                }
                _ if text.starts_with('-') => request.common.push(arg.clone()),
                _ => request.inputs.push(arg.into()),
            }
        }
        if request.inputs.is_empty() {
            return Err(DriverError::Usage("no input files; name at least one FILE.sc".into()));
        }
        let many = request.inputs.len() > 1 && (request.objects_only || request.translate_only);
        if many && request.output.is_some() {
            return Err(DriverError::Usage("-o names one file, and there would be several".into()));
        }
        Ok(request)
    }

    /// The C text of a file, or the exit code of the preprocessor.
    fn translated(&self, input: &Path, include: &Path) -> Result<Result<String, u8>, DriverError> {
        let failed = |source| DriverError::File { file: input.to_owned(), source };
        let text = fs::read(input).map_err(failed)?;
        let text = join_strings(&String::from_utf8_lossy(&text));
        let folder = input.parent().filter(|parent| !parent.as_os_str().is_empty());
        let mut command = Command::new(compiler());
        command.args(["-E", "-x", "c", "-D__SPLITC__"]).args(DIALECT).args(&self.common);
        command.arg("-iquote").arg(folder.unwrap_or(Path::new("."))).args(&self.preprocess);
        command.arg("-isystem").arg(include).args(["-include", "split-c/split-c.h", "-"]);
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().map_err(not_run)?;
        let name = input.display().to_string().replace('\\', "\\\\").replace('"', "\\\"");
        let text = format!("# 1 \"{name}\"\n{text}\n");
        let mut stdin = child.stdin.take();
        let writer = std::thread::spawn(move || {
            // A preprocessor that has given up says why itself.
            let _ = stdin.as_mut().map(|stdin| stdin.write_all(text.as_bytes()));
        });
        let output = child.wait_with_output().map_err(not_run)?;
        let _ = writer.join();
        if !output.status.success() {
            return Ok(Err(output.status.code().map_or(1, |code| code.clamp(1, 255) as u8)));
        }
        let optimize =
            self.common.iter().rev().find(|option| option.to_string_lossy().starts_with("-O"));
        let optimize = optimize.is_some_and(|option| option != "-O0");
        Ok(Ok(translate(&String::from_utf8_lossy(&output.stdout), optimize)?))
    }

    fn compile(&self, text: &str, file: &Path, object: &Path) -> Result<u8, DriverError> {
        let failed = |source| DriverError::File { file: file.to_owned(), source };
        fs::write(file, text).map_err(failed)?;
        let mut command = Command::new(compiler());
        command.args(DIALECT).args(QUIET).args(&self.common).args(["-x", "cpp-output", "-c"]);
        command.arg(file).arg("-o").arg(object);
        run_compiler(&mut command)
    }

    fn link(&self, objects: &[PathBuf], scratch: &Path, library: &Path) -> Result<u8, DriverError> {
        let mut command = Command::new(compiler());
        command
            .args(DIALECT)
            .arg("-no-pie")
            .args(&self.common)
            .args(&self.preprocess)
            .args(objects);
        command.arg(scratch.join("start.c"));
        command.arg("-o").arg(self.output.as_deref().unwrap_or(Path::new("a.out")));
        let search = [OsStr::new("-Wl,-rpath,"), library.as_os_str()].join(OsStr::new(""));
        command.args(&self.link).arg("-L").arg(library).arg(search);
        command.args(["-lsplitc", "-lm"]);
        run_compiler(&mut command)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(line: &str) -> Result<Request, DriverError> {
        Request::parse(&line.split(' ').map(OsString::from).collect::<Vec<_>>())
    }

    #[test]
    fn options_go_to_the_steps_that_they_are_for() {
        let request = parse("-O2 -DN=4 -I inc a.sc b.o -lfoo -o prog -Wall").unwrap();
        assert_eq!(request.inputs, [Path::new("a.sc"), Path::new("b.o")]);
        assert_eq!(request.common, ["-O2", "-Wall"]);
        assert_eq!(request.preprocess, ["-DN=4", "-I", "inc"]);
        assert_eq!(request.link, ["-lfoo"]);
        assert_eq!(request.output.as_deref(), Some(Path::new("prog")));
        for bad in ["-O", "a.sc -o", "a.sc b.sc -c -o x", "a.sc -pie"] {
            assert!(parse(bad).is_err(), "{bad}");
        }
    }
}
