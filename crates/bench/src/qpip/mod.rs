//! QPIP compared with the kernel's sockets on one link: figures 3 and 4 and tables 1 to 3 of the paper.
//!
//! A process in a network namespace of its own, the *stage*, has both ends of every link: two threads, each
//! with a processor. Adapters in processes of their own are started for each slice. It is told what to
//! measure, slice by slice, in lines of JSON, as the workers are.
//!
//! | module | is |
//! |---|---|
//! | `model` | contenders, what is measured, and what came out |
//! | `run` | the rounds; starts the stage |
//! | `stage` | the process; a slice |
//! | `space` | its namespaces and their interfaces |
//! | `own_process` | an adapter in a process of its own |
//! | `goodput` | the rounds over a lossy, long path, and their target |
//! | `path`, `relay` | that path, who sends over it, and what loses and delays its packets |
//! | `idle` | what idle connections cost, without a link |
//! | `occupancy` | the stages of the adapter, without a link |
//! | `queue_pair`, `socket`, `smoltcp` | the ends |
//! | `targets` | what is to be reached |

mod goodput;
mod idle;
mod model;
mod occupancy;
mod own_process;
mod path;
mod queue_pair;
mod relay;
mod run;
#[cfg(feature = "smoltcp")]
mod smoltcp;
mod socket;
mod space;
mod stage;
mod targets;

pub(crate) use goodput::{
    Goodput, PlannedGoodput, Sender, judge as judge_goodput, run as run_goodput,
};
pub(crate) use idle::{IdleCost, measure as idle};
pub(crate) use model::{
    CONTENDERS, Figure, KERNEL, Load, OWN_PROCESS, PlannedQpip, QPIP, Row, Rows,
};
pub(crate) use occupancy::{COLUMNS, StageCost, measure as occupancy};
pub(crate) use own_process::main as adapter;
pub(crate) use run::run;
pub(crate) use space::settle;
pub(crate) use stage::main;
pub(crate) use targets::{judge, program_time};
