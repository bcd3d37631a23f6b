//! ICMP: what is answered, what is refused and how often, and what reports are read as.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use proptest::prelude::*;
use quipu_inet::icmp::{
    Arrived, Cause, ECHOES, ERRORS, Icmp, MAX_WAITING, MOST_TOKENS, Message, PROTOCOL_AT, Quoted,
    Report, Trouble,
};
use quipu_inet::tcp::Secret;
use quipu_wire::ipv6_extension::{Refusal, walk};
use quipu_wire::tcp::SeqNumber;
use quipu_wire::{WireError, icmpv4, icmpv6, ipv4, ipv6};

const SECOND: u64 = 1_000_000_000;
const US: Ipv6Addr = Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 1);
const THEM: Ipv6Addr = Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 2);
const ROUTER: Ipv6Addr = Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 3);
const US4: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 1);
const THEM4: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 2);
const GROUP: Ipv6Addr = Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 1);

fn header6(source: Ipv6Addr, destination: Ipv6Addr, next_header: u8, len: usize) -> ipv6::Repr {
    ipv6::Repr {
        source,
        destination,
        next_header,
        traffic_class: 0,
        flow_label: 0,
        hop_limit: 64,
        payload_len: len as u16,
    }
}

fn header4(source: Ipv4Addr, destination: Ipv4Addr, protocol: u8, len: usize) -> ipv4::Repr {
    ipv4::Repr {
        source,
        destination,
        protocol,
        traffic_class: 0,
        hop_limit: 64,
        identification: 0,
        dont_fragment: true,
        more_fragments: false,
        fragment_offset: 0,
        payload_len: len as u16,
    }
}

fn packet6(header: &ipv6::Repr, payload: &[u8]) -> Vec<u8> {
    let mut packet = vec![0; ipv6::LEN];
    header.emit(&mut packet);
    packet.extend(payload);
    packet
}

fn packet4(header: &ipv4::Repr, payload: &[u8]) -> Vec<u8> {
    let mut packet = vec![0; ipv4::LEN];
    header.emit(&mut packet);
    packet.extend(payload);
    packet
}

fn hear6(icmp: &mut Icmp, now: u64, source: Ipv6Addr, message: &icmpv6::Repr<'_>) -> Arrived {
    let mut bytes = vec![0; message.wire_len()];
    message.emit(source, US, &mut bytes);
    icmp.handle_v6(now, &header6(source, US, icmpv6::PROTOCOL, bytes.len()), &bytes)
}

fn hear4(icmp: &mut Icmp, message: &icmpv4::Repr<'_>) -> Option<Report> {
    let mut bytes = vec![0; message.wire_len()];
    message.emit(&mut bytes);
    icmp.handle_v4(0, &header4(THEM4, US4, 1, bytes.len()), &bytes)
}

#[test]
fn echoes_come_back() {
    let mut icmp = Icmp::new(Secret([1, 2]));
    let (identifier, number, data) = (7, 8, &b"echo"[..]);
    let asked = icmpv6::Repr::EchoRequest { identifier, number, data };
    assert_eq!(hear6(&mut icmp, 0, THEM, &asked), Arrived::Nothing);
    let Message { source, destination, bytes } = icmp.poll_transmit().unwrap();
    assert_eq!((source, destination), (US.into(), THEM.into()));
    let reply = icmpv6::Repr::EchoReply { identifier, number, data };
    assert_eq!(icmpv6::Repr::parse(US, THEM, &bytes), Ok(reply));
    assert_eq!(hear4(&mut icmp, &icmpv4::Repr::EchoRequest { identifier, number, data }), None);
    let Message { source, destination, bytes } = icmp.poll_transmit().unwrap();
    assert_eq!((source, destination), (US4.into(), THEM4.into()));
    let reply = icmpv4::Repr::EchoReply { identifier, number, data };
    assert_eq!(icmpv4::Repr::parse(&bytes), Ok(reply));
    assert_eq!((icmp.poll_transmit(), icmp.counters().echoes), (None, 2));
    // An answer is not answered, and nobody here asks.
    assert_eq!(hear4(&mut icmp, &reply), None);
    assert_eq!((icmp.wants_transmit(), icmp.counters().ignored), (false, 1));
}

#[test]
fn echoes_are_limited_in_number_and_octets() {
    let mut icmp = Icmp::new(Secret([1, 2]));
    let data = &[0; 1_000][..];
    let asked = icmpv6::Repr::EchoRequest { identifier: 1, number: 1, data };
    for _ in 0..2 * ECHOES {
        hear6(&mut icmp, 5, THEM, &asked);
    }
    let waiting: Vec<_> = std::iter::from_fn(|| icmp.poll_transmit()).collect();
    let octets: usize = waiting.iter().map(|message| message.bytes.len()).sum();
    assert!(octets <= MAX_WAITING && octets > MAX_WAITING - 2_000);
    let mut answered = waiting.len() as u64;
    for _ in 0..2 * ECHOES {
        hear6(&mut icmp, 5, THEM, &asked);
        answered += u64::from(icmp.poll_transmit().is_some());
    }
    assert_eq!(answered, ECHOES);
    hear6(&mut icmp, 5 + SECOND / 2, THEM, &asked);
    assert!(icmp.wants_transmit(), "tokens come back");
    let group = icmpv6::Repr::EchoRequest { identifier: 1, number: 1, data: &[] };
    let mut bytes = vec![0; group.wire_len()];
    group.emit(THEM, GROUP, &mut bytes);
    icmp.poll_transmit();
    icmp.handle_v6(3 * SECOND, &header6(THEM, GROUP, 58, bytes.len()), &bytes);
    hear6(&mut icmp, 3 * SECOND, GROUP, &group);
    assert!(!icmp.wants_transmit(), "nothing to or from groups");
}

/// Errors that go out at once.
fn refusals(secret: Secret) -> usize {
    let mut icmp = Icmp::new(secret);
    let packet = packet6(&header6(THEM, US, 17, 8), &[9; 8]);
    for _ in 0..2 * ERRORS {
        icmp.refuse(0, &packet, true, None, Cause::Port);
    }
    std::iter::from_fn(|| icmp.poll_transmit()).count()
}

#[test]
fn nobody_foresees_how_many_errors_are_left() {
    let mut counts: Vec<_> = (0..32).map(|n| refusals(Secret([n, 9]))).collect();
    let (least, most) = ((ERRORS / MOST_TOKENS) as usize, ERRORS as usize);
    assert!(counts.iter().all(|count| (least..=most).contains(count)), "{counts:?}");
    counts.sort_unstable();
    counts.dedup();
    assert!(counts.len() > 8, "{counts:?}");
    assert_eq!(refusals(Secret([7, 7])), refusals(Secret([7, 7])));
}

#[test]
fn a_packet_that_nobody_takes_is_refused() {
    let mut icmp = Icmp::new(Secret([1, 2]));
    let packet = packet6(&header6(THEM, US, 17, 2_000), &[9; 2_000]);
    icmp.refuse(0, &packet, true, None, Cause::Port);
    let message = icmp.poll_transmit().unwrap();
    assert_eq!(message.bytes.len() + ipv6::LEN, 1_280, "RFC 4443 2.4 c");
    let expected = icmpv6::Repr::Unreachable { code: 4, packet: &packet[..1_280 - ipv6::LEN - 8] };
    assert_eq!(icmpv6::Repr::parse(US, THEM, &message.bytes), Ok(expected));

    let packet = packet6(&header6(THEM, US, 99, 8), &[0; 8]);
    icmp.refuse(0, &packet, true, None, Cause::Protocol { at: PROTOCOL_AT });
    let message = icmp.poll_transmit().unwrap();
    let expected = icmpv6::Repr::ParameterProblem { code: 1, pointer: 6, packet: &packet };
    assert_eq!(icmpv6::Repr::parse(US, THEM, &message.bytes), Ok(expected));

    let packet = packet4(&header4(THEM4, US4, 17, 8), &[0; 8]);
    icmp.refuse(0, &packet, true, None, Cause::Port);
    let message = icmp.poll_transmit().unwrap();
    assert_eq!((message.source, message.destination), (US4.into(), THEM4.into()));
    let expected = icmpv4::Repr::Unreachable { code: 3, next_mtu: 0, packet: &packet };
    assert_eq!(icmpv4::Repr::parse(&message.bytes), Ok(expected));
    assert_eq!(icmp.counters().errors, 3);
}

#[test]
fn an_unknown_option_is_refused_even_to_a_group() {
    let mut icmp = Icmp::new(Secret([1, 2]));
    let options = [17, 0, 0x85, 0, 1, 2, 0, 0];
    let packet = packet6(&header6(THEM, GROUP, 60, 8), &options);
    let Err(Refusal::Problem { code, at, even_to_group }) = walk(60, &options, false) else {
        panic!();
    };
    icmp.refuse(0, &packet, false, Some(US.into()), Cause::Problem { code, at, even_to_group });
    let message = icmp.poll_transmit().unwrap();
    let expected = icmpv6::Repr::ParameterProblem { code: 2, pointer: 42, packet: &packet };
    assert_eq!(icmpv6::Repr::parse(US, THEM, &message.bytes), Ok(expected));
}

#[test]
fn what_must_not_be_answered_is_not() {
    // RFC 4443 2.4 e, RFC 1122 3.2.2.
    let mut icmp = Icmp::new(Secret([1, 2]));
    let to_group = packet6(&header6(THEM, GROUP, 17, 8), &[0; 8]);
    let from_nobody = packet6(&header6(Ipv6Addr::UNSPECIFIED, US, 17, 8), &[0; 8]);
    let from_group = packet6(&header6(GROUP, US, 17, 8), &[0; 8]);
    let an_error = packet6(&header6(THEM, US, 58, 8), &[1, 4, 0, 0, 0, 0, 0, 0]);
    let a_redirect = packet6(&header6(THEM, US, 58, 8), &[137, 0, 0, 0, 0, 0, 0, 0]);
    let icmp4 = packet4(&header4(THEM4, US4, 1, 8), &[3, 3, 0, 0, 0, 0, 0, 0]);
    let later = ipv4::Repr { fragment_offset: 8, ..header4(THEM4, US4, 17, 8) };
    let later = packet4(&later, &[0; 8]);
    let broadcast = packet4(&header4(THEM4, Ipv4Addr::BROADCAST, 17, 8), &[0; 8]);
    let nobody4 = packet4(&header4(Ipv4Addr::UNSPECIFIED, US4, 17, 8), &[0; 8]);
    for (n, packet) in [
        &to_group,
        &from_nobody,
        &from_group,
        &an_error,
        &a_redirect,
        &icmp4,
        &later,
        &broadcast,
        &nobody4,
    ]
    .into_iter()
    .enumerate()
    {
        icmp.refuse(0, packet, true, Some(US.into()), Cause::Port);
        assert!(!icmp.wants_transmit(), "{n}");
    }
    let good = packet6(&header6(THEM, US, 17, 8), &[0; 8]);
    icmp.refuse(0, &good, false, None, Cause::Port);
    assert!(!icmp.wants_transmit(), "the link carried it to all");
    icmp.refuse(0, &good, true, None, Cause::Port);
    assert!(icmp.wants_transmit());
}

#[test]
fn errors_are_limited() {
    let mut icmp = Icmp::new(Secret([1, 2]));
    let packet = packet6(&header6(THEM, US, 17, 8), &[0; 8]);
    let mut sent = 0;
    for n in 0..3_000 {
        // Three seconds.
        icmp.refuse(n * SECOND / 1_000, &packet, true, None, Cause::Port);
        sent += u64::from(icmp.poll_transmit().is_some());
    }
    // Two tokens each, on average.
    assert!((18 * ERRORS / 10..=22 * ERRORS / 10).contains(&sent), "{sent}");
    assert_eq!(icmp.counters().limited, 3_000 - sent);
}

/// A segment of this end.
fn segment() -> Vec<u8> {
    [&[0x9c, 0x40, 0, 80, 1, 2, 3, 4][..], &[0; 12]].concat()
}

const TCP: Quoted = Quoted::Tcp { source: 40_000, destination: 80, seq: SeqNumber(0x0102_0304) };

#[test]
fn reports_over_ipv6() {
    use icmpv6::Repr;
    let packet = packet6(&header6(US, THEM, 6, 1_400), &segment());
    let packet = &packet[..];
    for (message, trouble) in [
        (Repr::PacketTooBig { mtu: 1_300, packet }, Trouble::TooBig { mtu: 1_300 }),
        (Repr::Unreachable { code: 0, packet }, Trouble::Soft),
        (Repr::Unreachable { code: 1, packet }, Trouble::Hard),
        (Repr::Unreachable { code: 3, packet }, Trouble::Soft),
        (Repr::Unreachable { code: 4, packet }, Trouble::Hard),
        (Repr::TimeExceeded { code: 0, packet }, Trouble::Soft),
        (Repr::ParameterProblem { code: 0, pointer: 4, packet }, Trouble::Soft),
        (Repr::ParameterProblem { code: 1, pointer: 6, packet }, Trouble::Hard),
    ] {
        let (source, destination) = (IpAddr::from(US), IpAddr::from(THEM));
        let report = Report { source, destination, quoted: TCP, trouble };
        let arrived = hear6(&mut Icmp::new(Secret([1, 2])), 0, ROUTER, &message);
        assert_eq!(arrived, Arrived::Report(report), "{message:?}");
    }
    // Behind extension headers; and a datagram.
    let datagram = [&[17, 0, 1, 4, 0, 0, 0, 0][..], &segment()].concat();
    let packet = packet6(&header6(US, THEM, 60, 1_400), &datagram);
    let message = Repr::Unreachable { code: 4, packet: &packet };
    let Arrived::Report(report) = hear6(&mut Icmp::new(Secret([1, 2])), 0, THEM, &message) else {
        panic!()
    };
    assert_eq!(report.quoted, Quoted::Udp { source: 40_000, destination: 80 });
}

#[test]
fn reports_over_ipv4() {
    use icmpv4::Repr;
    let packet = packet4(&header4(US4, THEM4, 6, 1_480), &segment()[..8]);
    let packet = &packet[..];
    let unreachable = |code, next_mtu| Repr::Unreachable { code, next_mtu, packet };
    for (message, trouble) in [
        (unreachable(4, 1_400), Trouble::TooBig { mtu: 1_400 }),
        // RFC 1191 5: a router that does not know of this says nothing.
        (unreachable(4, 0), Trouble::TooBig { mtu: 1_492 }),
        (unreachable(0, 0), Trouble::Soft),
        (unreachable(1, 0), Trouble::Soft),
        (unreachable(2, 0), Trouble::Hard),
        (unreachable(3, 0), Trouble::Hard),
        (unreachable(5, 0), Trouble::Soft),
        (Repr::TimeExceeded { code: 0, packet }, Trouble::Soft),
        (Repr::ParameterProblem { code: 0, pointer: 4, packet }, Trouble::Soft),
    ] {
        let (source, destination) = (IpAddr::from(US4), IpAddr::from(THEM4));
        let report = Report { source, destination, quoted: TCP, trouble };
        assert_eq!(hear4(&mut Icmp::new(Secret([1, 2])), &message), Some(report), "{message:?}");
    }
}

#[test]
fn what_quotes_too_little_or_something_else_is_ignored() {
    let mut icmp = Icmp::new(Secret([1, 2]));
    let full = packet4(&header4(US4, THEM4, 6, 1_480), &segment()[..8]);
    let other = packet4(&header4(US4, THEM4, 47, 1_480), &segment());
    let part = ipv4::Repr { fragment_offset: 8, ..header4(US4, THEM4, 6, 1_480) };
    let part = packet4(&part, &segment());
    for packet in [&full[..27], &full[..19], &[], &other[..], &part[..]] {
        assert_eq!(hear4(&mut icmp, &icmpv4::Repr::TimeExceeded { code: 0, packet }), None);
    }
    assert_eq!(icmp.counters().ignored, 5);
}

/// RFC 9293 3.9.2.2 (MUST-55), RFC 6633 3: whatever it quotes, and whatever other messages say by that.
#[test]
fn a_source_quench_is_discarded() {
    let packet = packet4(&header4(US4, THEM4, 6, 1_480), &segment()[..8]);
    let message = icmpv4::Repr::TimeExceeded { code: 0, packet: &packet };
    let mut bytes = vec![0; message.wire_len()];
    message.emit(&mut bytes);
    let mut icmp = Icmp::new(Secret([1, 2]));
    let header = header4(THEM4, US4, 1, bytes.len());
    assert!(icmp.handle_v4(0, &header, &bytes).is_some(), "it quotes enough");
    // The sum is of words with the type in their upper octet.
    let change = (u16::from(bytes[0]) - 4) << 8;
    bytes[0] = 4;
    let sum = u16::from_be_bytes([bytes[2], bytes[3]]);
    let (sum, carry) = sum.overflowing_add(change);
    bytes[2..4].copy_from_slice(&(sum + u16::from(carry)).to_be_bytes());
    assert_ne!(icmpv4::Repr::parse(&bytes), Err(WireError::BadChecksum));
    assert_eq!(icmp.handle_v4(0, &header, &bytes), None);
    assert_eq!((icmp.counters().ignored, icmp.wants_transmit()), (1, false));
}

proptest! {
    #[test]
    fn any_packet_may_be_refused_and_quoted(
        bytes in prop::collection::vec(any::<u8>(), 0..120),
        version in prop::sample::select(vec![0x45u8, 0x60, 0x46]),
        at in -40i32..200,
        kind in 0u8..5,
    ) {
        let mut packet = bytes;
        if let Some(first) = packet.first_mut() {
            *first = version;
        }
        let mut icmp = Icmp::new(Secret([1, 2]));
        let cause = Cause::Problem { code: 0, at, even_to_group: kind == 0 };
        for cause in [Cause::Port, Cause::Protocol { at }, cause] {
            icmp.refuse(0, &packet, true, Some(US.into()), cause);
            icmp.refuse(0, &packet, false, None, cause);
        }
        while let Some(message) = icmp.poll_transmit() {
            prop_assert!(message.bytes.len() <= packet.len() + 8);
        }
        let _ = hear6(&mut icmp, 0, THEM, &icmpv6::Repr::PacketTooBig { mtu: 9, packet: &packet });
        let needed = icmpv4::Repr::Unreachable { code: 4, next_mtu: 0, packet: &packet };
        let _ = hear4(&mut icmp, &needed);
        prop_assert!(!icmp.wants_transmit());
    }
}
