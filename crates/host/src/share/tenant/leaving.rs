//! Programs that have ended: what they had goes a part at a time, so that others do not wait for it.

use quipu_inet::stack::ListenerId;
use quipu_mem::Segment;
use quipu_nic::{MrId, QpId};

use super::Tenant;

/// What is destroyed before others get their turn.
const PER_TURN: usize = 64;

/// A program that is gone, and what is left of it.
pub(in crate::share) struct Leaving {
    tenant: Tenant,
    /// The last goes first.
    left: Vec<Belonging>,
}

impl Leaving {
    pub(in crate::share) fn new(mut tenant: Tenant) -> Self {
        let mut left = tenant.take_belongings();
        left.reverse();
        Self { tenant, left }
    }

    /// Whose program it was.
    pub(in crate::share) fn user(&self) -> u32 {
        self.tenant.user
    }

    /// The end, when nothing is left: the socket is closed, and what is freed now is the program's memory.
    pub(in crate::share) fn into_memory(self) -> Segment {
        self.tenant.arena.clone()
    }

    /// Destroys some of it; `false` if nothing is left.
    pub(in crate::share) fn turn(&mut self) -> bool {
        let kept = self.left.len().saturating_sub(PER_TURN);
        self.tenant.destroy(self.left.drain(kept..).rev());
        !self.left.is_empty()
    }
}

/// What a program has of the engine, in the order in which it may go.
#[derive(Clone, Copy, Debug)]
enum Belonging {
    Listener(ListenerId),
    Qp(QpId),
    Region(MrId),
}

impl Tenant {
    /// Takes what it has now, of which nothing can be asked for any more.
    fn take_belongings(&mut self) -> Vec<Belonging> {
        let listeners = self.listeners.drain().map(|(_, it)| Belonging::Listener(it.id));
        let qps = self.qps.drain().map(|(_, qp)| Belonging::Qp(qp.id));
        let regions = self.regions.drain().map(|(_, id)| Belonging::Region(id));
        listeners.chain(qps).chain(regions).collect()
    }

    /// Destroys some of that: connections are reset.
    fn destroy(&self, belongings: impl Iterator<Item = Belonging>) {
        let engine = &self.engine;
        // What lies in the queues is looked through once for each queue pair that goes.
        let _ = engine.poll_cq_each(self.cq, usize::MAX, |_| {});
        while let Ok(Some(_)) = engine.take_tcp_event(self.context) {}
        for belonging in belongings {
            match belonging {
                Belonging::Listener(id) => drop(engine.tcp_unlisten(id)),
                Belonging::Qp(id) => drop(engine.destroy_qp(id)),
                Belonging::Region(id) => drop(engine.dereg_mr(id)),
            }
        }
    }
}

/// Everything that a program had goes with it.
impl Drop for Tenant {
    fn drop(&mut self) {
        let belongings = self.take_belongings();
        self.destroy(belongings.into_iter());
        let _ = self.engine.destroy_cq(self.cq);
        self.pds.values().for_each(|id| drop(self.engine.dealloc_pd(*id)));
        let _ = self.engine.close_context(self.context);
    }
}
