//! Numbers that programs know (`vipl.h`).

/// What a call returns (`VIP_RETURN`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u32)]
pub enum Code {
    /// It did what it is for.
    Success = 0,
    /// Nothing has completed yet.
    NotDone = 1,
    /// A handle, pointer or value is not legal.
    InvalidParameter = 2,
    /// A limit is reached, or the object is in use.
    ErrorResource = 3,
    /// The time is over.
    Timeout = 4,
    /// The peer does not want the connection.
    Reject = 5,
    /// The reliability level is unknown, or not the peer's.
    InvalidReliabilityLevel = 6,
    /// The transfer size is too large, or not the peer's.
    InvalidMtu = 7,
    /// The quality of service is not the peer's.
    InvalidQos = 8,
    /// No such protection tag.
    InvalidPtag = 9,
    /// RDMA reads are not supported at this reliability level.
    InvalidRdmaRead = 10,
    /// The descriptor failed, or the queue is empty.
    DescriptorError = 11,
    /// The VI is in another state.
    InvalidState = 12,
    /// The name service failed.
    ErrorNameService = 13,
    /// Nobody waits at that address.
    NoMatch = 14,
    /// There is no way to that host.
    NotReachable = 15,
    /// There is no such function.
    ErrorNotSupported = 16,
}

/// Outcome of an operation whose failure has a code.
pub type Outcome<T = ()> = Result<T, Code>;

/// State of a VI (`VIP_VI_STATE`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[repr(u32)]
pub enum State {
    /// Not connected.
    #[default]
    Idle = 0,
    /// Data flow.
    Connected = 1,
    /// A connection was requested.
    Pending = 2,
    /// The connection is broken.
    Error = 3,
}

/// Reliability level (`VIP_RELIABILITY_LEVEL`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u16)]
pub enum Reliability {
    /// Messages may be lost.
    Unreliable = 1,
    /// Messages arrive once and in order, or the connection breaks.
    Delivery = 2,
    /// As `Delivery`; a send or RDMA write completes when its data are in the target's memory.
    Reception = 4,
}

impl Reliability {
    /// The level of a number, if there is one.
    pub fn from_number(number: u16) -> Option<Self> {
        match number {
            1 => Some(Self::Unreliable),
            2 => Some(Self::Delivery),
            4 => Some(Self::Reception),
            _ => None,
        }
    }
}

bitflags::bitflags! {
    /// A descriptor's status word (`VIP_STATUS_*`).
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
    pub struct Status: u32 {
        /// The operation is over.
        const DONE = 0x1;
        /// The descriptor is malformed.
        const FORMAT_ERROR = 0x2;
        /// A local handle, range or tag is wrong.
        const PROTECTION_ERROR = 0x4;
        /// The message is longer than the receive.
        const LENGTH_ERROR = 0x8;
        /// A part of the message has arrived.
        const PARTIAL_ERROR = 0x10;
        /// The connection ended before the operation did.
        const FLUSHED = 0x20;
        /// The peer or the way to it is gone.
        const TRANSPORT_ERROR = 0x40;
        /// The peer refuses the handle, range or right of an RDMA operation.
        const RDMA_PROT_ERROR = 0x80;
        /// The peer's receive descriptor failed, or there was none.
        const REMOTE_DESC_ERROR = 0x100;
        /// A receive completed.
        const OP_RECEIVE = 0x1_0000;
        /// An RDMA write completed.
        const OP_RDMA_WRITE = 0x2_0000;
        /// An RDMA write with immediate data of the peer completed a receive.
        const OP_REMOTE_RDMA_WRITE = 0x3_0000;
        /// An RDMA read completed.
        const OP_RDMA_READ = 0x4_0000;
        /// `ImmediateData` came from the peer.
        const IMMEDIATE = 0x8_0000;
    }
}

impl Status {
    /// All bits that say why an operation failed.
    pub const ERRORS: Self = Self::from_bits_retain(0x1fe);

    /// Whether the operation failed.
    pub fn is_error(self) -> bool {
        self.intersects(Self::ERRORS)
    }
}

/// Asynchronous error (`VIP_ERROR_CODE`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u32)]
pub enum AsyncError {
    /// A descriptor cannot be read.
    PostDescriptor = 0,
    /// The connection is lost.
    ConnectionLost = 1,
    /// A message met no receive.
    ReceiveQueueEmpty = 2,
    /// A work queue or completion queue has overflowed.
    Overrun = 3,
    /// The peer's RDMA write hit memory that it may not write.
    RdmaWriteProtection = 4,
    /// Data of an RDMA write were damaged.
    RdmaWriteData = 5,
    /// An RDMA write was aborted.
    RdmaWriteAbort = 6,
    /// The peer's RDMA read hit memory that it may not read.
    RdmaReadProtection = 7,
    /// A status could not be written.
    CompletionProtection = 8,
    /// An RDMA operation failed on its way.
    RdmaTransport = 9,
    /// The adapter is lost.
    Catastrophic = 10,
}

/// What an asynchronous error is about (`VIP_RESOURCE_CODE`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u32)]
pub enum Resource {
    /// The NIC.
    Nic = 0,
    /// A VI.
    Vi = 1,
    /// A completion queue.
    Cq = 2,
    /// A descriptor.
    Descriptor = 3,
}
