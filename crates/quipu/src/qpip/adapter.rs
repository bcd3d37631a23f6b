//! The adapter on its link.

use std::ops::Deref;
use std::sync::{Arc, Weak};
use std::time::Duration;

use quipu_host::{Config, EngineError, Guests, QpipConfig, QpipInfo, ShareError, Sharer};

use super::events::{Event, Events};
use super::{TcpListener, TcpSettings};
use crate::cq::CompletionQueue;
use crate::device::{Device, Opened};
use crate::error::Error;

/// A [`Device`] with a packet link, and on it addresses of its own.
///
/// Clones are the same adapter. While nobody calls it, a thread answers for it: neighbours find its
/// addresses, and echoes come back.
///
/// ```no_run
/// use quipu::qpip::{Adapter, QpipConfig, TcpSettings};
/// use quipu::{Access, Request};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// // On a TAP whose other end the kernel has: `ip address add 10.9.0.1/24 dev qp0`, and then
/// // `ip link set qp0 up`.
/// let mut config = QpipConfig::new("tap:qp0".parse()?);
/// config.addresses.push(("10.9.0.2".parse()?, 24));
/// let adapter = Adapter::open(config)?;
/// let (pd, cq) = (adapter.protection_domain()?, adapter.completion_queue(16)?);
/// let memory = pd.register(4096, Access::LOCAL_WRITE)?;
///
/// // A client of any server there.
/// let qp = pd.queue_pair(&cq, &cq).build_tcp()?;
/// qp.post_recv(1, &[memory.sge(0, 4096)?])?;
/// qp.connect("10.9.0.1:7".parse()?, &TcpSettings::default())?;
/// qp.post_send(&Request::send_inline(b"is anybody there?").id(2))?;
/// cq.next()?;
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct Adapter {
    device: Device,
}

impl Adapter {
    /// Opens a link and brings an adapter up on it.
    ///
    /// # Errors
    ///
    /// [`Error::Open`]: the link cannot be had, mostly for want of a right; it says of which.
    pub fn open(config: QpipConfig) -> Result<Self, Error> {
        Self::open_with(Config { qpip: Some(config), ..Config::default() })
    }

    /// The same with all settings of an engine, of which [`Config::qpip`] says the link.
    ///
    /// # Errors
    ///
    /// As [`open`](Self::open); [`EngineError::NoLink`] where there is none.
    pub fn open_with(config: Config) -> Result<Self, Error> {
        if config.qpip.is_none() {
            return Err(EngineError::NoLink.into());
        }
        let device = Device::open(config)?;
        Events::open(&device.opened)?;
        Ok(Self { device })
    }

    /// What it stands on: link, addresses, MTU.
    ///
    /// # Errors
    ///
    /// The engine belongs to the parent of this process.
    pub fn info(&self) -> Result<QpipInfo, Error> {
        Ok(self.device.opened.engine.qpip_info()?)
    }

    /// That it is still there, so that something may come of what is under way: its link, or the process
    /// that shares it. When either is gone, everything posted is flushed, connections end with
    /// [`Aborted`](super::TcpChange::Aborted), and calls that find nothing and would wait fail with this
    /// error.
    ///
    /// # Errors
    ///
    /// [`EngineError::LinkGone`], [`EngineError::AdapterLost`].
    pub fn check(&self) -> Result<(), Error> {
        Ok(self.device.opened.engine.still_there()?)
    }

    /// Shows what was counted up to now to others of this user (`quipu top`), who otherwise see it some time
    /// later.
    ///
    /// # Errors
    ///
    /// The engine belongs to the parent of this process.
    pub fn show_counters(&self) -> Result<(), Error> {
        Ok(self.device.opened.engine.show_counters()?)
    }

    /// Shares it with other programs of this user for as long as the result is kept. They [open](Self::open)
    /// the link `share:NAME`, and need no right. When it is dropped, what they had is gone: their work is
    /// flushed, and their connections are reset.
    ///
    /// # Errors
    ///
    /// That is no name, or a process shares an adapter under it; or no descriptors are left.
    pub fn share(&self, name: &str) -> Result<Sharer, ShareError> {
        self.share_with(name, &Guests::default())
    }

    /// The same, also with programs of other users. Those of root's guests open the link `share:NAME`, those
    /// of others `share:NAME,user=USER` ([`Sharer::guest_link`]): whoever shares an adapter sees what its
    /// programs send, so that only this user and root are trusted unless somebody is named.
    ///
    /// # Errors
    ///
    /// As [`share`](Self::share); or there is no folder that these can enter and nobody else can write to.
    pub fn share_with(&self, name: &str, guests: &Guests) -> Result<Sharer, ShareError> {
        self.device.opened.engine.share(name, guests)
    }

    /// For a thread that is to end everything at once, as one that waits for signals.
    #[must_use]
    pub fn aborter(&self) -> Aborter {
        Aborter { opened: Arc::downgrade(&self.device.opened) }
    }

    /// Listens at a TCP port of all its addresses (0: one that is free). Connections come to the queue pairs
    /// that are [offered](TcpListener::offer); up to `backlog` wait for one, others are kept from connecting.
    ///
    /// # Errors
    ///
    /// Somebody listens there.
    pub fn listen(
        &self,
        port: u16,
        settings: &TcpSettings,
        backlog: u32,
    ) -> Result<TcpListener, Error> {
        TcpListener::new(&self.device, port, settings, backlog)
    }

    /// The oldest event about a connection that was not taken yet, of any queue pair of this adapter. What
    /// [`connect`](super::TcpQueuePair::connect) and others of a queue pair wait for is here as well, until
    /// the queue pair is dropped, or begins anew after an attempt that has failed.
    ///
    /// What a peer sent before it closed has completed when the event is taken, but perhaps after the last
    /// poll: take the event, then what is in the completion queue, and then act on the event.
    ///
    /// # Errors
    ///
    /// There is none, and [its link is gone](Self::check); or the engine belongs to the parent of this
    /// process.
    pub fn poll_event(&self) -> Result<Option<Event>, Error> {
        self.device.opened.tcp.poll(&self.device.opened)
    }

    /// As [`poll_event`](Self::poll_event), but waits for one.
    ///
    /// # Errors
    ///
    /// As there.
    pub fn wait_event(&self) -> Result<Event, Error> {
        self.device.opened.tcp.next(&self.device.opened)
    }

    /// Waits until `cq` has completions or there is an event to [poll](Self::poll_event): for one thread that
    /// serves many connections. It may return without either; look at both.
    ///
    /// # Errors
    ///
    /// `cq` is of another adapter; or as [`poll_event`](Self::poll_event).
    pub fn wait(&self, cq: &CompletionQueue) -> Result<(), Error> {
        self.wait_at_most(cq, None)
    }

    /// As [`wait`](Self::wait), but not for longer than `limit`.
    ///
    /// # Errors
    ///
    /// As there.
    pub fn wait_timeout(&self, cq: &CompletionQueue, limit: Duration) -> Result<(), Error> {
        self.wait_at_most(cq, Some(limit))
    }

    fn wait_at_most(&self, cq: &CompletionQueue, limit: Option<Duration>) -> Result<(), Error> {
        self.device.owns(&cq.inner.device)?;
        let (opened, queue) = (&self.device.opened, &cq.inner);
        let engine = &opened.engine;
        match engine.wait_completion_or_tcp(queue.id, queue.channel, opened.context, limit) {
            Ok(()) | Err(EngineError::Interrupted) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }
}

impl Deref for Adapter {
    type Target = Device;

    fn deref(&self) -> &Device {
        &self.device
    }
}

/// Ends the connections of an adapter, which it does not keep open.
#[derive(Clone, Debug)]
pub struct Aborter {
    opened: Weak<Opened>,
}

impl Aborter {
    /// [Aborts](super::TcpQueuePair::abort) every connection that there is, so that no peer waits for a
    /// process that is about to end.
    pub fn abort(&self) {
        let Some(opened) = self.opened.upgrade() else { return };
        for qp in opened.tcp.queue_pairs() {
            // It may have no connection.
            let _ = opened.engine.tcp_abort(qp);
        }
    }
}
