//! Channels between threads, and channels whose peer scribbles over the segment.

use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use quipu_mem::ring::{Channel, ChannelConfig, ChannelLayout, Incoming, Outgoing, RingError};
use quipu_mem::ring::{INLINE_MAX, SlotHeader, Stall};
use quipu_mem::{
    Access, Directory, DirectoryReader, Guard, GuardState, LookupError, Regions, RegionsConfig,
    Segment,
};
use rand_chacha::ChaCha8Rng;
use rand_core::{RngCore, SeedableRng};

const MESSAGES: u32 = if cfg!(miri) { 150 } else { 50_000 };

fn small() -> ChannelConfig {
    ChannelConfig { request_slots: 8, request_bytes: 1024, response_slots: 4, response_bytes: 256 }
}

fn channel(config: ChannelConfig) -> (Channel, Channel) {
    let segment = Segment::heap(ChannelLayout::new(config).unwrap().total_len());
    let creator = Channel::create(&segment, 0, config).unwrap();
    let attacher = Channel::attach(&segment, 0, config).unwrap();
    (creator, attacher)
}

fn length(i: u32) -> usize {
    (i.wrapping_mul(2_654_435_761) >> 16) as usize % 400
}

fn fill(i: u32, out: &mut [u8]) {
    for (at, byte) in out.iter_mut().enumerate() {
        *byte = (i as usize * 31 + at * 7) as u8;
    }
}

/// Sends message `i`, or says that there is no room.
fn send(outgoing: &mut Outgoing, i: u32) -> Result<(), RingError> {
    let mut payload = [0; 400];
    let payload = &mut payload[..length(i)];
    fill(i, payload);
    let header = SlotHeader { imm: i, length: payload.len() as u32, ..Default::default() };
    if payload.len() <= INLINE_MAX {
        return outgoing.requests.push(&header, payload);
    }
    let position = outgoing.request_bytes.reserve(payload.len() as u32)?;
    outgoing.request_bytes.write(position, payload);
    let pushed = outgoing.requests.push(&SlotHeader { raddr: position, ..header }, &[]);
    if pushed.is_err() {
        outgoing.request_bytes.cancel(position);
    }
    pushed
}

/// Takes the next message, which must be message `i`; false if there is none.
fn receive(incoming: &mut Incoming, i: u32) -> bool {
    let Some(header) = incoming.requests.peek() else {
        return false;
    };
    let mut want = [0; 400];
    let mut got = [0; 400];
    let (want, got) = (&mut want[..length(i)], &mut got[..length(i)]);
    fill(i, want);
    assert_eq!((header.imm, header.length as usize), (i, want.len()));
    if want.len() <= INLINE_MAX {
        assert_eq!(usize::from(header.inline_len), want.len());
        incoming.requests.payload().read_into(0, got);
    } else {
        incoming.request_bytes.read_into(header.raddr, got).unwrap();
        incoming.request_bytes.release_to(header.raddr + u64::from(header.length)).unwrap();
    }
    assert_eq!(want, got);
    incoming.requests.pop();
    true
}

#[test]
fn messages_cross_between_threads_in_order_and_whole() {
    let (mut creator, mut attacher) = channel(small());
    let sender = thread::spawn(move || {
        for i in 0..MESSAGES {
            while let Err(error) = send(&mut creator.outgoing, i) {
                assert_eq!(error, RingError::Full);
                thread::yield_now();
            }
        }
        creator
    });
    for i in 0..MESSAGES {
        while !receive(&mut attacher.incoming, i) {
            attacher.incoming.publish();
            thread::yield_now();
        }
        attacher.incoming.control.set_executed(i + 1);
    }
    let creator = sender.join().unwrap();
    assert_eq!(creator.outgoing.control.executed(), MESSAGES);
    assert!(attacher.incoming.requests.peek().is_none());
}

#[test]
fn a_sleeping_consumer_is_always_woken() {
    let (mut creator, mut attacher) = channel(small());
    let (bell, rung) = mpsc::channel();
    let messages = MESSAGES / 10;
    let sender = thread::spawn(move || {
        for i in 0..messages {
            while send(&mut creator.outgoing, i).is_err() {
                thread::yield_now();
            }
            if creator.outgoing.control.must_ring() {
                bell.send(()).unwrap();
            }
        }
        // The bell lives until the consumer has everything: a lost wake-up shows as a time-out.
        while creator.outgoing.control.executed() != messages {
            thread::yield_now();
        }
    });
    let mut i = 0;
    while i < messages {
        if receive(&mut attacher.incoming, i) {
            i += 1;
            continue;
        }
        attacher.incoming.publish();
        attacher.incoming.control.arm();
        if attacher.incoming.requests.peek().is_none() {
            rung.recv_timeout(Duration::from_secs(120)).expect("a wake-up was lost");
        }
        attacher.incoming.control.disarm();
    }
    attacher.incoming.control.set_executed(messages);
    sender.join().unwrap();
}

/// The owner of a region poisons it once no peer can be in it; the peer must never see the poison.
#[test]
fn withdrawn_memory_is_not_touched_by_peers() {
    let shared = Segment::heap(4096 + 64);
    let directory = shared.slice(0, 64 * 64).unwrap();
    let memory = Segment::heap(8);
    let mut regions = Regions::new(RegionsConfig::new([1; 32]));
    regions.publish_in(Directory::create(&directory).unwrap());
    let reader = DirectoryReader::new(&directory).unwrap();
    let owner_guard = Guard::new(shared.u32_at(4096).unwrap());
    let peer_guard = Guard::new(shared.u32_at(4096).unwrap());
    let (keys, offered) = mpsc::channel();
    let (peer_memory, base) = (memory.clone(), memory.addr() as u64);
    let rounds = MESSAGES / 100;
    let peer = thread::spawn(move || {
        let mut reads = 0u32;
        for key in offered {
            for _ in 0..8 {
                peer_guard.enter();
                match reader.lookup(1, 2, key, 0x10, 8, Access::REMOTE_READ) {
                    Ok(range) => {
                        let mut out = [0; 8];
                        peer_memory.read((range.addr - base) as usize, &mut out).unwrap();
                        assert_eq!(out, [0; 8], "poison");
                        reads += 1;
                    }
                    Err(error) => assert_eq!(error, LookupError::NotPublished),
                }
                peer_guard.leave();
            }
        }
        reads
    });
    for _ in 0..rounds {
        memory.write(0, &[0; 8]).unwrap();
        let key = regions.register_owned(1, &memory, Some(0x10), Access::REMOTE_READ).unwrap();
        keys.send(key).unwrap();
        thread::yield_now();
        let withdrawn = regions.deregister(key).unwrap();
        assert!(withdrawn.published);
        let wait = owner_guard.sample();
        while wait.poll(&owner_guard, || false) != GuardState::Clear {
            thread::yield_now();
        }
        memory.write(0, &[0xee; 8]).unwrap();
    }
    drop(keys);
    peer.join().unwrap();
}

/// One step of an engine that believes nothing it reads; returns what it made of it.
fn step(channel: &mut Channel, rng: &mut ChaCha8Rng, landing: &Segment) -> u64 {
    let Channel { outgoing, incoming } = channel;
    let header = SlotHeader { raddr: rng.next_u64(), length: rng.next_u32(), ..Default::default() };
    match rng.next_u32() % 10 {
        0 => outgoing.requests.push(&header, &[1; 40]).is_ok().into(),
        1 => outgoing.responses.push(&header, &[2; 96]).is_ok().into(),
        2 => match outgoing.request_bytes.reserve(rng.next_u32() % 1500) {
            Ok(position) => {
                outgoing.request_bytes.write(position, &[3; 100]);
                position
            }
            Err(_) => outgoing.requests.free().map_or(0, u64::from),
        },
        3 => outgoing.response_bytes.free().unwrap_or(0),
        4 => outgoing.control.executed().into(),
        5 => outgoing.control.stall().map_or(0, |Stall { sequence, timer, .. }| {
            assert!(timer < 32);
            sequence.into()
        }),
        6 => {
            let mut taken = 0;
            while let (Some(header), true) = (incoming.requests.peek(), taken < 20) {
                assert!(usize::from(header.inline_len) <= INLINE_MAX);
                let mut out = [0; INLINE_MAX];
                incoming.requests.payload().read_into(0, &mut out[..header.inline_len.into()]);
                let len = header.length.min(4096);
                let to = landing.span(0, len as usize).unwrap();
                let copied = incoming.request_bytes.copy_to(header.raddr, &to);
                assert_eq!(copied.is_err(), u64::from(len) > incoming.request_bytes.capacity());
                let _ = incoming.request_bytes.release_to(header.raddr);
                incoming.requests.pop();
                taken += 1;
            }
            taken
        }
        7 => {
            incoming.publish();
            0
        }
        8 => incoming.responses.peek().map_or(0, |header| {
            incoming.responses.pop();
            header.raddr
        }),
        _ => {
            incoming.control.arm();
            u64::from(incoming.control.producer_closed()) + u64::from(outgoing.control.must_ring())
        }
    }
}

#[test]
fn a_peer_that_scribbles_gives_wrong_data_and_nothing_else() {
    let len = ChannelLayout::new(small()).unwrap().total_len();
    let margin = 4096;
    for seed in 0..(if cfg!(miri) { 1 } else { 60 }) {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let whole = Segment::heap(len + 2 * margin);
        let segment = whole.slice(margin, len).unwrap();
        let landing = Segment::heap(4096);
        let mut victim = Channel::create(&segment, 0, small()).unwrap();
        for _ in 0..(if cfg!(miri) { 10 } else { 1500 }) {
            // Now and then everything changes, otherwise one place; small values too, since those
            // are more likely to be believed.
            let mut noise = vec![0; if rng.next_u32() % 50 == 0 { len } else { 8 }];
            rng.fill_bytes(&mut noise);
            if rng.next_u32() % 2 == 0 {
                noise.iter_mut().for_each(|byte| *byte &= 1);
            }
            let area = if rng.next_u32() % 2 == 0 { len.min(1024) } else { len };
            let at = rng.next_u32() as usize % (area.max(noise.len()) - noise.len() + 1);
            segment.write(at, &noise).unwrap();
            step(&mut victim, &mut rng, &landing);
        }
        let mut margins = vec![1; 2 * margin];
        whole.read(0, &mut margins[..margin]).unwrap();
        whole.read(margin + len, &mut margins[margin..]).unwrap();
        assert!(margins.iter().all(|byte| *byte == 0), "seed {seed} wrote outside the segment");
    }
}
