//! The smallest NIC there can be: two FIFOs, each reached through a register. The processor moves every byte.
//!
//! It is the example of `docs/add-a-nic.md`, and what hosts have that only load the machine under test.

use std::collections::VecDeque;

use super::{Driver, Io, Nic, Packet, Read, Received, Task, frame_of, frame_word};
use crate::costs::Cost;
use crate::cpu::Cpu;
use crate::error::DriverFault;
use crate::frames::FrameId;
use crate::ledger::Category;
use crate::memory::Slab;
use crate::os;
use crate::plan::NicPlan;
use crate::world::CoreId;

/// Load: takes a frame from the receive FIFO, 0 for none.
const RX: u32 = 0x00;
/// Store: puts a frame into the transmit FIFO.
const TX: u32 = 0x08;
/// Store: 1 lets frames interrupt.
const MASK: u32 = 0x10;

/// The hardware.
pub(crate) struct Fifo {
    queue: VecDeque<FrameId>,
    bytes: u64,
    limit: u64,
    unmasked: bool,
}

impl Fifo {
    /// Empty FIFOs.
    pub(crate) fn new(plan: &NicPlan) -> Self {
        Self { queue: VecDeque::new(), bytes: 0, limit: plan.rx_fifo.0, unmasked: false }
    }
}

impl Nic for Fifo {
    fn store(&mut self, io: &mut Io<'_>, register: u32, value: u64) -> Result<(), DriverFault> {
        match register {
            TX => {
                let frame = frame_of(value).filter(|id| io.frame(*id).is_some());
                let rule = "only a frame that exists can be sent";
                let frame = frame.ok_or(DriverFault { register: "TX", value, rule })?;
                io.transmit(frame);
            }
            MASK => {
                self.unmasked = value & 1 == 1;
                if self.unmasked && !self.queue.is_empty() {
                    io.interrupt();
                }
            }
            _ => {
                let rule = "there is no such register";
                return Err(DriverFault { register: "store", value: register.into(), rule });
            }
        }
        Ok(())
    }

    fn load(&mut self, io: &mut Io<'_>, register: u32, _: CoreId) -> Result<Read, DriverFault> {
        if register != RX {
            let rule = "there is no such register";
            return Err(DriverFault { register: "load", value: register.into(), rule });
        }
        let Some(frame) = self.queue.pop_front() else { return Ok(Read::Value(0)) };
        self.bytes -= io.frame_bytes(frame);
        Ok(Read::Value(frame_word(frame)))
    }

    fn receive(&mut self, io: &mut Io<'_>, frame: FrameId) -> Result<bool, DriverFault> {
        let bytes = io.frame_bytes(frame);
        if self.bytes.saturating_add(bytes) > self.limit {
            return Ok(false);
        }
        self.bytes += bytes;
        self.queue.push_back(frame);
        if self.unmasked && self.queue.len() == 1 {
            io.interrupt();
        }
        Ok(true)
    }

    fn timer(&mut self, _: &mut Io<'_>, _: u32) -> Result<(), DriverFault> {
        Ok(())
    }

    fn memory_done(&mut self, _: &mut Io<'_>, _: u64) -> Result<(), DriverFault> {
        Ok(())
    }
}

/// The driver.
pub(crate) struct FifoDriver {
    /// The most bytes of a packet for which the processor pays; 0 moves packets for nothing.
    most: u64,
}

impl FifoDriver {
    /// A driver for packets of up to `most` bytes.
    pub(crate) fn new(most: u64) -> Self {
        Self { most }
    }

    /// Moves `len` bytes through a register, a word at a time.
    async fn move_bytes(&self, cpu: &Cpu, at: u64, len: u64, write: bool) {
        let words = len.min(self.most).div_ceil(8);
        if words > 0 {
            cpu.touch(Category::Driver, at, len, write);
            cpu.burst(Category::Driver, words, write);
            cpu.sync().await;
        }
    }
}

impl Driver for FifoDriver {
    fn start<'a>(&'a self, cpu: &'a Cpu) -> Task<'a, ()> {
        Box::pin(async { cpu.write_register(Category::Driver, MASK, 1) })
    }

    fn interrupt<'a>(&'a self, cpu: &'a Cpu) -> Task<'a, ()> {
        Box::pin(async {
            cpu.write_register(Category::Driver, MASK, 0);
            os::raise_softirq(cpu);
        })
    }

    fn poll<'a>(&'a self, cpu: &'a Cpu, budget: u32) -> Task<'a, bool> {
        Box::pin(async move {
            for _ in 0..budget {
                let word = cpu.read_register(Category::Driver, RX).await;
                let Some(frame) = frame_of(word) else {
                    cpu.write_register(Category::Driver, MASK, 1);
                    return false;
                };
                cpu.charge(Category::Driver, Cost::Fifo);
                let (buffer, data) = os::alloc_buffer(cpu);
                let len = cpu.world().frames.get(frame).map_or(0, |frame| frame.bytes());
                self.move_bytes(cpu, data, len, true).await;
                os::deliver(cpu, Received { buffer, data, frame, deferred: None }).await;
            }
            true
        })
    }

    fn transmit<'a>(&'a self, cpu: &'a Cpu, packet: Packet) -> Task<'a, Option<Packet>> {
        Box::pin(async move {
            cpu.charge(Category::Driver, Cost::Fifo);
            self.move_bytes(cpu, packet.header, packet.header_len, false).await;
            for (at, len) in &packet.payload {
                self.move_bytes(cpu, *at, *len, false).await;
            }
            cpu.write_register(Category::Driver, TX, frame_word(packet.frame));
            cpu.free(Slab::Header, packet.header);
            None
        })
    }
}
