//! Links and a switch.

use std::collections::BTreeSet;

use crate::bus::Resource;
use crate::frames::ETHERNET;
use crate::plan::{Framing, LinkPlan, Rate};
use crate::rng::Rng;

/// Preamble, checksum and gap of Ethernet.
const ETHERNET_EXTRA: u64 = 8 + 4 + 12;

/// Where a frame goes next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Next {
    /// To its destination, at this time.
    Arrives(u64),
    /// To the switch, at this time.
    Switch(u64),
    /// Nowhere: it is lost.
    Lost,
}

/// The links of all hosts and the switch between them, if there are more than two hosts.
#[derive(Debug)]
pub(crate) struct Network {
    rate: Rate,
    delay: u64,
    framing: Framing,
    loss_ppm: u32,
    /// Frames lost of a million because of a fault.
    pub(crate) fault_ppm: u32,
    /// Numbers of full frames that are lost, how long a full frame is, and how many there were.
    drops: BTreeSet<u64>,
    full: u64,
    full_frames: u64,
    /// From each host.
    out: Vec<Resource>,
    /// To each host, when there is a switch.
    ports: Vec<Resource>,
    port_limit: u64,
    port_free: Vec<u64>,
    rng: Rng,
    /// Frames that were lost.
    pub(crate) lost: u64,
}

impl Network {
    /// The network of a plan with so many hosts.
    pub(crate) fn new(plan: &LinkPlan, hosts: usize, rng: Rng) -> Self {
        let switch = if hosts > 2 { hosts } else { 0 };
        Self {
            rate: plan.rate,
            delay: plan.delay.0,
            framing: plan.framing,
            loss_ppm: plan.loss_ppm,
            fault_ppm: 0,
            drops: plan.drops.iter().map(|&number| number.into()).collect(),
            full: u64::from(plan.mtu) + ETHERNET,
            full_frames: 0,
            out: vec![Resource::default(); hosts],
            ports: vec![Resource::default(); switch],
            port_limit: plan.rate.ps(plan.switch_buffer.0),
            port_free: vec![0; switch],
            rng,
            lost: 0,
        }
    }

    /// How long a frame of so many bytes occupies a link.
    pub(crate) fn occupancy(&self, bytes: u64) -> u64 {
        self.rate.ps(match self.framing {
            Framing::Ethernet => bytes + ETHERNET_EXTRA,
            Framing::M5 => bytes,
        })
    }

    /// Host `from` begins to send a frame at `now`, or as soon as its link is free. When the link is free
    /// again, and where the frame goes.
    pub(crate) fn send(&mut self, now: u64, from: usize, bytes: u64) -> (u64, Next) {
        let takes = self.occupancy(bytes);
        let sent = self.out[from].take(now, takes);
        let by_chance = self.rng.ppm(self.loss_ppm) || self.rng.ppm(self.fault_ppm);
        let lost = self.is_dropped(bytes) || by_chance;
        let at = sent + self.delay;
        let next = match () {
            () if lost => Next::Lost,
            () if self.ports.is_empty() => Next::Arrives(at),
            () => Next::Switch(at),
        };
        self.lost += u64::from(lost);
        (sent, next)
    }

    /// Counts a frame of so many bytes if it is a full one; whether the plan has it lost.
    fn is_dropped(&mut self, bytes: u64) -> bool {
        self.full_frames += u64::from(bytes == self.full);
        bytes == self.full && self.drops.contains(&self.full_frames)
    }

    /// A frame is in the switch at `now`.
    pub(crate) fn forward(&mut self, now: u64, to: usize, bytes: u64) -> Next {
        let waits = self.port_free[to].saturating_sub(now);
        if waits > self.port_limit {
            self.lost += 1;
            return Next::Lost;
        }
        let takes = self.occupancy(bytes);
        self.port_free[to] = self.ports[to].take(now, takes);
        Next::Arrives(self.port_free[to] + self.delay)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::Span;

    fn network(framing: Framing, hosts: usize) -> Network {
        let plan = LinkPlan { framing, delay: Span(0), ..LinkPlan::default() };
        Network::new(&plan, hosts, Rng::new(1, 1))
    }

    #[test]
    fn a_full_frame_at_ten_gigabits() {
        // The facts of M5 and of real Ethernet: 1514 bytes in 1211.2 ns, 1538 in 1230.4 ns.
        assert_eq!(network(Framing::M5, 2).occupancy(1514), 1_211_200);
        assert_eq!(network(Framing::Ethernet, 2).occupancy(1514), 1_230_400);
    }

    #[test]
    fn frames_wait_for_the_link() {
        let mut network = network(Framing::M5, 2);
        assert_eq!(network.send(0, 0, 1514), (1_211_200, Next::Arrives(1_211_200)));
        assert_eq!(network.send(0, 0, 1514).0, 2_422_400);
        assert_eq!(network.send(0, 1, 1514).0, 1_211_200, "the other direction is free");
    }

    #[test]
    fn the_full_frames_of_the_plan_are_lost() {
        let plan = LinkPlan { drops: vec![2, 3], ..LinkPlan::default() };
        let mut network = Network::new(&plan, 2, Rng::new(1, 1));
        let fates = [1514, 66, 1514, 1513, 1514, 1514].map(|bytes| network.send(0, 0, bytes).1);
        let lost = fates.map(|fate| fate == Next::Lost);
        assert_eq!(lost, [false, false, true, false, true, false]);
        assert_eq!(network.lost, 2);
    }

    #[test]
    fn an_output_of_the_switch_has_an_end() {
        let mut network = network(Framing::M5, 3);
        let (_, next) = network.send(0, 0, 1514);
        assert_eq!(next, Next::Switch(1_211_200));
        let lost = (0..1000).filter(|_| network.forward(0, 2, 1514) == Next::Lost).count();
        assert!((250..350).contains(&lost), "1 MB are some 690 frames: {lost} lost");
        assert_eq!(network.lost, lost as u64);
    }
}
