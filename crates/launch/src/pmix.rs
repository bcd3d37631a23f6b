//! PMIx, by the library of the system, which is opened when a launcher of PMIx has started the process.
//!
//! The structures are those of the PMIx standard, version 4 (and 3): `pmix_proc_t`, `pmix_value_t` and
//! `pmix_info_t`.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::ptr;

use crate::error::LaunchError;

const MAX_NAMESPACE: usize = 255;
const MAX_KEY: usize = 511;
const SUCCESS: c_int = 0;
const SCOPE_GLOBAL: u8 = 3;
const RANK_WILDCARD: u32 = u32::MAX - 1;
const TYPE_BOOL: u16 = 1;
const TYPE_UINT32: u16 = 14;
const TYPE_BYTES: u16 = 27;
/// Longest value that is taken from another rank.
const MAX_VALUE: usize = 1 << 20;

#[repr(C)]
#[derive(Clone)]
struct Proc {
    namespace: [c_char; MAX_NAMESPACE + 1],
    rank: u32,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct Bytes {
    bytes: *mut c_char,
    size: usize,
}

#[repr(C)]
union Data {
    flag: bool,
    uint32: u32,
    bytes: Bytes,
    words: [u64; 4],
}

#[repr(C)]
struct Value {
    kind: u16,
    data: Data,
}

#[repr(C)]
struct Info {
    key: [c_char; MAX_KEY + 1],
    flags: u32,
    value: Value,
}

type Init = unsafe extern "C" fn(*mut Proc, *const Info, usize) -> c_int;
type Put = unsafe extern "C" fn(u8, *const c_char, *mut Value) -> c_int;
type Commit = unsafe extern "C" fn() -> c_int;
type Fence = unsafe extern "C" fn(*const Proc, usize, *const Info, usize) -> c_int;
type Get =
    unsafe extern "C" fn(*const Proc, *const c_char, *const Info, usize, *mut *mut Value) -> c_int;
type Finalize = unsafe extern "C" fn(*const Info, usize) -> c_int;
type Abort = unsafe extern "C" fn(c_int, *const c_char, *mut Proc, usize) -> c_int;
type Destruct = unsafe extern "C" fn(*mut Value);

/// The functions of the library, which stays open until the process ends.
struct Functions {
    init: Init,
    put: Put,
    commit: Commit,
    fence: Fence,
    get: Get,
    finalize: Finalize,
    abort: Abort,
    destruct: Option<Destruct>,
}

/// This process's membership in a job of PMIx.
pub(crate) struct Pmix {
    functions: Functions,
    me: Proc,
    size: u32,
}

impl std::fmt::Debug for Pmix {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Pmix").field("rank", &self.me.rank).field("size", &self.size).finish()
    }
}

fn check(call: &'static str, status: c_int) -> Result<(), LaunchError> {
    if status == SUCCESS { Ok(()) } else { Err(LaunchError::Pmix { call, status }) }
}

impl Functions {
    fn load() -> Result<Self, String> {
        // SAFETY: the name is a C string; the library's constructors are those of PMIx, which the launcher of
        // this process uses as well.
        let library = unsafe { libc::dlopen(c"libpmix.so.2".as_ptr(), libc::RTLD_NOW) };
        if library.is_null() {
            // SAFETY: after a failure dlerror returns a C string, valid until the next call of this thread.
            let why = unsafe { CStr::from_ptr(libc::dlerror()) };
            return Err(why.to_string_lossy().into_owned());
        }
        let find = |name: &CStr| {
            // SAFETY: the library is open, and the name is a C string.
            let found = unsafe { libc::dlsym(library, name.as_ptr()) };
            if found.is_null() { Err(format!("libpmix.so.2 has no {name:?}")) } else { Ok(found) }
        };
        // SAFETY: the symbols have these types in every version of PMIx since 2.
        unsafe {
            Ok(Self {
                init: std::mem::transmute::<*mut c_void, Init>(find(c"PMIx_Init")?),
                put: std::mem::transmute::<*mut c_void, Put>(find(c"PMIx_Put")?),
                commit: std::mem::transmute::<*mut c_void, Commit>(find(c"PMIx_Commit")?),
                fence: std::mem::transmute::<*mut c_void, Fence>(find(c"PMIx_Fence")?),
                get: std::mem::transmute::<*mut c_void, Get>(find(c"PMIx_Get")?),
                finalize: std::mem::transmute::<*mut c_void, Finalize>(find(c"PMIx_Finalize")?),
                abort: std::mem::transmute::<*mut c_void, Abort>(find(c"PMIx_Abort")?),
                destruct: find(c"PMIx_Value_destruct")
                    .ok()
                    .map(|found| std::mem::transmute::<*mut c_void, Destruct>(found)),
            })
        }
    }
}

impl Pmix {
    /// Joins the job.
    pub(crate) fn start() -> Result<Self, LaunchError> {
        let functions = Functions::load().map_err(|why| LaunchError::NoProtocol {
            launcher: "a launcher of PMIx (mpirun, prterun, srun --mpi=pmix)",
            why,
            remedy: "install libpmix2, or start the program with mpiexec.hydra, srun --mpi=pmi2 or quipu spmd",
        })?;
        let mut me = Proc { namespace: [0; MAX_NAMESPACE + 1], rank: 0 };
        // SAFETY: PMIx_Init fills the structure; no attributes are given.
        check("PMIx_Init", unsafe { (functions.init)(&mut me, ptr::null(), 0) })?;
        let mut pmix = Self { functions, me, size: 0 };
        let whole_job = Proc { rank: RANK_WILDCARD, ..pmix.me.clone() };
        let size = pmix.get_value(&whole_job, c"pmix.job.size", |value| {
            // SAFETY: PMIx has written all of the union; any 4 bytes are a number.
            (value.kind == TYPE_UINT32).then_some(unsafe { value.data.uint32 })
        })?;
        pmix.size =
            size.ok_or(LaunchError::Pmix { call: "PMIx_Get(pmix.job.size)", status: -1 })?;
        Ok(pmix)
    }

    /// Rank and number of ranks.
    pub(crate) fn place(&self) -> (u32, u32) {
        (self.me.rank, self.size)
    }

    /// Puts a value for all.
    pub(crate) fn put(&self, key: &CStr, bytes: &[u8]) -> Result<(), LaunchError> {
        // PMIx has no empty values: one byte is put in front.
        let bytes = &[&[0], bytes].concat()[..];
        // PMIx copies the value; it does not change it.
        let data = Bytes { bytes: bytes.as_ptr().cast_mut().cast(), size: bytes.len() };
        let mut value = Value { kind: TYPE_BYTES, data: Data { words: [0; 4] } };
        value.data.bytes = data;
        // SAFETY: the key is a C string; the value refers to `bytes`, which outlives the call.
        check("PMIx_Put", unsafe { (self.functions.put)(SCOPE_GLOBAL, key.as_ptr(), &mut value) })
    }

    /// Makes what all have put visible to all, and waits for all.
    pub(crate) fn fence(&self) -> Result<(), LaunchError> {
        // SAFETY: the call has no arguments.
        check("PMIx_Commit", unsafe { (self.functions.commit)() })?;
        let mut collect = Info {
            key: [0; MAX_KEY + 1],
            flags: 0,
            value: Value { kind: TYPE_BOOL, data: Data { words: [0; 4] } },
        };
        for (to, from) in collect.key.iter_mut().zip(b"pmix.collect") {
            *to = *from as c_char;
        }
        collect.value.data.flag = true;
        // SAFETY: no processes means all of the job; one attribute is given, which outlives the call.
        check("PMIx_Fence", unsafe { (self.functions.fence)(ptr::null(), 0, &collect, 1) })
    }

    /// What a rank has put.
    pub(crate) fn get(&self, rank: u32, key: &CStr) -> Result<Option<Vec<u8>>, LaunchError> {
        let whose = Proc { rank, ..self.me.clone() };
        self.get_value(&whose, key, |value| {
            if value.kind != TYPE_BYTES {
                return None;
            }
            // SAFETY: the kind says which member of the union is valid.
            let found = unsafe { value.data.bytes };
            if found.bytes.is_null() || found.size > MAX_VALUE {
                return None;
            }
            // SAFETY: PMIx has allocated `size` bytes there, which live until the value is freed below.
            let bytes = unsafe { std::slice::from_raw_parts(found.bytes.cast::<u8>(), found.size) };
            bytes.get(1..).map(<[u8]>::to_vec)
        })
    }

    fn get_value<T>(
        &self,
        whose: &Proc,
        key: &CStr,
        read: impl FnOnce(&Value) -> Option<T>,
    ) -> Result<Option<T>, LaunchError> {
        let mut value: *mut Value = ptr::null_mut();
        // SAFETY: process, key and the place for the result are valid; no attributes are given.
        let status =
            unsafe { (self.functions.get)(whose, key.as_ptr(), ptr::null(), 0, &mut value) };
        if status != SUCCESS || value.is_null() {
            return Ok(None);
        }
        // SAFETY: after success PMIx has put a value there that belongs to the caller.
        let result = read(unsafe { &*value });
        if let Some(destruct) = self.functions.destruct {
            // SAFETY: the value is the caller's; destruct frees what it refers to, free the value itself,
            // which PMIx allocated with malloc.
            unsafe {
                destruct(value);
                libc::free(value.cast());
            }
        }
        Ok(result)
    }

    /// Ends the job.
    pub(crate) fn abort(&self, code: i32, message: &str) {
        let message = CString::new(message.replace('\0', " ")).unwrap_or_default();
        // SAFETY: the message is a C string; no processes means all of the job.
        unsafe { (self.functions.abort)(code, message.as_ptr(), ptr::null_mut(), 0) };
    }

    /// Leaves the job.
    pub(crate) fn finalize(&self) -> Result<(), LaunchError> {
        // SAFETY: no attributes are given.
        check("PMIx_Finalize", unsafe { (self.functions.finalize)(ptr::null(), 0) })
    }
}

// SAFETY: the functions of PMIx may be called from any thread, and the rest is plain data.
unsafe impl Send for Pmix {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layouts_are_those_of_the_standard() {
        assert_eq!((size_of::<Proc>(), size_of::<Value>(), size_of::<Info>()), (260, 40, 560));
        assert_eq!(std::mem::offset_of!(Value, data), 8);
        assert_eq!(std::mem::offset_of!(Info, value), 520);
    }
}
