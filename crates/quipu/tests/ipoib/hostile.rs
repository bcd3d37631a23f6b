//! A peer on the link that lies.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::time::{Duration, Instant};

use quipu::{
    Access, Completion, CompletionQueue, Config, Connection, DatagramAddress, DatagramQueuePair,
    Device, Error, Gid, MemoryRegion, ProtectionDomain, QpNum, ROUTE_HEADER, Request,
};
use quipu_ipoib::wire::arp::Operation;
use quipu_ipoib::wire::ipoib::{Arp, Discovery, group_gid};
use quipu_ipoib::{ConnectionData, DEFAULT_PKEY, Encapsulation, LinkAddress, service_port};

use super::{end, host, key, possible};

const PATIENCE: Duration = Duration::from_secs(20);
const SLOT: usize = 4224;
const RECEIVES: usize = 64;

/// A queue pair on the link, by hand.
struct Peer {
    pd: ProtectionDomain,
    cq: CompletionQueue,
    qp: DatagramQueuePair,
    memory: MemoryRegion,
    key: u32,
}

impl Peer {
    fn new(key: u32) -> Self {
        let address = Some("127.0.0.1".parse().unwrap());
        let device = Device::open(Config { address, ..Config::default() }).unwrap();
        let pd = device.protection_domain().unwrap();
        let cq = device.completion_queue(512).unwrap();
        let qp = pd.queue_pair(&cq, &cq).build_datagram(key).unwrap();
        let memory = pd.register(SLOT * (RECEIVES + 1), Access::LOCAL_WRITE).unwrap();
        for place in 1..=RECEIVES {
            qp.post_recv(place as u64, &[memory.sge(place * SLOT, SLOT).unwrap()]).unwrap();
        }
        let all = group_gid(Ipv4Addr::BROADCAST.into(), DEFAULT_PKEY);
        qp.join(Ipv6Addr::from(all).into()).unwrap();
        Self { pd, cq, qp, memory, key }
    }

    fn link(&self) -> LinkAddress {
        let address = self.qp.address();
        LinkAddress { qpn: address.qp_num.0, gid: address.gid.0, connects: false }
    }

    fn post(&self, to: LinkAddress, bytes: &[u8]) {
        let (gid, qp_num) = (Gid(to.gid), QpNum(to.qpn));
        let address = DatagramAddress { gid, qp_num, qkey: self.key };
        let to = self.pd.destination(&address).unwrap();
        self.memory.write(0, bytes).unwrap();
        let memory = [self.memory.sge(0, bytes.len()).unwrap()];
        self.qp.send_to(&Request::send(&memory).id(0), &to).unwrap();
    }

    /// Sends a datagram, and waits until it is on its way; what comes meanwhile is passed over.
    fn send(&self, to: LinkAddress, bytes: &[u8]) {
        self.post(to, bytes);
        while self.next().is_some() {}
    }

    /// The next ARP message, or none; sends are passed over.
    fn next(&self) -> Option<Arp> {
        let mut done = [Completion::default()];
        while self.cq.wait_timeout(&mut done, Duration::from_millis(20)).unwrap() > 0 {
            let place = done[0].wr_id as usize;
            if place == 0 {
                continue;
            }
            let len = done[0].byte_len as usize;
            let bytes =
                self.memory.to_vec(place * SLOT + ROUTE_HEADER, len - ROUTE_HEADER).unwrap();
            let memory = [self.memory.sge(place * SLOT, SLOT).unwrap()];
            self.qp.post_recv(place as u64, &memory).unwrap();
            if Encapsulation::parse(&bytes) == Ok(Encapsulation::Arp) {
                return Arp::parse(&bytes[4..]).ok();
            }
        }
        None
    }

    /// The first ARP message of a host, in which it says its link-layer address.
    fn hear(&self, host: Ipv4Addr) -> LinkAddress {
        let begun = Instant::now();
        loop {
            assert!(begun.elapsed() < PATIENCE, "{host} says nothing");
            if let Some(arp) = self.next().filter(|arp| arp.sender == host) {
                return arp.sender_link;
            }
        }
    }
}

fn arp(
    operation: Operation,
    sender_link: LinkAddress,
    sender: [u8; 4],
    target: [u8; 4],
) -> Vec<u8> {
    let (sender, target) = (sender.into(), target.into());
    let arp = Arp { operation, sender_link, sender, target_link: [0; 20], target };
    [&Encapsulation::Arp.to_bytes()[..], &arp.to_bytes()].concat()
}

/// Datagrams that are to be ignored, whoever gets them.
fn lies(own: LinkAddress, victim: LinkAddress) -> Vec<Vec<u8>> {
    let mut lies = vec![Vec::new(), vec![8], vec![8, 0, 0], vec![8, 0, 0, 0], vec![0xff; 4096]];
    // Types, and lengths that lie.
    lies.push([&[0x88, 0xcc, 0, 0][..], &[1; 100]].concat());
    lies.push([&[8, 0, 0, 0, 0x45, 0, 0xff, 0xff][..], &[0; 60]].concat());
    lies.push([&[0x86, 0xdd, 0, 0, 0x60, 0, 0, 0, 0xff, 0xff][..], &[0; 60]].concat());
    lies.push([&[8, 6, 0, 0][..], &[0xff; 56]].concat());
    lies.push([&[8, 6, 0, 0, 0, 32, 8, 0, 6, 4][..], &[0; 40]].concat());
    // Addresses that are another's.
    for operation in [Operation::Request, Operation::Reply] {
        lies.push(arp(operation, victim, [10, 7, 1, 2], [10, 7, 1, 1]));
        lies.push(arp(operation, own, [10, 7, 1, 1], [10, 7, 1, 1]));
        lies.push(arp(operation, own, [10, 7, 1, 255], [10, 7, 1, 1]));
    }
    let (solicited, overrides) = (true, true);
    let target = Ipv6Addr::new(0xfd07, 0, 0, 0, 0, 0, 0, 1);
    let link = Some(own);
    let told = Discovery::Advertisement { target, solicited, overrides, link };
    let packet = told.to_packet(target, target);
    lies.push([&Encapsulation::Ipv6.to_bytes()[..], &packet].concat());
    lies
}

#[test]
fn a_peer_that_lies_is_ignored_and_others_go_on() {
    if !possible() {
        return;
    }
    let peer = Peer::new(key(3));
    let options = ["--address", "10.7.1.1/24", "--address", "fd07::1/64", "--mtu", "2044"];
    let server = host(peer.key, &options, "serve 1");
    let victim = peer.hear(Ipv4Addr::new(10, 7, 1, 1));
    let own = peer.link();
    for _ in 0..3 {
        for lie in lies(own, victim) {
            peer.send(victim, &lie);
        }
    }
    // One that is what it says is answered.
    let asked = arp(Operation::Request, own, [10, 7, 1, 9], [10, 7, 1, 1]);
    let begun = Instant::now();
    loop {
        assert!(begun.elapsed() < PATIENCE, "no answer");
        peer.post(victim, &asked);
        let answer = peer.next().filter(|arp| arp.operation == Operation::Reply);
        if let Some(answer) = answer {
            assert_eq!(
                (answer.sender_link, IpAddr::V4(answer.sender)),
                (victim, [10, 7, 1, 1].into())
            );
            break;
        }
    }
    let client = host(peer.key, &["--address", "10.7.1.2/24", "--mtu", "2044"], "ask 10.7.1.1");
    end(client);
    let said = end(server);
    for why in ["malformed", "unknown_type", "too_long", "forged"] {
        assert!(said.contains(why), "{why}: {said}");
    }
}

/// Asks a host for a connection, with this private data.
fn connect(peer: &Peer, to: LinkAddress, private_data: &[u8]) -> Result<Connection, Error> {
    let qp = peer.pd.queue_pair(&peer.cq, &peer.cq).build()?;
    let at = SocketAddr::new([127, 0, 0, 1].into(), service_port(to.qpn));
    Connection::open(qp, at, private_data)
}

#[test]
fn a_peer_that_lies_over_a_connection_is_ignored_and_others_go_on() {
    if !possible() {
        return;
    }
    let peer = Peer::new(key(4));
    let options = ["--mode", "connected", "--address", "10.7.2.1/24", "--address", "fd07::1/64"];
    let server = host(peer.key, &options, "serve 1");
    let victim = peer.hear(Ipv4Addr::new(10, 7, 2, 1));
    assert!(victim.connects);
    let own = peer.link();
    let receive_mtu = |receive_mtu: u32| ConnectionData { qpn: own.qpn, receive_mtu }.to_bytes();
    for garbage in [&[][..], &[0xff; 56], b"garbage", &receive_mtu(20), &receive_mtu(1 << 17)] {
        let refused = connect(&peer, victim, garbage);
        assert!(matches!(refused, Err(Error::Rejected { reason: 28, .. })), "{refused:?}");
    }
    let connection = connect(&peer, victim, &receive_mtu(65524)).unwrap();
    let said = ConnectionData::parse(connection.private_data()).unwrap();
    assert_eq!((said.qpn, said.receive_mtu), (victim.qpn, 65524));
    let mut lies = lies(own, victim);
    lies.push([&[8, 0, 0, 0, 0x45, 0, 0xff, 0xff][..], &[0; 60_000]].concat());
    for lie in &lies {
        let memory = peer.pd.register(lie.len().max(1), Access::LOCAL_WRITE).unwrap();
        memory.write(0, lie).unwrap();
        let pieces = [memory.sge(0, lie.len()).unwrap()];
        connection.post_send(&Request::send(&pieces).id(0)).unwrap();
        while peer.next().is_some() {}
    }
    // One that is longer than the interface's MTU ends the connection.
    let memory = peer.pd.register(1 << 17, Access::LOCAL_WRITE).unwrap();
    let pieces = [memory.sge(0, 1 << 17).unwrap()];
    connection.post_send(&Request::send(&pieces).id(0)).unwrap();
    connection.wait_end().unwrap();
    let options = ["--mode", "connected", "--address", "10.7.2.2/24"];
    end(host(peer.key, &options, "ask-large 10.7.2.1"));
    let said = end(server);
    for why in ["malformed", "unknown_type", "misdirected", "5 refused", "2 accepted"] {
        assert!(said.contains(why), "{why}: {said}");
    }
}
