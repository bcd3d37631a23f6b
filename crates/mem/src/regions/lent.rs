//! Memory that requests have lent to the adapter to write to: whether anybody else changes it meanwhile.
//!
//! Once a table keeps that in mind, its regions are of length zero in it, as those whose pages may be absent,
//! so that every access leaves the short way. Whoever asks for memory to write to is about to do so: what is
//! lent there is compared with what it was before; and when the accesses that were given out are over, it has
//! to stay as it is then. So nobody has to say what the adapter writes, for whom, and why.
//!
//! Where requests have lent the same bytes, no one of them can say what they are to be: those are left alone.

use core::cell::RefCell;
use core::ops::Range;
use core::sync::atomic::{AtomicU8, Ordering};
use std::collections::{BTreeMap, HashMap};
use std::sync::mpsc::{Receiver, Sender, channel};

use super::backing::Backing;
use super::table::{Entry, LOCAL};
use super::{ANY_QP, Regions, Sge};
use crate::access::Access;
use crate::key::Key;
use crate::span::Span;

/// Bytes of a request that are looked at, from its first one on; and of all of them together.
const MOST: usize = 64 << 10;
const MOST_TOGETHER: usize = 64 << 20;
/// Bytes that are compared at once.
const BLOCK: usize = 512;
/// The smallest page.
const PAGE: usize = 4096;

/// The memory of a request, which is lent while this lives.
#[derive(Debug)]
pub struct Loan {
    id: u64,
    over: Sender<u64>,
}

impl Drop for Loan {
    fn drop(&mut self) {
        // Where there is no table any more nothing is kept in mind.
        let _ = self.over.send(self.id);
    }
}

/// What is known of a loan.
#[derive(Debug, Default)]
struct Lent {
    parts: Vec<Place>,
    /// Others have lent some of its bytes too.
    shared: bool,
    /// The first of its bytes that were found changed.
    changed: Option<u64>,
}

/// Where a part begins, and a number, since several may begin there.
type Place = (usize, u64);

/// Bytes of a loan that are in one piece, in a region that is registered.
#[derive(Debug)]
struct Part {
    loan: u64,
    region: Key,
    /// Where in the request they are.
    offset: u64,
    len: usize,
    /// What they have to be; empty where that is not known.
    copy: Vec<u8>,
    /// Which of them the adapter may be writing to.
    written: Range<usize>,
}

impl Part {
    /// Copies bytes out as they are now, those from `start` on of a part that begins at `at`.
    fn read(&self, at: usize, start: usize, out: &mut [u8]) {
        let ptr = core::ptr::with_exposed_provenance_mut(at);
        // SAFETY: the part lies in a region that is registered: with it goes the part. Its memory is valid by
        // the promise made in `Regions::register`, and nothing is written through this span.
        let all = unsafe { Span::new(ptr, self.len, false) };
        all.read_into(start, out);
    }

    /// The first byte of a range that is not as it has to be.
    fn first_change(&self, at: usize, range: Range<usize>) -> Option<usize> {
        if self.copy.is_empty() {
            return None;
        }
        let before = range.start..range.end.min(self.written.start);
        let behind = range.start.max(self.written.end)..range.end;
        [before, behind].into_iter().find_map(|range| self.first_difference(at, range))
    }

    fn first_difference(&self, at: usize, range: Range<usize>) -> Option<usize> {
        let mut now = [0; BLOCK];
        range.clone().step_by(BLOCK).find_map(|start| {
            let was = &self.copy[start..range.end.min(start + BLOCK)];
            let now = &mut now[..was.len()];
            self.read(at, start, now);
            Some(start + was.iter().zip(now.iter()).position(|(was, now)| was != now)?)
        })
    }

    /// A range is about to be written to.
    fn leave(&mut self, range: Range<usize>) {
        self.written = match self.written.is_empty() {
            true => range,
            false => self.written.start.min(range.start)..self.written.end.max(range.end),
        };
    }

    /// What was being written to is written.
    fn renew(&mut self, at: usize) {
        let written = core::mem::take(&mut self.written);
        let mut copy = core::mem::take(&mut self.copy);
        if !copy.is_empty() {
            self.read(at, written.start, &mut copy[written]);
        }
        self.copy = copy;
    }
}

/// All that is lent.
#[derive(Debug)]
pub(super) struct Ledger {
    parts: BTreeMap<Place, Part>,
    /// How many there are of each region that has any.
    of_regions: HashMap<Key, usize>,
    loans: HashMap<u64, Lent>,
    /// The number of the next loan, or part.
    next: u64,
    /// Parts that the adapter may be writing to.
    written: Vec<Place>,
    /// The bytes of all copies.
    bytes: usize,
    /// Loans that are over.
    over: (Sender<u64>, Receiver<u64>),
}

impl Ledger {
    fn new() -> Ledger {
        Ledger {
            parts: BTreeMap::new(),
            of_regions: HashMap::new(),
            loans: HashMap::new(),
            next: 0,
            written: Vec::new(),
            bytes: 0,
            over: channel(),
        }
    }

    fn number(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    /// The adapter is about to write to a range.
    pub(super) fn about_to_write(&mut self, at: usize, len: usize) {
        if len == 0 {
            return;
        }
        let end = at.saturating_add(len);
        for (&place, part) in self.parts.range_mut((at.saturating_sub(MOST), 0)..(end, 0)) {
            let start = place.0;
            if start + part.len <= at || part.copy.is_empty() {
                continue;
            }
            let range = at.max(start) - start..end.min(start + part.len) - start;
            if let Some(change) = part.first_change(start, range.clone())
                && let Some(lent) = self.loans.get_mut(&part.loan)
            {
                let change = part.offset + change as u64;
                lent.changed = Some(lent.changed.map_or(change, |first| first.min(change)));
            }
            if part.written.is_empty() {
                self.written.push(place);
            }
            part.leave(range);
        }
    }

    /// Nobody is writing any more; and what is over is forgotten.
    fn renew(&mut self) {
        while let Ok(id) = self.over.1.try_recv() {
            let lent = self.loans.remove(&id).unwrap_or_default();
            lent.parts.iter().for_each(|place| self.remove(place));
        }
        for place in core::mem::take(&mut self.written) {
            if let Some(part) = self.parts.get_mut(&place) {
                part.renew(place.0);
            }
        }
    }

    fn remove(&mut self, place: &Place) {
        let Some(part) = self.parts.remove(place) else { return };
        self.bytes -= part.copy.len();
        if let Some(left) = self.of_regions.get_mut(&part.region) {
            *left -= 1;
            if *left == 0 {
                self.of_regions.remove(&part.region);
            }
        }
    }

    /// A region is about to go.
    pub(super) fn forget(&mut self, region: Key) {
        if !self.of_regions.contains_key(&region) {
            return;
        }
        let parts = self.parts.iter().filter(|(_, part)| part.region == region);
        let places: Vec<Place> = parts.map(|(&place, _)| place).collect();
        places.iter().for_each(|place| self.remove(place));
    }

    fn lend(&mut self, pieces: &[Piece]) -> Loan {
        let id = self.number();
        self.loans.insert(id, Lent::default());
        for &Piece { region, offset, at, len } in pieces {
            let (mut alone, mut others) = (true, Vec::new());
            for (place, part) in self.parts.range((at.saturating_sub(MOST), 0)..(at + len, 0)) {
                if place.0 + part.len > at {
                    alone = false;
                    // Of the others that is known already.
                    others.extend((!part.copy.is_empty()).then_some(part.loan));
                }
            }
            let place = (at, self.number());
            let (copy, written) = (Vec::new(), 0..0);
            *self.of_regions.entry(region).or_default() += 1;
            self.parts.insert(place, Part { loan: id, region, offset, len, copy, written });
            let lent = self.loans.entry(id).or_default();
            lent.parts.push(place);
            if !alone {
                others.into_iter().chain([id]).for_each(|loan| self.share(loan));
            } else if !lent.shared
                && let Some(part) = self.parts.get_mut(&place)
            {
                hold(at, len);
                let mut copy = vec![0; len];
                part.read(at, 0, &mut copy);
                part.copy = copy;
                self.bytes += len;
            }
        }
        Loan { id, over: self.over.0.clone() }
    }

    /// Looks no more at what a loan is of.
    fn share(&mut self, loan: u64) {
        let Some(lent) = self.loans.get_mut(&loan).filter(|lent| !lent.shared) else { return };
        lent.shared = true;
        for place in &lent.parts {
            if let Some(part) = self.parts.get_mut(place) {
                self.bytes -= core::mem::take(&mut part.copy).len();
            }
        }
    }
}

/// What is to become a part.
struct Piece {
    region: Key,
    offset: u64,
    at: usize,
    len: usize,
}

/// Has the kernel keep the pages of a range, which it could throw away, and what is in them, if a program has
/// given them back (`MADV_FREE`) and not touched them since. An adapter that pins memory does so.
fn hold(at: usize, len: usize) {
    let pages = (at / PAGE * PAGE..at + len).step_by(PAGE);
    for byte in pages.map(|page| page.max(at)) {
        // SAFETY: a byte of registered memory that may be written to, which others touch by atomics or not at
        // all from Rust. It stays what it is: whoever changes it in between has the exchange fail.
        let byte = unsafe { AtomicU8::from_ptr(core::ptr::with_exposed_provenance_mut(byte)) };
        let is = byte.load(Ordering::Relaxed);
        let _ = byte.compare_exchange(is, is, Ordering::Relaxed, Ordering::Relaxed);
    }
}

impl Regions {
    /// From now on keeps in mind what [`lend`](Self::lend) is told, of regions that are made from now on.
    /// Every access takes longer then, and peers are not shown what they could reach themselves.
    pub fn watch_lent(&mut self) {
        self.lent.get_or_insert_with(|| Box::new(RefCell::new(Ledger::new())));
    }

    /// A table entry as it is to be while that is kept in mind.
    pub(super) fn watched(&self, entry: Entry) -> Entry {
        match entry.backing {
            Backing::Memory if self.lent.is_some() => {
                Entry { len: 0, backing: Backing::Watched { len: entry.len }, ..entry }
            }
            _ => entry,
        }
    }

    fn is_mapped(&self, at: usize, len: usize, write: bool) -> bool {
        self.mappings.as_ref().is_none_or(|mappings| mappings.allow(at, len as u64, write))
    }

    /// The pieces of a list that can be looked at.
    fn pieces_to_lend(&self, pd: u32, list: &[Sge], mut left: usize) -> Vec<Piece> {
        let need = LOCAL | Access::LOCAL_WRITE.bits();
        let (mut pieces, mut offset) = (Vec::new(), 0);
        for sge in list {
            let len = left.min(sge.len as usize);
            let region = self.table.region(sge.lkey);
            let watched = |entry: &Entry| matches!(entry.backing, Backing::Watched { .. });
            if len > 0
                && region.is_some_and(watched)
                && let Ok(span) =
                    self.check(pd, ANY_QP, sge.lkey, sge.addr, len as u64, need, false)
                && self.is_mapped(span.as_raw().0, len, true)
            {
                pieces.push(Piece { region: sge.lkey, offset, at: span.as_raw().0, len });
            }
            offset += u64::from(sge.len);
            left -= len;
        }
        pieces
    }

    /// A request of protection domain `pd` lends the memory of a list. Its first 64 KB are looked at, as long
    /// as it is 64 MB together; `None` if that is nothing.
    pub fn lend(&mut self, pd: u32, list: &[Sge]) -> Option<Loan> {
        self.renew_lent();
        let left = MOST_TOGETHER.saturating_sub(self.lent.as_ref()?.borrow().bytes);
        let pieces = self.pieces_to_lend(pd, list, left.min(MOST));
        let lent = self.lent.as_mut()?.get_mut();
        (!pieces.is_empty()).then(|| lent.lend(&pieces))
    }

    /// Says that all is written that accesses were given out for: it has to stay as it is now.
    pub fn renew_lent(&mut self) {
        if let Some(lent) = &mut self.lent {
            lent.get_mut().renew();
        }
    }

    /// Ends a loan, of whose bytes the first `len` were written to: which of these was not as the adapter had
    /// left it, or found it when it was lent, the first that is known of.
    pub fn give_back(&mut self, loan: Loan, len: u64) -> Option<u64> {
        self.renew_lent();
        let ledger = self.lent.as_ref()?.borrow();
        let lent = ledger.loans.get(&loan.id).filter(|lent| !lent.shared)?;
        let parts = lent.parts.iter().filter_map(|place| Some((place.0, ledger.parts.get(place)?)));
        let changes = parts.filter_map(|(at, part)| {
            let len = len.saturating_sub(part.offset).min(part.len as u64) as usize;
            if len == 0 || !self.is_mapped(at, len, false) {
                return None;
            }
            Some(part.offset + part.first_change(at, 0..len)? as u64)
        });
        lent.changed.into_iter().chain(changes).filter(|&change| change < len).min()
    }
}

#[cfg(test)]
mod tests;
