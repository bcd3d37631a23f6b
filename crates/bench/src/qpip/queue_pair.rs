//! An end that is a queue pair of QPIP, in an engine of its own.

use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use anyhow::{Context, Result, bail, ensure};
use quipu_host::inet::tcp::Mode;
use quipu_host::nic::mem::Segment;
use quipu_host::nic::{
    Access, ChannelId, Completion, CqId, Payload, QpAttr, QpAttrMask, QpCap, QpId, QpInit, QpState,
    QpType, Region, SendFlags, SendOp, SendWr, Sge, TcpChange, TcpSettings, To, WcExtra, WcStatus,
};
use quipu_host::packet::LinkSpec;
use quipu_host::{Config, ContextId, Engine, EngineError, QpipConfig};

use super::model::Figure;
use super::own_process::OwnProcess;
use super::stage::{End, PORT, Shared, exchange_and_pause};
use crate::stats;
use crate::sys::{self, Worker};

/// How a program works with its queues.
#[derive(Clone, Copy)]
struct Manner {
    /// Sends and receives that are under way at once.
    sends: u64,
    receives: u64,
    /// Sends of which one says that it is complete.
    signal_every: u64,
    /// Requests that are posted together.
    together: u64,
    /// Completions of those sends, or of receives, for which it sleeps at least.
    enough: u16,
}

/// Of one that does what is to be done at once.
const PROMPT: Manner = Manner { sends: 32, receives: 64, signal_every: 1, together: 1, enough: 1 };

impl Manner {
    /// Of one that sends, or receives, in bulk and sleeps beside an adapter that does all the work: it looks
    /// after its queue when seven eighths of it are through.
    fn sparing(message: u32, sends: bool) -> Self {
        let long = |octets: u64| (octets / u64::from(message)).clamp(SHORT, 4096);
        if sends {
            let sends = long(TO_SEND);
            let signal_every = sends / 8;
            return Self { sends, receives: SHORT, signal_every, together: 32, enough: 7 };
        }
        let receives = long(TO_RECEIVE);
        let enough = (receives - receives / 8) as u16;
        Self { sends: SHORT, receives, enough, ..PROMPT }
    }
}

/// Octets of its sends, and of its receives, as far as queues may be that long. The receives are what is on
/// its way at most; each is memory of its own, where a program may send what it has again and again.
const TO_SEND: u64 = 128 << 20;
const TO_RECEIVE: u64 = 32 << 20;
/// Requests of the queue that it does not use.
const SHORT: u64 = 64;
/// A sleep that is for many completions ends by then if there is one.
const PERIOD_NS: u64 = 60_000_000;
/// Completions taken by one poll.
const BATCH: usize = 64;
/// In the number of a send.
const IS_SEND: u64 = 1 << 32;
/// The least room for a datagram or what a stream brings.
const ROOM: u32 = 2048;

/// Messages that are sent in a row where calls are measured.
const BURST: usize = 16;

/// The name of an engine's thread.
const ADAPTER: &str = "quipu";

/// What a queue pair is for.
pub(super) struct Purpose {
    pub(super) figure: Figure,
    /// Whether the other end is a queue pair, too.
    pub(super) among_queue_pairs: bool,
    /// Octets of a message.
    pub(super) message: u32,
    /// Whether the program sleeps while it waits, instead of spinning.
    pub(super) sleeps: bool,
}

/// A queue pair and its memory: first what goes out, then a place for each receive.
pub(super) struct QueuePair<'a> {
    engine: Arc<Engine>,
    context: ContextId,
    cq: CqId,
    /// Where the program sleeps; `None` if it spins.
    channel: Option<ChannelId>,
    qp: QpId,
    _memory: Segment,
    region: Region,
    start: u64,
    message: u32,
    room: u32,
    to: To,
    manner: Manner,
    /// Sends that are not complete, of them those behind the last that says so, and not posted yet.
    pending: u64,
    unsignaled: u64,
    unposted: u64,
    /// Octets of each that is not posted.
    len: u32,
    /// Octets that have come and were not asked for yet.
    came: usize,
    ended: bool,
    /// Where polls put completions.
    found: [Completion; BATCH],
    /// Receives that are to be posted again.
    spent: Vec<u64>,
    thread: Option<u32>,
    shared: &'a Shared,
    /// Outlives the engine, which is attached to it.
    process: Option<OwnProcess>,
}

/// Opens an engine on a link.
///
/// # Errors
///
/// There is no such link, or the right to it is missing.
pub(super) fn open(spec: &str, own: IpAddr) -> Result<Arc<Engine>> {
    let link: LinkSpec = spec.parse().context("a link")?;
    let qpip = QpipConfig { addresses: vec![(own, 24)], ..QpipConfig::new(link) };
    let address = Some(std::net::Ipv4Addr::LOCALHOST.into());
    let config = Config { address, counters: false, qpip: Some(qpip), ..Config::default() };
    Engine::open(config).context("opening the engine")
}

impl<'a> QueuePair<'a> {
    /// Connects to the other end, or waits for it to connect.
    pub(super) fn new(
        purpose: &Purpose,
        spec: &str,
        own: SocketAddr,
        peer: Option<SocketAddr>,
        shared: &'a Shared,
    ) -> Result<Self> {
        let before = adapters()?;
        let engine = open(spec, own.ip())?;
        let thread = adapters()?.difference(&before).next().copied();
        let (context, _) = engine.open_context()?;
        engine.tcp_events(context)?;
        let pd = engine.alloc_pd()?;
        let channel = purpose.sleeps.then(|| engine.create_channel()).transpose()?;
        let channel = channel.map(|(channel, _)| channel);
        let udp = purpose.figure == Figure::RoundTripUdp;
        let sparing = purpose.sleeps && purpose.figure.is_stream();
        let manner =
            if sparing { Manner::sparing(purpose.message, peer.is_some()) } else { PROMPT };
        let Manner { sends, receives, .. } = manner;
        let (cq, _) = engine.create_cq(context, 2 * (sends + receives) as u32, channel, 0)?;
        if manner.enough > 1 {
            engine.moderate_cq(cq, manner.enough, PERIOD_NS)?;
        }
        let message = purpose.message;
        let room = message.max(ROOM);
        let bytes = u64::from(message) + receives * u64::from(room);
        let memory = engine.allocate(bytes as usize)?;
        // Programs that measure have touched their memory before.
        memory.zero()?;
        let region = engine.reg_segment(pd, &memory, None, Access::LOCAL_WRITE)?;
        let qp_type = if udp { QpType::Udp } else { QpType::Tcp };
        let cap = QpCap {
            max_send_wr: sends as u32,
            max_recv_wr: receives as u32,
            max_send_sge: 1,
            max_recv_sge: 1,
            max_inline_data: 0,
        };
        let init =
            QpInit { pd, send_cq: cq, recv_cq: cq, srq: None, cap, qp_type, sq_sig_all: false };
        let (qp, _, _) = engine.create_qp(context, &init).context("creating a queue pair")?;
        let attr = QpAttr { state: QpState::Init, port_num: 1, ..QpAttr::default() };
        engine.modify_qp(
            qp,
            &attr,
            QpAttrMask::STATE | QpAttrMask::PKEY_INDEX | QpAttrMask::PORT,
        )?;
        let start = memory.addr() as u64;
        let mut this = Self {
            engine,
            context,
            cq,
            channel,
            qp,
            _memory: memory,
            region,
            start,
            message,
            room,
            to: peer.filter(|_| udp).map_or(To::Peer, To::Address),
            manner,
            pending: 0,
            unsignaled: 0,
            unposted: 0,
            len: 0,
            came: 0,
            ended: false,
            found: [Completion::default(); BATCH],
            spent: (0..receives).collect(),
            thread,
            shared,
            process: None,
        };
        this.make_room()?;
        if channel.is_some() {
            let engine = Arc::downgrade(&this.engine);
            shared.wake_by(move || {
                let attr = QpAttr { state: QpState::Err, ..QpAttr::default() };
                // Where it has ended there is nobody to be woken.
                let _ = engine.upgrade().map(|it| it.modify_qp(qp, &attr, QpAttrMask::STATE));
            })?;
        }
        if udp {
            this.engine.udp_bind(qp, if peer.is_some() { 0 } else { PORT })?;
            shared.second_is_ready(peer.is_none());
            return Ok(this);
        }
        let mode = if purpose.among_queue_pairs { Mode::Message } else { Mode::Stream };
        this.join(peer, &TcpSettings { mode, ..TcpSettings::default() })?;
        Ok(this)
    }

    /// The same, with the process of the adapter that it is attached to.
    pub(super) fn of_process(mut self, process: OwnProcess) -> Self {
        self.process = Some(process);
        self
    }

    fn join(&mut self, peer: Option<SocketAddr>, settings: &TcpSettings) -> Result<()> {
        match peer {
            Some(peer) => self.engine.tcp_connect(self.qp, peer, None, settings)?,
            None => {
                let (listener, _) = self.engine.tcp_listen(PORT, settings, 1)?;
                self.engine.tcp_offer(listener, self.qp)?;
                self.shared.second_is_ready(true);
            }
        }
        let shared = self.shared;
        shared.until("a connection", || {
            // The first octets may be here before it is told of.
            self.turn()?;
            match self.engine.take_tcp_event(self.context)?.map(|event| event.change) {
                None => Ok(None),
                Some(TcpChange::Connected) => Ok(Some(())),
                Some(other) => bail!("not connected: {other:?}"),
            }
        })
    }

    fn room_at(&self, place: u64) -> Sge {
        let addr = self.start + u64::from(self.message) + place * u64::from(self.room);
        Sge { addr, len: self.room, lkey: self.region.key }
    }

    /// Posts all receives again that have brought something.
    #[inline]
    fn make_room(&mut self) -> Result<()> {
        if self.spent.is_empty() {
            return Ok(());
        }
        let mut doorbell = self.engine.doorbell()?;
        for &place in &self.spent {
            doorbell.post_recv(self.qp, place, &[self.room_at(place)])?;
        }
        drop(doorbell);
        self.spent.clear();
        Ok(())
    }

    /// Posts the sends that wait to be posted together.
    #[inline]
    fn post_sends(&mut self) -> Result<()> {
        let sges = [Sge { addr: self.start, len: self.len, lkey: self.region.key }];
        let (qp, to, payload) = (self.qp, self.to, Payload::Sges(&sges));
        let mut doorbell = self.engine.doorbell()?;
        while self.unposted > 0 {
            self.unposted -= 1;
            self.unsignaled += 1;
            let wr_id = IS_SEND + self.unsignaled;
            let mut flags = SendFlags::empty();
            if self.unsignaled == self.manner.signal_every {
                (flags, self.unsignaled) = (SendFlags::SIGNALED, 0);
            }
            doorbell.post_send(qp, &SendWr { wr_id, to, op: SendOp::Send, flags, payload })?;
        }
        Ok(())
    }

    /// Waits for completions, or until the connection has ended.
    #[inline]
    fn wait(&mut self) -> Result<()> {
        let shared = self.shared;
        let Some(channel) = self.channel else {
            return shared.until("a completion", || Ok(self.turn()?.then_some(())));
        };
        while !self.turn()? {
            self.engine.req_notify_cq(self.cq, false)?;
            // What had come before that was asked rings no bell.
            if self.turn()? {
                break;
            }
            match self.engine.wait_channel(channel) {
                Ok(_) | Err(EngineError::Interrupted) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }

    /// Takes completions; whether there were any, or the connection has ended.
    #[inline]
    fn turn(&mut self) -> Result<bool> {
        // A program answers first, and makes room then.
        self.make_room()?;
        Ok(self.poll()? > 0 || self.ended)
    }

    /// Takes completions; how many.
    #[inline]
    fn poll(&mut self) -> Result<usize> {
        let found = self.engine.poll_cq(self.cq, &mut self.found)?;
        for index in 0..found {
            self.completed(index)?;
        }
        Ok(found)
    }

    #[inline]
    fn completed(&mut self, index: usize) -> Result<()> {
        let completion = &self.found[index];
        if completion.status != WcStatus::Success {
            let fine = self.shared.has_stopped();
            ensure!(fine, "a request has failed: {:?}", completion.status);
            self.ended = true;
        } else if completion.wr_id & IS_SEND != 0 {
            self.pending -= completion.wr_id - IS_SEND;
        } else if completion.byte_len == 0 {
            self.ended = true;
        } else {
            self.came += completion.byte_len as usize;
            if let WcExtra::From(from) = completion.extra {
                self.to = To::Address(from.into());
            }
            self.spent.push(completion.wr_id);
        }
        Ok(())
    }
}

/// Does something; the cycles that it took, and what came of it.
#[inline]
fn timed<T>(act: impl FnOnce() -> Result<T>) -> Result<(f64, T)> {
    let start = sys::cycles();
    let done = act()?;
    Ok((sys::cycles().saturating_sub(start) as f64, done))
}

/// Threads of engines in this process.
fn adapters() -> Result<BTreeSet<u32>> {
    let mut all = BTreeSet::new();
    for task in std::fs::read_dir("/proc/self/task")? {
        let task = task?;
        // A thread may end meanwhile.
        let name = std::fs::read_to_string(task.path().join("comm")).unwrap_or_default();
        let number = task.file_name().to_str().and_then(|text| text.parse::<u32>().ok());
        all.extend(number.filter(|_| name.trim() == ADAPTER));
    }
    Ok(all)
}

impl End for QueuePair<'_> {
    fn workers(&self) -> [Option<Worker>; 2] {
        let thread = self.thread.map(Worker::Thread);
        match &self.process {
            None => [None, thread],
            Some(process) => [thread, Some(process.worker())],
        }
    }

    fn exchange(&mut self) -> Result<u64> {
        if self.process.is_none() {
            return exchange_and_pause(self);
        }
        (self.len, self.pending, self.unposted) = (1, BURST as u64, BURST as u64);
        let (posts, ()) = timed(|| self.post_sends())?;
        let (shared, mut rooms) = (self.shared, 0.0);
        let mut polls = Vec::with_capacity(2 * BURST);
        // Answers may come before word of what was sent.
        while self.pending > 0 || self.came < BURST {
            let (cycles, found) = shared.until("an answer", || {
                let (cycles, found) = timed(|| self.poll())?;
                Ok((found > 0).then_some((cycles, found)))
            })?;
            polls.extend(std::iter::repeat_n(cycles / found as f64, found));
            ensure!(!self.ended, "the connection has ended");
            rooms += timed(|| self.make_room())?.0;
        }
        ensure!(std::mem::take(&mut self.came) == BURST, "another answer than the octets");
        Ok(((posts + rooms) / BURST as f64 + 2.0 * stats::median(&polls)) as u64)
    }

    fn send(&mut self, len: usize) -> Result<()> {
        while self.pending == self.manner.sends {
            self.wait()?;
            ensure!(!self.ended, "the connection has ended");
        }
        self.len = u32::try_from(len)?.min(self.message);
        (self.pending, self.unposted) = (self.pending + 1, self.unposted + 1);
        if self.unposted == self.manner.together { self.post_sends() } else { Ok(()) }
    }

    fn receive(&mut self) -> Result<usize> {
        while self.came == 0 && !self.ended {
            self.wait()?;
        }
        Ok(std::mem::take(&mut self.came))
    }
}

impl Drop for QueuePair<'_> {
    fn drop(&mut self) {
        // The other end is to hear of it at once.
        let _ = self.engine.tcp_abort(self.qp);
    }
}
