//! How many streams may wait for their request. Strangers can open as many as they like: the oldest
//! gives way, first of those from the same address.

use std::collections::{BTreeMap, HashMap};
use std::net::{IpAddr, Ipv6Addr};

use crate::keys::{IdKey, StreamKey};

/// An address as it counts here: who has one IPv6 address has a network of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Origin(Ipv6Addr);

impl From<IpAddr> for Origin {
    fn from(ip: IpAddr) -> Self {
        Self(match ip {
            IpAddr::V4(v4) => v4.to_ipv6_mapped(),
            IpAddr::V6(v6) if v6.to_ipv4_mapped().is_some() => v6,
            IpAddr::V6(v6) => Ipv6Addr::from(u128::from(v6) >> 64 << 64),
        })
    }
}

/// The streams that wait, of all listeners.
#[derive(Debug, Default)]
pub(crate) struct Admission {
    last: u64,
    by_age: BTreeMap<(IdKey, u64), StreamKey>,
    by_origin: BTreeMap<(IdKey, Origin, u64), StreamKey>,
    counts: HashMap<IdKey, usize>,
    origins: HashMap<(IdKey, Origin), usize>,
}

fn add<K: std::hash::Hash + Eq>(counts: &mut HashMap<K, usize>, key: K) {
    *counts.entry(key).or_default() += 1;
}

fn subtract<K: std::hash::Hash + Eq>(counts: &mut HashMap<K, usize>, key: K) {
    if let std::collections::hash_map::Entry::Occupied(mut entry) = counts.entry(key) {
        *entry.get_mut() -= 1;
        if *entry.get() == 0 {
            entry.remove();
        }
    }
}

impl Admission {
    /// Who must give way to one more stream from `origin`.
    pub(crate) fn oldest_above(
        &self,
        listener: IdKey,
        origin: Origin,
        limits: (usize, usize),
    ) -> Option<StreamKey> {
        let (all, same) = limits;
        if self.origins.get(&(listener, origin)).is_some_and(|&count| count >= same) {
            let mut range = self.by_origin.range((listener, origin, 0)..);
            return range.next().map(|(_, &stream)| stream);
        }
        if self.counts.get(&listener).is_some_and(|&count| count >= all) {
            return self.any(listener);
        }
        None
    }

    /// The oldest stream of a listener.
    pub(crate) fn any(&self, listener: IdKey) -> Option<StreamKey> {
        let mut range = self.by_age.range((listener, 0)..=(listener, u64::MAX));
        range.next().map(|(_, &stream)| stream)
    }

    /// The number under which to [`add`](Self::add) the next stream.
    pub(crate) fn number(&mut self) -> u64 {
        self.last += 1;
        self.last
    }

    pub(crate) fn add(&mut self, listener: IdKey, origin: Origin, number: u64, stream: StreamKey) {
        self.by_age.insert((listener, number), stream);
        self.by_origin.insert((listener, origin, number), stream);
        add(&mut self.counts, listener);
        add(&mut self.origins, (listener, origin));
    }

    pub(crate) fn remove(&mut self, listener: IdKey, origin: Origin, number: u64) {
        if self.by_age.remove(&(listener, number)).is_none() {
            return;
        }
        self.by_origin.remove(&(listener, origin, number));
        subtract(&mut self.counts, listener);
        subtract(&mut self.origins, (listener, origin));
    }

    /// How many there are, of all listeners.
    pub(crate) fn len(&self) -> usize {
        self.by_age.len()
    }
}
