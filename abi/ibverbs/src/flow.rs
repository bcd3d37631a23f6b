//! Flow rules of raw packet queue pairs.

use quipu_abi_trace::entry;
use quipu_abi_types::*;
use quipu_cabi::{Errno, Handle, IntErrno, Null, Tagged};

use crate::engine::check;
use crate::object::Blank;
use crate::qp::qp;

/// The private part of a rule.
pub(crate) struct FlowState {
    api: &'static EngineApi,
    handle: FlowHandle,
}

impl Tagged for FlowState {
    const TAG: u64 = 0x5155_4950_464c_4f57;
}

type Flow = Handle<ibv_flow, FlowState>;

entry! {
    /// `ibv_create_flow(3)`
    fn create_flow(raw: *mut ibv_qp, attr: *mut ibv_flow_attr) -> Null<ibv_flow> {
        // SAFETY: the program passes a queue pair.
        let qp = unsafe { qp(raw) }?;
        if attr.is_null() {
            return Err(Errno::EINVAL);
        }
        let (api, mut handle) = (qp.api, FlowHandle::NONE);
        // SAFETY: the program passes a rule with its specifications; `handle` is valid for the call.
        check(unsafe { (api.raw.create_flow)(qp.handle, attr, &mut handle) })?;
        let mut public = ibv_flow::blank();
        // SAFETY: the public part lives as long as the queue pair.
        public.context = unsafe { (*raw).context };
        public.handle = handle.0 as u32;
        Ok(Flow::create(public, FlowState { api, handle }))
    }

    /// `ibv_destroy_flow(3)`
    fn destroy_flow(raw: *mut ibv_flow) -> IntErrno {
        // SAFETY: the program passes a rule and uses it no more.
        unsafe {
            let flow = Flow::get(raw)?;
            check((flow.api.raw.destroy_flow)(flow.handle))?;
            drop(Flow::take(raw)?);
        }
        Ok(())
    }
}
