//! The table of neighbours: which link-layer address an IP address has, and packets that wait for one.

use std::collections::{BTreeMap, VecDeque};
use std::net::IpAddr;

use quipu_wire::ipoib::LinkAddress;

use crate::{MAX_NEIGHBOURS, MAX_WAITING, MAX_WAITING_IN_ALL, REACHABLE_NS, RETRANSMIT_NS, TRIES};

/// What is known of a neighbour.
#[derive(Debug)]
enum State {
    /// Its link-layer address is asked for.
    Incomplete { tries: u8, next_ns: u64, waiting: VecDeque<Vec<u8>> },
    /// It was confirmed.
    Reachable { link: LinkAddress, until_ns: u64 },
    /// It is used, and asked whether it is still there.
    Probing { link: LinkAddress, tries: u8, next_ns: u64 },
}

#[derive(Debug)]
struct Neighbour {
    state: State,
    /// When a packet last went to it; none: it has only asked for us.
    used_ns: Option<u64>,
}

/// A question to be sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ask {
    /// To all.
    All,
    /// To the address that is to be confirmed.
    One(LinkAddress),
}

/// Where a packet for a neighbour goes.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Lookup {
    /// There, and perhaps with a question whether it is still there.
    Known(LinkAddress, bool),
    /// It waits; whether the question is to be asked now.
    Waits(bool),
    /// A table or queue is full.
    Full,
}

/// What became of a neighbour whose time was up.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Due {
    /// It is asked again.
    Ask(IpAddr, Ask),
    /// Nobody has answered; so many packets are dropped.
    Gone(usize),
}

/// The neighbours.
#[derive(Debug, Default)]
pub(crate) struct Neighbours {
    table: BTreeMap<IpAddr, Neighbour>,
    waiting: usize,
    /// Not later than the first deadline.
    next_ns: Option<u64>,
}

impl Neighbours {
    /// When [`Self::due`] has something.
    pub(crate) fn next_ns(&self) -> Option<u64> {
        self.next_ns
    }

    fn wake_at(&mut self, at_ns: u64) {
        self.next_ns = Some(self.next_ns.map_or(at_ns, |next| next.min(at_ns)));
    }

    /// Where a packet for `ip` goes; it is copied if it has to wait.
    pub(crate) fn lookup(&mut self, now_ns: u64, ip: IpAddr, packet: &[u8]) -> Lookup {
        let next_ns = now_ns.saturating_add(RETRANSMIT_NS);
        if !self.table.contains_key(&ip) {
            if !self.make_room(true) {
                return Lookup::Full;
            }
            let state = State::Incomplete { tries: 1, next_ns, waiting: VecDeque::new() };
            self.table.insert(ip, Neighbour { state, used_ns: Some(now_ns) });
            self.wake_at(next_ns);
            self.hold(ip, packet);
            return Lookup::Waits(true);
        }
        let Some(neighbour) = self.table.get_mut(&ip) else { return Lookup::Full };
        neighbour.used_ns = Some(now_ns);
        match neighbour.state {
            State::Reachable { link, until_ns } if now_ns < until_ns => Lookup::Known(link, false),
            State::Reachable { link, .. } => {
                neighbour.state = State::Probing { link, tries: 1, next_ns };
                self.wake_at(next_ns);
                Lookup::Known(link, true)
            }
            State::Probing { link, .. } => Lookup::Known(link, false),
            State::Incomplete { .. } => match self.hold(ip, packet) {
                true => Lookup::Waits(false),
                false => Lookup::Full,
            },
        }
    }

    /// Has a packet wait, if there is room.
    fn hold(&mut self, ip: IpAddr, packet: &[u8]) -> bool {
        let Some(Neighbour { state: State::Incomplete { waiting, .. }, .. }) =
            self.table.get_mut(&ip)
        else {
            return false;
        };
        let fits = waiting.len() < MAX_WAITING && self.waiting < MAX_WAITING_IN_ALL;
        if fits {
            waiting.push_back(packet.to_vec());
            self.waiting += 1;
        }
        fits
    }

    /// A neighbour that is known has this link-layer address; what has waited for it. `None`: it is not
    /// known.
    pub(crate) fn update(
        &mut self,
        now_ns: u64,
        ip: IpAddr,
        link: LinkAddress,
    ) -> Option<VecDeque<Vec<u8>>> {
        let neighbour = self.table.get_mut(&ip)?;
        let until_ns = now_ns.saturating_add(REACHABLE_NS);
        let before = std::mem::replace(&mut neighbour.state, State::Reachable { link, until_ns });
        let waiting = match before {
            State::Incomplete { waiting, .. } => waiting,
            _ => VecDeque::new(),
        };
        self.waiting -= waiting.len();
        Some(waiting)
    }

    /// As [`Self::update`] of one that has asked for us: it is likely to be needed. It takes the place of no
    /// neighbour that packets were sent to.
    pub(crate) fn learn(
        &mut self,
        now_ns: u64,
        ip: IpAddr,
        link: LinkAddress,
    ) -> VecDeque<Vec<u8>> {
        if let Some(waiting) = self.update(now_ns, ip, link) {
            return waiting;
        }
        if self.make_room(false) {
            // It is confirmed when it is used first: anybody can ask.
            let state = State::Reachable { link, until_ns: now_ns };
            self.table.insert(ip, Neighbour { state, used_ns: None });
        }
        VecDeque::new()
    }

    /// The link-layer address of a neighbour that is known to have this queue pair, with its flags, or that
    /// is asked for. `None`: it is another's, or not known.
    pub(crate) fn accepts(&self, ip: IpAddr, link: LinkAddress) -> Option<LinkAddress> {
        match self.table.get(&ip).map(|neighbour| &neighbour.state)? {
            State::Incomplete { .. } => Some(link),
            State::Reachable { link: known, .. } | State::Probing { link: known, .. } => {
                known.is_same_queue_pair(link).then_some(*known)
            }
        }
    }

    /// The neighbours with this queue pair may be gone: they are probed at their next use.
    pub(crate) fn suspect(&mut self, now_ns: u64, link: LinkAddress) {
        for neighbour in self.table.values_mut() {
            if let State::Reachable { link: known, until_ns } = &mut neighbour.state
                && known.is_same_queue_pair(link)
            {
                *until_ns = (*until_ns).min(now_ns);
            }
        }
    }

    /// Whether a neighbour is known, or asked for.
    #[cfg(test)]
    pub(crate) fn len(&self) -> usize {
        self.table.len()
    }

    /// Makes room for one more, whose packets wait (`active`) or which has only asked.
    fn make_room(&mut self, active: bool) -> bool {
        if self.table.len() < MAX_NEIGHBOURS {
            return true;
        }
        let settled = |it: &Neighbour| !matches!(it.state, State::Incomplete { .. });
        let candidates =
            self.table.iter().filter(|(_, it)| settled(it) && (active || it.used_ns.is_none()));
        let oldest = candidates.min_by_key(|(_, it)| it.used_ns).map(|(&ip, _)| ip);
        oldest.is_some_and(|ip| self.table.remove(&ip).is_some())
    }

    /// What is due at `now_ns`: each once, then `next_ns` is later.
    pub(crate) fn due(&mut self, now_ns: u64) -> Vec<Due> {
        if self.next_ns.is_none_or(|next| now_ns < next) {
            return Vec::new();
        }
        let (mut due, mut next, mut gone) = (Vec::new(), None::<u64>, Vec::new());
        for (&ip, neighbour) in &mut self.table {
            match neighbour.state.step(now_ns) {
                Step::Nothing => {}
                Step::Ask(ask) => due.push(Due::Ask(ip, ask)),
                Step::GiveUp(dropped) => {
                    due.push(Due::Gone(dropped));
                    self.waiting -= dropped;
                    gone.push(ip);
                    continue;
                }
            }
            if let State::Incomplete { next_ns, .. } | State::Probing { next_ns, .. } =
                neighbour.state
            {
                next = Some(next.map_or(next_ns, |next| next.min(next_ns)));
            }
        }
        for ip in gone {
            self.table.remove(&ip);
        }
        self.next_ns = next;
        due
    }
}

enum Step {
    Nothing,
    Ask(Ask),
    /// So many packets have waited for nothing.
    GiveUp(usize),
}

impl State {
    fn step(&mut self, now_ns: u64) -> Step {
        let later_ns = now_ns.saturating_add(RETRANSMIT_NS);
        match self {
            Self::Incomplete { tries, next_ns, .. } | Self::Probing { tries, next_ns, .. }
                if *next_ns <= now_ns && *tries < TRIES =>
            {
                (*tries, *next_ns) = (*tries + 1, later_ns);
            }
            Self::Incomplete { next_ns, waiting, .. } if *next_ns <= now_ns => {
                return Step::GiveUp(waiting.len());
            }
            Self::Probing { next_ns, .. } if *next_ns <= now_ns => {
                // It may have another address now, as after a restart (RFC 4861 7.3.3).
                *self = Self::Incomplete { tries: 1, next_ns: later_ns, waiting: VecDeque::new() };
            }
            _ => return Step::Nothing,
        }
        match self {
            Self::Probing { link, .. } => Step::Ask(Ask::One(*link)),
            _ => Step::Ask(Ask::All),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const S: u64 = 1_000_000_000;

    fn ip(n: u32) -> IpAddr {
        std::net::Ipv4Addr::from_bits(0x0a00_0000 + n).into()
    }

    fn link(qpn: u32) -> LinkAddress {
        LinkAddress { qpn, gid: [7; 16], connects: false }
    }

    #[test]
    fn packets_wait_for_the_answer_and_are_bounded() {
        let mut table = Neighbours::default();
        assert_eq!(table.lookup(0, ip(1), b"0"), Lookup::Waits(true));
        for _ in 1..MAX_WAITING {
            assert_eq!(table.lookup(0, ip(1), b"1"), Lookup::Waits(false));
        }
        assert_eq!(table.lookup(0, ip(1), b"x"), Lookup::Full);
        let waited = table.update(1, ip(1), link(5)).unwrap();
        assert_eq!((waited.len(), &waited[0][..]), (MAX_WAITING, &b"0"[..]));
        assert_eq!(table.lookup(2, ip(1), b"2"), Lookup::Known(link(5), false));
        for n in 0..40 {
            table.lookup(2, ip(100 + n), b"w");
            for _ in 0..20 {
                table.lookup(2, ip(100 + n), b"w");
            }
        }
        assert_eq!(table.waiting, MAX_WAITING_IN_ALL);
    }

    #[test]
    fn one_that_does_not_answer_is_asked_three_times() {
        let mut table = Neighbours::default();
        table.lookup(0, ip(1), b"0");
        assert_eq!(table.due(S - 1), []);
        assert_eq!(table.due(S), [Due::Ask(ip(1), Ask::All)]);
        assert_eq!(table.due(2 * S), [Due::Ask(ip(1), Ask::All)]);
        assert_eq!(table.due(3 * S), [Due::Gone(1)]);
        assert_eq!((table.len(), table.waiting, table.next_ns()), (0, 0, None));
    }

    #[test]
    fn one_that_is_used_is_confirmed_and_asked_for_again() {
        let mut table = Neighbours::default();
        table.lookup(0, ip(1), b"0");
        table.update(0, ip(1), link(5));
        let late = REACHABLE_NS;
        assert_eq!(table.lookup(late - 1, ip(1), b"1"), Lookup::Known(link(5), false));
        assert_eq!(table.next_ns(), Some(S), "a deadline that is over costs one look");
        assert_eq!(table.due(late - 1), []);
        assert_eq!(table.next_ns(), None);
        assert_eq!(table.lookup(late, ip(1), b"1"), Lookup::Known(link(5), true));
        assert_eq!(table.due(late + S), [Due::Ask(ip(1), Ask::One(link(5)))]);
        assert_eq!(table.due(late + 2 * S), [Due::Ask(ip(1), Ask::One(link(5)))]);
        // After three probes it is asked for at all, and packets wait again.
        assert_eq!(table.due(late + 3 * S), [Due::Ask(ip(1), Ask::All)]);
        assert_eq!(table.lookup(late + 3 * S, ip(1), b"2"), Lookup::Waits(false));
        assert_eq!(table.update(late + 3 * S, ip(1), link(6)).unwrap().len(), 1);
        assert_eq!(table.lookup(late + 3 * S, ip(1), b"3"), Lookup::Known(link(6), false));
    }

    #[test]
    fn strangers_do_not_displace_neighbours_in_use() {
        let mut table = Neighbours::default();
        for n in 0..MAX_NEIGHBOURS as u32 {
            table.lookup(0, ip(n), b"");
            table.update(0, ip(n), link(n));
        }
        table.learn(1, ip(5000), link(5000));
        assert!(!table.table.contains_key(&ip(5000)) && table.len() == MAX_NEIGHBOURS);
        // One that the kernel sends to takes the place of the one that was not used for longest.
        table.lookup(2, ip(0), b"");
        assert_eq!(table.lookup(3, ip(6000), b""), Lookup::Waits(true));
        assert!(table.table.contains_key(&ip(0)) && table.len() == MAX_NEIGHBOURS);
    }

    #[test]
    fn one_that_has_asked_is_confirmed_at_its_first_use() {
        let mut table = Neighbours::default();
        table.learn(5, ip(1), link(9));
        assert_eq!(table.lookup(6, ip(1), b""), Lookup::Known(link(9), true));
    }
}
