//! What a server has to show: a folder, or one page. Short files that are asked for in whole are read into
//! registered memory once, and sent from there; all else is read piece by piece as it is sent.

use std::collections::HashMap;
use std::fs::{self, File, Metadata, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use super::conditions::Version;
use super::http::{self, Status};
use super::memory::{Held, Memory};

/// Longest file that is kept in memory.
const KEPT_FILE: u64 = 1 << 20;

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
            io::ErrorKind::UnexpectedEof => format!("{name} has become shorter while it was sent"),
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

/// A file in memory.
#[derive(Debug)]
struct Kept {
    stamp: Stamp,
    region: Arc<Held>,
    /// When it was asked for last, by the source's clock.
    used: u64,
}

/// What a server has to show.
#[derive(Debug)]
pub(super) struct Source {
    what: What,
    memory: Memory,
    kept: HashMap<PathBuf, Kept>,
    /// Counts what was asked for, so that the oldest is known.
    clock: u64,
}

/// What tells a file from an older one of the same name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Stamp {
    len: u64,
    changed_ns: Option<u128>,
}

impl Stamp {
    /// As an entity tag, which is strong, but for two versions of one length within a tick of the file
    /// system's clock.
    fn tag(&self) -> Option<String> {
        self.changed_ns.map(|ns| format!("\"{ns:x}-{:x}\"", self.len))
    }

    /// When it was changed, as of now.
    fn version(&self, now: SystemTime) -> Version<'static> {
        let seconds = |ns| u64::try_from(ns / 1_000_000_000).ok();
        let changed = self.changed_ns.and_then(seconds);
        let now = now.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
        Version { tag: None, changed, may_change: changed.is_some_and(|changed| changed >= now) }
    }
}

fn stamp(metadata: &Metadata) -> Stamp {
    let changed = metadata.modified().ok().and_then(|at| at.duration_since(UNIX_EPOCH).ok());
    Stamp { len: metadata.len(), changed_ns: changed.map(|since| since.as_nanos()) }
}

impl Source {
    /// A folder and everything in it.
    pub(super) fn folder(memory: &Memory, folder: &Path) -> io::Result<Self> {
        let root = folder.canonicalize()?;
        // It must be a folder that can be read.
        root.read_dir()?;
        Ok(Self::new(memory, What::Folder(root)))
    }

    /// One page at `/`, in HTML or plain text.
    pub(super) fn page(memory: &Memory, text: String) -> Self {
        Self::new(memory, What::Page(text.into()))
    }

    fn new(memory: &Memory, what: What) -> Self {
        Self { what, memory: memory.clone(), kept: HashMap::new(), clock: 0 }
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
                    Trouble::System(error) => Otherwise::Refused(match error.kind() {
                        io::ErrorKind::NotFound | io::ErrorKind::NotADirectory => Status::NotFound,
                        io::ErrorKind::PermissionDenied => Status::Forbidden,
                        // A name longer than any file has.
                        io::ErrorKind::InvalidFilename => Status::NotFound,
                        // A link that leads to itself leads nowhere.
                        _ if error.raw_os_error() == Some(libc::ELOOP) => Status::NotFound,
                        _ => Status::InternalError,
                    }),
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
            let index = place.join("index.html").canonicalize();
            match index.ok().filter(|index| index.starts_with(root)) {
                Some(index) => (metadata, place) = (fs::metadata(&index)?, index),
                None => return self.list(&place, path),
            }
        } else if path.ends_with('/') {
            return Err(refused(Status::NotFound));
        }
        // Pipes and devices are no files.
        if !metadata.is_file() {
            return Err(refused(Status::Forbidden));
        }
        self.file(root, place)
    }

    fn file(&mut self, root: &Path, place: PathBuf) -> Result<Content, Trouble> {
        self.clock += 1;
        let file = open_within(root, &place)?;
        let stamp = stamp(&file.metadata()?);
        let version = stamp.version(SystemTime::now());
        let media_type = http::media_type(&place.to_string_lossy());
        let len = stamp.len;
        if self.kept.get(&place).is_some_and(|kept| kept.stamp != stamp) {
            self.kept.remove(&place);
        }
        let data = match self.kept.get_mut(&place) {
            Some(kept) => {
                kept.used = self.clock;
                Data::Memory(Arc::clone(&kept.region))
            }
            None => Data::File(Arc::new(Opened { file, place, stamp })),
        };
        Ok(Content { media_type, version, tag: stamp.tag(), len, data })
    }

    /// The same octets from memory, where they are kept, if they are a file's that is worth it: for those
    /// that are sent in whole.
    pub(super) fn keep(&mut self, data: Data) -> Data {
        let Data::File(opened) = &data else { return data };
        let Opened { file, place, stamp } = &**opened;
        if !(1..=KEPT_FILE).contains(&stamp.len) || !self.make_room(stamp.len) {
            return data;
        }
        let mut bytes = vec![0; stamp.len as usize];
        // One that has become shorter fails when it is sent.
        if file.read_exact_at(&mut bytes, 0).is_err() {
            return data;
        }
        let Ok(region) = self.memory.hold(&bytes).map(Arc::new) else { return data };
        let kept = Kept { stamp: *stamp, region: Arc::clone(&region), used: self.clock };
        self.kept.insert(place.clone(), kept);
        Data::Memory(region)
    }

    /// Whether there is room for a file of `len` octets, after those were let go that nobody is sent and
    /// nobody has asked for for longest.
    fn make_room(&mut self, len: u64) -> bool {
        while !self.memory.has_room(len) {
            let idle = self.kept.iter().filter(|(_, kept)| Arc::strong_count(&kept.region) == 1);
            let oldest = idle.min_by_key(|(_, kept)| kept.used).map(|(place, _)| place.clone());
            let Some(oldest) = oldest else { return false };
            self.kept.remove(&oldest);
        }
        true
    }

    /// What is in a folder, as a page.
    fn list(&self, folder: &Path, path: &str) -> Result<Content, Trouble> {
        let mut names = Vec::new();
        for entry in fs::read_dir(folder)?.flatten() {
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
        let (media_type, len) = (http::media_type(".html"), page.len() as u64);
        let data = Data::Page(page.into());
        Ok(Content { media_type, version: Version::default(), tag: None, len, data })
    }
}

/// Opens a file of a folder. Others may write to the folder, too, and have put something else there since it
/// was looked at: a pipe, which would be waited for, or a link that leads elsewhere.
fn open_within(root: &Path, place: &Path) -> Result<File, Trouble> {
    let file = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(place)?;
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
    /// Up to `most` octets from `at` on, in registered memory: the region, and where they are in it. What
    /// is not there yet is copied now, in pieces that are short while memory is scarce.
    ///
    /// # Errors
    ///
    /// The file has become shorter or cannot be read, or there is no memory.
    pub(super) fn piece(
        &self,
        memory: &Memory,
        at: u64,
        most: u64,
    ) -> Result<(Arc<Held>, usize, usize), io::Error> {
        let len = most.min(memory.piece()) as usize;
        let copied = match self {
            Self::Memory(region) => return Ok((Arc::clone(region), at as usize, most as usize)),
            Self::File(opened) => {
                let mut bytes = vec![0; len];
                opened.file.read_exact_at(&mut bytes, at).map_err(|error| opened.blame(error))?;
                memory.hold(&bytes)
            }
            Self::Page(text) => {
                let bytes = text.as_bytes().get(at as usize..).and_then(|rest| rest.get(..len));
                memory.hold(bytes.ok_or(io::ErrorKind::UnexpectedEof)?)
            }
            Self::Nothing => return Err(io::ErrorKind::UnexpectedEof.into()),
        };
        Ok((Arc::new(copied.map_err(io::Error::other)?), 0, len))
    }
}

#[cfg(test)]
#[path = "files_tests.rs"]
mod tests;
