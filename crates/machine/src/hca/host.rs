//! A host: DMA controller, bus and cores.

use std::collections::VecDeque;

use quipu_qos::Arbiter;

use super::stream::Packet;
use crate::bus::Resource;

/// A packet between memory and adapter.
#[derive(Clone, Copy, Debug)]
pub(super) struct Transfer {
    pub(super) packet: Packet,
    /// Bytes that no slot has been used for.
    pub(super) waiting: u64,
    /// Transfers under way.
    pub(super) under_way: u32,
}

impl Transfer {
    pub(super) fn new(packet: Packet) -> Self {
        Self { packet, waiting: packet.bytes, under_way: 0 }
    }

    /// Whether all of it has been transferred.
    pub(super) fn is_done(&self) -> bool {
        self.waiting == 0 && self.under_way == 0
    }
}

/// A piece of a copy.
#[derive(Clone, Copy, Debug)]
pub(super) struct Work {
    pub(super) stream: u16,
    /// At the sender, not at the receiver.
    pub(super) sends: bool,
    pub(super) bytes: u64,
    /// The last piece of its buffer.
    pub(super) last: bool,
}

/// A core.
#[derive(Clone, Debug, Default)]
pub(super) struct Core {
    pub(super) queue: VecDeque<Work>,
    /// The piece in work, and since when.
    pub(super) current: Option<(Work, u64)>,
}

/// Directions of transfers.
pub(super) const SEND: usize = 0;
pub(super) const RECEIVE: usize = 1;

/// A host.
pub(super) struct Host {
    pub(super) arbiter: Arbiter,
    /// Packets of each lane that the peer has room for.
    pub(super) credits: [u32; quipu_qos::LANES],
    /// The stream of each lane that is served next.
    pub(super) turns: [usize; quipu_qos::LANES],
    pub(super) slots: u32,
    /// Packets that are fetched, or wait for the link; and packets that came.
    pub(super) transfers: [VecDeque<Transfer>; 2],
    /// The direction that used a slot last.
    pub(super) latest: usize,
    /// The link sends the first packet.
    pub(super) sends: bool,
    pub(super) bus: Resource,
    pub(super) cores: Vec<Core>,
    /// Picks of the arbiter, and those with a choice.
    pub(super) picks: [u64; 2],
}

impl Host {
    pub(super) fn new(arbiter: Arbiter, slots: u32, credits: u32, cores: usize) -> Self {
        Self {
            arbiter,
            credits: [credits; quipu_qos::LANES],
            turns: [0; quipu_qos::LANES],
            slots,
            transfers: Default::default(),
            latest: SEND,
            sends: false,
            bus: Resource::default(),
            cores: vec![Core::default(); cores],
            picks: [0; 2],
        }
    }

    /// The packet of a direction that waits for a slot.
    pub(super) fn waits_for_slot(&mut self, way: usize) -> Option<&mut Transfer> {
        self.transfers[way].iter_mut().find(|it| it.waiting > 0)
    }
}
