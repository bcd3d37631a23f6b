//! `rdma_getaddrinfo`: names to addresses. There is no service to ask for routes, so none are found.
//!
//! What programs get is of malloc(3), piece by piece: some of them free and replace pieces.

use std::ptr;

use libc::{EAI_BADFLAGS, EAI_MEMORY, EAI_SOCKTYPE, addrinfo, c_char, c_int};
use libc::{sockaddr, socklen_t};
use quipu_abi_trace::entry;
use quipu_abi_types::*;
use quipu_cabi::{Errno, IntMinusOne, Void};
use quipu_facade::{check, engine};

use crate::native;

/// `EAI_QPTYPE` of the manual page, for which there is no number but that of its like.
const EAI_QPTYPE: c_int = EAI_SOCKTYPE;
const FLAGS: c_int = RAI_PASSIVE | RAI_NUMERICHOST | RAI_NOROUTE | RAI_FAMILY | RAI_SA | RAI_DNS;

/// Why there is no result.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Failure {
    /// -1, with `errno`.
    Errno(Errno),
    /// A code of getaddrinfo(3).
    Code(c_int),
}

/// The service and the port space, each from the other where it is missing.
fn service(qp_type: c_int, ps: c_int) -> Result<(c_int, c_int), Failure> {
    let (ud, udp) = (IBV_QPT_UD as c_int, RDMA_PS_UDP as c_int);
    let datagrams = |ps: c_int| ps == udp || ps == RDMA_PS_IPOIB as c_int;
    let (qp_type, ps) = match (qp_type, ps) {
        (0, 0) => (IBV_QPT_RC as c_int, RDMA_PS_TCP as c_int),
        (0, ps) if datagrams(ps) => (ud, ps),
        (0, ps) => (IBV_QPT_RC as c_int, ps),
        (qp_type, 0) if qp_type == ud => (ud, udp),
        (qp_type, 0) if qp_type == IBV_QPT_RC as c_int => (qp_type, RDMA_PS_TCP as c_int),
        (qp_type, 0) => (qp_type, RDMA_PS_IB as c_int),
        given => given,
    };
    let fits = match ps as u32 {
        RDMA_PS_IB => true,
        RDMA_PS_TCP => qp_type != ud,
        _ if datagrams(ps) => qp_type == ud,
        _ => false,
    };
    if fits { Ok((qp_type, ps)) } else { Err(Failure::Code(EAI_QPTYPE)) }
}

/// Puts a copy of an address into the place for one.
///
/// # Safety
///
/// `addr` names `length` bytes.
unsafe fn copy(
    addr: *const sockaddr,
    length: socklen_t,
    to: (&mut *mut sockaddr, &mut socklen_t),
) -> Result<(), Failure> {
    if addr.is_null() || length == 0 {
        return Ok(());
    }
    // SAFETY: malloc(3); passed on from the caller.
    unsafe {
        let memory = libc::malloc(length as usize);
        if memory.is_null() {
            return Err(Failure::Code(EAI_MEMORY));
        }
        ptr::copy_nonoverlapping(addr.cast::<u8>(), memory.cast(), length as usize);
        *to.0 = memory.cast();
    }
    *to.1 = length;
    Ok(())
}

/// What asks for an address of InfiniBand beside its family. A name would be looked up by a service that
/// knows routes, and where there is none, as any other.
const NATIVE: c_int = RAI_FAMILY | RAI_NUMERICHOST;

/// Asks getaddrinfo(3) and fills in the address of the side that `result` is for.
///
/// # Safety
///
/// Both texts are null or texts.
unsafe fn look_up(
    node: *const c_char,
    service: *const c_char,
    result: &mut rdma_addrinfo,
) -> Result<(), Failure> {
    let passive = result.ai_flags & RAI_PASSIVE != 0;
    // SAFETY: the structure consists of integers and raw pointers.
    let mut hints: addrinfo = unsafe { std::mem::zeroed() };
    let flag = |rai: c_int, ai: c_int| if result.ai_flags & rai != 0 { ai } else { 0 };
    hints.ai_flags =
        flag(RAI_PASSIVE, libc::AI_PASSIVE) | flag(RAI_NUMERICHOST, libc::AI_NUMERICHOST);
    let of_infiniband = result.ai_family == AF_IB;
    hints.ai_family = if of_infiniband { libc::AF_UNSPEC } else { result.ai_family };
    let datagrams = result.ai_qp_type == IBV_QPT_UD as c_int;
    hints.ai_socktype = if datagrams { libc::SOCK_DGRAM } else { libc::SOCK_STREAM };
    let mut found = ptr::null_mut();
    // SAFETY: passed on from the caller; `found` is freed below.
    unsafe {
        let code = libc::getaddrinfo(node, service, &hints, &mut found);
        if code != 0 {
            return Err(Failure::Code(code));
        }
        let first = &*found;
        result.ai_family = first.ai_family;
        let to = if passive {
            (&mut result.ai_src_addr, &mut result.ai_src_len)
        } else {
            (&mut result.ai_dst_addr, &mut result.ai_dst_len)
        };
        let copied = if of_infiniband && result.ai_flags & NATIVE == NATIVE {
            let mut ip: libc::sockaddr_storage = std::mem::zeroed();
            let bytes = first.ai_addr.cast::<u8>();
            (&raw mut ip).cast::<u8>().copy_from_nonoverlapping(bytes, first.ai_addrlen as usize);
            match native::of_ip(&ip, result.ai_port_space as u32) {
                Some(addr) => {
                    copy((&raw const addr).cast(), size_of::<sockaddr_ib>() as socklen_t, to)
                }
                None => Err(Failure::Code(libc::EAI_FAMILY)),
            }
        } else {
            copy(first.ai_addr, first.ai_addrlen, to)
        };
        libc::freeaddrinfo(found);
        copied
    }
}

/// Fills in `result`, which is empty.
///
/// # Safety
///
/// As the program promises of its arguments.
unsafe fn resolve(
    node: *const c_char,
    service_name: *const c_char,
    hints: Option<&rdma_addrinfo>,
    result: &mut rdma_addrinfo,
) -> Result<(), Failure> {
    if node.is_null() && service_name.is_null() && hints.is_none() {
        return Err(Failure::Errno(Errno::EINVAL));
    }
    if let Some(hints) = hints {
        if hints.ai_flags & RAI_SA != 0 {
            let other = !node.is_null() || hints.ai_flags & RAI_DNS != 0;
            // No port here has a subnet administrator, and others are skipped.
            let errno = if other { Errno::EOPNOTSUPP } else { Errno::ENOENT };
            return Err(Failure::Errno(errno));
        }
        if hints.ai_flags & !FLAGS != 0 {
            return Err(Failure::Code(EAI_BADFLAGS));
        }
        result.ai_flags = hints.ai_flags;
        result.ai_family = hints.ai_family;
    }
    let (qp_type, ps) = hints.map_or((0, 0), |hints| (hints.ai_qp_type, hints.ai_port_space));
    (result.ai_qp_type, result.ai_port_space) = service(qp_type, ps)?;
    // SAFETY: passed on from the caller.
    unsafe {
        if !node.is_null() || !service_name.is_null() {
            look_up(node, service_name, result)?;
        }
        let Some(hints) = hints else { return Ok(()) };
        if result.ai_src_len == 0 {
            let to = (&mut result.ai_src_addr, &mut result.ai_src_len);
            copy(hints.ai_src_addr, hints.ai_src_len, to)?;
        }
        if result.ai_dst_len == 0 && result.ai_flags & RAI_PASSIVE == 0 {
            let to = (&mut result.ai_dst_addr, &mut result.ai_dst_len);
            copy(hints.ai_dst_addr, hints.ai_dst_len, to)?;
        }
        for (from, to) in [
            (hints.ai_src_canonname, &mut result.ai_src_canonname),
            (hints.ai_dst_canonname, &mut result.ai_dst_canonname),
        ] {
            if !from.is_null() {
                *to = libc::strdup(from);
            }
        }
        let either = [result.ai_src_addr, result.ai_dst_addr].into_iter().find(|a| !a.is_null());
        if let Some(addr) = either {
            result.ai_family = c_int::from((*addr).sa_family);
        }
    }
    Ok(())
}

/// What `rdma_getaddrinfo` has to say; one result at most, the first that getaddrinfo(3) has.
///
/// # Safety
///
/// As the program promises of its arguments.
pub(crate) unsafe fn look_up_all(
    node: *const c_char,
    service: *const c_char,
    hints: Option<&rdma_addrinfo>,
) -> Result<*mut rdma_addrinfo, Failure> {
    // SAFETY: calloc(3); passed on from the caller.
    unsafe {
        let result = libc::calloc(1, size_of::<rdma_addrinfo>()).cast::<rdma_addrinfo>();
        if result.is_null() {
            return Err(Failure::Code(EAI_MEMORY));
        }
        let resolved = resolve(node, service, hints, &mut *result);
        if let Err(failure) = resolved {
            let errno = Errno::last();
            free(result);
            errno.set();
            return Err(failure);
        }
        Ok(result)
    }
}

/// Frees a list.
///
/// # Safety
///
/// `list` is null or came from [`look_up_all`], its pieces of malloc(3).
pub(crate) unsafe fn free(mut list: *mut rdma_addrinfo) {
    while !list.is_null() {
        // SAFETY: passed on from the caller.
        unsafe {
            let this = &*list;
            let next = this.ai_next;
            libc::free(this.ai_src_addr.cast());
            libc::free(this.ai_dst_addr.cast());
            libc::free(this.ai_src_canonname.cast());
            libc::free(this.ai_dst_canonname.cast());
            libc::free(this.ai_route);
            libc::free(this.ai_connect);
            libc::free(list.cast());
            list = next;
        }
    }
}

entry! {
    /// `rdma_getaddrinfo(3)`
    fn rdma_getaddrinfo(
        node: *const c_char,
        service: *const c_char,
        hints: *const rdma_addrinfo,
        out: *mut *mut rdma_addrinfo,
    ) -> IntMinusOne {
        // SAFETY: the program passes null or valid pointers, texts among them.
        unsafe {
            let out = out.as_mut().ok_or(Errno::EINVAL)?;
            if let Ok(api) = engine() {
                check((api.cm.note_getaddrinfo)())?;
            }
            match look_up_all(node, service, hints.as_ref()) {
                Ok(list) => {
                    *out = list;
                    Ok(0)
                }
                Err(Failure::Errno(errno)) => Err(errno),
                Err(Failure::Code(code)) => Ok(code),
            }
        }
    }

    /// `rdma_freeaddrinfo(3)`
    fn rdma_freeaddrinfo(list: *mut rdma_addrinfo) -> Void {
        // SAFETY: the program passes null or what rdma_getaddrinfo gave.
        unsafe { free(list) };
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::ffi::CStr;

    use super::*;

    fn hints(flags: c_int) -> rdma_addrinfo {
        // SAFETY: the structure consists of integers and raw pointers.
        let mut hints: rdma_addrinfo = unsafe { std::mem::zeroed() };
        hints.ai_flags = flags;
        hints
    }

    fn ask(
        node: Option<&CStr>,
        hints: Option<&rdma_addrinfo>,
    ) -> Result<*mut rdma_addrinfo, c_int> {
        let mut out = ptr::null_mut();
        let node = node.map_or(ptr::null(), CStr::as_ptr);
        let hints = hints.map_or(ptr::null(), |hints| hints as *const rdma_addrinfo);
        let service = if node.is_null() { ptr::null() } else { c"7471".as_ptr() };
        // SAFETY: texts and valid pointers.
        match unsafe { rdma_getaddrinfo(node, service, hints, &mut out) } {
            0 => Ok(out),
            code => Err(code),
        }
    }

    #[test]
    fn an_address_is_for_the_side_that_asks() {
        // SAFETY: the results are read before they are freed, once.
        unsafe {
            let active = ask(Some(c"127.0.0.1"), None).unwrap();
            assert_eq!((*active).ai_family, libc::AF_INET);
            assert_eq!(((*active).ai_dst_len, (*active).ai_src_len), (16, 0));
            assert_eq!((*active).ai_port_space, RDMA_PS_TCP as c_int);
            assert_eq!((*active).ai_qp_type, IBV_QPT_RC as c_int);
            assert_eq!(
                (*(*active).ai_dst_addr.cast::<libc::sockaddr_in>()).sin_port,
                7471u16.to_be()
            );
            let mut other = hints(0);
            (other.ai_src_addr, other.ai_src_len) = ((*active).ai_dst_addr, 16);
            let both = ask(Some(c"::1"), Some(&other)).unwrap();
            assert_eq!(((*both).ai_dst_len, (*both).ai_src_len), (28, 16));
            let only = ask(None, Some(&other)).unwrap();
            assert_eq!(((*only).ai_dst_len, (*only).ai_src_len), (0, 16));
            assert_eq!((*only).ai_family, libc::AF_INET);
            rdma_freeaddrinfo(only);
            rdma_freeaddrinfo(both);
            rdma_freeaddrinfo(active);
            let passive = ask(Some(c"::1"), Some(&hints(RAI_PASSIVE))).unwrap();
            assert_eq!(((*passive).ai_dst_len, (*passive).ai_src_len), (0, 28));
            rdma_freeaddrinfo(passive);
            rdma_freeaddrinfo(ptr::null_mut());
        }
    }

    #[test]
    fn gids_are_for_those_who_ask_for_them_in_all_ways() {
        let mut ib = hints(RAI_FAMILY | RAI_NUMERICHOST);
        (ib.ai_family, ib.ai_port_space) = (AF_IB, RDMA_PS_IB as c_int);
        // SAFETY: the results are read before they are freed, once.
        unsafe {
            for node in [c"::ffff:192.0.2.7", c"192.0.2.7"] {
                let found = ask(Some(node), Some(&ib)).unwrap();
                assert_eq!(((*found).ai_family, (*found).ai_dst_len), (AF_IB, 48));
                let addr = &*(*found).ai_dst_addr.cast::<sockaddr_ib>();
                assert_eq!(addr.sib_addr.raw[8..], [0, 0, 0xff, 0xff, 192, 0, 2, 7]);
                assert_eq!(addr.sib_sid, 0x013f_1d2f_u64.to_be());
                assert_eq!((addr.sib_pkey, addr.sib_sid_mask), (0xffff, u64::MAX));
                rdma_freeaddrinfo(found);
            }
            ib.ai_flags |= RAI_PASSIVE;
            let found = ask(Some(c"::"), Some(&ib)).unwrap();
            let addr = &*(*found).ai_src_addr.cast::<sockaddr_ib>();
            assert_eq!(addr.sib_addr.raw, [0; 16]);
            rdma_freeaddrinfo(found);
            ib.ai_flags = RAI_FAMILY;
            let found = ask(Some(c"::1"), Some(&ib)).unwrap();
            assert_eq!(((*found).ai_family, (*found).ai_dst_len), (libc::AF_INET6, 28));
            rdma_freeaddrinfo(found);
        }
    }

    #[test]
    fn what_cannot_be_is_refused() {
        assert_eq!(ask(None, None), Err(-1));
        assert_eq!(ask(Some(c"a name"), Some(&hints(RAI_NUMERICHOST))), Err(libc::EAI_NONAME));
        assert_eq!(ask(Some(c"::1"), Some(&hints(1 << 20))), Err(EAI_BADFLAGS));
        let mut crooked = hints(0);
        (crooked.ai_qp_type, crooked.ai_port_space) = (IBV_QPT_UD as c_int, RDMA_PS_TCP as c_int);
        assert_eq!(ask(Some(c"::1"), Some(&crooked)), Err(EAI_QPTYPE));
        // SAFETY: null pointers are what is tested.
        let code =
            unsafe { rdma_getaddrinfo(c"::1".as_ptr(), ptr::null(), ptr::null(), ptr::null_mut()) };
        assert_eq!(code, -1);
    }

    #[test]
    fn service_and_port_space_follow_from_each_other() {
        let (rc, ud) = (IBV_QPT_RC as c_int, IBV_QPT_UD as c_int);
        let (tcp, udp) = (RDMA_PS_TCP as c_int, RDMA_PS_UDP as c_int);
        assert_eq!(service(0, udp), Ok((ud, udp)));
        assert_eq!(service(ud, 0), Ok((ud, udp)));
        assert_eq!(service(rc, 0), Ok((rc, tcp)));
        let xrc = IBV_QPT_XRC_SEND as c_int;
        assert_eq!(service(xrc, 0), Ok((xrc, RDMA_PS_IB as c_int)));
        assert_eq!(service(rc, udp), Err(Failure::Code(EAI_QPTYPE)));
        assert_eq!(service(rc, 7), Err(Failure::Code(EAI_QPTYPE)));
    }
}
