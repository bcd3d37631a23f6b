//! Requests that have come and nobody has taken: streams whose request is not complete, and requests that
//! wait a moment for somebody to want them.

use std::io::{self, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use quipu_cabi::descriptors::with_more_descriptors;
use quipu_via::address;
use quipu_via::message::{MAX_LEN, Message, first_body};

use crate::accept::Incoming;
use crate::control::Control;

/// Streams at a time; more wait in the kernel.
const MAX_STREAMS: usize = 128;
/// How long nothing is accepted after the system refused a descriptor.
const PAUSE: Duration = Duration::from_millis(20);
/// How long a peer has for its request.
const READING: Duration = Duration::from_secs(5);
/// How long a request waits for a program that is about to wait for it.
const HOLDING: Duration = Duration::from_millis(20);

/// A stream whose request is not complete.
struct Half {
    stream: TcpStream,
    bytes: Vec<u8>,
    until: Instant,
}

/// A request that nobody waits for yet.
struct Held {
    incoming: Incoming,
    until: Instant,
}

/// All of them.
#[derive(Default)]
pub(crate) struct Doorstep {
    halves: Vec<Half>,
    held: Vec<Held>,
    /// Until when nothing is accepted.
    paused: Option<Instant>,
}

/// What became of a stream.
enum Progress {
    Incomplete,
    Over,
    Request(Box<quipu_via::message::Request>),
}

impl Half {
    fn read(&mut self) -> Progress {
        let mut bytes = [0; MAX_LEN + 2];
        match self.stream.read(&mut bytes) {
            Ok(0) => return Progress::Over,
            Ok(count) => self.bytes.extend(&bytes[..count]),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(_) => return Progress::Over,
        }
        match first_body(&self.bytes) {
            Ok(None) => Progress::Incomplete,
            // A requester waits for the answer before it says more.
            Ok(Some((body, taken))) if taken == self.bytes.len() => match Message::parse(body) {
                Ok(Message::Request(request)) => Progress::Request(request),
                _ => Progress::Over,
            },
            _ => Progress::Over,
        }
    }
}

impl Doorstep {
    pub(crate) fn fds(&self) -> impl Iterator<Item = RawFd> + '_ {
        let halves = self.halves.iter().map(|half| half.stream.as_raw_fd());
        halves.chain(self.held.iter().map(|held| held.incoming.stream.as_raw_fd()))
    }

    /// Whether another stream can be taken. If not, nobody should wait for one.
    pub(crate) fn has_room(&mut self, now: Instant) -> bool {
        self.paused = self.paused.filter(|until| now < *until);
        self.paused.is_none() && self.halves.len() + self.held.len() < MAX_STREAMS
    }

    /// When the next of them is to be given up, or the pause is over.
    pub(crate) fn timeout(&self, now: Instant) -> Option<Duration> {
        let halves = self.halves.iter().map(|half| half.until);
        let held = self.held.iter().map(|held| held.until);
        let next = halves.chain(held).chain(self.paused).min();
        next.map(|until| until.saturating_duration_since(now))
    }

    /// Takes streams that have come.
    pub(crate) fn accept(&mut self, listeners: &[Arc<TcpListener>], now: Instant) {
        for listener in listeners {
            while self.has_room(now) {
                let stream = match with_more_descriptors(|| listener.accept()) {
                    Ok((stream, _)) => stream,
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                    Err(_) => {
                        // No descriptors or memory, or the stream is gone: not at once again.
                        self.paused = Some(now + PAUSE);
                        return;
                    }
                };
                if stream.set_nonblocking(true).is_ok() {
                    self.halves.push(Half { stream, bytes: Vec::new(), until: now + READING });
                }
            }
        }
    }

    /// Reads requests and offers them; answers those that nobody wants. Hosts of requesters have addresses
    /// of `host_len` bytes, as programs have room for those.
    pub(crate) fn read(&mut self, control: &Control, host_len: usize, now: Instant) {
        let mut at = 0;
        while at < self.halves.len() {
            match self.halves[at].read() {
                Progress::Incomplete if now < self.halves[at].until => at += 1,
                Progress::Incomplete | Progress::Over => drop(self.halves.swap_remove(at)),
                Progress::Request(request) => {
                    let stream = self.halves.swap_remove(at).stream;
                    if address::bytes_of(request.local.host).len() != host_len {
                        refuse(stream);
                        continue;
                    }
                    let mut stream = stream;
                    if stream.write_all(&Message::Heard.to_bytes()).is_err() {
                        continue;
                    }
                    let patience = HOLDING.min(Duration::from_millis(request.timeout_ms));
                    let incoming = Incoming { stream, request: *request };
                    self.held.push(Held { incoming, until: now + patience });
                }
            }
        }
        for held in std::mem::take(&mut self.held) {
            if is_gone(&held.incoming.stream) {
                continue;
            }
            let Some(incoming) = control.offer(held.incoming) else { continue };
            if now < held.until {
                self.held.push(Held { incoming, until: held.until });
            } else {
                refuse(incoming.stream);
            }
        }
    }
}

/// Whether the requester has given up, or says what it must not.
fn is_gone(stream: &TcpStream) -> bool {
    let mut byte = [0];
    match stream.peek(&mut byte) {
        Err(error) => error.kind() != io::ErrorKind::WouldBlock,
        Ok(_) => true,
    }
}

fn refuse(mut stream: TcpStream) {
    let _ = stream.write_all(&Message::NoMatch.to_bytes());
}
