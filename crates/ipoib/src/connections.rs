//! Connections of connected mode (RFC 4755): which there are, which packets wait for one, and when one ends.
//!
//! Packets go over connections that this end opened. Those that peers open only bring packets. So two
//! neighbours have two connections, one for each direction, as with Linux.

use std::collections::{BTreeMap, VecDeque};

use quipu_wire::ipoib::{ConnectionData, LEN as HEADER_LEN, LinkAddress};

use crate::counters::Dropped;
use crate::{
    EVICT_NS, IDLE_NS, LONGEST_PACKET, MAX_CONNECTIONS, MAX_CONNECTIONS_OF_PORT, MAX_PAST,
    MAX_WAITING, MAX_WAITING_IN_ALL, RETRY_NS, SHORTEST_MTU, STALL_NS,
};

/// The name of a connection. No two connections of an engine have the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ConnectionId(u64);

/// What is to be done with a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ConnectionChange {
    /// Connect a queue pair to the interface with this link-layer address, with this private data.
    Open {
        /// The name of the connection.
        id: ConnectionId,
        /// The neighbour.
        to: LinkAddress,
        /// The private data of the REQ.
        private_data: [u8; ConnectionData::LEN],
    },
    /// End it. It may not be established yet.
    Close(ConnectionId),
}

/// A connection that is established, or was, and what passed over it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConnectionInfo {
    /// The neighbour.
    pub peer: LinkAddress,
    /// Whether packets go over it; they come over it otherwise.
    pub is_outgoing: bool,
    /// Whether it has ended.
    pub has_ended: bool,
    /// The longest packet in bytes that goes over it.
    pub mtu: usize,
    /// Packets that passed.
    pub packets: u64,
    /// Their bytes.
    pub bytes: u64,
}

/// What connections of this end are like.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    /// The queue pair of the interface.
    pub(crate) link: LinkAddress,
    /// The longest IP packet in bytes that may come or go.
    pub(crate) mtu: usize,
    /// Messages that may be under way over all connections.
    pub(crate) slots: usize,
}

/// Where a packet for a neighbour goes.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Passage {
    /// Over this connection.
    Send(ConnectionId),
    /// It was copied, and waits for its connection.
    Waits,
    /// It is longer than this, which the neighbour receives.
    TooLong(usize),
    /// It is not sent.
    Dropped(Dropped),
}

#[derive(Debug)]
enum State {
    /// It is being made.
    Connecting { waiting: VecDeque<Vec<u8>> },
    /// It is established. `progress_ns`: when a message was last sent by an idle connection, or completed.
    Up { mtu: usize, since_ns: u64, in_flight: usize, progress_ns: u64 },
    /// It could not be made, and is not tried again before then.
    Failed { again_ns: u64 },
}

/// One that this end opens.
#[derive(Debug)]
struct Outgoing {
    id: ConnectionId,
    state: State,
    used_ns: u64,
    packets: u64,
    bytes: u64,
}

/// One that a peer opens.
#[derive(Debug)]
struct Incoming {
    peer: LinkAddress,
    is_established: bool,
    used_ns: u64,
    packets: u64,
    bytes: u64,
}

impl Outgoing {
    /// What passed, if it is established.
    fn info(&self, peer: LinkAddress) -> Option<ConnectionInfo> {
        let State::Up { mtu, .. } = self.state else { return None };
        let &Self { packets, bytes, .. } = self;
        Some(ConnectionInfo { peer, is_outgoing: true, has_ended: false, mtu, packets, bytes })
    }
}

impl Incoming {
    /// What passed, if it is established.
    fn info(&self, mtu: usize) -> Option<ConnectionInfo> {
        let &Self { peer, packets, bytes, .. } = self;
        let info =
            ConnectionInfo { peer, is_outgoing: false, has_ended: false, mtu, packets, bytes };
        self.is_established.then_some(info)
    }
}

/// What a connection left when it ended.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Ended {
    /// The neighbour to which packets went over it.
    pub(crate) link: LinkAddress,
    /// Packets that waited for it, and are dropped.
    pub(crate) dropped: usize,
}

/// Whether a connection may make room for another one. As a connection takes a while to end, this bounds how
/// many end at once.
fn may_evict(used_ns: u64, now_ns: u64) -> bool {
    used_ns.saturating_add(EVICT_NS) <= now_ns
}

/// The connections.
#[derive(Debug)]
pub(crate) struct Connections {
    limits: Limits,
    /// By link-layer address without flags.
    outgoing: BTreeMap<LinkAddress, Outgoing>,
    links: BTreeMap<ConnectionId, LinkAddress>,
    incoming: BTreeMap<ConnectionId, Incoming>,
    changes: VecDeque<ConnectionChange>,
    /// The last ones that have ended.
    past: VecDeque<ConnectionInfo>,
    next_id: u64,
    waiting: usize,
    in_flight: usize,
    /// Not later than the first deadline.
    next_ns: Option<u64>,
}

impl Connections {
    pub(crate) fn new(limits: Limits) -> Self {
        Self {
            limits,
            outgoing: BTreeMap::new(),
            links: BTreeMap::new(),
            incoming: BTreeMap::new(),
            changes: VecDeque::new(),
            past: VecDeque::new(),
            next_id: 0,
            waiting: 0,
            in_flight: 0,
            next_ns: None,
        }
    }

    /// What is to be done next.
    pub(crate) fn poll(&mut self) -> Option<ConnectionChange> {
        self.changes.pop_front()
    }

    /// When [`Self::due`] has something.
    pub(crate) fn next_ns(&self) -> Option<u64> {
        self.next_ns
    }

    fn wake_at(&mut self, at_ns: u64) {
        self.next_ns = Some(self.next_ns.map_or(at_ns, |next| next.min(at_ns)));
    }

    fn new_id(&mut self) -> ConnectionId {
        self.next_id += 1;
        ConnectionId(self.next_id)
    }

    /// The own private data.
    fn private_data(&self) -> [u8; ConnectionData::LEN] {
        let receive_mtu = (self.limits.mtu + HEADER_LEN) as u32;
        ConnectionData { qpn: self.limits.link.qpn, receive_mtu }.to_bytes()
    }

    /// The queue pair that private data name, and the longest packet that it receives.
    fn check(&self, private_data: &[u8]) -> Option<(u32, usize)> {
        let data = ConnectionData::parse(private_data).ok()?;
        let mtu = (data.receive_mtu as usize).checked_sub(HEADER_LEN)?;
        let makes_sense = (SHORTEST_MTU..=LONGEST_PACKET).contains(&mtu) && data.qpn != 0;
        makes_sense.then_some((data.qpn, mtu.min(self.limits.mtu)))
    }

    /// Where a packet for this neighbour goes; it is copied if it has to wait. If there is no connection, one
    /// is opened.
    pub(crate) fn route(&mut self, now_ns: u64, link: LinkAddress, packet: &[u8]) -> Passage {
        let key = link.without_flags();
        let free = self.limits.slots - self.in_flight;
        let Some(connection) = self.outgoing.get_mut(&key) else {
            return self.open(now_ns, key, packet);
        };
        match &mut connection.state {
            State::Connecting { waiting } => {
                if waiting.len() >= MAX_WAITING || self.waiting >= MAX_WAITING_IN_ALL {
                    return Passage::Dropped(Dropped::Full);
                }
                waiting.push_back(packet.to_vec());
                self.waiting += 1;
                Passage::Waits
            }
            State::Up { mtu, .. } if packet.len() > *mtu => Passage::TooLong(*mtu),
            // A connection has at most as many messages under way as others could still have: those of a
            // peer that does not read leave room for all others.
            State::Up { in_flight, .. } if *in_flight >= free => {
                Passage::Dropped(Dropped::Congested)
            }
            State::Up { in_flight, progress_ns, .. } => {
                if *in_flight == 0 {
                    *progress_ns = now_ns;
                }
                let id = connection.id;
                *in_flight += 1;
                self.in_flight += 1;
                connection.used_ns = now_ns;
                connection.packets += 1;
                connection.bytes += packet.len() as u64;
                self.wake_at(now_ns.saturating_add(STALL_NS));
                Passage::Send(id)
            }
            State::Failed { again_ns } if now_ns < *again_ns => {
                Passage::Dropped(Dropped::NotConnected)
            }
            State::Failed { .. } => self.open(now_ns, key, packet),
        }
    }

    /// Begins to open a connection, for which a packet waits.
    fn open(&mut self, now_ns: u64, to: LinkAddress, packet: &[u8]) -> Passage {
        if self.waiting >= MAX_WAITING_IN_ALL || !self.make_room(now_ns, to) {
            return Passage::Dropped(Dropped::Full);
        }
        let id = self.new_id();
        let state = State::Connecting { waiting: VecDeque::from([packet.to_vec()]) };
        self.waiting += 1;
        self.outgoing.insert(to, Outgoing { id, state, used_ns: now_ns, packets: 0, bytes: 0 });
        self.links.insert(id, to);
        let private_data = self.private_data();
        self.changes.push_back(ConnectionChange::Open { id, to, private_data });
        Passage::Waits
    }

    /// Makes room for one more that this end opens: the one that was not used for longest gives way, of the
    /// same port if that has its share.
    fn make_room(&mut self, now_ns: u64, to: LinkAddress) -> bool {
        // One that failed before is not counted: the new one takes its place.
        let others = || self.outgoing.iter().filter(|(link, _)| **link != to);
        let of_port = others().filter(|(link, _)| link.gid == to.gid).count();
        let is_share_full = of_port >= MAX_CONNECTIONS_OF_PORT;
        if !is_share_full && others().count() < MAX_CONNECTIONS {
            return true;
        }
        let is_idle = |it: &Outgoing| match it.state {
            State::Connecting { .. } => false,
            State::Up { in_flight, .. } => in_flight == 0 && may_evict(it.used_ns, now_ns),
            State::Failed { .. } => true,
        };
        let candidates = others()
            .filter(|(link, it)| is_idle(it) && (!is_share_full || link.gid == to.gid))
            .min_by_key(|(_, it)| it.used_ns);
        let Some((&link, _)) = candidates else { return false };
        self.close(link);
        true
    }

    /// Closes one that this end opened, and that is established or failed.
    fn close(&mut self, link: LinkAddress) {
        let removed = self.remove(link);
        if let Some(Outgoing { id, state: State::Up { .. }, .. }) = removed {
            self.changes.push_back(ConnectionChange::Close(id));
        }
    }

    /// Removes one that this end opened.
    fn remove(&mut self, link: LinkAddress) -> Option<Outgoing> {
        let connection = self.outgoing.remove(&link)?;
        self.links.remove(&connection.id);
        self.note(connection.info(link));
        match &connection.state {
            State::Connecting { waiting } => self.waiting -= waiting.len(),
            State::Up { in_flight, .. } => self.in_flight -= in_flight,
            State::Failed { .. } => {}
        }
        Some(connection)
    }

    /// Removes one that a peer opened; whether there was one.
    fn remove_incoming(&mut self, id: ConnectionId) -> bool {
        let Some(connection) = self.incoming.remove(&id) else { return false };
        self.note(connection.info(self.limits.mtu));
        true
    }

    /// A peer at this GID wants to connect, with this private data. The name of the connection, and the
    /// private data of the acceptance.
    ///
    /// # Errors
    /// The private data make no sense, or the peer's port has too many connections that are being made.
    pub(crate) fn request(
        &mut self,
        now_ns: u64,
        gid: [u8; 16],
        private_data: &[u8],
    ) -> Result<(ConnectionId, [u8; ConnectionData::LEN]), Dropped> {
        let (qpn, _) = self.check(private_data).ok_or(Dropped::Malformed)?;
        let of_port = self.incoming.values().filter(|it| it.peer.gid == gid).count();
        let is_share_full = of_port >= MAX_CONNECTIONS_OF_PORT;
        if is_share_full || self.incoming.len() >= MAX_CONNECTIONS {
            let candidates =
                self.incoming.iter().filter(|(_, it)| !is_share_full || it.peer.gid == gid);
            let idle = |it: &Incoming| it.is_established && may_evict(it.used_ns, now_ns);
            let oldest = candidates.filter(|(_, it)| idle(it)).min_by_key(|(_, it)| it.used_ns);
            let (&id, _) = oldest.ok_or(Dropped::Full)?;
            self.remove_incoming(id);
            self.changes.push_back(ConnectionChange::Close(id));
        }
        let id = self.new_id();
        let peer = LinkAddress { qpn, gid, connects: true };
        let (packets, bytes) = (0, 0);
        let connection = Incoming { peer, is_established: false, used_ns: now_ns, packets, bytes };
        self.incoming.insert(id, connection);
        Ok((id, self.private_data()))
    }

    /// A connection is established; in one that this end opened, the acceptance had this private data. The
    /// neighbour and the packets that waited for it. `None`: it is not wanted any more, or the private data
    /// make no sense; end it, and call [`Self::ended`].
    pub(crate) fn established(
        &mut self,
        now_ns: u64,
        id: ConnectionId,
        private_data: &[u8],
    ) -> Option<(LinkAddress, VecDeque<Vec<u8>>)> {
        let idle_ns = now_ns.saturating_add(IDLE_NS);
        if let Some(connection) = self.incoming.get_mut(&id) {
            (connection.is_established, connection.used_ns) = (true, now_ns);
            let peer = connection.peer;
            self.wake_at(idle_ns);
            return Some((peer, VecDeque::new()));
        }
        let link = *self.links.get(&id)?;
        let (qpn, mtu) = self.check(private_data)?;
        let connection = self.outgoing.get_mut(&link)?;
        let State::Connecting { waiting } = &mut connection.state else { return None };
        if qpn != link.qpn {
            return None;
        }
        let waiting = std::mem::take(waiting);
        self.waiting -= waiting.len();
        connection.used_ns = now_ns;
        connection.state = State::Up { mtu, since_ns: now_ns, in_flight: 0, progress_ns: now_ns };
        self.wake_at(idle_ns);
        Some((link, waiting))
    }

    /// A connection could not be made, or has ended. `None`: no packets went over it.
    pub(crate) fn ended(&mut self, now_ns: u64, id: ConnectionId) -> Option<Ended> {
        if self.remove_incoming(id) {
            return None;
        }
        let link = *self.links.get(&id)?;
        let connection = self.remove(link)?;
        let again_ns = now_ns.saturating_add(RETRY_NS);
        let (dropped, is_soon) = match connection.state {
            State::Connecting { waiting } => (waiting.len(), true),
            State::Up { since_ns, .. } => (0, now_ns < since_ns.saturating_add(RETRY_NS)),
            State::Failed { .. } => (0, false),
        };
        // One that ended later is opened again by the next packet.
        if is_soon {
            let state = State::Failed { again_ns };
            self.outgoing
                .insert(link, Outgoing { id, state, used_ns: now_ns, packets: 0, bytes: 0 });
            self.wake_at(again_ns);
        }
        Some(Ended { link, dropped })
    }

    /// The neighbour at the other end of a connection.
    pub(crate) fn peer(&self, id: ConnectionId) -> Option<LinkAddress> {
        let incoming = self.incoming.get(&id).map(|it| it.peer);
        incoming.or_else(|| self.links.get(&id).copied())
    }

    /// Whether this end opened, or opens, the connection.
    pub(crate) fn is_outgoing(&self, id: ConnectionId) -> bool {
        self.links.contains_key(&id)
    }

    /// A message over this connection could not be sent: it is of no use any more.
    pub(crate) fn broken(&mut self, now_ns: u64, id: ConnectionId) -> Option<Ended> {
        if self.links.contains_key(&id) || self.incoming.contains_key(&id) {
            self.changes.push_back(ConnectionChange::Close(id));
        }
        self.ended(now_ns, id)
    }

    /// So many messages have left over this connection, or are not to be sent any more.
    pub(crate) fn sent(&mut self, now_ns: u64, id: ConnectionId, count: usize) {
        let Some(link) = self.links.get(&id) else { return };
        let Some(connection) = self.outgoing.get_mut(link) else { return };
        if let State::Up { in_flight, progress_ns, .. } = &mut connection.state {
            let count = count.min(*in_flight);
            *in_flight -= count;
            *progress_ns = now_ns;
            self.in_flight -= count;
        }
    }

    /// A packet of so many bytes came over this connection; whether there is such a connection.
    pub(crate) fn received(&mut self, now_ns: u64, id: ConnectionId, bytes: usize) -> bool {
        if let Some(connection) = self.incoming.get_mut(&id) {
            connection.used_ns = now_ns;
            connection.packets += 1;
            connection.bytes += bytes as u64;
            return true;
        }
        // A peer may send over one that this end has opened (RFC 4755 3.3).
        let link = self.links.get(&id);
        let Some(connection) = link.and_then(|link| self.outgoing.get_mut(link)) else {
            return false;
        };
        connection.used_ns = now_ns;
        matches!(connection.state, State::Up { .. })
    }

    /// What is due at `now_ns`: connections that nobody uses, and those to peers that do not read, are
    /// closed. The latter are returned.
    pub(crate) fn due(&mut self, now_ns: u64) -> Vec<Ended> {
        if self.next_ns.is_none_or(|next| now_ns < next) {
            return Vec::new();
        }
        self.next_ns = None;
        let (mut idle, mut stalled, mut next) = (Vec::new(), Vec::new(), Vec::new());
        for (&link, connection) in &self.outgoing {
            let (at_ns, list) = match connection.state {
                State::Connecting { .. } => continue,
                State::Up { in_flight: 1.., progress_ns, .. } => {
                    (progress_ns.saturating_add(STALL_NS), &mut stalled)
                }
                State::Up { .. } => (connection.used_ns.saturating_add(IDLE_NS), &mut idle),
                State::Failed { again_ns } => (again_ns, &mut idle),
            };
            match at_ns <= now_ns {
                true => list.push((link, connection.id)),
                false => next.push(at_ns),
            }
        }
        for (link, _) in idle {
            self.close(link);
        }
        let established = self.incoming.iter().filter(|(_, it)| it.is_established);
        let deadlines = established.map(|(&id, it)| (id, it.used_ns.saturating_add(IDLE_NS)));
        let (over, later): (Vec<_>, Vec<_>) = deadlines.partition(|&(_, at_ns)| at_ns <= now_ns);
        for (id, _) in over {
            self.remove_incoming(id);
            self.changes.push_back(ConnectionChange::Close(id));
        }
        let ended = stalled.into_iter().filter_map(|(_, id)| self.broken(now_ns, id)).collect();
        next.into_iter().chain(later.into_iter().map(|(_, at_ns)| at_ns)).for_each(|at_ns| {
            self.wake_at(at_ns);
        });
        ended
    }

    /// Those that are established, and the last ones that have ended.
    pub(crate) fn infos(&self) -> Vec<ConnectionInfo> {
        let outgoing = self.outgoing.iter().filter_map(|(&peer, it)| it.info(peer));
        let incoming = self.incoming.values().filter_map(|it| it.info(self.limits.mtu));
        self.past.iter().copied().chain(outgoing).chain(incoming).collect()
    }

    /// Remembers one that has ended.
    fn note(&mut self, info: Option<ConnectionInfo>) {
        let Some(info) = info else { return };
        if self.past.len() >= MAX_PAST {
            self.past.pop_front();
        }
        self.past.push_back(ConnectionInfo { has_ended: true, ..info });
    }
}

#[cfg(test)]
mod tests;
