//! A preload library that carries the octets of TCP connections on one host through shared memory,
//! for programs that know nothing of it. `quipu sockets -- PROGRAM` preloads it.
//!
//! The program's descriptor stays the kernel's TCP socket. Everything that waits, waits in the
//! kernel; while both ends are awake, octets pass through memory without system calls. How the two
//! agree is in `quipu_sockets`, which contains no I/O; here are the system calls, the threads and the
//! C functions.
//!
//! * `entry` defines the C functions. Each looks the descriptor up in `table`; one that is no TCP
//!   socket, or is not raised, goes on to the real function (`real`).
//! * `conn` is what this process knows of a socket, `map` the memory that both ends share, `owners`
//!   how many processes have the socket.
//! * `send` (from a `source`, under the `send_lock`) and `recv` move octets; `idleness` finds rings that need
//!   no memory.
//! * `set` is epoll, `poll` poll and select; `spin` looks for a while.
//! * `life` is about descriptors, `fork` about processes.
//! * `helper` is the one thread: it meets the other end (`diag`, `meet`) and writes the `report` with the
//!   `totals`.
//!
//! A thread may be cancelled while it waits in a real function. So the functions that call one have
//! nothing to drop there, and unwind (`extern "C-unwind"`); what is counted too high by a thread that
//! ends so only keeps the connection with the kernel.
//!
//! Nothing here panics on purpose: indexes come from checked lengths.

mod conn;
mod copy;
mod diag;
mod entry;
mod fork;
mod helper;
mod idleness;
mod iov;
mod life;
mod map;
mod meet;
mod owners;
mod poll;
mod process;
mod real;
mod recv;
mod report;
mod send;
mod send_lock;
mod set;
mod source;
mod spin;
mod sys;
mod table;
mod totals;
