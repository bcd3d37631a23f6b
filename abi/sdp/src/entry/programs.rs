//! Starting programs: they do not know this library's connections, or are to forget them.

use std::ffi::{CStr, CString};

use libc::{c_char, c_int, c_void, pid_t};

use super::descriptors;
use super::files::hand_over;
use super::process::ends;
use crate::{adapter, keeper, process, real, table};

/// A program is about to be started with the descriptors of this process that are not close-on-exec.
/// It does not know connections of SDP.
fn descriptors_are_inherited() {
    table::range(0, u32::MAX).into_iter().filter(|fd| is_inherited(*fd)).for_each(hand_over);
}

/// Whether a program that this process starts, or becomes, has the descriptor.
fn is_inherited(fd: c_int) -> bool {
    // SAFETY: fcntl(2) with integers.
    let flags = unsafe { real::fcntl(fd, libc::F_GETFD, 0) };
    flags >= 0 && flags & libc::FD_CLOEXEC == 0
}

/// The program that this process is about to become.
enum Program {
    /// By its path.
    Path(*const c_char),
    /// By a name, which the folders of `PATH` have, or by a path.
    Named(*const c_char),
    Other,
}

impl Program {
    /// Whether this process may become that program, as far as is known before.
    fn is_found(&self) -> bool {
        let (Self::Path(name) | Self::Named(name)) = self else { return true };
        if name.is_null() {
            return false;
        }
        // SAFETY: the program passes a zero-terminated name; an environment has such values, too.
        let (name, folders) = unsafe {
            let folders = libc::getenv(c"PATH".as_ptr());
            (CStr::from_ptr(*name), (!folders.is_null()).then(|| CStr::from_ptr(folders)))
        };
        let is_searched = matches!(self, Self::Named(_)) && !name.to_bytes().contains(&b'/');
        match (is_searched, folders) {
            (false, _) => may_run(name.to_bytes()),
            (true, None) => true,
            (true, Some(folders)) => {
                let mut folders = folders.to_bytes().split(|byte| *byte == b':');
                folders.any(|folder| match folder {
                    [] => may_run(name.to_bytes()),
                    _ => may_run(&[folder, b"/", name.to_bytes()].concat()),
                })
            }
        }
    }
}

fn may_run(path: &[u8]) -> bool {
    let Ok(path) = CString::new(path) else { return false };
    let (folder, flags) = (libc::AT_FDCWD, libc::AT_EACCESS);
    // SAFETY: a live zero-terminated path.
    unsafe { libc::faccessat(folder, path.as_ptr(), libc::X_OK, flags) == 0 }
}

/// This process is about to become another program. If that gets a connection, it is a child of this process,
/// whose relay goes on. Others end.
fn becomes(program: &Program) {
    descriptors_are_inherited();
    let needs_relay = |fd: &c_int| {
        let relayer = table::relayed(*fd).map_or(0, |relayed| relayed.by);
        relayer == std::process::id() && is_inherited(*fd)
    };
    if !process::is_own() || adapter::known().is_none() || !program.is_found() {
        return;
    }
    if table::range(0, u32::MAX).iter().any(needs_relay) {
        keeper::stay(descriptors::close_all, ends);
    }
    // Connections that end now end in order. A child of the above has none.
    ends();
}

/// Defines functions that turn this process into another program.
macro_rules! exec_like {
    ($($name:ident($($arg:ident: $ty:ty),*) $program:expr;)*) => {$(
        #[unsafe(no_mangle)]
        unsafe extern "C-unwind" fn $name($($arg: $ty),*) -> c_int {
            becomes(&$program);
            // SAFETY: as the program called this.
            unsafe { real::$name($($arg),*) }
        }
    )*};
}

exec_like! {
    execve(path: *const c_char, args: *const *const c_char, env: *const *const c_char)
        Program::Path(path);
    execv(path: *const c_char, args: *const *const c_char) Program::Path(path);
    execvp(file: *const c_char, args: *const *const c_char) Program::Named(file);
    execvpe(file: *const c_char, args: *const *const c_char, env: *const *const c_char)
        Program::Named(file);
    fexecve(fd: c_int, args: *const *const c_char, env: *const *const c_char) Program::Other;
    execveat(dir: c_int, path: *const c_char, args: *const *const c_char,
        env: *const *const c_char, flags: c_int) Program::Other;
}

/// What posix_spawn(3) takes of which this library needs to know nothing.
type Opaque = *const c_void;

/// Defines functions that start another program with this one's descriptors.
macro_rules! spawn_like {
    ($($name:ident($($arg:ident: $ty:ty),*) -> $ret:ty;)*) => {$(
        #[unsafe(no_mangle)]
        unsafe extern "C-unwind" fn $name($($arg: $ty),*) -> $ret {
            descriptors_are_inherited();
            // SAFETY: as the program called this.
            unsafe { real::$name($($arg),*) }
        }
    )*};
}

spawn_like! {
    posix_spawn(pid: *mut pid_t, path: *const c_char, actions: Opaque, attributes: Opaque,
        args: *const *mut c_char, env: *const *mut c_char) -> c_int;
    posix_spawnp(pid: *mut pid_t, file: *const c_char, actions: Opaque, attributes: Opaque,
        args: *const *mut c_char, env: *const *mut c_char) -> c_int;
    system(command: *const c_char) -> c_int;
    popen(command: *const c_char, mode: *const c_char) -> isize;
}

/// The program that is started later gets a descriptor, by calls that this library does not see.
#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn posix_spawn_file_actions_adddup2(
    actions: *mut c_void,
    fd: c_int,
    to: c_int,
) -> c_int {
    hand_over(fd);
    // SAFETY: as the program called this.
    unsafe { real::posix_spawn_file_actions_adddup2(actions, fd, to) }
}

/// Defines functions that turn this process into another program, with a list of arguments.
macro_rules! list_like {
    ($($name:ident $before:ident $program:ident;)*) => {
        $(extern "C" fn $before(name: *const c_char) -> usize {
            becomes(&Program::$program(name));
            real::address_of!($name).expose_provenance()
        })*

        quipu_cabi::jump_after! { $($name $before;)* }
    };
}

list_like! {
    execl before_execl Path;
    execlp before_execlp Named;
    execle before_execle Path;
}
