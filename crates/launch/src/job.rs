//! A rank's view of its job.

use std::env;
use std::ffi::CString;
use std::net::TcpStream;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

use crate::error::LaunchError;
use crate::pmi::client::Client;
use crate::pmix::Pmix;
use crate::sys;

/// Bytes of a value in one line of PMI: Slurm 22.05 takes no lines of more than 1,035 bytes.
const PIECE: usize = 360;
/// Longest value.
const MAX_VALUE: usize = 64 * 1024;
const MAX_KEY: usize = 32;

/// By which means a process finds its peers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Launcher {
    /// No launcher has started this process: it is alone.
    None,
    /// PMI-1 or PMI-2 on an inherited socket: `quipu spmd`, `mpiexec.hydra`, `srun`.
    PmiFd,
    /// PMI-1 over TCP: `mpiexec.hydra -pmi-port`.
    PmiPort,
    /// PMIx: `mpirun` of Open MPI, `prterun`, `srun --mpi=pmix`.
    Pmix,
}

#[derive(Debug)]
enum Link {
    Alone(Vec<(String, Vec<u8>)>),
    Pmi(Client),
    Pmix(Box<Pmix>),
}

/// The job of this process: its rank, the number of ranks, and a space of values that all share.
///
/// ```
/// use quipu_launch::Job;
///
/// # fn main() -> Result<(), quipu_launch::LaunchError> {
/// let job = Job::from_env()?;
/// job.put("address", format!("10.0.0.{}", job.rank()).as_bytes())?;
/// job.fence()?;
/// let of_next = job.get((job.rank() + 1) % job.size(), "address")?;
/// # assert_eq!(of_next, b"10.0.0.0");
/// job.finalize()
/// # }
/// ```
#[derive(Debug)]
pub struct Job {
    rank: u32,
    size: u32,
    launcher: Launcher,
    link: Mutex<Link>,
}

/// The launcher's socket can be taken over once.
static JOINED: AtomicBool = AtomicBool::new(false);

impl Job {
    /// Joins the job that this process was started in. Call it once, before other threads run that open or
    /// close descriptors.
    ///
    /// # Errors
    /// If a launcher has started the process and its protocol is not available or fails. A process that has
    /// peers never takes itself for one that is alone.
    pub fn from_env() -> Result<Self, LaunchError> {
        let launcher = detect()?;
        if launcher != Launcher::None && JOINED.swap(true, Ordering::SeqCst) {
            return Err(LaunchError::AlreadyJoined);
        }
        match launcher {
            Launcher::None => Ok(Self::alone()),
            Launcher::PmiFd => {
                let fd = number("PMI_FD")?;
                let fd = i32::try_from(fd).unwrap_or(i32::MAX);
                Self::by_pmi(launcher, Client::start(sys::adopt(fd)?, None)?)
            }
            Launcher::PmiPort => {
                let port = variable("PMI_PORT").unwrap_or_default();
                let id = variable("PMI_ID").unwrap_or_default();
                let stream = OwnedFd::from(TcpStream::connect(&port[..])?);
                Self::by_pmi(launcher, Client::start(stream.into(), Some(&id))?)
            }
            Launcher::Pmix => {
                let pmix = Pmix::start()?;
                let (rank, size) = pmix.place();
                Ok(Self { rank, size, launcher, link: Mutex::new(Link::Pmix(Box::new(pmix))) })
            }
        }
    }

    /// A job of one rank.
    #[must_use]
    pub fn alone() -> Self {
        let link = Mutex::new(Link::Alone(Vec::new()));
        Self { rank: 0, size: 1, launcher: Launcher::None, link }
    }

    fn by_pmi(launcher: Launcher, client: Client) -> Result<Self, LaunchError> {
        let (rank, size) = match client.place {
            Some(place) => place,
            None => (number("PMI_RANK")?, number("PMI_SIZE")?),
        };
        if rank >= size {
            let value = rank.to_string();
            return Err(LaunchError::Variable {
                name: "PMI_RANK",
                value,
                expected: "below PMI_SIZE",
            });
        }
        Ok(Self { rank, size, launcher, link: Mutex::new(Link::Pmi(client)) })
    }

    /// The number of this process, from 0.
    #[must_use]
    pub fn rank(&self) -> u32 {
        self.rank
    }

    /// The number of processes.
    #[must_use]
    pub fn size(&self) -> u32 {
        self.size
    }

    /// Who has started this process.
    #[must_use]
    pub fn launcher(&self) -> Launcher {
        self.launcher
    }

    /// Puts a value under a key, for all ranks to [`get`](Self::get) after the next [`fence`](Self::fence).
    ///
    /// A key is at most 32 letters, digits, `-` or `.`, and put once; a value has at most 64 KB.
    ///
    /// # Errors
    /// If key or value are not so, or the launcher fails.
    pub fn put(&self, key: &str, value: &[u8]) -> Result<(), LaunchError> {
        let bad = |why| Err(LaunchError::BadKey { key: key.into(), why });
        let legal = |c: u8| c.is_ascii_alphanumeric() || c == b'-' || c == b'.';
        if key.is_empty() || key.len() > MAX_KEY || !key.bytes().all(legal) {
            return bad("it must be 1 to 32 letters, digits, '-' or '.'");
        }
        if value.len() > MAX_VALUE {
            return bad("its value is longer than 65536 bytes");
        }
        match &mut *self.link() {
            Link::Alone(values) => values.push((key.into(), value.into())),
            Link::Pmi(client) => {
                for (number, piece) in pieces(value).enumerate() {
                    client.put(&format!("{}-{key}-{number}", self.rank), &piece)?;
                }
            }
            Link::Pmix(pmix) => pmix.put(&pmix_key(key), value)?,
        }
        Ok(())
    }

    /// Waits until all ranks are here, and makes visible what they have put before.
    ///
    /// # Errors
    /// If the launcher fails.
    pub fn fence(&self) -> Result<(), LaunchError> {
        match &mut *self.link() {
            Link::Alone(_) => Ok(()),
            Link::Pmi(client) => client.fence(),
            Link::Pmix(pmix) => pmix.fence(),
        }
    }

    /// Waits until all ranks are here: another word for [`fence`](Self::fence).
    ///
    /// # Errors
    /// If the launcher fails.
    pub fn barrier(&self) -> Result<(), LaunchError> {
        self.fence()
    }

    /// The value that a rank has put under a key before the last fence.
    ///
    /// # Errors
    /// If there is none, or the launcher fails.
    pub fn get(&self, rank: u32, key: &str) -> Result<Vec<u8>, LaunchError> {
        let missing = || LaunchError::NoValue { rank, key: key.into() };
        if rank >= self.size {
            return Err(missing());
        }
        match &mut *self.link() {
            Link::Alone(values) => {
                let found = values.iter().rev().find(|(name, _)| name == key);
                found.map(|(_, value)| value.clone()).ok_or_else(missing)
            }
            Link::Pmi(client) => {
                let mut joined = Joined::default();
                for number in 0.. {
                    let piece = client.get(&format!("{rank}-{key}-{number}"))?;
                    if joined.add(&piece.ok_or_else(missing)?).ok_or_else(missing)? {
                        break;
                    }
                }
                Ok(joined.bytes)
            }
            Link::Pmix(pmix) => pmix.get(rank, &pmix_key(key))?.ok_or_else(missing),
        }
    }

    /// Puts a value, waits for all, and returns the values of all ranks in their order.
    ///
    /// # Errors
    /// As [`put`](Self::put), [`fence`](Self::fence) and [`get`](Self::get).
    pub fn all_gather(&self, key: &str, value: &[u8]) -> Result<Vec<Vec<u8>>, LaunchError> {
        self.put(key, value)?;
        self.fence()?;
        (0..self.size).map(|rank| self.get(rank, key)).collect()
    }

    /// Ends the whole job with this exit code. The launcher shows the message, or this process does.
    pub fn abort(&self, code: i32, message: &str) -> ! {
        eprintln!("rank {} of {} aborts the job: {message}", self.rank, self.size);
        match &mut *self.link() {
            Link::Alone(_) => {}
            Link::Pmi(client) => client.abort(code, message),
            Link::Pmix(pmix) => pmix.abort(code, message),
        }
        std::process::exit(code)
    }

    /// Leaves the job. Afterwards this rank may end at any time.
    ///
    /// # Errors
    /// If the launcher fails.
    pub fn finalize(self) -> Result<(), LaunchError> {
        self.leave()
    }

    /// As [`finalize`](Self::finalize), for a job that others still hold. No other call may follow.
    ///
    /// # Errors
    /// If the launcher fails.
    pub fn leave(&self) -> Result<(), LaunchError> {
        match &mut *self.link() {
            Link::Alone(_) => Ok(()),
            Link::Pmi(client) => client.finalize(),
            Link::Pmix(pmix) => pmix.finalize(),
        }
    }

    fn link(&self) -> std::sync::MutexGuard<'_, Link> {
        self.link.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Which launcher has started this process.
fn detect() -> Result<Launcher, LaunchError> {
    if variable("PMI_FD").is_some() {
        return Ok(Launcher::PmiFd);
    }
    if variable("PMI_PORT").is_some() {
        return Ok(Launcher::PmiPort);
    }
    if variable("PMIX_NAMESPACE").is_some() {
        return Ok(Launcher::Pmix);
    }
    if variable("SLURM_PROCID").is_some() && several("SLURM_NTASKS") {
        return Err(LaunchError::NoProtocol {
            launcher: "srun",
            why: "it was told to offer no PMI (--mpi=none)".into(),
            remedy: "use srun --mpi=pmi2 or srun --mpi=pmix",
        });
    }
    if variable("OMPI_COMM_WORLD_RANK").is_some() && several("OMPI_COMM_WORLD_SIZE") {
        return Err(LaunchError::NoProtocol {
            launcher: "mpirun",
            why: "it offers no PMIx".into(),
            remedy: "use Open MPI 4 or later, mpiexec.hydra or quipu spmd",
        });
    }
    Ok(Launcher::None)
}

fn variable(name: &str) -> Option<String> {
    env::var(name).ok().filter(|value| !value.is_empty())
}

fn several(name: &str) -> bool {
    variable(name).and_then(|value| value.parse::<u32>().ok()).is_some_and(|count| count > 1)
}

fn number(name: &'static str) -> Result<u32, LaunchError> {
    let value = variable(name).unwrap_or_default();
    value.trim().parse().map_err(|_| LaunchError::Variable { name, value, expected: "a number" })
}

fn pmix_key(key: &str) -> CString {
    CString::new(format!("quipu.{key}")).unwrap_or_default()
}

/// A value in pieces of text: `LENGTH:` in front of the first, then hexadecimal digits.
fn pieces(value: &[u8]) -> impl Iterator<Item = String> {
    let count = value.len().div_ceil(PIECE).max(1);
    (0..count).map(move |number| {
        let piece = &value[number * PIECE..value.len().min((number + 1) * PIECE)];
        let digits: String = piece.iter().map(|byte| format!("{byte:02x}")).collect();
        if number == 0 { format!("{}:{digits}", value.len()) } else { digits }
    })
}

/// Pieces that are put together again.
#[derive(Default)]
struct Joined {
    bytes: Vec<u8>,
    len: Option<usize>,
}

impl Joined {
    /// Adds the next piece. Whether it was the last one; nothing if it is no piece of a value.
    fn add(&mut self, piece: &str) -> Option<bool> {
        let digits = match self.len {
            Some(_) => piece,
            None => {
                let (len, digits) = piece.split_once(':')?;
                self.len = Some(len.parse().ok().filter(|len| *len <= MAX_VALUE)?);
                digits
            }
        };
        let len = self.len?;
        if digits.len() % 2 != 0 || (digits.is_empty() && len > 0) {
            return None;
        }
        for pair in digits.as_bytes().chunks(2) {
            let text = std::str::from_utf8(pair).ok()?;
            self.bytes.push(u8::from_str_radix(text, 16).ok()?);
        }
        (self.bytes.len() <= len).then_some(self.bytes.len() == len)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_of_any_length_survive_being_cut() {
        for len in [0, 1, PIECE - 1, PIECE, PIECE + 1, 3 * PIECE, MAX_VALUE] {
            let value: Vec<u8> = (0..len).map(|i| (i * 7) as u8).collect();
            let (mut joined, all) = (Joined::default(), pieces(&value).collect::<Vec<_>>());
            assert!(all.iter().all(|piece| piece.len() < 800));
            for (number, piece) in all.iter().enumerate() {
                assert_eq!(joined.add(piece), Some(number + 1 == all.len()));
            }
            assert_eq!(joined.bytes, value);
        }
    }

    #[test]
    fn what_is_no_value_is_refused() {
        for text in ["", "abc", "2:a", "1:zz", "1:0011", "99999999:00", "4:", "1:é"] {
            assert_eq!(Joined::default().add(text), None, "{text}");
        }
    }

    #[test]
    fn a_job_of_one_reads_what_it_puts() {
        let job = Job::alone();
        job.put("a", b"x").unwrap();
        assert_eq!(job.all_gather("b", b"y").unwrap(), [b"y"]);
        assert_eq!(job.get(0, "a").unwrap(), b"x");
        assert!(matches!(job.get(0, "c"), Err(LaunchError::NoValue { .. })));
        assert!(matches!(job.get(1, "a"), Err(LaunchError::NoValue { .. })));
        assert!(job.put("a b", b"").is_err() && job.put("", b"").is_err());
        job.finalize().unwrap();
    }
}
