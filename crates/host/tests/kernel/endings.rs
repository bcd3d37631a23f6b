//! How connections begin and end: both at once, one before the other, or by a reset in any state that the
//! kernel can bring about.

use std::io::Write;
use std::net::{SocketAddr, TcpStream};
use std::thread;
use std::time::{Duration, Instant};

use quipu_host::inet::tcp::Failure;
use quipu_host::nic::TcpChange;

use super::adapter::{Adapter, Link, PATIENCE, QueuePair};
use super::pairs::{Client, Order, Plan, exchange, talk, write};
use super::plug::{Plug, know_the_adapter};
use super::socket::{Buffers, Info, KERNEL, State, VERSIONS, begin, connect, reset_at_close};
use super::space::inside;

const RECEIVES: (u64, u64) = (8, 16_384);

/// An adapter whose neighbour knows it, and is known to it.
fn adapter() -> Option<Adapter> {
    let adapter = Adapter::new(Link::Tap, 1_500)?;
    let station = adapter.engine.qpip_info().unwrap().hardware.unwrap();
    know_the_adapter(adapter.interface, station);
    let plan = Plan { there: 1, back: 1, order: Order::Together };
    for version in VERSIONS {
        let ends = (version, Client::Adapter);
        exchange(&adapter, ends, RECEIVES, Buffers::default(), plan);
    }
    Some(adapter)
}

/// Waits until the kernel's end of a connection is in a state.
#[track_caller]
fn reaches(stream: &TcpStream, state: State, qp: &mut QueuePair) {
    qp.until(&format!("{state:?}"), |_| Info::of(stream).state == state as u8);
}

/// A connection that stands, the kernel's end first.
fn standing(adapter: &Adapter, version: usize) -> (TcpStream, QueuePair) {
    let mut qp = adapter.queue_pair(RECEIVES);
    adapter.offer(&qp);
    let to = adapter.address(version);
    let stream = thread::spawn(move || connect(to, Buffers::default()).unwrap());
    qp.until("standing", |it| it.connected);
    (stream.join().unwrap(), qp)
}

#[test]
fn both_open_at_once() {
    if !inside("endings::both_open_at_once") {
        return;
    }
    let Some(adapter) = adapter() else { return };
    let Some(probe) = Plug::new(adapter.interface) else { return };
    probe.pull();
    for version in VERSIONS {
        let plug = Plug::new(adapter.interface).unwrap();
        // The SYN of the kernel does not get out; that of the adapter comes to a port that has sent one.
        let to = SocketAddr::new(adapter.address(version).ip(), 4_000);
        let (from, stream) = begin(to);
        let mut qp = adapter.queue_pair(RECEIVES);
        qp.connect(from, Some(to.port()));
        reaches(&stream, State::SynReceived, &mut qp);
        plug.pull();
        reaches(&stream, State::Established, &mut qp);
        stream.set_nonblocking(false).unwrap();
        let plan = Plan { there: 100_000, back: 100_000, order: Order::Together };
        let kernel = thread::spawn(move || talk(&stream, &plan));
        qp.until("both opened", |it| it.step(&plan));
        qp.check("both opened", &plan);
        kernel.join().unwrap().unwrap();
    }
}

#[test]
fn both_close_at_once() {
    if !inside("endings::both_close_at_once") {
        return;
    }
    let Some(adapter) = adapter() else { return };
    for version in VERSIONS {
        let (stream, mut qp) = standing(&adapter, version);
        let Some(plug) = Plug::new(adapter.interface) else { return };
        write(&stream, 1_000).unwrap();
        let plan = Plan { there: 1_000, back: 1_000, order: Order::Together };
        qp.step(&plan);
        reaches(&stream, State::Closing, &mut qp);
        assert_eq!(qp.received, 0, "the kernel's end has not come yet");
        plug.pull();
        qp.until("both closed", |it| it.end.is_some());
        qp.check("both closed", &plan);
        // What is in TIME-WAIT is no socket any more.
        reaches(&stream, State::Closed, &mut qp);
    }
}

/// The kernel sends no FIN into a closed window. That of a queue pair without receives is open enough.
#[test]
fn the_kernel_closes_towards_nobody_who_receives() {
    if !inside("endings::the_kernel_closes_towards_nobody_who_receives") {
        return;
    }
    let Some(adapter) = Adapter::new(Link::Tap, 1_500) else { return };
    for version in VERSIONS {
        let mut qp = adapter.queue_pair((0, 16_384));
        adapter.offer(&qp);
        let to = adapter.address(version);
        let plan = Plan { there: 0, back: 1_000, order: Order::KernelFirst };
        let kernel = thread::spawn(move || talk(&connect(to, Buffers::default())?, &plan));
        qp.until("without receives", |it| it.step(&plan));
        qp.check("without receives", &plan);
        kernel.join().unwrap().unwrap();
    }
}

/// Resets of the kernel find a connection in every state that it can reset one in.
#[test]
fn resets() {
    if !inside("endings::resets") {
        return;
    }
    let Some(adapter) = adapter() else { return };
    let reset = Some(TcpChange::Failed(Failure::Reset));
    for version in VERSIONS {
        // SYN-SENT: nobody listens.
        let mut qp = adapter.queue_pair(RECEIVES);
        qp.connect(SocketAddr::new(KERNEL[version].parse().unwrap(), 9), None);
        qp.until("refused", |it| it.end.is_some());
        assert_eq!(qp.end, Some(TcpChange::Failed(Failure::Refused)));

        // ESTABLISHED.
        let (stream, mut qp) = standing(&adapter, version);
        reset_at_close(&stream);
        drop(stream);
        qp.until("established", |it| it.end.is_some());
        assert_eq!(qp.end, reset);

        // The kernel has not read everything when it closes.
        let (stream, mut qp) = standing(&adapter, version);
        qp.send_up_to(10_000);
        qp.until("unread", |it| it.sent == 10_000);
        drop(stream);
        qp.until("unread", |it| it.end.is_some());
        assert_eq!(qp.end, reset);

        // CLOSE-WAIT.
        let (stream, mut qp) = standing(&adapter, version);
        write(&stream, 5).unwrap();
        qp.until("close wait", |it| it.peer_closed);
        assert_eq!(qp.received, 5);
        reset_at_close(&stream);
        drop(stream);
        qp.until("close wait", |it| it.end.is_some());
        assert_eq!(qp.end, reset);

        // FIN-WAIT-2.
        let (stream, mut qp) = standing(&adapter, version);
        qp.close();
        reaches(&stream, State::CloseWait, &mut qp);
        reset_at_close(&stream);
        drop(stream);
        qp.until("fin wait 2", |it| it.end.is_some());
        assert_eq!(qp.end, reset);
    }
}

/// Those that have to cross what the adapter sends.
#[test]
fn resets_that_cross() {
    if !inside("endings::resets_that_cross") {
        return;
    }
    let Some(adapter) = adapter() else { return };
    for version in VERSIONS {
        // FIN-WAIT-1.
        let (stream, mut qp) = standing(&adapter, version);
        let Some(plug) = Plug::new(adapter.interface) else { return };
        reset_at_close(&stream);
        drop(stream);
        qp.close();
        plug.pull();
        qp.until("fin wait 1", |it| it.end.is_some());
        assert_eq!(qp.end, Some(TcpChange::Failed(Failure::Reset)));

        // LAST-ACK: nothing is lost any more.
        let (stream, mut qp) = standing(&adapter, version);
        write(&stream, 5).unwrap();
        qp.until("last ack", |it| it.peer_closed);
        let plug = Plug::new(adapter.interface).unwrap();
        reset_at_close(&stream);
        drop(stream);
        qp.close();
        plug.pull();
        qp.until("last ack", |it| it.end.is_some());
        assert_eq!(qp.end, Some(TcpChange::Closed));

        // SYN-RECEIVED: the peer is gone before it is answered, and costs no queue pair.
        let plug = Plug::new(adapter.interface).unwrap();
        let mut qp = adapter.queue_pair(RECEIVES);
        adapter.offer(&qp);
        drop(begin(adapter.address(version)));
        plug.pull();
        let to = adapter.address(version);
        let plan = Plan { there: 10, back: 10, order: Order::Together };
        let kernel = thread::spawn(move || talk(&connect(to, Buffers::default())?, &plan));
        qp.until("syn received", |it| it.step(&plan));
        qp.check("syn received", &plan);
        kernel.join().unwrap().unwrap();
    }
}

/// The adapter resets; the kernel is told, in whichever state it is.
#[test]
fn resets_of_the_adapter() {
    if !inside("endings::resets_of_the_adapter") {
        return;
    }
    let Some(adapter) = adapter() else { return };
    for version in VERSIONS {
        for half in [false, true] {
            let (mut stream, mut qp) = standing(&adapter, version);
            if half {
                write(&stream, 0).unwrap();
                qp.until("half", |it| it.peer_closed);
            }
            adapter.engine.tcp_abort(qp.qp).unwrap();
            qp.until("aborted", |it| it.end.is_some());
            assert_eq!(qp.end, Some(TcpChange::Aborted));
            let deadline = Instant::now() + PATIENCE;
            let error = loop {
                assert!(Instant::now() < deadline);
                match stream.take_error().unwrap() {
                    Some(error) => break error,
                    None => thread::sleep(Duration::from_millis(1)),
                }
            };
            assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset);
            assert!(half || stream.write(b"x").is_err());
        }
    }
}
