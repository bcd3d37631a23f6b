//! One host with its adapter.

use std::collections::VecDeque;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};

use quipu_nic::inet::stack::{self, Frame, ListenerId};
use quipu_nic::inet::tcp::{Mode, Secret};
use quipu_nic::mem::{Access, Segment, Sge};
use quipu_nic::{
    Adapter, Completion, Config, CqId, Event, Fault, Payload, QpAttr, QpAttrMask, QpCap, QpId,
    QpInit, QpNum, QpState, QpType, SendFlags, SendOp, SendWr, Stage, TcpChange, TcpSettings, Time,
    To, WcOpcode, WcStatus,
};
use quipu_wire::{ipv6, tcp};

use super::LanaiPlan;
use super::firmware::{Recorder, Step, Traits};

const PORT: u16 = 700;
/// Next header of UDP (RFC 768).
const UDP: u8 = 17;

/// What a state machine of the firmware is doing.
#[derive(Default)]
pub(super) struct Machine {
    pub(super) steps: VecDeque<Step>,
    /// It waits for a DMA engine or for the link.
    pub(super) waits: bool,
    /// The frame that it sends.
    pub(super) frame: Vec<u8>,
}

/// What the adapter has done with a frame.
pub(super) struct Handled {
    /// The stages that it went through, with the bytes that they touched.
    pub(super) heard: Vec<(Stage, usize)>,
    pub(super) traits: Traits,
    /// Completions of receives and of sends.
    pub(super) completions: [Vec<Completion>; 2],
}

/// A host with its adapter.
pub(super) struct End {
    adapter: Adapter<Recorder>,
    cq: CqId,
    qp: QpId,
    to: To,
    memory: Segment,
    sge: Sge,
    /// The latest acknowledgement of the peer.
    acked: Option<tcp::SeqNumber>,
    pub(super) inbox: VecDeque<Vec<u8>>,
    /// Transmit and receive.
    pub(super) machines: [Machine; 2],
    /// The state machine for which the processor works.
    pub(super) running: Option<usize>,
    /// The one for which it has worked last.
    pub(super) latest: usize,
    /// Messages that were received.
    pub(super) messages: u32,
    pub(super) timer_at: u64,
    /// Why the run cannot go on.
    pub(super) failed: Option<String>,
}

fn address(number: usize) -> IpAddr {
    Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, 1 + number as u16).into()
}

fn settings() -> TcpSettings {
    TcpSettings { mode: Mode::Message, ecn: false, ..TcpSettings::default() }
}

impl End {
    /// A host whose queue pair is in INIT, with receives posted.
    pub(super) fn new(number: usize, plan: &LanaiPlan) -> Result<Self, Fault> {
        let mut adapter = Adapter::with_probe(Config::default(), Recorder::default());
        let mut config = stack::Config::new(address(number), 64, Secret([5, number as u64]));
        config.mtu = plan.mtu;
        // Checksums cost what the plan says, and are not computed.
        config.offload.checksum = true;
        adapter.attach_inet(config)?;
        let pd = adapter.alloc_pd()?;
        let depth = plan.depth.max(1);
        let (cq, _) = adapter.create_cq(4 * depth + 16, None, 0)?;
        let cap = QpCap {
            max_send_wr: depth + 1,
            max_recv_wr: 2 * depth + 1,
            max_send_sge: 1,
            max_recv_sge: 1,
            max_inline_data: 0,
        };
        let init = QpInit {
            pd,
            send_cq: cq,
            recv_cq: cq,
            srq: None,
            cap,
            qp_type: if plan.datagrams { QpType::Udp } else { QpType::Tcp },
            sq_sig_all: true,
        };
        let (qp, _) = adapter.create_qp(&init, QpNum::new(4000, number as u8))?;
        let attr = QpAttr { state: QpState::Init, port_num: 1, ..QpAttr::default() };
        adapter.modify_qp(Time(1), qp, &attr, QpAttrMask::STATE)?;
        let memory = Segment::heap(plan.message as usize);
        if number == 0 {
            let bytes: Vec<u8> =
                (0..plan.message).map(|at| (at.wrapping_mul(7) >> 3) as u8).collect();
            memory
                .write(0, &bytes)
                .map_err(|_| Fault::Invalid("the memory is shorter than a message"))?;
        }
        let region = adapter.reg_segment(pd, &memory, None, Access::LOCAL_WRITE)?;
        let sge = Sge { addr: memory.addr() as u64, len: plan.message, lkey: region.key };
        let peer = SocketAddr::new(address(1 - number), PORT);
        let to = if plan.datagrams { To::Address(peer) } else { To::Peer };
        let mut end = Self {
            adapter,
            cq,
            qp,
            to,
            memory,
            sge,
            acked: None,
            inbox: VecDeque::new(),
            machines: Default::default(),
            running: None,
            latest: 0,
            messages: 0,
            timer_at: u64::MAX,
            failed: None,
        };
        for _ in 0..2 * depth {
            end.post_receive(1)?;
        }
        if plan.datagrams {
            end.adapter.udp_bind(qp, PORT)?;
        }
        Ok(end)
    }

    /// Waits for the peer at a port.
    pub(super) fn listen(&mut self) -> Result<ListenerId, Fault> {
        let (listener, _) = self.adapter.tcp_listen(PORT, &settings(), 1)?;
        self.adapter.tcp_offer(Time(1), listener, self.qp)?;
        Ok(listener)
    }

    /// Connects to the peer.
    pub(super) fn connect(&mut self) -> Result<(), Fault> {
        let to = SocketAddr::new(address(1), PORT);
        self.adapter.tcp_connect(Time(1), self.qp, to, None, &settings())
    }

    /// Whether messages can be sent.
    pub(super) fn is_connected(&self) -> bool {
        self.adapter.query_qp(self.qp).is_ok_and(|info| info.attr.state == QpState::Rts)
    }

    /// The host posts a receive.
    pub(super) fn post_receive(&mut self, now: u64) -> Result<(), Fault> {
        self.adapter.post_recv(Time(now), self.qp, 1, &[self.sge])
    }

    /// The host posts a message.
    pub(super) fn post_send(&mut self, now: u64) -> Result<(), Fault> {
        let list = [self.sge];
        let payload = Payload::Sges(&list);
        let flags = SendFlags::SIGNALED;
        let wr = SendWr { wr_id: 2, to: self.to, op: SendOp::Send, flags, payload };
        self.adapter.post_send(self.qp, &wr)?;
        self.adapter.ring_doorbell(Time(now), self.qp);
        Ok(())
    }

    /// The bytes that the host sends from, or has received last.
    pub(super) fn bytes(&self) -> Vec<u8> {
        let mut bytes = vec![0; self.memory.len()];
        // The range is that of the memory.
        let _ = self.memory.read(0, &mut bytes);
        bytes
    }

    /// Whether there may be a frame to send.
    pub(super) fn has_frames(&self) -> bool {
        self.adapter.has_frames()
    }

    /// The deadline of the adapter's timers in nanoseconds, if there is one.
    pub(super) fn deadline(&self) -> Option<u64> {
        self.adapter.poll_timeout().map(|time| time.0)
    }

    /// A deadline is over.
    pub(super) fn handle_timeout(&mut self, now: u64) {
        self.adapter.handle_timeout(Time(now));
        self.drain();
    }

    /// Sends the next frame, which is then at the transmit machine.
    pub(super) fn transmit(&mut self, now: u64) -> Option<Handled> {
        let mut out = vec![0; (1 << 16) + 14];
        let frame = self.adapter.transmit_frame(Time(now), &mut out);
        let heard = self.drain();
        out.truncate(frame?.len);
        let traits = Traits { datagram: is_datagram(&out), ..Traits::default() };
        self.machines[0].frame = out;
        Some(Handled { heard, traits, completions: self.completions() })
    }

    /// Receives a frame.
    pub(super) fn receive(&mut self, now: u64, frame: &[u8]) -> Handled {
        let acks = self.note_acknowledgement(frame);
        self.adapter.handle_frame(Time(now), &Frame { bytes: frame, checked: true });
        let heard = self.drain();
        let traits = Traits { datagram: is_datagram(frame), acks, summed: 0 };
        Handled { heard, traits, completions: self.completions() }
    }

    /// Whether a frame acknowledges something new.
    fn note_acknowledgement(&mut self, frame: &[u8]) -> bool {
        let Ok((_, at)) = ipv6::Repr::parse(frame) else { return false };
        if is_datagram(frame) {
            return false;
        }
        let Ok((segment, _)) = tcp::Repr::parse(frame.get(at..).unwrap_or_default()) else {
            return false;
        };
        if !segment.flags.has(tcp::Flags::ACK) {
            return false;
        }
        let before = self.acked.replace(segment.ack);
        before.is_some_and(|before| before != segment.ack)
    }

    /// Takes what the adapter has told, and the stages that were heard.
    fn drain(&mut self) -> Vec<(Stage, usize)> {
        while let Some(event) = self.adapter.poll_event() {
            if let Event::Tcp {
                change: change @ (TcpChange::Failed(_) | TcpChange::Aborted), ..
            } = event
            {
                self.failed.get_or_insert(format!("the connection ended: {change:?}"));
            }
        }
        while self.adapter.poll_action().is_some() {}
        std::mem::take(&mut self.adapter.probe_mut().0)
    }

    /// Completions of receives and of sends.
    fn completions(&mut self) -> [Vec<Completion>; 2] {
        let mut all = Vec::new();
        let mut some = [Completion::default(); 16];
        while let Ok(count) = self.adapter.poll_cq(self.cq, &mut some) {
            all.extend_from_slice(&some[..count]);
            if count < some.len() {
                break;
            }
        }
        if let Some(wrong) = all.iter().find(|it| it.status != WcStatus::Success) {
            self.failed.get_or_insert(format!("a request failed: {:?}", wrong.status));
        }
        let (received, sent) = all.into_iter().partition(|it| it.opcode == WcOpcode::Recv);
        [received, sent]
    }
}

fn is_datagram(frame: &[u8]) -> bool {
    frame.get(6) == Some(&UDP)
}
