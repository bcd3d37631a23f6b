use super::*;

const MS: Duration = Duration::from_millis(1);
const LIMITS: Limits =
    Limits { reply: Duration::from_millis(200), reconnect: Some(Duration::from_secs(1)) };

fn ids(mut schedule: impl FnMut() -> Option<u64>) -> Vec<u64> {
    std::iter::from_fn(&mut schedule).collect()
}

/// Sends all that may be sent.
fn send_all(schedule: &mut Schedule<u64>, now: Duration) -> Vec<u64> {
    ids(|| {
        let id = schedule.next()?.0;
        schedule.send(id, 1, now);
        Some(id)
    })
}

#[test]
fn a_flush_waits_for_earlier_writes_and_holds_later_ones() {
    let mut schedule = Schedule::new(LIMITS);
    schedule.connected(1, MS);
    for (class, start) in [
        (Class::Write, 0),
        (Class::Write, 8),
        (Class::Flush, 0),
        (Class::Write, 16),
        (Class::Read, 32),
        (Class::Flush, 0),
    ] {
        schedule.add(MS, class, (start, 8), 0);
    }
    assert_eq!(send_all(&mut schedule, MS), [1, 2, 5]);
    schedule.replied(2, MS);
    assert_eq!(schedule.next(), None);
    schedule.replied(1, MS);
    assert_eq!(send_all(&mut schedule, MS), [3]);
    schedule.replied(3, MS);
    assert_eq!(send_all(&mut schedule, MS), [4]);
    schedule.replied(4, MS);
    assert_eq!(send_all(&mut schedule, MS), [6]);
}

#[test]
fn requests_to_the_same_bytes_keep_their_order() {
    let mut schedule = Schedule::new(LIMITS);
    schedule.connected(1, MS);
    let (read, write) = (Class::Read, Class::Write);
    for (class, range) in
        [(read, (0, 8)), (read, (4, 8)), (write, (6, 1)), (read, (6, 1)), (write, (12, 4))]
    {
        schedule.add(MS, class, range, 0);
    }
    assert_eq!(send_all(&mut schedule, MS), [1, 2, 5]);
    schedule.replied(1, MS);
    assert_eq!(schedule.next(), None);
    schedule.replied(2, MS);
    assert_eq!(send_all(&mut schedule, MS), [3]);
    schedule.replied(3, MS);
    assert_eq!(send_all(&mut schedule, MS), [4]);
}

#[test]
fn what_was_in_flight_is_repeated_in_its_place() {
    let mut schedule = Schedule::new(LIMITS);
    schedule.connected(1, MS);
    for class in [Class::Write, Class::Flush, Class::Write] {
        let start = schedule.len() as u64 * 8;
        schedule.add(MS, class, (start, 8), start);
    }
    let job = schedule.send(1, 1, MS);
    assert!(schedule.lost(1, [(1, job)], 2 * MS).is_empty());
    assert!(!schedule.is_connected());
    schedule.connected(2, 3 * MS);
    assert_eq!(send_all(&mut schedule, 3 * MS), [1]);
    schedule.replied(1, 4 * MS);
    assert_eq!(send_all(&mut schedule, 4 * MS), [2]);
    assert!(schedule.lost(2, [(2, 8)], 5 * MS).is_empty());
    schedule.connected(3, 6 * MS);
    assert_eq!(send_all(&mut schedule, 6 * MS), [2]);
}

#[test]
fn without_a_limit_to_reconnect_a_loss_is_a_failure_at_once() {
    let mut schedule = Schedule::new(Limits { reconnect: None, ..LIMITS });
    schedule.connected(1, MS);
    schedule.add(MS, Class::Write, (0, 8), 7);
    schedule.add(MS, Class::Flush, (0, 0), 8);
    let job = schedule.send(1, 1, MS);
    assert_eq!(schedule.lost(1, [(1, job)], 2 * MS), [(1, 7)]);
    // The other had no connection yet: it fails with the attempt to get one.
    assert_eq!(schedule.unreachable(3 * MS), [(2, 8)]);
    assert!(schedule.is_empty());
    // If the attempt hangs, it fails in the time of a reply.
    schedule.add(4 * MS, Class::Read, (0, 8), 9);
    assert_eq!(schedule.timeout(), Some(204 * MS));
    assert!(schedule.expire(203 * MS).is_empty());
    assert_eq!(schedule.expire(204 * MS), [(3, 9)]);
}

#[test]
fn a_silent_connection_is_late_and_a_busy_one_is_not() {
    let mut schedule = Schedule::new(LIMITS);
    schedule.connected(1, MS);
    for start in 0..30 {
        schedule.add(MS, Class::Write, (start * 8, 8), 0);
    }
    assert_eq!(send_all(&mut schedule, MS).len(), 30);
    let mut now = MS;
    for id in 1..=16 {
        now += 120 * MS;
        assert!(schedule.late(now).is_empty());
        schedule.replied(id, now);
    }
    // Ten times as long as a reply may take is too much for any request.
    assert_eq!(schedule.timeout(), Some(2001 * MS));
    assert!(schedule.late(2000 * MS).is_empty());
    assert_eq!(schedule.late(2001 * MS), BTreeSet::from([1]));
    let jobs = (17..=30).map(|id| (id, 0));
    assert!(schedule.lost(1, jobs, 2001 * MS).is_empty());
    assert_eq!(schedule.timeout(), Some(3001 * MS));
    assert_eq!(schedule.expire(3001 * MS).len(), 14);
}

/// A reproducible source of numbers.
struct Random(u64);

impl Random {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (self.0 >> 33) % limit
    }
}

/// A request at the server, and when it is executed and replied to.
struct Flying {
    id: u64,
    executes: Duration,
    replies: Duration,
    is_executed: bool,
}

struct Line {
    number: u32,
    flying: Vec<Flying>,
    /// Nothing goes through any more, and neither end knows.
    is_cut: bool,
}

/// A client with a schedule, and a server that is killed and cut off now and then.
struct World {
    random: Random,
    now: Duration,
    schedule: Schedule<u64>,
    lines: Vec<Line>,
    next_line: u32,
    server_back: Duration,
    /// What each request is, by its number.
    classes: BTreeMap<u64, (Class, u64)>,
    added: BTreeMap<u64, Duration>,
    /// What the server has executed, in order.
    log: Vec<u64>,
    /// The newest write of each block, and the newest that a flush has made durable.
    volatile: BTreeMap<u64, u64>,
    durable: BTreeMap<u64, u64>,
    /// Writes that the program knows to be done: number by block.
    done: BTreeMap<u64, u64>,
    /// What was done when each flush was added.
    promised: BTreeMap<u64, BTreeMap<u64, u64>>,
    failures: u32,
    repeats: u32,
}

impl World {
    fn new(seed: u64) -> Self {
        Self {
            random: Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15)),
            now: Duration::ZERO,
            schedule: Schedule::new(LIMITS),
            lines: Vec::new(),
            next_line: 0,
            server_back: Duration::ZERO,
            classes: BTreeMap::new(),
            added: BTreeMap::new(),
            log: Vec::new(),
            volatile: BTreeMap::new(),
            durable: BTreeMap::new(),
            done: BTreeMap::new(),
            promised: BTreeMap::new(),
            failures: 0,
            repeats: 0,
        }
    }

    fn add(&mut self) {
        let class = match self.random.below(8) {
            0 => Class::Flush,
            1 | 2 => Class::Read,
            _ => Class::Write,
        };
        let block = self.random.below(12);
        let length = if class == Class::Flush { 0 } else { 1 };
        let id = self.schedule.add(self.now, class, (block, length), block);
        self.classes.insert(id, (class, block));
        self.added.insert(id, self.now);
        if class == Class::Flush {
            self.promised.insert(id, self.done.clone());
        }
    }

    fn execute(&mut self, id: u64) {
        self.repeats += u32::from(self.log.contains(&id));
        self.log.push(id);
        match self.classes[&id] {
            (Class::Write, block) => {
                self.volatile.insert(block, id);
            }
            (Class::Flush, _) => self.durable = self.volatile.clone(),
            (Class::Read, _) => {}
        }
    }

    fn reply(&mut self, id: u64) {
        self.schedule.replied(id, self.now);
        match self.classes[&id] {
            (Class::Write, block) => {
                self.done.insert(block, id);
            }
            (Class::Flush, _) => {
                for (block, write) in &self.promised[&id] {
                    let on_disk = self.durable.get(block);
                    assert!(on_disk >= Some(write), "flush {id}: {write} is not on the disk");
                }
            }
            (Class::Read, _) => {}
        }
        self.ended(id);
    }

    /// Every request ends once, in bounded time.
    fn ended(&mut self, id: u64) {
        let added = self.added.remove(&id).expect("it ended twice");
        // What waits for others has their time, too: three generations of the order at most by its length.
        let limit = (LIMITS.reply * SLOWEST + LIMITS.reconnect.unwrap()) * 4;
        assert!(self.now - added < limit, "{id} took {:?}", self.now - added);
    }

    fn fail(&mut self, failed: Vec<(u64, u64)>) {
        for (id, _) in failed {
            self.failures += 1;
            self.ended(id);
        }
    }

    fn lose(&mut self, index: usize) {
        let line = self.lines.swap_remove(index);
        let jobs = line.flying.iter().map(|flying| (flying.id, self.classes[&flying.id].1));
        let jobs: Vec<_> = jobs.collect();
        let failed = self.schedule.lost(line.number, jobs, self.now);
        self.fail(failed);
    }

    fn serve(&mut self) {
        for index in 0..self.lines.len() {
            if self.lines[index].is_cut {
                continue;
            }
            let mut flying = std::mem::take(&mut self.lines[index].flying);
            for request in &mut flying {
                if !request.is_executed && request.executes <= self.now {
                    request.is_executed = true;
                    self.execute(request.id);
                }
            }
            let now = self.now;
            for request in flying.extract_if(.., |request| request.replies <= now) {
                self.reply(request.id);
            }
            self.lines[index].flying = flying;
        }
    }

    fn disturb(&mut self, calm: u64) {
        match self.random.below(calm) {
            // The server is killed: nothing that it has not executed will be.
            0 => {
                while !self.lines.is_empty() {
                    self.lose(0);
                }
                self.server_back = self.now + MS * self.random.below(1500) as u32;
            }
            1 if !self.lines.is_empty() => {
                let index = self.random.below(self.lines.len() as u64) as usize;
                self.lines[index].is_cut = true;
            }
            _ => {}
        }
    }

    fn connect(&mut self) {
        if self.lines.len() >= 3 || self.random.below(10) > 0 {
            return;
        }
        if self.now < self.server_back {
            let failed = self.schedule.unreachable(self.now);
            self.fail(failed);
            return;
        }
        self.next_line += 1;
        self.schedule.connected(self.next_line, self.now);
        self.lines.push(Line { number: self.next_line, flying: Vec::new(), is_cut: false });
    }

    fn step(&mut self, adds: bool, calm: u64) {
        self.now += MS;
        if adds && self.schedule.len() < 24 && self.random.below(2) == 0 {
            self.add();
        }
        self.serve();
        self.disturb(calm);
        for number in self.schedule.late(self.now) {
            let index = self.lines.iter().position(|line| line.number == number).unwrap();
            self.lose(index);
        }
        let failed = self.schedule.expire(self.now);
        self.fail(failed);
        // After that, the next moment of interest is to come.
        assert!(self.schedule.timeout().is_none_or(|at| at > self.now));
        self.connect();
        while !self.lines.is_empty()
            && let Some((id, _)) = self.schedule.next()
        {
            let index = self.random.below(self.lines.len() as u64) as usize;
            self.schedule.send(id, self.lines[index].number, self.now);
            let executes = self.now + MS * (1 + self.random.below(12) as u32);
            let replies = executes + MS * self.random.below(12) as u32;
            self.lines[index].flying.push(Flying { id, executes, replies, is_executed: false });
        }
    }

    /// The order at the server proves the rules.
    fn check(&self) {
        for (at, first) in self.log.iter().enumerate() {
            for second in &self.log[at + 1..] {
                let ((a, block), (b, other)) = (self.classes[first], self.classes[second]);
                let barrier = (a == Class::Flush && b == Class::Write)
                    || (a == Class::Write && b == Class::Flush);
                let same = a == Class::Write && b == Class::Write && block == other;
                assert!(
                    !(barrier || same) || first <= second,
                    "{a:?} {first} was executed before {b:?} {second}"
                );
            }
        }
    }
}

#[test]
fn no_write_passes_a_flush_whatever_happens_to_connections() {
    let (mut repeats, mut failures) = (0, 0);
    for seed in 0..150 {
        let mut world = World::new(seed);
        for _ in 0..1500 {
            world.step(true, 400);
        }
        // In calm weather everything ends.
        for _ in 0..3000 {
            world.step(false, u64::MAX);
        }
        assert!(world.schedule.is_empty() && world.added.is_empty(), "seed {seed}");
        world.check();
        repeats += world.repeats;
        failures += world.failures;
    }
    assert!(repeats > 50 && failures > 50, "{repeats} repeats, {failures} failures");
}
