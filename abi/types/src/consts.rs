//! The constants of verbs.h. A C enumeration is a 32-bit integer here: a program may pass any
//! value, so a Rust enumeration would be undefined behaviour at the edge.

/// Defines constants of one C enumeration that share a type.
macro_rules! constants {
    (#[doc = $doc:literal] $ty:ty { $($name:ident = $value:expr,)* }) => {
        $(#[doc = $doc] pub const $name: $ty = $value;)*
    };
}

constants! {
    /// `enum ibv_node_type`
    i32 {
        IBV_NODE_UNKNOWN = -1, IBV_NODE_CA = 1, IBV_NODE_SWITCH = 2, IBV_NODE_ROUTER = 3,
        IBV_NODE_RNIC = 4, IBV_NODE_USNIC = 5, IBV_NODE_USNIC_UDP = 6, IBV_NODE_UNSPECIFIED = 7,
    }
}
constants! {
    /// `enum ibv_transport_type`
    i32 {
        IBV_TRANSPORT_UNKNOWN = -1, IBV_TRANSPORT_IB = 0, IBV_TRANSPORT_IWARP = 1,
        IBV_TRANSPORT_UNSPECIFIED = 4,
    }
}
constants! {
    /// `enum ibv_gid_type`, as `ibv_query_gid_ex` reports it.
    u32 { IBV_GID_TYPE_IB = 0, IBV_GID_TYPE_ROCE_V1 = 1, IBV_GID_TYPE_ROCE_V2 = 2, }
}
constants! {
    /// `enum ibv_gid_type_sysfs`, as the private `ibv_query_gid_type` reports it.
    u32 { IBV_GID_TYPE_SYSFS_IB_ROCE_V1 = 0, IBV_GID_TYPE_SYSFS_ROCE_V2 = 1, }
}
constants! {
    /// `enum ibv_device_cap_flags`
    u32 {
        IBV_DEVICE_CURR_QP_STATE_MOD = 1 << 7, IBV_DEVICE_PORT_ACTIVE_EVENT = 1 << 10,
        IBV_DEVICE_SYS_IMAGE_GUID = 1 << 11, IBV_DEVICE_RC_RNR_NAK_GEN = 1 << 12,
        IBV_DEVICE_SRQ_RESIZE = 1 << 13, IBV_DEVICE_N_NOTIFY_CQ = 1 << 14,
        IBV_DEVICE_MEM_WINDOW = 1 << 17, IBV_DEVICE_XRC = 1 << 20,
        IBV_DEVICE_MEM_MGT_EXTENSIONS = 1 << 21, IBV_DEVICE_MEM_WINDOW_TYPE_2A = 1 << 23,
        IBV_DEVICE_MEM_WINDOW_TYPE_2B = 1 << 24, IBV_DEVICE_MANAGED_FLOW_STEERING = 1 << 29,
    }
}
constants! {
    /// `enum ib_uverbs_device_cap_flags`, which `device_cap_flags_ex` has in addition to the former.
    u64 { IB_UVERBS_DEVICE_FLUSH_GLOBAL = 1 << 38, IB_UVERBS_DEVICE_ATOMIC_WRITE = 1 << 40, }
}
constants! {
    /// `enum ibv_atomic_cap`
    u32 { IBV_ATOMIC_NONE = 0, IBV_ATOMIC_HCA = 1, IBV_ATOMIC_GLOB = 2, }
}
constants! {
    /// `enum ibv_mtu`
    u32 {
        IBV_MTU_256 = 1, IBV_MTU_512 = 2, IBV_MTU_1024 = 3, IBV_MTU_2048 = 4, IBV_MTU_4096 = 5,
    }
}
constants! {
    /// `enum ibv_port_state`
    u32 {
        IBV_PORT_NOP = 0, IBV_PORT_DOWN = 1, IBV_PORT_INIT = 2, IBV_PORT_ARMED = 3,
        IBV_PORT_ACTIVE = 4, IBV_PORT_ACTIVE_DEFER = 5,
    }
}
constants! {
    /// Link layers of a port.
    u8 {
        IBV_LINK_LAYER_UNSPECIFIED = 0, IBV_LINK_LAYER_INFINIBAND = 1,
        IBV_LINK_LAYER_ETHERNET = 2,
    }
}
constants! {
    /// `enum ibv_port_cap_flags`
    u32 { IBV_PORT_CM_SUP = 1 << 16, IBV_PORT_IP_BASED_GIDS = 1 << 26, }
}
constants! {
    /// Flags of `ibv_port_attr.flags`.
    u8 { IBV_QPF_GRH_REQUIRED = 1, }
}
constants! {
    /// `enum ibv_event_type`
    u32 {
        IBV_EVENT_CQ_ERR = 0, IBV_EVENT_QP_FATAL = 1, IBV_EVENT_QP_REQ_ERR = 2,
        IBV_EVENT_QP_ACCESS_ERR = 3, IBV_EVENT_COMM_EST = 4, IBV_EVENT_SQ_DRAINED = 5,
        IBV_EVENT_PATH_MIG = 6, IBV_EVENT_PATH_MIG_ERR = 7, IBV_EVENT_DEVICE_FATAL = 8,
        IBV_EVENT_PORT_ACTIVE = 9, IBV_EVENT_PORT_ERR = 10, IBV_EVENT_LID_CHANGE = 11,
        IBV_EVENT_PKEY_CHANGE = 12, IBV_EVENT_SM_CHANGE = 13, IBV_EVENT_SRQ_ERR = 14,
        IBV_EVENT_SRQ_LIMIT_REACHED = 15, IBV_EVENT_QP_LAST_WQE_REACHED = 16,
        IBV_EVENT_CLIENT_REREGISTER = 17, IBV_EVENT_GID_CHANGE = 18, IBV_EVENT_WQ_FATAL = 19,
        IBV_EVENT_DEVICE_SPEED_CHANGE = 20,
    }
}
constants! {
    /// `enum ibv_wc_status`
    u32 {
        IBV_WC_SUCCESS = 0, IBV_WC_LOC_LEN_ERR = 1, IBV_WC_LOC_QP_OP_ERR = 2,
        IBV_WC_LOC_EEC_OP_ERR = 3, IBV_WC_LOC_PROT_ERR = 4, IBV_WC_WR_FLUSH_ERR = 5,
        IBV_WC_MW_BIND_ERR = 6, IBV_WC_BAD_RESP_ERR = 7, IBV_WC_LOC_ACCESS_ERR = 8,
        IBV_WC_REM_INV_REQ_ERR = 9, IBV_WC_REM_ACCESS_ERR = 10, IBV_WC_REM_OP_ERR = 11,
        IBV_WC_RETRY_EXC_ERR = 12, IBV_WC_RNR_RETRY_EXC_ERR = 13, IBV_WC_LOC_RDD_VIOL_ERR = 14,
        IBV_WC_REM_INV_RD_REQ_ERR = 15, IBV_WC_REM_ABORT_ERR = 16, IBV_WC_INV_EECN_ERR = 17,
        IBV_WC_INV_EEC_STATE_ERR = 18, IBV_WC_FATAL_ERR = 19, IBV_WC_RESP_TIMEOUT_ERR = 20,
        IBV_WC_GENERAL_ERR = 21, IBV_WC_TM_ERR = 22, IBV_WC_TM_RNDV_INCOMPLETE = 23,
    }
}
constants! {
    /// `enum ibv_wc_opcode`
    u32 {
        IBV_WC_SEND = 0, IBV_WC_RDMA_WRITE = 1, IBV_WC_RDMA_READ = 2, IBV_WC_COMP_SWAP = 3,
        IBV_WC_FETCH_ADD = 4, IBV_WC_BIND_MW = 5, IBV_WC_LOCAL_INV = 6, IBV_WC_TSO = 7,
        IBV_WC_FLUSH = 8, IBV_WC_ATOMIC_WRITE = 9, IBV_WC_RECV = 1 << 7,
        IBV_WC_RECV_RDMA_WITH_IMM = (1 << 7) + 1,
    }
}
constants! {
    /// `enum ibv_wc_flags`
    u32 { IBV_WC_GRH = 1, IBV_WC_WITH_IMM = 1 << 1, IBV_WC_WITH_INV = 1 << 3, }
}
constants! {
    /// `enum ibv_create_cq_wc_flags`
    u64 {
        IBV_WC_EX_WITH_BYTE_LEN = 1, IBV_WC_EX_WITH_IMM = 1 << 1, IBV_WC_EX_WITH_QP_NUM = 1 << 2,
        IBV_WC_EX_WITH_SRC_QP = 1 << 3, IBV_WC_EX_WITH_SLID = 1 << 4, IBV_WC_EX_WITH_SL = 1 << 5,
        IBV_WC_EX_WITH_DLID_PATH_BITS = 1 << 6, IBV_WC_EX_WITH_COMPLETION_TIMESTAMP = 1 << 7,
        IBV_WC_EX_WITH_COMPLETION_TIMESTAMP_WALLCLOCK = 1 << 11, IBV_WC_STANDARD_FLAGS = 0x7f,
    }
}
constants! {
    /// `enum ibv_access_flags`
    u32 {
        IBV_ACCESS_LOCAL_WRITE = 1, IBV_ACCESS_REMOTE_WRITE = 1 << 1,
        IBV_ACCESS_REMOTE_READ = 1 << 2, IBV_ACCESS_REMOTE_ATOMIC = 1 << 3,
        IBV_ACCESS_MW_BIND = 1 << 4, IBV_ACCESS_ZERO_BASED = 1 << 5,
        IBV_ACCESS_ON_DEMAND = 1 << 6, IBV_ACCESS_HUGETLB = 1 << 7,
        IBV_ACCESS_FLUSH_GLOBAL = 1 << 8, IBV_ACCESS_FLUSH_PERSISTENT = 1 << 9,
        IBV_ACCESS_RELAXED_ORDERING = 1 << 20, IBV_ACCESS_OPTIONAL_RANGE = 0x3ff0_0000,
    }
}
constants! {
    /// `enum ibv_rereg_mr_flags`
    u32 {
        IBV_REREG_MR_CHANGE_TRANSLATION = 1, IBV_REREG_MR_CHANGE_PD = 1 << 1,
        IBV_REREG_MR_CHANGE_ACCESS = 1 << 2, IBV_REREG_MR_FLAGS_SUPPORTED = 7,
    }
}
constants! {
    /// `enum ibv_rereg_mr_err_code`
    i32 { IBV_REREG_MR_ERR_INPUT = -1, IBV_REREG_MR_ERR_CMD = -4, }
}
constants! {
    /// `enum ibv_mw_type`
    u32 { IBV_MW_TYPE_1 = 1, IBV_MW_TYPE_2 = 2, }
}
constants! {
    /// `enum ibv_srq_attr_mask`
    u32 { IBV_SRQ_MAX_WR = 1, IBV_SRQ_LIMIT = 1 << 1, }
}
constants! {
    /// `enum ibv_srq_type`
    u32 { IBV_SRQT_BASIC = 0, IBV_SRQT_XRC = 1, IBV_SRQT_TM = 2, }
}
constants! {
    /// `enum ibv_srq_init_attr_mask`
    u32 {
        IBV_SRQ_INIT_ATTR_TYPE = 1, IBV_SRQ_INIT_ATTR_PD = 1 << 1,
        IBV_SRQ_INIT_ATTR_XRCD = 1 << 2, IBV_SRQ_INIT_ATTR_CQ = 1 << 3,
        IBV_SRQ_INIT_ATTR_TM = 1 << 4,
    }
}
constants! {
    /// `enum ibv_qp_type`
    u32 {
        IBV_QPT_RC = 2, IBV_QPT_UC = 3, IBV_QPT_UD = 4, IBV_QPT_RAW_PACKET = 8,
        IBV_QPT_XRC_SEND = 9, IBV_QPT_XRC_RECV = 10, IBV_QPT_DRIVER = 0xff,
    }
}
constants! {
    /// `enum ibv_qp_open_attr_mask`
    u32 {
        IBV_QP_OPEN_ATTR_NUM = 1, IBV_QP_OPEN_ATTR_XRCD = 1 << 1, IBV_QP_OPEN_ATTR_CONTEXT = 1 << 2,
        IBV_QP_OPEN_ATTR_TYPE = 1 << 3,
    }
}
constants! {
    /// `enum ibv_qp_init_attr_mask`
    u32 {
        IBV_XRCD_INIT_ATTR_FD = 1, IBV_XRCD_INIT_ATTR_OFLAGS = 1 << 1,
        IBV_QP_INIT_ATTR_PD = 1, IBV_QP_INIT_ATTR_XRCD = 1 << 1,
        IBV_QP_INIT_ATTR_CREATE_FLAGS = 1 << 2, IBV_QP_INIT_ATTR_MAX_TSO_HEADER = 1 << 3,
        IBV_QP_INIT_ATTR_IND_TABLE = 1 << 4, IBV_QP_INIT_ATTR_RX_HASH = 1 << 5,
        IBV_QP_INIT_ATTR_SEND_OPS_FLAGS = 1 << 6,
    }
}
constants! {
    /// `enum ibv_qp_create_send_ops_flags`
    u64 {
        IBV_QP_EX_WITH_RDMA_WRITE = 1, IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM = 1 << 1,
        IBV_QP_EX_WITH_SEND = 1 << 2, IBV_QP_EX_WITH_SEND_WITH_IMM = 1 << 3,
        IBV_QP_EX_WITH_RDMA_READ = 1 << 4, IBV_QP_EX_WITH_ATOMIC_CMP_AND_SWP = 1 << 5,
        IBV_QP_EX_WITH_ATOMIC_FETCH_AND_ADD = 1 << 6, IBV_QP_EX_WITH_LOCAL_INV = 1 << 7,
        IBV_QP_EX_WITH_BIND_MW = 1 << 8, IBV_QP_EX_WITH_SEND_WITH_INV = 1 << 9,
        IBV_QP_EX_WITH_TSO = 1 << 10, IBV_QP_EX_WITH_FLUSH = 1 << 11,
        IBV_QP_EX_WITH_ATOMIC_WRITE = 1 << 12,
    }
}
constants! {
    /// `enum ibv_qp_attr_mask`
    u32 {
        IBV_QP_STATE = 1, IBV_QP_CUR_STATE = 1 << 1, IBV_QP_EN_SQD_ASYNC_NOTIFY = 1 << 2,
        IBV_QP_ACCESS_FLAGS = 1 << 3, IBV_QP_PKEY_INDEX = 1 << 4, IBV_QP_PORT = 1 << 5,
        IBV_QP_QKEY = 1 << 6, IBV_QP_AV = 1 << 7, IBV_QP_PATH_MTU = 1 << 8,
        IBV_QP_TIMEOUT = 1 << 9, IBV_QP_RETRY_CNT = 1 << 10, IBV_QP_RNR_RETRY = 1 << 11,
        IBV_QP_RQ_PSN = 1 << 12, IBV_QP_MAX_QP_RD_ATOMIC = 1 << 13, IBV_QP_ALT_PATH = 1 << 14,
        IBV_QP_MIN_RNR_TIMER = 1 << 15, IBV_QP_SQ_PSN = 1 << 16,
        IBV_QP_MAX_DEST_RD_ATOMIC = 1 << 17, IBV_QP_PATH_MIG_STATE = 1 << 18,
        IBV_QP_CAP = 1 << 19, IBV_QP_DEST_QPN = 1 << 20, IBV_QP_RATE_LIMIT = 1 << 25,
    }
}
constants! {
    /// `enum ibv_qp_state`
    u32 {
        IBV_QPS_RESET = 0, IBV_QPS_INIT = 1, IBV_QPS_RTR = 2, IBV_QPS_RTS = 3, IBV_QPS_SQD = 4,
        IBV_QPS_SQE = 5, IBV_QPS_ERR = 6, IBV_QPS_UNKNOWN = 7,
    }
}
constants! {
    /// `enum ibv_mig_state`
    u32 { IBV_MIG_MIGRATED = 0, IBV_MIG_REARM = 1, IBV_MIG_ARMED = 2, }
}
constants! {
    /// `enum ibv_wr_opcode`
    u32 {
        IBV_WR_RDMA_WRITE = 0, IBV_WR_RDMA_WRITE_WITH_IMM = 1, IBV_WR_SEND = 2,
        IBV_WR_SEND_WITH_IMM = 3, IBV_WR_RDMA_READ = 4, IBV_WR_ATOMIC_CMP_AND_SWP = 5,
        IBV_WR_ATOMIC_FETCH_AND_ADD = 6, IBV_WR_LOCAL_INV = 7, IBV_WR_BIND_MW = 8,
        IBV_WR_SEND_WITH_INV = 9, IBV_WR_TSO = 10, IBV_WR_DRIVER1 = 11, IBV_WR_FLUSH = 14,
        IBV_WR_ATOMIC_WRITE = 15,
    }
}
constants! {
    /// `enum ibv_send_flags`
    u32 {
        IBV_SEND_FENCE = 1, IBV_SEND_SIGNALED = 1 << 1, IBV_SEND_SOLICITED = 1 << 2,
        IBV_SEND_INLINE = 1 << 3, IBV_SEND_IP_CSUM = 1 << 4,
    }
}
constants! {
    /// `enum ibv_cq_init_attr_mask`
    u32 { IBV_CQ_INIT_ATTR_MASK_FLAGS = 1, IBV_CQ_INIT_ATTR_MASK_PD = 1 << 1, }
}
constants! {
    /// `enum ibv_qp_create_flags`, as far as it can be asked for.
    u32 { IBV_QP_CREATE_BLOCK_SELF_MCAST_LB = 1 << 1, }
}
constants! {
    /// `enum ibv_create_cq_attr_flags`
    u32 { IBV_CREATE_CQ_ATTR_SINGLE_THREADED = 1, IBV_CREATE_CQ_ATTR_IGNORE_OVERRUN = 1 << 1, }
}
constants! {
    /// `enum ibv_parent_domain_init_attr_mask`
    u32 {
        IBV_PARENT_DOMAIN_INIT_ATTR_ALLOCATORS = 1, IBV_PARENT_DOMAIN_INIT_ATTR_PD_CONTEXT = 2,
    }
}
constants! {
    /// `enum ibv_odp_general_caps`
    u64 { IBV_ODP_SUPPORT = 1, IBV_ODP_SUPPORT_IMPLICIT = 1 << 1, }
}
constants! {
    /// `enum ibv_odp_transport_cap_bits`
    u32 {
        IBV_ODP_SUPPORT_SEND = 1, IBV_ODP_SUPPORT_RECV = 1 << 1, IBV_ODP_SUPPORT_WRITE = 1 << 2,
        IBV_ODP_SUPPORT_READ = 1 << 3, IBV_ODP_SUPPORT_ATOMIC = 1 << 4,
        IBV_ODP_SUPPORT_SRQ_RECV = 1 << 5, IBV_ODP_SUPPORT_FLUSH = 1 << 6,
        IBV_ODP_SUPPORT_ATOMIC_WRITE = 1 << 7,
    }
}
constants! {
    /// `enum ibv_advise_mr_advice` and its flag.
    u32 {
        IBV_ADVISE_MR_ADVICE_PREFETCH = 0, IBV_ADVISE_MR_ADVICE_PREFETCH_WRITE = 1,
        IBV_ADVISE_MR_ADVICE_PREFETCH_NO_FAULT = 2, IBV_ADVISE_MR_FLAG_FLUSH = 1,
    }
}
constants! {
    /// `enum ibv_cq_attr_mask`
    u32 { IBV_CQ_ATTR_MODERATE = 1, }
}
constants! {
    /// `enum ibv_values_mask`
    u32 { IBV_VALUES_MASK_RAW_CLOCK = 1, }
}
constants! {
    /// `enum ibv_mr_init_attr_mask` of `ibv_reg_mr_ex`.
    u64 {
        IBV_REG_MR_MASK_IOVA = 1, IBV_REG_MR_MASK_ADDR = 1 << 1, IBV_REG_MR_MASK_FD = 1 << 2,
        IBV_REG_MR_MASK_FD_OFFSET = 1 << 3, IBV_REG_MR_MASK_DMAH = 1 << 4,
        IBV_REG_MR_MASK_BUF = 1 << 5,
    }
}
constants! {
    /// `enum ibv_fork_status`
    u32 { IBV_FORK_DISABLED = 0, IBV_FORK_ENABLED = 1, IBV_FORK_UNNEEDED = 2, }
}
