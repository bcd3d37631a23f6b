//! The adapter, and domains that keep the objects of one from those of another.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use quipu_host::nic::mem::Vouched;
use quipu_host::nic::{Access, AddressVector, AsyncEvent, Fault, Gid, Marking, PdId};
use quipu_host::{Config, ContextId, Engine, Guests, PollEntry, ShareError, Sharer};

use crate::cq::CompletionQueue;
use crate::error::Error;
use crate::memory::{MemoryRegion, VouchedRegion};
use crate::qp::QueuePairBuilder;
use crate::qpip;
use crate::srq::SharedReceiveQueue;

/// The engine and this opening of it; every object keeps it alive.
#[derive(Debug)]
pub(crate) struct Opened {
    pub(crate) engine: EngineHandle,
    pub(crate) context: ContextId,
    /// What happens to connections of QPIP.
    pub(crate) tcp: qpip::Events,
}

/// The engine, with a `Debug` that says which.
pub(crate) struct EngineHandle(Arc<Engine>);

impl EngineHandle {
    /// Shares the adapter with other processes.
    pub(crate) fn share(&self, name: &str, guests: &Guests) -> Result<Sharer, ShareError> {
        Sharer::start(&self.0, name, guests)
    }
}

impl std::fmt::Debug for EngineHandle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Engine({})", self.0.address().ip)
    }
}

impl std::ops::Deref for EngineHandle {
    type Target = Engine;

    #[inline]
    fn deref(&self) -> &Engine {
        &self.0
    }
}

impl Drop for Opened {
    fn drop(&mut self) {
        // It exists, so this cannot fail but in a forked child, where nothing is to be done.
        let _ = self.engine.close_context(self.context);
    }
}

/// An RDMA adapter made of software, at an address of this machine.
///
/// Clones are the same device. It lives until the last object that was made of it is gone.
#[derive(Clone, Debug)]
pub struct Device {
    pub(crate) opened: Arc<Opened>,
}

impl Device {
    /// Opens a device as `config` says.
    ///
    /// # Errors
    ///
    /// [`Error::Open`] where the address is not usable or the kernel refuses descriptors.
    pub fn open(config: Config) -> Result<Self, Error> {
        let engine = Engine::open(config)?;
        let (context, _) = engine.open_context()?;
        Ok(Self {
            opened: Arc::new(Opened {
                engine: EngineHandle(engine),
                context,
                tcp: qpip::Events::default(),
            }),
        })
    }

    /// Opens a device as the environment says: the variables of [`Config`].
    ///
    /// # Errors
    ///
    /// As [`open`](Self::open), and a variable with an illegal value.
    pub fn from_env() -> Result<Self, Error> {
        Self::open(Config::from_env().map_err(quipu_host::OpenError::from)?)
    }

    /// That another object is of this device: numbers of objects of two devices may be the same.
    pub(crate) fn owns(&self, other: &Self) -> Result<(), Error> {
        match Arc::ptr_eq(&self.opened, &other.opened) {
            true => Ok(()),
            false => Err(Fault::Invalid("the objects belong to different devices").into()),
        }
    }

    /// The IP address of the device.
    #[must_use]
    pub fn address(&self) -> IpAddr {
        self.opened.engine.address().ip
    }

    /// The GID of the device: its address, an IPv4 address mapped into IPv6.
    #[must_use]
    pub fn gid(&self) -> Gid {
        self.opened.engine.gid()
    }

    /// How datagrams of a service level are marked: their traffic class, and their virtual lane on a device
    /// with quality of service. `None` after a fork.
    #[must_use]
    pub fn marking_of_level(&self, service_level: u8) -> Option<Marking> {
        let av = AddressVector { sl: service_level, ..AddressVector::default() };
        self.opened.engine.marking_of(&av).ok()
    }

    /// Creates a protection domain.
    ///
    /// # Errors
    ///
    /// The adapter has no more.
    pub fn protection_domain(&self) -> Result<ProtectionDomain, Error> {
        let id = self.opened.engine.alloc_pd()?;
        Ok(ProtectionDomain { inner: Arc::new(Domain { device: self.clone(), id }) })
    }

    /// Creates a completion queue that holds at least `entries` completions.
    ///
    /// # Errors
    ///
    /// A size of 0 or beyond the adapter's limit, or no descriptor is left.
    pub fn completion_queue(&self, entries: u32) -> Result<CompletionQueue, Error> {
        CompletionQueue::new(self, entries)
    }

    /// Sends what peers still wait for, and ends all connections: for the end of the process. Nothing can be
    /// sent afterwards.
    pub fn shut_down(&self) {
        self.opened.engine.shutdown_flush();
    }

    /// poll(2) by a thread that drives the device meanwhile, so that what comes wakes it at once.
    /// Descriptors of completion queues may be among them. Returns how many are ready: 0 after `limit`,
    /// after a signal, or sooner where the device has done something.
    ///
    /// # Errors
    ///
    /// The engine belongs to the parent of this process, or what the system says.
    pub fn poll_descriptors(
        &self,
        entries: &mut [PollEntry],
        limit: Option<Duration>,
    ) -> Result<usize, Error> {
        match self.opened.engine.poll_within(entries, limit) {
            Err(quipu_host::EngineError::Interrupted) => Ok(0),
            other => Ok(other?),
        }
    }

    /// Waits for an asynchronous event about the objects of this device.
    ///
    /// # Errors
    ///
    /// The engine belongs to the parent of this process.
    pub fn wait_event(&self) -> Result<AsyncEvent, Error> {
        loop {
            match self.opened.engine.wait_async(self.opened.context) {
                Err(quipu_host::EngineError::Interrupted) => {}
                other => return Ok(other?),
            }
        }
    }
}

/// poll(2) without a device. Returns how many descriptors are ready: 0 after `limit`, or after a signal.
///
/// # Errors
///
/// What the system says.
pub fn poll_descriptors(
    entries: &mut [PollEntry],
    limit: Option<Duration>,
) -> Result<usize, Error> {
    match quipu_host::poll_descriptors(entries, limit) {
        Err(quipu_host::EngineError::Interrupted) => Ok(0),
        other => Ok(other?),
    }
}

#[derive(Debug)]
pub(crate) struct Domain {
    pub(crate) device: Device,
    pub(crate) id: PdId,
}

impl Drop for Domain {
    fn drop(&mut self) {
        let _ = self.device.opened.engine.dealloc_pd(self.id);
    }
}

/// What belongs together: a queue pair reaches the memory of its own domain only.
///
/// Clones are the same domain.
#[derive(Clone, Debug)]
pub struct ProtectionDomain {
    pub(crate) inner: Arc<Domain>,
}

impl ProtectionDomain {
    /// The device it belongs to.
    #[must_use]
    pub fn device(&self) -> &Device {
        &self.inner.device
    }

    /// Registers `len` bytes of fresh, zeroed memory. Nothing is pinned, and no limit on locked
    /// memory applies.
    ///
    /// # Errors
    ///
    /// Rights that exclude each other (remote writes and atomics need [`Access::LOCAL_WRITE`]), or
    /// the adapter has no more regions.
    pub fn register(&self, len: usize, access: Access) -> Result<MemoryRegion, Error> {
        MemoryRegion::new(self, len, access)
    }

    /// The same, without rights for peers: of the heap, which no process on this host maps. For much memory
    /// in many regions, of which each would take a descriptor otherwise.
    ///
    /// # Errors
    ///
    /// There is not so much memory, or the adapter has no more regions.
    pub fn register_unshared(&self, len: usize) -> Result<MemoryRegion, Error> {
        MemoryRegion::unshared(self, len)
    }

    /// Registers memory for which the caller vouches, as libraries with a C interface do.
    ///
    /// # Errors
    ///
    /// The memory is not there, or its rights exclude each other.
    pub fn register_vouched(&self, memory: Vouched) -> Result<VouchedRegion, Error> {
        VouchedRegion::new(self, memory)
    }

    /// Begins a queue pair whose sends complete to one queue, and receives to another or the same, both of
    /// this device.
    pub fn queue_pair(
        &self,
        send_cq: &CompletionQueue,
        recv_cq: &CompletionQueue,
    ) -> QueuePairBuilder {
        QueuePairBuilder::new(self, send_cq, recv_cq)
    }

    /// Creates a receive queue of `max_wr` requests with up to `max_sge` pieces each, which any
    /// number of queue pairs can share.
    ///
    /// # Errors
    ///
    /// A size of 0 or beyond the adapter's limit.
    pub fn shared_receive_queue(
        &self,
        max_wr: u32,
        max_sge: u32,
    ) -> Result<SharedReceiveQueue, Error> {
        SharedReceiveQueue::new(self, max_wr, max_sge)
    }
}
