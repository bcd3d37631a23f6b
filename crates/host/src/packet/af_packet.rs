//! A packet socket on a network interface (packet(7)): the adapter is one more station on its Ethernet.
//!
//! Our station address is another than the interface's, so that the kernel takes no frame for its own that is
//! ours, and answers none; a filter keeps all frames away that are not for us. The header of `vnet` before
//! each frame says what the sender has left to do: frames from the other end of a veth pair come as trains
//! of segments and without checksums. Frames come by a [`ring`](super::ring), and only trains by system
//! calls.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use super::aligned::Aligned;
use super::interface::{self, Name, control};
use super::messages::{BATCH, Messages, Piece};
use super::patience::Patience;
use super::queue::Queue;
use super::ring::{Next, Ring};
use super::vnet::{self, LONGEST, SLOT, TooLong};
use super::{ETHERNET, EthernetEnd, Features, Frame, LinkError, LinkSpec, MAX_SEGMENT, Outgoing};
use super::{PacketLink, Refusal, Station, split, station, tag};
use crate::sys::{adopt_socket, check, read_option, set_option, set_option_bytes, socket_error};

/// Frames that wait for the kernel.
const SLOTS: usize = 32;
/// Long frames that one system call brings.
const RECEIVED: usize = 16;
/// So many times in a row that nothing has come, it is asked whether the socket has failed.
const IDLE: u32 = 256;
/// What the socket's buffer for sending is to hold, if the system allows it.
const SEND_BUFFER: libc::c_int = 4 << 20;
/// The same for receiving: trains of segments wait there, of 64 KiB each. With 4 MiB eight streams of kernels
/// had to send thousands of segments a second again, with so much some tens. It is taken as it is used.
const RECEIVE_BUFFER: libc::c_int = 16 << 20;

/// A link over a packet socket.
pub(super) struct PacketSocket {
    fd: OwnedFd,
    /// The number of the interface.
    index: u32,
    /// It was down when the kernel last said something of it.
    down: bool,
    features: Features,
    waiting: Queue<usize>,
    /// The queue of the interface is full.
    congested: bool,
    /// With the first frame that waits for it.
    patience: Patience,
    ring: Ring,
    /// Frames that there was no room for, here or on the way out.
    lost: u64,
    too_long: TooLong,
    /// How many times in a row nothing has come.
    idle: u32,
    /// For frames that are too long for the ring, and for those that go out.
    messages: Box<Messages>,
    inbox: Aligned,
}

impl PacketSocket {
    pub(super) fn open(spec: &LinkSpec, name: &str, end: EthernetEnd) -> Result<Self, LinkError> {
        let at = |what| LinkError::at(spec, what);
        let name = Name::new(name).map_err(at("the name of the interface"))?;
        let features = features(name, end).map_err(at("reading the interface's settings"))?;
        let fd = raw_socket().map_err(at("creating a packet socket"))?;
        let (ring, index) =
            prepare(&fd, name, &features).map_err(at("setting up the packet socket"))?;
        Ok(Self {
            fd,
            index,
            down: false,
            features,
            waiting: Queue::new(SLOTS, LONGEST),
            congested: false,
            patience: Patience::default(),
            ring,
            lost: 0,
            too_long: TooLong::default(),
            idle: 0,
            messages: Messages::bare(),
            inbox: Aligned::new(RECEIVED * SLOT),
        })
    }

    /// The socket.
    pub(super) fn fd(&self) -> &OwnedFd {
        &self.fd
    }

    /// What a refusal means: that the interface is down is said in the same words as that it is gone.
    fn refusal(&mut self, error: &io::Error) -> Refusal {
        let down = error.raw_os_error() == Some(libc::ENETDOWN);
        if down && interface::is_gone(self.index) {
            return Refusal::Gone;
        }
        self.down |= down;
        Refusal::of(error)
    }

    /// Receives frames that the ring has no room for; how many there were.
    fn receive_long(
        &mut self,
        limit: usize,
        each: &mut dyn FnMut(&Frame<'_>),
    ) -> io::Result<usize> {
        let waiting = self.ring.in_socket(limit.min(RECEIVED));
        let received = match self.messages.receive(&self.fd, &mut self.inbox, SLOT, waiting) {
            Ok(received) => received,
            Err(error) if self.refusal(&error) == Refusal::Gone => return Err(error),
            Err(error) => {
                // A frame whose header the kernel cannot write is gone. Anything else is no matter of frames.
                let lost = matches!(error.raw_os_error(), Some(libc::EINVAL | libc::EAGAIN));
                self.ring.give_back(usize::from(lost));
                return Ok(1);
            }
        };
        let mut count = 0;
        for (index, slot) in self.inbox.chunks_exact_mut(SLOT).take(received).enumerate() {
            let message = self.messages.received(index);
            if let Some(message) = message.filter(|it| it.len <= LONGEST) {
                let tag = self.features.vlan.and_then(|_| self.ring.tag(index));
                let handed = hand_over(&mut slot[..message.len], tag, each);
                self.lost += u64::from(handed == 0);
                count += handed.max(1);
            } else {
                self.too_long.lose();
                count += 1;
            }
        }
        self.ring.give_back(received);
        Ok(count)
    }
}

impl PacketLink for PacketSocket {
    fn features(&self) -> &Features {
        &self.features
    }

    fn descriptor(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    fn receive(&mut self, limit: usize, each: &mut dyn FnMut(&Frame<'_>)) -> io::Result<usize> {
        if self.down {
            // One that is deleted goes down before, and the kernel says nothing more of it.
            if interface::is_gone(self.index) {
                return Err(io::Error::from_raw_os_error(libc::ENODEV));
            }
            self.down = !interface::is_up(self.index);
        }
        let mut count = 0;
        while count < limit {
            let tag = self.features.vlan.and_then(|_| self.ring.tag(0));
            match self.ring.next() {
                None => break,
                Some(Next::Here(bytes)) => {
                    let handed = hand_over(bytes, tag, each);
                    self.lost += u64::from(handed == 0);
                    count += handed.max(1);
                    self.ring.give_back(1);
                }
                Some(Next::InSocket) => count += self.receive_long(limit - count, each)?,
                Some(Next::Lost) => {
                    self.lost += 1;
                    self.ring.give_back(1);
                    count += 1;
                }
            }
        }
        if count > 0 {
            self.idle = 0;
            return Ok(count);
        }
        self.idle = self.idle.wrapping_add(1);
        if self.idle.is_multiple_of(IDLE) {
            self.take_failure()?;
        }
        Ok(0)
    }

    fn slot(&mut self) -> Option<&mut [u8]> {
        vnet::free(&mut self.waiting, self.features.vlan)
    }

    fn send(&mut self, frame: Outgoing) {
        vnet::push(&mut self.waiting, &frame, self.features.vlan);
    }

    fn flush(&mut self) -> io::Result<()> {
        self.congested = false;
        while !self.waiting.is_empty() {
            let waiting = &self.waiting;
            let pieces = (0..waiting.len().min(BATCH)).filter_map(|index| {
                let (slot, len) = waiting.get(index)?;
                Some(Piece { bytes: &slot[..len], to: None, joins: false })
            });
            match self.messages.send(&self.fd, pieces) {
                Ok(sent) => {
                    self.waiting.remove(sent);
                    self.patience.taken();
                }
                Err((error, _)) => match self.refusal(&error) {
                    Refusal::Interrupted => {}
                    Refusal::Full => break,
                    Refusal::Congested if !self.patience.is_over() => {
                        self.congested = true;
                        break;
                    }
                    refusal @ (Refusal::Congested | Refusal::Frame) => {
                        tracing::debug!(%error, "the packet socket lost a frame");
                        self.waiting.remove(1);
                        self.lost += u64::from(refusal == Refusal::Congested);
                        self.patience.dropped();
                    }
                    Refusal::Gone => return Err(error),
                },
            }
        }
        Ok(())
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
        // packet(7): what is told is not told again.
        let mut told = [0; 8];
        if read_option(&self.fd, libc::SOL_PACKET, libc::PACKET_STATISTICS, &mut told).is_ok() {
            // struct tpacket_stats: frames, and how many of them were dropped.
            let [.., a, b, c, d] = told;
            self.lost += u64::from(u32::from_ne_bytes([a, b, c, d]));
        }
        self.lost + self.too_long.lost
    }

    fn take_failure(&mut self) -> io::Result<bool> {
        let Err(error) = socket_error(&self.fd) else { return Ok(false) };
        match self.refusal(&error) {
            Refusal::Gone => Err(error),
            _ => Ok(true),
        }
    }
}

/// Hands over a frame that has a header before it, or each datagram of a train; how many frames that makes, 0
/// if nothing could be made of it. The kernel has taken `tag` off: the frame gets it back without its VLAN.
fn hand_over(bytes: &mut [u8], tag: Option<u16>, each: &mut dyn FnMut(&Frame<'_>)) -> usize {
    let Some((header, frame)) = bytes.split_first_chunk() else { return 0 };
    let mut header = vnet::Header::read(header);
    let Some(tag) = tag.filter(|_| frame.len() >= ETHERNET) else {
        return split::hand_over(header, &mut bytes[vnet::LEN..], each);
    };
    // Its room was that of the header.
    let frame = &mut bytes[vnet::LEN - tag::LEN..];
    tag::insert(frame, tag::priority_only(tag));
    header.start = header.start.map(|start| start + tag::LEN);
    split::hand_over(header, frame, each)
}

/// Whether packet sockets can be had here.
pub(super) fn probe() -> io::Result<()> {
    raw_socket().map(drop)
}

/// A packet socket that receives nothing before it is bound, as it has no protocol.
fn raw_socket() -> io::Result<OwnedFd> {
    let kind = libc::SOCK_RAW | libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC;
    // SAFETY: takes integers only.
    adopt_socket(unsafe { libc::socket(libc::AF_PACKET, kind, 0) })
}

/// What a link on an interface is.
fn features(name: Name, end: EthernetEnd) -> io::Result<Features> {
    Ok(Features {
        mtu: interface::mtu(&control()?, name)?,
        hardware: Some(station_beside(name, end.station)?),
        checksum: true,
        segment: MAX_SEGMENT,
        address: None,
        interface: name.text(),
        enter: Vec::new(),
        vlan: end.vlan,
    })
}

/// A station address for us on an Ethernet interface, which has its own.
pub(super) fn station_beside(name: Name, wanted: Option<Station>) -> io::Result<[u8; 6]> {
    let kernels = interface::station(&control()?, name)?;
    let ours = station(wanted)?;
    if ours == kernels {
        return Err(io::Error::from_raw_os_error(libc::EADDRINUSE));
    }
    Ok(ours)
}

/// Sets a socket up for the frames of one station on an interface, and binds it; its ring, and the
/// interface's number.
fn prepare(fd: &OwnedFd, name: Name, features: &Features) -> io::Result<(Ring, u32)> {
    set_option(fd, libc::SOL_PACKET, libc::PACKET_VNET_HDR, 1)?;
    set_option(fd, libc::SOL_PACKET, libc::PACKET_IGNORE_OUTGOING, 1)?;
    // Less than asked for will do, and more than others may have takes CAP_NET_ADMIN.
    let _ = set_option(fd, libc::SOL_SOCKET, libc::SO_SNDBUF, SEND_BUFFER);
    let receive = |name| set_option(fd, libc::SOL_SOCKET, name, RECEIVE_BUFFER);
    let _ = receive(libc::SO_RCVBUFFORCE).or_else(|_| receive(libc::SO_RCVBUF));
    let station = features.hardware.unwrap_or_default();
    attach_filter(fd, station, features.vlan.unwrap_or_default())?;
    let ring = Ring::new(fd)?;
    let index = interface::index(&control()?, name)?;
    join(fd, index, libc::PACKET_MR_UNICAST, &station)?;
    join(fd, index, libc::PACKET_MR_ALLMULTI, &[])?;
    // SAFETY: plain data, for which all zeroes is a valid value.
    let mut address: libc::sockaddr_ll = unsafe { std::mem::zeroed() };
    address.sll_family = libc::AF_PACKET as libc::sa_family_t;
    address.sll_protocol = (libc::ETH_P_ALL as u16).to_be();
    address.sll_ifindex = index as libc::c_int;
    let len = size_of::<libc::sockaddr_ll>() as libc::socklen_t;
    // SAFETY: the pointer and the length describe a live variable.
    check(unsafe { libc::bind(fd.as_raw_fd(), (&raw const address).cast(), len) })?;
    Ok((ring, index))
}

/// Has the interface receive frames for `address` as well, as long as the socket is open.
pub(super) fn join(fd: &OwnedFd, index: u32, kind: libc::c_int, address: &[u8]) -> io::Result<()> {
    // struct packet_mreq: interface, kind, length of the address, address.
    let mut request = [0; 16];
    request[..4].copy_from_slice(&index.to_ne_bytes());
    request[4..6].copy_from_slice(&(kind as u16).to_ne_bytes());
    request[6..8].copy_from_slice(&(address.len() as u16).to_ne_bytes());
    request[8..8 + address.len()].copy_from_slice(address);
    set_option_bytes(fd, libc::SOL_PACKET, libc::PACKET_ADD_MEMBERSHIP, &request)
}

/// Lets through what is for `station` or a group, and is in the VLAN, whose tag the kernel has taken off; 0:
/// in none. One that has a priority only is of no VLAN (IEEE 802.1Q 6.9).
fn attach_filter(fd: &OwnedFd, station: [u8; 6], vlan: u16) -> io::Result<()> {
    const LOAD_WORD: u32 = libc::BPF_LD | libc::BPF_W | libc::BPF_ABS;
    const LOAD_HALF: u32 = libc::BPF_LD | libc::BPF_H | libc::BPF_ABS;
    const LOAD_BYTE: u32 = libc::BPF_LD | libc::BPF_B | libc::BPF_ABS;
    const IF_EQUAL: u32 = libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K;
    const IF_BITS: u32 = libc::BPF_JMP | libc::BPF_JSET | libc::BPF_K;
    const AND: u32 = libc::BPF_ALU | libc::BPF_AND | libc::BPF_K;
    const RETURN: u32 = libc::BPF_RET | libc::BPF_K;
    // Without a tag it is 0 as well.
    let tag = (libc::SKF_AD_OFF + libc::SKF_AD_VLAN_TAG) as u32;
    let [a, b, c, d, e, f] = station;
    let (high, low) = (u32::from_be_bytes([a, b, c, d]), u32::from_be_bytes([0, 0, e, f]));
    let step = |code: u32, k, jt, jf| libc::sock_filter { code: code as u16, jt, jf, k };
    let mut program = [
        step(LOAD_WORD, tag, 0, 0),
        step(AND, 0x0fff, 0, 0),
        step(IF_EQUAL, vlan.into(), 0, 7),
        step(LOAD_BYTE, 0, 0, 0),
        step(IF_BITS, 1, 4, 0),
        step(LOAD_WORD, 0, 0, 0),
        step(IF_EQUAL, high, 0, 3),
        step(LOAD_HALF, 4, 0, 0),
        step(IF_EQUAL, low, 0, 1),
        step(RETURN, u32::MAX, 0, 0),
        step(RETURN, 0, 0, 0),
    ];
    let filter = libc::sock_fprog { len: program.len() as u16, filter: program.as_mut_ptr() };
    // SAFETY: a sock_fprog is plain data; its bytes are read here only.
    let bytes = unsafe {
        std::slice::from_raw_parts((&raw const filter).cast::<u8>(), size_of_val(&filter))
    };
    set_option_bytes(fd, libc::SOL_SOCKET, libc::SO_ATTACH_FILTER, bytes)
}
