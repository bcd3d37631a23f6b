//! The port of quality of service: one for each user and address of this host, which that user's processes
//! share.
//!
//! The port lies in a file of a folder that only its user may enter, and every process maps it. An engine
//! that polls takes the lock, tells the port what waits in its lanes, and gets what is granted (`Port` of
//! `quipu-qos`).
//! The lock is a word with its owner and the time: one that was held for longer than a lease is taken from
//! its owner, which may have been killed. Everything that is read from the file is made legal first, so that
//! nothing in it harms more than the shares of this user's own processes.

mod file;
mod shared;

use std::io;
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};

use quipu_nic::qos::{Config as Rules, ConfigError, Note, Service, show_rate};

use crate::address::HostAddress;
use crate::error::OpenError;
use crate::tap::Adapter;

pub use self::file::{PortView, ports, replace};
use self::shared::SharedPort;

/// What a port is to do.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct QosConfig {
    /// The file with tables and rules: OpenSM's options, or TOML.
    pub file: Option<PathBuf>,
    /// Bits per second, whatever the file says.
    pub rate: Option<u64>,
}

/// Why a file of quality of service cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum QosFileError {
    /// There is none that this user may read.
    #[error("cannot read {}: {source}", path.display())]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
    /// A line makes no sense.
    #[error(transparent)]
    Wrong(#[from] ConfigError),
}

/// The longest file that is read.
const LONGEST: u64 = 1 << 20;

impl QosConfig {
    /// Reads the file, and the policy file that it names, if that is there.
    ///
    /// # Errors
    /// It cannot be read, or makes no sense.
    pub fn read(&self) -> Result<(Rules, Vec<Note>), QosFileError> {
        let (mut rules, notes) = match &self.file {
            Some(path) => read_file(path)?,
            None => (Rules::default(), Vec::new()),
        };
        if let Some(rate) = self.rate {
            rules.rate = rate;
        }
        Ok((rules, notes))
    }
}

fn read_text(path: &Path) -> io::Result<String> {
    use std::io::Read as _;
    let mut text = String::new();
    std::fs::File::open(path)?.take(LONGEST + 1).read_to_string(&mut text)?;
    Ok(text)
}

fn read_file(path: &Path) -> Result<(Rules, Vec<Note>), QosFileError> {
    let unreadable = |source| QosFileError::Unreadable { path: path.to_owned(), source };
    let text = read_text(path).map_err(unreadable)?;
    let (mut rules, mut notes) = Rules::parse(&text, &path.display().to_string())?;
    if let Some(policy) = policy_file(&text) {
        match read_text(policy) {
            Ok(text) => {
                let (parsed, _) = Rules::parse(&text, &policy.display().to_string())?;
                rules.rules.extend(parsed.rules);
            }
            Err(error) => notes.push(Note {
                line: 0,
                what: format!("qos_policy_file {} is not used: {error}", policy.display()),
            }),
        }
    }
    Ok((rules, notes))
}

/// The policy file that OpenSM's options name.
fn policy_file(text: &str) -> Option<&Path> {
    let named = text.lines().find_map(|line| line.trim().strip_prefix("qos_policy_file"))?;
    let named = named.trim();
    named.starts_with('/').then(|| Path::new(named))
}

/// The name of this program, as rules have it.
fn program() -> String {
    let program = std::env::current_exe().unwrap_or_default();
    program.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

/// The service levels that the rules of an adapter give to service IDs.
pub(crate) fn levels(adapter: &Adapter) -> Vec<(RangeInclusive<u64>, u8)> {
    adapter.qos().map(|rules| rules.levels_of_ids(&program())).unwrap_or_default()
}

/// Has an adapter send by the port of its address, if the user asked for that.
pub(crate) fn open(
    wanted: Option<&QosConfig>,
    address: &HostAddress,
    adapter: &mut Adapter,
) -> Result<(), OpenError> {
    let Some(wanted) = wanted else { return Ok(()) };
    let (rules, notes) = wanted.read().map_err(OpenError::Qos)?;
    for note in notes {
        tracing::warn!(line = note.line, "{}", note.what);
    }
    tracing::debug!(rate = %show_rate(rules.rate), "quality of service");
    let shared = match SharedPort::join(address.ip, &rules) {
        Ok(port) => Some(Box::new(port) as Box<dyn quipu_nic::PortShare>),
        Err(error) => {
            tracing::warn!(%error, "other processes of this user do not share the port of this one");
            None
        }
    };
    let program = program();
    let level = rules.service_level(&Service { program: &program, ..Service::default() });
    adapter.set_qos(rules, shared);
    adapter.set_default_level(level.unwrap_or_default());
    Ok(())
}
