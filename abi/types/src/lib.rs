//! The structures of the verbs C interface, and the private interface between the facades and the
//! engine.
//!
//! Names, order and widths follow `infiniband/verbs.h` and `rdma/rdma_cma.h`; the man pages
//! `ibv_*(3)` and `rdma_*(3)` say what each field means, so fields carry no documentation of their
//! own here. The layout is the newest one that is published: structures that grew since rdma-core
//! 44 carry the newer fields at their end (or, in [`verbs_context`], at their beginning).
//! `tests/layouts` pins sizes and offsets.
//!
//! This crate holds data only: it calls nothing and owns nothing.
#![no_std]
#![forbid(unsafe_code)]
#![allow(non_camel_case_types, non_snake_case, missing_docs)]

#[macro_use]
mod consts;
#[macro_use]
mod unsupported;

mod attr;
mod cm;
mod context;
mod device;
mod engine;
mod object;
mod raw;
mod rdma_cma;
mod work;

pub use attr::*;
pub use cm::*;
pub use consts::*;
pub use context::*;
pub use device::*;
pub use engine::*;
pub use object::*;
pub use raw::*;
pub use rdma_cma::*;
pub use work::*;
