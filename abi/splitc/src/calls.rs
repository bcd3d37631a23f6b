//! The C functions that the header and programs call.
//!
//! # Safety
//! Those that take addresses: the header passes addresses and lengths that the program has named. The
//! language
//! lets programs name any. A panic ends the process, as it does in every `extern "C"` function.
#![allow(clippy::missing_safety_doc, reason = "it is the same for all, and stands above")]

use std::ffi::{c_char, c_double, c_int, c_long, c_uint, c_void};
use std::sync::Mutex;
use std::sync::atomic::Ordering;

use crate::collective::{combine_double, combine_long, reach};
use crate::link::{ALLOCATE, What, call_here, control};
use crate::runtime::{State, fail, runtime, start};
use crate::segment::BASE;

/// The version of the header that this library serves.
const VERSION: c_uint = 1;
/// Bits of an address in a global pointer.
const ADDRESS: u64 = (1 << 48) - 1;

/// Functions that allocate spread arrays.
static AT_START: Mutex<Vec<extern "C" fn()>> = Mutex::new(Vec::new());

/// Processor and address of a global pointer.
fn parts(bits: u64) -> (u32, u64) {
    ((bits >> 48) as u32, bits & ADDRESS)
}

/// The same of one that is about to be followed.
fn target(bits: u64) -> (u32, u64) {
    let (proc, at) = parts(bits);
    if at < 4096 {
        fail(&format!("a null pointer is followed: processor {proc}, address {at:#x}"));
    }
    (proc, at)
}

fn or_fail<T>(outcome: Result<T, String>) -> T {
    outcome.unwrap_or_else(|why| fail(&why))
}

/// Remembers a function that allocates a spread array, for before `splitc_main`.
#[unsafe(no_mangle)]
pub extern "C" fn quipu_sc_at_start(allocate: extern "C" fn()) {
    AT_START.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).push(allocate);
}

/// Joins the job, runs the program, and leaves the job. The exit code.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn quipu_sc_run(
    argc: c_int,
    argv: *mut *mut c_char,
    program: unsafe extern "C" fn(c_int, *mut *mut c_char) -> c_int,
    state: *mut *const State,
    version: c_uint,
) -> c_int {
    if version != VERSION {
        fail("the program was compiled for another version of libsplitc; compile it again");
    }
    // SAFETY: `state` is the program's variable `quipu_sc`.
    unsafe { *state = or_fail(start()) };
    unsafe extern "C" {
        static stdout: *mut libc::FILE;
    }
    // SAFETY: nothing was written yet. Lines of all processes come out as they are written.
    unsafe { libc::setvbuf(stdout, std::ptr::null_mut(), libc::_IOLBF, 1 << 16) };
    let functions =
        std::mem::take(&mut *AT_START.lock().unwrap_or_else(|poisoned| poisoned.into_inner()));
    functions.iter().for_each(|allocate| allocate());
    barrier();
    // SAFETY: the program's own function, with the arguments of main. It may return no value at all.
    unsafe { program(argc, argv) };
    sync();
    barrier();
    // SAFETY: a null pointer means all streams.
    unsafe { libc::fflush(std::ptr::null_mut()) };
    runtime().leave();
    0
}

/// Runs what other processes have sent.
#[unsafe(no_mangle)]
pub extern "C" fn quipu_sc_poll() {
    runtime().poll();
}

/// Reads memory that is not mapped.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn quipu_sc_read_far(to: *mut c_void, from: u64, size: u64) {
    // SAFETY: as the caller's.
    unsafe { quipu_sc_get_far(to, from, size) };
    runtime().finish();
}

/// Begins to read it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn quipu_sc_get_far(to: *mut c_void, from: u64, size: u64) {
    let (proc, at) = target(from);
    let link = runtime().link_to(proc as usize);
    runtime().state.under_way.set(1);
    or_fail(link.read(to.cast(), (proc, at), size as usize));
}

/// Writes to memory that is not mapped.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn quipu_sc_write_far(to: u64, from: *const c_void, size: u64) {
    // SAFETY: as the caller's; the bytes stay as they are until it is over.
    unsafe { quipu_sc_bulk_put_far(to, from, size) };
    runtime().finish();
}

/// Begins to write to it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn quipu_sc_put_far(to: u64, from: *const c_void, size: u64) {
    // SAFETY: as the caller's.
    unsafe { send(What::Write, to, from, size) };
}

/// Begins to write to it from memory that stays as it is until the next sync.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn quipu_sc_bulk_put_far(to: u64, from: *const c_void, size: u64) {
    let to = target(to);
    runtime().state.under_way.set(1);
    let link = runtime().link_to(to.0 as usize);
    // SAFETY: the program names these bytes.
    or_fail(unsafe { link.write_from(to, from.cast(), size as usize) });
}

/// Stores to memory that is not mapped.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn quipu_sc_store_far(to: u64, from: *const c_void, size: u64) {
    let (proc, at) = target(to);
    if proc as usize == runtime().me() {
        // SAFETY: the program names this memory, which is its own.
        unsafe { std::ptr::copy(from.cast::<u8>(), at as *mut u8, size as usize) };
        control().stored.fetch_add(size, Ordering::Release);
        return;
    }
    // SAFETY: as the caller's.
    unsafe { send(What::Store, to, from, size) };
}

unsafe fn send(what: What, to: u64, from: *const c_void, size: u64) {
    let (proc, at) = target(to);
    // SAFETY: the program names these bytes.
    let bytes = unsafe { std::slice::from_raw_parts(from.cast::<u8>(), size as usize) };
    runtime().state.under_way.set(1);
    or_fail(runtime().link_to(proc as usize).write(what, (proc, at), bytes));
}

fn call(is_double: bool, function: u64, at: u64, numbers: [i64; 4]) -> u64 {
    let ((proc, at), runtime) = (parts(at), runtime());
    if proc as usize == runtime.me() {
        return call_here(is_double, function, at, numbers);
    }
    let link = runtime.link_to(proc as usize);
    let what = if is_double { What::CallDouble } else { What::Call };
    let before = or_fail(link.call(what, (proc, at), function, numbers));
    runtime.wait_until(|| link.result(before).is_some());
    link.result(before).unwrap_or(0)
}

/// Runs a function at the owner of an address; its result.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn quipu_sc_atomic_call(
    function: u64,
    at: u64,
    a: c_long,
    b: c_long,
    c: c_long,
    d: c_long,
) -> c_long {
    call(false, function, at, [a, b, c, d]) as c_long
}

/// The same of a function that returns a `double`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn quipu_sc_atomic_call_double(
    function: u64,
    at: u64,
    a: c_long,
    b: c_long,
    c: c_long,
    d: c_long,
) -> c_double {
    f64::from_bits(call(true, function, at, [a, b, c, d]))
}

/// For `fetch_and_add`: runs at the owner.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn quipu_sc_fetch_and_add(at: *mut c_int, by: c_long) -> c_int {
    // SAFETY: the program names this integer.
    unsafe {
        let old = at.read_volatile();
        at.write_volatile(old.wrapping_add(by as c_int));
        old
    }
}

/// For `exchange` and `test_and_set`: runs at the owner.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn quipu_sc_exchange(at: *mut c_int, value: c_long) -> c_int {
    // SAFETY: the program names this integer.
    unsafe {
        let old = at.read_volatile();
        at.write_volatile(value as c_int);
        old
    }
}

/// For `cmp_swap`: runs at the owner.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn quipu_sc_compare_and_swap(
    at: *mut c_int,
    expected: c_long,
    value: c_long,
) -> c_int {
    // SAFETY: the program names this integer.
    unsafe {
        let old = at.read_volatile();
        if old == expected as c_int {
            at.write_volatile(value as c_int);
        }
        old
    }
}

/// Allocates blocks that go round the processors, in all processes at once. A spread pointer to the first.
#[unsafe(no_mangle)]
pub extern "C" fn quipu_sc_spread_malloc(count: c_long, size: u64) -> u64 {
    let runtime = runtime();
    let len = blocks_len(count, size);
    let Some(at) = len.and_then(|len| runtime.heap.borrow_mut().allocate(len)) else {
        no_memory(count, size);
    };
    BASE as u64 + at
}

/// Bytes of each process that blocks take.
fn blocks_len(count: c_long, size: u64) -> Option<u64> {
    let rows = u64::try_from(count).ok()?.div_ceil(runtime().procs() as u64);
    rows.checked_mul(size)
}

fn no_memory(count: c_long, size: u64) -> ! {
    let megabytes = runtime().memory_len() >> 20;
    fail(&format!(
        "{count} blocks of {size} bytes do not fit the symmetric memory of {megabytes} MB for each process; \
         QUIPU_SPLITC_HEAP sets how many megabytes there are"
    ))
}

/// Frees them, in all processes at once.
#[unsafe(no_mangle)]
pub extern "C" fn quipu_sc_spread_free(at: u64) {
    let runtime = runtime();
    let (_, address) = parts(at);
    if address == 0 {
        return;
    }
    runtime.finish();
    runtime.barrier();
    if !runtime.heap.borrow_mut().free(address.wrapping_sub(BASE as u64)) {
        fail(&format!(
            "all_spread_free got the address {address:#x}, which all_spread_malloc has not given"
        ));
    }
}

/// Allocates memory of one process. A global pointer to it.
#[unsafe(no_mangle)]
pub extern "C" fn quipu_sc_malloc_at(proc: c_int, size: u64) -> u64 {
    let runtime = runtime();
    if proc as usize >= runtime.procs() {
        fail(&format!("g_malloc got processor {proc}, and there are {}", runtime.procs()));
    }
    let owner = (proc as u64) << 48;
    let at = call(false, ALLOCATE, owner, [size as i64, 0, 0, 0]);
    if at == 0 { 0 } else { owner | at & ADDRESS }
}

/// Makes an automatic spread array, in all processes at once. A spread pointer to its first block.
#[unsafe(no_mangle)]
pub extern "C" fn quipu_sc_stack_push(count: c_long, size: u64) -> u64 {
    let runtime = runtime();
    // Everybody has left the blocks of arrays that lay there before.
    runtime.finish();
    runtime.barrier();
    let len = blocks_len(count, size);
    let Some(at) = len.and_then(|len| runtime.heap.borrow_mut().push(len)) else {
        no_memory(count, size);
    };
    BASE as u64 + at
}

/// Ends the life of the last one.
#[unsafe(no_mangle)]
pub extern "C" fn quipu_sc_stack_pop() {
    runtime().heap.borrow_mut().pop();
}

/// The values of a reduction that this process combines, in the order of the processes.
fn shown(value: [u8; 8], how: c_int) -> impl Iterator<Item = [u8; 8]> {
    let runtime = runtime();
    let shown = runtime.exchange(&value).into_iter();
    let values = shown.filter_map(|bytes| bytes.first_chunk().copied());
    values.take(reach(how, runtime.me(), runtime.procs()))
}

/// A reduction or scan of integers; `how`: the result is for process 0 (0), for all (1), or a scan (2).
#[unsafe(no_mangle)]
pub extern "C" fn quipu_sc_reduce_long(op: c_int, value: c_long, how: c_int) -> c_long {
    let values = shown(value.to_le_bytes(), how).map(i64::from_le_bytes);
    values.reduce(|a, b| combine_long(op, a, b)).unwrap_or(value)
}

/// The same of numbers with fractions.
#[unsafe(no_mangle)]
pub extern "C" fn quipu_sc_reduce_double(op: c_int, value: c_double, how: c_int) -> c_double {
    let values = shown(value.to_le_bytes(), how).map(f64::from_le_bytes);
    values.reduce(|a, b| combine_double(op, a, b)).unwrap_or(value)
}

/// Gives all processes the bytes of process 0.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn quipu_sc_broadcast(at: *mut c_void, size: u64) {
    // SAFETY: the program names these bytes.
    let bytes = unsafe { std::slice::from_raw_parts_mut(at.cast::<u8>(), size as usize) };
    runtime().broadcast(bytes);
}

/// Ends the whole job.
#[unsafe(no_mangle)]
pub extern "C" fn quipu_sc_abort(code: c_int) {
    runtime().abort(code)
}

/// Waits until all processes are here.
#[unsafe(no_mangle)]
pub extern "C" fn barrier() {
    runtime().barrier();
}

/// Waits until all gets and puts of this process are done.
#[unsafe(no_mangle)]
pub extern "C" fn sync() {
    runtime().finish();
}

/// Whether they are.
#[unsafe(no_mangle)]
pub extern "C" fn is_sync() -> c_int {
    let runtime = runtime();
    runtime.poll();
    runtime.is_quiet().into()
}

/// Waits until `bytes` more bytes were stored into this process.
#[unsafe(no_mangle)]
pub extern "C" fn store_sync(bytes: c_int) {
    let bytes = u64::try_from(bytes).unwrap_or(0);
    runtime().wait_until(|| control().stored.load(Ordering::Acquire) >= bytes);
    control().stored.fetch_sub(bytes, Ordering::Relaxed);
}

/// Whether they were, without taking them.
#[unsafe(no_mangle)]
pub extern "C" fn is_store_sync(bytes: c_int) -> c_int {
    runtime().poll();
    (control().stored.load(Ordering::Acquire) >= u64::try_from(bytes).unwrap_or(0)).into()
}

/// Forgets the bytes that were stored here.
#[unsafe(no_mangle)]
pub extern "C" fn reset_store_sync() {
    control().stored.store(0, Ordering::Relaxed);
}

/// Waits until all stores of all processes before it are in their places.
#[unsafe(no_mangle)]
pub extern "C" fn all_store_sync() {
    let runtime = runtime();
    // Each store to memory that is not mapped is acknowledged.
    runtime.finish_stores();
    runtime.barrier();
    control().stored.store(0, Ordering::Relaxed);
    // Nobody stores again before all have forgotten what came before.
    runtime.barrier();
}

/// Seconds since the program began.
#[unsafe(no_mangle)]
pub extern "C" fn get_seconds() -> c_double {
    runtime().seconds()
}
