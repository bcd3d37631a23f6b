//! Active Messages: messages that name a function of the receiver, which runs there with the
//! arguments that they carry (AM-II, Mainwaring and Culler 1995).
//!
//! | item | is |
//! |---|---|
//! | [`Port`] | the endpoints of a process, and the memory and connections that they share |
//! | [`Bundle`] | endpoints that are polled together |
//! | [`Endpoint`] | an end of messages: a tag, handlers, a table of peers, a segment |
//! | [`Message`] | what a handler gets; it may reply to a request |
//! | [`Name`] | what processes exchange to map each other's endpoints: 32 opaque bytes |
//!
//! A request runs a handler at the peer, whose reply runs a handler here. Handlers run in the
//! thread that polls the bundle ([`Bundle::poll`]), or that waits in a call for a credit. A handler
//! may reply, and sends nothing else. A request that cannot be delivered comes back: handler 0 of
//! its sender runs, and [`Message::kind`] says why.
//!
//! ```
//! use std::sync::Arc;
//! use std::sync::atomic::{AtomicI32, Ordering};
//!
//! use quipu::am::{Mode, Port, Tag};
//! use quipu::{Config, Device};
//!
//! # fn main() -> Result<(), quipu::am::Error> {
//! # let config = Config { address: Some("127.0.0.1".parse().unwrap()), ..Config::default() };
//! let port = Port::open(&Device::open(config)?, Default::default())?;
//! let bundle = port.bundle(Mode::Sequential);
//! let (left, right) = (bundle.endpoint()?, bundle.endpoint()?);
//! left.set_tag(Tag(7))?;
//! right.set_tag(Tag(7))?;
//! left.map(0, right.name()?, Tag(7))?;
//!
//! right.set_handler(1, |message| {
//!     let sum = message.args().iter().sum();
//!     message.reply(2, &[sum]).unwrap();
//! })?;
//! let answer = Arc::new(AtomicI32::new(0));
//! let place = Arc::clone(&answer);
//! left.set_handler(2, move |message| place.store(message.args()[0], Ordering::Relaxed))?;
//!
//! left.request(0, 1, &[1, 2, 39])?;
//! while answer.load(Ordering::Relaxed) == 0 {
//!     bundle.poll()?;
//! }
//! assert_eq!(answer.load(Ordering::Relaxed), 42);
//! # Ok(())
//! # }
//! ```

mod bundle;
mod datagrams;
mod endpoint;
mod fabric;
mod lanes;
mod message;
mod port;
mod signaled;
mod sizes;
mod transport;
mod turns;

pub use bundle::Bundle;
pub use endpoint::{Endpoint, Source};
pub use message::{Handler, Message};
pub use port::Port;
pub use quipu_am::{
    Arg, CallError, Category, Config, Counters, DeliveryKind as Kind, MAX_ARGS, MAX_HANDLERS,
    MAX_TRANSLATIONS, Mode, Name, Operation, Status, Tag,
};
pub use transport::Transport;

/// Why a call of Active Messages failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The call makes no sense, or not now.
    #[error(transparent)]
    Call(#[from] CallError),
    /// The adapter or the system refuses it.
    #[error(transparent)]
    Adapter(#[from] crate::Error),
}
