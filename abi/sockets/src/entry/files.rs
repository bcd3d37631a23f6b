//! Between files, pipes and sockets; stdio on a socket.

use std::arch::naked_asm;

use libc::{FILE, c_char, c_int, c_uint, off_t, ssize_t};
use quipu_sockets::report::Reason;

use crate::real::{real, real_address};
use crate::send::Plan;
use crate::{life, send, sys};

/// Defines sendfile and its twin.
macro_rules! sendfile_like {
    ($($name:ident $offset:ty;)*) => {$(
        #[unsafe(no_mangle)]
        unsafe extern "C-unwind" fn $name(
            to: c_int, from: c_int, offset: *mut $offset, count: usize,
        ) -> ssize_t {
            // SAFETY: the program passes a variable, or null for the file's own position.
            let at = unsafe { offset.as_ref() }.copied();
            let plan = send::plan_file(to, from, at, count);
            if let Plan::Done(done @ 1.., _) = plan {
                // SAFETY: only a plan with an offset has sent something.
                unsafe { *offset += done as $offset };
            }
            let before = match plan {
                Plan::Done(result, errno) => {
                    if result < 0 {
                        sys::set_errno(errno);
                    }
                    return result;
                }
                Plan::Kernel(_, before) => before,
                Plan::Pass => 0,
            };
            if before > 0 {
                // SAFETY: as above.
                unsafe { *offset += before as $offset };
            }
            let (count, errno) = (count - before, sys::errno());
            let sent = real!($name(to => c_int, from => c_int, offset => *mut $offset,
                count => usize) -> ssize_t);
            if before > 0 && sent < 0 {
                sys::set_errno(errno);
            }
            match plan {
                Plan::Kernel(conn, before) => send::finish(conn, before, sent),
                _ => sent,
            }
        }
    )*};
}

sendfile_like! {
    sendfile off_t;
    sendfile64 libc::off64_t;
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn splice(
    from: c_int,
    from_offset: *mut libc::loff_t,
    to: c_int,
    to_offset: *mut libc::loff_t,
    len: usize,
    flags: c_uint,
) -> ssize_t {
    life::plain_fd(from, Reason::Feature);
    if !send::leaves_to_kernel(to, 0, Reason::Feature) {
        return -1;
    }
    real!(splice(from => c_int, from_offset => *mut libc::loff_t, to => c_int,
        to_offset => *mut libc::loff_t, len => usize, flags => c_uint) -> ssize_t)
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn fdopen(fd: c_int, mode: *const c_char) -> *mut FILE {
    life::leave_to_stdio(fd);
    real!(fdopen(fd => c_int, mode => *const c_char) -> isize) as *mut FILE
}

/// Defines functions that print to a descriptor: they call a function of this library, and jump to the
/// real one with all registers and the stack as they were.
macro_rules! print_like {
    ($($name:ident $before:ident;)*) => {$(
        extern "C" fn $before(fd: c_int) -> usize {
            life::leave_to_stdio(fd);
            real_address!($name).expose_provenance()
        }

        #[unsafe(no_mangle)]
        #[unsafe(naked)]
        unsafe extern "C" fn $name() {
            #[cfg(target_arch = "x86_64")]
            naked_asm!(
                "push rdi", "push rsi", "push rdx", "push rcx", "push r8", "push r9", "push rax",
                "sub rsp, 128",
                "movaps [rsp], xmm0", "movaps [rsp + 16], xmm1",
                "movaps [rsp + 32], xmm2", "movaps [rsp + 48], xmm3",
                "movaps [rsp + 64], xmm4", "movaps [rsp + 80], xmm5",
                "movaps [rsp + 96], xmm6", "movaps [rsp + 112], xmm7",
                "call {before}",
                "mov r11, rax",
                "movaps xmm0, [rsp]", "movaps xmm1, [rsp + 16]",
                "movaps xmm2, [rsp + 32]", "movaps xmm3, [rsp + 48]",
                "movaps xmm4, [rsp + 64]", "movaps xmm5, [rsp + 80]",
                "movaps xmm6, [rsp + 96]", "movaps xmm7, [rsp + 112]",
                "add rsp, 128",
                "pop rax", "pop r9", "pop r8", "pop rcx", "pop rdx", "pop rsi", "pop rdi",
                "jmp r11",
                before = sym $before,
            );
            #[cfg(target_arch = "aarch64")]
            naked_asm!(
                "stp x29, x30, [sp, #-208]!",
                "stp x0, x1, [sp, #16]", "stp x2, x3, [sp, #32]",
                "stp x4, x5, [sp, #48]", "stp x6, x7, [sp, #64]",
                "stp q0, q1, [sp, #80]", "stp q2, q3, [sp, #112]",
                "stp q4, q5, [sp, #144]", "stp q6, q7, [sp, #176]",
                "bl {before}",
                "mov x16, x0",
                "ldp x0, x1, [sp, #16]", "ldp x2, x3, [sp, #32]",
                "ldp x4, x5, [sp, #48]", "ldp x6, x7, [sp, #64]",
                "ldp q0, q1, [sp, #80]", "ldp q2, q3, [sp, #112]",
                "ldp q4, q5, [sp, #144]", "ldp q6, q7, [sp, #176]",
                "ldp x29, x30, [sp], #208",
                "br x16",
                before = sym $before,
            );
        }
    )*};
}

print_like! {
    dprintf before_dprintf;
    vdprintf before_vdprintf;
    __dprintf_chk before_dprintf_chk;
    __vdprintf_chk before_vdprintf_chk;
}
