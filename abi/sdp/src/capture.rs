//! `QUIPU_SDP_PCAP`: the messages of all connections in a file that tshark shows as SDP.

use std::fs::File;
use std::io::Write;
use std::sync::{Mutex, OnceLock, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use quipu_cabi::descriptors::move_file_up;
use quipu_cabi::{per_process, spared};
use quipu_observe::{Interface, Mark, SdpCapture, SdpEnds};

const VARIABLE: &str = "QUIPU_SDP_PCAP";
/// Longest file in bytes.
const LIMIT: u64 = 1 << 30;

struct Writer {
    capture: SdpCapture,
    file: File,
}

static WRITER: OnceLock<Option<Mutex<Writer>>> = OnceLock::new();

fn open() -> Option<Mutex<Writer>> {
    let name = std::env::var_os(VARIABLE).filter(|name| !name.is_empty())?;
    let path = per_process(&name);
    let file = match File::create(&path).and_then(move_file_up) {
        Ok(file) => file,
        Err(error) => {
            let path = path.display();
            eprintln!(
                "quipu: cannot capture SDP in {path}: {error}; choose another file with {VARIABLE}, \
                 or unset it"
            );
            return None;
        }
    };
    let interface = Interface {
        name: "quipu0".into(),
        description: format!("SDP of process {}", std::process::id()),
        application: concat!("quipu ", env!("CARGO_PKG_VERSION")).into(),
    };
    let mut writer = Writer { capture: SdpCapture::new(&interface, LIMIT), file };
    writer.flush();
    Some(Mutex::new(writer))
}

impl Writer {
    fn flush(&mut self) {
        let bytes = self.capture.take_output();
        // A full disk costs the capture, not the program.
        let _ = spared(|| self.file.write_all(&bytes));
    }
}

/// Whether messages are captured.
pub(crate) fn is_on() -> bool {
    WRITER.get_or_init(open).is_some()
}

fn with(show: impl FnOnce(&mut SdpCapture, Duration)) {
    let Some(writer) = WRITER.get_or_init(open) else { return };
    let mut writer = writer.lock().unwrap_or_else(PoisonError::into_inner);
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    show(&mut writer.capture, now);
    writer.flush();
}

/// A connection stands.
pub(crate) fn connected(ends: &SdpEnds, hello: &[u8], hello_ack: &[u8]) {
    with(|capture, now| capture.connected(now, ends, hello, hello_ack));
}

/// A message was sent, and is marked, or has come; in two parts.
pub(crate) fn message(ends: &SdpEnds, mark: Option<Mark>, head: &[u8], payload: &[u8]) {
    let message = [head, payload].concat();
    with(|capture, now| capture.message_passed(now, ends, mark, &message));
}
