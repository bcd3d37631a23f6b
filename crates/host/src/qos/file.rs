//! The file of a port: who its members are, its configuration, and the words of its state.

use std::fs::{File, OpenOptions};
use std::io;
use std::net::IpAddr;
use std::os::fd::OwnedFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};

use quipu_mem::{Segment, Shared};
use quipu_nic::qos::{Config as Rules, LANES, LaneUse, MEMBERS, Port};

use crate::accounts::own_user;
use crate::clock::kernel_ns;
use crate::counters::{first_of, is_private};
use crate::link::segment;

/// The first word of such a file, of this version.
const MAGIC: u64 = 0x5155_4950_5551_0001;
/// Words of the file.
const MAGIC_AT: usize = 0;
const LOCK_AT: usize = 1;
/// Grows with every change of the configuration.
const GENERATION_AT: usize = 2;
/// Octets of the configuration's text.
const LENGTH_AT: usize = 3;
/// The process of each member, 0 if there is none.
const OWNERS_AT: usize = 4;
const STATE_AT: usize = OWNERS_AT + MEMBERS;
const STATE_WORDS: usize = 1024;
const TEXT_AT: usize = (STATE_AT + STATE_WORDS) * 8;
/// The longest text of a configuration: what `to_toml` writes of 1 MB of rules is refused.
const TEXT_BYTES: usize = 64 << 10;
const FILE_BYTES: usize = (TEXT_AT + TEXT_BYTES).next_multiple_of(4096);
/// A lock that was held for longer is taken from its owner.
const LEASE_MS: u32 = 100;
/// How often a lock is tried that somebody holds.
const TRIES: usize = 200;

/// The port of an address, mapped.
pub(super) struct PortFile {
    segment: Segment,
    words: Vec<Shared<AtomicU64>>,
}

/// The lock, held until it is dropped.
pub(super) struct Held<'a> {
    file: &'a PortFile,
    token: u64,
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        // One that was taken away is somebody else's now.
        let lock = &self.file.words[LOCK_AT];
        _ = lock.compare_exchange(self.token, 0, Ordering::Release, Ordering::Relaxed);
    }
}

fn folder() -> io::Result<PathBuf> {
    let user = own_user();
    let folders = [format!("/run/user/{user}/quipu-qos"), format!("/dev/shm/quipu-qos-{user}")];
    first_of(&folders.map(PathBuf::from), 0o700, is_private)
}

impl PortFile {
    /// That of an address; made if there is none.
    pub(super) fn open(address: IpAddr) -> io::Result<Self> {
        let mut options = OpenOptions::new();
        options.read(true).write(true).create(true).truncate(false).mode(0o600);
        options.custom_flags(libc::O_NOFOLLOW);
        Self::map(options.open(folder()?.join(address.to_string()))?)
    }

    fn map(file: File) -> io::Result<Self> {
        if file.metadata()?.len() < FILE_BYTES as u64 {
            file.set_len(FILE_BYTES as u64)?;
        }
        let segment = segment::map_own_file(&OwnedFd::from(file), FILE_BYTES)?;
        let word = |index: usize| segment.u64_at(index * 8).map_err(io::Error::other);
        let words = (0..STATE_AT + STATE_WORDS).map(word).collect::<io::Result<_>>()?;
        Ok(Self { segment, words })
    }

    fn get(&self, at: usize) -> u64 {
        self.words[at].load(Ordering::Relaxed)
    }

    fn set(&self, at: usize, value: u64) {
        self.words[at].store(value, Ordering::Relaxed);
    }

    /// Takes the lock; `None` if somebody holds it.
    pub(super) fn lock(&self, process: u32, now_ns: u64) -> Option<Held<'_>> {
        let now_ms = (now_ns / 1_000_000) as u32;
        let token = u64::from(process) << 32 | u64::from(now_ms | 1);
        let lock = &self.words[LOCK_AT];
        for _ in 0..TRIES {
            let held = lock.load(Ordering::Relaxed);
            let expired = held != 0 && now_ms.wrapping_sub(held as u32).wrapping_add(1) > LEASE_MS;
            if (held == 0 || expired)
                && lock.compare_exchange(held, token, Ordering::Acquire, Ordering::Relaxed).is_ok()
            {
                return Some(Held { file: self, token });
            }
            std::hint::spin_loop();
        }
        None
    }

    /// Which configuration it has.
    pub(super) fn generation(&self) -> u64 {
        self.get(GENERATION_AT)
    }
}

impl Held<'_> {
    /// Whether the file has the form of this version.
    fn is_made(&self) -> bool {
        self.file.get(MAGIC_AT) == MAGIC
    }

    /// The configuration, if the file has one that makes sense.
    pub(super) fn rules(&self) -> Option<Rules> {
        let length = self.file.get(LENGTH_AT) as usize;
        if !self.is_made() || length > TEXT_BYTES {
            return None;
        }
        let mut text = vec![0; length];
        self.file.segment.read(TEXT_AT, &mut text).ok()?;
        Rules::parse(&String::from_utf8(text).ok()?, "port").ok().map(|(rules, _)| rules)
    }

    /// Reads the state of a port of the file's configuration.
    pub(super) fn load(&self, port: &mut Port, now_ns: u64) {
        let mut at = STATE_AT..STATE_AT + STATE_WORDS;
        port.load(now_ns, || at.next().map_or(0, |at| self.file.get(at)));
    }

    /// Writes it: words that are the same stay in the caches of the other processes' processors, and the lock
    /// is held for a shorter time.
    pub(super) fn save(&self, port: &Port) {
        let mut at = STATE_AT..STATE_AT + STATE_WORDS;
        port.save(|word| {
            if let Some(at) = at.next()
                && self.file.get(at) != word
            {
                self.file.set(at, word);
            }
        });
    }

    /// Gives the port another configuration. What its members wait for, and what they have sent, stays.
    ///
    /// # Errors
    /// It is too long for the file.
    pub(super) fn configure(&self, rules: &Rules, now_ns: u64) -> io::Result<Port> {
        let text = rules.to_toml();
        if text.len() > TEXT_BYTES {
            return Err(io::Error::other("the configuration has more than 64 KB of rules"));
        }
        let before = self.rules();
        let mut port = Port::new(before.as_ref().unwrap_or(rules), MEMBERS);
        if before.is_some() {
            self.load(&mut port, now_ns);
        }
        port.configure(rules);
        self.file.segment.write(TEXT_AT, text.as_bytes()).map_err(io::Error::other)?;
        self.file.set(LENGTH_AT, text.len() as u64);
        self.file.set(MAGIC_AT, MAGIC);
        self.save(&port);
        self.file.set(GENERATION_AT, self.file.generation().wrapping_add(1));
        Ok(port)
    }

    /// Whether no process sends by the port.
    pub(super) fn is_deserted(&self) -> bool {
        self.owners().is_empty()
    }

    /// Makes a new port of these rules.
    ///
    /// # Errors
    /// They are too long for the file.
    pub(super) fn begin(&self, rules: &Rules) -> io::Result<Port> {
        self.file.set(MAGIC_AT, 0);
        self.configure(rules, 0)
    }

    fn owner(&self, member: usize) -> u32 {
        self.file.get(OWNERS_AT + member) as u32
    }

    /// Processes that are members and live.
    fn owners(&self) -> Vec<u32> {
        let owners = (0..MEMBERS).map(|member| self.owner(member));
        owners.filter(|&process| process != 0 && is_alive(process)).collect()
    }

    /// A place for this process, which may have several.
    pub(super) fn join(&self, process: u32) -> Option<usize> {
        let is_free = |&member: &usize| match self.owner(member) {
            0 => true,
            owner => !is_alive(owner),
        };
        let member = (0..MEMBERS).find(is_free)?;
        self.file.set(OWNERS_AT + member, process.into());
        Some(member)
    }

    /// Frees the places of dead processes, each after `forget`.
    pub(super) fn remove_dead(&self, mut forget: impl FnMut(usize)) {
        for member in 0..MEMBERS {
            let owner = self.owner(member);
            if owner != 0 && !is_alive(owner) {
                forget(member);
                self.leave(member);
            }
        }
    }

    /// The place is free again.
    pub(super) fn leave(&self, member: usize) {
        self.file.set(OWNERS_AT + member, 0);
    }
}

fn is_alive(process: u32) -> bool {
    let Ok(process) = libc::pid_t::try_from(process) else { return false };
    // SAFETY: signal 0 only asks whether the process is there.
    let asked = unsafe { libc::kill(process, 0) };
    asked == 0 || io::Error::last_os_error().raw_os_error() != Some(libc::ESRCH)
}

/// A port as others of its user see it.
#[derive(Clone, Debug)]
pub struct PortView {
    /// Its address.
    pub address: IpAddr,
    /// Its configuration.
    pub rules: Rules,
    /// What each lane has sent.
    pub lanes: [LaneUse; LANES],
    /// The processes that send by it.
    pub processes: Vec<u32>,
}

/// The ports of this user by which processes send.
///
/// # Errors
/// The folder cannot be read.
pub fn ports() -> io::Result<Vec<PortView>> {
    let mut ports = Vec::new();
    for entry in std::fs::read_dir(folder()?)? {
        let name = entry?.file_name();
        let Some(address) = name.to_str().and_then(|name| name.parse().ok()) else { continue };
        let Ok(file) = PortFile::open(address) else { continue };
        let now_ns = kernel_ns();
        let Some(held) = lock_patiently(&file) else { continue };
        let (Some(rules), processes) = (held.rules(), held.owners()) else { continue };
        if !processes.is_empty() {
            let mut port = Port::new(&rules, MEMBERS);
            held.load(&mut port, now_ns);
            ports.push(PortView { address, rules, lanes: *port.used(), processes });
        }
    }
    ports.sort_by_key(|port| port.address);
    Ok(ports)
}

/// Gives the port of an address another configuration, which its processes follow at once.
///
/// # Errors
/// No process sends by it; the configuration is too long.
pub fn replace(address: IpAddr, rules: &Rules) -> io::Result<()> {
    let file = PortFile::open(address)?;
    let held = lock_patiently(&file).ok_or(io::ErrorKind::ResourceBusy)?;
    if held.owners().is_empty() {
        return Err(io::ErrorKind::NotFound.into());
    }
    held.configure(rules, kernel_ns()).map(drop)
}

/// Takes the lock; `None` if that takes longer than any lease.
pub(super) fn lock_patiently(file: &PortFile) -> Option<Held<'_>> {
    (0..3 * LEASE_MS).find_map(|_| {
        let held = file.lock(std::process::id(), kernel_ns());
        if held.is_none() {
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        held
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scratch(name: &str) -> PortFile {
        let path = std::env::temp_dir().join(format!("quipu-port-{}-{name}", std::process::id()));
        let file = File::options().read(true).write(true).create(true).truncate(true).open(&path);
        let port = PortFile::map(file.unwrap()).unwrap();
        std::fs::remove_file(path).unwrap();
        port
    }

    #[test]
    fn the_state_fits_at_its_greatest() {
        let entries = vec![quipu_nic::qos::Entry { lane: 0, weight: 1 }; 64];
        let rules = Rules { high: entries.clone(), low: entries, ..Rules::default() };
        let mut words = 0;
        Port::new(&rules, MEMBERS).save(|_| words += 1);
        assert!(words <= STATE_WORDS, "{words}");
    }

    #[test]
    fn a_lock_is_taken_from_one_that_was_killed() {
        let file = scratch("lock");
        let second = 1_000_000_000;
        std::mem::forget(file.lock(1, second).unwrap());
        assert!(file.lock(2, second + 50_000_000).is_none(), "its lease is not over");
        let late = file.lock(2, second + 150_000_000).expect("the lease is over");
        assert!(file.lock(3, second + 151_000_000).is_none());
        drop(late);
        assert!(file.lock(3, second + 151_000_000).is_some());
    }

    #[test]
    fn another_configuration_keeps_what_was_sent() {
        let file = scratch("configure");
        let held = file.lock(1, 0).unwrap();
        assert!(held.rules().is_none());
        let rules = Rules { rate: 1_000_000_000, ..Rules::default() };
        let mut port = held.configure(&rules, 0).unwrap();
        let mut demand = quipu_nic::qos::Demand::default();
        demand.sent[3].octets = 77;
        port.exchange(0, 5, &demand);
        held.save(&port);
        let other = Rules { high_limit: 9, ..rules };
        held.configure(&other, 10).unwrap();
        assert_eq!(held.rules(), Some(other.clone()));
        let mut port = Port::new(&other, MEMBERS);
        held.load(&mut port, 10);
        assert_eq!(port.used()[3].octets, 77);
        assert_eq!(file.generation(), 2);
    }

    #[test]
    fn places_of_dead_processes_are_free() {
        let file = scratch("places");
        let held = file.lock(1, 0).unwrap();
        let own = std::process::id();
        assert_eq!(held.join(own), Some(0));
        // No process has this number: the greatest is 2^22.
        assert_eq!(held.join(u32::MAX >> 2), Some(1));
        assert_eq!(held.join(own), Some(1));
        held.leave(0);
        assert_eq!(held.owners(), [own]);
    }
}
