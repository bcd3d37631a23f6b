//! PMI-1 and PMI-2: text over a stream between a rank and its launcher.
//!
//! Nothing here does I/O but `client`. Sources: the wire protocol as Hydra 4.0 and Slurm 22.05 speak it.

pub(crate) mod client;
mod server;
mod wire;

pub use server::{Effect, Server};
pub use wire::{Frame, Line, LineBuffer, WireError};
