//! The library as a C program sees it: two adapters in one process, and careless callers.

use std::ffi::{CStr, CString};
use std::net::SocketAddr;
use std::ptr::{null, null_mut};
use std::time::{Duration, Instant};

use libc::{c_int, sockaddr, sockaddr_in6, sockaddr_storage};
use quipu_cabi::Errno;
use quipu_host::{Config, Engine, Guests, QpipConfig, Sharer, parse_address};

use crate::adapter::*;
use crate::address::{read, storage};
use crate::connection::*;
use crate::cq::*;
use crate::error::*;
use crate::event::*;
use crate::memory::*;
use crate::qp::*;
use crate::settings::*;
use crate::work::*;

mod threads;

const TCP: u32 = 1;
const UDP: u32 = 2;
const BYTES: usize = 4096;

/// What the last call that failed has to say.
fn words() -> String {
    // SAFETY: the text lives until the next call of this thread.
    unsafe { CStr::from_ptr(qpip_error()) }.to_str().unwrap().to_owned()
}

#[track_caller]
fn done(result: c_int) -> c_int {
    assert!(result >= 0, "{}: {}", Errno::last().0, words());
    result
}

#[track_caller]
fn made<T>(object: *mut T) -> *mut T {
    assert!(!object.is_null(), "{}: {}", Errno::last().0, words());
    object
}

/// A call that fails: with that number, and a word about why.
#[track_caller]
fn fails(result: c_int, errno: c_int, word: &str) {
    assert_eq!((result, Errno::last()), (-1, Errno(errno)), "{}", words());
    assert!(words().contains(word), "{}", words());
}

/// An adapter with a queue pair, and memory for it.
struct End {
    adapter: *mut qpip_adapter,
    cq: *mut qpip_cq,
    qp: *mut qpip_qp,
    memory: *mut qpip_memory,
    bytes: Box<[u8; BYTES]>,
}

impl End {
    fn new(kind: u32) -> Self {
        let mut bytes = Box::new([0; BYTES]);
        // SAFETY: what is passed is valid, here and in all of this.
        unsafe {
            let adapter = made(qpip_open(c"udp:127.0.0.1:0".as_ptr(), null()));
            let cq = made(qpip_cq_create(adapter, 16));
            let memory = made(qpip_register(adapter, bytes.as_mut_ptr().cast(), BYTES));
            let qp = made(qpip_create(adapter, &init(kind, cq)));
            Self { adapter, cq, qp, memory, bytes }
        }
    }

    fn address(&self, port: u16) -> sockaddr_storage {
        // SAFETY: as above; a storage consists of integers.
        unsafe {
            let mut own: sockaddr_storage = std::mem::zeroed();
            done(qpip_address(self.adapter, 0, &mut own));
            (&raw mut own).cast::<sockaddr_in6>().as_mut().unwrap().sin6_port = port.to_be();
            own
        }
    }

    fn segment(&mut self, start: usize, length: u32) -> qpip_segment {
        let start = self.bytes[start..].as_mut_ptr().cast();
        // SAFETY: as above.
        qpip_segment { start, length, key: unsafe { qpip_key(self.memory) } }
    }

    fn receive(&mut self, id: u64, start: usize, length: u32) {
        let segments = &self.segment(start, length);
        // SAFETY: as above.
        done(unsafe {
            qpip_post_receive(self.qp, &qpip_receive { id, segments, count: 1, reserved: 0 })
        });
    }

    fn send(&mut self, id: u64, length: u32, flags: u32, to: Option<&sockaddr_storage>) -> c_int {
        let segments = &self.segment(0, length);
        let (to, to_length) = match to {
            Some(to) => ((&raw const *to).cast(), size_of::<sockaddr_in6>() as u32),
            None => (null(), 0),
        };
        let send = qpip_send { id, segments, count: 1, flags, to, to_length };
        // SAFETY: as above.
        unsafe { qpip_post_send(self.qp, &send) }
    }

    fn next(&self) -> qpip_completion {
        // SAFETY: as above; a completion consists of integers.
        unsafe {
            let mut one: qpip_completion = std::mem::zeroed();
            while qpip_poll(self.cq, &mut one, 1) == 0 {
                assert_eq!(qpip_wait(self.cq, 10_000), 1, "nothing came in ten seconds");
            }
            one
        }
    }

    fn event(&self) -> qpip_event {
        // SAFETY: as above.
        unsafe {
            let mut event: qpip_event = std::mem::zeroed();
            while qpip_event(self.adapter, &mut event) == 0 {
                assert_eq!(qpip_wait(self.cq, 10_000), 1, "nothing came in ten seconds");
            }
            assert_eq!(event.qp, self.qp);
            event
        }
    }

    fn end(self) {
        // SAFETY: as above; each is used no more.
        unsafe {
            fails(qpip_cq_destroy(self.cq), libc::EBUSY, "in use");
            done(qpip_destroy(self.qp));
            fails(qpip_close(self.adapter), libc::EBUSY, "destroy");
            done(qpip_cq_destroy(self.cq));
            done(qpip_deregister(self.memory));
            done(qpip_close(self.adapter));
        }
    }
}

fn init(kind: u32, cq: *mut qpip_cq) -> qpip_qp_init {
    qpip_qp_init {
        kind,
        max_sends: 8,
        max_receives: 8,
        max_segments: 0,
        send_cq: cq,
        receive_cq: cq,
        context: null_mut(),
    }
}

#[test]
fn messages_of_tcp() {
    let (mut a, mut b) = (End::new(TCP), End::new(TCP));
    // SAFETY: what is passed is valid, here and in all of this.
    unsafe {
        let listener = made(qpip_listen(b.adapter, 0, 0, 4));
        let port = qpip_listener_port(listener);
        b.receive(1, 0, 1000);
        done(qpip_offer(listener, b.qp));
        fails(qpip_offer(listener, b.qp), libc::EBUSY, "offered");
        let to = b.address(port);
        let length = size_of::<sockaddr_in6>() as u32;
        done(qpip_connect(a.qp, (&raw const to).cast(), length, 0, 0));
        assert_eq!((a.event().kind, b.event().kind), (1, 1));
        let mut peer: sockaddr_storage = std::mem::zeroed();
        done(qpip_ends(a.qp, null_mut(), &mut peer));
        assert_eq!(read((&raw const peer).cast(), length), read((&raw const to).cast(), length));
        a.bytes[..5].copy_from_slice(b"hello");
        done(a.send(7, 5, 0, None));
        let got = b.next();
        assert_eq!((got.id, got.status, got.operation, got.length), (1, 0, 2, 5));
        assert_eq!(b.bytes[..5], b"hello"[..]);
        let sent = a.next();
        assert_eq!((sent.id, sent.status, sent.operation), (7, 0, 1));
        // Copied at once, and without a completion.
        b.receive(2, 100, 1000);
        done(a.send(8, 5, 3, None));
        a.bytes[..5].fill(0);
        assert_eq!((b.next().id, &b.bytes[100..105]), (2, &b"hello"[..]));
        fails(a.send(9, 0, 0, None), libc::EINVAL, "cannot be posted");
        fails(a.send(9, 65, 2, None), libc::EINVAL, "64 bytes");
        fails(a.send(9, 5, 4, None), libc::EINVAL, "flags");
        fails(a.send(9, (1 << 31) + 1, 0, None), libc::EINVAL, "the limit is 2147483648");
        let pieces = [a.segment(0, 1); 5];
        let five = qpip_send {
            id: 9,
            segments: pieces.as_ptr(),
            count: 5,
            flags: 0,
            to: null(),
            to_length: 0,
        };
        fails(qpip_post_send(a.qp, &five), libc::EINVAL, "at most 4 (max_segments");
        fails(a.send(9, 5, 0, Some(&to)), libc::EISCONN, "leave the address");
        // A receive that nothing fills is flushed at the end.
        b.receive(3, 200, 100);
        done(qpip_finish(a.qp));
        assert_eq!(b.event().kind, 2);
        done(qpip_finish(b.qp));
        assert_eq!((a.event().kind, b.event().kind), (2, 3));
        assert_eq!(a.event().kind, 3);
        let flushed = b.next();
        assert_eq!((flushed.id, flushed.status), (3, 1));
        done(qpip_unlisten(listener));
    }
    a.end();
    b.end();
}

#[test]
fn a_peer_is_given_up_as_soon_as_the_settings_say() {
    let (a, b) = (End::new(TCP), End::new(TCP));
    // Nobody is there: its adapter is closed.
    let to = b.address(9);
    b.end();
    let wanted = qpip_settings {
        size: size_of::<qpip_settings>() as u32,
        connect_timeout: 1,
        hop_limit: 9,
        ..qpip_settings::default()
    };
    let (to, length) = ((&raw const to).cast(), size_of::<sockaddr_in6>() as u32);
    // SAFETY: what is passed is valid.
    done(unsafe { qpip_connect_with(a.qp, to, length, 0, 0, &wanted) });
    let kind = a.event().kind;
    assert!(kind == 6 || kind == 4, "{kind}");
    a.end();
}

#[test]
fn datagrams_of_udp_name_their_sender() {
    let (mut a, mut b) = (End::new(UDP), End::new(UDP));
    // SAFETY: what is passed is valid, here and in all of this.
    let (from, to) = unsafe { (done(qpip_bind(a.qp, 0)), done(qpip_bind(b.qp, 5000))) };
    assert_eq!((from > 0, to), (true, 5000));
    b.receive(1, 0, 1000);
    a.bytes[..5].copy_from_slice(b"hello");
    let to = b.address(5000);
    fails(a.send(7, 5, 0, None), libc::EDESTADDRREQ, "address");
    done(a.send(7, 5, 0, Some(&to)));
    let got = b.next();
    assert_eq!((got.id, got.status, got.length), (1, 0, 5));
    let sender = a.address(from as u16);
    let length = size_of::<sockaddr_in6>() as u32;
    // SAFETY: as above.
    let [got, sender] =
        [&got.from, &sender].map(|at| unsafe { read((&raw const *at).cast(), length) });
    assert_eq!(got, sender);
    assert_eq!(a.next().id, 7);
    a.end();
    b.end();
}

#[test]
fn a_refusal_is_an_event_and_the_queue_pair_may_try_again() {
    let (a, b) = (End::new(TCP), End::new(TCP));
    let to = b.address(9);
    let length = size_of::<sockaddr_in6>() as u32;
    for _ in 0..2 {
        // SAFETY: what is passed is valid.
        done(unsafe { qpip_connect(a.qp, (&raw const to).cast(), length, 0, 1) });
        assert_eq!(a.event().kind, 4);
    }
    a.end();
    b.end();
}

#[test]
fn a_wait_ends_in_time() {
    let a = End::new(TCP);
    let begun = Instant::now();
    // SAFETY: what is passed is valid.
    assert_eq!(unsafe { qpip_wait(a.cq, 30) }, 0);
    assert!(begun.elapsed() >= Duration::from_millis(30));
    // SAFETY: as above.
    assert_eq!(unsafe { qpip_wait(a.cq, 0) }, 0);
    a.end();
}

#[test]
fn careless_callers_are_told() {
    let a = End::new(TCP);
    let none = [null_mut::<Opaque>(), a.memory];
    // SAFETY: each is null or an object, though of another kind; the rest is valid.
    unsafe {
        for wrong in none {
            fails(qpip_close(wrong), libc::EINVAL, "valid adapter");
            fails(qpip_cq_destroy(wrong), libc::EINVAL, "valid completion queue");
            fails(qpip_wait(wrong, 0), libc::EINVAL, "valid completion queue");
            fails(qpip_destroy(wrong), libc::EINVAL, "valid queue pair");
            fails(qpip_finish(wrong), libc::EINVAL, "valid queue pair");
            fails(qpip_unlisten(wrong), libc::EINVAL, "valid listener");
        }
        assert_eq!((qpip_key(a.cq), qpip_listener_port(a.cq)), (0, 0));
        fails(qpip_deregister(a.qp), libc::EINVAL, "valid memory");
        fails(qpip_event(a.adapter, null_mut()), libc::EINVAL, "pointer");
        fails(qpip_poll(a.cq, null_mut(), 1), libc::EINVAL, "pointer");
        assert_eq!(qpip_poll(a.cq, null_mut(), 0), 0);
        fails(qpip_post_send(a.qp, null()), libc::EINVAL, "pointer");
        fails(qpip_post_receive(a.qp, null()), libc::EINVAL, "pointer");
        let many = qpip_receive { id: 0, segments: null(), count: 4, reserved: 0 };
        fails(qpip_post_receive(a.qp, &many), libc::EINVAL, "segments");
        assert!(qpip_create(a.adapter, null()).is_null() && words().contains("NULL"));
        assert!(qpip_create(a.adapter, &init(3, a.cq)).is_null() && words().contains("not a type"));
        assert!(qpip_listen(a.adapter, 0, 9, 1).is_null() && words().contains("not a mode"));
        let wrong = qpip_settings { size: 12, traffic_class: 1, ..qpip_settings::default() };
        assert!(qpip_listen_with(a.adapter, 0, 0, 1, &wrong).is_null() && words().contains("ECN"));
        let to = a.address(9);
        let (to, length) = ((&raw const to).cast(), size_of::<sockaddr_in6>() as u32);
        fails(qpip_connect_with(a.qp, to, length, 0, 0, &wrong), libc::EINVAL, "ECN");
        assert!(qpip_register(a.adapter, null_mut(), 4096).is_null());
        assert_eq!(Errno::last(), Errno::EFAULT);
        fails(qpip_ends(a.qp, null_mut(), null_mut()), libc::ENOTCONN, "no connection");
        fails(qpip_abort(a.qp), libc::EBADFD, "state");
        fails(qpip_address(a.adapter, 99, null_mut()), libc::ENOENT, "no further");
        let mut unix = storage("127.0.0.1:1".parse().unwrap());
        unix.ss_family = libc::AF_UNIX as u16;
        let unix: *const sockaddr = (&raw const unix).cast();
        fails(qpip_connect(a.qp, unix, 16, 0, 0), libc::EAFNOSUPPORT, "IPv4 or IPv6");
        fails(qpip_connect(a.qp, null(), 0, 0, 0), libc::EINVAL, "missing");
        assert_eq!(CStr::from_ptr(qpip_status_text(1)).to_bytes()[..7], b"flushed"[..]);
        assert_eq!(CStr::from_ptr(qpip_status_text(99)), c"no status");
    }
    a.end();
}

#[test]
fn allocated_memory_is_the_programs_until_it_is_freed_and_deregistered() {
    // SAFETY: what is passed is valid, or memory that was not allocated here.
    unsafe {
        let adapter = made(qpip_open(c"udp:127.0.0.1:0".as_ptr(), null()));
        let other = made(qpip_open(c"udp:127.0.0.1:0".as_ptr(), null()));
        let memory = made(qpip_allocate(adapter, 2 * BYTES));
        let bytes: *mut u8 = memory.cast();
        assert!(
            (0..2 * BYTES).all(|at| bytes.add(at).read() == 0) && bytes.addr().is_multiple_of(4096)
        );
        let (none, nothing) = (made(qpip_allocate(adapter, 0)), made(qpip_allocate(adapter, 0)));
        assert_ne!(none, nothing);
        for much in [usize::MAX, isize::MAX as usize, 1 << 60] {
            assert!(qpip_allocate(adapter, much).is_null() && words().contains("memory"));
            assert_eq!(Errno::last(), Errno::ENOMEM);
        }
        assert!(qpip_allocate(null_mut(), 64).is_null() && words().contains("valid adapter"));
        fails(qpip_free(other, memory), libc::EINVAL, "no memory");
        fails(qpip_free(adapter, bytes.add(1).cast()), libc::EINVAL, "no memory");
        fails(qpip_free(adapter, null_mut()), libc::EINVAL, "no memory");
        for piece in [none, nothing] {
            done(qpip_free(adapter, piece));
        }
        // A part of it is registered, which keeps it.
        let registered = made(qpip_register(adapter, bytes.add(BYTES).cast(), 64));
        fails(qpip_close(adapter), libc::EBUSY, "free");
        done(qpip_free(adapter, memory));
        fails(qpip_free(adapter, memory), libc::EINVAL, "no memory");
        bytes.add(BYTES).write(7);
        assert_eq!(bytes.add(BYTES).read(), 7);
        fails(qpip_close(adapter), libc::EBUSY, "deregister");
        done(qpip_deregister(registered));
        let kept = made(qpip_allocate(adapter, 1));
        fails(qpip_close(adapter), libc::EBUSY, "free");
        done(qpip_free(adapter, kept));
        done(qpip_close(adapter));
        done(qpip_close(other));
    }
}

/// An adapter that this process shares, and the link that leads to it.
fn shared(name: &str) -> (Sharer, CString) {
    let qpip = Some(QpipConfig::new("udp:127.0.0.1:0".parse().unwrap()));
    let config = Config { qpip, counters: false, ..Config::default() };
    let name = format!("{name}-{}", std::process::id());
    let engine = Engine::open(config).unwrap();
    let sharer = Sharer::start(&engine, &name, &Guests::default()).unwrap();
    (sharer, CString::new(format!("share:{name}")).unwrap())
}

#[test]
fn a_shared_adapter_registers_what_was_allocated_from_it() {
    let (sharer, link) = shared("c");
    // SAFETY: what is passed is valid.
    unsafe {
        let adapter = made(qpip_open(link.as_ptr(), null()));
        let mut own = [0_u8; 64];
        assert!(qpip_register(adapter, own.as_mut_ptr().cast(), 64).is_null());
        assert_eq!(Errno::last(), Errno::EFAULT);
        assert!(words().contains("allocated"), "{}", words());
        assert!(qpip_allocate(adapter, 1 << 40).is_null() && words().contains("QUIPU_ARENA_MB"));
        assert_eq!(Errno::last(), Errno::ENOMEM);

        let [first, second] = [(); 2].map(|()| made(qpip_allocate(adapter, BYTES)));
        let registered = made(qpip_register(adapter, first, BYTES));
        done(qpip_free(adapter, first));
        let third = made(qpip_allocate(adapter, BYTES));
        assert!(third != first && third != second, "it is registered");
        done(qpip_deregister(registered));
        let fourth = made(qpip_allocate(adapter, BYTES));
        assert_eq!(fourth, first, "it is free again");
        fails(qpip_close(adapter), libc::EBUSY, "free");
        for piece in [second, third, fourth] {
            done(qpip_free(adapter, piece));
        }
        done(qpip_close(adapter));
    }
    drop(sharer);
}

#[test]
fn whoever_waits_for_an_adapter_that_is_gone_hears_of_it() {
    let (sharer, link) = shared("c-gone");
    // SAFETY: what is passed is valid.
    unsafe {
        let adapter = made(qpip_open(link.as_ptr(), null()));
        let cq = made(qpip_cq_create(adapter, 16));
        let qp = made(qpip_create(adapter, &init(TCP, cq)));
        let receive = qpip_receive { id: 7, segments: null(), count: 0, reserved: 0 };
        done(qpip_post_receive(qp, &receive));
        assert_eq!(done(qpip_wait(cq, 0)), 0);
        drop(sharer);
        assert_eq!(done(qpip_wait(cq, -1)), 1);
        let mut completion: [qpip_completion; 2] = std::mem::zeroed();
        assert_eq!(done(qpip_poll(cq, completion.as_mut_ptr(), 2)), 1);
        assert_eq!(completion[0].id, 7);
        // Nothing more will come.
        fails(qpip_wait(cq, -1), libc::ENODEV, "quipu nic --share");
        fails(qpip_poll(cq, completion.as_mut_ptr(), 2), libc::ENODEV, "quipu nic --share");
        let mut event: qpip_event = std::mem::zeroed();
        fails(qpip_event(adapter, &mut event), libc::ENODEV, "quipu nic --share");
        done(qpip_destroy(qp));
        done(qpip_cq_destroy(cq));
        done(qpip_close(adapter));
    }
}

#[test]
fn what_cannot_be_opened_says_why() {
    let open = |link: &str, addresses: Option<&str>| {
        let link = CString::new(link).unwrap();
        let addresses = addresses.map(|text| CString::new(text).unwrap());
        // SAFETY: both are null or texts.
        let adapter = unsafe {
            qpip_open(link.as_ptr(), addresses.as_ref().map_or(null(), |text| text.as_ptr()))
        };
        assert!(adapter.is_null());
        (Errno::last(), words())
    };
    let (errno, words) = open("smoke:signals", None);
    assert!(errno == Errno::EINVAL && words.contains("tap:"), "{words}");
    let (errno, words) = open("udp:127.0.0.1:0", Some("10.0.0.1"));
    assert!(errno == Errno::EINVAL && words.contains("10.9.0.2/24"), "{words}");
    let (errno, words) = open("udp:192.0.2.77:0", None);
    assert!(errno == Errno::EADDRNOTAVAIL && words.contains("this host"), "{words}");
}

#[test]
fn what_the_program_does_not_say_the_environment_does() {
    let environment = |name: &str| match name {
        "QUIPU_QPIP_LINK" => Some("smoke:signals".into()),
        "QUIPU_QPIP_ADDRESS" => Some("fd09::2/64".into()),
        "QUIPU_QPIP_GATEWAY" => Some("fd09::1".into()),
        _ => None,
    };
    let read = |link, addresses| {
        let config = config(link, addresses, environment)?.qpip.unwrap();
        Ok((config.link.to_string(), config.addresses, config.gateways))
    };
    let link = "udp:127.0.0.1:0".to_owned();
    let own = |address: &str| vec![parse_address(address).unwrap()];
    let gateways = vec!["fd09::1".parse().unwrap()];
    let from_environment = (link.clone(), own("fd09::2/64"), gateways.clone());
    assert_eq!(read(Some(&link), None), Ok(from_environment));
    let given = (link.clone(), own("fd09::3/64"), gateways);
    assert_eq!(read(Some(&link), Some("fd09::3/64")), Ok(given));
    // Empty: none, whatever the environment says.
    for none in ["", " "] {
        assert_eq!(read(Some(&link), Some(none)).map(|it| it.1), Ok(vec![]));
    }
    assert_eq!(read(Some(&link), Some(",")), Err(Errno::EINVAL));
    assert_eq!(read(None, None), Err(Errno::EINVAL));
    assert!(words().contains("it must be tap:NAME"), "{}", words());
}

#[test]
fn ports_that_are_taken_and_peers_out_of_reach_have_numbers_of_their_own() {
    let (a, b) = (End::new(TCP), End::new(UDP));
    let (sharer, link) = shared("taken");
    // SAFETY: what is passed is valid.
    unsafe {
        let elsewhere = made(qpip_open(link.as_ptr(), null()));
        for adapter in [a.adapter, elsewhere] {
            let listener = made(qpip_listen(adapter, 7, 0, 1));
            assert!(qpip_listen(adapter, 7, 0, 1).is_null());
            assert_eq!(Errno::last(), Errno::EADDRINUSE);
            done(qpip_unlisten(listener));
        }
        done(qpip_close(elsewhere));
        drop(sharer);
        let port = done(qpip_bind(b.qp, 0));
        let other = made(qpip_create(b.adapter, &init(UDP, b.cq)));
        fails(qpip_bind(other, port as u16), libc::EADDRINUSE, "already");
        done(qpip_destroy(other));
        let far = storage("10.0.0.1:7".parse().unwrap());
        let length = size_of::<sockaddr_storage>() as u32;
        let far = (&raw const far).cast();
        fails(qpip_connect(a.qp, far, length, 0, 0), libc::ENETUNREACH, "no route");
    }
    a.end();
    b.end();
}

#[test]
fn a_completion_too_many_is_said_so() {
    let end = End::new(UDP);
    // SAFETY: what is passed is valid.
    unsafe {
        // The least that a queue has.
        const ENTRIES: u32 = 16;
        let cq = made(qpip_cq_create(end.adapter, 1));
        let init = qpip_qp_init { max_sends: 2 * ENTRIES, ..init(UDP, cq) };
        let qp = made(qpip_create(end.adapter, &init));
        let to = end.address(done(qpip_bind(qp, 0)) as u16);
        let to = (&raw const to).cast();
        let send = qpip_send {
            id: 1,
            segments: null(),
            count: 0,
            flags: 0,
            to,
            to_length: size_of::<sockaddr_in6>() as u32,
        };
        for _ in 0..=ENTRIES {
            done(qpip_post_send(qp, &send));
        }
        let mut one: qpip_completion = std::mem::zeroed();
        for _ in 0..ENTRIES {
            assert_eq!((qpip_wait(cq, 0), qpip_poll(cq, &mut one, 1)), (1, 1));
        }
        fails(qpip_poll(cq, &mut one, 1), libc::EOVERFLOW, "overran");
        assert_eq!(qpip_wait(cq, -1), 1, "to be polled, which says so");
        done(qpip_destroy(qp));
        done(qpip_cq_destroy(cq));
    }
    end.end();
}

#[test]
fn addresses_are_those_of_the_c_library() {
    for text in ["10.1.2.3:4", "[fd00::5]:65535"] {
        let address: SocketAddr = text.parse().unwrap();
        let raw = storage(address);
        let length = size_of::<sockaddr_storage>() as u32;
        // SAFETY: it has that length.
        let back = |length| unsafe { read((&raw const raw).cast(), length) };
        assert_eq!(back(length), Ok(address));
        assert_eq!(back(4), Err(Errno::EINVAL), "cut");
    }
}
