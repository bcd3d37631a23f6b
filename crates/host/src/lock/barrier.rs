//! What a leaning lock needs of the machine and the kernel: who a thread is, and a barrier on all processors.

use std::sync::OnceLock;

/// A number that no other living thread of this process has, and that is not 0.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
pub(super) fn thread() -> usize {
    let pointer;
    // SAFETY: the first word of a thread's own block is the address of that block, by the ABI of thread-local
    // storage on this processor ("ELF Handling For Thread-Local Storage", 3.4.6). It never changes.
    unsafe {
        core::arch::asm!("mov {}, fs:0", out(reg) pointer, options(pure, nomem, nostack, preserves_flags));
    }
    pointer
}

/// A number that no other living thread of this process has, and that is not 0.
#[cfg(target_arch = "aarch64")]
#[inline(always)]
pub(super) fn thread() -> usize {
    let pointer;
    // SAFETY: the register of the thread's own block, which never changes.
    unsafe {
        core::arch::asm!("mrs {}, tpidr_el0", out(reg) pointer, options(pure, nomem, nostack, preserves_flags));
    }
    pointer
}

/// A number that no other living thread of this process has, and that is not 0.
#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
#[inline]
pub(super) fn thread() -> usize {
    // SAFETY: takes nothing, and cannot fail.
    unsafe { libc::pthread_self() as usize }
}

/// Whether the kernel will have [`everywhere`] for this process (`membarrier(2)`, Linux 4.14).
pub(super) fn register() -> bool {
    static REGISTERED: OnceLock<bool> = OnceLock::new();
    *REGISTERED.get_or_init(|| membarrier(libc::MEMBARRIER_CMD_REGISTER_PRIVATE_EXPEDITED))
}

/// A full barrier on each processor that runs a thread of this process, where its program is at that moment.
pub(super) fn everywhere() {
    // After `register` the kernel has no reason to refuse.
    assert!(membarrier(libc::MEMBARRIER_CMD_PRIVATE_EXPEDITED), "membarrier was promised");
}

fn membarrier(command: libc::c_int) -> bool {
    // SAFETY: takes no pointer.
    unsafe { libc::syscall(libc::SYS_membarrier, command, 0, 0) == 0 }
}
