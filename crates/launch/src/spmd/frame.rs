//! Messages between the launcher and its process on another host, over that process's standard input
//! and output.
//!
//! A message is a length (4 bytes, little endian, of what follows), a kind (1 byte), a rank (4 bytes)
//! and the rest. Strings of a [`Start`] have their length (4 bytes) in front.

/// Longest message, in bytes.
const MAX_MESSAGE: usize = 4 << 20;
const HEADER: usize = 5;

/// Which output of a rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Stream {
    /// Standard output.
    Out,
    /// Standard error.
    Err,
}

/// The ranks to start on a host.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Start {
    /// The first of them.
    pub first: u32,
    /// How many.
    pub count: u32,
    /// Ranks of the whole job.
    pub size: u32,
    /// Working directory, as bytes of a path.
    pub directory: Vec<u8>,
    /// The program and its arguments.
    pub program: Vec<Vec<u8>>,
    /// Variables to set: names and values.
    pub variables: Vec<(Vec<u8>, Vec<u8>)>,
}

/// A message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Message {
    /// To a host: start these ranks.
    Start(Start),
    /// Bytes of PMI, from a rank or to it.
    Pmi {
        /// Which rank.
        rank: u32,
        /// The bytes.
        bytes: Vec<u8>,
    },
    /// To a host: send a signal to all its ranks.
    Signal(i32),
    /// What a rank has written.
    Output {
        /// Which rank.
        rank: u32,
        /// Where to.
        stream: Stream,
        /// The bytes.
        bytes: Vec<u8>,
    },
    /// A rank has ended, with this status as waitpid(2) gives it.
    Exit {
        /// Which rank.
        rank: u32,
        /// The status.
        status: i32,
    },
    /// A rank could not be started.
    NotStarted {
        /// Which rank.
        rank: u32,
        /// The exit code to end with.
        code: u8,
        /// Why.
        why: String,
    },
}

/// Why bytes are no message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FrameError {
    /// Longer than 4 MB.
    #[error("a message is longer than 4 MB")]
    TooLong,
    /// Not what its kind demands.
    #[error("a message of kind {0} is malformed")]
    Malformed(u8),
}

impl Message {
    /// The bytes of the message.
    #[must_use]
    pub fn emit(&self) -> Vec<u8> {
        let (kind, rank, rest) = match self {
            Self::Start(start) => (1, start.first, start.emit()),
            Self::Pmi { rank, bytes } => (2, *rank, bytes.clone()),
            Self::Signal(signal) => (3, 0, signal.to_le_bytes().into()),
            Self::Output { rank, stream: Stream::Out, bytes } => (4, *rank, bytes.clone()),
            Self::Output { rank, stream: Stream::Err, bytes } => (5, *rank, bytes.clone()),
            Self::Exit { rank, status } => (6, *rank, status.to_le_bytes().into()),
            Self::NotStarted { rank, code, why } => (7, *rank, [&[*code], why.as_bytes()].concat()),
        };
        let mut bytes = Vec::with_capacity(4 + HEADER + rest.len());
        bytes.extend_from_slice(&((HEADER + rest.len()) as u32).to_le_bytes());
        bytes.push(kind);
        bytes.extend_from_slice(&rank.to_le_bytes());
        bytes.extend_from_slice(&rest);
        bytes
    }

    /// A message, without its length.
    ///
    /// # Errors
    /// If the bytes are none.
    pub fn parse(bytes: &[u8]) -> Result<Self, FrameError> {
        let kind = bytes.first().copied().unwrap_or_default();
        let bad = FrameError::Malformed(kind);
        let mut reader = Reader(bytes.get(1..).ok_or(bad)?);
        let rank = reader.number().ok_or(bad)?;
        let rest = reader.0;
        let number = || rest.try_into().map(i32::from_le_bytes).map_err(|_| bad);
        Ok(match kind {
            1 => Self::Start(Start::parse(rank, &mut reader).ok_or(bad)?),
            2 => Self::Pmi { rank, bytes: rest.into() },
            3 => Self::Signal(number()?),
            4 => Self::Output { rank, stream: Stream::Out, bytes: rest.into() },
            5 => Self::Output { rank, stream: Stream::Err, bytes: rest.into() },
            6 => Self::Exit { rank, status: number()? },
            7 => {
                let (code, why) = rest.split_first().ok_or(bad)?;
                let why = String::from_utf8_lossy(why).into_owned();
                Self::NotStarted { rank, code: *code, why }
            }
            _ => return Err(bad),
        })
    }
}

impl Start {
    fn emit(&self) -> Vec<u8> {
        let mut out = Vec::new();
        let number = |out: &mut Vec<u8>, value: usize| {
            out.extend_from_slice(&(value as u32).to_le_bytes());
        };
        let string = |out: &mut Vec<u8>, bytes: &[u8]| {
            number(out, bytes.len());
            out.extend_from_slice(bytes);
        };
        number(&mut out, self.count as usize);
        number(&mut out, self.size as usize);
        string(&mut out, &self.directory);
        number(&mut out, self.program.len());
        self.program.iter().for_each(|word| string(&mut out, word));
        number(&mut out, self.variables.len());
        for (name, value) in &self.variables {
            string(&mut out, name);
            string(&mut out, value);
        }
        out
    }

    fn parse(first: u32, reader: &mut Reader<'_>) -> Option<Self> {
        let (count, size) = (reader.number()?, reader.number()?);
        let directory = reader.string()?;
        let words = reader.number()?;
        let program = (0..words).map(|_| reader.string()).collect::<Option<Vec<_>>>()?;
        let names = reader.number()?;
        let pair = |reader: &mut Reader<'_>| Some((reader.string()?, reader.string()?));
        let variables = (0..names).map(|_| pair(reader)).collect::<Option<Vec<_>>>()?;
        let fits = first.checked_add(count).is_some_and(|end| end <= size);
        let start = Self { first, count, size, directory, program, variables };
        (fits && reader.0.is_empty() && !start.program.is_empty()).then_some(start)
    }
}

struct Reader<'a>(&'a [u8]);

impl Reader<'_> {
    fn number(&mut self) -> Option<u32> {
        let (number, rest) = self.0.split_first_chunk::<4>()?;
        self.0 = rest;
        Some(u32::from_le_bytes(*number))
    }

    fn string(&mut self) -> Option<Vec<u8>> {
        let len = self.number()? as usize;
        let (string, rest) = self.0.split_at_checked(len)?;
        self.0 = rest;
        Some(string.into())
    }
}

/// Cuts a stream into messages.
#[derive(Debug, Default)]
pub struct MessageBuffer(Vec<u8>);

impl MessageBuffer {
    /// Appends bytes of the stream.
    pub fn push(&mut self, bytes: &[u8]) {
        self.0.extend_from_slice(bytes);
    }

    /// The next message that is complete.
    ///
    /// # Errors
    /// If the bytes are no message: then the stream cannot be read any further.
    pub fn next_message(&mut self) -> Result<Option<Message>, FrameError> {
        let Some(len) = self.0.first_chunk::<4>() else { return Ok(None) };
        let len = u32::from_le_bytes(*len) as usize;
        if len > MAX_MESSAGE {
            return Err(FrameError::TooLong);
        }
        let Some(bytes) = self.0.get(4..4 + len) else { return Ok(None) };
        let message = Message::parse(bytes)?;
        self.0.drain(..4 + len);
        Ok(Some(message))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn samples() -> Vec<Message> {
        let start = Start {
            first: 2,
            count: 3,
            size: 8,
            directory: b"/tmp".into(),
            program: vec![b"./a.out".into(), b"-x".into()],
            variables: vec![(b"A".into(), b"".into())],
        };
        vec![
            Message::Start(start),
            Message::Pmi { rank: 7, bytes: b"cmd=init\n".into() },
            Message::Signal(15),
            Message::Output { rank: 0, stream: Stream::Out, bytes: b"x".into() },
            Message::Output { rank: 1, stream: Stream::Err, bytes: b"".into() },
            Message::Exit { rank: 1, status: 9 },
            Message::NotStarted { rank: 1, code: 127, why: "no such file".into() },
        ]
    }

    #[test]
    fn messages_survive_the_stream_in_any_pieces() {
        let bytes: Vec<u8> = samples().iter().flat_map(Message::emit).collect();
        for step in [1, 2, 3, 7, 64, bytes.len()] {
            let (mut buffer, mut got) = (MessageBuffer::default(), Vec::new());
            for piece in bytes.chunks(step) {
                buffer.push(piece);
                while let Some(message) = buffer.next_message().unwrap() {
                    got.push(message);
                }
            }
            assert_eq!(got, samples());
        }
    }

    #[test]
    fn every_message_that_is_cut_short_is_refused_or_another_one() {
        for message in samples() {
            let bytes = message.emit();
            for len in 4..bytes.len() {
                if let Ok(other) = Message::parse(&bytes[4..len]) {
                    assert_ne!(other, message);
                }
            }
        }
        let mut buffer = MessageBuffer::default();
        buffer.push(&[255; 8]);
        assert_eq!(buffer.next_message(), Err(FrameError::TooLong));
        assert_eq!(Message::parse(&[9, 0, 0, 0, 0]), Err(FrameError::Malformed(9)));
    }
}
