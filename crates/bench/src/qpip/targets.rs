//! What QPIP is to reach compared with the kernel's sockets on the same link.

use super::idle::IdleCost;
use super::model::{
    FROM_SOCKET, Figure, KERNEL, KERNEL_SPINNING, Measured, OWN_PROCESS, QPIP, QPIP_XDP, Rows,
    SMOLTCP, TO_SOCKET,
};
use crate::targets::{Limit, Verdict, of_rounds, ratio as verdict};

/// Most of the kernel's round trip, with both ends spinning.
const ROUND_TRIP: f64 = 1.0;
/// Least of the kernel's throughput, and of smoltcp's.
const BULK: f64 = 0.5;
const SMOLTCP_BULK: f64 = 3.0;
/// Most nanoseconds that a post and a poll that finds its completion may take. A round trip has two of
/// each: of what is sent, and of a place for what comes.
const OVERHEAD_NS: f64 = 150.0;
const MESSAGES: f64 = 2.0;
/// Most of the kernel's processor time for a megabyte, in the programs of both ends.
const HOST: f64 = 0.02;

/// Most octets of an idle connection, and what many of them may add to the work for a packet.
const IDLE_OCTETS: f64 = 1024.0;
const IDLE_GROWTH: f64 = 1.2;

/// Processor time of both programs for a megabyte of a stream, in seconds.
pub(crate) fn program_time(measured: &Measured) -> f64 {
    measured.load.iter().map(|load| load.program).sum::<f64>() / measured.value
}

/// All of them, of the MTUs that were measured.
pub(crate) fn judge(rows: &Rows, idle: Option<&IdleCost>) -> Vec<Verdict> {
    let mut all = Vec::new();
    for (protocol, figure) in [("UDP", Figure::RoundTripUdp), ("TCP", Figure::RoundTripTcp)] {
        let mtu = rows.points(figure).first().copied();
        for ours in [QPIP, QPIP_XDP] {
            let ratio = mtu.and_then(|mtu| rows.ratio((ours, KERNEL), figure, mtu, |m| m.value));
            let metric = format!("{ours} on veth, round trip by {protocol}");
            all.push(verdict(metric, Limit::Most(ROUND_TRIP), KERNEL, ratio));
        }
    }
    let mtu = rows.points(Figure::HostOverhead).first().copied();
    let calls = mtu.and_then(|mtu| rows.row(OWN_PROCESS, Figure::HostOverhead, mtu));
    let metric = "QPIP, own process, calls of a message of 1 B";
    let ns = calls.map(|row| row.median.value / MESSAGES);
    let ns = crate::targets::at_most(metric, ns, OVERHEAD_NS, "ns", "post and poll");
    let rounds = calls.map_or(0, |row| row.counted);
    all.push(of_rounds(ns, rounds));
    for mtu in rows.points(Figure::Bulk) {
        let ratio = |pair, number| rows.ratio(pair, Figure::Bulk, mtu, number);
        for theirs in [KERNEL, KERNEL_SPINNING] {
            let metric = format!("QPIP on veth, ttcp, MTU {mtu}");
            let ratio = ratio((QPIP, theirs), |m| m.value);
            all.push(verdict(metric, Limit::Least(BULK), theirs, ratio));
        }
        let metric = format!("QPIP on veth, ttcp, MTU {mtu}");
        all.push(verdict(
            metric,
            Limit::Least(SMOLTCP_BULK),
            SMOLTCP,
            ratio((QPIP, SMOLTCP), |m| m.value),
        ));
        for [ours, theirs] in [TO_SOCKET, FROM_SOCKET] {
            let metric = format!("{ours} on TAP, ttcp, MTU {mtu}");
            let ratio = ratio((ours, theirs), |m| m.value);
            all.push(verdict(metric, Limit::Least(SMOLTCP_BULK), theirs, ratio));
        }
        let metric = format!("QPIP, own process, programs' CPU a MB, MTU {mtu}");
        let ratio = ratio((OWN_PROCESS, KERNEL), program_time);
        all.push(verdict(metric, Limit::Most(HOST), KERNEL, ratio));
    }
    for size in rows.points(Figure::Sizes) {
        let ratio = rows.ratio((OWN_PROCESS, KERNEL), Figure::Sizes, size, program_time);
        let messages = crate::report::size(u64::from(size));
        let metric = format!("QPIP, own process, programs' CPU a MB, messages of {messages}");
        all.push(verdict(metric, Limit::Most(HOST), KERNEL, ratio));
    }
    let octets = idle.map(|idle| idle.octets);
    let metric = "QPIP, an idle connection, by the stack's own account";
    all.push(crate::targets::at_most(metric, octets, IDLE_OCTETS, "octets", "one of 100,000"));
    let growth = idle.map(|IdleCost { packet_ns: [alone, among], .. }| among / alone);
    let metric = "QPIP, work for a packet among idle connections";
    all.push(crate::targets::at_most(metric, growth, IDLE_GROWTH, "x", "of that without them"));
    all
}

#[cfg(test)]
mod tests {
    use super::super::model::tests::row;
    use super::*;

    #[test]
    fn a_round_trip_is_to_be_short_and_a_transfer_fast() {
        let rows = Rows(vec![
            row(QPIP, Figure::RoundTripTcp, &[Some(9.0); 3]),
            row(KERNEL, Figure::RoundTripTcp, &[Some(10.0); 3]),
            row(QPIP, Figure::Bulk, &[Some(40.0); 3]),
            row(KERNEL, Figure::Bulk, &[Some(100.0); 3]),
            row(OWN_PROCESS, Figure::Bulk, &[Some(50.0); 3]),
            row(OWN_PROCESS, Figure::HostOverhead, &[Some(299.0); 3]),
            row(OWN_PROCESS, Figure::Sizes, &[Some(5100.0); 3]),
            row(KERNEL, Figure::Sizes, &[Some(100.0); 3]),
        ]);
        let reached: Vec<_> =
            judge(&rows, None).into_iter().map(|it| (it.metric, it.reached)).collect();
        let expected = [
            ("QPIP on veth, round trip by UDP", None),
            ("QPIP, XDP on veth, round trip by UDP", None),
            ("QPIP on veth, round trip by TCP", Some(true)),
            ("QPIP, XDP on veth, round trip by TCP", None),
            ("QPIP, own process, calls of a message of 1 B", Some(true)),
            ("QPIP on veth, ttcp, MTU 1500", Some(false)),
            ("QPIP on veth, ttcp, MTU 1500", None),
            ("QPIP on veth, ttcp, MTU 1500", None),
            ("QPIP to socket on TAP, ttcp, MTU 1500", None),
            ("socket to QPIP on TAP, ttcp, MTU 1500", None),
            ("QPIP, own process, programs' CPU a MB, MTU 1500", Some(false)),
            ("QPIP, own process, programs' CPU a MB, messages of 16 KB", Some(true)),
            ("QPIP, an idle connection, by the stack's own account", None),
            ("QPIP, work for a packet among idle connections", None),
        ];
        assert_eq!(reached, expected.map(|(metric, reached)| (metric.to_owned(), reached)));
    }
}
