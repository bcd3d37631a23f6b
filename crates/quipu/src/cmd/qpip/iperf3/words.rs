//! What the two ends of iperf3 say to each other on their control connection, as versions 3.1 and later do:
//! states, each an octet; and texts of JSON, each behind its length. No I/O.

use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// Octets of the cookie with which every connection of a test begins, its zero at the end included.
pub(super) const COOKIE: usize = 37;
/// Longest text that is believed.
pub(super) const MAX_TEXT: usize = 1 << 20;
/// Most streams of a test in one direction, and longest block, as iperf3 has them.
pub(super) const MAX_STREAMS: u32 = 128;
pub(super) const MAX_BLOCK: u64 = 1 << 20;
/// Shortest and longest datagram, as iperf3 has them.
pub(super) const DATAGRAM: std::ops::RangeInclusive<u64> = 16..=65_507;
/// Longest test, in seconds, as iperf3 has it.
pub(super) const MAX_TIME: u32 = 86_400;

/// What an end says by one octet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(i8)]
pub(super) enum State {
    TestStart = 1,
    TestRunning = 2,
    /// The client: it sends and wants no more.
    TestEnd = 4,
    /// The server: it wants the parameters.
    ParamExchange = 9,
    /// The server: it wants the connections of the streams.
    CreateStreams = 10,
    ServerTerminate = 11,
    ClientTerminate = 12,
    /// The server: results are exchanged, the client's first.
    ExchangeResults = 13,
    DisplayResults = 14,
    IperfDone = 16,
    /// The server: it has another test.
    AccessDenied = -1,
    /// The server: two numbers of 32 bits follow, of an error of iperf3 and of the system.
    ServerError = -2,
}

impl State {
    pub(super) fn of(octet: u8) -> Option<Self> {
        Some(match octet.cast_signed() {
            1 => Self::TestStart,
            2 => Self::TestRunning,
            4 => Self::TestEnd,
            9 => Self::ParamExchange,
            10 => Self::CreateStreams,
            11 => Self::ServerTerminate,
            12 => Self::ClientTerminate,
            13 => Self::ExchangeResults,
            14 => Self::DisplayResults,
            16 => Self::IperfDone,
            -1 => Self::AccessDenied,
            -2 => Self::ServerError,
            _ => return None,
        })
    }

    pub(super) fn octet(self) -> u8 {
        (self as i8).cast_unsigned()
    }
}

/// What a server says that cannot do what it is asked to: iperf3's number for "not implemented", and no error
/// of the system.
pub(super) fn not_implemented() -> [u8; 9] {
    let mut words = [0; 9];
    words[0] = State::ServerError.octet();
    words[4] = 13;
    words
}

/// What the client wants.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub(super) struct Params {
    // That it is there means something, whatever it says.
    #[serde(skip_serializing_if = "is_false")]
    pub(super) tcp: bool,
    #[serde(skip_serializing_if = "is_false")]
    pub(super) udp: bool,
    /// Seconds at the beginning that do not count.
    pub(super) omit: u32,
    /// Seconds; 0 where `num` or `blockcount` says how long it takes.
    pub(super) time: u32,
    /// Octets.
    pub(super) num: u64,
    /// Blocks.
    pub(super) blockcount: u64,
    /// Streams in a direction.
    pub(super) parallel: u32,
    /// The server sends.
    #[serde(skip_serializing_if = "is_false")]
    pub(super) reverse: bool,
    /// Both send.
    #[serde(skip_serializing_if = "is_false")]
    pub(super) bidirectional: bool,
    /// Octets of a block.
    pub(super) len: u64,
    /// Bits per second of a stream; 0 for as many as possible.
    #[serde(skip_serializing_if = "is_zero")]
    pub(super) bandwidth: u64,
    /// 1: the numbers of datagrams have 64 bits.
    #[serde(skip_serializing_if = "is_zero")]
    pub(super) udp_counters_64bit: u64,
    pub(super) client_version: String,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde calls it so")]
fn is_false(it: &bool) -> bool {
    !it
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde calls it so")]
fn is_zero(it: &u64) -> bool {
    *it == 0
}

impl Params {
    /// Whether a test can be made of them.
    pub(super) fn are_possible(&self) -> bool {
        let lengths = if self.udp { DATAGRAM } else { 1..=MAX_BLOCK };
        self.tcp != self.udp
            && (1..=MAX_STREAMS).contains(&self.parallel)
            && lengths.contains(&self.len)
            && self.time <= MAX_TIME
            && self.omit <= 600
    }

    /// Octets after which it is over; `None` if time says so.
    pub(super) fn target(&self) -> Option<u64> {
        match (self.num, self.blockcount) {
            (0, 0) => None,
            (0, blocks) => Some(blocks.saturating_mul(self.len)),
            (octets, _) => Some(octets),
        }
    }

    /// Which streams there are, in their order: whether the client sends in each.
    pub(super) fn client_sends(&self) -> Vec<bool> {
        let mut streams = vec![self.bidirectional || !self.reverse; self.parallel as usize];
        if self.bidirectional {
            streams.extend(vec![false; self.parallel as usize]);
        }
        streams
    }
}

/// What a stream has moved in a direction.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Counts {
    pub(super) bytes: u64,
    /// Segments that were sent again, of a connection.
    pub(super) retransmits: u64,
    /// Datagrams that were sent, lost ones included; and those that are lost.
    pub(super) packets: u64,
    pub(super) errors: u64,
    /// How much the time varies that they take, in seconds, by now: whenever one began to count.
    pub(super) jitter: f64,
}

impl Counts {
    /// What has become more since.
    pub(super) fn since(&self, before: &Self) -> Self {
        Self {
            bytes: self.bytes - before.bytes,
            retransmits: self.retransmits - before.retransmits,
            packets: self.packets - before.packets,
            // One that was missed may have come late.
            errors: self.errors.saturating_sub(before.errors),
            jitter: self.jitter,
        }
    }
}

/// What an end calls its streams: 1, 3, 4, 5 and so on.
pub(super) fn stream_id(index: usize) -> u64 {
    if index == 0 { 1 } else { index as u64 + 2 }
}

/// A number that may be unknown, which is said as -1, by some versions without its sign.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Known(pub(super) Option<u64>);

impl Serialize for Known {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        match self.0 {
            Some(number) => to.serialize_u64(number),
            None => to.serialize_i64(-1),
        }
    }
}

impl<'de> Deserialize<'de> for Known {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        let number = serde_json::Number::deserialize(from)?;
        Ok(Self(number.as_u64().filter(|&it| i64::try_from(it).is_ok())))
    }
}

/// What an end has measured.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub(super) struct Results {
    pub(super) cpu_util_total: f64,
    pub(super) cpu_util_user: f64,
    pub(super) cpu_util_system: f64,
    /// 1 if the sender counts what it has sent again.
    pub(super) sender_has_retransmits: Known,
    pub(super) streams: Vec<StreamResults>,
}

/// Of one stream.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub(super) struct StreamResults {
    pub(super) id: u64,
    pub(super) bytes: u64,
    pub(super) retransmits: Known,
    pub(super) jitter: f64,
    pub(super) errors: u64,
    pub(super) packets: u64,
    pub(super) start_time: f64,
    pub(super) end_time: f64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_state_is_an_octet() {
        for octet in 0..=u8::MAX {
            if let Some(state) = State::of(octet) {
                assert_eq!(state.octet(), octet);
            }
        }
        assert_eq!(State::of(0xff), Some(State::AccessDenied));
        assert_eq!(not_implemented(), [0xfe, 0, 0, 0, 13, 0, 0, 0, 0]);
    }

    /// As iperf3 3.12 has written them.
    #[test]
    fn parameters_are_read() {
        let text = r#"{"tcp":true,"omit":0,"time":1,"num":0,"blockcount":0,"parallel":2,"bidirectional":true,
            "len":131072,"bandwidth":10000000,"pacing_timer":1000,"client_version":"3.12"}"#;
        let params: Params = serde_json::from_str(text).unwrap();
        assert!(params.are_possible());
        assert_eq!((params.time, params.len, params.bandwidth), (1, 131_072, 10_000_000));
        assert_eq!(params.client_sends(), [true, true, false, false]);
        assert_eq!(params.target(), None);
        let again: Params = serde_json::from_str(&serde_json::to_string(&params).unwrap()).unwrap();
        assert_eq!(again, params);
    }

    #[test]
    fn parameters_of_datagrams_do_not_mention_tcp() {
        let text = r#"{"udp":true,"omit":0,"time":1,"num":0,"blockcount":0,"parallel":1,"len":100,
            "bandwidth":100000,"pacing_timer":1000,"udp_counters_64bit":1,"client_version":"3.12"}"#;
        let params: Params = serde_json::from_str(text).unwrap();
        assert!(params.are_possible() && params.udp && params.udp_counters_64bit == 1);
        assert!(!serde_json::to_string(&params).unwrap().contains("tcp"));
    }

    #[test]
    fn impossible_parameters_are_refused() {
        let good = Params { tcp: true, parallel: 1, len: 1, ..Params::default() };
        assert!(good.are_possible());
        for bad in [
            Params { udp: true, ..good.clone() },
            Params { tcp: false, ..good.clone() },
            Params { tcp: false, udp: true, len: 15, ..good.clone() },
            Params { tcp: false, udp: true, len: 65_508, ..good.clone() },
            Params { parallel: 0, ..good.clone() },
            Params { parallel: 129, ..good.clone() },
            Params { len: 0, ..good.clone() },
            Params { len: MAX_BLOCK + 1, ..good.clone() },
            Params { time: MAX_TIME + 1, ..good.clone() },
        ] {
            assert!(!bad.are_possible(), "{bad:?}");
        }
        assert_eq!(Params { num: 7, blockcount: 9, ..good.clone() }.target(), Some(7));
        assert_eq!(Params { blockcount: u64::MAX, len: 2, ..good }.target(), Some(u64::MAX));
        assert!(serde_json::from_str::<Params>(r#"{"parallel":-1}"#).is_err());
    }

    #[test]
    fn results_are_read_whatever_stands_for_unknown() {
        let text = r#"{"cpu_util_total":10.5,"cpu_util_user":0,"cpu_util_system":10,
            "sender_has_retransmits":18446744073709551615,"congestion_used":"bbr","streams":[{"id":1,
            "bytes":1048576,"retransmits":-1,"jitter":0,"errors":0,"packets":0,"start_time":0,
            "end_time":0.00036}]}"#;
        let results: Results = serde_json::from_str(text).unwrap();
        assert_eq!(results.sender_has_retransmits, Known(None));
        assert_eq!(results.streams[0].retransmits, Known(None));
        assert_eq!(results.streams[0].bytes, 1_048_576);
        assert!(serde_json::to_string(&results).unwrap().contains("\"retransmits\":-1"));
        assert_eq!([0, 1, 2].map(stream_id), [1, 3, 4]);
    }
}
