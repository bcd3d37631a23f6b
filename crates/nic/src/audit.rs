//! What the strict mode asks of the adapter: memory as it is now, messages that found no receive, and keys
//! of which peers made a wrong use.

use std::cell::RefCell;

use quipu_mem::{AccessError, Key, Loan, RegionInfo, Sge};

use crate::adapter::Adapter;
use crate::probe::Probe;
use crate::qp::{Path, Qp, pd_number};
use crate::queue::names;
use crate::types::{QpId, QpState, QpType, SrqId};

/// An access to this end's memory that a peer was refused.
#[derive(Clone, Copy, Debug)]
pub struct Denied {
    /// By which queue pair it came.
    pub qp: QpId,
    /// The key that the peer named.
    pub rkey: Key,
    /// Address and length.
    pub range: (u64, u64),
    /// Why.
    pub error: AccessError,
}

/// Notes a refusal, unless there is one of that queue pair already.
#[cold]
pub(crate) fn note_denied(denied: &RefCell<Vec<Denied>>, new: Denied) {
    let mut denied = denied.borrow_mut();
    if denied.iter().all(|old| old.qp != new.qp) {
        denied.push(new);
    }
}

/// Whose memory a request may name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Whose {
    /// A send's of that queue pair.
    Sends(QpId),
    /// A receive's of that queue pair.
    Receives(QpId),
    /// A receive's of that shared queue.
    Shared(SrqId),
}

impl<P: Probe> Adapter<P> {
    /// What the memory of a list looks like, as a queue pair would read it: equal for equal bytes. `None`
    /// for an empty list, and where it may not be read.
    #[must_use]
    pub fn fingerprint(&self, id: QpId, sges: &[Sge]) -> Option<u64> {
        let qp = self.qps.get(id)?;
        let total: u64 = sges.iter().map(|sge| u64::from(sge.len)).sum();
        let (mut hash, mut offset, mut piece) = (total, 0, [0; 4096]);
        while offset < total {
            let piece = &mut piece[..(total - offset).min(4096) as usize];
            self.hub.regions.gather(qp.pd_number(), sges, offset, piece).ok()?;
            // FNV-1a over words: not secure, and quick enough.
            for word in piece.chunks(8) {
                let mut bytes = [0; 8];
                bytes[..word.len()].copy_from_slice(word);
                hash = (hash ^ u64::from_le_bytes(bytes)).wrapping_mul(0x0100_0000_01b3);
                hash ^= hash >> 32;
            }
            offset += piece.len() as u64;
        }
        (total > 0).then_some(hash)
    }

    /// The region that a key is of now.
    #[must_use]
    pub fn region_of(&self, key: Key) -> Option<RegionInfo> {
        self.hub.regions.info(key)
    }

    /// The place of the send that was posted last, as its completion would tell if it failed.
    #[must_use]
    pub fn last_place(&self, id: QpId) -> u32 {
        self.qps.get(id).map_or(0, |qp| qp.sq.tail.wrapping_sub(1))
    }

    /// Why an element may not be read, or with `written` may not be written to. Empty ones are not looked at.
    #[must_use]
    pub fn element_error(&self, whose: Whose, sge: &Sge, written: bool) -> Option<AccessError> {
        let (list, len) = (std::slice::from_ref(sge), u64::from(sge.len));
        self.hub.regions.check_list(self.domain_of(whose)?, list, 0, len, written).err()
    }

    /// The protection domain of what a request may name.
    fn domain_of(&self, whose: Whose) -> Option<u32> {
        match whose {
            Whose::Sends(id) => self.qps.get(id).map(Qp::pd_number),
            Whose::Receives(id) => self.qps.get(id).map(Qp::recv_pd_number),
            Whose::Shared(id) => self.hub.srqs.get(id).map(|srq| pd_number(srq.pd)),
        }
    }

    /// Keeps in mind from now on what [`lend`](Self::lend) is told, of regions that are made from now on.
    /// Peers must have no access of their own to this process's memory.
    pub fn watch_lent(&mut self) {
        self.hub.regions.watch_lent();
    }

    /// The memory of a request, which is about to be posted, is lent to the adapter to write to: nobody else
    /// is to change it. `None` where that is not looked at, as for shared queues of XRC, where a completion
    /// does not tell of which of them it is.
    pub fn lend(&mut self, whose: Whose, sges: &[Sge]) -> Option<Loan> {
        if let Whose::Shared(id) = whose
            && self.hub.srqs.get(id)?.xrc.is_some()
        {
            return None;
        }
        self.hub.regions.lend(self.domain_of(whose)?, sges)
    }

    /// Says that whatever was to be written by the calls so far is written.
    pub fn renew_lent(&mut self) {
        self.hub.regions.renew_lent();
    }

    /// A request is done that lent memory, of which the adapter has written to the first `len` bytes: the
    /// first byte of these that somebody else has changed before.
    pub fn give_back(&mut self, loan: Loan, len: u64) -> Option<u64> {
        self.hub.regions.give_back(loan, len)
    }

    /// The queues with a receive that names a region, where a message may still be placed into it, each with
    /// the oldest such receive. Nothing is placed where no queue pair is from RTR on, or where its
    /// connection is gone.
    #[must_use]
    pub fn receives_naming(&self, key: Key) -> Vec<(Whose, u64)> {
        let takes = |qp: &&Qp| {
            let ready = !matches!(qp.state, QpState::Reset | QpState::Init | QpState::Err);
            ready && !matches!(qp.path, Path::Lost)
        };
        let live: Vec<&Qp> = self.qps.iter().map(|(_, qp)| qp).filter(takes).collect();
        let own = live.iter().filter_map(|qp| {
            let filled = &qp.responder.receive;
            let begun = qp.responder.receiving && names(&filled.sges, key);
            let wr_id = if begun { Some(filled.wr_id) } else { qp.rq.naming(key) };
            Some((qp.srq.map_or(Whose::Receives(qp.id), Whose::Shared), wr_id?))
        });
        let shared = self.hub.srqs.iter().filter_map(|(id, srq)| {
            let domain = srq.xrc.as_ref().map(|xrc| QpType::XrcRecv(xrc.domain));
            let user = |qp: &&Qp| qp.srq == Some(id) || Some(qp.qp_type) == domain;
            live.iter().find(|qp| user(qp))?;
            Some((Whose::Shared(id), srq.queue.naming(key)?))
        });
        own.chain(shared).collect()
    }

    /// Notes from now on for which queue pairs messages come that find no receive, and what peers are
    /// refused by their keys.
    pub fn watch_peers(&mut self) {
        self.hub.starved.get_or_insert_default();
        self.hub.denied.get_or_insert_default();
    }

    /// Those queue pairs, each once, since this was asked last.
    pub fn take_starved(&mut self) -> Vec<QpId> {
        self.hub.starved.as_mut().map(std::mem::take).unwrap_or_default()
    }

    /// What peers were refused by their keys since this was asked last, once for each queue pair.
    pub fn take_denied(&mut self) -> Vec<Denied> {
        self.hub.denied.as_ref().map(RefCell::take).unwrap_or_default()
    }
}
