//! Where lines go: a file, or standard error.

use std::ffi::OsString;
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU8, AtomicU32, Ordering};

use quipu_cabi::Errno;

use crate::call::Finished;

/// Names the file of the trace: `-` for standard error. `%p` in it stands for the process; a name that
/// ends in `.json` or `.jsonl` asks for JSON.
const VARIABLE: &str = "QUIPU_TRACE";

const UNKNOWN: u8 = 0;
const OFF: u8 = 1;
const ON: u8 = 2;

static STATE: AtomicU8 = AtomicU8::new(UNKNOWN);
static SINK: OnceLock<Sink> = OnceLock::new();

/// Whether calls are traced. It stays as it is for the life of the process.
#[inline]
pub fn is_on() -> bool {
    match STATE.load(Ordering::Relaxed) {
        OFF => false,
        ON => true,
        _ => start(),
    }
}

/// Where the lines of this process go.
pub(crate) struct Sink {
    file: Option<File>,
    /// The file's name before `%p` is replaced, if it is in there, and whose number replaced it: a
    /// child of fork has a file of its own.
    per_process: Option<OsString>,
    owner: AtomicU32,
    json: bool,
}

#[cold]
fn start() -> bool {
    let errno = Errno::last();
    let wanted = std::env::var_os(VARIABLE).filter(|name| !name.is_empty());
    let sink = wanted.and_then(|name| {
        let opened = Sink::open(&name);
        opened
            .inspect_err(|error| {
                let name = Path::new(&name).display();
                let line = format!("quipu: calls cannot be traced in {name}: {error}\n");
                let _ = std::io::stderr().write_all(line.as_bytes());
            })
            .ok()
    });
    let on = match sink {
        Some(sink) => {
            let _ = SINK.set(sink);
            true
        }
        None => false,
    };
    STATE.store(if on { ON } else { OFF }, Ordering::Relaxed);
    errno.set();
    on
}

/// Opens the file of a process to append to it; others may do the same.
fn append(name: &OsString) -> std::io::Result<File> {
    let process = std::process::id().to_string();
    let name = name.to_string_lossy().replace("%p", &process);
    OpenOptions::new().create(true).append(true).mode(0o600).open(name)
}

impl Sink {
    pub(crate) fn open(name: &OsString) -> std::io::Result<Self> {
        let path = Path::new(name);
        let extension = path.extension().unwrap_or_default();
        let (json, stderr) = (extension == "json" || extension == "jsonl", name == "-");
        let file = if stderr { None } else { Some(append(name)?) };
        let many = !stderr && name.to_string_lossy().contains("%p");
        let owner = AtomicU32::new(std::process::id());
        Ok(Self { file, per_process: many.then(|| name.clone()), owner, json })
    }

    /// Writes a line, in one piece: other threads and processes may write to the same file.
    fn write(&self, call: &Finished<'_>) {
        let line = if self.json { call.json() } else { call.text() };
        // A program goes on whose trace cannot be written.
        let _ = match &self.file {
            Some(file) => (&*file).write_all(line.as_bytes()),
            None => std::io::stderr().write_all(line.as_bytes()),
        };
    }

    /// In a child of fork, has the lines go to a file of its own, if there is one for each process.
    fn follow_fork(&self) {
        let (Some(name), Some(file)) = (&self.per_process, &self.file) else { return };
        let process = std::process::id();
        if self.owner.swap(process, Ordering::Relaxed) == process {
            return;
        }
        let Ok(own) = append(name) else { return };
        // The descriptor keeps its number, so nothing that other threads use is taken away.
        // SAFETY: both descriptors are open; `dup3` closes nothing but the second, which is ours.
        unsafe {
            libc::dup3(own.as_raw_fd(), file.as_raw_fd(), libc::O_CLOEXEC);
        }
    }
}

/// Writes what is known of a call to where this process writes its trace.
pub(crate) fn write(call: &Finished<'_>) {
    if let Some(sink) = SINK.get() {
        sink.follow_fork();
        sink.write(call);
    }
}
