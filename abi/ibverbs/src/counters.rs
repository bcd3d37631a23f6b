//! Counters that flow rules count in.

use quipu_abi_trace::entry;
use quipu_abi_types::*;
use quipu_cabi::{Errno, Handle, IntErrno, Null, Tagged};

use crate::context::context;
use crate::engine::check;
use crate::object::Blank;

/// The private part of an object; its handle is in the public one, where the engine finds it.
pub(crate) struct CountersState {
    api: &'static EngineApi,
    handle: CountersHandle,
}

impl Tagged for CountersState {
    const TAG: u64 = 0x5155_4950_434e_5452;
}

type Counters = Handle<EngineCounters, CountersState>;

entry! {
    /// `ibv_create_counters(3)`
    fn create_counters(
        raw: *mut ibv_context,
        init: *mut ibv_counters_init_attr,
    ) -> Null<ibv_counters> {
        // SAFETY: the program passes a context, and null or a valid pointer.
        let (context, init) = unsafe { (context(raw)?, init.as_ref().ok_or(Errno::EINVAL)?) };
        if init.comp_mask != 0 {
            return Err(Errno::EOPNOTSUPP);
        }
        let (api, mut handle) = (context.api, CountersHandle::NONE);
        // SAFETY: `handle` is valid for the call.
        check(unsafe { (api.raw.create_counters)(context.handle, &mut handle) })?;
        let mut public = EngineCounters::blank();
        (public.base.context, public.handle) = (raw, handle);
        Ok(Counters::create(public, CountersState { api, handle }).cast())
    }

    /// `ibv_destroy_counters(3)`
    fn destroy_counters(raw: *mut ibv_counters) -> IntErrno {
        // SAFETY: the program passes an object and uses it no more.
        unsafe {
            let counters = Counters::get(raw.cast())?;
            check((counters.api.raw.destroy_counters)(counters.handle))?;
            drop(Counters::take(raw.cast())?);
        }
        Ok(())
    }

    /// `ibv_attach_counters_point_flow(3)`: to rules that are made later, and name the object.
    fn attach_counters_point_flow(
        raw: *mut ibv_counters,
        attr: *mut ibv_counter_attach_attr,
        flow: *mut ibv_flow,
    ) -> IntErrno {
        // SAFETY: the program passes an object, and null or a valid pointer.
        let (counters, attr) =
            unsafe { (Counters::get(raw.cast())?, attr.as_ref().ok_or(Errno::EINVAL)?) };
        if !flow.is_null() || attr.comp_mask != 0 {
            return Err(Errno::EOPNOTSUPP);
        }
        // SAFETY: the engine takes numbers.
        check(unsafe {
            (counters.api.raw.attach_counter)(counters.handle, attr.counter_desc, attr.index)
        })
    }

    /// `ibv_read_counters(3)`
    fn ibv_read_counters(
        raw: *mut ibv_counters,
        values: *mut u64,
        count: u32,
        flags: u32,
    ) -> IntErrno {
        // SAFETY: the program passes an object.
        let counters = unsafe { Counters::get(raw.cast()) }?;
        if flags & !IBV_READ_COUNTERS_ATTR_PREFER_CACHED != 0 {
            return Err(Errno::EOPNOTSUPP);
        }
        if count == 0 {
            return Ok(());
        }
        if values.is_null() {
            return Err(Errno::EINVAL);
        }
        // SAFETY: the program passes room for so many numbers.
        check(unsafe { (counters.api.raw.read_counters)(counters.handle, values, count) })
    }
}
