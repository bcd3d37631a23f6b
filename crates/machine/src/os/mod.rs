//! The operating system: sockets, softirq, timers, and the paths that packets take through it.
//!
//! The TCP is the project's own ([`quipu_inet::tcp`]). What it does costs what the cost table says, and it
//! touches the memory that a kernel would touch.

mod receive;
mod socket;
mod transmit;

use std::collections::VecDeque;

use crate::costs::Cost;
use crate::cpu::Cpu;
use crate::frames::Frame;
use crate::ledger::Category;
use crate::memory::{Heap, Slab};
use crate::nic::{Packet, Received};
use crate::plan::Plan;
use crate::world::World;

pub(crate) use receive::{deliver, pull_deferred};
pub(crate) use socket::{Socket, accept_all, recv, send, send_message, take_message};
pub(crate) use transmit::output;

/// Bytes of a socket buffer's structure that are used with each packet.
const BUFFER_USED: u64 = 128;
/// Bytes of a connection's control block that are used with each segment.
const CONTROL_USED: u64 = 320;
/// Most payload of segments that are joined.
const MOST_JOINED: u64 = 64_000;
/// Bytes of a connection's control block.
const CONTROL_SIZE: u64 = 1024;

/// The state of a host's kernel.
#[derive(Debug)]
pub(crate) struct Os {
    pub(crate) sockets: Vec<Socket>,
    /// Packets that wait for room in the NIC.
    queue: VecDeque<Packet>,
    queue_limit: usize,
    /// When the next deadline of TCP is; `u64::MAX` for none.
    pub(crate) timer_at: u64,
    pub(crate) transmit_locked: bool,
    budget: u32,
    rounds: u32,
    /// Headers that the NIC may still be reading.
    limbo: VecDeque<u64>,
    /// Packets that were dropped because the queue was full.
    pub(crate) queue_dropped: u64,
    /// Segments are joined above the NIC, and cut in it.
    pub(crate) offload: bool,
    /// Received segments that follow each other.
    joined: Vec<(Received, Frame)>,
}

impl Os {
    /// A kernel without sockets.
    pub(crate) fn new(plan: &Plan, heap: &mut Heap) -> Self {
        // Text and data of the kernel lie at the front.
        heap.reserve(1 << 16);
        Self {
            sockets: Vec::new(),
            queue: VecDeque::new(),
            queue_limit: plan.os.queue as usize,
            timer_at: u64::MAX,
            transmit_locked: false,
            budget: plan.os.budget,
            rounds: plan.os.rounds,
            limbo: VecDeque::new(),
            queue_dropped: 0,
            offload: plan.nic.segment_offload,
            joined: Vec::new(),
        }
    }

    /// Segments that TCP sent again, on all sockets.
    pub(crate) fn retransmitted(&self) -> u64 {
        let tcp = self.sockets.iter().filter_map(|socket| socket.tcp.as_ref());
        tcp.map(|tcp| u64::from(tcp.counters().retransmitted)).sum()
    }
}

/// Allocates a socket buffer: the structure and room for a frame.
pub(crate) fn alloc_buffer(cpu: &Cpu) -> (u64, u64) {
    cpu.charge(Category::Buffer, Cost::BufferAlloc);
    let buffer = cpu.alloc(Slab::Buffer);
    cpu.touch(Category::Buffer, buffer, BUFFER_USED, true);
    (buffer, cpu.alloc(Slab::Data))
}

/// Frees a socket buffer.
pub(crate) fn free_buffer(cpu: &Cpu, buffer: u64, data: u64) {
    cpu.charge(Category::Buffer, Cost::BufferFree);
    cpu.touch(Category::Buffer, buffer, BUFFER_USED, true);
    cpu.free(Slab::Buffer, buffer);
    cpu.free(Slab::Data, data);
}

/// Frees headers that the NIC is about to have read.
pub(crate) fn free_header_later(cpu: &Cpu, header: u64) {
    let mut host = cpu.host();
    host.os.limbo.push_back(header);
    // A copy engine that is free again has read all but the last.
    if host.os.limbo.len() > 8
        && let Some(old) = host.os.limbo.pop_front()
    {
        host.memory.heap.free(Slab::Header, old);
    }
}

/// Has the softirq run on this core.
pub(crate) fn raise_softirq(cpu: &Cpu) {
    cpu.world().core(cpu.id).softirq = true;
}

/// What the kernel does between two steps of a program: interrupts, softirq, timers.
pub(crate) async fn service(cpu: &Cpu) {
    let rounds = cpu.host().os.rounds;
    for _ in 0..rounds {
        cpu.sync().await;
        let (interrupt, timer, softirq) = {
            let mut world = cpu.world();
            let core = world.core(cpu.id);
            let interrupt = std::mem::take(&mut core.interrupt);
            // The handler may raise the softirq, which runs after it.
            (interrupt, std::mem::take(&mut core.timer), interrupt || core.softirq)
        };
        if !(interrupt || timer || softirq) {
            return;
        }
        let Some(driver) = cpu.driver() else { return };
        if interrupt {
            cpu.charge(Category::Interrupt, Cost::IrqEntry);
            driver.interrupt(cpu).await;
            cpu.charge(Category::Interrupt, Cost::IrqExit);
        }
        if timer {
            cpu.charge(Category::Other, Cost::Timer);
            transmit::run_timers(cpu).await;
        }
        if std::mem::take(&mut cpu.world().core(cpu.id).softirq) {
            cpu.charge(Category::Interrupt, Cost::Softirq);
            let budget = cpu.host().os.budget;
            if driver.poll(cpu, budget).await {
                raise_softirq(cpu);
            }
            receive::flush(cpu).await;
            transmit::run_queue(cpu).await;
        }
    }
}

/// Puts the program to sleep until `ready`.
pub(crate) async fn wait(cpu: &Cpu, ready: impl Fn(&World) -> bool) {
    let mut slept = false;
    loop {
        service(cpu).await;
        if ready(&cpu.world()) {
            break;
        }
        slept = true;
        cpu.world().core(cpu.id).sleeping = true;
        cpu.idle().await;
    }
    cpu.world().core(cpu.id).sleeping = false;
    if slept {
        cpu.charge(Category::Other, Cost::Switch);
    }
}

/// Makes the program of a core ready, if it sleeps.
fn wake(cpu: &Cpu, core: u16) {
    let id = crate::world::CoreId { core, ..cpu.id };
    let sleeps = std::mem::take(&mut cpu.world().core(id).sleeping);
    if sleeps {
        cpu.charge(Category::Other, Cost::Wakeup);
    }
    if id != cpu.id {
        cpu.world().kick(id);
    }
}
