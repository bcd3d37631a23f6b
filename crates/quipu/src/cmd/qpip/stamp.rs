//! What tells a file, or a folder, from what was at the same place before.

use std::fs::Metadata;
use std::os::unix::fs::MetadataExt;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use super::conditions::Version;

/// The longest tick of a file system's clock (some keep whole seconds, vfat every second one): what changes
/// twice within one may have the same times.
const TICK: Duration = Duration::from_secs(2);

/// Two that are equal, and settled, are of the same octets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Stamp {
    pub(super) len: u64,
    /// The modification that it tells of, which may have been set to what it was in another file: in
    /// nanoseconds since 1970.
    modified_ns: Option<u128>,
    /// The change that nobody can set, and whose it is.
    changed_ns: i128,
    node: (u64, u64),
    /// What changes from now on has another time.
    settled: bool,
}

fn since_1970(at: SystemTime) -> Duration {
    at.duration_since(UNIX_EPOCH).unwrap_or_default()
}

impl Stamp {
    /// Of what was looked at now.
    pub(super) fn of(metadata: &Metadata) -> Self {
        let modified = metadata.modified().ok().and_then(|at| at.duration_since(UNIX_EPOCH).ok());
        let changed_ns =
            i128::from(metadata.ctime()) * 1_000_000_000 + i128::from(metadata.ctime_nsec());
        let tick_ago = since_1970(SystemTime::now()).saturating_sub(TICK);
        Self {
            len: metadata.len(),
            modified_ns: modified.map(|since| since.as_nanos()),
            changed_ns,
            node: (metadata.dev(), metadata.ino()),
            settled: i128::try_from(tick_ago.as_nanos()).is_ok_and(|ago| changed_ns < ago),
        }
    }

    /// The same for no longer than the second that it is: folders of some file systems keep their times,
    /// whatever is in them.
    pub(super) fn of_this_second(self) -> Self {
        Self { len: since_1970(SystemTime::now()).as_secs(), ..self }
    }

    /// Whether it tells those octets from all later ones.
    pub(super) fn is_settled(&self) -> bool {
        self.settled
    }

    /// As an entity tag, which is strong, but for two versions of one length within a tick.
    pub(super) fn tag(&self) -> String {
        format!("\"{:x}-{:x}\"", self.changed_ns, self.len)
    }

    /// When it was modified, as of now.
    pub(super) fn version(&self, now: SystemTime) -> Version<'static> {
        let seconds = |ns| u64::try_from(ns / 1_000_000_000).ok();
        let changed = self.modified_ns.and_then(seconds);
        let now = since_1970(now).as_secs();
        Version { tag: None, changed, may_change: changed.is_some_and(|changed| changed >= now) }
    }
}
