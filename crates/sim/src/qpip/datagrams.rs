//! Programs with UDP queue pairs: whole datagrams, or nothing.
//!
//! A datagram begins with its number, if it is long enough, and is known by it: a receiver knows what must be
//! in it, who has sent it, and how often the network may have brought it.

use std::collections::{BTreeMap, VecDeque};
use std::net::SocketAddr;
use std::sync::Arc;

use quipu_nic::{
    Completion, Fault, Payload, QpAttr, QpAttrMask as M, QpCap, QpId, QpInit, QpNum, QpState,
    QpType, SendFlags, SendOp, SendWr, SrqId, To, WcExtra, WcOpcode, WcStatus,
};

use super::Programs;
use super::model::Sent;
use crate::frames::addresses;
use crate::rng::pattern;
use crate::services::model::Contents;
use crate::world::{LoadEvent, World, WorldEvent};

/// The port of the first; that of nobody; and the first number of a queue pair.
const FIRST_PORT: u16 = 7000;
const NOBODY: u16 = 9;
const FIRST_NUM: u8 = 128;
/// Octets of the longest packet.
const MOST: usize = 65_535;
/// Octets of a number.
const NUMBER: usize = 8;
/// The longest time between two things that a program does.
const LONGEST_TICK_NS: u64 = 50_000_000;

/// A UDP queue pair, and the program that uses it.
struct Post {
    host: usize,
    qp: QpId,
    num: QpNum,
    cqs: [usize; 2],
    pool: usize,
    exists: bool,
    /// Its queue is in error: everything that is left is flushed.
    stopped: bool,
    sent: VecDeque<Sent>,
    ops_left: u32,
    send_depth: usize,
    idle: u32,
}

/// A receive queue, which several of them may share.
struct Pool {
    host: usize,
    srq: Option<SrqId>,
    owner: usize,
    depth: usize,
    /// Identifier, slot and room of each receive, in order.
    posted: VecDeque<(u64, usize, usize)>,
}

/// What was sent.
struct Letter {
    from: usize,
    to: SocketAddr,
    bytes: Arc<[u8]>,
    arrived: u32,
}

/// All of them.
#[derive(Default)]
pub(super) struct Datagrams {
    posts: Vec<Post>,
    pools: Vec<Pool>,
    letters: BTreeMap<u64, Letter>,
    /// How many of those without a number were sent, and have come: by sender, receiver and length.
    short: BTreeMap<(usize, SocketAddr, usize), [u64; 2]>,
    by_num: BTreeMap<(usize, QpNum), usize>,
    /// Octets of a packet at most.
    longest: usize,
    /// Nothing disturbs, and everybody has receives enough: whatever is sent arrives.
    ample: bool,
}

/// Octets of a datagram without a number.
fn nameless(post: usize, len: usize) -> Vec<u8> {
    pattern(0x5544_5000 + post as u64, 0, len)
}

impl Programs {
    /// Makes queue pairs, binds them, and has their programs begin.
    pub(super) fn make_posts(&mut self, world: &mut World, mtu: u32) {
        let count = self.rng.index(6);
        // What the network cuts must not be in parts before: it knows nothing of their numbers.
        let packet = if world.frames.parts == 0 { MOST } else { mtu as usize };
        self.datagrams.longest = packet.min(self.max_len.max(64));
        let calm = self.mishaps.is_empty() && world.net.partitions.is_empty();
        let weather = world.frames.weather;
        let narrow = !world.frames.narrow.is_empty() || weather.lie_ppm > 0;
        self.datagrams.ample = calm && weather.is_fair() && !narrow && self.rng.percent(70);
        for p in 0..count {
            if let Err(fault) = self.make_post(world, p) {
                return world.violate(|| format!("UDP queue pair {p}: {fault}"));
            }
        }
        for p in 0..count {
            self.datagrams.posts[p].ops_left = self.rng.index(self.plan.ops as usize + 1) as u32;
            world.kernel.at(self.rng.below(self.plan.tick_ns * 8 + 1), event(p));
        }
    }

    fn make_post(&mut self, world: &mut World, p: usize) -> Result<(), Fault> {
        let host = self.rng.index(world.hosts.len());
        let (pd, per_host) = (self.pds[host], self.plan.cqs_per_host);
        let cqs = [0; 2].map(|_| host * per_host + self.rng.index(per_host));
        let pools = &self.datagrams.pools;
        let shared = pools.iter().position(|pool| pool.host == host && pool.srq.is_some());
        let shares = self.rng.percent(40);
        let num = QpNum::new(world.hosts[host].address.port(), FIRST_NUM + p as u8);
        let adapter = &mut world.hosts[host].adapter;
        let pool = match shared.filter(|_| shares) {
            Some(pool) => pool,
            None => {
                let srq = if shares { Some(adapter.create_srq(pd, 512, 3, 0)?) } else { None };
                let depth = if self.datagrams.ample { 512 } else { self.rng.pick(&[1, 8, 60]) };
                let posted = VecDeque::new();
                self.datagrams.pools.push(Pool { host, srq, owner: p, depth, posted });
                self.datagrams.pools.len() - 1
            }
        };
        let send_depth = self.rng.pick(&[1, 3, 16, 64]);
        let cap = QpCap {
            max_send_wr: send_depth as u32,
            max_recv_wr: 512,
            max_send_sge: 3,
            max_recv_sge: 3,
            max_inline_data: self.rng.pick(&[0, 64]),
        };
        let init = QpInit {
            pd,
            send_cq: self.queues[cqs[0]].id,
            recv_cq: self.queues[cqs[1]].id,
            srq: self.datagrams.pools[pool].srq,
            cap,
            qp_type: QpType::Udp,
            sq_sig_all: false,
        };
        let (qp, _) = adapter.create_qp(&init, num)?;
        adapter.udp_bind(qp, FIRST_PORT + p as u16)?;
        self.datagrams.by_num.insert((host, num), p);
        self.datagrams.posts.push(Post {
            host,
            qp,
            num,
            cqs,
            pool,
            exists: true,
            stopped: false,
            sent: VecDeque::new(),
            ops_left: 0,
            send_depth,
            idle: 0,
        });
        self.fill_pool(world, pool);
        Ok(())
    }

    /// A program posts receives and sends.
    pub(super) fn post_tick(&mut self, world: &mut World, p: usize) {
        let post = &self.datagrams.posts[p];
        if !post.exists || post.stopped {
            return;
        }
        let (host, qp, pool, now) = (post.host, post.qp, post.pool, world.time());
        world.wake(host);
        let received = self.fill_pool(world, pool);
        let mut posted = 0;
        for _ in 0..1 + self.rng.index(8) {
            posted += usize::from(self.post_letter(world, p));
        }
        if posted > 0 {
            world.hosts[host].adapter.ring_doorbell(now, qp);
        }
        let post = &mut self.datagrams.posts[p];
        post.idle = if posted + received > 0 { 0 } else { post.idle + 1 };
        let tick = self.plan.tick_ns << post.idle.min(20);
        let after = (1 + self.rng.below(tick)).min(LONGEST_TICK_NS);
        world.kernel.after(after, event(p));
        world.serve(host);
    }

    fn fill_pool(&mut self, world: &mut World, pool: usize) -> usize {
        let mut count = 0;
        while self.datagrams.pools[pool].posted.len() < self.datagrams.pools[pool].depth {
            let Pool { host, srq, owner, .. } = self.datagrams.pools[pool];
            let most = self.datagrams.longest;
            let uneven = !self.datagrams.ample && self.rng.percent(20);
            let room = if uneven { self.rng.index(most) } else { most };
            let slot = self.new_memory(world, host, room);
            let (id, now) = (self.new_id(), world.time());
            let Some(memory) = self.slots.get(slot) else { return count };
            let list = memory.list(room, &[room / 3, room / 2]);
            let qp = self.datagrams.posts[owner].qp;
            let adapter = &mut world.hosts[host].adapter;
            let done = match srq {
                Some(srq) => adapter.post_srq_recv(now, srq, id, &list),
                None => adapter.post_recv(now, qp, id, &list),
            };
            if let Err(fault) = done {
                world.violate(|| format!("UDP queue pair {owner} cannot receive: {fault}"));
                return count;
            }
            self.datagrams.pools[pool].posted.push_back((id, slot, room));
            count += 1;
        }
        count
    }

    /// Sends a datagram to somebody; whether it could.
    fn post_letter(&mut self, world: &mut World, p: usize) -> bool {
        let post = &self.datagrams.posts[p];
        let (host, qp) = (post.host, post.qp);
        if post.ops_left == 0 || post.sent.len() >= post.send_depth || world.violation.is_some() {
            return false;
        }
        let Some(to) = self.addressee(world, host) else { return false };
        let longest = self.datagrams.longest;
        let bits = self.rng.below(17);
        let most = self.rng.pick(&[longest, 1 << bits]);
        let header = if to.is_ipv6() { 48 } else { 28 };
        let len = self.rng.index(most.min(longest - header) + 1);
        let number = self.new_id() << 20 | self.rng.below(1 << 20);
        let mut bytes = nameless(p, len);
        if len >= NUMBER {
            bytes = pattern(number, 0, len);
            bytes[..NUMBER].copy_from_slice(&number.to_be_bytes());
        }
        let bytes: Arc<[u8]> = bytes.into();
        let slot = self.new_memory(world, host, len);
        let Some(memory) = self.slots.get_mut(slot) else { return false };
        memory.fill(&bytes);
        let list = memory.list(len, &[len / 2]);
        let fills = self.datagrams.posts[p].sent.len() + 1 >= self.datagrams.posts[p].send_depth;
        let last = self.datagrams.posts[p].ops_left == 1;
        let signaled = fills || last || self.rng.percent(self.plan.signaled_percent);
        let mut flags = SendFlags::empty();
        flags.set(SendFlags::SIGNALED, signaled);
        let wr_id = self.new_id();
        let payload = Payload::Sges(&list);
        let wr = SendWr { wr_id, to: To::Address(to), op: SendOp::Send, flags, payload };
        let done = world.hosts[host].adapter.post_send(qp, &wr);
        world.trace.note(&[65, wr_id, len as u64]);
        world.trace.line(world.kernel.now(), || {
            format!("UDP queue pair {p} sends {wr_id} to {to}: {len} B {done:?}")
        });
        match done {
            Ok(()) => {}
            Err(Fault::QueueFull) => return false,
            Err(fault) => {
                world.violate(|| format!("UDP queue pair {p} cannot send {len} bytes: {fault}"));
                return false;
            }
        }
        self.tally.ops += 1;
        self.tally.bytes += len as u64;
        let post = &mut self.datagrams.posts[p];
        post.ops_left -= 1;
        post.sent.push_back(Sent { id: wr_id, len, signaled, trap: false });
        if len >= NUMBER {
            self.datagrams.letters.insert(number, Letter { from: p, to, bytes, arrived: 0 });
        } else {
            self.datagrams.short.entry((p, to, len)).or_default()[0] += 1;
        }
        true
    }

    /// Another host's queue pair, or now and then nobody.
    fn addressee(&mut self, world: &World, host: usize) -> Option<SocketAddr> {
        let family = self.rng.index(2);
        let posts = self.datagrams.posts.iter().enumerate();
        let others: Vec<_> = posts.filter(|(_, post)| post.host != host).map(|(q, _)| q).collect();
        if !others.is_empty() && !self.rng.percent(5) {
            let q = self.rng.pick(&others);
            let at = addresses(self.datagrams.posts[q].host)[family];
            return Some(SocketAddr::new(at, FIRST_PORT + q as u16));
        }
        let other = (host + 1) % world.hosts.len();
        (other != host).then(|| SocketAddr::new(addresses(other)[family], NOBODY))
    }

    /// The queue pair of UDP that a completion is of.
    pub(super) fn post_of(&self, host: usize, num: QpNum) -> Option<usize> {
        self.datagrams.by_num.get(&(host, num)).copied()
    }

    pub(super) fn post_completion(
        &mut self,
        p: usize,
        cq: usize,
        done: &Completion,
        world: &World,
    ) -> Result<(), String> {
        let post = &self.datagrams.posts[p];
        if !post.exists {
            return Err("the queue pair is gone".into());
        }
        let sends = post.sent.iter().any(|sent| sent.id == done.wr_id);
        if post.cqs[usize::from(!sends)] != cq {
            return Err("it completes in the wrong queue".into());
        }
        if sends { self.letter_sent(p, done) } else { self.letter_came(p, done, world) }
    }

    fn letter_sent(&mut self, p: usize, done: &Completion) -> Result<(), String> {
        let stopped = self.datagrams.posts[p].stopped || self.teardown;
        while let Some(sent) = self.datagrams.posts[p].sent.pop_front() {
            if sent.id != done.wr_id {
                if sent.signaled {
                    return Err(format!("request {} was passed over", sent.id));
                }
                continue;
            }
            return match done.status {
                WcStatus::Success if sent.signaled && done.opcode == WcOpcode::Send => Ok(()),
                WcStatus::WrFlushErr if stopped => Ok(()),
                _ => Err("it must not be so".into()),
            };
        }
        Err("there is no such request".into())
    }

    fn letter_came(&mut self, p: usize, done: &Completion, world: &World) -> Result<(), String> {
        let Post { host, pool, stopped, .. } = self.datagrams.posts[p];
        let pool = &mut self.datagrams.pools[pool];
        // Of those who share one, each sees some of what was posted.
        let at = pool.posted.iter().position(|(id, ..)| *id == done.wr_id);
        let at = at.filter(|&at| at == 0 || pool.srq.is_some()).ok_or("it is not its turn")?;
        let (_, slot, room) = pool.posted.remove(at).ok_or("nothing was posted")?;
        if done.status == WcStatus::WrFlushErr && (stopped || self.teardown) {
            return self.slots[slot].check();
        }
        let WcExtra::From(source) = done.extra else { return Err("from nobody".into()) };
        let (source, len) = (SocketAddr::from(source), done.byte_len as usize);
        if done.status != WcStatus::Success || done.opcode != WcOpcode::Recv || len > room {
            return Err("it must not be so".into());
        }
        let from = usize::from(source.port().wrapping_sub(FIRST_PORT));
        let sender = self.datagrams.posts.get(from).ok_or("from a port of nobody")?;
        let [v6, v4] = addresses(sender.host);
        let family = usize::from(source.is_ipv4());
        if source.ip() != [v6, v4][family] {
            return Err(format!("{source} is not the sender's address"));
        }
        let to = SocketAddr::new(addresses(host)[family], FIRST_PORT + p as u16);
        let bytes = self.known(from, to, &self.slots[slot].bytes(len))?;
        let memory = &mut self.slots[slot];
        memory.contents = Contents::Holds(bytes);
        memory.check()?;
        self.count_arrival(from, to, slot, len, world)
    }

    /// The datagram from one to another that these bytes must be.
    fn known(&self, from: usize, to: SocketAddr, bytes: &[u8]) -> Result<Arc<[u8]>, String> {
        let Some(number) = bytes.first_chunk() else {
            return Ok(nameless(from, bytes.len()).into());
        };
        let number = u64::from_be_bytes(*number);
        let letter = self.datagrams.letters.get(&number).ok_or("nobody has sent it")?;
        let whole = letter.bytes.len() == bytes.len();
        let right = whole && (letter.from, letter.to) == (from, to);
        right.then(|| letter.bytes.clone()).ok_or(format!("it was sent to {}", letter.to))
    }

    fn count_arrival(
        &mut self,
        from: usize,
        to: SocketAddr,
        slot: usize,
        len: usize,
        world: &World,
    ) -> Result<(), String> {
        let number = self.slots[slot].bytes(len).first_chunk().map(|it| u64::from_be_bytes(*it));
        let within = match number {
            Some(number) => {
                let letter = self.datagrams.letters.get_mut(&number).ok_or("it is of nobody")?;
                letter.arrived += 1;
                let doubled = world.frames.doubled.get(&number).copied().unwrap_or(0);
                letter.arrived <= 1 + doubled
            }
            None => {
                let [sent, came] = self.datagrams.short.entry((from, to, len)).or_default();
                *came += 1;
                *came <= *sent + world.counters.duplicated
            }
        };
        within.then_some(()).ok_or("it has come more often than the network brought it".into())
    }

    /// Whether nothing more will become of datagrams.
    pub(super) fn letters_done(&self) -> bool {
        let Datagrams { posts, letters, short, ample, .. } = &self.datagrams;
        let quiet = |post: &Post| {
            let sent = post.ops_left == 0 && post.sent.iter().all(|sent| !sent.signaled);
            !post.exists || post.stopped || sent
        };
        let mine = |to: &SocketAddr| to.port() == NOBODY;
        let arrived = letters.values().all(|it| it.arrived == 1 || mine(&it.to))
            && short.iter().all(|((_, to, _), [sent, came])| sent == came || mine(to));
        posts.iter().all(quiet) && (arrived || !ample)
    }

    /// What datagrams wait for.
    pub(super) fn describe_letters(&self) -> String {
        let Datagrams { posts, letters, ample, .. } = &self.datagrams;
        let missing = letters.values().filter(|it| it.arrived == 0).count();
        let posts = posts.iter().enumerate().map(|(p, post)| {
            format!("\n  UDP {p}: {} left, {} sent", post.ops_left, post.sent.len())
        });
        posts.collect::<String>() + &format!("\n  ample {ample}: {missing} have not come")
    }

    /// Something happens to a queue pair: its program stops it, destroys it, or takes it anew.
    pub(super) fn post_mishap(&mut self, world: &mut World, p: usize, how: u8) {
        let Some(post) = self.datagrams.posts.get_mut(p).filter(|post| post.exists) else {
            return;
        };
        let (host, qp, now) = (post.host, post.qp, world.time());
        let shared = self.datagrams.pools[post.pool].srq.is_some();
        self.tally.faults += 1;
        world.wake(host);
        let adapter = &mut world.hosts[host].adapter;
        let to = |state| QpAttr { state, port_num: 1, ..QpAttr::default() };
        let done = match how {
            0 => {
                post.stopped = true;
                adapter.modify_qp(now, qp, &to(QpState::Err), M::STATE)
            }
            1 => {
                post.exists = false;
                adapter.destroy_qp(now, qp)
            }
            _ => {
                post.stopped = false;
                post.sent.clear();
                let reset = adapter.modify_qp(now, qp, &to(QpState::Reset), M::STATE);
                reset.and_then(|()| adapter.udp_bind(qp, FIRST_PORT + p as u16)).map(drop)
            }
        };
        if how > 0 {
            self.forget_receives(p, shared);
        }
        if let Err(fault) = done {
            world.violate(|| format!("UDP queue pair {p}, {how}: {fault}"));
        }
        if how > 1 {
            world.kernel.after(1, event(p));
        }
        world.serve(host);
    }

    /// What was posted to a queue pair that is reset or gone is the program's again, and so are completions
    /// that it has not looked at.
    fn forget_receives(&mut self, p: usize, shared: bool) {
        let pool = &mut self.datagrams.pools[self.datagrams.posts[p].pool];
        let mut gone = Vec::new();
        if shared {
            // Some of them may have been taken, and nobody hears of it.
            gone.extend(pool.posted.iter().map(|(_, slot, _)| *slot));
        } else {
            gone.extend(pool.posted.drain(..).map(|(_, slot, _)| slot));
        }
        for slot in gone {
            self.slots[slot].freeze();
        }
    }

    /// A host is dead.
    pub(super) fn bury_posts(&mut self, host: usize) {
        for post in self.datagrams.posts.iter_mut().filter(|post| post.host == host) {
            post.exists = false;
        }
    }

    /// Destroys everything that is left, but for completion queues.
    ///
    /// # Errors
    /// What cannot be destroyed, or what was written that must not be.
    pub(super) fn destroy_posts(&mut self, world: &mut World) -> Result<(), String> {
        let now = world.time();
        for (p, post) in self.datagrams.posts.iter_mut().enumerate() {
            if std::mem::take(&mut post.exists) {
                let done = world.hosts[post.host].adapter.destroy_qp(now, post.qp);
                done.map_err(|fault| format!("UDP queue pair {p} cannot be destroyed: {fault}"))?;
                self.datagrams.by_num.remove(&(post.host, post.num));
            }
        }
        for pool in &self.datagrams.pools {
            let host = &mut world.hosts[pool.host];
            if let Some(srq) = pool.srq.filter(|_| host.alive) {
                let done = host.adapter.destroy_srq(srq);
                done.map_err(|fault| format!("a shared receive queue: {fault}"))?;
            }
        }
        for (_, slot, _) in self.datagrams.pools.iter().flat_map(|pool| &pool.posted) {
            // A datagram may have come whose completion went with its queue pair.
            self.slots[*slot].freeze();
        }
        Ok(())
    }
}

fn event(post: usize) -> WorldEvent {
    WorldEvent::Load(LoadEvent::Post { post })
}
