//! Calling functions of the program.

use libc::{c_int, c_void};

/// A function of the program: its address, which handlers are known by.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Function(pub(crate) usize);

/// An argument of a handler, whatever its place.
macro_rules! argument {
    ($place:literal) => {
        c_int
    };
}

/// Calls a function with leading arguments and these of the integers.
macro_rules! call_with {
    ($address:expr, $args:expr, ($($lead:expr => $kind:ty),*), [$($place:literal)*]) => {{
        // SAFETY: the program has set this function as the handler of messages of this kind, and
        // sends such with as many arguments as it takes.
        unsafe {
            let function: unsafe extern "C" fn($($kind,)* $(argument!($place)),*) =
                std::mem::transmute($address);
            function($($lead,)* $($args[$place]),*);
        }
    }};
}

/// The same with one of several lists.
macro_rules! call_one {
    ($address:expr, $args:expr, $lead:tt, $($count:literal: $places:tt)*) => {
        match $args.len() {
            $($count => call_with!($address, $args, $lead, $places),)*
            _ => {}
        }
    };
}

/// The same, for all counts.
macro_rules! call {
    ($address:expr, $args:expr, $lead:tt) => {
        call_one!($address, $args, $lead,
            0: [] 1: [0] 2: [0 1] 3: [0 1 2] 4: [0 1 2 3] 5: [0 1 2 3 4] 6: [0 1 2 3 4 5]
            7: [0 1 2 3 4 5 6] 8: [0 1 2 3 4 5 6 7] 9: [0 1 2 3 4 5 6 7 8]
            10: [0 1 2 3 4 5 6 7 8 9] 11: [0 1 2 3 4 5 6 7 8 9 10]
            12: [0 1 2 3 4 5 6 7 8 9 10 11] 13: [0 1 2 3 4 5 6 7 8 9 10 11 12]
            14: [0 1 2 3 4 5 6 7 8 9 10 11 12 13] 15: [0 1 2 3 4 5 6 7 8 9 10 11 12 13 14]
            16: [0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15])
    };
}

impl Function {
    /// Calls the handler of a short message.
    #[inline]
    pub(crate) fn short(self, token: *mut c_void, args: &[c_int]) {
        call!(self.0, args, (token => *mut c_void));
    }

    /// Calls the handler of a message with a payload.
    #[inline]
    pub(crate) fn with_payload(
        self,
        token: *mut c_void,
        payload: *mut c_void,
        len: c_int,
        args: &[c_int],
    ) {
        call!(self.0, args, (token => *mut c_void, payload => *mut c_void, len => c_int));
    }

    /// Calls the handler of messages that came back.
    pub(crate) fn returned(self, status: c_int, opcode: c_int, token: *mut c_void) {
        // SAFETY: the program has set this function as handler 0.
        let function: unsafe extern "C" fn(c_int, c_int, *mut c_void) =
            unsafe { std::mem::transmute(self.0) };
        // SAFETY: as above.
        unsafe { function(status, opcode, token) };
    }
}
