//! TCP (RFC 9293) for queue pairs.
//!
//! A [`Connection`] is a value. Calls, parsed segments and the time go in; segments to be sent, events and
//! the next deadline come out:
//!
//! 1. [`Connection::handle_segment`] for what arrives, [`Connection::handle_timeout`] when it is time;
//! 2. [`Connection::poll_held`] and [`Connection::poll_event`] until they have nothing more;
//! 3. [`Connection::poll_transmit`] until it has nothing more;
//! 4. [`Connection::poll_timeout`] for the next deadline.
//!
//! **Its buffers are the queue pair's.** [`Connection::send`] says that so many octets more exist, which
//! the user can read again until [`Event::Acked`] says that they are acknowledged; a [`Segment`] names a
//! range of the stream. What arrives is a [`Placement`], a range of the packet and its offset in the
//! stream, and the window offered is the room that the user has posted. `specs/qpip.md` says how messages
//! and segments correspond.
//!
//! | module | reason to change |
//! |---|---|
//! | `state` | states and transitions (RFC 9293 3.3.2) |
//! | `listener`, `cookies`, `isn`, `hash` | opening by the peer; SYN floods; initial numbers (RFC 4987, 6528) |
//! | `receive`, `arrive`, `reassembly` | a segment's way through RFC 9293 3.10.7; what is behind gaps (RFC 2018) |
//! | `ack`, `rack`, `recovery`, `rtt` | what an acknowledgement means; loss (RFC 8985, 9937, 5682, 6298) |
//! | `transmit`, `send` | what goes out next; what is on the way |
//! | `window` | both windows (RFC 9293 3.8.6) |
//! | `congestion`, `pacing` | how fast (RFC 9438, 9406) |
//! | `path` | how large segments may be; reports of ICMP (RFC 8201, 4821, 8899, 5927) |
//! | `timeout`, `timers` | what time brings |
//! | `options`, `challenge`, `event`, `config`, `reset`, `seq` | small parts |

mod ack;
mod arrive;
mod challenge;
mod config;
mod congestion;
mod cookies;
mod event;
pub(crate) mod hash;
mod isn;
mod listener;
mod options;
mod pacing;
mod path;
mod rack;
mod reassembly;
mod receive;
mod recovery;
mod reset;
mod rtt;
mod send;
mod seq;
mod state;
mod timeout;
mod timers;
mod transmit;
mod window;

use std::ops::Range;
use std::sync::Arc;

use quipu_wire::tcp::{Flags, Repr, SeqNumber, Timestamps};

pub use config::{Config, KeepAlive, MILLISECOND, Mode, SECOND};
pub use event::{Counters, Event, Failure, SendError};
pub use hash::{Flow, Secret};
pub(crate) use isn::initial_number;
pub use listener::{Listener, Opening};
pub use options::Negotiated;
pub use path::Report;
pub use reassembly::Held;
pub use reset::reset_for;
pub use state::State;

use challenge::Limiter;
use congestion::{Congestion, Peak};
use event::Pending;
use pacing::Pacer;
use path::Search;
use rack::Rack;
use reassembly::Reassembly;
use recovery::Recovery;
use rtt::Rtt;
use send::SendQueue;
use seq::{FIRST, SeqSpace};
use state::Input;
use timers::{NEVER, Timer, Timers};
use window::{ReceiveWindow, SendWindow};

/// Acknowledgements that are not delayed, after the connection stands and after a gap: the peer is in slow
/// start.
const QUICK_ACKS: u8 = 16;

/// Positions beyond are refused: arithmetic on them could overflow.
const MAX_POSITION: u64 = 1 << 62;

/// A segment to be sent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Segment {
    /// The header; the checksum is to be filled in.
    pub header: Repr,
    /// Offsets of the payload in the stream of what was given to [`Connection::send`].
    pub payload: Range<u64>,
    /// To be sent as ECN-capable, ECT(0) (RFC 3168 5).
    pub ect: bool,
}

/// A part of a packet that belongs to an offset of the stream.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Placement {
    /// The offset in the stream of what the peer sends.
    pub offset: u64,
    /// The octets of the payload that was given to [`Connection::handle_segment`].
    pub payload: Range<usize>,
}

/// What a segment has brought.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Received {
    /// Payload to be placed, at once: the connection does not keep it. In stream mode it may lie behind a
    /// gap.
    pub placement: Option<Placement>,
    /// The stream is here without a gap up to this offset.
    pub contiguous: u64,
    /// PSH stood at the end of what has become contiguous: a message is complete, or a receive may be.
    pub push: bool,
}

/// The receiving half.
#[derive(Clone, Debug)]
struct Receive {
    space: SeqSpace,
    /// RCV.NXT.
    nxt: u64,
    window: ReceiveWindow,
    /// The position of the peer's FIN, once it was seen.
    fin: Option<u64>,
    /// Behind the last octet that had PSH, as far as seen.
    push: u64,
    /// Behind the last octet of urgent data that the user knows of.
    urgent: u64,
    /// Only while there are gaps.
    reassembly: Option<Box<Reassembly>>,
    /// TS.Recent and when it was set (RFC 7323 4.3).
    ts_recent: u32,
    ts_recent_at: u64,
    /// Last.ACK.sent.
    acked: u64,
    /// A duplicate to be reported (RFC 2883).
    duplicate: Option<(u64, u64)>,
    /// Congestion is to be echoed until the peer has reduced (RFC 3168 6.1.3).
    echo_mark: bool,
}

/// What is owed to the peer.
#[derive(Clone, Debug, Default)]
struct Owed {
    /// An acknowledgement, now.
    ack: bool,
    /// Segments since the last one.
    segments: u8,
    /// So many more are not delayed.
    quick: u8,
    /// CWR with the next new data (RFC 3168 6.1.2).
    cwr: bool,
    /// A segment beyond the congestion window: the tail loss probe.
    loss_probe: bool,
    /// A segment beyond the peer's window, or a small one.
    window_probe: bool,
    /// An acknowledgement that asks for one.
    keep_alive: bool,
}

/// One end of a connection: the transmission control block, and its rules.
#[derive(Clone, Debug)]
pub struct Connection {
    state: State,
    passive: bool,
    /// The user has not decided about the peer ([`Config::deferred`]): it hears nothing behind the SYN-ACK.
    undecided: bool,
    /// The peer, whose window was closed in its SYN-ACK, has said nothing since: its user may have to decide.
    unconfirmed: bool,
    /// The user has forgotten it.
    orphaned: bool,
    /// It was heard that nothing leads to the peer, which has said nothing since.
    unreachable: bool,
    source: u16,
    destination: u16,
    /// Shared by all connections of one kind.
    config: Arc<Config>,
    /// What the path takes now: [`Config::path_mss`] at first.
    path_mss: u16,
    /// What the link takes, where it has said so.
    link_mss: u16,
    /// What every path takes, as far as one can know.
    least_mss: u16,
    /// Only while segments are smaller than they might be.
    search: Option<Box<Search>>,
    agreed: Negotiated,
    queue: SendQueue,
    window: SendWindow,
    receive: Receive,
    rtt: Rtt,
    congestion: Congestion,
    peak: Peak,
    pacer: Pacer,
    /// Pacing, and nothing else, holds a segment back.
    paced: bool,
    rack: Rack,
    recovery: Option<Box<Recovery>>,
    /// Without SACK, how many duplicates have come,
    duplicates: u8,
    /// and how many are still to come of what was sent again for nothing.
    repeats: u8,
    /// Blocks of the last SACK: what lies within them is marked already.
    reported: [(u64, u64); 3],
    timers: Timers,
    limiter: Limiter,
    owed: Owed,
    reset: Option<Box<Repr>>,
    timestamp_offset: u32,
    /// When the peer last made progress, or showed that it lives.
    progress_at: u64,
    /// When data was last sent.
    last_data: u64,
    last_received: u64,
    keep_alives: u8,
    /// Timeouts of the segment in front, or probes of a closed window after which nothing has come, in a row.
    unanswered: u8,
    acked: u64,
    events: Pending,
    counters: Counters,
}

impl Connection {
    /// Opens a connection: its SYN is the first thing to be sent (RFC 9293 3.10.1).
    pub fn connect(now: u64, config: impl Into<Arc<Config>>, secret: Secret, flow: &Flow) -> Self {
        let config = config.into();
        let patience = config.connect_timeout;
        let mut connection = Self::new(now, config, secret, flow);
        connection.step(Input::ActiveOpen);
        connection.timers.set(Timer::End, now + patience);
        connection
    }

    fn new(now: u64, config: Arc<Config>, secret: Secret, flow: &Flow) -> Self {
        let mut receive_window = ReceiveWindow::default();
        receive_window.whole = config.mode == Mode::Message;
        receive_window.set_room(FIRST, 0);
        let peer_mss = options::default_mss(flow);
        Self {
            state: State::Closed,
            passive: false,
            undecided: false,
            unconfirmed: false,
            orphaned: false,
            unreachable: false,
            source: flow.local.port(),
            destination: flow.remote.port(),
            agreed: Negotiated { peer_mss, ..Negotiated::default() },
            queue: SendQueue::new(isn::initial_number(now, secret, flow)),
            window: SendWindow::default(),
            receive: Receive {
                space: SeqSpace { initial: SeqNumber(0) },
                nxt: 0,
                window: receive_window,
                fin: None,
                push: 0,
                urgent: 0,
                reassembly: None,
                ts_recent: 0,
                ts_recent_at: 0,
                acked: 0,
                duplicate: None,
                echo_mark: false,
            },
            rtt: Rtt::new(&config),
            congestion: Congestion::new(u64::from(peer_mss)),
            peak: Peak::default(),
            pacer: Pacer::default(),
            paced: false,
            rack: Rack::default(),
            recovery: None,
            duplicates: 0,
            repeats: 0,
            reported: [(0, 0); 3],
            timers: Timers::default(),
            limiter: Limiter::default(),
            owed: Owed { quick: QUICK_ACKS, ..Owed::default() },
            reset: None,
            timestamp_offset: isn::timestamp_offset(secret, flow),
            progress_at: now,
            last_data: now,
            last_received: now,
            keep_alives: 0,
            unanswered: 0,
            acked: 0,
            events: Pending::default(),
            counters: Counters::default(),
            path_mss: config.path_mss.max(options::MIN_MSS),
            link_mss: u16::MAX,
            least_mss: peer_mss,
            search: None,
            config,
        }
    }

    /// What it was told.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// The state.
    pub fn state(&self) -> State {
        self.state
    }

    /// How much the peer has acknowledged: grows with every proof that it is there.
    pub(crate) fn acknowledged(&self) -> u64 {
        self.queue.una
    }

    /// Nothing is left of it, and nothing is to be sent.
    pub(crate) fn is_over(&self) -> bool {
        self.state == State::Closed && self.reset.is_none()
    }

    /// What was counted.
    pub fn counters(&self) -> &Counters {
        &self.counters
    }

    /// What both ends have agreed on, once the SYNs are exchanged.
    pub fn negotiated(&self) -> &Negotiated {
        &self.agreed
    }

    /// The largest payload of a segment now: a message up to it is one segment (RFC 9293 3.7.1, MUST-16).
    pub fn mss(&self) -> u32 {
        u32::from(self.agreed.peer_mss.min(self.path_mss)) - self.options_len()
    }

    /// The congestion window in octets, for those who watch.
    pub fn congestion_window(&self) -> u64 {
        self.congestion.cwnd
    }

    /// `len` octets more are to be sent, and can be read until they are acknowledged. In message mode
    /// `end_of_message` says that a message ends with them; in stream mode it means something only to
    /// segments that are [aligned](Config::aligned). Returns the offset of the stream after them.
    ///
    /// # Errors
    /// The connection is closed for sending, or has carried all that it can; in message mode also: too many
    /// messages, or an empty one.
    pub fn send(&mut self, len: u64, end_of_message: bool) -> Result<u64, SendError> {
        let open = !matches!(self.state, State::Closed | State::TimeWait) && !self.queue.closed;
        if !open {
            return Err(SendError::Closed);
        }
        let message = self.config.keeps_ends();
        if message && len == 0 {
            return Err(SendError::Empty);
        }
        if message && self.queue.unsent_messages() >= self.config.max_messages as usize {
            return Err(SendError::TooMany);
        }
        if self.queue.written.checked_add(len).is_none_or(|end| end > MAX_POSITION) {
            return Err(SendError::TooLong);
        }
        self.queue.write(len, message && end_of_message);
        Ok(self.queue.written - FIRST)
    }

    /// How much room there is for what comes next, from the last contiguous octet on: what the user has
    /// posted. An offered window is never taken back; what comes in one for which there is no room any more
    /// is dropped, beyond what the user has to spare ([`Connection::set_spare`]).
    pub fn set_receive_space(&mut self, bytes: u64) {
        let nxt = self.receive.nxt.max(FIRST);
        self.receive.window.set_room(nxt, bytes.min(self.config.max_receive_space));
        let mss = u64::from(self.config.receive_mss);
        if self.state.receives() && self.receive.window.wants_update(nxt, mss) {
            self.owed.ack = true;
        }
    }

    /// Stream mode: how much the user keeps elsewhere of what comes in order, in a window that was offered
    /// before the room became less. It is placed like everything else. Nothing at first.
    pub fn set_spare(&mut self, bytes: u32) {
        self.receive.window.set_spare(bytes);
    }

    /// See [`Connection::set_spare`].
    pub(crate) fn spare(&self) -> u32 {
        self.receive.window.spare()
    }

    /// Somebody is there for a peer that has come: the user has decided, where that was needed
    /// ([`Config::deferred`]). A peer that saw a closed window waits for a word, and hears one.
    pub fn admit(&mut self) {
        self.undecided = false;
        let nxt = self.receive.nxt;
        if self.state.is_synchronized() && self.receive.window.edge(nxt) == nxt {
            self.owed.ack = true;
        }
    }

    /// The user has forgotten it: what is left to be acknowledged is its FIN, which has
    /// [`Config::orphan_timeout`].
    pub fn orphan(&mut self, now: u64) {
        if self.state != State::TimeWait {
            (self.orphaned, self.progress_at) = (true, now);
            if self.timers.is_running(Timer::End) {
                self.timers.set(Timer::End, now + self.patience());
            }
        }
    }

    /// No more is to be sent (RFC 9293 3.10.4). The peer may go on.
    pub fn close(&mut self) {
        match self.state {
            State::SynSent => self.finish(None),
            State::SynReceived => self.queue.closed = true,
            State::Established | State::CloseWait if !self.queue.closed => {
                self.queue.closed = true;
                self.step(Input::Close);
            }
            _ => {}
        }
    }

    /// Ends it at once; the peer gets a reset (RFC 9293 3.10.5).
    pub fn abort(&mut self) {
        match self.state {
            State::Closed | State::SynSent | State::TimeWait => {}
            _ => self.send_reset(),
        }
        if self.state != State::Closed {
            self.finish(None);
        }
        self.receive.reassembly = None;
    }

    /// Ends it in TIME-WAIT, before its time: a new connection takes its place. What is acknowledged still
    /// waits for receives.
    pub(crate) fn give_way(&mut self) {
        self.finish(None);
    }

    /// The next event.
    pub fn poll_event(&mut self) -> Option<Event> {
        let acked = self.queue.una.clamp(FIRST, self.queue.written) - FIRST;
        let reported = &mut self.acked;
        self.events.next(|| {
            let news = acked > *reported;
            *reported = acked;
            news.then_some(acked)
        })
    }

    /// In message mode: a segment that waited for a gap to close. To be called, as long as there is a
    /// receive for one, until there is none: nothing else is placed before.
    pub fn poll_held(&mut self) -> Option<Held> {
        let reassembly = self.receive.reassembly.as_mut()?;
        let held = reassembly.take_held(self.receive.nxt);
        if reassembly.is_empty() {
            self.receive.reassembly = None;
        }
        held
    }

    /// When [`Connection::handle_timeout`] is to be called, or, where pacing holds a segment back, also when
    /// [`Connection::poll_transmit`] is; none if nothing runs.
    pub fn poll_timeout(&self) -> Option<u64> {
        let departure = if self.paced { self.pacer.departure() } else { NEVER };
        let at = self.timers.next().min(departure);
        (at != NEVER).then_some(at)
    }

    /// Whether [`Connection::handle_timeout`] should have been called before, or is to be now.
    pub(crate) fn is_due(&self, now: u64) -> bool {
        self.timers.next() <= now
    }

    /// Gives back the memory of a queue with nothing in it. To be called now and then: a queue that is used
    /// again soon should have it.
    pub fn release_memory(&mut self) {
        self.queue.trim();
        self.rack.trim();
    }

    /// Octets of memory that it takes, itself included.
    pub fn memory(&self) -> usize {
        size_of::<Self>()
            + self.queue.memory()
            + self.rack.memory()
            + self.receive.reassembly.as_ref().map_or(0, |kept| kept.memory())
            + self.recovery.as_ref().map_or(0, |_| size_of::<Recovery>())
            + self.search.as_ref().map_or(0, |_| size_of::<Search>())
            + self.reset.as_ref().map_or(0, |_| size_of::<Repr>())
    }

    /// Whether a new SYN may take the place of this connection, which is in TIME-WAIT (RFC 9293 3.6.1,
    /// MAY-2; RFC 6191 2): it must be younger in its timestamp, or else in its number.
    pub fn gives_way_to(&self, syn: &Repr) -> bool {
        let opens = [Flags::ACK, Flags::FIN].iter().all(|flag| !syn.flags.has(*flag));
        if self.state != State::TimeWait || !syn.flags.has(Flags::SYN) || !opens {
            return false;
        }
        let younger = syn.seq.distance(self.receive.space.wire(self.receive.nxt)) > 0;
        match syn.options.timestamps {
            Some(timestamps) if self.agreed.timestamps => {
                let ahead = timestamps.value.wrapping_sub(self.receive.ts_recent) as i32;
                ahead > 0 || (ahead == 0 && younger)
            }
            _ => younger,
        }
    }

    /// Whether timestamps tell its segments from those of the connection that `syn` begins (RFC 7323 5).
    pub(crate) fn is_told_from(&self, syn: &Repr) -> bool {
        self.agreed.timestamps && syn.options.timestamps.is_some()
    }

    /// SND.NXT.
    pub(crate) fn end_number(&self) -> SeqNumber {
        self.queue.space.wire(self.queue.nxt)
    }

    /// Begins at `end`, or above, as long as nothing was sent: the connection of the same flow before it has
    /// used what is below (RFC 9293 3.6.1).
    pub(crate) fn begin_above(&mut self, end: SeqNumber) {
        if self.queue.nxt == 0 && self.queue.space.initial.distance(end) < 0 {
            self.queue.space.initial = end;
        }
    }

    fn step(&mut self, input: Input) {
        if let Some(next) = self.state.next(input) {
            self.state = next;
        }
    }

    /// Nothing is left, because of `failure` or because it was wanted.
    fn finish(&mut self, failure: Option<Failure>) {
        self.step(Input::Abort);
        self.timers.stop_all();
        self.paced = false;
        self.owed = Owed::default();
        self.recovery = None;
        self.search = None;
        match failure {
            Some(failure) => {
                self.receive.reassembly = None;
                self.events.failed = Some(failure);
            }
            // Messages that are acknowledged may still wait for receives.
            None => self.events.closed = true,
        }
    }

    /// The clock of timestamps: a tick is a millisecond (RFC 7323 5.4).
    fn clock(&self, now: u64) -> u32 {
        ((now / MILLISECOND) as u32).wrapping_add(self.timestamp_offset)
    }

    fn timestamps(&self, now: u64) -> Timestamps {
        Timestamps { value: self.clock(now), echo: self.receive.ts_recent }
    }
}
