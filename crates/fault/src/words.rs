//! The names that plans use. They are those of verbs, without the prefix, in any case.

use quipu_nic::{QpState, SendOp, WcStatus};

/// Defines an enumeration whose values have names.
macro_rules! words {
    (
        $(#[$meta:meta])* $name:ident $(, $prefix:literal)*:
        $($(#[$doc:meta])* $variant:ident = $text:literal,)*
    ) => {
        $(#[$meta])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub enum $name {$(
            $(#[$doc])*
            $variant,
        )*}

        impl $name {
            /// All of them.
            pub const ALL: &[Self] = &[$(Self::$variant,)*];

            /// Its name in plans.
            #[must_use]
            pub const fn name(self) -> &'static str {
                match self { $(Self::$variant => $text,)* }
            }

            /// The one of that name.
            #[must_use]
            pub fn named(text: &str) -> Option<Self> {
                let text = bare(text, &[$($prefix),*]);
                Self::ALL.iter().copied().find(|word| word.name() == text)
            }
        }
    };
}

/// A name in lower case, without the prefix that verbs puts in front of it.
fn bare(text: &str, prefixes: &[&str]) -> String {
    let text = text.trim().to_ascii_lowercase();
    let cut = prefixes.iter().find_map(|prefix| text.strip_prefix(prefix));
    cut.map_or(text.clone(), str::to_owned)
}

words! {
    /// A call of verbs or rdma_cm, by its name without `ibv_` or `rdma_`.
    Call, "ibv_", "rdma_":
    /// `ibv_open_device`
    OpenDevice = "open_device",
    /// `ibv_query_port`
    QueryPort = "query_port",
    /// `ibv_query_gid` and its relatives
    QueryGid = "query_gid",
    /// `ibv_alloc_pd`
    AllocPd = "alloc_pd",
    /// `ibv_dealloc_pd`
    DeallocPd = "dealloc_pd",
    /// `ibv_reg_mr` and its relatives
    RegMr = "reg_mr",
    /// `ibv_rereg_mr`
    ReregMr = "rereg_mr",
    /// `ibv_dereg_mr`
    DeregMr = "dereg_mr",
    /// `ibv_alloc_mw`
    AllocMw = "alloc_mw",
    /// `ibv_dealloc_mw`
    DeallocMw = "dealloc_mw",
    /// `ibv_create_comp_channel`
    CreateCompChannel = "create_comp_channel",
    /// `ibv_destroy_comp_channel`
    DestroyCompChannel = "destroy_comp_channel",
    /// `ibv_create_cq` and `_ex`
    CreateCq = "create_cq",
    /// `ibv_resize_cq`
    ResizeCq = "resize_cq",
    /// `ibv_req_notify_cq`
    ReqNotifyCq = "req_notify_cq",
    /// `ibv_poll_cq`
    PollCq = "poll_cq",
    /// `ibv_destroy_cq`
    DestroyCq = "destroy_cq",
    /// `ibv_create_srq` and `_ex`
    CreateSrq = "create_srq",
    /// `ibv_modify_srq`
    ModifySrq = "modify_srq",
    /// `ibv_query_srq`
    QuerySrq = "query_srq",
    /// `ibv_destroy_srq`
    DestroySrq = "destroy_srq",
    /// `ibv_create_qp` and `_ex`
    CreateQp = "create_qp",
    /// `ibv_modify_qp`
    ModifyQp = "modify_qp",
    /// `ibv_query_qp`
    QueryQp = "query_qp",
    /// `ibv_destroy_qp`
    DestroyQp = "destroy_qp",
    /// `ibv_create_ah`
    CreateAh = "create_ah",
    /// `ibv_destroy_ah`
    DestroyAh = "destroy_ah",
    /// `ibv_alloc_dm`
    AllocDm = "alloc_dm",
    /// `ibv_free_dm`
    FreeDm = "free_dm",
    /// `ibv_alloc_td`
    AllocTd = "alloc_td",
    /// `ibv_dealloc_td`
    DeallocTd = "dealloc_td",
    /// `ibv_alloc_parent_domain`
    AllocParentDomain = "alloc_parent_domain",
    /// `ibv_open_xrcd`
    OpenXrcd = "open_xrcd",
    /// `ibv_close_xrcd`
    CloseXrcd = "close_xrcd",
    /// `ibv_advise_mr`
    AdviseMr = "advise_mr",
    /// `ibv_modify_cq`
    ModifyCq = "modify_cq",
    /// `ibv_set_ece`
    SetEce = "set_ece",
    /// `ibv_attach_mcast`
    AttachMcast = "attach_mcast",
    /// `ibv_detach_mcast`
    DetachMcast = "detach_mcast",
    /// `ibv_create_wq`
    CreateWq = "create_wq",
    /// `ibv_modify_wq`
    ModifyWq = "modify_wq",
    /// `ibv_destroy_wq`
    DestroyWq = "destroy_wq",
    /// `ibv_create_rwq_ind_table`
    CreateRwqIndTable = "create_rwq_ind_table",
    /// `ibv_destroy_rwq_ind_table`
    DestroyRwqIndTable = "destroy_rwq_ind_table",
    /// `ibv_create_flow`
    CreateFlow = "create_flow",
    /// `ibv_destroy_flow`
    DestroyFlow = "destroy_flow",
    /// `ibv_create_counters`
    CreateCounters = "create_counters",
    /// `ibv_read_counters`
    ReadCounters = "read_counters",
    /// `ibv_destroy_counters`
    DestroyCounters = "destroy_counters",
    /// A request of `ibv_post_send` or `ibv_wr_*`
    PostSend = "post_send",
    /// A request of `ibv_post_recv`
    PostRecv = "post_recv",
    /// A request of `ibv_post_srq_recv`
    PostSrqRecv = "post_srq_recv",
    /// A request of `ibv_post_wq_recv`
    PostWqRecv = "post_wq_recv",
    /// `rdma_create_event_channel`, and the channel of an identifier that gets none
    CreateEventChannel = "create_event_channel",
    /// `rdma_create_id`
    CreateId = "create_id",
    /// `rdma_bind_addr`
    BindAddr = "bind_addr",
    /// `rdma_resolve_addr`
    ResolveAddr = "resolve_addr",
    /// `rdma_resolve_route`
    ResolveRoute = "resolve_route",
    /// `rdma_getaddrinfo`
    Getaddrinfo = "getaddrinfo",
    /// `rdma_resolve_addrinfo`
    ResolveAddrinfo = "resolve_addrinfo",
    /// `rdma_listen`
    Listen = "listen",
    /// `rdma_connect`
    Connect = "connect",
    /// `rdma_accept`
    Accept = "accept",
    /// `rdma_reject`
    Reject = "reject",
    /// `rdma_disconnect`
    Disconnect = "disconnect",
    /// `rdma_join_multicast` and `_ex`
    JoinMulticast = "join_multicast",
    /// `rdma_leave_multicast`
    LeaveMulticast = "leave_multicast",
    /// `rdma_migrate_id`
    MigrateId = "migrate_id",
    /// `rdma_set_option`
    SetOption = "set_option",
    /// `rdma_establish`, and the same for an identifier with a queue pair
    Establish = "establish",
    /// `rdma_get_request`
    GetRequest = "get_request",
    /// `rdma_get_cm_event`
    GetCmEvent = "get_cm_event",
}

impl Call {
    /// Whether it ends something: a device that is gone still lets go of what there is.
    #[must_use]
    pub const fn destroys(self) -> bool {
        matches!(
            self,
            Self::DeallocPd
                | Self::DeregMr
                | Self::DeallocMw
                | Self::DestroyCompChannel
                | Self::DestroyCq
                | Self::DestroySrq
                | Self::DestroyQp
                | Self::DestroyAh
                | Self::FreeDm
                | Self::DeallocTd
                | Self::CloseXrcd
                | Self::DetachMcast
                | Self::DestroyWq
                | Self::DestroyRwqIndTable
                | Self::DestroyFlow
                | Self::DestroyCounters
        )
    }

    /// Whether it can be made though the device is gone.
    #[must_use]
    pub const fn outlives_device(self) -> bool {
        self.destroys()
            || matches!(
                self,
                Self::PollCq
                    | Self::CreateEventChannel
                    | Self::CreateId
                    | Self::Getaddrinfo
                    | Self::Reject
                    | Self::Disconnect
                    | Self::LeaveMulticast
                    | Self::MigrateId
                    | Self::SetOption
                    | Self::GetRequest
                    | Self::GetCmEvent
            )
    }

    /// Whether it is about one queue pair.
    #[must_use]
    pub const fn names_qp(self) -> bool {
        matches!(
            self,
            Self::ModifyQp | Self::QueryQp | Self::DestroyQp | Self::PostSend | Self::PostRecv
        )
    }

    /// Whether it is about one completion queue, or a queue pair that has such.
    #[must_use]
    pub const fn names_cq(self) -> bool {
        self.names_qp()
            || matches!(
                self,
                Self::ResizeCq
                    | Self::ReqNotifyCq
                    | Self::PollCq
                    | Self::DestroyCq
                    | Self::ModifyCq
            )
    }

    /// Whether it is about one shared receive queue, or a queue pair that may have one.
    #[must_use]
    pub const fn names_srq(self) -> bool {
        self.names_qp() || matches!(self, Self::PostSrqRecv)
    }

    /// Whether it is about so many bytes.
    #[must_use]
    pub const fn names_bytes(self) -> bool {
        matches!(
            self,
            Self::PostSend
                | Self::PostRecv
                | Self::PostSrqRecv
                | Self::PostWqRecv
                | Self::RegMr
                | Self::ReregMr
        )
    }
}

words! {
    /// The operation of a send request, by its name without `IBV_WR_`.
    Opcode, "ibv_wr_":
    /// A send.
    Send = "send",
    /// One with immediate data.
    SendImm = "send_with_imm",
    /// One that invalidates a key of the peer.
    SendInv = "send_with_inv",
    /// A write.
    Write = "rdma_write",
    /// One with immediate data.
    WriteImm = "rdma_write_with_imm",
    /// A read.
    Read = "rdma_read",
    /// A compare and swap.
    CompareSwap = "atomic_cmp_and_swp",
    /// A fetch and add.
    FetchAdd = "atomic_fetch_and_add",
    /// A key of one's own invalidated.
    LocalInv = "local_inv",
    /// A window bound.
    BindMw = "bind_mw",
    /// 8 bytes written at once.
    AtomicWrite = "atomic_write",
    /// What was written made visible.
    Flush = "flush",
}

impl From<&SendOp> for Opcode {
    fn from(op: &SendOp) -> Self {
        match op {
            SendOp::Send => Self::Send,
            SendOp::SendImm(_) => Self::SendImm,
            SendOp::SendInv(_) => Self::SendInv,
            SendOp::Write { .. } => Self::Write,
            SendOp::WriteImm { .. } => Self::WriteImm,
            SendOp::Read { .. } => Self::Read,
            SendOp::CompareSwap { .. } => Self::CompareSwap,
            SendOp::FetchAdd { .. } => Self::FetchAdd,
            SendOp::LocalInv { .. } => Self::LocalInv,
            SendOp::BindMw(_) => Self::BindMw,
            SendOp::AtomicWrite { .. } => Self::AtomicWrite,
            SendOp::Flush(_) => Self::Flush,
        }
    }
}

words! {
    /// Which half of a queue pair.
    Side:
    /// Sends, writes, reads, atomics.
    Send = "send",
    /// Receives.
    Recv = "recv",
}

words! {
    /// An asynchronous event, by its name without `IBV_EVENT_`.
    EventKind, "ibv_event_":
    /// The completion queue fails, and the queue pairs with it.
    CqErr = "cq_err",
    /// The queue pair fails.
    QpFatal = "qp_fatal",
    /// The peer asked something invalid: the queue pair fails.
    QpReqErr = "qp_req_err",
    /// The peer violated rights: the queue pair fails.
    QpAccessErr = "qp_access_err",
    /// The first message came in RTR.
    CommEst = "comm_est",
    /// SQD has drained.
    SqDrained = "sq_drained",
    /// The alternate path is used.
    PathMig = "path_mig",
    /// The alternate path cannot be used.
    PathMigErr = "path_mig_err",
    /// The port came up.
    PortActive = "port_active",
    /// The port went down.
    PortErr = "port_err",
    /// The LID was changed.
    LidChange = "lid_change",
    /// The P_Key table was changed.
    PkeyChange = "pkey_change",
    /// There is another subnet manager.
    SmChange = "sm_change",
    /// The shared receive queue fails, and the queue pairs with it.
    SrqErr = "srq_err",
    /// The shared receive queue is below its limit.
    SrqLimitReached = "srq_limit_reached",
    /// The last receive of a queue pair in error was consumed.
    QpLastWqeReached = "qp_last_wqe_reached",
    /// The subnet manager asks for registrations.
    ClientReregister = "client_reregister",
    /// The GID table was changed.
    GidChange = "gid_change",
}

impl EventKind {
    /// Whether it is about the port and not about a queue pair or one of its queues.
    #[must_use]
    pub const fn is_of_port(self) -> bool {
        matches!(
            self,
            Self::PortActive
                | Self::PortErr
                | Self::LidChange
                | Self::PkeyChange
                | Self::SmChange
                | Self::ClientReregister
                | Self::GidChange
        )
    }

    /// Whether it is about a shared receive queue.
    #[must_use]
    pub const fn is_of_srq(self) -> bool {
        matches!(self, Self::SrqErr | Self::SrqLimitReached)
    }
}

words! {
    /// An event of rdma_cm that a program seldom meets, by its name without `RDMA_CM_EVENT_`.
    CmEvent, "rdma_cm_event_":
    /// The address cannot be resolved.
    AddrError = "addr_error",
    /// The route cannot be resolved.
    RouteError = "route_error",
    /// Connecting or accepting fails.
    ConnectError = "connect_error",
    /// The peer cannot be reached.
    Unreachable = "unreachable",
    /// The peer refuses.
    Rejected = "rejected",
    /// A group cannot be joined.
    MulticastError = "multicast_error",
    /// The address has moved to another interface.
    AddrChange = "addr_change",
    /// Names cannot be resolved.
    AddrinfoError = "addrinfo_error",
    /// An ended connection is over for good.
    TimewaitExit = "timewait_exit",
}

/// InfiniBand's reason for a refusal by the program (IBA 12.6.7.2).
const REFUSED_BY_PROGRAM: i32 = 28;

impl CmEvent {
    /// The calls in place of whose effect it may come, or beside which; the first one if none is named.
    #[must_use]
    pub const fn calls(self) -> &'static [Call] {
        match self {
            Self::AddrError => &[Call::ResolveAddr],
            Self::RouteError => &[Call::ResolveRoute],
            Self::AddrinfoError => &[Call::ResolveAddrinfo],
            Self::ConnectError | Self::Unreachable | Self::Rejected => {
                &[Call::Connect, Call::Accept]
            }
            Self::MulticastError => &[Call::JoinMulticast],
            Self::AddrChange => &[Call::Connect, Call::Accept, Call::Listen, Call::Disconnect],
            Self::TimewaitExit => &[Call::Disconnect],
        }
    }

    /// Whether the call goes on as ever, and the event comes beside it.
    #[must_use]
    pub const fn comes_beside(self) -> bool {
        matches!(self, Self::AddrChange | Self::TimewaitExit)
    }

    /// The status of the event, if the plan names no error number.
    #[must_use]
    pub const fn status(self) -> i32 {
        match self {
            Self::AddrChange | Self::TimewaitExit => 0,
            Self::Rejected => REFUSED_BY_PROGRAM,
            Self::RouteError | Self::Unreachable => -110, // ETIMEDOUT
            Self::AddrinfoError => -2,                    // ENOENT
            Self::AddrError | Self::ConnectError | Self::MulticastError => -113, // EHOSTUNREACH
        }
    }
}

/// An error number that a call can be refused with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Errno {
    /// Its name, such as `ENOMEM`.
    pub name: &'static str,
    /// Its number on Linux.
    pub number: i32,
}

impl Errno {
    /// Those that plans may name.
    pub const ALL: &[Self] = &[
        Self { name: "EPERM", number: 1 },
        Self { name: "ENOENT", number: 2 },
        Self { name: "EINTR", number: 4 },
        Self { name: "EIO", number: 5 },
        Self { name: "EAGAIN", number: 11 },
        Self { name: "ENOMEM", number: 12 },
        Self { name: "EFAULT", number: 14 },
        Self { name: "EBUSY", number: 16 },
        Self { name: "ENODEV", number: 19 },
        Self { name: "EINVAL", number: 22 },
        Self { name: "EMFILE", number: 24 },
        Self { name: "EOPNOTSUPP", number: 95 },
        Self { name: "EADDRINUSE", number: 98 },
        Self { name: "EADDRNOTAVAIL", number: 99 },
        Self { name: "ETIMEDOUT", number: 110 },
        Self { name: "ECONNREFUSED", number: 111 },
        Self { name: "EHOSTUNREACH", number: 113 },
    ];

    /// What calls of a device that is gone fail with.
    pub const EIO: Self = Self { name: "EIO", number: 5 };

    /// The one of that name.
    #[must_use]
    pub fn named(text: &str) -> Option<Self> {
        let text = text.trim().to_ascii_uppercase();
        Self::ALL.iter().copied().find(|errno| errno.name == text)
    }
}

/// The statuses of failed completions, by their names without `IBV_WC_`.
pub(crate) const STATUSES: [(&str, WcStatus); 23] = [
    ("loc_len_err", WcStatus::LocLenErr),
    ("loc_qp_op_err", WcStatus::LocQpOpErr),
    ("loc_eec_op_err", WcStatus::LocEecOpErr),
    ("loc_prot_err", WcStatus::LocProtErr),
    ("wr_flush_err", WcStatus::WrFlushErr),
    ("mw_bind_err", WcStatus::MwBindErr),
    ("bad_resp_err", WcStatus::BadRespErr),
    ("loc_access_err", WcStatus::LocAccessErr),
    ("rem_inv_req_err", WcStatus::RemInvReqErr),
    ("rem_access_err", WcStatus::RemAccessErr),
    ("rem_op_err", WcStatus::RemOpErr),
    ("retry_exc_err", WcStatus::RetryExcErr),
    ("rnr_retry_exc_err", WcStatus::RnrRetryExcErr),
    ("loc_rdd_viol_err", WcStatus::LocRddViolErr),
    ("rem_inv_rd_req_err", WcStatus::RemInvRdReqErr),
    ("rem_abort_err", WcStatus::RemAbortErr),
    ("inv_eecn_err", WcStatus::InvEecnErr),
    ("inv_eec_state_err", WcStatus::InvEecStateErr),
    ("fatal_err", WcStatus::FatalErr),
    ("resp_timeout_err", WcStatus::RespTimeoutErr),
    ("general_err", WcStatus::GeneralErr),
    ("tm_err", WcStatus::TmErr),
    ("tm_rndv_incomplete", WcStatus::TmRndvIncomplete),
];

/// The status of that name.
pub(crate) fn status(text: &str) -> Option<WcStatus> {
    let text = bare(text, &["ibv_wc_"]);
    STATUSES.iter().find(|(name, _)| *name == text).map(|(_, status)| *status)
}

/// The name of a status.
pub(crate) fn status_name(status: WcStatus) -> &'static str {
    STATUSES.iter().find(|(_, known)| *known == status).map_or("success", |(name, _)| name)
}

/// The states of a queue pair, by their names without `IBV_QPS_`.
pub(crate) const STATES: [(&str, QpState); 7] = [
    ("reset", QpState::Reset),
    ("init", QpState::Init),
    ("rtr", QpState::Rtr),
    ("rts", QpState::Rts),
    ("sqd", QpState::Sqd),
    ("sqe", QpState::Sqe),
    ("err", QpState::Err),
];

/// The state of that name.
pub(crate) fn state(text: &str) -> Option<QpState> {
    let text = bare(text, &["ibv_qps_"]);
    STATES.iter().find(|(name, _)| *name == text).map(|(_, state)| *state)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_those_of_verbs_in_any_case() {
        assert_eq!(Call::named("ibv_reg_mr"), Some(Call::RegMr));
        assert_eq!(Opcode::named("IBV_WR_RDMA_READ"), Some(Opcode::Read));
        assert_eq!(EventKind::named("IBV_EVENT_GID_CHANGE"), Some(EventKind::GidChange));
        assert_eq!(Call::named("rdma_connect"), Some(Call::Connect));
        let error = CmEvent::named("RDMA_CM_EVENT_ROUTE_ERROR");
        assert_eq!(error, Some(CmEvent::RouteError));
        assert_eq!(status("IBV_WC_RETRY_EXC_ERR"), Some(WcStatus::RetryExcErr));
        assert_eq!(Errno::named("enomem").map(|errno| errno.number), Some(12));
        assert_eq!(Call::named("regmr"), None);
    }

    #[test]
    fn every_word_is_found_by_its_own_name() {
        for &call in Call::ALL {
            assert_eq!(Call::named(call.name()), Some(call));
        }
        for &event in EventKind::ALL {
            assert_eq!(EventKind::named(event.name()), Some(event));
        }
        for &event in CmEvent::ALL {
            assert_eq!(CmEvent::named(event.name()), Some(event));
        }
        for (name, value) in STATUSES {
            assert_eq!(status(name), Some(value));
            assert_eq!(status_name(value), name);
        }
    }
}
