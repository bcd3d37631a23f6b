//! Windows into a peer's memory: ranges of it that this process has mapped, since the peer offers them
//! ([`quipu_mem::SharedPages`]).

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use libc::pid_t;
use quipu_mem::{Segment, SharedPages, SharedPagesReader};

use super::segment;
use crate::sys;

/// Address space that the windows into one peer may take together.
const MAPPED_MAX: u64 = 1 << 40;

/// The least that can be mapped.
const PAGE: u64 = 4096;

/// What of a peer's memory is mapped here.
#[derive(Debug)]
pub(super) struct Windows {
    list: SharedPagesReader,
    pid: pid_t,
    alive: Arc<AtomicBool>,
    /// The peer's process, once it was asked for a file.
    process: Option<OwnedFd>,
    windows: Vec<Window>,
    /// The one that was used last.
    last: usize,
}

#[derive(Debug)]
struct Window {
    range: SharedPages,
    view: View,
}

/// How far a window is.
#[derive(Debug)]
enum View {
    /// Nobody has looked through it.
    Unopened,
    Open(Segment),
    /// It cannot be mapped; the kernel copies.
    Refused,
}

/// Some bytes of the peer's memory.
pub(super) struct Part<'a> {
    /// How many of those asked for.
    pub(super) len: u64,
    /// Where they are mapped, if they are: a segment and the offset in it.
    pub(super) view: Option<(&'a Segment, usize)>,
}

impl Window {
    /// The offset of an address in the window.
    #[inline]
    fn offset(&self, addr: u64) -> Option<u64> {
        let offset = addr.wrapping_sub(self.range.addr);
        (offset < self.range.len).then_some(offset)
    }
}

/// Whether a range is one of whole pages, which bounds how many pieces an access can fall into.
fn is_plausible(range: &SharedPages) -> bool {
    let whole = range.addr.is_multiple_of(PAGE) && range.len.is_multiple_of(PAGE);
    whole && range.len > 0 && range.addr.checked_add(range.len).is_some()
}

impl Windows {
    /// Windows into the memory of `pid`, which lists them; as long as `alive` says so.
    pub(super) fn new(list: SharedPagesReader, pid: pid_t, alive: Arc<AtomicBool>) -> Self {
        Self { list, pid, alive, process: None, windows: Vec::new(), last: 0 }
    }

    /// Whether there is none now.
    #[inline]
    pub(super) fn is_empty(&mut self) -> bool {
        self.keep_up();
        self.windows.is_empty()
    }

    /// Whether any of the bytes lie in a window now.
    #[inline]
    pub(super) fn meet(&mut self, ranges: &[(u64, u64)]) -> bool {
        self.keep_up();
        let meets = |window: &Window| {
            let end = window.range.addr + window.range.len;
            ranges
                .iter()
                .any(|&(addr, len)| addr < end && addr.saturating_add(len) > window.range.addr)
        };
        self.windows.get(self.last).is_some_and(meets) || self.windows.iter().any(meets)
    }

    /// The first of `len` bytes at `addr`: as many as are mapped in one piece, or are not mapped.
    #[inline]
    pub(super) fn part(&mut self, addr: u64, len: u64) -> Part<'_> {
        let used = self.windows.get(self.last).and_then(|window| window.offset(addr));
        if used.is_none() {
            self.last = self
                .windows
                .iter()
                .position(|window| window.offset(addr).is_some())
                .unwrap_or(usize::MAX);
        }
        let last = self.last;
        let Some(offset) = self.windows.get(last).and_then(|window| window.offset(addr)) else {
            return Part { len: len.min(self.gap(addr)), view: None };
        };
        if let View::Unopened = self.windows[last].view {
            self.open(last);
        }
        let window = &self.windows[last];
        let view = match &window.view {
            View::Open(segment) => Some((segment, offset as usize)),
            View::Unopened | View::Refused => None,
        };
        Part { len: len.min(window.range.len - offset), view }
    }

    /// How far the next window is.
    fn gap(&self, addr: u64) -> u64 {
        let starts = self.windows.iter().map(|window| window.range.addr);
        starts.filter(|&start| start > addr).min().map_or(u64::MAX, |start| start - addr)
    }

    /// Takes note of what the peer lists now.
    #[inline]
    fn keep_up(&mut self) {
        if self.list.has_changed() {
            self.renew();
        }
    }

    /// Closes windows that are not listed any more, and learns of new ones.
    #[cold]
    fn renew(&mut self) {
        let mut listed = Vec::new();
        if !self.list.read(&mut listed) {
            // It is being written: the kernel copies this time, and finds the same bytes.
            self.windows.clear();
            return;
        }
        let mut before = std::mem::take(&mut self.windows);
        listed.retain(is_plausible);
        self.windows.extend(listed.into_iter().map(|range| {
            let known = before.iter().position(|window| window.range == range);
            known.map_or(Window { range, view: View::Unopened }, |known| before.swap_remove(known))
        }));
    }

    #[cold]
    fn open(&mut self, index: usize) {
        let is_open = |window: &&Window| matches!(window.view, View::Open(_));
        let mapped: u64 = self.windows.iter().filter(is_open).map(|window| window.range.len).sum();
        let range = self.windows[index].range;
        let opened = match range.len <= MAPPED_MAX - mapped {
            true => self.map(range),
            false => Err(io::Error::other("the peer shares more memory than can be mapped")),
        };
        self.windows[index].view = match opened {
            Ok(segment) => View::Open(segment),
            Err(error) => {
                tracing::debug!(%error, pid = self.pid, "pages of a peer are not mapped");
                View::Refused
            }
        };
    }

    fn map(&mut self, range: SharedPages) -> io::Result<Segment> {
        let process = match self.process.take() {
            Some(process) => process,
            None => sys::process(self.pid)?,
        };
        // Else the number may be another's by now.
        if !self.alive.load(Ordering::Acquire) {
            return Err(io::ErrorKind::NotConnected.into());
        }
        let process = self.process.insert(process);
        let file = sys::descriptor_of(process, range.fd)?;
        let len = usize::try_from(range.len).map_err(io::Error::other)?;
        segment::attach_pages(&file, len, range.inode)
    }
}

#[cfg(test)]
mod tests;
