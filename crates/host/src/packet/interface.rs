//! The kernel's side of a link: what a network interface is, and setting it up (netdevice(7)).

use std::io;
use std::net::IpAddr;
use std::os::fd::{AsRawFd, OwnedFd};

use super::netlink;
use crate::sys::{adopt, check};

/// The name of an interface, ended by a zero.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(transparent)]
pub(super) struct Name([u8; libc::IFNAMSIZ]);

impl Name {
    /// The loopback's.
    pub(super) const LOOPBACK: Self = {
        let mut bytes = [0; libc::IFNAMSIZ];
        (bytes[0], bytes[1]) = (b'l', b'o');
        Self(bytes)
    };

    /// `name`, if it is short enough.
    pub(super) fn new(name: &str) -> io::Result<Self> {
        let mut bytes = [0; libc::IFNAMSIZ];
        if name.len() >= bytes.len() || name.contains('\0') {
            return Err(io::Error::from_raw_os_error(libc::ENODEV));
        }
        bytes[..name.len()].copy_from_slice(name.as_bytes());
        Ok(Self(bytes))
    }

    /// As text.
    pub(super) fn text(&self) -> String {
        let end = self.0.iter().position(|byte| *byte == 0).unwrap_or(self.0.len());
        String::from_utf8_lossy(&self.0[..end]).into_owned()
    }

    /// A request about the interface, with everything else zero.
    pub(super) fn request(&self) -> libc::ifreq {
        // SAFETY: plain data, for which all zeroes is a valid value.
        let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
        for (to, from) in request.ifr_name.iter_mut().zip(self.0) {
            *to = from as libc::c_char;
        }
        request
    }

    /// The name in a request that the kernel has answered.
    pub(super) fn of(request: &libc::ifreq) -> Self {
        Self(request.ifr_name.map(|c| c as u8))
    }
}

/// A socket to ask about interfaces by. Allocates nothing.
pub(super) fn control() -> io::Result<OwnedFd> {
    // SAFETY: takes integers only.
    adopt(unsafe { libc::socket(libc::AF_INET, libc::SOCK_DGRAM | libc::SOCK_CLOEXEC, 0) })
}

/// Asks or tells the kernel about an interface.
pub(super) fn ask(
    control: &OwnedFd,
    what: libc::Ioctl,
    request: &mut libc::ifreq,
) -> io::Result<()> {
    // SAFETY: all requests that callers make take one ifreq, a live variable, whose members are plain data.
    check(unsafe { libc::ioctl(control.as_raw_fd(), what, std::ptr::from_mut(request)) })?;
    Ok(())
}

/// The index of an interface.
pub(super) fn index(control: &OwnedFd, name: Name) -> io::Result<u32> {
    let mut request = name.request();
    ask(control, libc::SIOCGIFINDEX as _, &mut request)?;
    // SAFETY: the kernel has filled in this member; any bits are a valid number.
    Ok(unsafe { request.ifr_ifru.ifru_ifindex } as u32)
}

/// Whether the interface with this index was deleted, or is in another namespace now. It may have another
/// name.
pub(super) fn is_gone(index: u32) -> bool {
    named(index).is_err_and(|error| error.raw_os_error() == Some(libc::ENODEV))
}

/// Whether the interface with this index is up.
pub(super) fn is_up(index: u32) -> bool {
    let flags = named(index).and_then(|(control, mut request)| flags(&control, &mut request));
    flags.is_ok_and(|flags| flags & libc::IFF_UP as libc::c_short != 0)
}

/// The flags of the interface that a request names.
fn flags(control: &OwnedFd, request: &mut libc::ifreq) -> io::Result<libc::c_short> {
    ask(control, libc::SIOCGIFFLAGS as _, request)?;
    // SAFETY: the kernel has filled in this member; any bits are valid flags.
    Ok(unsafe { request.ifr_ifru.ifru_flags })
}

/// A request with the name that the interface with this index has now, and a socket to ask with.
fn named(index: u32) -> io::Result<(OwnedFd, libc::ifreq)> {
    // SAFETY: plain data, for which all zeroes is a valid value.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    request.ifr_ifru.ifru_ifindex = index as libc::c_int;
    let control = control()?;
    ask(&control, libc::SIOCGIFNAME as _, &mut request)?;
    Ok((control, request))
}

/// The largest packet of the interface with this index, in octets.
pub(crate) fn mtu_by_index(index: u32) -> io::Result<u32> {
    let (control, request) = named(index)?;
    mtu(&control, Name::of(&request))
}

/// The largest packet of an interface, in octets.
pub(super) fn mtu(control: &OwnedFd, name: Name) -> io::Result<u32> {
    let mut request = name.request();
    ask(control, libc::SIOCGIFMTU as _, &mut request)?;
    // SAFETY: the kernel has filled in this member; any bits are a valid number.
    Ok(unsafe { request.ifr_ifru.ifru_mtu } as u32)
}

/// The station address of an Ethernet interface.
pub(super) fn station(control: &OwnedFd, name: Name) -> io::Result<[u8; 6]> {
    let mut request = name.request();
    ask(control, libc::SIOCGIFHWADDR as _, &mut request)?;
    // SAFETY: the kernel has filled in this member; any bits are a valid address.
    let address = unsafe { request.ifr_ifru.ifru_hwaddr };
    if address.sa_family != libc::ARPHRD_ETHER {
        return Err(io::Error::from_raw_os_error(libc::EAFNOSUPPORT));
    }
    Ok(std::array::from_fn(|i| address.sa_data[i] as u8))
}

/// How the kernel's side of an interface is to be.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Setup {
    /// The largest IP packet in octets; none: as it is. A TAP device has at most 65,521.
    pub mtu: Option<u32>,
    /// Addresses that the kernel is to have on it, with the lengths of their prefixes.
    pub addresses: Vec<(IpAddr, u8)>,
}

/// Sets up an interface of the kernel and brings it up. Addresses that it has already stay.
///
/// # Errors
///
/// What the kernel refuses: without CAP_NET_ADMIN in the network namespace, everything.
pub fn set_up(name: &str, setup: &Setup) -> io::Result<()> {
    let name = Name::new(name)?;
    bring_up(name, setup.mtu, &setup.addresses)
}

/// As [`set_up`]; allocates nothing.
pub(super) fn bring_up(name: Name, mtu: Option<u32>, addresses: &[(IpAddr, u8)]) -> io::Result<()> {
    let control = control()?;
    if let Some(mtu) = mtu {
        let mut request = name.request();
        request.ifr_ifru.ifru_mtu = mtu as libc::c_int;
        ask(&control, libc::SIOCSIFMTU as _, &mut request)?;
    }
    let mut request = name.request();
    let flags = flags(&control, &mut request)?;
    request.ifr_ifru.ifru_flags = flags | libc::IFF_UP as libc::c_short;
    ask(&control, libc::SIOCSIFFLAGS as _, &mut request)?;
    let index = index(&control, name)?;
    addresses.iter().try_for_each(|(ip, prefix)| netlink::add_address(index, *ip, *prefix))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_loopback_is_there_and_others_are_not() {
        let control = control().unwrap();
        let lo = Name::new("lo").unwrap();
        assert_eq!(lo.text(), "lo");
        assert_eq!(index(&control, lo).unwrap(), 1);
        assert!(mtu(&control, lo).unwrap() >= 1280);
        let none = Name::new("no_such_one").unwrap();
        assert_eq!(index(&control, none).unwrap_err().raw_os_error(), Some(libc::ENODEV));
        assert!(Name::new("sixteen_letters_").is_err());
    }
}
