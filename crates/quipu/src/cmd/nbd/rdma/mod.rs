//! NBD over reliable connected queue pairs (`specs/nbd-queue-pairs.md`).

mod client;
mod disk;
mod memory;
mod moves;
mod server;
mod session;

use std::net::{SocketAddr, ToSocketAddrs};
use std::sync::Mutex;

use quipu::{Device, Error, ProtectionDomain};
use quipu_nbd::messages::Terms;

pub(super) use client::{Data, Link};
pub(super) use disk::Registered;
pub(super) use server::{Door, serve};
pub(super) use session::Session;

/// What both ends say: data of a block of most file systems still lie in the message.
const TERMS: Terms = Terms { credits: 32, inline: 4096 };

static DEVICE: Mutex<Option<Device>> = Mutex::new(None);

/// Opens the adapter, once for the process.
fn device() -> Result<Device, Error> {
    let mut device = DEVICE.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    if device.is_none() {
        *device = Some(Device::from_env()?);
    }
    Ok(device.clone().expect("opened above"))
}

/// The protection domain of a server: of its disk, and of its clients' queue pairs. Peers have no right to
/// any of its memory.
pub(super) fn server_domain() -> Result<ProtectionDomain, Error> {
    static DOMAIN: Mutex<Option<ProtectionDomain>> = Mutex::new(None);
    let mut found = DOMAIN.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    if found.is_none() {
        *found = Some(domain()?);
    }
    Ok(found.clone().expect("made above"))
}

/// A new protection domain of the adapter.
pub(super) fn domain() -> Result<ProtectionDomain, Error> {
    device()?.protection_domain()
}

/// The adapter, if it is open.
pub(super) fn opened() -> Option<Device> {
    DEVICE.lock().unwrap_or_else(std::sync::PoisonError::into_inner).clone()
}

/// The address of a host by its name.
fn resolve((host, port): (&str, u16)) -> std::io::Result<SocketAddr> {
    (host, port).to_socket_addrs()?.next().ok_or_else(|| {
        std::io::Error::new(std::io::ErrorKind::NotFound, format!("{host} has no address"))
    })
}
