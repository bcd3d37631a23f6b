//! The protocol by which the two ends of one TCP connection carry its octets through memory that
//! both share, as long as the receiving program is awake. This crate contains no I/O: no system
//! calls, no clock, no threads. `abi/sockets` supplies those.
//!
//! The connection stays a TCP connection of the kernel. In each direction, the octets that are not
//! yet read are always *those in the kernel, then those in the ring*, in the order of the stream:
//!
//! * A receiver that is awake *consents*: it promises to look at the ring before it sleeps.
//! * A sender that finds the consent *opens* the ring and puts what follows there.
//! * A receiver that is about to sleep in the kernel *revokes* its consent. This succeeds only
//!   while the ring is empty. From then on the sender uses TCP, and the kernel wakes the receiver.
//! * A sender whose ring is full, or that is asked to, *withdraws*: it sends the octets of the ring
//!   over TCP, oldest first.
//!
//! So no octet other than the program's own ever travels over TCP, every wait is the kernel's, and
//! a process that knows nothing of the ring still reads the right octets in the right order.
//! `specs/quipu-sockets.md` has the words, the transitions and the reasons.
//!
//! * [`direction`]: one direction, from the side of its [`Sender`] and of its [`Receiver`].
//! * [`greeting`]: the messages by which two processes agree on shared memory.
//! * [`patience`]: for how long a receiver looks at rings before it sleeps.
//! * [`report`]: why a connection is not raised, and the rows of `quipu sockets --report`.
#![forbid(unsafe_code)]

pub mod direction;
pub mod greeting;
pub mod patience;
pub mod report;

pub use direction::{Look, Pieces, Receiver, Revoked, Room, Sender, Shared, Withdrawal, Word};
