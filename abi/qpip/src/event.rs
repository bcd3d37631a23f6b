//! What happens to connections.

use libc::{c_int, c_void};
use quipu_cabi::{Errno, IntMinusOne, entry};
use quipu_host::TcpEvent;
use quipu_host::inet::tcp::Failure;
use quipu_host::nic::TcpChange;

use crate::adapter::{Adapter, Known, adapter, lock, qpip_adapter};
use crate::error::{Outcome, fail, refused};
use crate::qp::qpip_qp;

/// `struct qpip_event`
#[repr(C)]
#[derive(Clone, Copy)]
pub struct qpip_event {
    pub(crate) kind: u32,
    pub(crate) reserved: u32,
    pub(crate) qp: *mut qpip_qp,
    pub(crate) context: *mut c_void,
}

/// `enum qpip_event_kind`
const fn kind(change: TcpChange) -> u32 {
    match change {
        TcpChange::Connected => 1,
        TcpChange::PeerClosed => 2,
        TcpChange::Closed => 3,
        TcpChange::Failed(Failure::Refused | Failure::Declined) => 4,
        TcpChange::Failed(Failure::Reset) => 5,
        TcpChange::Failed(Failure::TimedOut) => 6,
        TcpChange::Aborted => 7,
        TcpChange::Failed(Failure::Unreachable) => 8,
    }
}

/// The next event, with the queue pair that it is about as the program knows it.
fn take(adapter: &Adapter) -> Outcome<Option<(TcpEvent, Known)>> {
    let wrong = || refused("taking an event");
    let Adapter { engine, context, qps, .. } = adapter;
    let _ = engine.progress().map_err(wrong())?;
    while let Some(event) = engine.take_tcp_event(*context).map_err(wrong())? {
        // One that is being destroyed has none any more.
        if let Some(known) = lock(qps).get(&event.qp) {
            return Ok(Some((event, *known)));
        }
    }
    engine.still_there().map_err(wrong())?;
    Ok(None)
}

entry! {
    /// `qpip_event`
    fn qpip_event(raw: *mut qpip_adapter, out: *mut qpip_event) -> IntMinusOne {
        // SAFETY: the program passes what qpip_open gave.
        let adapter = unsafe { adapter(raw) }?;
        if out.is_null() {
            return Err(fail(Errno::EINVAL, "the pointer for the event is NULL"));
        }
        let taken = take(&adapter)?;
        if let Some((event, Known { qp, context })) = taken {
            let (qp, context) = (qp as *mut qpip_qp, context as *mut c_void);
            let event = qpip_event { kind: kind(event.change), reserved: 0, qp, context };
            // SAFETY: it is not null, and the program passes a place for an event then.
            unsafe { out.write_unaligned(event) };
        }
        Ok(c_int::from(taken.is_some()))
    }
}
