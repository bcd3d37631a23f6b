//! opendir and what works on its result. A folder of ours is a [`Listing`], told from the C
//! library's by its address, of which a small table is kept.

use core::mem::size_of;
use core::ptr;
use core::sync::atomic::{AtomicPtr, AtomicUsize, Ordering};

use libc::{DIR, c_char, c_int, c_long, c_void, dirent64};

use crate::live;
use crate::real::{fail, fail_null, real};
use crate::stats::node;
use crate::tree::{FOLDERS, Folder, Node};

/// An open folder of ours.
struct Listing {
    folder: Folder,
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

fn open_listing(folder: Folder) -> *mut DIR {
    // SAFETY: calloc(3); all bytes zero is a valid directory entry.
    let new = unsafe { libc::calloc(1, size_of::<Listing>()) }.cast::<Listing>();
    if new.is_null() {
        return fail_null(libc::ENOMEM);
    }
    // SAFETY: the memory was just allocated, zeroed, and is large enough.
    unsafe { new.write(Listing { folder, position: 0, entry: core::mem::zeroed() }) };
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
        Folder::Interfaces if index == 0 => Some((live::interface()?.to_bytes(), libc::DT_DIR)),
        Folder::Interfaces | Folder::Interface => None,
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
    // SAFETY: the address of this thread's errno is valid.
    let errno = unsafe { libc::__errno_location() };
    // SAFETY: as above.
    let before = unsafe { *errno };
    let found = entry(listing.folder, listing.position);
    // SAFETY: as above.
    unsafe { *errno = before };
    let Some((name, kind)) = found else {
        return ptr::null_mut();
    };
    listing.position += 1;
    let entry = &mut listing.entry;
    entry.d_ino = listing.position as u64;
    entry.d_off = listing.position as i64;
    entry.d_reclen = size_of::<dirent64>() as u16;
    entry.d_type = kind;
    let room = entry.d_name.len() - 1;
    let bytes = name.iter().map(|byte| *byte as c_char).take(room);
    for (slot, byte) in entry.d_name.iter_mut().zip(bytes.chain([0])) {
        *slot = byte;
    }
    entry
}

/// Stands in front of opendir(3).
#[unsafe(no_mangle)]
unsafe extern "C" fn opendir(path: *const c_char) -> *mut DIR {
    // SAFETY: the program passes a path.
    match unsafe { node(path) } {
        Some((_, Node::Folder(folder))) => open_listing(folder),
        Some(_) => fail_null(libc::ENOTDIR),
        None => real!(c"opendir": fn(*const c_char) -> *mut DIR, (path)
            else fail_null(libc::ENOSYS)),
    }
}

/// Defines readdir and its twin, which are one on 64-bit systems.
macro_rules! readdir_like {
    ($($name:ident $real:literal;)*) => {$(
        /// Stands in front of the function of this name.
        #[unsafe(no_mangle)]
        unsafe extern "C" fn $name(dir: *mut DIR) -> *mut dirent64 {
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
                    ptr::copy_nonoverlapping(found, room, 1);
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
unsafe extern "C" fn closedir(dir: *mut DIR) -> c_int {
    let Some(open) = listing(dir) else {
        return real!(c"closedir": fn(*mut DIR) -> c_int, (dir) else fail(libc::ENOSYS));
    };
    for slot in &OPEN {
        let null = ptr::null_mut();
        if slot.compare_exchange(open, null, Ordering::AcqRel, Ordering::Relaxed).is_ok() {
            COUNT.fetch_sub(1, Ordering::AcqRel);
            // SAFETY: it came from calloc, and whoever takes it out of the table frees it.
            unsafe { libc::free(open.cast::<c_void>()) };
            break;
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

/// Stands in front of dirfd(3): there is no descriptor of a folder of ours (ENOTSUP, which POSIX
/// allows).
#[unsafe(no_mangle)]
unsafe extern "C" fn dirfd(dir: *mut DIR) -> c_int {
    match listing(dir) {
        Some(_) => fail(libc::ENOTSUP),
        None => real!(c"dirfd": fn(*mut DIR) -> c_int, (dir) else fail(libc::ENOSYS)),
    }
}

/// What scandir(3) is given to choose by.
type Filter = Option<unsafe extern "C" fn(*const dirent64) -> c_int>;
/// What scandir(3) is given to sort by.
type Order = Option<unsafe extern "C" fn(*mut *const dirent64, *mut *const dirent64) -> c_int>;

/// Defines scandir and its twin.
macro_rules! scandir_like {
    ($($name:ident $real:literal;)*) => {$(
        /// Stands in front of the function of this name.
        #[unsafe(no_mangle)]
        unsafe extern "C" fn $name(
            path: *const c_char,
            list: *mut *mut *mut dirent64,
            filter: Filter,
            order: Order,
        ) -> c_int {
            // SAFETY: the program passes a path, and room for a pointer.
            match unsafe { node(path) } {
                // SAFETY: as above.
                Some((_, Node::Folder(folder))) => unsafe { scan(folder, list, filter, order) },
                Some(_) => fail(libc::ENOTDIR),
                None => real!(
                    $real: fn(*const c_char, *mut *mut *mut dirent64, Filter, Order) -> c_int,
                    (path, list, filter, order) else fail(libc::ENOSYS)
                ),
            }
        }
    )*};
}

scandir_like! {
    scandir c"scandir";
    scandir64 c"scandir64";
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
        let mut listing = Listing { folder, position: 0, entry: core::mem::zeroed() };
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
