//! glob(3). The C library looks into folders by functions of its own, behind this library, unless
//! it is given others: then it is given those of this library. Programs that were linked before glibc
//! 2.27 get its newer glob, which also finds symbolic links that lead nowhere.

use libc::{c_char, c_int, c_void, size_t};

use crate::place::may_be_ours;
use crate::real::{fail, real};
use crate::{folders, stats};

/// The functions that a program may give: closedir, readdir, opendir, lstat, stat.
type Functions = [*mut c_void; 5];

/// `glob_t`, of which the functions are no public fields of the crate's.
#[repr(C)]
struct Found {
    count: size_t,
    paths: *mut *mut c_char,
    offset: size_t,
    flags: c_int,
    functions: Functions,
}

/// What is called for a folder that cannot be read.
type Complain = Option<unsafe extern "C" fn(*const c_char, c_int) -> c_int>;

/// Defines glob and its twin, which are one on 64-bit systems.
macro_rules! glob_like {
    ($($name:ident $real:literal;)*) => {$(
        /// Stands in front of the function of this name.
        #[unsafe(no_mangle)]
        unsafe extern "C" fn $name(
            pattern: *const c_char, flags: c_int, complain: Complain, found: *mut Found,
        ) -> c_int {
            let real = move |flags| real!(
                $real: fn(*const c_char, c_int, Complain, *mut Found) -> c_int,
                (pattern, flags, complain, found) else fail(libc::ENOSYS)
            );
            // SAFETY: the program passes a pattern, and a place for what is found.
            unsafe {
                let theirs = flags & libc::GLOB_ALTDIRFUNC != 0 || found.is_null();
                if theirs || !may_be_ours(libc::AT_FDCWD, pattern) {
                    return real(flags);
                }
                let functions = &raw mut (*found).functions;
                let before = functions.replace(ours());
                let result = real(flags | libc::GLOB_ALTDIRFUNC);
                functions.write(before);
                (*found).flags &= !libc::GLOB_ALTDIRFUNC;
                result
            }
        }
    )*};
}

glob_like! {
    glob c"glob";
    glob64 c"glob64";
}

fn ours() -> Functions {
    [
        folders::closedir as *mut c_void,
        folders::readdir as *mut c_void,
        folders::opendir as *mut c_void,
        stats::lstat as *mut c_void,
        stats::stat as *mut c_void,
    ]
}
