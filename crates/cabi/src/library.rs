use std::ffi::{CStr, CString, OsStr};
use std::iter;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;

use libc::{c_int, c_void};

/// Loads a shared library that lies in the same folder as the code or data at `own`, and looks a
/// symbol up in it. The library stays loaded for the life of the process; asking again is cheap and
/// finds the same one. It calls the system's sockets, also in a program whose own calls go to r* sockets.
///
/// # Errors
///
/// What the loader says.
pub fn symbol_beside(own: *const c_void, file: &str, symbol: &str) -> Result<*mut c_void, String> {
    let path = beside(own, file);
    let path = CString::new(path.as_os_str().as_bytes()).map_err(|error| error.to_string())?;
    let symbol = CString::new(symbol).map_err(|error| error.to_string())?;
    // SAFETY: dlopen(3) and dlsym(3) want zero-terminated strings, which these are. What the
    // library's initialisers do is its own matter.
    let found = unsafe {
        let library = libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL | scope());
        if library.is_null() {
            return Err(loader_error());
        }
        libc::dlsym(library, symbol.as_ptr())
    };
    if found.is_null() { Err(loader_error()) } else { Ok(found) }
}

/// What dlopen(3) is to do about a process in which librspreload makes r* sockets of sockets. Those are
/// Quipu's: an engine whose own socket became one would wait for itself. Others who put functions in front
/// of the C library's (allocators, sanitizers) want to be there for everybody.
fn scope() -> c_int {
    // SAFETY: dlsym(3) of a zero-terminated name.
    let socket = unsafe { libc::dlsym(libc::RTLD_DEFAULT, c"socket".as_ptr()) };
    let file = file_of(socket).and_then(|path| path.file_name().map(OsStr::to_owned));
    match file {
        Some(name) if name.as_bytes().starts_with(b"librspreload") => libc::RTLD_DEEPBIND,
        _ => 0,
    }
}

/// A file in the folder that an address was loaded from: by the name that the loader knows or, where that is
/// relative to a folder that the program may have left, or of a link, by the file's own name.
fn beside(own: *const c_void, file: &str) -> PathBuf {
    let named = file_of(own).filter(|path| path.is_absolute());
    // Only where the name does not lead there is the kernel asked.
    let mapped = iter::once_with(|| mapped_from(own)).flatten();
    let mut candidates = named.into_iter().chain(mapped).map(|path| path.with_file_name(file));
    let first = candidates.next().unwrap_or_else(|| PathBuf::from(file));
    if first.exists() { first } else { candidates.find(|path| path.exists()).unwrap_or(first) }
}

/// The file that an address is mapped from, as the kernel knows it.
fn mapped_from(address: *const c_void) -> Option<PathBuf> {
    let maps = std::fs::read("/proc/self/maps").ok()?;
    let mut lines = maps.split(|byte| *byte == b'\n');
    lines.find_map(|line| {
        let range = str::from_utf8(line.split(|byte| *byte == b' ').next()?).ok()?;
        let (start, end) = range.split_once('-')?;
        let number = |hex| usize::from_str_radix(hex, 16).ok();
        let path = line.iter().position(|byte| *byte == b'/')?;
        let is_here = (number(start)?..number(end)?).contains(&address.addr());
        is_here.then(|| PathBuf::from(OsStr::from_bytes(&line[path..])))
    })
}

/// The file that an address was loaded from, as the loader knows it.
fn file_of(address: *const c_void) -> Option<PathBuf> {
    // SAFETY: an all-zero Dl_info is valid (null pointers).
    let mut info: libc::Dl_info = unsafe { std::mem::zeroed() };
    // SAFETY: dladdr(3) takes any address; `info` is valid for the call.
    if unsafe { libc::dladdr(address, &mut info) } == 0 || info.dli_fname.is_null() {
        return None;
    }
    // SAFETY: dladdr gives a zero-terminated path that lasts while the file is loaded.
    let path = unsafe { CStr::from_ptr(info.dli_fname) };
    Some(PathBuf::from(OsStr::from_bytes(path.to_bytes())))
}

fn loader_error() -> String {
    // SAFETY: dlerror(3) returns null or a string that lasts until the next call of this thread.
    let text = unsafe { libc::dlerror().cast_const().as_ref().map(|text| CStr::from_ptr(text)) };
    text.map_or_else(|| "the loader gives no reason".into(), |t| t.to_string_lossy().into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_library_that_is_not_there_is_named_with_its_folder() {
        static HERE: u8 = 0;
        let error = symbol_beside((&raw const HERE).cast(), "libnot-there.so", "x").unwrap_err();
        assert!(error.contains("/libnot-there.so"), "{error}");
    }

    #[test]
    fn the_kernel_knows_the_file_too() {
        let own = libc::strlen as *const c_void;
        let [loaded, mapped] = [file_of(own), mapped_from(own)].map(Option::unwrap);
        assert_eq!(mapped, std::fs::canonicalize(loaded).unwrap());
        assert_eq!(mapped_from(std::ptr::null()), None);
    }

    #[test]
    fn a_symbol_is_found_beside_one_that_is_known() {
        // Any address of the C library stands for "own"; its folder holds the C library.
        let own = libc::strlen as *const c_void;
        assert!(symbol_beside(own, "libc.so.6", "strlen").is_ok());
        assert!(symbol_beside(own, "libc.so.6", "no_such_symbol").is_err());
    }
}
