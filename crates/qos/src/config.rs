//! The configuration of a port's quality of service, checked as a whole.

use std::ops::RangeInclusive;

use crate::arbiter::{Entry, LANES, NO_LIMIT};
use crate::policy::{Rule, Service, levels_of_ids, service_level};

/// What is wrong with a configuration, and where.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{file}:{line}: {what}")]
pub struct ConfigError {
    /// The file, as the user names it.
    pub file: String,
    /// The line, from 1.
    pub line: usize,
    /// What is wrong, and what would be right.
    pub what: String,
}

/// Something that is accepted, and that its author had better know.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Note {
    /// The line that it is about, from 1; 0: all of the file.
    pub line: usize,
    /// What it is.
    pub what: String,
}

/// A port's rate, lanes and rules.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// Bits per second that the port sends; 0: no limit.
    pub rate: u64,
    /// Whether weights are strict, as InfiniBand's are: what a packet takes beyond an entry's weight is
    /// forgotten.
    pub strict: bool,
    /// Data lanes, 1 to 15: VL0 and those that follow it.
    pub max_vls: u8,
    /// Units of 4096 octets that the high priority table may send before the low one sends a packet. 0: one
    /// packet; 255: no limit.
    pub high_limit: u8,
    /// The high priority table.
    pub high: Vec<Entry>,
    /// The low priority table.
    pub low: Vec<Entry>,
    /// The lane of each service level. 15: its packets are dropped.
    pub sl2vl: [u8; 16],
    /// The DSCP that packets of each service level leave the host with; `None`: 8 x the service level, below
    /// 8.
    pub dscp: [Option<u8>; 16],
    /// Bits per second of each service level in one process; 0: no limit.
    pub sl_rates: [u64; 16],
    /// Which service gets which service level; the first that matches.
    pub rules: Vec<Rule>,
}

/// The lane of a service level whose packets are dropped.
const DROP: u8 = 15;

impl Default for Config {
    /// OpenSM's defaults: VL0 alone has a weight in the high priority table, all others in the low one.
    fn default() -> Self {
        let lanes = || 0..LANES as u8;
        let weigh = |lane: u8, first: bool| Entry {
            lane,
            weight: if first == (lane == 0) { 4 } else { 0 },
        };
        let mut sl2vl = [7; 16];
        for lane in lanes() {
            sl2vl[usize::from(lane)] = lane;
        }
        Self {
            rate: 0,
            strict: false,
            max_vls: LANES as u8,
            high_limit: 0,
            high: lanes().map(|lane| weigh(lane, true)).collect(),
            low: lanes().map(|lane| weigh(lane, false)).collect(),
            sl2vl,
            dscp: [None; 16],
            sl_rates: [0; 16],
            rules: Vec::new(),
        }
    }
}

impl Config {
    /// Reads a file: OpenSM's options (`opensm.conf`, also with a `qos-ulps` section), or TOML if some line
    /// has a `key = value`. With what its author had better know.
    ///
    /// # Errors
    /// The first line that makes no sense; then all of the file is refused.
    pub fn parse(text: &str, file: &str) -> Result<(Self, Vec<Note>), ConfigError> {
        const LONGEST: usize = 1 << 20;
        if text.len() > LONGEST {
            let what = "the file is longer than 1 MB: it is no QoS configuration".to_owned();
            return Err(ConfigError { file: file.to_owned(), line: 1, what });
        }
        let (config, mut notes) = match is_toml(text) {
            true => crate::tables::parse(text, file)?,
            false => crate::opensm::parse(text, file)?,
        };
        notes.extend(config.notes());
        Ok((config, notes))
    }

    /// The lane of a service level; `None` if its packets are dropped. A lane that the port does not have
    /// stands for one that it has, as in OpenSM.
    #[must_use]
    pub fn lane_of(&self, sl: u8) -> Option<u8> {
        match self.sl2vl[usize::from(sl & 15)] {
            DROP.. => None,
            lane => Some(lane % self.max_vls.clamp(1, LANES as u8)),
        }
    }

    /// The service level that the rules give to a service; `None` without a rule for it.
    #[must_use]
    pub fn service_level(&self, service: &Service<'_>) -> Option<u8> {
        service_level(&self.rules, service)
    }

    /// The service levels that the rules give to connections of a program by their service IDs: the first
    /// range that holds an ID counts. Default rules are not among them.
    #[must_use]
    pub fn levels_of_ids(&self, program: &str) -> Vec<(RangeInclusive<u64>, u8)> {
        levels_of_ids(&self.rules, program)
    }

    /// The DSCP of packets of a service level, 0 to 63.
    #[must_use]
    pub fn dscp_of(&self, sl: u8) -> u8 {
        let own = if sl < 8 { 8 * sl } else { 0 };
        self.dscp[usize::from(sl & 15)].unwrap_or(own)
    }

    /// Lanes that some service level uses, as a bit mask.
    #[must_use]
    pub fn used_lanes(&self) -> u16 {
        (0..16).filter_map(|sl| self.lane_of(sl)).fold(0, |mask, lane| mask | 1 << lane)
    }

    /// Lanes that no entry with a weight serves, though service levels use them.
    #[must_use]
    pub fn starved_lanes(&self) -> u16 {
        let entries = self.high.iter().chain(&self.low).filter(|entry| entry.weight > 0);
        let served = entries.fold(0u16, |mask, entry| mask | 1 << entry.lane);
        self.used_lanes() & !served
    }

    /// What is accepted, and surprising.
    #[must_use]
    pub fn notes(&self) -> Vec<Note> {
        let mut notes = Vec::new();
        let mut note = |what: String| notes.push(Note { line: 0, what });
        let starved: Vec<u8> =
            (0..LANES as u8).filter(|lane| self.starved_lanes() & 1 << lane != 0).collect();
        if !starved.is_empty() {
            let lanes: Vec<_> = starved.iter().map(|lane| format!("VL{lane}")).collect();
            let levels =
                (0..16u8).filter(|&sl| self.lane_of(sl).is_some_and(|it| starved.contains(&it)));
            let levels: Vec<_> = levels.map(|sl| sl.to_string()).collect();
            note(format!(
                "no table gives {} a weight: service levels {} are starved, they never send",
                lanes.join(", "),
                levels.join(", ")
            ));
        }
        let high = self.high.iter().filter(|entry| entry.weight > 0);
        let high = high.fold(0u16, |mask, entry| mask | 1 << entry.lane);
        if self.high_limit == NO_LIMIT && high != 0 && self.used_lanes() & !high != 0 {
            note(
                "high_limit 255 has no limit: busy lanes of the high table starve the others"
                    .into(),
            );
        }
        for sl in (0..16).filter(|&sl| self.lane_of(sl).is_none()) {
            note(format!("service level {sl} has VL15: its packets are dropped"));
        }
        for sl in 0..16u8 {
            let lane = self.sl2vl[usize::from(sl)];
            if (self.max_vls..DROP).contains(&lane) {
                let used = lane % self.max_vls;
                note(format!(
                    "service level {sl} has VL{lane}, and the port has {} lanes: VL{used} stands for it",
                    self.max_vls
                ));
            }
        }
        notes
    }

    /// The configuration as TOML, which [`parse`](Self::parse) reads.
    #[must_use]
    pub fn to_toml(&self) -> String {
        crate::tables::write(self)
    }
}

/// Whether some line is a `key = value` or a table of TOML.
fn is_toml(text: &str) -> bool {
    text.lines().map(str::trim).any(|line| {
        let key = line.split('=').next().unwrap_or_default().trim();
        let is_key = |c: char| c.is_ascii_alphanumeric() || "_-.\"".contains(c);
        line.contains('=') && !key.is_empty() && key.chars().all(is_key)
    })
}

/// The numbers of a table such as `0:64,1:128`.
///
/// # Errors
/// What is wrong with it.
pub(crate) fn entries(text: &str) -> Result<(Vec<Entry>, usize), String> {
    let mut entries = Vec::new();
    let mut dropped = 0;
    for pair in text.split(',').map(str::trim).filter(|pair| !pair.is_empty()) {
        let Some((lane, weight)) = pair.split_once(':') else {
            return Err(format!("`{pair}` is no VL:WEIGHT, such as 0:64"));
        };
        let lane = match number(lane) {
            Some(lane @ 0..=14) => lane as u8,
            _ => return Err(format!("`{}` is no data lane: they are 0 to 14", lane.trim())),
        };
        let weight = match number(weight) {
            Some(weight @ 0..=255) => weight as u8,
            _ => return Err(format!("`{}` is no weight: they are 0 to 255", weight.trim())),
        };
        if entries.len() == crate::arbiter::MAX_ENTRIES {
            dropped += 1;
        } else {
            entries.push(Entry { lane, weight });
        }
    }
    Ok((entries, dropped))
}

/// A number, decimal or hexadecimal.
pub(crate) fn number(text: &str) -> Option<u64> {
    let text = text.trim();
    match text.strip_prefix("0x").or_else(|| text.strip_prefix("0X")) {
        Some(digits) if !digits.starts_with('+') => u64::from_str_radix(digits, 16).ok(),
        Some(_) => None,
        None if text.starts_with('+') => None,
        None => text.parse().ok(),
    }
}

/// The lanes of service levels such as `0,1,2`, as many as there are.
///
/// # Errors
/// What is wrong with them.
pub(crate) fn lanes(text: &str) -> Result<Vec<u8>, String> {
    let mut lanes = Vec::new();
    for word in text.split(',').map(str::trim).filter(|word| !word.is_empty()) {
        match number(word) {
            Some(lane @ 0..=15) => lanes.push(lane as u8),
            _ => return Err(format!("`{word}` is no lane: they are 0 to 14, and 15 drops")),
        }
    }
    Ok(lanes)
}

/// The table of lanes, and what to note of it: a short list leaves the rest as it is, a long one is cut.
pub(crate) fn sl2vl(lanes: &[u8], into: &mut [u8; 16]) -> Option<String> {
    for (place, &lane) in into.iter_mut().zip(lanes) {
        *place = lane;
    }
    let count = lanes.len();
    match count {
        16 => None,
        0..16 => Some(format!("sl2vl has {count} numbers, not 16: the others stay as they are")),
        _ => Some(format!("sl2vl has {count} numbers: those after the 16th are not used")),
    }
}
