//! Where in a program something was done.

use std::backtrace::Backtrace;
use std::fmt;
use std::sync::Arc;

/// Most frames that are shown.
const FRAMES: usize = 12;
/// What the frames of this library and of those below it are known by.
const OURS: [&str; 6] = ["quipu_", "std::", "core::", "<core::", "rust_begin_unwind", "__rust_"];

/// The calls that led to something. Names are looked up only when it is shown.
#[derive(Clone)]
pub struct Trace(Arc<Backtrace>);

impl Trace {
    /// The calls that led here.
    #[must_use]
    pub fn here() -> Self {
        Self(Arc::new(Backtrace::force_capture()))
    }

    /// The frames of the program, the innermost first, each with its place in the source where that is
    /// known.
    #[must_use]
    pub fn frames(&self) -> Vec<String> {
        let text = self.0.to_string();
        let mut frames: Vec<String> = Vec::new();
        let mut skipping = false;
        for line in text.lines() {
            let line = line.trim();
            if let Some(place) = line.strip_prefix("at ") {
                if let Some(frame) = frames.last_mut().filter(|_| !skipping) {
                    *frame = format!("{frame} at {place}");
                }
                continue;
            }
            let name = line.split_once(": ").map_or(line, |(_, name)| name);
            skipping = OURS.iter().any(|ours| name.starts_with(ours));
            if !skipping && frames.len() < FRAMES {
                frames.push(name.to_owned());
            }
        }
        frames
    }
}

impl fmt::Debug for Trace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Trace")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_trace_leaves_out_what_is_not_the_programs() {
        let frames = Trace::here().frames();
        assert!(frames.len() <= FRAMES);
        assert!(frames.iter().all(|frame| !frame.starts_with("quipu_")), "{frames:?}");
    }
}
