//! What can go wrong, by whose fault: the caller's, the peer's, or for lack of resources.

use quipu_mem::{AccessError, RegisterError};

/// A call that the adapter refuses, because of the caller or for lack of resources.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Fault {
    /// The handle names nothing: never created, or destroyed since.
    #[error("no such object: it was destroyed, or never created")]
    NoSuchObject,
    /// The object is still used by others.
    #[error("the object is still in use by another one")]
    Busy,
    /// An argument is outside what the call allows.
    #[error("invalid argument: {0}")]
    Invalid(&'static str),
    /// A state machine has no such transition, or a needed attribute is missing from it.
    #[error("illegal queue pair transition: {0}")]
    Transition(&'static str),
    /// The queue pair is one of plain iWARP, which connection management connects.
    #[error("only rdma_connect and rdma_accept connect an iWARP queue pair, not ibv_modify_qp")]
    ConnectedElsewhere,
    /// A peer is named by LID, on a port of Ethernet.
    #[error(
        "an Ethernet port reaches its peers by GID (is_global; many programs take -g 0 or -x 0), \
         not by LID; for LIDs set QUIPU_LINK_LAYER=infiniband"
    )]
    NoLids,
    /// The queue pair's state forbids the call.
    #[error("the queue pair's state does not allow this")]
    WrongState,
    /// The queue is full.
    #[error("the work queue is full")]
    QueueFull,
    /// Completions were lost for lack of room in the completion queue, and those that were not are taken.
    #[error("the completion queue overran")]
    Overrun,
    /// The adapter does not offer this.
    #[error("not supported: {0}")]
    Unsupported(&'static str),
    /// Somebody has the port, or the connection, already.
    #[error("{0}")]
    Taken(&'static str),
    /// Nothing leads to the peer.
    #[error("{0}")]
    NoRoute(&'static str),
    /// A limit of the adapter is reached.
    #[error("the adapter has no more {0}")]
    Exhausted(&'static str),
    /// A region or window could not be made.
    #[error(transparent)]
    Register(#[from] RegisterError),
    /// A key, range or right was wrong.
    #[error(transparent)]
    Access(#[from] AccessError),
}

/// Why a connection ended or could not be made, as the world below reports it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Loss {
    /// Nobody listens at the address.
    #[error("connection refused")]
    Refused,
    /// No answer within the time allowed.
    #[error("timed out")]
    TimedOut,
    /// The peer closed or reset the connection, or died.
    #[error("closed by the peer")]
    Closed,
    /// The host has no descriptors, memory or route for it.
    #[error("no resources or no route")]
    Unavailable,
}
