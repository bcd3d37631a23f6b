//! The streams of a test, whatever they are made of: connections, or datagrams.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use quipu::{Error, QpNum};

use super::datagrams::Port;
use super::network::{Network, PATIENCE};
use super::words::{Counts, Params};
use crate::cmd::failure::Failure;
use crate::cmd::qpip::failed;

/// How long a client waits for the answer to the first word of a stream until it says it again.
const AGAIN: Duration = Duration::from_secs(1);

/// What a stream is made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Carrier {
    /// A connection.
    Connection(QpNum),
    /// A stream of datagrams of a port.
    Flow(QpNum, usize),
}

impl Network {
    fn port(&mut self, number: QpNum) -> &mut Port {
        self.ports.get_mut(&number).expect("a port stays as long as its test")
    }

    fn bind(&mut self, port: u16, params: &Params) -> Result<QpNum, Failure> {
        let wide = params.udp_counters_64bit != 0;
        let bound = Port::new(&self.pd, &self.cq, port, params.len, wide).map_err(|error| {
            Failure::new(format!("cannot bind UDP port {port}"), error, "choose another")
        })?;
        let number = bound.number();
        self.ports.insert(number, bound);
        Ok(number)
    }

    /// Takes streams of datagrams of the client of a control connection, at the port of the same number.
    pub(super) fn admit(
        &mut self,
        control: QpNum,
        count: usize,
        params: &Params,
    ) -> Result<QpNum, Failure> {
        let flow = self.get(control).flow().map_err(failed)?;
        let Some((local, remote)) = flow else {
            return Err(Failure::new("the test", "the client is gone", ""));
        };
        let number = self.bind(local.port(), params)?;
        self.port(number).admit(remote.ip(), count);
        Ok(number)
    }

    /// How many streams have begun at a port.
    pub(super) fn admitted(&mut self, number: QpNum) -> usize {
        self.port(number).flows()
    }

    /// Begins a stream of datagrams.
    pub(super) fn greet(&mut self, to: SocketAddr, params: &Params) -> Result<Carrier, Failure> {
        let number = self.bind(0, params)?;
        let until = Instant::now() + PATIENCE;
        let mut again = Instant::now();
        while !self.port(number).is_welcome() || self.admitted(number) == 0 {
            let now = Instant::now();
            if now > until {
                let why = "the server does not answer datagrams";
                return Err(Failure::new("the test", why, "check whether a firewall drops UDP"));
            }
            if now >= again {
                self.port(number).greet(to).map_err(failed)?;
                again = now + AGAIN;
            }
            self.turn(Some(again))?;
        }
        Ok(Carrier::Flow(number, 0))
    }

    /// Lets all streams of datagrams go.
    pub(super) fn unbind(&mut self) {
        self.ports.clear();
    }

    /// Octets that were given to a stream.
    pub(super) fn posted(&mut self, carrier: Carrier) -> u64 {
        match carrier {
            Carrier::Connection(number) => self.get(number).posted,
            Carrier::Flow(port, flow) => self.port(port).posted(flow),
        }
    }

    /// What has gone in a direction: of a connection acknowledged, or received.
    pub(super) fn counts(&mut self, carrier: Carrier, sent: bool) -> Counts {
        match carrier {
            Carrier::Connection(number) => self.get(number).counts(sent),
            Carrier::Flow(port, flow) => self.port(port).counts(flow, sent),
        }
    }

    /// Whether another block may be posted now.
    pub(super) fn has_room(&mut self, carrier: Carrier) -> bool {
        match carrier {
            Carrier::Connection(number) => self.get(number).has_room(),
            Carrier::Flow(port, flow) => self.port(port).has_room(flow),
        }
    }

    /// Posts a block.
    ///
    /// # Errors
    /// The connection has ended, or the path does not take a datagram of that length.
    pub(super) fn send_block(&mut self, carrier: Carrier, len: u64) -> Result<(), Error> {
        match carrier {
            Carrier::Connection(number) => self.get(number).send_block(len),
            Carrier::Flow(port, flow) => self.port(port).send_block(flow, len),
        }
    }
}
