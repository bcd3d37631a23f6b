//! Messages of the peer.

use quipu_wire::WireError;
use quipu_wire::sdp::{Body, Head, MAX_HEADERS_LEN, Memory, Mode};

use crate::connection::Reset;
use crate::receive::Segment;
use crate::{Connection, PeerMisbehaved};

/// A message in a receive buffer. The payload stays there: others may have access to the buffer, so what
/// is looked at is a copy of the headers.
#[derive(Clone, Copy, Debug)]
pub struct Received<'a> {
    /// The first bytes of the message: all, or at least
    /// [`MAX_HEADERS_LEN`](quipu_wire::sdp::MAX_HEADERS_LEN).
    pub head: &'a [u8],
    /// Bytes of the message.
    pub len: usize,
    /// The last byte of it, which may be urgent.
    pub last: u8,
}

impl<'a> Received<'a> {
    /// A message of which all bytes are at hand.
    pub fn whole(bytes: &'a [u8]) -> Self {
        Self { head: bytes, len: bytes.len(), last: bytes.last().copied().unwrap_or(0) }
    }
}

impl Connection {
    /// A message has come into a receive buffer.
    ///
    /// # Errors
    ///
    /// The peer broke the protocol. The connection is reset then, and takes nothing more.
    pub fn handle_message(
        &mut self,
        slot: u16,
        message: Received<'_>,
    ) -> Result<(), PeerMisbehaved> {
        if self.reset.is_some() {
            self.buffers.free(slot);
            return Ok(());
        }
        let handled = self.handle(slot, message);
        if let Err(fault) = handled {
            self.reset = Some(Reset::Misbehaviour(fault));
            self.control.abort = false;
        }
        handled
    }

    fn handle(&mut self, slot: u16, message: Received<'_>) -> Result<(), PeerMisbehaved> {
        let Head { header, body, payload_len } = Head::parse(message.head, message.len)?;
        self.incoming.receive(header.mseq)?;
        self.buffers.used();
        self.out.acknowledge(header.mseq_ack, header.bufs)?;
        let out = self.out;
        self.source.acknowledged(|number| out.has_acked(number));
        // The message with the byte may announce it once more.
        self.urgent_pending |= header.flags.urgent_pending && !self.urgent_due;
        self.urgent_due =
            (self.urgent_due || header.flags.urgent_pending) && !header.flags.urgent_present;
        let at = body.headers_len() as u32;
        let segment = Segment { slot, at, len: payload_len as u32 };
        match body {
            Body::Data if payload_len == 0 => {}
            Body::Data => {
                let urgent = header.flags.urgent_present.then_some(message.last);
                return self.data(segment, urgent);
            }
            Body::SrcAvail(memory) => return self.advertised(memory, segment),
            Body::ReadComplete(len) => self.source.read(len)?,
            Body::SendSm => self.source.refuse(|number| out.has_acked(number)),
            Body::SourceCancel => {
                if self.sink.cancel() {
                    self.incoming.hold();
                }
            }
            Body::ModeChange { of_receiver, mode } => self.change_mode(of_receiver, mode)?,
            Body::Disconnect => self.disconnected()?,
            Body::Abort => self.reset = Some(Reset::ByPeer),
            Body::ChangeReceiveBuffers(size) => self.resize(size)?,
            Body::ChangeReceiveBuffersAck(size) => {
                if size < self.peer_size || !std::mem::take(&mut self.control.awaits_size) {
                    return Err(PeerMisbehaved::BufferSize(size));
                }
                self.peer_size = size;
            }
            Body::WriteComplete(_)
            | Body::SinkAvail { .. }
            | Body::SinkCancel
            | Body::SinkCancelAck
            | Body::Suspend(_)
            | Body::SuspendAck => return Err(PeerMisbehaved::NotAgreed(body.mid())),
        }
        // What has ended just now may have been acknowledged by the same message.
        self.source.acknowledged(|number| out.has_acked(number));
        self.buffers.free(slot);
        Ok(())
    }

    fn data(&mut self, segment: Segment, urgent: Option<u8>) -> Result<(), PeerMisbehaved> {
        if self.ends.peer {
            return Err(PeerMisbehaved::AfterDisconnect);
        }
        if self.sink.is_open() {
            return Err(PeerMisbehaved::DataDuringAdvert);
        }
        self.take(segment, urgent);
        Ok(())
    }

    /// Payload is there for the program, unless it reads no more.
    fn take(&mut self, segment: Segment, urgent: Option<u8>) {
        if self.ends.reads_no_more {
            self.buffers.free(segment.slot);
            return self.abort();
        }
        self.buffers.fill(segment, urgent.map(|byte| (byte, self.config.urgent_inline)));
    }

    fn advertised(&mut self, memory: Memory, segment: Segment) -> Result<(), PeerMisbehaved> {
        if self.ends.peer {
            return Err(PeerMisbehaved::AfterDisconnect);
        }
        if self.sink.is_open() {
            return Err(PeerMisbehaved::TooManyAdverts);
        }
        let is_allowed = match self.receive_mode {
            Mode::Buffered => false,
            Mode::Combined => segment.len > 0,
            Mode::Pipelined => segment.len == 0,
        };
        if !is_allowed || memory.len <= segment.len {
            return Err(PeerMisbehaved::Advert);
        }
        // Two ends that wait until their buffers are read would wait for ever.
        self.source.cancel();
        self.sink.open(memory, segment.len);
        match segment.len {
            0 => self.buffers.free(segment.slot),
            _ => self.take(segment, None),
        }
        Ok(())
    }

    fn change_mode(&mut self, of_receiver: bool, mode: Mode) -> Result<(), PeerMisbehaved> {
        let (now, is_idle) = match of_receiver {
            true => (&mut self.send_mode, !self.source.is_open()),
            false => (&mut self.receive_mode, !self.sink.is_open()),
        };
        let is_allowed = match (of_receiver, *now, mode) {
            // Both ends may ask for it at a time.
            (true, Mode::Buffered | Mode::Combined, Mode::Combined) => true,
            (false, Mode::Combined, Mode::Buffered) => is_idle,
            (false, Mode::Combined, Mode::Pipelined) => is_idle,
            (false, Mode::Pipelined, Mode::Combined) => is_idle,
            _ => false,
        };
        if !is_allowed {
            return Err(PeerMisbehaved::ModeChange);
        }
        *now = mode;
        Ok(())
    }

    fn disconnected(&mut self) -> Result<(), PeerMisbehaved> {
        if self.ends.peer {
            return Err(PeerMisbehaved::AfterDisconnect);
        }
        if self.sink.is_open() {
            return Err(PeerMisbehaved::DataDuringAdvert);
        }
        self.ends.peer = true;
        Ok(())
    }

    fn resize(&mut self, size: u32) -> Result<(), PeerMisbehaved> {
        if self.buffers.is_resizing() || size as usize <= MAX_HEADERS_LEN {
            return Err(PeerMisbehaved::BufferSize(size));
        }
        let now = self.buffers.size();
        let fresh = size.min(self.config.max_buffer_size).max(now);
        let old_posted = if fresh == now { 0 } else { self.incoming.posted() };
        self.buffers.resize(fresh, old_posted);
        Ok(())
    }
}

impl PeerMisbehaved {
    /// The fault of the bytes, if they are no message.
    pub const fn malformed(&self) -> Option<WireError> {
        match self {
            Self::Malformed(error) => Some(*error),
            _ => None,
        }
    }
}
