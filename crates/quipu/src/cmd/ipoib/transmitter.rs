//! The send side of the interface's queue pair: registered memory, and destinations.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use quipu::{
    Access, Completion, CompletionQueue, DatagramAddress, DatagramQueuePair, Destination, Error,
    Fault, Gid, MemoryRegion, ProtectionDomain, QpNum, Request,
};
use quipu_ipoib::Destination as To;

/// Datagrams that are under way at once.
pub(super) const SENDS: u32 = 128;
/// Destinations that are kept. Beyond that all are made again.
const DESTINATIONS: usize = 2048;
/// A thread that waits for room looks again after so long, whatever happens.
const PATIENCE: Duration = Duration::from_millis(100);

/// Datagrams out of memory that this has registered.
pub(super) struct Transmitter {
    pd: ProtectionDomain,
    cq: CompletionQueue,
    memory: MemoryRegion,
    slot: usize,
    sl: u8,
    qkey: u32,
    state: Mutex<State>,
}

struct State {
    free: Vec<u32>,
    destinations: HashMap<To, Destination>,
}

impl Transmitter {
    /// For datagrams of at most `longest` bytes, of a service level and a Q_Key.
    pub(super) fn new(
        pd: &ProtectionDomain,
        cq: CompletionQueue,
        longest: usize,
        (sl, qkey): (u8, u32),
    ) -> Result<Self, Error> {
        let slot = longest.next_multiple_of(64);
        let memory = pd.register(slot * SENDS as usize, Access::LOCAL_WRITE)?;
        let state = State { free: (0..SENDS).collect(), destinations: HashMap::new() };
        Ok(Self { pd: pd.clone(), cq, memory, slot, sl, qkey, state: Mutex::new(state) })
    }

    /// Sends a datagram, if there is room now; whether there was.
    pub(super) fn try_send(
        &self,
        qp: &DatagramQueuePair,
        to: To,
        bytes: &[u8],
    ) -> Result<bool, Error> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if state.free.is_empty() {
            let mut done = [Completion::default(); 32];
            let count = self.cq.poll(&mut done)?;
            state.free.extend(done[..count].iter().map(|it| it.wr_id as u32));
        }
        let Some(place) = state.free.pop() else { return Ok(false) };
        let sent = self.post(qp, &mut state, to, bytes, place);
        if sent.is_err() {
            state.free.push(place);
        }
        sent.map(|()| true)
    }

    fn post(
        &self,
        qp: &DatagramQueuePair,
        state: &mut State,
        to: To,
        bytes: &[u8],
        place: u32,
    ) -> Result<(), Error> {
        let at = place as usize * self.slot;
        self.memory.write(at, bytes)?;
        let memory = [self.memory.sge(at, bytes.len())?];
        if !state.destinations.contains_key(&to) {
            if state.destinations.len() >= DESTINATIONS {
                state.destinations.clear();
            }
            state.destinations.insert(to, self.destination(to)?);
        }
        qp.send_to(&Request::send(&memory).id(place.into()), &state.destinations[&to])
    }

    fn destination(&self, to: To) -> Result<Destination, Error> {
        match to {
            To::Unicast(link) => {
                let (gid, qp_num) = (Gid(link.gid), QpNum(link.qpn));
                let address = DatagramAddress { gid, qp_num, qkey: self.qkey };
                self.pd.destination_at_level(&address, self.sl)
            }
            To::Group(gid) => {
                let group = std::net::Ipv6Addr::from(gid).into();
                self.pd.group_at_level(group, self.qkey, self.sl)
            }
            To::Connection(_) => Err(Fault::Invalid("no datagram goes over a connection").into()),
        }
    }

    /// As [`Self::try_send`], but waits for room.
    pub(super) fn send(&self, qp: &DatagramQueuePair, to: To, bytes: &[u8]) -> Result<(), Error> {
        while !self.try_send(qp, to, bytes)? {
            let mut done = [Completion::default(); 32];
            let count = self.cq.wait_timeout(&mut done, PATIENCE)?;
            let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
            state.free.extend(done[..count].iter().map(|it| it.wr_id as u32));
        }
        Ok(())
    }
}
