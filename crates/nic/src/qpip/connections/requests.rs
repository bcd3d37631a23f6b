//! Connections that come to a port, and what programs are told of them.

use quipu_inet::stack::{ListenerId, TcpId};
use quipu_inet::tcp::Flow;

use crate::adapter::Hub;
use crate::event::Event;
use crate::qp::{Path, Qp};
use crate::qpip::{Inet, Owner, TcpChange, Watch};
use crate::receive::frames as receiving;
use crate::slab::Slab;
use crate::types::QpId;

impl Inet {
    /// The adapter keeps nothing of a connection.
    pub(in crate::qpip) fn forget(&mut self, connection: TcpId) {
        if let Some(Owner::Listener(listener)) = self.owner(connection)
            && let Some(watch) = self.watches.get_mut(&listener)
        {
            watch.waiting.retain(|&waiting| waiting != connection);
        }
        self.set_owner(connection, None);
        self.stack.release(connection);
    }

    /// The listener that a connection has come to about which the program is to decide.
    pub(in crate::qpip) fn request(&self, connection: TcpId) -> Option<ListenerId> {
        let Some(Owner::Request(listener)) = self.owner(connection) else { return None };
        Some(listener)
    }

    /// The state of a port that is watched.
    pub(super) fn watch(&mut self, listener: ListenerId) -> Option<&mut Watch> {
        self.watches.get_mut(&listener).filter(|watch| !watch.closed)
    }

    /// How many more connections a port can take.
    pub(super) fn say_idle(&mut self, listener: ListenerId) {
        if let Some(watch) = self.watches.get(&listener) {
            let free = match watch.deferred {
                true => watch.backlog.saturating_sub(watch.requests),
                false => watch.idle.len(),
            };
            let idle = free.saturating_sub(watch.waiting.len());
            self.stack.set_idle(listener, u32::try_from(idle).unwrap_or(u32::MAX));
        }
    }
}

impl<P> Hub<P> {
    pub(super) fn tell_request(
        &mut self,
        listener: ListenerId,
        connection: TcpId,
        flow: Option<Flow>,
    ) {
        self.events.push_back(Event::TcpRequest { listener, connection, flow });
    }

    /// The program has decided about a connection, or need not any more: it may hear of one that waits.
    pub(in crate::qpip) fn decided(&mut self, listener: ListenerId) {
        let Some(inet) = &mut self.inet else { return };
        let Some(watch) = inet.watches.get_mut(&listener) else { return };
        watch.requests = watch.requests.saturating_sub(1);
        if watch.closed && watch.requests == 0 {
            inet.watches.remove(&listener);
            return;
        }
        if let Some(next) = watch.waiting.pop_front() {
            watch.requests += 1;
            inet.set_owner(next, Some(Owner::Request(listener)));
            let flow = inet.stack.flow(next);
            self.tell_request(listener, next, flow);
        }
        if let Some(inet) = &mut self.inet {
            inet.say_idle(listener);
        }
    }

    pub(super) fn tell_tcp(&mut self, qp: QpId, change: TcpChange) {
        self.events.push_back(Event::Tcp { qp, change });
    }

    /// A peer connects to a port.
    pub(in crate::qpip) fn incoming(
        &mut self,
        listener: ListenerId,
        connection: TcpId,
        qps: &Slab<QpId, Qp>,
    ) {
        let Some(inet) = &mut self.inet else { return };
        inet.set_owner(connection, Some(Owner::Listener(listener)));
        inet.say_idle(listener);
        let before = inet.stack.half_open(listener).saturating_sub(1) as usize;
        let Some(watch) = inet.watch(listener) else { return inet.forget(connection) };
        // One queue pair for each that is half open; the window of those beyond stays closed, since what they
        // sent would be dropped. That of a program which is to decide, too: nothing is idle there.
        if let Some(Path::Tcp(path)) =
            watch.idle.get(before).and_then(|&id| qps.get(id)).map(|qp| &qp.path)
        {
            let room = path.receives.room(receiving::MOST_ROOM);
            inet.stack.set_receive_space(connection, room);
        }
    }
}
