//! The floor of every TCP transport: a plain socket, non-blocking, with both ends spinning, and with the
//! congestion control that Quipu's have.

use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};

use super::{End, Patience, Setup, Slice};
use crate::model::Kind;
use crate::{congestion, sys};

/// Bytes that one call sends or receives at most, as a program would that knows the machine: more
/// gains nothing, and the buffer stays in the cache.
const CHUNK: usize = 256 << 10;

/// One end of the socket.
pub(super) struct SocketEnd {
    listener: Option<TcpListener>,
    stream: Option<TcpStream>,
    first: bool,
    buffer: Vec<u8>,
    /// Where the first end connects to.
    peer: String,
}

impl SocketEnd {
    pub(super) fn new(setup: &Setup) -> Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0").context("a listening socket")?;
        // Who is accepted has what the listener asked for.
        let _ = congestion::ask(&listener);
        let listener = (!setup.first).then_some(listener);
        let buffer = vec![1; CHUNK];
        Ok(Self { listener, stream: None, first: setup.first, buffer, peer: String::new() })
    }

    fn stream(&self) -> Result<&TcpStream> {
        self.stream.as_ref().context("not connected")
    }

    /// Sends `count` messages of `size` bytes.
    fn send(&self, size: usize) -> Result<()> {
        let mut stream = self.stream()?;
        let mut patience = Patience::new();
        let mut left = size;
        while left > 0 {
            match stream.write(&self.buffer[..left.min(CHUNK)]) {
                Ok(n) => left -= n,
                Err(error) if error.kind() == ErrorKind::WouldBlock => patience.check()?,
                Err(error) => return Err(error).context("sending"),
            }
        }
        Ok(())
    }

    fn receive(&mut self, size: usize) -> Result<()> {
        let mut stream = self.stream.as_ref().context("not connected")?;
        let mut patience = Patience::new();
        let mut left = size;
        while left > 0 {
            match stream.read(&mut self.buffer[..left.min(CHUNK)]) {
                Ok(0) => bail!("the other end closed the connection"),
                Ok(n) => left -= n,
                Err(error) if error.kind() == ErrorKind::WouldBlock => patience.check()?,
                Err(error) => return Err(error).context("receiving"),
            }
        }
        Ok(())
    }

    fn ping_pong(&mut self, size: usize, count: u64) -> Result<()> {
        for _ in 0..count {
            if self.first {
                self.send(size)?;
                self.receive(size)?;
            } else {
                self.receive(size)?;
                self.send(size)?;
            }
        }
        Ok(())
    }

    /// One way, one call per message; then a byte back, as the last message has to be there.
    fn one_way(&mut self, size: usize, count: u64) -> Result<()> {
        if self.first {
            for _ in 0..count {
                self.send(size)?;
            }
            self.receive(1)
        } else {
            // A receiver of a stream takes what is there; it need not see the messages.
            let total = size.checked_mul(usize::try_from(count)?).context("too many bytes")?;
            self.receive(total)?;
            self.send(1)
        }
    }

    /// Connections at once: opened, then closed by the end that opened them, as a program would
    /// that had nothing to say.
    fn connections(&mut self, count: u64) -> Result<()> {
        let mut all = Vec::with_capacity(usize::try_from(count)?);
        for _ in 0..count {
            all.push(match &self.listener {
                Some(listener) => listener.accept().context("accepting")?.0,
                None => connect(&self.peer)?,
            });
        }
        for mut stream in all {
            if self.first {
                stream.shutdown(Shutdown::Write)?;
            }
            // The other end closes, and this one sees it.
            let left = stream.read(&mut [0])?;
            ensure!(left == 0, "bytes from nowhere");
        }
        Ok(())
    }

    fn exchange(&mut self, slice: &Slice, count: u64) -> Result<()> {
        let size = usize::try_from(slice.size)?;
        match slice.test.kind {
            Kind::Latency | Kind::Wake => self.ping_pong(size, count),
            Kind::Stream => self.one_way(size, count),
            Kind::Connect => self.connections(count),
            Kind::Crowd => bail!("there is one socket only"),
        }
    }
}

fn connect(address: &str) -> Result<TcpStream> {
    let address = address.parse().context("the other end's address")?;
    // A wish, as of Quipu: a sandbox may refuse it.
    sys::connect(address, |socket| congestion::ask(socket).or(Ok(()))).context("connecting")
}

impl End for SocketEnd {
    fn address(&self) -> String {
        let address = self.listener.as_ref().and_then(|l| l.local_addr().ok());
        address.map(|a| a.to_string()).unwrap_or_default()
    }

    fn connect(&mut self, address: &str) -> Result<()> {
        let stream = match &self.listener {
            Some(listener) => listener.accept().context("accepting")?.0,
            None => connect(address)?,
        };
        stream.set_nodelay(true)?;
        stream.set_nonblocking(true)?;
        self.stream = Some(stream);
        self.peer = address.to_owned();
        Ok(())
    }

    fn run(&mut self, slice: &Slice, armed: &mut dyn FnMut() -> Result<()>) -> Result<Duration> {
        let waits = slice.test.kind == Kind::Wake;
        self.stream()?.set_nonblocking(!waits)?;
        armed()?;
        self.exchange(slice, slice.warmup)?;
        let start = Instant::now();
        self.exchange(slice, slice.count)?;
        Ok(start.elapsed())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_ends_have_what_quipu_asks_for() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        congestion::ask(&listener).unwrap();
        let one = connect(&listener.local_addr().unwrap().to_string()).unwrap();
        let other = listener.accept().unwrap().0;
        let [one, other] = [&one, &other].map(|socket| sys::congestion(socket).unwrap());
        assert_eq!(one, other);
        let default = congestion::default();
        assert!(!one.starts_with("bbr") && (default.starts_with("bbr") || one == default), "{one}");
    }
}
