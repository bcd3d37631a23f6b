//! A segment's way from TCP to the NIC, and TCP's deadlines.

use std::ops::Range;

use super::MOST_JOINED;
use super::socket::{Socket, touch_control};
use crate::costs::Cost;
use crate::cpu::Cpu;
use crate::frames::Frame;
use crate::ledger::Category;
use crate::memory::Slab;
use crate::nic::{Packet, frame_word};

/// Sends what TCP has to send on a socket, and sets its deadline.
pub(crate) async fn output(cpu: &Cpu, index: u32) {
    loop {
        let now = cpu.now();
        let segment = {
            let mut host = cpu.host();
            let most = if host.os.offload { MOST_JOINED } else { 0 };
            let socket = host.os.sockets.get_mut(index as usize);
            let tcp = socket.and_then(|socket| socket.tcp.as_mut());
            tcp.and_then(|tcp| tcp.poll_transmit_joined(now / 1000, most))
        };
        let Some((segment, cut)) = segment else { break };
        let len = segment.payload.end - segment.payload.start;
        let cost = if len > 0 { Cost::TcpTxData } else { Cost::TcpTxAck };
        cpu.charge(Category::Stack, cost);
        let (frame, payload, control) = {
            let host = cpu.host();
            let socket = &host.os.sockets[index as usize];
            let frame = Frame {
                to: socket.peer,
                conn: socket.conn,
                header: segment.header,
                len: len as u32,
                cut: cut.unwrap_or(0),
                number: 0,
            };
            (frame, pieces(socket, &segment.payload), socket.control)
        };
        touch_control(cpu, control);
        let header = cpu.alloc(Slab::Header);
        let header_len = frame.header_len();
        cpu.touch(Category::Stack, header, header_len, true);
        let frame = cpu.world().keep(frame);
        cpu.host().memory.heap.set_word(header, frame_word(frame));
        cpu.charge(Category::Stack, Cost::IpTx);
        transmit(cpu, Packet { header, header_len, payload, frame }).await;
    }
    arm(cpu, index);
}

/// Where a range of the stream is in memory. Buffers are as long as segments, so there is mostly one.
fn pieces(socket: &Socket, range: &Range<u64>) -> Vec<(u64, u64)> {
    let mut pieces = Vec::with_capacity(1);
    if range.is_empty() {
        return pieces;
    }
    let first = socket.unacked.partition_point(|it| it.offset + it.len <= range.start);
    for buffer in socket.unacked.range(first..) {
        if buffer.offset >= range.end {
            break;
        }
        let from = range.start.max(buffer.offset);
        let to = range.end.min(buffer.offset + buffer.len);
        pieces.push((buffer.data + from - buffer.offset, to - from));
    }
    pieces
}

/// Hands a packet to the driver, or queues it.
async fn transmit(cpu: &Cpu, packet: Packet) {
    let Some(driver) = cpu.driver() else { return };
    let waits = !cpu.host().os.queue.is_empty();
    if waits {
        queue(cpu, packet, false);
        return run_queue(cpu).await;
    }
    let lock = !driver.is_lockless();
    if lock {
        cpu.lock_transmit().await;
    }
    let back = driver.transmit(cpu, packet).await;
    if lock {
        cpu.unlock_transmit().await;
    }
    if let Some(packet) = back {
        queue(cpu, packet, false);
    }
}

/// Queues a packet, in front if it was taken from there; drops it if the queue is full.
fn queue(cpu: &Cpu, packet: Packet, front: bool) {
    let mut world = cpu.world();
    let os = &mut world.hosts[usize::from(cpu.id.host)].os;
    if front {
        os.queue.push_front(packet);
    } else if os.queue.len() < os.queue_limit {
        os.queue.push_back(packet);
    } else {
        os.queue_dropped += 1;
        world.frames.remove(packet.frame);
        world.hosts[usize::from(cpu.id.host)].memory.heap.free(Slab::Header, packet.header);
    }
}

/// Hands queued packets to the driver, as far as the NIC has room.
pub(super) async fn run_queue(cpu: &Cpu) {
    let Some(driver) = cpu.driver() else { return };
    let lock = !driver.is_lockless();
    if cpu.host().os.queue.is_empty() {
        return;
    }
    if lock {
        cpu.lock_transmit().await;
    }
    loop {
        let packet = cpu.host().os.queue.pop_front();
        let Some(packet) = packet else { break };
        if let Some(packet) = driver.transmit(cpu, packet).await {
            queue(cpu, packet, true);
            break;
        }
    }
    if lock {
        cpu.unlock_transmit().await;
    }
}

/// Sets the deadline of a socket's TCP.
fn arm(cpu: &Cpu, index: u32) {
    let mut world = cpu.world();
    let socket = world.hosts[usize::from(cpu.id.host)].os.sockets.get_mut(index as usize);
    let Some(socket) = socket else { return };
    let deadline = socket.tcp.as_ref().and_then(|tcp| tcp.poll_timeout());
    let at = deadline.map_or(u64::MAX, |ns| ns.saturating_mul(1000));
    if at != socket.deadline {
        socket.deadline = at;
        if at < u64::MAX {
            world.set_timer(cpu.id.host, at);
        }
    }
}

/// Carries out the deadlines that have passed.
pub(super) async fn run_timers(cpu: &Cpu) {
    let now = cpu.now();
    let due: Vec<u32> = {
        let host = cpu.host();
        let is_due = |(_, socket): &(usize, &Socket)| socket.deadline <= now;
        host.os.sockets.iter().enumerate().filter(is_due).map(|(at, _)| at as u32).collect()
    };
    for index in due {
        if let Some(tcp) = &mut cpu.host().os.sockets[index as usize].tcp {
            tcp.handle_timeout(now / 1000);
        }
        // Read again by `arm`.
        cpu.host().os.sockets[index as usize].deadline = u64::MAX;
        output(cpu, index).await;
    }
    let next = cpu.host().os.sockets.iter().map(|socket| socket.deadline).min();
    if let Some(at) = next.filter(|at| *at < u64::MAX) {
        cpu.world().set_timer(cpu.id.host, at);
    }
}
