//! The kernel as a router: behind it a link that is narrower than ours, of which it tells us or not.
//!
//! ```text
//! stack -- qp0 [router] va -- vb [client, in a namespace of its own]
//! ```

use std::thread::JoinHandle;

use super::host::{Host, STREAM, VERSIONS};
use super::peers::{download, ours};
use super::space::{behind_router, inside};

/// Reads both streams of the host, from behind the router. The MTUs are those of the router's end of the
/// link and of the client's. The client says that it takes segments of the usual size nevertheless.
fn client(router: u32, client: u32) -> JoinHandle<bool> {
    behind_router([router, client], ["advmss 1460", "advmss 1440"], || {
        VERSIONS.into_iter().all(|version| download(ours(version, STREAM)))
    })
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
