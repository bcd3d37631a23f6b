//! Completion queues: polling, and waiting for them and for events.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use libc::{c_int, c_uint, pollfd, sockaddr_storage};
use quipu_cabi::{
    CReturn, Errno, Handle, IntMinusOne, Null, Tagged, end_if_cancelled, entry, outer_wall,
};
use quipu_host::EngineError;
use quipu_host::nic::{ChannelId, Completion, CqId, WcExtra, WcOpcode};

use crate::adapter::{Adapter, Opaque, adapter, qpip_adapter};
use crate::address::storage;
use crate::error::{Outcome, fail, no_object, refused, status};

/// How long a wait looks before it sleeps. A sleeper is woken some 20 to 50 us late, so what takes no longer
/// is better awaited awake.
const SPIN: Duration = Duration::from_micros(50);
/// How long it sleeps before it looks whether its thread was cancelled.
const TURN: Duration = Duration::from_millis(250);
/// Completions that are taken from the engine at a time.
const BATCH: usize = 32;

/// `qpip_cq`
pub type qpip_cq = Opaque;

pub(crate) struct Private {
    pub(crate) adapter: Arc<Adapter>,
    pub(crate) id: CqId,
    channel: ChannelId,
    fd: i32,
}

impl Tagged for Private {
    const TAG: u64 = 0x7170_6970_6371_6371;
}

pub(crate) type Cq = Handle<Opaque, Private>;

/// `struct qpip_completion`
#[repr(C)]
#[derive(Clone, Copy)]
pub struct qpip_completion {
    pub(crate) id: u64,
    pub(crate) status: u32,
    pub(crate) operation: u32,
    pub(crate) length: u32,
    pub(crate) reserved: u32,
    pub(crate) from: sockaddr_storage,
}

/// `enum qpip_operation`.
const SENT: u32 = 1;
const RECEIVED: u32 = 2;

fn completion_of(completion: &Completion) -> qpip_completion {
    let received = completion.opcode == WcOpcode::Recv;
    let from = match completion.extra {
        WcExtra::From(source) => storage(SocketAddr::from(source)),
        // SAFETY: sockaddr_storage consists of integers.
        _ => unsafe { std::mem::zeroed() },
    };
    qpip_completion {
        id: completion.wr_id,
        status: status(completion.status),
        operation: if received { RECEIVED } else { SENT },
        length: if received { completion.byte_len } else { 0 },
        reserved: 0,
        from,
    }
}

impl Private {
    fn poll(&self, out: &mut [Completion]) -> Result<usize, EngineError> {
        self.adapter.engine.poll_cq(self.id, out)
    }

    /// Looks until there is something, for a moment.
    fn spin(&self, limit: Option<Instant>) -> Result<bool, EngineError> {
        let until = Instant::now() + SPIN;
        let until = limit.map_or(until, |limit| limit.min(until));
        loop {
            if self.adapter.engine.look(self.id, self.adapter.context)? {
                return Ok(true);
            }
            if Instant::now() >= until {
                return Ok(false);
            }
            std::hint::spin_loop();
        }
    }

    /// Waits for a turn: ERESTART if nothing has come in it, and there is time left.
    fn wait(&self, limit: Option<Instant>, again: bool) -> Outcome<bool> {
        let Adapter { engine, context, .. } = &*self.adapter;
        let wrong = || refused("waiting");
        if !again && self.spin(limit).map_err(wrong())? {
            return Ok(true);
        }
        if engine.look_and_arm(self.id, self.channel, *context).map_err(wrong())? {
            return Ok(true);
        }
        let left = limit.map_or(TURN, |limit| limit.saturating_duration_since(Instant::now()));
        if left.is_zero() {
            return Ok(false);
        }
        self.sleep(left.min(TURN))?;
        Err(Errno::ERESTART)
    }

    /// Sleeps until a descriptor is readable, but no longer than `most`.
    fn sleep(&self, most: Duration) -> Outcome {
        let watched = |fd| pollfd { fd, events: libc::POLLIN, revents: 0 };
        let mut fds = [watched(self.fd), watched(self.adapter.events_fd)];
        // Rounded up: a wait that ends too early would be followed by many short ones.
        let millis = most.as_millis() as c_int + 1;
        // SAFETY: two descriptors, in a live array.
        let ready = unsafe { libc::poll(fds.as_mut_ptr(), 2, millis) };
        if ready >= 0 {
            return Ok(());
        }
        match Errno::last() {
            Errno::EINTR => Err(fail(Errno::EINTR, "waiting: a signal was caught; wait again")),
            errno => Err(fail(errno, format_args!("waiting: poll failed: {errno:?}"))),
        }
    }
}

/// The queue behind a pointer.
///
/// # Safety
///
/// As [`Handle::get`].
pub(crate) unsafe fn cq<'a>(raw: *const qpip_cq) -> Outcome<&'a Private> {
    // SAFETY: passed on from the caller.
    Ok(unsafe { Cq::get(raw) }.map_err(no_object("completion queue"))?)
}

fn create(adapter: Arc<Adapter>, entries: u32) -> Result<Private, EngineError> {
    let (channel, fd) = adapter.engine.create_channel()?;
    // SAFETY: a descriptor of the engine, which lives as long as the channel. Without waiting in the engine,
    // whoever makes progress is its helper; the program waits for descriptors.
    unsafe { libc::fcntl(fd, libc::F_SETFL, libc::O_NONBLOCK) };
    match adapter.engine.create_cq(adapter.context, entries, Some(channel), 0) {
        Ok((id, _)) => Ok(Private { adapter, id, channel, fd }),
        Err(error) => {
            let _ = adapter.engine.destroy_channel(channel);
            Err(error)
        }
    }
}

entry! {
    /// `qpip_cq_create`
    fn qpip_cq_create(raw: *mut qpip_adapter, entries: c_uint) -> Null<qpip_cq> {
        // SAFETY: the program passes what qpip_open gave.
        let adapter = unsafe { adapter(raw) }?;
        let made = create(adapter, entries.max(1));
        let made = made.map_err(refused("the completion queue cannot be created"))?;
        Ok(Cq::create(Opaque::new(), made))
    }

    /// `qpip_cq_destroy`
    fn qpip_cq_destroy(raw: *mut qpip_cq) -> IntMinusOne {
        // SAFETY: the program passes what qpip_cq_create gave.
        let cq = unsafe { cq(raw) }?;
        let engine = &cq.adapter.engine;
        engine
            .destroy_cq(cq.id)
            .map_err(refused("the completion queue cannot be destroyed"))?;
        let _ = engine.destroy_channel(cq.channel);
        // SAFETY: as above; that nobody uses it any more is the program's to see to.
        drop(unsafe { Cq::take(raw) });
        Ok(0)
    }

    /// `qpip_poll`
    fn qpip_poll(raw: *mut qpip_cq, out: *mut qpip_completion, count: c_uint) -> IntMinusOne {
        // SAFETY: the program passes what qpip_cq_create gave.
        let cq = unsafe { cq(raw) }?;
        if out.is_null() && count > 0 {
            return Err(fail(Errno::EINVAL, "the pointer for completions is NULL"));
        }
        let wanted = (count as usize).min(c_int::MAX as usize);
        let mut taken = 0;
        let mut put = |completion: &Completion| {
            // SAFETY: the program passes room for `count`; the places are below that.
            unsafe { out.wrapping_add(taken).write_unaligned(completion_of(completion)) };
            taken += 1;
        };
        let mut left = wanted;
        let mut batch = [Completion::default(); BATCH];
        while left > 0 {
            let room = left.min(BATCH);
            let found = match cq.poll(&mut batch[..room]) {
                Ok(found) => found,
                // What was taken must not be lost: the next poll says what is wrong.
                Err(_) if left < wanted => break,
                Err(error) => return Err(refused("polling")(error)),
            };
            batch[..found].iter().for_each(&mut put);
            left -= found;
            if found < room {
                break;
            }
        }
        Ok((wanted - left) as c_int)
    }
}

/// `qpip_wait`: while it waits, and before, its thread can be cancelled (`pthread_cancel(3)`).
///
/// # Safety
///
/// As the manual page of the C function demands of its arguments.
pub unsafe extern "C-unwind" fn qpip_wait(raw: *mut qpip_cq, timeout: c_int) -> c_int {
    let limit = u64::try_from(timeout).ok().map(|ms| Instant::now() + Duration::from_millis(ms));
    let mut again = false;
    loop {
        // SAFETY: here is nothing to drop.
        unsafe { end_if_cancelled() };
        // SAFETY: the program passes what qpip_cq_create gave.
        let turn = move || unsafe { cq(raw) }?.wait(limit, again).map(c_int::from);
        let result = outer_wall::<IntMinusOne>("qpip_wait", turn);
        if IntMinusOne::error(&result) != Some(Errno::ERESTART) {
            return result;
        }
        again = true;
    }
}
