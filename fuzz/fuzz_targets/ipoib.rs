//! IP over InfiniBand: an engine in either mode, mostly the connected one. Datagrams and messages of peers,
//! packets of the kernel, requests for connections and their ends come from the input, in any order, at any
//! time. The first octet of each operation chooses what comes, and whether its fields are made likely.
#![no_main]

mod shares;

use std::collections::BTreeMap;

use libfuzzer_sys::fuzz_target;
use quipu_ipoib::wire::checksum::{Sum, sum};
use quipu_ipoib::{
    Arrival, Config, ConnectionChange, ConnectionData, ConnectionId, DEFAULT_PKEY, Destination,
    Engine, Incoming, LinkAddress, MAX_CONNECTIONS, MAX_GROUPS, MAX_QUEUED, MAX_WAITING_IN_ALL,
    Outgoing,
};
use shares::Shares;

static SHARES: Shares<9> = Shares::new([
    "a packet delivered",
    "a message consumed",
    "a packet sent",
    "a packet that waits",
    "a group joined",
    "a connection opened",
    "a connection accepted",
    "a packet over a connection",
    "a message delivered",
]);

const MTU: usize = 2044;
/// That of datagrams, so that short inputs can exceed it.
const DATAGRAM_MTU: usize = 120;
const SLOTS: usize = 8;

fn link(n: u8) -> LinkAddress {
    LinkAddress { qpn: n.into(), gid: [n; 16], connects: false }
}

/// The connections as the outside sees them: messages that are under way.
#[derive(Default)]
struct Model {
    ids: Vec<ConnectionId>,
    under_way: BTreeMap<ConnectionId, usize>,
}

impl Model {
    /// A message is to be sent. Those over connections that have ended meanwhile are not.
    fn sent(&mut self, engine: &Engine, to: Destination) {
        if let Destination::Connection(id) = to
            && engine.peer_of(id).is_some()
        {
            *self.under_way.entry(id).or_default() += 1;
            SHARES.reach("a packet over a connection");
        }
        assert!(self.under_way.values().sum::<usize>() <= SLOTS, "more than there is room for");
    }
}

fn new(connects: bool) -> Engine {
    Engine::new(Config {
        link: LinkAddress { connects, ..link(1) },
        mtu: if connects { MTU } else { DATAGRAM_MTU },
        datagram_mtu: DATAGRAM_MTU,
        connection_slots: SLOTS,
        addresses: vec![
            ([10, 7, 0, 1].into(), 24),
            ([0xfd, 7, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1].into(), 64),
        ],
        gateways: vec![[10, 7, 0, 254].into()],
        pkey: DEFAULT_PKEY,
    })
}

/// Makes an IP packet likely: version, lengths, addresses and checksum.
fn likely_packet(bytes: &mut [u8], is_ipv6: bool) {
    let len = bytes.len();
    if !is_ipv6 && len >= 20 {
        bytes[0] = 0x45;
        bytes[2..4].copy_from_slice(&(len as u16).to_be_bytes());
        for at in [12, 16] {
            let last = bytes[at + 3];
            if bytes[at] & 3 != 0 {
                bytes[at..at + 4].copy_from_slice(&[10, 7, 0, last]);
            }
        }
        bytes[10..12].fill(0);
        let checksum = sum(&bytes[..20]).checksum();
        bytes[10..12].copy_from_slice(&checksum.to_be_bytes());
    } else if is_ipv6 && len >= 40 {
        bytes[0] = 0x60;
        bytes[4..6].copy_from_slice(&((len - 40) as u16).to_be_bytes());
        for at in [8, 24] {
            let last = bytes[at + 15] & 7;
            if bytes[at] & 3 != 0 {
                bytes[at..at + 16].fill(0);
                (bytes[at], bytes[at + 1], bytes[at + 15]) = (0xfd, 7, last);
            }
        }
        likely_discovery(bytes);
    }
}

/// Makes the payload of an IPv6 packet a message of neighbour discovery, with a right checksum.
fn likely_discovery(bytes: &mut [u8]) {
    if bytes.len() < 64 || bytes[6] & 1 != 0 {
        return;
    }
    (bytes[6], bytes[7]) = (58, 255);
    (bytes[40], bytes[41]) = (135 + (bytes[40] & 1), 0);
    let target = bytes[63] & 3;
    bytes[48..64].fill(0);
    (bytes[48], bytes[49], bytes[63]) = (0xfd, 7, target);
    if bytes.len() >= 88 {
        // Type 135 has the source's address, 136 the target's.
        let option = if bytes[40] == 135 { 1 } else { 2 };
        bytes[64..68].copy_from_slice(&[option, 3, 0, 0]);
        let own = LinkAddress { connects: bytes[69] & 1 != 0, ..link(bytes[68] & 3) };
        bytes[68..88].copy_from_slice(&own.to_bytes());
    }
    bytes[42..44].fill(0);
    let address = |at: usize| <[u8; 16]>::try_from(&bytes[at..at + 16]).unwrap_or_default();
    let len = bytes.len() - 40;
    let pseudo = Sum::of_pseudo_header(address(8).into(), address(24).into(), 58, len);
    let checksum = pseudo.and(sum(&bytes[40..])).checksum();
    bytes[42..44].copy_from_slice(&checksum.to_be_bytes());
}

fn likely_arp(bytes: &mut [u8]) {
    if bytes.len() >= 56 {
        bytes[..7].copy_from_slice(&[0, 32, 8, 0, 20, 4, 0]);
        bytes[7] = 1 + (bytes[7] & 1);
        let own = LinkAddress { connects: bytes[9] & 1 != 0, ..link(bytes[8] & 3) };
        bytes[8..28].copy_from_slice(&own.to_bytes());
        bytes[28..31].copy_from_slice(&[10, 7, 0]);
        bytes[52..55].copy_from_slice(&[10, 7, 0]);
        bytes[55] &= 3;
    }
}

fn datagram(engine: &mut Engine, now_ns: u64, how: u8, bytes: &mut [u8]) {
    if how & 0x10 != 0 && bytes.len() >= 4 {
        let (head, rest) = bytes.split_at_mut(4);
        let kind: u16 = [0x0800, 0x86dd, 0x0806][usize::from(head[0] % 3)];
        head[..2].copy_from_slice(&kind.to_be_bytes());
        match kind {
            0x0806 => likely_arp(rest),
            kind => likely_packet(rest, kind == 0x86dd),
        }
    }
    let group = (how & 0x20 != 0).then_some([0xff; 16]);
    let arrival = Arrival { source: link(how >> 6), group };
    match engine.handle_datagram(now_ns, &arrival, bytes) {
        Incoming::Deliver(range) => {
            SHARES.reach("a packet delivered");
            let packet = &bytes[range];
            assert!(packet.len() >= 20 && packet.len() <= MTU);
        }
        Incoming::Consumed => SHARES.reach("a message consumed"),
        Incoming::Dropped(_) => {}
    }
}

/// Makes private data likely: a queue pair of a neighbour, and any MTU.
fn likely_data(bytes: &[u8], qpn: u32) -> [u8; ConnectionData::LEN] {
    let octet = |at: usize| u32::from(bytes.get(at).copied().unwrap_or_default());
    ConnectionData { qpn, receive_mtu: octet(2) << 8 | octet(3) }.to_bytes()
}

/// What happens to connections: `how >> 4` chooses.
fn connection(engine: &mut Engine, now_ns: u64, how: u8, bytes: &mut [u8], model: &mut Model) {
    let first = bytes.first().copied().unwrap_or_default();
    let Some(&id) = model.ids.get(usize::from(first) % model.ids.len().max(1)) else {
        return request(engine, now_ns, bytes, model);
    };
    match how >> 4 {
        1 => request(engine, now_ns, bytes, model),
        2 | 3 => {
            let peer = engine.peer_of(id);
            let data = match peer.filter(|_| how >> 4 == 2) {
                Some(peer) => likely_data(bytes, peer.qpn).to_vec(),
                None => bytes.to_vec(),
            };
            if engine.handle_established(now_ns, id, &data) {
                SHARES.reach("a connection opened");
            }
        }
        4 => {
            engine.handle_ended(now_ns, id);
            model.under_way.remove(&id);
        }
        5 => {
            engine.handle_broken(now_ns, id);
            model.under_way.remove(&id);
        }
        6 => {
            engine.handle_sent(now_ns, id, first.into());
            let under_way = model.under_way.entry(id).or_default();
            *under_way = under_way.saturating_sub(first.into());
        }
        _ => {
            if let Some((head, rest)) = bytes.split_first_chunk_mut::<4>() {
                let is_ipv6 = how >> 4 == 8;
                *head = if is_ipv6 { [0x86, 0xdd, 0, 0] } else { [8, 0, 0, 0] };
                likely_packet(rest, is_ipv6);
            }
            if let Incoming::Deliver(range) = engine.handle_message(now_ns, id, bytes) {
                SHARES.reach("a message delivered");
                assert!(bytes[range].len() >= 20);
            }
        }
    }
}

fn request(engine: &mut Engine, now_ns: u64, bytes: &[u8], model: &mut Model) {
    let first = bytes.first().copied().unwrap_or_default();
    let likely = likely_data(bytes, first.into());
    let data = if first & 0x80 == 0 { &likely[..] } else { bytes };
    if let Ok((id, _)) = engine.handle_request(now_ns, [first & 7; 16], data) {
        SHARES.reach("a connection accepted");
        model.ids.push(id);
    }
}

/// Takes what the engine has for the outside, as `how` says.
fn drain(engine: &mut Engine, how: u8, model: &mut Model) {
    let mut out = Vec::new();
    let mut queued = 0;
    while how & 4 != 0 {
        let Some(to) = engine.poll_transmit(&mut out) else { break };
        queued += 1;
        model.sent(engine, to);
        let is_datagram = !matches!(to, Destination::Connection(_));
        let longest = if is_datagram { DATAGRAM_MTU } else { MTU };
        assert!(out.len() <= longest + 4);
    }
    assert!(queued <= MAX_QUEUED + MAX_WAITING_IN_ALL);
    let mut changes = 0;
    while how & 8 != 0 && engine.poll_group().is_some() {
        changes += 1;
        SHARES.reach("a group joined");
    }
    assert!(changes <= 4 * MAX_GROUPS + 8);
    // Connections are opened and closed at once: what is under way over one that is closed is gone.
    while let Some(change) = engine.poll_connection() {
        match change {
            ConnectionChange::Open { id, .. } => model.ids.push(id),
            ConnectionChange::Close(id) => drop(model.under_way.remove(&id)),
        }
    }
    let told = std::iter::from_fn(|| engine.poll_deliver()).inspect(|it| assert!(it.len() <= 1280));
    assert!(told.count() <= MAX_QUEUED);
    let open = engine.connections().iter().filter(|it| !it.has_ended).count();
    assert!(open <= 2 * MAX_CONNECTIONS);
}

fn packet(engine: &mut Engine, now_ns: u64, how: u8, bytes: &mut [u8], model: &mut Model) {
    if how & 0x10 != 0 {
        likely_packet(bytes, how & 0x20 != 0);
    }
    match engine.handle_packet(now_ns, bytes) {
        Outgoing::Send(to, _) => {
            SHARES.reach("a packet sent");
            model.sent(engine, to);
        }
        Outgoing::Waits => SHARES.reach("a packet that waits"),
        Outgoing::Dropped(_) => {}
    }
}

fuzz_target!(|input: &[u8]| {
    SHARES.begin();
    let connects = input.last().is_none_or(|last| last & 7 != 7);
    let (mut engine, mut rest, mut now_ns) = (new(connects), input, 0_u64);
    let mut model = Model::default();
    while let [how, len, behind @ ..] = rest {
        let (bytes, behind) = behind.split_at(usize::from(*len).min(behind.len()));
        rest = behind;
        let mut bytes = bytes.to_vec();
        match how & 3 {
            0 | 1 => datagram(&mut engine, now_ns, *how, &mut bytes),
            2 => packet(&mut engine, now_ns, *how, &mut bytes, &mut model),
            _ if how >> 4 == 0 => now_ns += u64::from(*len) << 26,
            _ => connection(&mut engine, now_ns, *how, &mut bytes, &mut model),
        }
        if engine.poll_timeout().is_some_and(|at| at <= now_ns) {
            engine.handle_timeout(now_ns);
            assert!(engine.poll_timeout().is_none_or(|at| at > now_ns), "a deadline that stays");
        }
        drain(&mut engine, *how, &mut model);
    }
});
