//! Processor time of this process's threads, as the kernel counts it.

use std::fs;
use std::time::Duration;

/// Processor time since the process began.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Cpu {
    /// Of the program's threads, which do the adapter's work, too, while they poll.
    pub(super) program: Duration,
    /// Of the adapter's own thread, which works while nobody polls.
    pub(super) adapter: Duration,
    /// Of both, in the kernel; to a hundredth of a second.
    pub(super) system: Duration,
}

/// What the kernel counts hundredths of a second by, for whoever asks in files (proc(5)).
const TICK: Duration = Duration::from_millis(10);

impl Cpu {
    /// So far. What the kernel does not tell counts as none.
    pub(super) fn now() -> Self {
        let mut out = Self::default();
        // Behind the name, which may have spaces in it, the thirteenth word.
        let stat = fs::read_to_string("/proc/self/stat").unwrap_or_default();
        let words = stat.rsplit(')').next().unwrap_or_default();
        let ticks = words.split_whitespace().nth(12).and_then(|word| word.parse().ok());
        out.system = TICK * ticks.unwrap_or(0);
        let Ok(tasks) = fs::read_dir("/proc/self/task") else { return out };
        for task in tasks.flatten() {
            let read = |name: &str| fs::read_to_string(task.path().join(name)).unwrap_or_default();
            let spent = read("schedstat");
            let spent = spent.split(' ').next().and_then(|word| word.parse().ok()).unwrap_or(0);
            let spent = Duration::from_nanos(spent);
            match read("comm").trim() {
                "quipu" if task.file_name() != *std::process::id().to_string() => {
                    out.adapter += spent
                }
                _ => out.program += spent,
            }
        }
        out
    }

    /// What was spent since `earlier`.
    pub(super) fn since(self, earlier: Self) -> Self {
        Self {
            program: self.program.saturating_sub(earlier.program),
            adapter: self.adapter.saturating_sub(earlier.adapter),
            system: self.system.saturating_sub(earlier.system),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_goes_on() {
        let before = Cpu::now();
        assert_eq!(before.since(Cpu::now()), Cpu::default());
    }
}
