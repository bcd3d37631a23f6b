//! One adapter with its program and its connection management, and a peer who does what the script says.

mod acts;

use std::collections::VecDeque;
use std::net::IpAddr;

use quipu_nic::iwarp::setup::Outcome;
use quipu_nic::iwarp::wire::mpa::Enhanced;
use quipu_nic::iwarp::{Initiator, Negotiated, Params, Responder, SetupError};
use quipu_nic::mem::{Segment, Sge};
use quipu_nic::*;

use super::script::{self, Case, Step, Symbol, Symbols};

/// Where in the memory of the program sends and writes have their bytes, reads their sink, and receives
/// theirs.
const OUTBOX: usize = 0x4000;
const SINK: usize = 0x6000;
const INBOX: usize = 0x8000;
const MEMORY: usize = 0x10000;

/// How what the peer sends arrives.
#[derive(Clone, Copy, Debug)]
pub enum Pieces {
    Whole,
    Of(usize),
    CutAt(usize),
}

/// What start-up is doing.
enum Mpa {
    Initiating(Initiator),
    Responding(Responder),
    /// The stream was handed over.
    Done,
    /// It came to nothing.
    Over,
}

/// What the case asks of connection management.
struct Wishes {
    role: Role,
    params: Params,
    data: Vec<u8>,
    refuse: bool,
    rfc7306: bool,
    speaks_first_after_ns: Option<u64>,
}

/// Everything of one run.
pub struct Player<'a> {
    case: &'a Case,
    pieces: Pieces,
    adapter: Adapter,
    now: Time,
    pd: PdId,
    cq: CqId,
    qp: QpId,
    conn: Option<ConnId>,
    mpa: Mpa,
    wishes: Wishes,
    memory: Segment,
    lkey: Key,
    region: Region,
    symbols: Symbols,
    /// What arrived and was not used.
    held: Vec<u8>,
    /// What was sent and not looked at.
    sent: Vec<u8>,
    closed: bool,
    /// Whether the socket takes no more.
    full: bool,
    completions: VecDeque<String>,
    events: VecDeque<String>,
    /// What start-up brought.
    news: VecDeque<String>,
}

impl<'a> Player<'a> {
    pub fn new(case: &'a Case, pieces: Pieces) -> Self {
        let gid = Gid::from(IpAddr::from([10, 0, 0, 1]));
        let wishes = wishes(&case.options);
        let speaks_first_after_ns = wishes.speaks_first_after_ns;
        let config = Config { gid, seed: [7; 32], speaks_first_after_ns, ..Config::default() };
        let mut adapter = Adapter::new(config);
        let pd = adapter.alloc_pd().unwrap();
        let (cq, _) = adapter.create_cq(256, None, 0).unwrap();
        let memory = Segment::heap(MEMORY);
        let all = Access::LOCAL_WRITE
            | Access::REMOTE_WRITE
            | Access::REMOTE_READ
            | Access::REMOTE_ATOMIC
            | Access::MW_BIND;
        let mut register = |access| adapter.reg_segment(pd, &memory, None, access).unwrap();
        let region = register(all);
        let read_only = register(Access::REMOTE_READ);
        let write_only = register(Access::LOCAL_WRITE | Access::REMOTE_WRITE);
        let other_pd = adapter.alloc_pd().unwrap();
        let elsewhere = adapter.reg_segment(other_pd, &memory, None, all).unwrap();
        let cap = QpCap {
            max_send_wr: 16,
            max_recv_wr: 16,
            max_send_sge: 4,
            max_recv_sge: 4,
            max_inline_data: 64,
        };
        let init = QpInit {
            pd,
            send_cq: cq,
            recv_cq: cq,
            srq: None,
            cap,
            qp_type: QpType::Iwarp,
            sq_sig_all: true,
        };
        let (qp, _) = adapter.create_qp(&init, QpNum::new(4001, 0)).unwrap();
        let now = Time(1_000_000_000);
        let access = Access::REMOTE_WRITE | Access::REMOTE_READ | Access::REMOTE_ATOMIC;
        let attr = QpAttr { state: QpState::Init, port_num: 1, access, ..QpAttr::default() };
        let mask = QpAttrMask::STATE | QpAttrMask::PORT | QpAttrMask::ACCESS_FLAGS;
        adapter.modify_qp(now, qp, &attr, mask).unwrap();
        let symbols = Symbols::from([
            ("stag", Symbol::Key(region.key.0)),
            ("ro", Symbol::Key(read_only.key.0)),
            ("wo", Symbol::Key(write_only.key.0)),
            ("other", Symbol::Key(elsewhere.key.0)),
            ("addr", Symbol::Address(memory.addr() as u64)),
        ]);
        Self {
            case,
            pieces,
            adapter,
            now,
            pd,
            cq,
            qp,
            conn: None,
            mpa: Mpa::Over,
            wishes,
            memory,
            lkey: region.key,
            region,
            symbols,
            held: Vec::new(),
            sent: Vec::new(),
            closed: false,
            full: false,
            completions: VecDeque::new(),
            events: VecDeque::new(),
            news: VecDeque::new(),
        }
    }

    pub fn play(mut self) {
        self.start();
        self.settle();
        for step in &self.case.steps {
            self.step(step);
            self.settle();
        }
        let left = (&self.completions, &self.events, &self.news, hex(&self.sent));
        let nothing = left.0.is_empty() && left.1.is_empty() && left.2.is_empty();
        assert!(nothing && left.3.is_empty(), "{}: left over: {left:?}", self.place(0));
    }

    fn place(&self, line: usize) -> String {
        format!("{}:{line}: {} ({:?})", self.case.file, self.case.title, self.pieces)
    }

    fn start(&mut self) {
        let wishes = &self.wishes;
        if self.case.options.iter().any(|option| option == "open") {
            let negotiated = Negotiated { ord: Some(4), ..Negotiated::plain() };
            return self.adopt(negotiated);
        }
        self.mpa = match wishes.role {
            Role::Initiator => {
                Mpa::Initiating(Initiator::new(wishes.params, &wishes.data).unwrap())
            }
            Role::Responder => Mpa::Responding(Responder::new()),
        };
    }

    fn adopt(&mut self, negotiated: Negotiated) {
        let Wishes { role, params, rfc7306, .. } = self.wishes;
        let (ird, ord) = params.enhanced.map_or((4, 4), |enhanced| (enhanced.ird, enhanced.ord));
        let adoption = Adoption { role, negotiated, ird, ord, rfc7306 };
        self.conn = Some(self.adapter.adopt_stream(self.now, self.qp, &adoption).unwrap());
        self.mpa = Mpa::Done;
    }

    fn step(&mut self, step: &Step) {
        let (first, rest) = step.text.split_at(1);
        match first {
            ">" => self.arrive(&script::bytes(rest, &self.symbols)),
            "<" => {
                let expected = script::bytes(rest, &self.symbols);
                let sent = std::mem::take(&mut self.sent);
                assert_eq!(hex(&sent), hex(&expected), "{}: sent", self.place(step.line));
            }
            "=" => self.expect(step.line, rest.trim()),
            _ => self.act(&script::words(&step.text)),
        }
    }

    /// Bytes of the peer, in pieces.
    fn arrive(&mut self, bytes: &[u8]) {
        let cut = match self.pieces {
            Pieces::Whole => bytes.len(),
            Pieces::Of(size) => size,
            Pieces::CutAt(at) if at < bytes.len() => {
                self.hear(&bytes[..at]);
                return self.hear(&bytes[at..]);
            }
            Pieces::CutAt(_) => bytes.len(),
        };
        for piece in bytes.chunks(cut.max(1)) {
            self.hear(piece);
        }
    }

    fn hear(&mut self, piece: &[u8]) {
        self.held.extend(piece);
        let bytes = std::mem::take(&mut self.held);
        let used = self.take(&bytes);
        self.held = bytes[used..].to_vec();
        self.settle();
    }

    /// Gives bytes to whose turn it is.
    fn take(&mut self, bytes: &[u8]) -> usize {
        let used = match &mut self.mpa {
            Mpa::Over => return bytes.len(),
            Mpa::Done => {
                let Some(conn) = self.conn else { return bytes.len() };
                return self.adapter.handle_stream(self.now, conn, bytes);
            }
            Mpa::Initiating(initiator) => match initiator.handle(bytes) {
                Ok((used, None)) => used,
                Ok((used, Some(Outcome::Established(negotiated)))) => {
                    self.news.push_back(format!("data {}", text(&negotiated.private_data)));
                    self.adopt(negotiated);
                    used
                }
                Ok((used, Some(Outcome::Rejected { private_data, .. }))) => {
                    self.news.push_back(format!("rejected {}", text(&private_data)));
                    self.give_up();
                    used
                }
                Err(error) => {
                    self.sent.extend(initiator.last_words(&error));
                    return self.fail(error, bytes);
                }
            },
            Mpa::Responding(responder) => match responder.handle(bytes) {
                Ok((used, None)) => used,
                Ok((used, Some(request))) => {
                    self.news.push_back(format!("data {}", text(&request.private_data)));
                    if used < bytes.len()
                        && let Err(error) = responder.handle(&bytes[used..])
                    {
                        return self.fail(error, bytes);
                    }
                    self.answer();
                    used
                }
                Err(error) => return self.fail(error, bytes),
            },
        };
        if used == bytes.len() || used == 0 {
            return used;
        }
        used + self.take(&bytes[used..])
    }

    /// Connection management answers a request.
    fn answer(&mut self) {
        let Mpa::Responding(responder) = &mut self.mpa else { return };
        let Wishes { params, data, refuse, .. } = &self.wishes;
        let accepted = if *refuse { None } else { Some(responder.accept(*params, data)) };
        let negotiated = match accepted {
            Some(Ok(negotiated)) => Some(negotiated),
            Some(Err(error)) => {
                self.news.push_back(format!("fails {error:?}"));
                responder.reject(b"").unwrap();
                None
            }
            None => {
                responder.reject(data).unwrap();
                None
            }
        };
        let mut out = [0; 600];
        let len = responder.poll_transmit(&mut out);
        self.sent.extend(&out[..len]);
        match negotiated {
            Some(negotiated) => self.adopt(negotiated),
            None => self.give_up(),
        }
    }

    fn fail(&mut self, error: SetupError, bytes: &[u8]) -> usize {
        self.news.push_back(format!("fails {error:?}"));
        self.give_up();
        bytes.len()
    }

    fn give_up(&mut self) {
        self.mpa = Mpa::Over;
        self.closed = true;
    }

    /// Does what the adapter asks for, and notes what comes of it.
    fn settle(&mut self) {
        if let Mpa::Initiating(initiator) = &mut self.mpa {
            let mut out = [0; 600];
            let len = initiator.poll_transmit(&mut out);
            self.sent.extend(&out[..len]);
        }
        let mut turns = 0;
        loop {
            self.adapter.release_acks();
            let mut busy = false;
            while let Some(action) = self.adapter.poll_action() {
                busy = true;
                match action {
                    Action::Close { conn } => {
                        self.transmit(conn);
                        self.closed = true;
                        self.adapter.handle_lost(self.now, conn, Loss::Closed);
                        self.conn = None;
                    }
                    Action::LimitSilence { .. } => {}
                    other => panic!("{}: {other:?}", self.place(0)),
                }
            }
            while let Some(conn) = self.adapter.next_transmit() {
                busy = true;
                turns += 1;
                assert!(turns < 1000, "{}: the adapter never comes to rest", self.place(0));
                if !self.full {
                    self.transmit(conn);
                }
            }
            if !busy {
                break;
            }
        }
        while let Some(event) = self.adapter.poll_event() {
            self.events.push_back(match event {
                Event::Async(event) => {
                    let text = format!("{event:?}");
                    format!("event {}", text.split('(').next().unwrap_or_default())
                }
                Event::Stream { change, .. } => format!("stream {change:?}"),
                Event::Completion { .. }
                | Event::Tcp { .. }
                | Event::TcpRequest { .. }
                | Event::TcpStream { .. } => panic!("nobody asked for it"),
            });
        }
        let mut completions = [Completion::default(); 64];
        let count = self.adapter.poll_cq(self.cq, &mut completions).unwrap();
        self.completions.extend(completions[..count].iter().map(shown));
    }

    fn transmit(&mut self, conn: ConnId) {
        while self.transmit_into(conn, 8192) > 0 {}
    }

    fn transmit_into(&mut self, conn: ConnId, room: usize) -> usize {
        let mut out = vec![0; room];
        let len = self.adapter.transmit(self.now, conn, &mut out);
        self.sent.extend(&out[..len]);
        len
    }

    fn expect(&mut self, line: usize, expected: &str) {
        let place = self.place(line);
        let first = expected.split(' ').next().unwrap_or_default();
        match first {
            "event" | "stream" => {
                assert_eq!(self.events.pop_front().as_deref(), Some(expected), "{place}");
            }
            "data" | "rejected" | "fails" => {
                let news = self.news.pop_front().unwrap_or_default();
                assert!(news.starts_with(expected), "{place}: {news} where {expected} is due");
            }
            "closed" => assert!(self.closed, "{place}: still open"),
            "open" => assert!(!self.closed, "{place}: closed"),
            "state" => {
                let state = self.adapter.query_qp(self.qp).unwrap().attr.state;
                assert_eq!(format!("state {state:?}"), expected, "{place}");
            }
            "at" => {
                let words = script::words(expected);
                let bytes = script::bytes(&words[2], &self.symbols);
                let mut found = vec![0; bytes.len()];
                self.memory.read(offset_of(&words[1]), &mut found).unwrap();
                assert_eq!(hex(&found), hex(&bytes), "{place}");
            }
            _ => {
                let expected = match expected.split_once(" inv ") {
                    Some((front, name)) => format!("{front} inv {}", self.key(name)),
                    None => expected.to_owned(),
                };
                let found = self.completions.pop_front();
                assert_eq!(found.as_deref(), Some(expected.as_str()), "{place}");
            }
        }
    }

    fn key(&self, word: &str) -> u32 {
        match word.strip_prefix('$') {
            Some(_) => match script::symbol(word, &self.symbols) {
                Symbol::Key(key) => key,
                Symbol::Address(_) => panic!("{word} is an address"),
            },
            None => u32::from_str_radix(word, 16).expect("a key in hexadecimal digits"),
        }
    }

    fn sge(&self, offset: usize, len: usize) -> Sge {
        Sge { addr: (self.memory.addr() + offset) as u64, len: len as u32, lkey: self.lkey }
    }
}

/// A place in the memory: `0`, `in`, `in+N`, `sink+N`.
fn offset_of(word: &str) -> usize {
    let (base, number) = word.split_once('+').unwrap_or((word, "0"));
    let number: usize = number.parse().expect("an offset");
    match base {
        "in" => INBOX + number,
        "sink" => SINK + number,
        _ => base.parse::<usize>().expect("a place") + number,
    }
}

/// A time in seconds, or in milliseconds if it ends in `ms`.
fn nanoseconds(text: &str) -> u64 {
    let (number, unit) = match text.strip_suffix("ms") {
        Some(number) => (number, 1_000_000),
        None => (text, 1_000_000_000),
    };
    number.parse::<u64>().expect("a number") * unit
}

fn wishes(options: &[String]) -> Wishes {
    let value = |name: &str| options.iter().find_map(|o| o.strip_prefix(name)?.strip_prefix('='));
    let has = |name: &str| options.iter().any(|option| option == name);
    let number = |name: &str| value(name).map(|text| text.parse().expect("a number"));
    let offered = value("p2p").unwrap_or(if has("p2p") { "write,read,send" } else { "" });
    let offers = |name: &str| offered.split(',').any(|offer| offer == name);
    let enhanced = Enhanced {
        ird: number("ird").unwrap_or(4),
        ord: number("ord").unwrap_or(4),
        peer_to_peer: !offered.is_empty(),
        rtr_send: offers("send"),
        rtr_write: offers("write"),
        rtr_read: offers("read"),
    };
    let revision = number("rev").map_or(2, |revision| revision as u8);
    let crc = value("crc") != Some("off");
    Wishes {
        role: if options[0] == "initiator" { Role::Initiator } else { Role::Responder },
        params: Params { revision, crc, enhanced: Some(enhanced) },
        data: value("data").unwrap_or_default().into(),
        refuse: has("refuse"),
        rfc7306: has("rfc7306"),
        speaks_first_after_ns: value("speaks").map(nanoseconds),
    }
}

/// A completion in the words of the scripts.
fn shown(wc: &Completion) -> String {
    let name = match wc.opcode {
        WcOpcode::Recv | WcOpcode::RecvRdmaWithImm => "recv",
        WcOpcode::Send => "send",
        WcOpcode::RdmaWrite => "write",
        WcOpcode::RdmaRead => "read",
        WcOpcode::FetchAdd => "add",
        WcOpcode::CompSwap => "swap",
        WcOpcode::BindMw => "window",
        _ => "other",
    };
    let len = match wc.status {
        WcStatus::Success if name == "recv" => format!(" {}", wc.byte_len),
        _ => String::new(),
    };
    let extra = match wc.extra {
        WcExtra::Invalidated(key) => format!(" inv {key}"),
        WcExtra::Imm(imm) => format!(" imm {imm:08x}"),
        WcExtra::None | WcExtra::From(_) | WcExtra::Place(_) => String::new(),
    };
    format!("{name} {} {:?}{len}{extra}", wc.wr_id, wc.status)
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn hex(bytes: &[u8]) -> String {
    bytes
        .chunks(4)
        .map(|word| word.iter().map(|b| format!("{b:02x}")).collect())
        .collect::<Vec<String>>()
        .join(" ")
}
