//! Lines of PMI-1, frames of PMI-2.

use std::fmt::Write as _;

/// Why bytes are no message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum WireError {
    /// Not UTF-8.
    #[error("a message is not text")]
    NotText,
    /// No `cmd=` in it.
    #[error("a message has no command")]
    NoCommand,
    /// Longer than the receiver allows.
    #[error("a message is longer than {0} bytes")]
    TooLong(usize),
    /// The six characters in front of a frame are no number.
    #[error("a frame has no length in front of it")]
    NoLength,
}

/// One line of PMI-1: words of the form `key=value`, the first of which is usually `cmd=NAME`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Line<'a>(&'a str);

impl<'a> Line<'a> {
    /// A line, without its line feed.
    ///
    /// # Errors
    /// If it is not text, or names no command.
    pub fn parse(bytes: &'a [u8]) -> Result<Self, WireError> {
        let text = std::str::from_utf8(bytes).map_err(|_| WireError::NotText)?;
        let line = Self(text.trim_end_matches(['\r', '\n']));
        line.value("cmd").ok_or(WireError::NoCommand)?;
        Ok(line)
    }

    /// The name of the command.
    #[must_use]
    pub fn command(&self) -> &'a str {
        self.value("cmd").unwrap_or_default()
    }

    /// The value of a key: what follows the first `=`, up to the next blank.
    #[must_use]
    pub fn value(&self, key: &str) -> Option<&'a str> {
        let words = self.0.split_ascii_whitespace();
        let mut pairs = words.filter_map(|word| word.split_once('='));
        pairs.find(|(name, _)| *name == key).map(|(_, value)| value)
    }

    /// A value that is a number.
    #[must_use]
    pub fn number(&self, key: &str) -> Option<i64> {
        self.value(key)?.parse().ok()
    }
}

/// One message of PMI-2: `cmd=NAME;key=value;...;`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Frame<'a>(&'a str);

/// Characters of the length in front of a frame.
pub(crate) const FRAME_HEADER: usize = 6;

impl<'a> Frame<'a> {
    /// The length in bytes of the frame that follows these six characters.
    ///
    /// # Errors
    /// If they are no number with blanks around it, or there are fewer.
    pub fn length(header: &[u8]) -> Result<usize, WireError> {
        let text = header.get(..FRAME_HEADER).ok_or(WireError::NoLength)?;
        let text = std::str::from_utf8(text).map_err(|_| WireError::NoLength)?.trim();
        if !text.bytes().all(|c| c.is_ascii_digit()) {
            return Err(WireError::NoLength);
        }
        text.parse().map_err(|_| WireError::NoLength)
    }

    /// A frame, without its length.
    ///
    /// # Errors
    /// If it is not text, or names no command.
    pub fn parse(bytes: &'a [u8]) -> Result<Self, WireError> {
        let text = std::str::from_utf8(bytes).map_err(|_| WireError::NotText)?;
        let frame = Self(text);
        frame.value("cmd").ok_or(WireError::NoCommand)?;
        Ok(frame)
    }

    /// The name of the command.
    #[must_use]
    pub fn command(&self) -> &'a str {
        self.value("cmd").unwrap_or_default()
    }

    /// The value of a key.
    #[must_use]
    pub fn value(&self, key: &str) -> Option<&'a str> {
        let mut pairs = self.0.split(';').filter_map(|pair| pair.split_once('='));
        pairs.find(|(name, _)| *name == key).map(|(_, value)| value)
    }

    /// The bytes of a message: length, command, keys and values.
    #[must_use]
    pub fn emit(command: &str, pairs: &[(&str, &str)]) -> Vec<u8> {
        let mut body = format!("cmd={command};");
        for (key, value) in pairs {
            let _ = write!(body, "{key}={value};");
        }
        format!("{:<6}{body}", body.len()).into_bytes()
    }
}

/// Cuts a stream into lines, of bounded length.
#[derive(Debug)]
pub struct LineBuffer {
    bytes: Vec<u8>,
    limit: usize,
}

impl LineBuffer {
    /// An empty one, for lines of at most `limit` bytes.
    #[must_use]
    pub fn new(limit: usize) -> Self {
        Self { bytes: Vec::new(), limit }
    }

    /// Appends bytes of the stream, and hands out each line that is complete, without its line feed.
    ///
    /// # Errors
    /// If a line is longer than the limit: then the stream cannot be read any further.
    pub fn push(&mut self, bytes: &[u8], mut line: impl FnMut(&[u8])) -> Result<(), WireError> {
        let mut rest = bytes;
        while let Some(end) = rest.iter().position(|byte| *byte == b'\n') {
            let (head, tail) = rest.split_at(end);
            rest = &tail[1..];
            if self.bytes.len() + head.len() > self.limit {
                return Err(WireError::TooLong(self.limit));
            }
            if self.bytes.is_empty() {
                line(head);
            } else {
                self.bytes.extend_from_slice(head);
                line(&self.bytes);
                self.bytes.clear();
            }
        }
        if self.bytes.len() + rest.len() > self.limit {
            return Err(WireError::TooLong(self.limit));
        }
        self.bytes.extend_from_slice(rest);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_found_in_any_order() {
        let line = Line::parse(b"rc=0 cmd=get_result value=a=b;c\n").unwrap();
        assert_eq!((line.command(), line.number("rc")), ("get_result", Some(0)));
        assert_eq!((line.value("value"), line.value("msg")), (Some("a=b;c"), None));
        assert_eq!(Line::parse(b"rc=0"), Err(WireError::NoCommand));
        assert_eq!(Line::parse(b"cmd=\xff"), Err(WireError::NotText));
    }

    #[test]
    fn frames_have_a_length_of_six_characters() {
        let bytes = Frame::emit("kvs-get", &[("jobid", "7"), ("key", "k")]);
        assert_eq!(bytes, b"26    cmd=kvs-get;jobid=7;key=k;");
        assert_eq!(Frame::length(&bytes), Ok(26));
        let frame = Frame::parse(&bytes[6..]).unwrap();
        assert_eq!((frame.command(), frame.value("key")), ("kvs-get", Some("k")));
        assert_eq!(Frame::length(b"-1    "), Err(WireError::NoLength));
        assert_eq!(Frame::length(b"      "), Err(WireError::NoLength));
        assert_eq!(Frame::length(b"12"), Err(WireError::NoLength));
    }

    #[test]
    fn lines_come_out_whole_however_they_come_in() {
        let text = b"cmd=a x=1\ncmd=b\n\ncmd=c";
        for step in 1..text.len() {
            let (mut buffer, mut lines) = (LineBuffer::new(16), Vec::new());
            for piece in text.chunks(step) {
                buffer.push(piece, |line| lines.push(line.to_vec())).unwrap();
            }
            assert_eq!(lines, [b"cmd=a x=1".to_vec(), b"cmd=b".to_vec(), b"".to_vec()]);
        }
        let mut buffer = LineBuffer::new(4);
        assert_eq!(buffer.push(b"12345", |_| ()), Err(WireError::TooLong(4)));
    }
}
