//! Where the numbers come from.

use std::ffi::OsString;
use std::fs::read_to_string;
use std::process::Command;

use serde::Serialize;

use crate::sys;

/// What decides the numbers in addition to the software.
#[derive(Clone, Debug, Serialize)]
pub struct Machine {
    /// The processor's name.
    pub cpu: String,
    /// Processors that may be used.
    pub processors: usize,
    /// The processors of the two ends.
    pub pinned_to: [usize; 2],
    /// The hypervisor's flag.
    pub virtual_machine: bool,
    /// Gigabytes of memory.
    pub memory_gb: f64,
    /// The kernel's release.
    pub kernel: String,
    /// Congestion control that sockets get unless they ask for another.
    pub congestion: String,
    /// Variables of the environment that are Quipu's, which decide what is measured.
    pub settings: Vec<String>,
    /// Version of Quipu.
    pub version: String,
    /// The commit in the folder where the benchmark ran, if that is a clone of Quipu.
    pub commit: Option<String>,
    /// Whether Quipu was built with optimization.
    pub optimized: bool,
    /// Versions of the peers.
    pub peers: Vec<String>,
    /// When: UTC.
    pub date: String,
}

impl Machine {
    /// Looks around.
    pub(crate) fn describe(processors: usize, pinned_to: [usize; 2]) -> Self {
        let cpuinfo = read_to_string("/proc/cpuinfo").unwrap_or_default();
        let field = |name: &str| {
            let line = cpuinfo.lines().find(|line| line.starts_with(name))?;
            Some(line.split_once(':')?.1.trim().to_owned())
        };
        let memory = read_to_string("/proc/meminfo").unwrap_or_default();
        let total = memory.lines().find_map(|line| line.strip_prefix("MemTotal:"));
        let kilobytes = total.and_then(|rest| rest.split_whitespace().next()?.parse::<f64>().ok());
        let proc_file = |name: &str| {
            read_to_string(format!("/proc/sys/{name}")).unwrap_or_default().trim().to_owned()
        };
        Self {
            cpu: field("model name").unwrap_or_else(|| std::env::consts::ARCH.into()),
            processors,
            pinned_to,
            virtual_machine: field("flags").is_some_and(|flags| flags.contains(" hypervisor")),
            memory_gb: (kilobytes.unwrap_or_default() / 1024.0 / 102.4).round() / 10.0,
            kernel: proc_file("kernel/osrelease"),
            congestion: crate::congestion::default(),
            settings: settings(std::env::vars_os()),
            version: env!("CARGO_PKG_VERSION").into(),
            commit: commit(),
            optimized: !cfg!(debug_assertions),
            peers: peers(),
            date: said("date", &["-u", "+%Y-%m-%d %H:%M"]).unwrap_or_default(),
        }
    }

    /// One paragraph.
    pub(crate) fn sentence(&self) -> String {
        let machine = if self.virtual_machine { "virtual machine" } else { "machine" };
        let commit = self.commit.as_ref().map(|c| format!(" ({c})")).unwrap_or_default();
        let peers = if self.peers.is_empty() { "none".into() } else { self.peers.join(", ") };
        let settings = match &self.settings[..] {
            [] => String::new(),
            settings => format!(" With {}.", settings.join(", ")),
        };
        format!(
            "{}, {} processors, {:.0} GB, a {machine}; Linux {}, sockets with {}; Quipu {}{commit}; {}. \
             Peers: {peers}.{settings}",
            self.cpu,
            self.processors,
            self.memory_gb,
            self.kernel,
            self.congestion,
            self.version,
            self.date
        )
    }
}

/// Those variables that are Quipu's, with their values.
fn settings(all: impl Iterator<Item = (OsString, OsString)>) -> Vec<String> {
    let text = |part: &OsString| part.to_string_lossy().into_owned();
    let all = all.map(|(name, value)| (text(&name), text(&value)));
    // Who is empty is as good as not there.
    let set = |value: &String| !value.trim().is_empty();
    let ours = all.filter(|(name, value)| name.starts_with("QUIPU_") && set(value));
    let mut settings: Vec<_> = ours.map(|(name, value)| format!("{name}={value}")).collect();
    settings.sort();
    settings
}

/// The first line that a program prints.
fn said(program: &str, arguments: &[&str]) -> Option<String> {
    let output = Command::new(sys::find_program(program)?).args(arguments).output().ok()?;
    let text = String::from_utf8(output.stdout).ok()?;
    let line = text.lines().find(|line| !line.trim().is_empty())?.trim().to_owned();
    output.status.success().then_some(line)
}

fn commit() -> Option<String> {
    if !std::path::Path::new("crates/quipu/Cargo.toml").exists() {
        return None;
    }
    let commit = said("git", &["rev-parse", "--short=12", "HEAD"])?;
    let changed = said("git", &["status", "--porcelain", "--", "crates", "abi"]).is_some();
    Some(if changed { format!("{commit} and changes") } else { commit })
}

fn peers() -> Vec<String> {
    let last_word = |line: String| line.split_whitespace().last().map(str::to_owned);
    let version = |name: &str, program: &str, argument: &str| {
        said(program, &[argument]).and_then(last_word).map(|version| format!("{name} {version}"))
    };
    [
        version("UCX", "ucx_info", "-v"),
        version("libfabric", "fi_info", "--version"),
        version("Open MPI", "mpirun", "--version"),
        version("perftest", "ib_send_lat", "--version"),
    ]
    .into_iter()
    .flatten()
    .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_are_told_with_the_numbers() {
        let all = [
            ("PATH", "/bin"),
            ("QUIPU_FAULTS", "plan"),
            ("QUIPU_CRC", "always"),
            ("QUIPU_LOG", ""),
        ];
        let all = all.map(|(name, value)| (name.into(), value.into()));
        let mut machine = Machine::describe(1, [0, 0]);
        machine.settings = settings(all.into_iter());
        assert!(machine.sentence().ends_with(" With QUIPU_CRC=always, QUIPU_FAULTS=plan."));
    }
}
