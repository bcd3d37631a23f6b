//! What happens to connections. The engine keeps the events until the program takes them. Of each it has a
//! copy for this library, which knows by it what has become of a connection: one thread at a time asks the
//! engine for these, on behalf of all that wait.

use std::collections::HashMap;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use quipu_host::nic::TcpChange;
use quipu_host::nic::{QpId, QpNum};
use quipu_host::{EngineError, TcpEvent};

use crate::device::Opened;
use crate::error::Error;

/// Something has happened to the connection of a queue pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Event {
    /// The queue pair.
    pub qp_num: QpNum,
    /// What.
    pub change: TcpChange,
}

/// What has happened to a connection so far.
#[derive(Clone, Copy, Debug)]
pub(super) struct Status {
    number: QpNum,
    pub(super) connected: bool,
    pub(super) peer_closed: bool,
    /// Its end.
    pub(super) end: Option<TcpChange>,
}

impl Status {
    fn idle(number: QpNum) -> Self {
        Self { number, connected: false, peer_closed: false, end: None }
    }
}

#[derive(Debug, Default)]
struct State {
    of: HashMap<QpId, Status>,
    /// A thread waits in the engine.
    asked: bool,
}

impl State {
    fn note(&mut self, event: TcpEvent) {
        let Some(status) = self.of.get_mut(&event.qp) else { return };
        match event.change {
            TcpChange::Connected => status.connected = true,
            TcpChange::PeerClosed => status.peer_closed = true,
            TcpChange::Closed | TcpChange::Failed(_) | TcpChange::Aborted => {
                status.end = Some(event.change);
            }
        }
    }
}

/// The events of one opened adapter.
#[derive(Debug, Default)]
pub(crate) struct Events {
    state: Mutex<State>,
    news: Condvar,
}

impl Events {
    /// Has the engine keep them.
    pub(super) fn open(opened: &Opened) -> Result<(), Error> {
        opened.engine.tcp_notes(opened.context)?;
        opened.engine.tcp_events(opened.context)?;
        Ok(())
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Nothing in here is left half done by a panic.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn add(&self, qp: QpId, number: QpNum) {
        self.lock().of.insert(qp, Status::idle(number));
    }

    /// A queue pair begins anew by `start`: what has become of an attempt before is no answer any more. If it
    /// cannot begin, all stays as it is.
    pub(super) fn begin(
        &self,
        opened: &Opened,
        qp: QpId,
        start: impl FnOnce() -> Result<(), Error>,
    ) -> Result<(), Error> {
        // What comes of it is noted after it has begun.
        let mut state = self.collect(opened)?;
        if state.of.get(&qp).is_some_and(|status| status.end.is_some()) {
            // Else they would pile up in a program that tries for long, and takes no events.
            opened.engine.forget_tcp_events(opened.context, qp)?;
        }
        start()?;
        if let Some(status) = state.of.get_mut(&qp) {
            *status = Status::idle(status.number);
        }
        Ok(())
    }

    /// All that there are.
    pub(super) fn queue_pairs(&self) -> Vec<QpId> {
        self.lock().of.keys().copied().collect()
    }

    pub(super) fn remove(&self, qp: QpId) {
        self.lock().of.remove(&qp);
    }

    /// Takes what the engine has, unless a thread is there to take it.
    fn collect(&self, opened: &Opened) -> Result<MutexGuard<'_, State>, Error> {
        let mut state = self.lock();
        let mut any = false;
        while !state.asked {
            let Some(event) = opened.engine.take_tcp_note(opened.context)? else { break };
            state.note(event);
            any = true;
        }
        if any {
            self.news.notify_all();
        }
        Ok(state)
    }

    /// Waits until `found` finds something.
    fn wait<T>(&self, opened: &Opened, found: impl Fn(&State) -> Option<T>) -> Result<T, Error> {
        let mut state = self.collect(opened)?;
        loop {
            if let Some(found) = found(&state) {
                return Ok(found);
            }
            if state.asked {
                state = self.news.wait(state).unwrap_or_else(PoisonError::into_inner);
                continue;
            }
            state.asked = true;
            drop(state);
            let event = opened.engine.wait_tcp_note(opened.context);
            state = self.lock();
            state.asked = false;
            self.news.notify_all();
            match event {
                Ok(event) => state.note(event),
                Err(EngineError::Interrupted) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// An event as the program knows it; none if its queue pair is being dropped.
    fn named(&self, event: TcpEvent) -> Option<Event> {
        let number = self.lock().of.get(&event.qp)?.number;
        Some(Event { qp_num: number, change: event.change })
    }

    pub(super) fn poll(&self, opened: &Opened) -> Result<Option<Event>, Error> {
        while let Some(event) = opened.engine.take_tcp_event(opened.context)? {
            if let Some(event) = self.named(event) {
                return Ok(Some(event));
            }
        }
        opened.engine.still_there()?;
        Ok(None)
    }

    pub(super) fn next(&self, opened: &Opened) -> Result<Event, Error> {
        loop {
            match opened.engine.wait_tcp_event(opened.context) {
                Ok(event) => {
                    if let Some(event) = self.named(event) {
                        return Ok(event);
                    }
                }
                Err(EngineError::Interrupted) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Waits until something has become of a connection.
    pub(super) fn wait_for<T>(
        &self,
        opened: &Opened,
        qp: QpId,
        found: impl Fn(&Status) -> Option<T>,
    ) -> Result<T, Error> {
        self.wait(opened, |state| state.of.get(&qp).and_then(&found))
    }
}
