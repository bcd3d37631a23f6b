//! What is behind the engine's lock: the adapter and everything that moves bytes for it.

mod sleep;

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use quipu_cabi::Hold;
use quipu_nic::{Event, QpNum, Restless, Time};

use super::events::{CompletionEvent, Events};
use super::faults::Faults;
use super::qpip::TcpEvent;
use super::strict::Strict;
use super::turn::LastLook;
use super::wait::Sleepers;
use crate::clock::Clock;
use crate::cm::Manager;
use crate::counters::{Calls, Publisher};
use crate::datagram::Datagrams;
use crate::link::Links;
use crate::net::Net;
use crate::net::token::Token;
use crate::own::OwnAddresses;
use crate::port::Port;
use crate::qpip::Qpip;
use crate::share::Attached;
use crate::sys::{Epoll, EventFd, ReadyList};
use crate::tap::Adapter;

/// Rounds of actions, bytes and events that one call goes through before it returns.
const ROUNDS: usize = 64;
/// TCP ports that are tried until one is found whose UDP side is free.
const PORT_TRIES: usize = 32;

/// What the helper thread is doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum HelperMode {
    /// It has not been started.
    Absent,
    /// It sleeps for a moment: somebody else makes progress, or will be noticed not to.
    Dozing,
    /// It waits for descriptors, and whoever wants progress must make it one of them.
    Armed,
    /// It sleeps until it is called: a thread of the program waits for descriptors.
    Resting,
}

/// Everything that needs the lock.
pub(crate) struct Core {
    pub(crate) adapter: Adapter,
    pub(crate) net: Net,
    pub(crate) datagrams: Datagrams,
    pub(crate) links: Links,
    /// `None` without a link for QPIP.
    pub(crate) qpip: Option<Box<Qpip>>,
    /// `None` unless queue pairs are those of an adapter that another process shares.
    pub(crate) attached: Option<Box<Attached>>,
    pub(crate) events: Events,
    /// `None` until a program manages connections.
    pub(crate) cm: Option<Box<Manager>>,
    /// `None` where nobody may read them.
    publisher: Option<Box<Publisher>>,
    pub(super) calls: Calls,
    /// `None` where nobody tells of changes.
    pub(super) port: Option<Port>,
    /// The addresses of the engine.
    pub(super) own: Arc<OwnAddresses>,
    pub(crate) helper: HelperMode,
    /// A thread of the program waits for descriptors on behalf of all.
    pub(crate) driver: bool,
    /// How often a thread of the program has begun to do so.
    pub(crate) drives: u64,
    pub(super) sleepers: Sleepers,
    /// When whoever waits for descriptors will wake by itself; `None` while nobody waits.
    pub(crate) wakes_at: Option<Time>,
    /// How often a thread of the program has polled since then.
    pub(super) polls_beside_waiter: u32,
    /// What fails on purpose; `None` without a plan.
    pub(crate) faults: Option<Box<Faults>>,
    /// What the strict mode knows of the program; `None` without it.
    pub(crate) strict: Option<Box<Strict>>,
    /// Whether there is either of them, so that posts and polls are looked at.
    pub(crate) watched: bool,
    pub(super) clock: Clock,
    epoll: Arc<Epoll>,
    bell: Arc<EventFd>,
    /// Taken out while it is being worked off.
    ready: Option<Box<ReadyList>>,
    /// Polls in a row that found nothing.
    pub(super) empty_polls: u32,
    /// Polls that found completions at once.
    pub(super) hits: u32,
    pub(super) polls_since_look: u32,
    /// When epoll was asked last, in nanoseconds. The helper reads it without the lock.
    pub(super) looked_at: Arc<AtomicU64>,
    /// The set of epoll is none any more: the program has closed the descriptors of the engine.
    pub(super) blind: bool,
    pub(super) polls_since_reading: u32,
    /// Rounds in a row that found something, since acknowledgements were released last.
    pub(super) busy_rounds: u32,
    pub(super) last_look: LastLook,
    /// So many polls more need not ask whether memory that is shared with peers is all there is to look at:
    /// 0 as soon as anything is done that the answer depends on.
    pub(super) calm: u32,
}

/// What a core is made of.
pub(crate) struct Parts {
    pub(crate) adapter: Adapter,
    pub(crate) net: Net,
    pub(crate) datagrams: Datagrams,
    pub(crate) links: Links,
    pub(crate) qpip: Option<Box<Qpip>>,
    pub(crate) attached: Option<Box<Attached>>,
    pub(crate) port: Option<Port>,
    pub(crate) publisher: Option<Box<Publisher>>,
    pub(crate) own: Arc<OwnAddresses>,
    pub(crate) epoll: Arc<Epoll>,
    pub(crate) bell: Arc<EventFd>,
}

impl Core {
    /// A core with nothing going on.
    pub(crate) fn new(parts: Parts) -> Self {
        let mut core = Self {
            adapter: parts.adapter,
            net: parts.net,
            datagrams: parts.datagrams,
            links: parts.links,
            qpip: parts.qpip,
            attached: parts.attached,
            events: Events::new(),
            cm: None,
            publisher: parts.publisher,
            calls: Calls::default(),
            port: parts.port,
            own: parts.own,
            helper: HelperMode::Absent,
            driver: false,
            drives: 0,
            sleepers: Sleepers::default(),
            wakes_at: None,
            polls_beside_waiter: 0,
            faults: None,
            strict: None,
            watched: false,
            clock: Clock::new(),
            epoll: parts.epoll,
            bell: parts.bell,
            ready: None,
            empty_polls: 0,
            hits: 0,
            polls_since_look: 0,
            looked_at: Arc::default(),
            blind: false,
            polls_since_reading: 0,
            busy_rounds: 0,
            last_look: LastLook::default(),
            calm: 0,
        };
        // That it is there is worth knowing, though it may do nothing for long.
        let now = core.clock.now();
        core.publish(now);
        core
    }

    /// The time now.
    #[inline]
    pub(crate) fn now(&mut self) -> Time {
        self.clock.now()
    }

    /// The time of the last reading.
    #[inline]
    pub(crate) fn recent(&self) -> Time {
        self.clock.recent()
    }

    /// Takes frames from the link of QPIP, if there is one that was busy lately.
    #[inline]
    pub(super) fn poll_packets(&mut self, now: Time) -> bool {
        match &mut self.qpip {
            None => false,
            Some(qpip) => qpip.poll_hot(&mut self.adapter, now),
        }
    }

    /// Asks epoll, without waiting.
    pub(super) fn look(&mut self, now: Time) -> bool {
        self.polls_since_look = 0;
        self.looked_at.store(now.0, Ordering::Relaxed);
        self.calls.looks += 1;
        let mut ready = self.ready.take().unwrap_or_else(|| Box::new(ReadyList::new()));
        self.blind |= self.epoll.wait(&mut ready, Some(Duration::ZERO)).is_err();
        self.net.note_look();
        let any = self.dispatch(now, &ready);
        self.ready = Some(ready);
        any
    }

    /// Makes the progress that can be made without waiting. True if there was any, so that there
    /// may be more.
    pub(crate) fn run(&mut self) -> bool {
        self.run_and(Self::look)
    }

    /// As [`run`](Self::run) before a wait for descriptors, which finds what they have to say. Where a shared
    /// adapter does the work they seldom say anything but that it rings.
    pub(crate) fn run_before_wait(&mut self) -> bool {
        if self.attached.is_none() { self.run() } else { self.run_and(|_, _| false) }
    }

    fn run_and(&mut self, look: impl FnOnce(&mut Self, Time) -> bool) -> bool {
        let now = self.clock.now();
        let memory = self.adapter.progress(now);
        let mut any = memory | self.net.poll_hot(&mut self.adapter, now, false);
        any |= self.datagrams.poll_hot(&mut self.adapter, now, memory);
        any |= self.poll_packets(now);
        any |= self.poll_attached(now);
        any |= look(self, now);
        self.calls.rounds += u64::from(any);
        self.run_timers(now);
        self.release_acks(any);
        self.settle(now);
        any
    }

    /// Handles what epoll found.
    pub(crate) fn dispatch(&mut self, now: Time, ready: &ReadyList) -> bool {
        let mut any = false;
        for item in ready.iter() {
            let adapter = &mut self.adapter;
            match Token::from_bits(item.token) {
                // Anyone who waits may not have woken yet, and would go on sleeping: the kernel looks again
                // at what woke it.
                Some(Token::Bell) if self.wakes_at.is_some() => {}
                Some(Token::Bell) => self.bell.clear(),
                Some(Token::Listener(index)) => any |= self.net.accept(adapter, now, index),
                Some(Token::Stream(slot)) => {
                    any |= self.net.stream_ready(adapter, now, slot, item.events);
                }
                Some(Token::LinkListener(index)) => self.links.accept(now, index),
                Some(Token::Link(slot)) => {
                    any |= self.links.ready(adapter, now, slot, item.events);
                }
                Some(Token::LinkProcess(slot)) => {
                    any = true;
                    self.links.process_ended(adapter, now, slot);
                }
                Some(Token::Datagrams(index)) => {
                    any |= self.datagrams.ready(adapter, now, index, item.events);
                }
                Some(Token::Packets) => {
                    if let Some(qpip) = &mut self.qpip {
                        any |= qpip.ready(adapter, now, item.events);
                    }
                }
                Some(Token::Attached) => {
                    any |= self.attached_ready(now);
                    // It rings once. Anyone who waits for it has not heard it, if somebody else has.
                    if self.wakes_at.is_some() && !self.arm_attached() {
                        self.bell.set();
                    }
                }
                Some(Token::Port) => self.hear_port(),
                Some(Token::CmSocket(slot)) => {
                    any |= self.cm.as_mut().is_some_and(|cm| cm.socket_ready(now.0, slot));
                }
                Some(Token::CmStream(slot)) => {
                    any |= self.cm.as_mut().is_some_and(|cm| cm.stream_ready(now.0, slot));
                }
                None => {}
            }
        }
        any
    }

    /// Carries out what the adapter asks for, transmits everything, and queues events.
    #[inline]
    pub(crate) fn settle(&mut self, now: Time) {
        if self.has_work() || self.net.holds_bytes() {
            self.work(now, Net::transmit);
        }
        self.finish_call();
    }

    /// As [`settle`](Self::settle), for posts: bytes that had better wait for more of their kind do.
    #[inline]
    pub(crate) fn settle_posts(&mut self, now: Time) {
        if self.has_work() {
            self.work(now, Net::transmit_urgent);
        }
        self.finish_call();
    }

    /// As [`settle_posts`](Self::settle_posts), where a peer on this host was told of what was posted,
    /// or need not be.
    #[inline(always)]
    pub(crate) fn settle_rung(&mut self) {
        if self.adapter.has_output() || self.adapter.has_events() || self.wakes_at.is_some() {
            return self.settle_posts(self.clock.recent());
        }
        self.adapter.probe_mut().flush();
    }

    /// Whether there is anything to carry out, or for the streams of a plain queue pair, or to transmit.
    #[inline]
    pub(super) fn has_work(&self) -> bool {
        self.adapter.has_output()
            || self.links.has_given_up()
            || self.cm.as_ref().is_some_and(|cm| cm.has_output())
            || self.is_owed_arming()
    }

    /// Whether bytes for streams are all that is to be done, as after most posts: to send them is no
    /// cancellation point, and what ends a stream has a [`Hold`] of its own.
    #[inline]
    fn is_stream_alone(&self) -> bool {
        self.qpip.is_none() && self.adapter.wants_streams_only()
    }

    /// Does all that is to be done, and what comes of it, with `transmit` for the streams.
    pub(super) fn work(&mut self, now: Time, transmit: fn(&mut Net, &mut Adapter, Time) -> bool) {
        self.calm = 0;
        self.adapter.settle_taken();
        if self.is_stream_alone() {
            transmit(&mut self.net, &mut self.adapter, now);
            if !self.has_work() && !self.net.wants_turn() {
                return;
            }
        }
        let _hold = Hold::new();
        for _ in 0..ROUNDS {
            let acted = self.act(now);
            let mut sent = transmit(&mut self.net, &mut self.adapter, now)
                | self.datagrams.transmit(&mut self.adapter, now);
            if let Some(qpip) = &mut self.qpip {
                sent |= qpip.transmit(&mut self.adapter, now);
            }
            let more = self.has_work() || self.net.wants_turn();
            if !more || (!acted && !sent && !self.stay_armed(now)) {
                break;
            }
        }
    }

    /// What every call ends with: events are where programs find them, and whoever waits knows.
    #[inline]
    pub(super) fn finish_call(&mut self) {
        if let Some(attached) = &mut self.attached {
            attached.ring();
        }
        if self.is_lost() && !self.events.are_over() {
            self.lose();
        }
        self.collect_events();
        self.adapter.probe_mut().flush();
        self.call_waiter();
    }

    /// Whether channels must ring again, for somebody who waits for descriptors.
    #[inline]
    pub(crate) fn is_owed_arming(&self) -> bool {
        self.wakes_at.is_some() && self.adapter.hot_channels() > 0
    }

    /// While somebody waits for descriptors, every channel must ring. Any thread that makes progress
    /// has woken some, and arms them again. True if that found something to do.
    fn stay_armed(&mut self, now: Time) -> bool {
        if !self.is_owed_arming() {
            return false;
        }
        if !self.adapter.arm() {
            self.adapter.progress(now);
        }
        true
    }

    /// A number for a new datagram queue pair. It is of a port that is ours for TCP as well as for UDP, so
    /// that no other engine at this address has the same number for a queue pair of any kind.
    pub(crate) fn take_datagram_number(&mut self) -> io::Result<QpNum> {
        if self.datagrams.wants_port() {
            let mut opened = Err(io::ErrorKind::AddrInUse.into());
            for _ in 0..PORT_TRIES {
                let port = self.net.open_listener()?;
                opened = self.datagrams.open(port);
                if opened.is_ok() {
                    break;
                }
                self.net.close_last_listener();
            }
            if let Err(error) = opened {
                // Numbers that were used lately are better than none.
                tracing::warn!(%error, "cannot open a UDP port");
            }
        }
        self.datagrams.take_number().ok_or(io::ErrorKind::AddrInUse.into())
    }

    /// Gives back the number of a queue pair that is gone.
    pub(crate) fn give_back_number(&mut self, number: QpNum) {
        let given = self.datagrams.give_back_number(number)
            || self.qpip.as_mut().is_some_and(|qpip| qpip.give_back_number(number));
        if !given {
            self.net.give_back_number(number);
        }
    }

    /// Does what a poll that has handed out a completion left to be done.
    #[inline]
    pub(super) fn settle_taken(&mut self) {
        if self.adapter.has_taken() {
            self.adapter.settle_taken();
            self.collect_events();
        }
    }

    /// Queues the adapter's events where programs find them.
    #[inline]
    pub(crate) fn collect_events(&mut self) {
        if self.adapter.has_events() {
            self.hand_out_events();
            self.carry_out_orders();
        }
    }

    pub(super) fn hand_out_events(&mut self) {
        while let Some(event) = self.adapter.poll_event() {
            match event {
                Event::Async(event) => self.events.asynchronous(event),
                Event::Completion { channel, cq, context } => {
                    self.events.completion(channel, CompletionEvent { cq, context });
                }
                Event::Tcp { qp, change } => {
                    let now = self.clock.recent().0;
                    if let Some(cm) = &mut self.cm {
                        cm.tcp_changed(now, qp, change);
                    }
                    self.events.tcp(TcpEvent { qp, change });
                }
                Event::TcpRequest { listener, connection, flow } => {
                    self.handle_request(listener, connection, flow);
                }
                Event::TcpStream { connection, change } => {
                    self.stream_changed_on_link(connection, change);
                }
                Event::Stream { qp, change, .. } => {
                    let now = self.clock.recent().0;
                    if let Some(cm) = &mut self.cm {
                        cm.stream_changed(now, qp, change);
                    }
                }
            }
        }
    }

    /// When something must be done though no descriptor says so.
    #[inline]
    pub(crate) fn deadline(&self) -> Option<Time> {
        let cm = self.cm.as_ref().and_then(|cm| cm.poll_timeout()).map(Time);
        let (net, links) = (self.net.poll_timeout(), self.links.poll_timeout());
        let qpip = self.qpip.as_ref().and_then(|qpip| qpip.poll_timeout());
        let faults = self.faults.as_ref().and_then(|faults| faults.poll_timeout());
        earliest([self.adapter.poll_timeout(), net, links, qpip, cm, faults])
    }

    /// Ends the links to peers that are still in the middle of the access, to memory that was withdrawn, in
    /// which they were seen.
    pub(crate) fn cut_restless(&mut self, seen: &[Restless]) {
        let now = self.clock.now();
        for link in self.adapter.still_restless(seen) {
            self.links.cut(&mut self.adapter, now, link);
        }
        self.settle(now);
    }

    /// Ends everything as far as that is possible at once: the process or the engine ends.
    pub(crate) fn shut_down(&mut self) {
        let now = self.clock.now();
        if let Some(faults) = &mut self.faults {
            faults.sum_up();
        }
        self.adapter.progress(now);
        for conn in self.adapter.receiving_streams() {
            self.net.take_arrived(&mut self.adapter, now, conn);
        }
        self.adapter.place_held();
        self.adapter.release_acks();
        self.settle(now);
        self.drain_lanes();
        self.linger_on_link();
        let now = self.clock.now();
        self.adapter.abort_connections(now);
        self.settle(now);
        self.links.shut_down();
        self.net.shut_down(&mut self.adapter, now);
        if let Some(cm) = &mut self.cm {
            cm.shut_down();
        }
        self.adapter.probe_mut().finish();
        self.publisher = None;
    }

    /// When others must see what is new; `None` if nothing is.
    #[inline]
    fn news_due(&self) -> Option<Time> {
        self.publisher.as_ref().and_then(|publisher| publisher.due(&self.adapter, &self.calls))
    }

    /// Lets others see what was done so far, if it is time to.
    #[inline]
    pub(super) fn publish(&mut self, now: Time) {
        if let Some(publisher) = &mut self.publisher {
            (self.calls.sends, self.calls.receives) = self.net.calls();
            if let (Some(qpip), true) = (&mut self.qpip, publisher.is_due(now)) {
                self.calls.lost = qpip.lost();
            }
            publisher.publish(now, &self.adapter, &self.calls);
        }
    }

    /// Lets others see all that was done so far.
    pub(super) fn publish_now(&mut self) {
        let now = self.now();
        if let Some(publisher) = &mut self.publisher {
            (self.calls.sends, self.calls.receives) = self.net.calls();
            self.calls.lost = self.qpip.as_mut().map_or(0, |qpip| qpip.lost());
            publisher.publish_now(now, &self.adapter, &self.calls);
        }
    }
}

/// The first of what is due. What is not due counts as due at the end of time: of two `Option`s, a compiler
/// may compare the times before it looks whether they are there, and Valgrind reports that.
#[inline]
fn earliest<const N: usize>(due: [Option<Time>; N]) -> Option<Time> {
    let never = Time(u64::MAX);
    let first = due.into_iter().map(|time| time.unwrap_or(never)).fold(never, Time::min);
    (first < never).then_some(first)
}
