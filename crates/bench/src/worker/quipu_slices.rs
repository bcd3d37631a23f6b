//! How Quipu is driven in each test, by calls that a program would make too.

use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use quipu_host::nic::{Completion, Payload, SendFlags, SendOp, SendWr, WcOpcode};

use super::quipu::{BATCH, Node, RECEIVES};
use super::{Patience, Slice};
use crate::model::{Kind, Op, Path};

type Armed<'a> = &'a mut dyn FnMut() -> Result<()>;

/// Runs this end of a slice.
pub(super) fn run(node: &Node, slice: &Slice, armed: Armed<'_>) -> Result<Duration> {
    match (slice.test.kind, slice.test.op) {
        (_, Op::Copy | Op::Connection) | (Kind::Connect | Kind::Crowd, _) => {
            bail!("that is nothing that one queue pair does")
        }
        (Kind::Latency, Op::Send) => ping_pong_sends(node, slice, armed, false),
        (Kind::Wake, Op::Send) => ping_pong_sends(node, slice, armed, true),
        (Kind::Wake, _) => bail!("nobody is woken by that"),
        (Kind::Latency, Op::Write) => ping_pong_writes(node, slice, armed),
        (Kind::Stream, Op::Send) if !node.first => receive_stream(node, slice, armed),
        _ if !node.first => attend(node, armed),
        (Kind::Latency, _) => one_sided(node, slice, armed, 1),
        (Kind::Stream, _) => one_sided(node, slice, armed, node.depth),
    }
}

/// The request that a test is about.
fn operation(node: &Node, op: Op) -> Result<SendOp> {
    let peer = node.peer()?;
    let (addr, rkey) = (peer.memory, peer.rkey);
    Ok(match op {
        Op::Send => SendOp::Send,
        Op::Write => SendOp::Write { addr, rkey },
        Op::Read => SendOp::Read { addr, rkey },
        Op::FetchAdd => SendOp::FetchAdd { addr, rkey, add: 1 },
        Op::CompareSwap => SendOp::CompareSwap { addr, rkey, compare: 0, swap: 0 },
        Op::Copy | Op::Connection => bail!("that is no operation of queue pairs"),
    })
}

/// Posts sends; every so many is signalled, which frees the places of those before it.
pub(super) struct Sender<'a> {
    node: &'a Node,
    op: SendOp,
    sge: [quipu_host::nic::Sge; 1],
    pub(super) posted: u64,
    /// Posted when the last signalled one was, among those that have completed.
    done: u64,
}

impl<'a> Sender<'a> {
    pub(super) fn new(node: &'a Node, op: Op, size: u64) -> Result<Self> {
        let sge = [node.outgoing(size)?];
        Ok(Self { node, op: operation(node, op)?, sge, posted: 0, done: 0 })
    }

    #[inline]
    pub(super) fn post(&mut self, last: bool) -> Result<()> {
        self.posted += 1;
        let signalled = last || self.posted.is_multiple_of(self.node.signal_every);
        let flags = if signalled { SendFlags::SIGNALED } else { SendFlags::empty() };
        let payload = Payload::Sges(&self.sge);
        let wr = SendWr { wr_id: self.posted, to: self.node.to, op: self.op, flags, payload };
        Ok(self.node.engine.post_send(self.node.qp, &wr)?)
    }

    #[inline]
    pub(super) fn note(&mut self, completion: &Completion) {
        self.done = completion.wr_id;
    }

    /// Waits until all that was posted is done; the last one is to be signalled.
    pub(super) fn drain(&mut self) -> Result<()> {
        let mut out = [Completion::default(); BATCH];
        let mut patience = Patience::new();
        while self.done < self.posted {
            match self.node.poll(&mut out)? {
                [] => patience.check()?,
                found => found.iter().for_each(|completion| self.note(completion)),
            }
        }
        Ok(())
    }
}

/// Posts receives, as many as a slice takes and not one more.
pub(super) struct Receiver<'a> {
    node: &'a Node,
    sge: [quipu_host::nic::Sge; 1],
    left: u64,
}

impl<'a> Receiver<'a> {
    pub(super) fn new(node: &'a Node, size: u64, total: u64) -> Result<Self> {
        let mut receiver = Self { node, sge: [node.incoming(size)?], left: total };
        for _ in 0..total.min(RECEIVES) {
            receiver.post()?;
        }
        Ok(receiver)
    }

    #[inline]
    pub(super) fn post(&mut self) -> Result<()> {
        if self.left > 0 {
            self.left -= 1;
            self.node.engine.post_recv(self.node.qp, 0, &self.sge)?;
        }
        Ok(())
    }
}

/// Both ends answer each message with one of the same size.
fn ping_pong_sends(node: &Node, slice: &Slice, armed: Armed<'_>, asleep: bool) -> Result<Duration> {
    let total = slice.warmup + slice.count;
    let mut receiver = Receiver::new(node, slice.size, total)?;
    let mut sender = Sender::new(node, Op::Send, slice.size)?;
    let mut out = [Completion::default(); BATCH];
    let mut patience = Patience::new();
    armed()?;
    let mut start = Instant::now();
    if node.first {
        sender.post(total == 1)?;
    }
    let mut got = 0;
    while got < total {
        let found = poll_or_sleep(node, &mut out, asleep)?;
        if found.is_empty() {
            patience.check()?;
        }
        for completion in found {
            if completion.opcode != WcOpcode::Recv {
                sender.note(completion);
                continue;
            }
            got += 1;
            if got == slice.warmup {
                start = Instant::now();
            }
            if sender.posted < total {
                sender.post(sender.posted + 1 == total)?;
            }
            receiver.post()?;
        }
    }
    let took = start.elapsed();
    sender.drain()?;
    Ok(took)
}

/// Polls; if there is nothing, sleeps until there is, as a program does that was told not to spin.
fn poll_or_sleep<'a>(
    node: &Node,
    out: &'a mut [Completion; BATCH],
    asleep: bool,
) -> Result<&'a [Completion]> {
    let found = node.poll(out)?.len();
    if found > 0 || !asleep {
        return Ok(&out[..found]);
    }
    node.engine.req_notify_cq(node.cq, false)?;
    // What came before the request raises no event.
    let found = node.poll(out)?.len();
    if found > 0 {
        return Ok(&out[..found]);
    }
    node.engine.wait_channel(node.channel)?;
    node.poll(out)
}

/// Both ends look at the last byte of what the other writes. On the same host they do nothing else;
/// over TCP they poll meanwhile, as they have to make the progress themselves.
fn ping_pong_writes(node: &Node, slice: &Slice, armed: Armed<'_>) -> Result<Duration> {
    let total = slice.warmup + slice.count;
    let last = usize::try_from(slice.size - 1)?;
    let flag = usize::try_from(node.half)? + last;
    node.memory.write(flag, &[0])?;
    let mut sender = Sender::new(node, Op::Write, slice.size)?;
    armed()?;
    let mut start = Instant::now();
    for turn in 1..=total {
        let mark = turn as u8;
        if !node.first {
            await_mark(node, flag, mark, &mut sender)?;
        }
        node.memory.write(last, &[mark])?;
        sender.post(turn == total)?;
        if sender.posted.is_multiple_of(node.signal_every) && node.path == Path::SameHost {
            sender.drain()?;
        }
        if node.first {
            await_mark(node, flag, mark, &mut sender)?;
        }
        if turn == slice.warmup {
            start = Instant::now();
        }
    }
    let took = start.elapsed();
    sender.drain()?;
    Ok(took)
}

fn await_mark(node: &Node, flag: usize, mark: u8, sender: &mut Sender<'_>) -> Result<()> {
    let mut byte = [0];
    let mut out = [Completion::default(); BATCH];
    let mut patience = Patience::new();
    loop {
        node.memory.read(flag, &mut byte)?;
        if byte[0] == mark {
            return Ok(());
        }
        patience.check()?;
        if node.path == Path::Tcp {
            node.poll(&mut out)?.iter().for_each(|completion| sender.note(completion));
        } else {
            std::hint::spin_loop();
        }
    }
}

/// Posts one operation after the other, with so many in flight.
fn one_sided(node: &Node, slice: &Slice, armed: Armed<'_>, depth: u64) -> Result<Duration> {
    armed()?;
    keep_posting(node, slice, slice.warmup, depth)?;
    let start = Instant::now();
    keep_posting(node, slice, slice.count, depth)?;
    let took = start.elapsed();
    if slice.test.op != Op::Send && node.path == Path::Tcp {
        let mut farewell = Sender::new(node, Op::Send, 1)?;
        farewell.post(true)?;
        farewell.drain()?;
    }
    Ok(took)
}

fn keep_posting(node: &Node, slice: &Slice, count: u64, depth: u64) -> Result<()> {
    let mut sender = Sender::new(node, slice.test.op, slice.size)?;
    let mut out = [Completion::default(); BATCH];
    let mut patience = Patience::new();
    while sender.done < count {
        while sender.posted < count && sender.posted - sender.done < depth {
            sender.post(depth == 1 || sender.posted + 1 == count)?;
        }
        match node.poll(&mut out)? {
            [] => patience.check()?,
            found => found.iter().for_each(|completion| sender.note(completion)),
        }
    }
    Ok(())
}

/// Takes a stream of sends.
fn receive_stream(node: &Node, slice: &Slice, armed: Armed<'_>) -> Result<Duration> {
    let total = slice.warmup + slice.count;
    let mut receiver = Receiver::new(node, slice.size, total)?;
    let mut out = [Completion::default(); BATCH];
    let mut patience = Patience::new();
    armed()?;
    let start = Instant::now();
    let mut got = 0;
    while got < total {
        let found = node.poll(&mut out)?;
        if found.is_empty() {
            patience.check()?;
        }
        for _ in found {
            got += 1;
            receiver.post()?;
        }
    }
    Ok(start.elapsed())
}

/// The target of one-sided operations. On the same host it sleeps: they are to cost it nothing.
/// Over TCP it polls until the other end sends word, as the peers' targets do.
fn attend(node: &Node, armed: Armed<'_>) -> Result<Duration> {
    let start = Instant::now();
    if node.path == Path::SameHost {
        armed()?;
        return Ok(start.elapsed());
    }
    let _receiver = Receiver::new(node, 1, 1)?;
    let mut out = [Completion::default(); BATCH];
    let mut patience = Patience::new();
    armed()?;
    while node.poll(&mut out)?.is_empty() {
        patience.check()?;
    }
    Ok(start.elapsed())
}
