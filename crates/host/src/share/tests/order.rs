//! A program hears of what happens in the order in which it happened, however short a connection was.

use std::time::Instant;

use quipu_nic::*;

use super::{CAP, PATIENCE, Program, RINGS, Shared};
use crate::engine::ContextId;
use crate::{EngineError, TcpEvent};

/// More than the adapter tells of at once.
const MOST: u32 = 100;

/// A program's idle queue pairs, with a completion queue and a context of their own.
struct Tcp<'a> {
    program: &'a Program,
    context: ContextId,
    cq: CqId,
    most: u32,
}

impl<'a> Tcp<'a> {
    fn new(program: &'a Program, most: u32) -> Self {
        let (context, _) = program.engine.open_context().unwrap();
        program.engine.tcp_events(context).unwrap();
        let (cq, _) = program.engine.create_cq(context, 2 * most, None, 0).unwrap();
        Self { program, context, cq, most }
    }

    fn idle(&self) -> QpId {
        let (cq, pd, qp_type) = (self.cq, self.program.pd, QpType::Tcp);
        let cap = QpCap { max_send_wr: self.most, max_recv_wr: self.most, ..CAP };
        let init =
            QpInit { pd, send_cq: cq, recv_cq: cq, srq: None, cap, qp_type, sq_sig_all: false };
        let (qp, _, _) = self.program.engine.create_qp(self.context, &init).unwrap();
        let attr = QpAttr { state: QpState::Init, port_num: 1, ..QpAttr::default() };
        let mask = QpAttrMask::STATE | QpAttrMask::PKEY_INDEX | QpAttrMask::PORT;
        self.program.engine.modify_qp(qp, &attr, mask).unwrap();
        qp
    }

    fn fill(&self, qp: QpId) {
        for wr_id in 0..self.most {
            let room = [self.program.sge(16)];
            self.program.engine.post_recv(qp, u64::from(wr_id), &room).unwrap();
        }
    }

    fn send(&self, qp: QpId) {
        let (flags, payload) = (SendFlags::INLINE, Payload::Inline(b"knot"));
        let wr = SendWr { wr_id: 0, to: To::Peer, op: SendOp::Send, flags, payload };
        self.program.engine.post_send(qp, &wr).unwrap();
    }

    /// An event, or none; what completed before it, which `each` is called for.
    fn look(&self, mut each: impl FnMut(&Completion)) -> Option<TcpEvent> {
        let event = self.program.engine.take_tcp_event(self.context).unwrap();
        let mut out = [Completion::default(); 16];
        loop {
            let found = self.program.engine.poll_cq(self.cq, &mut out).unwrap();
            out[..found].iter().for_each(&mut each);
            if found == 0 {
                return event;
            }
        }
    }
}

#[test]
fn messages_come_before_the_end_and_can_be_answered_at_once() {
    let (shared, elsewhere) = (Shared::new(), Shared::new());
    let programs = [shared.attach(), elsewhere.attach()];
    let [server, client] = programs.each_ref().map(|program| Tcp::new(program, MOST));
    let settings = TcpSettings::default();
    let (listener, _) = server.program.engine.tcp_listen(7, &settings, 8).unwrap();
    for round in 0..400 {
        let begun = Instant::now();
        let messages = if round % 8 == 0 { MOST } else { 1 };
        let (there, here) = (server.idle(), client.idle());
        server.fill(there);
        client.fill(here);
        server.program.engine.tcp_offer(listener, there).unwrap();
        client.program.engine.tcp_connect(here, shared.address, None, &settings).unwrap();
        let (mut received, mut sent, mut answered) = (0, false, 0);
        let [mut there_ended, mut here_ended] = [false; 2];
        while !there_ended || !here_ended {
            assert!(begun.elapsed() < PATIENCE, "round {round}: {received}, {answered}");
            let event = server.look(|done| {
                if done.status == WcStatus::Success && done.opcode == WcOpcode::Recv {
                    received += 1;
                    server.send(there);
                }
            });
            match event.map(|it| it.change) {
                Some(TcpChange::PeerClosed) => {
                    assert_eq!(received, messages, "round {round}");
                    server.program.engine.tcp_close(there).unwrap();
                }
                None | Some(TcpChange::Connected) => {}
                Some(end) => there_ended = end == TcpChange::Closed,
            }
            let event = client.look(|done| {
                let success = done.status == WcStatus::Success;
                answered += u32::from(success && done.opcode == WcOpcode::Recv);
            });
            match event.map(|it| it.change) {
                Some(TcpChange::Connected) if !sent => {
                    (0..messages).for_each(|_| client.send(here));
                    client.program.engine.tcp_close(here).unwrap();
                    sent = true;
                }
                Some(TcpChange::Closed) => {
                    assert_eq!(answered, messages, "round {round}");
                    here_ended = true;
                }
                _ => {}
            }
        }
        server.program.engine.destroy_qp(there).unwrap();
        client.program.engine.destroy_qp(here).unwrap();
    }
}

#[test]
fn a_burst_that_is_longer_than_the_ring_arrives_whole_and_in_order_before_the_end() {
    let most = 3 * RINGS.request_slots;
    let (shared, elsewhere) = (Shared::new(), Shared::new());
    let programs = [shared.attach(), elsewhere.attach()];
    let [server, client] = programs.each_ref().map(|program| Tcp::new(program, most));
    let (there, here) = (server.idle(), client.idle());
    // While the adapter does nothing, its ring is full soon.
    let stopped = shared.engine.doorbell().unwrap();
    server.fill(there);
    let full = server.program.engine.post_recv(there, 0, &[]).unwrap_err();
    assert!(matches!(full, EngineError::Fault(Fault::QueueFull)));
    drop(stopped);
    let settings = TcpSettings::default();
    let (listener, _) = server.program.engine.tcp_listen(7, &settings, 8).unwrap();
    server.program.engine.tcp_offer(listener, there).unwrap();
    client.program.engine.tcp_connect(here, shared.address, None, &settings).unwrap();
    let begun = Instant::now();
    while client.look(|_| ()).is_none() {
        assert!(begun.elapsed() < PATIENCE, "no connection");
    }
    let stopped = elsewhere.engine.doorbell().unwrap();
    (0..most).for_each(|_| client.send(here));
    drop(stopped);
    client.program.engine.tcp_close(here).unwrap();
    let mut received = 0;
    loop {
        assert!(begun.elapsed() < PATIENCE, "{received} have come");
        let event = server.look(|done| {
            assert_eq!((done.wr_id, done.status, done.byte_len), (received, WcStatus::Success, 4));
            received += 1;
        });
        client.look(|_| ());
        if event.is_some_and(|it| it.change == TcpChange::PeerClosed) {
            break;
        }
    }
    assert_eq!(received, u64::from(most));
}
