//! Addresses of identifiers: binding, resolving, listening, options.

use libc::{c_int, c_void, sockaddr};
use quipu_abi_trace::entry;
use quipu_abi_types::*;
use quipu_cabi::{Errno, IntMinusOne, Plain};
use quipu_facade::check;

use crate::device::{Device, device};
use crate::id::{complete, id};
use crate::native::{self, Whose, is_native};

/// The P_Key of an adapter that has one partition: the default one.
pub(crate) const DEFAULT_PKEY: u16 = 0xffff;
/// A selector of path records: the value is exact.
const EXACTLY: u8 = 2;
/// A rate of path records: 100 Gbit/s.
const RATE: u8 = 16;

/// The length of an address by its family.
///
/// # Errors
///
/// EINVAL for null and for another family than IPv4, IPv6 and that of InfiniBand.
///
/// # Safety
///
/// `addr` is null or an address.
pub(crate) unsafe fn length(addr: *const sockaddr) -> Result<usize, Errno> {
    // SAFETY: passed on from the caller; programs pass bytes of any alignment.
    let family = unsafe {
        if addr.is_null() {
            return Err(Errno::EINVAL);
        }
        (&raw const (*addr).sa_family).read_unaligned()
    };
    match c_int::from(family) {
        libc::AF_INET => Ok(size_of::<libc::sockaddr_in>()),
        libc::AF_INET6 => Ok(size_of::<libc::sockaddr_in6>()),
        AF_IB => Ok(size_of::<sockaddr_ib>()),
        _ => Err(Errno::EINVAL),
    }
}

/// The adapter's own TCP chooses a port when it connects: the program sees it from then on.
///
/// # Safety
///
/// `raw` is an identifier.
pub(crate) unsafe fn learn_port(raw: *mut rdma_cm_id) {
    // SAFETY: passed on from the caller.
    unsafe {
        if port(&(*raw).route.addr.src_storage) == 0 {
            let _ = refresh(raw);
        }
    }
}

/// Brings what the program sees of an identifier's addresses up to what the engine knows; binds it
/// to its device if that became known.
///
/// # Safety
///
/// `raw` is an identifier.
pub(crate) unsafe fn refresh(raw: *mut rdma_cm_id) -> Result<(), Errno> {
    // SAFETY: passed on from the caller.
    let state = unsafe { id(raw) }?;
    // SAFETY: the structure consists of integers, for which all bytes zero are valid.
    let mut route: EngineCmRoute = unsafe { std::mem::zeroed() };
    // SAFETY: `route` is valid for the call.
    check(unsafe { (state.api.cm.query_route)(state.handle, &mut route) })?;
    let bound = if route.device[0] == 0 { None } else { Some(device(&route.device)?) };
    // SAFETY: the public part is written as the C library writes it, in calls on the identifier.
    let public = unsafe { &mut *raw };
    let addr = &mut public.route.addr;
    let native = state.book().native;
    addr.src_storage = native.map_or(route.src, |given| native::own(&given, public.ps, &route.src));
    match native {
        None => addr.dst_storage = route.dst,
        // Whom the program has named, it has named.
        Some(_) if is_native(addr.dst_storage.ss_family) => {}
        Some(_) => addr.dst_storage = native::peer(&route.dst),
    }
    addr.ibaddr = rdma_ib_addr { sgid: route.sgid, dgid: route.dgid, pkey: DEFAULT_PKEY };
    if let Some(device) = bound {
        // SAFETY: passed on from the caller.
        unsafe { bind(raw, device) }?;
        public.port_num = route.port_num as u8;
    }
    if route.num_paths > 0 {
        let mut book = state.book();
        let path = path_record(&route);
        // Once made it stays where it is: the program may hold its address.
        match &mut book.path {
            Some(known) => **known = path,
            none => *none = Some(Box::new(path)),
        }
        public.route.path_rec = book.path.as_deref_mut().map_or(std::ptr::null_mut(), |p| p);
        public.route.num_paths = 1;
    }
    Ok(())
}

/// # Safety
///
/// `raw` is an identifier.
unsafe fn bind(raw: *mut rdma_cm_id, device: &'static Device) -> Result<(), Errno> {
    // SAFETY: passed on from the caller.
    let mut book = unsafe { id(raw) }?.book();
    if book.device.is_some() {
        return Ok(());
    }
    let pd = device.enter_domain()?;
    book.device = Some(device);
    // SAFETY: passed on from the caller.
    unsafe {
        (*raw).verbs = device.context;
        (*raw).pd = pd;
    }
    Ok(())
}

fn path_record(route: &EngineCmRoute) -> ibv_sa_path_rec {
    ibv_sa_path_rec {
        dgid: route.dgid,
        sgid: route.sgid,
        dlid: 0,
        slid: 0,
        raw_traffic: 0,
        flow_label: 0,
        hop_limit: 64,
        traffic_class: route.tos as u8,
        reversible: 1,
        numb_path: 1,
        pkey: DEFAULT_PKEY,
        // As RoCE adapters take it from the upper three bits of the traffic class.
        sl: (route.tos as u8) >> 5,
        mtu_selector: EXACTLY,
        mtu: route.mtu as u8,
        rate_selector: EXACTLY,
        rate: RATE,
        packet_life_time_selector: EXACTLY,
        packet_life_time: 18,
        preference: 0,
    }
}

/// The port in an address, big endian; 0 if there is no address.
pub(crate) fn port(addr: &libc::sockaddr_storage) -> u16 {
    let at: *const libc::sockaddr_storage = addr;
    match c_int::from(addr.ss_family) {
        // SAFETY: a sockaddr_storage holds and is aligned for the address that its family names.
        libc::AF_INET => unsafe { (*at.cast::<libc::sockaddr_in>()).sin_port },
        // SAFETY: as above.
        libc::AF_INET6 => unsafe { (*at.cast::<libc::sockaddr_in6>()).sin6_port },
        // SAFETY: as above.
        AF_IB => unsafe { (u64::from_be((*at.cast::<sockaddr_ib>()).sib_sid) as u16).to_be() },
        _ => 0,
    }
}

/// `rdma_resolve_addr`.
///
/// # Safety
///
/// `raw` is an identifier; the addresses are addresses, `src` may be null.
pub(crate) unsafe fn resolve(
    raw: *mut rdma_cm_id,
    src: *const sockaddr,
    dst: *const sockaddr,
    timeout_ms: c_int,
) -> Result<c_int, Errno> {
    // SAFETY: passed on from the caller.
    unsafe {
        let state = id(raw)?;
        let length_of_dst = length(dst)?;
        if !src.is_null() {
            length(src)?;
        }
        let native = of_own(raw, src, dst)?;
        let timeout = timeout_ms.max(0) as u32;
        // The program sees whom it is to reach from now on, also if that fails later. It is written before
        // the call: after it, another thread may take the answer.
        let mut wanted: libc::sockaddr_storage = std::mem::zeroed();
        (&raw mut wanted).cast::<u8>().copy_from_nonoverlapping(dst.cast(), length_of_dst);
        let before = std::mem::replace(&mut (*raw).route.addr.dst_storage, wanted);
        let native = std::mem::replace(&mut state.book().native, native);
        let begun = check((state.api.cm.resolve_addr)(state.handle, src, dst, timeout));
        if begun.is_err() {
            (*raw).route.addr.dst_storage = before;
            state.book().native = native;
        }
        begun?;
        complete(raw)
    }
}

/// The own address of an identifier that is about to reach `dst` from `src`, if that is one of InfiniBand:
/// the one that it has, the one that it is to have, or any.
///
/// # Errors
///
/// EINVAL: the own address and the peer's are of different families. As [`native::read`].
///
/// # Safety
///
/// As [`resolve`].
unsafe fn of_own(
    raw: *mut rdma_cm_id,
    src: *const sockaddr,
    dst: *const sockaddr,
) -> Result<Option<sockaddr_ib>, Errno> {
    // SAFETY: passed on from the caller.
    unsafe {
        let (ps, known) = ((*raw).ps, (*raw).route.addr.src_storage.ss_family);
        let peer = native::read(dst, ps, Whose::Peer)?;
        let given = native::read(src, ps, Whose::Own)?;
        let bound = id(raw)?.book().native;
        let fits = match known {
            0 if src.is_null() => true,
            0 => given.is_some() == peer.is_some(),
            _ => is_native(known) == peer.is_some(),
        };
        if !fits {
            return Err(Errno::EINVAL);
        }
        Ok(peer.map(|peer| bound.or(given).unwrap_or(native::any(&peer))))
    }
}

/// `rdma_resolve_route`.
///
/// # Safety
///
/// `raw` is an identifier.
pub(crate) unsafe fn resolve_route(
    raw: *mut rdma_cm_id,
    timeout_ms: c_int,
) -> Result<c_int, Errno> {
    // SAFETY: passed on from the caller.
    unsafe {
        let state = id(raw)?;
        check((state.api.cm.resolve_route)(state.handle, timeout_ms.max(0) as u32))?;
        complete(raw)
    }
}

/// `rdma_bind_addr`.
///
/// # Safety
///
/// `raw` is an identifier, `addr` null or an address.
pub(crate) unsafe fn bind_addr(raw: *mut rdma_cm_id, addr: *const sockaddr) -> Result<(), Errno> {
    // SAFETY: passed on from the caller.
    unsafe {
        let state = id(raw)?;
        length(addr)?;
        let native = native::read(addr, (*raw).ps, Whose::Own)?;
        check((state.api.cm.bind_addr)(state.handle, addr))?;
        state.book().native = native;
        refresh(raw)
    }
}

entry! {
    /// `rdma_bind_addr(3)`
    fn rdma_bind_addr(raw: *mut rdma_cm_id, addr: *mut sockaddr) -> IntMinusOne {
        // SAFETY: the program passes an identifier, and null or an address.
        unsafe { bind_addr(raw, addr) }?;
        Ok(0)
    }

    /// `rdma_resolve_addr(3)`
    fn rdma_resolve_addr(
        raw: *mut rdma_cm_id,
        src: *mut sockaddr,
        dst: *mut sockaddr,
        timeout_ms: c_int,
    ) -> IntMinusOne {
        // SAFETY: the program passes an identifier and addresses; the source may be null.
        unsafe { resolve(raw, src, dst, timeout_ms) }
    }

    /// `rdma_resolve_route(3)`
    fn rdma_resolve_route(raw: *mut rdma_cm_id, timeout_ms: c_int) -> IntMinusOne {
        // SAFETY: the program passes an identifier.
        unsafe { resolve_route(raw, timeout_ms) }
    }

    /// `rdma_listen(3)`
    fn rdma_listen(raw: *mut rdma_cm_id, backlog: c_int) -> IntMinusOne {
        // SAFETY: the program passes an identifier.
        let state = unsafe { id(raw) }?;
        // SAFETY: the handle came from the engine.
        check(unsafe { (state.api.cm.listen)(state.handle, backlog) })?;
        // The port is known now at the latest.
        // SAFETY: as above.
        unsafe { refresh(raw) }?;
        Ok(0)
    }

    /// `rdma_get_src_port(3)`: big endian.
    fn rdma_get_src_port(raw: *mut rdma_cm_id) -> Plain<u16> {
        // SAFETY: the program passes an identifier, whose public part is its own to read.
        unsafe { id(raw)?; Ok(port(&(*raw).route.addr.src_storage)) }
    }

    /// `rdma_get_dst_port(3)`: big endian.
    fn rdma_get_dst_port(raw: *mut rdma_cm_id) -> Plain<u16> {
        // SAFETY: as above.
        unsafe { id(raw)?; Ok(port(&(*raw).route.addr.dst_storage)) }
    }

    /// `rdma_set_option(3)`
    fn rdma_set_option(
        raw: *mut rdma_cm_id,
        level: c_int,
        name: c_int,
        value: *mut c_void,
        length: usize,
    ) -> IntMinusOne {
        // SAFETY: the program passes an identifier.
        let state = unsafe { id(raw) }?;
        if value.is_null() && length > 0 {
            return Err(Errno::EINVAL);
        }
        // SAFETY: the program passes `length` bytes.
        check(unsafe { (state.api.cm.set_option)(state.handle, level, name, value, length) })?;
        Ok(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of_family(family: c_int, port: u16) -> libc::sockaddr_storage {
        // SAFETY: the structure consists of integers.
        let mut addr: libc::sockaddr_storage = unsafe { std::mem::zeroed() };
        addr.ss_family = family as u16;
        // Both families have the port in the same place.
        // SAFETY: a sockaddr_storage is larger than a sockaddr_in.
        unsafe { (*(&raw mut addr).cast::<libc::sockaddr_in>()).sin_port = port.to_be() };
        addr
    }

    #[test]
    fn families_that_are_unknown_are_refused() {
        // SAFETY: these are addresses, or null.
        unsafe {
            let of =
                |family| length((&raw const *Box::leak(Box::new(of_family(family, 0)))).cast());
            assert_eq!(of(libc::AF_INET), Ok(16));
            assert_eq!(of(libc::AF_INET6), Ok(28));
            assert_eq!(of(AF_IB), Ok(48));
            assert_eq!(of(libc::AF_UNSPEC), Err(Errno::EINVAL));
            assert_eq!(of(libc::AF_UNIX), Err(Errno::EINVAL));
            assert_eq!(length(std::ptr::null()), Err(Errno::EINVAL));
        }
    }

    #[test]
    fn ports_are_read_by_family() {
        assert_eq!(port(&of_family(libc::AF_INET, 7471)), 7471u16.to_be());
        assert_eq!(port(&of_family(libc::AF_INET6, 1)), 1u16.to_be());
        assert_eq!(port(&of_family(libc::AF_UNSPEC, 9)), 0);
    }
}
