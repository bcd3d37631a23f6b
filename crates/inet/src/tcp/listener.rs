//! Opening by the peer: LISTEN (RFC 9293 3.10.7.2).
//!
//! A listener keeps nothing of a peer. As long as few connections are half open, a SYN makes one; beyond
//! that it is answered with a cookie, and the connection is made by the acknowledgement (RFC 4987).

use std::sync::Arc;

use quipu_wire::tcp::{Flags, Repr, SeqNumber, Timestamps};

use super::cookies::{self, EPOCH};
use super::hash::{Flow, Secret};
use super::options::{Negotiated, default_mss, of_syn};
use super::seq::{FIRST, SeqSpace};
use super::state::Input;
use super::timers::Timer;
use super::{Config, Connection, reset_for};

/// What comes of a segment to a listener.
#[derive(Debug)]
pub enum Opening {
    /// A connection, half open. [`Listener::settled`] is to be called when it stands, or is gone.
    HalfOpen(Box<Connection>),
    /// A connection that stands; the segment that made it is to be given to it.
    Open(Box<Connection>),
    /// A cookie that has come back while there is no room for a connection.
    Early,
    /// An answer, and nothing to be remembered.
    Reply(Repr),
    /// Nothing.
    Ignored,
}

/// A port that is watched.
#[derive(Clone, Debug)]
pub struct Listener {
    config: Arc<Config>,
    secret: Secret,
    backlog: u32,
    half_open: u32,
    /// When the last cookie was given out.
    cookie_at: Option<u64>,
}

impl Listener {
    /// Watches a port; at most `backlog` connections are half open at a time.
    pub fn new(config: impl Into<Arc<Config>>, secret: Secret, backlog: u32) -> Self {
        let config = config.into();
        Self { config, secret, backlog, half_open: 0, cookie_at: None }
    }

    /// How its connections are.
    pub(crate) fn config(&self) -> &Config {
        &self.config
    }

    /// A connection that was half open is so no more.
    pub fn settled(&mut self) {
        self.half_open = self.half_open.saturating_sub(1);
    }

    /// Whether so many connections are half open that a peer gets a cookie.
    pub(crate) fn is_full(&self) -> bool {
        self.half_open >= self.backlog
    }

    /// How many connections are half open.
    pub fn half_open(&self) -> u32 {
        self.half_open
    }

    /// Takes a segment to this port that belongs to no connection; `payload` is its length. `may_open` says
    /// whether there is room for one more connection: without it a peer is kept waiting, not refused.
    pub fn handle_segment(
        &mut self,
        now: u64,
        flow: &Flow,
        segment: &Repr,
        payload: usize,
        may_open: bool,
    ) -> Opening {
        let flags = segment.flags;
        if flags.has(Flags::RST) {
            return Opening::Ignored;
        }
        if flags.has(Flags::ACK) {
            let connection = self.by_cookie(now, flow, segment, payload);
            return match (connection, reset_for(segment, payload)) {
                (Some(connection), _) if may_open => Opening::Open(Box::new(connection)),
                (Some(_), _) => Opening::Early,
                // Anyone who is kept waiting has a SYN or a cookie.
                (None, Some(reset)) => Opening::Reply(reset),
                (None, None) => Opening::Ignored,
            };
        }
        if !flags.has(Flags::SYN) || flags.has(Flags::FIN) {
            return Opening::Ignored;
        }
        if !self.is_full() && may_open {
            self.half_open += 1;
            let connection =
                Connection::accept(now, Arc::clone(&self.config), self.secret, flow, segment);
            return Opening::HalfOpen(Box::new(connection));
        }
        self.cookie_at = Some(now);
        Opening::Reply(self.cookie(now, flow, segment))
    }

    /// The answer to a SYN that one could make again from what the peer will send. The window is closed:
    /// nobody has posted a receive for a connection that does not exist.
    fn cookie(&self, now: u64, flow: &Flow, syn: &Repr) -> Repr {
        let asks_ecn = syn.flags.has(Flags::ECE | Flags::CWR);
        let mut agreed = Negotiated::new(&self.config, &syn.options, default_mss(flow), asks_ecn);
        if !agreed.timestamps {
            // There is nothing that would remember them.
            agreed = Negotiated { peer_mss: agreed.peer_mss, ..Negotiated::default() };
        }
        let value = cookies::timestamp(cookies::clock(now, self.secret, flow), &agreed);
        let echo = syn.options.timestamps.map_or(0, |timestamps| timestamps.value);
        Repr {
            source: syn.destination,
            destination: syn.source,
            seq: cookies::number(now, self.secret, flow, syn, agreed.peer_mss),
            ack: syn.seq + 1,
            flags: (Flags::SYN | Flags::ACK).with(Flags::ECE, agreed.ecn),
            window: 0,
            urgent: 0,
            options: of_syn(&self.config, Some(&agreed), Timestamps { value, echo }),
        }
    }

    fn by_cookie(&self, now: u64, flow: &Flow, ack: &Repr, payload: usize) -> Option<Connection> {
        // Nobody can guess one while none is valid.
        let given = self.cookie_at?;
        if ack.flags.has(Flags::SYN) || now.saturating_sub(given) > 2 * EPOCH {
            return None;
        }
        let agreed = |ack: &Repr| cookies::agreed(now, &self.config, self.secret, flow, ack);
        // The acknowledgement may have been lost: what comes then of a peer whose window is closed, or that
        // waits for a word, is a probe, with the number before (RFC 9293 3.8.4).
        let probe = Repr { seq: ack.seq + 1, ..*ack };
        let (agreed, ack) = match agreed(ack) {
            Some(agreed) => (agreed, ack),
            None if payload == 0 => (agreed(&probe)?, &probe),
            None => return None,
        };
        Some(Connection::resume(now, Arc::clone(&self.config), self.secret, flow, ack, agreed))
    }
}

impl Connection {
    /// The connection that a SYN asks for: its answer is the first thing to be sent.
    pub(super) fn accept(
        now: u64,
        config: Arc<Config>,
        secret: Secret,
        flow: &Flow,
        syn: &Repr,
    ) -> Self {
        let patience = config.connect_timeout;
        let mut connection = Self::passive(now, config, secret, flow);
        connection.take_syn(now, syn);
        connection.timers.set(Timer::End, now + patience);
        connection
    }

    fn passive(now: u64, config: Arc<Config>, secret: Secret, flow: &Flow) -> Self {
        let mut connection = Self::new(now, config, secret, flow);
        connection.passive = true;
        connection.undecided = connection.config.deferred;
        connection.step(Input::PassiveOpen);
        connection
    }

    /// The connection whose cookie `ack` brings back.
    fn resume(
        now: u64,
        config: Arc<Config>,
        secret: Secret,
        flow: &Flow,
        ack: &Repr,
        agreed: Negotiated,
    ) -> Self {
        let mut connection = Self::passive(now, config, secret, flow);
        let syn = Repr { seq: ack.seq - 1, options: ack.options, ..Repr::default() };
        connection.take_syn(now, &syn);
        connection.agreed = agreed;
        connection.receive.window.scale = agreed.scales.map_or(0, |(_, ours)| ours);
        let initial: SeqNumber = ack.ack - 1;
        connection.queue.space = SeqSpace { initial };
        (connection.queue.una, connection.queue.nxt) = (FIRST, FIRST);
        connection.receive.acked = FIRST;
        connection.establish(now);
        let scale = agreed.scales.map_or(0, |(theirs, _)| theirs);
        connection.window.update(FIRST, FIRST, u64::from(ack.window) << scale);
        connection
    }
}
