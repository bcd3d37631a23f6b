//! The structures of verbs.h. What is shown of each is what a program decides, or asks for.

use std::net::Ipv6Addr;

use libc::c_int;
use quipu_abi_types::*;

use crate::call::Call;
use crate::show::{Pointee, opaque, peek};
use crate::value::Value;
use crate::words::{self, bits, word};

/// Fields of a structure.
pub(crate) type Fields = Vec<(&'static str, Value)>;

/// So many elements of a list are shown.
const MAX_SHOWN: usize = 64;

pub(crate) fn number(value: impl Into<i128>) -> Value {
    Value::Number(value.into())
}

pub(crate) fn hex(value: impl Into<u64>) -> Value {
    Value::Hex(value.into())
}

pub(crate) fn address<T>(pointer: *const T) -> Value {
    if pointer.is_null() { Value::Null } else { hex(pointer.addr() as u64) }
}

opaque!(
    ibv_context,
    ibv_device,
    ibv_pd,
    ibv_mw,
    ibv_dm,
    ibv_buf,
    ibv_td,
    ibv_comp_channel,
    ibv_xrcd,
    ibv_grh,
    ibv_ece,
    ibv_wc_tm_info,
    ibv_device_attr,
    ibv_device_attr_ex,
    ibv_query_device_ex_input,
    ibv_values_ex,
    ibv_parent_domain_init_attr,
    ibv_td_init_attr,
    ibv_xrcd_init_attr,
    ibv_qp_open_attr,
    ibv_poll_cq_attr,
    ibv_data_buf,
    ibv_counter_attach_attr,
    ibv_counters,
    ibv_counters_init_attr,
    ibv_flow,
    ibv_flow_attr,
    ibv_rwq_ind_table,
    ibv_rwq_ind_table_init_attr,
    ibv_wq_attr,
    ibv_wq_init_attr,
);

/// Objects by what else names them: shown when they are made.
macro_rules! objects {
    ($($of:ty: $($field:ident $how:ident),*;)*) => {$(
        impl Pointee for $of {
            unsafe fn describe_new(this: *const Self) -> Fields {
                // SAFETY: passed on from the caller.
                let this = unsafe { &*this };
                vec![$((stringify!($field), $how(this.$field))),*]
            }
        }
    )*};
}

objects! {
    ibv_qp: qp_num hex;
    ibv_mr: lkey hex, rkey hex;
    ibv_cq: cqe number;
    ibv_ah: handle hex;
    ibv_wq: wq_num hex;
}

impl Pointee for ibv_cq_ex {
    /// The completion that was found, for the calls that look for one.
    unsafe fn describe(this: *const Self, call: &Call<'_>) -> Option<Value> {
        if !["ibv_start_poll", "ibv_next_poll"].contains(&call.function()) || call.failed() {
            return None;
        }
        // SAFETY: passed on from the caller.
        let this = unsafe { &*this };
        Some(Value::Record(vec![
            ("address", address(this)),
            ("wr_id", hex(this.wr_id)),
            ("status", word(words::STATUSES, this.status)),
        ]))
    }
}

impl Pointee for ibv_srq {}

impl Pointee for ibv_qp_ex {
    /// What the program has left there for the work request that a call begins.
    unsafe fn describe(this: *const Self, call: &Call<'_>) -> Option<Value> {
        let operation = call.function().strip_prefix("ibv_wr_")?;
        if ["start", "complete", "abort"].contains(&operation) || operation.starts_with("set_") {
            return None;
        }
        // SAFETY: passed on from the caller.
        let this = unsafe { &*this };
        Some(Value::Record(vec![
            ("address", address(this)),
            ("wr_id", hex(this.wr_id)),
            ("wr_flags", bits(words::SEND_FLAGS, this.wr_flags.into())),
        ]))
    }
}

/// A scatter/gather list; its address if it has less than `count` elements, which may be more than a queue
/// takes.
///
/// # Safety
///
/// `list` is null or has elements, aligned or not.
unsafe fn sges(list: *const ibv_sge, count: usize) -> Value {
    if list.is_null() {
        return Value::Null;
    }
    // SAFETY: an element consists of integers.
    let Some(list) = (unsafe { peek(list, count.min(MAX_SHOWN)) }) else { return address(list) };
    let shown = list.iter().map(|sge| {
        Value::Record(vec![
            ("addr", hex(sge.addr)),
            ("length", number(sge.length)),
            ("lkey", hex(sge.lkey)),
        ])
    });
    Value::List(shown.collect())
}

impl Pointee for ibv_sge {
    unsafe fn describe(this: *const Self, call: &Call<'_>) -> Option<Value> {
        let count = usize::try_from(call.number("count").unwrap_or(1)).unwrap_or(0);
        // SAFETY: passed on from the caller.
        Some(unsafe { sges(this, count) })
    }
}

fn count(number: c_int) -> usize {
    usize::try_from(number).unwrap_or(0)
}

impl Pointee for ibv_send_wr {
    unsafe fn describe(this: *const Self, call: &Call<'_>) -> Option<Value> {
        let qp_type = call.qp_type();
        let mut list = Vec::new();
        let mut next = this;
        // SAFETY: passed on from the caller: a list of valid requests, ended by null.
        while let Some(wr) = unsafe { next.as_ref() }.filter(|_| list.len() < MAX_SHOWN) {
            // SAFETY: as above.
            list.push(unsafe { send(wr, qp_type) });
            next = wr.next;
        }
        Some(Value::List(list))
    }
}

/// A work request to send by a queue pair of that type.
///
/// # Safety
///
/// Its pointers are valid for its opcode.
unsafe fn send(wr: &ibv_send_wr, qp_type: Option<u32>) -> Value {
    let mut fields = vec![("wr_id", hex(wr.wr_id)), ("opcode", word(words::OPCODES, wr.opcode))];
    if wr.send_flags != 0 {
        fields.push(("send_flags", bits(words::SEND_FLAGS, wr.send_flags.into())));
    }
    let local = matches!(wr.opcode, IBV_WR_LOCAL_INV | IBV_WR_BIND_MW);
    if !local {
        // SAFETY: passed on from the caller.
        fields.push(("sg_list", unsafe { sges(wr.sg_list, count(wr.num_sge)) }));
    }
    // SAFETY: the opcode says which part of the unions is in use; all parts that are read consist of
    // integers and addresses.
    let (rdma, atomic, bind) = unsafe { (&wr.wr.rdma, &wr.wr.atomic, &wr.ext.bind_mw) };
    match wr.opcode {
        IBV_WR_RDMA_WRITE | IBV_WR_RDMA_WRITE_WITH_IMM | IBV_WR_RDMA_READ | IBV_WR_ATOMIC_WRITE => {
            fields.push(("remote_addr", hex(rdma.remote_addr)));
            fields.push(("rkey", hex(rdma.rkey)));
        }
        IBV_WR_ATOMIC_CMP_AND_SWP | IBV_WR_ATOMIC_FETCH_AND_ADD => {
            fields.push(("remote_addr", hex(atomic.remote_addr)));
            fields.push(("rkey", hex(atomic.rkey)));
            fields.push(("compare_add", hex(atomic.compare_add)));
            if wr.opcode == IBV_WR_ATOMIC_CMP_AND_SWP {
                fields.push(("swap", hex(atomic.swap)));
            }
        }
        IBV_WR_BIND_MW => {
            fields.push(("mw", address(bind.mw)));
            fields.push(("rkey", hex(bind.rkey)));
            fields.push(("addr", hex(bind.bind_info.addr)));
            fields.push(("length", number(bind.bind_info.length)));
            let access = bind.bind_info.mw_access_flags;
            fields.push(("access", bits(words::ACCESS, access.into())));
        }
        _ => {}
    }
    // SAFETY: the type of the queue pair says which parts are in use: addresses and integers.
    let (ud, xrc) = unsafe { (&wr.wr.ud, &wr.qp_type.xrc) };
    match qp_type {
        Some(IBV_QPT_UD) => {
            fields.push(("ah", address(ud.ah)));
            fields.push(("remote_qpn", hex(ud.remote_qpn)));
            fields.push(("remote_qkey", hex(ud.remote_qkey)));
        }
        Some(IBV_QPT_XRC_SEND) => fields.push(("remote_srqn", hex(xrc.remote_srqn))),
        _ => {}
    }
    match wr.opcode {
        IBV_WR_SEND_WITH_IMM | IBV_WR_RDMA_WRITE_WITH_IMM => {
            fields.push(("imm_data", hex(u32::from_be(wr.imm_data))));
        }
        IBV_WR_SEND_WITH_INV | IBV_WR_LOCAL_INV => {
            fields.push(("invalidate_rkey", hex(wr.imm_data)));
        }
        _ => {}
    }
    Value::Record(fields)
}

impl Pointee for ibv_recv_wr {
    unsafe fn describe(this: *const Self, _: &Call<'_>) -> Option<Value> {
        let mut list = Vec::new();
        let mut next = this;
        // SAFETY: passed on from the caller: a list of valid requests, ended by null.
        while let Some(wr) = unsafe { next.as_ref() }.filter(|_| list.len() < MAX_SHOWN) {
            // SAFETY: as above.
            let sg_list = unsafe { sges(wr.sg_list, count(wr.num_sge)) };
            list.push(Value::Record(vec![("wr_id", hex(wr.wr_id)), ("sg_list", sg_list)]));
            next = wr.next;
        }
        Some(Value::List(list))
    }
}

fn completion(wc: &ibv_wc) -> Value {
    let mut fields = vec![
        ("wr_id", hex(wc.wr_id)),
        ("status", word(words::STATUSES, wc.status)),
        ("qp_num", hex(wc.qp_num)),
    ];
    // Of a failed request nothing else is defined (ibv_poll_cq(3)).
    if wc.status != IBV_WC_SUCCESS {
        fields.push(("vendor_err", hex(wc.vendor_err)));
        return Value::Record(fields);
    }
    fields.push(("opcode", word(words::WC_OPCODES, wc.opcode)));
    fields.push(("byte_len", number(wc.byte_len)));
    if wc.wc_flags != 0 {
        fields.push(("wc_flags", bits(words::WC_FLAGS, wc.wc_flags.into())));
    }
    if wc.wc_flags & IBV_WC_WITH_IMM != 0 {
        fields.push(("imm_data", hex(u32::from_be(wc.imm_data))));
    }
    if wc.wc_flags & IBV_WC_WITH_INV != 0 {
        fields.push(("invalidated_rkey", hex(wc.imm_data)));
    }
    if wc.wc_flags & IBV_WC_GRH != 0 {
        fields.push(("src_qp", hex(wc.src_qp)));
    }
    Value::Record(fields)
}

impl Pointee for ibv_wc {
    unsafe fn describe(this: *const Self, call: &Call<'_>) -> Option<Value> {
        let polled = call.function() == "ibv_poll_cq";
        let found = if polled { call.result().unwrap_or(0) } else { 1 };
        let found = usize::try_from(found).unwrap_or(0).min(MAX_SHOWN);
        // SAFETY: passed on from the caller: a poll fills as many as it says.
        let list = (0..found).map(|index| completion(unsafe { &*this.add(index) }));
        Some(Value::List(list.collect()))
    }
}

/// A structure whose fields are shown one by one.
macro_rules! structures {
    ($($of:ty: $($field:ident $how:expr),*;)*) => {$(
        impl Pointee for $of {
            unsafe fn describe(this: *const Self, _: &Call<'_>) -> Option<Value> {
                // SAFETY: passed on from the caller.
                let this = unsafe { &*this };
                Some(Value::Record(vec![$((stringify!($field), $how(this.$field))),*]))
            }
        }
    )*};
}

fn cap(cap: ibv_qp_cap) -> Value {
    Value::Record(vec![
        ("max_send_wr", number(cap.max_send_wr)),
        ("max_recv_wr", number(cap.max_recv_wr)),
        ("max_send_sge", number(cap.max_send_sge)),
        ("max_recv_sge", number(cap.max_recv_sge)),
        ("max_inline_data", number(cap.max_inline_data)),
    ])
}

fn srq_attr(attr: ibv_srq_attr) -> Value {
    Value::Record(vec![
        ("max_wr", number(attr.max_wr)),
        ("max_sge", number(attr.max_sge)),
        ("srq_limit", number(attr.srq_limit)),
    ])
}

pub(crate) fn gid(gid: ibv_gid) -> Value {
    // SAFETY: every bit pattern is 16 bytes.
    let raw = unsafe { gid.raw };
    Value::Word(Ipv6Addr::from(raw).to_string())
}

pub(crate) fn ah_attr(attr: ibv_ah_attr) -> Value {
    let mut fields = vec![("port_num", number(attr.port_num)), ("sl", number(attr.sl))];
    if attr.is_global != 0 {
        let grh = &attr.grh;
        fields.push(("dgid", gid(grh.dgid)));
        fields.push(("sgid_index", number(grh.sgid_index)));
        fields.push(("hop_limit", number(grh.hop_limit)));
        fields.push(("traffic_class", number(grh.traffic_class)));
    } else {
        fields.push(("dlid", number(attr.dlid)));
    }
    Value::Record(fields)
}

fn qp_type(value: u32) -> Value {
    word(words::QP_TYPES, value)
}

fn access(value: u32) -> Value {
    bits(words::ACCESS, value.into())
}

fn event_type(value: u32) -> Value {
    word(words::EVENTS, value)
}

fn binding(info: ibv_mw_bind_info) -> Value {
    Value::Record(vec![
        ("mr", address(info.mr)),
        ("addr", hex(info.addr)),
        ("length", number(info.length)),
        ("access", access(info.mw_access_flags)),
    ])
}

fn moderation(moderate: ibv_moderate_cq) -> Value {
    let (count, period) = (number(moderate.cq_count), number(moderate.cq_period));
    Value::Record(vec![("cq_count", count), ("cq_period", period)])
}

fn length(value: usize) -> Value {
    Value::Number(value as i128)
}

structures! {
    ibv_qp_init_attr: qp_type qp_type, send_cq address, recv_cq address, srq address, cap cap,
        sq_sig_all number;
    ibv_srq_attr: max_wr number, max_sge number, srq_limit number;
    ibv_srq_init_attr: attr srq_attr;
    ibv_port_attr: state |state| word(words::PORT_STATES, state), active_mtu mtu, lid number;
    ibv_mw_bind: wr_id hex, send_flags |flags| bits(words::SEND_FLAGS, u64::from(flags)),
        bind_info binding;
    ibv_mw_bind_info: mr address, addr hex, length number;
    ibv_modify_cq_attr: attr_mask hex, moderate moderation;
    ibv_alloc_dm_attr: length length, log_align_req number;
    ibv_mr_init_attr: addr address, length length, iova hex;
}

impl Pointee for ibv_gid_entry {
    unsafe fn describe(this: *const Self, call: &Call<'_>) -> Option<Value> {
        // Of a table, nothing may have been asked.
        if call.function().contains("table") && call.result() == Some(0) {
            return None;
        }
        // SAFETY: passed on from the caller.
        let this = unsafe { &*this };
        Some(Value::Record(vec![
            ("gid", gid(this.gid)),
            ("gid_index", number(this.gid_index)),
            ("port_num", number(this.port_num)),
            ("gid_type", number(this.gid_type)),
            ("ndev_ifindex", number(this.ndev_ifindex)),
        ]))
    }
}

impl Pointee for ibv_ah_attr {
    unsafe fn describe(this: *const Self, _: &Call<'_>) -> Option<Value> {
        // SAFETY: passed on from the caller.
        Some(ah_attr(unsafe { *this }))
    }
}

impl Pointee for ibv_gid {
    unsafe fn describe(this: *const Self, _: &Call<'_>) -> Option<Value> {
        // SAFETY: passed on from the caller.
        Some(gid(unsafe { *this }))
    }
}

impl Pointee for ibv_qp_init_attr_ex {
    unsafe fn describe(this: *const Self, _: &Call<'_>) -> Option<Value> {
        // SAFETY: passed on from the caller.
        let this = unsafe { &*this };
        let mut fields = vec![
            ("qp_type", qp_type(this.qp_type)),
            ("send_cq", address(this.send_cq)),
            ("recv_cq", address(this.recv_cq)),
            ("srq", address(this.srq)),
            ("cap", cap(this.cap)),
            ("sq_sig_all", number(this.sq_sig_all)),
            ("comp_mask", hex(this.comp_mask)),
        ];
        let has = |bit| this.comp_mask & bit != 0;
        fields.extend(has(IBV_QP_INIT_ATTR_PD).then(|| ("pd", address(this.pd))));
        fields.extend(has(IBV_QP_INIT_ATTR_XRCD).then(|| ("xrcd", address(this.xrcd))));
        let flags = has(IBV_QP_INIT_ATTR_CREATE_FLAGS).then(|| hex(this.create_flags));
        fields.extend(flags.map(|flags| ("create_flags", flags)));
        let operations = has(IBV_QP_INIT_ATTR_SEND_OPS_FLAGS).then(|| hex(this.send_ops_flags));
        fields.extend(operations.map(|operations| ("send_ops_flags", operations)));
        Some(Value::Record(fields))
    }
}

impl Pointee for ibv_srq_init_attr_ex {
    unsafe fn describe(this: *const Self, _: &Call<'_>) -> Option<Value> {
        // SAFETY: passed on from the caller.
        let this = unsafe { &*this };
        let mut fields = vec![("attr", srq_attr(this.attr)), ("comp_mask", hex(this.comp_mask))];
        let has = |bit| this.comp_mask & bit != 0;
        fields.extend(has(IBV_SRQ_INIT_ATTR_TYPE).then(|| ("srq_type", number(this.srq_type))));
        fields.extend(has(IBV_SRQ_INIT_ATTR_PD).then(|| ("pd", address(this.pd))));
        fields.extend(has(IBV_SRQ_INIT_ATTR_XRCD).then(|| ("xrcd", address(this.xrcd))));
        fields.extend(has(IBV_SRQ_INIT_ATTR_CQ).then(|| ("cq", address(this.cq))));
        Some(Value::Record(fields))
    }
}

impl Pointee for ibv_cq_init_attr_ex {
    unsafe fn describe(this: *const Self, _: &Call<'_>) -> Option<Value> {
        // SAFETY: passed on from the caller.
        let this = unsafe { &*this };
        let mut fields = vec![
            ("cqe", number(this.cqe)),
            ("channel", address(this.channel)),
            ("comp_vector", number(this.comp_vector)),
            ("wc_flags", hex(this.wc_flags)),
            ("comp_mask", hex(this.comp_mask)),
        ];
        let flags = (this.comp_mask & IBV_CQ_INIT_ATTR_MASK_FLAGS != 0).then(|| hex(this.flags));
        fields.extend(flags.map(|flags| ("flags", flags)));
        Some(Value::Record(fields))
    }
}

fn state(value: u32) -> Value {
    word(words::QP_STATES, value)
}

fn mtu(value: u32) -> Value {
    word(words::MTUS, value)
}

impl Pointee for ibv_qp_attr {
    /// Only the attributes that the mask names: the others need not have a value.
    unsafe fn describe(this: *const Self, call: &Call<'_>) -> Option<Value> {
        // SAFETY: passed on from the caller.
        let this = unsafe { &*this };
        let mask = call.number("mask").unwrap_or(0) as u32;
        let all = [
            (IBV_QP_STATE, "qp_state", state(this.qp_state)),
            (IBV_QP_CUR_STATE, "cur_qp_state", state(this.cur_qp_state)),
            (IBV_QP_ACCESS_FLAGS, "qp_access_flags", access(this.qp_access_flags)),
            (IBV_QP_PKEY_INDEX, "pkey_index", number(this.pkey_index)),
            (IBV_QP_PORT, "port_num", number(this.port_num)),
            (IBV_QP_QKEY, "qkey", hex(this.qkey)),
            (IBV_QP_AV, "ah_attr", ah_attr(this.ah_attr)),
            (IBV_QP_PATH_MTU, "path_mtu", mtu(this.path_mtu)),
            (IBV_QP_DEST_QPN, "dest_qp_num", hex(this.dest_qp_num)),
            (IBV_QP_RQ_PSN, "rq_psn", hex(this.rq_psn)),
            (IBV_QP_SQ_PSN, "sq_psn", hex(this.sq_psn)),
            (IBV_QP_TIMEOUT, "timeout", number(this.timeout)),
            (IBV_QP_RETRY_CNT, "retry_cnt", number(this.retry_cnt)),
            (IBV_QP_RNR_RETRY, "rnr_retry", number(this.rnr_retry)),
            (IBV_QP_MIN_RNR_TIMER, "min_rnr_timer", number(this.min_rnr_timer)),
            (IBV_QP_MAX_QP_RD_ATOMIC, "max_rd_atomic", number(this.max_rd_atomic)),
            (IBV_QP_MAX_DEST_RD_ATOMIC, "max_dest_rd_atomic", number(this.max_dest_rd_atomic)),
            (IBV_QP_CAP, "cap", cap(this.cap)),
        ];
        let named = all.into_iter().filter(|(bit, ..)| mask & bit != 0);
        Some(Value::Record(named.map(|(_, name, value)| (name, value)).collect()))
    }
}

impl Pointee for ibv_async_event {
    unsafe fn describe(this: *const Self, _: &Call<'_>) -> Option<Value> {
        // SAFETY: passed on from the caller.
        let this = unsafe { &*this };
        let mut fields = vec![("event_type", event_type(this.event_type))];
        // SAFETY: the type says which part of the union is in use; an address or a number.
        let element = unsafe {
            match this.event_type {
                IBV_EVENT_CQ_ERR => ("cq", address(this.element.cq)),
                IBV_EVENT_SRQ_ERR | IBV_EVENT_SRQ_LIMIT_REACHED => {
                    ("srq", address(this.element.srq))
                }
                IBV_EVENT_QP_FATAL..=IBV_EVENT_PATH_MIG_ERR | IBV_EVENT_QP_LAST_WQE_REACHED => {
                    ("qp", address(this.element.qp))
                }
                _ => ("port_num", number(this.element.port_num)),
            }
        };
        fields.push(element);
        Some(Value::Record(fields))
    }
}
