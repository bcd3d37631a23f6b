use std::sync::atomic::{AtomicBool, Ordering};

/// A lock that is taken in one C call and released in another, where a guard cannot live.
///
/// It is held for the few instructions between, say, `ibv_wr_start` and `ibv_wr_complete`; who
/// finds it taken yields the processor between attempts.
#[derive(Debug, Default)]
pub struct SpinLock(AtomicBool);

impl SpinLock {
    /// An open lock.
    pub const fn new() -> Self {
        Self(AtomicBool::new(false))
    }

    /// Waits until the lock is open, and closes it.
    #[inline]
    pub fn lock(&self) {
        while self.0.swap(true, Ordering::Acquire) {
            std::thread::yield_now();
        }
    }

    /// Opens the lock. Harmless where it is open.
    #[inline]
    pub fn unlock(&self) {
        self.0.store(false, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicU32;

    #[test]
    fn holders_exclude_each_other() {
        let lock = SpinLock::new();
        let count = AtomicU32::new(0);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..1000 {
                        lock.lock();
                        // A load and a store, which lose counts unless the lock excludes.
                        count.store(count.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
                        lock.unlock();
                    }
                });
            }
        });
        assert_eq!(count.into_inner(), 4000);
    }
}
