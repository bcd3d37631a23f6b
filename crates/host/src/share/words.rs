//! What a program and the process that has the adapter say to each other by their socket: messages of words
//! of 64 bits, in the order of bytes of the machine that both run on.

use std::net::{IpAddr, Ipv6Addr, SocketAddr, SocketAddrV6};

use quipu_inet::tcp::{Counters, KeepAlive, Mode};
use quipu_nic::{Fault, QpCap, TcpSettings};

use crate::error::EngineError;
use crate::link::socket::MAX_MESSAGE;

/// The first word of a program's first message: what it wants, and in which layout of everything.
pub(super) const HELLO: u64 = u64::from_be_bytes(*b"quipush\x06");

/// What is behind the reason for a refusal if it is that the program is of a user who is no guest.
pub(super) const NOT_FOR_YOU: u64 = 1;

/// Whether a word begins a conversation of this kind, in whatever version.
pub(super) fn is_hello(word: u64) -> bool {
    word >> 8 == HELLO >> 8
}

/// Words of the longest message.
const MAX_WORDS: usize = MAX_MESSAGE / 8;

/// How an address is written.
#[inline]
pub(super) fn address_words(address: SocketAddr) -> [u64; 3] {
    let (octets, scope) = match address {
        SocketAddr::V4(v4) => (u128::from(v4.ip().to_ipv6_mapped()), 0),
        SocketAddr::V6(v6) => (u128::from(*v6.ip()), v6.scope_id()),
    };
    let tail = u64::from(address.port()) << 32 | u64::from(scope);
    [(octets >> 64) as u64, octets as u64, tail]
}

/// Writes a message.
#[derive(Debug, Default)]
pub(super) struct Writer(Vec<u64>);

impl Writer {
    pub(super) fn word(mut self, word: impl Into<u64>) -> Self {
        self.0.push(word.into());
        self
    }

    pub(super) fn address(mut self, address: SocketAddr) -> Self {
        self.0.extend(address_words(address));
        self
    }

    pub(super) fn text(mut self, text: &str) -> Self {
        // What does not fit into a message is not worth more.
        let room = MAX_WORDS.saturating_sub(self.0.len() + 1) * 8;
        let bytes = &text.as_bytes()[..text.len().min(room)];
        self.0.push(bytes.len() as u64);
        self.0.extend(bytes.chunks(8).map(|chunk| {
            let mut word = [0; 8];
            word[..chunk.len()].copy_from_slice(chunk);
            u64::from_ne_bytes(word)
        }));
        self
    }

    pub(super) fn settings(self, settings: &TcpSettings) -> Self {
        let alive = settings.keep_alive.unwrap_or(KeepAlive { idle: 0, interval: 0, probes: 0 });
        let flags = u64::from(settings.mode == Mode::Message)
            | u64::from(settings.ecn) << 1
            | u64::from(settings.keep_alive.is_some()) << 2
            | u64::from(alive.probes) << 8
            | u64::from(settings.traffic_class) << 16
            | u64::from(settings.hop_limit.unwrap_or(0)) << 24;
        let times =
            self.word(flags).word(settings.user_timeout_ns).word(settings.connect_timeout_ns);
        times.word(alive.idle).word(alive.interval)
    }

    pub(super) fn counters(self, counters: &Counters) -> Self {
        let c = counters;
        let small = [
            c.retransmitted,
            c.timeouts,
            c.recoveries,
            c.undone,
            c.probes,
            c.out_of_window,
            c.paws,
            c.challenges,
            c.bad_ack,
            c.no_room,
            c.not_kept,
            c.path_probes,
            c.narrowed,
            c.marks,
        ];
        small.into_iter().fold(self.word(c.received).word(c.sent), Self::word)
    }

    pub(super) fn bytes(&self) -> Vec<u8> {
        self.0.iter().flat_map(|word| word.to_ne_bytes()).collect()
    }
}

/// Reads a message: `None` where it ends too early, or says what cannot be.
#[derive(Debug)]
pub(crate) struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    pub(super) fn new(bytes: &'a [u8]) -> Self {
        Self(bytes)
    }

    pub(crate) fn word(&mut self) -> Option<u64> {
        let (word, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        Some(u64::from_ne_bytes(*word))
    }

    pub(crate) fn short<T: TryFrom<u64>>(&mut self) -> Option<T> {
        T::try_from(self.word()?).ok()
    }

    pub(crate) fn address(&mut self) -> Option<SocketAddr> {
        let octets = u128::from(self.word()?) << 64 | u128::from(self.word()?);
        let tail = self.word()?;
        let port = u16::try_from(tail >> 32).ok()?;
        Some(match Ipv6Addr::from(octets).to_canonical() {
            ip @ IpAddr::V4(_) => SocketAddr::new(ip, port),
            IpAddr::V6(ip) => SocketAddrV6::new(ip, port, 0, tail as u32).into(),
        })
    }

    pub(super) fn text(&mut self) -> Option<String> {
        let len: usize = self.short()?;
        let whole = len.checked_next_multiple_of(8)?;
        let (text, rest) = self.0.split_at_checked(whole)?;
        self.0 = rest;
        Some(String::from_utf8_lossy(&text[..len]).into_owned())
    }

    pub(crate) fn counters(&mut self) -> Option<Counters> {
        Some(Counters {
            received: self.word()?,
            sent: self.word()?,
            retransmitted: self.short()?,
            timeouts: self.short()?,
            recoveries: self.short()?,
            undone: self.short()?,
            probes: self.short()?,
            out_of_window: self.short()?,
            paws: self.short()?,
            challenges: self.short()?,
            bad_ack: self.short()?,
            no_room: self.short()?,
            not_kept: self.short()?,
            path_probes: self.short()?,
            narrowed: self.short()?,
            marks: self.short()?,
        })
    }

    fn settings(&mut self) -> Option<TcpSettings> {
        let flags = self.word()?;
        let (user_timeout_ns, connect_timeout_ns) = (self.word()?, self.word()?);
        let (idle, interval, probes) = (self.word()?, self.word()?, (flags >> 8) as u8);
        let mode = if flags & 1 != 0 { Mode::Message } else { Mode::Stream };
        let keep_alive = (flags & 4 != 0).then_some(KeepAlive { idle, interval, probes });
        let (traffic_class, hops) = ((flags >> 16) as u8, (flags >> 24) as u8);
        Some(TcpSettings {
            mode,
            keep_alive,
            ecn: flags & 2 != 0,
            user_timeout_ns,
            connect_timeout_ns,
            traffic_class,
            hop_limit: (hops != 0).then_some(hops),
        })
    }
}

/// What a program wants to be done. Objects are known by serial numbers, which are those of one program and
/// are never used again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Call {
    AllocPd,
    DeallocPd {
        pd: u64,
    },
    /// Registers `len` bytes at `offset` of the arena, which requests are to name by `iova`.
    Register {
        pd: u64,
        offset: u64,
        len: u64,
        iova: u64,
        access: u32,
    },
    Deregister {
        region: u64,
    },
    CreateQp {
        pd: u64,
        udp: bool,
        cap: QpCap,
    },
    /// To INIT, RESET or ERR.
    ModifyQp {
        qp: u64,
        state: u8,
    },
    DestroyQp {
        qp: u64,
    },
    Listen {
        port: u16,
        backlog: u32,
        settings: TcpSettings,
    },
    Unlisten {
        listener: u64,
    },
    Offer {
        listener: u64,
        qp: u64,
    },
    /// From port 0: one that is free.
    Connect {
        qp: u64,
        from: u16,
        to: SocketAddr,
        settings: TcpSettings,
    },
    Close {
        qp: u64,
    },
    Abort {
        qp: u64,
    },
    Flow {
        qp: u64,
    },
    Bind {
        qp: u64,
        port: u16,
    },
    Counters {
        qp: u64,
    },
    /// With hop limit 0: the usual one.
    Carry {
        qp: u64,
        traffic_class: u8,
        hop_limit: u8,
    },
}

impl Call {
    pub(super) fn encode(&self) -> Vec<u8> {
        let write = |kind: u64| Writer::default().word(kind);
        let message = match *self {
            Self::AllocPd => write(1),
            Self::DeallocPd { pd } => write(2).word(pd),
            Self::Register { pd, offset, len, iova, access } => {
                write(3).word(pd).word(offset).word(len).word(iova).word(access)
            }
            Self::Deregister { region } => write(4).word(region),
            Self::CreateQp { pd, udp, cap } => {
                let queues =
                    write(5).word(pd).word(udp).word(cap.max_send_wr).word(cap.max_recv_wr);
                queues.word(cap.max_send_sge).word(cap.max_recv_sge).word(cap.max_inline_data)
            }
            Self::ModifyQp { qp, state } => write(6).word(qp).word(state),
            Self::DestroyQp { qp } => write(7).word(qp),
            Self::Listen { port, backlog, settings } => {
                write(8).word(port).word(backlog).settings(&settings)
            }
            Self::Unlisten { listener } => write(9).word(listener),
            Self::Offer { listener, qp } => write(10).word(listener).word(qp),
            Self::Connect { qp, from, to, settings } => {
                write(11).word(qp).word(from).address(to).settings(&settings)
            }
            Self::Close { qp } => write(12).word(qp),
            Self::Abort { qp } => write(13).word(qp),
            Self::Flow { qp } => write(14).word(qp),
            Self::Bind { qp, port } => write(15).word(qp).word(port),
            Self::Counters { qp } => write(16).word(qp),
            Self::Carry { qp, traffic_class, hop_limit } => {
                write(17).word(qp).word(traffic_class).word(hop_limit)
            }
        };
        message.bytes()
    }

    pub(super) fn decode(bytes: &[u8]) -> Option<Self> {
        let mut message = Reader::new(bytes);
        let m = &mut message;
        let call = match m.word()? {
            1 => Self::AllocPd,
            2 => Self::DeallocPd { pd: m.word()? },
            3 => Self::Register {
                pd: m.word()?,
                offset: m.word()?,
                len: m.word()?,
                iova: m.word()?,
                access: m.short()?,
            },
            4 => Self::Deregister { region: m.word()? },
            5 => Self::CreateQp {
                pd: m.word()?,
                udp: m.word()? != 0,
                cap: QpCap {
                    max_send_wr: m.short()?,
                    max_recv_wr: m.short()?,
                    max_send_sge: m.short()?,
                    max_recv_sge: m.short()?,
                    max_inline_data: m.short()?,
                },
            },
            6 => Self::ModifyQp { qp: m.word()?, state: m.short()? },
            7 => Self::DestroyQp { qp: m.word()? },
            8 => Self::Listen { port: m.short()?, backlog: m.short()?, settings: m.settings()? },
            9 => Self::Unlisten { listener: m.word()? },
            10 => Self::Offer { listener: m.word()?, qp: m.word()? },
            11 => Self::Connect {
                qp: m.word()?,
                from: m.short()?,
                to: m.address()?,
                settings: m.settings()?,
            },
            12 => Self::Close { qp: m.word()? },
            13 => Self::Abort { qp: m.word()? },
            14 => Self::Flow { qp: m.word()? },
            15 => Self::Bind { qp: m.word()?, port: m.short()? },
            16 => Self::Counters { qp: m.word()? },
            17 => Self::Carry { qp: m.word()?, traffic_class: m.short()?, hop_limit: m.short()? },
            _ => return None,
        };
        message.0.is_empty().then_some(call)
    }
}

/// The answer to a call: what it yields, or why it is refused.
pub(super) fn answer(outcome: Result<Writer, EngineError>) -> Writer {
    let error = match outcome {
        Ok(yields) => {
            let mut message = Writer::default().word(0u64);
            message.0.extend(yields.0);
            return message;
        }
        Err(error) => error,
    };
    let code: u64 = match &error {
        EngineError::Fault(Fault::NoSuchObject) => 1,
        EngineError::Fault(Fault::Busy) => 2,
        EngineError::Fault(Fault::WrongState) => 3,
        EngineError::Fault(Fault::QueueFull) => 4,
        _ => 5,
    };
    let errno = match &error {
        EngineError::Fault(Fault::Exhausted(_)) => libc::ENOMEM,
        EngineError::Fault(Fault::Unsupported(_)) => libc::EOPNOTSUPP,
        EngineError::Fault(Fault::Taken(_)) => libc::EADDRINUSE,
        EngineError::Fault(Fault::NoRoute(_)) => libc::ENETUNREACH,
        EngineError::System { source, .. } => source.raw_os_error().unwrap_or(libc::EIO),
        _ => libc::EINVAL,
    };
    Writer::default().word(code).word(errno.unsigned_abs()).text(&error.to_string())
}

/// What an answer yields. `None`: it is none.
pub(super) fn outcome<'a>(answer: &'a [u8]) -> Option<Result<Reader<'a>, EngineError>> {
    let mut message = Reader::new(answer);
    let fault = match message.word()? {
        0 => return Some(Ok(message)),
        1 => Fault::NoSuchObject,
        2 => Fault::Busy,
        3 => Fault::WrongState,
        4 => Fault::QueueFull,
        _ => {
            let (errno, words) = (message.short()?, message.text()?);
            return Some(Err(EngineError::RefusedElsewhere { errno, words }));
        }
    };
    Some(Err(fault.into()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn calls() -> Vec<Call> {
        let settings = TcpSettings {
            mode: Mode::Message,
            keep_alive: Some(KeepAlive { idle: 5, interval: 6, probes: 7 }),
            ecn: true,
            user_timeout_ns: u64::MAX,
            connect_timeout_ns: 1,
            traffic_class: 0xb8,
            hop_limit: Some(255),
        };
        let plain = TcpSettings::default();
        let cap = QpCap {
            max_send_wr: 1,
            max_recv_wr: 2,
            max_send_sge: 3,
            max_recv_sge: 4,
            max_inline_data: u32::MAX,
        };
        let to = "[fe80::1%7]:65535".parse().unwrap();
        vec![
            Call::AllocPd,
            Call::DeallocPd { pd: 1 },
            Call::Register { pd: 1, offset: 2, len: 3, iova: u64::MAX, access: 5 },
            Call::Deregister { region: 9 },
            Call::CreateQp { pd: 1, udp: true, cap },
            Call::ModifyQp { qp: 1, state: 6 },
            Call::DestroyQp { qp: 2 },
            Call::Listen { port: 80, backlog: 4, settings },
            Call::Listen { port: 80, backlog: 4, settings: plain },
            Call::Unlisten { listener: 3 },
            Call::Offer { listener: 3, qp: 1 },
            Call::Connect { qp: 1, from: 0, to, settings },
            Call::Connect { qp: 1, from: 7, to: "10.9.0.1:80".parse().unwrap(), settings },
            Call::Close { qp: 1 },
            Call::Abort { qp: 1 },
            Call::Flow { qp: 1 },
            Call::Bind { qp: 1, port: 53 },
            Call::Counters { qp: 1 },
            Call::Carry { qp: 1, traffic_class: 0xb8, hop_limit: 255 },
        ]
    }

    #[test]
    fn calls_survive_the_way_and_nothing_shorter_or_longer_is_one() {
        for call in calls() {
            let bytes = call.encode();
            assert_eq!(Call::decode(&bytes), Some(call));
            for len in 0..bytes.len() {
                assert_eq!(Call::decode(&bytes[..len]), None, "{call:?}");
            }
            assert_eq!(Call::decode(&[&bytes[..], &[0; 8]].concat()), None);
        }
        assert_eq!(Call::decode(&99u64.to_ne_bytes()), None);
    }

    #[test]
    fn counters_survive_the_way() {
        let counters = Counters { received: u64::MAX, sent: 1, marks: 7, ..Counters::default() };
        let bytes = Writer::default().counters(&counters).bytes();
        assert_eq!(Reader::new(&bytes).counters(), Some(counters));
        assert_eq!(Reader::new(&bytes[8..]).counters(), None);
    }

    #[test]
    fn answers_say_what_was_refused_and_why() {
        let yields = answer(Ok(Writer::default().word(7u64).text("nine bytes"))).bytes();
        let mut read = outcome(&yields).unwrap().unwrap();
        assert_eq!((read.word(), read.text().as_deref()), (Some(7), Some("nine bytes")));
        let bytes = answer(Err(Fault::Busy.into())).bytes();
        let busy = outcome(&bytes).unwrap().unwrap_err();
        assert!(matches!(busy, EngineError::Fault(Fault::Busy)));
        let bytes = answer(Err(Fault::Exhausted("queue pairs").into())).bytes();
        let Err(EngineError::RefusedElsewhere { errno, words }) = outcome(&bytes).unwrap() else {
            panic!("it was refused");
        };
        assert_eq!((errno, words.as_str()), (libc::ENOMEM, "the adapter has no more queue pairs"));
        assert!(outcome(&[]).is_none() && outcome(&[9; 8]).is_none());
        // A length beyond the message.
        let lie = Writer::default().word(5u64).word(1u64).word(u64::MAX).bytes();
        assert!(outcome(&lie).is_none());
    }
}
