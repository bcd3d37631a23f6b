//! What a server has to show: a folder, or one page. Files that fit are read into registered memory once, and
//! sent from there; larger ones are read piece by piece as they are sent.

use std::collections::HashMap;
use std::fs::{self, File, Metadata};
use std::io::{self, Read};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::UNIX_EPOCH;

use quipu::{Access, Error, MemoryRegion, ProtectionDomain};

use super::http::{self, Status};

/// Longest file that is kept in memory, and how much is kept in all.
const KEPT_FILE: u64 = 32 << 20;
const KEPT_ALL: u64 = 256 << 20;

/// Octets to be sent.
#[derive(Clone, Debug)]
pub(super) enum Data {
    /// Those of a region.
    Memory(Arc<MemoryRegion>),
    /// Those of a file.
    File(Arc<File>),
    /// None.
    Nothing,
}

/// Something that can be asked for.
#[derive(Clone, Debug)]
pub(super) struct Content {
    pub(super) media_type: &'static str,
    /// When it was changed, in seconds since 1970.
    pub(super) changed: Option<u64>,
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
    Page(String),
}

/// What a server has to show.
#[derive(Debug)]
pub(super) struct Source {
    what: What,
    pd: ProtectionDomain,
    kept: HashMap<PathBuf, (Stamp, Content, u64)>,
    kept_bytes: u64,
    /// Counts what was asked for, so that the oldest is known.
    clock: u64,
}

/// What tells a file from an older one of the same name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Stamp {
    len: u64,
    changed_ns: Option<u128>,
}

fn stamp(metadata: &Metadata) -> Stamp {
    let changed = metadata.modified().ok().and_then(|at| at.duration_since(UNIX_EPOCH).ok());
    Stamp { len: metadata.len(), changed_ns: changed.map(|since| since.as_nanos()) }
}

/// Registers a copy of some octets.
pub(super) fn register(pd: &ProtectionDomain, bytes: &[u8]) -> Result<Data, Error> {
    if bytes.is_empty() {
        return Ok(Data::Nothing);
    }
    let region = pd.register(bytes.len(), Access::LOCAL_WRITE)?;
    region.write(0, bytes)?;
    Ok(Data::Memory(Arc::new(region)))
}

impl Source {
    /// A folder and everything in it.
    pub(super) fn folder(pd: &ProtectionDomain, folder: &Path) -> io::Result<Self> {
        let root = folder.canonicalize()?;
        // It must be a folder that can be read.
        root.read_dir()?;
        Ok(Self::new(pd, What::Folder(root)))
    }

    /// One page at `/`, in HTML or plain text.
    pub(super) fn page(pd: &ProtectionDomain, text: String) -> Self {
        Self::new(pd, What::Page(text))
    }

    fn new(pd: &ProtectionDomain, what: What) -> Self {
        Self { what, pd: pd.clone(), kept: HashMap::new(), kept_bytes: 0, clock: 0 }
    }

    /// What is at a path, which begins with a slash and leads nowhere upwards.
    pub(super) fn find(&mut self, path: &str) -> Result<Content, Otherwise> {
        let internal = |_| Otherwise::Refused(Status::InternalError);
        match &self.what {
            What::Page(text) if path == "/" => {
                let html = text.trim_start().starts_with('<');
                let media_type = http::media_type(if html { ".html" } else { ".txt" });
                let (data, len) = (register(&self.pd, text.as_bytes()), text.len() as u64);
                Ok(Content { media_type, changed: None, len, data: data.map_err(internal)? })
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
        // Pipes and devices are no files: to open one might wait for ever.
        if !metadata.is_file() {
            return Err(refused(Status::Forbidden));
        }
        self.file(place)
    }

    fn file(&mut self, place: PathBuf) -> Result<Content, Trouble> {
        self.clock += 1;
        let file = File::open(&place)?;
        let metadata = file.metadata()?;
        let stamp = stamp(&metadata);
        if let Some((kept, content, used)) = self.kept.get_mut(&place) {
            if *kept == stamp {
                *used = self.clock;
                return Ok(content.clone());
            }
            self.kept_bytes -= content.len;
            self.kept.remove(&place);
        }
        let changed = stamp.changed_ns.map(|ns| (ns / 1_000_000_000) as u64);
        let media_type = http::media_type(&place.to_string_lossy());
        if stamp.len > KEPT_FILE {
            let data = Data::File(Arc::new(file));
            return Ok(Content { media_type, changed, len: stamp.len, data });
        }
        let mut bytes = Vec::with_capacity(stamp.len as usize);
        file.take(KEPT_FILE).read_to_end(&mut bytes)?;
        let data = register(&self.pd, &bytes).map_err(|_| refused(Status::InternalError))?;
        let content = Content { media_type, changed, len: bytes.len() as u64, data };
        // One that changes while it is read is read again the next time.
        if content.len == stamp.len {
            self.keep(place, stamp, &content);
        }
        Ok(content)
    }

    fn keep(&mut self, place: PathBuf, stamp: Stamp, content: &Content) {
        while self.kept_bytes + content.len > KEPT_ALL {
            let oldest = self.kept.iter().min_by_key(|(_, (_, _, used))| *used);
            let Some(oldest) = oldest.map(|(place, _)| place.clone()) else { break };
            if let Some((_, content, _)) = self.kept.remove(&oldest) {
                self.kept_bytes -= content.len;
            }
        }
        self.kept_bytes += content.len;
        self.kept.insert(place, (stamp, content.clone(), self.clock));
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
        let data =
            register(&self.pd, page.as_bytes()).map_err(|_| refused(Status::InternalError))?;
        let (media_type, len) = (http::media_type(".html"), page.len() as u64);
        Ok(Content { media_type, changed: None, len, data })
    }
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
    /// Up to `most` octets from `at` on, in registered memory: the region, and where they are in it. Of a
    /// file they are read now.
    ///
    /// # Errors
    ///
    /// The file has become shorter or cannot be read, or there is no memory.
    pub(super) fn piece(
        &self,
        pd: &ProtectionDomain,
        at: u64,
        most: u64,
    ) -> Result<(Arc<MemoryRegion>, usize, usize), io::Error> {
        match self {
            Self::Memory(region) => Ok((Arc::clone(region), at as usize, most as usize)),
            Self::File(file) => {
                let mut bytes = vec![0; most.min(super::serve::FILE_PIECE) as usize];
                file.read_exact_at(&mut bytes, at)?;
                match register(pd, &bytes).map_err(io::Error::other)? {
                    Self::Memory(region) => Ok((region, 0, bytes.len())),
                    _ => Err(io::ErrorKind::UnexpectedEof.into()),
                }
            }
            Self::Nothing => Err(io::ErrorKind::UnexpectedEof.into()),
        }
    }
}

#[cfg(test)]
#[path = "files_tests.rs"]
mod tests;
