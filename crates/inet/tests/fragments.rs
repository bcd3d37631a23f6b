//! Packets in parts: whole again in any order, or dropped, within bounds.

use std::net::Ipv6Addr;

use proptest::prelude::*;
use quipu_inet::fragments::{Counters, Fragments, MAX_OCTETS, MAX_PACKETS, PART_COST, PATIENCE};
use quipu_wire::ipv6_extension::{Fragment, Refusal};
use quipu_wire::{ipv4, ipv6};

const UDP: u8 = 17;

fn header(payload: usize) -> ipv6::Repr {
    ipv6::Repr {
        source: Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 0, 1),
        destination: Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 0, 2),
        next_header: 44,
        traffic_class: 0,
        flow_label: 0,
        hop_limit: 64,
        payload_len: 8 + payload as u16,
    }
}

fn v6(
    to: &mut Fragments,
    now: u64,
    id: u32,
    offset: usize,
    more: bool,
    payload: &[u8],
) -> Result<Option<u8>, Refusal> {
    let fragment = Fragment { next_header: UDP, offset: offset as u16, more, identification: id };
    to.handle_ipv6(now, &header(payload.len()), &fragment, payload)
}

fn octets(len: usize) -> Vec<u8> {
    (0..len).map(|n| (n * 7 + n / 256) as u8).collect()
}

/// Parts of `size` octets, as offset, more, payload.
fn cut(whole: &[u8], size: usize) -> Vec<(usize, bool, Vec<u8>)> {
    let parts = whole.chunks(size).enumerate();
    parts.map(|(n, part)| (n * size, (n + 1) * size < whole.len(), part.to_vec())).collect()
}

proptest! {
    #[test]
    fn whole_in_any_order_and_with_repetitions(
        len in 9usize..20_000,
        units in 20usize..200,
        order in prop::collection::vec(any::<prop::sample::Index>(), 0..300),
    ) {
        let whole = octets(len);
        let mut parts = cut(&whole, units * 8);
        prop_assume!(parts.len() > 1);
        let mut fragments = Fragments::default();
        for index in order {
            let (a, b) = (index.index(parts.len()), parts.len() - 1);
            parts.swap(a, b);
            let (offset, more, part) = parts[index.index(parts.len())].clone();
            // A repetition, but of the part that would be the last to come.
            if fragments.octets() > 0 && offset != parts[0].0 {
                prop_assert_eq!(v6(&mut fragments, 0, 1, offset, more, &part), Ok(None));
            }
        }
        let missing: Vec<_> = parts.iter().map(|part| part.0).collect();
        let mut done = None;
        for (n, (offset, more, part)) in parts.iter().rev().enumerate() {
            done = v6(&mut fragments, 0, 1, *offset, *more, part).unwrap();
            prop_assert_eq!(done.is_some(), n + 1 == missing.len());
        }
        prop_assert_eq!(done, Some(UDP));
        prop_assert_eq!(fragments.whole(), &whole[..]);
        prop_assert_eq!((fragments.octets(), fragments.poll_timeout()), (0, None));
    }

    #[test]
    fn anything_is_survived_within_bounds(
        parts in prop::collection::vec(
            (0u32..100, 0u16..0x2000, any::<bool>(), 0usize..2_000, 0u64..PATIENCE / 100), 0..600),
    ) {
        let mut fragments = Fragments::default();
        let mut now = 0;
        for (id, units, more, len, wait) in parts {
            now += wait;
            fragments.handle_timeout(now);
            let _ = v6(&mut fragments, now, id, usize::from(units) * 8, more, &octets(len));
            prop_assert!(fragments.octets() <= MAX_OCTETS);
            prop_assert!(fragments.poll_timeout().is_none_or(|at| at > now));
        }
    }
}

#[test]
fn overlaps_make_a_packet_void() {
    // RFC 5722 4: what has come, and what is still to come.
    let parts = cut(&octets(4_000), 1_000);
    for (offset, more, payload) in [
        (992, true, octets(16)),
        (0, true, octets(1_008)),
        (1_000, true, vec![9; 1_000]),
        (8, true, octets(8)),
        (4_000, false, octets(8)),
        (1_000, false, octets(8)),
    ] {
        let mut fragments = Fragments::default();
        for n in [0, 1, 3] {
            v6(&mut fragments, 0, 1, parts[n].0, parts[n].1, &parts[n].2).unwrap();
        }
        assert_eq!(v6(&mut fragments, 0, 1, offset, more, &payload), Ok(None));
        assert_eq!((fragments.counters().void, fragments.octets()), (1, 0), "{offset}");
        for (offset, more, part) in &parts {
            assert_eq!(v6(&mut fragments, 0, 1, *offset, *more, part), Ok(None));
        }
        assert_eq!(fragments.counters(), &Counters { void: 1, ..Counters::default() });
    }
}

#[test]
fn illegal_parts_are_refused() {
    let mut fragments = Fragments::default();
    let problem = |code, at| Err(Refusal::Problem { code, at, even_to_group: false });
    assert_eq!(v6(&mut fragments, 0, 1, 0, true, &octets(15)), problem(0, -36));
    assert_eq!(v6(&mut fragments, 0, 1, 65_528, false, &octets(8)), problem(0, 2));
    assert_eq!(v6(&mut fragments, 0, 1, 8, false, &[]), Err(Refusal::Discard));
    // RFC 7112: the first part has all headers. Here options would be longer than it.
    let fragment = Fragment { next_header: 60, offset: 0, more: true, identification: 1 };
    let cut_short = [UDP, 1, 1, 4, 0, 0, 0, 0];
    let result = fragments.handle_ipv6(0, &header(8), &fragment, &cut_short);
    assert_eq!(result, problem(3, -40));
    assert_eq!(fragments.counters().malformed, 4);
    assert_eq!(fragments.octets(), 0);
}

#[test]
fn time_is_bounded() {
    let mut fragments = Fragments::default();
    v6(&mut fragments, 5, 1, 0, true, &octets(8)).unwrap();
    assert_eq!(fragments.poll_timeout(), Some(5 + PATIENCE));
    fragments.handle_timeout(5 + PATIENCE);
    assert_eq!((fragments.counters().expired, fragments.octets()), (1, 0));
    assert_eq!(v6(&mut fragments, 6 + PATIENCE, 1, 8, false, &octets(8)), Ok(None));
}

#[test]
fn the_oldest_gives_way() {
    let mut fragments = Fragments::default();
    for id in 0..=MAX_PACKETS as u32 {
        v6(&mut fragments, u64::from(id), id, 0, true, &octets(8)).unwrap();
    }
    assert_eq!(fragments.counters().evicted, 1);
    assert_eq!(v6(&mut fragments, 99, 1, 8, false, &octets(8)), Ok(Some(UDP)));
    // By octets as well.
    let mut fragments = Fragments::default();
    let large = 16_000;
    let fit = MAX_OCTETS / (large + PART_COST);
    for id in 0..=fit as u32 {
        v6(&mut fragments, 0, id / 3, id as usize % 3 * large, true, &octets(large)).unwrap();
    }
    assert!(fragments.counters().evicted == 1 && fragments.octets() <= MAX_OCTETS);
    // And a packet of too many parts is void.
    for n in 0..200 {
        v6(&mut fragments, 0, 1_000, n * 8, true, &octets(8)).unwrap();
    }
    assert_eq!(fragments.counters().void, 1);
}

#[test]
fn packets_are_told_apart() {
    let mut fragments = Fragments::default();
    let whole = octets(24);
    let part = |id: u16, protocol, offset: u16| ipv4::Repr {
        source: [10, 0, 0, 1].into(),
        destination: [10, 0, 0, 2].into(),
        protocol,
        traffic_class: 0,
        hop_limit: 64,
        identification: id,
        dont_fragment: false,
        more_fragments: offset == 0,
        fragment_offset: offset,
        payload_len: 16 - offset / 2,
    };
    assert!(!fragments.handle_ipv4(0, &part(1, UDP, 0), &whole[..16]));
    assert!(!fragments.handle_ipv4(0, &part(2, UDP, 16), &whole[16..]));
    assert!(!fragments.handle_ipv4(0, &part(1, 6, 16), &whole[16..]));
    assert!(fragments.handle_ipv4(0, &part(1, UDP, 16), &whole[16..]));
    assert_eq!(fragments.whole(), whole);
    assert!(!fragments.handle_ipv4(0, &part(7, UDP, 0), &whole[..15]), "uneven");
    assert_eq!(fragments.counters().malformed, 1);
}

/// RFC 3168 5.3: a mark on any part is one of the whole, unless a part says that marks are not heard.
#[test]
fn the_whole_is_marked_if_a_part_is() {
    const CASES: [([u8; 3], Option<u8>); 9] = [
        ([0, 0, 0], Some(0)),
        ([1, 1, 1], Some(1)),
        ([2, 2, 2], Some(2)),
        ([3, 3, 3], Some(3)),
        ([3, 2, 2], Some(3)),
        ([2, 3, 1], Some(3)),
        ([2, 2, 3], Some(3)),
        ([0, 3, 3], None),
        ([2, 3, 0], None),
    ];
    let parts = cut(&octets(48), 16);
    for (marks, whole) in CASES {
        for order in [[0, 1, 2], [2, 0, 1], [1, 2, 0]] {
            let mut fragments = Fragments::default();
            let mut done = None;
            for n in order {
                let (offset, more, part) = &parts[n];
                let traffic_class = 0xb8 | marks[n];
                let header = ipv6::Repr { traffic_class, ..header(part.len()) };
                let (offset, more) = (*offset as u16, *more);
                let fragment = Fragment { next_header: UDP, offset, more, identification: 1 };
                done = fragments.handle_ipv6(0, &header, &fragment, part).unwrap();
            }
            assert_eq!(done.map(|_| fragments.ecn()), whole, "{marks:?} in the order {order:?}");
            assert_eq!(fragments.counters().void, u64::from(whole.is_none()));
            assert_eq!(fragments.octets(), 0, "nothing is left of it");
        }
    }
}
