//! An engine without a network: every send completes at once, receives wait. It stands in for the
//! real one where the facade itself is tested.

use std::collections::{HashMap, VecDeque};
use std::sync::{Mutex, MutexGuard};

use libc::{c_char, c_int};
use quipu_abi_types::*;

const OK: i32 = EngineStatus::Ok as i32;
const INVALID: i32 = EngineStatus::Invalid as i32;
const BUSY: i32 = EngineStatus::Busy as i32;

/// A completion queue: who it is, where its events go, what is in it.
#[derive(Default)]
struct Cq {
    cookie: u64,
    channel: u64,
    armed: bool,
    wcs: VecDeque<ibv_wc>,
    events: u32,
}

struct Qp {
    cookie: u64,
    send_cq: u64,
    state: u32,
    cap: ibv_qp_cap,
    events: u32,
    pd: u64,
}

/// A queue of events behind a descriptor that counts them.
struct Events<T> {
    fd: c_int,
    queue: VecDeque<T>,
}

#[derive(Default)]
struct State {
    next: u64,
    /// How many objects are in each domain.
    pds: HashMap<u64, u32>,
    children: HashMap<u64, u64>,
    cqs: HashMap<u64, Cq>,
    qps: HashMap<u64, Qp>,
    channels: HashMap<u64, Events<u64>>,
    contexts: HashMap<u64, Events<EngineAsyncEvent>>,
}

static STATE: Mutex<Option<State>> = Mutex::new(None);

struct Locked(MutexGuard<'static, Option<State>>);

impl std::ops::Deref for Locked {
    type Target = State;
    fn deref(&self) -> &State {
        self.0.as_ref().unwrap()
    }
}

impl std::ops::DerefMut for Locked {
    fn deref_mut(&mut self) -> &mut State {
        self.0.as_mut().unwrap()
    }
}

fn state() -> Locked {
    let mut state = STATE.lock().unwrap();
    state.get_or_insert_with(State::default);
    Locked(state)
}

impl State {
    fn handle(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    /// A new object of a domain.
    fn child(&mut self, pd: u64) -> Option<u64> {
        *self.pds.get_mut(&pd)? += 1;
        let handle = self.handle();
        self.children.insert(handle, pd);
        Some(handle)
    }

    fn drop_child(&mut self, handle: u64) -> i32 {
        let Some(pd) = self.children.remove(&handle) else {
            return INVALID;
        };
        *self.pds.get_mut(&pd).unwrap() -= 1;
        OK
    }

    fn complete(&mut self, cq: u64, wc: ibv_wc) {
        let cq_state = self.cqs.get_mut(&cq).unwrap();
        cq_state.wcs.push_back(wc);
        if std::mem::take(&mut cq_state.armed)
            && let Some(channel) = self.channels.get_mut(&cq_state.channel)
        {
            channel.queue.push_back(cq);
            signal(channel.fd);
        }
    }
}

fn eventfd() -> c_int {
    // SAFETY: eventfd(2).
    unsafe { libc::eventfd(0, libc::EFD_SEMAPHORE | libc::EFD_CLOEXEC) }
}

fn signal(fd: c_int) {
    // SAFETY: eventfd_write(3) on a descriptor of ours.
    unsafe { libc::eventfd_write(fd, 1) };
}

/// Takes one count, waiting if the descriptor blocks.
fn take(fd: c_int) -> i32 {
    let mut count = 0;
    // SAFETY: eventfd_read(3) on a descriptor of ours.
    if unsafe { libc::eventfd_read(fd, &mut count) } == 0 {
        return OK;
    }
    match std::io::Error::last_os_error().raw_os_error() {
        Some(libc::EAGAIN) => EngineStatus::WouldBlock.code(),
        _ => EngineStatus::Interrupted.code(),
    }
}

/// Makes the engine report an asynchronous event about a queue pair.
#[allow(dead_code)] // Not used where this is a library.
pub(super) fn raise(qp_num: u32, event_type: u32) {
    let mut state = state();
    let cookie = state.qps[&u64::from(qp_num)].cookie;
    let event = EngineAsyncEvent { event_type, port_num: 0, cookie };
    // The tests open one context each and look for their own events.
    for context in state.contexts.values_mut() {
        context.queue.push_back(event);
        signal(context.fd);
    }
}

pub(super) fn gid() -> ibv_gid_entry {
    let gid = ibv_gid { raw: [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 192, 0, 2, 1] };
    let (gid_type, ndev_ifindex) = (IBV_GID_TYPE_ROCE_V2, 1);
    ibv_gid_entry { gid, gid_index: 0, port_num: 1, gid_type, ndev_ifindex }
}

/// Defines functions of the table. Each runs with valid pointers: only the facade calls them.
macro_rules! table {
    ($($name:ident: $field:ident ($($arg:ident: $ty:ty),* $(,)?) $body:block)*) => {
        $(
            #[allow(unused_variables)]
            unsafe extern "C" fn $name($($arg: $ty),*) -> i32 {
                // SAFETY: the facade passes pointers that are valid for the call.
                #[allow(unused_unsafe)]
                unsafe { $body }
            }
        )*
        pub(super) static API: EngineApi = EngineApi {
            version: ENGINE_API_VERSION,
            size: size_of::<EngineApi>() as u32,
            $($field: $name,)*
            raw: EngineRawApi::NONE,
            cm: EngineCmApi::NONE,
        };
    };
}

table! {
    list: list_devices(out: *mut EngineDevice, max: u32, count: *mut u32) {
        let mut name = [0; 64];
        for (slot, byte) in name.iter_mut().zip(b"quipu0") {
            *slot = *byte as c_char;
        }
        let (node_type, transport_type) = (IBV_NODE_CA, IBV_TRANSPORT_IB);
        let (guid, num_comp_vectors, index, gid) = (7, 1, 0, gid());
        let (link_layer, lid) = (IBV_LINK_LAYER_ETHERNET, 0);
        *out = EngineDevice {
            name, guid, node_type, transport_type, num_comp_vectors, index, gid, link_layer, lid,
        };
        *count = 1;
        OK
    }
    open_device: open(name: *const c_char, out: *mut EngineOpened) {
        let mut state = state();
        let handle = state.handle();
        let async_fd = eventfd();
        state.contexts.insert(handle, Events { fd: async_fd, queue: VecDeque::new() });
        *out = EngineOpened { context: ContextHandle(handle), async_fd };
        OK
    }
    close_device: close(context: ContextHandle) {
        let Some(events) = state().contexts.remove(&context.0) else { return INVALID };
        libc::close(events.fd);
        OK
    }
    device: query_device(context: ContextHandle, out: *mut ibv_device_attr_ex) {
        (*out).orig_attr.phys_port_cnt = 1;
        (*out).orig_attr.max_qp = 77;
        (*out).phys_port_cnt_ex = 1;
        OK
    }
    port: query_port(context: ContextHandle, port: u32, out: *mut ibv_port_attr) {
        if port != 1 {
            return INVALID;
        }
        (*out).state = IBV_PORT_ACTIVE;
        (*out).gid_tbl_len = 1;
        (*out).link_layer = IBV_LINK_LAYER_ETHERNET;
        (*out).port_cap_flags2 = 0x1234;
        (*out).active_speed_ex = 0x5678;
        OK
    }
    row: query_gid(context: ContextHandle, port: u32, index: u32, out: *mut ibv_gid_entry) {
        if port != 1 || index != 0 {
            return INVALID;
        }
        *out = gid();
        OK
    }
    async_event: get_async_event(context: ContextHandle, out: *mut EngineAsyncEvent) {
        let fd = state().contexts[&context.0].fd;
        let taken = take(fd);
        if taken != OK {
            return taken;
        }
        let mut state = state();
        let event = state.contexts.get_mut(&context.0).unwrap().queue.pop_front().unwrap();
        if let Some(qp) = state.qps.values_mut().find(|qp| qp.cookie == event.cookie) {
            qp.events += 1;
        }
        *out = event;
        OK
    }
    new_pd: alloc_pd(context: ContextHandle, out: *mut PdHandle) {
        let mut state = state();
        let handle = state.handle();
        state.pds.insert(handle, 0);
        *out = PdHandle(handle);
        OK
    }
    free_pd: dealloc_pd(pd: PdHandle) {
        let mut state = state();
        match state.pds.get(&pd.0) {
            None => INVALID,
            Some(0) => { state.pds.remove(&pd.0); OK }
            Some(_) => BUSY,
        }
    }
    new_mr: reg_mr(pd: PdHandle, init: *const EngineMrInit, out: *mut EngineMr) {
        let Some(handle) = state().child(pd.0) else { return INVALID };
        let key = handle as u32;
        *out = EngineMr { mr: MrHandle(handle), lkey: key, rkey: key ^ (*init).iova as u32 };
        OK
    }
    again_mr: rereg_mr(
        mr: MrHandle, flags: u32, pd: PdHandle, init: *const EngineMrInit, out: *mut EngineMr,
    ) {
        *out = EngineMr { mr, lkey: 5, rkey: 6 };
        OK
    }
    free_mr: dereg_mr(mr: MrHandle) { state().drop_child(mr.0) }
    new_mw: alloc_mw(pd: PdHandle, mw_type: u32, out: *mut EngineMw) {
        let Some(handle) = state().child(pd.0) else { return INVALID };
        *out = EngineMw { mw: MwHandle(handle), rkey: (handle as u32) << 8 };
        OK
    }
    free_mw: dealloc_mw(mw: MwHandle) { state().drop_child(mw.0) }
    new_channel: create_channel(context: ContextHandle, out: *mut EngineChannel) {
        let mut state = state();
        let handle = state.handle();
        let fd = eventfd();
        state.channels.insert(handle, Events { fd, queue: VecDeque::new() });
        *out = EngineChannel { channel: ChannelHandle(handle), fd };
        OK
    }
    free_channel: destroy_channel(channel: ChannelHandle) {
        let mut state = state();
        if state.cqs.values().any(|cq| cq.channel == channel.0) {
            return BUSY;
        }
        libc::close(state.channels.remove(&channel.0).unwrap().fd);
        OK
    }
    comp_event: get_comp_event(channel: ChannelHandle, cookie: *mut u64) {
        let fd = state().channels[&channel.0].fd;
        let taken = take(fd);
        if taken != OK {
            return taken;
        }
        let mut state = state();
        let cq = state.channels.get_mut(&channel.0).unwrap().queue.pop_front().unwrap();
        let cq = state.cqs.get_mut(&cq).unwrap();
        cq.events += 1;
        *cookie = cq.cookie;
        OK
    }
    watch: poll(fds: *mut libc::pollfd, count: usize, timeout_ns: i64, ready: *mut usize) {
        INVALID
    }
    new_cq: create_cq(context: ContextHandle, init: *const EngineCqInit, out: *mut EngineCq) {
        let mut state = state();
        let handle = state.handle();
        let EngineCqInit { cookie, channel, cqe, .. } = *init;
        state.cqs.insert(handle, Cq { cookie, channel: channel.0, ..Cq::default() });
        *out = EngineCq { cq: CqHandle(handle), cqe: cqe.next_power_of_two() };
        OK
    }
    size_cq: resize_cq(cq: CqHandle, cqe: u32, actual: *mut u32) {
        *actual = cqe.next_power_of_two();
        OK
    }
    free_cq: destroy_cq(cq: CqHandle, out: *mut EngineEventsReported) {
        let mut state = state();
        if state.qps.values().any(|qp| qp.send_cq == cq.0) {
            return BUSY;
        }
        *out = EngineEventsReported { comp: state.cqs.remove(&cq.0).unwrap().events, r#async: 0 };
        OK
    }
    poll: poll_cq(cq: CqHandle, max: i32, wc: *mut ibv_wc) {
        let mut state = state();
        let wcs = &mut state.cqs.get_mut(&cq.0).unwrap().wcs;
        let count = wcs.len().min(max as usize);
        for (index, found) in wcs.drain(..count).enumerate() {
            wc.add(index).write(found);
        }
        count as i32
    }
    arm: req_notify_cq(cq: CqHandle, solicited_only: i32) {
        state().cqs.get_mut(&cq.0).unwrap().armed = true;
        OK
    }
    new_srq: create_srq(pd: PdHandle, init: *const EngineSrqInit, out: *mut EngineSrq) {
        let Some(handle) = state().child(pd.0) else { return INVALID };
        let mut attr = (*init).attr;
        attr.max_wr = attr.max_wr.next_power_of_two();
        *out = EngineSrq { srq: SrqHandle(handle), attr, srq_num: 12 };
        OK
    }
    change_srq: modify_srq(srq: SrqHandle, attr: *const ibv_srq_attr, mask: u32) { OK }
    ask_srq: query_srq(srq: SrqHandle, out: *mut ibv_srq_attr) {
        *out = ibv_srq_attr { max_wr: 8, max_sge: 2, srq_limit: 3 };
        OK
    }
    free_srq: destroy_srq(srq: SrqHandle, out: *mut EngineEventsReported) {
        *out = EngineEventsReported::default();
        state().drop_child(srq.0)
    }
    give_srq: post_srq_recv(
        srq: SrqHandle, wr: *const ibv_recv_wr, bad: *mut *const ibv_recv_wr,
    ) {
        OK
    }
    new_qp: create_qp(pd: PdHandle, init: *const EngineQpInit, out: *mut EngineQp) {
        let init = *init;
        if init.qp_type != IBV_QPT_RC {
            return EngineStatus::NotSupported.code();
        }
        if init.cap.max_inline_data > 512 {
            return INVALID;
        }
        let mut state = state();
        let Some(handle) = state.child(pd.0) else { return INVALID };
        let cap = ibv_qp_cap { max_send_sge: 4, ..init.cap };
        let (cookie, send_cq, state_now) = (init.cookie, init.send_cq.0, IBV_QPS_RESET);
        let qp = Qp { cookie, send_cq, state: state_now, cap, events: 0, pd: pd.0 };
        state.qps.insert(handle, qp);
        *out = EngineQp { qp: QpHandle(handle), qp_num: handle as u32, cap };
        OK
    }
    change_qp: modify_qp(qp: QpHandle, attr: *const ibv_qp_attr, mask: u32) {
        if mask & IBV_QP_AV != 0 && (*attr).ah_attr.is_global == 0 {
            return INVALID;
        }
        if mask & IBV_QP_STATE != 0 {
            state().qps.get_mut(&qp.0).unwrap().state = (*attr).qp_state;
        }
        OK
    }
    ask_qp: query_qp(qp: QpHandle, mask: u32, out: *mut ibv_qp_attr) {
        let state = state();
        (*out).qp_state = state.qps[&qp.0].state;
        (*out).cap = state.qps[&qp.0].cap;
        OK
    }
    free_qp: destroy_qp(qp: QpHandle, out: *mut EngineEventsReported) {
        let mut state = state();
        let gone = state.qps.remove(&qp.0).unwrap();
        *out = EngineEventsReported { comp: 0, r#async: gone.events };
        // One that was opened by its number has no domain.
        if gone.pd == 0 { OK } else { state.drop_child(qp.0) }
    }
    send: post_send(qp: QpHandle, wr: *const ibv_send_wr, bad: *mut *const ibv_send_wr) {
        let mut state = state();
        let mut next = wr;
        while let Some(wr) = next.as_ref() {
            let qp_state = &state.qps[&qp.0];
            if qp_state.state < IBV_QPS_RTS || wr.num_sge > 4 {
                *bad = wr;
                return INVALID;
            }
            let sges = if wr.num_sge == 0 {
                &[]
            } else {
                std::slice::from_raw_parts(wr.sg_list, wr.num_sge as usize)
            };
            let (wr_id, opcode, imm_data) = (wr.wr_id, wr.opcode, wr.imm_data);
            let wc = ibv_wc {
                wr_id,
                opcode,
                imm_data,
                byte_len: sges.iter().map(|sge| sge.length).sum(),
                status: IBV_WC_SUCCESS,
                vendor_err: 0,
                qp_num: qp.0 as u32,
                src_qp: 0,
                wc_flags: wr.send_flags,
                pkey_index: 0,
                slid: 0,
                sl: 0,
                dlid_path_bits: 0,
            };
            let cq = qp_state.send_cq;
            state.complete(cq, wc);
            next = wr.next;
        }
        OK
    }
    batch: post_batch(qp: QpHandle, wr: *const ibv_send_wr) {
        (API.post_send)(qp, wr, &mut std::ptr::null())
    }
    receive: post_recv(qp: QpHandle, wr: *const ibv_recv_wr, bad: *mut *const ibv_recv_wr) {
        *bad = wr;
        EngineStatus::QueueFull.code()
    }
    new_ah: create_ah(pd: PdHandle, attr: *const ibv_ah_attr, out: *mut AhHandle) {
        if (*attr).is_global == 0 {
            return INVALID;
        }
        let Some(handle) = state().child(pd.0) else { return INVALID };
        *out = AhHandle(handle as u32);
        OK
    }
    new_null_mr: alloc_null_mr(pd: PdHandle, out: *mut EngineMr) {
        let Some(handle) = state().child(pd.0) else { return INVALID };
        *out = EngineMr { mr: MrHandle(handle), lkey: 5, rkey: 0 };
        OK
    }
    advise: advise_mr(pd: PdHandle, advice: u32, flags: u32, list: *const ibv_sge, count: u32) {
        if count == 1 { OK } else { EngineStatus::NotFound.code() }
    }
    hold: moderate_cq(cq: CqHandle, count: u32, period: u32) {
        assert_eq!((count, period), (7, 9));
        OK
    }
    poll_stamped: poll_cq_stamped(cq: CqHandle, out: *mut ibv_wc, stamp: *mut u64) {
        *stamp = 1_000;
        (API.poll_cq)(cq, 1, out)
    }
    clock: read_clock(context: ContextHandle, out: *mut u64) {
        *out = 3_000;
        OK
    }
    look_for_pd: find_pd(context: ContextHandle, low: u32, out: *mut PdHandle) {
        if !state().pds.contains_key(&u64::from(low)) {
            return INVALID;
        }
        *out = PdHandle(low.into());
        OK
    }
    look_for_mr: find_mr(context: ContextHandle, low: u32, out: *mut EngineFoundMr) {
        if !state().children.contains_key(&u64::from(low)) {
            return INVALID;
        }
        let found = EngineMr { mr: MrHandle(low.into()), lkey: 11, rkey: 12 };
        *out = EngineFoundMr { found, length: 64 };
        OK
    }
    join_xrcd: open_xrcd(context: ContextHandle, fd: c_int, oflag: c_int, out: *mut XrcdHandle) {
        *out = XrcdHandle(7);
        OK
    }
    leave_xrcd: close_xrcd(xrcd: XrcdHandle) { OK }
    share: open_qp(
        context: ContextHandle,
        xrcd: XrcdHandle,
        qp_num: u32,
        cookie: u64,
        out: *mut QpHandle,
    ) {
        let mut state = state();
        let handle = state.handle();
        let (cap, pd) = (ibv_qp_cap::default(), 0);
        let qp = Qp { cookie, send_cq: 0, state: IBV_QPS_RTR, cap, events: 0, pd };
        state.qps.insert(handle, qp);
        *out = QpHandle(handle);
        OK
    }
    note: note_call(_call: u32) { OK }
    free_ah: destroy_ah(ah: AhHandle) { state().drop_child(u64::from(ah.0)) }
    list_gid: list_gid(_index: u32, out: *mut ibv_gid_entry) { *out = gid(); OK }
    attach: attach_mcast(_qp: QpHandle, gid: *const ibv_gid, _sgid_index: u8) {
        if (*gid).raw[0] == 0xff { OK } else { INVALID }
    }
    detach: detach_mcast(_qp: QpHandle, _gid: *const ibv_gid, _sgid_index: u8) { OK }
}
