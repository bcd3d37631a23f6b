//! The program that hands frames for our station to the socket (bpf(2); RFC 9669 for the instructions).

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};

use libc::{c_int, c_long};

use crate::sys::{adopt, check};

/// Commands, types and flags of linux/bpf.h and linux/if_link.h.
const BPF_MAP_CREATE: c_int = 0;
const BPF_MAP_UPDATE_ELEM: c_int = 2;
const BPF_PROG_LOAD: c_int = 5;
const BPF_LINK_CREATE: c_int = 28;
const BPF_MAP_TYPE_XSKMAP: u32 = 17;
const BPF_PROG_TYPE_XDP: u32 = 6;
const BPF_XDP: u32 = 37;
const XDP_FLAGS_SKB_MODE: u32 = 1 << 1;
const XDP_FLAGS_DRV_MODE: u32 = 1 << 2;
/// What a program answers to have the kernel go on with a frame.
const XDP_PASS: i32 = 2;
/// `bpf_redirect_map`.
const REDIRECT: i32 = 51;

/// The start of `union bpf_attr` for the command that makes a map.
#[repr(C)]
struct MapCreate {
    map_type: u32,
    key_size: u32,
    value_size: u32,
    max_entries: u32,
}

/// The same for the command that sets an element.
#[repr(C)]
struct MapUpdate {
    map: u32,
    _pad: u32,
    key: u64,
    value: u64,
    flags: u64,
}

/// The same for the command that loads a program.
#[repr(C)]
struct ProgramLoad {
    kind: u32,
    count: u32,
    instructions: u64,
    license: u64,
    log: [u64; 2],
    version: u32,
    flags: u32,
    name: [u8; 16],
    interface: u32,
    attach_type: u32,
    _pad: u32,
}

/// The same for the command that attaches one.
#[repr(C)]
struct LinkCreate {
    program: u32,
    interface: u32,
    attach_type: u32,
    flags: u32,
}

/// Calls bpf(2) with the start of an attribute; the rest is zero.
fn bpf<T>(command: c_int, attribute: &mut T) -> io::Result<c_int> {
    let pointer = std::ptr::from_mut(attribute);
    // SAFETY: the kernel reads and writes the bytes of a live variable, which is what the command takes, and
    // follows pointers in it to what callers keep alive.
    let result: c_long = unsafe { libc::syscall(libc::SYS_bpf, command, pointer, size_of::<T>()) };
    check(result as c_int)
}

/// A map of sockets by the number of the queue, with room up to `queue`.
pub(super) fn make_map(queue: u32) -> io::Result<OwnedFd> {
    let mut attribute = MapCreate {
        map_type: BPF_MAP_TYPE_XSKMAP,
        key_size: 4,
        value_size: 4,
        max_entries: queue + 1,
    };
    adopt(bpf(BPF_MAP_CREATE, &mut attribute)?)
}

/// Puts a socket into the map.
pub(super) fn set(map: &OwnedFd, queue: u32, socket: &OwnedFd) -> io::Result<()> {
    let number = socket.as_raw_fd();
    let mut attribute = MapUpdate {
        map: map.as_raw_fd() as u32,
        _pad: 0,
        key: (&raw const queue) as u64,
        value: (&raw const number) as u64,
        flags: 0,
    };
    bpf(BPF_MAP_UPDATE_ELEM, &mut attribute)?;
    Ok(())
}

/// An instruction: what, its registers (target, source), offset, number.
const fn step(code: u8, target: u8, source: u8, offset: i16, number: i32) -> u64 {
    u64::from_le_bytes({
        let ([a, b], [c, d, e, f]) = (offset.to_ne_bytes(), number.to_ne_bytes());
        // The registers share an octet in the order of the processor's bits.
        let registers =
            if cfg!(target_endian = "big") { target << 4 | source } else { source << 4 | target };
        [code, registers, a, b, c, d, e, f]
    })
    .to_le()
}

/// Hands frames for `station` to the socket that the map has for their queue, if any; all others go on to
/// the kernel.
fn instructions(station: [u8; 6], map: i32) -> [u64; 18] {
    const MOVE: u8 = 0xbf;
    const MOVE_NUMBER: u8 = 0xb7;
    const ADD_NUMBER: u8 = 0x07;
    const LOAD_WORD: u8 = 0x61;
    const LOAD_HALF: u8 = 0x69;
    const LOAD_MAP: u8 = 0x18;
    const IF_GREATER: u8 = 0x2d;
    const IF_WORD_OTHER: u8 = 0x56;
    const IF_OTHER: u8 = 0x55;
    const CALL: u8 = 0x85;
    const EXIT: u8 = 0x95;
    let [a, b, c, d, e, f] = station;
    let (first, last) = (i32::from_ne_bytes([a, b, c, d]), i32::from(u16::from_ne_bytes([e, f])));
    [
        // struct xdp_md: data, data_end, data_meta, ingress_ifindex, rx_queue_index.
        step(MOVE, 6, 1, 0, 0),
        step(LOAD_WORD, 2, 1, 0, 0),
        step(LOAD_WORD, 3, 1, 4, 0),
        step(MOVE, 4, 2, 0, 0),
        step(ADD_NUMBER, 4, 0, 0, super::ETHERNET as i32),
        step(IF_GREATER, 4, 3, 10, 0),
        step(LOAD_WORD, 4, 2, 0, 0),
        step(IF_WORD_OTHER, 4, 0, 8, first),
        step(LOAD_HALF, 4, 2, 4, 0),
        step(IF_OTHER, 4, 0, 6, last),
        step(LOAD_WORD, 2, 6, 16, 0),
        // Two instructions: a map by its descriptor (source 1).
        step(LOAD_MAP, 1, 1, 0, map),
        0,
        step(MOVE_NUMBER, 3, 0, 0, XDP_PASS),
        step(CALL, 0, 0, 0, REDIRECT),
        step(EXIT, 0, 0, 0, 0),
        step(MOVE_NUMBER, 0, 0, 0, XDP_PASS),
        step(EXIT, 0, 0, 0, 0),
    ]
}

/// Loads the program for a station and a map.
pub(super) fn load(station: [u8; 6], map: &OwnedFd) -> io::Result<OwnedFd> {
    let instructions = instructions(station, map.as_raw_fd());
    let mut name = [0; 16];
    name[..5].copy_from_slice(b"quipu");
    let mut attribute = ProgramLoad {
        kind: BPF_PROG_TYPE_XDP,
        count: instructions.len() as u32,
        instructions: instructions.as_ptr() as u64,
        license: c"MIT".as_ptr() as u64,
        log: [0; 2],
        version: 0,
        flags: 0,
        name,
        interface: 0,
        attach_type: BPF_XDP,
        _pad: 0,
    };
    adopt(bpf(BPF_PROG_LOAD, &mut attribute)?)
}

/// Attaches a program to an interface for as long as the descriptor is open: in the driver, or if that
/// cannot, in the kernel above all drivers.
pub(super) fn attach(program: &OwnedFd, interface: u32) -> io::Result<OwnedFd> {
    let by = |flags| {
        let program = program.as_raw_fd() as u32;
        bpf(BPF_LINK_CREATE, &mut LinkCreate { program, interface, attach_type: BPF_XDP, flags })
    };
    adopt(by(XDP_FLAGS_DRV_MODE).or_else(|_| by(XDP_FLAGS_SKB_MODE))?)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Offsets of linux/bpf.h.
    #[test]
    fn attributes_are_as_the_kernel_has_them() {
        assert_eq!(size_of::<MapCreate>(), 16);
        assert_eq!(size_of::<MapUpdate>(), 32);
        assert_eq!(std::mem::offset_of!(ProgramLoad, flags), 44);
        assert_eq!(std::mem::offset_of!(ProgramLoad, name), 48);
        assert_eq!(std::mem::offset_of!(ProgramLoad, attach_type), 68);
        assert_eq!(size_of::<LinkCreate>(), 16);
    }

    #[cfg(target_endian = "little")]
    #[test]
    fn instructions_are_as_rfc_9669_has_them() {
        assert_eq!(step(0xbf, 6, 1, 0, 0).to_ne_bytes(), [0xbf, 0x16, 0, 0, 0, 0, 0, 0]);
        assert_eq!(step(0x55, 4, 0, 6, -2).to_ne_bytes(), [0x55, 4, 6, 0, 0xfe, 0xff, 0xff, 0xff]);
    }
}
