//! The file in which a process shows its connections to `quipu sockets --report`.
//!
//! Only system calls past every library are used here: the helper's descriptors are not the program's.

use std::ffi::CString;
use std::fmt::Write;
use std::sync::Mutex;
use std::sync::atomic::Ordering;

use libc::c_int;
use quipu_sockets::report::{Reason, Row};

use crate::conn::{self, Conn, Mode};
use crate::{diag, sys};

/// Time between two versions of the file.
const INTERVAL_NS: u64 = 200_000_000;
/// Most connections that a file has.
const MAX_ROWS: usize = 1000;

/// The file that there is, to be removed at the end.
static FILE: Mutex<Option<CString>> = Mutex::new(None);

/// Writes the file, when something is new.
#[derive(Default)]
pub(crate) struct Report {
    written: u64,
    text: String,
}

impl Report {
    /// Writes it if it is time to.
    pub(crate) fn write(&mut self, own: &crate::meet::Fd) {
        let now = sys::now_ns();
        if self.written != 0 && now - self.written < INTERVAL_NS {
            return;
        }
        self.written = now;
        let text = text(own);
        if text != self.text {
            self.text = text;
            write(&self.text);
        }
    }
}

fn text(own: &crate::meet::Fd) -> String {
    let totals = crate::totals::now();
    let mut text = if totals.raises > 0 { totals.encode() } else { String::new() };
    let mut rows = 0;
    conn::for_all(|conn| {
        if (conn.mode() == Mode::Young && conn.reason() == Reason::Young) || rows == MAX_ROWS {
            return;
        }
        if conn.enter() {
            if let Some(row) = row(own, conn) {
                rows += 1;
                let _ = text.write_str(&row.encode());
            }
            conn.leave();
        }
    });
    text
}

fn row(own: &crate::meet::Fd, conn: &Conn) -> Option<Row> {
    let socket = crate::helper::copy(own, conn.fd())?;
    let (local, remote) = diag::addresses(socket.0)?;
    let count = |counter: &std::sync::atomic::AtomicU64| counter.load(Ordering::Relaxed);
    let counters = &conn.counters;
    Some(Row {
        fd: conn.fd(),
        addresses: (local.to_string(), remote.to_string()),
        reason: conn.reason(),
        sent: (count(&counters.sent), count(&counters.tcp_sent)),
        received: (count(&counters.received), count(&counters.tcp_received)),
        withdrawals: count(&counters.withdrawals),
    })
}

/// The folder of this user's files, which only the user may enter.
fn folder() -> Option<String> {
    let user = sys::call!(SYS_geteuid, 0) as u32;
    let folder = quipu_sockets::report::folder(user);
    let path = CString::new(folder.as_str()).ok()?;
    sys::call!(SYS_mkdirat, libc::AT_FDCWD, path.as_ptr(), 0o700);
    // SAFETY: all zeroes is a legal value of this plain struct.
    let mut data: libc::stat = unsafe { std::mem::zeroed() };
    let flags = libc::AT_SYMLINK_NOFOLLOW;
    let result = sys::call!(SYS_newfstatat, libc::AT_FDCWD, path.as_ptr(), &raw mut data, flags);
    let is_private = data.st_uid == user && data.st_mode & 0o077 == 0;
    (result == 0 && is_private && data.st_mode & libc::S_IFMT == libc::S_IFDIR).then_some(folder)
}

fn write(text: &str) {
    let Some(folder) = folder() else { return };
    let name = format!("{folder}/{}", sys::process());
    let (Ok(path), Ok(fresh)) = (CString::new(name.as_str()), CString::new(format!("{name}.new")))
    else {
        return;
    };
    let flags = libc::O_WRONLY | libc::O_CREAT | libc::O_TRUNC | libc::O_CLOEXEC | libc::O_NOFOLLOW;
    let fd = sys::call!(SYS_openat, libc::AT_FDCWD, fresh.as_ptr(), flags, 0o600) as c_int;
    if fd < 0 {
        return;
    }
    let written = sys::call!(SYS_write, fd, text.as_ptr(), text.len());
    sys::call!(SYS_close, fd);
    if written == text.len() as libc::c_long {
        let cwd = libc::AT_FDCWD;
        sys::call!(SYS_renameat2, cwd, fresh.as_ptr(), cwd, path.as_ptr(), 0);
        // In a child of fork(2), the parent's helper may have it for good.
        if let Ok(mut file) = FILE.try_lock() {
            *file = Some(path);
        }
    }
}

/// In a child of fork(2): the file is the parent's.
pub(crate) fn forget() {
    if let Ok(mut file) = FILE.try_lock() {
        *file = None;
    }
}

/// Removes the file.
pub(crate) fn remove() {
    if let Ok(mut file) = FILE.try_lock()
        && let Some(path) = file.take()
    {
        sys::quietly(|| sys::call!(SYS_unlinkat, libc::AT_FDCWD, path.as_ptr(), 0));
    }
}
