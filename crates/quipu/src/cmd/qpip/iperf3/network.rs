//! Connections that one thread serves: control connections, whose octets are kept until they are read, and
//! streams, whose octets are counted.

use std::collections::{HashMap, VecDeque};
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use quipu::qpip::{
    Adapter, Event, KeepAlive, Mode, TcpChange, TcpListener, TcpQueuePair, TcpSettings,
};
use quipu::{
    Access, Completion, CompletionQueue, Error, MemoryRegion, ProtectionDomain, QpNum, Request,
    WcStatus,
};

use super::datagrams::Port;
use super::words::{COOKIE, Counts, MAX_STREAMS, MAX_TEXT, State};
use crate::cmd::failure::Failure;
use crate::cmd::qpip::places::Places;
use crate::cmd::qpip::{self, failed};

/// Receives of a connection of which it is not known yet whether it is a stream, and their length.
const PLACES: u64 = 4;
const PLACE: usize = 16 << 10;
/// Receives of a stream, and their length: the window. Each segment that is pushed ends one, however much of
/// it is left: so they are short beside what a kernel gives to its card at once.
const SINKS: u64 = 256;
const SINK: usize = 16 << 10;
/// Sends under way at once on a connection, and how many octets.
const SENDS: u64 = 64;
const UNDER_WAY: u64 = 4 << 20;
/// Numbers of requests that are not those of a place.
const IS_SINK: u64 = 1 << 32;
const IS_WORD: u64 = 2 << 32;
const IS_BLOCK: u64 = 3 << 32;
/// Connections beside those of a test.
const STRANGERS: usize = 16;
/// Queue pairs that wait for connections.
const IDLE: usize = 4;
/// How long an end may think.
pub(super) const PATIENCE: Duration = Duration::from_secs(30);

/// What is the same for all.
pub(super) fn settings() -> TcpSettings {
    // A test over UDP leaves its control connection idle: a peer that is gone would be sent to for ever.
    let keep_alive = Some(KeepAlive { idle: 10_000_000_000, interval: 2_000_000_000, probes: 5 });
    TcpSettings { mode: Mode::Stream, keep_alive, ..TcpSettings::default() }
}

/// A queue pair and what it is doing.
pub(super) struct Connection {
    qp: TcpQueuePair,
    places: Places,
    /// What has come and was not read yet.
    inbox: Vec<u8>,
    /// Where what is only counted goes: all of it to the same place, as nobody looks at it.
    sink: Option<Places>,
    /// What is sent, again and again.
    block: Option<Places>,
    /// Words that are being sent, so that they stay.
    words: VecDeque<MemoryRegion>,
    /// Blocks under way, in octets; as many as were given, and have been acknowledged.
    under_way: VecDeque<u64>,
    pub(super) posted: u64,
    acknowledged: u64,
    /// Octets that have come to a stream.
    received: u64,
    /// Segments that were sent again, as far as was asked.
    retransmits: u64,
    /// Its place among all connections; none while nobody has connected.
    order: Option<u64>,
    /// It belongs to the test.
    claimed: bool,
    peer_closed: bool,
    over: Option<TcpChange>,
}

/// All of them.
pub(super) struct Network {
    adapter: Adapter,
    pub(super) pd: ProtectionDomain,
    pub(super) cq: CompletionQueue,
    listener: Option<TcpListener>,
    connections: HashMap<QpNum, Connection>,
    /// Those of a test of datagrams.
    pub(super) ports: HashMap<QpNum, Port>,
    /// How many of them the adapter has room for, as far as is known.
    most: usize,
    events: Vec<Event>,
    /// Connections so far.
    count: u64,
    /// The cookie of the test that is under way.
    pub(super) cookie: Option<Vec<u8>>,
    /// Set by a signal.
    stop: Arc<AtomicBool>,
    /// Sleep while nothing happens.
    pub(super) wait: bool,
}

impl Network {
    pub(super) fn new(adapter: &Adapter, stop: Arc<AtomicBool>) -> Result<Self, Failure> {
        let most = 2 * MAX_STREAMS as usize + STRANGERS + IDLE;
        let entries = most as u64 * (SINKS + PLACES + SENDS) + 1;
        Ok(Self {
            pd: adapter.protection_domain().map_err(failed)?,
            cq: adapter.completion_queue(entries as u32).map_err(failed)?,
            adapter: adapter.clone(),
            listener: None,
            connections: HashMap::new(),
            ports: HashMap::new(),
            most,
            events: Vec::new(),
            count: 0,
            cookie: None,
            stop,
            wait: true,
        })
    }

    /// A queue pair that is never connected: when its receive is flushed, whoever waits looks up.
    pub(super) fn bell(&self) -> Result<TcpQueuePair, Error> {
        let qp = self.pd.queue_pair(&self.cq, &self.cq).build_tcp()?;
        qp.post_recv(0, &[])?;
        Ok(qp)
    }

    /// Takes connections from now on; the port, which was chosen if that is 0.
    pub(super) fn listen(&mut self, port: u16) -> Result<u16, Failure> {
        let listener = self.adapter.listen(port, &settings(), 128).map_err(|error| {
            let what = format!("cannot listen on port {port}");
            Failure::new(what, error, "choose another port with --port")
        })?;
        let port = listener.port();
        self.listener = Some(listener);
        self.replenish().map_err(failed)?;
        Ok(port)
    }

    /// An idle queue pair.
    pub(super) fn add(&mut self) -> Result<QpNum, Error> {
        let queues = self.pd.queue_pair(&self.cq, &self.cq);
        let queues = queues.send_queue(SENDS as u32, 1).recv_queue((SINKS + PLACES) as u32, 1);
        let qp = queues.build_tcp()?;
        let places = Places::new(&self.pd, PLACES as usize, PLACE)?;
        let connection = Connection {
            qp,
            places,
            inbox: Vec::new(),
            sink: None,
            block: None,
            words: VecDeque::new(),
            under_way: VecDeque::new(),
            posted: 0,
            acknowledged: 0,
            received: 0,
            retransmits: 0,
            order: None,
            claimed: false,
            peer_closed: false,
            over: None,
        };
        for place in 0..PLACES {
            connection.qp.post_recv(place, &connection.places.room(place)?)?;
        }
        let number = connection.qp.number();
        self.connections.insert(number, connection);
        Ok(number)
    }

    /// One that is connected. A signal ends the wait, as any other.
    pub(super) fn connect(&mut self, to: SocketAddr) -> Result<QpNum, Failure> {
        let number = self.add().map_err(failed)?;
        let connection = self.get(number);
        connection.claimed = true;
        let begun = connection.qp.start_connect(to, None, &settings());
        begun.map_err(|error| qpip::unreachable(to, &error))?;
        let (mut until, mut said) = (Instant::now() + qpip::PATIENCE, false);
        while self.get(number).order.is_none() && self.get(number).over.is_none() {
            if Instant::now() >= until {
                if !std::mem::replace(&mut said, true) {
                    qpip::say_waiting(to);
                }
                until = Instant::now() + PATIENCE;
            }
            self.turn(Some(until))?;
        }
        let ended = self.get(number).qp.wait_connected();
        ended.map_err(|error| qpip::unreachable(to, &error))?;
        Ok(number)
    }

    /// One that is there: whoever has its number has claimed it, and it goes when that one lets it go.
    pub(super) fn get(&mut self, number: QpNum) -> &mut Connection {
        self.connections.get_mut(&number).expect("a connection that is claimed stays")
    }

    /// Offers as many queue pairs as there are to be.
    fn replenish(&mut self) -> Result<(), Error> {
        if self.listener.is_none() {
            return Ok(());
        }
        let idle = self.connections.values().filter(|it| it.order.is_none() && !it.claimed).count();
        for _ in idle..IDLE {
            if self.connections.len() >= self.most {
                break;
            }
            let number = match self.add() {
                Ok(number) => number,
                // The adapter has no more for a program: then fewer are offered.
                Err(_) if !self.connections.is_empty() => {
                    self.most = self.connections.len();
                    break;
                }
                Err(error) => return Err(error),
            };
            if let (Some(listener), Some(it)) = (&self.listener, self.connections.get(&number)) {
                listener.offer(&it.qp)?;
            }
        }
        let strangers = self.connections.values().filter(|it| it.order.is_some() && !it.claimed);
        if strangers.clone().count() > STRANGERS + MAX_STREAMS as usize
            && let Some(oldest) = strangers.min_by_key(|it| it.order)
        {
            // Its end is an event.
            let _ = oldest.qp.abort();
        }
        Ok(())
    }

    /// Takes what has completed and happened; if nothing has, waits for it, until then at most.
    pub(super) fn turn(&mut self, until: Option<Instant>) -> Result<(), Failure> {
        if self.stop.load(Ordering::Acquire) {
            return Err(Failure::new("the test", "ended by a signal", ""));
        }
        while let Some(event) = self.adapter.poll_event().map_err(failed)? {
            self.events.push(event);
        }
        // What a peer sent before it closed completes before the event that says so.
        let mut any = !self.events.is_empty();
        let mut out = [Completion::default(); 64];
        loop {
            let found = self.cq.poll(&mut out).map_err(failed)?;
            for completion in &out[..found] {
                if let Some(connection) = self.connections.get_mut(&completion.qp_num) {
                    connection.completed(completion).map_err(failed)?;
                } else if let Some(port) = self.ports.get_mut(&completion.qp_num) {
                    port.completed(completion).map_err(failed)?;
                }
            }
            any |= found > 0;
            if found < out.len() {
                break;
            }
        }
        for event in std::mem::take(&mut self.events) {
            self.happened(event);
        }
        if any {
            self.deny();
            return self.replenish().map_err(failed);
        }
        match until {
            None => self.adapter.wait(&self.cq).map_err(failed),
            Some(until) if self.wait => {
                let left = until.saturating_duration_since(Instant::now());
                self.adapter.wait_timeout(&self.cq, left).map_err(failed)
            }
            Some(_) => Ok(()),
        }
    }

    fn happened(&mut self, event: Event) {
        let Some(connection) = self.connections.get_mut(&event.qp_num) else { return };
        match event.change {
            TcpChange::Connected => {
                self.count += 1;
                connection.order = Some(self.count);
            }
            TcpChange::PeerClosed => {
                connection.peer_closed = true;
                if !connection.claimed {
                    let _ = connection.qp.close();
                }
            }
            change => {
                connection.over = Some(change);
                if !connection.claimed {
                    self.connections.remove(&event.qp_num);
                }
            }
        }
    }

    /// Sends away whoever comes while there is a test that is not theirs.
    fn deny(&mut self) {
        let Some(cookie) = &self.cookie else { return };
        for connection in self.connections.values_mut().filter(|it| !it.claimed) {
            if connection.inbox.len() >= COOKIE && connection.inbox[..COOKIE] != cookie[..] {
                connection.inbox.clear();
                // It may be gone.
                let _ = connection.say(&self.pd, &[State::AccessDenied.octet()]);
                let _ = connection.qp.close();
            }
        }
    }

    /// Those who have said who they are, and of whom nobody has heard yet, in the order in which they came:
    /// the event that says so may come after the words.
    pub(super) fn comers(&self) -> Vec<QpNum> {
        let said = |it: &&Connection| {
            !it.claimed && it.over.is_none() && it.order.is_some() && it.inbox.len() >= COOKIE
        };
        let mut comers: Vec<_> = self.connections.values().filter(said).collect();
        comers.sort_by_key(|it| it.order);
        comers.iter().map(|it| it.qp.number()).collect()
    }

    /// Makes a connection the test's; the cookie that it has said.
    pub(super) fn claim(&mut self, number: QpNum) -> Vec<u8> {
        let connection = self.get(number);
        connection.claimed = true;
        connection.inbox.drain(..COOKIE).collect()
    }

    /// From now on only counts what comes.
    pub(super) fn count_only(&mut self, number: QpNum) -> Result<(), Failure> {
        let sink = Places::new(&self.pd, 1, SINK).map_err(failed)?;
        let connection = self.get(number);
        connection.received = connection.inbox.len() as u64;
        connection.inbox.clear();
        for _ in 0..SINKS {
            // How it has ended, if it has, is seen later.
            let _ = connection.qp.post_recv(IS_SINK, &sink.room(0).map_err(failed)?);
        }
        connection.sink = Some(sink);
        Ok(())
    }

    /// From now on has blocks of so many octets to send.
    pub(super) fn give_block(&mut self, number: QpNum, len: u64) -> Result<(), Failure> {
        let block = Places::new(&self.pd, 1, len as usize).map_err(failed)?;
        let octets: Vec<u8> = (0..len).map(|at| (at.wrapping_mul(at) >> 7) as u8).collect();
        block.fill(0, &octets).map_err(failed)?;
        self.get(number).block = Some(block);
        Ok(())
    }

    /// Waits until a connection has brought so many octets, and takes them.
    pub(super) fn hear(&mut self, number: QpNum, len: usize) -> Result<Vec<u8>, Failure> {
        let until = Instant::now() + PATIENCE;
        loop {
            let connection = self.get(number);
            if connection.inbox.len() >= len {
                return Ok(connection.inbox.drain(..len).collect());
            }
            if connection.is_gone() {
                return Err(Failure::new("the test", "the peer ended the connection", ""));
            }
            if Instant::now() > until {
                return Err(Failure::new("the test", "the peer does not answer", ""));
            }
            self.turn(Some(until))?;
        }
    }

    /// Waits for a state.
    pub(super) fn hear_state(&mut self, number: QpNum) -> Result<State, Failure> {
        let octet = self.hear(number, 1)?[0];
        let wrong = || {
            let why = format!("the peer sent the unknown state {octet}");
            Failure::new("the test", why, "is that iperf3?")
        };
        State::of(octet).ok_or_else(wrong)
    }

    /// Waits for a text of JSON, and reads it.
    pub(super) fn hear_text(&mut self, number: QpNum) -> Result<Vec<u8>, Failure> {
        let len = self.hear(number, 4)?;
        let len = len.iter().fold(0, |len, &octet| len << 8 | usize::from(octet));
        if len > MAX_TEXT {
            let why = format!("the peer announces {len} bytes of text, which is too long");
            return Err(Failure::new("the test", why, "is that iperf3?"));
        }
        self.hear(number, len)
    }

    /// Sends words on a control connection. Whether they arrive what follows tells.
    pub(super) fn say(&mut self, number: QpNum, words: &[u8]) -> Result<(), Failure> {
        let pd = self.pd.clone();
        let said = self.get(number).say(&pd, words);
        said.map_err(|error| Failure::new("the test", error, "check whether the peer still runs"))
    }

    /// Sends a value as a text of JSON.
    pub(super) fn say_text(
        &mut self,
        number: QpNum,
        value: &impl serde::Serialize,
    ) -> Result<(), Failure> {
        let text =
            serde_json::to_vec(value).map_err(|error| Failure::new("the test", error, ""))?;
        self.say(number, &[&(text.len() as u32).to_be_bytes()[..], &text].concat())
    }

    /// Closes connections, and lets them go when the peers have, or soon after.
    pub(super) fn let_go(&mut self, numbers: &[QpNum]) {
        for number in numbers {
            self.get(*number).close();
        }
        let until = Instant::now() + Duration::from_secs(1);
        while numbers.iter().any(|number| self.get(*number).over.is_none())
            && Instant::now() < until
            && self.turn(Some(until)).is_ok()
        {}
        for number in numbers {
            self.connections.remove(number);
        }
    }
}

impl Connection {
    /// Sends nothing more. Without a connection that is so anyway.
    pub(super) fn close(&self) {
        let _ = self.qp.close();
    }

    /// Whether nothing more comes.
    pub(super) fn is_gone(&self) -> bool {
        self.over.is_some() || self.peer_closed
    }

    /// Whether it has broken.
    pub(super) fn has_failed(&self) -> bool {
        matches!(self.over, Some(TcpChange::Failed(_) | TcpChange::Aborted))
    }

    /// What went in a direction: acknowledged, or received. Segments that were sent again as far as is known,
    /// if it has ended.
    pub(super) fn counts(&mut self, sent: bool) -> Counts {
        if !sent {
            return Counts { bytes: self.received, ..Counts::default() };
        }
        if let Ok(Some(counters)) = self.qp.counters() {
            self.retransmits = counters.retransmitted.into();
        }
        let (bytes, retransmits) = (self.acknowledged, self.retransmits);
        Counts { bytes, retransmits, ..Counts::default() }
    }

    /// Both ends, while they are known.
    pub(super) fn flow(&self) -> Result<Option<(SocketAddr, SocketAddr)>, Error> {
        Ok(self.qp.flow()?.map(|flow| (flow.local, flow.remote)))
    }

    /// What has come and was not taken.
    pub(super) fn has_words(&self) -> bool {
        !self.inbox.is_empty()
    }

    fn say(&mut self, pd: &ProtectionDomain, words: &[u8]) -> Result<(), Error> {
        let region = pd.register(words.len(), Access::LOCAL_WRITE)?;
        region.write(0, words)?;
        let request = [region.sge(0, words.len())?];
        self.qp.post_send(&Request::send(&request).id(IS_WORD))?;
        self.words.push_back(region);
        Ok(())
    }

    /// Whether another block may be posted now.
    pub(super) fn has_room(&self) -> bool {
        let octets = self.posted - self.acknowledged;
        self.over.is_none()
            && self.under_way.len() < SENDS as usize - 1
            && (octets < UNDER_WAY || self.under_way.len() < 2)
    }

    /// Posts a block, or the first octets of it.
    pub(super) fn send_block(&mut self, len: u64) -> Result<(), Error> {
        let Some(block) = &self.block else { return Ok(()) };
        self.qp.post_send(&Request::send(&block.filled(0, len as usize)?).id(IS_BLOCK))?;
        self.under_way.push_back(len);
        self.posted += len;
        Ok(())
    }

    fn completed(&mut self, completion: &Completion) -> Result<(), Error> {
        // What is flushed an event explains.
        if completion.status != WcStatus::Success {
            return Ok(());
        }
        let len = completion.byte_len as usize;
        match completion.wr_id {
            IS_WORD => {
                self.words.pop_front();
            }
            IS_BLOCK => self.acknowledged += self.under_way.pop_front().unwrap_or(0),
            place => {
                match &self.sink {
                    Some(_) => self.received += len as u64,
                    None => self.inbox.extend(self.places.read(place, len)?),
                }
                if self.inbox.len() > MAX_TEXT + COOKIE {
                    // It may be gone already.
                    let _ = self.qp.abort();
                    return Ok(());
                }
                let room = match &self.sink {
                    Some(sink) if place == IS_SINK => (IS_SINK, sink.room(0)?),
                    _ => (place, self.places.room(place)?),
                };
                // After the end of the stream it is of no use, and after a reset refused.
                let _ = self.qp.post_recv(room.0, &room.1);
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cmd::qpip::tests::adapter;

    #[test]
    fn who_has_said_a_cookie_comes_when_its_place_is_known() {
        let mut network = Network::new(&adapter(), Arc::default()).unwrap();
        let numbers = [network.add().unwrap(), network.add().unwrap()];
        for number in numbers {
            network.get(number).inbox = vec![0; COOKIE];
        }
        let connected = |qp_num| Event { qp_num, change: TcpChange::Connected };
        network.happened(connected(numbers[0]));
        // The event of the other one is taken in the next turn.
        assert_eq!(network.comers(), [numbers[0]]);
        network.happened(connected(numbers[1]));
        assert_eq!(network.comers(), numbers);
    }
}
