//! Functions of the program that the library calls: from a thread of its own, one at a time, without any
//! lock. Asynchronous errors.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use libc::{c_int, c_ulong};
use quipu_cabi::entry;
use quipu_via::codes::{AsyncError, Code, Outcome, Resource};

use crate::handle::{self, Id, Kind};
use crate::nic::{Nic, say};
use crate::types::{VIP_ERROR_DESCRIPTOR, VIP_PVOID, VipReturn, code};

/// Handler of a descriptor: context, NIC, VI, descriptor.
pub type DescriptorHandler = unsafe extern "C" fn(VIP_PVOID, VIP_PVOID, VIP_PVOID, VIP_PVOID);
/// Handler of an entry of a completion queue: context, NIC, VI, whether it is of the receive queue.
pub type CqHandler = unsafe extern "C" fn(VIP_PVOID, VIP_PVOID, VIP_PVOID, c_int);
/// Handler of asynchronous errors: context, what happened.
pub type ErrorHandler = unsafe extern "C" fn(VIP_PVOID, *mut VIP_ERROR_DESCRIPTOR);

/// A handler that waits for a descriptor.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Notify {
    pub(crate) context: usize,
    pub(crate) handler: DescriptorHandler,
}

/// A call of the program. Addresses are numbers, since they only pass through.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Callback {
    Descriptor { notify: Notify, nic: usize, vi: usize, descriptor: u64 },
    Entry { context: usize, handler: CqHandler, nic: usize, vi: usize, receive: bool },
    Error(Raised),
}

/// An asynchronous error.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Raised {
    nic: usize,
    vi: usize,
    cq: usize,
    descriptor: u64,
    resource: Resource,
    error: AsyncError,
}

/// Most errors that wait for the program's handler: a broken peer must not fill the memory.
const MAX_ERRORS: usize = 1024;
const STACK: usize = 256 << 10;

#[derive(Default)]
struct Queue {
    calls: VecDeque<Callback>,
    errors: usize,
    handler: Option<(usize, ErrorHandler)>,
    is_running: bool,
    is_stopped: bool,
}

#[derive(Default)]
struct Inner {
    queue: Mutex<Queue>,
    changed: Condvar,
}

/// Calls that wait for the thread that makes them.
#[derive(Clone, Default)]
pub(crate) struct Callbacks(Arc<Inner>);

impl Callbacks {
    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.0.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Starts the thread unless it runs.
    pub(crate) fn start(&self) -> Outcome {
        let mut queue = self.lock();
        if queue.is_running || queue.is_stopped {
            return Ok(());
        }
        let own = self.clone();
        spawn("vipl-handlers", STACK, move || own.run())?;
        queue.is_running = true;
        Ok(())
    }

    /// Has a call made.
    pub(crate) fn push(&self, call: Callback) {
        let mut queue = self.lock();
        if queue.is_stopped {
            return;
        }
        if let Callback::Error(_) = call {
            if queue.errors >= MAX_ERRORS {
                return;
            }
            queue.errors += 1;
        }
        queue.calls.push_back(call);
        drop(queue);
        self.0.changed.notify_one();
        if self.start().is_err() {
            say("no thread can be started for handlers: raise the limit of threads");
        }
    }

    /// Ends the thread; calls that wait are not made.
    pub(crate) fn stop(&self) {
        let mut queue = self.lock();
        queue.is_stopped = true;
        queue.calls.clear();
        drop(queue);
        self.0.changed.notify_all();
    }

    fn set_handler(&self, handler: Option<(usize, ErrorHandler)>) {
        self.lock().handler = handler;
    }

    fn run(&self) {
        let mut queue = self.lock();
        while !queue.is_stopped {
            let Some(call) = queue.calls.pop_front() else {
                queue = self.0.changed.wait(queue).unwrap_or_else(PoisonError::into_inner);
                continue;
            };
            if let Callback::Error(_) = call {
                queue.errors -= 1;
            }
            let handler = queue.handler;
            drop(queue);
            make(call, handler);
            queue = self.lock();
        }
    }
}

fn make(call: Callback, error_handler: Option<(usize, ErrorHandler)>) {
    let pointer = |address: usize| address as VIP_PVOID;
    match call {
        Callback::Descriptor { notify: Notify { context, handler }, nic, vi, descriptor } => {
            // SAFETY: the program passed this function to VipSendNotify or VipRecvNotify, to be called with
            // its context.
            unsafe {
                handler(pointer(context), pointer(nic), pointer(vi), descriptor as VIP_PVOID);
            }
        }
        Callback::Entry { context, handler, nic, vi, receive } => {
            // SAFETY: the same, of VipCQNotify.
            unsafe { handler(pointer(context), pointer(nic), pointer(vi), c_int::from(receive)) };
        }
        Callback::Error(raised) => {
            let Some((context, handler)) = error_handler else {
                say(&raised.text());
                return;
            };
            let mut descriptor = VIP_ERROR_DESCRIPTOR {
                nic: pointer(raised.nic),
                vi: pointer(raised.vi),
                cq: pointer(raised.cq),
                descriptor: raised.descriptor as VIP_PVOID,
                opcode: raised.opcode(),
                resource: raised.resource as u32,
                error: raised.error as u32,
            };
            // SAFETY: the same, of VipErrorCallback; the descriptor lives for the call.
            unsafe { handler(pointer(context), &raw mut descriptor) };
        }
    }
}

impl Raised {
    fn opcode(&self) -> c_ulong {
        match self.error {
            AsyncError::RdmaWriteProtection => 1,
            AsyncError::RdmaReadProtection => 2,
            _ => 0,
        }
    }

    fn text(&self) -> String {
        let what = match self.error {
            AsyncError::PostDescriptor => "a descriptor that was posted cannot be read",
            AsyncError::ConnectionLost => "the connection is lost: the peer disconnected or died",
            AsyncError::ReceiveQueueEmpty => "a message of the peer met no receive",
            AsyncError::Overrun => {
                "a queue has overflowed: take descriptors from it, or enlarge it"
            }
            AsyncError::RdmaWriteProtection => "an RDMA write of the peer was refused",
            AsyncError::RdmaReadProtection => "an RDMA read of the peer was refused",
            AsyncError::CompletionProtection => "the status of a descriptor cannot be written",
            AsyncError::RdmaWriteData
            | AsyncError::RdmaWriteAbort
            | AsyncError::RdmaTransport
            | AsyncError::Catastrophic => "the adapter failed",
        };
        let object = if self.cq != 0 { self.cq } else { self.vi };
        format!("{:?} {object:#x}: {what}", self.resource)
    }
}

/// Starts a thread of the library, which gets no signals of the program.
pub(crate) fn spawn(name: &str, stack: usize, work: impl FnOnce() + Send + 'static) -> Outcome<()> {
    let builder = std::thread::Builder::new().name(name.into()).stack_size(stack);
    let thread = with_signals_blocked(|| {
        builder.spawn(move || {
            quipu_cabi::wall::<quipu_cabi::Void>("a thread", || {
                work();
                Ok(())
            })
        })
    });
    thread.map(drop).map_err(|error| {
        say(&format!("cannot start a thread: {error}; raise the limit of threads"));
        Code::ErrorResource
    })
}

/// Runs `work` with all signals blocked, which threads that it starts inherit.
fn with_signals_blocked<T>(work: impl FnOnce() -> T) -> T {
    // SAFETY: signal sets are plain data; both are live for the calls.
    unsafe {
        let (mut all, mut before) = (std::mem::zeroed(), std::mem::zeroed());
        libc::sigfillset(&raw mut all);
        libc::pthread_sigmask(libc::SIG_SETMASK, &raw const all, &raw mut before);
        let out = work();
        libc::pthread_sigmask(libc::SIG_SETMASK, &raw const before, std::ptr::null_mut());
        out
    }
}

impl Nic {
    /// Raises an asynchronous error about a VI or one of its descriptors.
    pub(crate) fn raise(
        &self,
        vi: Id,
        error: AsyncError,
        resource: Resource,
        descriptor: Option<u64>,
    ) {
        self.callbacks.push(Callback::Error(Raised {
            nic: self.handle() as usize,
            vi: self.handle_of(Kind::Vi, vi) as usize,
            cq: 0,
            descriptor: descriptor.unwrap_or(0),
            resource,
            error,
        }));
    }

    /// Raises the overflow of a completion queue.
    pub(crate) fn raise_cq(&self, cq: Id) {
        self.callbacks.push(Callback::Error(Raised {
            nic: self.handle() as usize,
            vi: 0,
            cq: self.handle_of(Kind::Cq, cq) as usize,
            descriptor: 0,
            resource: Resource::Cq,
            error: AsyncError::Overrun,
        }));
    }
}

fn error_callback(raw: VIP_PVOID, context: VIP_PVOID, handler: Option<ErrorHandler>) -> Outcome {
    let nic = handle::nic(raw)?;
    nic.callbacks.set_handler(handler.map(|handler| (context as usize, handler)));
    Ok(())
}

entry! {
    /// `VipErrorCallback`
    fn VipErrorCallback(
        nic: VIP_PVOID,
        context: VIP_PVOID,
        handler: Option<ErrorHandler>,
    ) -> VipReturn {
        code(error_callback(nic, context, handler))
    }
}
