//! A shared adapter: the messages of words between a program and the process that has the adapter, and the
//! rings between them, in memory that either may fill with anything.
#![no_main]

#[allow(dead_code)]
#[path = "adapter/input.rs"]
mod input;
mod shares;
/// Taken as they stand, since the protocol of a share is nobody's interface.
#[allow(dead_code)]
#[path = "../../crates/host/src/share/slots.rs"]
mod slots;
#[allow(dead_code)]
#[path = "../../crates/host/src/share/words.rs"]
mod words;

/// What those need of their neighbours.
mod error {
    use quipu_nic::Fault;

    #[derive(Debug)]
    #[allow(dead_code)]
    pub enum EngineError {
        Fault(Fault),
        System { source: std::io::Error },
        RefusedElsewhere { errno: i32, words: String },
    }

    impl From<Fault> for EngineError {
        fn from(fault: Fault) -> Self {
            Self::Fault(fault)
        }
    }

    impl std::fmt::Display for EngineError {
        fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            write!(f, "{self:?}")
        }
    }
}
mod link {
    pub(crate) mod socket {
        pub(crate) const MAX_MESSAGE: usize = 4096;
    }
}

use error::EngineError;
use input::Input;
use libfuzzer_sys::fuzz_target;
use quipu_mem::Segment;
use quipu_mem::ring::{Channel, ChannelConfig, ChannelLayout, RingError, SlotHeader};
use quipu_nic::{Completion, Key, Payload, QpState, SendFlags, Sge, TcpChange, WcExtra};
use shares::Shares;
use slots::{BODY, Filling, MAX_SGE, MAX_TOGETHER, News, Order, Request, Tag};
use words::{Call, Reader, Writer};

static SHARES: Shares<7> =
    Shares::new(["a call", "an answer", "a refusal", "an order", "several", "news", "corrupt"]);

const CONFIG: ChannelConfig =
    ChannelConfig { request_slots: 8, request_bytes: 4096, response_slots: 8, response_bytes: 256 };

fuzz_target!(|data: &[u8]| {
    SHARES.begin();
    let mut input = Input(data);
    match input.byte() % 4 {
        0 => call(&mut input),
        1 => answer(&mut input),
        _ => rings(&mut input),
    }
});

/// Words, small and large, with a number of a call in front.
fn call(input: &mut Input<'_>) {
    let mut bytes = u64::from(input.byte() % 18).to_ne_bytes().to_vec();
    for _ in 0..input.byte() % 16 {
        let small = u64::from(input.count());
        let word = if input.byte() % 8 == 0 { input.long() } else { small };
        bytes.extend(word.to_ne_bytes());
    }
    // As many words as the call has.
    let lens = (1..=bytes.len() / 8).map(|words| words * 8);
    if let Some((call, len)) =
        lens.rev().find_map(|len| Call::decode(&bytes[..len]).map(|call| (call, len)))
    {
        SHARES.reach("a call");
        let again = call.encode();
        assert_eq!(Call::decode(&again), Some(call));
        assert_eq!(again.len(), len);
    }
    let _ = Call::decode(input.take(usize::MAX));
}

fn answer(input: &mut Input<'_>) {
    let head = Writer::default().word(input.byte() % 8).word(input.count());
    let bytes = match input.byte() % 4 {
        0 => input.take(usize::MAX).to_vec(),
        1 => [head.bytes(), input.take(usize::MAX).to_vec()].concat(),
        _ => head.text(&String::from_utf8_lossy(input.bytes())).bytes(),
    };
    match words::outcome(&bytes) {
        Some(Ok(mut yields)) => {
            SHARES.reach("an answer");
            let _ = (yields.word(), yields.address(), yields.text());
            let counters = Reader::new(&bytes).counters();
            let again = counters.map(|counters| Writer::default().counters(&counters).bytes());
            assert!(again.is_none_or(|again| again[..] == bytes[..again.len()]));
        }
        Some(Err(EngineError::RefusedElsewhere { words, .. })) => {
            SHARES.reach("a refusal");
            assert!(words.len() <= 3 * bytes.len());
        }
        _ => {}
    }
}

/// What either end puts into the rings, or scribbles there, and what the other makes of it.
fn rings(input: &mut Input<'_>) {
    let len = ChannelLayout::new(CONFIG).expect("a legal layout").total_len();
    let segment = Segment::heap(len);
    let mut honest = Channel::create(&segment, 0, CONFIG).expect("room for it");
    let mut hostile = Channel::attach(&segment, 0, CONFIG).expect("it was made so");
    let mut filling = Filling::default();
    for _ in 0..64 {
        if input.is_over() {
            break;
        }
        let outgoing = &mut hostile.outgoing;
        match input.byte() % 8 {
            0 => {
                let offset = input.word() as usize % (len - 256);
                segment.write(offset, input.bytes()).expect("in range");
            }
            1 => {
                let header = SlotHeader {
                    opcode: input.byte() % 5,
                    flags: input.byte(),
                    length: input.count(),
                    imm: input.count(),
                    raddr: input.long(),
                    rkey: u32::from(input.byte() % 8),
                    ack: input.count(),
                    ..SlotHeader::default()
                };
                let payload = input.bytes();
                let payload = &payload[..payload.len().min(quipu_mem::ring::INLINE_MAX)];
                let _ = outgoing.requests.push(&header, payload);
                if input.flag() {
                    let _ = outgoing.responses.push(&header, payload);
                }
            }
            2 => drop(slots::tell(&mut outgoing.responses, &news(input))),
            3 | 4 => {
                let order = Order::Post(request(input));
                let _ = filling.put(&mut outgoing.requests, &mut outgoing.request_bytes, &order);
            }
            5 => {
                let sges = vec![Sge { addr: 1, len: 2, lkey: Key(3) }; MAX_SGE];
                let tag = Tag { qp: 1, receive: input.flag(), sequence: input.word() };
                let count = usize::from(input.byte()) % (MAX_SGE + 1);
                let request = Request {
                    tag,
                    flags: SendFlags::empty(),
                    to: input.flag().then_some(([10, 0, 0, 1], 80).into()),
                    payload: Payload::Sges(&sges[..count]),
                };
                let order = Order::Post(request);
                let _ = filling.put(&mut outgoing.requests, &mut outgoing.request_bytes, &order);
            }
            6 => {
                let tag = Tag { qp: 1, receive: input.flag(), sequence: input.byte().into() };
                let first = tag.sequence;
                for at in 0..u32::from(input.byte() % 8) {
                    let sges = [Sge { addr: input.long(), len: at, lkey: Key(3) }];
                    let tag = Tag { sequence: first + at, ..tag };
                    let (flags, payload) = (SendFlags::empty(), Payload::Sges(&sges));
                    let order = Order::Post(Request { tag, flags, to: None, payload });
                    let (slots, bytes) = (&mut outgoing.requests, &mut outgoing.request_bytes);
                    let _ = filling.put(slots, bytes, &order);
                }
            }
            _ => {
                filling.close(&mut outgoing.requests);
                outgoing.requests.show();
                listen(&mut honest);
            }
        }
    }
    filling.close(&mut hostile.outgoing.requests);
    hostile.outgoing.requests.show();
    listen(&mut honest);
}

/// What an adapter tells a program.
fn news(input: &mut Input<'_>) -> News {
    let (how, count) = (input.byte(), input.byte());
    let last = Tag { qp: 1, receive: how & 8 != 0, sequence: count.into() };
    match how % 4 {
        0 => News::Sent { last, count: u32::from(count) + 1 },
        1 => {
            let lengths = [count.into(); slots::MAX_RECEIVED];
            News::Received { last, count: u32::from(count) % 33, lengths }
        }
        2 => {
            let state = slots::state(how >> 4).unwrap_or(QpState::Err);
            News::Change { qp: count.into(), change: TcpChange::PeerClosed, state }
        }
        _ => {
            let from = std::net::SocketAddr::from(([10, 0, 0, how], 80));
            let extra = WcExtra::From(from.into());
            News::Completion(Completion { wr_id: last.bits(), extra, ..Completion::default() })
        }
    }
}

/// A request with what it carries itself.
fn request<'a>(input: &mut Input<'a>) -> Request<'a> {
    let tag = Tag { qp: input.byte().into(), receive: input.byte() % 4 == 0, sequence: 0 };
    let to = input.flag().then(|| (std::net::Ipv6Addr::from_bits(input.long().into()), 80).into());
    let (flags, payload) = (SendFlags::INLINE, Payload::Inline(input.bytes()));
    Request { tag, flags, to, payload }
}

/// Takes what there is, as the adapter's process and as a program, until something makes no sense.
fn listen(channel: &mut Channel) {
    let incoming = &mut channel.incoming;
    let (mut body, mut sges) = (BODY, [Sge { addr: 0, len: 0, lkey: Key(0) }; MAX_SGE]);
    while let Ok(Some(news)) = slots::hear(&mut incoming.responses) {
        SHARES.reach("news");
        assert!((1..=slots::MAX_SENT).contains(&news.count()));
    }
    for taken in 0.. {
        assert!(taken <= 3 * CONFIG.request_slots, "a ring does not refill itself for ever");
        let (requests, bytes) = (&mut incoming.requests, &mut incoming.request_bytes);
        match slots::take(requests, bytes, &mut body, &mut sges) {
            Ok(Some((Order::Post(request), count))) => {
                SHARES.reach(if count > 1 { "several" } else { "an order" });
                assert!((1..=MAX_TOGETHER).contains(&count));
                assert!(
                    count == 1 || matches!(request.payload, Payload::Sges(s) if s.len() == count)
                );
                assert!(slots::check(&request).is_ok());
            }
            Ok(Some((Order::Fail(qp), _))) => assert!(qp <= slots::MAX_SERIAL),
            Ok(None) => break,
            Err(error) => {
                assert!(matches!(error, RingError::Corrupt | RingError::TooLong), "{error:?}");
                SHARES.reach("corrupt");
                // Whoever corrupts a ring is heard no more.
                return;
            }
        }
    }
}
