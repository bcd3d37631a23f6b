//! Listening, connecting, mating, and what is refused on the way.

use std::cell::RefCell;
use std::rc::Rc;

use quipu_nic::inet::stack::Carriage;
use quipu_wire::{ipv4, ipv6};

use super::net::{MILLISECOND, Net, SECOND, pattern, segment_to_host_1, v6};
use super::*;

fn settings(mode: Mode) -> TcpSettings {
    TcpSettings { mode, ..TcpSettings::default() }
}

#[test]
fn a_hundred_connections_are_mated_from_one_listener_each_with_its_own_bytes() {
    for mode in MODES {
        let mut net = Net::new();
        let (listener, port) = net.adapter(1).tcp_listen(0, &settings(mode), 128).unwrap();
        let sink = net.buffer(1, 100 * 64);
        let servers: Vec<QpId> = (0..100)
            .map(|n| {
                let qp = net.qp(1, QpType::Tcp);
                net.recv(1, qp, n, &[sink.sge(n as usize * 64, 64)]);
                net.offer(1, listener, qp).unwrap();
                qp
            })
            .collect();
        let to = net.address(1, port);
        let clients: Vec<QpId> = (0..100).map(|_| net.qp(0, QpType::Tcp)).collect();
        for &qp in &clients {
            net.connect(0, qp, to, &settings(mode)).unwrap();
        }
        net.run_for(SECOND);
        let mut mated: Vec<QpId> = net
            .changes(1)
            .into_iter()
            .map(|(qp, change)| {
                assert_eq!(change, TcpChange::Connected);
                qp
            })
            .collect();
        mated.sort();
        assert_eq!(mated, servers);
        assert_eq!(net.changes(0).len(), 100);
        for (n, &qp) in clients.iter().enumerate() {
            net.send_bytes(0, qp, n as u64, &pattern(n as u64, 64));
        }
        net.run_for(SECOND);
        assert!(net.poll(0).iter().all(|done| done.status == WcStatus::Success));
        let got = net.poll(1);
        assert_eq!(got.len(), 100);
        for done in got {
            // Whose message it is, its flow says.
            let n = done.wr_id as usize;
            let remote = net.adapter(1).tcp_flow(servers[n]).unwrap().remote;
            let flow = |net: &mut Net, qp| net.adapter(0).tcp_flow(qp).unwrap().local;
            let client = clients.iter().position(|&qp| flow(&mut net, qp) == remote).unwrap();
            assert_eq!(sink.bytes(n * 64, 64), pattern(client as u64, 64));
        }
    }
}

#[test]
fn who_finds_no_idle_queue_pair_waits_for_one() {
    let mut net = Net::new();
    let (listener, port) = net.adapter(1).tcp_listen(9000, &settings(Mode::Message), 4).unwrap();
    assert_eq!(port, 9000);
    let servers = [0; 2].map(|_| net.qp(1, QpType::Tcp));
    let clients = [0; 2].map(|_| net.qp(0, QpType::Tcp));
    net.offer(1, listener, servers[0]).unwrap();
    let to = net.address(1, 9000);
    for qp in clients {
        net.connect(0, qp, to, &settings(Mode::Message)).unwrap();
    }
    net.run_for(10 * SECOND);
    assert_eq!(net.changes(1), [(servers[0], TcpChange::Connected)]);
    let sink = net.buffer(1, 100);
    net.recv(1, servers[1], 1, &[sink.sge(0, 100)]);
    net.offer(1, listener, servers[1]).unwrap();
    net.run_for(30 * SECOND);
    assert_eq!(net.changes(1), [(servers[1], TcpChange::Connected)]);
    assert_eq!(net.changes(0).len(), 2);
}

#[test]
fn the_end_of_a_connection_that_waits_is_not_forgotten() {
    for aborts in [false, true] {
        let mut net = Net::new();
        let listener = net.listen(1, 9000, &settings(Mode::Stream));
        let servers = [0; 2].map(|_| net.qp(1, QpType::Tcp));
        let clients = [0; 2].map(|_| net.qp(0, QpType::Tcp));
        net.offer(1, listener, servers[0]).unwrap();
        let to = net.address(1, 9000);
        for qp in clients {
            net.connect(0, qp, to, &settings(Mode::Stream)).unwrap();
        }
        net.run_for(SECOND);
        let now = net.now();
        // The one whose connection has found no queue pair.
        let mated = net.adapter(1).tcp_flow(servers[0]).unwrap().remote;
        let flow = |net: &mut Net, qp| net.adapter(0).tcp_flow(qp).unwrap().local;
        let waiting = clients.into_iter().find(|&qp| flow(&mut net, qp) != mated).unwrap();
        if aborts {
            net.adapter(0).tcp_abort(now, waiting).unwrap();
        } else {
            net.adapter(0).tcp_close(now, waiting).unwrap();
        }
        net.run_for(SECOND);
        net.changes(1);
        net.offer(1, listener, servers[1]).unwrap();
        net.run_for(SECOND);
        let expected = match aborts {
            true => vec![],
            false => vec![(servers[1], TcpChange::Connected), (servers[1], TcpChange::PeerClosed)],
        };
        assert_eq!(net.changes(1), expected);
    }
}

#[test]
fn data_that_stands_in_for_the_last_word_of_the_handshake_is_not_lost() {
    for mode in MODES {
        let mut net = Net::new();
        let (listener, port) = net.adapter(1).tcp_listen(0, &settings(mode), 4).unwrap();
        let sink = net.buffer(1, 1000);
        let (server, client) = (net.qp(1, QpType::Tcp), net.qp(0, QpType::Tcp));
        net.recv(1, server, 1, &[sink.sge(0, 1000)]);
        net.offer(1, listener, server).unwrap();
        let to = net.address(1, port);
        net.connect(0, client, to, &settings(mode)).unwrap();
        // The client's bare acknowledgement of the SYN-ACK is lost: its data bring the first.
        let mut frames = 0;
        net.filter = Some(Box::new(move |to, _| {
            frames += u32::from(to == 1);
            frames != 2 || to == 0
        }));
        net.run_while(SECOND, |net| net.state(0, client) != QpState::Rts);
        assert_eq!(net.changes(1), [], "half open");
        net.send_bytes(0, client, 1, &pattern(1, 200));
        net.run_for(10 * SECOND);
        assert_eq!(net.changes(1), [(server, TcpChange::Connected)]);
        assert_eq!(brief(&net.poll(1)), [(1, WcStatus::Success, 200)]);
        assert_eq!(sink.bytes(0, 200), pattern(1, 200));
        assert_eq!(brief(&net.poll(0)), [(1, WcStatus::Success, 200)]);
    }
}

#[test]
fn an_end_that_stands_in_for_the_last_word_of_the_handshake_is_told_once() {
    for mode in MODES {
        let mut net = Net::new();
        let listener = net.listen(1, 9000, &settings(mode));
        let (server, client) = (net.qp(1, QpType::Tcp), net.qp(0, QpType::Tcp));
        net.offer(1, listener, server).unwrap();
        let to = net.address(1, 9000);
        net.connect(0, client, to, &settings(mode)).unwrap();
        // The bare acknowledgement of the SYN-ACK is lost: the FIN brings the first.
        let mut frames = 0;
        net.filter = Some(Box::new(move |to, _| {
            frames += u32::from(to == 1);
            frames != 2 || to == 0
        }));
        net.run_while(SECOND, |net| net.state(0, client) != QpState::Rts);
        let now = net.now();
        net.adapter(0).tcp_close(now, client).unwrap();
        net.run_for(10 * SECOND);
        let told = [TcpChange::Connected, TcpChange::PeerClosed].map(|change| (server, change));
        assert_eq!(net.changes(1), told);
    }
}

/// A frame with a SYN to port 9000 of host 1, from an address that may be anybody's.
fn syn(from: u16, port: u16) -> Vec<u8> {
    use quipu_wire::tcp;
    let source = std::net::Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 7, from);
    let segment = tcp::Repr {
        source: port,
        destination: 9000,
        flags: tcp::Flags::SYN,
        window: 1000,
        ..tcp::Repr::default()
    };
    segment_to_host_1(source, &segment, &[])
}

#[test]
fn a_flood_of_syns_takes_no_queue_pair_from_anybody() {
    let mut net = Net::new();
    let listener = net.listen(1, 9000, &settings(Mode::Message));
    let server = net.qp(1, QpType::Tcp);
    net.offer(1, listener, server).unwrap();
    for n in 0..500 {
        net.inject(1, &syn(n, 1024 + n));
    }
    let client = net.qp(0, QpType::Tcp);
    let to = net.address(1, 9000);
    net.connect(0, client, to, &settings(Mode::Message)).unwrap();
    net.run_for(100 * MILLISECOND);
    assert_eq!(net.changes(0), [(client, TcpChange::Connected)]);
    assert_eq!(net.changes(1), [(server, TcpChange::Connected)]);
    let accepted = net.adapter(1).inet().unwrap().counters().tcp_accepted;
    assert!(accepted <= 17, "{accepted} are remembered");
}

#[test]
fn nobody_listens() {
    let mut net = Net::new();
    let qp = net.qp(0, QpType::Tcp);
    let buffer = net.buffer(0, 100);
    net.recv(0, qp, 1, &[buffer.sge(0, 100)]);
    let to = net.address(1, 9000);
    net.connect(0, qp, to, &settings(Mode::Message)).unwrap();
    assert_eq!(net.state(0, qp), QpState::Rtr);
    net.run_for(SECOND);
    let refused = TcpChange::Failed(inet::tcp::Failure::Refused);
    assert_eq!(net.changes(0), [(qp, refused)]);
    // It may try again, with what is posted.
    assert_eq!(net.state(0, qp), QpState::Init);
    assert_eq!(net.poll(0), []);
    net.listen(1, 9000, &settings(Mode::Message));
    net.connect(0, qp, to, &settings(Mode::Message)).unwrap();
}

#[test]
fn nobody_answers() {
    let mut net = Net::new();
    net.filter = Some(Box::new(|_, _| false));
    let qp = net.qp(0, QpType::Tcp);
    let to = net.address(1, 9000);
    let settings = TcpSettings { connect_timeout_ns: 20 * SECOND, ..TcpSettings::default() };
    net.connect(0, qp, to, &settings).unwrap();
    net.run_for(19 * SECOND);
    assert_eq!(net.changes(0), []);
    net.run_for(2 * SECOND);
    let failure = TcpChange::Failed(inet::tcp::Failure::TimedOut);
    assert_eq!(net.changes(0), [(qp, failure)]);
}

#[test]
fn a_neighbour_that_does_not_answer_is_unreachable_after_three_questions() {
    let mut net = Net::with(1, |config| {
        let std::net::IpAddr::V6(own) = config.addresses[0].0 else { unreachable!() };
        config.hardware = Some([2, 0, 0, 0, 0, own.octets()[15]]);
    });
    for v4 in [false, true] {
        net.v4 = v4;
        let qp = net.qp(0, QpType::Tcp);
        // Nobody has the address.
        let to = net.address(7, 9000);
        net.connect(0, qp, to, &TcpSettings::default()).unwrap();
        net.recv(0, qp, 1, &[]);
        net.run_for(29 * SECOND / 10);
        assert_eq!(net.changes(0), []);
        net.run_for(2 * SECOND / 10);
        let failure = TcpChange::Failed(inet::tcp::Failure::Unreachable);
        assert_eq!(net.changes(0), [(qp, failure)]);
        let done = net.poll(0);
        assert_eq!((done.len(), done[0].status), (1, WcStatus::WrFlushErr));
        assert_eq!(net.state(0, qp), QpState::Err);
    }
}

#[test]
fn what_cannot_be_is_refused_at_once() {
    let mut net = Net::new();
    let all = TcpSettings::default();
    let qp = net.qp(0, QpType::Tcp);
    let to = net.address(1, 80);
    let invalid =
        |result: Result<(), Fault>| assert!(matches!(result, Err(Fault::Invalid(_))), "{result:?}");
    let (now, own) = (net.now(), net.address(0, 80));
    invalid(net.adapter(0).tcp_connect(now, qp, own, Some(80), &all));
    invalid(net.connect(0, qp, "[ff02::1]:80".parse().unwrap(), &all));
    invalid(net.connect(0, qp, "[::]:80".parse().unwrap(), &all));
    assert_eq!(net.state(0, qp), QpState::Init, "it is unchanged");
    let rc = net.host(0).qp();
    invalid(net.connect(0, rc, to, &all));
    assert_eq!(net.connect(0, QpId(77 << 32), to, &all), Err(Fault::NoSuchObject));
    assert_eq!(net.adapter(0).tcp_close(now, qp), Err(Fault::WrongState));
    assert_eq!(net.adapter(0).tcp_abort(now, qp), Err(Fault::WrongState));
    let (listener, port) = net.adapter(0).tcp_listen(0, &all, 1).unwrap();
    assert!(matches!(net.adapter(0).tcp_listen(port, &all, 1), Err(Fault::Taken(_))));
    net.offer(0, listener, qp).unwrap();
    assert_eq!(net.offer(0, listener, qp), Err(Fault::Busy));
    assert_eq!(net.connect(0, qp, to, &all), Err(Fault::Busy));
    net.adapter(0).tcp_unlisten(listener);
    assert_eq!(net.offer(0, listener, qp), Err(Fault::NoSuchObject));
    net.connect(0, qp, to, &all).unwrap();
    assert_eq!(net.connect(0, qp, to, &all), Err(Fault::WrongState));
    // Programs go to RTR and RTS by connecting alone.
    for state in [QpState::Rtr, QpState::Rts] {
        assert!(matches!(net.to(0, qp, state), Err(Fault::Transition(_))));
    }
    let srq = {
        let pd = net.host(0).pd;
        net.adapter(0).create_srq(pd, 4, 1, 0).unwrap()
    };
    let mut init = QpInit {
        pd: net.host(0).pd,
        send_cq: net.host(0).cq,
        recv_cq: net.host(0).cq,
        srq: Some(srq),
        cap: QpCap { max_send_wr: 1, ..QpCap::default() },
        qp_type: QpType::Tcp,
        sq_sig_all: false,
    };
    let num = QpNum::new(999, 1);
    assert!(matches!(net.adapter(0).create_qp(&init, num), Err(Fault::Unsupported(_))));
    init.qp_type = QpType::Udp;
    assert!(net.adapter(0).create_qp(&init, num).is_ok());
}

#[test]
fn an_adapter_without_a_link_says_so() {
    let mut pair = crate::pair::Pair::new(crate::pair::Way::Link);
    let [tcp, udp] =
        [QpType::Tcp, QpType::Udp].map(|it| pair.hosts[0].qp_with(|init| init.qp_type = it));
    let adapter = &mut pair.hosts[0].adapter;
    let now = Time(1);
    let to = "[fd00::1]:80".parse().unwrap();
    let settings = TcpSettings::default();
    let connected = adapter.tcp_connect(now, tcp, to, None, &settings);
    assert!(matches!(connected, Err(Fault::Unsupported(_))));
    assert!(matches!(adapter.udp_bind(udp, 0), Err(Fault::Unsupported(_))));
    assert!(matches!(adapter.tcp_listen(0, &settings, 1), Err(Fault::Unsupported(_))));
    assert!(adapter.inet().is_none());
    assert!(!adapter.has_frames());
    assert_eq!(adapter.transmit_frame(now, &mut [0; 2000]), None);
    let config = || {
        let secret = inet::tcp::Secret([1, 2]);
        inet::stack::Config::new(v6(0), 64, secret)
    };
    adapter.attach_inet(config()).unwrap();
    assert_eq!(adapter.attach_inet(config()), Err(Fault::Busy));
}

#[test]
fn what_is_posted_in_error_is_flushed_however_the_connection_has_ended() {
    for aborted in [false, true] {
        let mut net = Net::new();
        let qps = net.connected(Mode::Message);
        for (host, qp) in qps.into_iter().enumerate() {
            let now = net.now();
            match aborted {
                true if host == 1 => {}
                true => net.adapter(host).tcp_abort(now, qp).unwrap(),
                false => net.adapter(host).tcp_close(now, qp).unwrap(),
            }
        }
        net.run_for(SECOND);
        assert_eq!(net.states(qps), [QpState::Err; 2]);
        for (host, qp) in qps.into_iter().enumerate() {
            net.send_bytes(host, qp, 5, b"late");
            assert_eq!(brief(&net.poll(host)), [(5, WcStatus::WrFlushErr, 0)]);
        }
    }
}

#[test]
fn a_program_that_does_not_know_of_the_end_may_go_on_posting() {
    let mut net = Net::new();
    let qps = net.connected(Mode::Message);
    let buffer = net.buffer(1, 100);
    net.recv(1, qps[1], 1, &[buffer.sge(0, 100)]);
    net.send_bytes(0, qps[0], 5, b"before");
    let now = net.now();
    net.adapter(0).tcp_finish(now, qps[0]).unwrap();
    net.send_bytes(0, qps[0], 6, b"behind");
    net.run_for(SECOND);
    assert_eq!(brief(&net.poll(1)), [(1, WcStatus::Success, 6)]);
    assert_eq!(brief(&net.poll(0)), [(5, WcStatus::Success, 6)]);
    assert_eq!(net.states(qps), [QpState::Rts; 2], "the peer has not closed");
    let now = net.now();
    net.adapter(1).tcp_finish(now, qps[1]).unwrap();
    net.run_for(SECOND);
    assert_eq!(brief(&net.poll(0)), [(6, WcStatus::WrFlushErr, 0)]);
    assert_eq!(net.states(qps), [QpState::Err; 2]);
}

#[test]
fn the_end_has_its_place_before_what_is_posted_behind_it() {
    let mut net = Net::new();
    let qps = net.connected(Mode::Message);
    let buffer = net.buffer(1, 100);
    for wr_id in [1, 2] {
        net.recv(1, qps[1], wr_id, &[buffer.sge(0, 50)]);
    }
    // What was posted before waits when the end is asked for.
    let (flags, payload) = (SendFlags::SIGNALED, Payload::Inline(b"before"));
    let wr = SendWr { wr_id: 5, to: To::Peer, op: SendOp::Send, flags, payload };
    let now = net.now();
    let later = Fate::From(now.after(10 * MILLISECOND));
    net.adapter(0).post_send_fated(now, qps[0], &wr, later).unwrap();
    net.adapter(0).ring_doorbell(now, qps[0]);
    net.adapter(0).tcp_finish(now, qps[0]).unwrap();
    net.send_bytes(0, qps[0], 6, b"behind");
    net.run_for(SECOND);
    assert_eq!(brief(&net.poll(1)), [(1, WcStatus::Success, 6)]);
    assert_eq!(brief(&net.poll(0)), [(5, WcStatus::Success, 6)]);
    let now = net.now();
    net.adapter(1).tcp_finish(now, qps[1]).unwrap();
    net.run_for(SECOND);
    assert_eq!(brief(&net.poll(0)), [(6, WcStatus::WrFlushErr, 0)]);
    assert_eq!(net.states(qps), [QpState::Err; 2]);
}

#[test]
fn a_connection_is_from_the_own_address_that_was_asked_for() {
    let second: std::net::IpAddr = "fd00::77".parse().unwrap();
    let mut net = Net::with(1, |config| config.addresses.push((second, 64)));
    let to = net.address(1, 9000);
    net.listen(1, 9000, &settings(Mode::Message));
    for from in [second, net.address(0, 0).ip()] {
        let (qp, now) = (net.qp(0, QpType::Tcp), net.now());
        let local = std::net::SocketAddr::new(from, 0);
        net.adapter(0).tcp_connect_from(now, qp, local, to, &settings(Mode::Message)).unwrap();
        let flow = net.adapter(0).tcp_flow(qp).unwrap();
        assert_eq!(flow.local.ip(), from);
        assert_ne!(flow.local.port(), 0);
        let (other, now) = (net.qp(0, QpType::Tcp), net.now());
        let taken =
            net.adapter(0).tcp_connect_from(now, other, flow.local, to, &settings(Mode::Message));
        assert!(matches!(taken, Err(Fault::Taken(_))), "{taken:?}");
    }
    let (qp, now) = (net.qp(0, QpType::Tcp), net.now());
    let (elsewhere, all) = ("[fd00::99]:0".parse().unwrap(), TcpSettings::default());
    let refused = net.adapter(0).tcp_connect_from(now, qp, elsewhere, to, &all);
    assert!(matches!(refused, Err(Fault::NoRoute(_))), "{refused:?}");
}

#[test]
fn requests_that_tcp_cannot_carry_are_refused_when_they_are_posted() {
    for mode in MODES {
        let mut net = Net::new();
        let idle = net.qp(0, QpType::Tcp);
        let qps = net.connected(mode);
        let buffer = net.buffer(0, 100);
        let wr = SendWr {
            wr_id: 1,
            to: To::Peer,
            op: SendOp::Send,
            flags: SendFlags::SIGNALED,
            payload: Payload::Sges(&[]),
        };
        let sges = [buffer.sge(0, 10)];
        let full = SendWr { payload: Payload::Sges(&sges), ..wr };
        assert_eq!(net.post(0, idle, &full), Err(Fault::WrongState));
        let to = To::Address(net.address(1, 5));
        for op in [
            SendOp::SendImm(1),
            SendOp::Write { addr: 0, rkey: 0 },
            SendOp::Read { addr: 0, rkey: 0 },
            SendOp::LocalInv { key: 1 },
        ] {
            let result = net.post(0, qps[0], &SendWr { op, ..full });
            assert!(matches!(result, Err(Fault::Invalid(_))), "{op:?}");
        }
        assert!(matches!(net.post(0, qps[0], &SendWr { to, ..full }), Err(Fault::Invalid(_))));
        // An octet more than two to the 31st, in two pieces; what is registered is looked at later.
        let piece = Sge { len: 1 << 30, ..sges[0] };
        let long = [piece, Sge { len: piece.len + 1, ..piece }];
        let long = SendWr { payload: Payload::Sges(&long), ..wr };
        assert!(matches!(net.post(0, qps[0], &long), Err(Fault::Invalid(_))));
        assert!(net.adapter(0).check_send(qps[0], &long, 0).is_err());
        assert!(
            check_message(mode, 1 << 31).is_ok() && check_message(mode, (1 << 31) + 1).is_err()
        );
        let empty = net.post(0, qps[0], &wr);
        match mode {
            Mode::Message => {
                assert!(matches!(empty, Err(Fault::Invalid(_))));
                assert!(net.adapter(0).check_send(qps[0], &wr, 0).is_err());
            }
            // A stream has nothing to carry: it is done when what is before it is.
            Mode::Stream => {
                empty.unwrap();
                assert_eq!(brief(&net.poll(0)), [(1, WcStatus::Success, 0)]);
            }
        }
        let now = net.now();
        net.adapter(0).tcp_close(now, qps[0]).unwrap();
        assert_eq!(net.post(0, qps[0], &full), Err(Fault::WrongState));
    }
}

#[test]
fn a_connection_has_the_class_and_hop_limit_that_its_program_asked_for() {
    let mine = TcpSettings { traffic_class: 0xb8, hop_limit: Some(9), ..TcpSettings::default() };
    let theirs = TcpSettings { traffic_class: 0x20, hop_limit: Some(255), ..mine };
    for v4 in [false, true] {
        let mut net = Net::new();
        net.v4 = v4;
        let qps = [0, 1].map(|host| net.qp(host, QpType::Tcp));
        let listener = net.listen(1, 9000, &theirs);
        net.offer(1, listener, qps[1]).unwrap();
        let seen = Rc::new(RefCell::new([Vec::new(), Vec::new()]));
        let sight = Rc::clone(&seen);
        net.filter = Some(Box::new(move |to, frame| {
            if let Some(sights) = class_and_hops(frame) {
                sight.borrow_mut()[1 - to].push(sights);
            }
            true
        }));
        let to = net.address(1, 9000);
        net.connect(0, qps[0], to, &mine).unwrap();
        net.run_for(SECOND);
        assert_eq!(net.states(qps), [QpState::Rts; 2]);
        net.send_bytes(0, qps[0], 1, &[1, 2, 3]);
        let now = net.now();
        net.adapter(1).tcp_close(now, qps[1]).unwrap();
        net.run_for(SECOND);
        for (seen, (class, hops)) in seen.borrow().iter().zip([(0xb8, 9), (0x20, 255)]) {
            // The bits of ECN are TCP's.
            let is_so = |&(seen, of)| (seen & !3, of) == (class, hops);
            assert!(seen.len() > 2 && seen.iter().all(is_so), "{seen:x?}");
        }
    }
}

/// RFC 9293 3.9.2 (SHLD-21).
#[test]
fn a_connection_changes_its_class_and_hop_limit() {
    let mut net = Net::new();
    let qps = net.connected(Mode::Message);
    let seen = Rc::new(RefCell::new([Vec::new(), Vec::new()]));
    let sight = Rc::clone(&seen);
    net.filter = Some(Box::new(move |to, frame| {
        sight.borrow_mut()[1 - to].extend(class_and_hops(frame));
        true
    }));
    let carriage = Carriage { traffic_class: 0x20, hop_limit: Some(9) };
    net.adapter(0).set_carriage(qps[0], carriage).unwrap();
    net.send_bytes(0, qps[0], 1, &[1, 2, 3]);
    let now = net.now();
    net.adapter(1).tcp_close(now, qps[1]).unwrap();
    net.run_for(SECOND);
    for (seen, (class, hops)) in seen.borrow().iter().zip([(0x20, 9), (0, 64)]) {
        let is_so = |&(seen, of)| (seen & !3, of) == (class, hops);
        assert!(!seen.is_empty() && seen.iter().all(is_so), "{seen:x?}");
    }
    let idle = net.qp(0, QpType::Tcp);
    assert_eq!(net.adapter(0).set_carriage(idle, carriage), Err(Fault::WrongState));
    let wrong =
        [Carriage { traffic_class: 1, ..carriage }, Carriage { hop_limit: Some(0), ..carriage }];
    for wrong in wrong {
        let refused = net.adapter(0).set_carriage(qps[0], wrong);
        assert!(matches!(refused, Err(Fault::Invalid(_))), "{refused:?}");
    }
}

/// What a packet of TCP says.
fn class_and_hops(frame: &[u8]) -> Option<(u8, u8)> {
    if let Ok((it, _)) = ipv6::Repr::parse(frame) {
        return (it.next_header == 6).then_some((it.traffic_class, it.hop_limit));
    }
    let (it, _) = ipv4::Repr::parse(frame).ok()?;
    (it.protocol == 6).then_some((it.traffic_class, it.hop_limit))
}

#[test]
fn settings_that_no_connection_can_have_are_refused() {
    let plain = TcpSettings::default();
    let ecn = [1, 2, 3].map(|bits| TcpSettings { traffic_class: 0xb8 | bits, ..plain });
    for wrong in ecn.into_iter().chain([TcpSettings { hop_limit: Some(0), ..plain }]) {
        let mut net = Net::new();
        let (qp, to) = (net.qp(0, QpType::Tcp), net.address(1, 9000));
        let refused = |it: Fault| assert!(matches!(it, Fault::Invalid(_)), "{it:?}");
        refused(net.connect(0, qp, to, &wrong).unwrap_err());
        refused(net.adapter(0).tcp_listen(80, &wrong, 1).unwrap_err());
        refused(net.adapter(0).tcp_listen_deferred(80, &wrong, 1).unwrap_err());
        // Nothing is left of them.
        net.listen(0, 80, &plain);
        net.connect(0, qp, to, &plain).unwrap();
    }
}
