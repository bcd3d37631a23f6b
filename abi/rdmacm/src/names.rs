//! `rdma_resolve_addrinfo`: `rdma_getaddrinfo` whose result an event announces.
//!
//! The names are looked up within the call, as librdmacm does it; the event makes no difference between an
//! answer that was quick and one that was not.

use std::ptr;

use libc::{EAI_AGAIN, EAI_BADFLAGS, EAI_FAMILY, EAI_MEMORY, EAI_SOCKTYPE, EAI_SYSTEM};
use libc::{c_char, c_int};
use quipu_abi_trace::entry;
use quipu_abi_types::*;
use quipu_cabi::{Errno, IntMinusOne};
use quipu_facade::check;

use crate::addrinfo::{self, Failure};
use crate::id::{complete, id};

/// Where an identifier stands with its question.
#[derive(Default)]
pub(crate) enum Names {
    /// It has asked nothing, or got its answer.
    #[default]
    Unasked,
    /// There is no answer, and the event that says so was not taken.
    Asked,
    /// The answer, which nobody has fetched.
    Found(List),
}

/// A list of [`addrinfo::look_up_all`], which is freed with this.
pub(crate) struct List(*mut rdma_addrinfo);

impl Drop for List {
    fn drop(&mut self) {
        // SAFETY: the list is this one's alone.
        unsafe { addrinfo::free(self.0) };
    }
}

/// What the event of a failed question tells, if it was asked at all.
///
/// # Errors
///
/// The question makes no sense, or there is no memory.
fn status_of(failure: Failure) -> Result<c_int, Errno> {
    match failure {
        Failure::Errno(errno) => Err(errno),
        Failure::Code(EAI_BADFLAGS | EAI_FAMILY | EAI_SOCKTYPE) => Err(Errno::EINVAL),
        Failure::Code(EAI_MEMORY) => Err(Errno::ENOMEM),
        Failure::Code(EAI_SYSTEM) => Ok(-Errno::last().0),
        Failure::Code(EAI_AGAIN) => Ok(-libc::EAGAIN),
        Failure::Code(_) => Ok(-libc::ENOENT),
    }
}

/// Looks the names up, and writes the event. That may take long, and the identifier is not held on to: a
/// program that gives it up meanwhile need not wait.
///
/// # Errors
///
/// As [`status_of`]; EINVAL if the identifier is gone.
///
/// # Safety
///
/// `raw` was an identifier whose question is this one; the others as the program promises.
unsafe fn ask(
    raw: *mut rdma_cm_id,
    node: *const c_char,
    service: *const c_char,
    hints: Option<&rdma_addrinfo>,
) -> Result<(), Errno> {
    // SAFETY: passed on from the caller.
    let found = unsafe { addrinfo::look_up_all(node, service, hints) }.map(List);
    // SAFETY: as above.
    let state = unsafe { id(raw) }?;
    let (event, status) = match found {
        Ok(list) => {
            // Before its event, which another thread may be waiting for.
            state.book().names = Names::Found(list);
            (RDMA_CM_EVENT_ADDRINFO_RESOLVED, 0)
        }
        Err(failure) => (RDMA_CM_EVENT_ADDRINFO_ERROR, status_of(failure)?),
    };
    // SAFETY: the handle came from the engine.
    check(unsafe { (state.api.cm.write_event)(state.handle, event, status, 0) })
}

/// A question has failed, and its event, if it has one, is taken: another one may be asked.
///
/// # Safety
///
/// `raw` is an identifier, or was one.
pub(crate) unsafe fn failed(raw: *mut rdma_cm_id) {
    // SAFETY: passed on from the caller.
    if let Ok(state) = unsafe { id(raw) } {
        state.book().names = Names::Unasked;
    }
}

entry! {
    /// `rdma_resolve_addrinfo(3)`. There is no subnet administrator: `RAI_SA` fails with EOPNOTSUPP.
    fn rdma_resolve_addrinfo(
        raw: *mut rdma_cm_id,
        node: *const c_char,
        service: *const c_char,
        hints: *const rdma_addrinfo,
    ) -> IntMinusOne {
        // SAFETY: the program passes an identifier, and null or valid pointers, texts among them.
        unsafe {
            let (state, hints) = (id(raw)?, hints.as_ref());
            if hints.is_some_and(|hints| hints.ai_flags & RAI_SA != 0) {
                return Err(Errno::EOPNOTSUPP);
            }
            {
                let mut book = state.book();
                if !matches!(book.names, Names::Unasked) {
                    return Err(Errno::EBUSY);
                }
                book.names = Names::Asked;
            }
            ask(raw, node, service, hints).inspect_err(|_| failed(raw))?;
            complete(raw)
        }
    }

    /// `rdma_query_addrinfo(3)`: once for each answer, whose event need not have been taken.
    fn rdma_query_addrinfo(raw: *mut rdma_cm_id, out: *mut *mut rdma_addrinfo) -> IntMinusOne {
        // SAFETY: the program passes an identifier, and null or a valid pointer.
        let (state, out) = unsafe { (id(raw)?, out.as_mut().ok_or(Errno::EINVAL)?) };
        let mut book = state.book();
        let Names::Found(list) = &mut book.names else { return Err(Errno::ENOENT) };
        // What is left behind in the place is freed, which is nothing.
        *out = std::mem::replace(&mut list.0, ptr::null_mut());
        book.names = Names::Unasked;
        Ok(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn questions_without_sense_are_refused_and_others_fail_later() {
        assert_eq!(status_of(Failure::Code(EAI_BADFLAGS)), Err(Errno::EINVAL));
        assert_eq!(status_of(Failure::Errno(Errno::EINVAL)), Err(Errno::EINVAL));
        assert_eq!(status_of(Failure::Code(EAI_MEMORY)), Err(Errno::ENOMEM));
        assert_eq!(status_of(Failure::Code(EAI_AGAIN)), Ok(-libc::EAGAIN));
        assert_eq!(status_of(Failure::Code(libc::EAI_NONAME)), Ok(-libc::ENOENT));
        Errno::ENOMEM.set();
        assert_eq!(status_of(Failure::Code(EAI_SYSTEM)), Ok(-libc::ENOMEM));
    }
}
