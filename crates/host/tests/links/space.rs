//! Network namespaces for tests: a test runs again, in a process of its own in a new namespace, where it may
//! make interfaces. Without the right to that it is skipped, and says so.

use std::fs;
use std::os::fd::AsRawFd;
use std::process::Command;
use std::sync::mpsc;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// Set for the run inside.
const INSIDE: &str = "INSIDE_A_NAMESPACE";

/// A command in a new network namespace: as root there if not here.
fn unshare() -> Command {
    let mut command = Command::new("unshare");
    // SAFETY: takes nothing and cannot fail.
    let root = unsafe { libc::geteuid() } == 0;
    command.arg(if root { "-n" } else { "-rn" });
    command
}

/// Runs the test `name` in a namespace of its own: true inside of it. Outside it waits for the one inside.
pub fn inside(name: &str) -> bool {
    if std::env::var_os(INSIDE).is_some() {
        ip("link set lo up");
        return true;
    }
    let possible = unshare().args(["ip", "link", "set", "lo", "up"]).output();
    if !possible.is_ok_and(|output| output.status.success()) {
        println!("SKIPPED: no network namespaces here");
        return false;
    }
    let output = unshare()
        .arg(std::env::current_exe().unwrap())
        .args(["--exact", name, "--nocapture"])
        .env(INSIDE, "1")
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{said}{}", String::from_utf8_lossy(&output.stderr));
    if let Some(line) = said.lines().find(|line| line.starts_with("SKIPPED")) {
        println!("{line}");
    }
    false
}

/// Runs `ip` with these arguments.
pub fn ip(arguments: &str) {
    let status = Command::new("ip").args(arguments.split_whitespace()).status().unwrap();
    assert!(status.success(), "ip {arguments}");
}

/// Runs `client` in a namespace of its own, behind this one as its router:
///
/// ```text
/// [router] va -- vb [client]
/// ```
///
/// The router's addresses are 10.8.0.1 and fd08::1, the client's end in 2. `mtus` are those of `va` and `vb`;
/// `routes` is added to the client's routes of IPv4 and of IPv6.
pub fn behind_router<T: Send + 'static>(
    mtus: [u32; 2],
    routes: [&'static str; 2],
    client: impl FnOnce() -> T + Send + 'static,
) -> JoinHandle<T> {
    let (tell, hear) = mpsc::channel();
    let (go, wait) = mpsc::channel::<()>();
    let [mtu, its_mtu] = mtus;
    let thread = thread::spawn(move || {
        // SAFETY: takes and gives integers, and concerns this thread only.
        let done = unsafe { libc::unshare(libc::CLONE_NEWNET) };
        assert_eq!(done, 0, "{}", std::io::Error::last_os_error());
        // SAFETY: takes nothing.
        tell.send(unsafe { libc::gettid() }).unwrap();
        wait.recv().unwrap();
        ip("link set lo up");
        ip(&format!("link set vb mtu {its_mtu} up"));
        ip("address add 10.8.0.2/24 dev vb");
        ip("address add fd08::2/64 dev vb nodad");
        ip(&format!("route add default via 10.8.0.1 {}", routes[0]));
        ip(&format!("-6 route add default via fd08::1 {}", routes[1]));
        wait_until_local("fd08::2");
        client()
    });
    ip("link add va type veth peer name vb");
    ip(&format!("link set vb netns {}", hear.recv().unwrap()));
    ip(&format!("link set va mtu {mtu} up"));
    ip("address add 10.8.0.1/24 dev va");
    ip("address add fd08::1/64 dev va nodad");
    for version in ["ipv4/ip_forward", "ipv6/conf/all/forwarding"] {
        fs::write(format!("/proc/sys/net/{version}"), "1").unwrap();
    }
    wait_until_local("fd08::1");
    go.send(()).unwrap();
    thread
}

/// Takes this thread's capabilities away (capset(2)).
pub fn drop_rights() {
    /// _LINUX_CAPABILITY_VERSION_3.
    const VERSION: u32 = 0x2008_0522;
    let (header, nothing) = ([VERSION, 0], [0u32; 6]);
    // SAFETY: the kernel reads a header and two sets of three words from live arrays.
    let done = unsafe {
        libc::syscall(libc::SYS_capset, (&raw const header).cast_mut(), &raw const nothing)
    };
    assert_eq!(done, 0, "{}", std::io::Error::last_os_error());
}

/// Waits until an interface sends: the kernel looks at new carriers now and then only, and drops until then.
pub fn wait_until_up(interface: &str) {
    wait_until_said(&format!("-o link show {interface}"), " state UP ");
}

/// Waits until the kernel receives for an address of IPv6, which it begins to do some time after it has it.
pub fn wait_until_local(address: &str) {
    wait_until_said("-6 route show table local", &format!("local {address} "));
}

fn wait_until_said(question: &str, answer: &str) {
    let deadline = Instant::now() + Duration::from_secs(20);
    loop {
        let output = Command::new("ip").args(question.split_whitespace()).output().unwrap();
        if String::from_utf8_lossy(&output.stdout).contains(answer) {
            return;
        }
        assert!(Instant::now() < deadline, "{output:?}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// What an interface may leave undone in frames that it sends.
#[derive(Clone, Copy)]
pub enum Offload {
    /// Checksums.
    Checksum,
    /// Trains of TCP segments.
    Segments,
    /// Cutting such trains only when the interface gets them.
    Generic,
    /// Joining segments that come in to such trains.
    Received,
}

/// Switches an offload of an interface on or off (ETHTOOL_STXCSUM, ETHTOOL_STSO, ETHTOOL_SGSO,
/// ETHTOOL_SGRO of linux/ethtool.h).
pub fn offload(interface: &str, offload: Offload, on: bool) {
    let command: u32 = match offload {
        Offload::Checksum => 0x17,
        Offload::Segments => 0x1f,
        Offload::Generic => 0x24,
        Offload::Received => 0x2c,
    };
    let mut value = [command, on.into()];
    // SAFETY: plain data, for which all zeroes is a valid value.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    for (to, from) in request.ifr_name.iter_mut().zip(interface.bytes()) {
        *to = from as libc::c_char;
    }
    request.ifr_ifru.ifru_data = value.as_mut_ptr().cast();
    let socket = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
    // SAFETY: the request and the value that it points at are live variables.
    let done = unsafe {
        libc::ioctl(socket.as_raw_fd(), libc::SIOCETHTOOL as libc::Ioctl, &raw mut request)
    };
    assert_eq!(done, 0, "{interface}: {}", std::io::Error::last_os_error());
}
