//! Connections over links: channels in memory that two engines of one host share.

use std::net::IpAddr;

use quipu_iwarp::wire::hello::{Features, Hello, Kind, Reason};
use quipu_mem::ring::Channel;

use super::{
    Conn, Phase, Via, Waiting, attempt_failed, detach, established, hello_of, pause, start_deadline,
};
use crate::adapter::{Adapter, Hub};
use crate::channel::{ChannelPath, Other};
use crate::error::Fault;
use crate::event::Action;
use crate::link::{Link, LinkEnd, LinkMessage, LinkState, channel_config};
use crate::probe::Probe;
use crate::qp::{Path, Qp, pd_number};
use crate::receive;
use crate::requester;
use crate::transmit;
use crate::types::{ConnId, Gid, LinkId, QpId, Time};

impl<P> Hub<P> {
    /// Whether the engine behind a link has the queue pairs of this GID.
    fn speaks_for(&self, link: LinkId, gid: Gid) -> bool {
        self.links.get(link).is_some_and(|state| match state.link.peer_gid {
            Some(peer) => peer == gid,
            None => self.gids.is_of_host(gid),
        })
    }
}

/// Begins a channel in the own segment of a link and asks the peer to join it. `None` if there is no room.
fn ask<P>(qp: &mut Qp, hub: &mut Hub<P>, conn: ConnId, link: LinkId) -> Option<()> {
    let hello = hello_of(qp, hub, Kind::Request);
    let state = hub.links.get_mut(link)?;
    let block = state.arena.allocate().ok()?;
    if !block.fresh {
        block.segment.zero().ok()?;
    }
    let offset = LinkState::block_offset(block.offset);
    let channel = match Channel::create(&block.segment, 0, channel_config()) {
        Ok(channel) => Box::new(channel),
        Err(_) => {
            let _ = state.arena.free(block.index);
            return None;
        }
    };
    // The peer may begin as soon as it accepts, and needs nobody here for what it executes by itself. If it
    // had to ask for its first request, it would for all behind it, as long as some are outstanding.
    channel.incoming.control.set_grants(qp.grants().bits());
    let bell = state.take_bell(qp.id);
    let end = LinkEnd { bell, pd: pd_number(qp.pd) };
    hub.link_send(link, LinkMessage::Request { tag: conn.0, hello, offset, end });
    if let Some(state) = hub.conns.get_mut(conn) {
        state.phase = Phase::Asking { link, channel, block: block.index, bell };
    }
    Some(())
}

/// Lets the peer of a new channel push, and ring for what it pushes.
fn begin_reception(path: &ChannelPath, qp: &Qp) {
    path.channel.incoming.control.set_grants(qp.grants().bits());
    path.channel.incoming.control.arm();
}

/// Whether the peer of a channel gave its request up before the answer reached it: it has never had the
/// channel, or it would have closed its end of it, and asks again.
fn never_stood(qp: &Qp) -> bool {
    let Path::Channel(path) = &qp.path else { return false };
    let incoming = &path.channel.incoming;
    let silent = qp.responder.executed == 0
        && !qp.responder.receiving
        && qp.requester.acked == 0
        && incoming.responses.position() == 0;
    path.block.is_none()
        && qp.qp_type.is_reliable()
        && silent
        && !incoming.control.producer_closed()
}

impl<P: Probe> Adapter<P> {
    /// The peer that `Connect` asked for is on this host, behind `link`. `false` if the link has no room for
    /// one more channel: that was no answer then, and the peer is to be reached by a stream.
    #[must_use]
    pub fn handle_reached_link(&mut self, now: Time, conn: ConnId, link: LinkId) -> bool {
        self.hub.now = now;
        let Some(id) = self.hub.conns.get(conn).and_then(|state| state.qp) else {
            self.hub.remove_conn(conn);
            return true;
        };
        let Some((qp, hub)) = self.qp_and_hub(id) else { return true };
        if !hub.speaks_for(link, qp.attr.av.dgid) {
            hub.remove_conn(conn);
            pause(qp, hub);
            return true;
        }
        ask(qp, hub, conn, link).is_some()
    }

    /// Takes a link into use.
    ///
    /// # Errors
    /// Its segments are too small, or there are too many links.
    pub fn handle_link_up(&mut self, link: Link) -> Result<LinkId, Fault> {
        let state = LinkState::new(link).map_err(|_| Fault::Invalid("link segment too small"))?;
        self.hub.links.insert(state).ok_or(Fault::Exhausted("links"))
    }

    /// Takes a control message of the engine behind `link`.
    pub fn handle_link_message(&mut self, now: Time, link: LinkId, message: LinkMessage) {
        self.hub.now = now;
        match message {
            LinkMessage::Request { tag, hello, offset, end } => {
                self.link_asked(hello, Via::Link { link, tag, offset, end });
            }
            LinkMessage::Accept { tag, own_tag, end } => {
                self.link_accepted(link, tag, own_tag, end)
            }
            LinkMessage::Reject { tag, .. } => {
                let conn = ConnId(tag);
                let Some(state) = self.take_link_conn(link, conn) else { return };
                self.ask_again(&state);
            }
            LinkMessage::Close { tag } => self.link_closed(link, ConnId(tag)),
            LinkMessage::Fetch { tag, sequence, offset, len } => {
                if let Some((qp, hub)) = self.channel_qp(link, ConnId(tag)) {
                    transmit::channel::hand_over(qp, hub, sequence, offset, len);
                }
            }
            LinkMessage::Fetched { tag, sequence, offset, bytes } => {
                let Some((qp, hub)) = self.channel_qp(link, ConnId(tag)) else { return };
                if receive::asked::take_in(qp, sequence, offset, &bytes) {
                    hub.nudged.push_back(qp.id);
                    self.serve_nudged();
                }
            }
        }
    }

    /// The queue pair of a connection with a channel over `link`.
    fn channel_qp(&mut self, link: LinkId, conn: ConnId) -> Option<(&mut Qp, &mut Hub<P>)> {
        let id = self.hub.conns.get(conn).and_then(|state| state.qp)?;
        let (qp, hub) = self.qp_and_hub(id)?;
        let Path::Channel(path) = &qp.path else { return None };
        let here = matches!(path.other, Other::Linked { link: of, conn: own, .. }
            if (of, own) == (link, conn));
        here.then_some((qp, hub))
    }

    /// The peer of a link asks for a channel.
    fn link_asked(&mut self, hello: Hello, via: Via) {
        let Via::Link { link, tag, .. } = via else { return };
        let genuine = self.hub.speaks_for(link, Gid(hello.source_gid));
        let conn = genuine.then(|| {
            self.make_room(IpAddr::from(Gid(hello.source_gid)));
            self.hub.new_conn(None, Phase::Waiting(Box::new(Waiting { hello, via })))
        });
        let reason = match conn {
            Some(Some(conn)) => {
                self.hub.count_half_open(conn);
                return self.decide(conn);
            }
            Some(None) => Reason::Busy,
            None => Reason::Mismatch,
        };
        let hello = hello.answer(Kind::Reject(reason), Features::ALL, 0, 0);
        self.hub.link_send(link, LinkMessage::Reject { tag, hello });
    }

    pub(super) fn grant_link(
        &mut self,
        conn: ConnId,
        id: QpId,
        link: LinkId,
        tag: u64,
        offset: u64,
        end: LinkEnd,
    ) {
        let Some((qp, hub)) = self.qp_and_hub(id) else { return };
        let Some(state) = hub.links.get_mut(link) else { return };
        let attached = usize::try_from(offset)
            .ok()
            .and_then(|offset| Channel::attach(&state.link.peer, offset, channel_config()).ok());
        let Some(channel) = attached else {
            // Only a peer that does not follow the rules gets here.
            hub.remove_conn(conn);
            return;
        };
        let bell = state.take_bell(id);
        let other = Other::Linked { link, bell: end.bell, conn };
        let mut path = ChannelPath::new(channel, other, bell);
        path.peer_tag = tag;
        path.peer_pd = end.pd;
        path.peer_qp = qp.attr.dest_qp_num;
        begin_reception(&path, qp);
        if let Some(state) = hub.conns.get_mut(conn) {
            state.qp = Some(id);
            state.phase = Phase::Open;
        }
        let own = LinkEnd { bell, pd: pd_number(qp.pd) };
        hub.link_send(link, LinkMessage::Accept { tag, own_tag: conn.0, end: own });
        established(qp, hub, Path::Channel(Box::new(path)));
        self.serve_nudged();
    }

    /// Removes a connection in the making over `link`, and frees its block.
    pub(super) fn take_link_conn(&mut self, link: LinkId, conn: ConnId) -> Option<Conn> {
        match self.hub.conns.get(conn)?.phase {
            Phase::Asking { link: of, block, bell, .. } if of == link => {
                let state = self.hub.remove_conn(conn);
                if let Some(link) = self.hub.links.get_mut(link) {
                    link.return_bell(bell);
                }
                self.hub.free_block(link, block);
                state
            }
            Phase::Abandoned { link: of, block } if of == link => {
                self.hub.free_block(link, block);
                self.hub.remove_conn(conn)
            }
            _ => None,
        }
    }

    /// The request of a connection over a link came to nothing.
    fn ask_again(&mut self, state: &Conn) {
        if let Some((qp, hub)) = state.qp.and_then(|qp| self.qp_and_hub(qp)) {
            attempt_failed(qp, hub);
        }
    }

    pub(super) fn link_accepted(&mut self, link: LinkId, tag: u64, own_tag: u64, end: LinkEnd) {
        let conn = ConnId(tag);
        let Some(state) = self.hub.conns.get_mut(conn) else { return };
        let asked = matches!(state.phase, Phase::Asking { link: of, .. } if of == link);
        if !asked {
            // Given up meanwhile: the peer closes its end, and then the block is free.
            self.hub.link_send(link, LinkMessage::Close { tag: own_tag });
            return;
        }
        let Phase::Asking { channel, block, bell, .. } =
            std::mem::replace(&mut state.phase, Phase::Open)
        else {
            return;
        };
        self.hub.settle(conn);
        let id = self.hub.conns.get(conn).and_then(|state| state.qp);
        let Some((qp, hub)) = id.and_then(|id| self.qp_and_hub(id)) else { return };
        let mut path =
            ChannelPath::new(*channel, Other::Linked { link, bell: end.bell, conn }, bell);
        path.block = Some(block);
        path.peer_tag = own_tag;
        path.peer_pd = end.pd;
        path.peer_qp = qp.attr.dest_qp_num;
        begin_reception(&path, qp);
        qp.peer_rq_psn = None;
        established(qp, hub, Path::Channel(Box::new(path)));
        if let Path::Channel(path) = &mut qp.path
            && path.has_incoming()
        {
            hub.nudged.push_back(qp.id);
        }
        self.serve_nudged();
    }

    /// The peer has let go of a channel.
    pub(super) fn link_closed(&mut self, link: LinkId, conn: ConnId) {
        if let Some(state) = self.take_link_conn(link, conn) {
            self.ask_again(&state);
            return;
        }
        let Some((qp, hub)) = self.channel_qp(link, conn) else { return };
        // What it executed and answered before counts.
        receive::channel::run_out(qp, hub);
        if never_stood(qp) {
            detach(qp, hub);
            requester::start_over(qp);
            start_deadline(qp, hub);
            return;
        }
        requester::peer_lost(qp, hub);
        let _ = self.take_link_conn(link, conn);
    }

    /// The engine behind `link` is gone.
    pub fn handle_link_down(&mut self, now: Time, link: LinkId) {
        self.hub.now = now;
        for conn in self.hub.conns.keys() {
            let Some(state) = self.hub.conns.get(conn) else { continue };
            let concerned = match &state.phase {
                Phase::Asking { link: of, .. } | Phase::Abandoned { link: of, .. } => *of == link,
                Phase::Waiting(waiting) => {
                    matches!(waiting.via, Via::Link { link: of, .. } if of == link)
                }
                _ => false,
            };
            if concerned && let Phase::Asking { channel, .. } = &state.phase {
                // The peer may live, and grant the request yet: nobody would wait for its accesses.
                channel.incoming.control.set_grants(0);
            }
            if concerned
                && let Some(state) = self.hub.remove_conn(conn)
                && let Some((qp, hub)) = state.qp.and_then(|qp| self.qp_and_hub(qp))
            {
                attempt_failed(qp, hub);
            }
        }
        for id in self.qps.keys() {
            let Some((qp, hub)) = self.qp_and_hub(id) else { continue };
            let Path::Channel(path) = &qp.path else { continue };
            let Other::Linked { link: of, conn, .. } = path.other else { continue };
            if of != link {
                continue;
            }
            // What the peer pushed before it died arrives, as what was on the wire would.
            receive::channel::run_out(qp, hub);
            requester::peer_lost(qp, hub);
            hub.remove_conn(conn);
        }
        self.hub.links.remove(link);
        self.hub.actions.retain(|action| {
            !matches!(action,
            Action::LinkSend { link: of, .. } | Action::RingBell { link: of } if *of == link)
        });
    }
}
