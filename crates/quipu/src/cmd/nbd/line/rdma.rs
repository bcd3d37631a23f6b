//! Over a reliable connected queue pair.

use std::collections::HashMap;
use std::os::fd::RawFd;

use quipu::{Access, MemoryRegion};
use quipu_nbd::messages::{ClientMemory, Completed, MAX_MOVED, MessageEvent};
use quipu_nbd::{Command, Export, Handshake};

use super::super::rdma::{Data as LinkData, Link};
use super::super::session::{PATIENCE, Trouble};
use super::{Data, Done, Job, Line, POLLIN, Progress, STEPS, written};

/// Long requests at a time: as many as the server has buffers for.
const LONG: usize = 16;

/// The connection.
pub(super) struct RdmaLine {
    link: Link,
    jobs: HashMap<u64, Flying>,
    /// Registered memory for long data, and which of it is free.
    buffers: Vec<MemoryRegion>,
    free: Vec<usize>,
}

/// A request at the server.
struct Flying {
    id: u64,
    job: Job,
    lent: Option<Lent>,
}

/// A buffer, and what the server may use of it until it replies.
type Lent = (usize, MemoryRegion);

impl RdmaLine {
    pub(super) fn open(place: (&str, u16), wanted: Handshake) -> Result<Self, Trouble> {
        let link = Link::open(place, wanted, PATIENCE)?;
        Ok(Self { link, jobs: HashMap::new(), buffers: Vec::new(), free: Vec::new() })
    }

    fn is_moved(&self, job: &Job) -> bool {
        self.link.engine.is_moved(job.command, job.length)
    }

    /// Lends memory to the server, with the data of a write.
    fn lend(&mut self, job: &Job) -> Result<Lent, Trouble> {
        let index = match self.free.pop() {
            Some(index) => index,
            None => {
                let memory = self.link.pd.register(MAX_MOVED as usize, Access::LOCAL_WRITE)?;
                self.buffers.push(memory);
                self.buffers.len() - 1
            }
        };
        let (buffer, length) = (&self.buffers[index], job.length as usize);
        let access = if job.command == Command::Write {
            buffer.write(0, written(job))?;
            Access::REMOTE_READ
        } else {
            Access::LOCAL_WRITE | Access::REMOTE_WRITE
        };
        Ok((index, buffer.register_part(0, length, access)?))
    }

    /// Makes a request: its cookie, and the memory that it lends.
    fn request(&mut self, job: &Job) -> Result<(u64, Option<Lent>), Trouble> {
        let lent = if self.is_moved(job) { Some(self.lend(job)?) } else { None };
        let data = match &lent {
            Some((_, region)) => {
                let remote = region.remote(0, job.length as usize)?;
                LinkData::Memory(ClientMemory { key: remote.rkey.0, address: remote.addr })
            }
            None if job.command == Command::Write => LinkData::Short(written(job)),
            None => LinkData::None,
        };
        let range = (job.offset, job.length);
        let cookie = self.link.submit(job.command, job.flags, range, data)?;
        Ok((cookie.ok_or(Trouble::Closed)?, lent))
    }

    fn completed(&mut self, completed: Completed) -> Result<Done, Trouble> {
        let Flying { id, mut job, lent } =
            self.jobs.remove(&completed.cookie).ok_or(Trouble::Closed)?;
        let length = job.length as usize;
        let result = completed.result;
        let buffer = lent.map(|(index, region)| {
            // The key is void before the data are used.
            drop(region);
            self.free.push(index);
            &self.buffers[index]
        });
        if result.is_ok() {
            match (&mut job.data, buffer) {
                (Data::Read(data), Some(buffer)) => {
                    buffer.read(0, data.get_mut(..length).ok_or(Trouble::Closed)?)?;
                }
                (Data::Read(data), None) => {
                    let short = &self.link.message[completed.data];
                    data.get_mut(..short.len()).ok_or(Trouble::Closed)?.copy_from_slice(short);
                }
                _ => {}
            }
            if job.command == Command::BlockStatus {
                job.data = Data::Extents(completed.extents);
            }
        }
        Ok(Done { id, job, result })
    }
}

impl Line for RdmaLine {
    fn export(&self) -> &Export {
        self.link.engine.export()
    }

    fn has_status(&self) -> bool {
        self.link.engine.has_status()
    }

    fn outstanding(&self) -> usize {
        self.jobs.len()
    }

    fn has_room(&self, job: &Job) -> bool {
        let buffer = !self.free.is_empty() || self.buffers.len() < LONG;
        self.link.can_submit() && (buffer || !self.is_moved(job))
    }

    fn submit(&mut self, id: u64, job: Job) -> Result<(), Trouble> {
        match self.request(&job) {
            Ok((cookie, lent)) => {
                self.jobs.insert(cookie, Flying { id, job, lent });
                Ok(())
            }
            Err(trouble) => {
                // No reply has this cookie: it only keeps the request.
                self.jobs.insert(u64::MAX, Flying { id, job, lent: None });
                Err(trouble)
            }
        }
    }

    fn push(&mut self) -> Result<(), Trouble> {
        Ok(())
    }

    fn advance(&mut self, is_ready: bool, done: &mut Vec<Done>) -> Result<Progress, Trouble> {
        if is_ready {
            self.link.take_event()?;
        }
        for _ in 0..STEPS {
            match self.link.try_event()? {
                Some(MessageEvent::Completed(completed)) => done.push(self.completed(completed)?),
                Some(_) => return Err(Trouble::Closed),
                None => return Ok(Progress::Idle),
            }
        }
        Ok(Progress::More)
    }

    fn watch(&mut self) -> Result<(RawFd, i16), Trouble> {
        Ok((self.link.watch()?, POLLIN))
    }

    fn take_back(&mut self) -> Vec<(u64, Job)> {
        self.jobs.drain().map(|(_, flying)| (flying.id, flying.job)).collect()
    }
}
