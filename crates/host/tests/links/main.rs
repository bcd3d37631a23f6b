//! Packet links against the kernel: frames out and in, trains of segments and datagrams both ways, and what
//! happens when something is missing. The kernel's sockets are the peer.

mod af_packet;
mod namespace;
mod peer;
#[allow(dead_code, reason = "each test binary uses its part")]
mod space;
mod stack;
mod tap;
mod udp;
mod xdp;
