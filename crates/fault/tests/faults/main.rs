//! Plans of faults, and what comes of them. One program, which is linked once.

mod injection;
mod plans;
