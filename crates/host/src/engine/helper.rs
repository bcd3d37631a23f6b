//! The helper thread: progress while nobody polls.
//!
//! While the program polls busily the helper dozes, for no longer than it has polled so far, and a
//! millisecond at most, or a few if it has polled for long. When it finds that the program does not poll at
//! that moment, it waits for descriptors itself, without end if there is no deadline: an idle process costs
//! nothing. It goes on with that until it wakes, called after a thousand polls if not before, and finds the
//! program polling at that moment; a program that polls and, in between, looks at its memory only is served
//! meanwhile. Beside one that is busy for long and does not ask for descriptors itself, it does so now and
//! then. While a thread of the program waits inside the engine for a completion event, or alone at its
//! descriptors (`wait.rs`), that thread does all this, and the helper rests.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::thread::{Builder, JoinHandle};
use std::time::Duration;

use super::Inner;
use super::core::HelperMode;
use crate::clock::kernel_ns;
use crate::error::EngineError;
use crate::link::life::Life;
use crate::lock::{futex_wait, futex_wake};
use crate::pages;
use crate::sys::{self, EventFd, ReadyList, wait_either};

/// The shortest and the longest doze. Each is twice the one before: so long, and no longer than it has
/// polled, a program that stops polling is without help, and a peer without the last acknowledgement.
const DOZE_MIN: Duration = Duration::from_micros(100);
const DOZE_MAX: Duration = Duration::from_millis(1);
/// The longest of a program that has polled for long, of which a doze is this part at most. To get up takes
/// the poller's processor from it for 10 to 20 us where none is free, which once in a millisecond was a
/// twentieth of all that a stream over TCP can carry.
const DOZE_MAX_LATER: Duration = Duration::from_millis(4);
const DOZE_PART: u32 = 16;
/// The longest where the adapter is another process's: the work goes on there, and the rings wait. A program
/// that is to be woken by a descriptor calls the helper when it asks for that.
const DOZE_MAX_ELSEWHERE: Duration = Duration::from_millis(160);
/// A program that polls within this time of being looked at needs no help.
const BUSY_NS: u64 = 2_000;
/// So does one that has let others have its processor for no longer than this, in the middle of a poll: its
/// peer, most often. After that there is somebody who does not give it back soon.
const YIELD_NS: u64 = 1_000_000;
/// What a program that is busy has to do with descriptors it does itself, but not if it did not for so long:
/// one that posts much and polls seldom would not hear of the end of a peer.
const LOOK_NS: u64 = 100_000_000;
/// So many polls since the helper looked last are those of a program that polls busily; and so many pass
/// before its processor is looked up again.
pub(super) const POLLS_PER_PLACE: u64 = 64;
/// So many polls are the look of a program that has asked for an event and is about to sleep, or does.
const POLLS_BEFORE_SLEEP: u64 = 2;
/// A program that waits inside the engine at least so often in a doze will come back soon.
const BUSY_DRIVES: u64 = 4;
/// Dozes without any sign of life after which the helper rests, while a thread of the program waits. Where
/// the adapter is another process's they are of the longest: a program that sleeps for many completions,
/// some milliseconds long, would have to call the helper after each sleep and send it away before the next.
const QUIET_DOZES: u32 = 3;
/// For how long the call that starts the helper waits for it. A program that makes the call while it loads a
/// library holds a lock that threads need to begin.
const BEGIN_MAX: Duration = Duration::from_millis(100);

/// The helper as others see it.
pub(crate) struct Helper {
    thread: Mutex<Option<JoinHandle<()>>>,
    /// 1: stop dozing or resting. The helper sleeps on this word.
    call: AtomicU32,
    stop: AtomicBool,
    /// Ends its wait for descriptors.
    bell: EventFd,
    /// What a test has it do once, before its next sleep in that wait.
    #[cfg(test)]
    pub(super) before_sleep: Step,
}

/// Something to be done once.
#[cfg(test)]
pub(super) type Step = Mutex<Option<Box<dyn FnOnce() + Send>>>;

impl Helper {
    /// Not started yet.
    pub(crate) fn new() -> std::io::Result<Self> {
        Ok(Self {
            thread: Mutex::new(None),
            call: AtomicU32::new(0),
            stop: AtomicBool::new(false),
            bell: EventFd::new()?,
            #[cfg(test)]
            before_sleep: Step::default(),
        })
    }

    /// Starts the thread, with all signals blocked: handlers of the program run on its own threads.
    pub(crate) fn start(inner: &Arc<Inner>) -> Result<(), EngineError> {
        let mut thread = inner.helper.thread.lock().unwrap_or_else(PoisonError::into_inner);
        if thread.is_some() {
            return Ok(());
        }
        let shared = Arc::clone(inner);
        let started = with_signals_blocked(|| {
            let thread = Builder::new().name("quipu".into()).stack_size(512 * 1024);
            begin(thread, move || shared.help())
        });
        *thread = Some(started.map_err(|e| EngineError::system("the helper thread", e))?);
        Ok(())
    }

    /// Ends the thread and waits for that.
    pub(crate) fn stop(&self) {
        let thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner).take();
        let Some(thread) = thread else { return };
        self.stop.store(true, Ordering::Release);
        self.call_off();
        self.call();
        let _turn = pages::turn();
        if thread.join().is_err() {
            tracing::error!("the helper thread panicked");
        }
    }

    /// Makes the helper get up at once and wait for descriptors.
    pub(crate) fn call(&self) {
        if self.call.swap(1, Ordering::AcqRel) == 0 {
            futex_wake(&self.call);
        }
    }

    /// Makes the helper leave its wait for descriptors to somebody else.
    pub(crate) fn call_off(&self) {
        self.bell.set();
    }

    /// Sleeps until called; at most `limit`. True if called.
    fn sleep(&self, limit: Option<Duration>) -> bool {
        futex_wait(&self.call, 0, limit);
        self.call.swap(0, Ordering::AcqRel) == 1
    }

    fn stopped(&self) -> bool {
        self.stop.load(Ordering::Acquire)
    }
}

/// Starts a thread, and waits until it runs `run`. To begin it needs memory, for which the C library calls
/// `mmap` and `munmap`; and those a program may be about to overwrite with jumps to its own functions, as the
/// registration caches of Open MPI and UCX do, which takes no other thread to be inside.
fn begin(thread: Builder, run: impl FnOnce() + Send + 'static) -> std::io::Result<JoinHandle<()>> {
    let _turn = pages::turn();
    let (begun, begins) = mpsc::channel();
    let thread = thread.spawn(move || {
        // Anyone who started it may have lost patience.
        let _ = begun.send(());
        run();
    })?;
    let _ = begins.recv_timeout(BEGIN_MAX);
    Ok(thread)
}

/// Runs `start` with all signals blocked, as threads that it creates inherit that; but those of bad accesses,
/// which would end the process: a program may open its memory when it is touched.
fn with_signals_blocked<T>(start: impl FnOnce() -> T) -> T {
    // SAFETY: sigset_t is plain data, which sigfillset fills in and pthread_sigmask reads; all
    // pointers are to live variables, and the old mask is put back.
    unsafe {
        let mut all: libc::sigset_t = std::mem::zeroed();
        let mut old: libc::sigset_t = std::mem::zeroed();
        libc::sigfillset(&raw mut all);
        libc::sigdelset(&raw mut all, libc::SIGSEGV);
        libc::sigdelset(&raw mut all, libc::SIGBUS);
        libc::pthread_sigmask(libc::SIG_SETMASK, &raw const all, &raw mut old);
        let result = start();
        libc::pthread_sigmask(libc::SIG_SETMASK, &raw const old, std::ptr::null_mut());
        result
    }
}

/// Whether a program that made `polls` polls on processor `place`, but none now, most likely polls again once
/// this thread, on processor `here`, lets it: threads that the program has tied to processors after the
/// engine was opened are not moved out of the helper's way.
fn was_interrupted(polls: u64, place: u32, here: u32) -> bool {
    polls >= POLLS_PER_PLACE && place == here
}

/// Whether a program that has let others have its processor since `since`, or does not if that is 0, is back
/// soon. What it does not take back, a handler of a signal having left the poll, is over some time, too.
fn is_back_soon(since: u64, now: u64) -> bool {
    since != 0 && now.saturating_sub(since) < YIELD_NS
}

/// How long to doze after a doze of `last`, where the program has polled for `polled`.
fn next_doze(last: Duration, polled: Duration, elsewhere: bool) -> Duration {
    let longest = match elsewhere {
        true => DOZE_MAX_ELSEWHERE,
        false => (polled / DOZE_PART).clamp(DOZE_MAX, DOZE_MAX_LATER),
    };
    (last * 2).min(longest)
}

/// How many dozes in a row were quiet, after one of `doze` during which a thread of the program waited, and
/// had or had not shown a sign of life; `quiet` were before it.
fn quiet_dozes(quiet: u32, alive: bool, doze: Duration, elsewhere: bool) -> u32 {
    let says_nothing = elsewhere && doze < DOZE_MAX_ELSEWHERE;
    if alive || says_nothing { 0 } else { quiet + 1 }
}

impl Inner {
    /// Whether the program is making progress right now, of which it had made `polls` before.
    fn is_busy(&self, polls: u64) -> bool {
        // A call that moves much takes long, and is not to be competed with.
        if self.core.is_held() {
            return true;
        }
        let before = self.polls.load(Ordering::Relaxed);
        if before.wrapping_sub(self.asked_at.load(Ordering::Relaxed)) <= POLLS_BEFORE_SLEEP {
            return false;
        }
        if before == polls || self.alone {
            // On one processor a poller does not run while this looks.
            return before != polls;
        }
        // What keeps a poller from its processor cannot see it poll.
        let place = self.place.load(Ordering::Relaxed);
        if was_interrupted(before.wrapping_sub(polls), place, sys::processor()) {
            return true;
        }
        let start = kernel_ns();
        if is_back_soon(self.yields_since.load(Ordering::Relaxed), start) {
            return true;
        }
        let end = start + BUSY_NS;
        while kernel_ns() < end {
            if self.polls.load(Ordering::Relaxed) != before || self.core.is_held() {
                return true;
            }
            std::hint::spin_loop();
        }
        false
    }

    /// The helper's life.
    fn help(&self) {
        let mut ready = ReadyList::new();
        let _life = self.life.as_ref().map(Life::begin);
        while !self.helper.stopped() {
            self.doze();
            if !self.helper.stopped() {
                self.watch(&mut ready);
            }
            let blind = self.core.lock().blind;
            if blind {
                self.give_up();
                return;
            }
        }
    }

    /// Sleeps in small pieces until the program is found idle, or calls.
    fn doze(&self) {
        let elsewhere = self.calls.is_some();
        let (mut limit, mut polled_for) = (DOZE_MIN, Duration::ZERO);
        let mut quiet = 0;
        let (mut drives, mut rest) = self.lie_down(quiet);
        loop {
            let polls = self.polls.load(Ordering::Relaxed);
            let called = self.helper.sleep((!rest).then_some(limit));
            if called || self.helper.stopped() {
                return;
            }
            polled_for += limit;
            let doze = limit;
            limit = next_doze(doze, polled_for, elsewhere);
            // While the program polls, its lock is left alone.
            if self.is_busy(polls) {
                quiet = 0;
                self.look_if_due();
                continue;
            }
            polled_for = Duration::ZERO;
            let polled = self.polls.load(Ordering::Relaxed) != polls;
            let (now, driven) = {
                let core = self.lock();
                (core.drives, core.driver)
            };
            let drove = now.wrapping_sub(drives);
            if drove >= BUSY_DRIVES {
                quiet = 0;
            } else if driven {
                quiet = quiet_dozes(quiet, drove > 0 || polled, doze, elsewhere);
            } else {
                return;
            }
            (drives, rest) = self.lie_down(quiet);
        }
    }

    /// Makes progress once beside a program that is busy, if nobody has asked epoll for long.
    fn look_if_due(&self) {
        if kernel_ns().saturating_sub(self.looked_at.load(Ordering::Relaxed)) < LOOK_NS {
            return;
        }
        let mut core = self.lock();
        // Else somebody waits for descriptors, and hears of them.
        if core.wakes_at.is_none() {
            core.run();
        }
    }

    /// Says that the helper is about to sleep; how often threads of the program have driven the engine so
    /// far, and whether the helper may sleep until it is called.
    fn lie_down(&self, quiet: u32) -> (u64, bool) {
        let mut core = self.lock();
        let rest = core.driver && quiet >= QUIET_DOZES;
        core.helper = if rest { HelperMode::Resting } else { HelperMode::Dozing };
        (core.drives, rest)
    }

    /// Waits for descriptors and handles them, until the program looks after that itself.
    fn watch(&self, ready: &mut ReadyList) {
        loop {
            let mut core = self.lock();
            core.helper = HelperMode::Armed;
            // Here and below: a thread of the program that waits for descriptors has armed the
            // engine for itself, which must not be touched.
            if core.driver || core.blind || self.helper.stopped() {
                return;
            }
            if core.run() {
                core.give_way();
                continue;
            }
            let Some(limit) = core.prepare_wait() else { continue };
            let polls = self.polls.load(Ordering::Relaxed);
            drop(core);
            #[cfg(test)]
            if let Some(step) = self.helper.before_sleep.lock().unwrap().take() {
                step();
            }
            let mut valid = wait_either(self.epoll.fd(), self.helper.bell.fd(), limit);
            if valid {
                self.helper.bell.clear();
            }
            let polling = self.is_busy(polls);
            if !polling {
                valid &= self.epoll.wait(ready, Some(Duration::ZERO)).is_ok();
            }
            let mut core = self.lock();
            core.blind |= !valid;
            if core.driver || core.blind {
                return;
            }
            if polling {
                // What came is the poller's: to handle it here would only be in its way.
                core.stop_waiting();
                return;
            }
            core.finish_wait(ready);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::SameHost;
    use crate::engine::tests::{End, idle};

    /// As programs do that become a daemon.
    #[test]
    fn an_engine_whose_descriptors_the_program_closes_is_dead_and_quiet() {
        const TEST: &str = "engine::helper::tests::\
            an_engine_whose_descriptors_the_program_closes_is_dead_and_quiet";
        if !crate::testing::is_alone(TEST) {
            return;
        }
        let end = std::time::Instant::now() + Duration::from_secs(20);
        let [here, there] = End::pair(SameHost::Auto);
        there.send();
        here.receive();
        let (says, asleep) = mpsc::channel();
        let (wake, waits) = mpsc::channel::<()>();
        *here.engine.inner.helper.before_sleep.lock().unwrap() = Some(Box::new(move || {
            says.send(()).unwrap();
            let _ = waits.recv();
        }));
        here.send();
        asleep.recv_timeout(Duration::from_secs(20)).unwrap();
        // SAFETY: takes integers only. What belongs to others in this process is dead from now on.
        assert_eq!(unsafe { libc::close_range(3, libc::c_uint::MAX, 0) }, 0);
        wake.send(()).unwrap();
        let is_over = || {
            let thread = here.engine.inner.helper.thread.lock().unwrap();
            thread.as_ref().is_some_and(JoinHandle::is_finished)
        };
        while !is_over() {
            assert!(std::time::Instant::now() < end, "the helper goes on");
            std::thread::yield_now();
        }
        assert!(matches!(here.engine.create_channel(), Err(EngineError::EngineGone)));
        // The other one hears of it when it asks epoll.
        while there.engine.create_channel().is_ok() {
            assert!(std::time::Instant::now() < end, "calls go on");
            let _ = there.engine.poll_cq_each(there.cq, 1, |_| {});
        }
        assert!(matches!(
            there.engine.poll_cq_each(there.cq, 1, |_| {}),
            Err(EngineError::EngineGone)
        ));
        // What it says is in no file of a program's that has those numbers now.
        let (path, file) = (std::env::temp_dir(), std::fs::File::create_new);
        let path = path.join(format!("quipu-closed-{}", std::process::id()));
        let _file = file(&path).unwrap();
        drop((here, there));
        assert_eq!(std::fs::metadata(&path).unwrap().len(), 0);
        std::fs::remove_file(&path).unwrap();
    }

    #[test]
    fn a_thread_has_begun_when_it_is_started() {
        // A thread writes its name itself, after it has had its memory.
        let begun = |name: &str| {
            let tasks = std::fs::read_dir("/proc/self/task").unwrap();
            let names =
                tasks.map(|task| std::fs::read_to_string(task.unwrap().path().join("comm")));
            names.filter(|it| it.as_ref().is_ok_and(|it| it.trim_end() == name)).count()
        };
        for round in 0..100 {
            // One of the round before may be there still, though it has been waited for.
            let name = format!("to-begin-{round}");
            let (end, ends) = mpsc::channel::<()>();
            let thread = Builder::new().name(name.clone());
            let thread = begin(thread, move || {
                let _ = ends.recv();
            })
            .unwrap();
            assert_eq!(begun(&name), 1);
            drop(end);
            thread.join().unwrap();
        }
    }

    #[test]
    fn a_poller_that_the_helper_keeps_from_its_processor_counts_as_polling() {
        assert!(was_interrupted(5_000, 1, 1));
        // Elsewhere it would have been seen.
        assert!(!was_interrupted(5_000, 0, 1));
        // It polls now and then, and wants help in between.
        assert!(!was_interrupted(3, 1, 1));
    }

    /// It keeps the lock but for moments, as one that posts writes of megabytes does.
    #[test]
    fn descriptors_are_asked_beside_a_program_that_is_busy_with_calls_and_polls_seldom() {
        let engine = idle();
        Helper::start(&engine.inner).unwrap();
        let end = std::time::Instant::now() + Duration::from_secs(20);
        let (mut before, mut looks) = (None, 0);
        while looks < 10 {
            let core = engine.inner.core.lock();
            looks = core.calls.looks - *before.get_or_insert(core.calls.looks);
            if core.wakes_at.is_some() {
                // Something has come, which is left to a program that is busy.
                core.call_sleeper();
            }
            let over = kernel_ns() + 50_000;
            while kernel_ns() < over {
                std::hint::spin_loop();
            }
            assert!(std::time::Instant::now() < end, "{looks}");
        }
    }

    #[test]
    fn the_longer_a_program_has_polled_the_longer_the_helper_dozes() {
        let (mut doze, mut polled) = (DOZE_MIN, Duration::ZERO);
        while polled < Duration::from_secs(1) {
            assert!(doze <= polled + DOZE_MIN, "{doze:?} after {polled:?}");
            assert!(doze <= DOZE_MAX.max(polled / DOZE_PART), "{doze:?} after {polled:?}");
            polled += doze;
            doze = next_doze(doze, polled, false);
        }
        assert_eq!(doze, DOZE_MAX_LATER);
    }

    #[test]
    fn sleeps_of_some_milliseconds_beside_the_adapter_of_another_process_are_not_quiet() {
        let rests_after = |elsewhere| {
            let (mut doze, mut quiet, mut slept) = (DOZE_MIN, 0, Duration::ZERO);
            while quiet < QUIET_DOZES {
                slept += doze;
                quiet = quiet_dozes(quiet, false, doze, elsewhere);
                doze = next_doze(doze, slept, elsewhere);
            }
            slept
        };
        assert!(rests_after(false) < Duration::from_millis(1));
        let long = rests_after(true);
        assert!((3 * DOZE_MAX_ELSEWHERE..6 * DOZE_MAX_ELSEWHERE).contains(&long), "{long:?}");
        assert_eq!(quiet_dozes(2, true, DOZE_MAX_ELSEWHERE, true), 0);
    }

    #[test]
    fn who_asks_for_an_event_and_looks_again_does_not_count_as_polling() {
        let engine = idle();
        let (context, _) = engine.open_context().unwrap();
        let (channel, _) = engine.create_channel().unwrap();
        let (cq, _) = engine.create_cq(context, 8, Some(channel), 0).unwrap();
        let before = engine.polls();
        let poll = |times| {
            (0..times).for_each(|_| assert_eq!(engine.poll_cq_each(cq, 1, |_| {}).unwrap(), 0));
        };
        // As if it had kept this thread from its processor.
        let is_busy = || {
            engine.inner.place.store(sys::processor(), Ordering::Relaxed);
            engine.inner.is_busy(before)
        };
        poll(1000);
        assert!((0..100).any(|_| is_busy()));
        engine.req_notify_cq(cq, false).unwrap();
        poll(1);
        assert!((0..100).any(|_| !is_busy()));
        poll(1000);
        assert!((0..100).any(|_| is_busy()), "it does not sleep");
    }

    #[test]
    fn a_poller_that_lets_its_peer_run_counts_as_polling_until_that_takes_too_long() {
        assert!(!is_back_soon(0, 5_000));
        assert!(is_back_soon(5_000, 5_000));
        assert!(is_back_soon(5_000, 4_999), "clocks of two processors");
        assert!(!is_back_soon(5_000, 5_000 + YIELD_NS));
    }
}
