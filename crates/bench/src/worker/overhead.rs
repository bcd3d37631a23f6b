//! What a message costs the program: the time it spends in calls that post and poll, without the
//! time it waits (table 1 of the QPIP paper).

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use quipu_host::nic::{Completion, Payload, SendFlags, SendOp, SendWr, To};

use super::Patience;
use super::quipu::{BATCH, Node, RECEIVES};
use crate::model::{Cost, Overhead};
use crate::stats;
use crate::sys::cycles;

/// How long the sender leaves the engine alone between posting and polling: the other end takes and
/// acknowledges everything meanwhile.
const PAUSE: Duration = Duration::from_micros(60);

/// Converts cycles to nanoseconds: both clocks were read at the start.
struct Scale {
    start: Instant,
    start_cycles: u64,
}

impl Scale {
    fn new() -> Self {
        Self { start: Instant::now(), start_cycles: cycles() }
    }

    fn cost(&self, cycles_per_message: f64) -> Cost {
        let ns = self.start.elapsed().as_nanos() as f64;
        let passed = cycles().saturating_sub(self.start_cycles).max(1) as f64;
        Cost { ns: cycles_per_message * ns / passed, cycles: cycles_per_message }
    }
}

/// Measures `rounds` bursts of `burst` messages of `size` bytes; fills in what this end sees.
pub(super) fn measure(
    node: &Node,
    (size, burst, rounds): (u64, u64, u64),
    armed: &mut dyn FnMut() -> Result<()>,
) -> Result<Overhead> {
    ensure!((1..=64).contains(&burst) && rounds > 0 && size <= node.half, "out of range");
    let scale = Scale::new();
    let nothing = Cost::default();
    let mut out = Overhead {
        path: node.path,
        size,
        burst,
        post_send: nothing,
        poll_send: nothing,
        post_recv: nothing,
        poll_recv: nothing,
    };
    if node.first {
        armed()?;
        let (post, poll) = send_bursts(node, size, burst, rounds)?;
        (out.post_send, out.poll_send) = (scale.cost(post), scale.cost(poll));
    } else {
        let (post, poll) = receive_all(node, size, burst * rounds, armed)?;
        (out.post_recv, out.poll_recv) = (scale.cost(post), scale.cost(poll));
    }
    Ok(out)
}

/// Cycles per message of posting and of polling: medians over the bursts.
fn send_bursts(node: &Node, size: u64, burst: u64, rounds: u64) -> Result<(f64, f64)> {
    let sges = [node.outgoing(size)?];
    let wr = SendWr {
        wr_id: 0,
        to: To::Peer,
        op: SendOp::Send,
        flags: SendFlags::SIGNALED,
        payload: Payload::Sges(&sges),
    };
    let (mut posting, mut polling) = (Vec::new(), Vec::new());
    for _ in 0..rounds {
        let start = cycles();
        for _ in 0..burst {
            node.engine.post_send(node.qp, &wr)?;
        }
        posting.push(cycles().saturating_sub(start) as f64 / burst as f64);
        let pause = Instant::now();
        while pause.elapsed() < PAUSE {
            std::hint::spin_loop();
        }
        let spent = poll_all(node, burst, || Ok(()))?.polling;
        polling.push(spent as f64 / burst as f64);
    }
    Ok((stats::median(&posting), stats::median(&polling)))
}

/// What polling for completions came to.
struct Polled {
    /// Completions: a poll may have found more than was asked for.
    got: u64,
    /// Cycles in polls that found some.
    polling: u64,
    /// Cycles in what follows each completion.
    after: u64,
}

/// Polls until at least so many completions are there; `after` follows each.
fn poll_all(node: &Node, count: u64, mut after: impl FnMut() -> Result<()>) -> Result<Polled> {
    let mut out = [Completion::default(); BATCH];
    let mut patience = Patience::new();
    let mut sum = Polled { got: 0, polling: 0, after: 0 };
    while sum.got < count {
        let start = cycles();
        let found = node.poll(&mut out)?.len() as u64;
        let polled = cycles();
        if found == 0 {
            let missing = || format!("{} of {count} completions", sum.got);
            patience.check().with_context(missing)?;
            continue;
        }
        sum.got += found;
        sum.polling += polled.saturating_sub(start);
        for _ in 0..found {
            after()?;
        }
        sum.after += cycles().saturating_sub(polled);
    }
    Ok(sum)
}

/// Cycles per message of posting receives and of polling their completions.
fn receive_all(
    node: &Node,
    size: u64,
    count: u64,
    armed: &mut dyn FnMut() -> Result<()>,
) -> Result<(f64, f64)> {
    let sges = [node.incoming(size)?];
    let mut left = count;
    let mut post = || -> Result<()> {
        if left > 0 {
            left -= 1;
            node.engine.post_recv(node.qp, 0, &sges)?;
        }
        Ok(())
    };
    for _ in 0..count.min(RECEIVES) {
        post()?;
    }
    armed()?;
    // As many as are posted, again and again, so that one interruption does not decide the result.
    let (mut polls, mut posts) = (Vec::new(), Vec::new());
    let mut got = 0;
    while got < count {
        let part = poll_all(node, (count - got).min(64), &mut post)?;
        polls.push(part.polling as f64 / part.got as f64);
        posts.push(part.after as f64 / part.got as f64);
        got += part.got;
    }
    Ok((stats::median(&posts), stats::median(&polls)))
}
