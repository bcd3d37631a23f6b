//! The launcher: starts the ranks of a job here and on other hosts, and ends with them.
//!
//! | module | does |
//! |---|---|
//! | `hosts` | which rank runs on which host |
//! | `node` | the ranks of one host: starts them, moves their bytes, reaps them |
//! | `remote` | the ranks of another host, through ssh and a process of this program there |
//! | `frame` | the messages between the two, as bytes |
//! | `launcher` | all of it together: PMI, output, the exit code, the end |

mod frame;
mod hosts;
mod launcher;
mod node;
mod output;
mod remote;

use std::ffi::OsString;
use std::io;

pub use frame::{FrameError, Message, MessageBuffer, Start, Stream};
pub use hosts::{Host, HostsError, parse_host_file, parse_hosts, place};
pub use launcher::run;
pub use remote::serve;

/// A job to start.
#[derive(Clone, Debug)]
pub struct Options {
    /// Number of ranks; by default one for each slot of the hosts.
    pub ranks: Option<u32>,
    /// The hosts, in the order of their ranks; none means this machine.
    pub hosts: Vec<Host>,
    /// The command that runs a command line on a host: `SSH HOST COMMAND`.
    pub ssh: Vec<String>,
    /// The `quipu` command on other hosts.
    pub quipu: String,
    /// Whether each line of output begins with its rank.
    pub label: bool,
    /// Variables for ranks on other hosts, in addition to those of Quipu: a name, or `NAME=VALUE`.
    pub variables: Vec<String>,
    /// The program and its arguments.
    pub program: Vec<OsString>,
}

/// Why a job cannot be started.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SpmdError {
    /// The hosts do not fit the number of ranks.
    #[error(transparent)]
    Hosts(#[from] HostsError),
    /// The system refuses something.
    #[error("{what}: {source}")]
    System {
        /// What.
        what: String,
        /// Why.
        source: io::Error,
    },
}

/// The host on which ranks run without ssh.
pub(crate) const THIS_HOST: &str = "localhost";
