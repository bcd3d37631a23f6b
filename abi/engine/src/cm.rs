//! Connection management: identifiers, their addresses, connections and events.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV4, SocketAddrV6};

use libc::{c_int, c_void, sockaddr, sockaddr_in, sockaddr_in6, sockaddr_storage};
use quipu_abi_types::*;
use quipu_host::connection::{
    Ece, Event, EventKind, Param, Path, PortSpace, Protocol, QpParams, Refusal,
};
use quipu_host::fault::Call;
use quipu_host::{Device, EngineError};
use quipu_nic::Gid;

use crate::entry::{Out, WAIT, entries};
use crate::instance::{self, Instance, current, for_destructor, opened};
use crate::native::{self, Whose};
use crate::status::{Failure, INVALID, Outcome};

/// Hops of a path.
const HOP_LIMIT: u8 = 64;
/// `RDMA_MC_JOIN_FLAG_FULLMEMBER`, `_SENDONLY_FULLMEMBER`: which of them matters to
/// `ibv_attach_mcast` only.
const JOIN_FLAGS: u32 = 2;

/// The functions of connection management.
pub(crate) const API: EngineCmApi = EngineCmApi {
    create_channel,
    destroy_channel,
    get_event,
    take_event,
    note_getaddrinfo,
    create_id,
    destroy_id,
    set_cookie,
    migrate_id,
    write_event,
    bind_addr,
    resolve_addr,
    resolve_route,
    listen,
    connect,
    accept,
    reject,
    disconnect,
    notify,
    set_option,
    query_route,
    init_qp_attr,
    join,
    leave,
};

/// Reads an address.
///
/// # Errors
///
/// It is null, or of another family than IPv4, IPv6 and that of InfiniBand; or it is of the last, and leads
/// nowhere.
///
/// # Safety
///
/// It is null, or a socket address as long as its family says.
unsafe fn address(raw: *const sockaddr, whose: Whose) -> Outcome<SocketAddr> {
    // SAFETY: passed on from the caller.
    match unsafe { family(raw) }? {
        libc::AF_INET => {
            // SAFETY: the family says that this is a sockaddr_in.
            let v4 = unsafe { raw.cast::<sockaddr_in>().read_unaligned() };
            let ip = Ipv4Addr::from(v4.sin_addr.s_addr.to_ne_bytes());
            Ok(SocketAddrV4::new(ip, u16::from_be(v4.sin_port)).into())
        }
        libc::AF_INET6 => {
            // SAFETY: the family says that this is a sockaddr_in6.
            let v6 = unsafe { raw.cast::<sockaddr_in6>().read_unaligned() };
            let (ip, port) = (Ipv6Addr::from(v6.sin6_addr.s6_addr), u16::from_be(v6.sin6_port));
            Ok(SocketAddrV6::new(ip, port, 0, v6.sin6_scope_id).into())
        }
        // SAFETY: the family says that this is a sockaddr_ib.
        AF_IB => native::address(&unsafe { raw.cast::<sockaddr_ib>().read_unaligned() }, whose),
        _ => Err(EngineStatus::NotSupported.into()),
    }
}

/// Reads the address of a group; unspecified if any will do.
///
/// # Errors
///
/// As [`address`].
///
/// # Safety
///
/// As [`address`].
unsafe fn group(raw: *const sockaddr) -> Outcome<IpAddr> {
    // SAFETY: passed on from the caller; the family says what it is.
    unsafe {
        match family(raw)? {
            AF_IB => native::group(&raw.cast::<sockaddr_ib>().read_unaligned()),
            _ => Ok(address(raw, Whose::Peer)?.ip()),
        }
    }
}

/// The family of an address.
///
/// # Errors
///
/// It is null.
///
/// # Safety
///
/// It is null, or a socket address.
unsafe fn family(raw: *const sockaddr) -> Outcome<c_int> {
    if raw.is_null() {
        return Err(INVALID);
    }
    // SAFETY: the caller promises at least a family; programs pass bytes of any alignment.
    Ok(c_int::from(unsafe { (&raw const (*raw).sa_family).read_unaligned() }))
}

/// An address in a place that has room for any; family 0 for none.
fn storage(address: Option<SocketAddr>) -> sockaddr_storage {
    // SAFETY: sockaddr_storage consists of integers.
    let mut storage: sockaddr_storage = unsafe { std::mem::zeroed() };
    let place = &raw mut storage;
    match address {
        Some(SocketAddr::V4(v4)) => {
            let raw = sockaddr_in {
                sin_family: libc::AF_INET as libc::sa_family_t,
                sin_port: v4.port().to_be(),
                sin_addr: libc::in_addr { s_addr: u32::from_ne_bytes(v4.ip().octets()) },
                sin_zero: [0; 8],
            };
            // SAFETY: sockaddr_storage is larger than and aligned for every socket address.
            unsafe { place.cast::<sockaddr_in>().write(raw) };
        }
        Some(SocketAddr::V6(v6)) => {
            let raw = sockaddr_in6 {
                sin6_family: libc::AF_INET6 as libc::sa_family_t,
                sin6_port: v6.port().to_be(),
                sin6_flowinfo: 0,
                sin6_addr: libc::in6_addr { s6_addr: v6.ip().octets() },
                sin6_scope_id: v6.scope_id(),
            };
            // SAFETY: as above.
            unsafe { place.cast::<sockaddr_in6>().write(raw) };
        }
        None => {}
    }
    storage
}

/// Bytes of a caller.
///
/// # Safety
///
/// `data` is null, or `len` bytes.
unsafe fn bytes<'a>(data: *const c_void, len: u32) -> Outcome<&'a [u8]> {
    match (data.is_null(), len as usize) {
        (_, 0) => Ok(&[]),
        (true, _) => Err(INVALID),
        (_, len) if len > CM_PRIVATE_DATA_MAX => Err(INVALID),
        // SAFETY: the caller promises it.
        (_, len) => Ok(unsafe { std::slice::from_raw_parts(data.cast(), len) }),
    }
}

/// # Safety
///
/// The private data are what their length says.
unsafe fn param_of(param: &EngineCmParam) -> Outcome<Param> {
    Ok(Param {
        // SAFETY: passed on from the caller.
        private_data: unsafe { bytes(param.private_data, param.private_data_len) }?.to_vec(),
        responder_resources: param.responder_resources,
        initiator_depth: param.initiator_depth,
        flow_control: param.flow_control != 0,
        retry_count: param.retry_count,
        rnr_retry_count: param.rnr_retry_count,
        srq: param.srq != 0,
        qpn: param.qp_num,
        qkey: param.qkey,
        ece: Ece { vendor_id: param.ece.vendor_id, options: param.ece.options },
    })
}

fn ah_attr(instance: &Instance, path: Option<Path>) -> ibv_ah_attr {
    let known = path.is_some();
    let path = path.unwrap_or_default();
    ibv_ah_attr {
        grh: ibv_global_route {
            dgid: ibv_gid { raw: path.dgid },
            flow_label: 0,
            sgid_index: path.sgid_index,
            hop_limit: if known { HOP_LIMIT } else { 0 },
            traffic_class: path.traffic_class,
        },
        dlid: instance.engine.config().link_layer.lid(Gid(path.dgid)),
        sl: path.service_level,
        src_path_bits: 0,
        static_rate: 0,
        is_global: known.into(),
        port_num: known.into(),
    }
}

fn event_of(instance: &Instance, event: &Event) -> EngineCmEvent {
    let peer = &event.peer;
    let mut private_data = [0; CM_PRIVATE_DATA_MAX];
    let len = event.private_data.len().min(CM_PRIVATE_DATA_MAX);
    private_data[..len].copy_from_slice(&event.private_data[..len]);
    EngineCmEvent {
        event: event.kind as u32,
        status: event.status,
        id: instance.cm_id_handle(event.id),
        cookie: event.cookie,
        listener: event.listener,
        multicast: event.multicast,
        arg: event.arg,
        private_data_len: len as u32,
        private_data,
        responder_resources: peer.responder_resources,
        initiator_depth: peer.initiator_depth,
        flow_control: peer.flow_control.into(),
        retry_count: peer.retry_count,
        rnr_retry_count: peer.rnr_retry_count,
        srq: peer.srq.into(),
        qp_num: peer.qpn,
        qkey: peer.qkey,
        ah_attr: ah_attr(instance, peer.path),
        ece: ibv_ece { vendor_id: peer.ece.vendor_id, options: peer.ece.options, comp_mask: 0 },
    }
}

/// The attributes for `state`, and which they are, as the kernel chooses them.
fn qp_attr_of(instance: &Instance, params: &QpParams, state: u32, attr: &mut ibv_qp_attr) -> u32 {
    let kind = u32::from(params.qp_type);
    let sends = matches!(kind, IBV_QPT_RC | IBV_QPT_XRC_SEND);
    let receives = matches!(kind, IBV_QPT_RC | IBV_QPT_XRC_RECV);
    let mut mask = IBV_QP_STATE;
    match state {
        IBV_QPS_INIT => {
            (attr.pkey_index, attr.port_num) = (0, 1);
            mask |= IBV_QP_PKEY_INDEX | IBV_QP_PORT;
            if params.datagram {
                attr.qkey = params.qkey;
                return mask | IBV_QP_QKEY;
            }
            let right = |given: bool, right: u32| if given { right } else { 0 };
            // The device of plain iWARP has no flushes.
            let flushes = params.remote_read && !params.of_adapter;
            attr.qp_access_flags = right(params.remote_write, IBV_ACCESS_REMOTE_WRITE)
                | right(params.remote_read, IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC)
                | right(flushes, IBV_ACCESS_FLUSH_GLOBAL);
            mask |= IBV_QP_ACCESS_FLAGS;
        }
        // The engine connects it; the kernel names the port here, too.
        _ if params.of_adapter => {
            attr.port_num = 1;
            return IBV_QP_PORT;
        }
        IBV_QPS_RTR if params.datagram => {}
        IBV_QPS_RTR => {
            attr.ah_attr = ah_attr(instance, Some(params.path));
            attr.path_mtu = params.path_mtu.into();
            attr.dest_qp_num = params.dest_qpn;
            attr.rq_psn = params.rq_psn;
            mask |= IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN;
            if receives {
                attr.max_dest_rd_atomic = params.max_dest_rd_atomic;
                attr.min_rnr_timer = params.min_rnr_timer;
                mask |= IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER;
            }
        }
        _ => {
            attr.sq_psn = params.sq_psn;
            mask |= IBV_QP_SQ_PSN;
            if sends {
                attr.retry_cnt = params.retry_count;
                attr.rnr_retry = params.rnr_retry;
                attr.max_rd_atomic = params.max_rd_atomic;
                mask |= IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_MAX_QP_RD_ATOMIC;
            }
            if sends || receives {
                attr.timeout = params.timeout;
                mask |= IBV_QP_TIMEOUT;
            }
        }
    }
    mask
}

/// The value of an option, of exactly the size it must have.
///
/// # Safety
///
/// `value` is null, or `length` bytes.
unsafe fn option_value<const N: usize>(value: *const c_void, length: usize) -> Outcome<[u8; N]> {
    if value.is_null() || length != N {
        return Err(INVALID);
    }
    // SAFETY: it is not null, and so `length`, that is N, bytes.
    Ok(unsafe { value.cast::<[u8; N]>().read_unaligned() })
}

entries! {
    /// [`EngineCmApi::create_channel`]
    fn create_channel(out: *mut EngineCmChannel) {
        // SAFETY: the table demands a valid pointer.
        let out = unsafe { Out::new(out) }?;
        // A program may create a channel before it opens a device.
        let instance = instance::open()?;
        let (channel, fd) = instance.engine.cm_create_channel()?;
        out.fill(EngineCmChannel { channel: instance.cm_channel_handle(channel), fd });
        Ok(())
    }

    /// [`EngineCmApi::destroy_channel`]
    fn destroy_channel(channel: CmChannelHandle) {
        let Some(instance) = for_destructor()? else { return Ok(()) };
        let destroyed = instance.engine.cm_destroy_channel(instance.cm_channel(channel));
        instance.destroyed(destroyed.map_err(Failure::from))
    }

    /// [`EngineCmApi::get_event`]
    fn get_event(channel: CmChannelHandle, out: *mut EngineCmEvent) {
        // SAFETY: the table demands a valid pointer.
        let out = unsafe { Out::new(out) }?;
        let instance = opened()?;
        let event = instance.engine.cm_get_event_within(instance.cm_channel(channel), WAIT)?;
        out.fill(event_of(instance, &event));
        Ok(())
    }

    /// [`EngineCmApi::take_event`]
    fn take_event(channel: CmChannelHandle, out: *mut EngineCmEvent) {
        // SAFETY: the table demands a valid pointer.
        let out = unsafe { Out::new(out) }?;
        let instance = opened()?;
        let event = instance.engine.cm_take_event(instance.cm_channel(channel))?;
        out.fill(event_of(instance, &event));
        Ok(())
    }

    /// [`EngineCmApi::note_getaddrinfo`]
    fn note_getaddrinfo() {
        // Names can be asked for where no device can be opened.
        if instance::has_plan() && let Ok(instance) = instance::open() {
            instance.engine.note_call(Call::Getaddrinfo)?;
        }
        Ok(())
    }

    /// [`EngineCmApi::create_id`]
    fn create_id(init: *const EngineCmIdInit, out: *mut CmIdHandle) {
        // SAFETY: the table demands valid pointers.
        let (out, init) = unsafe { (Out::new(out)?, init.as_ref().ok_or(INVALID)?) };
        let instance = current()?;
        let space = PortSpace::from_code(init.port_space).ok_or(INVALID)?;
        let kind = u8::try_from(init.qp_type).map_err(|_| INVALID)?;
        let channel = instance.cm_channel(init.channel);
        let id = instance.engine.cm_create_id(channel, space, kind, init.cookie)?;
        out.fill(instance.cm_id_handle(id));
        Ok(())
    }

    /// [`EngineCmApi::destroy_id`]
    fn destroy_id(id: CmIdHandle, out: *mut u32) {
        // SAFETY: the table demands a valid pointer.
        let out = unsafe { Out::new(out) }?;
        let Some(instance) = for_destructor()? else {
            out.fill(0);
            return Ok(());
        };
        let destroyed = instance.engine.cm_destroy_id(instance.cm_id(id));
        out.fill(instance.destroyed(destroyed.map_err(Failure::from))?);
        Ok(())
    }

    /// [`EngineCmApi::set_cookie`]
    fn set_cookie(id: CmIdHandle, cookie: u64) {
        let instance = current()?;
        Ok(instance.engine.cm_set_cookie(instance.cm_id(id), cookie)?)
    }

    /// [`EngineCmApi::migrate_id`]
    fn migrate_id(id: CmIdHandle, channel: CmChannelHandle, out: *mut u32) {
        // SAFETY: the table demands a valid pointer.
        let out = unsafe { Out::new(out) }?;
        let instance = current()?;
        let (id, channel) = (instance.cm_id(id), instance.cm_channel(channel));
        out.fill(instance.engine.cm_migrate_id(id, channel)?);
        Ok(())
    }

    /// [`EngineCmApi::write_event`]
    fn write_event(id: CmIdHandle, event: u32, status: i32, arg: u64) {
        let kind = match event {
            RDMA_CM_EVENT_ADDRINFO_RESOLVED => EventKind::AddrinfoResolved,
            RDMA_CM_EVENT_ADDRINFO_ERROR => EventKind::AddrinfoError,
            RDMA_CM_EVENT_USER => EventKind::User,
            _ => return Err(INVALID),
        };
        let instance = current()?;
        Ok(instance.engine.cm_write_event(instance.cm_id(id), kind, status, arg)?)
    }

    /// [`EngineCmApi::bind_addr`]
    fn bind_addr(id: CmIdHandle, addr: *const sockaddr) {
        // SAFETY: the table demands a valid address.
        let addr = unsafe { address(addr, Whose::Own) }?;
        let instance = current()?;
        instance.engine.cm_bind_addr(instance.cm_id(id), addr).map_err(|error| match &error {
            // What Linux says of a port that is taken of all addresses.
            EngineError::Address(source)
                if addr.ip().is_unspecified()
                    && source.raw_os_error() == Some(libc::EADDRINUSE) =>
            {
                tracing::debug!(%error, %addr, "an identifier is not bound");
                Failure(EngineStatus::AddressNotAvailable)
            }
            _ => error.into(),
        })
    }

    /// [`EngineCmApi::resolve_addr`]
    fn resolve_addr(
        id: CmIdHandle,
        src: *const sockaddr,
        dst: *const sockaddr,
        _timeout_ms: u32,
    ) {
        // SAFETY: the table demands valid addresses, of which the source may be null.
        let own = || unsafe { address(src, Whose::Own) };
        // SAFETY: as above.
        let (src, dst) = ((!src.is_null()).then(own), unsafe { address(dst, Whose::Peer) }?);
        let instance = current()?;
        Ok(instance.engine.cm_resolve_addr(instance.cm_id(id), src.transpose()?, dst)?)
    }

    /// [`EngineCmApi::resolve_route`]
    fn resolve_route(id: CmIdHandle, _timeout_ms: u32) {
        let instance = current()?;
        Ok(instance.engine.cm_resolve_route(instance.cm_id(id))?)
    }

    /// [`EngineCmApi::listen`]
    fn listen(id: CmIdHandle, backlog: i32) {
        let instance = current()?;
        Ok(instance.engine.cm_listen(instance.cm_id(id), backlog)?)
    }

    /// [`EngineCmApi::connect`]
    fn connect(id: CmIdHandle, param: *const EngineCmParam) {
        // SAFETY: the table demands a valid pointer, to a structure whose private data are valid.
        let param = unsafe { param_of(param.as_ref().ok_or(INVALID)?) }?;
        let instance = current()?;
        Ok(instance.engine.cm_connect(instance.cm_id(id), &param)?)
    }

    /// [`EngineCmApi::accept`]
    fn accept(id: CmIdHandle, param: *const EngineCmParam) {
        // SAFETY: as above, or null.
        let param = unsafe { param.as_ref().map(|param| param_of(param)) }.transpose()?;
        let instance = current()?;
        Ok(instance.engine.cm_accept(instance.cm_id(id), param.as_ref())?)
    }

    /// [`EngineCmApi::reject`]
    fn reject(
        id: CmIdHandle,
        reason: u32,
        private_data: *const c_void,
        private_data_len: u32,
    ) {
        // SAFETY: the table demands what the length says.
        let data = unsafe { bytes(private_data, private_data_len) }?;
        let why = match reason {
            RDMA_CM_REJECT_CONSUMER => Refusal::Consumer,
            RDMA_CM_REJECT_VENDOR_OPTION => Refusal::VendorOption,
            _ => return Err(INVALID),
        };
        let instance = current()?;
        Ok(instance.engine.cm_reject(instance.cm_id(id), why, data)?)
    }

    /// [`EngineCmApi::disconnect`]
    fn disconnect(id: CmIdHandle) {
        let instance = current()?;
        Ok(instance.engine.cm_disconnect(instance.cm_id(id))?)
    }

    /// [`EngineCmApi::notify`]
    fn notify(id: CmIdHandle, event: u32) {
        if event != IBV_EVENT_COMM_EST {
            return Err(INVALID);
        }
        let instance = current()?;
        Ok(instance.engine.cm_establish(instance.cm_id(id))?)
    }

    /// [`EngineCmApi::set_option`]
    fn set_option(id: CmIdHandle, level: i32, name: i32, value: *const c_void, length: usize) {
        let instance = current()?;
        let (engine, id) = (&instance.engine, instance.cm_id(id));
        // SAFETY: the table demands a value of that length.
        let byte = || unsafe { option_value::<1>(value, length) }.map(|[byte]| byte);
        // SAFETY: as above.
        let flag = || unsafe { option_value::<4>(value, length) }.map(|flag| flag != [0; 4]);
        match (level, name) {
            (RDMA_OPTION_ID, RDMA_OPTION_ID_TOS) => {
                let tos = byte()?;
                engine.cm_set_option(id, |options| options.tos = Some(tos))?;
            }
            (RDMA_OPTION_ID, RDMA_OPTION_ID_REUSEADDR) => {
                let reuse = flag()?;
                engine.cm_set_option(id, |options| options.reuse = reuse)?;
            }
            (RDMA_OPTION_ID, RDMA_OPTION_ID_AFONLY) => {
                engine.cm_set_v6_only(id, flag()?)?;
            }
            (RDMA_OPTION_ID, RDMA_OPTION_ID_ACK_TIMEOUT) => {
                let code = byte()?;
                engine.cm_set_option(id, |options| options.ack_timeout = Some(code))?;
            }
            // A path record: there is one path, which is found without. The event is that of a
            // route that was resolved.
            (RDMA_OPTION_IB, RDMA_OPTION_IB_PATH) if !value.is_null() && length > 0 => {
                engine.cm_resolve_route(id)?;
            }
            _ => return Err(EngineStatus::NotSupported.into()),
        }
        Ok(())
    }

    /// [`EngineCmApi::query_route`]
    fn query_route(id: CmIdHandle, out: *mut EngineCmRoute) {
        // SAFETY: the table demands a valid pointer.
        let out = unsafe { Out::new(out) }?;
        let instance = current()?;
        let route = instance.engine.cm_route(instance.cm_id(id))?;
        let mut device = [0; 64];
        if route.has_device {
            let which = match route.protocol {
                Protocol::Quipu => Device::Quipu0,
                Protocol::Iwarp => Device::QuipuIw0,
                Protocol::Qpip => Device::QuipuQp0,
            };
            crate::device::put_text(&mut device, which.name());
        }
        out.fill(EngineCmRoute {
            src: storage(route.src),
            dst: storage(route.dst),
            device,
            port_num: route.has_device.into(),
            num_paths: route.has_path.into(),
            sgid: ibv_gid { raw: route.sgid },
            dgid: ibv_gid { raw: route.dgid },
            mtu: route.path_mtu.into(),
            tos: route.traffic_class.into(),
        });
        Ok(())
    }

    /// [`EngineCmApi::init_qp_attr`]
    fn init_qp_attr(id: CmIdHandle, attr: *mut ibv_qp_attr, mask: *mut u32) {
        // SAFETY: the table demands valid pointers.
        let (attr, mask) = unsafe { (attr.as_mut().ok_or(INVALID)?, Out::new(mask)?) };
        let instance = current()?;
        let id = instance.cm_id(id);
        let params = match attr.qp_state {
            IBV_QPS_INIT => instance.engine.cm_init_params(id)?,
            IBV_QPS_RTR | IBV_QPS_RTS => instance.engine.cm_connect_params(id)?,
            _ => return Err(INVALID),
        };
        mask.fill(qp_attr_of(instance, &params, attr.qp_state, attr));
        Ok(())
    }

    /// [`EngineCmApi::join`]
    fn join(id: CmIdHandle, addr: *const sockaddr, flags: u32, cookie: u64) {
        // SAFETY: the table demands a valid address.
        let group = unsafe { group(addr) }?;
        if flags >= JOIN_FLAGS {
            return Err(INVALID);
        }
        let instance = current()?;
        Ok(instance.engine.cm_join(instance.cm_id(id), group, cookie)?)
    }

    /// [`EngineCmApi::leave`]
    fn leave(id: CmIdHandle, cookie: u64, out: *mut u32) {
        // SAFETY: the table demands a valid pointer.
        let out = unsafe { Out::new(out) }?;
        let instance = current()?;
        out.fill(instance.engine.cm_leave(instance.cm_id(id), cookie)?);
        Ok(())
    }
}
