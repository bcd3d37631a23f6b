//! Rates of ports, queue pairs and service levels.

use super::*;

#[test]
fn a_rate_is_kept() {
    for rate in [GBIT / 10, GBIT, 20 * GBIT] {
        for way in [Way::Stream(usize::MAX), Way::Link] {
            let mut bench = Bench::new(way, config(&[], &[(0, 1)], rate), &[0], 5, 65536);
            let ns = if rate > GBIT { 5_000_000 } else { 100_000_000 };
            let sent = bench.measure(ns);
            let expected = rate as f64 / 8e9 * ns as f64;
            assert_near(sent[0], expected, 0.012, &format!("{rate} bit/s, {way:?}"));
        }
    }
}

/// A queue pair's own rate needs no port.
#[test]
fn a_queue_pair_has_a_rate_of_its_own() {
    let mut bench = Bench::new(Way::Link, config(&[], &[(0, 1)], 0), &[0], 5, 65536);
    let attr = QpAttr { rate_limit: 400_000, ..QpAttr::default() };
    let qp = bench.flows[0].qps[0];
    let now = bench.pair.now;
    let adapter = &mut bench.pair.hosts[0].adapter;
    adapter.modify_qp(now, qp, &attr, QpAttrMask::RATE_LIMIT).unwrap();
    let sent = bench.measure(50_000_000);
    assert_near(sent[0], 2_500_000.0, 0.02, "400 Mbit/s for 50 ms");
}

/// Many queue pairs of one lane have their turns in order.
/// A service level has a rate of its own, whatever its port's is; datagrams obey it, too.
#[test]
fn service_levels_and_datagrams_have_rates() {
    let mut sl_rates = [0; 16];
    (sl_rates[0], sl_rates[1]) = (400_000_000, 80_000_000);
    let qos = Qos { sl_rates, ..config(&[], &[(0, 1), (1, 1)], 0) };
    let mut bench = Bench::new(Way::Link, qos, &[0], 5, 65536);
    assert_near(bench.measure(50_000_000)[0], 2_500_000.0, 0.02, "400 Mbit/s for 50 ms");
    let qp = bench.pair.datagram_qp(0);
    let dgid = bench.pair.hosts[1].adapter.config().gid;
    let ah = bench.pair.ah_with(0, dgid, |av| av.sl = 1);
    let to = To::Datagram { ah, qpn: 9, qkey: crate::pair::QKEY };
    let list = [bench.from.sge(0, 974)];
    let (flags, payload) = (SendFlags::SIGNALED, Payload::Sges(&list));
    let wr = SendWr { wr_id: 9, to, op: SendOp::Send, flags, payload };
    let (mut posted, mut sent) = (0, 0);
    for _ in 0..500 {
        while posted < 16 {
            bench.pair.send_datagram(0, qp, &wr).unwrap();
            posted += 1;
        }
        bench.pair.run_until(bench.pair.now.after(100_000));
        let done = bench.pair.polled(0).iter().filter(|it| it.0 == 9).count();
        (posted, sent) = (posted - done, sent + done);
    }
    // 1000 octets each, and a millisecond's that an idle one may send at once.
    assert_near(sent as f64, 510.0, 0.02, "80 Mbit/s for 50 ms");
}
