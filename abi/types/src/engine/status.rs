//! The results of the engine's functions.

/// What a call of the engine reports. The facade turns it into `errno` (in brackets).
#[repr(i32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EngineStatus {
    /// Done.
    Ok = 0,
    /// An argument, a combination, a state transition or a handle is not valid \[EINVAL\].
    Invalid = 1,
    /// No memory, or a limit of the device is reached \[ENOMEM\].
    NoMemory = 2,
    /// The device does not do this \[EOPNOTSUPP\].
    NotSupported = 3,
    /// Something else still uses the object \[EBUSY\].
    Busy = 4,
    /// No event is queued and the descriptor is non-blocking \[EAGAIN\].
    WouldBlock = 5,
    /// A signal arrived while waiting \[EINTR\].
    Interrupted = 6,
    /// The device is gone, or this is a forked child \[ENODEV\].
    NoDevice = 7,
    /// The operating system or the objects' domains forbid it \[EPERM\].
    NotPermitted = 8,
    /// Memory that was named cannot be accessed \[EFAULT\].
    BadAddress = 9,
    /// No descriptor is left \[EMFILE\].
    NoDescriptor = 10,
    /// The peer did not answer in time \[ETIMEDOUT\].
    TimedOut = 11,
    /// There is no way to the peer \[EHOSTUNREACH\].
    Unreachable = 12,
    /// The peer's adapter refused \[ECONNREFUSED\].
    Refused = 13,
    /// A work queue is full \[ENOMEM, as `ibv_post_send(3)` says\].
    QueueFull = 14,
    /// The engine failed; it has logged why \[EIO\].
    Internal = 15,
    /// There is no such entry \[ENOENT\].
    NotFound = 16,
    /// The address is taken or not of this host \[EADDRNOTAVAIL\].
    AddressNotAvailable = 17,
    /// The address or port is taken \[EADDRINUSE\].
    AddressInUse = 18,
    /// It is connected already \[EISCONN\].
    Connected = 19,
    /// It is not connected \[ENOTCONN\].
    NotConnected = 20,
    /// No event came for a while: the caller is to see whether its thread is cancelled, and to call
    /// again \[ERESTART, which no program sees\].
    WaitOn = 21,
    /// The operating system denies the address or port \[EACCES\].
    Denied = 22,
    /// This host has no addresses of that family \[EAFNOSUPPORT\].
    NoSuchFamily = 23,
    /// It is no descriptor \[EBADF\].
    BadDescriptor = 24,
}

impl EngineStatus {
    /// The value as the table's functions return it.
    pub const fn code(self) -> i32 {
        self as i32
    }
}
