//! Socket options of Quipu's own that more than one library knows.

use libc::c_int;

/// Level of the options of the extended sockets interface (`quipu/sockets.h`).
pub const SOL_IWARP: c_int = 0x4957;
/// Switches a connected socket to iWARP: `struct iwarp_mode`.
pub const IWARP_MODE: c_int = 1;
