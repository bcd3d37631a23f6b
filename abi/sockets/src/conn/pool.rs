//! The pool of objects. Its memory is never given back.

use std::sync::atomic::Ordering;
use std::sync::{Mutex, MutexGuard};

use super::{CLOSED, Conn};

/// All objects that there are. Grows by blocks, which are never freed.
static POOL: Mutex<Vec<&'static [Conn]>> = Mutex::new(Vec::new());
const BLOCK: usize = 64;

pub(super) fn pool_take() -> &'static Conn {
    let mut pool = hold_pool();
    let free = |conn: &&'static Conn| {
        !conn.is_used.load(Ordering::Acquire) && conn.users.load(Ordering::SeqCst) == CLOSED
    };
    let found = pool.iter().rev().flat_map(|block| block.iter()).find(free);
    let conn = match found {
        Some(conn) => conn,
        None => {
            let block: Vec<Conn> = (0..BLOCK).map(|_| Conn::new()).collect();
            let block: &'static [Conn] = Box::leak(block.into_boxed_slice());
            pool.push(block);
            &block[0]
        }
    };
    conn.is_used.store(true, Ordering::Relaxed);
    conn
}

/// Calls a function for every socket that is open. Nobody takes or leaves the pool meanwhile.
pub(crate) fn for_all(mut each: impl FnMut(&'static Conn)) {
    let pool = hold_pool();
    for conn in pool.iter().flat_map(|block| block.iter()).filter(|conn| conn.is_open()) {
        each(conn);
    }
}

/// The same where this process ends, perhaps in a handler of a signal that came while its thread had it:
/// then nothing is done.
pub(crate) fn for_all_at_end(each: impl FnMut(&'static Conn)) {
    for _ in 0..1000 {
        let Ok(pool) = POOL.try_lock() else {
            std::thread::yield_now();
            continue;
        };
        pool.iter().flat_map(|block| block.iter()).filter(|conn| conn.is_open()).for_each(each);
        return;
    }
}

/// The pool's lock, for fork(2).
pub(crate) fn hold_pool() -> MutexGuard<'static, Vec<&'static [Conn]>> {
    POOL.lock().unwrap_or_else(|error| error.into_inner())
}
