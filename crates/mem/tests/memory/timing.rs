//! What the hot paths cost, in ns. Prints, asserts nothing: run it in release mode with
//! `cargo test --release -p quipu-mem --test timing -- --ignored --nocapture`.

use std::hint::black_box;
use std::thread;
use std::time::Instant;

use quipu_mem::ring::{Channel, ChannelConfig, ChannelLayout, SlotHeader};
use quipu_mem::{Access, Key, Regions, RegionsConfig, Segment, Sge};

const ROUNDS: u32 = 4_000_000;

fn time(what: &str, rounds: u32, mut run: impl FnMut(u32)) {
    let mut best = f64::INFINITY;
    for _ in 0..5 {
        let start = Instant::now();
        for i in 0..rounds {
            run(i);
        }
        best = best.min(start.elapsed().as_nanos() as f64 / f64::from(rounds));
    }
    println!("{what:<46} {best:8.2} ns");
}

fn channel() -> (Channel, Channel) {
    let config = ChannelConfig::default();
    let segment = Segment::heap(ChannelLayout::new(config).unwrap().total_len());
    (Channel::create(&segment, 0, config).unwrap(), Channel::attach(&segment, 0, config).unwrap())
}

#[test]
#[ignore = "prints timings"]
fn checks() {
    let mut regions = Regions::new(RegionsConfig::new([1; 32]));
    let memory = Segment::heap(1 << 16);
    let rights = Access::LOCAL_WRITE | Access::REMOTE;
    let keys: Vec<Key> =
        (0..64).map(|_| regions.register_owned(1, &memory, Some(0), rights).unwrap()).collect();
    time("local check", ROUNDS, |i| {
        let sge = Sge { addr: u64::from(i & 1023), len: 64, lkey: keys[i as usize & 63] };
        let span = regions.local(1, black_box(&sge), true).unwrap();
        black_box(span.len());
    });
    time("remote check", ROUNDS, |i| {
        let key = black_box(keys[i as usize & 63]);
        let iova = u64::from(i & 1023);
        let span = regions.remote(1, 17, key, iova, 64, Access::REMOTE_WRITE).unwrap();
        black_box(span.len());
    });
    let list = [Sge { addr: 128, len: 64, lkey: keys[3] }];
    let mut out = [0u8; 64];
    time("gather 64 B from 1 element", ROUNDS, |_| {
        regions.gather(1, black_box(&list), 0, &mut out).unwrap();
        black_box(&out);
    });
    time("scatter 64 B to 1 element", ROUNDS, |_| {
        regions.scatter(1, black_box(&list), 0, black_box(&out)).unwrap();
    });
    let big = vec![1u8; 1 << 16];
    let span = memory.span(0, 1 << 16).unwrap();
    time("write 64 KB", 20_000, |_| span.write_from(0, black_box(&big)));
}

#[test]
#[ignore = "prints timings"]
fn rings() {
    let (mut creator, mut attacher) = channel();
    let payload = [5u8; 64];
    let header = SlotHeader { opcode: 1, length: 64, ..Default::default() };
    let mut out = [0u8; 64];
    time("push + pop of 64 B, one thread", ROUNDS, |_| {
        creator.outgoing.requests.push(black_box(&header), black_box(&payload)).unwrap();
        let header = attacher.incoming.requests.peek().unwrap();
        attacher.incoming.requests.payload().read_into(0, &mut out[..header.inline_len.into()]);
        attacher.incoming.requests.pop();
        black_box(&out);
    });
    time("peek into an empty ring", ROUNDS, |_| {
        black_box(attacher.incoming.requests.peek());
    });
    time("must_ring, consumer awake", ROUNDS, |_| {
        black_box(creator.outgoing.control.must_ring());
    });
}

#[test]
#[ignore = "prints timings"]
fn rings_across_cores() {
    for len in [8usize, 64, 96] {
        let (mut creator, mut attacher) = channel();
        let sender = thread::spawn(move || {
            let payload = [5u8; 96];
            for i in 0..ROUNDS {
                let header = SlotHeader { imm: i, length: len as u32, ..Default::default() };
                while creator.outgoing.requests.push(&header, &payload[..len]).is_err() {
                    std::hint::spin_loop();
                }
            }
            creator
        });
        let mut out = [0u8; 96];
        while attacher.incoming.requests.peek().is_none() {
            std::hint::spin_loop();
        }
        let start = Instant::now();
        for _ in 0..ROUNDS {
            while attacher.incoming.requests.peek().is_none() {
                std::hint::spin_loop();
            }
            attacher.incoming.requests.payload().read_into(0, &mut out[..len]);
            attacher.incoming.requests.pop();
            black_box(&out);
        }
        let ns = start.elapsed().as_nanos() as f64 / f64::from(ROUNDS);
        println!("stream of {len} B, two threads{:>21} {ns:8.2} ns", "");
        sender.join().unwrap();
    }
    let (mut creator, mut attacher) = channel();
    let rounds = 200_000u32;
    let echo = thread::spawn(move || {
        for _ in 0..rounds {
            while attacher.incoming.requests.peek().is_none() {
                std::hint::spin_loop();
            }
            attacher.incoming.requests.pop();
            attacher.outgoing.requests.push(&SlotHeader::default(), &[1; 8]).unwrap();
        }
    });
    let start = Instant::now();
    for _ in 0..rounds {
        creator.outgoing.requests.push(&SlotHeader::default(), &[1; 8]).unwrap();
        while creator.incoming.requests.peek().is_none() {
            std::hint::spin_loop();
        }
        creator.incoming.requests.pop();
    }
    let ns = start.elapsed().as_nanos() as f64 / f64::from(rounds) / 2.0;
    println!("ping-pong of 8 B, half a round trip{:>11} {ns:8.2} ns", "");
    echo.join().unwrap();
}
