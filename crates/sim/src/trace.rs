//! What a run leaves behind: a hash of all that happened, and its last lines for people.

use std::collections::VecDeque;

use crate::rng::mix;

/// The trace of a run.
pub struct Trace {
    hash: u64,
    lines: VecDeque<String>,
    keep: usize,
}

impl Trace {
    /// A trace that keeps the last `keep` lines; with 0, lines cost nothing.
    #[must_use]
    pub fn new(keep: usize) -> Self {
        Self { hash: 0, lines: VecDeque::new(), keep }
    }

    /// Adds words to the hash.
    pub fn note(&mut self, words: &[u64]) {
        for &word in words {
            self.hash = mix(self.hash.rotate_left(7), word);
        }
    }

    /// Adds bytes to the hash.
    pub fn note_bytes(&mut self, bytes: &[u8]) {
        self.note(&[bytes.len() as u64]);
        for chunk in bytes.chunks(8) {
            let mut word = [0; 8];
            word[..chunk.len()].copy_from_slice(chunk);
            self.hash = mix(self.hash.rotate_left(7), u64::from_le_bytes(word));
        }
    }

    /// Keeps a line, if lines are kept.
    pub fn line(&mut self, now: u64, line: impl FnOnce() -> String) {
        if self.keep == 0 {
            return;
        }
        if self.lines.len() == self.keep {
            self.lines.pop_front();
        }
        self.lines.push_back(format!("{:>12.3} us  {}", now as f64 / 1e3, line()));
    }

    /// The hash so far.
    #[must_use]
    pub fn hash(&self) -> u64 {
        self.hash
    }

    /// The lines kept, oldest first.
    #[must_use]
    pub fn into_lines(self) -> Vec<String> {
        self.lines.into()
    }
}
