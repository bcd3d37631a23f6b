//! The kernel's FUSE protocol for a file system with one file: requests as values, replies as bytes. No I/O.
//!
//! Source: the structures of `linux/fuse.h`, protocol 7.31. Numbers are in the byte order of the machine.

/// Longest data of a read or write, in bytes: 256 pages.
pub(super) const MAX_DATA: usize = 1 << 20;
/// Bytes of a buffer for any request.
pub(super) const BUFFER: usize = MAX_DATA + 64 * 1024;
/// Bytes of a request's header, and of a reply's.
const IN_HEADER: usize = 40;
pub(super) const OUT_HEADER: usize = 16;
/// Bytes of what a write says before its data.
const WRITE_HEADER: usize = 40;
/// Where the data of a write begin in its request.
pub(super) const WRITE_DATA: usize = IN_HEADER + WRITE_HEADER;

const MAJOR: u32 = 7;
const MINOR: u32 = 31;
/// `FUSE_ASYNC_READ`, `FUSE_BIG_WRITES`, `FUSE_ASYNC_DIO`, `FUSE_MAX_PAGES`.
const FEATURES: u32 = 1 << 0 | 1 << 5 | 1 << 15 | 1 << 22;
/// `FUSE_WRITEBACK_CACHE`: writes stay in the kernel's page cache until a flush or for some seconds.
const WRITEBACK: u32 = 1 << 16;
/// `FOPEN_DIRECT_IO`, `FOPEN_PARALLEL_DIRECT_WRITES`: nothing is cached here, and writes go on side by side.
const DIRECT: u32 = 1 << 0 | 1 << 6;
/// Requests of the kernel that no program waits for, at a time.
const BACKGROUND: u16 = 64;
/// `FATTR_SIZE`.
const SETS_SIZE: u32 = 1 << 3;

const ROOT: u64 = 1;
const FILE: u64 = 2;
/// The file's name.
pub(super) const NAME: &str = "nbd";

/// The numbers of errors.
pub(super) const ENOENT: i32 = 2;
pub(super) const EPERM: i32 = 1;
pub(super) const EISDIR: i32 = 21;
pub(super) const EINVAL: i32 = 22;
pub(super) const ENOSYS: i32 = 38;
pub(super) const EOPNOTSUPP: i32 = 95;
pub(super) const ENXIO: i32 = 6;

/// What the file is like.
#[derive(Clone, Copy, Debug)]
pub(super) struct File {
    /// Its size in bytes.
    pub(super) size: u64,
    pub(super) read_only: bool,
    /// Longest data of a read or write, in bytes: at most [`MAX_DATA`].
    pub(super) longest: usize,
    /// The kernel keeps pages of it.
    pub(super) is_cached: bool,
    /// Its owner.
    pub(super) uid: u32,
    pub(super) gid: u32,
}

/// What the kernel wants.
#[derive(Debug, Eq, PartialEq)]
pub(super) enum Wants {
    /// These bytes as the reply.
    Reply(Vec<u8>),
    /// This error as the reply; 0 for success.
    Error(i32),
    /// No reply.
    Nothing,
    Read {
        offset: u64,
        length: usize,
    },
    /// The data lie in the request, from [`WRITE_DATA`] on.
    Write {
        offset: u64,
        length: usize,
    },
    Flush,
    /// Zeros in a range; with `hole` the storage may be given back.
    Zero {
        offset: u64,
        length: u64,
        hole: bool,
    },
    /// The next data, or the next hole, from an offset on.
    Seek {
        offset: u64,
        hole: bool,
    },
}

/// A request.
#[derive(Debug, Eq, PartialEq)]
pub(super) struct Request {
    /// Its number, for the reply.
    pub(super) unique: u64,
    pub(super) wants: Wants,
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_ne_bytes(bytes.get(at..at + 4)?.try_into().ok()?))
}

fn u64_at(bytes: &[u8], at: usize) -> Option<u64> {
    Some(u64::from_ne_bytes(bytes.get(at..at + 8)?.try_into().ok()?))
}

/// Words in the byte order of the machine.
#[derive(Default)]
struct Words(Vec<u8>);

impl Words {
    fn u64(mut self, value: u64) -> Self {
        self.0.extend(value.to_ne_bytes());
        self
    }

    fn u32(mut self, value: u32) -> Self {
        self.0.extend(value.to_ne_bytes());
        self
    }

    fn u16(mut self, value: u16) -> Self {
        self.0.extend(value.to_ne_bytes());
        self
    }

    fn reply(self) -> Wants {
        Wants::Reply(self.0)
    }
}

/// The header of a reply with `length` bytes of data.
pub(super) fn header(unique: u64, error: i32, length: usize) -> [u8; OUT_HEADER] {
    let mut out = [0; OUT_HEADER];
    out[..4].copy_from_slice(&((OUT_HEADER + length) as u32).to_ne_bytes());
    out[4..8].copy_from_slice(&(-error).to_ne_bytes());
    out[8..].copy_from_slice(&unique.to_ne_bytes());
    out
}

/// The reply to a write.
pub(super) fn written(length: usize) -> Vec<u8> {
    Words::default().u32(length as u32).u32(0).0
}

/// The reply to a seek.
pub(super) fn found(offset: u64) -> Vec<u8> {
    offset.to_ne_bytes().to_vec()
}

impl File {
    /// Reads a request of `total` bytes, which begins with these; `None` if it is too short to have a reply.
    pub(super) fn request(&self, bytes: &[u8], total: usize) -> Option<Request> {
        let (code, unique, node) = (u32_at(bytes, 4)?, u64_at(bytes, 8)?, u64_at(bytes, 16)?);
        let body = bytes.get(IN_HEADER..)?;
        let wants = self.wants(code, node, body, total).unwrap_or(Wants::Error(EINVAL));
        Some(Request { unique, wants })
    }

    /// `None` if the request is too short.
    fn wants(&self, code: u32, node: u64, body: &[u8], total: usize) -> Option<Wants> {
        let is_file = node == FILE;
        Some(match code {
            1 => self.lookup(node, body),
            // FORGET, BATCH_FORGET
            2 | 42 => Wants::Nothing,
            3 => Words::default().u64(1).u64(0).attributes(self, node).reply(),
            4 => self.set(node, body)?,
            14 if is_file => {
                let flags = if self.is_cached { 0 } else { DIRECT };
                Words::default().u64(0).u32(flags).u32(0).reply()
            }
            14 => Wants::Error(EISDIR),
            15 if is_file => self.read(body)?,
            16 if is_file => self.write(body, total)?,
            17 => self.statistics(),
            // RELEASE, FLUSH (a close), RELEASEDIR, FSYNCDIR, ACCESS, DESTROY
            18 | 25 | 29 | 30 | 34 | 38 => Wants::Error(0),
            20 => Wants::Flush,
            26 => self.initialise(body)?,
            27 => Words::default().u64(0).u64(0).reply(),
            28 => list(body)?,
            43 if is_file => self.allocate(body)?,
            46 if is_file => self.seek(body)?,
            _ => Wants::Error(ENOSYS),
        })
    }

    fn initialise(&self, body: &[u8]) -> Option<Wants> {
        let (major, minor) = (u32_at(body, 0)?, u32_at(body, 4)?);
        let (ahead, flags) = (u32_at(body, 8)?, u32_at(body, 12)?);
        if major != MAJOR || minor < 28 {
            return Some(Wants::Error(71));
        }
        let features = if self.is_cached { FEATURES | WRITEBACK } else { FEATURES };
        let words =
            Words::default().u32(MAJOR).u32(minor.min(MINOR)).u32(ahead).u32(flags & features);
        // From three quarters of the requests on the kernel calls it congested.
        let words = words.u16(BACKGROUND).u16(BACKGROUND / 4 * 3);
        let words = words.u32(self.longest as u32).u32(1);
        let mut words = words.u16((self.longest / 4096) as u16).u16(0);
        for _ in 0..8 {
            words = words.u32(0);
        }
        Some(words.reply())
    }

    fn lookup(&self, node: u64, name: &[u8]) -> Wants {
        if node != ROOT || name.strip_suffix(b"\0") != Some(NAME.as_bytes()) {
            return Wants::Error(ENOENT);
        }
        // Node, generation, how long name and attributes are valid: a second.
        let words = Words::default().u64(FILE).u64(0).u64(1).u64(1).u64(0);
        words.attributes(self, FILE).reply()
    }

    /// Times may be set, to no effect. The size is that of the disk.
    fn set(&self, node: u64, body: &[u8]) -> Option<Wants> {
        let (valid, size) = (u32_at(body, 0)?, u64_at(body, 16)?);
        if valid & SETS_SIZE != 0 && size != self.size {
            return Some(Wants::Error(EPERM));
        }
        Some(Words::default().u64(1).u64(0).attributes(self, node).reply())
    }

    /// As much of a range as lies within the disk.
    fn clip(&self, offset: u64, length: u64) -> u64 {
        length.min(self.size.saturating_sub(offset))
    }

    fn read(&self, body: &[u8]) -> Option<Wants> {
        let (offset, length) = (u64_at(body, 8)?, u32_at(body, 16)?);
        let length = self.clip(offset, u64::from(length).min(self.longest as u64)) as usize;
        Some(if length == 0 { Wants::Reply(Vec::new()) } else { Wants::Read { offset, length } })
    }

    fn write(&self, body: &[u8], total: usize) -> Option<Wants> {
        let (offset, length) = (u64_at(body, 8)?, u32_at(body, 16)? as usize);
        if WRITE_DATA.checked_add(length)? > total {
            return None;
        }
        Some(match self.clip(offset, length as u64) as usize {
            _ if self.read_only => Wants::Error(EPERM),
            0 if length > 0 => Wants::Error(28),
            count => Wants::Write { offset, length: count },
        })
    }

    fn allocate(&self, body: &[u8]) -> Option<Wants> {
        const KEEP_SIZE: u32 = 1;
        const PUNCH_HOLE: u32 = 2;
        const ZERO_RANGE: u32 = 16;
        let (offset, length) = (u64_at(body, 8)?, u64_at(body, 16)?);
        let (mode, length) = (u32_at(body, 24)?, self.clip(offset, length));
        Some(match mode & !KEEP_SIZE {
            _ if self.read_only => Wants::Error(EPERM),
            PUNCH_HOLE | ZERO_RANGE if length == 0 => Wants::Error(0),
            PUNCH_HOLE => Wants::Zero { offset, length, hole: true },
            ZERO_RANGE => Wants::Zero { offset, length, hole: false },
            0 => Wants::Error(0),
            _ => Wants::Error(EOPNOTSUPP),
        })
    }

    fn seek(&self, body: &[u8]) -> Option<Wants> {
        let (offset, whence) = (u64_at(body, 8)?, u32_at(body, 16)?);
        Some(match whence {
            3 | 4 if offset >= self.size => Wants::Error(ENXIO),
            3 => Wants::Seek { offset, hole: false },
            4 => Wants::Seek { offset, hole: true },
            _ => Wants::Error(EINVAL),
        })
    }

    fn statistics(&self) -> Wants {
        let blocks = self.size / 4096;
        let mut words = Words::default().u64(blocks).u64(0).u64(0).u64(1).u64(0);
        words = words.u32(4096).u32(255).u32(4096);
        for _ in 0..7 {
            words = words.u32(0);
        }
        words.reply()
    }
}

impl Words {
    /// `struct fuse_attr`.
    fn attributes(self, file: &File, node: u64) -> Self {
        const DIRECTORY: u32 = 0o040_755;
        let mode = match (node == FILE, file.read_only) {
            (false, _) => DIRECTORY,
            (true, true) => 0o100_400,
            (true, false) => 0o100_600,
        };
        let size = if node == FILE { file.size } else { 0 };
        let times = self.u64(node).u64(size).u64(size.div_ceil(512)).u64(0).u64(0).u64(0);
        let owner = times.u32(0).u32(0).u32(0).u32(mode).u32(1).u32(file.uid).u32(file.gid);
        owner.u32(0).u32(4096).u32(0)
    }
}

/// The folder's entries from the third on: `.` and `..` are not needed.
fn list(body: &[u8]) -> Option<Wants> {
    const REGULAR: u32 = 8;
    if u64_at(body, 8)? > 0 {
        return Some(Wants::Reply(Vec::new()));
    }
    let mut entry = Words::default().u64(FILE).u64(1).u32(NAME.len() as u32).u32(REGULAR).0;
    entry.extend(NAME.as_bytes());
    entry.resize(entry.len().next_multiple_of(8), 0);
    Some(Wants::Reply(entry))
}

#[cfg(test)]
mod tests {
    use super::*;

    const DISK: File = File {
        size: 1 << 20,
        read_only: false,
        longest: MAX_DATA,
        is_cached: false,
        uid: 7,
        gid: 8,
    };

    fn request(code: u32, node: u64, body: &[u8]) -> Vec<u8> {
        let mut words = Words::default().u32(0).u32(code).u64(99).u64(node);
        words = words.u64(0).u64(0);
        words.0.extend(body);
        words.0
    }

    fn wants(code: u32, node: u64, body: Vec<u8>) -> String {
        let bytes = request(code, node, &body);
        format!("{:?}", DISK.request(&bytes, bytes.len()).unwrap().wants)
    }

    fn range(offset: u64, length: u32) -> Vec<u8> {
        Words::default().u64(0).u64(offset).u32(length).u32(0).u64(0).u64(0).0
    }

    #[test]
    fn replies_have_the_lengths_of_the_kernels_structures() {
        let length = |code, node, body: &[u8]| {
            let bytes = request(code, node, body);
            match DISK.request(&bytes, bytes.len()) {
                Some(Request { wants: Wants::Reply(bytes), unique: 99 }) => bytes.len(),
                other => panic!("{other:?}"),
            }
        };
        let init = Words::default().u32(7).u32(38).u32(1 << 17).u32(u32::MAX).0;
        assert_eq!(length(26, 0, &init), 64);
        assert_eq!(length(1, ROOT, b"nbd\0"), 128);
        assert_eq!(length(3, FILE, &[]), 104);
        assert_eq!(length(14, FILE, &[0; 8]), 16);
        assert_eq!(length(17, ROOT, &[]), 80);
        assert_eq!(length(28, ROOT, &range(0, 4096)), 32);
        assert_eq!(length(28, ROOT, &range(1, 4096)), 0);
        assert_eq!(header(5, 0, 4)[..8], Words::default().u32(20).u32(0).0);
    }

    #[test]
    fn ranges_are_cut_to_the_disk() {
        let size = DISK.size;
        assert!(wants(15, FILE, range(size - 10, 4096)).contains("length: 10"));
        assert_eq!(wants(15, FILE, range(size, 4096)), "Reply([])");
        assert_eq!(wants(15, FILE, range(u64::MAX, 4096)), "Reply([])");
        let mut body = range(size - 2, 4);
        body.extend([1, 2, 3, 4]);
        assert!(wants(16, FILE, body).contains("length: 2"));
        let mut body = range(size, 1);
        body.push(1);
        assert_eq!(wants(16, FILE, body), "Error(28)");
        assert_eq!(wants(16, FILE, range(0, 4)), format!("Error({EINVAL})"));
        let punch = Words::default().u64(0).u64(4096).u64(u64::MAX).u32(3).u32(0).0;
        assert!(wants(43, FILE, punch).contains("hole: true"));
    }

    #[test]
    fn what_is_not_there_is_refused() {
        assert_eq!(wants(1, ROOT, b"other\0".to_vec()), format!("Error({ENOENT})"));
        assert_eq!(wants(15, ROOT, range(0, 1)), format!("Error({ENOSYS})"));
        assert_eq!(wants(99, ROOT, Vec::new()), format!("Error({ENOSYS})"));
        let truncate = Words::default().u32(SETS_SIZE).u32(0).u64(0).u64(1).0;
        assert_eq!(wants(4, FILE, truncate), format!("Error({EPERM})"));
        for code in 0..60 {
            for length in [0, 1, 7, 16, 39] {
                let bytes = request(code, FILE, &vec![0xff; length]);
                assert!(DISK.request(&bytes, bytes.len()).is_some());
                assert!(DISK.request(&bytes[..length], length).is_none());
            }
        }
    }
}
