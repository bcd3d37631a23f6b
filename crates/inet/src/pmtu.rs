//! How large a packet the path to an address takes (RFC 8201, RFC 1191), as far as routers have said.
//!
//! Whoever has sent a packet that is too long hears of it from a router, which may be anybody: a report is
//! believed only if it quotes what is really on the way. For a connection that is
//! [`crate::tcp::Connection::handle_report`]; for datagrams [`Outstanding`]. What is not reported at all
//! connections find out themselves (RFC 4821, RFC 8899).

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};

use quipu_wire::ipv6;

use crate::tcp::hash::{Purpose, of_flow};
use crate::tcp::{Flow, Secret};

/// Paths that are remembered.
pub const MAX_PATHS: usize = 1024;
/// RFC 8201 4, RFC 1191 6.3: after ten minutes a path may have become better, and is tried anew.
pub const AGE: u64 = 600_000_000_000;
/// The least that is believed of a path of IPv4: what every host takes (RFC 1122 3.3.3). A path may be
/// narrower by RFC 791, but today only those that attack say so.
pub const IPV4_FLOOR: u32 = 576;

#[derive(Clone, Copy, Debug)]
struct Path {
    mtu: u32,
    since: u64,
}

/// What is known of paths: only those that are narrower than the link.
#[derive(Clone, Debug)]
pub struct Paths {
    link: u32,
    paths: BTreeMap<IpAddr, Path>,
}

impl Paths {
    /// Behind a link that takes packets of `link` octets.
    pub fn new(link: u32) -> Self {
        Self { link, paths: BTreeMap::new() }
    }

    /// The link takes packets of another size from now on.
    pub fn set_link(&mut self, link: u32) {
        self.link = link;
    }

    /// The longest packet that the path to an address takes.
    pub fn get(&self, now: u64, to: IpAddr) -> u32 {
        let path = self.paths.get(&to).filter(|path| path.since + AGE > now);
        path.map_or(self.link, |path| path.mtu.min(self.link))
    }

    /// What a report of `mtu` means for the path to an address, if it means anything: it may only make a
    /// path narrower (RFC 8201 4).
    pub fn narrower(&self, now: u64, to: IpAddr, mtu: u32) -> Option<u32> {
        believable(to, mtu).filter(|&mtu| mtu < self.get(now, to))
    }

    /// Takes note of a report that was found worth believing; says whether the path is narrower now.
    pub fn reduce(&mut self, now: u64, to: IpAddr, mtu: u32) -> bool {
        let Some(mtu) = self.narrower(now, to, mtu) else { return false };
        if self.paths.len() >= MAX_PATHS && !self.paths.contains_key(&to) {
            self.paths.retain(|_, path| path.since + AGE > now);
            let oldest = self.paths.iter().min_by_key(|(_, path)| path.since);
            let oldest = oldest.map(|(address, _)| *address);
            if let Some(oldest) = oldest.filter(|_| self.paths.len() >= MAX_PATHS) {
                self.paths.remove(&oldest);
            }
        }
        self.paths.insert(to, Path { mtu, since: now });
        true
    }
}

/// What is believed of a report of `mtu` about the path to an address, whatever else is known.
pub(crate) fn believable(to: IpAddr, mtu: u32) -> Option<u32> {
    match to {
        // RFC 8201 4: less than the minimum of IPv6 is ignored.
        IpAddr::V6(_) => (mtu >= ipv6::MIN_MTU).then_some(mtu),
        IpAddr::V4(_) => Some(mtu.max(IPV4_FLOOR)),
    }
}

/// A datagram that may be on the way: the longest that was sent lately between two ends.
#[derive(Clone, Copy, Debug, Default)]
struct Mark {
    hash: u64,
    at: u64,
    /// Octets of the IP packet.
    len: u32,
}

/// Datagrams that may still be on the way. Of each only a mark is kept, which a later one may take: then a
/// report about the earlier one is not believed.
#[derive(Clone, Debug)]
pub struct Outstanding {
    marks: Box<[Mark; Self::MARKS]>,
    secret: Secret,
    /// Where the mark of the last datagram is, as the next is often between the same two.
    last: Option<(SocketAddr, SocketAddr, (usize, u64))>,
}

impl Outstanding {
    const MARKS: usize = 256;
    /// How long a report may take: otherwise one packet that was long would let anybody narrow a path for
    /// ever after.
    const LATELY: u64 = 10_000_000_000;

    /// None yet.
    pub fn new(secret: Secret) -> Self {
        Self { marks: Box::new([Mark::default(); Self::MARKS]), secret, last: None }
    }

    fn place(&self, local: SocketAddr, remote: SocketAddr) -> (usize, u64) {
        let hash = of_flow(self.secret, Purpose::Datagram, &Flow { local, remote }, [0; 2]) | 1;
        ((hash >> 32) as usize % Self::MARKS, hash)
    }

    /// A datagram was sent, in an IP packet of `len` octets.
    pub fn sent(&mut self, now: u64, local: SocketAddr, remote: SocketAddr, len: u32) {
        let (at, hash) = match self.last {
            Some((from, to, place)) if (from, to) == (local, remote) => place,
            _ => self.place(local, remote),
        };
        self.last = Some((local, remote, (at, hash)));
        let mark = &mut self.marks[at];
        let lately = mark.hash == hash && mark.at.saturating_add(Self::LATELY) > now;
        if !lately || len >= mark.len {
            *mark = Mark { hash, at: now, len };
        }
    }

    /// Whether one was.
    pub fn contains(&self, local: SocketAddr, remote: SocketAddr) -> bool {
        let (at, hash) = self.place(local, remote);
        self.marks[at].hash == hash
    }

    /// Whether one was lately that a link for packets of `mtu` octets would not have taken.
    pub fn exceeds(&self, now: u64, local: SocketAddr, remote: SocketAddr, mtu: u32) -> bool {
        let mark = &self.marks[self.place(local, remote).0];
        self.contains(local, remote) && mark.len > mtu && mark.at.saturating_add(Self::LATELY) > now
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn v6(last: u16) -> IpAddr {
        [0x2001, 0xdb8, 0, 0, 0, 0, 0, last].into()
    }

    #[test]
    fn reports_make_a_path_narrower_only_and_for_ten_minutes() {
        let mut paths = Paths::new(9_000);
        assert_eq!(paths.get(0, v6(1)), 9_000);
        assert!(paths.reduce(0, v6(1), 1_500));
        assert!(!paths.reduce(1, v6(1), 1_500) && !paths.reduce(1, v6(1), 4_000));
        assert_eq!((paths.get(1, v6(1)), paths.get(1, v6(2))), (1_500, 9_000));
        assert!(paths.reduce(2, v6(1), 1_280));
        assert_eq!(paths.get(1 + AGE, v6(1)), 1_280);
        assert_eq!(paths.get(2 + AGE, v6(1)), 9_000);
        assert!(paths.reduce(3 + AGE, v6(1), 1_500), "from the beginning");
        paths.set_link(1_400);
        assert_eq!(paths.get(3 + AGE, v6(1)), 1_400);
    }

    #[test]
    fn what_is_too_little_is_not_believed() {
        let mut paths = Paths::new(1_500);
        assert!(!paths.reduce(0, v6(1), 1_279) && !paths.reduce(0, v6(1), 0));
        let v4 = [192, 0, 2, 1].into();
        assert!(paths.reduce(0, v4, 68));
        assert_eq!(paths.get(0, v4), IPV4_FLOOR);
    }

    #[test]
    fn paths_are_few_and_the_oldest_goes() {
        let mut paths = Paths::new(1_500);
        for n in 0..=MAX_PATHS as u16 {
            assert!(paths.reduce(u64::from(n), v6(n), 1_400));
        }
        assert_eq!(paths.paths.len(), MAX_PATHS);
        assert_eq!((paths.get(9, v6(0)), paths.get(9, v6(1))), (1_500, 1_400));
        assert!(paths.reduce(2 * AGE, v6(0), 1_400));
        assert_eq!(paths.paths.len(), 1, "the others were too old");
    }

    #[test]
    fn datagrams_on_the_way() {
        let local = SocketAddr::new(v6(1), 7);
        let remote = |port| SocketAddr::new(v6(2), port);
        let mut outstanding = Outstanding::new(Secret([1, 2]));
        assert!(!outstanding.contains(local, remote(9)));
        outstanding.sent(0, local, remote(9), 1_500);
        assert!(outstanding.contains(local, remote(9)));
        assert!(!outstanding.contains(local, remote(10)));
        assert!(!outstanding.contains(SocketAddr::new(v6(1), 8), remote(9)));
        (100..5_000).for_each(|port| outstanding.sent(0, local, remote(port), 100));
        assert!(!outstanding.contains(local, remote(9)));
    }
    #[test]
    fn reports_are_about_what_was_long_and_lately() {
        let [local, remote] = [1, 2].map(|last| SocketAddr::new(v6(last), 7));
        let mut outstanding = Outstanding::new(Secret([1, 2]));
        assert!(!outstanding.exceeds(0, local, remote, 0));
        let second = Outstanding::LATELY / 10;
        outstanding.sent(0, local, remote, 1_500);
        // A short one behind it does not hide it, and does not keep it.
        outstanding.sent(5 * second, local, remote, 100);
        assert!(outstanding.exceeds(9 * second, local, remote, 1_499));
        assert!(!outstanding.exceeds(9 * second, local, remote, 1_500));
        assert!(!outstanding.exceeds(10 * second, local, remote, 1_400));
        outstanding.sent(10 * second, local, remote, 100);
        assert!(!outstanding.exceeds(10 * second, local, remote, 100));
        assert!(outstanding.exceeds(10 * second, local, remote, 99));
    }
}
