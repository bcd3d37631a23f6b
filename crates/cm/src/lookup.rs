//! Datagram services: which queue pair serves a port? SIDR_REQ and SIDR_REP of InfiniBand (IBA
//! 12.11), each in a UDP datagram.

use std::net::SocketAddr;

use quipu_wire::cm::{self as wire, Lookup as Message};
use rand_core::RngCore;

use crate::connect::padded;
use crate::id::{Id, Lookup, Question, Search, State};
use crate::keys::IdKey;
use crate::types::{Action, CallError, EventKind, Param, Peer, qp_type};
use crate::{Cm, errno};

/// `RDMA_UDP_QKEY`: the Q_Key of datagram services whose programs name none.
pub const UDP_QKEY: u32 = 0x0123_4567;

/// The first pause before a look-up is repeated; each further one is twice as long.
const FIRST_PAUSE_NS: u64 = 100_000_000;
/// The longest.
const LONGEST_PAUSE_NS: u64 = 3_200_000_000;
/// How often it is sent: it is given up after some 16 s.
const SENDS: u32 = 9;
/// Answers that a listener remembers, for requests that are repeated.
const ANSWERS: usize = 1024;

/// Why there is no queue pair, as InfiniBand numbers it.
mod status {
    pub(super) const SUCCESS: u8 = 0;
    pub(super) const UNSUPPORTED: u8 = 1;
    pub(super) const REJECT: u8 = 2;
}

fn pause(sent: u32) -> u64 {
    (FIRST_PAUSE_NS << sent.saturating_sub(1).min(16)).min(LONGEST_PAUSE_NS)
}

/// Whether an answer is from where the question went, however the program has written that: IPv4 within IPv6,
/// with a scope or without. The world's socket hears nobody of another scope.
fn is_same(asked: SocketAddr, from: SocketAddr) -> bool {
    asked.ip().to_canonical() == from.ip().to_canonical() && asked.port() == from.port()
}

impl Cm {
    pub(crate) fn look_up(
        &mut self,
        now: u64,
        key: IdKey,
        param: &Param,
        dst: SocketAddr,
    ) -> Result<(), CallError> {
        if param.private_data.len() > wire::SIDR_REQ_DATA {
            return Err(CallError::Invalid("the length of the private data"));
        }
        let number = self.rng.next_u32();
        let id = self.ids.get_mut(key).ok_or(CallError::NoSuchObject)?;
        let gid = id.own_gid(&self.own);
        let (port_space, data) = (id.space.code(), &param.private_data[..]);
        let request = Message::Request { port_space, id: number, gid, data }.to_bytes();
        let bytes = request.clone();
        id.state = State::LookingUp(Search { number, request, sent: 1, refused: false });
        self.set_deadline(key, Some(now + pause(1)));
        self.actions.push_back(Action::Datagram { via: key, from: None, to: dst, bytes });
        Ok(())
    }

    /// The pause after a look-up is over.
    pub(crate) fn look_up_again(&mut self, now: u64, key: IdKey) {
        let Some(id) = self.ids.get_mut(key) else { return };
        let (State::LookingUp(search), Some(to)) = (&mut id.state, id.dst) else { return };
        if search.sent >= SENDS {
            id.state = State::Over;
            return self.tell(key, EventKind::Unreachable, -errno::TIMEDOUT);
        }
        search.sent += 1;
        let (bytes, at) = (search.request.clone(), now + pause(search.sent));
        self.set_deadline(key, Some(at));
        self.actions.push_back(Action::Datagram { via: key, from: None, to, bytes });
    }

    /// Nobody has the port that a look-up went to. That counts if it lasts until the look-up is sent
    /// again: as with connections, the program there may be about to listen.
    pub fn handle_refused(&mut self, key: IdKey) {
        let Some(id) = self.ids.get_mut(key) else { return };
        if let State::LookingUp(search) = &mut id.state
            && std::mem::replace(&mut search.refused, true)
            && search.sent > 1
        {
            id.state = State::Over;
            self.set_deadline(key, None);
            self.tell(key, EventKind::Unreachable, status::UNSUPPORTED.into());
        }
    }

    /// A datagram has come to the socket of an identifier, from `peer`, to `local`.
    pub fn handle_datagram(
        &mut self,
        key: IdKey,
        local: SocketAddr,
        peer: SocketAddr,
        bytes: &[u8],
    ) {
        let Ok(message) = Message::parse(bytes) else { return };
        let Some(id) = self.ids.get(key) else { return };
        match (&id.state, message) {
            (State::Listening(_), Message::Request { .. }) if self.takes_family_of(key, peer) => {
                self.asked(key, local, peer, message);
            }
            (State::LookingUp(search), Message::Reply { id: number, .. })
                if number == search.number && id.dst.is_some_and(|dst| is_same(dst, peer)) =>
            {
                self.answered(key, message);
            }
            _ => {}
        }
    }

    /// The answer to a look-up has come.
    fn answered(&mut self, key: IdKey, reply: Message<'_>) {
        let Message::Reply { status, qpn, qkey, gid, data, .. } = reply else { return };
        self.set_deadline(key, None);
        let Some(id) = self.ids.get_mut(key) else { return };
        id.state = State::Over;
        if status != status::SUCCESS {
            let data = padded(data, wire::SIDR_REP_DATA);
            let (kind, peer) = (EventKind::Unreachable, Peer::default());
            return self.tell_data(key, kind, status.into(), data, peer);
        }
        let path = Some(id.path_to(&self.own, gid));
        let peer = Peer { qpn, qkey, path, ..Peer::default() };
        let data = padded(data, wire::SIDR_REP_DATA);
        self.tell_data(key, EventKind::Established, 0, data, peer);
    }

    /// A peer looks for the queue pair of a listener.
    fn asked(&mut self, by: IdKey, local: SocketAddr, peer: SocketAddr, request: Message<'_>) {
        if self.removed {
            return;
        }
        let Message::Request { port_space, id: number, gid, data } = request else { return };
        let own_gid = self.own.gid(self.own.row_of(local));
        let serves = self.serves(local, peer);
        let Some(listener) = self.ids.get_mut(by) else { return };
        let space = listener.space;
        let State::Listening(state) = &mut listener.state else { return };
        match state.lookups.get(&(peer, number)) {
            Some(Lookup::Pending) => return,
            Some(Lookup::Answered(bytes)) => {
                let (from, bytes) = (Some(local), bytes.clone());
                self.actions.push_back(Action::Datagram { via: by, from, to: peer, bytes });
                return;
            }
            None => {}
        }
        if !serves || port_space != space.code() {
            let reply = Message::Reply {
                status: status::UNSUPPORTED,
                id: number,
                qpn: 0,
                qkey: 0,
                gid: own_gid,
                data: &[],
            };
            let (from, bytes) = (Some(local), reply.to_bytes());
            self.actions.push_back(Action::Datagram { via: by, from, to: peer, bytes });
            return;
        }
        // Those beyond are dropped: whoever means it asks again.
        if state.untaken.len() >= state.backlog {
            return;
        }
        state.lookups.insert((peer, number), Lookup::Pending);
        let mut child = Id::new(listener.channel, space, qp_type::UD, 0);
        child.src = Some(local);
        child.dst = Some(peer);
        child.state = State::Asked(Question { listener: by, number });
        child.options.tos = listener.options.tos;
        let path = Some(child.path_to(&self.own, gid));
        let child = self.add_child(by, child);
        let data = padded(data, wire::SIDR_REQ_DATA);
        let peer = Peer { path, ..Peer::default() };
        self.tell_data(child, EventKind::ConnectRequest, 0, data, peer);
    }

    /// Answers a look-up.
    pub(crate) fn answer(
        &mut self,
        key: IdKey,
        question: Question,
        param: &Param,
    ) -> Result<(), CallError> {
        if param.private_data.len() > wire::SIDR_REP_DATA {
            return Err(CallError::Invalid("the length of the private data"));
        }
        let id = self.ids.get(key).ok_or(CallError::NoSuchObject)?;
        let reply = Message::Reply {
            status: status::SUCCESS,
            id: question.number,
            qpn: param.qpn,
            qkey: if param.qkey == 0 { UDP_QKEY } else { param.qkey },
            gid: id.own_gid(&self.own),
            data: &param.private_data,
        };
        self.send_answer(key, question, reply.to_bytes());
        Ok(())
    }

    /// Answers that there is none.
    pub(crate) fn refuse_look_up(&mut self, key: IdKey, question: Question, data: &[u8]) {
        let reply = Message::Reply {
            status: status::REJECT,
            id: question.number,
            qpn: 0,
            qkey: 0,
            gid: self.own.gid(0),
            data,
        };
        self.send_answer(key, question, reply.to_bytes());
    }

    fn send_answer(&mut self, key: IdKey, question: Question, bytes: Vec<u8>) {
        let Some(id) = self.ids.get_mut(key) else { return };
        id.state = State::Over;
        let (Some(from), Some(to)) = (id.src, id.dst) else { return };
        let by = question.listener;
        if let Some(State::Listening(state)) = self.ids.get_mut(by).map(|id| &mut id.state) {
            let name = (to, question.number);
            state.lookups.insert(name, Lookup::Answered(bytes.clone()));
            state.answered.push_back(name);
            if state.answered.len() > ANSWERS
                && let Some(oldest) = state.answered.pop_front()
            {
                state.lookups.remove(&oldest);
            }
        }
        self.actions.push_back(Action::Datagram { via: by, from: Some(from), to, bytes });
    }
}
