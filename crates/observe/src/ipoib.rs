//! Datagrams of IP over InfiniBand as packets that Wireshark decodes (LINKTYPE_IPOIB): a global route header
//! with the sender's queue pair number, then the datagram.

use std::time::Duration;

use crate::packet::Mark;
use crate::pcapng::{self, Interface, LinkType, Packet};

/// Length of a global route header.
const GRH_LEN: usize = 40;
/// What Wireshark shows of the header: version 6, the number of the source queue pair in the last three bytes
/// of the second word, and both GIDs.
const VERSION: u8 = 6 << 4;

/// Where a datagram came from and went to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IpoibEnds {
    /// The sender's GID.
    pub source: [u8; 16],
    /// The sender's queue pair.
    pub source_qpn: u32,
    /// The GID of the receiver or group.
    pub destination: [u8; 16],
    /// The receiver's queue pair; that of a group is 0xffffff.
    pub destination_qpn: u32,
}

/// A capture of datagrams: bytes of a pcapng file.
#[derive(Debug)]
pub struct IpoibCapture {
    out: Vec<u8>,
    written: u64,
    /// Longest file in bytes.
    limit: u64,
}

impl IpoibCapture {
    /// A capture with no packets yet, of at most `limit` bytes.
    #[must_use]
    pub fn new(interface: &Interface, limit: u64) -> Self {
        let mut out = Vec::new();
        pcapng::begin_as(&mut out, interface, LinkType::Ipoib, 0);
        Self { out, written: 0, limit }
    }

    /// Takes the bytes of the file that were not taken yet.
    pub fn take_output(&mut self) -> Vec<u8> {
        self.written += self.out.len() as u64;
        std::mem::take(&mut self.out)
    }

    /// A datagram was sent, and is marked, or has come.
    pub fn passed(
        &mut self,
        time: Duration,
        mark: Option<Mark>,
        ends: &IpoibEnds,
        datagram: &[u8],
    ) {
        let (outgoing, mark) = (mark.is_some(), mark.unwrap_or_default());
        let comment = mark.comment([ends.source_qpn, ends.destination_qpn], "IPoIB");
        let mut header = [0; GRH_LEN];
        header[0] = VERSION | mark.traffic_class >> 4;
        header[1] = mark.traffic_class << 4;
        header[5..8].copy_from_slice(&ends.source_qpn.to_be_bytes()[1..]);
        header[8..24].copy_from_slice(&ends.source);
        header[24..].copy_from_slice(&ends.destination);
        let length = GRH_LEN + datagram.len();
        // Around the packet there are at most 64 bytes, and the comment.
        let block = length + 64 + comment.len().next_multiple_of(4);
        if self.written + (self.out.len() + block) as u64 > self.limit {
            return;
        }
        let packet = Packet {
            interface: 0,
            time,
            bytes: (&header, datagram),
            length: length as u32,
            inbound: !outgoing,
            comment: &comment,
        };
        pcapng::packet(&mut self.out, &packet);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_datagram_has_a_route_header_with_its_sender() {
        let interface = Interface {
            name: "ib0".into(),
            description: String::new(),
            application: "test".into(),
        };
        let mut capture = IpoibCapture::new(&interface, 1000);
        let begun = capture.take_output();
        let at = begun.windows(4).position(|bytes| bytes == [242, 0, 0, 0]);
        assert!(at.is_some(), "LINKTYPE_IPOIB");
        let ends = IpoibEnds {
            source: [1; 16],
            source_qpn: 0x0a_0b0c,
            destination: [2; 16],
            destination_qpn: 7,
        };
        let mark = Mark { traffic_class: 0x68, service_level: 3, lane: None };
        capture.passed(Duration::ZERO, Some(mark), &ends, b"\x08\x00\0\0rest");
        let out = capture.take_output();
        let packet = &out[28..];
        assert_eq!(packet[..8], [0x66, 0x80, 0, 0, 0, 0x0a, 0x0b, 0x0c]);
        let comment = b"QP 0x0a0b0c to 0x000007, SL 3: IPoIB";
        assert!(out.windows(comment.len()).any(|bytes| bytes == comment));
        assert_eq!(packet[8..40], [[1; 16], [2; 16]].concat());
        assert_eq!(&packet[40..48], b"\x08\x00\0\0rest");
        for _ in 0..100 {
            capture.passed(Duration::ZERO, None, &ends, &[0; 50]);
        }
        assert!(begun.len() + out.len() + capture.take_output().len() <= 1000);
    }
}
