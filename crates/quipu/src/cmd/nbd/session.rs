//! A client's session with a server: one request at a time.

use std::io;
use std::time::Duration;

use quipu_nbd::uri::{Place, Uri};
use quipu_nbd::{Command, CommandFlags, Errno, Export, Extent, Handshake, ProtocolError};

use super::rdma;
use super::socket;
use super::tls;

/// How long a server may take for each step of the negotiation.
pub(super) const PATIENCE: Duration = Duration::from_secs(20);

/// Why a session failed.
#[derive(Debug, thiserror::Error)]
pub(super) enum Trouble {
    #[error("{0}")]
    Io(#[from] io::Error),
    #[error("{0}")]
    Protocol(#[from] ProtocolError),
    #[error("{0}")]
    QueuePair(#[from] quipu::Error),
    #[error("the server closed the connection")]
    Closed,
    #[error("the server did not reply within {0} s")]
    Silent(u64),
    #[error("the disk has another size than before the connection was lost")]
    Changed,
    #[error("{0}")]
    Tls(#[from] tls::TlsError),
    #[error("{0}")]
    Adapter(String),
    #[error("{0} is not supported by this command yet")]
    Unsupported(&'static str),
}

impl From<Trouble> for io::Error {
    fn from(trouble: Trouble) -> Self {
        match trouble {
            Trouble::Io(error) => error,
            other => Self::other(other),
        }
    }
}

/// What became of a request: the session goes on after an error of the disk, but not after a trouble.
pub(super) type Outcome<T> = Result<Result<T, Errno>, Trouble>;

/// The session.
pub(super) enum Session {
    Socket(Box<socket::Session>),
    Rdma(Box<rdma::Session>),
}

impl Session {
    /// Connects and begins with the URI's export. `patience`: for each step of the server.
    pub(super) fn open(uri: &Uri, patience: Duration) -> Result<Self, Trouble> {
        let wanted = Handshake::new(&uri.export);
        Ok(match &uri.place {
            Place::Rdma { host, port } => {
                Self::Rdma(Box::new(rdma::Session::open((host, *port), wanted, patience)?))
            }
            _ => Self::Socket(Box::new(socket::Session::open(uri, wanted, patience)?)),
        })
    }

    /// How long a reply may take from now on.
    pub(super) fn set_patience(&mut self, patience: Duration) -> io::Result<()> {
        match self {
            Self::Socket(session) => session.set_patience(patience),
            Self::Rdma(session) => {
                session.set_patience(patience);
                Ok(())
            }
        }
    }

    /// The names and descriptions of a server's exports.
    pub(super) fn list(uri: &Uri) -> Result<Vec<(String, String)>, Trouble> {
        let wanted = Handshake { list: true, ..Handshake::new(&uri.export) };
        match &uri.place {
            Place::Rdma { host, port } => rdma::Session::list((host, *port), wanted),
            _ => socket::Session::list(uri, wanted),
        }
    }

    /// The export.
    pub(super) fn export(&self) -> &Export {
        match self {
            Self::Socket(session) => session.export(),
            Self::Rdma(session) => session.export(),
        }
    }

    /// Whether the server tells what is allocated.
    pub(super) fn has_status(&self) -> bool {
        match self {
            Self::Socket(session) => session.has_status(),
            Self::Rdma(session) => session.has_status(),
        }
    }

    /// A request without data.
    pub(super) fn order(
        &mut self,
        command: Command,
        flags: CommandFlags,
        offset: u64,
        length: u64,
    ) -> Outcome<()> {
        match self {
            Self::Socket(session) => session.order(command, flags, offset, length),
            Self::Rdma(session) => session.order(command, flags, offset, length),
        }
    }

    /// Reads.
    pub(super) fn read(&mut self, offset: u64, data: &mut [u8]) -> Outcome<()> {
        match self {
            Self::Socket(session) => session.read(offset, data),
            Self::Rdma(session) => session.read(offset, data),
        }
    }

    /// Writes.
    pub(super) fn write(&mut self, offset: u64, data: &[u8]) -> Outcome<()> {
        match self {
            Self::Socket(session) => session.write(offset, data),
            Self::Rdma(session) => session.write(offset, data),
        }
    }

    /// What is allocated, from `offset` on.
    pub(super) fn extents(&mut self, offset: u64, length: u64) -> Outcome<Vec<Extent>> {
        match self {
            Self::Socket(session) => session.extents(offset, length),
            Self::Rdma(session) => session.extents(offset, length),
        }
    }
}
