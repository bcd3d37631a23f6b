//! Where other engines reach this one: TCP ports that are opened as queue pairs need numbers.

use std::io;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;

use super::tuning::Tuning;
use crate::own::OwnAddresses;
use crate::sys;

/// Connections that the kernel keeps for us while nobody looks.
const BACKLOG: i32 = 1024;

/// A listening socket.
pub(crate) struct Listener {
    pub(crate) fd: OwnedFd,
    pub(crate) port: u16,
}

impl Listener {
    /// Listens on a port that the kernel chooses, at all addresses of the engine. Accepted sockets inherit
    /// the tuning.
    pub(crate) fn open(own: &OwnAddresses, tuning: &Tuning) -> io::Result<Self> {
        sys::at_first_that_works(&own.listening(0), |at| Self::open_at(at, tuning))
    }

    fn open_at(at: SocketAddr, tuning: &Tuning) -> io::Result<Self> {
        let fd = sys::tcp_socket(at.ip())?;
        tuning.apply(&fd)?;
        sys::take_both_families(&fd, at.ip())?;
        sys::bind(&fd, at)?;
        sys::listen(&fd, BACKLOG)?;
        let port = sys::local_address(&fd)?.port();
        Ok(Self { fd, port })
    }
}

/// What an attempt to accept gave.
pub(crate) enum Accepted<A> {
    /// A connection, and from where.
    Connection(OwnedFd, A),
    /// No connection waits.
    Nothing,
    /// One that failed or was turned away; there may be more.
    Refused,
    /// None can be taken, nor turned away: the listener would stay readable for ever.
    Stuck,
    /// None can be taken now, for another reason, which may pass.
    Failed,
}

/// For how long nobody looks at a listener of which none can be taken.
const REST_NS: u64 = 100_000_000;

/// Listeners that nobody looks at for a while.
pub(crate) struct Resting<K> {
    keys: Vec<K>,
    until: u64,
}

impl<K> Default for Resting<K> {
    fn default() -> Self {
        Self { keys: Vec::new(), until: 0 }
    }
}

impl<K: PartialEq> Resting<K> {
    /// One more, which is out of epoll's set.
    pub(crate) fn add(&mut self, key: K, now: u64) {
        if !self.keys.contains(&key) {
            self.keys.push(key);
        }
        self.until = now.saturating_add(REST_NS);
    }

    /// When they are to be looked at again.
    pub(crate) fn over(&self) -> Option<u64> {
        (!self.keys.is_empty()).then_some(self.until)
    }

    /// Those that are, which go back into the set.
    pub(crate) fn wake(&mut self, now: u64) -> Vec<K> {
        if now >= self.until { std::mem::take(&mut self.keys) } else { Vec::new() }
    }
}

/// Accepts with a descriptor in reserve.
///
/// When the process is out of descriptors, connections that wait would keep the listener readable
/// for ever. The reserve is then given up for a moment, to take such a connection and close it.
pub(crate) struct Acceptor {
    reserve: Option<OwnedFd>,
}

impl Acceptor {
    /// With its reserve.
    pub(crate) fn new() -> io::Result<Self> {
        Ok(Self { reserve: Some(spare_descriptor()?) })
    }

    /// Takes the next connection of a listener.
    pub(crate) fn accept(&mut self, listener: &Listener) -> Accepted<SocketAddr> {
        self.accept_by(|| sys::accept(&listener.fd))
    }

    /// Takes the next connection that `take` gives.
    pub(crate) fn accept_by<A>(
        &mut self,
        take: impl Fn() -> io::Result<(OwnedFd, A)>,
    ) -> Accepted<A> {
        match sys::with_more_descriptors(&take) {
            Ok((fd, from)) => {
                self.refill();
                Accepted::Connection(fd, from)
            }
            Err(e) if sys::would_block(&e) => Accepted::Nothing,
            Err(e) => match e.raw_os_error() {
                Some(libc::EMFILE | libc::ENFILE) => self.turn_away(take),
                // The connection was reset before it was taken (accept(2)); the next may be well.
                Some(libc::ECONNABORTED | libc::EPROTO) => Accepted::Refused,
                _ => {
                    tracing::warn!(error = %e, "cannot accept connections");
                    Accepted::Failed
                }
            },
        }
    }

    /// Gets a new reserve if there is none.
    pub(crate) fn refill(&mut self) {
        if self.reserve.is_none() {
            self.reserve = spare_descriptor().ok();
        }
    }

    fn turn_away<A>(&mut self, take: impl Fn() -> io::Result<(OwnedFd, A)>) -> Accepted<A> {
        self.reserve = None;
        drop(sys::with_more_descriptors(take));
        self.refill();
        if self.reserve.is_some() {
            tracing::warn!("out of file descriptors: a connection is refused; raise ulimit -n");
            return Accepted::Refused;
        }
        // Somebody else has taken the descriptor meanwhile.
        tracing::warn!("out of file descriptors: cannot accept a connection; raise ulimit -n");
        Accepted::Stuck
    }
}

/// One descriptor that is good for nothing. Takes no more than that one, even for a moment.
fn spare_descriptor() -> io::Result<OwnedFd> {
    sys::EventFd::new().map(sys::EventFd::into_fd)
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    #[test]
    fn a_caller_without_room_is_taken_and_turned_away() {
        let mut acceptor = Acceptor::new().unwrap();
        let calls = Cell::new(0);
        // The whole system is out of files, but for what the reserve gives back.
        let outcome = acceptor.accept_by(|| {
            calls.set(calls.get() + 1);
            match calls.get() {
                1 => Err(io::Error::from_raw_os_error(libc::ENFILE)),
                _ => spare_descriptor().map(|fd| (fd, ())),
            }
        });
        assert!(matches!(outcome, Accepted::Refused));
        assert!(calls.get() == 2 && acceptor.reserve.is_some());

        acceptor.reserve = None;
        let outcome = acceptor.accept_by(|| spare_descriptor().map(|fd| (fd, ())));
        assert!(matches!(outcome, Accepted::Connection(_, ())) && acceptor.reserve.is_some());
    }

    #[test]
    fn a_listener_that_none_can_be_taken_from_rests() {
        let mut acceptor = Acceptor::new().unwrap();
        let fails = |error| move || Err::<(OwnedFd, ()), _>(io::Error::from_raw_os_error(error));
        assert!(matches!(acceptor.accept_by(fails(libc::ENOBUFS)), Accepted::Failed));
        let mut resting = Resting::default();
        assert_eq!(resting.over(), None);
        resting.add(7, 1000);
        resting.add(7, 2000);
        assert_eq!(resting.over(), Some(2000 + REST_NS));
        assert!(resting.wake(2000).is_empty());
        assert_eq!(resting.wake(2000 + REST_NS), [7]);
        assert_eq!(resting.over(), None);
    }

    /// As a thread of the program does that wants descriptors itself.
    #[test]
    fn who_has_lost_the_reserve_to_somebody_else_cannot_turn_callers_away() {
        const TEST: &str = "net::listener::tests::\
            who_has_lost_the_reserve_to_somebody_else_cannot_turn_callers_away";
        if !crate::testing::is_alone(TEST) {
            return;
        }
        crate::testing::limit_descriptors(256);
        let mut acceptor = Acceptor::new().unwrap();
        let fill: Vec<_> = std::iter::from_fn(|| std::fs::File::open("/dev/null").ok()).collect();
        let taken = std::cell::RefCell::new(None);
        let outcome = acceptor.accept_by(|| {
            *taken.borrow_mut() = std::fs::File::open("/dev/null").ok();
            Err::<(OwnedFd, ()), _>(io::Error::from_raw_os_error(libc::EMFILE))
        });
        assert!(matches!(outcome, Accepted::Stuck));
        drop(fill);
    }
}
