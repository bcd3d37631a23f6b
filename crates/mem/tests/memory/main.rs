//! Regions and rings against models and threads. One program, which is linked once.

mod regions_model;
mod rings;
mod threads;
mod timing;
