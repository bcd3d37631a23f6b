//! Where everything goes: memory that bulk data are written to, and a queue pair that answers pings. It does
//! not send by the port.

use std::process::Command;
use std::thread;

use quipu::{
    Access, Completion, CompletionQueue, Config, Device, Endpoint, MemoryRegion, ProtectionDomain,
    QueuePair, Request, WcStatus,
};
use quipu_host::WantedAddress;

use super::super::process::{Process, Trouble};
use super::worker::{BULK, PING, connect_line};

/// Receives for pings.
const RECEIVES: u64 = 16;

/// The other end of all workers.
pub(in super::super) struct Sink {
    pd: ProtectionDomain,
    memory: MemoryRegion,
    /// Its ends of connections by which nothing is answered.
    silent: Vec<QueuePair>,
}

impl Sink {
    pub(in super::super) fn open(address: &WantedAddress) -> Result<Self, Trouble> {
        let config = Config { address: Some(address.clone()), qos: None, ..Config::default() };
        let pd = Device::open(config)?.protection_domain()?;
        let memory = pd.register(BULK, Access::LOCAL_WRITE | Access::REMOTE_WRITE)?;
        Ok(Self { pd, memory, silent: Vec::new() })
    }

    /// Starts a worker, and connects it.
    pub(in super::super) fn start(
        &mut self,
        command: Command,
        answers: bool,
    ) -> Result<Process, Trouble> {
        let mut process = Process::start(command)?;
        let line = process.line()?;
        let peer: Endpoint = line.trim().parse().map_err(|_| "the worker did not start")?;
        let cq = self.pd.device().completion_queue(64)?;
        let qp = self.pd.queue_pair(&cq, &cq).build()?;
        let remote = self.memory.remote(0, BULK)?;
        let own = qp.endpoint();
        qp.connect(&peer)?;
        match answers {
            true => self.answer(qp, cq)?,
            false => self.silent.push(qp),
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
