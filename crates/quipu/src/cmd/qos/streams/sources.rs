//! The processes that send by the port, and those that they send to.

use std::ffi::OsStr;
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;
use std::{env, fs, io};

use quipu_host::WantedAddress;

use super::super::bench::sink::Sink;
use super::super::process::{Process, Trouble};
use super::Kind;

/// Streams that a sockets program connects.
const STREAMS: usize = 3;
/// How long a process has to start and connect.
const START: Duration = Duration::from_secs(15);
/// Addresses of the two interfaces of IPoIB, in networks of their own.
const INTERFACES: [&str; 2] = ["10.77.0.1", "10.77.0.2"];

/// A file that is removed with this value.
struct File(PathBuf);

impl Drop for File {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.0);
    }
}

/// What sends, with the process that it sends to.
pub(super) struct Source {
    kind: Kind,
    process: Process,
    /// Reads its streams.
    _reader: Option<Process>,
}

impl Source {
    /// Has so many of its streams send. Bulk data are one stream, which always sends.
    pub(super) fn set_streams(&mut self, count: usize) -> Result<(), Trouble> {
        match self.kind {
            Kind::Bulk | Kind::Bulk2 => Ok(()),
            Kind::Sdp | Kind::Ipoib => self.process.tell(&format!("{count}\n")),
        }
    }
}

/// Everything that sends.
pub(super) struct Sources {
    own: PathBuf,
    address: WantedAddress,
    rules: File,
    sink: Sink,
    pub(super) all: Vec<Source>,
}

impl Sources {
    /// None yet, for a port at an address.
    pub(super) fn new(address: WantedAddress, rate: u64) -> Result<Self, Trouble> {
        let rules = File(env::temp_dir().join(format!("quipu-qos-{}.toml", std::process::id())));
        let text = format!(
            "rate = \"{rate}\"\nvlarb_high = \"0:0\"\nvlarb_low = \"0:1,1:1,2:1,3:1\"\n\
             rules = [\"sdp : 1\", \"ipoib : 2\", \"default : 0\"]\n"
        );
        let mut options = fs::OpenOptions::new();
        io::Write::write_all(
            &mut options.write(true).create_new(true).open(&rules.0)?,
            text.as_bytes(),
        )?;
        let sink = Sink::open(&address)?;
        Ok(Self { own: env::current_exe()?, address, rules, sink, all: Vec::new() })
    }

    /// The place of what sends in a lane.
    pub(super) fn find(&self, kind: Kind) -> Option<usize> {
        self.all.iter().position(|it| it.kind == kind)
    }

    /// A command of this program, that sends by the port or does not.
    fn command<S: AsRef<OsStr>>(&self, arguments: &[S], sends: bool) -> Command {
        let mut command = Command::new(&self.own);
        command.args(arguments).env("QUIPU_ADDRESS", self.address.to_string());
        for variable in ["QUIPU_RATE", "QUIPU_QOS", "QUIPU_PCAP", "LIBSDP_CONFIG_FILE"] {
            command.env_remove(variable);
        }
        if sends {
            command.env("QUIPU_QOS", &self.rules.0);
        }
        // Every TCP socket of a program under `quipu sockets --sdp`. What is read by the peer does not
        // leave by the port of its owner, so nothing goes without a copy.
        command.env("SIMPLE_LIBSDP", "1").env("QUIPU_SDP_ZCOPY", "0");
        command
    }

    /// Starts what sends in a lane.
    pub(super) fn start(&mut self, kind: Kind) -> Result<(), Trouble> {
        let (mut process, reader) = match kind {
            Kind::Bulk | Kind::Bulk2 => {
                let level = kind.lane().to_string();
                let command = self.command(&["qos", "worker", &level], true);
                (self.sink.start(command, false)?, None)
            }
            Kind::Sdp => {
                let at = format!("{}:0", self.address.ip);
                let under = ["sockets", "--sdp", "--"].map(str::to_owned);
                self.streams([&under, &under], &at)?
            }
            Kind::Ipoib => {
                let key = (std::process::id() & 0x7fff_ffff).to_string();
                let under = INTERFACES.map(|address| {
                    let network = format!("{address}/24");
                    ["ipoib", "--verbose", "--qkey", &key, "--address", &network, "--"]
                        .map(str::to_owned)
                });
                self.streams([&under[0], &under[1]], &format!("{}:0", INTERFACES[0]))?
            }
        };
        if matches!(kind, Kind::Bulk | Kind::Bulk2) {
            process.tell("go\n")?;
        }
        self.all.push(Source { kind, process, _reader: reader });
        Ok(())
    }

    /// Starts the sockets program under another command, at both ends.
    fn streams(
        &self,
        [reader, writer]: [&[String]; 2],
        at: &str,
    ) -> Result<(Process, Option<Process>), Trouble> {
        let own = self.own.to_string_lossy().into_owned();
        let stream = |end: &str| [&own, "qos", "stream", end].map(str::to_owned);
        let sink = [reader, &stream("sink"), &[at.to_owned()]].concat();
        let mut reader = Process::start(self.command(&sink, false))?;
        let at = reader.line_within(START)?;
        let count = STREAMS.to_string();
        let source = [writer, &stream("source"), &[at, count]].concat();
        let mut writer = Process::start(self.command(&source, true))?;
        writer.line_within(START)?;
        Ok((writer, Some(reader)))
    }
}
