//! Placement out of order (RFC 5041 5.1, RFC 5044 5 and 8): a segment of TCP that comes behind a gap has
//! its tagged payload placed before the gap is filled. Delivery stays in order.
//!
//! A segment counts as one that begins with an FPDU only if all of it is FPDUs with right CRCs, from its
//! first octet to its last, and if the segments before the gap began and ended with FPDUs as well. So a
//! peer, or a box on the way, that cuts the stream anew does not get there. Should what was placed turn out
//! to be no FPDU all the same, when its turn comes, nothing is placed out of order any more.
//!
//! All bytes are kept as well, up to the window, until their turn. Then they go the way of all others:
//! checks, faults, completions; but what is in its place already is not copied again, since the program may
//! have seen it. Three rules keep memory as if all had come in order, once it is delivered:
//!
//! - What ends a message is placed in its turn: programs poll the last byte of a write, and then use the
//!   rest.
//! - A write in its turn that overlaps what was placed, and comes before it in the stream, has that placed
//!   again in its turn; so has one that is placed early itself.
//! - So has a segment that overlaps it in the stream: its bytes may be others.

use std::collections::BTreeMap;

use quipu_iwarp::Segment;

use crate::adapter::Hub;
use crate::probe::{Probe, Stage};
use crate::qp::{Path, Qp};
use crate::responder;
use crate::stream::sink_of;
use crate::types::{Access, SendOp};

/// How many FPDUs may be in their places before their turn.
const MOST_PLACED: usize = 1024;
/// So many segments in a row must have begun and ended with an FPDU.
const LEAST_ALIGNED: u32 = 4;
/// Longer than any FPDU.
const FPDU_MAX: u64 = 66_000;

/// An FPDU whose payload is in its place before its turn.
#[derive(Clone, Copy, Debug)]
struct Placed {
    /// Octets of the FPDU.
    len: usize,
    /// Where its payload is, and how long it is.
    at: (usize, usize),
    /// It is to be placed again in its turn.
    is_stale: bool,
}

/// What a stream knows of payload that was placed before its turn.
#[derive(Debug, Default)]
pub(crate) struct Early {
    /// By the offset of the FPDU in the stream.
    placed: BTreeMap<u64, Placed>,
    /// The offset of the FPDU whose turn is next.
    next: u64,
    /// The payload of the FPDU in hand is in its place.
    in_place: bool,
    /// Segments in a row that began and ended with an FPDU.
    aligned: u32,
    /// Something was taken for an FPDU that was none.
    is_off: bool,
    /// FPDUs that were placed early, in all.
    count: u64,
}

impl Early {
    /// Of a stream whose next FPDU begins at this offset.
    pub(crate) fn at(next: u64) -> Self {
        Self { next, ..Self::default() }
    }

    /// How many FPDUs were placed early.
    pub(crate) fn count(&self) -> u64 {
        self.count
    }

    /// A segment has come in its turn, with nothing before it that was not used.
    pub(crate) fn note_segment(&mut self, is_aligned: bool) {
        self.aligned = if is_aligned { self.aligned.saturating_add(1) } else { 0 };
    }

    /// Bytes have come once more that may be those of an FPDU which was placed.
    pub(crate) fn note_bytes(&mut self, start: u64, end: u64) {
        if self.placed.is_empty() {
            return;
        }
        let near = self.placed.range_mut(start.saturating_sub(FPDU_MAX)..end);
        for (at, placed) in near {
            placed.is_stale |= at + placed.len as u64 > start;
        }
    }

    /// It is the turn of an FPDU of so many octets.
    pub(crate) fn begin(&mut self, len: usize) {
        let at = self.next;
        self.next += len as u64;
        self.in_place = false;
        while let Some(first) = self.placed.first_entry().filter(|it| *it.key() < self.next) {
            let (begun, placed) = (*first.key(), first.remove());
            match (begun, placed.len) == (at, len) {
                true => self.in_place = !placed.is_stale,
                false => self.is_off = true,
            }
        }
    }

    /// Memory is written for what stands at `offset` of the stream: what comes behind it comes after it.
    fn note_written(&mut self, offset: u64, (at, len): (usize, usize)) {
        for placed in self.placed.range_mut(offset + 1..).map(|(_, placed)| placed) {
            placed.is_stale |= placed.at.0 < at + len && at < placed.at.0 + placed.at.1;
        }
    }

    fn may_place(&self) -> bool {
        !self.is_off && self.aligned >= LEAST_ALIGNED && self.placed.len() < MOST_PLACED
    }
}

fn early_of(qp: &mut Qp) -> Option<&mut Early> {
    let Path::Stream(stream) = &mut qp.path else { return None };
    stream.early.as_deref_mut()
}

/// Whether the payload of the FPDU in hand is in its place.
#[inline]
pub(super) fn is_in_place(qp: &Qp) -> bool {
    let Path::Stream(stream) = &qp.path else { return false };
    stream.early.as_ref().is_some_and(|early| early.in_place)
}

/// Whether anything is in its place before its turn.
#[inline]
pub(super) fn has_placed(qp: &Qp) -> bool {
    let Path::Stream(stream) = &qp.path else { return false };
    stream.early.as_ref().is_some_and(|early| !early.placed.is_empty())
}

/// Payload of the FPDU in hand is placed, in its turn.
#[inline]
pub(super) fn note_placed(qp: &mut Qp, at: (usize, usize)) {
    if let Some(early) = early_of(qp).filter(|early| !early.placed.is_empty()) {
        // It has begun: `next` is behind it.
        early.note_written(early.next - 1, at);
    }
}

/// The same of payload that goes to a list.
pub(super) fn note_list<P>(
    qp: &mut Qp,
    hub: &Hub<P>,
    (pd, list): (u32, &[quipu_mem::Sge]),
    offset: u64,
    len: usize,
) {
    for piece in hub.regions.pieces(pd, list, offset, len as u64, true).flatten() {
        note_placed(qp, piece.as_raw());
    }
}

/// A segment has come that begins at `offset` of the stream, behind a gap.
pub(crate) fn place<P: Probe>(qp: &mut Qp, hub: &mut Hub<P>, offset: u64, bytes: &[u8]) {
    let Path::Stream(stream) = &mut qp.path else { return };
    let Some(early) = &mut stream.early else { return };
    early.note_bytes(offset, offset + bytes.len() as u64);
    let stands = stream.heard && stream.refusal.is_none() && hub.unordered.is_none();
    if !stands || !early.may_place() || offset <= early.next {
        return;
    }
    let mut found = Vec::new();
    let mut at = 0;
    while at < bytes.len() {
        // All of it, or nothing.
        let Some((len, segment)) = stream.rx.ahead(&bytes[at..]) else { return };
        found.extend(segment.map(|segment| (offset + at as u64, len, segment)));
        at += len;
    }
    if !qp.may_receive() {
        return;
    }
    for (at, len, segment) in found {
        if let Some(place) = place_segment(qp, hub, &segment)
            && let Some(early) = early_of(qp)
        {
            early.note_written(at, place);
            early.placed.insert(at, Placed { len, at: place, is_stale: false });
            early.count += 1;
        }
    }
}

/// Places the payload of a segment, unless it is one that ends a message, or that will be refused: where that
/// is. Faults are found in its turn.
fn place_segment<P: Probe>(
    qp: &Qp,
    hub: &mut Hub<P>,
    segment: &Segment<'_>,
) -> Option<(usize, usize)> {
    let (span, payload) = match *segment {
        Segment::Write { stag, to, last: false, payload } => {
            let len = payload.len() as u32;
            let span = responder::remote_quietly(qp, hub, stag.0, to, len, Access::REMOTE_WRITE)?;
            (span, payload)
        }
        Segment::ReadResponse { stag, to, last: false, payload } => {
            let mut asked = qp.sq.in_progress().filter(|&at| !qp.sq.wqe(at).answered);
            let position = asked.find(|&at| sink_of(at) == stag)?;
            let wqe = qp.sq.wqe(position);
            let end = to.checked_add(payload.len() as u64)?;
            let fits = matches!(wqe.op, SendOp::Read { .. })
                && u64::from(wqe.placed) <= to
                && end <= u64::from(wqe.length);
            if !fits {
                return None;
            }
            let (pd, list) = (qp.pd_number(), qp.sq.sges(position));
            let mut pieces = hub.regions.pieces(pd, list, to, payload.len() as u64, true);
            // One in several pieces waits for its turn.
            let span = pieces.next()?.ok().filter(|span| span.as_raw().1 == payload.len())?;
            (span, payload)
        }
        _ => return None,
    };
    span.write_from(0, payload);
    let place = span.as_raw();
    hub.probe.stage(Stage::PutData, payload.len());
    Some(place)
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: Placed = Placed { len: 100, at: (5000, 80), is_stale: false };

    fn with(at: u64) -> Early {
        let mut early = Early::at(0);
        early.placed.insert(at, A);
        early
    }

    #[test]
    fn what_is_in_its_place_is_not_copied_again() {
        let mut early = with(40);
        early.begin(40);
        assert!(!early.in_place);
        early.begin(100);
        assert!(early.in_place && early.placed.is_empty());
        early.begin(100);
        assert!(!early.in_place && !early.is_off);
    }

    #[test]
    fn what_was_no_fpdu_ends_placement() {
        for turns in [&[30, 110][..], &[40, 60], &[200]] {
            let mut early = with(40);
            for &len in turns {
                early.begin(len);
                assert!(!early.in_place, "{turns:?}");
            }
            assert!(early.is_off && early.placed.is_empty(), "{turns:?}");
        }
    }

    #[test]
    fn what_overlaps_has_it_placed_again() {
        let stale = |change: fn(&mut Early)| {
            let mut early = with(40);
            change(&mut early);
            early.placed[&40].is_stale
        };
        assert!(stale(|it| it.note_written(39, (5079, 1))));
        assert!(stale(|it| it.note_written(0, (4000, 1001))));
        assert!(!stale(|it| it.note_written(39, (5080, 100))));
        assert!(!stale(|it| it.note_written(39, (4000, 1000))));
        assert!(!stale(|it| it.note_written(40, (5000, 80))), "it comes later in the stream");
        assert!(stale(|it| it.note_bytes(139, 300)));
        assert!(stale(|it| it.note_bytes(0, 41)));
        assert!(!stale(|it| it.note_bytes(140, 300)));
        assert!(!stale(|it| it.note_bytes(0, 40)));
    }
}
