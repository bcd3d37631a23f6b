//! How a socket gets a connection: by accepting a request, or by asking for one.

use std::os::fd::AsRawFd;
use std::sync::Arc;

use quipu_abi_types::*;
use quipu_cabi::Errno;

use super::connection::{Connection, fitted};
use super::options::restore;
use super::socket::{Phase, RESOLVE_MS, Settings, Socket, ears, watch};
use super::wire::Greeting;
use crate::connect::{rdma_accept, rdma_reject};
use crate::{address, channel, event, id};

/// The greeting in the private data of an event.
pub(super) fn greeting_of(event: &rdma_cm_event) -> Option<Greeting> {
    // SAFETY: events of these identifiers have the form of connections; all of its bytes were written.
    let param = unsafe { event.param.conn };
    if param.private_data.is_null() {
        return None;
    }
    let length = usize::from(param.private_data_len);
    // SAFETY: the event has that many bytes.
    Greeting::decode(unsafe { std::slice::from_raw_parts(param.private_data.cast(), length) })
}

/// Ends a request that nobody accepts.
///
/// # Safety
///
/// `request` is a connect request that is used no more.
pub(super) unsafe fn turn_away(request: *mut rdma_cm_event) {
    // SAFETY: passed on from the caller.
    unsafe {
        let child = (*request).id;
        let _ = event::acknowledge(request);
        let _ = id::destroy(child);
    }
}

/// Opens the device of a request, where that could not be done when it came.
///
/// # Safety
///
/// `id` is the identifier of a request.
unsafe fn device_opened(id: *mut rdma_cm_id) -> Result<(), Errno> {
    // SAFETY: passed on from the caller.
    unsafe {
        let known = id::id(id)?.book().device.is_some();
        if known { Ok(()) } else { address::refresh(id) }
    }
}

impl Socket {
    /// Makes the socket of a request and accepts it; none if the peer is no socket, or has left again.
    ///
    /// # Errors
    ///
    /// There is no room for a socket. The request is as it was, unless it is null now.
    ///
    /// # Safety
    ///
    /// `request` is a connect request, which this acknowledges, and then it is null.
    pub(crate) unsafe fn accepted(
        request: &mut *mut rdma_cm_event,
        settings: &Settings,
    ) -> Result<Option<Arc<Self>>, Errno> {
        // SAFETY: passed on from the caller; the identifier of a request is this function's.
        unsafe {
            let id = (**request).id;
            let Some(greeting) = greeting_of(&**request) else {
                let _ = event::acknowledge(std::mem::replace(request, std::ptr::null_mut()));
                rdma_reject(id, std::ptr::null(), 0);
                let _ = id::destroy(id);
                return Ok(None);
            };
            // What takes descriptors and memory comes first.
            let sizes = match device_opened(id).and_then(|()| fitted(id, &settings.sizes)) {
                Err(Errno::ENODEV) => {
                    turn_away(std::mem::replace(request, std::ptr::null_mut()));
                    return Ok(None);
                }
                sizes => sizes?,
            };
            let (channel, set) = ears()?;
            let made = Connection::new(id, &sizes).and_then(|connection| {
                watch(set.as_raw_fd(), connection.descriptor())?;
                id::migrate(id, channel)?;
                Ok(connection)
            });
            let mut connection = made.inspect_err(|_| {
                let _ = channel::destroy(channel);
            })?;
            let _ = event::acknowledge(std::mem::replace(request, std::ptr::null_mut()));
            connection.greeted(greeting);
            let socket = Self::around(id, set, Settings { sizes, ..settings.clone() });
            let mut state = socket.lock();
            state.connection = Some(connection);
            match state.say_hello(rdma_accept) {
                Ok(()) => state.phase = Phase::Connected,
                Err(Errno(libc::EPROTO | libc::ENOTCONN | libc::EINVAL)) => return Ok(None),
                Err(errno) => return Err(errno),
            }
            drop(state);
            Ok(Some(socket))
        }
    }

    /// Begins to connect, or goes on with what an earlier call has begun.
    ///
    /// # Errors
    ///
    /// As connect(2).
    ///
    /// # Safety
    ///
    /// `addr` is an address.
    pub(crate) unsafe fn connect(
        &self,
        addr: *const libc::sockaddr,
        patient: bool,
    ) -> Result<(), Errno> {
        let mut state = loop {
            let mut state = self.lock();
            if state.phase == Phase::Connecting {
                state.progress();
            }
            match state.phase {
                Phase::Idle => break state,
                Phase::Connecting if patient => return Ok(()),
                Phase::Connecting => return Err(Errno(libc::EALREADY)),
                Phase::Connected if state.unanswered => return Ok(()),
                Phase::Connected => return Err(Errno::EISCONN),
                Phase::Failed if state.error.is_some() => return Ok(()),
                Phase::Failed if !state.sleepers.any() => {
                    drop(state);
                    self.renew(Phase::Failed)?;
                }
                Phase::Listening | Phase::Failed => return Err(Errno::EINVAL),
            }
        };
        // SAFETY: the identifier is the socket's; passed on from the caller.
        unsafe { address::resolve(state.id, std::ptr::null(), addr, RESOLVE_MS) }?;
        state.phase = Phase::Connecting;
        state.unanswered = true;
        Ok(())
    }

    /// Gives a socket that listens, or could not be connected, a fresh identifier, bound to what the program
    /// has bound it to; nothing if it is in that phase no more, since another thread was first.
    pub(crate) fn renew(&self, of: Phase) -> Result<(), Errno> {
        let mut state = self.lock();
        if state.phase != of {
            return Ok(());
        }
        // SAFETY: the channel is the socket's own, and so are both identifiers.
        let fresh = unsafe {
            let (channel, rc) = ((*state.id).channel, Some(IBV_QPT_RC));
            let fresh = id::create(channel, std::ptr::null_mut(), RDMA_PS_TCP, rc)?;
            let family = (*state.id).route.addr.src_storage.ss_family;
            (*fresh).route.addr.src_storage.ss_family = family;
            fresh
        };
        (state.connection, state.mourned) = (None, false);
        let old = std::mem::replace(&mut state.id, fresh);
        let requests = std::mem::take(&mut state.requests);
        state.phase = Phase::Idle;
        // Who waits hears of it, and sets do.
        state.ring();
        state.progress();
        // Who is about to give an event of the old one back may need the lock.
        drop(state);
        // SAFETY: nobody finds them any more.
        unsafe {
            requests.into_iter().for_each(|request| turn_away(request));
            let _ = id::destroy(old);
        }
        let state = self.lock();
        restore(&state)?;
        if let Some(address) = state.bound {
            // SAFETY: the identifier is the socket's.
            unsafe { address::bind_addr(state.id, (&raw const address).cast()) }?;
        }
        Ok(())
    }

    /// Puts a request back that could not be accepted yet.
    ///
    /// # Safety
    ///
    /// `request` is a connect request of this socket.
    pub(crate) unsafe fn put_back(&self, request: *mut rdma_cm_event) {
        let mut state = self.lock();
        if state.phase == Phase::Listening {
            state.requests.push_front(request);
            // Others that wait may have room for it; sets hear of it, too.
            state.ring();
            state.progress();
        } else {
            drop(state);
            // SAFETY: passed on from the caller.
            unsafe { turn_away(request) };
        }
    }
}
