//! Temporary folders that vanish when they are no longer needed.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Once;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

/// How the names of all of them begin; the process's number follows.
const NAME: &str = "quipu-bench-";
/// Nothing lives so long; a process that seems to be gone may be one of another container.
const OLD: Duration = Duration::from_hours(2);

/// A folder for temporary files. Its removal takes them along.
pub(crate) struct Scratch(PathBuf);

impl Scratch {
    /// A new, empty folder with `name` in its name.
    ///
    /// # Errors
    ///
    /// It cannot be created.
    pub(crate) fn new(name: &str) -> io::Result<Self> {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        static SWEPT: Once = Once::new();
        SWEPT.call_once(|| sweep(&std::env::temp_dir()));
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let folder = format!("{NAME}{}-{number}-{name}", std::process::id());
        let path = std::env::temp_dir().join(folder);
        // A folder that is there already was made by somebody else.
        fs::create_dir(&path)?;
        Ok(Self(path))
    }

    /// The folder.
    pub(crate) fn path(&self) -> &Path {
        &self.0
    }

    /// Writes a file; where it is.
    ///
    /// # Errors
    ///
    /// It cannot be written.
    pub(crate) fn write(&self, name: &str, bytes: &[u8]) -> io::Result<PathBuf> {
        let path = self.0.join(name);
        fs::write(&path, bytes)?;
        Ok(path)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// Removes what benchmarks left behind that were ended by a signal. Others' is not ours to remove, nor to
/// complain about.
fn sweep(folder: &Path) {
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let rest = name.to_str().and_then(|name| name.strip_prefix(NAME));
        let process = rest.and_then(|rest| rest.split('-').next()?.parse::<u32>().ok());
        let old = entry.metadata().and_then(|it| it.modified()).ok();
        let old = old.and_then(|at| at.elapsed().ok()).is_some_and(|age| age > OLD);
        if old && process.is_some_and(|it| !Path::new(&format!("/proc/{it}")).exists()) {
            let _ = fs::remove_dir_all(entry.path());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_left_behind_is_removed_one_day() {
        let scratch = Scratch::new("sweep").unwrap();
        let folder = |process: u32, name: &str, old: bool| {
            let path = scratch.path().join(format!("{name}{process}-0-mpi"));
            fs::create_dir(&path).unwrap();
            fs::write(path.join("mpi.c"), "").unwrap();
            let age = if old { OLD * 2 } else { Duration::ZERO };
            let at = std::time::SystemTime::now() - age;
            fs::File::open(&path).unwrap().set_modified(at).unwrap();
            path
        };
        // No process has that number.
        let dead = u32::MAX;
        let left = folder(dead, NAME, true);
        let others = [
            folder(dead - 1, NAME, false),
            folder(std::process::id(), NAME, true),
            folder(dead, "somebody-elses-", true),
        ];
        sweep(scratch.path());
        assert!(!left.exists() && others.iter().all(|path| path.exists()));
    }
}
