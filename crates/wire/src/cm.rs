//! Messages of connection management (`specs/quipu-cm.md`): what the REQ, REP, REJ, RTU, DREQ, DREP,
//! SIDR_REQ and SIDR_REP of InfiniBand (IBA volume 1, chapter 12) say that TCP and IP do not.

use crate::field::{array, need, put, u16_at, u32_at};
use crate::{WireError, sdp};

/// The only version so far.
pub const VERSION: u8 = 1;
/// Most private data of a request, a reply and a refusal.
pub const REQ_DATA: usize = 56;
/// Most private data of a request in the port space of SDP, which has no head of `rdma_cm` in front.
pub const SDP_REQ_DATA: usize = 92;
/// See [`REQ_DATA`].
pub const REP_DATA: usize = 196;
/// See [`REQ_DATA`].
pub const REJ_DATA: usize = 148;
/// Most private data of a look-up.
pub const SIDR_REQ_DATA: usize = 180;
/// Most private data of the answer to a look-up.
pub const SIDR_REP_DATA: usize = 136;
/// Every look-up is so long, padded with zeros: no answer is longer, so that nobody can use one to
/// multiply traffic.
pub const SIDR_REQ_LEN: usize = 256;

const MAGIC: &[u8; 4] = b"QUCM";
const HEAD_LEN: usize = 8;
const OFFER_LEN: usize = 48;
const SIDR_REQ_HEAD: usize = 32;
const SIDR_REP_HEAD: usize = 40;
const FRAME_HEAD: usize = 4;

const KIND_REQ: u8 = 1;
const KIND_REP: u8 = 2;
const KIND_REJ: u8 = 3;
const KIND_SIDR_REQ: u8 = 4;
const KIND_SIDR_REP: u8 = 5;
const KIND_RTU: u8 = 6;
const KIND_DREQ: u8 = 7;
const KIND_DREP: u8 = 8;

/// `IBV_QPT_*` that have connections: RC, UC, and both ends of extended ones.
const CONNECTED: [u8; 4] = [2, 3, 9, 10];

const FLAG_SRQ: u8 = 1;
const FLAG_FLOW_CONTROL: u8 = 2;
const FLAG_ECE: u8 = 4;
const ECE_LEN: usize = 8;
const MAX_24_BIT: u32 = 0x00ff_ffff;

/// Most private data of a request in a port space.
pub const fn req_data(port_space: u16) -> usize {
    if port_space == sdp::PORT_SPACE { SDP_REQ_DATA } else { REQ_DATA }
}

/// Whether `bytes` begin as a message of connection management, of any version.
pub fn is_cm(bytes: &[u8]) -> bool {
    bytes.starts_with(MAGIC)
}

/// The kind and the third octet behind the magic number, of a message of this version; and its
/// private data, which begin at `at` and are at most `most` bytes.
fn head(bytes: &[u8]) -> Result<(u8, u8), WireError> {
    if !is_cm(bytes) {
        return Err(WireError::NotHello);
    }
    need(bytes, HEAD_LEN)?;
    if bytes[4] != VERSION {
        return Err(WireError::HelloVersion(bytes[4]));
    }
    Ok((bytes[5], bytes[6]))
}

fn put_head(out: &mut [u8], kind: u8, code: u8, data: usize) {
    put(out, 0, *MAGIC);
    // The limits of private data are below 256.
    put(out, 4, [VERSION, kind, code, data as u8]);
}

/// The private data that begin at `at`, as many as the head says.
fn data(bytes: &[u8], at: usize, most: usize) -> Result<&[u8], WireError> {
    let len = usize::from(bytes[7]);
    if len > most {
        return Err(WireError::OutOfRange("private data length"));
    }
    need(bytes, at + len)?;
    Ok(&bytes[at..at + len])
}

fn low24(bytes: &[u8], at: usize, name: &'static str) -> Result<u32, WireError> {
    match u32_at(bytes, at) {
        value if value <= MAX_24_BIT => Ok(value),
        _ => Err(WireError::OutOfRange(name)),
    }
}

fn at_most(value: u8, most: u8, name: &'static str) -> Result<u8, WireError> {
    if value <= most { Ok(value) } else { Err(WireError::OutOfRange(name)) }
}

/// Options of a vendor that one side of a connection would use (enhanced connection establishment).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Ece {
    /// Whose options they are; 0: there are none.
    pub vendor_id: u32,
    /// Which, as that vendor says.
    pub options: u32,
}

/// What one side of a connection says of itself and wants of the other.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Offer {
    /// `RDMA_PS_*`: a listener takes requests of its own space only.
    pub port_space: u16,
    /// `IBV_QPT_*`.
    pub qp_type: u8,
    /// The queue pair receives from a shared receive queue.
    pub srq: bool,
    /// End-to-end flow control, which programs may name.
    pub flow_control: bool,
    /// Queue pair number, 24 bits. The program may say any.
    pub qpn: u32,
    /// First PSN that the sender sends, 24 bits.
    pub psn: u32,
    /// RDMA reads and atomics that the sender answers at a time.
    pub responder_resources: u8,
    /// RDMA reads and atomics that the sender has outstanding at most.
    pub initiator_depth: u8,
    /// How often the receiver shall repeat a request: 0 to 7.
    pub retry_count: u8,
    /// How often the receiver shall repeat a request that met no receive: 0 to 7.
    pub rnr_retry_count: u8,
    /// Path MTU code as in verbs, 1 (256 B) to 5 (4096 B).
    pub path_mtu: u8,
    /// Traffic class of the path.
    pub traffic_class: u8,
    /// Time-out code of the path: 4.096 us << code; 5 bits.
    pub ack_timeout: u8,
    /// Where the sender's queue pairs are.
    pub gid: [u8; 16],
    /// Options of its vendor.
    pub ece: Ece,
}

impl Offer {
    /// Reads an offer, and the private data of at most `most` bytes behind it.
    fn parse(bytes: &[u8], most: usize) -> Result<(Self, &[u8]), WireError> {
        need(bytes, OFFER_LEN)?;
        let data = data(bytes, OFFER_LEN, most)?;
        let ece = match bytes[11] & FLAG_ECE {
            0 => Ece::default(),
            _ => {
                let at = OFFER_LEN + data.len();
                need(bytes, at + ECE_LEN)?;
                match u32_at(bytes, at) {
                    0 => Ece::default(),
                    vendor_id => Ece { vendor_id, options: u32_at(bytes, at + 4) },
                }
            }
        };
        Ok((Self::fields(bytes, ece)?, data))
    }

    fn fields(bytes: &[u8], ece: Ece) -> Result<Self, WireError> {
        if !CONNECTED.contains(&bytes[10]) {
            return Err(WireError::OutOfRange("qp_type"));
        }
        if !(1..=5).contains(&bytes[24]) {
            return Err(WireError::OutOfRange("path_mtu"));
        }
        Ok(Offer {
            port_space: u16_at(bytes, 8),
            qp_type: bytes[10],
            srq: bytes[11] & FLAG_SRQ != 0,
            flow_control: bytes[11] & FLAG_FLOW_CONTROL != 0,
            qpn: low24(bytes, 12, "qpn")?,
            psn: low24(bytes, 16, "psn")?,
            responder_resources: bytes[20],
            initiator_depth: bytes[21],
            retry_count: at_most(bytes[22], 7, "retry_count")?,
            rnr_retry_count: at_most(bytes[23], 7, "rnr_retry_count")?,
            path_mtu: bytes[24],
            traffic_class: bytes[25],
            ack_timeout: at_most(bytes[26], 31, "ack_timeout")?,
            gid: array(bytes, 32),
            ece,
        })
    }

    fn has_ece(&self) -> bool {
        self.ece.vendor_id != 0
    }

    fn emit(&self, out: &mut [u8]) {
        let flag = |set: bool, bit: u8| if set { bit } else { 0 };
        let flags = flag(self.srq, FLAG_SRQ)
            | flag(self.flow_control, FLAG_FLOW_CONTROL)
            | flag(self.has_ece(), FLAG_ECE);
        put(out, 8, self.port_space.to_be_bytes());
        put(out, 10, [self.qp_type, flags]);
        put(out, 12, (self.qpn & MAX_24_BIT).to_be_bytes());
        put(out, 16, (self.psn & MAX_24_BIT).to_be_bytes());
        put(out, 20, [self.responder_resources, self.initiator_depth]);
        put(out, 22, [self.retry_count.min(7), self.rnr_retry_count.min(7)]);
        put(out, 24, [self.path_mtu.clamp(1, 5), self.traffic_class, self.ack_timeout & 31, 0]);
        put(out, 28, [0; 4]);
        put(out, 32, self.gid);
    }
}

/// A message in the private data of MPA start-up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Setup<'a> {
    /// REQ, in the MPA request.
    Request(Offer, &'a [u8]),
    /// REP, in the MPA reply.
    Reply(Offer, &'a [u8]),
    /// REJ, in an MPA reply with the R flag: the reason as InfiniBand numbers it (IBA 12.6.7.2).
    Reject(u8, &'a [u8]),
}

impl<'a> Setup<'a> {
    /// Reads a message from private data of MPA; bytes behind it are ignored.
    pub fn parse(bytes: &'a [u8]) -> Result<Self, WireError> {
        let (kind, code) = head(bytes)?;
        match kind {
            KIND_REQ => {
                need(bytes, OFFER_LEN)?;
                let most = req_data(u16_at(bytes, 8));
                Offer::parse(bytes, most).map(|(offer, data)| Setup::Request(offer, data))
            }
            KIND_REP => {
                Offer::parse(bytes, REP_DATA).map(|(offer, data)| Setup::Reply(offer, data))
            }
            KIND_REJ => Ok(Setup::Reject(code, data(bytes, HEAD_LEN, REJ_DATA)?)),
            _ => Err(WireError::OutOfRange("kind")),
        }
    }

    /// The message as private data of MPA. Private data beyond their limit are cut.
    pub fn to_bytes(&self) -> Vec<u8> {
        let (kind, code, at, most, data) = match *self {
            Setup::Request(offer, data) => {
                (KIND_REQ, 0, OFFER_LEN, req_data(offer.port_space), data)
            }
            Setup::Reply(_, data) => (KIND_REP, 0, OFFER_LEN, REP_DATA, data),
            Setup::Reject(reason, data) => (KIND_REJ, reason, HEAD_LEN, REJ_DATA, data),
        };
        let data = &data[..data.len().min(most)];
        let mut out = vec![0; at];
        put_head(&mut out, kind, code, data.len());
        out.extend_from_slice(data);
        if let Setup::Request(offer, _) | Setup::Reply(offer, _) = self {
            offer.emit(&mut out);
            if offer.has_ece() {
                out.extend_from_slice(&offer.ece.vendor_id.to_be_bytes());
                out.extend_from_slice(&offer.ece.options.to_be_bytes());
            }
        }
        out
    }
}

/// Kinds of messages that follow MPA start-up in the same stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Frame {
    /// RTU: the connection stands.
    ReadyToUse,
    /// REJ: it comes to nothing, for a reason as InfiniBand numbers it.
    Reject(u8),
    /// DREQ: it shall end.
    Disconnect,
    /// DREP: it has ended.
    Disconnected,
}

impl Frame {
    /// Reads the frame at the front of `bytes`: also its length on the wire. `None` if it is not
    /// whole. Private data, which have no use yet, are skipped.
    pub fn parse(bytes: &[u8]) -> Result<Option<(Self, usize)>, WireError> {
        let Some(&kind) = bytes.first() else { return Ok(None) };
        if !matches!(kind, KIND_RTU | KIND_REJ | KIND_DREQ | KIND_DREP) {
            return Err(WireError::OutOfRange("kind"));
        }
        if bytes.len() < FRAME_HEAD {
            return Ok(None);
        }
        let len = FRAME_HEAD + usize::from(bytes[3]);
        if bytes.len() < len {
            return Ok(None);
        }
        let frame = match kind {
            KIND_RTU => Frame::ReadyToUse,
            KIND_REJ => Frame::Reject(bytes[1]),
            KIND_DREQ => Frame::Disconnect,
            _ => Frame::Disconnected,
        };
        Ok(Some((frame, len)))
    }

    /// The frame on the wire, without private data.
    pub fn to_bytes(self) -> [u8; 4] {
        match self {
            Frame::ReadyToUse => [KIND_RTU, 0, 0, 0],
            Frame::Reject(reason) => [KIND_REJ, reason, 0, 0],
            Frame::Disconnect => [KIND_DREQ, 0, 0, 0],
            Frame::Disconnected => [KIND_DREP, 0, 0, 0],
        }
    }
}

/// Longest frame that [`Frame::parse`] reads.
pub const MAX_FRAME_LEN: usize = FRAME_HEAD + 255;

/// A message of a look-up, in a UDP datagram of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lookup<'a> {
    /// SIDR_REQ: which queue pair serves this port?
    Request {
        /// `RDMA_PS_*`.
        port_space: u16,
        /// Chosen by the sender, so that answers are told from one another.
        id: u32,
        /// Where the sender's queue pairs are.
        gid: [u8; 16],
        /// Private data.
        data: &'a [u8],
    },
    /// SIDR_REP: this one, or none.
    Reply {
        /// 0, or why there is none, as InfiniBand numbers it (IBA 12.11.2).
        status: u8,
        /// That of the request.
        id: u32,
        /// Its number, 24 bits.
        qpn: u32,
        /// Its Q_Key.
        qkey: u32,
        /// Where the queue pair is.
        gid: [u8; 16],
        /// Private data.
        data: &'a [u8],
    },
}

impl<'a> Lookup<'a> {
    /// Reads a datagram.
    pub fn parse(bytes: &'a [u8]) -> Result<Self, WireError> {
        let (kind, status) = head(bytes)?;
        match kind {
            KIND_SIDR_REQ => {
                need(bytes, SIDR_REQ_LEN)?;
                Ok(Lookup::Request {
                    port_space: u16_at(bytes, 8),
                    id: u32_at(bytes, 12),
                    gid: array(bytes, 16),
                    data: data(bytes, SIDR_REQ_HEAD, SIDR_REQ_DATA)?,
                })
            }
            KIND_SIDR_REP => {
                need(bytes, SIDR_REP_HEAD)?;
                Ok(Lookup::Reply {
                    status,
                    id: u32_at(bytes, 12),
                    qpn: low24(bytes, 8, "qpn")?,
                    qkey: u32_at(bytes, 32),
                    gid: array(bytes, 16),
                    data: data(bytes, SIDR_REP_HEAD, SIDR_REP_DATA)?,
                })
            }
            _ => Err(WireError::OutOfRange("kind")),
        }
    }

    /// The datagram. Private data beyond their limit are cut.
    pub fn to_bytes(&self) -> Vec<u8> {
        match *self {
            Lookup::Request { port_space, id, gid, data } => {
                let data = &data[..data.len().min(SIDR_REQ_DATA)];
                let mut out = vec![0; SIDR_REQ_LEN];
                put_head(&mut out, KIND_SIDR_REQ, 0, data.len());
                put(&mut out, 8, port_space.to_be_bytes());
                put(&mut out, 12, id.to_be_bytes());
                put(&mut out, 16, gid);
                out[SIDR_REQ_HEAD..SIDR_REQ_HEAD + data.len()].copy_from_slice(data);
                out
            }
            Lookup::Reply { status, id, qpn, qkey, gid, data } => {
                let data = &data[..data.len().min(SIDR_REP_DATA)];
                let mut out = vec![0; SIDR_REP_HEAD];
                put_head(&mut out, KIND_SIDR_REP, status, data.len());
                put(&mut out, 8, (qpn & MAX_24_BIT).to_be_bytes());
                put(&mut out, 12, id.to_be_bytes());
                put(&mut out, 16, gid);
                put(&mut out, 32, qkey.to_be_bytes());
                out.extend_from_slice(data);
                out
            }
        }
    }
}

const _: () = assert!(SIDR_REP_HEAD + SIDR_REP_DATA <= SIDR_REQ_LEN);
const _: () = assert!(SIDR_REQ_HEAD + SIDR_REQ_DATA <= SIDR_REQ_LEN);
