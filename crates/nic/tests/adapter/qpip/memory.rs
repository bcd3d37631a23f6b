//! Keys and bounds, which count when octets are touched.

use quipu_nic::inet::tcp::Failure;

use super::net::{Net, SECOND, pattern};
use super::*;

#[test]
fn a_send_from_memory_that_is_not_there_is_a_local_protection_error() {
    for mode in MODES {
        let mut net = Net::new();
        let qps = [0, 1].map(|host| net.qp(host, QpType::Tcp));
        let (source, sink) = (net.buffer(0, 100), net.buffer(1, 1000));
        net.recv(1, qps[1], 1, &[sink.sge(0, 1000)]);
        net.join(qps, mode);
        net.send(0, qps[0], 1, &[source.sge(0, 50)]);
        let beyond = mem::Sge { len: 51, ..source.sge(50, 50) };
        net.send(0, qps[0], 2, &[beyond]);
        net.send(0, qps[0], 3, &[source.sge(0, 50)]);
        net.run_for(SECOND);
        // The first went out, but its acknowledgement can come no more.
        assert_eq!(
            brief(&net.poll(0)),
            [
                (1, WcStatus::WrFlushErr, 0),
                (2, WcStatus::LocProtErr, 0),
                (3, WcStatus::WrFlushErr, 0)
            ]
        );
        assert_eq!(net.changes(0), [(qps[0], TcpChange::Aborted)]);
        assert_eq!(net.changes(1), [(qps[1], TcpChange::Failed(Failure::Reset))]);
    }
}

#[test]
fn a_retransmission_reads_the_memory_again() {
    for deregistered in [false, true] {
        let mut net = Net::new();
        let qps = [0, 1].map(|host| net.qp(host, QpType::Tcp));
        let (source, sink) = (net.buffer(0, 5000), net.buffer(1, 9000));
        net.recv(1, qps[1], 1, &[sink.sge(0, 9000)]);
        net.join(qps, Mode::Message);
        // The second of four segments is lost.
        let mut count = 0;
        net.filter = Some(Box::new(move |to, frame| {
            count += u32::from(to == 1 && frame.len() > 1000);
            count != 2
        }));
        source.fill(0, &pattern(1, 5000));
        net.send(0, qps[0], 1, &[source.sge(0, 5000)]);
        net.run_for(1_000);
        if deregistered {
            let now = net.now();
            net.adapter(0).dereg_mr(now, source.region.id).unwrap();
        }
        net.run_for(SECOND);
        let (sent, got) = (brief(&net.poll(0)), brief(&net.poll(1)));
        if deregistered {
            assert_eq!(sent, [(1, WcStatus::LocProtErr, 0)]);
            assert_eq!(got, [(1, WcStatus::WrFlushErr, 0)]);
        } else {
            assert_eq!(sent, [(1, WcStatus::Success, 5000)]);
            assert_eq!(got, [(1, WcStatus::Success, 5000)]);
            assert_eq!(sink.bytes(0, 5000), pattern(1, 5000));
        }
    }
}

#[test]
fn a_receive_into_memory_that_is_not_there_ends_the_connection() {
    for mode in MODES {
        let mut net = Net::new();
        let qps = [0, 1].map(|host| net.qp(host, QpType::Tcp));
        let sink = net.buffer(1, 1000);
        let read_only = net.pair.buffer_with(1, 1000, mem::Access::empty());
        net.recv(1, qps[1], 1, &[sink.sge(0, 100)]);
        net.recv(1, qps[1], 2, &[read_only.sge(0, 100)]);
        net.recv(1, qps[1], 3, &[sink.sge(0, 100)]);
        net.join(qps, mode);
        net.send_bytes(0, qps[0], 1, &pattern(1, 100));
        net.send_bytes(0, qps[0], 2, &pattern(2, 100));
        net.run_for(SECOND);
        assert_eq!(
            brief(&net.poll(1)),
            [
                (1, WcStatus::Success, 100),
                (2, WcStatus::LocProtErr, 0),
                (3, WcStatus::WrFlushErr, 0)
            ]
        );
        assert_eq!(read_only.bytes(0, 100), [0; 100]);
        assert_eq!(net.changes(1), [(qps[1], TcpChange::Aborted)]);
    }
}

#[test]
fn behind_a_gap_a_stream_is_already_in_its_place() {
    let mut net = Net::new();
    let qps = [0, 1].map(|host| net.qp(host, QpType::Tcp));
    let (source, sink) = (net.buffer(0, 1 << 14), net.buffer(1, 1 << 14));
    for n in 0..4 {
        net.recv(1, qps[1], n, &[sink.sge(n as usize * 2000, 2000)]);
    }
    net.join(qps, Mode::Stream);
    let mut count = 0;
    net.filter = Some(Box::new(move |to, frame| {
        count += u32::from(to == 1 && frame.len() > 1000);
        count != 2
    }));
    source.fill(0, &pattern(1, 8000));
    net.send(0, qps[0], 1, &[source.sge(0, 8000)]);
    net.run_for(60_000);
    assert_eq!(net.poll(1), [], "the first receive is not full");
    let first = sink.bytes(0, 8000);
    assert_eq!(first[..1400], pattern(1, 8000)[..1400]);
    assert_eq!(first[3000..7000], pattern(1, 8000)[3000..7000], "the third segment on");
    assert_eq!(first[1500..2000], [0; 500]);
    net.run_for(SECOND);
    let expected: Vec<_> = (0..4).map(|n| (n, WcStatus::Success, 2000)).collect();
    assert_eq!(brief(&net.poll(1)), expected);
    assert_eq!(sink.bytes(0, 8000), pattern(1, 8000));
}

#[test]
fn a_push_completes_a_receive_early_in_stream_mode() {
    let mut net = Net::new();
    let qps = [0, 1].map(|host| net.qp(host, QpType::Tcp));
    let sink = net.buffer(1, 1 << 14);
    for n in 0..3 {
        net.recv(1, qps[1], n, &[sink.sge(n as usize * 1000, 1000)]);
    }
    net.join(qps, Mode::Stream);
    net.send_bytes(0, qps[0], 1, &pattern(1, 30));
    net.run_for(SECOND);
    assert_eq!(brief(&net.poll(1)), [(0, WcStatus::Success, 30)]);
    net.send_bytes(0, qps[0], 2, &pattern(2, 40));
    net.run_for(SECOND);
    assert_eq!(brief(&net.poll(1)), [(1, WcStatus::Success, 40)]);
    assert_eq!(sink.bytes(0, 30), pattern(1, 30));
    assert_eq!(sink.bytes(1000, 40), pattern(2, 40));
}
