//! What the engine shows of itself to who wants to see its packets: the adapter's probe.
//!
//! Without a capture a tap is a null pointer, and every question to it one branch. With one, each
//! round of progress ends with a write of the packets that passed in it: what ends the process later,
//! even a signal that cannot be caught, loses none of them.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use quipu_cabi::Hold;
use quipu_cm::StreamKey;
use quipu_nic::{ConnId, Ends, Gid, Header, Marking, Passage, Probe, QpNum};
use quipu_observe::{
    Capture, Direction, Hello, Interface, Limits, Mark, Message, Pair, Passed, StreamEnds, StreamId,
};

use crate::address::HostAddress;
use crate::config::CaptureConfig;
use crate::sys;

mod file;

use file::CaptureFile;

/// The adapter of an engine.
pub(crate) type Adapter = quipu_nic::Adapter<Tap>;

/// Sees what passes, if anybody wants to.
#[derive(Debug, Default)]
pub(crate) struct Tap(Option<Box<Recorder>>);

/// A capture and its file.
#[derive(Debug)]
struct Recorder {
    capture: Capture,
    file: CaptureFile,
    /// Whether the user was told that the file has reached its limit.
    told: bool,
}

impl Tap {
    /// A tap that captures what passes at the address of a device.
    ///
    /// # Errors
    /// The file, named in the error's stead, cannot be written.
    pub(crate) fn open(
        config: &CaptureConfig,
        device: &str,
        address: &HostAddress,
    ) -> Result<Self, (PathBuf, io::Error)> {
        let file = CaptureFile::open(&config.path)?;
        let program = std::env::current_exe().unwrap_or_default();
        let interface = Interface {
            name: device.into(),
            description: format!(
                "{} (process {}) at {}",
                program.file_name().unwrap_or_default().to_string_lossy(),
                std::process::id(),
                address.ip
            ),
            application: concat!("Quipu ", env!("CARGO_PKG_VERSION")).into(),
        };
        let longest = config.file_bytes.min(sys::file_size_limit());
        let file_bytes = longest.saturating_sub(file.length());
        let capture = Capture::new(&interface, Limits { file_bytes, snaplen: config.snaplen });
        let mut tap = Self(Some(Box::new(Recorder { capture, file, told: false })));
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

    /// What is sent on a stream is marked so from now on.
    pub(crate) fn stream_marked(&mut self, conn: ConnId, marking: Marking) {
        if let Some(recorder) = &mut self.0 {
            recorder.capture.stream_marked(id(conn), mark_of(marking));
        }
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
        mark: Mark,
    ) {
        if let Some(recorder) = &mut self.0 {
            recorder.capture.datagram_passed(now(), outgoing, (from, to), bytes, mark);
        }
    }

    /// There is a packet link.
    pub(crate) fn link_opened(&mut self, name: &str, ethernet: bool) {
        if let Some(recorder) = &mut self.0 {
            recorder.capture.link_opened(name, "the packet link of QPIP", ethernet);
        }
        self.flush();
    }

    /// A frame passed on the packet link, where it has this tag, if any.
    #[inline]
    pub(crate) fn frame_passed(&mut self, outgoing: bool, frame: &[u8], tag: Option<u16>) {
        if let Some(recorder) = &mut self.0 {
            recorder.capture.frame_passed(now(), outgoing, frame, tag);
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
        let Recorder { capture, file, told } = &mut **recorder;
        if let Err(error) = file.add(capture.output()) {
            tracing::error!(path = %file.path().display(), %error, "no more packets are captured");
            self.0 = None;
            return;
        }
        capture.clear();
        if capture.is_full() && !std::mem::replace(told, true) {
            // Anyone who reads the capture would take what is missing for what did not happen.
            let path = file.path().display();
            tracing::error!(%path, "the capture has reached its limit; no more packets are captured");
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
        self.frame_passed(true, frame, None);
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
        let Passage { wr_id, length, marking, .. } = *passage;
        let passed = Passed { message, length, wr_id, mark: marking.map(mark_of) };
        recorder.capture.channel_passed(now(), (pair, from), passed, fill);
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

/// A marking as a capture knows it.
fn mark_of(marking: Marking) -> Mark {
    let Marking { traffic_class, service_level, lane } = marking;
    Mark { traffic_class, service_level, lane }
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
