//! The example programs, and one with every construct of the language, compiled and run on several numbers of
//! processes: over memory that they share, and over TCP. Each checks its own result.
//!
//! This program starts itself again as the launcher of a job. It has no harness, so that the launcher runs in
//! the main thread, to which signals go.

use std::env;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use quipu_launch::spmd;

#[path = "../../types/testing/needs.rs"]
#[allow(dead_code)]
mod needs;

/// Says that this copy of the program is a launcher, of so many ranks.
const RANKS: &str = "SPLITC_TEST_RANKS";
const PROGRAMS: [&str; 10] = [
    "em3d",
    "radix",
    "sample",
    "bitonic",
    "cannon",
    "fft",
    "components",
    "lu",
    "stencil",
    "histogram",
];

fn main() {
    if let Ok(ranks) = env::var(RANKS) {
        launch(ranks.parse().expect("a number"));
    }
    let wanted = env::args().skip(1).find(|word| !word.starts_with('-')).unwrap_or_default();
    let tests = PROGRAMS.iter().copied().chain(["language", "failures"]);
    let chosen: Vec<&str> = tests.filter(|name| name.contains(&wanted)).collect();
    if env::args().any(|word| word == "--list") {
        chosen.iter().for_each(|name| println!("{name}: test"));
        return;
    }
    println!("\nrunning {} tests", chosen.len());
    let failed = if needs::compiler().is_none() { 0 } else { run(&chosen) };
    let (passed, result) = (chosen.len() - failed, if failed == 0 { "ok" } else { "FAILED" });
    println!(
        "\ntest result: {result}. {passed} passed; {failed} failed; 0 ignored; 0 measured; 0 filtered out"
    );
    std::process::exit(if failed == 0 { 0 } else { 101 });
}

/// Runs tests; how many have failed.
fn run(chosen: &[&str]) -> usize {
    let mut failed = 0;
    for name in chosen {
        let test = || if *name == "failures" { failures() } else { program(name) };
        let passed = std::panic::catch_unwind(test).is_ok();
        println!("test {name} ... {}", if passed { "ok" } else { "FAILED" });
        failed += usize::from(!passed);
    }
    failed
}

fn launch(ranks: u32) -> ! {
    let program: Vec<OsString> = env::args_os().skip(1).collect();
    let options = spmd::Options {
        ranks: Some(ranks),
        hosts: Vec::new(),
        ssh: Vec::new(),
        quipu: String::new(),
        label: false,
        variables: Vec::new(),
        program,
    };
    std::process::exit(spmd::run(&options).expect("the job starts").into());
}

/// A folder that is removed afterwards.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        let folder =
            env::temp_dir().join(format!("quipu-splitc-test-{}-{name}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        Self(folder)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn sources() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../crates/splitc/programs")
}

/// Compiles a program with the library that was built with this test.
fn compile(source: &Path, into: &Folder) -> PathBuf {
    let program = into.0.join("program");
    let library = env::current_exe().unwrap().parent().unwrap().to_owned();
    let words = [
        "-O1".into(),
        "-I".into(),
        sources().into(),
        source.into(),
        "-o".into(),
        program.clone().into(),
    ];
    let code =
        quipu_splitc::driver::run(&words, &library).unwrap_or_else(|error| panic!("{error}"));
    assert_eq!(code, 0, "{}", source.display());
    program
}

/// Runs a program; its exit code and output.
fn start(program: &Path, args: &[&str], ranks: u32, over_tcp: bool) -> (i32, String) {
    let mut command = Command::new(env::current_exe().unwrap());
    command.arg(program).args(args).env(RANKS, ranks.to_string()).stdin(Stdio::null());
    command.env("QUIPU_ADDRESS", "127.0.0.1").env("QUIPU_SPLITC_HEAP", "64");
    if over_tcp {
        command.env("QUIPU_SAME_HOST", "never");
    }
    let Output { status, stdout, stderr } = command.output().unwrap();
    let text = String::from_utf8_lossy(&[stdout, stderr].concat()).into_owned();
    (status.code().expect("an exit code"), text)
}

fn program(name: &str) {
    let folder = Folder::new(name);
    let source = match name {
        "language" => Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/language.sc"),
        _ => sources().join(name).with_extension("sc"),
    };
    let program = compile(&source, &folder);
    for ranks in [1, 2, 4, 8] {
        let (code, text) = start(&program, &[], ranks, false);
        assert_eq!(code, 0, "{name} on {ranks}: {text}");
        assert!(
            text.contains(&format!("right on {ranks} processors")),
            "{name} on {ranks}: {text}"
        );
    }
    // Small ones: each access is a message.
    let args: &[&str] = match name {
        "em3d" => &["20", "2"],
        "radix" | "sample" | "bitonic" => &["200"],
        "fft" => &["64"],
        "components" => &["6", "4"],
        "lu" => &["3", "4"],
        "histogram" => &["1000"],
        _ => &[],
    };
    for ranks in [2, 4] {
        let (code, text) = start(&program, args, ranks, true);
        assert_eq!(code, 0, "{name} on {ranks} over TCP: {text}");
        assert!(text.contains("right on"), "{name} on {ranks} over TCP: {text}");
    }
}

/// Programs that do what they must not end the job, with a reason.
fn failures() {
    let folder = Folder::new("failures");
    for (body, why) in [
        ("splitc_abort(3);", "splitc_abort"),
        (
            "int *global p = toglobal(1, (int *)8); on_one printf(\"%d\", *p);",
            "a null pointer is followed",
        ),
        ("quipu_sc_malloc_at(7, 8);", "g_malloc got processor 7, and there are 2"),
        ("all_spread_malloc(1 << 20, 1 << 20);", "do not fit the symmetric memory of 64 MB"),
        ("all_spread_free(all_spread_malloc(1, 8) + 64);", "which all_spread_malloc has not given"),
        (
            "atomic(reach, toglobal(1 - MYPROC, &x)); barrier();",
            "a function that atomic runs has accessed",
        ),
    ] {
        let source = folder.0.join("f.sc");
        let text = format!(
            "#include <stdio.h>\nint x;\nvoid reach(int *p) {{ *toglobal(1 - MYPROC, &x) = 1; }}\n\
             splitc_main() {{ {body} barrier(); }}\n"
        );
        std::fs::write(&source, text).unwrap();
        let program = compile(&source, &folder);
        let (code, text) = start(&program, &[], 2, false);
        assert_ne!(code, 0, "{body}");
        assert!(text.contains(why), "{body}: {text}");
    }
}
