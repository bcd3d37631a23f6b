//! XRC domains.

use quipu_abi_trace::entry;
use quipu_abi_types::*;
use quipu_cabi::{Errno, Handle, IntErrno, Null, Tagged};

use crate::context::context;
use crate::engine::check;
use crate::object::Blank;

/// The private part of an XRC domain.
pub(crate) struct XrcdState {
    pub(crate) api: &'static EngineApi,
    pub(crate) handle: XrcdHandle,
}

impl Tagged for XrcdState {
    const TAG: u64 = 0x5155_4950_5852_4344;
}

type Xrcd = Handle<ibv_xrcd, XrcdState>;

/// Finds the domain behind a pointer of the program.
///
/// # Safety
///
/// As [`Handle::get`].
pub(crate) unsafe fn xrcd<'a>(raw: *const ibv_xrcd) -> Result<&'a Xrcd, Errno> {
    // SAFETY: passed on from the caller.
    unsafe { Xrcd::get(raw) }
}

entry! {
    /// `ibv_open_xrcd(3)`: shared by inode within the process.
    fn open_xrcd(raw: *mut ibv_context, init: *mut ibv_xrcd_init_attr) -> Null<ibv_xrcd> {
        // SAFETY: the program passes a context, and null or a valid pointer.
        let (context, init) = unsafe { (context(raw)?, init.as_ref().ok_or(Errno::EINVAL)?) };
        let needed = IBV_XRCD_INIT_ATTR_FD | IBV_XRCD_INIT_ATTR_OFLAGS;
        if init.comp_mask & !needed != 0 {
            return Err(Errno::EOPNOTSUPP);
        }
        if init.comp_mask != needed {
            return Err(Errno::EINVAL);
        }
        let (api, mut handle) = (context.api, XrcdHandle::NONE);
        // SAFETY: `handle` is valid for the call.
        check(unsafe { (api.open_xrcd)(context.handle, init.fd, init.oflags, &mut handle) })?;
        let mut public = ibv_xrcd::blank();
        public.context = raw;
        Ok(Xrcd::create(public, XrcdState { api, handle }))
    }

    /// `ibv_close_xrcd(3)`
    fn close_xrcd(raw: *mut ibv_xrcd) -> IntErrno {
        // SAFETY: the program passes a domain and uses it no more.
        unsafe {
            let xrcd = xrcd(raw)?;
            check((xrcd.api.close_xrcd)(xrcd.handle))?;
            drop(Xrcd::take(raw)?);
        }
        Ok(())
    }
}
