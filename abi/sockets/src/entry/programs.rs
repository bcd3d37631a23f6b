//! Starting programs, and ending.

use std::arch::naked_asm;

use libc::{c_char, c_int, pid_t};

use crate::fork;
use crate::real::real;

/// Defines functions that turn this process into another program.
macro_rules! exec_like {
    ($($name:ident($($arg:ident: $ty:ty),*);)*) => {$(
        #[unsafe(no_mangle)]
        unsafe extern "C-unwind" fn $name($($arg: $ty),*) -> c_int {
            let undo = fork::becomes_a_program();
            let result = real!($name($($arg => $ty),*) -> c_int);
            undo();
            result
        }
    )*};
}

exec_like! {
    execve(path: *const c_char, args: *const *const c_char, env: *const *const c_char);
    execv(path: *const c_char, args: *const *const c_char);
    execvp(file: *const c_char, args: *const *const c_char);
    execvpe(file: *const c_char, args: *const *const c_char, env: *const *const c_char);
    fexecve(fd: c_int, args: *const *const c_char, env: *const *const c_char);
    execveat(dir: c_int, path: *const c_char, args: *const *const c_char,
        env: *const *const c_char, flags: c_int);
}

/// Defines functions that start another program with this one's descriptors.
macro_rules! spawn_like {
    ($($name:ident($($arg:ident: $ty:ty),*) -> $ret:ty;)*) => {$(
        #[unsafe(no_mangle)]
        unsafe extern "C-unwind" fn $name($($arg: $ty),*) -> $ret {
            fork::descriptors_are_inherited();
            real!($name($($arg => $ty),*) -> $ret)
        }
    )*};
}

/// What posix_spawn(3) takes of which this library needs to know nothing.
type Opaque = *const libc::c_void;

spawn_like! {
    posix_spawn(pid: *mut pid_t, path: *const c_char, actions: Opaque, attributes: Opaque,
        args: *const *mut c_char, env: *const *mut c_char) -> c_int;
    posix_spawnp(pid: *mut pid_t, file: *const c_char, actions: Opaque, attributes: Opaque,
        args: *const *mut c_char, env: *const *mut c_char) -> c_int;
    system(command: *const c_char) -> c_int;
    popen(command: *const c_char, mode: *const c_char) -> isize;
}

/// Before a function whose arguments are a list: prepares, and gives the real function's address.
extern "C" fn before_execl() -> usize {
    prepare_list(c"execl")
}
extern "C" fn before_execlp() -> usize {
    prepare_list(c"execlp")
}
extern "C" fn before_execle() -> usize {
    prepare_list(c"execle")
}

fn prepare_list(name: &std::ffi::CStr) -> usize {
    // If the program cannot be started, the sockets stay with the kernel.
    let _undo = fork::becomes_a_program();
    // SAFETY: a zero-terminated name; RTLD_NEXT is the library after this one.
    unsafe { libc::dlsym(libc::RTLD_NEXT, name.as_ptr()) }.expose_provenance()
}

/// Defines functions with a list of arguments: they call a function of this library, and jump to the
/// real one with all registers and the stack as they were.
macro_rules! list_like {
    ($($name:ident $before:ident;)*) => {$(
        #[unsafe(no_mangle)]
        #[unsafe(naked)]
        unsafe extern "C" fn $name() {
            #[cfg(target_arch = "x86_64")]
            naked_asm!(
                "push rdi", "push rsi", "push rdx", "push rcx", "push r8", "push r9", "push rax",
                "call {before}",
                "mov r11, rax",
                "pop rax", "pop r9", "pop r8", "pop rcx", "pop rdx", "pop rsi", "pop rdi",
                "jmp r11",
                before = sym $before,
            );
            #[cfg(target_arch = "aarch64")]
            naked_asm!(
                "stp x29, x30, [sp, #-80]!",
                "stp x0, x1, [sp, #16]", "stp x2, x3, [sp, #32]",
                "stp x4, x5, [sp, #48]", "stp x6, x7, [sp, #64]",
                "bl {before}",
                "mov x16, x0",
                "ldp x0, x1, [sp, #16]", "ldp x2, x3, [sp, #32]",
                "ldp x4, x5, [sp, #48]", "ldp x6, x7, [sp, #64]",
                "ldp x29, x30, [sp], #80",
                "br x16",
                before = sym $before,
            );
        }
    )*};
}

list_like! {
    execl before_execl;
    execlp before_execlp;
    execle before_execle;
}

/// Defines functions that end the process at once.
macro_rules! exit_like {
    ($($name:ident)*) => {$(
        #[unsafe(no_mangle)]
        unsafe extern "C-unwind" fn $name(status: c_int) -> ! {
            fork::ends();
            real!($name(status => c_int) -> c_int);
            std::process::abort()
        }
    )*};
}
exit_like! { _exit _Exit }

#[used]
#[unsafe(link_section = ".fini_array")]
static ENDS: extern "C" fn() = at_end;

extern "C" fn at_end() {
    fork::ends();
}
