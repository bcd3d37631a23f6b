//! The kernel as a router: behind it a link that is narrower than ours, of which it tells us or not.
//!
//! ```text
//! stack -- qp0 [router] va -- vb [client, in a namespace of its own]
//! ```

use std::fs;
use std::sync::mpsc;
use std::thread::{self, JoinHandle};

use super::host::{Host, STREAM, VERSIONS};
use super::peers::{download, ours};
use super::space::{inside, ip, wait_until_local};

/// Reads both streams of the host, from behind the router. The MTUs are those of the router's end of the
/// link and of the client's. The client says that it takes segments of the usual size nevertheless.
fn client(router: u32, client: u32) -> JoinHandle<bool> {
    let (tell, hear) = mpsc::channel();
    let (go, wait) = mpsc::channel::<()>();
    let thread = thread::spawn(move || {
        // SAFETY: takes and gives integers, and concerns this thread only.
        let done = unsafe { libc::unshare(libc::CLONE_NEWNET) };
        assert_eq!(done, 0, "{}", std::io::Error::last_os_error());
        // SAFETY: takes nothing.
        tell.send(unsafe { libc::gettid() }).unwrap();
        wait.recv().unwrap();
        ip("link set lo up");
        ip(&format!("link set vb mtu {client} up"));
        ip("address add 10.8.0.2/24 dev vb");
        ip("address add fd08::2/64 dev vb nodad");
        ip("route add default via 10.8.0.1 advmss 1460");
        ip("-6 route add default via fd08::1 advmss 1440");
        wait_until_local("fd08::2");
        VERSIONS.into_iter().all(|version| download(ours(version, STREAM)))
    });
    ip("link add va type veth peer name vb");
    ip(&format!("link set vb netns {}", hear.recv().unwrap()));
    ip(&format!("link set va mtu {router} up"));
    ip("address add 10.8.0.1/24 dev va");
    ip("address add fd08::1/64 dev va nodad");
    for version in ["ipv4/ip_forward", "ipv6/conf/all/forwarding"] {
        fs::write(format!("/proc/sys/net/{version}"), "1").unwrap();
    }
    wait_until_local("fd08::1");
    go.send(()).unwrap();
    thread
}

/// Streams through a path of 1300 octets: how often the connections had timeouts, found it narrower and
/// probed it, and their segments at the end, in the order of their size.
fn streams(host: &mut Host, client: JoinHandle<bool>) -> Vec<(u32, u32, u32, u32)> {
    assert!(host.until(client), "octet for octet");
    host.run(|host| host.users.values().all(|user| user.end.is_some()));
    let ends = host.users.values().filter_map(|user| user.end);
    let mut ends: Vec<_> =
        ends.map(|(it, mss)| (mss, it.timeouts, it.narrowed, it.path_probes)).collect();
    ends.sort_unstable();
    ends
}

#[test]
fn a_router_says_what_the_path_takes() {
    if !inside("paths::a_router_says_what_the_path_takes") {
        return;
    }
    let Some(mut host) = Host::new(true) else { return };
    let ends = streams(&mut host, client(1_300, 1_500));
    // IPv6 and IPv4, with timestamps.
    assert!(ends[0].0 <= 1_228 && ends[1].0 <= 1_248, "{ends:?}");
    assert!(ends.iter().all(|end| end.2 > 0), "{ends:?}");
    // The next connections know it.
    assert_eq!(host.stack.path_mtu("fd08::2".parse().unwrap()), 1_300);
    assert_eq!(host.stack.path_mtu("10.8.0.2".parse().unwrap()), 1_300);
}

#[test]
fn a_black_hole_is_found_out() {
    if !inside("paths::a_black_hole_is_found_out") {
        return;
    }
    // The client's end drops what is longer, and nobody says so; but it lets pass what a device is
    // still to cut.
    let Some(mut host) = Host::new(false) else { return };
    let ends = streams(&mut host, client(1_500, 1_300));
    assert!(ends[0].0 <= 1_228 && ends[1].0 <= 1_248, "{ends:?}");
    // How near it comes, a simulated network can tell, where time is certain (`inet/tests/path.rs`).
    assert!(ends.iter().all(|end| end.1 >= 3 && end.2 > 0 && end.3 > 0), "{ends:?}");
}
