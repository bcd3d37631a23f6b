//! The control path of raw packets: flow rules, receive work queues, and what spreads frames over them.

use quipu_fault::Call;
use quipu_nic::{
    CounterKind, CountersId, CqId, Fault, FlowId, FlowRule, PdId, QpId, QpInit, QpNum, RxHash,
    SrqId, TableId, WqState,
};

use super::events::Object;
use super::helper::Helper;
use super::{ContextId, Engine};
use crate::error::EngineError;

impl Engine {
    /// Has frames that a rule matches go to a raw packet queue pair. With the first rule, the device's
    /// interface joins the group that stands for the Ethernet segment.
    ///
    /// # Errors
    ///
    /// A rule that makes no sense, a queue pair of another service, a limit, or the kernel refuses the group.
    pub fn create_flow(&self, qp: QpId, rule: FlowRule) -> Result<FlowId, EngineError> {
        let mut core = self.enter()?;
        let segment = core.adapter.segment();
        let known = core.adapter.has_group(segment);
        let flow = core.adapter.create_flow(qp, rule)?;
        if !known {
            let port = core.adapter.config().multicast_port;
            if let Err(error) = core.datagrams.join(segment, port, 0) {
                core.adapter.destroy_flow(flow)?;
                return Err(EngineError::system("the group of Ethernet frames", error));
            }
        }
        Ok(flow)
    }

    /// Ends a rule.
    ///
    /// # Errors
    ///
    /// No such rule.
    pub fn destroy_flow(&self, flow: FlowId) -> Result<(), EngineError> {
        let mut core = self.enter()?;
        if core.adapter.destroy_flow(flow)? {
            let segment = core.adapter.segment();
            core.datagrams.leave(segment, 0);
        }
        Ok(())
    }

    /// Creates counters, of which there are none yet.
    ///
    /// # Errors
    ///
    /// No room.
    pub fn create_counters(&self) -> Result<CountersId, EngineError> {
        Ok(self.enter_for(Call::CreateCounters)?.adapter.create_counters()?)
    }

    /// Has the value at `index` grow by what is counted.
    ///
    /// # Errors
    ///
    /// Rules count there already, an index out of range, or no such counters.
    pub fn attach_counter(
        &self,
        counters: CountersId,
        kind: CounterKind,
        index: usize,
    ) -> Result<(), EngineError> {
        Ok(self.enter()?.adapter.attach_counter(counters, kind, index)?)
    }

    /// The values of counters; 0 where there is none.
    ///
    /// # Errors
    ///
    /// No such counters.
    pub fn read_counters(
        &self,
        counters: CountersId,
        values: &mut [u64],
    ) -> Result<(), EngineError> {
        let mut core = self.enter()?;
        // What has arrived by now counts.
        core.run();
        Ok(core.adapter.read_counters(counters, values)?)
    }

    /// Destroys counters.
    ///
    /// # Errors
    ///
    /// Rules count there, or there are none.
    pub fn destroy_counters(&self, counters: CountersId) -> Result<(), EngineError> {
        Ok(self.enter()?.adapter.destroy_counters(counters)?)
    }

    /// Creates a receive work queue; its handle, its size and its elements per request.
    ///
    /// # Errors
    ///
    /// A size out of range, an object that does not exist, or no room.
    pub fn create_wq(
        &self,
        pd: PdId,
        cq: CqId,
        max_wr: u32,
        max_sge: u32,
    ) -> Result<(SrqId, u32, u32), EngineError> {
        let mut core = self.enter()?;
        let wq = core.adapter.create_wq(pd, cq, max_wr, max_sge)?;
        let (max_wr, max_sge, _) = core.adapter.query_srq(wq)?;
        Ok((wq, max_wr, max_sge))
    }

    /// Moves a receive work queue to a state, from `curr` or, if that is `None`, from any.
    ///
    /// # Errors
    ///
    /// It is none, or in another state, or there is no such transition.
    pub fn modify_wq(
        &self,
        wq: SrqId,
        curr: Option<WqState>,
        state: WqState,
    ) -> Result<(), EngineError> {
        let mut core = self.enter_for(Call::ModifyWq)?;
        if let Some(curr) = curr
            && curr != core.adapter.wq_state(wq)?
        {
            return Err(Fault::Transition("the work queue is not in curr_wq_state").into());
        }
        let now = core.now();
        core.adapter.modify_wq(now, wq, state)?;
        // Somebody may sleep for what is flushed.
        core.finish_call();
        Ok(())
    }

    /// Destroys a receive work queue.
    ///
    /// # Errors
    ///
    /// Tables have it, or there is none.
    pub fn destroy_wq(&self, wq: SrqId) -> Result<(), EngineError> {
        Ok(self.enter()?.adapter.destroy_srq(wq)?)
    }

    /// Creates an indirection table of receive work queues, a power of two of them.
    ///
    /// # Errors
    ///
    /// Another number, one that is none, or no room.
    pub fn create_ind_table(&self, queues: &[SrqId]) -> Result<TableId, EngineError> {
        Ok(self.enter_for(Call::CreateRwqIndTable)?.adapter.create_ind_table(queues)?)
    }

    /// Destroys an indirection table.
    ///
    /// # Errors
    ///
    /// Queue pairs use it, or there is none.
    pub fn destroy_ind_table(&self, table: TableId) -> Result<(), EngineError> {
        Ok(self.enter()?.adapter.destroy_ind_table(table)?)
    }

    /// Creates a raw packet queue pair that receives by an indirection table; its handle and its number.
    /// It is destroyed as any.
    ///
    /// # Errors
    ///
    /// Objects that do not exist, no room; or the kernel refuses a port or thread.
    pub fn create_hashed_qp(
        &self,
        context: ContextId,
        pd: PdId,
        table: TableId,
        hash: RxHash,
    ) -> Result<(QpId, QpNum), EngineError> {
        if !self.is_here() {
            return Err(EngineError::EngineGone);
        }
        Helper::start(&self.inner)?;
        let mut core = self.enter_for(Call::CreateQp)?;
        let number =
            core.take_datagram_number().map_err(|e| EngineError::system("a UDP port", e))?;
        match core.adapter.create_hashed_qp(pd, table, hash, number) {
            Ok(qp) => {
                core.events.add_object(Object::Qp(qp), context, None);
                if let Some(faults) = &mut core.faults {
                    faults.add_qp(qp, number, &QpInit::hashed(pd, table));
                }
                Ok((qp, number))
            }
            Err(fault) => {
                core.give_back_number(number);
                Err(fault.into())
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::*;
    use crate::engine::tests::idle;

    const PATIENCE: Duration = Duration::from_secs(20);

    /// No descriptor says that something is flushed.
    #[test]
    fn who_sleeps_for_a_receive_of_a_work_queue_is_woken_when_it_is_flushed() {
        let engine = idle();
        let (context, _) = engine.open_context().unwrap();
        let pd = engine.alloc_pd().unwrap();
        let (channel, _) = engine.create_channel().unwrap();
        let (cq, _) = engine.create_cq(context, 8, Some(channel), 0).unwrap();
        let (wq, ..) = engine.create_wq(pd, cq, 4, 1).unwrap();
        engine.modify_wq(wq, None, WqState::Ready).unwrap();
        engine.doorbell().unwrap().post_wq_recv(wq, 1, &[]).unwrap();
        engine.req_notify_cq(cq, false).unwrap();
        let begun = Instant::now();
        std::thread::scope(|scope| {
            let sleeper = scope.spawn(|| engine.wait_channel_within(channel, Some(PATIENCE)));
            while !engine.inner.core.lock().driver {
                assert!(begun.elapsed() < PATIENCE, "it does not sleep");
                std::thread::yield_now();
            }
            engine.modify_wq(wq, None, WqState::Err).unwrap();
            assert_eq!(sleeper.join().unwrap().unwrap().cq, cq);
        });
        assert!(begun.elapsed() < PATIENCE, "it slept to the end");
    }
}
