//! Whether the kernel lets two processes into each other's memory.

use std::io;

use libc::{iovec, pid_t};

use super::peer_memory::Way;

/// Length of the random number that a peer must be able to read.
pub(crate) const NONCE_BYTES: usize = 16;

/// Why another process's memory is out of reach.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Obstacle {
    /// The system call itself is forbidden or missing.
    #[error("process_vm_readv does not work even on this very process ({0}): a sandbox forbids it")]
    Forbidden(io::Error),
    /// The peer lives in a PID namespace where it has no number here.
    #[error("the peer is in another PID namespace")]
    Namespace,
    /// The kernel refuses this peer.
    #[error("the kernel refuses ({error}; Yama ptrace_scope is {scope})")]
    Refused {
        /// Its answer.
        error: io::Error,
        /// The setting of Yama, or "absent".
        scope: String,
    },
    /// The number that was read is not the one that the peer announced.
    #[error("the process with the peer's number is not the peer")]
    Stranger,
}

/// Reads `N` bytes at `addr` in the process `pid`.
fn read<const N: usize>(pid: pid_t, addr: u64) -> io::Result<[u8; N]> {
    let mut bytes = [0u8; N];
    let here = iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: N };
    let there =
        iovec { iov_base: std::ptr::with_exposed_provenance_mut(addr as usize), iov_len: N };
    let moved = Way::Read.call(pid, &[here], &[there])?;
    if moved == N { Ok(bytes) } else { Err(io::ErrorKind::UnexpectedEof.into()) }
}

/// Whether the calls work at all: between two places of this process, both ways.
pub(crate) fn on_oneself() -> Result<(), Obstacle> {
    let pid = std::process::id() as pid_t;
    let mut source = *b"quipu reads this";
    let mut target = [0u8; 16];
    let piece = |bytes: &mut [u8; 16]| iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: 16 };
    let (from, to) = (piece(&mut source), piece(&mut target));
    Way::Read.call(pid, &[to], &[from]).map_err(Obstacle::Forbidden)?;
    Way::Write.call(pid, &[from], &[to]).map_err(Obstacle::Forbidden)?;
    Ok(())
}

/// Whether `pid` is the peer and lets us in: it must have `nonce` at `addr`. Reading and writing
/// ask for the same permission (process_vm_readv(2), PTRACE_MODE_ATTACH_REALCREDS).
pub(crate) fn on_peer(pid: pid_t, addr: u64, nonce: &[u8; NONCE_BYTES]) -> Result<(), Obstacle> {
    if pid <= 0 {
        return Err(Obstacle::Namespace);
    }
    on_oneself()?;
    match read::<NONCE_BYTES>(pid, addr) {
        Ok(found) if found == *nonce => Ok(()),
        Ok(_) => Err(Obstacle::Stranger),
        Err(error) if error.raw_os_error() == Some(libc::EFAULT) => Err(Obstacle::Stranger),
        Err(error) => Err(Obstacle::Refused { error, scope: yama_scope() }),
    }
}

/// The setting of the Yama security module: 0 lets processes of one user into each other's memory,
/// 1 only into that of descendants, 2 only administrators, 3 nobody.
pub(crate) fn yama_scope() -> String {
    let scope = std::fs::read_to_string("/proc/sys/kernel/yama/ptrace_scope");
    scope.map_or_else(|_| "absent".to_owned(), |scope| scope.trim().to_owned())
}

/// Declares that every process of this user may access this one's memory, where Yama asks for that.
pub(crate) fn allow_everyone() {
    // SAFETY: takes integers only. Without Yama it fails, and is not needed.
    unsafe { libc::prctl(libc::PR_SET_PTRACER, libc::PR_SET_PTRACER_ANY, 0, 0, 0) };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tells_the_peer_from_a_stranger() {
        let nonce = Box::new([7u8; NONCE_BYTES]);
        let addr = nonce.as_ptr().expose_provenance() as u64;
        let pid = std::process::id() as pid_t;
        on_peer(pid, addr, &nonce).unwrap();
        assert!(matches!(on_peer(pid, addr, &[8; 16]), Err(Obstacle::Stranger)));
        assert!(matches!(on_peer(pid, 16, &nonce), Err(Obstacle::Stranger)));
        assert!(matches!(on_peer(0, addr, &nonce), Err(Obstacle::Namespace)));
    }
}
