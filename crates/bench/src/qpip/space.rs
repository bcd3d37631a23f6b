//! Two network namespaces and what is between them: TAP devices in the first, and a veth pair from the first
//! to the second.

use std::fs::File;
use std::net::Ipv4Addr;
use std::os::fd::AsRawFd;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail, ensure};

use super::model::{EndKind, Link};
use crate::pair::Launcher;
use crate::sys;

/// The TAP devices, with offloads and without, and the two interfaces of the veth pair.
const TAP: &str = "qp0";
const PLAIN_TAP: &str = "plain0";
const VETH: [&str; 2] = ["near", "far"];

/// The namespaces, and what has been made in them.
pub(super) struct Space {
    /// That of this process, and that of the second end.
    namespaces: [File; 2],
    /// Links that were made, each with its MTU.
    made: Vec<(Link, u32)>,
    /// How an adapter in a process of its own is started.
    pub(super) adapter: Launcher,
}

/// Where an end is.
pub(super) struct Place<'a> {
    /// To be entered by its thread.
    pub(super) namespace: &'a File,
    pub(super) address: Ipv4Addr,
    /// The link that a queue pair opens.
    pub(super) spec: String,
}

impl Space {
    /// Makes the second namespace. The process is to be in one of its own already.
    ///
    /// # Errors
    ///
    /// The right to that is missing.
    pub(super) fn new(adapter: Launcher) -> Result<Self> {
        settle()?;
        let near = File::open("/proc/self/ns/net").context("this network namespace")?;
        let far = in_thread(|| {
            sys::new_network_namespace().context("making a network namespace")?;
            settle()?;
            File::open("/proc/thread-self/ns/net").context("the new network namespace")
        })?;
        Ok(Self { namespaces: [near, far], made: Vec::new(), adapter })
    }

    /// Sees to it that the link is there, with that MTU.
    ///
    /// # Errors
    ///
    /// The kernel makes no such devices here.
    pub(super) fn prepare(&mut self, link: Link, mtu: u32) -> Result<()> {
        let known = self.made.iter_mut().find(|(made, _)| *made == link);
        if matches!(known, Some((_, is)) if *is == mtu) {
            return Ok(());
        }
        if let Some(known) = known {
            known.1 = mtu;
        } else {
            self.make(link)?;
            self.made.push((link, mtu));
        }
        match link {
            Link::Tap | Link::PlainTap => ip(&format!("link set {} mtu {mtu}", tap(link))),
            Link::Veth => {
                ip(&format!("link set {} mtu {mtu}", VETH[0]))?;
                self.in_far(|| ip(&format!("link set {} mtu {mtu}", VETH[1])))
            }
        }
    }

    fn make(&self, link: Link) -> Result<()> {
        let address = |side| format!("address add {}/24 dev", kernel(link, side));
        match link {
            Link::Tap | Link::PlainTap => {
                let (tap, offloads) = (tap(link), if link == Link::Tap { " vnet_hdr" } else { "" });
                ip(&format!("tuntap add dev {tap} mode tap{offloads}"))?;
                ip(&format!("{} {tap}", address(0)))?;
                ip(&format!("link set {tap} up"))
            }
            Link::Veth => {
                let far =
                    format!("/proc/{}/fd/{}", std::process::id(), self.namespaces[1].as_raw_fd());
                ip(&format!("link add {} type veth peer name {} netns {far}", VETH[0], VETH[1]))?;
                let set_up = |side: usize| {
                    ip(&format!("{} {}", address(side), VETH[side]))?;
                    ip(&format!("link set {} up", VETH[side]))
                };
                set_up(0)?;
                self.in_far(|| set_up(1))
            }
        }
    }

    /// Runs `work` in the second namespace.
    ///
    /// # Errors
    ///
    /// Those of `work`; the namespace is gone.
    pub(super) fn in_far<T: Send>(&self, work: impl FnOnce() -> Result<T> + Send) -> Result<T> {
        in_thread(|| {
            sys::enter_network_namespace(&self.namespaces[1]).context("entering a namespace")?;
            work()
        })
    }

    /// Where an end is. On the TAP device both are in one namespace: its other end is the kernel's.
    pub(super) fn place(&self, link: Link, side: usize, kind: EndKind) -> Place<'_> {
        let own = Ipv4Addr::from(u32::from(kernel(link, side)) + 10);
        let station = format!("station=02:00:00:00:00:{:02x}", own.octets()[3]);
        let (namespace, spec) = match link {
            Link::Tap | Link::PlainTap => (0, format!("tap:{},{station}", tap(link))),
            Link::Veth => {
                let way = if kind == EndKind::XdpQueuePair { "xdp" } else { "packet" };
                (side, format!("{way}:{},{station}", VETH[side]))
            }
        };
        let address = if kind.is_socket() { kernel(link, side) } else { own };
        Place { namespace: &self.namespaces[namespace], address, spec }
    }
}

/// The kernel's address at an end of a link; a queue pair there has the tenth after it.
fn kernel(link: Link, side: usize) -> Ipv4Addr {
    match link {
        Link::Tap => Ipv4Addr::new(10, 9, 1, 1),
        Link::PlainTap => Ipv4Addr::new(10, 9, 3, 1),
        Link::Veth => Ipv4Addr::new(10, 9, 2, 1 + side as u8),
    }
}

/// The name of a TAP device.
pub(super) fn tap(link: Link) -> &'static str {
    if link == Link::PlainTap { PLAIN_TAP } else { TAP }
}

/// The name of the interface of the veth pair at an end.
#[cfg(feature = "smoltcp")]
pub(super) fn veth(side: usize) -> &'static str {
    VETH[side]
}

/// Prepares this thread's namespace for sockets.
///
/// # Errors
///
/// The right to that is missing, or `ip` is.
pub(crate) fn settle() -> Result<()> {
    // BBR, the default of some systems, is several times slower here, and who leaves it keeps its pacing.
    // The kernel may leave CUBIC as a default to the first namespace.
    let choose = |name| std::fs::write("/proc/sys/net/ipv4/tcp_congestion_control", name);
    choose("cubic").or_else(|_| choose("reno")).context("choosing the congestion control")?;
    ip("link set lo up")
}

/// Waits until the kernel sends on a TAP device that somebody has opened, which it looks for now and then.
///
/// # Errors
///
/// It does not for seconds.
pub(super) fn wait_until_up(link: Link) -> Result<()> {
    for _ in 0..400 {
        let shown = Command::new("ip").args(["-o", "link", "show", tap(link)]).output()?;
        if String::from_utf8_lossy(&shown.stdout).contains(" state UP ") {
            return Ok(());
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    bail!("{} does not come up", tap(link))
}

/// Runs `work` in a thread whose namespace it may change.
fn in_thread<T: Send>(work: impl FnOnce() -> Result<T> + Send) -> Result<T> {
    std::thread::scope(|scope| scope.spawn(work).join())
        .map_err(|_| anyhow!("a thread has panicked"))?
}

/// Runs `ip` with these arguments.
///
/// # Errors
///
/// There is no such program, or it fails.
pub(super) fn ip(arguments: &str) -> Result<()> {
    let output = Command::new("ip").args(arguments.split(' ')).output().context("starting `ip`")?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "ip {arguments}: {}", said.trim());
    Ok(())
}
