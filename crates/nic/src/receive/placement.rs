//! Payload that the world below receives into the memory where it belongs.
//!
//! Of an FPDU whose header has come it is known where the rest belongs: whoever receives asks for that,
//! receives as far as it is known, and says how much came. All checks are made each time, so that nothing
//! outlives the call that receives: in between, memory may be taken back, and the queue pair may fail.

use quipu_iwarp::Belonging;

use super::replies::oldest_unanswered;
use super::stream::{count_written, note_partial, took};
use crate::adapter::{Adapter, Hub};
use crate::connect::Phase;
use crate::probe::{Probe, Stage};
use crate::qp::{Path, Qp};
use crate::responder;
use crate::stream::sink_of;
use crate::types::{Access, ConnId, SendOp, Time};

/// Less is not worth a list.
const LEAST_BYTES: usize = 4096;

impl<P: Probe> Adapter<P> {
    /// Where the bytes belong that `conn` receives next, address and length of one range after the other, and
    /// how many they are; 0 if they are to be shown to [`handle_stream`](Self::handle_stream), as everything
    /// behind them is. Ask only if all bytes that have come were used.
    ///
    /// Whoever receives writes to those ranges before the next call of the adapter and before anybody else
    /// can call it, from the first on, and calls [`handle_placed`](Self::handle_placed).
    pub fn place_next(&self, conn: ConnId, places: &mut Vec<(usize, usize)>) -> usize {
        places.clear();
        let hub = &self.hub;
        let Some(state) = hub.conns.get(conn) else { return 0 };
        let Some(qp) = state.qp.and_then(|qp| self.qps.get(qp)) else { return 0 };
        if !matches!(state.phase, Phase::Open | Phase::Greeting(_)) {
            return 0;
        }
        let count = find(qp, hub, places).unwrap_or(0);
        if count == 0 {
            places.clear();
        }
        count
    }

    /// The next `count` bytes of `conn` are where [`place_next`](Self::place_next) has just said.
    pub fn handle_placed(&mut self, now: Time, conn: ConnId, count: usize) {
        self.hub.now = now;
        let Some(state) = self.hub.conns.get(conn) else { return };
        let Some((qp, hub)) = state.qp.and_then(|qp| self.qp_and_hub(qp)) else { return };
        let Path::Stream(stream) = &mut qp.path else { return };
        let Some((_, belonging)) = stream.rx.awaits() else { return };
        stream.rx.placed(count);
        match belonging {
            Belonging::Write { .. } => {
                qp.responder.counters.bytes_in += count as u64;
                count_written(qp, count);
                took(qp, count);
            }
            Belonging::Send { .. } => took(qp, count),
            Belonging::ReadResponse { .. } => {
                if let Some(position) = oldest_unanswered(qp) {
                    qp.sq.wqe_mut(position).placed += count as u32;
                }
            }
        }
        hub.probe.stage(Stage::PutData, count);
        note_partial(qp, hub, count, 0);
    }
}

/// Finds the places; `None` if there are none, or the segment is one that will be refused.
fn find<P: Probe>(qp: &Qp, hub: &Hub<P>, places: &mut Vec<(usize, usize)>) -> Option<usize> {
    let Path::Stream(stream) = &qp.path else { return None };
    let (count, belonging) = stream.rx.awaits()?;
    if stream.refusal.is_some() {
        return None;
    }
    // Whoever watches wants to see the bytes, and who places writes in another order needs them.
    if count < LEAST_BYTES || hub.probe.watches() || hub.unordered.is_some() || !qp.may_receive() {
        return None;
    }
    match belonging {
        Belonging::Write { stag, to } => {
            let len = count as u32;
            let span = responder::remote(qp, hub, stag.0, to, len, Access::REMOTE_WRITE).ok()?;
            places.push(span.as_raw());
        }
        Belonging::Send { mo } => {
            let receive = &qp.responder.receive;
            let offset = u64::from(mo);
            if !qp.responder.receiving || offset + count as u64 > receive.capacity() {
                return None;
            }
            let pd = qp.recv_pd_number();
            for piece in hub.regions.pieces(pd, &receive.sges, offset, count as u64, true) {
                places.push(piece.ok()?.as_raw());
            }
        }
        Belonging::ReadResponse { stag, to } => {
            let position = oldest_unanswered(qp)?;
            let wqe = qp.sq.wqe(position);
            let is_due = matches!(wqe.op, SendOp::Read { .. })
                && stag == sink_of(position)
                && to == u64::from(wqe.placed)
                && count as u64 <= u64::from(wqe.length - wqe.placed);
            if !is_due {
                return None;
            }
            let list = qp.sq.sges(position);
            for piece in hub.regions.pieces(qp.pd_number(), list, to, count as u64, true) {
                places.push(piece.ok()?.as_raw());
            }
        }
    }
    Some(count)
}
