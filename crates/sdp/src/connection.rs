//! The connection: what the caller's program asks for.

use std::net::SocketAddr;

use quipu_wire::WireError;
use quipu_wire::sdp::{
    Body, Flags, HEADER_LEN, HELLO_ACK_LEN, HELLO_LEN, Header, Hello, HelloAck, Memory, Mode,
    VERSION, emit_headers,
};

use crate::control::Control;
use crate::credits::{Incoming, Outgoing};
use crate::receive::{Buffers, Readable, RemoteMemory, Segment};
use crate::sink::Sink;
use crate::source::{Source, SourceEnd};
use crate::{Config, FIN_WAIT_NS, PeerMisbehaved};

/// Why a connection was reset.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reset {
    /// The peer has aborted it.
    ByPeer,
    /// This end has aborted it.
    Own,
    /// The peer broke the protocol.
    Misbehaviour(PeerMisbehaved),
    /// The peer did not answer in time.
    TimedOut,
}

/// The halves of the stream that have ended.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Ends {
    /// The program sends no more.
    pub(crate) own: bool,
    /// The peer was told.
    pub(crate) own_sent: bool,
    /// The peer sends no more.
    pub(crate) peer: bool,
    /// The program reads no more: data that come reset the connection.
    pub(crate) reads_no_more: bool,
}

/// One end of an SDP connection.
#[derive(Debug)]
pub struct Connection {
    pub(crate) config: Config,
    pub(crate) out: Outgoing,
    pub(crate) incoming: Incoming,
    /// Bytes of the peer's receive buffers.
    pub(crate) peer_size: u32,
    pub(crate) buffers: Buffers,
    pub(crate) source: Source,
    pub(crate) sink: Sink,
    pub(crate) send_mode: Mode,
    pub(crate) receive_mode: Mode,
    pub(crate) control: Control,
    pub(crate) ends: Ends,
    pub(crate) fin_deadline: Option<u64>,
    pub(crate) reset: Option<Reset>,
    pub(crate) urgent_pending: bool,
    /// The peer has announced an urgent byte that has not come yet.
    pub(crate) urgent_due: bool,
}

impl Connection {
    /// An end that has asked for a connection, from the HelloAck of the peer: the private data of its REP.
    ///
    /// # Errors
    ///
    /// The bytes are no HelloAck that a connection can follow.
    pub fn connect(config: Config, hello_ack: &[u8]) -> Result<Self, WireError> {
        let ack = HelloAck::parse(hello_ack)?;
        Ok(Self::new(config, ack.bufs, ack.size))
    }

    /// An end that was asked, from the Hello of the peer: the private data of its REQ.
    ///
    /// # Errors
    ///
    /// The bytes are no Hello that a connection can follow.
    pub fn accept(config: Config, hello: &[u8]) -> Result<Self, WireError> {
        let hello = Hello::parse(hello)?;
        Ok(Self::new(config, hello.bufs, hello.local_size))
    }

    fn new(config: Config, peer_bufs: u16, peer_size: u32) -> Self {
        Self {
            config,
            out: Outgoing::new(peer_bufs),
            incoming: Incoming::new(config.buffers),
            peer_size,
            buffers: Buffers::new(config.buffer_size),
            source: Source::default(),
            sink: Sink::default(),
            send_mode: Mode::Combined,
            receive_mode: Mode::Combined,
            control: Control::default(),
            ends: Ends::default(),
            fin_deadline: None,
            reset: None,
            urgent_pending: false,
            urgent_due: false,
        }
    }

    /// The private data of a REQ from `source` to `destination`.
    pub fn hello(config: &Config, source: SocketAddr, destination: SocketAddr) -> [u8; HELLO_LEN] {
        Hello {
            bufs: config.buffers,
            version: VERSION,
            can_invalidate: false,
            max_adverts: 1,
            wanted_peer_size: config.wanted_peer_size,
            local_size: config.buffer_size,
            port: source.port(),
            source: source.ip(),
            destination: destination.ip(),
        }
        .to_bytes()
    }

    /// The private data of a REP.
    pub fn hello_ack(config: &Config) -> [u8; HELLO_ACK_LEN] {
        HelloAck { bufs: config.buffers, version: VERSION, size: config.buffer_size }.to_bytes()
    }

    /// Most bytes of payload that a message may have now; 0: none now.
    pub fn data_room(&self) -> u32 {
        let is_stopped = self.ends.own || self.reset.is_some() || self.source.is_open();
        if is_stopped || !self.out.may_send_payload() {
            return 0;
        }
        self.peer_size - HEADER_LEN as u32
    }

    /// Writes the header of a message of `len` bytes of payload, of which the last one is urgent if
    /// `urgent`, to the front of `out`. Send it, then the payload, as one SEND.
    ///
    /// # Panics
    ///
    /// If `len` is 0 or beyond [`data_room`](Self::data_room).
    pub fn send_data(&mut self, len: u32, urgent: bool, out: &mut [u8; HEADER_LEN]) {
        assert!(len > 0 && len <= self.data_room(), "a message of {len} bytes has no room");
        let flags = Flags { urgent_present: urgent, urgent_pending: urgent, ..Flags::default() };
        self.emit(flags, &Body::Data, len, out);
    }

    /// Bytes of an advertised buffer's beginning that its message carries at least.
    pub const ADVERT_INLINE: u32 = 1;

    /// Whether a buffer may be advertised now: no other is, the peer waits for none of its own to be
    /// read, and there are credits.
    pub fn may_advertise(&self) -> bool {
        self.data_room() > 0
            && self.send_mode == Mode::Combined
            && self.source.is_free()
            && !self.sink.is_open()
            && !self.sink.is_reading()
    }

    /// Writes the headers of a message that offers memory for reading to the front of `out`; how long they
    /// are. Send them, then the first `inline` bytes of the memory, as one SEND. The memory has
    /// to stay as it is until [`take_source_end`](Self::take_source_end) returns something.
    ///
    /// # Panics
    ///
    /// If [`may_advertise`](Self::may_advertise) is false, or not 0 < `inline` < the length of the memory, or
    /// the message has no room in the peer's buffer.
    pub fn advertise(
        &mut self,
        now: u64,
        memory: RemoteMemory,
        inline: u32,
        out: &mut [u8],
    ) -> usize {
        let RemoteMemory { addr, len, rkey } = memory;
        assert!(self.may_advertise(), "no buffer may be advertised");
        assert!(inline > 0 && inline < len, "{inline} of {len} bytes go with the offer");
        let body = Body::SrcAvail(Memory { len, rkey, addr });
        assert!(
            body.headers_len() as u32 + inline <= self.peer_size,
            "{inline} bytes are too many"
        );
        let headers = self.emit(Flags::default(), &body, inline, out);
        self.source.open(now, self.out.last_number(), len, inline);
        headers
    }

    /// What became of the buffer that was advertised, once.
    pub fn take_source_end(&mut self) -> Option<SourceEnd> {
        self.source.take_end()
    }

    /// Takes an advertised buffer back. [`take_source_end`](Self::take_source_end) says when it has ended.
    pub fn cancel_source(&mut self) {
        self.source.cancel();
    }

    /// What a reader finds first.
    pub fn readable(&self) -> Readable {
        if let Some(segment) = self.buffers.first() {
            return Readable::Buffered(segment);
        }
        match self.sink.rest() {
            Some(rest) => Readable::Remote(rest),
            None if self.ends.peer && !self.sink.is_open() => Readable::End,
            None => Readable::Nothing,
        }
    }

    /// The payload of that index in receive buffers, and whether the urgent mark lies before it: for a
    /// reader that leaves it where it is.
    pub fn peek(&self, index: usize) -> Option<(Segment, bool)> {
        self.buffers.piece(index)
    }

    /// Bytes that can be read, in buffers and in the peer's memory.
    pub fn unread(&self) -> u64 {
        self.buffers.unread() + self.sink.rest().map_or(0, |rest| rest.len.into())
    }

    /// The reader has so many bytes of the first segment.
    pub fn consume(&mut self, len: u32) {
        self.buffers.consume(len);
    }

    /// Begins to read at most `most` bytes of the peer's memory; what to read. Everything before them must
    /// be consumed.
    pub fn begin_read(&mut self, most: u32) -> Option<RemoteMemory> {
        if self.buffers.first().is_some() {
            return None;
        }
        self.sink.begin(most)
    }

    /// The read that was begun is done: the reader has the bytes.
    pub fn finish_read(&mut self) {
        if self.sink.finish() {
            self.incoming.release();
        }
    }

    /// Has the peer send the rest of its advertised buffer as data. Nothing, if a read is under way.
    pub fn refuse_sink(&mut self) {
        if !self.sink.is_reading() {
            self.sink.refuse();
        }
    }

    /// A receive buffer to post again, and the bytes to post of it.
    pub fn next_receive(&mut self) -> Option<(u16, u32)> {
        let slot = self.buffers.next_free()?;
        self.incoming.post();
        Some((slot, self.buffers.size()))
    }

    /// The program sends no more.
    pub fn shut_write(&mut self) {
        self.ends.own = true;
        self.source.cancel();
    }

    /// The program reads no more. Data that come from now on reset the connection.
    pub fn shut_read(&mut self) {
        self.ends.reads_no_more = true;
    }

    /// The program has closed its end. If it has not read everything that came, the connection is reset.
    pub fn close(&mut self, now: u64) {
        if self.unread() > 0 {
            return self.abort();
        }
        self.shut_write();
        self.shut_read();
        self.fin_deadline = Some(now.saturating_add(FIN_WAIT_NS));
    }

    /// Resets the connection. The peer hears of it if there is a credit.
    pub fn abort(&mut self) {
        if self.reset.is_none() {
            self.reset = Some(Reset::Own);
            self.control.abort = true;
        }
    }

    /// Whether and why the connection was reset.
    pub fn reset(&self) -> Option<Reset> {
        self.reset
    }

    /// Whether both halves have ended, and the peer was told of that: the connection can be taken down.
    pub fn is_finished(&self) -> bool {
        self.ends.own_sent && self.ends.peer
    }

    /// Whether the peer sends no more; data may still be unread.
    pub fn peer_has_ended(&self) -> bool {
        self.ends.peer
    }

    /// Whether the program has ended its half.
    pub fn has_shut_write(&self) -> bool {
        self.ends.own
    }

    /// The mode in which this end sends, and that in which it receives.
    pub fn modes(&self) -> (Mode, Mode) {
        (self.send_mode, self.receive_mode)
    }

    /// Sends without advertised buffers from now on. False if one is advertised.
    pub fn send_buffered(&mut self) -> bool {
        let can = self.send_mode == Mode::Combined && !self.source.is_open();
        if can {
            self.send_mode = Mode::Buffered;
            self.control.sends_buffered = true;
        }
        can
    }

    /// Asks the peer, which sends without advertised buffers, to use them again. False if it does.
    pub fn ask_for_combined(&mut self) -> bool {
        let can = self.receive_mode == Mode::Buffered;
        if can {
            self.receive_mode = Mode::Combined;
            self.control.wants_combined = true;
        }
        can
    }

    /// Wishes that the peer's receive buffers have so many bytes.
    pub fn ask_for_buffers(&mut self, size: u32) {
        self.control.wished_size = Some(size);
    }

    /// The urgent byte that has come, if it is not in the stream; `peek` leaves it there.
    pub fn urgent(&mut self, peek: bool) -> Option<u8> {
        self.buffers.urgent(peek)
    }

    /// Whether an urgent byte waits outside of the stream.
    pub fn has_urgent(&self) -> bool {
        self.buffers.has_urgent()
    }

    /// Whether the next byte to read is the one after the mark of the urgent byte.
    pub fn is_at_mark(&self) -> bool {
        self.buffers.is_at_mark()
    }

    /// Whether the peer has announced an urgent byte since this was asked last.
    pub fn take_urgent_notice(&mut self) -> bool {
        std::mem::take(&mut self.urgent_pending)
    }

    /// Whether the peer has announced an urgent byte that has not come yet.
    pub fn is_urgent_due(&self) -> bool {
        self.urgent_due
    }

    /// Whether urgent bytes stay in the stream from now on.
    pub fn set_urgent_inline(&mut self, inline: bool) {
        self.config.urgent_inline = inline;
    }

    /// When to call [`handle_timeout`](Self::handle_timeout).
    pub fn poll_timeout(&self) -> Option<u64> {
        if self.reset.is_some() {
            return None;
        }
        let fin = self.fin_deadline.filter(|_| !self.is_finished());
        self.source.deadline().into_iter().chain(fin).min()
    }

    /// A time that [`poll_timeout`](Self::poll_timeout) named has come.
    pub fn handle_timeout(&mut self, now: u64) {
        let fin = self.fin_deadline.filter(|_| !self.is_finished());
        if self.source.time_out(now) || fin.is_some_and(|at| at <= now) {
            self.reset.get_or_insert(Reset::TimedOut);
        }
    }

    pub(crate) fn emit(
        &mut self,
        flags: Flags,
        body: &Body,
        payload: u32,
        out: &mut [u8],
    ) -> usize {
        let mseq = self.out.take_number();
        let (bufs, mseq_ack) = self.incoming.grant();
        emit_headers(&Header { flags, bufs, mseq, mseq_ack }, body, payload, out)
    }
}
