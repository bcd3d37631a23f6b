//! Time for the adapter: nanoseconds of `CLOCK_MONOTONIC`, read cheaply.
//!
//! Reading the processor's time stamp counter costs less than half of `clock_gettime`. Where the
//! counter runs at a constant rate and the kernel itself relies on it, it is scaled between two
//! readings of the kernel's clock that lie at most [`WINDOW_NS`] apart; elsewhere each reading is
//! one of the kernel's.

use quipu_nic::{Time, TimeSource};

/// After so long the counter is compared with the kernel's clock again.
const WINDOW_NS: u64 = 50_000_000;
/// The rate is measured over at least this long.
const CALIBRATION_NS: u64 = 5_000_000;

/// Two rates that differ by no more than this part are the same, measured twice.
const AGREE_PART: u64 = 64;

/// Counter ticks between which nothing else can have happened: some microseconds on any processor.
const CLOSE_TICKS: u64 = 20_000;

/// A clock that never goes back.
#[derive(Debug)]
pub(crate) struct Clock {
    last: Time,
    scale: Option<Scale>,
}

impl TimeSource for &mut Clock {
    #[inline]
    fn time(self, exact: bool) -> Time {
        if exact { self.now() } else { self.recent() }
    }
}

/// How counter ticks become nanoseconds.
#[derive(Clone, Copy, Debug)]
struct Scale {
    anchor_ticks: u64,
    anchor_ns: u64,
    /// Nanoseconds per tick, times 2^32, as measured last. 0 until it was.
    rate: u64,
    /// Ticks from the anchor after which it is renewed. 0 until two measurements in a row have agreed.
    window: u64,
}

impl Clock {
    /// A clock that uses the counter if it can be trusted.
    pub(crate) fn new() -> Self {
        let (ns, anchor_ticks) = both_clocks().unwrap_or_else(|ns| (ns, ticks()));
        let scale = counter_is_steady().then_some(Scale {
            anchor_ticks,
            anchor_ns: ns,
            rate: 0,
            window: 0,
        });
        Self { last: Time(ns), scale }
    }

    /// The time of the last reading, for what needs no better.
    #[inline]
    pub(crate) fn recent(&self) -> Time {
        self.last
    }

    /// Reads the clock.
    #[inline]
    pub(crate) fn now(&mut self) -> Time {
        let ns = match &self.scale {
            Some(scale) => {
                let passed = ticks().wrapping_sub(scale.anchor_ticks);
                if passed < scale.window {
                    scale.anchor_ns + scaled(passed, scale.rate)
                } else {
                    self.renew()
                }
            }
            None => kernel_ns(),
        };
        self.last = self.last.max(Time(ns));
        self.last
    }

    /// Reads the kernel's clock, and from that and the last reading the rate of the counter.
    #[cold]
    fn renew(&mut self) -> u64 {
        let (ns, now_ticks) = match both_clocks() {
            Ok(both) => both,
            Err(ns) => return ns,
        };
        let Some(scale) = &mut self.scale else {
            return ns;
        };
        let passed_ns = ns.saturating_sub(scale.anchor_ns);
        let passed_ticks = now_ticks.wrapping_sub(scale.anchor_ticks);
        if passed_ns < CALIBRATION_NS || passed_ticks == 0 {
            return ns;
        }
        let rate = (u128::from(passed_ns) << 32) / u128::from(passed_ticks);
        let rate = u64::try_from(rate).unwrap_or(0);
        // While a machine sleeps or is stopped the counter may go on, and this clock of the kernel's does
        // not: a rate that is measured across that would have time almost stand still for as long.
        let agrees = rate > 0 && rate.abs_diff(scale.rate) <= rate / AGREE_PART;
        let window = (u128::from(WINDOW_NS) << 32) / u128::from(rate.max(1));
        scale.window = if agrees { u64::try_from(window).unwrap_or(0) } else { 0 };
        (scale.rate, scale.anchor_ticks, scale.anchor_ns) = (rate, now_ticks, ns);
        ns
    }
}

#[inline]
fn scaled(ticks: u64, rate: u64) -> u64 {
    ((u128::from(ticks) * u128::from(rate)) >> 32) as u64
}

/// The kernel's clock and the counter at the same moment; the former alone if this thread was interrupted
/// between the two each time, since a rate that is computed from such a pair would be wrong.
fn both_clocks() -> Result<(u64, u64), u64> {
    let mut ns = 0;
    for _ in 0..3 {
        let before = ticks();
        ns = kernel_ns();
        let after = ticks();
        if after.wrapping_sub(before) < CLOSE_TICKS {
            return Ok((ns, after));
        }
    }
    Err(ns)
}

/// `CLOCK_MONOTONIC` in nanoseconds.
pub(crate) fn kernel_ns() -> u64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the kernel fills in one timespec, a live variable. This clock always exists.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut time) };
    (time.tv_sec as u64).wrapping_mul(1_000_000_000).wrapping_add(time.tv_nsec as u64)
}

#[cfg(target_arch = "x86_64")]
#[inline]
fn ticks() -> u64 {
    // SAFETY: every x86-64 processor has RDTSC.
    unsafe { core::arch::x86_64::_rdtsc() }
}

#[cfg(not(target_arch = "x86_64"))]
fn ticks() -> u64 {
    0
}

/// True if the counter runs at a constant rate (CPUID says so) and the kernel takes its time from it.
pub(crate) fn counter_is_steady() -> bool {
    const SOURCE: &str = "/sys/devices/system/clocksource/clocksource0/current_clocksource";
    let trusted = std::fs::read_to_string(SOURCE).is_ok_and(|name| {
        matches!(name.trim(), "tsc" | "kvm-clock" | "hyperv_clocksource_tsc_page")
    });
    trusted && counter_is_invariant()
}

#[cfg(target_arch = "x86_64")]
fn counter_is_invariant() -> bool {
    use core::arch::x86_64::__cpuid;
    __cpuid(0x8000_0000).eax >= 0x8000_0007 && __cpuid(0x8000_0007).edx & (1 << 8) != 0
}

#[cfg(not(target_arch = "x86_64"))]
fn counter_is_invariant() -> bool {
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn follows_the_kernels_clock() {
        let mut clock = Clock::new();
        let mut last = clock.now();
        let end = last.after(3 * CALIBRATION_NS);
        while last < end {
            let before = kernel_ns();
            let now = clock.now();
            let after = kernel_ns();
            assert!(now >= last);
            // The window keeps the error of the measured rate far below this bound.
            assert!(now.0 + 100_000 >= before && now.0 <= after + 100_000);
            last = now;
        }
    }

    /// As behind a machine's sleep, through which the counter goes on.
    #[test]
    fn goes_on_behind_ticks_that_the_kernel_does_not_count() {
        let wait = |ns| std::thread::sleep(std::time::Duration::from_nanos(ns));
        for calibrations in 0..5 {
            let mut clock = Clock::new();
            for _ in 0..calibrations {
                wait(CALIBRATION_NS + CALIBRATION_NS / 4);
                clock.now();
            }
            let Some(scale) = &mut clock.scale else { return };
            scale.anchor_ticks = scale.anchor_ticks.wrapping_sub(3_600 * 3_000_000_000);
            for _ in 0..2 {
                wait(CALIBRATION_NS + CALIBRATION_NS / 4);
                clock.now();
            }
            wait(2 * CALIBRATION_NS);
            let before = kernel_ns();
            assert!(clock.now().0 + 1_000_000 >= before, "{calibrations}");
        }
    }
}
