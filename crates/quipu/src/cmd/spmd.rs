//! `quipu spmd`: starts the processes of a parallel program and waits for them.

use std::env;
use std::ffi::OsString;
use std::fs;
use std::path::PathBuf;
use std::process::ExitCode;

use quipu_launch::spmd::{self, Host, parse_host_file, parse_hosts};

use super::failure::Failure;

/// What to start, and where.
#[derive(clap::Args)]
#[command(after_long_help = EXAMPLES)]
pub(crate) struct Options {
    /// Number of processes (ranks). Default: 1, or one for each slot of the hosts.
    #[arg(long = "ranks", short = 'n', value_name = "N")]
    ranks: Option<u32>,
    /// Hosts to run on, in rank order: `a,b:2` gives one slot to a and two to b.
    ///
    /// Without numbers, each host gets an equal share. `localhost` needs no ssh. Write IPv6 addresses in
    /// brackets.
    #[arg(long, value_name = "HOSTS", conflicts_with = "hostfile")]
    hosts: Option<String>,
    /// File with one host on each line: `a`, `a:2` or `a slots=2`. `#` starts a comment.
    #[arg(long, value_name = "FILE")]
    hostfile: Option<PathBuf>,
    /// Command that runs a command line on a host. It must not ask for a password.
    #[arg(long, value_name = "COMMAND", default_value = "ssh -o BatchMode=yes")]
    ssh: String,
    /// Path of the quipu command on the other hosts. Default: the path of this one.
    #[arg(long, value_name = "PATH")]
    remote_quipu: Option<String>,
    /// Environment variable for ranks on other hosts, in addition to QUIPU_*: NAME or NAME=VALUE.
    #[arg(long = "env", short = 'x', value_name = "NAME[=VALUE]")]
    variables: Vec<String>,
    /// Whether to put `[RANK]` before each line of output. `auto`: if there are several ranks.
    #[arg(long, value_name = "WHEN", default_value = "auto")]
    label: Label,
    /// Run the ranks of this host for a launcher on another one.
    #[arg(long, hide = true)]
    node: bool,
    /// The program and its arguments.
    #[arg(
        required_unless_present = "node",
        trailing_var_arg = true,
        allow_hyphen_values = true,
        value_name = "PROGRAM"
    )]
    program: Vec<OsString>,
}

#[derive(Clone, Copy, Debug, clap::ValueEnum)]
enum Label {
    Auto,
    Always,
    Never,
}

const EXAMPLES: &str = "\
Examples:
  quipu spmd -n 8 -- ./em3d                     eight processes on this machine
  quipu spmd -n 8 --hosts a,b -- ./em3d         four on a, four on b, started by ssh
  quipu spmd --hosts localhost:2,b:6 -- ./em3d
  quipu spmd -n 4 --label never -- ./em3d       output without [RANK]

The program finds its peers through PMI-1, as under mpiexec.hydra. This suits programs of Split-C,
Active Messages and MPICH. mpirun, mpiexec.hydra and srun can start the same programs (docs/launch).
On other hosts, the program, the quipu command and the working directory must have the same paths as
here. Rank 0 reads standard input if it runs here.

The job ends with the last rank. If a rank is killed or exits with a code other than 0, the others
get SIGTERM, and SIGKILL two seconds later. A message names the rank and the reason. Ctrl-C, SIGTERM
and SIGHUP end all ranks in the same way; a second Ctrl-C kills them at once. No rank outlives the
command.

Exit codes: 0 if all ranks exit with 0; otherwise the code of the first rank that failed, or 128 +
the signal that killed it. 1: a host was lost; 125: quipu cannot start the job; 126: the program
cannot be run; 127: there is no such program.";

/// Runs the job.
pub(crate) fn run(options: &Options) -> Result<ExitCode, Failure> {
    if options.node {
        let served = spmd::serve();
        let failure = |error| Failure::new("cannot run the ranks of this host", error, "");
        return served.map(|()| ExitCode::SUCCESS).map_err(|error| failure(error).with_code(125));
    }
    let what = "cannot start the job";
    let hosts = hosts(options)?;
    let placed = spmd::place(options.ranks, &hosts);
    let placed = placed.map_err(|error| Failure::new(what, error, "").with_code(2))?;
    let several = placed.iter().map(|(_, ranks)| ranks).sum::<u32>() > 1;
    let quipu = match &options.remote_quipu {
        Some(path) => path.clone(),
        None => env::current_exe().map_or("quipu".into(), |path| path.display().to_string()),
    };
    let job = spmd::Options {
        ranks: options.ranks,
        hosts,
        ssh: options.ssh.split_whitespace().map(str::to_owned).collect(),
        quipu,
        label: match options.label {
            Label::Auto => several,
            Label::Always => true,
            Label::Never => false,
        },
        variables: options.variables.clone(),
        program: options.program.clone(),
    };
    let code = spmd::run(&job);
    code.map(ExitCode::from).map_err(|error| Failure::new(what, error, "").with_code(125))
}

fn hosts(options: &Options) -> Result<Vec<Host>, Failure> {
    let hosts = match (&options.hosts, &options.hostfile) {
        (Some(list), _) => parse_hosts(list),
        (None, Some(file)) => {
            let text = fs::read_to_string(file);
            let unread = |error| {
                let what = format!("cannot read {}", file.display());
                Failure::new(what, error, "give --hostfile a file that you can read")
            };
            parse_host_file(&text.map_err(|error| unread(error).with_code(2))?)
        }
        (None, None) => return Ok(Vec::new()),
    };
    let what = "cannot use these hosts";
    let hosts = hosts.map_err(|error| Failure::new(what, error, "").with_code(2))?;
    if hosts.is_empty() {
        let remedy = "write NAME or NAME:RANKS, in a file one on each line";
        return Err(Failure::new(what, "no host is named", remedy).with_code(2));
    }
    Ok(hosts)
}
