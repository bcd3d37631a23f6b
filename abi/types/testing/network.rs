//! A network of its own for a program under test, so that no other program on the machine takes a port that
//! the test has closed, or connects to one that it has opened. Included by path, since it belongs to no
//! library.

use std::ffi::CString;
use std::os::unix::process::CommandExt;
use std::process::Command;

use libc::c_char;

/// Runs the program in a new network namespace with nothing but its loopback; in that of the test where the
/// system lets this user make none.
pub fn of_its_own(command: &mut Command) {
    // SAFETY: geteuid and getegid have no arguments and never fail.
    let (user, group) = unsafe { (libc::geteuid(), libc::getegid()) };
    let maps = [
        ("/proc/self/setgroups", "deny".to_owned()),
        ("/proc/self/uid_map", format!("{user} {user} 1")),
        ("/proc/self/gid_map", format!("{group} {group} 1")),
    ];
    let maps = maps.map(|(file, text)| [file.into(), text].map(|word| CString::new(word).unwrap()));
    // SAFETY: `enter` only makes system calls, which may be made between fork and exec.
    unsafe {
        command.pre_exec(move || {
            enter(&maps);
            Ok(())
        });
    }
}

/// Makes the namespace. A user without the right to may have it in a user namespace where it has the same
/// number as before.
fn enter(maps: &[[CString; 2]]) {
    // SAFETY: takes an integer.
    let made = |kinds| unsafe { libc::unshare(kinds) == 0 };
    if !made(libc::CLONE_NEWNET) {
        if !made(libc::CLONE_NEWUSER | libc::CLONE_NEWNET) {
            return;
        }
        maps.iter().for_each(|[file, text]| write(file, text));
    }
    loopback_up();
}

fn write(file: &CString, text: &CString) {
    // SAFETY: strings that end with zeros, and a descriptor of this process.
    unsafe {
        let fd = libc::open(file.as_ptr(), libc::O_WRONLY | libc::O_CLOEXEC);
        libc::write(fd, text.as_ptr().cast(), text.as_bytes().len());
        libc::close(fd);
    }
}

/// Sets the loopback interface up, with its addresses. If that fails the program says what it misses.
fn loopback_up() {
    // SAFETY: ifreq is plain data, for which all zeroes is a valid value.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    request.ifr_name[..2].copy_from_slice(&[b'l' as c_char, b'o' as c_char]);
    request.ifr_ifru.ifru_flags = (libc::IFF_UP | libc::IFF_RUNNING) as i16;
    // SAFETY: integers, and one ifreq that lives through the call.
    unsafe {
        let fd = libc::socket(libc::AF_INET, libc::SOCK_DGRAM | libc::SOCK_CLOEXEC, 0);
        libc::ioctl(fd, libc::SIOCSIFFLAGS, &raw mut request);
        libc::close(fd);
    }
}
