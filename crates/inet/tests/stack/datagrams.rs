//! UDP.

use std::net::SocketAddr;

use quipu_inet::stack::{BindError, DatagramError};
use quipu_inet::tcp::SECOND;

use crate::net::{Net, V4, V6};
use crate::packets::{Packet, sealed_datagram};
use crate::streams::stream;

#[test]
fn datagrams_there_and_back() {
    for (addresses, overhead) in [(V6, 48), (V4, 28)] {
        let mut net = Net::new(addresses, 1_500, stream(), 1);
        let (here, _) = net.hosts[0].stack.bind(0).unwrap();
        let (there, port) = net.hosts[1].stack.bind(53).unwrap();
        let to = SocketAddr::new(net.hosts[1].address, port);
        for len in [0, 1, 2, 1_500 - overhead] {
            net.send_datagram(0, here, to, &vec![len as u8; len]).unwrap();
        }
        let fits = 1_500 - overhead;
        let long = net.send_datagram(0, here, to, &vec![0; fits + 1]);
        assert_eq!(long, Err(DatagramError::Long { fits }), "in one packet");
        net.run(SECOND);
        let lens: Vec<_> =
            net.hosts[1].datagrams.iter().map(|(_, payload)| payload.len()).collect();
        assert_eq!(lens, [0, 1, 2, fits]);
        let (datagram, _) = net.hosts[1].datagrams[0].clone();
        assert_eq!((datagram.socket, datagram.from.ip()), (there, net.hosts[0].address));
        net.send_datagram(1, there, datagram.from, b"back").unwrap();
        net.run(SECOND);
        assert_eq!(net.hosts[0].datagrams[0].1, b"back");
        net.hosts[1].stack.unbind(there);
        net.send_datagram(0, here, to, b"late").unwrap();
        net.run(SECOND);
        assert_eq!(net.hosts[1].stack.counters().udp_unknown, 1);
        let gone = net.send_datagram(1, there, datagram.from, b"gone");
        assert_eq!(gone, Err(DatagramError::Closed));
    }
}

#[test]
fn a_port_is_bound_once() {
    let mut net = Net::new(V6, 1_500, stream(), 1);
    let stack = &mut net.hosts[0].stack;
    let (socket, _) = stack.bind(7).unwrap();
    assert_eq!(stack.bind(7), Err(BindError::InUse));
    stack.unbind(socket);
    stack.unbind(socket);
    let (anew, _) = stack.bind(7).unwrap();
    assert_ne!(socket, anew, "an old identifier stays dead");
}

#[test]
fn a_datagram_in_parts_is_marked_if_one_of_them_is() {
    let mut net = Net::new(V6, 1_500, stream(), 1);
    let (_, port) = net.hosts[1].stack.bind(53).unwrap();
    let [from, to] = V6.map(|address| address.parse().unwrap());
    let upper = sealed_datagram(V6, 9, port, &[7; 300]);
    let mut parts = Packet::new(from, to).parts(&upper, 17, 104);
    for (part, codepoint) in parts.iter_mut().zip([3, 2, 2]) {
        // The lower half of the traffic class is the upper of the second octet.
        part[1] |= codepoint << 4;
    }
    for part in &parts {
        net.arrive(1, part, false);
    }
    let (datagram, payload) = net.hosts[1].datagrams.pop().expect("it is whole");
    assert_eq!((datagram.traffic_class & 3, payload), (3, vec![7; 300]));
}
