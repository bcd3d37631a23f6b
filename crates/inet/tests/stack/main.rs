//! The stack in simulated time: two of them on a link, or one and a stranger's frames.

mod datagrams;
mod link;
mod net;
mod streams;
