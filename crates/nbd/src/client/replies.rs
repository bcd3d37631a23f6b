//! Replies to the client's requests.

use super::{Client, ClientEvent, MAX_CHUNK, Reply, State};
use crate::export::Extent;
use crate::wire::{
    CHUNK_MAGIC, Chunk, Command, EXTENDED_CHUNK_MAGIC, Errno, ProtocolError, SIMPLE_REPLY_LEN,
    SIMPLE_REPLY_MAGIC, chunk, u32_at, u64_at,
};

/// A request without a complete reply.
#[derive(Clone, Copy, Debug)]
pub(super) struct Outstanding {
    cookie: u64,
    command: Command,
    offset: u64,
    length: u64,
    /// Bytes of a read that have come.
    received: u64,
    error: Option<Errno>,
}

impl Outstanding {
    pub(super) fn new(cookie: u64, command: Command, offset: u64, length: u64) -> Self {
        Self { cookie, command, offset, length, received: 0, error: None }
    }
}

/// How far a reply has been read.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) struct Progress {
    pub(super) cookie: u64,
    kind: u16,
    last: bool,
    /// Of the payload, in the request's data.
    pub(super) at: u64,
    /// Of what is left of the chunk, in bytes.
    pub(super) length: u64,
}

impl Progress {
    /// How much of a chunk's data is read before anything is done: of data only their offset.
    pub(super) fn data_length(&self) -> usize {
        let whole = self.length as usize;
        if self.kind == chunk::OFFSET_DATA { whole.min(8) } else { whole }
    }
}

impl Client {
    fn find(&mut self, cookie: u64) -> Result<&mut Outstanding, ProtocolError> {
        let index = (cookie & u64::from(u32::MAX)) as usize;
        let found = self.outstanding.get_mut(index).and_then(Option::as_mut);
        found.filter(|request| request.cookie == cookie).ok_or(ProtocolError::Cookie(cookie))
    }

    /// The reply is complete.
    fn finish(&mut self, cookie: u64) -> Result<Option<ClientEvent>, ProtocolError> {
        self.state = State::Reply;
        let request = *self.find(cookie)?;
        let short = request.command == Command::Read && request.received != request.length;
        if request.error.is_none() && short {
            return Err(ProtocolError::Reply { cookie, why: "data are missing" });
        }
        let index = (cookie & u64::from(u32::MAX)) as u32;
        self.outstanding[index as usize] = None;
        self.free.push(index);
        let result = request.error.map_or(Ok(()), Err);
        Ok(Some(ClientEvent::Reply { cookie, reply: Reply::Done(result) }))
    }

    /// The first bytes of a reply.
    pub(super) fn reply(&mut self, bytes: &[u8]) -> Result<Option<ClientEvent>, ProtocolError> {
        match u32_at(bytes, 0) {
            EXTENDED_CHUNK_MAGIC if self.extended => self.chunk(bytes),
            CHUNK_MAGIC if self.structured && !self.extended => {
                let first: [u8; SIMPLE_REPLY_LEN] = bytes.try_into().expect("as wanted");
                self.state = State::ChunkRest(first);
                Ok(None)
            }
            SIMPLE_REPLY_MAGIC if !self.extended => self.simple(bytes),
            found => Err(ProtocolError::Magic { what: "a reply", found: found.into() }),
        }
    }

    fn simple(&mut self, bytes: &[u8]) -> Result<Option<ClientEvent>, ProtocolError> {
        let (errno, cookie) = (u32_at(bytes, 4), u64_at(bytes, 8));
        let structured = self.structured;
        let request = self.find(cookie)?;
        if structured && request.command == Command::Read {
            let why = "a read needs chunks after structured replies were agreed on";
            return Err(ProtocolError::Reply { cookie, why });
        }
        if errno != 0 {
            request.error = Some(Errno(errno));
        } else if request.command == Command::Read && request.length > 0 {
            let (length, kind) = (request.length, chunk::OFFSET_DATA);
            request.received = length;
            self.state = State::Payload(Progress { cookie, kind, last: true, at: 0, length });
            return Ok(None);
        }
        self.finish(cookie)
    }

    /// The header of a chunk is complete.
    pub(super) fn chunk(&mut self, header: &[u8]) -> Result<Option<ClientEvent>, ProtocolError> {
        let chunk = Chunk::decode(header, self.extended);
        let (cookie, kind, length, last) =
            (chunk.cookie, chunk.kind, chunk.length, chunk.is_last());
        let request = *self.find(cookie)?;
        let wrong = |why| ProtocolError::Reply { cookie, why };
        let command = match kind {
            chunk::OFFSET_DATA | chunk::OFFSET_HOLE => Some(Command::Read),
            chunk::BLOCK_STATUS | chunk::BLOCK_STATUS_EXT => Some(Command::BlockStatus),
            _ => None,
        };
        if command.is_some_and(|command| command != request.command) {
            return Err(wrong("the chunk does not fit the command"));
        }
        let limit = if kind == chunk::OFFSET_DATA { request.length + 8 } else { MAX_CHUNK };
        if length > limit {
            return Err(ProtocolError::TooLong { what: "a chunk", length, limit });
        }
        let progress = Progress { cookie, kind, last, at: 0, length };
        match kind {
            chunk::NONE if length == 0 && last => self.finish(cookie),
            chunk::NONE => Err(wrong("an empty chunk has data or is not the last one")),
            _ if length == 0 => Err(wrong("the chunk has no data")),
            _ => {
                self.state = State::ChunkData(progress);
                Ok(None)
            }
        }
    }

    /// The data of a chunk are complete; of an `OFFSET_DATA` only the offset.
    pub(super) fn chunk_data(
        &mut self,
        progress: Progress,
        data: &[u8],
    ) -> Result<Option<ClientEvent>, ProtocolError> {
        let cookie = progress.cookie;
        let wrong = |why| ProtocolError::Reply { cookie, why };
        match progress.kind {
            chunk::OFFSET_DATA => {
                let offset = u64_at(data.get(..8).ok_or(wrong("the chunk is too short"))?, 0);
                let length = progress.length - 8;
                let at = self.place(cookie, offset, length)?;
                self.state = State::Payload(Progress { at, length, ..progress });
                Ok(None)
            }
            chunk::OFFSET_HOLE => {
                let data = data.get(..12).ok_or(wrong("the chunk is too short"))?;
                let length = u64::from(u32_at(data, 8));
                let at = self.place(cookie, u64_at(data, 0), length)?;
                self.deliver(progress, Reply::Zeros { at, length })
            }
            chunk::BLOCK_STATUS | chunk::BLOCK_STATUS_EXT => match self.extents(progress, data)? {
                Some(extents) => self.deliver(progress, Reply::Extents(extents)),
                None => self.ended(progress),
            },
            kind if kind >= chunk::ERROR => {
                let errno = u32_at(data.get(..4).ok_or(wrong("the error is too short"))?, 0);
                let errno = if errno == 0 { Errno::IO } else { Errno(errno) };
                self.find(cookie)?.error.get_or_insert(errno);
                self.ended(progress)
            }
            _ => Err(wrong("the kind of the chunk is not known")),
        }
    }

    /// Where data of a read belong, if they lie within the request.
    fn place(&mut self, cookie: u64, offset: u64, length: u64) -> Result<u64, ProtocolError> {
        let request = self.find(cookie)?;
        let at = offset.checked_sub(request.offset);
        let left = request.length - request.received;
        let at = at.filter(|at| length > 0 && length <= left && *at <= request.length - length);
        let why = "data lie outside of the request or come twice";
        let at = at.ok_or(ProtocolError::Reply { cookie, why })?;
        request.received += length;
        Ok(at)
    }

    fn extents(
        &mut self,
        progress: Progress,
        data: &[u8],
    ) -> Result<Option<Vec<Extent>>, ProtocolError> {
        let cookie = progress.cookie;
        let wrong = ProtocolError::Reply { cookie, why: "the extents have a wrong length" };
        let wide = progress.kind == chunk::BLOCK_STATUS_EXT;
        let (head, size) = if wide { (8, 16) } else { (4, 8) };
        let id = u32_at(data.get(..head).ok_or(wrong.clone())?, 0);
        let rows = &data[head..];
        if rows.is_empty() || !rows.len().is_multiple_of(size) || wide != self.extended {
            return Err(wrong);
        }
        if Some(id) != self.context {
            return Ok(None);
        }
        let extents = rows.chunks_exact(size).map(|row| {
            let (length, flags) = if wide {
                (u64_at(row, 0), u64_at(row, 8))
            } else {
                (u32_at(row, 0).into(), u32_at(row, 4).into())
            };
            Extent { length, hole: flags & 1 != 0, zero: flags & 2 != 0 }
        });
        let extents: Vec<_> = extents.collect();
        let empty = extents.iter().any(|extent| extent.length == 0);
        let why = "an extent is empty";
        if empty { Err(ProtocolError::Reply { cookie, why }) } else { Ok(Some(extents)) }
    }

    /// Reports a chunk to the caller. After the last chunk of a reply comes [`Client::payload_done`], as
    /// after data.
    fn deliver(
        &mut self,
        progress: Progress,
        reply: Reply,
    ) -> Result<Option<ClientEvent>, ProtocolError> {
        let cookie = progress.cookie;
        self.state = if progress.last {
            State::Payload(Progress { length: 0, ..progress })
        } else {
            State::Reply
        };
        Ok(Some(ClientEvent::Reply { cookie, reply }))
    }

    fn ended(&mut self, progress: Progress) -> Result<Option<ClientEvent>, ProtocolError> {
        self.state = State::Reply;
        if progress.last { self.finish(progress.cookie) } else { Ok(None) }
    }

    /// The payload that [`Client::wants`] named has been read; it may have been empty.
    ///
    /// # Errors
    ///
    /// The reply ends, and data are missing.
    pub fn payload_done(&mut self) -> Result<Option<ClientEvent>, ProtocolError> {
        let State::Payload(progress) = self.state else { return Ok(None) };
        let outcome = self.ended(progress);
        if outcome.is_err() {
            self.state = State::Ended;
        }
        outcome
    }
}
