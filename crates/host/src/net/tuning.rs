//! How sockets of TCP are set up.

use std::io;
use std::net::IpAddr;
use std::os::fd::OwnedFd;

use crate::error::OpenError;
use crate::sys;

/// How sockets are set up.
#[derive(Clone, Debug)]
pub(crate) struct Tuning {
    /// Congestion control to set, in order of preference; empty: leave the system's.
    congestion: Vec<String>,
}

impl Tuning {
    /// As configured; by default anything but BBR, which is several times slower where the round
    /// trip is shorter than its model expects (loopback, veth, one rack).
    ///
    /// # Errors
    ///
    /// The kernel does not have the congestion control that is configured, or does not allow it.
    pub(crate) fn new(configured: Option<&str>) -> Result<Self, OpenError> {
        let congestion = match configured {
            Some(name) => {
                try_congestion(name).map_err(|source| OpenError::Congestion {
                    name: name.to_owned(),
                    source,
                    available: available_congestion(),
                })?;
                vec![name.to_owned()]
            }
            None if default_congestion().is_some_and(|name| name.starts_with("bbr")) => {
                vec!["cubic".to_owned(), "reno".to_owned()]
            }
            None => Vec::new(),
        };
        Ok(Self { congestion })
    }

    /// Applies to a new socket. A sandbox may refuse what was not asked for by name.
    pub(crate) fn apply(&self, fd: &OwnedFd) -> io::Result<()> {
        sys::set_option(fd, libc::IPPROTO_TCP, libc::TCP_NODELAY, 1)?;
        for name in &self.congestion {
            match set_congestion(fd, name) {
                Ok(()) => break,
                Err(error) => tracing::debug!(%name, %error, "congestion control not available"),
            }
        }
        Ok(())
    }
}

fn set_congestion(fd: &OwnedFd, name: &str) -> io::Result<()> {
    sys::set_option_bytes(fd, libc::IPPROTO_TCP, libc::TCP_CONGESTION, name.as_bytes())
}

/// Whether this process may use a congestion control.
pub(crate) fn try_congestion(name: &str) -> io::Result<()> {
    let fd = sys::tcp_socket(IpAddr::from([127, 0, 0, 1]))?;
    set_congestion(&fd, name)
}

/// The system's default congestion control.
pub(crate) fn default_congestion() -> Option<String> {
    of_kernel("tcp_congestion_control")
}

/// Those that every user may have, separated by spaces.
fn available_congestion() -> String {
    of_kernel("tcp_allowed_congestion_control").unwrap_or_else(|| "cubic or reno".to_owned())
}

fn of_kernel(setting: &str) -> Option<String> {
    let text = sys::read_text(&format!("/proc/sys/net/ipv4/{setting}")).ok()?;
    Some(text.trim().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn congestion_control_that_the_kernel_lacks_is_refused_with_what_there_is() {
        assert!(Tuning::new(None).is_ok());
        let own = default_congestion().expect("/proc");
        assert_eq!(Tuning::new(Some(&own)).unwrap().congestion, std::slice::from_ref(&own));
        let refused = Tuning::new(Some("nope")).unwrap_err().to_string();
        assert!(refused.contains("QUIPU_CONGESTION=nope"), "{refused}");
        assert!(refused.contains(&available_congestion()), "{refused}");
    }
}
