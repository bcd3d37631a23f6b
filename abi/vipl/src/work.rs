//! Posting descriptors, and getting them back.

use libc::c_ulong;
use quipu_cabi::entry;
use quipu_via::codes::{AsyncError, Code, Outcome, Resource, Status};
use quipu_via::descriptor::{Operation, Request, Segment};
use quipu_via::queue::{Head, Posted};
use quipu_via::vi::{Completed, Side};

use crate::callback::{DescriptorHandler, Notify};
use crate::handle::{self, Id, Kind};
use crate::nic::{Deadline, Nic, State};
use crate::touch::{self, Way, give};
use crate::types::{VIP_PVOID, VipReturn, code};

fn post(raw: VIP_PVOID, side: Side, descriptor: VIP_PVOID, memory: u32) -> Outcome {
    let (nic, id) = handle::object(Kind::Vi, raw)?;
    let mut state = nic.lock();
    let state = &mut *state;
    state.vi(id)?;
    let at = descriptor as u64;
    let posted = read(&nic, state, id, side, at, memory);
    let Some(posted) = posted else {
        nic.raise(id, AsyncError::PostDescriptor, Resource::Descriptor, Some(at));
        return Err(Code::InvalidParameter);
    };
    let mut done = Completed::new();
    let taken = state.vi(id)?.vi.post(side, posted, &mut done);
    if taken.is_err() {
        nic.raise(id, AsyncError::Overrun, Resource::Vi, Some(at));
    }
    nic.deliver(state, id, &mut done);
    nic.feed(state, id);
    taken
}

/// Reads a descriptor; none if its address or its handle is wrong.
fn read(nic: &Nic, state: &mut State, id: Id, side: Side, at: u64, memory: u32) -> Option<Posted> {
    if at == 0 || !state.regions.contains_key(&memory) {
        return None;
    }
    if nic.strict && (!at.is_multiple_of(64) || state.way(memory, at, 32) == Way::Unknown) {
        return None;
    }
    let (control, segments) = touch::descriptor(at, |len| state.way(memory, at, len))?;
    let entry = state.vis.get(&id)?;
    let (rules, tag) = (entry.rules(nic.strict), entry.tag);
    let request = segments.map_err(|()| Status::FORMAT_ERROR);
    let mut request = request.and_then(|segments| match side {
        Side::Send => rules.send(control, &segments),
        Side::Receive => rules.receive(control, &segments),
    });
    if let Ok(asked) = &mut request {
        if side == Side::Receive && !nic.strict {
            state.clip(&mut asked.local);
        }
        let checked = if asked.is_inline {
            copy_inline(state, asked)
        } else {
            asked.local.iter_mut().try_for_each(|segment| state.resolve(nic, tag, segment))
        };
        if let Err(status) = checked {
            request = Err(status);
        }
    }
    let operation = Operation::status_of(control.control, side == Side::Receive);
    Some(Posted { descriptor: at, handle: memory, operation, request })
}

/// Copies the data of an inline descriptor, whose memory need not be registered.
fn copy_inline(state: &State, asked: &mut Request) -> Result<(), Status> {
    let way = |segment: &Segment| state.way(segment.handle, segment.addr, segment.len.into());
    let local = std::mem::take(&mut asked.local);
    asked.inline = touch::gather(&local, way).ok_or(Status::PROTECTION_ERROR)?;
    Ok(())
}

/// The oldest descriptor of a queue, if it is done.
pub(crate) fn taken(state: &mut State, id: Id, side: Side) -> Head {
    state.vis.get_mut(&id).map_or(Head::Empty, |entry| entry.vi.take(side))
}

/// What a program gets of a descriptor.
pub(crate) fn answer(head: Head, out: *mut VIP_PVOID) -> Outcome {
    match head {
        Head::NotDone => Err(Code::NotDone),
        Head::Empty => give(out, std::ptr::null_mut()).and(Err(Code::DescriptorError)),
        Head::Succeeded(descriptor) => give(out, descriptor as VIP_PVOID),
        Head::Failed(descriptor) => {
            give(out, descriptor as VIP_PVOID).and(Err(Code::DescriptorError))
        }
    }
}

fn done(raw: VIP_PVOID, side: Side, out: *mut VIP_PVOID) -> Outcome {
    let (nic, id) = handle::object(Kind::Vi, raw)?;
    if out.is_null() {
        return Err(Code::InvalidParameter);
    }
    let mut state = nic.lock();
    if !state.vi(id)?.vi.queue(side).is_done() {
        nic.pump(&mut state);
    }
    answer(taken(&mut state, id, side), out)
}

fn wait(raw: VIP_PVOID, side: Side, timeout: c_ulong, out: *mut VIP_PVOID) -> Outcome {
    let (nic, id) = handle::object(Kind::Vi, raw)?;
    if out.is_null() {
        return Err(Code::InvalidParameter);
    }
    if nic.lock().vi(id)?.cq(side).is_some() {
        return Err(Code::ErrorResource);
    }
    let head = nic.wait_until(Deadline::after(timeout), |state| match taken(state, id, side) {
        Head::NotDone => None,
        head => Some(head),
    });
    answer(head.ok_or(Code::Timeout)?, out)
}

fn notify(
    raw: VIP_PVOID,
    side: Side,
    context: VIP_PVOID,
    handler: Option<DescriptorHandler>,
) -> Outcome {
    let (nic, id) = handle::object(Kind::Vi, raw)?;
    let handler = handler.ok_or(Code::InvalidParameter)?;
    let mut state = nic.lock();
    let entry = state.vi(id)?;
    if entry.cq(side).is_some() {
        return Err(Code::ErrorResource);
    }
    nic.callbacks.start()?;
    nic.control.start(&nic)?;
    let entry = state.vi(id)?;
    entry.notifies(side).push_back(Notify { context: context as usize, handler });
    nic.notify_vi(&mut state, id, side);
    nic.control.watch_completions();
    Ok(())
}

entry! {
    /// `VipPostSend`
    fn VipPostSend(vi: VIP_PVOID, descriptor: VIP_PVOID, memory: u32) -> VipReturn {
        code(post(vi, Side::Send, descriptor, memory))
    }

    /// `VipPostRecv`
    fn VipPostRecv(vi: VIP_PVOID, descriptor: VIP_PVOID, memory: u32) -> VipReturn {
        code(post(vi, Side::Receive, descriptor, memory))
    }

    /// `VipSendDone`
    fn VipSendDone(vi: VIP_PVOID, out: *mut VIP_PVOID) -> VipReturn {
        code(done(vi, Side::Send, out))
    }

    /// `VipRecvDone`
    fn VipRecvDone(vi: VIP_PVOID, out: *mut VIP_PVOID) -> VipReturn {
        code(done(vi, Side::Receive, out))
    }

    /// `VipSendWait`
    fn VipSendWait(vi: VIP_PVOID, timeout: c_ulong, out: *mut VIP_PVOID) -> VipReturn {
        code(wait(vi, Side::Send, timeout, out))
    }

    /// `VipRecvWait`
    fn VipRecvWait(vi: VIP_PVOID, timeout: c_ulong, out: *mut VIP_PVOID) -> VipReturn {
        code(wait(vi, Side::Receive, timeout, out))
    }

    /// `VipSendNotify`
    fn VipSendNotify(
        vi: VIP_PVOID,
        context: VIP_PVOID,
        handler: Option<DescriptorHandler>,
    ) -> VipReturn {
        code(notify(vi, Side::Send, context, handler))
    }

    /// `VipRecvNotify`
    fn VipRecvNotify(
        vi: VIP_PVOID,
        context: VIP_PVOID,
        handler: Option<DescriptorHandler>,
    ) -> VipReturn {
        code(notify(vi, Side::Receive, context, handler))
    }
}
