//! Who is measured on packet links, how, and what came out.

use std::fmt;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::model::{Role, Speed};
use crate::nearness::{commonest, same_state};
use crate::results::ENOUGH;
use crate::stats;

/// The part of the plan about QPIP.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PlannedQpip {
    /// How often every contender runs everything.
    pub rounds: u32,
    /// How long a slice is, in milliseconds; a quarter of that before it is not counted, nor are the first
    /// 256 MiB of bulk transfer.
    pub slice_ms: u64,
    /// Largest IP packets of the links, in octets.
    pub mtus: Vec<u32>,
    /// Octets of a message in bulk transfer.
    pub message: u32,
    /// The same where only what programs spend is of interest.
    pub sizes: Vec<u32>,
}

impl PlannedQpip {
    /// What makes no sense in it, if anything.
    pub(crate) fn fault(&self) -> Option<&'static str> {
        let within = |mtu: &u32| (1280..=65_521).contains(mtu);
        match self {
            Self { rounds, .. } if !(1..=1000).contains(rounds) => {
                Some("rounds must be from 1 to 1000")
            }
            Self { slice_ms, .. } if !(10..=10_000).contains(slice_ms) => {
                Some("slice_ms must be from 10 to 10000")
            }
            Self { message, sizes, .. }
                if [message].into_iter().chain(sizes).any(|it| !(1..=1 << 20).contains(it)) =>
            {
                Some("message and sizes must be from 1 to 1048576")
            }
            Self { mtus, .. } if mtus.is_empty() || !mtus.iter().all(within) => {
                Some("mtus must be from 1280 to 65521, one at least")
            }
            _ => None,
        }
    }
}

/// A link between two ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Link {
    /// A TAP device, whose other end is the kernel's.
    Tap,
    /// The same without offloads, for who knows none.
    PlainTap,
    /// A pair of virtual Ethernet interfaces between two network namespaces.
    Veth,
}

impl fmt::Display for Link {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Tap | Self::PlainTap => "TAP",
            Self::Veth => "veth",
        })
    }
}

/// What is at an end of a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum EndKind {
    /// A socket of the kernel, whose owner sleeps in bulk transfer.
    Socket,
    /// The same, whose owner spins.
    SpinningSocket,
    /// A queue pair, on the TAP device or a packet socket.
    QueuePair,
    /// A queue pair on an XDP socket.
    XdpQueuePair,
    /// A queue pair of an adapter in another process, on a packet socket. The program sleeps while it waits.
    Attached,
    /// The same, with a program that spins.
    SpinningAttached,
    /// A socket of smoltcp, on a TAP device or a packet socket.
    Smoltcp,
}

impl EndKind {
    /// Whether it is the kernel's.
    pub(crate) fn is_socket(self) -> bool {
        matches!(self, Self::Socket | Self::SpinningSocket)
    }

    /// Whether it is ours.
    pub(crate) fn is_queue_pair(self) -> bool {
        matches!(self, Self::QueuePair | Self::XdpQueuePair) || self.is_attached()
    }

    /// Whether its owner sleeps in bulk transfer while it waits.
    pub(crate) fn sleeps(self) -> bool {
        matches!(self, Self::Socket | Self::Attached)
    }

    /// Whether its adapter is in a process of its own.
    pub(crate) fn is_attached(self) -> bool {
        matches!(self, Self::Attached | Self::SpinningAttached)
    }
}

/// Two ends of a link: the first sends, or asks; the second receives, or answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Contender {
    /// How it is called.
    pub name: &'static str,
    /// What it is in the comparison.
    pub role: Role,
    /// Between the ends.
    pub link: Link,
    /// The ends.
    pub ends: [EndKind; 2],
}

const fn contender(name: &'static str, role: Role, link: Link, ends: [EndKind; 2]) -> Contender {
    Contender { name, role, link, ends }
}

/// Names of contenders that targets speak of.
pub(crate) const KERNEL: &str = "kernel";
pub(crate) const KERNEL_SPINNING: &str = "kernel, spinning";
pub(crate) const TO_SOCKET: [&str; 2] = ["QPIP to socket", "smoltcp to socket"];
pub(crate) const FROM_SOCKET: [&str; 2] = ["socket to QPIP", "socket to smoltcp"];
pub(crate) const SMOLTCP: &str = "smoltcp";
pub(crate) const QPIP: &str = "QPIP";
pub(crate) const QPIP_XDP: &str = "QPIP, XDP";
pub(crate) const OWN_PROCESS: &str = "QPIP, own process";
pub(crate) const OWN_PROCESS_SPINNING: &str = "QPIP, own process, spinning";

/// Everybody.
pub(crate) const CONTENDERS: &[Contender] = {
    use EndKind::{Attached, QueuePair, Socket, SpinningAttached, SpinningSocket, XdpQueuePair};
    const SPINNING: [EndKind; 2] = [SpinningAttached, SpinningAttached];
    &[
        contender(KERNEL, Role::Floor, Link::Veth, [Socket, Socket]),
        contender(KERNEL_SPINNING, Role::Floor, Link::Veth, [SpinningSocket, SpinningSocket]),
        contender(QPIP, Role::Quipu, Link::Veth, [QueuePair, QueuePair]),
        contender(QPIP_XDP, Role::Quipu, Link::Veth, [XdpQueuePair, XdpQueuePair]),
        contender(OWN_PROCESS, Role::Quipu, Link::Veth, [Attached, Attached]),
        contender(OWN_PROCESS_SPINNING, Role::Quipu, Link::Veth, SPINNING),
        contender(TO_SOCKET[0], Role::Quipu, Link::Tap, [QueuePair, SpinningSocket]),
        contender(FROM_SOCKET[0], Role::Quipu, Link::Tap, [SpinningSocket, QueuePair]),
        #[cfg(feature = "smoltcp")]
        contender(SMOLTCP, Role::Peer, Link::Veth, [EndKind::Smoltcp, EndKind::Smoltcp]),
        #[cfg(feature = "smoltcp")]
        contender(TO_SOCKET[1], Role::Peer, Link::PlainTap, [EndKind::Smoltcp, SpinningSocket]),
        #[cfg(feature = "smoltcp")]
        contender(FROM_SOCKET[1], Role::Peer, Link::PlainTap, [SpinningSocket, EndKind::Smoltcp]),
    ]
};

/// What is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Figure {
    /// One octet there and back, by UDP, in microseconds; both ends spin, except for
    /// [`EndKind::Attached`].
    RoundTripUdp,
    /// The same by TCP.
    RoundTripTcp,
    /// Calls that send an octet by TCP, and, when the answer is there, those that receive it and make room
    /// for another: nanoseconds. Where the adapter is in a process of its own, 16 messages are posted
    /// together, and only polls that find something count: what they take by what they find.
    HostOverhead,
    /// A stream of messages by TCP one way, in megabytes a second.
    Bulk,
    /// The same with messages of several sizes, between programs that sleep while they wait.
    Sizes,
}

impl Figure {
    /// All of them.
    pub(crate) const ALL: [Self; 5] =
        [Self::RoundTripUdp, Self::RoundTripTcp, Self::HostOverhead, Self::Bulk, Self::Sizes];

    /// Whether it is a stream, which goes one way.
    pub(crate) fn is_stream(self) -> bool {
        matches!(self, Self::Bulk | Self::Sizes)
    }
}

/// A slice that the stage is to run.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) struct Slice {
    pub(crate) link: Link,
    pub(crate) ends: [EndKind; 2],
    pub(crate) figure: Figure,
    pub(crate) mtu: u32,
    pub(crate) message: u32,
    pub(crate) slice_ms: u64,
}

impl Slice {
    /// How long it is.
    pub(crate) fn time(&self) -> Duration {
        Duration::from_millis(self.slice_ms)
    }
}

/// Processor time of an end, as parts of one processor.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Load {
    /// The program's thread, which polls or makes system calls. Of a queue pair it does the adapter's work,
    /// too, if the engine is in its process; if not, the thread that helps the program to attach is here.
    pub program: f64,
    /// The adapter's own thread, or its process.
    pub adapter: f64,
    /// How often a second the program has gone to sleep, and the thread that helps it.
    pub sleeps: f64,
}

/// What a slice showed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Measured {
    /// As [`Figure`] says.
    pub value: f64,
    /// The same in cycles of the time-stamp counter, where that is of interest; else 0.
    pub cycles: f64,
    /// Of the two ends.
    pub load: [Load; 2],
}

/// One contender in one figure with one MTU and one size of messages.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    /// Who.
    #[serde(flatten)]
    pub contender: Contender,
    /// What.
    pub figure: Figure,
    /// Largest IP packet, in octets.
    pub mtu: u32,
    /// Octets of a message where it is a stream.
    pub message: u32,
    /// In the rounds; `None` where it failed.
    pub rounds: Vec<Option<Measured>>,
    /// Nanoseconds of a cache line from one processor to the other and back in each, if that was one state
    /// from beginning to end.
    pub lines_ns: Vec<Option<f64>>,
    /// How many rounds the sums are of: those in the commonest state of all contenders of the figure and the
    /// point, if there are enough.
    pub counted: usize,
    /// Medians of each number.
    pub median: Measured,
    /// Quartiles of the value.
    pub quartiles: [f64; 2],
}

impl Row {
    pub(crate) fn new(contender: Contender, figure: Figure, (mtu, message): (u32, u32)) -> Self {
        let (median, quartiles) = (Measured::default(), [f64::NAN; 2]);
        let (rounds, lines_ns, counted) = (Vec::new(), Vec::new(), 0);
        Self { contender, figure, mtu, message, rounds, lines_ns, counted, median, quartiles }
    }

    /// What its figure is over: octets of a message, or the MTU.
    pub(super) fn at(&self) -> u32 {
        if self.figure == Figure::Sizes { self.message } else { self.mtu }
    }

    /// What came out in a round, and the line if that was one state.
    fn sample(&self, round: usize) -> Option<(Measured, Option<f64>)> {
        let measured = self.rounds.get(round).copied()??;
        Some((measured, self.lines_ns.get(round).copied().flatten()))
    }

    fn samples(&self) -> impl Iterator<Item = (Measured, Option<f64>)> {
        (0..self.rounds.len()).filter_map(|round| self.sample(round))
    }

    /// Draws the sum of samples of this line, if there are enough, or of all.
    fn finish(&mut self, line_ns: Option<f64>) {
        let of = |any| self.samples().filter(move |(_, line)| any || is_same(line_ns, *line));
        let mixed = of(false).count() < ENOUGH;
        let counted: Vec<_> = of(mixed).map(|(measured, _)| measured).collect();
        self.counted = counted.len();
        let all = |number: fn(&Measured) -> f64| counted.iter().map(number).collect::<Vec<_>>();
        let median = |number| stats::median(&all(number));
        self.quartiles = stats::quartiles(&all(|m| m.value));
        self.median = Measured {
            value: median(|m| m.value),
            cycles: median(|m| m.cycles),
            load: [
                Load {
                    program: median(|m| m.load[0].program),
                    adapter: median(|m| m.load[0].adapter),
                    sleeps: median(|m| m.load[0].sleeps),
                },
                Load {
                    program: median(|m| m.load[1].program),
                    adapter: median(|m| m.load[1].adapter),
                    sleeps: median(|m| m.load[1].sleeps),
                },
            ],
        };
    }
}

/// All that was measured on packet links.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Rows(pub Vec<Row>);

/// Whether two states are known, and the same.
fn is_same(one: Option<f64>, other: Option<f64>) -> bool {
    one.zip(other).is_some_and(|(one, other)| same_state(one, other))
}

impl Rows {
    /// These, with their sums: of all contenders of a figure and a point in one state, or the numbers of a
    /// table could not be compared.
    pub(super) fn finish(mut rows: Vec<Row>) -> Self {
        for at in 0..rows.len() {
            let point = (rows[at].figure, rows[at].at());
            let race = rows.iter().filter(|row| (row.figure, row.at()) == point);
            let line = commonest(race.flat_map(Row::samples).filter_map(|(_, line)| line));
            rows[at].finish(line);
        }
        Self(rows)
    }

    /// The row of a contender at an MTU, or with messages of a size where the figure is over that.
    pub(crate) fn row(&self, name: &str, figure: Figure, at: u32) -> Option<&Row> {
        self.0
            .iter()
            .find(|row| row.contender.name == name && row.figure == figure && row.at() == at)
    }

    /// The MTUs that were measured in a figure, or sizes of messages, in order.
    pub(crate) fn points(&self, figure: Figure) -> Vec<u32> {
        let of = self.0.iter().filter(|row| row.figure == figure);
        let mut all: Vec<_> = of.map(Row::at).collect();
        all.sort_unstable();
        all.dedup();
        all
    }

    /// One's value by the other's, from the ratios within rounds: those in which both ran in one state, if
    /// there are enough.
    pub(crate) fn ratio(
        &self,
        (ours, theirs): (&str, &str),
        figure: Figure,
        at: u32,
        number: fn(&Measured) -> f64,
    ) -> Option<Speed> {
        let (ours, theirs) = (self.row(ours, figure, at)?, self.row(theirs, figure, at)?);
        let within = |round: usize| {
            let ((ours, here), (theirs, there)) = (ours.sample(round)?, theirs.sample(round)?);
            Some((number(&ours) / number(&theirs), is_same(here, there)))
        };
        let all: Vec<_> = (0..ours.rounds.len()).filter_map(within).collect();
        let known = all.iter().filter(|(_, same)| *same).count();
        let mixed = known < ENOUGH;
        let counts = all.into_iter().filter(|(_, same)| *same || mixed);
        let ratios: Vec<_> = counts.map(|(ratio, _)| ratio).collect();
        ratio_of(&ratios).map(|speed| Speed { mixed, ..speed })
    }
}

/// What ratios of rounds come to.
pub(super) fn ratio_of(ratios: &[f64]) -> Option<Speed> {
    let (speed, spread) = stats::median_and_quartiles(ratios)?;
    Some(Speed { speed, spread, rounds: ratios.len(), mixed: false })
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// A row with such values of unknown state, and some load.
    pub(in crate::qpip) fn row(name: &str, figure: Figure, values: &[Option<f64>]) -> Row {
        let contender = CONTENDERS.iter().find(|c| c.name == name).unwrap();
        let mut row = Row::new(*contender, figure, (1500, 16384));
        let load = [Load { program: 0.5, adapter: 0.25, sleeps: 7.0 }; 2];
        row.rounds = values
            .iter()
            .map(|value| value.map(|value| Measured { value, cycles: 0.0, load }))
            .collect();
        row.finish(None);
        row
    }

    #[test]
    fn ratios_are_of_rounds_in_which_both_ran() {
        let rows = Rows(vec![
            row(QPIP, Figure::Bulk, &[Some(100.0), None, Some(300.0)]),
            row(KERNEL, Figure::Bulk, &[Some(200.0), Some(1.0), Some(200.0)]),
        ]);
        let ratio = rows.ratio((QPIP, KERNEL), Figure::Bulk, 1500, |m| m.value).unwrap();
        assert_eq!((ratio.speed, ratio.spread, ratio.rounds), (1.0, [0.75, 1.25], 2));
        assert_eq!(rows.ratio((QPIP, KERNEL), Figure::RoundTripTcp, 1500, |m| m.value), None);
        assert_eq!(rows.points(Figure::Bulk), [1500]);
        assert_eq!(rows.0[0].median.load[1], Load { program: 0.5, adapter: 0.25, sleeps: 7.0 });
    }

    #[test]
    fn what_is_compared_was_measured_in_one_state() {
        let of = |name, values: [f64; 5], lines: [f64; 5]| {
            let mut row = row(name, Figure::Bulk, &values.map(Some));
            row.lines_ns = lines.map(Some).to_vec();
            row
        };
        let slow_apart =
            of(KERNEL, [100.0, 100.0, 100.0, 50.0, 50.0], [60.0, 70.0, 65.0, 300.0, 280.0]);
        let ours = of(QPIP, [200.0, 20.0, 240.0, 220.0, 100.0], [60.0, 290.0, 70.0, 60.0, 300.0]);
        let rows = Rows::finish(vec![slow_apart.clone(), ours.clone()]);
        // Ten samples: the commonest state is that of six lines of 60 to 70 ns.
        let row = rows.row(QPIP, Figure::Bulk, 1500).unwrap();
        assert_eq!((row.median.value, row.counted), (220.0, 3));
        let ratio = rows.ratio((QPIP, KERNEL), Figure::Bulk, 1500, |m| m.value).unwrap();
        assert_eq!((ratio.speed, ratio.rounds, ratio.mixed), (2.0, 3, false));

        // Too few in one state, or in a known one: all of them.
        let unknown = Row { lines_ns: vec![None; 5], ..ours };
        let rows = Rows::finish(vec![slow_apart, unknown]);
        let row = rows.row(QPIP, Figure::Bulk, 1500).unwrap();
        assert_eq!((row.median.value, row.counted), (200.0, 5));
        let ratio = rows.ratio((QPIP, KERNEL), Figure::Bulk, 1500, |m| m.value).unwrap();
        assert_eq!((ratio.speed, ratio.rounds, ratio.mixed), (2.0, 5, true));
    }

    #[test]
    fn contenders_have_names_of_their_own_and_a_tap_ends_in_the_kernel() {
        for (at, one) in CONTENDERS.iter().enumerate() {
            assert!(CONTENDERS[..at].iter().all(|other| other.name != one.name), "{one:?}");
            let sockets = one.ends.iter().filter(|end| end.is_socket()).count();
            assert!(one.link == Link::Veth || sockets == 1, "{one:?}");
        }
    }
}
