//! What passes on the sockets of connection management, for who captures packets. Without a capture nothing
//! is kept.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;

use quipu_cm::StreamKey;
use quipu_observe::Mark;

use super::address::canonical;
use crate::sys;
use crate::tap::Tap;

/// Something that passed.
pub(super) enum Sight {
    /// A stream stands.
    Opened { stream: StreamKey, local: SocketAddr, remote: SocketAddr, active: bool },
    /// Bytes passed on it.
    Passed { stream: StreamKey, outgoing: bool, bytes: Box<[u8]> },
    /// It is over.
    Closed { stream: StreamKey, by_peer: bool },
    /// A datagram passed.
    Datagram { outgoing: bool, from: SocketAddr, to: SocketAddr, bytes: Box<[u8]> },
}

/// What was seen and is not shown yet; `None` where nobody looks.
#[derive(Default)]
pub(super) struct Sights(Option<VecDeque<Sight>>);

impl Sights {
    /// Keeps what passes, if `watched`.
    pub(super) fn new(watched: bool) -> Self {
        Self(watched.then(VecDeque::new))
    }

    /// Whether anybody looks.
    pub(super) fn watch(&self) -> bool {
        self.0.is_some()
    }

    /// Whether there is something to show.
    pub(super) fn is_empty(&self) -> bool {
        self.0.as_ref().is_none_or(VecDeque::is_empty)
    }

    /// A connection stands, on which this side has said `first` if it has made it.
    pub(super) fn opened(
        &mut self,
        stream: StreamKey,
        fd: &OwnedFd,
        remote: SocketAddr,
        first: Option<&[u8]>,
    ) {
        let Some(sights) = &mut self.0 else { return };
        let Ok(local) = sys::local_address(fd) else { return };
        let (local, remote) = (canonical(local), canonical(remote));
        sights.push_back(Sight::Opened { stream, local, remote, active: first.is_some() });
        if let Some(first) = first {
            self.passed(stream, true, first);
        }
    }

    /// Bytes passed.
    pub(super) fn passed(&mut self, stream: StreamKey, outgoing: bool, bytes: &[u8]) {
        if let Some(sights) = &mut self.0 {
            sights.push_back(Sight::Passed { stream, outgoing, bytes: bytes.into() });
        }
    }

    /// A stream is over.
    pub(super) fn closed(&mut self, stream: StreamKey, by_peer: bool) {
        if let Some(sights) = &mut self.0 {
            sights.push_back(Sight::Closed { stream, by_peer });
        }
    }

    /// A datagram was sent through a socket, from `source` unless that is bound to an address.
    pub(super) fn sent(
        &mut self,
        fd: &OwnedFd,
        source: Option<SocketAddr>,
        to: SocketAddr,
        bytes: &[u8],
    ) {
        let Some(sights) = &mut self.0 else { return };
        let Some(from) = source.or_else(|| sys::local_address(fd).ok()) else { return };
        let (from, to) = (canonical(from), canonical(to));
        sights.push_back(Sight::Datagram { outgoing: true, from, to, bytes: bytes.into() });
    }

    /// A datagram has come.
    pub(super) fn received(&mut self, from: SocketAddr, to: SocketAddr, bytes: &[u8]) {
        if let Some(sights) = &mut self.0 {
            sights.push_back(Sight::Datagram { outgoing: false, from, to, bytes: bytes.into() });
        }
    }

    /// Shows everything to a capture.
    pub(super) fn show(&mut self, tap: &mut Tap) {
        for sight in self.0.iter_mut().flat_map(|sights| sights.drain(..)) {
            match sight {
                Sight::Opened { stream, local, remote, active } => {
                    tap.managed_opened(stream, local, remote, active);
                }
                Sight::Passed { stream, outgoing, bytes } => {
                    tap.managed_passed(stream, outgoing, &bytes);
                }
                Sight::Closed { stream, by_peer } => tap.managed_closed(stream, by_peer),
                Sight::Datagram { outgoing, from, to, bytes } => {
                    tap.datagram_passed(outgoing, (from, to), &bytes, Mark::default());
                }
            }
        }
    }
}
