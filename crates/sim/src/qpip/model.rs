//! What must be: the ends of connections, what they have sent and what they are to receive.

use std::collections::VecDeque;
use std::net::SocketAddr;

use quipu_nic::inet::tcp::Mode;
use quipu_nic::{QpId, QpNum, TcpChange, TcpSettings, WcStatus};

use crate::rng::pattern;

/// How an end comes to its connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Opening {
    /// It connects to its peer.
    Connects,
    /// It is offered to a listener, to be mated with its peer.
    Offered,
    /// Its program decides about its peer, and refuses it so many times.
    Decides { refusals: u32 },
    /// Both ends connect to each other, this one from the port that the other one connects to.
    Together { port: u16 },
}

/// How far an end is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// Its queue pair is still that of another end.
    Unborn,
    /// Nothing was asked for.
    Idle,
    /// It waits for its connection.
    Opening,
    /// The connection stands.
    Up,
    /// The connection is over, or the queue pair.
    Over,
}

/// What an end does when it has sent everything.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Farewell {
    /// It closes, and goes on receiving.
    Closes,
    /// Nothing.
    Stays,
}

/// A send that was posted and whose fate is not known.
#[derive(Clone, Debug)]
pub struct Sent {
    pub id: u64,
    pub len: usize,
    pub signaled: bool,
    /// It fails.
    pub trap: bool,
}

/// A receive that was posted.
#[derive(Clone, Copy, Debug)]
pub struct Posted {
    pub id: u64,
    pub slot: usize,
    pub room: usize,
    /// Statuses that a message makes it fail with.
    pub trap: Option<WcStatus>,
}

/// A queue pair, and how its program uses it.
#[derive(Clone, Copy)]
pub struct Seat {
    pub host: usize,
    pub num: QpNum,
    pub qp: QpId,
    pub cqs: [usize; 2],
    pub send_depth: usize,
    pub inline: usize,
    /// Receives that are to be posted.
    pub depth: usize,
}

/// An end of a connection, and the program that uses it.
pub struct End {
    pub host: usize,
    pub num: QpNum,
    /// The other end. Before they are mated it is the one that is there for it: of those who share a port,
    /// each may get another.
    pub peer: usize,
    pub mated: bool,
    pub qp: QpId,
    pub cqs: [usize; 2],
    pub settings: TcpSettings,
    pub opening: Opening,
    /// Where it waits for its peer.
    pub port: Option<usize>,
    pub remote: SocketAddr,
    pub stage: Stage,
    /// It exists in its adapter, which lives.
    pub exists: bool,
    /// What explains that its connection fails.
    pub causes: Vec<&'static str>,
    /// How the connection ended.
    pub over: Option<TcpChange>,
    pub peer_closed: bool,
    /// The program has closed.
    pub closed: bool,
    pub farewell: Farewell,
    pub ops_left: u32,
    /// At this many requests left one is posted that fails.
    pub trap_at: Option<u32>,
    pub send_depth: usize,
    pub inline: usize,
    pub sent: VecDeque<Sent>,
    /// Octets that were posted, and those that are acknowledged.
    pub written: u64,
    pub acked: u64,
    /// Message mode: the ends of the messages that were posted and not yet received.
    pub boundaries: VecDeque<u64>,
    /// One request has failed with a status of its own, others are flushed.
    pub failed: bool,
    /// One has failed, or was flushed: so is everything behind it.
    pub flushes: bool,
    pub depth: usize,
    pub posted: VecDeque<Posted>,
    /// Octets of the peer that were received.
    pub received: u64,
    pub idle: u32,
    pub refill_idle: u32,
    /// How often the queue pair, and that of its peer, is still to be used again.
    pub rebirths: u32,
    /// Whose queue pair it was before, and whose it is next.
    pub before: Option<usize>,
    pub after: Option<usize>,
}

impl End {
    /// One that does not exist yet, and has nothing to send.
    pub fn new(
        seat: Seat,
        peer: usize,
        settings: TcpSettings,
        opening: Opening,
        remote: SocketAddr,
    ) -> Self {
        let Seat { host, num, qp, cqs, send_depth, inline, depth } = seat;
        Self {
            host,
            num,
            peer,
            mated: false,
            qp,
            cqs,
            settings,
            opening,
            port: None,
            remote,
            stage: Stage::Idle,
            exists: false,
            causes: Vec::new(),
            over: None,
            peer_closed: false,
            closed: false,
            farewell: Farewell::Stays,
            ops_left: 0,
            trap_at: None,
            send_depth,
            inline,
            sent: VecDeque::new(),
            written: 0,
            acked: 0,
            boundaries: VecDeque::new(),
            failed: false,
            flushes: false,
            depth,
            posted: VecDeque::new(),
            received: 0,
            idle: 0,
            refill_idle: 0,
            rebirths: 0,
            before: None,
            after: None,
        }
    }

    pub fn seat(&self) -> Seat {
        let Self { host, num, qp, cqs, send_depth, inline, depth, .. } = *self;
        Seat { host, num, qp, cqs, send_depth, inline, depth }
    }

    pub fn is_message(&self) -> bool {
        self.settings.mode == Mode::Message
    }

    /// Whether it may use its connection to send.
    pub fn may_send(&self) -> bool {
        self.exists && self.stage == Stage::Up && !self.closed && !self.failed
    }
}

/// The bytes from `start` on of what end number `end` sends.
pub fn stream(end: usize, start: u64, len: usize) -> Vec<u8> {
    pattern(0x5150_4950 ^ ((end as u64) << 40), start as usize, len)
}
