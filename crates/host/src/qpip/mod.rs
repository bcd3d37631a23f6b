//! The packet link of QPIP under the engine: frames from the link to the adapter, and back.
//!
//! A link that takes no more frames holds up the adapter, which keeps what it has to send as work requests;
//! nothing is queued here.

mod addresses;
mod config;

use std::io;
use std::sync::Arc;
use std::time::Duration;

use libc::c_int;
use quipu_inet::stack::Frame;
use quipu_nic::{FrameOut, QpNum, Time};

use crate::net::numbers::Numbers;
use crate::net::token::Token;
use crate::packet::{ETHERNET, Outgoing, PacketLink, Station, tag};
use crate::sys::{self, Epoll};
use crate::tap::Adapter;

pub use self::config::{QpipConfig, parse_address};

/// Frames that one look at the link takes, and that one turn sends.
const FRAMES_PER_TURN: usize = 256;
/// Looks that find nothing after which the link is no longer tried without asking epoll.
const PATIENCE: u32 = 4096;
/// How long whoever finds the queue of an interface full waits before trying again. An interface of 1 Gb/s
/// sends 40 long frames meanwhile, of a queue of a thousand.
const CONGESTION_NS: u64 = 500_000;
/// How often an interface that is down is looked at, whether it is still there.
const DOWN_NS: u64 = 250_000_000;
/// Failures in a row after which the link is given up.
const FAILURES_MAX: u32 = 64;
/// Ports of queue pair numbers that no TCP socket of ours has: queue pairs of QPIP are known by addresses and
/// ports of their own, and their numbers are not to cost any of the kernel's.
const NUMBER_PORTS: std::ops::Range<u16> = 1..1024;

const READ: c_int = libc::EPOLLIN;
const WRITE: c_int = libc::EPOLLOUT;

/// How the link is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// It takes and brings frames, or may do so again.
    Usable,
    /// It is gone for good, and nobody was told yet.
    Gone,
    /// That was told.
    GoneAndTold,
}

/// What the engine has for QPIP.
pub(crate) struct Qpip {
    link: Box<dyn PacketLink>,
    epoll: Arc<Epoll>,
    /// Whether epoll says when the link takes frames again.
    waits_for_room: bool,
    /// When a link is tried again of which no descriptor says that it has room.
    retry_at: Option<Time>,
    /// When a link is looked at whose interface is down.
    look_at: Option<Time>,
    /// It was down when it was last looked at.
    down: bool,
    /// The adapter has more for its own addresses than it takes at a time.
    has_more: bool,
    /// Looks that find nothing since the last frame.
    misses: u32,
    /// Failures of the link since it last worked.
    failures: u32,
    /// It was said that somebody else has an address of the adapter.
    warned: bool,
    /// What users call the link.
    name: String,
    state: State,
    numbers: Numbers,
    next_port: u16,
}

impl Qpip {
    /// Puts a link under an adapter to which a stack with the link's features is attached.
    ///
    /// # Errors
    ///
    /// The kernel has no memory for another entry of epoll.
    pub(crate) fn new(
        link: Box<dyn PacketLink>,
        name: String,
        epoll: Arc<Epoll>,
    ) -> io::Result<Self> {
        epoll.add(&link.descriptor(), READ, Token::Packets.bits())?;
        Ok(Self {
            link,
            epoll,
            waits_for_room: false,
            retry_at: None,
            look_at: None,
            down: false,
            has_more: false,
            misses: PATIENCE,
            failures: 0,
            warned: false,
            name,
            state: State::Usable,
            numbers: Numbers::default(),
            next_port: NUMBER_PORTS.start,
        })
    }

    /// The link.
    pub(crate) fn link(&self) -> &dyn PacketLink {
        &*self.link
    }

    /// Frames that it had no room for since it was opened.
    pub(crate) fn lost(&mut self) -> u64 {
        self.link.lost()
    }

    /// What users call it.
    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// Whether the link is gone for good.
    #[inline]
    pub(crate) fn is_gone(&self) -> bool {
        self.state != State::Usable
    }

    /// Whether it is, for the first who asks.
    pub(crate) fn take_end(&mut self) -> bool {
        let first = self.state == State::Gone;
        if first {
            self.state = State::GoneAndTold;
        }
        first
    }

    /// A number for a new queue pair.
    pub(crate) fn take_number(&mut self) -> Option<QpNum> {
        if self.numbers.wants_port() && NUMBER_PORTS.contains(&self.next_port) {
            self.numbers.add_port(self.next_port);
            self.next_port += 1;
        }
        self.numbers.take()
    }

    /// Gives a number back; `false` if it is not one of these.
    pub(crate) fn give_back_number(&mut self, number: QpNum) -> bool {
        let ours = NUMBER_PORTS.contains(&number.port());
        if ours {
            self.numbers.give_back(number);
        }
        ours
    }

    /// Waits until the link has something, for `most` at most.
    pub(crate) fn wait(&self, most: Duration) {
        sys::wait_readable_within(&self.link.descriptor(), most);
    }

    /// Whether the link is tried without asking epoll: frames have come lately.
    #[inline]
    pub(crate) fn is_hot(&self) -> bool {
        self.misses < PATIENCE
    }

    /// Takes frames from the link if it was busy lately. True if there were any.
    #[inline]
    pub(crate) fn poll_hot(&mut self, adapter: &mut Adapter, now: Time) -> bool {
        self.is_hot() && self.receive(adapter, now)
    }

    /// Does what epoll says that can be done. True if that was something.
    pub(crate) fn ready(&mut self, adapter: &mut Adapter, now: Time, events: u32) -> bool {
        if events & WRITE as u32 != 0 {
            self.flush(adapter, now);
        }
        let failed = events & (libc::EPOLLERR | libc::EPOLLHUP) as u32 != 0;
        let readable = events & READ as u32 != 0 || failed;
        let received = readable && self.receive(adapter, now);
        if failed && !received {
            match self.link.take_failure() {
                Ok(true) => self.watch(adapter, now),
                Ok(false) => self.failed(),
                Err(error) => self.gone(&error),
            }
        }
        received
    }

    fn receive(&mut self, adapter: &mut Adapter, now: Time) -> bool {
        if self.is_gone() {
            return false;
        }
        let vlan = self.link.features().vlan;
        let each = &mut |frame: &Frame<'_>| {
            let tag = vlan.and_then(|vlan| tag::of(frame.bytes).map(|tag| tag | vlan));
            adapter.probe_mut().frame_passed(false, frame.bytes, tag);
            adapter.handle_frame(now, frame);
        };
        let received = self.link.receive(FRAMES_PER_TURN, each);
        self.watch(adapter, now);
        match received {
            Ok(0) => {
                self.misses = self.misses.saturating_add(1);
                false
            }
            Ok(_) => {
                (self.misses, self.failures) = (0, 0);
                if !self.warned {
                    self.warn_of_conflict(adapter);
                }
                true
            }
            Err(error) => {
                self.gone(&error);
                false
            }
        }
    }

    /// Says once that somebody else has an address of the adapter (RFC 5227 2.4, RFC 4862 5.4.4). The adapter
    /// keeps it: it is for the user to decide who is to have it.
    #[inline]
    fn warn_of_conflict(&mut self, adapter: &Adapter) {
        let counters = adapter.inet().and_then(|stack| stack.neighbour_counters());
        let Some((address, station)) = counters.and_then(|it| it.first_conflict) else { return };
        self.warned = true;
        let (link, station) = (&self.name, Station(station));
        tracing::warn!(link, %address, %station, "another station uses an address of the \
            adapter; remove it from one of them");
    }

    /// Sends what the adapter has to send, as far as the link takes it. True if it took something, or the
    /// adapter has taken something itself and goes on.
    #[inline]
    pub(crate) fn transmit(&mut self, adapter: &mut Adapter, now: Time) -> bool {
        adapter.has_frames() && !self.is_gone() && self.transmit_some(adapter, now)
    }

    fn transmit_some(&mut self, adapter: &mut Adapter, now: Time) -> bool {
        if self.retry_at.is_some() {
            return false;
        }
        let (mut sent, mut full) = (0, false);
        self.has_more = false;
        let vlan = self.link.features().vlan;
        while sent < FRAMES_PER_TURN && adapter.has_frames() {
            let Some(slot) = self.link.slot() else {
                full = true;
                break;
            };
            let Some(frame) = adapter.transmit_frame(now, slot) else {
                self.has_more = adapter.has_frames();
                break;
            };
            let FrameOut { len, checksum, segment, .. } = frame;
            let priority = vlan.map_or(0, |_| {
                let packet = slot.get(ETHERNET..len).unwrap_or_default();
                adapter.level_of_frame(&frame, packet)
            });
            let tag = vlan.map(|vlan| tag::control(vlan, priority));
            adapter.probe_mut().frame_passed(true, &slot[..len], tag);
            self.link.send(Outgoing { len, checksum, segment, priority });
            sent += 1;
        }
        self.flush(adapter, now);
        // There may be room of which epoll has not told yet, and will not once the queue is empty.
        let has_room = full && !self.waits_for_room && self.retry_at.is_none() && !self.is_gone();
        sent > 0 || self.has_more || has_room
    }

    /// When [`handle_timeout`](Self::handle_timeout) is to be called, and then
    /// [`transmit`](Self::transmit).
    #[inline]
    pub(crate) fn poll_timeout(&self) -> Option<Time> {
        if self.has_more {
            return Some(Time(0));
        }
        [self.retry_at, self.look_at].into_iter().flatten().min()
    }

    /// Tries again what the link had no room for.
    pub(crate) fn handle_timeout(&mut self, adapter: &mut Adapter, now: Time) {
        self.has_more = false;
        if self.look_at.is_some_and(|at| at <= now) {
            self.look_at = None;
            self.receive(adapter, now);
        }
        self.flush(adapter, now);
    }

    /// Sees to it that a link whose interface is down is looked at soon, and the adapter told when it is up
    /// again.
    #[inline]
    fn watch(&mut self, adapter: &mut Adapter, now: Time) {
        if self.link.is_down() {
            self.look_at = self.look_at.or(Some(Time(now.0.saturating_add(DOWN_NS))));
            self.down = true;
        } else if self.down {
            (self.look_at, self.down) = (None, false);
            adapter.link_came_up();
        }
    }

    /// Hands everything to the kernel; what it does not take now it takes when epoll says so, or a little
    /// later where that cannot.
    fn flush(&mut self, adapter: &mut Adapter, now: Time) {
        if self.is_gone() {
            return;
        }
        if let Err(error) = self.link.flush() {
            self.gone(&error);
        }
        if self.is_gone() {
            return;
        }
        self.watch(adapter, now);
        let congested = self.link.is_congested();
        self.retry_at = congested.then_some(Time(now.0.saturating_add(CONGESTION_NS)));
        let wants = self.link.wants_writable();
        if wants != self.waits_for_room {
            self.waits_for_room = wants;
            let events = if wants { READ | WRITE } else { READ };
            // It is in the set, and no memory is needed to change what it waits for.
            let _ = self.epoll.modify(&self.link.descriptor(), events, Token::Packets.bits());
        }
    }

    /// The link says that it is gone.
    #[cold]
    fn gone(&mut self, error: &io::Error) {
        if self.is_gone() {
            return;
        }
        tracing::error!(link = self.name, %error, "the packet link is gone; its queue pairs fail");
        self.state = State::Gone;
        self.misses = PATIENCE;
        (self.retry_at, self.look_at, self.has_more) = (None, None, false);
        // Epoll would report it for ever.
        self.epoll.remove(&self.link.descriptor());
    }

    /// Notes that the descriptor reports a failure that no call explains. One that does nothing but fail is
    /// as good as gone.
    #[cold]
    fn failed(&mut self) {
        self.failures += 1;
        if self.failures == FAILURES_MAX {
            self.gone(&io::Error::from_raw_os_error(libc::EIO));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv6Addr;
    use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
    use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

    use quipu_inet::stack::{Checksum, Config, Stack};
    use quipu_inet::tcp::Secret;

    use super::*;
    use crate::packet::Features;
    use crate::tap::Tap;

    const OWN: Ipv6Addr = Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, 1);
    const PEER: Ipv6Addr = Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, 2);

    /// A link with room for one frame, which the kernel takes when it may.
    struct Narrow {
        features: Features,
        fd: OwnedFd,
        slot: [u8; 1514],
        waits: bool,
        takes: Arc<AtomicBool>,
        down: Arc<AtomicBool>,
    }

    impl Narrow {
        fn new() -> Self {
            let features = Features {
                mtu: 1500,
                hardware: None,
                checksum: false,
                segment: 0,
                address: None,
                interface: String::new(),
                enter: Vec::new(),
                vlan: None,
            };
            let fd = std::net::UdpSocket::bind("127.0.0.1:0").unwrap().into();
            let (takes, down) = Default::default();
            Self { features, fd, slot: [0; 1514], waits: false, takes, down }
        }
    }

    impl PacketLink for Narrow {
        fn features(&self) -> &Features {
            &self.features
        }

        fn descriptor(&self) -> BorrowedFd<'_> {
            self.fd.as_fd()
        }

        fn receive(&mut self, _: usize, _: &mut dyn FnMut(&Frame<'_>)) -> io::Result<usize> {
            Ok(0)
        }

        fn slot(&mut self) -> Option<&mut [u8]> {
            (!self.waits).then_some(&mut self.slot[..])
        }

        fn send(&mut self, _: Outgoing) {
            self.waits = true;
        }

        fn flush(&mut self) -> io::Result<()> {
            self.waits &= !self.takes.load(Relaxed);
            Ok(())
        }

        fn wants_writable(&self) -> bool {
            self.waits
        }

        fn is_congested(&self) -> bool {
            false
        }

        fn is_down(&self) -> bool {
            self.down.load(Relaxed)
        }
    }

    /// An echo request of the peer, which has an answer.
    fn echo_request() -> [u8; 48] {
        let mut packet = [0; 48];
        packet[..8].copy_from_slice(&[0x60, 0, 0, 0, 0, 8, 58, 64]);
        packet[8..24].copy_from_slice(&PEER.octets());
        packet[24..40].copy_from_slice(&OWN.octets());
        packet[40] = 128;
        // The checksum begins with what is not in these octets: length and protocol.
        packet[43] = 8 + 58;
        Stack::seal(&mut packet, Checksum { start: 8, at: 42 });
        packet
    }

    #[test]
    fn a_full_link_that_has_room_again_takes_what_waits_in_the_adapter() {
        let config = quipu_nic::Config::default();
        let mut adapter = Adapter::with_probe(config, Tap::default());
        adapter.attach_inet(Config::new(OWN.into(), 64, Secret([1, 2]))).unwrap();
        let link = Narrow::new();
        let takes = link.takes.clone();
        let epoll = Arc::new(Epoll::new().unwrap());
        let mut qpip = Qpip::new(Box::new(link), "narrow".into(), epoll).unwrap();
        let now = Time(0);
        for _ in 0..3 {
            adapter.handle_frame(now, &Frame { bytes: &echo_request(), checked: false });
        }
        assert!(qpip.transmit(&mut adapter, now) && adapter.has_frames());
        assert!(!qpip.transmit(&mut adapter, now), "the link is full, and epoll is to tell");
        assert!(qpip.waits_for_room);
        // It has room before epoll says so, and whoever transmits now goes on.
        takes.store(true, Relaxed);
        let mut turns = 0;
        while qpip.transmit(&mut adapter, now) {
            turns += 1;
        }
        assert!(!adapter.has_frames(), "after {turns} turns");
    }

    #[test]
    fn an_adapter_whose_link_comes_up_begins_anew() {
        let mut adapter = Adapter::with_probe(quipu_nic::Config::default(), Tap::default());
        let config = Config::new(OWN.into(), 64, Secret([1, 2]));
        adapter.attach_inet(Config { hardware: Some([2, 0, 0, 0, 0, 1]), ..config }).unwrap();
        let link = Narrow::new();
        link.takes.store(true, Relaxed);
        let down = link.down.clone();
        let epoll = Arc::new(Epoll::new().unwrap());
        let mut qpip = Qpip::new(Box::new(link), "narrow".into(), epoll).unwrap();
        let mut sent = 0;
        // All that it says at first.
        let mut say = |adapter: &mut Adapter, qpip: &mut Qpip| {
            let before = sent;
            while let Some(now) = adapter.poll_timeout() {
                adapter.handle_timeout(now);
                while qpip.transmit(adapter, now) {}
                sent = adapter.inet().unwrap().counters().sent;
            }
            sent - before
        };
        let first = say(&mut adapter, &mut qpip);
        assert!(first > 0);
        for is_down in [true, true, false] {
            assert_eq!(adapter.poll_timeout(), None);
            down.store(is_down, Relaxed);
            qpip.handle_timeout(&mut adapter, Time(1 << 40));
        }
        assert_eq!(say(&mut adapter, &mut qpip), first);
    }
}
