//! A connection as a conversation of TCP packets: handshake, numbered bytes, end.

use std::collections::VecDeque;
use std::fmt::Write as _;
use std::net::SocketAddr;
use std::time::Duration;

use quipu_iwarp::wire::mpa::FrameKind;

use crate::capture::Limits;
use crate::frame::{Framer, Summary, Told, What};
use crate::packet::{Direction, MAX_PAYLOAD, Mark, Segment, flag};
use crate::pcapng::{self, LinkType, Packet};

/// The first sequence number of both ends.
const FIRST_SEQ: u32 = 1_000_000;
/// How many segments of work requests may be noted before their bytes pass; far more than one send has.
const NOTES_MAX: usize = 1 << 16;

/// Where packets go.
#[derive(Debug)]
pub(crate) struct Sink {
    pub(crate) out: Vec<u8>,
    pub(crate) limits: Limits,
    /// Bytes of the file so far.
    pub(crate) written: u64,
    /// Whether the limit was reached: nothing is added any more.
    pub(crate) full: bool,
}

impl Sink {
    /// Adds a packet, as far as the limits allow.
    pub(crate) fn packet(
        &mut self,
        time: Duration,
        inbound: bool,
        head: &[u8],
        body: &[u8],
        comment: &str,
    ) {
        let keep = self.keep(head.len(), head.len() + body.len());
        let (bytes, length) =
            ((head, &body[..keep - head.len()]), (head.len() + body.len()) as u32);
        let packet = Packet { interface: 0, time, bytes, length, inbound, comment };
        self.add(|out| pcapng::packet(out, &packet));
    }

    /// Adds an interface whose packets are frames.
    pub(crate) fn link(&mut self, kind: LinkType, name: &str, description: &str) {
        let snaplen = self.limits.snaplen;
        self.add(|out| pcapng::interface(out, kind, (name, description), snaplen));
    }

    /// Adds a frame of that interface, which is in two pieces.
    pub(crate) fn frame(&mut self, time: Duration, inbound: bool, (head, rest): (&[u8], &[u8])) {
        let keep = self.keep(head.len(), head.len() + rest.len());
        let bytes = (head, &rest[..keep - head.len()]);
        let length = (head.len() + rest.len()) as u32;
        let packet = Packet { interface: 1, time, bytes, length, inbound, comment: "" };
        self.add(|out| pcapng::packet(out, &packet));
    }

    /// How many octets of `length` are kept, `least` at least.
    fn keep(&self, least: usize, length: usize) -> usize {
        match self.limits.snaplen as usize {
            0 => length,
            snaplen => snaplen.max(least).min(length),
        }
    }

    /// Adds a block, as far as the limits allow.
    fn add(&mut self, write: impl FnOnce(&mut Vec<u8>)) {
        if self.full {
            return;
        }
        let before = self.out.len();
        write(&mut self.out);
        let added = (self.out.len() - before) as u64;
        if self.written + added > self.limits.file_bytes {
            self.out.truncate(before);
            self.full = true;
        } else {
            self.written += added;
        }
    }
}

/// One connection.
#[derive(Debug)]
pub(crate) struct Flow {
    /// The addresses of client and server.
    ends: [SocketAddr; 2],
    /// What each sends next.
    seq: [u32; 2],
    framers: [Framer; 2],
    /// Queue pair of client and server, once the start-up told.
    qpns: Option<[u32; 2]>,
    /// How what client and server send is marked, as far as this process knows.
    marks: [Mark; 2],
    /// The end whose work requests are noted.
    own: Direction,
    /// For each segment of an own work request that is to pass next: its number.
    notes: VecDeque<u64>,
}

impl Flow {
    /// A connection that was just made, with its handshake.
    pub(crate) fn open(
        sink: &mut Sink,
        time: Duration,
        ends: [SocketAddr; 2],
        own: Direction,
    ) -> Self {
        let mut flow = Self {
            ends,
            seq: [FIRST_SEQ; 2],
            framers: [Framer::new(FrameKind::Request), Framer::new(FrameKind::Reply)],
            qpns: None,
            marks: [Mark::default(); 2],
            own,
            notes: VecDeque::new(),
        };
        let (client, server) = (Direction::FromClient, Direction::FromServer);
        flow.bare(sink, time, client, flag::SYN);
        flow.bare(sink, time, server, flag::SYN | flag::ACK);
        flow.bare(sink, time, client, flag::ACK);
        flow
    }

    /// Its queue pairs are these, of client and server.
    pub(crate) fn name(&mut self, qpns: [u32; 2]) {
        self.qpns = Some(qpns);
    }

    /// What this process sends is marked so from now on.
    pub(crate) fn mark(&mut self, from: Direction, mark: Mark) {
        self.marks[from.index()] = mark;
    }

    /// As [`mark`](Self::mark), for the end whose work requests are noted.
    pub(crate) fn mark_own(&mut self, mark: Mark) {
        self.mark(self.own, mark);
    }

    /// The next segment of an own work request belongs to this one.
    pub(crate) fn note(&mut self, wr_id: u64) {
        if self.notes.len() < NOTES_MAX {
            self.notes.push_back(wr_id);
        }
    }

    /// Bytes passed. What of them is a whole frame is a packet of its own.
    /// `wr_id`: the work request that they belong to, where that is not noted.
    pub(crate) fn pass(
        &mut self,
        sink: &mut Sink,
        time: Duration,
        from: Direction,
        bytes: &[u8],
        wr_id: Option<u64>,
    ) {
        if sink.full {
            return;
        }
        let Self { ends, seq, framers, qpns, marks, own, notes } = self;
        let mark = marks[from.index()];
        let mut markers = false;
        framers[from.index()].push(bytes, |frame, what| {
            let mut comment = String::new();
            if let What::Told(told) = what {
                markers |= told.markers;
                if let Some((source, destination)) = told.qpns {
                    let mut pair = [source, destination];
                    if from == Direction::FromServer {
                        pair.reverse();
                    }
                    *qpns = Some(pair);
                }
            }
            if let (Some(pair), What::Told(_) | What::Fpdu) = (&qpns, what) {
                let (source, destination) = (pair[from.index()], pair[from.reverse().index()]);
                let _ = write!(comment, "QP {source:#08x} to {destination:#08x}");
                mark.describe(&mut comment);
                comment.push_str(": ");
            }
            match what {
                What::Told(Told { management: Some(name), .. }) => {
                    let _ = write!(comment, "connection management: {name}");
                }
                What::Told(_) => comment.push_str("MPA start-up"),
                What::Fpdu => {
                    if let Some(summary) = Summary::of(frame) {
                        summary.describe(&mut comment);
                        let noted = from == *own && summary.is_request();
                        let wr_id = wr_id.or_else(|| noted.then(|| notes.pop_front()).flatten());
                        if let Some(wr_id) = wr_id {
                            let _ = write!(comment, ", wr_id {wr_id:#x}");
                        }
                    }
                }
                // What cannot be told apart is not told of.
                What::Opaque => {}
            }
            let what = (frame, &comment[..], mark);
            send(sink, time, (ends, seq), (from, from == *own), what);
        });
        if markers {
            framers.iter_mut().for_each(Framer::give_up);
        }
    }

    /// The connection ended, by this end first.
    pub(crate) fn close(mut self, sink: &mut Sink, time: Duration, from: Direction) {
        for from in [from, from.reverse()] {
            let rest = self.framers[from.index()].take_rest();
            let outgoing = from == self.own;
            let what = (&rest[..], "cut off", self.marks[from.index()]);
            send(sink, time, (&self.ends, &mut self.seq), (from, outgoing), what);
        }
        self.bare(sink, time, from, flag::FIN | flag::ACK);
        self.bare(sink, time, from.reverse(), flag::FIN | flag::ACK);
        self.bare(sink, time, from, flag::ACK);
    }

    /// A packet without bytes.
    fn bare(&mut self, sink: &mut Sink, time: Duration, from: Direction, flags: u8) {
        let mark = self.marks[from.index()];
        let headers = segment(&self.ends, &self.seq, from, flags, mark).headers(&[]);
        sink.packet(time, from != self.own, &headers, &[], "");
        if flags & (flag::SYN | flag::FIN) != 0 {
            let seq = &mut self.seq[from.index()];
            *seq = seq.wrapping_add(1);
        }
    }
}

fn segment(
    ends: &[SocketAddr; 2],
    seq: &[u32; 2],
    from: Direction,
    flags: u8,
    mark: Mark,
) -> Segment {
    let (own, other) = (from.index(), from.reverse().index());
    let ack = if flags & flag::ACK != 0 { seq[other] } else { 0 };
    let traffic_class = mark.traffic_class;
    Segment { from: ends[own], to: ends[other], seq: seq[own], ack, flags, traffic_class }
}

/// Packets with these bytes, all of them with the comment.
fn send(
    sink: &mut Sink,
    time: Duration,
    (ends, seq): (&[SocketAddr; 2], &mut [u32; 2]),
    (from, outgoing): (Direction, bool),
    (bytes, comment, mark): (&[u8], &str, Mark),
) {
    for part in bytes.chunks(MAX_PAYLOAD) {
        let headers = segment(ends, seq, from, flag::PSH | flag::ACK, mark).headers(part);
        sink.packet(time, !outgoing, &headers, part, comment);
        let seq = &mut seq[from.index()];
        *seq = seq.wrapping_add(part.len() as u32);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::capture::Limits;

    #[test]
    fn what_is_no_rdma_is_not_told_of_as_such() {
        let limits = Limits { file_bytes: 1 << 20, snaplen: 0 };
        let mut sink = Sink { out: Vec::new(), limits, written: 0, full: false };
        let ends = ["192.0.2.1:4000", "192.0.2.2:5000"].map(|it| it.parse().unwrap());
        let mut flow = Flow::open(&mut sink, Duration::ZERO, ends, Direction::FromServer);
        flow.note(7);
        let told = |sink: &Sink, text: &[u8]| sink.out.windows(text.len()).any(|it| it == text);
        for from in [Direction::FromClient, Direction::FromServer] {
            let bytes = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n";
            flow.pass(&mut sink, Duration::ZERO, from, bytes, None);
        }
        assert!(told(&sink, b"GET /") && !told(&sink, b"RDMA") && !told(&sink, b"wr_id"));
    }
}
