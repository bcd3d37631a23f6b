//! Files that programs read by way of the library.

use std::ffi::{CStr, OsStr};
use std::fs::File;
use std::io::Read;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use libc::{c_char, c_int};
use quipu_abi_trace::entry;
use quipu_abi_types::ibv_device;
use quipu_cabi::{Errno, IntMinusOne, Null};

use crate::device::device;

/// Reads a small file of a folder as the C library does: without the newline at its end, cut to
/// `room` bytes, and closed by a zero where there is room for one. Returns its length.
///
/// # Safety
///
/// Both names are zero-terminated; `out` is writable for `room` bytes.
unsafe fn read(
    folder: *const c_char,
    file: *const c_char,
    out: *mut c_char,
    room: usize,
) -> Result<c_int, Errno> {
    if folder.is_null() || file.is_null() || out.is_null() {
        return Err(Errno::EINVAL);
    }
    // SAFETY: not null, so zero-terminated.
    let (folder, file) = unsafe { (CStr::from_ptr(folder), CStr::from_ptr(file)) };
    let path = Path::new(OsStr::from_bytes(folder.to_bytes())).join(
        OsStr::from_bytes(file.to_bytes()).to_str().ok_or(Errno::EINVAL)?.trim_start_matches('/'),
    );
    let failed = |error: std::io::Error| Errno(error.raw_os_error().unwrap_or(libc::EIO));
    let mut text = Vec::new();
    File::open(path).map_err(failed)?.take(room as u64).read_to_end(&mut text).map_err(failed)?;
    if text.last() == Some(&b'\n') {
        text.pop();
    }
    // SAFETY: `text` was cut to `room`; the zero is written only where it is below `room`.
    unsafe {
        std::ptr::copy_nonoverlapping(text.as_ptr(), out.cast(), text.len());
        if text.len() < room {
            *out.add(text.len()) = 0;
        }
    }
    Ok(text.len() as c_int)
}

entry! {
    /// The folder below which `class/infiniband` is.
    fn ibv_get_sysfs_path() -> Null<c_char> { Ok(c"/sys".as_ptr().cast_mut()) }

    /// Reads a file of a folder.
    fn ibv_read_sysfs_file(
        folder: *const c_char,
        file: *const c_char,
        out: *mut c_char,
        room: usize,
    ) -> IntMinusOne {
        // SAFETY: the program passes strings, and room for `room` bytes.
        unsafe { read(folder, file, out, room) }
    }

    /// Reads a file of a device's folder; the name is not a format with arguments here.
    fn ibv_read_ibdev_sysfs_file(
        out: *mut c_char,
        room: usize,
        raw: *mut ibv_device,
        file: *const c_char,
    ) -> IntMinusOne {
        // SAFETY: the program passes a device, a string, and room for `room` bytes.
        unsafe {
            let device = device(raw)?.public();
            read((&raw const (*device).device.ibdev_path).cast(), file, out, room)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_read_without_its_newline_and_cut_to_the_room() {
        let folder = std::env::temp_dir().join(format!("quipu-sysfs-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        std::fs::write(folder.join("node"), "CA: 1\n").unwrap();
        let path = std::ffi::CString::new(folder.as_os_str().as_bytes()).unwrap();
        let mut out = [9 as c_char; 8];
        // SAFETY: zero-terminated strings, and an array as long as is said.
        unsafe {
            assert_eq!(read(path.as_ptr(), c"node".as_ptr(), out.as_mut_ptr(), 8), Ok(5));
            assert_eq!(CStr::from_ptr(out.as_ptr()), c"CA: 1");
            assert_eq!(read(path.as_ptr(), c"node".as_ptr(), out.as_mut_ptr(), 2), Ok(2));
            assert!(read(path.as_ptr(), c"gone".as_ptr(), out.as_mut_ptr(), 8).is_err());
        }
        std::fs::remove_dir_all(folder).unwrap();
    }
}
