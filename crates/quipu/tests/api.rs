//! The library as a program uses it: within one device, between two devices that share memory, and
//! between two that speak TCP.

use std::io::Write;
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::Duration;

use quipu::{
    Access, Completion, CompletionQueue, Config, Connection, DatagramAddress, Device, Error,
    Listener, MemoryRegion, ProtectionDomain, QpState, QueuePair, ROUTE_HEADER, Request, SameHost,
    WcExtra, WcOpcode, WcStatus,
};

/// All that a program may set is named by this crate.
#[test]
fn the_settings_of_a_device_have_names() {
    use quipu::{
        CaptureConfig, Crc, DeviceModel, Ignored, LinkLayer, PeerMemoryPolicy, SharedPages,
        StrictMode, StrictOrder, WriteOrder,
    };
    let order = WriteOrder::Reverse;
    let config = Config {
        address: Some("127.0.0.1".parse().unwrap()),
        devices: vec![DeviceModel::Quipu0],
        cm_device: DeviceModel::Quipu0,
        link_layer: LinkLayer::Ethernet,
        same_host: SameHost::Auto,
        peer_memory: PeerMemoryPolicy::Never,
        shared_pages: SharedPages::Never,
        crc: Crc::Always,
        strict: Some(StrictMode::Report),
        strict_log: Some("/dev/null".into()),
        strict_ignore: Ignored::default(),
        strict_order: Some(StrictOrder { order, ..StrictOrder::default() }),
        capture: None::<CaptureConfig>,
        ..Config::default()
    };
    Device::open(config).unwrap();
}

/// One side of a connection.
struct Side {
    pd: ProtectionDomain,
    cq: CompletionQueue,
    qp: QueuePair,
    memory: MemoryRegion,
}

const SIZE: usize = 1 << 16;

fn side(device: &Device) -> Side {
    let pd = device.protection_domain().unwrap();
    let cq = device.completion_queue(64).unwrap();
    let qp = pd.queue_pair(&cq, &cq).build().unwrap();
    let memory = pd.register(SIZE, Access::LOCAL_WRITE | Access::REMOTE).unwrap();
    Side { pd, cq, qp, memory }
}

fn device(same_host: SameHost) -> Device {
    let address = Some("127.0.0.1".parse().unwrap());
    Device::open(Config { address, same_host, ..Config::default() }).unwrap()
}

/// Pairs of sides over each way that bytes can go.
fn pairs() -> Vec<(&'static str, Side, Side)> {
    let own = device(SameHost::Auto);
    let ways = [
        ("own", own.clone(), own),
        ("shared memory", device(SameHost::Auto), device(SameHost::Auto)),
        ("TCP", device(SameHost::Never), device(SameHost::Never)),
    ];
    let connected = ways.map(|(way, left, right)| {
        let (left, right) = (side(&left), side(&right));
        left.qp.connect(&right.qp.endpoint()).unwrap();
        right.qp.connect(&left.qp.endpoint()).unwrap();
        (way, left, right)
    });
    connected.into()
}

#[test]
fn a_send_fills_a_receive() {
    for (way, left, right) in pairs() {
        left.memory.write(0, b"some words").unwrap();
        right.qp.post_recv(7, &[right.memory.sge(100, 10).unwrap()]).unwrap();
        let words = [left.memory.sge(0, 4).unwrap(), left.memory.sge(4, 6).unwrap()];
        left.qp.post_send(&Request::send(&words).with_imm(0xfeed).id(8)).unwrap();

        let received = right.cq.next().unwrap();
        assert_eq!((received.wr_id, received.byte_len), (7, 10), "{way}");
        assert_eq!(received.extra, WcExtra::Imm(0xfeed), "{way}");
        assert_eq!(right.memory.to_vec(100, 10).unwrap(), b"some words", "{way}");
        let sent = left.cq.next().unwrap();
        assert_eq!((sent.wr_id, sent.opcode), (8, WcOpcode::Send), "{way}");
    }
}

#[test]
fn memory_of_the_peer_is_written_read_and_changed() {
    for (way, left, right) in pairs() {
        let remote = right.memory.remote(64, 8).unwrap();
        let local = [left.memory.sge(0, 8).unwrap()];
        left.qp.post_send(&Request::write_inline(&40u64.to_ne_bytes(), remote)).unwrap();
        left.qp.post_send(&Request::fetch_add(&local, remote, 2).id(1)).unwrap();
        left.cq.next().unwrap();
        assert_eq!(left.cq.next().unwrap().opcode, WcOpcode::FetchAdd, "{way}");
        assert_eq!(left.memory.to_vec(0, 8).unwrap(), 40u64.to_ne_bytes(), "{way}");

        left.qp.post_send(&Request::compare_swap(&local, remote, 42, 7)).unwrap();
        left.cq.next().unwrap();
        assert_eq!(left.memory.to_vec(0, 8).unwrap(), 42u64.to_ne_bytes(), "{way}");
        left.qp.post_send(&Request::read(&local, remote)).unwrap();
        left.cq.next().unwrap();
        assert_eq!(left.memory.to_vec(0, 8).unwrap(), 7u64.to_ne_bytes(), "{way}");
        assert_eq!(right.memory.to_vec(64, 8).unwrap(), 7u64.to_ne_bytes(), "{way}");
    }
}

#[test]
fn words_are_stored_whole_and_flushes_complete_behind_what_was_written() {
    for (way, left, right) in pairs() {
        let here = [left.memory.sge(0, 5000).unwrap()];
        let there = right.memory.remote(0, 8192).unwrap();
        left.memory.write(0, &[7; 5000]).unwrap();
        let word = 0x0102_0304_0506_0708u64.to_ne_bytes();
        let requests = [
            Request::write(&here, there).unsignaled(),
            Request::flush(there.slice(0, 5000)).id(1),
            Request::atomic_write(&word, there.slice(5000, 8)).with_imm(9).id(2),
            Request::flush_region(there.slice(u64::MAX, u64::MAX)).fence().id(3),
        ];
        left.qp.post_sends(&requests).unwrap();
        let (flush, written) = (WcOpcode::Flush, WcOpcode::AtomicWrite);
        for (id, opcode) in [(1, flush), (2, written), (3, flush)] {
            let done = left.cq.next().unwrap();
            assert_eq!((done.wr_id, done.opcode), (id, opcode), "{way}");
        }
        assert_eq!(right.memory.to_vec(0, 5000).unwrap(), [7; 5000], "{way}");
        assert_eq!(right.memory.to_vec(5000, 8).unwrap(), word, "{way}");
    }
}

#[test]
fn flushes_and_atomic_writes_that_are_not_granted_fail() {
    let (access, invalid) = (WcStatus::RemAccessErr, WcStatus::RemInvReqErr);
    let word = [1; 8];
    for (way, left, right) in pairs() {
        let odd = Request::atomic_write(&word, right.memory.remote(4, 8).unwrap());
        assert!(
            matches!(left.qp.post_send(&odd), Err(Error::Engine(_))),
            "{way}: no multiple of 8"
        );
        let beyond = right.memory.remote(0, SIZE).unwrap().slice(1, SIZE as u64);
        left.qp.post_send(&Request::flush(beyond)).unwrap();
        assert_eq!(left.cq.next().unwrap_err().work_status(), Some(access), "{way}");
    }
    for (way, left, right) in pairs() {
        let region = right.pd.register(64, Access::LOCAL_WRITE | Access::REMOTE_WRITE).unwrap();
        let there = region.remote(0, 8).unwrap();
        left.qp.post_send(&Request::atomic_write(&word, there)).unwrap();
        assert_eq!(left.cq.next().unwrap().opcode, WcOpcode::AtomicWrite, "{way}");
        left.qp.post_send(&Request::flush(there)).unwrap();
        assert_eq!(left.cq.next().unwrap_err().work_status(), Some(access), "{way}");
    }
    for (way, left, right) in pairs() {
        let region = right.pd.register(64, Access::LOCAL_WRITE).unwrap();
        left.qp.post_send(&Request::atomic_write(&word, region.remote(0, 8).unwrap())).unwrap();
        assert_eq!(left.cq.next().unwrap_err().work_status(), Some(access), "{way}");
        assert_eq!(region.to_vec(0, 8).unwrap(), [0; 8], "{way}");
    }
    let device = device(SameHost::Auto);
    let (left, right) = (side(&device), side(&device));
    let grants = Access::REMOTE_WRITE | Access::REMOTE_READ;
    let qp = right.pd.queue_pair(&right.cq, &right.cq).remote_access(grants).build().unwrap();
    left.qp.connect(&qp.endpoint()).unwrap();
    qp.connect(&left.qp.endpoint()).unwrap();
    left.qp.post_send(&Request::flush(right.memory.remote(0, 8).unwrap())).unwrap();
    assert_eq!(left.cq.next().unwrap_err().work_status(), Some(invalid));
}

/// Queue pairs without answers have neither.
#[test]
fn unreliable_queue_pairs_refuse_flushes_and_atomic_writes() {
    let device = device(SameHost::Auto);
    let (left, right) = (side(&device), side(&device));
    let build = |side: &Side| side.pd.queue_pair(&side.cq, &side.cq).unreliable().build().unwrap();
    let (from, to) = (build(&left), build(&right));
    from.connect(&to.endpoint()).unwrap();
    to.connect(&from.endpoint()).unwrap();
    let there = right.memory.remote(0, 8).unwrap();
    for request in [Request::flush(there), Request::atomic_write(&[1; 8], there)] {
        let error = from.post_send(&request).unwrap_err().to_string();
        assert!(error.contains("no such operation"), "{error}");
    }
}

#[test]
fn a_list_of_receives_is_posted_as_far_as_the_queue_has_room() {
    for (way, left, right) in pairs() {
        let room = right.qp.capacity().max_recv_wr;
        let memory = [right.memory.sge(0, 8).unwrap()];
        let receives: Vec<_> = (0..u64::from(room) + 5).map(|id| (id, &memory[..])).collect();
        let (taken, _full) = right.qp.post_recvs(&receives).unwrap_err();
        assert_eq!(taken, room as usize, "{way}");
        right.qp.post_recvs(&[]).unwrap();
        let words = [left.memory.sge(0, 8).unwrap()];
        left.qp.post_sends(&[Request::send(&words).unsignaled(), Request::send(&words)]).unwrap();
        for id in [0, 1] {
            assert_eq!(right.cq.next().unwrap().wr_id, id, "{way}");
        }
    }
}

#[test]
fn a_moderated_queue_tells_of_many_completions_at_once() {
    for (way, left, right) in pairs() {
        let (words, to) = ([left.memory.sge(0, 8).unwrap()], right.memory.remote(0, 8).unwrap());
        let write = |count: usize| {
            left.qp.post_sends(&vec![Request::write(&words, to); count]).unwrap();
        };
        let told = || {
            left.cq.wait_event().unwrap();
            left.cq.poll(&mut [Completion::default(); 8]).unwrap()
        };
        // The times of C programs have an end, those of Rust do not.
        left.cq.moderate(3, Duration::MAX).unwrap();
        left.cq.request_event(false).unwrap();
        write(2);
        thread::scope(|scope| {
            scope.spawn(|| {
                thread::sleep(Duration::from_millis(20));
                write(1);
            });
            assert_eq!(told(), 3, "{way}");
        });
        left.cq.moderate(3, Duration::from_millis(1)).unwrap();
        left.cq.request_event(false).unwrap();
        write(2);
        // Where the machine stands still between the two, each has an event of its own.
        let first = told();
        if first < 2 {
            left.cq.request_event(false).unwrap();
            assert_eq!(told(), 2 - first, "{way}");
        }
    }
}

#[test]
fn a_list_of_requests_completes_in_order_and_only_where_signalled() {
    for (way, left, right) in pairs() {
        let piece = [left.memory.sge(0, 1000).unwrap()];
        let remote = right.memory.remote(0, 1000).unwrap();
        let requests: Vec<_> = (0..50)
            .map(|id| {
                let request = Request::write(&piece, remote).id(id);
                if id % 10 == 9 { request } else { request.unsignaled() }
            })
            .collect();
        left.qp.post_sends(&requests).unwrap();
        for id in [9, 19, 29, 39, 49] {
            assert_eq!(left.cq.next().unwrap().wr_id, id, "{way}");
        }
        assert_eq!(left.cq.poll(&mut [Completion::default()]).unwrap(), 0, "{way}");
    }
}

#[test]
fn a_key_that_was_not_given_ends_the_connection() {
    for (way, left, right) in pairs() {
        let mut remote = right.memory.remote(0, 8).unwrap();
        remote.rkey.0 ^= 0x1234;
        left.qp.post_send(&Request::write_inline(b"8 bytes!", remote).id(3)).unwrap();
        let error = left.cq.next().unwrap_err();
        assert_eq!(error.work_status(), Some(WcStatus::RemAccessErr), "{way}: {error}");
        assert_eq!(left.qp.state().unwrap(), QpState::Err, "{way}");
        assert_eq!(right.memory.to_vec(0, 8).unwrap(), [0; 8], "{way}");
    }
}

#[test]
fn a_region_that_was_dropped_is_out_of_reach() {
    for (way, left, right) in pairs() {
        let region = right.pd.register(64, Access::LOCAL_WRITE | Access::REMOTE).unwrap();
        let remote = region.remote(0, 64).unwrap();
        drop(region);
        left.qp.post_send(&Request::write_inline(b"x", remote)).unwrap();
        let error = left.cq.next().unwrap_err();
        assert_eq!(error.work_status(), Some(WcStatus::RemAccessErr), "{way}: {error}");
    }
}

#[test]
fn receives_can_be_shared() {
    let device = device(SameHost::Auto);
    let pd = device.protection_domain().unwrap();
    let cq = device.completion_queue(64).unwrap();
    let srq = pd.shared_receive_queue(8, 1).unwrap();
    let memory = pd.register(64, Access::LOCAL_WRITE).unwrap();
    let pairs: Vec<_> = (0..3)
        .map(|_| {
            let from = pd.queue_pair(&cq, &cq).build().unwrap();
            let to = pd.queue_pair(&cq, &cq).shared_receive_queue(&srq).build().unwrap();
            from.connect(&to.endpoint()).unwrap();
            to.connect(&from.endpoint()).unwrap();
            (from, to)
        })
        .collect();
    for (index, (from, to)) in pairs.iter().enumerate() {
        srq.post_recv(index as u64, &[memory.sge(index * 8, 8).unwrap()]).unwrap();
        let byte = [index as u8 + 1];
        from.post_send(&Request::send_inline(&byte).unsignaled()).unwrap();
        let received = cq.next().unwrap();
        assert_eq!((received.wr_id, received.qp_num), (index as u64, to.number()));
        assert_eq!(memory.to_vec(index * 8, 1).unwrap(), byte);
    }
}

#[test]
fn a_waiter_sleeps_until_the_message_comes() {
    for (way, left, right) in pairs() {
        right.qp.post_recv(1, &[right.memory.sge(0, 8).unwrap()]).unwrap();
        let received = thread::scope(|scope| {
            let waiter = scope.spawn(|| right.cq.next().unwrap());
            left.qp.post_send(&Request::send_inline(b"wake up!")).unwrap();
            left.cq.next().unwrap();
            waiter.join().unwrap()
        });
        assert_eq!(received.byte_len, 8, "{way}");
    }
}

#[test]
fn of_two_waiters_each_gets_one_of_two_completions() {
    for (way, left, right) in pairs() {
        for round in 0..5 {
            let (says, hears) = mpsc::channel();
            for id in 0..2 {
                right.qp.post_recv(id, &[]).unwrap();
                let (says, cq) = (says.clone(), right.cq.clone());
                thread::spawn(move || says.send(cq.next().unwrap().wr_id));
            }
            thread::sleep(Duration::from_millis(10));
            let send = Request::send(&[]).unsignaled();
            left.qp.post_sends(&[send, send]).unwrap();
            for _ in 0..2 {
                let woken = hears.recv_timeout(Duration::from_secs(20));
                assert!(woken.is_ok(), "{way}, round {round}: nobody wakes it");
            }
        }
    }
}

#[test]
fn objects_of_two_devices_are_not_mixed() {
    let [one, other] = [(); 2].map(|()| side(&device(SameHost::Auto)));
    assert!(one.pd.queue_pair(&one.cq, &other.cq).build().is_err());
    assert!(one.pd.queue_pair(&other.cq, &one.cq).build().is_err());
    let srq = other.pd.shared_receive_queue(4, 1).unwrap();
    assert!(one.pd.queue_pair(&one.cq, &one.cq).shared_receive_queue(&srq).build().is_err());
    let qp = one.pd.queue_pair(&one.cq, &one.cq).build_datagram(1).unwrap();
    let to = [&one, &other].map(|side| side.pd.destination(&qp.address()).unwrap());
    assert!(qp.send_to(&Request::send_inline(b"x"), &to[1]).is_err());
    qp.send_to(&Request::send_inline(b"x"), &to[0]).unwrap();
}

#[test]
fn memory_that_counts_from_zero_is_named_so() {
    let device = device(SameHost::Auto);
    let (left, right) = (side(&device), side(&device));
    left.qp.connect(&right.qp.endpoint()).unwrap();
    right.qp.connect(&left.qp.endpoint()).unwrap();
    let memory = left.pd.register(64, Access::LOCAL_WRITE | Access::ZERO_BASED).unwrap();
    memory.write(8, b"zero").unwrap();
    right.qp.post_recv(1, &[right.memory.sge(0, 8).unwrap()]).unwrap();
    left.qp.post_send(&Request::send(&[memory.sge(8, 4).unwrap()])).unwrap();
    right.cq.next().unwrap();
    assert_eq!(right.memory.to_vec(0, 4).unwrap(), b"zero");
}

#[test]
fn endpoints_travel_over_a_stream() {
    let device = device(SameHost::Auto);
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let (left, right) = (side(&device), side(&device));
    thread::scope(|scope| {
        let accepting = scope.spawn(|| {
            right.qp.connect_over(&mut listener.accept().unwrap().0).unwrap();
        });
        left.qp.connect_over(&mut TcpStream::connect(address).unwrap()).unwrap();
        accepting.join().unwrap();
    });
    right.qp.post_recv(1, &[]).unwrap();
    left.qp.post_send(&Request::send(&[])).unwrap();
    left.cq.next().unwrap();
    assert_eq!(right.cq.next().unwrap().byte_len, 0);
}

#[test]
fn faults_of_the_caller_are_named() {
    let device = device(SameHost::Auto);
    let side = side(&device);
    let error = side.memory.sge(SIZE - 1, 2).unwrap_err();
    assert!(matches!(error, Error::OutOfBounds { region: SIZE, .. }), "{error}");
    assert!(side.memory.write(usize::MAX, b"x").is_err());
    let far = [side.memory.sge(usize::MAX, 0).err(), side.memory.remote(usize::MAX, 1).err()];
    for error in far.into_iter().chain([side.memory.to_vec(usize::MAX, 0).err()]) {
        assert!(matches!(error, Some(Error::OutOfBounds { .. })), "{error:?}");
    }
    assert!(side.qp.post_send(&Request::send(&[])).is_err(), "not connected yet");
    assert!(device.completion_queue(0).is_err());
    let elsewhere = Config { address: Some("203.0.113.1".parse().unwrap()), ..Config::default() };
    let error = Device::open(elsewhere).unwrap_err().to_string();
    assert!(error.contains("203.0.113.1") && error.contains("127.0.0.1"), "{error}");
}

fn loopback() -> Device {
    let address = Some("127.0.0.1".parse().unwrap());
    Device::open(Config { address, ..Config::default() }).unwrap()
}

#[test]
fn connections_by_address_are_refused_with_a_reason() {
    let device = loopback();
    let (pd, cq) = (device.protection_domain().unwrap(), device.completion_queue(16).unwrap());
    let listener = Listener::bind(&device, "127.0.0.1:0".parse().unwrap()).unwrap();
    let to = listener.address().unwrap();
    let open = || Connection::open(pd.queue_pair(&cq, &cq).build().unwrap(), to, b"please");
    std::thread::scope(|scope| {
        let server = scope.spawn(|| listener.next().unwrap().reject(b"no"));
        match open() {
            Err(Error::Rejected { reason: 28, private_data }) => {
                assert!(private_data.starts_with(b"no\0"));
            }
            other => panic!("{other:?}"),
        }
        server.join().unwrap().unwrap();
        // Dropped without a word.
        let server = scope.spawn(|| drop(listener.next().unwrap()));
        assert!(matches!(open(), Err(Error::Rejected { .. } | Error::Connection { .. })));
        server.join().unwrap();
    });
    drop(listener);
    assert!(matches!(open(), Err(Error::Rejected { reason: 8, .. })));
    let taken = Connection::open(pd.queue_pair(&cq, &cq).build().unwrap(), to, &[0; 57]);
    assert!(matches!(taken, Err(Error::Engine(_))), "too much private data");
}

/// A listener with a device, for a queue pair of which it can be asked.
fn listening() -> (Listener, impl Fn() -> QueuePair + Clone + Send + 'static) {
    let device = loopback();
    let listener = Listener::bind(&device, "127.0.0.1:0".parse().unwrap()).unwrap();
    let (pd, cq) = (device.protection_domain().unwrap(), device.completion_queue(16).unwrap());
    (listener, move || pd.queue_pair(&cq, &cq).build().unwrap())
}

#[test]
fn a_stranger_that_comes_and_goes_does_not_end_a_listener() {
    let (listener, build) = listening();
    let to = listener.address().unwrap();
    let mut stranger = TcpStream::connect(to).unwrap();
    stranger.write_all(b"MPA ID Req Frame\x00\x01\x00\x00").unwrap();
    drop(stranger);
    thread::sleep(Duration::from_millis(100));
    let client = build.clone();
    let client = thread::spawn(move || Connection::open(client(), to, b"honest").map(drop));
    let request = listener.next().unwrap();
    assert!(request.private_data().starts_with(b"honest"));
    request.accept(build(), b"").unwrap();
    client.join().unwrap().unwrap();
}

#[test]
fn queue_pairs_of_another_device_are_not_connected() {
    let (listener, build) = listening();
    let to = listener.address().unwrap();
    let (_, elsewhere) = listening();
    let client = thread::spawn(move || Connection::open(build(), to, b"").map(drop));
    let refused = listener.next().unwrap().accept(elsewhere(), b"");
    assert!(matches!(refused, Err(Error::Engine(_))), "{refused:?}");
    assert!(client.join().unwrap().is_err());
}

/// Else both ends would take for a connection what carries nothing.
#[test]
fn a_queue_pair_of_another_service_than_the_peers_is_not_connected() {
    let device = loopback();
    let (pd, cq) = (device.protection_domain().unwrap(), device.completion_queue(16).unwrap());
    let listener = Listener::bind(&device, "127.0.0.1:0".parse().unwrap()).unwrap();
    let to = listener.address().unwrap();
    let (reliable, unreliable) =
        (|| pd.queue_pair(&cq, &cq), || pd.queue_pair(&cq, &cq).unreliable());
    for (here, there) in [(unreliable(), reliable()), (reliable(), unreliable())] {
        let (here, there) = (here.build().unwrap(), there.build().unwrap());
        let client = thread::spawn(move || Connection::open(here, to, b"").map(drop));
        let refused = listener.next().unwrap().accept(there, b"");
        assert!(matches!(refused, Err(Error::Engine(_))), "{refused:?}");
        let refused = client.join().unwrap();
        assert!(matches!(refused, Err(Error::Rejected { reason: 28, .. })), "{refused:?}");
    }
}

#[test]
fn the_end_of_a_connection_is_told_to_all_that_ask() {
    let (listener, build) = listening();
    let to = listener.address().unwrap();
    let client = build.clone();
    let client = thread::spawn(move || Connection::open(client(), to, b"").unwrap());
    let connection = Arc::new(listener.next().unwrap().accept(build(), b"").unwrap());
    let (says, hears) = mpsc::channel();
    for _ in 0..2 {
        let (says, connection) = (says.clone(), Arc::clone(&connection));
        thread::spawn(move || says.send(connection.wait_end()));
    }
    drop(client.join().unwrap());
    for _ in 0..2 {
        hears.recv_timeout(Duration::from_secs(20)).expect("it hangs").unwrap();
    }
}

/// Both ends learn of the end, also without a word.
#[test]
fn unreliable_connections_by_address_end() {
    let device = loopback();
    let (pd, cq) = (device.protection_domain().unwrap(), device.completion_queue(16).unwrap());
    let listener = Listener::bind(&device, "127.0.0.1:0".parse().unwrap()).unwrap();
    let to = listener.address().unwrap();
    let recvs = device.completion_queue(16).unwrap();
    let build = || pd.queue_pair(&cq, &recvs).unreliable().build().unwrap();
    for polite in [true, false] {
        std::thread::scope(|scope| {
            let server = scope.spawn(|| {
                let (qp, recvs) = (build(), &recvs);
                qp.post_recv(8, &[]).unwrap();
                let connection = listener.next().unwrap().accept(qp, b"").unwrap();
                connection.wait_end()?;
                // What it waited for is flushed, unless it came.
                match recvs.next() {
                    Err(Error::Work(wc)) if wc.status == WcStatus::WrFlushErr => Ok(()),
                    other => other.map(drop),
                }
            });
            let connection = Connection::open(build(), to, b"").unwrap();
            connection.post_send(&Request::send_inline(b"lost").id(1)).unwrap();
            assert_eq!(cq.next().unwrap().wr_id, 1);
            if polite {
                connection.disconnect().unwrap();
                connection.wait_end().unwrap();
            }
            drop(connection);
            server.join().unwrap().unwrap();
        });
    }
}

#[test]
fn datagrams_reach_whom_they_are_for() {
    let device = loopback();
    let (pd, cq) = (device.protection_domain().unwrap(), device.completion_queue(16).unwrap());
    let recvs = device.completion_queue(16).unwrap();
    let make = || pd.queue_pair(&cq, &recvs).build_datagram(0x77).unwrap();
    let (here, there) = (make(), make());
    let memory = pd.register(8192, Access::LOCAL_WRITE).unwrap();
    there.post_recv(9, &[memory.sge(0, 4096).unwrap()]).unwrap();
    // A wrong Q_Key, and a message that is too long: neither arrives, and neither is an error.
    let stranger = DatagramAddress { qkey: 0x78, ..there.address() };
    here.send_to(&Request::send_inline(b"no"), &pd.destination(&stranger).unwrap()).unwrap();
    let to = pd.destination(&there.address()).unwrap();
    let long = [memory.sge(0, here.max_message().unwrap() + 1).unwrap()];
    here.send_to(&Request::send(&long), &to).unwrap();
    here.send_to(&Request::send_inline(b"yes").with_imm(5), &to).unwrap();
    for _ in 0..3 {
        assert_eq!(cq.next().unwrap().status, WcStatus::Success);
    }
    let got = recvs.next().unwrap();
    assert_eq!((got.wr_id, got.byte_len as usize), (9, ROUTE_HEADER + 3));
    assert_eq!((got.extra, got.src_qp), (WcExtra::Imm(5), here.address().qp_num));
    assert_eq!(memory.to_vec(ROUTE_HEADER, 3).unwrap(), b"yes");
    // No datagram queue pair does what a connection can.
    assert!(here.send_to(&Request::send_inline(b"x").invalidating(quipu::Key(1)), &to).is_err());
    assert!(here.join("127.0.0.1".parse().unwrap()).is_err());
    assert!(here.leave("239.7.7.7".parse().unwrap()).is_err());
}
