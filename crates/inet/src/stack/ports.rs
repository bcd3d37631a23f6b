//! Ports: who has which, and which one is next.

use crate::tcp::Flow;
use crate::tcp::Secret;
use crate::tcp::hash::{Purpose, of_flow};

/// RFC 6335 6: the ports that nobody is assigned.
const FIRST: u16 = 49_152;
const COUNT: u16 = u16::MAX - FIRST + 1;
/// Counters of RFC 6056 3.3.4 (TABLE_LENGTH there).
const COUNTERS: usize = 64;
const PAGE: usize = 256;
const NOBODY: u32 = u32::MAX;

/// From ports to small numbers: pages of a table that covers all ports, so that it takes one access and has
/// nothing that could collide.
#[derive(Clone, Debug)]
pub(super) struct PortMap {
    pages: Vec<Option<Box<[u32; PAGE]>>>,
}

impl Default for PortMap {
    fn default() -> Self {
        Self { pages: vec![None; PAGE] }
    }
}

impl PortMap {
    #[inline]
    pub(super) fn get(&self, port: u16) -> Option<u32> {
        let page = self.pages[usize::from(port) / PAGE].as_ref()?;
        Some(page[usize::from(port) % PAGE]).filter(|index| *index != NOBODY)
    }

    pub(super) fn insert(&mut self, port: u16, index: u32) {
        let page = &mut self.pages[usize::from(port) / PAGE];
        page.get_or_insert_with(|| Box::new([NOBODY; PAGE]))[usize::from(port) % PAGE] = index;
    }

    pub(super) fn remove(&mut self, port: u16) {
        let page = &mut self.pages[usize::from(port) / PAGE];
        if let Some(entries) = page {
            entries[usize::from(port) % PAGE] = NOBODY;
            if entries.iter().all(|index| *index == NOBODY) {
                *page = None;
            }
        }
    }
}

/// Ephemeral ports by the double hash of RFC 6056 3.3.4: whoever sees the ports of connections to himself
/// cannot tell those to others, and a port comes again as late as possible.
#[derive(Clone, Debug)]
pub(super) struct Ephemeral {
    secret: Secret,
    counters: [u16; COUNTERS],
}

impl Ephemeral {
    pub(super) fn new(secret: Secret) -> Self {
        Self { secret, counters: [0; COUNTERS] }
    }

    /// A port that `is_free`, for a connection whose flow is `flow` except for its local port.
    pub(super) fn choose(&mut self, flow: &Flow, is_free: impl Fn(u16) -> bool) -> Option<u16> {
        let offset = of_flow(self.secret, Purpose::Port, flow, [0; 2]) as u16;
        let which = of_flow(self.secret, Purpose::PortStep, flow, [0; 2]) as usize % COUNTERS;
        let counter = &mut self.counters[which];
        (0..COUNT).find_map(|_| {
            let port = FIRST + offset.wrapping_add(*counter) % COUNT;
            *counter = counter.wrapping_add(1);
            is_free(port).then_some(port)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn flow(remote: &str) -> Flow {
        Flow { local: "[fd00::1]:0".parse().unwrap(), remote: remote.parse().unwrap() }
    }

    #[test]
    fn every_port_is_found_once() {
        let mut ephemeral = Ephemeral::new(Secret([1, 2]));
        let mut taken = vec![false; 1 << 16];
        for _ in 0..COUNT {
            let port = ephemeral.choose(&flow("[fd00::2]:80"), |port| !taken[usize::from(port)]);
            taken[usize::from(port.unwrap())] = true;
        }
        assert_eq!(ephemeral.choose(&flow("[fd00::2]:80"), |port| !taken[usize::from(port)]), None);
        assert!(taken[..usize::from(FIRST)].iter().all(|taken| !taken));
    }

    #[test]
    fn ports_differ_between_peers_and_secrets() {
        let first = |secret, remote| Ephemeral::new(secret).choose(&flow(remote), |_| true);
        let base = first(Secret([1, 2]), "[fd00::2]:80");
        assert_ne!(base, first(Secret([1, 2]), "[fd00::2]:81"));
        assert_ne!(base, first(Secret([1, 2]), "[fd00::3]:80"));
        assert_ne!(base, first(Secret([1, 3]), "[fd00::2]:80"));
    }

    #[test]
    fn a_map_of_ports() {
        let mut map = PortMap::default();
        for port in [0, 80, 255, 256, u16::MAX] {
            assert_eq!(map.get(port), None);
            map.insert(port, u32::from(port) + 7);
            assert_eq!(map.get(port), Some(u32::from(port) + 7));
        }
        map.remove(80);
        map.remove(81);
        assert_eq!((map.get(80), map.get(255)), (None, Some(262)));
        map.remove(255);
        map.remove(0);
        assert!(map.pages[0].is_none(), "an empty page goes");
    }
}
