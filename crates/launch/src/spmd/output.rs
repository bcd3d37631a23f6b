//! What ranks write, in whole lines with the rank in front.

use std::collections::BTreeMap;
use std::io::{self, Write};

use super::frame::Stream;

/// A line is written when it has so many bytes, even if it goes on.
const LONGEST_LINE: usize = 64 * 1024;

/// Puts the output of all ranks together, line by line.
#[derive(Debug)]
pub(crate) struct Output {
    label: bool,
    begun: BTreeMap<(u32, Stream), Vec<u8>>,
}

impl Output {
    pub(crate) fn new(label: bool) -> Self {
        Self { label, begun: BTreeMap::new() }
    }

    /// Writes the lines that these bytes complete.
    pub(crate) fn write(&mut self, rank: u32, stream: Stream, bytes: &[u8]) -> io::Result<()> {
        match stream {
            Stream::Out => self.write_to(&mut io::stdout().lock(), rank, stream, bytes),
            Stream::Err => self.write_to(&mut io::stderr().lock(), rank, stream, bytes),
        }
    }

    fn write_to(
        &mut self,
        to: &mut dyn Write,
        rank: u32,
        stream: Stream,
        bytes: &[u8],
    ) -> io::Result<()> {
        let begun = self.begun.entry((rank, stream)).or_default();
        begun.extend_from_slice(bytes);
        let mut text = Vec::new();
        let mut done = 0;
        while let Some(end) = begun[done..].iter().position(|byte| *byte == b'\n') {
            Self::line(&mut text, self.label.then_some(rank), &begun[done..=done + end]);
            done += end + 1;
        }
        if begun.len() - done >= LONGEST_LINE {
            Self::line(&mut text, self.label.then_some(rank), &begun[done..]);
            if self.label {
                text.push(b'\n');
            }
            done = begun.len();
        }
        begun.drain(..done);
        to.write_all(&text)?;
        to.flush()
    }

    fn line(text: &mut Vec<u8>, rank: Option<u32>, line: &[u8]) {
        if let Some(rank) = rank {
            text.extend_from_slice(format!("[{rank}] ").as_bytes());
        }
        text.extend_from_slice(line);
    }

    /// Writes lines that were begun and not ended.
    pub(crate) fn finish(&mut self) -> io::Result<()> {
        for ((rank, stream), mut line) in std::mem::take(&mut self.begun) {
            if line.is_empty() {
                continue;
            }
            if self.label {
                line.push(b'\n');
            }
            let mut text = Vec::new();
            Self::line(&mut text, self.label.then_some(rank), &line);
            match stream {
                Stream::Out => io::stdout().write_all(&text)?,
                Stream::Err => io::stderr().write_all(&text)?,
            }
        }
        io::stdout().flush()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_whole_and_have_their_rank() {
        let (mut output, mut text) = (Output::new(true), Vec::new());
        output.write_to(&mut text, 1, Stream::Out, b"on").unwrap();
        output.write_to(&mut text, 0, Stream::Out, b"a\nb").unwrap();
        output.write_to(&mut text, 1, Stream::Out, b"e\n\n").unwrap();
        assert_eq!(text, b"[0] a\n[1] one\n[1] \n");
        assert_eq!(output.begun[&(0, Stream::Out)], b"b");
    }

    #[test]
    fn without_ranks_bytes_are_as_they_were() {
        let (mut output, mut text) = (Output::new(false), Vec::new());
        output.write_to(&mut text, 1, Stream::Out, b"a\r\nb\n").unwrap();
        output.write_to(&mut text, 1, Stream::Out, &[b'x'; LONGEST_LINE]).unwrap();
        assert_eq!(text.len(), 5 + LONGEST_LINE);
    }
}
