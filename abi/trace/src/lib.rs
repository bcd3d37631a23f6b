//! The trace of calls: what a program asks of verbs and rdma_cm, one line for each call, as text or
//! as JSON (`quipu run --trace`, `docs/seeing.md`).
//!
//! The drop-in libraries define their entry points with [`entry!`], which puts each behind the panic
//! wall of `quipu_cabi` and traces it where somebody wants that. What is called once for each message is
//! defined with [`quick_entry!`], in two versions: the library puts the one or the other into the
//! tables that inline functions of verbs.h call, so that a trace that is off costs those nothing.
//!
//! | module | holds |
//! |---|---|
//! | `call` | a call: what is noted before it, what after it |
//! | `sink` | where lines go |
//! | `value` | what is shown, as text and as JSON |
//! | `show`, `verbs`, `cma` | how arguments become values |
//! | `words` | names of constants |
//!
//! # Rules
//!
//! A trace changes nothing that the program can see but the time: `errno` is as the call left it, no
//! lock is taken, a line is one `write`. Calls of a library by itself are not shown; those of librdmacm
//! to libibverbs are, before the call that made them.

mod call;
mod cma;
mod show;
mod sink;
mod value;
mod verbs;
mod words;

#[cfg(test)]
mod tests;

pub use call::{Arg, Call, traced, traced_wait};
pub use quipu_cabi;
pub use show::{Pointee, Show};
pub use sink::is_on;
pub use value::Value;

/// The arguments of an entry point, for [`traced`].
#[macro_export]
macro_rules! args {
    ($($arg:ident: $ty:ty),*) => {
        &[$($crate::Arg { name: stringify!($arg), kind: stringify!($ty), value: &$arg }),*]
    };
}

/// Defines C entry points as `quipu_cabi::entry!` does, and has their calls traced.
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
        pub unsafe extern "C" fn $name(
            $($arg: $ty),*
        ) -> <$ret as $crate::quipu_cabi::CReturn>::Raw {
            let call = move || {
                $crate::quipu_cabi::outer_wall::<$ret>(stringify!($name), move || $body)
            };
            if $crate::is_on() {
                let name = concat!(module_path!(), "::", stringify!($name));
                // SAFETY: the arguments are what the manual page demands.
                return unsafe { $crate::traced::<$ret>(name, $crate::args!($($arg: $ty),*), call) };
            }
            call()
        }
    )*};
}

thread_local! {
    static AGAIN: std::cell::Cell<bool> = const { std::cell::Cell::new(false) };
}

/// Whether the body of a [`waiting_entry!`] runs anew, in a call of this thread that goes on. A call may also
/// end without a return: where the thread is cancelled, whose clean-up may make others, or jumps away.
#[must_use]
pub fn comes_back() -> bool {
    AGAIN.get()
}

/// Notes what [`comes_back`] is to say. For [`waiting_entry!`].
pub fn note_turn(again: bool) {
    AGAIN.set(again);
}

/// Defines C entry points that wait: while they do, their thread can be cancelled (`pthread_cancel(3)`),
/// as in a read(2), and before. The body runs anew each time that it says ERESTART.
#[macro_export]
macro_rules! waiting_entry {
    ($(
        $(#[$meta:meta])*
        fn $name:ident($($arg:ident: $ty:ty),* $(,)?) -> $ret:ty $body:block
    )*) => {$(
        $(#[$meta])*
        ///
        /// # Safety
        ///
        /// As the manual page of the C function demands of its arguments.
        pub unsafe extern "C-unwind" fn $name(
            $($arg: $ty),*
        ) -> <$ret as $crate::quipu_cabi::CReturn>::Raw {
            use $crate::quipu_cabi::{CReturn, Errno, end_if_cancelled, outer_wall};
            let call = move || {
                let mut again = false;
                loop {
                    // SAFETY: here is nothing to drop. Of a trace there is, which only frees memory.
                    unsafe { end_if_cancelled() };
                    $crate::note_turn(again);
                    let raw = outer_wall::<$ret>(stringify!($name), move || $body);
                    if <$ret as CReturn>::error(&raw) != Some(Errno::ERESTART) {
                        return raw;
                    }
                    again = true;
                }
            };
            if $crate::is_on() {
                let name = concat!(module_path!(), "::", stringify!($name));
                let args = $crate::args!($($arg: $ty),*);
                // SAFETY: the arguments are what the manual page demands.
                return unsafe { $crate::traced_wait::<$ret>(name, args, call) };
            }
            call()
        }
    )*};
}

/// Defines C entry points that are called for each message, each twice: as `quipu_cabi::entry!` does,
/// which is never traced, and in a module `traced`, which always is. [`fill!`] chooses. To keep the
/// thread from being cancelled is left to the engine, which does so where there is a system call.
#[macro_export]
macro_rules! quick_entry {
    ($(
        $(#[$meta:meta])*
        fn $name:ident($($arg:ident: $ty:ty),* $(,)?) -> $ret:ty $body:block
    )*) => {
        $(
            $(#[$meta])*
            ///
            /// # Safety
            ///
            /// As the manual page of the C function demands of its arguments.
            pub unsafe extern "C" fn $name(
                $($arg: $ty),*
            ) -> <$ret as $crate::quipu_cabi::CReturn>::Raw {
                $crate::quipu_cabi::wall::<$ret>(stringify!($name), move || $body)
            }
        )*

        /// The functions of this module, traced.
        pub(crate) mod traced {
            #[allow(unused_imports)] // Of what the types of the arguments need.
            use super::*;
            $(
                /// The function of the same name, traced.
                ///
                /// # Safety
                ///
                /// As the manual page of the C function demands of its arguments.
                pub unsafe extern "C" fn $name(
                    $($arg: $ty),*
                ) -> <$ret as $crate::quipu_cabi::CReturn>::Raw {
                    let name = concat!(module_path!(), "::", stringify!($name));
                    let args = $crate::args!($($arg: $ty),*);
                    // SAFETY: the arguments are what the manual page demands.
                    unsafe { $crate::traced::<$ret>(name, args, move || super::$name($($arg),*)) }
                }
            )*
        }
    };
}

/// Fills places of a table with functions that [`quick_entry!`] defined under the same names in
/// `module`: those that trace where calls are traced.
#[macro_export]
macro_rules! fill {
    ($table:expr, $module:path: $($name:ident)*) => {{
        use $module as plain;
        if $crate::is_on() {
            $($table.$name = Some(plain::traced::$name);)*
        } else {
            $($table.$name = Some(plain::$name);)*
        }
    }};
}
