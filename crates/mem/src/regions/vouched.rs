//! Memory that somebody vouches for, so that the adapter above needs no unsafe code.

use super::table::Entry;
use super::{Regions, RegisterError, Registration, ReregisterError, Reregistration, Withdrawn};
use crate::access::Access;
use crate::key::Key;

/// Memory of the application, with the promise that [`Regions::register`] asks for already given.
#[derive(Clone, Copy, Debug)]
pub struct Vouched {
    addr: usize,
    len: u64,
    iova: u64,
    access: Access,
    on_demand: bool,
}

impl Vouched {
    /// Vouches for `len` bytes at `addr`, known to work requests and peers as `iova`.
    ///
    /// # Safety
    ///
    /// The promise of [`Regions::register`], for as long as the region that is made from it lives.
    pub unsafe fn new(addr: usize, len: u64, iova: u64, access: Access) -> Vouched {
        Vouched { addr, len, iova, access, on_demand: false }
    }

    /// The same, where not all of it need be mapped at all times, as the whole address space: each access is
    /// made only if [`Mappings`](super::Mappings) says that its pages are there.
    #[must_use]
    pub fn on_demand(self) -> Vouched {
        Vouched { on_demand: true, ..self }
    }

    /// Where the memory is in this process.
    pub fn addr(&self) -> usize {
        self.addr
    }

    /// Its length in bytes.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// The address of its first byte in work requests.
    pub fn iova(&self) -> u64 {
        self.iova
    }

    /// Whether it has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The rights.
    pub fn access(&self) -> Access {
        self.access
    }
}

impl Regions {
    /// [`register`](Regions::register) for vouched memory.
    pub fn register_vouched(&mut self, pd: u32, memory: Vouched) -> Result<Key, RegisterError> {
        let Vouched { addr, len, iova, access, on_demand } = memory;
        let registration = Registration { pd, addr, len, iova, access };
        if on_demand {
            return self.insert_entry(Entry::on_demand(registration)?);
        }
        // SAFETY: whoever made the `Vouched` gave the promise of `register`.
        unsafe { self.register(registration) }
    }

    /// [`reregister`](Regions::reregister) with vouched memory, or with the memory it has. New memory
    /// does not change the rights; those are in `change`.
    pub fn reregister_vouched(
        &mut self,
        key: Key,
        change: Reregistration,
        memory: Option<Vouched>,
    ) -> Result<(Key, Withdrawn), ReregisterError> {
        let memory = memory.map(|memory| (memory.addr, memory.len, memory.iova));
        // SAFETY: new memory is vouched for; old memory is vouched for since it was registered, with
        // the rights it may have been given since by the same caller.
        unsafe { self.reregister(key, Reregistration { memory, ..change }) }
    }
}
