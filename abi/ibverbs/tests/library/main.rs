//! The library under C programs. One program, which is linked once.

mod engine;
mod harness;
mod programs;
mod trace;
