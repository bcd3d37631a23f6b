//! What the command says at the end.

use std::net::Ipv6Addr;

use quipu_ipoib::{ConnectionInfo, Counters, Dropped};

/// What passed, why some was dropped, and the connections, of those that have ended the last ones.
pub(super) fn of(counters: &Counters, connections: &[ConnectionInfo]) -> String {
    let Counters { sent, received, asked, answered, .. } = counters;
    let dropped = Dropped::ALL.iter().filter(|why| counters.dropped_for(**why) > 0);
    let dropped: Vec<_> =
        dropped.map(|why| format!("{} {}", why.name(), counters.dropped_for(*why))).collect();
    let dropped = if dropped.is_empty() { "none".to_owned() } else { dropped.join(", ") };
    let mut out = format!(
        "ipoib: {sent} packets sent, {received} received; {asked} addresses asked for, \
         {answered} answers; dropped: {dropped}"
    );
    let Counters { opened, accepted, refused, failed, too_big, .. } = counters;
    if [opened, accepted, refused, failed, too_big].into_iter().any(|&count| count > 0) {
        out += &format!(
            "\nipoib: {opened} connections opened, {accepted} accepted, {refused} refused, {failed} \
             failed; {too_big} times a sender got the MTU of a neighbour"
        );
    }
    for ConnectionInfo { peer, is_outgoing, has_ended, mtu, packets, bytes } in connections {
        let ended = if *has_ended { "; it has ended" } else { "" };
        let way = if *is_outgoing { "to" } else { "from" };
        let gid = Ipv6Addr::from(peer.gid);
        out += &format!(
            "\nipoib: connection {way} queue pair {:#x} at {gid}: MTU {mtu}, {packets} packets, \
             {bytes} bytes{ended}",
            peer.qpn
        );
    }
    out
}
