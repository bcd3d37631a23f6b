//! The structures of rdma_cma.h, and addresses.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use libc::{c_void, sockaddr, sockaddr_in, sockaddr_in6};
use quipu_abi_types::*;

use crate::call::Call;
use crate::show::{Pointee, opaque, peek};
use crate::value::Value;
use crate::verbs::{ah_attr, hex, number};
use crate::words::{self, word};

opaque!(rdma_event_channel);

/// An address and a port; where they are, if there is less, as where a program had room for a part only.
///
/// # Safety
///
/// `this` is null, or an address.
unsafe fn socket_address(this: *const sockaddr) -> Value {
    if this.is_null() {
        return Value::Null;
    }
    // SAFETY: addresses consist of integers.
    let known = unsafe { peek(this.cast::<libc::sa_family_t>(), 1) }.and_then(|family| {
        match i32::from(family[0]) {
            libc::AF_INET => {
                // SAFETY: as above.
                let v4 = unsafe { peek(this.cast::<sockaddr_in>(), 1) }?[0];
                let ip = Ipv4Addr::from(u32::from_be(v4.sin_addr.s_addr));
                Some(Ok(SocketAddr::new(IpAddr::V4(ip), u16::from_be(v4.sin_port))))
            }
            libc::AF_INET6 => {
                // SAFETY: as above.
                let v6 = unsafe { peek(this.cast::<sockaddr_in6>(), 1) }?[0];
                let ip = Ipv6Addr::from(v6.sin6_addr.s6_addr);
                Some(Ok(SocketAddr::new(IpAddr::V6(ip), u16::from_be(v6.sin6_port))))
            }
            AF_IB => {
                // SAFETY: as above.
                let ib = unsafe { peek(this.cast::<sockaddr_ib>(), 1) }?[0];
                // SAFETY: both fields of the union are 16 bytes, of which all values are valid.
                let gid = Ipv6Addr::from(unsafe { ib.sib_addr.raw });
                Some(Ok(SocketAddr::new(IpAddr::V6(gid), u64::from_be(ib.sib_sid) as u16)))
            }
            other => Some(Err(other)),
        }
    });
    match known {
        Some(Ok(address)) => Value::Word(address.to_string()),
        Some(Err(family)) => Value::Record(vec![("family", number(family))]),
        None => crate::verbs::address(this),
    }
}

impl Pointee for sockaddr {
    unsafe fn describe(this: *const Self, _: &Call<'_>) -> Option<Value> {
        // SAFETY: passed on from the caller.
        Some(unsafe { socket_address(this) })
    }
}

impl Pointee for rdma_cm_id {}

impl Pointee for c_void {
    /// Private data, where a call has some. Memory is not followed.
    unsafe fn describe_input(this: *const Self, call: &Call<'_>) -> Option<Value> {
        let length = call.number("private_data_len")?;
        // SAFETY: passed on from the caller.
        Some(unsafe { private_data(this, length as u8) })
    }
}

/// Bytes for the peer.
///
/// # Safety
///
/// `data` is null, or `length` bytes.
unsafe fn private_data(data: *const c_void, length: u8) -> Value {
    if data.is_null() || length == 0 {
        return Value::Null;
    }
    // SAFETY: bytes.
    let bytes = unsafe { peek(data.cast::<u8>(), length.into()) };
    bytes.map_or_else(|| crate::verbs::address(data), Value::Bytes)
}

/// # Safety
///
/// As [`private_data`] of what is in it.
unsafe fn connection(param: &rdma_conn_param) -> Vec<(&'static str, Value)> {
    vec![
        // SAFETY: passed on from the caller.
        ("private_data", unsafe { private_data(param.private_data, param.private_data_len) }),
        ("responder_resources", number(param.responder_resources)),
        ("initiator_depth", number(param.initiator_depth)),
        ("flow_control", number(param.flow_control)),
        ("retry_count", number(param.retry_count)),
        ("rnr_retry_count", number(param.rnr_retry_count)),
        ("srq", number(param.srq)),
        ("qp_num", hex(param.qp_num)),
    ]
}

impl Pointee for rdma_conn_param {
    unsafe fn describe(this: *const Self, _: &Call<'_>) -> Option<Value> {
        // SAFETY: passed on from the caller.
        Some(Value::Record(unsafe { connection(&*this) }))
    }
}

impl Pointee for rdma_cm_event {
    unsafe fn describe(this: *const Self, _: &Call<'_>) -> Option<Value> {
        // SAFETY: passed on from the caller; an event names live identifiers.
        let (this, id, listen_id) = unsafe { (&*this, (*this).id, (*this).listen_id) };
        let mut fields = vec![
            ("event", word(words::CM_EVENTS, this.event)),
            ("status", number(this.status)),
            ("id", crate::verbs::address(id)),
        ];
        if !listen_id.is_null() {
            fields.push(("listen_id", crate::verbs::address(listen_id)));
        }
        // SAFETY: as above.
        let space = unsafe { id.as_ref() }.map(|id| id.ps);
        let datagram = matches!(space, Some(RDMA_PS_UDP | RDMA_PS_IPOIB));
        let joined =
            matches!(this.event, RDMA_CM_EVENT_MULTICAST_JOIN | RDMA_CM_EVENT_MULTICAST_ERROR);
        match this.event {
            RDMA_CM_EVENT_CONNECT_REQUEST
            | RDMA_CM_EVENT_CONNECT_RESPONSE
            | RDMA_CM_EVENT_REJECTED
            | RDMA_CM_EVENT_ESTABLISHED
                if !datagram =>
            {
                // SAFETY: the event and the port space say that this part of the union is in use.
                fields.push(("param", Value::Record(unsafe { connection(&this.param.conn) })));
            }
            RDMA_CM_EVENT_CONNECT_REQUEST | RDMA_CM_EVENT_ESTABLISHED => {
                // SAFETY: as above.
                fields.push(("param", unsafe { datagrams(&this.param.ud) }));
            }
            RDMA_CM_EVENT_USER => {
                // SAFETY: these events use this part.
                fields.push(("arg", hex(unsafe { this.param.arg })));
            }
            _ if joined => {
                // SAFETY: events of groups use this part.
                fields.push(("param", unsafe { datagrams(&this.param.ud) }));
            }
            _ => {}
        }
        Some(Value::Record(fields))
    }
}

/// # Safety
///
/// As [`private_data`] of what is in it.
unsafe fn datagrams(param: &rdma_ud_param) -> Value {
    Value::Record(vec![
        // SAFETY: passed on from the caller.
        ("private_data", unsafe { private_data(param.private_data, param.private_data_len) }),
        ("ah_attr", ah_attr(param.ah_attr)),
        ("qp_num", hex(param.qp_num)),
        ("qkey", hex(param.qkey)),
    ])
}

impl Pointee for rdma_addrinfo {
    unsafe fn describe(this: *const Self, _: &Call<'_>) -> Option<Value> {
        // SAFETY: passed on from the caller.
        let this = unsafe { &*this };
        let mut fields = vec![
            ("ai_flags", hex(this.ai_flags as u32)),
            ("ai_family", number(this.ai_family)),
            ("ai_qp_type", word(words::QP_TYPES, this.ai_qp_type as u32)),
            ("ai_port_space", word(words::PORT_SPACES, this.ai_port_space as u32)),
        ];
        // SAFETY: passed on from the caller: each is null or an address.
        let (src, dst) =
            unsafe { (socket_address(this.ai_src_addr), socket_address(this.ai_dst_addr)) };
        fields.extend([("ai_src_addr", src), ("ai_dst_addr", dst)]);
        Some(Value::Record(fields))
    }
}

impl Pointee for rdma_cm_join_mc_attr_ex {
    unsafe fn describe(this: *const Self, _: &Call<'_>) -> Option<Value> {
        // SAFETY: passed on from the caller.
        let this = unsafe { &*this };
        let addr = match this.comp_mask & RDMA_CM_JOIN_MC_ATTR_ADDRESS {
            0 => Value::Null,
            // SAFETY: as above: the mask says that there is one.
            _ => unsafe { socket_address(this.addr) },
        };
        Some(Value::Record(vec![("addr", addr), ("join_flags", hex(this.join_flags))]))
    }
}
