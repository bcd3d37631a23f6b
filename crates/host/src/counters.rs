//! What engines did so far, for others of the same user to read.
//!
//! Each engine writes a sample of its counters into a file of its own, in a folder that only its user may
//! enter: a few times a second while there is something new, and before it sleeps. The file is locked as
//! long as the engine lives, so that one whose process was killed can be told, and is removed by whoever
//! finds it.

use std::fs::{self, DirBuilder, File, OpenOptions, Permissions, TryLockError};
use std::io;
use std::net::IpAddr;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{DirBuilderExt, FileExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use quipu_cabi::{Hold, spared};
use quipu_inet::stack::Stack;
use quipu_nic::{AdapterCounters, QpCounters, QpSummary, QpType, Time};
use quipu_observe::{
    ENGINE, MAX_BYTES, MAX_QUEUE_PAIRS, NoSample, QueuePair, REASONS, STATUSES, Sample, WORK,
};

pub use quipu_observe as observe;

use crate::accounts::{is_own_user, own_user};
use crate::address::HostAddress;
use crate::fork;
use crate::sys;
use crate::tap::Adapter;

/// Time between samples of an engine with few queue pairs; it grows with their number, so that samples
/// take a small part of the time.
const INTERVAL_NS: u64 = 200_000_000;
/// Queue pairs for which a sample may take so much longer.
const FEW_QUEUE_PAIRS: u64 = 64;
/// How often a sample is read that is being written.
const READS: usize = 20;
/// How often a file is created that others remove before it is locked, and how long whoever has it locked may
/// take each time to do so: it may have lost its processor.
const CREATIONS: usize = 100;
const LOCKED_FOR: Duration = Duration::from_micros(500);
/// Numbers that are tried: other processes may have this one's number, in another space of them.
const NUMBERS: usize = 16;
/// Files of dead engines that one engine removes when it is opened.
const REMOVED_AT_ONCE: usize = 64;

/// Numbers the engines of this process.
static NEXT: AtomicU32 = AtomicU32::new(0);

/// Writes samples.
#[derive(Debug)]
pub(crate) struct Publisher {
    file: File,
    /// What it is: a program that closes descriptors it does not know may have one of its own by that number.
    identity: Option<u64>,
    path: PathBuf,
    sample: Sample,
    bytes: Vec<u8>,
    /// When the next sample is due.
    due: Time,
    /// What the sum of all activity was at the last one.
    shown: u64,
}

/// What the engine itself counts.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Calls {
    pub(crate) polls: u64,
    pub(crate) empty_polls: u64,
    pub(crate) sends: u64,
    pub(crate) receives: u64,
    pub(crate) looks: u64,
    /// Frames that the packet link had no room for.
    pub(crate) lost: u64,
    /// How often somebody made progress.
    pub(crate) rounds: u64,
}

impl Publisher {
    /// A publisher for a new engine.
    pub(crate) fn open(device: &str, address: &HostAddress) -> io::Result<Self> {
        let folder = own_folder()?;
        remove_stale(&folder, REMOVED_AT_ONCE);
        let process = std::process::id();
        let (path, file) = std::iter::repeat_with(|| NEXT.fetch_add(1, Ordering::Relaxed))
            .take(NUMBERS)
            .map(|number| folder.join(format!("{process}.{number}")))
            .find_map(|path| match create_locked(&path) {
                Err(error) if error.kind() == io::ErrorKind::ResourceBusy => None,
                other => Some(other.map(|file| (path, file))),
            })
            .unwrap_or(Err(io::ErrorKind::ResourceBusy.into()))?;
        let program = std::env::current_exe().unwrap_or_default();
        let sample = Sample {
            process,
            started: epoch_ns(),
            taken: 0,
            program: program.file_name().unwrap_or_default().to_string_lossy().into_owned(),
            device: device.into(),
            address: address.ip,
            engine: [0; ENGINE],
            drops: [0; REASONS],
            statuses: [0; STATUSES.len()],
            work: [0; WORK],
            lanes: Default::default(),
            queue_pairs: Vec::new(),
            omitted: 0,
        };
        // Whose lock says that this process lives.
        fork::withhold(&file);
        let identity = fork::identity(file.as_raw_fd());
        Ok(Self { file, identity, path, sample, bytes: Vec::new(), due: Time(0), shown: u64::MAX })
    }

    /// When [`publish`](Self::publish) has something to do; `None` if nothing is new.
    pub(crate) fn due(&self, adapter: &Adapter, calls: &Calls) -> Option<Time> {
        (activity(adapter, calls) != self.shown).then_some(self.due)
    }

    /// Whether it is time for a sample.
    #[inline]
    pub(crate) fn is_due(&self, now: Time) -> bool {
        now >= self.due
    }

    /// Writes a sample if one is due.
    #[inline]
    pub(crate) fn publish(&mut self, now: Time, adapter: &Adapter, calls: &Calls) {
        if self.is_due(now) {
            self.write(now, adapter, calls);
        }
    }

    /// Writes one whatever is due.
    pub(crate) fn publish_now(&mut self, now: Time, adapter: &Adapter, calls: &Calls) {
        self.shown = u64::MAX;
        self.write(now, adapter, calls);
    }

    #[cold]
    fn write(&mut self, now: Time, adapter: &Adapter, calls: &Calls) {
        let _hold = Hold::new();
        let activity = activity(adapter, calls);
        if activity == self.shown {
            self.due = now.after(INTERVAL_NS);
            return;
        }
        self.shown = activity;
        self.fill(adapter, calls);
        self.due = now.after(interval_ns(&self.sample));
        self.sample.encode(&mut self.bytes);
        if fork::identity(self.file.as_raw_fd()) != self.identity {
            return;
        }
        if let Err(error) = spared(|| self.file.write_all_at(&self.bytes, 0)) {
            tracing::debug!(%error, "counters are not shown");
        }
    }

    fn fill(&mut self, adapter: &Adapter, calls: &Calls) {
        let (sample, counters) = (&mut self.sample, adapter.counters());
        sample.taken = epoch_ns();
        let mut total = counters.gone;
        sample.queue_pairs.clear();
        sample.omitted = 0;
        for summary in adapter.queue_pairs() {
            total.add(&summary.counters);
            if sample.queue_pairs.len() < MAX_QUEUE_PAIRS {
                sample.queue_pairs.push(queue_pair(&summary));
            } else {
                sample.omitted += 1;
            }
        }
        sample.work = work(&total);
        sample.statuses = statuses(counters);
        let frames = adapter.inet().map(|stack| *stack.counters()).unwrap_or_default();
        if let Some(lanes) = adapter.lane_use() {
            sample.lanes = lanes.map(|it| [it.octets, it.packets, it.wait_ns, it.waits]);
        }
        sample.drops = adapter.inet().map_or([0; REASONS], |stack| drops(stack, calls));
        sample.engine = [
            counters.completions,
            counters.doorbells,
            counters.queue_pairs,
            calls.polls,
            calls.empty_polls,
            calls.sends,
            calls.receives,
            calls.looks,
            dropped(adapter),
            frames.received,
            frames.sent,
            sample.drops.iter().sum(),
            frames.tcp_accepted,
            frames.tcp_resets,
            frames.tcp_held,
            frames.tcp_late,
        ];
    }
}

impl Drop for Publisher {
    fn drop(&mut self) {
        // Anyone who finds it later removes it otherwise.
        let _ = fs::remove_file(&self.path);
    }
}

/// Differs whenever there is something new to show.
fn activity(adapter: &Adapter, calls: &Calls) -> u64 {
    let counters = adapter.counters();
    // Not the calls that found nothing, or an engine that sleeps would be woken to show that it does.
    let AdapterCounters { completions, doorbells, queue_pairs, changes, .. } = counters;
    // Timers send frames of which nobody hears otherwise.
    let frames = adapter.inet().map_or(0, |stack| stack.counters().sent);
    completions + doorbells + queue_pairs + changes + calls.rounds + frames
}

/// Datagrams that were dropped, for any reason.
fn dropped(adapter: &Adapter) -> u64 {
    let drops = adapter.datagram_drops();
    drops.malformed + drops.no_queue_pair + drops.qkey_violation + drops.no_receive
}

/// In the order of `DROP_REASONS`.
fn drops(stack: &Stack, calls: &Calls) -> [u64; REASONS] {
    let (frames, parts) = (stack.counters(), stack.fragment_counters());
    [
        frames.other,
        frames.malformed,
        frames.martians,
        frames.not_ours,
        frames.unknown_protocol,
        frames.checksum,
        frames.fragments + parts.malformed,
        parts.void,
        parts.expired,
        parts.evicted,
        frames.tcp_malformed,
        frames.tcp_unknown,
        frames.tcp_waiting + frames.tcp_given_up,
        frames.tcp_full,
        frames.tcp_outside,
        frames.tcp_old,
        frames.tcp_bad_ack,
        frames.tcp_no_room,
        frames.tcp_not_kept,
        frames.udp_malformed,
        frames.udp_unknown,
        frames.answers_dropped,
        frames.notices_dropped,
        calls.lost,
    ]
}

/// In the order of `WORK_METRICS`.
fn work(counters: &QpCounters) -> [u64; WORK] {
    let (asked, served) = (&counters.requester, &counters.responder);
    [
        asked.sends,
        asked.writes,
        asked.reads,
        asked.atomics,
        asked.bytes,
        asked.retransmitted,
        asked.rnr,
        asked.failed,
        served.receives,
        served.writes,
        served.reads,
        served.atomics,
        served.bytes_in,
        served.bytes_out,
        served.rnr,
        served.refused,
    ]
}

fn statuses(counters: &AdapterCounters) -> [u64; STATUSES.len()] {
    let mut statuses = [0; STATUSES.len()];
    for (status, count) in counters.by_status().iter().enumerate() {
        statuses[status.min(STATUSES.len() - 1)] += count;
    }
    statuses
}

fn queue_pair(summary: &QpSummary) -> QueuePair {
    let service = match summary.qp_type {
        QpType::Rc | QpType::Iwarp => 2,
        QpType::Uc => 3,
        QpType::Ud => 4,
        QpType::RawPacket | QpType::Hashed(_) => 8,
        QpType::XrcSend => 9,
        QpType::XrcRecv(_) => 10,
        // Verbs has none of these: they follow its last.
        QpType::Tcp => 11,
        QpType::Udp => 12,
    };
    QueuePair {
        number: summary.num.0,
        service,
        state: (summary.state as u8).min(7),
        path: summary.path as u8,
        peer: summary.peer.0,
        peer_address: IpAddr::from(summary.peer_gid),
        send_queue: summary.send_queue,
        recv_queue: summary.recv_queue,
        work: work(&summary.counters),
    }
}

/// The longest time between a sample and the next, while there is something new.
#[must_use]
pub fn interval_ns(sample: &Sample) -> u64 {
    INTERVAL_NS * (1 + sample.queue_pairs.len() as u64 / FEW_QUEUE_PAIRS)
}

/// The time of samples: nanoseconds since the epoch of UNIX.
#[must_use]
pub fn epoch_ns() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_nanos() as u64)
}

/// Where this user's engines show their counters: the folder that the system gives each user who is
/// logged in, else one in shared memory.
fn folders() -> Vec<PathBuf> {
    let user = own_user();
    vec![format!("/run/user/{user}/quipu").into(), format!("/dev/shm/quipu-{user}").into()]
}

/// The first of the folders that there is, or that can be made.
pub(crate) fn own_folder() -> io::Result<PathBuf> {
    first_of(&folders(), 0o700, is_private)
}

/// The first folder that there is, or that can be made with these rights, and that will do.
pub(crate) fn first_of(
    folders: &[PathBuf],
    mode: u32,
    will_do: impl Fn(&Path) -> bool,
) -> io::Result<PathBuf> {
    if !is_own_user(own_user()) {
        return Err(io::Error::other("the user has no number of its own"));
    }
    let mut refusal = io::ErrorKind::NotFound.into();
    for folder in folders {
        let made = DirBuilder::new().mode(mode).create(folder);
        // What new files may be is not to make it less.
        let made = made.and_then(|()| fs::set_permissions(folder, Permissions::from_mode(mode)));
        match made {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
                refusal = io::Error::new(error.kind(), format!("{}: {error}", folder.display()));
                continue;
            }
            _ => {}
        }
        if will_do(folder) {
            return Ok(folder.clone());
        }
        let words = format!(
            "{} exists, but does not belong to this user with the mode {mode:04o}: another user \
             may have made it",
            folder.display()
        );
        refusal = io::Error::new(io::ErrorKind::PermissionDenied, words);
    }
    Err(refusal)
}

/// Those of the folders that are there, and this user's alone.
pub(crate) fn private_folders() -> impl Iterator<Item = PathBuf> {
    folders().into_iter().filter(|folder| is_private(folder))
}

/// Whether nobody but this user can have put anything there. In a folder where everybody may write,
/// somebody else may have been first.
pub(crate) fn is_private(folder: &Path) -> bool {
    fs::symlink_metadata(folder)
        .is_ok_and(|data| data.is_dir() && data.uid() == own_user() && data.mode() & 0o077 == 0)
}

/// The files in a folder.
fn files(folder: &Path) -> impl Iterator<Item = PathBuf> + use<> {
    let entries = is_private(folder).then(|| fs::read_dir(folder).ok()).flatten();
    entries.into_iter().flatten().filter_map(|entry| Some(entry.ok()?.path()))
}

/// Opens a file of an engine that lives; removes it if the engine is dead.
fn open_live(path: &Path) -> Option<File> {
    let file =
        OpenOptions::new().read(true).custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK).open(path);
    let file = file.ok()?;
    match file.try_lock_shared() {
        Err(TryLockError::WouldBlock) => Some(file),
        Err(TryLockError::Error(_)) => None,
        Ok(()) => {
            let _ = fs::remove_file(path);
            None
        }
    }
}

/// Creates a file that says that its engine lives. Whoever looks for those of dead engines may take it for
/// one before it is locked; and one that is locked is another engine's, perhaps of another space of process
/// numbers, which is left as it is.
fn create_locked(path: &Path) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.read(true).write(true).create(true).truncate(false).mode(0o600);
    options.custom_flags(libc::O_NOFOLLOW);
    for _ in 0..CREATIONS {
        let file = sys::move_file_up(options.open(path)?)?;
        match file.try_lock() {
            Ok(()) if is_at(&file, path) => return file.set_len(0).map(|()| file),
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => std::thread::sleep(LOCKED_FOR),
            Err(TryLockError::Error(error)) => return Err(error),
        }
    }
    Err(io::ErrorKind::ResourceBusy.into())
}

fn is_at(file: &File, path: &Path) -> bool {
    let number = |data: io::Result<fs::Metadata>| data.map(|data| (data.dev(), data.ino())).ok();
    number(file.metadata()) == number(fs::symlink_metadata(path))
}

fn remove_stale(folder: &Path, most: usize) {
    let regular = |path: &PathBuf| fs::symlink_metadata(path).is_ok_and(|data| data.is_file());
    files(folder).filter(regular).take(most).for_each(|path| drop(open_live(&path)));
}

/// The last samples of all engines of this user on this machine, in the order of their processes.
#[must_use]
pub fn samples() -> Vec<Sample> {
    let mut samples: Vec<Sample> =
        folders().iter().flat_map(|folder| files(folder)).filter_map(|path| read(&path)).collect();
    samples.sort_by_key(|sample| (sample.process, sample.started));
    samples
}

fn read(path: &Path) -> Option<Sample> {
    let file = open_live(path)?;
    for _ in 0..READS {
        let length = file.metadata().ok()?.len().min(MAX_BYTES as u64) as usize;
        let mut bytes = vec![0; length];
        let read = file.read_at(&mut bytes, 0).ok()?;
        match Sample::decode(&bytes[..read]) {
            Ok(sample) => return Some(sample),
            Err(NoSample::Torn) => std::thread::yield_now(),
            Err(NoSample::Version(version)) => {
                tracing::info!(path = %path.display(), version, "counters of another version of \
                    Quipu are ignored");
                return None;
            }
            Err(NoSample::Foreign) => return None,
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;

    #[test]
    fn a_folder_that_is_somebody_elses_is_named() {
        let place = std::env::temp_dir().join(format!("quipu-folder-{}", std::process::id()));
        assert_eq!(first_of(std::slice::from_ref(&place), 0o700, is_private).unwrap(), place);
        fs::set_permissions(&place, Permissions::from_mode(0o777)).unwrap();
        let none = place.join("no").join("such");
        for folder in [&place, &none] {
            let refusal = first_of(std::slice::from_ref(folder), 0o700, is_private);
            let refusal = refusal.unwrap_err().to_string();
            assert!(refusal.contains(folder.to_str().unwrap()), "{refusal}");
        }
        fs::remove_dir(&place).unwrap();
    }

    /// A new folder with these rights.
    fn folder(name: &str, mode: u32) -> PathBuf {
        let folder = std::env::temp_dir().join(format!("quipu-{name}-{}", std::process::id()));
        DirBuilder::new().mode(mode).create(&folder).unwrap();
        folder
    }

    #[test]
    fn a_dead_engine_is_removed_and_a_live_one_kept() {
        let folder = folder("counters", 0o700);
        let (dead, live) = (folder.join("1.0"), folder.join("2.0"));
        fs::write(&dead, b"x").unwrap();
        let file = File::create(&live).unwrap();
        file.try_lock().unwrap();
        assert_eq!(read(&live), None, "no sample yet");
        remove_stale(&folder, 10);
        assert!(!dead.exists() && live.exists());
        fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    fn a_new_engine_is_not_taken_for_a_dead_one() {
        let folder = folder("new", 0o700);
        let path = folder.join("1.0");
        std::thread::scope(|scope| {
            let creator = scope.spawn(|| {
                for _ in 0..5_000 {
                    let begun = Instant::now();
                    match create_locked(&path) {
                        Ok(file) => assert!(is_at(&file, &path)),
                        // Who looks for dead ones was stopped in the middle of that, for long.
                        Err(_) => assert!(begun.elapsed() > 10 * LOCKED_FOR),
                    }
                }
            });
            while !creator.is_finished() {
                remove_stale(&folder, 10);
            }
        });
        fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    fn the_file_of_another_engine_is_left_as_it_is() {
        let folder = folder("taken", 0o700);
        let path = folder.join("1.0");
        let file = create_locked(&path).unwrap();
        file.write_all_at(b"a sample", 0).unwrap();
        assert!(create_locked(&path).is_err());
        assert_eq!(fs::read(&path).unwrap(), b"a sample");
        drop(file);
        assert_eq!(create_locked(&path).unwrap().metadata().unwrap().len(), 0);
        fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    fn a_folder_that_others_can_enter_is_not_used() {
        let folder = folder("open", 0o755);
        fs::write(folder.join("1.0"), b"x").unwrap();
        assert!(!is_private(&folder));
        assert_eq!(files(&folder).count(), 0);
        let link = folder.join("link");
        std::os::unix::fs::symlink("/root", &link).unwrap();
        assert!(!is_private(&link));
        fs::remove_dir_all(&folder).unwrap();
    }
}
