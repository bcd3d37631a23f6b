//! `--pcap` and `--trace`: where packets are captured, and the calls of a program traced.

use std::ffi::OsString;
use std::fs::{self, OpenOptions, Permissions, TryLockError};
use std::io::{self, Read};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf, absolute};

use quipu_host::{CaptureConfig, is_per_process};

use super::failure::Failure;
use super::variables;

/// Whether packets are captured, and how many.
#[derive(clap::Args, Clone, Debug, Default)]
pub(crate) struct PcapOptions {
    /// Capture packets into this file, as pcapng. Wireshark shows RDMA traffic as iWARP, even through
    /// shared memory, and QPIP's packets as they are on the link. `%p` in the name is the process number;
    /// a folder gets a file for each process.
    #[arg(long, value_name = "FILE")]
    pcap: Option<PathBuf>,
    /// Size in megabytes at which the capture ends. Default: 1024.
    #[arg(long, value_name = "MB",
          value_parser = clap::value_parser!(u32).range(1..=1 << 20))]
    pcap_size: Option<u32>,
    /// Keep this many bytes of each packet. 0, the default, keeps all.
    #[arg(long, value_name = "BYTES",
          value_parser = clap::value_parser!(u32).range(0..=65_535))]
    pcap_snaplen: Option<u32>,
}

/// Whether packets are captured, and whether calls are traced.
#[derive(clap::Args)]
pub(crate) struct CaptureOptions {
    #[command(flatten)]
    packets: PcapOptions,
    /// Write the program's calls of verbs and rdma_cm into this file, as strace does: arguments, result,
    /// errno, time and duration. `-` is standard error; `%p` in the name is the process number; a name
    /// that ends in .json or .jsonl gives JSON lines.
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,
}

impl PcapOptions {
    pub(crate) fn is_wanted(&self) -> bool {
        self.pcap.is_some()
    }

    /// What is captured of an adapter in this process; `None` if nothing is asked for, by `variable` neither.
    /// A file of an earlier run that `--pcap` names is emptied.
    pub(crate) fn config(
        &self,
        variable: Option<CaptureConfig>,
    ) -> Result<Option<CaptureConfig>, Failure> {
        self.check(variable.is_some())?;
        let capture = match &self.pcap {
            Some(path) => {
                let path = prepared(path, "--pcap", "capture packets")?.into();
                Some(CaptureConfig { path, file_bytes: 1024 << 20, snaplen: 0 })
            }
            None => variable,
        };
        Ok(capture.map(|capture| CaptureConfig {
            file_bytes: self.pcap_size.map_or(capture.file_bytes, |size| u64::from(size) << 20),
            snaplen: self.pcap_snaplen.unwrap_or(capture.snaplen),
            ..capture
        }))
    }

    /// Refuses bounds of a capture that nobody asks for, by the variable neither.
    fn check(&self, by_variable: bool) -> Result<(), Failure> {
        let is_bounded = self.pcap_size.or(self.pcap_snaplen).is_some();
        if !is_bounded || by_variable || self.is_wanted() {
            return Ok(());
        }
        let why = "there is no capture file";
        let remedy = "give --pcap a file, or set QUIPU_PCAP";
        Err(Failure::new("cannot limit a capture", why, remedy).with_code(2))
    }
}

impl CaptureOptions {
    /// The variables that ask for it. Files of that name of an earlier run are emptied.
    pub(crate) fn variables(&self) -> Result<Vec<(&'static str, OsString)>, Failure> {
        let mut set = Vec::new();
        let packets = &self.packets;
        packets.check(variables::value("QUIPU_PCAP").is_some())?;
        let prepared = |path: &Path, option: &str, what: &str| {
            prepared(path, option, what).map_err(|failure| failure.with_code(125))
        };
        if let Some(path) = &packets.pcap {
            set.push(("QUIPU_PCAP", prepared(path, "--pcap", "capture packets")?));
        }
        let numbers =
            [("QUIPU_PCAP_MB", packets.pcap_size), ("QUIPU_PCAP_SNAPLEN", packets.pcap_snaplen)];
        for (name, number) in numbers {
            set.extend(number.map(|number| (name, number.to_string().into())));
        }
        match &self.trace {
            Some(path) if path == Path::new("-") => set.push(("QUIPU_TRACE", "-".into())),
            Some(path) => set.push(("QUIPU_TRACE", prepared(path, "--trace", "trace calls")?)),
            None => {}
        }
        Ok(set)
    }
}

/// The absolute path of a file, since the program may be in another folder when it opens the device,
/// after it was begun.
pub(crate) fn prepared(path: &Path, option: &str, what: &str) -> Result<OsString, Failure> {
    let begun = absolute(path).and_then(|path| {
        begin(&path)?;
        Ok(path.into_os_string())
    });
    begun.map_err(|error| {
        let what = format!("cannot {what} in {}", path.display());
        Failure::new(what, error, format!("give {option} a file that you can write"))
    })
}

/// Checks that the file can be written, and empties it, unless another process captures in it, which holds
/// a lock on it. Nor a program, lest a word that was forgotten before it empties the program.
fn begin(path: &Path) -> io::Result<()> {
    if is_per_process(path.as_os_str()) {
        let folder = path.parent().unwrap_or(Path::new("/"));
        return fs::metadata(folder).map(|_| ());
    }
    match fs::metadata(path) {
        // A folder, a terminal, or a pipe, whose reader would take this for the end.
        Ok(data) if !data.is_file() => return Ok(()),
        Ok(data) if data.mode() & 0o111 != 0 && data.len() > 0 && !is_ours(path) => {
            return Err(io::Error::other("it is executable, so it may be a program"));
        }
        _ => {}
    }
    let mut options = OpenOptions::new();
    let file = options.write(true).create(true).truncate(false).mode(0o600).open(path)?;
    if matches!(file.try_lock(), Err(TryLockError::WouldBlock)) {
        return Ok(());
    }
    file.set_len(0)?;
    // What the program sends is nobody else's affair; who may only write to the file leaves it as it is.
    let _ = file.set_permissions(Permissions::from_mode(0o600));
    // By name: a child that is being made in another thread has the descriptor too, until it is a program.
    file.unlock()
}

/// Whether an executable file begins as a capture or a trace does: on some file systems all files are
/// executable. What else is to be executed cannot be told: a script needs no `#!`.
fn is_ours(path: &Path) -> bool {
    let mut start = Vec::new();
    let read = fs::File::open(path).and_then(|file| file.take(64).read_to_end(&mut start));
    // A line of a trace begins with seconds, a point and the microseconds.
    let digits = start.iter().take_while(|byte| byte.is_ascii_digit()).count();
    let is_time = digits >= 10 && start.get(digits) == Some(&b'.');
    let begins = |with: &[u8]| start.starts_with(with);
    read.is_ok() && (begins(b"\x0a\x0d\x0d\x0a") || begins(b"{\"time\":") || is_time)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options(trace: &Path) -> CaptureOptions {
        let trace = Some(trace.to_owned());
        CaptureOptions { packets: PcapOptions::default(), trace }
    }

    #[test]
    fn a_trace_of_an_earlier_run_is_emptied_and_a_program_is_not() {
        let name = format!("quipu-trace-{}.txt", std::process::id());
        let file = std::env::temp_dir().join(name);
        fs::write(&file, "an earlier run").unwrap();
        let set = options(&file).variables().unwrap();
        assert_eq!(set, [("QUIPU_TRACE", file.clone().into_os_string())]);
        assert_eq!(fs::read(&file).unwrap(), b"");
        fs::remove_file(&file).unwrap();
        let program = std::env::current_exe().unwrap();
        let error = options(&program).variables().unwrap_err().to_string();
        assert!(error.contains("it is executable"), "{error}");
        assert!(fs::metadata(&program).unwrap().len() > 0);
    }

    #[test]
    fn a_capture_has_a_size_and_a_file_that_is_empty() {
        let name = format!("quipu-pcap-{}.pcapng", std::process::id());
        let file = std::env::temp_dir().join(name);
        fs::write(&file, "an earlier run").unwrap();
        let options =
            PcapOptions { pcap: Some(file.clone()), pcap_size: Some(2), pcap_snaplen: None };
        let config = options.config(None).unwrap().unwrap();
        assert_eq!((config.path, config.file_bytes, config.snaplen), (file.clone(), 2 << 20, 0));
        assert_eq!(fs::read(&file).unwrap(), b"");
        fs::remove_file(&file).unwrap();
        assert_eq!(PcapOptions::default().config(None).unwrap(), None);
    }

    #[test]
    fn a_bound_is_that_of_a_capture_of_the_variable_too() {
        let options = PcapOptions { pcap: None, pcap_size: None, pcap_snaplen: Some(96) };
        let variable = CaptureConfig { path: "x.pcapng".into(), file_bytes: 7, snaplen: 0 };
        let config = options.config(Some(variable)).unwrap().unwrap();
        assert_eq!((config.path, config.file_bytes, config.snaplen), ("x.pcapng".into(), 7, 96));
        let error = options.config(None).unwrap_err().to_string();
        assert!(error.contains("QUIPU_PCAP"), "{error}");
    }

    #[test]
    fn a_capture_that_another_process_writes_is_left_to_it() {
        let name = format!("quipu-pcap-taken-{}.pcapng", std::process::id());
        let path = std::env::temp_dir().join(name);
        fs::write(&path, "packets").unwrap();
        // Another description of the same file is refused the lock, as another process would be.
        let taken = fs::File::open(&path).unwrap();
        taken.lock().unwrap();
        begin(&path).unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"packets");
        drop(taken);
        begin(&path).unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"");
        fs::remove_file(&path).unwrap();
    }

    #[test]
    fn what_is_no_file_is_left_alone() {
        let folder = std::env::temp_dir().join(format!("quipu-begin-{}", std::process::id()));
        fs::create_dir(&folder).unwrap();
        let pipe = folder.join("pipe");
        assert!(std::process::Command::new("mkfifo").arg(&pipe).status().unwrap().success());
        // Who opened it would wait for a reader.
        begin(&pipe).unwrap();
        begin(&folder).unwrap();
        fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    fn a_file_of_ours_is_for_this_user_though_all_files_are_executable() {
        let name = format!("quipu-pcap-executable-{}.pcapng", std::process::id());
        let path = std::env::temp_dir().join(name);
        fs::write(&path, [0x0a, 0x0d, 0x0d, 0x0a]).unwrap();
        fs::set_permissions(&path, Permissions::from_mode(0o777)).unwrap();
        begin(&path).unwrap();
        let data = fs::metadata(&path).unwrap();
        assert_eq!((data.len(), data.mode() & 0o777), (0, 0o600));
        let ours =
            ["", "1732651429.000123 77/78 ibv_open_device(", r#"{"time":1732651429.000123,"#];
        let programs = ["#!/bin/sh\n", "\x7fELF", "exec cargo test\n", "PK\x03\x04", "MZ", "1.0\n"];
        for (text, empties) in
            ours.map(|text| (text, true)).into_iter().chain(programs.map(|text| (text, false)))
        {
            fs::write(&path, text).unwrap();
            fs::set_permissions(&path, Permissions::from_mode(0o755)).unwrap();
            assert_eq!(begin(&path).is_ok(), empties, "{text:?}");
            let data = fs::metadata(&path).unwrap();
            let left = if empties { (0, 0o600) } else { (text.len() as u64, 0o755) };
            assert_eq!((data.len(), data.mode() & 0o777), left, "{text:?}");
        }
        fs::remove_file(&path).unwrap();
    }

    #[test]
    fn a_dash_is_standard_error() {
        assert_eq!(options(Path::new("-")).variables().unwrap(), [("QUIPU_TRACE", "-".into())]);
    }
}
