//! How a connection is to be.

use quipu_cabi::Errno;
use quipu_host::inet::stack::Carriage;
use quipu_host::inet::tcp::{KeepAlive, MILLISECOND};
use quipu_host::nic::TcpSettings;

use crate::error::{Outcome, fail};

/// `enum qpip_settings_flags`
const NO_ECN: u32 = 1;
/// Where the program asks for probes, and says no more of them: as Linux has it for sockets.
const INTERVAL_MS: u32 = 75_000;
const PROBES: u32 = 9;

/// `struct qpip_settings`
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct qpip_settings {
    pub(crate) size: u32,
    pub(crate) flags: u32,
    pub(crate) traffic_class: u32,
    pub(crate) hop_limit: u32,
    pub(crate) user_timeout: u32,
    pub(crate) connect_timeout: u32,
    pub(crate) keep_alive_idle: u32,
    pub(crate) keep_alive_interval: u32,
    pub(crate) keep_alive_probes: u32,
}

/// Octets of a member, and of more members than there will ever be.
const MEMBER: usize = 4;
const MOST: usize = 4096;

impl qpip_settings {
    /// Those of a program that may know fewer members, or more, which are zero then.
    ///
    /// # Safety
    ///
    /// There are as many octets as the first member says.
    unsafe fn read(wanted: *const Self) -> Outcome<Self> {
        // SAFETY: the size is there, if anything is; programs pass bytes of any alignment.
        let size = unsafe { wanted.cast::<u32>().read_unaligned() } as usize;
        if !(MEMBER..=MOST).contains(&size) {
            let words = "the `size` of settings must be sizeof(struct qpip_settings)";
            return Err(fail(Errno::EINVAL, words));
        }
        let (known, bytes) = (size.min(size_of::<Self>()), wanted.cast::<u8>());
        // SAFETY: the caller promises that so much is there.
        if (known..size).any(|at| unsafe { bytes.add(at).read() } != 0) {
            let words = "the settings are those of a newer libqpip";
            return Err(fail(Errno::EINVAL, words));
        }
        let mut own = Self::default();
        // SAFETY: as above; it consists of integers, and is not shorter.
        unsafe { bytes.copy_to_nonoverlapping((&raw mut own).cast(), known) };
        Ok(own)
    }

    fn keep_alive(&self) -> Outcome<Option<KeepAlive>> {
        if self.keep_alive_idle == 0 {
            return Ok(None);
        }
        let or = |wanted, default| if wanted == 0 { default } else { wanted };
        let probes = octet("keep_alive_probes", or(self.keep_alive_probes, PROBES))?;
        let interval = ns(or(self.keep_alive_interval, INTERVAL_MS));
        Ok(Some(KeepAlive { idle: ns(self.keep_alive_idle), interval, probes }))
    }
}

fn ns(ms: u32) -> u64 {
    u64::from(ms) * MILLISECOND
}

/// How a program wants packets to be carried; whether that can be is the adapter's to say.
pub(crate) fn carriage(traffic_class: u32, hop_limit: u32) -> Outcome<Carriage> {
    let hop_limit = octet("hop_limit", hop_limit)?;
    let traffic_class = octet("traffic_class", traffic_class)?;
    Ok(Carriage { traffic_class, hop_limit: (hop_limit != 0).then_some(hop_limit) })
}

fn octet(what: &str, value: u32) -> Outcome<u8> {
    u8::try_from(value)
        .map_err(|_| fail(Errno::EINVAL, format_args!("{what} is {value}; the limit is 255")))
}

/// `plain` with what a program wants, if it wants anything.
///
/// # Safety
///
/// `wanted` is null, or settings of as many octets as they say.
pub(crate) unsafe fn with(
    plain: TcpSettings,
    wanted: *const qpip_settings,
) -> Outcome<TcpSettings> {
    if wanted.is_null() {
        return Ok(plain);
    }
    // SAFETY: passed on from the caller.
    let wanted = unsafe { qpip_settings::read(wanted) }?;
    if wanted.flags & !NO_ECN != 0 {
        let words = format_args!("unknown flags {:#x} of settings", wanted.flags);
        return Err(fail(Errno::EINVAL, words));
    }
    let Carriage { traffic_class, hop_limit } = carriage(wanted.traffic_class, wanted.hop_limit)?;
    let time = |wanted, default| if wanted == 0 { default } else { ns(wanted) };
    let settings = TcpSettings {
        keep_alive: wanted.keep_alive()?,
        ecn: wanted.flags & NO_ECN == 0,
        user_timeout_ns: time(wanted.user_timeout, plain.user_timeout_ns),
        connect_timeout_ns: time(wanted.connect_timeout, plain.connect_timeout_ns),
        traffic_class,
        hop_limit,
        ..plain
    };
    settings.check().map_err(|fault| fail(Errno::EINVAL, format_args!("settings: {fault}")))?;
    Ok(settings)
}

#[cfg(test)]
mod tests {
    use quipu_host::inet::tcp::SECOND;

    use super::*;

    const SIZE: u32 = size_of::<qpip_settings>() as u32;

    fn read(wanted: &qpip_settings) -> Outcome<TcpSettings> {
        // SAFETY: the sizes in these tests are not more than what is there.
        unsafe { with(TcpSettings::default(), wanted) }
    }

    #[test]
    fn zeros_change_nothing_and_members_that_are_not_there_are_zeros() {
        let plain = TcpSettings::default();
        // SAFETY: null is allowed.
        assert_eq!(unsafe { with(plain, std::ptr::null()) }, Ok(plain));
        let nothing = qpip_settings { size: SIZE, ..qpip_settings::default() };
        assert_eq!(read(&nothing), Ok(plain));
        let short = qpip_settings { size: 16, hop_limit: 1, user_timeout: 7, ..nothing };
        assert_eq!(read(&short), Ok(TcpSettings { hop_limit: Some(1), ..plain }));
    }

    #[test]
    fn what_is_wanted_is_what_the_adapter_is_told() {
        let wanted = qpip_settings {
            size: SIZE,
            flags: NO_ECN,
            traffic_class: 0xb8,
            hop_limit: 255,
            user_timeout: 100_000,
            connect_timeout: u32::MAX,
            keep_alive_idle: 1_000,
            ..qpip_settings::default()
        };
        let keep = KeepAlive { idle: SECOND, interval: 75 * SECOND, probes: 9 };
        let settings = TcpSettings {
            keep_alive: Some(keep),
            ecn: false,
            user_timeout_ns: 100 * SECOND,
            connect_timeout_ns: u64::from(u32::MAX) * MILLISECOND,
            traffic_class: 0xb8,
            hop_limit: Some(255),
            ..TcpSettings::default()
        };
        assert_eq!(read(&wanted), Ok(settings));
        let own = qpip_settings { keep_alive_interval: 2_000, keep_alive_probes: 3, ..wanted };
        let keep = KeepAlive { interval: 2 * SECOND, probes: 3, ..keep };
        assert_eq!(read(&own), Ok(TcpSettings { keep_alive: Some(keep), ..settings }));
    }

    #[test]
    fn what_cannot_be_is_refused() {
        let nothing = qpip_settings { size: SIZE, ..qpip_settings::default() };
        for wrong in [
            qpip_settings { size: 0, ..nothing },
            qpip_settings { size: 3, ..nothing },
            qpip_settings { size: u32::MAX, ..nothing },
            qpip_settings { flags: 2, ..nothing },
            qpip_settings { traffic_class: 0xb9, ..nothing },
            qpip_settings { traffic_class: 256, ..nothing },
            qpip_settings { hop_limit: 256, ..nothing },
            qpip_settings { keep_alive_idle: 1, keep_alive_probes: 256, ..nothing },
        ] {
            assert_eq!(read(&wrong), Err(Errno::EINVAL), "{wrong:?}");
        }
        // A newer program, with a member more.
        for (more, is_taken) in [(0, true), (1, false)] {
            let newer = [SIZE + 4, 0, 0, 0, 0, 0, 0, 0, 0, more];
            // SAFETY: there are as many octets as they say.
            let read = unsafe { with(TcpSettings::default(), newer.as_ptr().cast()) };
            assert_eq!(read.is_ok(), is_taken);
        }
    }
}
