//! Where the libraries are that stand in for those of the system.

use std::env;
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

/// The folder of the libraries.
#[derive(Clone, Debug)]
pub(crate) struct Libraries {
    folder: PathBuf,
}

impl Libraries {
    /// Looks for the libraries: where `QUIPU_LIB_DIR` says, else near the command itself.
    pub(crate) fn find() -> Result<Self, Failure> {
        let wanted = variables::value(VARIABLE);
        let own = env::current_exe().and_then(|file| file.canonicalize()).unwrap_or_default();
        let folders = match &wanted {
            Some(folder) => vec![PathBuf::from(folder)],
            None => near(own.parent().unwrap_or(Path::new("/"))),
        };
        let found = folders.iter().find(|folder| missing(folder).is_none());
        let Some(folder) = found.and_then(|folder| folder.canonicalize().ok()) else {
            return Err(not_found(&folders, wanted.is_some()));
        };
        if let Some(bad) = folder.to_string_lossy().chars().find(|c| " :;$".contains(*c)) {
            let what = format!("cannot use the libraries in {}", folder.display());
            let why = format!("the system's loader does not accept '{bad}' in that path");
            return Err(
                Failure::new(what, why, "move them to a folder with a plainer name").with_code(125)
            );
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

/// The folder of one library that programs are linked with.
pub(crate) fn folder_with(library: &str) -> Result<PathBuf, Failure> {
    let own = env::current_exe().and_then(|file| file.canonicalize()).unwrap_or_default();
    let bin = own.parent().unwrap_or(Path::new("/")).to_owned();
    let folders = match variables::value(VARIABLE) {
        Some(folder) => vec![PathBuf::from(folder)],
        None => near(&bin).into_iter().chain([bin]).collect(),
    };
    let found = folders.iter().find(|folder| folder.join(library).exists());
    found.and_then(|folder| folder.canonicalize().ok()).ok_or_else(|| {
        let list: Vec<String> = folders.iter().map(|folder| folder.display().to_string()).collect();
        let what = format!("cannot find {library}");
        let why = format!("it is not in {}", list.join(", "));
        Failure::new(what, why, format!("build it: make build; or set {VARIABLE}")).with_code(125)
    })
}

/// Where the libraries are, seen from the folder of the command: installed, staged, and built.
fn near(bin: &Path) -> Vec<PathBuf> {
    ["../lib/quipu", "../lib", "../quipu/lib"].iter().map(|place| bin.join(place)).collect()
}

/// The first library that a folder lacks.
fn missing(folder: &Path) -> Option<&'static str> {
    NEEDED.into_iter().find(|name| !folder.join(name).is_file())
}

fn not_found(folders: &[PathBuf], by_variable: bool) -> Failure {
    let places: Vec<_> = folders
        .iter()
        .map(|folder| {
            let name = missing(folder).unwrap_or("nothing");
            format!("\n    {} ({name} is missing)", folder.display())
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
