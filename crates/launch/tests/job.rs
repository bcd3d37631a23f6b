//! Jobs under every launcher that is installed, and the launcher with every end that a job may have.
//!
//! This program starts itself again as a rank, as a launcher and as a node. It has no harness, so that those
//! run in the main thread, to which signals go, and write nothing else.

use std::env;
use std::ffi::OsString;
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use quipu_launch::spmd::{self, Host};
use quipu_launch::{Job, Launcher};

#[path = "../../../abi/types/testing/needs.rs"]
mod needs;

/// Says what a copy of this program is to be.
const ROLE: &str = "LAUNCH_TEST_ROLE";

/// A test, and its name.
type Test = (&'static str, fn());

/// The tests.
const TESTS: [Test; 9] = [
    ("a_host_that_is_lost_ends_the_job", a_host_that_is_lost_ends_the_job),
    ("a_launcher_without_a_protocol_is_an_error", a_launcher_without_a_protocol_is_an_error),
    ("a_signal_to_the_launcher_ends_all_ranks", a_signal_to_the_launcher_ends_all_ranks),
    ("output_is_whole_however_much_there_is", output_is_whole_however_much_there_is),
    ("programs_of_mpich_run_under_our_launcher", programs_of_mpich_run_under_our_launcher),
    ("ranks_meet_under_every_launcher", ranks_meet_under_every_launcher),
    ("ranks_meet_on_two_hosts", ranks_meet_on_two_hosts),
    ("the_first_failure_decides", the_first_failure_decides),
    ("sixty_four_ranks_start", sixty_four_ranks_start),
];

fn main() {
    match env::var(ROLE).as_deref() {
        Ok("rank") => rank(),
        Ok("launcher") => launcher(),
        Ok("node") => spmd::serve().unwrap(),
        _ => run_tests(),
    }
}

/// Runs the tests whose names contain the first argument, and reports as the usual harness does.
fn run_tests() {
    let wanted = env::args().skip(1).find(|word| !word.starts_with('-')).unwrap_or_default();
    let chosen: Vec<&Test> = TESTS.iter().filter(|(name, _)| name.contains(&wanted)).collect();
    let list = env::args().any(|word| word == "--list");
    if list {
        chosen.iter().for_each(|(name, _)| println!("{name}: test"));
        return;
    }
    println!("\nrunning {} tests", chosen.len());
    let mut failed = 0;
    for (name, test) in &chosen {
        let passed = std::panic::catch_unwind(test).is_ok();
        println!("test {name} ... {}", if passed { "ok" } else { "FAILED" });
        failed += usize::from(!passed);
    }
    let (passed, out) = (chosen.len() - failed, TESTS.len() - chosen.len());
    let result = if failed == 0 { "ok" } else { "FAILED" };
    println!(
        "\ntest result: {result}. {passed} passed; {failed} failed; 0 ignored; 0 measured; {out} filtered out"
    );
    std::process::exit(if failed == 0 { 0 } else { 101 });
}

/// A rank: exchanges values of many lengths with all others, twice, and says so.
fn rank() {
    let job = Job::from_env().unwrap();
    assert!(job.rank() < job.size());
    let lengths = if job.size() < 64 { &[0, 1, 100, 3000][..] } else { &[100] };
    for (round, len) in lengths.iter().copied().enumerate() {
        let value = |rank: u32| vec![rank as u8 + 1; len + rank as usize];
        let values = job.all_gather(&format!("key.{round}"), &value(job.rank())).unwrap();
        assert_eq!(values.len(), job.size() as usize);
        for (rank, got) in (0..).zip(values) {
            assert_eq!(got, value(rank), "rank {rank}, {len} bytes");
        }
    }
    assert!(job.get(0, "nobody").is_err());
    job.barrier().unwrap();
    let line = format!("RANK {}/{} {:?}\n", job.rank(), job.size(), job.launcher());
    job.finalize().unwrap();
    std::io::stdout().write_all(line.as_bytes()).unwrap();
}

/// A launcher: runs the job that its variables describe, and ends with its exit code.
fn launcher() {
    let words = env::var("LAUNCH_TEST_PROGRAM").unwrap();
    let number = |name| env::var(name).ok().and_then(|value| value.parse().ok());
    let ssh = env::var("LAUNCH_TEST_SSH").ok();
    let host = |name: &str| Host { name: name.into(), slots: None };
    let options = spmd::Options {
        ranks: number("LAUNCH_TEST_RANKS"),
        hosts: if ssh.is_some() { vec![host("a"), host("b")] } else { Vec::new() },
        ssh: ssh.into_iter().collect(),
        quipu: "/no/such/quipu".into(),
        label: true,
        variables: vec!["LAUNCH_TEST_X=there".into(), format!("{ROLE}=rank")],
        program: words.split('\t').map(OsString::from).collect(),
    };
    std::process::exit(spmd::run(&options).unwrap().into());
}

fn me() -> String {
    env::current_exe().unwrap().display().to_string()
}

/// The words that make a copy of this program a rank.
fn rank_words() -> Vec<String> {
    ["env", &format!("{ROLE}=rank"), &me()].map(str::to_owned).into()
}

/// Our launcher with a program.
fn ours(ranks: u32, words: &[String]) -> Command {
    let mut command = Command::new(env::current_exe().unwrap());
    command.env(ROLE, "launcher");
    command.env("LAUNCH_TEST_RANKS", ranks.to_string());
    command.env("LAUNCH_TEST_PROGRAM", words.join("\t")).stdin(Stdio::null());
    command
}

fn shell(script: &str) -> Vec<String> {
    ["sh", "-c", script].map(str::to_owned).into()
}

/// Runs it; the exit code and what was written.
fn finish(command: &mut Command) -> (i32, String) {
    let Output { status, stdout, stderr } = command.output().unwrap();
    let text = [stdout, stderr].concat();
    (status.code().expect("an exit code"), String::from_utf8_lossy(&text).into_owned())
}

/// Whether all ranks have said that they are done.
fn check(text: &str, size: u32, launcher: Launcher) {
    for rank in 0..size {
        assert!(text.contains(&format!("RANK {rank}/{size} {launcher:?}")), "rank {rank}:\n{text}");
    }
}

fn is_installed(program: &str) -> bool {
    Command::new(program).arg("--version").output().is_ok()
}

fn ranks_meet_under_every_launcher() {
    ranks_meet_under_our_launcher();
    ranks_meet_under_hydra();
    ranks_meet_under_mpirun();
}

fn sixty_four_ranks_start() {
    let began = Instant::now();
    let (code, text) = finish(&mut ours(64, &rank_words()));
    assert_eq!(code, 0, "{text}");
    check(&text, 64, Launcher::PmiFd);
    println!("64 ranks started and met in {:?}", began.elapsed());
}

fn ranks_meet_under_our_launcher() {
    for size in [1, 2, 7] {
        let (code, text) = finish(&mut ours(size, &rank_words()));
        assert_eq!(code, 0, "{text}");
        check(&text, size, Launcher::PmiFd);
        assert!(text.contains(&format!("[{}] ", size - 1)), "{text}");
    }
}

fn ranks_meet_under_hydra() {
    let mpiexec = "mpiexec.hydra";
    if !needs::met(is_installed(mpiexec), "mpich") {
        return;
    }
    for (options, launcher) in [(&[][..], Launcher::PmiFd), (&["-pmi-port"], Launcher::PmiPort)] {
        let mut command = Command::new(mpiexec);
        command.args(options).args(["-n", "3"]).args(rank_words());
        let (code, text) = finish(&mut command);
        assert_eq!(code, 0, "{text}");
        check(&text, 3, launcher);
    }
}

fn ranks_meet_under_mpirun() {
    if !needs::met(is_installed("mpirun.openmpi"), "openmpi-bin") {
        return;
    }
    let mut command = Command::new("mpirun.openmpi");
    command.args(["--allow-run-as-root", "--oversubscribe", "-n", "3"]).args(rank_words());
    command.env("OMPI_MCA_rmaps_base_oversubscribe", "1");
    let (code, text) = finish(&mut command);
    assert_eq!(code, 0, "{text}");
    check(&text, 3, Launcher::Pmix);
}

/// A program of MPICH finds its peers through our server.
fn programs_of_mpich_run_under_our_launcher() {
    let Some(_) = needs::compiler() else { return };
    if !needs::met(is_installed("mpicc.mpich"), "libmpich-dev") {
        return;
    }
    let folder = Folder::new("mpich");
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/sum.c");
    let program = folder.0.join("sum").display().to_string();
    let built = Command::new("mpicc.mpich").args([source, "-o", &program]).status().unwrap();
    assert!(built.success());
    let (code, text) = finish(&mut ours(4, &[program]));
    assert_eq!(code, 0, "{text}");
    assert_eq!(text.matches("the sum of all ranks is 6").count(), 4, "{text}");
}

/// A folder that is removed afterwards.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        let folder = env::temp_dir().join(format!("quipu-launch-{}-{name}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        Self(folder)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// A command in place of ssh, which runs a node here, after a line that a shell might print.
fn ssh(folder: &Folder, script: &str) -> String {
    let file = folder.0.join("ssh");
    std::fs::write(&file, format!("#!/bin/sh\n{script}\n")).unwrap();
    std::fs::set_permissions(&file, PermissionsExt::from_mode(0o755)).unwrap();
    file.display().to_string()
}

fn node_script() -> String {
    format!("echo \"Welcome to $1\"\nexec env {ROLE}=node {}", me())
}

fn ranks_meet_on_two_hosts() {
    let folder = Folder::new("hosts");
    let mut command = ours(5, &rank_words());
    command.env("LAUNCH_TEST_SSH", ssh(&folder, &node_script()));
    let (code, text) = finish(&mut command);
    assert_eq!(code, 0, "{text}");
    check(&text, 5, Launcher::PmiFd);
    let words = shell("echo $PMI_RANK $MPI_LOCALRANKID $MPI_LOCALNRANKS $LAUNCH_TEST_X");
    let mut command = ours(5, &words);
    command.env("LAUNCH_TEST_SSH", ssh(&folder, &node_script()));
    let (_, text) = finish(&mut command);
    assert!(text.contains("[2] 2 2 3 there") && text.contains("[4] 4 1 2 there"), "{text}");
}

fn a_host_that_is_lost_ends_the_job() {
    let folder = Folder::new("lost");
    for (script, why) in [("exit 255", "are lost: ssh"), ("yes", "it sends something else")] {
        let mut command = ours(2, &shell("sleep 100"));
        command.env("LAUNCH_TEST_SSH", ssh(&folder, script));
        let (code, text) = finish(&mut command);
        assert_eq!(code, 1, "{text}");
        assert!(text.contains(why), "{text}");
    }
    let mut command = ours(4, &shell("test $PMI_RANK = 3 && kill -9 $$; sleep 100"));
    command.env("LAUNCH_TEST_SSH", ssh(&folder, &node_script()));
    let (code, text) = finish(&mut command);
    assert_eq!(code, 137, "{text}");
    assert!(text.contains("rank 3 of 4 on host b was killed by signal 9 (SIGKILL)"), "{text}");
}

fn the_first_failure_decides() {
    for (script, code, why) in [
        ("test $PMI_RANK = 1 && exit 7; sleep 100", 7, "rank 1 of 3 ended with exit code 7"),
        ("test $PMI_RANK = 2 && kill -SEGV $$; sleep 100", 139, "killed by signal 11 (SIGSEGV)"),
        ("echo cmd=abort exitcode=5 error_msg=out_of_luck >&$PMI_FD; sleep 100", 5, "out of luck"),
        ("test $PMI_RANK = 0 && exit 0; echo cmd=barrier_in >&$PMI_FD; sleep 100", 1, "a barrier"),
        ("head -c 9999 /dev/zero >&$PMI_FD; sleep 100", 1, "it does not speak PMI-1"),
        // One that ignores SIGTERM is killed.
        ("test $PMI_RANK = 1 && exit 3; trap '' TERM; sleep 100", 3, "exit code 3"),
    ] {
        let began = Instant::now();
        let (got, text) = finish(&mut ours(3, &shell(script)));
        assert_eq!(got, code, "{script}: {text}");
        assert!(text.contains(why), "{script}: {text}");
        assert!(began.elapsed() < Duration::from_secs(60), "{script}");
    }
    let (code, text) = finish(&mut ours(2, &["/no/such/program".to_owned()]));
    assert_eq!(code, 127, "{text}");
    assert!(text.contains("cannot start /no/such/program"), "{text}");
}

fn a_signal_to_the_launcher_ends_all_ranks() {
    let folder = Folder::new("signal");
    let files = folder.0.display().to_string();
    let script = format!(
        "echo $$ > {files}/$PMI_RANK.new; mv {files}/$PMI_RANK.new {files}/$PMI_RANK; sleep 100"
    );
    for (signal, code) in [("INT", Some(130)), ("TERM", Some(143)), ("KILL", None)] {
        let mut command = ours(3, &shell(&script));
        let mut launcher = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        let pid = |rank: u32| std::fs::read_to_string(folder.0.join(rank.to_string())).ok();
        wait_until(|| (0..3).all(|rank| pid(rank).is_some()));
        let pids: Vec<String> = (0..3).map(|rank| pid(rank).unwrap().trim().to_owned()).collect();
        let kill =
            Command::new("kill").args([&format!("-{signal}"), &launcher.id().to_string()]).status();
        assert!(kill.unwrap().success());
        assert_eq!(launcher.wait().unwrap().code(), code);
        // They may be zombies for a moment, with nobody left to wait for them.
        let is_gone = |pid: &String| {
            let status = std::fs::read_to_string(format!("/proc/{pid}/stat"));
            status.map_or(true, |text| text.contains(") Z "))
        };
        wait_until(|| pids.iter().all(is_gone));
        for rank in 0..3 {
            std::fs::remove_file(folder.0.join(rank.to_string())).unwrap();
        }
    }
}

fn wait_until(mut condition: impl FnMut() -> bool) {
    let began = Instant::now();
    while !condition() {
        assert!(began.elapsed() < Duration::from_secs(60), "it does not come about");
        std::thread::sleep(Duration::from_millis(10));
    }
}

fn output_is_whole_however_much_there_is() {
    let script = "i=0; while [ $i -lt 500 ]; do echo $PMI_RANK:$i:abcdefghijklmnop; i=$((i+1)); done; printf last";
    let (code, text) = finish(&mut ours(4, &shell(script)));
    assert_eq!(code, 0);
    for rank in 0..4 {
        let prefix = format!("[{rank}] ");
        let lines: Vec<&str> = text.lines().filter_map(|line| line.strip_prefix(&prefix)).collect();
        assert_eq!(lines.len(), 501, "rank {rank}");
        for (i, line) in lines[..500].iter().enumerate() {
            assert_eq!(*line, format!("{rank}:{i}:abcdefghijklmnop"));
        }
        assert_eq!(lines[500], "last");
    }
}

fn a_launcher_without_a_protocol_is_an_error() {
    let run = |variables: &[(&str, &str)]| {
        let words = rank_words();
        let mut command = Command::new(&words[0]);
        finish(command.args(&words[1..]).envs(variables.iter().copied()))
    };
    for (variables, why) in [
        (&[("SLURM_PROCID", "0"), ("SLURM_NTASKS", "2")][..], "--mpi=pmi2"),
        (&[("OMPI_COMM_WORLD_RANK", "0"), ("OMPI_COMM_WORLD_SIZE", "2")], "it offers no PMIx"),
        (&[("PMI_FD", "x")], "name: \"PMI_FD\""),
        (&[("PMI_FD", "999")], "Bad file descriptor"),
    ] {
        let (code, text) = run(variables);
        assert_ne!(code, 0);
        assert!(text.contains(why), "{variables:?}: {text}");
    }
    let (code, text) = run(&[("SLURM_PROCID", "0"), ("SLURM_NTASKS", "1")]);
    assert_eq!(code, 0, "{text}");
    check(&text, 1, Launcher::None);
}
