//! A whole adapter: the input is a program that calls it in any order, with any arguments, and its
//! peers, which say anything on streams, in messages between engines, and in shared memory. The first
//! byte says how the queue pairs are connected to begin with.
#![no_main]

#[path = "adapter/input.rs"]
mod input;
#[path = "adapter/neighbour.rs"]
mod neighbour;
mod shares;
#[path = "adapter/wires.rs"]
mod wires;
#[path = "adapter/world.rs"]
mod world;

use input::Input;
use libfuzzer_sys::fuzz_target;
use quipu_iwarp::wire::control::Control;
use quipu_iwarp::wire::mpa::{CRC_LEN, crc32c, fpdu_len};
use quipu_iwarp::wire::rdmap::{
    AtomicOp, AtomicRequest, AtomicResponse, FlushRequest, Immediate, ReadRequest, TaggedOp,
    UntaggedOp, queue,
};
use quipu_iwarp::wire::{Payload as WirePayload, Stag};
use quipu_nic::mem::Access;
use quipu_nic::mem::ring::{SlotHeader, Stall};
use quipu_nic::*;
use shares::Shares;
use world::{ALL, Carriage, World};

static SHARES: Shares<2> = Shares::new(["a send done", "a receive done"]);

/// Steps of a run.
const STEPS: usize = 300;

fuzz_target!(|data: &[u8]| {
    SHARES.begin();
    let mut input = Input(data);
    let mut world = World::new(input.byte());
    for _ in 0..STEPS {
        if input.is_over() {
            break;
        }
        step(&mut world, &mut input);
        world.settle();
    }
    world.check();
});

fn step(world: &mut World, input: &mut Input<'_>) {
    match input.byte() % 18 {
        0 | 1 => send(world, input),
        2 => receive(world, input),
        3 => modify(world, input),
        4 => time(world, input),
        5 => connections(world, input),
        6 => raw(world, input),
        7 | 8 => segment(world, input),
        9 => link_message(world, input),
        10 => scribble(world, input),
        11 | 12 => slot(world, input),
        13 => control(world, input),
        14 => memory(world, input),
        15 => world.poll(),
        16 => long(world, input),
        _ => {
            let (wire, count) = (input.byte(), input.count());
            world.arrive(usize::from(wire) % world.wires.len().max(1), count as usize);
        }
    }
}

fn qp(world: &World, input: &mut Input<'_>) -> (usize, QpId) {
    let index = usize::from(input.byte()) % world.qps.len();
    (index, world.qps[index])
}

fn key(world: &World, input: &mut Input<'_>) -> u32 {
    let open = world.region.map_or(0, |region| region.key.0);
    match input.byte() % 8 {
        0 => input.word(),
        // The key of the secret with another tag: a guess that is nearly right.
        1 => world.secret.key.0 ^ 0x01,
        2 => world.window.1.0.wrapping_add(u32::from(input.byte() & 3)),
        _ => open,
    }
}

fn address(world: &World, input: &mut Input<'_>) -> u64 {
    match input.byte() % 8 {
        0 => input.long(),
        1 => world.base().wrapping_sub(u64::from(input.byte())),
        _ => world.base() + u64::from(input.count() & 0xfff),
    }
}

fn send(world: &mut World, input: &mut Input<'_>) {
    let (_, id) = qp(world, input);
    let (addr, rkey) = (address(world, input), key(world, input));
    let op = match input.byte() % 13 {
        0 => SendOp::Send,
        1 => SendOp::SendImm(input.word()),
        2 => SendOp::SendInv(rkey),
        3 => SendOp::Write { addr, rkey },
        4 => SendOp::AtomicWrite { addr: addr & !7, rkey },
        5 => SendOp::WriteImm { addr, rkey, imm: 1 },
        6 | 7 => SendOp::Read { addr, rkey },
        8 => SendOp::CompareSwap { addr, rkey, compare: 0, swap: 1 },
        9 => SendOp::FetchAdd { addr, rkey, add: 1 },
        10 => SendOp::LocalInv { key: rkey },
        11 => {
            let (len, how) = (input.count().into(), input.byte());
            let placement = Placement::from_bits_truncate(how & 3);
            SendOp::Flush(Flush { addr, rkey, len, whole: how & 4 != 0, placement })
        }
        _ => {
            let mr = world.region.map_or(MrId(0), |region| region.id);
            let len = input.count().into();
            let access = Access::from_bits_truncate(input.byte().into());
            let bind = BindMw { mw: world.window.0, rkey, mr, addr, len, access };
            SendOp::BindMw(bind)
        }
    };
    let lkey = world.region.map_or(0, |region| region.key.0);
    let lists: Vec<_> = (0..input.byte() % 5)
        .map(|_| world.sge(input.count(), if input.flag() { 8 } else { input.count() }, lkey))
        .collect();
    let flags = SendFlags::from_bits_truncate(input.byte().into()) - SendFlags::INLINE;
    let inline = input.byte() % 8 == 0;
    let payload = if inline { Payload::Inline(input.bytes()) } else { Payload::Sges(&lists) };
    let to = world.carriage.to(input.byte() % 16);
    let wr = SendWr { wr_id: 1, to, op, flags, payload };
    let expected = world.adapter.check_send(id, &wr, 0);
    let how = input.byte();
    // What programs that post one request go through first.
    let at_once = how & 64 != 0
        && (world.adapter.post_at_once(world.now, id, &wr)
            || world.adapter.post_to_stream(id, &wr));
    if at_once {
        assert_eq!(expected, Ok(()), "what is posted at once may be posted");
        world.posted += 1;
        return;
    }
    let posted = world.adapter.post_send(id, &wr);
    assert_eq!(posted, expected, "what is checked is what is refused");
    world.posted += u64::from(posted.is_ok());
    if how % 4 != 0 && !(how & 128 != 0 && world.adapter.ring_at_once(id)) {
        world.adapter.ring_doorbell(world.now, id);
    }
}

fn receive(world: &mut World, input: &mut Input<'_>) {
    let (index, id) = qp(world, input);
    let lkey = world.region.map_or(0, |region| region.key.0);
    let list: Vec<_> =
        (0..input.byte() % 4).map(|_| world.sge(input.count(), input.count(), lkey)).collect();
    let list = if list.is_empty() && input.flag() { vec![world.whole(lkey)] } else { list };
    let posted = if index == 1 {
        world.adapter.post_srq_recv(world.now, world.srq, 2, &list)
    } else {
        world.adapter.post_recv(world.now, id, 2, &list)
    };
    world.posted += u64::from(posted.is_ok());
}

fn modify(world: &mut World, input: &mut Input<'_>) {
    use QpState::{Err, Init, Reset, Rtr, Rts, Sqd, Sqe};
    let (index, id) = qp(world, input);
    let state = input.pick(&[Init, Rtr, Rts, Sqd, Rts, Err, Reset, Sqe]);
    let (mut attr, mut mask) = world.attr(index, state);
    match input.byte() % 8 {
        0 => mask = QpAttrMask::from_bits_truncate(input.word()),
        1 => mask = QpAttrMask::STATE,
        2 => attr.access = Access::from_bits_truncate(input.byte().into()),
        3 => attr.dest_qp_num = input.word(),
        4 => attr.timeout = input.byte(),
        5 if input.byte() % 8 == 0 => {
            world.adapter.destroy_qp(world.now, id).unwrap();
            world.qps[index] = world.create_qp(index as u8);
            return;
        }
        _ => {}
    }
    let _ = world.adapter.modify_qp(world.now, id, &attr, mask);
    let _ = world.adapter.query_qp(id).unwrap();
}

fn time(world: &mut World, input: &mut Input<'_>) {
    let next = world.adapter.poll_timeout();
    world.now = match (input.flag(), next) {
        (true, Some(next)) => next.max(world.now),
        _ => world.now.after(u64::from(input.count()) * 1_000_000),
    };
    world.adapter.handle_timeout(world.now);
    let next = world.adapter.poll_timeout();
    assert!(next.is_none_or(|next| next > world.now), "a stale deadline spins");
    if input.flag() && world.adapter.arm() && input.flag() {
        world.adapter.disarm();
    }
}

fn connections(world: &mut World, input: &mut Input<'_>) {
    let which = usize::from(input.byte());
    let wanted = (!world.wanted.is_empty()).then(|| which % world.wanted.len());
    // A queue pair that asks reaches the second neighbour, whose GID it was given.
    let neighbour = which % 2;
    let (now, link) = (world.now, world.neighbours[neighbour].link);
    match (input.byte() % 8, wanted) {
        (0, _) if !world.wires.is_empty() => {
            let wire = world.wires.remove(which % world.wires.len());
            world.adapter.handle_lost(now, wire.conn, Loss::Closed);
        }
        (1, _) if link.is_none() => {
            world.link_up(neighbour, input.flag());
        }
        (2, _) if input.byte() % 8 == 0 => {
            if let Some(link) = world.neighbours[neighbour].link.take() {
                world.adapter.handle_link_down(now, link);
            }
        }
        (3 | 4, Some(at)) => {
            let conn = world.wanted.remove(at);
            world.adapter.handle_reached_stream(now, conn);
            world.add_wire(conn);
        }
        (5, Some(at)) => {
            let Some(link) = world.neighbours[1].link.or(link) else { return };
            let conn = world.wanted.remove(at);
            if !world.adapter.handle_reached_link(now, conn, link) {
                world.adapter.handle_lost(now, conn, Loss::Refused);
            }
        }
        (7, _) if matches!(world.carriage, Carriage::Plain) => {
            world.adopt(which % world.qps.len(), input.byte());
        }
        (6, Some(at)) => {
            let conn = world.wanted.remove(at);
            world.adapter.handle_lost(now, conn, Loss::Refused);
        }
        _ => {
            let request = world.request();
            if let Some(wire) = world.accepted()
                && input.flag()
            {
                world.say(wire, &request);
            }
        }
    }
}

/// Bytes on a stream: as they are, or as ULPDUs.
fn raw(world: &mut World, input: &mut Input<'_>) {
    let wire = usize::from(input.byte()) % world.wires.len().max(1);
    let (framed, ulpdu) = (input.flag(), input.bytes());
    if !framed {
        return world.say(wire, ulpdu);
    }
    let mut fpdu = vec![0; fpdu_len(ulpdu.len())];
    fpdu[..2].copy_from_slice(&(ulpdu.len() as u16).to_be_bytes());
    fpdu[2..2 + ulpdu.len()].copy_from_slice(ulpdu);
    world.say(wire, &with_crc(fpdu));
}

fn with_crc(mut fpdu: Vec<u8>) -> Vec<u8> {
    let covered = fpdu.len() - CRC_LEN;
    let crc = crc32c(&fpdu[..covered]).to_le_bytes();
    fpdu[covered..].copy_from_slice(&crc);
    fpdu
}

/// The sink of the read at a position of the send queue.
fn sink(position: u32) -> Stag {
    Stag(1 << 31 | position)
}

/// A message that a peer might send, perhaps with a bit of its header turned.
fn segment(world: &mut World, input: &mut Input<'_>) {
    use UntaggedOp as Op;
    let at = usize::from(input.byte()) % world.wires.len().max(1);
    let (stag, to, size) = (key(world, input), address(world, input), input.count());
    let (which, turn, bit) = (input.byte() % 17, input.byte(), input.byte());
    let number = input.count();
    let bytes = input.bytes();
    let srq = match world.carriage.to(bit % 16) {
        To::Srq(number) => Some(number),
        _ => None,
    };
    let Some(wire) = world.wires.get_mut(at) else { return };
    let sender = &mut wire.sender;
    let mut out = vec![0; 2000];
    let mut data = |msg: &mut quipu_iwarp::Message, sender: &mut quipu_iwarp::Sender| {
        let len = bytes.len() as u32;
        sender.segment(msg, &mut out, len, |place| place.copy_from_slice(bytes)).map(|s| s.bytes)
    };
    let untagged = [Op::Send, Op::SendSe, Op::SendImm, Op::SendInvalidate, Op::Terminate];
    let used = match which {
        // A Send says how many requests are executed.
        0 | 1 => data(&mut begin(sender, untagged[usize::from(which)], number, srq), sender),
        2..=4 => data(&mut begin(sender, untagged[usize::from(which)], stag, srq), sender),
        5 | 6 => data(&mut sender.begin_tagged(TaggedOp::Write, Stag(stag), to), sender),
        7 => data(&mut sender.begin_tagged(TaggedOp::ReadResponse, sink(number), 0), sender),
        8 | 9 => {
            let (sink_stag, source_stag) = (Stag(number), Stag(stag));
            let ask = ReadRequest { sink_stag, sink_to: to, size, source_stag, source_to: to };
            whole(sender, Op::ReadRequest, &ask, srq, &mut out)
        }
        10 => {
            let op = AtomicOp::FetchAdd { add: 1, mask: 0 };
            let ask = AtomicRequest { id: number, stag: Stag(stag), to: to & !7, op };
            whole(sender, Op::AtomicRequest, &ask, srq, &mut out)
        }
        11 => {
            let answer = AtomicResponse { id: number, original: 5 };
            whole(sender, Op::AtomicResponse, &answer, srq, &mut out)
        }
        12 => {
            let immediate = Immediate { imm: 3, write_len: size };
            whole(sender, Op::Immediate, &immediate, srq, &mut out)
        }
        16 => {
            let (placement, level) = (bit & 7, bit >> 3 & 3);
            let ask = FlushRequest { stag: Stag(stag), to, len: size.into(), placement, level };
            whole(sender, Op::Flush, &ask, srq, &mut out)
        }
        13 | 14 => whole(sender, Op::Control, &Control::Ack { count: number }, srq, &mut out),
        _ => {
            let count = number;
            let nak = Control::RnrNak { count, timer: bit & 31 };
            let say = if bit & 32 == 0 { nak } else { Control::Resume { count } };
            whole(sender, Op::Control, &say, srq, &mut out)
        }
    };
    let Some(used) = used else { return };
    out.truncate(used);
    if turn < 32 {
        let at = usize::from(turn) % (out.len() - CRC_LEN);
        out[at] ^= 1 << (bit % 8);
        out = with_crc(out);
    }
    world.say(at, &out);
}

/// A long message of a peer, or the beginning of one, of which some parts come at once.
fn long(world: &mut World, input: &mut Input<'_>) {
    let at = usize::from(input.byte()) % world.wires.len().max(1);
    let (stag, to) = (key(world, input), address(world, input));
    let (which, number, more) = (input.byte(), input.count(), input.byte() % 4 == 0);
    let len = 4_000 + (input.word() % 12_500);
    let (part, parts) = (input.word() as usize % 8_000, input.byte() % 4);
    let Some(wire) = world.wires.get_mut(at) else { return };
    let sender = &mut wire.sender;
    let mut msg = match which % 4 {
        0 => begin(sender, UntaggedOp::Send, number, None),
        1 => begin(sender, UntaggedOp::SendImm, number, None),
        2 => sender.begin_tagged(TaggedOp::Write, Stag(stag), to),
        _ => sender.begin_tagged(TaggedOp::ReadResponse, sink(number), 0),
    };
    let mut out = vec![0; len as usize + 100];
    let remaining = len + if more { 10_000 } else { 0 };
    let staged = sender.segment(&mut msg, &mut out, remaining, |place| place.fill(which));
    let Some(staged) = staged else { return };
    world.send(at, &out[..staged.bytes]);
    (0..parts).for_each(|_| world.arrive(at, part));
}

/// Begins a message; those that may name a shared receive queue do so where connections have some.
fn begin(
    sender: &mut quipu_iwarp::Sender,
    op: UntaggedOp,
    ulp: u32,
    srq: Option<u32>,
) -> quipu_iwarp::Message {
    match srq {
        Some(srq) if op.queue() == queue::SEND => sender.begin_shared(op, ulp, srq),
        _ => sender.begin_untagged(op, ulp),
    }
}

fn whole(
    sender: &mut quipu_iwarp::Sender,
    op: UntaggedOp,
    payload: &impl WirePayload,
    srq: Option<u32>,
    out: &mut [u8],
) -> Option<usize> {
    let mut msg = begin(sender, op, 0, srq);
    sender.whole(&mut msg, out, payload)
}

fn link_message(world: &mut World, input: &mut Input<'_>) {
    let neighbour = usize::from(input.byte()) % 2;
    let Some(link) = world.neighbours[neighbour].link else { return };
    let heard = (!world.heard.is_empty()).then(|| input.pick(&[0, 1, 2]) % world.heard.len());
    let tag = match heard.map(|at| &world.heard[at]) {
        Some(LinkMessage::Request { tag, .. }) => *tag,
        Some(LinkMessage::Accept { own_tag, .. }) => *own_tag,
        _ => input.count().into(),
    };
    let end = LinkEnd { bell: input.count(), pd: input.count() };
    let hello = world.hello(input.pick(&[1, 9, 5]), input.byte() % 6);
    let offset = if input.flag() { 4096 } else { input.long() };
    let message = match input.byte() % 5 {
        0 => match LinkMessage::decode(input.take(128)) {
            Some(message) => message,
            None => return,
        },
        1 => LinkMessage::Request { tag: input.count().into(), hello, offset, end },
        2 => LinkMessage::Accept { tag, own_tag: input.count().into(), end },
        3 => LinkMessage::Reject { tag, hello },
        _ => LinkMessage::Close { tag },
    };
    world.adapter.handle_link_message(world.now, link, message);
}

/// The peer writes where it likes: both segments and its directory are mapped by it.
fn scribble(world: &mut World, input: &mut Input<'_>) {
    let neighbour = &world.neighbours[usize::from(input.byte()) % 2];
    let segment = match input.byte() % 4 {
        0 => &world.directory,
        1 => &neighbour.own,
        _ => &neighbour.peer,
    };
    // Most of it is payload; the pages with the guards, bells and counts are what matters.
    let offset = match input.byte() % 4 {
        0 => input.word() as usize,
        1 => 512 + usize::from(input.byte()) * 8,
        _ => 4096 + usize::from(input.byte()) * 8,
    };
    let bytes = input.bytes();
    let last = segment.len() - bytes.len();
    segment.write(offset % last, bytes).unwrap();
}

fn slot(world: &mut World, input: &mut Input<'_>) {
    let header = SlotHeader {
        opcode: input.byte() % 10,
        flags: input.byte() & 15,
        inline_len: 0,
        length: input.count(),
        imm: input.pick(&[0, 9, 10, 5]),
        raddr: address(world, input),
        rkey: key(world, input),
        ack: if input.flag() { world::SRQ_NUMBER } else { input.count() },
    };
    let answers = input.byte() % 3 == 0;
    let mut payload = input.bytes();
    payload = &payload[..payload.len().min(96)];
    let fits = input.flag();
    let which = usize::from(input.byte());
    let count = world.channels.len();
    let Some(channel) = world.channels.get_mut(which % count.max(1)) else { return };
    let length = if fits { payload.len() as u32 } else { header.length };
    let header = SlotHeader { length, ..header };
    let ring = &mut channel.outgoing;
    let _ = if answers {
        ring.responses.push(&header, payload)
    } else {
        ring.requests.push(&header, payload)
    };
}

fn control(world: &mut World, input: &mut Input<'_>) {
    let which = usize::from(input.byte());
    let count = world.channels.len();
    let Some(channel) = world.channels.get_mut(which % count.max(1)) else { return };
    let incoming = &mut channel.incoming;
    match input.byte() % 6 {
        0 => incoming.control.set_executed(input.count()),
        1 => {
            let (sequence, timer, attempt) = (input.count(), input.byte(), input.byte().into());
            incoming.control.set_stall(Some(Stall { sequence, timer, attempt }));
        }
        2 => incoming.control.arm(),
        3 => channel.outgoing.control.close(),
        _ => {
            while incoming.requests.peek().is_some() {
                incoming.requests.pop();
            }
            while incoming.responses.peek().is_some() {
                incoming.responses.pop();
            }
            incoming.publish();
        }
    }
}

fn memory(world: &mut World, input: &mut Input<'_>) {
    let choice = input.byte();
    let cq = world.cqs[usize::from(choice >> 7)];
    match choice % 8 {
        0 => {
            if let Some(region) = world.region
                && world.adapter.dereg_mr(world.now, region.id).is_ok()
            {
                world.region = None;
                world.adapter.memory_is_quiet();
            }
        }
        1 => {
            let access = Some(ALL & Access::from_bits_truncate(input.word()));
            if let Some(region) = world.region
                && let Ok(changed) =
                    world.adapter.rereg_mr(world.now, region.id, None, None, access)
            {
                world.region = Some(changed);
            }
        }
        2 => drop(world.adapter.resize_cq(cq, input.count())),
        3 => {
            let (max_wr, limit) = (input.count(), input.count());
            let max_wr = (max_wr % 4 == 0).then_some(max_wr);
            let _ = world.adapter.modify_srq(world.srq, max_wr, Some(limit));
        }
        4 => drop(world.adapter.req_notify_cq(world.now, cq, input.flag())),
        5 => drop(world.adapter.dealloc_pd(world.pd)),
        6 => drop(world.adapter.destroy_cq(cq)),
        _ => drop(world.adapter.destroy_srq(world.srq)),
    }
}
