//! Links: two engines on one host that share memory, however many queue pairs they connect.
//!
//! Each engine gives the other one segment. Its first page holds what its owner says to the peer as a whole
//! (its bells, whether it sleeps, whether it is in the middle of an access to the peer's memory); behind
//! it lie the channels that its owner began.

use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

use quipu_iwarp::wire::hello::{self, Hello};
use quipu_mem::ring::{ChannelConfig, ChannelLayout};
use quipu_mem::{
    Arena, DirectoryReader, Guard, GuardState, GuardWait, Segment, SegmentError, Shared, Span,
    Withdrawn,
};

use crate::adapter::{Adapter, Alarm, Hub};
use crate::event::Action;
use crate::probe::Probe;
use crate::requester;
use crate::types::{Gid, LinkId, QpId, Time};

/// Bytes of the page that a segment begins with.
const PAGE: usize = 4096;
const GUARD_AT: usize = 128;
const PARKED_AT: usize = 256;
const SUMMARY_AT: usize = 384;
const BELLS_AT: usize = 512;
/// Bells of a link; channels with the same number modulo this share one.
const BELLS: u32 = 64 * 64;

/// How often it is looked whether queue pairs may end at last, and after how long the peers that they wait
/// for are cut off.
const ENDING_LOOK_NS: u64 = 50_000;
const ENDING_PATIENCE_NS: u64 = 5_000_000_000;

/// The peer's memory could not be reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PeerMemoryFault {
    /// Some address is not mapped there, or not with the right needed.
    #[error("bad address in the peer's memory")]
    BadAddress,
    /// The peer is gone, or the host forbids the access now.
    #[error("the peer's memory cannot be reached")]
    Unreachable,
}

/// An atomic operation on 8 bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Atomic {
    /// Adds, wrapping.
    FetchAdd(u64),
    /// Stores `swap` if the word equals `compare`.
    CompareSwap {
        /// Value to compare with.
        compare: u64,
        /// Value to store if equal.
        swap: u64,
    },
}

impl Atomic {
    /// Executes it on a word, which must be as [`Span::fetch_add`] asks, and returns what was there.
    pub fn execute(self, word: Span<'_>) -> u64 {
        match self {
            Self::FetchAdd(add) => word.fetch_add(add),
            Self::CompareSwap { compare, swap } => word.compare_swap(compare, swap),
        }
    }
}

/// Access to the memory of another process on this host. Addresses and lengths in bytes; both lists of a
/// call have the same total.
pub trait PeerMemory: Send + Sync {
    /// Copies from the peer's `remote` ranges to the own `local` ones.
    ///
    /// # Errors
    /// See [`PeerMemoryFault`]; some bytes may have been copied.
    fn read(&self, remote: &[(u64, u64)], local: &[(usize, usize)]) -> Result<(), PeerMemoryFault>;

    /// Copies from the own `local` ranges to the peer's `remote` ones.
    ///
    /// # Errors
    /// See [`PeerMemoryFault`]; some bytes may have been copied.
    fn write(&self, local: &[(usize, usize)], remote: &[(u64, u64)])
    -> Result<(), PeerMemoryFault>;

    /// Whether some of it may be mapped here, so that it is accessed without the kernel.
    fn is_mapped(&self) -> bool {
        false
    }

    /// `len` bytes at the peer's `addr` as they are mapped here; `None` unless all are, in one piece.
    fn view(&self, addr: u64, len: u64) -> Option<Segment> {
        let _ = (addr, len);
        None
    }

    /// Executes an atomic operation on the 8 bytes at the peer's `addr`, a multiple of 8, and returns what
    /// was there. `None` where only the peer's own processor can, mostly: what is not mapped here.
    fn atomic(&self, addr: u64, op: Atomic) -> Option<u64> {
        let _ = (addr, op);
        None
    }
}

/// What the world below has agreed on with another engine of this host.
pub struct Link {
    /// The segment that this engine created and the peer maps: zeroed.
    pub own: Segment,
    /// The segment that the peer created.
    pub peer: Segment,
    /// The GID of the peer's engine, for which alone it speaks: the world below makes sure that it is an
    /// address of this host. `None` for an engine that has all addresses of this host.
    pub peer_gid: Option<Gid>,
    /// Access to the peer's memory, if the host allows it: in both directions, or neither end has any.
    pub peer_memory: Option<Arc<dyn PeerMemory>>,
    /// The peer's directory of regions, if it gave one.
    pub peer_directory: Option<Segment>,
}

/// A control message between the engines of a link. Carried in order and reliably.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LinkMessage {
    /// Asks to join two queue pairs by a channel in the asker's segment.
    Request {
        /// The asker's name for the connection.
        tag: u64,
        /// Who wants whom.
        hello: Hello,
        /// Where the channel is, in bytes from the start of the asker's segment.
        offset: u64,
        /// What the other end must know of this one.
        end: LinkEnd,
    },
    /// Grants it.
    Accept {
        /// The asker's name for the connection.
        tag: u64,
        /// The granter's.
        own_tag: u64,
        /// What the other end must know of this one.
        end: LinkEnd,
    },
    /// Refuses it.
    Reject {
        /// The asker's name for the connection.
        tag: u64,
        /// Why: a reason code of the hello.
        hello: Hello,
    },
    /// This end of the channel is gone, and will not touch it again.
    Close {
        /// The receiver's name for the connection.
        tag: u64,
    },
    /// Asks for bytes that a request refers to and that cannot be fetched; there is to be no such request
    /// any more.
    Fetch {
        /// The receiver's name for the connection.
        tag: u64,
        /// Which request of the channel.
        sequence: u32,
        /// Where in it the bytes begin.
        offset: u32,
        /// How many they are.
        len: u32,
    },
    /// Some of them, in order; none where they cannot be had.
    Fetched {
        /// The receiver's name for the connection.
        tag: u64,
        /// As in the question.
        sequence: u32,
        /// Where in the request these begin.
        offset: u32,
        /// At most [`FETCHED_MAX`].
        bytes: Vec<u8>,
    },
}

/// The most bytes of a request in one message.
pub const FETCHED_MAX: usize = 3840;
/// The longest message.
pub const LINK_MESSAGE_MAX: usize = FETCHED_MAX + 24;

/// What one end of a channel must know of the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LinkEnd {
    /// The number to ring it with.
    pub bell: u32,
    /// Its protection domain's number, for its directory.
    pub pd: u32,
}

impl LinkMessage {
    /// Appends the message to `out`: at most [`LINK_MESSAGE_MAX`] bytes, in the host's byte order.
    pub fn encode(&self, out: &mut Vec<u8>) {
        let mut put = |words: &[u64]| words.iter().for_each(|word| out.extend(word.to_ne_bytes()));
        let place = |sequence: u32, offset: u32| u64::from(sequence) << 32 | u64::from(offset);
        let end = |end: &LinkEnd| [place(end.bell, end.pd)];
        match self {
            Self::Request { tag, hello, offset, end: of } => {
                put(&[1, *tag, *offset]);
                put(&end(of));
                out.extend(hello.to_bytes());
            }
            Self::Accept { tag, own_tag, end: of } => {
                put(&[2, *tag, *own_tag]);
                put(&end(of));
            }
            Self::Reject { tag, hello } => {
                put(&[3, *tag]);
                out.extend(hello.to_bytes());
            }
            Self::Close { tag } => put(&[4, *tag]),
            Self::Fetch { tag, sequence, offset, len } => {
                put(&[5, *tag, place(*sequence, *offset), u64::from(*len)]);
            }
            Self::Fetched { tag, sequence, offset, bytes } => {
                put(&[6, *tag, place(*sequence, *offset)]);
                out.extend_from_slice(bytes);
            }
        }
    }

    /// Reads a message; `None` if it is none.
    #[must_use]
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        let word = |index: usize| {
            let field = bytes.get(index * 8..index * 8 + 8)?;
            Some(u64::from_ne_bytes(field.try_into().ok()?))
        };
        let end = |index: usize| {
            let word = word(index)?;
            Some(LinkEnd { bell: (word >> 32) as u32, pd: word as u32 })
        };
        let hello = |at: usize| Hello::parse(bytes.get(at..at + hello::LEN)?).ok();
        let tag = word(1)?;
        Some(match word(0)? {
            1 => Self::Request { tag, hello: hello(32)?, offset: word(2)?, end: end(3)? },
            2 => Self::Accept { tag, own_tag: word(2)?, end: end(3)? },
            3 => Self::Reject { tag, hello: hello(16)? },
            4 => Self::Close { tag },
            5 => {
                let (place, len) = (word(2)?, word(3)? as u32);
                Self::Fetch { tag, sequence: (place >> 32) as u32, offset: place as u32, len }
            }
            6 => {
                let (place, bytes) = (word(2)?, bytes.get(24..)?.to_vec());
                Self::Fetched { tag, sequence: (place >> 32) as u32, offset: place as u32, bytes }
            }
            _ => return None,
        })
    }
}

/// The page of one segment, as both sides see it.
struct Page {
    guard: Guard,
    parked: Shared<std::sync::atomic::AtomicU32>,
    summary: Shared<std::sync::atomic::AtomicU64>,
    bells: Vec<Shared<std::sync::atomic::AtomicU64>>,
}

impl Page {
    fn new(segment: &Segment) -> Result<Self, SegmentError> {
        Ok(Self {
            guard: Guard::new(segment.u32_at(GUARD_AT)?),
            parked: segment.u32_at(PARKED_AT)?,
            summary: segment.u64_at(SUMMARY_AT)?,
            bells: (0..64)
                .map(|word| segment.u64_at(BELLS_AT + word * 8))
                .collect::<Result<_, _>>()?,
        })
    }
}

/// A link as the adapter keeps it.
pub(crate) struct LinkState {
    pub(crate) link: Link,
    own_page: Page,
    peer_page: Page,
    pub(crate) arena: Arena,
    pub(crate) directory: Option<DirectoryReader>,
    /// Queue pairs by bell number.
    pub(crate) channels: Vec<Option<QpId>>,
    free_bells: Vec<u32>,
    /// A wait for the peer to be out of this engine's memory.
    quiet: Option<GuardWait>,
}

/// A peer that was seen in the middle of an access to this engine's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Restless {
    link: LinkId,
    wait: GuardWait,
}

/// Sizes of every channel.
pub(crate) fn channel_config() -> ChannelConfig {
    ChannelConfig::default()
}

/// Bytes of a channel.
fn channel_len() -> usize {
    ChannelLayout::new(channel_config()).map_or(PAGE, |layout| layout.total_len())
}

impl LinkState {
    pub(crate) fn new(link: Link) -> Result<Self, SegmentError> {
        let own_page = Page::new(&link.own)?;
        let peer_page = Page::new(&link.peer)?;
        let channels = link.own.slice(PAGE, link.own.len().saturating_sub(PAGE))?;
        let directory = match &link.peer_directory {
            Some(segment) => DirectoryReader::new(segment).ok(),
            None => None,
        };
        Ok(Self {
            own_page,
            peer_page,
            arena: Arena::new(channels, channel_len()),
            directory,
            channels: Vec::new(),
            free_bells: Vec::new(),
            quiet: None,
            link,
        })
    }

    /// The offset in the own segment of a block of the arena.
    pub(crate) fn block_offset(offset: usize) -> u64 {
        (PAGE + offset) as u64
    }

    /// Gives a queue pair a bell.
    pub(crate) fn take_bell(&mut self, qp: QpId) -> u32 {
        let bell = self.free_bells.pop().unwrap_or_else(|| {
            self.channels.push(None);
            (self.channels.len() - 1) as u32
        });
        self.channels[bell as usize] = Some(qp);
        bell
    }

    pub(crate) fn return_bell(&mut self, bell: u32) {
        if let Some(slot) = self.channels.get_mut(bell as usize)
            && slot.take().is_some()
        {
            self.free_bells.push(bell);
        }
    }

    /// Rings the peer's bell `number`; `true` if its engine sleeps and must be woken.
    pub(crate) fn ring(&self, number: u32) -> bool {
        let number = number % BELLS;
        let (word, bit) = ((number / 64) as usize, number % 64);
        self.own_page.bells[word].fetch_or(1 << bit, Ordering::Relaxed);
        self.own_page.summary.fetch_or(1 << word, Ordering::SeqCst);
        self.peer_page.parked.load(Ordering::SeqCst) != 0
            && self.peer_page.parked.swap(0, Ordering::AcqRel) != 0
    }

    /// Whether the peer looks for what comes, though nobody knows how soon: a bell would wake nobody.
    #[inline]
    pub(crate) fn is_looked_at(&self) -> bool {
        self.peer_page.parked.load(Ordering::Relaxed) == 0
    }

    /// Whether the peer rang.
    #[inline]
    pub(crate) fn rung(&self) -> bool {
        self.peer_page.summary.load(Ordering::Acquire) != 0
    }

    /// Takes the queue pairs that the peer rang for.
    pub(crate) fn answer_bells(&mut self, out: &mut Vec<QpId>) {
        let mut words = self.peer_page.summary.swap(0, Ordering::AcqRel);
        while words != 0 {
            let word = words.trailing_zeros();
            words &= words - 1;
            let mut bits = self.peer_page.bells[word as usize].swap(0, Ordering::AcqRel);
            while bits != 0 {
                let bell = word * 64 + bits.trailing_zeros();
                bits &= bits - 1;
                let sharers = self.channels.iter().skip(bell as usize).step_by(BELLS as usize);
                out.extend(sharers.flatten());
            }
        }
    }

    /// Says that this engine sleeps, or not. Before it does, look once more whether the peer
    /// [`rung`](Self::rung).
    pub(crate) fn set_parked(&self, parked: bool) {
        self.own_page.parked.store(u32::from(parked), Ordering::Relaxed);
        if parked {
            // Between this store and that load, as `ring` has its two in one order: else each side might see
            // what was before, and nobody would wake this one.
            fence(Ordering::SeqCst);
        }
    }

    /// Runs `access` with this engine marked as being in the middle of an access to the peer's memory.
    pub(crate) fn guarded<T>(&self, access: impl FnOnce() -> T) -> T {
        self.own_page.guard.enter();
        let result = access();
        self.own_page.guard.leave();
        result
    }
}

impl<P> Hub<P> {
    /// Notes which peers may be in the middle of an access to memory that was just withdrawn, and keeps the
    /// table's share of it until they are not.
    pub(crate) fn begin_quiet_wait(&mut self, withdrawn: Withdrawn) {
        if !withdrawn.published {
            return;
        }
        self.withdrawn.push(withdrawn);
        for id in self.links.keys() {
            self.begin_link_wait(id);
        }
    }

    /// Notes, after something of one queue pair was taken back, whether the peer behind `link` may be in the
    /// middle of an access to it.
    pub(crate) fn begin_link_wait(&mut self, link: LinkId) {
        // Without access here it has none either, and its word is about nothing.
        if let Some(link) = self.links.get_mut(link)
            && link.link.peer_memory.is_some()
        {
            // The newest sample is over no sooner than those before it.
            link.quiet = Some(link.peer_page.guard.sample());
        }
    }

    /// Whether all those have finished. A peer that died is no longer among the links.
    pub(crate) fn quiet_wait_over(&mut self) -> bool {
        let mut over = true;
        for id in self.links.keys() {
            let Some(link) = self.links.get_mut(id) else { continue };
            let Some(wait) = link.quiet else { continue };
            match wait.poll(&link.peer_page.guard, || false) {
                GuardState::Clear | GuardState::PeerDead => link.quiet = None,
                GuardState::NotYet => over = false,
            }
        }
        if over {
            self.withdrawn.clear();
        }
        over
    }

    /// Rings for a queue pair at the other end of a link, and wakes that engine if it sleeps.
    pub(crate) fn ring(&mut self, link: LinkId, bell: u32) {
        if self.links.get(link).is_some_and(|state| state.ring(bell)) {
            self.actions.push_back(Action::RingBell { link });
        }
    }
}

impl<P> Hub<P> {
    /// Has a queue pair end once no peer is in the middle of an access any more.
    pub(crate) fn postpone_ending(&mut self, id: QpId) {
        if self.endings.is_empty() {
            self.await_endings();
        }
        self.endings.push(id);
        self.set_endings_alarm(Some(self.now.after(ENDING_LOOK_NS)));
    }

    /// From now on the peers that are in the middle of an access have their time to finish it.
    fn await_endings(&mut self) {
        self.endings_since = self.now;
        self.endings_seen = self.restless();
    }

    /// The peers that [`quiet_wait_over`](Self::quiet_wait_over) still waits for.
    fn restless(&self) -> Vec<Restless> {
        let links = self.links.iter();
        links.filter_map(|(link, state)| Some(Restless { link, wait: state.quiet? })).collect()
    }

    fn set_endings_alarm(&mut self, at: Option<Time>) {
        let mut alarm = self.endings_alarm;
        self.set_alarm(&mut alarm, Alarm::Endings, at);
        self.endings_alarm = alarm;
    }
}

impl<P: Probe> Adapter<P> {
    /// Ends the queue pairs that waited for it, if it is time; a peer that takes too long is cut off. Whether
    /// any ended.
    pub(crate) fn finish_endings(&mut self) -> bool {
        if self.hub.endings.is_empty() {
            return false;
        }
        if !self.hub.quiet_wait_over() {
            let now = self.hub.now;
            if now.since(self.hub.endings_since) > ENDING_PATIENCE_NS {
                let links = self.still_restless(&self.hub.endings_seen);
                self.hub.actions.extend(links.into_iter().map(|link| Action::Cut { link }));
                self.hub.await_endings();
            }
            self.hub.set_endings_alarm(Some(now.after(ENDING_LOOK_NS)));
            return false;
        }
        self.hub.set_endings_alarm(None);
        for id in std::mem::take(&mut self.hub.endings) {
            // One that was reset meanwhile has nothing to show.
            if let Some((qp, hub)) = self.qp_and_hub(id)
                && qp.ending.postponed
            {
                requester::end(qp, hub);
            }
        }
        true
    }

    /// The peers that [`memory_is_quiet`](Self::memory_is_quiet) still waits for.
    #[must_use]
    pub fn restless(&self) -> Vec<Restless> {
        self.hub.restless()
    }

    /// The links of those that are in the same access as when they were seen. Others may wait for the same
    /// peers, and for more of them: who began an access later has time for it.
    #[must_use]
    pub fn still_restless(&self, seen: &[Restless]) -> Vec<LinkId> {
        let now = self.hub.restless().into_iter();
        now.filter(|it| seen.contains(it)).map(|it| it.link).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use quipu_iwarp::wire::hello::{Features, Kind, Reason, Service};

    fn hello(kind: Kind) -> Hello {
        Hello {
            kind,
            path_mtu: 5,
            features: Features::ALL,
            dest_qpn: 0x123456,
            source_qpn: 0x654321,
            rq_psn: 1,
            sq_psn: 2,
            service: Service::Rc,
            source_gid: [1; 16],
            dest_gid: [2; 16],
        }
    }

    #[test]
    fn messages_survive_the_way() {
        let end = LinkEnd { bell: 7, pd: 3 };
        for message in [
            LinkMessage::Request { tag: 1, hello: hello(Kind::Request), offset: 4096, end },
            LinkMessage::Accept { tag: 1, own_tag: 2, end },
            LinkMessage::Reject { tag: 1, hello: hello(Kind::Reject(Reason::NotReady)) },
            LinkMessage::Close { tag: 9 },
            LinkMessage::Fetch { tag: 9, sequence: 1 << 31, offset: 5, len: 6 },
            LinkMessage::Fetched { tag: 9, sequence: 4, offset: 5, bytes: vec![7; FETCHED_MAX] },
        ] {
            let mut bytes = Vec::new();
            message.encode(&mut bytes);
            assert!(bytes.len() <= LINK_MESSAGE_MAX);
            assert_eq!(LinkMessage::decode(&bytes), Some(message));
            for cut in 0..bytes.len() {
                let _ = LinkMessage::decode(&bytes[..cut]);
            }
        }
    }
}
