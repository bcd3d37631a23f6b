//! Starting the processes of a parallel program, and finding one's peers.
//!
//! | type | does |
//! |---|---|
//! | [`Job`] | in a rank: tells its rank and the number of ranks, and exchanges small values with the others |
//! | [`spmd::run`] | in the launcher, `quipu spmd`: starts the ranks and waits for them |
//! | [`pmi::Server`], [`pmi::Line`], [`pmi::Frame`] | the text protocols PMI-1 and PMI-2, without I/O |
//!
//! [`Job::from_env`] finds the launcher that started the process: `quipu spmd`, `mpiexec.hydra`, `srun`
//! (all by PMI-1 or PMI-2) or `mpirun` (by PMIx). A process that no launcher started is a job of one rank.
//!
//! There is no daemon. `quipu spmd` waits for its ranks. On other hosts one process of it, which ssh starts,
//! does the same for the ranks there, and ends with them.
#![deny(unsafe_code)]

mod error;
mod job;
pub mod pmi;
#[allow(unsafe_code)]
mod pmix;
pub mod spmd;
#[allow(unsafe_code)]
mod sys;

pub use error::LaunchError;
pub use job::{Job, Launcher};
