//! `quipu nbd attach`: a server's disk as a file, by FUSE.

mod front;
mod lines;
mod mount;
mod protocol;

use std::path::PathBuf;
use std::process::ExitCode;
use std::thread;
use std::time::Duration;

use quipu_host::Interrupts;
use quipu_nbd::schedule::Limits;
use quipu_nbd::uri::Uri;
use quipu_nbd::{Export, TransmissionFlags};

use self::front::Front;
use self::lines::Lines;
use self::mount::{Handle, Mount};
use self::protocol::{MAX_DATA, NAME};
use super::Failure;
use super::info::{failed, prepare};
use crate::cmd::qpip::LinkOptions;

/// What to attach, and where.
#[derive(clap::Args)]
#[command(after_long_help = EXAMPLES)]
pub(crate) struct Options {
    #[command(flatten)]
    link: LinkOptions,
    /// The server's disk.
    #[arg(value_name = "URI")]
    uri: Uri,
    /// A folder, in which the disk is the file "nbd" as long as this command runs.
    #[arg(value_name = "DIR")]
    folder: PathBuf,
    /// Refuse writes.
    #[arg(long, short)]
    read_only: bool,
    /// Connect again for so many seconds when the connection is lost, and repeat the requests in flight.
    /// Without this they fail at once.
    #[arg(long, value_name = "SECONDS")]
    reconnect: Option<u64>,
    /// How long a reply may take before the connection counts as lost.
    #[arg(long, value_name = "SECONDS", default_value_t = 30,
          value_parser = clap::value_parser!(u64).range(1..))]
    timeout: u64,
    /// Let the kernel keep pages of the file, read ahead, and write later, for programs that make one
    /// request at a time. Other clients see writes after a flush; what they write is not seen.
    #[arg(long)]
    cache: bool,
}

const EXAMPLES: &str = "\
Examples:
  quipu nbd attach nbd://127.0.0.1 /mnt/disk                   the disk is /mnt/disk/nbd
  quipu nbd attach --reconnect 60 nbd+rdma://10.0.0.1/a DIR    survives a restart of the server
  mke2fs -t ext2 DIR/nbd; mount -o loop DIR/nbd /mnt           a file system on it, as root
  losetup --find --show --direct-io=on DIR/nbd                 a block device with many at a time

Needs no root where fusermount3 is installed (package fuse3). Ctrl-C or `umount DIR` ends it.";

/// Runs it.
pub(super) fn run(options: &Options) -> Result<ExitCode, Failure> {
    // Before other threads begin, which would get the signals otherwise.
    let interrupts = Interrupts::block()?;
    prepare(&options.uri, &options.link)?;
    let lines = Lines::new(&options.uri, options.reconnect.is_some());
    let lines = lines.map_err(|trouble| failed(&options.uri, &trouble))?;
    let file = file(options, lines.export())?;
    let mount = Mount::new(&options.folder, file.read_only).map_err(|error| {
        let what = format!("cannot mount at {}", options.folder.display());
        Failure::new(what, error, "Give an empty folder of yours, and install the package fuse3.")
    })?;
    println!("attached {} bytes at {}", file.size, options.folder.join(NAME).display());
    println!("Ctrl-C ends it.");
    let handle = mount.handle();
    thread::spawn(move || end_by_signal(&interrupts, &handle));
    let limits = Limits {
        reply: Duration::from_secs(options.timeout),
        reconnect: options.reconnect.map(Duration::from_secs),
    };
    let outcome = Front::new(mount.device, file, lines, limits).and_then(|mut front| front.run());
    outcome.map_err(|error| {
        Failure::new("the last writes may be lost", error, "Check the server and its disk.")
    })?;
    Ok(ExitCode::SUCCESS)
}

/// What the file is like.
fn file(options: &Options, export: &Export) -> Result<protocol::File, Failure> {
    const PAGE: usize = 4096;
    let longest = MAX_DATA.min(export.blocks.maximum as usize) / PAGE * PAGE;
    if longest == 0 {
        let why = format!("it takes at most {} bytes", export.blocks.maximum);
        let remedy = "Have the server take requests of at least 4096 bytes.";
        return Err(Failure::new("the server takes too little in a request", why, remedy));
    }
    Ok(protocol::File {
        size: export.size,
        read_only: options.read_only || export.flags.contains(TransmissionFlags::READ_ONLY),
        longest,
        is_cached: options.cache,
        uid: rustix::process::getuid().as_raw(),
        gid: rustix::process::getgid().as_raw(),
    })
}

/// Unmounts when a signal comes, and by force when another comes.
fn end_by_signal(interrupts: &Interrupts, handle: &Handle) {
    interrupts.wait();
    if let Err(error) = handle.unmount(false) {
        eprintln!("the file is in use ({error}): another Ctrl-C ends it as soon as it is not");
        interrupts.wait();
        if handle.unmount(true).is_err() {
            std::process::exit(1);
        }
    }
}
