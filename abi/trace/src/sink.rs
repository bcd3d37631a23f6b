//! Where lines go: a file, or standard error.

use std::ffi::{OsStr, OsString};
use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicPtr, AtomicU8, Ordering};

use quipu_cabi::descriptors::move_file_up;
use quipu_cabi::{Errno, is_per_process, per_process, spared};

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
    /// The name of the file; none for standard error.
    name: Option<OsString>,
    place: AtomicPtr<Place>,
    json: bool,
}

/// The file of the trace. Once it is another's it is given up as it is: its number may be the program's by
/// now.
struct Place {
    file: File,
    /// Device and inode.
    identity: (u64, u64),
    process: u32,
}

#[cold]
fn start() -> bool {
    let errno = Errno::last();
    let wanted = std::env::var_os(VARIABLE).filter(|name| !name.as_bytes().trim_ascii().is_empty());
    let sink = wanted.and_then(|name| {
        let opened = Sink::open(&name);
        opened
            .inspect_err(|error| {
                let name = Path::new(&name).display();
                let line = format!("quipu: cannot write the trace of calls to {name}: {error}\n");
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

impl Place {
    /// Opens the file of this process to add to it; others may do the same.
    fn open(name: &OsStr) -> io::Result<Self> {
        let mut options = OpenOptions::new();
        options.create(true).append(true).mode(0o600);
        let file = move_file_up(options.open(per_process(name))?)?;
        let identity = identity(&file)?;
        Ok(Self { file, identity, process: std::process::id() })
    }

    /// Whether the descriptor is still that of the file: programs that close all that they do not know, as
    /// daemons do, have others by its number later. And a child of fork has a file of its own if the process
    /// is in its name.
    fn is_current(&self, name: &OsStr) -> bool {
        let of_process = !is_per_process(name) || self.process == std::process::id();
        of_process && identity(&self.file).is_ok_and(|identity| identity == self.identity)
    }
}

fn identity(file: &File) -> io::Result<(u64, u64)> {
    file.metadata().map(|data| (data.dev(), data.ino()))
}

impl Sink {
    pub(crate) fn open(name: &OsString) -> io::Result<Self> {
        let extension = Path::new(name).extension().unwrap_or_default();
        let json = extension == "json" || extension == "jsonl";
        if name == "-" {
            return Ok(Self { name: None, place: AtomicPtr::default(), json });
        }
        let place = Box::into_raw(Box::new(Place::open(name)?)).into();
        Ok(Self { name: Some(name.clone()), place, json })
    }

    /// Writes a line, in one piece: other threads and processes may write to the same file.
    pub(crate) fn write(&self, call: &Finished<'_>) {
        let line = if self.json { call.json() } else { call.text() };
        // A program goes on whose trace cannot be written.
        let _ = spared(|| match &self.name {
            Some(name) => self.place(name).and_then(|mut file| file.write_all(line.as_bytes())),
            None => io::stderr().write_all(line.as_bytes()),
        });
    }

    /// The file, opened anew if it has become another's.
    fn place(&self, name: &OsStr) -> io::Result<&'static File> {
        let old = self.place.load(Ordering::Acquire);
        // SAFETY: places are never freed.
        let place: &'static Place = unsafe { &*old };
        if place.is_current(name) {
            return Ok(&place.file);
        }
        let own = Box::into_raw(Box::new(Place::open(name)?));
        match self.place.compare_exchange(old, own, Ordering::AcqRel, Ordering::Acquire) {
            // SAFETY: as above.
            Ok(_) => Ok(unsafe { &(*own).file }),
            Err(others) => {
                // SAFETY: nobody else has seen ours; of another thread as above.
                unsafe {
                    drop(Box::from_raw(own));
                    Ok(&(*others).file)
                }
            }
        }
    }
}

/// Writes what is known of a call to where this process writes its trace.
pub(crate) fn write(call: &Finished<'_>) {
    if let Some(sink) = SINK.get() {
        sink.write(call);
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::time::Duration;

    use super::*;
    use quipu_cabi::descriptors::with_raised_limit;
    use std::os::fd::AsRawFd;

    #[test]
    fn a_line_does_not_go_to_what_the_program_has_opened_by_the_same_number() {
        let place = |name: &str| {
            std::env::temp_dir().join(format!("quipu-sink-{}-{name}", std::process::id()))
        };
        let (trace, data) = (place("trace"), place("data"));
        let sink = Sink::open(&trace.clone().into_os_string()).unwrap();
        let call = Finished {
            function: "ibv_test",
            args: Vec::new(),
            result: None,
            errno: None,
            began: Duration::ZERO,
            lasted: Duration::ZERO,
            times: 1,
        };
        sink.write(&call);
        let own = File::create(&data).unwrap();
        // SAFETY: never freed.
        let number = unsafe { (*sink.place.load(Ordering::Relaxed)).file.as_raw_fd() };
        // SAFETY: both are descriptors of this test, of which the second is given up.
        let taken = with_raised_limit(|| unsafe { libc::dup2(own.as_raw_fd(), number) });
        assert_eq!(taken, number);
        sink.write(&call);
        sink.write(&call);
        assert_eq!(fs::read(&data).unwrap(), b"");
        assert_eq!(fs::read_to_string(&trace).unwrap().lines().count(), 3);
        for file in [trace, data] {
            fs::remove_file(file).unwrap();
        }
    }
}
