//! Sizes and offsets, as Rust and as a C compiler see them. One program, which is linked once.

mod c_layout;
mod layout;
