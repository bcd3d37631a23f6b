//! Windows that close and open again, and a path that becomes narrower on the way.

use std::io::Write;
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use super::adapter::{Adapter, Link};
use super::pairs::{Order, Plan, fill, read, talk, write};
use super::plug::{tc, try_tc};
use super::socket::{Buffers, OURS, VERSIONS, connect};
use super::space::{behind_router, inside, ip};

/// Longer than any timeout of retransmission here, so that a closed window is probed.
const NAP: Duration = Duration::from_millis(700);
const TOTAL: u64 = 1 << 20;

/// The kernel does not read; then it does.
#[test]
fn the_kernel_sleeps() {
    if !inside("stalls::the_kernel_sleeps") {
        return;
    }
    let Some(adapter) = Adapter::new(Link::Tap, 1_500) else { return };
    for version in VERSIONS {
        let mut qp = adapter.queue_pair((8, 16_384));
        adapter.offer(&qp);
        let to = adapter.address(version);
        let buffers = Buffers { receive: 8_192, send: 0 };
        let (wake, woken) = mpsc::channel();
        let kernel = thread::spawn(move || {
            let stream = connect(to, buffers)?;
            woken.recv().unwrap();
            read(&stream, TOTAL)?;
            write(&stream, 0)
        });
        let plan = Plan { there: 0, back: TOTAL, order: Order::Together };
        qp.until("connected", |it| it.connected);
        qp.step(&plan);
        qp.during(NAP);
        let before = qp.sent;
        qp.during(NAP);
        assert_eq!(qp.sent, before, "the window is closed");
        assert!(before < TOTAL && qp.end.is_none());
        wake.send(()).unwrap();
        qp.until("awake", |it| it.step(&plan));
        qp.check("awake", &plan);
        kernel.join().unwrap().unwrap();
    }
}

/// Nothing is posted to receive; then something is.
#[test]
fn the_adapter_sleeps() {
    if !inside("stalls::the_adapter_sleeps") {
        return;
    }
    let Some(adapter) = Adapter::new(Link::Tap, 1_500) else { return };
    for version in VERSIONS {
        for window in [0, 3] {
            let mut qp = adapter.queue_pair((window, 10_000));
            adapter.offer(&qp);
            let to = adapter.address(version);
            let plan = Plan { there: 3 * TOTAL, back: 0, order: Order::Together };
            let kernel = thread::spawn(move || talk(&connect(to, Buffers::default())?, &plan));
            qp.until("connected", |it| it.connected);
            // Nobody looks, and so nobody posts again.
            thread::sleep(2 * NAP);
            assert!(!kernel.is_finished());
            qp.grow(8);
            qp.until("awake", |it| it.step(&plan));
            qp.check("awake", &plan);
            kernel.join().unwrap().unwrap();
        }
    }
}

/// The time that the processors have given to this process.
fn processor_time() -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the kernel writes to a live variable.
    let done = unsafe { libc::clock_gettime(libc::CLOCK_PROCESS_CPUTIME_ID, &raw mut time) };
    assert_eq!(done, 0, "{}", std::io::Error::last_os_error());
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

/// The queue of the interface is full, while the socket says that there is room. Nobody is busy with that.
#[test]
fn the_interface_is_full() {
    if !inside("stalls::the_interface_is_full") {
        return;
    }
    let Some(adapter) = Adapter::new(Link::Packet, 1_500) else { return };
    for version in VERSIONS {
        let mut qp = adapter.queue_pair((8, 16_384));
        adapter.offer(&qp);
        let to = adapter.address(version);
        let plan = Plan { there: 0, back: TOTAL, order: Order::Together };
        let kernel = thread::spawn(move || talk(&connect(to, Buffers::default())?, &plan));
        qp.until("connected", |it| it.connected);
        // A frame and a half wait, and an octet goes out each second.
        let output = try_tc("qdisc add dev ours root tbf rate 8bit burst 1600 limit 2400");
        if !output.status.success() {
            println!("SKIPPED: this kernel has no tbf: {output:?}");
            return;
        }
        qp.send_up_to(TOTAL);
        qp.during(NAP);
        let before = processor_time();
        thread::sleep(NAP);
        let busy = processor_time() - before;
        assert!(busy < NAP / 4, "busy for {busy:?} of {NAP:?}");
        assert!(qp.sent < TOTAL && qp.end.is_none());
        tc("qdisc del dev ours root");
        qp.until("awake", |it| it.step(&plan));
        qp.check("awake", &plan);
        kernel.join().unwrap().unwrap();
    }
}

/// ```text
/// adapter -- qp0 [router] va -- vb [client, in a namespace of its own]
/// ```
///
/// The link of the router and its client becomes narrower while the adapter sends.
#[test]
fn the_path_becomes_narrower() {
    if !inside("stalls::the_path_becomes_narrower") {
        return;
    }
    let Some(adapter) = Adapter::new(Link::Tap, 1_500) else { return };
    let port = adapter.port;
    let (go, wait) = mpsc::channel::<()>();
    let client = behind_router([1_500; 2], [""; 2], move || {
        for version in VERSIONS {
            let to = (OURS[version].parse::<std::net::IpAddr>().unwrap(), port).into();
            let mut stream = connect(to, Buffers::default()).unwrap();
            stream.write_all(&fill(false, 0, 1)).unwrap();
            read(&stream, TOTAL).unwrap();
            stream.shutdown(std::net::Shutdown::Write).unwrap();
            wait.recv().unwrap();
        }
    });
    let plan = Plan { there: 1, back: TOTAL, order: Order::Together };
    for version in VERSIONS {
        let mut qp = adapter.queue_pair((8, 16_384));
        adapter.offer(&qp);
        qp.until("begun", |it| it.step(&plan) || (it.received == 1 && it.sent > 0));
        ip("link set va mtu 1300");
        qp.until("narrower", |it| it.step(&plan));
        qp.check("narrower", &plan);
        if version == 0 {
            ip("link set va mtu 1500");
        }
        go.send(()).unwrap();
    }
    client.join().unwrap();
}
