//! Strangers: martians, floods, packets that make no sense.

use std::net::IpAddr;

use quipu_inet::stack::{Arrival, Config, ConnectError, Counters, DatagramError, Event, Frame};
use quipu_inet::tcp::{self, Failure, SECOND, State};
use quipu_wire::tcp::{Flags, Options, Repr, SeqNumber, Timestamps};
use quipu_wire::{ipv4, ipv6};

use crate::net::{Net, V4, V6};
use crate::packets::Packet;
use crate::streams::stream;

pub fn ip(text: &str) -> IpAddr {
    text.parse().unwrap()
}

pub fn syn(port: u16, seq: u32) -> Repr {
    let options = Options { mss: Some(1_440), ..Options::default() };
    Repr {
        source: port,
        destination: 80,
        seq: SeqNumber(seq),
        flags: Flags::SYN,
        window: 1_000,
        options,
        ..Repr::default()
    }
}

/// What host 1 answers now.
pub fn answers(net: &mut Net) -> Vec<Repr> {
    let mut out = vec![0; 70_000];
    let mut answers = Vec::new();
    while let Some(departure) = net.hosts[1].stack.poll_transmit(net.now, &mut out) {
        let start = if out[0] >> 4 == 6 { ipv6::LEN } else { ipv4::LEN };
        answers.push(Repr::parse(&out[start..departure.headers]).expect("a segment").0);
    }
    answers
}

pub fn counted(net: &Net) -> Counters {
    *net.hosts[1].stack.counters()
}

#[test]
fn nobody_is_at_the_port() {
    for addresses in [V6, V4] {
        let mut net = Net::new(addresses, 1_500, stream(), 1);
        let id = net.connect(0, 80);
        let refused = tcp::Event::Failed(Failure::Refused);
        assert!(net.run_until(SECOND, |net| net.hosts[0].knows(id, refused)));
        assert_eq!((counted(&net).tcp_unknown, counted(&net).tcp_resets), (1, 1));
        net.hosts[0].stack.release(id);
        net.run(SECOND);
        assert_eq!(net.hosts[0].stack.connection(id).map(|it| it.state()), None);
    }
}

#[test]
fn martians_are_dropped() {
    let mut net = Net::new(V6, 1_500, stream(), 1);
    net.listen(1, 80, 10);
    let sources = ["::", "::1", "ff02::1", "::ffff:10.0.0.1", V6[1]];
    for source in sources {
        let frame = Packet::new(ip(source), ip(V6[1])).segment(&syn(9, 0), &[]);
        net.arrive(1, &frame, false);
    }
    assert_eq!(counted(&net).martians, sources.len() as u64);
    for destination in ["ff02::1", "fd00::3", "::1"] {
        let frame = Packet::new(ip(V6[0]), ip(destination)).segment(&syn(9, 0), &[]);
        net.arrive(1, &frame, false);
    }
    assert_eq!(counted(&net).not_ours, 3, "RFC 9293 3.9.2.3: TCP has no groups (MUST-57)");
    assert!(answers(&mut net).is_empty());
    let mut net = Net::new(V4, 1_500, stream(), 1);
    net.listen(1, 80, 10);
    let sources = ["0.0.0.0", "127.0.0.1", "224.0.0.1", "255.255.255.255", "10.0.0.255", V4[1]];
    for source in sources {
        let frame = Packet::new(ip(source), ip(V4[1])).segment(&syn(9, 0), &[]);
        net.arrive(1, &frame, false);
    }
    assert_eq!(counted(&net).martians, sources.len() as u64);
    assert!(answers(&mut net).is_empty());
}

#[test]
fn groups_and_nobody_are_no_peers() {
    let mut net = Net::new(V6, 1_500, stream(), 1);
    let config = net.config.clone();
    let (socket, _) = net.hosts[0].stack.bind(0).unwrap();
    for peer in ["::", "ff02::1", "::1"] {
        let to = (ip(peer), 80).into();
        let connected = net.hosts[0].stack.connect(net.now, None, to, &config);
        assert_eq!(connected, Err(ConnectError::BadAddress), "{peer}");
        let sent = net.send_datagram(0, socket, to, b"x");
        assert_eq!(sent, Err(DatagramError::BadAddress), "{peer}");
    }
    let to = (ip(V6[1]), 0).into();
    let connected = net.hosts[0].stack.connect(net.now, None, to, &config);
    assert_eq!(connected, Err(ConnectError::BadAddress));
    let to = (ip("10.0.0.9"), 80).into();
    let connected = net.hosts[0].stack.connect(net.now, None, to, &config);
    assert_eq!(connected, Err(ConnectError::NoRoute), "no address of that family");
}

#[test]
fn what_is_cut_or_changed_anywhere_is_dropped() {
    for addresses in [V6, V4] {
        let mut net = Net::new(addresses, 1_500, stream(), 1);
        net.listen(1, 80, 10);
        let whole = Packet::new(ip(addresses[0]), ip(addresses[1])).segment(&syn(9, 0), &[]);
        for len in 0..whole.len() {
            net.arrive(1, &whole[..len], false);
            net.arrive(1, &whole[..len], true);
        }
        for bit in 0..whole.len() * 8 {
            let mut changed = whole.clone();
            changed[bit / 8] ^= 1 << (bit % 8);
            // Of IPv6 the header has no checksum: what the pseudo-header does not have may be changed.
            let unprotected = matches!(bit / 8, 1..=3 | 7) || bit < 4;
            if addresses == V4 || !unprotected {
                assert_eq!(net.arrive(1, &changed, false), Arrival::Nothing);
            }
        }
        assert_eq!(net.hosts[1].accepted, [], "{:?}", counted(&net));
        net.arrive(1, &whole, false);
        assert_eq!(net.hosts[1].accepted.len(), 1);
    }
}

#[test]
fn a_flood_of_syns_meets_cookies_and_a_peer_gets_through() {
    let mut net = Net::new(V6, 1_500, stream(), 1);
    let listener = net.listen(1, 80, 1_000);
    for n in 0..10_000u32 {
        let from = std::net::Ipv6Addr::from(0xfd00_u128 << 112 | 7 << 64 | u128::from(n));
        let frame = Packet::new(from.into(), ip(V6[1])).segment(&syn(9, n), &[]);
        net.arrive(1, &frame, false);
        answers(&mut net);
    }
    assert_eq!(net.hosts[1].accepted.len(), 64, "the backlog");
    assert_eq!(counted(&net).tcp_cookies, 10_000 - 64);
    let client = net.connect(0, 80);
    assert!(net.run_until(SECOND, |net| net.hosts[0].knows(client, tcp::Event::Connected)));
    net.hosts[0].stack.send(client, 1_000, true).unwrap();
    assert!(net.run_until(10 * SECOND, |net| net.hosts[0].user(client).acked == 1_000));
    let server = *net.hosts[1].accepted.last().unwrap();
    net.check(1, server, 1_000);
    // The user is told of those that come to nothing.
    net.run(400 * SECOND);
    let first = net.hosts[1].accepted[0];
    assert!(net.hosts[1].knows(first, tcp::Event::Failed(Failure::TimedOut)));
    net.hosts[1].stack.unlisten(listener);
}

#[test]
fn without_anybody_to_talk_to_a_peer_waits() {
    let mut net = Net::new(V6, 1_500, stream(), 1);
    let listener = net.listen(1, 80, 0);
    let client = net.connect(0, 80);
    net.run(5 * SECOND);
    assert_eq!(counted(&net).tcp_given_up, 3, "at 0, 1 and 3 s");
    assert!(net.hosts[1].accepted.is_empty());
    net.hosts[1].stack.set_idle(listener, 1);
    assert!(net.run_until(5 * SECOND, |net| net.hosts[0].knows(client, tcp::Event::Connected)));
    // It was for one.
    let second = net.connect(0, 80);
    net.run(SECOND / 2);
    assert_eq!(net.hosts[1].accepted.len(), 1);
    assert_eq!(net.hosts[0].stack.connection(second).unwrap().state(), State::SynSent);
}

#[test]
fn somebody_not_heard_of_counts_against_those_who_are_there() {
    let mut net = Net::new(V6, 1_500, stream(), 1);
    let listener = net.listen(1, 80, 2);
    let stack = &mut net.hosts[1].stack;
    let arrive = |stack: &mut quipu_inet::stack::Stack, port| {
        let bytes = Packet::new(ip(V6[0]), ip(V6[1])).segment(&syn(port, 0), &[]);
        stack.handle_frame(SECOND, &Frame { bytes: &bytes, checked: false });
    };
    (1..=4).for_each(|port| arrive(stack, port));
    assert_eq!(stack.counters().tcp_accepted, 2);
    // The user does not know of them yet, and says again that there are two.
    stack.set_idle(listener, 2);
    arrive(stack, 5);
    assert_eq!(stack.counters().tcp_accepted, 2);
    assert!(matches!(stack.poll_event(), Some(Event::Incoming { .. })));
    arrive(stack, 6);
    assert_eq!(stack.counters().tcp_accepted, 2);
    stack.set_idle(listener, 2);
    arrive(stack, 7);
    assert_eq!(stack.counters().tcp_accepted, 3);
}

#[test]
fn answers_to_a_flood_are_bounded() {
    let mut net = Net::new(V6, 1_500, stream(), 1);
    let frame = Packet::new(ip(V6[0]), ip(V6[1])).segment(&syn(9, 0), &[]);
    for _ in 0..1_000 {
        net.arrive(1, &frame, false);
    }
    let answered = answers(&mut net).len() as u64;
    assert!((1..=256).contains(&answered), "{answered}");
    assert_eq!(counted(&net).answers_dropped, 1_000 - answered);
}

#[test]
fn datagrams_need_a_checksum_over_ipv6_only() {
    for (addresses, taken) in [(V6, 0), (V4, 1)] {
        let mut net = Net::new(addresses, 1_500, stream(), 1);
        net.hosts[1].stack.bind(9).unwrap();
        let mut frame = Packet::new(ip(addresses[0]), ip(addresses[1])).datagram(1, 9, b"x");
        let at = frame.len() - 3;
        frame[at..at + 2].fill(0);
        net.arrive(1, &frame, false);
        assert_eq!(net.hosts[1].datagrams.len(), taken, "RFC 8200 8.1");
        frame[at] = 1;
        net.arrive(1, &frame, false);
        assert_eq!(net.hosts[1].datagrams.len(), taken);
        assert_eq!(counted(&net).checksum, 2 - taken as u64);
    }
}

#[test]
fn an_identifier_of_the_past_does_nothing() {
    let mut net = Net::new(V6, 1_500, stream(), 1);
    let [client, _] = net.pair();
    net.hosts[0].stack.release(client);
    net.run(SECOND);
    let stack = &mut net.hosts[0].stack;
    assert!(stack.connection(client).is_none() && stack.flow(client).is_none());
    assert_eq!(stack.send(client, 1, true), Err(tcp::SendError::Closed));
    stack.close(client);
    stack.abort(client);
    stack.release(client);
    stack.set_receive_space(client, 1);
    assert!(stack.poll_held(client).is_none());
    let again = net.connect(0, 80);
    assert_eq!(again.index(), client.index(), "the place is used again");
    assert_ne!(again, client);
    assert!(net.hosts[0].stack.connection(client).is_none());
}

#[test]
fn a_connection_that_is_released_is_reset_and_gone() {
    let mut net = Net::new(V6, 1_500, stream(), 1);
    let [client, server] = net.pair();
    net.hosts[0].stack.send(client, 100_000, true).unwrap();
    net.hosts[0].stack.release(client);
    let reset = tcp::Event::Failed(Failure::Reset);
    assert!(net.run_until(SECOND, |net| net.hosts[1].knows(server, reset)));
    net.hosts[1].stack.release(server);
    net.run(SECOND);
    for host in &net.hosts {
        assert_eq!(host.stack.poll_timeout(), None);
        assert!(!host.stack.wants_transmit());
    }
}

#[test]
fn a_connection_in_time_wait_makes_room_for_a_new_one() {
    let mut net = Net::new(V6, 1_500, stream(), 1);
    let listener = net.listen(1, 80, 1);
    let to = (ip(V6[1]), 80).into();
    let config = net.config.clone();
    for round in 0..3 {
        net.hosts[1].stack.set_idle(listener, 1);
        let client = net.hosts[0].stack.connect(net.now, Some(5_000), to, &config).unwrap();
        net.hosts[0].adopt(client);
        assert!(net.run_until(SECOND, |net| net.hosts[0].knows(client, tcp::Event::Connected)));
        let twice = net.hosts[0].stack.connect(net.now, Some(5_000), to, &config);
        assert_eq!(twice, Err(ConnectError::InUse));
        // The server closes first, and waits.
        let server = net.hosts[1].accepted[round];
        net.hosts[1].stack.close(server);
        net.run(SECOND / 10);
        net.hosts[0].stack.close(client);
        net.run(SECOND / 10);
        net.hosts[0].stack.release(client);
        assert_eq!(net.hosts[1].stack.connection(server).unwrap().state(), State::TimeWait);
        if round == 0 {
            // Whether the user has forgotten it or not.
            net.hosts[1].stack.release(server);
        }
        net.run(2 * SECOND);
    }
    assert_eq!(counted(&net).tcp_reused, 2);
}

/// RFC 9293 3.6.1: the peer would otherwise wait for its timer twice, and reset what is there in between.
#[test]
fn a_connection_in_time_wait_gives_way_though_a_new_one_has_to_wait() {
    for timestamps in [false, true] {
        let mut net = Net::new(V6, 1_500, stream(), 1);
        let listener = net.listen(1, 80, 1);
        let says = |net: &mut Net, flags, seq, ack, value| {
            let timestamps = timestamps.then_some(Timestamps { value, echo: 0 });
            let sack_permitted = flags == Flags::SYN;
            let options = Options { timestamps, sack_permitted, ..Options::default() };
            let segment = Repr { flags, ack, options, ..syn(5_000, seq) };
            net.arrive(1, &Packet::new(ip(V6[0]), ip(V6[1])).segment(&segment, &[]), false);
            answers(net)
        };
        let none = SeqNumber(0);
        let ours = says(&mut net, Flags::SYN, 100, none, 1_000)[0].seq + 1;
        says(&mut net, Flags::ACK, 101, ours, 1_001);
        net.hosts[1].poll_events();
        let server = net.hosts[1].accepted[0];
        net.hosts[1].stack.close(server);
        assert_eq!(answers(&mut net).len(), 1, "its FIN");
        says(&mut net, Flags::FIN | Flags::ACK, 101, ours + 1, 1_001);
        let state = |net: &Net| net.hosts[1].stack.connection(server).map(|it| it.state());
        assert_eq!(state(&net), Some(State::TimeWait));
        // RFC 6191 2: one that is not younger changes nothing. No octet of it is reported (RFC 2883).
        let answer = says(&mut net, Flags::SYN, 101, none, 1_000);
        assert_eq!((answer.len(), answer[0].flags, answer[0].ack), (1, Flags::ACK, SeqNumber(102)));
        assert!(answer[0].options.sack.as_slice().is_empty());
        assert_eq!((state(&net), counted(&net).tcp_reused), (Some(State::TimeWait), 0));
        // Nobody is there for a younger one: it is not answered, but it finds nothing in its way.
        net.run(SECOND / 100);
        assert_eq!(says(&mut net, Flags::SYN, 9_000, none, 1_002), []);
        assert_eq!((counted(&net).tcp_reused, counted(&net).tcp_held), (1, 1));
        assert_ne!(state(&net), Some(State::TimeWait));
        net.hosts[1].stack.set_idle(listener, 1);
        net.hosts[1].poll_events();
        let answer = answers(&mut net);
        assert_eq!((answer[0].flags, answer[0].ack), (Flags::SYN | Flags::ACK, SeqNumber(9_001)));
    }
}

/// RFC 9293 3.6.1: the number that a connection begins with is above all that the one before it has used,
/// however far that has outrun the clock of initial numbers.
#[test]
fn what_follows_a_connection_in_time_wait_begins_above_it() {
    let mut net = Net::new(V6, 1_500, stream(), 1);
    let listener = net.listen(1, 80, 1);
    let says = |net: &mut Net, flags, seq, ack| {
        let segment = Repr { flags, ack, ..syn(5_000, seq) };
        net.arrive(1, &Packet::new(ip(V6[0]), ip(V6[1])).segment(&segment, &[]), false);
        answers(net)
    };
    let none = SeqNumber(0);
    let ours = says(&mut net, Flags::SYN, 100, none)[0].seq + 1;
    says(&mut net, Flags::ACK, 101, ours);
    net.hosts[1].poll_events();
    let server = net.hosts[1].accepted[0];
    net.hosts[1].stack.send(server, 900, true).unwrap();
    assert_eq!(answers(&mut net).len(), 1);
    net.hosts[1].stack.close(server);
    says(&mut net, Flags::ACK, 101, ours + 900);
    says(&mut net, Flags::FIN | Flags::ACK, 101, ours + 901);
    let state = |net: &Net| net.hosts[1].stack.connection(server).map(|it| it.state());
    assert_eq!(state(&net), Some(State::TimeWait));
    // One that is to be answered later would get a number of which nobody knows what it follows.
    let answer = says(&mut net, Flags::SYN, 9_000, none);
    assert_eq!((answer.len(), answer[0].flags), (1, Flags::ACK));
    assert_eq!(state(&net), Some(State::TimeWait));
    net.hosts[1].stack.set_idle(listener, 1);
    let answer = says(&mut net, Flags::SYN, 9_000, none);
    assert_eq!((answer[0].flags, answer[0].ack), (Flags::SYN | Flags::ACK, SeqNumber(9_001)));
    assert_eq!(answer[0].seq, ours + 901);
}

/// RFC 9293 3.8.6.1 keeps a connection whose peer answers, however long its window is closed; but only for a
/// user who wants it.
#[test]
fn a_peer_that_takes_nothing_does_not_keep_what_nobody_wants() {
    let mut net = Net::new(V6, 1_500, stream(), 1);
    net.listen(1, 80, 1);
    let says = |net: &mut Net, flags, seq, ack| {
        let segment = Repr { flags, ack, window: 0, ..syn(5_000, seq) };
        net.arrive(1, &Packet::new(ip(V6[0]), ip(V6[1])).segment(&segment, &[]), false);
        answers(net)
    };
    let ours = says(&mut net, Flags::SYN, 100, SeqNumber(0))[0].seq + 1;
    says(&mut net, Flags::ACK, 101, ours);
    net.hosts[1].poll_events();
    let server = net.hosts[1].accepted[0];
    says(&mut net, Flags::FIN | Flags::ACK, 101, ours);
    net.hosts[1].stack.close(server);
    net.hosts[1].stack.release(server);
    let seconds = (1..60).find(|_| {
        net.now += SECOND;
        net.hosts[1].stack.handle_timeout(net.now);
        let given_up = answers(&mut net).iter().any(|it| it.flags.has(Flags::RST));
        says(&mut net, Flags::ACK, 102, ours);
        given_up
    });
    assert!(seconds.is_some_and(|seconds| seconds > 10), "{seconds:?}");
}

/// RFC 9293 3.6.1 lets a SYN begin anew only where somebody listens.
#[test]
fn a_connection_in_time_wait_stays_where_nobody_watches_any_more() {
    let mut net = Net::new(V6, 1_500, stream(), 1);
    let [client, server] = net.pair();
    net.hosts[0].stack.close(client);
    net.run(SECOND / 10);
    net.hosts[1].stack.close(server);
    net.run(SECOND / 10);
    let stack = &mut net.hosts[0].stack;
    assert_eq!(stack.connection(client).unwrap().state(), State::TimeWait);
    let port = stack.flow(client).unwrap().local.port();
    let younger = Repr { source: 80, destination: port, ..syn(0, 0) };
    for seq in [0, 1 << 30, 1 << 31, 3 << 30] {
        let younger = Repr { seq: SeqNumber(seq), ..younger };
        let frame = Packet::new(ip(V6[1]), ip(V6[0])).segment(&younger, &[]);
        net.arrive(0, &frame, false);
    }
    assert_eq!(net.hosts[0].stack.connection(client).unwrap().state(), State::TimeWait);
}

#[test]
fn connections_are_bounded_and_those_that_only_wait_go_first() {
    let mut net = Net::with(1_500, stream(), 1, |host| {
        let config = Config::new(ip(V6[host]), 64, tcp::Secret([1, host as u64]));
        Config { max_connections: 4, ..config }
    });
    net.listen(1, 80, 100);
    let connected = |net: &mut Net| {
        let id = net.connect(0, 80);
        let known = |net: &mut Net| net.hosts[0].knows(id, tcp::Event::Connected);
        assert!(net.run_until(SECOND / 2, known), "{:?}", counted(net));
        id
    };
    let ids = [(); 4].map(|()| connected(&mut net));
    let (config, to) = (net.config.clone(), (ip(V6[1]), 80).into());
    let refused = net.hosts[0].stack.connect(net.now, None, to, &config);
    assert_eq!(refused, Err(ConnectError::TooMany));
    // A stranger is kept waiting as well.
    let frame = Packet::new(ip("fd00::9"), ip(V6[1])).segment(&syn(9, 0), &[]);
    net.arrive(1, &frame, false);
    assert_eq!(counted(&net).tcp_held, 1);
    // Ours close, first; theirs follow. All of ours wait for time to pass.
    let accepted = net.hosts[1].accepted.clone();
    for id in ids {
        net.hosts[0].stack.close(id);
    }
    net.run(SECOND);
    for id in accepted {
        net.hosts[1].stack.close(id);
    }
    net.run(SECOND);
    for id in &net.hosts[1].accepted.clone() {
        net.hosts[1].stack.release(*id);
    }
    let states = ids.map(|id| net.hosts[0].stack.connection(id).unwrap().state());
    assert_eq!(states, [State::TimeWait; 4]);
    // A user that still wants to see one keeps it.
    let refused = net.hosts[0].stack.connect(net.now, None, to, &config);
    assert_eq!(refused, Err(ConnectError::TooMany));
    ids[1..].iter().for_each(|id| net.hosts[0].stack.release(*id));
    net.run(SECOND);
    let again = [(); 3].map(|()| connected(&mut net));
    assert!(again.iter().all(|id| !ids.contains(id)));
    let refused = net.hosts[0].stack.connect(net.now, None, to, &config);
    assert_eq!(refused, Err(ConnectError::TooMany));
    assert!(net.hosts[0].stack.connection(ids[0]).is_some());
}

#[test]
fn who_came_to_a_port_that_is_not_watched_any_more_is_reset() {
    let mut net = Net::new(V6, 1_500, stream(), 1);
    let config = net.config.clone();
    let stack = &mut net.hosts[1].stack;
    let (old, _) = stack.listen(80, &config, 8).unwrap();
    stack.set_idle(old, 8);
    let bytes = Packet::new(ip(V6[0]), ip(V6[1])).segment(&syn(9, 0), &[]);
    stack.handle_frame(SECOND, &Frame { bytes: &bytes, checked: false });
    stack.unlisten(old);
    // Another takes its place before anybody has heard of the connection.
    let (new, _) = stack.listen(81, &config, 8).unwrap();
    stack.set_idle(new, 1);
    assert_eq!(stack.poll_event(), None);
    let answers = answers(&mut net);
    assert!(answers.last().is_some_and(|last| last.flags.has(Flags::RST)), "{answers:?}");
    net.run(SECOND);
    assert_eq!(net.hosts[1].stack.poll_timeout(), None, "nothing is left");
    let client = net.connect(0, 81);
    assert!(net.run_until(SECOND, |net| net.hosts[0].knows(client, tcp::Event::Connected)));
}

#[test]
fn peers_that_never_acknowledge_the_end_keep_nobody_out() {
    let mut net = Net::with(1_500, stream(), 1, |host| {
        let config = Config::new(ip(V6[host]), 64, tcp::Secret([1, host as u64]));
        Config { max_connections: 2, ..config }
    });
    net.listen(1, 80, 100);
    for _ in 0..2 {
        let id = net.connect(0, 80);
        assert!(net.run_until(SECOND, |net| net.hosts[0].knows(id, tcp::Event::Connected)));
        net.run(SECOND);
    }
    let accepted = net.hosts[1].accepted.clone();
    // The peer closes and is gone: the answer to our own end never comes.
    net.hosts[0].users.keys().copied().collect::<Vec<_>>().into_iter().for_each(|id| {
        net.hosts[0].stack.close(id);
    });
    net.run(SECOND);
    net.faults.lose = 1_000;
    let (config, to) = (net.config.clone(), (ip("fd00::9"), 80).into());
    for id in accepted {
        net.hosts[1].stack.close(id);
        net.run(SECOND);
        assert_eq!(net.hosts[1].stack.connection(id).unwrap().state(), State::LastAck);
        let refused = net.hosts[1].stack.connect(net.now, None, to, &config);
        assert_eq!(refused, Err(ConnectError::TooMany), "a user may still look at it");
        net.hosts[1].stack.release(id);
        net.run(SECOND / 10);
        let new = net.hosts[1].stack.connect(net.now, None, to, &config);
        net.hosts[1].adopt(new.expect("the oldest gives way"));
    }
}

#[test]
fn the_end_of_a_connection_that_nobody_has_is_given_up_early() {
    let mut net = Net::new(V6, 1_500, stream(), 1);
    net.listen(1, 80, 100);
    let id = net.connect(0, 80);
    assert!(net.run_until(SECOND, |net| net.hosts[0].knows(id, tcp::Event::Connected)));
    net.run(SECOND);
    let accepted = net.hosts[1].accepted[0];
    net.hosts[0].stack.close(id);
    net.run(SECOND);
    net.faults.lose = 1_000;
    net.hosts[1].stack.close(accepted);
    net.run(SECOND);
    net.hosts[1].stack.release(accepted);
    let used = net.hosts[1].stack.memory();
    net.run(19 * SECOND);
    assert!(net.hosts[1].stack.memory() >= used);
    net.run(2 * SECOND);
    assert!(net.hosts[1].stack.memory() + size_of::<tcp::Connection>() <= used);
}

#[test]
fn any_number_of_segments_may_come_before_one_can_be_sent() {
    let mut net = Net::new(V6, 1_500, stream(), 1);
    let [client, server] = net.pair();
    net.hosts[0].stack.send(client, 1, true).unwrap();
    let mut out = vec![0; 70_000];
    let first = net.hosts[0].stack.poll_transmit(net.now, &mut out).unwrap();
    let repr = Repr::parse(&out[ipv6::LEN..first.headers]).unwrap().0;
    for n in 0..600 {
        let segment = Repr { seq: repr.seq + n, ..repr };
        let frame = Packet::new(ip(V6[0]), ip(V6[1])).segment(&segment, b"x");
        net.arrive(1, &frame, false);
    }
    assert_eq!(net.hosts[1].user(server).contiguous, 600);
    assert!(!answers(&mut net).is_empty());
}
