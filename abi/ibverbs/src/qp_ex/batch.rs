//! Work requests that are built call by call, and the list that they become.

use std::ptr;

use libc::c_int;
use quipu_abi_types::*;
use quipu_cabi::Errno;

use crate::object::Blank;

/// Inline bytes of a request that are copied at most: more than any queue pair takes.
const MOST_INLINE: usize = 1025;

/// Work requests between `wr_start` and `wr_complete`. The vectors keep their memory from one batch
/// to the next, so that posting allocates nothing once they have grown.
#[derive(Default)]
pub(super) struct Batch {
    work: Vec<Pending>,
    sges: Vec<ibv_sge>,
    inline: Vec<u8>,
    /// The first thing that went wrong, which `wr_complete` reports.
    pub(super) error: Option<Errno>,
}

/// A work request whose pointers are still to be set: the vectors they point into may yet move.
struct Pending {
    wr: ibv_send_wr,
    first_sge: usize,
    /// Where its inline payload begins, if it has some.
    inline: Option<usize>,
}

impl Batch {
    pub(super) fn clear(&mut self) {
        self.work.clear();
        self.sges.clear();
        self.inline.clear();
        self.error = None;
    }

    pub(super) fn fail(&mut self, errno: Errno) {
        self.error.get_or_insert(errno);
    }

    /// Begins a work request.
    pub(super) fn begin(&mut self, opcode: u32, wr_id: u64, send_flags: u32) -> &mut ibv_send_wr {
        let mut wr = ibv_send_wr::blank();
        wr.wr_id = wr_id;
        wr.opcode = opcode;
        wr.send_flags = send_flags;
        let first_sge = self.sges.len();
        &mut self.work.push_mut(Pending { wr, first_sge, inline: None }).wr
    }

    /// Changes the last work request, if one was begun.
    pub(super) fn last(&mut self, change: impl FnOnce(&mut ibv_send_wr)) {
        match self.work.last_mut() {
            Some(pending) => change(&mut pending.wr),
            None => self.fail(Errno::EINVAL),
        }
    }

    /// Replaces the elements of the last work request.
    pub(super) fn set_sges(&mut self, sges: &[ibv_sge]) {
        let Some(pending) = self.work.last_mut() else {
            return self.fail(Errno::EINVAL);
        };
        self.sges.truncate(pending.first_sge);
        self.sges.extend_from_slice(sges);
        pending.wr.num_sge = sges.len() as c_int;
        if pending.inline.take().is_some() {
            pending.wr.send_flags &= !IBV_SEND_INLINE;
        }
    }

    /// Copies payload into the last work request.
    pub(super) fn set_inline<'a>(&mut self, parts: impl Iterator<Item = &'a [u8]>) {
        let Some(pending) = self.work.last_mut() else {
            return self.fail(Errno::EINVAL);
        };
        let start = self.inline.len();
        for part in parts {
            let room = MOST_INLINE - (self.inline.len() - start);
            self.inline.extend_from_slice(&part[..part.len().min(room)]);
        }
        let length = (self.inline.len() - start) as u32;
        self.sges.truncate(pending.first_sge);
        self.sges.push(ibv_sge { addr: 0, length, lkey: 0 });
        pending.wr.num_sge = 1;
        pending.wr.send_flags |= IBV_SEND_INLINE;
        pending.inline = Some(start);
    }

    /// Sets all pointers and gives the head of the list; null if it is empty.
    pub(super) fn link(&mut self) -> *const ibv_send_wr {
        let sges = self.sges.as_mut_ptr();
        let inline = self.inline.as_ptr();
        let mut next = ptr::null_mut();
        for pending in self.work.iter_mut().rev() {
            pending.wr.next = next;
            let first = sges.wrapping_add(pending.first_sge);
            pending.wr.sg_list = first;
            if let Some(start) = pending.inline {
                self.sges[pending.first_sge].addr = inline.wrapping_add(start) as u64;
            }
            next = &raw mut pending.wr;
        }
        next
    }
}

#[cfg(test)]
mod tests {
    use std::slice;

    use libc::c_void;

    use super::super::{bytes, remote};
    use super::*;

    fn sge(addr: u64) -> ibv_sge {
        ibv_sge { addr, length: 8, lkey: 1 }
    }

    #[test]
    fn a_batch_becomes_a_list_with_the_elements_of_each() {
        let mut batch = Batch::default();
        batch.begin(IBV_WR_SEND, 1, IBV_SEND_SIGNALED);
        batch.set_sges(&[sge(100), sge(200)]);
        batch.begin(IBV_WR_SEND, 2, 0);
        batch.set_inline([&b"ab"[..], &b"c"[..]].into_iter());
        batch.begin(IBV_WR_RDMA_READ, 3, 0).wr = remote(7, 9);
        batch.set_sges(&[sge(300)]);
        batch.set_sges(&[sge(400)]); // a second call replaces the first
        let mut wr = batch.link();
        let mut seen = Vec::new();
        // SAFETY: `link` gives a list whose pointers are into `batch`, which lives on.
        unsafe {
            while let Some(one) = wr.as_ref() {
                let list = slice::from_raw_parts(one.sg_list, one.num_sge as usize).to_vec();
                seen.push((one.wr_id, one.send_flags, list));
                wr = one.next;
            }
            assert_eq!(seen.len(), 3);
            assert_eq!(seen[0], (1, IBV_SEND_SIGNALED, vec![sge(100), sge(200)]));
            assert_eq!((seen[1].1, seen[1].2[0].length), (IBV_SEND_INLINE, 3));
            assert_eq!(bytes(seen[1].2[0].addr as *const c_void, 3), b"abc");
            assert_eq!(seen[2], (3, 0, vec![sge(400)]));
        }
    }

    #[test]
    fn elements_replace_inline_payload() {
        let mut batch = Batch::default();
        for (id, sges) in [(1, &[sge(100)][..]), (2, &[])] {
            batch.begin(IBV_WR_SEND, id, IBV_SEND_SIGNALED);
            batch.set_inline(std::iter::once(&b"abc"[..]));
            batch.set_sges(sges);
        }
        // SAFETY: `link` gives a list whose pointers are into `batch`, which lives on.
        unsafe {
            let first = &*batch.link();
            assert_eq!((first.num_sge, *first.sg_list), (1, sge(100)));
            let second = &*first.next;
            assert_eq!((second.wr_id, second.num_sge), (2, 0));
            assert_eq!([first, second].map(|wr| wr.send_flags), [IBV_SEND_SIGNALED; 2]);
        }
    }

    #[test]
    fn of_an_inline_payload_that_no_queue_takes_not_all_is_copied() {
        let mut batch = Batch::default();
        batch.begin(IBV_WR_SEND, 1, 0);
        let (little, much) = ([1; 3], vec![2; 1 << 20]);
        batch.set_inline([&little[..], &much, &little].into_iter());
        // SAFETY: `link` gives a list whose pointers are into `batch`, which lives on.
        let length = unsafe { (*(*batch.link()).sg_list).length };
        assert_eq!((length as usize, batch.inline.len()), (MOST_INLINE, MOST_INLINE));
    }

    #[test]
    fn a_setter_without_an_operation_fails_the_batch() {
        let mut batch = Batch::default();
        batch.set_sges(&[sge(1)]);
        assert_eq!(batch.error, Some(Errno::EINVAL));
        batch.clear();
        assert_eq!(batch.error, None);
        assert!(batch.link().is_null());
    }
}
