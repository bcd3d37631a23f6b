//! How each function of the table is defined.

use std::time::Duration;

use quipu_abi_types::EngineStatus;
use quipu_cabi::{CReturn, Errno};

use crate::status::{INVALID, Outcome};

/// The convention of the table: an [`EngineStatus`] as `i32`, and no errno. Bodies yield the number
/// even where they fail, so that a failure of the wall itself means a panic.
pub(crate) struct Status;

impl CReturn for Status {
    type Value = i32;
    type Raw = i32;
    #[inline]
    fn success(code: i32) -> i32 {
        code
    }
    fn failure(_: Errno) -> i32 {
        EngineStatus::Internal.code()
    }
}

/// The convention of `poll_cq`: a count, or an [`EngineStatus`] negated.
pub(crate) struct Count;

impl CReturn for Count {
    type Value = i32;
    type Raw = i32;
    #[inline]
    fn success(count: i32) -> i32 {
        count
    }
    fn failure(_: Errno) -> i32 {
        -EngineStatus::Internal.code()
    }
}

/// The number for an outcome.
#[inline]
pub(crate) fn code(outcome: Outcome) -> i32 {
    match outcome {
        Ok(()) => EngineStatus::Ok.code(),
        Err(failure) => failure.0.code(),
    }
}

/// Defines functions of the table, each behind the panic wall of `quipu_cabi`. The bodies evaluate
/// to [`Outcome`].
macro_rules! entries {
    ($(
        $(#[$meta:meta])*
        fn $name:ident($($arg:ident: $ty:ty),* $(,)?) $body:block
    )*) => {$(
        $(#[$meta])*
        ///
        /// # Safety
        ///
        /// As the table demands of its arguments.
        pub(crate) unsafe extern "C" fn $name($($arg: $ty),*) -> i32 {
            quipu_cabi::wall::<$crate::entry::Status>(stringify!($name), move || {
                let body = move || -> $crate::status::Outcome { $body };
                Ok($crate::entry::code(body()))
            })
        }
    )*};
}
pub(crate) use entries;

/// How long a call waits for an event before its caller sees whether the thread is cancelled, which
/// cannot be while this library's functions run.
pub(crate) const WAIT: Option<Duration> = Some(Duration::from_millis(250));

/// Where an output goes, before it is known.
pub(crate) struct Out<T>(*mut T);

impl<T> Out<T> {
    /// The place that a caller names.
    ///
    /// # Errors
    ///
    /// It is null.
    ///
    /// # Safety
    ///
    /// It is null, or valid for writes until it is filled.
    pub(crate) unsafe fn new(place: *mut T) -> Outcome<Self> {
        if place.is_null() { Err(INVALID) } else { Ok(Self(place)) }
    }

    /// Writes the output.
    pub(crate) fn fill(self, value: T) {
        // SAFETY: whoever made it promised that it is "valid for writes until it is filled".
        unsafe { self.0.write(value) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    entries! {
        /// Panics.
        fn panics() { panic!("on purpose") }
        /// Fails.
        fn fails() { Err(EngineStatus::Busy.into()) }
    }

    #[test]
    fn panics_become_a_status() {
        // SAFETY: it takes no arguments.
        assert_eq!(unsafe { panics() }, EngineStatus::Internal.code());
    }

    #[test]
    fn failures_leave_errno_alone() {
        Errno(77).set();
        // SAFETY: it takes no arguments.
        assert_eq!(unsafe { fails() }, EngineStatus::Busy.code());
        assert_eq!(Errno::last(), Errno(77));
    }
}
