//! SINIC and V-SINIC: two FIFOs, one copy engine each, and a bank of registers for each packet in work.
//!
//! The base SINIC is the same with one bank. Loads of RxWait and TxWait are held until the bank's copy is
//! done, as the paper has it (section 3.1).

use std::collections::VecDeque;

use super::moderation::{Delay, Moderation};
use super::sinic_registers::*;
use super::{Io, Nic, Read, frame_of, frame_word};
use crate::error::DriverFault;
use crate::frames::FrameId;
use crate::plan::NicPlan;
use crate::world::CoreId;

/// Kinds of memory accesses, above the number of the bank in their tags.
const RX: u64 = 1 << 32;
const TX: u64 = 2 << 32;

/// Timers.
const INTERRUPT: u32 = 0;
const SENT: u32 = 1;

/// Packets after which gem5's model interrupts.
const MAX_INTR: u64 = 10;

/// A bank of registers.
#[derive(Clone, Debug, Default)]
struct Bank {
    rx_data: u64,
    rx_done: u64,
    tx_data: u64,
    tx_done: u64,
    /// Sequence number of the packet that it has, in the receive FIFO.
    packet: Option<u64>,
    /// Loads that are held.
    rx_held: Vec<CoreId>,
    tx_held: Vec<CoreId>,
}

/// A packet in the receive FIFO.
#[derive(Clone, Debug)]
struct Entry {
    frame: Option<FrameId>,
    len: u64,
    copied: u64,
    since: u64,
}

/// The receive FIFO. Space is freed from the head only: a packet that leaves from the middle keeps its place
/// until those before it have left.
#[derive(Clone, Debug, Default)]
struct RxFifo {
    entries: VecDeque<Entry>,
    /// Sequence number of the first entry.
    first: u64,
    /// Sequence number of the first packet that no bank has.
    next: u64,
    bytes: u64,
}

impl RxFifo {
    fn entry(&mut self, number: u64) -> Option<&mut Entry> {
        self.entries.get_mut(number.checked_sub(self.first)? as usize)
    }

    /// Packets that no bank has.
    fn waiting(&self) -> u64 {
        self.first + self.entries.len() as u64 - self.next
    }

    /// Frees the space of the packets at the head that have left.
    fn collect(&mut self) {
        while self.entries.front().is_some_and(|entry| entry.frame.is_none()) {
            if let Some(entry) = self.entries.pop_front() {
                self.bytes -= entry.len;
                self.first += 1;
            }
        }
    }
}

/// The hardware.
pub(crate) struct Sinic {
    plan: NicPlan,
    rx_max_copy: u64,
    tx_max_copy: u64,
    config: u64,
    banks: Vec<Bank>,
    rx: RxFifo,
    /// Whether packets are split: set below the low mark, cleared above the high one.
    rx_low: bool,
    /// The FIFO was empty since it was high; it was not high since it was empty.
    rx_empty: bool,
    /// The bank for which the receive engine copies.
    rx_engine: Option<usize>,
    /// Banks that want the rest of their packet.
    rx_busy: VecDeque<usize>,
    /// Banks that want a new packet.
    rx_list: VecDeque<usize>,
    tx_engine: Option<usize>,
    /// The bank whose packet is not complete.
    tx_owner: Option<usize>,
    tx_list: VecDeque<usize>,
    tx_frame: Option<FrameId>,
    tx_len: u64,
    tx_bytes: u64,
    tx_packets: u64,
    tx_full: bool,
    sending: VecDeque<u64>,
    interrupts: Moderation,
}

impl Sinic {
    /// A NIC that is switched off; packets have at most `max_copy` bytes.
    pub(crate) fn new(plan: &NicPlan, max_copy: u64) -> Self {
        let delay = Delay::SinceCause(plan.interrupt_delay.0);
        Self {
            plan: plan.clone(),
            rx_max_copy: max_copy,
            tx_max_copy: 16 << 10,
            config: 0,
            banks: vec![Bank::default(); plan.virtual_count as usize],
            rx: RxFifo::default(),
            rx_low: true,
            rx_empty: true,
            rx_engine: None,
            rx_busy: VecDeque::new(),
            rx_list: VecDeque::new(),
            tx_engine: None,
            tx_owner: None,
            tx_list: VecDeque::new(),
            tx_frame: None,
            tx_len: 0,
            tx_bytes: 0,
            tx_packets: 0,
            tx_full: false,
            sending: VecDeque::new(),
            interrupts: Moderation::new(delay, INTR_NO_DELAY, INTERRUPT),
        }
    }

    /// The bank of an address, and the register.
    fn decode(&self, address: u32) -> Result<(usize, u32), DriverFault> {
        let (bank, register) = ((address >> 8) as usize, address & 0xff);
        if bank >= self.banks.len() {
            let rule = "there is no such bank: VirtualCount says how many";
            return Err(DriverFault { register: "bank", value: bank as u64, rule });
        }
        let aligned = if register < RX_DATA { 4 } else { 8 };
        if register >= BANK_SIZE || register % aligned != 0 {
            let rule = "there is no such register";
            return Err(DriverFault { register: "address", value: address.into(), rule });
        }
        Ok((bank, register))
    }

    fn rx_state(&self, bank: usize) -> u64 {
        let bits = |flag: bool, bit: u64| if flag { bit } else { 0 };
        let waiting = self.rx.waiting();
        self.banks[bank].rx_done
            | waiting.min(0xffff) << 32
            | bits(waiting == 0, RX_DONE_EMPTY)
            | bits(self.rx.bytes > self.plan.rx_high.0, RX_DONE_HIGH)
            | bits(self.rx_empty, RX_DONE_NOT_HIGH)
    }

    fn tx_state(&self, bank: usize) -> u64 {
        let bits = |flag: bool, bit: u64| if flag { bit } else { 0 };
        let room = self.plan.tx_fifo.0.saturating_sub(self.tx_bytes);
        self.banks[bank].tx_done
            | self.tx_packets.min(0xffff) << 32
            | bits(room < self.tx_max_copy, TX_DONE_FULL)
            | bits(self.tx_bytes < self.plan.rx_low.0, TX_DONE_LOW)
    }

    /// Bank states and the head of the FIFO (RxStatus).
    fn rx_status(&self) -> u64 {
        let count =
            |is: fn(&Bank) -> bool| self.banks.iter().filter(|bank| is(bank)).count() as u64;
        let mapped = count(|bank| bank.packet.is_some());
        let busy = count(|bank| bank.rx_done & DONE_BUSY != 0);
        let dirty = count(|bank| bank.packet.is_some() && bank.rx_done & RX_DONE_MORE != 0);
        let started = self.rx.entries.front().is_some_and(|entry| entry.copied > 0);
        let head = self.banks.iter().position(|bank| started && bank.packet == Some(self.rx.first));
        dirty << 48 | mapped << 32 | busy << 16 | head.map_or(0xffff, |bank| bank as u64)
    }

    fn store_rx_data(
        &mut self,
        io: &mut Io<'_>,
        bank: usize,
        value: u64,
    ) -> Result<(), DriverFault> {
        let wrong = |rule| Err(DriverFault { register: "RxData", value, rule });
        if self.config & CONFIG_RX_EN == 0 {
            return wrong("the receiver must be switched on first (Config.RxEn)");
        }
        if self.banks[bank].rx_done & DONE_BUSY != 0 {
            return wrong("a busy bank takes no new copy: wait for RxDone or RxWait");
        }
        if value & DATA_VADDR != 0 {
            return wrong("addresses are physical (Vaddr is not supported)");
        }
        if data_len(value) == 0 && data_addr(value) != DISCARD {
            return wrong("a copy has at least one byte");
        }
        let state = &mut self.banks[bank];
        state.rx_data = value;
        state.rx_done = DONE_BUSY;
        match state.packet {
            Some(_) => self.rx_busy.push_back(bank),
            None => self.rx_list.push_back(bank),
        }
        self.run_rx(io)
    }

    /// Begins the next copy from the receive FIFO. The rest of a packet goes before a new one.
    fn run_rx(&mut self, io: &mut Io<'_>) -> Result<(), DriverFault> {
        while self.rx_engine.is_none() {
            let bank = match self.rx_busy.pop_front() {
                Some(bank) => bank,
                None if self.rx.waiting() > 0 => {
                    let Some(bank) = self.rx_list.pop_front() else { return Ok(()) };
                    self.banks[bank].packet = Some(self.rx.next);
                    self.rx.next += 1;
                    bank
                }
                None => return Ok(()),
            };
            self.begin_rx(io, bank)?;
        }
        Ok(())
    }

    fn begin_rx(&mut self, io: &mut Io<'_>, bank: usize) -> Result<(), DriverFault> {
        let value = self.banks[bank].rx_data;
        let splits = self.config & (CONFIG_ZERO_COPY | CONFIG_DELAY_COPY) != 0;
        let split = splits && self.rx_low && value & DATA_NO_DELAY == 0;
        let packet = self.banks[bank].packet;
        let Some(entry) = packet.and_then(|number| self.rx.entry(number)) else {
            let rule = "a bank's packet is in the FIFO";
            return Err(DriverFault { register: "RxData", value, rule });
        };
        let left = entry.len - entry.copied;
        let discard = data_addr(value) == DISCARD;
        let mut len = if discard { left } else { data_len(value).min(left) };
        if split && !discard && entry.copied == 0 && len > u64::from(self.plan.zero_copy_mark) {
            len = u64::from(self.plan.zero_copy_size);
        }
        if entry.copied == 0 {
            if let Some(frame) = entry.frame {
                io.stage(frame, "nic queue", entry.since);
            }
            entry.since = io.now();
        }
        self.rx_engine = Some(bank);
        if discard {
            self.finish_rx(io, bank, len)
        } else {
            // The length of the copy is kept where the driver cannot change it while the bank is busy.
            self.banks[bank].rx_data = value & !(0xf_ffff << 40) | len << 40;
            io.write_memory(data_addr(value), len, RX | bank as u64);
            Ok(())
        }
    }

    fn finish_rx(&mut self, io: &mut Io<'_>, bank: usize, len: u64) -> Result<(), DriverFault> {
        self.rx_engine = None;
        let at = data_addr(self.banks[bank].rx_data);
        let number = self.banks[bank].packet.unwrap_or(u64::MAX);
        let Some(entry) = self.rx.entry(number) else { return Ok(()) };
        let first = entry.copied == 0;
        entry.copied += len;
        let (copied, left) = (entry.copied, entry.len - entry.copied);
        let frame = entry.frame;
        if let Some(frame) = frame.filter(|_| first && at != DISCARD)
            && !io.set_word(at, frame_word(frame))
        {
            let rule = "the buffer lies in memory";
            return Err(DriverFault { register: "RxData", value: at, rule });
        }
        let done = DONE_COMPLETE | RX_DONE_TCP | RX_DONE_IP;
        if left == 0 {
            if let (Some(frame), Some(entry)) = (frame, self.rx.entry(number)) {
                io.stage(frame, "nic memory", entry.since);
                entry.frame = None;
                if first && at == DISCARD {
                    io.drop_frame(frame);
                }
            }
            self.banks[bank].packet = None;
            self.banks[bank].rx_done = done | copied;
            self.rx.collect();
        } else {
            self.banks[bank].rx_done = done | RX_DONE_MORE | left;
        }
        self.mark_rx(io);
        self.interrupts.raise(io, INTR_RX_DMA);
        for core in std::mem::take(&mut self.banks[bank].rx_held) {
            io.answer(core, self.rx_state(bank));
        }
        self.run_rx(io)
    }

    /// Keeps the marks of the receive FIFO.
    fn mark_rx(&mut self, io: &mut Io<'_>) {
        if self.rx.bytes < self.plan.rx_low.0 {
            self.rx_low = true;
        }
        if self.rx.bytes == 0 && !self.rx_empty {
            self.rx_empty = true;
            self.interrupts.raise(io, INTR_RX_EMPTY);
        }
    }

    fn store_tx_data(
        &mut self,
        io: &mut Io<'_>,
        bank: usize,
        value: u64,
    ) -> Result<(), DriverFault> {
        let wrong = |rule| Err(DriverFault { register: "TxData", value, rule });
        if self.config & CONFIG_TX_EN == 0 {
            return wrong("the transmitter must be switched on first (Config.TxEn)");
        }
        if self.banks[bank].tx_done & DONE_BUSY != 0 {
            return wrong("a busy bank takes no new copy: wait for TxDone or TxWait");
        }
        if value & DATA_VADDR != 0 {
            return wrong("addresses are physical (Vaddr is not supported)");
        }
        if !(1..=self.tx_max_copy).contains(&data_len(value)) {
            return wrong("a copy has 1 to TxMaxCopy bytes");
        }
        self.banks[bank].tx_data = value;
        self.banks[bank].tx_done = DONE_BUSY;
        if self.tx_owner != Some(bank) {
            self.tx_list.push_back(bank);
        }
        self.run_tx(io)
    }

    /// Begins the next copy to the transmit FIFO. A bank keeps the engine until its packet is complete.
    fn run_tx(&mut self, io: &mut Io<'_>) -> Result<(), DriverFault> {
        if self.tx_engine.is_some() {
            return Ok(());
        }
        if self.tx_owner.is_none() {
            self.tx_owner = self.tx_list.pop_front();
        }
        let Some(bank) = self.tx_owner else { return Ok(()) };
        let state = &self.banks[bank];
        let len = data_len(state.tx_data);
        if state.tx_done & DONE_BUSY == 0 {
            return Ok(());
        }
        if self.tx_len + len > self.plan.tx_fifo.0 {
            let rule = "a packet is no longer than the transmit FIFO";
            return Err(DriverFault { register: "TxData", value: state.tx_data, rule });
        }
        if self.tx_bytes + len > self.plan.tx_fifo.0 {
            if !std::mem::replace(&mut self.tx_full, true) {
                self.interrupts.raise(io, INTR_TX_FULL);
            }
            return Ok(());
        }
        self.tx_bytes += len;
        self.tx_len += len;
        self.tx_engine = Some(bank);
        io.read_memory(data_addr(state.tx_data), len, TX | bank as u64);
        Ok(())
    }

    fn finish_tx(&mut self, io: &mut Io<'_>, bank: usize) -> Result<(), DriverFault> {
        self.tx_engine = None;
        let value = self.banks[bank].tx_data;
        if self.tx_frame.is_none() {
            let frame = frame_of(io.word(data_addr(value)));
            self.tx_frame = frame.filter(|id| io.frame(*id).is_some());
        }
        let Some(frame) = self.tx_frame else {
            let rule = "a packet begins with its headers";
            return Err(DriverFault { register: "TxData", value, rule });
        };
        if value & DATA_MORE == 0 {
            self.tx_owner = None;
            self.tx_frame = None;
            let len = std::mem::take(&mut self.tx_len);
            let sent = io.transmit(frame);
            self.sending.push_back(len);
            self.tx_packets += 1;
            io.after(sent - io.now(), SENT);
        }
        self.banks[bank].tx_done = DONE_COMPLETE | data_len(value);
        self.interrupts.raise(io, INTR_TX_DMA);
        for core in std::mem::take(&mut self.banks[bank].tx_held) {
            io.answer(core, self.tx_state(bank));
        }
        self.run_tx(io)
    }

    fn sent(&mut self, io: &mut Io<'_>) -> Result<(), DriverFault> {
        self.tx_bytes -= self.sending.pop_front().unwrap_or(0);
        self.tx_packets = self.tx_packets.saturating_sub(1);
        self.interrupts.raise(io, INTR_TX_PACKET);
        if self.tx_full && self.tx_bytes < self.plan.rx_low.0 {
            self.tx_full = false;
            self.interrupts.raise(io, INTR_TX_LOW);
        }
        self.run_tx(io)
    }

    fn store_config(&mut self, io: &mut Io<'_>, value: u64) -> Result<(), DriverFault> {
        if value & CONFIG_ZERO_COPY != 0 && value & CONFIG_DELAY_COPY != 0 {
            let rule = "ZeroCopy and DelayCopy exclude each other";
            return Err(DriverFault { register: "Config", value, rule });
        }
        self.config = value;
        let mask = self.interrupts.mask();
        self.interrupts.set_mask(io, mask);
        Ok(())
    }

    fn store_command(&mut self, io: &mut Io<'_>, value: u64) {
        if value & COMMAND_RESET != 0 {
            let fresh = Self::new(&self.plan, self.rx_max_copy);
            for bank in &mut self.banks {
                for core in bank.rx_held.drain(..).chain(bank.tx_held.drain(..)) {
                    io.answer(core, 0);
                }
            }
            for frame in self.rx.entries.drain(..).filter_map(|entry| entry.frame) {
                io.drop_frame(frame);
            }
            // Accesses that are under way find no packet, and do nothing.
            let (first, sending) = (self.rx.next, std::mem::take(&mut self.sending));
            *self = fresh;
            (self.rx.first, self.rx.next) = (first, first);
            self.tx_bytes = sending.iter().sum();
            self.sending = sending;
        }
        if value & COMMAND_INTR != 0 {
            self.interrupts.raise(io, INTR_SOFT);
        }
    }
}

impl Nic for Sinic {
    fn store(&mut self, io: &mut Io<'_>, register: u32, value: u64) -> Result<(), DriverFault> {
        let (bank, register) = self.decode(register)?;
        match register {
            CONFIG => return self.store_config(io, value),
            COMMAND => self.store_command(io, value),
            INTR_STATUS => {
                self.interrupts.clear(value);
            }
            INTR_MASK => self.interrupts.set_mask(io, value & INTR_ALL),
            RX_DATA => return self.store_rx_data(io, bank, value),
            TX_DATA => return self.store_tx_data(io, bank, value),
            _ => {
                let rule = "this register can only be read";
                return Err(DriverFault { register: "store", value: register.into(), rule });
            }
        }
        Ok(())
    }

    fn load(&mut self, _: &mut Io<'_>, register: u32, core: CoreId) -> Result<Read, DriverFault> {
        let (bank, register) = self.decode(register)?;
        Ok(Read::Value(match register {
            CONFIG => self.config,
            INTR_STATUS => self.interrupts.clear(u64::MAX),
            INTR_MASK => self.interrupts.mask(),
            RX_MAX_COPY => self.rx_max_copy,
            TX_MAX_COPY => self.tx_max_copy,
            ZERO_COPY_SIZE => self.plan.zero_copy_size.into(),
            ZERO_COPY_MARK => self.plan.zero_copy_mark.into(),
            VIRTUAL_COUNT => self.banks.len() as u64,
            RX_MAX_INTR => MAX_INTR,
            RX_FIFO_SIZE => self.plan.rx_fifo.0,
            TX_FIFO_SIZE => self.plan.tx_fifo.0,
            RX_FIFO_LOW | TX_FIFO_LOW => self.plan.rx_low.0,
            RX_FIFO_HIGH | TX_FIFO_HIGH => self.plan.rx_high.0,
            RX_DATA => self.banks[bank].rx_data,
            RX_DONE => self.rx_state(bank),
            RX_WAIT if self.banks[bank].rx_done & DONE_BUSY != 0 => {
                self.banks[bank].rx_held.push(core);
                return Ok(Read::Held);
            }
            RX_WAIT => self.rx_state(bank),
            TX_DATA => self.banks[bank].tx_data,
            TX_DONE => self.tx_state(bank),
            TX_WAIT if self.banks[bank].tx_done & DONE_BUSY != 0 => {
                self.banks[bank].tx_held.push(core);
                return Ok(Read::Held);
            }
            TX_WAIT => self.tx_state(bank),
            HW_ADDR => 0x0000_5149_0000_0001,
            RX_STATUS => self.rx_status(),
            _ => {
                let rule = "this register can only be written";
                return Err(DriverFault { register: "load", value: register.into(), rule });
            }
        }))
    }

    fn receive(&mut self, io: &mut Io<'_>, frame: FrameId) -> Result<bool, DriverFault> {
        let len = io.frame_bytes(frame);
        if self.config & CONFIG_RX_EN == 0 || self.rx.bytes + len > self.plan.rx_fifo.0 {
            return Ok(false);
        }
        self.rx.bytes += len;
        let entry = Entry { frame: Some(frame), len, copied: 0, since: io.now() };
        self.rx.entries.push_back(entry);
        if self.rx.bytes > self.plan.rx_high.0 {
            self.rx_low = false;
            if std::mem::take(&mut self.rx_empty) {
                self.interrupts.raise(io, INTR_RX_HIGH);
            }
        }
        self.interrupts.raise(io, INTR_RX_PACKET);
        self.run_rx(io)?;
        Ok(true)
    }

    fn timer(&mut self, io: &mut Io<'_>, what: u32) -> Result<(), DriverFault> {
        match what {
            INTERRUPT if self.config & CONFIG_INT_EN != 0 => self.interrupts.expire(io),
            INTERRUPT => {}
            _ => self.sent(io)?,
        }
        Ok(())
    }

    fn memory_done(&mut self, io: &mut Io<'_>, tag: u64) -> Result<(), DriverFault> {
        let bank = (tag & 0xffff_ffff) as usize;
        if bank >= self.banks.len() {
            return Ok(());
        }
        match tag >> 32 {
            1 if self.rx_engine == Some(bank) => {
                let len = data_len(self.banks[bank].rx_data);
                self.finish_rx(io, bank, len)
            }
            2 if self.tx_engine == Some(bank) => self.finish_tx(io, bank),
            _ => Ok(()),
        }
    }
}
