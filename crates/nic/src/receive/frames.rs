//! Reception of QPIP: what a frame brings goes straight into posted receives.
//!
//! In stream mode an octet has its place as soon as its offset is known, also behind a gap; those in order
//! that no receive is there for are kept. In message mode the place is known when everything before it is
//! here; until then TCP keeps it.

use quipu_inet::stack::{Arrival, Frame, Stack};
use quipu_inet::tcp::{Mode, Received};

use crate::adapter::{Adapter, Hub};
use crate::probe::{Probe, Stage};
use crate::qp::{Path, Qp};
use crate::qpip::path::TcpPath;
use crate::qpip::{Inet, Owner, connections, udp};
use crate::responder::{self, Finish, Refusal};
use crate::types::{Time, WcExtra, WcOpcode, WcStatus};

/// The largest window that TCP offers ([`quipu_inet::tcp::Config::max_receive_space`]).
pub(crate) const MOST_ROOM: u64 = 4 << 20;

/// Why a connection cannot go on: the place of the receive that is at fault, and its fault.
type Fault = (u32, Refusal);

impl<P: Probe> Adapter<P> {
    /// Takes a frame from the link that the adapter is attached to.
    pub fn handle_frame(&mut self, now: Time, frame: &Frame<'_>) {
        self.hub.now = now;
        self.hub.probe.stage(Stage::Media, frame.bytes.len());
        self.take_arrivals(frame.bytes, |stack| stack.handle_frame(now.0, frame));
    }

    /// Takes a frame of its own that is for one of its own addresses.
    pub(crate) fn take_looped(&mut self, now: Time, bytes: &[u8]) {
        self.hub.probe.looped(bytes);
        self.hub.probe.stage(Stage::Media, bytes.len());
        self.take_arrivals(bytes, |stack| stack.handle_looped(now.0, bytes));
    }

    /// Takes a frame, which may be the first word of a connection and more: then a queue pair is found in
    /// between.
    fn take_arrivals(&mut self, frame: &[u8], mut handle: impl FnMut(&mut Stack) -> Arrival) {
        for _ in 0..2 {
            let Some(inet) = &mut self.hub.inet else { return };
            let arrival = handle(&mut inet.stack);
            let last = !matches!(arrival, Arrival::Again);
            self.take_arrival(arrival, frame);
            if last {
                break;
            }
        }
    }

    fn take_arrival(&mut self, arrival: Arrival, frame: &[u8]) {
        self.hub.probe.stage(Stage::Parse, 0);
        let Some(inet) = &mut self.hub.inet else { return };
        match arrival {
            Arrival::Nothing | Arrival::Again => {}
            Arrival::Segment { connection, received, reassembled } => {
                let owner = inet.owner(connection);
                // Rare, and the stack's buffer cannot be lent while memory is written.
                let whole = reassembled.then(|| inet.stack.reassembled().to_vec());
                if let Some(Owner::Qp(id)) = owner
                    && let Some((qp, hub)) = self.qp_and_hub(id)
                {
                    take(qp, hub, &received, whole.as_deref().unwrap_or(frame));
                } else if owner == Some(Owner::Stream) {
                    let frame = whole.as_deref().unwrap_or(frame);
                    self.take_for_stream(connection, &received, frame);
                }
            }
            Arrival::Datagram(datagram) => {
                if let Some(id) = inet.bound(datagram.socket)
                    && let Some((qp, hub)) = self.qp_and_hub(id)
                {
                    udp::deliver(qp, hub, &datagram, frame);
                }
            }
        }
        self.take_inet_events();
        self.hub.probe.stage(Stage::Update, 0);
    }
}

/// Takes what a segment has brought for a queue pair.
fn take<P: Probe>(qp: &mut Qp, hub: &mut Hub<P>, received: &Received, frame: &[u8]) {
    let Path::Tcp(path) = &mut qp.path else { return };
    let mode = path.mode;
    path.receives.note_contiguous(received.contiguous);
    let before = path.receives.delivered();
    let payload = received.placement.as_ref().and_then(|placement| {
        frame.get(placement.payload.clone()).map(|bytes| (placement.offset, bytes))
    });
    let placed = match (payload, mode) {
        (None, _) => Ok(()),
        (Some((_, bytes)), Mode::Message) => take_piece(qp, hub, bytes, received.push),
        (Some((offset, bytes)), Mode::Stream) => match put(qp, hub, offset, bytes) {
            Ok(()) => Ok(()),
            Err((end, fault)) => {
                // What came before the fault has arrived all the same.
                let whole = if offset <= before { end } else { before };
                complete_stream(qp, hub, whole, false).and(Err(fault))
            }
        },
    };
    let done = placed.and_then(|()| match mode {
        Mode::Message => take_held(qp, hub),
        Mode::Stream => {
            let kept = connections::tcp_path(qp).map_or(0, |path| path.kept());
            complete_stream(qp, hub, received.contiguous.saturating_sub(kept), received.push)
        }
    });
    settle(qp, hub, done);
}

/// What was placed is placed; TCP learns of the room that is left.
fn settle<P: Probe>(qp: &mut Qp, hub: &mut Hub<P>, done: Result<(), Fault>) {
    match done {
        Ok(()) => tell_room(qp, hub, false),
        Err((position, refusal)) => fail(qp, hub, position, refusal),
    }
    connections::settled(qp, hub);
}

/// Tells TCP how much room there is, if it is news.
fn tell_room<P: Probe>(qp: &mut Qp, hub: &mut Hub<P>, posting: bool) {
    if let (Path::Tcp(path), Some(inet)) = (&mut qp.path, &mut hub.inet)
        && let Some(connection) = path.connection
        && let Some(room) = path.receives.news(posting, MOST_ROOM)
    {
        inet.stack.set_receive_space(connection, room);
    }
}

/// A receive was posted.
pub(crate) fn posted<P: Probe>(qp: &mut Qp, hub: &mut Hub<P>) {
    let Path::Tcp(path) = &mut qp.path else { return };
    let last = qp.rq.tail().wrapping_sub(1);
    path.receives.push(last, quipu_mem::list_len(qp.rq.sges(last)));
    if path.connection.is_none() {
        return;
    }
    // Something may be kept that no receive was there for.
    if path.receives.is_owed() {
        let done = match path.mode {
            Mode::Message => take_held(qp, hub),
            Mode::Stream => take_kept(qp, hub),
        };
        return settle(qp, hub, done);
    }
    tell_room(qp, hub, true);
}

/// Puts octets into the receives that they belong to, wherever in the stream they are, and keeps those that
/// belong to none. `Err` has the offset of the first octet that could not be placed.
fn put<P: Probe>(
    qp: &mut Qp,
    hub: &mut Hub<P>,
    mut offset: u64,
    mut bytes: &[u8],
) -> Result<(), (u64, Fault)> {
    let pd = qp.recv_pd_number();
    let Qp { path: Path::Tcp(path), rq, .. } = qp else { return Ok(()) };
    while !bytes.is_empty() {
        let Some(place) = path.receives.find(rq.head(), rq.tail(), offset) else { break };
        hub.probe.stage(Stage::GetWr, 0);
        let len = bytes.len().min(usize::try_from(place.room).unwrap_or(usize::MAX));
        let (piece, rest) = bytes.split_at(len);
        hub.regions
            .scatter(pd, rq.sges(place.position), place.offset, piece)
            .map_err(|_| (offset, (place.position, Refusal::Local)))?;
        hub.probe.stage(Stage::PutData, len);
        offset += len as u64;
        bytes = rest;
    }
    path.receives.place(offset);
    // TCP cuts off what there is no room for, unless it is in order and there is something to spare.
    if !bytes.is_empty() {
        let before = path.kept();
        path.keep(bytes);
        tell_spare(path, hub.inet.as_deref_mut(), before);
    }
    Ok(())
}

/// Tells TCP how much more would be kept, where `before` was.
fn tell_spare(path: &TcpPath, inet: Option<&mut Inet>, before: u64) {
    if let (Some(connection), Some(inet)) = (path.connection, inet) {
        inet.note_kept(before, path.kept());
        inet.stack.set_spare(connection, path.spare());
    }
}

/// Stream mode: puts what is kept into receives, as long as there are some. It completes the last of them,
/// since it has waited.
fn take_kept<P: Probe>(qp: &mut Qp, hub: &mut Hub<P>) -> Result<(), Fault> {
    while let Qp { path: Path::Tcp(path), rq, .. } = qp
        && let offset = path.receives.delivered()
        && let Some(place) = path.receives.find(rq.head(), rq.tail(), offset)
        && path.kept() > 0
    {
        let before = path.kept();
        let taken = path.take_kept(place.room);
        tell_spare(path, hub.inet.as_deref_mut(), before);
        put(qp, hub, offset, &taken).map_err(|(_, fault)| fault)?;
        complete_stream(qp, hub, offset + taken.len() as u64, true)?;
    }
    Ok(())
}

/// Stream mode: completes the receives that are full, or that a push or the end of the stream completes.
fn complete_stream<P: Probe>(
    qp: &mut Qp,
    hub: &mut Hub<P>,
    contiguous: u64,
    push: bool,
) -> Result<(), Fault> {
    let Path::Tcp(path) = &mut qp.path else { return Ok(()) };
    path.receives.deliver(contiguous);
    while let Path::Tcp(path) = &mut qp.path
        && qp.rq.head() != qp.rq.tail()
        && let Some(len) = path.receives.complete(qp.rq.head(), push)
    {
        finish(qp, hub, len)?;
    }
    Ok(())
}

/// The peer has closed: what is in the receive in front is all that it will get.
pub(crate) fn finish_stream<P: Probe>(qp: &mut Qp, hub: &mut Hub<P>) {
    let Path::Tcp(path) = &mut qp.path else { return };
    if path.mode == Mode::Stream {
        let end = path.receives.delivered();
        let done = complete_stream(qp, hub, end, true);
        settle(qp, hub, done);
    }
}

/// Message mode: puts the next piece of a message into the receive in front, which `last` completes.
fn take_piece<P: Probe>(
    qp: &mut Qp,
    hub: &mut Hub<P>,
    bytes: &[u8],
    last: bool,
) -> Result<(), Fault> {
    let pd = qp.recv_pd_number();
    let Qp { path: Path::Tcp(path), rq, .. } = qp else { return Ok(()) };
    let head = rq.head();
    if head == rq.tail() {
        // TCP hands out nothing that it knows no room for.
        return Err((head, Refusal::NoReceive));
    }
    let (filled, capacity) = (path.receives.filled(), path.receives.capacity(head));
    let len = filled + bytes.len() as u64;
    hub.probe.stage(Stage::GetWr, 0);
    // No message ends with nothing: one that has filled its receive and goes on does not fit.
    if len > capacity || (len == capacity && !last) {
        return Err((head, Refusal::TooLong));
    }
    hub.regions.scatter(pd, rq.sges(head), filled, bytes).map_err(|_| (head, Refusal::Local))?;
    hub.probe.stage(Stage::PutData, bytes.len());
    path.receives.deliver(path.receives.delivered() + bytes.len() as u64);
    if last { finish(qp, hub, len as u32) } else { Ok(()) }
}

/// Message mode: takes what TCP has kept since it came before its turn, as long as there are receives.
fn take_held<P: Probe>(qp: &mut Qp, hub: &mut Hub<P>) -> Result<(), Fault> {
    while let Path::Tcp(path) = &qp.path
        && path.receives.is_owed()
        && qp.rq.head() != qp.rq.tail()
        && let (Some(connection), Some(inet)) = (path.connection, &mut hub.inet)
        && let Some(held) = inet.stack.poll_held(connection)
    {
        take_piece(qp, hub, &held.payload, held.end_of_message)?;
    }
    Ok(())
}

/// The receive in front is complete with `len` octets.
fn finish<P: Probe>(qp: &mut Qp, hub: &mut Hub<P>, len: u32) -> Result<(), Fault> {
    let head = qp.rq.head();
    if let Path::Tcp(path) = &mut qp.path {
        path.receives.pop(head, u64::from(len));
    }
    qp.responder.receiving = qp.rq.take(&mut qp.responder.receive);
    let finish = Finish {
        opcode: WcOpcode::Recv,
        byte_len: len,
        extra: WcExtra::None,
        // Nothing on the wire could ask for it: whoever waits for solicited ones waits for all.
        solicited: true,
    };
    // No other receive is at fault.
    let none = qp.rq.tail();
    responder::spared(qp)
        .and_then(|()| responder::finish_receive(qp, hub, finish))
        .map_err(|refusal| (none, refusal))
}

/// The receive at `position` fails, unless it is complete or in the making already; the connection is reset.
fn fail<P: Probe>(qp: &mut Qp, hub: &mut Hub<P>, position: u32, refusal: Refusal) {
    while !qp.responder.receiving && qp.rq.head() != qp.rq.tail() {
        let at_fault = qp.rq.head() == position;
        if !qp.rq.take(&mut qp.responder.receive) {
            break;
        }
        if at_fault {
            qp.responder.receiving = true;
        } else {
            let completion = crate::types::Completion {
                wr_id: qp.responder.receive.wr_id,
                status: WcStatus::WrFlushErr,
                opcode: WcOpcode::Recv,
                qp_num: qp.num,
                ..Default::default()
            };
            hub.complete(qp.recv_cq, completion, true);
        }
    }
    responder::refuse(qp, hub, refusal);
}
