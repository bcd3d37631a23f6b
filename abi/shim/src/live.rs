//! What depends on the device's address: asked of the engine, once, when a program first reads it.

use core::ffi::CStr;
use core::fmt::Write;
use std::sync::OnceLock;

use libc::c_char;
use quipu_abi_types::{
    ENGINE_API_SYMBOL, ENGINE_FILE_NAME, EngineApi, EngineApiFn, EngineDevice, EngineStatus,
    IBV_GID_TYPE_ROCE_V2, IBV_LINK_LAYER_INFINIBAND, ibv_gid, ibv_gid_entry,
};
use quipu_cabi::symbol_beside;

use crate::tree::{DEVICES, NEEDS_LINK, Text};

/// Room for the text of any file.
pub(crate) const TEXT: usize = 64;

/// A text of at most [`TEXT`] bytes; what does not fit is cut.
pub(crate) struct Buffer {
    bytes: [u8; TEXT],
    length: usize,
}

impl Buffer {
    pub(crate) const fn new() -> Self {
        Self { bytes: [0; TEXT], length: 0 }
    }

    pub(crate) fn as_bytes(&self) -> &[u8] {
        self.bytes.get(..self.length).unwrap_or(&[])
    }
}

impl Write for Buffer {
    fn write_str(&mut self, text: &str) -> core::fmt::Result {
        for (slot, byte) in self.bytes.iter_mut().skip(self.length).zip(text.bytes()) {
            *slot = byte;
            self.length += 1;
        }
        Ok(())
    }
}

/// What is shown of the devices.
struct Facts {
    api: &'static EngineApi,
    devices: [Option<Fact>; DEVICES.len()],
    interface: Option<[c_char; libc::IF_NAMESIZE]>,
}

/// What is shown of one of them.
#[derive(Clone, Copy)]
struct Fact {
    guid: u64,
    gid: ibv_gid_entry,
    link_layer: u8,
    lid: u16,
}

static FACTS: OnceLock<Option<Facts>> = OnceLock::new();

fn facts() -> Option<&'static Facts> {
    FACTS.get_or_init(ask).as_ref()
}

fn ask() -> Option<Facts> {
    let own = (&raw const FACTS).cast();
    let symbol = symbol_beside(own, ENGINE_FILE_NAME, ENGINE_API_SYMBOL).ok()?;
    // SAFETY: the engine exports this symbol with this type, and its table lives as long as the
    // process.
    let api = unsafe {
        core::mem::transmute::<*mut libc::c_void, EngineApiFn>(symbol)().as_ref::<'static>()
    };
    let api: &EngineApi = api.filter(|api| api.is_of_this_build())?;
    // SAFETY: the structure consists of integers.
    let mut listed: [EngineDevice; DEVICES.len()] = unsafe { core::mem::zeroed() };
    let mut count = 0;
    // SAFETY: `listed` has room for so many.
    let status =
        unsafe { (api.list_devices)(listed.as_mut_ptr(), DEVICES.len() as u32, &mut count) };
    if status != EngineStatus::Ok.code() || count == 0 {
        return None;
    }
    let listed = listed.get(..count as usize)?;
    let interface = name_of(listed.first()?.gid.ndev_ifindex);
    let devices = DEVICES.map(|name| {
        let is_it = |device: &&EngineDevice| {
            // SAFETY: the engine closes the name with a zero.
            unsafe { CStr::from_ptr(device.name.as_ptr()) }.to_bytes() == name.as_bytes()
        };
        let fact = |device: &EngineDevice| {
            let &EngineDevice { guid, gid, link_layer, lid, .. } = device;
            Fact { guid, gid, link_layer, lid }
        };
        listed.iter().find(is_it).map(fact)
    });
    Some(Facts { api, devices, interface })
}

/// The name of the network interface with a number.
fn name_of(interface: u32) -> Option<[c_char; libc::IF_NAMESIZE]> {
    let mut name = [0; libc::IF_NAMESIZE];
    // SAFETY: if_indextoname(3) writes at most IF_NAMESIZE bytes.
    let named = unsafe { libc::if_indextoname(interface, name.as_mut_ptr()) };
    (!named.is_null()).then_some(name)
}

/// Rows of the GID table that all hold the device's first address, which does not change.
const FIRST_ROWS: u32 = 4;

/// A row of the GID table of a device. One that is empty has no GID, as the kernel shows it.
fn row(which: usize, index: u32) -> Option<ibv_gid_entry> {
    let first = fact(which)?.gid;
    if index < FIRST_ROWS {
        return Some(ibv_gid_entry { gid_index: index, ..first });
    }
    let mut entry = first;
    // SAFETY: `entry` is valid for the call.
    let status = unsafe { (facts()?.api.list_gid)(index, &mut entry) };
    let none = ibv_gid { raw: [0; 16] };
    let empty = ibv_gid_entry { gid: none, gid_index: index, ..first };
    Some(if status == EngineStatus::Ok.code() { entry } else { empty })
}

fn fact(which: usize) -> Option<&'static Fact> {
    facts()?.devices.get(which)?.as_ref()
}

/// Whether the device of that number is one that programs see. If none can be asked for, those are
/// that need no packet link.
pub(crate) fn has(which: usize) -> bool {
    match facts() {
        Some(_) => fact(which).is_some(),
        None => DEVICES.get(which) != Some(&NEEDS_LINK),
    }
}

/// The same of an entry of a folder of devices, by its name.
pub(crate) fn is_shown(name: &str) -> bool {
    DEVICES.iter().position(|device| *device == name).is_none_or(has)
}

/// The name of the network interface that has the device's address.
pub(crate) fn interface() -> Option<&'static CStr> {
    let name = facts()?.interface.as_ref()?;
    // SAFETY: if_indextoname(3) closes the name with a zero.
    Some(unsafe { CStr::from_ptr(name.as_ptr()) })
}

/// The text of a file; none if the device is not there to ask.
pub(crate) fn text(text: Text) -> Option<Buffer> {
    let mut buffer = Buffer::new();
    let written = match text {
        Text::Fixed(text) => buffer.write_str(text),
        Text::Gid(which, index) => {
            // SAFETY: every bit pattern is a GID.
            let gid = unsafe { row(which, index)?.gid.raw };
            groups(&mut buffer, &gid)
        }
        // The GUID is kept big endian: its bytes in memory are in the order of writing.
        Text::Guid(which) => groups(&mut buffer, &fact(which)?.guid.to_ne_bytes()),
        Text::GidType(which, index) => buffer.write_str(match row(which, index)?.gid_type {
            IBV_GID_TYPE_ROCE_V2 => "RoCE v2\n",
            _ => "IB/RoCE v1\n",
        }),
        Text::LinkLayer(which) => buffer.write_str(match fact(which)?.link_layer {
            IBV_LINK_LAYER_INFINIBAND => "InfiniBand\n",
            _ => "Ethernet\n",
        }),
        Text::Lid(which) => writeln!(buffer, "{:#x}", fact(which)?.lid),
        Text::Interface(index) if index >= FIRST_ROWS => {
            let name = name_of(row(0, index)?.ndev_ifindex)?;
            // SAFETY: if_indextoname(3) closes the name with a zero.
            writeln!(buffer, "{}", unsafe { CStr::from_ptr(name.as_ptr()) }.to_str().ok()?)
        }
        Text::Interface(_) => writeln!(buffer, "{}", interface()?.to_str().ok()?),
    };
    written.ok()?;
    Some(buffer)
}

/// Two bytes to a group, as sysfs shows GIDs and GUIDs.
fn groups(buffer: &mut Buffer, bytes: &[u8]) -> core::fmt::Result {
    for (index, pair) in bytes.chunks(2).enumerate() {
        buffer.write_str(if index == 0 { "" } else { ":" })?;
        for byte in pair {
            write!(buffer, "{byte:02x}")?;
        }
    }
    buffer.write_str("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gid_is_written_as_sysfs_does() {
        let mut buffer = Buffer::new();
        let mut gid = [0u8; 16];
        (gid[10], gid[11], gid[12], gid[15]) = (0xff, 0xff, 10, 7);
        groups(&mut buffer, &gid).unwrap();
        assert_eq!(buffer.as_bytes(), b"0000:0000:0000:0000:0000:ffff:0a00:0007\n");
    }

    #[test]
    fn too_long_a_text_is_cut() {
        let mut buffer = Buffer::new();
        for _ in 0..10 {
            buffer.write_str("0123456789").unwrap();
        }
        assert_eq!(buffer.as_bytes().len(), TEXT);
    }
}
