//! What kind of program a file is: whether the system's loader will put libraries in front of its
//! own.

use std::fs::File;
use std::io::Read;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

/// What is known of a program.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Linked dynamically, with glibc's loader.
    Dynamic,
    /// Linked statically.
    Static,
    /// Linked dynamically, with another loader.
    OtherLoader(String),
    /// For another processor, or another word size.
    OtherMachine,
    /// No ELF file, or one that cannot be read; the kernel will know.
    Unknown,
}

/// Scripts whose interpreters are scripts are followed so far.
const MAX_SCRIPTS: usize = 4;
/// More program headers than any program has.
const MAX_HEADERS: usize = 512;
const PT_INTERP: u32 = 3;
/// Machine number of x86-64 and of AArch64.
const MACHINE: u16 = if cfg!(target_arch = "aarch64") { 183 } else { 62 };

/// The file that the kernel runs for another: the interpreter of a script, else the file itself. `None`: it
/// cannot be read, or there are scripts upon scripts.
pub(crate) fn interpreted(file: &Path) -> Option<PathBuf> {
    let mut file = file.to_owned();
    for _ in 0..MAX_SCRIPTS {
        let start = start(&File::open(&file).ok()?)?;
        match start.strip_prefix(b"#!") {
            Some(line) => file = interpreter(line)?,
            None => return Some(file),
        }
    }
    None
}

/// The interpreter that a script asks for, or that of its interpreter, if it is not there.
pub(crate) fn missing_interpreter(script: &Path) -> Option<PathBuf> {
    let mut file = script.to_owned();
    for _ in 0..MAX_SCRIPTS {
        let start = start(&File::open(&file).ok()?)?;
        file = interpreter(start.strip_prefix(b"#!")?)?;
        if !file.exists() {
            return Some(file);
        }
    }
    None
}

/// Looks at a program that is no script.
pub(crate) fn inspect(file: &Path) -> Kind {
    let look = || {
        let open = File::open(file).ok()?;
        inspect_elf(&start(&open)?, &open, file)
    };
    look().unwrap_or(Kind::Unknown)
}

fn start(mut file: &File) -> Option<Vec<u8>> {
    let mut start = Vec::new();
    file.by_ref().take(256).read_to_end(&mut start).ok()?;
    Some(start)
}

/// The first word behind `#!`.
fn interpreter(line: &[u8]) -> Option<PathBuf> {
    let line = line.split(|byte| *byte == b'\n').next()?;
    let line = String::from_utf8_lossy(line);
    // What else is blank belongs to it, as the \r of a line that ends in the manner of Windows.
    line.split([' ', '\t']).find(|word| !word.is_empty()).map(PathBuf::from)
}

/// Reads the headers of a 64-bit little-endian ELF file (System V gABI, chapters 4 and 5).
fn inspect_elf(start: &[u8], file: &File, path: &Path) -> Option<Kind> {
    if !start.starts_with(b"\x7fELF") {
        return Some(Kind::Unknown);
    }
    let native = start.get(4..6)? == [2, 1] && u16_at(start, 18)? == MACHINE;
    if !native {
        return Some(Kind::OtherMachine);
    }
    let (offset, size, count) =
        (u64_at(start, 32)?, usize::from(u16_at(start, 54)?), usize::from(u16_at(start, 56)?));
    if size < 56 || count > MAX_HEADERS {
        return None;
    }
    let mut headers = vec![0; size * count];
    file.read_exact_at(&mut headers, offset).ok()?;
    let Some(header) = headers.chunks(size).find(|header| u32_at(header, 0) == Some(PT_INTERP))
    else {
        return Some(if is_loader(path) { Kind::Dynamic } else { Kind::Static });
    };
    let len = usize::try_from(u64_at(header, 32)?).ok()?.min(4096);
    let mut loader = vec![0; len];
    file.read_exact_at(&mut loader, u64_at(header, 8)?).ok()?;
    let loader = String::from_utf8_lossy(&loader).trim_end_matches('\0').to_owned();
    let glibc = is_loader(Path::new(&loader));
    Some(if glibc { Kind::Dynamic } else { Kind::OtherLoader(loader) })
}

/// Whether that is glibc's loader, which may also be run as a program, with another one as its argument
/// (ld.so(8)). Its file is named by its version in older systems.
fn is_loader(path: &Path) -> bool {
    let named = |path: &Path| {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        name.starts_with("ld-linux") || name.starts_with("ld-2.")
    };
    named(path) || path.canonicalize().is_ok_and(|path| named(&path))
}

fn u16_at(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_le_bytes(bytes.get(at..at + 2)?.try_into().ok()?))
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_le_bytes(bytes.get(at..at + 4)?.try_into().ok()?))
}

fn u64_at(bytes: &[u8], at: usize) -> Option<u64> {
    Some(u64::from_le_bytes(bytes.get(at..at + 8)?.try_into().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    /// An ELF file with one program header: of a loader, or of something else.
    fn elf(class: u8, machine: u16, loader: Option<&str>) -> Vec<u8> {
        let mut file = vec![0; 64 + 56];
        file[..6].copy_from_slice(&[0x7f, b'E', b'L', b'F', class, 1]);
        file[18..20].copy_from_slice(&machine.to_le_bytes());
        file[32..40].copy_from_slice(&64u64.to_le_bytes());
        file[54..56].copy_from_slice(&56u16.to_le_bytes());
        file[56..58].copy_from_slice(&1u16.to_le_bytes());
        if let Some(loader) = loader {
            file[64..68].copy_from_slice(&PT_INTERP.to_le_bytes());
            file[72..80].copy_from_slice(&120u64.to_le_bytes());
            file[96..104].copy_from_slice(&(loader.len() as u64 + 1).to_le_bytes());
            file.extend_from_slice(loader.as_bytes());
            file.push(0);
        }
        file
    }

    fn with_file<T>(name: &str, bytes: &[u8], look: impl Fn(&Path) -> T) -> T {
        let file = std::env::temp_dir().join(format!("quipu-elf-{}-{name}", std::process::id()));
        fs::write(&file, bytes).unwrap();
        let found = look(&file);
        fs::remove_file(&file).unwrap();
        found
    }

    fn kind_of(name: &str, bytes: &[u8]) -> Kind {
        with_file(name, bytes, inspect)
    }

    #[test]
    fn kinds_are_told_apart() {
        let glibc = elf(2, MACHINE, Some("/lib64/ld-linux-x86-64.so.2"));
        assert_eq!(kind_of("dynamic", &glibc), Kind::Dynamic);
        assert_eq!(kind_of("static", &elf(2, MACHINE, None)), Kind::Static);
        let musl = "/lib/ld-musl-x86_64.so.1";
        let kind = kind_of("musl", &elf(2, MACHINE, Some(musl)));
        assert_eq!(kind, Kind::OtherLoader(musl.into()));
        assert_eq!(kind_of("32-bit", &elf(1, 3, None)), Kind::OtherMachine);
        assert_eq!(kind_of("text", b"hello"), Kind::Unknown);
        assert_eq!(kind_of("truncated", &glibc[..70]), Kind::Unknown);
    }

    #[test]
    fn a_script_is_what_its_interpreter_is() {
        let interpreter = |name: &str, bytes: &[u8]| with_file(name, bytes, interpreted);
        let shell = Path::new("/bin/sh");
        assert_eq!(interpreter("script", b"#! /bin/sh -e\necho\n").as_deref(), Some(shell));
        assert_eq!((interpreted(shell).as_deref(), inspect(shell)), (Some(shell), Kind::Dynamic));
        assert_eq!(interpreter("lost", b"#!/no/such/interpreter\n"), None);
    }

    #[test]
    fn the_loader_runs_programs() {
        let loader = std::env::temp_dir().join(format!("ld-linux-{}.so.2", std::process::id()));
        fs::write(&loader, elf(2, MACHINE, None)).unwrap();
        let link = loader.with_extension("ld.so");
        std::os::unix::fs::symlink(&loader, &link).unwrap();
        assert_eq!([inspect(&loader), inspect(&link)], [Kind::Dynamic, Kind::Dynamic]);
        for file in [link, loader] {
            fs::remove_file(file).unwrap();
        }
    }

    #[test]
    fn any_bytes_are_survived() {
        let file = elf(2, MACHINE, Some("/lib64/ld-linux-x86-64.so.2"));
        for at in 0..file.len() {
            let mut bytes = file.clone();
            bytes[at] ^= 0xff;
            let _ = kind_of("flipped", &bytes);
        }
    }
}
