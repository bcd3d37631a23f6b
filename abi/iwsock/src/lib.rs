//! `libiwsock`: the extended sockets interface (`quipu/sockets.h`). A connected TCP socket that the program
//! switches to iWARP carries messages, RDMA writes and RDMA reads.
//!
//! * `table` knows which descriptors are in the mode: one load for each call of a program that never uses it.
//! * `calls` defines the C library's functions that look there; `entry` the functions of the interface.
//! * `socket` is one socket in the mode: the endpoint (`quipu_iwsock`), its TCP connection, completions.
//! * `thread` makes progress for sockets that want that; the others make progress in their calls.
//! * `counters` is what `quipu top` shows.
//! * `sys` has the system calls.
//!
//! All that is protocol is in `quipu_iwsock`, which contains no I/O.

mod calls;
mod counters;
mod entry;
mod socket;
mod sys;
mod table;
mod thread;
