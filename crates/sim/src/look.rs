//! How programs look at completion queues.

use quipu_nic::{Completion, CqId, Glance};

use crate::world::World;

impl World {
    /// Looks at a queue as the engine of a host does that is polled: with a glance at first, which may find a
    /// completion already, and takes notice of everything where that says nothing.
    pub fn look_at(&mut self, h: usize, cq: CqId) -> Option<Completion> {
        let now = self.time();
        let adapter = &mut self.hosts[h].adapter;
        let mut found = None;
        let glance = adapter.glance(now, cq, |completion| found = Some(*completion));
        let busy = match glance {
            Glance::Taken => false,
            Glance::Found(qp) => adapter.serve(now, qp) || adapter.progress(now),
            Glance::Vain | Glance::Unsure => adapter.progress(now),
        };
        if found.is_some() != (glance == Glance::Taken) || (busy && glance == Glance::Vain) {
            self.violate(|| format!("host {h}: a glance found {glance:?} and {found:?}"));
        }
        found
    }

    /// Takes completions of a queue; how many.
    pub fn poll_cq(&mut self, h: usize, cq: CqId, into: &mut [Completion]) -> usize {
        match self.hosts[h].adapter.poll_cq(cq, into) {
            Ok(count) => count,
            Err(fault) => {
                self.violate(|| format!("host {h}: a queue cannot be polled: {fault}"));
                0
            }
        }
    }
}
