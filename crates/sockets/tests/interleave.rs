//! Both ends of a direction, interleaved at every access to a word, to an octet of the ring and to
//! TCP. A seed draws the order, the sizes and the moment at which the sender is killed. The octets
//! read must be exactly those written, and nobody may sleep for ever.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::{Condvar, Mutex, MutexGuard};

use quipu_sockets::direction::wish;
use quipu_sockets::{Look, Receiver, Revoked, Room, Sender, Shared, Withdrawal, Word};
use rand_core::{RngCore, SeedableRng};
use rand_pcg::Pcg64Mcg;

const RING: usize = 16;

/// Everything that both ends share, and who may go on.
struct World {
    rng: Pcg64Mcg,
    words: [u64; 5],
    ring: [u8; RING],
    tcp: VecDeque<u8>,
    tcp_room: usize,
    /// The sender has closed its socket, or was killed.
    fin: bool,
    /// What the sending calls have returned success for.
    accepted: usize,
    read: Vec<u8>,
    threads: Vec<Thread>,
    current: usize,
    /// Octets that went through the ring.
    through_ring: usize,
    /// Accesses after which the sender dies.
    life: usize,
    /// A thread has found a fault: all end.
    failed: bool,
}

#[derive(Clone, Copy, PartialEq, Debug)]
enum Thread {
    Runs,
    /// Sleeps in the kernel until TCP has octets or has ended.
    Receives,
    /// Sleeps until TCP has room.
    Sends,
    Ended,
}

impl World {
    fn can_run(&self, thread: Thread) -> bool {
        match thread {
            Thread::Runs => true,
            Thread::Receives => self.fin || !self.tcp.is_empty(),
            Thread::Sends => self.tcp.len() < self.tcp_room,
            Thread::Ended => false,
        }
    }

    fn below(&mut self, limit: usize) -> usize {
        self.rng.next_u32() as usize % limit
    }
}

struct Bench {
    world: Mutex<World>,
    turn: Condvar,
}

/// The panic by which a killed sender ends.
struct Killed;

impl Bench {
    fn lock(&self) -> MutexGuard<'_, World> {
        self.world.lock().unwrap()
    }

    /// Hands the turn to a thread that can run, and waits until it is this thread's again.
    fn pass(&self, own: usize) -> MutexGuard<'_, World> {
        let mut world = self.lock();
        self.choose(&mut world);
        self.wait(own, world)
    }

    fn wait<'a>(&'a self, own: usize, mut world: MutexGuard<'a, World>) -> MutexGuard<'a, World> {
        while world.current != own && !world.failed {
            world = self.turn.wait(world).unwrap();
        }
        if world.failed {
            drop(world);
            resume_unwind(Box::new(Killed));
        }
        world
    }

    fn choose(&self, world: &mut World) {
        let able: Vec<usize> =
            (0..world.threads.len()).filter(|at| world.can_run(world.threads[*at])).collect();
        if able.is_empty() {
            let all_ended = world.threads.iter().all(|thread| *thread == Thread::Ended);
            if !all_ended {
                println!("all sleep: {:?}, words {:?}", world.threads, world.words);
                world.failed = true;
                self.turn.notify_all();
            }
            return;
        }
        let pick = world.below(able.len());
        world.current = able[pick];
        self.turn.notify_all();
    }

    fn sleep(&self, own: usize, how: Thread) {
        let mut world = self.lock();
        world.threads[own] = how;
        self.choose(&mut world);
        let mut world = self.wait(own, world);
        world.threads[own] = Thread::Runs;
    }
}

/// The memory as one thread sees it.
struct View<'a> {
    bench: &'a Bench,
    own: usize,
    mortal: bool,
}

impl View<'_> {
    fn pass(&self) -> MutexGuard<'_, World> {
        let mut world = self.bench.pass(self.own);
        if self.mortal {
            if world.life == 0 {
                drop(world);
                resume_unwind(Box::new(Killed));
            }
            world.life -= 1;
        }
        world
    }
}

impl Shared for View<'_> {
    fn load(&self, word: Word) -> u64 {
        self.pass().words[word as usize]
    }
    fn store(&self, word: Word, value: u64) {
        self.pass().words[word as usize] = value;
    }
    fn swap(&self, word: Word, old: u64, new: u64) -> bool {
        let mut world = self.pass();
        let is_old = world.words[word as usize] == old;
        if is_old {
            world.words[word as usize] = new;
        }
        is_old
    }
    fn add(&self, word: Word, value: u64) {
        let mut world = self.pass();
        world.words[word as usize] = world.words[word as usize].wrapping_add(value);
    }
    fn mask(&self, word: Word, mask: u64) {
        self.pass().words[word as usize] &= mask;
    }
}

/// Octet of the stream at a position.
fn octet(at: usize) -> u8 {
    (at * 31 + at / 251) as u8
}

/// Sends octets of the ring over TCP, as far as it has room. Returns whether the ring is empty.
fn withdraw(view: &View<'_>, sender: &Sender<'_, View<'_>>) -> bool {
    match sender.withdraw() {
        Withdrawal::Nothing => true,
        Withdrawal::Fault => panic!("a fault"),
        Withdrawal::Octets { from, pieces } => {
            let mut sent = 0;
            for (offset, len) in pieces.iter() {
                for at in offset..offset + len {
                    let mut world = view.pass();
                    if world.tcp.len() == world.tcp_room || sent != 0 && world.below(8) == 0 {
                        drop(world);
                        return sender.finish_withdrawal(from, sent);
                    }
                    let octet = world.ring[at];
                    world.tcp.push_back(octet);
                    sent += 1;
                }
            }
            sender.finish_withdrawal(from, sent)
        }
    }
}

/// A program that sends `total` octets.
fn send_all(view: &View<'_>, total: usize) {
    let sender = Sender::new(view, RING);
    let mut sent = 0;
    while sent < total {
        let want = 1 + view.pass().below(2 * RING).min(total - sent - 1);
        match sender.room(sent as u64, true) {
            Room::Fault => {
                panic!("a fault of the receiver: {sent} sent, words {:?}", view.bench.lock().words)
            }
            Room::Ring { head, pieces } => {
                let pieces = pieces.first(want);
                let mut at = sent;
                for (offset, len) in pieces.iter() {
                    for place in offset..offset + len {
                        view.pass().ring[place] = octet(at);
                        at += 1;
                    }
                }
                if sender.publish(head, pieces.len) {
                    sent += pieces.len;
                    let mut world = view.bench.lock();
                    world.accepted = sent;
                    world.through_ring += pieces.len;
                    drop(world);
                    if sender.must_withdraw() {
                        withdraw(view, &sender);
                    }
                }
            }
            Room::Full => {
                if view.pass().below(4) == 0 && !withdraw(view, &sender) {
                    view.bench.sleep(view.own, Thread::Sends);
                }
            }
            Room::Tcp => {
                let mut world = view.pass();
                let room = world.tcp_room - world.tcp.len();
                if room == 0 {
                    drop(world);
                    view.bench.sleep(view.own, Thread::Sends);
                    continue;
                }
                world.tcp.extend((sent..sent + want.min(room)).map(octet));
                sent += want.min(room);
                world.accepted = sent;
            }
        }
    }
}

/// A program that reads until the end of the stream. Returns whether it took something or ended.
fn receive_all(view: &View<'_>, alone: bool) {
    let receiver = Receiver::new(view, RING);
    loop {
        if alone && view.pass().below(2) == 0 {
            receiver.consent();
        }
        let looks = view.pass().below(4);
        for _ in 0..looks {
            let _ = receiver.has_unread();
        }
        let before = receiver.head();
        match receiver.look() {
            Look::Fault => panic!("a fault of the sender"),
            Look::Ring { ticket, pieces } => {
                let want = 1 + view.pass().below(RING);
                let pieces = pieces.first(want);
                let mut copied = Vec::new();
                for (offset, len) in pieces.iter() {
                    copied.extend((offset..offset + len).map(|place| view.pass().ring[place]));
                }
                if receiver.take(ticket, pieces.len) {
                    view.bench.lock().read.extend(copied);
                }
                continue;
            }
            Look::Tcp | Look::Empty | Look::Withdrawing => {}
        }
        if let Some(ended) = receive_tcp(view, &receiver) {
            if ended {
                return;
            }
            continue;
        }
        if receiver.revoke() == Revoked::Unread {
            // As a program that was told of an arrival, and sleeps all the same.
            if view.pass().below(4) != 0 || matches!(receiver.look(), Look::Ring { .. }) {
                continue;
            }
            receiver.wish(wish::WAKE);
            if receiver.head() != before || matches!(receiver.look(), Look::Ring { .. }) {
                continue;
            }
            if receiver.look() == Look::Withdrawing && !alone {
                continue;
            }
        }
        view.bench.sleep(view.own, Thread::Receives);
    }
}

/// Reads TCP without waiting. None if nothing is there; else whether the stream has ended.
fn receive_tcp(view: &View<'_>, receiver: &Receiver<'_, View<'_>>) -> Option<bool> {
    let mut world = view.pass();
    let len = world.tcp.len();
    if len == 0 {
        if !world.fin {
            return None;
        }
        drop(world);
        receiver.tcp_has_ended();
        return Some(!matches!(receiver.look(), Look::Ring { .. }));
    }
    let len = 1 + world.below(len);
    let octets: Vec<u8> = world.tcp.drain(..len).collect();
    world.read.extend(octets);
    drop(world);
    receiver.account(len);
    Some(false)
}

/// Runs one seed. Returns the number of octets that went through the ring.
fn run(seed: u64, receivers: usize, kills: bool) -> usize {
    let mut rng = Pcg64Mcg::seed_from_u64(seed);
    let total = 1 + rng.next_u32() as usize % 200;
    let life = if kills { rng.next_u32() as usize % 2000 } else { usize::MAX };
    let tcp_room = 1 + rng.next_u32() as usize % 40;
    let world = World {
        rng,
        words: [0; 5],
        ring: [0; RING],
        tcp: VecDeque::new(),
        tcp_room,
        fin: false,
        accepted: 0,
        read: Vec::new(),
        threads: vec![Thread::Runs; 1 + receivers],
        current: 0,
        through_ring: 0,
        life,
        failed: false,
    };
    let bench = Bench { world: Mutex::new(world), turn: Condvar::new() };
    std::thread::scope(|scope| {
        for own in 0..=receivers {
            let bench = &bench;
            scope.spawn(move || {
                let view = View { bench, own, mortal: own == 0 };
                let work = || {
                    drop(bench.wait(own, bench.lock()));
                    match own {
                        0 => send_all(&view, total),
                        _ => receive_all(&view, receivers == 1),
                    }
                };
                let outcome = catch_unwind(AssertUnwindSafe(work));
                let mut world = bench.lock();
                world.failed |= outcome.is_err_and(|panic| !panic.is::<Killed>());
                world.threads[own] = Thread::Ended;
                world.fin |= own == 0;
                bench.choose(&mut world);
            });
        }
    });
    let world = bench.world.into_inner().unwrap();
    assert!(!world.failed, "seed {seed}: see above");
    let expected: Vec<u8> = (0..world.read.len()).map(octet).collect();
    assert_eq!(world.read, expected, "seed {seed}");
    assert!(world.read.len() >= world.accepted, "seed {seed}: octets are lost");
    if !kills {
        assert_eq!(world.read.len(), total, "seed {seed}");
    }
    world.through_ring
}

#[test]
fn every_octet_arrives_once_and_in_order() {
    let through_ring: usize = (0..400).map(|seed| run(seed, 1, false)).sum();
    assert!(through_ring > 1000, "{through_ring} octets went through the ring");
}

#[test]
fn what_was_accepted_arrives_although_the_sender_is_killed() {
    (0..400).for_each(|seed| {
        run(1000 + seed, 1, true);
    });
}
