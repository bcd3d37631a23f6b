//! SYNs that meet nobody: they wait for a moment, in order, and take nothing from others.

use quipu_inet::stack::{Arrival, Event, Frame, ListenerId};
use quipu_inet::tcp::{self, MILLISECOND, SECOND};
use quipu_wire::tcp::{Flags, Options, Repr, SeqNumber, Timestamps};

use crate::hostile::{answers, counted, ip, syn};
use crate::net::{Net, V4, V6};
use crate::packets::Packet;
use crate::streams::stream;

/// How long a SYN waits.
const PATIENCE: u64 = 250 * MILLISECOND;

fn from_peer(net: &mut Net, segment: &Repr) {
    net.arrive(1, &Packet::new(ip(V6[0]), ip(V6[1])).segment(segment, &[]), false);
}

/// Somebody is there for so many; what is said to peers then: to which port, and which SYN it acknowledges.
fn offer(net: &mut Net, listener: ListenerId, idle: u32) -> Vec<(u16, u32)> {
    let said = hear(net, listener, idle);
    assert!(said.iter().all(|it| it.flags == Flags::SYN | Flags::ACK), "{said:?}");
    said.iter().map(|it| (it.destination, it.ack.0.wrapping_sub(1))).collect()
}

/// The same, whatever is said.
fn hear(net: &mut Net, listener: ListenerId, idle: u32) -> Vec<Repr> {
    net.hosts[1].stack.set_idle(listener, idle);
    net.hosts[1].poll_events();
    answers(net)
}

/// Held, answered late, given up, dropped at once.
fn fates(net: &Net) -> [u64; 4] {
    let counted = counted(net);
    [counted.tcp_held, counted.tcp_late, counted.tcp_given_up, counted.tcp_waiting]
}

#[test]
fn a_peer_that_comes_too_early_need_not_come_again() {
    for addresses in [V6, V4] {
        let mut net = Net::new(addresses, 1_500, stream(), 1);
        let listener = net.listen(1, 80, 0);
        let client = net.connect(0, 80);
        net.run(PATIENCE - 20 * MILLISECOND);
        assert!(net.hosts[1].accepted.is_empty());
        net.hosts[1].stack.set_idle(listener, 1);
        net.hosts[1].poll_events();
        net.hosts[0].stack.send(client, 5_000, true).unwrap();
        let acked = |net: &mut Net| net.hosts[0].user(client).acked == 5_000;
        assert!(net.run_until(100 * MILLISECOND, acked), "{:?}", counted(&net));
        net.check(1, net.hosts[1].accepted[0], 5_000);
        assert_eq!(fates(&net), [1, 1, 0, 0]);
        // Nor is a link with stations another matter.
        let mut net = Net::ethernet(addresses, stream(), 1);
        let listener = net.listen(1, 80, 0);
        let client = net.connect(0, 80);
        net.run(PATIENCE - 20 * MILLISECOND);
        net.hosts[1].stack.set_idle(listener, 1);
        net.hosts[1].poll_events();
        let connected = |net: &mut Net| net.hosts[0].knows(client, tcp::Event::Connected);
        assert!(net.run_until(100 * MILLISECOND, connected), "{:?}", counted(&net));
    }
}

#[test]
fn who_came_first_is_answered_first() {
    let mut net = Net::new(V6, 1_500, stream(), 1);
    let listener = net.listen(1, 80, 0);
    for port in [4, 2, 3, 1] {
        from_peer(&mut net, &syn(port, 100));
        net.now += MILLISECOND;
    }
    assert!(answers(&mut net).is_empty());
    assert_eq!(offer(&mut net, listener, 1), [(4, 100)]);
    // Somebody else comes behind those who wait.
    from_peer(&mut net, &syn(9, 100));
    assert_eq!(offer(&mut net, listener, 2), [(2, 100), (3, 100)]);
    assert_eq!(offer(&mut net, listener, 9), [(1, 100), (9, 100)]);
    // Nobody waits: who comes now meets somebody.
    from_peer(&mut net, &syn(5, 100));
    assert_eq!(answers(&mut net).len(), 1);
    assert_eq!(fates(&net), [5, 5, 0, 0]);
    let ends: Vec<u16> = net.hosts[1].accepted.iter().map(|id| peer(&net, *id)).collect();
    assert_eq!(ends, [4, 2, 3, 1, 9, 5]);
}

fn peer(net: &Net, id: quipu_inet::stack::TcpId) -> u16 {
    net.hosts[1].stack.flow(id).expect("it is there").remote.port()
}

#[test]
fn what_a_syn_said_is_known_when_it_is_answered() {
    let mut net = Net::new(V6, 1_500, stream(), 1);
    let listener = net.listen(1, 80, 0);
    let timestamps = Some(Timestamps { value: 777, echo: 0 });
    let options =
        Options { mss: Some(1_000), window_scale: Some(3), timestamps, ..syn(9, 0).options };
    from_peer(&mut net, &Repr { options, ..syn(9, 100) });
    net.now += PATIENCE / 2;
    let answer = hear(&mut net, listener, 1)[0];
    assert_eq!(answer.ack, SeqNumber(101));
    assert_eq!(answer.options.timestamps.map(|it| it.echo), Some(777));
    assert!(answer.options.window_scale.is_some() && !answer.options.sack_permitted);
    let connection = net.hosts[1].stack.connection(net.hosts[1].accepted[0]).unwrap();
    assert_eq!(connection.negotiated().peer_mss, 1_000);
}

#[test]
fn a_syn_waits_for_a_quarter_of_a_second() {
    let mut net = Net::new(V6, 1_500, stream(), 1);
    let listener = net.listen(1, 80, 0);
    let begun = net.now;
    from_peer(&mut net, &syn(1, 100));
    net.run(PATIENCE / 2);
    from_peer(&mut net, &syn(2, 100));
    assert_eq!(net.hosts[1].stack.poll_timeout(), Some(begun + PATIENCE));
    net.run(PATIENCE / 2 + MILLISECOND);
    assert_eq!(fates(&net), [2, 0, 1, 0]);
    assert_eq!(offer(&mut net, listener, 1), [(2, 100)]);
    // Nothing runs that is of neither.
    let mut net = Net::new(V6, 1_500, stream(), 1);
    let listener = net.listen(1, 80, 0);
    from_peer(&mut net, &syn(1, 100));
    net.run(2 * PATIENCE);
    assert_eq!((fates(&net), net.hosts[1].stack.poll_timeout()), ([1, 0, 1, 0], None));
    assert_eq!(offer(&mut net, listener, 1), []);
}

#[test]
fn a_syn_that_is_repeated_or_replaced_waits_once() {
    let mut net = Net::new(V6, 1_500, stream(), 1);
    let listener = net.listen(1, 80, 0);
    [syn(1, 100), syn(2, 100), syn(1, 500), syn(1, 900), syn(2, 100)].iter().for_each(|syn| {
        from_peer(&mut net, syn);
    });
    assert_eq!(offer(&mut net, listener, 9), [(1, 900), (2, 100)]);
    assert_eq!(fates(&net), [5, 2, 3, 0]);
}

#[test]
fn a_reset_takes_a_syn_away_if_it_knows_the_number() {
    let mut net = Net::new(V6, 1_500, stream(), 1);
    let listener = net.listen(1, 80, 0);
    (1..=4).for_each(|port| from_peer(&mut net, &syn(port, 100)));
    let reset = |port, seq| Repr { flags: Flags::RST, ..syn(port, seq) };
    from_peer(&mut net, &reset(1, 100));
    from_peer(&mut net, &reset(2, 101));
    from_peer(&mut net, &reset(3, 102));
    from_peer(&mut net, &Repr { flags: Flags::RST | Flags::ACK, ..reset(4, 101) });
    from_peer(&mut net, &reset(5, 101));
    // It may come again.
    from_peer(&mut net, &syn(4, 300));
    assert_eq!(offer(&mut net, listener, 9), [(1, 100), (3, 100), (4, 300)]);
    assert_eq!(fates(&net), [5, 3, 2, 0]);
}

#[test]
fn so_many_wait_and_no_more() {
    let mut net = Net::new(V6, 1_500, stream(), 1);
    let config = net.config.clone();
    let mut ids = Vec::new();
    for port in 80..90 {
        let stack = &mut net.hosts[1].stack;
        ids.push(stack.listen(port, &config, if port == 80 { 3 } else { 1_000 }).unwrap().0);
        for peer in 1..=200 {
            from_peer(&mut net, &Repr { destination: port, ..syn(peer, 100) });
        }
    }
    // The backlog; 128 of each other port, 1024 of all.
    let held: u64 = 1_024;
    assert_eq!(fates(&net), [held, 0, 0, 2_000 - held]);
    // Those that came first.
    assert_eq!(offer(&mut net, ids[0], 200), [(1, 100), (2, 100), (3, 100)]);
    let answered = offer(&mut net, ids[1], 200);
    assert!(answered.iter().map(|it| it.0).eq(1..=128), "{answered:?}");
    assert_eq!(offer(&mut net, ids[9], 200), []);
    // There is room again, for this port as for others.
    from_peer(&mut net, &Repr { destination: 82, ..syn(999, 100) });
    assert_eq!(counted(&net).tcp_waiting, 2_000 - held + 1);
    net.hosts[1].stack.set_idle(ids[1], 0);
    from_peer(&mut net, &Repr { destination: 81, ..syn(999, 100) });
    assert_eq!(counted(&net).tcp_held, held + 1);
    net.run(2 * PATIENCE);
    assert_eq!(fates(&net)[2], held + 1 - 131);
}

/// RFC 4987: who is asked by a cookie needs somebody only when it brings the cookie back.
#[test]
fn a_flood_that_waits_meets_cookies_and_takes_nothing_from_those_who_have_one() {
    let mut net = Net::new(V6, 1_500, stream(), 1);
    let listener = net.listen(1, 80, 1_000);
    let stranger = |n: u16| {
        let from = std::net::Ipv6Addr::from(0xfd00_u128 << 112 | 7 << 64 | u128::from(n));
        Packet::new(from.into(), ip(V6[1])).segment(&syn(9, 100), &[])
    };
    let flood = |net: &mut Net, strangers: std::ops::Range<u16>| {
        for n in strangers {
            net.arrive(1, &stranger(n), false);
        }
    };
    flood(&mut net, 0..64);
    answers(&mut net);
    // The backlog is full: this one gets a cookie, and nobody is there any more when it brings it back.
    from_peer(&mut net, &syn(1, 100));
    let cookie = answers(&mut net)[0];
    assert_eq!(cookie.flags, Flags::SYN | Flags::ACK);
    net.hosts[1].stack.set_idle(listener, 0);
    flood(&mut net, 100..300);
    assert_eq!(fates(&net), [64, 0, 0, 200 - 64], "the backlog of `Net::listen`");
    let ack = Repr { flags: Flags::ACK, seq: cookie.ack, ack: cookie.seq + 1, ..syn(1, 0) };
    from_peer(&mut net, &ack);
    assert_eq!(net.hosts[1].accepted.len(), 64);
    // One is there: all that wait are told so by cookies, of which nothing is kept, and it is still there.
    let answered = offer(&mut net, listener, 1).len();
    assert_eq!((answered, counted(&net).tcp_cookies, net.hosts[1].accepted.len()), (64, 65, 64));
    from_peer(&mut net, &ack);
    assert_eq!(net.hosts[1].accepted.len(), 65);
    assert_eq!(peer(&net, net.hosts[1].accepted[64]), 1);
}

/// What its peer would do next, behind a closed window, is to wait for a timer.
#[test]
fn who_brings_a_cookie_back_too_early_need_not_come_again() {
    let mut net = Net::new(V6, 1_500, stream(), 1);
    let config = net.config.clone();
    let (listener, _) = net.hosts[1].stack.listen(80, &config, 2).unwrap();
    offer(&mut net, listener, 100);
    let cookies: Vec<Repr> = (1..=5)
        .map(|port| {
            from_peer(&mut net, &syn(port, 100));
            answers(&mut net)[0]
        })
        .collect();
    assert_eq!(counted(&net).tcp_cookies, 3, "two are half open");
    offer(&mut net, listener, 0);
    let ack = |of: &Repr| Repr {
        flags: Flags::ACK,
        seq: of.ack,
        ack: of.seq + 1,
        ..syn(of.destination, 0)
    };
    // One that is made up is not held: it would keep others out.
    from_peer(&mut net, &Repr { ack: SeqNumber(7), ..ack(&cookies[3]) });
    assert_eq!((fates(&net), answers(&mut net)[0].flags), ([0; 4], Flags::RST));
    from_peer(&mut net, &ack(&cookies[4]));
    // Its acknowledgement is lost, and it asks by a probe.
    from_peer(&mut net, &Repr { seq: SeqNumber(100), ..ack(&cookies[2]) });
    // There is room for no more.
    from_peer(&mut net, &ack(&cookies[3]));
    assert_eq!(fates(&net), [2, 0, 0, 1]);
    for (idle, port) in [(1, 5), (5, 3)] {
        let said = hear(&mut net, listener, idle);
        // Its window is open now.
        assert_eq!((said.len(), said[0].destination, said[0].flags), (1, port, Flags::ACK));
    }
    let ends: Vec<u16> = net.hosts[1].accepted.iter().map(|id| peer(&net, *id)).collect();
    assert_eq!((ends, fates(&net)), (vec![1, 2, 5, 3], [2, 2, 0, 1]));
    for id in &net.hosts[1].accepted[2..] {
        assert!(net.hosts[1].knows(*id, tcp::Event::Connected));
    }
    // Anyone who has reset the connection meanwhile has none, also if it had asked by a probe.
    offer(&mut net, listener, 0);
    for (turn, seq) in (1..).zip([101, 100]) {
        from_peer(&mut net, &Repr { seq: SeqNumber(seq), ..ack(&cookies[3]) });
        from_peer(&mut net, &Repr { flags: Flags::RST, seq: SeqNumber(101), ..syn(4, 0) });
        offer(&mut net, listener, 5);
        let fates = fates(&net);
        assert_eq!((net.hosts[1].accepted.len(), fates), (4, [2 + turn, 2, turn, 1]));
        offer(&mut net, listener, 0);
    }
    // A SYN that comes behind its acknowledgement changes nothing.
    from_peer(&mut net, &ack(&cookies[3]));
    from_peer(&mut net, &syn(4, 100));
    assert_eq!(hear(&mut net, listener, 5)[0].flags, Flags::ACK);
    assert_eq!((net.hosts[1].accepted.len(), fates(&net)), (5, [5, 3, 2, 2]));
}

#[test]
fn those_who_wait_are_forgotten_with_the_port() {
    let mut net = Net::new(V6, 1_500, stream(), 1);
    let listener = net.listen(1, 80, 0);
    (1..=3).for_each(|port| from_peer(&mut net, &syn(port, 100)));
    net.hosts[1].stack.unlisten(listener);
    assert_eq!((fates(&net), net.hosts[1].stack.poll_timeout()), ([3, 0, 3, 0], None));
    let listener = net.listen(1, 80, 0);
    assert_eq!(offer(&mut net, listener, 9), []);
    // What comes again meets the new one.
    from_peer(&mut net, &syn(2, 100));
    assert_eq!(answers(&mut net).len(), 1);
}

#[test]
fn a_connection_that_this_end_has_opened_meanwhile_is_left_alone() {
    let mut net = Net::new(V6, 1_500, stream(), 1);
    let listener = net.listen(1, 80, 0);
    from_peer(&mut net, &syn(9, 100));
    let (config, to) = (net.config.clone(), (ip(V6[0]), 9).into());
    let ours = net.hosts[1].stack.connect(net.now, Some(80), to, &config).unwrap();
    net.hosts[1].adopt(ours);
    assert!(answers(&mut net)[0].flags.has(Flags::SYN));
    assert_eq!(offer(&mut net, listener, 1), []);
    assert_eq!((fates(&net), net.hosts[1].stack.poll_event()), ([1, 0, 1, 0], None::<Event>));
    assert!(net.hosts[1].stack.connection(ours).is_some());
}

#[test]
fn without_room_for_a_connection_a_syn_waits_too() {
    let mut net = with_room_for(1);
    let [_, server] = net.pair();
    from_peer(&mut net, &syn(9, 100));
    let listener = net.listen(1, 81, 5);
    from_peer(&mut net, &Repr { destination: 81, ..syn(9, 100) });
    assert_eq!(fates(&net), [2, 0, 0, 0]);
    net.hosts[1].stack.release(server);
    net.run(SECOND / 100);
    // The next that comes finds room, which is for who waits.
    from_peer(&mut net, &Repr { destination: 81, ..syn(10, 100) });
    assert_eq!(answers(&mut net).last().map(|it| it.destination), Some(9));
    assert_eq!(fates(&net), [3, 1, 0, 0]);
    assert_eq!(offer(&mut net, listener, 5), []);
}

fn with_room_for(max_connections: u32) -> Net {
    Net::with(1_500, stream(), 1, |host| {
        let config = quipu_inet::stack::Config::new(ip(V6[host]), 64, tcp::Secret([1, 2]));
        quipu_inet::stack::Config { max_connections, ..config }
    })
}

/// Room may come back without a word of the user's.
#[test]
fn a_syn_that_is_repeated_when_its_turn_has_come_is_answered_once() {
    let mut net = with_room_for(2);
    net.listen(1, 80, 9);
    for _ in 0..2 {
        net.connect(0, 80);
        net.run(SECOND / 10);
    }
    let servers = net.hosts[1].accepted.clone();
    assert_eq!(servers.len(), 2);
    from_peer(&mut net, &syn(9, 100));
    assert_eq!(fates(&net), [1, 0, 0, 0]);
    for server in servers {
        net.hosts[1].stack.release(server);
    }
    net.run(SECOND / 100);
    from_peer(&mut net, &syn(9, 200));
    let said = answers(&mut net);
    let said: Vec<_> = said.iter().filter(|it| it.destination == 9).map(|it| it.ack).collect();
    assert_eq!(said, [SeqNumber(201)], "what it says now");
    net.hosts[1].poll_events();
    assert_eq!((net.hosts[1].accepted.len(), fates(&net)), (3, [2, 1, 1, 0]));
}

/// RFC 9293 3.10.7.4, fifth and seventh check: what completes the handshake may bring data. The user hears of
/// the connection in between, which may not want it.
#[test]
fn what_completes_the_handshake_comes_again_if_it_brings_something() {
    let mut net = Net::new(V6, 1_500, stream(), 1);
    net.listen(1, 80, 4);
    let frame = |segment: &Repr| Packet::new(ip(V6[0]), ip(V6[1])).segment(segment, b"hello");
    for (port, wanted) in [(1, true), (2, false)] {
        from_peer(&mut net, &syn(port, 0));
        let said = answers(&mut net);
        let answer = said.iter().find(|it| it.flags.has(Flags::SYN)).unwrap();
        let flags = Flags::ACK | Flags::FIN;
        let ack = Repr { flags, seq: answer.ack, ack: answer.seq + 1, ..syn(port, 0) };
        let stranger = frame(&Repr { ack: ack.ack + 1, ..ack });
        let own = frame(&ack);
        let handle = |net: &mut Net, bytes: &[u8]| {
            net.hosts[1].stack.handle_frame(net.now, &Frame { bytes, checked: false })
        };
        let before = counted(&net).received;
        assert_eq!(handle(&mut net, &stranger), Arrival::Nothing);
        assert_eq!(handle(&mut net, &own), Arrival::Again);
        let connection = *net.hosts[1].accepted.last().unwrap();
        net.hosts[1].poll_events();
        assert!(net.hosts[1].knows(connection, tcp::Event::Connected));
        if !wanted {
            net.hosts[1].stack.release(connection);
        }
        let arrival = handle(&mut net, &own);
        let placed = match &arrival {
            Arrival::Segment { received, .. } => received.contiguous == 5,
            _ => false,
        };
        assert_eq!((placed, counted(&net).received - before), (wanted, 2), "{arrival:?}");
        net.hosts[1].poll_events();
        assert_eq!(net.hosts[1].knows(connection, tcp::Event::PeerClosed(5)), wanted);
    }
}
