//! Whether the host of a stream's peer is alive. A process that is stopped reads nothing, but its kernel
//! still answers, so requests wait for it. TCP's own user timeout (RFC 5482) would end such a connection as
//! soon as its window has been closed for that long. So it is not used: this module asks the kernel what the
//! peer's TCP has answered. TCP's keepalive does the same for streams on which nothing is owed.

use std::io;
use std::os::fd::OwnedFd;

use libc::c_int;
use quipu_nic::{ConnId, Loss, Time};

use super::Net;
use super::stream::{Stream, set_user_timeout};
use super::token::Slot;
use crate::link::socket::has_unread;
use crate::sys;
use crate::tap::Adapter;

/// The shortest limit: a peer's kernel waits 200 ms before it sends a lost segment again, a process of a busy
/// machine may be kept from its processor for as long, and two signs of life are to fit in.
const LEAST_LIMIT_NS: u64 = 3_000_000_000;
/// Shortest time between two looks at all streams.
const LOOK_NS: u64 = 100_000_000;
/// A stream that has been silent for long without enough questions is looked at after this part of its limit.
const LOOKS_PER_LIMIT: u64 = 4;
/// Questions without an answer that show a silent host: segments sent again, or probes of a closed window.
/// TCP waits longer before each, so fewer say nothing.
const UNANSWERED: u8 = 2;

/// Silence of a stream that owes nothing after which its peer is asked for a sign of life, at most: the peer
/// may wait for an answer, and many that do not should cost little.
const KEEP_ALIVE_SECONDS: c_int = 5;
/// The first question comes after this part of the limit: a network may lose one.
const KEEP_ALIVE_PART: c_int = 4;
/// Most questions before the kernel gives up (`MAX_TCP_KEEPCNT`).
const KEEP_ALIVE_COUNT: c_int = 127;
const LONGEST_SECONDS: u64 = 32_767;

/// `TCP_RTO_MAX_MS` of Linux 6.15, which the C library does not name yet.
const TCP_RTO_MAX_MS: c_int = 44;
const RTO_MAX_MS: std::ops::RangeInclusive<u64> = 1_000..=120_000;

/// What TCP says of a connection (TCP_INFO in tcp(7)).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Answers {
    /// Segments sent again, or probes of a closed window, since the peer last acknowledged.
    unanswered: u8,
    /// Nanoseconds since something came of the peer.
    silent_ns: u64,
}

impl Answers {
    /// Asks the kernel.
    fn of(fd: &OwnedFd) -> io::Result<Self> {
        // struct tcp_info of linux/tcp.h. Octets 2 and 3 count retransmissions and probes. The words at 52
        // and 56 are the milliseconds since data and since an acknowledgement came.
        let mut info = [0; 60];
        let len = sys::read_option(fd, libc::IPPROTO_TCP, libc::TCP_INFO, &mut info)?;
        if len < info.len() {
            return Err(io::ErrorKind::Unsupported.into());
        }
        let word =
            |at: usize| u32::from_ne_bytes([info[at], info[at + 1], info[at + 2], info[at + 3]]);
        let silent_ms = word(52).min(word(56));
        Ok(Self { unanswered: info[2].max(info[3]), silent_ns: u64::from(silent_ms) * 1_000_000 })
    }

    /// Nanoseconds after which it is worth asking again; `None` if the host is silent.
    fn patience_ns(self, limit_ns: u64) -> Option<u64> {
        match limit_ns.checked_sub(self.silent_ns) {
            Some(left) if left > 0 => Some(left),
            _ if self.unanswered < UNANSWERED => Some(limit_ns / LOOKS_PER_LIMIT),
            _ => None,
        }
    }
}

/// Which streams are looked at, and when.
#[derive(Debug, Default)]
pub(super) struct Watch {
    due: Option<Time>,
    /// Those on which something was sent since the last look that found everything acknowledged.
    owing: Vec<Slot>,
}

impl Watch {
    /// When the streams are to be looked at next.
    #[inline]
    pub(super) const fn due(&self) -> Option<Time> {
        self.due
    }

    fn add(&mut self, slot: Slot, at: Time) {
        self.owing.push(slot);
        self.due = Some(self.due.map_or(at, |due| due.min(at)));
    }
}

/// What a look at one stream found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Look {
    /// Everything was acknowledged, or the stream is being closed.
    Over,
    Again(Time),
    Silent,
}

impl Stream {
    /// Whether the next bytes that are sent are to be noted.
    #[inline]
    pub(super) const fn begins_to_owe(&self) -> bool {
        self.silence_ns.is_some() && self.owed_since.is_none()
    }

    fn look(&self, now: Time) -> Look {
        let (Some(limit_ns), Some(since), None) = (self.silence_ns, self.owed_since, self.deadline)
        else {
            return Look::Over;
        };
        if !has_unread(&self.fd) {
            return Look::Over;
        }
        let over = since.after(limit_ns);
        if over > now {
            return Look::Again(over);
        }
        match Answers::of(&self.fd).map(|answers| answers.patience_ns(limit_ns)) {
            Ok(None) => Look::Silent,
            Ok(Some(patience)) => Look::Again(now.after(patience)),
            // The kernel limits these by itself.
            Err(_) => Look::Over,
        }
    }
}

impl Net {
    /// Sets after which silence of its host a peer counts as gone.
    pub(crate) fn limit_silence(&mut self, now: Time, conn: ConnId, limit_ns: Option<u64>) {
        let Some(&slot) = self.by_conn.get(&conn) else { return };
        let Some(stream) = self.streams.get_mut(slot) else { return };
        let limit_ns = limit_ns.map(|limit| limit.max(LEAST_LIMIT_NS));
        stream.silence_ns = limit_ns;
        if let Err(error) = limit_silence(&stream.fd, limit_ns) {
            tracing::warn!(%error, "cannot set keepalive: a peer that vanishes is noticed late");
        }
        if stream.begins_to_owe() {
            self.note_owing(now, slot);
        }
    }

    /// Something was sent on a stream that had been acknowledged as a whole, as far as is known.
    #[cold]
    pub(super) fn note_owing(&mut self, now: Time, slot: Slot) {
        let Some(stream) = self.streams.get_mut(slot) else { return };
        if let Some(limit_ns) = stream.silence_ns {
            stream.owed_since = Some(now);
            self.silence.add(slot, now.after(limit_ns));
        }
    }

    /// Looks at the streams on which something was sent. Ends those whose peers' hosts do not answer.
    pub(super) fn look_for_silence(&mut self, adapter: &mut Adapter, now: Time) {
        if self.silence.due.is_none_or(|due| due > now) {
            return;
        }
        self.silence.due = None;
        for slot in std::mem::take(&mut self.silence.owing) {
            let Some(stream) = self.streams.get_mut(slot) else { continue };
            match stream.look(now) {
                Look::Over => stream.owed_since = None,
                Look::Again(at) => self.silence.add(slot, at.max(now.after(LOOK_NS))),
                Look::Silent => {
                    tracing::debug!(peer = %stream.peer, "the host of the peer does not answer");
                    self.lose(adapter, now, slot, Loss::TimedOut);
                }
            }
        }
    }
}

/// Has the kernel ask a peer that owes nothing for signs of life, and end the connection if none comes for
/// `limit_ns`. `None`: the kernel does not ask.
fn limit_silence(fd: &OwnedFd, limit_ns: Option<u64>) -> io::Result<()> {
    let tcp = |name, value| sys::set_option(fd, libc::IPPROTO_TCP, name, value);
    let milliseconds = limit_ns.map_or(0, |limit| limit.div_ceil(1_000_000));
    // Where the kernel does not say what was answered (sandboxes, emulators), it decides alone.
    let alone = Answers::of(fd).is_err();
    set_user_timeout(fd, if alone { milliseconds.min(c_int::MAX as u64) as c_int } else { 0 })?;
    let seconds = milliseconds.div_ceil(1000).min(LONGEST_SECONDS) as c_int;
    let idle = (seconds / KEEP_ALIVE_PART).clamp(1, KEEP_ALIVE_SECONDS);
    let rest = (seconds - idle).max(1);
    let interval = (rest + KEEP_ALIVE_COUNT - 1) / KEEP_ALIVE_COUNT;
    tcp(libc::TCP_KEEPIDLE, idle)?;
    tcp(libc::TCP_KEEPINTVL, interval)?;
    tcp(libc::TCP_KEEPCNT, (rest + interval - 1) / interval)?;
    if limit_ns.is_some() {
        // A peer that is stopped for long is probed at ever longer intervals. Older kernels bound them by two
        // minutes only.
        let longest =
            (milliseconds / LOOKS_PER_LIMIT).clamp(*RTO_MAX_MS.start(), *RTO_MAX_MS.end());
        if let Err(error) = tcp(TCP_RTO_MAX_MS, longest as c_int) {
            tracing::trace!(%error, "the kernel does not bound the time between probes");
        }
    }
    sys::set_option(fd, libc::SOL_SOCKET, libc::SO_KEEPALIVE, c_int::from(limit_ns.is_some()))
}

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, TcpStream};
    use std::os::fd::AsRawFd;
    use std::time::{Duration, Instant};

    use super::*;
    use crate::net::stream::{Phase, loss};

    const LIMIT_NS: u64 = LEAST_LIMIT_NS;

    /// Whether a socket drops all that comes.
    fn deafen(fd: &OwnedFd, deaf: bool) {
        // BPF_RET | BPF_K: so many bytes of each packet are kept.
        let mut nothing = libc::sock_filter { code: 6, jt: 0, jf: 0, k: 0 };
        let program = libc::sock_fprog { len: 1, filter: &raw mut nothing };
        let option = if deaf { libc::SO_ATTACH_FILTER } else { libc::SO_DETACH_FILTER };
        let (value, len) = ((&raw const program).cast(), size_of_val(&program) as libc::socklen_t);
        // SAFETY: the kernel reads a program of one instruction, both of which live for the call.
        let set = unsafe { libc::setsockopt(fd.as_raw_fd(), libc::SOL_SOCKET, option, value, len) };
        assert_eq!(set, 0);
    }

    fn pass(milliseconds: u64) {
        std::thread::sleep(Duration::from_millis(milliseconds));
    }

    /// Two ends of a connection; the first one has a limit.
    fn connection() -> (Stream, OwnedFd) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let peer = listener.local_addr().unwrap();
        let ours = OwnedFd::from(TcpStream::connect(peer).unwrap());
        let theirs = OwnedFd::from(listener.accept().unwrap().0);
        limit_silence(&ours, Some(LIMIT_NS)).unwrap();
        let mut stream = Stream::new(ours, ConnId(0), peer, Phase::Open, 0);
        stream.silence_ns = Some(LIMIT_NS);
        (stream, theirs)
    }

    /// Time-outs of queue pairs as in `ibv_rc_pingpong`, code 14, 7 retries.
    #[test]
    fn an_idle_connection_outlives_a_lost_packet() {
        let (Stream { fd: ours, .. }, theirs) = connection();
        pass(4600);
        deafen(&theirs, true);
        pass(900);
        deafen(&theirs, false);
        pass(1500);
        sys::socket_error(&ours).unwrap();
        assert_eq!(sys::send(&ours, b"here").unwrap(), 4);
        // One that stays away is found out.
        deafen(&theirs, true);
        pass(5500);
        assert_eq!(loss(&sys::socket_error(&ours).unwrap_err()), Loss::TimedOut);
    }

    /// Fills the socket of a peer that reads nothing.
    fn fill(stream: &Stream) {
        sys::set_option(&stream.fd, libc::SOL_SOCKET, libc::SO_SNDBUF, 1 << 16).unwrap();
        let piece = [7; 1 << 16];
        let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
        let (fd, bytes, len) = (stream.fd.as_raw_fd(), piece.as_ptr().cast(), piece.len());
        // The peer's kernel takes a while to take in what fits.
        let end = Instant::now() + Duration::from_millis(500);
        while Instant::now() < end {
            // SAFETY: the kernel reads `len` bytes of a live array.
            if unsafe { libc::send(fd, bytes, len, flags) } < 0 {
                pass(20);
            }
        }
        assert!(has_unread(&stream.fd));
    }

    /// As a peer whose process is stopped: its window is closed, and its kernel answers probes.
    #[test]
    fn a_full_peer_is_waited_for_until_its_host_is_silent() {
        let (mut stream, theirs) = connection();
        stream.owed_since = Some(Time(0));
        fill(&stream);
        let start = Instant::now();
        let at = |start: Instant| Time(LIMIT_NS).after(start.elapsed().as_nanos() as u64);
        while start.elapsed() < Duration::from_nanos(2 * LIMIT_NS) {
            assert!(matches!(stream.look(at(start)), Look::Again(_)), "{:?}", start.elapsed());
            pass(100);
        }
        sys::socket_error(&stream.fd).unwrap();
        deafen(&theirs, true);
        let start = Instant::now();
        while stream.look(at(start)) != Look::Silent {
            // The window has been closed for 6 s, so that TCP waits up to 6.4 s and 12.8 s for its probes.
            assert!(
                start.elapsed() < Duration::from_secs(25),
                "a host that is gone goes unnoticed"
            );
            pass(100);
        }
    }

    #[test]
    fn a_host_that_does_not_acknowledge_is_silent_in_time() {
        let (mut stream, theirs) = connection();
        deafen(&theirs, true);
        assert_eq!(sys::send(&stream.fd, b"here").unwrap(), 4);
        stream.owed_since = Some(Time(0));
        let start = Instant::now();
        let now = |start: Instant| Time(start.elapsed().as_nanos() as u64);
        while stream.look(now(start)) != Look::Silent {
            assert!(start.elapsed() < Duration::from_nanos(LIMIT_NS + LIMIT_NS / 4));
            pass(20);
        }
        assert!(start.elapsed() >= Duration::from_nanos(LIMIT_NS));
    }

    #[test]
    fn only_a_host_that_does_not_answer_at_all_is_silent() {
        let patience = |unanswered, silent_ns| Answers { unanswered, silent_ns }.patience_ns(4_000);
        assert_eq!(patience(2, 4_000), None);
        assert_eq!(patience(1, 9_000), Some(1_000), "TCP has not asked often enough");
        assert_eq!(patience(9, 3_999), Some(1));
    }
}
