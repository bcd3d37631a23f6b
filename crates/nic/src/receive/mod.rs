//! The receive state machine: takes what arrives, places it, completes work requests, and notes what must
//! be acknowledged.

mod answers;
pub(crate) mod channel;
pub(crate) mod frames;
pub(crate) mod stream;
mod unreliable;
