//! Opened devices. Each is opened once and stays open for the life of the process: all identifiers
//! share its context, and `rdma_get_devices` gives the same one.

use std::sync::{Mutex, MutexGuard, PoisonError};

use libc::{c_char, c_int};
use quipu_abi_trace::entry;
use quipu_abi_types::*;
use quipu_cabi::{Errno, Null, Void};

use crate::verbs::{extended, number, pointer, text, verbs};

/// An opened device.
pub(crate) struct Device {
    name: [c_char; 64],
    pub(crate) context: *mut ibv_context,
    /// Limits of reads and atomics, as `rdma_conn_param` counts them.
    pub(crate) max_responder_resources: u8,
    pub(crate) max_initiator_depth: u8,
    /// The longest queue of a queue pair.
    pub(crate) max_requests: u32,
    /// An RNIC, or QPIP: its connections and queue pairs are one, so that the engine moves the queue pairs.
    pub(crate) is_moved: bool,
    domain: Mutex<Domain>,
    /// The default domain of extended reliable connections, once it was asked for. It stays open with
    /// the device.
    xrcd: Mutex<*mut ibv_xrcd>,
}

/// The default protection domain, and how many identifiers use it.
struct Domain {
    pd: *mut ibv_pd,
    users: u32,
}

// SAFETY: the pointers are to objects of libibverbs, which may be used from any thread.
unsafe impl Send for Device {}
// SAFETY: as above; what changes is behind a mutex.
unsafe impl Sync for Device {}

/// The devices that this process has opened. A child of fork starts anew: its parent's are the
/// parent's.
static OPENED: Mutex<Opened> = Mutex::new(Opened { process: 0, devices: Vec::new() });

struct Opened {
    process: u32,
    devices: Vec<&'static Device>,
}

fn opened() -> MutexGuard<'static, Opened> {
    let mut opened = OPENED.lock().unwrap_or_else(PoisonError::into_inner);
    let process = std::process::id();
    if opened.process != process {
        opened.process = process;
        opened.devices.clear();
    }
    opened
}

/// The device of that name.
///
/// # Errors
///
/// ENODEV if there is none; those of opening it.
pub(crate) fn device(name: &[c_char]) -> Result<&'static Device, Errno> {
    let (all, failed) = all()?;
    let found = all.into_iter().find(|device| text(&device.name) == text(name));
    found.ok_or(failed.unwrap_or(Errno::ENODEV))
}

/// All devices, opened; why one could not be, if so.
fn all() -> Result<(Vec<&'static Device>, Option<Errno>), Errno> {
    let verbs = verbs()?;
    let mut opened = opened();
    let mut count = 0;
    // SAFETY: `count` is valid for the call.
    let list = pointer(unsafe { (verbs.get_device_list)(&mut count) })?;
    let (mut all, mut failed) = (Vec::new(), None);
    for index in 0..count.max(0) as usize {
        // SAFETY: the list has `count` devices, which libibverbs keeps.
        let raw = unsafe { *list.add(index) };
        // SAFETY: as above; names do not change.
        let name = unsafe { (*raw).name };
        let known = opened.devices.iter().find(|device| device.name == name);
        let device = match known {
            Some(known) => Ok(*known),
            // SAFETY: as above.
            None => unsafe { open(raw) },
        };
        match device {
            Ok(device) => {
                if known.is_none() {
                    opened.devices.push(device);
                }
                all.push(device);
            }
            Err(errno) => failed = Some(errno),
        }
    }
    // SAFETY: the list came from get_device_list.
    unsafe { (verbs.free_device_list)(list) };
    Ok((all, failed))
}

/// # Safety
///
/// `raw` is a device of libibverbs.
unsafe fn open(raw: *mut ibv_device) -> Result<&'static Device, Errno> {
    let verbs = verbs()?;
    // SAFETY: passed on from the caller.
    let context = pointer(unsafe { (verbs.open_device)(raw) })?;
    // SAFETY: the structure consists of integers.
    let mut attr: ibv_device_attr = unsafe { std::mem::zeroed() };
    // SAFETY: `context` was just opened, `attr` is valid for the call.
    number(unsafe { (verbs.query_device)(context, &mut attr) })?;
    let byte = |limit: c_int| limit.clamp(0, i32::from(RDMA_MAX_RESP_RES) - 1) as u8;
    // SAFETY: passed on from the caller.
    let (name, node_type) = unsafe { ((*raw).name, (*raw).node_type) };
    Ok(Box::leak(Box::new(Device {
        name,
        context,
        max_responder_resources: byte(attr.max_qp_rd_atom),
        max_initiator_depth: byte(attr.max_qp_init_rd_atom),
        max_requests: attr.max_qp_wr.max(0).unsigned_abs(),
        is_moved: node_type != IBV_NODE_CA,
        domain: Mutex::new(Domain { pd: std::ptr::null_mut(), users: 0 }),
        xrcd: Mutex::new(std::ptr::null_mut()),
    })))
}

impl Device {
    /// The default protection domain, for one more identifier.
    pub(crate) fn enter_domain(&self) -> Result<*mut ibv_pd, Errno> {
        let mut domain = self.domain.lock().unwrap_or_else(PoisonError::into_inner);
        if domain.pd.is_null() {
            // SAFETY: the context stays open.
            domain.pd = pointer(unsafe { (verbs()?.alloc_pd)(self.context) })?;
        }
        domain.users += 1;
        Ok(domain.pd)
    }

    /// The default domain of extended reliable connections: one of this process alone.
    pub(crate) fn xrcd(&self) -> Result<*mut ibv_xrcd, Errno> {
        let mut xrcd = self.xrcd.lock().unwrap_or_else(PoisonError::into_inner);
        if xrcd.is_null() {
            let mut init = ibv_xrcd_init_attr {
                comp_mask: IBV_XRCD_INIT_ATTR_FD | IBV_XRCD_INIT_ATTR_OFLAGS,
                fd: -1,
                oflags: libc::O_CREAT,
            };
            // SAFETY: the context stays open; `init` is valid for the call.
            *xrcd = unsafe {
                let open = extended(self.context).open_xrcd.ok_or(Errno::EOPNOTSUPP)?;
                pointer(open(self.context, &mut init))?
            };
        }
        Ok(*xrcd)
    }

    /// The inverse of [`Device::enter_domain`]. The last one frees the domain, unless the program
    /// has left memory regions in it: then it is kept for the next one.
    pub(crate) fn leave_domain(&self) {
        let mut domain = self.domain.lock().unwrap_or_else(PoisonError::into_inner);
        domain.users = domain.users.saturating_sub(1);
        if domain.users > 0 || domain.pd.is_null() {
            return;
        }
        let Ok(verbs) = verbs() else { return };
        // SAFETY: it came from alloc_pd, and no identifier uses it.
        if unsafe { (verbs.dealloc_pd)(domain.pd) } == 0 {
            domain.pd = std::ptr::null_mut();
        }
    }
}

entry! {
    /// `rdma_get_devices(3)`
    fn rdma_get_devices(count: *mut c_int) -> Null<*mut ibv_context> {
        let devices = all().and_then(|(devices, failed)| match devices[..] {
            [] => Err(failed.unwrap_or(Errno::ENODEV)),
            _ => Ok(devices),
        });
        // SAFETY: the program passes null or a valid pointer.
        if let Some(count) = unsafe { count.as_mut() } {
            *count = devices.as_ref().map_or(0, |devices| devices.len() as c_int);
        }
        let devices = devices?;
        // SAFETY: calloc(3); the program frees the array through rdma_free_devices.
        let list = unsafe { libc::calloc(devices.len() + 1, size_of::<*mut ibv_context>()) };
        if list.is_null() {
            return Err(Errno::ENOMEM);
        }
        let list = list.cast::<*mut ibv_context>();
        for (index, device) in devices.iter().enumerate() {
            // SAFETY: the array has one place more than there are devices; calloc left null there.
            unsafe { list.add(index).write(device.context) };
        }
        Ok(list)
    }

    /// `rdma_free_devices(3)`. The devices stay open.
    fn rdma_free_devices(list: *mut *mut ibv_context) -> Void {
        // SAFETY: the program passes what rdma_get_devices gave, which is of calloc(3).
        unsafe { libc::free(list.cast()) };
        Ok(())
    }
}
