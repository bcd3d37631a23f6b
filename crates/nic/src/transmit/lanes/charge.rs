//! How much a queue pair may transmit in its turn, and what it is charged for.

use quipu_qos::{PACKET_OVERHEAD, TokenClock};

use super::LEAST_TURN;
use super::backlog::{demand, packet_of, packets};
use crate::adapter::Hub;
use crate::qp::Qp;
use crate::transmit::marking::service_level;
use crate::transmit::{Gather, ROOM_BYTES};

/// Bytes of payload that a queue pair may transmit in one piece.
#[inline]
pub(crate) fn room<P>(qp: &Qp, hub: &Hub<P>) -> u32 {
    if hub.qos.is_none() { u32::MAX } else { payload_room(qp) }
}

#[cold]
fn payload_room(qp: &Qp) -> u32 {
    let (left, packet) = (qp.turn.left.max(LEAST_TURN) as u64, u64::from(packet_of(qp)));
    let overhead = u64::from(PACKET_OVERHEAD);
    let rest = (left % packet).saturating_sub(overhead);
    let payload = left / packet * (packet - overhead) + rest;
    payload.min(u32::MAX.into()) as u32
}

/// How many bytes a stream may write into a buffer in one piece. What is gathered elsewhere is limited, too:
/// pieces of it are as long as an FPDU.
pub(crate) fn limit_stream(qp: &Qp, gather: &mut Gather) -> usize {
    const LONGEST_FPDU: i64 = 1 << 16;
    gather.cap((qp.turn.left - LONGEST_FPDU).max(0) as usize);
    // Short pieces of long messages are not written (`iwarp::Sender::segment`).
    (qp.turn.left.max(0) as usize).max(ROOM_BYTES)
}

/// Charges a queue pair for so much payload that it has just transmitted.
#[inline]
pub(crate) fn charge<P>(qp: &mut Qp, hub: &mut Hub<P>, payload: u32) {
    if hub.qos.is_some() {
        charge_turn(qp, hub, payload);
    }
}

#[cold]
pub(super) fn charge_turn<P>(qp: &mut Qp, hub: &mut Hub<P>, payload: u32) {
    let packets = packets(qp, payload.into());
    let octets = u64::from(payload) + packets * u64::from(PACKET_OVERHEAD);
    charge_rates(qp, hub, octets);
    let Some(qos) = &mut hub.qos else { return };
    let lane = qos.lane(qp.turn.lane);
    lane.sent.octets += octets;
    lane.sent.packets += packets;
    qp.turn.left -= octets as i64;
    let left = qp.turn.left;
    if left <= 0 || left < LEAST_TURN && demand(qp) > left.unsigned_abs() {
        let left = std::mem::take(&mut qp.turn.left);
        lane.balance += left;
        qos.unsettled |= left != 0;
    }
}

/// Charges the rates of a queue pair and of its service level.
fn charge_rates<P>(qp: &mut Qp, hub: &mut Hub<P>, octets: u64) {
    let has_rates = hub.qos.as_ref().is_some_and(|qos| qos.has_rates);
    if !has_rates && qp.turn.clock.is_none() {
        return;
    }
    let sl = service_level(qp, hub);
    let Some(qos) = &mut hub.qos else { return };
    let clocks = [qp.turn.clock.as_mut(), qos.sl_clocks[usize::from(sl)].as_mut()];
    for clock in clocks.into_iter().flatten() {
        clock.limit_lag(hub.now.0, TokenClock::IDLE_NS);
        clock.take(hub.now.0, octets);
    }
}
