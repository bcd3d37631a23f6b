//! A thousand queue pairs of one engine, all of which have work all the time.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use crate::common::{PATIENCE, connect};
use quipu_host::nic::mem::Segment;
use quipu_host::nic::{
    Access, Completion, CqId, Gid, Payload, QpCap, QpId, QpInit, QpNum, QpType, Region, SendFlags,
    SendOp, SendWr, Sge, To, WcOpcode, WcStatus,
};
use quipu_host::{Config, Engine, SameHost};

const QUEUE_PAIRS: usize = 1000;
/// Sends of a queue pair that are in flight, and receives that it has posted.
const SENDS: u32 = 4;
const RECEIVES: u32 = 16;
/// Messages of a queue pair, on average, that are counted.
const MESSAGES: u64 = 100;
const BYTES: u32 = 64;

/// An engine with many queue pairs on one completion queue.
struct Crowd {
    engine: Arc<Engine>,
    cq: CqId,
    qps: Vec<(QpId, QpNum)>,
    memory: Segment,
    region: Region,
    /// What each has completed.
    done: Vec<u64>,
}

impl Crowd {
    fn new(address: &str, same_host: SameHost) -> Self {
        let address = Some(address.parse().unwrap());
        let engine = Engine::open(Config { address, same_host, ..Config::default() }).unwrap();
        let (context, _) = engine.open_context().unwrap();
        let pd = engine.alloc_pd().unwrap();
        let room = QUEUE_PAIRS as u32 * (SENDS + RECEIVES);
        let (cq, _) = engine.create_cq(context, room, None, 0).unwrap();
        let memory = Segment::heap(BYTES as usize);
        let region = engine.reg_segment(pd, &memory, None, Access::LOCAL_WRITE).unwrap();
        let cap = QpCap {
            max_send_wr: SENDS,
            max_recv_wr: RECEIVES,
            max_send_sge: 1,
            max_recv_sge: 1,
            max_inline_data: 0,
        };
        let (srq, qp_type, sq_sig_all) = (None, QpType::Rc, false);
        let init = QpInit { pd, send_cq: cq, recv_cq: cq, srq, cap, qp_type, sq_sig_all };
        let create = |_| {
            let (qp, number, _) = engine.create_qp(context, &init).unwrap();
            (qp, number)
        };
        let qps: Vec<_> = (0..QUEUE_PAIRS).map(create).collect();
        Self { engine, cq, qps, memory, region, done: vec![0; QUEUE_PAIRS] }
    }

    fn connect(&self, gid: Gid, numbers: &[(QpId, QpNum)]) {
        for (&(qp, _), &(_, number)) in self.qps.iter().zip(numbers) {
            connect(&self.engine, qp, gid, number);
        }
    }

    fn sge(&self) -> Sge {
        Sge { addr: self.memory.addr() as u64, len: BYTES, lkey: self.region.key }
    }

    fn send(&self, at: usize) {
        let (flags, sges) = (SendFlags::SIGNALED, [self.sge()]);
        let (op, payload) = (SendOp::Send, Payload::Sges(&sges));
        let wr = SendWr { wr_id: at as u64, to: To::Peer, op, flags, payload };
        self.engine.post_send(self.qps[at].0, &wr).unwrap();
    }

    fn receive(&self, at: usize) {
        self.engine.post_recv(self.qps[at].0, at as u64, &[self.sge()]).unwrap();
    }

    /// Does again what has completed, and counts it; how much there was.
    fn turn(&mut self) -> u64 {
        let mut out = [Completion::default(); 64];
        let found = self.engine.poll_cq(self.cq, &mut out).unwrap();
        for completion in &out[..found] {
            assert_eq!(completion.status, WcStatus::Success);
            let at = completion.wr_id as usize;
            self.done[at] += 1;
            match completion.opcode {
                WcOpcode::Recv => self.receive(at),
                _ => self.send(at),
            }
        }
        found as u64
    }
}

/// Two engines, each polled by a thread of its own, as those of two processes would be: what each queue pair
/// of the sender got done meanwhile, least first.
fn shares(addresses: [&str; 2], same_host: SameHost) -> Vec<u64> {
    let [mut a, mut b] = addresses.map(|address| Crowd::new(address, same_host));
    a.connect(b.engine.gid(), &b.qps);
    b.connect(a.engine.gid(), &a.qps);
    for at in 0..QUEUE_PAIRS {
        (0..RECEIVES).for_each(|_| b.receive(at));
    }
    for _ in 0..SENDS {
        (0..QUEUE_PAIRS).for_each(|at| a.send(at));
    }
    let end = Instant::now() + 3 * PATIENCE;
    let over = AtomicBool::new(false);
    let (over, peer) = (&over, &mut b);
    std::thread::scope(|scope| {
        scope.spawn(move || {
            while !over.load(Ordering::Relaxed) && Instant::now() < end {
                peer.turn();
            }
        });
        // They are not connected all at once.
        while a.done.contains(&0) {
            assert!(Instant::now() < end, "not all are connected");
            a.turn();
        }
        a.done.fill(0);
        let mut count = MESSAGES * QUEUE_PAIRS as u64;
        while count > 0 {
            assert!(Instant::now() < end, "{count} messages are missing");
            count = count.saturating_sub(a.turn());
        }
        over.store(true, Ordering::Relaxed);
    });
    a.done.sort_unstable();
    a.done
}

fn assert_fair(done: &[u64]) {
    let (least, median, most) = (done[0], done[QUEUE_PAIRS / 2], done[QUEUE_PAIRS - 1]);
    let text = format!("least {least}, median {median}, most {most}");
    assert!(2 * least >= median && most <= 2 * median, "{text}");
}

#[test]
fn a_crowd_over_tcp_is_served_in_turn() {
    assert_fair(&shares(["127.0.0.51", "127.0.0.52"], SameHost::Never));
}

#[test]
fn a_crowd_on_one_host_is_served_in_turn() {
    assert_fair(&shares(["127.0.0.53", "127.0.0.54"], SameHost::Auto));
}
