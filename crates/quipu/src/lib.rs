//! Queue pairs over IP in user space: RDMA for any program on any Linux machine, with no RDMA
//! hardware, no kernel module and no root.
//!
//! The calls are those of the papers that queue pairs come from, in today's words:
//!
//! | call | does |
//! |---|---|
//! | [`Device::open`] | opens the adapter: an address of this machine |
//! | [`ProtectionDomain::register`] | gives memory that the adapter, and with its key a peer, may use |
//! | [`QueuePair::connect`] | joins a queue pair with that of a peer, whose [`Endpoint`] came by any means |
//! | [`Connection::open`], [`Listener`] | the same by IP address and port, as `rdma_cm` does it for C programs |
//! | [`QueuePairBuilder::build_datagram`] | a queue pair for datagrams, to anybody and to multicast groups |
//! | [`QueuePair::post_recv`], [`QueuePair::post_send`] | hand work to the adapter |
//! | [`QueuePair::post_recvs`], [`QueuePair::post_sends`] | hand it a list, with one doorbell |
//! | [`am::Port`] | Active Messages: handlers that peers call |
//! | [`qpip::Adapter`] | an adapter with a TCP of its own, whose peers may be sockets |
//! | [`CompletionQueue::poll`], [`CompletionQueue::wait`] | tell what work is done |
//! | [`CompletionQueue::moderate`] | lets a program sleep for many completions |
//!
//! Everything is safe. Memory that peers may change at any moment is never lent out as a Rust
//! slice: [`MemoryRegion::read`] and [`MemoryRegion::write`] copy.
//!
//! # Example
//!
//! Two queue pairs of one process, and a message between them. In two processes it is the same
//! but for the way in which the endpoints reach each other ([`Endpoint::exchange`]).
//!
//! ```
//! use quipu::{Access, Config, Device, Request};
//!
//! # fn main() -> Result<(), quipu::Error> {
//! let config = Config { address: Some("127.0.0.1".parse().unwrap()), ..Config::default() };
//! let device = Device::open(config)?;
//! let pd = device.protection_domain()?;
//! let cq = device.completion_queue(16)?;
//! let (left, right) = (pd.queue_pair(&cq, &cq).build()?, pd.queue_pair(&cq, &cq).build()?);
//! left.connect(&right.endpoint())?;
//! right.connect(&left.endpoint())?;
//!
//! let memory = pd.register(4096, Access::LOCAL_WRITE)?;
//! memory.write(0, b"knots on a string")?;
//! right.post_recv(1, &[memory.sge(2048, 2048)?])?;
//! left.post_send(&Request::send(&[memory.sge(0, 17)?]).id(2))?;
//!
//! let mut done = [cq.next()?, cq.next()?];
//! done.sort_by_key(|completion| completion.wr_id);
//! assert_eq!(done[0].byte_len, 17);
//! assert_eq!(memory.to_vec(2048, 17)?, b"knots on a string");
//! # Ok(())
//! # }
//! ```
#![forbid(unsafe_code)]

pub mod am;
mod connection;
mod cq;
mod datagram;
mod device;
mod endpoint;
mod error;
mod memory;
mod post;
mod qp;
pub mod qpip;
mod request;
mod srq;

pub use connection::{Connection, ConnectionRequest, Listener};
pub use cq::CompletionQueue;
pub use datagram::{DatagramAddress, DatagramQueuePair, Destination, ROUTE_HEADER};
pub use device::{Device, ProtectionDomain, poll_descriptors};
pub use endpoint::{Endpoint, EndpointSyntaxError};
pub use error::Error;
pub use memory::{MemoryRegion, RemoteMemory, VouchedRegion};
pub use qp::{QueuePair, QueuePairBuilder};
pub use quipu_host::connection::EventKind;
pub use quipu_host::nic::{
    Access, AsyncEvent, Completion, Crc, Fault, Gid, Key, LinkLayer, QpAttr, QpAttrMask, QpCap,
    QpInfo, QpNum, QpState, SendFlags, Sge, WcExtra, WcOpcode, WcStatus, WriteOrder,
};
pub use quipu_host::strict::Ignored;
pub use quipu_host::{
    CaptureConfig, Config, ConfigError, Device as DeviceModel, EngineError, OpenError,
    PeerMemoryPolicy, PollEntry, SameHost, SharedPages, StrictMode, StrictOrder,
};
pub use request::Request;
pub use srq::SharedReceiveQueue;
