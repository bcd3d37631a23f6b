//! Streams over a lossy, long path: two TAP devices, each in a namespace of its own, and a relay
//! between them.

use std::fs::File;
use std::io::{ErrorKind, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail, ensure};
use quipu_host::inet::tcp::Mode;
use quipu_host::nic::mem::Segment;
use quipu_host::nic::{
    Access, ChannelId, Completion, CqId, Payload, QpAttr, QpAttrMask, QpCap, QpId, QpInit, QpState,
    QpType, SendFlags, SendOp, SendWr, Sge, TcpChange, TcpSettings, To, WcStatus,
};
use quipu_host::{ContextId, Engine, EngineError};

use super::goodput::{Sender, Stretch};
use super::model::Measured;
use super::queue_pair::open;
use super::relay::{self, Wire};
use super::space::{Space, ip};
use super::stage::PORT;
use crate::sys;

/// The devices, and the kernel's addresses; that of an adapter beside the first.
const DEVICES: [&str; 2] = ["lossy0", "lossy1"];
const NEAR: Ipv4Addr = Ipv4Addr::new(10, 9, 4, 1);
const FAR: Ipv4Addr = Ipv4Addr::new(10, 9, 4, 2);
const ADAPTER: Ipv4Addr = Ipv4Addr::new(10, 9, 4, 11);
/// Frames that wait at a device for the relay.
const QUEUE: u32 = 20_000;
/// Round trips before those that count. Slow start is over by then, though not all that comes of it: at 1 %
/// and 100 ms both senders carry some 4 % more in the next 5 s than later, and some 15 % more in 3 s.
const WARMUP: u32 = 20;
/// Round trips until the path is empty.
const EMPTY: u32 = 3;
/// Octets that are sent at once, and sends of a connection under way at least.
const MESSAGE: usize = 16_384;
const DEPTH: u32 = 32;
/// Everybody is connected by then, though some SYNs are lost.
const PATIENCE: Duration = Duration::from_secs(15);
/// Between two looks, of those who wait for something else, and whether a stretch is over.
const LOOK: Duration = Duration::from_millis(2);
const SLEEP: Duration = Duration::from_millis(100);

/// The path; the near end is in the namespace of the process.
pub(super) struct Path {
    devices: [File; 2],
}

/// What the threads of a stretch know.
#[derive(Default)]
struct Shared {
    /// It is over, or somebody has failed.
    stop: AtomicBool,
    /// The relay goes on until nothing is under way any more.
    relay_stops: AtomicBool,
    /// Connections that the receiver has accepted.
    accepted: AtomicUsize,
    received: AtomicU64,
}

impl Shared {
    fn has_stopped(&self) -> bool {
        self.stop.load(Ordering::Acquire)
    }

    /// Anyone who fails ends it for all.
    fn ended(&self, outcome: Result<()>) -> Result<()> {
        self.stop.fetch_or(outcome.is_err(), Ordering::Release);
        outcome
    }

    /// Looks for something until it is there. Sleeps in between.
    fn until<T>(&self, what: &str, mut look: impl FnMut() -> Result<Option<T>>) -> Result<T> {
        let end = Instant::now() + PATIENCE;
        loop {
            if let Some(found) = look()? {
                return Ok(found);
            }
            ensure!(!self.has_stopped(), "another has given up");
            ensure!(Instant::now() < end, "{what}: too late");
            std::thread::sleep(LOOK);
        }
    }
}

impl Path {
    /// Makes both devices.
    ///
    /// # Errors
    ///
    /// The kernel makes no such devices here.
    pub(super) fn new(space: &Space) -> Result<Self> {
        // What the kernel remembers of one connection would help the next.
        std::fs::write("/proc/sys/net/ipv4/tcp_no_metrics_save", "1")
            .context("a setting of TCP")?;
        let make = |name: &str, address: Ipv4Addr| {
            let device = sys::open_tap(name).context("making a TAP device")?;
            ip(&format!("address add {address}/24 dev {name}"))?;
            ip(&format!("link set {name} txqueuelen {QUEUE} up"))?;
            Ok(device)
        };
        let near = make(DEVICES[0], NEAR)?;
        let far = space.in_far(|| make(DEVICES[1], FAR))?;
        Ok(Self { devices: [near, far] })
    }

    /// Octets a second that a connection brings to its receiver, the mean of all.
    ///
    /// # Errors
    ///
    /// Somebody cannot connect, or the connections do not stand that long.
    pub(super) fn measure(&self, space: &Space, stretch: &Stretch) -> Result<Measured> {
        let shared = &Shared::default();
        let round_trip = Duration::from_secs_f64(stretch.rtt_ms / 1e3);
        let wire = Wire::new(stretch.loss_percent / 100.0, round_trip / 2, stretch.seed);
        let listener = space.in_far(|| {
            let listener = TcpListener::bind((FAR, PORT)).context("a listening socket")?;
            sys::set_receive_room(&listener, stretch.window).context("the window")?;
            Ok(listener)
        })?;
        std::thread::scope(|scope| {
            let relay = scope.spawn(move || {
                shared.ended(relay::carry(&self.devices, wire, &shared.relay_stops))
            });
            let receiver =
                scope.spawn(move || shared.ended(receive(&listener, stretch.connections, shared)));
            let sender = scope.spawn(move || {
                shared.ended(match stretch.sender {
                    Sender::Kernel => sockets_send(stretch.connections, shared),
                    Sender::Qpip => queue_pairs_send(stretch, shared),
                })
            });
            let value = watch(stretch, round_trip, shared);
            shared.stop.store(true, Ordering::Release);
            let join = |thread: std::thread::ScopedJoinHandle<'_, Result<()>>| {
                thread.join().unwrap_or_else(|_| Err(anyhow!("a thread has panicked")))
            };
            let ends = [("the sender", join(sender)), ("the receiver", join(receiver))];
            std::thread::sleep(EMPTY * round_trip);
            shared.relay_stops.store(true, Ordering::Release);
            join(relay).context("the relay")?;
            for (who, outcome) in ends {
                outcome.context(who)?;
            }
            Ok(Measured { value: value?, ..Measured::default() })
        })
    }
}

/// Waits until all have connected, and then for what is measured.
fn watch(stretch: &Stretch, round_trip: Duration, shared: &Shared) -> Result<f64> {
    let count = stretch.connections as usize;
    shared.until("connections", || {
        Ok((shared.accepted.load(Ordering::Acquire) == count).then_some(()))
    })?;
    let sleep = |time: Duration| {
        let end = Instant::now() + time;
        while Instant::now() < end {
            ensure!(!shared.has_stopped(), "it has ended too early");
            std::thread::sleep(SLEEP.min(end.saturating_duration_since(Instant::now())));
        }
        Ok((shared.received.load(Ordering::Relaxed), Instant::now()))
    };
    let (before, from) = sleep(WARMUP * round_trip)?;
    let (after, to) = sleep(Duration::from_secs_f64(stretch.seconds))?;
    ensure!(after > before, "nothing has come");
    Ok((after - before) as f64 / to.duration_since(from).as_secs_f64() / count as f64)
}

/// Accepts so many connections, and takes what they bring.
fn receive(listener: &TcpListener, connections: u32, shared: &Shared) -> Result<()> {
    listener.set_nonblocking(true)?;
    std::thread::scope(|scope| {
        let mut threads = Vec::new();
        for _ in 0..connections {
            let accepted = shared.until("a connection", || match listener.accept() {
                Err(error) if nothing_yet(&error) => Ok(None),
                accepted => Ok(Some(accepted.context("accepting")?.0)),
            });
            let Ok(stream) = accepted else { break };
            threads.push(scope.spawn(move || shared.ended(take(stream, shared))));
            shared.accepted.fetch_add(1, Ordering::Release);
        }
        joined(threads)
    })
}

/// What became of threads.
fn joined(threads: Vec<std::thread::ScopedJoinHandle<'_, Result<()>>>) -> Result<()> {
    let panicked = |_| Err(anyhow!("a thread has panicked"));
    threads.into_iter().try_for_each(|thread| thread.join().unwrap_or_else(panicked))
}

fn nothing_yet(error: &std::io::Error) -> bool {
    matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted)
}

fn take(mut stream: TcpStream, shared: &Shared) -> Result<()> {
    stream.set_nonblocking(false)?;
    stream.set_read_timeout(Some(SLEEP))?;
    let mut buffer = vec![0; 1 << 16];
    while !shared.has_stopped() {
        match stream.read(&mut buffer) {
            Ok(0) if !shared.has_stopped() => bail!("a connection has ended"),
            Ok(len) => {
                shared.received.fetch_add(len as u64, Ordering::Relaxed);
            }
            Err(error) if nothing_yet(&error) || shared.has_stopped() => {}
            Err(error) => return Err(error).context("receiving"),
        }
    }
    Ok(())
}

/// Sends by sockets of the kernel, with CUBIC.
fn sockets_send(connections: u32, shared: &Shared) -> Result<()> {
    std::thread::scope(|scope| {
        let socket = |_| scope.spawn(|| shared.ended(socket_sends(shared)));
        joined((0..connections).map(socket).collect())
    })
}

fn socket_sends(shared: &Shared) -> Result<()> {
    let peer = SocketAddr::from((FAR, PORT));
    let mut stream = TcpStream::connect_timeout(&peer, PATIENCE).context("connecting")?;
    // The namespace's sockets have begun with it unless this kernel has none.
    sys::set_congestion(&stream, "cubic").context("this kernel has no CUBIC")?;
    stream.set_write_timeout(Some(SLEEP))?;
    let message = vec![1; MESSAGE];
    while !shared.has_stopped() {
        match stream.write(&message) {
            Err(error) if !nothing_yet(&error) && !shared.has_stopped() => {
                return Err(error).context("sending");
            }
            _ => {}
        }
    }
    Ok(())
}

/// Queue pairs of one adapter, whose program sleeps while it waits.
struct Streams {
    engine: Arc<Engine>,
    context: ContextId,
    cq: CqId,
    channel: ChannelId,
    qps: Vec<QpId>,
    _memory: Segment,
    sge: Sge,
}

impl Streams {
    fn new(connections: u32, depth: u32) -> Result<Self> {
        let station = format!("station=02:00:00:00:00:{:02x}", ADAPTER.octets()[3]);
        let engine = open(&format!("packet:{},{station}", DEVICES[0]), ADAPTER.into())?;
        let (context, _) = engine.open_context()?;
        engine.tcp_events(context)?;
        let pd = engine.alloc_pd()?;
        let (channel, _) = engine.create_channel()?;
        let (cq, _) = engine.create_cq(context, 2 * depth * connections, Some(channel), 0)?;
        let memory = engine.allocate(MESSAGE)?;
        let region = engine.reg_segment(pd, &memory, None, Access::LOCAL_WRITE)?;
        let sge = Sge { addr: memory.addr() as u64, len: MESSAGE as u32, lkey: region.key };
        let cap = QpCap {
            max_send_wr: depth,
            max_recv_wr: 1,
            max_send_sge: 1,
            max_recv_sge: 1,
            max_inline_data: 0,
        };
        let qp_type = QpType::Tcp;
        let init =
            QpInit { pd, send_cq: cq, recv_cq: cq, srq: None, cap, qp_type, sq_sig_all: true };
        let attr = QpAttr { state: QpState::Init, port_num: 1, ..QpAttr::default() };
        let mask = QpAttrMask::STATE | QpAttrMask::PKEY_INDEX | QpAttrMask::PORT;
        let mut qps = Vec::new();
        for _ in 0..connections {
            let (qp, _, _) = engine.create_qp(context, &init).context("creating a queue pair")?;
            engine.modify_qp(qp, &attr, mask)?;
            qps.push(qp);
        }
        Ok(Self { engine, context, cq, channel, qps, _memory: memory, sge })
    }

    fn connect(&self, shared: &Shared) -> Result<()> {
        let settings = TcpSettings { mode: Mode::Stream, ..TcpSettings::default() };
        for qp in &self.qps {
            self.engine.tcp_connect(*qp, SocketAddr::from((FAR, PORT)), None, &settings)?;
        }
        for _ in &self.qps {
            let event = || Ok(self.engine.take_tcp_event(self.context)?);
            match shared.until("a connection", event)?.change {
                TcpChange::Connected => {}
                other => bail!("not connected: {other:?}"),
            }
        }
        Ok(())
    }

    /// Posts sends, each to the queue pair of that number.
    fn post(&self, numbers: impl Iterator<Item = u64>) -> Result<()> {
        let (sges, flags) = ([self.sge], SendFlags::SIGNALED);
        let mut doorbell = self.engine.doorbell()?;
        for wr_id in numbers {
            let (to, op, payload) = (To::Peer, SendOp::Send, Payload::Sges(&sges));
            let request = SendWr { wr_id, to, op, flags, payload };
            doorbell.post_send(self.qps[wr_id as usize], &request)?;
        }
        Ok(())
    }

    /// Posts another send for each that is complete; whether there were any.
    fn go_around(&self, shared: &Shared) -> Result<bool> {
        let mut found = [Completion::default(); 64];
        let count = self.engine.poll_cq(self.cq, &mut found)?;
        let done = &found[..count];
        let failed = done.iter().find(|completion| completion.status != WcStatus::Success);
        if let Some(failed) = failed {
            // The receiver closes when it is over.
            ensure!(shared.has_stopped(), "a send has failed: {:?}", failed.status);
            return Ok(false);
        }
        self.post(done.iter().map(|completion| completion.wr_id))?;
        Ok(count > 0)
    }

    /// Sends until it is over.
    fn go_on(&self, shared: &Shared) -> Result<()> {
        while !shared.has_stopped() {
            if self.go_around(shared)? {
                continue;
            }
            self.engine.req_notify_cq(self.cq, false)?;
            // What had come before that was asked rings no bell.
            if self.go_around(shared)? {
                continue;
            }
            match self.engine.wait_channel_within(self.channel, Some(SLEEP)) {
                Ok(_) | Err(EngineError::Interrupted | EngineError::WaitOn) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }
}

impl Drop for Streams {
    fn drop(&mut self) {
        for qp in &self.qps {
            // The other end is to hear of it at once.
            let _ = self.engine.tcp_abort(*qp);
        }
    }
}

/// Sends by queue pairs. Twice the room of the receiver is under way, as that of sockets grows, too.
fn queue_pairs_send(stretch: &Stretch, shared: &Shared) -> Result<()> {
    let depth = (2 * stretch.window / MESSAGE as u32).max(DEPTH);
    let streams = Streams::new(stretch.connections, depth)?;
    streams.connect(shared)?;
    let all = 0..u64::from(stretch.connections);
    streams.post(all.flat_map(|number| (0..depth).map(move |_| number)))?;
    streams.go_on(shared)
}
