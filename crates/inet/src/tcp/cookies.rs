//! SYN cookies (RFC 4987 3.6 and its appendix): a handshake without memory.
//!
//! The initial number is a keyed hash of the connection, the peer's number and the time, with the class of
//! the MSS in three of its bits. The other options travel in the six low bits of our timestamp, which the
//! peer echoes; a peer without timestamps gets none of them.

use quipu_wire::tcp::{Repr, SeqNumber, Timestamps};

use super::hash::{Flow, Purpose, Secret, of_flow};
use super::isn::timestamp_offset;
use super::options::{MIN_MSS, Negotiated, window_scale};
use super::{Config, MILLISECOND, SECOND};

/// A cookie counts for one to two of these.
pub(super) const EPOCH: u64 = 64 * SECOND;
/// What segments a peer is believed to receive, at most as large as it said.
const CLASSES: [u16; 8] = [MIN_MSS, 536, 1220, 1440, 1460, 4036, 8940, 16344];
const MAC_BITS: u32 = 0x0fff_ffff;
const OPTION_BITS: u32 = 0x3f;
const SCALE_BITS: u32 = 0x0f;
const NO_SCALE: u32 = 0x0f;
const SACK_BIT: u32 = 0x10;
const ECN_BIT: u32 = 0x20;

fn mac(secret: Secret, flow: &Flow, peer: SeqNumber, epoch: u64, class: u32) -> u32 {
    let more = [epoch, u64::from(peer.0) << 3 | u64::from(class)];
    of_flow(secret, Purpose::Cookie, flow, more) as u32 & MAC_BITS
}

/// The number of the answer to `syn`.
pub(super) fn number(now: u64, secret: Secret, flow: &Flow, syn: &Repr, mss: u16) -> SeqNumber {
    let class = CLASSES.iter().rposition(|class| *class <= mss).unwrap_or(0) as u32;
    let epoch = now / EPOCH;
    let mac = mac(secret, flow, syn.seq, epoch, class);
    SeqNumber((epoch as u32 & 1) << 31 | class << 28 | mac)
}

/// The timestamp of the answer: not after the clock, so that time does not run backwards later.
pub(super) fn timestamp(clock: u32, agreed: &Negotiated) -> u32 {
    let scale = agreed.scales.map_or(NO_SCALE, |(theirs, _)| u32::from(theirs));
    let bits =
        scale | if agreed.sack { SACK_BIT } else { 0 } | if agreed.ecn { ECN_BIT } else { 0 };
    let value = clock & !OPTION_BITS | bits;
    if value.wrapping_sub(clock) as i32 > 0 { value.wrapping_sub(OPTION_BITS + 1) } else { value }
}

/// The clock of a flow's timestamps.
pub(super) fn clock(now: u64, secret: Secret, flow: &Flow) -> u32 {
    ((now / MILLISECOND) as u32).wrapping_add(timestamp_offset(secret, flow))
}

/// What was agreed on with the peer whose `ack` acknowledges a cookie; none if it is not one, or too old.
pub(super) fn agreed(
    now: u64,
    config: &Config,
    secret: Secret,
    flow: &Flow,
    ack: &Repr,
) -> Option<Negotiated> {
    let cookie = (ack.ack - 1).0;
    let class = cookie >> 28 & 7;
    let current = now / EPOCH;
    let epoch =
        if current as u32 & 1 == cookie >> 31 { current } else { current.checked_sub(1)? };
    if mac(secret, flow, ack.seq - 1, epoch, class) != cookie & MAC_BITS {
        return None;
    }
    let plain = Negotiated { peer_mss: CLASSES[class as usize], ..Negotiated::default() };
    let Some(Timestamps { echo, .. }) = ack.options.timestamps.filter(|_| config.timestamps) else {
        return Some(plain);
    };
    let scale = echo & SCALE_BITS;
    Some(Negotiated {
        timestamps: true,
        sack: config.sack && echo & SACK_BIT != 0,
        ecn: config.ecn && echo & ECN_BIT != 0,
        scales: (scale != NO_SCALE).then(|| (scale as u8, window_scale(config))),
        ..plain
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_timestamp_carries_options_and_is_never_ahead() {
        let agreed =
            Negotiated { sack: true, ecn: true, scales: Some((7, 7)), ..Default::default() };
        for clock in [0u32, 1, 55, 56, 63, 64, u32::MAX] {
            let value = timestamp(clock, &agreed);
            assert_eq!(value & OPTION_BITS, 7 | SACK_BIT | ECN_BIT);
            assert!((0..64).contains(&(clock.wrapping_sub(value) as i32)), "{clock}");
        }
    }
}
