//! Multicast groups: an identifier's memberships.

use std::sync::OnceLock;

use libc::{c_void, sockaddr};
use quipu_abi_trace::entry;
use quipu_abi_types::*;
use quipu_cabi::{Errno, IntMinusOne};
use quipu_facade::check;

use crate::acks::Acks;
use crate::address::length;
use crate::id::id;
use crate::verbs::{number, verbs};

/// A membership. Its address is the cookie of its events.
pub(crate) struct Group {
    /// The bytes of the address that it was joined by.
    addr: Vec<u8>,
    context: *mut c_void,
    send_only: bool,
    /// Whether this library has attached the identifier's queue pair, and to what: the GID of the group, and
    /// its LID or the row of the GID table in its place.
    attached: OnceLock<(ibv_gid, u16)>,
    pub(crate) acks: Acks,
}

/// The memberships of an identifier.
#[derive(Default)]
pub(crate) struct Groups(Vec<*mut Group>);

impl Groups {
    /// Removes the membership that was joined last by an address.
    fn take(&mut self, addr: &[u8]) -> Option<*mut Group> {
        // SAFETY: what is in the list is alive.
        let found = self.0.iter().rposition(|group| unsafe { (**group).addr == addr })?;
        Some(self.0.remove(found))
    }
}

/// The bytes of an address.
///
/// # Safety
///
/// As [`length`].
unsafe fn bytes(addr: *const sockaddr) -> Result<Vec<u8>, Errno> {
    // SAFETY: passed on from the caller.
    unsafe { Ok(std::slice::from_raw_parts(addr.cast::<u8>(), length(addr)?).to_vec()) }
}

/// # Safety
///
/// `raw` is an identifier, `addr` null or an address.
unsafe fn join(
    raw: *mut rdma_cm_id,
    addr: *const sockaddr,
    flags: u32,
    context: *mut c_void,
) -> Result<i32, Errno> {
    // SAFETY: passed on from the caller.
    unsafe {
        let state = id(raw)?;
        let send_only = flags == RDMA_MC_JOIN_FLAG_SENDONLY_FULLMEMBER;
        let addr_bytes = bytes(addr)?;
        let acks = Acks::default();
        let attached = OnceLock::new();
        let group = Group { addr: addr_bytes, context, send_only, attached, acks };
        let group = Box::into_raw(Box::new(group));
        // Listed first: its event may come before the call returns.
        state.book().groups.0.push(group);
        let joined = check((state.api.cm.join)(state.handle, addr, flags, group as u64));
        if let Err(errno) = joined {
            state.book().groups.0.retain(|known| *known != group);
            drop(Box::from_raw(group));
            return Err(errno);
        }
        crate::id::complete(raw)
    }
}

/// Completes an event of a group: attaches the queue pair to a group that was joined, and shows the
/// program its context.
///
/// # Safety
///
/// `group` is null or a membership of the identifier of `event`, both alive.
pub(crate) unsafe fn joined(event: &mut rdma_cm_event, group: *mut Group) {
    // SAFETY: passed on from the caller. The events of one membership follow each other.
    unsafe {
        let Some(group) = group.as_ref() else { return };
        event.param.ud.private_data = group.context;
        let qp = (*event.id).qp;
        let attach = event.event == RDMA_CM_EVENT_MULTICAST_JOIN && !group.send_only;
        if !attach || qp.is_null() {
            return;
        }
        let to = event.param.ud.ah_attr;
        let lid = if to.dlid == 0 { u16::from(to.grh.sgid_index) } else { to.dlid };
        let attached =
            verbs().and_then(|verbs| number((verbs.attach_mcast)(qp, &to.grh.dgid, lid)));
        match attached {
            Ok(()) => {
                let _ = group.attached.set((to.grh.dgid, lid));
            }
            Err(errno) => {
                event.event = RDMA_CM_EVENT_MULTICAST_ERROR;
                event.status = -errno.0;
            }
        }
    }
}

/// Ends a membership that was taken from the list, waiting until its events are acknowledged.
///
/// # Safety
///
/// `raw` is an identifier, `group` was a membership of it.
unsafe fn end(raw: *mut rdma_cm_id, group: *mut Group) -> Result<(), Errno> {
    // SAFETY: passed on from the caller: it is this function's alone, but for events that it waits
    // for.
    unsafe {
        let state = id(raw)?;
        let qp = (*raw).qp;
        // Another membership by the same GID keeps the queue pair attached.
        let attached =
            |group: *mut Group| (*group).attached.get().map(|(gid, lid)| (gid.raw, *lid));
        let same = |&other: &*mut Group| other != group && attached(other) == attached(group);
        let shared = state.book().groups.0.iter().any(same);
        if let (Some((gid, lid)), false) = ((*group).attached.get(), shared || qp.is_null()) {
            let _ = verbs().map(|verbs| (verbs.detach_mcast)(qp, gid, *lid));
        }
        let mut reported = 0;
        let left = check((state.api.cm.leave)(state.handle, group as u64, &mut reported));
        (*group).acks.wait(reported);
        drop(Box::from_raw(group));
        left
    }
}

/// Ends all memberships of an identifier that is about to be destroyed.
///
/// # Safety
///
/// `raw` is an identifier.
pub(crate) unsafe fn leave_all(raw: *mut rdma_cm_id) {
    // SAFETY: passed on from the caller.
    let Ok(state) = (unsafe { id(raw) }) else { return };
    let groups = std::mem::take(&mut state.book().groups.0);
    for group in groups {
        // SAFETY: it was in the list; what cannot be left any more is gone with the engine's own.
        let _ = unsafe { end(raw, group) };
    }
}

/// # Safety
///
/// `raw` is an identifier, `addr` null or an address.
unsafe fn leave(raw: *mut rdma_cm_id, addr: *const sockaddr) -> Result<(), Errno> {
    // SAFETY: passed on from the caller.
    unsafe {
        let (state, addr) = (id(raw)?, bytes(addr)?);
        check((state.api.note_call)(EngineCall::LeaveMulticast as u32))?;
        let found = state.book().groups.take(&addr);
        // A synchronous identifier has the event of the joining still.
        crate::id::drop_event(raw);
        end(raw, found.ok_or(Errno::EADDRNOTAVAIL)?)
    }
}

entry! {
    /// `rdma_join_multicast(3)`
    fn rdma_join_multicast(
        raw: *mut rdma_cm_id,
        addr: *mut sockaddr,
        context: *mut c_void,
    ) -> IntMinusOne {
        // SAFETY: the program passes an identifier, and null or an address.
        unsafe { join(raw, addr, RDMA_MC_JOIN_FLAG_FULLMEMBER, context) }
    }

    /// `rdma_join_multicast_ex(3)`
    fn rdma_join_multicast_ex(
        raw: *mut rdma_cm_id,
        attr: *mut rdma_cm_join_mc_attr_ex,
        context: *mut c_void,
    ) -> IntMinusOne {
        const NEEDED: u32 = RDMA_CM_JOIN_MC_ATTR_ADDRESS | RDMA_CM_JOIN_MC_ATTR_JOIN_FLAGS;
        // SAFETY: the program passes null or a valid pointer.
        let attr = unsafe { attr.as_ref() }.ok_or(Errno::EINVAL)?;
        if attr.comp_mask & !NEEDED != 0 {
            return Err(Errno::EOPNOTSUPP);
        }
        if attr.comp_mask != NEEDED || attr.join_flags > RDMA_MC_JOIN_FLAG_SENDONLY_FULLMEMBER {
            return Err(Errno::EINVAL);
        }
        // SAFETY: the program passes an identifier, and null or an address.
        unsafe { join(raw, attr.addr, attr.join_flags, context) }
    }

    /// `rdma_leave_multicast(3)`
    fn rdma_leave_multicast(raw: *mut rdma_cm_id, addr: *mut sockaddr) -> IntMinusOne {
        // SAFETY: the program passes an identifier, and null or an address.
        unsafe { leave(raw, addr) }?;
        Ok(0)
    }
}

impl Group {
    /// A membership without anything, for tests.
    #[cfg(test)]
    fn of(addr: &[u8]) -> *mut Self {
        let (addr, context, acks) = (addr.to_vec(), std::ptr::null_mut(), Acks::default());
        let attached = OnceLock::new();
        Box::into_raw(Box::new(Self { addr, context, send_only: false, attached, acks }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_membership_is_found_by_its_address_once() {
        let mut groups = Groups::default();
        groups.0.extend([Group::of(b"one"), Group::of(b"two"), Group::of(b"one")]);
        for left in [1, 0] {
            let group = groups.take(b"one").unwrap();
            // SAFETY: it came from Box::into_raw and is in no list any more.
            drop(unsafe { Box::from_raw(group) });
            assert_eq!(groups.take(b"none"), None);
            assert_eq!(groups.0.len(), left + 1);
        }
        assert_eq!(groups.take(b"one"), None);
    }
}
