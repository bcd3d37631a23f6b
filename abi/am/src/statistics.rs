//! Counts of messages, and what else programs of AMUDP look for.

use std::sync::atomic::AtomicI32;

use libc::c_int;
use quipu_cabi::{Null, entry};

use crate::bundle::give;
use crate::codes::{BAD_ARG, Code, OrCode, code};
use crate::endpoint::{endpoint, ep_t};

/// `amx_stats_t`
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub struct amx_stats_t {
    requests_sent: u64,
    requests_received: u64,
    replies_sent: u64,
    replies_received: u64,
    returned: u64,
}

/// `AMX_VerboseErrors`, which programs set.
static VERBOSE: AtomicI32 = AtomicI32::new(0);

entry! {
    /// Where `AMX_VerboseErrors` is.
    fn AMX_VerboseErrorsPlace() -> Null<c_int> {
        Ok(VERBOSE.as_ptr())
    }

    /// `AMX_GetEndpointStatistics`
    fn AMX_GetEndpointStatistics(raw: ep_t, out: *mut amx_stats_t) -> Code {
        // SAFETY: the program passes an endpoint.
        code(unsafe { endpoint(raw) }.and_then(|known| {
            let counters = known.endpoint.counters().or_code()?;
            give(out, amx_stats_t {
                requests_sent: counters.requests_sent,
                requests_received: counters.requests_received,
                replies_sent: counters.replies_sent,
                replies_received: counters.replies_received,
                returned: counters.returned,
            })
        }))
    }

    /// `AMX_AggregateStatistics`
    fn AMX_AggregateStatistics(sum: *mut amx_stats_t, more: *const amx_stats_t) -> Code {
        if sum.is_null() || more.is_null() {
            return code(Err(BAD_ARG));
        }
        // SAFETY: they are not null, so the program passes statistics.
        let (old, more) = unsafe { (sum.read_unaligned(), more.read_unaligned()) };
        code(give(sum, amx_stats_t {
            requests_sent: old.requests_sent.wrapping_add(more.requests_sent),
            requests_received: old.requests_received.wrapping_add(more.requests_received),
            replies_sent: old.replies_sent.wrapping_add(more.replies_sent),
            replies_received: old.replies_received.wrapping_add(more.replies_received),
            returned: old.returned.wrapping_add(more.returned),
        }))
    }
}

/// What the header says of the size.
const _: () = assert!(size_of::<amx_stats_t>() == 40 && size_of::<c_int>() == 4);
