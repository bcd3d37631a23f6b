//! What takes the place of fences on the fast path: a barrier that whoever is in less of a hurry has the
//! kernel make on all processors (`membarrier(2)`); and who a thread is.
//!
//! A thread that writes one word and then reads another needs a full fence between them, if another thread
//! does the same with the words exchanged and one of the two has to see the other's write. Where one side
//! comes a million times as often as the other, it leaves the fence out, and the other makes one for both.

use std::time::Duration;

/// A number that no other living thread of this process has, a multiple of 8 that is not 0.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
pub(crate) fn thread() -> usize {
    let pointer;
    // SAFETY: the first word of a thread's own block is the address of that block, by the ABI of thread-local
    // storage on this processor ("ELF Handling For Thread-Local Storage", 3.4.6). It never changes.
    unsafe {
        core::arch::asm!("mov {}, fs:0", out(reg) pointer, options(pure, nomem, nostack, preserves_flags));
    }
    pointer
}

/// A number that no other living thread of this process has, a multiple of 8 that is not 0.
#[cfg(target_arch = "aarch64")]
#[inline(always)]
pub(crate) fn thread() -> usize {
    let pointer;
    // SAFETY: the register of the thread's own block, which never changes.
    unsafe {
        core::arch::asm!("mrs {}, tpidr_el0", out(reg) pointer, options(pure, nomem, nostack, preserves_flags));
    }
    pointer
}

/// A number that no other living thread of this process has, a multiple of 8 that is not 0.
#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
#[inline]
pub(crate) fn thread() -> usize {
    // SAFETY: takes nothing, and cannot fail.
    unsafe { libc::pthread_self() as usize }
}

/// Whether the kernel has [`everywhere`] (Linux 4.16), from now on for the threads of this process too. Asked
/// again each time: what a parent registered is not its child's.
pub(crate) fn register() -> bool {
    [libc::MEMBARRIER_CMD_REGISTER_GLOBAL_EXPEDITED, COMMAND].into_iter().all(membarrier)
}

/// A full barrier on each processor that runs a thread of a process that has registered, of whichever user,
/// wherever its program is at that moment. A thread that does not run has made one when it was stopped.
///
/// `false` if the program has forbidden itself the call since: then this waits until every processor has been
/// interrupted by its clock, which is a barrier too.
pub(crate) fn everywhere() -> bool {
    let made = membarrier(COMMAND);
    if !made {
        std::thread::sleep(TICKS);
    }
    made
}

/// Some ticks of the slowest clock that a kernel is built with (100 Hz).
const TICKS: Duration = Duration::from_millis(30);
const COMMAND: libc::c_int = libc::MEMBARRIER_CMD_GLOBAL_EXPEDITED;

fn membarrier(command: libc::c_int) -> bool {
    // SAFETY: takes no pointer.
    unsafe { libc::syscall(libc::SYS_membarrier, command, 0, 0) == 0 }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering, compiler_fence};
    use std::sync::mpsc;

    use quipu_mem::Segment;
    use quipu_mem::ring::{Channel, ChannelConfig, ChannelLayout, SlotHeader};

    use super::*;

    /// A word that shares its line with no other.
    #[repr(align(128))]
    struct Line(AtomicU32);

    #[test]
    fn threads_have_different_numbers() {
        let here = thread();
        assert!(here != 0 && here.is_multiple_of(8));
        assert_eq!(here, thread());
        std::thread::scope(|scope| assert_ne!(scope.spawn(thread).join().unwrap(), here));
    }

    /// The one side without a fence, the other with barriers: not both may miss the other's write.
    #[test]
    fn one_side_makes_the_fence_of_both() {
        const ROUNDS: u32 = 20_000;
        if !register() {
            return;
        }
        let line = || Line(AtomicU32::new(0));
        let (often, rare) = (line(), line());
        // What each saw, for rounds of either parity: one side may be a round ahead.
        let (often_saw, rare_saw) = ([line(), line()], [line(), line()]);
        let tell = |seen: &[Line; 2], round: u32, saw: bool| {
            seen[round as usize % 2].0.store(round << 1 | u32::from(saw), Ordering::Release);
        };
        let ask = |seen: &[Line; 2], round: u32| {
            let word = &seen[round as usize % 2].0;
            let mut turns = 0u32;
            while word.load(Ordering::Acquire) >> 1 != round {
                turns += 1;
                if turns.is_multiple_of(1000) {
                    std::thread::yield_now();
                }
            }
            word.load(Ordering::Acquire) & 1 != 0
        };
        let mut missed = 0;
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for round in 1..=ROUNDS {
                    // So that the two come to it in each order.
                    (0..round % 64).for_each(|_| std::hint::spin_loop());
                    often.0.store(round, Ordering::Relaxed);
                    compiler_fence(Ordering::SeqCst);
                    tell(&often_saw, round, rare.0.load(Ordering::Relaxed) >= round);
                    ask(&rare_saw, round);
                }
            });
            for round in 1..=ROUNDS {
                rare.0.store(round, Ordering::Relaxed);
                everywhere();
                let saw = often.0.load(Ordering::Relaxed) >= round;
                tell(&rare_saw, round, saw);
                missed += u32::from(!ask(&often_saw, round) && !saw);
            }
        });
        assert_eq!(missed, 0, "neither saw the other's write");
    }

    /// As `a_sleeping_consumer_is_always_woken` of the rings, by a producer that leaves fences out.
    #[test]
    fn a_consumer_that_sleeps_is_woken_without_fences() {
        const MESSAGES: u32 = 200_000;
        if !register() {
            return;
        }
        let config = ChannelConfig::default();
        let segment = Segment::heap(ChannelLayout::new(config).unwrap().total_len());
        let mut creator = Channel::create(&segment, 0, config).unwrap();
        let mut attacher = Channel::attach(&segment, 0, config).unwrap();
        creator.outgoing.control.allow_unfenced();
        attacher.incoming.control.may_skip_fences();
        while !attacher.incoming.control.is_unfenced() {
            assert!(!creator.outgoing.control.must_ring());
        }
        let (bell, rung) = mpsc::channel();
        let sender = std::thread::spawn(move || {
            for imm in 0..MESSAGES {
                let header = SlotHeader { imm, ..SlotHeader::default() };
                while creator.outgoing.requests.push(&header, &[]).is_err() {
                    std::thread::yield_now();
                }
                if creator.outgoing.control.must_ring() {
                    bell.send(()).unwrap();
                }
                // Long enough for the other side to fall asleep, each time a little later.
                let rest = if imm % 1000 == 999 { imm / 100 } else { 0 };
                (0..rest).for_each(|_| std::hint::spin_loop());
            }
            bell
        });
        let incoming = &mut attacher.incoming;
        let (mut next, mut vain) = (0, 0);
        while next < MESSAGES {
            if let Some(header) = incoming.requests.peek() {
                assert_eq!(header.imm, next);
                incoming.requests.pop();
                incoming.publish();
                (next, vain) = (next + 1, 0);
                continue;
            }
            vain += 1;
            if vain < 100 {
                continue;
            }
            vain = 0;
            incoming.control.arm();
            if incoming.control.is_unfenced() {
                everywhere();
            }
            if incoming.requests.peek().is_none() {
                rung.recv_timeout(Duration::from_secs(60)).expect("it is woken");
            }
            incoming.control.disarm();
            rung.try_iter().count();
        }
        sender.join().unwrap();
    }
}
