//! What others of the user read of an engine.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::common::{Node, PATIENCE, pair};
use quipu_host::counters::observe::{PATHS, STATES, STATUSES, Sample, WORK_METRICS, prometheus};
use quipu_host::counters::samples;
use quipu_host::nic::{SendOp, WcStatus};
use quipu_host::{Config, Device, Engine, SameHost};

fn engine(address: &str, counters: bool) -> Arc<Engine> {
    let address = Some(address.parse().unwrap());
    let same_host = SameHost::Never;
    Engine::open(Config { address, same_host, counters, ..Config::default() }).unwrap()
}

/// The sample of this process's engine at an address.
fn sample(address: &str) -> Option<Sample> {
    let address: std::net::IpAddr = address.parse().unwrap();
    let process = std::process::id();
    samples().into_iter().find(|sample| (sample.process, sample.address) == (process, address))
}

/// The sample, once it is as wanted.
fn wait_for(address: &str, wanted: impl Fn(&Sample) -> bool) -> Sample {
    let end = Instant::now() + PATIENCE;
    loop {
        let found = sample(address);
        match found {
            Some(sample) if wanted(&sample) => return sample,
            other => assert!(Instant::now() < end, "{other:?}"),
        }
        std::thread::yield_now();
    }
}

fn work(values: &[u64], name: &str) -> u64 {
    values[WORK_METRICS.iter().position(|metric| metric.name == name).unwrap()]
}

fn send(a: &Node, b: &Node, count: u64) {
    for wr_id in 0..count {
        b.receive(wr_id, &[b.sge(0, 512)]);
        a.post(wr_id, SendOp::Send, &[a.sge(0, 512)]);
        assert_eq!(a.poll().status, WcStatus::Success);
        assert_eq!(b.poll().status, WcStatus::Success);
    }
}

#[test]
fn a_sample_names_a_device_that_programs_see() {
    let address = "127.0.0.170";
    let config = Config { address: Some(address.parse().unwrap()), ..Config::default() };
    let _engine = Engine::open(Config { devices: vec![Device::QuipuIw0], ..config }).unwrap();
    assert_eq!(sample(address).unwrap().device, "quipu_iw0");
}

#[test]
fn a_sample_shows_what_was_done() {
    const OWN: &str = "127.0.0.71";
    let (a, b) = (engine(OWN, true), engine("127.0.0.72", true));
    // It is seen before it does anything.
    assert_eq!(sample(OWN).unwrap().queue_pairs, []);
    let nodes = pair(&a, &b, 4096);
    send(&nodes.0, &nodes.1, 20);
    // Nobody polls any more: the helper shows it.
    let seen = wait_for(OWN, |sample| work(&sample.work, "sends") == 20);
    assert_eq!(work(&seen.work, "requested_bytes"), 20 * 512);
    assert_eq!(seen.statuses[0], 20);
    let qp = &seen.queue_pairs[0];
    assert_eq!((seen.queue_pairs.len(), qp.number, qp.peer), (1, nodes.0.num.0, nodes.1.num.0));
    assert_eq!(qp.peer_address.to_string(), "127.0.0.72");
    assert_eq!((STATES[usize::from(qp.state)], PATHS[usize::from(qp.path)]), ("RTS", "tcp"));
    let peer = wait_for("127.0.0.72", |sample| work(&sample.work, "receives") == 20);
    assert_eq!(work(&peer.work, "received_bytes"), 20 * 512);
    assert!(prometheus(&[seen]).contains("quipu_sends_total{"));
    // What fails shows too.
    let wrong = SendOp::Write { addr: nodes.1.addr(0), rkey: nodes.1.rkey() ^ 0x55 };
    nodes.0.post(1, wrong, &[nodes.0.sge(0, 8)]);
    assert_eq!(nodes.0.poll().status, WcStatus::RemAccessErr);
    let seen = wait_for(OWN, |sample| work(&sample.work, "failed_requests") == 1);
    let status = STATUSES.iter().position(|&status| status == "rem_access_err").unwrap();
    assert_eq!((seen.statuses[status], STATES[usize::from(seen.queue_pairs[0].state)]), (1, "ERR"));
    drop((nodes, a, b));
    assert_eq!(sample(OWN), None, "it ends with the engine");
}

#[test]
fn what_is_done_while_the_helper_sleeps_is_shown() {
    let (a, b) = (engine("127.0.0.74", true), engine("127.0.0.75", true));
    let nodes = pair(&a, &b, 4096);
    wait_for("127.0.0.74", |sample| sample.queue_pairs.len() == 1);
    // Longer than it takes to see that nobody needs it.
    std::thread::sleep(Duration::from_millis(500));
    // Of no interest to any descriptor.
    let other = Node::new(&a, 4096);
    wait_for("127.0.0.74", |sample| sample.queue_pairs.len() == 2);
    drop(other);
    drop((nodes, a, b));
}

#[test]
fn who_does_not_want_to_be_seen_is_not() {
    let engine = engine("127.0.0.73", false);
    assert_eq!(sample("127.0.0.73"), None);
    drop(engine);
}
