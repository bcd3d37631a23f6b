//! Barriers, reductions and broadcasts.

use std::sync::atomic::{AtomicU64, Ordering, fence};

use crate::link::control;
use crate::runtime::Runtime;
use crate::segment::SLOT;

impl Runtime {
    /// Waits until all processes are here: in each of log2(P) rounds, a process tells the one 2^round
    /// further,
    /// and hears from the one 2^round before.
    pub(crate) fn barrier(&self) {
        let (me, procs) = (self.me(), self.procs());
        let epoch = self.epoch.get() + 1;
        self.epoch.set(epoch);
        // What this process has written is seen by those that leave the barrier.
        fence(Ordering::SeqCst);
        let mut round = 0;
        while 1 << round < procs {
            let partner = (me + (1 << round)) % procs;
            match self.control(partner) {
                Some(theirs) => theirs.flags[round].0.store(epoch, Ordering::Release),
                None => {
                    let sent = self.link_to(partner).flag(partner as u32, round, epoch);
                    sent.unwrap_or_else(|why| crate::runtime::fail(&why));
                }
            }
            self.wait_until(|| control().flags[round].0.load(Ordering::Acquire) >= epoch);
            round += 1;
        }
        self.tick();
    }

    /// Shows bytes to all, and reads what all have shown: at most [`SLOT`] bytes each, of one length.
    pub(crate) fn exchange(&self, bytes: &[u8]) -> Vec<Vec<u8>> {
        let (me, procs) = (self.me(), self.procs());
        let call = self.shows.get() + 1;
        self.shows.set(call);
        let slot = (call & 1) as usize;
        put(&control().slots[slot].0, bytes);
        for proc in (0..procs).filter(|proc| self.control(*proc).is_none()) {
            let sent = self.link_to(proc).show(proc as u32, me as u32, call, bytes);
            sent.unwrap_or_else(|why| crate::runtime::fail(&why));
        }
        // A slot is written again two calls later: everybody has read it by then, since all have come to the
        // barrier of the call between.
        self.barrier();
        let read = |proc: usize| match self.control(proc) {
            Some(theirs) => get(&theirs.slots[slot].0, bytes.len()),
            None => {
                let link = self.link_to(proc);
                self.wait_until(|| link.shown(proc as u32, call).is_some());
                link.shown(proc as u32, call).unwrap_or_default()
            }
        };
        (0..procs).map(read).collect()
    }

    /// Gives all the bytes that process 0 has.
    pub(crate) fn broadcast(&self, bytes: &mut [u8]) {
        for piece in bytes.chunks_mut(SLOT) {
            let shown = self.exchange(piece);
            if let Some(first) = shown.first().filter(|first| first.len() == piece.len()) {
                piece.copy_from_slice(first);
            }
        }
    }
}

fn put(slot: &[AtomicU64], bytes: &[u8]) {
    for (word, piece) in slot.iter().zip(bytes.chunks(8)) {
        let mut value = [0; 8];
        value[..piece.len()].copy_from_slice(piece);
        word.store(u64::from_le_bytes(value), Ordering::Relaxed);
    }
}

fn get(slot: &[AtomicU64], len: usize) -> Vec<u8> {
    let words = slot.iter().take(len.div_ceil(8));
    let mut bytes: Vec<u8> =
        words.flat_map(|word| word.load(Ordering::Relaxed).to_le_bytes()).collect();
    bytes.truncate(len);
    bytes
}

/// The operations of reductions, as the header numbers them.
pub(crate) fn combine_long(op: i32, a: i64, b: i64) -> i64 {
    match op {
        0 => a.wrapping_add(b),
        1 => a.wrapping_mul(b),
        2 => a.max(b),
        3 => a.min(b),
        4 => a & b,
        5 => a | b,
        _ => a ^ b,
    }
}

/// The same for numbers with fractions.
pub(crate) fn combine_double(op: i32, a: f64, b: f64) -> f64 {
    match op {
        0 => a + b,
        1 => a * b,
        2 => a.max(b),
        _ => a.min(b),
    }
}

/// Which values of a reduction a process gets: for one, for all, or a scan up to itself.
pub(crate) fn reach(how: i32, me: usize, procs: usize) -> usize {
    if how == 2 { me + 1 } else { procs }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_survive_a_slot() {
        let slot: Vec<AtomicU64> = (0..4).map(|_| AtomicU64::new(u64::MAX)).collect();
        for len in 0..=32 {
            let bytes: Vec<u8> = (0..len as u8).map(|byte| byte ^ 0x5a).collect();
            put(&slot, &bytes);
            assert_eq!(get(&slot, len), bytes);
        }
    }

    #[test]
    fn operations_are_those_of_their_numbers() {
        let all: Vec<i64> = (0..7).map(|op| combine_long(op, 6, 3)).collect();
        assert_eq!(all, [9, 18, 6, 3, 2, 7, 5]);
        let all: Vec<f64> = (0..4).map(|op| combine_double(op, 1.5, -2.0)).collect();
        assert_eq!(all, [-0.5, -3.0, 1.5, -2.0]);
        assert_eq!((reach(2, 1, 4), reach(1, 1, 4)), (2, 4));
    }
}
