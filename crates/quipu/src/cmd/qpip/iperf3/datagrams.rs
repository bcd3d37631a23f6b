//! Streams of datagrams: a queue pair at a UDP port, and those who send to it and are sent to. A datagram
//! begins with when it was sent, by its sender's clock, and its number from 1 on; a stream begins with a word
//! and an answer, of four octets each.

use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};
use std::time::Instant;

use quipu::qpip::UdpQueuePair;
use quipu::{Completion, CompletionQueue, Error, ProtectionDomain, Request, WcExtra, WcStatus};

use super::words::Counts;
use crate::cmd::qpip::places::Places;

/// What a client says first, and the answer.
const HELLO: &[u8; 4] = b"9876";
const WELCOME: &[u8; 4] = b"6789";
/// Seconds, microseconds and number, of 32 bits each; or a number of 64.
const HEADER: usize = 12;
const WIDE_HEADER: usize = 16;
/// Places to send from; and to receive into, as many as so many octets are, within bounds.
const SENDS: usize = 64;
const RECEIVED: usize = 4 << 20;
const RECEIVES: (usize, usize) = (16, 256);
/// The numbers of sends begin here.
const IS_SEND: u64 = 1 << 32;

/// A stream.
struct Flow {
    peer: SocketAddr,
    /// The peer has answered.
    is_welcome: bool,
    /// Octets that were given, and how many datagrams are under way.
    posted: u64,
    under_way: usize,
    /// What has gone out. What was numbered counts as a packet, whatever has become of it.
    sent: Counts,
    received: Receiver,
}

/// What has come.
#[derive(Default)]
struct Receiver {
    counts: Counts,
    /// How long the latest took, by two clocks, in seconds.
    transit: Option<f64>,
}

impl Receiver {
    /// A datagram of so many octets came `now`, in seconds of any clock.
    fn note(&mut self, header: &[u8], wide: bool, len: u64, now: f64) {
        let word = |at: usize| {
            let octets = header.get(at..at + 4).and_then(|octets| octets.try_into().ok());
            octets.map_or(0, u32::from_be_bytes)
        };
        let number = match wide {
            true => u64::from(word(8)) << 32 | u64::from(word(12)),
            false => word(8).into(),
        };
        let counts = &mut self.counts;
        counts.bytes += len;
        if number > counts.packets {
            let missing = number - counts.packets - 1;
            counts.errors = counts.errors.saturating_add(missing);
            counts.packets = number;
        } else {
            // It was missed, and is late.
            counts.errors = counts.errors.saturating_sub(1);
        }
        // RFC 3550 6.4.1: the mean deviation of how long two in a row take.
        let transit = now - (f64::from(word(0)) + f64::from(word(4)) / 1e6);
        if let Some(last) = self.transit.replace(transit) {
            counts.jitter += ((transit - last).abs() - counts.jitter) / 16.0;
        }
    }
}

/// A queue pair at a UDP port.
pub(super) struct Port {
    qp: UdpQueuePair,
    /// Numbers have 64 bits.
    wide: bool,
    clock: Instant,
    receives: Places,
    sends: Places,
    /// Whose datagram is in each place that is sent from, and how long it is: 0 for words.
    under_way: Vec<(usize, u64)>,
    free: Vec<u64>,
    flows: Vec<Flow>,
    by_peer: HashMap<SocketAddr, usize>,
    /// Who may begin streams here, and how many may be.
    admits: Option<(IpAddr, usize)>,
}

impl Port {
    /// Binds a queue pair, for datagrams of so many octets at most.
    ///
    /// # Errors
    /// The port is in use, or the adapter has no room.
    pub(super) fn new(
        pd: &ProtectionDomain,
        cq: &CompletionQueue,
        port: u16,
        len: u64,
        wide: bool,
    ) -> Result<Self, Error> {
        let len = (len as usize).max(WIDE_HEADER);
        let count = (RECEIVED / len).clamp(RECEIVES.0, RECEIVES.1);
        let queues = pd.queue_pair(cq, cq).send_queue(SENDS as u32, 1);
        let qp = queues.recv_queue(count as u32, 1).build_udp(port)?;
        let (receives, sends) = (Places::new(pd, count, len)?, Places::new(pd, SENDS, len)?);
        for place in 0..count as u64 {
            qp.post_recv(place, &receives.room(place)?)?;
        }
        let octets: Vec<u8> = (0..len).map(|at| (at.wrapping_mul(at) >> 7) as u8).collect();
        for place in 0..SENDS as u64 {
            sends.fill(place, &octets)?;
        }
        Ok(Self {
            qp,
            wide,
            clock: Instant::now(),
            receives,
            sends,
            under_way: vec![(0, 0); SENDS],
            free: (0..SENDS as u64).collect(),
            flows: Vec::new(),
            by_peer: HashMap::new(),
            admits: None,
        })
    }

    pub(super) fn number(&self) -> quipu::QpNum {
        self.qp.number()
    }

    /// From now on so many streams may begin, from an address.
    pub(super) fn admit(&mut self, from: IpAddr, count: usize) {
        self.admits = Some((from, count));
    }

    /// How many streams there are.
    pub(super) fn flows(&self) -> usize {
        self.flows.len()
    }

    /// Says to a peer that a stream begins, the first time or again.
    ///
    /// # Errors
    /// No way leads there.
    pub(super) fn greet(&mut self, peer: SocketAddr) -> Result<(), Error> {
        self.flow_of(peer);
        self.word(peer, HELLO)
    }

    pub(super) fn is_welcome(&self) -> bool {
        self.flows.iter().all(|flow| flow.is_welcome)
    }

    fn flow_of(&mut self, peer: SocketAddr) -> usize {
        *self.by_peer.entry(peer).or_insert_with(|| {
            self.flows.push(Flow {
                peer,
                is_welcome: false,
                posted: 0,
                under_way: 0,
                sent: Counts::default(),
                received: Receiver::default(),
            });
            self.flows.len() - 1
        })
    }

    fn word(&mut self, peer: SocketAddr, word: &[u8; 4]) -> Result<(), Error> {
        let Some(place) = self.free.pop() else { return Ok(()) };
        self.under_way[place as usize] = (0, 0);
        let request = self.sends.fill(place, word)?;
        self.send(peer, place, &request)
    }

    fn send(&mut self, peer: SocketAddr, place: u64, list: &[quipu::Sge]) -> Result<(), Error> {
        let sent = self.qp.send_to(&Request::send(list).id(IS_SEND + place), peer);
        if sent.is_err() {
            self.free.push(place);
        }
        sent
    }

    /// Octets that were given to a stream.
    pub(super) fn posted(&self, flow: usize) -> u64 {
        self.flows[flow].posted
    }

    /// What a stream has sent, or received.
    pub(super) fn counts(&self, flow: usize, sent: bool) -> Counts {
        if sent { self.flows[flow].sent } else { self.flows[flow].received.counts }
    }

    /// Whether a stream may send: each has its share of the places.
    pub(super) fn has_room(&self, flow: usize) -> bool {
        let share = (SENDS / self.flows.len().max(1)).max(1);
        !self.free.is_empty() && self.flows[flow].under_way < share
    }

    /// Sends a datagram of so many octets, its header included.
    ///
    /// # Errors
    /// It is longer than a datagram can be.
    pub(super) fn send_block(&mut self, flow: usize, len: u64) -> Result<(), Error> {
        let Some(place) = self.free.pop() else { return Ok(()) };
        let Flow { peer, sent, posted, under_way, .. } = &mut self.flows[flow];
        let (peer, number, now) = (*peer, sent.packets + 1, self.clock.elapsed());
        let mut header = [0; WIDE_HEADER];
        header[..4].copy_from_slice(&(now.as_secs() as u32).to_be_bytes());
        header[4..8].copy_from_slice(&now.subsec_micros().to_be_bytes());
        let header = if self.wide {
            header[8..].copy_from_slice(&number.to_be_bytes());
            &header[..]
        } else {
            header[8..HEADER].copy_from_slice(&(number as u32).to_be_bytes());
            &header[..HEADER]
        };
        *posted += len;
        *under_way += 1;
        sent.packets = number;
        self.under_way[place as usize] = (flow, len);
        self.sends.fill(place, header)?;
        let list = self.sends.filled(place, len as usize)?;
        self.send(peer, place, &list)
    }

    /// A request has completed.
    ///
    /// # Errors
    /// The adapter is gone.
    pub(super) fn completed(&mut self, completion: &Completion) -> Result<(), Error> {
        let fine = completion.status == WcStatus::Success;
        if let Some(place) = completion.wr_id.checked_sub(IS_SEND) {
            let (flow, len) = self.under_way[place as usize];
            self.free.push(place);
            if len > 0 {
                self.flows[flow].under_way -= 1;
                self.flows[flow].sent.bytes += if fine { len } else { 0 };
            }
            return Ok(());
        }
        if completion.status == WcStatus::WrFlushErr {
            return Ok(());
        }
        let place = completion.wr_id;
        if let WcExtra::From(from) = completion.extra
            && fine
        {
            let mut header = [0; WIDE_HEADER];
            let len = (completion.byte_len as usize).min(WIDE_HEADER);
            self.receives.read_into(place, &mut header[..len])?;
            self.arrived(from.into(), &header[..len], completion.byte_len.into());
        }
        self.qp.post_recv(place, &self.receives.room(place)?)
    }

    fn arrived(&mut self, from: SocketAddr, header: &[u8], len: u64) {
        // RFC 768: who has no port wants no answer, and gets none.
        if from.port() == 0 {
            return;
        }
        let known = self.by_peer.get(&from).copied();
        let wanted = self.admits.filter(|(ip, count)| {
            *ip == from.ip() && (known.is_some() || self.flows.len() < *count)
        });
        if header.len() == HELLO.len() {
            if wanted.is_some() {
                let flow = self.flow_of(from);
                self.flows[flow].is_welcome = true;
                // If it is lost, the peer asks again.
                let _ = self.word(from, WELCOME);
            } else if let Some(flow) = known {
                self.flows[flow].is_welcome = true;
            }
            return;
        }
        let least = if self.wide { WIDE_HEADER } else { HEADER };
        if let Some(flow) = known.filter(|_| header.len() >= least) {
            let now = self.clock.elapsed().as_secs_f64();
            let flow = &mut self.flows[flow];
            // One that the answer was overtaken by.
            flow.is_welcome = true;
            flow.received.note(header, self.wide, len, now);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn header(seconds: u32, micros: u32, number: u64) -> [u8; WIDE_HEADER] {
        let mut header = [0; WIDE_HEADER];
        header[..4].copy_from_slice(&seconds.to_be_bytes());
        header[4..8].copy_from_slice(&micros.to_be_bytes());
        header[8..].copy_from_slice(&number.to_be_bytes());
        header
    }

    #[test]
    fn what_is_missing_is_lost_until_it_comes() {
        let mut receiver = Receiver::default();
        let mut note = |number| {
            receiver.note(&header(0, 0, number), true, 100, 0.0);
            (receiver.counts.packets, receiver.counts.errors)
        };
        assert_eq!([1, 2, 5, 4].map(&mut note), [(1, 0), (2, 0), (5, 2), (5, 1)]);
        // A peer may say anything.
        assert_eq!(note(u64::MAX), (u64::MAX, u64::MAX - 5));
        assert_eq!(note(0).1, u64::MAX - 6);
        assert_eq!(receiver.counts.bytes, 600);
    }

    #[test]
    fn jitter_is_a_sixteenth_of_each_deviation() {
        let mut receiver = Receiver::default();
        // Sent each 10 ms by a clock of its own; the third takes 8 ms longer.
        for (number, now) in [(1, 5.0), (2, 5.01), (3, 5.028)] {
            let header = header(1000, 10_000 * number, u64::from(number) << 32);
            receiver.note(&header, false, 100, now);
        }
        assert!((receiver.counts.jitter - 0.0005).abs() < 1e-9, "{}", receiver.counts.jitter);
        assert_eq!((receiver.counts.packets, receiver.counts.errors), (3, 0));
    }
}
