//! A NIC with descriptor rings in memory, as most are.
//!
//! A descriptor is two words: the address of a buffer; its length in the low 20 bits, [`MORE`] if the packet
//! goes on in the next descriptor, [`DONE`] once the NIC has used it. Head and tail are counters that run
//! freely; the place in the ring is the counter modulo the ring's size.

use std::collections::VecDeque;

use super::moderation::{Delay, Moderation};
use super::{Io, Nic, Read, frame_of, frame_word};
use crate::error::DriverFault;
use crate::frames::FrameId;
use crate::plan::NicPlan;
use crate::world::CoreId;

/// Load: the pending causes, which it clears ([`RX`], [`TX`]).
pub(super) const CAUSE: u32 = 0x08;
/// Store: the causes that interrupt.
pub(super) const MASK: u32 = 0x10;
/// Store: 1 clears the causes that an interrupt tells of (message-signalled interrupts), so that no handler
/// has to load them.
pub(super) const AUTO_CLEAR: u32 = 0x18;
/// Store: address of the receive ring.
pub(super) const RX_BASE: u32 = 0x20;
/// Store: its descriptors.
pub(super) const RX_SIZE: u32 = 0x28;
/// Store: the NIC may use descriptors before this counter.
pub(super) const RX_TAIL: u32 = 0x30;
/// Load: the NIC has used the descriptors before this counter.
pub(super) const RX_HEAD: u32 = 0x38;
/// As for receive.
pub(super) const TX_BASE: u32 = 0x40;
/// As for receive.
pub(super) const TX_SIZE: u32 = 0x48;
/// As for receive.
pub(super) const TX_TAIL: u32 = 0x50;
/// As for receive.
pub(super) const TX_HEAD: u32 = 0x58;

/// Bytes of a descriptor.
pub(super) const DESCRIPTOR: u64 = 16;
/// The NIC has used this descriptor.
pub(super) const DONE: u64 = 1 << 63;
/// The packet goes on in the next descriptor.
pub(super) const MORE: u64 = 1 << 62;
/// The bits of the length.
pub(super) const LEN: u64 = 0xf_ffff;

/// Cause: a packet was received.
pub(super) const RX: u64 = 1;
/// Cause: a packet was sent.
pub(super) const TX: u64 = 2;

/// Kinds of memory accesses, in the upper half of their tags; the lower half is a counter.
const RX_FETCH: u64 = 1;
const RX_STATUS: u64 = 2;
const TX_FETCH: u64 = 3;
const TX_DATA: u64 = 4;
const TX_STATUS: u64 = 5;

/// Most frames of a packet that is cut.
const MOST_CUTS: u32 = 256;

/// Most descriptors of a packet.
const MOST_FRAGMENTS: usize = 64;

/// Timers.
const INTERRUPT: u32 = 0;
const SENT: u32 = 1;

/// A ring in memory, as the NIC knows it.
#[derive(Clone, Debug, Default)]
struct Ring {
    base: u64,
    size: u64,
    /// The NIC may use descriptors before.
    tail: u64,
    /// Descriptors before were fetched.
    fetched: u64,
    /// Descriptors before are done.
    head: u64,
    fetching: bool,
    /// Fetched and not used: counter, address, second word.
    cache: VecDeque<(u64, u64, u64)>,
}

impl Ring {
    fn at(&self, counter: u64) -> u64 {
        self.base.wrapping_add(counter % self.size.max(1) * DESCRIPTOR)
    }

    /// Moves the tail.
    fn set_tail(&mut self, register: &'static str, value: u64) -> Result<(), DriverFault> {
        if value < self.tail || value - self.head.min(value) > self.size {
            let rule = "the tail runs ahead of the head by at most the ring's size (ring overrun)";
            return Err(DriverFault { register, value, rule });
        }
        self.tail = value;
        Ok(())
    }

    /// Fetches the next descriptors if few are left, or if the last packet is not complete.
    fn fetch(&mut self, io: &mut Io<'_>, most: u64, tag: u64) {
        let open = self.cache.back().is_some_and(|(_, _, word)| word & MORE != 0);
        let enough = self.cache.len() as u64 * 2 > most && !open;
        if self.fetching || self.fetched == self.tail || enough {
            return;
        }
        let to_end = self.size - self.fetched % self.size;
        let count = (self.tail - self.fetched).min(most).min(to_end);
        self.fetching = true;
        io.read_memory(self.at(self.fetched), count * DESCRIPTOR, tag << 32 | count);
    }

    fn take_fetched(&mut self, io: &Io<'_>, count: u64) {
        self.fetching = false;
        for counter in self.fetched..self.fetched + count {
            let at = self.at(counter);
            self.cache.push_back((counter, io.word(at), io.word(at + 8)));
        }
        self.fetched += count;
    }
}

/// A packet whose payload is being fetched.
#[derive(Clone, Debug)]
struct Outgoing {
    frame: Option<FrameId>,
    /// Fragments that are not here yet.
    missing: u32,
    /// Counter of its last descriptor.
    last: u64,
    bytes: u64,
    since: u64,
}

/// The hardware.
pub(crate) struct Descriptor {
    rx: Ring,
    tx: Ring,
    fetch: u64,
    outstanding: usize,
    fifo: VecDeque<(FrameId, u64)>,
    fifo_bytes: u64,
    fifo_limit: u64,
    /// Packets on their way to memory: counter of the descriptor, address, frame, bytes.
    incoming: VecDeque<(u64, u64, FrameId, u64)>,
    outgoing: VecDeque<Outgoing>,
    /// Bytes in the transmit FIFO, and those of each frame on the link.
    tx_bytes: u64,
    tx_limit: u64,
    sending: VecDeque<u64>,
    interrupts: Moderation,
}

impl Descriptor {
    /// A NIC that is switched off.
    pub(crate) fn new(plan: &NicPlan) -> Self {
        let delay = Delay::SinceLast(plan.interrupt_delay.0);
        Self {
            rx: Ring::default(),
            tx: Ring::default(),
            fetch: plan.fetch.into(),
            outstanding: plan.outstanding as usize,
            fifo: VecDeque::new(),
            fifo_bytes: 0,
            fifo_limit: plan.rx_fifo.0,
            incoming: VecDeque::new(),
            outgoing: VecDeque::new(),
            tx_bytes: 0,
            tx_limit: plan.tx_fifo.0,
            sending: VecDeque::new(),
            interrupts: Moderation::new(delay, 0, INTERRUPT),
        }
    }

    /// Moves frames from the FIFO to memory, as far as there are descriptors.
    fn run_rx(&mut self, io: &mut Io<'_>) -> Result<(), DriverFault> {
        while self.incoming.len() < self.outstanding && !self.fifo.is_empty() {
            let Some((counter, at, word)) = self.rx.cache.pop_front() else { break };
            let Some((frame, since)) = self.fifo.pop_front() else { break };
            let bytes = io.frame_bytes(frame);
            if word & LEN < bytes || at == 0 {
                let rule = "a receive buffer has room for the largest frame";
                return Err(DriverFault { register: "RX ring", value: at, rule });
            }
            io.stage(frame, "nic queue", since);
            // Data and status follow each other: posted writes are not reordered.
            io.write_memory(at, bytes, 0);
            self.incoming.push_back((counter, at, frame, bytes));
            io.write_memory(self.rx.at(counter), DESCRIPTOR, RX_STATUS << 32);
        }
        self.rx.fetch(io, self.fetch, RX_FETCH);
        Ok(())
    }

    fn rx_done(&mut self, io: &mut Io<'_>) -> Result<(), DriverFault> {
        let Some((counter, at, frame, bytes)) = self.incoming.pop_front() else { return Ok(()) };
        let descriptor = self.rx.at(counter);
        let stored =
            io.set_word(at, frame_word(frame)) && io.set_word(descriptor + 8, DONE | bytes);
        if !stored {
            let rule = "a receive buffer lies in memory";
            return Err(DriverFault { register: "RX ring", value: at, rule });
        }
        self.fifo_bytes -= bytes;
        self.rx.head = counter + 1;
        self.interrupts.raise(io, RX);
        self.run_rx(io)
    }

    /// Fetches the payload of packets, as far as there is room for them.
    fn run_tx(&mut self, io: &mut Io<'_>) -> Result<(), DriverFault> {
        while self.outgoing.len() < self.outstanding {
            let end = self.tx.cache.iter().position(|(_, _, word)| word & MORE == 0);
            let Some(end) = end else {
                if self.tx.cache.len() > MOST_FRAGMENTS {
                    let rule = "a packet has at most 64 descriptors";
                    let value = self.tx.cache.len() as u64;
                    return Err(DriverFault { register: "TX ring", value, rule });
                }
                break;
            };
            let bytes: u64 = self.tx.cache.range(..=end).map(|(_, _, word)| word & LEN).sum();
            if bytes == 0 || bytes > self.tx_limit {
                let rule = "a packet has bytes, and no more than the transmit FIFO";
                return Err(DriverFault { register: "TX ring", value: bytes, rule });
            }
            if self.tx_bytes + bytes > self.tx_limit {
                break;
            }
            self.tx_bytes += bytes;
            let (first, header, _) = self.tx.cache[0];
            let named = frame_of(io.word(header));
            let Some((id, frame)) = named.and_then(|id| Some((id, io.frame(id)?))) else {
                let rule = "a packet begins with its headers";
                return Err(DriverFault { register: "TX ring", value: header, rule });
            };
            if frame.cut > 0 && frame.len / u32::from(frame.cut) >= MOST_CUTS {
                let rule = "a packet is cut into at most 256 frames";
                return Err(DriverFault { register: "TX ring", value: frame.cut.into(), rule });
            }
            let missing = end as u32 + 1;
            let (last, since) = (first + end as u64, io.now());
            self.outgoing.push_back(Outgoing { frame: Some(id), missing, last, bytes, since });
            for (_, at, word) in self.tx.cache.drain(..=end) {
                io.read_memory(at, word & LEN, TX_DATA << 32 | last & 0xffff_ffff);
            }
        }
        self.tx.fetch(io, self.fetch, TX_FETCH);
        Ok(())
    }

    /// A fragment is here; sends the packets in front that are complete.
    fn tx_data(&mut self, io: &mut Io<'_>, last: u64) -> Result<(), DriverFault> {
        let of = self.outgoing.iter_mut().find(|packet| packet.last & 0xffff_ffff == last);
        if let Some(packet) = of {
            packet.missing = packet.missing.saturating_sub(1);
        }
        while self.outgoing.front().is_some_and(|packet| packet.missing == 0) {
            let Some(packet) = self.outgoing.pop_front() else { break };
            if let Some(frame) = packet.frame {
                io.stage(frame, "nic memory", packet.since);
                let sent = io.transmit(frame);
                self.sending.push_back(packet.bytes);
                io.after(sent - io.now(), SENT);
            }
            let status = TX_STATUS << 32 | packet.last & 0xffff_ffff;
            io.write_memory(self.tx.at(packet.last), DESCRIPTOR, status);
        }
        self.run_tx(io)
    }

    /// The status of the next packet is in memory; `last` are the low bits of its descriptor's counter.
    fn tx_status(&mut self, io: &mut Io<'_>, last: u64) {
        let behind = last.wrapping_sub(self.tx.head) & 0xffff_ffff;
        let counter = self.tx.head + behind;
        io.set_word(self.tx.at(counter) + 8, DONE);
        self.tx.head = counter + 1;
        self.interrupts.raise(io, TX);
    }

    fn set_size(ring: &mut Ring, register: &'static str, value: u64) -> Result<(), DriverFault> {
        if !(1..=1 << 20).contains(&value) {
            let rule = "a ring has 1 to 1048576 descriptors";
            return Err(DriverFault { register, value, rule });
        }
        ring.size = value;
        Ok(())
    }

    /// A ring must be set up before its tail moves.
    fn must_be_up(ring: &Ring, register: &'static str) -> Result<(), DriverFault> {
        if ring.base == 0 || ring.size == 0 {
            let rule = "base and size come before the tail";
            return Err(DriverFault { register, value: ring.base, rule });
        }
        Ok(())
    }
}

impl Nic for Descriptor {
    fn store(&mut self, io: &mut Io<'_>, register: u32, value: u64) -> Result<(), DriverFault> {
        match register {
            MASK => self.interrupts.set_mask(io, value),
            AUTO_CLEAR => self.interrupts.set_auto_clear(value & 1 == 1),
            RX_BASE => self.rx.base = value,
            TX_BASE => self.tx.base = value,
            RX_SIZE => return Self::set_size(&mut self.rx, "RX_SIZE", value),
            TX_SIZE => return Self::set_size(&mut self.tx, "TX_SIZE", value),
            RX_TAIL => {
                Self::must_be_up(&self.rx, "RX_TAIL")?;
                self.rx.set_tail("RX_TAIL", value)?;
                return self.run_rx(io);
            }
            TX_TAIL => {
                Self::must_be_up(&self.tx, "TX_TAIL")?;
                self.tx.set_tail("TX_TAIL", value)?;
                return self.run_tx(io);
            }
            _ => {
                let rule = "there is no such register";
                return Err(DriverFault { register: "store", value: register.into(), rule });
            }
        }
        Ok(())
    }

    fn load(&mut self, _: &mut Io<'_>, register: u32, _: CoreId) -> Result<Read, DriverFault> {
        Ok(Read::Value(match register {
            CAUSE => self.interrupts.clear(u64::MAX),
            MASK => self.interrupts.mask(),
            RX_HEAD => self.rx.head,
            TX_HEAD => self.tx.head,
            _ => {
                let rule = "there is no such register";
                return Err(DriverFault { register: "load", value: register.into(), rule });
            }
        }))
    }

    fn receive(&mut self, io: &mut Io<'_>, frame: FrameId) -> Result<bool, DriverFault> {
        let bytes = io.frame_bytes(frame);
        if self.fifo_bytes + bytes > self.fifo_limit {
            return Ok(false);
        }
        self.fifo_bytes += bytes;
        self.fifo.push_back((frame, io.now()));
        self.run_rx(io)?;
        Ok(true)
    }

    fn timer(&mut self, io: &mut Io<'_>, what: u32) -> Result<(), DriverFault> {
        match what {
            INTERRUPT => self.interrupts.expire(io),
            _ => {
                self.tx_bytes -= self.sending.pop_front().unwrap_or(0);
                self.run_tx(io)?;
            }
        }
        Ok(())
    }

    fn memory_done(&mut self, io: &mut Io<'_>, tag: u64) -> Result<(), DriverFault> {
        let low = tag & 0xffff_ffff;
        match tag >> 32 {
            RX_FETCH => {
                self.rx.take_fetched(io, low);
                self.run_rx(io)
            }
            RX_STATUS => self.rx_done(io),
            TX_FETCH => {
                self.tx.take_fetched(io, low);
                self.run_tx(io)
            }
            TX_DATA => self.tx_data(io, low),
            TX_STATUS => {
                self.tx_status(io, low);
                Ok(())
            }
            _ => Ok(()),
        }
    }
}
