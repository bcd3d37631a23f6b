//! What the processes of this user show of their connections.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use quipu_sockets::report::{self, Row, Totals};

use super::unseen;

/// A process that runs under `quipu sockets`.
#[derive(Clone, Debug)]
pub(in super::super) struct Process {
    /// Its number.
    pub(in super::super) number: u32,
    /// The name of its program.
    pub(in super::super) program: String,
    /// Its counters; none if it has never raised a connection.
    pub(in super::super) totals: Option<Totals>,
    /// It is a program whose calls the library does not see.
    pub(in super::super) is_unseen: bool,
    /// Its connections.
    pub(in super::super) rows: Vec<Row>,
}

/// All of them, by number. Files of processes that were killed are removed.
pub(in super::super) fn processes() -> Vec<Process> {
    let user = fs::metadata("/proc/self").map(|data| data.uid()).unwrap_or_default();
    let folder = PathBuf::from(report::folder(user));
    let mut processes = Vec::new();
    for entry in fs::read_dir(&folder).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let Some(number) = name.to_str().and_then(|name| name.parse().ok()) else { continue };
        let proc = Path::new("/proc").join(&name);
        if !proc.exists() {
            let _ = fs::remove_file(entry.path());
            continue;
        }
        let program = fs::read_to_string(proc.join("comm")).unwrap_or_default();
        let text = fs::read_to_string(entry.path()).unwrap_or_default();
        let is_unseen = text == report::MARK;
        let rows = match is_unseen {
            true => unseen::rows(&proc),
            false => text.lines().filter_map(Row::decode).collect(),
        };
        processes.push(Process {
            number,
            program: program.trim_end().to_owned(),
            totals: text.lines().find_map(Totals::decode),
            is_unseen,
            rows,
        });
    }
    processes.sort_by_key(|process| process.number);
    processes
}
