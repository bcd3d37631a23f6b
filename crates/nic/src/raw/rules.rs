//! Flow rules (`ibv_create_flow(3)`): which queue pairs a frame goes to.

use quipu_iwarp::wire::ethernet::{
    ETH_FIELDS, IPV4_FIELDS, IPV6_FIELDS, IpFields, Layers, PORT_FIELDS, PortFields, TUNNEL_FIELDS,
};

use crate::error::Fault;
use crate::types::{CountersId, FlowId, QpId};

/// Specifications that a rule may have.
const MAX_SPECS: usize = 16;

/// A layer of a frame. A specification of one matches frames that have it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FlowLayer {
    /// Destination and source address, type, tag (16 bytes).
    Ethernet,
    /// Source and destination address, protocol, type of service, time to live, flags (12 bytes).
    Ipv4,
    /// Source and destination address, flow label, next header, traffic class, hop limit (39 bytes).
    Ipv6,
    /// Destination and source port of TCP (4 bytes).
    Tcp,
    /// Destination and source port of UDP (4 bytes).
    Udp,
    /// VXLAN network identifier (4 bytes).
    Tunnel,
}

impl FlowLayer {
    /// Bytes of its fields.
    const fn len(self) -> usize {
        match self {
            Self::Ethernet => ETH_FIELDS,
            Self::Ipv4 => IPV4_FIELDS,
            Self::Ipv6 => IPV6_FIELDS,
            Self::Tcp | Self::Udp => PORT_FIELDS,
            Self::Tunnel => TUNNEL_FIELDS,
        }
    }
}

/// What a rule says of one layer: the bits of `value` that `mask` has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FlowSpec {
    layer: FlowLayer,
    inner: bool,
    value: [u8; IPV6_FIELDS],
    mask: [u8; IPV6_FIELDS],
}

impl FlowSpec {
    /// A specification of `layer`, of the frame in a tunnel if `inner`. `value` and `mask` are the
    /// layer's fields as `ibv_create_flow(3)` has them, in network order; what they lack may be anything.
    ///
    /// # Errors
    /// They have more bytes than the layer.
    pub fn new(layer: FlowLayer, inner: bool, value: &[u8], mask: &[u8]) -> Result<Self, Fault> {
        let most = layer.len();
        if value.len() > most || mask.len() > most {
            return Err(Fault::Invalid("a flow specification has more fields than its layer"));
        }
        let mut spec = Self { layer, inner, value: [0; IPV6_FIELDS], mask: [0; IPV6_FIELDS] };
        spec.value[..value.len()].copy_from_slice(value);
        spec.mask[..mask.len()].copy_from_slice(mask);
        Ok(spec)
    }

    /// Whether a frame is as it says.
    fn matches(&self, outer: &Layers<'_>, inner: Option<&Layers<'_>>) -> bool {
        let Some(layers) = (if self.inner { inner } else { Some(outer) }) else { return false };
        let fields: Option<&[u8]> = match self.layer {
            // A tag that is asked for must be there, even if it is 0.
            FlowLayer::Ethernet if self.mask[14..ETH_FIELDS] != [0; 2] && !layers.tagged => None,
            FlowLayer::Ethernet => Some(&layers.eth),
            FlowLayer::Tunnel => layers.tunnel.as_ref().map(|fields| &fields[..]),
            FlowLayer::Ipv4 => match &layers.ip {
                Some(IpFields::V4(fields)) => Some(fields),
                _ => None,
            },
            FlowLayer::Ipv6 => match &layers.ip {
                Some(IpFields::V6(fields)) => Some(fields),
                _ => None,
            },
            FlowLayer::Tcp => match &layers.ports {
                Some(PortFields::Tcp(fields)) => Some(fields),
                _ => None,
            },
            FlowLayer::Udp => match &layers.ports {
                Some(PortFields::Udp(fields)) => Some(fields),
                _ => None,
            },
        };
        fields.is_some_and(|fields| {
            let bits = self.value.iter().zip(&self.mask);
            fields.iter().zip(bits).all(|(field, (value, mask))| (field ^ value) & mask == 0)
        })
    }
}

/// Which frames a rule is about, in addition to its specifications.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum FlowKind {
    /// Those that its specifications match.
    #[default]
    Normal,
    /// All that no normal rule takes.
    AllDefault,
    /// Those to groups of stations that no normal rule takes.
    GroupDefault,
}

/// A rule.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FlowRule {
    /// Which frames.
    pub kind: FlowKind,
    /// The lower, the earlier it is tried.
    pub priority: u16,
    /// All must match; only normal rules have any.
    pub specs: Vec<FlowSpec>,
    /// What it matches goes to rules of lower priority too.
    pub passes_on: bool,
    /// What it matches goes to nobody.
    pub drops: bool,
    /// Where it counts what it matches.
    pub counts: Option<CountersId>,
}

impl FlowRule {
    fn check(&self) -> Result<(), Fault> {
        if self.specs.len() > MAX_SPECS {
            return Err(Fault::Invalid("a flow rule has too many specifications"));
        }
        let plain = self.specs.is_empty() && !self.passes_on;
        if self.kind != FlowKind::Normal && !plain {
            return Err(Fault::Invalid(
                "a default rule cannot have specifications, and cannot pass packets on",
            ));
        }
        Ok(())
    }

    fn matches(&self, outer: &Layers<'_>, inner: Option<&Layers<'_>>) -> bool {
        match self.kind {
            FlowKind::Normal => self.specs.iter().all(|spec| spec.matches(outer, inner)),
            FlowKind::AllDefault => true,
            FlowKind::GroupDefault => outer.to_group(),
        }
    }

    /// Defaults come last.
    fn place(&self) -> (bool, u16) {
        (self.kind != FlowKind::Normal, self.priority)
    }
}

/// A rule and the queue pair that it is of.
struct Flow {
    id: FlowId,
    qp: QpId,
    rule: FlowRule,
}

/// The rules of an adapter, in the order in which they are tried: by priority, the older first.
#[derive(Default)]
pub(crate) struct Rules {
    flows: Vec<Flow>,
    last: u64,
}

impl Rules {
    /// Adds a rule.
    ///
    /// # Errors
    /// It makes no sense, or there are [`MAX_FLOWS`](super::MAX_FLOWS).
    pub(super) fn add(&mut self, qp: QpId, rule: FlowRule) -> Result<FlowId, Fault> {
        rule.check()?;
        if self.flows.len() >= super::MAX_FLOWS {
            return Err(Fault::Exhausted("flow rules"));
        }
        self.last += 1;
        let id = FlowId(self.last);
        let at = self.flows.partition_point(|flow| flow.rule.place() <= rule.place());
        self.flows.insert(at, Flow { id, qp, rule });
        Ok(id)
    }

    /// Removes a rule; the queue pair that it was of, and where it counted.
    pub(super) fn remove(&mut self, id: FlowId) -> Option<(QpId, Option<CountersId>)> {
        let at = self.flows.iter().position(|flow| flow.id == id)?;
        let Flow { qp, rule, .. } = self.flows.remove(at);
        Some((qp, rule.counts))
    }

    /// Whether a queue pair has a rule.
    pub(super) fn concern(&self, qp: QpId) -> bool {
        self.flows.iter().any(|flow| flow.qp == qp)
    }

    /// Lists in `takers` the queue pairs that a frame goes to, each once. A frame to one station goes by
    /// the first rule that matches; one to a group by all of the same priority that do. A rule that drops
    /// ends the search. `count` hears of each rule on the way that counts.
    pub(super) fn steer(
        &self,
        outer: &Layers<'_>,
        inner: Option<&Layers<'_>>,
        takers: &mut Vec<QpId>,
        mut count: impl FnMut(CountersId),
    ) {
        let mut last_place = None;
        for flow in &self.flows {
            let (rule, place) = (&flow.rule, flow.rule.place());
            if last_place.is_some_and(|last| last != place) {
                return;
            }
            if !rule.matches(outer, inner) {
                continue;
            }
            if let Some(counters) = rule.counts {
                count(counters);
            }
            if rule.drops {
                return;
            }
            if !takers.contains(&flow.qp) {
                takers.push(flow.qp);
            }
            if !rule.passes_on {
                if !outer.to_group() {
                    return;
                }
                last_place = Some(place);
            }
        }
    }
}
