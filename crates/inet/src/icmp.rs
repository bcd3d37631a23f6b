//! ICMP (RFC 4443, RFC 792): echoes are answered, packets that nobody here takes are refused, and what
//! routers and peers say about packets of this end becomes a [`Report`].
//!
//! Everything that goes out is limited (RFC 4443 2.4 f, RFC 1812 4.3.2.8): by tokens that come back with
//! time, and by the octets that wait to be sent.

use std::collections::VecDeque;
use std::net::IpAddr;

use quipu_wire::ipv6_extension::{FIRST_FIELD, Walk, problem, walk};
use quipu_wire::ndp;
use quipu_wire::tcp::SeqNumber;
use quipu_wire::{WireError, icmpv4, icmpv6, ipv4, ipv6};

use crate::tcp::Secret;
use crate::tcp::hash::{Purpose, of_count};

/// Protocol number of ICMP for IPv4.
pub const PROTOCOL_V4: u8 = 1;

const TCP: u8 = 6;
const UDP: u8 = 17;
const SECOND: u64 = 1_000_000_000;

/// Tokens for errors in a second, and at once (RFC 4443 2.4 f).
pub const ERRORS: u64 = 100;
/// An error takes one to so many of them. If each took one, a stranger who has this end refuse packets with
/// made-up senders could count how many were refused by how many are left for itself, and so find out which
/// ports are open to others.
pub const MOST_TOKENS: u64 = 3;
/// Answers to echoes in a second, and at once.
pub const ECHOES: u64 = 1_000;
/// Octets of messages that wait.
pub const MAX_WAITING: usize = 128 << 10;
/// Octets of a packet that an error quotes: so that it fits what everybody takes (RFC 4443 2.4 c, RFC 1812
/// 4.3.2.3).
const QUOTED_V6: usize = ipv6::MIN_MTU as usize - ipv6::LEN - icmpv6::LEN;
/// See [`QUOTED_V6`].
const QUOTED_V4: usize = 576 - ipv4::LEN - icmpv4::LEN;

/// What a report is about: a packet of this end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Quoted {
    /// A segment.
    Tcp {
        /// This end's port.
        source: u16,
        /// The peer's port.
        destination: u16,
        /// Its sequence number, by which it is seen whether it can be on the way (RFC 5927 4.1).
        seq: SeqNumber,
    },
    /// A datagram.
    Udp {
        /// This end's port.
        source: u16,
        /// The peer's port.
        destination: u16,
    },
}

/// What has happened to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Trouble {
    /// A link takes packets of this size only (RFC 8201, RFC 1191).
    TooBig {
        /// In octets.
        mtu: u32,
    },
    /// It did not get there; the next one may (RFC 9293 3.9.2.2: soft).
    Soft,
    /// The peer, or somebody in between, does not want it (RFC 9293 3.9.2.2: hard).
    Hard,
}

/// What somebody says about a packet of this end. Nothing proves that it is true.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Report {
    /// The packet's sender: this end, if the report is true.
    pub source: IpAddr,
    /// Where it was going.
    pub destination: IpAddr,
    /// Which it was.
    pub quoted: Quoted,
    /// What has happened to it.
    pub trouble: Trouble,
}

/// What a message was.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(clippy::large_enum_variant, reason = "a value of the stack's edge; nothing keeps it")]
pub enum Arrived {
    /// It was for this module, or is not wanted.
    Nothing,
    /// It is about a packet of this end.
    Report(Report),
    /// It is for [`crate::neighbour`].
    Discovery(ndp::Repr),
}

/// Why a packet is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cause {
    /// Nobody is at its UDP port.
    Port,
    /// Nobody here speaks its protocol: `at` is where the number stands that said so, seen from the end of
    /// the IPv6 header. Of no meaning for IPv4.
    Protocol {
        /// The place.
        at: i32,
    },
    /// Its headers make no sense (IPv6): see [`quipu_wire::ipv6_extension::Refusal`].
    Problem {
        /// The code.
        code: u8,
        /// Where, seen from the end of the IPv6 header.
        at: i32,
        /// Also if it went to a group.
        even_to_group: bool,
    },
}

/// A message to be sent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Message {
    /// An address of this end.
    pub source: IpAddr,
    /// To whom.
    pub destination: IpAddr,
    /// With its checksum.
    pub bytes: Vec<u8>,
}

/// What was counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Messages that are not legal, or that nobody reads.
    pub ignored: u64,
    /// Echoes answered.
    pub echoes: u64,
    /// Packets refused.
    pub errors: u64,
    /// Answers and errors that were too many.
    pub limited: u64,
}

/// Tokens that come back with time.
#[derive(Clone, Debug)]
struct Bucket {
    /// In a second, and at most.
    rate: u64,
    /// In billionths.
    tokens: u64,
    at: u64,
}

impl Bucket {
    fn new(rate: u64) -> Self {
        Self { rate, tokens: rate * SECOND, at: 0 }
    }

    /// Takes `cost` tokens, if there are so many.
    fn take(&mut self, now: u64, cost: u64) -> bool {
        let passed = now.saturating_sub(self.at).min(SECOND);
        self.tokens = (self.tokens + passed * self.rate).min(self.rate * SECOND);
        self.at = self.at.max(now);
        let enough = self.tokens >= cost * SECOND;
        self.tokens -= if enough { cost * SECOND } else { 0 };
        enough
    }
}

/// What this end says, and how much of it.
#[derive(Clone, Debug)]
pub struct Icmp {
    secret: Secret,
    errors: Bucket,
    echoes: Bucket,
    waiting: VecDeque<Message>,
    octets: usize,
    counters: Counters,
}

impl Icmp {
    /// The secret decides what errors cost.
    pub fn new(secret: Secret) -> Self {
        Self {
            secret,
            errors: Bucket::new(ERRORS),
            echoes: Bucket::new(ECHOES),
            waiting: VecDeque::new(),
            octets: 0,
            counters: Counters::default(),
        }
    }

    /// What was counted.
    pub fn counters(&self) -> &Counters {
        &self.counters
    }

    /// A message has come to an address of this end.
    pub fn handle_v4(&mut self, now: u64, header: &ipv4::Repr, bytes: &[u8]) -> Option<Report> {
        use icmpv4::Repr;
        let message = icmpv4::Repr::parse(bytes);
        if let Ok(Repr::EchoRequest { identifier, number, data }) = message {
            let reply = Repr::EchoReply { identifier, number, data };
            let (source, destination) = (header.destination.into(), header.source.into());
            self.answer_echo(now, source, destination, reply.wire_len(), |out| {
                reply.emit(out);
            });
            return None;
        }
        let report = message.and_then(|message| report_v4(&message));
        report.inspect_err(|_| self.counters.ignored += 1).ok()
    }

    /// A message has come, to an address of this end or to a group.
    pub fn handle_v6(&mut self, now: u64, header: &ipv6::Repr, bytes: &[u8]) -> Arrived {
        use icmpv6::Repr;
        let report = match Repr::parse(header.source, header.destination, bytes) {
            Ok(Repr::Discovery(message)) => return Arrived::Discovery(message),
            // RFC 4443 4.2 would answer a group as well, one echo with as many answers as it has members.
            Ok(Repr::EchoRequest { identifier, number, data })
                if !header.destination.is_multicast() =>
            {
                let reply = Repr::EchoReply { identifier, number, data };
                let (from, to) = (header.destination, header.source);
                self.answer_echo(now, from.into(), to.into(), reply.wire_len(), |out| {
                    reply.emit(from, to, out);
                });
                return Arrived::Nothing;
            }
            message => message.and_then(|message| report_v6(&message)),
        };
        report.inspect_err(|_| self.counters.ignored += 1).map_or(Arrived::Nothing, Arrived::Report)
    }

    fn answer_echo(
        &mut self,
        now: u64,
        source: IpAddr,
        destination: IpAddr,
        len: usize,
        emit: impl FnOnce(&mut [u8]),
    ) {
        let room = self.octets + len <= MAX_WAITING;
        if is_one_node(destination) && room && self.echoes.take(now, 1) {
            self.counters.echoes += 1;
            self.keep(source, destination, len, emit);
        } else {
            self.counters.limited += 1;
        }
    }

    fn keep(
        &mut self,
        source: IpAddr,
        destination: IpAddr,
        len: usize,
        emit: impl FnOnce(&mut [u8]),
    ) {
        let mut bytes = vec![0; len];
        emit(&mut bytes);
        self.octets += len;
        self.waiting.push_back(Message { source, destination, bytes });
    }

    /// Refuses a packet: its sender is told, unless RFC 4443 2.4 e or RFC 1122 3.2.2 says otherwise. `packet`
    /// begins with the IP header; `to_station` is false if the link carried it to several stations; `own` is
    /// the address to speak from if the packet went to a group.
    pub fn refuse(
        &mut self,
        now: u64,
        packet: &[u8],
        to_station: bool,
        own: Option<IpAddr>,
        cause: Cause,
    ) {
        match packet.first().map(|first| first >> 4) {
            Some(6) => self.refuse_v6(now, packet, to_station, own, cause),
            Some(4) if to_station => self.refuse_v4(now, packet, cause),
            _ => {}
        }
    }

    fn refuse_v6(
        &mut self,
        now: u64,
        packet: &[u8],
        to_station: bool,
        own: Option<IpAddr>,
        cause: Cause,
    ) {
        let Ok((header, at)) = ipv6::Repr::parse_quoted(packet) else { return };
        let quoted = &packet[..packet.len().min(QUOTED_V6)];
        let pointer = |at: i32| (ipv6::LEN as i32 + at) as u32;
        let (message, even_to_group) = match cause {
            Cause::Port => {
                let code = icmpv6::unreachable::PORT;
                (icmpv6::Repr::Unreachable { code, packet: quoted }, false)
            }
            Cause::Protocol { at } => {
                let (code, pointer) = (problem::UNKNOWN_NEXT_HEADER, pointer(at));
                (icmpv6::Repr::ParameterProblem { code, pointer, packet: quoted }, false)
            }
            Cause::Problem { code, at, even_to_group } => {
                let pointer = pointer(at);
                (icmpv6::Repr::ParameterProblem { code, pointer, packet: quoted }, even_to_group)
            }
        };
        // RFC 4443 2.4 e: nothing in answer to an error, to a group (but for the cause that says so), or to
        // what is not one node.
        let group = header.destination.is_multicast() || !to_station;
        let about_error = match walk(header.next_header, &packet[at..], false) {
            Ok(Walk::Upper { protocol: icmpv6::PROTOCOL, at: upper, .. }) => {
                packet.get(at + upper).is_none_or(|kind| *kind < 128 || *kind == 137)
            }
            _ => false,
        };
        let source = if header.destination.is_multicast() {
            own
        } else {
            Some(IpAddr::V6(header.destination))
        };
        let Some(IpAddr::V6(source)) = source else { return };
        if (group && !even_to_group) || about_error || !is_one_node(header.source.into()) {
            return;
        }
        let len = message.wire_len();
        if self.may_refuse(now, len) {
            self.keep(source.into(), header.source.into(), len, |out| {
                message.emit(source, header.source, out);
            });
        }
    }

    fn refuse_v4(&mut self, now: u64, packet: &[u8], cause: Cause) {
        let Ok((header, _)) = ipv4::Repr::parse_quoted(packet) else { return };
        let code = match cause {
            Cause::Port => icmpv4::unreachable::PORT,
            Cause::Protocol { .. } => icmpv4::unreachable::PROTOCOL,
            Cause::Problem { .. } => return,
        };
        // RFC 1122 3.2.2: nothing in answer to ICMP (an echo is never refused), to groups, to a part other
        // than the first, or to what is not one node.
        let group = header.destination.is_multicast() || header.destination.is_broadcast();
        let silent = group || header.protocol == PROTOCOL_V4 || header.fragment_offset > 0;
        if silent || !is_one_node(header.source.into()) {
            return;
        }
        let quoted = &packet[..packet.len().min(QUOTED_V4)];
        let message = icmpv4::Repr::Unreachable { code, next_mtu: 0, packet: quoted };
        let len = message.wire_len();
        if self.may_refuse(now, len) {
            self.keep(header.destination.into(), header.source.into(), len, |out| {
                message.emit(out);
            });
        }
    }

    fn may_refuse(&mut self, now: u64, len: usize) -> bool {
        let drawn = of_count(self.secret, Purpose::Refusal, self.counters.errors);
        let cost = 1 + drawn % MOST_TOKENS;
        let may = self.octets + len <= MAX_WAITING && self.errors.take(now, cost);
        self.counters.errors += u64::from(may);
        self.counters.limited += u64::from(!may);
        may
    }

    /// Whether a message waits to be sent.
    pub fn wants_transmit(&self) -> bool {
        !self.waiting.is_empty()
    }

    /// The next message to be sent.
    pub fn poll_transmit(&mut self) -> Option<Message> {
        let message = self.waiting.pop_front()?;
        self.octets -= message.bytes.len();
        Some(message)
    }

    /// The newest message is not to be sent.
    pub fn withdraw(&mut self) {
        if let Some(message) = self.waiting.pop_back() {
            self.octets -= message.bytes.len();
        }
    }
}

/// RFC 4443 2.4 e.6, RFC 1122 3.2.2: an address that stands for one node.
fn is_one_node(address: IpAddr) -> bool {
    let broadcast = matches!(address, IpAddr::V4(address) if address.is_broadcast());
    !address.is_unspecified() && !address.is_multicast() && !broadcast
}

/// What stands at the front of the upper layer of a quoted packet: eight octets are all that RFC 792
/// promises.
fn quoted(protocol: u8, upper: &[u8]) -> Result<Quoted, WireError> {
    let (need, have) = (8, upper.len());
    let [a, b, c, d, seq @ ..] =
        *upper.first_chunk::<8>().ok_or(WireError::Truncated { need, have })?;
    let (source, destination) = (u16::from_be_bytes([a, b]), u16::from_be_bytes([c, d]));
    match protocol {
        TCP => {
            let seq = SeqNumber(u32::from_be_bytes(seq));
            Ok(Quoted::Tcp { source, destination, seq })
        }
        UDP => Ok(Quoted::Udp { source, destination }),
        _ => Err(WireError::OutOfRange("protocol")),
    }
}

fn report_v4(message: &icmpv4::Repr<'_>) -> Result<Report, WireError> {
    use icmpv4::unreachable as code;
    let (trouble, packet) = match *message {
        icmpv4::Repr::Unreachable { code: code::FRAGMENTATION_NEEDED, next_mtu, packet } => {
            let mtu = match next_mtu {
                0 => plateau(packet)?,
                mtu => mtu.into(),
            };
            (Trouble::TooBig { mtu }, packet)
        }
        // RFC 9293 3.9.2.2 (SHLD-26). Of 4 the rest is path MTU discovery.
        icmpv4::Repr::Unreachable { code: code::PROTOCOL | code::PORT, packet, .. } => {
            (Trouble::Hard, packet)
        }
        // RFC 9293 3.9.2.2 (SHLD-25, MUST-56).
        icmpv4::Repr::Unreachable { packet, .. }
        | icmpv4::Repr::TimeExceeded { packet, .. }
        | icmpv4::Repr::ParameterProblem { packet, .. } => (Trouble::Soft, packet),
        icmpv4::Repr::EchoRequest { .. } | icmpv4::Repr::EchoReply { .. } => {
            return Err(WireError::OutOfRange("kind"));
        }
    };
    let (header, at) = ipv4::Repr::parse_quoted(packet)?;
    if header.fragment_offset > 0 {
        return Err(WireError::OutOfRange("fragment"));
    }
    let quoted = quoted(header.protocol, &packet[at..])?;
    let (source, destination) = (header.source.into(), header.destination.into());
    Ok(Report { source, destination, quoted, trouble })
}

/// What a router that does not say it may mean (RFC 1191 5, 7): the next size below that of the packet.
fn plateau(packet: &[u8]) -> Result<u32, WireError> {
    const PLATEAUS: [u32; 8] = [32_000, 17_914, 8_166, 4_352, 2_002, 1_492, 1_006, 576];
    let (header, at) = ipv4::Repr::parse_quoted(packet)?;
    let len = at as u32 + u32::from(header.payload_len);
    Ok(PLATEAUS.into_iter().find(|plateau| *plateau < len).unwrap_or(ipv4::MIN_MTU))
}

fn report_v6(message: &icmpv6::Repr<'_>) -> Result<Report, WireError> {
    use icmpv6::unreachable as code;
    let (trouble, packet) = match *message {
        icmpv6::Repr::PacketTooBig { mtu, packet } => (Trouble::TooBig { mtu }, packet),
        // RFC 5461 2.2: what is hard, and what is soft.
        icmpv6::Repr::Unreachable { code: code::PROHIBITED | code::PORT, packet } => {
            (Trouble::Hard, packet)
        }
        icmpv6::Repr::ParameterProblem { code: problem::UNKNOWN_NEXT_HEADER, packet, .. } => {
            (Trouble::Hard, packet)
        }
        icmpv6::Repr::Unreachable { packet, .. }
        | icmpv6::Repr::TimeExceeded { packet, .. }
        | icmpv6::Repr::ParameterProblem { packet, .. } => (Trouble::Soft, packet),
        _ => return Err(WireError::OutOfRange("kind")),
    };
    let (header, at) = ipv6::Repr::parse_quoted(packet)?;
    let (protocol, at) = upper(header.next_header, packet, at, false)?;
    let quoted = quoted(protocol, &packet[at..])?;
    let (source, destination) = (header.source.into(), header.destination.into());
    Ok(Report { source, destination, quoted, trouble })
}

/// The upper layer of a quoted packet, and where it begins. Of a packet in parts only the first has it.
fn upper(first: u8, packet: &[u8], at: usize, of_part: bool) -> Result<(u8, usize), WireError> {
    match walk(first, &packet[at..], of_part) {
        Ok(Walk::Upper { protocol, at: more, .. }) => Ok((protocol, at + more)),
        Ok(Walk::Fragment { fragment, at: more }) if fragment.offset == 0 => {
            upper(fragment.next_header, packet, at + more, true)
        }
        _ => Err(WireError::OutOfRange("quoted packet")),
    }
}

/// Where the first Next Header field stands: for [`Cause::Protocol`] without extension headers.
pub const PROTOCOL_AT: i32 = FIRST_FIELD;
