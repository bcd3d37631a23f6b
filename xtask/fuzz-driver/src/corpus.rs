//! Inputs in one file: each has its length before it, two octets, the lower first.

use std::path::Path;
use std::{fs, io};

/// The inputs of a file, or of a folder that has a file for each.
pub(crate) fn read(path: &Path) -> io::Result<Vec<Vec<u8>>> {
    if path.is_dir() {
        let mut inputs = Vec::new();
        for entry in fs::read_dir(path)? {
            inputs.push(fs::read(entry?.path())?);
        }
        inputs.sort();
        return Ok(inputs);
    }
    let mut rest = &fs::read(path)?[..];
    let mut inputs = Vec::new();
    while let Some((len, after)) = rest.split_first_chunk() {
        let len = usize::from(u16::from_le_bytes(*len));
        let Some((input, after)) = after.split_at_checked(len) else {
            let what = format!("{}: it ends in the middle of an input", path.display());
            return Err(io::Error::new(io::ErrorKind::InvalidData, what));
        };
        inputs.push(input.to_vec());
        rest = after;
    }
    Ok(inputs)
}

/// Writes inputs to a file, in place of what is there. Longer ones than 65535 octets are left out.
pub(crate) fn write(path: &Path, inputs: &[&[u8]]) -> io::Result<()> {
    let mut octets = Vec::new();
    for input in inputs {
        let Ok(len) = u16::try_from(input.len()) else { continue };
        octets.extend_from_slice(&len.to_le_bytes());
        octets.extend_from_slice(input);
    }
    let fresh = path.with_extension("new");
    fs::write(&fresh, octets)?;
    fs::rename(fresh, path)
}
