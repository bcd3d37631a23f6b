//! Active Messages over datagrams, two processes: the input is what the programs do, and a network that
//! loses, repeats, reorders and changes what they send, and makes up datagrams of its own. Nothing may panic,
//! stay in a loop, keep a deadline in the past, or use memory without a limit or outside of what is
//! registered.
#![no_main]

#[allow(dead_code)]
#[path = "adapter/input.rs"]
mod input;
mod shares;

use std::collections::VecDeque;
use std::net::SocketAddr;

use input::Input;
use libfuzzer_sys::fuzz_target;
use quipu_am::datagram::{DatagramFabric, Limits, Memory, Place, answer_lookup};
use quipu_am::{
    Body, BundleId, Config, Core, DeliveryKind, EndpointId, Local, Mode, Name, Outgoing, Remote,
    Tag,
};
use shares::Shares;

static SHARES: Shares<7> = Shares::new([
    "connected",
    "a request runs",
    "a reply runs",
    "a get is done",
    "bulk data are in a segment",
    "a message comes back",
    "a fragment is sent again",
]);

const STEPS: usize = 400;
const TAG: Tag = Tag(5);
const DATAGRAM: usize = 256;
const SLOT: usize = 1024;
/// The memory that peers may use; as much before and after it is nobody's.
const LEN: u64 = 2048;
const MS: u64 = 1_000_000;
const MOST_CONNECTIONS: u32 = 8;
/// A network that holds more loses the oldest.
const MOST_UNDER_WAY: usize = 64;

struct Bytes(Vec<u8>);

impl Bytes {
    fn range(
        &self,
        (addr, len, key): (u64, u64, u32),
        offset: u64,
        n: usize,
    ) -> Option<std::ops::Range<usize>> {
        let from = addr.checked_add(offset)?;
        let to = from.checked_add(n as u64)?;
        let fits = key == 1 && offset + n as u64 <= len && from >= LEN && to <= 2 * LEN;
        fits.then_some(from as usize..to as usize)
    }
}

impl Memory for Bytes {
    fn read(&self, from: Local, offset: u64, out: &mut [u8]) -> bool {
        self.read_shown(Remote { addr: from.addr, len: from.len, key: from.key }, offset, out)
    }

    fn read_shown(&self, from: Remote, offset: u64, out: &mut [u8]) -> bool {
        let range = self.range((from.addr, from.len, from.key), offset, out.len());
        range.is_some_and(|range| {
            out.copy_from_slice(&self.0[range]);
            true
        })
    }

    fn write(&mut self, to: Local, offset: u64, bytes: &[u8]) -> bool {
        self.write_shown(Remote { addr: to.addr, len: to.len, key: to.key }, offset, bytes)
    }

    fn write_shown(&mut self, to: Remote, offset: u64, bytes: &[u8]) -> bool {
        let range = self.range((to.addr, to.len, to.key), offset, bytes.len());
        range.is_some_and(|range| {
            self.0[range].copy_from_slice(bytes);
            true
        })
    }
}

struct Node {
    core: Core<DatagramFabric<Bytes>, u16>,
    bundle: BundleId,
    endpoint: EndpointId,
    name: Name,
}

impl Node {
    fn new(index: u16) -> Self {
        let config = Config {
            max_outstanding: 8,
            shared_credits: 8,
            max_window: 4,
            initial_window: 2,
            max_connections: MOST_CONNECTIONS,
            max_medium: 600,
            send_buffers: 4,
            give_up_ns: 5000 * MS,
            lane_after: 16,
        };
        let limits = Limits {
            datagram: DATAGRAM,
            slot: SLOT,
            send_buffers: config.send_buffers,
            messages: 64,
            reads: 2,
            give_up_ns: config.give_up_ns,
            seed: index.into(),
        };
        let fabric = DatagramFabric::new(Bytes(vec![0x5a; 3 * LEN as usize]), limits);
        let address = SocketAddr::from(([10, 0, 0, 1], 1000 + index));
        let mut core = Core::new(fabric, config, address, u64::from(index + 1) << 8 | 3).unwrap();
        let bundle = core.create_bundle(Mode::Sequential);
        let endpoint = core.create_endpoint(bundle).unwrap();
        core.set_tag(endpoint, TAG).unwrap();
        for handler in 0..3 {
            core.set_handler(endpoint, handler.into(), Some(handler)).unwrap();
        }
        core.set_segment(endpoint, Some(Remote { addr: LEN, len: LEN, key: 1 })).unwrap();
        let name = core.name(endpoint).unwrap();
        Self { core, bundle, endpoint, name }
    }

    /// The program sends something to its peer.
    fn send(&mut self, input: &mut Input<'_>) {
        let (what, len) = (input.byte(), u64::from(input.byte()) * 4);
        let medium = [0x33; 1024];
        let from = Local { addr: LEN, len, key: 1 };
        let body = match what % 4 {
            1 => Body::Medium(&medium[..len as usize]),
            2 => Body::Bulk { from, offset: u64::from(input.byte()) * 8 },
            _ => Body::Short,
        };
        let handler = if what & 0x40 == 0 { 1 } else { 9 };
        let out = Outgoing { handler, args: &[1, 2], body };
        let (core, endpoint) = (&mut self.core, self.endpoint);
        // What cannot be sent is refused; the engine may refuse anything.
        let _ = match what % 8 {
            3 => core.get(endpoint, 0, u64::from(input.byte()), (0, len), (2, &[])),
            7 => core.signal(endpoint, 0),
            _ => core.request(endpoint, 0, &out).map(drop),
        };
    }

    /// The program polls: handlers run, and every other one replies.
    fn poll(&mut self, now: u64, input: &mut Input<'_>) {
        self.core.fabric_mut().handle_timeout(now);
        assert!(self.core.fabric().poll_timeout().is_none_or(|at| at > now));
        while let Some(event) = self.core.fabric_mut().poll_event() {
            if matches!(event, quipu_am::Event::Connected { .. }) {
                SHARES.reach("connected");
            }
            self.core.handle_event(event);
        }
        self.core.handle_timeout(now);
        let _ = self.core.take_signal(self.endpoint, 0);
        while let Some(mut delivery) = self.core.next_delivery(self.bundle) {
            match delivery.kind() {
                DeliveryKind::Request(_) => SHARES.reach("a request runs"),
                DeliveryKind::Reply => SHARES.reach("a reply runs"),
                DeliveryKind::Got => SHARES.reach("a get is done"),
                DeliveryKind::Returned { .. } => SHARES.reach("a message comes back"),
            }
            if let quipu_am::Payload::Segment(part) = &delivery.payload {
                SHARES.reach("bulk data are in a segment");
                assert!(part.addr >= LEN && part.addr + part.len <= 2 * LEN);
            }
            if matches!(delivery.kind(), DeliveryKind::Request(_)) && input.flag() {
                let out = Outgoing { handler: 2, args: &[3], body: Body::Medium(&[0x44; 300]) };
                let _ = self.core.reply(&mut delivery, &out);
            }
            self.core.finish(&mut delivery);
        }
        let fabric = self.core.fabric();
        let (slots, held) = fabric.in_use();
        assert!(slots <= 256 && held <= 1024 && self.core.connections() <= 8);
        if fabric.counters().resent > 0 {
            SHARES.reach("a fragment is sent again");
        }
    }

    /// What is not registered is as it was.
    fn check_outside(&self) {
        for outside in [0..LEN, 2 * LEN..3 * LEN] {
            let outside = outside.start as usize..outside.end as usize;
            assert!(self.core.fabric().memory().0[outside].iter().all(|byte| *byte == 0x5a));
        }
    }
}

/// Datagrams under way: to whom, from where, and what.
type Network = VecDeque<(usize, Place, Vec<u8>)>;

fn transmit(nodes: &mut [Node; 2], n: usize, now: u64, network: &mut Network) {
    let mut out = [0; DATAGRAM];
    let mut sent = 0;
    while let Some((to, len)) = nodes[n].core.fabric_mut().poll_transmit(now, &mut out) {
        sent += 1;
        assert!(sent < 5000, "it sends without end");
        if let Some(at) = to.socket() {
            let answer = answer_lookup(&out[..len], &nodes[1 - n].name).expect("it asks");
            network.push_back((n, Place::of_socket(at), answer.to_vec()));
        }
        if Place::of(&nodes[1 - n].name) == to {
            network.push_back((1 - n, Place::of(&nodes[n].name), out[..len].to_vec()));
        }
        if network.len() > MOST_UNDER_WAY {
            network.pop_front();
        }
    }
}

/// Has a process read one of the datagrams under way, possibly another one than was sent.
fn deliver(nodes: &mut [Node; 2], now: u64, network: &mut Network, input: &mut Input<'_>) {
    let what = input.byte();
    let at = if what & 1 == 0 { 0 } else { usize::from(input.byte()) % network.len().max(1) };
    let Some((to, mut from, mut bytes)) = network.remove(at) else { return };
    match what >> 1 & 7 {
        0 => return,
        1 => network.push_back((to, from, bytes.clone())),
        2 => {
            let place = usize::from(input.byte()) % bytes.len();
            bytes[place] = input.byte();
        }
        3 => bytes.truncate(input.byte().into()),
        4 => from.number ^= u32::from(input.byte()),
        _ => {}
    }
    nodes[to].core.fabric_mut().handle_datagram(now, from, &bytes);
}

/// Has a process read a datagram that nobody has sent.
fn invent(nodes: &mut [Node; 2], now: u64, input: &mut Input<'_>) {
    let to = usize::from(input.flag());
    let from = Place::of(&nodes[1 - to].name);
    let mut bytes = vec![0x41, 0x75];
    bytes.extend(input.bytes());
    nodes[to].core.fabric_mut().handle_datagram(now, from, &bytes);
}

fuzz_target!(|data: &[u8]| {
    SHARES.begin();
    let mut input = Input(data);
    let mut nodes = [0, 1].map(Node::new);
    let names = [nodes[0].name, nodes[1].name];
    for (node, peer) in nodes.iter_mut().zip([names[1], names[0]]) {
        node.core.map(node.endpoint, 0, peer, TAG).unwrap();
    }
    let (mut now, mut network) = (MS, Network::new());
    for _ in 0..STEPS {
        if input.is_over() {
            break;
        }
        let what = input.byte();
        let n = usize::from(what >> 7);
        match what & 0x0f {
            0..=2 => nodes[n].send(&mut input),
            3 => now += u64::from(input.byte()) * 100_000,
            4 => now += u64::from(input.byte()) * 20 * MS,
            5 => invent(&mut nodes, now, &mut input),
            6 => drop(nodes[n].core.unmap(nodes[n].endpoint, 0)),
            7 => {
                // By its name, or by the address of its UDP port.
                let at = SocketAddr::from(([10, 0, 0, 1], 9000));
                let peer = if what & 0x10 == 0 { names[1 - n] } else { Name::of_address(at) };
                let _ = nodes[n].core.map(nodes[n].endpoint, 0, peer, TAG);
            }
            8..=10 => deliver(&mut nodes, now, &mut network, &mut input),
            _ => {
                // A network without faults, for a while.
                for _ in 0..8 {
                    while let Some((to, from, bytes)) = network.pop_front() {
                        nodes[to].core.fabric_mut().handle_datagram(now, from, &bytes);
                    }
                    (0..2).for_each(|n| nodes[n].poll(now, &mut input));
                    (0..2).for_each(|n| transmit(&mut nodes, n, now, &mut network));
                    now += MS / 10;
                }
            }
        }
        nodes[n].poll(now, &mut input);
        transmit(&mut nodes, n, now, &mut network);
    }
    nodes.iter().for_each(Node::check_outside);
});
