//! Rows of programs under tools that look for errors, which must find those of the program and none of the
//! library; and of the launcher where a system lacks what others have.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::process::{Ended, capture};
use crate::stage::Staged;
use crate::tools;

use super::{LIMIT, Row, SKIPPED};

/// The code with which ThreadSanitizer ends a program in which it has found something.
const FOUND_BY_TSAN: i32 = 66;
/// The one that memcheck is asked for.
const FOUND_BY_MEMCHECK: i32 = 9;

const TSAN: &[&str] = &["-fsanitize=thread"];
const MEMCHECK: &[&str] = &["valgrind", "-q", "--leak-check=full", "--error-exitcode=9"];

/// All of them.
pub(super) fn rows(staged: &Staged) -> Vec<Row<'_>> {
    let mut rows = Vec::new();
    for (name, mode, code) in [("correct", "", 0), ("race", "race", FOUND_BY_TSAN)] {
        let name = format!("checked/tsan/{name}");
        rows.push(row(&name, move || under_tsan(staged, mode, code)));
    }
    for (name, mode, code) in [("correct", "", 0), ("leak", "leak", FOUND_BY_MEMCHECK)] {
        let name = format!("checked/memcheck/{name}");
        rows.push(row(&name, move || under_memcheck(staged, mode, code)));
    }
    rows.push(row("launcher/no-faccessat2", move || without_faccessat2(staged)));
    rows.push(row("launcher/no-proc", move || without_proc(staged)));
    rows
}

fn row<'a>(name: &str, run: impl Fn() -> Result<(), String> + Send + Sync + 'a) -> Row<'a> {
    Row { name: format!("one-host/{name}"), run: Box::new(run) }
}

/// Compiles a program of the tests, once for each row that wants it.
fn build(name: &str, flags: &[&str]) -> Result<PathBuf, String> {
    let program = super::scratch_file(name, "bin");
    let mut command = Command::new("cc");
    command.args(["-O1", "-g", "-Wall", "-Wextra", "-Werror"]).args(flags).arg("-o").arg(&program);
    command.arg(crate::root().join(format!("tests/clients/{name}.c")));
    if name == "checked" {
        command.args(["-libverbs", "-lpthread"]);
    }
    let ended = run(command)?;
    if ended.success() { Ok(program) } else { Err(ended.text("cc")) }
}

fn run(command: Command) -> Result<Ended, String> {
    capture(command, LIMIT).map_err(|error| format!("{error:#}"))
}

/// `quipu run` with these words.
fn launch(staged: &Staged, words: &[String]) -> Result<Ended, String> {
    let front = staged.run("127.0.0.1");
    let mut command = Command::new(&front[0]);
    command.args(&front[1..]).args(words);
    run(command)
}

/// Whether it ended with a code, and says `why` if that is none of success.
fn ended_with(ended: &Ended, code: i32, why: &str) -> Result<(), String> {
    let same = ended.status.and_then(|status| status.code()) == Some(code);
    let told = code == 0 || ended.stderr.contains(why);
    if same && told { Ok(()) } else { Err(ended.text(&format!("not {code}"))) }
}

fn words(front: &[&str], program: &Path, mode: &str) -> Vec<String> {
    let program = program.display().to_string();
    let all = front.iter().copied().chain([program.as_str(), mode]);
    all.filter(|word| !word.is_empty()).map(str::to_owned).collect()
}

fn under_tsan(staged: &Staged, mode: &str, code: i32) -> Result<(), String> {
    let Ok(program) = build("checked", TSAN) else {
        return Err(format!("{SKIPPED}cc has no ThreadSanitizer"));
    };
    let mut alone = Command::new(&program);
    alone.arg("nothing");
    if !run(alone)?.success() {
        return Err(format!("{SKIPPED}ThreadSanitizer does not work on this system"));
    }
    let outcome = ended_with(&launch(staged, &words(&[], &program, mode))?, code, "data race");
    let _ = std::fs::remove_file(program);
    outcome
}

fn under_memcheck(staged: &Staged, mode: &str, code: i32) -> Result<(), String> {
    if tools::find("valgrind").is_none() {
        return Err("  valgrind is missing: run `make check`".to_owned());
    }
    let program = build("checked", &[])?;
    let ended = launch(staged, &words(MEMCHECK, &program, mode))?;
    let _ = std::fs::remove_file(program);
    ended_with(&ended, code, "definitely lost")
}

/// What programs see of the device where they are started by `front`.
fn sees_the_device(staged: &Staged, mut front: Command) -> Result<(), String> {
    let ended = run({
        front.args(staged.run("127.0.0.1")).arg("ibv_devices");
        front
    })?;
    let sees = ended.success() && ended.stdout.contains("quipu0");
    if sees { Ok(()) } else { Err(ended.text("")) }
}

fn without_faccessat2(staged: &Staged) -> Result<(), String> {
    let program = build("refuse", &[])?;
    let outcome = sees_the_device(staged, Command::new(&program));
    let _ = std::fs::remove_file(program);
    outcome
}

fn without_proc(staged: &Staged) -> Result<(), String> {
    let hidden = |script: &str| {
        let mut command = Command::new("unshare");
        command.args(["--user", "--map-root-user", "--mount", "sh", "-c"]);
        command.args([&format!("mount -t tmpfs none /proc && {script}"), "sh"]);
        command
    };
    if !run(hidden("true"))?.success() {
        return Err(format!("{SKIPPED}this user may not hide /proc"));
    }
    sees_the_device(staged, hidden("exec \"$@\""))
}
