//! opendir and what works on its result. A folder of ours is a [`Listing`], told from the C
//! library's by its address, of which a small table is kept.

use core::mem::{offset_of, size_of};
use core::ptr;
use core::sync::atomic::{AtomicI32, AtomicPtr, AtomicUsize, Ordering};

use libc::{DIR, c_char, c_int, c_long, c_void, dirent64};

use crate::place::{answer, write_path};
use crate::real::{fail, fail_null, quietly, real};
use crate::stats::inode;
use crate::tree::{FOLDERS, Folder, LONGEST, Node};
use crate::{descriptor, live};

/// An open folder of ours.
struct Listing {
    folder: Folder,
    /// Its descriptor, if it came from one or was asked for one; otherwise -1.
    fd: AtomicI32,
    /// The next entry.
    position: usize,
    entry: dirent64,
}

/// How many folders of ours can be open at a time.
const ROOM: usize = 32;

/// Those that are open.
static OPEN: [AtomicPtr<Listing>; ROOM] = [const { AtomicPtr::new(ptr::null_mut()) }; ROOM];
/// How many are: while it is 0, nothing needs to be looked for.
static COUNT: AtomicUsize = AtomicUsize::new(0);

/// The listing behind a pointer, if it is one of ours.
#[inline]
fn listing(dir: *mut DIR) -> Option<*mut Listing> {
    if COUNT.load(Ordering::Acquire) == 0 || dir.is_null() {
        return None;
    }
    OPEN.iter().map(|slot| slot.load(Ordering::Acquire)).find(|open| ptr::eq(open.cast(), dir))
}

impl Listing {
    fn new(folder: Folder, fd: c_int) -> Self {
        // SAFETY: all bytes zero is a valid directory entry.
        let entry = unsafe { core::mem::zeroed() };
        Self { folder, fd: AtomicI32::new(fd), position: 0, entry }
    }
}

fn open_listing(folder: Folder, fd: c_int) -> *mut DIR {
    // SAFETY: malloc(3).
    let new = unsafe { libc::malloc(size_of::<Listing>()) }.cast::<Listing>();
    if new.is_null() {
        return fail_null(libc::ENOMEM);
    }
    // SAFETY: the memory was just allocated, and is large enough.
    unsafe { new.write(Listing::new(folder, fd)) };
    for slot in &OPEN {
        let null = ptr::null_mut();
        if slot.compare_exchange(null, new, Ordering::AcqRel, Ordering::Relaxed).is_ok() {
            COUNT.fetch_add(1, Ordering::AcqRel);
            return new.cast();
        }
    }
    // SAFETY: nobody knows of it.
    unsafe { libc::free(new.cast()) };
    fail_null(libc::EMFILE)
}

/// The name and type of the entry at a position. `.` and `..` are left out, as POSIX allows: a parent
/// may be a folder that does not exist.
fn entry(folder: Folder, index: usize) -> Option<(&'static [u8], u8)> {
    match folder {
        Folder::Fixed(at) => {
            let folder = FOLDERS.get(at)?;
            let mut entries = folder.entries.iter();
            let entry = if folder.shared {
                entries.filter(|entry| live::is_shown(entry.name)).nth(index)?
            } else {
                entries.nth(index)?
            };
            let kind = if entry.is_folder() {
                libc::DT_DIR
            } else if entry.is_device() {
                libc::DT_CHR
            } else {
                libc::DT_REG
            };
            Some((entry.name.as_bytes(), kind))
        }
        Folder::Interfaces(_) if index == 0 => Some((live::interface()?.to_bytes(), libc::DT_DIR)),
        Folder::Interfaces(_) | Folder::Interface(_) => None,
    }
}

/// The next entry of a listing; null at its end.
///
/// # Safety
///
/// `listing` is open, and used by one thread at a time.
unsafe fn next(listing: *mut Listing) -> *mut dirent64 {
    // SAFETY: passed on from the caller.
    let listing = unsafe { &mut *listing };
    // The end of a folder is told from an error by errno, which looking an entry up may change.
    let Some((name, kind)) = quietly(|| entry(listing.folder, listing.position)) else {
        return ptr::null_mut();
    };
    listing.position += 1;
    let mut path = [0; LONGEST];
    let length = write_path(listing.folder, &mut path).unwrap_or(0);
    let entry = &mut listing.entry;
    entry.d_ino = inode(&[path.get(..length).unwrap_or(&[]), b"/", name]);
    entry.d_off = listing.position as i64;
    entry.d_type = kind;
    let room = entry.d_name.len() - 1;
    entry.d_reclen = entry_length(name.len().min(room)) as u16;
    let bytes = name.iter().map(|byte| *byte as c_char).take(room);
    for (slot, byte) in entry.d_name.iter_mut().zip(bytes.chain([0])) {
        *slot = byte;
    }
    entry
}

/// How long an entry is with a name of so many bytes, in whole words as the kernel's are. Ours are
/// short, so that there is room for it where a program has room for the longest of names.
fn entry_length(name: usize) -> usize {
    (offset_of!(dirent64, d_name) + name + 1).next_multiple_of(size_of::<u64>())
}

/// Stands in front of opendir(3).
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn opendir(path: *const c_char) -> *mut DIR {
    let ours = |_: &[u8], node| match node {
        Node::Folder(folder) => open_listing(folder, -1),
        _ => fail_null(libc::ENOTDIR),
    };
    let real = |path| real!(c"opendir": fn(*const c_char) -> *mut DIR, (path) else fail_null(libc::ENOSYS));
    // SAFETY: the program passes a path.
    unsafe { answer((libc::AT_FDCWD, 0), path, ours, real) }
}

/// Stands in front of fdopendir(3).
#[unsafe(no_mangle)]
unsafe extern "C" fn fdopendir(fd: c_int) -> *mut DIR {
    match descriptor::folder(fd) {
        Some(folder) => open_listing(folder, fd),
        None => real!(c"fdopendir": fn(c_int) -> *mut DIR, (fd) else fail_null(libc::ENOSYS)),
    }
}

/// Defines readdir and its twin, which are one on 64-bit systems.
macro_rules! readdir_like {
    ($($name:ident $real:literal;)*) => {$(
        /// Stands in front of the function of this name.
        #[unsafe(no_mangle)]
        pub(crate) unsafe extern "C" fn $name(dir: *mut DIR) -> *mut dirent64 {
            match listing(dir) {
                // SAFETY: the program passes an open folder.
                Some(listing) => unsafe { next(listing) },
                None => real!($real: fn(*mut DIR) -> *mut dirent64, (dir)
                    else fail_null(libc::ENOSYS)),
            }
        }
    )*};
}

readdir_like! {
    readdir c"readdir";
    readdir64 c"readdir64";
}

/// Defines readdir_r and its twin.
macro_rules! readdir_r_like {
    ($($name:ident $real:literal;)*) => {$(
        /// Stands in front of the function of this name.
        #[unsafe(no_mangle)]
        unsafe extern "C" fn $name(
            dir: *mut DIR,
            room: *mut dirent64,
            result: *mut *mut dirent64,
        ) -> c_int {
            let Some(listing) = listing(dir) else {
                return real!($real: fn(*mut DIR, *mut dirent64, *mut *mut dirent64) -> c_int,
                    (dir, room, result) else libc::ENOSYS);
            };
            // SAFETY: the program passes an open folder, and room for an entry and a pointer.
            unsafe {
                let found = next(listing);
                if !found.is_null() {
                    let length = usize::from((*found).d_reclen);
                    ptr::copy_nonoverlapping(found.cast::<u8>(), room.cast(), length);
                }
                *result = if found.is_null() { ptr::null_mut() } else { room };
            }
            0
        }
    )*};
}

readdir_r_like! {
    readdir_r c"readdir_r";
    readdir64_r c"readdir64_r";
}

/// Stands in front of closedir(3).
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn closedir(dir: *mut DIR) -> c_int {
    let Some(open) = listing(dir) else {
        return real!(c"closedir": fn(*mut DIR) -> c_int, (dir) else fail(libc::ENOSYS));
    };
    for slot in &OPEN {
        let null = ptr::null_mut();
        if slot.compare_exchange(open, null, Ordering::AcqRel, Ordering::Relaxed).is_ok() {
            COUNT.fetch_sub(1, Ordering::AcqRel);
            // SAFETY: it came from malloc, and whoever takes it out of the table frees it. Its
            // descriptor is closed with it.
            unsafe {
                let fd = (*open).fd.load(Ordering::Acquire);
                libc::free(open.cast::<c_void>());
                return if fd < 0 { 0 } else { libc::close(fd) };
            }
        }
    }
    0
}

/// Stands in front of rewinddir(3).
#[unsafe(no_mangle)]
unsafe extern "C" fn rewinddir(dir: *mut DIR) {
    match listing(dir) {
        // SAFETY: the program passes an open folder.
        Some(listing) => unsafe { (*listing).position = 0 },
        None => real!(c"rewinddir": fn(*mut DIR) -> (), (dir) else ()),
    }
}

/// Stands in front of telldir(3).
#[unsafe(no_mangle)]
unsafe extern "C" fn telldir(dir: *mut DIR) -> c_long {
    match listing(dir) {
        // SAFETY: the program passes an open folder.
        Some(listing) => unsafe { (*listing).position as c_long },
        None => {
            real!(c"telldir": fn(*mut DIR) -> c_long, (dir) else c_long::from(fail(libc::ENOSYS)))
        }
    }
}

/// Stands in front of seekdir(3).
#[unsafe(no_mangle)]
unsafe extern "C" fn seekdir(dir: *mut DIR, position: c_long) {
    match listing(dir) {
        // SAFETY: the program passes an open folder.
        Some(listing) => unsafe { (*listing).position = usize::try_from(position).unwrap_or(0) },
        None => real!(c"seekdir": fn(*mut DIR, c_long) -> (), (dir, position) else ()),
    }
}

/// Stands in front of dirfd(3). A folder of ours gets its descriptor when it is first asked for it.
#[unsafe(no_mangle)]
unsafe extern "C" fn dirfd(dir: *mut DIR) -> c_int {
    let Some(listing) = listing(dir) else {
        return real!(c"dirfd": fn(*mut DIR) -> c_int, (dir) else fail(libc::ENOSYS));
    };
    // SAFETY: the program passes an open folder; only its cell is looked at that threads share.
    let (folder, cell) = unsafe { ((*listing).folder, &(*listing).fd) };
    let known = cell.load(Ordering::Acquire);
    if known >= 0 {
        return known;
    }
    let fd = descriptor::of_folder(folder, libc::O_CLOEXEC);
    match cell.compare_exchange(-1, fd, Ordering::AcqRel, Ordering::Acquire) {
        Ok(_) => fd,
        Err(first) => {
            // SAFETY: nobody knows of it.
            unsafe { libc::close(fd) };
            first
        }
    }
}

/// What scandir(3) is given to choose by.
type Filter = Option<unsafe extern "C" fn(*const dirent64) -> c_int>;
/// What scandir(3) is given to sort by.
type Order = Option<unsafe extern "C" fn(*mut *const dirent64, *mut *const dirent64) -> c_int>;

/// Defines scandir and its kin.
macro_rules! scandir_like {
    ($($name:ident($($dir:ident: $ty:ty)?) from $from:expr, $real:literal;)*) => {$(
        /// Stands in front of the function of this name.
        #[unsafe(no_mangle)]
        unsafe extern "C" fn $name(
            $($dir: $ty,)?
            path: *const c_char,
            list: *mut *mut *mut dirent64,
            filter: Filter,
            order: Order,
        ) -> c_int {
            let ours = |_: &[u8], node| match node {
                // SAFETY: the program passes room for a pointer.
                Node::Folder(folder) => unsafe { scan(folder, list, filter, order) },
                _ => fail(libc::ENOTDIR),
            };
            let real = |path| real!(
                $real: fn(
                    $($ty,)? *const c_char, *mut *mut *mut dirent64, Filter, Order
                ) -> c_int,
                ($($dir,)? path, list, filter, order) else fail(libc::ENOSYS)
            );
            // SAFETY: the program passes a path.
            unsafe { answer(($from, 0), path, ours, real) }
        }
    )*};
}

scandir_like! {
    scandir() from libc::AT_FDCWD, c"scandir";
    scandir64() from libc::AT_FDCWD, c"scandir64";
    scandirat(dir: c_int) from dir, c"scandirat";
    scandirat64(dir: c_int) from dir, c"scandirat64";
}

/// # Safety
///
/// `list` is valid for writing.
unsafe fn scan(
    folder: Folder,
    list: *mut *mut *mut dirent64,
    filter: Filter,
    order: Order,
) -> c_int {
    // No folder of ours has more entries.
    const MOST: usize = 32;
    let width = size_of::<*mut dirent64>();
    // SAFETY: calloc(3) and malloc(3) are asked for what is written to them below; the program
    // frees each entry and the array, as scandir(3) says. The callbacks get valid entries.
    unsafe {
        let array = libc::calloc(MOST, width).cast::<*mut dirent64>();
        if array.is_null() {
            return fail(libc::ENOMEM);
        }
        let mut listing = Listing::new(folder, -1);
        let mut count = 0;
        while count < MOST {
            let found = next(&mut listing);
            if found.is_null() {
                break;
            }
            if filter.is_some_and(|filter| filter(found) == 0) {
                continue;
            }
            let copy = libc::malloc(size_of::<dirent64>()).cast::<dirent64>();
            if copy.is_null() {
                break;
            }
            ptr::copy_nonoverlapping(found, copy, 1);
            array.add(count).write(copy);
            count += 1;
        }
        if let Some(order) = order {
            let order = core::mem::transmute::<
                unsafe extern "C" fn(*mut *const dirent64, *mut *const dirent64) -> c_int,
                unsafe extern "C" fn(*const c_void, *const c_void) -> c_int,
            >(order);
            libc::qsort(array.cast(), count, width, Some(order));
        }
        list.write(array);
        count as c_int
    }
}
