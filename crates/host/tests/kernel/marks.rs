//! A path that marks packets of both directions as having met congestion, in place of losing them (RFC 3168).
//!
//! ```text
//! adapter -- packet:qa [TAP] relay [TAP] qk -- kernel
//! ```

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::{self, JoinHandle};

use quipu_host::nic::iwarp::wire::checksum::sum;

use super::adapter::Adapter;
use super::pairs::{CLIENTS, Client, ORDERS, Plan, talk};
use super::socket::{Buffers, Info, KERNEL, OURS, VERSIONS, connect, listen};
use super::space::{inside, ip};

/// Every so many packets of a direction that may be marked are.
const EVERY: u64 = 40;
/// ECT(1), ECT(0) and CE (RFC 3168 5).
const MAY_BE_MARKED: [u8; 2] = [1, 2];
const CE: u8 = 3;
/// Flags of TCP.
const SYN: u8 = 2;
const ECE: u8 = 0x40;
const CWR: u8 = 0x80;

/// What the relay has seen go in one direction.
#[derive(Default)]
struct Seen {
    able: AtomicU64,
    marked: AtomicU64,
    echoes: AtomicU64,
    answers: AtomicU64,
}

fn read(counter: &AtomicU64) -> u64 {
    counter.load(Ordering::Relaxed)
}

impl Seen {
    /// Looks at a frame of TCP, and marks it when it is its turn.
    fn pass(&self, frame: &mut [u8]) {
        // Without options and extensions, which neither end uses here.
        let (ecn, flags) = match frame.get(12..24) {
            Some([8, 0, 0x45, tos, _, _, _, _, _, _, _, 6]) => (tos & 3, frame[47]),
            Some([0x86, 0xdd, _, class, _, _, _, _, 6, ..]) => (class >> 4 & 3, frame[67]),
            _ => return,
        };
        let counts = |flag: u8| u64::from(flags & (flag | SYN) == flag);
        self.echoes.fetch_add(counts(ECE), Ordering::Relaxed);
        self.answers.fetch_add(counts(CWR), Ordering::Relaxed);
        if !MAY_BE_MARKED.contains(&ecn) {
            return;
        }
        if !self.able.fetch_add(1, Ordering::Relaxed).is_multiple_of(EVERY) {
            return;
        }
        self.marked.fetch_add(1, Ordering::Relaxed);
        if frame[12] == 8 {
            frame[15] |= CE;
            frame[24..26].fill(0);
            let checksum = sum(&frame[14..34]).checksum();
            frame[24..26].copy_from_slice(&checksum.to_be_bytes());
        } else {
            frame[15] |= CE << 4;
        }
    }
}

/// Opens a TAP device without offloads. None, and said, where there are none.
fn tap(name: &str) -> Option<File> {
    let mut options = OpenOptions::new();
    let options = options.read(true).write(true).custom_flags(libc::O_NONBLOCK);
    let Ok(device) = options.open("/dev/net/tun") else {
        println!("SKIPPED: no /dev/net/tun here");
        return None;
    };
    // SAFETY: plain data, for which all zeroes is a valid value.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    for (to, from) in request.ifr_name.iter_mut().zip(name.bytes()) {
        *to = from as libc::c_char;
    }
    request.ifr_ifru.ifru_flags = (libc::IFF_TAP | libc::IFF_NO_PI) as libc::c_short;
    // SAFETY: the request is a live variable.
    let done = unsafe {
        libc::ioctl(device.as_raw_fd(), libc::TUNSETIFF as libc::Ioctl, &raw mut request)
    };
    assert_eq!(done, 0, "{name}: {}", io::Error::last_os_error());
    ip(&format!("link set {name} up"));
    Some(device)
}

/// Two devices, and what goes from each to the other.
struct Relay {
    seen: Arc<[Seen; 2]>,
    stop: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
}

impl Relay {
    fn new(devices: [File; 2]) -> Self {
        let (devices, seen) = (Arc::new(devices), Arc::<[Seen; 2]>::default());
        let stop = Arc::new(AtomicBool::new(false));
        let carrier = |from: usize| {
            let (devices, seen, stop) =
                (Arc::clone(&devices), Arc::clone(&seen), Arc::clone(&stop));
            thread::spawn(move || carry([&devices[from], &devices[1 - from]], &seen[from], &stop))
        };
        let threads = [0, 1].map(carrier).into();
        Self { seen, stop, threads }
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        self.threads.drain(..).for_each(|thread| thread.join().unwrap());
    }
}

fn carry([mut from, mut to]: [&File; 2], seen: &Seen, stop: &AtomicBool) {
    let mut frame = [0; 2_048];
    while !stop.load(Ordering::Relaxed) {
        match from.read(&mut frame) {
            Ok(len) => {
                seen.pass(&mut frame[..len]);
                // A device that has no room loses it, as others would.
                let _ = to.write(&frame[..len]);
            }
            Err(_) => {
                let fd = from.as_raw_fd();
                let mut poll = libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
                // SAFETY: one pollfd in a live variable.
                unsafe { libc::poll(&raw mut poll, 1, 50) };
            }
        }
    }
}

/// A counter of the kernel for this namespace; none where it does not know it.
fn kernels(name: &str) -> Option<u64> {
    let table = fs::read_to_string("/proc/net/netstat").unwrap();
    let lines: Vec<_> = table.lines().collect();
    lines.chunks_exact(2).find_map(|two| {
        let at = two[0].split_whitespace().position(|word| word == name)?;
        two[1].split_whitespace().nth(at)?.parse().ok()
    })
}

/// What a connection did: the marks that the adapter heard of.
fn exchange(adapter: &Adapter, (version, client): (usize, Client), plan: Plan) -> u64 {
    let mut qp = adapter.queue_pair((16, 32_768));
    let buffers = Buffers::default();
    let part = move |stream| {
        assert!(Info::of(&stream).ecn, "ECN was agreed upon");
        talk(&stream, &plan)
    };
    let kernel = if client == Client::Kernel {
        adapter.offer(&qp);
        let to = adapter.address(version);
        thread::spawn(move || part(connect(to, buffers)?))
    } else {
        let (listener, at) = listen(version, buffers).unwrap();
        qp.connect(at, None);
        thread::spawn(move || part(listener.accept()?.0))
    };
    let what = format!("version {version}, client {client:?}, {plan:?}");
    let mut marks = 0;
    qp.until(&what, |it| {
        let counters = adapter.engine.tcp_counters(it.qp).unwrap();
        marks = marks.max(counters.map_or(0, |it| u64::from(it.marks)));
        it.step(&plan)
    });
    kernel.join().unwrap().unwrap();
    qp.check(&what, &plan);
    marks
}

#[test]
fn marks_cross() {
    if !inside("marks::marks_cross") {
        return;
    }
    let Some(devices) = tap("qa").zip(tap("qk")) else { return };
    let relay = Relay::new(devices.into());
    fs::write("/proc/sys/net/ipv4/tcp_ecn", "1").unwrap();
    let adapter = Adapter::on("packet:qa".parse().unwrap(), OURS, KERNEL, 1_500);
    adapter.has_neighbour("qk");
    for version in VERSIONS {
        for (client, order) in CLIENTS.into_iter().flat_map(|it| ORDERS.map(|order| (it, order))) {
            let plan = Plan { there: 1_000_000, back: 1_000_001, order };
            let names = ["TCPDeliveredCE", "InCEPkts"];
            let before = names.map(kernels);
            let [there, back] = &*relay.seen;
            let counters = || {
                let of = |it: &Seen| [read(&it.marked), read(&it.echoes), read(&it.answers)];
                [of(there), of(back)].concat()
            };
            let seen = counters();
            let marks = exchange(&adapter, (version, client), plan);
            let grown: Vec<_> = counters().iter().zip(seen).map(|(now, then)| now - then).collect();
            let what = format!("version {version}, {client:?}, {plan:?}: {grown:?}, {marks}");
            // Both are marked, hear of it, and say so: packets of the adapter, and those of the kernel.
            assert!(marks > 0 && grown.iter().all(|count| *count > 0), "{what}");
            let after = names.map(kernels);
            // The kernel counts packets of IPv6 elsewhere.
            for at in 0..2 - version {
                assert!(after[at].is_none() || after[at] > before[at], "{what}: {}", names[at]);
            }
        }
    }
}
