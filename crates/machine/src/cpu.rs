//! What software may do: spend cycles, touch memory, access registers, wait.
//!
//! The software of a core (programs, kernel, driver) is one asynchronous function. It runs ahead of the world
//! in its own time, and waits for the world before it looks at anything that others change.

use std::cell::{RefCell, RefMut};
use std::future::Future;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll};

use crate::costs::Cost;
use crate::ledger::Category;
use crate::memory::Slab;
use crate::nic::Driver;
use crate::world::{CoreId, Event, Host, World};

/// A core, as its software sees it.
#[derive(Clone)]
pub(crate) struct Cpu {
    world: Rc<RefCell<World>>,
    /// Which core of which host.
    pub(crate) id: CoreId,
}

/// Returns to the executor once. The caller has scheduled the event that resumes the core.
struct Yield(bool);

impl Future for Yield {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<()> {
        if std::mem::replace(&mut self.0, true) { Poll::Ready(()) } else { Poll::Pending }
    }
}

impl Cpu {
    /// A core of a world.
    pub(crate) fn new(world: Rc<RefCell<World>>, id: CoreId) -> Self {
        Self { world, id }
    }

    /// The world. It must be let go before anything is awaited.
    pub(crate) fn world(&self) -> RefMut<'_, World> {
        self.world.borrow_mut()
    }

    /// The host of this core. It must be let go before anything is awaited.
    pub(crate) fn host(&self) -> RefMut<'_, Host> {
        let host = usize::from(self.id.host);
        RefMut::map(self.world.borrow_mut(), |world| &mut world.hosts[host])
    }

    /// The driver of the host's NIC.
    pub(crate) fn driver(&self) -> Option<Rc<dyn Driver>> {
        self.host().driver.clone()
    }

    /// The time of this core in picoseconds.
    pub(crate) fn now(&self) -> u64 {
        let mut world = self.world();
        world.core(self.id).local
    }

    /// Spends the cycles of a step.
    pub(crate) fn charge(&self, category: Category, cost: Cost) {
        self.charge_times(category, cost, 1);
    }

    /// Spends the cycles of a step that is done `times` times.
    pub(crate) fn charge_times(&self, category: Category, cost: Cost, times: u64) {
        let mut world = self.world();
        let host = &world.hosts[usize::from(self.id.host)];
        let ps = host.clock.ps(host.costs.cycles(cost) * times);
        world.spend(self.id, category, ps);
    }

    /// Reads or writes memory: stalls for what is not in the first-level cache.
    pub(crate) fn touch(&self, category: Category, at: u64, len: u64, write: bool) {
        self.touch_with(category, at, len, write, 1.0);
    }

    fn touch_with(&self, category: Category, at: u64, len: u64, write: bool, mlp: f64) {
        let mut world = self.world();
        let now = world.core(self.id).local;
        let host = &mut world.hosts[usize::from(self.id.host)];
        if host.ideal {
            return;
        }
        let stall = host.memory.access(self.id.core.into(), now, at, len, write, mlp);
        world.spend(self.id, category, stall);
    }

    /// Copies memory.
    pub(crate) fn copy(&self, from: u64, to: u64, len: u64) {
        let (mlp, cycles, ps) = {
            let host = self.host();
            let cycles = (len as f64 / host.copy_bytes_per_cycle) as u64;
            (host.copy_mlp, cycles, if host.ideal { 0 } else { host.clock.ps(cycles) })
        };
        debug_assert!(cycles <= len * 64, "a copy loop moves something each cycle");
        self.touch_with(Category::Copy, from, len, false, mlp);
        self.touch_with(Category::Copy, to, len, true, mlp);
        self.world().spend(self.id, Category::Copy, ps);
    }

    /// Reads a word of memory.
    pub(crate) fn load(&self, category: Category, at: u64) -> u64 {
        self.touch(category, at, 8, false);
        self.host().memory.heap.word(at)
    }

    /// Writes a word of memory.
    pub(crate) fn store(&self, category: Category, at: u64, word: u64) {
        self.touch(category, at, 8, true);
        self.host().memory.heap.set_word(at, word);
    }

    /// Allocates an object of the kernel.
    pub(crate) fn alloc(&self, slab: Slab) -> u64 {
        self.host().memory.heap.alloc(slab)
    }

    /// Frees an object of the kernel.
    pub(crate) fn free(&self, slab: Slab, at: u64) {
        self.host().memory.heap.free(slab, at);
    }

    /// Lets the world catch up with this core.
    pub(crate) async fn sync(&self) {
        let waits = {
            let mut world = self.world();
            let stall = std::mem::take(&mut world.core(self.id).stall);
            world.spend(self.id, Category::Other, stall);
            let (now, local) = (world.kernel.now(), world.core(self.id).local);
            if local > now {
                world.kernel.at(local, Event::Resume(self.id));
            }
            local > now
        };
        if waits {
            Yield(false).await;
        }
    }

    /// Waits until the core is kicked, or does nothing if there is something to do; the time is idle.
    pub(crate) async fn idle(&self) {
        self.sync().await;
        let begun = {
            let mut world = self.world();
            let core = world.core(self.id);
            if core.interrupt || core.softirq || core.timer || core.stall > 0 {
                return;
            }
            core.idle = true;
            core.local
        };
        Yield(false).await;
        let mut world = self.world();
        let core = world.core(self.id);
        let idle = core.local - begun;
        core.ledger.add(Category::Idle, idle);
    }

    /// Stores to a register of the NIC. The store is posted: the core goes on unless the plan says that
    /// stores wait.
    pub(crate) fn write_register(&self, category: Category, register: u32, value: u64) {
        self.charge(category, Cost::RegisterIssue);
        let mut world = self.world();
        let local = world.core(self.id).local;
        let host = &mut world.hosts[usize::from(self.id.host)];
        let there = host.path.reach_device(local);
        let waits = if host.posted_writes { 0 } else { 2 * (there - local) };
        let event = Event::Store { host: self.id.host, register, value };
        world.kernel.at(there, event);
        world.spend(self.id, category, waits);
    }

    /// Loads a register of the NIC: the core stalls until the value is there.
    pub(crate) async fn read_register(&self, category: Category, register: u32) -> u64 {
        self.charge(category, Cost::RegisterIssue);
        self.sync().await;
        let begun = {
            let mut world = self.world();
            let local = world.core(self.id).local;
            let there = world.hosts[usize::from(self.id.host)].path.reach_device(local);
            world.kernel.at(there, Event::Load { core: self.id, register });
            local
        };
        Yield(false).await;
        let mut world = self.world();
        let core = world.core(self.id);
        let stalled = core.local - begun;
        core.ledger.add(category, stalled);
        core.loaded
    }

    /// Moves `words` words to or from the NIC, one register access after another.
    pub(crate) fn burst(&self, category: Category, words: u64, to_memory: bool) {
        let mut world = self.world();
        let host = &mut world.hosts[usize::from(self.id.host)];
        if host.ideal {
            return;
        }
        let one_way = host.path.clone().reach_device(0);
        // Loads wait for their answer; stores follow each other.
        let each = if to_memory { 2 * one_way } else { one_way };
        world.spend(self.id, category, words * each);
    }

    /// Takes the lock of the host's transmit path, spinning until it is free.
    pub(crate) async fn lock_transmit(&self) {
        loop {
            self.sync().await;
            if !std::mem::replace(&mut self.host().os.transmit_locked, true) {
                return;
            }
            self.charge(Category::Driver, Cost::Spin);
            // Time passes even if a plan says that spinning costs nothing.
            self.world().spend(self.id, Category::Driver, 1);
        }
    }

    /// Releases that lock.
    pub(crate) async fn unlock_transmit(&self) {
        self.sync().await;
        self.host().os.transmit_locked = false;
    }
}
