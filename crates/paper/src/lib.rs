//! The experiments of the five papers that Quipu unites: published values next to ours.
//!
//! A paper is a file of data (`papers/*.toml`): its figures, and the *facts* that it states about each, with
//! the published value, its unit, and how our value is judged. An *experiment* ([`Experiment`]) measures or
//! simulates one figure and gives values for its facts. [`compare`](fn@compare) puts both next to each other,
//! [`report`] writes the result as text, JSON and an HTML page that opens without a network.
//!
//! | module | is |
//! |---|---|
//! | [`data`] | papers, figures and facts as values; the embedded files |
//! | [`experiment`] | what an experiment gets and returns |
//! | [`mod@compare`] | published, ours, ratio, verdict |
//! | [`ladder`] | what is checked of the simulated hosts themselves |
//! | [`report`] | the results as text, JSON and HTML |
//! | `papers` | the experiments, one module per paper |
//!
//! This crate measures nothing itself: experiments start `quipu` subcommands or call the simulator.

#![forbid(unsafe_code)]

pub mod compare;
pub mod data;
pub mod experiment;
pub mod ladder;
pub mod ns3;
mod papers;
pub mod report;

pub use compare::{Comparison, LiveComparison, Verdict, compare};
pub use data::{Fact, Figure, Judgement, Live, Paper, Role};
pub use experiment::{Environment, Experiment, Measured};
pub use papers::{find, papers};
