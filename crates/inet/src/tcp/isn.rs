//! Initial sequence numbers (RFC 6528) and the offset of timestamps (RFC 7323 5.4).

use quipu_wire::tcp::SeqNumber;

use super::hash::{Flow, Purpose, Secret, of_flow};

/// RFC 9293 3.4.1: the clock ticks about every four microseconds, and wraps in less than five hours.
const TICK: u64 = 4_000;

/// ISN = M + F(flow, secret) (RFC 6528 3; RFC 9293 MUST-8, MUST-9, SHLD-1): a later connection of the same
/// flow begins above an earlier one, and nobody off the path can tell where.
pub(crate) fn initial_number(now: u64, secret: Secret, flow: &Flow) -> SeqNumber {
    let offset = of_flow(secret, Purpose::InitialNumber, flow, [0; 2]) as u32;
    SeqNumber(((now / TICK) as u32).wrapping_add(offset))
}

/// What is added to the clock of timestamps: constant for a flow, so that timestamps grow from one
/// connection of it to the next (RFC 6191), and different between flows.
pub(crate) fn timestamp_offset(secret: Secret, flow: &Flow) -> u32 {
    of_flow(secret, Purpose::Timestamp, flow, [0; 2]) as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_grow_with_time_and_differ_between_flows() {
        let secret = Secret([1, 2]);
        let flow =
            |port| Flow { local: ([10, 0, 0, 1], 80).into(), remote: ([10, 0, 0, 2], port).into() };
        let at = |now, port| initial_number(now, secret, &flow(port));
        assert_eq!(at(4_000_000, 9).distance(at(0, 9)), 1_000);
        assert_ne!(at(0, 9), at(0, 10));
        assert_ne!(at(0, 9), initial_number(0, Secret([1, 3]), &flow(9)));
        assert_ne!(timestamp_offset(secret, &flow(9)), at(0, 9).0);
    }
}
