//! Connections: how they begin, and how they end.

use super::receive::notify;
use super::{Core, UNKNOWN};
use crate::conn::{Acceptor, Conn, ConnId, Initiator, Lanes, Role};
use crate::endpoint::{EndpointId, Link, Translation};
use crate::fabric::{Fabric, Hello, Welcome};
use crate::name::Name;
use crate::types::{CallError, Status, Tag};

/// The first pause before another attempt to connect, and the longest.
const FIRST_PAUSE_NS: u64 = 2_000_000;
const LONGEST_PAUSE_NS: u64 = 200_000_000;
/// How long a peer is idle before its credits are wanted back.
const IDLE_NS: u64 = 10_000_000;
/// A peer that owes an answer for so long is asked for a sign of life.
const PROBE_NS: u64 = 1_000_000_000;

impl<F: Fabric, H: Clone> Core<F, H> {
    /// Begins to connect a translation.
    pub(super) fn begin(
        &mut self,
        id: EndpointId,
        index: u32,
        peer: Name,
        tag: Tag,
    ) -> Result<(), CallError> {
        if self.pool.conns() >= self.config.max_connections {
            return Err(CallError::TableFull);
        }
        self.pool.initiators += 1;
        if !self.fabric.provide(self.pool.slots()) {
            self.pool.initiators -= 1;
            return Err(CallError::TableFull);
        }
        let tell_segment = self.endpoint(id)?.segment.is_some();
        let conn = self.conns.insert(Conn {
            endpoint: id,
            peer,
            role: Role::Initiator(Initiator {
                index: Some(index),
                is_up: false,
                retry_at: None,
                attempts: 0,
                give_up_at: self.now.saturating_add(self.config.give_up_ns),
                window: 0,
                in_flight: 0,
                signals: 0,
                is_starved: false,
                told_tag: tag,
                max_medium: 0,
                segment: UNKNOWN,
                tell_segment,
                is_probed: false,
            }),
            unsignaled: 0,
            lanes: Lanes::default(),
        });
        self.link(id, index, Link::Conn(conn));
        let hello = self.hello(id, &peer, tag);
        self.fabric.connect(conn, &peer, &hello);
        Ok(())
    }

    fn hello(&self, id: EndpointId, peer: &Name, tag: Tag) -> Hello {
        let (port, incarnation) = (self.port, self.incarnation);
        let place = Name { port, endpoint: id.index(), incarnation };
        let from = self.name(id).unwrap_or(place);
        Hello { from, endpoint: peer.endpoint, incarnation: peer.incarnation, tag }
    }

    pub(super) fn translation_mut(
        &mut self,
        id: EndpointId,
        index: u32,
    ) -> Option<&mut Translation> {
        self.endpoints.get_mut(id)?.translations.get_mut(index as usize)?.as_mut()
    }

    fn link(&mut self, id: EndpointId, index: u32, link: Link) {
        if let Some(translation) = self.translation_mut(id, index) {
            translation.link = link;
        }
    }

    /// A peer asks for a connection.
    pub(super) fn incoming(&mut self, incoming: u64, hello: &Hello) {
        if hello.incarnation != 0 && hello.incarnation != self.incarnation {
            return self.fabric.reject(incoming, Status::Unreachable);
        }
        let Some((endpoint, _)) = self.endpoints.at(hello.endpoint) else {
            return self.fabric.reject(incoming, Status::BadEndpoint);
        };
        if self.pool.conns() >= self.config.max_connections {
            self.make_room_for(endpoint, hello.tag);
        }
        self.pool.acceptors += 1;
        let fits = self.pool.conns() <= self.config.max_connections;
        if !fits || !self.fabric.provide(self.pool.slots()) {
            self.pool.acceptors -= 1;
            return self.fabric.reject(incoming, Status::Congestion);
        }
        if self.acceptor_of(endpoint, &hello.from).is_some()
            && let Some(endpoint) = self.endpoints.get_mut(endpoint)
        {
            endpoint.has_twins = true;
        }
        let more = u32::from(self.config.initial_window.max(1) - 1).min(self.pool.free);
        self.pool.free -= more;
        let granted = 1 + more as u16;
        let conn = self.conns.insert(Conn {
            endpoint,
            peer: hello.from,
            role: Role::Acceptor(Acceptor {
                tag: hello.tag,
                granted,
                in_service: 0,
                taken_signals: 0,
                lane_signals: 0,
                signals: 0,
                buffers: 0,
                has_control: false,
                has_news: false,
                recent: 0,
                segment: None,
            }),
            unsignaled: 0,
            lanes: Lanes::default(),
        });
        let welcome = Welcome { window: granted, max_medium: self.config.max_medium };
        if !self.fabric.accept(incoming, conn, &welcome) {
            self.drop_conn(conn);
        }
    }

    /// Connections that there are, those that peers have made included.
    #[must_use]
    pub fn connections(&self) -> usize {
        self.conns.len()
    }

    /// Ends a connection of a stranger, none of whose messages are taken, if the tag of a peer that asks for
    /// its place is right. So strangers cannot keep peers away, however many of them come.
    #[cold]
    fn make_room_for(&mut self, endpoint: EndpointId, tag: Tag) {
        let tag_of = |id: EndpointId| self.endpoints.get(id).map_or(Tag::NONE, |it| it.tag);
        if !tag_of(endpoint).accepts(tag) {
            return;
        }
        let strangers = self.conns.iter().filter_map(|(id, conn)| match &conn.role {
            // Peers that come before the program has set its tag are the last to go.
            Role::Acceptor(acceptor) => {
                let own = tag_of(conn.endpoint);
                (!own.accepts(acceptor.tag)).then_some((own == Tag::NONE, id))
            }
            Role::Initiator(_) => None,
        });
        if let Some((_, stranger)) = strangers.min_by_key(|(is_early, _)| *is_early) {
            self.drop_conn(stranger);
        }
    }

    /// The connection stands.
    pub(super) fn connected(&mut self, id: ConnId, welcome: Welcome) {
        let most = self.config.max_window.max(1);
        if let Some(initiator) = self.conns.get_mut(id).and_then(Conn::initiator) {
            initiator.is_up = true;
            initiator.window = welcome.window.clamp(1, most);
            initiator.max_medium = welcome.max_medium;
            self.close_if_idle(id);
        }
    }

    /// The peer could not be reached: another attempt follows, unless it is time to give up.
    pub(super) fn try_again(&mut self, id: ConnId) {
        let now = self.now;
        let Some(initiator) = self.conns.get_mut(id).and_then(Conn::initiator) else {
            return self.give_up(id, Status::Unreachable);
        };
        if initiator.index.is_none() || now >= initiator.give_up_at || initiator.retry_at.is_some()
        {
            return self.give_up(id, Status::Unreachable);
        }
        let pause = FIRST_PAUSE_NS << initiator.attempts.min(10);
        initiator.attempts += 1;
        initiator.retry_at = Some(now.saturating_add(pause.min(LONGEST_PAUSE_NS)));
        self.retrying += 1;
    }

    /// Brings the time, in nanoseconds of any clock that never goes back.
    pub fn handle_timeout(&mut self, now: u64) {
        self.now = self.now.max(now);
        if self.retrying > 0 {
            for id in self.conns.ids() {
                self.retry(id);
            }
        }
        if self.now >= self.probe_at {
            self.probe_at = self.now.saturating_add(PROBE_NS);
            self.probe_silent();
        }
        self.return_late_signals();
        if self.pool.is_short && self.now >= self.pool.look_at {
            self.pool.look_at = self.now.saturating_add(IDLE_NS);
            self.revoke_idle();
        }
    }

    /// Asks the adapters of peers that have owed an answer since the last time for a sign of life.
    /// Everything that was sent to them may have been acknowledged, so that a queue pair waits for
    /// nothing when such a host vanishes.
    fn probe_silent(&mut self) {
        let up_to = std::mem::replace(&mut self.probed_up_to, self.records.youngest());
        for id in self.records.conns_up_to(up_to) {
            let Some(initiator) = self.conns.get_mut(id).and_then(Conn::initiator) else {
                continue;
            };
            if !std::mem::replace(&mut initiator.is_probed, true)
                && !self.fabric.probe(id, notify::PROBE)
            {
                self.give_up(id, Status::Unreachable);
            }
        }
    }

    fn retry(&mut self, id: ConnId) {
        let now = self.now;
        let Some(conn) = self.conns.get_mut(id) else { return };
        let (endpoint, peer) = (conn.endpoint, conn.peer);
        let Some(initiator) = conn.initiator() else { return };
        if initiator.retry_at.is_none_or(|at| at > now) {
            return;
        }
        initiator.retry_at = None;
        self.retrying -= 1;
        let tag = initiator.told_tag;
        let hello = self.hello(endpoint, &peer, tag);
        self.fabric.connect(id, &peer, &hello);
    }

    /// When [`handle_timeout`](Self::handle_timeout) has something to do, if nothing happens
    /// before.
    #[must_use]
    pub fn poll_timeout(&self) -> Option<u64> {
        let retry = (self.retrying > 0).then(|| {
            let times = self.conns.iter().filter_map(|(_, conn)| match &conn.role {
                Role::Initiator(initiator) => initiator.retry_at,
                Role::Acceptor(_) => None,
            });
            times.min()
        });
        let look = self.pool.is_short.then_some(self.pool.look_at);
        let probe = self.records.is_any_used().then_some(self.probe_at);
        [retry.flatten(), look, probe, self.signals_due].into_iter().flatten().min()
    }

    /// Ends a connection that cannot go on: what is under way comes back, and so will later
    /// requests.
    #[cold]
    pub(super) fn give_up(&mut self, id: ConnId, status: Status) {
        let Some(conn) = self.conns.get_mut(id) else { return };
        let endpoint = conn.endpoint;
        if let Some(index) = conn.initiator().and_then(|initiator| initiator.index) {
            self.link(endpoint, index, Link::Dead(status));
        }
        for record in self.records.all_of(id) {
            let known = self.records.of(record, id).copied();
            self.records.remove(record, id);
            if let Some(known) = known.filter(|known| !known.is_answered) {
                self.returned(id, &known, status);
            }
        }
        self.drop_conn(id);
    }

    /// Ends a connection, and forgets what is under way.
    pub(super) fn drop_conn(&mut self, id: ConnId) {
        for record in self.records.all_of(id) {
            self.records.remove(record, id);
        }
        let Some(conn) = self.conns.remove(id) else { return };
        match conn.role {
            Role::Initiator(initiator) => {
                self.pool.initiators -= 1;
                self.retrying -= u32::from(initiator.retry_at.is_some());
            }
            Role::Acceptor(acceptor) => {
                self.pool.acceptors -= 1;
                self.pool.free += u32::from(acceptor.granted - 1);
                self.keep_signals(conn.endpoint, &conn.peer, acceptor.signals);
            }
        }
        self.fabric.close(id);
        self.buffers.release_all_of(id);
        self.reply_writes.retain(|(_, conn)| *conn != id);
    }

    /// Ends a connection whose translation is gone, when nothing is under way any more.
    #[inline]
    pub(super) fn close_if_idle(&mut self, id: ConnId) {
        let initiator = self.conns.get_mut(id).and_then(Conn::initiator);
        let is_orphan = initiator.is_some_and(|it| it.index.is_none() && it.signals == 0);
        if is_orphan && self.records.all_of(id).is_empty() {
            self.drop_conn(id);
        }
    }
}
