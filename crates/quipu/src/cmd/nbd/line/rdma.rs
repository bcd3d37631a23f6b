//! Over a reliable connected queue pair.

use std::collections::HashMap;
use std::os::fd::RawFd;

use quipu::{Access, MemoryRegion, ProtectionDomain};
use quipu_nbd::messages::{ClientMemory, Completed, MessageEvent};
use quipu_nbd::{Command, Export, Handshake};

use super::super::rdma::{Data as LinkData, Link};
use super::super::session::{PATIENCE, Trouble};
use super::{Buffer, Data, Done, Job, Line, POLLIN, Progress, STEPS};

/// Long requests at a time: as many as the server has buffers for.
const LONG: usize = 16;

/// The connection.
pub(super) struct RdmaLine {
    link: Link,
    jobs: HashMap<u64, Flying>,
    /// Requests whose buffers the server may use.
    lent: usize,
    /// Short data of a write.
    short: Vec<u8>,
}

/// A request at the server.
struct Flying {
    id: u64,
    job: Job,
    /// What the server may use of the request's buffer until it replies.
    lent: Option<MemoryRegion>,
}

impl RdmaLine {
    /// Connects. Buffers are registered in `domain`.
    pub(super) fn open(
        domain: &ProtectionDomain,
        place: (&str, u16),
        wanted: Handshake,
    ) -> Result<Self, Trouble> {
        let link = Link::open(domain.clone(), place, wanted, PATIENCE)?;
        Ok(Self { link, jobs: HashMap::new(), lent: 0, short: Vec::new() })
    }

    fn is_moved(&self, job: &Job) -> bool {
        self.link.engine.is_moved(job.command, job.length)
    }

    /// Lends the server the part of a request's buffer that it needs.
    fn lend(job: &Job) -> Result<MemoryRegion, Trouble> {
        let (buffer, at, access): (&Buffer, _, _) = match &job.data {
            Data::Write(buffer, at) => (buffer, *at, Access::REMOTE_READ),
            Data::Read(buffer) => (buffer, 0, Access::LOCAL_WRITE | Access::REMOTE_WRITE),
            _ => return Err(Trouble::Closed),
        };
        let region = buffer.region().ok_or(Trouble::Closed)?;
        Ok(region.register_part(at, job.length as usize, access)?)
    }

    /// Makes a request: its cookie, and the memory that it lends.
    fn request(&mut self, job: &Job) -> Result<(u64, Option<MemoryRegion>), Trouble> {
        let lent = self.is_moved(job).then(|| Self::lend(job)).transpose()?;
        let data = match (&lent, &job.data) {
            (Some(region), _) => {
                let remote = region.remote(0, job.length as usize)?;
                LinkData::Memory(ClientMemory { key: remote.rkey.0, address: remote.addr })
            }
            (None, Data::Write(buffer, at)) => {
                self.short.resize(job.length as usize, 0);
                buffer.read(*at, &mut self.short)?;
                LinkData::Short(&self.short)
            }
            _ => LinkData::None,
        };
        let range = (job.offset, job.length);
        let cookie = self.link.submit(job.command, job.flags, range, data)?;
        Ok((cookie.ok_or(Trouble::Closed)?, lent))
    }

    fn completed(&mut self, completed: Completed) -> Result<Done, Trouble> {
        let Flying { id, mut job, lent } =
            self.jobs.remove(&completed.cookie).ok_or(Trouble::Closed)?;
        let (result, is_moved) = (completed.result, lent.is_some());
        self.lent -= usize::from(is_moved);
        // The key is void before the data are used.
        drop(lent);
        if result.is_ok() {
            if let (Data::Read(buffer), false) = (&job.data, is_moved) {
                let short = &self.link.message[completed.data];
                let region = buffer.region().filter(|_| short.len() == job.length as usize);
                region.ok_or(Trouble::Closed)?.write(0, short)?;
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
        self.link.can_submit() && (self.lent < LONG || !self.is_moved(job))
    }

    fn submit(&mut self, id: u64, job: Job) -> Result<(), Trouble> {
        match self.request(&job) {
            Ok((cookie, lent)) => {
                self.lent += usize::from(lent.is_some());
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
