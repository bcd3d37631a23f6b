//! QPIP: queue pairs straight over TCP and UDP. The adapter has IP addresses of its own on a packet link, and
//! speaks TCP from registered memory, with no protocol between; so a peer may be another such queue pair or
//! any program with a socket.
//!
//! | call | does |
//! |---|---|
//! | [`Adapter::open`] | brings up an adapter on a link, with addresses that are not the kernel's |
//! | [`QueuePairBuilder::build_tcp`](crate::QueuePairBuilder::build_tcp) | a queue pair whose transport is a TCP connection |
//! | [`TcpQueuePair::connect`] | connects it with whoever listens at an address: a queue pair or a socket |
//! | [`Adapter::listen`], [`TcpListener::offer`] | mates the connections that come with idle queue pairs |
//! | [`QueuePairBuilder::build_udp`](crate::QueuePairBuilder::build_udp) | a queue pair at a UDP port |
//!
//! Protection domains, memory and completion queues are those of the [`Device`](crate::Device) that the
//! adapter is.
//!
//! # Messages and streams
//!
//! TCP knows no messages. In [`Mode::Message`] each send is made of segments of its own, and the other end,
//! if it is a queue pair too, finds it whole in one receive. In [`Mode::Stream`] boundaries mean nothing:
//! receives are filled in order, and complete when they are full or when the peer pushes; this is for peers
//! that are sockets. A send completes when the peer's TCP has acknowledged all of it, in either mode.

mod adapter;
mod events;
mod tcp;
mod udp;

pub use quipu_host::inet::stack::Carriage;
pub use quipu_host::inet::tcp::{Counters as TcpCounters, Failure, Flow, KeepAlive, Mode};
pub use quipu_host::nic::{TcpChange, TcpSettings};
pub use quipu_host::packet::{LinkError, LinkSpec};
pub use quipu_host::{
    AccountError, Guests, QpipConfig, QpipInfo, ShareError, Sharer, parse_address,
};

pub(crate) use self::events::Events;

pub use self::adapter::{Aborter, Adapter};
pub use self::events::Event;
pub use self::tcp::{TcpListener, TcpQueuePair};
pub use self::udp::UdpQueuePair;
