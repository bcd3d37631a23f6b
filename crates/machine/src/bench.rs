//! A NIC on a bench: registers, memory and frames, without software.
//!
//! Tests and fuzzers use it to do to a NIC what no driver would.

use crate::costs::Costs;
use crate::error::RunError;
use crate::frames::Frame;
use crate::nic::{self, frame_word};
use crate::plan::Plan;
use crate::world::{CoreId, Event, Host, MACHINE, World};

/// A NIC, its memory and its link.
pub struct Bench {
    world: World,
    /// A load is under way.
    loading: bool,
    core: CoreId,
}

impl Bench {
    /// The NIC of a plan.
    #[must_use]
    pub fn new(plan: &Plan) -> Self {
        let (hardware, driver) = nic::make(plan);
        let machine = Host::new(plan, false, Costs::free(), hardware, driver);
        let (hardware, driver) = nic::ideal(plan);
        let peer = Host::new(plan, true, Costs::free(), hardware, driver);
        let core = CoreId { host: MACHINE as u16, core: 0 };
        Self { world: World::new(plan, vec![machine, peer], 0), loading: false, core }
    }

    /// The time in picoseconds.
    #[must_use]
    pub fn now(&self) -> u64 {
        self.world.kernel.now()
    }

    /// Stores to a register.
    pub fn store(&mut self, register: u32, value: u64) {
        let now = self.now();
        let there = self.world.hosts[MACHINE].path.reach_device(now);
        self.world.kernel.at(there, Event::Store { host: self.core.host, register, value });
    }

    /// Loads a register, and waits for the value for at most `patience` picoseconds. None if the NIC holds
    /// the load for longer, or still holds another.
    pub fn load(&mut self, register: u32, patience: u64) -> Option<u64> {
        if self.loading {
            return None;
        }
        let now = self.now();
        let there = self.world.hosts[MACHINE].path.reach_device(now);
        self.world.kernel.at(there, Event::Load { core: self.core, register });
        self.loading = true;
        let end = now.saturating_add(patience);
        while self.loading && self.step(end) {}
        let core = &self.world.hosts[MACHINE].cores[0];
        (!self.loading && self.world.failure.is_none()).then_some(core.loaded)
    }

    /// Writes a word of memory.
    pub fn set_word(&mut self, at: u64, word: u64) {
        self.world.hosts[MACHINE].memory.heap.set_word(at, word);
    }

    /// Reads a word of memory.
    #[must_use]
    pub fn word(&self, at: u64) -> u64 {
        self.world.hosts[MACHINE].memory.heap.word(at)
    }

    /// Makes a frame with `len` bytes of payload; the word that names it in memory and in registers.
    pub fn make_frame(&mut self, len: u32, to_machine: bool) -> u64 {
        let header = quipu_wire::tcp::Repr::default();
        let to = if to_machine { MACHINE as u16 } else { 1 };
        frame_word(self.world.keep(Frame { to, conn: 0, header, len, cut: 0, number: 0 }))
    }

    /// As [`make_frame`](Self::make_frame), for the peer. The NIC cuts it into frames with `cut` bytes of
    /// payload (TSO); 0: it is sent whole.
    pub fn make_cut_frame(&mut self, len: u32, cut: u16) -> u64 {
        let header = quipu_wire::tcp::Repr::default();
        frame_word(self.world.keep(Frame { to: 1, conn: 0, header, len, cut, number: 0 }))
    }

    /// Has a frame with `len` bytes of payload arrive at the NIC.
    pub fn receive(&mut self, len: u32) {
        let word = self.make_frame(len, true);
        if let Some(frame) = nic::frame_of(word) {
            self.world.kernel.after(0, Event::Arrive { frame });
        }
    }

    /// Lets `ps` picoseconds pass.
    pub fn advance(&mut self, ps: u64) {
        let end = self.now().saturating_add(ps);
        // Nothing happens at the end but that the clock comes there.
        let nothing = Event::Fault { index: u32::MAX, begins: false };
        self.world.kernel.at(end, nothing);
        while self.step(end) {}
    }

    /// Carries out the next event, if it is not after `end`.
    fn step(&mut self, end: u64) -> bool {
        if self.world.failure.is_some() || self.world.kernel.next_at().is_none_or(|at| at > end) {
            return false;
        }
        let Some(event) = self.world.kernel.next() else { return false };
        if self.world.handle(event).is_some() {
            self.loading = false;
        }
        true
    }

    /// The rule that was broken.
    #[must_use]
    pub fn failure(&self) -> Option<&RunError> {
        self.world.failure.as_ref()
    }

    /// Frames that the NIC has sent, and interrupts that it has raised.
    #[must_use]
    pub fn counted(&self) -> (u64, u64) {
        let traffic = &self.world.hosts[MACHINE].traffic;
        (traffic.tx_frames, traffic.interrupts)
    }

    /// Events ahead: a NIC on its own has few.
    #[must_use]
    pub fn pending(&self) -> usize {
        self.world.kernel.pending()
    }
}
