//! Faults of the peer on an established connection.

use quipu_wire::rdmap::TaggedOp;
use thiserror::Error;

/// What the peer did wrong after start-up. The stream cannot go on behind any of these: send the
/// Terminate that [`crate::terminate::for_error`] builds, then close.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum ProtocolError {
    /// ULPDU_Length has no room for a DDP header (RFC 5044 4.1, RFC 5041 4); a marker that we did
    /// not ask for, at the place of a length, looks the same (RFC 5044 4.3).
    #[error("ULPDU of {0} bytes")]
    UlpduLength(u16),
    /// An FPDU whose end does not come: its ULPDU_Length was damaged, or the peer does not go on. The
    /// caller's to notice, as only it knows the time.
    #[error("the rest of an FPDU does not come")]
    Unfinished,
    /// The CRC does not match (RFC 5044 4.4).
    #[error("CRC {got:#010x} where the bytes give {computed:#010x}")]
    Crc {
        /// As received.
        got: u32,
        /// As computed.
        computed: u32,
    },
    /// DDP version other than 1 (RFC 5041 4.1).
    #[error("DDP version {version}")]
    DdpVersion {
        /// Whether the segment is tagged.
        tagged: bool,
        /// The version.
        version: u8,
    },
    /// RDMAP version other than 1 (RFC 5040 4.1).
    #[error("RDMAP version {0}")]
    RdmapVersion(u8),
    /// An opcode that is undefined, was not negotiated, or contradicts the T flag (RFC 5040 4.2,
    /// 6.2).
    #[error("unexpected opcode octet {0:#04x}")]
    UnexpectedOpcode(u8),
    /// A queue that does not exist, or is not that of the operation (RFC 5040 4, RFC 5041 7.2).
    #[error("queue {qn} for opcode octet {octet:#04x}")]
    InvalidQueue {
        /// RDMAP control octet.
        octet: u8,
        /// Queue number received.
        qn: u32,
    },
    /// An MSN out of order (RFC 5041 5.3, 7.2).
    #[error("queue {queue}: MSN {got} where {expected} is due")]
    MsnRange {
        /// Queue number.
        queue: u32,
        /// The MSN that is due.
        expected: u32,
        /// The MSN received.
        got: u32,
    },
    /// A message offset that is not where the message went on (RFC 5041 5.3, 7.2).
    #[error("queue {queue}: MO {got} where {expected} is due")]
    InvalidMo {
        /// Queue number.
        queue: u32,
        /// The offset that is due.
        expected: u32,
        /// The offset received.
        got: u32,
    },
    /// The opcode or the ULP field changes within a message (RFC 5040 4.3: one message, one
    /// operation).
    #[error("opcode octet {0:#04x} inside a message of another operation")]
    OperationChanged(u8),
    /// A message longer than 2^32 - 1 bytes (RFC 5041 4.3).
    #[error("message too long")]
    MessageTooLong,
    /// The tagged offset wraps within the segment of such a message (RFC 5041 7.2).
    #[error("tagged offset wraps")]
    ToWrap(TaggedOp),
    /// A message of fixed layout that has another length or several segments (RFC 5040 4.4, RFC
    /// 7306 5.2 and 6).
    #[error("opcode octet {octet:#04x} with a payload of {len} bytes")]
    PayloadLength {
        /// RDMAP control octet.
        octet: u8,
        /// Payload length received.
        len: usize,
    },
    /// An atomic operation code that is not defined (RFC 7306 5.2.1).
    #[error("atomic operation code {0:#x}")]
    UnknownAtomic(u8),
    /// A control message with an undefined kind or a value out of range (`specs/quipu-wire.md` 4).
    #[error("malformed control message")]
    MalformedControl,
    /// A Resume although nothing had been refused (`specs/quipu-wire.md` 5).
    #[error("resume without a refusal")]
    UnexpectedResume,
}
