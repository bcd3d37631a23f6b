//! A file on ext2 on an attached disk: figure 7 of the QPIP paper (section 4.2.3).
//!
//! The server is in a network of its own at the other end of a veth pair with MTU 9000, pinned to
//! processor 1, and has its disk in memory. The client's programs are pinned to processor 0. Its
//! processor time is that of its programs and of the kernel's threads (`cpu`).

use std::cell::Cell;
use std::fs;
use std::io;
use std::process::ExitCode;
use std::thread;
use std::time::Duration;

use super::cpu;
use super::process::{Folder, Running, command, is_there, run, start, start_until};
use super::{Failure, Table};

/// What ratios are to.
pub(super) const BASE: &str = "kernel TCP";
const WRITE: &str = "ext2 write";
const READ: &str = "ext2 read";
/// The file system's own needs, in bytes.
const MARGIN: u64 = 32 << 20;

/// Names, where the server is, its arguments, the URI's scheme and host, and the client's arguments.
struct Contender {
    name: &'static str,
    remote: bool,
    serve: &'static [&'static str],
    uri: &'static str,
    attach: &'static [&'static str],
}

const CONTENDERS: [Contender; 5] = [
    Contender {
        name: BASE,
        remote: true,
        serve: &["--listen", "10.9.0.2:10809"],
        uri: "nbd://10.9.0.2",
        attach: &[],
    },
    Contender {
        name: "RC queue pairs over TCP",
        remote: true,
        serve: &["--listen", "10.9.0.2:10809", "--rdma"],
        uri: "nbd+rdma://10.9.0.2",
        attach: &[],
    },
    Contender {
        name: "QPIP queue pairs",
        remote: true,
        serve: &["--qpip", "--link", "packet:quipu1", "--address", "10.9.1.2/24"],
        uri: "nbd+qpip://10.9.1.2",
        attach: &["--link", "packet:quipu0", "--address", "10.9.1.1/24"],
    },
    Contender {
        name: "RC queue pairs, one host",
        remote: false,
        serve: &["--listen", "127.0.0.1:10809", "--rdma"],
        uri: "nbd+rdma://127.0.0.1",
        attach: &[],
    },
    Contender {
        name: "kernel TCP, one host",
        remote: false,
        serve: &["--listen", "127.0.0.1:10810"],
        uri: "nbd://127.0.0.1:10810",
        attach: &[],
    },
];
const NBDFUSE: &str = "kernel TCP, nbdfuse";
const LOCAL: &str = "local file, no network";

/// Runs this command again in namespaces of its own, which take everything with them when they end.
pub(super) fn enter() -> Result<ExitCode, Failure> {
    const PROGRAMS: [(&str, &str); 7] = [
        ("unshare", "util-linux"),
        ("nsenter", "util-linux"),
        ("taskset", "util-linux"),
        ("losetup", "mount"),
        ("ip", "iproute2"),
        ("mke2fs", "e2fsprogs"),
        ("dd", "coreutils"),
    ];
    let cannot = |why: String| {
        Failure::new(
            "figure 7 cannot be measured here",
            why,
            "Run it as root on a machine with /dev/fuse and loop devices.",
        )
    };
    for (program, package) in PROGRAMS {
        if !is_there(program) {
            return Err(cannot(format!("{program} is not installed (package {package})")));
        }
    }
    if !rustix::process::geteuid().is_root() {
        return Err(cannot("only root may mount file systems".into()));
    }
    if !std::path::Path::new("/dev/fuse").exists() {
        return Err(cannot("there is no /dev/fuse".into()));
    }
    run(&["losetup", "--find"]).map_err(|error| cannot(error.to_string()))?;
    let own = std::env::current_exe()?.to_string_lossy().into_owned();
    let arguments: Vec<_> = std::env::args().skip(1).collect();
    let mut line = vec!["unshare", "--mount", "--net", "taskset", "--cpu-list", "0", &own];
    line.extend(arguments.iter().map(String::as_str));
    line.push("--inside");
    let status = command(&line).status()?;
    if status.success() { Ok(ExitCode::SUCCESS) } else { Ok(ExitCode::FAILURE) }
}

/// Measures all in turns.
pub(super) fn measure(rounds: u32, size: u64, table: &mut Table) -> Result<(), Failure> {
    let folder = Folder::new()?;
    let far = network()?;
    let far = far.0.id().to_string();
    let load = fs::read_to_string("/proc/loadavg").unwrap_or_default();
    let load: f64 = load.split(' ').next().and_then(|it| it.parse().ok()).unwrap_or_default();
    if load > 0.5 {
        let others = "other programs ran at the beginning, which makes throughput uneven";
        table.note(format!("the load was {load:.1}: {others}"));
    }
    let idle = cpu::idle_share();
    let place = Place { folder, far, size, idle, turns: Cell::new(0) };
    for _ in 0..rounds {
        for contender in &CONTENDERS {
            if let Err(error) = place.turn(contender, false, contender.name, table) {
                table.note(format!("{}: {error}", contender.name));
            }
        }
        if is_there("nbdfuse") {
            if let Err(error) = place.turn(&CONTENDERS[0], true, NBDFUSE, table) {
                table.note(format!("{NBDFUSE}: {error}"));
            }
        } else {
            table.note(format!("{NBDFUSE}: it is not installed"));
        }
        place.local(table)?;
    }
    Ok(())
}

/// A pair of interfaces, of which the second is in the namespace of the process that this returns.
fn network() -> io::Result<Running> {
    let (far, _) =
        start(command(&["unshare", "--net", "sh", "-c", "echo begun; exec sleep 86400"]))?;
    let id = far.0.id().to_string();
    run(&["ip", "link", "set", "lo", "up"])?;
    run(&["ip", "link", "add", "quipu0", "type", "veth", "peer", "name", "quipu1", "netns", &id])?;
    run(&["ip", "address", "add", "10.9.0.1/24", "dev", "quipu0"])?;
    run(&["ip", "link", "set", "quipu0", "mtu", "9000", "up"])?;
    let there = ["nsenter", "-t", &id, "-n", "ip"];
    run(&[&there[..], &["address", "add", "10.9.0.2/24", "dev", "quipu1"]].concat())?;
    run(&[&there[..], &["link", "set", "quipu1", "mtu", "9000", "up"]].concat())?;
    run(&[&there[..], &["link", "set", "lo", "up"]].concat())?;
    Ok(far)
}

/// Unmounts as soon as the loop device has let go of it, which it does some time after its own end.
fn unmount(folder: &str) -> io::Result<()> {
    for _ in 0..50 {
        if run(&["umount", folder]).is_ok() {
            return Ok(());
        }
        thread::sleep(Duration::from_millis(100));
    }
    run(&["umount", "--lazy", folder]).map(|_| ())
}

/// Mounts the file system in a file. Its block device does direct I/O, which lets several requests be
/// under way, and goes when it is unmounted.
fn mount(file: &str, folder: &str) -> io::Result<()> {
    let device = run(&["losetup", "--find", "--show", "--direct-io=on", file])?;
    let device = device.trim();
    let mounted = run(&["mount", "-t", "ext2", device, folder]);
    run(&["losetup", "--detach", device])?;
    mounted.map(|_| ())
}

struct Place {
    folder: Folder,
    /// The process in the server's network.
    far: String,
    size: u64,
    /// Share of a processor that the kernel's threads use without this.
    idle: f64,
    /// How many turns there were.
    turns: Cell<u32>,
}

impl Place {
    fn turn(
        &self,
        contender: &Contender,
        nbdfuse: bool,
        name: &'static str,
        table: &mut Table,
    ) -> io::Result<()> {
        let quipu = std::env::current_exe()?.to_string_lossy().into_owned();
        let memory = (self.size + self.size / 16 + MARGIN).to_string();
        let enter = ["nsenter", "-t", &self.far, "-n"];
        let pinned = ["taskset", "--cpu-list", "1", &quipu, "nbd", "serve", "--memory", &memory];
        let mut line: Vec<&str> = if contender.remote { enter.to_vec() } else { Vec::new() };
        line.extend(pinned.iter().chain(contender.serve));
        let (_server, _) = start(command(&line))?;
        // A folder of its own: the mount of an earlier turn may still be ending.
        let at = self.folder.path(&format!("disk-{}", self.turns.get()));
        self.turns.set(self.turns.get() + 1);
        fs::create_dir_all(&at)?;
        let file = format!("{at}/nbd");
        let mut client = if nbdfuse {
            start_until(command(&["nbdfuse", &at, contender.uri]), file.as_ref())?
        } else {
            let line =
                [&[&quipu, "nbd", "attach"], contender.attach, &[contender.uri, &at]].concat();
            start(command(&line))?.0
        };
        let outcome = self.file_system(&file, Some(client.0.id()), name, table);
        unmount(&at)?;
        // It ends by itself, after its last flush.
        client.wait(Duration::from_secs(5));
        outcome
    }

    /// The same on a file of this machine: the share of the file system.
    fn local(&self, table: &mut Table) -> io::Result<()> {
        let at = self.folder.path("local");
        fs::create_dir_all(&at)?;
        run(&["mount", "-t", "tmpfs", "none", &at])?;
        let file = format!("{at}/disk");
        let outcome = fs::File::create(&file)
            .and_then(|disk| disk.set_len(self.size + self.size / 16 + MARGIN))
            .and_then(|()| self.file_system(&file, None, LOCAL, table));
        unmount(&at)?;
        outcome
    }

    /// `client` is the process that has the file, if there is one.
    fn file_system(
        &self,
        file: &str,
        client: Option<u32>,
        name: &'static str,
        table: &mut Table,
    ) -> io::Result<()> {
        run(&["mke2fs", "-q", "-F", "-t", "ext2", "-b", "4096", file])?;
        let root = self.folder.path("root");
        fs::create_dir_all(&root)?;
        let data = format!("{root}/data");
        let count = format!("count={}", self.size >> 20);
        let (target, source) = (format!("of={data}"), format!("if={data}"));
        let write = ["dd", "if=/dev/zero", &target, "bs=1M", &count, "conv=fsync"];
        let read = ["dd", &source, "of=/dev/null", "bs=1M"];
        for (test, work) in [(WRITE, &write[..]), (READ, &read)] {
            // Mounting anew leaves nothing in memory.
            mount(file, &root)?;
            let outcome = cpu::timed(&[work, &["sync", "-f", &root]], client, self.idle);
            run(&["umount", &root])?;
            let (seconds, used) = outcome?;
            let megabytes = self.size as f64 / 1e6;
            table.add(test, name, (megabytes / seconds, megabytes / used));
        }
        Ok(())
    }
}
