//! Streams of the kernel: TCP and UNIX sockets, with a buffer for what has come.

use std::io::{self, IoSlice, Read, Write};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::time::Duration;

/// Bytes that one call reads at most ahead of what is wanted.
const BUFFER: usize = 128 << 10;

/// A socket of either kind.
pub(super) enum Socket {
    Tcp(TcpStream),
    Unix(UnixStream),
}

impl Socket {
    /// How long a read waits; `None`: for ever.
    pub(super) fn set_patience(&self, patience: Option<Duration>) -> io::Result<()> {
        match self {
            Self::Tcp(stream) => stream.set_read_timeout(patience),
            Self::Unix(stream) => stream.set_read_timeout(patience),
        }
    }
}

impl Read for Socket {
    fn read(&mut self, data: &mut [u8]) -> io::Result<usize> {
        match self {
            Self::Tcp(stream) => stream.read(data),
            Self::Unix(stream) => stream.read(data),
        }
    }
}

impl Write for Socket {
    fn write(&mut self, data: &[u8]) -> io::Result<usize> {
        match self {
            Self::Tcp(stream) => stream.write(data),
            Self::Unix(stream) => stream.write(data),
        }
    }

    fn write_vectored(&mut self, data: &[IoSlice<'_>]) -> io::Result<usize> {
        match self {
            Self::Tcp(stream) => stream.write_vectored(data),
            Self::Unix(stream) => stream.write_vectored(data),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
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
    pub(super) fn socket(&self) -> &Socket {
        &self.socket
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
        Ok(())
    }
}
