//! Event channels, cookies, counts, groups.

use crate::common::{Pair, UD};
use quipu_cm::{CallError, Event, EventKind, Param, PortSpace};

#[test]
fn identifiers_take_their_events_to_another_channel() {
    let mut pair = Pair::default();
    let cm = &mut pair.nodes[0].cm;
    let [a, b] = [pair.nodes[0].channel, cm.create_channel()];
    let [first, second] = [1, 2].map(|cookie| cm.create_id(a, PortSpace::Tcp, 2, cookie).unwrap());
    let at = |port| std::net::SocketAddr::from(([10, 0, 0, 1], port));
    for id in [first, second] {
        cm.resolved(id, at(1), Ok(at(2))).unwrap();
        assert_eq!(cm.resolved(id, at(1), Ok(at(2))), Err(CallError::WrongState), "it is");
    }
    cm.resolve_route(first).unwrap();
    assert_eq!((cm.waiting(a), cm.waiting(b)), (3, 0));
    assert_eq!(cm.take_event(a).unwrap().unwrap().cookie, 1);
    assert_eq!(cm.migrate(first, b), Ok(1));
    assert_eq!((cm.waiting(a), cm.waiting(b)), (1, 1));
    assert_eq!(cm.migrate(first, a), Ok(1));
    assert_eq!(cm.migrate(first, a), Ok(1), "to where it is");
    assert_eq!((cm.waiting(a), cm.waiting(b)), (2, 0));
    cm.set_cookie(first, 77).unwrap();
    let order: Vec<u64> =
        std::iter::from_fn(|| cm.take_event(a).unwrap()).map(|e| e.cookie).collect();
    assert_eq!(order, [2, 77]);
    assert_eq!(cm.destroy_channel(a), Err(CallError::Busy));
    assert_eq!((cm.destroy_id(first), cm.destroy_id(second)), (Ok(2), Ok(1)));
    assert_eq!((cm.destroy_channel(a), cm.destroy_channel(b)), (Ok(()), Ok(())));
    assert_eq!(cm.take_event(a), Err(CallError::NoSuchObject));
}

#[test]
fn requests_that_nobody_took_move_with_their_listener() {
    let mut pair = Pair::default();
    let listener = pair.listen(PortSpace::Tcp, 4000, 8);
    let askers = [(); 3].map(|()| pair.connect(4000, &Param::default()));
    let (a, cm) = (pair.nodes[1].channel, &mut pair.nodes[1].cm);
    let b = cm.create_channel();
    let first = cm.take_event(a).unwrap().unwrap();
    assert_eq!((cm.waiting(a), cm.migrate(listener, b)), (2, Ok(1)));
    assert_eq!((cm.waiting(a), cm.waiting(b)), (0, 2));
    let [second, third] = [(); 2].map(|()| cm.take_event(b).unwrap().unwrap());
    assert_eq!(cm.destroy_channel(a), Err(CallError::Busy), "of the one that was taken there");
    // What else comes to a request comes where the request did.
    let taken = [(first, a), (second, b), (third, b)];
    for (asker, (request, channel)) in askers.into_iter().zip(taken) {
        assert_eq!(request.kind, EventKind::ConnectRequest);
        let now = pair.now;
        pair.nodes[1].cm.accept(now, request.id, Some(&Param::default())).unwrap();
        pair.run();
        assert_eq!(pair.expect(0, EventKind::ConnectResponse).id, asker);
        pair.nodes[0].cm.accept(now, asker, None).unwrap();
        pair.run();
        let cm = &mut pair.nodes[1].cm;
        let told = cm.take_event(channel).unwrap().unwrap();
        assert_eq!((told.kind, told.id), (EventKind::Established, request.id));
        assert_eq!((cm.waiting(a), cm.waiting(b)), (0, 0));
        cm.destroy_id(request.id).unwrap();
        pair.run();
        pair.expect(0, EventKind::Disconnected);
    }
    let cm = &mut pair.nodes[1].cm;
    assert_eq!((cm.destroy_channel(a), cm.destroy_id(listener)), (Ok(()), Ok(3)));
    assert_eq!(cm.destroy_channel(b), Ok(()));
}

#[test]
fn events_of_a_destroyed_identifier_are_not_handed_out() {
    let mut pair = Pair::default();
    let cm = &mut pair.nodes[0].cm;
    let channel = pair.nodes[0].channel;
    let at = std::net::SocketAddr::from(([10, 0, 0, 1], 1));
    // The order of a channel that is busy for long does not grow with those who left.
    let keeper = cm.create_id(channel, PortSpace::Tcp, 2, 9).unwrap();
    cm.resolved(keeper, at, Ok(at)).unwrap();
    for _ in 0..10_000 {
        let id = cm.create_id(channel, PortSpace::Tcp, 2, 1).unwrap();
        cm.resolved(id, at, Ok(at)).unwrap();
        assert_eq!(cm.destroy_id(id), Ok(0));
    }
    assert_eq!(cm.waiting(channel), 1);
    assert_eq!(cm.take_event(channel).unwrap().unwrap().id, keeper);
    assert_eq!(cm.take_event(channel), Ok(None));
}

#[test]
fn an_address_that_cannot_be_reached() {
    let mut pair = Pair::default();
    let id = pair.id(0, PortSpace::Tcp);
    let at = std::net::SocketAddr::from(([10, 0, 0, 9], 1));
    pair.nodes[0].cm.resolved(id, at, Err(101)).unwrap();
    assert_eq!(pair.expect(0, EventKind::AddrError).status, -101);
    assert!(pair.nodes[0].cm.resolve_route(id).is_err());
    // Another try is allowed.
    pair.nodes[0].cm.resolved(id, at, Ok(at)).unwrap();
    pair.expect(0, EventKind::AddrResolved);
}

#[test]
fn programs_write_events_in_any_state() {
    let mut pair = Pair::default();
    let channel = pair.nodes[0].channel;
    let cm = &mut pair.nodes[0].cm;
    let id = cm.create_id(channel, PortSpace::Tcp, 2, 5).unwrap();
    cm.write_event(id, EventKind::User, -3, u64::MAX).unwrap();
    let at = std::net::SocketAddr::from(([10, 0, 0, 1], 1));
    cm.resolved(id, at, Ok(at)).unwrap();
    cm.write_event(id, EventKind::AddrinfoResolved, 0, 0).unwrap();
    let event = cm.take_event(channel).unwrap().unwrap();
    assert_eq!((event.kind, event.status), (EventKind::User, -3));
    assert_eq!((event.id, event.cookie, event.arg), (id, 5, u64::MAX));
    for kind in [EventKind::AddrResolved, EventKind::AddrinfoResolved] {
        let event = cm.take_event(channel).unwrap().unwrap();
        assert_eq!((event.kind, event.arg), (kind, 0));
    }
    for kind in [EventKind::Established, EventKind::Disconnected, EventKind::ConnectRequest] {
        assert_eq!(cm.write_event(id, kind, 0, 0), Err(CallError::Invalid("the event")));
    }
    cm.write_event(id, EventKind::User, 0, 0).unwrap();
    assert_eq!(cm.destroy_id(id), Ok(3), "the fourth vanishes");
    assert_eq!(cm.waiting(channel), 0);
    assert_eq!(cm.write_event(id, EventKind::User, 0, 0), Err(CallError::NoSuchObject));
}

#[test]
fn groups_are_joined_by_datagram_identifiers_with_a_device() {
    let mut pair = Pair::default();
    let channel = pair.nodes[0].channel;
    let cm = &mut pair.nodes[0].cm;
    let id = cm.create_id(channel, PortSpace::Udp, UD, 5).unwrap();
    let (v4, v6) = ("239.1.2.3".parse().unwrap(), "ff0e::1234".parse().unwrap());
    assert_eq!(cm.join(id, v4, 1), Err(CallError::WrongState), "no device");
    cm.bind(id, "10.0.0.1:7".parse().unwrap()).unwrap();
    for wrong in ["0.0.0.0", "::", "10.0.0.1"] {
        let wrong = wrong.parse().unwrap();
        assert!(matches!(cm.join(id, wrong, 1), Err(CallError::Invalid(_))));
    }
    cm.join(id, v4, 11).unwrap();
    assert!(cm.join(id, v4, 11).is_err(), "a membership of that name");
    cm.join(id, v6, 13).unwrap();
    let event: Event = cm.take_event(channel).unwrap().unwrap();
    assert_eq!((event.kind, event.cookie, event.multicast), (EventKind::MulticastJoin, 5, 11));
    assert_eq!((event.peer.qpn, event.peer.qkey), (0xff_ffff, 0x0123_4567));
    let mapped = [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 239, 1, 2, 3];
    assert_eq!(event.peer.path.unwrap().dgid, mapped);
    // The same group once more: a membership of its own.
    cm.join(id, v4, 12).unwrap();
    assert_eq!(cm.leave(id, 11), Ok(1));
    assert_eq!(cm.leave(id, 11), Err(CallError::NoSuchObject));
    assert_eq!(cm.waiting(channel), 2);
    assert_eq!(cm.leave(id, 12), Ok(0));
    assert_eq!(cm.waiting(channel), 1);
    assert_eq!(cm.leave(id, 13), Ok(0), "its event was not taken, and vanishes");
    assert_eq!(cm.waiting(channel), 0);
    assert_eq!(cm.take_event(channel), Ok(None));
    let other = cm.create_channel();
    assert_eq!(cm.migrate(id, other), Ok(1), "events of groups count for the identifier, too");
    assert_eq!(cm.destroy_id(id), Ok(1));

    let connected = cm.create_id(channel, PortSpace::Tcp, 2, 5).unwrap();
    cm.bind(connected, "10.0.0.1:7".parse().unwrap()).unwrap();
    assert_eq!(cm.join(connected, v4, 1), Err(CallError::WrongState));
}

#[test]
fn a_group_that_is_left_takes_its_event_out_of_the_order() {
    let mut pair = Pair::default();
    let a = pair.nodes[0].channel;
    let cm = &mut pair.nodes[0].cm;
    let b = cm.create_channel();
    let [id, other] = [5, 6].map(|cookie| {
        let id = cm.create_id(a, PortSpace::Udp, UD, cookie).unwrap();
        cm.bind(id, "10.0.0.1:7".parse().unwrap()).unwrap();
        id
    });
    let group = "239.1.2.3".parse().unwrap();
    cm.join(id, group, 1).unwrap();
    cm.write_event(other, EventKind::User, 0, 1).unwrap();
    for cookie in 2..1000 {
        cm.join(id, group, cookie).unwrap();
        assert_eq!(cm.leave(id, cookie), Ok(0));
    }
    cm.write_event(id, EventKind::User, 0, 2).unwrap();
    cm.join(id, group, 1000).unwrap();
    assert_eq!(cm.leave(id, 1), Ok(0));
    assert_eq!(cm.waiting(a), 3);
    // The first to come is the first to be told, though an earlier one of the other identifier is gone.
    assert_eq!(cm.take_event(a).unwrap().unwrap().arg, 1);
    cm.write_event(other, EventKind::User, 0, 3).unwrap();
    cm.migrate(id, b).unwrap();
    assert_eq!((cm.waiting(a), cm.waiting(b)), (1, 2));
    let events: Vec<_> = std::iter::from_fn(|| cm.take_event(b).unwrap())
        .map(|event| (event.kind, event.arg, event.multicast))
        .collect();
    assert_eq!(events, [(EventKind::User, 2, 0), (EventKind::MulticastJoin, 0, 1000)]);
    assert_eq!(cm.take_event(a).unwrap().unwrap().arg, 3);
    assert_eq!((cm.waiting(a), cm.waiting(b)), (0, 0));
}

#[test]
fn ten_thousand_connections_come_and_go() {
    let mut pair = Pair::default();
    pair.listen(PortSpace::Tcp, 5000, 0);
    for _ in 0..10 {
        let ids: Vec<_> = (0..1000).map(|_| pair.connect(5000, &Param::default())).collect();
        let now = pair.now;
        let mut children = Vec::new();
        while let Some(event) = pair.event(1) {
            pair.nodes[1].cm.accept(now, event.id, Some(&Param::default())).unwrap();
            children.push(event.id);
        }
        pair.run();
        while let Some(event) = pair.event(0) {
            pair.nodes[0].cm.accept(now, event.id, None).unwrap();
        }
        pair.run();
        for (node, ids) in [(0, ids), (1, children)] {
            assert_eq!(ids.len(), 1000);
            for id in ids {
                pair.nodes[node].cm.destroy_id(id).unwrap();
            }
        }
        pair.run();
        let loads = pair.nodes.each_ref().map(|node| node.cm.load());
        assert_eq!((loads[0].ids, loads[1].ids), (0, 1));
        assert_eq!(loads.map(|load| load.streams + load.deadlines), [0, 0]);
    }
}
