//! Names of constants, and the rates of links.

use libc::{c_char, c_int};
use quipu_abi_trace::entry;
use quipu_cabi::{Null, Plain};

/// Looks a name up by the value of a constant. The texts are those that the C library prints, since
/// scripts read them.
fn name(names: &'static [&'static std::ffi::CStr], value: i32) -> *mut c_char {
    let unknown = names[names.len() - 1];
    let index = usize::try_from(value).unwrap_or(usize::MAX);
    names[..names.len() - 1].get(index).unwrap_or(&unknown).as_ptr().cast_mut()
}

const NODE_TYPES: &[&std::ffi::CStr] = &[
    c"unknown",
    c"InfiniBand channel adapter",
    c"InfiniBand switch",
    c"InfiniBand router",
    c"iWARP NIC",
    c"usNIC",
    c"usNIC UDP",
    c"unspecified",
    c"unknown",
];

const PORT_STATES: &[&std::ffi::CStr] =
    &[c"no state change (NOP)", c"down", c"init", c"armed", c"active", c"active defer", c"unknown"];

const EVENTS: &[&std::ffi::CStr] = &[
    c"CQ error",
    c"local work queue catastrophic error",
    c"invalid request local work queue error",
    c"local access violation work queue error",
    c"communication established",
    c"send queue drained",
    c"path migrated",
    c"path migration request error",
    c"local catastrophic error",
    c"port active",
    c"port error",
    c"LID change",
    c"P_Key change",
    c"SM change",
    c"SRQ catastrophic error",
    c"SRQ limit reached",
    c"last WQE reached",
    c"client reregistration",
    c"GID table change",
    c"WQ fatal",
    c"Device link speed change",
    c"unknown",
];

const STATUSES: &[&std::ffi::CStr] = &[
    c"success",
    c"local length error",
    c"local QP operation error",
    c"local EE context operation error",
    c"local protection error",
    c"Work Request Flushed Error",
    c"memory management operation error",
    c"bad response error",
    c"local access error",
    c"remote invalid request error",
    c"remote access error",
    c"remote operation error",
    c"transport retry counter exceeded",
    c"RNR retry counter exceeded",
    c"local RDD violation error",
    c"remote invalid RD request",
    c"aborted error",
    c"invalid EE context number",
    c"invalid EE context state",
    c"fatal error",
    c"response timeout error",
    c"general error",
    c"TM error",
    c"TM software rendezvous",
    c"unknown",
];

const OPCODES: &[&std::ffi::CStr] = &[
    c"rdma-write",
    c"rdma-write-with-imm",
    c"send",
    c"send-with-imm",
    c"rdma-read",
    c"atomic-cmp-and-swp",
    c"atomic-fetch-and-add",
    c"local-inv",
    c"bind-mw",
    c"send-with-inv",
    c"tso",
    c"driver1",
    c"unknown",
    c"unknown",
    c"flush",
    c"atomic-write",
    c"unknown",
];

/// `enum ibv_rate`, the rate in units of 2.5 Gb/s (0 where it is no whole multiple), in Mb/s.
const RATES: [(c_int, c_int, c_int); 23] = [
    (2, 1, 2500),
    (5, 2, 5000),
    (3, 4, 10000),
    (6, 8, 20000),
    (4, 12, 30000),
    (7, 16, 40000),
    (8, 24, 60000),
    (9, 32, 80000),
    (10, 48, 120000),
    (11, 0, 14062),
    (12, 0, 56250),
    (13, 0, 112500),
    (14, 0, 168750),
    (15, 0, 25781),
    (16, 0, 103125),
    (17, 0, 206250),
    (18, 0, 309375),
    (19, 11, 28125),
    (20, 20, 53125),
    (21, 160, 425000),
    (22, 240, 637500),
    (23, 320, 850000),
    (24, 480, 1275000),
];

/// `IBV_RATE_MAX`, which stands for every rate that is not in the table.
const RATE_MAX: c_int = 0;

entry! {
    /// `ibv_node_type_str(3)`
    fn ibv_node_type_str(value: c_int) -> Null<c_char> { Ok(name(NODE_TYPES, value)) }
    /// `ibv_port_state_str(3)`
    fn ibv_port_state_str(value: c_int) -> Null<c_char> { Ok(name(PORT_STATES, value)) }
    /// `ibv_event_type_str(3)`
    fn ibv_event_type_str(value: c_int) -> Null<c_char> { Ok(name(EVENTS, value)) }
    /// The text of a completion's status.
    fn ibv_wc_status_str(value: c_int) -> Null<c_char> { Ok(name(STATUSES, value)) }
    /// The name of a work request's operation (private before rdma-core 59).
    fn ibv_wr_opcode_str(value: c_int) -> Null<c_char> { Ok(name(OPCODES, value)) }

    /// `ibv_rate_to_mult(3)`: -1 for what is no multiple.
    fn ibv_rate_to_mult(rate: c_int) -> Plain<c_int> {
        let known = RATES.iter().find(|known| known.0 == rate && known.1 != 0);
        Ok(known.map_or(-1, |known| known.1))
    }
    /// `mult_to_ibv_rate(3)`
    fn mult_to_ibv_rate(mult: c_int) -> Plain<c_int> {
        let known = RATES.iter().find(|known| known.1 == mult && mult != 0);
        Ok(known.map_or(RATE_MAX, |known| known.0))
    }
    /// `ibv_rate_to_mbps(3)`: -1 for what is no rate.
    fn ibv_rate_to_mbps(rate: c_int) -> Plain<c_int> {
        Ok(RATES.iter().find(|known| known.0 == rate).map_or(-1, |known| known.2))
    }
    /// `mbps_to_ibv_rate(3)`
    fn mbps_to_ibv_rate(mbps: c_int) -> Plain<c_int> {
        Ok(RATES.iter().find(|known| known.2 == mbps).map_or(RATE_MAX, |known| known.0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::ffi::CStr;

    fn text(pointer: *mut c_char) -> &'static str {
        // SAFETY: the functions under test return static, zero-terminated strings.
        unsafe { CStr::from_ptr(pointer) }.to_str().unwrap()
    }

    #[test]
    fn names_are_found_and_strangers_are_unknown() {
        // SAFETY: these take any number.
        unsafe {
            assert_eq!(text(ibv_node_type_str(1)), "InfiniBand channel adapter");
            assert_eq!(text(ibv_node_type_str(-1)), "unknown");
            assert_eq!(text(ibv_node_type_str(8)), "unknown");
            assert_eq!(text(ibv_port_state_str(4)), "active");
            assert_eq!(text(ibv_event_type_str(18)), "GID table change");
            assert_eq!(text(ibv_wc_status_str(12)), "transport retry counter exceeded");
            assert_eq!(text(ibv_wc_status_str(99)), "unknown");
            assert_eq!(text(ibv_event_type_str(20)), "Device link speed change");
            assert_eq!(text(ibv_wr_opcode_str(15)), "atomic-write");
            assert_eq!(text(ibv_wr_opcode_str(9)), "send-with-inv");
        }
    }

    #[test]
    fn rates_go_both_ways() {
        // SAFETY: these take any number.
        unsafe {
            assert_eq!(ibv_rate_to_mult(7), 16);
            assert_eq!(mult_to_ibv_rate(16), 7);
            assert_eq!(ibv_rate_to_mbps(16), 103125);
            assert_eq!(mbps_to_ibv_rate(103125), 16);
            assert_eq!(ibv_rate_to_mult(12345), -1);
            assert_eq!(mult_to_ibv_rate(0), RATE_MAX);
        }
    }
}
