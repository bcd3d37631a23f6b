//! Queue pairs of TCP and UDP between two adapters on a simulated link of packets.

mod datagrams;
mod deferred;
mod early;
mod ends;
mod hostile;
mod iwarp;
mod iwarp_early;
mod kept;
mod lanes;
mod lifecycle;
mod looped;
mod memory;
mod messages;
pub mod net;
mod parts;
mod stages;

use quipu_nic::inet::tcp::Mode;
use quipu_nic::*;

/// The one completion that there is.
pub fn only(completions: Vec<Completion>) -> Completion {
    assert_eq!(completions.len(), 1, "{completions:?}");
    completions[0]
}

/// What of a completion most tests look at.
pub fn brief(completions: &[Completion]) -> Vec<(u64, WcStatus, u32)> {
    completions.iter().map(|it| (it.wr_id, it.status, it.byte_len)).collect()
}

const MODES: [Mode; 2] = [Mode::Message, Mode::Stream];
