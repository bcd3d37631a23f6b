//! The driver of SINIC: it copies each packet out of the FIFO, and each part of a packet into it.

use super::sinic_registers::*;
use super::{Driver, Packet, Received, Task, frame_of, frame_word};
use crate::costs::Cost;
use crate::cpu::Cpu;
use crate::ledger::Category;
use crate::memory::{Slab, data_size};
use crate::os;
use crate::plan::Plan;

/// The causes that the driver wants to hear of.
pub(super) const CAUSES: u64 = INTR_RX_PACKET | INTR_RX_HIGH | INTR_TX_LOW;

/// The driver.
pub(crate) struct SinicDriver {
    data_size: u64,
}

impl SinicDriver {
    /// A driver for the NIC of a plan.
    pub(crate) fn new(plan: &Plan) -> Self {
        Self { data_size: data_size(plan) }
    }

    /// Copies the next packet to a fresh buffer; also says how many packets wait.
    async fn take(&self, cpu: &Cpu) -> (Option<Received>, u64) {
        let (buffer, data_at) = os::alloc_buffer(cpu);
        cpu.write_register(Category::Driver, RX_DATA, data(data_at, self.data_size));
        let done = cpu.read_register(Category::Driver, RX_WAIT).await;
        cpu.charge(Category::Driver, Cost::SinicRx);
        let frame = frame_of(cpu.load(Category::Driver, data_at));
        let received = frame.filter(|_| done & DONE_COMPLETE != 0).map(|frame| Received {
            buffer,
            data: data_at,
            frame,
            deferred: None,
        });
        if received.is_none() {
            os::free_buffer(cpu, buffer, data_at);
        }
        (received, done_packets(done))
    }
}

/// The interrupt handler of SINIC and V-SINIC.
pub(super) async fn interrupt(cpu: &Cpu) {
    cpu.read_register(Category::Driver, INTR_STATUS).await;
    cpu.write_register(Category::Driver, INTR_MASK, 0);
    os::raise_softirq(cpu);
}

/// Sends a packet through a bank: one copy for each part, waiting between them, not after the last.
pub(super) async fn send(cpu: &Cpu, bank: u32, packet: Packet, cost: Cost) -> Option<Packet> {
    // The engine may still have the last part of the packet before.
    let state = cpu.read_register(Category::Driver, banked(bank, TX_WAIT)).await;
    if state & TX_DONE_FULL != 0 {
        return Some(packet);
    }
    cpu.charge(Category::Driver, cost);
    let mut parts = vec![(packet.header, packet.header_len)];
    parts.extend(&packet.payload);
    let last = parts.len() - 1;
    cpu.store(Category::Driver, packet.header, frame_word(packet.frame));
    for (index, (at, len)) in parts.into_iter().enumerate() {
        if index > 0 {
            cpu.read_register(Category::Driver, banked(bank, TX_WAIT)).await;
        }
        let more = if index < last { DATA_MORE } else { 0 };
        let value = data(at, len) | more | DATA_CHECKSUM;
        cpu.write_register(Category::Driver, banked(bank, TX_DATA), value);
    }
    if last > 0 {
        cpu.free(Slab::Header, packet.header);
    } else {
        // The only part may not be copied yet: its memory is wanted again soon, but not at once.
        os::free_header_later(cpu, packet.header);
    }
    None
}

impl Driver for SinicDriver {
    fn start<'a>(&'a self, cpu: &'a Cpu) -> Task<'a, ()> {
        Box::pin(async {
            let config = CONFIG_INT_EN | CONFIG_TX_EN | CONFIG_RX_EN;
            cpu.write_register(Category::Driver, CONFIG, config);
            cpu.write_register(Category::Driver, INTR_MASK, CAUSES);
        })
    }

    fn interrupt<'a>(&'a self, cpu: &'a Cpu) -> Task<'a, ()> {
        Box::pin(interrupt(cpu))
    }

    fn poll<'a>(&'a self, cpu: &'a Cpu, budget: u32) -> Task<'a, bool> {
        Box::pin(async move {
            let mut waiting = done_packets(cpu.read_register(Category::Driver, RX_DONE).await);
            let mut taken = 0;
            while waiting > 0 && taken < budget {
                taken += 1;
                let (received, left) = self.take(cpu).await;
                waiting = left;
                if let Some(received) = received {
                    os::deliver(cpu, received).await;
                }
            }
            let more = waiting > 0;
            if !more {
                cpu.write_register(Category::Driver, INTR_MASK, CAUSES);
            }
            more
        })
    }

    fn transmit<'a>(&'a self, cpu: &'a Cpu, packet: Packet) -> Task<'a, Option<Packet>> {
        Box::pin(send(cpu, 0, packet, Cost::SinicTx))
    }
}
