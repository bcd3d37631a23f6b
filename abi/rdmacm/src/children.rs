//! Identifiers of connect requests by the engine's handle: for events that another thread takes in the
//! moment between the request and the naming of its identifier.

use std::collections::BTreeMap;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use quipu_abi_types::{CmIdHandle, rdma_cm_id};

static KNOWN: Mutex<BTreeMap<u64, usize>> = Mutex::new(BTreeMap::new());
static CHANGED: Condvar = Condvar::new();

/// Longer than any thread needs to name an identifier; it may also have failed.
const PATIENCE: Duration = Duration::from_secs(1);

fn known() -> MutexGuard<'static, BTreeMap<u64, usize>> {
    KNOWN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Makes the identifier of a request known.
pub(crate) fn add(handle: CmIdHandle, raw: *mut rdma_cm_id) {
    known().insert(handle.0, raw as usize);
    CHANGED.notify_all();
}

/// Forgets an identifier, whether it was known or not.
pub(crate) fn remove(handle: CmIdHandle) {
    known().remove(&handle.0);
}

/// The identifier of a request, as soon as it is known; null if that does not come to pass.
pub(crate) fn find(handle: CmIdHandle) -> *mut rdma_cm_id {
    let unknown = |known: &mut BTreeMap<u64, usize>| !known.contains_key(&handle.0);
    let waited = CHANGED.wait_timeout_while(known(), PATIENCE, unknown);
    let (known, _) = waited.unwrap_or_else(PoisonError::into_inner);
    known.get(&handle.0).map_or(std::ptr::null_mut(), |raw| *raw as *mut rdma_cm_id)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_child_is_waited_for() {
        let (handle, raw) = (CmIdHandle(7), std::ptr::dangling_mut::<rdma_cm_id>());
        std::thread::scope(|scope| {
            let found = scope.spawn(|| find(handle) as usize);
            add(handle, raw);
            assert_eq!(found.join().unwrap(), raw as usize);
        });
        remove(handle);
        assert!(!known().contains_key(&7));
    }
}
