//! Neighbours: two ends that look for each other, time, routers, and strangers who lie.

use std::net::{IpAddr, Ipv6Addr};

use proptest::prelude::*;
use quipu_inet::neighbour::{
    Event, Lookup, MAX_FRAME, MAX_HEARD, MAX_KNOWN, MAX_SOUGHT, Neighbours, Settings,
};
use quipu_inet::tcp::Secret;
use quipu_wire::ndp::{Advertisement, Prefix, Prefixes, Repr, Station};
use quipu_wire::{arp, ethernet, icmpv6, ipv6};

const SECOND: u64 = 1_000_000_000;
const A: Station = [2, 0, 0, 0, 0, 0xa];
const B: Station = [2, 0, 0, 0, 0, 0xb];
const EVIL: Station = [2, 0, 0, 0, 0, 0xe];
const ROUTER: Ipv6Addr = Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 0, 0x99);

fn v6(last: u16) -> Ipv6Addr {
    Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, last)
}

fn v4(last: u8) -> IpAddr {
    [10, 0, 0, last].into()
}

fn end(last: u8, station: Station) -> Neighbours {
    let addresses =
        [(ipv6::link_local(station).into(), 64), (v6(u16::from(last)).into(), 64), (v4(last), 24)];
    let gateways = [v4(254)];
    let settings = Settings { station, addresses: &addresses, gateways: &gateways, mtu: 1500 };
    Neighbours::new(&settings, Secret([u64::from(last), 7]))
}

fn frames(from: &mut Neighbours) -> Vec<Vec<u8>> {
    let mut frames = Vec::new();
    let mut out = [0; MAX_FRAME];
    while from.wants_transmit() {
        let len = from.poll_transmit(&mut out).unwrap();
        frames.push(out[..len].to_vec());
    }
    assert_eq!(from.poll_transmit(&mut out), None);
    frames
}

/// The message of a frame of Neighbour Discovery.
fn discovery(frame: &[u8]) -> (ethernet::Repr, ipv6::Repr, Repr) {
    let (ethernet, at) = ethernet::Repr::parse(frame).unwrap();
    let (header, len) = ipv6::Repr::parse(&frame[at..]).unwrap();
    let message = icmpv6::Repr::parse(header.source, header.destination, &frame[at + len..]);
    let icmpv6::Repr::Discovery(message) = message.unwrap() else { panic!() };
    (ethernet, header, message)
}

fn deliver(now: u64, to: &mut Neighbours, frame: &[u8]) {
    match ethernet::Repr::parse(frame).unwrap().0.kind {
        ethernet::kind::ARP => {
            let message = arp::Repr::parse(&frame[ethernet::HEADER..]).unwrap();
            to.handle_arp(now, &message);
        }
        _ => {
            let (_, header, message) = discovery(frame);
            to.handle_discovery(now, &header, &message);
        }
    }
}

fn header(source: Ipv6Addr, destination: Ipv6Addr) -> ipv6::Repr {
    ipv6::Repr {
        source,
        destination,
        next_header: icmpv6::PROTOCOL,
        traffic_class: 0,
        flow_label: 0,
        hop_limit: 255,
        payload_len: 0,
    }
}

fn solicitation(station: Station) -> Repr {
    Repr::NeighbourSolicitation { target: v6(1), station: Some(station) }
}

fn advertisement(last: u16, station: Option<Station>, solicited: bool, overrides: bool) -> Repr {
    Repr::NeighbourAdvertisement { target: v6(last), router: false, solicited, overrides, station }
}

fn events(of: &mut Neighbours) -> Vec<Event> {
    std::iter::from_fn(|| of.poll_event()).collect()
}

/// Lets `a` find its neighbour `last`, who has station `station`.
fn find(now: u64, a: &mut Neighbours, last: u16, station: Station) {
    assert_eq!(a.lookup(now, v6(last).into()), Lookup::Resolving);
    let answer = advertisement(last, Some(station), true, true);
    a.handle_discovery(now, &header(v6(last), v6(1)), &answer);
    frames(a);
    assert_eq!(events(a), [Event::Found(v6(last).into())]);
}

/// Lets time pass up to `until`, and counts the frames.
fn pass(a: &mut Neighbours, until: u64) -> usize {
    let mut sent = 0;
    while let Some(at) = a.poll_timeout().filter(|at| *at <= until) {
        a.handle_timeout(at);
        assert!(a.poll_timeout().is_none_or(|next| next > at), "a stale deadline");
        sent += frames(a).len();
    }
    sent
}

#[test]
fn two_ends_find_each_other() {
    for address in [v6(2).into(), v4(2)] {
        let (mut a, mut b) = (end(1, A), end(2, B));
        assert_eq!(a.lookup(0, address), Lookup::Resolving);
        assert_eq!(a.lookup(0, address), Lookup::Resolving);
        let [question] = &frames(&mut a)[..] else { panic!("asked once") };
        deliver(0, &mut b, question);
        let [answer] = &frames(&mut b)[..] else { panic!("answered once") };
        deliver(0, &mut a, answer);
        assert_eq!(events(&mut a), [Event::Found(address)]);
        assert_eq!(a.lookup(0, address), Lookup::Station(B));
        // The one who was asked knows the asker.
        let asker = if address.is_ipv4() { v4(1) } else { v6(1).into() };
        assert_eq!(b.lookup(0, asker), Lookup::Station(A));
        assert!(frames(&mut a).is_empty() && frames(&mut b).is_empty());
    }
}

#[test]
fn a_question_goes_to_the_group_with_the_nearest_address() {
    let mut a = end(1, A);
    a.lookup(0, v6(2).into());
    let (ethernet, header, message) = discovery(&frames(&mut a)[0]);
    assert_eq!(ethernet.destination, [0x33, 0x33, 0xff, 0, 0, 2]);
    assert_eq!((header.source, header.hop_limit), (v6(1), 255));
    assert_eq!(header.destination, ipv6::solicited_node(v6(2)));
    assert_eq!(message, Repr::NeighbourSolicitation { target: v6(2), station: Some(A) });
    a.lookup(0, ROUTER.into());
    assert_eq!(discovery(&frames(&mut a)[0]).1.source, ipv6::link_local(A));
}

#[test]
fn nobody_answers() {
    // RFC 4861 7.2.2: three questions, a second apart.
    let mut a = end(1, A);
    a.lookup(0, v6(2).into());
    assert_eq!(frames(&mut a).len(), 1);
    assert_eq!(a.poll_timeout(), Some(SECOND));
    assert_eq!(pass(&mut a, 2 * SECOND), 2);
    assert_eq!(events(&mut a), []);
    assert_eq!(pass(&mut a, 3 * SECOND), 0);
    assert_eq!(events(&mut a), [Event::Lost(v6(2).into())]);
    assert_eq!(a.poll_timeout(), None);
    assert_eq!(a.lookup(4 * SECOND, v6(2).into()), Lookup::Resolving, "from the beginning");
}

#[test]
fn a_neighbour_in_use_is_asked_again_and_given_up() {
    // RFC 4861 7.3.3: REACHABLE for at most 45 s, DELAY for five, three questions to its station.
    let mut a = end(1, A);
    find(0, &mut a, 2, B);
    assert_eq!(pass(&mut a, 14 * SECOND), 0);
    assert_eq!(a.lookup(14 * SECOND, v6(2).into()), Lookup::Station(B));
    assert_eq!(a.poll_timeout(), None, "reachable for 15 s at least");
    assert_eq!(a.lookup(45 * SECOND, v6(2).into()), Lookup::Station(B));
    assert_eq!(a.poll_timeout(), Some(50 * SECOND));
    a.handle_timeout(50 * SECOND);
    let (ethernet, header, _) = discovery(&frames(&mut a)[0]);
    assert_eq!((ethernet.destination, header.destination), (B, v6(2)));
    assert_eq!(a.lookup(50 * SECOND, v6(2).into()), Lookup::Station(B), "still in use");
    assert_eq!(pass(&mut a, 60 * SECOND), 2);
    assert_eq!(events(&mut a), [Event::Lost(v6(2).into())]);
    assert_eq!(a.lookup(60 * SECOND, v6(2).into()), Lookup::Resolving);
}

#[test]
fn the_upper_layer_may_doubt_it() {
    // RFC 1122 3.3.1.4: it is asked at its station, once, and stays in use meanwhile.
    let mut a = end(1, A);
    find(0, &mut a, 2, B);
    a.doubt(SECOND, v6(2).into());
    a.doubt(SECOND, v6(2).into());
    let asked = frames(&mut a);
    assert_eq!((asked.len(), discovery(&asked[0]).0.destination), (1, B));
    assert_eq!(a.lookup(SECOND, v6(2).into()), Lookup::Station(B));
    assert_eq!(pass(&mut a, 4 * SECOND), 2);
    assert_eq!(events(&mut a), [Event::Lost(v6(2).into())]);
    a.doubt(4 * SECOND, v6(2).into());
    assert_eq!(pass(&mut a, 9 * SECOND), 0, "nothing is known that could be doubted");
}

#[test]
fn an_answer_or_the_upper_layer_keeps_it() {
    let mut a = end(1, A);
    find(0, &mut a, 2, B);
    a.lookup(45 * SECOND, v6(2).into());
    a.confirm(46 * SECOND, v6(2).into());
    assert_eq!(pass(&mut a, 60 * SECOND), 0, "it need not be asked");
    a.lookup(100 * SECOND, v6(2).into());
    assert_eq!(pass(&mut a, 105 * SECOND), 1);
    a.handle_discovery(105 * SECOND, &header(v6(2), v6(1)), &advertisement(2, None, true, false));
    assert_eq!(pass(&mut a, 119 * SECOND), 0);
    assert_eq!(a.lookup(119 * SECOND, v6(2).into()), Lookup::Station(B));
}

#[test]
fn what_advertisements_change() {
    // RFC 4861 7.2.5, and appendix C.
    let other = Some(EVIL);
    let cases = [
        // (station, solicited, overrides) -> (station afterwards, questions when it is used)
        (None, false, true, B, 0),
        (Some(B), false, true, B, 0),
        (other, false, false, B, 1),
        (other, true, false, B, 1),
        (other, false, true, EVIL, 1),
        (other, true, true, EVIL, 0),
    ];
    for (station, solicited, overrides, expected, questions) in cases {
        let mut a = end(1, A);
        find(0, &mut a, 2, B);
        let message = advertisement(2, station, solicited, overrides);
        a.handle_discovery(0, &header(v6(2), v6(1)), &message);
        assert_eq!(a.lookup(0, v6(2).into()), Lookup::Station(expected), "{message:?}");
        assert_eq!(pass(&mut a, 5 * SECOND), questions, "{message:?}");
    }
}

#[test]
fn an_advertisement_that_nobody_wants_is_not_kept() {
    let mut a = end(1, A);
    a.handle_discovery(0, &header(v6(2), v6(1)), &advertisement(2, Some(B), true, true));
    assert_eq!(a.lookup(0, v6(2).into()), Lookup::Resolving);
    // And one without a station is no answer.
    a.handle_discovery(0, &header(v6(2), v6(1)), &advertisement(2, None, true, true));
    assert_eq!(a.lookup(0, v6(2).into()), Lookup::Resolving);
}

#[test]
fn messages_that_break_the_rules_are_dropped() {
    let group = ipv6::solicited_node(v6(1));
    let unspecified = Ipv6Addr::UNSPECIFIED;
    let good = header(v6(2), group);
    let router =
        |source| (header(source, v6(1)), Repr::RouterAdvertisement(Advertisement::default()));
    let bad = [
        (ipv6::Repr { hop_limit: 254, ..good }, solicitation(B)),
        (header(unspecified, group), solicitation(B)),
        (header(unspecified, v6(1)), Repr::NeighbourSolicitation { target: v6(1), station: None }),
        (good, solicitation([3, 0, 0, 0, 0, 1])),
        (header(group, group), solicitation(B)),
        (header(v6(2), group), advertisement(2, Some(B), true, true)),
        router(v6(9)),
    ];
    for (n, (header, message)) in bad.iter().enumerate() {
        let mut a = end(1, A);
        a.handle_discovery(0, header, message);
        assert_eq!((a.counters().invalid, frames(&mut a).len()), (1, 0), "{n}");
        assert_eq!(a.lookup(0, v6(2).into()), Lookup::Resolving, "{n}");
    }
    let mut a = end(1, A);
    a.handle_discovery(0, &good, &solicitation(B));
    assert_eq!((a.counters().invalid, frames(&mut a).len()), (0, 1));
}

#[test]
fn one_who_has_no_address_yet_is_answered_to_all() {
    // RFC 4861 7.2.4: duplicate address detection of a neighbour.
    let mut a = end(1, A);
    let message = Repr::NeighbourSolicitation { target: v6(1), station: None };
    let asked = header(Ipv6Addr::UNSPECIFIED, ipv6::solicited_node(v6(1)));
    a.handle_discovery(0, &asked, &message);
    let (ethernet, header, answer) = discovery(&frames(&mut a)[0]);
    assert_eq!(ethernet.destination, [0x33, 0x33, 0, 0, 0, 1]);
    assert_eq!((header.source, header.destination), (v6(1), "ff02::1".parse().unwrap()));
    assert!(matches!(answer, Repr::NeighbourAdvertisement { solicited: false, .. }));
}

#[test]
fn somebody_else_has_an_own_address() {
    let mut a = end(1, A);
    a.handle_discovery(0, &header(v6(1), v6(1)), &advertisement(1, Some(EVIL), false, true));
    a.handle_discovery(0, &header(v6(1), ipv6::solicited_node(v6(1))), &solicitation(EVIL));
    let claim = arp::Repr {
        operation: arp::Operation::Request,
        sender_station: EVIL,
        sender: [10, 0, 0, 1].into(),
        target_station: [0; 6],
        target: [10, 0, 0, 1].into(),
    };
    a.handle_arp(0, &claim);
    assert_eq!(a.counters().conflicts, 3);
    assert_eq!(a.counters().first_conflict, Some((v6(1).into(), EVIL)));
}

#[test]
fn one_that_begins_tells_all_where_its_addresses_are() {
    let mut a = end(1, A);
    find(0, &mut a, 2, B);
    assert_eq!(a.lookup(0, v4(2)), Lookup::Resolving);
    let answer = arp::Repr {
        operation: arp::Operation::Reply,
        sender_station: B,
        sender: [10, 0, 0, 2].into(),
        target_station: A,
        target: [10, 0, 0, 1].into(),
    };
    a.handle_arp(0, &answer);
    // Another one comes with these addresses, at another station, of which this end has not asked.
    let mut moved = end(2, EVIL);
    moved.begin(SECOND);
    let told = frames(&mut moved);
    told.iter().for_each(|frame| deliver(SECOND, &mut a, frame));
    for address in [v6(2).into(), v4(2)] {
        assert_eq!(a.lookup(SECOND, address), Lookup::Station(EVIL), "{address}");
    }
    // RFC 5227 2.3, RFC 4861 7.2.6: to all, whoever they are.
    let to = |frame: &[u8]| ethernet::Repr::parse(frame).unwrap().0.destination;
    let all = [ipv6::multicast_station("ff02::1".parse().unwrap()), ethernet::BROADCAST];
    assert_eq!(told.iter().filter(|frame| all.contains(&to(frame))).count(), 3);
    // Twice, and then no more: behind it are two more questions for routers.
    assert_eq!(pass(&mut moved, 4 * SECOND), 3);
    assert_eq!(pass(&mut moved, 100 * SECOND), 2);
}

#[test]
fn arp_between_others_is_not_kept_and_a_known_neighbour_may_move() {
    let mut a = end(1, A);
    let ask = |sender: u8, station, target: u8| arp::Repr {
        operation: arp::Operation::Request,
        sender_station: station,
        sender: [10, 0, 0, sender].into(),
        target_station: [0; 6],
        target: [10, 0, 0, target].into(),
    };
    a.handle_arp(0, &ask(2, B, 3));
    assert_eq!(a.lookup(0, v4(2)), Lookup::Resolving);
    assert_eq!(frames(&mut a).len(), 1, "the question only");
    let answer = arp::Repr { operation: arp::Operation::Reply, target_station: A, ..ask(2, B, 1) };
    a.handle_arp(0, &answer);
    assert_eq!(a.lookup(0, v4(2)), Lookup::Station(B));
    a.handle_arp(0, &ask(2, EVIL, 2));
    assert_eq!(a.lookup(0, v4(2)), Lookup::Station(EVIL));
    assert_eq!(pass(&mut a, 5 * SECOND), 1, "but it is asked whether that is so");
    a.handle_arp(0, &ask(4, [0xff; 6], 1));
    assert_eq!((a.counters().invalid, frames(&mut a).len()), (1, 0));
}

#[test]
fn a_flood_of_strangers_does_not_push_out_who_has_answered() {
    let mut a = end(1, A);
    find(0, &mut a, 2, B);
    for n in 0..5_000u16 {
        let stranger = v6(1_000 + n);
        a.handle_discovery(1, &header(stranger, v6(1)), &solicitation(EVIL));
        frames(&mut a);
        a.lookup(2, v6(10_000 + n).into());
        frames(&mut a);
    }
    let lost = events(&mut a).len();
    assert!(lost <= 5_000 - MAX_SOUGHT && lost > 0);
    assert_eq!(a.counters().evicted, (10_000 - MAX_HEARD - MAX_SOUGHT) as u64);
    assert_eq!(a.lookup(3, v6(2).into()), Lookup::Station(B));
    // One who is being asked for when the flood comes does not wait for ever either: it is told.
    assert_eq!(pass(&mut a, 3 * SECOND + 3), 2 * MAX_SOUGHT);
}

#[test]
fn of_those_known_the_one_used_longest_ago_goes() {
    let mut a = end(1, A);
    for n in 0..MAX_KNOWN as u16 {
        find(u64::from(n), &mut a, 100 + n, B);
    }
    a.lookup(5_000, v6(100).into());
    find(6_000, &mut a, 99, B);
    assert_eq!(a.lookup(6_000, v6(100).into()), Lookup::Station(B));
    assert_eq!(a.lookup(6_000, v6(101).into()), Lookup::Resolving);
}

#[test]
fn answers_that_nobody_takes_are_bounded() {
    let mut a = end(1, A);
    for _ in 0..1_000 {
        a.handle_discovery(0, &header(v6(2), v6(1)), &solicitation(B));
    }
    let waiting = frames(&mut a).len() as u64;
    assert!(waiting < 1_000 && waiting + a.counters().unanswered == 1_000);
}

fn router(lifetime: u16, mtu: u32) -> Repr {
    let mut prefixes = Prefixes::default();
    let prefix = Prefix {
        prefix: "2001:db8:1::".parse().unwrap(),
        len: 64,
        on_link: true,
        autonomous: true,
        valid: 100,
        preferred: 100,
    };
    prefixes.push(prefix);
    prefixes.push(Prefix { len: 0, ..prefix });
    Repr::RouterAdvertisement(Advertisement {
        hop_limit: 33,
        lifetime,
        station: Some(B),
        mtu: Some(mtu),
        prefixes,
        ..Advertisement::default()
    })
}

#[test]
fn routers_and_prefixes() {
    let mut a = end(1, A);
    let far: IpAddr = "2001:db8:77::1".parse().unwrap();
    let near: IpAddr = "2001:db8:1::1".parse().unwrap();
    assert_eq!((a.next_hop(0, far), a.next_hop(0, near)), (None, None));
    assert_eq!(a.next_hop(0, v6(2).into()), Some(v6(2).into()));
    assert_eq!(a.next_hop(0, v4(9)), Some(v4(9)));
    assert_eq!(a.next_hop(0, [192, 0, 2, 1].into()), Some(v4(254)));
    a.solicit_routers(0);
    let (_, asked, _) = discovery(&frames(&mut a)[0]);
    assert_eq!(asked.destination, "ff02::2".parse::<Ipv6Addr>().unwrap());
    assert_eq!(pass(&mut a, 4 * SECOND), 1);
    let from = header(ROUTER, "ff02::1".parse().unwrap());
    a.handle_discovery(5 * SECOND, &from, &router(1800, 1400));
    assert_eq!(pass(&mut a, 60 * SECOND), 0, "no more questions");
    assert_eq!(a.next_hop(6 * SECOND, far), Some(ROUTER.into()));
    assert_eq!(a.next_hop(6 * SECOND, near), Some(near));
    assert_eq!(a.lookup(6 * SECOND, ROUTER.into()), Lookup::Station(B));
    assert_eq!((a.mtu(), a.hop_limit()), (1400, Some(33)));
    // RFC 4861 6.3.4: neither below the minimum nor above what the link takes.
    for mtu in [1279, 1501, u32::MAX] {
        a.handle_discovery(7 * SECOND, &from, &router(1800, mtu));
        assert_eq!(a.mtu(), 1400);
    }
    // CVE-2015-2922: nobody may make what is sent end on the way.
    let Repr::RouterAdvertisement(short) = router(1800, 1400) else { unreachable!() };
    for (hop_limit, lifetime) in [(1, 1800), (31, 1800), (64, 0)] {
        let said = Repr::RouterAdvertisement(Advertisement { hop_limit, lifetime, ..short });
        a.handle_discovery(7 * SECOND, &from, &said);
        assert_eq!(a.hop_limit(), Some(33));
    }
    a.handle_discovery(8 * SECOND, &from, &router(1800, 1400));
    assert_eq!(a.next_hop(108 * SECOND, near), Some(ROUTER.into()), "the prefix is over");
    a.handle_discovery(110 * SECOND, &from, &router(0, 1400));
    assert_eq!(a.next_hop(111 * SECOND, far), None, "no router any more");
}

#[test]
fn only_a_default_router_ends_the_search_for_one() {
    let mut a = end(1, A);
    let far: IpAddr = "2001:db8:77::1".parse().unwrap();
    a.solicit_routers(0);
    assert_eq!(frames(&mut a).len(), 1);
    let from = header(ROUTER, "ff02::1".parse().unwrap());
    a.handle_discovery(SECOND, &from, &router(0, 1500));
    assert_eq!(pass(&mut a, 60 * SECOND), 2, "RFC 4861 6.3.7: three in all");
    assert_eq!(a.next_hop(60 * SECOND, far), None);
}

#[test]
fn what_is_not_believed_of_a_router_does_not_take_it_away_either() {
    let mut a = end(1, A);
    let far: IpAddr = "2001:db8:77::1".parse().unwrap();
    a.handle_discovery(0, &header(ROUTER, "ff02::1".parse().unwrap()), &router(1800, 1500));
    let says = |station: Station, overrides: bool| Repr::NeighbourAdvertisement {
        target: ROUTER,
        router: false,
        solicited: false,
        overrides,
        station: Some(station),
    };
    // Heard of, and known.
    for now in [SECOND, 2 * SECOND] {
        a.handle_discovery(now, &header(ROUTER, v6(1)), &says(EVIL, false));
        assert_eq!(a.next_hop(now, far), Some(ROUTER.into()), "RFC 4861 7.2.5");
        a.confirm(now, ROUTER.into());
    }
    a.handle_discovery(3 * SECOND, &header(ROUTER, v6(1)), &says(B, false));
    assert_eq!(a.next_hop(3 * SECOND, far), None);
}

#[test]
fn a_router_that_answers_is_preferred_and_one_that_resigns_is_forgotten() {
    let mut a = end(1, A);
    let far: IpAddr = "2001:db8:77::1".parse().unwrap();
    let group = "ff02::1".parse().unwrap();
    let second = "fe80::77".parse().unwrap();
    a.handle_discovery(0, &header(ROUTER, group), &router(1800, 1500));
    a.handle_discovery(0, &header(second, group), &router(1800, 1500));
    assert_eq!(a.next_hop(0, far), Some(ROUTER.into()));
    // That it is heard of again puts it behind nobody.
    a.handle_discovery(0, &header(ROUTER, group), &router(1800, 1500));
    assert_eq!(a.next_hop(0, far), Some(ROUTER.into()));
    // It does not answer when it is used.
    a.lookup(0, ROUTER.into());
    pass(&mut a, 20 * SECOND);
    assert_eq!(events(&mut a), [Event::Lost(ROUTER.into())]);
    assert_eq!(a.next_hop(20 * SECOND, far), Some(second.into()));
    let resigns = Repr::NeighbourAdvertisement {
        target: second,
        router: false,
        solicited: false,
        overrides: true,
        station: Some(B),
    };
    a.handle_discovery(20 * SECOND, &header(second, group), &resigns);
    assert_eq!(a.next_hop(20 * SECOND, far), Some(ROUTER.into()), "the last resort");
}

#[test]
fn a_flood_of_routers_is_bounded() {
    let mut a = end(1, A);
    let group = "ff02::1".parse().unwrap();
    for n in 0..1_000 {
        let from = Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 1, n);
        a.handle_discovery(0, &header(from, group), &router(1800, 1500));
    }
    let first = Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 1, 0);
    assert_eq!(a.next_hop(0, "2001:db8:77::1".parse().unwrap()), Some(first.into()));
}

#[test]
fn groups_need_no_question() {
    let mut a = end(1, A);
    let station = |a: &mut Neighbours, address: &str| a.lookup(0, address.parse().unwrap());
    let expected = Lookup::Station([0x33, 0x33, 0, 1, 0, 2]);
    assert_eq!(station(&mut a, "ff15::1:2"), expected);
    let expected = Lookup::Station([1, 0, 0x5e, 0x7f, 2, 3]);
    assert_eq!(station(&mut a, "239.255.2.3"), expected);
    assert_eq!(station(&mut a, "255.255.255.255"), Lookup::Station([0xff; 6]));
    assert_eq!(a.next_hop(0, "ff15::1".parse().unwrap()), Some("ff15::1".parse().unwrap()));
    assert!(frames(&mut a).is_empty());
}

proptest! {
    #[test]
    fn anything_is_survived_within_bounds(
        steps in prop::collection::vec((0u8..8, 0u16..2_000, any::<[bool; 4]>(), 0u64..3), 0..800),
    ) {
        let mut a = end(1, A);
        let mut now = 0;
        let (mut waiting, mut told) = (0, 0);
        for (kind, n, flags, wait) in steps {
            now += wait * SECOND / 2;
            let (other, station) = (v6(n), [2, 0, 0, 0, (n >> 8) as u8, n as u8]);
            let sender = [10, 0, (n >> 8) as u8, n as u8].into();
            match kind {
                0 => drop(a.lookup(now, other.into())),
                1 => a.confirm(now, other.into()),
                2 => a.handle_discovery(now, &header(other, v6(1)), &solicitation(station)),
                3 => {
                    let station = flags[0].then_some(station);
                    let message = advertisement(n, station, flags[1], flags[2]);
                    a.handle_discovery(now, &header(other, v6(1)), &message);
                }
                4 | 5 => {
                    let operation =
                        if kind == 4 { arp::Operation::Request } else { arp::Operation::Reply };
                    let message = arp::Repr {
                        operation,
                        sender_station: station,
                        sender,
                        target_station: if flags[1] { A } else { B },
                        target: if flags[0] { [10, 0, 0, 1] } else { [10, 0, 0, 7] }.into(),
                    };
                    a.handle_arp(now, &message);
                }
                6 => drop(a.lookup(now, IpAddr::V4(sender))),
                _ => {
                    let from = Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 1, n);
                    a.handle_discovery(now, &header(from, v6(1)), &router(n, u32::from(n)));
                }
            }
            a.handle_timeout(now);
            prop_assert!(a.poll_timeout().is_none_or(|at| at > now), "a stale deadline");
            if flags[3] {
                (waiting, told) = (waiting.max(frames(&mut a).len()), told + events(&mut a).len());
            }
            let far = a.next_hop(now, "2001:db8:77::1".parse().unwrap());
            prop_assert!(far.is_none_or(|router| router.to_string().starts_with("fe80::1:")));
            prop_assert!((1_280..=1_500).contains(&a.mtu()));
        }
        prop_assert!(waiting <= 256 && told <= 2 * 800);
        prop_assert_eq!(a.counters().invalid, 0);
    }
}
