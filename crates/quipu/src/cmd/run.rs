//! `quipu run`: becomes the program, with Quipu's libraries in front of the system's.

use std::env;
use std::ffi::{OsStr, OsString};
use std::fs;
use std::io;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use quipu_host::{
    effective_user_and_group, gives_no_rights, has_capabilities, may_execute,
    may_gain_no_privileges,
};

use super::DeviceOptions;
use super::capture::CaptureOptions;
use super::elf::{self, Kind};
use super::env::variables;
use super::failure::Failure;
use super::faults::FaultOptions;
use super::libraries::Libraries;
use super::qos::QosOptions;

/// What to run, and how.
#[derive(clap::Args)]
#[command(after_long_help = EXAMPLES)]
pub(crate) struct Options {
    #[command(flatten)]
    device: DeviceOptions,
    /// What the adapter logs to standard error, such as `debug` or `quipu_host=trace`.
    #[arg(long, short, env = "QUIPU_LOG", value_name = "FILTER")]
    log: Option<String>,
    /// Let peers on this machine map registered memory, and access it by loads and stores.
    ///
    /// This is several times as fast. No thread of the program may write to memory while it is being
    /// registered: see docs/shared-pages.md.
    #[arg(long)]
    shared_pages: bool,
    #[command(flatten)]
    capture: CaptureOptions,
    #[command(flatten)]
    qos: QosOptions,
    #[command(flatten)]
    faults: FaultOptions,
    /// The program and its arguments.
    #[arg(
        required = true,
        trailing_var_arg = true,
        allow_hyphen_values = true,
        value_name = "PROGRAM"
    )]
    program: Vec<OsString>,
}

const EXAMPLES: &str = r#"Examples:
  quipu run -- ibv_devinfo -v
  quipu run -- ib_write_bw                       server, on the default address
  quipu run -- ib_write_bw 192.0.2.7             client, on this machine or another one
  quipu run --address ::1 -- ibv_rc_pingpong -g 0
  quipu run --log debug -- python3 train.py
  quipu run --shared-pages -- ib_write_bw        peers on this machine map registered memory
  quipu run --pcap %p.pcapng -- mpirun ...       captures packets of each process for Wireshark
  quipu run --trace calls.txt -- ./a.out         records each call of verbs and rdma_cm
  quipu run --rate 10Gbps --qos qos.toml -- ib_write_bw --sl 1     a port with lanes: docs/qos.md
  quipu run --fault plan.toml -- ./a.out         injects faults, see FAULTS below

The program replaces quipu in the same process, so signals, exit code and terminal are its own.
Programs that it starts see the adapter, too. Programs with more privileges than their user
(set-user-ID, file capabilities) and statically linked programs do not see it.

FAULTS: a plan says what fails, where and when, in an unmodified program:

  seed = 42
  [[fault]]
  inject = "completion"          # delay slow_peer dead_peer rnr port_down device_removal event
                                 # cm_event refuse
  status = "rem_access_err"      # any ibv_wc_status, without IBV_WC_
  opcode = "rdma_write"          # where: opcode, bytes, side, qp, qp_num, cq, program, env
  nth = 100                      # when: nth, every, probability, after, count
  [[fault]]
  inject = "refuse"
  call = "reg_mr"                # any call of verbs, without ibv_
  errno = "ENOMEM"

The same seed and the same calls of the program give the same faults. Quipu reports each fault on
standard error, or in the file of --fault-log. --fault-replay repeats exactly the faults of such a
file. docs/faults.md has every key, examples and a tutorial. quipu checks the plan before it starts
the program.

Exit codes of quipu itself: 2 wrong options, 125 quipu failed, 126 the program cannot be run, 127
there is no such program.

Environment variables:
  QUIPU_ADDRESS        address of the device, as --address
  QUIPU_LOG            what is logged, as --log
  QUIPU_FAULTS, QUIPU_FAULT_LOG, QUIPU_FAULT_REPLAY
                       files, as --fault, --fault-log (the variable appends to it), --fault-replay
  QUIPU_DEVICES        the devices that programs see: some of quipu0,quipu_iw0,quipu_qp0
  QUIPU_CM_DEVICE      the one that rdma_cm connects from; by default quipu0, or the first one
  QUIPU_QPIP_LINK, QUIPU_QPIP_ADDRESS, QUIPU_QPIP_GATEWAY
                       packet link of quipu_qp0, as --link, --address, --gateway of `quipu nic`
  QUIPU_MULTICAST_PORT UDP port of multicast datagrams, 20804 by default
  QUIPU_IWARP_SPEAK_FIRST_MS
                       milliseconds of silence after which a server on quipu_iw0 sends first, 100 by
                       default; or never
  QUIPU_STRICT_HOLD_US microseconds for which --strict holds back bytes of writes, 1000 by default
  QUIPU_LINK_LAYER     infiniband: the port of quipu0 has a LID, for programs that name peers by LID
  QUIPU_SAME_HOST      auto: shared memory to peers on this machine; never: TCP
  QUIPU_PEER_MEMORY    auto: access memory of peers on this machine if the kernel allows it;
                       allow: also let them access this program's; never: copy through shared memory
  QUIPU_SHARED_PAGES   registered: as --shared-pages
  QUIPU_CRC            always: CRCs also between processes of this machine;
                       never: only if the peer asks
  QUIPU_CONGESTION     congestion control of TCP connections, such as cubic
  QUIPU_ARENA_MB       most memory shared with peers on this machine, 1024 by default
  QUIPU_COUNTERS       never: hide the program from `quipu top`
  QUIPU_RATE, QUIPU_QOS  as --rate, --qos
  QUIPU_PCAP           as --pcap; QUIPU_PCAP_MB as --pcap-size and QUIPU_PCAP_SNAPLEN as
                       --pcap-snaplen
  QUIPU_TRACE          as --trace
  QUIPU_LIB_DIR        folder of Quipu's libraries, if not near the command"#;

impl Options {
    /// The program and its arguments.
    #[cfg(test)]
    pub(crate) fn program(&self) -> &[OsString] {
        &self.program
    }
}

/// Replaces this process by the program.
pub(crate) fn run(options: &Options) -> Result<ExitCode, Failure> {
    let (name, args) = options.program.split_first().expect("clap requires a program");
    let file = find(name)?;
    check(&file)?;
    options.faults.check()?;
    options.qos.check()?;
    let libraries = Libraries::find()?;
    let mut command = Command::new(&file);
    command.arg0(name).args(args);
    command.envs(variables(&libraries, &options.device, options.log.as_deref()));
    if options.shared_pages {
        command.env("QUIPU_SHARED_PAGES", "registered");
    }
    command.envs(options.capture.variables()?);
    command.envs(options.faults.variables());
    command.envs(options.qos.variables());
    // It returns only if it fails.
    Err(not_run(&file, quipu_host::become_program(&mut command)))
}

/// Why the kernel does not run a program that is there.
pub(crate) fn not_run(file: &Path, error: io::Error) -> Failure {
    let missing =
        elf::missing_interpreter(file).filter(|_| error.kind() == io::ErrorKind::NotFound);
    let why = match missing {
        Some(interpreter) => format!("its interpreter {interpreter:?} is not there"),
        None => error.to_string(),
    };
    Failure::new(format!("cannot run {}", file.display()), why, "").with_code(126)
}

/// The program's file, as a shell finds it.
pub(crate) fn find(name: &OsStr) -> Result<PathBuf, Failure> {
    let shown = name.to_string_lossy();
    let missing = |why: &str, remedy: String| {
        Err(Failure::new(format!("cannot run {shown}"), why, remedy).with_code(127))
    };
    if shown.contains('/') {
        let file = PathBuf::from(name);
        return match fs::metadata(&file) {
            Err(error) => missing(&error.to_string(), "check the path".into()),
            Ok(_) => Ok(file),
        };
    }
    let path = env::var_os("PATH").unwrap_or_else(|| "/usr/local/bin:/usr/bin:/bin".into());
    let runs = |data: fs::Metadata| data.is_file() && data.permissions().mode() & 0o111 != 0;
    let files = env::split_paths(&path).map(|folder| folder.join(name));
    let files: Vec<_> = files.filter(|file| fs::metadata(file).is_ok_and(runs)).collect();
    // As execvp(3): one that this user may not execute is left for another.
    let found = files.iter().find(|file| may_execute(file)).or(files.first()).cloned();
    match found {
        Some(file) => Ok(file),
        None => {
            let remedy = match super::doctor::package_of(&shown) {
                Some(package) => format!("install it: apt-get install {package}"),
                None if shown.starts_with('-') => {
                    "if you meant an option: `quipu run --help` lists them".into()
                }
                None => "install it, or give its path".into(),
            };
            missing("no folder of PATH contains it", remedy)
        }
    }
}

/// Refuses what would run without the adapter, or not at all.
fn check(file: &Path) -> Result<(), Failure> {
    let refuse = |why: &str, remedy: &str| {
        let what = format!("cannot give {} an RDMA adapter", file.display());
        Err(Failure::new(what, why, remedy).with_code(126))
    };
    // One that its user may not read may have more rights all the same.
    let file = elf::interpreted(file).unwrap_or_else(|| file.to_owned());
    if let Some((what, remedy)) = Rights::of(&file).and_then(|rights| rights.gained()) {
        let why = format!(
            "it runs with more privileges than its user ({what}), and then the system's loader \
             ignores LD_PRELOAD"
        );
        return refuse(&why, remedy);
    }
    match elf::inspect(&file) {
        Kind::Dynamic | Kind::Unknown => Ok(()),
        Kind::Static => refuse(
            "it is statically linked, so its libraries cannot be replaced",
            "use a build that links libibverbs dynamically",
        ),
        Kind::OtherLoader(loader) => refuse(
            &format!("it uses the loader {loader}, and Quipu's libraries need glibc's loader"),
            "use a build for glibc",
        ),
        Kind::OtherMachine => refuse(
            "it and Quipu's libraries are built for different processors",
            "use a build of it, or of Quipu, for the other processor",
        ),
    }
}

/// What the kernel looks at where a program may get rights that its user does not have (execve(2),
/// capabilities(7)).
#[derive(Clone, Copy, Default)]
struct Rights {
    mode: u32,
    /// User and group of the file, and of this process.
    owner: (u32, u32),
    own: (u32, u32),
    capabilities: bool,
    /// Of the file system.
    nosuid: bool,
    /// Of this process, as containers may set it.
    no_new_privileges: bool,
}

impl Rights {
    fn of(file: &Path) -> Option<Self> {
        let program = fs::metadata(file).ok()?;
        Some(Self {
            mode: program.permissions().mode(),
            owner: (program.uid(), program.gid()),
            own: effective_user_and_group(),
            capabilities: has_capabilities(file),
            nosuid: gives_no_rights(file),
            no_new_privileges: may_gain_no_privileges(),
        })
    }

    /// Which rights the program gets, and what to do about it.
    fn gained(&self) -> Option<(&'static str, &'static str)> {
        let user = self.mode & 0o4000 != 0 && self.owner.0 != self.own.0;
        let group = self.mode & 0o2010 == 0o2010 && self.owner.1 != self.own.1;
        if self.nosuid {
            None
        } else if (user || group) && !self.no_new_privileges {
            let remedy = "run it as its owner or group, or use a copy without that bit";
            Some(("set-user-ID or set-group-ID", remedy))
        } else if self.capabilities && self.own.0 != 0 {
            Some(("file capabilities", "use a copy of the file, which has no capabilities"))
        } else {
            None
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_that_gains_rights_is_known() {
        let plain = Rights { owner: (0, 0), own: (1000, 1000), mode: 0o755, ..Rights::default() };
        let gains = |rights: Rights| rights.gained().is_some();
        assert!(!gains(plain));
        for mode in [0o4755, 0o2755] {
            let set = Rights { mode, ..plain };
            assert!(gains(set));
            assert!(!gains(Rights { own: (0, 0), ..set }), "the rights of the user");
            assert!(!gains(Rights { nosuid: true, ..set }));
            assert!(!gains(Rights { no_new_privileges: true, ..set }));
        }
        // Without the right to execute, the bit of the group means locks (fcntl(2)).
        assert!(!gains(Rights { mode: 0o2745, ..plain }));
        let capable = Rights { capabilities: true, ..plain };
        assert!(gains(capable) && !gains(Rights { own: (0, 0), ..capable }));
        assert!(!gains(Rights { nosuid: true, ..capable }));
        // The loader is told of the capabilities even though the program does not get them.
        assert!(gains(Rights { no_new_privileges: true, ..capable }));
    }

    #[test]
    fn a_script_whose_interpreter_is_not_there_says_so() {
        let script = env::temp_dir().join(format!("quipu-script-{}", std::process::id()));
        for (first, named) in
            [("#! /no/such -e\n", "\"/no/such\""), ("#!/bin/sh\r\n", r#""/bin/sh\r""#)]
        {
            fs::write(&script, first).unwrap();
            let said = not_run(&script, io::Error::from_raw_os_error(2)).to_string();
            assert!(said.contains(&format!("its interpreter {named} is not there")), "{said}");
        }
        fs::write(&script, "#!/bin/sh\n").unwrap();
        let said = not_run(&script, io::Error::from_raw_os_error(2)).to_string();
        assert!(said.contains("No such file"), "{said}");
        fs::remove_file(&script).unwrap();
    }

    #[test]
    fn a_program_that_is_not_there_comes_with_a_remedy() {
        let remedy = |name: &str| find(OsStr::new(name)).unwrap_err().to_string();
        assert!(remedy("--adress").contains("`quipu run --help`"));
        assert!(remedy("no-such-program").contains("give its path"));
        assert!(remedy("/no/such/program").contains("check the path"));
        assert_eq!(find(OsStr::new("/proc/self/exe")).unwrap(), Path::new("/proc/self/exe"));
    }
}
