//! On-demand paging, null regions, and objects found by the numbers that programs show each other.

use quipu_abi_types::*;
use quipu_host::fault::Call;
use quipu_mem::Access;
use quipu_nic::PdId;

use crate::entry::{Out, entries};
use crate::instance::{Instance, current};
use crate::registry::Object;
use crate::status::{INVALID, Outcome};

/// Where the bytes that an element names are, if all of them are of an on-demand region of the domain
/// with the right to write, should that be needed.
fn range(instance: &Instance, pd: PdId, sge: &ibv_sge, write: bool) -> Outcome<(usize, u64)> {
    let named = instance.registry().region(sge.lkey);
    let mr = named.map_err(|_| EngineStatus::BadAddress)?;
    let (domain, info) = instance.engine.query_mr(mr)?;
    if !info.access.contains(Access::ON_DEMAND) {
        return Err(EngineStatus::NotFound.into());
    }
    if domain != pd || (write && !info.access.contains(Access::LOCAL_WRITE)) {
        return Err(EngineStatus::NotPermitted.into());
    }
    let (offset, len) = (sge.addr.wrapping_sub(info.iova), u64::from(sge.length));
    let addr = usize::try_from(offset).ok().and_then(|offset| info.addr.checked_add(offset));
    match addr {
        Some(addr) if offset <= info.len && len <= info.len - offset => Ok((addr, len)),
        _ => Err(EngineStatus::BadAddress.into()),
    }
}

entries! {
    /// [`EngineApi::alloc_null_mr`]
    fn alloc_null_mr(pd: PdHandle, out: *mut EngineMr) {
        // SAFETY: the table demands a valid pointer.
        let out = unsafe { Out::new(out) }?;
        let instance = current()?;
        let pd = instance.pd(pd);
        let context = instance.registry().context_of(Object::Pd(pd))?;
        let region = instance.engine.reg_null_mr(pd)?;
        let mut registry = instance.registry();
        registry.add(Object::Mr(region.id), context, 0);
        registry.set_key(Object::Mr(region.id), region.key.0);
        drop(registry);
        out.fill(EngineMr { mr: instance.mr_handle(region.id), lkey: region.key.0, rkey: 0 });
        Ok(())
    }

    /// [`EngineApi::advise_mr`]
    fn advise_mr(
        pd: PdHandle,
        advice: u32,
        flags: u32,
        list: *const ibv_sge,
        count: u32,
    ) {
        let (write, fault) = match advice {
            IBV_ADVISE_MR_ADVICE_PREFETCH => (false, true),
            IBV_ADVISE_MR_ADVICE_PREFETCH_WRITE => (true, true),
            IBV_ADVISE_MR_ADVICE_PREFETCH_NO_FAULT => (false, false),
            _ => return Err(EngineStatus::NotSupported.into()),
        };
        if flags & !IBV_ADVISE_MR_FLAG_FLUSH != 0 || count == 0 || list.is_null() {
            return Err(INVALID);
        }
        let instance = current()?;
        instance.engine.note_call(Call::AdviseMr)?;
        let pd = instance.pd(pd);
        instance.registry().context_of(Object::Pd(pd))?;
        // SAFETY: the table demands a list of `count` elements.
        let list = unsafe { quipu_cabi::list(list, count as usize) };
        let ranges: Outcome<Vec<_>> =
            list.iter().map(|sge| range(instance, pd, sge, write)).collect();
        for (addr, len) in ranges?.into_iter().filter(|_| fault) {
            let fetched = instance.engine.prefetch(addr, len, write);
            if flags & IBV_ADVISE_MR_FLAG_FLUSH != 0 {
                fetched?;
            }
        }
        Ok(())
    }

    /// [`EngineApi::find_pd`]
    fn find_pd(context: ContextHandle, low: u32, out: *mut PdHandle) {
        // SAFETY: the table demands a valid pointer.
        let out = unsafe { Out::new(out) }?;
        let instance = current()?;
        let context = instance.context(context);
        let found = instance.registry().find(context, |object| match object {
            Object::Pd(pd) => Some(instance.pd_handle(pd)).filter(|pd| pd.0 as u32 == low),
            _ => None,
        });
        out.fill(found.ok_or(INVALID)?);
        Ok(())
    }

    /// [`EngineApi::find_mr`]
    fn find_mr(context: ContextHandle, low: u32, out: *mut EngineFoundMr) {
        // SAFETY: the table demands a valid pointer.
        let out = unsafe { Out::new(out) }?;
        let instance = current()?;
        let context = instance.context(context);
        let found = instance.registry().find(context, |object| match object {
            Object::Mr(mr) if instance.mr_handle(mr).0 as u32 == low => Some(mr),
            _ => None,
        });
        let mr = found.ok_or(INVALID)?;
        let (_, info) = instance.engine.query_mr(mr)?;
        let (lkey, rkey) = (info.key.0, info.key.0);
        let found = EngineMr { mr: instance.mr_handle(mr), lkey, rkey };
        out.fill(EngineFoundMr { found, length: info.len });
        Ok(())
    }
}
