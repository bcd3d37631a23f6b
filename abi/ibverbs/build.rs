//! Turns `symbols.txt` into the exports of the library: assembler that gives each function its
//! versioned names, and the version script that declares the nodes.
//!
//! rustc writes a version script of its own for the symbols it knows to be exported, and versions
//! given to those are lost. So it is told of none: each exported name is a jump, defined in
//! assembler, to a Rust function that has no name outside.

use std::collections::BTreeSet;
use std::fmt::Write;
use std::path::PathBuf;
use std::{env, fs};

const PRIVATE: [u32; 7] = [25, 33, 34, 57, 59, 64, 65];
/// The private node of most releases (v34 to v56): what an unversioned look-up finds.
const PRIVATE_DEFAULT: u32 = 34;

/// A node without `compat` symbols.
const LOCAL_NODE: &str = "IBVERBS_1.18";

/// One line of the table.
struct Row<'a> {
    node: &'a str,
    symbol: &'a str,
    binding: &'a str,
    implementation: &'a str,
}

impl Row<'_> {
    /// The versioned names of the symbol, and the node of each.
    fn names(&self) -> Vec<(String, String)> {
        let Row { node, symbol, .. } = self;
        match self.binding {
            "default" => vec![(format!("{symbol}@@{node}"), node.to_string())],
            "compat" => vec![(format!("{symbol}@{node}"), node.to_string())],
            "private" => PRIVATE
                .iter()
                .map(|number| {
                    let at = if *number == PRIVATE_DEFAULT { "@@" } else { "@" };
                    let node = node.replace('*', &number.to_string());
                    (format!("{symbol}{at}{node}"), node)
                })
                .collect(),
            other => panic!("symbols.txt: binding {other} of {symbol}"),
        }
    }
}

fn main() {
    println!("cargo:rerun-if-changed=symbols.txt");
    println!("cargo:rerun-if-changed=build.rs");
    let table = fs::read_to_string("symbols.txt").expect("symbols.txt");
    let rows: Vec<Row<'_>> = table
        .lines()
        .filter(|line| !line.is_empty() && !line.starts_with('#'))
        .map(|line| {
            let [node, symbol, binding, implementation] =
                line.split(' ').collect::<Vec<_>>().try_into().expect(line);
            Row { node, symbol, binding, implementation }
        })
        .collect();
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("OUT_DIR"));
    fs::write(out.join("exports.rs"), exports(&rows)).expect("exports.rs");
    let script = out.join("libibverbs.map");
    fs::write(&script, version_script(&rows)).expect("libibverbs.map");
    println!("cargo:rustc-cdylib-link-arg=-Wl,--version-script={}", script.display());
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libibverbs.so.1");
}

/// One `global_asm!` that defines every symbol.
fn exports(rows: &[Row<'_>]) -> String {
    let jump = match env::var("CARGO_CFG_TARGET_ARCH").as_deref() {
        Ok("x86_64") => "jmp",
        Ok("aarch64") => "b",
        other => panic!("no exports are written for the architecture {other:?}"),
    };
    let mut text = String::from("core::arch::global_asm!(\n\".text\",\n");
    let mut operands = String::new();
    for (index, row) in rows.iter().enumerate() {
        if row.implementation != "data" {
            let _ = writeln!(operands, "f{index} = sym crate::{},", row.implementation);
        }
        // A label of its own for each name: the assembler keeps one version of each label.
        for (version, (name, _)) in row.names().iter().enumerate() {
            let label = format!("__quipu_export_{index}_{version}");
            let _ = if row.implementation == "data" {
                writeln!(
                    text,
                    "\".bss\", \".globl {label}\", \".type {label},%object\", \
                     \"{label}: .zero 1\", \".size {label}, 1\", \".text\","
                )
            } else {
                writeln!(
                    text,
                    "\".globl {label}\", \".type {label},%function\", \
                     \"{label}: {jump} {{f{index}}}\", \".size {label}, . - {label}\","
                )
            };
            let _ = writeln!(text, "\".symver {label}, {name}\",");
        }
    }
    format!("{text}{operands});\n")
}

/// Declares the nodes, and hides everything that no `.symver` names.
fn version_script(rows: &[Row<'_>]) -> String {
    let nodes: BTreeSet<String> = rows.iter().flat_map(Row::names).map(|(_, node)| node).collect();
    let mut script = String::new();
    for node in nodes {
        // Not beside `compat` symbols: lld takes `local: *` to hide those of the same node.
        let local = if node == LOCAL_NODE { " local: *; " } else { "" };
        let _ = writeln!(script, "{node} {{{local}}};");
    }
    script
}
