//! Requests, replies, and the tokens of messages.

use std::cell::Cell;
use std::marker::PhantomData;
use std::ptr::null;

use libc::{c_int, c_void};
use quipu::am::{Arg, CallError, Error, MAX_ARGS, Message, Source};
use quipu_cabi::entry;

use crate::bundle::give;
use crate::codes::{BAD_ARG, Code, IN_USE, NOT_INIT, OrCode, Outcome, RESOURCE, code};
use crate::endpoint::{Private, en_t, endpoint, ep_t};
use crate::process::{MAX_LONG, MAX_MEDIUM, is_initialised, length};

thread_local! {
    /// The message whose handler this thread runs.
    static TOP: Cell<*const Frame> = const { Cell::new(null()) };
}

/// A message whose handler runs: its address is the token that the program gets.
pub(crate) struct Frame {
    message: Cell<*mut c_void>,
    endpoint: usize,
    below: *const Frame,
}

/// Takes the message off, whatever ends the handler.
struct Entered(*const Frame);

impl Drop for Entered {
    fn drop(&mut self) {
        TOP.set(self.0);
    }
}

impl Frame {
    /// Runs a function with the token of a message.
    #[inline]
    pub(crate) fn with(message: &mut Message<'_>, endpoint: usize, run: impl FnOnce(*mut c_void)) {
        let message: *mut Message<'_> = message;
        let frame = Frame { message: Cell::new(message.cast()), endpoint, below: TOP.get() };
        let _entered = Entered(TOP.get());
        let address: *const Frame = &frame;
        TOP.set(address);
        run(address.cast_mut().cast());
    }

    /// The frame of a token, if its handler runs in this thread now.
    #[inline]
    fn of<'a>(token: *const c_void) -> Option<&'a Frame> {
        let mut frame = TOP.get();
        while !frame.is_null() {
            // SAFETY: frames in the list are those of functions that this thread is in.
            let known = unsafe { &*frame };
            if std::ptr::eq(frame.cast(), token) {
                return Some(known);
            }
            frame = known.below;
        }
        None
    }
}

/// Uses the message of a token.
#[inline]
pub(crate) fn with_message<T>(
    token: *const c_void,
    failed: c_int,
    run: impl FnOnce(&mut Message<'_>) -> Outcome<T>,
) -> Outcome<T> {
    let frame = Frame::of(token).ok_or(failed)?;
    let address: *mut Message<'_> = frame.message.get().cast();
    if address.is_null() {
        // A call with this token is under way already.
        return Err(failed);
    }
    /// Gives the message back to its frame.
    struct Back<'a>(&'a Frame, *mut c_void, PhantomData<&'a ()>);
    impl Drop for Back<'_> {
        fn drop(&mut self) {
            self.0.message.set(self.1);
        }
    }
    let _back = Back(frame, frame.message.replace(std::ptr::null_mut()), PhantomData);
    // SAFETY: `with` has a unique borrow of the message while its frame is in the list, and lends
    // it to one call at a time: the address is null meanwhile.
    run(unsafe { &mut *address })
}

/// The arguments of a message.
///
/// # Safety
///
/// `args` is null, or `count` integers.
#[inline]
pub(crate) unsafe fn arguments(
    count: c_int,
    args: *const Arg,
) -> Outcome<([Arg; MAX_ARGS], usize)> {
    let count = usize::try_from(count).ok().filter(|count| *count <= MAX_ARGS).ok_or(BAD_ARG)?;
    let mut out = [0; MAX_ARGS];
    if count > 0 {
        if args.is_null() {
            return Err(BAD_ARG);
        }
        // SAFETY: the caller promises `count` integers, and there is room for as many.
        unsafe { std::ptr::copy_nonoverlapping(args, out.as_mut_ptr(), count) };
    }
    Ok((out, count))
}

/// Bytes of the program that a medium message is to carry.
///
/// # Safety
///
/// `from` is null, or `len` bytes that nobody changes during the call.
unsafe fn bytes<'a>(from: *const c_void, len: c_int) -> Outcome<&'a [u8]> {
    let len = length(len, MAX_MEDIUM)?;
    if from.is_null() {
        return Err(BAD_ARG);
    }
    // SAFETY: passed on from the caller.
    Ok(unsafe { std::slice::from_raw_parts(from.cast(), len) })
}

/// Memory of the program that a bulk message is to carry.
fn source(known: &Private, from: *const c_void, len: c_int) -> Outcome<Source> {
    let len = length(len, MAX_LONG)?;
    if from.is_null() {
        return Err(BAD_ARG);
    }
    Ok(Source::new(from as u64, len as u64, known.key))
}

fn index(value: c_int) -> Outcome<u32> {
    u32::try_from(value).map_err(|_| BAD_ARG)
}

/// What an endpoint to which the program sends a message says of itself.
///
/// # Safety
///
/// As [`endpoint`].
#[inline]
unsafe fn sender<'a>(raw: ep_t) -> Outcome<&'a Private> {
    // SAFETY: passed on from the caller.
    unsafe { endpoint(raw) }.map_err(|failed| if is_initialised() { failed } else { NOT_INIT })
}

/// The endpoint whose handler a token is of.
fn endpoint_of<'a>(token: *const c_void) -> Outcome<&'a Private> {
    let frame = Frame::of(token).ok_or(RESOURCE)?;
    // SAFETY: it was an endpoint when its handler was set, and is not freed while that runs.
    unsafe { endpoint(frame.endpoint as ep_t) }
}

entry! {
    /// `AM_RequestM`
    fn AMX_Request(raw: ep_t, to: c_int, handler: u8, count: c_int, args: *const Arg) -> Code {
        // SAFETY: the program passes an endpoint, and as many arguments as it says.
        let (known, args) = unsafe { (sender(raw), arguments(count, args)) };
        code((|| {
            let (known, (args, count)) = (known?, args?);
            known.endpoint.request(index(to)?, handler.into(), &args[..count]).or_code()
        })())
    }

    /// `AM_RequestIM`
    fn AMX_RequestI(
        raw: ep_t, to: c_int, handler: u8, from: *const c_void, len: c_int, count: c_int,
        args: *const Arg,
    ) -> Code {
        // SAFETY: as above, and `len` bytes.
        let (known, args) = unsafe { (sender(raw), arguments(count, args)) };
        // SAFETY: as above.
        let payload = unsafe { bytes(from, len) };
        code((|| {
            let (known, (args, count), payload) = (known?, args?, payload?);
            let (to, args) = (index(to)?, &args[..count]);
            known.endpoint.request_medium(to, handler.into(), args, payload).or_code()
        })())
    }

    /// `AM_RequestXferM` and, if `is_async`, `AM_RequestXferAsyncM`
    fn AMX_RequestXfer(
        raw: ep_t, to: c_int, offset: usize, handler: u8, from: *const c_void, len: c_int,
        is_async: c_int, count: c_int, args: *const Arg,
    ) -> Code {
        // SAFETY: as above.
        let (known, args) = unsafe { (sender(raw), arguments(count, args)) };
        code((|| {
            let (known, (args, count)) = (known?, args?);
            let (source, to, args) = (source(known, from, len)?, index(to)?, &args[..count]);
            let (handler, offset) = (u16::from(handler), offset as u64);
            let sent = match is_async != 0 {
                true => known.endpoint.try_request_bulk(to, handler, args, source, offset),
                false => known.endpoint.request_bulk(to, handler, args, source, offset),
            };
            match sent {
                Err(Error::Call(CallError::WouldBlock)) => {
                    // So that another attempt finds what this one has begun.
                    known.endpoint.poll().or_code()?;
                    Err(IN_USE)
                }
                sent => sent.or_code(),
            }
        })())
    }

    /// `AM_ReplyM`
    fn AMX_Reply(token: *mut c_void, handler: u8, count: c_int, args: *const Arg) -> Code {
        // SAFETY: the program passes as many arguments as it says.
        let args = unsafe { arguments(count, args) };
        code(args.and_then(|(args, count)| {
            with_message(token, RESOURCE, |message| {
                message.reply(handler.into(), &args[..count]).or_code()
            })
        }))
    }

    /// `AM_ReplyIM`
    fn AMX_ReplyI(
        token: *mut c_void, handler: u8, from: *const c_void, len: c_int, count: c_int,
        args: *const Arg,
    ) -> Code {
        // SAFETY: as above, and `len` bytes.
        let (args, payload) = unsafe { (arguments(count, args), bytes(from, len)) };
        code((|| {
            let ((args, count), payload) = (args?, payload?);
            with_message(token, RESOURCE, |message| {
                message.reply_medium(handler.into(), &args[..count], payload).or_code()
            })
        })())
    }

    /// `AM_ReplyXferM`
    fn AMX_ReplyXfer(
        token: *mut c_void, offset: usize, handler: u8, from: *const c_void, len: c_int,
        count: c_int, args: *const Arg,
    ) -> Code {
        // SAFETY: as above.
        let args = unsafe { arguments(count, args) };
        code((|| {
            let (args, count) = args?;
            let source = source(endpoint_of(token)?, from, len)?;
            with_message(token, RESOURCE, |message| {
                let args = &args[..count];
                message.reply_bulk(handler.into(), args, source, offset as u64).or_code()
            })
        })())
    }

    /// `AM_GetSourceEndpoint`
    fn AM_GetSourceEndpoint(token: *mut c_void, out: *mut en_t) -> Code {
        code(with_message(token, BAD_ARG, |message| {
            give(out, en_t(message.source().ok_or(RESOURCE)?.to_bytes()))
        }))
    }

    /// `AM_GetDestEndpoint`
    fn AM_GetDestEndpoint(token: *mut c_void, out: *mut ep_t) -> Code {
        let frame = Frame::of(token).ok_or(BAD_ARG);
        code(frame.and_then(|frame| give(out, frame.endpoint as ep_t)))
    }

    /// `AM_GetMsgTag`
    fn AM_GetMsgTag(token: *mut c_void, out: *mut u64) -> Code {
        code((|| {
            let known = endpoint_of(token)?;
            let tag = with_message(token, BAD_ARG, |message| Ok(message.tag()))?;
            // Replies bear the tag of the endpoint that they are for.
            let tag = tag.map_or_else(|| known.endpoint.tag().or_code(), Ok)?;
            give(out, tag.0)
        })())
    }

    /// `AMX_GetSourceId`
    fn AMX_GetSourceId(token: *mut c_void, out: *mut c_int) -> Code {
        code(with_message(token, BAD_ARG, |message| {
            give(out, message.source_index().ok_or(RESOURCE)? as c_int)
        }))
    }
}
