//! Datagrams that go out, and the time.

use super::link::Phase;
use super::packet::{HEAD, Head, Kind, OVERHEAD};
use super::sender::Source;
use super::{Control, DatagramFabric, LinkId, Memory, Place};

/// If the time comes later than this, the process has not run, and could not hear its peers.
const STALL_NS: u64 = 200_000_000;

impl<M: Memory> DatagramFabric<M> {
    /// Fills `out`, of [`Limits::datagram`](super::Limits) bytes at least, with the next datagram that is to
    /// be sent; where to, and its length. None if there is none now.
    pub fn poll_transmit(&mut self, now: u64, out: &mut [u8]) -> Option<(Place, usize)> {
        self.now = self.now.max(now);
        if let Some(Control { to, kind, numbers: (theirs, own), status }) = self.control.pop_front()
        {
            let head = Head { kind, seq: 0, to: theirs, from: own, ack: 0, later: 0 };
            head.encode(out);
            out[HEAD] = status;
            self.counters.sent += 1;
            return Some((to, HEAD + 1));
        }
        while let Some(id) = self.ready.pop_front() {
            let Some(link) = self.links.get_mut(id) else { continue };
            link.is_ready = false;
            let sent = self.transmit(id, out);
            if self.links.get(id).is_some_and(|link| link.has_due()) {
                self.wake(id);
            }
            if let Some(at) = self.links.get(id).map(|link| link.deadline(self.limits.give_up_ns)) {
                self.set_timer(at);
            }
            if sent.is_some() {
                self.counters.sent += 1;
                return sent;
            }
        }
        None
    }

    /// The next datagram of a link.
    fn transmit(&mut self, id: LinkId, out: &mut [u8]) -> Option<(Place, usize)> {
        let link = self.links.get_mut(id)?;
        let (ack, later) = link.receiver.acknowledgement();
        let mut head =
            Head { kind: Kind::Ack, seq: 0, to: link.theirs, from: link.own, ack, later };
        let peer = link.peer;
        match &mut link.phase {
            Phase::Connecting { hello, is_due, cookie, .. } => {
                if !std::mem::take(is_due) {
                    return None;
                }
                if peer.socket().is_some() {
                    return Some((peer, super::lookup::ask(link.own, out)));
                }
                (head.kind, head.to) = (Kind::Hello, *cookie);
                head.encode(out);
                let bytes = hello.to_bytes();
                out[HEAD..HEAD + bytes.len()].copy_from_slice(&bytes);
                return Some((peer, HEAD + bytes.len()));
            }
            Phase::Up { welcome: Some(welcome), owes_welcome } if *owes_welcome => {
                *owes_welcome = false;
                head.kind = Kind::Welcome;
                head.encode(out);
                let bytes = welcome.to_bytes();
                out[HEAD..HEAD + bytes.len()].copy_from_slice(&bytes);
                return Some((peer, HEAD + bytes.len()));
            }
            Phase::Up { .. } => {}
        }
        if let Some((seq, fragment, source, len)) = link.sender.take_due(self.now) {
            (head.kind, head.seq) = (Kind::Data, seq);
            head.encode(out);
            fragment.encode(&mut out[HEAD..]);
            let (from, to) = (fragment.offset as usize, OVERHEAD + len as usize);
            let payload = &mut out[OVERHEAD..to];
            let end = from + len as usize;
            let is_there = match source {
                Source::None => true,
                Source::Copy(bytes) => copy(bytes.get(from..end), payload),
                Source::Buffer(buffer) => {
                    let buffer = self.buffers.get(*buffer as usize);
                    copy(buffer.and_then(|buffer| buffer.get(from..end)), payload)
                }
                Source::Local(local) => self.memory.read(*local, from as u64, payload),
                Source::Shown(remote) => self.memory.read_shown(*remote, from as u64, payload),
            };
            if !is_there {
                // The program has deregistered it.
                self.fail(id);
                return None;
            }
            link.owes_ack = false;
            link.receiver.note_acknowledged();
            return Some((peer, to));
        }
        if !link.owes_ack && !link.owes_ping {
            return None;
        }
        if std::mem::take(&mut link.owes_ping) {
            head.kind = Kind::Ping;
        }
        link.owes_ack = false;
        link.receiver.note_acknowledged();
        head.encode(out);
        Some((peer, HEAD))
    }

    /// Brings the time, in nanoseconds of any clock that never goes back.
    pub fn handle_timeout(&mut self, now: u64) {
        self.now = self.now.max(now);
        if now < self.next_timer {
            return;
        }
        let stall = now - self.next_timer.max(self.timed_at).min(now);
        self.timed_at = now;
        if stall > STALL_NS {
            // The process was not there: what its peers have said meanwhile is still to be read.
            for id in self.links.ids() {
                let since = self.links.get_mut(id).and_then(|link| link.asked_since.as_mut());
                since.into_iter().for_each(|since| *since = since.saturating_add(stall));
            }
        }
        self.next_timer = u64::MAX;
        for id in self.links.ids() {
            let Some(link) = self.links.get_mut(id) else { continue };
            if link.handle_timeout(now, self.limits.give_up_ns) {
                self.fail(id);
                continue;
            }
            let at = link.deadline(self.limits.give_up_ns);
            if link.has_due() {
                self.wake(id);
            }
            self.set_timer(at.max(now + 1));
        }
    }

    /// When [`handle_timeout`](Self::handle_timeout) has something to do, if nothing happens before. Later
    /// than the time that was brought last.
    #[must_use]
    pub fn poll_timeout(&self) -> Option<u64> {
        (self.next_timer < u64::MAX).then_some(self.next_timer)
    }
}

/// Copies bytes of the same length, if they are there.
fn copy(from: Option<&[u8]>, to: &mut [u8]) -> bool {
    from.is_some_and(|from| {
        to.copy_from_slice(from);
        true
    })
}
