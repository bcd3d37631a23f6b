//! Bundles: polling and waiting.

use std::sync::atomic::{AtomicI32, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use libc::c_int;
use quipu::am::{Bundle, Mode};
use quipu_cabi::{Errno, Handle, Tagged, entry};

use crate::codes::{BAD_ARG, Code, IN_USE, OrCode, Outcome, code};
use crate::{endpoint, process};

/// What C knows of an object: its address, and nothing of what is there.
#[repr(C)]
pub struct Opaque(u64);

impl Opaque {
    pub(crate) const fn new() -> Self {
        Self(0)
    }
}

/// `eb_t`
pub type eb_t = *mut Opaque;

const AM_SEQ: c_int = 0;
const AM_PAR: c_int = 1;
const AM_NOTEMPTY: c_int = 1;

/// A bundle, and its endpoints as the program knows them.
pub(crate) struct Private {
    pub(crate) bundle: Bundle,
    pub(crate) endpoints: Mutex<Vec<usize>>,
    mask: AtomicI32,
    /// Messages that a wait has told of.
    seen: AtomicU64,
}

impl Tagged for Private {
    const TAG: u64 = 0x616d_6275_6e64_6c65;
}

impl Private {
    pub(crate) fn add(&self, endpoint: usize) {
        self.endpoints.lock().unwrap_or_else(PoisonError::into_inner).push(endpoint);
    }

    /// Whether there is anything to wait for; afterwards there is not.
    pub(crate) fn takes_mask(&self) -> bool {
        self.mask.swap(0, Ordering::Relaxed) & AM_NOTEMPTY != 0
    }

    pub(crate) fn remove(&self, endpoint: usize) {
        let mut endpoints = self.endpoints.lock().unwrap_or_else(PoisonError::into_inner);
        endpoints.retain(|known| *known != endpoint);
    }
}

/// The bundle of a pointer.
///
/// # Safety
///
/// As [`Handle::get`].
#[inline]
pub(crate) unsafe fn bundle<'a>(raw: eb_t) -> Outcome<&'a Private> {
    // SAFETY: passed on from the caller.
    unsafe { Handle::<Opaque, Private>::get(raw) }.map(|handle| &**handle).map_err(|_| BAD_ARG)
}

/// Stores a value where the program wants it.
pub(crate) fn give<T>(out: *mut T, value: T) -> Outcome {
    if out.is_null() {
        return Err(BAD_ARG);
    }
    // SAFETY: it is not null, so the program passes a place for one value.
    unsafe { out.write_unaligned(value) };
    Ok(())
}

/// Frees a bundle and its endpoints.
pub(crate) fn free(raw: usize) -> Result<(), Errno> {
    let raw = raw as eb_t;
    // SAFETY: the list of bundles holds live ones only, and the program says that it uses them no
    // more.
    let handle = unsafe { Handle::<Opaque, Private>::take(raw) }?;
    let endpoints =
        std::mem::take(&mut *handle.endpoints.lock().unwrap_or_else(PoisonError::into_inner));
    for endpoint in endpoints {
        endpoint::free(endpoint)?;
    }
    Ok(())
}

entry! {
    /// `AM_AllocateBundle`
    fn AM_AllocateBundle(kind: c_int, out: *mut eb_t) -> Code {
        let mode = match kind {
            AM_SEQ => Mode::Sequential,
            AM_PAR => Mode::Parallel,
            _ => return code(Err(BAD_ARG)),
        };
        if out.is_null() {
            return code(Err(BAD_ARG));
        }
        let port = match process::port() {
            Ok((port, _)) => port,
            Err(failed) => return code(Err(failed)),
        };
        let (endpoints, mask, seen) = (Mutex::default(), AtomicI32::new(0), AtomicU64::new(0));
        let private = Private { bundle: port.bundle(mode), endpoints, mask, seen };
        let raw = Handle::create(Opaque::new(), private);
        process::add_bundle(raw as usize);
        code(give(out, raw))
    }

    /// `AM_FreeBundle`
    fn AM_FreeBundle(raw: eb_t) -> Code {
        // SAFETY: the program passes what AM_AllocateBundle gave.
        if unsafe { bundle(raw) }.is_err() {
            return code(Err(BAD_ARG));
        }
        process::remove_bundle(raw as usize);
        free(raw as usize)?;
        code(Ok(()))
    }

    /// `AM_Poll`
    fn AM_Poll(raw: eb_t) -> Code {
        // SAFETY: as above.
        let bundle = unsafe { bundle(raw) };
        code(bundle.and_then(|bundle| bundle.bundle.poll().or_code().map(drop)))
    }

    /// `AM_GetEventMask`
    fn AM_GetEventMask(raw: eb_t, out: *mut c_int) -> Code {
        // SAFETY: as above.
        let mask = unsafe { bundle(raw) }.map(|bundle| bundle.mask.load(Ordering::Relaxed));
        code(mask.and_then(|mask| give(out, mask)))
    }

    /// `AM_SetEventMask`
    fn AM_SetEventMask(raw: eb_t, mask: c_int) -> Code {
        // SAFETY: as above.
        let bundle = unsafe { bundle(raw) };
        code(bundle.and_then(|bundle| {
            if mask & !AM_NOTEMPTY != 0 {
                return Err(BAD_ARG);
            }
            bundle.mask.store(mask, Ordering::Relaxed);
            Ok(())
        }))
    }

    /// `AM_WaitSema`
    fn AM_WaitSema(raw: eb_t) -> Code {
        // SAFETY: as above.
        let bundle = match unsafe { bundle(raw) } {
            Ok(bundle) => bundle,
            Err(failed) => return code(Err(failed)),
        };
        if bundle.mask.load(Ordering::Relaxed) & AM_NOTEMPTY == 0 {
            // It would wait for ever.
            return code(Err(IN_USE));
        }
        code(wait(bundle).and_then(|()| bundle.bundle.poll().or_code().map(drop)))
    }
}

/// Waits for a message that no wait has told of yet: one whose handler another call has run counts,
/// too, since the program may have looked for what it does before that.
pub(crate) fn wait(bundle: &Private) -> Outcome {
    let seen = bundle.seen.load(Ordering::Relaxed);
    bundle.bundle.wait(seen, None).or_code()?;
    let now = bundle.bundle.arrivals().or_code()?;
    bundle.seen.store(now, Ordering::Relaxed);
    Ok(())
}
