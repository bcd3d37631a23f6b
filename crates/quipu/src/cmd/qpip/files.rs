//! What a server has to show: a folder, or one page. Short files that are asked for in whole, and listings of
//! folders, are put into registered memory once, and sent from there; all else is read piece by piece as it
//! is sent.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::SystemTime;

use quipu_host::with_more_descriptors;

use super::conditions::Version;
use super::http::{self, Status};
use super::memory::{Held, Memory};
use super::stamp::Stamp;

/// Longest file that is kept in memory.
const KEPT_FILE: u64 = 1 << 20;

/// The file that is shown in place of its folder.
const INDEX: &str = "index.html";

/// Octets to be sent.
#[derive(Clone, Debug)]
pub(super) enum Data {
    /// Those of a region.
    Memory(Arc<Held>),
    /// Those of a file, which has not been read.
    File(Arc<Opened>),
    /// Those of a page.
    Page(Arc<str>),
    /// None.
    Nothing,
}

/// A file as it was when it was opened.
#[derive(Debug)]
pub(super) struct Opened {
    file: File,
    place: PathBuf,
    stamp: Stamp,
}

impl Opened {
    /// What there is to say when it could not be read.
    fn blame(&self, error: io::Error) -> io::Error {
        let name = self.place.display();
        let said = match error.kind() {
            io::ErrorKind::UnexpectedEof => format!("{name} became shorter while it was sent"),
            _ => format!("cannot read {name}: {error}"),
        };
        io::Error::new(error.kind(), said)
    }
}

/// Something that can be asked for.
#[derive(Clone, Debug)]
pub(super) struct Content {
    pub(super) media_type: &'static str,
    /// When it was changed.
    pub(super) version: Version<'static>,
    /// What tells this version from others: an entity tag.
    pub(super) tag: Option<String>,
    pub(super) len: u64,
    pub(super) data: Data,
}

/// Why there is no content.
#[derive(Debug)]
pub(super) enum Otherwise {
    /// It is a folder, whose address ends with a slash.
    Moved(String),
    Refused(Status),
}

/// What is served.
#[derive(Debug)]
enum What {
    Folder(PathBuf),
    Page(Arc<str>),
}

/// What a server has to show.
#[derive(Debug)]
pub(super) struct Source {
    what: What,
    /// What is sent of it.
    pub(super) memory: Memory,
}

impl Source {
    /// A folder and everything in it.
    pub(super) fn folder(memory: Memory, folder: &Path) -> io::Result<Self> {
        let root = folder.canonicalize()?;
        // It must be a folder that can be read.
        root.read_dir()?;
        Ok(Self { memory, what: What::Folder(root) })
    }

    /// One page at `/`, in HTML or plain text.
    pub(super) fn page(memory: Memory, text: String) -> Self {
        Self { memory, what: What::Page(text.into()) }
    }

    /// What is at a path, which begins with a slash and leads nowhere upwards. No file is read for it.
    pub(super) fn find(&mut self, path: &str) -> Result<Content, Otherwise> {
        match &self.what {
            What::Page(text) if path == "/" => {
                let html = text.trim_start().starts_with('<');
                let media_type = http::media_type(if html { ".html" } else { ".txt" });
                let (data, len) = (Data::Page(Arc::clone(text)), text.len() as u64);
                Ok(Content { media_type, version: Version::default(), tag: None, len, data })
            }
            What::Page(_) => Err(Otherwise::Refused(Status::NotFound)),
            What::Folder(root) => {
                let root = root.clone();
                self.find_file(&root, path).map_err(|error| match error {
                    Trouble::Otherwise(otherwise) => otherwise,
                    Trouble::System(error) => {
                        let status = status_of(&error);
                        if matches!(status, Status::InternalError | Status::Unavailable) {
                            eprintln!("quipu: cannot read {}: {error}", path.escape_debug());
                        }
                        Otherwise::Refused(status)
                    }
                })
            }
        }
    }

    fn find_file(&mut self, root: &Path, path: &str) -> Result<Content, Trouble> {
        let relative = path.trim_start_matches('/');
        let mut place = root.join(relative).canonicalize()?;
        // A link may lead anywhere; what is outside of the folder is not shown.
        if !place.starts_with(root) {
            return Err(refused(Status::Forbidden));
        }
        let mut metadata = fs::metadata(&place)?;
        if metadata.is_dir() {
            if !path.ends_with('/') {
                return Err(Trouble::Otherwise(Otherwise::Moved(http::encode(path) + "/")));
            }
            let index = place.join(INDEX).canonicalize();
            let inside = index.ok().filter(|index| index.starts_with(root));
            let looked_at = inside.and_then(|index| Some((fs::metadata(&index).ok()?, index)));
            match looked_at.filter(|(metadata, _)| metadata.is_file()) {
                Some(index) => (metadata, place) = index,
                None => return self.list(&place, path, Stamp::of(&metadata)),
            }
        } else if path.ends_with('/') {
            return Err(refused(Status::NotFound));
        }
        // Pipes and devices are no files.
        if !metadata.is_file() {
            return Err(refused(Status::Forbidden));
        }
        // By the name that was asked for: it may be a link to one that tells nothing.
        let name = if path.ends_with('/') { INDEX } else { path };
        self.file(root, place, http::media_type(name))
    }

    fn file(
        &mut self,
        root: &Path,
        place: PathBuf,
        media_type: &'static str,
    ) -> Result<Content, Trouble> {
        let file = open_within(root, &place)?;
        let stamp = Stamp::of(&file.metadata()?);
        let version = stamp.version(SystemTime::now());
        let data = match self.memory.kept(&place, stamp) {
            Some(region) => Data::Memory(region),
            None => Data::File(Arc::new(Opened { file, place, stamp })),
        };
        Ok(Content { media_type, version, tag: Some(stamp.tag()), len: stamp.len, data })
    }

    /// The same octets from memory, where they are kept, if they are a file's that is worth it: for those
    /// that are sent in whole.
    pub(super) fn keep(&mut self, data: Data) -> Data {
        let Data::File(opened) = &data else { return data };
        let Opened { file, place, stamp } = &**opened;
        if !(1..=KEPT_FILE).contains(&stamp.len) || !self.memory.make_room(stamp.len) {
            return data;
        }
        let mut bytes = vec![0; stamp.len as usize];
        // One that has become shorter fails when it is sent.
        if file.read_exact_at(&mut bytes, 0).is_err() {
            return data;
        }
        let Some(region) = self.memory.hold_with_ease(&bytes) else { return data };
        self.memory.keep(place, *stamp, &region);
        Data::Memory(region)
    }

    /// What is in a folder, as a page. All who are sent it at a time share it.
    fn list(&mut self, folder: &Path, path: &str, stamp: Stamp) -> Result<Content, Trouble> {
        // It names the path, and there may be several to one folder.
        let (place, stamp) = (Path::new(path), stamp.of_this_second());
        let region = match self.memory.kept(place, stamp) {
            Some(region) => region,
            None => {
                let page = listing(folder, path)?;
                let region = self.memory.hold_with_ease(page.as_bytes());
                let region = region.ok_or_else(|| refused(Status::Unavailable))?;
                self.memory.keep(place, stamp, &region);
                region
            }
        };
        let (media_type, len) = (http::media_type(INDEX), region.len() as u64);
        let data = Data::Memory(region);
        Ok(Content { media_type, version: Version::default(), tag: None, len, data })
    }
}

fn listing(folder: &Path, path: &str) -> io::Result<String> {
    let mut names = Vec::new();
    for entry in with_more_descriptors(|| fs::read_dir(folder))?.flatten() {
        let slash = if entry.path().is_dir() { "/" } else { "" };
        // What is no text cannot be asked for.
        if let Some(name) = entry.file_name().to_str() {
            names.push(format!("{name}{slash}"));
        }
    }
    names.sort();
    let title = http::escape(path);
    let mut page = format!("<!DOCTYPE html>\n<title>{title}</title>\n<h1>{title}</h1>\n<ul>\n");
    if path != "/" {
        names.insert(0, "..".into());
    }
    for name in names {
        let (link, text) = (http::encode(&name), http::escape(&name));
        page += &format!("<li><a href=\"./{link}\">{text}</a>\n");
    }
    page += "</ul>\n";
    Ok(page)
}

/// What to answer where something cannot be read.
fn status_of(error: &io::Error) -> Status {
    match error.kind() {
        io::ErrorKind::NotFound | io::ErrorKind::NotADirectory => Status::NotFound,
        io::ErrorKind::PermissionDenied => Status::Forbidden,
        // A name longer than any file has.
        io::ErrorKind::InvalidFilename => Status::NotFound,
        _ => match error.raw_os_error() {
            // A link that leads to itself leads nowhere.
            Some(libc::ELOOP) => Status::NotFound,
            // Others have all descriptors, or all memory; later there may be some.
            Some(libc::EMFILE | libc::ENFILE | libc::ENOMEM) => Status::Unavailable,
            _ => Status::InternalError,
        },
    }
}

/// Opens a file of a folder. Others may write to the folder, too, and have put something else there since it
/// was looked at: a pipe, which would be waited for, or a link that leads elsewhere.
fn open_within(root: &Path, place: &Path) -> Result<File, Trouble> {
    let mut options = OpenOptions::new();
    options.read(true).custom_flags(libc::O_NONBLOCK);
    let file = with_more_descriptors(|| options.open(place))?;
    let opened = fs::read_link(format!("/proc/self/fd/{}", file.as_raw_fd()))?;
    let fits = file.metadata()?.is_file() && opened.starts_with(root);
    if fits { Ok(file) } else { Err(refused(Status::Forbidden)) }
}

/// What may go wrong on the way to a file.
enum Trouble {
    Otherwise(Otherwise),
    System(io::Error),
}

fn refused(status: Status) -> Trouble {
    Trouble::Otherwise(Otherwise::Refused(status))
}

impl From<io::Error> for Trouble {
    fn from(error: io::Error) -> Self {
        Self::System(error)
    }
}

impl Data {
    /// How many of `most` pieces of it may be under way at once to one client: one while memory is scarce,
    /// unless it takes none.
    pub(super) fn sends(&self, memory: &mut Memory, most: usize) -> usize {
        if matches!(self, Self::Memory(_)) { most } else { memory.sends(most) }
    }

    /// Up to `most` octets from `at` on, in registered memory: the region, and where they are in it. What
    /// is not there yet is copied now, in pieces that are short while memory is scarce.
    ///
    /// # Errors
    ///
    /// The file has become shorter or cannot be read, or there is no memory (`OutOfMemory`).
    pub(super) fn piece(
        &self,
        memory: &mut Memory,
        at: u64,
        most: u64,
    ) -> Result<(Arc<Held>, usize, usize), io::Error> {
        let copied = match self {
            Self::Memory(region) => return Ok((Arc::clone(region), at as usize, most as usize)),
            Self::File(opened) => {
                let mut bytes = vec![0; most.min(memory.piece()) as usize];
                opened.file.read_exact_at(&mut bytes, at).map_err(|error| opened.blame(error))?;
                memory.hold_piece(&bytes)
            }
            Self::Page(text) => {
                let len = most.min(memory.piece()) as usize;
                let bytes = text.as_bytes().get(at as usize..).and_then(|rest| rest.get(..len));
                memory.hold_piece(bytes.ok_or(io::ErrorKind::UnexpectedEof)?)
            }
            Self::Nothing => return Err(io::ErrorKind::UnexpectedEof.into()),
        };
        let none = |error| io::Error::new(io::ErrorKind::OutOfMemory, error);
        let copied = copied.map_err(none)?;
        let len = copied.len();
        Ok((Arc::new(copied), 0, len))
    }
}

#[cfg(test)]
#[path = "files_tests.rs"]
mod tests;
