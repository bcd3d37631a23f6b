//! Active Messages over datagrams: one UD queue pair of the adapter carries what the reliability of
//! [`quipu_am::datagram`] sends.

use std::collections::HashMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::time::{Duration, Instant};

use quipu_am::datagram::{DatagramFabric, Limits, Memory, Place};
use quipu_am::{Event, Local, Remote};
use quipu_host::nic::{Access, Completion, Gid, Key, QpNum, WcStatus};

use super::sizes::Sizes;
use crate::cq::CompletionQueue;
use crate::datagram::{DatagramAddress, DatagramQueuePair, Destination, ROUTE_HEADER};
use crate::device::{Device, ProtectionDomain};
use crate::error::Error;
use crate::memory::MemoryRegion;
use crate::request::Request;

/// The Q_Key of all ports. It is no secret: numbers of connections are.
const QKEY: u32 = 0x0041_4d02;
/// Datagrams that may come between two polls, beyond which they are lost and sent again.
const RECEIVES: u32 = 512;
/// Datagrams that the adapter may have to send at once.
const SENDS: u32 = 128;
/// Marks the number of a receive.
const RECEIVE: u64 = 1 << 63;
/// Address handles that are kept.
const MOST_DESTINATIONS: usize = 4096;
/// Reads of a peer that may wait to be answered.
const READS: usize = 256;

/// Registered memory of the port's domain.
#[derive(Debug)]
pub(super) struct Registered(ProtectionDomain);

impl Registered {
    fn read_by(&self, key: u32, at: Option<u64>, is_peer: bool, out: &mut [u8]) -> bool {
        let engine = &self.0.device().opened.engine;
        let pd = self.0.inner.id;
        at.is_some_and(|at| engine.read_region(pd, (Key(key), at), is_peer, out).is_ok())
    }

    fn write_by(&self, key: u32, at: Option<u64>, is_peer: bool, bytes: &[u8]) -> bool {
        let engine = &self.0.device().opened.engine;
        let pd = self.0.inner.id;
        at.is_some_and(|at| engine.write_region(pd, (Key(key), at), is_peer, bytes).is_ok())
    }
}

impl Memory for Registered {
    fn read(&self, from: Local, offset: u64, out: &mut [u8]) -> bool {
        self.read_by(from.key, from.addr.checked_add(offset), false, out)
    }

    fn read_shown(&self, from: Remote, offset: u64, out: &mut [u8]) -> bool {
        self.read_by(from.key, from.addr.checked_add(offset), true, out)
    }

    fn write(&mut self, to: Local, offset: u64, bytes: &[u8]) -> bool {
        self.write_by(to.key, to.addr.checked_add(offset), false, bytes)
    }

    fn write_shown(&mut self, to: Remote, offset: u64, bytes: &[u8]) -> bool {
        self.write_by(to.key, to.addr.checked_add(offset), true, bytes)
    }
}

/// The queue pair, its memory, and the reliability.
#[derive(Debug)]
pub(super) struct Datagrams {
    pub(super) reliable: DatagramFabric<Registered>,
    domain: ProtectionDomain,
    /// Completions of receives, and of sends.
    cq: CompletionQueue,
    send_cq: CompletionQueue,
    qp: DatagramQueuePair,
    receives: MemoryRegion,
    sends: MemoryRegion,
    /// Places of the send memory that are free.
    free: Vec<u32>,
    destinations: HashMap<Place, Destination>,
    began: Instant,
    /// A datagram that comes in or goes out.
    scratch: Vec<u8>,
    /// Bytes of a datagram.
    datagram: usize,
}

impl Datagrams {
    pub(super) fn new(device: &Device, sizes: Sizes, give_up_ns: u64) -> Result<Self, Error> {
        let domain = device.protection_domain()?;
        let (cq, send_cq) =
            (device.completion_queue(2 * RECEIVES)?, device.completion_queue(2 * SENDS)?);
        let pairs = domain.queue_pair(&send_cq, &cq);
        let qp = pairs.send_queue(SENDS, 1).recv_queue(RECEIVES, 1).build_datagram(QKEY)?;
        let datagram = qp.max_message()?;
        let room = ROUTE_HEADER + datagram;
        let receives = domain.register(room * RECEIVES as usize, Access::LOCAL_WRITE)?;
        let sends = domain.register(datagram * SENDS as usize, Access::LOCAL_WRITE)?;
        for slot in 0..RECEIVES {
            let place = receives.sge(slot as usize * room, room)?;
            qp.post_recv(RECEIVE | u64::from(slot), &[place])?;
        }
        let limits = Limits {
            datagram,
            slot: sizes.slot,
            send_buffers: sizes.send_buffers,
            messages: 4 * sizes.sends as usize,
            reads: READS,
            give_up_ns,
            seed: super::port::random(),
        };
        Ok(Self {
            reliable: DatagramFabric::new(Registered(domain.clone()), limits),
            domain,
            cq,
            send_cq,
            qp,
            receives,
            sends,
            free: (0..SENDS).collect(),
            destinations: HashMap::new(),
            began: Instant::now(),
            scratch: vec![0; room],
            datagram,
        })
    }

    /// The address of the port, and the index of the queue pair there.
    pub(super) fn address(&self) -> (SocketAddr, u8) {
        let number = self.qp.address().qp_num.0;
        let at = SocketAddr::new(self.domain.device().address(), (number >> 8) as u16);
        (at, number as u8)
    }

    pub(super) fn domain(&self) -> &ProtectionDomain {
        &self.domain
    }

    pub(super) fn queue(&self) -> &CompletionQueue {
        &self.cq
    }

    pub(super) fn send_queue(&self) -> &CompletionQueue {
        &self.send_cq
    }

    /// Whether places for sends are short.
    pub(super) fn awaits_sends(&self) -> bool {
        self.free.len() < SENDS as usize / 2
    }

    fn now(&self) -> u64 {
        self.began.elapsed().as_nanos() as u64
    }

    /// What a completion means to the engine: the first of possibly several events.
    pub(super) fn event_of(&mut self, completion: &Completion) -> Option<Event> {
        let slot = completion.wr_id as u32;
        if completion.wr_id & RECEIVE == 0 {
            self.free.push(slot);
        } else {
            self.receive(slot, completion);
        }
        self.reliable.poll_event()
    }

    fn receive(&mut self, slot: u32, completion: &Completion) {
        let room = ROUTE_HEADER + self.datagram;
        let at = slot as usize * room;
        let len = (completion.byte_len as usize).min(room);
        let is_read = completion.status == WcStatus::Success
            && self.receives.read(at, &mut self.scratch[..len]).is_ok();
        if let Ok(place) = self.receives.sge(at, room) {
            // A queue pair that fails takes no more receives, and its port hears of nobody again.
            let _ = self.qp.post_recv(RECEIVE | u64::from(slot), &[place]);
        }
        if !is_read {
            return;
        }
        let now = self.now();
        if let Some((ip, bytes)) = source_of(&self.scratch[..len]) {
            let from = Place { ip, number: completion.src_qp.0 };
            self.reliable.handle_datagram(now, from, bytes);
        }
    }

    /// Sends what is to be sent, as far as there is room.
    pub(super) fn flush(&mut self) {
        let now = self.now();
        while let Some(slot) = self.free.pop() {
            let Some((to, len)) = self.reliable.poll_transmit(now, &mut self.scratch) else {
                self.free.push(slot);
                return;
            };
            if self.post(slot, to, len).is_none() {
                // The datagram is lost, as in a network.
                self.free.push(slot);
            }
        }
    }

    fn post(&mut self, slot: u32, to: Place, len: usize) -> Option<()> {
        let at = slot as usize * self.datagram;
        self.sends.write(at, &self.scratch[..len]).ok()?;
        let place = self.sends.sge(at, len).ok()?;
        if !self.destinations.contains_key(&to) {
            if self.destinations.len() >= MOST_DESTINATIONS {
                self.destinations.clear();
            }
            let address =
                DatagramAddress { gid: Gid::from(to.ip), qp_num: QpNum(to.number), qkey: QKEY };
            self.destinations.insert(to, self.domain.destination(&address).ok()?);
        }
        let destination = self.destinations.get(&to)?;
        self.qp.send_to(&Request::send(&[place]).id(slot.into()), destination).ok()
    }

    /// Handles the time.
    pub(super) fn handle_time(&mut self) {
        let now = self.now();
        self.reliable.handle_timeout(now);
        self.flush();
    }

    /// How long nothing has to be done if nothing comes.
    pub(super) fn idle_time(&self) -> Option<Duration> {
        let at = self.reliable.poll_timeout()?;
        Some(Duration::from_nanos(at.saturating_sub(self.now())))
    }

    /// The address of a byte of a receive slot.
    pub(super) fn address_of(&self, slot: u32, at: u32) -> u64 {
        self.reliable.slot(slot, at as usize).as_ptr().addr() as u64
    }
}

/// Who has sent a datagram, by the route header in front of it, and the datagram.
fn source_of(bytes: &[u8]) -> Option<(IpAddr, &[u8])> {
    let (header, datagram) = bytes.split_first_chunk::<ROUTE_HEADER>()?;
    let ip = if header[0] >> 4 == 6 {
        let source: [u8; 16] = *header[8..].first_chunk()?;
        IpAddr::V6(Ipv6Addr::from(source))
    } else {
        let source: [u8; 4] = *header[32..].first_chunk()?;
        IpAddr::V4(Ipv4Addr::from(source))
    };
    Some((ip, datagram))
}
