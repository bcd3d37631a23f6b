//! What memory gives at best: copies by one processor, and a cache line between two.

use std::hint::{black_box, spin_loop};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Result, bail};

use super::{End, Setup, Slice};
use crate::model::Kind;
use crate::sys;

/// Measures memory, within one process.
pub(super) struct Memory {
    from: Vec<u8>,
    to: Vec<u8>,
    other_cpu: usize,
}

impl Memory {
    pub(super) fn new(setup: &Setup) -> Self {
        let size = usize::try_from(setup.max_size).unwrap_or(1 << 20);
        Self { from: vec![1; size], to: vec![2; size], other_cpu: setup.other_cpu }
    }

    /// One copy after the other, each from and to the same place.
    fn copies(&mut self, size: usize, count: u64) -> Duration {
        let start = Instant::now();
        for _ in 0..count {
            black_box(&mut self.to)[..size].copy_from_slice(&black_box(&self.from)[..size]);
        }
        start.elapsed()
    }
}

/// A word in a cache line of its own, and away from the line that the prefetcher fetches with it.
#[repr(align(128))]
struct Line(AtomicU64);

/// Odd numbers go there, even numbers come back, through one line.
fn line_ping_pong(count: u64, other_cpu: usize) -> Result<Duration> {
    let line = Line(AtomicU64::new(0));
    std::thread::scope(|scope| {
        let answer = || {
            let pinned = sys::pin(other_cpu);
            for round in 0..count {
                while line.0.load(Ordering::Acquire) != 2 * round + 1 {
                    spin_loop();
                }
                line.0.store(2 * round + 2, Ordering::Release);
            }
            pinned
        };
        let other = scope.spawn(answer);
        let mut start = Instant::now();
        for round in 0..count {
            line.0.store(2 * round + 1, Ordering::Release);
            while line.0.load(Ordering::Acquire) != 2 * round + 2 {
                spin_loop();
            }
            if round == 0 {
                // The other thread had to start first.
                start = Instant::now();
            }
        }
        let took = start.elapsed();
        match other.join() {
            Ok(pinned) => Ok(pinned.map(|()| took)?),
            Err(_) => bail!("the thread on the other processor failed"),
        }
    })
}

impl End for Memory {
    fn address(&self) -> String {
        String::new()
    }

    fn connect(&mut self, _: &str) -> Result<()> {
        Ok(())
    }

    fn run(&mut self, slice: &Slice, armed: &mut dyn FnMut() -> Result<()>) -> Result<Duration> {
        armed()?;
        match slice.test.kind {
            Kind::Stream => {
                let size = usize::try_from(slice.size)?;
                self.copies(size, slice.warmup);
                Ok(self.copies(size, slice.count))
            }
            Kind::Latency => line_ping_pong(slice.count + 1, self.other_cpu),
            Kind::Wake => bail!("memory does not sleep"),
        }
    }
}
