use std::any::Any;
use std::io::Write;
use std::marker::PhantomData;
use std::panic::{AssertUnwindSafe, catch_unwind};

use libc::c_int;

use crate::{Errno, Hold};

/// How a C function reports success and failure: one type per convention, named in [`entry!`](crate::entry!)
/// behind the function's arrow.
pub trait CReturn {
    /// What the body of the entry point yields on success.
    type Value;
    /// What C gets.
    type Raw;
    /// The C value of a success.
    fn success(value: Self::Value) -> Self::Raw;
    /// The C value of a failure; sets `errno` too.
    fn failure(errno: Errno) -> Self::Raw;
    /// Whether a value that C just got says that the function failed, and why; none where the value
    /// cannot tell.
    fn error(_raw: &Self::Raw) -> Option<Errno> {
        None
    }
}

/// An error number, if it is one.
fn number(raw: c_int) -> Option<Errno> {
    (raw != 0).then_some(Errno(raw))
}

/// Returns 0, or the error number (which `errno` gets too). Most of verbs.
pub struct IntErrno;

impl CReturn for IntErrno {
    type Value = ();
    type Raw = c_int;
    fn success((): ()) -> c_int {
        0
    }
    fn failure(errno: Errno) -> c_int {
        errno.set();
        errno.0
    }
    fn error(raw: &c_int) -> Option<Errno> {
        number(*raw)
    }
}

/// Returns 0, or the error number, and leaves `errno` alone. Posting and polling call by call in verbs:
/// inline functions of the header call them, and "no completion" is such a number.
pub struct ErrorNumber;

impl CReturn for ErrorNumber {
    type Value = ();
    type Raw = c_int;
    #[inline]
    fn success((): ()) -> c_int {
        0
    }
    fn failure(errno: Errno) -> c_int {
        errno.0
    }
    fn error(raw: &c_int) -> Option<Errno> {
        number(*raw)
    }
}

/// Returns a number, or -1 with `errno` set.
pub struct MinusOne<T>(PhantomData<T>);

impl<T: From<i8> + PartialEq> CReturn for MinusOne<T> {
    type Value = T;
    type Raw = T;
    fn success(value: T) -> T {
        value
    }
    fn failure(errno: Errno) -> T {
        errno.set();
        T::from(-1)
    }
    fn error(raw: &T) -> Option<Errno> {
        (*raw == T::from(-1)).then(Errno::last)
    }
}

/// Returns a value of 0 or above, or -1 with `errno` set. Events and table look-ups of verbs.
pub type IntMinusOne = MinusOne<c_int>;

/// Returns a pointer, or NULL with `errno` set.
pub struct Null<T>(PhantomData<T>);

impl<T> CReturn for Null<T> {
    type Value = *mut T;
    type Raw = *mut T;
    fn success(value: *mut T) -> *mut T {
        value
    }
    fn failure(errno: Errno) -> *mut T {
        errno.set();
        std::ptr::null_mut()
    }
    fn error(raw: &*mut T) -> Option<Errno> {
        raw.is_null().then(Errno::last)
    }
}

/// Returns a number that has no room for an error: the default value stands for it, and `errno` is
/// set.
pub struct Plain<T>(PhantomData<T>);

impl<T: Default> CReturn for Plain<T> {
    type Value = T;
    type Raw = T;
    fn success(value: T) -> T {
        value
    }
    fn failure(errno: Errno) -> T {
        errno.set();
        T::default()
    }
}

/// Returns nothing; `errno` stays as it is, since C code does not expect such a function to set it.
pub struct Void;

impl CReturn for Void {
    type Value = ();
    type Raw = ();
    fn success((): ()) {}
    fn failure(_: Errno) {}
}

/// Runs the body of the entry point `name` behind the panic wall: a panic is written to standard
/// error and becomes EIO.
#[inline]
pub fn wall<R: CReturn>(
    name: &'static str,
    body: impl FnOnce() -> Result<R::Value, Errno>,
) -> R::Raw {
    // Nothing behind an entry point is left half changed by a panic that a later call could trip
    // over: what is locked is poisoned and reports so, the rest is owned by the engine.
    match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(value)) => R::success(value),
        Ok(Err(errno)) => R::failure(errno),
        Err(panic) => {
            report(name, panic.as_ref());
            // Dropping the payload may panic again; it is leaked instead.
            std::mem::forget(panic);
            R::failure(Errno::EIO)
        }
    }
}

/// [`wall`] for what programs call: the thread is not cancelled meanwhile.
#[inline]
pub fn outer_wall<R: CReturn>(
    name: &'static str,
    body: impl FnOnce() -> Result<R::Value, Errno>,
) -> R::Raw {
    let _hold = Hold::new();
    wall::<R>(name, body)
}

#[cold]
fn report(name: &str, panic: &(dyn Any + Send)) {
    let text = panic
        .downcast_ref::<&str>()
        .copied()
        .or_else(|| panic.downcast_ref::<String>().map(String::as_str))
        .unwrap_or("a panic without a text");
    // `eprintln!` would panic where standard error is closed.
    let _ = writeln!(std::io::stderr(), "quipu: {name}: internal error: {text}");
}

/// Defines C entry points, each behind the panic wall.
///
/// The body evaluates to `Result<R::Value, Errno>`, where `R`, after the arrow, is the convention
/// of the function ([`CReturn`]); `?` works on `Result<_, Errno>`.
///
/// ```
/// use quipu_cabi::{entry, Errno, IntErrno};
///
/// entry! {
///     /// Halves an even number in place.
///     fn halve(number: *mut i32) -> IntErrno {
///         // SAFETY: the C caller passes null or a valid pointer.
///         let number = unsafe { number.as_mut() }.ok_or(Errno::EINVAL)?;
///         if *number % 2 != 0 {
///             return Err(Errno::EINVAL);
///         }
///         *number /= 2;
///         Ok(())
///     }
/// }
/// let mut n = 8;
/// // SAFETY: `n` outlives the call.
/// assert_eq!(unsafe { halve(&mut n) }, 0);
/// assert_eq!(n, 4);
/// ```
#[macro_export]
macro_rules! entry {
    ($(
        $(#[$meta:meta])*
        fn $name:ident($($arg:ident: $ty:ty),* $(,)?) -> $ret:ty $body:block
    )*) => {$(
        $(#[$meta])*
        ///
        /// # Safety
        ///
        /// As the manual page of the C function demands of its arguments.
        pub unsafe extern "C" fn $name($($arg: $ty),*) -> <$ret as $crate::CReturn>::Raw {
            $crate::outer_wall::<$ret>(stringify!($name), move || $body)
        }
    )*};
}

#[cfg(test)]
mod tests {
    use super::*;

    entry! {
        fn panics_with_errno() -> IntErrno { panic!("one") }
        fn panics_with_number() -> ErrorNumber { panic!("six") }
        fn panics_with_minus_one() -> IntMinusOne { panic!("{}", String::from("two")) }
        fn panics_with_null() -> Null<u8> { std::panic::panic_any(3) }
        fn panics_with_default() -> Plain<u64> { panic!("four") }
        fn panics_with_nothing() -> Void { panic!("five") }
        fn fails() -> IntErrno { Err(Errno::EBUSY) }
        fn counts() -> IntMinusOne { Ok(7) }
    }

    #[test]
    fn a_panic_becomes_the_error_of_the_convention() {
        let hook = std::panic::take_hook();
        std::panic::set_hook(Box::new(|_| {}));
        // SAFETY: these take no arguments.
        unsafe {
            assert_eq!(panics_with_errno(), libc::EIO);
            Errno(0).set();
            assert_eq!(panics_with_number(), libc::EIO);
            assert_eq!(Errno::last(), Errno(0));
            assert_eq!(panics_with_minus_one(), -1);
            assert_eq!(Errno::last(), Errno::EIO);
            assert!(panics_with_null().is_null());
            assert_eq!(panics_with_default(), 0);
            Errno(0).set();
            panics_with_nothing();
            assert_eq!(Errno::last(), Errno(0));
        }
        std::panic::set_hook(hook);
    }

    #[test]
    fn errors_and_values_follow_the_convention() {
        // SAFETY: these take no arguments.
        unsafe {
            assert_eq!(fails(), libc::EBUSY);
            assert_eq!(Errno::last(), Errno::EBUSY);
            assert_eq!(counts(), 7);
        }
    }
}
