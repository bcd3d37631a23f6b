//! Between the kernel and the server: an event loop that takes the kernel's next request while replies to
//! earlier ones are due.

use std::collections::HashMap;
use std::fs::File;
use std::io::{self, IoSlice, Write};
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use quipu::PollEntry;
use quipu_nbd::schedule::{Class, Limits, Schedule};
use quipu_nbd::{Command, CommandFlags, Errno, Export, TransmissionFlags};

use super::super::line::{Buffer, Data, Done, Job, POLLIN, Progress, unshare};
use super::lines::Lines;
use super::protocol::{self, BUFFER, EINVAL, OUT_HEADER, WRITE_DATA, Wants, header};

/// Requests that are taken from the kernel before the first of them has its reply.
const DEPTH: usize = 64;
/// Zeros that one request asks for at most, in bytes.
const ZEROS: u64 = 1 << 30;
/// EIO, ENODEV.
const EIO: i32 = 5;
const ENODEV: i32 = 19;

/// What the kernel waits for.
struct Op {
    /// The number of its request.
    unique: u64,
    step: Step,
}

/// What is to be done with a reply of the server.
enum Step {
    Read,
    Write,
    Flush,
    /// More zeros are to follow.
    Zero {
        end: u64,
    },
    Seek {
        hole: bool,
    },
    /// The flush at the end, for which the kernel does not wait.
    Last,
}

/// The front end.
pub(super) struct Front {
    device: File,
    file: protocol::File,
    export: Export,
    has_status: bool,
    lines: Lines,
    schedule: Schedule<Job>,
    ops: HashMap<u64, Op>,
    /// Buffers for requests, for use again.
    buffers: Vec<Buffer>,
    /// The beginning of a request.
    head: Vec<u8>,
    begun: Instant,
    /// The kernel has unmounted it.
    has_ended: bool,
    /// What became of the flush at the end.
    last: Option<io::Result<()>>,
}

impl Front {
    pub(super) fn new(
        device: File,
        file: protocol::File,
        lines: Lines,
        limits: Limits,
    ) -> io::Result<Self> {
        use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
        fcntl_setfl(&device, fcntl_getfl(&device)? | OFlags::NONBLOCK)?;
        let mut schedule = Schedule::new(limits);
        schedule.connected(lines.first(), Duration::ZERO);
        Ok(Self {
            device,
            file,
            export: lines.export().clone(),
            has_status: lines.has_status(),
            lines,
            schedule,
            ops: HashMap::new(),
            buffers: Vec::new(),
            head: Vec::new(),
            begun: Instant::now(),
            has_ended: false,
            last: None,
        })
    }

    fn now(&self) -> Duration {
        self.begun.elapsed()
    }

    /// Answers the kernel until it has unmounted the file and all that was written is flushed.
    pub(super) fn run(&mut self) -> io::Result<()> {
        let mut ready = Vec::new();
        loop {
            let progress = self.advance(&ready)?;
            self.take_requests()?;
            self.connect()?;
            let now = self.now();
            for line in self.schedule.late(now) {
                self.lose(line, "its replies are late")?;
            }
            let expired = self.schedule.expire(now);
            self.fail(expired)?;
            self.dispatch()?;
            if let Some(outcome) = self.last.take() {
                return outcome;
            }
            ready = self.sleep(progress)?;
        }
    }

    /// Waits for something to do, unless there is more to do already. Returns the connections that are ready.
    fn sleep(&mut self, progress: Progress) -> io::Result<Vec<u32>> {
        let entry = |fd, events| PollEntry { fd, events, revents: 0 };
        let wants_more = !self.has_ended && self.schedule.len() < DEPTH;
        let kernel = if wants_more { self.device.as_raw_fd() } else { -1 };
        let mut entries = vec![entry(kernel, POLLIN), entry(self.lines.wake_fd(), POLLIN)];
        let watched = match self.lines.watch() {
            Ok(watched) => watched,
            Err((number, trouble)) => {
                self.lose(number, &trouble.to_string())?;
                return Ok(Vec::new());
            }
        };
        entries.extend(watched.iter().map(|it| entry(it.fd, it.events)));
        let now = self.now();
        let limit = match progress {
            Progress::More => Some(Duration::ZERO),
            Progress::Idle if watched.iter().any(|it| it.is_ready) => Some(Duration::ZERO),
            Progress::Idle => {
                let next = [self.schedule.timeout(), self.lines.retry_at(&self.schedule)];
                next.into_iter().flatten().min().map(|at| at.saturating_sub(now))
            }
        };
        super::super::line::sleep(&mut entries, limit)?;
        let lines = entries[2..].iter().zip(watched);
        let ready = lines.filter(|(entry, it)| entry.revents != 0 || it.is_ready);
        Ok(ready.map(|(_, it)| it.number).collect())
    }

    /// Takes as many requests of the kernel as there are and as there is room for.
    fn take_requests(&mut self) -> io::Result<()> {
        while !self.has_ended && self.schedule.len() < DEPTH {
            let mut buffer = match self.buffers.pop() {
                Some(buffer) => buffer,
                None => self.lines.memory().buffer(BUFFER, WRITE_DATA)?,
            };
            match buffer.receive(&self.device) {
                Ok(length) => self.take(buffer, length)?,
                Err(error) => {
                    self.buffers.push(buffer);
                    match error.raw_os_error() {
                        Some(ENODEV) => self.end(),
                        // EAGAIN: there is none.
                        Some(11) => return Ok(()),
                        // ENOENT, EINTR: the request was taken back.
                        Some(2 | 4) => {}
                        _ => return Err(error),
                    }
                }
            }
        }
        Ok(())
    }

    /// The file is unmounted: what was written is still to be flushed.
    fn end(&mut self) {
        self.has_ended = true;
        self.flush(0, Step::Last);
    }

    fn take(&mut self, buffer: Buffer, length: usize) -> io::Result<()> {
        buffer.head(length, &mut self.head)?;
        let Some(request) = self.file.request(&self.head, length) else {
            self.buffers.push(buffer);
            return Ok(());
        };
        let unique = request.unique;
        match request.wants {
            Wants::Nothing => {}
            Wants::Reply(bytes) => self.reply(unique, 0, &bytes)?,
            Wants::Error(errno) => self.reply(unique, errno, &[])?,
            Wants::Read { offset, length } => {
                let range = (offset, length as u64);
                self.add(unique, Step::Read, Command::Read, range, Data::Read(buffer));
                return Ok(());
            }
            Wants::Write { offset, length } => {
                let range = (offset, length as u64);
                let at = buffer.start() + WRITE_DATA;
                let data = Data::Write(Arc::new(buffer), at);
                self.add(unique, Step::Write, Command::Write, range, data);
                return Ok(());
            }
            Wants::Flush => self.flush(unique, Step::Flush),
            Wants::Zero { offset, length, hole } => {
                self.zero(unique, offset, offset + length, hole)?
            }
            Wants::Seek { offset, hole } => self.seek(unique, offset, hole)?,
        }
        self.buffers.push(buffer);
        Ok(())
    }

    fn can(&self, flag: TransmissionFlags) -> bool {
        self.export.flags.contains(flag)
    }

    fn add(&mut self, unique: u64, step: Step, command: Command, range: (u64, u64), data: Data) {
        let job =
            Job { command, flags: CommandFlags::empty(), offset: range.0, length: range.1, data };
        self.add_job(unique, step, job);
    }

    fn add_job(&mut self, unique: u64, step: Step, job: Job) {
        let class = match job.command {
            Command::Flush => Class::Flush,
            Command::Read | Command::BlockStatus => Class::Read,
            _ => Class::Write,
        };
        let (now, range) = (self.now(), (job.offset, job.length));
        let id = self.schedule.add(now, class, range, job);
        self.ops.insert(id, Op { unique, step });
    }

    fn flush(&mut self, unique: u64, step: Step) {
        self.add(unique, step, Command::Flush, (0, 0), Data::None);
    }

    fn zero(&mut self, unique: u64, offset: u64, end: u64, hole: bool) -> io::Result<()> {
        if !self.can(TransmissionFlags::WRITE_ZEROES) {
            // Then programs write zeros themselves.
            return self.reply(unique, protocol::EOPNOTSUPP, &[]);
        }
        let flags = if hole { CommandFlags::empty() } else { CommandFlags::NO_HOLE };
        let (command, length) = (Command::WriteZeroes, ZEROS.min(end - offset));
        let job = Job { command, flags, offset, length, data: Data::None };
        self.add_job(unique, Step::Zero { end }, job);
        Ok(())
    }

    /// Looks for the next data or hole from an offset on. The end of the disk counts as a hole.
    fn seek(&mut self, unique: u64, offset: u64, hole: bool) -> io::Result<()> {
        let left = self.file.size.saturating_sub(offset);
        if left == 0 || !self.has_status {
            // Without knowledge everything is data.
            return match (hole, left) {
                (true, _) => self.reply(unique, 0, &protocol::found(self.file.size)),
                (false, 0) => self.reply(unique, protocol::ENXIO, &[]),
                (false, _) => self.reply(unique, 0, &protocol::found(offset)),
            };
        }
        let range = (offset, left.min(u64::from(u32::MAX) & !4095));
        self.add(unique, Step::Seek { hole }, Command::BlockStatus, range, Data::None);
        Ok(())
    }

    /// Sends what may be sent.
    fn dispatch(&mut self) -> io::Result<()> {
        let mut used = Vec::new();
        while let Some((id, job)) = self.schedule.next() {
            if job.command == Command::Flush && !self.can(TransmissionFlags::FLUSH) {
                // The server has nothing to flush. As a flush it has waited for the writes before it.
                let now = self.now();
                if let Some(line) = self.lines.any() {
                    let job = self.schedule.send(id, line, now);
                    self.finished(Done { id, job, result: Ok(()) })?;
                    continue;
                }
            }
            let Some(line) = self.lines.choose(job) else { break };
            let now = self.now();
            let job = self.schedule.send(id, line, now);
            if let Err(trouble) = self.lines.submit(line, id, job) {
                self.lose(line, &trouble.to_string())?;
            } else if !used.contains(&line) {
                used.push(line);
            }
        }
        for line in used {
            if let Err(trouble) = self.lines.push(line) {
                self.lose(line, &trouble.to_string())?;
            }
        }
        Ok(())
    }

    /// Moves what can be moved over all connections.
    fn advance(&mut self, ready: &[u32]) -> io::Result<Progress> {
        let mut progress = Progress::Idle;
        for number in self.lines.numbers() {
            let mut done = Vec::new();
            let outcome = self.lines.advance(number, ready.contains(&number), &mut done);
            let mut taken_back = Vec::new();
            for it in done {
                // The server ends: another is to come.
                if it.result == Err(Errno::SHUTDOWN) && self.lines.is_patient() {
                    taken_back.push((it.id, it.job));
                } else {
                    self.finished(it)?;
                }
            }
            match outcome {
                Ok(_) if !taken_back.is_empty() => {
                    self.lose_with(number, "the server shuts down", taken_back)?;
                }
                Ok(Progress::More) => progress = Progress::More,
                Ok(Progress::Idle) => {}
                Err(trouble) => self.lose_with(number, &trouble.to_string(), taken_back)?,
            }
        }
        Ok(progress)
    }

    fn lose(&mut self, line: u32, why: &str) -> io::Result<()> {
        self.lose_with(line, why, Vec::new())
    }

    /// A connection is lost; `more` are requests that it carried, too.
    fn lose_with(&mut self, line: u32, why: &str, more: Vec<(u64, Job)>) -> io::Result<()> {
        let mut jobs = self.lines.remove(line, why);
        jobs.extend(more);
        let now = self.now();
        let failed = self.schedule.lost(line, jobs, now);
        self.fail(failed)
    }

    fn fail(&mut self, failed: Vec<(u64, Job)>) -> io::Result<()> {
        for (id, job) in failed {
            self.ended(id, job, Err(EIO))?;
        }
        Ok(())
    }

    /// Takes new connections, and begins to make one if that is needed.
    fn connect(&mut self) -> io::Result<()> {
        match self.lines.poll() {
            None => {}
            Some(Ok(line)) => self.schedule.connected(line, self.begun.elapsed()),
            Some(Err(())) => {
                let now = self.now();
                let failed = self.schedule.unreachable(now);
                self.fail(failed)?;
            }
        }
        let now = self.now();
        self.lines.connect(now, &self.schedule);
        Ok(())
    }

    /// A request has its reply.
    fn finished(&mut self, done: Done) -> io::Result<()> {
        let now = self.now();
        self.schedule.replied(done.id, now);
        self.ended(done.id, done.job, done.result.map_err(|errno| errno.0 as i32))
    }

    /// A request has ended: the kernel gets its reply, or there is another step.
    fn ended(&mut self, id: u64, job: Job, result: Result<(), i32>) -> io::Result<()> {
        let Some(Op { unique, step }) = self.ops.remove(&id) else { return Ok(()) };
        let (end, length) = (job.offset + job.length, job.length as usize);
        match (result, step) {
            (result, Step::Last) => {
                self.last = Some(result.map_err(io::Error::from_raw_os_error));
            }
            (Err(errno), _) => self.reply(unique, errno, &[])?,
            (Ok(()), Step::Read) => {
                if let Data::Read(data) = &job.data {
                    let header = header(unique, 0, length);
                    taken(data.send(&self.device, &header, length))?;
                }
            }
            (Ok(()), Step::Write) => self.reply(unique, 0, &protocol::written(length))?,
            (Ok(()), Step::Flush) => self.reply(unique, 0, &[])?,
            (Ok(()), Step::Zero { end: last }) if end < last => {
                let hole = !job.flags.contains(CommandFlags::NO_HOLE);
                self.zero(unique, end, last, hole)?;
            }
            (Ok(()), Step::Zero { .. }) => self.reply(unique, 0, &[])?,
            (Ok(()), Step::Seek { hole }) => self.sought(unique, hole, &job)?,
        }
        match job.data {
            Data::Read(buffer) => self.buffers.push(buffer),
            Data::Write(buffer, _) => self.buffers.extend(unshare(buffer)),
            Data::None | Data::Extents(_) => {}
        }
        Ok(())
    }

    /// Looks through the extents that the server has told.
    fn sought(&mut self, unique: u64, hole: bool, job: &Job) -> io::Result<()> {
        let Data::Extents(extents) = &job.data else { return self.reply(unique, EINVAL, &[]) };
        let mut at = job.offset;
        for extent in extents {
            if extent.hole == hole && at < self.file.size {
                return self.reply(unique, 0, &protocol::found(at));
            }
            at = at.saturating_add(extent.length);
        }
        self.seek(unique, at, hole)
    }

    fn reply(&mut self, unique: u64, errno: i32, data: &[u8]) -> io::Result<()> {
        let header: [u8; OUT_HEADER] = header(unique, errno, data.len());
        let pieces = [IoSlice::new(&header), IoSlice::new(data)];
        taken((&self.device).write_vectored(&pieces))
    }
}

/// What it means that the kernel takes a reply, or does not. It takes it whole or not at all.
fn taken(outcome: io::Result<usize>) -> io::Result<()> {
    match outcome {
        // ENOENT: the program that asked is gone. ENODEV: so is the mount.
        Err(error) if matches!(error.raw_os_error(), Some(2 | ENODEV)) => Ok(()),
        outcome => outcome.map(drop),
    }
}
