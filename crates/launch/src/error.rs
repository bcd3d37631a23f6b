//! What can fail when a rank looks for its peers.

use std::io;

/// Why a rank cannot join its job, or exchange values with it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LaunchError {
    /// A variable that a launcher sets has a value that makes no sense.
    #[error(
        "the variable {name} is {value:?}, which is not {expected}; a launcher sets it: do not set it by hand"
    )]
    Variable {
        /// Its name.
        name: &'static str,
        /// What it is.
        value: String,
        /// What it should be.
        expected: &'static str,
    },
    /// The process was started by a launcher whose protocol is not available.
    #[error(
        "this process is one of several that {launcher} started, but cannot find the others: {why}; {remedy}"
    )]
    NoProtocol {
        /// Which launcher.
        launcher: &'static str,
        /// Why it cannot.
        why: String,
        /// What to do.
        remedy: &'static str,
    },
    /// [`crate::Job::from_env`] was called a second time.
    #[error("this process has joined its job already; call Job::from_env once, and share the Job")]
    AlreadyJoined,
    /// The connection to the launcher failed.
    #[error("the connection to the launcher failed: {0}; the launcher has probably ended")]
    Io(#[from] io::Error),
    /// The launcher sent something that is not of its protocol.
    #[error("the launcher sent {got:?} where {expected} was expected")]
    Protocol {
        /// What came, cut to 200 bytes.
        got: String,
        /// What should have come.
        expected: &'static str,
    },
    /// The launcher refused a call.
    #[error("the launcher refused {call}: {why}")]
    Refused {
        /// The call.
        call: &'static str,
        /// Its answer.
        why: String,
    },
    /// No rank has put this key.
    #[error("rank {rank} has put no value {key:?}; ranks see each other's values after a fence")]
    NoValue {
        /// Whose value.
        rank: u32,
        /// The key.
        key: String,
    },
    /// The key or the value does not fit what all launchers take.
    #[error("the key {key:?} cannot be put: {why}")]
    BadKey {
        /// The key.
        key: String,
        /// Why.
        why: &'static str,
    },
    /// A call of PMIx failed.
    #[error("{call} of PMIx failed with status {status}")]
    Pmix {
        /// The call.
        call: &'static str,
        /// What it returned.
        status: i32,
    },
}
