//! The matrix of verbs symbols: `docs/verbs-symbols.md`, made from the facade's own table and
//! compared with what the library that was built really exports.
//!
//! `cargo xtask matrix` writes the file; `cargo xtask matrix --check` fails if the file, the table
//! and the library disagree. `--library FILE` takes a library that is there already instead of
//! building one.

use std::collections::BTreeSet;
use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fs};

use anyhow::{Context, Result, bail, ensure};

const TABLE: &str = "abi/ibverbs/symbols.txt";
const DOCUMENT: &str = "docs/verbs-symbols.md";
/// The private nodes, which `IBVERBS_PRIVATE_*` in the table stands for; as in the facade's build.rs.
const PRIVATE: [u32; 7] = [25, 33, 34, 57, 59, 64, 65];
const PRIVATE_DEFAULT: u32 = 34;

/// One line of the facade's table.
#[derive(Debug, PartialEq, Eq)]
struct Row {
    node: String,
    symbol: String,
    binding: String,
    implementation: String,
}

impl Row {
    fn parse(line: &str) -> Result<Self> {
        let columns: Vec<&str> = line.split(' ').collect();
        let [node, symbol, binding, implementation] = columns[..] else {
            bail!("{TABLE}: not four columns: {line}");
        };
        ensure!(
            ["default", "compat", "private"].contains(&binding),
            "{TABLE}: unknown binding in: {line}"
        );
        let own = str::to_owned;
        Ok(Self {
            node: own(node),
            symbol: own(symbol),
            binding: own(binding),
            implementation: own(implementation),
        })
    }

    fn is_stub(&self) -> bool {
        self.implementation.starts_with("stub::") || self.implementation == "data"
    }

    /// The names under which `nm` shows the symbol.
    fn exported(&self) -> Vec<String> {
        let Self { node, symbol, .. } = self;
        match self.binding.as_str() {
            "default" => vec![format!("{symbol}@@{node}")],
            "compat" => vec![format!("{symbol}@{node}")],
            _ => PRIVATE
                .iter()
                .map(|number| {
                    let at = if *number == PRIVATE_DEFAULT { "@@" } else { "@" };
                    format!("{symbol}{at}{}", node.replace('*', &number.to_string()))
                })
                .collect(),
        }
    }
}

/// Runs the command with what follows its name on the command line.
///
/// # Errors
///
/// A wrong argument, a library that cannot be built or read; with `--check`, every difference.
pub fn run(args: &[String]) -> Result<()> {
    let mut check = false;
    let mut library = None;
    let mut args = args.iter();
    while let Some(arg) = args.next() {
        match arg.as_str() {
            "--check" => check = true,
            "--library" => {
                library = Some(PathBuf::from(args.next().context("--library needs a file")?));
            }
            other => bail!("unknown argument {other}; known: --check, --library FILE"),
        }
    }
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().context("xtask has no parent")?;
    let table = fs::read_to_string(root.join(TABLE)).context(TABLE)?;
    let rows = parse(&table)?;
    let library = library.map_or_else(|| build(root), Ok)?;
    let differences = compare(&rows, &exports(&library)?);
    ensure!(
        differences.is_empty(),
        "{} and {TABLE} disagree:\n{}",
        library.display(),
        differences.join("\n")
    );
    let document = render(&rows);
    let file = root.join(DOCUMENT);
    if check {
        let committed = fs::read_to_string(&file).context(DOCUMENT)?;
        ensure!(committed == document, "{DOCUMENT} is out of date: run `cargo xtask matrix`");
    } else {
        fs::write(&file, document).context(DOCUMENT)?;
    }
    let stubs = rows.iter().filter(|row| row.is_stub()).count();
    println!("verbs symbols: {} implemented, {stubs} stubbed", rows.len() - stubs);
    Ok(())
}

fn parse(table: &str) -> Result<Vec<Row>> {
    let lines = table.lines().filter(|line| !line.is_empty() && !line.starts_with('#'));
    lines.map(Row::parse).collect()
}

/// Builds the facade and finds the file that cargo made.
fn build(root: &Path) -> Result<PathBuf> {
    let cargo = env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let output = Command::new(cargo)
        .args(["build", "-q", "-p", "quipu-ibverbs", "--message-format=json-render-diagnostics"])
        .current_dir(root)
        .stderr(std::process::Stdio::inherit())
        .output()
        .context("cargo build -p quipu-ibverbs")?;
    ensure!(output.status.success(), "cargo build -p quipu-ibverbs failed");
    let messages = String::from_utf8(output.stdout)?;
    // Of cargo's messages only one string is wanted, so they are not parsed further.
    messages
        .split('"')
        .find(|text| text.ends_with("/libibverbs.so"))
        .map(PathBuf::from)
        .context("cargo named no libibverbs.so")
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

fn compare(rows: &[Row], exported: &BTreeSet<String>) -> Vec<String> {
    let wanted: BTreeSet<String> = rows.iter().flat_map(Row::exported).collect();
    let missing = wanted.difference(exported).map(|name| format!("not exported: {name}"));
    let extra = exported.difference(&wanted).map(|name| format!("not in the table: {name}"));
    missing.chain(extra).collect()
}

fn render(rows: &[Row]) -> String {
    let mut text = String::from(
        "# Symbols of libibverbs.so.1\n\n\
         Made by `cargo xtask matrix` from `abi/ibverbs/symbols.txt`; do not edit. \
         `cargo xtask matrix --check` compares it with the library.\n\n\
         *Implemented* calls do what their manual page says, or answer EOPNOTSUPP where it allows \
         that for a device without the feature. *Stubbed* ones exist so that programs and the \
         providers that they pull in load; they answer EOPNOTSUPP, NULL or nothing.\n\
         IBVERBS_PRIVATE_* stands for each of the nodes ",
    );
    let numbers: Vec<String> = PRIVATE.iter().map(u32::to_string).collect();
    let _ = writeln!(text, "{}.\n", numbers.join(", "));
    let mut nodes: Vec<&str> = rows.iter().map(|row| row.node.as_str()).collect();
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
        let _ = writeln!(text, "\n## {node}\n\n| symbol | state | behind it |\n|---|---|---|");
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
    fn a_private_symbol_is_in_every_private_node_and_default_in_one() {
        let rows = parse(TEXT).unwrap();
        assert_eq!(rows[0].exported(), ["ibv_alloc_pd@@IBVERBS_1.1"]);
        let names = rows[1].exported();
        assert_eq!(names.len(), PRIVATE.len());
        assert_eq!(names.iter().filter(|name| name.contains("@@")).count(), 1);
    }

    #[test]
    fn a_difference_is_named_on_either_side() {
        let rows = parse("N a default x::a\nN b default x::b\n").unwrap();
        let exported = defined("0000 T a@@N\n0001 T c@@N\n0000 A N\n");
        assert_eq!(compare(&rows, &exported), ["not exported: b@@N", "not in the table: c@@N"]);
    }

    #[test]
    fn stubs_are_counted_apart() {
        let text = render(&parse(TEXT).unwrap());
        assert!(text.contains("| all | 1 | 1 |"));
        assert!(text.contains("| execute_ioctl | stubbed | `stub::unsupported` |"));
    }

    #[test]
    fn a_crooked_line_is_refused() {
        assert!(parse("IBVERBS_1.1 ibv_alloc_pd default").is_err());
        assert!(parse("IBVERBS_1.1 ibv_alloc_pd weak x").is_err());
    }
}
