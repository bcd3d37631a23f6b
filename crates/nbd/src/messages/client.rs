//! The client's end.

use std::ops::Range;

use super::{ClientMemory, Incoming, MAX_MOVED, MESSAGE_HEADER, REPLY_HEADER, Terms};
use crate::client::{Client, ClientEvent, Handshake};
use crate::export::{Export, Extent};
use crate::wire::{
    ALLOCATION_ID, Command, CommandFlags, Errno, ProtocolError, REQUEST_LEN, Request,
    SIMPLE_REPLY_MAGIC, u32_at, u64_at,
};

/// A request that was made.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Ticket {
    /// The name of the request in events.
    pub cookie: u64,
    /// The beginning of its message. Short data of a write follow.
    pub header: [u8; MESSAGE_HEADER],
}

/// A request that the server has replied to.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Completed {
    /// The request.
    pub cookie: u64,
    /// Its result.
    pub result: Result<(), Errno>,
    /// Where short data of a read lie in the message. They are all that was asked for.
    pub data: Range<usize>,
    /// The extents from the request's offset on.
    pub extents: Vec<Extent>,
    /// The key that the server had for this request: revoke it before the data are used.
    pub revoke: Option<u32>,
}

/// What a message means.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum MessageEvent {
    /// Go on with the negotiation: send what is in the output.
    Negotiate,
    /// The server lists an export.
    Listed(Vec<(String, String)>),
    /// The negotiation is over: requests may be made.
    Started(Export),
    /// A request has its reply.
    Completed(Completed),
}

#[derive(Clone, Copy, Debug)]
struct Outstanding {
    cookie: u64,
    command: Command,
    length: u64,
    key: Option<u32>,
}

/// The client's end of one session.
#[derive(Debug)]
pub struct MessageClient {
    client: Client,
    incoming: Incoming,
    ours: Terms,
    peer: Terms,
    has_started: bool,
    /// One for each request that may be outstanding.
    outstanding: Vec<Option<Outstanding>>,
    free: Vec<u32>,
    serial: u32,
}

impl MessageClient {
    /// A session that has just begun: the server speaks first. `peer` is what the server said.
    #[must_use]
    pub fn new(wanted: Handshake, ours: Terms, peer: Terms) -> Self {
        let client = Client::new(Handshake { extended: false, tls: false, ..wanted });
        // Every reply needs a receive here, and every request one there.
        let most = u32::from(ours.credits.min(peer.credits));
        Self {
            client,
            incoming: Incoming::default(),
            ours,
            peer,
            has_started: false,
            outstanding: vec![None; most as usize],
            free: (0..most).rev().collect(),
            serial: 0,
        }
    }

    /// Bytes of the negotiation for the server, which the caller takes away and cuts into messages of at most
    /// [`Terms::longest_message`] bytes of the server's terms.
    pub fn output(&mut self) -> &mut Vec<u8> {
        self.client.output()
    }

    /// The server's terms.
    #[must_use]
    pub fn peer(&self) -> Terms {
        self.peer
    }

    /// The export, from [`MessageEvent::Started`] on.
    #[must_use]
    pub fn export(&self) -> &Export {
        self.client.export()
    }

    /// Whether [`Command::BlockStatus`] may be asked.
    #[must_use]
    pub fn has_status(&self) -> bool {
        self.client.has_status()
    }

    /// How many requests may be made before a reply comes.
    #[must_use]
    pub fn credits(&self) -> usize {
        self.free.len()
    }

    /// How many requests have no reply yet.
    #[must_use]
    pub fn outstanding(&self) -> usize {
        self.outstanding.len() - self.free.len()
    }

    /// Whether the data of a request move by RDMA, so that it needs memory with a key: for the server
    /// to write to if it is a read, and to read from if it is a write.
    #[must_use]
    pub fn is_moved(&self, command: Command, length: u64) -> bool {
        match command {
            Command::Read => length > self.ours.inline.into(),
            Command::Write => length > self.peer.inline.into(),
            _ => false,
        }
    }

    /// Makes a request. `memory` is for data that [are moved](Self::is_moved).
    ///
    /// Returns `None` if as many requests are outstanding as the ends have receives for, or one end would not
    /// take so much: a length of more than 2^32 - 1, or data of more than [`MAX_MOVED`] bytes.
    pub fn request(
        &mut self,
        command: Command,
        flags: CommandFlags,
        (offset, length): (u64, u64),
        memory: Option<ClientMemory>,
    ) -> Option<Ticket> {
        let moved = self.is_moved(command, length);
        let has_data = matches!(command, Command::Read | Command::Write);
        let limit = if has_data { MAX_MOVED } else { u32::MAX };
        if !self.has_started || length > limit.into() || moved != memory.is_some() {
            return None;
        }
        let index = self.free.pop()?;
        self.serial = self.serial.wrapping_add(1);
        let cookie = u64::from(self.serial) << 32 | u64::from(index);
        let key = memory.map(|memory| memory.key);
        self.outstanding[index as usize] = Some(Outstanding { cookie, command, length, key });
        let request = Request { flags, kind: command.number(), cookie, offset, length };
        Some(Ticket { cookie, header: encode(&request, memory.unwrap_or_default()) })
    }

    /// The message that ends the session. The server replies to nothing more.
    #[must_use]
    pub fn disconnect(&self) -> [u8; MESSAGE_HEADER] {
        let (flags, kind) = (CommandFlags::empty(), Command::Disconnect.number());
        let request = Request { flags, kind, cookie: 0, offset: 0, length: 0 };
        encode(&request, ClientMemory::default())
    }

    /// Takes a message.
    ///
    /// # Errors
    ///
    /// The server breaks the protocol or refuses the export: the connection has to end.
    pub fn input(&mut self, message: &[u8]) -> Result<MessageEvent, ProtocolError> {
        if self.has_started {
            return self.reply(message).map(MessageEvent::Completed);
        }
        self.incoming.add(message)?;
        let mut listed = Vec::new();
        while let Some(bytes) = self.incoming.take(self.client.wants()) {
            match self.client.input(&bytes)? {
                Some(ClientEvent::Started(export)) => {
                    self.has_started = true;
                    return Ok(MessageEvent::Started(export));
                }
                Some(ClientEvent::Listed { name, description }) => {
                    listed.push((name, description));
                }
                Some(ClientEvent::Ended) => return Ok(MessageEvent::Listed(listed)),
                _ => {}
            }
        }
        if listed.is_empty() {
            Ok(MessageEvent::Negotiate)
        } else {
            Ok(MessageEvent::Listed(listed))
        }
    }

    /// Whether the server has said all that it has to: the list of its exports is complete.
    #[must_use]
    pub fn has_ended(&self) -> bool {
        self.client.wants() == crate::Want::Nothing
    }

    fn reply(&mut self, message: &[u8]) -> Result<Completed, ProtocolError> {
        let why = "a reply is too short";
        let header = message.get(..REPLY_HEADER).ok_or(ProtocolError::Message { why })?;
        let magic = u32_at(header, 0);
        if magic != SIMPLE_REPLY_MAGIC {
            return Err(ProtocolError::Magic { what: "a reply", found: magic.into() });
        }
        let (errno, cookie) = (u32_at(header, 4), u64_at(header, 8));
        let index = (cookie & u64::from(u32::MAX)) as usize;
        let found = self.outstanding.get(index).copied().flatten();
        let request =
            found.filter(|found| found.cookie == cookie).ok_or(ProtocolError::Cookie(cookie))?;
        let wrong = |why| ProtocolError::Reply { cookie, why };
        let data = &message[REPLY_HEADER..];
        let mut extents = Vec::new();
        let result = if errno == 0 { Ok(()) } else { Err(Errno(errno)) };
        let carries = request.command == Command::Read
            && !self.is_moved(Command::Read, request.length)
            && result.is_ok();
        if request.command == Command::BlockStatus && result.is_ok() {
            extents = decode_extents(data).ok_or(wrong("the extents are wrong"))?;
        } else if data.len() as u64 != if carries { request.length } else { 0 } {
            return Err(wrong("its data have another length than was asked for"));
        }
        self.outstanding[index] = None;
        self.free.push(index as u32);
        let data = REPLY_HEADER..message.len();
        Ok(Completed { cookie, result, data, extents, revoke: request.key })
    }
}

fn encode(request: &Request, memory: ClientMemory) -> [u8; MESSAGE_HEADER] {
    let mut bytes = Vec::with_capacity(REQUEST_LEN);
    request.encode(false, &mut bytes);
    let mut header = [0; MESSAGE_HEADER];
    header[..REQUEST_LEN].copy_from_slice(&bytes);
    memory.encode(&mut header[REQUEST_LEN..]);
    header
}

/// Rows of length and flags after the number of the context; at least one, none of them empty.
fn decode_extents(data: &[u8]) -> Option<Vec<Extent>> {
    let rows = data.get(4..).filter(|rows| !rows.is_empty() && rows.len().is_multiple_of(8))?;
    if u32_at(data, 0) != ALLOCATION_ID {
        return None;
    }
    let extents = rows.chunks_exact(8).map(|row| {
        let (length, flags) = (u32_at(row, 0), u32_at(row, 4));
        Extent { length: length.into(), hole: flags & 1 != 0, zero: flags & 2 != 0 }
    });
    let extents: Vec<_> = extents.collect();
    extents.iter().all(|extent| extent.length > 0).then_some(extents)
}
