//! How many queue pairs a program may have: some that are sure for each, and others that all programs share.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

/// The most of one program.
pub(super) const MAX: u32 = 16_384;
/// Those that each is sure of, and those that whoever comes first has. For as many programs as may be
/// attached these are fewer than the connections that an adapter can have, with those that wait at listeners.
const OWN: u32 = 512;
const COMMON: u32 = 32_768;

/// Those that are left for whoever comes first.
#[derive(Clone, Debug)]
pub(super) struct Common(Arc<AtomicU32>);

impl Default for Common {
    fn default() -> Self {
        Self(Arc::new(AtomicU32::new(COMMON)))
    }
}

/// What a program has of them. Dropped, it has none.
#[derive(Debug)]
pub(super) struct Claim {
    held: u32,
    common: Common,
}

impl Claim {
    pub(super) fn new(common: &Common) -> Self {
        Self { held: 0, common: common.clone() }
    }

    /// One more, if it may be.
    pub(super) fn take(&mut self) -> bool {
        let less = |left: u32| left.checked_sub(1);
        let left = &self.common.0;
        let granted = self.held < MAX
            && (self.held < OWN
                || left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less).is_ok());
        self.held += u32::from(granted);
        granted
    }

    /// One less.
    pub(super) fn give_back(&mut self) {
        self.held -= 1;
        if self.held >= OWN {
            self.common.0.fetch_add(1, Ordering::Relaxed);
        }
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        self.common.0.fetch_add(self.held.saturating_sub(OWN), Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn take_all(claim: &mut Claim) -> u32 {
        std::iter::repeat_with(|| claim.take()).take_while(|granted| *granted).count() as u32
    }

    #[test]
    fn each_gets_its_own_whatever_others_have_and_what_is_given_back_is_anybodys() {
        let common = Common::default();
        let [mut one, mut two, mut three, mut four] = [(); 4].map(|()| Claim::new(&common));
        assert_eq!((take_all(&mut one), take_all(&mut two)), (MAX, MAX));
        let rest = COMMON - 2 * (MAX - OWN);
        assert_eq!((take_all(&mut three), take_all(&mut four)), (OWN + rest, OWN));
        one.give_back();
        assert_eq!((take_all(&mut four), take_all(&mut two)), (1, 0));
        // One of its own is nobody else's.
        let mut five = Claim::new(&common);
        assert!(five.take());
        five.give_back();
        assert!(!four.take() && five.take());
        drop(two);
        assert_eq!(take_all(&mut three), MAX - OWN - rest);
        drop([one, three, four, five]);
        assert_eq!(common.0.load(Ordering::Relaxed), COMMON);
    }
}
