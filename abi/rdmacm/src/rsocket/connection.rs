//! A connection: the stream protocol over a queue pair and its completion queue.

mod mapped;

use std::ptr;

use libc::c_int;
use quipu_abi_types::*;
use quipu_cabi::Errno;

use super::buffer::Buffer;
use super::memory::Memory;
use super::stream::{Incoming, Outgoing};
use super::wire::{Greeting, Mapping, Message};
use super::{Options, PIECE};
use crate::verbs::{number, verbs};
use crate::{id, qp};

/// Completions that are looked at in one go.
const BATCH: usize = 32;
/// How often that is done before the program gets its turn.
const BATCHES: usize = 16;
/// The work request identifier of sends; those of receives are their numbers.
const SEND: u64 = u64::MAX;
/// Bytes of a message where it is a send.
const WORD: usize = 4;

/// A connection's queue pair, memory and books. The identifier is the socket's, which drops this
/// first.
pub(crate) struct Connection {
    id: *mut rdma_cm_id,
    memory: Memory,
    own: Greeting,
    incoming: Incoming,
    /// What is known once the peer has greeted.
    peer: Option<(Greeting, Outgoing)>,
    /// Bytes under way, behind the ring and the table in `memory`.
    buffer: Buffer,
    buffer_at: usize,
    /// How many sends may be under way.
    sends: usize,
    /// Whether messages are sends: an RNIC has no immediate data with RDMA writes (RFC 5040).
    by_sends: bool,
    /// Where what is received by sends lies, and the number of the next receive.
    words_at: usize,
    next_receive: u32,
    /// An event was asked for and not taken.
    armed: bool,
    /// Why nothing goes any more.
    broken: Option<Errno>,
    /// Whether this end sends no more, and whether it has said so.
    pub(crate) ending: bool,
    pub(crate) end_told: bool,
    /// Local regions that the peer writes to, by their place in its table.
    pub(crate) mapped: Vec<Option<(*mut ibv_mr, Mapping)>>,
    /// Local regions that are registered for this end alone: address and length.
    pub(crate) private: Vec<(*mut ibv_mr, (u64, u64))>,
}

// SAFETY: the pointers are to objects of libibverbs and an identifier, which may be used from any
// thread.
unsafe impl Send for Connection {}

/// The sizes that an identifier's device has room for.
///
/// # Safety
///
/// `id` is an identifier.
pub(crate) unsafe fn fitted(id: *mut rdma_cm_id, options: &Options) -> Result<Options, Errno> {
    // SAFETY: passed on from the caller.
    let device = unsafe { id::id(id) }?.book().device.ok_or(Errno::ENODEV)?;
    let [sends, receives] =
        [options.sends, options.receives].map(|size| size.min(device.max_requests));
    Ok(Options { sends, receives, ..*options })
}

impl Connection {
    /// Makes queue pair and memory for an identifier that is bound to a device, and posts the receives.
    ///
    /// # Safety
    ///
    /// `id` is an identifier without a queue pair, which outlives this.
    pub(crate) unsafe fn new(id: *mut rdma_cm_id, options: &Options) -> Result<Self, Errno> {
        let Options { ring, buffer, sends, receives, mappings, .. } = *options;
        let mut own = Greeting { addr: 0, rkey: 0, ring, receives, mappings };
        let buffer_at = own.table() as usize + own.table_len() as usize;
        let words_at = buffer_at + buffer as usize;
        // SAFETY: passed on from the caller.
        let by_sends = unsafe { (*(*(*id).verbs).device).transport_type } == IBV_TRANSPORT_IWARP;
        let words = if by_sends { receives as usize * WORD } else { 0 };
        // SAFETY: passed on from the caller; the domain is that of the device, which outlives it.
        let memory = unsafe { Memory::new((*id).pd, words_at + words) }?;
        (own.addr, own.rkey) = (memory.addr(), memory.keys().1);
        // SAFETY: passed on from the caller.
        unsafe { create_queues(id, sends, receives) }?;
        let mut this = Self {
            id,
            memory,
            incoming: Incoming::new(&own),
            own,
            peer: None,
            buffer: Buffer::new(buffer as usize),
            buffer_at,
            sends: sends as usize,
            by_sends,
            words_at,
            next_receive: 0,
            armed: false,
            broken: None,
            ending: false,
            end_told: false,
            mapped: Vec::new(),
            private: Vec::new(),
        };
        this.post_receives(receives)?;
        Ok(this)
    }

    pub(crate) fn greeting(&self) -> &Greeting {
        &self.own
    }

    /// What the peer has said of itself.
    pub(crate) fn greeted(&mut self, peer: Greeting) {
        self.peer = Some((peer, Outgoing::new(&peer)));
        self.mapped.resize_with(peer.mappings as usize, || None);
    }

    /// Whether [`progress`](Self::progress) polls the completion queue.
    pub(crate) fn is_polled(&self) -> bool {
        self.peer.is_some()
    }

    pub(crate) fn break_with(&mut self, errno: Errno) {
        self.broken.get_or_insert(errno);
    }

    pub(crate) fn broken(&self) -> Option<Errno> {
        self.broken
    }

    pub(crate) fn unread(&self) -> u64 {
        self.incoming.unread()
    }

    /// Bytes that have ever come.
    pub(crate) fn arrived(&self) -> u64 {
        self.incoming.arrived()
    }

    /// Whether no more will come than is there.
    pub(crate) fn ended(&self) -> bool {
        self.incoming.ended() || self.broken.is_some()
    }

    /// Why it broke before the peer had said that it sends no more.
    pub(crate) fn lost(&self) -> Option<Errno> {
        self.broken.filter(|_| !self.incoming.ended())
    }

    /// Whether the peer has said that it sends no more, and all of it was taken.
    pub(crate) fn has_end(&self) -> bool {
        self.incoming.ended() && self.unread() == 0
    }

    /// Whether everything that was sent has arrived.
    pub(crate) fn is_flushed(&self) -> bool {
        self.buffer.pieces() == 0 || self.broken.is_some()
    }

    /// Whether at least one byte can be sent.
    pub(crate) fn is_writable(&self) -> bool {
        self.room(1).is_some() && self.peer.as_ref().is_some_and(|(_, out)| out.room().len > 0)
    }

    /// Whether what is no data can be sent.
    fn may_tell(&self) -> bool {
        self.buffer.pieces() < self.sends
            && self.peer.as_ref().is_some_and(|(_, out)| out.may_tell())
    }

    /// Place for a piece of at least so many bytes.
    fn room(&self, least: usize) -> Option<(usize, usize)> {
        // A message with bytes is two requests where it is a send.
        let requests = 1 + usize::from(self.by_sends);
        if self.broken.is_some() || self.buffer.pieces() + requests > self.sends {
            return None;
        }
        let (at, len) = self.buffer.room(least);
        (len >= least).then_some((at, len))
    }

    /// Takes completions and does what they say. True if there may be more: a peer that never stops is not
    /// to keep the program here.
    pub(crate) fn progress(&mut self) -> bool {
        // An RNIC takes what the peer sends before this end has heard that the connection stands.
        if self.peer.is_none() {
            return false;
        }
        // SAFETY: the structure consists of integers.
        let mut done: [ibv_wc; BATCH] = unsafe { std::mem::zeroed() };
        for _ in 0..BATCHES {
            let count = self.poll(&mut done);
            let mut receives = 0;
            for wc in &done[..count] {
                if wc.status != IBV_WC_SUCCESS {
                    self.break_with(Errno(libc::ECONNRESET));
                } else if wc.wr_id != SEND {
                    receives += 1;
                    self.received(self.word(wc));
                }
                if wc.wr_id == SEND {
                    self.buffer.free();
                }
            }
            if self.broken.is_none()
                && receives > 0
                && let Err(errno) = self.post_receives(receives)
            {
                self.break_with(errno);
            }
            self.tell();
            if count < BATCH {
                return false;
            }
        }
        true
    }

    fn poll(&mut self, done: &mut [ibv_wc; BATCH]) -> usize {
        // SAFETY: the queue is the identifier's, made by `create_queues`; the table is filled.
        let count = unsafe {
            let cq = (*self.id).recv_cq;
            let Some(poll) = (*(*cq).context).ops.poll_cq else { return 0 };
            poll(cq, BATCH as c_int, done.as_mut_ptr())
        };
        if count < 0 {
            self.break_with(Errno::EIO);
        }
        usize::try_from(count).unwrap_or(0)
    }

    /// What a receive has brought; none if that is no message.
    fn word(&self, wc: &ibv_wc) -> Option<u32> {
        if !self.by_sends {
            return Some(u32::from_be(wc.imm_data));
        }
        let mut word = [0; WORD];
        let at = self.words_at + wc.wr_id as usize * WORD;
        // SAFETY: the array has room.
        unsafe { self.memory.read(at, word.as_mut_ptr(), WORD) };
        (wc.byte_len as usize == WORD).then_some(u32::from_be_bytes(word))
    }

    fn received(&mut self, word: Option<u32>) {
        let result = match (&mut self.peer, word) {
            (Some((_, out)), Some(word)) => self.incoming.message(Message::decode(word), out),
            _ => Err(super::stream::Violation),
        };
        if result.is_err() {
            self.break_with(Errno(libc::EPROTO));
        }
    }

    /// Tells the peer what is due: what was taken, and the end.
    pub(crate) fn tell(&mut self) {
        while let Some(message) = self.incoming.due()
            && self.may_tell()
        {
            self.incoming.told(message);
            if let Err(errno) = self.post_message(message, 0, 0, 0) {
                self.break_with(errno);
            }
        }
        if self.ending && !self.end_told && self.broken.is_none() && self.may_tell() {
            self.end_told = true;
            if let Err(errno) = self.post_message(Message::End, 0, 0, 0) {
                self.break_with(errno);
            }
        }
    }

    /// Sends no more, and says so as soon as that may be; whether it is done.
    pub(crate) fn end(&mut self) -> bool {
        self.ending = true;
        self.tell();
        self.end_told || self.broken.is_some()
    }

    /// Copies what is there to the program's memory, from `skip` bytes on, at most `len`; how much.
    ///
    /// # Safety
    ///
    /// `to` has room for `len` bytes.
    pub(crate) unsafe fn copy_out(&self, skip: u64, to: *mut u8, len: usize) -> usize {
        let mut copied = 0;
        while copied < len && skip + (copied as u64) < self.unread() {
            let span = self.incoming.readable(skip + copied as u64);
            let piece = span.len.min(len - copied);
            // SAFETY: passed on from the caller.
            unsafe { self.memory.read(span.at, to.add(copied), piece) };
            copied += piece;
        }
        copied
    }

    /// The program has got so many bytes.
    pub(crate) fn take(&mut self, len: usize) {
        self.incoming.take(len);
        self.tell();
    }

    /// Sends a part of the program's bytes, as much as fits now; how much.
    ///
    /// # Safety
    ///
    /// `from` has `len` bytes.
    pub(crate) unsafe fn send(&mut self, from: *const u8, len: usize) -> Result<usize, Errno> {
        let mut sent = 0;
        while sent < len {
            let Some((peer, out)) = &self.peer else { break };
            let span = out.room();
            let Some((at, room)) = self.room(1) else { break };
            let piece = span.len.min(room).min(len - sent).min(PIECE);
            if piece == 0 {
                break;
            }
            let remote = peer.addr + span.at as u64;
            // SAFETY: passed on from the caller.
            unsafe { self.memory.write(self.buffer_at + at, from.add(sent), piece) };
            match self.post_message(Message::Data(piece as u32), at, piece, remote) {
                Ok(()) => sent += piece,
                // What was sent before is not to be sent again.
                Err(_) if sent > 0 => break,
                Err(errno) => return Err(errno),
            }
        }
        Ok(sent)
    }

    /// Sends a message; data lie in the buffer and go to the address in the peer's ring.
    fn post_message(
        &mut self,
        message: Message,
        at: usize,
        len: usize,
        remote: u64,
    ) -> Result<(), Errno> {
        let (Greeting { addr, rkey, .. }, _) = *self.peer.as_ref().ok_or(Errno::ENOTCONN)?;
        if self.by_sends {
            self.post_sends(message, at, len, remote, rkey)?;
        } else {
            let remote = if len == 0 { addr } else { remote };
            self.post(Some(message), at, len, remote, rkey)?;
        }
        // What could not be posted was not sent, and what is sent next takes its place.
        if let Some((_, out)) = &mut self.peer {
            out.sent(message);
        }
        Ok(())
    }

    /// Sends a message as a send, which arrives behind its bytes (RFC 5040). Both are posted together, and so
    /// are one segment.
    fn post_sends(
        &mut self,
        message: Message,
        at: usize,
        len: usize,
        remote: u64,
        rkey: u32,
    ) -> Result<(), Errno> {
        let word = message.encode().to_be_bytes();
        let mut sge = ibv_sge { addr: word.as_ptr() as u64, length: WORD as u32, lkey: 0 };
        let mut send = request(IBV_WR_SEND, &mut sge);
        send.send_flags |= IBV_SEND_INLINE;
        if len == 0 {
            return self.post_list(&mut send, &[(0, 0)]);
        }
        let mut sge = self.piece(at, len);
        let mut write = request(IBV_WR_RDMA_WRITE, &mut sge);
        write.wr.rdma = ibv_send_wr_rdma { remote_addr: remote, rkey };
        write.next = &mut send;
        self.post_list(&mut write, &[(at, len), (0, 0)])
    }

    fn post(
        &mut self,
        message: Option<Message>,
        at: usize,
        len: usize,
        remote: u64,
        rkey: u32,
    ) -> Result<(), Errno> {
        let mut sge = self.piece(at, len);
        let mut wr = request(IBV_WR_RDMA_WRITE, &mut sge);
        if let Some(message) = message {
            wr.opcode = IBV_WR_RDMA_WRITE_WITH_IMM;
            wr.imm_data = message.encode().to_be();
        }
        wr.wr.rdma = ibv_send_wr_rdma { remote_addr: remote, rkey };
        self.post_list(&mut wr, &[(at, len)])
    }

    /// A piece of the buffer.
    fn piece(&self, at: usize, len: usize) -> ibv_sge {
        ibv_sge {
            addr: self.memory.addr() + (self.buffer_at + at) as u64,
            length: len as u32,
            lkey: self.memory.keys().0,
        }
    }

    /// Posts requests, for each of which a piece of the buffer is in use until it ends.
    fn post_list(
        &mut self,
        first: &mut ibv_send_wr,
        pieces: &[(usize, usize)],
    ) -> Result<(), Errno> {
        let mut next: *mut ibv_send_wr = first;
        let mut bad = next;
        // SAFETY: the queue pair is the identifier's, the table is filled, the requests, a list of as many as
        // there are pieces, are copied.
        unsafe {
            let qp = (*self.id).qp;
            let post = (*(*qp).context).ops.post_send.ok_or(Errno::EOPNOTSUPP)?;
            let posted = number(post(qp, next, &mut bad));
            for &(at, len) in pieces {
                if posted.is_err() && next == bad {
                    break;
                }
                self.buffer.take(at, len);
                next = (*next).next;
            }
            posted
        }
    }

    fn post_receives(&mut self, count: u32) -> Result<(), Errno> {
        // SAFETY: the structure consists of integers and raw pointers.
        let mut wr: ibv_recv_wr = unsafe { std::mem::zeroed() };
        for _ in 0..count {
            // They end in order, so that a number is free again when its turn comes.
            let place = self.next_receive;
            self.next_receive = (place + 1) % self.own.receives;
            wr.wr_id = place.into();
            let at = (self.words_at + place as usize * WORD) as u64;
            let (addr, lkey) = (self.memory.addr() + at, self.memory.keys().0);
            let mut sge = ibv_sge { addr, length: WORD as u32, lkey };
            if self.by_sends {
                (wr.sg_list, wr.num_sge) = (&mut sge, 1);
            }
            let mut bad = ptr::null_mut();
            // SAFETY: as in `post`.
            unsafe {
                let qp = (*self.id).qp;
                let post = (*(*qp).context).ops.post_recv.ok_or(Errno::EOPNOTSUPP)?;
                number(post(qp, &mut wr, &mut bad))?;
            }
        }
        Ok(())
    }

    /// Asks for an event with the next completion, unless one has been asked for that was not taken.
    pub(crate) fn arm(&mut self) {
        if self.armed {
            return;
        }
        // SAFETY: the queue is the identifier's.
        unsafe {
            let cq = (*self.id).recv_cq;
            if let Some(arm) = (*(*cq).context).ops.req_notify_cq {
                self.armed = arm(cq, 0) == 0;
            }
        }
    }

    /// Takes the event, if it has come; whether it has.
    pub(crate) fn take_event(&mut self) -> bool {
        self.armed && self.ask_event()
    }

    /// Takes an event, if there is one; none is asked for then. If there is none the engine takes it that
    /// nobody waits inside of it.
    pub(crate) fn ask_event(&mut self) -> bool {
        let Ok(verbs) = verbs() else { return false };
        let (mut cq, mut context) = (ptr::null_mut(), ptr::null_mut());
        self.armed = false;
        // SAFETY: the channel is the identifier's and does not block.
        unsafe {
            if (verbs.get_cq_event)((*self.id).recv_cq_channel, &mut cq, &mut context) != 0 {
                return false;
            }
            (verbs.ack_cq_events)((*self.id).recv_cq, 1);
        }
        true
    }

    /// What is readable while there is an event.
    pub(crate) fn descriptor(&self) -> c_int {
        // SAFETY: the channel is the identifier's.
        unsafe { (*(*self.id).recv_cq_channel).fd }
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        // The queue pair goes first: then nobody reaches the memory any more.
        // SAFETY: the identifier outlives this; the regions are of `register`.
        unsafe {
            let _ = qp::destroy(self.id);
            if let Ok(verbs) = verbs() {
                for (mr, _) in self.mapped.drain(..).flatten() {
                    (verbs.dereg_mr)(mr);
                }
                for (mr, _) in self.private.drain(..) {
                    (verbs.dereg_mr)(mr);
                }
            }
        }
    }
}

/// A request of one piece, which may be empty.
fn request(opcode: u32, sge: &mut ibv_sge) -> ibv_send_wr {
    // SAFETY: the structure consists of integers, raw pointers and unions of those.
    let mut wr: ibv_send_wr = unsafe { std::mem::zeroed() };
    (wr.wr_id, wr.opcode, wr.send_flags) = (SEND, opcode, IBV_SEND_SIGNALED);
    if sge.length > 0 {
        (wr.sg_list, wr.num_sge) = (sge, 1);
    }
    wr
}

/// A queue pair with one completion queue for both directions, whose channel does not block.
///
/// # Safety
///
/// `id` is an identifier that is bound to a device.
unsafe fn create_queues(id: *mut rdma_cm_id, sends: u32, receives: u32) -> Result<(), Errno> {
    // SAFETY: passed on from the caller; the structure consists of integers and raw pointers.
    unsafe {
        let (channel, cq) = qp::create_cq(id, sends + receives)?;
        ((*id).recv_cq_channel, (*id).send_cq_channel) = (channel, channel);
        ((*id).recv_cq, (*id).send_cq) = (cq, cq);
        super::set_nonblocking((*channel).fd);
        let mut init: ibv_qp_init_attr = std::mem::zeroed();
        init.qp_type = IBV_QPT_RC;
        init.sq_sig_all = 1;
        init.cap.max_send_wr = sends;
        init.cap.max_recv_wr = receives;
        init.cap.max_send_sge = 1;
        init.cap.max_recv_sge = 1;
        init.cap.max_inline_data = WORD as u32;
        let made = qp::create_plain(id, ptr::null_mut(), &mut init);
        if made.is_err() {
            qp::destroy_cqs(id);
        }
        made
    }
}
