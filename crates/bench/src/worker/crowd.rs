//! Many queue pairs between two processes, all of which have work all the time: how much they do
//! together, and whether each gets its share.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use quipu_host::Engine;
use quipu_host::nic::mem::Segment;
use quipu_host::nic::{
    Access, Completion, CqId, Gid, Payload, QpId, QpNum, QpType, Region, SendFlags, SendOp, SendWr,
    Sge, To, WcExtra, WcOpcode, WcStatus,
};
use serde::{Deserialize, Serialize};

use super::quipu::{connect_qp, create_qp, open_engine};
use super::{End, Patience, Setup, Slice};
use crate::model::{Also, Kind, Op, Path};
use crate::stats;

/// Sends of a queue pair that are in flight.
const SENDS: u32 = 4;
/// Receives that a queue pair has posted: more than the peer sends without word of it.
const RECEIVES: u32 = 16;
/// Completions taken by one poll.
const BATCH: usize = 64;
/// Messages of a queue pair that say something about its share.
pub(crate) const MESSAGES: u64 = 50;
/// Bytes of the largest message.
pub(crate) const MAX_SIZE: u64 = 4096;
/// The immediate data of the message that ends a slice.
const FAREWELL: u32 = 0xfa_4e11;

/// One end: an engine with all its queue pairs on one completion queue.
pub(super) struct Crowd {
    engine: Arc<Engine>,
    cq: CqId,
    qps: Vec<(QpId, QpNum)>,
    memory: Segment,
    region: Region,
    first: bool,
    /// Messages of each queue pair in the last slice.
    done: Vec<u64>,
}

/// Where all queue pairs of an end are.
#[derive(Serialize, Deserialize)]
struct Address {
    gid: [u8; 16],
    numbers: Vec<u32>,
}

impl Crowd {
    pub(super) fn new(setup: &Setup, path: Path) -> Result<Self> {
        let engine = open_engine(path, setup.what)?;
        let (context, _) = engine.open_context()?;
        let pd = engine.alloc_pd()?;
        let count = u32::try_from(setup.crowd)?;
        let room = count * (SENDS + RECEIVES);
        let (cq, _) = engine.create_cq(context, room, None, 0).context("a completion queue")?;
        let memory = Segment::heap(usize::try_from(2 * MAX_SIZE)?);
        memory.zero()?;
        let region = engine.reg_segment(pd, &memory, None, Access::LOCAL_WRITE)?;
        let mut qps = Vec::with_capacity(count as usize);
        for number in 0..count {
            let qp = create_qp(&engine, QpType::Rc, (context, pd, cq), (SENDS, RECEIVES));
            qps.push(qp.with_context(|| format!("after {number} queue pairs"))?);
        }
        let first = setup.first;
        Ok(Self { engine, cq, qps, memory, region, first, done: vec![0; count as usize] })
    }

    fn sge(&self, offset: u64, size: u64) -> Result<[Sge; 1]> {
        let (addr, len) = (self.memory.addr() as u64 + offset, u32::try_from(size)?);
        Ok([Sge { addr, len, lkey: self.region.key }])
    }

    /// Sends by queue pair `at`; its place is the name of the request.
    fn send(&self, at: usize, op: SendOp, sge: &[Sge]) -> Result<()> {
        let (flags, payload) = (SendFlags::SIGNALED, Payload::Sges(sge));
        let wr = SendWr { wr_id: at as u64, to: To::Peer, op, flags, payload };
        self.engine.post_send(self.qps[at].0, &wr).context("posting a send")
    }

    fn receive(&self, at: usize, sge: &[Sge]) -> Result<()> {
        self.engine.post_recv(self.qps[at].0, at as u64, sge).context("posting a receive")
    }

    fn poll<'a>(&self, out: &'a mut [Completion; BATCH]) -> Result<&'a [Completion]> {
        let found = self.engine.poll_cq(self.cq, out)?;
        let out = &out[..found];
        match out.iter().find(|completion| completion.status != WcStatus::Success) {
            None => Ok(out),
            Some(bad) => bail!("a request failed: {:?}", bad.status),
        }
    }

    /// Sends another message for each of the next `count` that complete: each queue pair sends as
    /// many as it gets through.
    fn keep_sending(&mut self, count: u64, size: u64) -> Result<()> {
        let sge = self.sge(0, size)?;
        let mut out = [Completion::default(); BATCH];
        let mut patience = Patience::new();
        let mut done = 0;
        while done < count {
            let found = self.poll(&mut out)?;
            if found.is_empty() {
                patience.check()?;
            }
            for completion in found {
                let at = usize::try_from(completion.wr_id)?;
                self.done[at] += 1;
                self.send(at, SendOp::Send, &sge)?;
            }
            done += found.len() as u64;
        }
        Ok(())
    }

    /// The sending end of a slice.
    fn send_slice(&mut self, slice: &Slice) -> Result<Duration> {
        let sge = self.sge(0, slice.size)?;
        for _ in 0..SENDS {
            for at in 0..self.qps.len() {
                self.send(at, SendOp::Send, &sge)?;
            }
        }
        self.keep_sending(slice.warmup, slice.size)?;
        self.done.fill(0);
        let start = Instant::now();
        self.keep_sending(slice.count, slice.size)?;
        let took = start.elapsed();
        self.drain(self.qps.len() * SENDS as usize)?;
        self.send(0, SendOp::SendImm(FAREWELL), &sge)?;
        self.drain(1)?;
        Ok(took)
    }

    /// Waits for so many sends.
    fn drain(&self, mut open: usize) -> Result<()> {
        let mut out = [Completion::default(); BATCH];
        let mut patience = Patience::new();
        while open > 0 {
            let found = self.poll(&mut out)?.len();
            if found == 0 {
                patience.check()?;
            }
            open = open.checked_sub(found).context("one completion too many")?;
        }
        Ok(())
    }

    /// The receiving end, until it is told that this was all.
    fn receive_slice(&mut self) -> Result<Duration> {
        let start = Instant::now();
        let sge = self.sge(MAX_SIZE, MAX_SIZE)?;
        let mut out = [Completion::default(); BATCH];
        let mut patience = Patience::new();
        loop {
            let found = self.poll(&mut out)?;
            if found.is_empty() {
                patience.check()?;
            }
            let mut last = false;
            for completion in found {
                ensure!(completion.opcode == WcOpcode::Recv, "this end sends nothing");
                self.receive(usize::try_from(completion.wr_id)?, &sge)?;
                last |= completion.extra == WcExtra::Imm(FAREWELL);
            }
            if last {
                return Ok(start.elapsed());
            }
        }
    }
}

impl End for Crowd {
    fn address(&self) -> String {
        let numbers = self.qps.iter().map(|(_, number)| number.0).collect();
        let address = Address { gid: self.engine.gid().0, numbers };
        serde_json::to_string(&address).unwrap_or_default()
    }

    fn connect(&mut self, address: &str) -> Result<()> {
        let peer: Address = serde_json::from_str(address).context("the other end's queue pairs")?;
        ensure!(peer.numbers.len() == self.qps.len(), "the ends differ in number");
        let sge = self.sge(MAX_SIZE, MAX_SIZE)?;
        for (at, &number) in peer.numbers.iter().enumerate() {
            connect_qp(&self.engine, self.qps[at].0, Gid(peer.gid), QpNum(number))?;
            for _ in 0..if self.first { 0 } else { RECEIVES } {
                self.receive(at, &sge)?;
            }
        }
        Ok(())
    }

    fn run(&mut self, slice: &Slice, armed: &mut dyn FnMut() -> Result<()>) -> Result<Duration> {
        let ours = (slice.test.kind, slice.test.op) == (Kind::Crowd, Op::Send);
        ensure!(ours && slice.size <= MAX_SIZE, "a crowd sends messages of at most {MAX_SIZE}");
        armed()?;
        if self.first { self.send_slice(slice) } else { self.receive_slice() }
    }

    fn also(&self) -> Also {
        if self.first { shares(&self.done) } else { Vec::new() }
    }
}

/// How the messages of a slice are shared out. Jain's index is 1 if all have the same, and 1/n if one
/// of n has everything.
fn shares(done: &[u64]) -> Also {
    let done: Vec<_> = done.iter().map(|&n| n as f64).collect();
    let quantile = |part| stats::quantile(&done, part);
    let (sum, squares) = done.iter().fold((0.0, 0.0), |(s, q), n| (s + n, q + n * n));
    // Of nothing everybody has no share.
    let part = |of: f64, whole: f64| if whole > 0.0 { of / whole } else { 0.0 };
    let named = [
        ("slowest", quantile(0.0)),
        ("median", quantile(0.5)),
        ("fastest", quantile(1.0)),
        (SLOWEST, part(quantile(0.0), quantile(0.5))),
        (FASTEST, part(quantile(1.0), quantile(0.5))),
        ("Jain's index", part(sum * sum, done.len() as f64 * squares)),
    ];
    named.map(|(name, value)| (name.to_owned(), value)).to_vec()
}

/// The numbers that the targets are about.
pub(crate) const SLOWEST: &str = "slowest / median";
pub(crate) const FASTEST: &str = "fastest / median";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_say_who_gets_nothing() {
        let value = |done: &[u64], name: &str| {
            shares(done).into_iter().find(|(found, _)| found == name).unwrap().1
        };
        assert_eq!(value(&[10, 10, 10], "Jain's index"), 1.0);
        assert_eq!(value(&[30, 0, 0], "Jain's index"), 1.0 / 3.0);
        assert_eq!((value(&[5, 10, 30], SLOWEST), value(&[5, 10, 30], FASTEST)), (0.5, 3.0));
        assert_eq!((value(&[0, 0, 1], SLOWEST), value(&[0, 0], "Jain's index")), (0.0, 0.0));
        assert_eq!((value(&[5, 10, 20], "slowest"), value(&[5, 10, 20], "fastest")), (5.0, 20.0));
    }
}
