//! The stack in simulated time: two of them on a link, or one and a stranger's frames.

mod datagrams;
mod net;
mod streams;
