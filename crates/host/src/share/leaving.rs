//! Programs that have ended: what they had goes a part at a time, so that others do not wait for it.

use super::tenant::{Belonging, Tenant};

/// What is destroyed before others get their turn.
const PER_TURN: usize = 64;

/// A program that is gone, and what is left of it.
pub(super) struct Leaving {
    tenant: Tenant,
    /// The last goes first.
    left: Vec<Belonging>,
}

impl Leaving {
    pub(super) fn new(mut tenant: Tenant) -> Self {
        let mut left = tenant.take_belongings();
        left.reverse();
        Self { tenant, left }
    }

    /// Destroys some of it; `false` if nothing is left. Dropped then, it closes its socket.
    pub(super) fn turn(&mut self) -> bool {
        let kept = self.left.len().saturating_sub(PER_TURN);
        self.tenant.destroy(self.left.drain(kept..).rev());
        !self.left.is_empty()
    }
}
