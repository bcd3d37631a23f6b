//! Whether the kernel lets two processes into each other's memory.

use std::io;

use libc::{iovec, pid_t};

use super::handshake::EngineName;
use super::peer_memory::Way;

/// A secret number, by which whoever can read it proves its access.
pub(crate) type Number = [u8; 16];

/// What a proof begins with: no other bytes of whatever process are ever passed on to a peer.
const TAG: [u8; 8] = *b"QP-PROOF";
const PROOF_BYTES: usize = 40;

/// What an engine keeps at a fixed address for peers to read: a tag, its name, a secret number.
pub(crate) struct Proof {
    bytes: Box<[u8; PROOF_BYTES]>,
    number: Number,
}

impl Proof {
    /// The proof of an engine.
    pub(crate) fn new(engine: &EngineName, number: Number) -> Self {
        let mut bytes = Box::new([0; PROOF_BYTES]);
        bytes[..8].copy_from_slice(&TAG);
        bytes[8..24].copy_from_slice(engine);
        bytes[24..].copy_from_slice(&number);
        Self { bytes, number }
    }

    /// Where it is.
    pub(crate) fn addr(&self) -> u64 {
        self.bytes.as_ptr().expose_provenance() as u64
    }

    /// Whether somebody has read it.
    pub(crate) fn is(&self, number: &Number) -> bool {
        self.number == *number
    }
}

/// Why another process's memory is out of reach.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Obstacle {
    /// The system call itself is forbidden or missing.
    #[error("process_vm_readv fails even on this process itself ({0}): a sandbox forbids it")]
    Forbidden(io::Error),
    /// The peer lives in a PID namespace where it has no number here.
    #[error("the peer is in another PID namespace")]
    Namespace,
    /// The kernel refuses this peer.
    #[error("the kernel refuses access ({error}; Yama ptrace_scope is {scope})")]
    Refused {
        /// Its answer.
        error: io::Error,
        /// The setting of Yama, or "absent".
        scope: String,
    },
    /// The peer wants nobody in its memory.
    #[error("the peer does not allow it")]
    Unwanted,
    /// What was read is not the peer's proof.
    #[error("another process has the peer's process number")]
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

/// Reads the number in the proof of `engine`, which is at `addr` in `pid` if that is the peer and lets
/// us in. Reading and writing ask for the same permission (process_vm_readv(2),
/// PTRACE_MODE_ATTACH_REALCREDS).
pub(crate) fn on_peer(pid: pid_t, addr: u64, engine: &EngineName) -> Result<Number, Obstacle> {
    if addr == 0 {
        return Err(Obstacle::Unwanted);
    }
    if pid <= 0 {
        return Err(Obstacle::Namespace);
    }
    on_oneself()?;
    match read::<PROOF_BYTES>(pid, addr) {
        Ok(found) if found[..8] == TAG && found[8..24] == engine[..] => {
            let mut number = Number::default();
            number.copy_from_slice(&found[24..]);
            Ok(number)
        }
        Ok(_) => Err(Obstacle::Stranger),
        Err(error) if error.raw_os_error() == Some(libc::EFAULT) => Err(Obstacle::Stranger),
        Err(error) => Err(Obstacle::Refused { error, scope: yama_scope() }),
    }
}

/// The setting of the Yama security module: 0 lets processes of one user into each other's memory,
/// 1 only into that of descendants, 2 only administrators, 3 nobody.
pub(crate) fn yama_scope() -> String {
    let scope = crate::sys::read_text("/proc/sys/kernel/yama/ptrace_scope");
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
        let engine = [7; 16];
        let proof = Proof::new(&engine, [9; 16]);
        let pid = std::process::id() as pid_t;
        let number = on_peer(pid, proof.addr(), &engine).unwrap();
        assert!(proof.is(&number) && !proof.is(&[8; 16]));
        assert!(matches!(on_peer(pid, proof.addr(), &[8; 16]), Err(Obstacle::Stranger)));
        assert!(matches!(on_peer(pid, proof.addr() + 1, &engine), Err(Obstacle::Stranger)));
        assert!(matches!(on_peer(pid, 16, &engine), Err(Obstacle::Stranger)));
        assert!(matches!(on_peer(pid, 0, &engine), Err(Obstacle::Unwanted)));
        assert!(matches!(on_peer(0, proof.addr(), &engine), Err(Obstacle::Namespace)));
    }
}
