//! OpenSM's option file (`opensm.conf`): the options whose names begin with `qos`, and the `qos-ulps` section
//! of its policy file. All other options are somebody else's and are skipped.

use crate::config::{Config, ConfigError, Note, entries, lanes, number, sl2vl};
use crate::policy::{Rule, Ulp};
use crate::rate::parse_rate;

/// What an option says. The options of one kind of port go before those for all.
#[derive(Default)]
struct Options {
    max_vls: [Option<u8>; 2],
    high_limit: [Option<u8>; 2],
    high: [Option<Vec<crate::Entry>>; 2],
    low: [Option<Vec<crate::Entry>>; 2],
    sl2vl: [Option<[u8; 16]>; 2],
}

/// Groups of options: for all ports, and for those of channel adapters, of which this is one.
const PREFIXES: [(&str, Option<usize>); 5] = [
    ("qos_ca_", Some(1)),
    ("qos_rtr_", None),
    ("qos_sw0_", None),
    ("qos_swe_", None),
    ("qos_", Some(0)),
];

/// Sections of the policy file that are not used.
const OTHER_SECTIONS: [&str; 3] = ["port-groups", "qos-levels", "qos-match-rules"];

pub(crate) fn parse(text: &str, file: &str) -> Result<(Config, Vec<Note>), ConfigError> {
    let mut reader =
        Reader { options: Options::default(), config: Config::default(), notes: Vec::new() };
    let mut section: Option<(&str, usize)> = None;
    let error = |line, what| ConfigError { file: file.to_owned(), line, what };
    for (index, line) in text.lines().enumerate() {
        let number = index + 1;
        let line = line.split('#').next().unwrap_or_default().trim();
        if line.is_empty() {
            continue;
        }
        let taken = match section {
            Some((name, _)) if line.strip_prefix("end-") == Some(name) => {
                section = None;
                Ok(())
            }
            Some(("qos-ulps", _)) => reader.rule(line, number),
            Some(_) => Ok(()),
            None if line == "qos-ulps" => {
                section = Some(("qos-ulps", number));
                Ok(())
            }
            None => match OTHER_SECTIONS.iter().find(|&&name| name == line) {
                Some(name) => {
                    section = Some((name, number));
                    reader.note(number, format!("section {name} is not used: only qos-ulps is"));
                    Ok(())
                }
                None => reader.option(line, number),
            },
        };
        taken.map_err(|what| error(number, what))?;
    }
    if let Some((name, line)) = section {
        return Err(error(line, format!("section {name} has no end: `end-{name}` is missing")));
    }
    Ok(reader.finish())
}

struct Reader {
    options: Options,
    config: Config,
    notes: Vec<Note>,
}

impl Reader {
    fn note(&mut self, line: usize, what: String) {
        self.notes.push(Note { line, what });
    }

    fn rule(&mut self, line: &str, number: usize) -> Result<(), String> {
        let rule = Rule::parse(line)?;
        if rule.ulp == Ulp::Nothing {
            self.note(number, format!("`{}` matches nothing here", rule.text));
        }
        self.config.rules.push(rule);
        Ok(())
    }

    fn option(&mut self, line: &str, number: usize) -> Result<(), String> {
        let (key, value) = line.split_once(char::is_whitespace).unwrap_or((line, ""));
        let value = value.trim();
        match key {
            "qos" => {
                if !truth(value).ok_or_else(|| format!("`{value}` is neither TRUE nor FALSE"))? {
                    self.note(number, "qos is FALSE for OpenSM; its options are used here".into());
                }
                return Ok(());
            }
            "qos_policy_file" => return Ok(()),
            "quipu_rate" => {
                self.config.rate = parse_rate(value)
                    .ok_or_else(|| format!("`{value}` is no rate, such as 10Gbps"))?;
                return Ok(());
            }
            "quipu_qos_strict" => {
                self.config.strict =
                    truth(value).ok_or_else(|| format!("`{value}` is neither TRUE nor FALSE"))?;
                return Ok(());
            }
            _ => {}
        }
        let group = PREFIXES.iter().find_map(|(prefix, to)| Some((key.strip_prefix(prefix)?, to)));
        let Some((name, to)) = group else { return Ok(()) };
        if matches!(value, "" | "(null)" | "-1") {
            // "Use the default."
            return Ok(());
        }
        self.set(name, value, *to, number).map_err(|what| format!("{key}: {what}"))
    }

    /// Sets an option of a group; one of a group that is not used is read all the same.
    fn set(
        &mut self,
        name: &str,
        value: &str,
        to: Option<usize>,
        line: usize,
    ) -> Result<(), String> {
        let mut unused = Options::default();
        let (options, to) = match to {
            Some(to) => (&mut self.options, to),
            None => (&mut unused, 0),
        };
        let mut note = None;
        match name {
            "max_vls" => match number(value) {
                Some(0) => {}
                Some(count @ 1..=15) => options.max_vls[to] = Some(count as u8),
                _ => return Err(format!("`{value}` is no number of lanes: they are 1 to 15")),
            },
            "high_limit" => match number(value) {
                Some(limit @ 0..=255) => options.high_limit[to] = Some(limit as u8),
                _ => return Err(format!("`{value}` is no limit: they are 0 to 255")),
            },
            "vlarb_high" | "vlarb_low" => {
                let (entries, dropped) = entries(value)?;
                if dropped > 0 {
                    note = Some(format!("{dropped} entries after the 64th are not used"));
                }
                let table = if name == "vlarb_high" { &mut options.high } else { &mut options.low };
                table[to] = Some(entries);
            }
            "sl2vl" => {
                let mut table = Config::default().sl2vl;
                note = sl2vl(&lanes(value)?, &mut table);
                options.sl2vl[to] = Some(table);
            }
            _ => note = Some(format!("option qos_{name} is not known and not used")),
        }
        if let Some(what) = note {
            self.note(line, what);
        }
        Ok(())
    }

    fn finish(self) -> (Config, Vec<Note>) {
        fn chosen<T>([all, own]: [Option<T>; 2], default: T) -> T {
            own.or(all).unwrap_or(default)
        }
        let Self { options, config, notes } = self;
        let config = Config {
            max_vls: chosen(options.max_vls, config.max_vls),
            high_limit: chosen(options.high_limit, config.high_limit),
            high: chosen(options.high, config.high),
            low: chosen(options.low, config.low),
            sl2vl: chosen(options.sl2vl, config.sl2vl),
            ..config
        };
        (config, notes)
    }
}

fn truth(text: &str) -> Option<bool> {
    match text.to_ascii_lowercase().as_str() {
        "true" | "1" | "yes" | "on" => Some(true),
        "false" | "0" | "no" | "off" => Some(false),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Entry;

    fn read(text: &str) -> Result<(Config, Vec<Note>), String> {
        Config::parse(text, "opensm.conf").map_err(|error| error.to_string())
    }

    #[test]
    fn the_documented_example_is_read() {
        let text = "guid 0x0002c903\n# QoS options\nqos TRUE\nqos_max_vls 15\nqos_high_limit 6\n\
            qos_vlarb_high 0:4\nqos_vlarb_low 0:0,1:64,2:128,3:192,4:0,5:64,6:64,7:64\n\
            qos_sl2vl 0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,7\nqos_ca_high_limit 0x10\n\
            qos_swe_high_limit 3\nqos_rtr_sl2vl (null)\nqos_ca_max_vls 0\nqos_policy_file /x\n";
        let (config, notes) = read(text).unwrap();
        assert_eq!(config.high_limit, 16, "that of channel adapters");
        assert_eq!(config.high, [Entry { lane: 0, weight: 4 }]);
        assert_eq!(config.low[3], Entry { lane: 3, weight: 192 });
        assert_eq!(config.max_vls, 15);
        let starved = "no table gives VL4, VL8, VL9, VL10, VL11, VL12, VL13, VL14 a weight: service levels 4, 8, 9, 10, 11, 12, 13, 14 are starved, they never send";
        assert!(notes.iter().any(|note| note.what == starved), "{notes:?}");
    }

    #[test]
    fn errors_have_a_line_and_a_reason() {
        let check = |text: &str, expected: &str| assert_eq!(read(text).unwrap_err(), expected);
        check(
            "\nqos_max_vls 16",
            "opensm.conf:2: qos_max_vls: `16` is no number of lanes: they are 1 to 15",
        );
        check(
            "qos_vlarb_low 0:4,15:1",
            "opensm.conf:1: qos_vlarb_low: `15` is no data lane: they are 0 to 14",
        );
        check(
            "qos_vlarb_low 0:256",
            "opensm.conf:1: qos_vlarb_low: `256` is no weight: they are 0 to 255",
        );
        check(
            "qos_swe_vlarb_low 3",
            "opensm.conf:1: qos_swe_vlarb_low: `3` is no VL:WEIGHT, such as 0:64",
        );
        check(
            "qos_sl2vl 0,16",
            "opensm.conf:1: qos_sl2vl: `16` is no lane: they are 0 to 14, and 15 drops",
        );
        check(
            "qos_high_limit 256",
            "opensm.conf:1: qos_high_limit: `256` is no limit: they are 0 to 255",
        );
        check("qos maybe", "opensm.conf:1: `maybe` is neither TRUE nor FALSE");
        check(
            "qos-ulps\nsdp : 1",
            "opensm.conf:1: section qos-ulps has no end: `end-qos-ulps` is missing",
        );
        check(
            "qos-ulps\nsdp : 99\nend-qos-ulps",
            "opensm.conf:2: `99` is no service level: they are 0 to 15",
        );
        check("quipu_rate fast", "opensm.conf:1: `fast` is no rate, such as 10Gbps");
    }

    #[test]
    fn rules_come_in_a_section() {
        let text = "qos-ulps\n  default :0 # all\n  sdp, port-num 30000 : 1\n  srp, target-port-guid 0x1234 : 4\n\
            end-qos-ulps\nqos-levels\nanything\nend-qos-levels\nquipu_qos_strict TRUE\nquipu_rate 1Gbps\n";
        let (config, notes) = read(text).unwrap();
        assert_eq!(config.rules.len(), 3);
        assert!(config.strict);
        assert_eq!(config.rate, 1_000_000_000);
        assert_eq!(notes.len(), 2, "{notes:?}");
    }

    #[test]
    fn lists_of_another_length_are_noted() {
        let (config, notes) = read("qos_sl2vl 3,2").unwrap();
        assert_eq!(config.sl2vl[..3], [3, 2, 2]);
        assert!(notes[0].what.contains("2 numbers, not 16"), "{notes:?}");
        let long = vec!["0:1"; 70].join(",");
        let (config, notes) = read(&format!("qos_vlarb_high {long}")).unwrap();
        assert_eq!(config.high.len(), 64);
        assert!(notes[0].what.contains("6 entries after the 64th"), "{notes:?}");
    }
}
