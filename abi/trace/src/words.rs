//! Names of constants, as programs write them.

use quipu_abi_types::*;
use quipu_cabi::Errno;

use crate::value::Value;

type Table = [(u64, &'static str)];

macro_rules! tables {
    ($($table:ident: $($name:ident)*;)*) => {
        $(pub(crate) const $table: &Table = &[$(($name as u64, stringify!($name))),*];)*
    };
}

tables! {
    OPCODES: IBV_WR_RDMA_WRITE IBV_WR_RDMA_WRITE_WITH_IMM IBV_WR_SEND IBV_WR_SEND_WITH_IMM
        IBV_WR_RDMA_READ IBV_WR_ATOMIC_CMP_AND_SWP IBV_WR_ATOMIC_FETCH_AND_ADD IBV_WR_LOCAL_INV
        IBV_WR_BIND_MW IBV_WR_SEND_WITH_INV IBV_WR_TSO IBV_WR_FLUSH IBV_WR_ATOMIC_WRITE;
    SEND_FLAGS: IBV_SEND_FENCE IBV_SEND_SIGNALED IBV_SEND_SOLICITED IBV_SEND_INLINE
        IBV_SEND_IP_CSUM;
    STATUSES: IBV_WC_SUCCESS IBV_WC_LOC_LEN_ERR IBV_WC_LOC_QP_OP_ERR IBV_WC_LOC_EEC_OP_ERR
        IBV_WC_LOC_PROT_ERR IBV_WC_WR_FLUSH_ERR IBV_WC_MW_BIND_ERR IBV_WC_BAD_RESP_ERR
        IBV_WC_LOC_ACCESS_ERR IBV_WC_REM_INV_REQ_ERR IBV_WC_REM_ACCESS_ERR IBV_WC_REM_OP_ERR
        IBV_WC_RETRY_EXC_ERR IBV_WC_RNR_RETRY_EXC_ERR IBV_WC_LOC_RDD_VIOL_ERR
        IBV_WC_REM_INV_RD_REQ_ERR IBV_WC_REM_ABORT_ERR IBV_WC_INV_EECN_ERR
        IBV_WC_INV_EEC_STATE_ERR IBV_WC_FATAL_ERR IBV_WC_RESP_TIMEOUT_ERR IBV_WC_GENERAL_ERR
        IBV_WC_TM_ERR IBV_WC_TM_RNDV_INCOMPLETE;
    WC_OPCODES: IBV_WC_SEND IBV_WC_RDMA_WRITE IBV_WC_RDMA_READ IBV_WC_COMP_SWAP IBV_WC_FETCH_ADD
        IBV_WC_BIND_MW IBV_WC_LOCAL_INV IBV_WC_TSO IBV_WC_FLUSH IBV_WC_ATOMIC_WRITE IBV_WC_RECV
        IBV_WC_RECV_RDMA_WITH_IMM;
    WC_FLAGS: IBV_WC_GRH IBV_WC_WITH_IMM IBV_WC_WITH_INV;
    ACCESS: IBV_ACCESS_LOCAL_WRITE IBV_ACCESS_REMOTE_WRITE IBV_ACCESS_REMOTE_READ
        IBV_ACCESS_REMOTE_ATOMIC IBV_ACCESS_MW_BIND IBV_ACCESS_ZERO_BASED IBV_ACCESS_ON_DEMAND
        IBV_ACCESS_HUGETLB IBV_ACCESS_FLUSH_GLOBAL IBV_ACCESS_FLUSH_PERSISTENT
        IBV_ACCESS_RELAXED_ORDERING;
    QP_TYPES: IBV_QPT_RC IBV_QPT_UC IBV_QPT_UD IBV_QPT_RAW_PACKET IBV_QPT_XRC_SEND
        IBV_QPT_XRC_RECV IBV_QPT_DRIVER;
    QP_STATES: IBV_QPS_RESET IBV_QPS_INIT IBV_QPS_RTR IBV_QPS_RTS IBV_QPS_SQD IBV_QPS_SQE
        IBV_QPS_ERR IBV_QPS_UNKNOWN;
    QP_MASK: IBV_QP_STATE IBV_QP_CUR_STATE IBV_QP_EN_SQD_ASYNC_NOTIFY IBV_QP_ACCESS_FLAGS
        IBV_QP_PKEY_INDEX IBV_QP_PORT IBV_QP_QKEY IBV_QP_AV IBV_QP_PATH_MTU IBV_QP_TIMEOUT
        IBV_QP_RETRY_CNT IBV_QP_RNR_RETRY IBV_QP_RQ_PSN IBV_QP_MAX_QP_RD_ATOMIC IBV_QP_ALT_PATH
        IBV_QP_MIN_RNR_TIMER IBV_QP_SQ_PSN IBV_QP_MAX_DEST_RD_ATOMIC IBV_QP_PATH_MIG_STATE
        IBV_QP_CAP IBV_QP_DEST_QPN IBV_QP_RATE_LIMIT;
    MTUS: IBV_MTU_256 IBV_MTU_512 IBV_MTU_1024 IBV_MTU_2048 IBV_MTU_4096;
    PORT_STATES: IBV_PORT_NOP IBV_PORT_DOWN IBV_PORT_INIT IBV_PORT_ARMED IBV_PORT_ACTIVE
        IBV_PORT_ACTIVE_DEFER;
    EVENTS: IBV_EVENT_CQ_ERR IBV_EVENT_QP_FATAL IBV_EVENT_QP_REQ_ERR IBV_EVENT_QP_ACCESS_ERR
        IBV_EVENT_COMM_EST IBV_EVENT_SQ_DRAINED IBV_EVENT_PATH_MIG IBV_EVENT_PATH_MIG_ERR
        IBV_EVENT_DEVICE_FATAL IBV_EVENT_PORT_ACTIVE IBV_EVENT_PORT_ERR IBV_EVENT_LID_CHANGE
        IBV_EVENT_PKEY_CHANGE IBV_EVENT_SM_CHANGE IBV_EVENT_SRQ_ERR IBV_EVENT_SRQ_LIMIT_REACHED
        IBV_EVENT_QP_LAST_WQE_REACHED IBV_EVENT_CLIENT_REREGISTER IBV_EVENT_GID_CHANGE
        IBV_EVENT_WQ_FATAL IBV_EVENT_DEVICE_SPEED_CHANGE;
    CM_EVENTS: RDMA_CM_EVENT_ADDR_RESOLVED RDMA_CM_EVENT_ADDR_ERROR RDMA_CM_EVENT_ROUTE_RESOLVED
        RDMA_CM_EVENT_ROUTE_ERROR RDMA_CM_EVENT_CONNECT_REQUEST RDMA_CM_EVENT_CONNECT_RESPONSE
        RDMA_CM_EVENT_CONNECT_ERROR RDMA_CM_EVENT_UNREACHABLE RDMA_CM_EVENT_REJECTED
        RDMA_CM_EVENT_ESTABLISHED RDMA_CM_EVENT_DISCONNECTED RDMA_CM_EVENT_DEVICE_REMOVAL
        RDMA_CM_EVENT_MULTICAST_JOIN RDMA_CM_EVENT_MULTICAST_ERROR RDMA_CM_EVENT_ADDR_CHANGE
        RDMA_CM_EVENT_TIMEWAIT_EXIT RDMA_CM_EVENT_ADDRINFO_RESOLVED
        RDMA_CM_EVENT_ADDRINFO_ERROR RDMA_CM_EVENT_USER RDMA_CM_EVENT_INTERNAL;
    PORT_SPACES: RDMA_PS_IPOIB RDMA_PS_TCP RDMA_PS_UDP RDMA_PS_IB;
}

/// A constant of an enumeration by its name, or the number where it has none.
pub(crate) fn word(table: &Table, value: u32) -> Value {
    match table.iter().find(|(known, _)| *known == u64::from(value)) {
        Some((_, name)) => Value::Word((*name).into()),
        None => Value::Number(value.into()),
    }
}

/// Bits by their names, with a bar between them; those without a name as a number.
pub(crate) fn bits(table: &Table, value: u64) -> Value {
    let mut rest = value;
    let mut names: Vec<String> = Vec::new();
    for (bit, name) in table {
        if value & bit != 0 {
            names.push((*name).into());
            rest &= !bit;
        }
    }
    if rest != 0 || names.is_empty() {
        names.push(if rest == 0 { "0".into() } else { format!("{rest:#x}") });
    }
    Value::Word(names.join("|"))
}

/// The name for a number among the arguments of a function, where it has one.
pub(crate) fn of(function: &str, arg: &str, value: &Value) -> Option<Value> {
    let number = match *value {
        Value::Number(number) => number as u64,
        Value::Hex(number) => number,
        _ => return None,
    };
    match (function, arg) {
        (_, "access") => Some(bits(ACCESS, number)),
        ("ibv_modify_qp" | "ibv_query_qp", "mask") => Some(bits(QP_MASK, number)),
        ("rdma_create_id", "ps" | "space") => Some(word(PORT_SPACES, number as u32)),
        _ => None,
    }
}

macro_rules! errnos {
    ($($name:ident)*) => { &[$((libc::$name, stringify!($name))),*] };
}

/// Numbers that calls fail with.
const ERRNOS: &[(i32, &str)] = errnos!(
    EPERM ENOENT ESRCH EINTR EIO ENXIO E2BIG EBADF ECHILD EAGAIN ENOMEM EACCES EFAULT EBUSY EEXIST
    ENODEV ENOTDIR EINVAL ENFILE EMFILE EFBIG ENOSPC EPIPE ERANGE ENOSYS EPROTO ENOTSOCK EMSGSIZE
    ENOPROTOOPT EPROTONOSUPPORT EOPNOTSUPP EAFNOSUPPORT EADDRINUSE EADDRNOTAVAIL ENETDOWN
    ENETUNREACH ECONNABORTED ECONNRESET ENOBUFS EISCONN ENOTCONN ETIMEDOUT ECONNREFUSED EHOSTDOWN
    EHOSTUNREACH EALREADY EINPROGRESS ESTALE
);

/// The name of an error number.
pub(crate) fn errno(errno: Errno) -> String {
    let known = ERRNOS.iter().find(|(number, _)| *number == errno.0);
    known.map_or_else(|| format!("errno {}", errno.0), |(_, name)| (*name).to_owned())
}
