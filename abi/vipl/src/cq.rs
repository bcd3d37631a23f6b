//! Completion queues of programs.

use std::collections::VecDeque;

use libc::c_ulong;
use quipu_cabi::entry;
use quipu_via::codes::{Code, Outcome};
use quipu_via::cq::CompletionQueue;
use quipu_via::queue::Head;
use quipu_via::vi::Side;

use crate::callback::{Callback, CqHandler};
use crate::handle::{self, Id, Kind};
use crate::nic::{Deadline, MAX_CQS, Nic, State};
use crate::touch::give;
use crate::types::{VIP_PVOID, VipReturn, code};
use crate::work;

/// A completion queue, and handlers that wait for its next entries.
pub(crate) struct Cq {
    pub(crate) queue: CompletionQueue<Id>,
    notifies: VecDeque<(usize, CqHandler)>,
}

impl Cq {
    /// Whether a handler waits for an entry.
    pub(crate) fn is_awaited(&self) -> bool {
        !self.notifies.is_empty()
    }
}

impl State {
    fn cq(&mut self, id: Id) -> Outcome<&mut Cq> {
        self.cqs.get_mut(&id).ok_or(Code::InvalidParameter)
    }
}

impl Nic {
    /// Calls handlers that wait for entries of a completion queue.
    pub(crate) fn notify_cq(&self, state: &mut State, id: Id) {
        let Ok(cq) = state.cq(id) else { return };
        while !cq.notifies.is_empty() {
            let Some((vi, side)) = cq.queue.pop() else { return };
            let Some((context, handler)) = cq.notifies.pop_front() else { return };
            let nic = self.handle() as usize;
            let vi = self.handle_of(Kind::Vi, vi) as usize;
            let receive = side == Side::Receive;
            self.callbacks.push(Callback::Entry { context, handler, nic, vi, receive });
        }
    }
}

fn create(raw: VIP_PVOID, entries: c_ulong, out: *mut VIP_PVOID) -> Outcome {
    let nic = handle::nic(raw)?.here()?;
    if out.is_null() {
        return Err(Code::InvalidParameter);
    }
    let queue = CompletionQueue::new(entries)?;
    let mut state = nic.lock();
    if state.cqs.len() >= MAX_CQS {
        return Err(Code::ErrorResource);
    }
    let id = handle::fresh();
    state.cqs.insert(id, Cq { queue, notifies: VecDeque::new() });
    give(out, nic.handle_of(Kind::Cq, id))
}

fn destroy(raw: VIP_PVOID) -> Outcome {
    let (nic, id) = handle::object(Kind::Cq, raw)?;
    let mut state = nic.lock();
    state.cq(id)?;
    let is_used = state
        .vis
        .values()
        .any(|vi| [Side::Send, Side::Receive].iter().any(|side| vi.cq(*side) == Some(id)));
    if is_used {
        return Err(Code::ErrorResource);
    }
    state.cqs.remove(&id);
    Ok(())
}

fn resize(raw: VIP_PVOID, entries: c_ulong) -> Outcome {
    let (nic, id) = handle::object(Kind::Cq, raw)?;
    nic.lock().cq(id)?.queue.resize(entries)
}

fn answer(nic: &Nic, entry: (Id, Side), vi: *mut VIP_PVOID, receive: *mut i32) -> Outcome {
    give(vi, nic.handle_of(Kind::Vi, entry.0))?;
    give(receive, i32::from(entry.1 == Side::Receive))
}

fn done(raw: VIP_PVOID, vi: *mut VIP_PVOID, receive: *mut i32) -> Outcome {
    let (nic, id) = handle::object(Kind::Cq, raw)?;
    if vi.is_null() || receive.is_null() {
        return Err(Code::InvalidParameter);
    }
    let mut state = nic.lock();
    let mut entry = state.cq(id)?.queue.pop();
    if entry.is_none() {
        nic.pump(&mut state);
        entry = state.cq(id)?.queue.pop();
    }
    answer(&nic, entry.ok_or(Code::NotDone)?, vi, receive)
}

/// Takes an entry with its descriptor. Entries whose descriptor the program has taken already are passed
/// over.
fn done_descriptor(
    raw: VIP_PVOID,
    vi: *mut VIP_PVOID,
    receive: *mut i32,
    descriptor: *mut VIP_PVOID,
) -> Outcome {
    let (nic, id) = handle::object(Kind::Cq, raw)?;
    if vi.is_null() || receive.is_null() || descriptor.is_null() {
        return Err(Code::InvalidParameter);
    }
    let mut state = nic.lock();
    let mut has_polled = false;
    loop {
        let Some(entry) = state.cq(id)?.queue.pop() else {
            if std::mem::replace(&mut has_polled, true) {
                return Err(Code::NotDone);
            }
            nic.pump(&mut state);
            continue;
        };
        let head = work::taken(&mut state, entry.0, entry.1);
        if matches!(head, Head::Succeeded(_) | Head::Failed(_)) {
            answer(&nic, entry, vi, receive)?;
            return work::answer(head, descriptor);
        }
    }
}

fn wait(raw: VIP_PVOID, timeout: c_ulong, vi: *mut VIP_PVOID, receive: *mut i32) -> Outcome {
    let (nic, id) = handle::object(Kind::Cq, raw)?;
    if vi.is_null() || receive.is_null() {
        return Err(Code::InvalidParameter);
    }
    nic.lock().cq(id)?;
    let entry = nic.wait_until(Deadline::after(timeout), |state| match state.cq(id) {
        Ok(cq) => cq.queue.pop().map(Ok),
        Err(gone) => Some(Err(gone)),
    });
    answer(&nic, entry.ok_or(Code::Timeout)??, vi, receive)
}

fn notify(raw: VIP_PVOID, context: VIP_PVOID, handler: Option<CqHandler>) -> Outcome {
    let (nic, id) = handle::object(Kind::Cq, raw)?;
    let handler = handler.ok_or(Code::InvalidParameter)?;
    let mut state = nic.lock();
    state.cq(id)?;
    nic.callbacks.start()?;
    nic.control.start(&nic)?;
    state.cq(id)?.notifies.push_back((context as usize, handler));
    nic.notify_cq(&mut state, id);
    nic.control.watch_completions();
    Ok(())
}

entry! {
    /// `VipCreateCQ`
    fn VipCreateCQ(nic: VIP_PVOID, entries: c_ulong, out: *mut VIP_PVOID) -> VipReturn {
        code(create(nic, entries, out))
    }

    /// `VipDestroyCQ`
    fn VipDestroyCQ(cq: VIP_PVOID) -> VipReturn {
        code(destroy(cq))
    }

    /// `VipResizeCQ`
    fn VipResizeCQ(cq: VIP_PVOID, entries: c_ulong) -> VipReturn {
        code(resize(cq, entries))
    }

    /// `VipCQDone`
    fn VipCQDone(cq: VIP_PVOID, vi: *mut VIP_PVOID, receive: *mut i32) -> VipReturn {
        code(done(cq, vi, receive))
    }

    /// `VipxQCQDoneDescriptor`
    fn VipxQCQDoneDescriptor(
        cq: VIP_PVOID,
        vi: *mut VIP_PVOID,
        receive: *mut i32,
        descriptor: *mut VIP_PVOID,
    ) -> VipReturn {
        code(done_descriptor(cq, vi, receive, descriptor))
    }

    /// `VipCQWait`
    fn VipCQWait(
        cq: VIP_PVOID,
        timeout: c_ulong,
        vi: *mut VIP_PVOID,
        receive: *mut i32,
    ) -> VipReturn {
        code(wait(cq, timeout, vi, receive))
    }

    /// `VipCQNotify`
    fn VipCQNotify(cq: VIP_PVOID, context: VIP_PVOID, handler: Option<CqHandler>) -> VipReturn {
        code(notify(cq, context, handler))
    }
}
