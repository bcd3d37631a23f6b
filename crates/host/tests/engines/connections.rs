//! Connection management over loopback: two programs, most often in one engine.

use std::io;
use std::net::{SocketAddr, TcpStream};
use std::os::fd::RawFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use quipu_host::connection::{ChannelKey, Event, EventKind, IdKey, Param, PortSpace, Refusal};
use quipu_host::nic::{SendOp, WcStatus};
use quipu_host::{Config, Engine, EngineError, SameHost};

use crate::common;

const RC: u8 = 2;
const UD: u8 = 4;

fn engine() -> Arc<Engine> {
    let address = Some("127.0.0.1".parse().unwrap());
    Engine::open(Config { address, ..Config::default() }).unwrap()
}

/// Longer than anything here takes.
const PATIENCE: Duration = Duration::from_secs(20);

/// One program: its engine and its event channel.
struct Program {
    engine: Arc<Engine>,
    channel: ChannelKey,
    fd: RawFd,
}

impl Program {
    fn new(engine: &Arc<Engine>) -> Self {
        let (channel, fd) = engine.cm_create_channel().unwrap();
        Self { engine: Arc::clone(engine), channel, fd }
    }

    fn id(&self, space: PortSpace) -> IdKey {
        let kind = if space == PortSpace::Udp { UD } else { RC };
        self.engine.cm_create_id(self.channel, space, kind, 0).unwrap()
    }

    #[track_caller]
    fn expect(&self, kind: EventKind) -> Event {
        let event = self.engine.cm_get_event(self.channel).unwrap();
        assert_eq!(event.kind, kind, "{event:?}");
        event
    }

    fn listen(&self, space: PortSpace, at: &str) -> (IdKey, SocketAddr) {
        let id = self.id(space);
        self.engine.cm_bind_addr(id, at.parse().unwrap()).unwrap();
        self.engine.cm_listen(id, 0).unwrap();
        (id, self.engine.cm_route(id).unwrap().src.unwrap())
    }

    fn resolve(&self, space: PortSpace, to: SocketAddr) -> IdKey {
        let id = self.id(space);
        self.engine.cm_resolve_addr(id, None, to).unwrap();
        self.expect(EventKind::AddrResolved);
        self.engine.cm_resolve_route(id).unwrap();
        self.expect(EventKind::RouteResolved);
        id
    }

    fn connect(&self, to: SocketAddr, param: &Param) -> IdKey {
        let id = self.resolve(PortSpace::Tcp, to);
        self.engine.cm_connect(id, param).unwrap();
        id
    }
}

fn readable(fd: RawFd) -> bool {
    let mut poll = libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
    // SAFETY: one pollfd, in a live variable.
    unsafe { libc::poll(&raw mut poll, 1, 0) == 1 }
}

fn wait_readable(fd: RawFd) -> bool {
    wait_readable_first(fd, -1)
}

/// Waits for one of two descriptors; whether the first one is readable.
fn wait_readable_first(fd: RawFd, other: RawFd) -> bool {
    let mut fds = [fd, other].map(|fd| libc::pollfd { fd, events: libc::POLLIN, revents: 0 });
    // SAFETY: as many pollfds, in a live variable.
    let count = unsafe { libc::poll(fds.as_mut_ptr(), 2, PATIENCE.as_millis() as libc::c_int) };
    assert!(count >= 0);
    fds[0].revents != 0
}

#[test]
fn a_connection_stands_before_its_peer_asks_for_the_next() {
    let engines = [engine(), engine()];
    let [server, client] = engines.each_ref().map(Program::new);
    let (_, to) = server.listen(PortSpace::Tcp, "127.0.0.1:0");
    let active = client.connect(to, &Param::default());
    // The listener's descriptor is now the first of those that the server's engine looks at.
    let passive = server.expect(EventKind::ConnectRequest).id;
    server.engine.cm_accept(passive, Some(&Param::default())).unwrap();
    client.expect(EventKind::ConnectResponse);
    client.engine.cm_accept(active, None).unwrap();
    client.connect(to, &Param::default());
    assert_eq!(server.expect(EventKind::Established).id, passive);
    server.expect(EventKind::ConnectRequest);
}

#[test]
fn a_connection_from_its_request_to_its_end() {
    for at in ["127.0.0.1:0", "0.0.0.0:0", "[::]:0"] {
        let engines = [engine(), engine()];
        let [server, client] = engines.each_ref().map(Program::new);
        let (listener, address) = server.listen(PortSpace::Tcp, at);
        let to = SocketAddr::new("127.0.0.1".parse().unwrap(), address.port());
        let asked = Param {
            private_data: b"who".to_vec(),
            responder_resources: 3,
            initiator_depth: 5,
            retry_count: 6,
            rnr_retry_count: 7,
            qpn: 0x12_3456,
            ..Param::default()
        };
        let active = client.connect(to, &asked);

        let request = server.expect(EventKind::ConnectRequest);
        let passive = request.id;
        assert_eq!(&request.private_data[..4], b"who\0");
        assert_eq!(request.private_data.len(), 56);
        assert_eq!(request.peer.responder_resources, 5);
        assert_eq!(request.peer.initiator_depth, 3);
        assert_eq!((request.peer.qpn, request.peer.retry_count), (0x12_3456, 6));
        let [seen, own] = [&server, &client]
            .map(|p| (p, if p.fd == server.fd { passive } else { active }))
            .map(|(p, id)| p.engine.cm_route(id).unwrap());
        assert_eq!((seen.src, seen.dst), (own.dst, own.src));
        assert!(seen.has_device && seen.has_path);

        let reply = Param { qpn: 0x65_4321, initiator_depth: 3, responder_resources: 5, ..asked };
        let before = server.engine.cm_connect_params(passive).unwrap();
        server.engine.cm_accept(passive, Some(&reply)).unwrap();
        let response = client.expect(EventKind::ConnectResponse);
        assert_eq!((response.id, response.peer.qpn), (active, 0x65_4321));
        assert_eq!(response.private_data.len(), 196);

        let [a, b] = [(&client, active), (&server, passive)]
            .map(|(p, id)| p.engine.cm_connect_params(id).unwrap());
        assert_eq!((a.dest_qpn, b.dest_qpn), (0x65_4321, 0x12_3456));
        assert_eq!((a.rq_psn, a.sq_psn), (b.sq_psn, b.rq_psn));
        assert_eq!(before.sq_psn, b.sq_psn, "what was known before the accept holds");
        assert_eq!((a.max_rd_atomic, b.max_rd_atomic), (5, 3));
        assert_eq!((a.max_dest_rd_atomic, b.max_dest_rd_atomic), (3, 5));

        client.engine.cm_accept(active, None).unwrap();
        server.expect(EventKind::Established);
        client.engine.cm_disconnect(active).unwrap();
        server.expect(EventKind::Disconnected);
        server.engine.cm_disconnect(passive).unwrap();
        client.expect(EventKind::Disconnected);
        for program in [&client, &server] {
            program.expect(EventKind::TimewaitExit);
        }
        // Address, route, response, disconnected, timewait; the request counts for the listener.
        assert_eq!(client.engine.cm_destroy_id(active).unwrap(), 5);
        assert_eq!(server.engine.cm_destroy_id(passive).unwrap(), 3);
        assert_eq!(server.engine.cm_destroy_id(listener).unwrap(), 1);
        client.engine.cm_destroy_channel(client.channel).unwrap();
    }
}

#[test]
fn within_one_engine_too() {
    let engine = engine();
    let [server, client] = [(); 2].map(|()| Program::new(&engine));
    let (_, address) = server.listen(PortSpace::Tcp, "127.0.0.1:0");
    for _ in 0..100 {
        let active = client.connect(address, &Param::default());
        let passive = server.expect(EventKind::ConnectRequest).id;
        engine.cm_accept(passive, Some(&Param::default())).unwrap();
        client.expect(EventKind::ConnectResponse);
        engine.cm_accept(active, None).unwrap();
        server.expect(EventKind::Established);
        engine.cm_disconnect(active).unwrap();
        server.expect(EventKind::Disconnected);
        engine.cm_disconnect(passive).unwrap();
        client.expect(EventKind::Disconnected);
        engine.cm_destroy_id(active).unwrap();
        engine.cm_destroy_id(passive).unwrap();
    }
}

#[test]
fn refusals_say_why() {
    let engine = engine();
    let [server, client] = [(); 2].map(|()| Program::new(&engine));
    let (listener, address) = server.listen(PortSpace::Tcp, "127.0.0.1:0");
    client.connect(address, &Param::default());
    let request = server.expect(EventKind::ConnectRequest);
    engine.cm_reject(request.id, Refusal::Consumer, b"go away").unwrap();
    let rejected = client.expect(EventKind::Rejected);
    assert_eq!((rejected.status, &rejected.private_data[..7]), (28, &b"go away"[..]));
    assert_eq!(rejected.private_data.len(), 148);

    // Another port space at the same port.
    let other = client.resolve(PortSpace::Ib, address);
    engine.cm_connect(other, &Param::default()).unwrap();
    assert_eq!(client.expect(EventKind::Rejected).status, 8);

    // A listener that goes takes the requests with it that were not taken.
    let early = client.connect(address, &Param::default());
    assert!(wait_readable(server.fd));
    engine.cm_destroy_id(listener).unwrap();
    assert!(!readable(server.fd));
    let rejected = client.expect(EventKind::Rejected);
    assert_eq!((rejected.id, rejected.status), (early, 28));

    // Nobody listens, and nobody else comes to the port meanwhile.
    let bound = server.id(PortSpace::Tcp);
    engine.cm_bind_addr(bound, "127.0.0.1:0".parse().unwrap()).unwrap();
    client.connect(engine.cm_route(bound).unwrap().src.unwrap(), &Param::default());
    assert_eq!(client.expect(EventKind::Rejected).status, 8);
}

#[test]
fn a_listener_may_be_a_moment_late() {
    let engine = engine();
    let [server, client] = [(); 2].map(|()| Program::new(&engine));
    let begun = Instant::now();
    loop {
        let id = server.id(PortSpace::Tcp);
        engine.cm_bind_addr(id, "127.0.0.1:0".parse().unwrap()).unwrap();
        let address = engine.cm_route(id).unwrap().src.unwrap();
        let moment = Instant::now();
        let active = client.connect(address, &Param::default());
        engine.cm_listen(id, 0).unwrap();
        let moment = moment.elapsed();
        if wait_readable_first(server.fd, client.fd) {
            let request = server.expect(EventKind::ConnectRequest);
            let [seen, own] = [request.id, active].map(|id| engine.cm_route(id).unwrap());
            return assert_eq!(seen.dst, own.src, "from the same port");
        }
        // This thread was stopped meanwhile: a connection is tried for half a second.
        client.expect(EventKind::Rejected);
        assert!(moment >= Duration::from_millis(500), "{moment:?}");
        assert!(begun.elapsed() < PATIENCE);
    }
}

#[test]
fn ports_are_taken_once() {
    let engine = engine();
    let program = Program::new(&engine);
    let (_, address) = program.listen(PortSpace::Tcp, "127.0.0.1:0");
    let errno = |at: SocketAddr| match engine.cm_bind_addr(program.id(PortSpace::Tcp), at) {
        Err(EngineError::Address(error)) => error.raw_os_error().unwrap(),
        outcome => panic!("{outcome:?}"),
    };
    assert_eq!(errno(address), libc::EADDRINUSE);
    let bound = program.id(PortSpace::Tcp);
    engine.cm_bind_addr(bound, "127.0.0.1:0".parse().unwrap()).unwrap();
    let other = engine.cm_route(bound).unwrap().src.unwrap();
    assert_eq!(errno(other), libc::EADDRINUSE);
    // No interface has these, though sockets could be bound to them.
    for nobody in ["192.0.2.7:0", "239.1.1.1:0", "255.255.255.255:0", "[ff02::1%1]:0"] {
        assert_eq!(errno(nobody.parse().unwrap()), libc::EADDRNOTAVAIL, "{nobody}");
    }
    // Datagrams have ports of their own.
    engine.cm_bind_addr(program.id(PortSpace::Udp), address).unwrap();
}

#[test]
fn the_descriptor_is_readable_exactly_while_events_are_queued() {
    let engine = engine();
    let program = Program::new(&engine);
    assert!(!readable(program.fd));
    // SAFETY: takes integers.
    unsafe { libc::fcntl(program.fd, libc::F_SETFL, libc::O_NONBLOCK) };
    assert!(matches!(engine.cm_get_event(program.channel), Err(EngineError::WouldBlock)));
    let (_, address) = program.listen(PortSpace::Tcp, "127.0.0.1:0");
    let id = program.id(PortSpace::Tcp);
    engine.cm_resolve_addr(id, None, address).unwrap();
    assert!(readable(program.fd));
    let other = Program::new(&engine);
    engine.cm_migrate_id(id, other.channel).unwrap();
    assert!(!readable(program.fd) && readable(other.fd));
    other.expect(EventKind::AddrResolved);
    assert!(!readable(other.fd));
    engine.cm_resolve_route(id).unwrap();
    engine.cm_destroy_id(id).unwrap();
    assert!(!readable(other.fd));
    engine.cm_destroy_channel(other.channel).unwrap();
    assert!(engine.cm_destroy_channel(program.channel).is_err());
}

#[test]
fn a_request_wakes_whoever_polls_the_descriptor() {
    let [a, b] = [engine(), engine()];
    let [server, client] = [Program::new(&a), Program::new(&b)];
    let (_, address) = server.listen(PortSpace::Tcp, "127.0.0.1:0");
    client.connect(address, &Param::default());
    assert!(wait_readable(server.fd), "the helper of the server's engine makes the progress");
    let passive = server.expect(EventKind::ConnectRequest).id;
    a.cm_accept(passive, Some(&Param::default())).unwrap();
    assert!(wait_readable(client.fd));
}

#[test]
fn an_event_made_by_another_thread_wakes_whoever_waits_inside() {
    let engine = engine();
    let program = Program::new(&engine);
    let id = program.id(PortSpace::Tcp);
    std::thread::scope(|scope| {
        let waiter = scope.spawn(|| program.expect(EventKind::AddrResolved));
        // Until it sleeps, most often; the outcome must be the same if it does not.
        std::thread::sleep(Duration::from_millis(50));
        engine.cm_resolve_addr(id, None, "127.0.0.1:9".parse().unwrap()).unwrap();
        let begin = Instant::now();
        waiter.join().unwrap();
        assert!(begin.elapsed() < Duration::from_secs(5));
    });
}

#[test]
fn datagram_services_are_looked_up() {
    for at in ["127.0.0.1:0", "0.0.0.0:0", "[::]:0"] {
        let engines = [engine(), engine()];
        let [server, client] = engines.each_ref().map(Program::new);
        let (listener, address) = server.listen(PortSpace::Udp, at);
        let to = SocketAddr::new("127.0.0.1".parse().unwrap(), address.port());
        let active = client.resolve(PortSpace::Udp, to);
        let asked = Param { private_data: b"?".to_vec(), ..Param::default() };
        client.engine.cm_connect(active, &asked).unwrap();
        let request = server.expect(EventKind::ConnectRequest);
        assert_eq!((request.private_data[0], request.private_data.len()), (b'?', 180));
        let answer = Param { qpn: 77, private_data: b"!".to_vec(), ..Param::default() };
        server.engine.cm_accept(request.id, Some(&answer)).unwrap();
        let found = client.expect(EventKind::Established);
        assert_eq!((found.peer.qpn, found.peer.qkey), (77, 0x0123_4567));
        assert_eq!(found.peer.path.unwrap().dgid[12..], [127, 0, 0, 1]);
        assert_eq!((found.private_data[0], found.private_data.len()), (b'!', 136));
        server.engine.cm_destroy_id(request.id).unwrap();

        let again = client.resolve(PortSpace::Udp, to);
        client.engine.cm_connect(again, &asked).unwrap();
        let request = server.expect(EventKind::ConnectRequest);
        // The answer comes though the listener is gone.
        server.engine.cm_destroy_id(listener).unwrap();
        server.engine.cm_reject(request.id, Refusal::Consumer, b"").unwrap();
        assert_eq!(client.expect(EventKind::Unreachable).status, 2);

        let nobody = client.resolve(PortSpace::Udp, to);
        client.engine.cm_connect(nobody, &asked).unwrap();
        assert_eq!(client.expect(EventKind::Unreachable).status, 1);
    }
}

/// How many descriptors this process may have, once it has asked for as many as it may ask for.
fn descriptors() -> usize {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: the limit is a live variable.
    unsafe {
        assert_eq!(libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit), 0);
        let more = libc::rlimit { rlim_cur: limit.rlim_max, ..limit };
        if libc::setrlimit(libc::RLIMIT_NOFILE, &raw const more) == 0 {
            limit = more;
        }
    }
    usize::try_from(limit.rlim_cur).unwrap_or(usize::MAX)
}

/// Silent streams that a listener lets one host have, and so what they cost it.
const HALF_OPEN: usize = 512;
/// Descriptors that are left to the tests beside this one.
const OTHERS: usize = 8_000;

#[test]
fn strangers_that_say_nothing_keep_nobody_waiting() {
    let engines = ["127.0.0.61", "127.0.0.62"].map(|it| common::engine(it, SameHost::Never));
    let [server, client] = engines.each_ref().map(Program::new);
    let (_, to) = server.listen(PortSpace::Tcp, "127.0.0.61:0");
    let connected = || {
        let active = client.connect(to, &Param::default());
        let passive = server.expect(EventKind::ConnectRequest).id;
        server.engine.cm_accept(passive, Some(&Param::default())).unwrap();
        client.expect(EventKind::ConnectResponse);
        client.engine.cm_accept(active, None).unwrap();
        server.expect(EventKind::Established);
        (active, passive)
    };
    let before = connected();
    let (a, b) = common::pair(&engines[0], &engines[1], 64);
    let goes_on = || {
        b.receive(2, &[b.sge(0, 64)]);
        a.post(1, SendOp::Send, &[a.sge(0, 64)]);
        for (end, id) in [(&a, 1), (&b, 2)] {
            let completion = end.poll();
            assert_eq!((completion.wr_id, completion.status), (id, WcStatus::Success));
        }
    };
    let count = descriptors().saturating_sub(OTHERS).clamp(HALF_OPEN + 100, 10_000);
    let mut silent = Vec::new();
    while silent.len() < count {
        silent.extend((0..100).map(|_| TcpStream::connect(to).unwrap()));
        goes_on();
    }
    let after = connected();
    // The oldest were hung up on, and are not kept anywhere.
    silent.iter().for_each(|stream| stream.set_nonblocking(true).unwrap());
    let begun = Instant::now();
    loop {
        silent.retain(|stream| match stream.peek(&mut [0]) {
            Ok(len) => len > 0,
            Err(error) => error.kind() == io::ErrorKind::WouldBlock,
        });
        if silent.len() <= HALF_OPEN {
            break;
        }
        assert!(begun.elapsed() < PATIENCE, "{} are still there", silent.len());
        goes_on();
    }
    for (active, passive) in [before, after] {
        client.engine.cm_disconnect(active).unwrap();
        assert_eq!(server.expect(EventKind::Disconnected).id, passive);
    }
}

#[test]
fn the_end_of_an_engine_disconnects_its_peers() {
    let server = Program::new(&engine());
    let client = Program::new(&engine());
    let (_, address) = server.listen(PortSpace::Tcp, "127.0.0.1:0");
    let active = client.connect(address, &Param::default());
    let passive = server.expect(EventKind::ConnectRequest).id;
    server.engine.cm_accept(passive, Some(&Param::default())).unwrap();
    client.expect(EventKind::ConnectResponse);
    client.engine.cm_accept(active, None).unwrap();
    server.expect(EventKind::Established);
    drop(client);
    assert_eq!(server.expect(EventKind::Disconnected).id, passive);
    server.engine.cm_disconnect(passive).unwrap();
    server.expect(EventKind::TimewaitExit);
}
