//! Work requests of the send queue.

use quipu_host::nic::{Key, Payload, SendFlags, SendOp, SendWr, Sge, To};

use crate::memory::RemoteMemory;

/// A work request of the send queue: what to do, with which memory, and how.
///
/// It is signalled unless [`unsignaled`](Self::unsignaled) says otherwise.
///
/// ```
/// # use quipu::{Request, Sge, RemoteMemory, Key};
/// # let (memory, remote) = ([Sge::default()], RemoteMemory { addr: 0, len: 0, rkey: Key(0) });
/// let hello = Request::send_inline(b"hello").id(1).unsignaled();
/// let last = Request::write(&memory, remote).with_imm(42).solicited().fence().id(2);
/// ```
#[derive(Clone, Copy, Debug)]
#[must_use]
pub struct Request<'a> {
    pub(crate) wr: SendWr<'a>,
}

impl<'a> Request<'a> {
    fn new(op: SendOp, payload: Payload<'a>) -> Self {
        Self { wr: SendWr { wr_id: 0, to: To::Peer, op, flags: SendFlags::SIGNALED, payload } }
    }

    /// Sends the bytes of `memory` as one message into the peer's next receive. The memory is read
    /// while the request is under way; change it when it has completed.
    pub fn send(memory: &'a [Sge]) -> Self {
        Self::new(SendOp::Send, Payload::Sges(memory))
    }

    /// As [`send`](Self::send), of bytes that are copied when the request is posted. They may be as
    /// many as the queue pair was built for.
    pub fn send_inline(bytes: &'a [u8]) -> Self {
        let mut request = Self::new(SendOp::Send, Payload::Inline(bytes));
        request.wr.flags |= SendFlags::INLINE;
        request
    }

    /// Writes the bytes of `memory` into the peer's. The peer's program notices nothing.
    pub fn write(memory: &'a [Sge], to: RemoteMemory) -> Self {
        let op = SendOp::Write { addr: to.addr, rkey: to.rkey.0 };
        Self::new(op, Payload::Sges(memory))
    }

    /// As [`write`](Self::write), of bytes that are copied when the request is posted.
    pub fn write_inline(bytes: &'a [u8], to: RemoteMemory) -> Self {
        let op = SendOp::Write { addr: to.addr, rkey: to.rkey.0 };
        let mut request = Self::new(op, Payload::Inline(bytes));
        request.wr.flags |= SendFlags::INLINE;
        request
    }

    /// Reads the peer's memory, from its first byte on, into `memory`.
    pub fn read(memory: &'a [Sge], from: RemoteMemory) -> Self {
        let op = SendOp::Read { addr: from.addr, rkey: from.rkey.0 };
        Self::new(op, Payload::Sges(memory))
    }

    /// Stores `swap` in the 8 aligned bytes of the peer's memory if they hold `compare`. What they
    /// held comes into the 8 bytes of `memory`.
    pub fn compare_swap(memory: &'a [Sge], at: RemoteMemory, compare: u64, swap: u64) -> Self {
        let op = SendOp::CompareSwap { addr: at.addr, rkey: at.rkey.0, compare, swap };
        Self::new(op, Payload::Sges(memory))
    }

    /// Adds to the 8 aligned bytes of the peer's memory. What they held comes into the 8 bytes of
    /// `memory`.
    pub fn fetch_add(memory: &'a [Sge], at: RemoteMemory, add: u64) -> Self {
        let op = SendOp::FetchAdd { addr: at.addr, rkey: at.rkey.0, add };
        Self::new(op, Payload::Sges(memory))
    }

    /// The number that comes back in the completion.
    pub fn id(mut self, wr_id: u64) -> Self {
        self.wr.wr_id = wr_id;
        self
    }

    /// Gives the peer 32 bits beside the bytes. A write with them consumes a receive of the peer,
    /// which so learns of it. Reads and atomics stay as they are.
    pub fn with_imm(mut self, imm: u32) -> Self {
        self.wr.op = match self.wr.op {
            SendOp::Send | SendOp::SendInv(_) => SendOp::SendImm(imm),
            SendOp::Write { addr, rkey } => SendOp::WriteImm { addr, rkey, imm },
            other => other,
        };
        self
    }

    /// Invalidates a key of the peer when the message arrives. Sends only; others stay as they are.
    pub fn invalidating(mut self, key: Key) -> Self {
        if matches!(self.wr.op, SendOp::Send | SendOp::SendImm(_)) {
            self.wr.op = SendOp::SendInv(key.0);
        }
        self
    }

    /// Leaves out the completion of a success.
    pub fn unsignaled(mut self) -> Self {
        self.wr.flags -= SendFlags::SIGNALED;
        self
    }

    /// Begins only when the earlier reads and atomics of the queue pair are done.
    pub fn fence(mut self) -> Self {
        self.wr.flags |= SendFlags::FENCE;
        self
    }

    /// Wakes a peer that waits for solicited messages only.
    pub fn solicited(mut self) -> Self {
        self.wr.flags |= SendFlags::SOLICITED;
        self
    }
}
