//! Address handles.

use libc::c_int;
use quipu_abi_types::*;
use quipu_cabi::{Errno, Handle, IntErrno, IntMinusOne, Null, Tagged, entry};

use crate::context::context;
use crate::engine::check;
use crate::object::Blank;
use crate::pd::pd;

/// The private part of an address handle.
pub(crate) struct AhState {
    api: &'static EngineApi,
    handle: AhHandle,
}

impl Tagged for AhState {
    const TAG: u64 = 0x5155_4950_0000_4148;
}

type Ah = Handle<ibv_ah, AhState>;

/// # Safety
///
/// `raw` is a domain of the program.
unsafe fn create(raw: *mut ibv_pd, attr: &ibv_ah_attr) -> Result<*mut ibv_ah, Errno> {
    // SAFETY: passed on from the caller.
    let pd = unsafe { pd(raw) }?;
    let mut handle = AhHandle::NONE;
    // SAFETY: both are valid for the call.
    check(unsafe { (pd.api.create_ah)(pd.handle, attr, &mut handle) })?;
    pd.enter();
    let mut public = ibv_ah::blank();
    // SAFETY: a live object of the program.
    public.context = unsafe { (*raw).context };
    public.pd = raw;
    // The engine reads it from here when a datagram is posted.
    public.handle = handle.0;
    Ok(Ah::create(public, AhState { api: pd.api, handle }))
}

/// The address of who sent a datagram, from its completion and the header in front of its payload.
fn sender(port: u8, wc: &ibv_wc, grh: Option<&ibv_grh>) -> Result<ibv_ah_attr, Errno> {
    let mut attr = ibv_ah_attr::blank();
    attr.dlid = wc.slid;
    attr.sl = wc.sl;
    attr.src_path_bits = wc.dlid_path_bits;
    attr.port_num = port;
    if wc.wc_flags & IBV_WC_GRH != 0 {
        let grh = grh.ok_or(Errno::EINVAL)?;
        let fields = u32::from_be(grh.version_tclass_flow);
        attr.is_global = 1;
        attr.grh.dgid = grh.sgid;
        attr.grh.flow_label = fields & 0xf_ffff;
        attr.grh.traffic_class = (fields >> 20) as u8;
        attr.grh.hop_limit = 0xff;
        // There is one address, so the datagram was sent to it.
        attr.grh.sgid_index = 0;
    }
    Ok(attr)
}

entry! {
    /// `ibv_create_ah(3)`
    fn ibv_create_ah(raw: *mut ibv_pd, attr: *mut ibv_ah_attr) -> Null<ibv_ah> {
        // SAFETY: the program passes a domain, and null or a valid pointer.
        unsafe { create(raw, attr.as_ref().ok_or(Errno::EINVAL)?) }
    }

    /// `ibv_init_ah_from_wc(3)`
    fn ibv_init_ah_from_wc(
        raw: *mut ibv_context,
        port: u8,
        wc: *mut ibv_wc,
        grh: *mut ibv_grh,
        out: *mut ibv_ah_attr,
    ) -> IntMinusOne {
        // SAFETY: the program passes a context, and null or valid pointers.
        unsafe {
            context(raw)?;
            let out = out.as_mut().ok_or(Errno::EINVAL)?;
            *out = sender(port, wc.as_ref().ok_or(Errno::EINVAL)?, grh.as_ref())?;
        }
        Ok::<c_int, _>(0)
    }

    /// `ibv_create_ah_from_wc(3)`
    fn ibv_create_ah_from_wc(
        raw: *mut ibv_pd,
        wc: *mut ibv_wc,
        grh: *mut ibv_grh,
        port: u8,
    ) -> Null<ibv_ah> {
        // SAFETY: the program passes a domain, and null or valid pointers.
        unsafe { create(raw, &sender(port, wc.as_ref().ok_or(Errno::EINVAL)?, grh.as_ref())?) }
    }

    /// `ibv_destroy_ah(3)`
    fn ibv_destroy_ah(raw: *mut ibv_ah) -> IntErrno {
        // SAFETY: the program passes an address handle and uses it no more; its domain outlives it.
        unsafe {
            let ah = Ah::get(raw)?;
            check((ah.api.destroy_ah)(ah.handle))?;
            pd((*raw).pd)?.leave();
            drop(Ah::take(raw)?);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_sender_is_read_from_the_header() {
        let mut wc = ibv_wc::blank();
        wc.wc_flags = IBV_WC_GRH;
        wc.sl = 3;
        let grh = ibv_grh {
            version_tclass_flow: (6u32 << 28 | 0x12 << 20 | 0xabcde).to_be(),
            paylen: 0,
            next_hdr: 0,
            hop_limit: 1,
            sgid: ibv_gid { raw: [5; 16] },
            dgid: ibv_gid { raw: [6; 16] },
        };
        let attr = sender(1, &wc, Some(&grh)).unwrap();
        // SAFETY: every bit pattern is a GID.
        assert_eq!(unsafe { attr.grh.dgid.raw }, [5; 16]);
        assert_eq!((attr.grh.flow_label, attr.grh.traffic_class), (0xabcde, 0x12));
        assert_eq!((attr.is_global, attr.sl, attr.port_num), (1, 3, 1));
        assert_eq!(sender(1, &wc, None).err(), Some(Errno::EINVAL));
    }
}
