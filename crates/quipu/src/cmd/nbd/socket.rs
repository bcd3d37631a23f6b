//! A client's session over a socket: one request at a time.

use std::io;
use std::net::{TcpStream, ToSocketAddrs};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use quipu_nbd::uri::{Place, Uri};
use quipu_nbd::{
    Client, ClientEvent, Command, CommandFlags, Export, Extent, Handshake, Reply, Want,
};

use super::qpip::QpipStream;
use super::session::{Outcome, PATIENCE, Trouble};
use super::stream::{Socket, Stream};
use super::tls;

/// Fills memory.
type Fill<'a> = dyn FnMut(&mut [u8]) -> Result<(), Trouble> + 'a;
/// Has the memory of a cookie filled.
type Memory<'a> = dyn FnMut(u64, &mut Fill<'_>) -> Result<(), Trouble> + 'a;

/// The session.
pub(super) struct Session {
    client: Client,
    /// It is absent while TLS is put into it.
    stream: Option<Stream>,
}

/// Connects to the first address of a host that takes it.
fn connect_tcp(host: &str, port: u16) -> io::Result<TcpStream> {
    let mut last = io::Error::new(io::ErrorKind::NotFound, format!("{host} has no address"));
    for address in (host, port).to_socket_addrs()? {
        match TcpStream::connect_timeout(&address, PATIENCE) {
            Ok(stream) => return Ok(stream),
            Err(error) => last = error,
        }
    }
    Err(last)
}

fn connect(uri: &Uri) -> Result<Stream, Trouble> {
    let socket = match &uri.place {
        Place::Tcp { host, port } => {
            let stream = connect_tcp(host, *port)?;
            stream.set_nodelay(true)?;
            Socket::Tcp(stream)
        }
        Place::Unix(path) => Socket::Unix(UnixStream::connect(path)?),
        Place::Rdma { .. } => return Err(Trouble::Unsupported("a stream over nbd+rdma")),
        Place::Qpip { host, port } => Socket::Qpip(Box::new(QpipStream::connect(host, *port)?)),
    };
    Ok(Stream::new(socket))
}

impl Session {
    /// Connects and begins with the URI's export. `patience`: for each step of the server.
    pub(super) fn open(uri: &Uri, wanted: Handshake, patience: Duration) -> Result<Self, Trouble> {
        let mut session = Self::connect(uri, wanted)?;
        session.set_patience(patience)?;
        loop {
            match session.negotiate(uri)? {
                Some(ClientEvent::Started(_)) => return Ok(session),
                Some(ClientEvent::Ended) => return Err(Trouble::Closed),
                _ => {}
            }
        }
    }

    fn connect(uri: &Uri, wanted: Handshake) -> Result<Self, Trouble> {
        let client = Client::new(Handshake { tls: uri.tls, ..wanted });
        let mut session = Self { client, stream: Some(connect(uri)?) };
        session.set_patience(PATIENCE)?;
        Ok(session)
    }

    /// A step of the negotiation, in which TLS may begin.
    fn negotiate(&mut self, uri: &Uri) -> Result<Option<ClientEvent>, Trouble> {
        let event = self.step(&mut [])?;
        if event == Some(ClientEvent::StartTls) {
            let stream = self.stream.take().ok_or(Trouble::Closed)?;
            self.stream = Some(stream.start_tls(|socket| tls::connect(uri, socket))?);
            self.client.tls_started();
        }
        Ok(event)
    }

    /// How long a reply may take from now on.
    pub(super) fn set_patience(&mut self, patience: Duration) -> io::Result<()> {
        self.stream()?.socket().set_patience(Some(patience))
    }

    /// From now on nothing waits: only the parts are used.
    pub(super) fn set_nonblocking(&mut self) -> io::Result<()> {
        self.stream()?.socket().set_nonblocking()
    }

    /// The engine.
    pub(super) fn client(&mut self) -> &mut Client {
        &mut self.client
    }

    /// The engine and the stream.
    pub(super) fn parts(&mut self) -> io::Result<(&mut Client, &mut Stream)> {
        let stream = self.stream.as_mut().ok_or(io::ErrorKind::NotConnected)?;
        Ok((&mut self.client, stream))
    }

    /// Closes the stream without a farewell, and without what is not sent yet.
    pub(super) fn abandon(&mut self) {
        if let Some(mut stream) = self.stream.take() {
            stream.socket().abort();
        }
    }

    /// The stream, which is there unless TLS has failed.
    pub(super) fn stream(&mut self) -> io::Result<&mut Stream> {
        self.stream.as_mut().ok_or_else(|| io::ErrorKind::NotConnected.into())
    }

    /// The names and descriptions of a server's exports.
    pub(super) fn list(uri: &Uri, wanted: Handshake) -> Result<Vec<(String, String)>, Trouble> {
        let mut session = Self::connect(uri, wanted)?;
        let mut found = Vec::new();
        loop {
            match session.negotiate(uri)? {
                Some(ClientEvent::Listed { name, description }) => found.push((name, description)),
                Some(ClientEvent::Ended) => break,
                _ => {}
            }
        }
        session.send(&[])?;
        Ok(found)
    }

    /// Sends what is due, and data.
    fn send(&mut self, data: &[u8]) -> io::Result<()> {
        let Self { client, stream } = self;
        let stream = stream.as_mut().ok_or(io::ErrorKind::NotConnected)?;
        stream.send(client.output(), data)
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
            self.send(&[])?;
        }
        match self.client.wants() {
            Want::Bytes(count) => {
                let Self { client, stream } = self;
                let stream = stream.as_mut().ok_or(Trouble::Closed)?;
                let bytes = stream.take(count)?.ok_or(Trouble::Closed)?;
                Ok(client.input(bytes)?)
            }
            Want::Payload { at, length, .. } => {
                let (at, length) = (at as usize, length as usize);
                self.stream()?.fill(&mut data[at..at + length])?;
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
        self.send(sent)?;
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

    /// Makes a request, and does not wait for its reply; its cookie. `sent` are the data of a write.
    pub(super) fn submit(
        &mut self,
        command: Command,
        (offset, length): (u64, u64),
        sent: &[u8],
    ) -> Result<u64, Trouble> {
        let cookie = self.client.request(command, CommandFlags::empty(), offset, length);
        self.send(sent)?;
        Ok(cookie)
    }

    /// Waits until one of the requests is done, and returns its cookie. `place` calls its second
    /// argument with the memory for the data of a cookie.
    pub(super) fn complete(&mut self, place: &mut Memory<'_>) -> Result<u64, Trouble> {
        loop {
            let event = match self.client.wants() {
                Want::Payload { cookie, at, length } => {
                    let (at, length) = (at as usize, length as usize);
                    place(cookie, &mut |data| {
                        let data = data.get_mut(at..at + length).ok_or(Trouble::Closed)?;
                        Ok(self.stream()?.fill(data)?)
                    })?;
                    self.client.payload_done()?
                }
                _ => self.step(&mut [])?,
            };
            match event {
                Some(ClientEvent::Reply { cookie, reply: Reply::Done(Ok(())) }) => {
                    return Ok(cookie);
                }
                Some(ClientEvent::Reply { reply: Reply::Done(Err(errno)), .. }) => {
                    return Err(io::Error::from_raw_os_error(errno.0 as i32).into());
                }
                Some(ClientEvent::Reply { cookie, reply: Reply::Zeros { at, length } }) => {
                    place(cookie, &mut |data| {
                        let range = at as usize..(at + length) as usize;
                        data.get_mut(range).ok_or(Trouble::Closed)?.fill(0);
                        Ok(())
                    })?;
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
            let _ = self.send(&[]);
        }
    }
}
