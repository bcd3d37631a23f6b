//! What programs ask about a device, its port and its addresses.

use std::ptr;

use libc::{c_int, ssize_t};
use quipu_abi_trace::entry;
use quipu_abi_types::*;
use quipu_cabi::{CReturn, Errno, IntErrno, IntMinusOne};

use crate::context::{Context, context};
use crate::engine::check;
use crate::object::Blank;

/// The one partition key: full membership of the default partition.
const DEFAULT_PKEY: u16 = 0xffff;
/// How much of a port programs know that call the exported `ibv_query_port`: the structure as it was
/// before `port_cap_flags2`.
const COMPAT_PORT_ATTR: usize = 48;

/// Asks for a row of the GID table.
fn gid(context: &Context, port: u32, index: u32) -> Result<ibv_gid_entry, Errno> {
    let mut entry = ibv_gid_entry::blank();
    // SAFETY: `entry` is valid for the call.
    check(unsafe { (context.api.query_gid)(context.handle, port, index, &mut entry) })?;
    Ok(entry)
}

/// Asks for a port and copies as much of it as the program has room for.
///
/// # Safety
///
/// `out` is null or writable for `room` bytes.
unsafe fn port(
    context: &Context,
    port: u8,
    out: *mut ibv_port_attr,
    room: usize,
) -> Result<(), Errno> {
    if out.is_null() {
        return Err(Errno::EINVAL);
    }
    let mut attr = ibv_port_attr::blank();
    // SAFETY: `attr` is valid for the call.
    check(unsafe { (context.api.query_port)(context.handle, port.into(), &mut attr) })?;
    // SAFETY: "writable for room bytes"; what lies beyond the structure is cleared.
    unsafe { copy_out(&attr, out.cast(), room) };
    Ok(())
}

/// Copies a structure to a program that knows a shorter or longer form of it. What the program's
/// form has beyond ours is cleared.
///
/// # Safety
///
/// `out` is writable for `room` bytes.
unsafe fn copy_out<T: Copy>(value: &T, out: *mut u8, room: usize) {
    let known = room.min(size_of::<T>());
    // SAFETY: both are valid for `known` bytes; the rest of `out` is within `room`.
    unsafe {
        ptr::copy_nonoverlapping(ptr::from_ref(value).cast::<u8>(), out, known);
        ptr::write_bytes(out.add(known), 0, room - known);
    }
}

/// What `ibv_query_gid_table` returns: a number of rows, or a negative error number.
pub struct Rows;

impl CReturn for Rows {
    type Value = ssize_t;
    type Raw = ssize_t;
    fn success(rows: ssize_t) -> ssize_t {
        rows
    }
    fn failure(errno: Errno) -> ssize_t {
        errno.set();
        -(errno.0 as ssize_t)
    }
    fn error(rows: &ssize_t) -> Option<Errno> {
        (*rows < 0).then(|| Errno(-*rows as c_int))
    }
}

entry! {
    /// `ibv_query_device(3)`
    fn ibv_query_device(raw: *mut ibv_context, out: *mut ibv_device_attr) -> IntErrno {
        // SAFETY: the program passes a context, and null or a valid pointer.
        let (context, out) = unsafe { (context(raw)?, out.as_mut().ok_or(Errno::EINVAL)?) };
        *out = context.opened.attributes.orig_attr;
        Ok(())
    }

    /// `ibv_query_device_ex(3)`
    fn query_device_ex(
        raw: *mut ibv_context,
        input: *const ibv_query_device_ex_input,
        out: *mut ibv_device_attr_ex,
        room: usize,
    ) -> IntErrno {
        // SAFETY: the program passes a context.
        let context = unsafe { context(raw) }?;
        // SAFETY: the program passes null or a valid pointer.
        let asked = unsafe { input.as_ref() }.map_or(0, |input| input.comp_mask);
        if asked != 0 || out.is_null() || room < size_of::<ibv_device_attr>() {
            return Err(Errno::EINVAL);
        }
        // SAFETY: the program says that `out` is writable for `room` bytes.
        unsafe { copy_out(&context.opened.attributes, out.cast(), room) };
        Ok(())
    }

    /// `ibv_query_port(3)`, as programs of old linked it.
    fn ibv_query_port(raw: *mut ibv_context, number: u8, out: *mut ibv_port_attr) -> IntErrno {
        // SAFETY: the program passes a context, and room for the older structure.
        unsafe { port(context(raw)?, number, out, COMPAT_PORT_ATTR) }
    }

    /// `ibv_query_port(3)`, as the inline function calls it.
    fn query_port(
        raw: *mut ibv_context,
        number: u8,
        out: *mut ibv_port_attr,
        room: usize,
    ) -> IntErrno {
        // SAFETY: the program passes a context, and `room` bytes at `out`.
        unsafe { port(context(raw)?, number, out, room) }
    }

    /// `ibv_query_port_speed(3)`: in units of 100 Mb/s.
    fn ibv_query_port_speed(raw: *mut ibv_context, number: u32, out: *mut u64) -> IntErrno {
        // SAFETY: the program passes a context, and null or a valid pointer.
        let (context, out) = unsafe { (context(raw)?, out.as_mut().ok_or(Errno::EINVAL)?) };
        let number = u8::try_from(number).map_err(|_| Errno::EINVAL)?;
        let mut attr = ibv_port_attr::blank();
        // SAFETY: `attr` is valid, and as long as the length says.
        unsafe { port(context, number, &mut attr, size_of::<ibv_port_attr>()) }?;
        *out = speed(attr.active_width, attr.active_speed);
        Ok(())
    }

    /// `ibv_query_gid(3)`
    fn ibv_query_gid(
        raw: *mut ibv_context,
        port: u8,
        index: c_int,
        out: *mut ibv_gid,
    ) -> IntMinusOne {
        // SAFETY: the program passes a context, and null or a valid pointer.
        let (context, out) = unsafe { (context(raw)?, out.as_mut().ok_or(Errno::EINVAL)?) };
        let index = u32::try_from(index).map_err(|_| Errno::EINVAL)?;
        *out = gid(context, port.into(), index)?.gid;
        Ok(0)
    }

    /// `ibv_query_gid_ex(3)`
    fn _ibv_query_gid_ex(
        raw: *mut ibv_context,
        port: u32,
        index: u32,
        out: *mut ibv_gid_entry,
        flags: u32,
        room: usize,
    ) -> IntErrno {
        // SAFETY: the program passes a context.
        let context = unsafe { context(raw) }?;
        if out.is_null() {
            return Err(Errno::EINVAL);
        }
        if flags != 0 {
            return Err(Errno::EOPNOTSUPP);
        }
        // SAFETY: the program says that `out` is writable for `room` bytes.
        unsafe { copy_out(&gid(context, port, index)?, out.cast(), room) };
        Ok(())
    }

    /// `ibv_query_gid_table(3)`: how many rows were written, or a negative error number.
    fn _ibv_query_gid_table(
        raw: *mut ibv_context,
        out: *mut ibv_gid_entry,
        max: usize,
        flags: u32,
        stride: usize,
    ) -> Rows {
        // SAFETY: the program passes a context, and room for `max` rows of `stride` bytes.
        unsafe { gid_table(raw, out.cast(), max, flags, stride) }
    }

    /// The private `ibv_query_gid_type`, which perftest asks.
    fn ibv_query_gid_type(
        raw: *mut ibv_context,
        port: u8,
        index: u32,
        out: *mut u32,
    ) -> IntMinusOne {
        // SAFETY: the program passes a context, and null or a valid pointer.
        let (context, out) = unsafe { (context(raw)?, out.as_mut().ok_or(Errno::EINVAL)?) };
        *out = match gid(context, port.into(), index)?.gid_type {
            IBV_GID_TYPE_ROCE_V2 => IBV_GID_TYPE_SYSFS_ROCE_V2,
            _ => IBV_GID_TYPE_SYSFS_IB_ROCE_V1,
        };
        Ok(0)
    }

    /// `ibv_query_pkey(3)`: big endian.
    fn ibv_query_pkey(
        raw: *mut ibv_context,
        port: u8,
        index: c_int,
        out: *mut u16,
    ) -> IntMinusOne {
        // SAFETY: the program passes a context, and null or a valid pointer.
        let (_, out) = unsafe { (context(raw)?, out.as_mut().ok_or(Errno::EINVAL)?) };
        if port != 1 || index != 0 {
            return Err(Errno::EINVAL);
        }
        *out = DEFAULT_PKEY.to_be();
        Ok(0)
    }

    /// `ibv_get_pkey_index(3)`: takes it big endian.
    fn ibv_get_pkey_index(raw: *mut ibv_context, port: u8, pkey: u16) -> IntMinusOne {
        // SAFETY: the program passes a context.
        unsafe { context(raw) }?;
        if port == 1 && pkey == DEFAULT_PKEY.to_be() { Ok(0) } else { Err(Errno::EINVAL) }
    }

    /// `ibv_query_rt_values_ex(3)`: the clock that completions are stamped with, of which one tick is
    /// a nanosecond.
    fn query_rt_values(raw: *mut ibv_context, values: *mut ibv_values_ex) -> IntErrno {
        // SAFETY: the program passes a context, and null or a valid pointer.
        let (context, values) = unsafe { (context(raw)?, values.as_mut().ok_or(Errno::EINVAL)?) };
        if values.comp_mask & !IBV_VALUES_MASK_RAW_CLOCK != 0 {
            return Err(Errno::EOPNOTSUPP);
        }
        if values.comp_mask & IBV_VALUES_MASK_RAW_CLOCK != 0 {
            // As providers do: nanoseconds alone hold all the ticks.
            let ticks = clock(context)?;
            values.raw_clock = libc::timespec { tv_sec: 0, tv_nsec: ticks as libc::c_long };
        }
        Ok(())
    }
}

/// The clock of the device, in nanoseconds.
pub(crate) fn clock(context: &Context) -> Result<u64, Errno> {
    let mut now = 0;
    // SAFETY: `now` is valid for the call.
    check(unsafe { (context.api.read_clock)(context.handle, &mut now) })?;
    Ok(now)
}

/// # Safety
///
/// `out` is null or writable for `max` rows of `stride` bytes.
unsafe fn gid_table(
    raw: *mut ibv_context,
    out: *mut u8,
    max: usize,
    flags: u32,
    stride: usize,
) -> Result<ssize_t, Errno> {
    // SAFETY: the program passes a context.
    let context = unsafe { context(raw) }?;
    if flags != 0 {
        return Err(Errno::EOPNOTSUPP);
    }
    if out.is_null() || stride < size_of::<ibv_gid>() {
        return Err(Errno::EINVAL);
    }
    let mut written = 0;
    for number in 1..=context.opened.attributes.orig_attr.phys_port_cnt {
        let mut attr = ibv_port_attr::blank();
        // SAFETY: `attr` is valid, and as long as the length says.
        unsafe { port(context, number, &mut attr, size_of::<ibv_port_attr>()) }?;
        for index in 0..u32::try_from(attr.gid_tbl_len).unwrap_or(0) {
            if written == max {
                // The manual page: EINVAL if the table has more rows than there is room for.
                return Err(Errno::EINVAL);
            }
            let entry = gid(context, number.into(), index)?;
            // SAFETY: `written` is below `max`, so the row is within what the caller promises.
            unsafe { copy_out(&entry, out.add(written * stride), stride) };
            written += 1;
        }
    }
    Ok(written as ssize_t)
}

/// The speed of a link in units of 100 Mb/s, by its width and the speed of one lane (PortInfo
/// LinkWidthActive and LinkSpeedActive, LinkSpeedExtActive).
fn speed(width: u8, lane: u8) -> u64 {
    let lanes = match width {
        1 => 1,
        2 => 4,
        4 => 8,
        8 => 12,
        16 => 2,
        _ => return 0,
    };
    let lane = match lane {
        1 => 25,
        2 => 50,
        4 | 8 => 100,
        16 => 140,
        32 => 250,
        64 => 500,
        128 => 1000,
        _ => return 0,
    };
    lanes * lane
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shorter_form_is_cut_and_a_longer_one_is_cleared() {
        let mut short = [7u8; 4];
        let mut long = [7u8; 12];
        // SAFETY: both arrays are as long as is said.
        unsafe {
            copy_out(&0x0102_0304_0506_0708u64.to_be(), short.as_mut_ptr(), 4);
            copy_out(&0x0102_0304_0506_0708u64.to_be(), long.as_mut_ptr(), 12);
        }
        assert_eq!(short, [1, 2, 3, 4]);
        assert_eq!(long, [1, 2, 3, 4, 5, 6, 7, 8, 0, 0, 0, 0]);
    }

    #[test]
    fn speeds_are_width_times_lane() {
        assert_eq!(speed(2, 32), 1000); // 4X EDR: 100 Gb/s
        assert_eq!(speed(2, 128), 4000); // 4X NDR: 400 Gb/s
        assert_eq!(speed(3, 1), 0);
    }
}
