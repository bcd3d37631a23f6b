//! The blocks of a pcapng file (draft-ietf-opsawg-pcapng): one section, interfaces, packets.

use std::time::Duration;

/// What the packets of an interface begin with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LinkType {
    /// An Ethernet header (LINKTYPE_ETHERNET).
    Ethernet = 1,
    /// An IPv4 or IPv6 header (LINKTYPE_RAW).
    Raw = 101,
    /// A global route header and the encapsulation header of IP over InfiniBand (LINKTYPE_IPOIB).
    Ipoib = 242,
}

const SECTION: u32 = 0x0a0d_0d0a;
const INTERFACE: u32 = 1;
const ENHANCED_PACKET: u32 = 6;
const BYTE_ORDER: u32 = 0x1a2b_3c4d;

/// Options of blocks: each has a code of its own block's, but comments.
mod option {
    pub(super) const END: u16 = 0;
    pub(super) const COMMENT: u16 = 1;
    pub(super) const SECTION_APPLICATION: u16 = 4;
    pub(super) const INTERFACE_NAME: u16 = 2;
    pub(super) const INTERFACE_DESCRIPTION: u16 = 3;
    pub(super) const INTERFACE_RESOLUTION: u16 = 9;
    pub(super) const PACKET_FLAGS: u16 = 2;
}

/// What the file says of where its packets come from.
#[derive(Clone, Debug)]
pub struct Interface {
    /// Name of the device.
    pub name: String,
    /// What it belongs to: program, process, address.
    pub description: String,
    /// Name and version of the writer.
    pub application: String,
}

/// One packet.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Packet<'a> {
    /// Which of the interfaces, in the order of their blocks.
    pub(crate) interface: u32,
    /// Since the epoch of UNIX.
    pub(crate) time: Duration,
    /// The bytes that the file has of it, in two pieces.
    pub(crate) bytes: (&'a [u8], &'a [u8]),
    /// How many it had.
    pub(crate) length: u32,
    /// Whether it came in; else it went out.
    pub(crate) inbound: bool,
    pub(crate) comment: &'a str,
}

/// Writes a block: type, length, body, length.
fn block(out: &mut Vec<u8>, kind: u32, body: impl FnOnce(&mut Vec<u8>)) {
    let start = out.len();
    out.extend_from_slice(&kind.to_le_bytes());
    out.extend_from_slice(&[0; 4]);
    body(out);
    let length = ((out.len() - start + 4) as u32).to_le_bytes();
    out.extend_from_slice(&length);
    out[start + 4..start + 8].copy_from_slice(&length);
}

fn pad(out: &mut Vec<u8>, length: usize) {
    out.extend_from_slice(&[0; 3][..length.next_multiple_of(4) - length]);
}

fn put_option(out: &mut Vec<u8>, code: u16, value: &[u8]) {
    let value = &value[..value.len().min(usize::from(u16::MAX) & !3)];
    out.extend_from_slice(&code.to_le_bytes());
    out.extend_from_slice(&(value.len() as u16).to_le_bytes());
    out.extend_from_slice(value);
    pad(out, value.len());
}

/// Begins a file: the section and its first interface. `snaplen` 0: packets are whole.
pub(crate) fn begin(out: &mut Vec<u8>, first: &Interface, snaplen: u32) {
    begin_as(out, first, LinkType::Raw, snaplen);
}

/// As [`begin`], with the link type of that interface.
pub(crate) fn begin_as(out: &mut Vec<u8>, first: &Interface, kind: LinkType, snaplen: u32) {
    block(out, SECTION, |out| {
        out.extend_from_slice(&BYTE_ORDER.to_le_bytes());
        out.extend_from_slice(&1u16.to_le_bytes());
        out.extend_from_slice(&0u16.to_le_bytes());
        // The length of the section is not known.
        out.extend_from_slice(&u64::MAX.to_le_bytes());
        put_option(out, option::SECTION_APPLICATION, first.application.as_bytes());
        put_option(out, option::END, &[]);
    });
    interface(out, kind, (&first.name, &first.description), snaplen);
}

/// Adds an interface, with its name and description.
pub(crate) fn interface(
    out: &mut Vec<u8>,
    kind: LinkType,
    (name, description): (&str, &str),
    snaplen: u32,
) {
    block(out, INTERFACE, |out| {
        out.extend_from_slice(&(kind as u16).to_le_bytes());
        out.extend_from_slice(&[0; 2]);
        out.extend_from_slice(&snaplen.to_le_bytes());
        put_option(out, option::INTERFACE_NAME, name.as_bytes());
        put_option(out, option::INTERFACE_DESCRIPTION, description.as_bytes());
        // Times are in units of 10^-9 seconds.
        put_option(out, option::INTERFACE_RESOLUTION, &[9]);
        put_option(out, option::END, &[]);
    });
}

/// Adds a packet.
pub(crate) fn packet(out: &mut Vec<u8>, packet: &Packet<'_>) {
    let time = packet.time.as_nanos() as u64;
    let captured = packet.bytes.0.len() + packet.bytes.1.len();
    block(out, ENHANCED_PACKET, |out| {
        out.extend_from_slice(&packet.interface.to_le_bytes());
        out.extend_from_slice(&((time >> 32) as u32).to_le_bytes());
        out.extend_from_slice(&(time as u32).to_le_bytes());
        out.extend_from_slice(&(captured as u32).to_le_bytes());
        out.extend_from_slice(&packet.length.to_le_bytes());
        out.extend_from_slice(packet.bytes.0);
        out.extend_from_slice(packet.bytes.1);
        pad(out, captured);
        let flags = if packet.inbound { 1u32 } else { 2 };
        put_option(out, option::PACKET_FLAGS, &flags.to_le_bytes());
        if !packet.comment.is_empty() {
            put_option(out, option::COMMENT, packet.comment.as_bytes());
        }
        put_option(out, option::END, &[]);
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    fn u32_at(bytes: &[u8], at: usize) -> u32 {
        u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap())
    }

    #[test]
    fn blocks_say_their_length_twice_and_are_aligned() {
        let mut out = Vec::new();
        let interface = Interface {
            name: "quipu0".into(),
            description: "x".into(),
            application: "quipu".into(),
        };
        begin(&mut out, &interface, 0);
        let packet_at = out.len();
        let time = Duration::new(1_700_000_000, 123_456_789);
        let bytes = (&b"abc"[..], &b"de"[..]);
        let said = Packet { interface: 0, time, bytes, length: 9, inbound: true, comment: "why" };
        packet(&mut out, &said);
        let link_at = out.len();
        super::interface(&mut out, LinkType::Ethernet, ("tap:qp0", "x"), 0);
        let frame_at = out.len();
        packet(&mut out, &Packet { interface: 1, comment: "", ..said });
        let mut at = 0;
        let mut kinds = Vec::new();
        while at < out.len() {
            let length = u32_at(&out, at + 4) as usize;
            assert!(length.is_multiple_of(4));
            assert_eq!(u32_at(&out, at + length - 4) as usize, length);
            kinds.push(u32_at(&out, at));
            at += length;
        }
        assert_eq!(kinds, [SECTION, INTERFACE, ENHANCED_PACKET, INTERFACE, ENHANCED_PACKET]);
        assert_eq!([u32_at(&out, packet_at + 8), u32_at(&out, frame_at + 8)], [0, 1]);
        assert_eq!(out[link_at + 8..link_at + 10], [1, 0], "LINKTYPE_ETHERNET");
        let time =
            u64::from(u32_at(&out, packet_at + 12)) << 32 | u64::from(u32_at(&out, packet_at + 16));
        assert_eq!(time, 1_700_000_000_123_456_789);
        assert_eq!((u32_at(&out, packet_at + 20), u32_at(&out, packet_at + 24)), (5, 9));
        assert_eq!(&out[packet_at + 28..packet_at + 33], b"abcde");
    }
}
