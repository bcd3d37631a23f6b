//! Bundles.

use std::sync::Arc;
use std::time::{Duration, Instant};

use quipu_am::BundleId;

use super::port::{Port, Shared};
use super::{Endpoint, Error};

/// Empty polls before a thread that waits goes to sleep.
const SPINS: u32 = 2000;

/// Endpoints that are polled together. When it is dropped, its endpoints are freed.
#[derive(Debug)]
pub struct Bundle {
    port: Port,
    id: BundleId,
}

impl Drop for Bundle {
    fn drop(&mut self) {
        let _ = self.port.shared.lock().core.free_bundle(self.id);
    }
}

impl Bundle {
    pub(super) fn new(port: Port, id: BundleId) -> Self {
        Self { port, id }
    }

    pub(super) fn shared(&self) -> &Arc<Shared> {
        &self.port.shared
    }

    pub(super) fn id(&self) -> BundleId {
        self.id
    }

    /// The port it belongs to.
    #[must_use]
    pub fn port(&self) -> &Port {
        &self.port
    }

    /// Creates an endpoint, whose tag is [`Tag::NONE`](super::Tag::NONE): it takes no messages yet.
    ///
    /// # Errors
    ///
    /// The bundle was freed.
    pub fn endpoint(&self) -> Result<Endpoint, Error> {
        let id = self.shared().lock().core.create_endpoint(self.id)?;
        Ok(Endpoint::new(self.port.clone(), id))
    }

    /// Makes progress, and runs the handlers of messages that are there; how many.
    ///
    /// # Errors
    ///
    /// The adapter is gone.
    #[inline]
    pub fn poll(&self) -> Result<usize, Error> {
        self.shared().poll(self.id)
    }

    /// Messages that have come so far, whether their handlers have run or not. A program that is
    /// about to wait reads it first: [`wait`](Self::wait) returns when there are more.
    ///
    /// # Errors
    ///
    /// The bundle was freed.
    pub fn arrivals(&self) -> Result<u64, Error> {
        Ok(self.shared().lock().core.arrivals(self.id)?)
    }

    /// Waits until more than `seen` messages have come, or for `most`; whether they have. Runs no
    /// handlers.
    ///
    /// # Errors
    ///
    /// The adapter is gone.
    pub fn wait(&self, seen: u64, most: Option<Duration>) -> Result<bool, Error> {
        let began = Instant::now();
        let mut spins = 0;
        loop {
            {
                let mut state = self.shared().lock();
                self.shared().drain(&mut state)?;
                if state.core.arrivals(self.id)? > seen {
                    return Ok(true);
                }
            }
            let left = most.map(|most| most.saturating_sub(began.elapsed()));
            if left.is_some_and(|left| left.is_zero()) {
                return Ok(false);
            }
            spins += 1;
            if spins < SPINS {
                std::hint::spin_loop();
            } else {
                self.shared().sleep(self.id, Some(seen), left)?;
            }
        }
    }

    /// Sleeps until a message may have come, or `most` is over. May return early. Runs no handlers, so a
    /// caller polls next.
    ///
    /// # Errors
    ///
    /// The adapter is gone.
    pub fn sleep(&self, most: Duration) -> Result<(), Error> {
        self.shared().sleep(self.id, None, Some(most))
    }
}
