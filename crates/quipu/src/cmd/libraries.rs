//! Where the libraries are that stand in for those of the system.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use super::failure::Failure;
use super::variables;

/// The variable that says so.
const VARIABLE: &str = "QUIPU_LIB_DIR";
/// All that must be there. Some programs open libraries by the names without a number.
const NEEDED: [&str; 6] = [
    "libibverbs.so",
    "libibverbs.so.1",
    "librdmacm.so",
    "librdmacm.so.1",
    "libquipu_engine.so",
    "libquipu_shim.so",
];
/// Those to be preloaded: a linked program takes its symbols from them, whatever its own search
/// path says. The names without a number are the same files.
const PRELOADED: [&str; 3] = ["libibverbs.so.1", "librdmacm.so.1", "libquipu_shim.so"];

/// The library of `quipu sockets`, which needs none of the others.
pub(crate) const SOCKETS: &str = "libquipu_sockets_preload.so";

/// The library of the extended sockets interface.
pub(crate) const IWSOCK: &str = "libiwsock.so.1";

/// The library of `quipu sockets --sdp`, which needs none of the others either.
pub(crate) const SDP: &str = "libquipu_sdp_preload.so";

/// The library that programs of Split-C are linked with.
pub(crate) const SPLITC: &str = "libsplitc.so";

/// The file of one library that needs none of the others, near the command or where the variable says.
pub(crate) fn find_one(library: &str) -> Result<PathBuf, Failure> {
    let wanted = variables::value(VARIABLE);
    let own = quipu_host::own_file().map(|file| resolved(&file)).unwrap_or_default();
    let bin = own.parent().unwrap_or(Path::new("/")).to_owned();
    let folders = match &wanted {
        Some(folder) => vec![PathBuf::from(folder)],
        None => near(&bin).into_iter().chain([bin]).collect(),
    };
    let found = folders.iter().map(|folder| folder.join(library)).find(|file| file.is_file());
    found.and_then(|file| file.canonicalize().ok()).ok_or_else(|| {
        let places: Vec<_> = folders.iter().map(|f| format!("\n    {}", f.display())).collect();
        let what = format!("cannot find {library}");
        let why = format!("looked in{}", places.concat());
        let remedy = "build it (`make build` in Quipu's source, then use target/quipu/bin/quipu)";
        Failure::new(what, why, remedy).with_code(125)
    })
}

/// The folder of the libraries.
#[derive(Clone, Debug)]
pub(crate) struct Libraries {
    folder: PathBuf,
}

impl Libraries {
    /// Looks for the libraries: where `QUIPU_LIB_DIR` says, else near the command itself.
    pub(crate) fn find() -> Result<Self, Failure> {
        let wanted = variables::value(VARIABLE);
        let own = quipu_host::own_file().map(|file| resolved(&file)).unwrap_or_default();
        let folders = match &wanted {
            Some(folder) => vec![PathBuf::from(folder)],
            None => near(own.parent().unwrap_or(Path::new("/"))),
        };
        let found = folders.iter().find(|folder| missing(folder).is_none());
        let Some(folder) = found.map(|folder| resolved(folder)) else {
            return Err(not_found(&folders, wanted.is_some()));
        };
        if let Some(bad) = folder.to_string_lossy().chars().find(|c| " :;$".contains(*c)) {
            let what = format!("cannot use the libraries in {}", folder.display());
            let why = format!("the system's loader does not accept '{bad}' in that path");
            return Err(Failure::new(
                what,
                why,
                "move them to a folder without this character in its \
                    path",
            )
            .with_code(125));
        }
        Ok(Self { folder })
    }

    /// The folder.
    pub(crate) fn folder(&self) -> &Path {
        &self.folder
    }

    /// The files to preload.
    pub(crate) fn preloaded(&self) -> Vec<PathBuf> {
        PRELOADED.iter().map(|name| self.folder.join(name)).collect()
    }
}

/// Whether a preloaded file is one of Quipu's, of this or another folder.
pub(crate) fn is_ours(file: &str) -> bool {
    let path = Path::new(file);
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let engine = path.with_file_name("libquipu_engine.so");
    PRELOADED.contains(&name.as_ref()) && engine.exists()
}

/// Whether a folder is one with Quipu's libraries.
pub(crate) fn is_folder_of_ours(folder: &str) -> bool {
    !folder.is_empty() && missing(Path::new(folder)).is_none()
}

/// Where the libraries are, seen from the folder of the command: installed, staged, and built.
fn near(bin: &Path) -> Vec<PathBuf> {
    let above = bin.parent().unwrap_or(bin);
    ["lib/quipu", "lib", "quipu/lib"].iter().map(|place| above.join(place)).collect()
}

/// A path without links. Where the C library cannot resolve them, as under container runtimes that refuse
/// faccessat2(2), it is absolute at least.
fn resolved(path: &Path) -> PathBuf {
    let absolute = || std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
    path.canonicalize().unwrap_or_else(|_| absolute())
}

/// The first library that a folder lacks, and why.
fn missing(folder: &Path) -> Option<(&'static str, io::Error)> {
    NEEDED.into_iter().find_map(|name| match fs::metadata(folder.join(name)) {
        Ok(data) if data.is_file() => None,
        Ok(_) => Some((name, io::Error::other("it is not a file"))),
        Err(error) => Some((name, error)),
    })
}

fn not_found(folders: &[PathBuf], by_variable: bool) -> Failure {
    let places: Vec<_> = folders
        .iter()
        .map(|folder| {
            let why = missing(folder).map(|(name, error)| format!(" ({name}: {error})"));
            format!("\n    {}{}", folder.display(), why.unwrap_or_default())
        })
        .collect();
    let why = format!("looked in{}", places.concat());
    let remedy = if by_variable {
        format!("correct or unset {VARIABLE}")
    } else {
        format!(
            "build them (`make build` in Quipu's source, then use target/quipu/bin/quipu), or set \
             {VARIABLE} to their folder"
        )
    };
    Failure::new("cannot find Quipu's libraries", why, remedy).with_code(125)
}
