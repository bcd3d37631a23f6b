//! Memory of the program: arguments, descriptors, addresses.

use libc::c_void;
use quipu_via::address::{self, MAX_DISCRIMINATOR, NetAddress};
use quipu_via::codes::{Code, Outcome};
use quipu_via::descriptor::{CONTROL_LEN, Control, MAX_SEGMENTS, SEGMENT_LEN, Segment};
use quipu_via::queue::Done;

use crate::types::VIP_NET_ADDRESS;

/// Where `ImmediateData`, `Length` and `Status` stand in a descriptor.
const IMMEDIATE: usize = 20;
const LENGTH: usize = 24;
const STATUS: usize = 28;

/// Stores a value where the program wants it.
pub(crate) fn give<T>(out: *mut T, value: T) -> Outcome {
    if out.is_null() {
        return Err(Code::InvalidParameter);
    }
    // SAFETY: it is not null, so the program passes a place for one value.
    unsafe { out.write_unaligned(value) };
    Ok(())
}

/// Reads a structure that the program passes.
pub(crate) fn take<T: Copy>(from: *const T) -> Outcome<T> {
    if from.is_null() {
        return Err(Code::InvalidParameter);
    }
    // SAFETY: it is not null, so the program passes a structure of this type, whose fields are integers
    // and addresses.
    Ok(unsafe { from.read_unaligned() })
}

/// Reads an address. One without a host has none: the caller says whether it needs one.
pub(crate) fn net_address(from: *const VIP_NET_ADDRESS) -> Outcome<(Option<NetAddress>, Vec<u8>)> {
    if from.is_null() {
        return Err(Code::InvalidParameter);
    }
    let from = from.cast::<u8>();
    // SAFETY: the program passes the header of an address.
    let [host_len, discriminator_len] = unsafe { from.cast::<[u16; 2]>().read_unaligned() };
    let (host_len, discriminator_len) = (usize::from(host_len), usize::from(discriminator_len));
    if ![0, 4, 16].contains(&host_len) || discriminator_len > MAX_DISCRIMINATOR {
        return Err(Code::InvalidParameter);
    }
    // SAFETY: "the host address bytes, then the discriminator bytes" follow the header, as many as it says.
    let bytes = unsafe { std::slice::from_raw_parts(from.add(4), host_len + discriminator_len) };
    let (host, discriminator) = bytes.split_at(host_len);
    let address =
        address::host(host).map(|host| NetAddress { host, discriminator: discriminator.to_vec() });
    Ok((address, discriminator.to_vec()))
}

/// Writes an address: header, host, discriminator, and no byte more.
pub(crate) fn put_net_address(out: *mut VIP_NET_ADDRESS, host: &[u8], discriminator: &[u8]) {
    let out = out.cast::<u8>();
    // SAFETY: the caller has checked that it is not null; the program allocates an address as long as those
    // of this NIC are.
    unsafe {
        out.cast::<[u16; 2]>().write_unaligned([host.len() as u16, discriminator.len() as u16]);
        out.add(4).copy_from_nonoverlapping(host.as_ptr(), host.len());
        out.add(4 + host.len())
            .copy_from_nonoverlapping(discriminator.as_ptr(), discriminator.len());
    }
}

/// Writes the length and the bytes of a host address, and leaves the rest of the address alone.
pub(crate) fn put_host(out: *mut VIP_NET_ADDRESS, host: &[u8]) {
    let out = out.cast::<u8>();
    // SAFETY: as in `put_net_address`.
    unsafe {
        out.cast::<u16>().write_unaligned(host.len() as u16);
        out.add(4).copy_from_nonoverlapping(host.as_ptr(), host.len());
    }
}

/// How a descriptor's memory may be reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Way {
    /// It is registered, so it is there.
    Registered,
    /// Nobody knows: the kernel looks.
    Unknown,
}

fn copy_in(way: Way, from: u64, out: &mut [u8]) -> bool {
    match way {
        Way::Registered => {
            // SAFETY: registered memory stays mapped, which the program promises by registering it.
            unsafe { std::ptr::copy(from as *const u8, out.as_mut_ptr(), out.len()) };
            true
        }
        Way::Unknown => kernel_copy(from, out.as_mut_ptr(), out.len(), false),
    }
}

/// Copies between this process's own memory and a place that may not be there.
fn kernel_copy(far: u64, near: *mut u8, len: usize, write: bool) -> bool {
    let local = libc::iovec { iov_base: near.cast::<c_void>(), iov_len: len };
    let remote = libc::iovec { iov_base: far as *mut c_void, iov_len: len };
    let pid = std::process::id() as libc::pid_t;
    // SAFETY: `near` has `len` bytes; the kernel checks `far`, and reports what is not mapped.
    let copied = unsafe {
        if write {
            libc::process_vm_writev(pid, &local, 1, &remote, 1, 0)
        } else {
            libc::process_vm_readv(pid, &local, 1, &remote, 1, 0)
        }
    };
    usize::try_from(copied) == Ok(len)
}

/// A descriptor as it stands in memory now: its control segment, and as many segments as are allowed.
/// None if the memory is not there. `way` says for a length whether that much is registered.
pub(crate) fn descriptor(
    at: u64,
    way: impl Fn(u64) -> Way,
) -> Option<(Control, Result<Vec<Segment>, ()>)> {
    let mut head = [0; CONTROL_LEN];
    if !copy_in(way(CONTROL_LEN as u64), at, &mut head) {
        return None;
    }
    let control = Control::parse(&head);
    if control.segments > MAX_SEGMENTS {
        return Some((control, Err(())));
    }
    let mut bytes = [0; MAX_SEGMENTS as usize * SEGMENT_LEN];
    let bytes = &mut bytes[..usize::from(control.segments) * SEGMENT_LEN];
    let whole = (CONTROL_LEN + bytes.len()) as u64;
    if !bytes.is_empty() && !copy_in(way(whole), at.wrapping_add(CONTROL_LEN as u64), bytes) {
        return None;
    }
    let (segments, _) = bytes.as_chunks::<SEGMENT_LEN>();
    Some((control, Ok(segments.iter().map(Segment::parse).collect())))
}

/// The data of segments, copied. None if their memory is not there. `way` says for a segment whether its
/// memory is registered.
pub(crate) fn gather(segments: &[Segment], way: impl Fn(&Segment) -> Way) -> Option<Vec<u8>> {
    let len = segments.iter().map(|segment| segment.len as usize).sum();
    let mut out = vec![0; len];
    let mut rest = &mut out[..];
    for segment in segments.iter().filter(|segment| segment.len > 0) {
        let (part, after) = rest.split_at_mut(segment.len as usize);
        if !copy_in(way(segment), segment.addr, part) {
            return None;
        }
        rest = after;
    }
    Some(out)
}

/// Writes the outcome into a descriptor, the status last. Returns whether its memory is there.
pub(crate) fn complete(done: &Done, way: Way) -> bool {
    let at = done.descriptor;
    let mut fields = [0; 12];
    let word = |value: u32| value.to_ne_bytes();
    fields[4..8].copy_from_slice(&word(done.len));
    fields[8..].copy_from_slice(&word(done.status.bits()));
    if let Some(immediate) = done.immediate {
        fields[..4].copy_from_slice(&word(immediate));
    }
    let skipped = if done.immediate.is_some() { 0 } else { LENGTH - IMMEDIATE };
    if way == Way::Unknown {
        let (near, len) = (&mut fields[skipped..], 12 - skipped);
        return kernel_copy(
            at.wrapping_add((IMMEDIATE + skipped) as u64),
            near.as_mut_ptr(),
            len,
            true,
        );
    }
    let at = at as *mut u8;
    // SAFETY: registered memory stays mapped and is the library's until the descriptor is done; the fields
    // lie in the first 32 bytes, which are registered.
    unsafe {
        if let Some(immediate) = done.immediate {
            at.add(IMMEDIATE).cast::<u32>().write_unaligned(immediate);
        }
        at.add(LENGTH).cast::<u32>().write_unaligned(done.len);
        std::sync::atomic::fence(std::sync::atomic::Ordering::Release);
        at.add(STATUS).cast::<u32>().write_unaligned(done.status.bits());
    }
    true
}
