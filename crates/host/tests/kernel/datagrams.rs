//! UDP queue pairs and the kernel's UDP sockets: datagrams of every length, most of them longer than a
//! packet, whole at the other end, whichever end cuts them; and a path that becomes narrower.

use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use quipu_host::nic::mem::Segment;
use quipu_host::nic::{
    Access, Completion, CqId, Payload, PdId, QpCap, QpId, QpInit, QpType, Region, SendFlags,
    SendOp, SendWr, Sge, To, WcExtra, WcStatus,
};
use quipu_host::{ContextId, Engine};

use super::adapter::{Adapter, Link, PATIENCE, destroy};
use super::pairs::{fill, first_wrong};
use super::socket::{KERNEL, OURS, VERSIONS};
use super::space::{behind_router, inside, ip};

/// The longest datagram, by version.
const MOST: [usize; 2] = [65_507, 65_527];
/// Octets of the headers of IP and UDP, by version.
const HEADERS: [usize; 2] = [28, 48];
const ROOM: usize = 1 << 16;
const SEND: u64 = 1;
const RECEIVE: u64 = 2;

/// A queue pair at a UDP port, with one place to send from and one to receive into.
struct Datagrams {
    engine: Arc<Engine>,
    context: ContextId,
    pd: PdId,
    cq: CqId,
    qp: QpId,
    memory: Segment,
    region: Region,
    port: u16,
}

impl Datagrams {
    fn new(adapter: &Adapter) -> Self {
        let engine = Arc::clone(&adapter.engine);
        let (context, _) = engine.open_context().unwrap();
        let pd = engine.alloc_pd().unwrap();
        let (cq, _) = engine.create_cq(context, 16, None, 0).unwrap();
        let memory = Segment::heap(2 * ROOM);
        let region = engine.reg_segment(pd, &memory, None, Access::LOCAL_WRITE).unwrap();
        let cap = QpCap {
            max_send_wr: 4,
            max_recv_wr: 4,
            max_send_sge: 2,
            max_recv_sge: 1,
            max_inline_data: 0,
        };
        let (send_cq, recv_cq, qp_type) = (cq, cq, QpType::Udp);
        let init = QpInit { pd, send_cq, recv_cq, srq: None, cap, qp_type, sq_sig_all: true };
        let (qp, _, _) = engine.create_qp(context, &init).unwrap();
        let port = engine.udp_bind(qp, 0).unwrap();
        let this = Self { engine, context, pd, cq, qp, memory, region, port };
        this.post_receive();
        this
    }

    fn sge(&self, at: usize, len: usize) -> Sge {
        Sge { addr: (self.memory.addr() + at) as u64, len: len as u32, lkey: self.region.key }
    }

    fn post_receive(&self) {
        self.engine.post_recv(self.qp, RECEIVE, &[self.sge(ROOM, ROOM)]).unwrap();
    }

    /// The next completion.
    fn next(&self) -> Completion {
        let deadline = Instant::now() + PATIENCE;
        let mut out = [Completion::default()];
        while self.engine.poll_cq(self.cq, &mut out).unwrap() == 0 {
            assert!(Instant::now() < deadline, "nothing completes");
            thread::yield_now();
        }
        out[0]
    }

    fn send(&self, to: SocketAddr, len: usize) {
        self.memory.write(0, &fill(true, 0, len as u64)).unwrap();
        // Two pieces, the first of an odd length.
        let first = (len / 2) | 1;
        let list = [self.sge(0, first.min(len)), self.sge(first.min(len), len - first.min(len))];
        let (to, flags, payload) = (To::Address(to), SendFlags::SIGNALED, Payload::Sges(&list));
        let wr = SendWr { wr_id: SEND, to, op: SendOp::Send, flags, payload };
        self.engine.post_send(self.qp, &wr).unwrap();
        let done = self.next();
        assert_eq!((done.wr_id, done.status), (SEND, WcStatus::Success), "{len} octets");
    }

    /// A datagram that has come: from whom, and what.
    fn receive(&self) -> (SocketAddr, Vec<u8>) {
        let done = self.next();
        assert_eq!((done.wr_id, done.status), (RECEIVE, WcStatus::Success));
        let WcExtra::From(from) = done.extra else { panic!("from nobody") };
        let mut came = vec![0; done.byte_len as usize];
        self.memory.read(ROOM, &mut came).unwrap();
        self.post_receive();
        (from.into(), came)
    }
}

impl Drop for Datagrams {
    fn drop(&mut self) {
        let Self { engine, qp, cq, region, pd, context, .. } = self;
        destroy(engine, (*qp, *cq, region.id, *pd, *context));
    }
}

fn socket(address: &str) -> UdpSocket {
    let socket = UdpSocket::bind((address.parse::<IpAddr>().unwrap(), 0)).unwrap();
    socket.set_read_timeout(Some(PATIENCE)).unwrap();
    socket
}

/// Receives a datagram of this length from the adapter, and looks at every octet.
fn take(socket: &UdpSocket, len: usize, from: SocketAddr) {
    let mut room = vec![0; ROOM];
    let (came, sender) = socket.recv_from(&mut room).unwrap();
    assert_eq!((came, sender), (len, from));
    assert_eq!(first_wrong(true, 0, &room[..came]), None, "{len} octets");
}

/// Every length at a boundary, there and back.
fn over(name: &str, link: Link, mtu: usize) {
    if !inside(&format!("datagrams::{name}")) {
        return;
    }
    let Some(adapter) = Adapter::new(link, mtu as u32) else { return };
    let end = Datagrams::new(&adapter);
    for version in VERSIONS {
        let kernel = socket(KERNEL[version]);
        let ours = SocketAddr::new(OURS[version].parse().unwrap(), end.port);
        let to = kernel.local_addr().unwrap();
        let (fits, most) = (mtu - HEADERS[version], MOST[version]);
        let unit = (mtu - HEADERS[version]) & !7;
        let edges = [fits, fits + 1, 2 * unit - 8, 2 * unit, 3 * unit - 7, 20_001, most - 1, most];
        for len in edges.into_iter().chain([0, 1]).filter(|len| *len <= most) {
            end.send(to, len);
            take(&kernel, len, ours);
            kernel.send_to(&fill(false, 0, len as u64), ours).unwrap();
            let (from, came) = end.receive();
            assert_eq!((from, came.len()), (to, len));
            assert_eq!(first_wrong(false, 0, &came), None, "{len} octets");
        }
        // The kernel says so as well.
        assert!(kernel.send_to(&vec![0; most + 1], ours).is_err());
    }
}

#[test]
fn over_a_tap_of_1500() {
    over("over_a_tap_of_1500", Link::Tap, 1_500);
}

#[test]
fn over_a_tap_of_1280() {
    over("over_a_tap_of_1280", Link::Tap, 1_280);
}

#[test]
fn over_a_tap_of_9000() {
    over("over_a_tap_of_9000", Link::Tap, 9_000);
}

#[test]
fn over_a_tap_of_65521() {
    over("over_a_tap_of_65521", Link::Tap, 65_521);
}

#[test]
fn over_a_packet_socket() {
    over("over_a_packet_socket", Link::Packet, 1_500);
}

#[test]
fn over_an_xdp_socket() {
    over("over_an_xdp_socket", Link::Xdp, 1_500);
}

/// Receives what comes within a while: a datagram of this length.
fn take_any(socket: &UdpSocket, len: usize, when: &str) {
    let mut room = vec![0; ROOM];
    match socket.recv(&mut room) {
        Ok(came) => assert_eq!((came, first_wrong(true, 0, &room[..came])), (len, None)),
        Err(error) => panic!("{when}, {socket:?}: {error}"),
    }
}

/// A router whose next link becomes narrower: over IPv4 it cuts the parts again; over IPv6 it says how long
/// they may be, and the datagrams that come behind get through.
#[test]
fn the_path_becomes_narrower() {
    // Several have room in a socket.
    const LEN: usize = 10_000;
    if !inside("datagrams::the_path_becomes_narrower") {
        return;
    }
    let Some(adapter) = Adapter::new(Link::Tap, 1_500) else { return };
    let (tell, hear) = mpsc::channel::<Vec<SocketAddr>>();
    let (go, wait) = mpsc::channel::<()>();
    let (enough, came) = mpsc::channel::<()>();
    let client = behind_router([1_500; 2], [""; 2], move || {
        let sockets = ["10.8.0.2", "fd08::2"].map(socket);
        let addresses = sockets.iter().map(|it| it.local_addr().unwrap()).collect();
        tell.send(addresses).unwrap();
        for socket in &sockets {
            take_any(socket, LEN, "the path is as wide as the link");
            wait.recv().unwrap();
            for count in 0..4 {
                take_any(socket, LEN, &format!("datagram {count} of the narrow path"));
            }
            enough.send(()).unwrap();
        }
    });
    let to = hear.recv().unwrap();
    let end = Datagrams::new(&adapter);
    for (version, to) in to.into_iter().enumerate() {
        end.send(to, LEN);
        thread::sleep(Duration::from_millis(200));
        ip("link set va mtu 1300");
        go.send(()).unwrap();
        // Over IPv4 none is lost, over IPv6 those that are on their way until the adapter is told.
        let most = if version == 0 { 4 } else { 50 };
        let mut count = 0;
        while came.recv_timeout(Duration::from_millis(100)).is_err() {
            if count < most {
                end.send(to, LEN);
            }
            count += 1;
            assert!(count < 1_000, "{to}");
        }
        if version == 0 {
            ip("link set va mtu 1500");
        }
    }
    client.join().unwrap();
}
