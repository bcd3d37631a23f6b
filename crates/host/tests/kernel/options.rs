//! What the ends of a connection may agree upon, and what they need not.

use std::fs;

use super::adapter::{Adapter, Link};
use super::pairs::{CLIENTS, ORDERS, Plan, exchange};
use super::socket::{Buffers, Info, VERSIONS};
use super::space::inside;

/// A setting of the kernel for this namespace (ip-sysctl).
fn set(name: &str, value: &str) {
    let path = format!("/proc/sys/net/ipv4/{name}");
    fs::write(&path, value).unwrap_or_else(|error| panic!("{path}: {error}"));
}

/// Exchanges by both versions, from both ends and in every order; what was agreed upon in all of them.
fn agreed(adapter: &Adapter, receives: (u64, u64), buffers: Buffers, total: u64) -> Info {
    let mut all: Option<Info> = None;
    let ends = VERSIONS.into_iter().flat_map(|version| CLIENTS.map(|client| (version, client)));
    for ends in ends {
        for order in ORDERS {
            let plan = Plan { there: total, back: total + 1, order };
            let info = Info { state: 0, ..exchange(adapter, ends, receives, buffers, plan) };
            assert_eq!(*all.get_or_insert(info), info, "{ends:?}");
        }
    }
    all.unwrap()
}

const ALL: Info = Info { state: 0, timestamps: true, sack: true, scaling: true, ecn: true };

#[test]
fn options_of_the_kernel() {
    if !inside("options::options_of_the_kernel") {
        return;
    }
    let Some(adapter) = Adapter::new(Link::Tap, 1_500) else { return };
    let kernel = |settings: &[(&str, &str)], expected: Info| {
        settings.iter().for_each(|(name, value)| set(name, value));
        let got = agreed(&adapter, (16, 32_768), Buffers::default(), 300_000);
        assert_eq!(got, expected, "{settings:?}");
    };
    kernel(&[("tcp_ecn", "1")], ALL);
    kernel(&[("tcp_ecn", "0")], Info { ecn: false, ..ALL });
    kernel(&[("tcp_sack", "0")], Info { ecn: false, sack: false, ..ALL });
    let bare = Info { ecn: false, sack: false, timestamps: false, ..ALL };
    kernel(&[("tcp_timestamps", "0")], bare);
    kernel(&[("tcp_window_scaling", "0")], Info { scaling: false, ..bare });
    let ecn = Info { scaling: false, ecn: true, ..bare };
    kernel(&[("tcp_ecn", "1")], ecn);
    kernel(&[("tcp_sack", "1")], Info { sack: true, ..ecn });
    kernel(&[("tcp_timestamps", "1")], Info { scaling: false, ..ALL });
}

/// Windows of a segment or two, of either end.
#[test]
fn small_buffers() {
    if !inside("options::small_buffers") {
        return;
    }
    let Some(adapter) = Adapter::new(Link::Tap, 1_500) else { return };
    set("tcp_ecn", "1");
    let plenty = (16, 32_768);
    agreed(&adapter, plenty, Buffers { receive: 4_096, send: 0 }, 100_000);
    agreed(&adapter, plenty, Buffers { receive: 0, send: 4_608 }, 100_000);
    agreed(&adapter, (4, 1_000), Buffers::default(), 100_000);
    agreed(&adapter, (4, 1_000), Buffers { receive: 4_096, send: 4_608 }, 50_000);
    // One receive at a time, far smaller than a segment. (Without scaling, whose unit it is smaller than.)
    set("tcp_window_scaling", "0");
    agreed(&adapter, (1, 100), Buffers::default(), 1_000);
}
