//! Where a packet goes next: on the link, or to a router (RFC 4861 5.2, 6.3).

use std::net::{IpAddr, Ipv6Addr};

use quipu_wire::ipv6;
use quipu_wire::ndp::{Advertisement, Prefix};

/// Routers and prefixes that advertisements can make this end remember; more are ignored.
const MAX_LEARNT: usize = 8;
/// Less than this is not believed: it would let anybody on the link cut this end off (CVE-2015-2922; RFC 4861
/// 6.3.4 allows to be more careful than it is).
const LEAST_HOP_LIMIT: u8 = 32;
const SECOND: u64 = 1_000_000_000;

/// What was learnt, and until when it holds.
#[derive(Clone, Debug)]
struct Learnt<T> {
    what: T,
    until: u64,
}

#[derive(Clone, Debug)]
pub(super) struct Routes {
    own: Vec<(IpAddr, u8)>,
    gateways: Vec<IpAddr>,
    routers: Vec<Learnt<Ipv6Addr>>,
    prefixes: Vec<Learnt<(Ipv6Addr, u8)>>,
    /// Routers that were asked without result in this round.
    silent: Vec<IpAddr>,
    link_mtu: u32,
    pub(super) mtu: u32,
    pub(super) hop_limit: Option<u8>,
}

fn seconds(now: u64, lifetime: u32) -> u64 {
    // RFC 4861 4.6.2: all ones are infinity.
    if lifetime == u32::MAX { u64::MAX } else { now + u64::from(lifetime) * SECOND }
}

/// Whether the first `len` bits are the same, of addresses of one family.
#[must_use]
pub fn share_prefix(a: IpAddr, b: IpAddr, len: u8) -> bool {
    let differ = match (a, b) {
        (IpAddr::V4(a), IpAddr::V4(b)) => u128::from(a.to_bits() ^ b.to_bits()) << 96,
        (IpAddr::V6(a), IpAddr::V6(b)) => a.to_bits() ^ b.to_bits(),
        _ => return false,
    };
    differ.leading_zeros() >= u32::from(len)
}

/// Notes something for a while; forgets it if the while is none.
fn learn<T: PartialEq>(list: &mut Vec<Learnt<T>>, now: u64, what: T, until: u64) {
    // What is known keeps its place: of several routers the first is used (RFC 4861 6.3.6).
    let known = list.iter_mut().find(|it| it.what == what).map(|it| it.until = until);
    list.retain(|it| it.until > now);
    if known.is_none() && until > now && list.len() < MAX_LEARNT {
        list.push(Learnt { what, until });
    }
}

impl Routes {
    pub(super) fn new(own: &[(IpAddr, u8)], gateways: &[IpAddr], mtu: u32) -> Self {
        Self {
            own: own.to_vec(),
            gateways: gateways.to_vec(),
            routers: Vec::new(),
            prefixes: Vec::new(),
            silent: Vec::new(),
            link_mtu: mtu,
            mtu,
            hop_limit: None,
        }
    }

    /// The addresses of this end.
    pub(super) fn own(&self) -> impl Iterator<Item = IpAddr> {
        self.own.iter().map(|(own, _)| *own)
    }

    pub(super) fn is_own(&self, address: IpAddr) -> bool {
        self.own.iter().any(|(own, _)| *own == address)
    }

    /// The address of this end from which to speak to a neighbour: of its prefix if there is one, otherwise
    /// the link-local one, or any (RFC 6724 5, as far as a neighbour makes a difference).
    pub(super) fn source_for(&self, neighbour: IpAddr) -> Option<IpAddr> {
        let near = self.own.iter().find(|(own, len)| share_prefix(*own, neighbour, *len));
        let mut family = self.own.iter().filter(|(own, _)| own.is_ipv4() == neighbour.is_ipv4());
        let local = family.clone().find(|(own, _)| is_link_local(*own));
        near.or(local).or_else(|| family.next()).map(|(own, _)| *own)
    }

    fn on_link(&self, now: u64, destination: IpAddr) -> bool {
        let learnt = |it: &Learnt<(Ipv6Addr, u8)>| {
            it.until > now && share_prefix(it.what.0.into(), destination, it.what.1)
        };
        is_link_local(destination)
            || self.own.iter().any(|(own, len)| share_prefix(*own, destination, *len))
            || self.prefixes.iter().any(learnt)
    }

    /// Routers for a family of addresses: those that were given come first.
    fn routers(&self, now: u64, family: IpAddr) -> impl Iterator<Item = IpAddr> + Clone {
        let learnt = self.routers.iter().filter(move |it| it.until > now);
        let all = self.gateways.iter().copied().chain(learnt.map(|it| it.what.into()));
        all.filter(move |it| it.is_ipv4() == family.is_ipv4())
    }

    /// The next hop towards a destination; of several routers the first that `works`, or else the next that
    /// was not asked yet (RFC 4861 6.3.6).
    pub(super) fn next_hop(
        &self,
        now: u64,
        destination: IpAddr,
        works: impl Fn(IpAddr) -> bool,
    ) -> Option<IpAddr> {
        if destination.is_multicast() || self.on_link(now, destination) {
            return Some(destination);
        }
        let mut routers = self.routers(now, destination);
        let working = routers.clone().find(|router| works(*router));
        let next = || routers.clone().find(|router| !self.silent.contains(router));
        working.or_else(next).or_else(|| routers.next())
    }

    /// A neighbour does not answer. If it is a router, the others are asked in turn; `worked`: those that did
    /// not answer before may do so now.
    pub(super) fn fell_silent(&mut self, now: u64, neighbour: IpAddr, worked: bool) {
        let routers: Vec<_> = self.routers(now, neighbour).collect();
        if !routers.contains(&neighbour) {
            return;
        }
        let over = worked || routers.iter().all(|router| self.silent.contains(router));
        // Of this family those that are still routers, and others than this one.
        let stays = |it: &IpAddr| !over && *it != neighbour && routers.contains(it);
        self.silent.retain(|it| it.is_ipv4() != neighbour.is_ipv4() || stays(it));
        self.silent.push(neighbour);
    }

    /// Whether nobody else is left to ask, now that this neighbour does not answer.
    pub(super) fn is_cut_off(
        &self,
        now: u64,
        destination: IpAddr,
        neighbour: IpAddr,
        works: impl Fn(IpAddr) -> bool,
    ) -> bool {
        if self.on_link(now, destination) {
            return destination == neighbour;
        }
        let mut routers = self.routers(now, destination);
        routers.clone().any(|router| router == neighbour)
            && routers.all(|router| self.silent.contains(&router) && !works(router))
    }

    /// RFC 4861 6.3.4, 6.3.5.
    pub(super) fn advertise(&mut self, now: u64, router: Ipv6Addr, it: &Advertisement) {
        learn(&mut self.routers, now, router, seconds(now, it.lifetime.into()));
        if it.hop_limit >= LEAST_HOP_LIMIT && it.lifetime > 0 {
            self.hop_limit = Some(it.hop_limit);
        }
        // RFC 4861 6.3.4: at least the minimum, at most what the link takes.
        if let Some(mtu) = it.mtu.filter(|mtu| (ipv6::MIN_MTU..=self.link_mtu).contains(mtu)) {
            self.mtu = mtu;
        }
        for prefix in it.prefixes.iter() {
            self.take_prefix(now, prefix);
        }
    }

    fn take_prefix(&mut self, now: u64, prefix: &Prefix) {
        // RFC 4861 6.3.4: the link-local prefix is ignored, and one that says nothing about the link. A
        // prefix of nothing would take every destination from the routers.
        let what = (prefix.prefix, prefix.len);
        if prefix.on_link && prefix.len > 0 && !is_link_local(prefix.prefix.into()) {
            learn(&mut self.prefixes, now, what, seconds(now, prefix.valid));
        }
    }

    /// It says that it is no router any more (RFC 4861 7.2.5).
    pub(super) fn forget_router(&mut self, router: Ipv6Addr) {
        self.routers.retain(|it| it.what != router);
    }
}

fn is_link_local(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(address) => address.is_link_local(),
        IpAddr::V6(address) => address.is_unicast_link_local(),
    }
}
