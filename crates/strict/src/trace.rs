//! Where in a program something was done.

use std::backtrace::Backtrace;
use std::fmt;
use std::sync::Arc;

/// Most frames that are shown.
const FRAMES: usize = 12;
/// What the frames of this library and of those below it are known by: where names are whole, by these,
const OURS: [&str; 6] = ["quipu_", "std::", "core::", "<core::", "rust_begin_unwind", "__rust_"];
/// and where a build has no more than tables of lines, by where their source was, which is behind one of
/// these.
const OUR_SOURCES: [&str; 10] = [
    "/rustc/",
    "/crates/strict/src/",
    "/crates/host/src/",
    "/crates/nic/src/",
    "/crates/cabi/src/",
    "/abi/engine/src/",
    "/abi/trace/src/",
    "/abi/facade/src/",
    "/abi/ibverbs/src/",
    "/abi/rdmacm/src/",
];
/// Names of what a program calls, which are shown though they are ours.
const CALLED: [&str; 2] = ["ibv_", "rdma_"];

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
        shown(&self.0.to_string())
    }
}

/// The frames of a backtrace that are the program's, with the calls of verbs that it made.
fn shown(text: &str) -> Vec<String> {
    let mut frames: Vec<(&str, Option<&str>)> = Vec::new();
    for line in text.lines().map(str::trim) {
        match (line.strip_prefix("at "), frames.last_mut()) {
            (Some(place), Some((_, of_last))) => *of_last = Some(place),
            (Some(_), None) => {}
            (None, _) => frames.push((line.split_once(": ").map_or(line, |(_, name)| name), None)),
        }
    }
    let program = frames.into_iter().filter(|(name, place)| !is_ours(name, *place));
    let text = |(name, place): (&str, Option<&str>)| match place {
        Some(place) => format!("{name} at {place}"),
        None => name.to_owned(),
    };
    program.take(FRAMES).map(text).collect()
}

fn is_ours(name: &str, place: Option<&str>) -> bool {
    let from = |place: &str| OUR_SOURCES.iter().any(|source| place.contains(source));
    let called = CALLED.iter().any(|prefix| name.starts_with(prefix));
    OURS.iter().any(|ours| name.starts_with(ours)) || (place.is_some_and(from) && !called)
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
    fn frames_are_told_by_name_or_by_source() {
        let text = "   0: here\n             at ./crates/strict/src/trace.rs:20:23\n   \
            1: {closure#0}\n             at /rustc/5980/library/core/src/panic.rs:1:2\n   \
            2: quipu_host::engine::Engine::dereg_mr\n   \
            3: ibv_dereg_mr\n             at /home/me/abi/trace/src/lib.rs:69:13\n   \
            4: clean_up\n             at ./client.c:98:2\n   \
            5: main\n";
        let wanted = [
            "ibv_dereg_mr at /home/me/abi/trace/src/lib.rs:69:13",
            "clean_up at ./client.c:98:2",
            "main",
        ];
        assert_eq!(shown(text), wanted);
    }

    #[test]
    fn a_trace_leaves_out_what_is_not_the_programs() {
        let frames = Trace::here().frames();
        assert!(frames.len() <= FRAMES);
        assert!(frames.iter().all(|frame| !frame.starts_with("quipu_")), "{frames:?}");
    }
}
