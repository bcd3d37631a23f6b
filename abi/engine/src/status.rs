//! What the errors of the engine mean in the table.

use std::io;

use quipu_abi_types::EngineStatus;
use quipu_host::connection::CallError;
use quipu_host::{EngineError, OpenError};
use quipu_mem::{AccessFlagsError, RegisterError};
use quipu_nic::Fault;

/// Why a function of the table fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Failure(pub(crate) EngineStatus);

/// What the body of a function of the table yields.
pub(crate) type Outcome<T = ()> = Result<T, Failure>;

/// An argument, state or handle is not valid.
pub(crate) const INVALID: Failure = Failure(EngineStatus::Invalid);

/// Something that there is, but not here.
pub(crate) fn unsupported(what: &'static str) -> Failure {
    EngineError::Fault(Fault::Unsupported(what)).into()
}

impl From<EngineStatus> for Failure {
    fn from(status: EngineStatus) -> Self {
        Self(status)
    }
}

impl From<AccessFlagsError> for Failure {
    fn from(_: AccessFlagsError) -> Self {
        INVALID
    }
}

impl From<&Fault> for Failure {
    fn from(fault: &Fault) -> Self {
        use EngineStatus as S;
        Self(match fault {
            Fault::NoSuchObject
            | Fault::Invalid(_)
            | Fault::Transition(_)
            | Fault::ConnectedElsewhere
            | Fault::NoLids
            | Fault::WrongState
            | Fault::Taken(_)
            | Fault::NoRoute(_)
            | Fault::Access(_) => S::Invalid,
            Fault::Busy => S::Busy,
            Fault::QueueFull => S::QueueFull,
            Fault::Overrun => S::Internal,
            Fault::Unsupported(_) => S::NotSupported,
            Fault::Exhausted(_) | Fault::Register(RegisterError::Full) => S::NoMemory,
            Fault::Register(RegisterError::ReadOnly) => S::NotPermitted,
            Fault::Register(_) => S::Invalid,
        })
    }
}

impl From<EngineError> for Failure {
    #[cold]
    fn from(error: EngineError) -> Self {
        use EngineStatus as S;
        match &error {
            // People who choose the wrong device or option would look for the reason for long.
            EngineError::Fault(fault @ (Fault::ConnectedElsewhere | Fault::NoLids)) => {
                tracing::error!(%error, "a call failed");
                fault.into()
            }
            EngineError::Fault(fault) => {
                tracing::debug!(%error, "a call failed");
                fault.into()
            }
            EngineError::EngineGone => Self(S::NoDevice),
            EngineError::System { source, .. } => {
                tracing::error!(%error, "a call failed");
                Self(of_system(source))
            }
            EngineError::Injected { errno, .. } => Self(planned(errno.number)),
            EngineError::WouldBlock => Self(S::WouldBlock),
            EngineError::Interrupted => Self(S::Interrupted),
            EngineError::WaitOn => Self(S::WaitOn),
            EngineError::NoSuchQueue => INVALID,
            EngineError::NoLink | EngineError::RefusedElsewhere { .. } => Self(S::NotSupported),
            EngineError::AdapterLost
            | EngineError::AdapterSilent
            | EngineError::LinkGone { .. } => Self(S::NoDevice),
            EngineError::ArenaFull { .. } => Self(S::NoMemory),
            EngineError::BadAddress | EngineError::NotInArena => Self(S::BadAddress),
            EngineError::Connection(refused) => {
                tracing::debug!(%error, "a call failed");
                refused.into()
            }
            EngineError::Address(source) => {
                tracing::debug!(%error, "an address is refused");
                Self(of_address(source))
            }
        }
    }
}

impl From<&CallError> for Failure {
    fn from(refused: &CallError) -> Self {
        use EngineStatus as S;
        Self(match refused {
            CallError::NoSuchObject | CallError::WrongState | CallError::Invalid(_) => S::Invalid,
            CallError::Busy => S::Busy,
            CallError::Connected => S::Connected,
        })
    }
}

impl From<&OpenError> for Failure {
    fn from(error: &OpenError) -> Self {
        use EngineStatus as S;
        Self(match error {
            OpenError::Config(_)
            | OpenError::Gateway { .. }
            | OpenError::NoRouter { .. }
            | OpenError::Unusable { .. }
            | OpenError::KernelsAddress { .. }
            | OpenError::InterfacesAddress { .. }
            | OpenError::Faults(_)
            | OpenError::Congestion { .. }
            | OpenError::Qos(_)
            | OpenError::FaultLog(_)
            | OpenError::StrictLog(_) => S::Invalid,
            OpenError::Occupied { .. } => S::AddressInUse,
            OpenError::NoSuchAddress { .. } | OpenError::InterfaceDown { .. } => {
                S::AddressNotAvailable
            }
            OpenError::Addresses(source)
            | OpenError::Capture { source, .. }
            | OpenError::System { source, .. } => of_system(source),
            OpenError::Link(error) => of_system(&error.source),
        })
    }
}

/// The status that becomes the error number that a plan of faults names.
fn planned(number: i32) -> EngineStatus {
    use EngineStatus as S;
    match number {
        libc::EPERM => S::NotPermitted,
        libc::ENOENT => S::NotFound,
        libc::EINTR => S::Interrupted,
        libc::EAGAIN => S::WouldBlock,
        libc::ENOMEM => S::NoMemory,
        libc::EFAULT => S::BadAddress,
        libc::EBUSY => S::Busy,
        libc::ENODEV => S::NoDevice,
        libc::EINVAL => S::Invalid,
        libc::EMFILE => S::NoDescriptor,
        libc::EOPNOTSUPP => S::NotSupported,
        libc::EADDRINUSE => S::AddressInUse,
        libc::EADDRNOTAVAIL => S::AddressNotAvailable,
        libc::ETIMEDOUT => S::TimedOut,
        libc::ECONNREFUSED => S::Refused,
        libc::EHOSTUNREACH => S::Unreachable,
        _ => S::Internal,
    }
}

/// The status that stands for an error of the kernel.
fn of_system(error: &io::Error) -> EngineStatus {
    use EngineStatus as S;
    match error.raw_os_error() {
        Some(libc::EMFILE | libc::ENFILE) => S::NoDescriptor,
        Some(libc::ENOMEM | libc::ENOBUFS | libc::ENOSPC | libc::EAGAIN) => S::NoMemory,
        Some(libc::EACCES | libc::EPERM) => S::NotPermitted,
        Some(libc::EADDRNOTAVAIL) => S::AddressNotAvailable,
        Some(libc::EADDRINUSE) => S::AddressInUse,
        Some(libc::EINVAL | libc::EAFNOSUPPORT) => S::Invalid,
        Some(libc::ENETUNREACH | libc::EHOSTUNREACH) => S::Unreachable,
        Some(libc::ETIMEDOUT) => S::TimedOut,
        Some(libc::ECONNREFUSED) => S::Refused,
        _ => S::Internal,
    }
}

/// The same for an address that is asked for, where programs tell the reasons apart as of bind(2).
fn of_address(error: &io::Error) -> EngineStatus {
    use EngineStatus as S;
    match error.raw_os_error() {
        Some(libc::EACCES) => S::Denied,
        // An interface that the address names.
        Some(libc::ENODEV) => S::NoDevice,
        Some(libc::EAFNOSUPPORT) => S::NoSuchFamily,
        _ => of_system(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn why_an_address_cannot_be_had_is_told_as_by_sockets() {
        let told =
            |errno| Failure::from(EngineError::Address(io::Error::from_raw_os_error(errno))).0;
        assert_eq!(told(libc::EACCES), EngineStatus::Denied);
        assert_eq!(told(libc::ENODEV), EngineStatus::NoDevice);
        assert_eq!(told(libc::EAFNOSUPPORT), EngineStatus::NoSuchFamily);
        assert_eq!(told(libc::EADDRINUSE), EngineStatus::AddressInUse);
        assert_eq!(told(libc::EINVAL), EngineStatus::Invalid);
    }
}
