//! Sizes of what the adapter provides.

use quipu_am::message::MAX_HEAD;

/// How often a queue pair sends a request again.
pub(super) const RETRIES: u8 = 7;

/// Sizes that depend on those of the engine.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sizes {
    pub(super) slot: usize,
    pub(super) receives: u32,
    pub(super) sends: u32,
    pub(super) send_buffers: u32,
    /// The timeout of queue pairs, as IBA encodes it.
    pub(super) timeout: u8,
}

impl Sizes {
    pub(super) fn of(config: &quipu_am::Config) -> Self {
        // An odd number of cache lines, so that the beginnings of slots are in all sets of a cache.
        let lines = (config.max_medium as usize + MAX_HEAD).div_ceil(64) | 1;
        let fixed = u32::from(config.max_outstanding) + config.shared_credits;
        Self {
            slot: lines * 64,
            receives: (fixed + 2 * config.max_connections + 256).next_power_of_two(),
            sends: 2 * u32::from(config.max_window) + 64,
            send_buffers: config.send_buffers.max(4),
            // The other half is for what TCP takes to notice.
            timeout: timeout_within(config.give_up_ns / 2),
        }
    }
}

/// The longest timeout with which a queue pair gives a silent peer up within that time. The adapter
/// may take four times the nominal time (IBA 9.7.6.1.3).
fn timeout_within(ns: u64) -> u8 {
    const NOMINAL_NS: u64 = 4096;
    let each = ns / (4 * u64::from(RETRIES + 1)) / NOMINAL_NS;
    (each.max(1).ilog2() as u8).clamp(1, 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_silent_peer_is_given_up_within_the_time() {
        for (ns, most) in [(10_000_000_000, 16), (1_000_000_000, 12), (1, 1), (u64::MAX, 31)] {
            let timeout = timeout_within(ns);
            assert_eq!(timeout, most);
            let takes = 4 * u64::from(RETRIES + 1) * (4096 << timeout);
            assert!(takes <= ns || timeout == 1);
        }
    }
}
