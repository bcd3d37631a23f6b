//! UDP queue pairs: bound to a port, each message one datagram to whomever its request names.
//!
//! A send is done when its datagram is written. One to a neighbour that is not known yet waits for it (RFC
//! 4861 7.2.2), and those behind it go on; if the neighbour cannot be found it is lost, as datagrams may be.
//! Requests complete in their order all the same, so one that waits in vain, as far as can be told, gives way
//! before it holds up many.
//!
//! One that is longer than a packet of its path goes in parts, each made of the request's memory when the
//! link has room for it. No other datagram begins before it ends: a receiver keeps the parts of few.

use std::collections::VecDeque;
use std::net::{IpAddr, SocketAddr};

use quipu_inet::stack::{
    BindError, Carriage, Datagram, DatagramError, Departure, Parts, Payload, Stack, UdpId,
};
use quipu_wire::checksum::{Sum, sum};

use super::{Inet, Sender, Source, set};
use crate::adapter::{Adapter, Hub};
use crate::error::Fault;
use crate::fate::{self, Met};
use crate::probe::{Probe, Stage};
use crate::qp::{Path, Qp};
use crate::requester;
use crate::responder::{self, Finish, Refusal};
use crate::transmit::frames::Turn;
use crate::transmit::{lanes, marking};
use crate::types::{QpId, QpState, WcExtra, WcOpcode, WcStatus};

/// Octets that are summed at a time: they are read again soon, and are to be in a cache then. Even.
const SUMMED: usize = 8 << 10;

/// Requests of a queue pair in [doubt](UdpPath::doubt), half of its queue at most, that may be without a
/// completion because the oldest of them waits for a neighbour: with one more that is lost. Strangers make
/// a program that answers send to neighbours that nobody is, and it needs its requests back for others.
const MOST_IN_PROGRESS: u32 = 8;
/// What a neighbour that was looked for in vain adds to the doubt, and the most of it. One that is found
/// takes one away.
const LOST_COUNTS: u8 = 4;
const MOST_DOUBT: u8 = 64;

/// What a queue pair of type UDP has in addition to its queues.
#[derive(Debug, Default)]
pub(crate) struct UdpPath {
    socket: Option<UdpId>,
    /// Whether it stands among those with something to send.
    listed: bool,
    /// Whether it stands among those that wait for a neighbour.
    awaits: bool,
    /// Above zero while its neighbours have mostly been nobody of late.
    doubt: u8,
    /// How its datagrams are carried.
    pub(super) carriage: Carriage,
    /// Its requests in progress that are not done.
    held: VecDeque<Held>,
}

/// A request in progress that is not done.
#[derive(Debug)]
struct Held {
    position: u32,
    what: Hold,
}

#[derive(Debug)]
enum Hold {
    /// It waits for this next hop.
    For(IpAddr),
    /// It waits for its turn; with how far it has got, if it goes in parts.
    Turn(Option<Parts>),
    /// It fails with this when those before it are complete.
    Failed(WcStatus),
}

impl UdpPath {
    fn is_due(&self) -> bool {
        self.held.iter().any(|held| matches!(held.what, Hold::Turn(_)))
    }

    /// The request whose turn it is of those that had to wait.
    fn take_due(&mut self) -> Option<(u32, Option<Parts>)> {
        let index = self.held.iter().position(|held| matches!(held.what, Hold::Turn(_)))?;
        match self.held.remove(index)? {
            Held { position, what: Hold::Turn(parts) } => Some((position, parts)),
            _ => None,
        }
    }

    /// Takes the request at `position` out, if it waits for a neighbour that `is` true of.
    fn take_waiting(&mut self, position: u32, is: impl Fn(IpAddr) -> bool) -> bool {
        let waits = |held: &Held| {
            held.position == position && matches!(held.what, Hold::For(hop) if is(hop))
        };
        let index = self.held.iter().position(waits);
        index.and_then(|index| self.held.remove(index)).is_some()
    }
}

impl<P: Probe> Adapter<P> {
    /// Binds a queue pair to a UDP port of all addresses, 0 for one that is free, and takes it to RTS if it
    /// was in RESET or INIT. Answers with the port.
    ///
    /// # Errors
    /// The port is in use, none is free, the adapter has no packet link, or the queue pair is of another
    /// type, bound already, or in error.
    pub fn udp_bind(&mut self, id: QpId, port: u16) -> Result<u16, Fault> {
        let (qp, hub) = self.qp_and_hub(id).ok_or(Fault::NoSuchObject)?;
        let Path::Udp(path) = &mut qp.path else {
            return Err(Fault::Invalid("the queue pair is not of type UDP"));
        };
        if path.socket.is_some() || qp.state == QpState::Err {
            return Err(Fault::WrongState);
        }
        let inet = hub.attached()?;
        let (socket, port) = inet.stack.bind(port).map_err(|error| match error {
            BindError::InUse => Fault::Taken("the port is already in use"),
            BindError::NoPort => Fault::Exhausted("UDP ports"),
        })?;
        set(&mut inet.bound, socket.index(), Some((socket, id)));
        path.socket = Some(socket);
        if matches!(qp.state, QpState::Reset | QpState::Init) {
            qp.state = QpState::Rts;
        }
        hub.counters.changes += 1;
        Ok(port)
    }

    /// A next hop has become known, or cannot be found.
    pub(super) fn neighbour(&mut self, next_hop: IpAddr, found: bool) {
        self.neighbours_like(|hop| hop == next_hop, found);
    }

    /// Something has become of more next hops than could be told of: whoever waits for one asks anew.
    pub(super) fn neighbours(&mut self) {
        self.neighbours_like(|_| true, true);
    }

    fn neighbours_like(&mut self, is: impl Fn(IpAddr) -> bool, found: bool) {
        let Some(inet) = &mut self.hub.inet else { return };
        for id in std::mem::take(&mut inet.unresolved) {
            let Some((qp, hub)) = self.qp_and_hub(id) else { continue };
            note(qp, &is, found);
            if found {
                release(qp, &is)
            } else {
                lose(qp, hub, &is)
            }
            let (Path::Udp(path), Some(inet)) = (&mut qp.path, &mut hub.inet) else { continue };
            path.awaits = path.held.iter().any(|held| matches!(held.what, Hold::For(_)));
            if path.awaits {
                inet.unresolved.push(id);
            }
            kick(qp, hub);
        }
    }
}

/// What has become of a neighbour says what is to be expected of the next.
fn note(qp: &mut Qp, is: impl Fn(IpAddr) -> bool, found: bool) {
    let Path::Udp(path) = &mut qp.path else { return };
    if path.held.iter().any(|held| matches!(held.what, Hold::For(hop) if is(hop))) {
        path.doubt = match found {
            true => path.doubt.saturating_sub(1),
            false => path.doubt.saturating_add(LOST_COUNTS).min(MOST_DOUBT),
        };
    }
}

/// Those that wait for such a neighbour have their turn.
fn release(qp: &mut Qp, is: impl Fn(IpAddr) -> bool) {
    let Path::Udp(path) = &mut qp.path else { return };
    for held in &mut path.held {
        if matches!(held.what, Hold::For(hop) if is(hop)) {
            held.what = Hold::Turn(None);
        }
    }
}

/// Those that wait for such a neighbour are lost.
fn lose<P: Probe>(qp: &mut Qp, hub: &mut Hub<P>, is: impl Fn(IpAddr) -> bool) {
    for position in qp.sq.in_progress() {
        if let Path::Udp(path) = &mut qp.path
            && path.take_waiting(position, &is)
        {
            qp.sq.wqe_mut(position).answered = true;
        }
    }
    settle(qp, hub);
}

/// Whether a request of a UDP queue pair can be sent at all.
///
/// # Errors
/// What is wrong with it.
pub(crate) fn check<P>(hub: &Hub<P>, to: SocketAddr, len: u64) -> Result<(), Fault> {
    if hub.inet.is_none() {
        return Err(Fault::Unsupported("the adapter has no packet link"));
    }
    check_datagram(to, len)
}

/// Whether a datagram of `len` octets to somebody is one that any adapter can send.
///
/// # Errors
/// What is wrong with it.
pub fn check_datagram(to: SocketAddr, len: u64) -> Result<(), Fault> {
    if len > Stack::max_datagram(to.ip()) as u64 {
        return Err(Fault::Invalid(
            "longer than a datagram can be (65507 bytes; over IPv6, 65527)",
        ));
    }
    if to.port() == 0 {
        return Err(Fault::Invalid("a datagram cannot go to port 0"));
    }
    Ok(())
}

/// Puts a queue pair among those with something to send.
#[inline]
pub(crate) fn kick<P>(qp: &mut Qp, hub: &mut Hub<P>) {
    if let (Path::Udp(path), Some(inet)) = (&mut qp.path, &mut hub.inet)
        && !std::mem::replace(&mut path.listed, true)
    {
        match path.held.front() {
            Some(Held { what: Hold::Turn(Some(_)), .. }) => inet.datagrams.push_front(qp.id),
            _ => inet.datagrams.push_back(qp.id),
        }
    }
}

/// Writes the next datagram of a queue pair whose turn it is, or a part of it.
pub(crate) fn transmit<P: Probe>(qp: &mut Qp, hub: &mut Hub<P>, out: &mut [u8]) -> Turn {
    let Path::Udp(path) = &mut qp.path else { return Turn::Again };
    path.listed = false;
    let Some(socket) = path.socket else { return Turn::Again };
    let due = path.take_due();
    let Some((position, begun)) = due.or_else(|| Some((begin(qp, hub)?, None))) else {
        return Turn::Again;
    };
    let turn = compose(qp, hub, (socket, position, begun), out).unwrap_or_else(|stop| {
        refuse(qp, hub, position, stop);
        Turn::Again
    });
    give_way(qp, hub);
    let is_due = matches!(&qp.path, Path::Udp(path) if path.is_due());
    let may_go_on = requester::may_begin(qp);
    if hub.qos.is_some() && !may_go_on {
        lanes::end_turn(qp, hub);
    }
    // One without a turn is called when it has one.
    let waits = may_go_on && !is_due && lanes::is_parked(qp);
    if (is_due || may_go_on) && !waits {
        kick(qp, hub);
    }
    turn
}

/// The next request is in progress from now on, if it may begin.
fn begin<P: Probe>(qp: &mut Qp, hub: &mut Hub<P>) -> Option<u32> {
    if !requester::may_begin(qp) {
        return None;
    }
    if !lanes::has_turn(qp, hub) {
        lanes::park(qp, hub);
        return None;
    }
    let position = qp.sq.next;
    match fate::meet(qp, hub, qp.sq.wqe(position).flags) {
        Met::Nothing => {}
        Met::Wait => return None,
        Met::Failure(status) => {
            stop(qp, hub, position, status);
            return None;
        }
    }
    lanes::charge(qp, hub, qp.sq.wqe(position).length);
    let started = qp.requester.started;
    let wqe = qp.sq.wqe_mut(position);
    (wqe.first_request, wqe.end_request) = (started, started);
    requester::transmitted(qp);
    Some(position)
}

/// The request at `position` is written, or lost.
fn done<P: Probe>(qp: &mut Qp, hub: &mut Hub<P>, position: u32) {
    qp.sq.wqe_mut(position).answered = true;
    settle(qp, hub);
}

/// Completes the oldest requests that are done or have failed.
fn settle<P: Probe>(qp: &mut Qp, hub: &mut Hub<P>) {
    loop {
        requester::complete_done(qp, hub);
        let Path::Udp(path) = &mut qp.path else { return };
        let oldest = path.held.iter().position(|held| held.position == qp.sq.head);
        let Some(index) = oldest else { return };
        let Hold::Failed(status) = path.held[index].what else { return };
        path.held.remove(index);
        requester::conclude(qp, hub, qp.sq.head, status);
    }
}

/// The oldest request is lost if it waits for a neighbour, which is in doubt, and too many are in progress.
fn give_way<P: Probe>(qp: &mut Qp, hub: &mut Hub<P>) {
    if !matches!(&qp.path, Path::Udp(path) if path.doubt > 0) {
        return;
    }
    let most = MOST_IN_PROGRESS.min(qp.sq.capacity() / 2).max(1);
    while qp.sq.next.wrapping_sub(qp.sq.head) > most {
        let oldest = qp.sq.head;
        let Path::Udp(path) = &mut qp.path else { return };
        if !path.take_waiting(oldest, |_| true) {
            return;
        }
        done(qp, hub, oldest);
    }
}

/// Why nothing is written.
enum Stop {
    Refused(DatagramError),
    /// The memory of the request is not accessible.
    Memory,
}

impl From<DatagramError> for Stop {
    fn from(error: DatagramError) -> Self {
        Self::Refused(error)
    }
}

/// Writes the datagram of the request at `position`, or the next part of it.
fn compose<P: Probe>(
    qp: &mut Qp,
    hub: &mut Hub<P>,
    (socket, position, begun): (UdpId, u32, Option<Parts>),
    out: &mut [u8],
) -> Result<Turn, Stop> {
    let to = qp.sq.destination(position).copied().unwrap_or_default().address();
    let len = qp.sq.wqe(position).length as usize;
    let now = hub.now.0;
    let Path::Udp(UdpPath { carriage, .. }) = qp.path else { return Ok(Turn::Nothing) };
    let traffic_class = marking::class_or_default(carriage.traffic_class, hub);
    let carriage = Carriage { traffic_class, ..carriage };
    let Some(inet) = &mut hub.inet else { return Ok(Turn::Nothing) };
    let (departure, parts) = match begun {
        Some(parts) => compose_part(inet, now, parts, out)?,
        None => match inet.stack.compose_datagram(now, socket, to, carriage, len, out) {
            Ok(departure) => (departure, None),
            Err(DatagramError::Long { .. }) => {
                let sum = sum_of(qp, hub, (position, len), out)?;
                let Some(inet) = &mut hub.inet else { return Ok(Turn::Nothing) };
                let parts = inet.stack.cut_datagram(now, socket, to, carriage, len, sum)?;
                compose_part(inet, now, parts, out)?
            }
            Err(error) => return Err(error.into()),
        },
    };
    hub.probe.stage(Stage::Headers, departure.headers);
    hub.probe.stage(Stage::GetWr, 0);
    let from = departure.payload.start as usize;
    let payload = out.get_mut(departure.headers..departure.len()).ok_or(Stop::Memory)?;
    gather(qp, hub, (position, from), payload)?;
    hub.probe.stage(Stage::GetData, departure.len() - departure.headers);
    let mut turn = hub.dispatch(&departure, out);
    if let Turn::Frame(frame) = &mut turn {
        frame.of = Sender::Datagrams(qp.id);
    }
    match (&mut qp.path, parts) {
        (Path::Udp(path), Some(parts)) => {
            path.held.push_front(Held { position, what: Hold::Turn(Some(parts)) });
        }
        _ => done(qp, hub, position),
    }
    Ok(turn)
}

/// Writes the headers of the next part of a datagram; what is left of it then, if anything is.
fn compose_part(
    inet: &mut Inet,
    now: u64,
    mut parts: Parts,
    out: &mut [u8],
) -> Result<(Departure, Option<Parts>), DatagramError> {
    let departure = inet.stack.compose_part(now, &mut parts, out)?;
    Ok((departure, (!parts.is_done()).then_some(parts)))
}

/// Copies octets of the request at `position`, from the one at `from` on.
fn gather<P>(
    qp: &Qp,
    hub: &mut Hub<P>,
    (position, from): (u32, usize),
    out: &mut [u8],
) -> Result<(), Stop> {
    let Some(bytes) = qp.sq.inline(position) else {
        let list = qp.sq.sges(position);
        let gathered = hub.regions.gather(qp.pd_number(), list, from as u64, out);
        return gathered.map_err(|_| Stop::Memory);
    };
    out.copy_from_slice(&bytes[from..from + out.len()]);
    Ok(())
}

/// The sum of the `len` octets of the request at `position`; `out` is where they are read to.
fn sum_of<P>(
    qp: &Qp,
    hub: &mut Hub<P>,
    (position, len): (u32, usize),
    out: &mut [u8],
) -> Result<Sum, Stop> {
    let room = out.len().min(SUMMED) & !1;
    let mut whole = Sum::default();
    for from in (0..len).step_by(room.max(2)) {
        let piece = &mut out[..room.min(len - from)];
        gather(qp, hub, (position, from), piece)?;
        whole = whole.and(sum(piece));
    }
    Ok(whole)
}

/// The datagram of the request at `position` cannot be written, or not now. One that had begun to go in parts
/// is to begin again then.
fn refuse<P: Probe>(qp: &mut Qp, hub: &mut Hub<P>, position: u32, why: Stop) {
    let what = match why {
        Stop::Refused(DatagramError::Unresolved { next_hop }) => Hold::For(next_hop),
        // Those behind it may be shorter, or go elsewhere.
        Stop::Refused(DatagramError::TooLong { .. } | DatagramError::Long { .. }) => {
            Hold::Failed(WcStatus::LocLenErr)
        }
        Stop::Refused(DatagramError::NoRoute | DatagramError::BadAddress) => {
            Hold::Failed(WcStatus::LocQpOpErr)
        }
        Stop::Refused(DatagramError::Closed) => {
            return stop(qp, hub, position, WcStatus::LocQpOpErr);
        }
        Stop::Memory => return stop(qp, hub, position, WcStatus::LocProtErr),
    };
    let (Path::Udp(path), Some(inet)) = (&mut qp.path, &mut hub.inet) else { return };
    if matches!(what, Hold::For(_)) && !std::mem::replace(&mut path.awaits, true) {
        inet.unresolved.push(qp.id);
    }
    path.held.push_back(Held { position, what });
    settle(qp, hub);
}

/// The request at `position` fails and stops the send queue. Those that wait are lost, those that have failed
/// say so.
fn stop<P: Probe>(qp: &mut Qp, hub: &mut Hub<P>, position: u32, status: WcStatus) {
    let Path::Udp(path) = &mut qp.path else { return };
    path.held.retain(|held| {
        let failed = matches!(held.what, Hold::Failed(_));
        qp.sq.wqe_mut(held.position).answered |= !failed;
        failed
    });
    settle(qp, hub);
    if let Path::Udp(path) = &mut qp.path {
        path.held.clear();
    }
    requester::fail_at(qp, hub, position, status);
}

/// Gives a datagram to the queue pair that is bound to its port, if that has a receive for it.
pub(crate) fn deliver<P: Probe>(qp: &mut Qp, hub: &mut Hub<P>, datagram: &Datagram, frame: &[u8]) {
    if !qp.may_receive() {
        hub.datagram_drops.no_queue_pair += 1;
        return;
    }
    let reassembled;
    let message = match &datagram.payload {
        Payload::Frame(range) => frame.get(range.clone()).unwrap_or_default(),
        Payload::Reassembled => {
            let Some(inet) = &hub.inet else { return };
            // Rare, and the stack's buffer cannot be lent while memory is written.
            reassembled = inet.stack.reassembled().to_vec();
            &reassembled
        }
    };
    let len = message.len() as u64;
    let is_short = responder::next_capacity(qp, hub).is_some_and(|room| room < len);
    if is_short || !responder::begin_receive(qp, hub) {
        hub.datagram_drops.no_receive += 1;
        return;
    }
    let placed = responder::spared(qp).and_then(|()| {
        let (pd, list) = (qp.recv_pd_number(), qp.responder.receive.sges.as_slice());
        hub.regions
            .check_list(pd, list, 0, len, true)
            .and_then(|()| hub.regions.scatter(pd, list, 0, message))
            .map_err(|_| Refusal::Local)
    });
    hub.probe.stage(Stage::PutData, message.len());
    let done = placed.and_then(|()| {
        let finish = Finish {
            opcode: WcOpcode::Recv,
            byte_len: message.len() as u32,
            extra: WcExtra::From(Source::from(datagram.from)),
            solicited: true,
        };
        responder::finish_receive(qp, hub, finish)
    });
    if let Err(refusal) = done {
        responder::refuse(qp, hub, refusal);
    }
}

/// Gives the port of a queue pair back.
pub(crate) fn detach<P>(qp: &mut Qp, hub: &mut Hub<P>) {
    let (Path::Udp(path), Some(inet)) = (&mut qp.path, &mut hub.inet) else { return };
    path.held.clear();
    if let Some(socket) = path.socket.take() {
        set(&mut inet.bound, socket.index(), None);
        inet.stack.unbind(socket);
    }
    if std::mem::take(&mut path.awaits) {
        inet.unresolved.retain(|&id| id != qp.id);
    }
}
