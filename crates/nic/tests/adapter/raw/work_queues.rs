//! Receive work queues of raw packets, and the tables over which a hash spreads frames.

use super::{Bench, GROUP, frame, to_station};
use quipu_nic::*;

const KEY: [u8; RX_HASH_KEY] = [0x6d; RX_HASH_KEY];

/// Two work queues at host 1, each in a completion queue of its own, and a table with four entries.
struct Spread {
    queues: [SrqId; 2],
    cqs: [CqId; 2],
    table: TableId,
    qp: QpId,
}

impl Spread {
    fn new(bench: &mut Bench, state: WqState) -> Self {
        let host = &mut bench.pair.hosts[1];
        let (pd, adapter) = (host.pd, &mut host.adapter);
        let cqs = [(); 2].map(|()| adapter.create_cq(64, None, 0).unwrap().0);
        let queues = cqs.map(|cq| adapter.create_wq(pd, cq, 32, 1).unwrap());
        for wq in queues {
            adapter.modify_wq(bench.pair.now, wq, state).unwrap();
        }
        let table = adapter.create_ind_table(&[queues[0], queues[1]].repeat(2)).unwrap();
        let hash = RxHash::new(KEY, RxHashFields::SRC_IPV4).unwrap();
        let qp = adapter.create_hashed_qp(pd, table, hash, QpNum::new(4999, 9)).unwrap();
        bench.receivers[0] = qp;
        Self { queues, cqs, table, qp }
    }

    fn post(&self, bench: &mut Bench, wq: usize, wr_id: u64) -> Result<(), Fault> {
        let sge = [bench.there.sge(wq * 8192, 100)];
        bench.pair.hosts[1].adapter.post_wq_recv(bench.pair.now, self.queues[wq], wr_id, &sge)
    }

    fn poll(&self, bench: &mut Bench, wq: usize) -> Vec<Completion> {
        let mut out = [Completion::default(); 64];
        let found = bench.pair.hosts[1].adapter.poll_cq(self.cqs[wq], &mut out).unwrap();
        out[..found].to_vec()
    }
}

#[test]
fn frames_are_spread_over_work_queues() {
    let mut bench = Bench::new();
    let spread = Spread::new(&mut bench, WqState::Ready);
    bench.flow(0, to_station(GROUP));
    for wr_id in 0..32 {
        spread.post(&mut bench, 0, wr_id).unwrap();
        spread.post(&mut bench, 1, 100 + wr_id).unwrap();
    }
    let mut counts = [0; 2];
    for last in 0..32 {
        let frame = frame(GROUP, last);
        let mut places = Vec::new();
        for _ in 0..2 {
            assert_eq!(bench.send(&frame), WcStatus::Success);
            for (wq, count) in counts.iter_mut().enumerate() {
                for completion in spread.poll(&mut bench, wq) {
                    assert_eq!(completion.status, WcStatus::Success);
                    assert_eq!(completion.byte_len as usize, frame.len());
                    assert_eq!(completion.wr_id >= 100, wq == 1);
                    assert_eq!(bench.there.bytes(wq * 8192, frame.len()), frame);
                    places.push(wq);
                    *count += 1;
                }
            }
        }
        assert!(places.len() <= 2 && places.windows(2).all(|two| two[0] == two[1]), "{places:?}");
    }
    // What had no receive left was dropped; both queues had their share.
    assert_eq!(counts[0] + counts[1] + bench.drops().no_receive as usize, 64);
    assert!(counts.iter().all(|&count| count > 8), "{counts:?}");
}

#[test]
fn the_states_of_a_work_queue() {
    let mut bench = Bench::new();
    let spread = Spread::new(&mut bench, WqState::Reset);
    bench.flow(0, to_station(GROUP));
    assert_eq!(spread.post(&mut bench, 0, 1), Err(Fault::WrongState));
    assert_eq!(bench.send(&frame(GROUP, 0)), WcStatus::Success);
    assert_eq!(bench.drops().no_queue_pair, 1, "it is not ready");
    let to = |bench: &mut Bench, state| {
        bench.pair.hosts[1].adapter.modify_wq(Time(0), spread.queues[0], state)
    };
    to(&mut bench, WqState::Ready).unwrap();
    spread.post(&mut bench, 0, 1).unwrap();
    to(&mut bench, WqState::Reset).unwrap();
    to(&mut bench, WqState::Ready).unwrap();
    spread.post(&mut bench, 0, 2).unwrap();
    to(&mut bench, WqState::Err).unwrap();
    spread.post(&mut bench, 0, 3).unwrap();
    let flushed: Vec<_> = spread.poll(&mut bench, 0).iter().map(|c| (c.wr_id, c.status)).collect();
    assert_eq!(flushed, [(2, WcStatus::WrFlushErr), (3, WcStatus::WrFlushErr)]);
    assert!(matches!(to(&mut bench, WqState::Ready), Err(Fault::Transition(_))));
    assert_eq!(to(&mut bench, WqState::Err), Ok(()));
    to(&mut bench, WqState::Reset).unwrap();
    assert_eq!(bench.pair.hosts[1].adapter.wq_state(spread.queues[0]), Ok(WqState::Reset));
}

#[test]
fn a_device_that_fails_flushes_its_work_queues() {
    let mut bench = Bench::new();
    let spread = Spread::new(&mut bench, WqState::Ready);
    spread.post(&mut bench, 0, 1).unwrap();
    let now = bench.pair.now;
    bench.pair.hosts[1].adapter.strike(now, AsyncEvent::DeviceFatal);
    let flushed: Vec<_> = spread.poll(&mut bench, 0).iter().map(|c| (c.wr_id, c.status)).collect();
    assert_eq!(flushed, [(1, WcStatus::WrFlushErr)]);
    assert_eq!(bench.pair.hosts[1].adapter.wq_state(spread.queues[1]), Ok(WqState::Err));
}

#[test]
fn completions_of_a_work_queue_end_with_it() {
    let mut bench = Bench::new();
    let spread = Spread::new(&mut bench, WqState::Ready);
    let flow = bench.flow(0, to_station(GROUP));
    let fill = |bench: &mut Bench| {
        for wq in [0, 1] {
            spread.post(bench, wq, 1).unwrap();
        }
        assert_eq!(bench.send(&frame(GROUP, 0)), WcStatus::Success);
    };
    fill(&mut bench);
    for wq in spread.queues {
        let adapter = &mut bench.pair.hosts[1].adapter;
        adapter.modify_wq(bench.pair.now, wq, WqState::Reset).unwrap();
        adapter.modify_wq(bench.pair.now, wq, WqState::Ready).unwrap();
    }
    for wq in [0, 1] {
        assert_eq!(spread.poll(&mut bench, wq), []);
    }
    fill(&mut bench);
    let adapter = &mut bench.pair.hosts[1].adapter;
    adapter.destroy_flow(flow).unwrap();
    adapter.destroy_qp(Time(0), spread.qp).unwrap();
    adapter.destroy_ind_table(spread.table).unwrap();
    for wq in spread.queues {
        adapter.destroy_srq(wq).unwrap();
    }
    for wq in [0, 1] {
        assert_eq!(spread.poll(&mut bench, wq), []);
    }
}

#[test]
fn a_receive_into_foreign_memory_ends_its_work_queue_alone() {
    let mut bench = Bench::new();
    let spread = Spread::new(&mut bench, WqState::Ready);
    bench.flow(0, to_station(GROUP));
    let address = bench.there.sge(0, 100).addr;
    let foreign = [Sge { addr: address, len: 100, lkey: Key(7) }];
    let adapter = &mut bench.pair.hosts[1].adapter;
    for wq in spread.queues {
        adapter.post_wq_recv(bench.pair.now, wq, 1, &foreign).unwrap();
        adapter.post_wq_recv(bench.pair.now, wq, 2, &foreign).unwrap();
    }
    assert_eq!(bench.send(&frame(GROUP, 0)), WcStatus::Success);
    let [first, second] = [0, 1].map(|wq| spread.poll(&mut bench, wq));
    let (hit, spared) = if first.is_empty() { (second, first) } else { (first, second) };
    let statuses: Vec<_> = hit.iter().map(|c| (c.wr_id, c.status)).collect();
    assert_eq!(statuses, [(1, WcStatus::LocProtErr), (2, WcStatus::WrFlushErr)]);
    assert!(spared.is_empty());
    let info = bench.pair.hosts[1].adapter.query_qp(spread.qp).unwrap();
    assert_eq!(info.attr.state, QpState::Rtr);
}

#[test]
fn work_queues_tables_and_queue_pairs_hold_each_other() {
    let mut bench = Bench::new();
    let spread = Spread::new(&mut bench, WqState::Ready);
    let host = &mut bench.pair.hosts[1];
    let (pd, cq) = (host.pd, host.cq);
    let adapter = &mut host.adapter;
    // What is no work queue, and sizes that a table does not have.
    let shared = adapter.create_srq(pd, 8, 1, 0).unwrap();
    assert!(adapter.create_ind_table(&[shared]).is_err());
    assert!(adapter.modify_wq(Time(0), shared, WqState::Ready).is_err());
    assert!(adapter.post_wq_recv(Time(0), shared, 1, &[]).is_err());
    assert!(adapter.create_ind_table(&[]).is_err());
    assert!(adapter.create_ind_table(&[spread.queues[0]; 3]).is_err());
    assert!(adapter.create_ind_table(&[spread.queues[0]; MAX_TABLE_SIZE * 2]).is_err());
    assert!(adapter.create_wq(pd, CqId::NONE, 8, 1).is_err());
    let init = QpInit {
        pd,
        send_cq: cq,
        recv_cq: cq,
        srq: Some(spread.queues[0]),
        cap: QpCap::default(),
        qp_type: QpType::RawPacket,
        sq_sig_all: false,
    };
    assert!(adapter.create_qp(&init, QpNum::new(4999, 10)).is_err());
    // It neither changes its state nor takes work itself.
    let attr = QpAttr { state: QpState::Rts, ..QpAttr::default() };
    assert!(adapter.modify_qp(Time(0), spread.qp, &attr, QpAttrMask::STATE).is_err());
    assert!(adapter.post_recv(Time(0), spread.qp, 1, &[]).is_err());
    // From the outside in.
    assert_eq!(adapter.destroy_cq(spread.cqs[0]), Err(Fault::Busy));
    assert_eq!(adapter.destroy_srq(spread.queues[0]), Err(Fault::Busy));
    assert_eq!(adapter.destroy_ind_table(spread.table), Err(Fault::Busy));
    adapter.destroy_qp(Time(0), spread.qp).unwrap();
    adapter.destroy_ind_table(spread.table).unwrap();
    assert_eq!(adapter.destroy_ind_table(spread.table), Err(Fault::NoSuchObject));
    for (wq, cq) in spread.queues.into_iter().zip(spread.cqs) {
        adapter.destroy_srq(wq).unwrap();
        adapter.destroy_cq(cq).unwrap();
    }
}
