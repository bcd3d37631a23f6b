//! Buses between processor and device.

pub mod pci;
pub mod pcie;

use std::collections::VecDeque;

use crate::plan::{Attach, Plan, Rate};

/// Something that one transfer uses at a time.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Resource {
    free_at: u64,
    /// For how long it was in use.
    pub(crate) busy: u64,
}

impl Resource {
    /// Uses it for `ps` from `now` on, or as soon as it is free; when it is free again.
    pub(crate) fn take(&mut self, now: u64, ps: u64) -> u64 {
        self.free_at = self.free_at.max(now) + ps;
        self.busy += ps;
        self.free_at
    }
}

/// At most so many units under way at a time: tags, credits.
#[derive(Clone, Debug)]
struct Window {
    limit: u64,
    used: u64,
    /// When how many come back, in order.
    back: VecDeque<(u64, u64)>,
}

impl Window {
    fn new(limit: u64) -> Self {
        Self { limit, used: 0, back: VecDeque::new() }
    }

    /// When `units` are free, not before `now`.
    fn wait(&mut self, now: u64, units: u64) -> u64 {
        let mut at = now;
        while let Some((back, some)) = self.back.front().copied() {
            if back > at && self.used + units <= self.limit {
                break;
            }
            at = at.max(back);
            self.used -= some;
            self.back.pop_front();
        }
        at
    }

    /// Takes `units` that come back at `at`.
    fn take(&mut self, at: u64, units: u64) {
        self.used += units;
        self.back.push_back((at, units));
    }
}

/// The way between the memory system and a NIC.
#[derive(Clone, Debug)]
pub(crate) enum Path {
    /// On the die: a fixed time for registers, nothing for data.
    Die {
        /// One way.
        register: u64,
    },
    /// Beyond the I/O bridge, on PCI Express.
    Pcie(Box<Express>),
    /// Beyond the I/O bridge, on a shared bus.
    Pci(Box<Shared>),
}

/// A PCI Express device and the bridge before it.
#[derive(Clone, Debug)]
pub(crate) struct Express {
    link: pcie::Link,
    bridge: Bridge,
    /// From the device to the processor, and back.
    up: Resource,
    down: Resource,
    /// Read requests under way, and the most there may be.
    requests: u64,
    most_requests: u64,
    credits: Window,
}

/// A device on a shared bus and the bridge before it.
#[derive(Clone, Debug)]
pub(crate) struct Shared {
    bus: pci::Bus,
    bridge: Bridge,
    busy: Resource,
}

/// The link between processor and bridge.
#[derive(Clone, Debug)]
struct Bridge {
    rate: Rate,
    latency: u64,
    up: Resource,
    down: Resource,
}

impl Bridge {
    fn up(&mut self, now: u64, bytes: u64) -> u64 {
        self.up.take(now, self.rate.ps(bytes)) + self.latency
    }

    fn down(&mut self, now: u64, bytes: u64) -> u64 {
        self.down.take(now, self.rate.ps(bytes)) + self.latency
    }
}

/// Bytes of a register access on a link, header included.
const REGISTER_BYTES: u64 = 8;

impl Path {
    /// The way of a plan.
    pub(crate) fn new(plan: &Plan) -> Self {
        let bridge = Bridge {
            rate: plan.bridge.rate,
            latency: plan.bridge.latency.0,
            up: Resource::default(),
            down: Resource::default(),
        };
        match plan.nic.attach {
            Attach::Memory | Attach::Cache => Self::Die { register: plan.nic.register_latency.0 },
            Attach::Pcie => {
                let link = pcie::Link::new(&plan.pcie);
                let credits = Window::new(plan.pcie.posted_credits.0);
                let (up, down) = (Resource::default(), Resource::default());
                let most_requests = u64::from(plan.pcie.tags);
                let requests = 0;
                Self::Pcie(Box::new(Express {
                    link,
                    bridge,
                    up,
                    down,
                    requests,
                    most_requests,
                    credits,
                }))
            }
            Attach::Pci => {
                let bus = pci::Bus::new(&plan.pci);
                Self::Pci(Box::new(Shared { bus, bridge, busy: Resource::default() }))
            }
        }
    }

    /// A store or the request of a load leaves the processor at `now`; when it reaches the device.
    pub(crate) fn reach_device(&mut self, now: u64) -> u64 {
        match self {
            Self::Die { register } => now + *register,
            Self::Pcie(express) => {
                // Requests may pass completions (2.4.1): they wait for one packet at most.
                let bytes = express.link.write_bytes(REGISTER_BYTES);
                let ps = express.link.ps(bytes);
                let at = now + express.bridge.latency;
                let packet =
                    express.link.ps(express.link.completion_bytes(express.link.max_payload));
                let busy = express.down.take(at, ps).min(at + ps + packet);
                busy + express.link.latency
            }
            Self::Pci(shared) => {
                let at = shared.bridge.down(now, REGISTER_BYTES);
                shared.busy.take(at, shared.bus.ps(REGISTER_BYTES))
            }
        }
    }

    /// The answer to a load, or an interrupt, leaves the device at `now`; when it reaches the processor.
    pub(crate) fn reach_processor(&mut self, now: u64) -> u64 {
        match self {
            Self::Die { register } => now + *register,
            Self::Pcie(express) => {
                let bytes = express.link.completion_bytes(REGISTER_BYTES);
                let at = express.up.take(now, express.link.ps(bytes)) + express.link.latency;
                express.bridge.up(at, REGISTER_BYTES)
            }
            Self::Pci(shared) => shared.bridge.up(now, REGISTER_BYTES),
        }
    }

    /// The device begins to write `len` bytes at `now`; when the last one reaches the memory system. Writes
    /// are posted, and arrive in order.
    pub(crate) fn write(&mut self, now: u64, len: u64) -> u64 {
        match self {
            Self::Die { .. } => now,
            Self::Pcie(express) => {
                let start = express.credits.wait(now, len);
                let bytes = express.link.write_bytes(len);
                let at = express.up.take(start, express.link.ps(bytes)) + express.link.latency;
                let there = express.bridge.up(at, len);
                express.credits.take(there, len);
                there
            }
            Self::Pci(shared) => {
                let at = shared.busy.take(now, shared.bus.ps(len));
                shared.bridge.up(at, len)
            }
        }
    }

    /// Whether the time between device and memory system is none.
    pub(crate) fn is_direct(&self) -> bool {
        matches!(self, Self::Die { .. })
    }

    /// The device requests `len` bytes at `now`; when the request reaches the memory system. None if as many
    /// requests are under way as there may be: one is to be tried again when a read ends.
    pub(crate) fn request(&mut self, now: u64, len: u64) -> Option<u64> {
        match self {
            Self::Die { .. } => Some(now),
            Self::Pcie(express) => {
                let requests = express.link.read_requests(len);
                if express.requests > 0 && express.requests + requests > express.most_requests {
                    return None;
                }
                express.requests += requests;
                let bytes = express.link.request_bytes(len);
                let at = express.up.take(now, express.link.ps(bytes)) + express.link.latency;
                Some(express.bridge.up(at, REGISTER_BYTES * requests))
            }
            Self::Pci(shared) => {
                // A delayed transaction: the bus is free while the bridge fetches.
                let asked = shared.busy.take(now, shared.bus.ps(REGISTER_BYTES));
                Some(shared.bridge.up(asked, REGISTER_BYTES))
            }
        }
    }

    /// The memory system has the `len` bytes of a request at `now`; when the last one reaches the device.
    pub(crate) fn complete(&mut self, now: u64, len: u64) -> u64 {
        match self {
            Self::Die { .. } => now,
            Self::Pcie(express) => {
                let there = express.bridge.down(now, len);
                let bytes = express.link.completion_bytes(len);
                express.down.take(there, express.link.ps(bytes)) + express.link.latency
            }
            Self::Pci(shared) => {
                let there = shared.bridge.down(now, len);
                shared.busy.take(there, shared.bus.ps(len))
            }
        }
    }

    /// A read of `len` bytes has ended.
    pub(crate) fn end_read(&mut self, len: u64) {
        if let Self::Pcie(express) = self {
            express.requests = express.requests.saturating_sub(express.link.read_requests(len));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_window_waits_for_what_comes_back() {
        let mut window = Window::new(2);
        assert_eq!(window.wait(0, 1), 0);
        window.take(100, 1);
        assert_eq!(window.wait(10, 1), 10);
        window.take(200, 1);
        assert_eq!(window.wait(20, 1), 100);
        window.take(300, 1);
        assert_eq!(window.wait(250, 2), 300);
    }

    #[test]
    fn a_register_of_a_bus_is_far_and_one_on_the_die_is_near() {
        let mut plan = Plan::default();
        let mut path = Path::new(&plan);
        let there = path.reach_device(0);
        let back = path.reach_processor(there);
        assert!((600_000..800_000).contains(&back), "{back} ps");
        plan.nic.attach = Attach::Cache;
        let mut path = Path::new(&plan);
        assert_eq!(path.reach_device(0), 10_000);
    }

    #[test]
    fn reads_overlap_as_far_as_there_are_tags() {
        let plan = Plan::default();
        let mut path = Path::new(&plan);
        // Three requests each, and eight tags.
        assert!(path.request(0, 1514).is_some() && path.request(0, 1514).is_some());
        assert_eq!(path.request(0, 1514), None);
        path.end_read(1514);
        assert!(path.request(0, 1514).is_some());
        let last = (0..100).map(|_| path.complete(0, 1514)).max().unwrap();
        // All of it at the rate of the link.
        let rate = 151_400.0 * 8.0 / (last as f64 / 1e3);
        assert!((4.9..5.5).contains(&rate), "{rate} Gb/s");
    }

    #[test]
    fn a_register_does_not_wait_for_data() {
        let mut path = Path::new(&Plan::default());
        let quiet = path.reach_device(0);
        let mut path = Path::new(&Plan::default());
        (0..100).for_each(|_| {
            path.complete(0, 1514);
        });
        let busy = path.reach_device(0);
        assert!((quiet..quiet + 300_000).contains(&busy), "{quiet} {busy}");
    }
}
