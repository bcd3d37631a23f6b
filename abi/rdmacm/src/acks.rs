//! Acknowledgement of events: nothing is freed before each event about it that the program took was
//! acknowledged (`rdma_ack_cm_event(3)`).

use std::sync::{Condvar, Mutex, PoisonError};

/// The acknowledged events of an identifier, or of its membership in a group.
#[derive(Default)]
pub(crate) struct Acks {
    count: Mutex<Count>,
    changed: Condvar,
}

#[derive(Default)]
struct Count {
    acked: u32,
    /// Whether somebody waits: to wake nobody takes a system call too, with each event.
    awaited: bool,
}

impl Acks {
    /// Counts an event as acknowledged.
    pub(crate) fn add(&self) {
        let mut count = self.count.lock().unwrap_or_else(PoisonError::into_inner);
        count.acked = count.acked.wrapping_add(1);
        if count.awaited {
            // Under the lock: the thread that waits may free this as soon as it is let go.
            self.changed.notify_all();
        }
    }

    /// Waits until as many events are acknowledged as the engine handed out.
    pub(crate) fn wait(&self, reported: u32) {
        let mut count = self.count.lock().unwrap_or_else(PoisonError::into_inner);
        while count.acked < reported {
            count.awaited = true;
            count = self.changed.wait(count).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc;

    #[test]
    fn waiting_ends_with_the_last_acknowledgement() {
        let acks = Acks::default();
        acks.wait(0);
        let (send, receive) = mpsc::channel();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                acks.wait(2);
                send.send(()).unwrap();
            });
            acks.add();
            assert!(receive.try_recv().is_err());
            acks.add();
            receive.recv().unwrap();
        });
    }
}
