//! What an engine opens when it begins: addresses, links and ports.

use std::io;
use std::net::IpAddr;
use std::sync::Arc;

use quipu_inet::stack::{self, Offload};
use quipu_inet::tcp::Secret;
use quipu_mem::Segment;
use quipu_nic::Gid;

use crate::address::{HostAddress, device_addresses, host_addresses};
use crate::config::{Config, PeerMemoryPolicy, SameHost, SharedPages};
use crate::error::OpenError;
use crate::link::segment::{self, DIRECTORY_BYTES, LIFE_BYTES, Writers};
use crate::link::{Identity, Links};
use crate::net::token::Token;
use crate::own::OwnAddresses;
use crate::packet::{self, LinkError, Occupant, PacketLink, Station};
use crate::port::Port;
use crate::qpip::{Qpip, QpipConfig};
use crate::sys::{self, Epoll};
use crate::tap::Adapter;

/// The most connections of QPIP.
const MAX_CONNECTIONS: u32 = 1 << 17;

/// The device's first address, and all that it has.
pub(super) fn choose_addresses(
    config: &Config,
) -> Result<(HostAddress, Arc<OwnAddresses>), OpenError> {
    let device = device_addresses(config.address.as_ref())?;
    let all = host_addresses().map_err(OpenError::Addresses)?;
    let own = OwnAddresses::new(&device, config.address.is_some(), &all);
    Ok((own.row(0).clone(), Arc::new(own)))
}

/// The port, which tells of changes if the system does.
pub(super) fn watch_port(address: &HostAddress, epoll: &Epoll) -> Option<Port> {
    let watched = Port::watch(address).and_then(|port| {
        epoll.add(port.fd(), libc::EPOLLIN, Token::Port.bits())?;
        Ok(port)
    });
    watched.inspect_err(|error| tracing::debug!(%error, "no events of the port")).ok()
}

/// Which memory peers of this host may map: none where they may not access it at all, or where somebody wants
/// to see what they do.
pub(super) fn shared_pages(config: &Config) -> SharedPages {
    if config.capture.is_some() || config.faults.is_some() || config.strict.is_some() {
        return SharedPages::Never;
    }
    match (config.same_host, config.peer_memory) {
        (SameHost::Never, _) | (_, PeerMemoryPolicy::Never) => SharedPages::Never,
        _ => config.shared_pages,
    }
}

/// The links; and the segment for the directory of regions, if peers may be let into the memory.
pub(super) fn open_links(
    config: &Config,
    own: &Arc<OwnAddresses>,
    epoll: &Arc<Epoll>,
) -> io::Result<(Links, Option<Segment>)> {
    let (mut usable, mut directory, mut shown) = (false, None, None);
    if config.same_host != SameHost::Never {
        // Without a directory this still tells whether shared memory works here.
        match segment::create(c"quipu-directory", DIRECTORY_BYTES + LIFE_BYTES, Writers::Creator) {
            Ok((fd, segment)) if config.peer_memory != PeerMemoryPolicy::Never => {
                (usable, directory, shown) = (true, Some(segment), Some(fd));
            }
            Ok(_) => usable = true,
            Err(error) => {
                tracing::warn!(%error, "no shared memory; peers on this host are reached by TCP");
            }
        }
    }
    let shares = shown.is_some() && shared_pages(config) != SharedPages::Never;
    let name = (Gid::from(own.row(0).ip), !own.is_restricted());
    let identity = Identity::new(name, shown, shares, config.arena_bytes, config.peer_memory)?;
    Ok((Links::new(identity, Arc::clone(own), Arc::clone(epoll), usable), directory))
}

/// Random octets as two words.
fn halves(bytes: [u8; 16]) -> [u64; 2] {
    let whole = u128::from_ne_bytes(bytes);
    [whole as u64, (whole >> 64) as u64]
}

/// Opens the packet link of QPIP, and attaches a stack with its features to the adapter.
pub(super) fn open_qpip(
    wanted: &QpipConfig,
    adapter: &mut Adapter,
    epoll: &Arc<Epoll>,
) -> Result<Box<Qpip>, OpenError> {
    if let Some(address) = wanted.kernels() {
        return Err(OpenError::KernelsAddress { address, link: wanted.link.to_string() });
    }
    wanted.check()?;
    let mut link = packet::open(&wanted.link)?;
    ask_for_addresses(wanted, link.as_mut())?;
    let features = link.features();
    let given = |(own, _): &(IpAddr, u8)| features.address.is_some_and(|(ip, _)| ip == *own);
    if let Some(&(address, len)) = wanted.addresses.iter().find(|own| given(own)) {
        let why = "the link gives it to the adapter already";
        return Err(OpenError::Unusable { address, len, why });
    }
    let on_network = |gateway: &IpAddr| wanted.reaches(*gateway, features);
    if let Some(&gateway) = wanted.gateways.iter().find(|gateway| !on_network(gateway)) {
        return Err(OpenError::Gateway { gateway });
    }
    let mut bytes = [0; 16];
    sys::random(&mut bytes).map_err(|error| OpenError::system("secrets of TCP", error))?;
    let attached = adapter.attach_inet(stack::Config {
        hardware: features.hardware,
        addresses: wanted.addresses.iter().copied().chain(features.address).collect(),
        gateways: wanted.gateways.clone(),
        mtu: features.mtu,
        offload: Offload { checksum: features.checksum, segment: features.segment },
        max_connections: MAX_CONNECTIONS,
        secret: Secret(halves(bytes)),
    });
    debug_assert!(attached.is_ok(), "a new adapter has no stack");
    adapter.probe_mut().link_opened(&wanted.link.to_string(), features.hardware.is_some());
    let mut name = wanted.link.clone();
    name.name_interface(&features.interface);
    let qpip = Qpip::new(link, name.to_string(), Arc::clone(epoll));
    qpip.map(Box::new).map_err(|error| OpenError::system("an epoll entry", error))
}

/// Makes sure that nobody on the link has an address of the adapter, as far as that can be found out at once.
fn ask_for_addresses(wanted: &QpipConfig, link: &mut dyn PacketLink) -> Result<(), OpenError> {
    let addresses: Vec<_> = wanted.addresses.iter().map(|(address, _)| *address).collect();
    let gone =
        |error| LinkError::new(&wanted.link, "checking whether the addresses are free", error);
    match packet::occupied(link, &addresses).map_err(gone)? {
        None => Ok(()),
        Some((address, Occupant::Kernel)) => {
            let interface = link.features().interface.clone();
            Err(OpenError::InterfacesAddress { address, interface })
        }
        Some((address, Occupant::Station(station))) => {
            let (station, link) = (Station(station), wanted.link.to_string());
            Err(OpenError::Occupied { address, station, link })
        }
    }
}
