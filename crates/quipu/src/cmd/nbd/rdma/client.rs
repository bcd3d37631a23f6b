//! A client's connection, which carries several requests at a time.

use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use quipu::{
    Access, Completion, CompletionQueue, Connection, ProtectionDomain, Request, WcOpcode, WcStatus,
};
use quipu_nbd::messages::{
    ClientMemory, Completed, MESSAGE_HEADER, MessageClient, MessageEvent, Terms,
};
use quipu_nbd::{Command, CommandFlags, Handshake};

use super::super::session::{PATIENCE, Trouble};
use super::memory::{Places, id, of_id};
use super::{TERMS, device, resolve};

const RECEIVE: u32 = 0;
const SEND: u32 = 1;
/// Before a thread sleeps it polls for so long, as small requests take no longer.
const SPIN: Duration = Duration::from_micros(30);

/// Data of a request.
#[derive(Clone, Copy)]
pub(in crate::cmd::nbd) enum Data<'a> {
    /// None, or those of a read that come in the reply.
    None,
    /// Short data of a write.
    Short(&'a [u8]),
    /// Memory with a key for the server.
    Memory(ClientMemory),
}

/// The connection.
pub(in crate::cmd::nbd) struct Link {
    pub(in crate::cmd::nbd) engine: MessageClient,
    connection: Arc<Connection>,
    cq: CompletionQueue,
    pub(in crate::cmd::nbd) pd: ProtectionDomain,
    receives: Places,
    sends: Places,
    /// Completions that were polled; the last is the next.
    polled: Vec<Completion>,
    /// The message that arrived last.
    pub(in crate::cmd::nbd) message: Vec<u8>,
    patience: Duration,
    /// The next wait polls before it sleeps.
    pub(in crate::cmd::nbd) spins: bool,
}

impl Link {
    /// Connects: the negotiation is to follow.
    pub(super) fn connect(
        pd: ProtectionDomain,
        place: (&str, u16),
        wanted: Handshake,
    ) -> Result<Self, Trouble> {
        let (device, to) = (device()?, resolve(place)?);
        let credits = u32::from(TERMS.credits);
        let cq = device.completion_queue(4 * credits)?;
        let qp = pd
            .queue_pair(&cq, &cq)
            .send_queue(2 * credits, 1)
            .recv_queue(credits, 1)
            .remote_access(Access::REMOTE_READ | Access::REMOTE_WRITE)
            .build()?;
        let receives = Places::new(&pd, credits, TERMS.longest_message())?;
        for place in 0..credits {
            qp.post_recv(id(RECEIVE, place), &receives.whole(place)?)?;
        }
        let connection = Arc::new(Connection::open(qp, to, &TERMS.to_bytes())?);
        let peer = Terms::from_bytes(connection.private_data())?;
        let sends = Places::new(&pd, credits, peer.longest_message())?;
        watch(&connection);
        let engine = MessageClient::new(wanted, TERMS, peer);
        let (polled, message) = (Vec::new(), Vec::new());
        let (patience, spins) = (PATIENCE, true);
        Ok(Self { engine, connection, cq, pd, receives, sends, polled, message, patience, spins })
    }

    /// Connects and begins with the export. The server's keys are to memory of `pd`. `patience`: for each
    /// step of the server.
    pub(in crate::cmd::nbd) fn open(
        pd: ProtectionDomain,
        place: (&str, u16),
        wanted: Handshake,
        patience: Duration,
    ) -> Result<Self, Trouble> {
        let mut link = Self::connect(pd, place, wanted)?;
        link.patience = patience;
        loop {
            match link.next_event()? {
                MessageEvent::Started(_) => return Ok(link),
                _ => link.send_output()?,
            }
        }
    }

    /// How long a reply may take from now on.
    pub(super) fn set_patience(&mut self, patience: Duration) {
        self.patience = patience;
    }

    /// Sends what the negotiation has to say.
    pub(super) fn send_output(&mut self) -> Result<(), Trouble> {
        let bytes = std::mem::take(self.engine.output());
        for piece in bytes.chunks(self.engine.peer().longest_message()) {
            self.send(piece, &[])?;
        }
        Ok(())
    }

    /// Sends a message that has two parts.
    fn send(&mut self, first: &[u8], second: &[u8]) -> Result<(), Trouble> {
        let place = loop {
            match self.sends.take() {
                Some(place) => break place,
                None => self.poll()?,
            }
        };
        self.sends.write(place, 0, first)?;
        self.sends.write(place, first.len(), second)?;
        let memory = self.sends.sge(place, first.len() + second.len())?;
        Ok(self.connection.post_send(&Request::send(&memory).id(id(SEND, place)))?)
    }

    /// Makes a request and returns its cookie, or `None` while there is no credit for it.
    pub(in crate::cmd::nbd) fn submit(
        &mut self,
        command: Command,
        flags: CommandFlags,
        range: (u64, u64),
        data: Data<'_>,
    ) -> Result<Option<u64>, Trouble> {
        let (memory, short) = match data {
            Data::None => (None, &[][..]),
            Data::Short(bytes) => (None, bytes),
            Data::Memory(memory) => (Some(memory), &[][..]),
        };
        let Some(ticket) = self.engine.request(command, flags, range, memory) else {
            return Ok(None);
        };
        self.send(&ticket.header, short)?;
        Ok(Some(ticket.cookie))
    }

    /// Waits for the next reply. Short data lie in `message`.
    pub(in crate::cmd::nbd) fn next_reply(&mut self) -> Result<Completed, Trouble> {
        match self.next_event()? {
            MessageEvent::Completed(done) => Ok(done),
            _ => Err(Trouble::Closed),
        }
    }

    /// Waits for the next message.
    pub(super) fn next_event(&mut self) -> Result<MessageEvent, Trouble> {
        loop {
            if let Some(event) = self.polled_event()? {
                return Ok(event);
            }
            self.poll()?;
        }
    }

    /// The next message, if one is there.
    pub(in crate::cmd::nbd) fn try_event(&mut self) -> Result<Option<MessageEvent>, Trouble> {
        loop {
            if let Some(event) = self.polled_event()? {
                return Ok(Some(event));
            }
            let mut out = [Completion::default(); 16];
            match self.cq.poll(&mut out)? {
                0 => return Ok(None),
                found => self.sort(&out[..found]),
            }
        }
    }

    /// The next message of the completions that were polled.
    fn polled_event(&mut self) -> Result<Option<MessageEvent>, Trouble> {
        while let Some(done) = self.polled.pop() {
            match of_id(done.wr_id) {
                _ if done.status == WcStatus::WrFlushErr => return Err(Trouble::Closed),
                _ if done.status != WcStatus::Success => {
                    return Err(quipu::Error::Work(done).into());
                }
                (SEND, place) => self.sends.give_back(place),
                (_, place) => return self.received(place, &done).map(Some),
            }
        }
        Ok(None)
    }

    /// Whether a request can be made without waiting.
    pub(in crate::cmd::nbd) fn can_submit(&self) -> bool {
        self.engine.credits() > 0 && self.sends.has_free()
    }

    /// Has the returned descriptor become readable when something comes.
    pub(in crate::cmd::nbd) fn watch(&self) -> Result<RawFd, Trouble> {
        self.cq.request_event(false)?;
        Ok(self.cq.as_raw_fd())
    }

    /// Makes the descriptor unreadable again, before [`try_event`](Self::try_event).
    pub(in crate::cmd::nbd) fn take_event(&self) -> Result<(), Trouble> {
        Ok(self.cq.take_event()?)
    }

    fn received(&mut self, place: u32, done: &Completion) -> Result<MessageEvent, Trouble> {
        debug_assert_eq!(done.opcode, WcOpcode::Recv);
        self.receives.read(place, done.byte_len as usize, &mut self.message)?;
        self.connection.post_recv(id(RECEIVE, place), &self.receives.whole(place)?)?;
        Ok(self.engine.input(&self.message)?)
    }

    /// Waits for completions. Those of sends are taken care of.
    fn poll(&mut self) -> Result<(), Trouble> {
        let mut out = [Completion::default(); 16];
        let begun = Instant::now();
        let mut found = self.cq.poll(&mut out)?;
        while found == 0 && self.spins && begun.elapsed() < SPIN {
            found = self.cq.poll(&mut out)?;
        }
        if found == 0 {
            found = self.cq.wait_timeout(&mut out, self.patience)?;
        }
        if found == 0 {
            return Err(Trouble::Silent(self.patience.as_secs()));
        }
        self.sort(&out[..found]);
        Ok(())
    }

    /// Takes care of sends, and keeps the other completions in their order.
    fn sort(&mut self, found: &[Completion]) {
        let mut newer = Vec::new();
        for done in found.iter().rev() {
            match of_id(done.wr_id) {
                (SEND, place) if done.status == WcStatus::Success => self.sends.give_back(place),
                _ => newer.push(*done),
            }
        }
        newer.append(&mut self.polled);
        self.polled = newer;
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        let farewell: [u8; MESSAGE_HEADER] = self.engine.disconnect();
        if self.sends.has_free() && self.send(&farewell, &[]).is_ok() {
            // The server replies by ending the connection.
            self.patience = Duration::from_secs(1);
            while self.next_event().is_ok() {}
        }
        let _ = self.connection.disconnect();
    }
}

/// Has everything that is posted flushed when the peer ends the connection, or its process ends.
pub(super) fn watch(connection: &Arc<Connection>) {
    let connection = Arc::clone(connection);
    // Without a thread the end is noticed by the next request.
    let _ = thread::Builder::new().name("nbd end".into()).spawn(move || connection.wait_end());
}
