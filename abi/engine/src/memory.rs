//! Protection domains, memory regions, memory windows, address handles.

use quipu_abi_types::*;
use quipu_host::Device;
use quipu_host::fault::Call;
use quipu_mem::{Access, Vouched};
use quipu_nic::WindowType;

use crate::attr;
use crate::entry::{Out, entries};
use crate::instance::{current, for_destructor};
use crate::registry::Object;
use crate::status::{Failure, INVALID, Outcome, unsupported};

/// The memory that a registration names, with the program's word for it.
fn vouched(init: &EngineMrInit, access: Access) -> Outcome<Vouched> {
    let addr = usize::try_from(init.addr).map_err(|_| INVALID)?;
    // SAFETY: the promise of `Regions::register` is the program's, by ibv_reg_mr(3): the memory
    // stays valid, for what `access` allows, until the region is deregistered. That others may
    // change it at any time is its nature, and no Rust reference to a program's memory lasts
    // beyond a call.
    Ok(unsafe { Vouched::new(addr, init.length, init.iova, access) })
}

/// The rights that a region of a device is to have. Those that have to do with what the device cannot do are
/// refused as the kernel's verbs do it, and not as numbers that mean nothing.
fn rights(bits: u32, device: Device) -> Outcome<Access> {
    if bits & IBV_ACCESS_FLUSH_PERSISTENT != 0 {
        return Err(unsupported("memory that outlives a loss of power"));
    }
    if bits & IBV_ACCESS_FLUSH_GLOBAL != 0 && device != Device::Quipu0 {
        return Err(unsupported("flushes by this device"));
    }
    Ok(Access::parse(bits)?)
}

entries! {
    /// [`EngineApi::alloc_pd`]
    fn alloc_pd(context: ContextHandle, out: *mut PdHandle) {
        // SAFETY: the table demands a valid pointer.
        let out = unsafe { Out::new(out) }?;
        let instance = current()?;
        let context = instance.context(context);
        instance.registry().context(context)?;
        let pd = instance.engine.alloc_pd()?;
        instance.registry().add(Object::Pd(pd), context, 0);
        out.fill(instance.pd_handle(pd));
        Ok(())
    }

    /// [`EngineApi::dealloc_pd`]
    fn dealloc_pd(pd: PdHandle) {
        let Some(instance) = for_destructor()? else { return Ok(()) };
        let pd = instance.pd(pd);
        instance.destroyed(instance.engine.dealloc_pd(pd).map_err(Failure::from))?;
        instance.registry().remove(Object::Pd(pd), 0);
        Ok(())
    }

    /// [`EngineApi::reg_mr`]
    fn reg_mr(pd: PdHandle, init: *const EngineMrInit, out: *mut EngineMr) {
        // SAFETY: the table demands valid pointers.
        let (out, init) = unsafe { (Out::new(out)?, init.as_ref().ok_or(INVALID)?) };
        let instance = current()?;
        let pd = instance.pd(pd);
        let (context, device) = {
            let registry = instance.registry();
            let context = registry.context_of(Object::Pd(pd))?;
            (context, registry.device(context)?)
        };
        let memory = vouched(init, rights(init.access, device)?)?;
        let region = instance.engine.reg_mr(pd, memory)?;
        let mut registry = instance.registry();
        registry.add(Object::Mr(region.id), context, 0);
        registry.set_key(Object::Mr(region.id), region.key.0);
        drop(registry);
        let (lkey, rkey) = (region.key.0, region.key.0);
        out.fill(EngineMr { mr: instance.mr_handle(region.id), lkey, rkey });
        Ok(())
    }

    /// [`EngineApi::rereg_mr`]
    fn rereg_mr(
        mr: MrHandle,
        flags: u32,
        pd: PdHandle,
        init: *const EngineMrInit,
        out: *mut EngineMr,
    ) {
        // SAFETY: the table demands valid pointers.
        let (out, init) = unsafe { (Out::new(out)?, init.as_ref().ok_or(INVALID)?) };
        if flags & !IBV_REREG_MR_FLAGS_SUPPORTED != 0 {
            return Err(INVALID);
        }
        let instance = current()?;
        let mr = instance.mr(mr);
        let changes = |flag: u32| flags & flag != 0;
        let pd = changes(IBV_REREG_MR_CHANGE_PD).then(|| instance.pd(pd));
        let device = {
            let registry = instance.registry();
            let context = registry.context_of(Object::Mr(mr))?;
            if let Some(pd) = pd {
                registry.expect(Object::Pd(pd), context)?;
            }
            registry.device(context)?
        };
        let access = changes(IBV_REREG_MR_CHANGE_ACCESS).then(|| rights(init.access, device));
        let access = access.transpose()?;
        // The rights of the new memory are those that `access` gives, or those of the old one.
        let memory = changes(IBV_REREG_MR_CHANGE_TRANSLATION)
            .then(|| vouched(init, access.unwrap_or_default()));
        let memory = memory.transpose()?;
        let region = instance.engine.rereg_mr(mr, pd, memory, access)?;
        instance.registry().set_key(Object::Mr(mr), region.key.0);
        let (lkey, rkey) = (region.key.0, region.key.0);
        out.fill(EngineMr { mr: instance.mr_handle(region.id), lkey, rkey });
        Ok(())
    }

    /// [`EngineApi::dereg_mr`]
    fn dereg_mr(mr: MrHandle) {
        let Some(instance) = for_destructor()? else { return Ok(()) };
        let mr = instance.mr(mr);
        instance.destroyed(instance.engine.dereg_mr(mr).map_err(Failure::from))?;
        instance.registry().remove(Object::Mr(mr), 0);
        Ok(())
    }

    /// [`EngineApi::alloc_mw`]
    fn alloc_mw(pd: PdHandle, mw_type: u32, out: *mut EngineMw) {
        // SAFETY: the table demands a valid pointer.
        let out = unsafe { Out::new(out) }?;
        let window = match mw_type {
            IBV_MW_TYPE_1 => WindowType::One,
            IBV_MW_TYPE_2 => WindowType::Two,
            _ => return Err(INVALID),
        };
        let instance = current()?;
        let pd = instance.pd(pd);
        let context = {
            let registry = instance.registry();
            let context = registry.context_of(Object::Pd(pd))?;
            if registry.device(context)? == Device::QuipuQp0 {
                return Err(EngineStatus::NotSupported.into());
            }
            context
        };
        let (mw, key) = instance.engine.alloc_mw(pd, window)?;
        let mut registry = instance.registry();
        registry.add(Object::Mw(mw), context, 0);
        registry.set_key(Object::Mw(mw), key.0);
        drop(registry);
        out.fill(EngineMw { mw: instance.mw_handle(mw), rkey: key.0 });
        Ok(())
    }

    /// [`EngineApi::dealloc_mw`]
    fn dealloc_mw(mw: MwHandle) {
        let Some(instance) = for_destructor()? else { return Ok(()) };
        let mw = instance.mw(mw);
        instance.destroyed(instance.engine.dealloc_mw(mw).map_err(Failure::from))?;
        instance.registry().remove(Object::Mw(mw), 0);
        Ok(())
    }

    /// [`EngineApi::create_ah`]
    fn create_ah(pd: PdHandle, attr: *const ibv_ah_attr, out: *mut AhHandle) {
        // SAFETY: the table demands valid pointers.
        let (out, attr) = unsafe { (Out::new(out)?, attr.as_ref().ok_or(INVALID)?) };
        let av = attr::address_from(attr)?;
        let instance = current()?;
        instance.engine.note_call(Call::CreateAh)?;
        let pd = instance.pd(pd);
        let context = {
            let registry = instance.registry();
            let context = registry.context_of(Object::Pd(pd))?;
            if registry.device(context)? != Device::Quipu0 {
                return Err(EngineStatus::NotSupported.into());
            }
            context
        };
        let ah = instance.engine.create_ah(pd, &av)?;
        instance.registry().add(Object::Ah(ah), context, 0);
        out.fill(instance.ah_handle(ah));
        Ok(())
    }

    /// [`EngineApi::destroy_ah`]
    fn destroy_ah(ah: AhHandle) {
        let Some(instance) = for_destructor()? else { return Ok(()) };
        instance.engine.note_call(Call::DestroyAh)?;
        let ah = instance.ah(ah);
        instance.destroyed(instance.engine.destroy_ah(ah).map_err(Failure::from))?;
        instance.registry().remove(Object::Ah(ah), 0);
        Ok(())
    }
}
