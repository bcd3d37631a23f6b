//! Bytes written by hand from the RFCs, and every way to refuse them.

use quipu_wire::control::Control;
use quipu_wire::hello::{Features, Hello, Kind, Reason, Service};
use quipu_wire::mpa::{Enhanced, FrameKind, Marker, StartFrame, crc32c, fpdu_len};
use quipu_wire::rdmap::{
    AtomicOp, AtomicRequest, AtomicResponse, Opcode, OpcodeSet, ReadRequest, TaggedOp, UntaggedOp,
};
use quipu_wire::terminate::{Code, HeaderCopy, Protection, Terminate};
use quipu_wire::{Payload, Stag, WireError, ddp};

fn emitted(payload: impl Payload) -> Vec<u8> {
    let mut out = vec![0xee; payload.wire_len()];
    payload.emit(&mut out);
    out
}

#[test]
fn crc_examples_of_rfc_3720_b4() {
    let wire = |bytes: &[u8]| crc32c(bytes).to_le_bytes();
    assert_eq!(wire(&[0; 32]), [0xaa, 0x36, 0x91, 0x8a]);
    assert_eq!(wire(&[0xff; 32]), [0x43, 0xab, 0xa8, 0x62]);
    let rising: Vec<u8> = (0..32).collect();
    assert_eq!(wire(&rising), [0x4e, 0x79, 0xdd, 0x46]);
    let falling: Vec<u8> = (0..32).rev().collect();
    assert_eq!(wire(&falling), [0x5c, 0xdb, 0x3f, 0x11]);
    let mut read_pdu = [0; 48];
    read_pdu[..2].copy_from_slice(&[0x01, 0xc0]);
    read_pdu[16] = 0x14;
    read_pdu[22] = 0x04;
    read_pdu[27] = 0x14;
    read_pdu[31] = 0x18;
    read_pdu[32] = 0x28;
    read_pdu[40] = 0x02;
    assert_eq!(wire(&read_pdu), [0x56, 0x3a, 0x96, 0xd9]);
}

#[test]
fn fpdu_lengths() {
    // RFC 5044 4.1: length field, ULPDU and padding are a multiple of four, then the CRC.
    assert_eq!([14, 15, 17, 18, 19].map(fpdu_len), [20, 24, 24, 24, 28]);
    assert_eq!(fpdu_len(65_535), 65_544);
}

#[test]
fn plain_request() {
    let bytes = b"MPA ID Req Frame\xc0\x01\x00\x03abc and more";
    let frame = StartFrame {
        kind: FrameKind::Request,
        markers: true,
        crc: true,
        reject: false,
        revision: 1,
        enhanced: None,
        private_data: b"abc",
    };
    assert_eq!(StartFrame::parse(FrameKind::Request, bytes), Ok(frame));
    let mut out = [0; 23];
    frame.emit(&mut out);
    assert_eq!(out[..], bytes[..23]);
}

#[test]
fn enhanced_reply() {
    let bytes = b"MPA ID Rep Frame\x30\x02\x00\x06\xc0\x10\x80\x08no";
    let enhanced = Enhanced {
        ird: 16,
        ord: 8,
        peer_to_peer: true,
        rtr_send: true,
        rtr_write: true,
        rtr_read: false,
    };
    let frame = StartFrame {
        kind: FrameKind::Reply,
        markers: false,
        crc: false,
        reject: true,
        revision: 2,
        enhanced: Some(enhanced),
        private_data: b"no",
    };
    assert_eq!(StartFrame::parse(FrameKind::Reply, bytes), Ok(frame));
    let mut out = [0; 26];
    frame.emit(&mut out);
    assert_eq!(&out, bytes);
}

#[test]
fn start_frame_faults() {
    let parse = |bytes: &[u8]| StartFrame::parse(FrameKind::Request, bytes).unwrap_err();
    assert_eq!(parse(b"GET / HTTP/1.1"), WireError::BadKey);
    assert_eq!(parse(b"MPA ID Rep Frame\0\x01\0\0"), WireError::BadKey);
    assert_eq!(parse(b"MPA ID"), WireError::Truncated { need: 20, have: 6 });
    let too_long = parse(b"MPA ID Req Frame\0\x01\x02\x01");
    assert_eq!(too_long, WireError::PrivateDataTooLong(513));
    assert_eq!(parse(b"MPA ID Req Frame\x10\x02\0\x03abc"), WireError::NoEnhancedData);
    let cut = parse(b"MPA ID Req Frame\0\x01\0\x04abc");
    assert_eq!(cut, WireError::Truncated { need: 24, have: 23 });
    // S is reserved in revision 1, and R has no meaning in a request.
    let old = StartFrame::parse(FrameKind::Request, b"MPA ID Req Frame\x30\x01\0\0").unwrap();
    assert_eq!((old.enhanced, old.reject), (None, false));
}

#[test]
fn markers() {
    let mut out = [0xee; 4];
    Marker { fpdu_ptr: 508 }.emit(&mut out);
    assert_eq!(out, [0, 0, 1, 0xfc]);
    assert_eq!(Marker::parse(&out), Ok(Marker { fpdu_ptr: 508 }));
    assert_eq!(Marker::parse(&[0, 0, 0, 2]), Err(WireError::OutOfRange("fpdu_ptr")));
    assert!(Marker::parse(&[0; 3]).is_err());
}

#[test]
fn ddp_headers() {
    let tagged = [0xc1, 0x40, 1, 2, 3, 4, 0, 0, 0, 0, 0, 0, 0x10, 0];
    let header = ddp::Header::Tagged(ddp::Tagged {
        last: true,
        rsvd_ulp: 0x40,
        stag: Stag(0x0102_0304),
        to: 0x1000,
    });
    assert_eq!(ddp::Header::parse(&tagged), Ok(header));
    let mut out = [0; 14];
    header.emit(&mut out);
    assert_eq!(out, tagged);

    let untagged = [0x01, 0x44, 0, 0, 0, 7, 0, 0, 0, 0, 0, 0, 0, 5, 0, 0, 4, 0];
    let header = ddp::Header::Untagged(ddp::Untagged {
        last: false,
        rsvd_ulp: 0x44,
        ulp: 7,
        qn: 0,
        msn: 5,
        mo: 1024,
    });
    assert_eq!(ddp::Header::parse(&untagged), Ok(header));
    let mut out = [0; 18];
    header.emit(&mut out);
    assert_eq!(out, untagged);

    let version = |ctrl: u8| ddp::Header::parse(&[ctrl; 18]).unwrap_err();
    assert_eq!(version(0x80), WireError::DdpVersion { tagged: true, version: 0 });
    assert_eq!(version(0x02), WireError::DdpVersion { tagged: false, version: 2 });
    let cut = ddp::Header::parse(&untagged[..17]).unwrap_err();
    assert_eq!(cut, WireError::Truncated { need: 18, have: 17 });
    // Reserved bits are ignored.
    assert!(ddp::Header::parse(&[0x3d; 18]).is_ok());
}

#[test]
fn opcodes() {
    use UntaggedOp::*;
    let table = [
        (0x1, ReadRequest, 1, OpcodeSet::Base),
        (0x3, Send, 0, OpcodeSet::Base),
        (0x4, SendInvalidate, 0, OpcodeSet::Base),
        (0x5, SendSe, 0, OpcodeSet::Base),
        (0x6, SendSeInvalidate, 0, OpcodeSet::Base),
        (0x7, Terminate, 2, OpcodeSet::Base),
        (0x8, Immediate, 0, OpcodeSet::Rfc7306),
        (0x9, ImmediateSe, 0, OpcodeSet::Rfc7306),
        (0xa, AtomicRequest, 1, OpcodeSet::Rfc7306),
        (0xb, AtomicResponse, 3, OpcodeSet::Rfc7306),
        (0xc, SendImm, 0, OpcodeSet::Quipu),
        (0xd, SendImmSe, 0, OpcodeSet::Quipu),
        (0xe, Flush, 1, OpcodeSet::Flush),
        (0xf, Control, 4, OpcodeSet::Quipu),
    ];
    for (code, op, queue, set) in table {
        assert_eq!(op.octet(), 0x40 | code);
        assert_eq!(Opcode::parse(0x40 | code), Ok(Opcode::Untagged(op)));
        assert_eq!((op.queue(), op.set()), (queue, set));
    }
    assert_eq!(Opcode::parse(0x40), Ok(Opcode::Tagged(TaggedOp::Write)));
    assert_eq!(Opcode::parse(0x42), Ok(Opcode::Tagged(TaggedOp::ReadResponse)));
    assert_eq!(Opcode::parse(0x03), Err(WireError::RdmapVersion(0)));
    assert_eq!(Opcode::parse(0x73), Ok(Opcode::Untagged(Send)), "reserved bits are ignored");
}

#[test]
fn read_request() {
    let bytes = [
        0xaa, 0xbb, 0xcc, 0xdd, 0, 0, 0, 0, 0, 0, 0, 0x10, 0, 0, 0x10, 0, 1, 2, 3, 4, 0, 0, 0, 0,
        0, 0, 0x20, 0,
    ];
    let request = ReadRequest {
        sink_stag: Stag(0xaabb_ccdd),
        sink_to: 0x10,
        size: 4096,
        source_stag: Stag(0x0102_0304),
        source_to: 0x2000,
    };
    assert_eq!(ReadRequest::parse(&bytes), Ok(request));
    assert_eq!(emitted(request), bytes);
    let long = ReadRequest::parse(&[0; 29]).unwrap_err();
    assert_eq!(long, WireError::BadLength { need: 28, have: 29 });
}

#[test]
fn atomics() {
    let mut bytes = [0; 52];
    bytes[3] = 2;
    bytes[7] = 9;
    bytes[8..12].copy_from_slice(&[1, 2, 3, 4]);
    bytes[18] = 0x30;
    bytes[27] = 1;
    bytes[28..36].fill(0xff);
    bytes[43] = 5;
    bytes[44..52].fill(0xff);
    let request = AtomicRequest {
        id: 9,
        stag: Stag(0x0102_0304),
        to: 0x3000,
        op: AtomicOp::CmpSwap { swap: 1, swap_mask: !0, compare: 5, compare_mask: !0 },
    };
    assert_eq!(AtomicRequest::parse(&bytes), Ok(request));
    assert_eq!(emitted(request), bytes);

    let add = AtomicRequest { op: AtomicOp::FetchAdd { add: 1, mask: 0 }, ..request };
    assert_eq!(AtomicRequest::parse(&emitted(add)), Ok(add));
    assert_eq!(emitted(add)[..4], [0; 4]);
    bytes[3] = 1;
    assert_eq!(AtomicRequest::parse(&bytes), Err(WireError::UnknownAtomic(1)));

    let response = AtomicResponse { id: 9, original: 5 };
    assert_eq!(emitted(response), [0, 0, 0, 9, 0, 0, 0, 0, 0, 0, 0, 5]);
    assert_eq!(AtomicResponse::parse(&emitted(response)), Ok(response));
}

#[test]
fn terminate_with_all_headers() {
    let ddp_header = [0x41, 0x41, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 1, 0, 0, 0, 0];
    let request =
        ReadRequest { sink_stag: Stag(1), sink_to: 2, size: 3, source_stag: Stag(4), source_to: 5 };
    let mut bytes = vec![0x01, 0x02, 0xe0, 0, 0, 46];
    bytes.extend(ddp_header);
    bytes.extend(emitted(request));
    let terminate = Terminate {
        code: Code::Protection(Protection::AccessRights),
        segment: Some((46, HeaderCopy::from_ulpdu(&ddp_header).unwrap())),
        read_request: Some(request),
    };
    assert_eq!(Terminate::parse(&bytes), Ok(terminate));
    assert_eq!(emitted(terminate), bytes);
    assert_eq!(bytes.len(), Terminate::MAX_LEN);

    // Cut anywhere, the code still comes through.
    for len in 4..bytes.len() {
        assert_eq!(Terminate::parse(&bytes[..len]).unwrap().code, terminate.code);
    }
    assert!(Terminate::parse(&bytes[..3]).is_err());
}

#[test]
fn terminate_codes() {
    for code in Code::all() {
        let (layer_type, octet) = code.octets();
        assert_eq!(Code::from_octets(layer_type, octet), code);
    }
    assert_eq!(Code::from_octets(0x00, 0x77), Code::RdmapCatastrophic);
    let other = Code::Other { layer: 3, etype: 4, code: 5 };
    assert_eq!(Code::from_octets(0x34, 5), other);
    assert_eq!(other.octets(), (0x34, 5));
}

#[test]
fn control_faults() {
    let bytes = |kind: u8, code: u8| {
        let mut bytes = [0xff; 16];
        bytes[0] = kind;
        bytes[1] = code;
        Control::parse(&bytes)
    };
    assert_eq!(bytes(1, 99), Ok(Control::Ack { count: !0 }), "reserved bytes are ignored");
    assert_eq!(bytes(2, 31), Ok(Control::RnrNak { count: !0, timer: 31 }));
    assert_eq!(bytes(2, 32), Err(WireError::OutOfRange("RNR timer code")));
    assert_eq!(bytes(0, 0), Err(WireError::UnknownControl(0)));
    assert_eq!(bytes(4, 0), Err(WireError::UnknownControl(4)));
    assert_eq!(Control::parse(&[1; 15]), Err(WireError::BadLength { need: 16, have: 15 }));
}

#[test]
fn hello_faults_and_answer() {
    let hello = Hello {
        kind: Kind::Request,
        path_mtu: 5,
        features: Features(0xff),
        dest_qpn: 1,
        source_qpn: 2,
        rq_psn: 3,
        sq_psn: 4,
        service: Service::Rc,
        source_gid: [5; 16],
        dest_gid: [6; 16],
    };
    let bytes = hello.to_bytes();
    let with = |at: usize, value: u8| {
        let mut bytes = bytes;
        bytes[at] = value;
        Hello::parse(&bytes).unwrap_err()
    };
    assert_eq!(with(0, b'q'), WireError::NotHello);
    assert_eq!(with(4, 2), WireError::HelloVersion(2));
    assert_eq!(with(5, 0), WireError::OutOfRange("kind"));
    assert_eq!(with(7, 6), WireError::OutOfRange("path_mtu"));
    assert_eq!(with(12, 1), WireError::OutOfRange("dest_qpn"));
    assert_eq!(with(24, 1), WireError::OutOfRange("sq_psn"));
    assert_eq!(Hello::parse(b""), Err(WireError::NotHello));
    let cut = Hello::parse(&bytes[..63]).unwrap_err();
    assert_eq!(cut, WireError::Truncated { need: 64, have: 63 });
    let longer: Vec<u8> = bytes.into_iter().chain([1, 2, 3]).collect();
    assert_eq!(Hello::parse(&longer), Ok(hello));

    let no = hello.answer(Kind::Reject(Reason::Busy), Features::ALL, 7, 8);
    assert_eq!((no.dest_qpn, no.source_qpn, no.features), (2, 1, Features::ALL));
    assert_eq!((no.source_gid, no.dest_gid), ([6; 16], [5; 16]));
    assert_eq!(Hello::parse(&no.to_bytes()), Ok(no));
    for code in 1..=6 {
        let mut bytes = no.to_bytes();
        bytes[6] = code;
        assert_eq!(Hello::parse(&bytes).unwrap().to_bytes(), bytes);
    }
}
