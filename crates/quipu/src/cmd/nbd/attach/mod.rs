//! `quipu nbd attach`: a server's disk as a file, by FUSE.

mod mount;
mod protocol;

use std::fs::File;
use std::io::{self, IoSlice, Read, Write};
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::{PoisonError, RwLock};
use std::thread;
use std::time::Duration;

use quipu_host::Interrupts;
use quipu_nbd::uri::Uri;

use self::mount::{Handle, Mount};
use self::protocol::{BUFFER, EINVAL, NAME, OUT_HEADER, Wants, header};
use super::Failure;
use super::disk::Disk;
use super::info::{failed, prepare};
use super::remote::Remote;
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
}

const EXAMPLES: &str = "\
Examples:
  quipu nbd attach nbd://127.0.0.1 /mnt/disk                   the disk is /mnt/disk/nbd
  quipu nbd attach --reconnect 60 nbd+rdma://10.0.0.1/a DIR    survives a restart of the server
  mke2fs -t ext2 DIR/nbd; mount -o loop DIR/nbd /mnt           a file system on it, as root

Needs no root where fusermount3 is installed (package fuse3). Ctrl-C or `umount DIR` ends it.";

/// Runs it.
pub(super) fn run(options: &Options) -> Result<ExitCode, Failure> {
    // Before other threads begin, which would get the signals otherwise.
    let interrupts = Interrupts::block()?;
    prepare(&options.uri, &options.link)?;
    let mut disk = Remote::open(&options.uri).map_err(|it| failed(&options.uri, &it))?;
    disk.set_patience(Duration::from_secs(options.timeout));
    disk.set_reconnect(options.reconnect.map(Duration::from_secs));
    let read_only = options.read_only || disk.is_read_only();
    let mount = Mount::new(&options.folder, read_only).map_err(|error| {
        let what = format!("cannot mount at {}", options.folder.display());
        Failure::new(what, error, "Give an empty folder of yours, and install the package fuse3.")
    })?;
    let file = protocol::File {
        size: disk.size(),
        read_only,
        uid: rustix::process::getuid().as_raw(),
        gid: rustix::process::getgid().as_raw(),
    };
    println!("attached {} bytes at {}", file.size, options.folder.join(NAME).display());
    println!("Ctrl-C ends it.");
    let handle = mount.handle();
    thread::spawn(move || end_by_signal(&interrupts, &handle));
    let threads = disk.parallel();
    let attached = Attached { disk, file, device: mount.device, order: RwLock::new(()) };
    let outcome = thread::scope(|scope| {
        let workers: Vec<_> = (0..threads).map(|_| scope.spawn(|| attached.work())).collect();
        workers.into_iter().try_for_each(|worker| worker.join().expect("a thread panicked"))
    });
    outcome.and_then(|()| attached.disk.flush()).map_err(|error| {
        Failure::new("the last writes may be lost", error, "Check the server and its disk.")
    })?;
    Ok(ExitCode::SUCCESS)
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

/// A disk and the kernel's questions about it.
struct Attached {
    disk: Remote,
    file: protocol::File,
    device: File,
    /// Shared by writes, and exclusive for a flush: so a write that is repeated after a loss of
    /// the connection stays on its side of the flush.
    order: RwLock<()>,
}

impl Attached {
    /// Answers the kernel until it is unmounted.
    fn work(&self) -> io::Result<()> {
        let mut buffer = vec![0; BUFFER];
        let mut data = Vec::new();
        loop {
            let length = match (&self.device).read(&mut buffer) {
                Ok(length) => length,
                Err(error) => match error.raw_os_error() {
                    // ENODEV: unmounted. ENOENT, EINTR, EAGAIN: the request was taken back.
                    Some(19) => return Ok(()),
                    Some(2 | 4 | 11) => continue,
                    _ => return Err(error),
                },
            };
            let Some(request) = self.file.request(&buffer[..length]) else { continue };
            let unique = request.unique;
            let sent = match self.answer(request.wants, &mut data) {
                Some(Ok(())) => self.reply(header(unique, 0, data.len()), &data),
                Some(Err(errno)) => self.reply(header(unique, errno, 0), &[]),
                None => Ok(()),
            };
            match sent {
                Err(error) if error.raw_os_error() == Some(19) => return Ok(()),
                // ENOENT: the program that asked is gone.
                Err(error) if error.raw_os_error() != Some(2) => return Err(error),
                _ => {}
            }
        }
    }

    fn reply(&self, header: [u8; OUT_HEADER], data: &[u8]) -> io::Result<()> {
        // The kernel takes a reply whole or not at all.
        (&self.device).write_vectored(&[IoSlice::new(&header), IoSlice::new(data)]).map(|_| ())
    }

    /// Puts the reply into `data`; an error's number, or nothing where there is no reply.
    fn answer(&self, wants: Wants<'_>, data: &mut Vec<u8>) -> Option<Result<(), i32>> {
        let shared = || self.order.read().unwrap_or_else(PoisonError::into_inner);
        let done = |outcome: io::Result<()>| {
            // EIO where the connection is lost.
            outcome.map_err(|error| error.raw_os_error().unwrap_or(5))
        };
        data.clear();
        Some(match wants {
            Wants::Nothing => return None,
            Wants::Reply(bytes) => {
                *data = bytes;
                Ok(())
            }
            Wants::Error(0) => Ok(()),
            Wants::Error(errno) => Err(errno),
            Wants::Read { offset, length } => {
                data.resize(length, 0);
                done(self.disk.read(offset, data))
            }
            Wants::Write { offset, data: bytes } => {
                let _shared = shared();
                *data = protocol::written(bytes.len());
                done(self.disk.write(offset, bytes))
            }
            Wants::Zero { offset, length, hole } => {
                let _shared = shared();
                done(self.disk.zero(offset, length, hole))
            }
            Wants::Flush => {
                let _alone = self.order.write().unwrap_or_else(PoisonError::into_inner);
                done(self.disk.flush())
            }
            Wants::Seek { offset, hole } => match self.seek(offset, hole) {
                Ok(Some(at)) => {
                    *data = protocol::found(at);
                    Ok(())
                }
                Ok(None) => Err(protocol::ENXIO),
                Err(error) => Err(error.raw_os_error().unwrap_or(EINVAL)),
            },
        })
    }

    /// The next data or hole from an offset on. The end of the disk counts as a hole.
    fn seek(&self, offset: u64, hole: bool) -> io::Result<Option<u64>> {
        let mut at = offset;
        while at < self.file.size {
            for extent in self.disk.extents(at, self.file.size - at)? {
                if extent.hole == hole {
                    return Ok(Some(at));
                }
                at += extent.length;
            }
        }
        Ok(hole.then_some(self.file.size))
    }
}
