//! A connection that carries several requests at a time and never blocks, for an event loop.

mod buffer;
mod rdma;
mod socket;

use std::collections::HashMap;
use std::io;
use std::os::fd::RawFd;
use std::sync::Arc;
use std::time::Duration;

use quipu::PollEntry;
use quipu_nbd::uri::{Place, Uri};
use quipu_nbd::{Command, CommandFlags, Errno, Export, Extent, Handshake};

use super::session::Trouble;

pub(super) use buffer::{Buffer, Memory, unshare};

/// Requests that a connection carries at most.
const DEPTH: usize = 32;
/// Steps that a connection makes before the others have their turn.
const STEPS: usize = 256;

/// A request, and the memory that it needs.
#[derive(Debug)]
pub(super) struct Job {
    pub(super) command: Command,
    pub(super) flags: CommandFlags,
    pub(super) offset: u64,
    /// In bytes.
    pub(super) length: u64,
    pub(super) data: Data,
}

/// Memory of a request.
#[derive(Debug)]
pub(super) enum Data {
    None,
    /// The data of a write lie from this place on.
    Write(Arc<Buffer>, usize),
    /// Those of a read come to the beginning.
    Read(Buffer),
    /// What is allocated.
    Extents(Vec<Extent>),
}

/// A request that the server has replied to.
#[derive(Debug)]
pub(super) struct Done {
    /// The number that the caller gave it.
    pub(super) id: u64,
    pub(super) job: Job,
    pub(super) result: Result<(), Errno>,
}

/// What is ready at a descriptor.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Progress {
    /// The next call has more to do.
    More,
    /// Nothing until the descriptor says so.
    Idle,
}

/// The connection.
pub(super) trait Line: Send {
    fn export(&self) -> &Export;
    /// Whether the server tells what is allocated.
    fn has_status(&self) -> bool;
    /// How many requests it carries.
    fn outstanding(&self) -> usize;
    /// Whether it takes a request now.
    fn has_room(&self, job: &Job) -> bool;
    /// Makes a request, which `id` names. After an error it is among those that
    /// [`take_back`](Self::take_back) returns.
    fn submit(&mut self, id: u64, job: Job) -> Result<(), Trouble>;
    /// Sends as much as goes without waiting.
    fn push(&mut self) -> Result<(), Trouble>;
    /// Receives as much as is there, and sends as much as goes. `is_ready`: the descriptor has said so.
    fn advance(&mut self, is_ready: bool, done: &mut Vec<Done>) -> Result<Progress, Trouble>;
    /// What to watch while it is idle, and what for.
    fn watch(&mut self) -> Result<(RawFd, i16), Trouble>;
    /// Whether there is more to do of which the descriptor says nothing.
    fn is_ready(&mut self) -> bool {
        false
    }
    /// The requests that have no reply. The connection is of no use any more.
    fn take_back(&mut self) -> Vec<(u64, Job)>;
}

/// Events of poll(2).
pub(super) const POLLIN: i16 = 1;
pub(super) const POLLOUT: i16 = 4;

/// Connects to the URI's export, for requests in buffers of this memory. Blocks.
pub(super) fn open(uri: &Uri, memory: &Memory) -> Result<Box<dyn Line>, Trouble> {
    let wanted = Handshake::new(&uri.export);
    Ok(match (&uri.place, &memory.domain) {
        (Place::Rdma { host, port }, Some(domain)) => {
            Box::new(rdma::RdmaLine::open(domain, (host, *port), wanted)?)
        }
        _ => Box::new(socket::SocketLine::open(uri, wanted)?),
    })
}

/// Sleeps until a descriptor is ready, for `limit` at most. An adapter of this process makes progress
/// meanwhile.
pub(super) fn sleep(entries: &mut [PollEntry], limit: Option<Duration>) -> io::Result<()> {
    let device = super::rdma::opened().or_else(super::qpip::opened);
    match device {
        Some(device) => device.poll_descriptors(entries, limit).map_err(io::Error::other)?,
        None => quipu::poll_descriptors(entries, limit).map_err(io::Error::other)?,
    };
    Ok(())
}

/// Requests without a reply: the caller's number and the request, by their cookies.
type Jobs = HashMap<u64, (u64, Job)>;
