//! The end of a connection that asks: `VipConnectRequest`.

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

use libc::c_ulong;
use quipu_cabi::descriptors::with_more_descriptors;
use quipu_cabi::entry;
use quipu_via::address::{self, NetAddress, ports};
use quipu_via::attributes::Attributes;
use quipu_via::codes::{Code, Outcome};
use quipu_via::message::{End, MAX_LEN, Message, Request, first_body};

use crate::accept::{HANDSHAKE, keep};
use crate::handle::{self, Id, Kind};
use crate::nic::{Deadline, Nic};
use crate::touch::{self, give};
use crate::types::{VIP_NET_ADDRESS, VIP_PVOID, VIP_VI_ATTRIBUTES, VipReturn, code};
use crate::vi::shown;

/// The longest that one system call waits: a program may disconnect meanwhile, or close the NIC.
const SLICE: Duration = Duration::from_millis(100);
/// How long a listener has to say that it has heard a request. One that a dead process has left to its child
/// never does.
const HEARING: Duration = Duration::from_secs(2);

/// Reads one message from a blocking stream.
///
/// # Errors
///
/// [`Code::Timeout`]; [`Code::InvalidState`] if the call is not to go on; [`Code::ErrorResource`] if the peer
/// closes the connection or says nonsense.
pub(crate) fn read_message(
    stream: &mut TcpStream,
    deadline: Deadline,
    goes_on: &dyn Fn() -> bool,
) -> Outcome<Message> {
    let mut bytes = Vec::new();
    loop {
        match first_body(&bytes) {
            Ok(Some((body, _))) => {
                return Message::parse(body).map_err(|_| Code::ErrorResource);
            }
            Ok(None) => {}
            Err(_) => return Err(Code::ErrorResource),
        }
        // One message at a time: what follows is not this call's.
        let wanted = match bytes[..] {
            [high, low, ..] => 2 + usize::from(u16::from_be_bytes([high, low])) - bytes.len(),
            _ => 2 - bytes.len(),
        };
        let left = deadline.left().unwrap_or(SLICE).min(SLICE);
        if left.is_zero() {
            return Err(Code::Timeout);
        }
        stream.set_read_timeout(Some(left)).map_err(|_| Code::ErrorResource)?;
        let mut more = [0; MAX_LEN + 2];
        match stream.read(&mut more[..wanted.min(MAX_LEN)]) {
            Ok(0) => return Err(Code::ErrorResource),
            Ok(count) => bytes.extend(&more[..count]),
            Err(error) if is_patience(&error) => {
                if !goes_on() {
                    return Err(Code::InvalidState);
                }
            }
            Err(_) => return Err(Code::ErrorResource),
        }
    }
}

fn is_patience(error: &io::Error) -> bool {
    use io::ErrorKind::{Interrupted, TimedOut, WouldBlock};
    [Interrupted, TimedOut, WouldBlock].contains(&error.kind())
}

/// A peer that wants the connection.
pub(crate) struct Accepted {
    stream: TcpStream,
    pub(crate) end: End,
}

impl Nic {
    /// Asks at all ports at which somebody may wait.
    pub(crate) fn dial(
        &self,
        request: &Request,
        deadline: Deadline,
        goes_on: &dyn Fn() -> bool,
    ) -> Outcome<Accepted> {
        let host = self.reachable(request.remote.host);
        for port in ports(&request.remote.discriminator) {
            match self.ask(SocketAddr::new(host, port), request, deadline, goes_on) {
                Err(Code::NoMatch) => {}
                other => return other,
            }
        }
        Err(Code::NoMatch)
    }

    /// Whether a VI still wants the connection that it has requested.
    pub(crate) fn goes_on(&self, id: Id, generation: u32) -> bool {
        !self.is_closed() && self.lock().linked(id, generation).is_ok()
    }

    /// Where a program is that calls itself by this address: an address of the loopback is the own one.
    fn reachable(&self, host: std::net::IpAddr) -> std::net::IpAddr {
        let own = self.device.address();
        if host.is_loopback() && !own.is_loopback() && !self.has_all_addresses { own } else { host }
    }

    fn ask(
        &self,
        at: SocketAddr,
        request: &Request,
        deadline: Deadline,
        goes_on: &dyn Fn() -> bool,
    ) -> Outcome<Accepted> {
        let mut stream = connect(at, deadline)?;
        let left = deadline.left().unwrap_or(Duration::MAX);
        let timeout_ms = u64::try_from(left.as_millis()).unwrap_or(u64::MAX);
        let request = Message::Request(Box::new(Request { timeout_ms, ..request.clone() }));
        stream.set_write_timeout(Some(HANDSHAKE)).map_err(|_| Code::ErrorResource)?;
        if stream.write_all(&request.to_bytes()).is_err() {
            return Err(Code::NoMatch);
        }
        let mut hearing = Deadline(Some(Instant::now() + HEARING));
        if deadline.left().is_some_and(|left| left < HEARING) {
            hearing = deadline;
        }
        match read_message(&mut stream, hearing, goes_on) {
            Ok(Message::Heard) => {}
            Err(Code::Timeout) if deadline.is_over() => return Err(Code::Timeout),
            Err(Code::InvalidState) => return Err(Code::InvalidState),
            _ => return Err(Code::NoMatch),
        }
        match read_message(&mut stream, deadline, goes_on) {
            Ok(Message::Accept(end)) => Ok(Accepted { stream, end }),
            Ok(Message::Reject) => Err(Code::Reject),
            // Another program may have the port.
            Ok(_) | Err(Code::ErrorResource) => Err(Code::NoMatch),
            Err(other) => Err(other),
        }
    }

    /// Joins a VI that is CONNECT_PENDING with the peer that wants it.
    pub(crate) fn finish(
        &self,
        id: Id,
        generation: u32,
        own: Attributes,
        accepted: Accepted,
    ) -> Outcome<Attributes> {
        let Accepted { mut stream, end } = accepted;
        own.agree(&end.attributes)?;
        self.join(id, generation, &end)?;
        keep(&stream);
        let shared = Arc::new(stream.try_clone().map_err(|_| Code::ErrorResource)?);
        self.establish(id, generation, shared.clone())?;
        let deadline = Deadline::after(HANDSHAKE.as_millis() as c_ulong);
        let sent = stream.write_all(&Message::Joined.to_bytes());
        let joined = sent
            .map_err(|_| Code::ErrorResource)
            .and_then(|()| read_message(&mut stream, deadline, &|| true));
        if !matches!(joined, Ok(Message::Joined)) || stream.set_nonblocking(true).is_err() {
            self.disconnect(&mut self.lock(), id);
            return Err(Code::Timeout);
        }
        self.control.watch(shared, id, generation);
        Ok(end.attributes)
    }
}

fn connect(at: SocketAddr, deadline: Deadline) -> Outcome<TcpStream> {
    use io::ErrorKind::{HostUnreachable, NetworkUnreachable, TimedOut, WouldBlock};
    let left = deadline.left().unwrap_or(Duration::from_secs(3600));
    if left.is_zero() {
        return Err(Code::Timeout);
    }
    with_more_descriptors(|| TcpStream::connect_timeout(&at, left)).map_err(|error| {
        match error.kind() {
            TimedOut | WouldBlock => Code::Timeout,
            HostUnreachable | NetworkUnreachable => Code::NotReachable,
            _ => match error.raw_os_error() {
                Some(libc::EMFILE | libc::ENFILE | libc::ENOMEM | libc::ENOBUFS) => {
                    Code::ErrorResource
                }
                Some(libc::EINVAL | libc::EAFNOSUPPORT | libc::EADDRNOTAVAIL) => Code::NotReachable,
                _ => Code::NoMatch,
            },
        }
    })
}

/// The addresses of a request. A local address without a host has the NIC's.
pub(crate) fn addresses(
    nic: &Nic,
    local: *const VIP_NET_ADDRESS,
    remote: *const VIP_NET_ADDRESS,
) -> Outcome<(NetAddress, NetAddress)> {
    let (local, discriminator) = touch::net_address(local)?;
    let own = || NetAddress { host: nic.device.address(), discriminator };
    let local = local.filter(|local| !local.host.is_unspecified()).unwrap_or_else(own);
    let (remote, _) = touch::net_address(remote)?;
    let remote = remote.ok_or(Code::InvalidParameter)?;
    let len = |address: &NetAddress| address::bytes_of(address.host).len();
    if [len(&local), len(&remote)] != [nic.address.len(); 2] {
        return Err(Code::InvalidParameter);
    }
    Ok((local, remote))
}

fn request(
    raw: VIP_PVOID,
    local: *const VIP_NET_ADDRESS,
    remote: *const VIP_NET_ADDRESS,
    timeout: c_ulong,
    out: *mut VIP_VI_ATTRIBUTES,
) -> Outcome {
    let (nic, id) = handle::object(Kind::Vi, raw)?;
    let (local, remote) = addresses(&nic, local, remote)?;
    if out.is_null() || timeout == 0 {
        return Err(Code::InvalidParameter);
    }
    let deadline = Deadline::after(timeout);
    nic.control.start(&nic)?;
    let attributes = nic.lock().vi(id)?.vi.attributes;
    let (generation, endpoint) = nic.begin(id)?;
    let end = End { attributes, endpoint };
    let asked = Request { is_peer: false, nonce: 0, timeout_ms: 0, local, remote, end };
    let goes_on = || nic.goes_on(id, generation);
    let accepted = nic.dial(&asked, deadline, &goes_on);
    let joined = accepted.and_then(|accepted| nic.finish(id, generation, attributes, accepted));
    match joined {
        Ok(theirs) => give(out, shown(&theirs, std::ptr::null_mut())),
        Err(failed) => {
            nic.give_up(id, generation);
            Err(failed)
        }
    }
}

entry! {
    /// `VipConnectRequest`
    fn VipConnectRequest(
        vi: VIP_PVOID,
        local: *const VIP_NET_ADDRESS,
        remote: *const VIP_NET_ADDRESS,
        timeout: c_ulong,
        attributes: *mut VIP_VI_ATTRIBUTES,
    ) -> VipReturn {
        code(request(vi, local, remote, timeout, attributes))
    }
}
