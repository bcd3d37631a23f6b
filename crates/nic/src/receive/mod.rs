//! The receive state machine: takes what arrives, places it, completes work requests, and notes what must
//! be acknowledged.

mod answers;
pub(crate) mod asked;
pub(crate) mod channel;
pub(crate) mod early;
pub(crate) mod express;
pub(crate) mod frames;
mod placement;
mod reads;
pub(crate) mod replies;
pub(crate) mod stream;
mod unreliable;
mod writes;

use crate::qp::{Path, Qp};
use crate::responder;

/// Counts a request as executed.
pub(crate) fn executed(qp: &mut Qp) {
    match qp.path {
        Path::Stream(_) => stream::executed(qp),
        _ => responder::executed(qp),
    }
}
