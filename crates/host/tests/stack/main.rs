//! The stack over a TAP device, with the kernel as neighbour, router and peer: what the simulated network
//! cannot tell is whether others understand these protocols as we do.

mod host;
mod paths;
mod peers;
#[path = "../links/space.rs"]
#[allow(dead_code, reason = "each test binary uses its part")]
mod space;
