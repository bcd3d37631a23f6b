//! An XDP socket on one queue of a network interface: frames for our station leave the kernel's path at the
//! driver.
//!
//! Everything else goes on to the kernel, group frames too, which it needs as much as we do: those, and
//! frames for us on other queues, come by a packet socket ([`af_packet`](super::af_packet)), which also has
//! the interface receive for our station.

mod program;
mod rings;

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use libc::{c_int, c_void};

use super::af_packet::PacketSocket;
use super::interface::{self, Name, control};
use super::{
    ETHERNET, EthernetEnd, Features, Frame, LinkError, LinkSpec, Outgoing, PacketLink, Refusal,
    Station,
};
use crate::sys::{Epoll, adopt_socket, check, check_len, read_option, set_option_bytes};
use rings::{Frames, Ring};

/// Frames that come in and frames that go out, each; also the length of every ring.
const COUNT: u32 = 512;
/// Room for a frame.
const SLOT: usize = 4096;
/// What the kernel keeps free before a frame that comes in (XDP_PACKET_HEADROOM).
const HEADROOM: usize = 256;
/// The largest IP packet that fits.
const MAX_MTU: u32 = (SLOT - HEADROOM - ETHERNET) as u32;

/// How long another socket may take to leave a queue.
const PATIENCE: Duration = Duration::from_millis(500);
/// So many times in a row that nothing has come, it is asked whether the interface is still there.
const IDLE: u32 = 64;

/// Whether XDP sockets can be had here at all.
pub(super) fn probe() -> io::Result<()> {
    // SAFETY: takes integers only.
    adopt_socket(unsafe { libc::socket(libc::AF_XDP, libc::SOCK_RAW | libc::SOCK_CLOEXEC, 0) })?;
    program::make_map(0).map(drop)
}

/// A link over an XDP socket.
pub(super) struct XdpSocket {
    fd: OwnedFd,
    features: Features,
    frames: Frames,
    /// Frames for the kernel to fill, and those that it has filled.
    fill: Ring<u64>,
    filled: Ring<libc::xdp_desc>,
    /// Frames to be sent, and those that were.
    send: Ring<libc::xdp_desc>,
    sent: Ring<u64>,
    /// Frames to write to.
    free: Vec<u64>,
    /// The kernel has more to send and no room.
    blocked: bool,
    /// The interface is down, and is given no more to send.
    down: bool,
    /// How many times nothing has come.
    idle: u32,
    /// Everything that goes on to the kernel.
    socket: PacketSocket,
    /// Readable when either socket is.
    ready: Epoll,
    _program: OwnedFd,
    _link: OwnedFd,
}

impl XdpSocket {
    pub(super) fn open(
        spec: &LinkSpec,
        name: &str,
        queue: u32,
        wanted: Option<Station>,
    ) -> Result<Self, LinkError> {
        let at = |what| LinkError::at(spec, what);
        let end = EthernetEnd { station: wanted, vlan: None };
        let socket = PacketSocket::open(spec, name, end)?;
        let station = socket.features().hardware.unwrap_or_default();
        let map = program::make_map(queue).map_err(at("creating a map of XDP sockets"))?;
        let program = program::load(station, &map).map_err(at("loading the XDP program"))?;
        let index = Name::new(name)
            .and_then(|name| interface::index(&control()?, name))
            .map_err(at("reading the interface's settings"))?;
        // SAFETY: takes integers only.
        let fd = unsafe { libc::socket(libc::AF_XDP, libc::SOCK_RAW | libc::SOCK_CLOEXEC, 0) };
        let fd = adopt_socket(fd).map_err(at("creating an XDP socket"))?;
        let frames = Frames::new(2 * COUNT as usize, SLOT).map_err(at("allocating frames"))?;
        let [fill, sent] = register(&fd, &frames).map_err(at("sharing memory with the kernel"))?;
        let (filled, send) = rings(&fd).map_err(at("sharing memory with the kernel"))?;
        bind(&fd, index, queue).map_err(at("binding the XDP socket to the queue"))?;
        program::set(&map, queue, &fd).map_err(at("binding the XDP socket to the queue"))?;
        let link = program::attach(&program, index)
            .map_err(at("attaching the XDP program to the interface"))?;
        let ready = both(&fd, &socket).map_err(at("creating an epoll descriptor"))?;
        let mut this = Self {
            features: features(socket.features()),
            fd,
            frames,
            fill,
            filled,
            send,
            sent,
            free: (COUNT..2 * COUNT).map(|number| u64::from(number) * SLOT as u64).collect(),
            blocked: false,
            down: false,
            idle: 0,
            socket,
            ready,
            _program: program,
            _link: link,
        };
        (0..COUNT).for_each(|number| this.give_back(u64::from(number) * SLOT as u64));
        Ok(this)
    }

    /// Gives a frame to the kernel to fill. The ring has room for all of them.
    fn give_back(&mut self, offset: u64) {
        let base = self.frames.base(offset);
        self.fill.push(base);
    }

    /// Has the kernel look at its rings; `send` says at which.
    fn wake(&self, send: bool) -> io::Result<()> {
        let (fd, nothing) = (self.fd.as_raw_fd(), std::ptr::null_mut::<c_void>());
        let none = std::ptr::null_mut();
        // SAFETY: no bytes are read or written, and there is no address.
        let outcome = unsafe {
            match send {
                true => libc::sendto(fd, nothing, 0, libc::MSG_DONTWAIT, none, 0),
                false => libc::recvfrom(fd, nothing, 0, libc::MSG_DONTWAIT, none, none.cast()),
            }
        };
        check_len(outcome).map(drop)
    }

    /// Has the kernel send what it was given, and takes back what it has sent.
    fn drain(&mut self) -> io::Result<()> {
        let outstanding = |this: &Self| this.free.len() < COUNT as usize;
        self.blocked = false;
        while (outstanding(self) || self.down) && self.send.needs_wakeup() {
            let taken = self.send.taken();
            self.down = false;
            let Err(error) = self.wake(true) else { break };
            match error.raw_os_error() {
                Some(libc::EINTR) => {}
                // It takes some at a time.
                Some(libc::EAGAIN | libc::EBUSY | libc::ENOBUFS) => {
                    if self.send.taken() == taken {
                        self.blocked = true;
                        break;
                    }
                }
                Some(libc::ENXIO | libc::EBADF) => return Err(error),
                // What was given cannot be taken back; what follows is lost, as if the cable were out.
                Some(libc::ENETDOWN) => {
                    self.down = true;
                    break;
                }
                _ => break,
            }
        }
        while let Some(offset) = self.sent.pop() {
            let base = self.frames.base(offset);
            self.free.push(base);
        }
        self.blocked |= self.free.is_empty();
        Ok(())
    }
}

impl PacketLink for XdpSocket {
    fn features(&self) -> &Features {
        &self.features
    }

    fn descriptor(&self) -> BorrowedFd<'_> {
        self.ready.fd().as_fd()
    }

    fn receive(&mut self, limit: usize, each: &mut dyn FnMut(&Frame<'_>)) -> io::Result<usize> {
        let mut count = 0;
        while count < limit {
            let Some(filled) = self.filled.pop() else { break };
            // SAFETY: the kernel has filled this frame, and gets it back below.
            let bytes = unsafe { self.frames.bytes(filled.addr, filled.len as usize) };
            if let Some(bytes) = bytes {
                each(&Frame { bytes, checked: false });
            }
            self.give_back(filled.addr);
            count += 1;
        }
        if count < limit {
            count += self.socket.receive(limit - count, each)?;
        }
        self.idle = if count > 0 { 0 } else { self.idle + 1 };
        if self.fill.needs_wakeup() || self.idle >= IDLE {
            self.idle = 0;
            // That it cannot look now is no error; that there is nothing to look at any more is one.
            self.wake(false).or_else(|error| match Refusal::of(&error) {
                Refusal::Gone => Err(error),
                _ => Ok(()),
            })?;
        }
        Ok(count)
    }

    fn slot(&mut self) -> Option<&mut [u8]> {
        if self.free.is_empty() {
            // If the interface is gone, whoever flushes is told.
            let _ = self.drain();
        }
        let offset = *self.free.last()?;
        // SAFETY: the frame is on the list of those that the kernel does not have.
        unsafe { self.frames.bytes(offset, SLOT) }
    }

    fn send(&mut self, frame: Outgoing) {
        if self.down {
            return;
        }
        let Some(addr) = self.free.pop() else { return };
        let len = frame.len.min(SLOT) as u32;
        // There is room for every frame.
        self.send.push(libc::xdp_desc { addr, len, options: 0 });
    }

    fn flush(&mut self) -> io::Result<()> {
        self.drain()
    }

    fn wants_writable(&self) -> bool {
        // The socket is writable as long as half of the ring is free, whether the kernel sends or not.
        false
    }

    fn is_congested(&self) -> bool {
        self.blocked
    }

    fn is_down(&self) -> bool {
        self.socket.is_down()
    }

    fn lost(&mut self) -> u64 {
        // struct xdp_statistics: frames that met no room at all, and those that met a full ring, are its
        // first and its fourth number. Before Linux 5.9 it has three.
        let mut told = [[0; 8]; 6];
        let told_bytes = told.as_flattened_mut();
        let read = read_option(&self.fd, libc::SOL_XDP, libc::XDP_STATISTICS, told_bytes);
        let own = read.map_or(0, |_| u64::from_ne_bytes(told[0]) + u64::from_ne_bytes(told[3]));
        own + self.socket.lost()
    }
}

/// What the link is, of which the packet socket says a part.
fn features(of: &Features) -> Features {
    Features { mtu: of.mtu.min(MAX_MTU), checksum: false, segment: 0, ..of.clone() }
}

/// Gives the frames to a socket; the rings for frames to fill and frames that were sent.
fn register(fd: &OwnedFd, frames: &Frames) -> io::Result<[Ring<u64>; 2]> {
    let (start, len) = frames.area();
    // struct xdp_umem_reg: start, length, size of a frame, headroom, flags.
    let mut request = [0; 32];
    request[..8].copy_from_slice(&start.to_ne_bytes());
    request[8..16].copy_from_slice(&len.to_ne_bytes());
    request[16..20].copy_from_slice(&(SLOT as u32).to_ne_bytes());
    set_option_bytes(fd, libc::SOL_XDP, libc::XDP_UMEM_REG, &request)?;
    let count = COUNT.to_ne_bytes();
    for ring in [libc::XDP_UMEM_FILL_RING, libc::XDP_UMEM_COMPLETION_RING] {
        set_option_bytes(fd, libc::SOL_XDP, ring, &count)?;
    }
    let offsets = offsets(fd)?;
    Ok([
        Ring::map(fd, offsets.fr, COUNT, libc::XDP_UMEM_PGOFF_FILL_RING)?,
        Ring::map(fd, offsets.cr, COUNT, libc::XDP_UMEM_PGOFF_COMPLETION_RING)?,
    ])
}

/// The rings of frames that were filled, and of frames to be sent.
fn rings(fd: &OwnedFd) -> io::Result<(Ring<libc::xdp_desc>, Ring<libc::xdp_desc>)> {
    let count = COUNT.to_ne_bytes();
    for ring in [libc::XDP_RX_RING, libc::XDP_TX_RING] {
        set_option_bytes(fd, libc::SOL_XDP, ring, &count)?;
    }
    let offsets = offsets(fd)?;
    Ok((
        Ring::map(fd, offsets.rx, COUNT, libc::XDP_PGOFF_RX_RING as u64)?,
        Ring::map(fd, offsets.tx, COUNT, libc::XDP_PGOFF_TX_RING as u64)?,
    ))
}

fn offsets(fd: &OwnedFd) -> io::Result<libc::xdp_mmap_offsets> {
    let mut offsets = MaybeUninit::<libc::xdp_mmap_offsets>::zeroed();
    let size = size_of::<libc::xdp_mmap_offsets>() as libc::socklen_t;
    let mut len = size;
    let option = libc::XDP_MMAP_OFFSETS;
    // SAFETY: the kernel writes at most `len` bytes, the size of the variable.
    check(unsafe {
        let into = offsets.as_mut_ptr().cast();
        libc::getsockopt(fd.as_raw_fd(), libc::SOL_XDP, option, into, &raw mut len)
    })?;
    if len != size {
        // Before Linux 5.4 they had no flags.
        return Err(io::Error::from_raw_os_error(libc::EOPNOTSUPP));
    }
    // SAFETY: plain numbers, for which all bytes are valid.
    Ok(unsafe { offsets.assume_init() })
}

/// Binds a socket to a queue. A socket that was closed leaves its queue a little later, which is waited for.
fn bind(fd: &OwnedFd, interface: u32, queue: u32) -> io::Result<()> {
    let deadline = Instant::now() + PATIENCE;
    loop {
        match try_bind(fd, interface, queue) {
            Err(error)
                if error.raw_os_error() == Some(libc::EBUSY) && Instant::now() < deadline =>
            {
                std::thread::sleep(PATIENCE / 50);
            }
            outcome => return outcome,
        }
    }
}

/// Frames are copied unless the driver can do without.
fn try_bind(fd: &OwnedFd, interface: u32, queue: u32) -> io::Result<()> {
    let address = libc::sockaddr_xdp {
        sxdp_family: libc::AF_XDP as u16,
        sxdp_flags: libc::XDP_USE_NEED_WAKEUP,
        sxdp_ifindex: interface,
        sxdp_queue_id: queue,
        sxdp_shared_umem_fd: 0,
    };
    let len = size_of::<libc::sockaddr_xdp>() as libc::socklen_t;
    // SAFETY: the pointer and the length describe a live variable.
    let done: c_int = unsafe { libc::bind(fd.as_raw_fd(), (&raw const address).cast(), len) };
    check(done).map(drop)
}

/// What is readable when either socket is.
fn both(fd: &OwnedFd, socket: &PacketSocket) -> io::Result<Epoll> {
    let ready = Epoll::new()?;
    ready.add(fd, libc::EPOLLIN, 0)?;
    ready.add(socket.fd(), libc::EPOLLIN, 1)?;
    Ok(ready)
}
