//! The checkers: every completion and every byte against the model.

use quipu_nic::{Completion, WcOpcode, WcStatus};

use crate::limits::PATIENCE_NS;
use crate::load::{LONGEST_TICK_NS, Load};
use crate::model::{Recv, Sent, Stage, WindowState, WindowUse};
use crate::world::{LoadEvent, World, WorldEvent};

impl Load {
    /// Schedules a look at a completion queue.
    pub fn poll_later(&mut self, world: &mut World, cq: usize) {
        let queue = &self.cqs[cq];
        let after = (1 + self.rng.below(queue.poll_ns)) << queue.idle.min(20);
        let after = after.min(LONGEST_TICK_NS);
        if !std::mem::replace(&mut self.cqs[cq].scheduled, true) {
            world.kernel.after(after, WorldEvent::Load(LoadEvent::Poll { cq }));
        }
    }

    /// A program looks at a completion queue: once if it polls, until it is empty if it waits for events.
    pub(crate) fn poll(&mut self, world: &mut World, cq: usize) {
        self.cqs[cq].scheduled = false;
        let (host, id, by_event) = (self.cqs[cq].host, self.cqs[cq].id, self.cqs[cq].by_event);
        if !world.hosts[host].alive || self.teardown {
            return;
        }
        world.wake(host);
        let first = world.look_at(host, id);
        if let Some(done) = &first {
            self.completion(world, host, cq, done);
        }
        if by_event {
            while self.take_completions(world, cq) > 0 {}
            self.check_told(world, cq);
            let solicited = self.rng.percent(30);
            self.ask(world, cq, solicited);
            while self.take_completions(world, cq) > 0 {}
        } else {
            let taken = usize::from(first.is_some()) + self.take_completions(world, cq);
            self.cqs[cq].idle = if taken > 0 { 0 } else { self.cqs[cq].idle + 1 };
            if self.pairs.iter().any(|pair| !pair.done) {
                self.poll_later(world, cq);
            }
        }
        world.serve(host);
        self.check_limits(world, host);
    }

    /// Takes what a completion queue has, up to a batch; how many.
    pub fn take_completions(&mut self, world: &mut World, cq: usize) -> usize {
        let (host, id, batch) = (self.cqs[cq].host, self.cqs[cq].id, self.cqs[cq].batch);
        let mut polled = std::mem::take(&mut self.polled);
        let count = world.poll_cq(host, id, &mut polled[..batch]);
        for completion in &polled[..count] {
            self.completion(world, host, cq, completion);
        }
        self.polled = polled;
        count
    }

    fn completion(&mut self, world: &mut World, host: usize, cq: usize, done: &Completion) {
        self.completions += 1;
        self.errors += u64::from(done.status != WcStatus::Success);
        let fields = [host as u64, done.wr_id, done.status as u64, u64::from(done.byte_len)];
        world.trace.note(&[30]);
        world.trace.note(&fields);
        let Some(&e) = self.by_num.get(&(host, done.qp_num)) else {
            return world.violate(|| format!("host {host}: a completion of nobody: {done:?}"));
        };
        world.trace.line(world.kernel.now(), || {
            format!(
                "end {e} got {} {:?} {:?} {} B {:?}",
                done.wr_id, done.opcode, done.status, done.byte_len, done.extra
            )
        });
        let end = &self.ends[e];
        if end.stage == Stage::Gone {
            return world.violate(|| format!("end {e} is gone and still completes: {done:?}"));
        }
        let id = done.wr_id;
        let is_send = end.sq.iter().any(|sent| sent.id == id);
        let right_cq = if is_send { end.send_cq } else { end.recv_cq };
        if right_cq != cq {
            return world.violate(|| format!("end {e}: completion in the wrong queue: {done:?}"));
        }
        let next = end.inbound.front().filter(|_| !is_send);
        let solicited = next.is_some_and(|message| message.solicited);
        let checked =
            if is_send { self.send_done(world, e, done) } else { self.receive_done(e, done) };
        self.note_found(cq, done, solicited);
        if let Err(what) = checked {
            world.violate(|| format!("end {e}: {what}: {done:?}"));
        }
    }

    fn send_done(&mut self, world: &World, e: usize, done: &Completion) -> Result<(), String> {
        while let Some(sent) = self.ends[e].sq.pop_front() {
            if sent.id != done.wr_id {
                if sent.signaled {
                    return Err(format!("request {} was passed over", sent.id));
                }
                if self.ends[e].failed.is_some() {
                    return Err(format!("request {} was not flushed", sent.id));
                }
                // An unsignalled request succeeded if a later one completes.
                self.request_succeeded(world, e, &sent)?;
                continue;
            }
            if done.status == WcStatus::Success {
                if !sent.signaled {
                    return Err("it was not signalled".into());
                }
                let answer = sent.sink.is_some();
                if done.opcode != sent.opcode || (answer && done.byte_len as usize != sent.len) {
                    return Err(format!("must be {:?} of {} bytes", sent.opcode, sent.len));
                }
                if sent.while_drained && self.ends[e].stage == Stage::Sqd {
                    return Err("posted in SQD and completed in SQD".into());
                }
                return self.request_succeeded(world, e, &sent);
            }
            return self.request_failed(world, e, &sent, done.status);
        }
        Err("no such request".into())
    }

    fn request_succeeded(&mut self, world: &World, e: usize, sent: &Sent) -> Result<(), String> {
        if let Some(failed) = self.ends[e].failed {
            return Err(format!("success after {failed:?}"));
        }
        if sent.trap.is_some() {
            return Err(format!("request {} was to fail, and did not", sent.id));
        }
        self.succeeded[sent.id as usize] = true;
        if let Some((arena, at, bytes)) = &sent.effect {
            self.overwritten(*arena, *at, bytes);
            if world.hosts[self.arenas[*arena].host].alive {
                self.check_effect(e, *arena, *at, bytes.len())
                    .map_err(|what| format!("request {}: {what}", sent.id))?;
            }
        }
        if let Some(range) = sent.flushes {
            self.check_flushed(world, e, range)
                .map_err(|what| format!("flush {}: {what}", sent.id))?;
        }
        if let Some((counter, add)) = sent.counter {
            return self.counted(sent, counter, add);
        }
        if sent.sink.is_some() {
            self.check_answer(e, sent)
                .map_err(|what| format!("answer of request {}: {what}", sent.id))?;
        }
        if let Some((window, what)) = sent.window {
            self.window_done(window, what);
        }
        Ok(())
    }

    /// Compares what a read or atomic brought with what must be. What was posted behind a read and did not
    /// wait for it, by a fence, may have overtaken it (IBA 10.8.3.3).
    fn check_answer(&mut self, e: usize, sent: &Sent) -> Result<(), String> {
        let Some((pieces, must)) = &sent.sink else { return Ok(()) };
        let mut bytes = must.to_vec();
        if let (WcOpcode::RdmaRead, Some((arena, at))) = (sent.opcode, sent.source) {
            let mut is = Vec::with_capacity(bytes.len());
            for piece in pieces {
                let start = is.len();
                is.resize(start + piece.len, 0);
                let _ = self.arenas[piece.arena].segment.read(piece.at, &mut is[start..]);
            }
            for later in self.ends[e].sq.iter().take_while(|later| !later.fenced) {
                let Some((of, start, effect)) = &later.effect else { continue };
                let (low, high) = (at.max(*start), (at + bytes.len()).min(start + effect.len()));
                for place in low..high.max(low) {
                    if *of == arena && is[place - at] == effect[place - start] {
                        bytes[place - at] = is[place - at];
                    }
                }
            }
        }
        self.expect_bytes(pieces, &bytes)
    }

    /// Compares the peer's memory with what was written there, by this request or by later ones.
    fn check_effect(&self, e: usize, arena: usize, at: usize, len: usize) -> Result<(), String> {
        let place = &self.arenas[arena];
        let mut is = vec![0; len];
        let _ = place.segment.read(at, &mut is);
        let must = &place.shadow[at..at + len];
        if is == must {
            return Ok(());
        }
        for (offset, (&is, &must)) in is.iter().zip(must).enumerate() {
            let later = || {
                self.ends[e].sq.iter().filter_map(|sent| sent.effect.as_ref()).any(
                    |(of, start, bytes)| {
                        let offset = (at + offset).checked_sub(*start);
                        *of == arena && offset.and_then(|offset| bytes.get(offset)) == Some(&is)
                    },
                )
            };
            if is != must && !later() {
                return Err(format!(
                    "byte {offset} of {len} at the peer is {is:#04x}, must be {must:#04x}"
                ));
            }
        }
        Ok(())
    }

    /// An addition to a shared word succeeded; what it saw is checked against the others at the end.
    fn counted(&mut self, sent: &Sent, counter: usize, add: u64) -> Result<(), String> {
        // Its sink is the one piece that the request was given.
        let Some((pieces, _)) = &sent.sink else { return Ok(()) };
        let Some(piece) = pieces.first() else { return Ok(()) };
        let mut word = [0; 8];
        let arena = &mut self.arenas[piece.arena];
        let _ = arena.segment.read(piece.at, &mut word);
        arena.shadow[piece.at..piece.at + 8].copy_from_slice(&word);
        self.counters[counter].done.push((u64::from_ne_bytes(word), add));
        Ok(())
    }

    fn window_done(&mut self, window: usize, what: WindowUse) {
        let window = &mut self.windows[window];
        match what {
            WindowUse::Bind => window.state = WindowState::Bound,
            WindowUse::Invalidate => window.state = WindowState::Free,
            WindowUse::Access => window.users -= 1,
        }
    }

    fn request_failed(
        &mut self,
        world: &World,
        e: usize,
        sent: &Sent,
        status: WcStatus,
    ) -> Result<(), String> {
        self.lost_request(e, sent);
        if self.ends[e].failed.is_some() {
            if status == WcStatus::WrFlushErr {
                return Ok(());
            }
            return Err("only the first failure has a status of its own".into());
        }
        self.ends[e].failed = Some(status);
        self.ends[e].broken = true;
        self.ends[e].ops_left = 0;
        self.judge(world, e, sent, status)
    }

    /// Whether the first failure of an end is one that may happen.
    fn judge(
        &mut self,
        world: &World,
        e: usize,
        sent: &Sent,
        status: WcStatus,
    ) -> Result<(), String> {
        let (pair, peer) = (self.ends[e].pair, self.ends[e].peer);
        if let Some(expected) = &sent.trap
            && expected.contains(&status)
        {
            return Ok(());
        }
        let rnr = status == WcStatus::RnrRetryExcErr;
        if rnr && self.ends[e].attr.rnr_retry != 7 && self.ends[peer].starved {
            self.cause(pair, format!("end {peer} had no receive for too long"));
            return Ok(());
        }
        if self.is_damaged(world, pair) {
            // The connection ends at once; who learns how depends on where the damage was.
            use WcStatus as S;
            let damage =
                [S::BadRespErr, S::RemOpErr, S::RemInvReqErr, S::RemAccessErr, S::GeneralErr];
            if damage.contains(&status) {
                self.cause(pair, "a damaged stream");
                return Ok(());
            }
        }
        if self.pairs[pair].explains.contains(&status) {
            return Ok(());
        }
        if !matches!(status, WcStatus::WrFlushErr | WcStatus::RetryExcErr) {
            return Err(format!("request {} must not fail so", sent.id));
        }
        // To a queue pair that is connected to itself its own refusal may come as the peer's error.
        let alone = self.pairs[pair].trap == Some(e) && peer != e && !self.disturbed(world, pair);
        if alone && (sent.trap.is_some() || self.ends[e].sq.iter().any(|sent| sent.trap.is_some()))
        {
            return Err(format!("request {} fails with {status:?}, and the trap decides", sent.id));
        }
        self.ends[e].collateral.get_or_insert(format!("request {}: {status:?}", sent.id));
        Ok(())
    }

    /// Whether anything but its trap may disturb a pair.
    fn disturbed(&self, world: &World, pair: usize) -> bool {
        let it = &self.pairs[pair];
        let gives_up = |&e: &usize| {
            let end = &self.ends[e];
            end.attr.rnr_retry != 7 && self.ends[end.peer].starved
        };
        it.causes.is_empty()
            || !it.causes.iter().all(|cause| cause.contains(" at end "))
            || !it.explains.is_empty()
            || self.is_damaged(world, pair)
            || it.ends.iter().any(gives_up)
    }

    /// A request failed: it may have been executed, in part or in whole.
    pub fn lost_request(&mut self, e: usize, sent: &Sent) {
        let overtaken = sent.source.is_some_and(|(arena, _)| {
            let effects = self.ends[e].sq.iter().filter_map(|later| later.effect.as_ref());
            effects.into_iter().any(|(of, ..)| *of == arena)
        });
        if let Some((arena, at, bytes)) = &sent.effect {
            let place = &mut self.arenas[*arena];
            let list = if sent.whole { &mut place.words } else { &mut place.maybe };
            list.push((*at, bytes.clone()));
        }
        if let Some((counter, add)) = sent.counter {
            self.counters[counter].unknown.push(add);
        }
        if let Some((pieces, bytes)) = &sent.sink {
            if bytes.is_empty() || sent.counter.is_some() || overtaken {
                pieces.iter().for_each(|piece| {
                    self.arenas[piece.arena].wild.push((piece.at, piece.len));
                });
            } else {
                let mut from = 0;
                for piece in pieces {
                    let part = bytes[from..(from + piece.len).min(bytes.len())].into();
                    self.arenas[piece.arena].maybe.push((piece.at, part));
                    from += piece.len;
                }
            }
        }
    }

    /// A receive failed: a message may have begun in it.
    pub fn lost_receive(&mut self, recv: &Recv) {
        for piece in &recv.pieces {
            self.arenas[piece.arena].wild.push((piece.at, piece.len));
        }
    }

    /// A message may have begun in a receive of a shared queue when its queue pair was reset, destroyed or
    /// died: such a receive completes never.
    pub fn excuse_shared_receives(&mut self) {
        if self.mishaps.is_empty() {
            return;
        }
        for srq in 0..self.srqs.len() {
            for recv in std::mem::take(&mut self.srqs[srq].posted).into_values() {
                self.lost_receive(&recv);
            }
        }
    }

    fn receive_done(&mut self, e: usize, done: &Completion) -> Result<(), String> {
        let recv = match self.ends[e].srq {
            Some(srq) => {
                let srq = &mut self.srqs[srq];
                let recv = srq.posted.remove(&done.wr_id);
                srq.fell |= srq.posted.len() < srq.limit;
                recv
            }
            None => {
                let front = self.ends[e].rq.pop_front();
                if front.as_ref().is_some_and(|front| front.id != done.wr_id) {
                    return Err("receives complete out of order".into());
                }
                front
            }
        };
        let recv = recv.ok_or("no such request")?;
        if done.status != WcStatus::Success {
            self.lost_receive(&recv);
            return self.receive_failed(e, done.status);
        }
        let Some(message) = self.ends[e].inbound.pop_front() else {
            return Err("a message that nobody sent".into());
        };
        let right = done.opcode == message.opcode
            && done.extra == message.extra
            && done.byte_len as usize == message.byte_len
            && done.src_qp.0 == self.ends[e].attr.dest_qp_num;
        if !right {
            return Err(format!(
                "must be message {}: {:?} {:?} of {} bytes",
                message.id, message.opcode, message.extra, message.byte_len
            ));
        }
        let placed = if message.opcode == WcOpcode::Recv { &message.payload[..] } else { &[] };
        self.expect_bytes(&recv.pieces, placed)
            .map_err(|what| format!("payload of message {}: {what}", message.id))
    }

    fn receive_failed(&mut self, e: usize, status: WcStatus) -> Result<(), String> {
        let pair = self.ends[e].pair;
        if !self.ends[e].broken {
            self.ends[e].broken = true;
            self.ends[e].ops_left = 0;
            self.ends[e].collateral.get_or_insert(format!("a receive: {status:?}"));
        }
        if status == WcStatus::WrFlushErr || self.pairs[pair].recv_trap.contains(&status) {
            return Ok(());
        }
        Err("a receive must not fail so".into())
    }

    /// Whether everything that was asked for has an end; notes it for each connection.
    pub fn all_done(&mut self) -> bool {
        let mut all = true;
        for pair in &mut self.pairs {
            // A connection is not over before it was begun.
            let unborn = |&e: &usize| self.ends[e].before.is_some_and(|old| self.ends[old].exists);
            if pair.done || pair.ends.iter().any(unborn) {
                all &= pair.done;
                continue;
            }
            let clean = pair.causes.is_empty();
            pair.done = pair.ends.iter().all(|&e| {
                let end = &self.ends[e];
                // Unsignalled requests that succeeded before the failure complete never.
                let silent = end.broken && end.sq.iter().all(|sent| !sent.signaled);
                let drained = !end.drain_owed || end.broken;
                let idle = end.ops_left == 0 && (end.sq.is_empty() || silent) && drained;
                // What the peer still had to send when it failed never comes.
                let failed = end.collateral.is_some() || self.ends[end.peer].collateral.is_some();
                idle && (!clean || end.inbound.is_empty() || failed)
            });
            all &= pair.done;
        }
        all
    }

    /// Whether an end has a request for whose answer it does not wait for ever, and still waits.
    fn waits_too_long(&self, world: &World, e: usize) -> bool {
        let end = &self.ends[e];
        let attr = &end.attr;
        let limit = 4 * (4096_u64 << attr.timeout) * (u64::from(attr.retry_cnt) + 1);
        let limited = attr.timeout != 0 && limit < PATIENCE_NS * 3 / 4;
        let asks = end.stage == Stage::Rts && end.sq.iter().any(|sent| sent.signaled);
        limited && asks && end.exists && world.hosts[end.host].alive
    }

    /// Whether a connection is not done, and nothing has happened that excuses it.
    pub fn stuck(&self, world: &World) -> Option<String> {
        for (index, pair) in self.pairs.iter().enumerate() {
            // Its own trap lets an end come to an end, if not its peer, which may never have reached it.
            let trapped = pair.trap.is_some_and(|e| !self.ends[e].broken);
            let excused = !pair.causes.is_empty() && (!trapped || self.disturbed(world, index));
            // The frames of start-up have no CRC. An end that was refused for what damage made of them is
            // idle, and one that waits for it without a limit does so for ever.
            let waits = |&e: &usize| self.ends[e].attr.timeout == 0 && !self.ends[e].sq.is_empty();
            let damaged = self.is_damaged(world, index) && pair.ends.iter().any(waits);
            let late = pair.ends.iter().any(|&e| self.waits_too_long(world, e));
            if pair.done || ((excused || damaged) && !late) {
                continue;
            }
            let ends: Vec<String> = pair
                .ends
                .iter()
                .map(|&e| {
                    let end = &self.ends[e];
                    let oldest = end.sq.front().map(|sent| (sent.id, sent.opcode));
                    let state = world.hosts[end.host].adapter.query_qp(end.qp);
                    let state = state.map(|info| info.attr.state);
                    format!(
                        "end {e} host {} {:?}/{state:?}: {} ops left, {} in the send queue, oldest {oldest:?}, \
                         {} receives posted, {} messages due, drain owed {}",
                        end.host,
                        end.stage,
                        end.ops_left,
                        end.sq.len(),
                        end.rq.len(),
                        end.inbound.len(),
                        end.drain_owed,
                    )
                })
                .collect();
            let streams = world.describe_streams();
            let ends = ends.join("; ");
            return Some(format!("connection {index} makes no progress: {ends}{streams}"));
        }
        None
    }
}
