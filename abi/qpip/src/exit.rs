//! The end of the process: what is posted goes out as far as that is possible at once, and the peers of
//! connections are told by a reset. They would wait for ever otherwise, as nobody answers them any more.

use std::ptr::null_mut;
use std::sync::Arc;
use std::sync::atomic::{AtomicPtr, Ordering};

use quipu_host::Engine;

/// A place for the engine of an adapter that is open. It is never freed, but used again. There is no lock:
/// `exit` may have interrupted whoever holds it, and in a child of fork it may be held by a thread that only
/// the parent has.
struct Place {
    /// A reference of its own, if any; it belongs to whoever swaps it out.
    engine: AtomicPtr<Engine>,
    next: Option<&'static Place>,
}

/// The newest place.
static PLACES: AtomicPtr<Place> = AtomicPtr::new(null_mut());

impl Place {
    fn newest() -> Option<&'static Self> {
        // SAFETY: it is null, or of Box::into_raw and never freed.
        unsafe { PLACES.load(Ordering::Acquire).as_ref() }
    }

    /// A new place with an engine, of which it takes the reference.
    fn add(engine: *mut Engine) -> &'static Self {
        let mut place = Box::new(Self { engine: AtomicPtr::new(engine), next: None });
        let mut newest = PLACES.load(Ordering::Acquire);
        loop {
            // SAFETY: it is null, or of Box::into_raw and never freed.
            place.next = unsafe { newest.as_ref() };
            let raw = Box::into_raw(place);
            let (set, not) = (Ordering::AcqRel, Ordering::Acquire);
            match PLACES.compare_exchange(newest, raw, set, not) {
                // SAFETY: as above.
                Ok(_) => return unsafe { &*raw },
                // SAFETY: it was made here, and nobody has seen it.
                Err(other) => (newest, place) = (other, unsafe { Box::from_raw(raw) }),
            }
        }
    }

    fn take(&self) -> Option<Arc<Engine>> {
        let engine = self.engine.swap(null_mut(), Ordering::AcqRel);
        // SAFETY: what is there is of Arc::into_raw, and the reference is nobody else's any more.
        (!engine.is_null()).then(|| unsafe { Arc::from_raw(engine) })
    }
}

fn places() -> impl Iterator<Item = &'static Place> {
    std::iter::successors(Place::newest(), |place| place.next)
}

/// That an engine is told of the end of the process, until this is dropped.
pub(crate) struct Listed(&'static Place);

impl Listed {
    pub(crate) fn new(engine: &Arc<Engine>) -> Self {
        let raw = Arc::into_raw(Arc::clone(engine)).cast_mut();
        let put = |place: &&Place| {
            let (set, not) = (Ordering::AcqRel, Ordering::Relaxed);
            place.engine.compare_exchange(null_mut(), raw, set, not).is_ok()
        };
        Self(places().find(put).unwrap_or_else(|| Place::add(raw)))
    }
}

impl Drop for Listed {
    fn drop(&mut self) {
        drop(self.0.take());
    }
}

/// Runs when the process exits, after the program's own handlers. An engine that stays occupied, since this
/// very thread was interrupted in it, is left alone after a moment; one that a child of fork has inherited
/// does nothing.
extern "C" fn at_exit() {
    quipu_cabi::wall::<quipu_cabi::Void>("exit", || {
        for engine in places().filter_map(Place::take) {
            engine.shutdown_flush();
            // Other threads may be in it: it ends with the process.
            std::mem::forget(engine);
        }
        Ok(())
    });
}

#[used]
#[unsafe(link_section = ".fini_array")]
static AT_EXIT: extern "C" fn() = at_exit;
