//! A socket in an epoll set: what the program waits for, and what its ring has to report.

use libc::{c_int, epoll_event};

use crate::conn::Conn;

/// Masks that only the kernel can serve.
const KERNEL_ONLY: u32 = (libc::EPOLLONESHOT | libc::EPOLLEXCLUSIVE) as u32;
/// What a ring reports.
const READABLE: u32 = (libc::EPOLLIN | libc::EPOLLRDNORM) as u32;
const EDGE: u32 = libc::EPOLLET as u32;

/// A socket whose ring is looked at.
#[derive(Clone, Copy)]
pub(super) struct Active {
    pub(super) fd: c_int,
    pub(super) conn: &'static Conn,
    /// Sleeps in a row without anything received before.
    pub(super) idle: u32,
}

/// A socket of the set.
#[derive(Clone, Copy)]
pub(super) struct Member {
    pub(super) conn: &'static Conn,
    pub(super) events: u32,
    pub(super) data: u64,
    /// Position after the last octet that was reported.
    pub(super) told: u64,
}

impl Member {
    /// Whether a ring can report what the program waits for.
    pub(super) fn is_quick(&self) -> bool {
        self.events & KERNEL_ONLY == 0 && self.events & READABLE != 0
    }

    /// What the ring has to report.
    pub(super) fn report(&self) -> Option<(epoll_event, u64)> {
        let receiver = self.conn.map()?.receiver();
        let events = self.events & READABLE;
        if events == 0 || !receiver.has_unread() {
            return None;
        }
        let head = receiver.head()?;
        let is_new = self.events & EDGE == 0 || self.told != head;
        is_new.then_some((epoll_event { events, u64: self.data }, head))
    }
}
