//! Connections of SDP as packets of RoCE v2, which Wireshark decodes as SDP: it knows SDP over InfiniBand's
//! packets only, and finds it by the service ID in the connection's REQ.
//!
//! So a connection begins with its REQ, REP and RTU, as management datagrams to queue pair 1, and each
//! message is one SEND, whatever carried it.

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use crate::packet::{Mark, udp_headers};
use crate::pcapng::{self, Interface, Packet};

/// The UDP port of RoCE v2.
const PORT: u16 = 4791;
/// Opcodes of the base transport header: one SEND of a reliable connection, and of a datagram.
const RC_SEND_ONLY: u8 = 0x04;
const UD_SEND_ONLY: u8 = 0x64;
/// The Q_Key of queue pair 1.
const MANAGEMENT_QKEY: u32 = 0x8001_0000;
const MANAGEMENT_QP: u32 = 1;
/// Bytes of a management datagram.
const MAD_LEN: usize = 256;
const MAD_HEADER: usize = 24;
/// Attributes of the class of connection management.
const REQ: u16 = 0x10;
const REP: u16 = 0x13;
const RTU: u16 = 0x14;
/// Where private data begin in a REQ and a REP.
const REQ_DATA: usize = MAD_HEADER + 140;
const REP_DATA: usize = MAD_HEADER + 36;
/// RDMA reads in each direction.
const READS: u8 = 4;

/// One connection, as this process sees it.
#[derive(Clone, Debug)]
pub struct SdpEnds {
    /// The own address; the ports are those of the sockets.
    pub own: SocketAddr,
    /// The peer's.
    pub peer: SocketAddr,
    /// The own queue pair.
    pub own_qpn: u32,
    /// The peer's.
    pub peer_qpn: u32,
    /// Whether this end has asked for the connection.
    pub initiator: bool,
}

/// A capture of SDP connections: bytes of a pcapng file.
#[derive(Debug)]
pub struct SdpCapture {
    out: Vec<u8>,
    written: u64,
    /// Longest file in bytes.
    limit: u64,
    /// Number of the next packet, of all connections and directions.
    psn: u32,
}

impl SdpCapture {
    /// A capture with no packets yet, of at most `limit` bytes.
    #[must_use]
    pub fn new(interface: &Interface, limit: u64) -> Self {
        let mut out = Vec::new();
        pcapng::begin(&mut out, interface, 0);
        Self { out, written: 0, limit, psn: 0 }
    }

    /// Takes the bytes of the file that were not taken yet.
    pub fn take_output(&mut self) -> Vec<u8> {
        self.written += self.out.len() as u64;
        std::mem::take(&mut self.out)
    }

    /// A connection stands, by a REQ with `hello` and a REP with `hello_ack`.
    pub fn connected(&mut self, time: Duration, ends: &SdpEnds, hello: &[u8], hello_ack: &[u8]) {
        let (asker, asked) = match ends.initiator {
            true => ((ends.own.ip(), ends.own_qpn), (ends.peer.ip(), ends.peer_qpn)),
            false => ((ends.peer.ip(), ends.peer_qpn), (ends.own.ip(), ends.own_qpn)),
        };
        let port = if ends.initiator { ends.peer.port() } else { ends.own.port() };
        let request = request(asker, asked.0, port, hello);
        let reply = reply(asker.1, asked, hello_ack);
        let ready = ready(asker.1, asked.1);
        for (mad, to_asked) in [(request, true), (reply, false), (ready, true)] {
            let outgoing = to_asked == ends.initiator;
            self.management(time, ends, outgoing, &mad);
        }
    }

    /// A message was sent, and is marked, or has come.
    pub fn message_passed(
        &mut self,
        time: Duration,
        ends: &SdpEnds,
        mark: Option<Mark>,
        message: &[u8],
    ) {
        let (outgoing, mark) = (mark.is_some(), mark.unwrap_or_default());
        let qpns = match outgoing {
            true => [ends.own_qpn, ends.peer_qpn],
            false => [ends.peer_qpn, ends.own_qpn],
        };
        let packet = Datagram {
            opcode: RC_SEND_ONLY,
            qpn: qpns[1],
            extension: &[],
            payload: message,
            traffic_class: mark.traffic_class,
            comment: &mark.comment(qpns, "SDP"),
        };
        self.packet(time, ends, outgoing, &packet);
    }

    fn management(&mut self, time: Duration, ends: &SdpEnds, outgoing: bool, mad: &[u8]) {
        let mut datagram = [0; 8];
        datagram[..4].copy_from_slice(&MANAGEMENT_QKEY.to_be_bytes());
        datagram[4..].copy_from_slice(&MANAGEMENT_QP.to_be_bytes());
        let packet = Datagram {
            opcode: UD_SEND_ONLY,
            qpn: MANAGEMENT_QP,
            extension: &datagram,
            payload: mad,
            traffic_class: 0,
            comment: "",
        };
        self.packet(time, ends, outgoing, &packet);
    }

    fn packet(
        &mut self,
        time: Duration,
        ends: &SdpEnds,
        outgoing: bool,
        &Datagram { opcode, qpn, extension, payload, traffic_class, comment }: &Datagram<'_>,
    ) {
        let pad = payload.len().next_multiple_of(4) - payload.len();
        let mut bytes = vec![opcode, (pad as u8) << 4, 0xff, 0xff];
        bytes.extend_from_slice(&(qpn & 0x00ff_ffff).to_be_bytes());
        bytes.extend_from_slice(&(self.psn & 0x00ff_ffff).to_be_bytes());
        bytes.extend_from_slice(extension);
        bytes.extend_from_slice(payload);
        // The pad, and the invariant CRC, which nobody checks.
        bytes.resize(bytes.len() + pad + 4, 0);
        self.psn = self.psn.wrapping_add(1);
        let at = |ip: IpAddr| SocketAddr::new(ip, PORT);
        let (from, to) = match outgoing {
            true => (at(ends.own.ip()), at(ends.peer.ip())),
            false => (at(ends.peer.ip()), at(ends.own.ip())),
        };
        let Some(headers) = udp_headers((from, to), &bytes, traffic_class) else { return };
        let length = headers.len() + bytes.len();
        // Around the packet there are at most 64 bytes, and the comment.
        let block = length + 64 + comment.len().next_multiple_of(4);
        if self.written + (self.out.len() + block) as u64 > self.limit {
            return;
        }
        let packet = Packet {
            interface: 0,
            time,
            bytes: (&headers, &bytes),
            length: length as u32,
            inbound: !outgoing,
            comment,
        };
        pcapng::packet(&mut self.out, &packet);
    }
}

/// What a UDP datagram of RoCE carries.
struct Datagram<'a> {
    opcode: u8,
    /// The queue pair that it goes to.
    qpn: u32,
    /// The header after the base transport header.
    extension: &'a [u8],
    payload: &'a [u8],
    traffic_class: u8,
    comment: &'a str,
}

fn put<const N: usize>(out: &mut [u8], at: usize, field: [u8; N]) {
    out[at..at + N].copy_from_slice(&field);
}

/// The header of a management datagram: its transaction is named after the queue pair of the asker.
fn mad(attribute: u16, asker: u32) -> [u8; MAD_LEN] {
    let mut out = [0; MAD_LEN];
    // Base version, the class of connection management and its version, Send.
    put(&mut out, 0, [1, 7, 2, 3]);
    put(&mut out, 8, u64::from(asker).to_be_bytes());
    put(&mut out, 16, attribute.to_be_bytes());
    out
}

/// A number of 24 bits and the byte that follows it.
fn with_byte(number: u32, byte: u8) -> [u8; 4] {
    (number << 8 | u32::from(byte)).to_be_bytes()
}

fn gid(ip: IpAddr) -> [u8; 16] {
    match ip {
        IpAddr::V4(v4) => v4.to_ipv6_mapped().octets(),
        IpAddr::V6(v6) => v6.octets(),
    }
}

fn private_data(out: &mut [u8], at: usize, data: &[u8]) {
    let len = data.len().min(out.len() - at);
    out[at..at + len].copy_from_slice(&data[..len]);
}

fn request((ip, qpn): (IpAddr, u32), to: IpAddr, port: u16, hello: &[u8]) -> [u8; MAD_LEN] {
    let mut out = mad(REQ, qpn);
    let body = &mut out[MAD_HEADER..];
    put(body, 0, qpn.to_be_bytes());
    put(body, 8, (0x0001_0000 + u64::from(port)).to_be_bytes());
    put(body, 32, with_byte(qpn, READS));
    put(body, 36, with_byte(0, READS));
    put(body, 48, [0xff, 0xff]);
    put(body, 56, gid(ip));
    put(body, 72, gid(to));
    private_data(&mut out, REQ_DATA, hello);
    out
}

fn reply(asker: u32, (_, qpn): (IpAddr, u32), hello_ack: &[u8]) -> [u8; MAD_LEN] {
    let mut out = mad(REP, asker);
    let body = &mut out[MAD_HEADER..];
    put(body, 0, qpn.to_be_bytes());
    put(body, 4, asker.to_be_bytes());
    put(body, 12, with_byte(qpn, 0));
    put(body, 24, [READS, READS]);
    private_data(&mut out, REP_DATA, hello_ack);
    out
}

fn ready(asker: u32, asked: u32) -> [u8; MAD_LEN] {
    let mut out = mad(RTU, asker);
    put(&mut out, MAD_HEADER, asker.to_be_bytes());
    put(&mut out, MAD_HEADER + 4, asked.to_be_bytes());
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn capture() -> (SdpCapture, SdpEnds) {
        let interface = Interface {
            name: "quipu0".into(),
            description: String::new(),
            application: "test".into(),
        };
        let ends = SdpEnds {
            own: "10.0.0.1:50000".parse().unwrap(),
            peer: "10.0.0.2:5001".parse().unwrap(),
            own_qpn: 0x11,
            peer_qpn: 0x22,
            initiator: true,
        };
        let mut capture = SdpCapture::new(&interface, 1 << 20);
        capture.take_output();
        (capture, ends)
    }

    /// The transport header of the only packet in a block: it follows the block's 28 bytes, IPv4 and UDP.
    fn transport(block: &[u8]) -> &[u8] {
        assert_eq!(block[28] >> 4, 4);
        assert_eq!(&block[28 + 22..28 + 24], &PORT.to_be_bytes());
        &block[28 + 28..]
    }

    #[test]
    fn a_message_is_one_send_padded_to_words() {
        let (mut capture, ends) = capture();
        let mark = Mark { traffic_class: 0xa0, service_level: 5, lane: Some(2) };
        capture.message_passed(Duration::ZERO, &ends, Some(mark), b"hello");
        let out = capture.take_output();
        let bytes = transport(&out);
        assert_eq!(bytes[..8], [RC_SEND_ONLY, 3 << 4, 0xff, 0xff, 0, 0, 0, 0x22]);
        assert_eq!(&bytes[12..24], b"hello\0\0\0\0\0\0\0");
        assert_eq!(out[28 + 12..28 + 20], [10, 0, 0, 1, 10, 0, 0, 2]);
        assert_eq!(out[28 + 1], 0xa0);
        let comment = b"QP 0x000011 to 0x000022, SL 5, VL 2: SDP";
        assert!(out.windows(comment.len()).any(|bytes| bytes == comment));
        capture.message_passed(Duration::ZERO, &ends, None, b"ok");
        let out = capture.take_output();
        assert_eq!(transport(&out)[7], 0x11);
        assert_eq!(out[28 + 12..28 + 20], [10, 0, 0, 2, 10, 0, 0, 1]);
    }

    #[test]
    fn the_request_names_the_service_and_carries_the_hello() {
        let mad =
            request(("10.0.0.1".parse().unwrap(), 0x11), "10.0.0.2".parse().unwrap(), 5001, b"HH");
        assert_eq!(mad[MAD_HEADER + 8..MAD_HEADER + 16], [0, 0, 0, 0, 0, 1, 0x13, 0x89]);
        assert_eq!(mad[MAD_HEADER + 32..MAD_HEADER + 36], [0, 0, 0x11, READS]);
        assert_eq!(&mad[REQ_DATA..REQ_DATA + 2], b"HH");
        assert_eq!(REQ_DATA + 92, MAD_LEN);
        let mad = reply(0x11, ("10.0.0.2".parse().unwrap(), 0x22), &[7; 196]);
        assert_eq!(mad[REP_DATA..], [7; 196]);
    }

    #[test]
    fn a_full_capture_takes_no_more() {
        let (_, ends) = capture();
        let interface = Interface {
            name: String::new(),
            description: String::new(),
            application: String::new(),
        };
        let mut capture = SdpCapture::new(&interface, 500);
        let begun = capture.take_output().len();
        for _ in 0..10 {
            capture.message_passed(Duration::ZERO, &ends, Some(Mark::default()), &[1; 100]);
        }
        assert!(begun + capture.take_output().len() <= 500);
    }
}
