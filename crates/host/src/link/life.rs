//! A word by which peers see at once that a process is gone into whose memory they reach: its number may
//! then be that of another program, which it becomes itself by exec. The socket of a link says so too, but
//! is asked later.
//!
//! The kernel does for the last thing that a thread does what it does for robust mutexes: it marks words
//! that the thread says it holds (set_robust_list(2)). Of exec that is the end of all threads but one,
//! before the new program is there.

use std::ptr;
use std::sync::atomic::{AtomicU32, Ordering};

use quipu_mem::{Segment, Shared};

use super::segment::DIRECTORY_BYTES;

/// What the kernel puts there.
const DIED: u32 = 0x4000_0000;

/// The word, behind the directory, as its owner writes it.
#[derive(Debug)]
pub(crate) struct Word(Shared<AtomicU32>);

impl Word {
    /// That in the segment of a directory.
    pub(crate) fn of(directory: &Segment) -> Option<Self> {
        directory.u32_at(DIRECTORY_BYTES).ok().map(Self)
    }
}

/// The word as a peer sees it, who may not write.
#[derive(Debug)]
pub(crate) struct Sight(Segment);

impl Sight {
    /// That in the segment of a peer's directory.
    pub(crate) fn of(directory: &Segment) -> Self {
        Self(directory.clone())
    }

    /// Whether the process is gone for certain.
    #[inline]
    pub(crate) fn is_dead(&self) -> bool {
        self.0.load_u32(DIRECTORY_BYTES).is_ok_and(|word| word & DIED != 0)
    }
}

/// `struct robust_list_head` of the kernel, and one entry of the list.
#[repr(C)]
struct List {
    first: *const Entry,
    /// From the address of an entry to its word.
    offset: libc::c_long,
    pending: *const Entry,
    entry: Entry,
}

#[repr(C)]
struct Entry {
    next: *const Entry,
}

/// `sizeof(struct robust_list_head)`.
const HEAD_BYTES: usize = 24;
const _: () = assert!(std::mem::offset_of!(List, entry) == HEAD_BYTES);

/// Says that the process lives for as long as this thread does, or until it is dropped by it.
pub(crate) struct Life<'a> {
    word: &'a Word,
    _list: Box<List>,
    /// That of the C library.
    before: *const List,
}

impl<'a> Life<'a> {
    /// From now on. Without robust mutexes nobody is told.
    pub(crate) fn begin(word: &'a Word) -> Self {
        let list = List {
            first: ptr::null(),
            offset: 0,
            pending: ptr::null(),
            entry: Entry { next: ptr::null() },
        };
        let mut list = Box::new(list);
        let entry = &raw const list.entry;
        list.offset = (ptr::from_ref::<AtomicU32>(&word.0).addr() as libc::c_long)
            .wrapping_sub(entry.addr() as libc::c_long);
        list.entry.next = (&raw const *list).cast();
        list.first = entry;
        let mut before: *const List = ptr::null();
        let mut len = 0usize;
        // SAFETY: asks for two words of this thread, and takes integers.
        unsafe {
            libc::syscall(libc::SYS_get_robust_list, 0, &raw mut before, &raw mut len);
            word.0.store(libc::gettid().unsigned_abs(), Ordering::Relaxed);
        }
        set(&raw const *list);
        Self { word, _list: list, before }
    }
}

impl Drop for Life<'_> {
    fn drop(&mut self) {
        set(self.before);
        self.word.0.store(DIED, Ordering::Relaxed);
    }
}

fn set(list: *const List) {
    // SAFETY: the kernel reads the list when this thread ends. It is that of the C library, or lives until
    // that one is put back, on the heap, and leads to a word of a mapping that lives longer.
    unsafe { libc::syscall(libc::SYS_set_robust_list, list, HEAD_BYTES) };
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::CommandExt;
    use std::process::{Command, Stdio};

    use super::*;
    use crate::link::segment::{self, Writers};

    /// The owner's segment, and the sight of it that a peer has.
    fn both() -> (std::os::fd::OwnedFd, Segment, Sight) {
        let len = DIRECTORY_BYTES + segment::LIFE_BYTES;
        let (fd, segment) = segment::create(c"test", len, Writers::Creator).unwrap();
        let sight = Sight::of(&segment::attach(&fd, Writers::Creator, len).unwrap());
        (fd, segment, sight)
    }

    #[test]
    fn becoming_another_program_is_seen_at_once() {
        if !crate::testing::is_alone("link::life::tests::becoming_another_program_is_seen_at_once")
        {
            return;
        }
        // The child of fork has no mapping of its own of a segment, and maps this one.
        let len = DIRECTORY_BYTES + segment::LIFE_BYTES;
        let (fd, segment) = segment::create(c"test", len, Writers::Both).unwrap();
        let sight = Sight::of(&segment);
        let mut program = Command::new("sleep");
        program.arg("1000").stdout(Stdio::null());
        // SAFETY: this is a process with one more thread, which does nothing but wait.
        let program = unsafe {
            program.pre_exec(move || {
                let segment = segment::attach(&fd, Writers::Both, len)?;
                let word = Word::of(&segment).unwrap();
                std::mem::forget(Life::begin(&word));
                assert!(word.0.load(Ordering::Relaxed) != 0 && !Sight::of(&segment).is_dead());
                std::mem::forget(segment);
                Ok(())
            })
        };
        let mut child = program.spawn().unwrap();
        assert!(sight.is_dead());
        child.kill().unwrap();
        child.wait().unwrap();
    }

    #[test]
    fn the_end_of_the_thread_is_told() {
        let (_fd, segment, sight) = both();
        let word = Word::of(&segment).unwrap();
        assert!(!sight.is_dead(), "before it begins");
        std::thread::scope(|scope| {
            scope.spawn(|| drop(Life::begin(&word)));
        });
        assert!(sight.is_dead());
    }
}
