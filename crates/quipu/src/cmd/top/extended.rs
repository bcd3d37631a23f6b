//! What `quipu top` shows of programs that use extended sockets.

use std::fmt::Write as _;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use quipu_iwsock::counters::{COUNTERS, DESCRIPTIONS, folder, parse};
use serde_json::{Map, Value, json};

/// A process that has switched a socket to iWARP.
#[derive(Clone, Debug)]
pub(super) struct Process {
    number: u32,
    program: String,
    counters: [u64; COUNTERS],
}

/// All of this user, by number. Files of processes that have ended are removed.
pub(super) fn processes() -> Vec<Process> {
    let user = fs::metadata("/proc/self").map(|data| data.uid()).unwrap_or_default();
    let mut processes = Vec::new();
    for entry in fs::read_dir(folder(user)).into_iter().flatten().flatten() {
        let Some(number) = entry.file_name().to_str().and_then(|name| name.parse().ok()) else {
            continue;
        };
        let proc = Path::new("/proc").join(entry.file_name());
        if !proc.exists() {
            let _ = fs::remove_file(entry.path());
            continue;
        }
        let program = fs::read_to_string(proc.join("comm")).unwrap_or_default();
        if let Some(counters) = fs::read(entry.path()).ok().and_then(|file| parse(&file)) {
            processes.push(Process { number, program: program.trim_end().to_owned(), counters });
        }
    }
    processes.sort_by_key(|process| process.number);
    processes
}

/// One object for each process, for scripts.
pub(super) fn json(processes: &[Process]) -> Vec<Value> {
    let one = |process: &Process| {
        let named = DESCRIPTIONS.iter().zip(process.counters);
        let counters: Map<String, Value> =
            named.map(|((name, ..), value)| ((*name).into(), value.into())).collect();
        json!({
            "process": process.number,
            "program": process.program,
            "extended_sockets": counters,
        })
    };
    processes.iter().map(one).collect()
}

/// The part of the page for Prometheus.
pub(super) fn page(processes: &[Process]) -> String {
    let mut out = String::new();
    if processes.is_empty() {
        return out;
    }
    for (at, (name, kind, help)) in DESCRIPTIONS.iter().enumerate() {
        let name = format!("quipu_extended_sockets_{name}");
        let _ = writeln!(out, "# HELP {name} {help}\n# TYPE {name} {kind}");
        for process in processes {
            let program = process.program.replace('\\', "\\\\").replace('"', "\\\"");
            let labels = format!("process=\"{}\",program=\"{program}\"", process.number);
            let _ = writeln!(out, "{name}{{{labels}}} {}", process.counters[at]);
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counters_are_shown_by_their_names() {
        let counters = std::array::from_fn(|at| at as u64);
        let processes = [Process { number: 7, program: "a \"b\"".into(), counters }];
        let all = json(&processes);
        assert_eq!(all[0]["extended_sockets"]["sends_total"], 2);
        assert_eq!((&all[0]["process"], all.len()), (&json!(7), 1));
        let page = page(&processes);
        let labels = "{process=\"7\",program=\"a \\\"b\\\"\"}";
        assert!(page.contains(&format!("\nquipu_extended_sockets_failed_total{labels} 8\n")));
        assert_eq!(super::page(&[]), "");
    }
}
