//! What the dialect of UDPAM (1995 to 1998) has and AMUDP has not: endpoints at known ports, gets,
//! another kind of wait, and what handler 0 gets. The rest of it is `include/udpam.h`, in terms of
//! the other calls.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};

use libc::{c_int, c_long, c_uint, c_ulong, c_ushort, c_void};
use quipu::am::{CallError, Category, Error, Kind, Message, Name, Operation, Tag};
use quipu_cabi::entry;

use crate::bundle::{bundle, eb_t, give};
use crate::call::Function;
use crate::codes::{BAD_ARG, Code, IN_USE, OrCode, Outcome, RESOURCE, code};
use crate::endpoint::{endpoint, ep_t};
use crate::message::arguments;

/// `en_t` of this dialect: port and IPv4 address, both in the order of the processor.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct amu_en_t {
    port: c_ushort,
    ip_addr: c_ulong,
}

/// `ArgBlock`: a message that came back.
#[repr(C)]
struct amu_block {
    request_endpoint: ep_t,
    reply_endpoint: c_int,
    token: *mut c_void,
    handler: c_int,
    source_addr: *mut c_void,
    nbytes: c_int,
    dest_offset: c_int,
    source_offset: c_int,
    args: [c_int; 8],
    buf_id: c_int,
    seq_num: c_int,
}

const REQUEST: c_int = 0x1000_0000;
const REPLY: c_int = 0x2000_0000;

impl amu_en_t {
    fn of(name: &Name) -> Outcome<Self> {
        let IpAddr::V4(ip) = name.port.ip() else { return Err(RESOURCE) };
        Ok(Self { port: name.port.port(), ip_addr: c_ulong::from(u32::from(ip)) })
    }

    fn name(self) -> Outcome<Name> {
        let ip = u32::try_from(self.ip_addr).map_err(|_| BAD_ARG)?;
        Ok(Name::of_address(SocketAddr::new(Ipv4Addr::from(ip).into(), self.port)))
    }
}

/// `op_t` of this dialect: which call, and how many arguments.
fn opcode(operation: Operation, args: usize) -> c_int {
    let eight = c_int::from(args > 4);
    let category = |category| match category {
        Category::Short => 1 << eight,
        Category::Medium => 4 << eight,
        Category::Bulk => 0x10 << eight,
    };
    match operation {
        Operation::Request(of) => REQUEST | category(of),
        Operation::Reply(of) => REPLY | category(of),
        Operation::Get => REQUEST | 0x40 << eight,
    }
}

/// What runs when a message comes back.
fn returned(function: Function, raw: usize) -> impl Fn(&mut Message<'_>) + Send + Sync + 'static {
    move |message| {
        let Kind::Returned { status, operation, .. } = message.kind() else { return };
        let count = message.args().len().min(8);
        let mut args = [0; 8];
        args[..count].copy_from_slice(&message.args()[..count]);
        let number = |value: u64| c_int::try_from(value).unwrap_or(c_int::MAX);
        let mut block = amu_block {
            request_endpoint: raw as ep_t,
            reply_endpoint: message.source_index().map_or(-1, u32::cast_signed),
            token: std::ptr::null_mut(),
            handler: message.handler().into(),
            source_addr: std::ptr::null_mut(),
            nbytes: number(message.payload_len()),
            dest_offset: number(message.offset()),
            source_offset: 0,
            args,
            buf_id: 0,
            seq_num: 0,
        };
        let block: *mut amu_block = &mut block;
        function.returned(1 << (status as c_int - 1), opcode(operation, count), block.cast());
    }
}

entry! {
    /// Makes an endpoint take connections at a port of its own, 0 for any, and tells its name.
    fn AMU_Listen(raw: ep_t, port: c_int, name: *mut amu_en_t) -> Code {
        // SAFETY: the program passes an endpoint.
        code(unsafe { endpoint(raw) }.and_then(|known| {
            let port = u16::try_from(port).map_err(|_| BAD_ARG)?;
            let own = known.endpoint.listen(port).map_err(|_| RESOURCE)?;
            let own = amu_en_t::of(&own)?;
            if name.is_null() { Ok(()) } else { give(name, own) }
        }))
    }

    /// `AM_Map`
    fn AMU_MapAddress(raw: ep_t, at: c_int, ip: c_ulong, port: c_uint, tag: u64) -> Code {
        // SAFETY: as above.
        code(unsafe { endpoint(raw) }.and_then(|known| {
            let port = c_ushort::try_from(port).map_err(|_| BAD_ARG)?;
            let name = amu_en_t { port, ip_addr: ip }.name()?;
            let at = u32::try_from(at).map_err(|_| BAD_ARG)?;
            if known.endpoint.translation(at).is_ok() {
                return Err(IN_USE);
            }
            known.endpoint.map(at, name, Tag(tag)).or_code()
        }))
    }

    /// `AM_GetTranslationName`
    fn AMU_GetTranslationName(raw: ep_t, at: c_int, out: *mut amu_en_t) -> Code {
        // SAFETY: as above.
        code(unsafe { endpoint(raw) }.and_then(|known| {
            let at = u32::try_from(at).map_err(|_| BAD_ARG)?;
            give(out, amu_en_t::of(&known.endpoint.translation(at).or_code()?.0)?)
        }))
    }

    /// `AM_GetSourceEndpoint`
    fn AMU_GetSourceEndpoint(token: *mut c_void, out: *mut amu_en_t) -> Code {
        code(crate::message::with_message(token, BAD_ARG, |message| {
            give(out, amu_en_t::of(&message.source().ok_or(RESOURCE)?)?)
        }))
    }

    /// Whether a handler is set: 0 or 1. Handler 0 counts as not set.
    fn AMU_HasHandler(raw: ep_t, at: c_int) -> Code {
        // SAFETY: as above.
        let known = unsafe { endpoint(raw) };
        let set = known.is_ok_and(|known| {
            u32::try_from(at).is_ok_and(|at| known.endpoint.has_handler(at).unwrap_or(false))
        });
        Ok(c_int::from(set && at != 0))
    }

    /// `AM_SetHandler` for handler 0
    fn AMU_SetReturnHandler(raw: ep_t, function: *mut c_void) -> Code {
        // SAFETY: as above.
        code(unsafe { endpoint(raw) }.and_then(|known| {
            if function.is_null() {
                return Err(BAD_ARG);
            }
            let run = returned(Function(function as usize), raw as usize);
            known.endpoint.set_handler(0, run).or_code()
        }))
    }

    /// `AM_Wait`: returns at once where there is nothing to wait for; runs no handlers
    fn AMU_Wait(raw: eb_t) -> Code {
        // SAFETY: the program passes a bundle.
        code(unsafe { bundle(raw) }.and_then(|known| {
            if known.takes_mask() { crate::bundle::wait(known) } else { Ok(()) }
        }))
    }

    /// `AM_GetXfer4`, `AM_GetXfer8` and, if `is_async`, those that do not wait
    fn AMU_Get(
        raw: ep_t, to: c_int, from: c_long, handler: u8, offset: c_long, len: c_int,
        is_async: c_int, count: c_int, args: *const c_int,
    ) -> Code {
        // SAFETY: the program passes an endpoint, and as many arguments as it says.
        let (known, args) = unsafe { (endpoint(raw), arguments(count, args)) };
        code((|| {
            let (known, (args, count)) = (known?, args?);
            let to = u32::try_from(to).map_err(|_| BAD_ARG)?;
            let number = |value: c_long| u64::try_from(value).map_err(|_| BAD_ARG);
            let place = (number(offset)?, number(len.into())?);
            let run = (handler.into(), &args[..count]);
            let from = number(from)?;
            if is_async == 0 {
                return known.endpoint.get(to, from, place, run).or_code();
            }
            match known.endpoint.try_get(to, from, place, run) {
                Err(Error::Call(CallError::WouldBlock)) => {
                    // So that another attempt finds what this one has begun.
                    known.endpoint.poll().or_code()?;
                    Err(IN_USE)
                }
                got => got.or_code(),
            }
        })())
    }
}
