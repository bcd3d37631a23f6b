//! An end that is a socket of smoltcp, another TCP in user space, on a TAP device or a packet socket.

use std::net::{IpAddr, SocketAddr};
use std::os::fd::AsRawFd;

use anyhow::{Context, Result, anyhow, bail, ensure};
use smoltcp::iface::{Config, Interface, SocketHandle, SocketSet};
use smoltcp::phy::{Device, Medium, RawSocket, TunTapInterface};
use smoltcp::socket::{tcp, udp};
use smoltcp::time::{Duration, Instant};
use smoltcp::wire::{EthernetAddress, HardwareAddress, IpAddress, IpCidr, IpEndpoint};

use super::stage::{End, PORT, Shared};
use crate::sys;

/// Octets of each buffer of a TCP socket: as much as a queue pair has posted.
const BUFFER: usize = 1 << 20;
/// Octets of frames that may wait in each direction of a packet socket: more than a buffer in small frames.
const ROOM: i32 = 8 << 20;
/// Datagrams and octets of each buffer of a UDP socket.
const DATAGRAMS: (usize, usize) = (16, 16 << 10);
/// The port of the first end.
const OWN_PORT: u16 = 40_000;

/// A stack on a device, with one socket.
pub(super) struct SmoltcpEnd<'a, D: Device> {
    device: D,
    interface: Interface,
    sockets: SocketSet<'static>,
    handle: SocketHandle,
    /// With whom datagrams are exchanged; none: the socket is one of TCP.
    peer: Option<Option<IpEndpoint>>,
    buffer: Vec<u8>,
    shared: &'a Shared,
}

fn address(ip: IpAddr) -> Result<IpAddress> {
    match ip {
        IpAddr::V4(ip) => Ok(ip.into()),
        IpAddr::V6(_) => bail!("IPv4 only"),
    }
}

/// A TAP device.
///
/// # Errors
///
/// It cannot be opened.
pub(super) fn tap(name: &str) -> Result<TunTapInterface> {
    TunTapInterface::new(name, Medium::Ethernet).context("the TAP device")
}

/// A packet socket on an interface of this thread's namespace.
///
/// # Errors
///
/// There is no such interface, or the right to it is missing.
pub(super) fn packet_socket(interface: &str) -> Result<RawSocket> {
    let socket = RawSocket::new(interface, Medium::Ethernet).context("the packet socket")?;
    // What it sends itself would come back, to be read and dropped; and a full window is not to be lost.
    sys::set_up_packet_socket(socket.as_raw_fd(), ROOM).context("the packet socket")?;
    Ok(socket)
}

impl<'a, D: Device> SmoltcpEnd<'a, D> {
    /// Connects to the other end, or waits for it to connect.
    pub(super) fn new(
        mut device: D,
        udp: bool,
        own: SocketAddr,
        peer: Option<SocketAddr>,
        shared: &'a Shared,
    ) -> Result<Self> {
        // Each end has its own.
        let station = [2, 0, 0, 0, 0, if peer.is_some() { 0x51 } else { 0x52 }];
        let station = HardwareAddress::Ethernet(EthernetAddress(station));
        let mut interface = Interface::new(Config::new(station), &mut device, Instant::now());
        let cidr = IpCidr::new(address(own.ip())?, 24);
        interface.update_ip_addrs(|list| {
            // There is room for one at least.
            let _ = list.push(cidr);
        });
        let remote = peer.map(|peer| address(peer.ip()).map(|ip| IpEndpoint::new(ip, peer.port())));
        let remote = remote.transpose()?;
        let mut sockets = SocketSet::new(Vec::new());
        let handle = if udp {
            sockets.add(udp_socket(if peer.is_some() { OWN_PORT } else { PORT })?)
        } else {
            sockets.add(tcp_socket())
        };
        let peer = udp.then_some(remote);
        let buffer = vec![1; BUFFER];
        let mut this = Self { device, interface, sockets, handle, peer, buffer, shared };
        if !udp {
            this.join(remote)?;
        }
        shared.second_is_ready(remote.is_none());
        Ok(this)
    }

    fn join(&mut self, remote: Option<IpEndpoint>) -> Result<()> {
        let socket = self.sockets.get_mut::<tcp::Socket<'_>>(self.handle);
        match remote {
            Some(remote) => {
                let connected = socket.connect(self.interface.context(), remote, OWN_PORT);
                connected.map_err(|error| anyhow!("connecting: {error}"))?;
            }
            None => socket.listen(PORT).map_err(|error| anyhow!("listening: {error}"))?,
        }
        self.shared.second_is_ready(remote.is_none());
        let shared = self.shared;
        shared.until("a connection", || {
            self.turn();
            Ok(self.tcp().may_send().then_some(()))
        })
    }

    fn tcp(&mut self) -> &mut tcp::Socket<'static> {
        self.sockets.get_mut(self.handle)
    }

    fn turn(&mut self) {
        self.interface.poll(Instant::now(), &mut self.device, &mut self.sockets);
    }
}

fn tcp_socket() -> tcp::Socket<'static> {
    let buffer = || tcp::SocketBuffer::new(vec![0; BUFFER]);
    let mut socket = tcp::Socket::new(buffer(), buffer());
    socket.set_nagle_enabled(false);
    socket.set_ack_delay(Some(Duration::from_millis(1)));
    socket
}

fn udp_socket(port: u16) -> Result<udp::Socket<'static>> {
    let (count, octets) = DATAGRAMS;
    let buffer =
        || udp::PacketBuffer::new(vec![udp::PacketMetadata::EMPTY; count], vec![0; octets]);
    let mut socket = udp::Socket::new(buffer(), buffer());
    socket.bind(port).map_err(|error| anyhow!("binding: {error}"))?;
    Ok(socket)
}

impl<D: Device> End for SmoltcpEnd<'_, D> {
    fn send(&mut self, len: usize) -> Result<()> {
        let (shared, mut sent) = (self.shared, 0);
        if let Some(peer) = self.peer {
            let peer = peer.context("nobody has asked")?;
            let socket = self.sockets.get_mut::<udp::Socket<'_>>(self.handle);
            let message = &self.buffer[..len];
            socket.send_slice(message, peer).map_err(|error| anyhow!("sending: {error}"))?;
            self.turn();
            return Ok(());
        }
        while sent < len {
            sent += shared.until("room", || {
                let Self { sockets, handle, buffer, .. } = self;
                let socket = sockets.get_mut::<tcp::Socket<'_>>(*handle);
                let wrote = socket.send_slice(&buffer[..(len - sent).min(BUFFER)]);
                let wrote = wrote.map_err(|error| anyhow!("sending: {error}"))?;
                self.turn();
                Ok(Some(wrote).filter(|wrote| *wrote > 0))
            })?;
        }
        Ok(())
    }

    fn receive(&mut self) -> Result<usize> {
        let shared = self.shared;
        shared.until("octets", || {
            self.turn();
            let Self { sockets, handle, buffer, peer, .. } = self;
            if let Some(peer) = peer {
                let socket = sockets.get_mut::<udp::Socket<'_>>(*handle);
                let Ok((len, from)) = socket.recv_slice(buffer) else { return Ok(None) };
                *peer = Some(from.endpoint);
                return Ok(Some(len));
            }
            let socket = sockets.get_mut::<tcp::Socket<'_>>(*handle);
            if !socket.may_recv() {
                ensure!(socket.recv_queue() == 0, "octets after the end");
                return Ok(Some(0));
            }
            let got = socket.recv_slice(buffer).map_err(|error| anyhow!("receiving: {error}"))?;
            Ok(Some(got).filter(|got| *got > 0))
        })
    }
}

impl<D: Device> Drop for SmoltcpEnd<'_, D> {
    fn drop(&mut self) {
        if self.peer.is_none() {
            // The other end is to hear of it at once.
            self.tcp().abort();
            self.turn();
        }
    }
}
