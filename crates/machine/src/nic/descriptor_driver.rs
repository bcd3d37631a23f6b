//! The driver of the descriptor NIC.

use std::cell::RefCell;
use std::collections::VecDeque;

use super::descriptor::{
    AUTO_CLEAR, CAUSE, DESCRIPTOR, DONE, MASK, MORE, RX, RX_BASE, RX_HEAD, RX_SIZE, RX_TAIL, TX,
    TX_BASE, TX_HEAD, TX_SIZE, TX_TAIL,
};
use super::{Driver, Packet, Received, Task, frame_of};
use crate::costs::Cost;
use crate::cpu::Cpu;
use crate::ledger::Category;
use crate::memory::{Slab, data_size};
use crate::os;
use crate::plan::{Completion, Plan};

/// Fresh receive descriptors for which the tail is moved at once.
const REFILL: u64 = 16;

/// A ring, as the driver knows it.
#[derive(Clone, Copy, Debug, Default)]
struct Ring {
    base: u64,
    size: u64,
    /// The next descriptor that the NIC will have used.
    next: u64,
    /// The next descriptor to be written.
    tail: u64,
}

impl Ring {
    fn at(&self, counter: u64) -> u64 {
        self.base + counter % self.size * DESCRIPTOR
    }
}

#[derive(Debug, Default)]
struct State {
    rx: Ring,
    tx: Ring,
    /// Buffers of the receive ring, in its order: structure and data.
    buffers: VecDeque<(u64, u64)>,
    /// Where the tail of the receive ring was last told to the NIC.
    told: u64,
    /// Packets that the NIC has: counter of the last descriptor, and the headers.
    sent: VecDeque<(u64, u64)>,
}

/// The driver.
pub(crate) struct DescriptorDriver {
    state: RefCell<State>,
    rx_size: u64,
    tx_size: u64,
    data_size: u64,
    completion: Completion,
    /// Message-signalled interrupts: the handler has no cause to load.
    msi: bool,
}

impl DescriptorDriver {
    /// A driver for the NIC of a plan.
    pub(crate) fn new(plan: &Plan) -> Self {
        Self {
            state: RefCell::default(),
            rx_size: plan.nic.rx_ring.into(),
            tx_size: plan.nic.tx_ring.into(),
            data_size: data_size(plan),
            completion: plan.nic.completion,
            msi: plan.nic.msi,
        }
    }

    /// Puts a fresh buffer into the receive ring.
    fn refill(&self, cpu: &Cpu) {
        cpu.charge(Category::Driver, Cost::DescriptorRefill);
        let (buffer, data) = os::alloc_buffer(cpu);
        let at = {
            let mut state = self.state.borrow_mut();
            state.buffers.push_back((buffer, data));
            let at = state.rx.at(state.rx.tail);
            state.rx.tail += 1;
            at
        };
        cpu.store(Category::Driver, at, data);
        cpu.store(Category::Driver, at + 8, self.data_size);
    }

    /// Tells the NIC of fresh buffers, if there are some.
    fn tell(&self, cpu: &Cpu, least: u64) {
        let tail = {
            let mut state = self.state.borrow_mut();
            let tail = state.rx.tail;
            if tail - state.told < least {
                return;
            }
            state.told = tail;
            tail
        };
        cpu.write_register(Category::Driver, RX_TAIL, tail);
    }

    /// Whether the NIC has used the next receive descriptor; with a head that was read from its register,
    /// memory need not be asked.
    async fn next_received(&self, cpu: &Cpu, head: Option<u64>) -> Option<(u64, u64)> {
        let (counter, at) = {
            let state = self.state.borrow();
            (state.rx.next, state.rx.at(state.rx.next))
        };
        cpu.sync().await;
        if head.is_some_and(|head| counter >= head) {
            return None;
        }
        if cpu.load(Category::Driver, at + 8) & DONE == 0 {
            return None;
        }
        let mut state = self.state.borrow_mut();
        state.rx.next += 1;
        state.buffers.pop_front()
    }

    /// Frees what the NIC has sent.
    async fn reclaim(&self, cpu: &Cpu) {
        let head = match self.completion {
            Completion::Register if !self.state.borrow().sent.is_empty() => {
                Some(cpu.read_register(Category::Driver, TX_HEAD).await)
            }
            _ => None,
        };
        loop {
            let Some((last, header)) = self.state.borrow().sent.front().copied() else { return };
            let at = self.state.borrow().tx.at(last);
            let done = match head {
                Some(head) => last < head,
                None => cpu.load(Category::Driver, at + 8) & DONE != 0,
            };
            if !done {
                return;
            }
            cpu.charge(Category::Driver, Cost::DescriptorReclaim);
            cpu.free(Slab::Header, header);
            let mut state = self.state.borrow_mut();
            state.sent.pop_front();
            state.tx.next = last + 1;
        }
    }

    fn put(&self, cpu: &Cpu, at: u64, word: u64) {
        let place = {
            let mut state = self.state.borrow_mut();
            let place = state.tx.at(state.tx.tail);
            state.tx.tail += 1;
            place
        };
        cpu.store(Category::Driver, place, at);
        cpu.store(Category::Driver, place + 8, word);
    }

    async fn send(&self, cpu: &Cpu, packet: Packet) -> Option<Packet> {
        cpu.sync().await;
        let needs = 1 + packet.payload.len() as u64;
        let room = |state: &State| state.tx.size - (state.tx.tail - state.tx.next);
        if room(&self.state.borrow()) < needs + self.tx_size / 4 {
            self.reclaim(cpu).await;
        }
        if room(&self.state.borrow()) < needs {
            return Some(packet);
        }
        cpu.charge(Category::Driver, Cost::DescriptorTx);
        let more = |flag: bool| if flag { MORE } else { 0 };
        self.put(cpu, packet.header, packet.header_len | more(!packet.payload.is_empty()));
        let last = packet.payload.len().saturating_sub(1);
        for (index, (at, len)) in packet.payload.iter().enumerate() {
            self.put(cpu, *at, len | more(index < last));
        }
        let tail = {
            let mut state = self.state.borrow_mut();
            let tail = state.tx.tail;
            state.sent.push_back((tail - 1, packet.header));
            tail
        };
        cpu.write_register(Category::Driver, TX_TAIL, tail);
        None
    }
}

impl Driver for DescriptorDriver {
    fn start<'a>(&'a self, cpu: &'a Cpu) -> Task<'a, ()> {
        Box::pin(async move {
            let (rx, tx) = {
                let heap = &mut cpu.host().memory.heap;
                (heap.reserve(self.rx_size * DESCRIPTOR), heap.reserve(self.tx_size * DESCRIPTOR))
            };
            {
                let mut state = self.state.borrow_mut();
                state.rx = Ring { base: rx, size: self.rx_size, ..Ring::default() };
                state.tx = Ring { base: tx, size: self.tx_size, ..Ring::default() };
            }
            let write = |register, value| cpu.write_register(Category::Driver, register, value);
            write(RX_BASE, rx);
            write(RX_SIZE, self.rx_size);
            write(TX_BASE, tx);
            write(TX_SIZE, self.tx_size);
            // One descriptor stays free, so that a full ring is not an empty one.
            (1..self.rx_size).for_each(|_| self.refill(cpu));
            self.tell(cpu, 1);
            write(AUTO_CLEAR, u64::from(self.msi));
            write(MASK, RX | TX);
        })
    }

    fn interrupt<'a>(&'a self, cpu: &'a Cpu) -> Task<'a, ()> {
        Box::pin(async move {
            if !self.msi {
                cpu.read_register(Category::Driver, CAUSE).await;
            }
            cpu.write_register(Category::Driver, MASK, 0);
            os::raise_softirq(cpu);
        })
    }

    fn poll<'a>(&'a self, cpu: &'a Cpu, budget: u32) -> Task<'a, bool> {
        Box::pin(async move {
            let head = match self.completion {
                Completion::Register => Some(cpu.read_register(Category::Driver, RX_HEAD).await),
                Completion::Memory => None,
            };
            let mut taken = 0;
            while taken < budget {
                let Some((buffer, data)) = self.next_received(cpu, head).await else { break };
                taken += 1;
                cpu.charge(Category::Driver, Cost::DescriptorRx);
                let frame = frame_of(cpu.load(Category::Driver, data));
                self.refill(cpu);
                self.tell(cpu, REFILL);
                match frame {
                    Some(frame) => {
                        let received = Received { buffer, data, frame, deferred: None };
                        os::deliver(cpu, received).await;
                    }
                    None => os::free_buffer(cpu, buffer, data),
                }
            }
            self.tell(cpu, 1);
            self.reclaim(cpu).await;
            let more = taken == budget;
            if !more {
                cpu.write_register(Category::Driver, MASK, RX | TX);
            }
            more
        })
    }

    fn transmit<'a>(&'a self, cpu: &'a Cpu, packet: Packet) -> Task<'a, Option<Packet>> {
        Box::pin(self.send(cpu, packet))
    }
}
