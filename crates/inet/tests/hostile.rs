//! A peer that sends anything: no panic, bounded memory and work, and never an answer without end.

mod common;

use common::{Pair, flow, octet, secret};
use proptest::prelude::*;
use proptest::test_runner::RngSeed;
use quipu_inet::tcp::{
    Config, Connection, Flow, Listener, MILLISECOND as MS, Mode, Opening, SECOND, State,
};
use quipu_wire::tcp::{Flags, Options, Repr, SackBlock, SeqNumber, Timestamps};

/// What a hostile peer, which sees everything, may send: mostly near to what is expected.
#[derive(Clone, Debug)]
struct Attack {
    flags: u8,
    seq: i32,
    ack: i32,
    window: u16,
    urgent: u16,
    len: usize,
    sack: Vec<(i32, i32)>,
    timestamp: Option<(i32, i32)>,
    wait: u64,
    /// What the user does before.
    call: u8,
}

fn near() -> impl Strategy<Value = i32> {
    prop_oneof![
        4 => -3i32..4,
        3 => -5_000i32..20_000,
        1 => any::<i32>(),
    ]
}

fn attack() -> impl Strategy<Value = Attack> {
    let numbers = (any::<u8>(), near(), near(), any::<u16>(), any::<u16>(), 0usize..3_000);
    let options = (
        prop::collection::vec((near(), near()), 0..4),
        prop::option::of((near(), near())),
        0u64..5_000,
        0u8..12,
    );
    (numbers, options).prop_map(|((flags, seq, ack, window, urgent, len), options)| {
        // ACK is nearly always there, SYN and RST seldom: otherwise nothing gets far.
        let flags = match flags % 16 {
            0 => flags,
            1..4 => (flags | 0x10) & !0x06,
            _ => 0x10 | (flags & 0x09),
        };
        let (sack, timestamp, wait, call) = options;
        Attack { flags, seq, ack, window, urgent, len, sack, timestamp, wait, call }
    })
}

fn call(now: u64, connection: &mut Connection, call: u8, len: u64) {
    match call {
        0 => connection.close(),
        1 => connection.set_path_mss(now, len as u16),
        2..5 => connection.set_receive_space(len * 7),
        5..10 => drop(connection.send(1 + len, true)),
        _ => {}
    }
}

fn suffers(config: Config, attacks: &[Attack]) {
    let mut pair = Pair::new(config, 1);
    pair.connect();
    let connection = pair.ends[0].connection.as_mut().unwrap();
    let mut now = pair.now;
    // Where both ends stand, as a peer on the path sees it.
    let (mut ours, mut theirs) = (SeqNumber(0), SeqNumber(0));
    connection.set_receive_space(1 << 20);
    call(now, connection, 5, 1);
    for attack in attacks {
        now += attack.wait * MS;
        connection.handle_timeout(now);
        call(now, connection, attack.call, attack.len as u64);
        let mut sent = 0;
        while let Some(segment) = connection.poll_transmit(now) {
            (ours, theirs) = (segment.header.seq, segment.header.ack);
            sent += 1;
            assert!(sent < 2_000, "an answer without end");
        }
        let deadline = connection.poll_timeout();
        assert!(deadline.is_none_or(|at| at > now), "a stale deadline");
        let at = |number: SeqNumber, by: i32| number + by as u32;
        let mut options = Options {
            timestamps: attack
                .timestamp
                .map(|(value, echo)| Timestamps { value: value as u32, echo: echo as u32 }),
            ..Options::default()
        };
        for (left, len) in &attack.sack {
            let left = at(ours, *left);
            options.sack.push(SackBlock { left, right: at(left, *len) });
        }
        let header = Repr {
            source: 80,
            destination: 40_000,
            seq: at(theirs, attack.seq),
            ack: at(ours, attack.ack),
            flags: Flags::from_bits(attack.flags),
            window: attack.window,
            urgent: attack.urgent,
            options,
        };
        let payload: Vec<u8> = (0..attack.len as u64).map(|at| octet(1, at)).collect();
        let brought = connection.handle_segment(now, &header, &payload, attack.wait % 7 == 0);
        if let Some(placement) = brought.placement {
            assert!(placement.payload.end <= payload.len());
        }
        while connection.poll_held().is_some() {}
        while connection.poll_event().is_some() {}
    }
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 200,
        failure_persistence: None,
        rng_seed: RngSeed::Fixed(7),
        ..Default::default()
    })]

    #[test]
    fn anything_is_survived(
        attacks in prop::collection::vec(attack(), 1..120),
        message in any::<bool>(),
        timestamps in any::<bool>(),
        sack in any::<bool>(),
    ) {
        let mode = if message { Mode::Message } else { Mode::Stream };
        suffers(Config { mode, timestamps, sack, ..Config::default() }, &attacks);
    }
}

#[test]
fn a_flood_of_syns_costs_no_memory() {
    let mut listener = Listener::new(Config::default(), secret(1), 4);
    let (mut half_open, mut replies) = (0, 0);
    for n in 0..10_000u16 {
        let flow = Flow { remote: ([10, 0, 0, 1], n).into(), ..flow(1) };
        let syn = Repr { source: n, destination: 80, flags: Flags::SYN, ..Repr::default() };
        match listener.handle_segment(SECOND, &flow, &syn, 0, true) {
            Opening::HalfOpen(_) => half_open += 1,
            Opening::Reply(reply) => {
                assert!(reply.flags.has(Flags::SYN | Flags::ACK));
                replies += 1;
            }
            other => panic!("{other:?}"),
        }
    }
    assert_eq!((half_open, replies), (4, 9_996));
    listener.settled();
    let syn = Repr { flags: Flags::SYN, ..Repr::default() };
    let opening = listener.handle_segment(SECOND, &flow(1), &syn, 0, true);
    assert!(matches!(opening, Opening::HalfOpen(_)), "there is room again");
}

#[test]
fn a_cookie_counts_for_a_while_and_for_its_flow_only() {
    let mut listener = Listener::new(Config::default(), secret(1), 0);
    let syn = Repr { flags: Flags::SYN, seq: SeqNumber(9), ..Repr::default() };
    let begun = 1_000 * SECOND;
    let Opening::Reply(reply) = listener.handle_segment(begun, &flow(1), &syn, 0, true) else {
        panic!("a cookie");
    };
    let ack = Repr { flags: Flags::ACK, seq: syn.seq + 1, ack: reply.seq + 1, ..Repr::default() };
    let mut opens = |now, flow: &Flow, ack: &Repr| {
        matches!(listener.handle_segment(now, flow, ack, 0, true), Opening::Open(_))
    };
    assert!(opens(begun + SECOND, &flow(1), &ack));
    assert!(opens(begun + 60 * SECOND, &flow(1), &ack));
    assert!(!opens(begun + 130 * SECOND, &flow(1), &ack), "too old");
    let mut other = flow(1);
    other.remote.set_port(1);
    assert!(!opens(begun + SECOND, &other, &ack), "another flow's");
    let number = Repr { seq: ack.seq + 1, ..ack };
    assert!(!opens(begun + SECOND, &flow(1), &number), "another number of the peer");
}

#[test]
fn a_connection_in_time_wait_gives_way_to_a_younger_one() {
    for timestamps in [false, true] {
        let mut pair = Pair::new(Config { timestamps, ..Config::default() }, 3);
        pair.connect();
        for end in 0..2 {
            pair.ends[end].connection().close();
        }
        let waits = |pair: &mut Pair| pair.ends[0].connection().state() == State::TimeWait;
        assert!(pair.run_until(SECOND, waits));
        let last = pair.ends[1].last.expect("the peer has sent something");
        let next = last.seq + 2;
        // RFC 6191 2: by timestamp if there is one, and by number otherwise.
        let cases = if timestamps {
            [(next, 1, true), (next, -1, false), (next - 9, 1, true)]
        } else {
            [(next, 0, true), (next - 9, 0, false), (next + 9, 0, true)]
        };
        for (seq, later, gives_way) in cases {
            let mut syn = Repr { flags: Flags::SYN, seq, ..Repr::default() };
            syn.options.timestamps = last.options.timestamps.map(|timestamps| Timestamps {
                value: timestamps.value.wrapping_add_signed(later),
                echo: 0,
            });
            let connection = pair.ends[0].connection();
            assert_eq!(connection.gives_way_to(&syn), gives_way, "{seq:?} {later}");
            syn.flags = Flags::ACK;
            assert!(!connection.gives_way_to(&syn));
        }
    }
}

#[test]
fn only_the_end_itself_prolongs_time_wait() {
    let mut pair = Pair::new(Config { time_wait: SECOND, ..Config::default() }, 3);
    pair.connect();
    for end in 0..2 {
        pair.ends[end].connection().close();
    }
    let waits = |pair: &mut Pair| pair.ends[0].connection().state() == State::TimeWait;
    assert!(pair.run_until(SECOND, waits));
    let last = pair.ends[1].last.expect("the peer has sent something");
    let seq = pair.ends[0].last.expect("so has this end").ack - 1;
    let (begun, connection) = (pair.now, pair.ends[0].connection());
    let ours = connection.poll_timeout().expect("2 MSL") - begun;
    let fin = Repr { flags: Flags::FIN | Flags::ACK, seq, ..last };
    for (seq, later) in [(seq - 1_000, 0), (seq + 9_000_000, 0), (seq + 1, 0), (seq, MS)] {
        connection.handle_segment(begun + MS, &Repr { seq, ..fin }, &[], false);
        let end = connection.poll_timeout().unwrap();
        assert!((end > begun + ours) == (later > 0), "{seq:?} {end}");
    }
}
