//! The rank's end of PMI-1 and PMI-2, over the stream that the launcher made.

use std::fs::File;
use std::io::{BufRead, BufReader, Read, Write};

use super::wire::{FRAME_HEADER, Frame, Line};
use crate::error::LaunchError;

/// Longest message that a launcher may send, in bytes.
const MAX_MESSAGE: usize = 64 * 1024;

/// Which protocol the launcher took.
#[derive(Debug)]
enum Protocol {
    One { space: String },
    Two { job: String },
}

/// A connection to the launcher.
#[derive(Debug)]
pub(crate) struct Client {
    stream: BufReader<File>,
    protocol: Protocol,
    /// The rank and the number of ranks, where the protocol told them.
    pub(crate) place: Option<(u32, u32)>,
}

impl Client {
    /// Starts the protocol over a stream: PMI-1, or PMI-2 if the launcher refuses that.
    pub(crate) fn start(stream: File, id: Option<&str>) -> Result<Self, LaunchError> {
        let mut stream = BufReader::new(stream);
        let place = id.map(|id| introduce(&mut stream, id)).transpose()?;
        let hello = "cmd=init pmi_version=1 pmi_subversion=1";
        let answer = exchange(&mut stream, hello)?;
        let line = expect(&answer, "response_to_init")?;
        if line.number("rc").unwrap_or(0) != 0 || line.number("pmi_version") != Some(1) {
            return Self::start_second(stream);
        }
        let answer = exchange(&mut stream, "cmd=get_my_kvsname")?;
        let space = expect(&answer, "my_kvsname")?.value("kvsname").unwrap_or_default().into();
        Ok(Self { stream, protocol: Protocol::One { space }, place })
    }

    /// As [`start`](Self::start), but asks for PMI-2 at once.
    fn start_second(mut stream: BufReader<File>) -> Result<Self, LaunchError> {
        let answer = exchange(&mut stream, "cmd=init pmi_version=2 pmi_subversion=0")?;
        let line = expect(&answer, "response_to_init")?;
        if line.number("rc").unwrap_or(0) != 0 {
            return Err(LaunchError::Refused { call: "init", why: shown(answer.as_bytes()) });
        }
        let job = std::env::var("PMI_JOBID").unwrap_or_else(|_| "0".into());
        let rank = std::env::var("PMI_RANK").unwrap_or_else(|_| "0".into());
        let mut client =
            Self { stream, protocol: Protocol::Two { job: String::new() }, place: None };
        let pairs = [("pmijobid", &job[..]), ("pmirank", &rank), ("threaded", "FALSE")];
        let answer = client.call("fullinit", &pairs)?;
        let frame = Frame::parse(&answer).map_err(|_| bad(&answer, "a frame of PMI-2"))?;
        let number = |key| frame.value(key).and_then(|value| value.parse().ok());
        client.place = number("rank").zip(number("size"));
        let answer = client.call("job-getid", &[])?;
        let frame = Frame::parse(&answer).map_err(|_| bad(&answer, "a frame of PMI-2"))?;
        let job = frame.value("jobid").unwrap_or_default().into();
        client.protocol = Protocol::Two { job };
        Ok(client)
    }

    /// Puts a value that contains no blank, `;` or line feed.
    pub(crate) fn put(&mut self, key: &str, value: &str) -> Result<(), LaunchError> {
        match &self.protocol {
            Protocol::One { space } => {
                let ask = format!("cmd=put kvsname={space} key={key} value={value}");
                let answer = exchange(&mut self.stream, &ask)?;
                accepted(&expect(&answer, "put_result")?, "put")
            }
            Protocol::Two { .. } => {
                self.call("kvs-put", &[("key", key), ("value", value)]).map(drop)
            }
        }
    }

    /// Makes what all have put visible to all, and waits for all.
    pub(crate) fn fence(&mut self) -> Result<(), LaunchError> {
        match &self.protocol {
            Protocol::One { .. } => {
                let answer = exchange(&mut self.stream, "cmd=barrier_in")?;
                accepted(&expect(&answer, "barrier_out")?, "barrier")
            }
            Protocol::Two { .. } => self.call("kvs-fence", &[]).map(drop),
        }
    }

    /// A value, if somebody has put it.
    pub(crate) fn get(&mut self, key: &str) -> Result<Option<String>, LaunchError> {
        match &self.protocol {
            Protocol::One { space } => {
                let ask = format!("cmd=get kvsname={space} key={key}");
                let answer = exchange(&mut self.stream, &ask)?;
                let line = expect(&answer, "get_result")?;
                let found = line.number("rc").unwrap_or(0) == 0;
                Ok(line.value("value").filter(|_| found).map(str::to_owned))
            }
            Protocol::Two { job } => {
                let job = job.clone();
                let answer =
                    self.call("kvs-get", &[("jobid", &job), ("srcid", "-1"), ("key", key)])?;
                let frame = Frame::parse(&answer).map_err(|_| bad(&answer, "a frame of PMI-2"))?;
                let found = frame.value("found") == Some("TRUE");
                Ok(frame.value("value").filter(|_| found).map(str::to_owned))
            }
        }
    }

    /// Asks the launcher to end the job. There is no answer.
    pub(crate) fn abort(&mut self, code: i32, message: &str) {
        let words: String = message
            .chars()
            .take(300)
            .map(|c| if c.is_ascii_graphic() && c != ';' { c } else { '_' })
            .collect();
        let bytes = match &self.protocol {
            Protocol::One { .. } => {
                format!("cmd=abort exitcode={code} error_msg={words}\n").into_bytes()
            }
            Protocol::Two { .. } => Frame::emit("abort", &[("isworld", "TRUE"), ("msg", &words)]),
        };
        // The process ends in any case.
        let _ = self.stream.get_mut().write_all(&bytes);
    }

    /// Tells the launcher that this rank is about to end.
    pub(crate) fn finalize(&mut self) -> Result<(), LaunchError> {
        match &self.protocol {
            Protocol::One { .. } => {
                let answer = exchange(&mut self.stream, "cmd=finalize")?;
                expect(&answer, "finalize_ack").map(drop)
            }
            Protocol::Two { .. } => self.call("finalize", &[]).map(drop),
        }
    }

    /// A call of PMI-2 and its answer, which has succeeded.
    fn call(
        &mut self,
        command: &'static str,
        pairs: &[(&str, &str)],
    ) -> Result<Vec<u8>, LaunchError> {
        self.stream.get_mut().write_all(&Frame::emit(command, pairs))?;
        let mut header = [0; FRAME_HEADER];
        self.stream.read_exact(&mut header)?;
        let len = Frame::length(&header).map_err(|_| bad(&header, "a length of PMI-2"))?;
        if len > MAX_MESSAGE {
            return Err(bad(&header, "a message of at most 64 KB"));
        }
        let mut answer = vec![0; len];
        self.stream.read_exact(&mut answer)?;
        let frame = Frame::parse(&answer).map_err(|_| bad(&answer, "a frame of PMI-2"))?;
        if frame.command().strip_suffix("-response") != Some(command) {
            return Err(bad(&answer, "the response to the call"));
        }
        let failed = frame.value("rc").is_some_and(|rc| rc != "0");
        if failed && command != "kvs-get" {
            return Err(LaunchError::Refused { call: command, why: shown(&answer) });
        }
        Ok(answer)
    }
}

/// The start of a connection to `PMI_PORT`: says which process this is, and hears its place.
fn introduce(stream: &mut BufReader<File>, id: &str) -> Result<(u32, u32), LaunchError> {
    let answer = exchange(stream, &format!("cmd=initack pmiid={id}"))?;
    expect(&answer, "initack")?;
    let (mut size, mut rank) = (None, None);
    for _ in 0..3 {
        let answer = receive(stream)?;
        let line = expect(&answer, "set")?;
        let number = |key| line.number(key).and_then(|number| u32::try_from(number).ok());
        (size, rank) = (size.or(number("size")), rank.or(number("rank")));
    }
    rank.zip(size).ok_or_else(|| bad(answer.as_bytes(), "rank and size"))
}

/// Sends a line, and waits for one.
fn exchange(stream: &mut BufReader<File>, line: &str) -> Result<String, LaunchError> {
    stream.get_mut().write_all(format!("{line}\n").as_bytes())?;
    receive(stream)
}

fn receive(stream: &mut BufReader<File>) -> Result<String, LaunchError> {
    let mut bytes = Vec::new();
    stream.take(MAX_MESSAGE as u64).read_until(b'\n', &mut bytes)?;
    if bytes.last() != Some(&b'\n') {
        return Err(std::io::Error::from(std::io::ErrorKind::UnexpectedEof).into());
    }
    String::from_utf8(bytes).map_err(|error| bad(error.as_bytes(), "a line of text"))
}

fn expect<'a>(answer: &'a str, command: &'static str) -> Result<Line<'a>, LaunchError> {
    match Line::parse(answer.as_bytes()) {
        Ok(line) if line.command() == command => Ok(line),
        _ => Err(bad(answer.as_bytes(), command)),
    }
}

fn accepted(line: &Line<'_>, call: &'static str) -> Result<(), LaunchError> {
    match line.number("rc").unwrap_or(0) {
        0 => Ok(()),
        _ => {
            Err(LaunchError::Refused { call, why: line.value("msg").unwrap_or("no reason").into() })
        }
    }
}

fn shown(bytes: &[u8]) -> String {
    String::from_utf8_lossy(&bytes[..bytes.len().min(200)]).into_owned()
}

fn bad(got: &[u8], expected: &'static str) -> LaunchError {
    LaunchError::Protocol { got: shown(got), expected }
}

#[cfg(test)]
mod tests {
    use std::os::fd::OwnedFd;
    use std::os::unix::net::UnixStream;
    use std::thread;

    use super::*;

    /// A launcher that refuses PMI-1 and answers PMI-2 by a script of (command, rest of the answer).
    fn second(mut end: UnixStream, script: Vec<(&'static str, &'static str)>) {
        let mut reader = BufReader::new(end.try_clone().unwrap());
        for rc in [-1, 0] {
            let mut line = String::new();
            reader.read_line(&mut line).unwrap();
            writeln!(end, "cmd=response_to_init rc={rc} pmi_version=2 pmi_subversion=0").unwrap();
        }
        for (command, answer) in script {
            let mut header = [0; FRAME_HEADER];
            reader.read_exact(&mut header).unwrap();
            let mut body = vec![0; Frame::length(&header).unwrap()];
            reader.read_exact(&mut body).unwrap();
            assert_eq!(Frame::parse(&body).unwrap().command(), command);
            let body = format!("cmd={command}-response;{answer}");
            write!(end, "{:<6}{body}", body.len()).unwrap();
        }
    }

    #[test]
    fn the_second_version_serves_where_the_first_is_refused() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let script = vec![
            ("fullinit", "rc=0;rank=3;size=4;appnum=0;"),
            ("job-getid", "jobid=job7;rc=0;"),
            ("kvs-put", "rc=0;"),
            ("kvs-fence", "rc=0;"),
            ("kvs-get", "flag=TRUE;found=TRUE;value=abc;rc=0;"),
            ("kvs-get", "found=FALSE;rc=0;"),
            ("finalize", "rc=0;"),
        ];
        let launcher = thread::spawn(move || second(theirs, script));
        let mut client = Client::start(File::from(OwnedFd::from(ours)), None).unwrap();
        assert_eq!(client.place, Some((3, 4)));
        client.put("k", "abc").unwrap();
        client.fence().unwrap();
        assert_eq!(client.get("k").unwrap().as_deref(), Some("abc"));
        assert_eq!(client.get("none").unwrap(), None);
        client.finalize().unwrap();
        launcher.join().unwrap();
    }

    #[test]
    fn a_launcher_that_ends_is_an_error() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        drop(theirs);
        assert!(Client::start(File::from(OwnedFd::from(ours)), None).is_err());
    }
}
