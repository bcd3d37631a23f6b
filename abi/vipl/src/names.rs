//! The name service, which is the system's resolver, and what is known of the network.

use std::ffi::CStr;
use std::net::{IpAddr, SocketAddr, ToSocketAddrs};

use libc::{c_char, c_int, c_ulong};
use quipu_cabi::entry;
use quipu_via::address;
use quipu_via::codes::{Code, Outcome};

use crate::handle;
use crate::nic::Nic;
use crate::touch::{self, give};
use crate::types::{VIP_AUTODISCOVERY_LIST, VIP_NET_ADDRESS, VIP_PVOID, VipReturn, code};

const AUTODISCOVERY: c_ulong = 1;

/// Addresses that a program was told of: they live as long as the NIC, or until it asks again.
#[derive(Default)]
pub(crate) struct Discovered {
    addresses: Vec<Box<[u32]>>,
    pointers: Vec<usize>,
}

/// The NIC, if its name service is in use.
fn served(raw: VIP_PVOID) -> Outcome<std::sync::Arc<Nic>> {
    let nic = handle::nic(raw)?;
    let is_ready = nic.lock().name_service;
    if is_ready { Ok(nic) } else { Err(Code::ErrorNameService) }
}

fn by_name(
    raw: VIP_PVOID,
    name: *const c_char,
    out: *mut VIP_NET_ADDRESS,
    index: c_ulong,
) -> Outcome {
    let nic = handle::nic(raw)?;
    if name.is_null() || out.is_null() {
        return Err(Code::InvalidParameter);
    }
    served(raw)?;
    // SAFETY: the program passes a string.
    let name = unsafe { CStr::from_ptr(name) }.to_str().map_err(|_| Code::ErrorNameService)?;
    let found = (name, 0).to_socket_addrs().map_err(|_| Code::ErrorNameService)?;
    let mut hosts: Vec<Vec<u8>> = Vec::new();
    for host in found.map(|at| address::bytes_of(at.ip())) {
        if host.len() == nic.address.len() && !hosts.contains(&host) {
            hosts.push(host);
        }
    }
    let host = usize::try_from(index).ok().and_then(|index| hosts.get(index));
    touch::put_host(out, host.ok_or(Code::ErrorNameService)?);
    Ok(())
}

/// The name of a host, or its address as text.
fn name_of(host: IpAddr) -> Outcome<Vec<u8>> {
    let mut name = [0_u8; 1025];
    let looked_up = match SocketAddr::new(host, 0) {
        SocketAddr::V4(at) => {
            let at = libc::sockaddr_in {
                sin_family: libc::AF_INET as u16,
                sin_port: 0,
                sin_addr: libc::in_addr { s_addr: u32::from_ne_bytes(at.ip().octets()) },
                sin_zero: [0; 8],
            };
            look_up_or_spell(&at, &mut name)
        }
        SocketAddr::V6(at) => {
            let at = libc::sockaddr_in6 {
                sin6_family: libc::AF_INET6 as u16,
                sin6_port: 0,
                sin6_flowinfo: 0,
                sin6_addr: libc::in6_addr { s6_addr: at.ip().octets() },
                sin6_scope_id: 0,
            };
            look_up_or_spell(&at, &mut name)
        }
    };
    if looked_up != 0 {
        return Err(Code::ErrorNameService);
    }
    let name = CStr::from_bytes_until_nul(&name).map_err(|_| Code::ErrorNameService)?;
    Ok(name.to_bytes_with_nul().to_vec())
}

/// The name of an address; its digits where the resolver has none or does not answer.
fn look_up_or_spell<A>(at: &A, name: &mut [u8; 1025]) -> c_int {
    match look_up(at, name, 0) {
        0 => 0,
        _ => look_up(at, name, libc::NI_NUMERICHOST),
    }
}

fn look_up<A>(at: &A, name: &mut [u8; 1025], flags: c_int) -> c_int {
    // SAFETY: a socket address with its length, and room with its length.
    unsafe {
        libc::getnameinfo(
            std::ptr::from_ref(at).cast(),
            size_of::<A>() as libc::socklen_t,
            name.as_mut_ptr().cast(),
            name.len() as libc::socklen_t,
            std::ptr::null_mut(),
            0,
            flags,
        )
    }
}

fn by_address(
    raw: VIP_PVOID,
    at: *const VIP_NET_ADDRESS,
    out: *mut c_char,
    len: *mut c_ulong,
) -> Outcome {
    handle::nic(raw)?;
    let (at, _) = touch::net_address(at)?;
    if out.is_null() {
        return Err(Code::InvalidParameter);
    }
    let room = touch::take(len)?;
    served(raw)?;
    let name = name_of(at.ok_or(Code::InvalidParameter)?.host)?;
    give(len, name.len() as c_ulong)?;
    if (room as usize) < name.len() {
        return Err(Code::ErrorResource);
    }
    // SAFETY: the program has this much room, as it says.
    unsafe { out.cast::<u8>().copy_from_nonoverlapping(name.as_ptr(), name.len()) };
    Ok(())
}

fn init(raw: VIP_PVOID) -> Outcome {
    handle::nic(raw)?.lock().name_service = true;
    Ok(())
}

fn shut_down(raw: VIP_PVOID) -> Outcome {
    served(raw)?.lock().name_service = false;
    Ok(())
}

/// The own address and those of connected peers, all taken to be one hop away.
fn discover(raw: VIP_PVOID, kind: c_ulong, out: VIP_PVOID) -> Outcome {
    let nic = handle::nic(raw)?;
    if out.is_null() {
        return Err(Code::InvalidParameter);
    }
    if kind != AUTODISCOVERY {
        return Err(Code::ErrorNotSupported);
    }
    let mut state = nic.lock();
    let mut hosts = vec![nic.address.to_vec()];
    for link in state.vis.values().filter_map(|entry| entry.link.as_ref()) {
        let peer = link.stream.as_ref().and_then(|stream| stream.peer_addr().ok());
        let host = peer.map(|at| address::bytes_of(at.ip().to_canonical()));
        if let Some(host) = host.filter(|host| !hosts.contains(host)) {
            hosts.push(host);
        }
    }
    let found = &mut state.discovered;
    found.addresses = hosts.iter().map(|host| vec![0; 1 + host.len() / 4].into()).collect();
    let places = found.addresses.iter_mut().map(|place| place.as_mut_ptr().cast());
    found.pointers = places
        .zip(&hosts)
        .map(|(place, host)| {
            touch::put_net_address(place, host, &[]);
            place as usize
        })
        .collect();
    let list = VIP_AUTODISCOVERY_LIST {
        hops: 1,
        addresses: found.pointers.as_mut_ptr().cast(),
        count: hosts.len() as c_ulong,
    };
    give(out.cast(), list)
}

entry! {
    /// `VipNSInit`
    fn VipNSInit(nic: VIP_PVOID, _info: VIP_PVOID) -> VipReturn {
        code(init(nic))
    }

    /// `VipNSShutdown`
    fn VipNSShutdown(nic: VIP_PVOID) -> VipReturn {
        code(shut_down(nic))
    }

    /// `VipNSGetHostByName`
    fn VipNSGetHostByName(
        nic: VIP_PVOID,
        name: *const c_char,
        out: *mut VIP_NET_ADDRESS,
        index: c_ulong,
    ) -> VipReturn {
        code(by_name(nic, name, out, index))
    }

    /// `VipNSGetHostByAddr`
    fn VipNSGetHostByAddr(
        nic: VIP_PVOID,
        address: *const VIP_NET_ADDRESS,
        name: *mut c_char,
        len: *mut c_ulong,
    ) -> VipReturn {
        code(by_address(nic, address, name, len))
    }

    /// `VipQuerySystemManagementInfo`
    fn VipQuerySystemManagementInfo(
        nic: VIP_PVOID,
        kind: c_ulong,
        out: VIP_PVOID,
    ) -> VipReturn {
        code(discover(nic, kind, out))
    }
}
