//! Connections between two engines in simulated time.

use crate::common::{Pair, RC, SECOND, param};
use quipu_cm::{CallError, EventKind, Loss, Param, PortSpace, Refusal};

#[test]
fn pieces_of_any_size_make_the_same_connection() {
    for piece in (1..100).chain([1000]) {
        let mut pair = Pair { piece, ..Pair::default() };
        let (active, passive) = pair.established();
        let now = pair.now;
        pair.nodes[1].cm.disconnect(now, passive).unwrap();
        pair.run();
        pair.expect(0, EventKind::Disconnected);
        pair.nodes[0].cm.disconnect(now, active).unwrap();
        pair.run();
        pair.expect(1, EventKind::Disconnected);
        pair.pass(2 * SECOND);
        pair.expect(0, EventKind::TimewaitExit);
        pair.expect(1, EventKind::TimewaitExit);
        pair.expect_nothing();
        assert_eq!(pair.nodes.each_ref().map(|node| node.cm.load().streams), [0, 0]);
        assert_eq!(pair.nodes.each_ref().map(|node| node.cm.load().deadlines), [0, 0]);
    }
}

/// A whole life: everything that both programs do, as far as they get.
fn live(pair: &mut Pair) -> [Vec<EventKind>; 2] {
    pair.listen(PortSpace::Tcp, 5000, 0);
    let active = pair.resolve(PortSpace::Tcp, 5000);
    pair.nodes[0].cm.connect(pair.now, active, &param(b"life")).unwrap();
    let mut seen = [Vec::new(), Vec::new()];
    for _ in 0..20 {
        pair.run();
        let now = pair.now;
        for (node, seen) in seen.iter_mut().enumerate() {
            let Some(event) = pair.event(node) else { continue };
            seen.push(event.kind);
            let cm = &mut pair.nodes[node].cm;
            // A call may come too late: the other end is gone, and an event says so.
            let _ = match event.kind {
                EventKind::ConnectRequest => cm.accept(now, event.id, Some(&param(b"yes"))),
                EventKind::ConnectResponse => cm.accept(now, event.id, None),
                EventKind::Established | EventKind::Disconnected => cm.disconnect(now, event.id),
                _ => Ok(()),
            };
        }
    }
    pair.pass(100 * SECOND);
    for (node, seen) in seen.iter_mut().enumerate() {
        while let Some(event) = pair.event(node) {
            seen.push(event.kind);
        }
    }
    seen
}

#[test]
fn a_stream_that_breaks_after_any_byte_ends_in_one_event_on_both_sides() {
    use EventKind::*;
    let mut whole = Pair::default();
    let seen = live(&mut whole);
    assert_eq!(seen[0], [ConnectResponse, Disconnected, TimewaitExit]);
    assert_eq!(seen[1], [ConnectRequest, Established, Disconnected, TimewaitExit]);
    let lengths = whole.sent;
    for (side, length) in lengths.into_iter().enumerate() {
        for cut in 0..length {
            let mut pair = Pair::default();
            pair.cut[side] = Some(cut);
            let seen = live(&mut pair);
            for (node, seen) in seen.iter().enumerate() {
                // Nobody is left in doubt: the last word is an end, and there is one of a kind.
                let ends = [ConnectError, Unreachable, Rejected, Disconnected];
                let count = seen.iter().filter(|kind| ends.contains(kind)).count();
                // Who was asked, and could not accept any more, knows.
                let heard = node == 0 || !matches!(seen[..], [] | [ConnectRequest]);
                assert_eq!(count, usize::from(heard), "{side} {cut} {node} {seen:?}");
                if heard && let Some(last) = seen.last() {
                    assert!(
                        ends.contains(last) || *last == TimewaitExit,
                        "{side} {cut} {node} {seen:?}"
                    );
                }
            }
            for node in &pair.nodes {
                let load = node.cm.load();
                assert_eq!((load.streams, load.half_open, load.deadlines), (0, 0, 0));
            }
        }
    }
}

#[test]
fn a_listener_that_was_narrowed_after_it_was_bound_turns_the_other_family_away() {
    for only in [false, true] {
        let mut pair = Pair::default();
        let channel = pair.nodes[0].channel;
        let cm = &mut pair.nodes[0].cm;
        let id = cm.create_id(channel, PortSpace::Tcp, 0, 0).unwrap();
        cm.bind(id, "[::]:5000".parse().unwrap()).unwrap();
        cm.set_v6_only(id, only).unwrap();
        cm.listen(id, 4).unwrap();
        assert_eq!(cm.set_v6_only(id, only), Err(CallError::WrongState), "it listens");
        let mut takes = |local: &str, peer: &str| {
            let ends = [local, peer].map(|it| it.parse().unwrap());
            cm.handle_accepted(1, id, ends[0], ends[1]).is_some()
        };
        assert!(takes("[fd00::1]:5000", "[fd00::2]:9"));
        assert_eq!(takes("10.0.0.1:5000", "10.0.0.2:9"), !only);
    }
}

#[test]
fn both_may_disconnect_at_once() {
    let mut pair = Pair::default();
    let (active, passive) = pair.established();
    pair.nodes[0].cm.disconnect(pair.now, active).unwrap();
    pair.nodes[1].cm.disconnect(pair.now, passive).unwrap();
    pair.run();
    pair.expect(0, EventKind::Disconnected);
    pair.expect(1, EventKind::Disconnected);
    // Once more, while it is remembered and afterwards: nothing comes of it.
    pair.nodes[0].cm.disconnect(pair.now, active).unwrap();
    pair.pass(2 * SECOND);
    pair.expect(0, EventKind::TimewaitExit);
    pair.expect(1, EventKind::TimewaitExit);
    pair.nodes[0].cm.disconnect(pair.now, active).unwrap();
    pair.pass(2 * SECOND);
    pair.expect_nothing();
}

/// It accepts, sends, has its completions, and leaves before the other program has said that it is ready.
#[test]
fn a_server_may_leave_before_the_connection_stands() {
    for (destroyed, lost) in [(false, false), (true, false), (true, true)] {
        let mut pair = Pair::default();
        let (active, passive) = pair.accepted();
        pair.nodes[1].cm.disconnect(pair.now, passive).unwrap();
        pair.nodes[1].cm.disconnect(pair.now, passive).unwrap();
        if destroyed {
            pair.nodes[1].cm.destroy_id(passive).unwrap();
        }
        pair.run();
        if lost {
            pair.cut_all();
        }
        pair.expect_nothing();
        pair.nodes[0].cm.accept(pair.now, active, None).unwrap();
        pair.run();
        pair.expect(0, EventKind::Disconnected);
        pair.nodes[0].cm.disconnect(pair.now, active).unwrap();
        pair.run();
        if !destroyed {
            pair.expect(1, EventKind::Established);
            pair.expect(1, EventKind::Disconnected);
        }
        pair.pass(2 * SECOND);
        assert_eq!(pair.nodes.each_ref().map(|node| node.cm.load().streams), [0, 0]);
        assert_eq!(pair.nodes.each_ref().map(|node| node.cm.load().deadlines), [0, 0]);
    }
    // Anyone who does not answer the reply any more.
    let mut pair = Pair::default();
    let (active, passive) = pair.accepted();
    pair.nodes[1].cm.disconnect(pair.now, passive).unwrap();
    pair.nodes[0].cm.reject(active, Refusal::Consumer, &[]).unwrap();
    pair.run();
    pair.expect(1, EventKind::Rejected);
}

#[test]
fn the_end_of_a_process_disconnects_its_peer() {
    let mut pair = Pair::default();
    let (active, passive) = pair.established();
    pair.cut_all();
    pair.expect(0, EventKind::Disconnected);
    pair.expect(1, EventKind::Disconnected);
    for (node, id) in [(0, active), (1, passive)] {
        pair.nodes[node].cm.disconnect(pair.now, id).unwrap();
    }
    pair.pass(2 * SECOND);
    pair.expect(0, EventKind::TimewaitExit);
    pair.expect(1, EventKind::TimewaitExit);
    pair.expect_nothing();
}

#[test]
fn a_side_that_goes_in_any_state_tells_the_other() {
    use EventKind::{Disconnected, Rejected};
    // (how far they got, who is destroyed, what the other hears and why)
    type Far = fn(&mut Pair) -> (quipu_cm::IdKey, quipu_cm::IdKey);
    let cases: [(Far, usize, EventKind, i32); 5] = [
        (Pair::requested, 1, Rejected, 28),
        (Pair::accepted, 0, Rejected, 28),
        (Pair::accepted, 1, Rejected, 28),
        (Pair::established, 0, Disconnected, 0),
        (Pair::established, 1, Disconnected, 0),
    ];
    for (far, goes, hears, status) in cases {
        let mut pair = Pair::default();
        let ids = <[_; 2]>::from(far(&mut pair));
        pair.nodes[goes].cm.destroy_id(ids[goes]).unwrap();
        pair.run();
        assert_eq!(pair.expect(1 - goes, hears).status, status);
        pair.expect_nothing();
        assert!(pair.nodes[goes].cm.destroy_id(ids[goes]).is_err());
        pair.nodes[1 - goes].cm.destroy_id(ids[1 - goes]).unwrap();
        assert_eq!(pair.nodes.each_ref().map(|node| node.cm.load().deadlines), [0, 0]);
    }
}

#[test]
fn a_request_whose_sender_went_is_told_and_cannot_be_accepted() {
    for taken in [true, false] {
        let mut pair = Pair::default();
        let listener = pair.listen(PortSpace::Tcp, 5000, 1);
        let active = pair.connect(5000, &Param::default());
        let channel = pair.nodes[1].channel;
        // Anyone who has seen that an event waits finds it.
        assert_eq!(pair.nodes[1].cm.waiting(channel), 1);
        let before = taken.then(|| pair.expect(1, EventKind::ConnectRequest));
        pair.nodes[0].cm.destroy_id(active).unwrap();
        pair.run();
        assert_eq!(pair.nodes[1].cm.waiting(channel), usize::from(!taken));
        if !taken {
            // It has its place among those that wait until it is taken.
            pair.connect(5000, &Param::default());
            assert_eq!(pair.expect(0, EventKind::Rejected).status, 28);
        }
        let id = before.unwrap_or_else(|| pair.expect(1, EventKind::ConnectRequest)).id;
        pair.expect_nothing();
        let cm = &mut pair.nodes[1].cm;
        assert!(cm.init_params(id).is_ok() && cm.connect_params(id).is_ok());
        assert_eq!(cm.accept(1, id, Some(&Param::default())), Err(CallError::WrongState));
        assert_eq!(cm.reject(id, Refusal::Consumer, &[]), Err(CallError::WrongState));
        assert_eq!((cm.poll_action(), cm.destroy_id(id)), (None, Ok(0)));
        pair.connect(5000, &Param::default());
        pair.expect(1, EventKind::ConnectRequest);
        pair.nodes[1].cm.destroy_id(listener).unwrap();
        pair.run();
        assert_eq!(pair.nodes[1].cm.load().streams, 1);
    }
}

#[test]
fn a_full_backlog_refuses_until_requests_are_taken() {
    let mut pair = Pair::default();
    pair.listen(PortSpace::Tcp, 5000, 2);
    for _ in 0..2 {
        pair.connect(5000, &Param::default());
    }
    assert_eq!(pair.event(0), None);
    pair.connect(5000, &Param::default());
    assert_eq!(pair.expect(0, EventKind::Rejected).status, 28);
    pair.expect(1, EventKind::ConnectRequest);
    pair.connect(5000, &Param::default());
    assert_eq!(pair.event(0), None);
}

#[test]
fn a_listener_takes_its_requests_with_it() {
    let mut pair = Pair::default();
    let listener = pair.listen(PortSpace::Tcp, 5000, 0);
    let [first, second] = [(); 2].map(|()| pair.connect(5000, &Param::default()));
    let taken = pair.expect(1, EventKind::ConnectRequest);
    assert_eq!((taken.listener, taken.cookie), (7, 0));
    assert_eq!(pair.nodes[1].cm.destroy_id(listener), Ok(1), "the request is an event of its");
    pair.run();
    let rejected = pair.expect(0, EventKind::Rejected);
    assert_eq!((rejected.id, rejected.status), (second, 28));
    pair.expect_nothing();
    // The one that was taken lives on.
    pair.nodes[1].cm.accept(pair.now, taken.id, Some(&Param::default())).unwrap();
    pair.run();
    assert_eq!(pair.expect(0, EventKind::ConnectResponse).id, first);
}

#[test]
fn nobody_waits_for_ever() {
    // For TCP.
    let mut pair = Pair { hang: true, ..Pair::default() };
    pair.listen(PortSpace::Tcp, 5000, 0);
    pair.connect(5000, &Param::default());
    pair.pass(11 * SECOND);
    assert_eq!(pair.expect(0, EventKind::Unreachable).status, -110);
    // For the answer of the program.
    let mut pair = Pair::default();
    let (_, passive) = pair.requested();
    pair.pass(61 * SECOND);
    assert_eq!(pair.expect(0, EventKind::Unreachable).status, -110);
    assert_eq!(pair.event(1), None);
    let late = pair.nodes[1].cm.accept(pair.now, passive, Some(&Param::default()));
    assert_eq!(late, Err(CallError::WrongState));
    // For the word that the connection stands.
    let mut pair = Pair::default();
    pair.accepted();
    pair.pass(61 * SECOND);
    assert_eq!(pair.expect(1, EventKind::Unreachable).status, -110);
    assert_eq!(pair.expect(0, EventKind::ConnectError).status, -104);
    // For consent to the end.
    let mut pair = Pair::default();
    let (active, _) = pair.established();
    pair.nodes[0].cm.disconnect(pair.now, active).unwrap();
    pair.pass(11 * SECOND);
    pair.expect(1, EventKind::Disconnected);
    assert_eq!(pair.expect(0, EventKind::Disconnected).status, -110);
}

#[test]
fn why_there_is_no_connection() {
    let cases = [
        (Loss::Refused, EventKind::Rejected, 8),
        (Loss::TimedOut, EventKind::Unreachable, -110),
        (Loss::Failed(113), EventKind::Unreachable, -113),
        (Loss::Closed, EventKind::ConnectError, -104),
    ];
    for (loss, kind, status) in cases {
        let mut pair = Pair { refuse: Some(loss), ..Pair::default() };
        pair.connect(5000, &Param::default());
        pair.pass(SECOND);
        assert_eq!(pair.expect(0, kind).status, status);
        pair.expect_nothing();
        assert_eq!(pair.nodes[0].cm.load().streams + pair.nodes[0].cm.load().deadlines, 0);
    }
    // A listener of another port space is none.
    let mut pair = Pair::default();
    pair.listen(PortSpace::Ib, 5000, 0);
    pair.connect(5000, &Param::default());
    assert_eq!(pair.expect(0, EventKind::Rejected).status, 8);
}

#[test]
fn the_side_that_accepted_may_know_before_it_is_told() {
    let mut pair = Pair::default();
    let (active, passive) = pair.accepted();
    pair.nodes[1].cm.establish(passive).unwrap();
    pair.expect(1, EventKind::Established);
    assert_eq!(pair.nodes[1].cm.establish(passive), Err(CallError::Connected));
    pair.nodes[0].cm.establish(active).unwrap();
    pair.run();
    pair.expect_nothing();
    // It may even end the connection before the other has said that it stands, which hears of it then.
    let mut pair = Pair::default();
    let (active, passive) = pair.accepted();
    pair.nodes[1].cm.establish(passive).unwrap();
    pair.expect(1, EventKind::Established);
    pair.nodes[1].cm.disconnect(pair.now, passive).unwrap();
    pair.run();
    pair.expect_nothing();
    pair.nodes[0].cm.accept(pair.now, active, None).unwrap();
    pair.expect(0, EventKind::Disconnected);
    pair.nodes[0].cm.disconnect(pair.now, active).unwrap();
    pair.run();
    pair.expect(1, EventKind::Disconnected);
}

#[test]
fn the_side_that_connected_may_refuse_the_reply() {
    let mut pair = Pair::default();
    let (active, _) = pair.accepted();
    pair.nodes[0].cm.reject(active, Refusal::Consumer, &[]).unwrap();
    pair.run();
    assert_eq!(pair.expect(1, EventKind::Rejected).status, 28);
    pair.expect_nothing();
}

#[test]
fn nobody_connects_to_itself() {
    for (asks_plain, status) in [(false, 8), (true, -111)] {
        let mut pair = Pair::new(quipu_cm::Config { asks_plain, ..quipu_cm::Config::default() });
        let (id, cm) = (pair.id(0, PortSpace::Tcp), &mut pair.nodes[0].cm);
        let at = "10.0.0.1:5000".parse().unwrap();
        cm.resolved(id, at, Ok(at)).unwrap();
        cm.resolve_route(id).unwrap();
        cm.connect(1, id, &Param::default()).unwrap();
        assert_eq!((cm.poll_action(), cm.load().streams, cm.load().deadlines), (None, 0, 0));
        pair.expect(0, EventKind::AddrResolved);
        pair.expect(0, EventKind::RouteResolved);
        assert_eq!(pair.expect(0, EventKind::Rejected).status, status);
        pair.expect_nothing();
    }
}

/// In `RDMA_PS_IB` the type that a listener was made with is that of identifiers that may ask; without one
/// it takes any. In `RDMA_PS_TCP` all are taken. What a listener was made for is what comes of its requests.
#[test]
fn a_listener_takes_requests_of_its_own_service() {
    const UC: u8 = 3;
    const XRC_SEND: u8 = 9;
    const XRC_RECV: u8 = 10;
    for (listens, asks, is_taken, becomes) in [
        (RC, UC, false, RC),
        (RC, XRC_SEND, false, RC),
        (UC, RC, false, UC),
        (XRC_RECV, RC, false, XRC_RECV),
        (XRC_RECV, XRC_RECV, false, XRC_RECV),
        (RC, RC, true, RC),
        (UC, UC, true, UC),
        (XRC_RECV, XRC_SEND, true, XRC_RECV),
        (0, UC, true, UC),
        (0, RC, true, RC),
        (0, 0, true, RC),
        (RC, 0, true, RC),
    ] {
        for space in [PortSpace::Ib, PortSpace::Tcp] {
            let mut pair = Pair::default();
            pair.listen_as(listens, space, 5000, 0);
            let active = pair.resolve_as(asks, space, 5000);
            pair.nodes[0].cm.connect(pair.now, active, &Param::default()).unwrap();
            pair.run();
            if is_taken || space == PortSpace::Tcp {
                let passive = pair.expect(1, EventKind::ConnectRequest).id;
                let params = pair.nodes[1].cm.init_params(passive).unwrap();
                assert_eq!(params.qp_type, becomes, "{listens} {asks}");
            } else {
                assert_eq!(pair.expect(0, EventKind::Rejected).status, 28, "{listens} {asks}");
            }
            pair.expect_nothing();
        }
    }
}

#[test]
fn a_listener_may_be_a_moment_late() {
    let mut pair = Pair::default();
    let active = pair.connect(5000, &param(b"patience"));
    pair.pass(SECOND / 20);
    pair.expect_nothing();
    pair.listen(PortSpace::Tcp, 5000, 0);
    pair.pass(SECOND / 10);
    let request = pair.expect(1, EventKind::ConnectRequest);
    assert_eq!(&request.private_data[..8], b"patience");
    pair.nodes[1].cm.accept(pair.now, request.id, Some(&Param::default())).unwrap();
    pair.run();
    assert_eq!(pair.expect(0, EventKind::ConnectResponse).id, active);
    // Anyone who does not want to wait any more need not.
    let mut pair = Pair::default();
    let active = pair.connect(5000, &Param::default());
    assert_eq!(pair.nodes[0].cm.load().deadlines, 1);
    pair.nodes[0].cm.destroy_id(active).unwrap();
    assert_eq!(pair.nodes[0].cm.load().deadlines, 0);
    pair.pass(SECOND);
    pair.expect_nothing();
}
