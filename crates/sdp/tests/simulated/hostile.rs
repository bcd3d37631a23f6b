//! What no peer may do ends its connection.

use quipu_sdp::{Config, Mode, PeerMisbehaved};
use quipu_wire::Stag;
use quipu_wire::sdp::{Body, Flags, Header, MAX_HEADERS_LEN, Memory, emit_headers};
use rand_core::{RngCore, SeedableRng};
use rand_pcg::Pcg64;

use crate::bench::Pair;

fn message(mseq: u32, mseq_ack: u32, body: Body, payload: &[u8]) -> Vec<u8> {
    let header = Header { flags: Flags::default(), bufs: 64, mseq, mseq_ack };
    let mut out = vec![0; MAX_HEADERS_LEN];
    let len = emit_headers(&header, &body, payload.len() as u32, &mut out);
    out.truncate(len);
    out.extend_from_slice(payload);
    out
}

fn memory(len: u32) -> Body {
    Body::SrcAvail(Memory { len, rkey: Stag(1), addr: u64::MAX - 2 })
}

/// What comes of messages with these bodies, numbered in order.
fn after(bodies: &[(Body, &[u8])]) -> Result<bool, PeerMisbehaved> {
    let mut pair = Pair::new([Config::default(); 2]);
    for (number, (body, payload)) in bodies.iter().enumerate() {
        pair.send(0, message(number as u32 + 1, 0, *body, payload));
        pair.deliver(1)?;
        pair.pump(1);
    }
    Ok(true)
}

#[test]
fn each_broken_rule_has_its_name() {
    use PeerMisbehaved as Fault;
    let data: (Body, &[u8]) = (Body::Data, b"x");
    let advert: (Body, &[u8]) = (memory(9), b"x");
    let end: (Body, &[u8]) = (Body::Disconnect, b"");
    assert_eq!(after(&[data, advert]), Ok(true));
    assert_eq!(after(&[advert, data]), Err(Fault::DataDuringAdvert));
    assert_eq!(after(&[advert, end]), Err(Fault::DataDuringAdvert));
    assert_eq!(after(&[advert, advert]), Err(Fault::TooManyAdverts));
    assert_eq!(after(&[(memory(1), b"x")]), Err(Fault::Advert));
    assert_eq!(after(&[(memory(9), b"")]), Err(Fault::Advert));
    assert_eq!(after(&[end, data]), Err(Fault::AfterDisconnect));
    assert_eq!(after(&[end, advert]), Err(Fault::AfterDisconnect));
    assert_eq!(after(&[end, end]), Err(Fault::AfterDisconnect));
    assert_eq!(after(&[(Body::ReadComplete(1), b"")]), Err(Fault::ReadTooMuch(1)));
    assert_eq!(after(&[(Body::SendSm, b"")]), Ok(true), "it may be late");
    assert_eq!(after(&[(Body::SourceCancel, b"")]), Ok(true), "it may be late");
    for body in [Body::WriteComplete(1), Body::SinkCancel, Body::Suspend(1), Body::SuspendAck] {
        assert_eq!(after(&[(body, b"")]), Err(Fault::NotAgreed(body.mid())));
    }
    for size in [0, 36] {
        let wish = (Body::ChangeReceiveBuffers(size), &b""[..]);
        assert_eq!(after(&[wish]), Err(Fault::BufferSize(size)));
    }
    for size in [100, 1 << 20] {
        let unasked = (Body::ChangeReceiveBuffersAck(size), &b""[..]);
        assert_eq!(after(&[unasked]), Err(Fault::BufferSize(size)));
    }
    let change = |of_receiver, mode| (Body::ModeChange { of_receiver, mode }, &b""[..]);
    assert_eq!(after(&[change(true, Mode::Pipelined)]), Err(Fault::ModeChange));
    assert_eq!(after(&[change(false, Mode::Combined)]), Err(Fault::ModeChange));
    let buffered = change(false, Mode::Buffered);
    assert_eq!(after(&[buffered, advert]), Err(Fault::Advert));
    let pipelined = change(false, Mode::Pipelined);
    assert_eq!(after(&[pipelined, (memory(9), b"")]), Ok(true));
    assert_eq!(after(&[pipelined, advert]), Err(Fault::Advert));
}

#[test]
fn numbers_and_acknowledgements_are_checked() {
    let mut pair = Pair::new([Config::default(); 2]);
    pair.send(0, message(2, 0, Body::Data, b"x"));
    let fault = PeerMisbehaved::Sequence { expected: 1, got: 2 };
    assert_eq!(pair.deliver(1), Err(fault));
    let mut pair = Pair::new([Config::default(); 2]);
    pair.send(0, message(1, 1, Body::Data, b"x"));
    assert_eq!(pair.deliver(1), Err(PeerMisbehaved::Acknowledgement(1)));
}

#[test]
fn reports_beyond_what_was_advertised_are_refused() {
    let mut pair = Pair::new([Config::default(); 2]);
    assert!(pair.advertise(1, 10, 1));
    pair.send(0, message(1, 1, Body::ReadComplete(4), b""));
    pair.deliver(1).unwrap();
    pair.send(0, message(2, 1, Body::ReadComplete(6), b""));
    assert_eq!(pair.deliver(1), Err(PeerMisbehaved::ReadTooMuch(6)));
}

/// A peer with a good sense of numbers that says anything else at random.
#[test]
fn random_messages_neither_panic_nor_grow_anything() {
    for seed in 0..300 {
        let mut rng = Pcg64::seed_from_u64(seed);
        let mut pair = Pair::new([Config { buffers: 8, ..Config::default() }; 2]);
        for mseq in 1..200 {
            let draw = rng.next_u32();
            let len = rng.next_u32() % 40;
            let body = match draw % 16 {
                0..3 => memory(len + 1),
                3 => Body::ReadComplete(len),
                4 => Body::SendSm,
                5 => Body::SourceCancel,
                6 => Body::ChangeReceiveBuffers(len * 1000),
                7 => Body::ModeChange { of_receiver: len & 1 == 0, mode: Mode::Combined },
                8 if len == 0 => Body::Disconnect,
                _ => Body::Data,
            };
            let payload = if body.takes_payload() { vec![0; (len / 2) as usize] } else { vec![] };
            pair.send(0, message(mseq, draw >> 31, body, &payload));
            let broken = pair.deliver(1).is_err();
            // It reads, and offers memory of its own, without looking at the bytes.
            if draw & 1 << 20 != 0 && pair.ends[1].connection.peek(0).is_some() {
                pair.ends[1].connection.consume(u32::MAX);
            }
            if draw & 1 << 21 != 0 && pair.ends[1].connection.begin_read(5).is_some() {
                pair.ends[1].connection.finish_read();
            }
            if draw & 1 << 22 != 0 && pair.source_end(1).is_none() {
                pair.advertise(1, 100, 1);
            }
            pair.pump(1);
            pair.ends[0].inbox.clear();
            if broken || pair.ends[1].connection.unread() > 8 * 64 {
                break;
            }
        }
    }
}
