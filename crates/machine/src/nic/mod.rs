//! Network interfaces and their drivers.
//!
//! A NIC is two things: hardware, which reacts to registers, frames and memory ([`Nic`]), and a driver, which
//! is software on a core and has nothing but registers and memory ([`Driver`]). `docs/add-a-nic.md` shows how
//! to write both, with `fifo` as the example.

mod descriptor;
mod descriptor_driver;
mod fifo;
mod moderation;
mod sinic;
mod sinic_driver;
mod sinic_registers;
mod vsinic_driver;

use std::future::Future;
use std::pin::Pin;
use std::rc::Rc;

use crate::cpu::Cpu;
use crate::error::DriverFault;
use crate::frames::{Frame, FrameId};
use crate::memory::LIMIT;
use crate::plan::{NicKind, NicPlan, Plan};
use crate::world::{Access, CoreId, Event, World};

/// The answer to a load.
pub(crate) enum Read {
    /// The value, at once.
    Value(u64),
    /// The NIC holds the load and answers later ([`Io::answer`]).
    Held,
}

/// What a NIC's hardware may be told. Each method may break off with a rule that the driver broke.
pub(crate) trait Nic {
    /// A store to a register.
    fn store(&mut self, io: &mut Io<'_>, register: u32, value: u64) -> Result<(), DriverFault>;

    /// A load from a register by a core.
    fn load(&mut self, io: &mut Io<'_>, register: u32, core: CoreId) -> Result<Read, DriverFault>;

    /// A frame from the network; false if there is no room for it.
    fn receive(&mut self, io: &mut Io<'_>, frame: FrameId) -> Result<bool, DriverFault>;

    /// A timer set with [`Io::after`].
    fn timer(&mut self, io: &mut Io<'_>, what: u32) -> Result<(), DriverFault>;

    /// A memory access that was begun with `tag` is done.
    fn memory_done(&mut self, io: &mut Io<'_>, tag: u64) -> Result<(), DriverFault>;
}

/// What a NIC's hardware may do.
pub(crate) struct Io<'a> {
    world: &'a mut World,
    host: u16,
}

impl<'a> Io<'a> {
    /// For the NIC of a host.
    pub(crate) fn new(world: &'a mut World, host: u16) -> Self {
        Self { world, host }
    }

    /// The time in picoseconds.
    pub(crate) fn now(&self) -> u64 {
        self.world.kernel.now()
    }

    /// Calls [`Nic::timer`] after `ps`.
    pub(crate) fn after(&mut self, ps: u64, what: u32) {
        self.world.kernel.after(ps, Event::Nic { host: self.host, what });
    }

    /// Writes `len` bytes to memory; [`Nic::memory_done`] follows.
    pub(crate) fn write_memory(&mut self, at: u64, len: u64, tag: u64) {
        if !self.is_memory(at, len) {
            return;
        }
        let now = self.now();
        let access = Access { at, len: len as u32, read: false, tag };
        let path = &mut self.world.hosts[usize::from(self.host)].path;
        if path.is_direct() {
            return self.world.device_write(self.host, access);
        }
        let there = path.write(now, len);
        self.world.kernel.at(there, Event::DeviceWrite { host: self.host, access });
    }

    /// Reads `len` bytes from memory; [`Nic::memory_done`] follows.
    pub(crate) fn read_memory(&mut self, at: u64, len: u64, tag: u64) {
        if !self.is_memory(at, len) {
            return;
        }
        self.world.begin_read(self.host, Access { at, len: len as u32, read: true, tag });
    }

    /// Whether there is memory; if not, the run stops: the driver gave a wrong address.
    fn is_memory(&mut self, at: u64, len: u64) -> bool {
        let is = at < LIMIT && len <= LIMIT - at;
        if !is {
            let rule = "an address that a device is given lies in memory";
            self.world.fail(self.host, DriverFault { register: "memory", value: at, rule });
        }
        is
    }

    /// The word at an address, as an access that is done has found it.
    pub(crate) fn word(&self, at: u64) -> u64 {
        self.world.hosts[usize::from(self.host)].memory.heap.word(at)
    }

    /// Writes the word at an address, as part of an access that is done; false if there is no memory.
    pub(crate) fn set_word(&mut self, at: u64, word: u64) -> bool {
        self.world.hosts[usize::from(self.host)].memory.heap.set_word(at, word)
    }

    /// Interrupts the processor.
    pub(crate) fn interrupt(&mut self) {
        let now = self.now();
        let at = self.world.hosts[usize::from(self.host)].path.reach_processor(now);
        self.world.kernel.at(at, Event::Interrupt { host: self.host });
    }

    /// Answers a load that was held, or answers one now.
    pub(crate) fn answer(&mut self, core: CoreId, value: u64) {
        let now = self.now();
        let at = self.world.hosts[usize::from(self.host)].path.reach_processor(now);
        self.world.core(core).loaded = value;
        self.world.kernel.at(at, Event::Resume(core));
    }

    /// Sends a frame; when the link is free again.
    pub(crate) fn transmit(&mut self, frame: FrameId) -> u64 {
        self.world.transmit(self.host, frame)
    }

    /// A frame; none if the driver made up its name.
    pub(crate) fn frame(&self, id: FrameId) -> Option<&Frame> {
        self.world.frames.get(id)
    }

    /// Bytes of a frame; 0 for none.
    pub(crate) fn frame_bytes(&self, id: FrameId) -> u64 {
        self.frame(id).map_or(0, Frame::bytes)
    }

    /// Throws a frame away.
    pub(crate) fn drop_frame(&mut self, id: FrameId) {
        self.world.frames.remove(id);
    }

    /// Notes a stage of a frame's way, from `begin` until now.
    pub(crate) fn stage(&mut self, id: FrameId, name: &'static str, begin: u64) {
        let now = self.now();
        if let Some(number) = self.frame(id).map(|frame| frame.number) {
            self.world.tracer.span(number, name, begin, now);
        }
    }
}

/// Where the headers of a packet to be sent are: the word there names the frame.
pub(crate) fn frame_word(id: FrameId) -> u64 {
    u64::from(id) + 1
}

/// The frame that a word names.
pub(crate) fn frame_of(word: u64) -> Option<FrameId> {
    FrameId::try_from(word.checked_sub(1)?).ok()
}

/// A packet that the stack hands to the driver.
#[derive(Clone, Debug)]
pub(crate) struct Packet {
    /// Where the headers are: a header object, to be freed when they are sent.
    pub(crate) header: u64,
    /// Bytes of the headers.
    pub(crate) header_len: u64,
    /// Where the payload is: addresses and lengths. Its memory is the socket's.
    pub(crate) payload: Vec<(u64, u64)>,
    /// The frame.
    pub(crate) frame: FrameId,
}

/// A packet that the driver hands to the stack.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Received {
    /// The socket buffer's structure.
    pub(crate) buffer: u64,
    /// Where the frame is: a data object.
    pub(crate) data: u64,
    /// The frame.
    pub(crate) frame: FrameId,
    /// Payload that is still in the NIC.
    pub(crate) deferred: Option<Deferred>,
}

/// Payload that is still in the NIC.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Deferred {
    /// The register bank that has it.
    pub(crate) bank: u32,
    /// Bytes of the frame that are in memory, headers included.
    pub(crate) copied: u64,
}

/// Work of a driver under way.
pub(crate) type Task<'a, T> = Pin<Box<dyn Future<Output = T> + 'a>>;

/// A driver. It keeps its state in cells, since several cores may be in it at a time.
pub(crate) trait Driver {
    /// Brings the NIC up.
    fn start<'a>(&'a self, cpu: &'a Cpu) -> Task<'a, ()>;

    /// The interrupt handler: finds the cause, masks the NIC, raises the softirq.
    fn interrupt<'a>(&'a self, cpu: &'a Cpu) -> Task<'a, ()>;

    /// Takes up to `budget` received packets and hands them to the stack; whether there may be more.
    fn poll<'a>(&'a self, cpu: &'a Cpu, budget: u32) -> Task<'a, bool>;

    /// Sends a packet; gives it back if the NIC has no room.
    fn transmit<'a>(&'a self, cpu: &'a Cpu, packet: Packet) -> Task<'a, Option<Packet>>;

    /// Whether several cores may transmit at a time.
    fn is_lockless(&self) -> bool {
        false
    }

    /// Copies `len` bytes of deferred payload to `to`; 0 throws the rest away. Whether the NIC has nothing
    /// more of the packet.
    fn copy_deferred<'a>(&'a self, _: &'a Cpu, _: u32, _: u64, _: u64) -> Task<'a, bool> {
        Box::pin(async { true })
    }
}

/// The hardware and the driver of a plan.
pub(crate) fn make(plan: &Plan) -> (Box<dyn Nic>, Rc<dyn Driver>) {
    match plan.nic.kind {
        NicKind::Descriptor => (
            Box::new(descriptor::Descriptor::new(&plan.nic)),
            Rc::new(descriptor_driver::DescriptorDriver::new(plan)),
        ),
        NicKind::Sinic => (
            Box::new(sinic::Sinic::new(&plan.nic, max_copy(plan))),
            Rc::new(sinic_driver::SinicDriver::new(plan)),
        ),
        NicKind::Vsinic => (
            Box::new(sinic::Sinic::new(&plan.nic, max_copy(plan))),
            Rc::new(vsinic_driver::VsinicDriver::new(plan)),
        ),
        // LANai and HCA have hosts of their own (`crate::lanai`, `crate::hca`): what is made here is not
        // used.
        NicKind::Fifo | NicKind::Lanai | NicKind::Hca => (
            Box::new(fifo::Fifo::new(&plan.nic)),
            Rc::new(fifo::FifoDriver::new(u64::from(plan.link.mtu))),
        ),
    }
}

/// The hardware and the driver of a host that only loads the machine under test.
pub(crate) fn ideal(plan: &Plan) -> (Box<dyn Nic>, Rc<dyn Driver>) {
    let nic = NicPlan { rx_fifo: crate::plan::Bytes(u64::MAX), ..plan.nic.clone() };
    (Box::new(fifo::Fifo::new(&nic)), Rc::new(fifo::FifoDriver::new(0)))
}

/// The largest frame that SINIC copies at once.
fn max_copy(plan: &Plan) -> u64 {
    u64::from(plan.link.mtu) + 14
}
