//! iWARP as state machines without I/O: MPA, DDP and RDMAP (RFC 5044, 5041, 5040, 6581, 7306), and
//! the additions of `specs/quipu-wire.md` where both ends agreed on them.
//!
//! This crate never touches application memory, owns no socket, buffer or thread, reads no clock
//! and decides no access: it turns messages into FPDUs inside the caller's buffer, and FPDUs into
//! checked segments that borrow the caller's bytes. Who may write where is the business of `nic`
//! and `mem`.
//!
//! A connection lives through three steps:
//!
//! 1. [`setup`]: an [`Initiator`] or a [`Responder`] exchanges the MPA start-up frames and yields
//!    [`Negotiated`].
//! 2. A [`Sender`] frames what goes out: [`Sender::begin_untagged`] or [`Sender::begin_tagged`],
//!    then [`Sender::segment`] until it reports the last segment of the message.
//! 3. A [`Receiver`] takes what comes in: [`Receiver::next`] until it asks for more bytes.
//!
//! A fault of the peer is one [`ProtocolError`]; [`terminate`] turns it, or a [`RemoteFault`] found
//! by the adapter, into the Terminate to send, and a Terminate received into a [`Verdict`].
//!
//! ```
//! use quipu_iwarp::wire::rdmap::UntaggedOp;
//! use quipu_iwarp::{DEFAULT_MAX_ULPDU, Extensions, Negotiated, Receiver, Segment, Sender};
//!
//! let negotiated = Negotiated::plain();
//! let mut sender = Sender::new(&negotiated, DEFAULT_MAX_ULPDU);
//! let mut out = [0; 64];
//! let mut msg = sender.begin_untagged(UntaggedOp::Send, 0);
//! let staged = sender.segment(&mut msg, &mut out, 5, |place| place.copy_from_slice(b"quipu"));
//! let staged = staged.expect("there is room");
//!
//! let mut receiver = Receiver::new(&negotiated, Extensions::NONE);
//! let (used, segment) = receiver.next(&out[..staged.bytes])?.expect("the FPDU is whole");
//! assert_eq!(used, staged.bytes);
//! assert!(matches!(segment, Segment::Send { msn: 1, last: true, payload: b"quipu", .. }));
//! # Ok::<(), quipu_iwarp::ProtocolError>(())
//! ```
#![forbid(unsafe_code)]

mod error;
mod pieces;
mod receiver;
mod sender;
pub mod setup;
pub mod terminate;

pub use error::ProtocolError;
pub use pieces::Belonging;
pub use quipu_wire as wire;
pub use receiver::{Mark, Receiver, Segment, SendKind};
pub use sender::{DEFAULT_MAX_ULPDU, Frame, Message, Sender, Staged, mulpdu};
pub use setup::{Extensions, Initiator, Negotiated, Params, Responder, Rtr, SetupError};
pub use terminate::{RemoteFault, Verdict};
