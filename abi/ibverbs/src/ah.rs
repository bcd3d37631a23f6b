//! Address handles.

use libc::c_int;
use quipu_abi_trace::entry;
use quipu_abi_types::*;
use quipu_cabi::{Errno, Handle, IntErrno, IntMinusOne, Null, Tagged};

use crate::context::context;
use crate::engine::check;
use crate::object::Blank;
use crate::pd::{Member, pd};

/// What may follow a header: UDP, or InfiniBand's transport.
const NEXT_UDP: u8 = 17;
const NEXT_TRANSPORT: u8 = 0x1b;

/// The private part of an address handle.
pub(crate) struct AhState {
    api: &'static EngineApi,
    handle: AhHandle,
    _member: Member,
}

impl Tagged for AhState {
    const TAG: u64 = 0x5155_4950_0000_4148;
}

type Ah = Handle<ibv_ah, AhState>;

/// # Safety
///
/// `raw` is a domain of the program.
unsafe fn create(raw: *mut ibv_pd, attr: &ibv_ah_attr) -> Result<*mut ibv_ah, Errno> {
    // SAFETY: passed on from the caller.
    let pd = unsafe { pd(raw) }?;
    let mut handle = AhHandle::NONE;
    // SAFETY: both are valid for the call.
    check(unsafe { (pd.api.create_ah)(pd.handle, attr, &mut handle) })?;
    let mut public = ibv_ah::blank();
    // SAFETY: a live object of the program.
    public.context = unsafe { (*raw).context };
    public.pd = raw;
    // The engine reads it from here when a datagram is posted.
    public.handle = handle.0;
    Ok(Ah::create(public, AhState { api: pd.api, handle, _member: pd.enter() }))
}

/// The way back by an IPv6 header.
fn ipv6_route(grh: &ibv_grh) -> ibv_global_route {
    let fields = u32::from_be(grh.version_tclass_flow);
    let mut route = ibv_global_route::blank();
    route.dgid = grh.sgid;
    route.flow_label = fields & 0xf_ffff;
    route.traffic_class = (fields >> 20) as u8;
    route
}

/// The way back by an IPv4 header, which RoCE v2 puts into the second half of the bytes; `None` if that
/// is none: its checksum tells (RFC 1071).
fn ipv4_route(grh: &ibv_grh) -> Option<ibv_global_route> {
    // SAFETY: every bit pattern is a GID.
    let (sgid, dgid) = unsafe { (grh.sgid.raw, grh.dgid.raw) };
    let mut header = [0; 20];
    header[..4].copy_from_slice(&sgid[12..]);
    header[4..].copy_from_slice(&dgid);
    let words = header.chunks_exact(2).map(|pair| u32::from(pair[0]) << 8 | u32::from(pair[1]));
    let sum: u32 = words.sum();
    let sum = (sum & 0xffff) + (sum >> 16);
    if u32::from_be(grh.version_tclass_flow) >> 28 == 6 || header[0] != 0x45 || sum != 0xffff {
        return None;
    }
    let mut route = ibv_global_route::blank();
    let mut raw = [0; 16];
    raw[10..12].fill(0xff);
    raw[12..].copy_from_slice(&header[12..16]);
    route.dgid = ibv_gid { raw };
    route.traffic_class = header[1];
    Some(route)
}

/// Whether an answer has a way back: the datagram was to this adapter alone, by a protocol that it speaks, as
/// rdma-core has it.
fn check_route(grh: &ibv_grh, ipv4: bool) -> Result<(), Errno> {
    // SAFETY: every bit pattern is a GID.
    let dest = unsafe { grh.dgid.raw };
    let to_group = if ipv4 { dest[12] >> 4 == 0xe } else { dest[0] == 0xff };
    if to_group {
        return Err(Errno::EINVAL);
    }
    let speaks = ipv4 || [NEXT_UDP, NEXT_TRANSPORT].contains(&grh.next_hdr);
    if speaks { Ok(()) } else { Err(Errno(libc::EPROTONOSUPPORT)) }
}

/// The address that a datagram was sent to, from the header in front of its payload.
fn own_address(grh: &ibv_grh, ipv4: bool) -> [u8; 16] {
    // SAFETY: every bit pattern is a GID.
    let mut raw = unsafe { grh.dgid.raw };
    if ipv4 {
        raw[..10].fill(0);
        raw[10..12].fill(0xff);
    }
    raw
}

/// The row of the GID table that holds an address; 0 if none does.
fn row_of(api: &EngineApi, address: [u8; 16]) -> u8 {
    /// Rows that hold the first address.
    const FIRST_ROWS: u8 = 4;
    let others = FIRST_ROWS..=u8::MAX;
    for index in std::iter::once(0).chain(others) {
        let mut entry = ibv_gid_entry::blank();
        // SAFETY: `entry` is valid for the call.
        if check(unsafe { (api.list_gid)(index.into(), &mut entry) }).is_err() {
            break;
        }
        // SAFETY: every bit pattern is a GID.
        if unsafe { entry.gid.raw } == address {
            return index;
        }
    }
    0
}

/// The address of who sent a datagram, from its completion and the header in front of its payload.
/// `sgid_index` finds the row of the GID table with the address that it was sent to.
fn sender(
    port: u8,
    wc: &ibv_wc,
    grh: Option<&ibv_grh>,
    sgid_index: impl Fn([u8; 16]) -> u8,
) -> Result<ibv_ah_attr, Errno> {
    let mut attr = ibv_ah_attr::blank();
    attr.dlid = wc.slid;
    attr.sl = wc.sl;
    attr.src_path_bits = wc.dlid_path_bits;
    attr.port_num = port;
    if wc.wc_flags & IBV_WC_GRH != 0 {
        let grh = grh.ok_or(Errno::EINVAL)?;
        let ipv4 = ipv4_route(grh);
        check_route(grh, ipv4.is_some())?;
        let of_ipv4 = ipv4.is_some();
        let route = ipv4.unwrap_or_else(|| ipv6_route(grh));
        attr.is_global = 1;
        attr.grh = route;
        attr.grh.hop_limit = 0xff;
        attr.grh.sgid_index = sgid_index(own_address(grh, of_ipv4));
    }
    Ok(attr)
}

entry! {
    /// `ibv_create_ah(3)`
    fn ibv_create_ah(raw: *mut ibv_pd, attr: *mut ibv_ah_attr) -> Null<ibv_ah> {
        // SAFETY: the program passes a domain, and null or a valid pointer.
        unsafe { create(raw, attr.as_ref().ok_or(Errno::EINVAL)?) }
    }

    /// `ibv_init_ah_from_wc(3)`
    fn ibv_init_ah_from_wc(
        raw: *mut ibv_context,
        port: u8,
        wc: *mut ibv_wc,
        grh: *mut ibv_grh,
        out: *mut ibv_ah_attr,
    ) -> IntMinusOne {
        // SAFETY: the program passes a context, and null or valid pointers.
        unsafe {
            let api = context(raw)?.api;
            let out = out.as_mut().ok_or(Errno::EINVAL)?;
            let wc = wc.as_ref().ok_or(Errno::EINVAL)?;
            *out = sender(port, wc, grh.as_ref(), |address| row_of(api, address))?;
        }
        Ok::<c_int, _>(0)
    }

    /// `ibv_create_ah_from_wc(3)`
    fn ibv_create_ah_from_wc(
        raw: *mut ibv_pd,
        wc: *mut ibv_wc,
        grh: *mut ibv_grh,
        port: u8,
    ) -> Null<ibv_ah> {
        // SAFETY: the program passes a domain, and null or valid pointers.
        unsafe {
            let (api, wc) = (pd(raw)?.api, wc.as_ref().ok_or(Errno::EINVAL)?);
            create(raw, &sender(port, wc, grh.as_ref(), |address| row_of(api, address))?)
        }
    }

    /// `ibv_destroy_ah(3)`
    fn ibv_destroy_ah(raw: *mut ibv_ah) -> IntErrno {
        // SAFETY: the program passes an address handle and uses it no more; its domain outlives it.
        unsafe {
            let ah = Ah::get(raw)?;
            check((ah.api.destroy_ah)(ah.handle))?;
            drop(Ah::take(raw)?);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_sender_is_read_from_an_ipv4_header() {
        let mut wc = ibv_wc::blank();
        wc.wc_flags = IBV_WC_GRH;
        // The last 20 of 40 bytes.
        let mut sgid = [0; 16];
        sgid[12..].copy_from_slice(&[0x45, 0, 0, 0x73]);
        let mut dgid = [0, 0, 0x40, 0, 0x40, 0x11, 0xb8, 0x61, 192, 168, 0, 1, 192, 168, 0, 0xc7];
        let mut grh = ibv_grh {
            version_tclass_flow: 0,
            paylen: 0,
            next_hdr: 0,
            hop_limit: 0,
            sgid: ibv_gid { raw: sgid },
            dgid: ibv_gid { raw: dgid },
        };
        let own = [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 192, 168, 0, 0xc7];
        let attr = sender(1, &wc, Some(&grh), |to| if to == own { 7 } else { 0 }).unwrap();
        assert_eq!(attr.grh.sgid_index, 7, "it was sent to the address in that row");
        // SAFETY: every bit pattern is a GID.
        let gid = unsafe { attr.grh.dgid.raw };
        assert_eq!(gid, [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 192, 168, 0, 1]);
        // With a wrong checksum it is no IPv4 header.
        dgid[15] ^= 1;
        grh.dgid = ibv_gid { raw: dgid };
        grh.next_hdr = NEXT_UDP;
        // SAFETY: as above.
        let gid = unsafe { sender(1, &wc, Some(&grh), |_| 0).unwrap().grh.dgid.raw };
        assert_eq!(gid[12..], [0x45, 0, 0, 0x73]);
    }

    #[test]
    fn the_sender_is_read_from_the_header() {
        let mut wc = ibv_wc::blank();
        wc.wc_flags = IBV_WC_GRH;
        wc.sl = 3;
        let grh = ibv_grh {
            version_tclass_flow: (6u32 << 28 | 0x12 << 20 | 0xabcde).to_be(),
            paylen: 0,
            next_hdr: NEXT_UDP,
            hop_limit: 1,
            sgid: ibv_gid { raw: [5; 16] },
            dgid: ibv_gid { raw: [6; 16] },
        };
        let attr = sender(1, &wc, Some(&grh), |_| 0).unwrap();
        // SAFETY: every bit pattern is a GID.
        assert_eq!(unsafe { attr.grh.dgid.raw }, [5; 16]);
        assert_eq!((attr.grh.flow_label, attr.grh.traffic_class), (0xabcde, 0x12));
        assert_eq!((attr.is_global, attr.sl, attr.port_num), (1, 3, 1));
        assert_eq!(sender(1, &wc, None, |_| 0).err(), Some(Errno::EINVAL));
        // What was to a group, or is none of the adapter's, has no way back.
        let group = ibv_grh { dgid: ibv_gid { raw: [0xff; 16] }, ..grh };
        assert_eq!(sender(1, &wc, Some(&group), |_| 0).err(), Some(Errno::EINVAL));
        let other = ibv_grh { next_hdr: 6, ..grh };
        assert_eq!(sender(1, &wc, Some(&other), |_| 0).err(), Some(Errno(libc::EPROTONOSUPPORT)));
    }
}
