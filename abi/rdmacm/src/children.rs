//! Identifiers of connect requests by the engine's handle: for events that another thread takes in the
//! moment between the request and the naming of its identifier.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use quipu_abi_types::{CmIdHandle, rdma_cm_id};

/// What is known of the identifier of a request.
enum Child {
    /// Its address.
    Named(usize),
    /// It has no name yet, and so many events came too early.
    Unnamed(u32),
}

static KNOWN: Mutex<BTreeMap<u64, Child>> = Mutex::new(BTreeMap::new());

fn known() -> MutexGuard<'static, BTreeMap<u64, Child>> {
    KNOWN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Makes the identifier of a request known. The value: how many events of it nobody will acknowledge.
pub(crate) fn add(handle: CmIdHandle, raw: *mut rdma_cm_id) -> u32 {
    match known().insert(handle.0, Child::Named(raw as usize)) {
        Some(Child::Unnamed(missed)) => missed,
        _ => 0,
    }
}

/// Forgets an identifier, whether it was known or not. It must have no event any more that was taken and not
/// acknowledged: another thread may be about to look for it.
pub(crate) fn remove(handle: CmIdHandle) {
    known().remove(&handle.0);
}

/// The identifier of a request. Null if it is not known yet: its event is missed, as the kernel's rdma_cm has
/// none for identifiers that the program has not named.
pub(crate) fn find(handle: CmIdHandle) -> *mut rdma_cm_id {
    match known().entry(handle.0).or_insert(Child::Unnamed(0)) {
        Child::Named(raw) => *raw as *mut rdma_cm_id,
        Child::Unnamed(missed) => {
            *missed += 1;
            std::ptr::null_mut()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_event_that_comes_before_its_identifier_is_missed_and_counted() {
        let (handle, raw) = (CmIdHandle(7), std::ptr::dangling_mut::<rdma_cm_id>());
        assert!(find(handle).is_null() && find(handle).is_null());
        assert_eq!(add(handle, raw), 2);
        assert_eq!(find(handle), raw);
        remove(handle);
        assert!(!known().contains_key(&7));
        assert_eq!(add(handle, raw), 0);
        remove(handle);
    }
}
