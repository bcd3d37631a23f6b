use std::cell::UnsafeCell;
use std::mem::offset_of;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::Errno;

/// The private part of a [`Handle`]. Its tag tells handles of one kind from all others.
pub trait Tagged {
    /// A value that no other kind uses and memory is unlikely to hold by accident.
    const TAG: u64;
}

/// What stands in the place of a tag after the handle was destroyed.
const DEAD: u64 = 0xdead_0000_dead_0000;

/// An object of which a C program knows the middle, `P`, by its address; `T` is ours.
///
/// The tag lies right before `P`, whatever the kind: looking at it costs no cache line of its own,
/// and is safe for a pointer to any kind of handle. The program may read and write `P` at any time,
/// so it is reached by raw pointer only.
#[repr(C)]
pub struct Handle<P, T> {
    tag: AtomicU64,
    public: UnsafeCell<P>,
    private: T,
}

impl<P, T: Tagged> Handle<P, T> {
    /// Moves both parts to the heap and gives the address to the C program, which owns it until
    /// [`Handle::take`].
    pub fn create(public: P, private: T) -> *mut P {
        Self::known_as(Self::boxed(public, private))
    }

    /// As [`Handle::create`], for an object that others must know by its address before it is
    /// complete: `finish` gets that address and the private part, and may still fail.
    ///
    /// # Errors
    ///
    /// What `finish` reports; the object is freed then.
    pub fn create_with(
        public: P,
        private: T,
        finish: impl FnOnce(*mut P, &mut T) -> Result<(), Errno>,
    ) -> Result<*mut P, Errno> {
        let this = Self::boxed(public, private);
        let raw = Self::known_as(this);
        // SAFETY: the allocation was just made, and only `finish` knows of it.
        let finished = unsafe { finish(raw, &mut (*this).private) };
        if let Err(errno) = finished {
            // SAFETY: it came from Box::into_raw, and whoever learned the address was told, by the
            // failure that it reported, that nothing came of it.
            drop(unsafe { Box::from_raw(this) });
            return Err(errno);
        }
        Ok(raw)
    }

    fn boxed(public: P, private: T) -> *mut Self {
        const { assert!(offset_of!(Self, public) == size_of::<AtomicU64>()) };
        let tag = AtomicU64::new(T::TAG);
        Box::into_raw(Box::new(Self { tag, public: UnsafeCell::new(public), private }))
    }

    /// The address by which C knows a handle.
    fn known_as(this: *mut Self) -> *mut P {
        this.wrapping_byte_add(offset_of!(Self, public)).cast()
    }

    /// The handle that C knows by an address.
    fn behind(raw: *const P) -> *const Self {
        raw.wrapping_byte_sub(offset_of!(Self, public)).cast()
    }

    /// Looks at the object behind a pointer that came from C.
    ///
    /// # Errors
    ///
    /// EINVAL for null, a misaligned pointer, and a pointer to something else than a live object of
    /// this kind.
    ///
    /// # Safety
    ///
    /// `raw` is null, or the eight bytes before it are memory (not constants), and if they hold the
    /// tag of this kind it came from [`Handle::create`]. (As far as memory that was freed can be
    /// trusted, a destroyed object no longer has its tag.) The object is not destroyed while the
    /// result is in use.
    #[inline]
    pub unsafe fn get<'a>(raw: *const P) -> Result<&'a Self, Errno> {
        let this = Self::behind(raw);
        if raw.is_null() || !this.is_aligned() {
            return Err(Errno::EINVAL);
        }
        // SAFETY: "the eight bytes before it are memory": the tag is the first field, and lies
        // right before the public part, since both are aligned to eight bytes (`boxed` asserts
        // it). An atomic may be read while others write it.
        let tag = unsafe { AtomicU64::from_ptr(this.cast_mut().cast()) };
        if tag.load(Ordering::Relaxed) != T::TAG {
            return Err(Errno::EINVAL);
        }
        // SAFETY: it has our tag, so it came from `create` and is alive. The public part is in an
        // UnsafeCell, so the program's writes to it break no promise.
        Ok(unsafe { &*this })
    }

    /// Takes the object back from the C program: later calls with the same pointer fail.
    ///
    /// # Errors
    ///
    /// As [`Handle::get`]; of two that race for one object, one gets it.
    ///
    /// # Safety
    ///
    /// As [`Handle::get`], and nobody uses the object any more.
    pub unsafe fn take(raw: *mut P) -> Result<Box<Self>, Errno> {
        // SAFETY: passed on from the caller.
        let this = unsafe { Self::get(raw) }?;
        this.tag
            .compare_exchange(T::TAG, DEAD, Ordering::AcqRel, Ordering::Relaxed)
            .map_err(|_| Errno::EINVAL)?;
        // SAFETY: the tag says that `create` made it by Box::into_raw, and exchanging the tag says
        // that nobody else gets here for the same object.
        Ok(unsafe { Box::from_raw(Self::behind(raw).cast_mut()) })
    }

    /// The address that the C program knows.
    #[inline]
    pub fn public(&self) -> *mut P {
        self.public.get()
    }
}

impl<P, T> std::ops::Deref for Handle<P, T> {
    type Target = T;
    #[inline]
    fn deref(&self) -> &T {
        &self.private
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Secret(u32);
    impl Tagged for Secret {
        const TAG: u64 = 0x5ec2_e700_0000_0001;
    }
    struct Other;
    impl Tagged for Other {
        const TAG: u64 = 0x07e2_0000_0000_0002;
    }

    #[test]
    fn a_handle_is_found_until_it_is_taken() {
        let raw = Handle::create(5u32, Secret(9));
        // SAFETY: `raw` is from `create` and alive.
        unsafe {
            assert_eq!(*raw, 5);
            assert_eq!(Handle::<u32, Secret>::get(raw).ok().unwrap().0, 9);
            assert!(matches!(Handle::<u32, Other>::get(raw), Err(Errno::EINVAL)));
            assert_eq!(Handle::<u32, Secret>::take(raw).ok().unwrap().0, 9);
        }
    }

    #[test]
    fn null_foreign_and_misaligned_pointers_are_refused() {
        let mut zeros = [0u64; 16];
        let mut ones = [u64::MAX; 16];
        let (zeros, ones) = (zeros.as_mut_ptr(), ones.as_mut_ptr());
        for pointer in [std::ptr::null_mut(), zeros.wrapping_add(1), ones.wrapping_add(1)] {
            // SAFETY: null, or with eight bytes of memory before it.
            assert!(unsafe { Handle::<u64, Secret>::get(pointer) }.is_err());
        }
        let odd = zeros.wrapping_byte_add(9);
        // SAFETY: readable; refused for its alignment before it is read.
        assert!(unsafe { Handle::<u64, Secret>::get(odd) }.is_err());
    }

    #[test]
    fn a_destroyed_object_is_refused_while_its_memory_lasts() {
        let raw = Handle::create(1u8, Secret(2));
        // SAFETY: `raw` is from `create`; its memory is freed at the end, once.
        unsafe {
            let kept = Box::into_raw(Handle::<u8, Secret>::take(raw).ok().unwrap());
            let stale = Handle::known_as(kept);
            assert!(Handle::<u8, Secret>::get(stale).is_err());
            assert!(Handle::<u8, Secret>::take(stale).is_err());
            drop(Box::from_raw(kept));
        }
    }
}
