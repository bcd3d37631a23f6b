//! For any bytes, parsing does not panic, and what it accepts it writes back as it was understood.

use proptest::prelude::*;
use quipu_wire::control::Control;
use quipu_wire::datagram::Datagram;
use quipu_wire::hello::Hello;
use quipu_wire::mpa::{Enhanced, FrameKind, StartFrame};
use quipu_wire::rdmap::{
    AtomicRequest, AtomicResponse, FlushRequest, Immediate, Opcode, ReadRequest,
};
use quipu_wire::tcp;
use quipu_wire::terminate::Terminate;
use quipu_wire::{Payload, ddp};

fn emitted(payload: &impl Payload) -> Vec<u8> {
    let mut out = vec![0; payload.wire_len()];
    payload.emit(&mut out);
    out
}

/// Accepted bytes give a value that survives being written and read once more.
macro_rules! stable {
    ($type:ty, $bytes:expr) => {
        if let Ok(value) = <$type>::parse($bytes) {
            prop_assert_eq!(<$type>::parse(&emitted(&value)), Ok(value));
        }
    };
}

proptest! {
    #[test]
    fn arbitrary_payloads(bytes in prop::collection::vec(any::<u8>(), 0..80)) {
        for len in [8, 12, 16, 24, 28, 52, bytes.len()] {
            let bytes = &bytes[..bytes.len().min(len)];
            stable!(ReadRequest, bytes);
            stable!(AtomicRequest, bytes);
            stable!(FlushRequest, bytes);
            stable!(AtomicResponse, bytes);
            stable!(Immediate, bytes);
            stable!(Control, bytes);
            stable!(Terminate, bytes);
        }
        let _ = ddp::Header::parse(&bytes);
        let _ = Hello::parse(&bytes);
    }

    #[test]
    fn likely_payloads(kind in 0u8..5, mut bytes in prop::collection::vec(any::<u8>(), 70..71)) {
        bytes[0] = kind;
        stable!(Control, &bytes[..16]);
        bytes[3] = kind;
        stable!(AtomicRequest, &bytes[..52]);
        stable!(Terminate, &bytes[..]);
    }

    #[test]
    fn tcp_headers(
        mut bytes in prop::collection::vec(any::<u8>(), 0..70),
        kinds in prop::collection::vec((0usize..5, any::<u8>()), 0..12),
        words in 4u8..=15,
    ) {
        // Likely options, at random places among random octets.
        const TIMESTAMPS: &[u8] = &[8, 10, 1, 2, 3, 4, 5, 6, 7];
        const LIKELY: [&[u8]; 5] = [&[1], &[2, 4, 5], &[3, 3], TIMESTAMPS, &[5, 10]];
        let mut at = tcp::MIN_LEN;
        for (kind, last) in kinds {
            for octet in LIKELY[kind].iter().chain([&last]) {
                if let Some(byte) = bytes.get_mut(at) {
                    *byte = *octet;
                }
                at += 1;
            }
        }
        if let Some(offset) = bytes.get_mut(12) {
            *offset = words << 4;
        }
        if let Ok((repr, len)) = tcp::Repr::parse(&bytes) {
            prop_assert!(len <= bytes.len() && len <= tcp::MAX_LEN);
            let mut out = [0xff; tcp::MAX_LEN];
            let written = repr.emit(&mut out);
            prop_assert_eq!(tcp::Repr::parse(&out), Ok((repr, written)));
        }
    }

    #[test]
    fn datagrams(mut bytes in prop::collection::vec(any::<u8>(), 0..40), imm in any::<bool>()) {
        for (at, octet) in [(0, b'Q'), (1, b'D'), (2, 1), (3, 0x64 + u8::from(imm))] {
            if let Some(byte) = bytes.get_mut(at) {
                *byte = octet;
            }
        }
        match Datagram::parse(&bytes) {
            Ok(value) => prop_assert_eq!(Datagram::parse(&value.to_bytes()), Ok(value)),
            Err(_) => prop_assert!(bytes.len() < 20),
        }
    }

    #[test]
    fn ddp_headers(mut bytes in prop::array::uniform18(any::<u8>())) {
        bytes[0] = bytes[0] & 0xc0 | 1;
        let header = ddp::Header::parse(&bytes).expect("version 1");
        let mut out = [0; 18];
        header.emit(&mut out);
        prop_assert_eq!(&out[..header.wire_len()], &bytes[..header.wire_len()]);
    }

    #[test]
    fn hellos(mut bytes in prop::collection::vec(any::<u8>(), 64..70), kind in 1u8..4) {
        bytes[..6].copy_from_slice(&[b'Q', b'U', b'I', b'P', 1, kind]);
        bytes[7] %= 6;
        for at in [12, 16, 20, 24] {
            bytes[at] = 0;
        }
        let hello = Hello::parse(&bytes).expect("legal");
        prop_assert_eq!(Hello::parse(&hello.to_bytes()), Ok(hello));
    }

    #[test]
    fn opcodes(octet: u8) {
        if let Ok(opcode) = Opcode::parse(octet) {
            prop_assert_eq!(Opcode::parse(opcode.octet()), Ok(opcode));
        }
    }

    #[test]
    fn start_frames(
        flags: [bool; 8],
        revision in 0u8..4,
        depths: (u16, u16),
        private_data in prop::collection::vec(any::<u8>(), 0..508),
        cut: prop::sample::Index,
    ) {
        let kind = if flags[0] { FrameKind::Reply } else { FrameKind::Request };
        let enhanced = (flags[1] && revision >= 2).then_some(Enhanced {
            ird: depths.0 & 0x3fff,
            ord: depths.1 & 0x3fff,
            peer_to_peer: flags[2],
            rtr_send: flags[3],
            rtr_write: flags[4],
            rtr_read: flags[5],
        });
        let frame = StartFrame {
            kind,
            markers: flags[6],
            crc: flags[7],
            reject: kind == FrameKind::Reply && flags[2],
            revision,
            enhanced,
            private_data: &private_data,
        };
        let mut bytes = vec![0; frame.wire_len()];
        frame.emit(&mut bytes);
        prop_assert_eq!(StartFrame::parse(kind, &bytes), Ok(frame));
        prop_assert_eq!(StartFrame::frame_len(kind, &bytes), Ok(Some(bytes.len())));
        prop_assert!(StartFrame::parse(kind, &bytes[..cut.index(bytes.len())]).is_err());
    }

    #[test]
    fn arbitrary_start_frames(tail in prop::collection::vec(any::<u8>(), 0..600)) {
        let mut bytes = b"MPA ID Req Frame".to_vec();
        bytes.extend(&tail);
        let _ = StartFrame::parse(FrameKind::Request, &bytes);
        let _ = StartFrame::parse(FrameKind::Request, &tail);
    }
}
