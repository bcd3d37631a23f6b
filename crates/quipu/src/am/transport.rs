//! What carries Active Messages: reliable queue pairs, or datagrams.

use std::net::SocketAddr;
use std::os::fd::RawFd;
use std::time::Duration;

use quipu_am::{
    ConnId, Event, Fabric, Hello, LaneAddress, Line, Local, Name, Pushed, Remote, Status, Welcome,
};
use quipu_host::nic::{Completion, Fault};

use super::datagrams::Datagrams;
use super::fabric::HostFabric;
use crate::cq::CompletionQueue;
use crate::device::ProtectionDomain;
use crate::error::Error;

/// What a port sends its messages over.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Transport {
    /// A reliable queue pair for each connection: shared memory on one host, TCP between hosts.
    #[default]
    Reliable,
    /// One UD queue pair, which sends UDP datagrams, and acknowledgements of Active Messages' own.
    Datagrams,
}

impl Transport {
    /// What the variable `QUIPU_AM_TRANSPORT` says: `rc` (default) or `udp`.
    ///
    /// # Errors
    ///
    /// It says something else.
    pub fn from_env() -> Result<Self, Error> {
        match std::env::var("QUIPU_AM_TRANSPORT").as_deref().map(str::trim) {
            Err(_) | Ok("" | "rc") => Ok(Self::Reliable),
            Ok("udp") => Ok(Self::Datagrams),
            Ok(_) => Err(Fault::Invalid("QUIPU_AM_TRANSPORT must be rc or udp").into()),
        }
    }
}

/// The fabric of a port.
#[derive(Debug)]
pub(super) enum PortFabric {
    Reliable(Box<HostFabric>),
    Datagrams(Box<Datagrams>),
}

impl PortFabric {
    pub(super) fn domain(&self) -> &ProtectionDomain {
        match self {
            Self::Reliable(host) => host.domain(),
            Self::Datagrams(datagrams) => datagrams.domain(),
        }
    }

    pub(super) fn queue(&self) -> &CompletionQueue {
        match self {
            Self::Reliable(host) => host.queue(),
            Self::Datagrams(datagrams) => datagrams.queue(),
        }
    }

    pub(super) fn send_queue(&self) -> &CompletionQueue {
        match self {
            Self::Reliable(host) => host.send_queue(),
            Self::Datagrams(datagrams) => datagrams.send_queue(),
        }
    }

    /// Whether completions of sends are worth a poll.
    #[inline]
    pub(super) fn awaits_sends(&self) -> bool {
        match self {
            Self::Reliable(host) => host.awaits_sends(),
            Self::Datagrams(datagrams) => datagrams.awaits_sends(),
        }
    }

    /// The completions of sends are about to be polled.
    #[inline]
    pub(super) fn note_poll_of_sends(&mut self) {
        if let Self::Reliable(host) = self {
            host.note_poll_of_sends();
        }
    }

    pub(super) fn end_failed(&mut self) {
        if let Self::Reliable(host) = self {
            host.end_failed();
        }
    }

    /// Readable while connection management has something to say; over datagrams, the sockets of endpoints
    /// at UDP ports of their own.
    pub(super) fn event_fds(&self) -> Vec<RawFd> {
        match self {
            Self::Reliable(host) => vec![host.events_fd()],
            Self::Datagrams(datagrams) => datagrams.sockets().collect(),
        }
    }

    pub(super) fn listen(
        &mut self,
        at: SocketAddr,
        endpoint: Option<u32>,
    ) -> Result<SocketAddr, Error> {
        match self {
            Self::Reliable(host) => host.listen(at, endpoint),
            Self::Datagrams(datagrams) => match endpoint {
                Some(endpoint) => datagrams.listen(at, endpoint),
                None => Err(Fault::Invalid("a port over datagrams has its address already").into()),
            },
        }
    }

    pub(super) fn unlisten(&mut self, endpoint: u32) {
        match self {
            Self::Reliable(host) => host.unlisten(endpoint),
            Self::Datagrams(datagrams) => datagrams.unlisten(endpoint),
        }
    }

    #[inline]
    pub(super) fn event_of(&mut self, completion: &Completion) -> Option<Event> {
        match self {
            Self::Reliable(host) => host.event_of(completion),
            Self::Datagrams(datagrams) => datagrams.event_of(completion),
        }
    }

    #[inline]
    pub(super) fn take_later(&mut self) -> Option<Event> {
        match self {
            Self::Reliable(host) => host.take_later(),
            Self::Datagrams(datagrams) => {
                let event = datagrams.reliable.poll_event();
                if event.is_none() {
                    datagrams.flush();
                }
                event
            }
        }
    }

    /// Whether peers send on lanes.
    pub(super) fn has_lanes(&self) -> bool {
        matches!(self, Self::Reliable(host) if host.lanes.is_any())
    }

    /// Says to the peers of lanes that this end is awake.
    pub(super) fn disarm_lanes(&self) {
        if let Self::Reliable(host) = self {
            host.lanes.disarm();
        }
    }

    pub(super) fn reap(&mut self) {
        if let Self::Reliable(host) = self {
            host.reap();
        }
    }

    pub(super) fn find_failed(&mut self) {
        if let Self::Reliable(host) = self {
            host.find_failed();
        }
    }

    pub(super) fn has_dying(&self) -> bool {
        matches!(self, Self::Reliable(host) if host.has_dying())
    }

    /// Handles the next event of connection management; whether there was one. Over datagrams, the time.
    pub(super) fn pump(&mut self) -> bool {
        match self {
            Self::Reliable(host) => host.pump(),
            Self::Datagrams(datagrams) => {
                datagrams.handle_time();
                false
            }
        }
    }

    /// How long nothing has to be done if nothing comes.
    pub(super) fn idle_time(&self) -> Option<Duration> {
        match self {
            Self::Reliable(_) => None,
            Self::Datagrams(datagrams) => datagrams.idle_time(),
        }
    }

    pub(super) fn address_of(&self, slot: u32, at: u32) -> u64 {
        match self {
            Self::Reliable(host) => host.address_of(slot, at),
            Self::Datagrams(datagrams) => datagrams.address_of(slot, at),
        }
    }
}

/// Calls either fabric. What goes over datagrams is sent at once.
macro_rules! post {
    ($self:ident, $call:ident $arguments:tt) => {
        match $self {
            PortFabric::Reliable(host) => host.$call $arguments,
            PortFabric::Datagrams(datagrams) => {
                let outcome = datagrams.reliable.$call $arguments;
                datagrams.flush();
                outcome
            }
        }
    };
}

impl Fabric for PortFabric {
    fn connect(&mut self, conn: ConnId, to: &Name, hello: &Hello) {
        post!(self, connect(conn, to, hello));
    }

    fn accept(&mut self, incoming: u64, conn: ConnId, welcome: &Welcome) -> bool {
        post!(self, accept(incoming, conn, welcome))
    }

    fn reject(&mut self, incoming: u64, why: Status) {
        post!(self, reject(incoming, why));
    }

    fn close(&mut self, conn: ConnId) {
        post!(self, close(conn));
    }

    #[inline]
    fn send(&mut self, conn: ConnId, bytes: &[u8], notify: Option<u64>) -> bool {
        post!(self, send(conn, bytes, notify))
    }

    fn send_buffer(&mut self, conn: ConnId, buffer: u32, len: usize, notify: u64) -> bool {
        post!(self, send_buffer(conn, buffer, len, notify))
    }

    fn write(&mut self, conn: ConnId, from: Local, to: Remote, notify: Option<u64>) -> bool {
        post!(self, write(conn, from, to, notify))
    }

    #[inline]
    fn write_and_send(
        &mut self,
        conn: ConnId,
        from: Local,
        to: Remote,
        notify: Option<u64>,
        send: (&[u8], Option<u64>),
    ) -> bool {
        post!(self, write_and_send(conn, from, to, notify, send))
    }

    fn read(&mut self, conn: ConnId, into: Local, from: Remote, notify: u64) -> bool {
        post!(self, read(conn, into, from, notify))
    }

    fn probe(&mut self, conn: ConnId, notify: u64) -> bool {
        post!(self, probe(conn, notify))
    }

    fn offer_lane(&mut self, conn: ConnId) -> Option<LaneAddress> {
        post!(self, offer_lane(conn))
    }

    fn open_lane(&mut self, conn: ConnId, to: LaneAddress) -> bool {
        post!(self, open_lane(conn, to))
    }

    fn withdraw_lane(&mut self, conn: ConnId) {
        post!(self, withdraw_lane(conn));
    }

    #[inline(always)]
    fn push_line(&mut self, conn: ConnId, line: &Line) -> Pushed {
        match self {
            Self::Reliable(host) => host.push_line(conn, line),
            Self::Datagrams(_) => Pushed::Closed,
        }
    }

    fn write_now(&mut self, conn: ConnId, from: Local, to: Remote) -> bool {
        match self {
            Self::Reliable(host) => host.write_now(conn, from, to),
            Self::Datagrams(_) => false,
        }
    }

    #[inline(always)]
    fn peek_lanes(&mut self) -> Option<(ConnId, Line)> {
        match self {
            Self::Reliable(host) => host.peek_lanes(),
            Self::Datagrams(_) => None,
        }
    }

    fn rotate_lanes(&mut self) {
        post!(self, rotate_lanes());
    }

    #[inline]
    fn peek_line(&mut self, conn: ConnId) -> Option<Line> {
        match self {
            Self::Reliable(host) => host.peek_line(conn),
            Self::Datagrams(_) => None,
        }
    }

    #[inline(always)]
    fn pop_line(&mut self, conn: ConnId) {
        match self {
            Self::Reliable(host) => host.pop_line(conn),
            Self::Datagrams(_) => {}
        }
    }

    fn arm_lanes(&mut self) -> Vec<ConnId> {
        post!(self, arm_lanes())
    }

    fn take_wake(&mut self, conn: ConnId) -> bool {
        post!(self, take_wake(conn))
    }

    #[inline]
    fn inline_limit(&self) -> usize {
        match self {
            Self::Reliable(host) => host.inline_limit(),
            Self::Datagrams(datagrams) => datagrams.reliable.inline_limit(),
        }
    }

    fn store(&mut self, buffer: u32, at: usize, bytes: &[u8]) {
        match self {
            Self::Reliable(host) => host.store(buffer, at, bytes),
            Self::Datagrams(datagrams) => datagrams.reliable.store(buffer, at, bytes),
        }
    }

    #[inline]
    fn load(&self, slot: u32, at: usize, out: &mut [u8]) {
        match self {
            Self::Reliable(host) => host.load(slot, at, out),
            Self::Datagrams(datagrams) => datagrams.reliable.load(slot, at, out),
        }
    }

    #[inline]
    fn repost(&mut self, slots: &[u32]) {
        match self {
            Self::Reliable(host) => host.repost(slots),
            Self::Datagrams(datagrams) => datagrams.reliable.repost(slots),
        }
    }

    fn provide(&mut self, slots: u32) -> bool {
        match self {
            Self::Reliable(host) => host.provide(slots),
            Self::Datagrams(datagrams) => datagrams.reliable.provide(slots),
        }
    }
}
