//! Where everything goes: memory that bulk data are written to, and a queue pair that answers pings. It does
//! not send by the port.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::thread;

use quipu::{
    Access, Completion, CompletionQueue, Config, Device, Endpoint, MemoryRegion, ProtectionDomain,
    QueuePair, Request, WcStatus,
};
use quipu_host::WantedAddress;

use super::Trouble;
use super::worker::{BULK, PING, connect_line};

/// Receives for pings.
const RECEIVES: u64 = 16;

/// The other end of all workers.
pub(super) struct Sink {
    pd: ProtectionDomain,
    memory: MemoryRegion,
}

/// A process that sends by the port.
pub(super) struct Process {
    child: Child,
    input: Option<ChildStdin>,
    output: BufReader<ChildStdout>,
    /// Its end of the connection, if nothing is answered.
    _qp: Option<QueuePair>,
}

impl Sink {
    pub(super) fn open(address: &WantedAddress) -> Result<Self, Trouble> {
        let config = Config { address: Some(address.clone()), qos: None, ..Config::default() };
        let pd = Device::open(config)?.protection_domain()?;
        let memory = pd.register(BULK, Access::LOCAL_WRITE | Access::REMOTE_WRITE)?;
        Ok(Self { pd, memory })
    }

    /// Starts a worker of a service level, and connects it.
    pub(super) fn start(&self, mut command: Command, answers: bool) -> Result<Process, Trouble> {
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
        let input = child.stdin.take();
        let output = BufReader::new(child.stdout.take().ok_or("no pipe")?);
        let mut process = Process { child, input, output, _qp: None };
        let line = process.line()?;
        let peer: Endpoint = line.trim().parse().map_err(|_| "the worker did not start")?;
        let cq = self.pd.device().completion_queue(64)?;
        let qp = self.pd.queue_pair(&cq, &cq).build()?;
        let remote = self.memory.remote(0, BULK)?;
        let own = qp.endpoint();
        qp.connect(&peer)?;
        match answers {
            true => self.answer(qp, cq)?,
            false => process._qp = Some(qp),
        }
        process.tell(&connect_line(own, remote))?;
        Ok(process)
    }

    /// Answers pings in a thread of its own, which ends with the process.
    fn answer(&self, qp: QueuePair, cq: CompletionQueue) -> Result<(), Trouble> {
        let memory = self.pd.register(RECEIVES as usize * PING, Access::LOCAL_WRITE)?;
        for slot in 0..RECEIVES {
            qp.post_recv(slot, &[memory.sge(slot as usize * PING, PING)?])?;
        }
        thread::spawn(move || -> Result<(), quipu::Error> {
            let mut done = [Completion::default(); 16];
            loop {
                let count = cq.wait(&mut done)?;
                for completion in &done[..count] {
                    if completion.status != WcStatus::Success {
                        return Ok(());
                    }
                    if completion.wr_id < RECEIVES {
                        let slot = completion.wr_id;
                        qp.post_recv(slot, &[memory.sge(slot as usize * PING, PING)?])?;
                        qp.post_send(&Request::send_inline(&[8; PING]).id(RECEIVES))?;
                    }
                }
            }
        });
        Ok(())
    }
}

impl Process {
    /// Its process number.
    pub(super) fn number(&self) -> u32 {
        self.child.id()
    }

    /// Writes a line to it.
    pub(super) fn tell(&mut self, line: &str) -> Result<(), Trouble> {
        let input = self.input.as_mut().ok_or("it has ended")?;
        input.write_all(line.as_bytes())?;
        Ok(input.flush()?)
    }

    /// Reads a line of it.
    pub(super) fn line(&mut self) -> Result<String, Trouble> {
        let mut line = String::new();
        match self.output.read_line(&mut line)? {
            0 => Err("a worker has ended early; its error is above".into()),
            _ => Ok(line),
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.input = None;
        // It ends when its input does; one that hangs is ended.
        for _ in 0..100 {
            if matches!(self.child.try_wait(), Ok(Some(_)) | Err(_)) {
                return;
            }
            thread::sleep(std::time::Duration::from_millis(10));
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
