//! The kernel as the peer of a link: packets by hand, and as much TCP as it takes to see trains of segments.

use std::io::{Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, UdpSocket};
use std::os::fd::AsRawFd;
use std::time::{Duration, Instant};

use quipu_host::packet::{Checksum, Outgoing, PacketLink};
use quipu_wire::checksum::{Sum, sum};
use quipu_wire::tcp::{Flags, Options, SeqNumber};
use quipu_wire::{ethernet, ipv4, ipv6, tcp, udp};

use super::space::{ip, wait_until_local};

/// Nothing here takes that long unless it hangs.
const PATIENCE: Duration = Duration::from_secs(20);
/// Our port, and the length of what goes in trains.
const PORT: u16 = 4000;
const TRAIN: usize = 20_000;
const SEGMENT: usize = 1_300;
/// The priority of what we send, on links with tags.
pub const PRIORITY: u8 = 3;

/// The kernel's addresses and ours.
pub const KERNEL: [&str; 2] = ["10.77.0.1", "fd77::1"];
pub const OURS: [&str; 2] = ["10.77.0.2", "fd77::2"];
/// The kernel's station address.
pub const KERNEL_STATION: [u8; 6] = [2, 0, 0, 0, 0x77, 1];

/// Gives the kernel its end of a link: addresses on an interface, and ours as known neighbours.
pub fn set_up(interface: &str, link: &dyn PacketLink) {
    let show = |octets: [u8; 6]| octets.map(|octet| format!("{octet:02x}")).join(":");
    ip(&format!("link set {interface} address {}", show(KERNEL_STATION)));
    ip(&format!("link set {interface} up"));
    ip(&format!("address add {}/24 dev {interface}", KERNEL[0]));
    ip(&format!("address add {}/64 dev {interface} nodad", KERNEL[1]));
    wait_until_local(KERNEL[1]);
    for ours in OURS {
        let station = show(link.features().hardware.unwrap());
        ip(&format!("neigh add {ours} lladdr {station} dev {interface} nud permanent"));
    }
}

/// Both ends of a link, by one version of IP.
struct Ends {
    station: [u8; 6],
    kernel: IpAddr,
    ours: IpAddr,
}

/// What a frame from the kernel to us carries.
struct Arrived {
    tcp: Option<tcp::Repr>,
    payload: Vec<u8>,
    checked: bool,
    valid: bool,
}

impl Ends {
    /// A frame from us to the kernel with a transport header and payload; its checksum field holds the sum of
    /// the pseudo-header.
    fn frame(&self, protocol: u8, header: &[u8], at: usize, payload: &[u8]) -> (Vec<u8>, Checksum) {
        let mut frame = vec![0; 128];
        let v4 = self.ours.is_ipv4();
        let kind = if v4 { ethernet::kind::IPV4 } else { ethernet::kind::IPV6 };
        let ether = ethernet::Repr { destination: KERNEL_STATION, source: self.station, kind };
        let mut start = ether.emit(&mut frame);
        let len = header.len() + payload.len();
        start += self.emit_ip(&mut frame[start..], protocol, len);
        frame.truncate(start);
        frame.extend(header);
        frame.extend(payload);
        let partial = Sum::of_pseudo_header(self.ours, self.kernel, protocol, len).partial();
        frame[start + at..start + at + 2].copy_from_slice(&partial.to_be_bytes());
        (frame, Checksum { start: start as u16, at: (start + at) as u16 })
    }

    fn emit_ip(&self, out: &mut [u8], protocol: u8, len: usize) -> usize {
        let payload_len = len as u16;
        match (self.ours, self.kernel) {
            (IpAddr::V4(source), IpAddr::V4(destination)) => ipv4::Repr {
                source,
                destination,
                protocol,
                traffic_class: 0,
                hop_limit: 64,
                identification: 1,
                dont_fragment: true,
                more_fragments: false,
                fragment_offset: 0,
                payload_len,
            }
            .emit(out),
            (IpAddr::V6(source), IpAddr::V6(destination)) => ipv6::Repr {
                source,
                destination,
                next_header: protocol,
                traffic_class: 0,
                flow_label: 0,
                hop_limit: 64,
                payload_len,
            }
            .emit(out),
            _ => unreachable!("one version of IP"),
        }
    }

    fn udp(&self, port: u16, payload: &[u8]) -> (Vec<u8>, Checksum) {
        let mut header = [0; udp::LEN];
        let payload_len = payload.len() as u16;
        udp::Repr { source: PORT, destination: port, payload_len }.emit(&mut header);
        self.frame(17, &header, udp::CHECKSUM_AT, payload)
    }

    /// Reads a frame, if it is from the kernel's address to our port by `protocol`.
    fn read(&self, frame: &[u8], checked: bool, protocol: u8) -> Option<Arrived> {
        let (ether, at) = ethernet::Repr::parse(frame).ok()?;
        if ether.destination != self.station {
            return None;
        }
        let packet = &frame[at..];
        let (found, segment) = match self.ours {
            IpAddr::V4(_) => {
                let (repr, at) = ipv4::Repr::parse(packet).ok()?;
                (repr.protocol, &packet[at..][..repr.payload_len.into()])
            }
            IpAddr::V6(_) => {
                let (repr, at) = ipv6::Repr::parse(packet).ok()?;
                (repr.next_header, &packet[at..][..repr.payload_len.into()])
            }
        };
        if found != protocol || segment[2..4] != PORT.to_be_bytes() {
            return None;
        }
        let (kernel, ours) = (self.kernel, self.ours);
        let pseudo = Sum::of_pseudo_header(kernel, ours, protocol, segment.len());
        let valid = pseudo.and(sum(segment)).is_valid();
        let (tcp, at) = if protocol == 6 {
            let (repr, at) = tcp::Repr::parse(segment).ok()?;
            (Some(repr), at)
        } else {
            (None, udp::Repr::parse(segment).ok()?.1)
        };
        Some(Arrived { tcp, payload: segment[at..].to_vec(), checked, valid })
    }
}

/// Computes a checksum as links without offload want it.
pub fn seal(frame: &mut [u8], checksum: Checksum) {
    let (start, at) = (usize::from(checksum.start), usize::from(checksum.at));
    let value = sum(&frame[start..]).checksum();
    frame[at..at + 2].copy_from_slice(&value.to_be_bytes());
}

/// Sends a frame, with its checksum computed by the link where it can.
fn put(link: &mut dyn PacketLink, mut frame: Vec<u8>, checksum: Checksum, segment: Option<u16>) {
    let offload = link.features().checksum;
    if !offload {
        seal(&mut frame, checksum);
    }
    let checksum = offload.then_some(checksum);
    put_as_it_is(link, &frame, checksum, segment);
}

/// Sends a frame.
pub fn put_as_it_is(
    link: &mut dyn PacketLink,
    frame: &[u8],
    checksum: Option<Checksum>,
    segment: Option<u16>,
) {
    let deadline = Instant::now() + PATIENCE;
    while link.slot().is_none() {
        assert!(Instant::now() < deadline, "the link stays full");
        wait(link, libc::POLLOUT);
        link.flush().unwrap();
    }
    link.slot().unwrap()[..frame.len()].copy_from_slice(frame);
    link.send(Outgoing { len: frame.len(), checksum, segment, priority: PRIORITY });
    link.flush().unwrap();
}

/// Waits a little for the link.
pub fn wait(link: &dyn PacketLink, events: libc::c_short) {
    let mut poll = libc::pollfd { fd: link.descriptor().as_raw_fd(), events, revents: 0 };
    // SAFETY: one pollfd in a live variable.
    unsafe { libc::poll(&raw mut poll, 1, 50) };
}

/// The next frames of which `wanted` makes something: at least one, with all that came with it.
pub fn next<T>(
    link: &mut dyn PacketLink,
    mut wanted: impl FnMut(&[u8], bool) -> Option<T>,
) -> Vec<T> {
    let deadline = Instant::now() + PATIENCE;
    let mut found = Vec::new();
    while found.is_empty() {
        assert!(Instant::now() < deadline, "nothing came");
        wait(link, libc::POLLIN);
        link.receive(64, &mut |frame| found.extend(wanted(frame.bytes, frame.checked))).unwrap();
    }
    found
}

/// Everything that goes over a link to the kernel and back, by both versions of IP. `uncut` says whether the
/// kernel's segments come in trains.
pub fn talk(link: &mut dyn PacketLink, uncut: bool) {
    for (kernel, ours) in KERNEL.into_iter().zip(OURS) {
        let station = link.features().hardware.unwrap();
        let ends = Ends { station, kernel: kernel.parse().unwrap(), ours: ours.parse().unwrap() };
        datagrams(link, &ends);
        segments(link, &ends, uncut);
    }
}

/// Datagrams both ways, one that is corrupt, and a train from the kernel.
fn datagrams(link: &mut dyn PacketLink, ends: &Ends) {
    let socket = UdpSocket::bind((ends.kernel, 0)).unwrap();
    socket.set_read_timeout(Some(PATIENCE)).unwrap();
    let port = socket.local_addr().unwrap().port();
    let mut buffer = [0; 2000];
    for len in [0, 1, 999, 1400] {
        let payload: Vec<u8> = (0..len).map(|i| (i % 251) as u8).collect();
        let (mut frame, checksum) = ends.udp(port, &payload);
        put(link, frame.clone(), checksum, None);
        let (got, from) = socket.recv_from(&mut buffer).unwrap();
        assert_eq!((&buffer[..got], from), (&payload[..], SocketAddr::new(ends.ours, PORT)));
        // Wrong by one, and then right.
        seal(&mut frame, checksum);
        frame[usize::from(checksum.at)] ^= 1;
        put_as_it_is(link, &frame, None, None);
        frame[usize::from(checksum.at)] ^= 1;
        put_as_it_is(link, &frame, None, None);
        let got = socket.recv(&mut buffer).unwrap();
        assert_eq!(&buffer[..got], payload);
        socket.send_to(&payload, (ends.ours, PORT)).unwrap();
        let arrived = next(link, |frame, checked| ends.read(frame, checked, 17));
        assert_eq!(arrived.len(), 1);
        assert_eq!(arrived[0].payload, payload);
        assert!(arrived[0].checked || arrived[0].valid);
    }
    socket.set_nonblocking(true).unwrap();
    assert!(socket.recv(&mut buffer).is_err(), "what was corrupt has not arrived");
    train(link, ends, &socket);
}

/// A train of datagrams from the kernel, which we see one by one.
fn train(link: &mut dyn PacketLink, ends: &Ends, socket: &UdpSocket) {
    let size: libc::c_int = 1000;
    // SAFETY: the kernel reads an integer from a live variable.
    let done = unsafe {
        let pointer = (&raw const size).cast();
        libc::setsockopt(socket.as_raw_fd(), libc::SOL_UDP, libc::UDP_SEGMENT, pointer, 4)
    };
    assert_eq!(done, 0, "{}", std::io::Error::last_os_error());
    let payload: Vec<u8> = (0..4700).map(|i| (i % 241) as u8).collect();
    socket.send_to(&payload, (ends.ours, PORT)).unwrap();
    let mut got = Vec::new();
    while got.len() < 5 {
        got.extend(next(link, |frame, checked| ends.read(frame, checked, 17)));
    }
    assert!(got.iter().all(|datagram| datagram.checked || datagram.valid));
    let lens: Vec<_> = got.iter().map(|datagram| datagram.payload.len()).collect();
    assert_eq!(lens, [1000, 1000, 1000, 1000, 700]);
    assert_eq!(got.into_iter().flat_map(|d| d.payload).collect::<Vec<_>>(), payload);
}

/// A connection to the kernel, with long trains of segments both ways where the link does that.
fn segments(link: &mut dyn PacketLink, ends: &Ends, uncut: bool) {
    let listener = TcpListener::bind((ends.kernel, 0)).unwrap();
    let mut client = Client::connect(link, ends, listener.local_addr().unwrap().port());
    let (mut stream, _) = listener.accept().unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    let payload: Vec<u8> = (0..TRAIN).map(|i| (i % 239) as u8).collect();
    if link.features().segment == 0 {
        payload.chunks(SEGMENT).for_each(|part| client.send(link, ends, part, None));
    } else {
        client.send(link, ends, &payload, Some(SEGMENT as u16));
    }
    let mut got = vec![0; TRAIN];
    stream.read_exact(&mut got).unwrap();
    assert!(got == payload);
    stream.write_all(&payload).unwrap();
    let (got, longest) = client.receive(link, ends, TRAIN);
    assert!(got == payload);
    assert_eq!(longest > 1460, uncut, "{longest}");
}

/// Our end of a connection.
struct Client {
    port: u16,
    seq: SeqNumber,
    ack: SeqNumber,
}

impl Client {
    fn connect(link: &mut dyn PacketLink, ends: &Ends, port: u16) -> Self {
        let mut client = Self { port, seq: SeqNumber(1000), ack: SeqNumber(0) };
        let options = Options { mss: Some(1400), ..Options::default() };
        client.emit(link, ends, Flags::SYN, options, &[], None);
        client.seq = SeqNumber(1001);
        let answers = next(link, |frame, checked| client.read(ends, frame, checked)?.tcp);
        assert!(answers[0].flags.has(Flags::SYN.with(Flags::ACK, true)), "{answers:?}");
        client.ack = SeqNumber(answers[0].seq.0.wrapping_add(1));
        client.emit(link, ends, Flags::ACK, Options::default(), &[], None);
        client
    }

    fn emit(
        &self,
        link: &mut dyn PacketLink,
        ends: &Ends,
        flags: Flags,
        options: Options,
        payload: &[u8],
        segment: Option<u16>,
    ) {
        let (seq, ack) = (self.seq, self.ack);
        let (source, destination, window, urgent) = (PORT, self.port, 65_535, 0);
        let repr = tcp::Repr { source, destination, seq, ack, flags, window, urgent, options };
        let mut header = [0; tcp::MAX_LEN];
        let len = repr.emit(&mut header);
        let (frame, checksum) = ends.frame(6, &header[..len], tcp::CHECKSUM_AT, payload);
        put(link, frame, checksum, segment);
    }

    fn send(&mut self, link: &mut dyn PacketLink, ends: &Ends, payload: &[u8], size: Option<u16>) {
        let flags = Flags::ACK.with(Flags::PSH, true);
        self.emit(link, ends, flags, Options::default(), payload, size);
        self.seq = SeqNumber(self.seq.0.wrapping_add(payload.len() as u32));
    }

    /// A segment of this connection; those before it may send their ends again.
    fn read(&self, ends: &Ends, frame: &[u8], checked: bool) -> Option<Arrived> {
        let arrived = ends.read(frame, checked, 6)?;
        arrived.tcp.as_ref().is_some_and(|tcp| tcp.source == self.port).then_some(arrived)
    }

    /// Receives and acknowledges `len` octets; with the length of the longest segment.
    fn receive(&mut self, link: &mut dyn PacketLink, ends: &Ends, len: usize) -> (Vec<u8>, usize) {
        let mut got = Vec::new();
        let mut longest = 0;
        while got.len() < len {
            for arrived in next(link, |frame, checked| self.read(ends, frame, checked)) {
                assert!(arrived.checked || arrived.valid);
                if arrived.tcp.is_some_and(|tcp| tcp.seq == self.ack) {
                    self.ack = SeqNumber(self.ack.0.wrapping_add(arrived.payload.len() as u32));
                    longest = longest.max(arrived.payload.len());
                    got.extend(arrived.payload);
                }
            }
            self.emit(link, ends, Flags::ACK, Options::default(), &[], None);
        }
        (got, longest)
    }
}
