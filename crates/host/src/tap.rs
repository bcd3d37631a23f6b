//! What the engine shows of itself to who wants to see its packets: the adapter's probe.
//!
//! Without a capture a tap is a null pointer, and every question to it one branch. With one, each
//! round of progress ends with a write of the packets that passed in it: what ends the process later,
//! even a signal that cannot be caught, loses none of them.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::net::{IpAddr, SocketAddr};
use std::os::fd::OwnedFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use quipu_cabi::Hold;
use quipu_cm::StreamKey;
use quipu_nic::{ConnId, Ends, Gid, Header, Passage, Probe, QpNum};
use quipu_observe::{
    Capture, Direction, Hello, Interface, Limits, Message, Pair, StreamEnds, StreamId,
};

use crate::address::HostAddress;
use crate::config::CaptureConfig;
use crate::sys;

/// The adapter of an engine.
pub(crate) type Adapter = quipu_nic::Adapter<Tap>;

/// Sees what passes, if anybody wants to.
#[derive(Debug, Default)]
pub(crate) struct Tap(Option<Box<Recorder>>);

/// A capture and its file.
#[derive(Debug)]
struct Recorder {
    capture: Capture,
    file: File,
    path: PathBuf,
    /// Whether the user was told that the file has reached its limit.
    told: bool,
}

impl Tap {
    /// A tap that captures what passes at `address`.
    ///
    /// # Errors
    /// The file, named in the error's stead, cannot be written.
    pub(crate) fn open(
        config: &CaptureConfig,
        address: &HostAddress,
    ) -> Result<Self, (PathBuf, io::Error)> {
        let (file, path) = open_file(&config.path)?;
        let program = std::env::current_exe().unwrap_or_default();
        let interface = Interface {
            name: "quipu0".into(),
            description: format!(
                "{} (process {}) at {}",
                program.file_name().unwrap_or_default().to_string_lossy(),
                std::process::id(),
                address.ip
            ),
            application: concat!("Quipu ", env!("CARGO_PKG_VERSION")).into(),
        };
        let there = file.metadata().map_or(0, |data| data.len());
        let file_bytes = config.file_bytes.saturating_sub(there);
        let capture = Capture::new(&interface, Limits { file_bytes, snaplen: config.snaplen });
        let mut tap = Self(Some(Box::new(Recorder { capture, file, path, told: false })));
        tap.flush();
        Ok(tap)
    }

    /// A byte stream stands.
    pub(crate) fn stream_opened(
        &mut self,
        conn: ConnId,
        fd: &OwnedFd,
        remote: SocketAddr,
        active: bool,
    ) {
        let Some(recorder) = &mut self.0 else { return };
        let Ok(local) = sys::local_address(fd) else { return };
        let ends = StreamEnds { local, remote, active };
        recorder.capture.stream_opened(now(), id(conn), ends);
    }

    /// Bytes passed on a stream.
    #[inline]
    pub(crate) fn stream_passed(&mut self, conn: Option<ConnId>, outgoing: bool, bytes: &[u8]) {
        if let (Some(recorder), Some(conn)) = (&mut self.0, conn) {
            recorder.capture.stream_passed(now(), id(conn), outgoing, bytes);
        }
    }

    /// A stream ended.
    pub(crate) fn stream_closed(&mut self, conn: ConnId, by_peer: bool) {
        if let Some(recorder) = &mut self.0 {
            recorder.capture.stream_closed(now(), id(conn), by_peer);
        }
    }

    /// A stream of connection management stands.
    pub(crate) fn managed_opened(
        &mut self,
        stream: StreamKey,
        local: SocketAddr,
        remote: SocketAddr,
        active: bool,
    ) {
        if let Some(recorder) = &mut self.0 {
            let ends = StreamEnds { local, remote, active };
            recorder.capture.stream_opened(now(), managed(stream), ends);
        }
    }

    /// Bytes passed on a stream of connection management.
    pub(crate) fn managed_passed(&mut self, stream: StreamKey, outgoing: bool, bytes: &[u8]) {
        if let Some(recorder) = &mut self.0 {
            recorder.capture.stream_passed(now(), managed(stream), outgoing, bytes);
        }
    }

    /// A stream of connection management ended.
    pub(crate) fn managed_closed(&mut self, stream: StreamKey, by_peer: bool) {
        if let Some(recorder) = &mut self.0 {
            recorder.capture.stream_closed(now(), managed(stream), by_peer);
        }
    }

    /// The adapter has got a stream of connection management.
    pub(crate) fn managed_handed_over(&mut self, stream: StreamKey, conn: ConnId) {
        if let Some(recorder) = &mut self.0 {
            recorder.capture.stream_renamed(managed(stream), id(conn));
        }
    }

    /// A datagram passed.
    #[inline]
    pub(crate) fn datagram_passed(
        &mut self,
        outgoing: bool,
        (from, to): (SocketAddr, SocketAddr),
        bytes: &[u8],
    ) {
        if let Some(recorder) = &mut self.0 {
            recorder.capture.datagram_passed(now(), outgoing, (from, to), bytes);
        }
    }

    /// There is a packet link.
    pub(crate) fn link_opened(&mut self, name: &str, ethernet: bool) {
        if let Some(recorder) = &mut self.0 {
            recorder.capture.link_opened(name, "the packet link of QPIP", ethernet);
        }
        self.flush();
    }

    /// A frame passed on the packet link.
    #[inline]
    pub(crate) fn frame_passed(&mut self, outgoing: bool, frame: &[u8]) {
        if let Some(recorder) = &mut self.0 {
            recorder.capture.frame_passed(now(), outgoing, frame);
        }
    }

    /// Writes what passed.
    #[inline]
    pub(crate) fn flush(&mut self) {
        if self.0.as_ref().is_some_and(|recorder| !recorder.capture.output().is_empty()) {
            self.write();
        }
    }

    #[cold]
    fn write(&mut self) {
        let Some(recorder) = &mut self.0 else { return };
        let _hold = Hold::new();
        let Recorder { capture, file, path, told } = &mut **recorder;
        let path = path.display();
        if let Err(error) = file.write_all(capture.output()) {
            tracing::error!(%path, %error, "no more packets are captured");
            self.0 = None;
            return;
        }
        capture.clear();
        if capture.is_full() && !std::mem::replace(told, true) {
            tracing::warn!(%path, "the capture has reached its limit; no more packets are captured");
        }
    }

    /// Ends all connections in the capture, which takes no more packets.
    pub(crate) fn finish(&mut self) {
        if let Some(recorder) = &mut self.0 {
            recorder.capture.close_all(now());
        }
        self.flush();
        self.0 = None;
    }
}

impl Probe for Tap {
    #[inline]
    fn watches(&self) -> bool {
        self.0.is_some()
    }

    #[inline]
    fn looped(&mut self, frame: &[u8]) {
        self.frame_passed(true, frame);
    }

    #[inline]
    fn written(&mut self, conn: ConnId, wr_id: u64) {
        if let Some(recorder) = &mut self.0 {
            recorder.capture.stream_noted(id(conn), wr_id);
        }
    }

    fn joined(&mut self, ends: &Ends, request: &Hello, answer: &Hello) {
        if let Some(recorder) = &mut self.0 {
            let (pair, own) = pair(ends);
            recorder.capture.channel_opened(now(), pair, own, (request, answer));
        }
    }

    fn passed(&mut self, passage: &Passage, fill: &mut dyn FnMut(u32, &mut [u8])) {
        let Some(recorder) = &mut self.0 else { return };
        let (pair, own) = pair(&passage.ends);
        let from = if passage.outgoing { own } else { own.reverse() };
        let message = match passage.header {
            Header::Tagged { op, stag, to } => Message::Tagged { op, stag, to },
            Header::Untagged { op, ulp } => Message::Untagged { op, ulp },
        };
        let Passage { wr_id, length, .. } = *passage;
        recorder.capture.channel_passed(now(), (pair, from), wr_id, message, length, fill);
    }

    fn parted(&mut self, ends: &Ends) {
        if let Some(recorder) = &mut self.0 {
            let (pair, own) = pair(ends);
            recorder.capture.channel_closed(now(), pair, own);
        }
    }
}

fn id(conn: ConnId) -> StreamId {
    StreamId::Adapter(conn.0)
}

fn managed(stream: StreamKey) -> StreamId {
    StreamId::Management(stream.0)
}

/// A channel as a capture knows it, and the end that is this side.
fn pair(ends: &Ends) -> (Pair, Direction) {
    let named = |(gid, num): (Gid, QpNum)| (IpAddr::from(gid), num.0);
    let (own, peer) = (named(ends.own), named(ends.peer));
    if ends.client {
        (Pair { client: own, server: peer }, Direction::FromClient)
    } else {
        (Pair { client: peer, server: own }, Direction::FromServer)
    }
}

/// Since the epoch of UNIX.
fn now() -> Duration {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()
}

/// The file for the packets of this process, locked. Packets are added to what is there, as another
/// section of the file; a file that another process writes to is left to it.
fn open_file(wanted: &Path) -> Result<(File, PathBuf), (PathBuf, io::Error)> {
    let process = std::process::id();
    let text = wanted.to_string_lossy();
    let path = if wanted.is_dir() {
        wanted.join(format!("quipu-{process}.pcapng"))
    } else if text.contains("%p") {
        text.replace("%p", &process.to_string()).into()
    } else {
        wanted.to_owned()
    };
    let open = |path: PathBuf| match append(&path) {
        Ok(file) => Ok((file, path)),
        Err(error) => Err((path, error)),
    };
    match open(path) {
        Err((path, error)) if error.kind() == io::ErrorKind::WouldBlock => {
            let mut name = path.file_stem().unwrap_or_default().to_owned();
            name.push(format!(".{process}"));
            if let Some(extension) = path.extension() {
                name.push(".");
                name.push(extension);
            }
            open(path.with_file_name(name))
        }
        opened => opened,
    }
}

/// Opens a file to add to it, for this user only: packets hold what programs sent.
fn append(path: &Path) -> io::Result<File> {
    let file = OpenOptions::new().append(true).create(true).mode(0o600).open(path)?;
    let file = sys::above_standard(file)?;
    file.try_lock()?;
    Ok(file)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_process_has_a_file() {
        let folder = std::env::temp_dir().join(format!("quipu-tap-{}", std::process::id()));
        std::fs::create_dir(&folder).unwrap();
        let process = std::process::id();
        let name = |wanted: &str| {
            let (file, path) = open_file(&folder.join(wanted)).unwrap();
            (file, path.strip_prefix(&folder).unwrap().to_str().unwrap().to_owned())
        };
        let (_held, first) = name("a.pcapng");
        assert_eq!(first, "a.pcapng");
        // Another description of the same file is refused the lock, as another process would be.
        assert_eq!(name("a.pcapng").1, format!("a.{process}.pcapng"));
        assert_eq!(name("b-%p").1, format!("b-{process}"));
        assert_eq!(name("").1, format!("quipu-{process}.pcapng"));
        let (path, error) = open_file(&folder.join("no/such/folder")).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::NotFound);
        assert!(path.ends_with("no/such/folder"));
        std::fs::remove_dir_all(&folder).unwrap();
    }
}
