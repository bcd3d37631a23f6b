//! The configuration of the lanes of an adapter, which may change while queue pairs wait.

use quipu_qos::{Config, LANES, LaneUse, Port};

use super::port::OwnPort;
use super::{Lanes, PortShare, park};
use crate::adapter::Adapter;
use crate::probe::Probe;
use crate::types::{QpId, Time};

impl<P: Probe> Adapter<P> {
    /// Has queue pairs send as `config` says, by a port of this adapter alone, or by `shared`. Queue pairs
    /// that wait go on waiting: nothing is lost or sent twice.
    pub fn set_qos(&mut self, config: Config, shared: Option<Box<dyn PortShare>>) {
        match &mut self.hub.qos {
            Some(qos) => {
                match shared {
                    Some(port) => qos.port = port,
                    None => qos.port.configure(&config),
                }
                qos.set_config(config);
                self.sort_again();
            }
            None => {
                let own = || Box::new(OwnPort(Port::new(&config, 1))) as Box<dyn PortShare>;
                let port = shared.unwrap_or_else(own);
                self.hub.qos = Some(Box::new(Lanes::new(config, port)));
            }
        }
    }

    /// The configuration of quality of service, if there is one.
    #[must_use]
    pub fn qos(&self) -> Option<&Config> {
        self.hub.qos.as_ref().map(|qos| &qos.config)
    }

    /// How often quality of service was configured, also by other processes; 0: never.
    #[must_use]
    pub fn qos_changes(&self) -> u32 {
        self.hub.qos.as_ref().map_or(0, |qos| qos.changes)
    }

    /// Octets that all lanes have sent.
    #[must_use]
    pub fn lane_octets(&self) -> u64 {
        self.lane_use().map_or(0, |lanes| lanes.iter().map(|lane| lane.octets).sum())
    }

    /// Whether requests wait in lanes that have a weight, or for a rate of their own.
    #[must_use]
    pub fn lanes_hold_requests(&self) -> bool {
        self.hub.qos.as_ref().is_some_and(|qos| {
            let served = (0..LANES).filter(|lane| qos.served & 1 << lane != 0);
            !qos.resting.is_empty()
                || served.into_iter().any(|lane| qos.lanes[lane].backlog.octets() > 0)
        })
    }

    /// What each lane has sent, if there is a configuration.
    #[must_use]
    pub fn lane_use(&self) -> Option<[LaneUse; LANES]> {
        let qos = self.hub.qos.as_ref()?;
        Some(std::array::from_fn(|lane| qos.lanes[lane].total.plus(&qos.lanes[lane].sent)))
    }

    /// Puts the queue pairs that wait into the lanes that their service levels have now.
    pub(super) fn sort_again(&mut self) {
        let Some(qos) = &mut self.hub.qos else { return };
        let mut all: Vec<QpId> =
            std::mem::take(&mut qos.resting).into_iter().map(|(_, id)| id).collect();
        all.append(&mut qos.discarding);
        for lane in &mut qos.lanes {
            all.extend(lane.queue.drain(..));
        }
        qos.waiting = 0;
        qos.not_before = Time(0);
        self.hub.set_lanes_alarm(None);
        for id in all {
            if let Some((qp, hub)) = self.qp_and_hub(id) {
                let since = qp.turn.since;
                qp.turn.parked = false;
                park(qp, hub);
                qp.turn.since = since;
            }
        }
    }
}
