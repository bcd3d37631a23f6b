//! The stack in simulated time: two of them on a link, or one and a stranger's frames.

mod datagrams;
mod ends;
mod groups;
mod held;
mod hostile;
mod icmp;
mod link;
mod looped;
mod net;
mod packets;
mod parts;
mod paths;
mod streams;
