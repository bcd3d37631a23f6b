//! Allocated memory, and registered memory.

use std::sync::Arc;

use libc::c_void;
use quipu_cabi::{Errno, Handle, IntMinusOne, Null, Plain, Tagged, entry};
use quipu_host::EngineError;
use quipu_host::nic::MrId;
use quipu_mem::{Access, Segment, Vouched};

use crate::adapter::{Adapter, Opaque, adapter, lock, qpip_adapter};
use crate::error::{fail, no_object, refused};

/// `qpip_memory`
pub type qpip_memory = Opaque;

struct Private {
    adapter: Arc<Adapter>,
    id: MrId,
    key: u32,
    /// What of it is allocated memory, which stays that even if it is freed first.
    _lent: Vec<Segment>,
}

impl Tagged for Private {
    const TAG: u64 = 0x7170_6970_6d65_6d6f;
}

type Memory = Handle<Opaque, Private>;

/// Shares of the allocated memory that has a byte in a range.
fn lent(adapter: &Adapter, start: usize, length: usize) -> Vec<Segment> {
    let allocated = lock(&adapter.allocated);
    // From the last on: they do not overlap, so the first that ends too early is the end of the search.
    let before = allocated.range(..start.saturating_add(length)).rev();
    let within = before.take_while(|&(at, memory)| at + memory.len() > start);
    within.map(|(_, memory)| memory.clone()).collect()
}

entry! {
    /// `qpip_allocate`
    fn qpip_allocate(raw: *mut qpip_adapter, length: usize) -> Null<c_void> {
        // SAFETY: the program passes what qpip_open gave.
        let adapter = unsafe { adapter(raw) }?;
        // One byte at least, so that no two have the same address.
        let memory = adapter.engine.allocate(length.max(1));
        let memory = memory.map_err(refused("the memory cannot be allocated"))?;
        let start = memory.addr();
        lock(&adapter.allocated).insert(start, memory);
        Ok(std::ptr::with_exposed_provenance_mut(start))
    }

    /// `qpip_free`
    fn qpip_free(raw: *mut qpip_adapter, start: *mut c_void) -> IntMinusOne {
        // SAFETY: as above.
        let adapter = unsafe { adapter(raw) }?;
        match lock(&adapter.allocated).remove(&start.addr()) {
            Some(_) => Ok(0),
            None => Err(fail(Errno::EINVAL, "this adapter allocated no memory at that address")),
        }
    }

    /// `qpip_register`
    fn qpip_register(
        raw: *mut qpip_adapter,
        start: *mut c_void,
        length: usize,
    ) -> Null<qpip_memory> {
        // SAFETY: the program passes what qpip_open gave.
        let adapter = unsafe { adapter(raw) }?;
        let addr = start as usize;
        let lent = lent(&adapter, addr, length);
        let register = |access| {
            // SAFETY: the promise of `Regions::register` is the program's, by qpip(7): the memory stays
            // mapped, for what `access` allows, until it is deregistered. No Rust reference to it lasts
            // beyond a call.
            let memory = unsafe { Vouched::new(addr, length as u64, addr as u64, access) };
            adapter.engine.reg_mr(adapter.pd, memory)
        };
        // What cannot be written can still be sent.
        let region = match register(Access::LOCAL_WRITE) {
            Err(EngineError::BadAddress) => register(Access::empty()),
            registered => registered,
        };
        let region = region.map_err(refused("the memory cannot be registered"))?;
        let (id, key) = (region.id, region.key.0);
        Ok(Memory::create(Opaque::new(), Private { adapter, id, key, _lent: lent }))
    }

    /// `qpip_key`
    fn qpip_key(raw: *const qpip_memory) -> Plain<u32> {
        // SAFETY: the program passes what qpip_register gave.
        Ok(unsafe { Memory::get(raw) }.map_err(no_object("memory"))?.key)
    }

    /// `qpip_deregister`
    fn qpip_deregister(raw: *mut qpip_memory) -> IntMinusOne {
        // SAFETY: as above.
        let memory = unsafe { Memory::get(raw) }.map_err(no_object("memory"))?;
        memory.adapter.engine.dereg_mr(memory.id).map_err(refused("the memory cannot be deregistered"))?;
        // SAFETY: as above; that nobody uses it any more is the program's to see to.
        drop(unsafe { Memory::take(raw) });
        Ok(0)
    }
}
