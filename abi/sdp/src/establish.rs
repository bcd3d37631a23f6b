//! Connecting, listening and ending: calls of the program, and events of connection management.

use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::RawFd;
use std::sync::atomic::Ordering;
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use libc::c_int;
use quipu_cabi::Errno;
use quipu_host::connection::{Event, EventKind, IdKey, PortSpace, Refusal};
use quipu_sdp::Connection;

use crate::adapter::{Adapter, adapter};
use crate::both;
use crate::helper;
use crate::link::{CONFIG, Link};
use crate::queue::Queue;
use crate::socket::{Phase, Socket, State};
use crate::sys::errno_of;

/// `IBV_QPT_RC`.
const RC: u8 = 2;
/// Connections that may wait for accept(2) at one listener.
const MOST_WAITING: usize = 1024;

/// Sockets that have an identifier, by their numbers.
static SOCKETS: LazyLock<Mutex<HashMap<u64, Arc<Socket>>>> = LazyLock::new(Mutex::default);

fn sockets() -> MutexGuard<'static, HashMap<u64, Arc<Socket>>> {
    SOCKETS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The socket of that number.
pub(crate) fn find(number: u64) -> Option<Arc<Socket>> {
    sockets().get(&number).cloned()
}

/// All of them.
pub(crate) fn all() -> Vec<Arc<Socket>> {
    sockets().values().cloned().collect()
}

/// Sockets by their numbers, locked while the process forks: a child has no thread that may hold the lock.
pub(crate) struct Held(MutexGuard<'static, HashMap<u64, Arc<Socket>>>);

/// Keeps sockets from coming and going.
pub(crate) fn hold() -> Held {
    Held(sockets())
}

impl Held {
    /// In a child of fork(2): the sockets are the parent's. They are never touched, since threads that the
    /// child does not have may hold their locks.
    pub(crate) fn forget(mut self) {
        std::mem::forget(std::mem::take(&mut *self.0));
    }
}

impl Socket {
    /// The identifier of the socket, which is made now if there is none.
    fn identifier(self: &Arc<Self>, state: &mut State) -> Result<(IdKey, &'static Adapter), Errno> {
        let adapter = adapter()?;
        helper::start(adapter)?;
        if let Some(id) = state.id {
            return Ok((id, adapter));
        }
        let made = adapter.engine.cm_create_id(adapter.events, PortSpace::Sdp, RC, self.number);
        let id = made.map_err(|error| errno_of(&error))?;
        state.id = Some(id);
        sockets().insert(self.number, Arc::clone(self));
        Ok((id, adapter))
    }

    /// As bind(2).
    pub(crate) fn bind(self: &Arc<Self>, to: SocketAddr) -> Result<(), Errno> {
        let mut state = self.lock();
        if state.phase != Phase::Idle || state.local.is_some() {
            return Err(Errno::EINVAL);
        }
        let (id, adapter) = self.identifier(&mut state)?;
        if let Some(only) = state.options.v6_only() {
            adapter.engine.cm_set_v6_only(id, only).map_err(|error| errno_of(&error))?;
        }
        adapter.engine.cm_bind_addr(id, to).map_err(|error| errno_of(&error))?;
        let route = adapter.engine.cm_route(id).map_err(|error| errno_of(&error))?;
        state.local = route.src.or(Some(to));
        Ok(())
    }

    /// As listen(2).
    pub(crate) fn listen(self: &Arc<Self>, backlog: c_int) -> Result<(), Errno> {
        if self.lock().local.is_none() {
            self.bind(SocketAddr::new(IpAddr::from([0; 4]), 0))?;
        }
        let mut state = self.lock();
        match state.phase {
            Phase::Listening => return Ok(()),
            Phase::Idle => {}
            _ => return Err(Errno::EINVAL),
        }
        let (id, adapter) = self.identifier(&mut state)?;
        let listening = adapter.engine.cm_listen(id, backlog.clamp(1, 4096));
        listening.map_err(|error| errno_of(&error))?;
        if let Some(at) = state.local {
            let v6_only = state.options.v6_only();
            state.twin = self.listen_at_twin(adapter, at, v6_only, backlog);
        }
        state.phase = Phase::Listening;
        state.show();
        Ok(())
    }

    /// Listens where clients of a rule `both` ask, if that port is free.
    fn listen_at_twin(
        &self,
        adapter: &Adapter,
        at: SocketAddr,
        v6_only: Option<bool>,
        backlog: c_int,
    ) -> Option<IdKey> {
        let engine = &adapter.engine;
        let id = engine.cm_create_id(adapter.events, PortSpace::Sdp, RC, self.number).ok()?;
        let chosen = v6_only.map_or(Ok(()), |only| engine.cm_set_v6_only(id, only));
        let bound = chosen.and_then(|()| engine.cm_bind_addr(id, both::twin(at)));
        if bound.and_then(|()| engine.cm_listen(id, backlog.clamp(1, 4096))).is_ok() {
            return Some(id);
        }
        let _ = engine.cm_destroy_id(id);
        None
    }

    /// As accept4(2): a connection, whose descriptor is not the program's yet.
    pub(crate) fn accept(self: &Arc<Self>) -> Result<Arc<Self>, Errno> {
        let limit = self.lock().options.receive_timeout;
        self.wait(self.is_patient(0), limit, |state| {
            if state.phase != Phase::Listening {
                return Some(Err(Errno::EINVAL));
            }
            let next = state.backlog.pop_front()?;
            state.show();
            Some(Ok(next))
        })
    }

    /// As connect(2).
    pub(crate) fn connect(self: &Arc<Self>, to: SocketAddr) -> Result<(), Errno> {
        {
            let mut state = self.lock();
            match state.phase {
                Phase::Idle => {}
                Phase::Connecting => return Err(Errno(libc::EALREADY)),
                Phase::Connected => return Err(Errno::EISCONN),
                Phase::Failed => return Err(state.error.take().unwrap_or(Errno::ECONNREFUSED)),
                Phase::Listening => return Err(Errno::EISCONN),
            }
            let (id, adapter) = self.identifier(&mut state)?;
            let to = match to.ip() {
                // As the kernel has it, the wildcard stands for this host.
                ip if ip.is_unspecified() && ip.is_ipv4() => {
                    SocketAddr::new(IpAddr::from([127, 0, 0, 1]), to.port())
                }
                _ => to,
            };
            let resolved = adapter.engine.cm_resolve_addr(id, None, to);
            resolved.map_err(|error| errno_of(&error))?;
            (state.phase, state.peer) = (Phase::Connecting, Some(to));
            state.show();
        }
        let limit = self.lock().options.send_timeout;
        let connected = self.wait(self.is_patient(0), limit, |state| match state.phase {
            Phase::Connecting => None,
            Phase::Connected => Some(Ok(())),
            _ => Some(Err(state.error.take().unwrap_or(Errno::ECONNREFUSED))),
        });
        match connected {
            Err(Errno::EAGAIN) => Err(Errno(libc::EINPROGRESS)),
            other => other,
        }
    }

    /// The program has closed its last descriptor. What was sent still arrives.
    pub(crate) fn close(self: &Arc<Self>) {
        let linger = self.lock().options.linger;
        let mut state = self.lock();
        state.closed = true;
        state.ready.close();
        let waiting: Vec<Arc<Socket>> = state.backlog.drain(..).collect();
        let Some(adapter) = crate::adapter::known() else { return };
        if let (Phase::Connected, Some(link)) = (state.phase, &mut state.link) {
            match linger {
                Some(Duration::ZERO) => link.connection.abort(),
                _ => link.connection.close(adapter.now()),
            }
            link.flush();
            let _ = helper::serve(link.queue.fd, self.number);
            self.settle(&mut state);
            if let Some(most) = linger.filter(|most| !most.is_zero()) {
                drop(state);
                self.linger(most);
                state = self.lock();
            }
        }
        self.end_if_over(&mut state, adapter);
        drop(state);
        for socket in waiting {
            socket.close();
        }
    }

    /// Waits until the peer has everything (SO_LINGER).
    fn linger(&self, most: Duration) {
        let _ = self.wait(true, Some(most), |state| match &state.link {
            Some(link) if !link.is_idle() && link.failure().is_none() => None,
            _ => Some(Ok(())),
        });
    }

    /// Takes a closed connection down when nothing more is to be sent or awaited.
    pub(crate) fn end_if_over(&self, state: &mut State, adapter: &Adapter) {
        let is_over = match (&state.link, state.phase) {
            _ if !state.closed || state.destroyed || state.led => false,
            (Some(link), Phase::Connected) => {
                let reset = link.connection.reset().is_some();
                link.broken || (link.connection.is_finished() || reset) && link.is_idle()
            }
            _ => true,
        };
        if !is_over {
            return;
        }
        if let (Some(id), Some(_)) = (state.id, &state.link) {
            let _ = adapter.engine.cm_disconnect(id);
        }
        if let Some(link) = &state.link {
            helper::leave(link.queue.fd);
        }
        state.destroy(adapter);
        sockets().remove(&self.number);
    }

    /// Something has happened to the identifier of this socket.
    fn handle(self: &Arc<Self>, adapter: &'static Adapter, event: &Event) {
        let mut state = self.lock();
        let id = event.id;
        let went = match event.kind {
            EventKind::AddrResolved => {
                adapter.engine.cm_resolve_route(id).map_err(|error| errno_of(&error))
            }
            EventKind::RouteResolved => state.request(adapter, id),
            EventKind::ConnectResponse => {
                self.responded(&mut state, adapter, id, &event.private_data)
            }
            EventKind::Established => self.established(&mut state),
            EventKind::Rejected
            | EventKind::Unreachable
            | EventKind::ConnectError
            | EventKind::AddrError
            | EventKind::RouteError => Err(reason(event)),
            EventKind::Disconnected => {
                state.disconnected(adapter, id);
                Ok(())
            }
            _ => Ok(()),
        };
        if let Err(errno) = went
            && state.phase == Phase::Connecting
        {
            state.fail(errno);
        }
        self.settle(&mut state);
        if state.waiting > 0 {
            self.changed.notify_all();
        }
        self.end_if_over(&mut state, adapter);
    }

    fn responded(
        &self,
        state: &mut State,
        adapter: &Adapter,
        id: IdKey,
        hello_ack: &[u8],
    ) -> Result<(), Errno> {
        let queue = state.queue.take().ok_or(Errno::EIO)?;
        let Ok(connection) = Connection::connect(CONFIG, hello_ack) else {
            let _ = adapter.engine.cm_reject(id, Refusal::Consumer, &[]);
            return Err(Errno(libc::EPROTO));
        };
        let params = adapter.engine.cm_connect_params(id).map_err(|error| errno_of(&error))?;
        queue.connect(&params, state.options.level())?;
        adapter.engine.cm_accept(id, None).map_err(|error| errno_of(&error))?;
        let mut link = Link::new(queue, connection);
        if let (Some(own), Some(peer)) = (state.local, state.peer) {
            let hello = Link::hello(own, peer);
            link.capture((own, peer), (true, params.dest_qpn), (&hello, hello_ack));
        }
        state.begin(link);
        self.watch_link(state)
    }

    /// The peer has heard that its request was accepted.
    fn established(self: &Arc<Self>, state: &mut State) -> Result<(), Errno> {
        let Some(listener) = state.listener.take() else { return Ok(()) };
        let mut at = listener.lock();
        if at.closed || at.knock().is_err() {
            state.closed = true;
            if let Some(link) = &mut state.link {
                link.connection.abort();
            }
            return Ok(());
        }
        at.backlog.push_back(Arc::clone(self));
        at.show();
        listener.changed.notify_all();
        Ok(())
    }

    /// Completions of the new connection are told to the helper, where the program watches it.
    fn watch_link(&self, state: &State) -> Result<(), Errno> {
        match &state.link {
            Some(link) if state.ready.was_watched() || state.closed => {
                helper::serve(link.queue.fd, self.number)
            }
            _ => Ok(()),
        }
    }
}

impl State {
    /// The route is known: sends the request.
    fn request(&mut self, adapter: &'static Adapter, id: IdKey) -> Result<(), Errno> {
        let engine = &adapter.engine;
        let route = engine.cm_route(id).map_err(|error| errno_of(&error))?;
        let (Some(own), Some(peer)) = (route.src, route.dst) else { return Err(Errno::EIO) };
        let queue = Queue::new(adapter)?;
        let param = queue.param(&Link::hello(own, peer));
        engine.cm_connect(id, &param).map_err(|error| errno_of(&error))?;
        (self.local, self.queue) = (Some(own), Some(queue));
        Ok(())
    }

    /// The connection stands.
    fn begin(&mut self, mut link: Link) {
        link.connection.set_urgent_inline(self.options.urgent_inline);
        self.link = Some(link);
        self.phase = Phase::Connected;
    }

    /// The peer has ended the connection, or is gone.
    fn disconnected(&mut self, adapter: &Adapter, id: IdKey) {
        self.progress();
        if let Some(link) = &mut self.link {
            // What has come before lies in receive buffers by now.
            link.give_up();
        }
        let _ = adapter.engine.cm_disconnect(id);
    }
}

/// What a program hears of a connection that was not made.
fn reason(event: &Event) -> Errno {
    match (event.kind, event.status) {
        (EventKind::Rejected, _) => Errno::ECONNREFUSED,
        (EventKind::AddrError | EventKind::RouteError, 0) => Errno::EHOSTUNREACH,
        (_, status @ ..0) => Errno(-status),
        _ => Errno::ETIMEDOUT,
    }
}

/// A peer asks for a connection.
fn requested(adapter: &'static Adapter, listener: &Arc<Socket>, event: &Event) {
    let refuse = || drop(adapter.engine.cm_reject(event.id, Refusal::Consumer, &[]));
    let has_room = listener.lock().backlog.len() < MOST_WAITING;
    let accepted = Connection::accept(CONFIG, &event.private_data).ok().filter(|_| has_room);
    let destroy = || drop(adapter.engine.cm_destroy_id(event.id));
    let Some(connection) = accepted else {
        refuse();
        return destroy();
    };
    if accept(adapter, listener, event, connection).is_err() {
        refuse();
        destroy();
    }
}

fn accept(
    adapter: &'static Adapter,
    listener: &Arc<Socket>,
    event: &Event,
    connection: Connection,
) -> Result<(), Errno> {
    let (engine, id) = (&adapter.engine, event.id);
    let queue = Queue::new(adapter)?;
    let params = engine.cm_connect_params(id).map_err(|error| errno_of(&error))?;
    let (options, nominal) = {
        let at = listener.lock();
        (at.options.clone(), at.local.map(|at| at.port()))
    };
    queue.connect(&params, options.level())?;
    let (socket, fd) = Socket::new(libc::SOCK_CLOEXEC)?;
    // accept(2) gives it to the program.
    let parked = crate::sys::own_descriptor(fd)?;
    engine.cm_set_cookie(id, socket.number).map_err(|error| errno_of(&error))?;
    let route = engine.cm_route(id).map_err(|error| errno_of(&error))?;
    let param = queue.param(&Connection::hello_ack(&CONFIG));
    {
        let mut state = socket.lock();
        state.options = options;
        (state.local, state.peer) = (route.src, route.dst);
        if let (Some(local), Some(nominal)) = (&mut state.local, nominal) {
            local.set_port(nominal);
        }
        (state.id, state.listener) = (Some(id), Some(Arc::clone(listener)));
        let mut link = Link::new(queue, connection);
        if let (Some(own), Some(peer)) = (route.src, route.dst) {
            let ends = (false, params.dest_qpn);
            link.capture((own, peer), ends, (&event.private_data, &param.private_data));
        }
        state.begin(link);
        state.parked = Some(parked);
    }
    sockets().insert(socket.number, Arc::clone(&socket));
    let said = engine.cm_accept(id, Some(&param));
    if said.is_err() {
        sockets().remove(&socket.number);
        let mut state = socket.lock();
        state.id = None;
        state.destroy(adapter);
        return Err(Errno::EIO);
    }
    Ok(())
}

/// Takes all events of connection management. For the helper.
pub(crate) fn take_events(adapter: &'static Adapter) {
    while let Ok(event) = adapter.engine.cm_take_event(adapter.events) {
        if event.kind == EventKind::ConnectRequest {
            match find(event.listener) {
                Some(listener) => requested(adapter, &listener, &event),
                None => drop(adapter.engine.cm_destroy_id(event.id)),
            }
        } else if let Some(socket) = find(event.cookie) {
            socket.handle(adapter, &event);
        }
    }
}

/// Counts a descriptor of the program.
pub(crate) fn add_descriptor(socket: &Socket) {
    socket.descriptors.fetch_add(1, Ordering::AcqRel);
}

/// A descriptor of the program is gone.
pub(crate) fn remove_descriptor(socket: &Arc<Socket>) {
    if socket.descriptors.fetch_sub(1, Ordering::AcqRel) == 1 {
        socket.close();
    }
}

/// The descriptor of a connection that accept(2) returns.
pub(crate) fn unpark(socket: &Socket, flags: c_int) -> Result<RawFd, Errno> {
    use std::os::fd::AsRawFd;
    let parked = socket.lock().parked.take().ok_or(Errno::EIO)?;
    let command =
        if flags & libc::SOCK_CLOEXEC != 0 { libc::F_DUPFD_CLOEXEC } else { libc::F_DUPFD };
    // SAFETY: fcntl(2) with integers.
    let fd = crate::sys::system(unsafe { crate::real::fcntl(parked.as_raw_fd(), command, 0) })?;
    if flags & libc::SOCK_NONBLOCK != 0 {
        socket.nonblocking.store(true, Ordering::Relaxed);
        // SAFETY: as above.
        unsafe { crate::real::fcntl(fd, libc::F_SETFL, libc::O_NONBLOCK as _) };
    }
    Ok(fd)
}
