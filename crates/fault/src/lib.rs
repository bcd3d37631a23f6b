//! Faults for those who write RDMA programs: a plan says what fails, where and when, and the injector
//! decides for each call of the program what becomes of it.
//!
//! Nothing is done here: the injector is told of calls and of the time, and answers with what is to
//! happen ([`Effect`]). Decisions follow from the plan, its seed and the sequence of calls alone, so that
//! the same program meets the same faults again. It contains no I/O, no clock and no unsafe code.
//!
//! | module | is |
//! |---|---|
//! | `plan` | the plan file, checked |
//! | `words` | the names that plans use: calls, statuses, events, error numbers |
//! | `injector` | what is matched, counted, drawn and decided |
//! | `record` | the log of what was injected, and how it is repeated |
//!
//! The plan's reference is `docs/faults.md`.
#![forbid(unsafe_code)]

mod injector;
mod plan;
mod raw;
mod reader;
mod record;
mod units;
mod words;

pub use injector::{Effect, Injector, Occasion, QpRef, Strike};
pub use plan::{Fault, Filter, Inject, Plan, PlanError, Process, Schedule, Trigger};
pub use record::{Header, Record, Replay, ReplayError, json};
pub use words::{Call, CmEvent, Errno, EventKind, Opcode, Side};
