//! How long runs of all services may take, in virtual time and in events.

/// How long after the last disturbance everything must have come to an end, in virtual time. It covers
/// the longest back-off of reconnecting and retransmission, several times over.
pub(crate) const PATIENCE_NS: u64 = 20_000_000_000;
/// The same after bytes were damaged, and with them lengths and keys that others wait for.
pub(crate) const DAMAGE_PATIENCE_NS: u64 = 200_000_000_000;
/// How long what was destroyed may take to be gone.
pub(crate) const FAREWELL_NS: u64 = 5_000_000_000;
/// More events than any run needs.
pub(crate) const MOST_EVENTS: u64 = 5_000_000;
