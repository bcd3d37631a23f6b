//! How long the adapter is busy with a segment, stage by stage: tables 2 and 3 of the paper.
//!
//! Two adapters hand each other frames in memory, so nothing but the adapter is measured; a probe reads the
//! time-stamp counter whenever a stage is done.

use std::net::Ipv6Addr;
use std::time::Instant;

use anyhow::{Context, Result, anyhow, ensure};
use quipu_host::inet::stack::{self, Frame, Offload};
use quipu_host::inet::tcp::Secret;
use quipu_host::nic::mem::Segment;
use quipu_host::nic::{
    Access, Adapter, Completion, Config, CqId, Payload, Probe, QpAttr, QpAttrMask, QpCap, QpId,
    QpInit, QpNum, QpState, QpType, SendFlags, SendOp, SendWr, Sge, Stage, TcpSettings, Time, To,
};
use serde::Serialize;

use crate::stats;
use crate::sys::{self, cycles};

/// Messages that are measured, and before them such that are not.
const MESSAGES: usize = 20_000;
const WARMUP: usize = 1_000;
/// Octets of a message.
const MESSAGE: u32 = 1_024;
/// Between two events of the stack, in nanoseconds of its time.
const STEP: u64 = 20_000;

/// The stages in the order of the tables, each with what the paper's adapter took, in microseconds: data
/// sent, acknowledgement sent, data received, acknowledgement received. Headers of TCP and IP are one stage
/// here.
const STAGES: [(Stage, &str, [Option<f64>; 4]); 10] = [
    (Stage::Doorbell, "doorbell", [Some(1.0), Some(1.0), Some(1.0), Some(1.0)]),
    (Stage::Schedule, "schedule", [Some(2.0), Some(2.0), None, None]),
    (Stage::Media, "media", [None, None, Some(1.0), Some(1.0)]),
    (Stage::Parse, "parse IP and TCP", [None, None, Some(8.5), Some(15.5)]),
    (Stage::Headers, "build headers", [Some(6.0), Some(6.0), None, None]),
    (Stage::GetWr, "get WR", [Some(5.5), None, Some(5.5), None]),
    (Stage::GetData, "get data", [Some(4.5), None, None, None]),
    (Stage::PutData, "put data", [None, None, Some(4.5), None]),
    (Stage::Send, "send", [Some(1.0), Some(1.0), None, None]),
    (Stage::Update, "update", [Some(1.5), Some(1.5), Some(1.5), Some(9.0)]),
];

/// What is done with a segment, in the order of the tables' columns.
pub(crate) const COLUMNS: [&str; 4] = ["data sent", "ack sent", "data received", "ack received"];

/// What a stage takes.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct StageCost {
    /// Which.
    pub stage: &'static str,
    /// Nanoseconds, by column; `None` where the stage does not occur.
    pub ns: [Option<f64>; 4],
    /// What the paper's adapter took, in microseconds.
    pub paper_us: [Option<f64>; 4],
}

/// Adds up cycles by stage.
struct Watch {
    last: u64,
    spent: [Option<u64>; STAGES.len()],
}

impl Probe for Watch {
    #[inline]
    fn stage(&mut self, stage: Stage, _: usize) {
        let now = cycles();
        let row = STAGES.iter().position(|(known, ..)| *known == stage);
        if let Some(spent) = row.and_then(|row| self.spent.get_mut(row)) {
            *spent = Some(spent.unwrap_or(0) + now.saturating_sub(self.last));
        }
        self.last = cycles();
    }
}

/// An adapter with a queue pair.
struct End {
    adapter: Adapter<Watch>,
    cq: CqId,
    qp: QpId,
    sge: Sge,
    _memory: Segment,
    frame: Vec<u8>,
}

fn address(n: u16) -> std::net::IpAddr {
    Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, n).into()
}

impl End {
    fn new(n: u16) -> Result<Self> {
        let watch = Watch { last: cycles(), spent: [None; STAGES.len()] };
        let mut adapter = Adapter::with_probe(Config::default(), watch);
        // As in the paper, checksums are others' work.
        let offload = Offload { checksum: true, segment: 0 };
        let config = stack::Config::new(address(n), 64, Secret([7, u64::from(n)]));
        adapter.attach_inet(stack::Config { offload, ..config })?;
        let pd = adapter.alloc_pd()?;
        let (cq, _) = adapter.create_cq(16, None, 0)?;
        let cap = QpCap {
            max_send_wr: 4,
            max_recv_wr: 4,
            max_send_sge: 1,
            max_recv_sge: 1,
            max_inline_data: 0,
        };
        let qp_type = QpType::Tcp;
        let init =
            QpInit { pd, send_cq: cq, recv_cq: cq, srq: None, cap, qp_type, sq_sig_all: true };
        let (qp, _) = adapter.create_qp(&init, QpNum::new(4000, n as u8))?;
        let attr = QpAttr { state: QpState::Init, ..QpAttr::default() };
        adapter.modify_qp(Time(1), qp, &attr, QpAttrMask::STATE)?;
        let memory = Segment::heap(MESSAGE as usize);
        let region = adapter.reg_segment(pd, &memory, None, Access::LOCAL_WRITE)?;
        let sge = Sge { addr: memory.addr() as u64, len: MESSAGE, lkey: region.key };
        Ok(Self { adapter, cq, qp, sge, _memory: memory, frame: vec![0; 2048] })
    }

    /// The next frame; its length.
    fn transmit(&mut self, now: u64) -> Option<usize> {
        self.adapter.transmit_frame(Time(now), &mut self.frame).map(|frame| frame.len)
    }

    fn take(&mut self, now: u64, bytes: &[u8]) {
        self.adapter.handle_frame(Time(now), &Frame { bytes, checked: true });
    }

    /// Has the probe begin.
    fn begin(&mut self) {
        let watch = self.adapter.probe_mut();
        watch.spent = [None; STAGES.len()];
        watch.last = cycles();
    }

    fn spent(&mut self) -> [Option<u64>; STAGES.len()] {
        self.adapter.probe_mut().spent
    }

    fn expect_completion(&mut self) -> Result<()> {
        let found = self.adapter.poll_cq(self.cq, &mut [Completion::default(); 4])?;
        ensure!(found == 1, "{found} completions");
        Ok(())
    }
}

/// Both ends, connected, with a receive at the second.
fn connect() -> Result<[End; 2]> {
    let [mut here, mut there] = [End::new(1)?, End::new(2)?];
    let settings = TcpSettings::default();
    let (listener, port) = there.adapter.tcp_listen(0, &settings, 1)?;
    there.adapter.tcp_offer(Time(1), listener, there.qp)?;
    there.adapter.post_recv(Time(1), there.qp, 1, &[there.sge])?;
    here.adapter.tcp_connect(Time(1), here.qp, (address(2), port).into(), None, &settings)?;
    for turn in 1..8 {
        while let Some(len) = here.transmit(turn * STEP) {
            there.take(turn * STEP, &here.frame[..len]);
        }
        while let Some(len) = there.transmit(turn * STEP) {
            here.take(turn * STEP, &there.frame[..len]);
        }
    }
    ensure!(here.adapter.query_qp(here.qp)?.attr.state == QpState::Rts, "not connected");
    Ok([here, there])
}

/// Cycles by column and stage, of one message.
type Message = [[Option<u64>; STAGES.len()]; 4];

/// One message and its acknowledgement.
fn exchange([here, there]: &mut [End; 2], now: u64) -> Result<Message> {
    let wr = SendWr {
        wr_id: 1,
        to: To::Peer,
        op: SendOp::Send,
        flags: SendFlags::empty(),
        payload: Payload::Sges(&[here.sge]),
    };
    here.begin();
    here.adapter.post_send(here.qp, &wr)?;
    here.adapter.ring_doorbell(Time(now), here.qp);
    let data = here.transmit(now).context("no segment")?;
    let data_sent = here.spent();
    there.begin();
    there.take(now, &here.frame[..data]);
    let data_received = there.spent();
    there.expect_completion()?;
    there.begin();
    there.adapter.post_recv(Time(now), there.qp, 1, &[there.sge])?;
    let ack = there.transmit(now).context("no acknowledgement")?;
    let ack_sent = there.spent();
    here.begin();
    here.take(now, &there.frame[..ack]);
    let ack_received = here.spent();
    here.expect_completion()?;
    Ok([data_sent, ack_sent, data_received, ack_received])
}

/// Measures all stages on a processor: medians over many messages of one kilobyte.
///
/// # Errors
///
/// The adapters do not do what they should.
pub(crate) fn measure(cpu: usize) -> Result<Vec<StageCost>> {
    // A thread of its own is tied to it, and not what the caller begins later.
    let pinned = || sys::pin(cpu).context("pinning").and_then(|()| stages());
    std::thread::scope(|scope| scope.spawn(pinned).join())
        .map_err(|_| anyhow!("a thread has panicked"))?
}

fn stages() -> Result<Vec<StageCost>> {
    let mut ends = connect()?;
    let mut now = 10 * STEP;
    let mut messages = Vec::with_capacity(MESSAGES);
    let (begun, first) = (Instant::now(), cycles());
    for count in 0..WARMUP + MESSAGES {
        now += STEP;
        let message = exchange(&mut ends, now).with_context(|| format!("message {count}"))?;
        if count >= WARMUP {
            messages.push(message);
        }
        for end in &mut ends {
            end.adapter.handle_timeout(Time(now));
        }
    }
    let passed = cycles().saturating_sub(first).max(1) as f64;
    let scale = begun.elapsed().as_nanos() as f64 / passed;
    let rows = STAGES.iter().enumerate().map(|(row, (_, stage, paper_us))| {
        let ns = [0, 1, 2, 3].map(|column| {
            let all = messages.iter().filter_map(|message: &Message| message[column][row]);
            let all: Vec<_> = all.map(|cycles| cycles as f64 * scale).collect();
            // What happens now and then, such as looking after timers, is no part of the table.
            (2 * all.len() > messages.len()).then(|| stats::median(&all))
        });
        StageCost { stage, ns, paper_us: *paper_us }
    });
    Ok(rows.collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_stage_of_the_tables_takes_its_time() {
        let rows = stages().unwrap();
        for row in &rows {
            for (column, (ns, paper)) in row.ns.iter().zip(row.paper_us).enumerate() {
                // A doorbell is rung for data that is sent; others' are of the paper's adapter only.
                let rings = row.stage == "doorbell" && column > 0;
                assert!(ns.is_some() == paper.is_some() || rings, "{row:?}, {column}");
            }
        }
        let copies = rows.iter().find(|row| row.stage == "get data").unwrap();
        assert!(copies.ns[0].is_some_and(|ns| ns > 0.0), "{copies:?}");
    }
}
