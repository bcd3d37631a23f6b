//! Two hosts on a link, and what happens between them.

use quipu_events::Kernel;
use quipu_nic::{Completion, Fault, WcOpcode};

use super::LanaiPlan;
use super::end::{End, Handled};
use super::firmware::{Firmware, Occupancy, Pass, Step, Traits};
use crate::bus::Resource;
use crate::bus::pci::Bus;
use crate::error::RunError;
use crate::plan::{Bytes, FaultKind, PciPlan, Rate};
use crate::rng::Rng;

/// Myrinet's route, type and checksum.
const FRAMING: u64 = 8;
/// A switch of Myrinet is crossed in half a microsecond.
const SWITCH: u64 = 500_000;
const TRANSMIT: usize = 0;
const RECEIVE: usize = 1;

/// Something that happens.
pub(super) enum Event {
    /// The processor of an end is done with a step.
    Ran(usize),
    /// A DMA engine or the link of an end is done with what a state machine waits for.
    Engine(usize, usize),
    /// A frame is at an end.
    Frame(usize, Vec<u8>),
    /// A deadline of an end's adapter.
    Timer(usize),
    /// The host of an end has found completions.
    Host(usize, Vec<Completion>),
    /// The host of end 0 begins, if it is connected.
    Begin,
    /// A fault of the plan begins or ends.
    Fault(usize, bool),
}

/// Two hosts on a link.
pub(super) struct Pair {
    pub(super) kernel: Kernel<Event>,
    plan: LanaiPlan,
    firmware: Firmware,
    pub(super) occupancy: Occupancy,
    bus: Bus,
    buses: [Resource; 2],
    links: [Resource; 2],
    link: Rate,
    pub(super) ends: [End; 2],
    pub(super) frames: u64,
    rng: Rng,
    /// Frames lost of a million, while a fault lasts.
    fault_ppm: u32,
    fault_rng: Rng,
    /// The processor of end 0 begins no step before.
    stalled_until: u64,
    /// Of all events so far.
    pub(super) hash: u64,
}

impl Pair {
    pub(super) fn new(plan: &LanaiPlan, firmware: Firmware) -> Result<Self, Fault> {
        let pci = PciPlan {
            overhead: firmware.bus.overhead,
            burst: Bytes(firmware.bus.burst),
            ..PciPlan::default()
        };
        let mut ends = [End::new(0, plan)?, End::new(1, plan)?];
        if !plan.datagrams {
            ends[1].listen()?;
            ends[0].connect()?;
        }
        let mut pair = Self {
            kernel: Kernel::default(),
            plan: plan.clone(),
            firmware,
            occupancy: Occupancy::default(),
            bus: Bus::new(&pci),
            buses: [Resource::default(); 2],
            links: [Resource::default(); 2],
            link: plan.rate,
            ends,
            frames: 0,
            rng: Rng::new(plan.seed, 1),
            fault_ppm: 0,
            fault_rng: Rng::new(plan.seed, 3),
            stalled_until: 0,
            hash: 0xcbf2_9ce4_8422_2325,
        };
        pair.kernel.at(1_000_000_000, Event::Begin);
        for (index, fault) in plan.faults.iter().enumerate() {
            pair.kernel.at(fault.at.0, Event::Fault(index, true));
            let end = fault.at.0.saturating_add(fault.length.0);
            pair.kernel.at(end, Event::Fault(index, false));
        }
        pair.go_on(0);
        Ok(pair)
    }

    /// Messages that count: those that have arrived, or have come back.
    fn done(&self) -> u32 {
        self.ends[if self.plan.bounce { 0 } else { 1 }].messages
    }

    /// Runs until so many messages are counted.
    pub(super) fn until(&mut self, messages: u32) -> Result<(), RunError> {
        while self.done() < messages {
            let limit = self.plan.max_events;
            if self.kernel.scheduled() > limit {
                return Err(RunError::TooManyEvents(limit));
            }
            let us = self.kernel.now() / 1_000_000;
            let event = self.kernel.next().ok_or(RunError::Standstill(us))?;
            let now = self.kernel.now();
            self.hash = (self.hash ^ now).wrapping_mul(0x0000_0100_0000_01b3).rotate_left(17);
            self.handle(event).map_err(|fault| RunError::Adapter(fault.to_string()))?;
            if let Some(why) = self.ends.iter_mut().find_map(|end| end.failed.take()) {
                return Err(RunError::Adapter(why));
            }
        }
        Ok(())
    }

    fn handle(&mut self, event: Event) -> Result<(), Fault> {
        let now = self.now_ns();
        let end = match event {
            Event::Ran(end) => {
                self.ends[end].running = None;
                end
            }
            Event::Engine(end, machine) => {
                self.ends[end].machines[machine].waits = false;
                end
            }
            Event::Frame(end, frame) => {
                self.ends[end].inbox.push_back(frame);
                end
            }
            Event::Timer(end) => {
                self.ends[end].timer_at = u64::MAX;
                self.ends[end].handle_timeout(now);
                end
            }
            Event::Host(end, completions) => {
                self.host(end, &completions)?;
                end
            }
            Event::Begin => {
                // The connection is made within the first millisecond; if a segment of it is lost, later.
                if self.ends[0].is_connected() {
                    let posts = if self.plan.bounce { 1 } else { self.plan.depth.max(1) };
                    for _ in 0..posts {
                        self.ends[0].post_send(now)?;
                    }
                } else {
                    self.kernel.after(1_000_000_000, Event::Begin);
                }
                0
            }
            Event::Fault(index, begins) => {
                self.fault(index, begins);
                0
            }
        };
        self.go_on(end);
        Ok(())
    }

    fn fault(&mut self, index: usize, begins: bool) {
        let Some(fault) = self.plan.faults.get(index) else { return };
        match fault.kind {
            FaultKind::LinkLoss => self.fault_ppm = if begins { fault.ppm } else { 0 },
            // A step that has begun is finished first.
            FaultKind::Stall if begins => {
                let end = self.kernel.now().saturating_add(fault.length.0);
                self.stalled_until = self.stalled_until.max(end);
            }
            FaultKind::Stall | FaultKind::LostInterrupts => {}
        }
    }

    /// The program of an end reacts to completions.
    fn host(&mut self, end: usize, completions: &[Completion]) -> Result<(), Fault> {
        let now = self.now_ns();
        for completion in completions {
            let received = completion.opcode == WcOpcode::Recv;
            if received {
                self.ends[end].messages += 1;
                self.ends[end].post_receive(now)?;
            }
            // A message that has come is answered; one that was sent makes room for the next.
            if received == self.plan.bounce && (self.plan.bounce || end == 0) {
                self.ends[end].post_send(now)?;
            }
        }
        Ok(())
    }

    fn now_ns(&self) -> u64 {
        self.kernel.now() / 1000
    }

    /// Lets the state machines of an end work until the processor is busy or nothing is to be done.
    fn go_on(&mut self, end: usize) {
        while self.ends[end].running.is_none() && self.step(end) {}
        let deadline = self.ends[end].deadline();
        let at = deadline.map_or(u64::MAX, |ns| ns.saturating_mul(1000));
        if at < self.ends[end].timer_at {
            self.ends[end].timer_at = at;
            self.kernel.at(at, Event::Timer(end));
        }
    }

    /// A state machine takes a step. It goes on until it waits or is done with its frame. Transmit goes
    /// first: receive works while transmit waits for its DMA engine. False if none can.
    fn step(&mut self, end: usize) -> bool {
        let latest = self.ends[end].latest;
        let goes_on = !self.ends[end].machines[latest].steps.is_empty();
        let first = if goes_on { latest } else { TRANSMIT };
        for machine in [first, 1 - first] {
            if self.ends[end].machines[machine].waits {
                continue;
            }
            if self.ends[end].machines[machine].steps.is_empty() {
                match machine {
                    TRANSMIT => self.begin_transmit(end),
                    _ => self.begin_receive(end),
                }
            }
            if let Some(step) = self.ends[end].machines[machine].steps.pop_front() {
                self.ends[end].latest = machine;
                self.take(end, machine, step);
                return true;
            }
        }
        false
    }

    fn take(&mut self, end: usize, machine: usize, step: Step) {
        let now = self.kernel.now();
        match step {
            Step::Run(ps) => {
                self.ends[end].running = Some(machine);
                let begin = if end == 0 { now.max(self.stalled_until) } else { now };
                self.kernel.at(begin.saturating_add(ps), Event::Ran(end));
            }
            Step::Bus(bytes) => {
                let done = self.buses[end].take(now, self.bus.ps(bytes));
                self.wait(end, machine, done);
            }
            Step::Wire => {
                let frame = std::mem::take(&mut self.ends[end].machines[machine].frame);
                let wire = self.link.ps(frame.len() as u64 + FRAMING);
                let sent = self.links[end].take(now, wire);
                self.frames += 1;
                let lost = self.rng.ppm(self.plan.loss_ppm) | self.fault_rng.ppm(self.fault_ppm);
                if !lost {
                    self.kernel.at(sent + SWITCH, Event::Frame(1 - end, frame));
                }
                // The send engine works by itself, but has one frame at a time.
                self.wait(end, machine, sent - wire);
            }
            Step::Show(completions) => {
                if !completions.is_empty() {
                    let host = self.firmware.host.ns * 1000;
                    self.kernel.after(host, Event::Host(end, completions));
                }
            }
        }
    }

    fn wait(&mut self, end: usize, machine: usize, until: u64) {
        if until <= self.kernel.now() {
            return;
        }
        self.ends[end].machines[machine].waits = true;
        self.kernel.at(until, Event::Engine(end, machine));
    }

    fn begin_transmit(&mut self, end: usize) {
        if !self.ends[end].has_frames() {
            return;
        }
        let now = self.now_ns();
        let Some(Handled { heard, traits, completions }) = self.ends[end].transmit(now) else {
            return;
        };
        let pass = Pass { firmware: &self.firmware, occupancy: &mut self.occupancy, traits };
        self.ends[end].machines[TRANSMIT].steps = pass.transmit(&heard, completions).into();
    }

    fn begin_receive(&mut self, end: usize) {
        let Some(frame) = self.ends[end].inbox.pop_front() else { return };
        let now = self.now_ns();
        let Handled { heard, traits, completions } = self.ends[end].receive(now, &frame);
        let summed = if self.plan.firmware_checksum { frame.len() as u64 } else { 0 };
        let traits = Traits { summed, ..traits };
        let pass = Pass { firmware: &self.firmware, occupancy: &mut self.occupancy, traits };
        self.ends[end].machines[RECEIVE].steps = pass.receive(&heard, completions).into();
    }
}
