//! What a plan of faults does on purpose: events in place of what a call would have led to, and the end of
//! the device.

use crate::common::Pair;
use quipu_cm::{CallError, EventKind, IdKey, Param, PortSpace};
use quipu_iwarp::{Initiator, Params};
use quipu_wire::cm::{Lookup, Offer, Setup};

const CONNECTING: [EventKind; 3] =
    [EventKind::ConnectError, EventKind::Unreachable, EventKind::Rejected];

/// An identifier of node 0 that has an address, and no route yet.
fn addressed(pair: &mut Pair) -> IdKey {
    let id = pair.id(0, PortSpace::Tcp);
    let [src, dst] = [0, 1].map(|node: usize| pair.nodes[node].address);
    pair.nodes[0].cm.resolved(id, dst, Ok(src)).unwrap();
    pair.expect(0, EventKind::AddrResolved);
    id
}

#[test]
fn events_come_only_where_the_call_would_have_been_taken() {
    let mut pair = Pair::default();
    let idle = pair.id(0, PortSpace::Tcp);
    let addressed = addressed(&mut pair);
    let (active, passive) = pair.established();
    let cm = &mut pair.nodes[0].cm;
    for kind in CONNECTING.into_iter().chain([EventKind::RouteError]) {
        assert_eq!(cm.strike(idle, kind, -1), Err(CallError::WrongState), "{kind:?}");
        assert_eq!(cm.strike(active, kind, -1), Err(CallError::WrongState), "{kind:?}");
    }
    for kind in CONNECTING.into_iter().chain([EventKind::AddrError]) {
        assert_eq!(cm.strike(addressed, kind, -1), Err(CallError::WrongState), "{kind:?}");
    }
    assert_eq!(cm.strike(active, EventKind::AddrError, -1), Err(CallError::WrongState));
    assert!(matches!(cm.strike(idle, EventKind::Established, 0), Err(CallError::Invalid(_))));
    cm.strike(idle, EventKind::AddrError, -113).unwrap();
    assert_eq!(pair.expect(0, EventKind::AddrError).status, -113);
    let cm = &mut pair.nodes[0].cm;
    cm.destroy_id(idle).unwrap();
    assert_eq!(cm.strike(idle, EventKind::AddrError, -1), Err(CallError::NoSuchObject));
    pair.expect_nothing();
    let cm = &mut pair.nodes[0].cm;
    cm.strike(addressed, EventKind::RouteError, -110).unwrap();
    cm.strike(active, EventKind::AddrChange, 0).unwrap();
    assert_eq!(pair.expect(0, EventKind::RouteError).status, -110);
    assert_eq!(pair.expect(0, EventKind::AddrChange).id, active);
    // The connection stands as before.
    let now = pair.now;
    pair.nodes[1].cm.disconnect(now, passive).unwrap();
    pair.run();
    pair.expect(0, EventKind::Disconnected);
}

#[test]
fn a_failed_answer_is_a_refusal_to_the_peer() {
    for kind in CONNECTING {
        let mut pair = Pair::default();
        let (active, passive) = pair.requested();
        pair.nodes[1].cm.strike(passive, kind, -5).unwrap();
        pair.run();
        assert_eq!(pair.expect(1, kind).status, -5);
        assert_eq!(pair.expect(0, EventKind::Rejected).id, active);
        let again = pair.nodes[1].cm.accept(pair.now, passive, Some(&Param::default()));
        assert_eq!(again, Err(CallError::WrongState));
        pair.expect_nothing();
    }
}

#[test]
fn a_failed_group_can_be_left_and_joined() {
    let mut pair = Pair::default();
    let id = pair.id(0, PortSpace::Udp);
    let group = "239.1.2.3".parse().unwrap();
    let cm = &mut pair.nodes[0].cm;
    assert_eq!(cm.strike_join(id, group, 9, -113), Err(CallError::WrongState), "no device");
    cm.bind(id, "10.0.0.1:0".parse().unwrap()).unwrap();
    cm.strike_join(id, group, 9, -113).unwrap();
    assert!(matches!(cm.join(id, group, 9), Err(CallError::Invalid(_))), "it is in the list");
    let event = pair.expect(0, EventKind::MulticastError);
    assert_eq!((event.status, event.multicast), (-113, 9));
    let cm = &mut pair.nodes[0].cm;
    assert_eq!(cm.leave(id, 9), Ok(1), "the event counts as the group's");
    cm.strike_join(id, group, 9, -113).unwrap();
    assert_eq!(cm.leave(id, 9), Ok(0), "an event that was not taken vanishes");
    cm.join(id, group, 9).unwrap();
    pair.expect(0, EventKind::MulticastJoin);
    pair.expect_nothing();
}

#[test]
fn everything_of_a_device_ends_with_it() {
    let mut pair = Pair::default();
    let unbound = pair.id(1, PortSpace::Tcp);
    let (active, passive) = pair.established();
    let waiting = pair.connect(5000, &Param::default());
    let wildcard = pair.id(1, PortSpace::Tcp);
    pair.nodes[1].cm.bind(wildcard, "0.0.0.0:6000".parse().unwrap()).unwrap();
    pair.nodes[1].cm.listen(wildcard, 0).unwrap();
    let stranger = pair.stranger(wildcard, "10.0.0.9:1").unwrap();
    pair.nodes[1].cm.handle_device_removed();
    pair.run();
    // The listener and the accepted end; the request that was not taken is no more.
    let mut told = [(); 2].map(|()| pair.expect(1, EventKind::DeviceRemoval).id);
    told.sort_by_key(|id| id.index());
    assert!(told.contains(&passive) && !told.contains(&wildcard) && !told.contains(&unbound));
    // Peers see their connections end.
    assert_eq!(pair.expect(0, EventKind::Disconnected).id, active);
    assert_eq!(pair.event(0).map(|event| event.id), Some(waiting));
    pair.expect_nothing();
    // Nobody is heard any more: neither who has connected before, nor who does now.
    assert_eq!(pair.stranger(wildcard, "10.0.0.9:2"), None);
    let offer = Offer { port_space: 0x0106, qp_type: 2, path_mtu: 5, ..Offer::default() };
    let request = Setup::Request(offer, &[]).to_bytes();
    let mut initiator =
        Initiator::new(Params { revision: 1, crc: true, enhanced: None }, &request).unwrap();
    let mut out = [0; 600];
    let len = initiator.poll_transmit(&mut out);
    pair.say(stranger, &out[..len]);
    assert!(!pair.is_open(stranger));
    pair.expect_nothing();
    let now = pair.now;
    pair.nodes[1].cm.disconnect(now, passive).unwrap();
    for id in told.into_iter().chain([unbound, wildcard]) {
        pair.nodes[1].cm.destroy_id(id).unwrap();
    }
}

#[test]
fn look_ups_end_with_the_device() {
    let mut pair = Pair::default();
    let id = pair.id(1, PortSpace::Udp);
    pair.nodes[1].cm.bind(id, "0.0.0.0:5000".parse().unwrap()).unwrap();
    pair.nodes[1].cm.listen(id, 0).unwrap();
    pair.nodes[1].cm.handle_device_removed();
    let (own, peer) = ("10.0.0.2:5000".parse().unwrap(), "10.0.0.1:9".parse().unwrap());
    let request = Lookup::Request { port_space: 0x111, id: 5, gid: [0; 16], data: &[] };
    pair.nodes[1].cm.handle_datagram(id, own, peer, &request.to_bytes());
    pair.expect_nothing();
}
