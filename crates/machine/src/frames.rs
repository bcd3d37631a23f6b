//! Frames on the network: headers as the TCP made them, payload as a length.

use quipu_wire::tcp::{Flags, Repr};

/// Ethernet and IPv4 headers.
pub(crate) const BELOW_TCP: u64 = ETHERNET + 20;
/// Of them Ethernet's header.
pub(crate) const ETHERNET: u64 = 14;
/// The shortest Ethernet frame, without its checksum.
const SHORTEST: u64 = 60;

/// Names a frame that is under way. Memory holds the name plus 1 where the frame's bytes would begin.
pub(crate) type FrameId = u32;

/// A frame.
#[derive(Clone, Debug)]
pub(crate) struct Frame {
    /// The host that it goes to.
    pub(crate) to: u16,
    /// The connection it belongs to.
    pub(crate) conn: u32,
    /// The TCP header.
    pub(crate) header: Repr,
    /// Bytes of payload.
    pub(crate) len: u32,
    /// Payload of each frame that the NIC cuts this one into; 0: it is not to be cut.
    pub(crate) cut: u16,
    /// Its number in the run, from 1.
    pub(crate) number: u64,
}

impl Frame {
    /// Bytes of all headers.
    pub(crate) fn header_len(&self) -> u64 {
        BELOW_TCP + self.header.header_len() as u64
    }

    /// The frames that a NIC makes of this one (TSO): sequence numbers go on, and PSH and FIN belong to the
    /// last.
    pub(crate) fn cuts(&self) -> Vec<Frame> {
        let size = u32::from(self.cut);
        if size == 0 || self.len <= size {
            return vec![Frame { cut: 0, ..self.clone() }];
        }
        let last = (self.len - 1) / size;
        let cut = |index: u32| {
            let mut header = self.header;
            header.seq.0 = header.seq.0.wrapping_add(index * size);
            if index < last {
                header.flags = Flags::ACK;
            }
            let len = size.min(self.len - index * size);
            Frame { header, len, cut: 0, ..self.clone() }
        };
        (0..=last).map(cut).collect()
    }

    /// Bytes of the frame, checksum excluded.
    pub(crate) fn bytes(&self) -> u64 {
        (self.header_len() + u64::from(self.len)).max(SHORTEST)
    }
}

/// The frames that are under way.
#[derive(Debug, Default)]
pub(crate) struct Frames {
    places: Vec<Option<Frame>>,
    free: Vec<FrameId>,
    made: u64,
}

impl Frames {
    /// Keeps a frame and gives it its number.
    pub(crate) fn insert(&mut self, mut frame: Frame) -> FrameId {
        self.made += 1;
        frame.number = self.made;
        if let Some(id) = self.free.pop() {
            self.places[id as usize] = Some(frame);
            return id;
        }
        self.places.push(Some(frame));
        (self.places.len() - 1) as FrameId
    }

    /// Keeps a frame that had a number already; 0: it gets a new one.
    pub(crate) fn put_back(&mut self, frame: Frame, number: u64) -> FrameId {
        let made = self.made;
        let id = self.insert(frame);
        if number > 0 {
            self.made = made;
            if let Some(Some(frame)) = self.places.get_mut(id as usize) {
                frame.number = number;
            }
        }
        id
    }

    /// A frame that is under way.
    pub(crate) fn get(&self, id: FrameId) -> Option<&Frame> {
        self.places.get(id as usize)?.as_ref()
    }

    /// Takes a frame away.
    pub(crate) fn remove(&mut self, id: FrameId) -> Option<Frame> {
        let frame = self.places.get_mut(id as usize)?.take()?;
        self.free.push(id);
        Some(frame)
    }
}

#[cfg(test)]
mod tests {
    use quipu_wire::tcp::SeqNumber;

    use super::*;

    #[test]
    fn a_place_is_used_again_but_not_a_number() {
        let mut frames = Frames::default();
        let frame = Frame { to: 1, conn: 0, header: Repr::default(), len: 1460, cut: 0, number: 0 };
        let first = frames.insert(frame.clone());
        assert_eq!(frames.get(first).map(Frame::bytes), Some(1514));
        assert!(frames.remove(first).is_some() && frames.remove(first).is_none());
        let second = frames.insert(Frame { len: 0, ..frame });
        assert_eq!((first, frames.get(second).unwrap().number), (second, 2));
        assert_eq!(frames.get(second).map(Frame::bytes), Some(60));
    }

    #[test]
    fn a_large_segment_is_cut_and_only_the_last_part_pushes() {
        let flags = Flags::ACK | Flags::PSH;
        let header = Repr { flags, seq: SeqNumber(u32::MAX), ..Repr::default() };
        let frame = Frame { to: 1, conn: 0, header, len: 3000, cut: 1448, number: 0 };
        let cuts = frame.cuts();
        let lens: Vec<u32> = cuts.iter().map(|cut| cut.len).collect();
        assert_eq!(lens, [1448, 1448, 104]);
        assert_eq!(cuts[1].header.seq, SeqNumber(1447));
        let pushes: Vec<bool> = cuts.iter().map(|cut| cut.header.flags.has(Flags::PSH)).collect();
        assert_eq!(pushes, [false, false, true]);
    }
}
