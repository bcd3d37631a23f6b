//! The papers and their experiments. To add one: its data in `papers/NAME.toml`, its experiments in a module
//! here, and a line in [`papers`].

mod pool;
mod qos;
mod qpip;
mod sinic;
mod sockets;
mod via;

use anyhow::{Result, bail};

use crate::data::{Paper, embedded};
use crate::experiment::Experiment;

/// A paper with its experiments.
pub struct Entry {
    /// The data.
    pub paper: Paper,
    /// Makes its experiments.
    pub experiment: fn() -> Box<dyn Experiment>,
}

/// All papers.
///
/// # Errors
///
/// An embedded file is wrong; a test makes sure that none is.
pub fn papers() -> Result<Vec<Entry>> {
    let qos = embedded("qos", include_str!("../../papers/qos.toml"))?;
    let qpip = embedded("qpip", include_str!("../../papers/qpip.toml"))?;
    let sinic = embedded("sinic", include_str!("../../papers/sinic.toml"))?;
    let sockets = embedded("sockets", include_str!("../../papers/sockets.toml"))?;
    let via = embedded("via", include_str!("../../papers/via.toml"))?;
    Ok(vec![
        Entry { paper: qos, experiment: || Box::<qos::Qos>::default() },
        Entry { paper: qpip, experiment: || Box::<qpip::Qpip>::default() },
        Entry { paper: sinic, experiment: || Box::<sinic::Sinic>::default() },
        Entry { paper: sockets, experiment: || Box::<sockets::Sockets>::default() },
        Entry { paper: via, experiment: || Box::<via::Via>::default() },
    ])
}

/// The paper with a name.
///
/// # Errors
///
/// There is none of this name; the error lists those that there are.
pub fn find(name: &str) -> Result<Entry> {
    let mut all = papers()?;
    let known: Vec<_> = all.iter().map(|entry| entry.paper.id.clone()).collect();
    match known.iter().position(|id| id == name) {
        Some(index) => Ok(all.swap_remove(index)),
        None => bail!("there is no paper \"{name}\": give one of {}", known.join(", ")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_embedded_paper_is_well_formed() {
        for entry in papers().unwrap() {
            assert!(!entry.paper.figures.is_empty());
            assert!(!entry.paper.facts.is_empty());
            assert!(find(&entry.paper.id).is_ok());
        }
        assert!(find("none").err().unwrap().to_string().contains("qpip"));
    }
}
