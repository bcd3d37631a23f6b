//! What an engine did so far, as others on the machine read it.
//!
//! A sample is a file of at most [`MAX_BYTES`], in little-endian order: magic, version, length of the body,
//! CRC32C of the body, body. It is written in place, so that a reader may find parts of two samples in it:
//! the CRC tells, and the reader reads again.

use std::net::{IpAddr, Ipv6Addr};

use quipu_iwarp::wire::mpa::crc32c;

const MAGIC: &[u8; 8] = b"QUIPUCNT";
const VERSION: u32 = 5;
const HEADER_LEN: usize = 20;
/// Longest sample.
pub const MAX_BYTES: usize = 1 << 20;
/// Most queue pairs that a sample lists; of others it has only the number.
pub const MAX_QUEUE_PAIRS: usize = 4096;
/// Longest text in a sample.
const MAX_TEXT: usize = 255;

/// Something that is counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Metric {
    /// Its name, a part of the names that Prometheus knows: `quipu_NAME_total`.
    pub name: &'static str,
    /// What it counts.
    pub help: &'static str,
}

const fn metric(name: &'static str, help: &'static str) -> Metric {
    Metric { name, help }
}

/// How many values there are of each queue pair.
pub const WORK: usize = 16;
/// What is counted of each queue pair, in the order of [`QueuePair::work`].
pub const WORK_METRICS: [Metric; WORK] = [
    metric("sends", "Send requests completed."),
    metric("writes", "RDMA write requests completed."),
    metric("reads", "RDMA read requests completed."),
    metric("atomics", "Atomic requests completed."),
    metric("requested_bytes", "Bytes of the completed requests."),
    metric(
        "retransmissions",
        "Requests transmitted once more, after a refusal for lack of a receive.",
    ),
    metric("rnr_received", "RNR NAKs received: the peer had no receive."),
    metric("failed_requests", "Requests that failed, without flushed ones."),
    metric("receives", "Receive requests completed."),
    metric("served_writes", "RDMA writes executed for the peer."),
    metric("served_reads", "RDMA reads answered for the peer."),
    metric("served_atomics", "Atomics executed for the peer."),
    metric("received_bytes", "Bytes received, or written by the peer."),
    metric("read_bytes", "Bytes read by the peer."),
    metric("rnr_sent", "RNR NAKs sent: messages of the peer without a receive."),
    metric("refused_requests", "Requests of the peer that were rejected."),
];

/// How many values there are of each engine.
pub const ENGINE: usize = 16;
/// What is counted of each engine beside that, in the order of [`Sample::engine`].
pub const ENGINE_METRICS: [Metric; ENGINE] = [
    metric("completions", "Completions, including errors."),
    metric("doorbells", "Doorbells rung."),
    metric("queue_pairs_created", "Queue pairs created."),
    metric("polls", "Polls of completion queues that found nothing at first."),
    metric("empty_polls", "Polls that made no progress."),
    metric("socket_sends", "System calls that sent to a socket."),
    metric("socket_receives", "System calls that received from a socket."),
    metric("epoll_looks", "Calls of epoll without waiting."),
    metric("dropped_datagrams", "Datagrams that arrived and were dropped."),
    metric("frames_received", "Frames from the packet link."),
    metric("frames_sent", "Frames to the packet link."),
    metric("frames_dropped", "Frames from the packet link that were dropped, whole or in part."),
    metric("tcp_accepted", "Connections of the adapter's own TCP that peers opened."),
    metric("tcp_resets_sent", "Resets for segments that belong to no connection."),
    metric("tcp_held", "SYNs that waited for an idle queue pair."),
    metric("tcp_late", "SYNs that waited, and were answered later."),
];

/// How many reasons there are to drop a frame.
pub const REASONS: usize = 24;
/// Why frames from the packet link were dropped, in the order of [`Sample::drops`].
pub const DROP_REASONS: [Metric; REASONS] = [
    metric("other", "Not IP, ARP or neighbour discovery, or for another station."),
    metric("ip_malformed", "Invalid IP header, or invalid header after it."),
    metric("martian", "Impossible source or destination address."),
    metric("not_ours", "For another host, or for a group without a listener."),
    metric("protocol", "Unsupported protocol above IP."),
    metric("checksum", "Wrong TCP or UDP checksum, or a missing one where it is required."),
    metric("fragment", "Invalid fragments, or fragments of packets that must not be fragmented."),
    metric(
        "fragment_overlap",
        "Fragmented packets whose fragments overlap or contradict each other.",
    ),
    metric("fragment_expired", "Fragmented packets whose fragments took too long."),
    metric("fragment_evicted", "Fragmented packets that were evicted by newer ones."),
    metric("tcp_malformed", "Invalid TCP header."),
    metric("tcp_unknown", "Segments of no connection."),
    metric("tcp_waiting", "SYNs to a port where no queue pair became idle in time."),
    metric("tcp_full", "SYNs without room for a connection."),
    metric("tcp_outside", "Duplicate segments, or segments outside the window."),
    metric("tcp_old", "Segments older than the last timestamp."),
    metric("tcp_bad_ack", "Segments with an impossible acknowledgement, or none."),
    metric("tcp_no_room", "Segments in the window without a receive."),
    metric("tcp_not_kept", "Segments after a gap that could not be stored."),
    metric("udp_malformed", "Datagrams with an invalid length."),
    metric("udp_unknown", "Datagrams to an unbound port."),
    metric("answers", "Replies that could not be queued."),
    metric("notices", "Neighbour updates that were not read in time."),
    metric(
        "link_full",
        "Frames for which the link had no room: they came faster than they were taken.",
    ),
];

/// How many virtual lanes there are.
pub const LANES: usize = 15;
/// How many values there are of each.
pub const LANE: usize = 4;
/// What is counted of each virtual lane, in the order of [`Sample::lanes`].
pub const LANE_METRICS: [Metric; LANE] = [
    metric("lane_bytes", "Octets sent in a virtual lane, headers included."),
    metric("lane_packets", "Packets sent in a virtual lane."),
    metric("lane_wait_nanoseconds", "Time that queue pairs waited for a turn in their lane."),
    metric("lane_waits", "Turns that queue pairs waited for."),
];

/// The statuses of completions that are counted, by their numbers in verbs; the last is all others.
pub const STATUSES: [&str; 23] = [
    "success",
    "loc_len_err",
    "loc_qp_op_err",
    "loc_eec_op_err",
    "loc_prot_err",
    "wr_flush_err",
    "mw_bind_err",
    "bad_resp_err",
    "loc_access_err",
    "rem_inv_req_err",
    "rem_access_err",
    "rem_op_err",
    "retry_exc_err",
    "rnr_retry_exc_err",
    "loc_rdd_viol_err",
    "rem_inv_rd_req_err",
    "rem_abort_err",
    "inv_eecn_err",
    "inv_eec_state_err",
    "fatal_err",
    "resp_timeout_err",
    "general_err",
    "other",
];

/// How the messages of a queue pair travel, as numbers in a sample.
pub const PATHS: [&str; 7] =
    ["-", "connecting", "tcp", "shared memory", "own process", "lost", "udp"];
/// States of queue pairs, by their numbers in verbs.
pub const STATES: [&str; 8] = ["RESET", "INIT", "RTR", "RTS", "SQD", "SQE", "ERR", "?"];

/// A queue pair.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct QueuePair {
    /// Its number.
    pub number: u32,
    /// Its service, by its number in verbs (`enum ibv_qp_type`).
    pub service: u8,
    /// Its state, an index into [`STATES`].
    pub state: u8,
    /// How its messages travel, an index into [`PATHS`].
    pub path: u8,
    /// The peer's number.
    pub peer: u32,
    /// The peer's address; unspecified if it has none.
    pub peer_address: IpAddr,
    /// Send requests posted and not done.
    pub send_queue: u32,
    /// Receive requests posted and not done.
    pub recv_queue: u32,
    /// What it did: see [`WORK_METRICS`].
    pub work: [u64; WORK],
}

/// What an engine did so far.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sample {
    /// Its process.
    pub process: u32,
    /// When it began, in nanoseconds since the epoch of UNIX.
    pub started: u64,
    /// When this was written, likewise.
    pub taken: u64,
    /// The program's name.
    pub program: String,
    /// The device's name.
    pub device: String,
    /// The device's address.
    pub address: IpAddr,
    /// See [`ENGINE_METRICS`].
    pub engine: [u64; ENGINE],
    /// Frames dropped for each of [`DROP_REASONS`].
    pub drops: [u64; REASONS],
    /// Completions of each of [`STATUSES`].
    pub statuses: [u64; STATUSES.len()],
    /// What all queue pairs did, those that are gone among them.
    pub work: [u64; WORK],
    /// What each virtual lane did: see [`LANE_METRICS`]. All 0 without quality of service.
    pub lanes: [[u64; LANE]; LANES],
    /// Its queue pairs.
    pub queue_pairs: Vec<QueuePair>,
    /// How many more it has than are listed.
    pub omitted: u32,
}

/// Why bytes are no sample.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NoSample {
    /// They are something else.
    Foreign,
    /// They are of another version of Quipu.
    Version(u32),
    /// It was being written: read it again.
    Torn,
}

impl Sample {
    /// Writes the sample into `out`, in place of what is there.
    pub fn encode(&self, out: &mut Vec<u8>) {
        out.clear();
        out.extend_from_slice(MAGIC);
        out.extend_from_slice(&VERSION.to_le_bytes());
        out.extend_from_slice(&[0; 8]);
        put(out, [self.process.into(), self.started, self.taken, self.omitted.into()]);
        for text in [&self.program, &self.device] {
            let end = text.floor_char_boundary(MAX_TEXT);
            out.push(end as u8);
            out.extend_from_slice(&text.as_bytes()[..end]);
        }
        out.extend_from_slice(&octets(self.address));
        put(out, self.engine);
        put(out, self.drops);
        put(out, self.statuses);
        put(out, self.work);
        put(out, [self.queue_pairs.len() as u64]);
        for qp in &self.queue_pairs {
            out.extend_from_slice(&[qp.service, qp.state, qp.path]);
            for number in [qp.number, qp.peer, qp.send_queue, qp.recv_queue] {
                out.extend_from_slice(&number.to_le_bytes());
            }
            out.extend_from_slice(&octets(qp.peer_address));
            put(out, qp.work);
        }
        // After everything else: a reader of an earlier build does not look there.
        self.lanes.iter().for_each(|&lane| put(out, lane));
        let (length, crc) = ((out.len() - HEADER_LEN) as u32, crc32c(&out[HEADER_LEN..]));
        out[12..16].copy_from_slice(&length.to_le_bytes());
        out[16..20].copy_from_slice(&crc.to_le_bytes());
    }

    /// Reads a sample; bytes behind it are ignored.
    ///
    /// # Errors
    /// See [`NoSample`].
    pub fn decode(bytes: &[u8]) -> Result<Self, NoSample> {
        // A file that was just made is empty.
        let header = bytes.get(..HEADER_LEN).ok_or(NoSample::Torn)?;
        if &header[..8] != MAGIC {
            return Err(NoSample::Foreign);
        }
        let word = |at: usize| {
            u32::from_le_bytes([header[at], header[at + 1], header[at + 2], header[at + 3]])
        };
        if word(8) != VERSION {
            return Err(NoSample::Version(word(8)));
        }
        let body = bytes.get(HEADER_LEN..).and_then(|rest| rest.get(..word(12) as usize));
        let body = body.filter(|body| crc32c(body) == word(16)).ok_or(NoSample::Torn)?;
        Reader(body).sample().ok_or(NoSample::Foreign)
    }
}

fn put<const N: usize>(out: &mut Vec<u8>, values: [u64; N]) {
    values.iter().for_each(|value| out.extend_from_slice(&value.to_le_bytes()));
}

fn octets(address: IpAddr) -> [u8; 16] {
    match address {
        IpAddr::V4(address) => address.to_ipv6_mapped().octets(),
        IpAddr::V6(address) => address.octets(),
    }
}

/// Reads a body from the front; `None` where it is too short or makes no sense.
struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn take(&mut self, length: usize) -> Option<&'a [u8]> {
        let (front, rest) = self.0.split_at_checked(length)?;
        self.0 = rest;
        Some(front)
    }

    fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        self.take(N)?.try_into().ok()
    }

    fn long(&mut self) -> Option<u64> {
        self.array().map(u64::from_le_bytes)
    }

    fn word(&mut self) -> Option<u32> {
        self.array().map(u32::from_le_bytes)
    }

    fn longs<const N: usize>(&mut self) -> Option<[u64; N]> {
        let mut values = [0; N];
        for value in &mut values {
            *value = self.long()?;
        }
        Some(values)
    }

    fn text(&mut self) -> Option<String> {
        let [length] = self.array()?;
        String::from_utf8(self.take(length.into())?.to_vec()).ok()
    }

    fn address(&mut self) -> Option<IpAddr> {
        Some(IpAddr::V6(Ipv6Addr::from(self.array::<16>()?)).to_canonical())
    }

    fn queue_pair(&mut self) -> Option<QueuePair> {
        let [service, state, path] = self.array()?;
        let known = usize::from(path) < PATHS.len() && usize::from(state) < STATES.len();
        let (number, peer) = (self.word()?, self.word()?);
        let (send_queue, recv_queue) = (self.word()?, self.word()?);
        let (peer_address, work) = (self.address()?, self.longs()?);
        known.then_some(QueuePair {
            number,
            service,
            state,
            path,
            peer,
            peer_address,
            send_queue,
            recv_queue,
            work,
        })
    }

    fn sample(mut self) -> Option<Sample> {
        let [process, started, taken, omitted] = self.longs()?;
        let (program, device, address) = (self.text()?, self.text()?, self.address()?);
        let (engine, drops) = (self.longs()?, self.longs()?);
        let (statuses, work) = (self.longs()?, self.longs()?);
        let count = self.long()?;
        if count > MAX_QUEUE_PAIRS as u64 {
            return None;
        }
        let queue_pairs = (0..count).map(|_| self.queue_pair()).collect::<Option<_>>()?;
        Some(Sample {
            process: process.try_into().ok()?,
            started,
            taken,
            program,
            device,
            address,
            engine,
            drops,
            statuses,
            work,
            queue_pairs,
            // A writer of an earlier build has none.
            lanes: [(); LANES].map(|()| self.longs().unwrap_or_default()),
            omitted: omitted.try_into().ok()?,
        })
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// A sample with a value of its own in each place.
    pub(crate) fn example() -> Sample {
        let mut next = 0;
        let mut work = || {
            [(); WORK].map(|()| {
                next += 1;
                next
            })
        };
        let queue_pairs = [(0x00c3_5001, 3), (0x00c3_5002, 6)]
            .map(|(number, state)| QueuePair {
                number,
                service: 2,
                state,
                path: 2,
                peer: 0x00c4_0001,
                peer_address: "192.0.2.7".parse().unwrap(),
                send_queue: 5,
                recv_queue: 6,
                work: work(),
            })
            .to_vec();
        Sample {
            lanes: std::array::from_fn(|lane| if lane == 1 { [70, 71, 72, 73] } else { [0; LANE] }),
            process: 4711,
            started: 1_700_000_000_000_000_000,
            taken: 1_700_000_012_000_000_000,
            program: "ib_write_bw".into(),
            device: "quipu0".into(),
            address: "192.0.2.1".parse().unwrap(),
            engine: std::array::from_fn(|i| 100 + i as u64),
            drops: std::array::from_fn(|i| 200 + i as u64),
            statuses: std::array::from_fn(|i| if i == 5 { 9 } else { 0 }),
            work: work(),
            queue_pairs,
            omitted: 3,
        }
    }

    #[test]
    fn what_is_written_is_read() {
        let sample = example();
        let mut bytes = vec![1, 2, 3];
        sample.encode(&mut bytes);
        assert_eq!(Sample::decode(&bytes), Ok(sample));
        bytes.extend_from_slice(b"the end of a longer one");
        assert!(Sample::decode(&bytes).is_ok());
    }

    #[test]
    fn what_is_no_sample_is_refused() {
        let mut bytes = Vec::new();
        example().encode(&mut bytes);
        for cut in 0..bytes.len() {
            assert_eq!(Sample::decode(&bytes[..cut]), Err(NoSample::Torn));
        }
        for at in HEADER_LEN..bytes.len() {
            let mut torn = bytes.clone();
            torn[at] ^= 0x10;
            assert_eq!(Sample::decode(&torn), Err(NoSample::Torn));
        }
        let mut other = bytes.clone();
        other[8] = 9;
        assert_eq!(Sample::decode(&other), Err(NoSample::Version(9)));
        assert_eq!(Sample::decode(&[0x55; 100]), Err(NoSample::Foreign));
    }

    /// Anyone who can write the file can make the CRC right, too.
    #[test]
    fn a_false_body_is_refused() {
        let mut bytes = Vec::new();
        example().encode(&mut bytes);
        for at in HEADER_LEN..bytes.len() {
            let mut forged = bytes.clone();
            forged[at] ^= 0xff;
            let crc = crc32c(&forged[HEADER_LEN..]);
            forged[16..20].copy_from_slice(&crc.to_le_bytes());
            let _ = Sample::decode(&forged);
        }
        let mut sample = example();
        sample.queue_pairs[0].path = 99;
        sample.encode(&mut bytes);
        assert_eq!(Sample::decode(&bytes), Err(NoSample::Foreign));
    }
}
