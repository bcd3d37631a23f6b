//! The private interface between the facades (libibverbs, later librdmacm) and the one engine of a
//! process.
//!
//! `libquipu_engine.so` exports a single symbol, [`ENGINE_API_SYMBOL`], of type [`EngineApiFn`]. It
//! returns a table that lives as long as the process. The facades and the engine are built
//! together: there is no compatibility between versions, and [`EngineApi::version`] and
//! [`EngineApi::size`] only turn a mixed installation into a clear refusal.
//!
//! # Rules for every function of the table
//!
//! * **Results.** Each returns an [`EngineStatus`] as `i32`: 0 for success, a positive value
//!   otherwise (`poll_cq` differs and says so). `errno` is neither read nor written. Outputs are
//!   written only on success, unless a function says otherwise.
//! * **Panics** never cross: the engine catches them, logs, and returns
//!   [`EngineStatus::Internal`].
//! * **Threads.** Any function may be called from any thread at any time, also two calls on one
//!   object; the engine orders them. The one exception is that no other call on an object may
//!   overlap with its destruction (the verbs rule), except that events may be waited for
//!   (`get_comp_event`, `get_async_event`) while objects are destroyed.
//! * **Handles** are the engine's, never 0 where valid, and meaningless to the facade. A handle
//!   that was never given out, or was already destroyed, must give [`EngineStatus::Invalid`] and
//!   must not be dereferenced: handles are table indices with a generation, or the like. On the
//!   data path (`post_*`, `poll_cq`, `req_notify_cq`) the engine may trust the handle: the facade
//!   has checked the magic word of its own object.
//! * **Cookies** are the facade's: passed at creation, returned in events, never interpreted.
//! * **Ownership.** Pointers in arguments are borrowed for the call. Work request lists, their
//!   scatter/gather lists and inline payload are copied before `post_*` returns. Memory named by
//!   scatter/gather elements and regions stays the application's.
//! * **Existence.** An object in use by another (a PD by an MR, MW, QP, SRQ, AH; a CQ or SRQ by a
//!   QP; an MR by a bound MW; a channel by a CQ) cannot be destroyed:
//!   [`EngineStatus::Busy`], nothing is changed.
//! * **Fork.** In a forked child the engine is inert: every function returns
//!   [`EngineStatus::NoDevice`] until a context is opened anew in the child, and destructors of
//!   inherited objects return success after freeing what is private to the child.

mod handles;
mod status;

use core::mem::size_of;

use libc::{c_char, c_int, pollfd};

use crate::*;

pub use handles::*;
pub use status::EngineStatus;

/// The exported name of [`EngineApiFn`].
pub const ENGINE_API_SYMBOL: &str = "quipu_engine_api_v1";
/// The file name of the engine, which lies in the same folder as the facades.
pub const ENGINE_FILE_NAME: &str = "libquipu_engine.so";
/// The value of [`EngineApi::version`]; raised with every change of the table or its structures.
pub const ENGINE_API_VERSION: u32 = 19;

/// How `ibv_wr_flush` reaches [`EngineApi::post_batch`]: an opcode that no program knows, since the request
/// of `ibv_post_send` has no place for what a flush needs. `wr.atomic` has the key, the address, the length
/// as `compare_add`, and placement and level as the lowest bytes of `swap`.
pub const ENGINE_WR_FLUSH: u32 = 1 << 31 | IBV_WR_FLUSH;

/// The type of the engine's one exported symbol. It never fails and starts nothing: threads,
/// sockets and shared memory come with the first `open`.
pub type EngineApiFn = unsafe extern "C" fn() -> *const EngineApi;

/// A device before it is opened.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct EngineDevice {
    /// Its name, at most 63 bytes and a zero: `quipu0`.
    pub name: [c_char; 64],
    /// Its node GUID, big endian, stable for the address of the device.
    pub guid: u64,
    /// `IBV_NODE_CA`, `IBV_NODE_RNIC` or `IBV_NODE_UNSPECIFIED`.
    pub node_type: i32,
    /// `IBV_TRANSPORT_IB`, `IBV_TRANSPORT_IWARP` or `IBV_TRANSPORT_UNSPECIFIED`.
    pub transport_type: i32,
    /// How many completion vectors a context has; at least 1.
    pub num_comp_vectors: i32,
    /// What `ibv_get_device_index` answers: the kernel's number of the device, -1 if it knows none.
    pub index: i32,
    /// What `query_gid` will answer for port 1, index 0. The path shim shows it in /sys, without
    /// opening the device.
    pub gid: ibv_gid_entry,
    /// As `query_port` will answer for port 1: `IBV_LINK_LAYER_ETHERNET` or `IBV_LINK_LAYER_INFINIBAND`.
    pub link_layer: u8,
    /// The same: the LID of a port of InfiniBand, which is its `sm_lid`, too.
    pub lid: u16,
}

/// What `open` gives back.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct EngineOpened {
    /// The context.
    pub context: ContextHandle,
    /// The descriptor of asynchronous events. See [`EngineApi::get_async_event`].
    pub async_fd: c_int,
}

/// What `create_channel` gives back.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct EngineChannel {
    /// The channel.
    pub channel: ChannelHandle,
    /// Its descriptor. See [`EngineApi::get_comp_event`].
    pub fd: c_int,
}

/// A registration.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct EngineMrInit {
    /// The first byte of the memory, as a virtual address of this process.
    pub addr: u64,
    /// Its length in bytes. 0 is valid and gives a region that no byte can be reached through.
    pub length: u64,
    /// The address by which work requests name the first byte: equal to `addr` for `ibv_reg_mr`,
    /// chosen by the caller for `ibv_reg_mr_iova`. With `IBV_ACCESS_ZERO_BASED` it is 0 (the
    /// facade has seen to that).
    pub iova: u64,
    /// `IBV_ACCESS_*`. Flags of the optional range that are unknown are to be ignored, other
    /// unknown ones are Invalid; remote write and atomics need local write, else Invalid.
    pub access: u32,
}

/// A region's handle and keys.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct EngineMr {
    pub mr: MrHandle,
    pub lkey: u32,
    pub rkey: u32,
}

/// A call of which the engine knows by [`EngineApi::note_call`] alone.
#[repr(u32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EngineCall {
    AllocDm = 1,
    AllocTd,
    AllocParentDomain,
    SetEce,
    LeaveMulticast,
    FreeDm,
    DeallocTd,
    GetRequest,
    GetCmEvent,
}

/// A region that was looked for, and its length in bytes.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct EngineFoundMr {
    pub found: EngineMr,
    pub length: u64,
}

/// A window's handle and key. The key's low byte is the tag that the consumer changes for type 2;
/// its upper 24 bits name the window and stay the same for its life.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct EngineMw {
    pub mw: MwHandle,
    pub rkey: u32,
}

/// How a completion queue is wanted.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct EngineCqInit {
    /// The least number of entries; 1 or more (the facade refuses 0).
    pub cqe: u32,
    /// Below `num_comp_vectors`.
    pub comp_vector: u32,
    /// `IBV_CREATE_CQ_ATTR_*`.
    pub flags: u32,
    /// Not 0: completions are taken by `poll_cq_stamped` too.
    pub stamps: u32,
    /// Where its events go, or none.
    pub channel: ChannelHandle,
    /// Returned by `get_comp_event` and in events of type `IBV_EVENT_CQ_ERR`.
    pub cookie: u64,
}

/// What `create_cq` gives back.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct EngineCq {
    pub cq: CqHandle,
    /// The entries it really has, at least as many as asked for.
    pub cqe: u32,
}

/// How a shared receive queue is wanted.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct EngineSrqInit {
    /// Sizes; `srq_limit` is ignored at creation.
    pub attr: ibv_srq_attr,
    /// The XRC domain whose queue pairs reach it (`IBV_SRQT_XRC`), or none for a basic one.
    pub xrcd: XrcdHandle,
    /// Where its receives complete, if it has an XRC domain.
    pub cq: CqHandle,
    /// Returned in events of this SRQ.
    pub cookie: u64,
}

/// What `create_srq` gives back.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct EngineSrq {
    pub srq: SrqHandle,
    /// The sizes it really has, at least as large as asked for.
    pub attr: ibv_srq_attr,
    /// Its number, for `ibv_get_srq_num`.
    pub srq_num: u32,
}

/// How a queue pair is wanted.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct EngineQpInit {
    /// None for an XRC responder.
    pub send_cq: CqHandle,
    /// None for either end of an XRC connection.
    pub recv_cq: CqHandle,
    /// The domain of an XRC responder, which has no protection domain; none for all others.
    pub xrcd: XrcdHandle,
    /// The SRQ it receives from, or none; with one, `cap.max_recv_*` are ignored and come back 0.
    pub srq: SrqHandle,
    pub cap: ibv_qp_cap,
    /// `IBV_QPT_*`; those that the device does not have are NotSupported.
    pub qp_type: u32,
    /// Not 0: every send completes with a work completion.
    pub sq_sig_all: u32,
    /// `IBV_QP_CREATE_*`; those unknown are NotSupported.
    pub create_flags: u32,
    /// `IBV_QP_EX_WITH_*`: what is to be posted call by call; what its service does not have is NotSupported.
    pub send_ops: u64,
    /// Returned in events of this QP.
    pub cookie: u64,
}

/// What `create_qp` gives back.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct EngineQp {
    pub qp: QpHandle,
    /// Unique on the host; 24 bits.
    pub qp_num: u32,
    /// What it really has. `max_inline_data` beyond the device's is Invalid, never less than asked.
    pub cap: ibv_qp_cap,
}

/// How many events of an object were handed out by `get_comp_event` and `get_async_event` in its
/// life. The facade's destructor waits until that many have been acknowledged.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EngineEventsReported {
    pub comp: u32,
    pub r#async: u32,
}

/// An asynchronous event.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct EngineAsyncEvent {
    /// `IBV_EVENT_*`, from which follows whether it is about a QP, CQ, SRQ, port or the device.
    pub event_type: u32,
    /// The port, in events of a port, else 0.
    pub port_num: u32,
    /// The cookie of the QP, CQ or SRQ, in events of those, else 0.
    pub cookie: u64,
}

/// The table. Functions are grouped by object. All follow the rules at the head of this module;
/// `-> i32` is an [`EngineStatus`].
#[repr(C)]
#[derive(Clone, Copy)]
pub struct EngineApi {
    /// [`ENGINE_API_VERSION`] of the engine.
    pub version: u32,
    /// `size_of::<EngineApi>()` of the engine.
    pub size: u32,

    // --- devices -------------------------------------------------------------------------------
    /// Writes up to `max` devices to `out` and their whole number to `count`. A host without a
    /// usable address has none; that is success with `count` 0.
    pub list_devices:
        unsafe extern "C" fn(out: *mut EngineDevice, max: u32, count: *mut u32) -> i32,
    /// Opens the device of that name (zero-terminated). Each open gives a context of its own, with
    /// its own objects and descriptor.
    pub open: unsafe extern "C" fn(name: *const c_char, out: *mut EngineOpened) -> i32,
    /// Closes a context. Objects left in it are destroyed as if the process had ended: their peers
    /// see the connections end. `async_fd` is closed.
    pub close: unsafe extern "C" fn(context: ContextHandle) -> i32,
    /// Fills in the whole of the device's attributes; what it cannot do is 0.
    ///
    /// Programs look at more than limits: `vendor_id` must not be 0 or 0xffffff (SPDK then assumes
    /// the quirks of another adapter), `phys_port_cnt` and `phys_port_cnt_ex` are 1, `max_pkeys` is
    /// 1, `page_size_cap` has the system's page size, `max_sge` and `max_sge_rd` are above 1 (UCX),
    /// `fw_ver` is a text, `atomic_cap` is `IBV_ATOMIC_HCA` or more where there are atomics,
    /// `max_mr_size` is the whole address space.
    pub query_device:
        unsafe extern "C" fn(context: ContextHandle, out: *mut ibv_device_attr_ex) -> i32,
    /// Fills in a port. Ports count from 1; another one is Invalid.
    ///
    /// A port of InfiniBand, if it is to be one, has a `lid` and `sm_lid`, and demands no GRH. All others
    /// are as a RoCE port shows itself: ACTIVE, `phys_state` 5, link layer Ethernet, `lid` and `sm_lid` 0,
    /// both MTUs 4096, `gid_tbl_len` 4 to 32 or 1, `pkey_tbl_len` 1, `flags` `IBV_QPF_GRH_REQUIRED`,
    /// `port_cap_flags` `IBV_PORT_CM_SUP | IBV_PORT_IP_BASED_GIDS`, a width and speed that exist
    /// (2 and 32: 4X EDR; UCX computes with them), `max_vl_num` 1, `max_msg_sz` 1 GiB or more.
    pub query_port:
        unsafe extern "C" fn(context: ContextHandle, port: u32, out: *mut ibv_port_attr) -> i32,
    /// Fills in one row of a port's GID table; an index beyond `gid_tbl_len` is Invalid.
    /// `gid_type` is `IBV_GID_TYPE_ROCE_V2`, `ndev_ifindex` the interface that has the address.
    pub query_gid: unsafe extern "C" fn(
        context: ContextHandle,
        port: u32,
        index: u32,
        out: *mut ibv_gid_entry,
    ) -> i32,
    /// Takes the next asynchronous event of a context.
    ///
    /// `async_fd` is readable (poll, select, epoll) exactly while events are queued, and nobody
    /// but the engine reads it. With none queued the call blocks, unless the program has set
    /// `O_NONBLOCK` on the descriptor (looked up at each call): WouldBlock. A signal handler that
    /// ran and may be one without `SA_RESTART` gives Interrupted; a quarter of a second without an
    /// event, WaitOn. Each event goes to one caller. Events of an object that were not yet taken
    /// vanish when it is destroyed.
    pub get_async_event:
        unsafe extern "C" fn(context: ContextHandle, out: *mut EngineAsyncEvent) -> i32,

    // --- protection domains, memory ------------------------------------------------------------
    pub alloc_pd: unsafe extern "C" fn(context: ContextHandle, out: *mut PdHandle) -> i32,
    pub dealloc_pd: unsafe extern "C" fn(pd: PdHandle) -> i32,
    /// Registers memory. Nothing is pinned. Memory that is not mapped, or is read-only where
    /// `access` allows to write, is BadAddress; a range that wraps around the address space is
    /// Invalid. What is unmapped later crashes the program when it is accessed.
    pub reg_mr:
        unsafe extern "C" fn(pd: PdHandle, init: *const EngineMrInit, out: *mut EngineMr) -> i32,
    /// Changes a region as `ibv_rereg_mr(3)` says: `flags` (`IBV_REREG_MR_*`) tell which of `pd`,
    /// the addresses and `access` of `init` to take. On failure the region is as before. Its handle
    /// stays, its keys may change. Busy while a window is bound to it.
    pub rereg_mr: unsafe extern "C" fn(
        mr: MrHandle,
        flags: u32,
        pd: PdHandle,
        init: *const EngineMrInit,
        out: *mut EngineMr,
    ) -> i32,
    /// Ends a registration. When it returns, no access through its keys is under way any more, from
    /// the peer or from this side.
    pub dereg_mr: unsafe extern "C" fn(mr: MrHandle) -> i32,
    /// Allocates a window; `mw_type` is `IBV_MW_TYPE_1` or `_2`. Binding is a work request
    /// (`IBV_WR_BIND_MW`, for both types): the engine finds the window by
    /// `wr.bind_mw.mw->rkey >> 8`, the region by `wr.bind_mw.bind_info.mr->lkey`, and takes the
    /// new key from `wr.bind_mw.rkey`. A null `mr` or a length of 0 unbinds a window of type 1.
    pub alloc_mw: unsafe extern "C" fn(pd: PdHandle, mw_type: u32, out: *mut EngineMw) -> i32,
    /// Frees a window; a bound one is unbound first.
    pub dealloc_mw: unsafe extern "C" fn(mw: MwHandle) -> i32,

    // --- completion ----------------------------------------------------------------------------
    pub create_channel:
        unsafe extern "C" fn(context: ContextHandle, out: *mut EngineChannel) -> i32,
    /// Closes the channel and its descriptor. Busy while a CQ uses it.
    pub destroy_channel: unsafe extern "C" fn(channel: ChannelHandle) -> i32,
    /// Takes the next completion event of a channel and writes the cookie of its CQ.
    ///
    /// The descriptor behaves as `async_fd` does in [`EngineApi::get_async_event`]. A CQ puts one
    /// event into its channel for each arming by `req_notify_cq`. Events of a CQ that were not yet
    /// taken vanish when it is destroyed.
    pub get_comp_event: unsafe extern "C" fn(channel: ChannelHandle, cookie: *mut u64) -> i32,
    /// poll(2) of `count` descriptors for `timeout_ns` at most (negative: without end), those of channels
    /// and of identifiers among them. The thread makes the engine's progress meanwhile, so that what comes
    /// wakes it and no other, and a `req_notify_cq` calls nobody else. Fills in `revents`, and how many
    /// have something to say: 0 after that time, or sooner where something has been done. A signal handler
    /// that ran gives Interrupted.
    pub poll: unsafe extern "C" fn(
        fds: *mut pollfd,
        count: usize,
        timeout_ns: i64,
        ready: *mut usize,
    ) -> i32,
    pub create_cq: unsafe extern "C" fn(
        context: ContextHandle,
        init: *const EngineCqInit,
        out: *mut EngineCq,
    ) -> i32,
    /// Changes the number of entries, keeping those queued; fewer than are queued is Invalid.
    pub resize_cq: unsafe extern "C" fn(cq: CqHandle, cqe: u32, actual: *mut u32) -> i32,
    /// Destroys a CQ. From its return on, no event of this CQ is handed out; `out` says how many
    /// were before. It does not wait for acknowledgements: the facade does.
    pub destroy_cq: unsafe extern "C" fn(cq: CqHandle, out: *mut EngineEventsReported) -> i32,
    /// Moves up to `max` completions to `wc` and makes progress meanwhile. Returns how many, 0 or
    /// more; or an [`EngineStatus`] **negated** (a CQ that overran: `-Internal`). Every field of
    /// each `ibv_wc` that is returned is written. `max` below 1 returns 0.
    pub poll_cq: unsafe extern "C" fn(cq: CqHandle, max: i32, wc: *mut ibv_wc) -> i32,
    /// Arms the CQ: the next completion that is added (if `solicited_only` is not 0: the next
    /// solicited or failed one) puts one event into the channel; at once if there are some that no event has
    /// told of since the last `poll_cq`. Without a channel: success,
    /// nothing happens. Also says that the program may now sleep, so progress must not depend on
    /// its polling.
    pub req_notify_cq: unsafe extern "C" fn(cq: CqHandle, solicited_only: i32) -> i32,

    // --- shared receive queues -----------------------------------------------------------------
    pub create_srq:
        unsafe extern "C" fn(pd: PdHandle, init: *const EngineSrqInit, out: *mut EngineSrq) -> i32,
    /// `mask` of `IBV_SRQ_MAX_WR` (resize) and `IBV_SRQ_LIMIT` (arm the limit event, once).
    pub modify_srq:
        unsafe extern "C" fn(srq: SrqHandle, attr: *const ibv_srq_attr, mask: u32) -> i32,
    pub query_srq: unsafe extern "C" fn(srq: SrqHandle, out: *mut ibv_srq_attr) -> i32,
    /// As [`EngineApi::destroy_cq`].
    pub destroy_srq: unsafe extern "C" fn(srq: SrqHandle, out: *mut EngineEventsReported) -> i32,
    /// Posts a list of receives. As [`EngineApi::post_send`].
    pub post_srq_recv: unsafe extern "C" fn(
        srq: SrqHandle,
        wr: *const ibv_recv_wr,
        bad: *mut *const ibv_recv_wr,
    ) -> i32,

    // --- queue pairs ---------------------------------------------------------------------------
    /// Creates a QP in RESET. Asking beyond the limits of the device is Invalid.
    pub create_qp:
        unsafe extern "C" fn(pd: PdHandle, init: *const EngineQpInit, out: *mut EngineQp) -> i32,
    /// Changes a QP as `ibv_modify_qp(3)` and the state tables of the InfiniBand specification
    /// (11.2.4.2) say: required attributes missing, forbidden ones present, an illegal transition,
    /// an address without GRH (`ah_attr.is_global` 0), a port other than 1: Invalid, nothing
    /// changed. INIT to RTR needs no peer: it returns before the connection stands. To RESET
    /// discards, to ERR flushes what is queued.
    pub modify_qp: unsafe extern "C" fn(qp: QpHandle, attr: *const ibv_qp_attr, mask: u32) -> i32,
    /// Writes the whole of the QP's attributes, whatever `mask` says (`qp_state`, `cur_qp_state`,
    /// `cap` and `sq_draining` included; `cap` as granted by `create_qp`).
    pub query_qp: unsafe extern "C" fn(qp: QpHandle, mask: u32, out: *mut ibv_qp_attr) -> i32,
    /// Destroys a QP in any state and removes its completions from its CQs. Events: as
    /// [`EngineApi::destroy_cq`].
    pub destroy_qp: unsafe extern "C" fn(qp: QpHandle, out: *mut EngineEventsReported) -> i32,
    /// Posts a list of sends (linked by `next`) and rings the doorbell once, at its end.
    ///
    /// Stops at the first one that cannot be posted, writes its address to `bad` (never null) and
    /// returns why: QueueFull; Invalid for the state (RESET, INIT, RTR), too many elements, an
    /// unknown opcode or flag, too much inline data. Those before it are posted. What only the
    /// transport can find out (keys, rights, the peer) becomes a completion instead. In ERR
    /// everything is accepted and flushed. A null list is success.
    pub post_send: unsafe extern "C" fn(
        qp: QpHandle,
        wr: *const ibv_send_wr,
        bad: *mut *const ibv_send_wr,
    ) -> i32,
    /// Posts a list of sends as [`EngineApi::post_send`] does, but the whole of it or, with a status
    /// that says why, nothing (`ibv_wr_complete`).
    pub post_batch: unsafe extern "C" fn(qp: QpHandle, wr: *const ibv_send_wr) -> i32,
    /// Posts a list of receives, as [`EngineApi::post_send`] does; RESET is Invalid, and so is a QP
    /// with an SRQ.
    pub post_recv: unsafe extern "C" fn(
        qp: QpHandle,
        wr: *const ibv_recv_wr,
        bad: *mut *const ibv_recv_wr,
    ) -> i32,

    // --- on-demand paging, null regions, moderation, time, imports -----------------------------
    /// Makes a region that reads as zeros and forgets what is written to it. Its rkey is 0.
    pub alloc_null_mr: unsafe extern "C" fn(pd: PdHandle, out: *mut EngineMr) -> i32,
    /// Makes the pages of on-demand regions present, as `ibv_advise_mr(3)` says. Without the flag
    /// `IBV_ADVISE_MR_FLAG_FLUSH` pages that cannot be had are no error. A key that names no
    /// on-demand region: NotFound; another domain, or no right to write: NotPermitted; out of
    /// bounds: BadAddress; an unknown advice: NotSupported.
    pub advise_mr: unsafe extern "C" fn(
        pd: PdHandle,
        advice: u32,
        flags: u32,
        list: *const ibv_sge,
        count: u32,
    ) -> i32,
    /// Holds events back until `count` completions have come, or `period` microseconds have passed;
    /// either 0: not any more. Both have 16 bits.
    pub moderate_cq: unsafe extern "C" fn(cq: CqHandle, count: u32, period: u32) -> i32,
    /// As `poll_cq` with `max` 1, of a queue with `stamps`; also the time of `read_clock` at which
    /// the completion was made.
    pub poll_cq_stamped:
        unsafe extern "C" fn(cq: CqHandle, out: *mut ibv_wc, stamp: *mut u64) -> i32,
    /// The device's clock, in nanoseconds.
    pub read_clock: unsafe extern "C" fn(context: ContextHandle, out: *mut u64) -> i32,
    /// The domain of a context whose handle has these lower 32 bits.
    pub find_pd: unsafe extern "C" fn(context: ContextHandle, low: u32, out: *mut PdHandle) -> i32,
    /// The region of a context whose handle has these lower 32 bits.
    pub find_mr:
        unsafe extern "C" fn(context: ContextHandle, low: u32, out: *mut EngineFoundMr) -> i32,

    // --- plans of faults -----------------------------------------------------------------------
    /// Fills in one row of the GID table of `quipu0`, also where no device is open; an index beyond the
    /// table is Invalid.
    pub list_gid: unsafe extern "C" fn(index: u32, out: *mut ibv_gid_entry) -> i32,
    /// Tells a plan of faults, if there is one, of a call that needs nothing of the engine: one of
    /// [`EngineCall`]. The status is what the call is to fail with.
    pub note_call: unsafe extern "C" fn(call: u32) -> i32,

    // --- address handles -----------------------------------------------------------------------
    /// Remembers the address of a peer. Without GRH (`is_global` 0), with another port or source
    /// GID index than there is: Invalid.
    pub create_ah:
        unsafe extern "C" fn(pd: PdHandle, attr: *const ibv_ah_attr, out: *mut AhHandle) -> i32,
    pub destroy_ah: unsafe extern "C" fn(ah: AhHandle) -> i32,

    // --- multicast -----------------------------------------------------------------------------
    /// Attaches a datagram QP to the group of a multicast GID; twice is as good as once. A QP that is
    /// attached cannot be destroyed: Busy. Another type of QP, or no multicast GID: Invalid. The group is
    /// joined on the network of the address in the row `sgid_index` of the GID table.
    pub attach_mcast:
        unsafe extern "C" fn(qp: QpHandle, gid: *const ibv_gid, sgid_index: u8) -> i32,
    /// Detaches it; Invalid if it is not attached, or not on that network.
    pub detach_mcast:
        unsafe extern "C" fn(qp: QpHandle, gid: *const ibv_gid, sgid_index: u8) -> i32,

    // --- extended reliable connections ---------------------------------------------------------
    /// Opens an XRC domain (`ibv_open_xrcd(3)`): a new one if `fd` is -1, else the one of the inode
    /// behind `fd` in this process. There is none yet and `oflag` has no `O_CREAT`: WouldBlock; there is
    /// one and it has `O_EXCL`: Invalid.
    pub open_xrcd: unsafe extern "C" fn(
        context: ContextHandle,
        fd: c_int,
        oflag: c_int,
        out: *mut XrcdHandle,
    ) -> i32,
    /// Closes an XRC domain, and destroys it with the last that opened it: Busy while queue pairs or
    /// shared receive queues belong to it.
    pub close_xrcd: unsafe extern "C" fn(xrcd: XrcdHandle) -> i32,
    /// Opens a responder of an XRC domain of `context` by its number (`ibv_open_qp(3)`). The handle is its
    /// own: it hears of every event of the queue pair, which is destroyed with the last that has it open.
    /// The domain has none of that number: Invalid.
    pub open_qp: unsafe extern "C" fn(
        context: ContextHandle,
        xrcd: XrcdHandle,
        qp_num: u32,
        cookie: u64,
        out: *mut QpHandle,
    ) -> i32,

    // --- raw packets ---------------------------------------------------------------------------
    pub raw: EngineRawApi,

    // --- connection management -----------------------------------------------------------------
    pub cm: EngineCmApi,
}

impl EngineApi {
    /// Whether the engine was built with the same table as the caller.
    pub const fn is_of_this_build(&self) -> bool {
        self.version == ENGINE_API_VERSION && self.size as usize == size_of::<Self>()
    }
}
