//! A stream in one direction.

use super::protocol::{Copied, ZeroCopy};
use crate::plan::StreamKind;

/// A packet on its way.
#[derive(Clone, Copy, Debug)]
pub(super) struct Packet {
    pub(super) stream: u16,
    pub(super) lane: u8,
    /// Bytes of payload.
    pub(super) bytes: u64,
    /// The last of its buffer.
    pub(super) last: bool,
}

/// How a stream makes its bytes.
#[derive(Clone, Copy, Debug)]
pub(super) enum Source {
    /// From the program's memory, a window at a time.
    Memory(ZeroCopy),
    /// Through buffers.
    Buffers(Copied),
}

/// A stream.
#[derive(Clone, Debug)]
pub(super) struct Stream {
    pub(super) kind: StreamKind,
    pub(super) sl: u8,
    pub(super) lane: u8,
    pub(super) from: usize,
    pub(super) source: Source,
    /// The stream of the other direction. Neither gets more than a window ahead of the other, as in MPI's
    /// both-way benchmarks.
    pub(super) partner: Option<u16>,
    /// Its core at the sender and at the receiver.
    pub(super) cores: [usize; 2],
    /// Bytes that wait for the adapter.
    pub(super) backlog: u64,
    /// Buffers under way.
    pub(super) under_way: u64,
    /// Bytes of this window that have not arrived.
    pub(super) missing: u64,
    /// Windows that have arrived.
    pub(super) windows: u64,
    /// Waits for the other direction.
    pub(super) waits: bool,
    /// Bytes that the receiving program got.
    pub(super) delivered: u64,
    /// Picoseconds that its cores worked: sender, receiver.
    pub(super) worked: [u64; 2],
}

impl Stream {
    /// Takes the next packet from the backlog.
    pub(super) fn take(&mut self, stream: u16, mtu: u64) -> Packet {
        let bytes = mtu.min(self.unit_left());
        self.backlog -= bytes;
        Packet { stream, lane: self.lane, bytes, last: self.backlog.is_multiple_of(self.unit()) }
    }

    /// Bytes of a buffer or window.
    pub(super) fn unit(&self) -> u64 {
        match self.source {
            Source::Memory(costs) => costs.window,
            Source::Buffers(costs) => costs.buffer,
        }
    }

    /// Bytes of the unit that is being sent: packets end with it.
    fn unit_left(&self) -> u64 {
        match self.backlog % self.unit() {
            0 => self.unit().min(self.backlog),
            left => left,
        }
    }
}
