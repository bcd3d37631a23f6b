//! Numbers that programs know, and the way entry points return them.

use libc::c_int;
use quipu::am::{CallError, Category, Error, Operation, Status};
use quipu_cabi::{CReturn, Errno};

pub(crate) const OK: c_int = 0;
pub(crate) const NOT_INIT: c_int = 1;
pub(crate) const BAD_ARG: c_int = 2;
pub(crate) const RESOURCE: c_int = 3;
pub(crate) const IN_USE: c_int = 5;

/// Returns an error code of Active Messages. A panic of the library is a lack of resources.
pub struct Code;

impl CReturn for Code {
    type Value = c_int;
    type Raw = c_int;
    #[inline]
    fn success(code: c_int) -> c_int {
        code
    }
    fn failure(_: Errno) -> c_int {
        RESOURCE
    }
    fn error(raw: &c_int) -> Option<Errno> {
        (*raw != OK).then_some(Errno(*raw))
    }
}

/// What the body of an entry point yields on failure: the code.
pub(crate) type Outcome<T = ()> = Result<T, c_int>;

/// The code of an outcome.
#[inline]
pub(crate) fn code(outcome: Outcome) -> Result<c_int, Errno> {
    Ok(outcome.err().unwrap_or(OK))
}

/// The code of an error of the engine.
#[cold]
pub(crate) fn code_of(error: &Error) -> c_int {
    match error {
        Error::Call(
            CallError::NotMapped(_) | CallError::TooMuch { .. } | CallError::NoSuchObject,
        ) => BAD_ARG,
        Error::Call(CallError::WouldBlock) => IN_USE,
        _ => RESOURCE,
    }
}

pub(crate) trait OrCode<T> {
    /// The value, or the code of the error.
    fn or_code(self) -> Outcome<T>;
}

impl<T> OrCode<T> for Result<T, Error> {
    #[inline]
    fn or_code(self) -> Outcome<T> {
        self.map_err(|error| code_of(&error))
    }
}

/// `op_t`
pub(crate) fn opcode(operation: Operation) -> c_int {
    let category = |category: Category| match category {
        Category::Short => 1,
        Category::Medium => 2,
        Category::Bulk => 3,
    };
    match operation {
        Operation::Request(of) => category(of),
        Operation::Reply(of) => 3 + category(of),
        // There are no gets in this dialect.
        Operation::Get => 3,
    }
}

/// The words of `AM_Request...`, for people.
pub(crate) fn name_of(operation: Operation) -> &'static str {
    match operation {
        Operation::Request(Category::Short) => "AM_REQUEST_M",
        Operation::Request(Category::Medium) => "AM_REQUEST_IM",
        Operation::Request(Category::Bulk) => "AM_REQUEST_XFER_M",
        Operation::Reply(Category::Short) => "AM_REPLY_M",
        Operation::Reply(Category::Medium) => "AM_REPLY_IM",
        Operation::Reply(Category::Bulk) => "AM_REPLY_XFER_M",
        Operation::Get => "AM_GET_XFER",
    }
}

/// `status_t`: the numbers of the engine are those of AM-II.
pub(crate) fn status(status: Status) -> c_int {
    status as c_int
}
