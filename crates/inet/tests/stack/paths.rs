//! Paths that are narrower than the link, with routers that say so and with such as do not.

use std::net::{IpAddr, Ipv6Addr};

use quipu_inet::stack::Stack;
use quipu_inet::tcp::{Mode, SECOND};
use quipu_wire::{icmpv4, icmpv6, ipv4, ipv6};

use crate::net::{Net, V4, V6};
use crate::packets::Packet;
use crate::streams::{LIMIT, messages, stream};

pub const MTU: usize = 1_400;

/// What a router says of a frame that is too long for its next link.
pub fn too_big(frame: &[u8], from: IpAddr) -> Vec<u8> {
    match from {
        IpAddr::V6(own) => {
            let router: Ipv6Addr = "fd00::fe".parse().unwrap();
            let packet = &frame[..frame.len().min(1_232)];
            let message = icmpv6::Repr::PacketTooBig { mtu: MTU as u32, packet };
            let mut bytes = vec![0; message.wire_len()];
            message.emit(router, own, &mut bytes);
            Packet::new(router.into(), own.into()).carry(icmpv6::PROTOCOL, &bytes)
        }
        IpAddr::V4(_) => {
            let (code, next_mtu) = (icmpv4::unreachable::FRAGMENTATION_NEEDED, MTU as u16);
            let packet = &frame[..ipv4::LEN + 8];
            let message = icmpv4::Repr::Unreachable { code, next_mtu, packet };
            let mut bytes = vec![0; message.wire_len()];
            message.emit(&mut bytes);
            Packet::new([10, 0, 0, 254].into(), from).carry(1, &bytes)
        }
    }
}

/// A stream over a path with a narrow link in it; how long it takes.
fn narrow(addresses: [&str; 2], message: bool, says: bool) -> u64 {
    let config = if message { messages() } else { stream() };
    assert_eq!(config.mode == Mode::Message, message);
    let mut net = Net::new(addresses, 9_000, config, 1);
    let [client, server] = net.pair();
    let begun = net.now;
    net.narrow = Some(MTU);
    let from = net.hosts[0].address;
    net.hosts[0].stack.send(client, 100_000, true).unwrap();
    let done = net.run_until(LIMIT, |net| {
        for frame in std::mem::take(&mut net.too_long) {
            if says {
                net.arrive(0, &too_big(&frame, from), false);
            }
        }
        net.hosts[0].user(client).acked == 100_000
    });
    assert!(done);
    net.check(1, server, 100_000);
    let path = net.hosts[0].stack.path_mtu(net.hosts[1].address);
    assert_eq!(path, if says { MTU as u32 } else { 9_000 });
    if says {
        // Another connection knows from the first segment on.
        let connection = net.connect(0, 81);
        let mss = net.hosts[0].stack.connection(connection).unwrap().mss();
        assert!(mss as usize <= MTU - ipv4::LEN - 20, "{mss}");
    }
    net.now - begun
}

#[test]
fn a_router_says_so() {
    for (addresses, message) in [(V6, false), (V6, true), (V4, false), (V4, true)] {
        let took = narrow(addresses, message, true);
        assert!(took < SECOND, "{took}: no timeout is needed");
    }
}

/// A connection goes by what is reported of its own segments, though others have heard before that the path
/// is narrow.
#[test]
fn a_path_that_is_known_is_news_to_a_connection() {
    let mut net = Net::new(V6, 9_000, stream(), 1);
    let [client, server] = net.pair();
    net.narrow = Some(MTU);
    let [from, to] = [0, 1].map(|host| net.hosts[host].address);
    let (socket, _) = net.hosts[0].stack.bind(0).unwrap();
    net.send_datagram(0, socket, (to, 9).into(), &[1; 2_000]).unwrap();
    let reported = |net: &mut Net| {
        for frame in std::mem::take(&mut net.too_long) {
            net.arrive(0, &too_big(&frame, from), false);
        }
    };
    reported(&mut net);
    assert_eq!(net.hosts[0].stack.path_mtu(to), MTU as u32);
    let begun = net.now;
    net.hosts[0].stack.send(client, 100_000, true).unwrap();
    let done = net.run_until(LIMIT, |net| {
        reported(net);
        net.hosts[0].user(client).acked == 100_000
    });
    assert!(done && net.now - begun < SECOND, "{}: no timeout is needed", net.now - begun);
    net.check(1, server, 100_000);
}

#[test]
fn no_router_says_so() {
    for (addresses, message) in [(V6, false), (V4, true)] {
        let took = narrow(addresses, message, false);
        assert!((SECOND..60 * SECOND).contains(&took), "{took}: found out by timeouts");
    }
}

#[test]
fn a_stranger_cannot_say_so() {
    let mut net = Net::new(V6, 9_000, stream(), 1);
    let [client, _] = net.pair();
    net.hosts[0].stack.send(client, 50_000, true).unwrap();
    let mut frame = vec![0; 10_000];
    let departure = net.hosts[0].stack.poll_transmit(net.now, &mut frame).unwrap();
    frame.truncate(departure.len());
    let from = net.hosts[0].address;
    let path = |stack: &Stack| stack.path_mtu(V6[1].parse().unwrap());
    // Another number, another port: not what is on the way.
    for at in [ipv6::LEN + 4, ipv6::LEN + 1] {
        let mut guess = frame.clone();
        guess[at] ^= 1;
        net.arrive(0, &too_big(&guess, from), false);
        assert_eq!(path(&net.hosts[0].stack), 9_000);
    }
    net.arrive(0, &too_big(&frame, from), false);
    assert_eq!(path(&net.hosts[0].stack), MTU as u32);
}
