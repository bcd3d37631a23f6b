//! Quipu's datagrams (UD). They travel over UDP, to a peer of the same host too.

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use quipu_host::Engine;
use quipu_host::nic::{
    AddressVector, Completion, Gid, PdId, QpAttr, QpAttrMask, QpId, QpNum, QpState, To, WcOpcode,
};

use super::quipu::{BATCH, Node};
use super::quipu_slices::{Receiver, Sender};
use super::{Patience, Slice};
use crate::model::Op;

/// Bytes of the route header in front of a received datagram.
pub(super) const GRH: u64 = 40;

const QKEY: u32 = 0x1ee7_5eed & 0x7fff_ffff;

/// Takes the queue pair to RTS; how to address the other end.
pub(super) fn address(engine: &Engine, pd: PdId, qp: QpId, gid: Gid, number: QpNum) -> Result<To> {
    type M = QpAttrMask;
    let steps = [
        (QpState::Init, M::PKEY_INDEX | M::PORT | M::QKEY),
        (QpState::Rtr, M::empty()),
        (QpState::Rts, M::SQ_PSN),
    ];
    for (state, mask) in steps {
        let attr = QpAttr { state, port_num: 1, qkey: QKEY, ..QpAttr::default() };
        engine.modify_qp(qp, &attr, mask | M::STATE).with_context(|| format!("to {state:?}"))?;
    }
    let av = AddressVector {
        dgid: gid,
        is_global: true,
        port_num: 1,
        hop_limit: 1,
        ..AddressVector::default()
    };
    let ah = engine.create_ah(pd, &av).context("an address handle")?;
    Ok(To::Datagram { ah, qpn: number.0, qkey: QKEY })
}

/// Bytes that may be under way: what the receiving socket has room for, also where the kernel
/// counts several times their size.
const ROOM: u64 = 64 << 10;

/// How many datagrams may be under way, and for how many the receiver sends word: nothing else holds
/// the sender back.
pub(super) fn window(depth: u64, size: u64) -> (u64, u64) {
    let window = (ROOM / size.max(1)).clamp(2, depth.max(2));
    (window, (window / 2).max(1))
}

/// This end of a stream.
pub(super) fn stream(
    node: &Node,
    slice: &Slice,
    armed: &mut dyn FnMut() -> Result<()>,
) -> Result<Duration> {
    if node.first {
        armed()?;
        one_way(node, slice.size, slice.warmup)?;
        let start = Instant::now();
        one_way(node, slice.size, slice.count)?;
        return Ok(start.elapsed());
    }
    let start = Instant::now();
    take(node, slice.size, slice.warmup, Some(armed))?;
    take(node, slice.size, slice.count, None)?;
    Ok(start.elapsed())
}

/// Sends datagrams, as many as the window lets it, until the receiver has had all of them.
fn one_way(node: &Node, size: u64, count: u64) -> Result<()> {
    let (window, step) = window(node.depth, size);
    let mut sender = Sender::new(node, Op::Send, size)?;
    let mut words = Receiver::new(node, 1, count.div_ceil(step))?;
    let mut out = [Completion::default(); BATCH];
    let mut patience = Patience::new();
    let mut taken = 0;
    while taken < count {
        while sender.posted < count.min(taken + window) {
            sender.post(sender.posted + 1 == count)?;
        }
        let found = node.poll(&mut out)?;
        if found.is_empty() {
            patience.check().context("a datagram may be lost")?;
        }
        for completion in found {
            if completion.opcode == WcOpcode::Recv {
                taken += step;
                words.post()?;
            } else {
                sender.note(completion);
            }
        }
    }
    sender.drain()
}

/// Takes datagrams, and sends word of them.
fn take(
    node: &Node,
    size: u64,
    count: u64,
    armed: Option<&mut dyn FnMut() -> Result<()>>,
) -> Result<()> {
    let (_, step) = window(node.depth, size);
    let mut receiver = Receiver::new(node, size, count)?;
    let mut words = Sender::new(node, Op::Send, 1)?;
    let mut out = [Completion::default(); BATCH];
    let mut patience = Patience::new();
    if let Some(armed) = armed {
        armed()?;
    }
    let mut got: u64 = 0;
    while got < count {
        let found = node.poll(&mut out)?;
        if found.is_empty() {
            patience.check().context("a datagram may be lost")?;
        }
        for completion in found {
            if completion.opcode != WcOpcode::Recv {
                words.note(completion);
                continue;
            }
            got += 1;
            receiver.post()?;
            if got.is_multiple_of(step) || got == count {
                words.post(got == count)?;
            }
        }
    }
    words.drain()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_window_fits_the_socket_and_the_depth() {
        assert_eq!(window(128, 8), (128, 64));
        assert_eq!(window(128, 4096), (16, 8));
        assert_eq!(window(1, 1 << 20), (2, 1));
    }
}
