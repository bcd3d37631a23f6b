//! The one error of the library.

use quipu_host::connection::EventKind;
use quipu_host::nic::{Completion, Fault, WcStatus};
use quipu_host::{EngineError, OpenError};

/// Why a call failed, or how a work request did.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The device cannot be opened.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// The adapter or the system refuses the call.
    #[error(transparent)]
    Engine(#[from] EngineError),
    /// A work request did not succeed; the completion says how. Unless it is a receive of a shared
    /// queue, its queue pair is in error now.
    #[error("work request {} of queue pair {:#08x} failed: {:?}", .0.wr_id, .0.qp_num.0, .0.status)]
    Work(Completion),
    /// A range leaves the memory region.
    #[error("{len} bytes at {offset} are outside the memory region of {region} bytes")]
    OutOfBounds {
        /// The first byte asked for.
        offset: usize,
        /// Bytes asked for.
        len: usize,
        /// Bytes there are.
        region: usize,
    },
    /// The peer does not want the connection, or nobody listens there.
    #[error("the peer rejected the connection: {}", rejection(*reason))]
    Rejected {
        /// As InfiniBand numbers them (IBA 12.6.7.2): 8 if nobody listens, 28 if the program refuses.
        reason: i32,
        /// What the program there has to say, padded with zeros.
        private_data: Box<[u8]>,
    },
    /// A connection cannot be made, or ended before it stood.
    #[error("cannot connect: {kind:?}, status {status}")]
    Connection {
        /// How it ended.
        kind: EventKind,
        /// 0, a negative errno, or a reason.
        status: i32,
    },
    /// The device connects plain iWARP adapters by address ([`Config::cm_device`](crate::Config::cm_device)),
    /// for which there are no queue pairs here.
    #[error("connections by address use plain iWARP here")]
    PlainIwarp,
    /// A TCP connection of a queue pair has failed.
    #[error("{0}")]
    Tcp(quipu_host::inet::tcp::Failure),
    /// Endpoints could not be exchanged.
    #[error("the endpoints could not be exchanged: {0}")]
    Exchange(#[source] std::io::Error),
}

impl Error {
    /// The status of the work request that failed, if it is about one.
    #[must_use]
    pub fn work_status(&self) -> Option<WcStatus> {
        match self {
            Self::Work(completion) => Some(completion.status),
            _ => None,
        }
    }
}

impl From<Fault> for Error {
    fn from(fault: Fault) -> Self {
        Self::Engine(fault.into())
    }
}

/// A reason of InfiniBand in words.
fn rejection(reason: i32) -> String {
    match reason {
        8 => "no program listens at that port (reason 8)".to_owned(),
        28 => "the program there refused it (reason 28)".to_owned(),
        other => format!("reason {other}"),
    }
}
