//! What packet links take from elsewhere: messages of datagrams that hold IPv6 packets, from anybody, and
//! frames of the kernel behind a header that says how they are to be taken apart.
#![no_main]

/// Taken as they stand, since the insides of a link are nobody's interface.
#[path = "../../crates/host/src/packet/aligned.rs"]
mod aligned;

#[path = "../../crates/host/src/packet/inner.rs"]
mod inner;
#[allow(dead_code)]
#[path = "adapter/input.rs"]
mod input;
#[allow(dead_code)]
#[path = "../../crates/host/src/packet/place.rs"]
mod place;
#[allow(dead_code)]
#[path = "../../crates/host/src/packet/queue.rs"]
mod queue;
mod shares;
#[path = "../../crates/host/src/packet/split.rs"]
mod split;
#[allow(dead_code)]
#[path = "../../crates/host/src/packet/tag.rs"]
mod tag;
#[allow(dead_code)]
#[path = "../../crates/host/src/packet/vnet.rs"]
mod vnet;

/// What those need of their neighbours.
mod messages {
    pub(super) struct Message {
        pub(super) len: usize,
        pub(super) from: Option<std::net::SocketAddr>,
        pub(super) datagrams: Option<usize>,
    }
}
struct Outgoing {
    len: usize,
    checksum: Option<Checksum>,
    segment: Option<u16>,
    priority: u8,
}
const ETHERNET: usize = 14;

use std::collections::HashMap;
use std::net::{Ipv6Addr, SocketAddr, SocketAddrV4};

use inner::{DESTINATION, HEADER, address_at, bare, hand_over};
use input::Input;
use libfuzzer_sys::fuzz_target;
use messages::Message;
use place::{address_of, place_of};
use queue::Queue;
use quipu_inet::stack::{Checksum, Frame};
use shares::Shares;

static SHARES: Shares<6> =
    Shares::new(["a packet", "a place", "a train", "datagrams", "dropped", "a frame to cut"]);

fuzz_target!(|data: &[u8]| {
    SHARES.begin();
    let mut input = Input(data);
    match input.byte() % 3 {
        0 => packets(&mut input),
        1 => train(&mut input),
        _ => departure(&mut input),
    }
});

/// A message with packets of senders who are, or are not, who they say.
fn packets(input: &mut Input<'_>) {
    let port = u16::from(input.byte()) << 4 | 1;
    let from = SocketAddrV4::new([192, 0, 2, input.byte()].into(), port);
    let listed: SocketAddr = ([192, 0, 2, 7], 7).into();
    let inner = Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, 7);
    let place = match input.byte() % 8 {
        0 => (Ipv6Addr::LOCALHOST, port).into(),
        1 => listed,
        _ => from.into(),
    };
    let mut bytes = Vec::new();
    let size = HEADER + usize::from(input.byte());
    for _ in 0..input.byte() % 6 {
        let mut packet = input.bytes().to_vec();
        packet.resize(size, 0);
        if !input.byte().is_multiple_of(4) {
            packet[0] |= 0x60;
            packet[8..DESTINATION].copy_from_slice(&address_of(from).octets());
        }
        bytes.extend(packet);
    }
    bytes.extend(input.take(usize::MAX));
    if let Some(address) = address_at(&bytes, DESTINATION)
        && let Some(place) = place_of(address)
    {
        assert_eq!(address_of(place), address, "one address for each place");
    }
    let own = address_of(from);
    if let Some(place) = place_of(own) {
        SHARES.reach("a place");
        assert_eq!(place, from);
    }
    let (len, datagrams) = (bytes.len(), data_size(size, bytes.len()));
    // The slot is longer than the message.
    bytes.push(0x60);
    let message = Message { len, from: Some(place), datagrams };
    let inners = HashMap::from([(bare(listed), inner)]);
    let mut octets = 0;
    let mut each = |frame: &Frame<'_>| {
        SHARES.reach("a packet");
        octets += frame.bytes.len();
        assert!(frame.bytes.len() >= HEADER && !frame.checked);
        let expected = if place == listed { inner } else { own };
        assert_eq!(address_at(frame.bytes, 8), Some(expected), "from whom it says");
    };
    hand_over(message, &bytes, &inners, &mut each);
    assert!(octets <= len);
}

/// Of several datagrams the kernel says how long each is; of one nothing.
fn data_size(size: usize, len: usize) -> Option<usize> {
    (len > size).then_some(size)
}

/// A frame with the kernel's header, which is mostly that of a train.
fn train(input: &mut Input<'_>) {
    let mut header = [0; vnet::LEN];
    let given = input.take(vnet::LEN);
    header[..given.len()].copy_from_slice(given);
    let version = if input.flag() { 6 } else { 4 };
    let udp = ETHERNET + if version == 6 { 40 } else { 20 };
    let mut frame = input.bytes().to_vec();
    if !input.byte().is_multiple_of(8) {
        header[1] = 5;
        header[4..6].copy_from_slice(&u16::from(input.byte()).to_ne_bytes());
        header[6..8].copy_from_slice(&(udp as u16).to_ne_bytes());
        frame.resize(frame.len().max(udp + 8), 0);
        frame[ETHERNET] = version << 4 | 5;
    }
    frame.resize(frame.len() + usize::from(input.byte()) * usize::from(input.byte() % 16), 7);
    let header = vnet::Header::read(&header);
    let places = header.start.map(|start| start + 8);
    let payload = |frame: &[u8]| places.map_or(0, |place| frame.len().saturating_sub(place));
    let whole = payload(&frame);
    let (mut seen, mut octets) = (0, 0);
    let count = split::hand_over(header, &mut frame, &mut |part| {
        assert_eq!(part.checked, header.checked);
        seen += 1;
        octets += payload(part.bytes);
    });
    assert_eq!(count, seen);
    match (header.datagrams, count) {
        (Some(_), 0) => SHARES.reach("dropped"),
        (Some(_), _) => {
            SHARES.reach("a train");
            if count > 1 {
                SHARES.reach("datagrams");
            }
            assert_eq!(octets, whole, "every octet of payload, once");
        }
        (None, _) => assert_eq!(count, 1),
    }
}

/// A frame of ours with a header for the kernel, whatever the stack says of it.
fn departure(input: &mut Input<'_>) {
    let mut waiting = Queue::new(2, vnet::SLOT);
    let start = ETHERNET as u16 + if input.flag() { 40 } else { 20 };
    let (segment, checksum) = (u16::from(input.byte()) * 8, input.byte());
    let (start, at) = match checksum % 8 {
        0 => (input.word() as u16, input.word() as u16),
        _ => (start, start + 16),
    };
    let frame = input.take(usize::MAX);
    let outgoing = Outgoing {
        len: frame.len(),
        checksum: (checksum != 0).then_some(Checksum { start, at }),
        segment: (segment != 0).then_some(segment),
        priority: checksum % 8,
    };
    // A quarter is in a VLAN, and a quarter has a priority only.
    let vlan = [None, None, Some(0), Some(7)][usize::from(checksum >> 6)];
    let vlan = vlan.filter(|_| frame.len() >= ETHERNET);
    vnet::free(&mut waiting, vlan).expect("a slot")[..frame.len()].copy_from_slice(frame);
    vnet::push(&mut waiting, &outgoing, vlan);
    let (slot, len) = waiting.get(0).expect("it was put there");
    let sent = &slot[vnet::LEN..len];
    match vlan {
        None => assert_eq!(sent, frame, "the frame itself stays"),
        Some(vlan) => {
            assert_eq!((&sent[..12], &sent[16..]), frame.split_at(12), "only a tag is added");
            assert_eq!(tag::of(sent), Some(tag::control(vlan, checksum % 8)));
        }
    }
    let header: &[u8; vnet::LEN] = slot.first_chunk().expect("it is longer");
    assert!(vnet::Header::read(header).datagrams.is_none(), "no trains of datagrams are sent");
    if header[1] != 0 {
        SHARES.reach("a frame to cut");
        let headers = usize::from(u16::from_ne_bytes([header[2], header[3]]));
        assert!(headers + usize::from(segment) < sent.len(), "more than one segment");
    }
}
