//! The adapter between simulated peers. One program, since each would compile the whole adapter anew.

mod acknowledgements;
mod audit;
mod completions;
mod conformance;
mod counters;
mod crc;
mod datagrams;
mod departures;
mod fates;
mod faults;
mod gathering;
mod hostile;
mod intruders;
mod lids;
mod operations;
mod pair;
mod plain;
mod qpip;
mod raw;
mod revocation;
mod simulated;
mod timing;
mod turns;
mod unordered;
mod unreliable;
mod xrc;
