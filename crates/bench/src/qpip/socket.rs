//! An end that is a socket of the kernel.

use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::time::Duration;

use anyhow::{Context, Result};

use super::model::Figure;
use super::stage::{End, PORT, Shared};

/// A socket that sleeps does so no longer.
const PATIENCE: Duration = Duration::from_secs(5);
/// Octets that one call receives at most.
const CHUNK: usize = 256 << 10;

enum Socket {
    Tcp(TcpStream),
    /// With whom it talks.
    Udp(UdpSocket, Option<SocketAddr>),
}

/// A socket and what it sends.
pub(super) struct SocketEnd<'a> {
    socket: Socket,
    buffer: Vec<u8>,
    shared: &'a Shared,
}

impl<'a> SocketEnd<'a> {
    /// Connects to the other end, or waits for it to connect. Over TCP it then sleeps while it waits, or
    /// spins.
    pub(super) fn new(
        (figure, sleeps): (Figure, bool),
        own: SocketAddr,
        peer: Option<SocketAddr>,
        shared: &'a Shared,
    ) -> Result<Self> {
        let socket = match (figure, peer) {
            (Figure::RoundTripUdp, peer) => {
                let port = if peer.is_some() { 0 } else { PORT };
                let socket = UdpSocket::bind((own.ip(), port)).context("a UDP socket")?;
                socket.set_nonblocking(true)?;
                shared.second_is_ready(peer.is_none());
                Socket::Udp(socket, peer)
            }
            (_, Some(peer)) => {
                Socket::Tcp(TcpStream::connect_timeout(&peer, PATIENCE).context("connecting")?)
            }
            (_, None) => {
                let listener = TcpListener::bind(own).context("a listening socket")?;
                listener.set_nonblocking(true)?;
                shared.second_is_ready(true);
                Socket::Tcp(shared.until("a connection", || match listener.accept() {
                    Err(error) if nothing_yet(&error) => Ok(None),
                    accepted => Ok(Some(accepted.context("accepting")?.0)),
                })?)
            }
        };
        if let Socket::Tcp(stream) = &socket {
            stream.set_nodelay(true)?;
            stream.set_nonblocking(!sleeps)?;
            stream.set_read_timeout(Some(PATIENCE))?;
            stream.set_write_timeout(Some(PATIENCE))?;
        }
        Ok(Self { socket, buffer: vec![1; CHUNK], shared })
    }
}

/// Whether a call has found nothing yet.
fn nothing_yet(error: &std::io::Error) -> bool {
    matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted)
}

impl End for SocketEnd<'_> {
    fn send(&mut self, len: usize) -> Result<()> {
        let mut sent = 0;
        while sent < len {
            let left = &self.buffer[..(len - sent).min(CHUNK)];
            let wrote = self.shared.until("room", || {
                let wrote = match &mut self.socket {
                    Socket::Tcp(stream) => stream.write(left),
                    Socket::Udp(socket, peer) => {
                        socket.send_to(left, peer.context("nobody has asked")?)
                    }
                };
                match wrote {
                    Err(error) if nothing_yet(&error) => Ok(None),
                    wrote => Ok(Some(wrote.context("sending")?)),
                }
            })?;
            sent += wrote;
        }
        Ok(())
    }

    fn receive(&mut self) -> Result<usize> {
        let Self { socket, buffer, shared } = self;
        shared.until("octets", || {
            let read = match socket {
                Socket::Tcp(stream) => stream.read(buffer),
                Socket::Udp(socket, peer) => socket.recv_from(buffer).map(|(len, from)| {
                    *peer = Some(from);
                    len
                }),
            };
            match read {
                Err(error) if nothing_yet(&error) => Ok(None),
                read => Ok(Some(read.context("receiving")?)),
            }
        })
    }
}
