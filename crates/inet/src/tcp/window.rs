//! Windows: what the peer lets us send, and what we let the peer (RFC 9293 3.8.6, RFC 7323 2).

/// The peer's window, as far as one knows.
#[derive(Clone, Debug, Default)]
pub(crate) struct SendWindow {
    /// SND.UNA + SND.WND.
    pub(crate) edge: u64,
    /// SND.WL1 and SND.WL2: the position and the acknowledgement of the segment that said so.
    from: (u64, u64),
    /// The largest window ever offered (RFC 9293 3.8.6.2.1, RFC 5961 5).
    pub(crate) max: u64,
}

impl SendWindow {
    /// Takes the window of an acceptable segment (RFC 9293 3.10.7.4); says whether the window changed.
    pub(crate) fn update(&mut self, position: u64, ack: u64, window: u64) -> bool {
        self.max = self.max.max(window);
        if self.from.0 > position || (self.from.0 == position && self.from.1 > ack) {
            return false;
        }
        self.from = (position, ack);
        // The edge may move left: that is discouraged, but the sender must be prepared (MUST-34).
        let edge = ack + window;
        let changed = edge != self.edge;
        self.edge = edge;
        changed
    }

    /// What may be sent from `nxt` on; none if the window has shrunk behind it.
    #[inline]
    pub(crate) fn usable(&self, nxt: u64) -> u64 {
        self.edge.saturating_sub(nxt)
    }
}

/// The window offered: what the user has posted to receive.
#[derive(Clone, Debug, Default)]
pub(crate) struct ReceiveWindow {
    /// Behind the last octet for which there is room.
    room: u64,
    /// Behind the last octet that was ever offered. It never moves left (RFC 9293 3.8.6, SHLD-14).
    offered: u64,
    /// Octets behind the room that the user keeps elsewhere, if they come in order and were offered.
    spare: u32,
    pub(crate) scale: u8,
    /// Message mode: what is waited for may be as long as all of the room, and comes whole or not at all. So
    /// all of it is offered, in units that are rounded up.
    pub(crate) whole: bool,
}

impl ReceiveWindow {
    /// The user has room for `bytes` octets from `nxt` on.
    pub(crate) fn set_room(&mut self, nxt: u64, bytes: u64) {
        self.room = nxt + bytes;
    }

    /// The user keeps `bytes` octets behind the room.
    pub(crate) fn set_spare(&mut self, bytes: u32) {
        self.spare = bytes;
    }

    pub(crate) fn spare(&self) -> u32 {
        self.spare
    }

    /// Behind the last octet that is taken, in order or behind a gap, of those that were offered.
    pub(crate) fn limit(&self, in_order: bool) -> u64 {
        self.room + if in_order { u64::from(self.spare) } else { 0 }
    }

    /// Behind the last octet that the peer may send, and that counts as in the window (RFC 7323 2.4).
    #[inline]
    pub(crate) fn edge(&self, nxt: u64) -> u64 {
        self.offered.max(nxt)
    }

    /// Where the edge may be moved to. It moves by a segment, or by half of the room, or not at all (RFC 9293
    /// 3.8.6.2.2, MUST-39: no silly windows).
    fn target(&self, nxt: u64, mss: u64) -> u64 {
        let edge = self.edge(nxt);
        let (room, more) = (self.room.saturating_sub(nxt), self.room.saturating_sub(edge));
        if self.whole || more >= mss.min(room.div_ceil(2)) { self.room.max(edge) } else { edge }
    }

    /// The field for a segment that goes out now, which the peer will take as an offer.
    pub(crate) fn offer(&mut self, nxt: u64, mss: u64, syn: bool) -> u16 {
        let window = self.target(nxt, mss) - nxt;
        // RFC 7323 2.2: the window of a SYN is never scaled.
        let scale = if syn { 0 } else { self.scale };
        // Room for less than a unit of the scale is offered as one: the peer would otherwise never fill it.
        // What comes beyond the room is cut off. (RFC 7323 2.4 allows rounding; it says nothing of its
        // direction.)
        let least = u64::from(window > 0);
        let units = if self.whole { window.div_ceil(1 << scale) } else { window >> scale };
        let field = units.clamp(least, u64::from(u16::MAX));
        self.offered = self.offered.max(nxt + (field << scale));
        field as u16
    }

    /// Whether the peer should be told of room at once: it may be waiting, and two segments are worth a word.
    pub(crate) fn wants_update(&self, nxt: u64, mss: u64) -> bool {
        let (target, edge) = (self.target(nxt, mss), self.edge(nxt));
        let (gain, left) = (target - edge, edge - nxt);
        let largest = u64::from(u16::MAX) << self.scale;
        let unheard = left > 0 && gain >> self.scale == 0 && !self.whole;
        if left >= largest || gain == 0 || unheard {
            return false;
        }
        gain >= 2 * mss || left < mss || gain >= left
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_offered_window_never_shrinks() {
        let mut window = ReceiveWindow::default();
        window.set_room(1, 10_000);
        assert_eq!(window.offer(1, 1_000, false), 10_000);
        window.set_room(1, 2_000);
        assert_eq!(window.offer(1, 1_000, false), 10_000);
        assert_eq!(window.offer(3_001, 1_000, false), 7_000);
        window.set_room(10_001, 0);
        assert_eq!(window.offer(10_001, 1_000, false), 0);
    }

    #[test]
    fn no_silly_windows() {
        let mut window = ReceiveWindow::default();
        window.set_room(1, 10_000);
        window.offer(1, 1_000, false);
        window.set_room(10_001, 10);
        assert_eq!(window.offer(10_001, 1_000, false), 10, "all that there is may be offered");
        window.set_room(10_001, 400);
        assert_eq!(window.offer(10_001, 1_000, false), 400, "more than half of the room");
        window.set_room(10_001, 500);
        assert_eq!(window.offer(10_001, 1_000, false), 400);
        window.set_room(10_001, 1_400);
        assert_eq!(window.offer(10_001, 1_000, false), 1_400);
    }

    #[test]
    fn where_messages_are_whole_all_of_the_room_is_offered() {
        let mut window = ReceiveWindow { scale: 7, whole: true, ..Default::default() };
        window.set_room(1, 1_400);
        assert_eq!(window.offer(1, 1_460, false), 11);
        window.set_room(101, 1_400);
        assert!(window.wants_update(101, 1_460), "a message may wait for the last octets");
        assert_eq!(window.offer(101, 1_460, false), 11);
        window.set_room(101, 10);
        assert_eq!(window.offer(101, 1_460, false), 11, "nothing is taken back");
    }

    #[test]
    fn a_scaled_window_and_that_of_a_syn() {
        let mut window = ReceiveWindow { scale: 7, ..Default::default() };
        window.set_room(1, 1 << 20);
        assert_eq!(window.offer(1, 1_460, true), u16::MAX);
        assert_eq!(window.offer(1, 1_460, false), (1 << 20 >> 7) as u16);
        assert_eq!(window.edge(1), 1 + (1 << 20));
        let mut small = ReceiveWindow { scale: 7, ..Default::default() };
        small.set_room(1, 64);
        assert_eq!((small.offer(1, 1_460, false), small.limit(true)), (1, 65));
    }

    #[test]
    fn news_of_the_window_must_not_be_older_than_what_is_known() {
        let mut window = SendWindow::default();
        assert!(window.update(5, 10, 100));
        assert!(!window.update(4, 20, 500), "an older segment");
        assert!(!window.update(5, 9, 500), "an older acknowledgement");
        assert!(window.update(5, 10, 40), "MUST-34: it may shrink");
        assert_eq!((window.edge, window.max, window.usable(60)), (50, 500, 0));
    }
}
