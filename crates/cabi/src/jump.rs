//! C functions in front of others that take a list of arguments.

/// Defines C functions `$name`: each calls `$before`, a function of C that takes at most the first argument
/// and returns an address, and jumps there with all registers and the stack as they were.
#[macro_export]
macro_rules! jump_after {
    ($($name:ident $before:ident;)*) => {$(
        #[unsafe(no_mangle)]
        #[unsafe(naked)]
        unsafe extern "C" fn $name() {
            #[cfg(target_arch = "x86_64")]
            ::core::arch::naked_asm!(
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
            ::core::arch::naked_asm!(
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

/// Defines dprintf(3) and its kin: each calls `$before` with the descriptor, and jumps to the real function,
/// whose address `$address!(name)` is.
#[macro_export]
macro_rules! dprintf_after {
    ($before:path, $address:ident) => {
        $crate::dprintf_after! {
            $before, $address,
            dprintf before_dprintf;
            vdprintf before_vdprintf;
            __dprintf_chk before_dprintf_chk;
            __vdprintf_chk before_vdprintf_chk;
        }
    };
    ($before:path, $address:ident, $($name:ident $own:ident;)*) => {
        $(extern "C" fn $own(fd: ::core::ffi::c_int) -> usize {
            $before(fd);
            $address!($name).expose_provenance()
        })*

        $crate::jump_after! { $($name $own;)* }
    };
}
