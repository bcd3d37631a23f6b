//! libsplitc: the run-time library of Split-C programs (`docs/split-c.md`).
//!
//! The compiler links programs with it; the header `split-c.h` calls the functions of [`calls`]. A program
//! has
//! one thread that communicates: the one that `main` runs in.
//!
//! | module | is |
//! |---|---|
//! | `calls` | the C functions |
//! | `runtime` | the state of this process, start and end, waiting |
//! | `segment` | the symmetric memory: at one address in all processes, mapped by those of this host |
//! | `link` | messages to other processes, by Active Messages: all that is not in mapped memory |
//! | `registered` | memory that the adapter writes to and reads from without a copy |
//! | `collective` | barriers, reductions, broadcasts |
//! | `heap` | which pieces of the symmetric memory are in use |
//!
//! # Trust
//!
//! The processes of a job are one program of one user: each may read and write all memory of the others,
//! which
//! is what the language is. Processes of other jobs cannot: endpoints have tags that only the job knows.

pub mod calls;
mod collective;
mod heap;
mod link;
mod registered;
mod runtime;
mod segment;
