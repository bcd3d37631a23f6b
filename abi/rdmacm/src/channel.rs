//! Event channels.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, ThreadId};

use quipu_abi_trace::entry;
use quipu_abi_types::*;
use quipu_cabi::{Errno, Handle, Null, Tagged, Void};
use quipu_facade::{check, engine};

/// The private part of a channel.
pub(crate) struct ChannelState {
    pub(crate) api: &'static EngineApi,
    pub(crate) handle: CmChannelHandle,
    /// Set when the channel is destroyed: for threads that wait in it at that moment.
    pub(crate) closed: Arc<AtomicBool>,
    /// It was made for one identifier, whose calls wait for their events: its requests get such ones, too.
    pub(crate) of_one: bool,
}

impl Tagged for ChannelState {
    const TAG: u64 = 0x5155_4950_434d_4348;
}

/// An event channel.
pub(crate) type Channel = Handle<rdma_event_channel, ChannelState>;

/// The channels that were destroyed last, and who did it.
static DESTROYED: Mutex<VecDeque<(usize, ThreadId)>> = Mutex::new(VecDeque::new());
/// How many of them are remembered.
const REMEMBERED: usize = 16;

fn destroyed() -> MutexGuard<'static, VecDeque<(usize, ThreadId)>> {
    DESTROYED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Whether another thread has destroyed the channel that was here, of late. The caller was about to wait in
/// it, and is as good as waiting.
pub(crate) fn is_destroyed_by_another(raw: *mut rdma_event_channel) -> bool {
    let me = thread::current().id();
    destroyed().iter().any(|&(channel, by)| channel == raw.addr() && by != me)
}

/// Makes a channel, for identifiers that the program assigns to it, or for one whose calls wait.
pub(crate) fn create(of_one: bool) -> Result<*mut rdma_event_channel, Errno> {
    let api = engine()?;
    let mut made = EngineCmChannel { channel: CmChannelHandle::NONE, fd: -1 };
    // SAFETY: `made` is valid for the call.
    check(unsafe { (api.cm.create_channel)(&mut made) })?;
    let public = rdma_event_channel { fd: made.fd };
    let closed = Arc::new(AtomicBool::new(false));
    Ok(Channel::create(public, ChannelState { api, handle: made.channel, closed, of_one }))
}

/// Ends a channel. While identifiers use it, nothing happens: the manual page forbids it, and their
/// events must go somewhere.
///
/// # Safety
///
/// `raw` is null or a channel that is used no more.
pub(crate) unsafe fn destroy(raw: *mut rdma_event_channel) -> Result<(), Errno> {
    // SAFETY: passed on from the caller.
    let channel = unsafe { Channel::get(raw) }?;
    channel.closed.store(true, Ordering::Release);
    // SAFETY: the handle came from the engine.
    let ended = check(unsafe { (channel.api.cm.destroy_channel)(channel.handle) });
    channel.closed.store(ended.is_ok(), Ordering::Release);
    ended?;
    let mut last = destroyed();
    if last.len() == REMEMBERED {
        last.pop_front();
    }
    last.push_back((raw.addr(), thread::current().id()));
    drop(last);
    // SAFETY: passed on from the caller.
    drop(unsafe { Channel::take(raw) }?);
    Ok(())
}

entry! {
    /// `rdma_create_event_channel(3)`
    fn rdma_create_event_channel() -> Null<rdma_event_channel> {
        create(false)
    }

    /// `rdma_destroy_event_channel(3)`
    fn rdma_destroy_event_channel(raw: *mut rdma_event_channel) -> Void {
        // SAFETY: the program passes a channel and uses it no more.
        unsafe { destroy(raw) }
    }
}
