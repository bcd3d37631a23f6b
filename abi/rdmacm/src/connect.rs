//! Connecting and what ends it.

use libc::{c_int, c_void};
use quipu_abi_trace::entry;
use quipu_abi_types::*;
use quipu_cabi::{Errno, IntMinusOne};
use quipu_facade::check;

use crate::device::Device;
use crate::ece;
use crate::id::{Book, IdState, complete, drop_event, id};
use crate::state::{Limits, to_error, to_rts};

/// How often a send is tried again, where the program does not say: as often as there is.
const RETRIES: u8 = 7;

/// The private data that an answer to a request has room for, in bytes (the REP message of the IBA).
const REPLY_DATA: usize = 196;

/// Checks what the program asks for: that there is a queue pair to tell the peer of, and the limits against
/// those of the device. Only `RDMA_PS_TCP` has any (`rdma_connect(3)`); others look up services without one.
fn valid(public: &rdma_cm_id, book: &Book, param: Option<&rdma_conn_param>) -> Result<(), Errno> {
    if public.ps != RDMA_PS_TCP {
        return Ok(());
    }
    if param.is_none() && public.qp.is_null() {
        return Err(Errno::EINVAL);
    }
    let (Some(param), Some(device)) = (param, book.device) else { return Ok(()) };
    let beyond = |wanted: u8, most: u8| wanted != RDMA_MAX_RESP_RES && wanted > most;
    if beyond(param.responder_resources, device.max_responder_resources)
        || beyond(param.initiator_depth, device.max_initiator_depth)
    {
        return Err(Errno::EINVAL);
    }
    Ok(())
}

/// Settles one limit: what the program says, or else what `offered` (or without an offer the
/// device) allows.
fn settle(wanted: Option<u8>, offered: Option<u8>, most: u8) -> u8 {
    match wanted {
        Some(wanted) if wanted != RDMA_MAX_RESP_RES => wanted,
        _ => offered.map_or(most, |offered| offered.min(most)),
    }
}

/// Settles both limits of an identifier; `accepting`: within what the peer's request says.
fn settle_limits(book: &mut Book, param: Option<&rdma_conn_param>, accepting: bool) {
    let most = |of: fn(&Device) -> u8| book.device.map_or(RDMA_MAX_RESP_RES, of);
    let (responder, initiator) =
        (most(|device| device.max_responder_resources), most(|device| device.max_initiator_depth));
    let offered = |limit: u8| accepting.then_some(limit);
    book.responder_resources = settle(
        param.map(|param| param.responder_resources),
        offered(book.responder_resources),
        responder,
    );
    book.initiator_depth =
        settle(param.map(|param| param.initiator_depth), offered(book.initiator_depth), initiator);
}

/// The program's private data, behind what `rdma_create_ep` was given.
///
/// # Safety
///
/// `param` names as many bytes as it says.
unsafe fn private_data(book: &Book, param: Option<&rdma_conn_param>) -> Vec<u8> {
    let mut data = book.connect_data.clone();
    if let Some(param) = param
        && !param.private_data.is_null()
    {
        let length = usize::from(param.private_data_len);
        // SAFETY: passed on from the caller.
        data.extend_from_slice(unsafe {
            std::slice::from_raw_parts(param.private_data.cast(), length)
        });
    }
    data
}

/// What the engine is told, with the queue pair of the identifier, if it has one.
///
/// # Safety
///
/// `raw` is an identifier.
unsafe fn parameters(
    raw: *mut rdma_cm_id,
    book: &Book,
    param: Option<&rdma_conn_param>,
    private_data: &[u8],
) -> EngineCmParam {
    // SAFETY: passed on from the caller; its queue pair is one of libibverbs.
    let qp = unsafe { (*raw).qp.as_ref() };
    let said = |of: fn(&rdma_conn_param) -> u8, otherwise| param.map_or(otherwise, of);
    EngineCmParam {
        private_data: private_data.as_ptr().cast(),
        private_data_len: private_data.len() as u32,
        responder_resources: book.responder_resources,
        initiator_depth: book.initiator_depth,
        flow_control: said(|param| param.flow_control, 1),
        retry_count: said(|param| param.retry_count, RETRIES),
        rnr_retry_count: said(|param| param.rnr_retry_count, RETRIES),
        srq: qp.map_or(said(|param| param.srq, 0), |qp| u8::from(!qp.srq.is_null())),
        qp_num: qp.map_or(param.map_or(0, |param| param.qp_num), |qp| qp.qp_num),
        qkey: 0,
        // SAFETY: as above.
        ece: unsafe { ece::own(raw, book) },
    }
}

/// Completes what makes a connection: of one that does not stand no end is told of.
///
/// # Safety
///
/// `raw` is an identifier, and `state` its own.
unsafe fn completed(raw: *mut rdma_cm_id, state: &IdState) -> Result<c_int, Errno> {
    state.book().ended = false;
    // SAFETY: passed on from the caller.
    let outcome = unsafe { complete(raw) };
    state.book().ended = outcome.is_err();
    outcome
}

/// Refuses a request, or a reply.
///
/// # Safety
///
/// `raw` is an identifier; `data` is null, or `length` bytes.
unsafe fn reject(
    raw: *mut rdma_cm_id,
    reason: u32,
    data: *const c_void,
    length: u8,
) -> Result<c_int, Errno> {
    // SAFETY: passed on from the caller.
    let state = unsafe { id(raw) }?;
    let length = if data.is_null() { 0 } else { u32::from(length) };
    // SAFETY: as above.
    check(unsafe { (state.api.cm.reject)(state.handle, reason, data, length) })?;
    Ok(0)
}

entry! {
    /// `rdma_connect(3)`
    fn rdma_connect(raw: *mut rdma_cm_id, param: *mut rdma_conn_param) -> IntMinusOne {
        // SAFETY: the program passes an identifier, and null or valid parameters.
        unsafe {
            let (state, param) = (id(raw)?, param.as_ref());
            let (told, data);
            {
                let mut book = state.book();
                valid(&*raw, &book, param)?;
                settle_limits(&mut book, param, false);
                data = private_data(&book, param);
                told = parameters(raw, &book, param, &data);
            }
            check((state.api.cm.connect)(state.handle, &told))?;
            // It is sent once; a later connection of the same identifier has its own.
            state.book().connect_data.clear();
            completed(raw, state)
        }
    }

    /// `rdma_accept(3)`
    fn rdma_accept(raw: *mut rdma_cm_id, param: *mut rdma_conn_param) -> IntMinusOne {
        // SAFETY: the program passes an identifier, and null or valid parameters.
        unsafe {
            let (state, param) = (id(raw)?, param.as_ref());
            let datagrams = (*raw).qp_type == IBV_QPT_UD;
            let (of_engine, limits) = {
                let mut book = state.book();
                valid(&*raw, &book, param)?;
                settle_limits(&mut book, param, true);
                let of_engine = book.device.is_some_and(|device| device.is_moved);
                let (responder_resources, initiator_depth) =
                    (book.responder_resources, book.initiator_depth);
                (of_engine, Limits { responder_resources, initiator_depth })
            };
            let data = private_data(&state.book(), param);
            // What the engine will refuse leaves the queue pair as it is.
            let moves = !datagrams && !of_engine && !(*raw).qp.is_null();
            let moves = moves && data.len() <= REPLY_DATA;
            if moves {
                to_rts(raw, Some(limits))?;
            }
            let told = parameters(raw, &state.book(), param, &data);
            let accepted = check((state.api.cm.accept)(state.handle, &told));
            if accepted.is_err() && moves {
                let _ = to_error(raw);
            }
            accepted?;
            if !datagrams {
                return completed(raw, state);
            }
            // No event comes, and its listener may wait for the request's to be acknowledged.
            if state.book().synchronous {
                drop_event(raw);
            }
            Ok(0)
        }
    }

    /// `rdma_reject(3)`
    fn rdma_reject(
        raw: *mut rdma_cm_id,
        private_data: *const c_void,
        private_data_len: u8,
    ) -> IntMinusOne {
        // SAFETY: the program passes an identifier, and that many bytes.
        unsafe { reject(raw, RDMA_CM_REJECT_CONSUMER, private_data, private_data_len) }
    }

    /// `rdma_reject_ece`: because of the options of the peer's vendor (`rdma_get_remote_ece(3)`).
    fn rdma_reject_ece(
        raw: *mut rdma_cm_id,
        private_data: *const c_void,
        private_data_len: u8,
    ) -> IntMinusOne {
        // SAFETY: as above.
        unsafe { reject(raw, RDMA_CM_REJECT_VENDOR_OPTION, private_data, private_data_len) }
    }

    /// `rdma_establish(3)`: for identifiers without a queue pair of this library.
    fn rdma_establish(raw: *mut rdma_cm_id) -> IntMinusOne {
        // SAFETY: the program passes an identifier.
        unsafe {
            let state = id(raw)?;
            if !(*raw).qp.is_null() {
                return Err(Errno::EINVAL);
            }
            check((state.api.cm.accept)(state.handle, std::ptr::null()))?;
        }
        Ok(0)
    }

    /// `rdma_notify(3)`
    fn rdma_notify(raw: *mut rdma_cm_id, event: u32) -> IntMinusOne {
        // SAFETY: the program passes an identifier.
        let state = unsafe { id(raw) }?;
        // SAFETY: the handle came from the engine.
        check(unsafe { (state.api.cm.notify)(state.handle, event) })?;
        Ok(0)
    }

    /// `rdma_disconnect(3)`: flushes the queue pair, then tells the peer.
    fn rdma_disconnect(raw: *mut rdma_cm_id) -> IntMinusOne {
        // SAFETY: the program passes an identifier.
        unsafe {
            let state = id(raw)?;
            to_error(raw)?;
            check((state.api.cm.disconnect)(state.handle))?;
            if std::mem::replace(&mut state.book().ended, true) {
                return Ok(0);
            }
            complete(raw)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_limit_is_the_programs_or_what_both_sides_have() {
        assert_eq!(settle(Some(3), None, 16), 3);
        assert_eq!(settle(Some(RDMA_MAX_RESP_RES), None, 16), 16);
        assert_eq!(settle(None, Some(4), 16), 4);
        assert_eq!(settle(Some(RDMA_MAX_RESP_RES), Some(40), 16), 16);
        assert_eq!(settle(Some(0), Some(4), 16), 0);
    }
}
