//! Credits that peers have, and buffers for what is sent.

use super::Core;
use crate::conn::{Conn, ConnId};
use crate::fabric::Fabric;
use crate::message::{Kind, Message};
use crate::types::Config;

/// Receive slots that may be in the hands of the engine at once: of handlers that run, and to be
/// posted in one go.
const SLACK: u32 = 96;
/// Slots are posted again in groups of so many while nothing comes, and of so many others at the latest.
const REPOST_GROUP: usize = 8;
const LARGEST_REPOST_GROUP: usize = 32;

/// The receive slots of a port, and the connections that they are promised to.
///
/// Each connection that was accepted has one credit for ever, so that no peer starves; the others
/// are lent to those who want more. A credit stands for one receive slot. Own requests that are
/// under way have a slot for their answer, and each connection one for control messages. So there
/// is a slot for every message that may come, however many peers are silent.
#[derive(Debug)]
pub(super) struct Pool {
    /// Slots that do not depend on the number of connections.
    fixed: u32,
    /// Credits that nobody has.
    pub(super) free: u32,
    /// A peer wanted more, and there was none.
    pub(super) is_short: bool,
    /// When to look for peers that do not use their credits.
    pub(super) look_at: u64,
    pub(super) acceptors: u32,
    pub(super) initiators: u32,
}

impl Pool {
    pub(super) fn new(config: &Config) -> Self {
        let fixed = SLACK + u32::from(config.max_outstanding) + config.shared_credits;
        let free = config.shared_credits;
        Self { fixed, free, is_short: false, look_at: 0, acceptors: 0, initiators: 0 }
    }

    /// Slots that there have to be.
    pub(super) fn slots(&self) -> u32 {
        self.fixed + 2 * self.acceptors + self.initiators
    }

    pub(super) fn conns(&self) -> u32 {
        self.acceptors + self.initiators
    }
}

/// Buffers for messages that are too long to be copied into the send queue.
///
/// A reply must never wait. So a request is handed to its handler only while there is a buffer for
/// the reply, and requests leave a quarter of the buffers alone.
#[derive(Debug)]
pub(super) struct Buffers {
    free: Vec<u32>,
    owners: Vec<Option<ConnId>>,
    /// Buffers that handlers which run now may ask for.
    promised: u32,
}

impl Buffers {
    pub(super) fn new(count: u32) -> Self {
        let count = count.max(4);
        let owners = vec![None; count as usize];
        Self { free: (0..count).rev().collect(), owners, promised: 0 }
    }

    #[inline]
    fn has_unpromised(&self) -> bool {
        self.free.len() > self.promised as usize
    }

    /// Keeps a buffer for the handler of a request.
    #[inline]
    pub(super) fn promise(&mut self) {
        self.promised += 1;
    }

    /// The handler has replied, or ended without.
    #[inline]
    pub(super) fn redeem(&mut self) {
        self.promised -= 1;
    }

    /// Whether the answers to one connection may have another buffer.
    #[inline]
    pub(super) fn may_serve(&self, held: u16) -> bool {
        self.has_unpromised() && usize::from(held) < (self.owners.len() / 4).max(1)
    }

    /// A buffer for a reply, which was promised.
    pub(super) fn take(&mut self, owner: ConnId) -> Option<u32> {
        let buffer = self.free.pop()?;
        self.owners[buffer as usize] = Some(owner);
        Some(buffer)
    }

    /// A buffer for a request; none while replies may need all.
    pub(super) fn take_for_request(&mut self, owner: ConnId) -> Option<u32> {
        let reserve = self.promised as usize + self.owners.len() / 4;
        if self.free.len() > reserve { self.take(owner) } else { None }
    }

    /// A connection does not need a buffer any more; whether it was its own. Of a connection that has ended,
    /// completions may still come when another one has the buffer.
    pub(super) fn release(&mut self, buffer: u32, conn: ConnId) -> bool {
        let owner = self.owners.get_mut(buffer as usize);
        let is_own = owner.and_then(|owner| owner.take_if(|owner| *owner == conn)).is_some();
        if is_own {
            self.free.push(buffer);
        }
        is_own
    }

    /// Frees all buffers of a connection that is gone.
    pub(super) fn release_all_of(&mut self, conn: ConnId) {
        for (buffer, owner) in (0..).zip(&mut self.owners) {
            if *owner == Some(conn) {
                *owner = None;
                self.free.push(buffer);
            }
        }
    }
}

impl<F: Fabric, H: Clone> Core<F, H> {
    /// Answers a request, and changes the number of credits that the peer has: one that had to wait
    /// gets more while there are any, and one that has more than its share gives one back while
    /// others wait.
    #[inline]
    pub(super) fn credit_for_answer(&mut self, conn: ConnId, starved: bool) -> i8 {
        let most = self.config.max_window;
        let Some(acceptor) = self.conns.get_mut(conn).and_then(Conn::acceptor) else { return 0 };
        acceptor.in_service = acceptor.in_service.saturating_sub(1);
        acceptor.recent = acceptor.recent.saturating_add(1);
        if starved && acceptor.granted < most {
            let more = u32::from(acceptor.granted.min(most - acceptor.granted).min(64));
            let more = more.min(self.pool.free);
            self.pool.is_short |= more == 0;
            self.pool.free -= more;
            acceptor.granted += more as u16;
            return more as i8;
        }
        if self.pool.is_short && self.pool.free == 0 && !acceptor.has_control {
            let share = (self.config.shared_credits / self.pool.acceptors.max(1)).max(1);
            if u32::from(acceptor.granted) > share + 1 {
                acceptor.granted -= 1;
                self.pool.free += 1;
                self.return_signals(conn);
                return -1;
            }
        }
        if self.pool.free > 0 {
            self.pool.is_short = false;
        }
        0
    }

    /// Asks peers for credits that they have not used since the last call, while others wait for
    /// some.
    pub(super) fn revoke_idle(&mut self) {
        if !self.pool.is_short {
            return;
        }
        for id in self.conns.ids() {
            let Some(acceptor) = self.conns.get_mut(id).and_then(Conn::acceptor) else { continue };
            let idle = std::mem::take(&mut acceptor.recent) == 0;
            if !idle || acceptor.has_control || acceptor.granted <= 1 {
                continue;
            }
            acceptor.has_control = true;
            let mut message = Message::new(Kind::Revoke, 0);
            message.credits = (acceptor.granted - 1).min(127) as i8;
            self.send_head(id, &message, &[]);
        }
    }

    /// The acceptor wants credits back: as many as are not in use, and never the last.
    pub(super) fn give_back(&mut self, conn: ConnId, wanted: i8) {
        let Some(initiator) = self.conns.get_mut(conn).and_then(Conn::initiator) else { return };
        let unused = initiator.window - initiator.window.min(initiator.in_flight.max(1));
        let given = unused.min(u16::from(wanted.max(0).unsigned_abs()));
        initiator.window -= given;
        let mut message = Message::new(Kind::Revoked, 0);
        message.credits = given as i8;
        self.send_head(conn, &message, &[]);
    }

    /// The peer gives credits back; whether it may.
    pub(super) fn take_back(&mut self, conn: ConnId, given: i8) -> bool {
        let Some(acceptor) = self.conns.get_mut(conn).and_then(Conn::acceptor) else { return true };
        let given = u16::from(given.max(0).unsigned_abs());
        let spare = acceptor.granted - acceptor.in_service.max(1);
        if !std::mem::take(&mut acceptor.has_control) || given > spare {
            return false;
        }
        acceptor.granted -= given;
        self.pool.free += u32::from(given);
        self.pool.is_short &= self.pool.free == 0;
        true
    }

    /// Posts used receive slots again, in groups.
    #[inline]
    pub(super) fn repost(&mut self, slot: u32) {
        self.reposts.push(slot);
        if self.reposts.len() >= LARGEST_REPOST_GROUP {
            self.flush_reposts();
        }
    }

    /// Posts used receive slots again, if there are some. For when nothing comes: nobody waits for it then.
    #[inline]
    pub fn post_used_slots(&mut self) {
        if self.reposts.len() >= REPOST_GROUP {
            self.flush_reposts();
        }
    }

    pub(super) fn flush_reposts(&mut self) {
        if !self.reposts.is_empty() {
            self.fabric.repost(&self.reposts);
            self.reposts.clear();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_late_completion_of_one_connection_frees_no_buffer_of_another() {
        let mut buffers = Buffers::new(4);
        let [gone, other] = [1, 2].map(ConnId::from_u64);
        let buffer = buffers.take(gone).unwrap();
        buffers.release_all_of(gone);
        assert_eq!(buffers.take(other), Some(buffer));
        assert!(!buffers.release(buffer, gone) && buffers.release(buffer, other));
        assert!(!buffers.release(buffer, other) && !buffers.release(99, other));
        assert_eq!(buffers.free.len(), 4);
    }
}
