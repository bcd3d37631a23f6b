//! The working directory, where a program makes a folder of ours that. The kernel cannot, so for it
//! the working directory is then [`STAND_IN`], where nothing can be made or removed by mistake.
//!
//! Relative paths count from our folder as long as the kernel's is the stand-in: a program may leave
//! it by calls that are not seen here. A child of vfork(2) changes its own, but has its parent's
//! memory, so nothing is kept of where it goes, which matters to no one: it runs another program next.

use core::ffi::CStr;
use core::ptr;
use core::sync::atomic::{AtomicI32, AtomicUsize, Ordering};

use libc::{c_char, c_int, size_t};

use crate::descriptor;
use crate::files::give_path;
use crate::place::{answer, write_path};
use crate::real::{fail, fail_null, quietly, real};
use crate::tree::{self, Folder, LONGEST, Node};

/// Where the kernel is meanwhile.
const STAND_IN: &CStr = c"/sys/class";

/// The number of our folder, and one more; 0 if none was entered.
static ENTERED: AtomicUsize = AtomicUsize::new(0);

/// The process that this memory is of, which is not a child of vfork(2); nor one of a bare clone(2),
/// which looks the same.
static OWNER: AtomicI32 = AtomicI32::new(0);

/// Notes which folder of ours the working directory is, by its number and one more.
fn note(entered: usize) {
    let owner = OWNER.load(Ordering::Relaxed);
    // Nobody owns it yet in the constructor of another library.
    // SAFETY: a system call that cannot fail.
    if owner == 0 || owner == unsafe { libc::getpid() } {
        ENTERED.store(entered, Ordering::Relaxed);
    }
}

/// Whether the working directory may be a folder of ours.
#[inline]
pub(crate) fn may_be_ours() -> bool {
    ENTERED.load(Ordering::Relaxed) != 0
}

/// The folder of ours that is the working directory.
pub(crate) fn folder() -> Option<Folder> {
    let folder = Folder::of_number(ENTERED.load(Ordering::Relaxed).checked_sub(1)?)?;
    if is_in_stand_in() {
        return Some(folder);
    }
    note(0);
    None
}

fn is_in_stand_in() -> bool {
    let mut room = [0; LONGEST];
    let length = quietly(|| of_kernel(&mut room));
    length.and_then(|length| room.get(..length)) == Some(STAND_IN.to_bytes())
}

/// Writes the kernel's working directory; its length.
pub(crate) fn of_kernel(room: &mut [u8]) -> Option<usize> {
    // SAFETY: a system call that writes at most so many bytes, a zero among them.
    let length = unsafe { libc::syscall(libc::SYS_getcwd, room.as_mut_ptr(), room.len()) };
    usize::try_from(length).ok()?.checked_sub(1)
}

/// Makes a folder of ours the working directory.
fn enter(folder: Folder) -> c_int {
    // SAFETY: a system call that reads a zero-terminated path.
    let entered = unsafe { libc::syscall(libc::SYS_chdir, STAND_IN.as_ptr()) } as c_int;
    if entered == 0 {
        note(folder.number() + 1);
    }
    entered
}

/// The kernel's working directory is another, if `result` says so.
fn left(result: c_int) -> c_int {
    if result == 0 && may_be_ours() {
        note(0);
    }
    result
}

/// Stands in front of chdir(2).
#[unsafe(no_mangle)]
unsafe extern "C" fn chdir(path: *const c_char) -> c_int {
    let ours = |_: &[u8], node| match node {
        Node::Folder(folder) => enter(folder),
        _ => fail(libc::ENOTDIR),
    };
    let real =
        |path| left(real!(c"chdir": fn(*const c_char) -> c_int, (path) else fail(libc::ENOSYS)));
    // SAFETY: the program passes a path.
    unsafe { answer((libc::AT_FDCWD, 0), path, ours, real) }
}

/// Stands in front of fchdir(2).
#[unsafe(no_mangle)]
unsafe extern "C" fn fchdir(fd: c_int) -> c_int {
    match descriptor::folder(fd) {
        Some(folder) => enter(folder),
        None => left(real!(c"fchdir": fn(c_int) -> c_int, (fd) else fail(libc::ENOSYS))),
    }
}

/// Does something with the path of our working directory, behind which is a zero, if it is ours.
fn with_path<R>(work: impl FnOnce(&[u8]) -> R) -> Option<R> {
    let folder = folder()?;
    let mut path = [0; LONGEST];
    let length = write_path(folder, &mut path)?;
    path.get(..length).map(work)
}

/// As getcwd(3) does: null asks for memory, of `room` bytes if that is not 0.
///
/// # Safety
///
/// `out` is null or has `room` bytes.
unsafe fn give_working(path: &[u8], out: *mut c_char, room: size_t) -> *mut c_char {
    if !out.is_null() && room == 0 {
        return fail_null(libc::EINVAL);
    }
    if room != 0 && room <= path.len() {
        return fail_null(libc::ERANGE);
    }
    if out.is_null() && room != 0 {
        // SAFETY: malloc(3), of more bytes than are written.
        let out = unsafe { libc::malloc(room) }.cast::<c_char>();
        // SAFETY: as above; null gets new memory, of which there is none.
        return if out.is_null() { out } else { unsafe { give_path(path, out) } };
    }
    // SAFETY: the room was found to be large enough.
    unsafe { give_path(path, out) }
}

/// Stands in front of getcwd(3).
#[unsafe(no_mangle)]
unsafe extern "C" fn getcwd(out: *mut c_char, room: size_t) -> *mut c_char {
    // SAFETY: the program passes null or so much room.
    let ours = |path: &[u8]| unsafe { give_working(path, out, room) };
    match may_be_ours().then(|| with_path(ours)).flatten() {
        Some(given) => given,
        None => real!(c"getcwd": fn(*mut c_char, size_t) -> *mut c_char, (out, room)
            else fail_null(libc::ENOSYS)),
    }
}

/// Stands in front of the checked form of getcwd(3).
#[unsafe(no_mangle)]
unsafe extern "C" fn __getcwd_chk(out: *mut c_char, room: size_t, known: size_t) -> *mut c_char {
    // SAFETY: the program passes null or so much room.
    let ours = |path: &[u8]| unsafe { give_working(path, out, room.min(known)) };
    match may_be_ours().then(|| with_path(ours)).flatten() {
        Some(given) => given,
        None => real!(c"__getcwd_chk": fn(*mut c_char, size_t, size_t) -> *mut c_char,
            (out, room, known) else fail_null(libc::ENOSYS)),
    }
}

/// Stands in front of get_current_dir_name(3).
#[unsafe(no_mangle)]
unsafe extern "C" fn get_current_dir_name() -> *mut c_char {
    // SAFETY: null asks for memory.
    let ours = |path: &[u8]| unsafe { give_working(path, ptr::null_mut(), 0) };
    match may_be_ours().then(|| with_path(ours)).flatten() {
        Some(given) => given,
        None => real!(c"get_current_dir_name": fn() -> *mut c_char, ()
            else fail_null(libc::ENOSYS)),
    }
}

/// A process owns its memory, be it from the beginning or by fork(2).
extern "C" fn own() {
    // SAFETY: a system call that cannot fail.
    OWNER.store(unsafe { libc::getpid() }, Ordering::Relaxed);
}

/// Runs before the program: a shell that has entered a folder of ours says so to the programs that
/// it starts, by PWD.
#[used]
#[unsafe(link_section = ".init_array")]
static INHERIT: extern "C" fn() = inherit;

extern "C" fn inherit() {
    own();
    // SAFETY: the function takes nothing, and may be called in a child.
    unsafe { libc::pthread_atfork(None, None, Some(own)) };
    // SAFETY: nobody changes the environment yet; what is there is zero-terminated.
    let said = unsafe {
        let said = libc::getenv(c"PWD".as_ptr());
        if said.is_null() {
            return;
        }
        CStr::from_ptr(said).to_bytes()
    };
    let mut plain = [0; LONGEST];
    let node = tree::find(said, &mut plain).map(|(_, node)| node);
    if let Some(Node::Folder(folder @ (Folder::Fixed(_) | Folder::Interfaces(_)))) = node
        && is_in_stand_in()
    {
        ENTERED.store(folder.number() + 1, Ordering::Relaxed);
    }
}
