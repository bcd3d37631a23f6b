//! The file of a capture: whose it is, and that it stays one which can be read.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use quipu_cabi::{is_per_process, per_process, spared};

use crate::fork;
use crate::sys;

/// So many engines of a process write to files of one name with numbers.
const NUMBERS: u32 = 1000;
/// The block that begins a section of pcapng, and its magic number behind its length, which says in which
/// order bytes are (draft-ietf-opsawg-pcapng, section 4.1).
const SECTION: u32 = 0x0a0d_0d0a;
const BYTE_ORDER: u32 = 0x1a2b_3c4d;

/// The file for the packets of an engine, locked.
#[derive(Debug)]
pub(super) struct CaptureFile {
    file: File,
    path: PathBuf,
    /// As it is on the disk; none of what has no length, such as a pipe.
    length: Option<u64>,
}

impl CaptureFile {
    /// The file that is wanted. Packets are added to what is there, as another section of the file; a file
    /// that another engine writes to is left to it.
    ///
    /// # Errors
    ///
    /// The file, named in the error's stead, cannot be written, or is no capture.
    pub(super) fn open(wanted: &Path) -> Result<Self, (PathBuf, io::Error)> {
        let process = std::process::id();
        let first = if wanted.is_dir() {
            wanted.join(format!("quipu-{process}.pcapng"))
        } else {
            per_process(wanted.as_os_str()).into()
        };
        let own = is_per_process(wanted.as_os_str()) || wanted.is_dir();
        let others = (1..NUMBERS).map(|number| match (own, number) {
            (true, _) => numbered(&first, &format!(".{}", number + 1)),
            (false, 1) => numbered(&first, &format!(".{process}")),
            (false, _) => numbered(&first, &format!(".{process}.{number}")),
        });
        let mut locked = io::ErrorKind::WouldBlock.into();
        for path in std::iter::once(first.clone()).chain(others) {
            match append(&path) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => locked = error,
                Err(error) => return Err((path, error)),
                Ok((file, length)) => {
                    // Whose lock says that this process lives.
                    if length.is_some() {
                        fork::withhold(&file);
                    }
                    return Ok(Self { file, path, length });
                }
            }
        }
        Err((first, locked))
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    pub(super) fn length(&self) -> u64 {
        self.length.unwrap_or(0)
    }

    /// Adds blocks, all or none: behind a part of one, nobody finds the next.
    pub(super) fn add(&mut self, blocks: &[u8]) -> io::Result<()> {
        let written = spared(|| self.file.write_all(blocks));
        match (&written, &mut self.length) {
            (Ok(()), Some(length)) => *length += blocks.len() as u64,
            (Err(_), Some(length)) => {
                let _ = self.file.set_len(*length);
            }
            (_, None) => {}
        }
        written
    }
}

/// A name with more in front of its extension.
fn numbered(path: &Path, more: &str) -> PathBuf {
    let mut name = path.file_stem().unwrap_or_default().to_owned();
    name.push(more);
    if let Some(extension) = path.extension() {
        name.push(".");
        name.push(extension);
    }
    path.with_file_name(name)
}

/// Opens a file to add to it, for this user only: packets hold what programs sent. Its length, if it has one.
fn append(path: &Path) -> io::Result<(File, Option<u64>)> {
    let file = OpenOptions::new().append(true).create(true).mode(0o600).open(path)?;
    let file = sys::move_file_up(file)?;
    file.try_lock()?;
    let there = file.metadata()?;
    if !there.is_file() {
        return Ok((file, None));
    }
    let mut length = there.len();
    if length > 0 {
        let whole = whole_blocks(&File::open(path)?, length)?;
        if whole < length {
            // What is cut off was never written to its end: who wrote was killed, or the disk was full.
            tracing::warn!(path = %path.display(), "the last block of the capture is incomplete; \
                it is removed");
            file.set_len(whole)?;
            length = whole;
        }
    }
    Ok((file, Some(length)))
}

/// How much of a capture of that length are whole blocks.
fn whole_blocks(file: &File, length: u64) -> io::Result<u64> {
    let damaged = |why: &str| Err(io::Error::new(io::ErrorKind::InvalidData, why.to_owned()));
    let mut beginning = [0; 4];
    let beginning = &mut beginning[..length.min(4) as usize];
    file.read_exact_at(beginning, 0)?;
    if !SECTION.to_le_bytes().starts_with(beginning) {
        return damaged("it is not a pcapng capture; choose another file");
    }
    if ends_well(file, length)? {
        return Ok(length);
    }
    let mut little = true;
    let mut at = 0;
    while at + 12 <= length {
        let mut head = [0; 12];
        file.read_exact_at(&mut head, at)?;
        if u32_of(&head[..4], true) == SECTION {
            little = u32_of(&head[8..], true) == BYTE_ORDER;
        }
        let size = u64::from(u32_of(&head[4..8], little));
        if size < 12 || size % 4 != 0 {
            return damaged("it is damaged; choose another file");
        }
        if at + size > length {
            break;
        }
        let mut again = [0; 4];
        file.read_exact_at(&mut again, at + size - 4)?;
        if again != head[4..8] {
            return damaged("it is damaged; choose another file");
        }
        at += size;
    }
    Ok(at)
}

/// Whether there is a whole block at the end, as there is of each capture that ended well: its length is
/// both in front and behind.
fn ends_well(file: &File, length: u64) -> io::Result<bool> {
    let Some(last) = length.checked_sub(4) else { return Ok(false) };
    let mut size = [0; 4];
    file.read_exact_at(&mut size, last)?;
    let Some(begin) = length.checked_sub(u32_of(&size, true).into()) else { return Ok(false) };
    let mut again = [0; 4];
    let is_block = last - begin.min(last) >= 8 && file.read_exact_at(&mut again, begin + 4).is_ok();
    Ok(is_block && again == size && u32_of(&size, true).is_multiple_of(4))
}

fn u32_of(bytes: &[u8], little: bool) -> u32 {
    let bytes = bytes.try_into().expect("four bytes");
    if little { u32::from_le_bytes(bytes) } else { u32::from_be_bytes(bytes) }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn folder(name: &str) -> PathBuf {
        let folder = std::env::temp_dir().join(format!("quipu-{name}-{}", std::process::id()));
        fs::create_dir(&folder).unwrap();
        folder
    }

    /// A block with so many bytes in it.
    fn block(kind: u32, body: &[u8]) -> Vec<u8> {
        let size = (12 + body.len() as u32).to_le_bytes();
        [&kind.to_le_bytes()[..], &size, body, &size].concat()
    }

    fn section() -> Vec<u8> {
        block(SECTION, &[&BYTE_ORDER.to_le_bytes()[..], &[0; 12]].concat())
    }

    #[test]
    fn every_engine_has_a_file() {
        let folder = folder("tap");
        let process = std::process::id();
        let three = |wanted: &str| {
            // Another description of the same file is refused the lock, as another process would be.
            let files = [(); 3].map(|()| CaptureFile::open(&folder.join(wanted)).unwrap());
            files.map(|file| file.path.strip_prefix(&folder).unwrap().to_str().unwrap().to_owned())
        };
        let named = |names: [&str; 3]| names.map(|name| name.replace("%p", &process.to_string()));
        let expected = ["a.pcapng", "a.%p.pcapng", "a.%p.2.pcapng"];
        assert_eq!(three("a.pcapng"), named(expected));
        assert_eq!(three("b-%p.x"), named(["b-%p.x", "b-%p.2.x", "b-%p.3.x"]));
        let expected = ["quipu-%p.pcapng", "quipu-%p.2.pcapng", "quipu-%p.3.pcapng"];
        assert_eq!(three(""), named(expected));
        let (path, error) = CaptureFile::open(&folder.join("no/such/folder")).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::NotFound);
        assert!(path.ends_with("no/such/folder"));
        fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    fn blocks_are_added_behind_whole_ones() {
        let folder = folder("torn");
        let path = folder.join("a.pcapng");
        let whole = [section(), block(6, &[7; 40]), section(), block(6, &[0; 4])].concat();
        let last = whole.len() - 16;
        for length in 0..=whole.len() {
            fs::write(&path, &whole[..length]).unwrap();
            let mut file = CaptureFile::open(&path).unwrap();
            let ends = [0, 28, 80, 108, whole.len()];
            let kept = *ends.iter().rfind(|end| **end <= length).unwrap();
            assert_eq!(
                (file.length(), fs::metadata(&path).unwrap().len()),
                (kept as u64, kept as u64)
            );
            file.add(b"more").unwrap();
            assert_eq!(fs::read(&path).unwrap(), [&whole[..kept], b"more"].concat());
        }
        // What is not torn but damaged, or never was a capture, is left as it is.
        let mut damaged = whole[..last + 8].to_vec();
        damaged[32..36].copy_from_slice(&[1, 0, 0, 0]);
        for bytes in [&damaged[..], b"my notes", b"m"] {
            fs::write(&path, bytes).unwrap();
            let (_, error) = CaptureFile::open(&path).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::InvalidData);
            assert_eq!(fs::read(&path).unwrap(), bytes);
        }
        fs::remove_dir_all(&folder).unwrap();
    }
}
