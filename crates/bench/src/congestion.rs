//! The same congestion control for all contenders.
//!
//! Where the system's default is BBR, Quipu's sockets ask for another: on the loopback interface BBR is often
//! several times slower. Peers take what is the default, and would be measured with something else. So then
//! the whole benchmark moves to a network namespace that has another default.

use std::io;
use std::os::fd::AsRawFd;

use anyhow::{Context, Result};
use quipu_host::Config;

use crate::{qpip, sys};

/// What sockets get that ask for nothing.
pub(crate) fn default() -> String {
    let name = std::fs::read_to_string("/proc/sys/net/ipv4/tcp_congestion_control");
    name.unwrap_or_default().trim().to_owned()
}

/// Whether Quipu's sockets ask for another, as `Config::congestion` says.
fn is_replaced() -> bool {
    default().starts_with("bbr")
}

/// Sees to it that all contenders get the same. To be called while there is one thread. A word about what was
/// done, or could not be.
///
/// # Errors
///
/// This process has lost its network.
pub(crate) fn level() -> Result<Option<String>> {
    if !is_replaced() {
        return Ok(None);
    }
    let was = default();
    let moved = match (sys::find_program("ip"), Config::from_env().ok().and_then(|c| c.address)) {
        // Only the loopback interface would be there.
        (_, Some(address)) if !address.ip.is_loopback() => Err(anyhow::anyhow!(
            "QUIPU_ADDRESS is {address}, which no network namespace would have"
        )),
        (None, _) => Err(anyhow::anyhow!("there is no `ip`; Debian has it in iproute2")),
        _ => sys::own_network_namespace().context("making a network namespace"),
    };
    match moved {
        Ok(root) => {
            root.context("becoming root in a network namespace of its own")?;
            qpip::settle().context("in a network namespace of its own")?;
            Ok(Some(format!(
                "All was measured in a network namespace, where sockets have {}: of the system's default, {was}, \
                 Quipu's sockets would have made another, and those of others not.",
                default()
            )))
        }
        Err(error) => Ok(Some(format!(
            "Sockets of UCX, libfabric and Open MPI have {was}, those of Quipu and the raw socket CUBIC or Reno, \
             which is faster here: {error:#}"
        ))),
    }
}

/// Has a socket that is not connected yet ask for what Quipu's ask for: who begins with BBR stays paced.
pub(crate) fn ask(socket: &impl AsRawFd) -> io::Result<()> {
    match is_replaced() {
        true => {
            sys::set_congestion(socket, "cubic").or_else(|_| sys::set_congestion(socket, "reno"))
        }
        false => Ok(()),
    }
}
