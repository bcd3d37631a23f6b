//! Starting programs, and ending.

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

quipu_cabi::jump_after! {
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
