//! fork(2), and programs that take the place of this one.

use std::cell::RefCell;

use libc::c_int;
use quipu_sockets::report::Reason;

use crate::conn::{self, Conn};
use crate::table::{self, Entry};
use crate::{helper, life, owners, process, set, sys};

thread_local! {
    /// What the thread that forks holds meanwhile.
    static HELD: RefCell<Vec<Box<dyn set::Kept>>> = const { RefCell::new(Vec::new()) };
}

/// Asks to be told of children.
pub(crate) fn watch() {
    // SAFETY: functions of this library, which is never unloaded (it is preloaded).
    unsafe { libc::pthread_atfork(Some(before), Some(in_parent), Some(in_child)) };
}

extern "C" fn before() {
    sys::quietly(|| {
        owners::prepare();
        conn::for_all(|conn| {
            conn.add_owner();
            withdraw_consent(conn);
        });
        let mut held = set::hold_all();
        held.push(Box::new(conn::hold_pool()));
        held.push(Box::new(helper::hold_queue()));
        HELD.with(|place| *place.borrow_mut() = held);
    });
}

extern "C" fn in_parent() {
    sys::quietly(|| HELD.with(|held| held.borrow_mut().clear()));
}

extern "C" fn in_child() {
    sys::quietly(|| {
        HELD.with(|held| held.borrow_mut().clear());
        process::begin();
        helper::forget();
        crate::report::forget();
        crate::totals::forget();
        set::forget_all();
        conn::for_all(Conn::forget_threads);
    });
}

/// From now on the socket has more than one process: nothing goes into its rings any more.
fn withdraw_consent(conn: &'static Conn) {
    if conn.enter() {
        if let Some(map) = conn.map() {
            crate::send::settle(conn, map);
            let _ = map.receiver().revoke();
        }
        conn.leave();
    }
}

/// This process ends: it has its sockets no more.
pub(crate) fn ends() {
    if process::is_own() {
        conn::for_all_at_end(|conn| {
            conn.remove_owner();
        });
        crate::report::remove();
    }
}

/// A program is about to be started with the descriptors of this process that are not close-on-exec.
/// It does not know of rings.
pub(crate) fn descriptors_are_inherited() {
    sys::quietly(|| {
        table::for_range(0, u32::MAX, |fd, entry| {
            if let Entry::Conn(conn) = entry
                && conn.mode() != conn::Mode::Plain
                && !closes_on_exec(fd)
            {
                life::given_away(fd, Reason::Shared);
            }
        });
    });
}

fn closes_on_exec(fd: c_int) -> bool {
    sys::call!(SYS_fcntl, fd, libc::F_GETFD) as c_int & libc::FD_CLOEXEC != 0
}

/// This process is about to become another program, if it can. Call the function that it gives if it
/// could not.
pub(crate) fn becomes_a_program() -> impl FnOnce() {
    descriptors_are_inherited();
    let own = process::is_own();
    if own {
        conn::for_all(|conn| {
            conn.remove_owner();
        });
    }
    move || {
        if own {
            sys::quietly(|| conn::for_all(Conn::add_owner));
        }
    }
}
