//! Options of sockets.

use std::time::Duration;

use libc::{c_int, c_void, socklen_t};
use quipu_abi_trace::entry;
use quipu_abi_types::{
    RDMA_OPTION_ID, RDMA_OPTION_ID_AFONLY, RDMA_OPTION_ID_REUSEADDR, RDMA_OPTION_ID_TOS,
};
use quipu_cabi::{Errno, IntMinusOne};

use super::socket::{Phase, State};
use super::system;
use super::table::known;
use super::wire::{LEAST_RECEIVES, MAX_MAPPINGS, MAX_RECEIVES, MAX_RING, Mapping};
use crate::address::rdma_set_option;

const SOL_RDMA: c_int = 0x10000;
const RDMA_SQSIZE: c_int = 0;
const RDMA_RQSIZE: c_int = 1;
const RDMA_INLINE: c_int = 2;
const RDMA_IOMAPSIZE: c_int = 3;

/// The smallest ring and buffer.
const LEAST: u32 = 4096;

/// Options that programs of TCP set, remembered and told again. What they ask for is the adapter's
/// way anyway (`TCP_NODELAY`) or its affair (`SO_KEEPALIVE`: lost peers are found by its connections).
const REMEMBERED: [(c_int, c_int); 9] = [
    (libc::SOL_SOCKET, libc::SO_KEEPALIVE),
    (libc::SOL_SOCKET, libc::SO_OOBINLINE),
    (libc::SOL_SOCKET, libc::SO_REUSEADDR),
    (libc::IPPROTO_IP, libc::IP_TOS),
    (libc::IPPROTO_TCP, libc::TCP_NODELAY),
    (libc::IPPROTO_TCP, libc::TCP_KEEPIDLE),
    (libc::IPPROTO_TCP, libc::TCP_KEEPINTVL),
    (libc::IPPROTO_TCP, libc::TCP_KEEPCNT),
    (libc::IPPROTO_IPV6, libc::IPV6_V6ONLY),
];

/// Of options that there are not, as rdma-core's library has it.
const UNKNOWN: Errno = Errno(libc::ENOTSUP);

/// What an identifier is asked for by an option of the system, and how many bytes its value has.
fn of_identifier(option: (c_int, c_int)) -> Option<(c_int, usize)> {
    match option {
        (libc::SOL_SOCKET, libc::SO_REUSEADDR) => Some((RDMA_OPTION_ID_REUSEADDR, 4)),
        (libc::IPPROTO_IPV6, libc::IPV6_V6ONLY) => Some((RDMA_OPTION_ID_AFONLY, 4)),
        (libc::IPPROTO_IP, libc::IP_TOS) => Some((RDMA_OPTION_ID_TOS, 1)),
        _ => None,
    }
}

fn ask_identifier(state: &State, option: (c_int, c_int), value: c_int) -> Result<(), Errno> {
    let Some((name, length)) = of_identifier(option) else { return Ok(()) };
    // Of a value of one byte the lowest.
    let mut value = if length == 1 { value.to_le() } else { value };
    let at = (&raw mut value).cast();
    // SAFETY: the identifier is the socket's; the option has so many of the bytes of an int.
    system(unsafe { rdma_set_option(state.id, RDMA_OPTION_ID, name, at, length) }).map(|_| ())
}

/// Asks a fresh identifier for what the program asked of the former.
pub(super) fn restore(state: &State) -> Result<(), Errno> {
    let remembered = &state.settings.remembered;
    remembered.iter().try_for_each(|(option, value)| ask_identifier(state, *option, *value))
}

/// The size that an option is about, with its bounds.
fn size(state: &mut State, option: (c_int, c_int)) -> Option<(&mut u32, u32, u32)> {
    let options = &mut state.settings.sizes;
    match option {
        (libc::SOL_SOCKET, libc::SO_RCVBUF) => Some((&mut options.ring, LEAST, MAX_RING)),
        (libc::SOL_SOCKET, libc::SO_SNDBUF) => Some((&mut options.buffer, LEAST, MAX_RING)),
        (SOL_RDMA, RDMA_SQSIZE) => Some((&mut options.sends, 2, MAX_RECEIVES)),
        (SOL_RDMA, RDMA_RQSIZE) => Some((&mut options.receives, LEAST_RECEIVES, MAX_RECEIVES)),
        (SOL_RDMA, RDMA_IOMAPSIZE) => Some((&mut options.mappings, 0, MAX_MAPPINGS)),
        _ => None,
    }
}

fn set(state: &mut State, option: (c_int, c_int), value: c_int) -> Result<(), Errno> {
    let early = state.connection.is_none() && state.phase != Phase::Connecting;
    if let Some((size, least, most)) = size(state, option) {
        let wanted = u32::try_from(value).map_err(|_| Errno::EINVAL)?;
        // Buffers of a connection that stands stay as they are, as a system may keep its own.
        if early {
            *size = wanted.clamp(least, most);
        } else if option.0 == SOL_RDMA {
            return Err(Errno::EINVAL);
        }
        return Ok(());
    }
    // The adapter cuts segments as it likes.
    if option == (libc::IPPROTO_TCP, libc::TCP_MAXSEG) {
        return Ok(());
    }
    if option == (SOL_RDMA, RDMA_INLINE) {
        state.settings.sizes.inline = value.max(0);
        return Ok(());
    }
    if !REMEMBERED.contains(&option) {
        return Err(UNKNOWN);
    }
    ask_identifier(state, option, value)?;
    state.settings.remembered.insert(option, value);
    Ok(())
}

/// Sets `SO_LINGER` (socket(7)). Off, closing is left to this library, as it is by default.
fn set_linger(state: &mut State, value: &libc::linger) {
    let seconds = value.l_linger.max(0).unsigned_abs();
    state.settings.linger = (value.l_onoff != 0).then(|| Duration::from_secs(seconds.into()));
}

/// Tells it.
fn linger(state: &State) -> libc::linger {
    let seconds = state.settings.linger.map_or(0, |linger| linger.as_secs());
    libc::linger {
        l_onoff: c_int::from(state.settings.linger.is_some()),
        l_linger: seconds as c_int,
    }
}

/// What is said of congestion control, which is the adapter's: a name as long as the system's are.
const CONGESTION: &[u8; 16] = b"rdma\0\0\0\0\0\0\0\0\0\0\0\0";

/// The length of `struct tcp_info`, and where what is told of it lies (`linux/tcp.h`). There is no TCP: all
/// else is 0, as of a connection that loses nothing.
const TCP_INFO_BYTES: usize = 232;
const TCPI_STATE: usize = 0;
const TCPI_SND_MSS: usize = 16;
const TCPI_SND_CWND: usize = 80;

fn tcp_info(state: &State) -> Vec<u8> {
    // The numbers of TCP's states, which the system has not for programs.
    let [established, syn_sent, close, listen] = [1, 2, 7, 10];
    let mut info = vec![0; TCP_INFO_BYTES];
    info[TCPI_STATE] = match state.phase {
        Phase::Connected => established,
        Phase::Connecting => syn_sent,
        Phase::Listening => listen,
        Phase::Idle | Phase::Failed => close,
    };
    let sends = state.settings.sizes.sends;
    for (at, value) in [(TCPI_SND_MSS, super::PIECE as u32), (TCPI_SND_CWND, sends)] {
        info[at..at + 4].copy_from_slice(&value.to_ne_bytes());
    }
    info
}

/// An option that is no integer, and for how much of it there must be room.
fn block(state: &mut State, option: (c_int, c_int)) -> Option<(Vec<u8>, usize)> {
    match option {
        (libc::SOL_SOCKET, libc::SO_LINGER) => {
            let libc::linger { l_onoff, l_linger } = linger(state);
            let bytes = [l_onoff, l_linger].map(c_int::to_ne_bytes).concat();
            Some((bytes, size_of::<libc::linger>()))
        }
        (libc::IPPROTO_TCP, libc::TCP_CONGESTION) => Some((CONGESTION.to_vec(), 0)),
        (libc::IPPROTO_TCP, libc::TCP_INFO) => {
            state.progress();
            Some((tcp_info(state), 0))
        }
        _ => None,
    }
}

fn get(state: &mut State, option: (c_int, c_int)) -> Result<c_int, Errno> {
    state.progress();
    match option {
        (libc::SOL_SOCKET, libc::SO_ERROR) => return Ok(state.error.take().map_or(0, |e| e.0)),
        (libc::SOL_SOCKET, libc::SO_TYPE) => return Ok(libc::SOCK_STREAM),
        (libc::IPPROTO_TCP, libc::TCP_MAXSEG) => return Ok(super::PIECE as c_int),
        (SOL_RDMA, RDMA_INLINE) => return Ok(state.settings.sizes.inline),
        _ => {}
    }
    if let Some((size, ..)) = size(state, option) {
        return Ok(*size as c_int);
    }
    if !REMEMBERED.contains(&option) {
        return Err(UNKNOWN);
    }
    let nodelay = c_int::from(option == (libc::IPPROTO_TCP, libc::TCP_NODELAY));
    Ok(state.settings.remembered.get(&option).copied().unwrap_or(nodelay))
}

entry! {
    /// `rsetsockopt`: as setsockopt(2), and level `SOL_RDMA`.
    fn rsetsockopt(
        fd: c_int,
        level: c_int,
        name: c_int,
        value: *const c_void,
        len: socklen_t,
    ) -> IntMinusOne {
        let int = size_of::<c_int>();
        // SAFETY: the program passes that many bytes.
        unsafe {
            match known(fd)?.stream() {
                // Sizes of queues that there are not.
                None if level == SOL_RDMA => Ok(0),
                None => {
                    system(libc::setsockopt(fd, level, name, value, len))
                }
                Some(socket) => {
                    if (level, name) == (libc::SOL_SOCKET, libc::SO_LINGER) {
                        if value.is_null() || (len as usize) < size_of::<libc::linger>() {
                            return Err(Errno::EINVAL);
                        }
                        let value = value.cast::<libc::linger>().read_unaligned();
                        set_linger(&mut socket.lock(), &value);
                        return Ok(0);
                    }
                    // Whatever algorithm is named: the adapter has its own.
                    if (level, name) == (libc::IPPROTO_TCP, libc::TCP_CONGESTION)
                        && !value.is_null()
                        && len > 0
                    {
                        return Ok(0);
                    }
                    // One byte will do, as for the system.
                    let byte = (level, name) == (libc::IPPROTO_IP, libc::IP_TOS)
                        && (1..int).contains(&(len as usize));
                    if value.is_null() || !byte && (len as usize) < int {
                        return Err(Errno::EINVAL);
                    }
                    let value = match byte {
                        true => c_int::from(value.cast::<u8>().read()),
                        false => value.cast::<c_int>().read_unaligned(),
                    };
                    set(&mut socket.lock(), (level, name), value)?;
                    Ok(0)
                }
            }
        }
    }

    /// `rgetsockopt`: as getsockopt(2), and level `SOL_RDMA`.
    fn rgetsockopt(
        fd: c_int,
        level: c_int,
        name: c_int,
        value: *mut c_void,
        len: *mut socklen_t,
    ) -> IntMinusOne {
        // SAFETY: the program passes room for as many bytes as it says.
        unsafe {
            match known(fd)?.stream() {
                None => {
                    system(libc::getsockopt(fd, level, name, value, len))
                }
                Some(socket) => {
                    let room = len.as_mut().ok_or(Errno::EFAULT)?;
                    let told = block(&mut socket.lock(), (level, name));
                    if let Some((bytes, least)) = told {
                        let length = bytes.len().min(*room as usize);
                        if value.is_null() || length < least {
                            return Err(Errno::EINVAL);
                        }
                        value.cast::<u8>().copy_from_nonoverlapping(bytes.as_ptr(), length);
                        *room = length as socklen_t;
                        return Ok(0);
                    }
                    if value.is_null() || (*room as usize) < size_of::<c_int>() {
                        return Err(Errno::EINVAL);
                    }
                    let told = get(&mut socket.lock(), (level, name))?;
                    value.cast::<c_int>().write_unaligned(told);
                    *room = size_of::<c_int>() as socklen_t;
                    Ok(0)
                }
            }
        }
    }
}

/// Bounds of the sizes fit each other: a mapping can be sent through the smallest buffer.
const _: () = assert!(Mapping::LEN < LEAST as usize);
