//! Protection domains, and the parent and thread domains that decorate them.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use quipu_abi_trace::entry;
use quipu_abi_types::*;
use quipu_cabi::{Errno, Handle, IntErrno, Null, Tagged};

use crate::context::context;
use crate::engine::check;
use crate::object::Blank;

/// The private part of a protection domain.
pub(crate) struct PdState {
    pub(crate) api: &'static EngineApi,
    /// The engine's domain; a parent domain has that of the domain it decorates.
    pub(crate) handle: PdHandle,
    /// What a parent domain decorates, and with which thread domain; null otherwise.
    decorates: *mut ibv_pd,
    thread: *mut ibv_td,
    /// How many parent domains decorate this one, which may not be freed before them.
    parents: AtomicU32,
    /// Where objects made through this parent domain count themselves; the engine counts the
    /// objects of the real domain.
    uses: Arc<AtomicU32>,
}

/// An object's place in the count of its domain, for its life. It outlives the domain's own structure, which
/// a program may give up before those of its objects when both were imported.
pub(crate) struct Member(Arc<AtomicU32>);

impl Drop for Member {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }
}

impl Tagged for PdState {
    const TAG: u64 = 0x5155_4950_0000_5044;
}

/// A protection domain or a parent domain.
pub(crate) type Pd = Handle<ibv_pd, PdState>;

/// The private part of a thread domain: how many parent domains use it.
pub(crate) struct TdState(AtomicU32, &'static EngineApi);

impl Tagged for TdState {
    const TAG: u64 = 0x5155_4950_0000_5444;
}

/// A thread domain: a promise of the program that it needs no locking, which nothing makes use of.
type Td = Handle<ibv_td, TdState>;

/// Finds the domain behind a pointer of the program.
///
/// # Safety
///
/// As [`Handle::get`].
pub(crate) unsafe fn pd<'a>(raw: *const ibv_pd) -> Result<&'a Pd, Errno> {
    // SAFETY: passed on from the caller.
    unsafe { Pd::get(raw) }
}

impl PdState {
    /// Counts an object as made through this domain.
    pub(crate) fn enter(&self) -> Member {
        self.uses.fetch_add(1, Ordering::AcqRel);
        Member(Arc::clone(&self.uses))
    }
}

fn create(context: *mut ibv_context, state: PdState) -> *mut ibv_pd {
    let mut public = ibv_pd::blank();
    public.context = context;
    public.handle = state.handle.0 as u32;
    Pd::create(public, state)
}

/// A domain that decorates no other.
pub(crate) fn create_plain(
    context: *mut ibv_context,
    api: &'static EngineApi,
    handle: PdHandle,
) -> *mut ibv_pd {
    let none = std::ptr::null_mut();
    let (parents, uses) = (AtomicU32::new(0), Arc::default());
    create(context, PdState { api, handle, decorates: none, thread: none.cast(), parents, uses })
}

entry! {
    /// `ibv_alloc_pd(3)`
    fn ibv_alloc_pd(raw: *mut ibv_context) -> Null<ibv_pd> {
        // SAFETY: the program passes a context.
        let context = unsafe { context(raw) }?;
        let mut handle = PdHandle::NONE;
        // SAFETY: `handle` is valid for the call.
        check(unsafe { (context.api.alloc_pd)(context.handle, &mut handle) })?;
        Ok(create_plain(raw, context.api, handle))
    }

    /// `ibv_dealloc_pd(3)`, of parent domains too.
    fn ibv_dealloc_pd(raw: *mut ibv_pd) -> IntErrno {
        // SAFETY: the program passes a domain and uses it no more.
        let pd = unsafe { pd(raw) }?;
        if pd.parents.load(Ordering::Acquire) != 0 || pd.uses.load(Ordering::Acquire) != 0 {
            return Err(Errno::EBUSY);
        }
        if pd.decorates.is_null() {
            // SAFETY: the handle came from the engine.
            check(unsafe { (pd.api.dealloc_pd)(pd.handle) })?;
        } else {
            // SAFETY: both are kept alive by the counts that are taken back here.
            unsafe {
                Pd::get(pd.decorates)?.parents.fetch_sub(1, Ordering::AcqRel);
                if !pd.thread.is_null() {
                    Td::get(pd.thread)?.0.fetch_sub(1, Ordering::AcqRel);
                }
            }
        }
        // SAFETY: the program uses it no more.
        drop(unsafe { Pd::take(raw) }?);
        Ok(())
    }

    /// `ibv_alloc_td(3)`
    fn alloc_td(raw: *mut ibv_context, attr: *mut ibv_td_init_attr) -> Null<ibv_td> {
        // SAFETY: the program passes a context, and null or a valid pointer.
        let (context, attr) = unsafe { (context(raw)?, attr.as_ref().ok_or(Errno::EINVAL)?) };
        if attr.comp_mask != 0 {
            return Err(Errno::EOPNOTSUPP);
        }
        // SAFETY: it takes a number.
        check(unsafe { (context.api.note_call)(EngineCall::AllocTd as u32) })?;
        let mut public = ibv_td::blank();
        public.context = raw;
        Ok(Td::create(public, TdState(AtomicU32::new(0), context.api)))
    }

    /// `ibv_dealloc_td(3)`
    fn dealloc_td(raw: *mut ibv_td) -> IntErrno {
        // SAFETY: the program passes a thread domain and uses it no more.
        unsafe {
            let thread = Td::get(raw)?;
            if thread.0.load(Ordering::Acquire) != 0 {
                return Err(Errno::EBUSY);
            }
            check((thread.1.note_call)(EngineCall::DeallocTd as u32))?;
            drop(Td::take(raw)?);
        }
        Ok(())
    }

    /// `ibv_alloc_parent_domain(3)`. Allocators of the program's own are taken and not called: what
    /// a provider allocates by them are queues that its device reads, and here no device does.
    fn alloc_parent_domain(
        raw: *mut ibv_context,
        attr: *mut ibv_parent_domain_init_attr,
    ) -> Null<ibv_pd> {
        // SAFETY: the program passes a context, and null or a valid pointer.
        let (context, attr) = unsafe { (context(raw)?, attr.as_ref().ok_or(Errno::EINVAL)?) };
        // SAFETY: the program passes a domain.
        let pd = unsafe { pd(attr.pd) }?;
        // SAFETY: the public part lives as long as the domain; the program passes null or a thread domain.
        let strange = unsafe {
            let of_another = |thread: &ibv_td| thread.context != raw;
            (*attr.pd).context != raw || attr.td.as_ref().is_some_and(of_another)
        };
        if !pd.decorates.is_null() || strange {
            return Err(Errno::EINVAL);
        }
        let allocators = attr.comp_mask & IBV_PARENT_DOMAIN_INIT_ATTR_ALLOCATORS != 0;
        let known = IBV_PARENT_DOMAIN_INIT_ATTR_PD_CONTEXT | IBV_PARENT_DOMAIN_INIT_ATTR_ALLOCATORS;
        if attr.comp_mask & !known != 0 {
            return Err(Errno::EOPNOTSUPP);
        }
        if allocators && (attr.alloc.is_none() || attr.free.is_none()) {
            return Err(Errno::EINVAL);
        }
        // SAFETY: it takes a number.
        check(unsafe { (context.api.note_call)(EngineCall::AllocParentDomain as u32) })?;
        if !attr.td.is_null() {
            // SAFETY: the program passes null or a thread domain.
            unsafe { Td::get(attr.td) }?.0.fetch_add(1, Ordering::AcqRel);
        }
        pd.parents.fetch_add(1, Ordering::AcqRel);
        let state = PdState {
            api: context.api,
            handle: pd.handle,
            decorates: attr.pd,
            thread: attr.td,
            parents: AtomicU32::new(0),
            uses: Arc::default(),
        };
        Ok(create(raw, state))
    }
}
