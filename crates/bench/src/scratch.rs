//! Temporary folders that vanish when they are no longer needed.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

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
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let folder = format!("quipu-bench-{}-{number}-{name}", std::process::id());
        let path = std::env::temp_dir().join(folder);
        // A folder that is there already was made by somebody else.
        std::fs::create_dir(&path)?;
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
        std::fs::write(&path, bytes)?;
        Ok(path)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}
