//! The words of the benchmark: what is measured, by whom, and what came out.

use std::collections::BTreeMap;
use std::fmt;

use serde::{Deserialize, Serialize};

/// How a number is taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    /// One message at a time. Sends and writes: ping-pong, half the round trip. Reads and atomics:
    /// from posting to completion.
    Latency,
    /// Many messages in flight, one way. Gives messages and bytes a second.
    Stream,
    /// As latency, with both ends asleep until something arrives.
    Wake,
    /// Many connections made at once, used by nobody, and broken again; sizes count connections.
    Connect,
    /// A stream over each of many connections between two processes, all of them at once.
    Crowd,
}

/// The operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Op {
    /// Two-sided: into a receive of the peer.
    Send,
    /// Into the peer's memory. In a ping-pong the target only looks at its memory.
    Write,
    /// Out of the peer's memory.
    Read,
    /// 64-bit fetch and add.
    FetchAdd,
    /// 64-bit compare and swap.
    CompareSwap,
    /// A copy within one process, in the place where a message would be.
    Copy,
    /// A connection: address, route, queue pair, handshake, disconnect.
    Connection,
}

/// Between which ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Path {
    /// Processes of one host, through memory.
    SameHost,
    /// TCP over the loopback interface.
    Tcp,
    /// UDP over the loopback interface: datagrams (UD) always travel so.
    Udp,
}

/// What a contender is in the comparison.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    /// What is measured.
    Quipu,
    /// What the machine gives at best, without any messaging software.
    Floor,
    /// Other software that does the same.
    Peer,
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Latency => "latency",
            Self::Stream => "stream",
            Self::Wake => "wake",
            Self::Connect => "connect",
            Self::Crowd => "crowd",
        })
    }
}

impl fmt::Display for Op {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Send => "send",
            Self::Write => "write",
            Self::Read => "read",
            Self::FetchAdd => "fetch-add",
            Self::CompareSwap => "compare-swap",
            Self::Copy => "copy",
            Self::Connection => "connection",
        })
    }
}

impl fmt::Display for Path {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::SameHost => "same host",
            Self::Tcp => "TCP loopback",
            Self::Udp => "UDP loopback",
        })
    }
}

/// What is measured, without the size.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Test {
    /// How.
    pub kind: Kind,
    /// Of what.
    pub op: Op,
}

/// Numbers that go with a sample, by name.
pub type Also = Vec<(String, f64)>;

/// One size measured in one round.
#[derive(Clone, Debug, PartialEq)]
pub struct Sample {
    /// Bytes of a message, or how many connections.
    pub size: u64,
    /// Nanoseconds per message or connection, as [`Kind`] says.
    pub ns: f64,
    /// What else was found out, by name: the same names in the same order in each round.
    pub also: Also,
}

impl Sample {
    /// A sample of which nothing else is known.
    #[must_use]
    pub fn new(size: u64, ns: f64) -> Self {
        Self { size, ns, also: Vec::new() }
    }
}

/// All that one contender did in one test.
#[derive(Clone, Debug, Serialize)]
pub struct Series {
    /// The contender.
    pub contender: String,
    /// What it is.
    pub role: Role,
    /// Between which ends.
    pub path: Path,
    /// What was measured.
    #[serde(flatten)]
    pub test: Test,
    /// Nanoseconds of a cache line there and back in the state of the machine in which most samples of this
    /// test were taken, of all contenders; `None` where it does not matter, or is never known.
    pub line_ns: Option<f64>,
    /// By size in bytes.
    pub points: BTreeMap<u64, Point>,
}

/// One size: a sample a round, and what follows from them.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Point {
    /// Nanoseconds per message in each round; `None` where the contender failed.
    pub rounds_ns: Vec<Option<f64>>,
    /// Nanoseconds of a cache line from one processor to the other and back meanwhile; `None` where it was
    /// not asked, or changed.
    pub lines_ns: Vec<Option<f64>>,
    /// How many of them the median is of: those of the state that the series names, if they are enough; or
    /// else all.
    pub counted: usize,
    /// Whether those are of several states, or of such as are not known.
    pub mixed: bool,
    /// The median of these.
    pub median_ns: f64,
    /// Their quartiles.
    pub quartiles_ns: [f64; 2],
    /// Messages a second, from the median.
    pub messages_per_s: f64,
    /// Bytes a second, from the median.
    pub bytes_per_s: f64,
    /// What else was found out.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub also: Vec<Detail>,
}

/// A number that goes with a point.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Detail {
    /// What, and its unit.
    pub name: String,
    /// In the rounds that succeeded.
    pub rounds: Vec<f64>,
    /// Their median.
    pub median: f64,
}

/// A contender against another: above 1 the first is better.
#[derive(Clone, Debug, Serialize)]
pub struct Ratio {
    /// Quipu's contender.
    pub contender: String,
    /// The other.
    pub against: String,
    /// Between which ends.
    pub path: Path,
    /// What was measured.
    #[serde(flatten)]
    pub test: Test,
    /// Bytes.
    pub size: u64,
    /// How many times faster the first is.
    #[serde(flatten)]
    pub speed: Speed,
}

/// How many times faster one is than another.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Speed {
    /// The median of the ratios within the rounds.
    pub speed: f64,
    /// Their quartiles.
    pub spread: [f64; 2],
    /// How many rounds these are.
    pub rounds: usize,
    /// Whether the machine may have been in another state for one than for the other, where that matters.
    pub mixed: bool,
}

/// The cost of a message to the program that sends it, and to the one that receives it.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Overhead {
    /// Between which ends.
    pub path: Path,
    /// Bytes of a message.
    pub size: u64,
    /// Messages posted one after the other, one doorbell each.
    pub burst: u64,
    /// Posting a send.
    pub post_send: Cost,
    /// Polling its completion.
    pub poll_send: Cost,
    /// Posting a receive.
    pub post_recv: Cost,
    /// Polling its completion.
    pub poll_recv: Cost,
}

/// A cost per message.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub struct Cost {
    /// Nanoseconds.
    pub ns: f64,
    /// Cycles of the time-stamp counter.
    pub cycles: f64,
}

/// What idle connections cost.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Footprint {
    /// Between which ends: "one process", "same host", "TCP loopback".
    pub between: String,
    /// Connected queue pairs in the process.
    pub queue_pairs: u64,
    /// Resident bytes each, with queues of one entry.
    pub bytes_per_qp: f64,
    /// Queue pairs that then carried a message each without fault.
    pub exchanged: u64,
    /// Why not all of them did.
    pub fault: Option<String>,
    /// Seconds until all were created and connected and had carried their messages.
    pub setup_s: f64,
}
