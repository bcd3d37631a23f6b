//! Two ends in simulated time, joined by messages in order and RDMA reads.

mod bench;
mod hostile;
mod random;
mod stories;
