//! Everything that a run consists of, and the events that connect it.

use std::collections::VecDeque;
use std::rc::Rc;

use quipu_events::Kernel;

use crate::bus::Path;
use crate::costs::Costs;
use crate::error::{DriverFault, RunError};
use crate::frames::{Frame, FrameId, Frames};
use crate::ledger::{Category, Ledger};
use crate::memory::Memory;
use crate::network::{Network, Next};
use crate::nic::{Driver, Io, Nic, Read};
use crate::os::Os;
use crate::plan::{Clock, FaultKind, Plan};
use crate::rng::Rng;
use crate::trace::Tracer;

/// The machine under test is host 0.
pub(crate) const MACHINE: usize = 0;

/// A core of a host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CoreId {
    /// The host.
    pub(crate) host: u16,
    /// The core.
    pub(crate) core: u16,
}

/// Something that happens.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Event {
    /// The software of a core goes on.
    Resume(CoreId),
    /// A store reaches the NIC.
    Store { host: u16, register: u32, value: u64 },
    /// A load reaches the NIC.
    Load { core: CoreId, register: u32 },
    /// A timer of the NIC.
    Nic { host: u16, what: u32 },
    /// A write of the NIC reaches the memory system.
    DeviceWrite { host: u16, access: Access },
    /// A read request of the NIC reaches the memory system.
    DeviceRead { host: u16, access: Access },
    /// A memory access of the NIC is done.
    Memory { host: u16, access: Access },
    /// An interrupt reaches the processor.
    Interrupt { host: u16 },
    /// A frame is at the switch.
    Switch { frame: FrameId },
    /// A frame is at its destination.
    Arrive { frame: FrameId },
    /// A deadline of TCP.
    Timer { host: u16 },
    /// A fault of the plan begins or ends.
    Fault { index: u32, begins: bool },
}

/// A memory access of a NIC.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Access {
    pub(crate) at: u64,
    pub(crate) len: u32,
    /// The access was a read, which ends now.
    pub(crate) read: bool,
    pub(crate) tag: u64,
}

/// A core.
#[derive(Clone, Debug, Default)]
pub(crate) struct Core {
    /// Its own time: not before the world's.
    pub(crate) local: u64,
    /// Where its time went.
    pub(crate) ledger: Ledger,
    /// Waits for something to do.
    pub(crate) idle: bool,
    /// Its program sleeps.
    pub(crate) sleeping: bool,
    /// An interrupt is pending.
    pub(crate) interrupt: bool,
    /// The softirq is pending.
    pub(crate) softirq: bool,
    /// Deadlines of TCP are to be looked at.
    pub(crate) timer: bool,
    /// The value that a load has brought.
    pub(crate) loaded: u64,
    /// A stall that has not begun.
    pub(crate) stall: u64,
}

/// What was counted of a host's NIC.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    /// Frames that came.
    pub rx_frames: u64,
    /// Their bytes.
    pub rx_bytes: u64,
    /// Frames that the NIC had no room for.
    pub rx_dropped: u64,
    /// Frames that were sent.
    pub tx_frames: u64,
    /// Their bytes.
    pub tx_bytes: u64,
    /// Interrupts.
    pub interrupts: u64,
}

/// A host.
pub(crate) struct Host {
    pub(crate) cores: Vec<Core>,
    pub(crate) memory: Memory,
    pub(crate) path: Path,
    /// Reads of the NIC that wait for others to end.
    waiting: VecDeque<Access>,
    /// Taken out while it works.
    nic: Option<Box<dyn Nic>>,
    pub(crate) driver: Option<Rc<dyn Driver>>,
    pub(crate) os: Os,
    pub(crate) costs: Costs,
    pub(crate) clock: Clock,
    /// Costs nothing: it loads the machine under test.
    pub(crate) ideal: bool,
    pub(crate) copy_mlp: f64,
    pub(crate) copy_bytes_per_cycle: f64,
    pub(crate) posted_writes: bool,
    pub(crate) interrupt_core: u16,
    pub(crate) traffic: Traffic,
    /// Interrupts lost of a million, while a fault lasts.
    lost_interrupts: u32,
}

/// The ends of a connection: host and socket, first that of the machine under test.
pub(crate) type Ends = [(u16, u32); 2];

/// Everything.
pub(crate) struct World {
    pub(crate) kernel: Kernel<Event>,
    pub(crate) hosts: Vec<Host>,
    pub(crate) frames: Frames,
    pub(crate) network: Network,
    pub(crate) conns: Vec<Ends>,
    pub(crate) plan: Plan,
    /// Chance for programs.
    pub(crate) rng: Rng,
    fault_rng: Rng,
    /// Why the run stopped.
    pub(crate) failure: Option<RunError>,
    /// Of all events so far.
    pub(crate) hash: u64,
    pub(crate) tracer: Tracer,
    /// Requests that were completed, for programs that have such.
    pub(crate) requests: u64,
    /// Bytes of the machine's programs, received and sent.
    pub(crate) goodput: [u64; 2],
    /// How much slower the machine's software is at the moment, in 1024ths.
    pub(crate) slowdown: u64,
}

impl Host {
    /// A host of a plan, with its NIC and driver.
    pub(crate) fn new(
        plan: &Plan,
        ideal: bool,
        costs: Costs,
        nic: Box<dyn Nic>,
        driver: Rc<dyn Driver>,
    ) -> Self {
        let cores = if ideal { 1 } else { plan.cpu.cores as usize };
        let mut memory = if ideal { Memory::ideal(plan) } else { Memory::new(plan) };
        let mut os = Os::new(plan, &mut memory.heap);
        os.offload &= !ideal;
        let path = if ideal { Path::Die { register: 0 } } else { Path::new(plan) };
        Self {
            cores: vec![Core::default(); cores],
            memory,
            path,
            waiting: VecDeque::new(),
            nic: Some(nic),
            driver: Some(driver),
            os,
            costs,
            clock: plan.cpu.clock,
            ideal,
            copy_mlp: plan.cpu.copy_mlp,
            copy_bytes_per_cycle: plan.cpu.copy_bytes_per_cycle,
            posted_writes: ideal || plan.cpu.posted_writes,
            interrupt_core: if ideal { 0 } else { plan.os.interrupt_core as u16 },
            traffic: Traffic::default(),
            lost_interrupts: 0,
        }
    }
}

impl World {
    /// A world before its first event.
    pub(crate) fn new(plan: &Plan, hosts: Vec<Host>, traced: u64) -> Self {
        let network = Network::new(&plan.link, hosts.len(), Rng::new(plan.seed, 1));
        let mut kernel = Kernel::default();
        for (index, fault) in plan.faults.iter().enumerate() {
            let index = index as u32;
            kernel.at(fault.at.0, Event::Fault { index, begins: true });
            kernel.at(fault.at.0 + fault.length.0, Event::Fault { index, begins: false });
        }
        Self {
            kernel,
            hosts,
            frames: Frames::default(),
            network,
            conns: Vec::new(),
            plan: plan.clone(),
            rng: Rng::new(plan.seed, 2),
            fault_rng: Rng::new(plan.seed, 3),
            failure: None,
            hash: 0xcbf2_9ce4_8422_2325,
            tracer: Tracer::new(traced),
            requests: 0,
            goodput: [0; 2],
            slowdown: (plan.run.warmup_slowdown * 1024.0) as u64,
        }
    }

    /// A core.
    pub(crate) fn core(&mut self, id: CoreId) -> &mut Core {
        &mut self.hosts[usize::from(id.host)].cores[usize::from(id.core)]
    }

    /// Mixes a number into the trace hash.
    fn mix(&mut self, value: u64) {
        self.hash = (self.hash ^ value).wrapping_mul(0x0000_0100_0000_01b3).rotate_left(17);
    }

    /// Carries out an event; a core that goes on is the caller's to resume.
    pub(crate) fn handle(&mut self, event: Event) -> Option<CoreId> {
        self.mix(self.kernel.now());
        match event {
            Event::Resume(id) => {
                self.mix(1 << 32 | u64::from(id.host) << 16 | u64::from(id.core));
                let now = self.kernel.now();
                let core = self.core(id);
                core.local = core.local.max(now);
                return Some(id);
            }
            Event::Store { host, register, value } => {
                self.mix(value);
                self.with_nic(host, |nic, io| nic.store(io, register, value));
            }
            Event::Load { core, register } => {
                self.with_nic(core.host, |nic, io| {
                    if let Read::Value(value) = nic.load(io, register, core)? {
                        io.answer(core, value);
                    }
                    Ok(())
                });
            }
            Event::Nic { host, what } => self.with_nic(host, |nic, io| nic.timer(io, what)),
            Event::DeviceWrite { host, access } => self.device_write(host, access),
            Event::DeviceRead { host, access } => self.device_read(host, access),
            Event::Memory { host, access } => {
                self.mix(access.tag);
                if access.read {
                    self.end_read(host, access);
                }
                self.with_nic(host, |nic, io| nic.memory_done(io, access.tag));
            }
            Event::Interrupt { host } => self.interrupt(host),
            Event::Switch { frame } => self.forward(frame),
            Event::Arrive { frame } => self.arrive(frame),
            Event::Timer { host } => {
                let host_state = &mut self.hosts[usize::from(host)];
                host_state.os.timer_at = u64::MAX;
                let core = host_state.interrupt_core;
                let id = CoreId { host, core };
                self.core(id).timer = true;
                self.kick(id);
            }
            Event::Fault { index, begins } => self.fault(index as usize, begins),
        }
        None
    }

    /// A write of a NIC is at the memory system.
    pub(crate) fn device_write(&mut self, host: u16, access: Access) {
        let memory = &mut self.hosts[usize::from(host)].memory;
        let done = memory.device_write(self.kernel.now(), access.at, access.len.into());
        self.kernel.at(done, Event::Memory { host, access });
    }

    /// A read of a NIC is at the memory system.
    pub(crate) fn device_read(&mut self, host: u16, access: Access) {
        let state = &mut self.hosts[usize::from(host)];
        let len = u64::from(access.len);
        let there = state.memory.device_read(self.kernel.now(), access.at, len);
        let done = state.path.complete(there, len);
        self.kernel.at(done, Event::Memory { host, access });
    }

    /// A NIC begins a read, or has it wait for others to end.
    pub(crate) fn begin_read(&mut self, host: u16, access: Access) {
        let now = self.kernel.now();
        let state = &mut self.hosts[usize::from(host)];
        if state.path.is_direct() {
            return self.device_read(host, access);
        }
        let asked = if state.waiting.is_empty() {
            state.path.request(now, access.len.into())
        } else {
            None
        };
        match asked {
            Some(asked) => self.kernel.at(asked, Event::DeviceRead { host, access }),
            None => state.waiting.push_back(access),
        }
    }

    fn end_read(&mut self, host: u16, access: Access) {
        let state = &mut self.hosts[usize::from(host)];
        state.path.end_read(access.len.into());
        while let Some(next) = state.waiting.front().copied() {
            let Some(asked) = state.path.request(self.kernel.now(), next.len.into()) else { break };
            state.waiting.pop_front();
            self.kernel.at(asked, Event::DeviceRead { host, access: next });
        }
    }

    /// Lets the NIC of a host work.
    fn with_nic(
        &mut self,
        host: u16,
        work: impl FnOnce(&mut dyn Nic, &mut Io<'_>) -> Result<(), DriverFault>,
    ) {
        let Some(mut nic) = self.hosts[usize::from(host)].nic.take() else { return };
        let result = work(nic.as_mut(), &mut Io::new(self, host));
        self.hosts[usize::from(host)].nic = Some(nic);
        if let Err(fault) = result {
            self.fail(host, fault);
        }
    }

    /// A driver broke a rule: the run stops.
    pub(crate) fn fail(&mut self, host: u16, fault: DriverFault) {
        let ps = self.kernel.now();
        let cycle = self.hosts[usize::from(host)].clock.cycles(ps);
        self.failure.get_or_insert(RunError::Driver { fault, cycle });
    }

    fn interrupt(&mut self, host: u16) {
        let host_state = &mut self.hosts[usize::from(host)];
        host_state.traffic.interrupts += 1;
        if host == 0 && self.fault_rng.ppm(host_state.lost_interrupts) {
            return;
        }
        let id = CoreId { host, core: host_state.interrupt_core };
        self.core(id).interrupt = true;
        self.kick(id);
    }

    /// Wakes a core that is idle.
    pub(crate) fn kick(&mut self, id: CoreId) {
        let core = self.core(id);
        if std::mem::take(&mut core.idle) {
            let at = core.local;
            self.kernel.at(at, Event::Resume(id));
        }
    }

    /// A NIC sends a frame, in parts if it is to be cut; when its link is free again.
    pub(crate) fn transmit(&mut self, host: u16, id: FrameId) -> u64 {
        let now = self.kernel.now();
        let Some(frame) = self.frames.remove(id) else { return now };
        let mut sent = now;
        for part in frame.cuts() {
            let bytes = part.bytes();
            let traffic = &mut self.hosts[usize::from(host)].traffic;
            traffic.tx_frames += 1;
            traffic.tx_bytes += bytes;
            // One that is not cut keeps its number.
            let number = if frame.cut == 0 { frame.number } else { 0 };
            let id = self.frames.put_back(part, number);
            let (end, next) = self.network.send(now, usize::from(host), bytes);
            let number = self.frames.get(id).map_or(0, |part| part.number);
            self.tracer.span(number, "link", now, end);
            self.go(id, next);
            sent = end;
        }
        sent
    }

    fn go(&mut self, id: FrameId, next: Next) {
        match next {
            Next::Arrives(at) => self.kernel.at(at, Event::Arrive { frame: id }),
            Next::Switch(at) => self.kernel.at(at, Event::Switch { frame: id }),
            Next::Lost => {
                self.frames.remove(id);
            }
        }
    }

    fn forward(&mut self, id: FrameId) {
        let Some(frame) = self.frames.get(id) else { return };
        let (to, bytes) = (usize::from(frame.to), frame.bytes());
        let next = self.network.forward(self.kernel.now(), to, bytes);
        self.go(id, next);
    }

    fn arrive(&mut self, id: FrameId) {
        let Some(frame) = self.frames.get(id) else { return };
        let (to, bytes, number) = (frame.to, frame.bytes(), frame.number);
        self.mix(number);
        let now = self.kernel.now();
        self.tracer.span(number, "arrives", now, now);
        let traffic = &mut self.hosts[usize::from(to)].traffic;
        traffic.rx_frames += 1;
        traffic.rx_bytes += bytes;
        let mut taken = true;
        self.with_nic(to, |nic, io| {
            taken = nic.receive(io, id)?;
            Ok(())
        });
        if !taken {
            self.hosts[usize::from(to)].traffic.rx_dropped += 1;
            self.frames.remove(id);
        }
    }

    fn fault(&mut self, index: usize, begins: bool) {
        let Some(fault) = self.plan.faults.get(index) else { return };
        let (length, ppm) = (fault.length.0, if begins { fault.ppm } else { 0 });
        match fault.kind {
            FaultKind::Stall if begins => {
                let id = CoreId { host: MACHINE as u16, core: fault.core as u16 };
                self.core(id).stall += length;
                self.kick(id);
            }
            FaultKind::Stall => {}
            FaultKind::LostInterrupts => self.hosts[MACHINE].lost_interrupts = ppm,
            FaultKind::LinkLoss => self.network.fault_ppm = ppm,
        }
    }

    /// Sets the next deadline of a host's TCP, in picoseconds.
    pub(crate) fn set_timer(&mut self, host: u16, at: u64) {
        let os = &mut self.hosts[usize::from(host)].os;
        if at < os.timer_at {
            os.timer_at = at;
            self.kernel.at(at, Event::Timer { host });
        }
    }

    /// Adds time to a core's ledger and moves its clock.
    pub(crate) fn spend(&mut self, id: CoreId, category: Category, ps: u64) {
        let ps = if usize::from(id.host) == MACHINE { ps * self.slowdown / 1024 } else { ps };
        let core = self.core(id);
        core.local += ps;
        core.ledger.add(category, ps);
    }

    /// Keeps a frame.
    pub(crate) fn keep(&mut self, frame: Frame) -> FrameId {
        self.frames.insert(frame)
    }
}
