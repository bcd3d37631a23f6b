//! Connection management: messages of a hostile peer in streams and datagrams, in any state, in pieces, among
//! calls of a program that does what it likes. This side asks, and is asked, as a Quipu and as a plain iWARP
//! adapter.
#![no_main]

#[allow(dead_code)]
#[path = "adapter/input.rs"]
mod input;
#[path = "connections/peer.rs"]
mod peer;
mod shares;

use std::net::SocketAddr;

use input::Input;
use libfuzzer_sys::fuzz_target;
use quipu_cm::{
    Action, ChannelKey, Cm, Config, EventKind, IdKey, Loss, Param, PortSpace, Refusal, StreamKey,
};
use quipu_wire::cm::{Frame, Lookup, Setup};
use quipu_wire::mpa::FrameKind;
use shares::Shares;

static SHARES: Shares<10> = Shares::new([
    "a set-up",
    "a look-up",
    "a request",
    "a response",
    "a refusal",
    "a connection",
    "an end",
    "a look-up answered",
    "handed over",
    "an answer to a look-up",
]);

/// Whatever is read can be written, and is then the same.
fn round_trips(bytes: &[u8]) {
    if let Ok(setup) = Setup::parse(bytes) {
        SHARES.reach("a set-up");
        let again = setup.to_bytes();
        assert_eq!(Setup::parse(&again), Ok(setup));
    }
    if let Ok(lookup) = Lookup::parse(bytes) {
        SHARES.reach("a look-up");
        let again = lookup.to_bytes();
        assert_eq!(Lookup::parse(&again), Ok(lookup));
    }
    if let Ok(Some((frame, _))) = Frame::parse(bytes) {
        assert_eq!(Frame::parse(&frame.to_bytes()), Ok(Some((frame, 4))));
    }
}

fn address(last: u8) -> SocketAddr {
    SocketAddr::from(([10, 0, 0, last], 5000))
}

/// A stream, and whether this side has opened it.
type Known = (StreamKey, bool);

struct World {
    cm: Cm,
    channel: ChannelKey,
    now: u64,
    ids: Vec<IdKey>,
    streams: Vec<Known>,
    /// Those whose streams the adapter has.
    handed: Vec<IdKey>,
    /// Who looks up, and by which number.
    asked: (IdKey, u32),
}

impl World {
    fn new(kind: u8) -> Self {
        let config = Config {
            half_open: 4,
            half_open_per_address: 3,
            asks_plain: kind & 3 == 3,
            takes_plain: kind & 4 == 0,
            ..Config::default()
        };
        let mut cm = Cm::new(config);
        let channel = cm.create_channel();
        let mut ids = Vec::new();
        for space in [PortSpace::Tcp, PortSpace::Udp] {
            let id = cm.create_id(channel, space, 0, 0).expect("a channel");
            cm.bind(id, address(1)).expect("unbound");
            cm.listen(id, 3).expect("bound");
            ids.push(id);
        }
        let asked = (ids[1], 0);
        let mut world =
            Self { cm, channel, now: 0, ids, streams: Vec::new(), handed: Vec::new(), asked };
        // Something to begin with: one of this side, and one of the peer.
        let space = if kind & 16 == 0 { PortSpace::Tcp } else { PortSpace::Udp };
        world.connect(space, &Param::default());
        world.act();
        let stream = world.cm.handle_accepted(0, world.ids[0], address(1), address(2));
        world.streams.extend(stream.map(|stream| (stream, false)));
        // And one that each of them has agreed to.
        for (stream, ours) in world.streams.clone() {
            let (skip, side) = if ours { (64, FrameKind::Reply) } else { (32, FrameKind::Request) };
            if kind & skip == 0 {
                let revision = if kind & 3 == 3 { &[0x80][..] } else { &[] };
                let said = peer::start(side, &mut Input(revision));
                world.cm.handle_bytes(0, stream, &said);
                world.act();
                let param = Param { qpn: 5, ..Param::default() };
                let _ = world.cm.accept(0, world.ids[world.ids.len() - 1], Some(&param));
                world.cm.handle_bytes(0, stream, &Frame::ReadyToUse.to_bytes());
                world.act();
            }
        }
        world
    }

    fn connect(&mut self, space: PortSpace, param: &Param) {
        let Ok(id) = self.cm.create_id(self.channel, space, 2, 0) else { return };
        let _ = self.cm.resolved(id, address(9), Ok(address(1)));
        let _ = self.cm.resolve_route(id);
        let _ = self.cm.connect(self.now, id, param);
        self.ids.push(id);
    }

    /// What the program does may be refused; that is its affair.
    fn call(&mut self, input: &mut Input<'_>) {
        let (what, pick) = (input.byte(), input.byte());
        // One of the youngest, mostly.
        let behind = usize::from(if pick < 200 { pick % 2 } else { pick }) % self.ids.len();
        let (now, id) = (self.now, self.ids[self.ids.len() - 1 - behind]);
        let param =
            Param { private_data: vec![7; usize::from(pick) % 60], qpn: 5, ..Param::default() };
        let cm = &mut self.cm;
        let _ = match what % 13 {
            0..=2 => cm.accept(now, id, Some(&param)),
            3 => cm.accept(now, id, None),
            4 => cm.reject(id, Refusal::Consumer, &param.private_data),
            5 | 6 => cm.disconnect(now, id),
            7 => cm.establish(id),
            8 if self.ids.len() > 2 && what & 64 != 0 => cm.destroy_id(id).map(drop),
            9 => cm.connect_params(id).map(drop),
            10 => {
                self.handed.iter().rev().take(1).for_each(|id| cm.handle_established(*id));
                Ok(())
            }
            11 => {
                self.handed.pop().into_iter().for_each(|id| cm.handle_ended(id));
                Ok(())
            }
            _ => {
                let space = if pick % 2 == 0 { PortSpace::Tcp } else { PortSpace::Udp };
                self.connect(space, &param);
                Ok(())
            }
        };
    }

    /// What a peer says in a stream, in pieces.
    fn say(&mut self, input: &mut Input<'_>) {
        let (what, pick) = (input.byte(), usize::from(input.byte()));
        if self.streams.is_empty() {
            return;
        }
        // One of the youngest, mostly.
        let behind = if pick < 200 { pick % 2 } else { pick } % self.streams.len();
        let (stream, ours) = self.streams[self.streams.len() - 1 - behind];
        let kind = if ours { FrameKind::Reply } else { FrameKind::Request };
        let mut bytes = match what % 8 {
            0 => input.bytes().to_vec(),
            1..=4 => peer::start(kind, input),
            5 => [peer::start(kind, input), peer::frames(input)].concat(),
            _ => peer::frames(input),
        };
        if what & 0x38 == 0 {
            let at = usize::from(input.byte()) % bytes.len().max(1);
            bytes.iter_mut().skip(at).take(1).for_each(|octet| *octet = input.byte());
        }
        let size = if what & 0xc0 == 0 { usize::from(input.byte()) + 1 } else { usize::MAX };
        for piece in bytes.chunks(size) {
            self.cm.handle_bytes(self.now, stream, piece);
        }
    }

    fn step(&mut self, input: &mut Input<'_>) {
        let (what, pick) = (input.byte(), input.byte());
        match what % 16 {
            0 => {
                let stream =
                    self.cm.handle_accepted(self.now, self.ids[0], address(1), address(pick));
                self.streams.extend(stream.map(|stream| (stream, false)));
            }
            1..=5 => self.say(input),
            6..=9 => self.call(input),
            10 | 11 => {
                let (asker, number) = self.asked;
                let answer = pick & 1 == 0;
                let bytes = peer::lookup(number, answer, input);
                round_trips(&bytes);
                let to = if answer { asker } else { self.ids[1] };
                let from = address(if pick < 200 { 9 } else { pick });
                self.cm.handle_datagram(to, address(1), from, &bytes);
            }
            12 => {
                self.now += u64::from(pick) * 100_000_000;
                self.cm.handle_timeout(self.now);
            }
            13 => {
                let Some(&(stream, _)) = self.streams.last() else { return };
                let losses = [Loss::Closed, Loss::Refused, Loss::TimedOut, Loss::Failed(5)];
                self.cm.handle_lost(self.now, stream, losses[usize::from(pick) % 4]);
            }
            14 => {
                let Some(&(stream, _)) = self.streams.last() else { return };
                self.cm.handle_reached(self.now, stream);
            }
            _ => round_trips(input.take(usize::MAX)),
        }
    }

    /// What the world is asked for, and what has happened.
    fn act(&mut self) {
        while let Some(action) = self.cm.poll_action() {
            match action {
                Action::Connect { stream, id, .. } => {
                    assert!(self.cm.has_id(id));
                    self.streams.push((stream, true));
                }
                Action::Datagram { via, bytes, .. } => match Lookup::parse(&bytes) {
                    Ok(Lookup::Request { id, .. }) => self.asked = (via, id),
                    Ok(Lookup::Reply { .. }) => SHARES.reach("a look-up answered"),
                    Err(error) => panic!("a datagram of its own: {error:?}"),
                },
                Action::HandOver(over) => {
                    SHARES.reach("handed over");
                    assert!(self.cm.has_id(over.id));
                    self.handed.push(over.id);
                    self.streams.retain(|(stream, _)| *stream != over.stream);
                }
                Action::Close { stream, .. } => {
                    self.streams.retain(|(known, _)| *known != stream);
                }
                _ => {}
            }
        }
        while let Ok(Some(event)) = self.cm.take_event(self.channel) {
            match event.kind {
                EventKind::ConnectRequest => {
                    SHARES.reach("a request");
                    self.ids.push(event.id);
                }
                EventKind::ConnectResponse => SHARES.reach("a response"),
                EventKind::Rejected => SHARES.reach("a refusal"),
                EventKind::Established if event.peer.path.is_some() => {
                    SHARES.reach("an answer to a look-up");
                }
                EventKind::Established => SHARES.reach("a connection"),
                EventKind::Disconnected => SHARES.reach("an end"),
                _ => {}
            }
        }
        let load = self.cm.load();
        assert!(load.half_open <= 4, "{load:?}");
        assert!(load.deadlines <= load.ids + load.half_open, "{load:?}");
        assert!(load.streams <= load.ids + load.half_open, "{load:?}");
        self.ids.truncate(256);
    }
}

fuzz_target!(|data: &[u8]| {
    SHARES.begin();
    let mut input = Input(data);
    let mut world = World::new(input.byte());
    while !input.is_over() {
        world.step(&mut input);
        world.act();
    }
});
