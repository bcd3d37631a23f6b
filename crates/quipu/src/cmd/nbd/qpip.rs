//! NBD over QPIP: the bytes of the protocol in the adapter's own TCP. So the other end is a queue pair or any
//! socket.

use std::collections::VecDeque;
use std::io::{self, Read, Write};
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsRawFd, RawFd};
use std::sync::{Arc, OnceLock};
use std::thread;
use std::time::Duration;

use quipu::qpip::{Adapter, Mode, TcpListener, TcpQueuePair, TcpSettings};
use quipu::{
    Access, Completion, CompletionQueue, Device, Error, MemoryRegion, Request, Sge, WcStatus,
};

use super::session::Trouble;
use crate::cmd::failure::Failure;
use crate::cmd::qpip::LinkOptions;

/// Requests that are posted at once in each direction, and their length. The receives come first.
const RECEIVES: u64 = 32;
const SENDS: u64 = 32;
const LENGTH: usize = 64 << 10;
/// Connections that wait for a queue pair.
const BACKLOG: u32 = 16;
/// A wait without a limit of its own.
const FOREVER: Duration = Duration::from_secs(1 << 32);

/// The adapter of this process.
static ADAPTER: OnceLock<Adapter> = OnceLock::new();

/// Brings the adapter up, if there is none.
pub(super) fn open(link: &LinkOptions) -> Result<&'static Adapter, Failure> {
    if ADAPTER.get().is_none() {
        let _ = ADAPTER.set(link.open()?);
    }
    Ok(ADAPTER.get().expect("set above"))
}

/// The adapter, if it is up.
pub(super) fn opened() -> Option<Device> {
    ADAPTER.get().map(|adapter| Device::clone(adapter))
}

fn settings() -> TcpSettings {
    TcpSettings { mode: Mode::Stream, ..TcpSettings::default() }
}

fn other(error: Error) -> io::Error {
    io::Error::other(error)
}

/// A connection.
pub(super) struct QpipStream {
    adapter: Adapter,
    qp: Arc<TcpQueuePair>,
    cq: CompletionQueue,
    memory: MemoryRegion,
    /// Receives with bytes, the oldest first: the place, how many bytes, and how many were used.
    ready: VecDeque<(u64, usize, usize)>,
    free: Vec<u64>,
    has_ended: bool,
    patience: Option<Duration>,
}

impl QpipStream {
    fn new(adapter: &Adapter) -> Result<Self, Error> {
        let (pd, places) = (adapter.protection_domain()?, RECEIVES + SENDS);
        let cq = adapter.completion_queue(places as u32)?;
        let queues = pd.queue_pair(&cq, &cq);
        let queues = queues.send_queue(SENDS as u32, 1).recv_queue(RECEIVES as u32, 1);
        let qp = Arc::new(queues.build_tcp()?);
        let memory = pd.register(places as usize * LENGTH, Access::LOCAL_WRITE)?;
        let stream = Self {
            adapter: adapter.clone(),
            qp,
            cq,
            memory,
            ready: VecDeque::new(),
            free: (RECEIVES..places).collect(),
            has_ended: false,
            patience: None,
        };
        for place in 0..RECEIVES {
            stream.qp.post_recv(place, &stream.place(place, LENGTH)?)?;
        }
        Ok(stream)
    }

    /// Connects with a server: a queue pair or a socket.
    pub(super) fn connect(host: &str, port: u16) -> Result<Self, Trouble> {
        let adapter = ADAPTER.get().ok_or(Trouble::Unsupported("nbd+qpip"))?;
        Self::connect_from(adapter, host, port)
    }

    fn connect_from(adapter: &Adapter, host: &str, port: u16) -> Result<Self, Trouble> {
        let host: IpAddr = host.parse().map_err(|_| {
            Trouble::Adapter(format!("\"{host}\" is no IP address: an adapter resolves no names"))
        })?;
        let stream = Self::new(adapter)?;
        stream.qp.connect(SocketAddr::new(host, port), &settings())?;
        stream.watch_end();
        Ok(stream)
    }

    /// Has reads end when the peer does.
    fn watch_end(&self) {
        let qp = Arc::clone(&self.qp);
        // Without a thread the end is noticed by the next request.
        let _ = thread::Builder::new().name("nbd end".into()).spawn(move || {
            let _ = qp.wait_peer_closed();
            // What is posted completes, after what has come.
            let _ = qp.flush();
        });
    }

    fn place(&self, place: u64, length: usize) -> Result<[Sge; 1], Error> {
        Ok([self.memory.sge(place as usize * LENGTH, length)?])
    }

    /// Has the returned descriptor become readable when something comes, or room for more.
    pub(super) fn watch(&self) -> io::Result<RawFd> {
        self.cq.request_event(false).map_err(other)?;
        Ok(self.cq.as_raw_fd())
    }

    /// Makes the descriptor unreadable again, before what has come is read.
    pub(super) fn take_event(&self) -> io::Result<()> {
        self.cq.take_event().map_err(other)
    }

    /// Whether a read has something, or a write room if `wants_room`, of which the descriptor says nothing:
    /// reads and writes take completions of both directions.
    pub(super) fn is_ready(&self, wants_room: bool) -> bool {
        !self.ready.is_empty() || self.has_ended || (wants_room && !self.free.is_empty())
    }

    /// Ends the connection at once: nothing more is sent.
    pub(super) fn abort(&mut self) {
        let _ = self.qp.abort();
        self.has_ended = true;
    }

    /// How long a read waits; `None`: for ever; zero: it does not, and would block.
    pub(super) fn set_patience(&mut self, patience: Option<Duration>) {
        self.patience = patience;
    }

    /// Takes completions; waits for some if there are none.
    fn poll(&mut self) -> io::Result<()> {
        let mut out = [Completion::default(); 32];
        let mut found = self.cq.poll(&mut out).map_err(other)?;
        if found == 0 {
            let limit = self.patience.unwrap_or(FOREVER);
            if limit.is_zero() {
                return Err(io::ErrorKind::WouldBlock.into());
            }
            found = self.cq.wait_timeout(&mut out, limit).map_err(other)?;
        }
        if found == 0 {
            self.adapter.check().map_err(other)?;
            return Err(io::ErrorKind::TimedOut.into());
        }
        for done in &out[..found] {
            match done.status {
                WcStatus::Success if done.wr_id >= RECEIVES => self.free.push(done.wr_id),
                WcStatus::Success => {
                    self.ready.push_back((done.wr_id, done.byte_len as usize, 0));
                }
                _ => self.has_ended = true,
            }
        }
        Ok(())
    }
}

impl Read for QpipStream {
    fn read(&mut self, data: &mut [u8]) -> io::Result<usize> {
        if data.is_empty() {
            return Ok(0);
        }
        loop {
            if let Some((place, length, used)) = self.ready.pop_front() {
                let count = (length - used).min(data.len());
                let at = place as usize * LENGTH + used;
                self.memory.read(at, &mut data[..count]).map_err(other)?;
                if used + count < length {
                    self.ready.push_front((place, length, used + count));
                } else if !self.has_ended {
                    // After the end of the stream it is refused, and of no use.
                    let memory = self.place(place, LENGTH).map_err(other)?;
                    let _ = self.qp.post_recv(place, &memory);
                }
                if count > 0 {
                    return Ok(count);
                }
            } else if self.has_ended {
                return Ok(0);
            } else {
                self.poll()?;
            }
        }
    }
}

impl Write for QpipStream {
    fn write(&mut self, data: &[u8]) -> io::Result<usize> {
        if data.is_empty() {
            return Ok(0);
        }
        let place = loop {
            match self.free.pop() {
                Some(place) => break place,
                None if self.has_ended => return Err(io::ErrorKind::BrokenPipe.into()),
                None => self.poll()?,
            }
        };
        let count = data.len().min(LENGTH);
        self.memory.write(place as usize * LENGTH, &data[..count]).map_err(other)?;
        let memory = self.place(place, count).map_err(other)?;
        self.qp.post_send(&Request::send(&memory).id(place)).map_err(other)?;
        Ok(count)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Drop for QpipStream {
    fn drop(&mut self) {
        // What was written still goes out, for a while; then the connection ends.
        let _ = self.qp.close();
        self.patience = Some(Duration::from_secs(1));
        while !self.has_ended && self.free.len() < SENDS as usize && self.poll().is_ok() {}
        let _ = self.qp.flush();
    }
}

/// What clients connect to.
pub(super) struct Door {
    adapter: &'static Adapter,
    listener: TcpListener,
}

impl Door {
    /// Listens at a port of all addresses of the adapter.
    pub(super) fn open(adapter: &'static Adapter, port: u16) -> Result<Self, Error> {
        Ok(Self { adapter, listener: adapter.listen(port, &settings(), BACKLOG)? })
    }

    /// Where it listens.
    pub(super) fn address(&self) -> Result<SocketAddr, Error> {
        let addresses = self.adapter.info()?.addresses;
        let first = addresses.first().copied().unwrap_or(IpAddr::from([0, 0, 0, 0]));
        Ok(SocketAddr::new(first, self.listener.port()))
    }

    /// Waits for a client.
    pub(super) fn next(&self) -> Result<QpipStream, Error> {
        let stream = QpipStream::new(self.adapter)?;
        self.listener.offer(&stream.qp)?;
        stream.qp.wait_connected()?;
        stream.watch_end();
        Ok(stream)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use quipu::Config;
    use quipu::qpip::QpipConfig;

    use super::*;

    /// Two ends of a connection on UDP links, which need no right; the first does not wait.
    fn connected() -> (QpipStream, QpipStream) {
        let adapter = || {
            let qpip = QpipConfig::new("udp:127.0.0.1:0".parse().unwrap());
            let address = Some([127, 0, 0, 1].into());
            let config = Config { address, counters: false, qpip: Some(qpip), ..Config::default() };
            Adapter::open_with(config).unwrap()
        };
        let (near, far): (_, &'static Adapter) = (adapter(), Box::leak(Box::new(adapter())));
        let door = Door::open(far, 0).unwrap();
        let to = door.address().unwrap();
        let server = thread::spawn(move || door.next().unwrap());
        let mut client = QpipStream::connect_from(&near, &to.ip().to_string(), to.port()).unwrap();
        client.set_patience(Some(Duration::ZERO));
        (client, server.join().unwrap())
    }

    fn until(what: &str, mut is_so: impl FnMut() -> bool) {
        let begun = Instant::now();
        while !is_so() {
            assert!(begun.elapsed() < Duration::from_secs(20), "{what}");
            thread::sleep(Duration::from_millis(1));
        }
    }

    fn would_block(outcome: io::Result<usize>) -> bool {
        outcome.is_err_and(|error| error.kind() == io::ErrorKind::WouldBlock)
    }

    #[test]
    fn a_read_and_a_write_find_what_the_other_has_taken_from_the_queue() {
        let (mut near, mut far) = connected();
        let data = vec![7; LENGTH];
        let mut sent = 0;
        // The other end takes nothing, so the queues fill up; then it says something.
        until("there is always room", || match near.write(&data) {
            Ok(count) => {
                sent += count;
                false
            }
            outcome => would_block(outcome) && sent > RECEIVES as usize * LENGTH,
        });
        far.write_all(b"full").unwrap();
        until("a write takes no completion of a receive", || {
            assert!(would_block(near.write(&data)));
            near.is_ready(false)
        });
        let mut said = [0; 4];
        assert_eq!(near.read(&mut said).unwrap(), 4);
        assert!(!near.is_ready(true), "nothing is left of it");
        far.read_exact(&mut vec![0; sent]).unwrap();
        until("a read takes no completion of a send", || {
            assert!(would_block(near.read(&mut said)));
            near.is_ready(true)
        });
        assert!(!near.is_ready(false) && near.write(&data).is_ok());
    }
}
