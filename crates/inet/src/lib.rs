//! The inter-network stack of QPIP as state machines: its TCP ([`tcp`]), and the stack around
//! it ([`stack`]).
//!
//! This crate contains no networking code: it has no clock, no sockets, no threads, no random numbers and
//! no `unsafe`. Segments, calls and the time go in; segments to be sent, events and the next deadline come
//! out. It never touches application memory either: what is sent is named as ranges of the stream, what
//! arrives as placements.
//!
//! Time is in nanoseconds since any fixed moment; sizes are in octets.
#![forbid(unsafe_code)]

pub mod fragments;
pub mod icmp;
pub mod neighbour;
pub mod pmtu;
pub mod stack;
pub mod tcp;
