//! What every C interface of Quipu needs and none may get wrong: the panic wall, `errno`, and
//! handles that survive a careless caller.
//!
//! * [`entry!`] defines a C entry point. Its body returns a [`Result`]; the macro catches panics
//!   and turns both panics and errors into what the C function returns by its convention (see
//!   [`CReturn`]). Every function that C can call is defined with it.
//! * [`Errno`] is the only error here. This crate and the facades above it are the only places in
//!   the project that know `errno`.
//! * [`Handle`] is an allocation of which C knows the address of a part. A magic word before that
//!   part catches pointers that are stale, or were never ours, before anything is done with them.
//! * [`SpinLock`] orders the calls of one builder or poller where the C interface wants a lock
//!   taken in one call and released in another.
//! * [`jump_after!`] defines a function in front of another one that takes a list of arguments;
//!   [`dprintf_after!`] those in front of dprintf(3) and its kin.
//! * [`list`] is an array of the program, wherever it lies.
//! * [`descriptors`] keeps the descriptors of the libraries out of the program's way.
//! * [`interrupted_call_goes_on`] says what a signal means to a call that waits.
//! * [`for_passed_descriptors`] finds the descriptors in a message.
//! * [`spared`] and [`per_process`] are for files that are written beside a program.
//! * [`SOL_IWARP`] and [`IWARP_MODE`] are an option of sockets that several libraries know.
//! * [`symbol_beside`] finds a library that was installed in the same folder.
//!
//! No verbs here, and nothing of the engine.

mod cancel;
pub mod descriptors;
mod entry;
mod errno;
mod handle;
mod jump;
mod library;
mod list;
mod lock;
mod options;
mod output;
mod rights;
mod signals;

pub use cancel::{Hold, end_if_cancelled};
pub use entry::{
    CReturn, ErrorNumber, IntErrno, IntMinusOne, MinusOne, Null, Plain, Void, outer_wall, wall,
};
pub use errno::Errno;
pub use handle::{Handle, Tagged};
pub use library::symbol_beside;
pub use list::{MAX_ELEMENTS, list};
pub use lock::SpinLock;
pub use options::{IWARP_MODE, SOL_IWARP};
pub use output::{is_per_process, per_process, spared};
pub use rights::for_passed_descriptors;
pub use signals::interrupted_call_goes_on;
