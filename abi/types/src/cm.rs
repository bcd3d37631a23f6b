//! The part of the private interface that librdmacm uses: connection management, as the kernel's
//! `rdma_ucm` offers it to the library of rdma-core.
//!
//! The engine knows identifiers, addresses, and messages between peers. What a program sees
//! (`rdma_cm_id`, its protection domain, queues and queue pair) belongs to the facade, which builds
//! them with calls of libibverbs. The rules at the head of [`crate::engine`] hold here too.
use libc::{c_int, c_void, sockaddr, sockaddr_storage};

use crate::*;

/// The most private data of an event. Plain iWARP has up to 512 bytes, of which a program can be told 255.
pub const CM_PRIVATE_DATA_MAX: usize = 256;

/// Reasons to reject, as events show them (IBA 12.6.7.2): the program's own.
pub const RDMA_CM_REJECT_CONSUMER: u32 = 28;
/// The options of the peer's vendor (`rdma_reject_ece`).
pub const RDMA_CM_REJECT_VENDOR_OPTION: u32 = 35;

/// An event channel and its descriptor.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct EngineCmChannel {
    pub channel: CmChannelHandle,
    /// Readable exactly while events are queued; programs poll it and set `O_NONBLOCK`.
    pub fd: c_int,
}

/// How an identifier is wanted.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct EngineCmIdInit {
    pub channel: CmChannelHandle,
    /// `RDMA_PS_*`: TCP 0x0106, UDP 0x0111, IB 0x013F, IPOIB 0x0002.
    pub port_space: u32,
    /// `IBV_QPT_*` that the identifier is for; tells connections from datagrams in `RDMA_PS_IB`.
    pub qp_type: u32,
    /// Returned in events of this identifier.
    pub cookie: u64,
}

/// What `rdma_conn_param` and the queue pair of an identifier say, for `connect` and `accept`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct EngineCmParam {
    pub private_data: *const c_void,
    pub private_data_len: u32,
    pub responder_resources: u8,
    pub initiator_depth: u8,
    pub flow_control: u8,
    pub retry_count: u8,
    pub rnr_retry_count: u8,
    pub srq: u8,
    /// 24 bits. Programs may give a number that names no queue pair (UCX does).
    pub qp_num: u32,
    /// Datagrams: the Q_Key that the acceptor's peer shall use; 0: `RDMA_UDP_QKEY`.
    pub qkey: u32,
    /// Options of the own vendor; `vendor_id` 0: none.
    pub ece: ibv_ece,
}

/// What the engine knows of an identifier's addresses.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct EngineCmRoute {
    /// The own address, as bound or resolved; family 0 if neither.
    pub src: sockaddr_storage,
    /// The peer's address; family 0 if there is none.
    pub dst: sockaddr_storage,
    /// The device that the identifier belongs to, zero-terminated; empty while it has none (not
    /// bound, or bound to a wildcard).
    pub device: [libc::c_char; 64],
    /// 1 once the device is known.
    pub port_num: u32,
    /// How many paths are resolved: 0 or 1.
    pub num_paths: u32,
    pub sgid: ibv_gid,
    pub dgid: ibv_gid,
    /// Path MTU code of verbs.
    pub mtu: u32,
    /// From `RDMA_OPTION_ID_TOS`.
    pub tos: u32,
}

/// An event of connection management.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct EngineCmEvent {
    /// `RDMA_CM_EVENT_*`.
    pub event: u32,
    /// 0, a negative errno, or the peer's reject reason.
    pub status: i32,
    /// The identifier the event is about. In a connect request: the new identifier, which belongs
    /// to the channel of the listener and whose cookie is 0 until `set_cookie`.
    pub id: CmIdHandle,
    /// The cookie of that identifier; in a multicast event, too.
    pub cookie: u64,
    /// In a connect request the cookie of the listener, else 0.
    pub listener: u64,
    /// In a multicast event the cookie that `join` was given, else 0.
    pub multicast: u64,
    /// In an event of `write_event` what that was given, else 0.
    pub arg: u64,
    pub private_data_len: u32,
    pub private_data: [u8; CM_PRIVATE_DATA_MAX],
    pub responder_resources: u8,
    pub initiator_depth: u8,
    pub flow_control: u8,
    pub retry_count: u8,
    pub rnr_retry_count: u8,
    pub srq: u8,
    /// The peer's queue pair; of a group: 0xffffff.
    pub qp_num: u32,
    /// Datagrams and groups.
    pub qkey: u32,
    /// Datagrams and groups: how to reach the peer.
    pub ah_attr: ibv_ah_attr,
    /// In requests and responses: options of the peer's vendor; `vendor_id` 0: none.
    pub ece: ibv_ece,
}

/// The calls of connection management. `-> i32` is an [`EngineStatus`].
///
/// # Who says that a connection stands
///
/// As in the kernel, whose users always own the queue pair: the side that connected gets
/// CONNECT_RESPONSE with the peer's parameters and private data, never ESTABLISHED. It brings its queue
/// pair to RTS (`init_qp_attr`) and calls `accept` with a null `param`, which sends the RTU; where
/// the identifier owns a queue pair, librdmacm does both and shows the program ESTABLISHED instead.
/// The side that accepts brings its queue pair to RTS before it calls `accept`, and gets ESTABLISHED
/// with the RTU. Datagrams: the side that connected gets ESTABLISHED, the other one no event.
///
/// After `disconnect` of one side the other gets DISCONNECTED, and calls `disconnect` (or
/// `destroy_id`) too, upon which the first side gets DISCONNECTED. TIMEWAIT_EXIT follows on both, a
/// second later. If the peer's process ends, DISCONNECTED comes at once.
///
/// Asynchronous calls (`resolve_addr`, `resolve_route`, `connect`, `accept`, `disconnect`, `join`)
/// return at once, and an event tells what became of them.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct EngineCmApi {
    pub create_channel: unsafe extern "C" fn(out: *mut EngineCmChannel) -> i32,
    /// Busy while identifiers use it. Closes the descriptor.
    pub destroy_channel: unsafe extern "C" fn(channel: CmChannelHandle) -> i32,
    /// Takes the next event. Blocks, or not, as [`EngineApi::get_async_event`] does.
    pub get_event: unsafe extern "C" fn(channel: CmChannelHandle, out: *mut EngineCmEvent) -> i32,
    /// Takes the next event that is queued already; WouldBlock if there is none. Makes no progress: to poll
    /// a completion queue does.
    pub take_event: unsafe extern "C" fn(channel: CmChannelHandle, out: *mut EngineCmEvent) -> i32,
    /// Tells a plan of faults, if there is one, that names are asked for; only then is the device opened.
    pub note_getaddrinfo: unsafe extern "C" fn() -> i32,
    pub create_id: unsafe extern "C" fn(init: *const EngineCmIdInit, out: *mut CmIdHandle) -> i32,
    /// Destroys an identifier in any state; its peer, if connected, is told. From its return on, no
    /// event of it is handed out; `out` says how many were in its life, where a connect request counts
    /// as an event of the listener, and events of groups count in `leave` only. A child whose connect
    /// request was not taken from the channel goes with its listener.
    pub destroy_id: unsafe extern "C" fn(id: CmIdHandle, out: *mut u32) -> i32,
    /// Names the identifier of a connect request for events to come.
    pub set_cookie: unsafe extern "C" fn(id: CmIdHandle, cookie: u64) -> i32,
    /// Moves an identifier and its queued events to another channel; `out` as in `destroy_id`.
    pub migrate_id:
        unsafe extern "C" fn(id: CmIdHandle, channel: CmChannelHandle, out: *mut u32) -> i32,
    /// Queues RDMA_CM_EVENT_USER, ADDRINFO_RESOLVED or ADDRINFO_ERROR; others are Invalid.
    pub write_event: unsafe extern "C" fn(id: CmIdHandle, event: u32, status: i32, arg: u64) -> i32,
    /// Binds to an address and port; port 0: any free one. A wildcard address leaves the device open.
    /// AddressNotAvailable if it is not of this host, or is the wildcard and the port is taken, as in
    /// Linux; AddressInUse if the port of another is taken.
    pub bind_addr: unsafe extern "C" fn(id: CmIdHandle, addr: *const sockaddr) -> i32,
    /// Finds the device that reaches `dst`, binding to `src` (may be null) or to a suitable address.
    pub resolve_addr: unsafe extern "C" fn(
        id: CmIdHandle,
        src: *const sockaddr,
        dst: *const sockaddr,
        timeout_ms: u32,
    ) -> i32,
    pub resolve_route: unsafe extern "C" fn(id: CmIdHandle, timeout_ms: u32) -> i32,
    /// 0 or less: the longest queue of requests that are not taken yet.
    pub listen: unsafe extern "C" fn(id: CmIdHandle, backlog: i32) -> i32,
    pub connect: unsafe extern "C" fn(id: CmIdHandle, param: *const EngineCmParam) -> i32,
    /// Of a request: accepts it. Of an identifier that has got its CONNECT_RESPONSE: `param` may be
    /// null; tells the peer that the connection stands (RTU), and gives no event here.
    pub accept: unsafe extern "C" fn(id: CmIdHandle, param: *const EngineCmParam) -> i32,
    /// `reason`: [`RDMA_CM_REJECT_CONSUMER`] or [`RDMA_CM_REJECT_VENDOR_OPTION`].
    pub reject: unsafe extern "C" fn(
        id: CmIdHandle,
        reason: u32,
        private_data: *const c_void,
        private_data_len: u32,
    ) -> i32,
    pub disconnect: unsafe extern "C" fn(id: CmIdHandle) -> i32,
    /// `rdma_notify`; `event` is `IBV_EVENT_COMM_EST`, others are Invalid. Of an identifier that has
    /// accepted: ESTABLISHED, without waiting for the peer to say so. Of one that has got its
    /// CONNECT_RESPONSE: as `accept` (`rdma_establish`). Connected if it stands already.
    pub notify: unsafe extern "C" fn(id: CmIdHandle, event: u32) -> i32,
    pub set_option: unsafe extern "C" fn(
        id: CmIdHandle,
        level: i32,
        name: i32,
        value: *const c_void,
        length: usize,
    ) -> i32,
    pub query_route: unsafe extern "C" fn(id: CmIdHandle, out: *mut EngineCmRoute) -> i32,
    /// What `ibv_modify_qp` needs to bring a queue pair into `attr->qp_state` (INIT, RTR or RTS).
    pub init_qp_attr:
        unsafe extern "C" fn(id: CmIdHandle, attr: *mut ibv_qp_attr, mask: *mut u32) -> i32,
    /// Joins a multicast group; `flags`: `RDMA_MC_JOIN_FLAG_*`. The cookie names the membership: no other one
    /// of the identifier has it.
    pub join:
        unsafe extern "C" fn(id: CmIdHandle, addr: *const sockaddr, flags: u32, cookie: u64) -> i32,
    /// Ends a membership; `out`: how many events of it were handed out.
    pub leave: unsafe extern "C" fn(id: CmIdHandle, cookie: u64, out: *mut u32) -> i32,
}

unsupported! {
    EngineCmApi: "A table without connection management: every call is NotSupported.";
    create_channel(*mut EngineCmChannel);
    destroy_channel(CmChannelHandle);
    get_event(CmChannelHandle, *mut EngineCmEvent);
    take_event(CmChannelHandle, *mut EngineCmEvent);
    note_getaddrinfo();
    create_id(*const EngineCmIdInit, *mut CmIdHandle);
    destroy_id(CmIdHandle, *mut u32);
    set_cookie(CmIdHandle, u64);
    migrate_id(CmIdHandle, CmChannelHandle, *mut u32);
    write_event(CmIdHandle, u32, i32, u64);
    bind_addr(CmIdHandle, *const sockaddr);
    resolve_addr(CmIdHandle, *const sockaddr, *const sockaddr, u32);
    resolve_route(CmIdHandle, u32);
    listen(CmIdHandle, i32);
    connect(CmIdHandle, *const EngineCmParam);
    accept(CmIdHandle, *const EngineCmParam);
    reject(CmIdHandle, u32, *const c_void, u32);
    disconnect(CmIdHandle);
    notify(CmIdHandle, u32);
    set_option(CmIdHandle, i32, i32, *const c_void, usize);
    query_route(CmIdHandle, *mut EngineCmRoute);
    init_qp_attr(CmIdHandle, *mut ibv_qp_attr, *mut u32);
    join(CmIdHandle, *const sockaddr, u32, u64);
    leave(CmIdHandle, u64, *mut u32);
}
