//! Look-ups of datagram services over a network that loses, doubles and delays.

use crate::common::{Datagram, Pair, SECOND};
use quipu_cm::{Config, EventKind, IdKey, Param, PortSpace, Refusal};
use quipu_wire::cm::{Lookup, SIDR_REQ_LEN};

fn with_fate(fate: impl FnMut(usize) -> usize + 'static) -> Pair {
    Pair { fate: Box::new(fate), ..Pair::default() }
}

fn asking(pair: &mut Pair) -> IdKey {
    let id = pair.resolve(PortSpace::Udp, 5000);
    let param = Param { private_data: b"who?".to_vec(), ..Param::default() };
    pair.nodes[0].cm.connect(pair.now, id, &param).unwrap();
    id
}

fn answer(pair: &mut Pair) -> IdKey {
    let request = pair.expect(1, EventKind::ConnectRequest);
    assert_eq!((&request.private_data[..5], request.private_data.len()), (&b"who?\0"[..], 180));
    assert_eq!(request.peer.path.unwrap().dgid[15], 1);
    let param = Param { qpn: 9, qkey: 5, private_data: b"me".to_vec(), ..Param::default() };
    pair.nodes[1].cm.accept(pair.now, request.id, Some(&param)).unwrap();
    request.id
}

fn found(pair: &mut Pair) {
    let event = pair.expect(0, EventKind::Established);
    assert_eq!((event.peer.qpn, event.peer.qkey, event.status), (9, 5, 0));
    assert_eq!(event.peer.path.unwrap().dgid[15], 2);
    assert_eq!((&event.private_data[..3], event.private_data.len()), (&b"me\0"[..], 136));
}

#[test]
fn whatever_the_network_does_the_program_is_asked_once_and_answered_once() {
    // Each datagram is lost, comes once or twice, in every combination for the first six.
    for fates in 0..729_usize {
        let mut pair = with_fate(move |n| {
            let digit = u32::try_from(n - 1).unwrap();
            if digit < 6 { fates / 3_usize.pow(digit) % 3 } else { 1 }
        });
        pair.listen(PortSpace::Udp, 5000, 0);
        asking(&mut pair);
        pair.run();
        for _ in 0..70 {
            if pair.nodes[1].cm.waiting(pair.nodes[1].channel) == 0 {
                pair.pass(SECOND / 10);
            }
        }
        answer(&mut pair);
        pair.pass(20 * SECOND);
        found(&mut pair);
        pair.expect_nothing();
        assert_eq!(pair.nodes[0].cm.load().deadlines, 0);
    }
}

#[test]
fn a_look_up_that_nobody_answers_is_given_up() {
    let mut pair = with_fate(|_| 0);
    pair.listen(PortSpace::Udp, 5000, 0);
    let begin = pair.now;
    asking(&mut pair);
    pair.pass(12 * SECOND);
    pair.expect_nothing();
    pair.pass(10 * SECOND);
    assert_eq!(pair.expect(0, EventKind::Unreachable).status, -110);
    assert!(pair.now - begin < 30 * SECOND);
    pair.expect_nothing();
}

#[test]
fn a_device_that_is_not_shown_has_no_services() {
    let mut pair = Pair::new(Config { takes_quipu: false, ..Config::default() });
    pair.listen(PortSpace::Udp, 5000, 0);
    asking(&mut pair);
    pair.run();
    assert_eq!(pair.expect(0, EventKind::Unreachable).status, 1);
    pair.expect_nothing();
}

#[test]
fn the_program_may_take_its_time() {
    let mut pair = Pair::default();
    pair.listen(PortSpace::Udp, 5000, 0);
    asking(&mut pair);
    pair.pass(5 * SECOND);
    answer(&mut pair);
    pair.run();
    found(&mut pair);
    pair.expect_nothing();
}

#[test]
fn an_answer_is_remembered_after_its_identifier_is_gone() {
    // The first answer is lost.
    let mut pair = with_fate(|n| usize::from(n != 2));
    let listener = pair.listen(PortSpace::Udp, 5000, 0);
    asking(&mut pair);
    pair.run();
    let child = answer(&mut pair);
    pair.nodes[1].cm.destroy_id(child).unwrap();
    pair.pass(SECOND);
    found(&mut pair);
    pair.expect_nothing();
    assert_eq!(pair.nodes[1].cm.destroy_id(listener), Ok(1));
}

#[test]
fn refusals_and_wrong_services() {
    let mut pair = Pair::default();
    pair.listen(PortSpace::Udp, 5000, 0);
    asking(&mut pair);
    pair.run();
    let request = pair.expect(1, EventKind::ConnectRequest);
    pair.nodes[1].cm.reject(request.id, Refusal::Consumer, b"no").unwrap();
    pair.run();
    let refused = pair.expect(0, EventKind::Unreachable);
    assert_eq!((refused.status, &refused.private_data[..3]), (2, &b"no\0"[..]));

    // A request that is destroyed is refused, too.
    let mut pair = Pair::default();
    pair.listen(PortSpace::Udp, 5000, 0);
    asking(&mut pair);
    pair.run();
    let request = pair.expect(1, EventKind::ConnectRequest);
    pair.nodes[1].cm.destroy_id(request.id).unwrap();
    pair.run();
    assert_eq!(pair.expect(0, EventKind::Unreachable).status, 2);

    let mut pair = Pair::default();
    pair.listen(PortSpace::IpOib, 5000, 0);
    asking(&mut pair);
    pair.run();
    assert_eq!(pair.expect(0, EventKind::Unreachable).status, 1);

    let mut pair = Pair::default();
    let id = asking(&mut pair);
    for _ in 0..2 {
        pair.nodes[0].cm.handle_refused(id);
    }
    pair.expect_nothing();
    pair.pass(SECOND / 5);
    pair.nodes[0].cm.handle_refused(id);
    assert_eq!(pair.expect(0, EventKind::Unreachable).status, 1);
}

#[test]
fn forged_answers_are_not_heard() {
    let mut pair = Pair::default();
    pair.listen(PortSpace::Udp, 5000, 0);
    let id = asking(&mut pair);
    let Some(quipu_cm::Action::Datagram { bytes, to, .. }) = pair.nodes[0].cm.poll_action() else {
        panic!("no look-up");
    };
    let Ok(Lookup::Request { id: number, gid, .. }) = Lookup::parse(&bytes) else { panic!() };
    let reply = |id| Lookup::Reply { status: 0, id, qpn: 1, qkey: 1, gid, data: &[] }.to_bytes();
    let local = pair.nodes[0].cm.route(id).unwrap().src.unwrap();
    let cm = &mut pair.nodes[0].cm;
    cm.handle_datagram(id, local, to, &reply(number ^ 1));
    cm.handle_datagram(id, local, "10.0.0.2:5001".parse().unwrap(), &reply(number));
    cm.handle_datagram(id, local, "10.0.0.3:5000".parse().unwrap(), &reply(number));
    cm.handle_datagram(id, local, to, &bytes);
    pair.expect_nothing();
    pair.nodes[0].cm.handle_datagram(id, local, to, &reply(number));
    pair.expect(0, EventKind::Established);
}

#[test]
fn answers_are_heard_however_the_address_was_written() {
    for (asked, heard) in [
        ("[::ffff:10.0.0.2]:5000", "10.0.0.2:5000"),
        ("10.0.0.2:5000", "[::ffff:10.0.0.2]:5000"),
        ("[fe80::2]:5000", "[fe80::2%3]:5000"),
        ("[::1%1]:5000", "[::1]:5000"),
    ] {
        let mut pair = Pair::default();
        let (id, cm) = (pair.id(0, PortSpace::Udp), &mut pair.nodes[0].cm);
        let local = "10.0.0.1:1000".parse().unwrap();
        cm.resolved(id, asked.parse().unwrap(), Ok(local)).unwrap();
        cm.resolve_route(id).unwrap();
        cm.connect(1, id, &Param::default()).unwrap();
        let Some(quipu_cm::Action::Datagram { bytes, .. }) = cm.poll_action() else { panic!() };
        let Ok(Lookup::Request { id: number, gid, .. }) = Lookup::parse(&bytes) else { panic!() };
        let reply = Lookup::Reply { status: 0, id: number, qpn: 1, qkey: 1, gid, data: &[] };
        let heard: std::net::SocketAddr = heard.parse().unwrap();
        let other = std::net::SocketAddr::new(heard.ip(), 5001);
        cm.handle_datagram(id, local, other, &reply.to_bytes());
        for kind in [EventKind::AddrResolved, EventKind::RouteResolved] {
            pair.expect(0, kind);
        }
        pair.expect_nothing();
        pair.nodes[0].cm.handle_datagram(id, local, heard, &reply.to_bytes());
        pair.expect(0, EventKind::Established);
    }
}

#[test]
fn a_flood_of_look_ups_is_bounded_by_the_backlog_and_multiplies_nothing() {
    let mut pair = Pair::default();
    let listener = pair.listen(PortSpace::Udp, 5000, 16);
    let local = pair.nodes[1].cm.route(listener).unwrap().src.unwrap();
    for id in 0..10_000_u32 {
        let from = format!("10.9.{}.{}:7", id >> 8, id & 255).parse().unwrap();
        let question =
            Lookup::Request { port_space: 0x0111, id, gid: [0; 16], data: &[] }.to_bytes();
        pair.nodes[1].cm.handle_datagram(listener, local, from, &question);
        // Too short to be answered at all.
        let short = &question[..SIDR_REQ_LEN - 1];
        pair.nodes[1].cm.handle_datagram(listener, local, from, short);
    }
    assert_eq!(pair.nodes[1].cm.load().ids, 17);
    assert_eq!(pair.nodes[1].cm.waiting(pair.nodes[1].channel), 16);
    assert_eq!(pair.nodes[1].cm.poll_action(), None);
    while let Some(event) = pair.event(1) {
        pair.nodes[1].cm.reject(event.id, Refusal::Consumer, &[1; 136]).unwrap();
    }
    while let Some(action) = pair.nodes[1].cm.poll_action() {
        let quipu_cm::Action::Datagram { bytes, .. } = action else { panic!("{action:?}") };
        assert!(bytes.len() <= SIDR_REQ_LEN);
    }
}

#[test]
fn connections_and_look_ups_do_not_mix() {
    let mut pair = Pair::default();
    pair.listen(PortSpace::Tcp, 5000, 0);
    let (from, to) = ("10.0.0.1:1".parse().unwrap(), 1);
    let question = Lookup::Request { port_space: 0x0106, id: 1, gid: [0; 16], data: &[] };
    pair.datagrams.push_back(Datagram { to, from, bytes: question.to_bytes() });
    pair.run();
    // The world has no UDP socket for it, but a listener is a listener.
    let id = asking(&mut pair);
    assert!(pair.nodes[0].cm.disconnect(1, id).is_err());
    assert!(pair.nodes[0].cm.establish(id).is_err());
}
