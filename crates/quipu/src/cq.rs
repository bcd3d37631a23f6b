//! Completion queues.

use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use quipu_host::EngineError;
use quipu_host::nic::{ChannelId, Completion, CqId, WcStatus};

use crate::device::Device;
use crate::error::Error;

/// How long [`CompletionQueue::wait`] polls before it sleeps. A sleeper is woken some 20 to 50 us
/// late, so what takes no longer is better awaited awake.
const SPIN: Duration = Duration::from_micros(50);
/// The longest time that events are held back, as `ibv_modify_cq` has it.
const LONGEST_PERIOD: Duration = Duration::from_micros(1 << 32);
/// Polls between two readings of the clock.
const POLLS_PER_READING: u32 = 64;

/// Where work requests report that they are done.
///
/// Clones are the same queue. Any number of threads may poll or wait.
#[derive(Clone, Debug)]
pub struct CompletionQueue {
    pub(crate) inner: Arc<Queue>,
}

#[derive(Debug)]
pub(crate) struct Queue {
    pub(crate) device: Device,
    pub(crate) id: CqId,
    pub(crate) channel: ChannelId,
    fd: RawFd,
    entries: u32,
}

impl Drop for Queue {
    fn drop(&mut self) {
        let engine = &self.device.opened.engine;
        let _ = engine.destroy_cq(self.id);
        let _ = engine.destroy_channel(self.channel);
    }
}

impl CompletionQueue {
    pub(crate) fn new(device: &Device, entries: u32) -> Result<Self, Error> {
        let opened = &device.opened;
        let (channel, fd) = opened.engine.create_channel()?;
        match opened.engine.create_cq(opened.context, entries, Some(channel), 0) {
            Ok((id, entries)) => {
                let queue = Queue { device: device.clone(), id, channel, fd, entries };
                Ok(Self { inner: Arc::new(queue) })
            }
            Err(error) => {
                let _ = opened.engine.destroy_channel(channel);
                Err(error.into())
            }
        }
    }

    /// Completions it holds. One more overruns it, which is fatal to its queue pairs.
    #[must_use]
    pub fn entries(&self) -> u32 {
        self.inner.entries
    }

    /// Takes completions, oldest first, as many as there are and `out` holds; how many. Whoever
    /// polls drives the adapter.
    ///
    /// # Errors
    ///
    /// The engine belongs to the parent of this process.
    pub fn poll(&self, out: &mut [Completion]) -> Result<usize, Error> {
        Ok(self.inner.device.opened.engine.poll_cq(self.inner.id, out)?)
    }

    /// As [`poll`](Self::poll), but waits until there is at least one: polling at first, asleep
    /// soon. Returns 0 only if `out` is empty.
    ///
    /// # Errors
    ///
    /// As [`poll`](Self::poll).
    pub fn wait(&self, out: &mut [Completion]) -> Result<usize, Error> {
        if out.is_empty() {
            return Ok(0);
        }
        let begun = Instant::now();
        while begun.elapsed() < SPIN {
            for _ in 0..POLLS_PER_READING {
                match self.poll(out)? {
                    0 => std::hint::spin_loop(),
                    found => return Ok(found),
                }
            }
        }
        let (engine, queue) = (&self.inner.device.opened.engine, &self.inner);
        loop {
            match engine.wait_completion(queue.id, queue.channel) {
                Ok(()) | Err(EngineError::Interrupted) => {}
                Err(error) => return Err(error.into()),
            }
            // Another thread may have taken what woke this one.
            match self.poll(out)? {
                0 => {}
                found => return Ok(found),
            }
        }
    }

    /// As [`wait`](Self::wait), but asleep at once and not for longer than `limit`. Returns 0 if nothing has
    /// completed by then.
    ///
    /// # Errors
    ///
    /// As [`poll`](Self::poll).
    pub fn wait_timeout(&self, out: &mut [Completion], limit: Duration) -> Result<usize, Error> {
        let (engine, queue) = (&self.inner.device.opened.engine, &self.inner);
        let begun = Instant::now();
        loop {
            let left = limit.saturating_sub(begun.elapsed());
            match self.poll(out)? {
                0 if !out.is_empty() && !left.is_zero() => {}
                found => return Ok(found),
            }
            match engine.wait_completion_within(queue.id, queue.channel, left) {
                Ok(()) | Err(EngineError::Interrupted) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Waits for the next completion, which must be a success.
    ///
    /// # Errors
    ///
    /// [`Error::Work`] if the work request failed; as [`poll`](Self::poll).
    pub fn next(&self) -> Result<Completion, Error> {
        let mut out = [Completion::default()];
        self.wait(&mut out)?;
        let [completion] = out;
        match completion.status {
            WcStatus::Success => Ok(completion),
            _ => Err(Error::Work(completion)),
        }
    }

    /// Asks for one event at the next completion; or, if `solicited_only`, at the next one that its
    /// sender solicited or that failed. At once if there are some that no event has told of since completions
    /// were last taken. For programs that watch the descriptor themselves.
    ///
    /// # Errors
    ///
    /// As [`poll`](Self::poll).
    pub fn request_event(&self, solicited_only: bool) -> Result<(), Error> {
        Ok(self.inner.device.opened.engine.req_notify_cq(self.inner.id, solicited_only)?)
    }

    /// Holds events back until `count` completions have come, or `period` has passed since the first of
    /// them; not any more if either is zero. A program that sleeps ([`wait`](Self::wait)) is then woken
    /// once for many. What it has under way should be more than it sleeps for, so that the adapter always
    /// has work. A period of more than 2^32 us (71 minutes) is taken as that.
    ///
    /// ```
    /// # use quipu::{Config, Device, Request};
    /// # use std::time::Duration;
    /// # fn main() -> Result<(), quipu::Error> {
    /// # let config = Config { address: Some("127.0.0.1".parse().unwrap()), ..Config::default() };
    /// # let device = Device::open(config)?;
    /// # let (pd, cq) = (device.protection_domain()?, device.completion_queue(64)?);
    /// # let qp = || pd.queue_pair(&cq, &cq).build();
    /// # let (left, right) = (qp()?, qp()?);
    /// # left.connect(&right.endpoint())?;
    /// # right.connect(&left.endpoint())?;
    /// // 16 receives and 16 sends, each list with one doorbell, and asleep until all are done.
    /// cq.moderate(32, Duration::from_secs(10))?;
    /// let receives: Vec<(u64, &[quipu::Sge])> = (0..16).map(|id| (id, &[][..])).collect();
    /// let sends: Vec<Request> = (16..32).map(|id| Request::send(&[]).id(id)).collect();
    /// right.post_recvs(&receives).map_err(|(_taken, error)| error)?;
    /// left.post_sends(&sends).map_err(|(_taken, error)| error)?;
    ///
    /// let (mut done, mut out) = (0, [Default::default(); 32]);
    /// while done < 32 {
    ///     done += cq.wait(&mut out)?;
    /// }
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// As [`poll`](Self::poll).
    pub fn moderate(&self, count: u16, period: Duration) -> Result<(), Error> {
        let period_ns = period.min(LONGEST_PERIOD).as_nanos() as u64;
        Ok(self.inner.device.opened.engine.moderate_cq(self.inner.id, count, period_ns)?)
    }

    /// Takes an event if there is one.
    ///
    /// # Errors
    ///
    /// As [`poll`](Self::poll).
    pub fn take_event(&self) -> Result<(), Error> {
        let engine = &self.inner.device.opened.engine;
        match engine.wait_channel_within(self.inner.channel, Some(Duration::ZERO)) {
            Ok(_) | Err(EngineError::Interrupted | EngineError::WaitOn) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    /// Takes the event that was asked for, and waits for it.
    ///
    /// # Errors
    ///
    /// As [`poll`](Self::poll).
    pub fn wait_event(&self) -> Result<(), Error> {
        loop {
            match self.inner.device.opened.engine.wait_channel(self.inner.channel) {
                Ok(_) => return Ok(()),
                Err(EngineError::Interrupted) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }
}

/// The descriptor is readable while an event is queued.
impl AsRawFd for CompletionQueue {
    fn as_raw_fd(&self) -> RawFd {
        self.inner.fd
    }
}
