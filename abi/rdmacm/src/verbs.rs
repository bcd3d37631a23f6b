//! The calls of libibverbs that this library makes, found in the file beside its own when they are
//! first needed. (It is not named in DT_NEEDED for the reason that [`quipu_facade`] gives.)

use std::io::Write;
use std::mem::offset_of;
use std::sync::OnceLock;

use libc::{c_char, c_int, c_void};
use quipu_abi_types::*;
use quipu_cabi::{Errno, symbol_beside};

const FILE_NAME: &str = "libibverbs.so.1";

macro_rules! verbs {
    ($($name:ident($($ty:ty),*) $(-> $ret:ty)?;)*) => {
        /// The table.
        pub(crate) struct Verbs {
            $(pub(crate) $name: unsafe extern "C" fn($($ty),*) $(-> $ret)?,)*
        }

        fn load() -> Result<Verbs, String> {
            $(let $name = find(concat!("ibv_", stringify!($name)))?;)*
            // SAFETY: each symbol has the type that its manual page says, in the library that was
            // built together with this one; that library stays loaded.
            Ok(unsafe {
                Verbs { $($name: std::mem::transmute::<
                    *mut c_void,
                    unsafe extern "C" fn($($ty),*) $(-> $ret)?,
                >($name),)* }
            })
        }
    };
}

verbs! {
    get_device_list(*mut c_int) -> *mut *mut ibv_device;
    free_device_list(*mut *mut ibv_device);
    open_device(*mut ibv_device) -> *mut ibv_context;
    query_device(*mut ibv_context, *mut ibv_device_attr) -> c_int;
    alloc_pd(*mut ibv_context) -> *mut ibv_pd;
    dealloc_pd(*mut ibv_pd) -> c_int;
    create_comp_channel(*mut ibv_context) -> *mut ibv_comp_channel;
    destroy_comp_channel(*mut ibv_comp_channel) -> c_int;
    create_cq(*mut ibv_context, c_int, *mut c_void, *mut ibv_comp_channel, c_int) -> *mut ibv_cq;
    destroy_cq(*mut ibv_cq) -> c_int;
    create_srq(*mut ibv_pd, *mut ibv_srq_init_attr) -> *mut ibv_srq;
    destroy_srq(*mut ibv_srq) -> c_int;
    create_qp(*mut ibv_pd, *mut ibv_qp_init_attr) -> *mut ibv_qp;
    modify_qp(*mut ibv_qp, *mut ibv_qp_attr, c_int) -> c_int;
    destroy_qp(*mut ibv_qp) -> c_int;
    query_ece(*mut ibv_qp, *mut ibv_ece) -> c_int;
    set_ece(*mut ibv_qp, *mut ibv_ece) -> c_int;
    attach_mcast(*mut ibv_qp, *const ibv_gid, u16) -> c_int;
    detach_mcast(*mut ibv_qp, *const ibv_gid, u16) -> c_int;
    reg_mr(*mut ibv_pd, *mut c_void, usize, c_int) -> *mut ibv_mr;
    dereg_mr(*mut ibv_mr) -> c_int;
    get_cq_event(*mut ibv_comp_channel, *mut *mut ibv_cq, *mut *mut c_void) -> c_int;
    ack_cq_events(*mut ibv_cq, u32);
}

static VERBS: OnceLock<Option<Verbs>> = OnceLock::new();

/// The calls.
///
/// # Errors
///
/// ENODEV where the library cannot be loaded; why was written to standard error, once.
pub(crate) fn verbs() -> Result<&'static Verbs, Errno> {
    let loaded = VERBS.get_or_init(|| {
        let complain = |why: &String| {
            let _ = writeln!(std::io::stderr(), "quipu: no RDMA device: {why}");
        };
        load().inspect_err(complain).ok()
    });
    loaded.as_ref().ok_or(Errno::ENODEV)
}

fn find(symbol: &str) -> Result<*mut c_void, String> {
    symbol_beside((&raw const VERBS).cast(), FILE_NAME, symbol)
}

/// The result of a call that returns an error number.
pub(crate) fn number(result: c_int) -> Result<(), Errno> {
    if result == 0 { Ok(()) } else { Err(Errno(result)) }
}

/// The result of a call that returns a pointer, or null with `errno` set.
pub(crate) fn pointer<T>(result: *mut T) -> Result<*mut T, Errno> {
    if result.is_null() { Err(Errno::last()) } else { Ok(result) }
}

/// The extended table of a context, as the inline functions of verbs.h find it.
///
/// # Safety
///
/// `context` is one of libibverbs.
pub(crate) unsafe fn extended<'a>(context: *mut ibv_context) -> &'a verbs_context {
    // SAFETY: every context of our libibverbs is the last member of a verbs_context.
    unsafe { &*context.wrapping_byte_sub(offset_of!(verbs_context, context)).cast() }
}

/// The zero-terminated text in an array; the whole of it if there is no zero.
pub(crate) fn text(name: &[c_char]) -> &[c_char] {
    let end = name.iter().position(|byte| *byte == 0).unwrap_or(name.len());
    &name[..end]
}
