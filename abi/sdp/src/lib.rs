//! A preload library that carries the streams of sockets programs over the Sockets Direct Protocol on
//! the queue pairs of `quipu0`. `quipu sockets --sdp -- PROGRAM` preloads it.
//!
//! A program asks for SDP by the address family 27 (`AF_INET_SDP`), or a rule in the grammar of
//! `libsdp.conf` asks for it in the program's place. Every other socket stays the kernel's: its calls pass.
//!
//! The program's descriptor is one end of a pair of UNIX sockets. This library makes that end readable,
//! writable or hung up, so that poll, select and epoll wait in the kernel and need no help.
//!
//! | module | holds |
//! |---|---|
//! | `entry` | the C functions |
//! | `table` | what a descriptor stands for |
//! | `adapter` | the engine of the process |
//! | `link` | one connection: queue pair and the protocol's state machine |
//! | `queue` | a queue pair with its registered buffers, and how it is connected |
//! | `socket`, `wait` | sockets and threads that wait for them |
//! | `transfer` | sending and receiving |
//! | `establish` | connecting, listening, ending |
//! | `helper` | the thread that serves sockets while no call of the program does |
//! | `relay`, `fork`, `pass` | connections that the kernel moves, and children of fork(2) |
//! | `keeper`, `process` | what is left of a program that became another one; which process this is |
//! | `ready` | the pair of UNIX sockets |
//! | `capture` | messages for tshark |
//! | `rules` | which sockets a rule carries over SDP |
//! | `options`, `sys`, `real` | socket options, system calls, the C library's own functions |
//!
//! The engine's own sockets pass through the same functions: they are in no table.

mod adapter;
mod both;
mod capture;
mod entry;
mod establish;
mod fork;
mod helper;
mod keeper;
mod link;
mod options;
mod pass;
mod process;
mod queue;
mod ready;
mod real;
mod relay;
mod rules;
mod socket;
mod sys;
mod table;
mod transfer;
mod wait;
