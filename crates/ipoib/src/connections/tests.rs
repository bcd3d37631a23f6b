use super::*;

const S: u64 = 1_000_000_000;
const SLOTS: usize = 8;
const PACKET: [u8; 100] = [1; 100];

fn link(n: u32) -> LinkAddress {
    LinkAddress { qpn: n, gid: [n as u8; 16], connects: true }
}

fn connections() -> Connections {
    Connections::new(Limits { link: link(1), mtu: 65520, slots: SLOTS })
}

/// What an interface with this queue pair and MTU says of itself.
fn data(qpn: u32, mtu: u32) -> [u8; 8] {
    ConnectionData { qpn, receive_mtu: mtu + 4 }.to_bytes()
}

fn opened(connections: &mut Connections) -> Option<ConnectionId> {
    match connections.poll() {
        Some(ConnectionChange::Open { id, .. }) => Some(id),
        _ => None,
    }
}

/// An established connection to a neighbour, with no message under way.
fn connect(connections: &mut Connections, now_ns: u64, to: LinkAddress) -> ConnectionId {
    assert_eq!(connections.route(now_ns, to, &PACKET), Passage::Waits);
    let id = opened(connections).unwrap();
    let (_, waited) = connections.established(now_ns, id, &data(to.qpn, 65520)).unwrap();
    assert_eq!(waited, [PACKET]);
    id
}

#[test]
fn the_first_packet_opens_a_connection_and_others_wait_for_it() {
    let mut all = connections();
    for _ in 0..MAX_WAITING {
        assert_eq!(all.route(0, link(2), &PACKET), Passage::Waits);
    }
    assert_eq!(all.route(0, link(2), &PACKET), Passage::Dropped(Dropped::Full));
    let Some(ConnectionChange::Open { id, to, private_data }) = all.poll() else { panic!() };
    assert_eq!((to, private_data), (link(2).without_flags(), data(1, 65520)));
    assert_eq!(all.poll(), None, "one is enough");
    let (peer, waited) = all.established(S, id, &data(2, 65520)).unwrap();
    assert_eq!((peer, waited.len()), (link(2).without_flags(), MAX_WAITING));
    assert_eq!(all.route(S, link(2), &PACKET), Passage::Send(id));
    assert!(all.established(S, id, &data(2, 65520)).is_none(), "it is established already");
}

#[test]
fn packets_that_wait_are_bounded_in_all() {
    let mut all = connections();
    let mut waiting = 0;
    for n in 2..100 {
        for _ in 0..MAX_WAITING {
            waiting += usize::from(all.route(0, link(n), &PACKET) == Passage::Waits);
        }
    }
    assert_eq!((waiting, all.waiting), (MAX_WAITING_IN_ALL, MAX_WAITING_IN_ALL));
    while let Some(id) = opened(&mut all) {
        all.ended(0, id);
    }
    assert_eq!(all.waiting, 0);
}

#[test]
fn the_mtu_is_the_smaller_one_of_both_ends() {
    let mut all = connections();
    let small = [1; 2044];
    assert_eq!(all.route(0, link(2), &small), Passage::Waits);
    let id = opened(&mut all).unwrap();
    all.established(0, id, &data(2, 2044)).unwrap();
    assert_eq!(all.route(0, link(2), &small), Passage::Send(id));
    assert_eq!(all.route(0, link(2), &[1; 2045]), Passage::TooLong(2044));
    assert_eq!(all.infos()[0].mtu, 2044);
    let mut all = Connections::new(Limits { link: link(1), mtu: 1500, slots: SLOTS });
    connect(&mut all, 0, link(2));
    assert_eq!(all.route(0, link(2), &[1; 1501]), Passage::TooLong(1500));
}

#[test]
fn an_acceptance_that_makes_no_sense_is_refused() {
    let beyond = data(2, 65536);
    let garbage = [&[][..], &[0; 8], &[0xff; 196], &data(3, 65520), &data(2, 67), &beyond];
    for private_data in garbage {
        let mut all = connections();
        all.route(0, link(2), &PACKET);
        let id = opened(&mut all).unwrap();
        assert!(all.established(0, id, private_data).is_none(), "{private_data:?}");
        let link = link(2).without_flags();
        assert_eq!(all.ended(0, id), Some(Ended { link, dropped: 1 }));
        assert!(all.infos().is_empty());
    }
    let mut all = connections();
    assert_eq!(all.request(0, [2; 16], &[0xff; 56]), Err(Dropped::Malformed));
    assert_eq!(all.request(0, [2; 16], &data(0, 65520)), Err(Dropped::Malformed));
}

#[test]
fn one_that_fails_is_tried_again_after_a_while() {
    let mut all = connections();
    all.route(0, link(2), &PACKET);
    let id = opened(&mut all).unwrap();
    let ended = Ended { link: link(2).without_flags(), dropped: 1 };
    assert_eq!(all.ended(5, id), Some(ended));
    assert_eq!(all.route(6, link(2), &PACKET), Passage::Dropped(Dropped::NotConnected));
    assert_eq!(all.poll(), None);
    let again = 5 + RETRY_NS;
    assert_eq!(all.next_ns(), Some(again));
    assert_eq!(all.route(again, link(2), &PACKET), Passage::Waits);
    let next = opened(&mut all).unwrap();
    assert_ne!(next, id);
    // What comes late of the first one changes nothing.
    assert_eq!(all.ended(again, id), None);
    assert!(all.established(again, id, &data(2, 65520)).is_none());
    assert_eq!(all.due(again), []);
    assert!(all.established(again, next, &data(2, 65520)).is_some());
}

#[test]
fn one_that_failed_is_forgotten() {
    let mut all = connections();
    all.route(0, link(2), &PACKET);
    let id = opened(&mut all).unwrap();
    all.ended(0, id);
    assert_eq!(all.due(RETRY_NS), []);
    assert_eq!(
        (all.outgoing.len(), all.links.len(), all.next_ns(), all.poll()),
        (0, 0, None, None)
    );
}

#[test]
fn one_that_is_lost_is_opened_again_by_the_next_packet() {
    let mut all = connections();
    let id = connect(&mut all, 0, link(2));
    assert_eq!(all.route(2 * S, link(2), &PACKET), Passage::Send(id));
    let link2 = link(2).without_flags();
    assert_eq!(all.ended(2 * S, id), Some(Ended { link: link2, dropped: 0 }));
    assert_eq!(all.in_flight, 0);
    assert_eq!(all.route(2 * S, link(2), &PACKET), Passage::Waits);
    let next = opened(&mut all).unwrap();
    all.established(2 * S, next, &data(2, 65520)).unwrap();
    // One that ends as soon as it is established is not opened again at once.
    all.ended(2 * S + 1, next);
    let passage = all.route(2 * S + 2, link(2), &PACKET);
    assert_eq!(passage, Passage::Dropped(Dropped::NotConnected));
    // A message that could not be sent ends it, too, and has it closed.
    let id = connect(&mut all, 10 * S, link(2));
    assert!(all.broken(20 * S, id).is_some());
    assert_eq!(all.poll(), Some(ConnectionChange::Close(id)));
    assert_eq!((all.broken(20 * S, id), all.poll()), (None, None));
}

#[test]
fn a_peer_that_does_not_read_leaves_room_for_others_and_is_given_up() {
    let mut all = connections();
    let (slow, other) = (connect(&mut all, 0, link(2)), connect(&mut all, 0, link(3)));
    let sent = |all: &mut Connections, to: u32| {
        (0..SLOTS).filter(|_| matches!(all.route(S, link(to), &PACKET), Passage::Send(_))).count()
    };
    // Half of all, then half of what is left.
    assert_eq!(sent(&mut all, 2), SLOTS / 2);
    assert_eq!(all.route(S, link(2), &PACKET), Passage::Dropped(Dropped::Congested));
    assert_eq!(sent(&mut all, 3), SLOTS / 4);
    for second in 1..STALL_NS / S {
        all.sent(second * S, other, 1);
        assert_eq!(all.route(second * S, link(3), &PACKET), Passage::Send(other));
        assert_eq!(all.due(second * S), []);
    }
    let ended = all.due(S + STALL_NS);
    assert_eq!(ended, [Ended { link: link(2).without_flags(), dropped: 0 }]);
    assert_eq!(all.poll(), Some(ConnectionChange::Close(slow)));
    assert_eq!((all.poll(), all.in_flight), (None, SLOTS / 4));
    // More completions than messages, and those of a connection that has ended.
    all.sent(20 * S, slow, 1);
    all.sent(20 * S, other, 100);
    assert_eq!(all.in_flight, 0);
}

#[test]
fn connections_that_nobody_uses_are_closed() {
    let mut all = connections();
    let id = connect(&mut all, 0, link(2));
    let (from, _) = all.request(0, [3; 16], &data(3, 2044)).unwrap();
    assert!(all.established(0, from, &[]).is_some());
    assert_eq!(all.route(S, link(2), &PACKET), Passage::Send(id));
    all.sent(S, id, 1);
    assert!(all.received(2 * S, from, 50));
    assert_eq!(all.due(IDLE_NS), []);
    assert_eq!((all.next_ns(), all.infos().len()), (Some(S + IDLE_NS), 2));
    assert_eq!(all.due(S + IDLE_NS), []);
    assert_eq!(all.poll(), Some(ConnectionChange::Close(id)));
    assert_eq!(all.due(2 * S + IDLE_NS), []);
    assert_eq!(all.poll(), Some(ConnectionChange::Close(from)));
    assert!(all.infos().iter().all(|it| it.has_ended) && all.next_ns().is_none());
    assert_eq!(all.infos().len(), 2);
    assert!(!all.received(2 * S + IDLE_NS, from, 50), "it is closed");
    assert_eq!(all.ended(3 * S + IDLE_NS, id), None);
}

#[test]
fn what_passes_is_counted() {
    let mut all = connections();
    let id = connect(&mut all, 0, link(2));
    all.route(0, link(2), &PACKET);
    let (from, reply) = all.request(0, [2; 16], &data(2, 2044)).unwrap();
    assert_eq!(reply, data(1, 65520));
    assert!(all.infos().len() == 1, "it is not established yet");
    all.established(0, from, &[]).unwrap();
    assert!(all.received(0, from, 50) && all.received(0, from, 70));
    // A peer may send over one that this end has opened.
    assert!(all.received(0, id, 10));
    assert_eq!((all.peer(from), all.peer(id)), (Some(link(2)), Some(link(2).without_flags())));
    let seen: Vec<_> =
        all.infos().iter().map(|it| (it.peer, it.is_outgoing, it.packets, it.bytes)).collect();
    assert_eq!(seen, [(link(2).without_flags(), true, 1, 100), (link(2), false, 2, 120)]);
}

#[test]
fn the_oldest_idle_one_gives_way() {
    let mut all = connections();
    let ids: Vec<_> =
        (2..2 + MAX_CONNECTIONS as u32).map(|n| connect(&mut all, u64::from(n), link(n))).collect();
    let newcomer = link(200);
    assert_eq!(all.route(EVICT_NS, newcomer, &PACKET), Passage::Dropped(Dropped::Full));
    // The first has a message under way, the second was used.
    let now = 2 * EVICT_NS;
    assert_eq!(all.route(now, link(2), &PACKET), Passage::Send(ids[0]));
    assert_eq!(all.route(now, link(3), &PACKET), Passage::Send(ids[1]));
    all.sent(now, ids[1], 1);
    assert_eq!(all.route(now, newcomer, &PACKET), Passage::Waits);
    assert_eq!(all.poll(), Some(ConnectionChange::Close(ids[2])));
    assert!(opened(&mut all).is_some());
    assert_eq!(all.outgoing.len(), MAX_CONNECTIONS);
}

#[test]
fn one_host_does_not_take_the_connections_of_others() {
    let mut all = connections();
    let (own, _) = all.request(0, [9; 16], &data(9, 2044)).unwrap();
    all.established(0, own, &[]).unwrap();
    let ask =
        |all: &mut Connections, now_ns: u64, n: u32| all.request(now_ns, [7; 16], &data(n, 2044));
    let ids: Vec<_> =
        (1..=MAX_CONNECTIONS_OF_PORT as u32).map(|n| ask(&mut all, 0, n).unwrap().0).collect();
    // None of them is established, so none can give way.
    assert_eq!(ask(&mut all, 2 * EVICT_NS, 100), Err(Dropped::Full));
    all.established(2 * EVICT_NS, ids[3], &[]).unwrap();
    assert_eq!(ask(&mut all, 2 * EVICT_NS, 100), Err(Dropped::Full), "it is in use");
    assert!(ask(&mut all, 3 * EVICT_NS, 100).is_ok());
    assert_eq!(all.poll(), Some(ConnectionChange::Close(ids[3])));
    assert!(all.incoming.contains_key(&own));
    // The same holds for those that this end opens.
    let at = |qpn: u32| LinkAddress { qpn, gid: [7; 16], connects: true };
    for qpn in 1..=MAX_CONNECTIONS_OF_PORT as u32 {
        connect(&mut all, 0, at(qpn));
    }
    assert_eq!(all.route(1, at(100), &PACKET), Passage::Dropped(Dropped::Full));
    assert_eq!(all.route(1, link(3), &PACKET), Passage::Waits);
}
