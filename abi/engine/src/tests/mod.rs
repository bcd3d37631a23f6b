//! Tests that use the table as a facade does, in one process: two queue pairs of the one engine.
#![allow(
    clippy::undocumented_unsafe_blocks,
    reason = "each is one call of the table, whose pointers are to live variables of the test"
)]

mod bench;
mod cm;
mod errors;
mod events;
mod fork;
mod objects;
mod paging;
mod raw;
mod traffic;
mod xrc;
