//! The list of devices, and what is known of a device before it is opened.

use std::ptr::NonNull;
use std::sync::{Mutex, PoisonError};

use libc::{c_char, c_int};
use quipu_abi_trace::entry;
use quipu_abi_types::*;
use quipu_cabi::{Errno, Handle, IntMinusOne, Null, Plain, Tagged, Void};

use crate::engine::{check, engine};
use crate::object::Blank;

/// The private part of a device.
pub(crate) struct DeviceState {
    pub(crate) api: &'static EngineApi,
    pub(crate) info: EngineDevice,
}

impl Tagged for DeviceState {
    const TAG: u64 = 0x5155_4950_0044_4556;
}

/// A device: what programs see has the tail that providers see behind it.
pub(crate) type Device = Handle<verbs_device, DeviceState>;

/// Finds the device behind a pointer of the program.
///
/// # Safety
///
/// As [`Handle::get`].
pub(crate) unsafe fn device<'a>(raw: *mut ibv_device) -> Result<&'a Device, Errno> {
    // SAFETY: passed on; `ibv_device` is the beginning of `verbs_device`.
    unsafe { Device::get(raw.cast()) }
}

/// The devices that were ever listed. A host has a handful, so they are kept for the life of the
/// process: programs hold pointers to them in contexts, and ask for lists again and again.
static KNOWN: Mutex<Vec<Known>> = Mutex::new(Vec::new());

struct Known {
    name: [c_char; 64],
    device: *mut ibv_device,
}

// SAFETY: the pointer is to a device, whose fields do not change after it is made.
unsafe impl Send for Known {}

/// The most devices that a list can hold.
const MAX_DEVICES: usize = 64;

fn listed() -> Result<Vec<*mut ibv_device>, Errno> {
    let api = engine()?;
    // SAFETY: the structure consists of integers.
    let mut infos: [EngineDevice; MAX_DEVICES] = unsafe { std::mem::zeroed() };
    let mut count = 0;
    // SAFETY: `infos` has room for MAX_DEVICES, `count` is valid for the call.
    check(unsafe { (api.list_devices)(infos.as_mut_ptr(), MAX_DEVICES as u32, &mut count) })?;
    let mut known = KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
    let mut devices = Vec::new();
    for info in infos.iter().take(count as usize) {
        let found = known.iter().find(|known| known.name == info.name).map(|known| known.device);
        devices.push(found.unwrap_or_else(|| {
            let device = create(api, info);
            known.push(Known { name: info.name, device });
            device
        }));
    }
    Ok(devices)
}

fn create(api: &'static EngineApi, info: &EngineDevice) -> *mut ibv_device {
    let mut verbs = verbs_device::blank();
    let device = &mut verbs.device;
    device.node_type = info.node_type;
    device.transport_type = info.transport_type;
    device.name = info.name;
    // UCX looks for the character device /dev/infiniband/<dev_name>; the path shim answers.
    device.dev_name = info.name;
    join(&mut device.dev_path, "/sys/class/infiniband_verbs/", &info.name);
    join(&mut device.ibdev_path, "/sys/class/infiniband/", &info.name);
    Device::create(verbs, DeviceState { api, info: *info }).cast()
}

/// Writes two strings, one behind the other, and a zero.
fn join(to: &mut [c_char], head: &str, tail: &[c_char]) {
    let head = head.bytes().map(|byte| byte as c_char);
    let tail = tail.iter().copied().take_while(|byte| *byte != 0);
    let room = to.len() - 1;
    for (slot, byte) in to[..room].iter_mut().zip(head.chain(tail)) {
        *slot = byte;
    }
}

entry! {
    /// `ibv_get_device_list(3)`
    fn ibv_get_device_list(count: *mut c_int) -> Null<*mut ibv_device> {
        // SAFETY: the program passes null or a valid pointer.
        let count = unsafe { count.as_mut() };
        let devices = listed();
        if let Some(count) = count {
            *count = devices.as_ref().map_or(0, |devices| devices.len() as c_int);
        }
        let devices = devices?;
        // SAFETY: calloc(3); the program frees the array through ibv_free_device_list.
        let list = unsafe { libc::calloc(devices.len() + 1, size_of::<*mut ibv_device>()) };
        if list.is_null() {
            return Err(Errno::ENOMEM);
        }
        let list = list.cast::<*mut ibv_device>();
        // SAFETY: the array has one place more than there are devices; calloc left null there.
        unsafe { std::ptr::copy_nonoverlapping(devices.as_ptr(), list, devices.len()) };
        Ok(list)
    }

    /// `ibv_free_device_list(3)`
    fn ibv_free_device_list(list: *mut *mut ibv_device) -> Void {
        // SAFETY: free(3) of what ibv_get_device_list allocated by calloc, or of null.
        unsafe { libc::free(list.cast()) };
        Ok(())
    }

    /// `ibv_get_device_name(3)`
    fn ibv_get_device_name(raw: *mut ibv_device) -> Null<c_char> {
        // Programs may pass one that they have made up, of which only the public part is there.
        let device = NonNull::new(raw).ok_or(Errno::EINVAL)?;
        // SAFETY: the program passes a device.
        Ok(unsafe { (&raw mut (*device.as_ptr()).name).cast() })
    }

    /// `ibv_get_device_guid(3)`: big endian; 0 if it is no device.
    fn ibv_get_device_guid(raw: *mut ibv_device) -> Plain<u64> {
        // SAFETY: the program passes a device.
        Ok(unsafe { device(raw) }?.info.guid)
    }

    /// `ibv_get_device_index(3)`
    fn ibv_get_device_index(raw: *mut ibv_device) -> IntMinusOne {
        // SAFETY: the program passes a device.
        Ok(unsafe { device(raw) }?.info.index)
    }
}
