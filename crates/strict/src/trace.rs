//! Where in a program something was done.

use std::backtrace::Backtrace;
use std::fmt;
use std::sync::Arc;

use crate::objects::Objects;

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
/// What stands for the name of a function that has none.
const UNKNOWN: &str = "<unknown>";
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

    /// The innermost frames of the program, the last call first, each with its place in the source where that
    /// is known, and with the library that it is of.
    #[must_use]
    pub fn frames(&self) -> Vec<String> {
        let mut frames = self.all_frames();
        frames.truncate(FRAMES);
        frames
    }

    /// All of them.
    pub(crate) fn all_frames(&self) -> Vec<String> {
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap_or_default();
        shown(&self.0.to_string(), &format!("{:#}", self.0), &Objects::parse(&maps))
    }
}

/// A line of a backtrace behind its number.
fn frame(line: &str) -> &str {
    line.split_once(": ").map_or(line, |(_, frame)| frame)
}

/// The frames of a backtrace that are the program's, with the calls of verbs that it made. `full` is the same
/// with addresses; it may have more of the innermost frames, and ends of the stack at address 0.
fn shown(text: &str, full: &str, objects: &Objects<'_>) -> Vec<String> {
    let mut frames: Vec<(&str, Option<&str>)> = Vec::new();
    for line in text.lines().map(str::trim) {
        match (line.strip_prefix("at "), frames.last_mut()) {
            (Some(place), Some((_, of_last))) => *of_last = Some(place),
            (Some(_), None) => {}
            (None, _) => frames.push((frame(line), None)),
        }
    }
    let addresses: Vec<_> = full
        .lines()
        .map(str::trim)
        .filter(|line| !line.starts_with("at "))
        .map(|line| frame(line).trim_start().strip_prefix("0x")?.split(' ').next())
        .map(|hex| u64::from_str_radix(hex?, 16).ok())
        .filter(|&address| address != Some(0))
        .collect();
    let more = addresses.len().saturating_sub(frames.len());
    let addresses = addresses.into_iter().skip(more).chain(std::iter::repeat(None));
    let program = frames.into_iter().zip(addresses).filter(|((name, at), _)| !is_ours(name, *at));
    let text = |((name, place), address): ((&str, Option<&str>), Option<u64>)| {
        let object = address.and_then(|address| objects.of(address));
        if let Some((object, offset)) = object.filter(|_| name == UNKNOWN) {
            return format!("{object}+{offset:#x}");
        }
        let at = place.map(|place| format!(" at {place}")).unwrap_or_default();
        let library = object.filter(|(object, _)| object.contains(".so"));
        let of = library.map(|(object, _)| format!(" in {object}")).unwrap_or_default();
        format!("{name}{at}{of}")
    };
    program.map(text).collect()
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
        assert_eq!(shown(text, text, &Objects::parse("")), wanted);
    }

    #[test]
    fn frames_without_lines_are_told_with_their_library() {
        let maps =
            "1000-2000 r-xp 0 fe:00 12 /usr/bin/prog\n8000-9000 r-xp 0 fe:00 13 /lib/libx.so.1\n";
        let text = "   0: send\n   1: <unknown>\n   2: main\n             at ./main.c:1:2\n   3: <unknown>\n   4: <unknown>\n";
        let full = "   0: 0x8004 - hidden\n   1: 0x8010 - send::h12\n   2: 0x8020 - <unknown>\n   \
            3: 0x1010 - main\n   4: 0x1020 - <unknown>\n   5: 0x5000 - <unknown>\n   6: 0x0 - <unknown>\n";
        let wanted = [
            "send in libx.so.1",
            "libx.so.1+0x20",
            "main at ./main.c:1:2",
            "prog+0x20",
            "<unknown>",
        ];
        assert_eq!(shown(text, full, &Objects::parse(maps)), wanted);
    }

    #[test]
    fn a_trace_leaves_out_what_is_not_the_programs() {
        let frames = Trace::here().frames();
        assert!(frames.len() <= FRAMES);
        assert!(frames.iter().all(|frame| !frame.starts_with("quipu_")), "{frames:?}");
    }
}
