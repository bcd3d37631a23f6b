//! The C functions.

mod data;
mod descriptors;
mod files;
mod programs;
mod wait;
