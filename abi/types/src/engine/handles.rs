//! The engine's handles, one type for each kind of object.

macro_rules! handles {
    ($($(#[$doc:meta])* $name:ident($ty:ty),)*) => {
        $(
            $(#[$doc])*
            #[repr(transparent)]
            #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
            pub struct $name(pub $ty);
            impl $name {
                /// Stands for "none" where a handle is optional.
                pub const NONE: Self = Self(0);
            }
        )*
    };
}

handles! {
    /// An opened device.
    ContextHandle(u64),
    /// A protection domain.
    PdHandle(u64),
    /// A memory region.
    MrHandle(u64),
    /// A memory window.
    MwHandle(u64),
    /// A completion channel.
    ChannelHandle(u64),
    /// A completion queue.
    CqHandle(u64),
    /// A shared receive queue.
    SrqHandle(u64),
    /// A queue pair.
    QpHandle(u64),
    /// An address handle. 32 bits, since it travels in `ibv_ah.handle`, where the engine finds it
    /// when a datagram is posted (`wr.ud.ah->handle`).
    AhHandle(u32),
    /// An XRC domain, as one call of `open_xrcd` opened it.
    XrcdHandle(u64),
    /// A flow rule.
    FlowHandle(u64),
    /// A receive work queue.
    WqHandle(u64),
    /// An indirection table of receive work queues.
    TableHandle(u64),
    /// Counters of flow rules. It travels in [`EngineCounters`](crate::EngineCounters).
    CountersHandle(u64),
    /// An event channel of connection management.
    CmChannelHandle(u64),
    /// An identifier of connection management.
    CmIdHandle(u64),
}
