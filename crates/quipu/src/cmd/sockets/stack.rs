//! A stream of messages over a queue pair of the adapter's own TCP, for `quipu sockets --measure`: plain
//! iWARP inside of that stack, or nothing but its segments.

use std::collections::VecDeque;
use std::fmt::Display;
use std::io::{self, Read, Write};
use std::net::SocketAddr;
use std::sync::Arc;

use quipu_host::connection::{ChannelKey, Event, EventKind, IdKey, Param, PortSpace};
use quipu_host::nic::mem::Segment;
use quipu_host::nic::{
    Access, ChannelId, Completion, CqId, Payload, QpAttr, QpAttrMask, QpCap, QpId, QpInit, QpState,
    QpType, Region, SendFlags, SendOp, SendWr, Sge, To, WcOpcode, WcStatus,
};
use quipu_host::{Config, Device, Engine, QpipConfig};

/// Bytes of a message at most.
const SLOT: usize = 1 << 16;
/// Messages that are on their way at most, and receives that are posted: more than a window, and the order
/// for the next.
const SLOTS: usize = 80;
/// Polls that find nothing before this end sleeps, as a socket does.
const EMPTY_POLLS: u32 = 64;
/// `IBV_QPT_RC`.
const RC: u8 = 2;

fn failed(error: impl Display) -> io::Error {
    io::Error::other(error.to_string())
}

/// One end.
pub(super) struct Stack {
    engine: Arc<Engine>,
    channel: ChannelKey,
    cq: CqId,
    /// For completions.
    comp_channel: ChannelId,
    empty_polls: u32,
    qp: QpId,
    number: u32,
    memory: Segment,
    region: Region,
    /// Places for messages to be sent that are not on their way.
    free: Vec<usize>,
    /// Messages that were received: the place, what was read of it, its length.
    received: VecDeque<(usize, usize, usize)>,
}

impl Stack {
    /// An end of connections from this device, on a packet link of its own over loopback.
    pub(super) fn new(device: Device) -> io::Result<Self> {
        let link = "udp:127.0.0.1:0".parse().map_err(failed)?;
        let engine = Engine::open(Config {
            address: Some([127, 0, 0, 1].into()),
            devices: Device::ALL.to_vec(),
            cm_device: device,
            qpip: Some(QpipConfig::new(link)),
            ..Config::default()
        })
        .map_err(failed)?;
        let (context, _) = engine.open_context().map_err(failed)?;
        let pd = engine.alloc_pd().map_err(failed)?;
        let (comp_channel, _) = engine.create_channel().map_err(failed)?;
        let entries = 4 * SLOTS as u32;
        let cq = engine.create_cq(context, entries, Some(comp_channel), 0).map_err(failed)?.0;
        let memory = Segment::heap(2 * SLOTS * SLOT);
        let access = Access::LOCAL_WRITE;
        let region = engine.reg_segment(pd, &memory, None, access).map_err(failed)?;
        let (max_send_wr, max_recv_wr) = (2 * SLOTS as u32, 2 * SLOTS as u32);
        let (max_send_sge, max_recv_sge, max_inline_data) = (1, 1, 0);
        let cap = QpCap { max_send_wr, max_recv_wr, max_send_sge, max_recv_sge, max_inline_data };
        let qp_type = if device == Device::QuipuIw0 { QpType::Iwarp } else { QpType::Tcp };
        let init =
            QpInit { pd, send_cq: cq, recv_cq: cq, srq: None, cap, qp_type, sq_sig_all: false };
        let (qp, number, _) = engine.create_qp(context, &init).map_err(failed)?;
        let attr = QpAttr { state: QpState::Init, port_num: 1, ..QpAttr::default() };
        let mask = QpAttrMask::STATE | QpAttrMask::PORT;
        engine.modify_qp(qp, &attr, mask).map_err(failed)?;
        let (channel, _) = engine.cm_create_channel().map_err(failed)?;
        let mut stack = Self {
            engine,
            channel,
            cq,
            comp_channel,
            empty_polls: 0,
            qp,
            number: number.0,
            memory,
            region,
            free: (0..SLOTS).collect(),
            received: VecDeque::new(),
        };
        for slot in 0..SLOTS {
            stack.post_receive(slot)?;
        }
        Ok(stack)
    }

    fn id(&self) -> io::Result<IdKey> {
        self.engine.cm_create_id(self.channel, PortSpace::Tcp, RC, 0).map_err(failed)
    }

    fn expect(&self, kind: EventKind) -> io::Result<Event> {
        let event = self.engine.cm_get_event(self.channel).map_err(failed)?;
        if event.kind == kind { Ok(event) } else { Err(failed(format_args!("{:?}", event.kind))) }
    }

    fn param(&self) -> Param {
        let depth = 1;
        Param {
            responder_resources: depth,
            initiator_depth: depth,
            qpn: self.number,
            ..Param::default()
        }
    }

    /// Listens; where.
    pub(super) fn listen(&self) -> io::Result<SocketAddr> {
        let ip = self.engine.qpip_info().map_err(failed)?.addresses[0];
        let id = self.id()?;
        self.engine.cm_bind_addr(id, SocketAddr::new(ip, 0)).map_err(failed)?;
        self.engine.cm_listen(id, 1).map_err(failed)?;
        let route = self.engine.cm_route(id).map_err(failed)?;
        route.src.ok_or_else(|| failed("the listener has no address"))
    }

    /// Takes the one connection that comes.
    pub(super) fn accept(&self) -> io::Result<()> {
        let request = self.expect(EventKind::ConnectRequest)?;
        self.engine.cm_accept(request.id, Some(&self.param())).map_err(failed)?;
        self.expect(EventKind::Established).map(drop)
    }

    pub(super) fn connect(&self, to: SocketAddr) -> io::Result<()> {
        let id = self.id()?;
        self.engine.cm_resolve_addr(id, None, to).map_err(failed)?;
        self.expect(EventKind::AddrResolved)?;
        self.engine.cm_resolve_route(id).map_err(failed)?;
        self.expect(EventKind::RouteResolved)?;
        self.engine.cm_connect(id, &self.param()).map_err(failed)?;
        self.expect(EventKind::Established).map(drop)
    }

    /// The place of a message, of those to be sent or those received.
    fn sge(&self, sent: bool, slot: usize, len: usize) -> Sge {
        let addr = self.memory.addr() as u64 + place(sent, slot) as u64;
        Sge { addr, len: len as u32, lkey: self.region.key }
    }

    fn post_receive(&mut self, slot: usize) -> io::Result<()> {
        let sge = self.sge(false, slot, SLOT);
        self.engine.post_recv(self.qp, slot as u64, &[sge]).map_err(failed)
    }

    /// Takes completions.
    fn poll(&mut self) -> io::Result<()> {
        let mut done = [Completion::default(); 16];
        let count = self.engine.poll_cq(self.cq, &mut done).map_err(failed)?;
        self.empty_polls = if count == 0 { self.empty_polls + 1 } else { 0 };
        if self.empty_polls > EMPTY_POLLS {
            return self.engine.wait_completion(self.cq, self.comp_channel).map_err(failed);
        }
        for done in &done[..count] {
            if done.status != WcStatus::Success {
                return Err(failed(format_args!("{:?}", done.status)));
            }
            match done.opcode {
                WcOpcode::Recv => {
                    self.received.push_back((done.wr_id as usize, 0, done.byte_len as usize));
                }
                _ => self.free.push(done.wr_id as usize),
            }
        }
        Ok(())
    }
}

/// Where a message is in the memory.
fn place(sent: bool, slot: usize) -> usize {
    (slot + if sent { SLOTS } else { 0 }) * SLOT
}

impl Write for Stack {
    /// Sends one message.
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let bytes = &bytes[..bytes.len().min(SLOT)];
        let slot = loop {
            match self.free.pop() {
                Some(slot) => break slot,
                None => self.poll()?,
            }
        };
        self.memory.write(place(true, slot), bytes).map_err(failed)?;
        let sges = [self.sge(true, slot, bytes.len())];
        let (flags, payload) = (SendFlags::SIGNALED, Payload::Sges(&sges));
        let wr = SendWr { wr_id: slot as u64, to: To::Peer, op: SendOp::Send, flags, payload };
        self.engine.post_send(self.qp, &wr).map_err(failed)?;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Read for Stack {
    /// Reads of the message in front.
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        let (slot, at, len) = loop {
            match self.received.pop_front() {
                Some(message) => break message,
                None => self.poll()?,
            }
        };
        let count = bytes.len().min(len - at);
        self.memory.read(place(false, slot) + at, &mut bytes[..count]).map_err(failed)?;
        match at + count < len {
            true => self.received.push_front((slot, at + count, len)),
            false => self.post_receive(slot)?,
        }
        Ok(count)
    }
}
