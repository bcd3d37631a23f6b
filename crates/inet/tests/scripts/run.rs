//! The language of packet scripts.

use std::collections::VecDeque;
use std::ops::Range;

use quipu_inet::tcp::{
    Config, Connection, Flow, KeepAlive, Listener, MILLISECOND, Mode, Opening, Received, Report,
    SECOND, Secret, Segment, reset_for,
};
use quipu_wire::tcp::{Flags, Options, Repr, SackBlock, SeqNumber, Timestamps};

/// The peer's initial number: close to the wrap, so that every script crosses it.
const PEER: SeqNumber = SeqNumber(u32::MAX - 50);
const TOLERANCE: u64 = MILLISECOND;

struct Run {
    now: u64,
    config: Config,
    backlog: u32,
    listener: Option<Listener>,
    connection: Option<Connection>,
    /// Our initial number, known from the first segment.
    ours: Option<SeqNumber>,
    sent: VecDeque<(u64, Segment)>,
    /// Segments that the peer will acknowledge by itself.
    flying: VecDeque<(u64, Segment)>,
    /// The initial number of the connection before.
    earlier: Option<SeqNumber>,
    brought: Received,
    /// The last report was.
    believed: bool,
    /// Our last timestamp, and the peer's.
    timestamps: (u32, u32),
    timestamps_used: bool,
}

/// Runs a script; the failure names its line.
pub fn script(text: &str) -> Result<(), String> {
    let config = Config { pacing: false, timestamps: false, ecn: false, ..Config::default() };
    let mut run = Run {
        now: 1_000 * SECOND,
        config,
        backlog: 16,
        listener: None,
        connection: None,
        ours: None,
        sent: VecDeque::new(),
        flying: VecDeque::new(),
        earlier: None,
        brought: Received::default(),
        believed: false,
        timestamps: (0, 0),
        timestamps_used: false,
    };
    for (number, line) in text.lines().enumerate() {
        let line = line.split('#').next().unwrap_or("").trim();
        if !line.is_empty() {
            run.line(line).map_err(|failure| format!("{}: {line}: {failure}", number + 1))?;
        }
    }
    run.settle().map_err(|failure| format!("end: {failure}"))
}

fn flow() -> Flow {
    Flow { local: ([10, 0, 0, 1], 4000).into(), remote: ([10, 0, 0, 2], 80).into() }
}

fn number<T: std::str::FromStr>(word: Option<&str>) -> Result<T, String> {
    let word = word.ok_or("a number is missing")?;
    word.parse().map_err(|_| format!("{word} is not a number"))
}

/// `10:20`, or `10` for nothing from 10 on.
fn range(word: Option<&str>) -> Result<Range<u64>, String> {
    let word = word.ok_or("a range is missing")?;
    let (from, to) = word.split_once(':').unwrap_or((word, word));
    Ok(number(Some(from))?..number(Some(to))?)
}

fn flags(word: &str) -> Result<Flags, String> {
    word.chars().try_fold(Flags::NONE, |flags, letter| {
        Ok(flags
            | match letter {
                'S' => Flags::SYN,
                'F' => Flags::FIN,
                'R' => Flags::RST,
                'P' => Flags::PSH,
                'U' => Flags::URG,
                'E' => Flags::ECE,
                'W' => Flags::CWR,
                '.' => Flags::ACK,
                '-' => Flags::NONE,
                _ => return Err(format!("{letter} is not a flag")),
            })
    })
}

fn seconds(word: &str) -> Result<u64, String> {
    let seconds: f64 = number(Some(word))?;
    Ok((seconds * 1e9).round() as u64)
}

/// A packet as written.
struct Written {
    flags: Flags,
    numbers: Range<u64>,
    ack: Option<u64>,
    window: Option<u16>,
    urgent: Option<u16>,
    options: Option<Vec<String>>,
}

fn written(text: &str) -> Result<Written, String> {
    let (text, options) = match text.split_once('<') {
        Some((text, options)) => {
            let options = options.trim_end_matches('>').split(',');
            (text, Some(options.map(|option| option.trim().to_owned()).collect()))
        }
        None => (text, None),
    };
    let mut words = text.split_whitespace();
    let flags = flags(words.next().ok_or("no flags")?)?;
    let numbers = range(words.next())?;
    let mut packet = Written { flags, numbers, ack: None, window: None, urgent: None, options };
    while let Some(word) = words.next() {
        match word {
            "ack" => packet.ack = Some(number(words.next())?),
            "win" => packet.window = Some(number(words.next())?),
            "urg" => packet.urgent = Some(number(words.next())?),
            _ => return Err(format!("{word} is unknown")),
        }
    }
    Ok(packet)
}

impl Run {
    fn line(&mut self, line: &str) -> Result<(), String> {
        let line = match line.strip_prefix('+') {
            Some(rest) => {
                let (time, rest) = rest.split_once(' ').ok_or("a time alone")?;
                self.pass(seconds(time)?);
                rest.trim()
            }
            None => line,
        };
        if let Some(packet) = line.strip_prefix('>') {
            return self.expect(&written(packet)?);
        }
        if let Some(times) = line.strip_prefix("acks ") {
            return self.acknowledge(&times.split_whitespace().collect::<Vec<_>>());
        }
        self.settle()?;
        if let Some(packet) = line.strip_prefix("<+") {
            self.arrive(&written(packet)?, false)?;
            return Ok(());
        }
        if let Some(packet) = line.strip_prefix("<!") {
            self.arrive(&written(packet)?, true)?;
            self.flush();
            return Ok(());
        }
        if let Some(packet) = line.strip_prefix('<') {
            self.arrive(&written(packet)?, false)?;
            self.flush();
            return Ok(());
        }
        let mut words = line.split_whitespace();
        let word = words.next().unwrap_or("");
        let rest: Vec<&str> = words.collect();
        self.call(word, &rest)?;
        self.flush();
        Ok(())
    }

    /// Nothing was sent that no line expects.
    fn settle(&mut self) -> Result<(), String> {
        match self.sent.pop_front() {
            Some((at, segment)) => {
                Err(format!("unexpected at {}: {}", self.ago(at), self.show(&segment)))
            }
            None => Ok(()),
        }
    }

    fn ago(&self, at: u64) -> String {
        format!("{:.3} s ago", (self.now - at) as f64 / 1e9)
    }

    fn show(&self, segment: &Segment) -> String {
        let Repr { flags, seq, ack, window, options, .. } = segment.header;
        let start = seq.distance(self.ours.unwrap_or(seq));
        let len = segment.payload.end - segment.payload.start;
        format!("{flags:?} {start}+{len} ack {} win {window} {options:?}", ack.distance(PEER))
    }

    fn pass(&mut self, time: u64) {
        let end = self.now + time;
        while let Some(at) = self.connection.as_ref().and_then(Connection::poll_timeout) {
            if at > end {
                break;
            }
            self.now = self.now.max(at);
            let now = self.now;
            if let Some(connection) = &mut self.connection {
                connection.handle_timeout(now);
            }
            self.flush();
        }
        self.now = end;
    }

    /// The peer acknowledges each segment by itself: `words` say how long after it was sent, and for how
    /// long, in seconds, and whether the first of these acknowledgements echoes a mark of the network.
    fn acknowledge(&mut self, words: &[&str]) -> Result<(), String> {
        let [delay, time] = [0, 1].map(|at| seconds(words.get(at).copied().unwrap_or("")));
        let (delay, end) = (delay?, self.now + time?);
        let mut marked = words.get(2) == Some(&"marked");
        self.flying.append(&mut self.sent);
        while let Some(due) = self.flying.front().map(|(at, _)| at + delay) {
            if due > end {
                break;
            }
            self.pass(due.saturating_sub(self.now));
            let Some((_, segment)) = self.flying.pop_front() else { break };
            let ours = self.ours.ok_or("nothing was sent yet")?;
            let len = segment.payload.end - segment.payload.start;
            let echo = if std::mem::take(&mut marked) { Flags::ECE } else { Flags::NONE };
            let ack = segment.header.seq.distance(ours) as u64 + len;
            let (window, urgent, options) = (None, None, None);
            let flags = Flags::ACK | echo;
            self.arrive(
                &Written { flags, numbers: 1..1, ack: Some(ack), window, urgent, options },
                false,
            )?;
            self.flush();
            self.flying.append(&mut self.sent);
        }
        self.pass(end.saturating_sub(self.now));
        self.flying.append(&mut self.sent);
        Ok(())
    }

    fn flush(&mut self) {
        while let Some(connection) = &mut self.connection {
            let Some(segment) = connection.poll_transmit(self.now) else { break };
            self.send(segment);
        }
    }

    fn send(&mut self, segment: Segment) {
        if segment.header.flags.has(Flags::SYN) {
            // Sent again, it has the number that it had. (What has no connection is a cookie.)
            let again = self.connection.as_ref().and(self.ours);
            self.ours = again.or(Some(segment.header.seq));
        }
        if let Some(timestamps) = segment.header.options.timestamps {
            self.timestamps.0 = timestamps.value;
        }
        self.sent.push_back((self.now, segment));
    }

    fn expect(&mut self, expected: &Written) -> Result<(), String> {
        let Some((at, segment)) = self.sent.pop_front() else {
            let next = self.connection.as_ref().and_then(Connection::poll_timeout);
            let next = next.map(|at| (at.saturating_sub(self.now)) as f64 / 1e9);
            return Err(format!("nothing was sent; the next deadline is in {next:?} s"));
        };
        let Repr { flags, seq, ack, window, urgent: _, options, .. } = segment.header;
        let start = seq.distance(self.ours.unwrap_or(SeqNumber(0))) as i64 as u64;
        let len = segment.payload.end - segment.payload.start;
        let same = self.now - at <= TOLERANCE
            && flags == expected.flags
            && expected.numbers == (start..start + len)
            && expected.ack.is_none_or(|it| ack == PEER + it as u32)
            && expected.window.is_none_or(|it| window == it)
            && (len == 0 || segment.payload.start + 1 == start);
        let shown = || format!("{}: {}", self.ago(at), self.show(&segment));
        if !same {
            return Err(shown());
        }
        for option in expected.options.iter().flatten() {
            let mut words = option.split_whitespace();
            let matches = match words.next().unwrap_or("") {
                "mss" => options.mss == Some(number(words.next())?),
                "wscale" => options.window_scale == Some(number(words.next())?),
                "sackok" => options.sack_permitted,
                "nosackok" => !options.sack_permitted,
                "ts" => options.timestamps.is_some(),
                "nots" => options.timestamps.is_none(),
                "ecr" => {
                    let echo: u32 = number(words.next())?;
                    options.timestamps.is_some_and(|it| it.echo == echo)
                }
                "ect" => segment.ect,
                "noect" => !segment.ect,
                "nosack" => options.sack.as_slice().is_empty(),
                "sack" => {
                    let blocks =
                        words.map(|word| range(Some(word))).collect::<Result<Vec<_>, _>>()?;
                    let ours = options.sack.as_slice().iter().map(|block| {
                        block.left.distance(PEER) as u64..block.right.distance(PEER) as u64
                    });
                    ours.eq(blocks)
                }
                other => return Err(format!("option {other} is unknown")),
            };
            if !matches {
                return Err(format!("{option}: {}", shown()));
            }
        }
        Ok(())
    }

    fn header(&mut self, packet: &Written) -> Result<Repr, String> {
        let mut options = Options::default();
        let mut echo = self.timestamps.0;
        let mut value = None;
        for option in packet.options.iter().flatten() {
            let mut words = option.split_whitespace();
            match words.next().unwrap_or("") {
                "mss" => options.mss = Some(number(words.next())?),
                "wscale" => options.window_scale = Some(number(words.next())?),
                "sackok" => options.sack_permitted = true,
                "ts" => value = Some(number(words.next())?),
                "ecr" => {
                    let change: i32 = number(words.next())?;
                    echo = echo.wrapping_add_signed(change);
                }
                "sack" => {
                    let ours = self.ours.ok_or("nothing was sent yet")?;
                    for word in words {
                        let Range { start, end } = range(Some(word))?;
                        let (left, right) = (ours + start as u32, ours + end as u32);
                        options.sack.push(SackBlock { left, right });
                    }
                }
                other => return Err(format!("option {other} is unknown")),
            }
        }
        if value.is_some() && packet.flags.has(Flags::SYN) {
            self.timestamps_used = true;
        }
        if let Some(value) = value {
            self.timestamps.1 = value;
        }
        // Once they are in use, every segment has them.
        if self.timestamps_used && value != Some(0) {
            options.timestamps = Some(Timestamps { value: self.timestamps.1, echo });
        }
        let ours = self.ours.unwrap_or(SeqNumber(0));
        Ok(Repr {
            source: 80,
            destination: 4000,
            seq: PEER + packet.numbers.start as u32,
            ack: packet.ack.map_or(SeqNumber(0), |ack| ours + ack as u32),
            flags: packet.flags,
            window: packet.window.unwrap_or(u16::MAX),
            urgent: packet.urgent.unwrap_or(0),
            options,
        })
    }

    fn arrive(&mut self, packet: &Written, marked: bool) -> Result<(), String> {
        let header = self.header(packet)?;
        let payload: Vec<u8> = packet.numbers.clone().map(|at| at as u8).collect();
        let now = self.now;
        let Some(connection) = &mut self.connection else {
            let Some(listener) = &mut self.listener else {
                let header = reset_for(&header, payload.len());
                self.reply(header);
                return Ok(());
            };
            match listener.handle_segment(now, &flow(), &header, payload.len(), true) {
                Opening::HalfOpen(connection) => self.connection = Some(*connection),
                Opening::Open(mut connection) => {
                    self.brought = connection.handle_segment(now, &header, &payload, marked);
                    self.connection = Some(*connection);
                }
                Opening::Reply(header) => self.reply(Some(header)),
                Opening::Early | Opening::Ignored => {}
            }
            return Ok(());
        };
        self.brought = connection.handle_segment(now, &header, &payload, marked);
        Ok(())
    }

    fn reply(&mut self, header: Option<Repr>) {
        if let Some(header) = header {
            self.send(Segment { header, payload: 0..0, ect: false });
        }
    }

    fn call(&mut self, word: &str, rest: &[&str]) -> Result<(), String> {
        let first = rest.first().copied();
        match word {
            "config" => return rest.iter().try_for_each(|word| self.configure(word)),
            "connect" => {
                let secret = Secret([1, 2]);
                let connection = Connection::connect(self.now, self.config, secret, &flow());
                self.connection = Some(connection);
                self.earlier = self.ours.take();
                return Ok(());
            }
            "listen" => {
                self.connection = None;
                self.earlier = self.ours.take();
                let listener = Listener::new(self.config, Secret([1, 2]), self.backlog);
                self.listener = Some(listener);
                return Ok(());
            }
            _ => {}
        }
        let (brought, now) = (self.brought.clone(), self.now);
        let connection = self.connection.as_mut().ok_or("there is no connection")?;
        let found = match word {
            "send" => {
                let more = rest.get(1) == Some(&"more");
                let result = connection.send(number(first)?, !more);
                return result.map(drop).map_err(|error| error.to_string());
            }
            "refuses" => format!("{:?}", connection.send(number(first)?, true).is_err()),
            "space" => return number(first).map(|bytes| connection.set_receive_space(bytes)),
            "path_mss" => return number(first).map(|mss| connection.set_path_mss(now, mss)),
            "report" => {
                let words = (first.unwrap_or(""), rest.get(2).copied());
                let seq: u32 = number(rest.get(1).copied())?;
                let report = match words {
                    ("too_big", mss) => Report::TooBig { mss: number(mss)? },
                    ("soft", None) => Report::Soft,
                    ("hard", None) => Report::Hard,
                    _ => return Err("no such report".into()),
                };
                let ours = self.ours.ok_or("nothing was sent yet")?;
                self.believed = connection.handle_report(now, ours + seq, report);
                return Ok(());
            }
            "believed" => {
                return if self.believed { Ok(()) } else { Err("it was not".into()) };
            }
            "disbelieved" => {
                return if self.believed { Err("it was believed".into()) } else { Ok(()) };
            }
            "close" => {
                connection.close();
                return Ok(());
            }
            "admit" => {
                connection.admit();
                return Ok(());
            }
            "abort" => {
                connection.abort();
                return Ok(());
            }
            "state" => format!("{:?}", connection.state()),
            "event" => connection.poll_event().map_or("none".into(), |event| format!("{event:?}")),
            "placed" => brought.placement.map_or("none".into(), |it| {
                let len = (it.payload.end - it.payload.start) as u64;
                format!("{}:{}", it.offset, it.offset + len)
            }),
            "contiguous" => brought.contiguous.to_string(),
            "pushed" => {
                return if brought.push { Ok(()) } else { Err("it was not".into()) };
            }
            "cwnd" => {
                let cwnd = connection.congestion_window();
                let allowed = range(first)?;
                let within = (allowed.start..=allowed.end).contains(&cwnd);
                if within { rest.join(" ") } else { cwnd.to_string() }
            }
            "number_grown" => {
                let numbers = self.ours.zip(self.earlier);
                numbers
                    .map_or("nothing".into(), |(ours, earlier)| ours.distance(earlier).to_string())
            }
            "held" => connection.poll_held().map_or("none".into(), |held| {
                let end = held.offset + held.payload.len() as u64;
                format!("{}:{end}{}", held.offset, if held.end_of_message { " end" } else { "" })
            }),
            "counter" => {
                let counters = format!("{:?}", connection.counters());
                let name = format!(" {}: ", first.ok_or("which?")?);
                let value = counters.split(&name).nth(1).ok_or("no such counter")?;
                let value = value.split([',', ' ']).next().unwrap_or("");
                format!("{} {value}", first.unwrap_or(""))
            }
            _ => return Err(format!("{word} is unknown")),
        };
        let wanted = if word == "refuses" { "true".into() } else { rest.join(" ") };
        if found == wanted { Ok(()) } else { Err(format!("found {found}")) }
    }

    fn configure(&mut self, word: &str) -> Result<(), String> {
        let (name, value) = word.split_once('=').ok_or("no value")?;
        let on = value == "on";
        let config = &mut self.config;
        match name {
            "mode" => config.mode = if value == "message" { Mode::Message } else { Mode::Stream },
            "timestamps" => config.timestamps = on,
            "sack" => config.sack = on,
            "ecn" => config.ecn = on,
            "nagle" => config.nagle = on,
            "pacing" => config.pacing = on,
            "deferred" => config.deferred = on,
            "mss" => {
                config.receive_mss = number(Some(value))?;
                config.path_mss = config.receive_mss;
            }
            "max_space" => config.max_receive_space = number(Some(value))?,
            "ack_delay" => config.ack_delay = seconds(value)?,
            "user_timeout" => config.user_timeout = seconds(value)?,
            "time_wait" => config.time_wait = seconds(value)?,
            "max_messages" => config.max_messages = number(Some(value))?,
            "max_reassembly" => config.max_reassembly = number(Some(value))?,
            "backlog" => self.backlog = number(Some(value))?,
            "keep_alive" => {
                let times: Vec<&str> = value.split('/').collect();
                config.keep_alive = Some(KeepAlive {
                    idle: seconds(times[0])?,
                    interval: seconds(times[1])?,
                    probes: number(Some(times[2]))?,
                });
            }
            _ => return Err(format!("{name} is unknown")),
        }
        Ok(())
    }
}
