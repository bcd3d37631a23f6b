//! Every state against every message and every call: nothing panics, and nothing but what the
//! protocol says comes of it.

use std::net::SocketAddr;

use crate::common::{Pair, SECOND};
use quipu_cm::{Cm, Config, EventKind, IdKey, Param, PortSpace, Refusal, StreamKey, gid_of};
use quipu_wire::cm::{Frame, Offer, Setup};

/// How far a connection got, with what brings it there.
type Reach = fn(&mut Pair) -> (IdKey, IdKey);

const STATES: [(&str, Reach); 6] = [
    ("requested", Pair::requested),
    ("accepted", Pair::accepted),
    ("established", Pair::established),
    ("disconnecting", |pair| {
        let ids = pair.established();
        pair.nodes[0].cm.disconnect(pair.now, ids.0).unwrap();
        ids
    }),
    ("disconnected", |pair| {
        let ids = pair.established();
        pair.nodes[0].cm.disconnect(pair.now, ids.0).unwrap();
        pair.run();
        pair.expect(1, EventKind::Disconnected);
        ids
    }),
    ("time wait", |pair| {
        let ids = pair.established();
        pair.nodes[0].cm.disconnect(pair.now, ids.0).unwrap();
        pair.run();
        pair.nodes[1].cm.disconnect(pair.now, ids.1).unwrap();
        pair.run();
        pair.expect(0, EventKind::Disconnected);
        pair.expect(1, EventKind::Disconnected);
        ids
    }),
];

const FRAMES: [Frame; 4] =
    [Frame::ReadyToUse, Frame::Reject(28), Frame::Disconnect, Frame::Disconnected];

/// The stream of a side: there is only the one.
fn streams() -> impl Iterator<Item = StreamKey> {
    (0..2).flat_map(|index| (0..2).map(move |generation| StreamKey::new(index, generation)))
}

#[test]
fn every_frame_in_every_state() {
    use EventKind::*;
    let ends = [ConnectError, Unreachable, Rejected, Disconnected];
    for (name, reach) in STATES {
        for side in 0..2 {
            for frame in FRAMES {
                let mut pair = Pair::default();
                let ids = <[_; 2]>::from(reach(&mut pair));
                for stream in streams() {
                    let now = pair.now;
                    pair.nodes[side].cm.handle_bytes(now, stream, &frame.to_bytes());
                }
                pair.pass(100 * SECOND);
                let mut count = 0;
                while let Some(event) = pair.event(side) {
                    assert_eq!(event.id, ids[side]);
                    count += usize::from(ends.contains(&event.kind));
                }
                assert!(count <= 1, "{name} {side} {frame:?}: an end comes once");
                for (node, id) in [(0, ids[0]), (1, ids[1])] {
                    pair.nodes[node].cm.destroy_id(id).unwrap();
                }
                pair.run();
                for node in &pair.nodes {
                    assert_eq!((node.cm.load().streams, node.cm.load().deadlines), (0, 0));
                }
            }
        }
    }
}

#[test]
fn frames_that_have_no_place_end_the_connection() {
    // (state, side, frame, the event it makes)
    use EventKind::{ConnectError, Disconnected, Rejected};
    let cases = [
        (1, 0, Frame::ReadyToUse, Some(ConnectError)),
        (1, 0, Frame::Disconnected, Some(ConnectError)),
        (1, 0, Frame::Disconnect, None),
        (1, 1, Frame::Disconnected, Some(ConnectError)),
        (1, 1, Frame::Disconnect, Some(ConnectError)),
        (1, 1, Frame::Reject(9), Some(Rejected)),
        (2, 0, Frame::ReadyToUse, Some(Disconnected)),
        (2, 1, Frame::ReadyToUse, None),
        (2, 0, Frame::Disconnected, Some(Disconnected)),
        (2, 1, Frame::Reject(28), Some(Disconnected)),
        (2, 1, Frame::Disconnect, Some(Disconnected)),
        (4, 1, Frame::Disconnect, None),
    ];
    for (state, side, frame, expected) in cases {
        let mut pair = Pair::default();
        (STATES[state].1)(&mut pair);
        for stream in streams() {
            let now = pair.now;
            pair.nodes[side].cm.handle_bytes(now, stream, &frame.to_bytes());
        }
        let event = pair.event(side).map(|event| event.kind);
        assert_eq!(event, expected, "{} {side} {frame:?}", STATES[state].0);
    }
}

#[test]
fn every_call_in_every_state() {
    type Call = fn(&mut Pair, usize, IdKey) -> bool;
    let calls: [(&str, Call); 9] = [
        ("connect", |p, n, id| p.nodes[n].cm.connect(p.now, id, &Param::default()).is_ok()),
        ("accept", |p, n, id| p.nodes[n].cm.accept(p.now, id, Some(&Param::default())).is_ok()),
        ("rtu", |p, n, id| p.nodes[n].cm.accept(p.now, id, None).is_ok()),
        ("reject", |p, n, id| p.nodes[n].cm.reject(id, Refusal::Consumer, &[]).is_ok()),
        ("disconnect", |p, n, id| p.nodes[n].cm.disconnect(p.now, id).is_ok()),
        ("establish", |p, n, id| p.nodes[n].cm.establish(id).is_ok()),
        ("listen", |p, n, id| p.nodes[n].cm.listen(id, 0).is_ok()),
        ("bind", |p, n, id| p.nodes[n].cm.bind(id, quipu_cm::ANY).is_ok()),
        ("route", |p, n, id| p.nodes[n].cm.resolve_route(id).is_ok()),
    ];
    // What each side may do in each state.
    let allowed: [[&[&str]; 2]; 6] = [
        [&["disconnect"], &["accept", "reject", "disconnect"]],
        [&["accept", "rtu", "reject", "disconnect", "establish"], &["disconnect", "establish"]],
        [&["disconnect"], &["disconnect"]],
        [&["disconnect"], &["disconnect"]],
        [&["disconnect"], &["disconnect"]],
        [&["disconnect"], &["disconnect"]],
    ];
    for ((state, reach), allowed) in STATES.into_iter().zip(allowed) {
        for side in 0..2 {
            for (name, call) in calls {
                let mut pair = Pair::default();
                let ids = <[_; 2]>::from(reach(&mut pair));
                let done = call(&mut pair, side, ids[side]);
                assert_eq!(done, allowed[side].contains(&name), "{state} {side} {name}");
                pair.pass(100 * SECOND);
                pair.nodes[side].cm.destroy_id(ids[side]).unwrap();
                pair.run();
            }
        }
    }
}

#[test]
fn replies_that_are_none_fail_the_connection() {
    use quipu_iwarp::{Params, Responder};
    let offer = Offer { path_mtu: 5, ..Offer::default() };
    let replies = [
        (true, vec![], EventKind::ConnectError, -71),
        (true, b"RDMA".to_vec(), EventKind::ConnectError, -71),
        (true, Setup::Request(offer, &[]).to_bytes(), EventKind::ConnectError, -71),
        (true, Setup::Reject(28, &[]).to_bytes(), EventKind::ConnectError, -71),
        (false, vec![], EventKind::Rejected, 28),
        (false, b"a plain adapter".to_vec(), EventKind::Rejected, 28),
        (false, Setup::Reject(9, &[]).to_bytes(), EventKind::Rejected, 9),
        (false, Setup::Reply(offer, &[]).to_bytes(), EventKind::Rejected, 28),
    ];
    for (accept, data, kind, status) in replies {
        let mut pair = Pair { hang: true, ..Pair::default() };
        let id = pair.resolve(quipu_cm::PortSpace::Tcp, 5000);
        pair.nodes[0].cm.connect(1, id, &Param::default()).unwrap();
        let Some(quipu_cm::Action::Connect { stream, first, .. }) = pair.nodes[0].cm.poll_action()
        else {
            panic!("no connection");
        };
        let mut responder = Responder::new();
        assert!(responder.handle(&first).unwrap().1.is_some());
        if accept {
            responder.accept(Params::default(), &data).unwrap();
        } else {
            responder.reject(&data).unwrap();
        }
        let mut out = [0; 600];
        let len = responder.poll_transmit(&mut out);
        for byte in &out[..len] {
            pair.nodes[0].cm.handle_bytes(1, stream, std::slice::from_ref(byte));
        }
        let event = pair.expect(0, kind);
        assert_eq!((event.id, event.status), (id, status));
        assert_eq!(pair.nodes[0].cm.load().streams, 0);
    }
}

/// As with the kernel's rdma_cm: binding to the loopback names no device, a peer does.
#[test]
fn the_loopback_is_of_no_device_that_has_another_address() {
    let has_device = |pair: &Pair, id| pair.nodes[0].cm.route(id).unwrap().has_device;
    let at = |ip: &str| SocketAddr::new(ip.parse().unwrap(), 7000);
    for (ip, named) in
        [("10.0.0.1", true), ("127.0.0.1", false), ("::1", false), ("0.0.0.0", false)]
    {
        let mut pair = Pair::default();
        let [bound, listener] = [pair.id(0, PortSpace::Tcp), pair.id(0, PortSpace::Tcp)];
        let cm = &mut pair.nodes[0].cm;
        cm.bind(bound, at(ip)).unwrap();
        cm.bind(listener, at(ip)).unwrap();
        cm.listen(listener, 1).unwrap();
        assert_eq!(cm.init_params(bound).is_ok(), named, "{ip}");
        assert_eq!([bound, listener].map(|id| has_device(&pair, id)), [named; 2], "{ip}");
    }
    let mut pair = Pair::default();
    let id = pair.id(0, PortSpace::Tcp);
    let cm = &mut pair.nodes[0].cm;
    cm.bind(id, at("127.0.0.1")).unwrap();
    cm.resolved(id, at("127.0.0.1"), Err(113)).unwrap();
    assert!(!has_device(&pair, id), "no way, no device");
    pair.nodes[0].cm.resolved(id, at("127.0.0.1"), Ok(at("127.0.0.1"))).unwrap();
    assert!(has_device(&pair, id));
}

#[test]
fn the_loopback_is_of_the_device_whose_address_it_is() {
    let address = SocketAddr::from(([127, 0, 0, 1], 7000));
    let mut cm = Cm::new(Config { gid: gid_of(address.ip()), ..Config::default() });
    let channel = cm.create_channel();
    let id = cm.create_id(channel, PortSpace::Tcp, crate::common::RC, 1).unwrap();
    cm.bind(id, address).unwrap();
    assert!(cm.route(id).unwrap().has_device);
}
