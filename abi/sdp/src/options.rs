//! Options of sockets.

use std::collections::BTreeMap;
use std::time::Duration;

use libc::c_int;
use quipu_cabi::Errno;

use crate::socket::{Phase, Socket};
use crate::transfer::timeout_of;

/// The level of SDP's own options, and the option that sets from how many bytes on a send goes without a
/// copy; 0: never.
const SOL_SDP: c_int = 1025;
const SDP_ZCOPY_THRESH: c_int = 80;
/// The threshold where no option sets it.
const ZERO_COPY: usize = 64 << 10;

/// What a program has set, by level and name: it is given back as it came.
#[derive(Clone)]
pub(crate) struct Options {
    given: BTreeMap<(c_int, c_int), Vec<u8>>,
    pub(crate) zero_copy_threshold: usize,
    /// Nothing has set it: a large send goes without a copy only where that is faster.
    pub(crate) chooses: bool,
    pub(crate) receive_timeout: Option<Duration>,
    pub(crate) send_timeout: Option<Duration>,
    /// How long close(2) waits; `None`: it does not, and the stream ends in order.
    pub(crate) linger: Option<Duration>,
    pub(crate) urgent_inline: bool,
}

impl Options {
    /// The service level and the traffic class that the program has asked for: SO_PRIORITY, or else the upper
    /// three bits of IP_TOS or IPV6_TCLASS.
    pub(crate) fn level(&self) -> (u8, u8) {
        let given = |level, name| {
            let value = self.given.get(&(level, name))?;
            // Linux takes one byte, too.
            let number = read::<c_int>(value).or_else(|_| read::<u8>(value).map(c_int::from));
            number.ok().filter(|&number| number >= 0)
        };
        let class = given(libc::IPPROTO_IP, libc::IP_TOS)
            .or_else(|| given(libc::IPPROTO_IPV6, libc::IPV6_TCLASS));
        let class = class.unwrap_or(0) as u8;
        let priority = given(libc::SOL_SOCKET, libc::SO_PRIORITY);
        (priority.map_or(class >> 5, |priority| priority.min(15) as u8), class)
    }

    /// Whether a socket at `::` is for peers of IPv6 only, if the program has said that.
    pub(crate) fn v6_only(&self) -> Option<bool> {
        let value = self.given.get(&(libc::IPPROTO_IPV6, libc::IPV6_V6ONLY))?;
        read::<c_int>(value).ok().map(|only| only != 0)
    }
}

impl Default for Options {
    fn default() -> Self {
        let threshold = std::env::var("QUIPU_SDP_ZCOPY").ok().and_then(|text| text.parse().ok());
        Self {
            given: BTreeMap::new(),
            zero_copy_threshold: threshold.unwrap_or(ZERO_COPY),
            chooses: threshold.is_none(),
            receive_timeout: None,
            send_timeout: None,
            linger: None,
            urgent_inline: false,
        }
    }
}

/// A plain value of the program.
fn read<T: Copy>(value: &[u8]) -> Result<T, Errno> {
    if value.len() < size_of::<T>() {
        return Err(Errno::EINVAL);
    }
    // SAFETY: there are enough bytes, and any bytes are a value of the plain types that this is used for.
    Ok(unsafe { value.as_ptr().cast::<T>().read_unaligned() })
}

/// The bytes of a number.
fn number(value: c_int) -> Vec<u8> {
    value.to_ne_bytes().to_vec()
}

impl Socket {
    /// As setsockopt(2).
    pub(crate) fn set_option(&self, level: c_int, name: c_int, value: &[u8]) -> Result<(), Errno> {
        let mut state = self.lock();
        let options = &mut state.options;
        match (level, name) {
            (libc::SOL_SOCKET, libc::SO_RCVTIMEO) => {
                options.receive_timeout = timeout_of(read(value)?);
            }
            (libc::SOL_SOCKET, libc::SO_SNDTIMEO) => {
                options.send_timeout = timeout_of(read(value)?);
            }
            (libc::SOL_SOCKET, libc::SO_LINGER) => {
                let linger: libc::linger = read(value)?;
                let time = Duration::from_secs(linger.l_linger.max(0) as u64);
                options.linger = (linger.l_onoff != 0).then_some(time);
            }
            (libc::SOL_SOCKET, libc::SO_OOBINLINE) => {
                options.urgent_inline = read::<c_int>(value)? != 0;
                let inline = options.urgent_inline;
                if let Ok(link) = state.connected() {
                    link.connection.set_urgent_inline(inline);
                }
            }
            (SOL_SDP | libc::IPPROTO_TCP | crate::sys::AF_INET_SDP, SDP_ZCOPY_THRESH) => {
                options.zero_copy_threshold = read::<c_int>(value)?.max(0) as usize;
                options.chooses = false;
            }
            _ => {}
        }
        let marks = [
            (libc::SOL_SOCKET, libc::SO_PRIORITY),
            (libc::IPPROTO_IP, libc::IP_TOS),
            (libc::IPPROTO_IPV6, libc::IPV6_TCLASS),
        ];
        state.options.given.insert((level, name), value[..value.len().min(256)].to_vec());
        if marks.contains(&(level, name)) {
            let level = state.options.level();
            if let Some(link) = &state.link {
                link.queue.set_level(level)?;
            }
        }
        Ok(())
    }

    /// As getsockopt(2): the bytes of an option.
    pub(crate) fn option(&self, level: c_int, name: c_int) -> Vec<u8> {
        let mut state = self.lock();
        match (level, name) {
            (libc::SOL_SOCKET, libc::SO_ERROR) => {
                let failure = state.link.as_ref().and_then(|link| link.failure());
                let error = state.error.take().or(failure);
                number(error.map_or(0, |error| error.0))
            }
            (libc::SOL_SOCKET, libc::SO_TYPE) => number(libc::SOCK_STREAM),
            (libc::SOL_SOCKET, libc::SO_PROTOCOL) => number(libc::IPPROTO_TCP),
            (libc::SOL_SOCKET, libc::SO_DOMAIN) => {
                let is_v6 = state.local.is_some_and(|local| local.is_ipv6());
                number(if is_v6 { libc::AF_INET6 } else { libc::AF_INET })
            }
            (libc::SOL_SOCKET, libc::SO_ACCEPTCONN) => {
                number(c_int::from(state.phase == Phase::Listening))
            }
            (libc::IPPROTO_TCP, libc::TCP_MAXSEG) => number(16 << 10),
            (SOL_SDP | libc::IPPROTO_TCP | crate::sys::AF_INET_SDP, SDP_ZCOPY_THRESH) => {
                number(c_int::try_from(state.options.zero_copy_threshold).unwrap_or(c_int::MAX))
            }
            (libc::SOL_SOCKET, libc::SO_RCVBUF | libc::SO_SNDBUF) => {
                state.options.given.get(&(level, name)).cloned().unwrap_or_else(|| number(2 << 20))
            }
            _ => state.options.given.get(&(level, name)).cloned().unwrap_or_default(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_level_is_the_priority_or_the_upper_bits_of_the_traffic_class() {
        let mut options = Options::default();
        assert_eq!(options.level(), (0, 0));
        options.given.insert((libc::IPPROTO_IPV6, libc::IPV6_TCLASS), number(0x28));
        assert_eq!(options.level(), (1, 0x28));
        options.given.insert((libc::IPPROTO_IP, libc::IP_TOS), vec![0xb8]);
        assert_eq!(options.level(), (5, 0xb8));
        options.given.insert((libc::SOL_SOCKET, libc::SO_PRIORITY), number(3));
        assert_eq!(options.level(), (3, 0xb8));
        options.given.insert((libc::SOL_SOCKET, libc::SO_PRIORITY), number(-1));
        assert_eq!(options.level(), (5, 0xb8));
    }
}
