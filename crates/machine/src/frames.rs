//! Frames on the network: headers as the TCP made them, payload as a length.

use quipu_wire::tcp::Repr;

/// Ethernet and IPv4 headers.
pub(crate) const BELOW_TCP: u64 = 14 + 20;
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
    /// Its number in the run, from 1.
    pub(crate) number: u64,
}

impl Frame {
    /// Bytes of all headers.
    pub(crate) fn header_len(&self) -> u64 {
        BELOW_TCP + self.header.header_len() as u64
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
    use super::*;

    #[test]
    fn a_place_is_used_again_but_not_a_number() {
        let mut frames = Frames::default();
        let frame = Frame { to: 1, conn: 0, header: Repr::default(), len: 1460, number: 0 };
        let first = frames.insert(frame.clone());
        assert_eq!(frames.get(first).map(Frame::bytes), Some(1514));
        assert!(frames.remove(first).is_some() && frames.remove(first).is_none());
        let second = frames.insert(Frame { len: 0, ..frame });
        assert_eq!((first, frames.get(second).unwrap().number), (second, 2));
        assert_eq!(frames.get(second).map(Frame::bytes), Some(60));
    }
}
