//! Buffers that the adapter allocates for a program (`ibv_alloc_buf(3)`, rdma-core 65). Providers choose
//! memory that their hardware reaches best; here that is memory of the process like any other.

use std::sync::Arc;

use libc::{c_int, c_void};
use quipu_abi_trace::entry;
use quipu_abi_types::*;
use quipu_cabi::{Errno, Handle, IntMinusOne, Null, Tagged, Void};

use crate::mapping::Mapping;
use crate::mr::{Backing, register};
use crate::object::Blank;
use crate::pd::{Pd, pd};

/// The private part of a buffer.
pub(crate) struct BufState {
    /// Regions keep it, too: cards pin what is registered, and no peer reaches what is mapped there next.
    memory: Arc<Mapping>,
    length: usize,
    /// The domain that it was allocated for, by its address. It is not kept alive: programs give both up in
    /// either order.
    pd: usize,
}

impl Tagged for BufState {
    const TAG: u64 = 0x5155_4950_0000_4246;
}

/// A buffer.
pub(crate) type Buf = Handle<ibv_buf, BufState>;

impl BufState {
    /// Checks that `length` bytes at `addr` may be registered in a domain as bytes of this buffer; what is to
    /// stand behind the region then.
    ///
    /// # Errors
    ///
    /// EINVAL if they do not lie inside, or the domain is another.
    pub(crate) fn share(
        &self,
        pd: &Pd,
        addr: *mut c_void,
        length: usize,
    ) -> Result<Backing, Errno> {
        let offset = (addr as u64).checked_sub(self.memory.addr());
        let room = offset.and_then(|offset| (self.length as u64).checked_sub(offset));
        let fits = room.is_some_and(|room| length as u64 <= room);
        if !fits || pd.public() as usize != self.pd {
            return Err(Errno::EINVAL);
        }
        Ok(Backing::Buffer { _memory: Arc::clone(&self.memory) })
    }
}

entry! {
    /// `ibv_alloc_buf(3)`: whole pages, all zero.
    fn ibv_alloc_buf(raw: *mut ibv_pd, size: usize, out: *mut *mut ibv_buf) -> Null<c_void> {
        // SAFETY: the program passes a domain, and null or a valid pointer.
        let (pd, out) = unsafe { (pd(raw)?, out.as_mut().ok_or(Errno::EINVAL)?) };
        let memory = Arc::new(Mapping::anonymous(size)?);
        let base = std::ptr::with_exposed_provenance_mut(memory.addr() as usize);
        let state = BufState { memory, length: size, pd: pd.public() as usize };
        *out = Buf::create(ibv_buf::blank(), state);
        Ok(base)
    }

    /// `ibv_free_buf(3)`
    fn ibv_free_buf(raw: *mut ibv_buf) -> Void {
        // SAFETY: the program passes a buffer, and uses it and its memory no more.
        drop(unsafe { Buf::take(raw) }?);
        Ok(())
    }

    /// `ibv_reg_buf_mr(3)`: a part of a buffer, in the domain that it was allocated for.
    fn ibv_reg_buf_mr(
        raw: *mut ibv_pd,
        buf: *mut ibv_buf,
        addr: *mut c_void,
        length: usize,
        access: c_int,
    ) -> Null<ibv_mr> {
        // SAFETY: the program passes a domain and a buffer.
        let (pd, buf) = unsafe { (pd(raw)?, Buf::get(buf)?) };
        let backing = buf.share(pd, addr, length)?;
        register(pd, (addr, length), addr as u64, access as u32, backing)
    }

    /// `ibv_export_buf_dmabuf_fd(3)`: ENODATA, since no buffer has a file.
    fn ibv_export_buf_dmabuf_fd(raw: *mut ibv_buf) -> IntMinusOne {
        // SAFETY: the program passes a buffer.
        unsafe { Buf::get(raw) }?;
        Err::<c_int, _>(Errno(libc::ENODATA))
    }
}
