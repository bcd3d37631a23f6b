//! Which object a descriptor stands for.

use std::sync::atomic::{AtomicPtr, AtomicUsize, Ordering};

use libc::c_int;

use crate::conn::Conn;
use crate::set::Set;

/// Descriptors in one block of the table, and blocks. Sockets with larger numbers stay plain.
const BLOCK: usize = 1024;
const BLOCKS: usize = 1024;

/// Set in an entry that is an epoll set.
const IS_SET: usize = 1;

type Block = [AtomicUsize; BLOCK];

static TABLE: [AtomicPtr<Block>; BLOCKS] = [const { AtomicPtr::new(std::ptr::null_mut()) }; BLOCKS];

/// What a descriptor stands for.
#[derive(Clone, Copy)]
pub(crate) enum Entry {
    /// A TCP socket.
    Conn(&'static Conn),
    /// An epoll set.
    Set(&'static Set),
}

impl Entry {
    fn encode(self) -> usize {
        match self {
            Self::Conn(conn) => std::ptr::from_ref(conn).expose_provenance(),
            Self::Set(set) => std::ptr::from_ref(set).expose_provenance() | IS_SET,
        }
    }

    #[inline]
    fn decode(word: usize) -> Option<Self> {
        if word == 0 {
            return None;
        }
        // SAFETY: it was made of such a reference; both are aligned to more than one octet, and never freed.
        Some(unsafe {
            if word & IS_SET == 0 {
                Self::Conn(&*std::ptr::with_exposed_provenance(word))
            } else {
                Self::Set(&*std::ptr::with_exposed_provenance(word & !IS_SET))
            }
        })
    }
}

#[inline]
fn place(fd: c_int) -> Option<&'static AtomicUsize> {
    let fd = usize::try_from(fd).ok()?;
    let block = TABLE.get(fd / BLOCK)?.load(Ordering::Acquire);
    // SAFETY: blocks are never freed.
    unsafe { block.as_ref() }.map(|block| &block[fd % BLOCK])
}

fn make_place(fd: c_int) -> Option<&'static AtomicUsize> {
    let index = usize::try_from(fd).ok()? / BLOCK;
    let place_of_block = TABLE.get(index)?;
    if place_of_block.load(Ordering::Acquire).is_null() {
        let fresh = Box::into_raw(Box::new([const { AtomicUsize::new(0) }; BLOCK]));
        let (null, order) = (std::ptr::null_mut(), Ordering::SeqCst);
        if place_of_block.compare_exchange(null, fresh, order, order).is_err() {
            // SAFETY: it is the box made above, which nobody has seen.
            drop(unsafe { Box::from_raw(fresh) });
        }
    }
    place(fd)
}

/// What a descriptor stands for; none if Quipu knows nothing of it.
#[inline]
pub(crate) fn get(fd: c_int) -> Option<Entry> {
    Entry::decode(place(fd)?.load(Ordering::Acquire))
}

/// The TCP socket of a descriptor.
#[inline]
pub(crate) fn conn(fd: c_int) -> Option<&'static Conn> {
    match get(fd)? {
        Entry::Conn(conn) => Some(conn),
        Entry::Set(_) => None,
    }
}

/// The epoll set of a descriptor.
#[inline]
pub(crate) fn set(fd: c_int) -> Option<&'static Set> {
    match get(fd)? {
        Entry::Set(set) => Some(set),
        Entry::Conn(_) => None,
    }
}

/// Has a descriptor stand for something. What it stood for is forgotten. False if it cannot.
pub(crate) fn put(fd: c_int, entry: Entry) -> bool {
    let Some(place) = make_place(fd) else { return false };
    match entry {
        Entry::Conn(conn) => conn.add_descriptor(),
        Entry::Set(set) => set.add_descriptor(),
    }
    let before = place.swap(entry.encode(), Ordering::SeqCst);
    // The descriptor was closed by a call that this library did not see.
    match Entry::decode(before) {
        Some(Entry::Conn(conn)) => crate::life::dropped(conn, fd, false),
        Some(Entry::Set(set)) => set.remove_descriptor(),
        None => {}
    }
    true
}

/// Has a descriptor stand for nothing. What it stood for.
pub(crate) fn take(fd: c_int) -> Option<Entry> {
    Entry::decode(place(fd)?.swap(0, Ordering::SeqCst))
}

/// Calls a function for each descriptor in a range that stands for something.
pub(crate) fn for_range(first: u32, last: u32, mut each: impl FnMut(c_int, Entry)) {
    let last = (last as usize).min(BLOCK * BLOCKS - 1);
    let mut fd = first as usize;
    while fd <= last {
        match get(fd as c_int) {
            Some(entry) => each(fd as c_int, entry),
            // Where there is no block, there is nothing in all of it.
            None if place(fd as c_int).is_none() => fd |= BLOCK - 1,
            None => {}
        }
        fd += 1;
    }
}

/// Another descriptor of a socket than this one; -1 if there is none.
pub(crate) fn another_of(conn: &Conn, than: c_int) -> c_int {
    let mut found = -1;
    for_range(0, u32::MAX, |fd, entry| {
        if fd != than
            && let Entry::Conn(other) = entry
            && std::ptr::eq(other, conn)
        {
            found = fd;
        }
    });
    found
}
