//! What a peer says: messages of connection management with fields from the input, in start-up frames and
//! datagrams that are mostly right.

use quipu_wire::cm::{Ece, Frame, Lookup, Offer, Setup};
use quipu_wire::mpa::{Enhanced, FrameKind, StartFrame};

use crate::input::Input;

fn offer(input: &mut Input<'_>) -> Offer {
    let flags = input.byte();
    let port_space = match flags >> 6 {
        3 => input.word() as u16,
        1 => 0x013f,
        _ => 0x0106,
    };
    Offer {
        port_space,
        qp_type: input.pick(&[2, 2, 3, 9, 10, 77]),
        srq: flags & 1 != 0,
        flow_control: flags & 2 != 0,
        qpn: input.word(),
        psn: input.word(),
        responder_resources: input.byte(),
        initiator_depth: input.byte(),
        retry_count: input.byte(),
        rnr_retry_count: input.byte(),
        path_mtu: input.byte(),
        traffic_class: input.byte(),
        ack_timeout: input.byte(),
        gid: [input.byte(); 16],
        ece: Ece { vendor_id: u32::from(flags & 4), options: input.count() },
    }
}

/// The private data of a start-up frame.
fn setup(kind: FrameKind, reject: bool, input: &mut Input<'_>) -> Vec<u8> {
    let how = input.byte();
    let said = match (how % 8, kind) {
        (5, _) => return input.bytes().to_vec(),
        (6, _) => return [b"QUCM\x01", input.bytes()].concat(),
        (7, _) => Setup::Reject(how, input.bytes()),
        (_, FrameKind::Request) => Setup::Request(offer(input), input.bytes()),
        (_, FrameKind::Reply) if reject => Setup::Reject(how, input.bytes()),
        (_, FrameKind::Reply) => Setup::Reply(offer(input), input.bytes()),
    };
    said.to_bytes()
}

/// A start-up frame.
pub fn start(kind: FrameKind, input: &mut Input<'_>) -> Vec<u8> {
    let how = input.byte();
    let reject = kind == FrameKind::Reply && how & 3 == 3;
    let revision = match how >> 5 {
        7 => input.byte(),
        4..=6 => 2,
        _ => 1,
    };
    let enhanced = Enhanced {
        ird: input.count() as u16,
        ord: input.byte().into(),
        peer_to_peer: how & 8 != 0,
        rtr_send: how & 4 != 0,
        rtr_write: how & 16 != 0,
        rtr_read: true,
    };
    let private_data = setup(kind, reject, input);
    crate::round_trips(&private_data);
    let frame = StartFrame {
        kind,
        markers: how == 0xff,
        crc: true,
        reject,
        revision,
        enhanced: (revision == 2).then_some(enhanced),
        private_data: &private_data,
    };
    let mut out = vec![0; frame.wire_len()];
    frame.emit(&mut out);
    out
}

/// Frames that follow start-up, with private data that are skipped.
pub fn frames(input: &mut Input<'_>) -> Vec<u8> {
    let mut out = Vec::new();
    for _ in 0..1 + input.byte() % 3 {
        let how = input.byte();
        let kinds = [Frame::ReadyToUse, Frame::Disconnect, Frame::Disconnected, Frame::Reject(how)];
        let mut frame = kinds[usize::from(how) % 4].to_bytes();
        if how & 0x40 != 0 {
            let data = input.bytes();
            frame[3] = data.len() as u8;
            out.extend(frame);
            out.extend(data);
        } else {
            out.extend(frame);
        }
    }
    out
}

/// A datagram about a look-up; answers are to `asked`, mostly.
pub fn lookup(asked: u32, answer: bool, input: &mut Input<'_>) -> Vec<u8> {
    let how = input.byte();
    let id = if how & 8 == 0 { asked } else { input.count() };
    let gid = [how; 16];
    let mut bytes = if answer == (how & 7 == 7) {
        let port_space = input.pick(&[0x0111, 0x0111, 0x0106, 0x0002]);
        Lookup::Request { port_space, id, gid, data: input.bytes() }.to_bytes()
    } else {
        let (status, qpn, qkey) = (input.byte() % 4, input.word(), input.count());
        Lookup::Reply { status, id, qpn, qkey, gid, data: input.bytes() }.to_bytes()
    };
    if how >> 5 == 7 {
        // An octet is another, or the end is missing.
        let at = usize::from(input.byte()) % bytes.len();
        bytes[at] = input.byte();
        bytes.truncate(bytes.len().saturating_sub(input.byte().into()));
    }
    bytes
}
