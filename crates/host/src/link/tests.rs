//! What peers of this host may do to an engine: here a peer is played by hand, word by word.

use std::net::IpAddr;
use std::os::fd::AsRawFd;
use std::time::{Duration, Instant};

use quipu_nic::{Access, Gid, MrId, PdId, QpInit};

use super::handshake::Hello;
use super::probe::Number;
use super::segment::{MAX_BYTES, Writers};
use super::*;
use crate::config::{Config, PeerMemoryPolicy};
use crate::engine::{Engine, QUIET_WAIT};

const PATIENCE: Duration = Duration::from_secs(20);
/// Where the guard word of an arena is (specs/quipu-channel.md, 1).
const GUARD_AT: usize = 128;

/// An engine that peers can call.
struct Called {
    engine: Arc<Engine>,
    pd: PdId,
    at: SocketAddr,
}

impl Called {
    fn new(peer_memory: PeerMemoryPolicy) -> Self {
        let address = std::net::IpAddr::from([127, 0, 0, 1]);
        let config = Config { address: Some(address.into()), peer_memory, ..Config::default() };
        let engine = Engine::open(Config { arena_bytes: 1 << 20, ..config }).unwrap();
        let (context, _) = engine.open_context().unwrap();
        let pd = engine.alloc_pd().unwrap();
        let (cq, _) = engine.create_cq(context, 16, None, 0).unwrap();
        let init = QpInit {
            pd,
            send_cq: cq,
            recv_cq: cq,
            srq: None,
            cap: quipu_nic::QpCap { max_send_wr: 1, max_recv_wr: 1, ..Default::default() },
            qp_type: quipu_nic::QpType::Rc,
            sq_sig_all: false,
        };
        let (_, number, _) = engine.create_qp(context, &init).unwrap();
        Self { engine, pd, at: SocketAddr::new(address, (number.0 >> 8) as u16) }
    }

    /// A region that peers may write.
    fn region(&self) -> (Segment, MrId) {
        let memory = Segment::heap(4096);
        let access = Access::LOCAL_WRITE | Access::REMOTE_WRITE;
        let region = self.engine.reg_segment(self.pd, &memory, None, access).unwrap();
        (memory, region.id)
    }

    fn links(&self) -> usize {
        self.engine.enter().unwrap().links.by_link.len()
    }
}

/// The address of every engine here.
fn own_gid() -> Gid {
    Gid::from(IpAddr::from([127, 0, 0, 1]))
}

/// A peer that says what the test wants.
struct Peer {
    fd: OwnedFd,
    arena: Segment,
    arena_fd: OwnedFd,
}

impl Peer {
    fn knock(at: SocketAddr, name: u8) -> (Self, Hello, Vec<OwnedFd>) {
        let (arena_fd, arena) = segment::create(c"test", 1 << 20, Writers::Both).unwrap();
        let peer = Self { fd: socket::connect(socket::Name::At(at)).unwrap(), arena, arena_fd };
        peer.say(Message::Knock([name; 16]), &[]);
        let (bytes, fds) = peer.hear().unwrap();
        let Some(Message::Hello(hello)) = Message::decode(&bytes) else {
            panic!("no introduction: {bytes:?}")
        };
        (peer, hello, fds)
    }

    fn say(&self, message: Message<'_>, fds: &[&OwnedFd]) {
        let fds: Vec<_> = fds.iter().map(|fd| fd.as_raw_fd()).collect();
        socket::send(&self.fd, &message.encode(), &fds).unwrap();
    }

    /// The next message, `None` at the end.
    fn hear(&self) -> Option<(Vec<u8>, Vec<OwnedFd>)> {
        let mut buffer = [0; socket::MAX_MESSAGE];
        let end = Instant::now() + PATIENCE;
        loop {
            match socket::receive(&self.fd, &mut buffer) {
                Ok(received) if received.len == 0 => return None,
                Ok(received) => return Some((buffer[..received.len].to_vec(), received.fds)),
                Err(error) if sys::would_block(&error) => assert!(Instant::now() < end, "silence"),
                Err(_) => return None,
            }
            std::thread::yield_now();
        }
    }

    /// The handshake, with the number that is to prove access. What the engine gave at its end.
    fn join(&self, name: u8, number: Option<Number>) -> (bool, Vec<OwnedFd>) {
        let hello = Hello { engine: [name; 16], gid: own_gid(), everywhere: false, proof_addr: 0 };
        self.say(Message::Hello(hello), &[&self.arena_fd]);
        let (bytes, _) = self.hear().unwrap();
        assert_eq!(Message::decode(&bytes), Some(Message::Ready(None)));
        self.conclude(number)
    }

    /// The rest of it, of one whose hello was answered.
    fn conclude(&self, number: Option<Number>) -> (bool, Vec<OwnedFd>) {
        self.say(Message::Ready(number), &[]);
        let (bytes, fds) = self.hear().unwrap();
        let Some(Message::Admits(whether)) = Message::decode(&bytes) else {
            panic!("no admission: {bytes:?}")
        };
        self.say(Message::Admits(number.is_some()), &[]);
        (whether, fds)
    }

    /// A link that stands, where each has access to the memory of the other.
    fn linked(called: &Called, name: u8) -> Self {
        let (peer, hello, _) = Self::knock(called.at, name);
        let own = std::process::id() as libc::pid_t;
        let number = probe::on_peer(own, hello.proof_addr, &hello.engine).unwrap();
        peer.join(name, Some(number));
        let end = Instant::now() + PATIENCE;
        while called.links() == 0 {
            assert!(Instant::now() < end, "no link");
        }
        peer
    }
}

/// What a descriptor is, as the kernel shows it.
fn kind(fd: &OwnedFd) -> String {
    let link = std::fs::read_link(format!("/proc/self/fd/{}", fd.as_raw_fd())).unwrap();
    link.to_str().unwrap().to_owned()
}

#[test]
fn the_directory_is_for_those_with_proven_access() {
    let called = Called::new(PeerMemoryPolicy::Auto);
    let (stranger, hello, fds) = Peer::knock(called.at, 1);
    assert!(fds.len() == 1 && kind(&fds[0]).contains("quipu-arena"));
    assert_ne!(hello.proof_addr, 0);
    assert!(matches!(stranger.join(1, None), (false, fds) if fds.is_empty()));
    let (guesser, ..) = Peer::knock(called.at, 2);
    assert!(matches!(guesser.join(2, Some([0; 16])), (false, fds) if fds.is_empty()));

    let own = std::process::id() as libc::pid_t;
    let number = probe::on_peer(own, hello.proof_addr, &hello.engine).unwrap();
    let (friend, ..) = Peer::knock(called.at, 3);
    let (admitted, fds) = friend.join(3, Some(number));
    assert!(admitted && fds.len() == 2);
    assert!(kind(&fds[0]).contains("quipu-directory") && kind(&fds[1]).contains("quipu-page-list"));
}

#[test]
fn never_means_that_nobody_sees_the_directory() {
    let called = Called::new(PeerMemoryPolicy::Never);
    let (peer, hello, fds) = Peer::knock(called.at, 1);
    assert_eq!((hello.proof_addr, fds.len()), (0, 1));
    assert!(matches!(peer.join(1, Some([0; 16])), (false, fds) if fds.is_empty()));
}

#[test]
fn ringing_never_waits_and_disturbs_nobody_else() {
    let called = Called::new(PeerMemoryPolicy::Auto);
    // One peer never reads its bells, and rings without end.
    let deaf = Peer::linked(&called, 1);
    let link = *called.engine.enter().unwrap().links.by_link.keys().next().unwrap();
    let begin = Instant::now();
    for _ in 0..100_000 {
        called.engine.enter().unwrap().links.ring(link);
        let _ = socket::send(&deaf.fd, &[BELL], &[]);
    }
    assert!(begin.elapsed() < PATIENCE);
    assert_eq!(called.links(), 1);
    // Another one gets its link, and is heard.
    let (other, ..) = Peer::knock(called.at, 2);
    other.join(2, None);
    let close = {
        let mut bytes = vec![CARRIED];
        LinkMessage::Close { tag: 77 }.encode(&mut bytes);
        bytes
    };
    socket::send(&other.fd, &close, &[]).unwrap();
    // The deaf one finds bells and nothing else.
    let (bytes, _) = deaf.hear().unwrap();
    assert_eq!(bytes, [BELL]);
    drop(deaf);
    let end = Instant::now() + PATIENCE;
    while called.links() != 1 {
        assert!(Instant::now() < end, "the end of a link goes unnoticed");
    }
}

#[test]
fn nonsense_ends_a_link() {
    for nonsense in [&[BELL, 0][..], &[9], &[CARRIED]] {
        let called = Called::new(PeerMemoryPolicy::Auto);
        let peer = Peer::linked(&called, 1);
        socket::send(&peer.fd, nonsense, &[]).unwrap();
        assert!(peer.hear().is_none());
        assert_eq!(called.links(), 0);
    }
}

#[test]
fn descriptors_that_nobody_asked_for_do_not_pile_up() {
    let called = Called::new(PeerMemoryPolicy::Auto);
    let peer = Peer::linked(&called, 1);
    let open = || std::fs::read_dir("/proc/self/fd").unwrap().count();
    let before = open();
    for _ in 0..1000 {
        // A newer kernel refuses them; an older one has the engine drop them.
        let _ = socket::send(&peer.fd, &[BELL], &[peer.arena_fd.as_raw_fd()]);
    }
    // Other tests of this process open some meanwhile.
    assert!(open() < before + 500);
    assert_eq!(called.links(), 1);
}

/// Whether it comes out well; a machine that stops for longer than what is waited for gets another try.
fn in_time(mut attempt: impl FnMut() -> bool) -> bool {
    (0..10).any(|_| attempt())
}

#[test]
fn an_access_that_does_not_end_holds_up_one_call_only() {
    let next_is_quick = in_time(|| {
        let called = Called::new(PeerMemoryPolicy::Auto);
        let peer = Peer::linked(&called, 1);
        peer.arena.write(GUARD_AT, &1u32.to_ne_bytes()).unwrap();
        let (_memory, first) = called.region();
        let begin = Instant::now();
        called.engine.dereg_mr(first).unwrap();
        let waited = begin.elapsed();
        assert!(waited >= QUIET_WAIT, "{waited:?}");
        assert!(peer.hear().is_none());
        assert_eq!(called.links(), 0);
        let (_memory, second) = called.region();
        let begin = Instant::now();
        called.engine.dereg_mr(second).unwrap();
        begin.elapsed() < QUIET_WAIT
    });
    assert!(next_is_quick, "the next call waits, too");
}

#[test]
fn a_changed_registration_waits_for_an_access_to_end() {
    const ACCESS: Duration = Duration::from_millis(50);
    let kept = in_time(|| {
        let called = Called::new(PeerMemoryPolicy::Auto);
        let peer = Peer::linked(&called, 1);
        let (_memory, region) = called.region();
        peer.arena.write(GUARD_AT, &1u32.to_ne_bytes()).unwrap();
        let begin = Instant::now();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                std::thread::sleep(ACCESS);
                peer.arena.write(GUARD_AT, &2u32.to_ne_bytes()).unwrap();
            });
            let rights = Some(Access::LOCAL_WRITE);
            called.engine.rereg_mr(region, None, None, rights).unwrap();
            assert!(begin.elapsed() >= ACCESS);
        });
        called.links() == 1
    });
    assert!(kept, "the peer was let go");
}

/// As where the system is short of memory for a moment.
#[test]
fn a_listener_that_failed_once_takes_callers() {
    let called = Called::new(PeerMemoryPolicy::Auto);
    {
        let mut core = called.engine.enter().unwrap();
        let now = core.now();
        let fails = |_: &OwnedFd| Err(io::Error::from_raw_os_error(libc::ENOBUFS));
        core.links.accept_by(now, 0, fails);
        core.run();
    }
    let _peer = Peer::linked(&called, 1);
    assert_eq!(called.links(), 1);
}

#[test]
fn arenas_have_bounds() {
    let called = Called::new(PeerMemoryPolicy::Auto);
    let huge = || {
        let fd = segment::sealed(0, MAX_BYTES as libc::off_t).unwrap();
        let arena = Segment::heap(64);
        Peer { fd: socket::connect(socket::Name::At(called.at)).unwrap(), arena, arena_fd: fd }
    };
    let fit = MAPPED_MAX / MAX_BYTES;
    let mut peers = Vec::new();
    for index in 0..=fit {
        let peer = huge();
        peer.say(Message::Knock([index as u8; 16]), &[]);
        peer.hear().unwrap();
        let hello =
            Hello { engine: [index as u8; 16], gid: own_gid(), everywhere: false, proof_addr: 0 };
        peer.say(Message::Hello(hello), &[&peer.arena_fd]);
        assert_eq!(peer.hear().is_some(), index < fit, "{index} of {fit}");
        if index < fit {
            // Who is not done with it in some time is let go, and makes room.
            peer.conclude(None);
        }
        peers.push(peer);
    }
}

#[test]
fn nobody_speaks_for_an_address_of_another_host() {
    let called = Called::new(PeerMemoryPolicy::Auto);
    // Addresses for documentation belong to nobody (RFC 5737).
    for (name, address, believed) in [(1, [192, 0, 2, 1], false), (2, [127, 0, 0, 9], true)] {
        let (peer, _, _) = Peer::knock(called.at, name);
        let gid = Gid::from(IpAddr::from(address));
        let hello = Hello { engine: [name; 16], gid, everywhere: false, proof_addr: 0 };
        peer.say(Message::Hello(hello), &[&peer.arena_fd]);
        assert_eq!(peer.hear().is_some(), believed, "{address:?}");
    }
}

/// What it gives cannot be mapped: it opened the memory for reading only, or sealed it.
#[test]
fn a_peer_that_gives_memory_of_no_use_has_others_linked_all_the_same() {
    let called = Called::new(PeerMemoryPolicy::Auto);
    let sealed = || {
        let arena_fd = segment::file(c"test", 1 << 20).unwrap();
        let seal = libc::F_SEAL_FUTURE_WRITE;
        // SAFETY: takes integers only.
        assert_eq!(unsafe { libc::fcntl(arena_fd.as_raw_fd(), libc::F_ADD_SEALS, seal) }, 0);
        arena_fd
    };
    let read_only = |peer: &Peer| {
        let path = format!("/proc/self/fd/{}", peer.arena_fd.as_raw_fd());
        std::fs::File::open(path).unwrap().into()
    };
    for name in [1, 2] {
        let (mut peer, ..) = Peer::knock(called.at, name);
        peer.arena_fd = if name == 1 { sealed() } else { read_only(&peer) };
        let hello = Hello { engine: [name; 16], gid: own_gid(), everywhere: false, proof_addr: 0 };
        peer.say(Message::Hello(hello), &[&peer.arena_fd]);
        assert!(peer.hear().is_none(), "it is no peer");
        assert!(called.engine.enter().unwrap().links.usable);
    }
}

/// One that began an access later, for which another call waits, has time for it.
#[test]
fn who_was_not_seen_in_an_access_is_not_cut_off_for_it() {
    let called = Called::new(PeerMemoryPolicy::Auto);
    let stopped = Peer::linked(&called, 1);
    let enter = |peer: &Peer| peer.arena.write(GUARD_AT, &1u32.to_ne_bytes()).unwrap();
    let busy = Peer::linked(&called, 2);
    let end = Instant::now() + PATIENCE;
    while called.links() < 2 {
        assert!(Instant::now() < end, "no second link");
    }
    let regions = [called.region(), called.region()];
    let mut core = called.engine.enter().unwrap();
    let now = core.now();
    let mut seen = Vec::new();
    for (peer, (_, region)) in [&stopped, &busy].into_iter().zip(&regions) {
        seen.push(core.adapter.restless());
        enter(peer);
        core.adapter.dereg_mr(now, *region).unwrap();
        assert!(!core.adapter.memory_is_quiet());
    }
    core.cut_restless(&seen[1]);
    assert_eq!(core.links.by_link.len(), 1);
    drop(core);
    assert!(stopped.hear().is_none());
    busy.arena.write(GUARD_AT, &2u32.to_ne_bytes()).unwrap();
    assert!(called.engine.enter().unwrap().adapter.memory_is_quiet());
}
