//! What memory gives at best: copies by one processor, a cache line between two, and the kernel's copies
//! between two processes.

use std::hint::{black_box, spin_loop};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};

use super::{End, Setup, Slice};
use crate::model::{Kind, Op};
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

/// The kernel's copies between two processes, of which the other one does nothing.
pub(super) struct KernelCopy {
    bytes: Vec<u8>,
    /// The other process, and where its bytes are.
    peer: Option<(u32, u64)>,
    first: bool,
}

impl KernelCopy {
    pub(super) fn new(setup: &Setup) -> Self {
        let size = usize::try_from(setup.max_size).unwrap_or(1 << 20);
        Self { bytes: vec![1; size], peer: None, first: setup.first }
    }

    fn copies(&mut self, slice: &Slice, count: u64) -> Result<Duration> {
        let (pid, addr) = self.peer.context("not connected")?;
        let bytes = &mut self.bytes[..usize::try_from(slice.size)?];
        let start = Instant::now();
        for _ in 0..count {
            sys::copy_peer(pid, addr, bytes, slice.test.op == Op::Write)?;
        }
        Ok(start.elapsed())
    }
}

impl End for KernelCopy {
    fn address(&self) -> String {
        format!("{} {}", std::process::id(), self.bytes.as_ptr().addr())
    }

    fn connect(&mut self, address: &str) -> Result<()> {
        let (pid, addr) = address.split_once(' ').context("an address of two numbers")?;
        self.peer = Some((pid.parse()?, addr.parse()?));
        Ok(())
    }

    fn run(&mut self, slice: &Slice, armed: &mut dyn FnMut() -> Result<()>) -> Result<Duration> {
        armed()?;
        if !self.first {
            return Ok(Duration::ZERO);
        }
        self.copies(slice, slice.warmup)?;
        self.copies(slice, slice.count)
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
            _ => bail!("memory neither sleeps nor connects"),
        }
    }
}
