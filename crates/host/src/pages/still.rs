//! What holds still while pages are replaced: the engines of this process.
//!
//! What is written to a page between its copy and its replacement is lost. Programs are told that no thread
//! of theirs may do that (`docs/shared-pages.md`), but they know neither what of an engine lies beside their
//! own memory, nor when its thread writes to it. So the locks of all engines are held meanwhile, and the
//! little that is written without them is never replaced. What is neither waits for its [`turn`].

use std::ptr;
use std::sync::atomic::{AtomicPtr, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use crate::fork::Birthplace;

/// What lies where, as first address and the end.
type Place = (usize, usize);

/// Something with a lock under which it writes to memory that may lie anywhere.
pub(crate) trait Still: Send + Sync {
    /// Calls `act` while it has the lock. What `act` calls enters no engine.
    fn hold(&self, act: &mut dyn FnMut());
}

/// All of them in this process.
struct Members {
    birthplace: Birthplace,
    /// In the order in which they are held.
    all: Mutex<Vec<Entry>>,
}

struct Entry {
    number: u64,
    held: Weak<dyn Still>,
    /// What is written without the lock.
    places: [Place; 2],
}

/// Never freed. A child of fork has another one: this may be locked by a thread that only its parent has.
static MEMBERS: AtomicPtr<Members> = AtomicPtr::new(ptr::null_mut());

fn members() -> &'static Members {
    let found = MEMBERS.load(Ordering::Acquire);
    // SAFETY: null, or from `Box::into_raw` in this process or a parent of it; nothing frees it.
    if let Some(members) = unsafe { found.as_ref() }
        && members.birthplace.is_here()
    {
        return members;
    }
    let new = Members { birthplace: Birthplace::here(), all: Mutex::default() };
    let new = Box::into_raw(Box::new(new));
    if MEMBERS.compare_exchange(found, new, Ordering::AcqRel, Ordering::Acquire).is_err() {
        // SAFETY: another thread was faster, so nobody has seen this one.
        drop(unsafe { Box::from_raw(new) });
    }
    members()
}

/// The right to replace pages, or to keep others from it.
pub(crate) struct Turn {
    members: &'static Members,
    all: MutexGuard<'static, Vec<Entry>>,
}

/// Waits until no pages are replaced. No engine's lock may be held by this thread.
pub(crate) fn turn() -> Turn {
    let members = members();
    Turn { members, all: members.all.lock().unwrap_or_else(PoisonError::into_inner) }
}

impl Turn {
    /// Calls `act` while all hold still.
    pub(super) fn hold_all(&self, act: &mut dyn FnMut()) {
        hold(&self.all, act);
    }

    /// The places that must not be replaced.
    pub(super) fn places(&self) -> impl Iterator<Item = Place> {
        let own = place_of(self.members);
        self.all.iter().flat_map(|entry| entry.places).chain([own])
    }
}

/// Calls `act` while these hold still.
fn hold(members: &[Entry], act: &mut dyn FnMut()) {
    let Some((first, others)) = members.split_first() else { return act() };
    match first.held.upgrade() {
        Some(held) => held.hold(&mut || hold(others, act)),
        None => hold(others, act),
    }
}

/// Where a value lies.
pub(super) fn place_of<T>(value: &T) -> Place {
    let at = ptr::from_ref(value).addr();
    (at, at + size_of::<T>())
}

/// Something that holds still until this is dropped, which waits until no pages are replaced.
pub(crate) struct Member {
    members: &'static Members,
    number: u64,
}

impl Member {
    /// From now on. `places` are those that are written without its lock.
    pub(crate) fn new(held: &Arc<dyn Still>, places: [Place; 2]) -> Self {
        let Turn { members, mut all } = turn();
        let number = all.last().map_or(0, |last| last.number + 1);
        all.push(Entry { number, held: Arc::downgrade(held), places });
        Self { members, number }
    }
}

impl Drop for Member {
    fn drop(&mut self) {
        // In a child of fork it is the parent's.
        if self.members.birthplace.is_here() {
            turn().all.retain(|entry| entry.number != self.number);
        }
    }
}
