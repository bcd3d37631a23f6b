//! The C functions. Each looks its descriptor up; one that is no socket of SDP goes on to the real
//! function. A thread may be cancelled while it waits in a real function: nothing is to be dropped there.

mod data;
mod descriptors;
mod files;
mod many;
mod process;
mod programs;
mod sockets;
mod waiting;
