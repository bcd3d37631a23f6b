//! Queue pairs.

use std::sync::Arc;

use libc::c_void;
use quipu_cabi::{Errno, Handle, IntMinusOne, Null, Tagged, entry};
use quipu_host::EngineError;
use quipu_host::nic::{QpAttr, QpAttrMask, QpCap, QpId, QpInit, QpState, QpType};

use crate::adapter::{Adapter, Known, Opaque, adapter, lock, qpip_adapter};
use crate::cq::{cq, qpip_cq};
use crate::error::{Outcome, fail, no_object, refused};

/// Octets that a send may have copied.
pub(crate) const INLINE: u32 = 64;
/// What a queue holds, and of how many pieces a request is, where the program does not say.
const WORK: u32 = 128;
const SEGMENTS: u32 = 4;

/// `qpip_qp`
pub type qpip_qp = Opaque;

pub(crate) struct Private {
    pub(crate) adapter: Arc<Adapter>,
    pub(crate) id: QpId,
    pub(crate) datagrams: bool,
    /// Pieces of memory that a request may have.
    pub(crate) max_segments: u32,
}

impl Tagged for Private {
    const TAG: u64 = 0x7170_6970_7170_7170;
}

type Qp = Handle<Opaque, Private>;

/// `struct qpip_qp_init`
#[repr(C)]
#[derive(Clone, Copy)]
pub struct qpip_qp_init {
    pub(crate) kind: u32,
    pub(crate) max_sends: u32,
    pub(crate) max_receives: u32,
    pub(crate) max_segments: u32,
    pub(crate) send_cq: *mut qpip_cq,
    pub(crate) receive_cq: *mut qpip_cq,
    pub(crate) context: *mut c_void,
}

/// `enum qpip_type`
const TCP: u32 = 1;
const UDP: u32 = 2;

/// The queue pair behind a pointer.
///
/// # Safety
///
/// As [`Handle::get`].
pub(crate) unsafe fn qp<'a>(raw: *const qpip_qp) -> Outcome<&'a Private> {
    // SAFETY: passed on from the caller.
    Ok(unsafe { Qp::get(raw) }.map_err(no_object("queue pair"))?)
}

fn or(wanted: u32, default: u32) -> u32 {
    if wanted == 0 { default } else { wanted }
}

/// Creates a queue pair in INIT: receives can be posted to it.
fn create(adapter: &Adapter, wanted: &QpInit) -> Result<QpId, EngineError> {
    let engine = &adapter.engine;
    let (id, _, _) = engine.create_qp(adapter.context, wanted)?;
    let attr = QpAttr { state: QpState::Init, port_num: 1, ..QpAttr::default() };
    let mask = QpAttrMask::STATE | QpAttrMask::PKEY_INDEX | QpAttrMask::PORT;
    if let Err(error) = engine.modify_qp(id, &attr, mask) {
        let _ = engine.destroy_qp(id);
        return Err(error);
    }
    Ok(id)
}

entry! {
    /// `qpip_create`
    fn qpip_create(raw: *mut qpip_adapter, init: *const qpip_qp_init) -> Null<qpip_qp> {
        // SAFETY: the program passes what qpip_open gave.
        let adapter = unsafe { adapter(raw) }?;
        // SAFETY: the program passes null or a valid pointer.
        let Some(init) = (unsafe { init.as_ref() }) else {
            return Err(fail(Errno::EINVAL, "the pointer to the attributes is NULL"));
        };
        // SAFETY: the program passes what qpip_cq_create gave.
        let (send_cq, recv_cq) = unsafe { (cq(init.send_cq)?, cq(init.receive_cq)?) };
        if [send_cq, recv_cq].iter().any(|cq| !Arc::ptr_eq(&cq.adapter, &adapter)) {
            return Err(fail(Errno::EINVAL, "a completion queue belongs to another adapter"));
        }
        let qp_type = match init.kind {
            TCP => QpType::Tcp,
            UDP => QpType::Udp,
            other => {
                let words = format_args!("{other} is not a type; use QPIP_TCP or QPIP_UDP");
                return Err(fail(Errno::EINVAL, words));
            }
        };
        let segments = or(init.max_segments, SEGMENTS);
        let cap = QpCap {
            max_send_wr: or(init.max_sends, WORK),
            max_recv_wr: or(init.max_receives, WORK),
            max_send_sge: segments,
            max_recv_sge: segments,
            max_inline_data: INLINE,
        };
        let (send_cq, recv_cq) = (send_cq.id, recv_cq.id);
        let wanted =
            QpInit { pd: adapter.pd, send_cq, recv_cq, srq: None, cap, qp_type, sq_sig_all: false };
        let made = create(&adapter, &wanted);
        let id = made.map_err(refused("the queue pair cannot be created"))?;
        let known = Arc::clone(&adapter);
        let (datagrams, max_segments) = (init.kind == UDP, segments);
        let qp = Qp::create(Opaque::new(), Private { adapter, id, datagrams, max_segments });
        let addresses = Known { qp: qp as usize, context: init.context as usize };
        lock(&known.qps).insert(id, addresses);
        Ok(qp)
    }

    /// `qpip_destroy`
    fn qpip_destroy(raw: *mut qpip_qp) -> IntMinusOne {
        // SAFETY: the program passes what qpip_create gave.
        let qp = unsafe { qp(raw) }?;
        // From here on no event names it.
        lock(&qp.adapter.qps).remove(&qp.id);
        let destroyed = qp.adapter.engine.destroy_qp(qp.id);
        destroyed.map_err(refused("the queue pair cannot be destroyed"))?;
        // SAFETY: as above; that nobody uses it any more is the program's to see to.
        drop(unsafe { Qp::take(raw) });
        Ok(0)
    }
}
