//! An interface that goes down comes back, perhaps; one that is deleted ends what was on it, and says so.

use std::net::TcpStream;
use std::time::{Duration, Instant};

use quipu_host::EngineError;
use quipu_host::nic::{Completion, TcpChange};

use super::adapter::{Adapter, Link, PATIENCE, settings};
use super::space::{inside, ip};

fn gone(link: Link, ours: &str, down_first: bool) {
    let Some(adapter) = Adapter::new(link, 1500) else { return };
    let engine = &adapter.engine;
    let mut qp = adapter.queue_pair((4, 1000));
    adapter.offer(&qp);
    let _peer = TcpStream::connect(adapter.address(0)).unwrap();
    let begun = Instant::now();
    while !qp.connected {
        qp.turn();
        assert!(begun.elapsed() < PATIENCE);
    }
    let (context, _) = engine.open_context().unwrap();
    engine.tcp_events(context).unwrap();
    let (channel, _) = engine.create_channel().unwrap();
    let (cq, _) = engine.create_cq(context, 4, Some(channel), 0).unwrap();
    if down_first {
        // The cable is out: nothing ends, and nobody is told.
        ip(&format!("link set {ours} down"));
        let limit = Some(Duration::from_millis(600));
        engine.wait_completion_or_tcp(cq, channel, context, limit).unwrap();
    }
    std::thread::scope(|scope| {
        let [waits, sleeps] = [true, false].map(|events| {
            scope.spawn(move || match events {
                true => engine.wait_tcp_event(context).map(drop),
                false => engine.wait_channel(channel).map(drop),
            })
        });
        std::thread::sleep(Duration::from_millis(50));
        ip(&format!("link delete {ours}"));
        for waiter in [waits, sleeps] {
            let said = waiter.join().unwrap().unwrap_err();
            assert!(matches!(said, EngineError::LinkGone { .. }), "{said}");
            assert!(said.to_string().contains(ours), "{said}");
        }
    });
    let event = engine.take_tcp_event(qp.context).unwrap();
    assert_eq!(event.map(|event| event.change), Some(TcpChange::Aborted));
    let mut out = [Completion::default()];
    assert!(matches!(engine.poll_cq(cq, &mut out), Err(EngineError::LinkGone { .. })));
    let refused = engine.tcp_listen(0, &settings(), 1).unwrap_err();
    assert!(matches!(refused, EngineError::LinkGone { .. }), "{refused}");
}

#[test]
fn a_tap_device_that_is_deleted_says_so() {
    if inside("gone::a_tap_device_that_is_deleted_says_so") {
        gone(Link::Tap, "qp0", false);
    }
}

#[test]
fn a_tap_device_that_was_down_and_is_deleted_says_so() {
    if inside("gone::a_tap_device_that_was_down_and_is_deleted_says_so") {
        gone(Link::Tap, "qp0", true);
    }
}

#[test]
fn an_interface_that_is_deleted_says_so() {
    if inside("gone::an_interface_that_is_deleted_says_so") {
        gone(Link::Packet, "ours", false);
    }
}

#[test]
fn an_interface_that_was_down_and_is_deleted_says_so() {
    if inside("gone::an_interface_that_was_down_and_is_deleted_says_so") {
        gone(Link::Packet, "ours", true);
    }
}

#[test]
fn an_interface_with_an_xdp_socket_that_is_deleted_says_so() {
    if inside("gone::an_interface_with_an_xdp_socket_that_is_deleted_says_so") {
        gone(Link::Xdp, "ours", false);
    }
}
