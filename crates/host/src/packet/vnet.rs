//! The header before a frame that goes to or comes from the kernel: `struct virtio_net_hdr`
//! (linux/virtio_net.h; Virtio 1.3, 5.1.6), ten octets in the order of the processor.

use super::aligned::STEP;
use super::queue::Queue;
use super::{ETHERNET, Outgoing, tag};

/// Its length.
pub(super) const LEN: usize = 10;
/// The longest frame: the largest IP packet, Ethernet with a tag, and the header before them.
pub(super) const LONGEST: usize = LEN + ETHERNET + tag::LEN + 65_535;
/// Room for one, of slots that begin alike.
pub(super) const SLOT: usize = LONGEST.next_multiple_of(STEP);

const NEEDS_CSUM: u8 = 1;
const DATA_VALID: u8 = 2;
const GSO_TCP4: u8 = 1;
const GSO_TCP6: u8 = 4;
const GSO_UDP: u8 = 5;
const GSO_ECN: u8 = 0x80;

/// Where a TCP header says its length, and its flags.
const TCP_OFFSET: usize = 12;
const TCP_FLAGS: usize = 13;
const TCP_CWR: u8 = 0x80;

/// What came before a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Header {
    /// The checksums of TCP and UDP need not be looked at: the frame has not been on a wire yet, or somebody
    /// has verified it.
    pub(super) checked: bool,
    /// The frame is a train of UDP datagrams, with so much payload each but the last.
    pub(super) datagrams: Option<u16>,
    /// Where the transport header begins; none: nobody says, as the checksum is not to be filled in (Virtio
    /// 1.3, 5.1.6.4.1).
    pub(super) start: Option<usize>,
}

impl Header {
    /// Reads the header at the front of what the kernel gave.
    pub(super) fn read(bytes: &[u8; LEN]) -> Self {
        let word = |at: usize| u16::from_ne_bytes([bytes[at], bytes[at + 1]]);
        let (flags, kind) = (bytes[0], bytes[1] & !GSO_ECN);
        Self {
            checked: flags & (NEEDS_CSUM | DATA_VALID) != 0,
            datagrams: (kind == GSO_UDP).then(|| word(4)),
            start: (flags & NEEDS_CSUM != 0).then(|| word(6).into()),
        }
    }
}

/// Trains of more than 64 KiB that have come, which nothing here takes.
#[derive(Debug, Default)]
pub(super) struct TooLong {
    pub(super) lost: u64,
}

impl TooLong {
    /// One more; the first is said, as connections go on by what is sent again alone.
    #[cold]
    pub(super) fn lose(&mut self) {
        if self.lost == 0 {
            tracing::warn!(
                "the link delivers coalesced segments of more than 64 KiB (BIG TCP), which are \
                 lost: set gso_max_size, gro_max_size, gso_ipv4_max_size and gro_ipv4_max_size \
                 of the interfaces to 65536"
            );
        }
        self.lost += 1;
    }
}

/// Room in a queue of slots of [`LONGEST`] octets for the next frame, after its header. On a link with a
/// `vlan`, a tag still has to go into the frame.
pub(super) fn free(waiting: &mut Queue<usize>, vlan: Option<u16>) -> Option<&mut [u8]> {
    waiting.free().map(|slot| &mut slot[LEN + room(vlan)..][..ETHERNET + 65_535])
}

/// Octets of the tags of a link.
fn room(vlan: Option<u16>) -> usize {
    vlan.map_or(0, |_| tag::LEN)
}

/// Puts the frame that was written there into the queue, with its header, and on a link with a `vlan` with
/// its tag.
pub(super) fn push(waiting: &mut Queue<usize>, frame: &Outgoing, vlan: Option<u16>) {
    let Some(slot) = waiting.free() else { return };
    let len = frame.len + room(vlan);
    if let Some((header, bytes)) = slot.split_first_chunk_mut() {
        if let Some(vlan) = vlan {
            tag::insert(bytes, tag::control(vlan, frame.priority));
        }
        write(header, &bytes[..len], frame, room(vlan));
    }
    waiting.push(LEN + len);
}

/// Writes the header for an Ethernet frame, which has `tag` octets of tags since the checksum was placed.
fn write(out: &mut [u8; LEN], frame: &[u8], outgoing: &Outgoing, tag: usize) {
    *out = [0; LEN];
    let Some(checksum) = outgoing.checksum else { return };
    out[0] = NEEDS_CSUM;
    let tcp = usize::from(checksum.start) + tag;
    out[6..8].copy_from_slice(&(tcp as u16).to_ne_bytes());
    out[8..10].copy_from_slice(&checksum.at.saturating_sub(checksum.start).to_ne_bytes());
    if let Some(size) = outgoing.segment
        && let Some(&[offset, flags]) = frame.get(tcp + TCP_OFFSET..=tcp + TCP_FLAGS)
    {
        let headers = tcp + usize::from(offset >> 4) * 4;
        if frame.len() <= headers + usize::from(size) {
            return;
        }
        let ip6 = frame.get(ETHERNET + tag).is_some_and(|version| version >> 4 == 6);
        let ecn = if flags & TCP_CWR != 0 { GSO_ECN } else { 0 };
        out[1] = if ip6 { GSO_TCP6 } else { GSO_TCP4 } | ecn;
        out[2..4].copy_from_slice(&(headers as u16).to_ne_bytes());
        out[4..6].copy_from_slice(&size.to_ne_bytes());
    }
}

#[cfg(test)]
mod tests {
    use super::super::Checksum;
    use super::*;

    /// An Ethernet frame with a TCP header of 32 octets behind an IP header, and payload.
    fn frame(version: u8, payload: usize) -> (Vec<u8>, Checksum) {
        let start = ETHERNET + if version == 4 { 20 } else { 40 };
        let mut frame = vec![0; start + 32 + payload];
        frame[ETHERNET] = version << 4 | 5;
        frame[start + TCP_OFFSET] = 8 << 4;
        (frame, Checksum { start: start as u16, at: start as u16 + 16 })
    }

    fn header(frame: &[u8], checksum: Option<Checksum>, segment: Option<u16>) -> [u16; 5] {
        let mut out = [0xff; LEN];
        let outgoing = Outgoing { len: frame.len(), checksum, segment, priority: 0 };
        write(&mut out, frame, &outgoing, 0);
        std::array::from_fn(|i| match i {
            0 => u16::from_be_bytes([out[0], out[1]]),
            _ => u16::from_ne_bytes([out[2 * i], out[2 * i + 1]]),
        })
    }

    #[test]
    fn what_the_kernel_is_asked_for() {
        let (tcp4, at4) = frame(4, 3000);
        let (mut tcp6, at6) = frame(6, 3000);
        assert_eq!(header(&tcp4, None, None), [0; 5]);
        assert_eq!(header(&tcp4, Some(at4), None), [0x0100, 0, 0, 34, 16]);
        assert_eq!(header(&tcp4, Some(at4), Some(1400)), [0x0101, 66, 1400, 34, 16]);
        assert_eq!(header(&tcp6, Some(at6), Some(1400)), [0x0104, 86, 1400, 54, 16]);
        tcp6[54 + TCP_FLAGS] = TCP_CWR;
        assert_eq!(header(&tcp6, Some(at6), Some(1400)), [0x0184, 86, 1400, 54, 16]);
        let (short, at) = frame(6, 1400);
        assert_eq!(header(&short, Some(at), Some(1400)), [0x0100, 0, 0, 54, 16], "one segment");
        assert_eq!(header(&short[..60], Some(at), Some(1)), [0x0100, 0, 0, 54, 16], "no header");
    }

    #[test]
    fn a_tag_moves_what_the_kernel_is_asked_for() {
        let (tcp6, at) = frame(6, 3000);
        let mut waiting = Queue::new(1, LONGEST);
        let slot = free(&mut waiting, Some(7)).unwrap();
        slot[..tcp6.len()].copy_from_slice(&tcp6);
        let (len, checksum, segment) = (tcp6.len(), Some(at), Some(1400));
        push(&mut waiting, &Outgoing { len, checksum, segment, priority: 3 }, Some(7));
        let (slot, len) = waiting.get(0).unwrap();
        assert_eq!(len, LEN + tcp6.len() + tag::LEN);
        let word = |at: usize| u16::from_ne_bytes([slot[at], slot[at + 1]]);
        assert_eq!((slot[..2].to_vec(), [2, 4, 6, 8].map(word)), (vec![1, 4], [90, 1400, 58, 16]));
        assert_eq!(slot[LEN + 12..LEN + 16], [0x81, 0, 0x60, 7]);
        assert_eq!(slot[LEN + 16..len], tcp6[12..]);
    }

    #[test]
    fn what_the_kernel_says() {
        let read = |flags, kind, size: u16, start: u16| {
            let mut bytes = [0; LEN];
            bytes[..2].copy_from_slice(&[flags, kind]);
            bytes[4..6].copy_from_slice(&size.to_ne_bytes());
            bytes[6..8].copy_from_slice(&start.to_ne_bytes());
            Header::read(&bytes)
        };
        assert_eq!(read(0, 0, 0, 0), Header { checked: false, datagrams: None, start: None });
        assert!(read(DATA_VALID, 0, 0, 0).checked);
        let tcp = Header { checked: true, datagrams: None, start: Some(54) };
        assert_eq!(read(NEEDS_CSUM, GSO_TCP6 | GSO_ECN, 1400, 54), tcp);
        let udp = Header { checked: true, datagrams: Some(1400), start: Some(34) };
        assert_eq!(read(NEEDS_CSUM, GSO_UDP, 1400, 34), udp);
        let joined = Header { start: None, ..udp };
        assert_eq!(read(DATA_VALID, GSO_UDP, 1400, 0), joined);
    }
}
