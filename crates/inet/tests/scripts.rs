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
