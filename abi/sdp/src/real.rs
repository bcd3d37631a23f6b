//! The functions that this library stands in front of.

use std::ffi::CStr;
use std::ptr;
use std::sync::atomic::{AtomicPtr, Ordering};

use libc::{
    FILE, c_char, c_int, c_uint, c_ulong, c_void, fd_set, iovec, mmsghdr, msghdr, nfds_t, off_t,
    pid_t, pollfd, sigset_t, sockaddr, socklen_t, ssize_t, timespec, timeval,
};

/// Arguments, or the environment, of a program.
type List = *const *const c_char;

/// Defines the functions: each calls the next library's function of that name, which is looked up once. Of
/// those after `@`, which take lists of arguments, there are only the addresses.
macro_rules! reals {
    ($($name:ident($($arg:ident: $ty:ty),*) -> $ret:ty;)* $(@ $list:ident;)*) => {
        #[allow(non_camel_case_types)]
        #[derive(Clone, Copy)]
        pub(crate) enum Index { $($name,)* $($list),* }

        const NAMES: &[&CStr] = &[$(
            match CStr::from_bytes_with_nul(concat!(stringify!($name), "\0").as_bytes()) {
                Ok(name) => name,
                Err(_) => panic!("a name has no zero inside"),
            },
        )* $(
            match CStr::from_bytes_with_nul(concat!(stringify!($list), "\0").as_bytes()) {
                Ok(name) => name,
                Err(_) => panic!("a name has no zero inside"),
            },
        )*];

        static ADDRESSES: [AtomicPtr<c_void>; NAMES.len()] =
            [const { AtomicPtr::new(ptr::null_mut()) }; NAMES.len()];

        $(
            /// # Safety
            ///
            /// As the manual page of the C function demands.
            #[inline]
            pub(crate) unsafe fn $name($($arg: $ty),*) -> $ret {
                let address = address(Index::$name as usize);
                if address.is_null() {
                    crate::sys::set_errno(libc::ENOSYS);
                    return -1;
                }
                // SAFETY: the C library defines the function with this type; the caller vouches for the
                // arguments.
                unsafe {
                    let real: unsafe extern "C-unwind" fn($($ty),*) -> $ret =
                        std::mem::transmute(address);
                    real($($arg),*)
                }
            }
        )*
    };
}

reals! {
    socket(family: c_int, kind: c_int, protocol: c_int) -> c_int;
    bind(fd: c_int, to: *const sockaddr, len: socklen_t) -> c_int;
    listen(fd: c_int, backlog: c_int) -> c_int;
    connect(fd: c_int, to: *const sockaddr, len: socklen_t) -> c_int;
    accept(fd: c_int, from: *mut sockaddr, len: *mut socklen_t) -> c_int;
    accept4(fd: c_int, from: *mut sockaddr, len: *mut socklen_t, flags: c_int) -> c_int;
    shutdown(fd: c_int, how: c_int) -> c_int;
    getsockname(fd: c_int, to: *mut sockaddr, len: *mut socklen_t) -> c_int;
    getpeername(fd: c_int, to: *mut sockaddr, len: *mut socklen_t) -> c_int;
    getsockopt(fd: c_int, level: c_int, name: c_int, value: *mut c_void, len: *mut socklen_t)
        -> c_int;
    setsockopt(fd: c_int, level: c_int, name: c_int, value: *const c_void, len: socklen_t)
        -> c_int;
    close(fd: c_int) -> c_int;
    close_range(first: c_uint, last: c_uint, flags: c_int) -> c_int;
    dup(fd: c_int) -> c_int;
    dup2(fd: c_int, to: c_int) -> c_int;
    dup3(fd: c_int, to: c_int, flags: c_int) -> c_int;
    fcntl(fd: c_int, command: c_int, argument: c_ulong) -> c_int;
    fcntl64(fd: c_int, command: c_int, argument: c_ulong) -> c_int;
    ioctl(fd: c_int, request: c_ulong, argument: c_ulong) -> c_int;
    read(fd: c_int, to: *mut c_void, len: usize) -> ssize_t;
    write(fd: c_int, from: *const c_void, len: usize) -> ssize_t;
    readv(fd: c_int, list: *const iovec, count: c_int) -> ssize_t;
    writev(fd: c_int, list: *const iovec, count: c_int) -> ssize_t;
    recv(fd: c_int, to: *mut c_void, len: usize, flags: c_int) -> ssize_t;
    send(fd: c_int, from: *const c_void, len: usize, flags: c_int) -> ssize_t;
    recvfrom(fd: c_int, to: *mut c_void, len: usize, flags: c_int, from: *mut sockaddr,
        from_len: *mut socklen_t) -> ssize_t;
    sendto(fd: c_int, from: *const c_void, len: usize, flags: c_int, to: *const sockaddr,
        to_len: socklen_t) -> ssize_t;
    recvmsg(fd: c_int, message: *mut msghdr, flags: c_int) -> ssize_t;
    sendmsg(fd: c_int, message: *const msghdr, flags: c_int) -> ssize_t;
    sendfile(to: c_int, from: c_int, offset: *mut off_t, count: usize) -> ssize_t;
    sendfile64(to: c_int, from: c_int, offset: *mut off_t, count: usize) -> ssize_t;
    __read_chk(fd: c_int, to: *mut c_void, len: usize, room: usize) -> ssize_t;
    __recv_chk(fd: c_int, to: *mut c_void, len: usize, room: usize, flags: c_int) -> ssize_t;
    __recvfrom_chk(fd: c_int, to: *mut c_void, len: usize, room: usize, flags: c_int,
        from: *mut sockaddr, from_len: *mut socklen_t) -> ssize_t;
    poll(list: *mut pollfd, count: nfds_t, timeout: c_int) -> c_int;
    __poll_chk(list: *mut pollfd, count: nfds_t, timeout: c_int, room: usize) -> c_int;
    ppoll(list: *mut pollfd, count: nfds_t, timeout: *const timespec, mask: *const sigset_t)
        -> c_int;
    __ppoll_chk(list: *mut pollfd, count: nfds_t, timeout: *const timespec, mask: *const sigset_t,
        room: usize) -> c_int;
    select(count: c_int, read: *mut fd_set, write: *mut fd_set, except: *mut fd_set,
        timeout: *mut timeval) -> c_int;
    pselect(count: c_int, read: *mut fd_set, write: *mut fd_set, except: *mut fd_set,
        timeout: *const timespec, mask: *const sigset_t) -> c_int;
    epoll_ctl(set: c_int, op: c_int, fd: c_int, event: *mut libc::epoll_event) -> c_int;
    splice(from: c_int, from_at: *mut i64, to: c_int, to_at: *mut i64, len: usize, flags: c_uint)
        -> ssize_t;
    sendmmsg(fd: c_int, list: *mut mmsghdr, count: c_uint, flags: c_int) -> c_int;
    recvmmsg(fd: c_int, list: *mut mmsghdr, count: c_uint, flags: c_int, limit: *mut timespec)
        -> c_int;
    fdopen(fd: c_int, mode: *const c_char) -> isize;
    fclose(stream: *mut FILE) -> c_int;
    freopen(path: *const c_char, mode: *const c_char, stream: *mut FILE) -> isize;
    freopen64(path: *const c_char, mode: *const c_char, stream: *mut FILE) -> isize;
    execve(path: *const c_char, args: List, env: List) -> c_int;
    execv(path: *const c_char, args: List) -> c_int;
    execvp(file: *const c_char, args: List) -> c_int;
    execvpe(file: *const c_char, args: List, env: List) -> c_int;
    fexecve(fd: c_int, args: List, env: List) -> c_int;
    execveat(dir: c_int, path: *const c_char, args: List, env: List, flags: c_int) -> c_int;
    posix_spawn(pid: *mut pid_t, path: *const c_char, actions: *const c_void,
        attributes: *const c_void, args: *const *mut c_char, env: *const *mut c_char) -> c_int;
    posix_spawnp(pid: *mut pid_t, file: *const c_char, actions: *const c_void,
        attributes: *const c_void, args: *const *mut c_char, env: *const *mut c_char) -> c_int;
    posix_spawn_file_actions_adddup2(actions: *mut c_void, fd: c_int, to: c_int) -> c_int;
    system(command: *const c_char) -> c_int;
    popen(command: *const c_char, mode: *const c_char) -> isize;
    _exit(status: c_int) -> c_int;
    pthread_create(thread: *mut libc::pthread_t, attributes: *const libc::pthread_attr_t,
        start: extern "C-unwind" fn(*mut c_void) -> *mut c_void, argument: *mut c_void) -> c_int;
    @dprintf;
    @vdprintf;
    @__dprintf_chk;
    @__vdprintf_chk;
    @execl;
    @execlp;
    @execle;
}

/// The address of a function.
macro_rules! address_of {
    ($name:ident) => {
        $crate::real::address($crate::real::Index::$name as usize)
    };
}
pub(crate) use address_of;

#[inline]
pub(crate) fn address(index: usize) -> *mut c_void {
    let known = ADDRESSES[index].load(Ordering::Relaxed);
    if known.is_null() { look_up(index) } else { known }
}

#[cold]
fn look_up(index: usize) -> *mut c_void {
    // SAFETY: a zero-terminated name. RTLD_NEXT is the library after this one.
    let found = unsafe { libc::dlsym(libc::RTLD_NEXT, NAMES[index].as_ptr()) };
    ADDRESSES[index].store(found, Ordering::Relaxed);
    found
}

/// Looks all of them up before the program begins: dlsym(3) takes the loader's lock, which a signal
/// handler may not. What an older C library lacks is no error of the program's.
pub(crate) fn look_up_all() {
    for index in 0..NAMES.len() {
        look_up(index);
    }
    // SAFETY: dlerror(3) forgets the last error.
    unsafe { libc::dlerror() };
}
