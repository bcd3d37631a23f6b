//! What programs send, what their handlers do, and what must come of it.

use quipu_am::{
    Arg, Body, Delivery, DeliveryKind, Fabric, FromLane, Local, Mode, Operation, Outgoing, Payload,
    Replied, Status,
};

use super::fabric::{MAX_MEDIUM, Memory, SEGMENT, SOURCES};
use super::{LONGEST_HANDLER_NS, Programs};
use crate::rng::pattern;
use crate::world::World;

/// Handlers.
pub(super) const REQUEST: u16 = 1;
pub(super) const REPLY: u16 = 2;
pub(super) const GOT: u16 = 3;
/// One that nobody sets.
const NOBODY: u16 = 9;

/// Bytes of what is written or read at once, and of its place.
const PIECE: usize = 64;
/// The segment: what others read, where gets put it, what others write, what replies write.
const SHOWN: usize = 0;
const GOTTEN: usize = 64;
const WRITTEN: usize = 1024;
const ANSWERED: usize = 2048;
/// What replies are written from; requests are written from the memory after it.
const REPLY_SOURCE: usize = SOURCES;
const SOURCE: usize = SOURCES + PIECE;

/// What is known of a request.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Request {
    to: usize,
    /// The handler is not there: it must come back.
    is_bad: bool,
    /// The handler does not reply.
    silent: bool,
    /// It uses memory that the next of its kind uses, too.
    is_bulk: bool,
    executed: u32,
    replied: u32,
    returned: u32,
}

impl Request {
    fn is_over(&self) -> bool {
        self.replied + self.returned > 0
    }
}

/// A request that is ready to be sent.
pub(super) struct Drafted {
    pub args: Vec<Arg>,
    pub body: Draft,
    pub request: Request,
}

pub(super) enum Draft {
    Get { from: u64, to: u64, len: u64 },
    Message { handler: u16, payload: Bytes },
}

/// What a message carries.
pub(super) enum Bytes {
    None,
    Medium(Vec<u8>),
    Bulk { from: Local, offset: u64 },
}

impl Bytes {
    pub(super) fn body(&self) -> Body<'_> {
        match self {
            Self::None => Body::Short,
            Self::Medium(bytes) => Body::Medium(bytes),
            Self::Bulk { from, offset } => Body::Bulk { from: *from, offset: *offset },
        }
    }
}

/// The bytes of a request.
fn bytes_of(n: i32, number: i32, len: usize) -> Vec<u8> {
    pattern((n as u64) << 32 | number as u64, 0, len)
}

/// The bytes that a process shows, and those that its bulk replies write.
fn shown(n: usize) -> Vec<u8> {
    pattern(0x5348_0000 + n as u64, 0, PIECE)
}

fn answered(n: usize) -> Vec<u8> {
    pattern(0x414e_0000 + n as u64, 0, PIECE)
}

/// Fills the memory of a process.
pub(super) fn fill(memory: &Memory, n: usize) {
    memory.write(SEGMENT + SHOWN, &shown(n));
    memory.write(REPLY_SOURCE, &answered(n));
}

impl Programs {
    /// The next request of a process.
    pub(super) fn draft(&mut self, n: usize, to: usize) -> Drafted {
        let number = self.nodes[n].next;
        let busy = self
            .requests
            .range((n as i32, 0)..(n as i32 + 1, 0))
            .any(|(_, request)| request.is_bulk && !request.is_over());
        let answer = self.rng.below(4) as Arg;
        let mut args = vec![n as Arg, number, answer, 0];
        let extra = self.rng.below(5);
        args.extend((0..extra).map(|arg| arg as Arg));
        let mut request = Request { to, silent: answer == 0, ..Request::default() };
        let memory = &self.nodes[n].core.fabric().memory();
        let body = match self.rng.below(8) {
            // A message to the endpoint itself has no segment of its own.
            0 if !busy && to != n => {
                request = Request { is_bulk: true, silent: false, ..request };
                args[2] = 1;
                memory.write(SOURCE, &bytes_of(n as i32, number, PIECE));
                let (from, offset) = (memory.local(SOURCE, PIECE), (WRITTEN + n * PIECE) as u64);
                args[3] = PIECE as Arg;
                Draft::Message { handler: REQUEST, payload: Bytes::Bulk { from, offset } }
            }
            1 if !busy && to != n => {
                request = Request { is_bulk: true, silent: false, ..request };
                Draft::Get { from: SHOWN as u64, to: GOTTEN as u64, len: PIECE as u64 }
            }
            2 => {
                request.is_bad = true;
                Draft::Message { handler: NOBODY, payload: Bytes::None }
            }
            3..=5 => {
                let len = 1 + self.rng.below(u64::from(MAX_MEDIUM)) as usize;
                args[3] = len as Arg;
                let payload = Bytes::Medium(bytes_of(n as i32, number, len));
                Draft::Message { handler: REQUEST, payload }
            }
            _ => Draft::Message { handler: REQUEST, payload: Bytes::None },
        };
        Drafted { args, body, request }
    }

    /// Ends the handlers whose time is over.
    pub(super) fn end_handlers(&mut self, world: &mut World, n: usize) {
        let now = world.kernel.now();
        let running = std::mem::take(&mut self.nodes[n].running);
        for (until, mut delivery) in running {
            if until > now {
                self.nodes[n].running.push((until, delivery));
                continue;
            }
            self.reply(world, n, &mut delivery);
            self.nodes[n].core.finish(&mut delivery);
            self.nodes[n].idle = 0;
        }
        self.carry_out(world, n);
    }

    /// Runs the handlers of messages that have come.
    pub(super) fn run_handlers(&mut self, world: &mut World, n: usize) {
        loop {
            let node = &mut self.nodes[n];
            let given = node.given.pop_front();
            let next = given.or_else(|| node.core.next_delivery(node.bundle));
            let Some(mut delivery) = next.or_else(|| self.take_from_lanes(n)) else {
                // Senders may have to wake this process now.
                if self.rng.percent(20) {
                    self.nodes[n].core.arm_lanes(1);
                }
                return self.carry_out(world, n);
            };
            let node = &mut self.nodes[n];
            node.idle = 0;
            // There is one endpoint.
            if !node.running.is_empty() {
                let mode: Mode = self.mode;
                return world.violate(|| format!("process {n}: two handlers at once, {mode:?}"));
            }
            if let Err(what) = self.check(world, n, &delivery) {
                return world.violate(|| format!("process {n}: {what}: {delivery:?}"));
            }
            if self.rng.percent(15) {
                let until = world.kernel.now() + self.rng.below(LONGEST_HANDLER_NS);
                self.nodes[n].running.push((until, delivery));
            } else {
                self.reply(world, n, &mut delivery);
                self.nodes[n].core.finish(&mut delivery);
            }
            self.carry_out(world, n);
        }
    }

    /// The next message of a lane whose handler may run.
    fn take_from_lanes(&mut self, n: usize) -> Option<Box<Delivery<u16>>> {
        let node = &mut self.nodes[n];
        if let Some(lanes) = node.core.fabric_mut().lanes() {
            lanes.disarm();
        }
        loop {
            match node.core.take_from_lane(node.bundle) {
                FromLane::Taken => {}
                FromLane::Run(delivery) => return Some(delivery),
                FromLane::Nothing | FromLane::Waits => return node.core.next_delivery(node.bundle),
            }
        }
    }

    /// Runs the handler of a request of a process to itself, and that of its reply.
    pub(super) fn run_own(&mut self, world: &mut World, n: usize, mut delivery: Delivery<u16>) {
        if let Err(what) = self.check(world, n, &delivery) {
            return world.violate(|| format!("process {n}: own message: {what}: {delivery:?}"));
        }
        if let Some(mut reply) = self.reply(world, n, &mut delivery) {
            if let Err(what) = self.check(world, n, &reply) {
                world.violate(|| format!("process {n}: own reply: {what}: {reply:?}"));
            }
            self.nodes[n].core.finish(&mut reply);
        }
        self.nodes[n].core.finish(&mut delivery);
    }

    /// Replies as the request asks; a reply of a process to itself.
    fn reply(
        &mut self,
        world: &mut World,
        n: usize,
        delivery: &mut Delivery<u16>,
    ) -> Option<Box<Delivery<u16>>> {
        let DeliveryKind::Request(_) = delivery.kind() else { return None };
        let args = delivery.args().to_vec();
        let own = args[0] == n as Arg;
        let payload = match args[2] {
            0 => return None,
            2 => Bytes::Medium(bytes_of(args[0], args[1], PIECE)),
            3 if !own => {
                let from = self.nodes[n].core.fabric().memory().local(REPLY_SOURCE, PIECE);
                Bytes::Bulk { from, offset: (ANSWERED + n * PIECE) as u64 }
            }
            _ => Bytes::None,
        };
        let args = [args[0], args[1], n as Arg];
        let out = Outgoing { handler: REPLY, args: &args, body: payload.body() };
        let core = &mut self.nodes[n].core;
        match core.reply(delivery, &out) {
            Err(error) => world.violate(|| format!("process {n}: a reply is refused: {error}")),
            Ok(Replied::Own(reply)) => return Some(reply),
            Ok(Replied::Done | Replied::Pending(_)) => {}
        }
        if core.reply(delivery, &out).is_ok() {
            world.violate(|| format!("process {n}: a second reply is taken"));
        }
        None
    }

    /// Whether a handler may run, and with that.
    fn check(
        &mut self,
        world: &mut World,
        n: usize,
        delivery: &Delivery<u16>,
    ) -> Result<(), String> {
        world.trace.line(world.kernel.now(), || {
            format!("process {n} runs {:?} {:?}", delivery.kind(), delivery.args())
        });
        let disturbed = self.is_disturbed(world);
        let args = delivery.args();
        let (from, number) = (args[0], args[1]);
        let request = self.requests.get_mut(&(from, number)).ok_or("nobody has sent that")?;
        match delivery.kind() {
            DeliveryKind::Request(_) => request.executed += 1,
            DeliveryKind::Reply => request.replied += 1,
            DeliveryKind::Got => (request.executed, request.replied) = (1, request.replied + 1),
            DeliveryKind::Returned { status, operation, .. } => {
                request.returned += 1;
                let expected =
                    if request.is_bad { Status::BadHandler } else { Status::Unreachable };
                if matches!(operation, Operation::Reply(_)) {
                    return Err("a reply comes back".into());
                }
                if status != expected && status != Status::Unreachable {
                    return Err(format!("must come back for another reason than {status}"));
                }
                if !request.is_bad && !disturbed {
                    return Err("it comes back without a cause".into());
                }
            }
        }
        let Request { executed, replied, returned, is_bad, silent, to, .. } = *request;
        if executed > 1 || replied + returned > 1 || replied > executed || (is_bad && executed > 0)
        {
            return Err(format!(
                "executed {executed} times, {replied} replies, {returned} returned"
            ));
        }
        if matches!(delivery.kind(), DeliveryKind::Request(_)) && to != n {
            return Err(format!("it was sent to process {to}"));
        }
        if silent && replied > 0 {
            return Err("nobody has replied".into());
        }
        self.check_payload(n, delivery)
    }

    fn check_payload(&self, n: usize, delivery: &Delivery<u16>) -> Result<(), String> {
        let memory = &self.nodes[n].core.fabric().memory();
        let args = delivery.args();
        let (bytes, expected) = match (&delivery.payload, delivery.kind()) {
            (_, DeliveryKind::Returned { .. }) | (Payload::None, _) => return Ok(()),
            (Payload::Slot { slot, at, len }, _) => {
                let mut bytes = vec![0; *len as usize];
                self.nodes[n].core.fabric().load(*slot, *at as usize, &mut bytes);
                (bytes, bytes_of(args[0], args[1], *len as usize))
            }
            (Payload::Copy(bytes), _) => (bytes.to_vec(), bytes_of(args[0], args[1], bytes.len())),
            (Payload::Segment(part), kind) => {
                let expected = match kind {
                    DeliveryKind::Got => {
                        let to = self.requests.get(&(args[0], args[1])).map_or(0, |it| it.to);
                        shown(to)
                    }
                    DeliveryKind::Reply => answered(args[2] as usize),
                    _ => bytes_of(args[0], args[1], PIECE),
                };
                (memory.read((part.addr - memory.addr) as usize, part.len as usize), expected)
            }
        };
        let right = bytes == expected;
        right.then_some(()).ok_or_else(|| format!("{} bytes of payload are wrong", bytes.len()))
    }

    /// Whether every request of those who live has ended.
    pub(super) fn check_all(&self, world: &mut World) {
        for ((from, number), request) in &self.requests {
            let Some(node) = self.nodes.get(*from as usize) else { continue };
            if !world.hosts[node.host].alive {
                continue;
            }
            let Request { executed, replied, returned, silent, to, .. } = *request;
            let own = to == *from as usize;
            let ended = if silent { executed + returned > 0 } else { replied + returned == 1 };
            // What a silent one has done at a peer that has died since is not known.
            let unknown = silent && !world.hosts[self.nodes[to].host].alive;
            if !ended && !own && !unknown {
                return world
                    .violate(|| format!("request {from}/{number} never ends: {request:?}"));
            }
        }
    }
}
