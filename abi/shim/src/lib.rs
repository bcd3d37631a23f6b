//! A preload library that answers for the files of the adapter that no kernel driver made:
//! `/dev/infiniband/quipu0` and what lies below `/sys/class/infiniband/quipu0` and
//! `/sys/class/infiniband_verbs/quipu0`; and for `/dev/infiniband/uverbs0`, where there is none.
//!
//! Programs look there beside the verbs calls: UCX insists on the character device, NCCL and MPI
//! read the port's GID attributes, scripts list folders. The functions of libc that take a path are
//! defined here (`files`, `stats`, `folders`); a path that is not ours, which a look at its first
//! bytes tells, goes on to the real function at once (`place`). What is ours is described by `tree`.
//!
//! * The device is `/dev/null` to whoever opens it: readable, writable, a character device.
//! * A file of /sys is a memfd with its text; a folder is listed from `tree`, by its path or by a
//!   descriptor, which is a memfd too (`descriptor`). It can be the working directory (`working`).
//! * A program that loads the system's libibverbs or librdmacm by its whole path gets Quipu's (`loader`).
//! * Nothing is written to any disk, and nothing outlives the process.
//!
//! These functions run before main, in signal handlers, and in forked children, so they take no
//! lock and allocate nothing, except where a folder of ours is opened, and where the engine is asked
//! (`live`), once, when a program first looks at a device or its folders. They cannot pass the panic
//! wall of `quipu_cabi` for that reason; they are written so that nothing in them can panic.
#![no_std]

extern crate std;

mod descriptor;
mod files;
mod folders;
mod live;
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
mod loader;
mod patterns;
mod place;
mod real;
mod stats;
mod tree;
mod working;
