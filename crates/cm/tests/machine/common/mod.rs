//! Two engines and the network between them, in simulated time.
#![allow(dead_code, reason = "each test file uses a part of it")]

use std::collections::{BTreeMap, VecDeque};
use std::net::SocketAddr;

use quipu_cm::{
    Action, ChannelKey, Cm, Config, Event, EventKind, IdKey, Loss, Param, PortSpace, StreamKey,
};

pub const SECOND: u64 = 1_000_000_000;
pub const RC: u8 = 2;
pub const UD: u8 = 4;

/// One engine, with one channel.
pub struct Node {
    pub cm: Cm,
    pub channel: ChannelKey,
    pub address: SocketAddr,
}

/// A datagram under way.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Datagram {
    pub to: usize,
    pub from: SocketAddr,
    pub bytes: Vec<u8>,
}

/// What the network does to the `n`th datagram: how many copies arrive.
pub type Fate = Box<dyn FnMut(usize) -> usize>;

/// Two engines.
pub struct Pair {
    pub now: u64,
    pub nodes: [Node; 2],
    /// Who listens, by address.
    pub listeners: BTreeMap<SocketAddr, (usize, IdKey)>,
    /// The other end of each stream.
    pub ends: BTreeMap<(usize, StreamKey), (usize, StreamKey)>,
    /// Streams whose other end is not at an engine, but with the test.
    pub strangers: BTreeMap<(usize, StreamKey), Vec<u8>>,
    pub closed: Vec<(usize, StreamKey, bool)>,
    /// Bytes go in pieces of this size.
    pub piece: usize,
    /// How many bytes a side may send before all streams are cut; and how many it has sent.
    pub cut: [Option<usize>; 2],
    pub sent: [usize; 2],
    pub datagrams: VecDeque<Datagram>,
    pub fate: Fate,
    pub counted: usize,
    /// TCP connections are refused, or time out, instead of being made.
    pub refuse: Option<Loss>,
    /// TCP connections hang.
    pub hang: bool,
}

pub fn node(index: u8, config: Config) -> Node {
    let mut gid = [0; 16];
    gid[10..].copy_from_slice(&[0xff, 0xff, 10, 0, 0, index + 1]);
    let mut cm = Cm::new(Config { gid, seed: [index; 32], ..config });
    let channel = cm.create_channel();
    Node { cm, channel, address: SocketAddr::from(([10, 0, 0, index + 1], 0)) }
}

impl Default for Pair {
    fn default() -> Self {
        Self::new(Config::default())
    }
}

impl Pair {
    pub fn new(config: Config) -> Self {
        Self {
            now: 1,
            nodes: [node(0, config.clone()), node(1, config)],
            listeners: BTreeMap::new(),
            ends: BTreeMap::new(),
            strangers: BTreeMap::new(),
            closed: Vec::new(),
            piece: usize::MAX,
            cut: [None; 2],
            sent: [0; 2],
            datagrams: VecDeque::new(),
            fate: Box::new(|_| 1),
            counted: 0,
            refuse: None,
            hang: false,
        }
    }

    pub fn id(&mut self, node: usize, space: PortSpace) -> IdKey {
        let kind = if space == PortSpace::Udp { UD } else { RC };
        let node = &mut self.nodes[node];
        node.cm.create_id(node.channel, space, kind, 7).unwrap()
    }

    /// A listener at node 1.
    pub fn listen(&mut self, space: PortSpace, port: u16, backlog: i32) -> IdKey {
        let kind = if space == PortSpace::Udp { UD } else { RC };
        self.listen_as(kind, space, port, backlog)
    }

    /// The same for queue pairs of that type.
    pub fn listen_as(&mut self, kind: u8, space: PortSpace, port: u16, backlog: i32) -> IdKey {
        let node = &mut self.nodes[1];
        let id = node.cm.create_id(node.channel, space, kind, 7).unwrap();
        let mut address = self.nodes[1].address;
        address.set_port(port);
        self.nodes[1].cm.bind(id, address).unwrap();
        self.nodes[1].cm.listen(id, backlog).unwrap();
        self.listeners.insert(address, (1, id));
        id
    }

    /// An identifier at node 0 that may connect to a port of node 1.
    pub fn resolve(&mut self, space: PortSpace, port: u16) -> IdKey {
        let kind = if space == PortSpace::Udp { UD } else { RC };
        self.resolve_as(kind, space, port)
    }

    /// The same for a queue pair of that type.
    pub fn resolve_as(&mut self, kind: u8, space: PortSpace, port: u16) -> IdKey {
        let node = &mut self.nodes[0];
        let id = node.cm.create_id(node.channel, space, kind, 7).unwrap();
        let [mut src, mut dst] = [0, 1].map(|node: usize| self.nodes[node].address);
        // Every identifier has a port of its own.
        src.set_port(1000 + (id.index() % 60_000) as u16);
        dst.set_port(port);
        self.nodes[0].cm.resolved(id, dst, Ok(src)).unwrap();
        self.nodes[0].cm.resolve_route(id).unwrap();
        self.expect(0, EventKind::AddrResolved);
        self.expect(0, EventKind::RouteResolved);
        id
    }

    /// As `resolve`, and connects.
    pub fn connect(&mut self, port: u16, param: &Param) -> IdKey {
        let id = self.resolve(PortSpace::Tcp, port);
        self.nodes[0].cm.connect(self.now, id, param).unwrap();
        self.run();
        id
    }

    /// A connection up to its request: both identifiers.
    pub fn requested(&mut self) -> (IdKey, IdKey) {
        self.listen(PortSpace::Tcp, 5000, 0);
        let active = self.connect(5000, &Param::default());
        (active, self.expect(1, EventKind::ConnectRequest).id)
    }

    /// A connection that was accepted.
    pub fn accepted(&mut self) -> (IdKey, IdKey) {
        let (active, passive) = self.requested();
        let now = self.now;
        self.nodes[1].cm.accept(now, passive, Some(&Param::default())).unwrap();
        self.run();
        self.expect(0, EventKind::ConnectResponse);
        (active, passive)
    }

    /// A connection that stands.
    pub fn established(&mut self) -> (IdKey, IdKey) {
        let (active, passive) = self.accepted();
        let now = self.now;
        self.nodes[0].cm.accept(now, active, None).unwrap();
        self.run();
        self.expect(1, EventKind::Established);
        (active, passive)
    }

    pub fn event(&mut self, node: usize) -> Option<Event> {
        let node = &mut self.nodes[node];
        let before = node.cm.waiting(node.channel);
        let event = node.cm.take_event(node.channel).unwrap();
        assert_eq!(node.cm.waiting(node.channel), before.saturating_sub(1));
        event
    }

    #[track_caller]
    pub fn expect(&mut self, node: usize, kind: EventKind) -> Event {
        let event = self.event(node).expect("an event");
        assert_eq!(event.kind, kind, "{event:?}");
        event
    }

    #[track_caller]
    pub fn expect_nothing(&mut self) {
        for node in 0..2 {
            assert_eq!(self.event(node), None, "at node {node}");
        }
    }

    /// A stranger opens a stream to a listener of node 1. `None`: it was turned away.
    pub fn stranger(&mut self, listener: IdKey, from: &str) -> Option<StreamKey> {
        let local = self.nodes[1].cm.route(listener).unwrap().src.unwrap();
        let from = from.parse().unwrap();
        let stream = self.nodes[1].cm.handle_accepted(self.now, listener, local, from)?;
        self.strangers.insert((1, stream), Vec::new());
        self.run();
        Some(stream)
    }

    /// The stranger says something.
    pub fn say(&mut self, stream: StreamKey, bytes: &[u8]) {
        self.nodes[1].cm.handle_bytes(self.now, stream, bytes);
        self.run();
    }

    pub fn is_open(&self, stream: StreamKey) -> bool {
        self.strangers.contains_key(&(1, stream))
    }

    /// Whatever both engines want to do is done, and what they send arrives.
    pub fn run(&mut self) {
        loop {
            let mut any = false;
            for node in 0..2 {
                while let Some(action) = self.nodes[node].cm.poll_action() {
                    any = true;
                    self.carry_out(node, action);
                }
            }
            if let Some(datagram) = self.datagrams.pop_front() {
                any = true;
                self.deliver(&datagram);
            }
            if !any {
                return;
            }
        }
    }

    fn carry_out(&mut self, node: usize, action: Action) {
        match action {
            Action::Connect { stream, id, to, first } => {
                let from = self.nodes[node].cm.route(id).unwrap().src.unwrap();
                self.make(node, stream, from, to, &first);
            }
            // There are no sockets here.
            Action::Hold { .. } => {}
            Action::HandOver(_) | Action::End { .. } => panic!("see the tests of plain iWARP"),
            Action::Reach { .. }
            | Action::Answer { .. }
            | Action::Refuse { .. }
            | Action::Abort { .. } => panic!("see the tests of QPIP"),
            Action::Send { stream, bytes } => self.send(node, stream, &bytes),
            Action::Close { stream, reset } => {
                self.closed.push((node, stream, reset));
                self.strangers.remove(&(node, stream));
                if let Some((other, end)) = self.unlink(node, stream) {
                    self.nodes[other].cm.handle_lost(self.now, end, Loss::Closed);
                }
            }
            Action::Datagram { via, from, to, bytes } => {
                let bound = self.nodes[node].cm.route(via).ok().and_then(|route| route.src);
                let from = from.or(bound).unwrap();
                self.counted += 1;
                let target = usize::from(to.ip() == self.nodes[1].address.ip());
                for _ in 0..(self.fate)(self.counted) {
                    let bytes = bytes.clone();
                    self.datagrams.push_back(Datagram { to: target, from, bytes });
                }
            }
        }
    }

    fn make(
        &mut self,
        node: usize,
        stream: StreamKey,
        from: SocketAddr,
        to: SocketAddr,
        first: &[u8],
    ) {
        if self.hang {
            return;
        }
        let (now, listener) = (self.now, self.listeners.get(&to).copied());
        let refused = self.refuse.or(listener.is_none().then_some(Loss::Refused));
        if let Some(loss) = refused {
            return self.nodes[node].cm.handle_lost(now, stream, loss);
        }
        let Some((other, listener)) = listener else { return };
        let accepted = self.nodes[other].cm.handle_accepted(now, listener, to, from);
        let Some(end) = accepted else {
            return self.nodes[node].cm.handle_lost(now, stream, Loss::Refused);
        };
        self.ends.insert((node, stream), (other, end));
        self.ends.insert((other, end), (node, stream));
        self.nodes[node].cm.handle_reached(now, stream);
        self.send(node, stream, first);
    }

    fn unlink(&mut self, node: usize, stream: StreamKey) -> Option<(usize, StreamKey)> {
        let end = self.ends.remove(&(node, stream))?;
        self.ends.remove(&end);
        Some(end)
    }

    fn send(&mut self, node: usize, stream: StreamKey, bytes: &[u8]) {
        if let Some(heard) = self.strangers.get_mut(&(node, stream)) {
            return heard.extend_from_slice(bytes);
        }
        let allowed = self.cut[node].map_or(bytes.len(), |cut| cut - self.sent[node].min(cut));
        let bytes_sent = &bytes[..bytes.len().min(allowed)];
        self.sent[node] += bytes_sent.len();
        for piece in bytes_sent.chunks(self.piece) {
            let Some(&(other, end)) = self.ends.get(&(node, stream)) else { return };
            self.nodes[other].cm.handle_bytes(self.now, end, piece);
        }
        if bytes_sent.len() < bytes.len() {
            self.cut_stream(node, stream);
        }
    }

    /// The connection under a stream breaks.
    pub fn cut_stream(&mut self, node: usize, stream: StreamKey) {
        if let Some((other, end)) = self.unlink(node, stream) {
            self.nodes[other].cm.handle_lost(self.now, end, Loss::Closed);
            self.nodes[node].cm.handle_lost(self.now, stream, Loss::Closed);
        }
    }

    /// All connections break.
    pub fn cut_all(&mut self) {
        while let Some((&(node, stream), _)) = self.ends.first_key_value() {
            self.cut_stream(node, stream);
        }
        self.run();
    }

    fn deliver(&mut self, datagram: &Datagram) {
        let node = &mut self.nodes[datagram.to];
        let to_listener = self.listeners.iter().find(|(_, (at, _))| *at == datagram.to);
        // Answers go to whoever connected from that port; there is one in these tests.
        if datagram.to == 1 {
            let Some((&local, &(_, id))) = to_listener else { return };
            node.cm.handle_datagram(id, local, datagram.from, &datagram.bytes);
        } else {
            for index in 0..8 {
                for generation in 0..8 {
                    let id = IdKey::new(index, generation);
                    if let Ok(route) = node.cm.route(id)
                        && let Some(src) = route.src
                    {
                        node.cm.handle_datagram(id, src, datagram.from, &datagram.bytes);
                    }
                }
            }
        }
    }

    /// Lets time pass until nothing is due any more, at most `limit` nanoseconds.
    pub fn pass(&mut self, limit: u64) {
        let end = self.now + limit;
        loop {
            self.run();
            let next = self.nodes.iter().filter_map(|node| node.cm.poll_timeout()).min();
            let Some(next) = next.filter(|&next| next <= end) else { break };
            self.now = next.max(self.now);
            for node in &mut self.nodes {
                node.cm.handle_timeout(self.now);
            }
        }
        self.now = end;
    }
}

/// What a program says with a request or its answer.
pub fn param(data: &[u8]) -> Param {
    Param { private_data: data.to_vec(), qpn: 5, ..Param::default() }
}
