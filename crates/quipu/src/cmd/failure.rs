//! Errors for people: what, why, and what to do about it.

use std::fmt;
use std::process::ExitCode;

/// What a shell says of a program that SIGPIPE has ended.
const READER_GONE: u8 = 128 + 13;

/// The command could not do what it was asked to.
#[derive(Debug)]
pub(crate) struct Failure {
    what: String,
    why: String,
    remedy: String,
    code: u8,
}

impl Failure {
    /// A failure, with exit code 1.
    pub(crate) fn new(
        what: impl Into<String>,
        why: impl fmt::Display,
        remedy: impl Into<String>,
    ) -> Self {
        Self { what: what.into(), why: why.to_string(), remedy: remedy.into(), code: 1 }
    }

    /// The same with another exit code.
    pub(crate) fn with_code(mut self, code: u8) -> Self {
        self.code = code;
        self
    }

    /// The exit code.
    pub(crate) fn code(&self) -> ExitCode {
        ExitCode::from(self.code)
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.what.is_empty() {
            return Ok(());
        }
        writeln!(f, "quipu: {}: {}", self.what, self.why)?;
        if !self.remedy.is_empty() {
            writeln!(f, "quipu: {}", self.remedy)?;
        }
        Ok(())
    }
}

impl From<std::io::Error> for Failure {
    fn from(error: std::io::Error) -> Self {
        match error.kind() {
            // Anyone who reads has enough, as `head` has: nothing has failed for the user.
            std::io::ErrorKind::BrokenPipe => Self::new("", "", "").with_code(READER_GONE),
            _ => Self::new("cannot write the output", error, ""),
        }
    }
}
