//! Turns a table of symbols into the exports of a C library: assembler that gives each function its
//! versioned names, and the version script that declares the nodes.
//!
//! rustc writes a version script of its own for the symbols it knows to be exported, and versions
//! given to those are lost. So it is told of none: each exported name is a jump, defined in
//! assembler, to a Rust function that has no name outside.
//!
//! Its script is still there, and declares an anonymous node. lld and mold take that beside named
//! ones; GNU ld does not. So where the compiler driver would call GNU ld, it calls a shell script of
//! a few lines that leaves rustc's version script out: ours hides the rest, too.
//!
//! Each line of a table has four columns, separated by a blank; a line that begins with `#` is a
//! comment:
//!
//! * the version node; `IBVERBS_PRIVATE_*` stands for each private node (25, 33, 34, 57, 59, 64,
//!   65: rdma-core v25 to today);
//! * the symbol;
//! * the binding: `default` is what a program gets that is linked now or that asks by dlsym,
//!   `compat` only what asks for that node, `private` is default in node 34 and compat in the
//!   others;
//! * the implementation: a function of the library's crate; in module `stub` if the symbol only
//!   exists so that programs load. `data` is a zeroed byte.
#![forbid(unsafe_code)]

use std::collections::BTreeMap;
use std::fmt::Write;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::{env, fs};

/// The private nodes, which `IBVERBS_PRIVATE_*` stands for.
pub const PRIVATE: [u32; 7] = [25, 33, 34, 57, 59, 64, 65];
/// The private node of most releases (v34 to v56): what an unversioned look-up finds.
const PRIVATE_DEFAULT: u32 = 34;
/// The names by which compiler drivers call GNU ld.
const GNU_LINKERS: [&str; 2] = ["ld", "ld.bfd"];

/// One line of a table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Row<'a> {
    /// The version node.
    pub node: &'a str,
    /// The symbol.
    pub symbol: &'a str,
    /// `default`, `compat` or `private`.
    pub binding: &'a str,
    /// The function behind it.
    pub implementation: &'a str,
}

impl<'a> Row<'a> {
    fn parse(line: &'a str) -> Result<Self, String> {
        let columns: Vec<&str> = line.split(' ').collect();
        let [node, symbol, binding, implementation] = columns[..] else {
            return Err(format!("not four columns: {line}"));
        };
        if !["default", "compat", "private"].contains(&binding) {
            return Err(format!("unknown binding in: {line}"));
        }
        Ok(Self { node, symbol, binding, implementation })
    }

    /// Whether it only exists so that programs load.
    pub fn is_stub(&self) -> bool {
        self.implementation.starts_with("stub::") || self.implementation == "data"
    }

    /// The versioned names of the symbol as `nm` shows them, and the node of each.
    pub fn names(&self) -> Vec<(String, String)> {
        let Row { node, symbol, .. } = self;
        match self.binding {
            "default" => vec![(format!("{symbol}@@{node}"), node.to_string())],
            "compat" => vec![(format!("{symbol}@{node}"), node.to_string())],
            _ => PRIVATE
                .iter()
                .map(|number| {
                    let at = if *number == PRIVATE_DEFAULT { "@@" } else { "@" };
                    let node = node.replace('*', &number.to_string());
                    (format!("{symbol}{at}{node}"), node)
                })
                .collect(),
        }
    }
}

/// Reads a table.
///
/// # Errors
///
/// The first line that is none, and what is wrong with it.
pub fn parse(table: &str) -> Result<Vec<Row<'_>>, String> {
    let lines = table.lines().filter(|line| !line.is_empty() && !line.starts_with('#'));
    lines.map(Row::parse).collect()
}

/// What a build script does: makes `exports.rs`, to be included by the crate, from `symbols.txt`,
/// and has the library linked with its nodes and that soname.
///
/// # Panics
///
/// Where the table is wrong, which ends the build with the reason.
pub fn build(soname: &str) {
    println!("cargo:rerun-if-changed=symbols.txt");
    println!("cargo:rerun-if-changed=build.rs");
    let table = fs::read_to_string("symbols.txt").expect("symbols.txt");
    let rows = parse(&table).unwrap_or_else(|error| panic!("symbols.txt: {error}"));
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("OUT_DIR"));
    let arch = env::var("CARGO_CFG_TARGET_ARCH").expect("CARGO_CFG_TARGET_ARCH");
    fs::write(out.join("exports.rs"), exports(&rows, &arch)).expect("exports.rs");
    let script = out.join("library.map");
    fs::write(&script, version_script(&rows)).expect("library.map");
    println!("cargo:rustc-cdylib-link-arg=-Wl,--version-script={}", script.display());
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,{soname}");
    let linkers = out.join("linkers");
    fs::create_dir_all(&linkers).expect("linkers");
    let driver = env::var("RUSTC_LINKER").unwrap_or_else(|_| "cc".into());
    for name in GNU_LINKERS {
        let file = linkers.join(name);
        fs::write(&file, linker(name, &script, &driver)).expect(name);
        fs::set_permissions(&file, fs::Permissions::from_mode(0o755)).expect(name);
    }
    // Where drivers look for programs first.
    println!("cargo:rustc-cdylib-link-arg=-B{}", linkers.display());
}

/// A program that stands for the linker `name` of a compiler driver, and calls it without any version script
/// but ours. GCC says in `COLLECT_GCC` who it is; other drivers are taken to be `driver`. Where it has others
/// look for programs, in `COMPILER_PATH`, is this program's folder.
fn linker(name: &str, script: &Path, driver: &str) -> String {
    let script = script.display();
    format!(
        "#!/bin/sh\n\
         for arg do\n\
         \tshift\n\
         \tcase $arg in\n\
         \t'--version-script={script}') set -- \"$@\" \"$arg\" ;;\n\
         \t--version-script=*) ;;\n\
         \t*) set -- \"$@\" \"$arg\" ;;\n\
         \tesac\n\
         done\n\
         unset COMPILER_PATH\n\
         exec \"$(\"${{COLLECT_GCC:-{driver}}}\" -print-prog-name={name})\" \"$@\"\n"
    )
}

/// One `global_asm!` that defines every symbol.
fn exports(rows: &[Row<'_>], arch: &str) -> String {
    let jump = match arch {
        "x86_64" => "jmp",
        "aarch64" => "b",
        other => panic!("no exports are written for the architecture {other}"),
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
    let mut nodes: BTreeMap<String, Vec<&str>> = BTreeMap::new();
    for row in rows {
        for (_, node) in row.names() {
            nodes.entry(node).or_default().push(row.symbol);
        }
    }
    let has_compat =
        |node: &str| rows.iter().any(|row| row.node == node && row.binding != "default");
    // Not beside `compat` symbols: lld takes `local: *` to hide those of the same node.
    let local_node = rows.iter().rev().map(|row| row.node).find(|node| !has_compat(node));
    let mut script = String::new();
    for (node, symbols) in &nodes {
        let _ = if local_node == Some(node) {
            // GNU ld would hide the node's own, if they were not named.
            writeln!(script, "{node} {{ global: {}; local: *; }};", symbols.join("; "))
        } else {
            writeln!(script, "{node} {{}};")
        };
    }
    script
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
        assert_eq!(rows[0].names()[0].0, "ibv_alloc_pd@@IBVERBS_1.1");
        let names = rows[1].names();
        assert_eq!(names.len(), PRIVATE.len());
        assert_eq!(names.iter().filter(|(name, _)| name.contains("@@")).count(), 1);
    }

    #[test]
    fn a_crooked_line_is_refused() {
        assert!(parse("IBVERBS_1.1 ibv_alloc_pd default").is_err());
        assert!(parse("IBVERBS_1.1 ibv_alloc_pd weak x").is_err());
    }

    #[test]
    fn what_is_not_exported_is_hidden_by_a_node_without_old_symbols() {
        let rows = parse("N_1 a compat x::a\nN_1 b default x::b\nN_2 c default x::c\n").unwrap();
        assert_eq!(version_script(&rows), "N_1 {};\nN_2 { global: c; local: *; };\n");
    }

    /// Runs what stands for a linker, with a driver whose linker prints its arguments.
    #[test]
    fn gnu_linkers_see_one_version_script() {
        let folder = env::temp_dir().join(format!("quipu exports {}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        let (linker_file, driver) = (folder.join("ld.bfd"), folder.join("driver"));
        let ours = folder.join("library.map");
        fs::write(&driver, "#!/bin/sh\n[ $1 = -print-prog-name=ld.bfd ] && echo echo\n").unwrap();
        fs::set_permissions(&driver, fs::Permissions::from_mode(0o755)).unwrap();
        fs::write(&linker_file, linker("ld.bfd", &ours, driver.to_str().unwrap())).unwrap();
        let kept = format!("--version-script={}", ours.display());
        let output = std::process::Command::new("sh")
            .arg(&linker_file)
            .args(["-o", "a b", "--version-script=/tmp/list", &kept, "c"])
            .env_remove("COLLECT_GCC")
            .output()
            .unwrap();
        let text = String::from_utf8(output.stdout).unwrap();
        assert_eq!(text, format!("-o a b {kept} c\n"));
        fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    fn each_name_is_a_jump_to_its_function() {
        let text = exports(&parse("N_1 a default x::a\n").unwrap(), "x86_64");
        assert!(text.contains("jmp {f0}") && text.contains("f0 = sym crate::x::a"), "{text}");
        assert!(text.contains(".symver __quipu_export_0_0, a@@N_1"), "{text}");
    }
}
