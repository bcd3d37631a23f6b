//! Engines with a port: what the state machines cannot show.

use quipu_host::nic::{SendOp, WcStatus};
use quipu_host::qos::QosConfig;
use quipu_host::{Config, Engine, SameHost};

use crate::common::pair;

/// What waits for its lane when a process ends is sent first.
#[test]
fn what_is_parked_leaves_before_the_end() {
    for same_host in [SameHost::Never, SameHost::Auto] {
        let engines = ["127.0.77.3", "127.0.77.4"].map(|own| {
            // 40 messages take 0.3 s.
            let qos = Some(QosConfig { file: None, rate: Some(1_000_000) });
            let (address, arena_bytes) = (Some(own.parse().unwrap()), 64 << 20);
            Engine::open(Config { address, same_host, qos, arena_bytes, ..Config::default() })
                .unwrap()
        });
        let (a, b) = pair(&engines[0], &engines[1], 1 << 16);
        for wr_id in 0..41 {
            b.receive(wr_id, &[b.sge(0, 1000)]);
        }
        // The first one finds the connection.
        a.post(100, SendOp::Send, &[a.sge(0, 1000)]);
        assert_eq!((a.poll().status, b.poll().status), (WcStatus::Success, WcStatus::Success));
        for wr_id in 101..141 {
            a.post(wr_id, SendOp::Send, &[a.sge(0, 1000)]);
        }
        a.engine.shutdown_flush();
        for wr_id in 1..41 {
            let done = b.poll();
            assert_eq!((done.wr_id, done.status), (wr_id, WcStatus::Success), "{same_host:?}");
        }
    }
}
