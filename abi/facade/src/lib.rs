//! Finding the engine, and what its statuses mean to C: the part that both drop-in libraries share.
//!
//! The engine is loaded when a program first asks for something, from the folder that the library
//! itself lies in, rather than named in DT_NEEDED: cargo cannot order one cdylib behind another at
//! link time, and a program that merely links libibverbs and never calls it (mpirun, for one) then
//! pays nothing. librdmacm finds the same file, hence the same engine.

use std::io::Write;
use std::sync::OnceLock;

use libc::c_void;
use quipu_abi_types::{
    ENGINE_API_SYMBOL, ENGINE_API_VERSION, ENGINE_FILE_NAME, EngineApi, EngineApiFn, EngineStatus,
};
use quipu_cabi::{Errno, symbol_beside};

static ENGINE: OnceLock<Option<&'static EngineApi>> = OnceLock::new();

/// The engine's table.
///
/// # Errors
///
/// ENODEV where it cannot be loaded; why was written to standard error, once.
pub fn engine() -> Result<&'static EngineApi, Errno> {
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

/// Puts a table in place of the real engine, for tests. The first call of a process wins.
pub fn use_engine(api: &'static EngineApi) {
    let _ = ENGINE.set(Some(api));
}

fn load() -> Result<&'static EngineApi, String> {
    let entry = symbol_beside((&raw const ENGINE).cast(), ENGINE_FILE_NAME, ENGINE_API_SYMBOL)?;
    // SAFETY: the engine exports this symbol with this type (`quipu_abi_types`), and the table that
    // it returns "lives as long as the process".
    let api = unsafe { std::mem::transmute::<*mut c_void, EngineApiFn>(entry)().as_ref() };
    let api = api.ok_or_else(|| format!("{ENGINE_FILE_NAME} returned no interface"))?;
    if !api.is_of_this_build() {
        return Err(format!(
            "{ENGINE_FILE_NAME} has interface version {}, {} bytes, but this library needs \
             {ENGINE_API_VERSION}: use both from the same build",
            api.version, api.size
        ));
    }
    Ok(api)
}

/// Turns a status of the engine into a result.
///
/// # Errors
///
/// What [`errno_of`] makes of every status but Ok.
#[inline]
pub fn check(status: i32) -> Result<(), Errno> {
    if status == EngineStatus::Ok.code() { Ok(()) } else { Err(errno_of(status)) }
}

/// The error number that stands for a status.
#[cold]
pub fn errno_of(status: i32) -> Errno {
    use EngineStatus as S;
    const TABLE: [(EngineStatus, Errno); 24] = [
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
        (S::AddressInUse, Errno::EADDRINUSE),
        (S::Connected, Errno::EISCONN),
        (S::NotConnected, Errno::ENOTCONN),
        (S::WaitOn, Errno::ERESTART),
        (S::Denied, Errno::EACCES),
        (S::NoSuchFamily, Errno::EAFNOSUPPORT),
        (S::BadDescriptor, Errno(libc::EBADF)),
    ];
    TABLE.iter().find(|(known, _)| known.code() == status).map_or(Errno::EIO, |(_, errno)| *errno)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_status_has_its_errno() {
        assert_eq!(check(0), Ok(()));
        assert_eq!(check(EngineStatus::QueueFull.code()), Err(Errno::ENOMEM));
        assert_eq!(check(EngineStatus::AddressNotAvailable.code()), Err(Errno::EADDRNOTAVAIL));
        assert_eq!(check(1000), Err(Errno::EIO));
    }
}
