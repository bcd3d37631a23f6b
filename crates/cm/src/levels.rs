//! Service levels by service ID, as the rules of quality of service say.

use std::ops::RangeInclusive;

use crate::Cm;

/// Ranges of service IDs with their levels; the first that holds an ID counts.
#[derive(Debug, Default)]
pub(crate) struct Levels(Vec<(RangeInclusive<u64>, u8)>);

impl Levels {
    /// The level of a service; 0 if no range holds it.
    pub(crate) fn of(&self, service: Option<u64>) -> u8 {
        let holds = |service: u64| self.0.iter().find(|(ids, _)| ids.contains(&service));
        service.and_then(holds).map_or(0, |&(_, level)| level & 15)
    }
}

impl Cm {
    /// Says which service levels paths have from now on, by ranges of service IDs (IBA A11: the port space in
    /// the upper bits, the port in the lower 16). A traffic class that a program names counts more.
    pub fn set_levels(&mut self, levels: Vec<(RangeInclusive<u64>, u8)>) {
        self.own.levels = Levels(levels);
    }
}
