//! Open MPI through UCX, through libfabric (OFI) and through its own code for verbs (openib, which names
//! peers by LID), with its shared memory and TCP switched off. OFI wants addresses that are not of the
//! loopback: so all rows run where the two hosts are.

use std::path::PathBuf;
use std::process::Command;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::process::capture;
use crate::stage::Staged;
use crate::tools;

use super::hosts::{NAMES, on_host};
use super::{LIMIT, Row};

/// The way of the messages: its name here, and what tells Open MPI so.
const WAYS: [(&str, &str); 3] = [
    (
        "ucx",
        "--mca pml ucx --mca osc ucx --mca btl self -x UCX_TLS=rc_verbs,ud_verbs,self \
         -x UCX_NET_DEVICES=quipu0:1",
    ),
    (
        "ofi",
        "--mca pml cm --mca mtl ofi --mca osc pt2pt --mca btl self \
         --mca mtl_ofi_provider_include verbs;ofi_rxm",
    ),
    (
        "openib",
        // With a buffer of the default size, accumulates of its own wait for themselves (docs/clients).
        "--mca pml ob1 --mca osc rdma --mca osc_rdma_buffer_size 16777216 --mca btl openib,self \
         --mca btl_openib_allow_ib 1 --mca btl_openib_if_include quipu0 \
         --mca btl_openib_warn_no_device_params_found 0 -x QUIPU_LINK_LAYER=infiniband",
    ),
];

/// What `tests/clients/mpi.c` does, with how many ranks, and what its first rank says.
const TESTS: [(&str, usize, &str); 3] = [
    ("pingpong", 2, "168 messages of 1 to 1048576 bytes are right"),
    ("allreduce", 4, "9 vectors of 1 to 65536 sums over 4 ranks are right"),
    ("onesided", 2, "6 windows of 2 to 65536 numbers for each of 2 ranks are right"),
];

/// Where ranks are.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Ranks {
    /// All on one of the two hosts, which meet by `QUIPU_SAME_HOST`.
    Together(&'static str),
    /// One half on each.
    Apart,
}

/// Every test by every way, on one of the two hosts and between them.
pub(super) fn rows(staged: &Staged) -> Vec<Row<'_>> {
    let places = [
        ("two-hosts/same-host", Ranks::Together("auto")),
        ("two-hosts/same-host-tcp", Ranks::Together("never")),
        ("two-hosts/v4", Ranks::Apart),
    ];
    let mut rows = Vec::new();
    for (place, ranks) in places {
        for (way, words) in WAYS {
            for (test, count, says) in TESTS {
                rows.push(Row {
                    name: format!("{place}/openmpi/{way}/{test}"),
                    run: Box::new(move || {
                        let mut command = mpirun(staged, ranks, count);
                        command.args(words.split(' ')).arg(program()?).arg(test);
                        let ended = capture(command, LIMIT);
                        let ended = ended.map_err(|error| format!("{error:#}"))?;
                        let told = ended.stdout.contains(says);
                        if ended.success() && told { Ok(()) } else { Err(ended.text("mpirun")) }
                    }),
                });
            }
        }
    }
    rows
}

/// `mpirun` on the first host. On the second one it starts its helpers by a script in the place of ssh; the
/// addresses are the defaults, as one that is given here would be given to all ranks.
fn mpirun(staged: &Staged, ranks: Ranks, count: usize) -> Command {
    let mut words = on_host(0).into_iter();
    let mut command = Command::new(words.next().unwrap_or_default());
    command.args(words).arg(&staged.quipu).args(["run", "--", "mpirun", "--oversubscribe"]);
    command.args(["--bind-to", "none", "--mca", "mpi_yield_when_idle", "1"]);
    // Its daemon looks for a hole in its memory for what hwloc knows, to be mapped by ranks, and may crash.
    command.args(["--mca", "rtc_hwloc_vmhole", "none"]);
    // Its folder for each job lies in one that it makes and removes, so that jobs at the same time would take
    // it from each other.
    static JOBS: AtomicUsize = AtomicUsize::new(0);
    let folder = format!("/run/openmpi-{}", JOBS.fetch_add(1, Ordering::Relaxed));
    command.args(["--mca", "orte_tmpdir_base", &folder]);
    // Asked of whoever is root, inside a namespace of users too.
    command.envs([("OMPI_ALLOW_RUN_AS_ROOT", "1"), ("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1")]);
    match ranks {
        Ranks::Together(same_host) => {
            command.env("QUIPU_SAME_HOST", same_host).args(["-n", &count.to_string()]);
        }
        Ranks::Apart => {
            let hosts = NAMES.map(|name| format!("{name}:{}", count / 2)).join(",");
            let agent = crate::root().join("tests/clients/on-host.sh");
            command.args(["--host", &hosts, "--mca", "plm_rsh_agent"]).arg(agent);
        }
    }
    command
}

/// The program of the tests, built when it is first asked for.
fn program() -> Result<&'static PathBuf, String> {
    static PROGRAM: OnceLock<Result<PathBuf, String>> = OnceLock::new();
    PROGRAM.get_or_init(|| build(["mpicc", "mpirun"], "mpi")).as_ref().map_err(Clone::clone)
}

/// Builds the program of the tests for one implementation of MPI: by its compiler, if what starts the ranks
/// is there too.
pub(super) fn build([compiler, starter]: [&str; 2], name: &str) -> Result<PathBuf, String> {
    for tool in [compiler, starter] {
        if tools::find(tool).is_none() {
            return Err(format!("  {tool} is missing: run `make check`"));
        }
    }
    let program = crate::target_dir().join("quipu").join(name);
    let mut command = Command::new(compiler);
    command.args(["-O2", "-Wall", "-Wextra", "-Werror", "-o"]).arg(&program);
    command.arg(crate::root().join("tests/clients/mpi.c"));
    let ended = capture(command, LIMIT).map_err(|error| format!("{error:#}"))?;
    if ended.success() { Ok(program) } else { Err(ended.text(compiler)) }
}
