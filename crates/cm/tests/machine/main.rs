//! Connection management between simulated hosts.

mod abuse;
mod bare;
mod common;
mod connect;
mod events;
mod faults;
mod lookup;
mod parameters;
mod plain;
mod states;
