//! Finding the engine, and what its statuses mean to C.
//!
//! The engine is loaded when a program first asks for something, from the folder that this library
//! itself lies in, rather than named in DT_NEEDED: cargo cannot order one cdylib behind another at
//! link time, and a program that merely links libibverbs and never calls it (mpirun, for one) then
//! pays nothing. librdmacm finds the same file, hence the same engine.

use std::ffi::{CStr, CString, OsStr};
use std::io::Write;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use libc::c_void;
use quipu_abi_types::{
    ENGINE_API_SYMBOL, ENGINE_API_VERSION, ENGINE_FILE_NAME, EngineApi, EngineApiFn, EngineStatus,
};
use quipu_cabi::Errno;

static ENGINE: OnceLock<Option<&'static EngineApi>> = OnceLock::new();

/// The engine's table.
///
/// # Errors
///
/// ENODEV where it cannot be loaded; why was written to standard error, once.
pub(crate) fn engine() -> Result<&'static EngineApi, Errno> {
    ENGINE
        .get_or_init(|| {
            load()
                .inspect_err(|why| {
                    let _ = writeln!(std::io::stderr(), "quipu: no RDMA device: {why}");
                })
                .ok()
        })
        .ok_or(Errno::ENODEV)
}

/// Puts a table in place of the real engine. The first call of a process wins.
#[cfg(test)]
pub(crate) fn use_engine(api: &'static EngineApi) {
    let _ = ENGINE.set(Some(api));
}

fn load() -> Result<&'static EngineApi, String> {
    let file = match own_folder() {
        Some(folder) => folder.join(ENGINE_FILE_NAME),
        None => PathBuf::from(ENGINE_FILE_NAME),
    };
    let path = CString::new(file.as_os_str().as_bytes()).map_err(|error| error.to_string())?;
    let symbol = CString::new(ENGINE_API_SYMBOL).map_err(|error| error.to_string())?;
    // SAFETY: dlopen(3) and dlsym(3) want zero-terminated strings, which these are. The library's
    // initialisers are the engine's own.
    let entry = unsafe {
        let library = libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL);
        if library.is_null() {
            return Err(loader_error());
        }
        libc::dlsym(library, symbol.as_ptr())
    };
    if entry.is_null() {
        return Err(loader_error());
    }
    // SAFETY: the engine exports this symbol with this type (`quipu_abi_types`), and the table that
    // it returns "lives as long as the process"; the library is never closed.
    let api = unsafe { std::mem::transmute::<*mut c_void, EngineApiFn>(entry)().as_ref() };
    let api = api.ok_or_else(|| format!("{} gave no interface", file.display()))?;
    if api.version != ENGINE_API_VERSION || api.size as usize != size_of::<EngineApi>() {
        return Err(format!(
            "{} has interface version {} where this library needs {ENGINE_API_VERSION}: \
             libibverbs and the engine must be of the same build",
            file.display(),
            api.version
        ));
    }
    Ok(api)
}

/// The folder that the loader took this library from.
fn own_folder() -> Option<PathBuf> {
    // SAFETY: an all-zero Dl_info is valid (null pointers); dladdr(3) fills it in.
    let mut info: libc::Dl_info = unsafe { std::mem::zeroed() };
    // SAFETY: any address may be asked about; `info` is valid for the call.
    let found = unsafe { libc::dladdr((&raw const ENGINE).cast(), &mut info) };
    if found == 0 || info.dli_fname.is_null() {
        return None;
    }
    // SAFETY: dladdr gives a zero-terminated path that lasts while the library is loaded.
    let path = unsafe { CStr::from_ptr(info.dli_fname) };
    Path::new(OsStr::from_bytes(path.to_bytes()))
        .parent()
        .map(Path::to_owned)
}

fn loader_error() -> String {
    // SAFETY: dlerror(3) returns null or a string that lasts until the next call of this thread.
    let text = unsafe {
        libc::dlerror()
            .cast_const()
            .as_ref()
            .map(|text| CStr::from_ptr(text))
    };
    text.map_or_else(
        || "the loader gives no reason".into(),
        |t| t.to_string_lossy().into_owned(),
    )
}

/// Turns a status of the engine into a result.
#[inline]
pub(crate) fn check(status: i32) -> Result<(), Errno> {
    if status == EngineStatus::Ok.code() {
        Ok(())
    } else {
        Err(errno_of(status))
    }
}

/// The error number that stands for a status.
#[cold]
pub(crate) fn errno_of(status: i32) -> Errno {
    use EngineStatus as S;
    const TABLE: [(EngineStatus, Errno); 17] = [
        (S::Invalid, Errno::EINVAL),
        (S::NoMemory, Errno::ENOMEM),
        (S::NotSupported, Errno::EOPNOTSUPP),
        (S::Busy, Errno::EBUSY),
        (S::WouldBlock, Errno::EAGAIN),
        (S::Interrupted, Errno::EINTR),
        (S::NoDevice, Errno::ENODEV),
        (S::NotPermitted, Errno::EPERM),
        (S::BadAddress, Errno::EFAULT),
        (S::NoDescriptor, Errno::EMFILE),
        (S::TimedOut, Errno::ETIMEDOUT),
        (S::Unreachable, Errno::EHOSTUNREACH),
        (S::Refused, Errno::ECONNREFUSED),
        (S::QueueFull, Errno::ENOMEM),
        (S::Internal, Errno::EIO),
        (S::NotFound, Errno::ENOENT),
        (S::AddressNotAvailable, Errno::EADDRNOTAVAIL),
    ];
    TABLE
        .iter()
        .find(|(known, _)| known.code() == status)
        .map_or(Errno::EIO, |(_, errno)| *errno)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_status_has_its_errno() {
        assert_eq!(check(0), Ok(()));
        assert_eq!(check(EngineStatus::QueueFull.code()), Err(Errno::ENOMEM));
        assert_eq!(
            check(EngineStatus::AddressNotAvailable.code()),
            Err(Errno::EADDRNOTAVAIL)
        );
        assert_eq!(check(1000), Err(Errno::EIO));
    }
}
