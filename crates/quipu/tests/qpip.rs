//! Queue pairs over the adapter's own TCP and UDP, between two adapters on UDP links, which need no right: of
//! the program's own engine, and of one that another process could share.

use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use quipu::qpip::{
    Adapter, Failure, Mode, QpipConfig, Sharer, TcpChange, TcpListener, TcpQueuePair, TcpSettings,
};
use quipu::{
    Access, Completion, CompletionQueue, Config, Device, Error, MemoryRegion, Request, WcExtra,
    WcStatus,
};

const SIZE: usize = 1 << 16;
/// What takes as long has failed.
const LONG: Duration = Duration::from_secs(20);

/// Where the adapter of a test is.
#[derive(Clone, Copy)]
enum Where {
    /// In the engine that the test calls.
    Here,
    /// In another, which shares it.
    Shared,
}

/// An adapter with one completion queue and memory.
struct End {
    adapter: Adapter,
    cq: CompletionQueue,
    memory: MemoryRegion,
    _sharer: Option<Sharer>,
}

static NAMES: AtomicU32 = AtomicU32::new(0);

fn config(link: &str) -> Config {
    Config {
        address: Some([127, 0, 0, 1].into()),
        counters: false,
        qpip: Some(QpipConfig::new(link.parse().unwrap())),
        ..Config::default()
    }
}

fn open(link: &str) -> Adapter {
    Adapter::open_with(config(link)).unwrap()
}

impl End {
    fn new(place: Where) -> Self {
        let mut adapter = open("udp:127.0.0.1:0");
        let mut sharer = None;
        if let Where::Shared = place {
            let number = NAMES.fetch_add(1, Ordering::Relaxed);
            let name = format!("api-{}-{number}", std::process::id());
            sharer = Some(adapter.share(&name).unwrap());
            adapter = open(&format!("share:{name}"));
        }
        let cq = adapter.completion_queue(64).unwrap();
        let memory = adapter.protection_domain().unwrap();
        let memory = memory.register(4 * SIZE, Access::LOCAL_WRITE).unwrap();
        Self { adapter, cq, memory, _sharer: sharer }
    }

    fn address(&self) -> IpAddr {
        self.adapter.info().unwrap().addresses[0]
    }

    fn tcp(&self) -> TcpQueuePair {
        let queues = self.memory.domain().queue_pair(&self.cq, &self.cq);
        queues.build_tcp().unwrap()
    }

    /// Posts a receive of so many bytes of the first half of memory.
    fn receive(&self, qp: &TcpQueuePair, wr_id: u64, at: usize, len: usize) {
        qp.post_recv(wr_id, &[self.memory.sge(at, len).unwrap()]).unwrap();
    }

    fn send(&self, qp: &TcpQueuePair, wr_id: u64, bytes: &[u8]) {
        self.memory.write(2 * SIZE, bytes).unwrap();
        let memory = [self.memory.sge(2 * SIZE, bytes.len()).unwrap()];
        qp.post_send(&Request::send(&memory).id(wr_id)).unwrap();
    }

    fn next(&self) -> Completion {
        self.cq.next().unwrap()
    }
}

/// A client and a server whose connection stands, each with a receive 1 of `SIZE` bytes posted.
fn connected(place: Where, mode: Mode) -> (End, TcpQueuePair, End, TcpQueuePair, TcpListener) {
    let (client, server) = (End::new(place), End::new(place));
    let settings = TcpSettings { mode, ..TcpSettings::default() };
    let listener = server.adapter.listen(0, &settings, 4).unwrap();
    let (there, here) = (server.tcp(), client.tcp());
    server.receive(&there, 1, 0, SIZE);
    client.receive(&here, 1, 0, SIZE);
    listener.offer(&there).unwrap();
    here.connect(SocketAddr::new(server.address(), listener.port()), &settings).unwrap();
    there.wait_connected().unwrap();
    (client, here, server, there, listener)
}

fn pattern(len: usize) -> Vec<u8> {
    (0..len).map(|at| (at * 7 + at / 251) as u8).collect()
}

fn messages_are_found_whole_and_connections_close_in_both_directions(place: Where) {
    let (client, here, server, there, listener) = connected(place, Mode::Message);
    let flow = here.flow().unwrap().unwrap();
    assert_eq!(flow.remote, SocketAddr::new(server.address(), listener.port()));
    assert_eq!(there.flow().unwrap().unwrap().remote, flow.local);
    let long = pattern(40_000);
    client.send(&here, 2, &long);
    let done = server.next();
    assert_eq!((done.wr_id, done.byte_len as usize, done.qp_num), (1, 40_000, there.number()));
    assert_eq!(server.memory.to_vec(0, 40_000).unwrap(), long);
    assert_eq!(client.next().wr_id, 2);
    server.send(&there, 3, b"short");
    assert_eq!(client.next().byte_len, 5);
    assert_eq!(server.next().wr_id, 3);
    let counters = here.counters().unwrap().unwrap();
    assert!(counters.sent > 1 && counters.received > 1, "{counters:?}");

    here.close().unwrap();
    there.wait_peer_closed().unwrap();
    // The other direction is still open.
    client.receive(&here, 4, 0, SIZE);
    server.send(&there, 5, b"and goodbye");
    assert_eq!(client.next().byte_len, 11);
    assert_eq!(client.memory.to_vec(0, 11).unwrap(), b"and goodbye");
    assert_eq!(server.next().wr_id, 5);
    there.close().unwrap();
    there.wait_closed().unwrap();
    here.wait_closed().unwrap();
}

fn a_stream_fills_receives_in_order(place: Where) {
    let (client, here, server, there, _listener) = connected(place, Mode::Stream);
    server.receive(&there, 2, SIZE, SIZE);
    let long = pattern(SIZE + 1000);
    client.send(&here, 3, &long[..SIZE]);
    assert_eq!(client.next().wr_id, 3);
    client.send(&here, 4, &long[SIZE..]);
    let (mut got, mut last) = (0, 0);
    while got < long.len() {
        let done = server.next();
        // Each begins where its receive does; a push may have ended the one before early.
        let at = (done.wr_id as usize - 1) * SIZE;
        let bytes = server.memory.to_vec(at, done.byte_len as usize).unwrap();
        assert_eq!(bytes, long[got..got + bytes.len()]);
        assert_eq!(done.wr_id, last + 1);
        last = done.wr_id;
        got += bytes.len();
        server.receive(&there, last + 1, (last as usize) * SIZE % (2 * SIZE), 100);
    }
}

fn nobody_listens(place: Where) {
    let (client, server) = (End::new(place), End::new(place));
    let qp = client.tcp();
    let to = SocketAddr::new(server.address(), 9);
    let refused = qp.connect(to, &TcpSettings::default());
    assert!(matches!(refused, Err(Error::Tcp(Failure::Refused))), "{refused:?}");
    assert!(qp.close().is_err());
    // It may try again, and what came of the first attempt is no answer to the second.
    let refused = qp.connect(to, &TcpSettings::default());
    assert!(matches!(refused, Err(Error::Tcp(Failure::Refused))), "{refused:?}");
    assert!(qp.close().is_err());
    let listener = server.adapter.listen(9, &TcpSettings::default(), 1).unwrap();
    let there = server.tcp();
    listener.offer(&there).unwrap();
    qp.connect(to, &TcpSettings::default()).unwrap();
    there.wait_connected().unwrap();
}

fn a_reset_flushes_what_is_posted(place: Where) {
    let (client, here, server, there, _listener) = connected(place, Mode::Message);
    there.abort().unwrap();
    let ended = here.wait_closed();
    assert!(matches!(ended, Err(Error::Tcp(Failure::Reset))), "{ended:?}");
    for end in [&client, &server] {
        let failed = end.cq.next().unwrap_err();
        assert_eq!(failed.work_status(), Some(WcStatus::WrFlushErr));
    }
    assert!(there.wait_closed().is_ok());
    // One that is dropped resets, too.
    let (_client, here, _server, there, _listener) = connected(place, Mode::Message);
    drop(there);
    assert!(here.wait_closed().is_err());
}

fn all_connections_are_ended_at_once(place: Where) {
    let (client, qp, server, peer, _listener) = connected(place, Mode::Stream);
    let idle = server.tcp();
    let aborter = server.adapter.aborter();
    aborter.abort();
    assert!(peer.wait_closed().is_ok());
    let ended = qp.wait_closed();
    assert!(matches!(ended, Err(Error::Tcp(Failure::Reset))), "{ended:?}");
    drop((idle, peer, server, client));
    aborter.abort();
}

fn one_thread_waits_for_completions_and_events(place: Where) {
    let (client, here, server, there, _listener) = connected(place, Mode::Stream);
    assert_eq!(server.adapter.poll_event().unwrap().unwrap().change, TcpChange::Connected);
    assert_eq!(server.adapter.poll_event().unwrap(), None);
    let patience = Instant::now() + Duration::from_secs(20);
    let waited = |out: &mut [Completion]| {
        loop {
            assert!(Instant::now() < patience, "nothing comes");
            let found = server.cq.poll(out).unwrap();
            let event = server.adapter.poll_event().unwrap();
            if found > 0 || event.is_some() {
                return (found, event);
            }
            server.adapter.wait(&server.cq).unwrap();
        }
    };
    std::thread::scope(|scope| {
        let late = |what: fn(&End, &TcpQueuePair)| {
            let (client, here) = (&client, &here);
            scope.spawn(move || {
                std::thread::sleep(Duration::from_millis(20));
                what(client, here);
            });
        };
        let mut out = [Completion::default()];
        late(|client, here| client.send(here, 2, b"x"));
        assert_eq!(waited(&mut out), (1, None));
        late(|_, here| here.close().unwrap());
        let (_, event) = waited(&mut out);
        assert_eq!(event.unwrap().change, TcpChange::PeerClosed);
        assert_eq!(event.unwrap().qp_num, there.number());
    });
}

#[test]
fn whoever_waits_hears_of_what_has_completed_before() {
    let end = End::new(Where::Here);
    let qp = end.tcp();
    end.receive(&qp, 1, 0, SIZE);
    let begun = Instant::now();
    let limit = Duration::from_millis(20);
    end.adapter.wait_timeout(&end.cq, limit).unwrap();
    assert!(begun.elapsed() >= limit);
    // Completes at once, while nobody has asked for an event.
    qp.flush().unwrap();
    let long = Duration::from_secs(60);
    end.adapter.wait_timeout(&end.cq, long).unwrap();
    assert!(begun.elapsed() < long);
    let mut out = [Completion::default(); 2];
    assert_eq!(end.cq.poll(&mut out).unwrap(), 1);
    assert_eq!((out[0].wr_id, out[0].status), (1, WcStatus::WrFlushErr));
}

fn datagrams_come_with_the_address_of_their_sender(place: Where) {
    let (client, server) = (End::new(place), End::new(place));
    let build = |end: &End, port| {
        let queues = end.memory.domain().queue_pair(&end.cq, &end.cq);
        queues.build_udp(port).unwrap()
    };
    let (here, there) = (build(&client, 0), build(&server, 4791));
    assert_eq!(there.port(), 4791);
    there.post_recv(1, &[server.memory.sge(0, SIZE).unwrap()]).unwrap();
    here.post_recv(1, &[client.memory.sge(0, SIZE).unwrap()]).unwrap();
    // A call is answered behind what was posted before it: a datagram that came sooner would be lost.
    drop(server.adapter.listen(0, &TcpSettings::default(), 1).unwrap());
    let to = SocketAddr::new(server.address(), 4791);
    here.send_to(&Request::send_inline(b"a postcard").id(2), to).unwrap();
    assert_eq!(client.next().wr_id, 2);
    let done = server.next();
    assert_eq!((done.byte_len, done.qp_num), (10, there.number()));
    let WcExtra::From(from) = done.extra else { panic!("{:?}", done.extra) };
    assert_eq!(SocketAddr::from(from), SocketAddr::new(client.address(), here.port()));
    there.send_to(&Request::send_inline(b"back").id(3), from.into()).unwrap();
    assert_eq!(client.next().byte_len, 4);
    // A port is somebody's.
    let queues = server.memory.domain().queue_pair(&server.cq, &server.cq);
    assert!(queues.build_udp(4791).is_err());
}

#[test]
fn without_a_link_there_are_none() {
    assert!(Adapter::open_with(Config::default()).is_err());
    let config = Config { address: Some([127, 0, 0, 1].into()), ..Config::default() };
    let device = quipu::Device::open(config).unwrap();
    let (pd, cq) = (device.protection_domain().unwrap(), device.completion_queue(4).unwrap());
    let error = pd.queue_pair(&cq, &cq).build_tcp().unwrap_err();
    assert!(error.to_string().contains("QUIPU_QPIP_LINK"), "{error}");
    assert!(pd.queue_pair(&cq, &cq).build_udp(0).is_err());
}

/// What is received one after another goes on without a pause, also when the other direction is closed.
fn through_two_receives(place: Where, half_closed: bool) {
    let (client, here, server, there, _listener) = connected(place, Mode::Stream);
    client.receive(&here, 2, SIZE, SIZE);
    if half_closed {
        here.close().unwrap();
    }
    let begun = Instant::now();
    let (rounds, mut got) = (100, 0);
    let message = [server.memory.sge(2 * SIZE, SIZE).unwrap()];
    std::thread::scope(|scope| {
        let (server, there) = (&server, &there);
        scope.spawn(move || {
            for number in 0..rounds {
                there.post_send(&Request::send(&message).id(number)).unwrap();
            }
            (0..rounds).for_each(|number| assert_eq!(server.next().wr_id, number));
        });
        while got < rounds as usize * SIZE {
            let done = client.next();
            got += done.byte_len as usize;
            client.receive(&here, done.wr_id, (done.wr_id as usize - 1) * SIZE, SIZE);
        }
    });
    // A window that opens and is not told of is found by probes: a fifth of a second for each round.
    assert!(begun.elapsed() < Duration::from_secs(10), "{:?}", begun.elapsed());
}

fn a_window_that_opens_is_told_of(place: Where) {
    through_two_receives(place, false);
}

fn a_window_that_opens_is_told_of_in_the_direction_that_is_left(place: Where) {
    through_two_receives(place, true);
}

/// What a thread finds, which is given up if it hangs.
fn in_time<T: Send + 'static>(what: impl FnOnce() -> T + Send + 'static) -> T {
    let (says, hears) = mpsc::channel();
    std::thread::spawn(move || says.send(what()));
    hears.recv_timeout(LONG).expect("it hangs")
}

fn wait_at_once(end: &End) {
    let begun = Instant::now();
    end.adapter.wait_timeout(&end.cq, LONG).unwrap();
    assert!(begun.elapsed() < LONG, "it sleeps though there is something");
}

fn events_that_a_queue_pair_waited_for_are_still_to_be_taken(place: Where) {
    let (client, here, _server, there, _listener) = connected(place, Mode::Message);
    there.close().unwrap();
    here.wait_peer_closed().unwrap();
    for change in [TcpChange::Connected, TcpChange::PeerClosed] {
        wait_at_once(&client);
        let event = client.adapter.poll_event().unwrap().unwrap();
        assert_eq!((event.qp_num, event.change), (here.number(), change));
    }
    assert_eq!(client.adapter.poll_event().unwrap(), None);
}

fn an_event_wakes_all_that_wait_whatever_for(place: Where) {
    let (client, here, server, there, listener) = connected(place, Mode::Message);
    assert_eq!(server.adapter.poll_event().unwrap().unwrap().change, TcpChange::Connected);
    let idle = server.tcp();
    server.receive(&idle, 1, 0, SIZE);
    listener.offer(&idle).unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| idle.wait_connected().unwrap());
        std::thread::sleep(Duration::from_millis(10));
        let waits = scope.spawn(|| wait_at_once(&server));
        std::thread::sleep(Duration::from_millis(10));
        here.close().unwrap();
        waits.join().unwrap();
        let event = server.adapter.poll_event().unwrap().unwrap();
        assert_eq!((event.qp_num, event.change), (there.number(), TcpChange::PeerClosed));
        let another = client.tcp();
        let to = SocketAddr::new(server.address(), listener.port());
        another.connect(to, &TcpSettings::default()).unwrap();
    });
}

fn a_connection_stays_what_it_is_when_another_cannot_begin(place: Where) {
    let (client, here, server, there, listener) = connected(place, Mode::Message);
    let to = SocketAddr::new(server.address(), listener.port());
    there.close().unwrap();
    here.wait_peer_closed().unwrap();
    assert!(here.connect(to, &TcpSettings::default()).is_err());
    assert!(listener.offer(&there).is_err());
    in_time(move || {
        here.wait_connected().unwrap();
        here.wait_peer_closed().unwrap();
        there.wait_connected().unwrap();
        drop((client, server, listener));
    });
}

fn a_queue_pair_that_was_refused_can_be_offered(place: Where) {
    let (client, server) = (End::new(place), End::new(place));
    let settings = TcpSettings::default();
    let qp = client.tcp();
    assert!(qp.connect(SocketAddr::new(server.address(), 9), &settings).is_err());
    let listener = client.adapter.listen(0, &settings, 1).unwrap();
    client.receive(&qp, 1, 0, SIZE);
    listener.offer(&qp).unwrap();
    let peer = server.tcp();
    server.receive(&peer, 1, 0, SIZE);
    peer.connect(SocketAddr::new(client.address(), listener.port()), &settings).unwrap();
    qp.wait_connected().unwrap();
    // The refusal was that of an attempt before.
    assert_eq!(client.adapter.poll_event().unwrap().unwrap().change, TcpChange::Connected);
    for (one, other) in [(&peer, &qp), (&qp, &peer)] {
        one.close().unwrap();
        other.wait_peer_closed().unwrap();
    }
    qp.wait_closed().unwrap();
}

#[test]
fn what_is_of_another_adapter_is_refused() {
    let [one, other] = [(); 2].map(|()| End::new(Where::Here));
    let listener = one.adapter.listen(0, &TcpSettings::default(), 1).unwrap();
    let [own, strange] = [&one, &other].map(End::tcp);
    assert!(listener.offer(&strange).is_err());
    listener.offer(&own).unwrap();
    assert!(one.adapter.wait_timeout(&other.cq, Duration::ZERO).is_err());
    let with = |cq| one.memory.domain().queue_pair(&one.cq, cq).build_tcp();
    assert!(with(&other.cq).is_err() && with(&one.cq).is_ok());
}

#[test]
fn a_device_on_a_link_has_queue_pairs_over_tcp_without_being_an_adapter() {
    let peer = End::new(Where::Here);
    let device = Device::open(config("udp:127.0.0.1:0")).unwrap();
    let (pd, cq) = (device.protection_domain().unwrap(), device.completion_queue(4).unwrap());
    let qp = pd.queue_pair(&cq, &cq).build_tcp().unwrap();
    let refused = qp.connect(SocketAddr::new(peer.address(), 9), &TcpSettings::default());
    assert!(matches!(refused, Err(Error::Tcp(Failure::Refused))), "{refused:?}");
}

/// Tests of both places.
macro_rules! at {
    ($($test:ident),* $(,)?) => {
        mod here {
            $(#[test]
            fn $test() {
                super::$test(super::Where::Here);
            })*
        }
        mod shared {
            $(#[test]
            fn $test() {
                super::$test(super::Where::Shared);
            })*
        }
    };
}

at!(
    messages_are_found_whole_and_connections_close_in_both_directions,
    a_stream_fills_receives_in_order,
    nobody_listens,
    a_reset_flushes_what_is_posted,
    all_connections_are_ended_at_once,
    one_thread_waits_for_completions_and_events,
    datagrams_come_with_the_address_of_their_sender,
    events_that_a_queue_pair_waited_for_are_still_to_be_taken,
    an_event_wakes_all_that_wait_whatever_for,
    a_connection_stays_what_it_is_when_another_cannot_begin,
    a_queue_pair_that_was_refused_can_be_offered,
    a_window_that_opens_is_told_of,
    a_window_that_opens_is_told_of_in_the_direction_that_is_left,
);
