//! A received packet's way to its socket.

use quipu_inet::tcp::{Event, Opening};
use quipu_wire::tcp::Flags;

use super::socket::{RxBuffer, free_acked, look, skip, touch_control};
use super::{MOST_JOINED, Socket, free_buffer, output, wake};
use crate::costs::Cost;
use crate::cpu::Cpu;
use crate::frames::Frame;
use crate::ledger::Category;
use crate::nic::Received;

/// What stands for the bytes of a payload: the stack looks at their number only.
static PAYLOAD: [u8; 1 << 16] = [0; 1 << 16];

/// What TCP made of a segment.
struct Outcome {
    placed: bool,
    /// Where the payload begins that was placed, and its length.
    offset: u64,
    trimmed: u64,
    len: u64,
    contiguous: u64,
}

impl Outcome {
    /// What was placed of the payload from `from` to `to`; none if nothing was.
    fn part(&self, from: u64, to: u64) -> Option<Self> {
        let begin = from.max(self.trimmed);
        let end = to.min(self.trimmed + self.len);
        (begin < end || from == to && self.len == 0).then(|| Self {
            placed: true,
            offset: self.offset + begin - self.trimmed,
            trimmed: begin - from,
            len: end.saturating_sub(begin),
            contiguous: self.contiguous,
        })
    }
}

/// Hands a packet from the driver to the stack, or joins it to those that it follows.
pub(crate) async fn deliver(cpu: &Cpu, received: Received) {
    let Some(frame) = cpu.world().frames.remove(received.frame) else {
        return free_buffer(cpu, received.buffer, received.data);
    };
    if !cpu.host().os.offload {
        return process(cpu, vec![(received, frame)]).await;
    }
    cpu.charge(Category::Stack, Cost::Gro);
    cpu.touch(Category::Stack, received.data, frame.header_len(), false);
    let follows = {
        let host = cpu.host();
        let len: u64 = host.os.joined.iter().map(|(_, frame)| u64::from(frame.len)).sum();
        let fits = len + u64::from(frame.len) <= MOST_JOINED;
        fits && host.os.joined.last().is_some_and(|(_, last)| goes_on(last, &frame))
    };
    if !follows {
        flush(cpu).await;
    }
    let ends = frame.len == 0 || frame.header.flags != Flags::ACK;
    cpu.host().os.joined.push((received, frame));
    if ends {
        flush(cpu).await;
    }
}

/// Whether a segment begins where another ended, and says nothing else that is new.
fn goes_on(last: &Frame, next: &Frame) -> bool {
    last.conn == next.conn
        && next.len > 0
        && last.header.seq.0.wrapping_add(last.len) == next.header.seq.0
        && last.header.ack == next.header.ack
        && last.header.options == next.header.options
}

/// Hands the segments that were joined to the stack.
pub(super) async fn flush(cpu: &Cpu) {
    let joined = std::mem::take(&mut cpu.host().os.joined);
    if !joined.is_empty() {
        process(cpu, joined).await;
    }
}

/// Lets the stack take a packet, or several that follow each other as one.
async fn process(cpu: &Cpu, parts: Vec<(Received, Frame)>) {
    let Some(mut whole) = parts.first().map(|(_, frame)| frame.clone()) else { return };
    whole.len = parts.iter().map(|(_, frame)| frame.len).sum();
    if let Some((_, last)) = parts.last() {
        whole.header.flags = last.header.flags;
    }
    let begun = cpu.now();
    let cost = if whole.len > 0 { Cost::TcpRxData } else { Cost::TcpRxAck };
    cpu.charge(Category::Stack, Cost::IpRx);
    if let Some((received, frame)) = parts.first() {
        cpu.touch(Category::Stack, received.data, frame.header_len(), false);
    }
    cpu.charge(Category::Stack, cost);
    let Some(index) = socket_of(cpu, &whole) else {
        return parts.iter().for_each(|(it, _)| free_buffer(cpu, it.buffer, it.data));
    };
    let control = cpu.host().os.sockets[index as usize].control;
    touch_control(cpu, control);
    let now = cpu.now();
    let outcome = handle(cpu, index, &whole, now).filter(|outcome| outcome.placed);
    handle_events(cpu, index);
    let mut at = 0;
    for (received, frame) in &parts {
        let end = at + u64::from(frame.len);
        match outcome.as_ref().and_then(|outcome| outcome.part(at, end)) {
            Some(part) => enqueue(cpu, index, frame, received, &part),
            None => discard(cpu, received).await,
        }
        at = end;
        let now = cpu.now();
        cpu.world().tracer.span(frame.number, "stack", begun, now);
    }
    // Only now does the socket have what TCP has.
    look(cpu, index, |socket| {
        if socket.untold >= 2 {
            socket.tell_room();
        }
    });
    output(cpu, index).await;
}

/// The socket that a frame is for.
fn socket_of(cpu: &Cpu, frame: &Frame) -> Option<u32> {
    let world = cpu.world();
    let ends = world.conns.get(frame.conn as usize)?;
    let end = ends.iter().find(|(host, _)| *host == cpu.id.host && frame.to == *host)?;
    Some(end.1)
}

/// Lets TCP take the segment.
fn handle(cpu: &Cpu, index: u32, frame: &Frame, now: u64) -> Option<Outcome> {
    let mut host = cpu.host();
    let socket = &mut host.os.sockets[index as usize];
    let payload = PAYLOAD.get(..frame.len as usize)?;
    let now_ns = now / 1000;
    if socket.tcp.is_none() {
        open(socket, frame, now_ns);
        return None;
    }
    let tcp = socket.tcp.as_mut()?;
    let received = tcp.handle_segment(now_ns, &frame.header, payload, false);
    let placement = received.placement;
    Some(Outcome {
        placed: placement.is_some(),
        offset: placement.as_ref().map_or(0, |it| it.offset),
        trimmed: placement.as_ref().map_or(0, |it| it.payload.start as u64),
        len: placement.as_ref().map_or(0, |it| (it.payload.end - it.payload.start) as u64),
        contiguous: received.contiguous,
    })
}

/// A segment for a socket that listens.
fn open(socket: &mut Socket, frame: &Frame, now_ns: u64) {
    let Some(listener) = &mut socket.listener else { return };
    let len = frame.len as usize;
    let opening = listener.handle_segment(now_ns, &socket.flow, &frame.header, len, true);
    if let Opening::HalfOpen(connection) | Opening::Open(connection) = opening {
        socket.tcp = Some(connection);
        socket.tell_room();
    }
}

/// Carries out what TCP tells.
fn handle_events(cpu: &Cpu, index: u32) {
    loop {
        let event = {
            let mut host = cpu.host();
            let tcp = host.os.sockets[index as usize].tcp.as_mut();
            tcp.and_then(|tcp| tcp.poll_event())
        };
        match event {
            None => return,
            Some(Event::Acked(acked)) => free_acked(cpu, index, acked),
            Some(Event::Connected) => {
                let core = {
                    let mut host = cpu.host();
                    let socket = &mut host.os.sockets[index as usize];
                    socket.established = true;
                    socket.core
                };
                wake(cpu, core);
            }
            // Connections are neither closed nor, within a run, given up.
            Some(_) => {}
        }
    }
}

/// Puts payload into the socket's queue, or keeps it until the gap before it is closed.
fn enqueue(cpu: &Cpu, index: u32, frame: &Frame, received: &Received, outcome: &Outcome) {
    let since = cpu.now();
    let core = {
        let mut host = cpu.host();
        let socket = &mut host.os.sockets[index as usize];
        let buffer = RxBuffer {
            buffer: received.buffer,
            data: received.data,
            skip: skip(frame.header.header_len()) + outcome.trimmed,
            offset: outcome.offset,
            len: outcome.len,
            read: 0,
            deferred: received.deferred,
            copying: false,
            number: frame.number,
            since,
        };
        socket.rx_memory += socket.truesize;
        if outcome.offset == socket.received() {
            socket.readable += buffer.len;
            socket.queue.push_back(buffer);
        } else {
            socket.out_of_order.insert(buffer.offset, buffer);
        }
        while let Some(entry) = socket.out_of_order.first_entry() {
            if *entry.key() != socket.queue.back().map_or(socket.read, |it| it.offset + it.len) {
                break;
            }
            let buffer = entry.remove();
            socket.readable += buffer.len;
            socket.queue.push_back(buffer);
        }
        debug_assert!(socket.received() <= outcome.contiguous);
        socket.untold += 1;
        (socket.readable > 0).then_some(socket.core)
    };
    if let Some(core) = core {
        wake(cpu, core);
    }
}

/// Throws a packet away, and what the NIC still has of it.
async fn discard(cpu: &Cpu, received: &Received) {
    free_buffer(cpu, received.buffer, received.data);
    if let Some(deferred) = received.deferred
        && let Some(driver) = cpu.driver()
    {
        driver.copy_deferred(cpu, deferred.bank, 0, 0).await;
    }
}

/// Copies all payload that is still in the NIC, and not being read, to the buffers of its packets.
pub(crate) async fn pull_deferred(cpu: &Cpu) {
    let Some(driver) = cpu.driver() else { return };
    loop {
        let next = {
            let mut host = cpu.host();
            let sockets = host.os.sockets.iter_mut();
            let mut buffers = sockets
                .flat_map(|socket| socket.queue.iter_mut().chain(socket.out_of_order.values_mut()));
            buffers.find(|buffer| buffer.deferred.is_some() && !buffer.copying).map(|buffer| {
                let from = buffer.read.max(buffer.in_memory());
                let bank = buffer.deferred.take().map_or(0, |deferred| deferred.bank);
                (bank, buffer.data + buffer.skip + from, buffer.len - from)
            })
        };
        let Some((bank, to, len)) = next else { return };
        driver.copy_deferred(cpu, bank, to, len).await;
    }
}
