//! The transport services: all that one does differently from another, in one place.
//!
//! Each question has one method; whoever adds a service answers all of them. What is not asked here is
//! the same for every service.

use quipu_iwarp::wire::hello::Service;

use crate::types::{CqId, QpAttrMask as M, QpType, SendOp};

impl QpType {
    /// Whether the peer acknowledges, refuses and is waited for (IBA 9.7), or drops what it cannot execute
    /// without a word (IBA 9.8).
    #[inline]
    pub(crate) const fn is_reliable(self) -> bool {
        !matches!(self, Self::Uc | Self::Ud | Self::RawPacket | Self::Hashed(_) | Self::Udp)
    }

    /// Whether each of its messages is one datagram.
    pub(crate) const fn is_of_datagrams(self) -> bool {
        matches!(self, Self::Ud | Self::RawPacket | Self::Hashed(_))
    }

    /// Whether connection management hands its stream to it, and nothing but the RFCs is spoken (`plain`).
    #[inline]
    pub(crate) const fn is_plain(self) -> bool {
        matches!(self, Self::Iwarp)
    }

    /// Whether it has a send queue: the end of an XRC connection that is a responder has none, nor what
    /// receives by an indirection table.
    #[inline]
    pub(crate) const fn requests(self) -> bool {
        !matches!(self, Self::XrcRecv(_) | Self::Hashed(_))
    }

    /// Whether it serves requests of its peer: the end of an XRC connection that is a requester does not.
    #[inline]
    pub(crate) const fn responds(self) -> bool {
        !matches!(self, Self::XrcSend)
    }

    /// Whether receives are posted to it, or to a shared queue named when it was created.
    pub(crate) const fn has_receives(self) -> bool {
        !matches!(self, Self::XrcSend | Self::XrcRecv(_) | Self::Hashed(_))
    }

    /// Whether each request that consumes a receive names the shared receive queue that it is of (IBA A14).
    #[inline]
    pub(crate) const fn names_srq(self) -> bool {
        matches!(self, Self::XrcSend | Self::XrcRecv(_))
    }

    /// The queues that a queue pair completes in from its beginning to its end: those for sends and receives,
    /// as it has them. Receives of an XRC connection complete where their shared queue says.
    pub(crate) fn own_cqs(self, send_cq: CqId, recv_cq: CqId) -> impl Iterator<Item = CqId> {
        let receives = self.has_receives().then_some(recv_cq);
        self.requests().then_some(send_cq).into_iter().chain(receives)
    }

    /// Whether a request may be posted (IBA table "work request operations", 11.4.1.1). Unreliable
    /// connections have no operation that needs an answer, and no Send with Invalidate; plain iWARP has no
    /// immediate data and no flush, and atomics where both ends agreed on them only (`plain::does_atomics`).
    #[inline]
    #[must_use]
    pub const fn offers(self, op: &SendOp) -> bool {
        match self {
            Self::Rc | Self::XrcSend => true,
            Self::XrcRecv(_) | Self::Hashed(_) => false,
            Self::RawPacket | Self::Tcp | Self::Udp => matches!(op, SendOp::Send),
            Self::Iwarp => !matches!(
                op,
                SendOp::SendImm(_)
                    | SendOp::WriteImm { .. }
                    | SendOp::AtomicWrite { .. }
                    | SendOp::Flush(_)
            ),
            Self::Ud => matches!(op, SendOp::Send | SendOp::SendImm(_)),
            Self::Uc => !matches!(
                op,
                SendOp::SendInv(_)
                    | SendOp::Read { .. }
                    | SendOp::CompareSwap { .. }
                    | SendOp::FetchAdd { .. }
                    | SendOp::AtomicWrite { .. }
                    | SendOp::Flush(_)
            ),
        }
    }

    /// Attributes of a reliable connection that the service does not have.
    pub(crate) const fn lacks(self) -> M {
        let answers = M::RETRY_CNT.union(M::RNR_RETRY).union(M::MAX_QP_RD_ATOMIC);
        let serving = M::MIN_RNR_TIMER.union(M::MAX_DEST_RD_ATOMIC);
        match self {
            Self::Rc | Self::Iwarp => M::empty(),
            Self::Uc => answers.union(serving).union(M::TIMEOUT),
            Self::XrcSend => serving,
            Self::XrcRecv(_) => answers,
            // They have tables of their own.
            Self::Ud | Self::RawPacket | Self::Hashed(_) | Self::Tcp | Self::Udp => M::empty(),
        }
    }

    /// Those of them that may be given all the same: programs set both ends of an XRC connection up alike, as
    /// the kernel's verbs let them.
    pub(crate) const fn ignores(self) -> M {
        if self.names_srq() { self.lacks() } else { M::empty() }
    }

    /// What the queue pair's end of a connection is called in a hello.
    pub(crate) const fn wire(self) -> Service {
        match self {
            // Plain iWARP has no hello: nobody asks.
            Self::Rc | Self::Iwarp => Service::Rc,
            Self::Uc => Service::Uc,
            Self::XrcSend => Service::XrcRequester,
            Self::XrcRecv(_) => Service::XrcResponder,
            // They have no connection, or one of which no hello speaks.
            Self::Ud | Self::RawPacket | Self::Hashed(_) | Self::Tcp | Self::Udp => {
                Service::Other(u8::MAX)
            }
        }
    }
}
