//! Acknowledgement of events: an object is not freed before each event about it that the program
//! took was acknowledged (`ibv_ack_cq_events(3)`, `ibv_ack_async_event(3)`).

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use quipu_abi_types::EngineEventsReported;

/// The acknowledged events of one object.
#[derive(Default)]
pub(crate) struct Acks {
    counts: Mutex<Counts>,
    changed: Condvar,
}

#[derive(Default)]
struct Counts {
    acked: EngineEventsReported,
    /// Whether somebody waits: to wake nobody takes a system call too, with each event.
    awaited: bool,
}

impl Acks {
    /// Counts completion events as acknowledged.
    pub(crate) fn comp(&self, events: u32) {
        self.count(|acked| acked.comp = acked.comp.wrapping_add(events));
    }

    /// Counts one asynchronous event as acknowledged.
    pub(crate) fn asynchronous(&self) {
        self.count(|acked| acked.r#async = acked.r#async.wrapping_add(1));
    }

    fn count(&self, add: impl FnOnce(&mut EngineEventsReported)) {
        let mut counts = self.counts();
        add(&mut counts.acked);
        if counts.awaited {
            // Under the lock: the thread that waits may free this as soon as it is let go.
            self.changed.notify_all();
        }
    }

    /// Waits until as many events are acknowledged as the engine handed out.
    pub(crate) fn wait(&self, reported: EngineEventsReported) {
        let mut counts = self.counts();
        while counts.acked.comp < reported.comp || counts.acked.r#async < reported.r#async {
            counts.awaited = true;
            counts = self.changed.wait(counts).unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn counts(&self) -> MutexGuard<'_, Counts> {
        // Counters have no state in between that a panic could leave.
        self.counts.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc;

    #[test]
    fn waiting_ends_with_the_last_acknowledgement() {
        let acks = Acks::default();
        let (send, receive) = mpsc::channel();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                acks.wait(EngineEventsReported { comp: 3, r#async: 1 });
                send.send(()).unwrap();
            });
            acks.comp(1);
            acks.asynchronous();
            assert!(receive.try_recv().is_err());
            acks.comp(2);
            receive.recv().unwrap();
        });
    }

    #[test]
    fn nothing_reported_is_nothing_to_wait_for() {
        Acks::default().wait(EngineEventsReported::default());
    }
}
