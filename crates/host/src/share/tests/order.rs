//! A program hears of what happens in the order in which it happened, however short a connection was.

use std::net::SocketAddr;
use std::time::Instant;

use quipu_inet::tcp::Mode;

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

/// A program of a shared adapter connected to one of another in message mode, with room at the other end or
/// none.
fn connected(client: &Tcp<'_>, server: &Tcp<'_>, address: SocketAddr, room: bool) -> [QpId; 2] {
    let settings = TcpSettings { mode: Mode::Message, ..TcpSettings::default() };
    let (there, here) = (server.idle(), client.idle());
    if room {
        server.fill(there);
    }
    let (listener, port) = server.program.engine.tcp_listen(0, &settings, 8).unwrap();
    server.program.engine.tcp_offer(listener, there).unwrap();
    let to = SocketAddr::new(address.ip(), port);
    client.program.engine.tcp_connect(here, to, None, &settings).unwrap();
    let begun = Instant::now();
    while client.look(|_| ()).is_none() {
        assert!(begun.elapsed() < PATIENCE, "no connection");
    }
    [here, there]
}

/// Requests of one queue complete in the order in which they were posted, also where one is refused.
#[test]
fn what_is_refused_later_fails_behind_what_was_posted_before_it() {
    let (shared, elsewhere) = (Shared::new(), Shared::new());
    let programs = [shared.attach(), elsewhere.attach()];
    let [server, client] = programs.each_ref().map(|program| Tcp::new(program, 16));
    let memory = client.program.sge(64);
    for flags in [SendFlags::SIGNALED, SendFlags::empty()] {
        // Nobody receives, so that the first ones go on waiting.
        let [here, there] = connected(&client, &server, shared.address, false);
        let send = |wr_id, list: &[Sge]| {
            let payload = Payload::Sges(list);
            let wr = SendWr { wr_id, to: To::Peer, op: SendOp::Send, flags, payload };
            client.program.engine.post_send(here, &wr).unwrap();
        };
        // One is an empty message, which only the adapter minds of a program that is mistaken.
        client.program.engine.take_for_stream(here);
        (0..4).for_each(|wr_id| send(wr_id, &[memory]));
        send(4, &[]);
        (5..8).for_each(|wr_id| send(wr_id, &[memory]));
        // This one the program can see.
        let long = Sge { len: u32::MAX, ..memory };
        let payload = Payload::Sges(std::slice::from_ref(&long));
        let wr = SendWr { wr_id: 8, to: To::Peer, op: SendOp::Send, flags, payload };
        let refused = client.program.engine.post_send(here, &wr);
        assert!(matches!(refused, Err(EngineError::Fault(Fault::Invalid(_)))), "{refused:?}");
        let (mut found, begun) = (Vec::new(), Instant::now());
        while found.len() < 8 {
            assert!(begun.elapsed() < PATIENCE, "{found:?}");
            client.look(|done| found.push((done.wr_id, done.status)));
        }
        let expected = (0..8).map(|wr_id| {
            (wr_id, if wr_id == 4 { WcStatus::LocQpOpErr } else { WcStatus::WrFlushErr })
        });
        assert!(found.iter().copied().eq(expected), "{found:?}");
        client.program.engine.destroy_qp(here).unwrap();
        server.program.engine.destroy_qp(there).unwrap();
    }
}

/// What one thread posts while another closes is refused, or arrives.
#[test]
fn nothing_is_posted_behind_a_close_that_is_under_way() {
    let (shared, elsewhere) = (Shared::new(), Shared::new());
    let programs = [shared.attach(), elsewhere.attach()];
    let [server, client] = programs.each_ref().map(|program| Tcp::new(program, MOST));
    let [here, _there] = connected(&client, &server, shared.address, true);
    let engine = &client.program.engine;
    let begun = Instant::now();
    let mut posted = 0;
    let stopped = elsewhere.engine.doorbell().unwrap();
    std::thread::scope(|scope| {
        let closing = scope.spawn(|| engine.tcp_close(here));
        let (flags, payload) = (SendFlags::empty(), Payload::Inline(b"knot"));
        let wr = SendWr { wr_id: 0, to: To::Peer, op: SendOp::Send, flags, payload };
        let refused = loop {
            match engine.post_send(here, &wr) {
                Ok(()) => posted += 1,
                Err(EngineError::Fault(Fault::WrongState)) => break true,
                Err(_) if begun.elapsed() > PATIENCE => break false,
                Err(_) => std::thread::yield_now(),
            }
        };
        drop(stopped);
        assert!(refused, "behind the end something may be posted");
        closing.join().unwrap().unwrap();
    });
    let mut received = 0;
    let end = loop {
        assert!(begun.elapsed() < 2 * PATIENCE, "{received} of {posted}");
        client.look(|_| ());
        let event = server.look(|done| received += u32::from(done.status == WcStatus::Success));
        match event.map(|it| it.change) {
            None | Some(TcpChange::Connected) => {}
            Some(change) => break change,
        }
    };
    assert_eq!((end, received), (TcpChange::PeerClosed, posted));
}

/// The event of a reset comes with the state of its time, and behind the answer to the call that resets.
#[test]
fn a_queue_pair_that_was_reset_takes_receives_at_once() {
    let (shared, elsewhere) = (Shared::new(), Shared::new());
    let programs = [shared.attach(), elsewhere.attach()];
    let [server, client] = programs.each_ref().map(|program| Tcp::new(program, 8));
    let engine = &client.program.engine;
    for round in 0..20 {
        let [here, there] = connected(&client, &server, shared.address, true);
        for (state, more) in [
            (QpState::Reset, QpAttrMask::empty()),
            (QpState::Init, QpAttrMask::PKEY_INDEX | QpAttrMask::PORT),
        ] {
            let attr = QpAttr { state, port_num: 1, ..QpAttr::default() };
            engine.modify_qp(here, &attr, QpAttrMask::STATE | more).unwrap();
        }
        let begun = Instant::now();
        while client.look(|_| ()).is_none_or(|it| it.change != TcpChange::Aborted) {
            assert!(begun.elapsed() < PATIENCE, "round {round}");
        }
        client.fill(here);
        engine.destroy_qp(here).unwrap();
        server.program.engine.destroy_qp(there).unwrap();
    }
}

/// What the words between the processes could not say, above all.
#[test]
fn settings_that_no_connection_can_have_are_refused() {
    let shared = Shared::new();
    let program = shared.attach();
    let client = Tcp::new(&program, 1);
    let (plain, qp) = (TcpSettings::default(), client.idle());
    for wrong in [
        TcpSettings { hop_limit: Some(0), ..plain },
        TcpSettings { traffic_class: 0xb8 | 1, ..plain },
    ] {
        let listening = program.engine.tcp_listen(0, &wrong, 8).map(drop);
        let connecting = program.engine.tcp_connect(qp, shared.address, None, &wrong);
        for refused in [listening, connecting] {
            assert!(matches!(refused, Err(EngineError::Fault(Fault::Invalid(_)))), "{refused:?}");
        }
    }
}
