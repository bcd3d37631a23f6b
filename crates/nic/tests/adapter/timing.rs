//! What the adapter itself costs per message, both ends in one thread, printed:
//! `cargo test --release -p quipu-nic --test adapter timing -- --ignored --nocapture`.

use std::hint::black_box;
use std::time::Instant;

use crate::pair::{Pair, Way};
use quipu_nic::*;

const ROUNDS: u32 = 200_000;

fn report(name: &str, start: Instant, messages: u32) {
    let ns = start.elapsed().as_nanos() as f64 / f64::from(messages);
    println!("{name:<44} {ns:8.1} ns a message");
}

#[test]
#[ignore = "prints figures, asserts nothing about time"]
fn same_host() {
    for len in [8usize, 64, 512, 4096] {
        let mut pair = Pair::new(Way::Link);
        let qps = [pair.hosts[0].qp(), pair.hosts[1].qp()];
        pair.connect(qps);
        let (here, there) = (pair.buffer(0, 8192), pair.buffer(1, 8192));
        let (from, to) = (here.sge(0, len), there.sge(0, 8192));
        let now = pair.now;
        let [a, b] = &mut pair.hosts;
        let mut done = [Completion::default(); 16];
        for batch in [1u32, 16] {
            let start = Instant::now();
            for _ in 0..ROUNDS / batch {
                for wr_id in 0..batch {
                    b.adapter.post_recv(now, qps[1], u64::from(wr_id), &[to]).unwrap();
                }
                for wr_id in 0..batch {
                    let wr = SendWr {
                        wr_id: u64::from(wr_id),
                        to: To::Peer,
                        op: SendOp::Send,
                        flags: SendFlags::SIGNALED,
                        payload: Payload::Sges(&[from]),
                    };
                    a.adapter.post_send(qps[0], &wr).unwrap();
                    a.adapter.ring_doorbell(now, qps[0]);
                }
                let mut got = 0;
                while got < batch as usize {
                    b.adapter.progress(now);
                    got += b.adapter.poll_cq(b.cq, black_box(&mut done)).unwrap();
                }
                let mut got = 0;
                while got < batch as usize {
                    a.adapter.progress(now);
                    got += a.adapter.poll_cq(a.cq, black_box(&mut done)).unwrap();
                }
            }
            report(&format!("send of {len} B, both ends, {batch} at a time"), start, ROUNDS);
        }
    }
}

#[test]
#[ignore = "prints figures, asserts nothing about time"]
fn stream() {
    for len in [8usize, 64, 4096, 60_000] {
        let mut pair = Pair::new(Way::Stream(usize::MAX));
        let qps = [pair.hosts[0].qp(), pair.hosts[1].qp()];
        pair.connect(qps);
        let (here, there) = (pair.buffer(0, 65_536), pair.buffer(1, 65_536));
        let (from, to) = (here.sge(0, len), there.sge(0, 65_536));
        let (now, conns) = (pair.now, pair.stream_ends());
        let [a, b] = &mut pair.hosts;
        let mut done = [Completion::default(); 16];
        let mut wire = vec![0u8; 1 << 20];
        let rounds = if len > 10_000 { ROUNDS / 100 } else { ROUNDS };
        for batch in [1u32, 16] {
            let start = Instant::now();
            for _ in 0..rounds / batch {
                for wr_id in 0..batch {
                    b.adapter.post_recv(now, qps[1], u64::from(wr_id), &[to]).unwrap();
                    let wr = SendWr {
                        wr_id: u64::from(wr_id),
                        to: To::Peer,
                        op: SendOp::Send,
                        flags: SendFlags::SIGNALED,
                        payload: Payload::Sges(&[from]),
                    };
                    a.adapter.post_send(qps[0], &wr).unwrap();
                }
                a.adapter.ring_doorbell(now, qps[0]);
                while a.adapter.next_transmit().is_some() {}
                let used = a.adapter.transmit(now, conns[0], &mut wire);
                assert_eq!(b.adapter.handle_stream(now, conns[1], &wire[..used]), used);
                assert_eq!(b.adapter.poll_cq(b.cq, black_box(&mut done)), Ok(batch as usize));
                b.adapter.release_acks();
                while b.adapter.next_transmit().is_some() {}
                let used = b.adapter.transmit(now, conns[1], &mut wire);
                assert_eq!(a.adapter.handle_stream(now, conns[0], &wire[..used]), used);
                assert_eq!(a.adapter.poll_cq(a.cq, black_box(&mut done)), Ok(batch as usize));
            }
            report(
                &format!("stream: send of {len} B, both ends, {batch} at a time"),
                start,
                rounds,
            );
        }
    }
}
