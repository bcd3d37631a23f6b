//! The driver of V-SINIC: buffers are posted before packets come, each core transmits through a bank of its
//! own, and with zero copy the payload stays in the FIFO until its reader is known.

use std::cell::RefCell;
use std::collections::VecDeque;

use super::sinic_driver::{CAUSES, interrupt, send};
use super::sinic_registers::*;
use super::{Deferred, Driver, Packet, Received, Task, frame_of};
use crate::costs::Cost;
use crate::cpu::Cpu;
use crate::ledger::Category;
use crate::memory::data_size;
use crate::os;
use crate::plan::Plan;

/// A bank with a posted buffer.
#[derive(Clone, Copy, Debug)]
struct Posted {
    bank: u32,
    buffer: u64,
    data: u64,
}

/// The driver.
pub(crate) struct VsinicDriver {
    /// Banks in the order in which they will get packets.
    posted: RefCell<VecDeque<Posted>>,
    banks: u32,
    data_size: u64,
    zero_copy: bool,
    copied_first: u64,
    lockless: bool,
}

impl VsinicDriver {
    /// A driver for the NIC of a plan.
    pub(crate) fn new(plan: &Plan) -> Self {
        Self {
            posted: RefCell::default(),
            banks: plan.nic.virtual_count,
            data_size: data_size(plan),
            zero_copy: plan.nic.zero_copy,
            copied_first: plan.nic.zero_copy_size.into(),
            lockless: plan.nic.virtual_count >= plan.cpu.cores,
        }
    }

    /// Posts a fresh buffer to a bank that has no packet.
    fn post(&self, cpu: &Cpu, bank: u32) {
        let (buffer, data_at) = os::alloc_buffer(cpu);
        let value = data(data_at, self.data_size);
        cpu.write_register(Category::Driver, banked(bank, RX_DATA), value);
        self.posted.borrow_mut().push_back(Posted { bank, buffer, data: data_at });
    }

    /// Takes the packet of the bank in front, if it is there.
    async fn take(&self, cpu: &Cpu) -> Option<Received> {
        let Posted { bank, buffer, data } = self.posted.borrow().front().copied()?;
        let done = cpu.read_register(Category::Driver, banked(bank, RX_DONE)).await;
        if self.zero_copy && done & RX_DONE_HIGH != 0 {
            // Space is freed from the head of the FIFO only: payload that nobody reads would block it.
            os::pull_deferred(cpu).await;
        }
        if done & DONE_COMPLETE == 0 || done & DONE_BUSY != 0 {
            return None;
        }
        self.posted.borrow_mut().pop_front();
        cpu.charge(Category::Driver, Cost::VsinicRx);
        let deferred = if done & RX_DONE_MORE == 0 {
            self.post(cpu, bank);
            None
        } else if (self.posted.borrow().len() as u32) < self.banks / 4 {
            // Readers that wait for other connections would never free the banks in use.
            let at = data + self.copied_first;
            self.copy_deferred(cpu, bank, at, self.data_size).await;
            None
        } else {
            Some(Deferred { bank, copied: self.copied_first })
        };
        let frame = frame_of(cpu.load(Category::Driver, data));
        let received = frame.map(|frame| Received { buffer, data, frame, deferred });
        if received.is_none() {
            os::free_buffer(cpu, buffer, data);
        }
        received
    }
}

impl Driver for VsinicDriver {
    fn start<'a>(&'a self, cpu: &'a Cpu) -> Task<'a, ()> {
        Box::pin(async {
            let mut config = CONFIG_INT_EN | CONFIG_TX_EN | CONFIG_RX_EN;
            if self.zero_copy {
                config |= CONFIG_ZERO_COPY;
            }
            cpu.write_register(Category::Driver, CONFIG, config);
            (0..self.banks).for_each(|bank| self.post(cpu, bank));
            cpu.write_register(Category::Driver, INTR_MASK, CAUSES);
        })
    }

    fn interrupt<'a>(&'a self, cpu: &'a Cpu) -> Task<'a, ()> {
        Box::pin(interrupt(cpu))
    }

    fn poll<'a>(&'a self, cpu: &'a Cpu, budget: u32) -> Task<'a, bool> {
        Box::pin(async move {
            for _ in 0..budget {
                let Some(received) = self.take(cpu).await else {
                    cpu.write_register(Category::Driver, INTR_MASK, CAUSES);
                    // With full registers of causes, what came meanwhile interrupts.
                    return false;
                };
                os::deliver(cpu, received).await;
            }
            true
        })
    }

    fn transmit<'a>(&'a self, cpu: &'a Cpu, packet: Packet) -> Task<'a, Option<Packet>> {
        let bank = u32::from(cpu.id.core) % self.banks;
        Box::pin(send(cpu, bank, packet, Cost::VsinicTx))
    }

    fn is_lockless(&self) -> bool {
        self.lockless
    }

    fn copy_deferred<'a>(&'a self, cpu: &'a Cpu, bank: u32, to: u64, len: u64) -> Task<'a, bool> {
        Box::pin(async move {
            cpu.charge(Category::Copy, Cost::VsinicCopy);
            let value = if to == 0 { data(DISCARD, 0) } else { data(to, len) };
            cpu.write_register(Category::Copy, banked(bank, RX_DATA), value);
            let done = cpu.read_register(Category::Copy, banked(bank, RX_WAIT)).await;
            let finished = done & RX_DONE_MORE == 0;
            if finished {
                self.post(cpu, bank);
            }
            finished
        })
    }
}
