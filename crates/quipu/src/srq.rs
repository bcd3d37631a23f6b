//! Receive queues that queue pairs share.

use std::sync::Arc;

use quipu_host::nic::{Sge, SrqId};

use crate::device::ProtectionDomain;
use crate::error::Error;
use crate::post;

/// A receive queue for any number of queue pairs: each message takes the oldest request.
///
/// Clones are the same queue.
#[derive(Clone, Debug)]
pub struct SharedReceiveQueue {
    pub(crate) inner: Arc<Queue>,
}

#[derive(Debug)]
pub(crate) struct Queue {
    pub(crate) pd: ProtectionDomain,
    pub(crate) id: SrqId,
}

impl Drop for Queue {
    fn drop(&mut self) {
        let _ = self.pd.device().opened.engine.destroy_srq(self.id);
    }
}

impl SharedReceiveQueue {
    pub(crate) fn new(pd: &ProtectionDomain, max_wr: u32, max_sge: u32) -> Result<Self, Error> {
        let opened = &pd.device().opened;
        let id = opened.engine.create_srq(opened.context, pd.inner.id, max_wr, max_sge)?;
        Ok(Self { inner: Arc::new(Queue { pd: pd.clone(), id }) })
    }

    /// Hands memory to the adapter, to be filled by one message of any of the queue pairs. `wr_id`
    /// comes back in the completion.
    ///
    /// # Errors
    ///
    /// The queue is full, or there are more pieces than it takes.
    pub fn post_recv(&self, wr_id: u64, memory: &[Sge]) -> Result<(), Error> {
        Ok(self.inner.pd.device().opened.engine.post_srq_recv(self.inner.id, wr_id, memory)?)
    }

    /// Hands several receives to the adapter, each with its number and its memory, under one lock: cheaper
    /// than one by one.
    ///
    /// # Errors
    ///
    /// As [`post_recv`](Self::post_recv), with the number of receives that were taken before.
    pub fn post_recvs(&self, receives: &[(u64, &[Sge])]) -> Result<(), (usize, Error)> {
        let engine = &self.inner.pd.device().opened.engine;
        post::list(engine, receives, |doorbell, (wr_id, memory)| {
            doorbell.post_srq_recv(self.inner.id, *wr_id, memory)
        })
    }

    /// Asks for one [`SrqLimitReached`](crate::AsyncEvent::SrqLimitReached) as soon as fewer than
    /// `limit` requests are left; 0 takes that back.
    ///
    /// # Errors
    ///
    /// A limit beyond the queue's size.
    pub fn set_limit(&self, limit: u32) -> Result<(), Error> {
        let engine = &self.inner.pd.device().opened.engine;
        Ok(engine.modify_srq(self.inner.id, None, Some(limit))?)
    }
}
