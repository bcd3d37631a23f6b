//! Carries out what engines post: on the queue pairs of their hosts, and by a connection manager whose
//! messages take time and always arrive.

use quipu_am::{ConnId, Event, Hello, Local, Name, Refusal, Remote, Welcome};
use quipu_nic::mem::Access;
use quipu_nic::{
    AddressVector, Completion, Gid, Payload, QpAttr, QpAttrMask as M, QpCap, QpId, QpInit, QpNum,
    QpState, QpType, SendFlags, SendOp, SendWr, Sge, To, WcStatus,
};

use super::Programs;
use super::fabric::{MOST_SLOTS, Post, SLOT};
use crate::world::{LoadEvent, World, WorldEvent};

/// Marks the number of a receive.
pub(super) const RECEIVE: u64 = 1 << 63;
/// Requests that a send queue takes.
const DEPTH: u32 = 256;
/// The longest that a message of the connection manager takes.
const SLOWEST_NS: u64 = 2_000_000;

/// Whether a completion with that number is that of a write or of a read.
fn is_of_memory(number: u64) -> bool {
    number >> 56 > 1
}

/// A queue pair and the connection it is of.
#[derive(Clone, Copy, Debug)]
pub(super) struct Link {
    conn: ConnId,
    qp: QpId,
    num: QpNum,
    /// The process and the connection at the other end, once they are known.
    peer: Option<(usize, ConnId)>,
    /// The engine knows that it stands.
    is_up: bool,
}

/// A message of the connection manager.
#[derive(Clone, Copy, Debug)]
pub(super) enum Letter {
    Hello { from: usize, conn: ConnId, to: Name, hello: Hello, num: QpNum },
    Welcome { to: usize, conn: ConnId, from: (usize, ConnId), welcome: Welcome, num: QpNum },
    Refused { to: usize, conn: ConnId, why: Refusal },
    Gone { to: usize, conn: ConnId },
}

/// Who has asked for a connection: the process, its connection and its queue pair.
pub(super) type Asked = (usize, ConnId, QpNum);

impl Programs {
    fn send_letter(&mut self, world: &mut World, letter: Letter) {
        self.letters.push(letter);
        let after = 1_000 + self.rng.below(SLOWEST_NS);
        let end = self.letters.len() - 1;
        world.kernel.after(after, WorldEvent::Load(LoadEvent::Connect { end }));
    }

    fn link(&mut self, n: usize, conn: ConnId) -> Option<&mut Link> {
        self.nodes[n].links.iter_mut().find(|link| link.conn == conn)
    }

    /// Carries out everything that an engine has posted.
    pub(super) fn carry_out(&mut self, world: &mut World, n: usize) {
        while let Some(post) = self.nodes[n].core.fabric_mut().next_post() {
            match post {
                Post::Connect { conn, to, hello } => {
                    if let Some(num) = self.make_queue_pair(world, n, conn) {
                        self.send_letter(world, Letter::Hello { from: n, conn, to, hello, num });
                    }
                }
                Post::Accept { incoming, conn, welcome } => {
                    self.accept(world, n, incoming as usize, conn, welcome);
                }
                Post::Reject { incoming, why } => {
                    let (to, conn, _) = self.asked[incoming as usize];
                    self.send_letter(world, Letter::Refused { to, conn, why: Refusal::Said(why) });
                }
                Post::Close { conn } => self.close(world, n, conn),
                Post::Repost { slot } => self.post_receive(world, n, slot),
                Post::WriteNow { conn, from, to } => self.write_now(world, n, conn, (from, to)),
                post => self.post_send(world, n, post),
            }
        }
        self.send_datagrams(world, n);
        world.serve(self.nodes[n].host);
    }

    fn post_receive(&mut self, world: &mut World, n: usize, slot: u32) {
        let node = &self.nodes[n];
        let (host, srq, now) = (node.host, node.srq, world.time());
        let sge = node.core.fabric().memory().sge(slot as usize * SLOT, SLOT);
        let posted =
            world.hosts[host].adapter.post_srq_recv(now, srq, RECEIVE | u64::from(slot), &[sge]);
        if let Err(fault) = posted {
            world.violate(|| format!("process {n}: a receive is refused: {fault}"));
        }
    }

    /// A process stores into the memory of another, as if it had mapped that.
    fn write_now(&mut self, world: &World, n: usize, conn: ConnId, (from, to): (Local, Remote)) {
        let memory = self.nodes[n].core.fabric().memory();
        let bytes = memory.read((from.addr - memory.addr) as usize, from.len as usize);
        let Some((there, _)) = self.link(n, conn).and_then(|link| link.peer) else { return };
        let peer = &self.nodes[there];
        if world.hosts[peer.host].alive {
            let memory = peer.core.fabric().memory();
            memory.write((to.addr - memory.addr) as usize, &bytes);
        }
    }

    fn post_send(&mut self, world: &mut World, n: usize, post: Post) {
        let memory = &self.nodes[n].core.fabric().memory();
        let in_buffer = |buffer: u32, len| memory.sge((MOST_SLOTS + buffer) as usize * SLOT, len);
        let part =
            |local: Local| memory.sge((local.addr - memory.addr) as usize, local.len as usize);
        let (conn, op, bytes, list, notify): (_, _, _, [Sge; 1], _) = match post {
            Post::Send { conn, bytes, notify } => {
                (conn, SendOp::Send, Some(bytes), [in_buffer(0, 0)], notify)
            }
            Post::SendBuffer { conn, buffer, len, notify } => {
                (conn, SendOp::Send, None, [in_buffer(buffer, len)], Some(notify))
            }
            Post::Write { conn, from, to, notify } => {
                let op = SendOp::Write { addr: to.addr, rkey: to.key };
                (conn, op, None, [part(from)], notify)
            }
            Post::Read { conn, into, from, notify } => {
                let op = SendOp::Read { addr: from.addr, rkey: from.key };
                (conn, op, None, [part(into)], Some(notify))
            }
            _ => return,
        };
        let (host, now) = (self.nodes[n].host, world.time());
        let Some(link) = self.link(n, conn).copied() else { return };
        let flags = if notify.is_some() { SendFlags::SIGNALED } else { SendFlags::empty() };
        let payload = match &bytes {
            Some(bytes) => Payload::Inline(bytes),
            None => Payload::Sges(&list),
        };
        let wr = SendWr { wr_id: notify.unwrap_or(0), to: To::Peer, op, flags, payload };
        self.tally.ops += 1;
        self.tally.bytes +=
            bytes.as_ref().map_or(u64::from(list[0].len), |bytes| bytes.len() as u64);
        match world.hosts[host].adapter.post_send(link.qp, &wr) {
            Ok(()) => world.hosts[host].adapter.ring_doorbell(now, link.qp),
            Err(fault) if self.is_disturbed(world) => {
                world.trace.line(world.kernel.now(), || format!("process {n}: {fault}"));
            }
            Err(fault) => world.violate(|| format!("process {n}: a send is refused: {fault}")),
        }
    }

    /// A queue pair for a connection, in INIT.
    fn make_queue_pair(&mut self, world: &mut World, n: usize, conn: ConnId) -> Option<QpNum> {
        let node = &mut self.nodes[n];
        let used =
            |index: &u8| node.links.iter().all(|link| link.num.0 & 0xff != u32::from(*index));
        let index = (0..=u8::MAX).find(used)?;
        let cap = QpCap {
            max_send_wr: DEPTH,
            max_recv_wr: 1,
            max_send_sge: 1,
            max_recv_sge: 1,
            max_inline_data: 128,
        };
        let init = QpInit {
            pd: node.pd,
            send_cq: node.cq,
            recv_cq: node.cq,
            srq: Some(node.srq),
            cap,
            qp_type: QpType::Rc,
            sq_sig_all: false,
        };
        let num = QpNum::new(world.hosts[node.host].address.port(), index);
        match world.hosts[node.host].adapter.create_qp(&init, num) {
            Ok((qp, _)) => {
                node.links.push(Link { conn, qp, num, peer: None, is_up: false });
                self.modify(world, n, qp, None, QpState::Init);
                Some(num)
            }
            Err(fault) => {
                world.violate(|| format!("process {n}: no queue pair: {fault}"));
                None
            }
        }
    }

    fn modify(
        &mut self,
        world: &mut World,
        n: usize,
        qp: QpId,
        peer: Option<(usize, QpNum)>,
        state: QpState,
    ) {
        let mut attr = QpAttr {
            state,
            path_mtu: 3,
            access: Access::REMOTE | Access::LOCAL_WRITE,
            av: AddressVector { is_global: true, port_num: 1, hop_limit: 64, ..Default::default() },
            port_num: 1,
            max_rd_atomic: 16,
            max_dest_rd_atomic: 16,
            min_rnr_timer: 12,
            timeout: 15,
            retry_cnt: 5,
            rnr_retry: 7,
            ..QpAttr::default()
        };
        if let Some((other, num)) = peer {
            attr.dest_qp_num = num.0;
            attr.av.dgid = Gid::from(world.hosts[self.nodes[other].host].address.ip());
        }
        let mask = M::STATE
            | match state {
                QpState::Init => M::PKEY_INDEX | M::PORT | M::ACCESS_FLAGS,
                QpState::Rtr => {
                    let reliable = M::MAX_DEST_RD_ATOMIC | M::MIN_RNR_TIMER;
                    M::AV | M::PATH_MTU | M::DEST_QPN | M::RQ_PSN | reliable
                }
                QpState::Rts => {
                    M::SQ_PSN | M::TIMEOUT | M::RETRY_CNT | M::RNR_RETRY | M::MAX_QP_RD_ATOMIC
                }
                _ => M::empty(),
            };
        let (host, now) = (self.nodes[n].host, world.time());
        world.wake(host);
        let done = world.hosts[host].adapter.modify_qp(now, qp, &attr, mask);
        world.serve(host);
        if let Err(fault) = done
            && !self.is_disturbed(world)
        {
            world.violate(|| format!("process {n}: {state:?} is refused: {fault}"));
        }
    }

    fn accept(
        &mut self,
        world: &mut World,
        n: usize,
        incoming: usize,
        conn: ConnId,
        welcome: Welcome,
    ) {
        let (to, theirs, num) = self.asked[incoming];
        let Some(own) = self.make_queue_pair(world, n, conn) else { return };
        let Some(link) = self.link(n, conn) else { return };
        (link.peer, link.is_up) = (Some((to, theirs)), true);
        let qp = link.qp;
        self.modify(world, n, qp, Some((to, num)), QpState::Rtr);
        self.modify(world, n, qp, Some((to, num)), QpState::Rts);
        let letter = Letter::Welcome { to, conn: theirs, from: (n, conn), welcome, num: own };
        self.send_letter(world, letter);
    }

    fn close(&mut self, world: &mut World, n: usize, conn: ConnId) {
        let Some(at) = self.nodes[n].links.iter().position(|link| link.conn == conn) else {
            return;
        };
        let link = self.nodes[n].links.remove(at);
        let (host, now) = (self.nodes[n].host, world.time());
        if let Err(fault) = world.hosts[host].adapter.destroy_qp(now, link.qp) {
            world.violate(|| format!("process {n}: a queue pair cannot be destroyed: {fault}"));
        }
        if let Some((to, conn)) = link.peer {
            self.send_letter(world, Letter::Gone { to, conn });
        }
    }

    /// A message of the connection manager arrives.
    pub(super) fn letter(&mut self, world: &mut World, index: usize) {
        let letter = self.letters[index];
        match letter {
            Letter::Hello { from, conn, to, hello, num } => {
                let at = |node: &super::Node| world.hosts[node.host].address == to.port;
                let there = self.nodes.iter().position(at);
                match there.filter(|there| world.hosts[self.nodes[*there].host].alive) {
                    Some(there) => {
                        self.asked.push((from, conn, num));
                        let incoming = self.asked.len() as u64 - 1;
                        self.event(world, there, Event::Incoming { incoming, hello });
                    }
                    None => {
                        let why = Refusal::Absent;
                        self.send_letter(world, Letter::Refused { to: from, conn, why });
                    }
                }
            }
            Letter::Welcome { to, conn, from, welcome, num } => {
                let Some(link) = self.link(to, conn) else {
                    return self.send_letter(world, Letter::Gone { to: from.0, conn: from.1 });
                };
                (link.peer, link.is_up) = (Some(from), true);
                let qp = link.qp;
                self.modify(world, to, qp, Some((from.0, num)), QpState::Rtr);
                self.modify(world, to, qp, Some((from.0, num)), QpState::Rts);
                self.event(world, to, Event::Connected { conn, welcome });
            }
            Letter::Refused { to, conn, why } => {
                self.close(world, to, conn);
                self.event(world, to, Event::Refused { conn, why });
            }
            Letter::Gone { to, conn } => {
                if self.link(to, conn).is_some() {
                    self.event(world, to, Event::Failed { conn });
                }
            }
        }
    }

    /// An engine takes in what has happened.
    pub(super) fn event(&mut self, world: &mut World, n: usize, event: Event) {
        if world.hosts[self.nodes[n].host].alive {
            let node = &mut self.nodes[n];
            if self.at_once {
                let delivery = node.core.deliver_event(node.bundle, event);
                node.given.extend(delivery);
            } else {
                node.core.handle_event(event);
            }
            self.carry_out(world, n);
        }
    }

    /// A program polls: completions, and queue pairs that have failed.
    pub(super) fn poll(&mut self, world: &mut World, n: usize) {
        let (host, cq) = (self.nodes[n].host, self.nodes[n].cq);
        world.wake(host);
        world.serve(host);
        let mut done = [Completion::default(); 16];
        loop {
            let count = world.poll_cq(host, cq, &mut done);
            for completion in &done[..count] {
                self.completion(world, n, completion);
            }
            if count < done.len() || world.violation.is_some() {
                break;
            }
        }
        self.take_datagram_events(world, n);
        let failed = |link: &&Link| {
            let info = world.hosts[host].adapter.query_qp(link.qp);
            link.is_up && info.is_ok_and(|info| info.attr.state == QpState::Err)
        };
        let failed: Vec<ConnId> =
            self.nodes[n].links.iter().filter(failed).map(|link| link.conn).collect();
        for conn in failed {
            if !self.is_disturbed(world) {
                world.violate(|| format!("process {n}: a connection fails without a cause"));
            }
            self.event(world, n, Event::Failed { conn });
        }
    }

    fn completion(&mut self, world: &mut World, n: usize, done: &Completion) {
        self.tally.completions += 1;
        world.trace.note(&[70, n as u64, done.wr_id, done.status as u64]);
        if self.nodes[n].ud.is_some() {
            return self.datagram_done(world, n, done);
        }
        let link = self.nodes[n].links.iter().find(|link| link.num == done.qp_num);
        let conn = link.map(|link| link.conn);
        let is_receive = done.wr_id & RECEIVE != 0;
        let slot = done.wr_id as u32;
        if done.status != WcStatus::Success {
            self.tally.errors += 1;
            if is_receive {
                self.event(world, n, Event::Unused { slot });
            }
            if let Some(conn) = conn {
                self.event(world, n, Event::Failed { conn });
            }
            return;
        }
        if is_receive {
            self.event(world, n, Event::Received { conn, slot, len: done.byte_len as usize });
        } else if let Some(conn) = conn {
            if let Some(lanes) = self.nodes[n].core.fabric_mut().lanes()
                && is_of_memory(done.wr_id)
            {
                lanes.count_done(conn);
            }
            self.event(world, n, Event::Done { conn, notify: done.wr_id });
        }
    }

    /// The program of a process takes one of its queue pairs to ERR.
    pub(super) fn break_one(&mut self, world: &mut World, n: usize) {
        let count = self.nodes[n].links.len();
        if count > 0 {
            let link = self.nodes[n].links[self.rng.index(count)];
            self.modify(world, n, link.qp, None, QpState::Err);
        }
    }

    /// The connection managers of others notice that a process is gone; or, of two, that the other is.
    pub(super) fn end_connections(&mut self, world: &mut World, gone: usize, of: Option<usize>) {
        let mut letters = Vec::new();
        for (n, node) in self.nodes.iter().enumerate() {
            let lost = |link: &&Link| {
                let Some((peer, _)) = link.peer else { return false };
                match of {
                    Some(other) => [n, peer] == [gone, other] || [n, peer] == [other, gone],
                    None => peer == gone && n != gone,
                }
            };
            let lost = node.links.iter().filter(lost);
            letters.extend(lost.map(|link| Letter::Gone { to: n, conn: link.conn }));
        }
        for letter in letters {
            self.send_letter(world, letter);
        }
    }
}
