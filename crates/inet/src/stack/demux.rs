//! From the two ends of a connection to its place: a hash table with open addressing.
//!
//! Anyone who can choose addresses and ports must not be able to make them collide, so the hash is keyed:
//! SipHash-1-3, over three words. Probing is linear, and what is taken out is filled from behind (Knuth,
//! volume 3, 6.4, algorithm R), so there are no tombstones that would slow it down with age.

use std::net::{IpAddr, Ipv6Addr, SocketAddr};

use crate::tcp::Secret;
use crate::tcp::hash::siphash_1_3;

/// The two ends of a connection: 24 octets. IPv4 addresses stand as mapped ones, which never come in an
/// IPv6 header (they are martians).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Key {
    remote: [u8; 16],
    remote_port: u16,
    pub(super) local_port: u16,
    /// Which of the own addresses.
    pub(super) local: u16,
}

impl Key {
    pub(super) fn new(local: u16, local_port: u16, remote: SocketAddr) -> Self {
        let ip = match remote.ip() {
            IpAddr::V4(ip) => ip.to_ipv6_mapped(),
            IpAddr::V6(ip) => ip,
        };
        Self { remote: ip.octets(), remote_port: remote.port(), local_port, local }
    }

    pub(super) fn remote(&self) -> SocketAddr {
        SocketAddr::new(Ipv6Addr::from(self.remote).to_canonical(), self.remote_port)
    }

    pub(super) fn hash(&self, secret: Secret) -> u64 {
        let remote = u128::from_be_bytes(self.remote);
        let rest = u64::from(self.local) << 32
            | u64::from(self.local_port) << 16
            | u64::from(self.remote_port);
        siphash_1_3(secret, [(remote >> 64) as u64, remote as u64, rest])
    }
}

const EMPTY: u32 = u32::MAX;
const LEAST: usize = 16;

/// A place of the table: the upper half of the hash, and what is kept.
#[derive(Clone, Copy, Debug)]
struct Entry {
    tag: u32,
    index: u32,
}

const FREE: Entry = Entry { tag: 0, index: EMPTY };

/// The table. Its user keeps the keys, and compares them when a tag agrees.
#[derive(Clone, Debug)]
pub(super) struct Demux {
    /// A power of two; at most three quarters are in use.
    entries: Vec<Entry>,
    used: usize,
}

impl Default for Demux {
    fn default() -> Self {
        Self { entries: vec![FREE; LEAST], used: 0 }
    }
}

impl Demux {
    fn mask(&self) -> usize {
        self.entries.len() - 1
    }

    fn home(&self, tag: u32) -> usize {
        tag as usize & self.mask()
    }

    fn tag(hash: u64) -> u32 {
        (hash >> 32) as u32
    }

    fn find(&self, hash: u64, is: impl Fn(u32) -> bool) -> Option<usize> {
        let tag = Self::tag(hash);
        let mut at = self.home(tag);
        // A quarter is free, so there is an end.
        loop {
            let entry = self.entries[at];
            if entry.index == EMPTY {
                return None;
            }
            if entry.tag == tag && is(entry.index) {
                return Some(at);
            }
            at = (at + 1) & self.mask();
        }
    }

    /// Octets of memory behind it.
    pub(super) fn memory(&self) -> usize {
        self.entries.capacity() * size_of::<Entry>()
    }

    /// What was kept under `hash` and is what `is` looks for.
    #[inline]
    pub(super) fn get(&self, hash: u64, is: impl Fn(u32) -> bool) -> Option<u32> {
        self.find(hash, is).map(|at| self.entries[at].index)
    }

    /// Keeps `index`, which is not in it.
    pub(super) fn insert(&mut self, hash: u64, index: u32) {
        if (self.used + 1) * 4 > self.entries.len() * 3 {
            self.resize(self.entries.len() * 2);
        }
        self.put(Entry { tag: Self::tag(hash), index });
        self.used += 1;
    }

    fn put(&mut self, entry: Entry) {
        let mut at = self.home(entry.tag);
        while self.entries[at].index != EMPTY {
            at = (at + 1) & self.mask();
        }
        self.entries[at] = entry;
    }

    fn resize(&mut self, len: usize) {
        let old = std::mem::replace(&mut self.entries, vec![FREE; len]);
        old.into_iter().filter(|entry| entry.index != EMPTY).for_each(|entry| self.put(entry));
    }

    /// Takes `index` out, if it is in it.
    pub(super) fn remove(&mut self, hash: u64, index: u32) {
        let Some(mut hole) = self.find(hash, |found| found == index) else { return };
        let mask = self.mask();
        let mut at = hole;
        loop {
            at = (at + 1) & mask;
            let entry = self.entries[at];
            if entry.index == EMPTY {
                break;
            }
            // It may move to the hole if that is not in front of where its search begins.
            let distance = at.wrapping_sub(self.home(entry.tag)) & mask;
            if distance >= at.wrapping_sub(hole) & mask {
                self.entries[hole] = entry;
                hole = at;
            }
        }
        self.entries[hole] = FREE;
        self.used -= 1;
        if self.entries.len() > LEAST && self.used * 8 < self.entries.len() {
            self.resize(self.entries.len() / 2);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    fn key(n: u32) -> Key {
        Key::new(0, 80, SocketAddr::new(Ipv6Addr::from(u128::from(n)).into(), 1))
    }

    #[test]
    fn a_key_knows_its_peer() {
        for remote in ["10.1.2.3:4", "[fd00::1]:65535"] {
            let remote = remote.parse().unwrap();
            assert_eq!(Key::new(3, 5, remote).remote(), remote);
        }
        assert_eq!(size_of::<Key>(), 22);
    }

    #[test]
    fn the_hash_depends_on_everything() {
        let secret = Secret([1, 2]);
        let remote: SocketAddr = "[fd00::1]:9".parse().unwrap();
        let base = Key::new(0, 5, remote).hash(secret);
        let others = [
            Key::new(1, 5, remote).hash(secret),
            Key::new(0, 6, remote).hash(secret),
            Key::new(0, 5, "[fd00::1]:10".parse().unwrap()).hash(secret),
            Key::new(0, 5, "[fd01::1]:9".parse().unwrap()).hash(secret),
            Key::new(0, 5, remote).hash(Secret([1, 3])),
        ];
        assert!(others.iter().all(|other| *other != base));
    }

    proptest! {
        /// Few distinct hashes, so that everything collides.
        #[test]
        fn it_is_a_map(
            ops in prop::collection::vec((0u32..48, any::<bool>()), 1..400),
            bits in 0u32..8,
        ) {
            let hash = |n: u32| u64::from(n & ((1 << bits) - 1)) << 32;
            let mut table = Demux::default();
            let mut model = BTreeMap::new();
            for (n, insert) in ops {
                if insert && !model.contains_key(&n) {
                    table.insert(hash(n), n);
                    model.insert(n, ());
                } else if !insert {
                    table.remove(hash(n), n);
                    model.remove(&n);
                }
                for n in 0..48 {
                    let found = table.get(hash(n), |index| key(index) == key(n));
                    prop_assert_eq!(found, model.get(&n).map(|()| n));
                }
                prop_assert_eq!(table.used, model.len());
            }
        }
    }

    #[test]
    fn probes_stay_short_under_load() {
        let secret = Secret([5, 6]);
        let mut table = Demux::default();
        (0..100_000).for_each(|n| table.insert(key(n).hash(secret), n));
        let probes = |n: u32| {
            let mut seen = 0;
            let at = table.find(key(n).hash(secret), |index| index == n).unwrap();
            let home = table.home(Demux::tag(key(n).hash(secret)));
            seen += at.wrapping_sub(home) & table.mask();
            seen
        };
        let total: usize = (0..100_000).map(probes).sum();
        // Linear probing at a load of a = 0.76: (1 + 1 / (1 - a)) / 2 = 2.6 places for a hit, on average.
        assert!(total < 200_000, "{total}");
        (0..100_000).for_each(|n| table.remove(key(n).hash(secret), n));
        assert_eq!((table.used, table.entries.len()), (0, LEAST));
    }
}
