//! What both ends have agreed on in their SYNs.

use quipu_wire::tcp::{MAX_WINDOW_SCALE, Options, SackBlocks, Timestamps};

use super::config::Config;
use super::hash::Flow;

/// The MSS of a peer that names none (RFC 9293 3.7.1, MUST-15).
pub(crate) fn default_mss(flow: &Flow) -> u16 {
    if flow.remote.is_ipv6() { 1220 } else { 536 }
}

/// The least segment that is believed: a peer that offers less would multiply our work. Everybody takes
/// packets of 576 octets (RFC 791 3.1).
pub(crate) const MIN_MSS: u16 = 216;
/// The timestamps option with its padding.
pub(crate) const TIMESTAMPS_LEN: u32 = 12;

/// The options in force.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Negotiated {
    /// What the peer can receive in a segment.
    pub peer_mss: u16,
    /// Timestamps are in every segment.
    pub timestamps: bool,
    /// SACK may be sent and may come.
    pub sack: bool,
    /// ECN is in force (RFC 3168 6.1.1).
    pub ecn: bool,
    /// Both scales, that of the peer's windows first; none: neither is scaled (RFC 7323 2.2).
    pub scales: Option<(u8, u8)>,
}

impl Negotiated {
    /// What follows of the peer's SYN and of what this end wants; `mss` is that of a peer that names none.
    pub(crate) fn new(config: &Config, peer: &Options, mss: u16, ecn: bool) -> Self {
        Self {
            peer_mss: peer.mss.unwrap_or(mss).max(MIN_MSS),
            timestamps: config.timestamps && peer.timestamps.is_some(),
            sack: config.sack && peer.sack_permitted,
            ecn: config.ecn && ecn,
            scales: peer.window_scale.map(|scale| (scale, window_scale(config))),
        }
    }
}

/// The least scale with which all room can be offered (RFC 7323 2.3).
pub(crate) fn window_scale(config: &Config) -> u8 {
    let mut scale = 0;
    while scale < MAX_WINDOW_SCALE && config.max_receive_space >> scale > u64::from(u16::MAX) {
        scale += 1;
    }
    scale
}

/// The options of a SYN, or of the answer to one: an answer has only what the SYN had (RFC 7323 1.3, RFC
/// 2018 2).
pub(crate) fn of_syn(config: &Config, answer: Option<&Negotiated>, clock: Timestamps) -> Options {
    let (timestamps, sack, scale) = match answer {
        None => (config.timestamps, config.sack, true),
        Some(agreed) => (agreed.timestamps, agreed.sack, agreed.scales.is_some()),
    };
    Options {
        mss: Some(config.receive_mss),
        window_scale: scale.then(|| window_scale(config)),
        sack_permitted: sack,
        timestamps: timestamps.then_some(clock),
        sack: SackBlocks::EMPTY,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_scale_is_as_small_as_it_may_be() {
        for (space, scale) in [(0, 0), (65_535, 0), (65_536, 1), (4 << 20, 7), (u64::MAX, 14)] {
            let config = Config { max_receive_space: space, ..Config::default() };
            assert_eq!(window_scale(&config), scale, "{space}");
        }
    }

    #[test]
    fn a_peer_without_options_gets_the_defaults() {
        for (local, remote, mss) in
            [("10.0.0.1:1", "10.0.0.2:1", 536), ("[::1]:1", "[::1]:2", 1220)]
        {
            let flow = Flow { local: local.parse().unwrap(), remote: remote.parse().unwrap() };
            assert_eq!(default_mss(&flow), mss, "MUST-15");
        }
        let agreed = Negotiated::new(&Config::default(), &Options::default(), 536, false);
        let none = Negotiated { peer_mss: 536, ..Negotiated::default() };
        assert_eq!(agreed, none);
        let answer = of_syn(&Config::default(), Some(&agreed), Timestamps::default());
        assert_eq!(answer, Options { mss: Some(1440), ..Options::default() });
    }
}
