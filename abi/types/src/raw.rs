//! Raw packets: flow rules, receive work queues and their indirection tables; and the part of the private
//! interface that is about them.
use libc::{c_int, c_void, pthread_cond_t, pthread_mutex_t};

use crate::*;

constants! {
    /// `enum ibv_flow_attr_type`
    u32 {
        IBV_FLOW_ATTR_NORMAL = 0, IBV_FLOW_ATTR_ALL_DEFAULT = 1, IBV_FLOW_ATTR_MC_DEFAULT = 2,
        IBV_FLOW_ATTR_SNIFFER = 3,
    }
}
constants! {
    /// `enum ibv_flow_flags`
    u32 { IBV_FLOW_ATTR_FLAGS_DONT_TRAP = 1 << 1, IBV_FLOW_ATTR_FLAGS_EGRESS = 1 << 2, }
}
constants! {
    /// `enum ibv_flow_spec_type`
    u32 {
        IBV_FLOW_SPEC_ETH = 0x20, IBV_FLOW_SPEC_IPV4 = 0x30, IBV_FLOW_SPEC_IPV6 = 0x31,
        IBV_FLOW_SPEC_IPV4_EXT = 0x32, IBV_FLOW_SPEC_TCP = 0x40, IBV_FLOW_SPEC_UDP = 0x41,
        IBV_FLOW_SPEC_VXLAN_TUNNEL = 0x50, IBV_FLOW_SPEC_INNER = 0x100,
        IBV_FLOW_SPEC_ACTION_TAG = 0x1000, IBV_FLOW_SPEC_ACTION_DROP = 0x1001,
        IBV_FLOW_SPEC_ACTION_COUNT = 0x1003,
    }
}
constants! {
    /// `enum ibv_counter_description`, `enum ibv_read_counters_flags`
    u32 {
        IBV_COUNTER_PACKETS = 0, IBV_COUNTER_BYTES = 1,
        IBV_READ_COUNTERS_ATTR_PREFER_CACHED = 1,
    }
}
constants! {
    /// `enum ibv_wq_type`, `enum ibv_wq_state`, `enum ibv_wq_attr_mask`, `enum ibv_wq_init_attr_mask`
    u32 {
        IBV_WQT_RQ = 0, IBV_WQS_RESET = 0, IBV_WQS_RDY = 1, IBV_WQS_ERR = 2,
        IBV_WQS_UNKNOWN = 3,
        IBV_WQ_ATTR_STATE = 1, IBV_WQ_ATTR_CURR_STATE = 1 << 1, IBV_WQ_ATTR_FLAGS = 1 << 2,
        IBV_WQ_INIT_ATTR_FLAGS = 1,
    }
}
constants! {
    /// `enum ibv_rx_hash_function_flags`
    u8 { IBV_RX_HASH_FUNC_TOEPLITZ = 1, }
}

/// A rule, in front of its specifications; see `ibv_create_flow(3)`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct ibv_flow_attr {
    pub comp_mask: u32,
    pub r#type: u32,
    pub size: u16,
    pub priority: u16,
    pub num_of_specs: u8,
    pub port: u8,
    pub flags: u32,
}

/// How each specification begins.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct ibv_flow_spec_header {
    pub r#type: u32,
    pub size: u16,
}

macro_rules! specifications {
    ($($(#[$doc:meta])* $name:ident of $filter:ident { $($field:ident: $ty:ty),* })*) => {$(
        $(#[$doc])*
        #[repr(C)]
        #[derive(Clone, Copy)]
        pub struct $filter { $(pub $field: $ty),* }

        $(#[$doc])*
        #[repr(C)]
        #[derive(Clone, Copy)]
        pub struct $name {
            pub r#type: u32,
            pub size: u16,
            pub val: $filter,
            pub mask: $filter,
        }
    )*};
}

specifications! {
    /// Fields of an Ethernet header, in network order.
    ibv_flow_spec_eth of ibv_flow_eth_filter {
        dst_mac: [u8; 6], src_mac: [u8; 6], ether_type: u16, vlan_tag: u16
    }
    /// Addresses of an IPv4 header.
    ibv_flow_spec_ipv4 of ibv_flow_ipv4_filter { src_ip: u32, dst_ip: u32 }
    /// More fields of an IPv4 header.
    ibv_flow_spec_ipv4_ext of ibv_flow_ipv4_ext_filter {
        src_ip: u32, dst_ip: u32, proto: u8, tos: u8, ttl: u8, flags: u8
    }
    /// Fields of an IPv6 header.
    ibv_flow_spec_ipv6 of ibv_flow_ipv6_filter {
        src_ip: [u8; 16], dst_ip: [u8; 16], flow_label: u32, next_hdr: u8, traffic_class: u8,
        hop_limit: u8
    }
    /// Ports of a TCP or UDP header.
    ibv_flow_spec_tcp_udp of ibv_flow_tcp_udp_filter { dst_port: u16, src_port: u16 }
    /// The identifier of a VXLAN header.
    ibv_flow_spec_tunnel of ibv_flow_tunnel_filter { tunnel_id: u32 }
}

/// The action that counts what a rule matches.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct ibv_flow_spec_counter_action {
    pub r#type: u32,
    pub size: u16,
    pub counters: *mut ibv_counters,
}

/// Counters.
#[repr(C)]
pub struct ibv_counters {
    pub context: *mut ibv_context,
}

/// Counters as the facades make them: where a rule names some, the engine finds the handle behind what
/// programs know.
#[repr(C)]
pub struct EngineCounters {
    pub base: ibv_counters,
    pub handle: CountersHandle,
}

/// See `ibv_create_counters(3)`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct ibv_counters_init_attr {
    pub comp_mask: u32,
}

/// See `ibv_attach_counters_point_flow(3)`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct ibv_counter_attach_attr {
    pub counter_desc: u32,
    pub index: u32,
    pub comp_mask: u32,
}

/// A rule that stands.
#[repr(C)]
pub struct ibv_flow {
    pub comp_mask: u32,
    pub context: *mut ibv_context,
    pub handle: u32,
}

/// A receive work queue.
#[repr(C)]
pub struct ibv_wq {
    pub context: *mut ibv_context,
    pub wq_context: *mut c_void,
    pub pd: *mut ibv_pd,
    pub cq: *mut ibv_cq,
    pub wq_num: u32,
    pub handle: u32,
    pub state: u32,
    pub wq_type: u32,
    pub post_recv:
        Option<unsafe extern "C" fn(*mut ibv_wq, *mut ibv_recv_wr, *mut *mut ibv_recv_wr) -> c_int>,
    pub mutex: pthread_mutex_t,
    pub cond: pthread_cond_t,
    pub events_completed: u32,
    pub comp_mask: u32,
}

/// See `ibv_create_wq(3)`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct ibv_wq_init_attr {
    pub wq_context: *mut c_void,
    pub wq_type: u32,
    pub max_wr: u32,
    pub max_sge: u32,
    pub pd: *mut ibv_pd,
    pub cq: *mut ibv_cq,
    pub comp_mask: u32,
    pub create_flags: u32,
}

/// See `ibv_modify_wq(3)`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct ibv_wq_attr {
    pub attr_mask: u32,
    pub wq_state: u32,
    pub curr_wq_state: u32,
    pub flags: u32,
    pub flags_mask: u32,
}

/// A table of receive work queues.
#[repr(C)]
pub struct ibv_rwq_ind_table {
    pub context: *mut ibv_context,
    pub ind_tbl_handle: c_int,
    pub ind_tbl_num: c_int,
    pub comp_mask: u32,
}

/// See `ibv_create_rwq_ind_table(3)`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct ibv_rwq_ind_table_init_attr {
    pub log_ind_tbl_size: u32,
    pub ind_tbl: *mut *mut ibv_wq,
    pub comp_mask: u32,
}

/// How a receive work queue is wanted.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct EngineWqInit {
    pub cq: CqHandle,
    pub max_wr: u32,
    pub max_sge: u32,
}

/// What `create_wq` gives back.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct EngineWq {
    pub wq: WqHandle,
    /// The number that its completions have for that of a queue pair.
    pub wq_num: u32,
    /// What it really has, at least as much as asked for.
    pub max_wr: u32,
    pub max_sge: u32,
}

/// How a queue pair that receives by a table is wanted.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct EngineHashedQpInit {
    pub table: TableHandle,
    /// Its key is valid for reads of its length. Another function than Toeplitz, a key of another length than
    /// 40, and unknown fields are NotSupported.
    pub hash: ibv_rx_hash_conf,
    /// Returned in events of this QP.
    pub cookie: u64,
}

/// The part of the table that is about raw packets. The rules of [`EngineApi`](crate::EngineApi) hold here.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct EngineRawApi {
    /// Adds a rule for frames to a raw packet QP (`ibv_create_flow(3)`); `attr` stands in front of the
    /// `num_of_specs` specifications, each as long as its `size` says. Types of rules, specifications,
    /// actions and flags that the device does not have: NotSupported. Another type of QP or another port:
    /// Invalid. A QP that has rules cannot be destroyed: Busy.
    pub create_flow:
        unsafe extern "C" fn(qp: QpHandle, attr: *const ibv_flow_attr, out: *mut FlowHandle) -> i32,
    pub destroy_flow: unsafe extern "C" fn(flow: FlowHandle) -> i32,
    pub create_counters:
        unsafe extern "C" fn(context: ContextHandle, out: *mut CountersHandle) -> i32,
    /// Busy while rules count there.
    pub destroy_counters: unsafe extern "C" fn(counters: CountersHandle) -> i32,
    /// Has a value grow by what rules made later count: Busy while some count there already. An unknown
    /// description is NotSupported.
    pub attach_counter:
        unsafe extern "C" fn(counters: CountersHandle, description: u32, index: u32) -> i32,
    /// Writes the first `count` values; 0 where there is none.
    pub read_counters:
        unsafe extern "C" fn(counters: CountersHandle, values: *mut u64, count: u32) -> i32,
    /// Creates a receive work queue in RESET.
    pub create_wq:
        unsafe extern "C" fn(pd: PdHandle, init: *const EngineWqInit, out: *mut EngineWq) -> i32,
    /// Moves it to a state, `IBV_WQS_*`, if it is in the state `curr` (UNKNOWN: in any). Another `curr`, ERR
    /// to RDY and unknown states are Invalid.
    pub modify_wq: unsafe extern "C" fn(wq: WqHandle, curr: u32, state: u32) -> i32,
    /// Busy while a table has it. It has no events.
    pub destroy_wq: unsafe extern "C" fn(wq: WqHandle) -> i32,
    /// Posts a list of receives. As [`EngineApi::post_recv`].
    pub post_wq_recv: unsafe extern "C" fn(
        wq: WqHandle,
        wr: *const ibv_recv_wr,
        bad: *mut *const ibv_recv_wr,
    ) -> i32,
    /// Creates a table of `count` work queues of this context, a power of two, else Invalid.
    pub create_ind_table: unsafe extern "C" fn(
        context: ContextHandle,
        queues: *const WqHandle,
        count: u32,
        out: *mut TableHandle,
    ) -> i32,
    /// Busy while a QP receives by it.
    pub destroy_ind_table: unsafe extern "C" fn(table: TableHandle) -> i32,
    /// Creates a raw packet QP that receives by a table, and sends nothing. It is in RTR and stays there.
    pub create_hashed_qp: unsafe extern "C" fn(
        pd: PdHandle,
        init: *const EngineHashedQpInit,
        out: *mut EngineQp,
    ) -> i32,
}

unsupported! {
    EngineRawApi: "A table without raw packets: every call is NotSupported.";
    create_flow(QpHandle, *const ibv_flow_attr, *mut FlowHandle);
    destroy_flow(FlowHandle);
    create_counters(ContextHandle, *mut CountersHandle);
    destroy_counters(CountersHandle);
    attach_counter(CountersHandle, u32, u32);
    read_counters(CountersHandle, *mut u64, u32);
    create_wq(PdHandle, *const EngineWqInit, *mut EngineWq);
    modify_wq(WqHandle, u32, u32);
    destroy_wq(WqHandle);
    post_wq_recv(WqHandle, *const ibv_recv_wr, *mut *const ibv_recv_wr);
    create_ind_table(ContextHandle, *const WqHandle, u32, *mut TableHandle);
    destroy_ind_table(TableHandle);
    create_hashed_qp(PdHandle, *const EngineHashedQpInit, *mut EngineQp);
}
