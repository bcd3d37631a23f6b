//! What idle connections cost in memory, and whether many of them work.

use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context, Result, bail, ensure};
use quipu_host::Engine;
use quipu_host::nic::mem::Segment;
use quipu_host::nic::{
    Access, Completion, CqId, Gid, Payload, QpId, QpNum, QpType, Region, SendFlags, SendOp, SendWr,
    Sge, To, WcOpcode, WcStatus,
};
use serde::{Deserialize, Serialize};

use super::quipu::{BATCH, connect_qp, create_qp, open_engine};
use super::{Patience, Setup, What};
use crate::model::{Footprint, Path};
use crate::sys;

/// Messages in flight at once when every queue pair carries one.
const CHUNK: usize = 256;

/// An engine with many queue pairs, whose queues hold one request each.
struct Crowd {
    engine: Arc<Engine>,
    cq: CqId,
    qps: Vec<(QpId, QpNum)>,
    memory: Segment,
    region: Region,
    /// Resident bytes before the first queue pair, and when that was.
    before: u64,
    began: Instant,
}

/// Requests that have not completed.
#[derive(Debug, Default)]
struct Open {
    sends: usize,
    receives: usize,
}

impl Crowd {
    fn new(path: Path, count: u64) -> Result<Self> {
        let engine = open_engine(path, What::Quipu(path))?;
        let (context, _) = engine.open_context()?;
        let pd = engine.alloc_pd()?;
        // Room for a receive of each queue pair, and for a chunk of sends.
        let completions = u32::try_from(count)? + CHUNK as u32;
        let (cq, _) = engine.create_cq(context, completions, None, 0)?;
        let memory = Segment::heap(4096);
        let region =
            engine.reg_segment(pd, &memory, None, Access::LOCAL_WRITE).context("registering")?;
        let (before, began) = (sys::resident_bytes()?, Instant::now());
        let mut qps = Vec::with_capacity(usize::try_from(count)?);
        for number in 0..count {
            let qp = create_qp(&engine, QpType::Rc, (context, pd, cq), (1, 1));
            qps.push(qp.with_context(|| format!("after {number} queue pairs"))?);
        }
        Ok(Self { engine, cq, qps, memory, region, before, began })
    }

    fn sge(&self, offset: u64) -> [Sge; 1] {
        [Sge { addr: self.memory.addr() as u64 + offset, len: 64, lkey: self.region.key }]
    }

    fn send(&self, qp: QpId) -> Result<()> {
        let sge = self.sge(0);
        let payload = Payload::Sges(&sge);
        let wr = SendWr {
            wr_id: 0,
            to: To::Peer,
            op: SendOp::Send,
            flags: SendFlags::SIGNALED,
            payload,
        };
        self.engine.post_send(qp, &wr).context("posting a send")
    }

    fn receive(&self, qp: QpId) -> Result<()> {
        self.engine.post_recv(qp, 0, &self.sge(2048)).context("posting a receive")
    }

    /// Polls until no more than so many sends and receives have not completed. The peer may be
    /// ahead, so there may be fewer receives.
    fn reap(&self, open: &mut Open, at_most: (usize, usize)) -> Result<()> {
        let mut out = [Completion::default(); BATCH];
        let mut patience = Patience::new();
        while open.sends > at_most.0 || open.receives > at_most.1 {
            let found = self.engine.poll_cq(self.cq, &mut out)?;
            if found == 0 {
                patience.check().with_context(|| format!("{open:?} have not completed"))?;
            }
            for completion in &out[..found] {
                let status = completion.status;
                ensure!(status == WcStatus::Success, "a message failed: {status:?}, {open:?}");
                let left = match completion.opcode {
                    WcOpcode::Recv => &mut open.receives,
                    _ => &mut open.sends,
                };
                *left = left.checked_sub(1).context("one completion too many")?;
            }
        }
        Ok(())
    }

    fn footprint(&self, between: &str) -> Result<Footprint> {
        let setup_s = self.began.elapsed().as_secs_f64();
        let grown = sys::resident_bytes()?.saturating_sub(self.before);
        let count = self.qps.len() as u64;
        Ok(Footprint {
            between: between.to_owned(),
            queue_pairs: count,
            bytes_per_qp: grown as f64 / count.max(1) as f64,
            exchanged: count,
            fault: None,
            setup_s,
        })
    }
}

/// Connects `count` queue pairs of one engine to each other, two by two; each carries a message. Where that
/// fails it says how many did.
pub(super) fn within_process(count: u64) -> Footprint {
    const BETWEEN: &str = "one process";
    let (began, mut worked) = (Instant::now(), 0);
    let outcome = Crowd::new(Path::SameHost, count.next_multiple_of(2)).and_then(|crowd| {
        crowd.exchange_within(&mut worked)?;
        crowd.footprint(BETWEEN)
    });
    outcome.unwrap_or_else(|error| Footprint {
        between: BETWEEN.to_owned(),
        queue_pairs: count,
        bytes_per_qp: 0.0,
        exchanged: worked,
        fault: Some(format!("{error:#}")),
        setup_s: began.elapsed().as_secs_f64(),
    })
}

impl Crowd {
    /// Counts those that have carried their messages.
    fn exchange_within(&self, worked: &mut u64) -> Result<()> {
        let gid = self.engine.gid();
        let (pairs, _) = self.qps.as_chunks::<2>();
        for chunk in pairs.chunks(CHUNK / 2) {
            for [left, right] in chunk {
                connect_qp(&self.engine, left.0, gid, right.1)?;
                connect_qp(&self.engine, right.0, gid, left.1)?;
                self.receive(left.0)?;
                self.receive(right.0)?;
            }
            for [left, right] in chunk {
                self.send(left.0)?;
                self.send(right.0)?;
            }
            let mut open = Open { sends: 2 * chunk.len(), receives: 2 * chunk.len() };
            self.reap(&mut open, (0, 0))?;
            *worked += 2 * chunk.len() as u64;
        }
        Ok(())
    }
}

/// Queue pairs that wait to be connected to those of the other end.
#[derive(Default)]
pub(super) struct Idle(Option<Crowd>);

#[derive(Serialize, Deserialize)]
struct Peers {
    gid: [u8; 16],
    numbers: Vec<u32>,
}

impl Idle {
    /// Creates them; the answer says where they are.
    pub(super) fn create(&mut self, setup: &Setup, count: u64) -> Result<String> {
        let What::Quipu(path) = setup.what else { bail!("only Quipu has queue pairs") };
        let crowd = Crowd::new(path, count)?;
        let numbers = crowd.qps.iter().map(|(_, number)| number.0).collect();
        let peers = Peers { gid: crowd.engine.gid().0, numbers };
        self.0 = Some(crowd);
        Ok(serde_json::to_string(&peers)?)
    }

    /// Connects them; each carries a message both ways. They are gone afterwards.
    pub(super) fn connect(&mut self, setup: &Setup, peers: &str) -> Result<Footprint> {
        let crowd = self.0.take().context("there are no queue pairs")?;
        let peers: Peers = serde_json::from_str(peers).context("the other end's queue pairs")?;
        ensure!(peers.numbers.len() == crowd.qps.len(), "the ends differ in number");
        for (&(qp, _), &number) in crowd.qps.iter().zip(&peers.numbers) {
            connect_qp(&crowd.engine, qp, Gid(peers.gid), QpNum(number))?;
            crowd.receive(qp)?;
        }
        let mut open = Open { sends: 0, receives: crowd.qps.len() };
        for chunk in crowd.qps.chunks(CHUNK) {
            for &(qp, _) in chunk {
                crowd.send(qp)?;
            }
            open.sends += chunk.len();
            let receives = open.receives;
            crowd.reap(&mut open, (0, receives))?;
        }
        crowd.reap(&mut open, (0, 0))?;
        let between = match setup.what {
            What::Quipu(path) => path.to_string(),
            _ => String::new(),
        };
        crowd.footprint(&between)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn queue_pairs_that_work_are_counted_until_one_does_not() {
        let footprint = within_process(CHUNK as u64 + 2);
        assert_eq!((footprint.exchanged, footprint.fault), (CHUNK as u64 + 2, None));
        let crowd = Crowd::new(Path::SameHost, CHUNK as u64 + 2).unwrap();
        // One of the second chunk is in use, so it cannot be connected again.
        let (qp, number) = crowd.qps[CHUNK];
        connect_qp(&crowd.engine, qp, crowd.engine.gid(), number).unwrap();
        let mut worked = 0;
        assert!(crowd.exchange_within(&mut worked).is_err());
        assert_eq!(worked, CHUNK as u64);
    }
}
