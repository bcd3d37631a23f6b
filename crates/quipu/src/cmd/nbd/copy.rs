//! `quipu nbd copy`: a disk from one place to another.

use std::io::{self, IsTerminal};
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use quipu_nbd::Extent;
use quipu_nbd::uri::Uri;
use serde_json::json;

use super::Failure;
use super::disk::{self, Disk};
use super::file::FileDisk;
use super::info::{failed, prepare};
use super::remote::Remote;
use crate::cmd::qpip::LinkOptions;

/// From where to where.
#[derive(clap::Args)]
#[command(after_long_help = EXAMPLES)]
pub(crate) struct Options {
    #[command(flatten)]
    link: LinkOptions,
    /// An NBD URI, a file or a block device.
    #[arg(value_name = "SOURCE")]
    source: String,
    /// An NBD URI, a file (made if it is not there) or a block device.
    #[arg(value_name = "TARGET")]
    target: String,
    /// Write zeros, too: by default what is zero in the source is only made zero in the target.
    #[arg(long)]
    full: bool,
    /// How long a server's reply may take before the connection counts as lost.
    #[arg(long, value_name = "SECONDS", default_value_t = 30,
          value_parser = clap::value_parser!(u64).range(1..))]
    timeout: u64,
    /// Print the result as JSON, and no progress.
    #[arg(long)]
    json: bool,
}

const EXAMPLES: &str = "\
Examples:
  quipu nbd copy nbd://127.0.0.1 disk.img          a server's disk into a file
  quipu nbd copy disk.img nbd://127.0.0.1          and back
  quipu nbd copy nbd://a/ nbd://b/                 between servers";

/// Bytes that are copied at a time.
const BLOCK: u64 = 1 << 20;
/// The source is asked at a time what is allocated in so many bytes.
const WINDOW: u64 = 1 << 30;

/// A disk by its URI or path.
fn open(text: &str, size: Option<u64>, options: &Options) -> Result<Box<dyn Disk>, Failure> {
    if text.contains("://") {
        let uri: Uri = text.parse().map_err(|error| {
            Failure::new("there is no such disk", error, "Give a URI or the path of a file.")
        })?;
        prepare(&uri, &options.link)?;
        let mut disk = Remote::open(&uri).map_err(|trouble| failed(&uri, &trouble))?;
        disk.set_patience(Duration::from_secs(options.timeout));
        return Ok(Box::new(disk));
    }
    let path = Path::new(text);
    let opened = match (size, path.exists()) {
        (Some(size), false) => FileDisk::create(path, size).map(|disk| Box::new(disk) as _),
        (Some(_), true) => disk::open(path, false),
        (None, _) => disk::open(path, true),
    };
    opened.map_err(|error| {
        let remedy = match size {
            None => "Give a URI, or a file or block device that exists and that you can read.",
            Some(_) => "Give a URI, or a file in a folder that you may write to.",
        };
        Failure::new(format!("cannot open {}", path.display()), error, remedy)
    })
}

/// Runs it.
pub(super) fn run(options: &Options) -> Result<ExitCode, Failure> {
    if is_same_file(&options.source, &options.target) {
        let what = format!("cannot copy {} to itself", options.source);
        let why = "source and target are the same file";
        return Err(Failure::new(what, why, "Give another target."));
    }
    let source = open(&options.source, None, options)?;
    let target = open(&options.target, Some(source.size()), options)?;
    if target.size() < source.size() {
        let why = format!("the source has {} bytes, the target {}", source.size(), target.size());
        return Err(Failure::new("the target is too small", why, "Give a larger target."));
    }
    let began = Instant::now();
    let bar = progress(source.size(), options.json);
    let copy = Copy::new(&*source, &*target, options.full, &bar);
    copy.run().map_err(|error| {
        Failure::new(
            "the copy is not complete",
            error,
            "What was copied before may be in the target.",
        )
    })?;
    bar.finish_and_clear();
    let (seconds, copied) = (began.elapsed().as_secs_f64(), copy.copied.load(Ordering::Relaxed));
    if options.json {
        let size = source.size();
        println!(
            "{}",
            json!({"bytes": size, "copied": copied, "zero": size - copied, "seconds": seconds})
        );
    } else {
        let speed = source.size() as f64 / seconds / 1e6;
        println!(
            "{} bytes in {seconds:.2} s ({speed:.0} MB/s), of which {copied} were not zero",
            source.size()
        );
    }
    Ok(ExitCode::SUCCESS)
}

fn is_same_file(one: &str, other: &str) -> bool {
    let of = |path: &str| std::fs::metadata(path).ok().map(|found| (found.dev(), found.ino()));
    of(one).is_some_and(|found| of(other) == Some(found))
}

fn progress(size: u64, quiet: bool) -> ProgressBar {
    let target = if quiet || !io::stderr().is_terminal() {
        ProgressDrawTarget::hidden()
    } else {
        ProgressDrawTarget::stderr()
    };
    let style =
        ProgressStyle::with_template("{bar:40} {bytes}/{total_bytes} {binary_bytes_per_sec} {eta}");
    ProgressBar::with_draw_target(Some(size), target)
        .with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()))
}

/// A copy that several threads make.
struct Copy<'a> {
    source: &'a dyn Disk,
    target: &'a dyn Disk,
    full: bool,
    bar: &'a ProgressBar,
    /// Extents of the source that nobody has taken, the last first.
    work: Mutex<Vec<(u64, Extent)>>,
    /// The source has been looked through up to here.
    seen: Mutex<u64>,
    copied: AtomicU64,
    failed: AtomicBool,
}

impl<'a> Copy<'a> {
    fn new(source: &'a dyn Disk, target: &'a dyn Disk, full: bool, bar: &'a ProgressBar) -> Self {
        Self {
            source,
            target,
            full,
            bar,
            work: Mutex::default(),
            seen: Mutex::default(),
            copied: AtomicU64::new(0),
            failed: AtomicBool::new(false),
        }
    }

    fn run(&self) -> io::Result<()> {
        let threads = self.source.parallel().min(self.target.parallel()).max(1);
        let outcome = thread::scope(|scope| {
            let workers: Vec<_> = (0..threads).map(|_| scope.spawn(|| self.work())).collect();
            let join = |worker: thread::ScopedJoinHandle<'_, _>| worker.join();
            // All of them end before the first failure is looked for.
            let ends: Vec<_> = workers.into_iter().map(join).collect();
            ends.into_iter().try_for_each(|end| end.expect("a thread panicked"))
        });
        outcome.and_then(|()| self.target.flush())
    }

    /// Copies blocks until there are none, or another thread has failed.
    fn work(&self) -> io::Result<()> {
        let mut data = Vec::new();
        while !self.failed.load(Ordering::Relaxed) {
            let outcome = match self.next() {
                Ok(Some((at, extent))) => self.block(at, extent, &mut data),
                Ok(None) => return Ok(()),
                Err(error) => Err(error),
            };
            if outcome.is_err() {
                self.failed.store(true, Ordering::Relaxed);
                return outcome;
            }
        }
        Ok(())
    }

    /// The next block, of data or of zeros.
    fn next(&self) -> io::Result<Option<(u64, Extent)>> {
        let mut seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        let mut work = self.work.lock().unwrap_or_else(PoisonError::into_inner);
        if work.is_empty() && *seen < self.source.size() {
            let length = WINDOW.min(self.source.size() - *seen);
            for extent in self.source.extents(*seen, length)? {
                // The last extent may reach further than was asked.
                let length = extent.length.min(self.source.size() - *seen);
                work.push((*seen, Extent { length, ..extent }));
                *seen += length;
            }
            work.reverse();
        }
        let Some((at, extent)) = work.pop() else { return Ok(None) };
        let step = if extent.zero && !self.full { WINDOW } else { BLOCK };
        if extent.length > step {
            work.push((at + step, Extent { length: extent.length - step, ..extent }));
        }
        Ok(Some((at, Extent { length: extent.length.min(step), ..extent })))
    }

    fn block(&self, at: u64, extent: Extent, data: &mut Vec<u8>) -> io::Result<()> {
        let length = extent.length;
        if extent.zero && !self.full {
            self.target.zero(at, length, true)?;
        } else {
            data.resize(length as usize, 0);
            self.source.read(at, data)?;
            let zero = !self.full && data.iter().all(|byte| *byte == 0);
            if zero {
                self.target.zero(at, length, true)?;
            } else {
                self.target.write(at, data)?;
                self.copied.fetch_add(length, Ordering::Relaxed);
            }
        }
        self.bar.inc(length);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::super::memory::Memory;
    use super::*;

    #[test]
    fn a_copy_is_the_same_and_its_holes_stay_holes() {
        let (source, target) = (Memory::new(5 << 20), Memory::new(5 << 20));
        source.write(0, b"first").unwrap();
        source.write((3 << 20) - 2, b"across").unwrap();
        target.write(1 << 20, b"old").unwrap();
        let bar = ProgressBar::hidden();
        let copy = Copy::new(&source, &target, false, &bar);
        copy.run().unwrap();
        let (mut a, mut b) = (vec![1; 5 << 20], vec![2; 5 << 20]);
        source.read(0, &mut a).unwrap();
        target.read(0, &mut b).unwrap();
        assert!(a == b);
        let holes = target.extents(0, 5 << 20).unwrap().iter().filter(|e| e.hole).count();
        assert!(holes > 0);
    }
}
