//! What a stack has seen and done.

/// Counters since the stack was made. Every frame that is dropped is counted under its reason.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Frames from the link.
    pub received: u64,
    /// Frames to the link, datagrams included.
    pub sent: u64,
    /// Frames of the stack's own for the stack itself.
    pub looped: u64,
    /// Frames with nothing in them that this stack speaks, or for another station.
    pub other: u64,
    /// Packets whose IP header is not legal.
    pub malformed: u64,
    /// Packets from or to addresses that cannot be (RFC 1122 3.2.1.3, RFC 6890).
    pub martians: u64,
    /// Packets for other hosts.
    pub not_ours: u64,
    /// Fragments that could not be used.
    pub fragments: u64,
    /// Packets of a protocol above IP that this stack does not speak.
    pub unknown_protocol: u64,
    /// Segments and datagrams with a wrong checksum, or without one where there must be one.
    pub checksum: u64,
    /// Segments with a header that is not legal.
    pub tcp_malformed: u64,
    /// Segments that belong to no connection.
    pub tcp_unknown: u64,
    /// Resets sent for those.
    pub tcp_resets: u64,
    /// SYNs answered by a cookie.
    pub tcp_cookies: u64,
    /// SYNs, and acknowledgements of cookies, that met nobody to talk to, and were dropped;
    pub tcp_waiting: u64,
    /// that were held until somebody would be there,
    pub tcp_held: u64,
    /// and of those, that were answered,
    pub tcp_late: u64,
    /// or were not: nobody came in time, or they were reset or replaced by their senders. The others wait.
    pub tcp_given_up: u64,
    /// SYNs, and acknowledgements of cookies, for which there was no room for a connection.
    pub tcp_full: u64,
    /// Segments of connections that were dropped, or a part of them. They came again, or were outside of the
    /// window (RFC 9293 3.10.7.4),
    pub tcp_outside: u64,
    /// were older than the last timestamp (RFC 7323 5),
    pub tcp_old: u64,
    /// had an acknowledgement that cannot be, or none (RFC 5961 5),
    pub tcp_bad_ack: u64,
    /// came in the offered window, where there is no receive any more,
    pub tcp_no_room: u64,
    /// or behind a gap, and could not be kept.
    pub tcp_not_kept: u64,
    /// Connections that were opened by a peer.
    pub tcp_accepted: u64,
    /// Connections in TIME-WAIT that have given way to a new one.
    pub tcp_reused: u64,
    /// Segments that were not sent, as nobody was found at their next hop.
    pub tcp_unreachable: u64,
    /// Datagrams with a length that is not legal.
    pub udp_malformed: u64,
    /// Datagrams to a port that nobody has bound.
    pub udp_unknown: u64,
    /// Answers that there was no room to keep.
    pub answers_dropped: u64,
    /// Events, of no connection, that nobody has fetched.
    pub notices_dropped: u64,
}

impl Counters {
    /// Adds what a connection has dropped between two looks at it ([`crate::tcp::Counters::drops`]).
    pub(super) fn note_drops(&mut self, before: [u32; 5], after: [u32; 5]) {
        let kinds = [
            &mut self.tcp_outside,
            &mut self.tcp_old,
            &mut self.tcp_bad_ack,
            &mut self.tcp_no_room,
            &mut self.tcp_not_kept,
        ];
        for (kind, (before, after)) in kinds.into_iter().zip(before.into_iter().zip(after)) {
            *kind += u64::from(after.wrapping_sub(before));
        }
    }
}
