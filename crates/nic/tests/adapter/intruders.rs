//! Connections that somebody else asks for: they neither get a queue pair that is not meant for them nor shut
//! those out that it is meant for.

use std::net::IpAddr;

use crate::pair::{Pair, Way};
use quipu_iwarp::wire::hello::{Features, Hello, Kind, Reason, Service};
use quipu_iwarp::wire::rdmap::UntaggedOp;
use quipu_iwarp::{Initiator, Negotiated, Params, Responder, Sender};
use quipu_nic::*;

const STREAM: Way = Way::Stream(usize::MAX);
const HOURS: u64 = 3_600_000_000_000;

fn keep(_: &mut QpAttr) {}

fn num(pair: &Pair, host: usize, qp: QpId) -> u32 {
    pair.hosts[host].adapter.query_qp(qp).unwrap().num.0
}

/// What somebody at the address of host 0 would say to get the queue pair of host 1.
fn hello(pair: &Pair, qps: [QpId; 2], rq_psn: u32, sq_psn: u32) -> Hello {
    Hello {
        kind: Kind::Request,
        path_mtu: 5,
        features: Features::ALL,
        dest_qpn: num(pair, 1, qps[1]),
        source_qpn: num(pair, 0, qps[0]),
        rq_psn,
        sq_psn,
        service: Service::Rc,
        source_gid: pair.hosts[0].adapter.config().gid.0,
        dest_gid: pair.hosts[1].adapter.config().gid.0,
    }
}

/// Asks host `to` by a stream from the other host's address.
fn ask(pair: &mut Pair, to: usize, hello: &Hello) -> ConnId {
    let mut initiator = Initiator::new(Params::default(), &hello.to_bytes()).unwrap();
    let mut request = [0; 1000];
    let used = initiator.poll_transmit(&mut request);
    let peer = (IpAddr::V4(pair.hosts[1 - to].address), 999).into();
    let adapter = &mut pair.hosts[to].adapter;
    let conn = adapter.handle_accepted(pair.now, peer).unwrap();
    assert_eq!(adapter.handle_stream(pair.now, conn, &request[..used]), used);
    conn
}

/// What host `host` says on a stream, up to its end.
fn said(pair: &mut Pair, host: usize, conn: ConnId) -> Vec<u8> {
    let mut out = vec![0; 2000];
    let used = pair.hosts[host].adapter.transmit(pair.now, conn, &mut out);
    out.truncate(used);
    out
}

fn is_closed(pair: &mut Pair, host: usize, conn: ConnId) -> bool {
    let adapter = &mut pair.hosts[host].adapter;
    while let Some(action) = adapter.poll_action() {
        if action == (Action::Close { conn }) {
            adapter.handle_lost(pair.now, conn, Loss::Closed);
            return true;
        }
    }
    false
}

fn message_passes(pair: &mut Pair, qps: [QpId; 2]) {
    let until = pair.now.after(300_000_000);
    pair.recv(0, qps[0], 5, &[]);
    pair.send(1, qps[1], 1, SendOp::Send, &[]);
    pair.run_until(until);
    assert_eq!(pair.polled(1), [(1, WcStatus::Success)]);
    assert_eq!(pair.polled(0), [(5, WcStatus::Success)]);
}

#[test]
fn a_queue_pair_in_rtr_is_given_back_by_who_expects_another_psn() {
    let mut pair = Pair::new(STREAM);
    let qps = [pair.hosts[0].qp(), pair.hosts[1].qp()];
    pair.to_rtr(1, qps, &keep);
    let request = hello(&pair, qps, 99, 0);
    let conn = ask(&mut pair, 1, &request);
    assert!(!is_closed(&mut pair, 1, conn), "nothing is known against it");
    pair.to_rts(1, qps[1], &keep);
    assert!(is_closed(&mut pair, 1, conn));
    pair.to_rtr(0, qps, &keep);
    pair.to_rts(0, qps[0], &keep);
    message_passes(&mut pair, qps);
}

#[test]
fn a_queue_pair_that_somebody_else_has_used_is_lost() {
    let mut pair = Pair::new(STREAM);
    let qps = [pair.hosts[0].qp(), pair.hosts[1].qp()];
    pair.to_rtr(1, qps, &keep);
    pair.recv(1, qps[1], 5, &[]);
    let request = hello(&pair, qps, 99, 0);
    let conn = ask(&mut pair, 1, &request);
    let mut sender = Sender::new(&Negotiated::plain(), 1000);
    let mut msg = sender.begin_untagged(UntaggedOp::Send, 0);
    let mut fpdu = [0; 100];
    let used = sender.segment(&mut msg, &mut fpdu, 0, |_| {}).unwrap().bytes;
    pair.hosts[1].adapter.handle_stream(pair.now, conn, &fpdu[..used]);
    assert_eq!(pair.polled(1), [(5, WcStatus::Success)]);
    pair.to_rts(1, qps[1], &keep);
    assert!(is_closed(&mut pair, 1, conn));
    pair.send(1, qps[1], 1, SendOp::Send, &[]);
    pair.later(1_000_000_000);
    assert_eq!(pair.polled(1), [(1, WcStatus::RetryExcErr)]);
}

/// Who has one IPv6 address has a network of them, and makes room among his own.
#[test]
fn a_network_of_addresses_shuts_nobody_out() {
    let mut pair = Pair::new(STREAM);
    let from = |network: u16, host: u16| {
        (IpAddr::from([0x2001, 0xdb8, 0, network, 0, 0, 0, host]), 999).into()
    };
    let now = pair.now;
    let adapter = &mut pair.hosts[0].adapter;
    let honest = adapter.handle_accepted(now, from(1, 1)).unwrap();
    let most = adapter.config().max_half_open as u16;
    for host in 0..2 * most {
        adapter.handle_accepted(now, from(2, host)).unwrap();
        while let Some(Action::Close { conn }) = adapter.poll_action() {
            assert_ne!(conn, honest);
            adapter.handle_lost(now, conn, Loss::Closed);
        }
    }
    assert_eq!(adapter.connections(), usize::from(most) / 4 * 3 + 1);
}

/// Of two queue pairs one asks; a request to that one comes from somebody else.
#[test]
fn the_end_that_asks_is_not_asked() {
    let mut pair = Pair::new(STREAM);
    let qps = [pair.hosts[0].qp(), pair.hosts[1].qp()];
    pair.to_rtr(0, qps, &keep);
    pair.to_rts(0, qps[0], &keep);
    let Some(Action::Connect { conn: own, .. }) = pair.hosts[0].adapter.poll_action() else {
        panic!("it does not ask");
    };
    pair.hosts[0].adapter.handle_lost(pair.now, own, Loss::Refused);
    let forward = hello(&pair, qps, 7, 7);
    let request = Hello {
        dest_qpn: forward.source_qpn,
        source_qpn: forward.dest_qpn,
        source_gid: forward.dest_gid,
        dest_gid: forward.source_gid,
        ..forward
    };
    let conn = ask(&mut pair, 0, &request);
    let reply = said(&mut pair, 0, conn);
    let refused = request.answer(Kind::Reject(Reason::Mismatch), Features::ALL, 0, 0);
    assert!(reply.windows(64).any(|bytes| bytes == refused.to_bytes()), "{reply:x?}");
}

/// Anyone who answers in the place of the peer must know its PSNs.
#[test]
fn an_answer_with_other_psns_or_gids_is_none() {
    type Change = fn(&mut Hello);
    let changes: [(Change, bool); 5] = [
        (|_| {}, true),
        (|answer| answer.rq_psn = 8, false),
        (|answer| answer.sq_psn = 8, false),
        (|answer| answer.source_gid = [9; 16], false),
        (|answer| answer.dest_gid = [9; 16], false),
    ];
    for (index, (change, stands)) in changes.into_iter().enumerate() {
        let mut pair = Pair::new(STREAM);
        let qps = [pair.hosts[0].qp(), pair.hosts[1].qp()];
        pair.to_rtr(0, qps, &keep);
        pair.to_rts(0, qps[0], &keep);
        let Some(Action::Connect { conn, .. }) = pair.hosts[0].adapter.poll_action() else {
            panic!("it does not ask");
        };
        pair.hosts[0].adapter.handle_reached_stream(pair.now, conn);
        let mut responder = Responder::new();
        let (_, request) = responder.handle(&said(&mut pair, 0, conn)).unwrap();
        let request = Hello::parse(&request.unwrap().private_data).unwrap();
        let mut answer = request.answer(Kind::Accept, Features::ALL, 7, 7);
        change(&mut answer);
        responder.accept(Params::default(), &answer.to_bytes()).unwrap();
        let mut reply = [0; 500];
        let used = responder.poll_transmit(&mut reply);
        pair.hosts[0].adapter.handle_stream(pair.now, conn, &reply[..used]);
        assert_eq!(!is_closed(&mut pair, 0, conn), stands, "{index}");
    }
}

/// Strangers that say nothing, and requests that wait, shut nobody out.
#[test]
fn idle_connections_shut_nobody_out() {
    for speaking in [false, true] {
        let mut pair = Pair::new(STREAM);
        let qps = [pair.hosts[0].qp(), pair.hosts[1].qp()];
        let limit = pair.hosts[1].adapter.config().max_half_open;
        let others = pair.hosts[1].qp();
        for n in 0..2 * limit {
            if speaking {
                let idle = hello(&pair, [qps[0], others], 0, 0);
                ask(&mut pair, 1, &Hello { source_qpn: n, ..idle });
            } else {
                let peer = (IpAddr::from([10, 9, (n % 5) as u8, 9]), 1).into();
                pair.hosts[1].adapter.handle_accepted(pair.now, peer).unwrap();
            }
        }
        let half_open = |pair: &mut Pair| {
            while let Some(action) = pair.hosts[1].adapter.poll_action() {
                if let Action::Close { conn } = action {
                    pair.hosts[1].adapter.handle_lost(pair.now, conn, Loss::Closed);
                }
            }
            pair.hosts[1].adapter.connections() as u32
        };
        let most = if speaking { limit / 4 } else { limit };
        assert_eq!(half_open(&mut pair), most, "one address has a quarter at most");
        pair.connect(qps);
        message_passes(&mut pair, qps);
    }
}

/// A request that waits gives way to the next one of the same queue pairs.
#[test]
fn one_request_waits_for_a_queue_pair() {
    let mut pair = Pair::new(STREAM);
    let qps = [pair.hosts[0].qp(), pair.hosts[1].qp()];
    pair.to_init(1, qps[1]);
    let request = hello(&pair, qps, 7, 7);
    let first = ask(&mut pair, 1, &request);
    assert!(!is_closed(&mut pair, 1, first));
    let second = ask(&mut pair, 1, &request);
    assert!(is_closed(&mut pair, 1, first));
    pair.to_rtr(1, qps, &keep);
    assert!(!said(&mut pair, 1, second).is_empty(), "it is granted");
}

/// A peer that offers no acknowledgements, or no atomics, is none: requests to it would never end.
#[test]
fn a_peer_that_knows_too_little_is_refused() {
    const REJECT: u8 = 3;
    const MISMATCH: u8 = 2;
    for features in [Features(0), Features::QUIPU, Features::RFC7306] {
        let mut pair = Pair::new(STREAM);
        let qps = [pair.hosts[0].qp(), pair.hosts[1].qp()];
        pair.to_rtr(1, qps, &keep);
        let request = Hello { features, ..hello(&pair, qps, 7, 7) };
        let conn = ask(&mut pair, 1, &request);
        let reply = said(&mut pair, 1, conn);
        let at = reply.windows(4).position(|four| four == b"QUIP").expect("a hello");
        assert_eq!(reply[at + 5..at + 7], [REJECT, MISMATCH], "{features:?}");
        assert!(is_closed(&mut pair, 1, conn), "{features:?}");
    }
}

/// What this side asks for does not count among what others ask of it.
#[test]
fn own_requests_take_no_room_from_others() {
    let gid = |last| Gid::from(IpAddr::from([10, 0, 0, last]));
    let mut pair = Pair::new(STREAM);
    let config = Config { gid: gid(1), max_half_open: 2, ..Config::default() };
    pair.hosts[0].adapter = Adapter::new(config);
    let adapter = &mut pair.hosts[0].adapter;
    pair.hosts[0].pd = adapter.alloc_pd().unwrap();
    pair.hosts[0].cq = adapter.create_cq(64, None, 0).unwrap().0;
    for _ in 0..4 {
        let qps = [pair.hosts[0].qp(), pair.hosts[1].qp()];
        pair.to_rtr(0, qps, &keep);
        let Some(Action::Connect { conn, .. }) = pair.hosts[0].adapter.poll_action() else {
            panic!("it does not ask");
        };
        pair.hosts[0].adapter.handle_reached_stream(pair.now, conn);
        let limit = pair.hosts[0].adapter.poll_action();
        assert!(matches!(limit, Some(Action::LimitSilence { .. })), "{limit:?}");
    }
    let adapter = &mut pair.hosts[0].adapter;
    let stranger = adapter.handle_accepted(pair.now, "10.0.0.7:7".parse().unwrap()).unwrap();
    adapter.handle_accepted(pair.now, "10.0.0.8:7".parse().unwrap()).unwrap();
    assert!(!is_closed(&mut pair, 0, stranger));
    pair.hosts[0].adapter.handle_timeout(pair.now.after(HOURS));
}
