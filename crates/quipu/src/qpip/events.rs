//! What happens to connections: one thread at a time asks the engine, on behalf of all that wait.

use std::collections::{HashMap, VecDeque};
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
    /// Those that nobody has taken; of queue pairs that exist, a few each.
    untaken: VecDeque<(QpId, Event)>,
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
        let number = status.number;
        self.untaken.push_back((event.qp, Event { qp_num: number, change: event.change }));
    }
}

/// The events of one opened adapter.
#[derive(Debug, Default)]
pub(crate) struct Events {
    state: Mutex<State>,
    news: Condvar,
}

impl Events {
    fn lock(&self) -> MutexGuard<'_, State> {
        // Nothing in here is left half done by a panic.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn add(&self, qp: QpId, number: QpNum) {
        self.lock().of.insert(qp, Status::idle(number));
    }

    /// A queue pair begins anew: what has become of an attempt before is no answer any more.
    pub(super) fn begin(&self, opened: &Opened, qp: QpId) -> Result<(), Error> {
        let mut state = self.collect(opened)?;
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
        let mut state = self.lock();
        state.of.remove(&qp);
        state.untaken.retain(|(owner, _)| *owner != qp);
    }

    /// Takes what the engine has, unless a thread is there to take it.
    fn collect(&self, opened: &Opened) -> Result<MutexGuard<'_, State>, Error> {
        let mut state = self.lock();
        let mut any = false;
        while !state.asked {
            let Some(event) = opened.engine.take_tcp_event(opened.context)? else { break };
            state.note(event);
            any = true;
        }
        if any {
            self.news.notify_all();
        }
        Ok(state)
    }

    /// Waits until `found` finds something.
    fn wait<T>(
        &self,
        opened: &Opened,
        mut found: impl FnMut(&mut State) -> Option<T>,
    ) -> Result<T, Error> {
        let mut state = self.collect(opened)?;
        loop {
            if let Some(found) = found(&mut state) {
                return Ok(found);
            }
            if state.asked {
                state = self.news.wait(state).unwrap_or_else(PoisonError::into_inner);
                continue;
            }
            state.asked = true;
            drop(state);
            let event = opened.engine.wait_tcp_event(opened.context);
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

    pub(super) fn poll(&self, opened: &Opened) -> Result<Option<Event>, Error> {
        let event = self.collect(opened)?.untaken.pop_front();
        if event.is_none() {
            opened.engine.still_there()?;
        }
        Ok(event.map(|(_, event)| event))
    }

    pub(super) fn next(&self, opened: &Opened) -> Result<Event, Error> {
        self.wait(opened, |state| state.untaken.pop_front().map(|(_, event)| event))
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
