//! A client's session over a socket: one request at a time.

use std::net::TcpStream;
use std::os::unix::net::UnixStream;

use quipu_nbd::uri::{Place, Uri};
use quipu_nbd::{
    Client, ClientEvent, Command, CommandFlags, Export, Extent, Handshake, Reply, Want,
};

use super::session::{Outcome, PATIENCE, Trouble};
use super::stream::{Socket, Stream};

/// The session.
pub(super) struct Session {
    client: Client,
    stream: Stream,
}

fn connect(uri: &Uri) -> Result<Stream, Trouble> {
    if uri.tls {
        return Err(Trouble::Unsupported("TLS"));
    }
    let socket = match &uri.place {
        Place::Tcp { host, port } => {
            let stream = TcpStream::connect((host.as_str(), *port))?;
            stream.set_nodelay(true)?;
            Socket::Tcp(stream)
        }
        Place::Unix(path) => Socket::Unix(UnixStream::connect(path)?),
        Place::Rdma { .. } => return Err(Trouble::Unsupported("a stream over nbd+rdma")),
        Place::Qpip { .. } => return Err(Trouble::Unsupported("nbd+qpip")),
    };
    Ok(Stream::new(socket))
}

impl Session {
    /// Connects and begins with the URI's export.
    pub(super) fn open(uri: &Uri, wanted: Handshake) -> Result<Self, Trouble> {
        let client = Client::new(wanted);
        let mut session = Self { client, stream: connect(uri)? };
        session.stream.socket().set_patience(Some(PATIENCE))?;
        loop {
            match session.step(&mut [])? {
                Some(ClientEvent::Started(_)) => break,
                Some(ClientEvent::Ended) => return Err(Trouble::Closed),
                _ => {}
            }
        }
        session.stream.socket().set_patience(None)?;
        Ok(session)
    }

    /// The names and descriptions of a server's exports.
    pub(super) fn list(uri: &Uri, wanted: Handshake) -> Result<Vec<(String, String)>, Trouble> {
        let mut session = Self { client: Client::new(wanted), stream: connect(uri)? };
        session.stream.socket().set_patience(Some(PATIENCE))?;
        let mut found = Vec::new();
        loop {
            match session.step(&mut [])? {
                Some(ClientEvent::Listed { name, description }) => found.push((name, description)),
                Some(ClientEvent::Ended) => break,
                _ => {}
            }
        }
        session.stream.send(session.client.output(), &[])?;
        Ok(found)
    }

    /// The export.
    pub(super) fn export(&self) -> &Export {
        self.client.export()
    }

    /// Whether the server tells what is allocated.
    pub(super) fn has_status(&self) -> bool {
        self.client.has_status()
    }

    /// Sends what is due, and takes one step of what comes. `data` is for the payload of a read.
    fn step(&mut self, data: &mut [u8]) -> Result<Option<ClientEvent>, Trouble> {
        if !self.client.output().is_empty() {
            self.stream.send(self.client.output(), &[])?;
        }
        match self.client.wants() {
            Want::Bytes(count) => {
                let bytes = self.stream.take(count)?.ok_or(Trouble::Closed)?;
                Ok(self.client.input(bytes)?)
            }
            Want::Payload { at, length, .. } => {
                let (at, length) = (at as usize, length as usize);
                self.stream.fill(&mut data[at..at + length])?;
                Ok(self.client.payload_done()?)
            }
            Want::Discard(_) | Want::Nothing => Err(Trouble::Closed),
        }
    }

    /// Makes a request and waits for its reply. `data` is written or read into, `extents` are appended to.
    fn request(
        &mut self,
        command: Command,
        (flags, offset, length): (CommandFlags, u64, u64),
        sent: &[u8],
        received: &mut [u8],
        extents: &mut Vec<Extent>,
    ) -> Outcome<()> {
        self.client.request(command, flags, offset, length);
        self.stream.send(self.client.output(), sent)?;
        loop {
            match self.step(received)? {
                Some(ClientEvent::Reply { reply: Reply::Done(result), .. }) => return Ok(result),
                Some(ClientEvent::Reply { reply: Reply::Zeros { at, length }, .. }) => {
                    received[at as usize..(at + length) as usize].fill(0);
                }
                Some(ClientEvent::Reply { reply: Reply::Extents(more), .. }) => {
                    extents.extend(more);
                }
                _ => {}
            }
        }
    }

    /// A request without data.
    pub(super) fn order(
        &mut self,
        command: Command,
        flags: CommandFlags,
        offset: u64,
        length: u64,
    ) -> Outcome<()> {
        self.request(command, (flags, offset, length), &[], &mut [], &mut Vec::new())
    }

    /// Reads.
    pub(super) fn read(&mut self, offset: u64, data: &mut [u8]) -> Outcome<()> {
        let length = data.len() as u64;
        let range = (CommandFlags::empty(), offset, length);
        self.request(Command::Read, range, &[], data, &mut Vec::new())
    }

    /// Writes.
    pub(super) fn write(&mut self, offset: u64, data: &[u8]) -> Outcome<()> {
        let range = (CommandFlags::empty(), offset, data.len() as u64);
        self.request(Command::Write, range, data, &mut [], &mut Vec::new())
    }

    /// What is allocated, from `offset` on.
    pub(super) fn extents(&mut self, offset: u64, length: u64) -> Outcome<Vec<Extent>> {
        let mut extents = Vec::new();
        let range = (CommandFlags::empty(), offset, length);
        let done = self.request(Command::BlockStatus, range, &[], &mut [], &mut extents)?;
        Ok(done.map(|()| extents))
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        if self.client.wants() != Want::Nothing {
            self.client.disconnect();
            let _ = self.stream.send(self.client.output(), &[]);
        }
    }
}
