//! The port of the process.

use std::io::Write;
use std::sync::{Mutex, MutexGuard, PoisonError};

use libc::c_int;
use quipu::am::{Config, Port, Transport};
use quipu::{Access, Device, VouchedRegion};
use quipu_cabi::entry;
use quipu_mem::Vouched;

use crate::bundle;
use crate::codes::{BAD_ARG, Code, NOT_INIT, Outcome, RESOURCE, code};

/// Where the memory of programs ends on 64-bit Linux, and the first page, which nobody has.
const LOWEST: u64 = 4096;
const HIGHEST: u64 = (1 << 47) - 4096;

/// The library as a process has it.
#[derive(Default)]
struct Process {
    /// Calls of `AM_Init` that `AM_Terminate` has not undone.
    users: u32,
    opened: Option<Opened>,
    /// Bundles that the program has, by address.
    bundles: Vec<usize>,
}

/// The port, and all memory of the process as a source of bulk messages.
struct Opened {
    /// A child of fork opens its own.
    pid: u32,
    port: Port,
    memory: VouchedRegion,
}

static PROCESS: Mutex<Process> =
    Mutex::new(Process { users: 0, opened: None, bundles: Vec::new() });

fn process() -> MutexGuard<'static, Process> {
    PROCESS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Whether `AM_Init` was called.
pub(crate) fn is_initialised() -> bool {
    process().users > 0
}

/// The port, which is opened by the first call, and the key of all memory.
pub(crate) fn port() -> Outcome<(Port, quipu::Key)> {
    let mut process = process();
    if process.users == 0 {
        return Err(NOT_INIT);
    }
    let pid = std::process::id();
    if process.opened.as_ref().is_some_and(|opened| opened.pid != pid) {
        // The parent's is left alone.
        std::mem::forget(process.opened.take());
        process.bundles.clear();
    }
    if process.opened.is_none() {
        process.opened = Some(open().map_err(|error| {
            // `eprintln!` would panic where standard error is closed.
            let _ = writeln!(std::io::stderr(), "quipu: no Active Messages: {error}");
            RESOURCE
        })?);
    }
    let opened = process.opened.as_ref().ok_or(RESOURCE)?;
    Ok((opened.port.clone(), opened.memory.key()))
}

fn open() -> Result<Opened, quipu::am::Error> {
    let device = Device::from_env()?;
    let port = Port::open_over(&device, Config::default(), Transport::from_env()?)?;
    let access = Access::LOCAL_WRITE | Access::ON_DEMAND;
    // SAFETY: the memory is on demand: the adapter looks whether pages are there before it touches
    // them, and touches only what the program names in a message as its source.
    let all = unsafe { Vouched::new(LOWEST as usize, HIGHEST - LOWEST, LOWEST, access) };
    let memory = port.domain().register_vouched(all)?;
    Ok(Opened { pid: std::process::id(), port, memory })
}

pub(crate) fn add_bundle(bundle: usize) {
    process().bundles.push(bundle);
}

pub(crate) fn remove_bundle(bundle: usize) {
    process().bundles.retain(|known| *known != bundle);
}

/// What peers still wait for goes out when the process exits.
extern "C" fn at_exit() {
    quipu_cabi::wall::<quipu_cabi::Void>("exit", || {
        crate::spmd::leave();
        // A signal handler that exits may have interrupted a thread that holds the lock.
        let device = PROCESS.try_lock().ok().and_then(|process| {
            let opened = process.opened.as_ref().filter(|opened| opened.pid == std::process::id());
            opened.map(|opened| opened.port.device().clone())
        });
        if let Some(device) = device {
            device.shut_down();
            // Its destructor would destroy what other threads may still use.
            std::mem::forget(device);
        }
        Ok(())
    });
}

#[used]
#[cfg_attr(not(test), unsafe(link_section = ".fini_array"))]
static AT_EXIT: extern "C" fn() = at_exit;

entry! {
    /// `AM_Init`
    fn AM_Init() -> Code {
        process().users += 1;
        code(Ok(()))
    }

    /// `AM_Terminate`
    fn AM_Terminate() -> Code {
        let left = {
            let mut process = process();
            if process.users == 0 {
                return code(Err(NOT_INIT));
            }
            process.users -= 1;
            if process.users == 0 { std::mem::take(&mut process.bundles) } else { Vec::new() }
        };
        for bundle in left {
            bundle::free(bundle)?;
        }
        let opened = if process().users == 0 { process().opened.take() } else { None };
        drop(opened);
        code(Ok(()))
    }

    /// `AM_MaxShort`
    fn AM_MaxShort() -> Code {
        Ok(quipu::am::MAX_ARGS as c_int)
    }

    /// `AM_MaxMedium`
    fn AM_MaxMedium() -> Code {
        Ok(MAX_MEDIUM)
    }

    /// `AM_MaxLong`
    fn AM_MaxLong() -> Code {
        Ok(MAX_LONG)
    }

    /// `AM_MaxNumHandlers`
    fn AM_MaxNumHandlers() -> Code {
        Ok(MAX_HANDLERS)
    }

    /// `AM_MaxNumTranslations`
    fn AM_MaxNumTranslations(out: *mut c_int) -> Code {
        code(crate::bundle::give(out, quipu::am::MAX_TRANSLATIONS as c_int))
    }

    /// `AM_MaxSegLength`
    fn AM_MaxSegLength(out: *mut usize) -> Code {
        code(crate::bundle::give(out, usize::MAX))
    }
}

/// Bytes of a medium message, as AMUDP has them.
pub(crate) const MAX_MEDIUM: c_int = 65_000;
/// Bytes of a bulk message. Programs of AMUDP allocate as much.
pub(crate) const MAX_LONG: c_int = 1 << 20;
const MAX_HANDLERS: c_int = 256;

/// A length that is no more than a limit.
pub(crate) fn length(len: c_int, most: c_int) -> Outcome<usize> {
    usize::try_from(len).ok().filter(|_| len <= most).ok_or(BAD_ARG)
}
