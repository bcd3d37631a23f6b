//! The floor of datagrams: a plain UDP socket, non-blocking, with both ends spinning.

use std::io::ErrorKind;
use std::net::UdpSocket;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use super::datagrams::window;
use super::{End, Patience, Setup, Slice};
use crate::model::Kind;

/// One end.
pub(super) struct UdpEnd {
    socket: UdpSocket,
    first: bool,
    depth: u64,
    buffer: Vec<u8>,
}

impl UdpEnd {
    pub(super) fn new(setup: &Setup) -> Result<Self> {
        let socket = UdpSocket::bind("127.0.0.1:0").context("a UDP socket")?;
        let depth = u64::from(setup.depth);
        Ok(Self { socket, first: setup.first, depth, buffer: vec![1; 1 << 16] })
    }

    fn send(&self, size: usize) -> Result<()> {
        let bytes = self.buffer.get(..size).context("no datagram is so large")?;
        let mut patience = Patience::new();
        loop {
            match self.socket.send(bytes) {
                Ok(_) => return Ok(()),
                Err(error) if error.kind() == ErrorKind::WouldBlock => patience.check()?,
                Err(error) => return Err(error).context("sending"),
            }
        }
    }

    fn receive(&mut self) -> Result<()> {
        let mut patience = Patience::new();
        while !self.receive_now()? {
            patience.check().context("a datagram may be lost")?;
        }
        Ok(())
    }

    /// Whether there was one.
    fn receive_now(&mut self) -> Result<bool> {
        match self.socket.recv(&mut self.buffer) {
            Ok(_) => Ok(true),
            Err(error) if error.kind() == ErrorKind::WouldBlock => Ok(false),
            Err(error) => Err(error).context("receiving"),
        }
    }

    fn ping_pong(&mut self, size: usize, count: u64) -> Result<()> {
        for _ in 0..count {
            if self.first {
                self.send(size)?;
                self.receive()?;
            } else {
                self.receive()?;
                self.send(size)?;
            }
        }
        Ok(())
    }

    /// The same window as Quipu's.
    fn one_way(&mut self, size: usize, count: u64) -> Result<()> {
        let (window, step) = window(self.depth, size as u64);
        let (mut sent, mut taken) = (0, 0);
        if !self.first {
            for got in 1..=count {
                self.receive()?;
                if got.is_multiple_of(step) || got == count {
                    self.send(1)?;
                }
            }
            return Ok(());
        }
        while taken < count {
            while sent < count.min(taken + window) {
                self.send(size)?;
                sent += 1;
            }
            self.receive()?;
            taken += step;
            while self.receive_now()? {
                taken += step;
            }
        }
        Ok(())
    }

    fn exchange(&mut self, slice: &Slice, count: u64) -> Result<()> {
        let size = usize::try_from(slice.size)?;
        match slice.test.kind {
            Kind::Latency | Kind::Wake => self.ping_pong(size, count),
            Kind::Stream => self.one_way(size, count),
            Kind::Connect | Kind::Crowd => bail!("datagrams have no connection"),
        }
    }
}

impl End for UdpEnd {
    fn address(&self) -> String {
        self.socket.local_addr().map(|a| a.to_string()).unwrap_or_default()
    }

    fn connect(&mut self, address: &str) -> Result<()> {
        self.socket.connect(address).context("naming the other end")
    }

    fn run(&mut self, slice: &Slice, armed: &mut dyn FnMut() -> Result<()>) -> Result<Duration> {
        self.socket.set_nonblocking(slice.test.kind != Kind::Wake)?;
        armed()?;
        self.exchange(slice, slice.warmup)?;
        let start = Instant::now();
        self.exchange(slice, slice.count)?;
        Ok(start.elapsed())
    }
}
