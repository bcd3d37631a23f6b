//! Why bytes are not a legal representation.

use thiserror::Error;

/// Why a `parse` refused its bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum WireError {
    /// Fewer bytes than the format needs.
    #[error("{have} bytes where at least {need} are needed")]
    Truncated {
        /// Least number of bytes that the format needs.
        need: usize,
        /// Number of bytes at hand.
        have: usize,
    },
    /// A payload of fixed size has another size.
    #[error("payload of {have} bytes where exactly {need} are needed")]
    BadLength {
        /// The size of the format.
        need: usize,
        /// Number of bytes at hand.
        have: usize,
    },
    /// The first 16 bytes are not the key of the MPA frame expected (RFC 5044 7.1.1).
    #[error("not an MPA start-up frame of the expected kind")]
    BadKey,
    /// PD_Length above 512 (RFC 5044 7.1.1).
    #[error("private data of {0} bytes exceeds 512")]
    PrivateDataTooLong(u16),
    /// The S flag is set but there is no room for IRD and ORD in the private data (RFC 6581 9).
    #[error("enhanced MPA frame without its four bytes of IRD and ORD")]
    NoEnhancedData,
    /// A DDP version other than 1 (RFC 5041 4.1).
    #[error("DDP version {version}")]
    DdpVersion {
        /// Whether the T flag was set.
        tagged: bool,
        /// The version found.
        version: u8,
    },
    /// An RDMAP version other than 1 (RFC 5040 4.1).
    #[error("RDMAP version {0}")]
    RdmapVersion(u8),
    /// An atomic operation code other than FetchAdd and CmpSwap (RFC 7306 5.2.1).
    #[error("atomic operation code {0:#x}")]
    UnknownAtomic(u8),
    /// A Quipu control message of unknown kind.
    #[error("control message of kind {0}")]
    UnknownControl(u8),
    /// A field of a Quipu message holds a value outside its range.
    #[error("field {0} out of range")]
    OutOfRange(&'static str),
    /// Private data that do not begin with Quipu's magic number: the peer is a plain iWARP adapter.
    #[error("private data are not a Quipu hello")]
    NotHello,
    /// A hello of a version this build does not speak.
    #[error("hello version {0}")]
    HelloVersion(u8),
    /// A UDP payload that does not begin as a datagram of Quipu.
    #[error("not a datagram of Quipu")]
    NotDatagram,
    /// A datagram of a version this build does not speak.
    #[error("datagram version {0}")]
    DatagramVersion(u8),
    /// An IP packet of another version than expected.
    #[error("IP version {0}")]
    IpVersion(u8),
    /// An internet checksum (RFC 1071) that does not fit.
    #[error("wrong checksum")]
    BadChecksum,
    /// An ICMP message of a kind that this stack does not read, or of an unknown code.
    #[error("ICMP message of type {0}")]
    UnknownIcmp(u8),
}
