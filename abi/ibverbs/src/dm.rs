//! Device memory: memory that only the adapter and copies through this interface reach. Here it is memory of
//! the process, of which there is as much as the device says.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::ptr;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};

use libc::c_void;
use quipu_abi_trace::entry;
use quipu_abi_types::*;
use quipu_cabi::{Errno, Handle, IntErrno, Null, Tagged, Void};

use crate::context::{Context, context};
use crate::engine::check;
use crate::object::Blank;

/// All device memory of a process.
pub(crate) const MAX_DM_SIZE: usize = 4 << 20;
/// The device is reached in words of so many bytes, as those of hardware are.
const WORD: u64 = 4;
/// The largest alignment, log2: a huge page.
const MAX_LOG_ALIGN: u32 = 21;

/// Bytes of device memory that are in use.
static USED: AtomicUsize = AtomicUsize::new(0);
static NEXT_HANDLE: AtomicU32 = AtomicU32::new(1);
/// All device memory that was allocated and not freed, for imports.
static KNOWN: Mutex<Vec<Known>> = Mutex::new(Vec::new());

struct Known {
    context: ContextHandle,
    handle: u32,
    memory: Weak<DmMemory>,
}

/// Device memory, as those share it who have imported it.
pub(crate) struct DmMemory {
    /// None once the device is closed.
    block: Arc<Mutex<Option<Block>>>,
    handle: u32,
    /// Regions over it.
    pub(crate) regions: AtomicU32,
}

/// A block of device memory.
struct Block {
    base: *mut u8,
    layout: Layout,
}

// SAFETY: plain memory, reached by raw pointers only.
unsafe impl Send for Block {}

impl Block {
    fn allocate(attr: &ibv_alloc_dm_attr) -> Result<Self, Errno> {
        if attr.comp_mask != 0 || attr.length == 0 || attr.log_align_req > MAX_LOG_ALIGN {
            return Err(Errno::EINVAL);
        }
        let len = attr.length;
        let align = (1 << attr.log_align_req).max(8);
        let layout = Layout::from_size_align(len, align).map_err(|_| Errno::ENOMEM)?;
        let more = |used: usize| used.checked_add(len).filter(|sum| *sum <= MAX_DM_SIZE);
        USED.fetch_update(Ordering::AcqRel, Ordering::Acquire, more).map_err(|_| Errno::ENOMEM)?;
        // SAFETY: the layout has a size, which is not 0.
        let base = unsafe { alloc_zeroed(layout) };
        if base.is_null() {
            USED.fetch_sub(len, Ordering::AcqRel);
            return Err(Errno::ENOMEM);
        }
        Ok(Self { base, layout })
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        // SAFETY: allocated with this layout; its device is closed, or whoever reached it is gone.
        unsafe { dealloc(self.base, self.layout) };
        USED.fetch_sub(self.layout.size(), Ordering::AcqRel);
    }
}

impl DmMemory {
    fn allocate(attr: &ibv_alloc_dm_attr) -> Result<Self, Errno> {
        let block = Arc::new(Mutex::new(Some(Block::allocate(attr)?)));
        let handle = NEXT_HANDLE.fetch_add(1, Ordering::Relaxed);
        Ok(Self { block, handle, regions: AtomicU32::new(0) })
    }

    /// The address of `len` bytes at `offset`, if they lie inside.
    pub(crate) fn at(&self, offset: u64, len: usize) -> Result<*mut u8, Errno> {
        let start = usize::try_from(offset).map_err(|_| Errno::EINVAL)?;
        let block = self.block.lock().unwrap_or_else(PoisonError::into_inner);
        let block = block.as_ref().ok_or(Errno::EINVAL)?;
        let room = block.layout.size().checked_sub(start).ok_or(Errno::EINVAL)?;
        if len > room {
            return Err(Errno::EINVAL);
        }
        Ok(block.base.wrapping_add(start))
    }

    /// As [`DmMemory::at`], for a copy: in whole words.
    fn words(&self, offset: u64, len: usize) -> Result<*mut u8, Errno> {
        if !offset.is_multiple_of(WORD) || !(len as u64).is_multiple_of(WORD) {
            return Err(Errno::EINVAL);
        }
        self.at(offset, len)
    }
}

/// The private part of device memory.
pub(crate) struct DmState(pub(crate) Arc<DmMemory>, &'static EngineApi);

impl Tagged for DmState {
    const TAG: u64 = 0x5155_4950_0000_444d;
}

pub(crate) type Dm = Handle<ibv_dm, DmState>;

fn create(raw: *mut ibv_context, api: &'static EngineApi, memory: Arc<DmMemory>) -> *mut ibv_dm {
    let mut public = ibv_dm::blank();
    public.context = raw;
    public.memcpy_to_dm = Some(memcpy_to_dm);
    public.memcpy_from_dm = Some(memcpy_from_dm);
    public.handle = memory.handle;
    Dm::create(public, DmState(memory, api))
}

/// Finds memory of a context by the number in its handle.
fn find(context: &Context, handle: u32) -> Result<Arc<DmMemory>, Errno> {
    let known = KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
    let mut known = known.iter();
    let found = known.find(|known| known.handle == handle && known.context == context.handle);
    found.and_then(|known| known.memory.upgrade()).ok_or(Errno::EINVAL)
}

entry! {
    /// `ibv_alloc_dm(3)`
    fn alloc_dm(raw: *mut ibv_context, attr: *mut ibv_alloc_dm_attr) -> Null<ibv_dm> {
        // SAFETY: the program passes a context, and null or a valid pointer.
        let (context, attr) = unsafe { (context(raw)?, attr.as_ref().ok_or(Errno::EINVAL)?) };
        // SAFETY: it takes a number.
        check(unsafe { (context.api.note_call)(EngineCall::AllocDm as u32) })?;
        let memory = Arc::new(DmMemory::allocate(attr)?);
        context.opened.gives_back(&memory.block);
        let mut known = KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
        known.retain(|known| known.memory.strong_count() > 0);
        let (handle, weak) = (memory.handle, Arc::downgrade(&memory));
        known.push(Known { context: context.handle, handle, memory: weak });
        drop(known);
        Ok(create(raw, context.api, memory))
    }

    /// `ibv_free_dm(3)`: EBUSY while there are regions over it.
    fn free_dm(raw: *mut ibv_dm) -> IntErrno {
        // SAFETY: the program passes device memory and uses it no more.
        unsafe {
            let dm = Dm::get(raw)?;
            if dm.0.regions.load(Ordering::Acquire) != 0 {
                return Err(Errno::EBUSY);
            }
            check((dm.1.note_call)(EngineCall::FreeDm as u32))?;
            let handle = dm.0.handle;
            let mut known = KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
            known.retain(|known| known.handle != handle);
            drop(known);
            drop(Dm::take(raw)?);
        }
        Ok(())
    }

    /// `ibv_memcpy_to_dm(3)`: offset and length are multiples of 4.
    fn memcpy_to_dm(
        raw: *mut ibv_dm,
        offset: u64,
        from: *const c_void,
        length: usize,
    ) -> IntErrno {
        // SAFETY: the program passes device memory.
        let to = unsafe { Dm::get(raw) }?.0.words(offset, length)?;
        // SAFETY: `words` has checked the one side; the program says that `from` is readable for
        // `length` bytes. It may be device memory as well, if the program is odd.
        unsafe { ptr::copy(from.cast::<u8>(), to, length) };
        Ok(())
    }

    /// `ibv_memcpy_from_dm(3)`: offset and length are multiples of 4.
    fn memcpy_from_dm(
        to: *mut c_void,
        raw: *mut ibv_dm,
        offset: u64,
        length: usize,
    ) -> IntErrno {
        // SAFETY: the program passes device memory.
        let from = unsafe { Dm::get(raw) }?.0.words(offset, length)?;
        // SAFETY: as in `memcpy_to_dm`, with `to` writable.
        unsafe { ptr::copy(from, to.cast::<u8>(), length) };
        Ok(())
    }

    /// `ibv_import_dm(3)`: within a process.
    fn ibv_import_dm(raw: *mut ibv_context, handle: u32) -> Null<ibv_dm> {
        // SAFETY: the program passes a context.
        let context = unsafe { context(raw) }?;
        let memory = find(context, handle)?;
        Ok(create(raw, context.api, memory))
    }

    /// `ibv_unimport_dm(3)`
    fn ibv_unimport_dm(raw: *mut ibv_dm) -> Void {
        // SAFETY: the program passes device memory that it imported, and uses it no more.
        drop(unsafe { Dm::take(raw) }?);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn attr(length: usize, log_align_req: u32, comp_mask: u32) -> ibv_alloc_dm_attr {
        ibv_alloc_dm_attr { length, log_align_req, comp_mask }
    }

    #[test]
    fn blocks_are_aligned_bounded_and_counted() {
        for (length, align, mask) in [(0, 0, 0), (64, 0, 1), (64, 22, 0)] {
            let refused = DmMemory::allocate(&attr(length, align, mask)).err();
            assert_eq!(refused, Some(Errno::EINVAL));
        }
        let too_large = DmMemory::allocate(&attr(MAX_DM_SIZE + 1, 0, 0)).err();
        assert_eq!(too_large, Some(Errno::ENOMEM));
        let block = DmMemory::allocate(&attr(100, 12, 0)).unwrap();
        assert_eq!(block.at(0, 100).unwrap() as usize % 4096, 0);
        assert!(block.words(96, 4).is_ok() && block.words(100, 0).is_ok());
        for (offset, length) in [(3, 4), (4, 3), (100, 4), (0, 104), (u64::MAX - 3, 4)] {
            assert_eq!(block.words(offset, length).err(), Some(Errno::EINVAL), "{offset} {length}");
        }
        assert!(block.at(99, 1).is_ok() && block.at(99, 2).is_err());
    }
}
