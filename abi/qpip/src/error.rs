//! What failed: as `errno`, and in words.

use std::cell::RefCell;
use std::ffi::{CStr, CString};
use std::fmt::Display;
use std::io;

use libc::c_char;
use quipu_cabi::{CReturn, Errno, entry};
use quipu_host::nic::{Fault, WcStatus};
use quipu_host::{EngineError, OpenError};

/// What the body of an entry point yields.
pub(crate) type Outcome<T = ()> = Result<T, Errno>;

thread_local! {
    /// What the last call that failed in this thread has to say.
    static LAST: RefCell<CString> = RefCell::new(CString::default());
}

/// Keeps the words for [`qpip_error`], and gives back the number.
#[cold]
pub(crate) fn fail(errno: Errno, words: impl Display) -> Errno {
    // A text with a zero in it is not one of ours, so nothing is lost.
    let text = CString::new(words.to_string()).unwrap_or_default();
    // A destructor of another thread-local may call when this one is gone: the number must do then.
    let _ = LAST.try_with(|last| *last.borrow_mut() = text);
    errno
}

/// A pointer that is null, or of something else.
pub(crate) fn no_object(what: &'static str) -> impl FnOnce(Errno) -> Errno {
    move |errno| {
        fail(
            errno,
            format_args!(
                "the argument is not a valid {what}: it is NULL, was destroyed, or is \
                another object"
            ),
        )
    }
}

fn of_system(error: &io::Error) -> Errno {
    error.raw_os_error().map_or(Errno::EIO, Errno)
}

fn of_fault(fault: &Fault) -> Errno {
    match fault {
        Fault::Busy => Errno::EBUSY,
        Fault::QueueFull => Errno(libc::ENOBUFS),
        Fault::Exhausted(_) => Errno::ENOMEM,
        Fault::Taken(_) => Errno::EADDRINUSE,
        Fault::NoRoute(_) => Errno(libc::ENETUNREACH),
        Fault::Overrun => Errno(libc::EOVERFLOW),
        Fault::Unsupported(_) => Errno::EOPNOTSUPP,
        Fault::WrongState => Errno(libc::EBADFD),
        _ => Errno::EINVAL,
    }
}

/// What an error of the engine means here, with its words kept. `what`: was to be done.
pub(crate) fn refused(what: &'static str) -> impl FnOnce(EngineError) -> Errno {
    move |error| {
        let errno = match &error {
            EngineError::Fault(fault) => of_fault(fault),
            EngineError::EngineGone
            | EngineError::AdapterLost
            | EngineError::AdapterSilent
            | EngineError::LinkGone { .. } => Errno::ENODEV,
            EngineError::RefusedElsewhere { errno, .. } => Errno(*errno),
            EngineError::ArenaFull { .. } => Errno::ENOMEM,
            EngineError::System { source, .. } | EngineError::Address(source) => of_system(source),
            EngineError::WouldBlock => Errno::EAGAIN,
            EngineError::Interrupted => Errno::EINTR,
            EngineError::BadAddress | EngineError::NotInArena => Errno::EFAULT,
            _ => Errno::EINVAL,
        };
        fail(errno, format_args!("{what}: {error}"))
    }
}

/// The same of an adapter that cannot be opened.
pub(crate) fn not_opened(error: &OpenError) -> Errno {
    let errno = match error {
        OpenError::Config(_)
        | OpenError::Gateway { .. }
        | OpenError::NoRouter { .. }
        | OpenError::Unusable { .. }
        | OpenError::KernelsAddress { .. }
        | OpenError::InterfacesAddress { .. }
        | OpenError::Faults(_)
        | OpenError::Congestion { .. }
        | OpenError::Qos(_)
        | OpenError::FaultLog(_)
        | OpenError::StrictLog(_) => Errno::EINVAL,
        OpenError::Occupied { .. } => Errno::EADDRINUSE,
        OpenError::NoSuchAddress { .. } | OpenError::InterfaceDown { .. } => Errno::EADDRNOTAVAIL,
        OpenError::Addresses(source)
        | OpenError::Capture { source, .. }
        | OpenError::System { source, .. } => of_system(source),
        OpenError::Link(error) => of_system(&error.source),
    };
    fail(errno, format_args!("cannot open the adapter: {error}"))
}

/// `enum qpip_status`.
pub(crate) const fn status(status: WcStatus) -> u32 {
    match status {
        WcStatus::Success => 0,
        WcStatus::WrFlushErr => 1,
        WcStatus::LocLenErr => 2,
        WcStatus::LocProtErr => 3,
        WcStatus::RetryExcErr => 4,
        WcStatus::RemOpErr => 5,
        _ => 6,
    }
}

const TEXTS: [&CStr; 7] = [
    c"done",
    c"flushed: the connection ended first",
    c"too long: for the receive, or for the path",
    c"the memory is not registered (any more)",
    c"lost: the peer did not acknowledge it in time",
    c"broken: the peer has ended the connection",
    c"failed",
];

/// Returns a text that is always there.
pub(crate) struct Text;

impl CReturn for Text {
    type Value = *const c_char;
    type Raw = *const c_char;
    fn success(value: *const c_char) -> *const c_char {
        value
    }
    fn failure(_: Errno) -> *const c_char {
        c"".as_ptr()
    }
}

entry! {
    /// `qpip_error`
    fn qpip_error() -> Text {
        Ok(LAST.try_with(|last| last.borrow().as_ptr()).unwrap_or(c"".as_ptr()))
    }

    /// `qpip_status_text`
    fn qpip_status_text(status: u32) -> Text {
        Ok(TEXTS.get(status as usize).unwrap_or(&c"no status").as_ptr())
    }
}
