//! `--pcap`: the datagrams of the interface in a file.

use std::ffi::OsStr;
use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::sync::{Mutex, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

use quipu_host::counters::observe::{Interface, IpoibCapture, IpoibEnds, Mark};
use quipu_ipoib::LinkAddress;

/// Longest file in bytes.
const LIMIT: u64 = 1 << 30;

/// A capture and its file.
pub(super) struct Recorder(Mutex<(IpoibCapture, File)>);

impl Recorder {
    /// Begins a capture in a file that is there and empty.
    pub(super) fn create(path: &OsStr, interface: &str) -> io::Result<Self> {
        let mut file = OpenOptions::new().append(true).create(true).open(path)?;
        let interface = Interface {
            name: interface.replace("%d", "0"),
            description: format!("IP over InfiniBand of process {}", std::process::id()),
            application: concat!("Quipu ", env!("CARGO_PKG_VERSION")).into(),
        };
        let mut capture = IpoibCapture::new(&interface, LIMIT);
        file.write_all(&capture.take_output())?;
        Ok(Self(Mutex::new((capture, file))))
    }

    /// A datagram was sent, and is marked, or has come. A full disk costs the capture, not the interface.
    pub(super) fn passed(
        &self,
        mark: Option<Mark>,
        from: LinkAddress,
        to: LinkAddress,
        datagram: &[u8],
    ) {
        let mut held = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let (capture, file) = &mut *held;
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let ends = IpoibEnds {
            source: from.gid,
            source_qpn: from.qpn,
            destination: to.gid,
            destination_qpn: to.qpn,
        };
        capture.passed(now, mark, &ends, datagram);
        let _ = file.write_all(&capture.take_output());
    }
}
