//! Queue pairs over their own TCP against the sockets of the kernel, which is the client of one and the
//! server of the next: every octet is looked at in both directions. Each test has a network namespace of
//! its own.
//!
//! `sizes`: links, MTUs and lengths; `datagrams`: the same of UDP; `options`: what may be negotiated, and
//! buffers; `endings`: half closes, resets, and both ends opening or closing at once; `gone`: interfaces that
//! are deleted; `occupied`: addresses that somebody else has; `stalls`: closed windows, and a path that
//! becomes narrower; `marks`: a path that marks packets; `twins`: two adapters, without the kernel.

mod adapter;
mod datagrams;
mod endings;
mod gone;
mod marks;
mod occupied;
mod options;
mod pairs;
mod plug;
mod sizes;
mod socket;
#[path = "../links/space.rs"]
#[allow(dead_code, reason = "each test binary uses its part")]
mod space;
mod stalls;
mod twins;
