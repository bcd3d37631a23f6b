//! A client's session: one request at a time.

use std::time::Duration;

use quipu::{Access, MemoryRegion};
use quipu_nbd::messages::{ClientMemory, Completed, MAX_MOVED, MessageEvent};
use quipu_nbd::{Command, CommandFlags, Export, Extent, Handshake};

use super::super::session::{Outcome, Trouble};
use super::client::{Data, Link};
use super::domain;

/// The session.
pub(in crate::cmd::nbd) struct Session {
    link: Link,
    /// For long data. The server has no right to it but that of the request in progress.
    buffer: Option<MemoryRegion>,
}

impl Session {
    /// Connects and begins with the export. `patience`: for each step of the server.
    pub(in crate::cmd::nbd) fn open(
        place: (&str, u16),
        wanted: Handshake,
        patience: Duration,
    ) -> Result<Self, Trouble> {
        Ok(Self { link: Link::open(domain()?, place, wanted, patience)?, buffer: None })
    }

    /// The names and descriptions of a server's exports.
    pub(in crate::cmd::nbd) fn list(
        place: (&str, u16),
        wanted: Handshake,
    ) -> Result<Vec<(String, String)>, Trouble> {
        let mut link = Link::connect(domain()?, place, wanted)?;
        let mut found = Vec::new();
        while !link.engine.has_ended() {
            if let MessageEvent::Listed(more) = link.next_event()? {
                found.extend(more);
            }
            link.send_output()?;
        }
        Ok(found)
    }

    pub(in crate::cmd::nbd) fn set_patience(&mut self, patience: Duration) {
        self.link.set_patience(patience);
    }

    pub(in crate::cmd::nbd) fn export(&self) -> &Export {
        self.link.engine.export()
    }

    pub(in crate::cmd::nbd) fn has_status(&self) -> bool {
        self.link.engine.has_status()
    }

    /// Makes a request and waits for its reply.
    fn request(
        &mut self,
        command: Command,
        flags: CommandFlags,
        range: (u64, u64),
        data: Data<'_>,
    ) -> Result<Completed, Trouble> {
        self.link.submit(command, flags, range, data)?.ok_or(Trouble::Closed)?;
        self.link.next_reply()
    }

    /// A request whose data move by RDMA. The key of the server is void when this returns.
    fn moved(
        &mut self,
        command: Command,
        range: (u64, u64),
        access: Access,
        length: usize,
    ) -> Result<Completed, Trouble> {
        let buffer = self.buffer.as_ref().expect("it was made");
        let lent = buffer.register_part(0, length, access)?;
        let remote = lent.remote(0, length)?;
        let memory = ClientMemory { key: remote.rkey.0, address: remote.addr };
        let outcome = self.request(command, CommandFlags::empty(), range, Data::Memory(memory));
        if let Ok(done) = &outcome {
            debug_assert_eq!(done.revoke, Some(memory.key));
        }
        drop(lent);
        outcome
    }

    fn buffer(&mut self) -> Result<&MemoryRegion, Trouble> {
        if self.buffer.is_none() {
            self.buffer = Some(self.link.pd.register(MAX_MOVED as usize, Access::LOCAL_WRITE)?);
        }
        Ok(self.buffer.as_ref().expect("made above"))
    }

    pub(in crate::cmd::nbd) fn order(
        &mut self,
        command: Command,
        flags: CommandFlags,
        offset: u64,
        length: u64,
    ) -> Outcome<()> {
        Ok(self.request(command, flags, (offset, length), Data::None)?.result)
    }

    pub(in crate::cmd::nbd) fn read(&mut self, offset: u64, data: &mut [u8]) -> Outcome<()> {
        let range = (offset, data.len() as u64);
        if !self.link.engine.is_moved(Command::Read, range.1) {
            let done = self.request(Command::Read, CommandFlags::empty(), range, Data::None)?;
            if done.result.is_ok() {
                data.copy_from_slice(&self.link.message[done.data.clone()]);
            }
            return Ok(done.result);
        }
        self.buffer()?;
        let access = Access::LOCAL_WRITE | Access::REMOTE_WRITE;
        let done = self.moved(Command::Read, range, access, data.len())?;
        if done.result.is_ok() {
            self.buffer()?.read(0, data)?;
        }
        Ok(done.result)
    }

    pub(in crate::cmd::nbd) fn write(&mut self, offset: u64, data: &[u8]) -> Outcome<()> {
        let range = (offset, data.len() as u64);
        if !self.link.engine.is_moved(Command::Write, range.1) {
            let (flags, data) = (CommandFlags::empty(), Data::Short(data));
            return Ok(self.request(Command::Write, flags, range, data)?.result);
        }
        self.buffer()?.write(0, data)?;
        Ok(self.moved(Command::Write, range, Access::REMOTE_READ, data.len())?.result)
    }

    pub(in crate::cmd::nbd) fn extents(
        &mut self,
        offset: u64,
        length: u64,
    ) -> Outcome<Vec<Extent>> {
        let (command, flags) = (Command::BlockStatus, CommandFlags::empty());
        let done = self.request(command, flags, (offset, length), Data::None)?;
        Ok(done.result.map(|()| done.extents))
    }
}
