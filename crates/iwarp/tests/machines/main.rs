//! The protocol machines, at both ends and against peers that break the rules. One program, linked once.

mod common;
mod faults;
mod refusal;
mod setup;
mod shared;
mod stream;
