//! Active Messages between two ports of one process.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use quipu::am::{
    Bundle, CallError, Category, Config, Endpoint, Error, Kind, Message, Mode, Name, Operation,
    Port, Status, Tag, Transport,
};
use quipu::{Access, Device, SameHost};

const TAG: Tag = Tag(0x1234_5678_9abc);
const PATIENCE: Duration = Duration::from_secs(60);

/// A port with an endpoint.
struct End {
    endpoint: Endpoint,
    bundle: Bundle,
    port: Port,
}

impl End {
    fn new(config: Config) -> Self {
        Self::with(config, SameHost::Auto)
    }

    fn with(config: Config, same_host: SameHost) -> Self {
        Self::over(config, same_host, Transport::Reliable)
    }

    fn over(config: Config, same_host: SameHost, transport: Transport) -> Self {
        let device = quipu::Config {
            address: Some("127.0.0.1".parse().unwrap()),
            same_host,
            ..quipu::Config::default()
        };
        let device = Device::open(device).unwrap();
        let port = Port::open_over(&device, config, transport).unwrap();
        let bundle = port.bundle(Mode::Sequential);
        let endpoint = bundle.endpoint().unwrap();
        endpoint.set_tag(TAG).unwrap();
        Self { endpoint, bundle, port }
    }

    fn pair() -> [Self; 2] {
        Self::pair_by(SameHost::Auto)
    }

    fn pair_by(same_host: SameHost) -> [Self; 2] {
        Self::mapped([(); 2].map(|()| Self::with(Config::default(), same_host)))
    }

    fn pair_over(transport: Transport) -> [Self; 2] {
        Self::mapped([(); 2].map(|()| Self::over(Config::default(), SameHost::Auto, transport)))
    }

    fn mapped(ends: [Self; 2]) -> [Self; 2] {
        ends[0].endpoint.map(0, ends[1].endpoint.name().unwrap(), TAG).unwrap();
        ends[1].endpoint.map(0, ends[0].endpoint.name().unwrap(), TAG).unwrap();
        ends
    }
}

/// Polls both ends until something is so.
#[track_caller]
fn until(ends: &[End; 2], mut is_so: impl FnMut() -> bool) {
    let began = Instant::now();
    while !is_so() {
        assert!(began.elapsed() < PATIENCE, "it does not come about");
        ends[0].bundle.poll().unwrap();
        ends[1].bundle.poll().unwrap();
    }
}

/// Sends by an end whose peer has to be polled meanwhile.
#[track_caller]
fn send(ends: &[End; 2], mut attempt: impl FnMut() -> Result<(), Error>) {
    until(ends, || match attempt() {
        Err(Error::Call(CallError::WouldBlock)) => false,
        sent => {
            sent.unwrap();
            true
        }
    });
}

/// Notes what a handler gets.
fn note<T: Send + 'static>(
    place: &Arc<Mutex<Vec<T>>>,
    read: impl Fn(&mut Message<'_>) -> T + Send + Sync + 'static,
) -> impl Fn(&mut Message<'_>) + Send + Sync + 'static {
    let place = Arc::clone(place);
    move |message| {
        let what = read(message);
        place.lock().unwrap().push(what);
    }
}

#[test]
fn a_request_is_replied_to_with_all_numbers_of_arguments() {
    check_arguments(&End::pair());
}

#[test]
fn a_request_over_datagrams_is_replied_to_with_all_numbers_of_arguments() {
    check_arguments(&End::pair_over(Transport::Datagrams));
}

fn check_arguments(ends: &[End; 2]) {
    let got = Arc::default();
    ends[1]
        .endpoint
        .set_handler(1, |message| {
            let doubled: Vec<i32> = message.args().iter().map(|arg| arg.wrapping_mul(2)).collect();
            message.reply(2, &doubled).unwrap();
            assert!(matches!(message.reply(2, &[]), Err(Error::Call(CallError::NoReply))));
        })
        .unwrap();
    ends[0].endpoint.set_handler(2, note(&got, |message| message.args().to_vec())).unwrap();
    for count in 0..=16 {
        let args: Vec<i32> = (0..count).map(|arg| 1000 - arg).collect();
        send(ends, || ends[0].endpoint.try_request(0, 1, &args));
        until(ends, || got.lock().unwrap().len() > count as usize);
        let doubled: Vec<i32> = (0..count).map(|arg| 2 * (1000 - arg)).collect();
        assert_eq!(got.lock().unwrap()[count as usize], doubled);
    }
    let counters = ends[1].endpoint.counters().unwrap();
    assert_eq!((counters.requests_received, counters.replies_sent), (17, 17));
    let too_many = ends[0].endpoint.try_request(0, 1, &[0; 17]);
    assert!(matches!(too_many, Err(Error::Call(CallError::TooMuch { value: 17, most: 16, .. }))));
}

#[test]
fn medium_messages_of_all_sizes_arrive_both_ways() {
    check_medium(&End::pair());
}

#[test]
fn medium_messages_of_all_sizes_arrive_both_ways_over_datagrams() {
    check_medium(&End::pair_over(Transport::Datagrams));
}

fn check_medium(ends: &[End; 2]) {
    let got = Arc::default();
    ends[1]
        .endpoint
        .set_handler(1, |message| {
            let mut bytes = message.to_vec().unwrap();
            bytes.reverse();
            message.reply_medium(2, &[message.args()[0]], &bytes).unwrap();
        })
        .unwrap();
    let read = |message: &mut Message<'_>| (message.args()[0], message.to_vec().unwrap());
    ends[0].endpoint.set_handler(2, note(&got, read)).unwrap();
    let sizes = [0, 1, 7, 8, 100, 900, 1000, 4096, 65_536];
    for round in 0..40 {
        let size = sizes[round % sizes.len()];
        let mut bytes: Vec<u8> = (0..size).map(|at| (at * 7 + round) as u8).collect();
        send(ends, || ends[0].endpoint.try_request_medium(0, 1, &[round as i32], &bytes));
        let sent = std::mem::replace(&mut bytes, vec![0; size]);
        until(ends, || got.lock().unwrap().len() > round);
        let (arg, mut back) = got.lock().unwrap()[round].clone();
        back.reverse();
        assert_eq!((arg, back == sent), (round as i32, true), "{size} bytes");
    }
    let long = vec![0; 65_537];
    let refused = ends[0].endpoint.try_request_medium(0, 1, &[], &long);
    assert!(matches!(refused, Err(Error::Call(CallError::TooMuch { .. }))));
}

#[test]
fn bulk_messages_go_into_segments_and_gets_come_out_of_them() {
    check_bulk(&End::pair());
}

#[test]
fn bulk_messages_go_into_segments_and_gets_come_out_of_them_over_datagrams() {
    check_bulk(&End::pair_over(Transport::Datagrams));
}

#[test]
fn a_process_that_is_gone_is_noticed_over_datagrams_and_one_that_computes_is_not_lost() {
    let config = Config { give_up_ns: 1_000_000_000, ..Config::default() };
    let [a, b] = [(); 2].map(|()| End::over(config.clone(), SameHost::Auto, Transport::Datagrams));
    a.endpoint.map(0, b.endpoint.name().unwrap(), TAG).unwrap();
    let (got, back) = (Arc::default(), Arc::default());
    b.endpoint.set_handler(1, |message| message.reply(2, &[]).unwrap()).unwrap();
    a.endpoint.set_handler(2, note(&got, |_| ())).unwrap();
    let why = |message: &mut Message<'_>| match message.kind() {
        Kind::Returned { status, .. } => status,
        other => panic!("{other:?}"),
    };
    a.endpoint.set_handler(0, note(&back, why)).unwrap();
    let ends = [a, b];
    send(&ends, || ends[0].endpoint.try_request(0, 1, &[]));
    until(&ends, || got.lock().unwrap().len() == 1);
    // The other one computes for longer than a silent peer is waited for.
    send(&ends, || ends[0].endpoint.try_request(0, 1, &[]));
    let began = Instant::now();
    while began.elapsed() < Duration::from_millis(2500) {
        ends[0].bundle.poll().unwrap();
    }
    until(&ends, || got.lock().unwrap().len() == 2);
    let [a, b] = ends;
    // It ends without a word only if its process dies; here it says so.
    drop((b.endpoint, b.bundle, b.port));
    let began = Instant::now();
    while back.lock().unwrap().is_empty() {
        assert!(began.elapsed() < PATIENCE);
        let _ = a.endpoint.try_request(0, 1, &[]);
        a.bundle.poll().unwrap();
    }
    assert!(back.lock().unwrap().iter().all(|status| *status == Status::Unreachable));
}

fn check_bulk(ends: &[End; 2]) {
    let access = Access::LOCAL_WRITE | Access::REMOTE_WRITE | Access::REMOTE_READ;
    let memory =
        [0, 1].map(|end: usize| ends[end].port.domain().register(1 << 20, access).unwrap());
    for (end, memory) in ends.iter().zip(&memory) {
        end.endpoint.set_segment(Some(memory.remote(0, 1 << 19).unwrap())).unwrap();
    }
    let (got, back) = (Arc::default(), Arc::default());
    let second_half = memory[1].sge(1 << 19, 5).unwrap();
    memory[1].write(1 << 19, b"reply").unwrap();
    ends[1]
        .endpoint
        .set_handler(1, move |message| {
            assert_eq!(message.category(), Category::Bulk);
            let args = [message.offset() as i32, message.payload_len() as i32];
            message.reply_bulk(2, &args, second_half, 77).unwrap();
        })
        .unwrap();
    let read = |message: &mut Message<'_>| (message.args().to_vec(), message.offset());
    ends[0].endpoint.set_handler(2, note(&got, read)).unwrap();
    ends[0].endpoint.set_handler(3, note(&got, read)).unwrap();
    let why = |message: &mut Message<'_>| match message.kind() {
        Kind::Returned { status, operation, .. } => (status, operation),
        other => panic!("{other:?}"),
    };
    ends[0].endpoint.set_handler(0, note(&back, why)).unwrap();

    memory[0].write(1 << 19, b"a long way").unwrap();
    let source = memory[0].sge(1 << 19, 10).unwrap();
    send(ends, || ends[0].endpoint.try_request_bulk(0, 1, &[], source, 1000));
    until(ends, || got.lock().unwrap().len() == 1);
    assert_eq!(memory[1].to_vec(1000, 10).unwrap(), b"a long way");
    assert_eq!(memory[0].to_vec(77, 5).unwrap(), b"reply");
    assert_eq!(got.lock().unwrap()[0], (vec![1000, 10], 77));

    send(ends, || ends[0].endpoint.try_get(0, 1002, (5, 4), (3, &[9])));
    until(ends, || got.lock().unwrap().len() == 2);
    assert_eq!(
        (memory[0].to_vec(5, 4).unwrap(), got.lock().unwrap()[1].clone()),
        (b"long".to_vec(), (vec![9], 5))
    );

    let request = Operation::Request(Category::Bulk);
    let end = 1 << 19;
    for (offset, status) in [(end - 9, Status::BadLength), (end + 1, Status::BadSegmentOffset)] {
        send(ends, || ends[0].endpoint.try_request_bulk(0, 1, &[], source, offset));
        send(ends, || ends[0].endpoint.try_get(0, offset, (0, 10), (3, &[])));
        until(ends, || back.lock().unwrap().len() == 2);
        let came = std::mem::take(&mut *back.lock().unwrap());
        assert_eq!(came, [(status, request), (status, Operation::Get)]);
    }
    ends[1].endpoint.set_segment(None).unwrap();
    let gone = Arc::new(AtomicU32::new(0));
    until(ends, || {
        let _ = ends[0].endpoint.try_request_bulk(0, 1, &[], source, 0);
        let came = std::mem::take(&mut *back.lock().unwrap());
        gone.fetch_add(came.len() as u32, Ordering::Relaxed);
        came.contains(&(Status::BadSegmentOffset, request))
    });
}

#[test]
fn what_cannot_be_delivered_comes_back_and_says_why() {
    let config = Config { give_up_ns: 300_000_000, ..Config::default() };
    let [a, b] = [End::new(config.clone()), End::new(config)];
    let back = Arc::default();
    let why = |message: &mut Message<'_>| match message.kind() {
        Kind::Returned { status, .. } => (status, message.handler(), message.args().to_vec()),
        other => panic!("{other:?}"),
    };
    a.endpoint.set_handler(0, note(&back, why)).unwrap();
    let other = b.bundle.endpoint().unwrap();
    let (name, gone) = (b.endpoint.name().unwrap(), other.name().unwrap());
    drop(other);
    let mut absent = name;
    absent.port.set_port(1);
    let mut earlier = name;
    earlier.incarnation ^= 2;
    a.endpoint.map(0, name, TAG).unwrap();
    a.endpoint.map(1, name, Tag(7)).unwrap();
    a.endpoint.map(2, gone, TAG).unwrap();
    a.endpoint.map(3, absent, TAG).unwrap();
    a.endpoint.map(4, earlier, TAG).unwrap();
    let ends = [a, b];
    let expected = [
        (0, Status::BadHandler),
        (1, Status::BadTag),
        (2, Status::BadEndpoint),
        (3, Status::Unreachable),
        (4, Status::Unreachable),
    ];
    for (index, status) in expected {
        for _ in 0..2 {
            send(&ends, || ends[0].endpoint.try_request(index, 5, &[1, 2]));
            until(&ends, || !back.lock().unwrap().is_empty());
            assert_eq!(back.lock().unwrap().pop(), Some((status, 5, vec![1, 2])), "{index}");
        }
    }
    // A tag that is changed is told.
    ends[0].endpoint.set_translation_tag(0, Tag(8)).unwrap();
    send(&ends, || ends[0].endpoint.try_request(0, 5, &[]));
    until(&ends, || !back.lock().unwrap().is_empty());
    assert_eq!(back.lock().unwrap().pop(), Some((Status::BadTag, 5, vec![])));
}

#[test]
fn a_request_to_the_endpoint_itself_is_over_when_it_returns() {
    let end = End::new(Config::default());
    end.endpoint.map(0, end.endpoint.name().unwrap(), TAG).unwrap();
    let got = Arc::default();
    end.endpoint
        .set_handler(1, |message| message.reply(2, &[message.args()[0] + 1]).unwrap())
        .unwrap();
    end.endpoint.set_handler(2, note(&got, |message| message.args()[0])).unwrap();
    for arg in 0..100 {
        end.endpoint.request(0, 1, &[arg]).unwrap();
        assert_eq!(got.lock().unwrap().pop(), Some(arg + 1));
    }
}

/// Threads that poll, send and reply at once: handlers of one endpoint never overlap, those of
/// different ones may.
#[test]
fn in_a_parallel_bundle_handlers_of_one_endpoint_run_one_at_a_time() {
    const ENDPOINTS: usize = 4;
    const REQUESTS: u32 = 400;
    let device =
        quipu::Config { address: Some("127.0.0.1".parse().unwrap()), ..quipu::Config::default() };
    let port = Port::open(&Device::open(device).unwrap(), Config::default()).unwrap();
    let bundle = port.bundle(Mode::Parallel);
    let endpoints: Vec<Endpoint> = (0..ENDPOINTS).map(|_| bundle.endpoint().unwrap()).collect();
    let executed = Arc::new(AtomicU32::new(0));
    let replied: Vec<Arc<AtomicU32>> = (0..ENDPOINTS).map(|_| Arc::default()).collect();
    for (endpoint, replied) in endpoints.iter().zip(&replied) {
        endpoint.set_tag(TAG).unwrap();
        for (index, peer) in endpoints.iter().enumerate() {
            endpoint.map(index as u32, peer.name().unwrap(), TAG).unwrap();
        }
        let (inside, executed) = (AtomicU32::new(0), Arc::clone(&executed));
        endpoint
            .set_handler(1, move |message| {
                assert_eq!(inside.fetch_add(1, Ordering::AcqRel), 0, "two at once");
                std::thread::yield_now();
                executed.fetch_add(1, Ordering::Relaxed);
                message.reply(2, &[]).unwrap();
                assert_eq!(inside.fetch_sub(1, Ordering::AcqRel), 1, "two at once");
            })
            .unwrap();
        let replied = Arc::clone(replied);
        endpoint
            .set_handler(2, move |_| {
                replied.fetch_add(1, Ordering::Relaxed);
            })
            .unwrap();
    }
    std::thread::scope(|scope| {
        for (number, endpoint) in endpoints.iter().enumerate() {
            let (bundle, replied) = (&bundle, &replied[number]);
            scope.spawn(move || {
                let began = Instant::now();
                for request in 0..REQUESTS {
                    // Not to itself: such a request runs in this thread.
                    let peer = (number as u32 + 1 + request % 3) % ENDPOINTS as u32;
                    endpoint.request(peer, 1, &[]).unwrap();
                }
                while replied.load(Ordering::Relaxed) < REQUESTS {
                    assert!(began.elapsed() < PATIENCE, "replies are missing");
                    bundle.poll().unwrap();
                }
            });
        }
    });
    assert_eq!(executed.load(Ordering::Relaxed), REQUESTS * ENDPOINTS as u32);
}

/// A thread that waits sleeps, and a message wakes it.
/// Completions of sends must be taken however many messages come: each keeps a place of the send queue.
#[test]
fn a_flood_leaves_room_in_the_send_queues() {
    const EACH: u64 = 4000;
    let ends = End::pair();
    let access = Access::LOCAL_WRITE | Access::REMOTE_WRITE;
    let memory =
        [0, 1].map(|end: usize| ends[end].port.domain().register(1 << 16, access).unwrap());
    for (end, memory) in ends.iter().zip(&memory) {
        end.endpoint.set_segment(Some(memory.remote(0, 1 << 16).unwrap())).unwrap();
        end.endpoint.set_handler(1, |_| {}).unwrap();
        end.endpoint.set_handler(2, |message| message.reply(1, &[1]).unwrap()).unwrap();
    }
    let source = memory[0].sge(0, 64).unwrap();
    let endpoint = &ends[0].endpoint;
    let counters = || endpoint.counters().unwrap();
    let kinds: [&dyn Fn() -> Result<(), Error>; 3] =
        [&|| endpoint.try_request(0, 1, &[1, 2]), &|| endpoint.try_request(0, 2, &[1, 2]), &|| {
            endpoint.try_request_bulk(0, 1, &[1], source, 0)
        }];
    for kind in kinds {
        let before = counters().requests_sent;
        until(&ends, || {
            // As many as there are credits for.
            while counters().requests_sent < before + EACH {
                match kind() {
                    Err(Error::Call(CallError::WouldBlock)) => return false,
                    sent => sent.unwrap(),
                }
            }
            endpoint.outstanding().unwrap() == 0
        });
        assert_eq!(counters().requests_sent, before + EACH);
    }
    let received = ends[1].endpoint.counters().unwrap().requests_received;
    let now = counters();
    assert_eq!((received, now.replies_received, now.returned), (3 * EACH, EACH, 0));
}

#[test]
fn signals_are_counted_and_outlive_their_sender() {
    for same_host in [SameHost::Auto, SameHost::Never] {
        let [here, there] = End::pair_by(same_host);
        let ends = [here, there];
        // More than there are credits, and none is lost.
        for _ in 0..100 {
            send(&ends, || ends[0].endpoint.try_signal(0));
        }
        for _ in 0..100 {
            until(&ends, || ends[1].endpoint.take_signal(0).unwrap());
        }
        assert!(!ends[1].endpoint.take_signal(0).unwrap());
        // Those that nobody has taken are given back, too.
        send(&ends, || ends[0].endpoint.try_signal(0));
        until(&ends, || ends[0].endpoint.outstanding().unwrap() == 0);

        // This one has a connection to the other end, which ends with it.
        send(&ends, || ends[1].endpoint.try_signal(0));
        until(&ends, || ends[0].endpoint.take_signal(0).unwrap());
        let [here, there] = ends;
        drop(here);
        let began = Instant::now();
        let gone = |outcome: &Result<(), Error>| {
            matches!(outcome, Err(Error::Call(CallError::Unreachable)))
        };
        while !gone(&there.endpoint.try_signal(0)) {
            there.bundle.poll().unwrap();
            assert!(began.elapsed() < PATIENCE, "nobody notices");
        }
        assert!(there.endpoint.take_signal(0).unwrap(), "it was sent before");
        let outcome = there.endpoint.take_signal(0);
        assert!(matches!(outcome, Err(Error::Call(CallError::Unreachable))), "{outcome:?}");
    }
}

#[test]
fn two_threads_meet_by_signals() {
    let ends = End::pair();
    let met = AtomicU32::new(0);
    std::thread::scope(|scope| {
        for end in &ends {
            scope.spawn(|| {
                for round in 0..200 {
                    met.fetch_add(1, Ordering::SeqCst);
                    end.endpoint.signal(0).unwrap();
                    end.endpoint.wait_signal(0).unwrap();
                    assert!(met.load(Ordering::SeqCst) >= 2 * (round + 1));
                }
            });
        }
    });
}

#[test]
fn a_program_that_waits_is_woken_by_a_message() {
    let ends = End::pair();
    ends[1].endpoint.set_handler(1, |_| ()).unwrap();
    std::thread::scope(|scope| {
        let seen = ends[1].bundle.arrivals().unwrap();
        let ends = &ends;
        let waiter = scope.spawn(move || {
            let began = Instant::now();
            while !ends[1].bundle.wait(seen, Some(Duration::from_secs(5))).unwrap() {
                assert!(began.elapsed() < PATIENCE, "nothing wakes it");
            }
            ends[1].bundle.poll().unwrap()
        });
        std::thread::sleep(Duration::from_millis(100));
        ends[0].endpoint.request(0, 1, &[]).unwrap();
        assert_eq!(waiter.join().unwrap(), 1);
    });
    assert!(!ends[0].bundle.wait(1000, Some(Duration::from_millis(20))).unwrap());
}

/// Over TCP, answers gather with others while earlier ones are under way.
#[test]
fn an_answer_reaches_the_requester_although_its_sender_polls_no_more() {
    let ends = End::pair_by(SameHost::Never);
    let seen = Arc::new(AtomicU32::new(0));
    let place = Arc::clone(&seen);
    let count = move |_: &mut Message<'_>| {
        place.fetch_add(1, Ordering::Relaxed);
    };
    ends[1].endpoint.set_handler(1, count).unwrap();
    for round in 1..=20 {
        send(&ends, || ends[0].endpoint.try_request(0, 1, &[]));
        let began = Instant::now();
        while seen.load(Ordering::Relaxed) < round {
            assert!(began.elapsed() < PATIENCE, "the request does not come");
            let arrived = ends[1].bundle.arrivals().unwrap();
            if ends[1].bundle.poll().unwrap() == 0 {
                // Asleep, it leaves the adapter to nobody else.
                ends[1].bundle.wait(arrived, Some(Duration::from_millis(10))).unwrap();
            }
        }
        while ends[0].endpoint.outstanding().unwrap() > 0 {
            assert!(began.elapsed() < PATIENCE, "the answer does not come");
            ends[0].bundle.poll().unwrap();
        }
    }
}

/// A ring of endpoints, each of which has a connection to the next: 1,024, and as many at both ends.
#[test]
fn an_endpoint_at_a_port_of_its_own_is_reached_by_its_address() {
    for transport in [Transport::Reliable, Transport::Datagrams] {
        let ends = [(); 2].map(|()| End::over(Config::default(), SameHost::Auto, transport));
        let name = ends[1].endpoint.listen(0).unwrap();
        assert!(ends[0].endpoint.listen(name.port.port()).is_err(), "the port is taken");
        ends[0].endpoint.map(0, Name::of_address(name.port), TAG).unwrap();
        let seen = Arc::default();
        ends[1].endpoint.set_handler(1, note(&seen, |message| message.args().to_vec())).unwrap();
        send(&ends, || ends[0].endpoint.try_request(0, 1, &[7, 8]));
        until(&ends, || *seen.lock().unwrap() == [[7, 8]]);
    }
}

#[test]
fn a_process_has_a_thousand_endpoints() {
    const ENDPOINTS: usize = 1024;
    let device =
        quipu::Config { address: Some("127.0.0.1".parse().unwrap()), ..quipu::Config::default() };
    let port = Port::open(&Device::open(device).unwrap(), Config::default()).unwrap();
    let bundle = port.bundle(Mode::Sequential);
    let sum = Arc::new(AtomicU32::new(0));
    let make = |_| {
        let endpoint = bundle.endpoint().unwrap();
        endpoint.set_tag(TAG).unwrap();
        let double = |message: &mut Message<'_>| {
            let args = [2 * message.args()[0]];
            message.reply(2, &args).unwrap();
        };
        endpoint.set_handler(1, double).unwrap();
        let place = Arc::clone(&sum);
        let add = move |message: &mut Message<'_>| {
            place.fetch_add(message.args()[0].cast_unsigned(), Ordering::Relaxed);
        };
        endpoint.set_handler(2, add).unwrap();
        endpoint
    };
    let endpoints: Vec<Endpoint> = (0..ENDPOINTS).map(make).collect();
    for (index, endpoint) in endpoints.iter().enumerate() {
        let next = &endpoints[(index + 1) % ENDPOINTS];
        endpoint.map(0, next.name().unwrap(), TAG).unwrap();
    }
    let began = Instant::now();
    let mut left: Vec<usize> = (0..ENDPOINTS).collect();
    let wanted = (0..ENDPOINTS as u32).map(|index| 2 * index).sum();
    while !left.is_empty() || sum.load(Ordering::Relaxed) < wanted {
        assert!(began.elapsed() < PATIENCE, "{} requests are left", left.len());
        left.retain(|&index| {
            match endpoints[index].try_request(0, 1, &[i32::try_from(index).unwrap()]) {
                Err(Error::Call(CallError::WouldBlock)) => true,
                sent => sent.is_err(),
            }
        });
        bundle.poll().unwrap();
    }
    assert_eq!(sum.load(Ordering::Relaxed), wanted);
    println!("{ENDPOINTS} endpoints have asked each other after {:.1?}", began.elapsed());
}
