//! Memory regions and memory windows.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError};

use libc::{c_int, c_uint, c_void};
use quipu_abi_trace::entry;
use quipu_abi_types::*;
use quipu_cabi::{CReturn, Errno, Handle, IntErrno, Null, Tagged};

use crate::buf::Buf;
use crate::context::context;
use crate::dm::{Dm, DmMemory};
use crate::engine::check;
use crate::mapping::{Mapping, PAGE_OFFSET};
use crate::object::Blank;
use crate::pd::{Member, Pd, pd};

/// The rights that a region over a file may have (`ibv_reg_dmabuf_mr(3)`).
const IBV_DMABUF_ACCESS: u32 = IBV_ACCESS_LOCAL_WRITE
    | IBV_ACCESS_REMOTE_WRITE
    | IBV_ACCESS_REMOTE_READ
    | IBV_ACCESS_REMOTE_ATOMIC
    | IBV_ACCESS_RELAXED_ORDERING;

/// The private part of a memory region.
pub(crate) struct MrState {
    api: &'static EngineApi,
    handle: MrHandle,
    /// Its place in its domain; changed by `ibv_rereg_mr`.
    member: Mutex<Member>,
    /// Kept for the life of the region, and then given back.
    backing: Backing,
}

/// What stands behind a region.
pub(crate) enum Backing {
    /// Memory of the program.
    Program,
    /// Nothing at all: a null region.
    Nothing,
    /// The region that this one was imported from.
    Another,
    Device {
        _share: DmShare,
    },
    File {
        _mapping: Arc<Mutex<Option<Mapping>>>,
    },
    Buffer {
        _memory: Arc<Mapping>,
    },
}

impl Backing {
    /// Whether the region may become another (`ibv_rereg_mr(3)`), as in libibverbs.
    fn may_change(&self) -> bool {
        !matches!(self, Self::Nothing | Self::Another | Self::File { .. })
    }
}

/// Device memory that a region keeps from being freed.
pub(crate) struct DmShare(Arc<DmMemory>);

impl DmShare {
    fn new(memory: &Arc<DmMemory>) -> Self {
        memory.regions.fetch_add(1, Ordering::AcqRel);
        Self(Arc::clone(memory))
    }
}

impl Drop for DmShare {
    fn drop(&mut self) {
        self.0.regions.fetch_sub(1, Ordering::AcqRel);
    }
}

impl Tagged for MrState {
    const TAG: u64 = 0x5155_4950_0000_4d52;
}

pub(crate) type Mr = Handle<ibv_mr, MrState>;

/// The private part of a memory window.
pub(crate) struct MwState {
    api: &'static EngineApi,
    handle: MwHandle,
    _member: Member,
}

impl Tagged for MwState {
    const TAG: u64 = 0x5155_4950_0000_4d57;
}

/// A memory window.
pub(crate) type Mw = Handle<ibv_mw, MwState>;

/// What `ibv_rereg_mr` returns: 0 or one of `IBV_REREG_MR_ERR_*`, with `errno` set.
pub struct Rereg;

impl CReturn for Rereg {
    type Value = c_int;
    type Raw = c_int;
    fn success(outcome: c_int) -> c_int {
        outcome
    }
    /// Only a panic gets here: nobody knows what the region is now.
    fn failure(errno: Errno) -> c_int {
        errno.set();
        IBV_REREG_MR_ERR_CMD
    }
}

/// Registers memory. `iova` is what work requests call the first byte.
pub(crate) fn register(
    pd: &Pd,
    (addr, length): (*mut c_void, usize),
    iova: u64,
    access: u32,
    backing: Backing,
) -> Result<*mut ibv_mr, Errno> {
    let region = Wanted { addr, length, init: init(addr, length, iova, access) };
    create(pd, &region, backing)
}

/// A region to be made: how the program sees it, and what the engine registers.
struct Wanted {
    addr: *mut c_void,
    length: usize,
    init: EngineMrInit,
}

fn create(pd: &Pd, wanted: &Wanted, backing: Backing) -> Result<*mut ibv_mr, Errno> {
    let mut made = EngineMr { mr: MrHandle::NONE, lkey: 0, rkey: 0 };
    // SAFETY: both structures are valid for the call.
    check(unsafe { (pd.api.reg_mr)(pd.handle, &wanted.init, &mut made) })?;
    Ok(adopt(pd, &made, wanted.addr, wanted.length, backing))
}

/// Makes the object for a region that the engine knows.
pub(crate) fn adopt(
    pd: &Pd,
    made: &EngineMr,
    addr: *mut c_void,
    length: usize,
    backing: Backing,
) -> *mut ibv_mr {
    let mut public = ibv_mr::blank();
    // SAFETY: a live object of the program.
    public.context = unsafe { (*pd.public()).context };
    public.pd = pd.public();
    public.addr = addr;
    public.length = length;
    public.handle = made.mr.0 as u32;
    public.lkey = made.lkey;
    public.rkey = made.rkey;
    let member = Mutex::new(pd.enter());
    let state = MrState { api: pd.api, handle: made.mr, member, backing };
    Mr::create(public, state)
}

/// Registers `length` bytes at `offset` of a file that can be mapped, as those of udmabuf can.
fn register_file(
    pd: &Pd,
    (fd, offset): (c_int, u64),
    length: usize,
    iova: u64,
    access: u32,
) -> Result<*mut ibv_mr, Errno> {
    // What the pages of the file are called must leave their bytes where they are in them.
    if access & !IBV_DMABUF_ACCESS != 0 || (iova ^ offset) & PAGE_OFFSET != 0 {
        return Err(Errno::EINVAL);
    }
    let mapping = Mapping::new(fd, offset, length, access & IBV_ACCESS_LOCAL_WRITE != 0)?;
    let init = EngineMrInit { addr: mapping.addr(), length: length as u64, iova, access };
    // As libibverbs has it: a file has no address.
    let addr = std::ptr::without_provenance_mut(offset as usize);
    let mapping = Arc::new(Mutex::new(Some(mapping)));
    let backing = Backing::File { _mapping: Arc::clone(&mapping) };
    let region = create(pd, &Wanted { addr, length, init }, backing)?;
    // SAFETY: the context of a domain lives as long as the domain.
    unsafe { context((*pd.public()).context) }?.opened.gives_back(&mapping);
    Ok(region)
}

fn init(addr: *mut c_void, length: usize, iova: u64, access: u32) -> EngineMrInit {
    let iova = if access & IBV_ACCESS_ZERO_BASED != 0 { 0 } else { iova };
    EngineMrInit { addr: addr as u64, length: length as u64, iova, access }
}

entry! {
    /// `ibv_reg_mr(3)`
    fn ibv_reg_mr(
        raw: *mut ibv_pd,
        addr: *mut c_void,
        length: usize,
        access: c_int,
    ) -> Null<ibv_mr> {
        // SAFETY: the program passes a domain.
        let pd = unsafe { pd(raw) }?;
        register(pd, (addr, length), addr as u64, access as u32, Backing::Program)
    }

    /// `ibv_reg_mr_iova(3)`
    fn ibv_reg_mr_iova(
        raw: *mut ibv_pd,
        addr: *mut c_void,
        length: usize,
        iova: u64,
        access: c_int,
    ) -> Null<ibv_mr> {
        // SAFETY: the program passes a domain.
        let pd = unsafe { pd(raw) }?;
        register(pd, (addr, length), iova, access as u32, Backing::Program)
    }

    /// `ibv_reg_mr_iova2(3)`: the form that takes optional access flags, which are ignored where
    /// they mean nothing here.
    fn ibv_reg_mr_iova2(
        raw: *mut ibv_pd,
        addr: *mut c_void,
        length: usize,
        iova: u64,
        access: c_uint,
    ) -> Null<ibv_mr> {
        // SAFETY: the program passes a domain.
        register(unsafe { pd(raw) }?, (addr, length), iova, access, Backing::Program)
    }

    /// `ibv_reg_mr_ex(3)`: of memory at an address, in a buffer or not, or of a file; DMA handles are not
    /// supported.
    fn ibv_reg_mr_ex(raw: *mut ibv_pd, attr: *mut ibv_mr_init_attr) -> Null<ibv_mr> {
        // SAFETY: the program passes a domain, and null or a valid pointer.
        let (pd, attr) = unsafe { (pd(raw)?, attr.as_ref().ok_or(Errno::EINVAL)?) };
        let known = IBV_REG_MR_MASK_IOVA
            | IBV_REG_MR_MASK_ADDR
            | IBV_REG_MR_MASK_FD
            | IBV_REG_MR_MASK_FD_OFFSET
            | IBV_REG_MR_MASK_BUF;
        if attr.comp_mask & !known != 0 {
            return Err(Errno::EOPNOTSUPP);
        }
        let has = |bit: u64| attr.comp_mask & bit != 0;
        let access = attr.access as u32;
        let mut backing = Backing::Program;
        if has(IBV_REG_MR_MASK_BUF) {
            if !has(IBV_REG_MR_MASK_ADDR) || has(IBV_REG_MR_MASK_FD_OFFSET) {
                return Err(Errno::EINVAL);
            }
            // SAFETY: the program passes a buffer.
            backing = unsafe { Buf::get(attr.buf) }?.share(pd, attr.addr, attr.length)?;
        }
        match (has(IBV_REG_MR_MASK_ADDR), has(IBV_REG_MR_MASK_FD)) {
            (true, false) => {
                let iova = if has(IBV_REG_MR_MASK_IOVA) { attr.iova } else { attr.addr as u64 };
                register(pd, (attr.addr, attr.length), iova, access, backing)
            }
            (false, true) => {
                let offset = if has(IBV_REG_MR_MASK_FD_OFFSET) { attr.fd_offset } else { 0 };
                let iova = if has(IBV_REG_MR_MASK_IOVA) { attr.iova } else { offset };
                register_file(pd, (attr.fd, offset), attr.length, iova, access)
            }
            _ => Err(Errno::EINVAL),
        }
    }

    /// `ibv_reg_dmabuf_mr(3)`: of what can be mapped into the process.
    fn ibv_reg_dmabuf_mr(
        raw: *mut ibv_pd,
        offset: u64,
        length: usize,
        iova: u64,
        fd: c_int,
        access: c_int,
    ) -> Null<ibv_mr> {
        // SAFETY: the program passes a domain.
        register_file(unsafe { pd(raw) }?, (fd, offset), length, iova, access as u32)
    }

    /// `ibv_alloc_null_mr(3)`
    fn alloc_null_mr(raw: *mut ibv_pd) -> Null<ibv_mr> {
        // SAFETY: the program passes a domain.
        let pd = unsafe { pd(raw) }?;
        let mut made = EngineMr { mr: MrHandle::NONE, lkey: 0, rkey: 0 };
        // SAFETY: `made` is valid for the call.
        check(unsafe { (pd.api.alloc_null_mr)(pd.handle, &mut made) })?;
        Ok(adopt(pd, &made, std::ptr::null_mut(), usize::MAX, Backing::Nothing))
    }

    /// `ibv_reg_dm_mr(3)`: zero based, as the manual page demands.
    fn reg_dm_mr(
        raw: *mut ibv_pd,
        dm: *mut ibv_dm,
        offset: u64,
        length: usize,
        access: c_uint,
    ) -> Null<ibv_mr> {
        // SAFETY: the program passes a domain and device memory.
        let (pd, dm) = unsafe { (pd(raw)?, Dm::get(dm)?) };
        if access & IBV_ACCESS_ZERO_BASED == 0 {
            return Err(Errno::EINVAL);
        }
        let at = dm.0.at(offset, length)?;
        let init = EngineMrInit { addr: at as u64, length: length as u64, iova: 0, access };
        let share = DmShare::new(&dm.0);
        let wanted = Wanted { addr: std::ptr::null_mut(), length, init };
        create(pd, &wanted, Backing::Device { _share: share })
    }

    /// `ibv_advise_mr(3)`
    fn advise_mr(
        raw: *mut ibv_pd,
        advice: u32,
        flags: u32,
        list: *mut ibv_sge,
        count: u32,
    ) -> IntErrno {
        // SAFETY: the program passes a domain, and a list of `count` elements.
        unsafe {
            let pd = pd(raw)?;
            check((pd.api.advise_mr)(pd.handle, advice, flags, list, count))
        }
    }

    /// `ibv_rereg_mr(3)`: 0, or one of `IBV_REREG_MR_ERR_*` with `errno` set. On failure the region
    /// is as it was, so every failure is an input error.
    fn ibv_rereg_mr(
        raw: *mut ibv_mr,
        flags: c_int,
        new_pd: *mut ibv_pd,
        addr: *mut c_void,
        length: usize,
        access: c_int,
    ) -> Rereg {
        // SAFETY: the program passes a region, and a domain if the flags say so.
        let done = unsafe { rereg(raw, flags as u32, new_pd, (addr, length), access as u32) };
        Ok(match done {
            Ok(()) => 0,
            Err(errno) => {
                errno.set();
                IBV_REREG_MR_ERR_INPUT
            }
        })
    }

    /// `ibv_dereg_mr(3)`
    fn ibv_dereg_mr(raw: *mut ibv_mr) -> IntErrno {
        // SAFETY: the program passes a region and uses it no more; its domain outlives it.
        unsafe {
            let mr = Mr::get(raw)?;
            check((mr.api.dereg_mr)(mr.handle))?;
            drop(Mr::take(raw)?);
        }
        Ok(())
    }

    /// `ibv_alloc_mw(3)`
    fn alloc_mw(raw: *mut ibv_pd, kind: u32) -> Null<ibv_mw> {
        // SAFETY: the program passes a domain.
        let pd = unsafe { pd(raw) }?;
        let mut made = EngineMw { mw: MwHandle::NONE, rkey: 0 };
        // SAFETY: `made` is valid for the call.
        check(unsafe { (pd.api.alloc_mw)(pd.handle, kind, &mut made) })?;
        let mut public = ibv_mw::blank();
        // SAFETY: a live object of the program.
        public.context = unsafe { (*raw).context };
        public.pd = raw;
        public.rkey = made.rkey;
        public.handle = made.mw.0 as u32;
        public.r#type = kind;
        Ok(Mw::create(public, MwState { api: pd.api, handle: made.mw, _member: pd.enter() }))
    }

    /// `ibv_dealloc_mw(3)`
    fn dealloc_mw(raw: *mut ibv_mw) -> IntErrno {
        // SAFETY: the program passes a window and uses it no more; its domain outlives it.
        unsafe {
            let mw = Mw::get(raw)?;
            check((mw.api.dealloc_mw)(mw.handle))?;
            drop(Mw::take(raw)?);
        }
        Ok(())
    }
}

/// # Safety
///
/// `raw` is a region of the program; `new_pd` is a domain if the flags name one.
unsafe fn rereg(
    raw: *mut ibv_mr,
    flags: u32,
    new_pd: *mut ibv_pd,
    (addr, length): (*mut c_void, usize),
    access: u32,
) -> Result<(), Errno> {
    // SAFETY: passed on from the caller.
    let mr = unsafe { Mr::get(raw) }?;
    let changes = |flag: u32| flags & flag != 0;
    if !mr.backing.may_change() || flags == 0 || flags & !IBV_REREG_MR_FLAGS_SUPPORTED != 0 {
        return Err(Errno::EINVAL);
    }
    if access != 0 && !changes(IBV_REREG_MR_CHANGE_ACCESS) {
        return Err(Errno::EINVAL);
    }
    if changes(IBV_REREG_MR_CHANGE_TRANSLATION) && (addr.is_null() || length == 0) {
        return Err(Errno::EINVAL);
    }
    // SAFETY: the program passes a domain if the flags say so.
    let new = changes(IBV_REREG_MR_CHANGE_PD).then(|| unsafe { pd(new_pd) }).transpose()?;
    let new_handle = new.map_or(PdHandle::NONE, |new| new.handle);
    let init = init(addr, length, addr as u64, access);
    let mut made = EngineMr { mr: mr.handle, lkey: 0, rkey: 0 };
    // SAFETY: both structures are valid for the call.
    check(unsafe { (mr.api.rereg_mr)(mr.handle, flags, new_handle, &init, &mut made) })?;
    let public = mr.public();
    // SAFETY: the public part lives as long as the region; the caller does not use it meanwhile.
    unsafe {
        if let Some(new) = new {
            *mr.member.lock().unwrap_or_else(PoisonError::into_inner) = new.enter();
            (*public).pd = new.public();
        }
        if changes(IBV_REREG_MR_CHANGE_TRANSLATION) {
            (*public).addr = addr;
            (*public).length = length;
        }
        (*public).lkey = made.lkey;
        (*public).rkey = made.rkey;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_in_a_reregistration_is_no_success() {
        assert_eq!(
            quipu_cabi::wall::<Rereg>("rereg", || panic!("on purpose")),
            IBV_REREG_MR_ERR_CMD
        );
        assert_eq!(Errno::last(), Errno::EIO);
        assert_eq!(quipu_cabi::wall::<Rereg>("rereg", || Ok(0)), 0);
    }
}
