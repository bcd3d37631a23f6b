//! What programs are told of their connections.

use quipu_nic::inet::tcp::Failure;
use quipu_nic::{AsyncEvent, Event, TcpChange};

use super::Programs;
use super::model::{End, Opening, Stage};
use super::ports::Port;
use crate::world::World;

impl Programs {
    /// Takes the events of all hosts.
    pub(super) fn take_events(&mut self, world: &mut World) {
        for host in 0..world.hosts.len() {
            while let Some(event) = world.hosts[host].events.pop_front() {
                self.event(world, host, event);
            }
        }
    }

    fn event(&mut self, world: &mut World, host: usize, event: Event) {
        world.trace.line(world.kernel.now(), || format!("host {host}: {event:?}"));
        match event {
            Event::Tcp { qp, change } => {
                let now =
                    |end: &End| end.stage != Stage::Unborn && (end.host, end.qp) == (host, qp);
                let found = self.ends.iter().rposition(now);
                let Some(e) = found else {
                    return world.violate(|| format!("host {host}: {change:?} of nobody"));
                };
                world.trace.note(&[63, e as u64]);
                if change == TcpChange::Connected {
                    self.mate(world, e);
                }
                if let Err(what) = self.changed(world, e, change) {
                    world.violate(|| format!("end {e}: {change:?}: {what}"));
                }
            }
            Event::TcpRequest { listener, connection, flow } => {
                let here = |port: &Port| (port.host, port.listener) == (host, listener);
                let Some(port) = self.ports.iter().position(here) else {
                    return world.violate(|| format!("host {host}: a request to nobody"));
                };
                let requests = &mut self.ports[port].requests;
                if flow.is_some() {
                    requests.push_back(connection);
                    self.decide_later(world, port);
                } else {
                    requests.retain(|&request| request != connection);
                }
            }
            Event::Async(AsyncEvent::CqErr(_)) => {
                world.violate(|| format!("host {host}: a completion queue overran"));
            }
            Event::Async(_)
            | Event::Completion { .. }
            | Event::Stream { .. }
            | Event::TcpStream { .. } => {}
        }
    }

    /// Something happened to the connection of an end.
    fn changed(&mut self, world: &mut World, e: usize, change: TcpChange) -> Result<(), String> {
        let unborn = self.waits_for_unborn(e);
        let end = &mut self.ends[e];
        if let Some(over) = end.over {
            return Err(format!("it is over already: {over:?}"));
        }
        match change {
            TcpChange::Connected if end.stage == Stage::Opening => {
                end.stage = Stage::Up;
                end.idle = 0;
                Ok(())
            }
            TcpChange::PeerClosed if end.stage == Stage::Up && !end.peer_closed => {
                end.peer_closed = true;
                let peer = &self.ends[self.ends[e].peer];
                let closes = peer.closed || !peer.causes.is_empty();
                closes.then_some(()).ok_or("the peer has not closed".into())
            }
            TcpChange::Failed(Failure::Refused | Failure::Declined)
                if end.stage == Stage::Opening =>
            {
                end.stage = Stage::Idle;
                let peer = end.peer;
                let decides = matches!(self.ends[peer].opening, Opening::Decides { .. });
                let harmed = self.is_harmed(world, e) && world.counters.corrupted > 0;
                if !decides && self.ends[e].causes.is_empty() && !harmed {
                    return Err("nobody has refused it".into());
                }
                let there = &self.ends[peer];
                if there.over.is_none() && (there.exists || there.stage == Stage::Unborn) {
                    self.open_later(world, e);
                }
                Ok(())
            }
            TcpChange::Failed(Failure::Unreachable) if end.stage == Stage::Opening => {
                let there = self.ends[self.ends[e].peer].host;
                let silent = !world.hosts[there].alive;
                if !silent && !self.is_harmed(world, e) {
                    return Err("its neighbour was there".into());
                }
                self.cause(e, "what was asked of its neighbour, or said, was lost three times");
                self.over(e, change);
                Ok(())
            }
            TcpChange::Failed(Failure::TimedOut) if unborn => {
                self.cause(e, "its peer is busy with another");
                self.over(e, change);
                Ok(())
            }
            TcpChange::Closed if end.closed && end.peer_closed => {
                self.over(e, change);
                Ok(())
            }
            TcpChange::Failed(_) | TcpChange::Aborted => {
                self.over(e, change);
                let caused = !self.ends[e].causes.is_empty() || self.teardown;
                caused.then_some(()).ok_or("without a cause".into())
            }
            _ => Err(format!("it is {:?}, closed: {}", end.stage, end.closed)),
        }
    }

    /// Whether something was lost or damaged that an end, or its peer, has sent or was to get.
    fn is_harmed(&self, world: &World, e: usize) -> bool {
        let hosts = [e, self.ends[e].peer].map(|end| self.ends[end].host);
        hosts.iter().any(|host| world.frames.harmed.contains(host))
    }

    fn over(&mut self, e: usize, change: TcpChange) {
        self.ends[e].over = Some(change);
        self.ends[e].stage = Stage::Over;
    }
}
