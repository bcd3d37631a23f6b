//! All connections of an engine as one capture.

use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use quipu_iwarp::wire::Stag;
use quipu_iwarp::wire::cm::Lookup;
use quipu_iwarp::wire::datagram::Datagram;
use quipu_iwarp::wire::hello::Hello;
use quipu_iwarp::wire::mpa::{Enhanced, FrameKind, StartFrame};
use quipu_iwarp::wire::rdmap::{TaggedOp, UntaggedOp};
use quipu_iwarp::{Negotiated, Sender};

use crate::flow::{Flow, Sink};
use crate::packet::{Direction, Mark, udp_headers};
use crate::pcapng::{self, Interface, LinkType};

/// Longest ULPDU of the messages that no stream carried: what the adapter sends on streams.
const MAX_ULPDU: u16 = 64_000;
/// Room for the FPDU around it.
const FPDU_ROOM: usize = 64 * 1024;
/// Octets of the station addresses of an Ethernet frame.
const STATIONS: usize = 12;
/// The ports that connections without a stream come from.
const FIRST_PORT: u16 = 49_152;

/// How much is captured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Longest file in bytes; then the capture ends.
    pub file_bytes: u64,
    /// Most bytes of a packet that are kept, headers included; 0: all. Longer ones are marked as cut off.
    pub snaplen: u32,
}

/// A byte stream, as its owner names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum StreamId {
    /// One of the adapter.
    Adapter(u64),
    /// One of connection management, which the adapter may get in the end.
    Management(u64),
}

/// Between whom a byte stream is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StreamEnds {
    /// Address of this end.
    pub local: SocketAddr,
    /// Address of the other.
    pub remote: SocketAddr,
    /// Whether this end made the connection.
    pub active: bool,
}

/// Two queue pairs that are joined without a stream. The client is the one that would have made the
/// connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Pair {
    /// Address and number of the client.
    pub client: (IpAddr, u32),
    /// Address and number of the server.
    pub server: (IpAddr, u32),
}

/// How a message is addressed on a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Message {
    /// Into memory.
    Tagged {
        /// What it is.
        op: TaggedOp,
        /// Whose memory: a key.
        stag: u32,
        /// Where in it.
        to: u64,
    },
    /// Into a queue.
    Untagged {
        /// What it is.
        op: UntaggedOp,
        /// Key to invalidate, or immediate.
        ulp: u32,
    },
}

/// A message that passed between two queue pairs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Passed {
    /// How it is addressed.
    pub message: Message,
    /// Bytes of payload.
    pub length: u32,
    /// The work request of this engine that it belongs to.
    pub wr_id: Option<u64>,
    /// How it is marked; `None` if the peer sent it.
    pub mark: Option<Mark>,
}

/// A pair of queue pairs as a connection.
#[derive(Debug)]
struct Channel {
    flow: Flow,
    senders: [Sender; 2],
}

/// A capture that is being written.
#[derive(Debug)]
pub struct Capture {
    sink: Sink,
    streams: HashMap<StreamId, (Flow, Direction)>,
    channels: HashMap<Pair, Channel>,
    next_port: u16,
    /// Whether frames of a link have an interface.
    has_link: bool,
    /// Where FPDUs are made.
    room: Vec<u8>,
}

impl Capture {
    /// A capture with no packets yet.
    #[must_use]
    pub fn new(interface: &Interface, limits: Limits) -> Self {
        let mut out = Vec::new();
        pcapng::begin(&mut out, interface, limits.snaplen);
        let written = out.len() as u64;
        Self {
            sink: Sink { out, limits, written, full: false },
            streams: HashMap::new(),
            channels: HashMap::new(),
            next_port: FIRST_PORT,
            has_link: false,
            room: Vec::new(),
        }
    }

    /// The bytes of the file that were not taken yet; [`clear`](Self::clear) takes them.
    #[must_use]
    pub fn output(&self) -> &[u8] {
        &self.sink.out
    }

    /// Forgets the output, once it is written.
    pub fn clear(&mut self) {
        self.sink.out.clear();
    }

    /// Whether the file reached its limit, so that packets are missing.
    #[must_use]
    pub fn is_full(&self) -> bool {
        self.sink.full
    }

    /// A byte stream was made.
    pub fn stream_opened(&mut self, time: Duration, id: StreamId, ends: StreamEnds) {
        let (pair, own) = match ends.active {
            true => ([ends.local, ends.remote], Direction::FromClient),
            false => ([ends.remote, ends.local], Direction::FromServer),
        };
        let flow = Flow::open(&mut self.sink, time, pair, own);
        self.streams.insert(id, (flow, own));
    }

    /// A stream has another owner and name from now on.
    pub fn stream_renamed(&mut self, from: StreamId, to: StreamId) {
        if let Some(stream) = self.streams.remove(&from) {
            self.streams.insert(to, stream);
        }
    }

    /// The next segment of a request that is sent on a stream belongs to this work request.
    pub fn stream_noted(&mut self, id: StreamId, wr_id: u64) {
        if let Some((flow, _)) = self.streams.get_mut(&id) {
            flow.note(wr_id);
        }
    }

    /// What is sent on a stream is marked so from now on.
    pub fn stream_marked(&mut self, id: StreamId, mark: Mark) {
        if let Some((flow, _)) = self.streams.get_mut(&id) {
            flow.mark_own(mark);
        }
    }

    /// Bytes passed on a stream.
    pub fn stream_passed(&mut self, time: Duration, id: StreamId, outgoing: bool, bytes: &[u8]) {
        if let Some((flow, own)) = self.streams.get_mut(&id) {
            let from = if outgoing { *own } else { own.reverse() };
            flow.pass(&mut self.sink, time, from, bytes, None);
        }
    }

    /// A stream ended; `by_peer`: the peer ended it.
    pub fn stream_closed(&mut self, time: Duration, id: StreamId, by_peer: bool) {
        if let Some((flow, own)) = self.streams.remove(&id) {
            let from = if by_peer { own.reverse() } else { own };
            flow.close(&mut self.sink, time, from);
        }
    }

    /// A datagram passed. Of one that came, only the traffic class of `mark` is known.
    pub fn datagram_passed(
        &mut self,
        time: Duration,
        outgoing: bool,
        ends: (SocketAddr, SocketAddr),
        bytes: &[u8],
        mark: Mark,
    ) {
        // Longer ones are no datagrams of UDP.
        if let Some(headers) = udp_headers(ends, bytes, mark.traffic_class) {
            self.sink.packet(time, !outgoing, &headers, bytes, &told_of(bytes, mark));
        }
    }

    /// There is a packet link, whose frames begin with an Ethernet header, or else with that of IP. One at
    /// most.
    pub fn link_opened(&mut self, name: &str, description: &str, ethernet: bool) {
        if !std::mem::replace(&mut self.has_link, true) {
            let kind = if ethernet { LinkType::Ethernet } else { LinkType::Raw };
            self.sink.link(kind, name, description);
        }
    }

    /// A frame passed on the link, as it is here: the link may still have to compute its checksum and to cut
    /// it into segments, or may have joined it of several. `tag` is the control information of the tag that
    /// it has on the link (IEEE 802.1Q 9.6), in place of one that it has here.
    pub fn frame_passed(&mut self, time: Duration, outgoing: bool, frame: &[u8], tag: Option<u16>) {
        if !self.has_link {
            return;
        }
        let Some((tag, (addresses, rest))) = tag.zip(frame.split_at_checked(STATIONS)) else {
            return self.sink.frame(time, !outgoing, (&[], frame));
        };
        let rest = match rest {
            [0x81, 0, _, _, rest @ ..] => rest,
            rest => rest,
        };
        let [high, low] = tag.to_be_bytes();
        self.sink.frame(time, !outgoing, (&[addresses, &[0x81, 0, high, low]].concat(), rest));
    }

    /// Two queue pairs were joined, by what would have been said in `request` and `answer`. Nothing happens
    /// if they are: the other one may be of the same engine. `own`: the end that this engine is.
    pub fn channel_opened(
        &mut self,
        time: Duration,
        pair: Pair,
        own: Direction,
        (request, answer): (&Hello, &Hello),
    ) {
        if self.channels.contains_key(&pair) {
            return;
        }
        let port = self.next_port;
        self.next_port = port.checked_add(1).unwrap_or(FIRST_PORT);
        let client = SocketAddr::new(pair.client.0, port);
        let server = SocketAddr::new(pair.server.0, (pair.server.1 >> 8) as u16);
        let mut flow = Flow::open(&mut self.sink, time, [client, server], own);
        flow.name([pair.client.1, pair.server.1]);
        let starts = [
            (Direction::FromClient, FrameKind::Request, request),
            (Direction::FromServer, FrameKind::Reply, answer),
        ];
        for (from, kind, hello) in starts {
            flow.pass(&mut self.sink, time, from, &start_frame(kind, hello), None);
        }
        let senders = [(); 2].map(|()| Sender::new(&Negotiated::plain(), MAX_ULPDU));
        self.channels.insert(pair, Channel { flow, senders });
    }

    /// A message passed between two queue pairs. `fill` copies its bytes from an offset on.
    pub fn channel_passed(
        &mut self,
        time: Duration,
        (pair, from): (Pair, Direction),
        passed: Passed,
        fill: &mut dyn FnMut(u32, &mut [u8]),
    ) {
        let Some(Channel { flow, senders }) = self.channels.get_mut(&pair) else { return };
        if self.sink.full {
            return;
        }
        let Passed { message, length, wr_id, mark } = passed;
        if let Some(mark) = mark {
            flow.mark(from, mark);
        }
        self.room.resize(FPDU_ROOM, 0);
        let tx = &mut senders[from.index()];
        let mut msg = match message {
            Message::Tagged { op, stag, to } => tx.begin_tagged(op, Stag(stag), to),
            Message::Untagged { op, ulp } => tx.begin_untagged(op, ulp),
        };
        loop {
            let done = msg.offset();
            let staged =
                tx.segment(&mut msg, &mut self.room, length - done, |place| fill(done, place));
            let Some(staged) = staged else { return };
            flow.pass(&mut self.sink, time, from, &self.room[..staged.bytes], wr_id);
            if staged.last {
                return;
            }
        }
    }

    /// Two queue pairs are joined no more; `from`: the end that left.
    pub fn channel_closed(&mut self, time: Duration, pair: Pair, from: Direction) {
        if let Some(channel) = self.channels.remove(&pair) {
            channel.flow.close(&mut self.sink, time, from);
        }
    }

    /// StreamEnds all connections: the process is about to.
    pub fn close_all(&mut self, time: Duration) {
        for (_, (flow, own)) in self.streams.drain() {
            flow.close(&mut self.sink, time, own);
        }
        for (_, channel) in self.channels.drain() {
            channel.flow.close(&mut self.sink, time, Direction::FromClient);
        }
    }
}

/// What is in a datagram, for people.
fn told_of(bytes: &[u8], mark: Mark) -> String {
    if let Ok(lookup) = Lookup::parse(bytes) {
        let name = match lookup {
            Lookup::Request { .. } => "SIDR_REQ",
            Lookup::Reply { .. } => "SIDR_REP",
        };
        return format!("connection management: {name}");
    }
    match Datagram::parse(bytes) {
        Ok(Datagram { source_qpn, dest_qpn, frame, .. }) => {
            let kind = if frame { "Ethernet frame" } else { "Datagram" };
            mark.comment([source_qpn, dest_qpn], kind)
        }
        Err(_) => "no datagram of Quipu".to_owned(),
    }
}

/// The frame by which a stream would have started up.
fn start_frame(kind: FrameKind, hello: &Hello) -> Vec<u8> {
    let private_data = hello.to_bytes();
    let frame = StartFrame {
        kind,
        markers: false,
        crc: true,
        reject: false,
        revision: 2,
        enhanced: Some(Enhanced { ird: 128, ord: 128, ..Enhanced::default() }),
        private_data: &private_data,
    };
    let mut bytes = vec![0; frame.wire_len()];
    frame.emit(&mut bytes);
    bytes
}
