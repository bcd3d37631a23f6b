//! Handles: numbers that look like pointers and are never followed, so that a handle of an object that is
//! gone, or of another kind, is an error and does no harm.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, PoisonError, RwLock};

use quipu_via::codes::{Code, Outcome};

use crate::nic::Nic;
use crate::types::VIP_PVOID;

/// What a handle names; its upper 8 bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Kind {
    Nic = 0xa1,
    Vi = 0xa2,
    Cq = 0xa3,
    Ptag = 0xa4,
    Connection = 0xa5,
}

/// The number of an object: unique in the process.
pub(crate) type Id = u32;

/// The NICs that are open. Their numbers have 24 bits.
static NICS: RwLock<Option<HashMap<Id, Arc<Nic>>>> = RwLock::new(None);
static NEXT: AtomicU32 = AtomicU32::new(1);

/// A number that no object of this process has yet.
pub(crate) fn fresh() -> Id {
    NEXT.fetch_add(1, Ordering::Relaxed)
}

/// The handle of an object.
pub(crate) fn handle(kind: Kind, nic: Id, id: Id) -> VIP_PVOID {
    let bits = (kind as u64) << 56 | u64::from(nic & 0xff_ffff) << 32 | u64::from(id);
    bits as VIP_PVOID
}

/// The NIC and the number that a handle names.
#[inline]
pub(crate) fn object(kind: Kind, raw: VIP_PVOID) -> Outcome<(Arc<Nic>, Id)> {
    let bits = raw as u64;
    if bits >> 56 != kind as u64 {
        return Err(Code::InvalidParameter);
    }
    let nic = (bits >> 32) as Id & 0xff_ffff;
    let nics = NICS.read().unwrap_or_else(PoisonError::into_inner);
    let nic = nics.as_ref().and_then(|nics| nics.get(&nic)).ok_or(Code::InvalidParameter)?;
    Ok((nic.clone(), bits as Id))
}

/// The NIC of a handle.
pub(crate) fn nic(raw: VIP_PVOID) -> Outcome<Arc<Nic>> {
    object(Kind::Nic, raw).map(|(nic, _)| nic)
}

/// The number of a tag that belongs to `nic`.
pub(crate) fn tag(nic: &Nic, raw: VIP_PVOID) -> Outcome<Id> {
    let bits = raw as u64;
    let is_tag = bits >> 56 == Kind::Ptag as u64 && (bits >> 32) as Id & 0xff_ffff == nic.number;
    if is_tag { Ok(bits as Id) } else { Err(Code::InvalidPtag) }
}

/// Adds a NIC, or replaces it in a child of fork.
pub(crate) fn add(nic: Arc<Nic>) {
    let mut nics = NICS.write().unwrap_or_else(PoisonError::into_inner);
    if let Some(old) = nics.get_or_insert_default().insert(nic.number, nic) {
        // It is the parent's; its locks may be held by threads that only the parent has.
        std::mem::forget(old);
    }
}

/// Removes a NIC.
pub(crate) fn remove(nic: &Nic) -> Outcome<Arc<Nic>> {
    let mut nics = NICS.write().unwrap_or_else(PoisonError::into_inner);
    let removed = nics.as_mut().and_then(|nics| nics.remove(&nic.number));
    removed.ok_or(Code::InvalidParameter)
}

/// All NICs that are open, unless another thread holds the list.
pub(crate) fn try_all() -> Vec<Arc<Nic>> {
    let nics = NICS.try_read().ok();
    nics.and_then(|nics| nics.as_ref().map(|nics| nics.values().cloned().collect()))
        .unwrap_or_default()
}
