//! Programs that lie, and programs that must not notice.

mod arrivals;
mod guests;
mod hostile;
mod order;
mod sleeps;
mod together;

use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use quipu_mem::ring::{Channel, RingError};
use quipu_mem::{Access, Segment};
use quipu_nic::{
    AsyncEvent, Completion, CqId, Payload, PdId, QpAttr, QpAttrMask, QpCap, QpId, QpInit, QpState,
    QpType, Region, SendFlags, SendOp, SendWr, Sge, TcpSettings, To, WcStatus,
};

use super::calls::Calls;
use super::folders::own_place;
use super::guests::Guests;
use super::slots::{self, News, Request, Tag};
use super::words::Call;
use super::{RINGS, Sharer};
use crate::{Config, Engine, EngineError, QpipConfig};

/// Longer than anything here takes.
const PATIENCE: Duration = Duration::from_secs(20);
static NAMES: AtomicU32 = AtomicU32::new(0);

fn engine(link: &str) -> Arc<Engine> {
    let qpip = Some(QpipConfig::new(link.parse().unwrap()));
    let address = Some([127, 0, 0, 1].into());
    let config =
        Config { address, counters: false, qpip, arena_bytes: 1 << 22, ..Config::default() };
    Engine::open(config).unwrap()
}

/// A shared adapter.
struct Shared {
    name: String,
    address: SocketAddr,
    engine: Arc<Engine>,
    sharer: Option<Sharer>,
}

impl Shared {
    fn new() -> Self {
        Self::with(&Guests::default())
    }

    fn with(guests: &Guests) -> Self {
        let number = NAMES.fetch_add(1, Ordering::Relaxed);
        let name = format!("test-{}-{number}", std::process::id());
        let engine = engine("udp:127.0.0.1:0");
        let address = SocketAddr::new(engine.qpip_info().unwrap().addresses[0], 7);
        let sharer = Some(Sharer::start(&engine, &name, guests).unwrap());
        Self { name, address, engine, sharer }
    }

    fn attach(&self) -> Program {
        Program::new(&engine(&format!("share:{}", self.name)))
    }

    /// The bare rings and socket of a program that keeps to no rule.
    fn raw(&self) -> (Calls, Segment, OwnedFd) {
        let link = format!("share:{}", self.name).parse().unwrap();
        let welcome = Calls::attach(&link, 1 << 20).unwrap();
        (welcome.calls, welcome.memory, welcome.bell)
    }
}

/// A program with a UDP queue pair and some memory.
struct Program {
    engine: Arc<Engine>,
    cq: CqId,
    pd: PdId,
    qp: QpId,
    port: u16,
    memory: Segment,
    region: Region,
}

const CAP: QpCap =
    QpCap { max_send_wr: 8, max_recv_wr: 8, max_send_sge: 2, max_recv_sge: 2, max_inline_data: 64 };

impl Program {
    fn new(engine: &Arc<Engine>) -> Self {
        let (context, _) = engine.open_context().unwrap();
        let (cq, _) = engine.create_cq(context, 64, None, 0).unwrap();
        let pd = engine.alloc_pd().unwrap();
        let memory = engine.allocate(4096).unwrap();
        let region = engine.reg_segment(pd, &memory, None, Access::LOCAL_WRITE).unwrap();
        let (send_cq, recv_cq, qp_type) = (cq, cq, QpType::Udp);
        let init = QpInit { pd, send_cq, recv_cq, srq: None, cap: CAP, qp_type, sq_sig_all: false };
        let (qp, _, _) = engine.create_qp(context, &init).unwrap();
        let attr = QpAttr { state: QpState::Init, port_num: 1, ..QpAttr::default() };
        let mask = QpAttrMask::STATE | QpAttrMask::PKEY_INDEX | QpAttrMask::PORT;
        engine.modify_qp(qp, &attr, mask).unwrap();
        let port = engine.udp_bind(qp, 0).unwrap();
        Self { engine: Arc::clone(engine), cq, pd, qp, port, memory, region }
    }

    fn sge(&self, len: u32) -> Sge {
        Sge { addr: self.memory.addr() as u64, len, lkey: self.region.key }
    }

    fn send(&self, to: SocketAddr, payload: Payload<'_>) -> Result<(), EngineError> {
        let flags = SendFlags::SIGNALED;
        let wr = SendWr { wr_id: 1, to: To::Address(to), op: SendOp::Send, flags, payload };
        self.engine.post_send(self.qp, &wr)
    }

    fn next(&self) -> Completion {
        let (mut out, begun) = ([Completion::default()], Instant::now());
        while self.engine.poll_cq(self.cq, &mut out).unwrap() == 0 {
            assert!(begun.elapsed() < PATIENCE, "nothing completes");
        }
        out[0]
    }

    /// Sends a datagram to another program of another adapter, which receives it.
    fn talks_to(&self, other: &Self, address: SocketAddr) {
        other.engine.post_recv(other.qp, 7, &[other.sge(4096)]).unwrap();
        // A call is looked at behind what was posted before it: a datagram that came sooner would be lost.
        other.engine.tcp_flow(other.qp).unwrap();
        let to = SocketAddr::new(address.ip(), other.port);
        self.send(to, Payload::Inline(b"alive")).unwrap();
        assert_eq!((self.next().wr_id, other.next().byte_len), (1, 5));
        let mut got = [0; 5];
        other.memory.read(0, &mut got).unwrap();
        assert_eq!(&got, b"alive");
    }
}

#[test]
fn a_link_that_moves_is_work_though_nothing_completes() {
    let ends = [0, 1].map(|_| Program::new(&engine("udp:127.0.0.1:0")));
    let [here, there] = &ends;
    // Nobody has a queue pair there.
    let to = SocketAddr::new(there.engine.qpip_info().unwrap().addresses[0], 7);
    let begun = Instant::now();
    loop {
        here.send(to, Payload::Inline(b"x")).unwrap();
        here.next();
        let polls = (0..1000).map(|_| there.engine.poll_cq_and_move(there.cq, 8, |_| ()).unwrap());
        if polls.into_iter().any(|polled| polled == (0, true)) {
            break;
        }
        assert!(begun.elapsed() < PATIENCE, "nobody hears of what has come");
    }
    // When all is quiet there is none.
    let quiet = || there.engine.poll_cq_and_move(there.cq, 8, |_| ()).unwrap() == (0, false);
    while !quiet() {
        assert!(begun.elapsed() < PATIENCE);
    }
}

struct Numbers(u64);

impl Numbers {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    /// Often small, now and then anything.
    fn odd(&mut self) -> u64 {
        match self.next() % 4 {
            0 => self.next(),
            1 => u64::MAX >> (self.next() % 64),
            _ => self.next() % 8,
        }
    }
}

/// A program without manners, with a domain, and what it does with its bare rings.
struct Bare {
    calls: Calls,
    channel: Channel,
    bell: OwnedFd,
    pd: u64,
}

impl Bare {
    fn new(shared: &Shared) -> Self {
        let (calls, memory, bell) = shared.raw();
        let channel = Channel::attach(&memory, 0, RINGS).unwrap();
        let mut bare = Self { calls, channel, bell, pd: 0 };
        bare.pd = bare.ask(&Call::AllocPd).unwrap();
        bare
    }

    /// A call, and the first word of its answer.
    fn ask(&self, call: &Call) -> Result<u64, EngineError> {
        self.calls.ask(call, &|| true, |answer| Some(answer.word().unwrap_or(0)))
    }

    /// A queue pair with UDP, and its port.
    fn udp(&self, cap: QpCap) -> (u64, u16) {
        let qp = self.ask(&Call::CreateQp { pd: self.pd, udp: true, cap }).unwrap();
        self.ask(&Call::ModifyQp { qp, state: QpState::Init as u8 }).unwrap();
        (qp, self.ask(&Call::Bind { qp, port: 0 }).unwrap() as u16)
    }

    fn post(&mut self, tag: Tag, to: Option<SocketAddr>, sges: &[Sge]) {
        let (payload, begun) = (Payload::Sges(sges), Instant::now());
        let request = Request { tag, flags: SendFlags::SIGNALED, to, payload };
        let out = &mut self.channel.outgoing;
        while let Err(error) = slots::post(&mut out.requests, &mut out.request_bytes, &request) {
            assert!(error == RingError::Full && begun.elapsed() < PATIENCE, "{error}");
            super::ring(&self.bell);
        }
        out.requests.show();
        super::ring(&self.bell);
    }
}

/// A program has its ring of news full, and goes on calling.
#[test]
fn calls_wait_for_room_and_for_what_was_posted_before_them() {
    let (shared, elsewhere) = (Shared::new(), Shared::new());
    let (peer, mut bare) = (elsewhere.attach(), Bare::new(&shared));
    let register = Call::Register {
        pd: bare.pd,
        offset: 0,
        len: 64,
        iova: 0,
        access: Access::LOCAL_WRITE.bits(),
    };
    let (region, key) = bare
        .calls
        .ask(&register, &|| true, |answer| Some((answer.word()?, answer.short()?)))
        .unwrap();
    let (sender, _) = bare.udp(CAP);
    let flood = 2 * RINGS.request_slots;
    let (qp, _) = bare.udp(QpCap { max_recv_wr: flood, ..CAP });
    for sequence in 0..flood {
        bare.post(Tag { qp: qp as u32, receive: true, sequence }, None, &[]);
    }
    // More completions than the ring has room for.
    bare.ask(&Call::ModifyQp { qp, state: QpState::Err as u8 }).unwrap();
    let tag = Tag { qp: sender as u32, receive: false, sequence: 0 };
    let to = SocketAddr::new(elsewhere.address.ip(), peer.port);
    bare.post(tag, Some(to), &[Sge { addr: 0, len: 64, lkey: quipu_nic::Key(key) }]);
    let (glances, heard) = (std::cell::Cell::new(0), std::cell::RefCell::new(Vec::new()));
    let news = std::cell::RefCell::new(&mut bare.channel.incoming);
    let hear = || {
        let mut incoming = news.borrow_mut();
        while let Some(news) = slots::hear(&mut incoming.requests).unwrap() {
            heard.borrow_mut().push(news);
        }
        incoming.publish();
    };
    let glance = || {
        glances.set(glances.get() + 1);
        if glances.get() > 5 {
            hear();
        }
        true
    };
    bare.calls.ask(&Call::Deregister { region }, &glance, |_| Some(())).unwrap();
    assert!(
        glances.get() > 5,
        "the call was carried out while nothing of the program could be begun"
    );
    let begun = Instant::now();
    let is_sent = |news: &News| {
        matches!(news, News::Sent { last, .. } if *last == tag)
            || matches!(news, News::Completion(done) if done.wr_id == tag.bits())
    };
    while !heard.borrow().iter().any(is_sent) {
        assert!(begun.elapsed() < PATIENCE, "nothing completes");
        hear();
    }
    let heard = heard.into_inner();
    assert_eq!(heard.len(), flood as usize + 1);
    let sent = heard.into_iter().find(is_sent);
    let success = Some(News::Sent { last: tag, count: 1 });
    assert_eq!(sent, success, "the region went before the request that uses it");
}

/// One program takes what it gets of everything there is a limited number of.
#[test]
fn a_greedy_program_leaves_enough_for_the_others() {
    let (shared, elsewhere) = (Shared::new(), Shared::new());
    let (greedy, peer) = (Bare::new(&shared), elsewhere.attach());
    let cap = QpCap { max_send_wr: 1, max_recv_wr: 1, ..QpCap::default() };
    let settings = TcpSettings::default();
    let taken = |call: &Call| {
        let begun = Instant::now();
        let count = (0..1000).take_while(|_| greedy.ask(call).is_ok()).count();
        assert!(begun.elapsed() < PATIENCE);
        count
    };
    // Its domain is one.
    assert_eq!(taken(&Call::AllocPd) + 1, 512);
    assert_eq!(taken(&Call::Listen { port: 0, backlog: u32::MAX, settings }), 128);
    assert_eq!(taken(&Call::CreateQp { pd: greedy.pd, udp: true, cap }), 128);
    let other = shared.attach();
    other.talks_to(&peer, elsewhere.address);
    let (listener, port) = other.engine.tcp_listen(0, &settings, 4).unwrap();
    assert!(port > 0 && other.engine.tcp_unlisten(listener).is_ok());
}

#[test]
fn with_an_answer_there_is_room_for_a_whole_ring() {
    let shared = Shared::new();
    let mut bare = Bare::new(&shared);
    let laps = 8 * RINGS.request_slots;
    let (qp, _) = bare.udp(QpCap { max_recv_wr: laps, ..CAP });
    for sequence in 0..laps {
        if sequence.is_multiple_of(RINGS.request_slots) {
            bare.ask(&Call::Flow { qp }).unwrap();
        }
        let tag = Tag { qp: qp as u32, receive: true, sequence };
        let (flags, payload) = (SendFlags::empty(), Payload::Sges(&[]));
        let out = &mut bare.channel.outgoing;
        let request = Request { tag, flags, to: None, payload };
        slots::post(&mut out.requests, &mut out.request_bytes, &request).unwrap();
        out.requests.show();
    }
}

#[test]
fn what_can_be_seen_at_once_is_refused_at_once_and_harms_nothing() {
    let (shared, elsewhere) = (Shared::new(), Shared::new());
    let (program, peer) = (shared.attach(), elsewhere.attach());
    let nowhere = SocketAddr::new(elsewhere.address.ip(), 0);
    let fault = program.send(nowhere, Payload::Inline(b"x")).unwrap_err();
    assert!(matches!(fault, EngineError::Fault(quipu_nic::Fault::Invalid(_))), "{fault}");
    let to = SocketAddr::new(elsewhere.address.ip(), peer.port);
    let long = [program.sge(65_000), program.sge(600)];
    let fault = program.send(to, Payload::Sges(&long)).unwrap_err();
    assert!(matches!(fault, EngineError::Fault(quipu_nic::Fault::Invalid(_))), "{fault}");
    program.talks_to(&peer, elsewhere.address);
    let fault = program.send(to, Payload::Inline(&[0; 65])).unwrap_err();
    assert!(matches!(fault, EngineError::Fault(quipu_nic::Fault::Invalid(_))), "{fault}");
    let sge = peer.sge(8);
    for _ in 0..8 {
        peer.engine.post_recv(peer.qp, 1, &[sge]).unwrap();
    }
    let fault = peer.engine.post_recv(peer.qp, 1, &[sge]).unwrap_err();
    assert!(matches!(fault, EngineError::Fault(quipu_nic::Fault::QueueFull)), "{fault}");
}

/// As in an engine of one's own: programs may post as long as there is room.
#[test]
fn a_request_keeps_its_place_until_its_completion_was_taken() {
    let (shared, elsewhere) = (Shared::new(), Shared::new());
    let (program, peer) = (shared.attach(), elsewhere.attach());
    (0..8).for_each(|_| peer.engine.post_recv(peer.qp, 7, &[peer.sge(8)]).unwrap());
    peer.engine.tcp_flow(peer.qp).unwrap();
    let to = SocketAddr::new(elsewhere.address.ip(), peer.port);
    let send = || program.send(to, Payload::Inline(b"x"));
    let receive = || peer.engine.post_recv(peer.qp, 7, &[peer.sge(8)]);
    (0..8).for_each(|_| send().unwrap());
    let full = |it| matches!(it, Err(EngineError::Fault(quipu_nic::Fault::QueueFull)));
    // While they complete, and when they have, which the programs' ends know.
    for _ in 0..20 {
        assert!(full(send()) && full(receive()));
        program.engine.tcp_flow(program.qp).unwrap();
        peer.engine.tcp_flow(peer.qp).unwrap();
        std::thread::sleep(Duration::from_millis(1));
    }
    assert_eq!([program.next(), peer.next()].map(|done| done.status), [WcStatus::Success; 2]);
    assert!(send().is_ok() && full(send()) && receive().is_ok() && full(receive()));
}

impl Program {
    fn next_flush(&self) -> Option<Completion> {
        let mut out = [Completion::default()];
        (self.engine.poll_cq(self.cq, &mut out).unwrap() > 0).then_some(out[0])
    }
}

#[test]
fn when_the_adapter_is_gone_everything_is_flushed_and_says_so() {
    let mut shared = Shared::new();
    let program = shared.attach();
    for wr_id in [5, 6] {
        program.engine.post_recv(program.qp, wr_id, &[program.sge(64)]).unwrap();
    }
    drop(shared.sharer.take());
    for wr_id in [5, 6] {
        let done = program.next();
        assert_eq!((done.wr_id, done.status), (wr_id, WcStatus::WrFlushErr));
    }
    let gone = program.engine.post_recv(program.qp, 7, &[]).unwrap_err();
    assert!(matches!(gone, EngineError::AdapterLost), "{gone}");
    assert!(matches!(program.engine.alloc_pd(), Err(EngineError::AdapterLost)));
    assert!(program.engine.destroy_qp(program.qp).is_ok());
    assert!(program.engine.dereg_mr(program.region.id).is_ok());
    assert!(program.engine.dealloc_pd(program.pd).is_ok());
    assert!(program.engine.destroy_cq(program.cq).is_ok());
    // Nobody is there for others, and the name is free.
    let config = Config {
        address: Some([127, 0, 0, 1].into()),
        qpip: Some(QpipConfig::new(format!("share:{}", shared.name).parse().unwrap())),
        ..Config::default()
    };
    let error = Engine::open(config).err().unwrap().to_string();
    assert!(error.contains("quipu nic --share"), "{error}");
    let start = || Sharer::start(&engine("udp:127.0.0.1:0"), &shared.name, &Guests::default());
    let again = start().unwrap();
    let taken = start().err().unwrap();
    assert!(taken.to_string().contains("another process"), "{taken}");
    drop(again);
    assert!(!own_place(&shared.name, false).unwrap().exists());
}

/// As in an engine of one's own: what a queue pair had goes with it, and when it is reset.
#[test]
fn a_queue_pair_that_is_reset_or_destroyed_leaves_nothing_behind() {
    let (shared, elsewhere) = (Shared::new(), Shared::new());
    let (program, peer) = (shared.attach(), elsewhere.attach());
    let engine = &program.engine;
    let change = |state| {
        let attr = QpAttr { state, port_num: 1, ..QpAttr::default() };
        let more = QpAttrMask::PKEY_INDEX | QpAttrMask::PORT;
        let mask =
            if state == QpState::Init { QpAttrMask::STATE | more } else { QpAttrMask::STATE };
        engine.modify_qp(program.qp, &attr, mask).unwrap();
    };
    let fill = || (0..8).all(|_| engine.post_recv(program.qp, 9, &[program.sge(64)]).is_ok());
    assert!(fill());
    change(QpState::Reset);
    change(QpState::Init);
    assert!(fill(), "its queue is empty");
    change(QpState::Err);
    assert_eq!(program.next().status, WcStatus::WrFlushErr);
    change(QpState::Reset);
    assert_eq!(program.next_flush(), None);
    change(QpState::Init);
    let port = engine.udp_bind(program.qp, 0).unwrap();
    let program = Program { port, ..program };
    peer.talks_to(&program, shared.address);
    let engine = &program.engine;
    assert!((0..8).all(|_| engine.post_recv(program.qp, 9, &[program.sge(64)]).is_ok()));
    let attr = QpAttr { state: QpState::Err, ..QpAttr::default() };
    engine.modify_qp(program.qp, &attr, QpAttrMask::STATE).unwrap();
    assert_eq!(program.next().status, WcStatus::WrFlushErr);
    engine.destroy_qp(program.qp).unwrap();
    assert_eq!(program.next_flush(), None);
}

#[test]
fn completion_queues_overrun_as_others_do() {
    let (shared, elsewhere) = (Shared::new(), Shared::new());
    let peer = elsewhere.attach();
    let program = shared.attach();
    let (context, _) = program.engine.open_context().unwrap();
    let (cq, size) = program.engine.create_cq(context, 2, None, 0).unwrap();
    let (send_cq, recv_cq, pd) = (cq, cq, program.pd);
    let init = QpInit {
        pd,
        send_cq,
        recv_cq,
        srq: None,
        cap: QpCap { max_send_wr: 2 * size, ..CAP },
        qp_type: QpType::Udp,
        sq_sig_all: true,
    };
    let (qp, _, _) = program.engine.create_qp(context, &init).unwrap();
    let attr = QpAttr { state: QpState::Init, port_num: 1, ..QpAttr::default() };
    let mask = QpAttrMask::STATE | QpAttrMask::PKEY_INDEX | QpAttrMask::PORT;
    program.engine.modify_qp(qp, &attr, mask).unwrap();
    program.engine.udp_bind(qp, 0).unwrap();
    assert!(program.engine.destroy_cq(cq).is_err(), "it is in use");
    let to = To::Address(SocketAddr::new(elsewhere.address.ip(), peer.port));
    let wr = SendWr {
        wr_id: 3,
        to,
        op: SendOp::Send,
        flags: SendFlags::empty(),
        payload: Payload::Inline(b"x"),
    };
    for _ in 0..=size {
        program.engine.post_send(qp, &wr).unwrap();
    }
    // When the one too many has come, what was not lost is taken first.
    let event = program.engine.wait_async_within(context, Some(PATIENCE)).unwrap();
    assert_eq!(event, AsyncEvent::CqErr(cq));
    let mut out = [Completion::default()];
    for _ in 0..size {
        assert_eq!(program.engine.poll_cq(cq, &mut out).unwrap(), 1);
    }
    let overrun = program.engine.poll_cq(cq, &mut out).unwrap_err();
    assert!(matches!(overrun, EngineError::Fault(quipu_nic::Fault::Overrun)), "{overrun}");
    program.engine.destroy_qp(qp).unwrap();
    program.engine.destroy_cq(cq).unwrap();
}

/// Processor time that the thread of a shared adapter has used.
fn cpu_time(shared: &Shared) -> Duration {
    let thread = shared.sharer.as_ref().unwrap().thread();
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    let mut clock = 0;
    // SAFETY: the thread runs as long as the sharer is there; the calls write a number and a time.
    unsafe {
        assert_eq!(libc::pthread_getcpuclockid(thread, &raw mut clock), 0);
        assert_eq!(libc::clock_gettime(clock, &raw mut time), 0);
    }
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

#[test]
fn a_program_that_has_stopped_costs_the_adapter_nothing_and_may_go_on() {
    const SENDS: u32 = 6000;
    let shared = Shared::new();
    let (calls, memory, bell) = shared.raw();
    let mut rings = Channel::attach(&memory, 0, RINGS).unwrap();
    let ask = |call: &Call| calls.ask(call, &|| true, |answer| Some(answer.word().unwrap_or(0)));
    let pd = ask(&Call::AllocPd).unwrap();
    let cap = QpCap { max_send_wr: 8192, ..CAP };
    let qp = ask(&Call::CreateQp { pd, udp: true, cap }).unwrap();
    ask(&Call::ModifyQp { qp, state: QpState::Init as u8 }).unwrap();
    ask(&Call::Bind { qp, port: 0 }).unwrap();
    // More completions than its ring holds, of which it takes none: each has failed, and a slot of its own.
    ask(&Call::ModifyQp { qp, state: QpState::Err as u8 }).unwrap();
    let (flags, to) = (SendFlags::SIGNALED | SendFlags::INLINE, Some(shared.address));
    let begun = Instant::now();
    for sequence in 0..SENDS {
        let tag = Tag { qp: qp as u32, receive: false, sequence };
        let payload = Payload::Inline(b"x");
        let request = Request { tag, flags, to, payload };
        let out = &mut rings.outgoing;
        while slots::post(&mut out.requests, &mut out.request_bytes, &request).is_err() {
            // The adapter has begun all that there is room for.
            assert!(begun.elapsed() < PATIENCE, "the adapter takes no requests");
            std::thread::yield_now();
        }
        out.requests.show();
        if rings.outgoing.control.must_ring() {
            super::ring(&bell);
        }
    }
    // Soon it has begun what there is room for, and is quiet.
    let begun = Instant::now();
    loop {
        let before = cpu_time(&shared);
        std::thread::sleep(Duration::from_millis(500));
        let spent = cpu_time(&shared) - before;
        if spent < Duration::from_millis(10) {
            break;
        }
        assert!(begun.elapsed() < PATIENCE, "it takes {spent:?} of half a second");
    }
    // It goes on: everything comes, and at once.
    let (mut told, begun) = (0, Instant::now());
    while told < SENDS {
        assert!(begun.elapsed() < PATIENCE, "{told} have come");
        if let Some(news) = slots::hear(&mut rings.incoming.requests).unwrap() {
            told += news.count();
        } else {
            rings.incoming.publish();
            if rings.outgoing.control.must_ring() {
                super::ring(&bell);
            }
            std::thread::yield_now();
        }
    }
}
