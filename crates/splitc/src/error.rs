//! Errors, with the user's file and line.

use std::fmt;

/// Why a program cannot be translated.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Error {
    /// The file, as the preprocessor names it.
    pub file: String,
    /// The line, from 1.
    pub line: u32,
    /// What is wrong.
    pub message: String,
}

impl Error {
    pub(crate) fn at(file: &str, line: u32, message: impl Into<String>) -> Self {
        Self { file: file.into(), line, message: message.into() }
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}: error: {}", self.file, self.line, self.message)
    }
}

impl std::error::Error for Error {}
