//! One test: its streams, what they have moved in each interval, and the words at its beginning and end.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use quipu::QpNum;

use super::network::Network;
use super::report::{Interval, Outcome, Report};
use super::streams::Carrier;
use super::words::{
    COOKIE, Counts, Known, Params, Results, State, StreamResults, not_implemented, stream_id,
};
use crate::cmd::failure::Failure;
use crate::cmd::qpip::cpu::Cpu;

/// How long a server waits for octets that were sent before the client's last word.
const REST: Duration = Duration::from_secs(1);
/// Without any octet for so long a test is given up.
const PATIENCE: Duration = Duration::from_secs(120);
/// How long after its time a client may end a test; others wait for it.
const OVERTIME: Duration = Duration::from_secs(30);

/// A stream, and where its counts were.
struct Stream {
    carrier: Carrier,
    id: u64,
    sends: bool,
    /// When what counts began.
    base: Counts,
    /// When the interval began.
    last: Counts,
}

/// A test that is under way.
pub(super) struct Test<'a> {
    network: &'a mut Network,
    control: QpNum,
    params: Params,
    is_server: bool,
    streams: Vec<Stream>,
    report: &'a mut Report,
    interval: Duration,
}

fn broken(why: impl std::fmt::Display) -> Failure {
    Failure::new("the test", why, "check whether the peer still runs")
}

fn not_json(error: serde_json::Error) -> Failure {
    Failure::new("the test", error, "is that iperf3?")
}

/// Waits for a client, and makes its test.
pub(super) fn serve(
    network: &mut Network,
    report: &mut Report,
    interval: Duration,
) -> Result<(), Failure> {
    network.cookie = None;
    let control = loop {
        match network.comers().first() {
            Some(&comer) => break comer,
            None => network.turn(None)?,
        }
    };
    let cookie = network.claim(control);
    network.cookie = Some(cookie.clone());
    let params = Params::default();
    let streams = Vec::new();
    let mut test = Test { network, control, params, is_server: true, streams, report, interval };
    let outcome = test.serve(&cookie);
    test.end(outcome)
}

/// Makes a test with a server.
pub(super) fn ask(
    network: &mut Network,
    to: SocketAddr,
    params: Params,
    report: &mut Report,
    interval: Duration,
) -> Result<(), Failure> {
    let control = network.connect(to)?;
    let streams = Vec::new();
    let mut test = Test { network, control, params, is_server: false, streams, report, interval };
    let outcome = test.ask(to);
    test.end(outcome)
}

impl Test<'_> {
    fn serve(&mut self, cookie: &[u8]) -> Result<(), Failure> {
        let control = self.control;
        self.say(State::ParamExchange)?;
        let text = self.network.hear_text(control)?;
        let params = serde_json::from_slice::<Params>(&text);
        let Some(params) = params.as_ref().ok().filter(|params| params.are_possible()) else {
            self.network.say(control, &not_implemented())?;
            // It is the peer's, for a terminal: no control characters, and not much.
            let begin: String = String::from_utf8_lossy(&text).chars().take(200).collect();
            let why = format!("the client asks for a test that is not supported: {begin:?}");
            return Err(Failure::new("the test", why, "there are at most 128 streams"));
        };
        self.params = params.clone();
        self.take_streams(cookie)?;
        self.report.begin(&self.params, true);
        self.say(State::TestStart)?;
        self.say(State::TestRunning)?;
        let outcome = self.run()?;
        // A client that receives reads to the end of its streams before it hears anything else.
        for number in self.connections() {
            self.network.get(number).close();
        }
        self.say(State::ExchangeResults)?;
        let text = self.network.hear_text(control)?;
        let theirs: Results = serde_json::from_slice(&text).map_err(not_json)?;
        self.network.say_text(control, &outcome.results)?;
        self.say(State::DisplayResults)?;
        // Who leaves without a word has all it wanted.
        let _ = self.network.hear_state(control);
        self.report.end(&outcome, &theirs);
        Ok(())
    }

    /// Waits for the streams of the client.
    fn take_streams(&mut self, cookie: &[u8]) -> Result<(), Failure> {
        let (control, params) = (self.control, self.params.clone());
        let wanted = params.client_sends();
        let port = match params.udp {
            true => Some(self.network.admit(control, wanted.len(), &params)?),
            false => None,
        };
        self.say(State::CreateStreams)?;
        let until = Instant::now() + Duration::from_secs(30);
        loop {
            let come = match port {
                Some(port) => self.network.admitted(port),
                None => self.network.comers().len(),
            };
            if come >= wanted.len() {
                break;
            }
            if self.network.get(control).is_gone() || Instant::now() > until {
                return Err(broken("the client did not open its streams"));
            }
            self.network.turn(Some(until))?;
        }
        let comers = self.network.comers();
        for (index, client_sends) in wanted.into_iter().enumerate() {
            let carrier = match port {
                Some(port) => Carrier::Flow(port, index),
                None if self.network.claim(comers[index]) == cookie => {
                    Carrier::Connection(comers[index])
                }
                None => return Err(broken("a stream of another test arrived")),
            };
            self.add_stream(carrier, index, !client_sends)?;
        }
        Ok(())
    }

    fn ask(&mut self, to: SocketAddr) -> Result<(), Failure> {
        let control = self.control;
        let cookie = cookie();
        self.network.say(control, &cookie)?;
        self.expect(State::ParamExchange)?;
        self.network.say_text(control, &self.params)?;
        self.expect(State::CreateStreams)?;
        for (index, sends) in self.params.client_sends().into_iter().enumerate() {
            let carrier = if self.params.udp {
                self.network.greet(to, &self.params)?
            } else {
                let number = self.network.connect(to)?;
                self.network.say(number, &cookie)?;
                Carrier::Connection(number)
            };
            self.add_stream(carrier, index, sends)?;
        }
        self.report.begin(&self.params, false);
        self.expect(State::TestStart)?;
        self.expect(State::TestRunning)?;
        let outcome = self.run()?;
        self.say(State::TestEnd)?;
        self.expect(State::ExchangeResults)?;
        self.network.say_text(control, &outcome.results)?;
        let text = self.network.hear_text(control)?;
        let theirs: Results = serde_json::from_slice(&text).map_err(not_json)?;
        self.expect(State::DisplayResults)?;
        self.say(State::IperfDone)?;
        self.report.end(&outcome, &theirs);
        Ok(())
    }

    fn say(&mut self, state: State) -> Result<(), Failure> {
        self.network.say(self.control, &[state.octet()])
    }

    fn expect(&mut self, wanted: State) -> Result<(), Failure> {
        let state = self.network.hear_state(self.control)?;
        match state {
            _ if state == wanted => Ok(()),
            State::AccessDenied => {
                let remedy = "try again later";
                Err(Failure::new(
                    "the server refuses",
                    "the server is busy with another test",
                    remedy,
                ))
            }
            State::ServerTerminate => Err(broken("the server ended the test")),
            State::ServerError => {
                let words = self.network.hear(self.control, 8)?;
                let why = format!("the server reports error {}", words[3]);
                Err(Failure::new("the server refuses", why, "look at the server's output"))
            }
            _ => Err(broken(format!("the server sent {state:?} where {wanted:?} was expected"))),
        }
    }

    /// Takes leave of everybody.
    fn end(mut self, outcome: Result<(), Failure>) -> Result<(), Failure> {
        if outcome.is_err() {
            let last = if self.is_server { State::ServerTerminate } else { State::ClientTerminate };
            // Anyone who is gone does not hear it.
            let _ = self.say(last);
        }
        // The next client need not wait for the leave.
        self.network.cookie = None;
        self.network.unbind();
        let numbers = self.connections();
        self.network.let_go(&[&numbers[..], &[self.control]].concat());
        outcome
    }

    /// Those of the streams.
    fn connections(&self) -> Vec<QpNum> {
        let number = |stream: &Stream| match stream.carrier {
            Carrier::Connection(number) => Some(number),
            Carrier::Flow(..) => None,
        };
        self.streams.iter().filter_map(number).collect()
    }

    fn add_stream(&mut self, carrier: Carrier, index: usize, sends: bool) -> Result<(), Failure> {
        let (id, none) = (stream_id(index), Counts::default());
        self.streams.push(Stream { carrier, id, sends, base: none, last: none });
        let Carrier::Connection(number) = carrier else { return Ok(()) };
        self.network.count_only(number)?;
        if sends { self.network.give_block(number, self.params.len) } else { Ok(()) }
    }

    /// What a stream has moved.
    fn moved(&mut self, index: usize) -> Counts {
        let Stream { carrier, sends, .. } = self.streams[index];
        self.network.counts(carrier, sends)
    }

    /// Octets of all streams in a direction that count.
    fn total(&mut self, sends: bool) -> u64 {
        let mut total = 0;
        for stream in self.streams.iter().filter(|stream| stream.sends == sends) {
            total += self.network.counts(stream.carrier, sends).bytes - stream.base.bytes;
        }
        total
    }

    /// Moves octets until the test is over.
    fn run(&mut self) -> Result<Outcome, Failure> {
        let mut begun = Instant::now();
        let mut cpu = Cpu::now();
        let omit = Duration::from_secs(self.params.omit.into());
        let (mut counts, mut reported) = (omit.is_zero(), begun);
        let (mut progress, mut last) = (0, begun);
        loop {
            let now = Instant::now();
            if !counts && now >= begun + omit {
                (counts, begun, cpu, reported) = (true, now, Cpu::now(), now);
                self.report.omitted();
                for index in 0..self.streams.len() {
                    let moved = self.moved(index);
                    (self.streams[index].base, self.streams[index].last) = (moved, moved);
                }
            }
            if !self.interval.is_zero() && now >= reported + self.interval {
                self.interval(begun, reported, now);
                reported = now;
            }
            let paced = self.send(now - begun)?;
            if self.is_over(now, begun, counts)? {
                break;
            }
            let moved = self.total(true) + self.total(false);
            if moved != progress {
                (progress, last) = (moved, now);
            } else if now > last + PATIENCE {
                return Err(broken("no data moved for two minutes"));
            }
            let report = (!self.interval.is_zero()).then(|| reported + self.interval);
            let phase = match (counts, self.params.time) {
                (false, _) => Some(begun + omit),
                (true, 0) => None,
                (true, time) => Some(begun + Duration::from_secs(time.into())),
            };
            let phase = phase.filter(|&at| at > now);
            let until = [report, phase, paced, Some(now + Duration::from_secs(1))];
            self.network.turn(until.into_iter().flatten().min())?;
        }
        let now = Instant::now();
        // Of datagrams some may be lost.
        if self.is_server && !self.params.bidirectional && !self.params.udp {
            self.wait_for_rest(now)?;
        }
        let now = if self.params.target().is_some() { Instant::now() } else { now };
        if !self.interval.is_zero() && now > reported + self.interval / 10 {
            self.interval(begun, reported, now);
        }
        Ok(self.outcome(now - begun, Cpu::now().since(cpu)))
    }

    /// Whether the test is over; on this side, or by the word of the client.
    fn is_over(&mut self, now: Instant, begun: Instant, counts: bool) -> Result<bool, Failure> {
        let control = self.control;
        if self.network.get(control).has_words() {
            return match self.network.hear_state(control)? {
                State::TestEnd if self.is_server => Ok(true),
                State::ClientTerminate | State::ServerTerminate => {
                    Err(broken("the peer ended the test"))
                }
                state => Err(broken(format!("the peer sent {state:?} during the test"))),
            };
        }
        if self.network.get(control).is_gone() {
            return Err(broken("the control connection ended"));
        }
        if self.connections().into_iter().any(|number| self.network.get(number).has_failed()) {
            return Err(broken("a stream broke"));
        }
        let time = Duration::from_secs(self.params.time.into());
        if self.is_server && !time.is_zero() && counts && now > begun + time + OVERTIME {
            return Err(broken("the client did not end the test when its time was over"));
        }
        if self.is_server || !counts {
            return Ok(false);
        }
        Ok(match self.params.target() {
            Some(target) => self.total(true).max(self.total(false)) >= target,
            None => now >= begun + time,
        })
    }

    /// Posts as many blocks as may be; when the next one may, if that is a question of time.
    fn send(&mut self, passed: Duration) -> Result<Option<Instant>, Failure> {
        let mut left = u64::MAX;
        // A client that waits for so many octets says when it has them: some datagrams may be lost.
        let unsure = self.params.udp && self.is_server;
        if let Some(target) = self.params.target().filter(|_| !unsure) {
            left = target;
            for stream in self.streams.iter().filter(|stream| stream.sends) {
                let posted = self.network.posted(stream.carrier) - stream.base.bytes;
                left = left.saturating_sub(posted);
            }
        }
        let allowed = match self.params.bandwidth {
            0 => u64::MAX,
            rate => (rate as f64 / 8.0 * passed.as_secs_f64()) as u64,
        };
        let mut next = None;
        for Stream { carrier, base, .. } in self.streams.iter().filter(|stream| stream.sends) {
            while left > 0 && self.network.has_room(*carrier) {
                let posted = self.network.posted(*carrier).saturating_sub(base.bytes);
                if posted > allowed {
                    let wait = (posted - allowed) as f64 * 8.0 / self.params.bandwidth as f64;
                    let at = Instant::now() + Duration::from_secs_f64(wait);
                    next = Some(next.map_or(at, |next: Instant| next.min(at)));
                    break;
                }
                let len = if self.params.udp { self.params.len } else { left.min(self.params.len) };
                match self.network.send_block(*carrier, len) {
                    Ok(()) => left = left.saturating_sub(len),
                    Err(error) if self.params.udp => {
                        let remedy = "choose a shorter --length";
                        return Err(Failure::new("cannot send a datagram", error, remedy));
                    }
                    // How the connection has ended, if it has, is seen later.
                    Err(_) => break,
                }
            }
        }
        Ok(next)
    }

    /// The client's word may have overtaken octets, or acknowledgements.
    fn wait_for_rest(&mut self, now: Instant) -> Result<(), Failure> {
        let Some(target) = self.params.target() else { return Ok(()) };
        while self.total(self.params.reverse) < target && now.elapsed() < REST {
            self.network.turn(Some(now + REST))?;
        }
        Ok(())
    }

    fn interval(&mut self, begun: Instant, from: Instant, to: Instant) {
        let mut intervals = Vec::new();
        for index in 0..self.streams.len() {
            let moved = self.moved(index);
            let Stream { id, sends, last, .. } = self.streams[index];
            self.streams[index].last = moved;
            let (from, to) = (from - begun, to - begun);
            intervals.push(Interval { id, sends, from, to, counts: moved.since(&last) });
        }
        self.report.interval(intervals);
    }

    fn outcome(&mut self, took: Duration, cpu: Cpu) -> Outcome {
        let seconds = took.as_secs_f64().max(1e-9);
        let mut streams = Vec::new();
        for index in 0..self.streams.len() {
            let moved = self.moved(index);
            let Stream { id, sends, base, .. } = self.streams[index];
            let Counts { bytes, retransmits, packets, errors, jitter } = moved.since(&base);
            streams.push(StreamResults {
                id,
                bytes,
                retransmits: Known((sends && !self.params.udp).then_some(retransmits)),
                jitter,
                errors,
                packets,
                start_time: 0.0,
                end_time: seconds,
            });
        }
        let sends = self.streams.iter().any(|stream| stream.sends);
        let util = |time: Duration| time.as_secs_f64() / seconds * 100.0;
        let results = Results {
            cpu_util_total: util(cpu.program + cpu.adapter),
            cpu_util_user: util((cpu.program + cpu.adapter).saturating_sub(cpu.system)),
            cpu_util_system: util(cpu.system),
            sender_has_retransmits: Known(sends.then_some(u64::from(!self.params.udp))),
            streams,
        };
        let sends = self.streams.iter().map(|stream| stream.sends).collect();
        Outcome { took, sends, results }
    }
}

/// A name for a test, which tells it from others at the same server.
fn cookie() -> Vec<u8> {
    use std::hash::{BuildHasher, RandomState};
    let state = RandomState::new();
    let letter = |at: usize| b"abcdefghijklmnopqrstuvwxyz234567"[state.hash_one(at) as usize % 32];
    (0..COOKIE - 1).map(letter).chain([0]).collect()
}
