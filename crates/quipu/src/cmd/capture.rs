//! `quipu run --pcap`: where the program's packets are captured.

use std::ffi::OsString;
use std::fs::{self, OpenOptions};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf, absolute};

use super::failure::Failure;

/// Whether packets are captured, and how many.
#[derive(clap::Args)]
pub(crate) struct CaptureOptions {
    /// Capture packets in this file, as pcapng: Wireshark shows them as iWARP, also those that went
    /// through shared memory. `%p` stands for the number of the process; a folder gets a file for
    /// each process.
    #[arg(long, value_name = "FILE")]
    pcap: Option<PathBuf>,
    /// Longest file, in megabytes; then the capture ends. 1024 by default.
    #[arg(long, value_name = "MB", requires = "pcap",
          value_parser = clap::value_parser!(u32).range(1..=1 << 20))]
    pcap_size: Option<u32>,
    /// Keep so many bytes of each packet; 0, the default, keeps all.
    #[arg(long, value_name = "BYTES", requires = "pcap",
          value_parser = clap::value_parser!(u32).range(0..=65_535))]
    pcap_snaplen: Option<u32>,
}

impl CaptureOptions {
    /// The variables that ask for it. A capture of an earlier run in that file is removed.
    pub(crate) fn variables(&self) -> Result<Vec<(&'static str, OsString)>, Failure> {
        let Some(path) = &self.pcap else { return Ok(Vec::new()) };
        let refuse = |error: std::io::Error| {
            let what = format!("cannot capture packets in {}", path.display());
            Failure::new(what, error, "give --pcap a file that you can write")
        };
        // The program may be in another folder when it opens the device.
        let path = absolute(path).map_err(refuse)?;
        begin(&path).map_err(refuse)?;
        let mut set = vec![("QUIPU_PCAP", path.into_os_string())];
        let numbers =
            [("QUIPU_PCAP_MB", self.pcap_size), ("QUIPU_PCAP_SNAPLEN", self.pcap_snaplen)];
        for (name, number) in numbers {
            set.extend(number.map(|number| (name, number.to_string().into())));
        }
        Ok(set)
    }
}

/// Checks that the file can be written, and empties it.
fn begin(path: &Path) -> std::io::Result<()> {
    if path.is_dir() {
        return Ok(());
    }
    if path.to_string_lossy().contains("%p") {
        let folder = path.parent().unwrap_or(Path::new("/"));
        return fs::metadata(folder).map(|_| ());
    }
    let mut options = OpenOptions::new();
    options.write(true).create(true).truncate(true).mode(0o600).open(path).map(|_| ())
}
