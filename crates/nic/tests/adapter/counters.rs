//! What is counted of the work of queue pairs.

use crate::pair::{Pair, QKEY, WAYS, Way, connected};
use quipu_nic::*;

/// The counters of the only queue pair of a host.
fn of(pair: &Pair, host: usize) -> QpCounters {
    let mut all = pair.hosts[host].adapter.queue_pairs();
    let summary = all.next().unwrap();
    assert!(all.next().is_none());
    summary.counters
}

#[test]
fn work_is_counted_at_both_ends() {
    for way in WAYS {
        let (mut pair, qps) = connected(way);
        let (from, to) = (pair.buffer(0, 4096), pair.buffer(1, 4096));
        let (addr, rkey) = (to.addr(), to.key());
        for wr_id in 0..4 {
            pair.recv(1, qps[1], wr_id, &[to.sge(0, 4096)]);
        }
        for wr_id in 0..3 {
            pair.send(0, qps[0], wr_id, SendOp::Send, &[from.sge(0, 100)]);
        }
        let imm = SendOp::WriteImm { addr, rkey, imm: 1 };
        pair.send(0, qps[0], 3, imm, &[from.sge(0, 1000)]);
        pair.send(0, qps[0], 4, SendOp::Read { addr, rkey }, &[from.sge(0, 500)]);
        pair.send(0, qps[0], 5, SendOp::FetchAdd { addr, rkey, add: 1 }, &[from.sge(0, 8)]);
        pair.run();
        assert_eq!((pair.hosts[0].poll().len(), pair.hosts[1].poll().len()), (6, 4), "{way:?}");
        let sender = of(&pair, 0);
        let wanted = RequesterCounters {
            sends: 3,
            writes: 1,
            reads: 1,
            atomics: 1,
            bytes: 1808,
            ..RequesterCounters::default()
        };
        assert_eq!(sender.requester, wanted, "{way:?}");
        assert_eq!(sender.responder, ResponderCounters::default());
        let receiver = of(&pair, 1);
        assert_eq!(receiver.requester, RequesterCounters::default());
        let served = receiver.responder;
        assert_eq!((served.receives, served.writes, served.atomics), (4, 1, 1), "{way:?}");
        assert_eq!((served.bytes_in, served.rnr, served.refused), (1300, 0, 0), "{way:?}");
        // A read that the initiator executes by itself is not noticed.
        assert!(served.reads <= 1 && served.bytes_out == 500 * served.reads, "{way:?}");
        let adapter = pair.hosts[0].adapter.counters();
        assert_eq!((adapter.completions, adapter.by_status()[0]), (6, 6));
        assert_eq!((adapter.doorbells, adapter.queue_pairs), (6, 1));
        let summary = pair.hosts[0].adapter.queue_pairs().next().unwrap();
        let peer = pair.hosts[1].adapter.queue_pairs().next().unwrap();
        assert_eq!((summary.peer, summary.state), (peer.num, QpState::Rts));
        let stream = summary.path == PathKind::Stream;
        assert_eq!(stream, matches!(way, Way::Stream(_)), "{:?}", summary.path);
        assert_eq!((summary.send_queue, peer.recv_queue), (0, 0));
    }
}

#[test]
fn refusals_are_counted_at_both_ends() {
    for way in WAYS {
        let (mut pair, qps) = connected(way);
        let (from, to) = (pair.buffer(0, 4096), pair.buffer(1, 4096));
        pair.send(0, qps[0], 1, SendOp::Send, &[from.sge(0, 100)]);
        let soon = pair.now.after(100_000);
        pair.run_until(soon);
        assert_eq!(of(&pair, 1).responder.rnr, 1, "{way:?}");
        pair.recv(1, qps[1], 1, &[to.sge(0, 4096)]);
        let later = pair.now.after(1_000_000_000);
        pair.run_until(later);
        assert_eq!(pair.hosts[0].poll().len(), 1, "{way:?}");
        let requester = of(&pair, 0).requester;
        assert!(requester.rnr >= 1, "{way:?}");
        // Only on a stream is anything sent again.
        assert_eq!(requester.retransmitted >= 1, matches!(way, Way::Stream(_)), "{way:?}");
        let wrong = SendOp::Write { addr: to.addr(), rkey: to.key() ^ 0x55 };
        pair.send(0, qps[0], 2, wrong, &[from.sge(0, 8)]);
        pair.send(0, qps[0], 3, SendOp::Send, &[from.sge(0, 8)]);
        pair.run();
        assert_eq!(pair.hosts[0].poll().len(), 2, "{way:?}");
        assert_eq!(of(&pair, 0).requester.failed, 1, "{way:?}");
        assert_eq!(of(&pair, 1).responder.refused, 1, "{way:?}");
        let adapter = &mut pair.hosts[0].adapter;
        let status =
            |adapter: &Adapter, status: WcStatus| adapter.counters().by_status()[status as usize];
        assert_eq!(status(adapter, WcStatus::RemAccessErr), 1);
        assert_eq!(status(adapter, WcStatus::WrFlushErr), 1);
        // What a queue pair did is not forgotten with it.
        adapter.destroy_qp(Time(0), qps[0]).unwrap();
        assert_eq!(adapter.counters().gone.requester.sends, 1);
        assert_eq!(adapter.counters().gone.requester.failed, 1);
    }
}

#[test]
fn datagrams_count_the_same_at_both_ends() {
    let mut pair = Pair::new(Way::Stream(usize::MAX));
    let qps = [0, 1].map(|host| pair.datagram_qp(host));
    let (here, there) = (pair.buffer(0, 64), pair.buffer(1, 256));
    pair.recv(1, qps[1], 1, &[there.sge(0, 256)]);
    let to = To::Datagram { ah: pair.ah(0), qpn: pair.number(1, qps[1]).0, qkey: QKEY };
    let (op, flags, sges) = (SendOp::Send, SendFlags::empty(), [here.sge(0, 8)]);
    let wr = SendWr { wr_id: 1, to, op, flags, payload: Payload::Sges(&sges) };
    pair.send_datagram(0, qps[0], &wr).unwrap();
    pair.run();
    assert_eq!(pair.hosts[1].poll()[0].byte_len, 48, "with its route header");
    let (sent, received) = (of(&pair, 0).requester, of(&pair, 1).responder);
    assert_eq!((sent.sends, sent.bytes), (1, 8));
    assert_eq!((received.receives, received.bytes_in), (1, 8));
}
