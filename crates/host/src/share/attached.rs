//! The program's end of the rings, behind the lock of its engine: requests are posted to it, and what it
//! brings lands in the engine's own completion queues and events.

mod post;

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;

use quipu_inet::stack::ListenerId;
use quipu_inet::tcp::Mode;
use quipu_mem::Segment;
use quipu_mem::ring::Channel;
use quipu_nic::{
    Completion, CqId, Fault, QpCap, QpId, QpInit, QpNum, QpState, QpType, TcpChange, Time,
    WcOpcode, WcStatus,
};

use self::post::push;
use super::overflow::Overflow;
use super::queue::{Impossible, Queue};
use super::slots::{self, Filling, MAX_SERIAL, News, Order, Tag};
use super::{MOST_LOOKS, RINGS, hear};
use crate::error::EngineError;
use crate::handle_map::HandleMap;
use crate::net::token::Token;
use crate::sys::{self, Epoll};

/// News that one look takes before others get their turn.
const NEWS_PER_TURN: u32 = 256;
/// Requests of a list that the other end gets to see at once.
const SHOWN_TOGETHER: u32 = 4 * slots::MAX_TOGETHER as u32;
/// The most events of a connection: it stands, the peer closes, it is over.
const MAX_CHANGES: u32 = 3;
/// The most news for which a sleep is worth while: the ring has room for as many while they are taken.
const MAX_BATCH: u32 = RINGS.request_slots / 2;

/// A queue pair, whose other half the adapter has.
#[derive(Debug)]
struct Half {
    number: QpNum,
    qp_type: QpType,
    state: QpState,
    cap: QpCap,
    send_cq: CqId,
    recv_cq: CqId,
    sends: Queue,
    receives: Queue,
    all_signaled: bool,
    /// Of a connection that was asked for or stands nothing has come yet that ends it.
    open: bool,
    /// Its own direction of the connection has an end, behind which nothing is posted.
    closed: bool,
    /// Events that may still come, of all connections that were asked for: those of the one before may be
    /// heard after the next was.
    expected: u32,
    /// Of this connection, or the last.
    mode: Mode,
}

/// What was known of a queue pair before another connection was asked for.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Before {
    open: bool,
    mode: Mode,
}

impl Half {
    /// That of a new queue pair.
    fn new(number: QpNum, init: &QpInit, cap: QpCap) -> Self {
        Self {
            number,
            qp_type: init.qp_type,
            state: QpState::Reset,
            cap,
            send_cq: init.send_cq,
            recv_cq: init.recv_cq,
            sends: Queue::new(cap.max_send_wr),
            receives: Queue::new(cap.max_recv_wr),
            all_signaled: init.sq_sig_all,
            open: false,
            closed: false,
            expected: 0,
            mode: Mode::Stream,
        }
    }

    #[inline]
    fn queue(&mut self, receive: bool) -> &mut Queue {
        if receive { &mut self.receives } else { &mut self.sends }
    }
}

/// What comes of a look at the rings.
#[derive(Debug)]
pub(crate) enum Landed {
    /// Goes into a queue.
    Completion(CqId, Completion),
    /// Has happened to a connection.
    Change(QpId, TcpChange),
}

/// The rings, and what is under way in them.
pub(crate) struct Attached {
    channel: Channel,
    /// The slot that is filled with requests.
    filling: Filling,
    /// What there is no room for in the ring.
    overflow: Overflow,
    /// The bell rings when there is room, or has rung.
    awaits_room: bool,
    bell: OwnedFd,
    epoll: Arc<Epoll>,
    qps: HandleMap<u64, Half>,
    /// What connections are that come to a port.
    listeners: BTreeMap<ListenerId, Mode>,
    /// The queues to which they complete, and how often each is named.
    cqs: BTreeMap<CqId, u32>,
    /// Something came since a sleep that ended without anything: more is to be expected.
    flowing: bool,
    /// Completions and events that have come since the beginning, wrapping.
    heard: u32,
    /// Slots that were taken in a row. After half a ring the other end may have waited for room.
    in_a_row: u32,
    /// Since when this end has slept until there is enough.
    asleep_since: Option<Time>,
    /// Requests were posted, or much room was made, since the other end was last told.
    posted: bool,
    /// How many requests.
    unrung: u32,
    /// The other end is gone, or talks nonsense.
    lost: bool,
}

impl Attached {
    /// Attaches to the rings that the other end has set up at the beginning of `memory`.
    ///
    /// # Errors
    ///
    /// They are not there; the kernel has no memory for another entry of epoll.
    pub(crate) fn new(memory: &Segment, bell: OwnedFd, epoll: Arc<Epoll>) -> io::Result<Self> {
        let channel = Channel::attach(memory, 0, RINGS).map_err(io::Error::other)?;
        epoll.add(&bell, libc::EPOLLIN, Token::Attached.bits())?;
        Ok(Self {
            channel,
            filling: Filling::default(),
            overflow: Overflow::default(),
            awaits_room: false,
            bell,
            epoll,
            qps: HandleMap::default(),
            listeners: BTreeMap::new(),
            cqs: BTreeMap::new(),
            flowing: false,
            heard: 0,
            in_a_row: 0,
            asleep_since: None,
            posted: false,
            unrung: 0,
            lost: false,
        })
    }

    /// Notes a queue pair that the other end has made; `false` if its number is none that a new one can have:
    /// what waits and what has completed would be taken for that of another.
    #[must_use]
    pub(crate) fn add_qp(&mut self, qp: QpId, number: QpNum, init: &QpInit, cap: QpCap) -> bool {
        if qp.0 > u64::from(MAX_SERIAL) || self.qps.contains_key(&qp.0) {
            return false;
        }
        self.qps.insert(qp.0, Half::new(number, init, cap));
        for cq in [init.send_cq, init.recv_cq] {
            *self.cqs.entry(cq).or_default() += 1;
        }
        true
    }

    /// Forgets a queue pair; the queues it completed to.
    pub(crate) fn remove_qp(&mut self, qp: QpId) -> Option<[CqId; 2]> {
        let queues = self.qps.remove(&qp.0).map(|half| [half.send_cq, half.recv_cq])?;
        for cq in queues {
            if let Entry::Occupied(mut named) = self.cqs.entry(cq) {
                *named.get_mut() -= 1;
                if *named.get() == 0 {
                    named.remove();
                }
            }
        }
        Some(queues)
    }

    /// The queues to which queue pairs complete.
    pub(crate) fn queues(&self) -> impl Iterator<Item = CqId> {
        self.cqs.keys().copied()
    }

    /// The queues that a queue pair completes to, and the number by which completions there name it.
    pub(crate) fn queues_of(&self, qp: QpId) -> impl Iterator<Item = (CqId, QpNum)> + use<> {
        let queues = self.qps.get(&qp.0).map(|half| (half.number, [half.send_cq, half.recv_cq]));
        queues.into_iter().flat_map(|(number, cqs)| cqs.map(|cq| (cq, number)))
    }

    /// Notes the state in which the other end has a queue pair. Of one that is reset nothing is under way.
    pub(crate) fn set_state(&mut self, qp: QpId, state: QpState) {
        let Some(half) = self.qps.get_mut(&qp.0) else { return };
        half.state = state;
        if state == QpState::Reset {
            half.sends.clear();
            half.receives.clear();
            (half.open, half.closed) = (false, false);
        }
    }

    /// Notes that a queue pair is about to get a connection, of which an event tells the end.
    pub(crate) fn begin_connection(&mut self, qp: QpId, mode: Mode) -> Option<Before> {
        let half = self.qps.get_mut(&qp.0)?;
        let before = Before { open: half.open, mode: half.mode };
        half.expected = half.expected.saturating_add(MAX_CHANGES);
        (half.open, half.mode) = (true, mode);
        Some(before)
    }

    /// It gets none.
    pub(crate) fn refuse_connection(&mut self, qp: QpId, before: Option<Before>) {
        if let (Some(half), Some(before)) = (self.qps.get_mut(&qp.0), before) {
            half.expected = half.expected.saturating_sub(MAX_CHANGES);
            (half.open, half.mode) = (before.open, before.mode);
        }
    }

    /// Notes whether a queue pair sends nothing more; whether that was known already.
    pub(crate) fn set_closed(&mut self, qp: QpId, closed: bool) -> bool {
        let half = self.qps.get_mut(&qp.0);
        half.is_some_and(|half| std::mem::replace(&mut half.closed, closed))
    }

    /// Notes what connections are that come to a port; `None`: none come any more.
    pub(crate) fn set_listener(&mut self, listener: ListenerId, mode: Option<Mode>) {
        match mode {
            Some(mode) => drop(self.listeners.insert(listener, mode)),
            None => drop(self.listeners.remove(&listener)),
        }
    }

    /// What connections are that come to a port.
    pub(crate) fn mode_of(&self, listener: ListenerId) -> Mode {
        self.listeners.get(&listener).copied().unwrap_or_default()
    }

    /// A completion queue has overrun, which is fatal to the queue pairs that complete there.
    #[cold]
    pub(crate) fn fail_users_of(&mut self, cq: CqId) {
        for (&qp, half) in &mut self.qps {
            if (half.send_cq == cq || half.recv_cq == cq) && half.state != QpState::Err {
                half.state = QpState::Err;
                // What is wrong with the ring is found by the next look.
                let end = (&mut self.channel, &mut self.filling, &mut self.overflow);
                let _ = push(end, &Order::Fail(qp as u32));
                self.posted = true;
            }
        }
        if !self.overflow.is_empty() {
            let _ = self.refill();
        }
    }

    /// Whether the other end is gone, or is to go.
    #[inline]
    pub(crate) fn is_lost(&self) -> bool {
        self.lost
    }

    /// Whether something has come, as far as it is believed.
    #[inline]
    pub(crate) fn has_news(&mut self) -> bool {
        !self.lost && self.channel.incoming.requests.is_filled()
    }

    /// Takes what has come, as far as it is this turn's; whether there was anything.
    #[inline]
    pub(crate) fn poll(&mut self, mut land: impl FnMut(Landed)) -> bool {
        if !self.overflow.is_empty() && self.refill().is_err() {
            self.lose(&mut land);
            return true;
        }
        if !self.has_news() {
            return false;
        }
        self.flowing = true;
        let begin = self.heard;
        while self.heard.wrapping_sub(begin) < NEWS_PER_TURN {
            match slots::hear(&mut self.channel.incoming.requests) {
                Ok(Some(news)) if self.receive(&news, &mut land) => self.in_a_row += 1,
                Ok(None) => {
                    self.in_a_row = 0;
                    break;
                }
                Ok(Some(_)) | Err(_) => {
                    tracing::error!("the process that shares the adapter sent an invalid message");
                    self.lose(&mut land);
                    return true;
                }
            }
        }
        self.channel.incoming.publish();
        if self.in_a_row >= MAX_BATCH {
            (self.in_a_row, self.posted) = (0, true);
        }
        true
    }

    /// Believes what can be: `false` for more octets than there was memory for, a request that is done before
    /// it was in the ring, or a connection without end.
    fn receive(&mut self, news: &News, land: &mut impl FnMut(Landed)) -> bool {
        self.heard = self.heard.wrapping_add(news.count());
        match *news {
            News::Completion(done) => {
                let tag = Tag::from_bits(done.wr_id);
                // It may have been destroyed meanwhile.
                let Some(half) = self.qps.get_mut(&tag.qp.into()) else { return true };
                let cq = if tag.receive { half.recv_cq } else { half.send_cq };
                let success = done.status == WcStatus::Success;
                let octets = if success { done.byte_len.into() } else { 0 };
                let posted = match half.queue(tag.receive).finish(tag.sequence, octets) {
                    Ok(Some(posted)) => posted,
                    Ok(None) => return true,
                    Err(Impossible) => return false,
                };
                // What came over a connection may be told before that it stands, and be answered at once.
                if tag.receive && success && half.state == QpState::Init {
                    half.state = QpState::Rts;
                }
                if success && !posted.signaled {
                    return true;
                }
                let completion = Completion { wr_id: posted.wr_id, qp_num: half.number, ..done };
                land(Landed::Completion(cq, completion));
            }
            News::Sent { last, count } => {
                let Some(half) = self.qps.get_mut(&last.qp.into()) else { return true };
                for before in (0..count).rev() {
                    let posted = match half.sends.finish(last.sequence.wrapping_sub(before), 0) {
                        Ok(Some(posted)) if posted.signaled => posted,
                        Ok(_) => continue,
                        Err(Impossible) => return false,
                    };
                    let completion = Completion {
                        wr_id: posted.wr_id,
                        opcode: WcOpcode::Send,
                        byte_len: posted.len as u32,
                        qp_num: half.number,
                        ..Completion::default()
                    };
                    land(Landed::Completion(half.send_cq, completion));
                }
            }
            News::Received { last, count, lengths } => {
                let Some(half) = self.qps.get_mut(&last.qp.into()) else { return true };
                // As above.
                if half.state == QpState::Init {
                    half.state = QpState::Rts;
                }
                for (before, &byte_len) in (0..count).rev().zip(&lengths) {
                    let sequence = last.sequence.wrapping_sub(before);
                    let posted = match half.receives.finish(sequence, byte_len.into()) {
                        Ok(Some(posted)) => posted,
                        Ok(None) => continue,
                        Err(Impossible) => return false,
                    };
                    let completion = Completion {
                        wr_id: posted.wr_id,
                        opcode: WcOpcode::Recv,
                        byte_len,
                        qp_num: half.number,
                        ..Completion::default()
                    };
                    land(Landed::Completion(half.recv_cq, completion));
                }
            }
            News::Change { qp, change, state } => {
                let Some(half) = self.qps.get_mut(&qp.into()) else { return true };
                let Some(expected) = half.expected.checked_sub(1) else { return false };
                (half.expected, half.state) = (expected, state);
                // The end may be that of the connection before this one.
                half.open = matches!(change, TcpChange::Connected | TcpChange::PeerClosed)
                    || matches!(state, QpState::Rtr | QpState::Rts);
                land(Landed::Change(QpId(qp.into()), change));
            }
        }
        true
    }

    /// Hears the bell. The rings are looked at anyway.
    pub(crate) fn ready(&mut self, mut land: impl FnMut(Landed)) -> bool {
        self.awaits_room = false;
        let any = self.poll(&mut land);
        if self.lost || hear(&self.bell) {
            return any;
        }
        // What it had said before is still there.
        for _ in 0..MOST_LOOKS {
            if !self.poll(&mut land) {
                break;
            }
        }
        self.lose(&mut land);
        true
    }

    /// The other end is gone, or is to go: everything is flushed, and connections are over.
    pub(crate) fn lose(&mut self, land: &mut impl FnMut(Landed)) {
        if std::mem::replace(&mut self.lost, true) {
            return;
        }
        self.epoll.remove(&self.bell);
        // If it is still there, it lets this program go.
        let _ = sys::shutdown_write(&self.bell);
        self.overflow.clear();
        for (&qp, half) in &mut self.qps {
            half.state = QpState::Err;
            let flushed = |wr_id, opcode| Completion {
                wr_id,
                opcode,
                status: WcStatus::WrFlushErr,
                qp_num: half.number,
                ..Completion::default()
            };
            for posted in half.sends.flush() {
                land(Landed::Completion(half.send_cq, flushed(posted.wr_id, WcOpcode::Send)));
            }
            for posted in half.receives.flush() {
                land(Landed::Completion(half.recv_cq, flushed(posted.wr_id, WcOpcode::Recv)));
            }
            if std::mem::take(&mut half.open) {
                land(Landed::Change(QpId(qp), TcpChange::Aborted));
            }
        }
    }

    /// Asks for the bell at the next news; `false` if something has come meanwhile, or the ring is broken, as
    /// the next look finds.
    pub(crate) fn arm(&mut self) -> bool {
        self.channel.incoming.control.arm();
        if !self.overflow.is_empty() && self.refill().is_err() {
            return false;
        }
        !self.has_news()
    }

    /// Asks for the bell when `count` news have come, or one that cannot wait. Whoever sleeps then must not
    /// do so for ever, and say when it was awake again: see [`woken`](Self::woken).
    pub(crate) fn arm_for(&mut self, count: u32, now: Time) -> bool {
        if !self.overflow.is_empty() {
            // The next to come may be room only.
            return self.arm();
        }
        let incoming = &self.channel.incoming;
        let enough = self.heard.wrapping_add(count.min(MAX_BATCH));
        incoming.control.arm_at(enough);
        self.asleep_since = Some(now);
        !self.has_news()
    }

    /// Whether it is worth while to sleep until there is more than one news: there were some lately.
    pub(crate) fn is_flowing(&self) -> bool {
        self.flowing
    }

    /// Needs no bell any more. What has come since the moment that this gives has come in a sleep that was
    /// to end only when there was enough.
    pub(crate) fn woken(&mut self) -> Option<Time> {
        self.channel.incoming.control.disarm();
        self.awaits_room = false;
        let since = self.asleep_since.take();
        if since.is_some() {
            self.flowing = self.has_news();
        }
        since
    }
}

impl Drop for Attached {
    fn drop(&mut self) {
        if !self.lost {
            self.epoll.remove(&self.bell);
        }
    }
}

impl std::fmt::Debug for Attached {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Attached").field("bell", &self.bell.as_raw_fd()).finish_non_exhaustive()
    }
}

#[inline]
fn half(qps: &mut HandleMap<u64, Half>, id: QpId, lost: bool) -> Result<&mut Half, EngineError> {
    if lost {
        return Err(EngineError::AdapterLost);
    }
    qps.get_mut(&id.0).ok_or(Fault::NoSuchObject.into())
}

#[cfg(test)]
mod tests;
