//! What a connection can be told.

/// Nanoseconds.
pub const MILLISECOND: u64 = 1_000_000;
/// Nanoseconds.
pub const SECOND: u64 = 1_000 * MILLISECOND;

/// What a segment of the peer means to the user.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Mode {
    /// Boundaries mean nothing: the peer may be any socket. PSH only completes a receive early.
    #[default]
    Stream,
    /// A message is a segment, or several of which the last has PSH (`specs/qpip.md`).
    Message,
}

/// Probing of an idle peer (RFC 9293 3.8.4).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KeepAlive {
    /// How long nothing has come before the first probe; two hours or more, unless the user wants otherwise.
    pub idle: u64,
    /// From probe to probe.
    pub interval: u64,
    /// After so many probes without an answer the connection is dead; a single one must not decide that
    /// (MUST-29).
    pub probes: u8,
}

/// The parameters of a connection. Times are in nanoseconds, sizes in octets.
#[derive(Clone, Copy, Debug)]
pub struct Config {
    /// What segments mean.
    pub mode: Mode,
    /// In stream mode: segments that are sent end where [`super::Connection::send`] says that something ends,
    /// as those of messages do. What comes is a stream all the same. So the frames of a protocol above can
    /// be kept in segments of their own (RFC 5044 5).
    pub aligned: bool,
    /// The largest payload that this end can receive in a segment: what is offered in the MSS option
    /// (RFC 9293 3.7.1), the link's MTU less fixed headers.
    pub receive_mss: u16,
    /// The largest payload, options included, that the path to the peer takes so far (RFC 9293 3.7.5);
    /// without path MTU discovery at most 1220 (IPv6) or 536 (IPv4).
    pub path_mss: u16,
    /// The most that can ever be posted to receive: decides on the window scale (RFC 7323 2.2).
    pub max_receive_space: u64,
    /// Time to live, or hop limit, of what is sent (RFC 9293 3.9.2, MUST-49); none: what the link's routers
    /// recommend, or 64.
    pub hop_limit: Option<u8>,
    /// Differentiated Services of what is sent (RFC 9293 3.9.2, MUST-48): the upper six bits; the lower two
    /// are those of ECN.
    pub traffic_class: u8,
    /// Offer timestamps (RFC 7323 3).
    pub timestamps: bool,
    /// Offer SACK (RFC 2018).
    pub sack: bool,
    /// Offer ECN (RFC 3168).
    pub ecn: bool,
    /// Hold small segments back while data is unacknowledged (RFC 9293 3.7.4), in stream mode only.
    pub nagle: bool,
    /// Spread segments over the round trip.
    pub pacing: bool,
    /// How long an acknowledgement may wait; at most half a second (RFC 9293 3.8.6.3). Zero: no longer than
    /// until the next [`super::Connection::poll_transmit`].
    pub ack_delay: u64,
    /// The retransmission timeout before anything was measured (RFC 6298 2.1).
    pub initial_rto: u64,
    /// Its least margin above the smoothed round trip (RFC 6298 2.4 has a second for the whole; see
    /// `specs/deviations.md`).
    pub min_rto: u64,
    /// Its greatest value, at least a minute (RFC 6298 2.5).
    pub max_rto: u64,
    /// How long data, or a FIN, may go unacknowledged before the connection is given up (RFC 9293 3.8.3, R2
    /// and
    /// 3.9.1.1): at least 100 s there.
    pub user_timeout: u64,
    /// The same for the FIN of a connection that nobody has any more: a peer that says nothing must not keep
    /// its place for as long as one that somebody waits for.
    pub orphan_timeout: u64,
    /// The same for a SYN: at least three minutes (MUST-23).
    pub connect_timeout: u64,
    /// 2 MSL (RFC 9293 3.4.2).
    pub time_wait: u64,
    /// Of a peer that comes, the user decides, by [`super::Connection::admit`] or
    /// [`super::Connection::abort`], when the handshake has proved its address. Until then the window is
    /// closed, and the peer hears nothing behind the SYN-ACK.
    pub deferred: bool,
    /// Probing of an idle peer; off unless asked for (MUST-25).
    pub keep_alive: Option<KeepAlive>,
    /// How many messages may wait to be sent as a whole, in message mode.
    pub max_messages: u32,
    /// How many octets behind a gap the connection keeps, in message mode.
    pub max_reassembly: u32,
}

impl Config {
    /// Whether segments that are sent end where what they carry ends.
    pub(crate) fn keeps_ends(&self) -> bool {
        self.aligned || self.mode == Mode::Message
    }
}

impl Default for Config {
    fn default() -> Self {
        Self {
            mode: Mode::Stream,
            aligned: false,
            receive_mss: 1440,
            path_mss: 1440,
            max_receive_space: 4 << 20,
            hop_limit: None,
            traffic_class: 0,
            timestamps: true,
            sack: true,
            ecn: true,
            nagle: false,
            pacing: true,
            ack_delay: 40 * MILLISECOND,
            initial_rto: SECOND,
            min_rto: 200 * MILLISECOND,
            max_rto: 60 * SECOND,
            user_timeout: 120 * SECOND,
            orphan_timeout: 20 * SECOND,
            connect_timeout: 180 * SECOND,
            time_wait: 60 * SECOND,
            deferred: false,
            keep_alive: None,
            max_messages: 4096,
            max_reassembly: 256 << 10,
        }
    }
}
