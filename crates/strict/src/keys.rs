//! What programs name by keys: memory of their own, and of their peers.

use quipu_nic::mem::AccessError;
use quipu_nic::{Completion, Denied, Sge, Whose};

use crate::checker::{Checker, named};
use crate::report::Kind;
use crate::trace::Trace;

/// Registrations that have ended are remembered for so many more.
const REMEMBERED: usize = 4096;

/// How a registration has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// By `ibv_dereg_mr`.
    Deregistered,
    /// By `ibv_rereg_mr`: there is another in its place.
    Changed,
}

/// What the adapter itself finds wrong with the elements of a request, in their order.
pub type Errors = [Option<AccessError>];

impl Checker {
    /// A registration has ended, or is another one now. `receives` are posted, and name it: whose, and the
    /// oldest of each.
    pub fn deregistered(&mut self, key: u32, end: End, receives: &[(Whose, u64)]) {
        let how = match end {
            End::Deregistered => "deregistered",
            End::Changed => "changed by ibv_rereg_mr",
        };
        let region = format!("the region with lkey {key:#x} is {how} while");
        for (num, wr_id, trace) in self.sends_naming(key) {
            let what = format!("{region} request {wr_id:#x} of {} is outstanding", named(num));
            self.report(Kind::DeregInUse, what, vec![("the request was posted here", trace)]);
        }
        for &(whose, wr_id) in receives {
            let queue = match whose {
                Whose::Sends(id) | Whose::Receives(id) => named(self.number_of(id)),
                Whose::Shared(_) => "a shared receive queue".to_owned(),
            };
            let what = format!("{region} receive {wr_id:#x} of {queue} is posted, which names it");
            let posted = self.receives.get(&(key, whose)).cloned();
            let posted = posted.map(|trace| ("a receive that names it was posted here", trace));
            self.report(Kind::DeregInUse, what, posted.into_iter().collect());
        }
        self.receives.retain(|&(named, _), _| named != key);
        let Some(region) = self.regions.get_mut(&key) else { return };
        region.ended = Some(Trace::here());
        self.ended.push_back(key);
        if self.ended.len() > REMEMBERED
            && let Some(oldest) = self.ended.pop_front()
            && self.regions.get(&oldest).is_some_and(|region| region.ended.is_some())
        {
            self.regions.remove(&oldest);
        }
    }

    /// Remembers where a receive was posted, by the regions that it names.
    pub(crate) fn note_receive(&mut self, whose: Whose, sges: &[Sge], here: &Trace) {
        for key in sges.iter().filter(|sge| sge.len > 0).map(|sge| sge.lkey.0) {
            if self.regions.get(&key).is_some_and(|region| region.ended.is_none()) {
                self.receives.insert((key, whose), here.clone());
            }
        }
    }

    /// Looks at the elements of a request.
    pub(crate) fn check_keys(
        &mut self,
        what: &str,
        wr_id: u64,
        whose: &str,
        sges: &[Sge],
        errors: &Errors,
    ) {
        for (sge, error) in sges.iter().zip(errors).filter(|(sge, _)| sge.len > 0) {
            let key = sge.lkey.0;
            let request = format!("{what} {wr_id:#x} of {whose}");
            let Some(region) = self.regions.get(&key) else {
                let what = format!("{request} names lkey {key:#x}, which belongs to no region");
                self.report(Kind::WrongKey, what, Vec::new());
                continue;
            };
            let made = ("registered here", region.made.clone());
            if let Some(ended) = region.ended.clone() {
                let what = format!("{request} names lkey {key:#x}, whose registration has ended");
                self.report(Kind::UseAfterDereg, what, vec![made, ("deregistered here", ended)]);
                continue;
            }
            let offset = sge.addr.wrapping_sub(region.addr);
            let inside = offset.checked_add(sge.len.into()).is_some_and(|end| end <= region.len);
            if !inside {
                let what = format!(
                    "{request} names {} bytes at {:#x}, which are not in the region of lkey \
                     {key:#x}: {} bytes at {:#x}",
                    sge.len, sge.addr, region.len, region.addr
                );
                self.report(Kind::WrongKey, what, vec![made]);
            } else if let Some(error) = error {
                let what = format!("{request} names lkey {key:#x}: {error}");
                self.report(Kind::WrongKey, what, vec![made]);
            }
        }
    }

    /// A request was refused by the peer for the key that it names.
    pub(crate) fn refused(&mut self, completion: &Completion, rkey: u32, posted: Trace) {
        let what = format!(
            "request {:#x} of {} names rkey {rkey:#x}, which the peer rejected",
            completion.wr_id,
            named(completion.qp_num.0)
        );
        self.report(Kind::WrongKey, what, vec![("the request was posted here", posted)]);
    }

    /// A window was not bound.
    pub(crate) fn not_bound(&mut self, completion: &Completion, posted: Trace) {
        let what = format!(
            "binding {:#x} of {} failed: its region does not allow windows (IBV_ACCESS_MW_BIND), \
             lacks the window's access or bytes, or belongs to another protection domain",
            completion.wr_id,
            named(completion.qp_num.0)
        );
        self.report(Kind::WrongKey, what, vec![("the request was posted here", posted)]);
    }

    /// A peer was refused an access by a key. One that was never known here is its affair alone.
    pub fn denied(&mut self, denied: &Denied) {
        let key = denied.rkey.0;
        let Some(region) = self.regions.get(&key) else { return };
        let mut related = vec![("registered here", region.made.clone())];
        let ended = region.ended.clone();
        let (addr, len) = denied.range;
        let request = format!(
            "the peer of {} asked for {len} bytes at {addr:#x} by rkey {key:#x}",
            named(self.number_of(denied.qp))
        );
        if let Some(ended) = ended {
            related.push(("deregistered here", ended));
            let what = format!("{request}, whose registration has ended");
            self.report(Kind::UseAfterDereg, what, related);
        } else {
            let what = format!("{request}: {}", denied.error);
            self.report(Kind::WrongKey, what, related);
        }
    }
}
