//! The strict mode: finds what a program does that hardware would punish although software forgives it,
//! and says what, where, why, and what to do instead.
//!
//! The checker is told of the calls of a program and of the completions that it polls, keeps its own
//! books of them, and answers with [`Report`]s. It does not touch the memory of a program itself: whoever
//! tells it of a request says what the payload's fingerprint is, and whether memory that was lent has
//! changed. It contains no unsafe code, and no I/O but to look up what the addresses of a backtrace are.
//!
//! What is found, and what is not, is in `docs/strict.md`.
#![forbid(unsafe_code)]

mod checker;
mod ignore;
mod keys;
mod memory;
mod objects;
mod report;
mod trace;

pub use checker::Checker;
pub use ignore::Ignored;
pub use keys::{End, Errors};
pub use memory::{Memory, Request, Wanted};
pub use report::{Kind, Report, Tally};
pub use trace::Trace;
