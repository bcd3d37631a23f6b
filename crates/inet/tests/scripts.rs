//! Runs the packet scripts in `tests/scripts`: calls and packets with their times, one mechanism each,
//! written from the RFCs. `tests/scripts/README.md` says how they are written.

#[path = "scripts/run.rs"]
mod run;

use std::fs;
use std::path::Path;

#[test]
fn every_script() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/scripts");
    let mut failures = Vec::new();
    let mut count = 0;
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_none_or(|extension| extension != "txt") {
            continue;
        }
        count += 1;
        let name = path.file_stem().unwrap().to_string_lossy().into_owned();
        if let Err(failure) = run::script(&fs::read_to_string(&path).unwrap()) {
            failures.push(format!("{name}:{failure}"));
        }
    }
    failures.sort();
    assert!(count > 0 && failures.is_empty(), "\n{}", failures.join("\n"));
}

#[test]
fn the_table_of_conformance_is_whole() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let table = fs::read_to_string(root.join("../../specs/tcp-conformance.md")).unwrap();
    let mut found: Vec<String> = Vec::new();
    for line in table.lines() {
        let id = line.trim_start_matches("| ").split(' ').next().unwrap_or("");
        if id.split_once('-').is_some_and(|(_, number)| number.parse::<u8>().is_ok()) {
            found.push(id.to_owned());
        }
        for script in line.split("`scripts/").skip(1) {
            let name = script.split('`').next().unwrap_or("");
            let path = root.join("tests/scripts").join(name).with_extension("txt");
            assert!(path.exists(), "{name}");
        }
    }
    // RFC 9293, appendix B.
    let kinds = [("MUST", 69), ("SHLD", 31), ("MAY", 18), ("REC", 1)];
    let mut wanted: Vec<String> = kinds
        .iter()
        .flat_map(|(kind, count)| (1..=*count).map(move |number| format!("{kind}-{number}")))
        .collect();
    found.sort();
    wanted.sort();
    assert_eq!(wanted.len(), 119);
    assert_eq!(found, wanted);
}
