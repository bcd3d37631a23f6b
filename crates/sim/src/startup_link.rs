//! Streams of plain iWARP over the adapter's own TCP, from their beginning: what connection management
//! does on a packet link. It opens a stream or takes one, goes through the start-up of MPA, and gives
//! the stream to a queue pair. From then on the adapter, the network of frames and the programs are
//! alone with each other.

use std::net::SocketAddr;

use quipu_nic::inet::stack::{ListenerId, TcpId};
use quipu_nic::iwarp::Params;
use quipu_nic::iwarp::setup::{Initiator, Responder};
use quipu_nic::iwarp::wire::mpa::Enhanced;
use quipu_nic::{Adoption, Event, QpId, TcpSettings, TcpStreamChange};

use crate::frames::addresses;
use crate::startup::{Machine, PATIENCE_NS, Startup};
use crate::world::{World, WorldEvent};

/// A stream whose start-up is not over.
pub(crate) struct LinkStart {
    hosts: [usize; 2],
    listener: Option<ListenerId>,
    sides: [Side; 2],
}

#[derive(Default)]
struct Side {
    startup: Option<Startup>,
    connection: Option<TcpId>,
    /// What has come and was not used.
    heard: Vec<u8>,
}

impl World {
    /// Opens a stream over the packet link from the first queue pair to the second.
    pub(crate) fn connect_over_link(&mut self, ends: [(usize, QpId); 2], params: [Params; 2]) {
        let Ok(initiator) = Initiator::new(params[0], b"hello") else {
            return self.violate(|| format!("{:?} is refused", params[0]));
        };
        self.counters.streams += 1;
        let now = self.time();
        let [from, to] = ends.map(|(host, _)| host);
        let settings = TcpSettings::default();
        let far = &mut self.hosts[to].adapter;
        let Ok((listener, port)) = far.stream_listen(0, &settings, 16) else {
            return self.violate(|| "no port is free".into());
        };
        let family = self.rng.index(2);
        let at = SocketAddr::new(addresses(to)[family], port);
        let any = SocketAddr::new(addresses(from)[family], 0);
        let near = self.hosts[from].adapter.stream_connect(now, any, at, &settings);
        let machines = [Machine::Initiator(initiator), Machine::Responder(Responder::new())];
        let mut sides = [Side::default(), Side::default()];
        for (side, machine) in machines.into_iter().enumerate() {
            let (params, qp) = (params[side], ends[side].1);
            sides[side].startup = Some(Startup { machine, params, qp });
        }
        match near {
            Ok(connection) => sides[0].connection = Some(connection),
            Err(fault) => return self.violate(|| format!("no stream to {at}: {fault}")),
        }
        let link = self.starts.len();
        self.starts.push(LinkStart { hosts: [from, to], listener: Some(listener), sides });
        for side in 0..2 {
            self.kernel.after(PATIENCE_NS, WorldEvent::LinkLate { link, side });
        }
        self.serve(from);
    }

    /// Handles an event of connection management; whether it was one.
    pub(crate) fn link_event(&mut self, h: usize, event: &Event) -> bool {
        match event {
            Event::TcpRequest { listener, connection, flow } => {
                let is_it = |it: &LinkStart| it.hosts[1] == h && it.listener == Some(*listener);
                let link = self.starts.iter().position(is_it);
                match (link, flow) {
                    (Some(link), Some(_)) => self.take_request(link, *connection),
                    // It is gone again, or its listener is.
                    _ => {
                        let now = self.time();
                        let _ = self.hosts[h].adapter.tcp_refuse(now, *connection);
                    }
                }
                true
            }
            Event::TcpStream { connection, change } => {
                let found = self.starts.iter().enumerate().find_map(|(link, it)| {
                    let is_it = |side: &usize| {
                        it.hosts[*side] == h && it.sides[*side].connection == Some(*connection)
                    };
                    Some((link, (0..2).find(is_it)?))
                });
                match (found, change) {
                    (Some((link, 0)), TcpStreamChange::Connected) => self.speak(link, 0),
                    (Some((link, side)), TcpStreamChange::Readable) => self.hear_link(link, side),
                    (Some((link, side)), TcpStreamChange::Lost(_)) => self.fail_link(link, side),
                    _ => {}
                }
                true
            }
            _ => false,
        }
    }

    fn take_request(&mut self, link: usize, connection: TcpId) {
        let (h, now) = (self.starts[link].hosts[1], self.time());
        let adapter = &mut self.hosts[h].adapter;
        if self.starts[link].sides[1].startup.is_none() {
            let _ = adapter.tcp_refuse(now, connection);
        } else if adapter.stream_accept(now, connection).is_ok() {
            self.starts[link].sides[1].connection = Some(connection);
            self.stop_listening(link);
        }
        self.serve(h);
    }

    fn stop_listening(&mut self, link: usize) {
        let h = self.starts[link].hosts[1];
        if let Some(listener) = self.starts[link].listener.take()
            && self.hosts[h].alive
        {
            self.hosts[h].adapter.tcp_unlisten(listener);
        }
    }

    /// Sends what the start-up has to say.
    fn speak(&mut self, link: usize, side: usize) {
        let (h, now) = (self.starts[link].hosts[side], self.time());
        let end = &mut self.starts[link].sides[side];
        let (Some(startup), Some(connection)) = (&mut end.startup, end.connection) else { return };
        let bytes = startup.transmit();
        self.trace.note_bytes(&bytes);
        // A stream that is gone says so by an event.
        let _ = self.hosts[h].adapter.stream_send(now, connection, &bytes);
        self.serve(h);
    }

    /// Bytes have come for a start-up.
    fn hear_link(&mut self, link: usize, side: usize) {
        let (h, now) = (self.starts[link].hosts[side], self.time());
        let end = &mut self.starts[link].sides[side];
        let (Some(mut startup), Some(connection)) = (end.startup.take(), end.connection) else {
            return;
        };
        end.heard.extend(self.hosts[h].adapter.stream_receive(now, connection));
        let outcome = startup.handle(&end.heard);
        let qp = startup.qp;
        let Enhanced { ird, ord, .. } = startup.params.enhanced.unwrap_or_default();
        let role = startup.role();
        end.startup = Some(startup);
        let Ok((used, agreed)) = outcome else { return self.fail_link(link, side) };
        end.heard.drain(..used);
        let Some(negotiated) = agreed else { return };
        self.speak(link, side);
        let rest = std::mem::take(&mut self.starts[link].sides[side].heard);
        let adoption = Adoption { role, negotiated, ird, ord, rfc7306: false };
        self.wake(h);
        let adopted = self.hosts[h].adapter.adopt_tcp_stream(now, qp, &adoption, connection, &rest);
        match adopted {
            Ok(conn) => {
                self.trace.note(&[42, h as u64, conn.0]);
                let end = &mut self.starts[link].sides[side];
                (end.startup, end.connection) = (None, None);
                self.serve(h);
            }
            // The program has destroyed the queue pair, or stopped it.
            Err(_) => self.fail_link(link, side),
        }
    }

    /// A start-up has taken too long.
    pub(crate) fn link_late(&mut self, link: usize, side: usize) {
        if self.starts[link].sides[side].startup.is_some() {
            self.fail_link(link, side);
        }
    }

    /// Connection management gives up, and resets its end.
    fn fail_link(&mut self, link: usize, side: usize) {
        let (h, now) = (self.starts[link].hosts[side], self.time());
        if side == 1 {
            self.stop_listening(link);
        }
        let end = &mut self.starts[link].sides[side];
        let (startup, connection) = (end.startup.take(), end.connection.take());
        if !self.hosts[h].alive {
            return;
        }
        if let Some(connection) = connection {
            self.hosts[h].adapter.stream_close(now, connection, true);
        }
        if let Some(startup) = startup {
            self.failed_startups.push((h, startup.qp));
        }
        self.serve(h);
    }

    /// The programs no longer want the connections that are being made.
    pub(crate) fn abort_link_startups(&mut self) {
        for link in 0..self.starts.len() {
            (0..2).for_each(|side| self.link_late(link, side));
        }
    }
}
