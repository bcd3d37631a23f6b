//! The rules of the house that no other tool checks.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};

/// Longest source file.
const MAX_LINES: usize = 600;
/// Widest line of code, in characters; and of a comment, which rustfmt does not fold.
const MAX_WIDTH: usize = 100;
const MAX_COMMENT_WIDTH: usize = 110;
/// Folders whose code may contain `unsafe`; each use has its SAFETY comment, which clippy checks.
const UNSAFE_ALLOWED: [&str; 22] = [
    "crates/crc/",
    "crates/mem/",
    "crates/host/",
    "crates/cabi/",
    "abi/types/",
    "abi/engine/",
    "abi/facade/",
    "abi/ibverbs/",
    "abi/am/",
    "abi/qpip/",
    "abi/rdmacm/",
    "abi/shim/",
    "abi/splitc/",
    "abi/sdp/",
    "abi/sockets/",
    "abi/iwsock/",
    "abi/trace/",
    "abi/vipl/",
    // Clocks, processors and pipes of the benchmark.
    "crates/bench/src/sys.rs",
    // Signals, descriptors and processes of the launcher; PMIx.
    "crates/launch/src/sys.rs",
    "crates/launch/src/pmix.rs",
    // Its `no_mangle`.
    "xtask/fuzz-driver/",
];
/// The list of changes, and the longest entry of it, in characters.
const CHANGELOG: &str = "CHANGELOG.md";
const MAX_CHANGE: usize = 200;
/// Where the variables of the environment are listed.
const ENVIRONMENT: &str = "docs/environment.md";

/// Words that mark something unfinished. Put together here so that this file does not contain them.
fn unfinished() -> [String; 3] {
    [["TO", "DO"], ["FIX", "ME"], ["XX", "X"]].map(|parts| parts.concat())
}

/// Checks every file that git knows.
pub(crate) fn run() -> Result<()> {
    let files = files()?;
    let environment = fs::read_to_string(crate::root().join(ENVIRONMENT)).context(ENVIRONMENT)?;
    let mut complaints = Vec::new();
    for file in &files {
        let Ok(text) = fs::read_to_string(crate::root().join(file)) else { continue };
        let name = file.display().to_string();
        complaints.extend(check(&name, &text, &environment));
    }
    for complaint in &complaints {
        println!("{complaint}");
    }
    ensure!(complaints.is_empty(), "{} complaints", complaints.len());
    println!("{} files are tidy", files.len());
    Ok(())
}

/// What git tracks, and what is new and not ignored.
fn files() -> Result<Vec<PathBuf>> {
    let output = Command::new("git")
        .args(["ls-files", "-z", "--cached", "--others", "--exclude-standard"])
        .current_dir(crate::root())
        .output()
        .context("git")?;
    ensure!(output.status.success(), "git ls-files failed");
    let text = String::from_utf8(output.stdout)?;
    let known = text.split('\0').filter(|name| !name.is_empty()).map(PathBuf::from);
    Ok(known.filter(|file| crate::root().join(file).is_file()).collect())
}

fn check(name: &str, text: &str, environment: &str) -> Vec<String> {
    let mut complaints = Vec::new();
    let extension = Path::new(name).extension().and_then(|e| e.to_str()).unwrap_or_default();
    let ours = !name.starts_with("LICENSE") && extension != "lock" && extension != "svg";
    if ours {
        let words = unfinished();
        for (number, line) in text.lines().enumerate() {
            let mut complain =
                |what: &str| complaints.push(format!("{name}:{}: {what}", number + 1));
            if line.ends_with([' ', '\t']) && !matches!(extension, "snap" | "1") {
                complain("blanks at the end of the line");
            }
            let mut of_words = line.split(|c: char| !c.is_ascii_alphanumeric());
            if of_words.any(|word| words.iter().any(|bad| bad == word)) {
                complain("something is marked as unfinished");
            }
        }
        if !text.is_empty() && !text.ends_with('\n') {
            complaints.push(format!("{name}: no line feed at the end"));
        }
    }
    if name == CHANGELOG {
        complaints.extend(check_changelog(text));
    }
    if extension == "rs" {
        complaints.extend(check_rust(name, text, environment));
    }
    if name.ends_with("Cargo.toml") && name.matches('/').count() >= 1 && is_member(name) {
        complaints.extend(check_manifest(name, text));
    }
    complaints
}

/// Each change is one line of at most [`MAX_CHANGE`] characters, and those of the next version lie under
/// Added, Changed or Fixed.
fn check_changelog(text: &str) -> Vec<String> {
    let mut complaints = Vec::new();
    let (mut unreleased, mut kind) = (false, false);
    for (number, line) in text.lines().enumerate() {
        let mut complain =
            |what: &str| complaints.push(format!("{CHANGELOG}:{}: {what}", number + 1));
        if let Some(version) = line.strip_prefix("## ") {
            (unreleased, kind) = (version == "Unreleased", false);
        } else if let Some(heading) = line.strip_prefix("### ") {
            kind = matches!(heading, "Added" | "Changed" | "Fixed");
            if unreleased && !kind {
                complain("use the heading Added, Changed or Fixed");
            }
        } else if line.starts_with("- ") {
            if unreleased && !kind {
                complain("put the change under Added, Changed or Fixed");
            }
            if line.chars().count() > MAX_CHANGE {
                complain("describe the change in at most 200 characters");
            }
        } else if line.starts_with("  ") {
            complain("describe the change in one line");
        }
    }
    complaints
}

fn is_member(name: &str) -> bool {
    !name.starts_with("fuzz/") && !name.starts_with("xtask/fuzz-driver/")
}

fn check_manifest(name: &str, text: &str) -> Option<String> {
    let inherits = text.contains("[lints]\nworkspace = true");
    (!inherits).then(|| format!("{name}: does not take over the workspace's lints"))
}

fn check_rust(name: &str, text: &str, environment: &str) -> Vec<String> {
    let mut complaints = Vec::new();
    let lines = text.lines().count();
    if lines > MAX_LINES {
        complaints.push(format!("{name}: {lines} lines, more than {MAX_LINES}: split it"));
    }
    let may = UNSAFE_ALLOWED.iter().any(|folder| name.starts_with(folder));
    for (number, line) in text.lines().enumerate() {
        let mut complain = |what: &str| complaints.push(format!("{name}:{}: {what}", number + 1));
        let (width, limit) = (line.chars().count(), widest(line));
        if width > limit {
            complain(&format!("{width} characters, more than {limit}"));
        }
        let code = line.split("//").next().unwrap_or_default();
        let is_unsafe =
            code.split(|c: char| !c.is_alphanumeric() && c != '_').any(|word| word == "unsafe");
        if is_unsafe && !may && !code.contains('"') {
            complain("unsafe code outside the folders that may contain it");
        }
    }
    for variable in variables(text) {
        if !environment.contains(&format!("`{variable}`")) {
            complaints.push(format!("{name}: {variable} is not in {ENVIRONMENT}"));
        }
    }
    complaints
}

/// How wide a line may be. Tables, addresses and texts cannot be folded.
fn widest(line: &str) -> usize {
    let text = line.trim_start();
    let comment = text.starts_with("//");
    match () {
        () if text.contains("://") || (comment && text.contains('|')) || text.contains('"') => {
            usize::MAX
        }
        () if comment => MAX_COMMENT_WIDTH,
        () => MAX_WIDTH,
    }
}

/// The variables of the environment that are named in a text.
fn variables(text: &str) -> Vec<&str> {
    let quoted = text.split('"').filter_map(|part| {
        let rest = part.strip_prefix("QUIPU_")?;
        let legal = |c: char| c.is_ascii_uppercase() || c == '_';
        (!rest.is_empty() && rest.chars().all(legal)).then_some(part)
    });
    quoted.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn faults_are_named_with_their_line() {
        let long = "x".repeat(MAX_WIDTH + 1);
        let text = format!("fn a() {{}} \n// {}\n{long}\nunsafe {{ }}\n", unfinished()[0]);
        let complaints = check("crates/wire/src/a.rs", &text, "");
        assert_eq!(complaints.len(), 4, "{complaints:?}");
        assert!(complaints[0].starts_with("crates/wire/src/a.rs:1:"));
    }

    #[test]
    fn unsafe_is_fine_where_it_is_allowed_and_in_names() {
        assert!(check("crates/mem/src/a.rs", "unsafe { }\n", "").is_empty());
        assert!(check("crates/wire/src/a.rs", "#![forbid(unsafe_code)]\n", "").is_empty());
    }

    #[test]
    fn a_variable_has_to_be_documented() {
        let text = "var(\"QUIPU_NEW\")\n";
        assert_eq!(check("a.rs", text, "").len(), 1);
        assert!(check("a.rs", text, "| `QUIPU_NEW` |").is_empty());
    }

    #[test]
    fn a_change_is_one_short_line_under_its_kind() {
        let good = "## Unreleased\n\n### Added\n\n- A thing.\n\n## 0.1.0\n\n### Verbs\n\n- RC.\n";
        assert!(check(CHANGELOG, good, "").is_empty());
        let bad = format!(
            "## Unreleased\n- A.\n### News\n### Fixed\n- {}\n  more\n",
            "x".repeat(MAX_CHANGE)
        );
        let complaints = check(CHANGELOG, &bad, "");
        assert_eq!(complaints.len(), 4, "{complaints:?}");
    }

    #[test]
    fn a_long_file_is_to_be_split() {
        let text = "\n".repeat(MAX_LINES + 1);
        assert_eq!(check("a.rs", &text, "").len(), 1);
    }
}
