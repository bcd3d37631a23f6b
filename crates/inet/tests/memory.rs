//! What connections cost: memory, and work by a count of instructions.
//!
//! `cargo test -p quipu-inet --test memory -- --ignored` runs the load for `callgrind`, see
//! [`the_load_for_a_count_of_instructions`].

use std::net::Ipv6Addr;
use std::sync::Arc;

use quipu_inet::stack::{Arrival, Checksum, Config, Event, Frame, Stack, TcpId};
use quipu_inet::tcp::{self, MILLISECOND as MS, SECOND, Secret};
use quipu_wire::checksum::Sum;
use quipu_wire::ipv6;
use quipu_wire::tcp::{CHECKSUM_AT, Flags, Options, Repr, SeqNumber, Timestamps};

const SERVER: Ipv6Addr = Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, 1);

/// A stack with many connections, each from a client of its own; frames are made and read without
/// allocation.
struct Many {
    now: u64,
    stack: Stack,
    ids: Vec<TcpId>,
    /// What the server sends next on each.
    numbers: Vec<SeqNumber>,
    /// Octets sent to each.
    sent: Vec<u32>,
    frame: [u8; 2_048],
    out: Vec<u8>,
}

impl Many {
    fn new(count: u32) -> Self {
        let secret = Secret([3, 4]);
        let config = Config { max_connections: count, ..Config::new(SERVER.into(), 64, secret) };
        let mut stack = Stack::new(config);
        let tcp = Arc::new(tcp::Config { ack_delay: 0, pacing: false, ..tcp::Config::default() });
        let (listener, _) = stack.listen(80, &tcp, count).expect("a free port");
        stack.set_idle(listener, count);
        let mut many = Self {
            now: SECOND,
            stack,
            ids: Vec::with_capacity(count as usize),
            numbers: Vec::with_capacity(count as usize),
            sent: vec![0; count as usize],
            frame: [0; 2_048],
            out: vec![0; 2_048],
        };
        (0..count).for_each(|client| many.open(client));
        many
    }

    fn timestamps(&self) -> Option<Timestamps> {
        Some(Timestamps { value: (self.now / MS) as u32, echo: 0 })
    }

    /// A segment from a client to the server.
    fn arrive(&mut self, client: u32, segment: &Repr, payload: usize) -> Arrival {
        let source = Ipv6Addr::new(0xfd00, 0, 0, 1, 0, 0, (client >> 16) as u16, client as u16);
        let len = segment.header_len() + payload;
        let ip = ipv6::Repr {
            source,
            destination: SERVER,
            next_header: 6,
            traffic_class: 0,
            flow_label: 0,
            hop_limit: 64,
            payload_len: len as u16,
        };
        let start = ip.emit(&mut self.frame);
        segment.emit(&mut self.frame[start..]);
        let sum = Sum::of_pseudo_header(source.into(), SERVER.into(), 6, len).partial();
        let at = start + CHECKSUM_AT;
        self.frame[at..at + 2].copy_from_slice(&sum.to_be_bytes());
        let frame = &mut self.frame[..start + len];
        Stack::seal(frame, Checksum { start: start as u16, at: at as u16 });
        self.stack.handle_frame(self.now, &Frame { bytes: frame, checked: false })
    }

    fn segment(&self, client: u32, flags: Flags) -> Repr {
        Repr {
            source: 9,
            destination: 80,
            seq: SeqNumber(1 + self.sent[client as usize]),
            ack: self.numbers[client as usize],
            flags,
            window: 1_000,
            urgent: 0,
            options: Options { timestamps: self.timestamps(), ..Options::default() },
        }
    }

    fn open(&mut self, client: u32) {
        let options = Options {
            mss: Some(1_440),
            window_scale: Some(7),
            sack_permitted: true,
            timestamps: self.timestamps(),
            ..Options::default()
        };
        let syn = Repr {
            seq: SeqNumber(0),
            flags: Flags::SYN,
            options,
            source: 9,
            destination: 80,
            ..Repr::default()
        };
        self.arrive(client, &syn, 0);
        let Some(Event::Incoming { connection, .. }) = self.stack.poll_event() else {
            panic!("somebody comes in");
        };
        self.ids.push(connection);
        self.stack.set_receive_space(connection, 1 << 16);
        let answer = self.transmit().expect("an answer");
        self.numbers.push(answer.seq + 1);
        let ack = self.segment(client, Flags::ACK);
        self.arrive(client, &ack, 0);
        while self.stack.poll_event().is_some() {}
        assert!(self.transmit().is_none());
    }

    /// The next frame of the server.
    fn transmit(&mut self) -> Option<Repr> {
        let departure = self.stack.poll_transmit(self.now, &mut self.out)?;
        let (header, _) = Repr::parse(&self.out[ipv6::LEN..departure.headers]).expect("legal");
        Some(header)
    }

    /// A request of 100 octets to the server, its answer of 100 octets, and the acknowledgement.
    fn exchange(&mut self, client: u32) {
        self.now += MS;
        let id = self.ids[client as usize];
        let request = self.segment(client, Flags::ACK | Flags::PSH);
        let arrival = self.arrive(client, &request, 100);
        let Arrival::Segment { connection, received, .. } = arrival else { panic!("{arrival:?}") };
        assert_eq!((connection, received.placement.is_some()), (id, true));
        self.sent[client as usize] += 100;
        self.stack.set_receive_space(id, 1 << 16);
        self.stack.send(id, 100, true).expect("it is open");
        while self.transmit().is_some() {}
        let number = &mut self.numbers[client as usize];
        *number += 100;
        let ack = self.segment(client, Flags::ACK);
        self.arrive(client, &ack, 0);
        let mut acked = false;
        while let Some(event) = self.stack.poll_event() {
            acked |= matches!(event, Event::Tcp { event: tcp::Event::Acked(_), .. });
        }
        assert!(acked, "the answer is acknowledged");
        assert!(self.transmit().is_none());
        self.stack.handle_timeout(self.now);
    }
}

#[test]
fn a_hundred_thousand_idle_connections_take_a_kilobyte_each() {
    const COUNT: u32 = 100_000;
    let mut many = Many::new(COUNT);
    (0..COUNT).for_each(|client| many.exchange(client));
    // They fall idle.
    while let Some(at) = many.stack.poll_timeout() {
        if at > many.now + 400 * SECOND {
            break;
        }
        many.now = many.now.max(at);
        many.stack.handle_timeout(many.now);
        assert!(many.transmit().is_none());
    }
    let each = many.stack.memory() / COUNT as usize;
    println!("{each} octets each, of which {} its state", size_of::<tcp::Connection>());
    assert!((size_of::<tcp::Connection>()..=1_024).contains(&each), "{each}");
}

/// `CONNECTIONS=1` and `CONNECTIONS=100000` under `valgrind --tool=callgrind
/// --toggle-collect='*measured*'` give the instructions of 10 000 exchanges, each of two frames in and one
/// out.
#[test]
#[ignore = "to be run under callgrind"]
fn the_load_for_a_count_of_instructions() {
    let count = std::env::var("CONNECTIONS").map_or(1, |count| count.parse().expect("a number"));
    let mut many = Many::new(count);
    (0..count).for_each(|client| many.exchange(client));
    measured(&mut many, count);
}

#[inline(never)]
fn measured(many: &mut Many, count: u32) {
    for n in 0..10_000u32 {
        many.exchange(n.wrapping_mul(2_654_435_761) % count);
    }
}
