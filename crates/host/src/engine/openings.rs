//! Queue pairs that more than one call has open: responders of XRC domains (`ibv_open_qp(3)`). Each opening
//! has a handle of its own and hears of every event; the queue pair goes with the last one.

use quipu_nic::{AsyncEvent, Fault, QpId, QpNum, QpType, XrcdId};

use super::events::Object;
use super::{ContextId, Engine};
use crate::error::EngineError;
use crate::handle_map::HandleMap;

/// Set in the handles of openings, and in no slot number of the adapter.
const OPENING: u64 = 1 << 31;

/// Who has which queue pair open. Those that only their creator has open are not in it.
#[derive(Default)]
pub(crate) struct Openings {
    /// The queue pair behind the handle of an opening.
    behind: HandleMap<QpId, QpId>,
    /// The handles of a queue pair; its creator's is its own.
    handles: HandleMap<QpId, Vec<QpId>>,
    last: u32,
}

impl Openings {
    /// One more handle of a queue pair.
    pub(crate) fn open(&mut self, qp: QpId) -> Result<QpId, Fault> {
        self.last = self.last.checked_add(1).ok_or(Fault::Exhausted("openings of queue pairs"))?;
        let opening = QpId(u64::from(self.last) << 32 | OPENING);
        self.behind.insert(opening, qp);
        self.handles.entry(qp).or_insert_with(|| vec![qp]).push(opening);
        Ok(opening)
    }

    /// The queue pair behind a handle, if that is open.
    pub(crate) fn find(&self, handle: QpId) -> Result<QpId, Fault> {
        if handle.0 & OPENING != 0 {
            return self.behind.get(&handle).copied().ok_or(Fault::NoSuchObject);
        }
        match self.handles.get(&handle) {
            Some(handles) if !handles.contains(&handle) => Err(Fault::NoSuchObject),
            _ => Ok(handle),
        }
    }

    /// Closes a handle. Whether others have the queue pair open.
    pub(crate) fn close(&mut self, handle: QpId) -> Result<bool, Fault> {
        let qp = self.find(handle)?;
        let Some(handles) = self.handles.get_mut(&qp) else { return Ok(false) };
        if handles.len() == 1 {
            return Ok(false);
        }
        handles.retain(|other| *other != handle);
        self.behind.remove(&handle);
        Ok(true)
    }

    /// Forgets a queue pair that is gone.
    pub(crate) fn forget(&mut self, qp: QpId) {
        for handle in self.handles.remove(&qp).unwrap_or_default() {
            self.behind.remove(&handle);
        }
    }

    /// An event as each who has its queue pair open is to hear it, or as it is where only the creator has.
    pub(crate) fn copies(&self, event: AsyncEvent) -> impl Iterator<Item = AsyncEvent> {
        let handles = about(event).and_then(|(qp, of)| Some((self.handles.get(&qp)?, of)));
        let alone = handles.is_none().then_some(event);
        let each = handles.map(|(handles, of)| handles.iter().map(move |handle| of(*handle)));
        each.into_iter().flatten().chain(alone)
    }
}

impl Engine {
    /// Opens a responder of an XRC domain that somebody has created, for `context` too: a handle that can be
    /// modified, asked and destroyed as that of its creator, and which hears of the same events. The queue
    /// pair is destroyed with the last of its handles. `known` is told the handle, under the engine's lock:
    /// another thread may take an event of it before this call is back.
    ///
    /// # Errors
    ///
    /// The domain has no queue pair of that number.
    pub fn open_qp(
        &self,
        context: ContextId,
        domain: XrcdId,
        number: QpNum,
        known: impl FnOnce(QpId),
    ) -> Result<QpId, EngineError> {
        let mut core = self.enter()?;
        let service = Some(QpType::XrcRecv(domain));
        let found = core.adapter.find_qp(number);
        let qp = found.filter(|qp| core.adapter.service_of(*qp) == service);
        let opening = core.events.openings.open(qp.ok_or(Fault::NoSuchObject)?)?;
        core.events.add_object(Object::Qp(opening), context, None);
        known(opening);
        Ok(opening)
    }
}

/// Makes an event of one kind about a queue pair.
type Kind = fn(QpId) -> AsyncEvent;

/// The queue pair that an event is about, and its kind.
fn about(event: AsyncEvent) -> Option<(QpId, Kind)> {
    Some(match event {
        AsyncEvent::QpFatal(qp) => (qp, AsyncEvent::QpFatal),
        AsyncEvent::QpReqErr(qp) => (qp, AsyncEvent::QpReqErr),
        AsyncEvent::QpAccessErr(qp) => (qp, AsyncEvent::QpAccessErr),
        AsyncEvent::CommEst(qp) => (qp, AsyncEvent::CommEst),
        AsyncEvent::SqDrained(qp) => (qp, AsyncEvent::SqDrained),
        AsyncEvent::PathMig(qp) => (qp, AsyncEvent::PathMig),
        AsyncEvent::PathMigErr(qp) => (qp, AsyncEvent::PathMigErr),
        AsyncEvent::QpLastWqeReached(qp) => (qp, AsyncEvent::QpLastWqeReached),
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const QP: QpId = QpId(5 << 32 | 3);
    const OTHER: QpId = QpId(6 << 32 | 4);

    fn told(openings: &Openings, event: AsyncEvent) -> Vec<AsyncEvent> {
        openings.copies(event).collect()
    }

    #[test]
    fn every_opening_hears_of_events_until_it_is_closed() {
        let mut openings = Openings::default();
        let (event, port) = (AsyncEvent::QpAccessErr(QP), AsyncEvent::PortErr);
        assert_eq!(told(&openings, event), [event]);
        let [one, two] = [(); 2].map(|()| openings.open(QP).unwrap());
        let [of_one, of_two] = [one, two].map(AsyncEvent::QpAccessErr);
        assert_eq!(told(&openings, event), [event, of_one, of_two]);
        assert_eq!(told(&openings, AsyncEvent::QpAccessErr(OTHER)).len(), 1);
        assert_eq!(told(&openings, port), [port]);
        assert_eq!(openings.close(QP), Ok(true));
        assert_eq!(told(&openings, event), [of_one, of_two]);
        assert_eq!(openings.close(one), Ok(true));
        assert_eq!(told(&openings, event), [of_two]);
    }

    #[test]
    fn the_last_that_closes_it_has_the_queue_pair_alone() {
        let mut openings = Openings::default();
        assert_eq!(openings.close(QP), Ok(false));
        let opening = openings.open(QP).unwrap();
        assert_eq!((openings.find(opening), openings.find(QP)), (Ok(QP), Ok(QP)));
        assert_eq!(openings.close(QP), Ok(true));
        assert_eq!(openings.find(QP), Err(Fault::NoSuchObject), "its creator has closed it");
        assert_eq!(openings.close(QP), Err(Fault::NoSuchObject));
        assert_eq!((openings.close(opening), openings.find(opening)), (Ok(false), Ok(QP)));
        openings.forget(QP);
        assert_eq!(openings.find(opening), Err(Fault::NoSuchObject));
        assert!(openings.behind.is_empty() && openings.handles.is_empty());
    }
}
