//! Active Messages over datagrams: each process has one UD queue pair. The network loses, doubles and
//! reorders what it sends; [`quipu_am::datagram`] makes connections of it.

use std::collections::{BTreeMap, VecDeque};
use std::net::{IpAddr, Ipv4Addr};

use quipu_am::datagram::{DatagramFabric, Limits, Memory as Registered, OVERHEAD, Place};
use quipu_am::memory_lanes::MemoryLanes;
use quipu_am::{Local, Remote};
use quipu_nic::{
    AddressVector, AhId, Completion, Gid, Payload, QpAttr, QpAttrMask as M, QpCap, QpId, QpInit,
    QpNum, QpState, QpType, SendFlags, SendOp, SendWr, To, WcStatus,
};

use super::fabric::{BUFFERS, MEMORY, Memory, Posts, SLOT, SimFabric};
use super::network::RECEIVE;
use super::{GIVE_UP_NS, Programs};
use crate::world::World;

/// Bytes of a datagram: a medium message is several.
const DATAGRAM: usize = OVERHEAD + 136;
/// Bytes of the route header before a datagram that has come.
const ROUTE_HEADER: usize = 40;
const ROOM: usize = ROUTE_HEADER + DATAGRAM;
/// Datagrams that may come between two polls, and that the adapter may have at once.
const RECEIVES: u32 = 96;
const SENDS: u32 = 32;
const QKEY: u32 = 0x11;
/// The datagrams' memory follows that of all processes.
const SENDS_AT: usize = MEMORY + RECEIVES as usize * ROOM;
/// Memory of a process that sends datagrams.
pub(super) const DATAGRAM_MEMORY: usize = SENDS_AT + SENDS as usize * DATAGRAM;

/// The UD queue pair of a process.
#[derive(Debug)]
pub(super) struct Ud {
    qp: QpId,
    destinations: BTreeMap<IpAddr, AhId>,
    free: Vec<u32>,
}

impl Memory {
    fn place(&self, (addr, len, key): (u64, u64, u32), offset: u64, n: usize) -> Option<usize> {
        let end = offset.checked_add(n as u64).filter(|end| *end <= len)?;
        let at = addr.checked_sub(self.addr)?;
        let fits = at.checked_add(end)? <= MEMORY as u64 && key == self.key;
        fits.then_some((at + offset) as usize)
    }
}

impl Registered for Memory {
    fn read(&self, from: Local, offset: u64, out: &mut [u8]) -> bool {
        let at = self.place((from.addr, from.len, from.key), offset, out.len());
        at.is_some_and(|at| self.segment.read(at, out).is_ok())
    }

    fn read_shown(&self, from: Remote, offset: u64, out: &mut [u8]) -> bool {
        let at = self.place((from.addr, from.len, from.key), offset, out.len());
        at.is_some_and(|at| self.segment.read(at, out).is_ok())
    }

    fn write(&mut self, to: Local, offset: u64, bytes: &[u8]) -> bool {
        let at = self.place((to.addr, to.len, to.key), offset, bytes.len());
        at.is_some_and(|at| self.segment.write(at, bytes).is_ok())
    }

    fn write_shown(&mut self, to: Remote, offset: u64, bytes: &[u8]) -> bool {
        let at = self.place((to.addr, to.len, to.key), offset, bytes.len());
        at.is_some_and(|at| self.segment.write(at, bytes).is_ok())
    }
}

/// What a process sends its messages with.
pub(super) fn fabric(memory: Memory, over_datagrams: bool, seed: u64) -> SimFabric {
    if !over_datagrams {
        return SimFabric::Posts(Box::new(Posts {
            list: VecDeque::new(),
            memory,
            provided: 0,
            lanes: MemoryLanes::default(),
            has_lanes: false,
        }));
    }
    let limits = Limits {
        datagram: DATAGRAM,
        slot: SLOT,
        send_buffers: BUFFERS,
        messages: 1024,
        reads: 4,
        give_up_ns: GIVE_UP_NS,
        seed,
    };
    SimFabric::Datagrams(Box::new(DatagramFabric::new(memory, limits)))
}

/// Who has sent a datagram, by its route header.
fn source_of(header: &[u8]) -> Option<IpAddr> {
    let v4: [u8; 4] = *header.get(32..)?.first_chunk()?;
    let v6: [u8; 16] = *header.get(8..)?.first_chunk()?;
    Some(if header[0] >> 4 == 6 { IpAddr::from(v6) } else { IpAddr::V4(Ipv4Addr::from(v4)) })
}

impl Programs {
    /// Gives a process its queue pair.
    pub(super) fn make_datagrams(&mut self, world: &mut World, n: usize) {
        let node = &mut self.nodes[n];
        let cap = QpCap {
            max_send_wr: SENDS,
            max_recv_wr: RECEIVES,
            max_send_sge: 1,
            max_recv_sge: 1,
            max_inline_data: 0,
        };
        let init = QpInit {
            pd: node.pd,
            send_cq: node.cq,
            recv_cq: node.cq,
            srq: None,
            cap,
            qp_type: QpType::Ud,
            sq_sig_all: true,
        };
        let num = QpNum::new(world.hosts[node.host].address.port(), 0);
        let qp = match world.hosts[node.host].adapter.create_qp(&init, num) {
            Ok((qp, _)) => qp,
            Err(fault) => return world.violate(|| format!("process {n}: no queue pair: {fault}")),
        };
        node.ud = Some(Ud { qp, destinations: BTreeMap::new(), free: (0..SENDS).collect() });
        let basics = M::PKEY_INDEX | M::PORT | M::QKEY;
        for (state, mask) in
            [(QpState::Init, basics), (QpState::Rtr, M::empty()), (QpState::Rts, M::SQ_PSN)]
        {
            let attr = QpAttr { state, qkey: QKEY, port_num: 1, path_mtu: 3, ..QpAttr::default() };
            let (host, now) = (self.nodes[n].host, world.time());
            world.wake(host);
            let done = world.hosts[host].adapter.modify_qp(now, qp, &attr, mask | M::STATE);
            world.serve(host);
            if let Err(fault) = done {
                return world.violate(|| format!("process {n}: {state:?} is refused: {fault}"));
            }
        }
        (0..RECEIVES).for_each(|slot| self.post_datagram_receive(world, n, slot));
    }

    fn post_datagram_receive(&self, world: &mut World, n: usize, slot: u32) {
        let node = &self.nodes[n];
        let Some(ud) = &node.ud else { return };
        let (host, qp, now) = (node.host, ud.qp, world.time());
        let sge = node.core.fabric().memory().sge(MEMORY + slot as usize * ROOM, ROOM);
        let number = RECEIVE | u64::from(slot);
        if let Err(fault) = world.hosts[host].adapter.post_recv(now, qp, number, &[sge]) {
            world.violate(|| format!("process {n}: a receive is refused: {fault}"));
        }
    }

    /// Sends the datagrams that a process has to send, as far as there is room.
    pub(super) fn send_datagrams(&mut self, world: &mut World, n: usize) {
        let now = world.kernel.now();
        let mut out = [0; DATAGRAM];
        loop {
            let node = &mut self.nodes[n];
            let (Some(ud), SimFabric::Datagrams(reliable)) = (&mut node.ud, node.core.fabric_mut())
            else {
                return;
            };
            let Some(slot) = ud.free.pop() else { return };
            let Some((to, len)) = reliable.poll_transmit(now, &mut out) else {
                ud.free.push(slot);
                return;
            };
            let at = SENDS_AT + slot as usize * DATAGRAM;
            reliable.memory().write(at, &out[..len]);
            let list = [reliable.memory().sge(at, len)];
            let (host, qp) = (node.host, ud.qp);
            let Some(ah) = self.destination(world, n, to.ip) else { return };
            let to = To::Datagram { ah, qpn: to.number, qkey: QKEY };
            let (op, flags, payload) = (SendOp::Send, SendFlags::SIGNALED, Payload::Sges(&list));
            let wr = SendWr { wr_id: slot.into(), to, op, flags, payload };
            self.tally.ops += 1;
            self.tally.bytes += len as u64;
            match world.hosts[host].adapter.post_send(qp, &wr) {
                Ok(()) => {
                    let now = world.time();
                    world.hosts[host].adapter.ring_doorbell(now, qp);
                }
                Err(fault) => {
                    return world.violate(|| format!("process {n}: a send is refused: {fault}"));
                }
            }
        }
    }

    fn destination(&mut self, world: &mut World, n: usize, ip: IpAddr) -> Option<AhId> {
        let (host, pd) = (self.nodes[n].host, self.nodes[n].pd);
        let known = &mut self.nodes[n].ud.as_mut()?.destinations;
        if let Some(ah) = known.get(&ip) {
            return Some(*ah);
        }
        let dgid = Gid::from(ip);
        let default = AddressVector::default();
        let av = AddressVector { dgid, is_global: true, port_num: 1, hop_limit: 64, ..default };
        match world.hosts[host].adapter.create_ah(pd, &av) {
            Ok(ah) => {
                known.insert(ip, ah);
                Some(ah)
            }
            Err(fault) => {
                world.violate(|| format!("process {n}: no address handle: {fault}"));
                None
            }
        }
    }

    /// A datagram was sent, or one has come.
    pub(super) fn datagram_done(&mut self, world: &mut World, n: usize, done: &Completion) {
        let slot = done.wr_id as u32;
        if done.status != WcStatus::Success {
            return world.violate(|| format!("process {n}: a datagram fails: {:?}", done.status));
        }
        let now = world.kernel.now();
        let node = &mut self.nodes[n];
        if done.wr_id & RECEIVE == 0 {
            return node.ud.iter_mut().for_each(|ud| ud.free.push(slot));
        }
        let SimFabric::Datagrams(reliable) = node.core.fabric_mut() else { return };
        let len = (done.byte_len as usize).min(ROOM);
        let bytes = reliable.memory().read(MEMORY + slot as usize * ROOM, len);
        if let (Some(ip), Some(datagram)) = (source_of(&bytes), bytes.get(ROUTE_HEADER..)) {
            let from = Place { ip, number: done.src_qp.0 };
            reliable.handle_datagram(now, from, datagram);
        }
        self.post_datagram_receive(world, n, slot);
    }

    /// Brings a process the time, and its engine what has come of that.
    pub(super) fn take_datagram_events(&mut self, world: &mut World, n: usize) {
        let now = world.kernel.now();
        let SimFabric::Datagrams(reliable) = self.nodes[n].core.fabric_mut() else { return };
        reliable.handle_timeout(now);
        if reliable.poll_timeout().is_some_and(|at| at <= now) {
            return world.violate(|| format!("process {n}: a deadline in the past"));
        }
        while let SimFabric::Datagrams(reliable) = self.nodes[n].core.fabric_mut()
            && let Some(event) = reliable.poll_event()
        {
            self.event(world, n, event);
        }
    }
}
