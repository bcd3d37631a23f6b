//! The structures and constants of `rdma/rdma_cma.h`, and of `infiniband/sa.h` what it needs.
use libc::{c_char, c_int, c_void, sockaddr, sockaddr_storage, socklen_t};

use crate::*;

/// The family of [`sockaddr_ib`].
pub const AF_IB: c_int = 27;

/// An address of InfiniBand's own (`infiniband/ib.h`): a GID, and the service there. All but family and scope
/// are big endian.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct sockaddr_ib {
    pub sib_family: u16,
    pub sib_pkey: u16,
    pub sib_flowinfo: u32,
    pub sib_addr: ibv_gid,
    /// For connection management a port space, `RDMA_PS_*` << 16, and a port.
    pub sib_sid: u64,
    /// Which bits of that matter.
    pub sib_sid_mask: u64,
    pub sib_scope_id: u64,
}

/// The InfiniBand part of an identifier's addresses. The key is big endian.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct rdma_ib_addr {
    pub sgid: ibv_gid,
    pub dgid: ibv_gid,
    pub pkey: u16,
}

/// Both ends of an identifier. In C unions, of which the `sockaddr_storage` is the largest.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct rdma_addr {
    pub src_storage: sockaddr_storage,
    pub dst_storage: sockaddr_storage,
    pub ibaddr: rdma_ib_addr,
}

/// A path as a subnet administrator would describe it. LIDs, flow label and key are big endian.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct ibv_sa_path_rec {
    pub dgid: ibv_gid,
    pub sgid: ibv_gid,
    pub dlid: u16,
    pub slid: u16,
    pub raw_traffic: c_int,
    pub flow_label: u32,
    pub hop_limit: u8,
    pub traffic_class: u8,
    pub reversible: c_int,
    pub numb_path: u8,
    pub pkey: u16,
    pub sl: u8,
    pub mtu_selector: u8,
    pub mtu: u8,
    pub rate_selector: u8,
    pub rate: u8,
    pub packet_life_time_selector: u8,
    pub packet_life_time: u8,
    pub preference: u8,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct rdma_route {
    pub addr: rdma_addr,
    pub path_rec: *mut ibv_sa_path_rec,
    pub num_paths: c_int,
}

/// An event channel; `fd` is a real descriptor.
#[repr(C)]
pub struct rdma_event_channel {
    pub fd: c_int,
}

/// An identifier: what a socket is to TCP.
#[repr(C)]
pub struct rdma_cm_id {
    pub verbs: *mut ibv_context,
    pub channel: *mut rdma_event_channel,
    pub context: *mut c_void,
    pub qp: *mut ibv_qp,
    pub route: rdma_route,
    pub ps: u32,
    pub port_num: u8,
    pub event: *mut rdma_cm_event,
    pub send_cq_channel: *mut ibv_comp_channel,
    pub send_cq: *mut ibv_cq,
    pub recv_cq_channel: *mut ibv_comp_channel,
    pub recv_cq: *mut ibv_cq,
    pub srq: *mut ibv_srq,
    pub pd: *mut ibv_pd,
    pub qp_type: u32,
}

/// See `rdma_connect(3)`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct rdma_conn_param {
    pub private_data: *const c_void,
    pub private_data_len: u8,
    pub responder_resources: u8,
    pub initiator_depth: u8,
    pub flow_control: u8,
    pub retry_count: u8,
    pub rnr_retry_count: u8,
    pub srq: u8,
    pub qp_num: u32,
}

/// See `rdma_get_cm_event(3)`, UD EVENT DATA.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct rdma_ud_param {
    pub private_data: *const c_void,
    pub private_data_len: u8,
    pub ah_attr: ibv_ah_attr,
    pub qp_num: u32,
    pub qkey: u32,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub union rdma_cm_event_param {
    pub conn: rdma_conn_param,
    pub ud: rdma_ud_param,
    pub arg: u64,
}

/// See `rdma_get_cm_event(3)`.
#[repr(C)]
pub struct rdma_cm_event {
    pub id: *mut rdma_cm_id,
    pub listen_id: *mut rdma_cm_id,
    pub event: u32,
    pub status: c_int,
    pub param: rdma_cm_event_param,
}

/// See `rdma_getaddrinfo(3)`.
#[repr(C)]
pub struct rdma_addrinfo {
    pub ai_flags: c_int,
    pub ai_family: c_int,
    pub ai_qp_type: c_int,
    pub ai_port_space: c_int,
    pub ai_src_len: socklen_t,
    pub ai_dst_len: socklen_t,
    pub ai_src_addr: *mut sockaddr,
    pub ai_dst_addr: *mut sockaddr,
    pub ai_src_canonname: *mut c_char,
    pub ai_dst_canonname: *mut c_char,
    pub ai_route_len: usize,
    pub ai_route: *mut c_void,
    pub ai_connect_len: usize,
    pub ai_connect: *mut c_void,
    pub ai_next: *mut rdma_addrinfo,
}

/// See `rdma_join_multicast_ex(3)`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct rdma_cm_join_mc_attr_ex {
    pub comp_mask: u32,
    pub join_flags: u32,
    pub addr: *mut sockaddr,
}

constants! {
    /// `enum rdma_cm_event_type`
    u32 {
        RDMA_CM_EVENT_ADDR_RESOLVED = 0, RDMA_CM_EVENT_ADDR_ERROR = 1,
        RDMA_CM_EVENT_ROUTE_RESOLVED = 2, RDMA_CM_EVENT_ROUTE_ERROR = 3,
        RDMA_CM_EVENT_CONNECT_REQUEST = 4, RDMA_CM_EVENT_CONNECT_RESPONSE = 5,
        RDMA_CM_EVENT_CONNECT_ERROR = 6, RDMA_CM_EVENT_UNREACHABLE = 7,
        RDMA_CM_EVENT_REJECTED = 8, RDMA_CM_EVENT_ESTABLISHED = 9,
        RDMA_CM_EVENT_DISCONNECTED = 10, RDMA_CM_EVENT_DEVICE_REMOVAL = 11,
        RDMA_CM_EVENT_MULTICAST_JOIN = 12, RDMA_CM_EVENT_MULTICAST_ERROR = 13,
        RDMA_CM_EVENT_ADDR_CHANGE = 14, RDMA_CM_EVENT_TIMEWAIT_EXIT = 15,
        RDMA_CM_EVENT_ADDRINFO_RESOLVED = 16, RDMA_CM_EVENT_ADDRINFO_ERROR = 17,
        RDMA_CM_EVENT_USER = 18, RDMA_CM_EVENT_INTERNAL = 19,
    }
}
constants! {
    /// `enum rdma_port_space`
    u32 {
        RDMA_PS_IPOIB = 0x0002, RDMA_PS_TCP = 0x0106, RDMA_PS_UDP = 0x0111, RDMA_PS_IB = 0x013F,
    }
}
constants! {
    /// The Q_Key of datagram queue pairs and groups of connection management.
    u32 { RDMA_UDP_QKEY = 0x01234567, }
}
constants! {
    /// "As many as the device has", in `rdma_conn_param`.
    u8 { RDMA_MAX_RESP_RES = 0xFF, RDMA_MAX_INIT_DEPTH = 0xFF, }
}
constants! {
    /// `ai_flags` of `rdma_addrinfo`
    c_int {
        RAI_PASSIVE = 1, RAI_NUMERICHOST = 1 << 1, RAI_NOROUTE = 1 << 2, RAI_FAMILY = 1 << 3,
        RAI_SA = 1 << 4, RAI_DNS = 1 << 5,
    }
}
constants! {
    /// `enum rdma_cm_join_mc_attr_mask`
    u32 { RDMA_CM_JOIN_MC_ATTR_ADDRESS = 1, RDMA_CM_JOIN_MC_ATTR_JOIN_FLAGS = 1 << 1, }
}
constants! {
    /// `enum rdma_cm_mc_join_flags`
    u32 { RDMA_MC_JOIN_FLAG_FULLMEMBER = 0, RDMA_MC_JOIN_FLAG_SENDONLY_FULLMEMBER = 1, }
}
constants! {
    /// Levels of `rdma_set_option(3)`
    c_int { RDMA_OPTION_ID = 0, RDMA_OPTION_IB = 1, }
}
constants! {
    /// Names of `rdma_set_option(3)`, level `RDMA_OPTION_ID`; of level `RDMA_OPTION_IB` the last.
    c_int {
        RDMA_OPTION_ID_TOS = 0, RDMA_OPTION_ID_REUSEADDR = 1, RDMA_OPTION_ID_AFONLY = 2,
        RDMA_OPTION_ID_ACK_TIMEOUT = 3, RDMA_OPTION_IB_PATH = 1,
    }
}
