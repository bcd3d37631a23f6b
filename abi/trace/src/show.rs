//! How arguments become values.

use std::ffi::CStr;

use libc::{c_char, c_void};
use quipu_cabi::Errno;

use crate::call::Call;
use crate::value::Value;

/// What can be an argument or a result of an entry point.
pub trait Show {
    /// The value under that name.
    ///
    /// # Safety
    ///
    /// A pointer is as the function of `call` demands.
    unsafe fn show(&self, call: &Call<'_>, name: &str) -> Value;

    /// The value as a result, if there is one.
    ///
    /// # Safety
    ///
    /// A pointer came from the function of `call`.
    unsafe fn show_result(&self, call: &Call<'_>) -> Option<Value> {
        // SAFETY: passed on from the caller.
        Some(unsafe { self.show(call, "") })
    }

    /// The number, if it is one.
    fn number(&self) -> Option<i128> {
        None
    }

    /// The address, if it is one.
    fn pointer(&self) -> Option<*const c_void> {
        None
    }

    /// Whether it is shown after the call rather than before.
    fn is_output(&self, _call: &Call<'_>, _name: &str) -> bool {
        false
    }
}

/// Parts of the names of arguments that are addresses, keys or bits.
const HEX: [&str; 8] = ["addr", "key", "iova", "access", "mask", "flags", "handle", "qpn"];
/// Names of arguments that are lengths though they sound like addresses.
const DECIMAL: [&str; 1] = ["addr_len"];

macro_rules! integers {
    ($($of:ty),*) => {$(
        impl Show for $of {
            unsafe fn show(&self, _: &Call<'_>, name: &str) -> Value {
                let is_hex = HEX.iter().any(|part| name.contains(part)) && !DECIMAL.contains(&name);
                if is_hex { Value::Hex(*self as u64) } else { Value::Number(*self as i128) }
            }
            fn number(&self) -> Option<i128> {
                Some(*self as i128)
            }
        }
    )*};
}

integers!(i8, u8, i16, u16, i32, u32, i64, u64, isize, usize);

impl Show for () {
    unsafe fn show(&self, _: &Call<'_>, _: &str) -> Value {
        Value::Null
    }
    unsafe fn show_result(&self, _: &Call<'_>) -> Option<Value> {
        None
    }
}

/// What a pointer of an entry point can name. Most are shown as an address.
pub trait Pointee: Sized {
    /// Whether it is always a place for an output.
    const OUTPUT: bool = false;

    /// What is there, if that is to be shown.
    ///
    /// # Safety
    ///
    /// `this` is valid for reads as the function of `call` demands, or the function has filled it.
    unsafe fn describe(_this: *const Self, _call: &Call<'_>) -> Option<Value> {
        None
    }

    /// The same where the program may not expect it to be written to.
    ///
    /// # Safety
    ///
    /// As [`Pointee::describe`].
    unsafe fn describe_input(this: *const Self, call: &Call<'_>) -> Option<Value> {
        // SAFETY: passed on from the caller.
        unsafe { Self::describe(this, call) }
    }

    /// What is told of a new object.
    ///
    /// # Safety
    ///
    /// `this` came from a function that has just made it.
    unsafe fn describe_new(_this: *const Self) -> Vec<(&'static str, Value)> {
        Vec::new()
    }
}

/// What is at an address, if so much can be read there: a call that is refused may have been given less than
/// it says. The kernel is asked; where a sandbox forbids that, the program is trusted.
///
/// # Safety
///
/// Every bit pattern is a valid `T`.
pub(crate) unsafe fn peek<T: Copy>(from: *const T, count: usize) -> Option<Vec<T>> {
    let mut read: Vec<T> = Vec::with_capacity(count);
    let bytes = size_of::<T>() * count;
    let here = libc::iovec { iov_base: read.as_mut_ptr().cast(), iov_len: bytes };
    let there = libc::iovec { iov_base: from.cast_mut().cast(), iov_len: bytes };
    // SAFETY: the kernel writes into the room of the vector, and reads what may be read.
    let asked = unsafe { libc::process_vm_readv(libc::getpid(), &here, 1, &there, 1, 0) };
    let forbidden = asked < 0 && [Errno::EPERM, Errno::ENOSYS].contains(&Errno::last());
    if forbidden {
        // SAFETY: passed on from the program, which is trusted; the vector has the room.
        unsafe { from.cast::<u8>().copy_to_nonoverlapping(read.as_mut_ptr().cast(), bytes) };
    } else if asked != bytes as isize {
        return None;
    }
    // SAFETY: all were written, and every bit pattern is valid.
    unsafe { read.set_len(count) };
    Some(read)
}

/// A pointer as an address.
fn address<T>(pointer: *const T) -> Value {
    if pointer.is_null() { Value::Null } else { Value::Hex(pointer.addr() as u64) }
}

impl<T: Pointee> Show for *const T {
    unsafe fn show(&self, call: &Call<'_>, _: &str) -> Value {
        if self.is_null() || call.ends() {
            return address(*self);
        }
        // SAFETY: passed on from the caller.
        unsafe { T::describe_input(*self, call) }.unwrap_or_else(|| address(*self))
    }
}

/// The pointer to the first request that could not be posted: filled where others are not.
const BAD: &str = "bad";

impl<T: Pointee> Show for *mut T {
    unsafe fn show(&self, call: &Call<'_>, name: &str) -> Value {
        let unfilled = self.is_output(call, name) && call.failed() != (name == BAD);
        if self.is_null() || call.ends() || unfilled {
            return address(*self);
        }
        // SAFETY: passed on from the caller; an output has been filled.
        unsafe { T::describe(*self, call) }.unwrap_or_else(|| address(*self))
    }

    unsafe fn show_result(&self, _: &Call<'_>) -> Option<Value> {
        if self.is_null() {
            return Some(Value::Null);
        }
        // SAFETY: passed on from the caller.
        let mut fields = unsafe { T::describe_new(*self) };
        if fields.is_empty() {
            return Some(address(*self));
        }
        fields.insert(0, ("address", address(*self)));
        Some(Value::Record(fields))
    }

    fn pointer(&self) -> Option<*const c_void> {
        Some(self.cast_const().cast())
    }

    fn is_output(&self, call: &Call<'_>, _: &str) -> bool {
        T::OUTPUT || call.asks()
    }
}

/// What is only ever shown as an address.
macro_rules! opaque {
    ($($of:ty),* $(,)?) => { $(impl $crate::show::Pointee for $of {})* };
}
pub(crate) use opaque;

opaque!(libc::epoll_event, libc::fd_set, libc::pollfd, libc::timeval, libc::msghdr, libc::iovec);

/// Numbers that a function fills in.
macro_rules! outputs {
    ($($of:ty),*) => {$(
        impl Pointee for $of {
            const OUTPUT: bool = true;
            unsafe fn describe(this: *const Self, call: &Call<'_>) -> Option<Value> {
                // SAFETY: passed on from the caller.
                Some(Value::List(vec![unsafe { (*this).show(call, "") }]))
            }
        }
    )*};
}

outputs!(i32, u16, u32, u64);

impl<T: Pointee> Pointee for *mut T {
    const OUTPUT: bool = true;

    unsafe fn describe(this: *const Self, call: &Call<'_>) -> Option<Value> {
        // SAFETY: passed on from the caller: it was filled, with null or something valid.
        unsafe { Some(Value::List(vec![(*this).show(call, "")])) }
    }
}

impl Pointee for c_char {
    /// A string that a program passes. Places for one are not followed.
    unsafe fn describe_input(this: *const Self, _: &Call<'_>) -> Option<Value> {
        // SAFETY: passed on from the caller: it ends with a zero.
        let text = unsafe { CStr::from_ptr(this) };
        Some(Value::Text(text.to_string_lossy().into_owned()))
    }

    unsafe fn describe_new(this: *const Self) -> Vec<(&'static str, Value)> {
        // SAFETY: functions that return a string return one that ends with a zero.
        let text = unsafe { CStr::from_ptr(this) };
        vec![("text", Value::Text(text.to_string_lossy().into_owned()))]
    }
}
