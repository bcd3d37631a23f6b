//! A TUN device: a network interface of the kernel that carries bare IP packets, whose other end is a
//! program's (Linux Documentation, networking/tuntap).

use std::fs;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::process::CommandExt as _;
use std::process::Command;

use super::interface::{Name, Setup, bring_up};
use super::namespace::{self, Wanted};
use super::tap::clone_device;
use crate::sys::{check, check_len};

/// A TUN device, which lives as long as this. Any thread may read and write.
#[derive(Debug)]
pub struct Tun {
    fd: OwnedFd,
    name: String,
    /// The user and the network namespace of the device, if it has its own.
    namespaces: Option<[OwnedFd; 2]>,
}

/// Why there is no TUN device.
#[derive(Debug, thiserror::Error)]
#[error("{what}: {source}")]
pub struct TunError {
    /// What failed.
    what: &'static str,
    /// How.
    source: io::Error,
}

impl TunError {
    /// The kernel's error.
    #[must_use]
    pub fn io(&self) -> &io::Error {
        &self.source
    }
}

fn at(what: &'static str) -> impl FnOnce(io::Error) -> TunError {
    move |source| TunError { what, source }
}

impl Tun {
    /// Makes a device in this network namespace and brings it up. Without a name the kernel chooses one. The
    /// kernel makes no IPv6 address of its own for it.
    ///
    /// # Errors
    ///
    /// What the kernel refuses: without CAP_NET_ADMIN, everything.
    pub fn open(name: &str, setup: &Setup) -> Result<Self, TunError> {
        let name = Name::new(name).map_err(at("the name of the interface"))?;
        let (fd, name) = attach(name).map_err(at("creating a TUN device"))?;
        let text = name.text();
        // Where there is no IPv6, there is no such file.
        let _ = fs::write(format!("/proc/sys/net/ipv6/conf/{text}/addr_gen_mode"), "1");
        bring_up(name, setup.mtu, &setup.addresses).map_err(at("setting up the TUN device"))?;
        Ok(Self { fd, name: text, namespaces: None })
    }

    /// Makes a device in a user namespace and a network namespace of its own, for which no privilege is
    /// needed, and brings it up. [`Self::enter`] takes programs there.
    ///
    /// # Errors
    ///
    /// What the kernel refuses: user namespaces, or TUN devices.
    pub fn in_own_namespace(name: &str, setup: &Setup) -> Result<Self, TunError> {
        let name = Name::new(name).map_err(at("the name of the interface"))?;
        let (mtu, addresses) = (setup.mtu, &setup.addresses[..]);
        let wanted = Wanted { name, mtu, addresses, attach: attach_without_addresses };
        let made = namespace::make(&wanted).map_err(|(what, source)| TunError { what, source })?;
        let namespaces = Some([made.user, made.net]);
        Ok(Self { fd: made.device, name: made.name.text(), namespaces })
    }

    /// The name of the interface.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Has a command run in the namespaces of the device, if it has its own, where it is root.
    pub fn enter(&self, command: &mut Command) {
        let Some([user, net]) = &self.namespaces else { return };
        let (user, net) = (user.as_raw_fd(), net.as_raw_fd());
        let enter = move || {
            // The user namespace first: it gives the right to enter the other one.
            for (fd, kind) in [(user, libc::CLONE_NEWUSER), (net, libc::CLONE_NEWNET)] {
                // SAFETY: takes integers.
                check(unsafe { libc::setns(fd, kind) })?;
            }
            Ok(())
        };
        // SAFETY: the closure only makes system calls, allowed between fork and exec. The descriptors are
        // open in the child if they are in this process when it is started.
        unsafe { command.pre_exec(enter) };
    }

    /// Waits for a packet that the kernel sends by the interface; its length. A packet that is longer than
    /// `buffer` is cut off.
    ///
    /// # Errors
    ///
    /// The device is gone; or a signal came.
    pub fn read(&self, buffer: &mut [u8]) -> io::Result<usize> {
        // SAFETY: the kernel writes at most `len` bytes to a live slice.
        check_len(unsafe {
            libc::read(self.fd.as_raw_fd(), buffer.as_mut_ptr().cast(), buffer.len())
        })
    }

    /// Gives the kernel a packet that comes by the interface.
    ///
    /// # Errors
    ///
    /// The kernel refuses it: it is no IP packet, there is no memory, or the interface is down or gone.
    pub fn write(&self, packet: &[u8]) -> io::Result<()> {
        // SAFETY: the kernel reads `len` bytes from a live slice.
        check_len(unsafe {
            libc::write(self.fd.as_raw_fd(), packet.as_ptr().cast(), packet.len())
        })?;
        Ok(())
    }
}

impl AsFd for Tun {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// Makes a TUN device; its name. Allocates nothing.
fn attach(name: Name) -> io::Result<(OwnedFd, Name)> {
    let fd = clone_device(0)?;
    let mut request = name.request();
    request.ifr_ifru.ifru_flags = (libc::IFF_TUN | libc::IFF_NO_PI) as libc::c_short;
    // SAFETY: TUNSETIFF takes one ifreq, a live variable, with a name and flags.
    check(unsafe { libc::ioctl(fd.as_raw_fd(), libc::TUNSETIFF, &raw mut request) })?;
    Ok((fd, Name::of(&request)))
}

/// The same in a fresh network namespace, whose interfaces get no IPv6 address but those that they are given.
fn attach_without_addresses(name: Name) -> io::Result<(OwnedFd, Name)> {
    // Where there is no IPv6, there is no such file.
    let _ = namespace::write(c"/proc/sys/net/ipv6/conf/default/addr_gen_mode", b"1");
    attach(name)
}
