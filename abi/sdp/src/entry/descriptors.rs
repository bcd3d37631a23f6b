//! Descriptors: duplicated, closed, and their modes.

use std::os::fd::RawFd;
use std::time::Duration;

use libc::{c_int, c_uint, c_ulong};
use quipu_cabi::descriptors::{FLOOR, limit};
use quipu_cabi::{IntMinusOne, Void};

use super::files::{claim, hand_over, leave_to_stdio};
use super::process::serve;
use super::sockets::note_nonblocking;
use crate::{pass, process, real, table};

const CLOSE_RANGE_CLOEXEC: c_int = 4;
/// `SIOCATMARK`: whether the next byte is the one after the urgent mark.
const AT_MARK: c_ulong = 0x8905;

/// `FIOSETOWN` and `SIOCSPGRP`, which do the same, and `F_SETOWN_EX`: who gets SIGURG.
const SET_OWNER: c_ulong = 0x8901;
const SET_GROUP: c_ulong = 0x8902;
const SET_OWNER_EX: c_int = 15;

/// Defines close and its twin.
macro_rules! close_like {
    ($($name:ident)*) => {$(
        #[unsafe(no_mangle)]
        unsafe extern "C-unwind" fn $name(fd: c_int) -> c_int {
            if pass::kept_from(fd) == Some(fd) {
                return 0;
            }
            forget(fd);
            // SAFETY: as the program called this.
            unsafe { real::close(fd) }
        }
    )*};
}
close_like! { close __close }

/// The program has said who gets SIGURG.
fn note_owner(fd: RawFd) {
    if let Some(socket) = table::socket(fd) {
        serve::<Void>("fcntl", || socket.set_owner(fd));
    }
}

/// A descriptor is about to be closed.
pub(super) fn forget(fd: RawFd) {
    if table::get(fd).is_some() && process::is_own() {
        serve::<Void>("close", || {
            table::forget(fd);
            Ok(())
        });
    }
}

fn forget_range(first: c_uint, last: c_uint) {
    table::range(first, last).into_iter().for_each(forget);
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn close_range(first: c_uint, last: c_uint, flags: c_int) -> c_int {
    if flags & CLOSE_RANGE_CLOEXEC == 0 {
        forget_range(first, last);
    }
    close_but_kept(first, last, flags)
}

/// As close_range(2), without descriptors that the program does not close.
fn close_but_kept(mut first: c_uint, last: c_uint, flags: c_int) -> c_int {
    while let Some(kept) = RawFd::try_from(first).ok().and_then(pass::kept_from)
        && kept as c_uint <= last
    {
        if kept as c_uint > first {
            // SAFETY: close_range(2).
            let closed = unsafe { real::close_range(first, kept as c_uint - 1, flags) };
            if closed < 0 {
                return closed;
            }
        }
        if kept as c_uint == last {
            return 0;
        }
        first = kept as c_uint + 1;
    }
    // SAFETY: as the program called this.
    unsafe { real::close_range(first, last, flags) }
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn closefrom(first: c_int) {
    let first = first.max(0) as c_uint;
    forget_range(first, c_uint::MAX);
    close_but_kept(first, c_uint::MAX, 0);
}

/// Closes all descriptors that are the program's: those of this library have numbers that it cannot have,
/// except at the moment when they are made. So it looks three times.
pub(super) fn close_all() {
    let soft = limit().map_or(FLOOR, |limit| RawFd::try_from(limit.rlim_cur).unwrap_or(FLOOR));
    let mut all: Vec<RawFd> = (0..FLOOR.min(soft)).collect();
    for _ in 0..3 {
        all.retain(|&fd| is_open(fd));
        std::thread::sleep(Duration::from_millis(1));
    }
    // The program may have connections of larger numbers.
    let known = table::range(FLOOR as c_uint, c_uint::MAX);
    for fd in all.into_iter().chain(known) {
        forget(fd);
        crate::sys::close(fd);
    }
}

fn is_open(fd: RawFd) -> bool {
    // SAFETY: fcntl(2) with integers.
    unsafe { real::fcntl(fd, libc::F_GETFD, 0) >= 0 }
}

/// A descriptor is about to be duplicated. A child of vfork(2), whose memory is its parent's, does that for
/// the program that it becomes.
fn claim_copied(fd: RawFd) {
    if table::get(fd).is_some() {
        if process::is_own() { claim(fd) } else { hand_over(fd) }
    }
}

/// A descriptor was duplicated.
fn duplicated(fd: RawFd, copy: RawFd) {
    if copy >= 0 && table::get(fd).is_some() && process::is_own() {
        serve::<Void>("dup", || {
            table::duplicated(fd, copy);
            Ok(())
        });
        leave_to_stdio(copy);
    }
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn dup(fd: c_int) -> c_int {
    claim_copied(fd);
    // SAFETY: as the program called this.
    let copy = unsafe { real::dup(fd) };
    duplicated(fd, copy);
    copy
}

/// A descriptor is about to be replaced by another.
fn replace(fd: RawFd, to: RawFd) {
    if fd != to && is_open(fd) {
        forget(to);
    }
}

/// Defines dup2 and its twin.
macro_rules! dup2_like {
    ($($name:ident)*) => {$(
        #[unsafe(no_mangle)]
        unsafe extern "C-unwind" fn $name(fd: c_int, to: c_int) -> c_int {
            claim_copied(fd);
            replace(fd, to);
            // SAFETY: as the program called this.
            let copy = unsafe { real::dup2(fd, to) };
            duplicated(fd, copy);
            copy
        }
    )*};
}
dup2_like! { dup2 __dup2 }

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn dup3(fd: c_int, to: c_int, flags: c_int) -> c_int {
    claim_copied(fd);
    replace(fd, to);
    // SAFETY: as the program called this.
    let copy = unsafe { real::dup3(fd, to, flags) };
    duplicated(fd, copy);
    copy
}

/// Defines fcntl and its twins. What the argument is depends on the command; it is handed on as it came.
macro_rules! fcntl_like {
    ($($name:ident $real:ident;)*) => {$(
        #[unsafe(no_mangle)]
        unsafe extern "C-unwind" fn $name(fd: c_int, command: c_int, argument: c_ulong) -> c_int {
            if matches!(command, libc::F_DUPFD | libc::F_DUPFD_CLOEXEC) {
                claim_copied(fd);
            }
            // SAFETY: as the program called this.
            let result = unsafe { real::$real(fd, command, argument) };
            match command {
                libc::F_DUPFD | libc::F_DUPFD_CLOEXEC => duplicated(fd, result),
                libc::F_SETOWN | SET_OWNER_EX if result >= 0 => note_owner(fd),
                libc::F_SETFL if result >= 0 => {
                    note_nonblocking(fd, argument as c_int & libc::O_NONBLOCK != 0);
                }
                _ => {}
            }
            result
        }
    )*};
}
fcntl_like! { fcntl fcntl; fcntl64 fcntl64; __fcntl fcntl; }

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn ioctl(fd: c_int, request: c_ulong, argument: c_ulong) -> c_int {
    let socket = table::socket(fd);
    let at = std::ptr::with_exposed_provenance_mut::<c_int>(argument as usize);
    match (socket, request) {
        (Some(socket), libc::FIONREAD) if !at.is_null() => {
            serve::<IntMinusOne>("ioctl", || {
                let unread = c_int::try_from(socket.unread()).unwrap_or(c_int::MAX);
                // SAFETY: the program passes a variable.
                unsafe { at.write(unread) };
                Ok(0)
            })
        }
        (Some(socket), AT_MARK) if !at.is_null() => {
            let is_at_mark = socket.lock().connected().is_ok_and(|l| l.connection.is_at_mark());
            // SAFETY: as above.
            unsafe { at.write(c_int::from(is_at_mark)) };
            0
        }
        (socket, _) => {
            // SAFETY: as the program called this.
            let result = unsafe { real::ioctl(fd, request, argument) };
            if matches!(request, SET_OWNER | SET_GROUP) && result == 0 {
                note_owner(fd);
            }
            if socket.is_some() && request == libc::FIONBIO && result == 0 && !at.is_null() {
                // SAFETY: the kernel has just read the program's variable.
                note_nonblocking(fd, unsafe { at.read() } != 0);
            }
            result
        }
    }
}
