//! The worked examples of the specifications: what is printed there is what this crate emits.

use quipu_wire::control::Control;
use quipu_wire::datagram::Datagram;
use quipu_wire::hello::{Features, Hello, Kind, Service};
use quipu_wire::mpa::{CRC_LEN, LENGTH_LEN, crc32c, fpdu_len};
use quipu_wire::rdmap::{FlushRequest, Immediate, UntaggedOp, queue};
use quipu_wire::{Payload, Stag, ddp};

const WIRE: &str = include_str!("../../../../specs/quipu-wire.md");
const DATAGRAM: &str = include_str!("../../../../specs/quipu-datagram.md");

/// The bytes of the block that the specification of the wire calls `name`.
fn example(name: &str) -> Vec<u8> {
    example_of(WIRE, name)
}

fn example_of(spec: &str, name: &str) -> Vec<u8> {
    let fence = format!("```hex {name}\n");
    let start = spec.find(&fence).expect("an example of this name") + fence.len();
    let block = spec[start..].split("```").next().expect("a closed block");
    block.split_whitespace().map(|octet| u8::from_str_radix(octet, 16).expect("hex")).collect()
}

fn fpdu(header: ddp::Untagged, payload: &[u8]) -> Vec<u8> {
    let ulpdu_len = ddp::UNTAGGED_LEN + payload.len();
    let mut out = vec![0; fpdu_len(ulpdu_len)];
    out[..LENGTH_LEN].copy_from_slice(&(ulpdu_len as u16).to_be_bytes());
    header.emit(&mut out[LENGTH_LEN..]);
    let at = LENGTH_LEN + ddp::UNTAGGED_LEN;
    out[at..at + payload.len()].copy_from_slice(payload);
    let covered = out.len() - CRC_LEN;
    let crc = crc32c(&out[..covered]).to_le_bytes();
    out[covered..].copy_from_slice(&crc);
    out
}

fn header(op: UntaggedOp, ulp: u32, msn: u32) -> ddp::Untagged {
    ddp::Untagged { last: true, rsvd_ulp: op.octet(), ulp, qn: op.queue(), msn, mo: 0 }
}

fn payload(payload: impl Payload) -> Vec<u8> {
    let mut out = vec![0xee; payload.wire_len()];
    payload.emit(&mut out);
    out
}

fn gid(last: u8) -> [u8; 16] {
    [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 10, 0, 0, last]
}

#[test]
fn hello() {
    let hello = Hello {
        kind: Kind::Request,
        path_mtu: 3,
        features: Features::QUIPU.with(Features::RFC7306),
        dest_qpn: 0xc35102,
        source_qpn: 0xc35001,
        rq_psn: 0x123456,
        sq_psn: 0x654321,
        service: Service::Rc,
        source_gid: gid(1),
        dest_gid: gid(2),
    };
    assert_eq!(hello.to_bytes().to_vec(), example("hello"));
    assert_eq!(Hello::parse(&example("hello")), Ok(hello));
}

#[test]
fn send_imm() {
    let op = UntaggedOp::SendImm;
    assert_eq!(fpdu(header(op, 0x1122_3344, 5), b"quipu"), example("send_imm"));
}

#[test]
fn send_acknowledging() {
    let op = UntaggedOp::Send;
    assert!(op.carries_executed());
    assert_eq!(fpdu(header(op, 7, 5), b"quipu"), example("send_acknowledging"));
}

#[test]
fn immediate() {
    let immediate = Immediate { imm: 0x1122_3344, write_len: 4096 };
    let bytes = fpdu(header(UntaggedOp::Immediate, 0, 6), &payload(immediate));
    assert_eq!(bytes, example("immediate"));
}

#[test]
fn flush() {
    let (stag, to) = (Stag(0x0102_0304), 0x0000_7f00_1234_5000);
    let request = FlushRequest { stag, to, len: 4096, placement: 1, level: 0 };
    let bytes = fpdu(header(UntaggedOp::Flush, 0, 3), &payload(request));
    assert_eq!(bytes, example("flush"));
    assert_eq!(FlushRequest::parse(&bytes[20..44]), Ok(request));
}

#[test]
fn rnr_nak() {
    let control = Control::RnrNak { count: 7, timer: 12 };
    let bytes = fpdu(header(UntaggedOp::Control, 0, 2), &payload(control));
    assert_eq!(bytes, example("rnr_nak"));
    assert_eq!(Control::parse(&bytes[20..36]), Ok(control));
}

#[test]
fn datagrams() {
    let plain = Datagram {
        dest_qpn: 0xc35102,
        source_qpn: 0xc35001,
        qkey: 0x1111_1111,
        imm: None,
        solicited: false,
        frame: false,
    };
    let bytes = [plain.to_bytes().as_slice(), b"quipu"].concat();
    assert_eq!(bytes, example_of(DATAGRAM, "datagram"));
    assert_eq!(Datagram::parse(&bytes), Ok(plain));
    let imm = Datagram { imm: Some(0x1122_3344), solicited: true, ..plain };
    assert_eq!(imm.to_bytes().to_vec(), example_of(DATAGRAM, "datagram_imm"));
    assert_eq!(Datagram::parse(&imm.to_bytes()), Ok(imm));
    let frame = Datagram { dest_qpn: 0xff_ffff, qkey: 0, frame: true, ..plain };
    let bytes = [frame.to_bytes().as_slice(), &[0xff; 6], &[2, 0x51, 10, 0, 0, 1, 8, 6]].concat();
    assert_eq!(bytes, example_of(DATAGRAM, "datagram_frame"));
    assert_eq!(Datagram::parse(&bytes), Ok(frame));
}

#[test]
fn send_to_shared_queue() {
    let header = ddp::Untagged { qn: queue::shared(5), ..header(UntaggedOp::Send, 0, 7) };
    assert_eq!(fpdu(header, b"quipu"), example("send_to_shared_queue"));
    assert_eq!(queue::shared_number(header.qn), Some(5));
}
