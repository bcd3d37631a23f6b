//! Slots, byte rings and counts of a channel, a directory of regions, and a list of shared pages, in memory
//! that a hostile peer writes: nothing in it may lead out of it, or make what is read more than there is.
#![no_main]

#[allow(dead_code)]
#[path = "adapter/input.rs"]
mod input;
mod shares;

use input::Input;
use libfuzzer_sys::fuzz_target;
use quipu_mem::ring::{Channel, ChannelConfig, ChannelLayout, INLINE_MAX, SlotHeader};
use quipu_mem::{
    Access, DirectoryReader, Key, MAX_SHARED, SHARED_PAGES_BYTES, Segment, SharedPagesReader,
};
use shares::Shares;

static SHARES: Shares<5> =
    Shares::new(["a request", "a response", "bytes", "a directory", "shared pages"]);

const CONFIG: ChannelConfig =
    ChannelConfig { request_slots: 8, request_bytes: 1024, response_slots: 4, response_bytes: 256 };

fuzz_target!(|data: &[u8]| {
    SHARES.begin();
    let mut input = Input(data);
    let len = ChannelLayout::new(CONFIG).expect("a legal layout").total_len();
    let segment = Segment::heap(len);
    let mut honest = Channel::create(&segment, 0, CONFIG).expect("room for it");
    let mut hostile = Channel::attach(&segment, 0, CONFIG).expect("it was made so");
    let landing = Segment::heap(2048);
    let directory = Segment::heap(1024);
    let pages = Segment::heap(SHARED_PAGES_BYTES);
    while !input.is_over() {
        match input.byte() % 13 {
            0..=2 => scribble(&segment, &mut input),
            3 => {
                let bytes = input.bytes();
                let last = directory.len() - bytes.len();
                directory.write(input.word() as usize % last, bytes).expect("in range");
            }
            12 => list(&pages, &mut input),
            4 => lookup(&directory, &mut input),
            5 | 6 => {
                let header = SlotHeader {
                    opcode: input.byte(),
                    length: input.count(),
                    raddr: input.long(),
                    ..SlotHeader::default()
                };
                let payload = input.bytes();
                let payload = &payload[..payload.len().min(INLINE_MAX)];
                let _ = hostile.outgoing.requests.push(&header, payload);
                let _ = hostile.outgoing.responses.push(&header, payload);
            }
            7 | 8 => consume(&mut honest, &landing, &mut input),
            9 => produce(&mut honest, &segment, &mut input),
            10 => {
                let control = &honest.outgoing.control;
                let (executed, _) = (control.executed(), control.must_ring());
                honest.incoming.control.set_executed(executed);
                if let Some(stall) = control.stall() {
                    assert!(stall.timer < 32);
                }
                honest.incoming.control.arm();
            }
            // Whatever stands there, it is a channel of these sizes or none.
            _ => drop(Channel::attach(&segment, 0, CONFIG)),
        }
    }
});

/// Anywhere, but mostly in the first page, where the counts are, and at the beginning of the rings.
fn scribble(segment: &Segment, input: &mut Input<'_>) {
    let offset = match input.byte() % 4 {
        0 => input.word() as usize,
        1 => 4096 + usize::from(input.byte()) * 8,
        _ => usize::from(input.byte()) * 8,
    };
    let bytes = input.bytes();
    let last = segment.len() - bytes.len();
    segment.write(offset % last, bytes).expect("in range");
}

fn consume(channel: &mut Channel, landing: &Segment, input: &mut Input<'_>) {
    let incoming = &mut channel.incoming;
    let mut seen = 0;
    while let Some(header) = incoming.requests.peek() {
        SHARES.reach("a request");
        seen += 1;
        assert!(seen <= 3 * CONFIG.request_slots, "a ring does not refill itself for ever");
        assert!(usize::from(header.inline_len) <= INLINE_MAX);
        let mut bytes = [0; INLINE_MAX];
        incoming.requests.payload().read_into(0, &mut bytes);
        let place = landing.span(0, header.length.min(2048) as usize).expect("in range");
        let _ = incoming.request_bytes.copy_to(header.raddr, &place);
        let at = incoming.request_bytes.position();
        if incoming.request_bytes.copy_to(at, &place).is_ok() {
            SHARES.reach("bytes");
            let _ = incoming.request_bytes.release_to(at + place.len() as u64);
        }
        let _ = incoming.request_bytes.release_to(header.raddr);
        incoming.requests.pop();
    }
    while let Some(header) = incoming.responses.peek() {
        SHARES.reach("a response");
        let _ = incoming.response_bytes.release_to(header.raddr);
        incoming.responses.pop();
    }
    if input.flag() {
        incoming.publish();
    }
}

fn produce(channel: &mut Channel, segment: &Segment, input: &mut Input<'_>) {
    let outgoing = &mut channel.outgoing;
    let payload = input.bytes();
    let header = SlotHeader { length: payload.len() as u32, ..SlotHeader::default() };
    if let Ok(at) = outgoing.request_bytes.reserve(header.length) {
        outgoing.request_bytes.write(at, payload);
        if outgoing.requests.push(&SlotHeader { raddr: at, ..header }, &[]).is_err() {
            outgoing.request_bytes.cancel(at);
        }
    }
    if let Ok(slot) = outgoing.requests.reserve() {
        let offer = slot.offer(&header);
        if input.flag() {
            scribble(segment, input);
        }
        let _ = outgoing.requests.withdraw(offer);
    }
    if let Ok(free) = outgoing.responses.free() {
        assert!(free <= CONFIG.response_slots);
    }
    if let Ok(free) = outgoing.response_bytes.free() {
        assert!(free <= u64::from(CONFIG.response_bytes));
    }
}

/// The numbers at its beginning and the ranges behind them, and what is read of it.
fn list(pages: &Segment, input: &mut Input<'_>) {
    let (at, bytes) = (usize::from(input.byte() % 4) * 8, input.bytes());
    let count = input.count();
    pages.write(at, bytes).expect("in range");
    if input.flag() {
        // Not being written, and with so many ranges.
        pages.write(0, &2_u64.to_ne_bytes()).expect("in range");
        pages.write(8, &u64::from(count).to_ne_bytes()).expect("in range");
    }
    let (mut ranges, mut reader) =
        (Vec::new(), SharedPagesReader::new(pages).expect("long enough"));
    if reader.read(&mut ranges) && !ranges.is_empty() {
        SHARES.reach("shared pages");
    }
    assert!(ranges.len() <= MAX_SHARED);
}

fn lookup(directory: &Segment, input: &mut Input<'_>) {
    let Ok(reader) = DirectoryReader::new(directory) else { return };
    SHARES.reach("a directory");
    let (key, addr, len) = (Key(input.word() & 0x0fff), input.long(), input.count().into());
    let right = if input.flag() { Access::REMOTE_READ } else { Access::REMOTE_WRITE };
    if let Ok(range) = reader.lookup(input.count(), input.count(), key, addr, len, right) {
        assert_eq!(range.len, len);
    }
}
