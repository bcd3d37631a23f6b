//! Work requests of the send queue.

use quipu_host::nic::{Flush, Key, Payload, Placement, SendFlags, SendOp, SendWr, Sge, To};

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

    fn inline(op: SendOp, bytes: &'a [u8]) -> Self {
        let mut request = Self::new(op, Payload::Inline(bytes));
        request.wr.flags |= SendFlags::INLINE;
        request
    }

    /// Sends the bytes of `memory` as one message into the peer's next receive. The memory is read
    /// while the request is under way; change it when it has completed.
    pub fn send(memory: &'a [Sge]) -> Self {
        Self::new(SendOp::Send, Payload::Sges(memory))
    }

    /// As [`send`](Self::send), of bytes that are copied when the request is posted. They may be as
    /// many as the queue pair was built for.
    pub fn send_inline(bytes: &'a [u8]) -> Self {
        Self::inline(SendOp::Send, bytes)
    }

    /// Writes the bytes of `memory` into the peer's. The peer's program notices nothing.
    pub fn write(memory: &'a [Sge], to: RemoteMemory) -> Self {
        let op = SendOp::Write { addr: to.addr, rkey: to.rkey.0 };
        Self::new(op, Payload::Sges(memory))
    }

    /// As [`write`](Self::write), of bytes that are copied when the request is posted.
    pub fn write_inline(bytes: &'a [u8], to: RemoteMemory) -> Self {
        Self::inline(SendOp::Write { addr: to.addr, rkey: to.rkey.0 }, bytes)
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

    /// Stores 8 bytes in the peer's memory in one piece: whoever looks there sees what was there before or
    /// all of them (IBA A19). They are copied when the request is posted, whatever inline data the queue pair
    /// was built for.
    ///
    /// As a write it tells nobody and orders nothing: ahead of a word that announces what was written stands
    /// a [`flush`](Self::flush) of that.
    ///
    /// # Errors
    ///
    /// Posting fails with [`Fault::Invalid`](crate::Fault::Invalid) if the address is no multiple of 8, or
    /// the queue pair is not of a reliable connection. The peer refuses it where it would refuse a write.
    ///
    /// ```
    /// # use quipu::{Access, Config, Device, Request, WcOpcode};
    /// # fn main() -> Result<(), quipu::Error> {
    /// # let config = Config { address: Some("127.0.0.1".parse().unwrap()), ..Config::default() };
    /// # let device = Device::open(config)?;
    /// # let (pd, cq) = (device.protection_domain()?, device.completion_queue(16)?);
    /// # let (left, right) = (pd.queue_pair(&cq, &cq).build()?, pd.queue_pair(&cq, &cq).build()?);
    /// # left.connect(&right.endpoint())?;
    /// # right.connect(&left.endpoint())?;
    /// let log = pd.register(4096, Access::LOCAL_WRITE | Access::REMOTE)?;
    /// let (entry, head) = (log.remote(64, 5)?, log.remote(0, 8)?);
    /// left.post_sends(&[
    ///     Request::write_inline(b"entry", entry).unsignaled(),
    ///     Request::flush(entry).unsignaled(),
    ///     Request::atomic_write(&1u64.to_ne_bytes(), head),
    /// ])
    /// .map_err(|(_, error)| error)?;
    /// assert_eq!(cq.next()?.opcode, WcOpcode::AtomicWrite);
    /// assert_eq!(log.to_vec(0, 8)?, 1u64.to_ne_bytes());
    /// # Ok(())
    /// # }
    /// ```
    pub fn atomic_write(word: &'a [u8; 8], at: RemoteMemory) -> Self {
        Self::inline(SendOp::AtomicWrite { addr: at.addr, rkey: at.rkey.0 }, word)
    }

    /// Completes when all that this queue pair wrote before to these bytes of the peer's memory is where all
    /// of the peer's host sees it (IBA A19, global visibility); no bytes at all may be named. The peer's
    /// program notices nothing.
    ///
    /// Writes of this adapter complete no sooner either: a flush is for programs that must not rely on that,
    /// and one behind many writes that are [`unsignaled`](Self::unsignaled) tells of all of them.
    ///
    /// # Errors
    ///
    /// Posting fails with [`Fault::Invalid`](crate::Fault::Invalid) if the queue pair is not of a reliable
    /// connection. The request fails with [`WcStatus::RemAccessErr`](crate::WcStatus::RemAccessErr) if the
    /// memory was registered without [`Access::FLUSH_GLOBAL`](crate::Access::FLUSH_GLOBAL) or the bytes leave
    /// it, and with [`WcStatus::RemInvReqErr`](crate::WcStatus::RemInvReqErr) if the peer's queue pair does
    /// not grant flushes ([`remote_access`](crate::QueuePairBuilder::remote_access)), or the peer is an
    /// adapter that does not know them.
    ///
    /// ```
    /// # use quipu::{Access, Config, Device, Request, WcOpcode};
    /// # fn main() -> Result<(), quipu::Error> {
    /// # let config = Config { address: Some("127.0.0.1".parse().unwrap()), ..Config::default() };
    /// # let device = Device::open(config)?;
    /// # let (pd, cq) = (device.protection_domain()?, device.completion_queue(16)?);
    /// # let (left, right) = (pd.queue_pair(&cq, &cq).build()?, pd.queue_pair(&cq, &cq).build()?);
    /// # left.connect(&right.endpoint())?;
    /// # right.connect(&left.endpoint())?;
    /// let access = Access::LOCAL_WRITE | Access::REMOTE_WRITE | Access::FLUSH_GLOBAL;
    /// let there = pd.register(4096, access)?;
    /// let to = there.remote(0, 4096)?;
    /// for line in 0..64 {
    ///     left.post_send(&Request::write_inline(b"a line", to.slice(64 * line, 6)).unsignaled())?;
    /// }
    /// left.post_send(&Request::flush(to).id(7))?;
    /// let done = cq.next()?;
    /// assert_eq!((done.wr_id, done.opcode), (7, WcOpcode::Flush));
    /// assert_eq!(there.to_vec(64 * 63, 6)?, b"a line");
    /// # Ok(())
    /// # }
    /// ```
    pub fn flush(range: RemoteMemory) -> Self {
        Self::flush_of(range, false)
    }

    /// As [`flush`](Self::flush), of the whole region, or memory window, that the key is of.
    pub fn flush_region(of: RemoteMemory) -> Self {
        Self::flush_of(of, true)
    }

    fn flush_of(RemoteMemory { addr, len, rkey }: RemoteMemory, whole: bool) -> Self {
        let flush = Flush { addr, rkey: rkey.0, len, whole, placement: Placement::GLOBAL };
        Self::new(SendOp::Flush(flush), Payload::Sges(&[]))
    }

    /// The number that comes back in the completion.
    pub fn id(mut self, wr_id: u64) -> Self {
        self.wr.wr_id = wr_id;
        self
    }

    /// Gives the peer 32 bits beside the bytes. A write with them consumes a receive of the peer,
    /// which so learns of it. Reads, atomics, atomic writes and flushes stay as they are.
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
