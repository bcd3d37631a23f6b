//! Byte streams: TCP and UNIX sockets, QPIP queue pairs, TLS over them; with a buffer for what has come.

use std::io::{self, IoSlice, Read, Write};
use std::net::TcpStream;
use std::ops::DerefMut;
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use rustls::{ClientConnection, ConnectionCommon, ServerConnection, SideData, StreamOwned};

use super::qpip::QpipStream;
use super::tls::{self, TlsError};

/// Bytes that one call reads at most ahead of what is wanted.
const BUFFER: usize = 128 << 10;

/// A byte stream.
pub(super) enum Socket {
    Tcp(TcpStream),
    Unix(UnixStream),
    Qpip(Box<QpipStream>),
    Tls(TlsStream),
}

/// TLS over another stream.
pub(super) struct TlsStream {
    stream: Box<dyn Secured>,
    /// Reads do not wait for what is to be sent.
    is_nonblocking: bool,
}

/// Either end of TLS.
trait Secured: Read + Write + Send {
    /// The stream below.
    fn socket(&mut self) -> &mut Socket;
    /// Says that nothing more comes.
    fn close(&mut self);
    /// Reads without sending first what waits to be sent, unlike [`Read::read`].
    fn receive(&mut self, data: &mut [u8]) -> io::Result<usize>;
}

impl<C, S> Secured for StreamOwned<C, Socket>
where
    C: DerefMut<Target = ConnectionCommon<S>> + Send,
    S: SideData + Send,
{
    fn socket(&mut self) -> &mut Socket {
        &mut self.sock
    }

    fn close(&mut self) {
        self.conn.send_close_notify();
        let _ = self.conn.write_tls(&mut self.sock);
    }

    fn receive(&mut self, data: &mut [u8]) -> io::Result<usize> {
        loop {
            match self.conn.reader().read(data) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                outcome => return outcome,
            }
            if self.conn.read_tls(&mut self.sock)? == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            let taken = self.conn.process_new_packets();
            taken.map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))?;
        }
    }
}

impl TlsStream {
    pub(super) fn client(connection: ClientConnection, socket: Socket) -> Self {
        Self { stream: Box::new(StreamOwned::new(connection, socket)), is_nonblocking: false }
    }

    pub(super) fn server(connection: ServerConnection, socket: Socket) -> Self {
        Self { stream: Box::new(StreamOwned::new(connection, socket)), is_nonblocking: false }
    }
}

impl Drop for TlsStream {
    fn drop(&mut self) {
        self.stream.close();
    }
}

impl Socket {
    /// How long a read, or a write to a peer that takes nothing, waits; `None`: for ever.
    pub(super) fn set_patience(&mut self, patience: Option<Duration>) -> io::Result<()> {
        match self {
            Self::Tcp(stream) => {
                stream.set_read_timeout(patience)?;
                stream.set_write_timeout(patience)
            }
            Self::Unix(stream) => {
                stream.set_read_timeout(patience)?;
                stream.set_write_timeout(patience)
            }
            Self::Qpip(stream) => {
                stream.set_patience(patience);
                Ok(())
            }
            Self::Tls(stream) => stream.stream.socket().set_patience(patience),
        }
    }

    /// From now on a call that would wait fails with [`io::ErrorKind::WouldBlock`].
    pub(super) fn set_nonblocking(&mut self) -> io::Result<()> {
        match self {
            Self::Tcp(stream) => stream.set_nonblocking(true),
            Self::Unix(stream) => stream.set_nonblocking(true),
            Self::Qpip(stream) => {
                stream.set_patience(Some(Duration::ZERO));
                Ok(())
            }
            Self::Tls(stream) => {
                stream.is_nonblocking = true;
                stream.stream.socket().set_nonblocking()
            }
        }
    }

    /// Has what was not sent yet never reach the peer, also where the network comes back later.
    pub(super) fn abort(&mut self) {
        use rustix::net::sockopt::set_socket_linger;
        match self {
            Self::Tcp(stream) => {
                let _ = set_socket_linger(&*stream, Some(Duration::ZERO));
            }
            // A UNIX socket keeps nothing back.
            Self::Unix(_) => {}
            Self::Qpip(stream) => stream.abort(),
            Self::Tls(stream) => stream.stream.socket().abort(),
        }
    }

    /// The descriptor to watch for what comes.
    pub(super) fn watch(&mut self) -> io::Result<RawFd> {
        match self {
            Self::Tcp(stream) => Ok(stream.as_raw_fd()),
            Self::Unix(stream) => Ok(stream.as_raw_fd()),
            Self::Qpip(stream) => stream.watch(),
            Self::Tls(stream) => stream.stream.socket().watch(),
        }
    }

    /// Whether a read has something, or a write room if `wants_room`, of which the descriptor says nothing.
    pub(super) fn is_ready(&mut self, wants_room: bool) -> bool {
        match self {
            Self::Tcp(_) | Self::Unix(_) => false,
            Self::Qpip(stream) => stream.is_ready(wants_room),
            Self::Tls(stream) => stream.stream.socket().is_ready(wants_room),
        }
    }

    /// Before what has come is read, after the descriptor said that something has.
    pub(super) fn take_event(&mut self) -> io::Result<()> {
        match self {
            Self::Tcp(_) | Self::Unix(_) => Ok(()),
            Self::Qpip(stream) => stream.take_event(),
            Self::Tls(stream) => stream.stream.socket().take_event(),
        }
    }
}

impl Read for Socket {
    fn read(&mut self, data: &mut [u8]) -> io::Result<usize> {
        match self {
            Self::Tcp(stream) => stream.read(data),
            Self::Unix(stream) => stream.read(data),
            Self::Qpip(stream) => stream.read(data),
            Self::Tls(stream) if stream.is_nonblocking => {
                stream.stream.receive(data).map_err(tls::explain)
            }
            Self::Tls(stream) => stream.stream.read(data).map_err(tls::explain),
        }
    }
}

impl Write for Socket {
    fn write(&mut self, data: &[u8]) -> io::Result<usize> {
        match self {
            Self::Tcp(stream) => stream.write(data),
            Self::Unix(stream) => stream.write(data),
            Self::Qpip(stream) => stream.write(data),
            Self::Tls(stream) => stream.stream.write(data).map_err(tls::explain),
        }
    }

    fn write_vectored(&mut self, data: &[IoSlice<'_>]) -> io::Result<usize> {
        match self {
            Self::Tcp(stream) => stream.write_vectored(data),
            Self::Unix(stream) => stream.write_vectored(data),
            Self::Qpip(stream) => stream.write_vectored(data),
            Self::Tls(stream) => stream.stream.write_vectored(data).map_err(tls::explain),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        match self {
            Self::Tls(stream) => stream.stream.flush().map_err(tls::explain),
            _ => Ok(()),
        }
    }
}

/// A socket and what has come over it and was not used yet.
pub(super) struct Stream {
    socket: Socket,
    buffer: Vec<u8>,
    start: usize,
}

impl Stream {
    pub(super) fn new(socket: Socket) -> Self {
        Self { socket, buffer: Vec::with_capacity(BUFFER), start: 0 }
    }

    /// How many bytes are there without a call.
    pub(super) fn buffered(&self) -> usize {
        self.buffer.len() - self.start
    }

    /// The socket.
    pub(super) fn socket(&mut self) -> &mut Socket {
        &mut self.socket
    }

    /// Puts TLS between this and the socket. What has come before, unprotected, is not taken for a
    /// part of it.
    pub(super) fn start_tls(
        self,
        begin: impl FnOnce(Socket) -> Result<Socket, TlsError>,
    ) -> Result<Self, TlsError> {
        if self.buffered() > 0 {
            return Err(TlsError::Early);
        }
        Ok(Self { socket: begin(self.socket)?, ..self })
    }

    /// The next `count` bytes, which are used up; `None` where the peer has closed before the first of them.
    pub(super) fn take(&mut self, count: usize) -> io::Result<Option<&[u8]>> {
        if self.buffered() < count {
            self.buffer.drain(..self.start);
            self.start = 0;
        }
        while self.buffered() < count {
            let (had, room) = (self.buffer.len(), BUFFER.max(count));
            self.buffer.resize(room, 0);
            let got = self.socket.read(&mut self.buffer[had..]);
            self.buffer.truncate(had + *got.as_ref().unwrap_or(&0));
            match got {
                Ok(0) if had == 0 => return Ok(None),
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        let from = self.start;
        self.start += count;
        Ok(Some(&self.buffer[from..from + count]))
    }

    /// Fills `data`: what lies in the buffer is copied, the rest is received in its place.
    pub(super) fn fill(&mut self, data: &mut [u8]) -> io::Result<()> {
        let ready = self.buffered().min(data.len());
        data[..ready].copy_from_slice(&self.buffer[self.start..self.start + ready]);
        self.start += ready;
        self.socket.read_exact(&mut data[ready..])
    }

    /// Fills the beginning of `data` with what is there; how much it was, and 0 where the peer has closed.
    pub(super) fn fill_some(&mut self, data: &mut [u8]) -> io::Result<usize> {
        let ready = self.buffered().min(data.len());
        if ready == 0 {
            return self.socket.read(data);
        }
        data[..ready].copy_from_slice(&self.buffer[self.start..self.start + ready]);
        self.start += ready;
        Ok(ready)
    }

    /// Sends two pieces, one after the other, and empties the first.
    pub(super) fn send(&mut self, first: &mut Vec<u8>, second: &[u8]) -> io::Result<()> {
        let mut slices = [IoSlice::new(first), IoSlice::new(second)];
        let mut rest: &mut [IoSlice<'_>] = &mut slices;
        IoSlice::advance_slices(&mut rest, 0);
        while !rest.is_empty() {
            match self.socket.write_vectored(rest) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(count) => IoSlice::advance_slices(&mut rest, count),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        first.clear();
        self.socket.flush()
    }
}
