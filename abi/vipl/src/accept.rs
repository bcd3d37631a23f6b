//! The end of a connection that waits: `VipConnectWait`, `VipConnectAccept`, `VipConnectReject`.

use std::io::Write;
use std::net::TcpStream;
use std::sync::Arc;
use std::time::Duration;

use libc::c_ulong;
use quipu::Endpoint;
use quipu_cabi::entry;
use quipu_via::address;
use quipu_via::attributes::Attributes;
use quipu_via::codes::{Code, Outcome};
use quipu_via::meeting::Wait;
use quipu_via::message::{End, Message, Request};
use quipu_via::vi::{Completed, Event};

use crate::handle::{self, Id, Kind};
use crate::nic::{Deadline, Nic, report};
use crate::request::read_message;
use crate::touch::{self, give};
use crate::types::{VIP_NET_ADDRESS, VIP_PVOID, VIP_VI_ATTRIBUTES, VipReturn, code};
use crate::vi::shown;

/// How long the peer has for its next message once both programs want the connection.
pub(crate) const HANDSHAKE: Duration = Duration::from_secs(5);
/// What a wait that looks once waits for a request that is on its way through this process.
const LOOK_ONCE: c_ulong = 2;

/// A request that has met a wait.
pub(crate) struct Incoming {
    pub(crate) stream: TcpStream,
    pub(crate) request: Request,
}

impl Nic {
    /// The connection of a VI stands: receives go to the adapter.
    pub(crate) fn establish(&self, id: Id, generation: u32, stream: Arc<TcpStream>) -> Outcome {
        let mut state = self.lock();
        let entry = state.linked(id, generation)?;
        entry.vi.change(Event::Establish, &mut Completed::new())?;
        if let Some(link) = &mut entry.link {
            (link.live, link.stream) = (true, Some(stream));
        }
        self.feed(&mut state, id);
        self.wake(&state);
        Ok(())
    }

    /// Joins the queue pair of a VI with that of the peer.
    pub(crate) fn join(&self, id: Id, generation: u32, peer: &End) -> Outcome {
        let mut state = self.lock();
        let entry = state.linked(id, generation)?;
        let Some(link) = &entry.link else { return Err(Code::InvalidState) };
        link.qp.connect(&Endpoint::from_bytes(&peer.endpoint)).map_err(report)
    }

    /// Answers a request on behalf of a VI that is CONNECT_PENDING: its link has this generation and its
    /// queue pair this endpoint.
    pub(crate) fn answer(
        &self,
        id: Id,
        link: (u32, [u8; 24]),
        own: Attributes,
        incoming: Incoming,
    ) -> Outcome {
        let (generation, endpoint) = link;
        let Incoming { mut stream, request } = incoming;
        stream.set_nonblocking(false).map_err(|_| Code::ErrorResource)?;
        stream.set_write_timeout(Some(HANDSHAKE)).map_err(|_| Code::ErrorResource)?;
        self.join(id, generation, &request.end)?;
        let accept = Message::Accept(End { attributes: own, endpoint });
        let deadline = Deadline::after(HANDSHAKE.as_millis() as c_ulong);
        let sent = stream.write_all(&accept.to_bytes());
        match sent
            .map_err(|_| Code::Timeout)
            .and_then(|()| read_message(&mut stream, deadline, &|| true))
        {
            Ok(Message::Joined) => {}
            // The requester has given up.
            _ => return Err(Code::Timeout),
        }
        keep(&stream);
        let stream = Arc::new(stream);
        self.establish(id, generation, stream.clone())?;
        let sent = (&*stream).write_all(&Message::Joined.to_bytes());
        stream.set_nonblocking(true).map_err(|_| Code::ErrorResource)?;
        self.control.watch(stream, id, generation);
        // If the peer is gone already, the thread that watches finds out.
        drop(sent);
        Ok(())
    }
}

/// Has the kernel find out in half a minute that the peer's host is gone.
pub(crate) fn keep(stream: &TcpStream) {
    use std::os::fd::AsRawFd;
    let _ = stream.set_nodelay(true);
    let set = |level, name, value: i32| {
        // SAFETY: the option is an int, whose address and size are passed.
        unsafe {
            libc::setsockopt(stream.as_raw_fd(), level, name, (&raw const value).cast(), 4);
        }
    };
    set(libc::SOL_SOCKET, libc::SO_KEEPALIVE, 1);
    set(libc::IPPROTO_TCP, libc::TCP_KEEPIDLE, 10);
    set(libc::IPPROTO_TCP, libc::TCP_KEEPINTVL, 5);
    set(libc::IPPROTO_TCP, libc::TCP_KEEPCNT, 4);
}

fn wait(
    raw: VIP_PVOID,
    local: *const VIP_NET_ADDRESS,
    timeout: c_ulong,
    remote: *mut VIP_NET_ADDRESS,
    attributes: *mut VIP_VI_ATTRIBUTES,
    out: *mut VIP_PVOID,
) -> Outcome {
    let nic = handle::nic(raw)?.here()?;
    let (_, discriminator) = touch::net_address(local)?;
    if remote.is_null() || attributes.is_null() || out.is_null() {
        return Err(Code::InvalidParameter);
    }
    nic.control.start(&nic)?;
    let id = nic.control.announce(&nic, Wait::Client { discriminator })?;
    let found = nic.control.await_request(id, Deadline::after(timeout.max(LOOK_ONCE)));
    let late = nic.control.withdraw(id);
    let incoming = found.or(late).ok_or(Code::Timeout)?;
    let host = address::bytes_of(incoming.request.local.host);
    touch::put_net_address(remote, &host, &incoming.request.local.discriminator);
    give(attributes, shown(&incoming.request.end.attributes, std::ptr::null_mut()))?;
    let id = handle::fresh();
    nic.lock().connections.insert(id, incoming);
    give(out, nic.handle_of(Kind::Connection, id))
}

fn accept(raw: VIP_PVOID, vi: VIP_PVOID) -> Outcome {
    let (nic, connection) = handle::object(Kind::Connection, raw)?;
    let (of, id) = handle::object(Kind::Vi, vi)?;
    if of.number != nic.number {
        return Err(Code::InvalidParameter);
    }
    let (incoming, own) = {
        let mut state = nic.lock();
        let own = state.vi(id)?.vi.attributes;
        let incoming = state.connections.get(&connection).ok_or(Code::InvalidParameter)?;
        let theirs = incoming.request.end.attributes;
        if state.vi(id)?.vi.state() != quipu_via::codes::State::Idle {
            return Err(Code::InvalidState);
        }
        // After a conflict the program may change the attributes and accept again.
        own.agree(&theirs)?;
        (state.connections.remove(&connection).ok_or(Code::InvalidParameter)?, own)
    };
    let link = match nic.begin(id) {
        Ok(link) => link,
        Err(failed) => {
            nic.lock().connections.insert(connection, incoming);
            return Err(failed);
        }
    };
    let answered = nic.answer(id, link, own, incoming);
    if answered.is_err() {
        nic.give_up(id, link.0);
    }
    answered
}

fn reject(raw: VIP_PVOID) -> Outcome {
    let (nic, connection) = handle::object(Kind::Connection, raw)?;
    let removed = nic.lock().connections.remove(&connection);
    let Incoming { mut stream, .. } = removed.ok_or(Code::InvalidParameter)?;
    let _ = stream.write_all(&Message::Reject.to_bytes());
    Ok(())
}

entry! {
    /// `VipConnectWait`
    fn VipConnectWait(
        nic: VIP_PVOID,
        local: *const VIP_NET_ADDRESS,
        timeout: c_ulong,
        remote: *mut VIP_NET_ADDRESS,
        attributes: *mut VIP_VI_ATTRIBUTES,
        out: *mut VIP_PVOID,
    ) -> VipReturn {
        code(wait(nic, local, timeout, remote, attributes, out))
    }

    /// `VipConnectAccept`
    fn VipConnectAccept(connection: VIP_PVOID, vi: VIP_PVOID) -> VipReturn {
        code(accept(connection, vi))
    }

    /// `VipConnectReject`
    fn VipConnectReject(connection: VIP_PVOID) -> VipReturn {
        code(reject(connection))
    }
}
