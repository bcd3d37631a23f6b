//! Active Messages over datagrams: one UD queue pair of the adapter carries what the reliability of
//! [`quipu_am::datagram`] sends.

use std::collections::HashMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};
use std::os::fd::{AsRawFd, RawFd};
use std::time::{Duration, Instant};

use quipu_am::datagram::{DatagramFabric, LOOKUP_LEN, Limits, Memory, Place, answer_lookup};
use quipu_am::{Event, Local, Name, Remote};
use quipu_host::nic::{Access, Completion, Fault, Gid, Key, QpNum, WcStatus};

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
/// Questions of one socket that are answered at once.
const QUESTIONS: usize = 16;
/// How often sockets of endpoints are looked at, in nanoseconds.
const LOOK_EVERY_NS: u64 = 1_000_000;

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

/// The UDP port of an endpoint: its socket answers which queue pair the endpoint has.
#[derive(Debug)]
struct Door {
    endpoint: u32,
    socket: UdpSocket,
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
    /// Tells this port from others at its address; the lowest byte is the index of the queue pair.
    incarnation: u64,
    doors: Vec<Door>,
    /// The socket that asks doors of other processes, once it is needed.
    asker: Option<UdpSocket>,
    /// When sockets are looked at next.
    look_at: u64,
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
        let index = qp.address().qp_num.0 as u8;
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
            incarnation: super::port::random() << 8 | 1 << 63 | u64::from(index),
            doors: Vec::new(),
            asker: None,
            look_at: 0,
        })
    }

    /// The address of the port, and its incarnation.
    pub(super) fn address(&self) -> (SocketAddr, u64) {
        let number = self.qp.address().qp_num.0;
        let at = SocketAddr::new(self.domain.device().address(), (number >> 8) as u16);
        (at, self.incarnation)
    }

    /// Gives an endpoint a UDP port of its own.
    pub(super) fn listen(&mut self, at: SocketAddr, endpoint: u32) -> Result<SocketAddr, Error> {
        let socket = socket(at).map_err(|_| Fault::Invalid("the UDP port cannot be used"))?;
        let own = socket.local_addr().map_err(|_| Fault::Invalid("the socket has no address"))?;
        self.doors.push(Door { endpoint, socket });
        Ok(own)
    }

    /// Closes the UDP ports of an endpoint that is gone.
    pub(super) fn unlisten(&mut self, endpoint: u32) {
        self.doors.retain(|door| door.endpoint != endpoint);
    }

    /// The sockets of endpoints, and the one that asks others.
    pub(super) fn sockets(&self) -> impl Iterator<Item = RawFd> {
        let doors = self.doors.iter().map(|door| &door.socket);
        doors.chain(&self.asker).map(AsRawFd::as_raw_fd)
    }

    /// Answers questions for endpoints, and reads answers to own ones.
    fn look_at_sockets(&mut self, now: u64) {
        let mut bytes = [0; LOOKUP_LEN + 1];
        let (port, incarnation) = self.address();
        for Door { endpoint, socket } in &self.doors {
            let own = Name { port, endpoint: *endpoint, incarnation };
            for _ in 0..QUESTIONS {
                let Ok((len, from)) = socket.recv_from(&mut bytes) else { break };
                if let Some(answer) = answer_lookup(&bytes[..len], &own) {
                    // An answer that is lost is asked for again.
                    let _ = socket.send_to(&answer, from);
                }
            }
        }
        for _ in 0..QUESTIONS {
            let asker = self.asker.as_ref();
            let Some(Ok((len, from))) = asker.map(|socket| socket.recv_from(&mut bytes)) else {
                break;
            };
            self.reliable.handle_datagram(now, Place::of_socket(from), &bytes[..len]);
        }
    }

    /// Asks the socket at an address which queue pair the endpoint there has.
    fn ask(&mut self, at: SocketAddr, len: usize) {
        let own = SocketAddr::new(self.domain.device().address(), 0);
        if self.asker.is_none() {
            self.asker = socket(own).ok();
        }
        if let Some(asker) = &self.asker {
            // Nobody may be there yet; what is lost is asked again.
            let _ = asker.send_to(&self.scratch[..len], at);
        }
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
            let from = Place { ip, number: completion.src_qp.0 & 0x00ff_ffff };
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
            if let Some(at) = to.socket() {
                self.ask(at, len);
                self.free.push(slot);
            } else if self.post(slot, to, len).is_none() {
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
        if now >= self.look_at {
            self.look_at = now + LOOK_EVERY_NS;
            self.look_at_sockets(now);
        }
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

/// A UDP socket that does not wait.
fn socket(at: SocketAddr) -> std::io::Result<UdpSocket> {
    let socket = UdpSocket::bind(at)?;
    socket.set_nonblocking(true)?;
    Ok(socket)
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
