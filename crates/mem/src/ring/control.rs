//! The control block of a direction: counters and words that one side writes and the other reads.
//!
//! Three lines of 128 bytes: the consumer's progress; the consumer's sleep; the producer's own.

use core::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};

use super::LINE;
use crate::guard::Guard;
use crate::segment::{Segment, SegmentError, Shared};

/// Bytes in a control block.
pub(crate) const CONTROL_LEN: usize = 3 * LINE;

/// What the word `armed` says: the consumer is awake, sleeps until the next push, or until there are enough.
const AWAKE: u32 = 0;
const NEXT: u32 = 1;
const ENOUGH: u32 = 2;

/// The words of a control block.
pub(crate) struct ControlWords {
    pub requests_consumed: Shared<AtomicU32>,
    pub responses_consumed: Shared<AtomicU32>,
    pub request_bytes: Shared<AtomicU64>,
    pub response_bytes: Shared<AtomicU64>,
    pub executed: Shared<AtomicU32>,
    pub stall: Shared<AtomicU64>,
    pub armed: Shared<AtomicU32>,
    pub enough: Shared<AtomicU32>,
    pub grants: Shared<AtomicU32>,
    pub guard: Shared<AtomicU32>,
    pub producer_closed: Shared<AtomicU32>,
    pub requests_started: Shared<AtomicU32>,
    pub responses_started: Shared<AtomicU32>,
}

impl ControlWords {
    pub(crate) fn at(segment: &Segment, base: usize) -> Result<ControlWords, SegmentError> {
        Ok(ControlWords {
            requests_consumed: segment.u32_at(base)?,
            responses_consumed: segment.u32_at(base + 4)?,
            request_bytes: segment.u64_at(base + 8)?,
            response_bytes: segment.u64_at(base + 16)?,
            executed: segment.u32_at(base + 24)?,
            stall: segment.u64_at(base + 32)?,
            armed: segment.u32_at(base + LINE)?,
            grants: segment.u32_at(base + LINE + 4)?,
            enough: segment.u32_at(base + LINE + 8)?,
            guard: segment.u32_at(base + 2 * LINE)?,
            producer_closed: segment.u32_at(base + 2 * LINE + 4)?,
            requests_started: segment.u32_at(base + 2 * LINE + 8)?,
            responses_started: segment.u32_at(base + 2 * LINE + 12)?,
        })
    }
}

/// The consumer is not ready for a request (RNR): the producer waits and sends it again, or goes on,
/// from this request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stall {
    /// The number of the request that found no receive posted.
    pub sequence: u32,
    /// The RNR timer code (5 bits, as in an RNR NAK).
    pub timer: u8,
    /// Tells this stall from the one before about the same request.
    pub attempt: u16,
}

impl Stall {
    /// Marks a word that holds a stall.
    const VALID: u64 = 1 << 63;

    fn pack(self) -> u64 {
        let timer = u64::from(self.timer & 0x1f);
        Self::VALID | timer << 48 | u64::from(self.attempt) << 32 | u64::from(self.sequence)
    }

    fn unpack(word: u64) -> Option<Stall> {
        (word & Self::VALID != 0).then_some(Stall {
            sequence: word as u32,
            timer: (word >> 48) as u8 & 0x1f,
            attempt: (word >> 32) as u16,
        })
    }
}

/// A sequentially consistent fence, as cheap as the processor has it: on x86 any locked instruction is one,
/// and MFENCE, which a fence compiles to, takes several times as long.
#[inline]
fn full_fence() {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    // SAFETY: the word on top of the stack stays as it is, and nothing is pushed. That memory is not declared
    // untouched keeps the compiler from moving accesses across.
    unsafe {
        core::arch::asm!("lock or dword ptr [rsp], 0", options(nostack));
    }
    #[cfg(not(all(target_arch = "x86_64", not(miri))))]
    fence(Ordering::SeqCst);
}

/// The producer's view of a direction's control block.
#[derive(Debug)]
pub struct ProducerControl {
    executed: Shared<AtomicU32>,
    stall: Shared<AtomicU64>,
    armed: Shared<AtomicU32>,
    enough: Shared<AtomicU32>,
    grants: Shared<AtomicU32>,
    producer_closed: Shared<AtomicU32>,
    guard: Guard,
}

impl ProducerControl {
    pub(crate) fn new(words: &ControlWords) -> ProducerControl {
        ProducerControl {
            executed: words.executed.clone(),
            stall: words.stall.clone(),
            armed: words.armed.clone(),
            enough: words.enough.clone(),
            grants: words.grants.clone(),
            producer_closed: words.producer_closed.clone(),
            guard: Guard::new(words.guard.clone()),
        }
    }

    /// How many requests the consumer says it has executed, wrapping. Check it against what was
    /// sent: the consumer may lie.
    #[inline]
    pub fn executed(&self) -> u32 {
        self.executed.load(Ordering::Acquire)
    }

    /// The request that the consumer is not ready for, if any.
    #[inline]
    pub fn stall(&self) -> Option<Stall> {
        Stall::unpack(self.stall.load(Ordering::Acquire))
    }

    /// Whether the consumer sleeps, after a push. If so it is taken as woken: the caller must ring
    /// its bell, and will not be told to again until the consumer arms anew.
    #[inline]
    pub fn must_ring(&self) -> bool {
        full_fence();
        self.armed.load(Ordering::Relaxed) != AWAKE && self.wake()
    }

    /// As [`must_ring`](Self::must_ring), where the requests pushed so far end at `position`, and a consumer
    /// that sleeps until there are enough of them is left alone before.
    #[inline]
    pub fn must_ring_at(&self, position: u32) -> bool {
        full_fence();
        match self.armed.load(Ordering::Acquire) {
            AWAKE => false,
            ENOUGH if position.wrapping_sub(self.enough.load(Ordering::Relaxed)) >= 1 << 31 => {
                false
            }
            _ => self.wake(),
        }
    }

    #[cold]
    fn wake(&self) -> bool {
        self.armed.swap(AWAKE, Ordering::AcqRel) != AWAKE
    }

    /// Says that nothing more will be pushed, and that memory to which requests refer is not to be touched
    /// any more. Then wait for accesses under way (see [`Guard`]).
    pub fn close(&self) {
        self.producer_closed.store(1, Ordering::Release);
    }

    /// The rights that the consumer's queue pair grants to direct accesses, as bits. Look inside the guard.
    #[inline]
    pub fn grants(&self) -> u32 {
        self.grants.load(Ordering::Acquire)
    }

    /// The guard for this side's own accesses to the consumer's memory.
    #[inline]
    pub fn guard(&self) -> &Guard {
        &self.guard
    }
}

/// The consumer's view of a direction's control block.
#[derive(Debug)]
pub struct ConsumerControl {
    executed: Shared<AtomicU32>,
    stall: Shared<AtomicU64>,
    armed: Shared<AtomicU32>,
    enough: Shared<AtomicU32>,
    grants: Shared<AtomicU32>,
    producer_closed: Shared<AtomicU32>,
    guard: Guard,
}

impl ConsumerControl {
    pub(crate) fn new(words: &ControlWords) -> ConsumerControl {
        ConsumerControl {
            executed: words.executed.clone(),
            stall: words.stall.clone(),
            armed: words.armed.clone(),
            enough: words.enough.clone(),
            grants: words.grants.clone(),
            producer_closed: words.producer_closed.clone(),
            guard: Guard::new(words.guard.clone()),
        }
    }

    /// Says how many requests have been executed, wrapping.
    #[inline]
    pub fn set_executed(&self, count: u32) {
        self.executed.store(count, Ordering::Release);
    }

    /// Says that a request found no receive posted, or (with `None`) that things go on.
    pub fn set_stall(&self, stall: Option<Stall>) {
        self.stall.store(stall.map_or(0, Stall::pack), Ordering::Release);
    }

    /// Asks to be woken by the next push. Look into the rings once more before parking.
    pub fn arm(&self) {
        self.armed.store(NEXT, Ordering::Relaxed);
        fence(Ordering::SeqCst);
    }

    /// Asks to be woken when the requests pushed end at `position` or beyond, or sooner if the producer finds
    /// that better. Look once more before parking, and do so only if there is nothing at all.
    pub fn arm_at(&self, position: u32) {
        self.enough.store(position, Ordering::Relaxed);
        // Release: a thread that sees this does not see an older position.
        self.armed.store(ENOUGH, Ordering::Release);
        fence(Ordering::SeqCst);
    }

    /// Needs no bell any more.
    pub fn disarm(&self) {
        self.armed.store(AWAKE, Ordering::Relaxed);
    }

    /// Says which rights the queue pair grants to direct accesses from now on, as bits; 0 at first. After
    /// taking some back, wait for accesses under way (see [`Guard`]).
    pub fn set_grants(&self, rights: u32) {
        self.grants.store(rights, Ordering::Release);
    }

    /// The producer will not push anything more, and memory to which its requests refer is its own again.
    /// What it pushed before may still be in the rings. Look inside the guard.
    #[inline]
    pub fn producer_closed(&self) -> bool {
        self.producer_closed.load(Ordering::Acquire) != 0
    }

    /// The guard of the producer's accesses to this side's memory, to sample after a withdrawal.
    #[inline]
    pub fn guard(&self) -> &Guard {
        &self.guard
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stalls_pack_into_a_word() {
        for stall in [
            Stall { sequence: 0, timer: 0, attempt: 0 },
            Stall { sequence: u32::MAX, timer: 31, attempt: u16::MAX },
            Stall { sequence: 7, timer: 12, attempt: 1 },
        ] {
            assert_eq!(Stall::unpack(stall.pack()), Some(stall));
        }
        assert_eq!(Stall::unpack(0), None);
        assert_eq!(Stall::unpack(!Stall::VALID), None);
    }

    #[test]
    fn both_views_see_the_same_words() {
        let segment = Segment::heap(CONTROL_LEN);
        let words = ControlWords::at(&segment, 0).unwrap();
        let (producer, consumer) = (ProducerControl::new(&words), ConsumerControl::new(&words));
        consumer.set_executed(9);
        assert_eq!(producer.executed(), 9);
        let stall = Stall { sequence: 3, timer: 14, attempt: 2 };
        consumer.set_stall(Some(stall));
        assert_eq!(producer.stall(), Some(stall));
        consumer.set_stall(None);
        assert_eq!(producer.stall(), None);
        assert!(!producer.must_ring());
        consumer.arm();
        assert!(producer.must_ring() && !producer.must_ring());
        consumer.arm();
        consumer.disarm();
        assert!(!producer.must_ring());
        consumer.arm();
        assert!(producer.must_ring_at(0));
        // Positions wrap.
        for (enough, before, from) in [(5, [4, u32::MAX], [5, 6]), (1, [0, u32::MAX], [1, 2])] {
            consumer.arm_at(enough);
            assert!(before.into_iter().all(|position| !producer.must_ring_at(position)));
            for position in from {
                consumer.arm_at(enough);
                assert!(producer.must_ring_at(position) && !producer.must_ring_at(position));
            }
            consumer.arm_at(enough);
            assert!(producer.must_ring(), "it is a sleeper all the same");
        }
        assert_eq!((consumer.producer_closed(), producer.grants()), (false, 0));
        producer.close();
        consumer.set_grants(5);
        assert_eq!((consumer.producer_closed(), producer.grants()), (true, 5));
    }
}
