//! IP over InfiniBand: an engine that gets datagrams of peers and packets of the kernel from the input, in
//! any order and at any time. The first octet of each operation chooses what comes, and whether its fields
//! are made likely.
#![no_main]

mod shares;

use libfuzzer_sys::fuzz_target;
use quipu_ipoib::wire::checksum::{Sum, sum};
use quipu_ipoib::{
    Arrival, Config, DEFAULT_PKEY, Engine, Incoming, LinkAddress, MAX_GROUPS, MAX_QUEUED,
    MAX_WAITING_IN_ALL, Outgoing,
};
use shares::Shares;

static SHARES: Shares<5> = Shares::new([
    "a packet delivered",
    "a message consumed",
    "a packet sent",
    "a packet that waits",
    "a group joined",
]);

const MTU: usize = 2044;

fn link(n: u8) -> LinkAddress {
    LinkAddress { qpn: n.into(), gid: [n; 16] }
}

fn new() -> Engine {
    Engine::new(Config {
        link: link(1),
        mtu: MTU,
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
        let own = bytes[68] & 3;
        bytes[68..88].copy_from_slice(&link(own).to_bytes());
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
        let own = bytes[8] & 3;
        bytes[8..28].copy_from_slice(&link(own).to_bytes());
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

fn packet(engine: &mut Engine, now_ns: u64, how: u8, bytes: &mut [u8]) {
    if how & 0x10 != 0 {
        likely_packet(bytes, how & 0x20 != 0);
    }
    match engine.handle_packet(now_ns, bytes) {
        Outgoing::Send(..) => SHARES.reach("a packet sent"),
        Outgoing::Waits => SHARES.reach("a packet that waits"),
        Outgoing::Dropped(_) => {}
    }
}

fuzz_target!(|input: &[u8]| {
    SHARES.begin();
    let (mut engine, mut rest, mut now_ns) = (new(), input, 0_u64);
    let mut out = Vec::new();
    while let [how, len, behind @ ..] = rest {
        let (bytes, behind) = behind.split_at(usize::from(*len).min(behind.len()));
        rest = behind;
        let mut bytes = bytes.to_vec();
        match how & 3 {
            0 | 1 => datagram(&mut engine, now_ns, *how, &mut bytes),
            2 => packet(&mut engine, now_ns, *how, &mut bytes),
            _ => now_ns += u64::from(*len) << 26,
        }
        if engine.poll_timeout().is_some_and(|at| at <= now_ns) {
            engine.handle_timeout(now_ns);
            assert!(engine.poll_timeout().is_none_or(|at| at > now_ns), "a deadline that stays");
        }
        let mut queued = 0;
        while how & 4 != 0 && engine.poll_transmit(&mut out).is_some() {
            queued += 1;
            assert!(out.len() <= MTU + 4);
        }
        assert!(queued <= MAX_QUEUED + MAX_WAITING_IN_ALL);
        let mut changes = 0;
        while how & 8 != 0 && engine.poll_group().is_some() {
            changes += 1;
            SHARES.reach("a group joined");
        }
        assert!(changes <= 4 * MAX_GROUPS + 8);
    }
});
