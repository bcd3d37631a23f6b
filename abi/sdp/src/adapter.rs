//! The engine of the process, opened when the first socket of SDP needs it.

use std::os::fd::RawFd;
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicPtr, Ordering};
use std::time::Instant;

use quipu_cabi::Errno;
use quipu_host::connection::ChannelKey;
use quipu_host::nic::PdId;
use quipu_host::{Config, ContextId, Engine, OpenError};

use crate::sys::errno_of;

/// The engine, and what all sockets share. It lives as long as the process.
pub(crate) struct Adapter {
    pub(crate) engine: Arc<Engine>,
    pub(crate) context: ContextId,
    pub(crate) pd: PdId,
    /// Where the events of connections come.
    pub(crate) events: ChannelKey,
    pub(crate) events_fd: RawFd,
    began: Instant,
}

static ADAPTER: AtomicPtr<Adapter> = AtomicPtr::new(ptr::null_mut());

impl Adapter {
    fn open() -> Result<Self, Errno> {
        // A program that knows nothing of them takes any low number for its own.
        quipu_cabi::descriptors::hide();
        let config = Config::from_env().map_err(|error| complain(&error.into()))?;
        // The strict mode knows the limits of rdma_cm, not those of SDP.
        let config =
            Config { strict: None, arena_bytes: config.arena_bytes.max(8 << 30), ..config };
        let engine = Engine::open(config).map_err(|error| complain(&error))?;
        let open = || {
            let (context, _) = engine.open_context()?;
            let pd = engine.alloc_pd()?;
            let (events, events_fd) = engine.cm_create_channel()?;
            Ok((context, pd, events, events_fd))
        };
        let (context, pd, events, events_fd) = open().map_err(|error| errno_of(&error))?;
        Ok(Self { engine, context, pd, events, events_fd, began: Instant::now() })
    }

    /// Nanoseconds of the protocol's clock.
    pub(crate) fn now(&self) -> u64 {
        self.began.elapsed().as_nanos() as u64
    }
}

/// Says why there is no SDP: the program sees only an error number.
fn complain(error: &OpenError) -> Errno {
    eprintln!("quipu: cannot open the adapter for SDP: {error}");
    Errno::ENODEV
}

/// The adapter of this process.
///
/// # Errors
///
/// ENODEV, and a line on standard error, if it cannot be opened.
pub(crate) fn adapter() -> Result<&'static Adapter, Errno> {
    if let Some(known) = known() {
        return Ok(known);
    }
    let fresh = Box::into_raw(Box::new(Adapter::open()?));
    let (null, order) = (ptr::null_mut(), Ordering::AcqRel);
    if ADAPTER.compare_exchange(null, fresh, order, Ordering::Acquire).is_err() {
        // SAFETY: another thread was faster; this box nobody has seen.
        drop(unsafe { Box::from_raw(fresh) });
    }
    known().ok_or(Errno::ENODEV)
}

/// The adapter, if it is open.
pub(crate) fn known() -> Option<&'static Adapter> {
    // SAFETY: it is never freed.
    unsafe { ADAPTER.load(Ordering::Acquire).as_ref() }
}

/// In a child of fork(2): its engine is the parent's, and it may open its own.
pub(crate) fn forget() {
    ADAPTER.store(ptr::null_mut(), Ordering::Release);
}
