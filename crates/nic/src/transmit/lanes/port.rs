//! The port that lanes send by.

use quipu_qos::{Config, Demand, LANES, Port};

use crate::types::Time;

/// The port that lanes send by: one of this adapter alone, or one that several processes share.
pub trait PortShare: Send {
    /// What may be sent now of each lane, in octets, of what waits there; and from when on it is worth asking
    /// again.
    fn exchange(&mut self, now: Time, demand: &Demand) -> ([u32; LANES], Time);

    /// Takes another configuration.
    fn configure(&mut self, config: &Config);

    /// Another configuration that the port has been given by others, once.
    fn changed(&mut self) -> Option<Config> {
        None
    }

    /// Whether others may give the port another configuration at any time. Then the adapter looks at it every
    /// 20 ms even if its tables starve all lanes in which something waits.
    fn is_shared(&self) -> bool {
        false
    }
}

/// A port of this adapter alone.
pub(super) struct OwnPort(pub(super) Port);

impl PortShare for OwnPort {
    fn exchange(&mut self, now: Time, demand: &Demand) -> ([u32; LANES], Time) {
        let granted = self.0.exchange(0, now.0, demand);
        (granted, Time(self.0.next_ns()))
    }

    fn configure(&mut self, config: &Config) {
        self.0.configure(config);
    }
}
