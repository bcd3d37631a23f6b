//! The matrices of symbols: `docs/verbs-symbols.md` and `docs/rdmacm-symbols.md`, made from the
//! libraries' own tables and compared with what the libraries that were built really export.
//!
//! `cargo xtask matrix` writes the files; `cargo xtask matrix --check` fails if file, table and
//! library disagree. `--library NAME=FILE` takes a library that is there already instead of
//! building one.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, anyhow, bail, ensure};
use quipu_abi_exports::{PRIVATE, Row, parse};

/// A library with a table of symbols.
struct Library {
    /// Its name, without `lib` and `.so`.
    name: &'static str,
    /// The package that it is built from.
    package: &'static str,
    table: &'static str,
    document: &'static str,
    /// What the document says about its nodes.
    note: &'static str,
}

const LIBRARIES: [Library; 5] = [
    Library {
        name: "ibverbs",
        package: "quipu-ibverbs",
        table: "abi/ibverbs/symbols.txt",
        document: "docs/verbs-symbols.md",
        note: "IBVERBS_PRIVATE_* stands for each of the nodes ",
    },
    Library {
        name: "rdmacm",
        package: "quipu-rdmacm",
        table: "abi/rdmacm/symbols.txt",
        document: "docs/rdmacm-symbols.md",
        note: "",
    },
    Library {
        name: "qpip",
        package: "quipu-qpip",
        table: "abi/qpip/symbols.txt",
        document: "docs/qpip-symbols.md",
        note: "",
    },
    Library {
        name: "am",
        package: "quipu-libam",
        table: "abi/am/symbols.txt",
        document: "docs/am-symbols.md",
        note: "",
    },
    Library {
        name: "vipl",
        package: "quipu-vipl",
        table: "abi/vipl/symbols.txt",
        document: "docs/vipl-symbols.md",
        note: "",
    },
];

/// Runs the command with what follows its name on the command line.
///
/// # Errors
///
/// A wrong argument, a library that cannot be built or read; with `--check`, every difference.
pub fn run(args: &[String]) -> Result<()> {
    let mut check = false;
    let mut built = BTreeMap::new();
    let mut args = args.iter();
    while let Some(arg) = args.next() {
        match arg.as_str() {
            "--check" => check = true,
            "--library" => {
                let value = args.next().and_then(|value| value.split_once('='));
                let (name, file) = value.context("--library needs NAME=FILE")?;
                built.insert(name, PathBuf::from(file));
            }
            other => bail!("unknown argument {other}; known: --check, --library NAME=FILE"),
        }
    }
    for library in &LIBRARIES {
        one(library, &crate::root(), check, built.remove(library.name))?;
    }
    built.into_keys().next().map_or(Ok(()), |name| Err(anyhow!("there is no library {name}")))
}

/// Compares the libraries in a folder with their tables and documents.
///
/// # Errors
///
/// Every difference, and a library that cannot be read.
pub(crate) fn check(folder: &Path) -> Result<()> {
    LIBRARIES.iter().try_for_each(|library| {
        let file = folder.join(format!("lib{}.so.1", library.name));
        ensure!(file.exists(), "{} is not there: run `cargo xtask stage`", file.display());
        one(library, &crate::root(), true, Some(file))
    })
}

/// One library.
fn one(library: &Library, root: &Path, check: bool, file: Option<PathBuf>) -> Result<()> {
    let Library { table: table_name, document: document_name, .. } = *library;
    let table = fs::read_to_string(root.join(table_name)).context(table_name)?;
    let rows = parse(&table).map_err(|error| anyhow!("{table_name}: {error}"))?;
    let file = file.map_or_else(|| build(library, root), Ok)?;
    let differences = compare(&rows, &exports(&file)?);
    ensure!(
        differences.is_empty(),
        "{} and {table_name} disagree:\n{}",
        file.display(),
        differences.join("\n")
    );
    let document = render(library, &rows);
    let file = root.join(document_name);
    if check {
        let committed = fs::read_to_string(&file).context(document_name)?;
        ensure!(committed == document, "{document_name} is out of date: run `cargo xtask matrix`");
    } else {
        fs::write(&file, document).context(document_name)?;
    }
    let stubs = rows.iter().filter(|row| row.is_stub()).count();
    println!("lib{}: {} symbols implemented, {stubs} stubbed", library.name, rows.len() - stubs);
    Ok(())
}

/// Builds a library and finds the file that cargo made.
fn build(library: &Library, root: &Path) -> Result<PathBuf> {
    let Library { name, package, .. } = *library;
    let output = crate::cargo()
        .args(["build", "-q", "-p", package, "--message-format=json-render-diagnostics"])
        .current_dir(root)
        .stderr(std::process::Stdio::inherit())
        .output()
        .with_context(|| format!("cargo build -p {package}"))?;
    ensure!(output.status.success(), "cargo build -p {package} failed");
    let messages = String::from_utf8(output.stdout)?;
    // Of cargo's messages only one string is wanted, so they are not parsed further.
    let file = format!("/lib{name}.so");
    let found = messages.split('"').find(|text| text.ends_with(&file));
    found.map(PathBuf::from).with_context(|| format!("cargo named no lib{name}.so"))
}

/// The symbols that a library defines, as `name@node` or `name@@node`.
fn exports(library: &Path) -> Result<BTreeSet<String>> {
    let output = Command::new("nm")
        .args(["-D", "--defined-only", "--with-symbol-versions"])
        .arg(library)
        .output()
        .context("nm (of binutils)")?;
    ensure!(output.status.success(), "nm {} failed", library.display());
    let text = String::from_utf8(output.stdout)?;
    Ok(defined(&text))
}

/// Reads the lines of `nm`: address, kind, name. Kind A is a version node itself.
fn defined(text: &str) -> BTreeSet<String> {
    text.lines()
        .filter_map(|line| {
            let mut words = line.split_whitespace().skip(1);
            let (kind, name) = (words.next()?, words.next()?);
            (kind != "A").then(|| name.to_owned())
        })
        .collect()
}

fn compare(rows: &[Row<'_>], exported: &BTreeSet<String>) -> Vec<String> {
    let wanted: BTreeSet<String> = rows.iter().flat_map(Row::names).map(|(name, _)| name).collect();
    let missing = wanted.difference(exported).map(|name| format!("not exported: {name}"));
    let extra = exported.difference(&wanted).map(|name| format!("not in the table: {name}"));
    missing.chain(extra).collect()
}

fn render(library: &Library, rows: &[Row<'_>]) -> String {
    let Library { name, table, note, .. } = library;
    let mut text = format!(
        "# Symbols of lib{name}.so.1\n\n\
         Made by `cargo xtask matrix` from `{table}`; do not edit. \
         `cargo xtask matrix --check` compares it with the library.\n\n\
         *Implemented* calls do what their manual page says, or answer EOPNOTSUPP where it allows \
         that for a device without the feature. *Stubbed* ones exist so that programs and the \
         providers that they pull in load; they answer EOPNOTSUPP, NULL or nothing.\n"
    );
    if !note.is_empty() {
        let numbers: Vec<String> = PRIVATE.iter().map(u32::to_string).collect();
        let _ = writeln!(text, "{note}{}.", numbers.join(", "));
    }
    text.push('\n');
    let mut nodes: Vec<&str> = rows.iter().map(|row| row.node).collect();
    nodes.dedup();
    let of = |node: &str| rows.iter().filter(move |row| row.node == node).collect::<Vec<_>>();
    text.push_str("| node | implemented | stubbed |\n|---|---|---|\n");
    for node in &nodes {
        let stubs = of(node).iter().filter(|row| row.is_stub()).count();
        let _ = writeln!(text, "| {node} | {} | {stubs} |", of(node).len() - stubs);
    }
    let stubs = rows.iter().filter(|row| row.is_stub()).count();
    let _ = writeln!(text, "| all | {} | {stubs} |", rows.len() - stubs);
    for node in nodes {
        let _ = writeln!(text, "\n## {node}\n\n| symbol | state | notes |\n|---|---|---|");
        for row in of(node) {
            let state = if row.is_stub() { "stubbed" } else { "implemented" };
            let _ = writeln!(text, "| {} | {state} | `{}` |", row.symbol, row.implementation);
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "# a comment\n\
        IBVERBS_1.1 ibv_alloc_pd default pd::ibv_alloc_pd\n\
        IBVERBS_PRIVATE_* execute_ioctl private stub::unsupported\n";

    #[test]
    fn a_difference_is_named_on_either_side() {
        let rows = parse("N a default x::a\nN b default x::b\n").unwrap();
        let exported = defined("0000 T a@@N\n0001 T c@@N\n0000 A N\n");
        assert_eq!(compare(&rows, &exported), ["not exported: b@@N", "not in the table: c@@N"]);
    }

    #[test]
    fn stubs_are_counted_apart() {
        let text = render(&LIBRARIES[0], &parse(TEXT).unwrap());
        assert!(text.contains("| all | 1 | 1 |"));
        assert!(text.contains("| execute_ioctl | stubbed | `stub::unsupported` |"));
    }
}
