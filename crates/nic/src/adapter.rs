//! The adapter: all objects of one engine, and what its four state machines share.

mod config;

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::net::IpAddr;
use std::sync::Arc;

use quipu_inet::stack::TcpId;
use quipu_mem::{Regions, RegionsConfig, Withdrawn};

use crate::audit::Denied;
use crate::connect::Conn;
use crate::counters::AdapterCounters;
use crate::cq::{Cq, Pushed};
use crate::datagram::{Ah, DatagramDrops};
use crate::event::{Action, Event};
use crate::gids::Gids;
use crate::link::{LinkState, PeerMemory, Restless};
use crate::multicast::GroupMember;
use crate::number_table::NumberTable;
use crate::probe::{NoProbe, Probe};
use crate::qp::Qp;
use crate::qpip::Inet;
use crate::queue::RecvQueue;
use crate::raw::{self, Counters, MAX_TABLES, Rules, RxHash, Table, WorkQueue};
use crate::receive::express::Unsettled;
use crate::slab::Slab;
use crate::transmit::lanes::Lanes;
use crate::types::{
    AhId, AsyncEvent, ChannelId, Completion, ConnId, CountersId, CqId, LinkId, MrId, MwId, PdId,
    QpId, SrqId, TableId, Time, WcStatus, XrcdId,
};
use crate::unordered::Unordered;

pub use self::config::{Config, Crc, MAX_MESSAGE};

/// A protection domain.
#[derive(Default)]
pub(crate) struct Pd {
    /// Objects that belong to it.
    pub(crate) users: u32,
}

/// A registered region: what the handle stands for.
pub(crate) struct Mr {
    pub(crate) pd: PdId,
    pub(crate) key: quipu_mem::Key,
}

/// A memory window.
pub(crate) struct Mw {
    pub(crate) pd: PdId,
    pub(crate) key: quipu_mem::Key,
}

/// What makes a shared receive queue one of extended reliable connections (IBA A14).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct XrcSrq {
    pub(crate) domain: XrcdId,
    /// Where its receives complete.
    pub(crate) cq: CqId,
    /// The number by which peers name it, 24 bits.
    pub(crate) number: u32,
}

/// An XRC domain: queue pairs reach the shared receive queues of their domain only.
pub(crate) struct Xrcd {
    /// The protection domain of its queue pairs, in which no memory is.
    pub(crate) pd: PdId,
    /// Queue pairs and shared receive queues that belong to it.
    pub(crate) users: u32,
    /// The numbers of the protection domains of its shared receive queues, one for each queue.
    pub(crate) srq_pds: Vec<u32>,
}

/// A shared receive queue.
pub(crate) struct Srq {
    pub(crate) pd: PdId,
    pub(crate) xrc: Option<XrcSrq>,
    pub(crate) wq: Option<WorkQueue>,
    pub(crate) queue: RecvQueue,
    /// Raise an event when fewer than this many requests are left; 0: never. It fires once.
    pub(crate) limit: u32,
    pub(crate) users: u32,
    /// Queue pairs on channels whose peer waits for a receive to be posted here.
    pub(crate) awaited_by: VecDeque<QpId>,
    /// When receives that are held back are looked at.
    pub(crate) alarm: Option<Time>,
}

impl Srq {
    /// Whether the request taken last leaves fewer than the limit; if so, it was the limit's one event.
    #[inline]
    pub(crate) fn reaches_limit(&mut self) -> bool {
        let reached = self.queue.len() < self.limit;
        if reached {
            self.limit = 0;
        }
        reached
    }
}

/// A moment at which something must be looked at again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Alarm {
    Qp(QpId),
    Conn(ConnId),
    /// Completions that are to show up late.
    Late(CqId),
    Endings,
    Cq(CqId),
    /// Receives that are to be there late.
    Srq(SrqId),
    /// Writes that are held.
    Held(QpId),
    /// The port may have something for queue pairs that wait in their lanes.
    Lanes,
    /// A byte stream that ends.
    Stream(TcpId),
}

/// All that the processing of one queue pair touches in addition to the queue pair itself.
pub(crate) struct Hub<P> {
    pub(crate) config: Config,
    /// The addresses of the adapter.
    pub(crate) gids: Gids,
    pub(crate) counters: AdapterCounters,
    pub(crate) probe: P,
    pub(crate) now: Time,
    /// What a completion that was handed out has left to be done.
    pub(crate) unsettled: Option<Unsettled>,
    pub(crate) regions: Regions,
    pub(crate) pds: Slab<PdId, Pd>,
    pub(crate) mrs: Slab<MrId, Mr>,
    pub(crate) mws: Slab<MwId, Mw>,
    pub(crate) cqs: Slab<CqId, Cq>,
    pub(crate) srqs: Slab<SrqId, Srq>,
    pub(crate) ahs: Slab<AhId, Ah>,
    pub(crate) xrcds: Slab<XrcdId, Xrcd>,
    /// Shared receive queues that peers can name, by number; and the number given last.
    pub(crate) srq_numbers: BTreeMap<u32, SrqId>,
    pub(crate) last_srq_number: u32,
    pub(crate) conns: Slab<ConnId, Conn>,
    pub(crate) links: Slab<LinkId, LinkState>,
    pub(crate) numbers: NumberTable,
    pub(crate) events: VecDeque<Event>,
    pub(crate) actions: VecDeque<Action>,
    pub(crate) alarms: BTreeSet<(Time, Alarm)>,
    /// Streams with something to transmit, each once, in the order of service.
    pub(crate) ready: VecDeque<ConnId>,
    /// Queue pairs with datagrams to send, each once, in the order of service.
    pub(crate) datagrams_ready: VecDeque<QpId>,
    pub(crate) datagram_drops: DatagramDrops,
    /// Multicast groups with those attached to them; none is empty.
    pub(crate) groups: BTreeMap<IpAddr, Vec<GroupMember>>,
    /// Which frames go to which queue pairs.
    pub(crate) rules: Rules,
    /// Where they count what they match.
    pub(crate) flow_counters: Slab<CountersId, Counters>,
    /// Those that the frame in hand goes to.
    pub(crate) takers: Vec<QpId>,
    pub(crate) tables: Slab<TableId, Table>,
    /// How the queue pairs that receive by a table choose an entry.
    pub(crate) hashes: BTreeMap<QpId, RxHash>,
    /// Queue pairs on channels that are looked at by every `progress`.
    pub(crate) hot: Vec<QpId>,
    /// Bytes that were moved while requests were being posted, since the last `progress`.
    pub(crate) moved_at_once: u64,
    /// Queue pairs on channels of whose requests some may refer to memory by address.
    pub(crate) referring: Vec<QpId>,
    /// Connections of peers that are not yet known or not yet answered, the oldest first.
    pub(crate) half_open: VecDeque<ConnId>,
    /// Queue pairs whose other end, in this very adapter, has been given something.
    pub(crate) nudged: VecDeque<QpId>,
    /// Queue pairs whose other end, in this very adapter, is gone.
    pub(crate) orphans: Vec<QpId>,
    /// Queue pairs on streams that owe their peer an acknowledgement.
    pub(crate) ack_due: Vec<QpId>,
    /// The virtual lanes, if quality of service is configured.
    pub(crate) qos: Option<Box<Lanes>>,
    /// The inter-network stack, of an adapter that is attached to a network of IP.
    pub(crate) inet: Option<Box<Inet>>,
    /// Access to the own memory by address, for references between queue pairs of this adapter.
    pub(crate) own_memory: Option<Arc<dyn PeerMemory>>,
    /// Queue pairs whose end is postponed, since when, and when they are looked at next.
    pub(crate) endings: Vec<QpId>,
    pub(crate) endings_since: Time,
    /// The peers that they waited for then.
    pub(crate) endings_seen: Vec<Restless>,
    pub(crate) endings_alarm: Option<Time>,
    /// Memory taken back that same-host peers may still be in the middle of an access to.
    pub(crate) withdrawn: Vec<Withdrawn>,
    /// Queue pairs for which a message came and no receive, if somebody asked for them.
    pub(crate) starved: Option<Vec<QpId>>,
    /// What peers were refused by their keys, if somebody asked for it.
    pub(crate) denied: Option<RefCell<Vec<Denied>>>,
    /// How writes of peers are placed, and what is held of them, if not in order.
    pub(crate) unordered: Option<Box<Unordered>>,
    /// Scratch space for lists of addresses.
    pub(crate) scratch: Vec<(usize, usize)>,
    /// Scratch space for the segment of a byte stream.
    pub(crate) segment: Vec<u8>,
}

impl<P: Probe> Hub<P> {
    /// Adds a completion to a queue and raises what that raises; `false` if the queue overran.
    #[inline(always)]
    pub(crate) fn complete(&mut self, cq: CqId, completion: Completion, solicited: bool) -> bool {
        self.complete_with(cq, completion.status, solicited, || completion)
    }

    /// As [`complete`](Self::complete), with a completion of `status` that `make` makes where it is to be: to
    /// copy one that was made elsewhere just before has the processor wait.
    #[inline(always)]
    pub(crate) fn complete_with(
        &mut self,
        cq: CqId,
        status: WcStatus,
        solicited: bool,
        make: impl FnOnce() -> Completion,
    ) -> bool {
        let Some(queue) = self.cqs.get_mut(cq) else { return true };
        self.counters.count_completion(status);
        if queue.takes_plainly() {
            queue.add_plainly(make(), solicited);
            return true;
        }
        self.complete_watched(cq, make(), solicited)
    }

    /// As [`complete`](Self::complete), where more may come of it than that it is there.
    #[inline(never)]
    fn complete_watched(&mut self, cq: CqId, completion: Completion, solicited: bool) -> bool {
        let Some(queue) = self.cqs.get_mut(cq) else { return true };
        let first_overrun = !queue.overran();
        match queue.push(completion, solicited, self.now) {
            Pushed::Quietly => true,
            Pushed::Notify(channel, context) => {
                if let Some(at) = queue.alarm.take() {
                    self.alarms.remove(&(at, Alarm::Cq(cq)));
                }
                self.events.push_back(Event::Completion { channel, cq, context });
                true
            }
            Pushed::Held(period_ns) => {
                if queue.alarm.is_none() {
                    self.hold_back(cq, period_ns);
                }
                true
            }
            Pushed::Overrun => {
                if first_overrun {
                    self.raise(AsyncEvent::CqErr(cq));
                }
                false
            }
        }
    }

    /// Raises an asynchronous event.
    pub(crate) fn raise(&mut self, event: AsyncEvent) {
        self.events.push_back(Event::Async(event));
    }
}

impl<P> Hub<P> {
    /// Sets, moves or clears the alarm that `slot` stands for.
    pub(crate) fn set_alarm(&mut self, slot: &mut Option<Time>, alarm: Alarm, at: Option<Time>) {
        if *slot == at {
            return;
        }
        if let Some(old) = *slot {
            self.alarms.remove(&(old, alarm));
        }
        if let Some(new) = at {
            self.alarms.insert((new, alarm));
        }
        *slot = at;
    }
}

/// The earlier of two times that may not be set.
fn earliest(one: Option<Time>, other: Option<Time>) -> Option<Time> {
    one.into_iter().chain(other).min()
}

/// An RDMA adapter made of software: protection domains, regions, queues and queue pairs, served by the
/// four state machines of QPIP (doorbell, management, transmit, receive).
///
/// It contains no I/O, no clock and no thread: bytes, calls and the time go in; bytes, completions,
/// [`Event`]s, [`Action`]s and the next deadline come out. Call it in any order; after every call that may
/// have changed something, drain [`poll_action`](Self::poll_action) and [`poll_event`](Self::poll_event),
/// transmit for the streams that [`next_transmit`](Self::next_transmit) names, and look again by
/// [`poll_timeout`](Self::poll_timeout).
pub struct Adapter<P = NoProbe> {
    pub(crate) qps: Slab<QpId, Qp>,
    pub(crate) hub: Hub<P>,
}

impl Adapter<NoProbe> {
    /// An adapter with nothing in it.
    #[must_use]
    pub fn new(config: Config) -> Self {
        Self::with_probe(config, NoProbe)
    }
}

impl<P: Probe> Adapter<P> {
    /// An adapter that tells `probe` what it does.
    #[must_use]
    pub fn with_probe(config: Config, probe: P) -> Self {
        let max_entries = config.max_mr.saturating_mul(2);
        let regions = Regions::new(RegionsConfig { max_entries, seed: config.seed });
        let slots = |count: u32| count as usize;
        Self {
            qps: Slab::new(slots(config.max_qp)),
            hub: Hub {
                counters: AdapterCounters::default(),
                probe,
                now: Time::default(),
                unsettled: None,
                regions,
                pds: Slab::new(slots(config.max_pd)),
                mrs: Slab::new(slots(config.max_mr)),
                mws: Slab::new(slots(config.max_mr)),
                cqs: Slab::new(slots(config.max_cq)),
                srqs: Slab::new(slots(config.max_srq)),
                ahs: Slab::new(slots(config.max_ah.min(1 << 16))),
                xrcds: Slab::new(slots(config.max_xrcd)),
                srq_numbers: BTreeMap::new(),
                last_srq_number: 0,
                conns: Slab::new(slots(config.max_qp) + slots(config.max_half_open)),
                links: Slab::new(4096),
                numbers: NumberTable::new(),
                events: VecDeque::new(),
                actions: VecDeque::new(),
                alarms: BTreeSet::new(),
                ready: VecDeque::new(),
                datagrams_ready: VecDeque::new(),
                datagram_drops: DatagramDrops::default(),
                groups: BTreeMap::new(),
                rules: Rules::default(),
                flow_counters: raw::counters(),
                takers: Vec::new(),
                tables: Slab::new(MAX_TABLES),
                hashes: BTreeMap::new(),
                hot: Vec::new(),
                moved_at_once: 0,
                referring: Vec::new(),
                half_open: VecDeque::new(),
                nudged: VecDeque::new(),
                orphans: Vec::new(),
                ack_due: Vec::new(),
                qos: None,
                inet: None,
                own_memory: None,
                endings: Vec::new(),
                endings_since: Time(0),
                endings_seen: Vec::new(),
                endings_alarm: None,
                withdrawn: Vec::new(),
                starved: None,
                denied: None,
                unordered: None,
                scratch: Vec::new(),
                segment: Vec::new(),
                gids: Gids::of(config.gid),
                config,
            },
        }
    }

    /// Its sizes and identity.
    #[must_use]
    pub fn config(&self) -> &Config {
        &self.hub.config
    }

    /// Connections that it has, in the making, made, or not gone yet.
    #[must_use]
    pub fn connections(&self) -> usize {
        self.hub.conns.len()
    }

    /// The probe.
    pub fn probe_mut(&mut self) -> &mut P {
        &mut self.hub.probe
    }

    /// The next event for a program, if any.
    #[inline]
    pub fn poll_event(&mut self) -> Option<Event> {
        self.hub.events.pop_front()
    }

    /// Whether there is an event.
    #[inline]
    #[must_use]
    pub fn has_events(&self) -> bool {
        !self.hub.events.is_empty()
    }

    /// The next thing the world below must do, if any.
    #[inline]
    pub fn poll_action(&mut self) -> Option<Action> {
        self.hub.actions.pop_front()
    }

    /// Whether there are actions, bytes, datagrams or frames to transmit.
    #[inline]
    #[must_use]
    pub fn has_output(&self) -> bool {
        !self.hub.actions.is_empty()
            || !self.hub.ready.is_empty()
            || !self.hub.datagrams_ready.is_empty()
            || self.has_frames()
    }

    /// Whether there are bytes for streams to transmit, and nothing else.
    #[inline]
    #[must_use]
    pub fn wants_streams_only(&self) -> bool {
        !self.hub.ready.is_empty()
            && self.hub.actions.is_empty()
            && self.hub.datagrams_ready.is_empty()
            && !self.has_frames()
    }

    /// When [`handle_timeout`](Self::handle_timeout) must be called next. With frames to transmit: when
    /// they are transmitted.
    #[must_use]
    pub fn poll_timeout(&self) -> Option<Time> {
        let own = self.hub.alarms.first().map(|&(time, _)| time);
        match &self.hub.inet {
            None => own,
            Some(inet) => earliest(own, inet.stack.poll_timeout().map(Time)),
        }
    }

    /// Does what is due at `now`. Afterwards [`poll_timeout`](Self::poll_timeout) is later than `now`.
    pub fn handle_timeout(&mut self, now: Time) {
        self.hub.now = now;
        while let Some(&(time, alarm)) = self.hub.alarms.first() {
            if time > now {
                break;
            }
            self.hub.alarms.remove(&(time, alarm));
            match alarm {
                Alarm::Qp(id) => self.qp_alarm(id),
                Alarm::Conn(id) => self.conn_alarm(id),
                Alarm::Late(id) => self.hub.release_completions(id),
                Alarm::Endings => {
                    self.hub.endings_alarm = None;
                    self.finish_endings();
                }
                Alarm::Cq(id) => self.hub.period_over(id),
                Alarm::Srq(id) => self.open_shared(id),
                Alarm::Held(id) => self.held_alarm(id),
                Alarm::Lanes => self.lanes_alarm(),
                Alarm::Stream(connection) => self.stream_alarm(connection),
            }
        }
        if let Some(inet) = &mut self.hub.inet {
            inet.stack.handle_timeout(now.0);
            self.take_inet_events();
        }
    }

    /// A queue pair and the hub.
    pub(crate) fn qp_and_hub(&mut self, id: QpId) -> Option<(&mut Qp, &mut Hub<P>)> {
        self.qps.get_mut(id).map(|qp| (qp, &mut self.hub))
    }

    /// How many channels a completion would go through; see [`ChannelId`].
    #[must_use]
    pub fn channel_of(&self, cq: CqId) -> Option<ChannelId> {
        self.hub.cqs.get(cq).and_then(Cq::channel)
    }
}
