//! Lists of work requests that are posted with one doorbell.

use quipu_host::nic::{QpId, Sge};
use quipu_host::{Doorbell, EngineError};

use crate::device::EngineHandle;
use crate::error::Error;
use crate::request::Request;

/// Posts each of a list in turn, and rings the bell once; how many were taken before one that was not.
pub(crate) fn list<T>(
    engine: &EngineHandle,
    list: &[T],
    mut post: impl FnMut(&mut Doorbell<'_>, &T) -> Result<(), EngineError>,
) -> Result<(), (usize, Error)> {
    if list.is_empty() {
        return Ok(());
    }
    let mut doorbell = engine.doorbell().map_err(|error| (0, error.into()))?;
    for (index, item) in list.iter().enumerate() {
        post(&mut doorbell, item).map_err(|error| (index, error.into()))?;
    }
    Ok(())
}

/// Posts sends to a queue pair.
pub(crate) fn sends(
    engine: &EngineHandle,
    qp: QpId,
    requests: &[Request<'_>],
) -> Result<(), (usize, Error)> {
    list(engine, requests, |doorbell, request| doorbell.post_send(qp, &request.wr))
}

/// Posts receives to a queue pair.
pub(crate) fn receives(
    engine: &EngineHandle,
    qp: QpId,
    receives: &[(u64, &[Sge])],
) -> Result<(), (usize, Error)> {
    list(engine, receives, |doorbell, (wr_id, memory)| doorbell.post_recv(qp, *wr_id, memory))
}
