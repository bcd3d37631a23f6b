//! What a target's code did with an input: the counters of LLVM's sanitizer coverage, one for each edge of
//! the control flow, and the operands of comparisons. Without the instrumentation there are none.

use std::sync::atomic::{AtomicPtr, AtomicU64, AtomicUsize, Ordering::Relaxed};

/// Operands that are kept, a power of two.
const OPERANDS: usize = 1024;
/// How often an edge was taken, in classes: 1, 2, 3, from 4, 8, 16, 32 and 128 on.
pub(crate) const CLASSES: usize = 8;

static START: AtomicPtr<u8> = AtomicPtr::new(std::ptr::null_mut());
static LEN: AtomicUsize = AtomicUsize::new(0);
static COMPARED: [AtomicU64; OPERANDS] = [const { AtomicU64::new(0) }; OPERANDS];
static NEXT: AtomicUsize = AtomicUsize::new(0);

/// Called by instrumented code before `main`, with the counters of the program.
#[unsafe(no_mangle)]
pub extern "C" fn __sanitizer_cov_8bit_counters_init(start: *mut u8, stop: *mut u8) {
    START.store(start, Relaxed);
    LEN.store((stop as usize).wrapping_sub(start as usize), Relaxed);
}

/// An operand that is a constant: what an input should have somewhere.
#[inline(always)]
fn note(constant: u64) {
    let index = NEXT.load(Relaxed);
    NEXT.store(index.wrapping_add(1), Relaxed);
    COMPARED[index % OPERANDS].store(constant, Relaxed);
}

macro_rules! comparisons {
    ($($name:ident $constant:ident $word:ty,)*) => {$(
        /// Two values are compared.
        #[unsafe(no_mangle)]
        pub extern "C" fn $name(_left: $word, _right: $word) {}

        /// A constant is compared to a value.
        #[unsafe(no_mangle)]
        pub extern "C" fn $constant(constant: $word, _value: $word) {
            note(constant.into());
        }
    )*};
}

comparisons! {
    __sanitizer_cov_trace_cmp1 __sanitizer_cov_trace_const_cmp1 u8,
    __sanitizer_cov_trace_cmp2 __sanitizer_cov_trace_const_cmp2 u16,
    __sanitizer_cov_trace_cmp4 __sanitizer_cov_trace_const_cmp4 u32,
    __sanitizer_cov_trace_cmp8 __sanitizer_cov_trace_const_cmp8 u64,
}

/// A value chooses among constants.
#[unsafe(no_mangle)]
pub extern "C" fn __sanitizer_cov_trace_switch(_value: u64, cases: *const u64) {
    // SAFETY: LLVM gives the number of the cases, the width of the value, and the cases.
    unsafe {
        let count = *cases as usize;
        if count > 0 {
            note(*cases.add(2 + NEXT.load(Relaxed) % count));
        }
    }
}

/// Whether the target is instrumented.
pub(crate) fn is_there() -> bool {
    LEN.load(Relaxed) > 0
}

/// A constant that was compared to something lately, or 0.
pub(crate) fn constant(index: usize) -> u64 {
    COMPARED[index % OPERANDS].load(Relaxed)
}

/// The counters of the program.
fn counters() -> &'static mut [u8] {
    let (start, len) = (START.load(Relaxed), LEN.load(Relaxed));
    if len == 0 {
        return &mut [];
    }
    // SAFETY: the linker gives `len` bytes to the counters, for as long as the program runs. The target runs
    // on the thread that calls this, not at the same time; other threads count in plain stores, which may be
    // lost.
    unsafe { std::slice::from_raw_parts_mut(start, len) }
}

/// Forgets what was counted.
pub(crate) fn reset() {
    counters().fill(0);
}

/// Tells `see` of each feature since the last reset: an edge, and the class of how often it was taken.
pub(crate) fn features(mut see: impl FnMut(usize)) {
    let counters = counters();
    let (words, rest) = counters.as_chunks::<8>();
    for (word, counters) in words.iter().enumerate() {
        // Most edges are not taken.
        if u64::from_ne_bytes(*counters) != 0 {
            see_word(word * 8, counters, &mut see);
        }
    }
    see_word(words.len() * 8, rest, &mut see);
}

fn see_word(from: usize, counters: &[u8], see: &mut impl FnMut(usize)) {
    for (at, &count) in counters.iter().enumerate().filter(|&(_, &count)| count > 0) {
        see((from + at) * CLASSES + class(count));
    }
}

/// How many features there can be.
pub(crate) fn most_features() -> usize {
    LEN.load(Relaxed) * CLASSES
}

fn class(count: u8) -> usize {
    match count {
        0..=3 => usize::from(count.max(1)) - 1,
        4..=7 => 3,
        8..=15 => 4,
        16..=31 => 5,
        32..=127 => 6,
        128.. => 7,
    }
}
