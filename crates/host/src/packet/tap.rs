//! A TAP device: an Ethernet interface of the kernel whose other end is ours (Linux Documentation,
//! networking/tuntap).
//!
//! Each frame has the header of `vnet` before it, so that one frame can be a train of TCP segments with a
//! checksum that nobody has computed yet, in both directions. A frame is one system call, so it is made
//! as soon as a frame is sent, while the frame is in the cache.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use super::aligned::Aligned;
use super::interface::{Name, control, mtu};
use super::queue::Queue;
use super::vnet::{self, LONGEST, TooLong};
use super::{EthernetEnd, Features, Frame, LinkError, LinkSpec, MAX_SEGMENT, Outgoing, PacketLink};
use super::{Refusal, split, station, tag};
use crate::sys::{adopt, check, check_len, straight};

/// Frames that wait while the kernel has no room.
const SLOTS: usize = 32;

/// What the kernel may leave to us: checksums, TCP segments, and datagrams of one train.
const OFFLOAD: libc::c_uint =
    libc::TUN_F_CSUM | libc::TUN_F_TSO4 | libc::TUN_F_TSO6 | libc::TUN_F_TSO_ECN;
/// Since Linux 6.2.
const OFFLOAD_UDP: libc::c_uint = libc::TUN_F_USO4 | libc::TUN_F_USO6;

/// The bit of the right to make interfaces (capabilities(7)).
const CAP_NET_ADMIN: u32 = 12;

/// A link over a TAP device.
pub(super) struct Tap {
    fd: OwnedFd,
    features: Features,
    waiting: Queue<usize>,
    /// The kernel has no memory for a frame.
    congested: bool,
    /// The device was down when it was last given a frame, and none has come since.
    down: bool,
    inbox: Aligned,
    too_long: TooLong,
    /// Trains of which nothing could be made.
    torn: u64,
    /// The namespaces of the device, if they are ours to keep.
    _namespaces: Option<[OwnedFd; 2]>,
}

impl Tap {
    /// Attaches to the TAP device `name`, or makes one that lives as long as the link.
    pub(super) fn open(spec: &LinkSpec, name: &str, end: EthernetEnd) -> Result<Self, LinkError> {
        let name = Name::new(name).map_err(LinkError::at(spec, "the name of the interface"))?;
        let (fd, name) =
            attach(name).map_err(LinkError::at(spec, "attaching to the TAP device"))?;
        control()
            .and_then(|control| Self::new(fd, name, mtu(&control, name)?, end))
            .map_err(LinkError::at(spec, "setting up the TAP device"))
    }

    /// A link over a TAP device that was attached to.
    pub(super) fn new(fd: OwnedFd, name: Name, mtu: u32, end: EthernetEnd) -> io::Result<Self> {
        let features = Features {
            mtu,
            hardware: Some(station(end.station)?),
            checksum: true,
            segment: MAX_SEGMENT,
            address: None,
            interface: name.text(),
            enter: Vec::new(),
            vlan: end.vlan,
        };
        Ok(Self {
            fd,
            features,
            waiting: Queue::new(SLOTS, LONGEST),
            congested: false,
            down: false,
            // One more octet: a frame that fills it was cut off.
            inbox: Aligned::new(LONGEST + 1),
            too_long: TooLong::default(),
            torn: 0,
            _namespaces: None,
        })
    }

    /// The same over a device in namespaces that live as long as the link, or a program in them.
    pub(super) fn in_namespace(mut self, user: OwnedFd, net: OwnedFd) -> Self {
        let path = |fd: &OwnedFd| format!("/proc/{}/fd/{}", std::process::id(), fd.as_raw_fd());
        self.features.enter = vec![
            "nsenter".to_owned(),
            "--preserve-credentials".to_owned(),
            format!("--user={}", path(&user)),
            format!("--net={}", path(&net)),
        ];
        self._namespaces = Some([user, net]);
        self
    }

    /// Reads a frame with its header; `None` if there is none.
    fn read(&mut self) -> io::Result<Option<usize>> {
        loop {
            let (into, most) = (self.inbox.as_mut_ptr(), self.inbox.len());
            // SAFETY: the kernel writes at most `most` bytes, the length of the inbox.
            match check_len(unsafe { straight!(SYS_read, self.fd, into, most) }) {
                Ok(len) => return Ok(Some(len)),
                Err(error) => match Refusal::of(&error) {
                    Refusal::Interrupted => {}
                    Refusal::Full | Refusal::Congested | Refusal::Frame => return Ok(None),
                    Refusal::Gone => return Err(error),
                },
            }
        }
    }

    /// Writes the frames that wait.
    fn drain(&mut self) -> io::Result<()> {
        self.congested = false;
        while let Some((slot, len)) = self.waiting.get(0) {
            // SAFETY: the kernel reads `len` bytes of a slot; slices check that it has them.
            let written =
                check_len(unsafe { straight!(SYS_write, self.fd, slot[..len].as_ptr(), len) });
            self.down = false;
            if let Err(error) = written {
                self.down = error.raw_os_error() == Some(libc::EIO);
                match Refusal::of(&error) {
                    Refusal::Interrupted => continue,
                    Refusal::Full => break,
                    Refusal::Congested => {
                        self.congested = true;
                        break;
                    }
                    Refusal::Frame => tracing::debug!(%error, "the TAP device lost a frame"),
                    Refusal::Gone => return Err(error),
                }
            }
            self.waiting.remove(1);
        }
        Ok(())
    }
}

impl PacketLink for Tap {
    fn features(&self) -> &Features {
        &self.features
    }

    fn descriptor(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    fn receive(&mut self, limit: usize, each: &mut dyn FnMut(&Frame<'_>)) -> io::Result<usize> {
        let mut count = 0;
        while count < limit {
            let Some(len) = self.read()? else { break };
            self.down = false;
            if len > LONGEST {
                self.too_long.lose();
                count += 1;
                continue;
            }
            if let Some((header, frame)) = self.inbox[..len].split_first_chunk_mut() {
                if self.features.vlan.is_some_and(|vlan| !tag::accept(frame, vlan)) {
                    count += 1;
                    continue;
                }
                let handed = split::hand_over(vnet::Header::read(header), frame, each);
                self.torn += u64::from(handed == 0);
                count += handed.max(1);
            }
        }
        Ok(count)
    }

    fn slot(&mut self) -> Option<&mut [u8]> {
        vnet::free(&mut self.waiting, self.features.vlan)
    }

    fn send(&mut self, frame: Outgoing) {
        let others_wait = !self.waiting.is_empty();
        vnet::push(&mut self.waiting, &frame, self.features.vlan);
        if !others_wait {
            // If the device is gone, the frame stays, and whoever flushes is told.
            let _ = self.drain();
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        self.drain()
    }

    fn wants_writable(&self) -> bool {
        !self.waiting.is_empty() && !self.congested
    }

    fn is_congested(&self) -> bool {
        self.congested
    }

    fn is_down(&self) -> bool {
        self.down
    }

    fn lost(&mut self) -> u64 {
        self.too_long.lost + self.torn
    }
}

/// A request for a TAP device, to one like ours.
fn tap_request(name: Name) -> libc::ifreq {
    let mut request = name.request();
    let flags = libc::IFF_TAP | libc::IFF_NO_PI | libc::IFF_VNET_HDR;
    request.ifr_ifru.ifru_flags = flags as libc::c_short;
    request
}

/// Opens the device for making TAP and TUN devices, which says nothing about rights yet.
pub(super) fn clone_device(flags: libc::c_int) -> io::Result<OwnedFd> {
    let flags = libc::O_RDWR | libc::O_CLOEXEC | flags;
    // SAFETY: the path is a zero-terminated string.
    adopt(unsafe { libc::open(c"/dev/net/tun".as_ptr(), flags) })
}

/// Whether TAP devices can be made here.
pub(super) fn probe() -> io::Result<()> {
    clone_device(libc::O_NONBLOCK)?;
    let status = std::fs::read_to_string("/proc/self/status")?;
    let mask = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    let mask = mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0);
    let allowed = mask & 1 << CAP_NET_ADMIN != 0;
    if allowed { Ok(()) } else { Err(io::Error::from_raw_os_error(libc::EPERM)) }
}

/// Tells the kernel something about a TAP device.
fn tell(fd: &OwnedFd, what: libc::Ioctl, value: libc::c_ulong) -> io::Result<()> {
    // SAFETY: callers name requests whose argument is a number.
    check(unsafe { libc::ioctl(fd.as_raw_fd(), what, value) })?;
    Ok(())
}

/// Attaches to a TAP device, which is made if there is none; its name. Allocates nothing.
pub(super) fn attach(name: Name) -> io::Result<(OwnedFd, Name)> {
    let fd = clone_device(libc::O_NONBLOCK)?;
    let mut request = tap_request(name);
    // SAFETY: TUNSETIFF takes one ifreq, a live variable, with a name and flags.
    check(unsafe { libc::ioctl(fd.as_raw_fd(), libc::TUNSETIFF, &raw mut request) })?;
    let header = vnet::LEN as libc::c_int;
    // SAFETY: TUNSETVNETHDRSZ reads an integer from a live variable.
    check(unsafe { libc::ioctl(fd.as_raw_fd(), libc::TUNSETVNETHDRSZ, &raw const header) })?;
    tell(&fd, libc::TUNSETOFFLOAD, (OFFLOAD | OFFLOAD_UDP).into())
        .or_else(|_| tell(&fd, libc::TUNSETOFFLOAD, OFFLOAD.into()))?;
    Ok((fd, Name::of(&request)))
}

/// Makes a TAP device that stays, and that `owner` may attach to without further rights; its name. It is
/// to be set up by [`set_up`](super::interface::set_up).
///
/// # Errors
///
/// What the kernel refuses: without CAP_NET_ADMIN, everything.
pub fn keep(name: &str, owner: u32) -> io::Result<String> {
    let (fd, name) = attach(Name::new(name)?)?;
    tell(&fd, libc::TUNSETOWNER, owner.into())?;
    tell(&fd, libc::TUNSETPERSIST, 1)?;
    Ok(name.text())
}

/// Removes a TAP device that was kept.
///
/// # Errors
///
/// There is none, it is in use, or this user may not.
pub fn remove(name: &str) -> io::Result<()> {
    let name = Name::new(name)?;
    // Attaching would make one otherwise.
    super::interface::index(&control()?, name)?;
    let (fd, _) = attach(name)?;
    tell(&fd, libc::TUNSETPERSIST, 0)
}
