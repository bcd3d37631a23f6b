//! The server's end.

use super::{ClientMemory, Incoming, MESSAGE_HEADER, REPLY_HEADER, Terms};
use crate::export::{Export, Extent};
use crate::server::{Server, ServerEvent, ServerOptions};
use crate::wire::{
    ALLOCATION_ID, Command, CommandFlags, Errno, ProtocolError, REQUEST_LEN, Request,
    SIMPLE_REPLY_MAGIC,
};

/// The header of a reply.
#[must_use]
pub fn simple_reply(cookie: u64, result: Result<(), Errno>) -> [u8; REPLY_HEADER] {
    let mut bytes = [0; REPLY_HEADER];
    bytes[..4].copy_from_slice(&SIMPLE_REPLY_MAGIC.to_be_bytes());
    bytes[4..8].copy_from_slice(&result.err().map_or(0, |errno| errno.0).to_be_bytes());
    bytes[8..].copy_from_slice(&cookie.to_be_bytes());
    bytes
}

/// A request for the back end.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Job {
    /// What to do.
    pub command: Command,
    /// The request. Its range lies within the export.
    pub request: Request,
    /// The client's memory for long data.
    pub memory: ClientMemory,
    /// Whether its data move by RDMA: they are read from `memory` before a write is carried out, and written
    /// there before the reply to a read is sent.
    pub is_moved: bool,
}

/// What a message asks for.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum ServerStep {
    /// Go on with the negotiation: send what is in the output.
    Negotiate,
    /// The client has chosen an export, by its index: send the output. Requests follow.
    Started(usize),
    /// Carry this out. Short data of a write follow [`MESSAGE_HEADER`] bytes of the message.
    Execute(Job),
    /// Reply with this error to this cookie.
    Refuse(u64, Errno),
    /// The session has ended in good order: send the output.
    Ended,
}

/// The server's end of one session.
#[derive(Debug)]
pub struct MessageServer {
    server: Server,
    incoming: Incoming,
    ours: Terms,
    peer: Terms,
    has_started: bool,
}

impl MessageServer {
    /// A session that has just begun; its greeting is in the output. `peer` is what the client said.
    ///
    /// Extended headers and TLS are not offered: requests have 28 bytes.
    #[must_use]
    pub fn new(options: ServerOptions, ours: Terms, peer: Terms) -> Self {
        let options = ServerOptions { extended: false, tls: false, tls_required: false, ..options };
        let server = Server::new(options);
        Self { server, incoming: Incoming::default(), ours, peer, has_started: false }
    }

    /// Bytes of the negotiation for the client, which the caller takes away and cuts into messages of at most
    /// [`Terms::longest_message`] bytes of the client's terms.
    pub fn output(&mut self) -> &mut Vec<u8> {
        self.server.output()
    }

    /// The client's terms.
    #[must_use]
    pub fn peer(&self) -> Terms {
        self.peer
    }

    /// The export that the client has chosen.
    #[must_use]
    pub fn export(&self) -> Option<&Export> {
        self.server.export()
    }

    /// Takes a message.
    ///
    /// # Errors
    ///
    /// The client breaks the protocol: the connection has to end.
    pub fn input(&mut self, message: &[u8]) -> Result<ServerStep, ProtocolError> {
        if self.has_started { self.request(message) } else { self.negotiate(message) }
    }

    fn negotiate(&mut self, message: &[u8]) -> Result<ServerStep, ProtocolError> {
        self.incoming.add(message)?;
        while let Some(bytes) = self.incoming.take(self.server.wants()) {
            match self.server.input(&bytes)? {
                Some(ServerEvent::Started(index)) => {
                    self.has_started = true;
                    return if self.incoming.0.is_empty() {
                        Ok(ServerStep::Started(index))
                    } else {
                        Err(ProtocolError::Message {
                            why: "a request came before the export's size",
                        })
                    };
                }
                Some(ServerEvent::Ended) => return Ok(ServerStep::Ended),
                _ => {}
            }
        }
        Ok(ServerStep::Negotiate)
    }

    fn request(&mut self, message: &[u8]) -> Result<ServerStep, ProtocolError> {
        let wrong = |why| ProtocolError::Message { why };
        let header = message.get(..MESSAGE_HEADER).ok_or(wrong("a request is too short"))?;
        let request = Request::decode(header, false)?;
        let memory = ClientMemory::decode(&header[REQUEST_LEN..]);
        let command = Command::of(request.kind);
        let is_write = command == Some(Command::Write);
        let is_short = request.length <= self.ours.inline.into();
        let data = if is_write && is_short { request.length as usize } else { 0 };
        if message.len() != MESSAGE_HEADER + data {
            return Err(wrong("a request has another length than its header says"));
        }
        let limit = match command {
            Some(Command::Read) => self.peer.inline,
            _ => self.ours.inline,
        };
        let is_moved =
            (is_write || command == Some(Command::Read)) && request.length > u64::from(limit);
        let overflows = memory.address.checked_add(request.length).is_none();
        match self.server.check(command, &request) {
            Ok(Command::Disconnect) => Ok(ServerStep::Ended),
            Ok(_) if is_moved && overflows => Ok(ServerStep::Refuse(request.cookie, Errno::INVAL)),
            Ok(command) => Ok(ServerStep::Execute(Job { command, request, memory, is_moved })),
            Err(errno) => Ok(ServerStep::Refuse(request.cookie, errno)),
        }
    }

    /// The reply with extents, from the request's offset on: at least one of them.
    #[must_use]
    pub fn reply_extents(&self, request: &Request, extents: &[Extent]) -> Vec<u8> {
        /// Longer ones are cut to a multiple of any block size; the client asks again for the rest.
        const LONGEST: u64 = 0xffff_0000;
        let mut out = simple_reply(request.cookie, Ok(())).to_vec();
        out.extend(ALLOCATION_ID.to_be_bytes());
        let one = request.flags.contains(CommandFlags::REQ_ONE);
        let most = if one { 1 } else { (self.peer.inline as usize - 4) / 8 };
        for extent in extents.iter().take(most) {
            let asked = if one { request.length } else { LONGEST };
            let length = extent.length.min(asked).min(LONGEST);
            out.extend((length as u32).to_be_bytes());
            out.extend(extent.flags().to_be_bytes());
            if length < extent.length {
                break;
            }
        }
        out
    }
}
