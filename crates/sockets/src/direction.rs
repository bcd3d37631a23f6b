//! One direction of a connection: five words and a ring of octets in shared memory.
//!
//! Both types only load, store and compare-and-swap words. Copying octets and calling the kernel
//! is the caller's part, between two calls of this module. Positions count the octets of the
//! stream from its beginning.
//!
//! A peer may write anything into the words. Every result that names octets of the ring lies
//! within the ring, and a contradiction is reported as a fault; the caller stops using the ring.

use std::iter;

/// The words of a direction. All accesses are sequentially consistent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Word {
    /// Position after the last octet in the ring, and the [state](State). Both ends swap it.
    Written,
    /// Position of the first octet that is not in TCP. The sender stores it.
    From,
    /// Position of the octet at offset 0 of the ring. The sender stores it while the ring is empty.
    Base,
    /// Position up to which the receiving program has read, and whether a withdrawal is going on.
    Read,
    /// Whether the receiver wants octets over TCP at once: see `Wish`. The receiver stores it.
    Wish,
}

/// Memory with the words of one direction.
pub trait Shared {
    /// The value of a word.
    fn load(&self, word: Word) -> u64;
    /// Sets a word.
    fn store(&self, word: Word, value: u64);
    /// Sets a word to `new` if it is `old`. Returns whether it did.
    fn swap(&self, word: Word, old: u64, new: u64) -> bool;
    /// Adds to a word, wrapping around.
    fn add(&self, word: Word, value: u64);
    /// Clears the bits of a word that `mask` does not have.
    fn mask(&self, word: Word, mask: u64);
}

/// Who carries what is sent next. In the low bits of [`Word::Written`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// TCP. The receiver may be asleep in the kernel.
    Tcp,
    /// TCP until the sender opens the ring. The receiver is awake.
    Consent,
    /// The ring. The receiver looks at it before it sleeps.
    Open,
}

const STATE_BITS: u32 = 2;
/// In [`Word::Read`]: the sender is sending octets of the ring over TCP.
const WITHDRAWING: u64 = 1;
/// In [`Word::Read`]: one withdrawal that has moved octets. Their number, modulo 512, tells a
/// receiver that copied octets before a withdrawal that they are no longer in the ring.
const WITHDRAWAL_ONE: u64 = 2;
/// In [`Word::Read`]: one octet, above the bit and the number.
const READ_ONE: u64 = 1024;
/// Largest position that [`Word::Read`] holds: 18 PB.
const LAST_POSITION: u64 = u64::MAX / READ_ONE - (1 << 32);
/// Attempts to swap a word that the other end keeps changing. An honest end changes each word at
/// most twice between two calls of its program, so only a hostile one exhausts this.
const ATTEMPTS: usize = 64;

/// Values of [`Word::Wish`].
pub mod wish {
    /// The receiver is awake, or nothing is in the ring.
    pub const NONE: u64 = 0;
    /// The receiver sleeps although the ring is open: what is sent next wakes it only over TCP.
    pub const WAKE: u64 = 1;
    /// The receiver will never look at the ring again.
    pub const PLAIN: u64 = 2;
}

/// Ends a withdrawal that has moved octets.
fn end_withdrawal<M: Shared>(memory: &M) {
    for _ in 0..ATTEMPTS {
        let read = memory.load(Word::Read);
        let (position, tag) = (read / READ_ONE, read % READ_ONE);
        let tag = ((tag + WITHDRAWAL_ONE) % READ_ONE) & !WITHDRAWING;
        if memory.swap(Word::Read, read, position * READ_ONE + tag) {
            return;
        }
    }
    memory.mask(Word::Read, !WITHDRAWING);
}

fn written(position: u64, state: State) -> u64 {
    position << STATE_BITS | state as u64
}

fn position_of(written: u64) -> u64 {
    written >> STATE_BITS
}

fn state_of(written: u64) -> State {
    match written & ((1 << STATE_BITS) - 1) {
        1 => State::Consent,
        2 => State::Open,
        // A peer that writes the fourth value gets TCP.
        _ => State::Tcp,
    }
}

/// Octets of a ring: one or two pieces, since they may wrap around its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pieces {
    /// Where the first piece begins.
    pub offset: usize,
    /// Length of all.
    pub len: usize,
    size: usize,
}

impl Pieces {
    fn new(from_base: u64, len: u64, size: usize) -> Self {
        let offset = (from_base as usize) & (size - 1);
        Self { offset, len: (len as usize).min(size), size }
    }

    /// Offset and length of each piece; all lie within the ring.
    pub fn iter(&self) -> impl Iterator<Item = (usize, usize)> + use<> {
        let first = self.len.min(self.size - self.offset);
        let second = self.len - first;
        iter::once((self.offset, first)).chain((second > 0).then_some((0, second)))
    }

    /// The first `len` octets of these.
    #[must_use]
    pub fn first(self, len: usize) -> Self {
        Self { len: self.len.min(len), ..self }
    }
}

/// Where the next octets go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Room {
    /// Send them over TCP.
    Tcp,
    /// Copy them here, then call [`Sender::publish`] with `head`.
    Ring {
        /// Position of the first of them.
        head: u64,
        /// The free part of the ring.
        pieces: Pieces,
    },
    /// The ring is full: wait until the receiver takes some, or withdraw.
    Full,
    /// The words contradict each other. Use TCP from now on.
    Fault,
}

/// What a sender takes back from the ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Withdrawal {
    /// The ring is empty and closed: everything that follows goes over TCP.
    Nothing,
    /// Send these over TCP, then call [`Sender::finish_withdrawal`].
    Octets {
        /// Position of the first of them.
        from: u64,
        /// Where they are.
        pieces: Pieces,
    },
    /// The words contradict each other. Use TCP from now on.
    Fault,
}

/// The sending end of a direction. One call at a time: the caller has a lock.
#[derive(Clone, Copy, Debug)]
pub struct Sender<'a, M> {
    memory: &'a M,
    size: usize,
}

impl<'a, M: Shared> Sender<'a, M> {
    /// The sending end, with a ring of `size` octets, a power of two.
    pub fn new(memory: &'a M, size: usize) -> Self {
        assert!(size.is_power_of_two(), "the size of a ring is a power of two, not {size}");
        Self { memory, size }
    }

    /// Where the next octets go. `sent` is the position of the first of them. With `may_open`, the
    /// ring is opened if the receiver consents: no other thread may be inside the kernel with
    /// octets of this direction.
    pub fn room(&self, sent: u64, may_open: bool) -> Room {
        let mut word = self.memory.load(Word::Written);
        if state_of(word) == State::Consent {
            let is_wanted = self.memory.load(Word::Wish) == wish::NONE;
            if !may_open || !is_wanted || sent > LAST_POSITION {
                return Room::Tcp;
            }
            self.memory.store(Word::Base, sent);
            self.memory.store(Word::From, sent);
            let open = written(sent, State::Open);
            if !self.memory.swap(Word::Written, word, open) {
                return Room::Tcp;
            }
            word = open;
        }
        if state_of(word) != State::Open {
            return Room::Tcp;
        }
        let head = position_of(word);
        if head != sent {
            return Room::Fault;
        }
        let Some(used) = self.used(head) else { return Room::Fault };
        if used == 0 {
            // What is small stays in the same few cache lines.
            self.memory.store(Word::Base, head);
            self.memory.store(Word::From, head.max(self.memory.load(Word::From)));
        }
        if used == self.size as u64 {
            return Room::Full;
        }
        let from_base = head.wrapping_sub(self.memory.load(Word::Base));
        let pieces = Pieces::new(from_base, self.size as u64 - used, self.size);
        Room::Ring { head, pieces }
    }

    /// Octets in the ring that are not read; none if the words contradict each other.
    fn used(&self, head: u64) -> Option<u64> {
        let read = self.memory.load(Word::Read) / READ_ONE;
        let first = read.max(self.memory.load(Word::From));
        head.checked_sub(first).filter(|used| *used <= self.size as u64)
    }

    /// Octets in the ring that are not read, and the position up to which the receiver has read.
    /// None if the ring is not open.
    pub fn unread(&self) -> Option<(u64, u64)> {
        let word = self.memory.load(Word::Written);
        if state_of(word) != State::Open {
            return None;
        }
        let read = self.memory.load(Word::Read) / READ_ONE;
        self.used(position_of(word)).map(|used| (used, read))
    }

    /// Whether the receiver has octets of TCP to read before those in the ring.
    pub fn is_tcp_unread(&self) -> bool {
        self.memory.load(Word::Read) / READ_ONE < self.memory.load(Word::From)
    }

    /// Lets the receiver read `len` octets from position `head` on. If this fails, they are not in
    /// the ring: the receiver has revoked its consent, and they are to go over TCP.
    #[must_use]
    pub fn publish(&self, head: u64, len: usize) -> bool {
        let after = written(head.wrapping_add(len as u64), State::Open);
        self.memory.swap(Word::Written, written(head, State::Open), after)
    }

    /// Whether the receiver wants the octets of the ring over TCP at once. Ask after each
    /// [`publish`](Self::publish).
    pub fn must_withdraw(&self) -> bool {
        self.memory.load(Word::Wish) != wish::NONE
    }

    /// Begins to take the octets of the ring back. The receiver reads TCP only until
    /// [`finish_withdrawal`](Self::finish_withdrawal).
    pub fn withdraw(&self) -> Withdrawal {
        for _ in 0..ATTEMPTS {
            let word = self.memory.load(Word::Written);
            if state_of(word) != State::Open {
                // Nothing is in the ring; a consent that is not used stays.
                return Withdrawal::Nothing;
            }
            let head = position_of(word);
            match self.used(head) {
                None => return Withdrawal::Fault,
                Some(0) => {
                    if self.memory.swap(Word::Written, word, written(head, State::Tcp)) {
                        return Withdrawal::Nothing;
                    }
                    continue;
                }
                Some(_) => {}
            }
            let read = self.memory.load(Word::Read);
            if !self.memory.swap(Word::Read, read, read | WITHDRAWING) {
                continue;
            }
            let from = (read / READ_ONE).max(self.memory.load(Word::From));
            let from_base = from.wrapping_sub(self.memory.load(Word::Base));
            return match head.checked_sub(from) {
                Some(len) if len <= self.size as u64 => {
                    Withdrawal::Octets { from, pieces: Pieces::new(from_base, len, self.size) }
                }
                _ => {
                    self.memory.mask(Word::Read, !WITHDRAWING);
                    Withdrawal::Fault
                }
            };
        }
        Withdrawal::Fault
    }

    /// Says that TCP has taken `sent` of the octets that [`withdraw`](Self::withdraw) gave.
    /// Returns whether the ring is empty and closed: otherwise TCP takes no more for now, and what
    /// is in the ring still comes before what is sent next.
    pub fn finish_withdrawal(&self, from: u64, sent: usize) -> bool {
        let from = from.wrapping_add(sent as u64);
        self.memory.store(Word::From, from);
        end_withdrawal(self.memory);
        let word = self.memory.load(Word::Written);
        if state_of(word) != State::Open {
            return true;
        }
        let head = position_of(word);
        if head == from {
            // If this fails, the receiver has closed it.
            let _ = self.memory.swap(Word::Written, word, written(head, State::Tcp));
            return true;
        }
        self.used(head) == Some(0)
    }
}

/// Where the next octets are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Look {
    /// Copy from here, then call [`Receiver::take`] with `ticket`.
    Ring {
        /// Names the octets, and this state of the ring.
        ticket: u64,
        /// What is unread.
        pieces: Pieces,
    },
    /// In TCP, if anywhere.
    Tcp,
    /// Nothing is in the ring, which is open, nor in TCP. The end of the stream may be there.
    Empty,
    /// The sender is sending octets of the ring over TCP: read TCP.
    Withdrawing,
    /// The words contradict each other. Read TCP from now on.
    Fault,
}

/// Whether a receiver may sleep in the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Revoked {
    /// What is sent from now on goes over TCP and wakes the receiver.
    Yes,
    /// Octets are in the ring: read them, or [`Receiver::wish`] for them over TCP.
    Unread,
}

/// The receiving end of a direction. Any number of threads may look and take at once.
#[derive(Clone, Copy, Debug)]
pub struct Receiver<'a, M> {
    memory: &'a M,
    size: usize,
}

impl<'a, M: Shared> Receiver<'a, M> {
    /// The receiving end, with a ring of `size` octets, a power of two.
    pub fn new(memory: &'a M, size: usize) -> Self {
        assert!(size.is_power_of_two(), "the size of a ring is a power of two, not {size}");
        Self { memory, size }
    }

    /// Position up to which the program has read.
    pub fn position(&self) -> u64 {
        self.memory.load(Word::Read) / READ_ONE
    }

    /// Says how far the program has read by other means. Nobody else reads meanwhile, and the ring
    /// has never been open, or is not.
    pub fn set_position(&self, position: u64) {
        self.memory.store(Word::Read, position * READ_ONE);
    }

    /// Where the next octets are.
    #[inline]
    pub fn look(&self) -> Look {
        for _ in 0..ATTEMPTS {
            let read = self.memory.load(Word::Read);
            let word = self.memory.load(Word::Written);
            if read & WITHDRAWING != 0 {
                return Look::Withdrawing;
            }
            if state_of(word) != State::Open {
                return Look::Tcp;
            }
            let (at, head) = (read / READ_ONE, position_of(word));
            if at < self.memory.load(Word::From) {
                return Look::Tcp;
            }
            if head <= at {
                return Look::Empty;
            }
            let from_base = at.wrapping_sub(self.memory.load(Word::Base));
            if self.memory.load(Word::Read) != read || self.memory.load(Word::Written) != word {
                continue;
            }
            return match head - at {
                len if len > self.size as u64 => Look::Fault,
                len => Look::Ring { ticket: read, pieces: Pieces::new(from_base, len, self.size) },
            };
        }
        Look::Fault
    }

    /// Whether octets are in the ring that the program has not read. True also where octets in TCP
    /// come before them; false during a withdrawal, whose octets the kernel reports.
    #[inline]
    pub fn has_unread(&self) -> bool {
        let word = self.memory.load(Word::Written);
        if state_of(word) != State::Open {
            return false;
        }
        let read = self.memory.load(Word::Read);
        let first = (read / READ_ONE).max(self.memory.load(Word::From));
        read & WITHDRAWING == 0 && position_of(word) > first
    }

    /// Whether the next octets are on their way over TCP: the sender has sent them before it opened the
    /// ring, or takes them back from it. The kernel of the receiver may not have them yet.
    #[inline]
    pub fn expects_tcp(&self) -> bool {
        let read = self.memory.load(Word::Read);
        read & WITHDRAWING != 0 || read / READ_ONE < self.memory.load(Word::From)
    }

    /// Number of octets in the ring that the program has not read.
    pub fn unread(&self) -> u64 {
        let word = self.memory.load(Word::Written);
        if state_of(word) != State::Open {
            return 0;
        }
        let first = self.position().max(self.memory.load(Word::From));
        position_of(word).saturating_sub(first).min(self.size as u64)
    }

    /// Position after the last octet in the ring, if it is open. It grows with each arrival.
    #[inline]
    pub fn head(&self) -> Option<u64> {
        let word = self.memory.load(Word::Written);
        (state_of(word) == State::Open).then(|| position_of(word))
    }

    /// Takes the first `len` octets that [`look`](Self::look) showed. If this fails, another thread
    /// took them, or the sender takes them back: what was copied is to be forgotten.
    #[must_use]
    pub fn take(&self, ticket: u64, len: usize) -> bool {
        self.memory.swap(Word::Read, ticket, ticket.wrapping_add(len as u64 * READ_ONE))
    }

    /// Counts octets that were read from TCP.
    pub fn account(&self, len: usize) {
        self.memory.add(Word::Read, len as u64 * READ_ONE);
    }

    /// Promises to look at the ring before sleeping. No thread of this end sleeps in the kernel for
    /// this connection, and all that was read is accounted for.
    pub fn consent(&self) {
        if self.memory.load(Word::Wish) == wish::WAKE {
            self.memory.store(Word::Wish, wish::NONE);
        }
        let word = self.memory.load(Word::Written);
        if state_of(word) == State::Tcp {
            // If this fails, a thread of this end was faster.
            let _ = self.memory.swap(Word::Written, word, written(0, State::Consent));
        }
    }

    /// Takes the promise back, in order to sleep in the kernel.
    pub fn revoke(&self) -> Revoked {
        for _ in 0..ATTEMPTS {
            let word = self.memory.load(Word::Written);
            let head = position_of(word);
            match state_of(word) {
                State::Tcp => return Revoked::Yes,
                State::Consent => {}
                State::Open if head > self.position().max(self.memory.load(Word::From)) => {
                    return Revoked::Unread;
                }
                State::Open => {}
            }
            if self.memory.swap(Word::Written, word, written(head, State::Tcp)) {
                return Revoked::Yes;
            }
        }
        // The sender is busy sending: there will be something to read.
        Revoked::Unread
    }

    /// Says that TCP has ended or failed, so that no more octets come over it. A withdrawal that the
    /// sender did not live to finish ends here: what TCP did not deliver is read from the ring.
    pub fn tcp_has_ended(&self) {
        if self.memory.load(Word::Read) & WITHDRAWING != 0 {
            self.memory.store(Word::From, self.position());
            end_withdrawal(self.memory);
        }
    }

    /// Asks for octets of the ring over TCP, when the program sleeps although some are unread.
    /// The caller looks once more before it sleeps, whether [`head`](Self::head) has grown.
    pub fn wish(&self, kind: u64) {
        if self.memory.load(Word::Wish) != wish::PLAIN {
            self.memory.store(Word::Wish, kind);
        }
    }
}
