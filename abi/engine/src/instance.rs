//! The engine of this process.
//!
//! It is opened with the first context and never freed: handles of it may be used at any time, and
//! its helper thread outlives any context. A child of fork inherits an engine that is inert there
//! and opens its own; the inherited one, whose locks may be held by threads that the child does
//! not have, is left alone from then on.

use std::io::{IsTerminal, Write};
use std::sync::atomic::{AtomicPtr, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use quipu_abi_types::*;
use quipu_host::connection::{ChannelKey, IdKey};
use quipu_host::{Config, Engine, OpenError};
use quipu_nic::{
    AhId, ChannelId, CountersId, CqId, FlowId, MrId, MwId, PdId, QpId, SrqId, TableId,
};
use tracing_subscriber::EnvFilter;

use crate::ending;
use crate::registry::{ContextNumber, Registry};
use crate::status::{Failure, INVALID, Outcome};
use crate::xrc::XrcdNumber;

/// An engine and what the facades know of it.
pub(crate) struct Instance {
    pub(crate) engine: Arc<Engine>,
    registry: Mutex<Registry>,
    /// Held by a thread that opens or closes an XRC domain, above all other locks.
    xrcd_turn: Mutex<()>,
    /// Mixed into every handle. An engine that a child of fork opened has another one than its
    /// parent's, so that an inherited handle does not happen to name an object of the child. 0 in a
    /// process that has inherited none.
    tag: u64,
}

/// Where the number of a tag begins.
const TAG_SHIFT: u32 = 56;

/// The newest engine: of this process, or of a process that it was forked from.
static CURRENT: AtomicPtr<Instance> = AtomicPtr::new(std::ptr::null_mut());

/// The newest engine, no matter who owns it.
#[inline]
fn newest() -> Option<&'static Instance> {
    // SAFETY: the pointer is null or from Box::into_raw, and an instance that was stored is never
    // freed.
    unsafe { CURRENT.load(Ordering::Acquire).as_ref() }
}

/// The engine of the data path: if it is an inherited one, it says so itself when it is entered.
///
/// # Errors
///
/// None was opened yet.
#[inline]
pub(crate) fn opened() -> Outcome<&'static Instance> {
    newest().ok_or(Failure(EngineStatus::NoDevice))
}

/// The engine of this process.
///
/// # Errors
///
/// None was opened yet, or only in the process that this one was forked from.
pub(crate) fn current() -> Outcome<&'static Instance> {
    opened().and_then(|instance| {
        if instance.engine.is_here() { Ok(instance) } else { Err(EngineStatus::NoDevice.into()) }
    })
}

/// The engine of this process for a destructor: none if what is to be destroyed is inherited, and
/// nothing is to be done.
///
/// # Errors
///
/// None was ever opened.
pub(crate) fn for_destructor() -> Outcome<Option<&'static Instance>> {
    opened().map(|instance| instance.engine.is_here().then_some(instance))
}

/// The engine of this process, opened if need be.
///
/// # Errors
///
/// As [`Engine::open`]. Why is written to standard error, since a program shows at most an errno.
pub(crate) fn open() -> Outcome<&'static Instance> {
    if let Ok(instance) = current() {
        return Ok(instance);
    }
    let _turn = Turn::wait();
    // Another thread may have been faster.
    if let Ok(instance) = current() {
        return Ok(instance);
    }
    let config = Config::from_env().map_err(OpenError::from);
    let engine = config.and_then(|mut config| {
        start_log(config.log.as_deref());
        // An adapter that another process shares has the queue pairs of QPIP alone.
        config.qpip = config.qpip.filter(|qpip| !qpip.link.is_shared());
        Engine::open(config)
    });
    let engine = engine.map_err(|error| {
        complain(&error);
        Failure::from(&error)
    })?;
    let tag = newest().map_or(0, |inherited| next_tag(inherited.tag));
    let (registry, xrcd_turn) = (Mutex::default(), Mutex::default());
    let instance = Box::new(Instance { engine, registry, xrcd_turn, tag });
    CURRENT.store(Box::into_raw(instance), Ordering::Release);
    let instance = current()?;
    ending::watch(instance.engine.config(), sum_up);
    Ok(instance)
}

/// What is said where a signal ends the process.
fn sum_up() {
    quipu_cabi::wall::<quipu_cabi::Void>("a signal", || {
        if let Ok(instance) = current()
            && ending::may_sum_up()
        {
            instance.engine.sum_up();
        }
        Ok(())
    });
}

/// Whether the engine of this process has a plan of faults, or would have one.
pub(crate) fn has_plan() -> bool {
    let planned = |config: &Config| config.faults.is_some() || config.fault_replay.is_some();
    match current() {
        Ok(instance) => planned(instance.engine.config()),
        Err(_) => Config::from_env().is_ok_and(|config| planned(&config)),
    }
}

/// The process of which a thread opens an engine now; 0: none does.
static OPENING: AtomicU32 = AtomicU32::new(0);

/// The turn of one thread of this process to open an engine. A lock would do, if a child of fork could not
/// inherit it from a thread that only its parent has.
struct Turn;

impl Turn {
    fn wait() -> Self {
        let here = std::process::id();
        loop {
            let other = OPENING.load(Ordering::Relaxed);
            let (taken, free) = (Ordering::Acquire, Ordering::Relaxed);
            if other != here && OPENING.compare_exchange(other, here, taken, free).is_ok() {
                return Self;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        OPENING.store(0, Ordering::Release);
    }
}

/// The tag of an engine of a process that has inherited one with this tag: never 0.
fn next_tag(inherited: u64) -> u64 {
    let number = (inherited >> TAG_SHIFT) as u8;
    u64::from(number.checked_add(1).unwrap_or(1)) << TAG_SHIFT
}

/// Tells the person at the terminal why there is no device.
pub(crate) fn complain(error: &OpenError) {
    // `eprintln!` would panic where standard error is closed.
    let _ = writeln!(std::io::stderr(), "quipu: no RDMA device: {error}");
}

/// Logs to standard error what the filter lets through; errors, if there is no filter.
fn start_log(filter: Option<&str>) {
    let filter = filter.unwrap_or("error");
    let filter = EnvFilter::try_new(filter).unwrap_or_else(|why| {
        let _ = writeln!(std::io::stderr(), "quipu: QUIPU_LOG={filter} is not valid: {why}");
        EnvFilter::new("error")
    });
    let log = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal());
    // It is set already when a child of fork opens its own engine.
    let _ = log.try_init();
}

/// What a program ends with in which the strict mode has found something.
const STRICT_EXIT_CODE: i32 = 86;

/// Runs when the process exits, after the program's own handlers: what peers still wait for,
/// acknowledgements above all, goes out.
extern "C" fn at_exit() {
    quipu_cabi::wall::<quipu_cabi::Void>("exit", || {
        if let Ok(instance) = current()
            && ending::may_sum_up()
        {
            instance.engine.shutdown_flush();
            if instance.engine.strict_verdict() {
                // SAFETY: all streams are flushed, as exit would do behind this; nothing else of the
                // process runs any more but other threads, which `_exit` ends.
                unsafe {
                    libc::fflush(std::ptr::null_mut());
                    libc::_exit(STRICT_EXIT_CODE);
                }
            }
        }
        Ok(())
    });
}

#[used]
#[unsafe(link_section = ".fini_array")]
static AT_EXIT: extern "C" fn() = at_exit;

/// Translates handles of the table to handles of the engine and back.
macro_rules! handles {
    ($($of:ident, $to:ident: $handle:ident <-> $id:ident;)*) => {
        impl Instance {$(
            #[inline]
            pub(crate) fn $of(&self, handle: $handle) -> $id {
                $id(handle.0 ^ self.tag)
            }
            #[inline]
            pub(crate) fn $to(&self, id: $id) -> $handle {
                $handle(id.0 ^ self.tag)
            }
        )*}
    };
}

handles! {
    context, context_handle: ContextHandle <-> ContextNumber;
    pd, pd_handle: PdHandle <-> PdId;
    mr, mr_handle: MrHandle <-> MrId;
    mw, mw_handle: MwHandle <-> MwId;
    channel, channel_handle: ChannelHandle <-> ChannelId;
    cq, cq_handle: CqHandle <-> CqId;
    srq, srq_handle: SrqHandle <-> SrqId;
    qp, qp_handle: QpHandle <-> QpId;
    flow, flow_handle: FlowHandle <-> FlowId;
    counters, counters_handle: CountersHandle <-> CountersId;
    wq, wq_handle: WqHandle <-> SrqId;
    table, table_handle: TableHandle <-> TableId;
    cm_channel, cm_channel_handle: CmChannelHandle <-> ChannelKey;
    cm_id, cm_id_handle: CmIdHandle <-> IdKey;
    xrcd, xrcd_handle: XrcdHandle <-> XrcdNumber;
}

impl Instance {
    /// Handles of this kind have half the size; the tag is in their upper byte as well.
    #[inline]
    pub(crate) fn ah(&self, handle: AhHandle) -> AhId {
        AhId(handle.0 ^ (self.tag >> 32) as u32)
    }

    #[inline]
    pub(crate) fn ah_handle(&self, id: AhId) -> AhHandle {
        AhHandle(id.0 ^ (self.tag >> 32) as u32)
    }

    /// The registry. Nothing else is locked or waited for while it is held.
    pub(crate) fn registry(&self) -> MutexGuard<'_, Registry> {
        // Its maps are consistent between any two statements that could panic.
        self.registry.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The turn of one thread to open or close an XRC domain.
    pub(crate) fn xrcd_turn(&self) -> MutexGuard<'_, ()> {
        self.xrcd_turn.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The outcome of a destructor. In a process that was forked from one with an engine, an
    /// object that is not known here may be an inherited one, which is gone already.
    pub(crate) fn destroyed<T: Default>(&self, outcome: Outcome<T>) -> Outcome<T> {
        match outcome {
            Err(INVALID) if self.tag != 0 => Ok(T::default()),
            outcome => outcome,
        }
    }
}
