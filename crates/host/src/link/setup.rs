//! The handshake of two engines, step by step; `handshake` says what they tell each other.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use quipu_nic::{Link, LinkId, PeerMemory, Time};

use super::handshake::{EngineName, Hello, Message};
use super::identity::Shown;
use super::life;
use super::peer_memory::ProcessMemory;
use super::probe::Number;
use super::{Broken, Links, MAPPED_MAX, State, Waiting, socket};
use crate::address::{find_address, host_addresses};
use crate::net::token::Slot;
use crate::sys;
use crate::tap::Adapter;

impl Links {
    /// Takes the next word of a peer. False if there is none yet.
    pub(super) fn take_step(
        &mut self,
        adapter: &mut Adapter,
        now: Time,
        slot: Slot,
    ) -> Result<bool, Broken> {
        let Some(peer) = self.peers.get(slot) else {
            return Ok(false);
        };
        let received = match socket::receive(&peer.fd, &mut self.buffer) {
            Ok(received) if received.len == 0 => return Err(Broken::Gone),
            Ok(received) => received,
            Err(error) if sys::would_block(&error) => return Ok(false),
            Err(error) => return Err(error.into()),
        };
        let bytes = self.buffer[..received.len].to_vec();
        let message = Message::decode(&bytes).ok_or(Broken::Nonsense)?;
        self.agree(adapter, now, slot, message, received.fds)?;
        Ok(true)
    }

    /// One step of the handshake.
    fn agree(
        &mut self,
        adapter: &mut Adapter,
        now: Time,
        slot: Slot,
        message: Message<'_>,
        fds: Vec<OwnedFd>,
    ) -> Result<(), Broken> {
        let Some(peer) = self.peers.get(slot) else {
            return Ok(());
        };
        match (peer.state, message) {
            (State::AwaitKnock, Message::Knock(engine)) => self.answer_knock(slot, engine),
            (State::AwaitHello, Message::Known(engine)) if peer.target.is_some() => {
                self.join_known(adapter, now, slot, engine)
            }
            (State::AwaitHello, Message::Hello(hello)) => self.answer_hello(slot, &hello, fds),
            (State::AwaitReady, Message::Ready(number)) => self.answer_ready(slot, number),
            (State::AwaitAdmission, Message::Admits(whether)) => {
                self.stand(adapter, now, slot, whether, &fds)
            }
            _ => Err(Broken::Nonsense),
        }
    }

    fn answer_knock(&mut self, slot: Slot, engine: EngineName) -> Result<(), Broken> {
        let known = self.peers.iter().any(|(_, other)| {
            other.engine == Some(engine) && (other.target.is_none() || other.is_up())
        });
        let Some(peer) = self.peers.get_mut(slot) else {
            return Ok(());
        };
        if known {
            let word = Message::Known(self.identity.engine).encode();
            socket::send(&peer.fd, &word, &[])?;
            // The caller closes; until then this is not one more link to that engine.
            return Ok(());
        }
        peer.engine = Some(engine);
        peer.own_arena = Some(self.identity.introduce(&peer.fd)?);
        peer.state = State::AwaitHello;
        Ok(())
    }

    /// The engine that was called is one that this one has a link with.
    fn join_known(
        &mut self,
        adapter: &mut Adapter,
        now: Time,
        slot: Slot,
        engine: EngineName,
    ) -> Result<(), Broken> {
        let found = self.peers.iter().find(|(_, other)| other.engine == Some(engine));
        let Some(other) = found.map(|(other, _)| other) else {
            return Err(Broken::Gone);
        };
        let Some(peer) = self.peers.get_mut(slot) else {
            return Ok(());
        };
        let waiting = std::mem::take(&mut peer.waiting);
        let target = peer.target;
        self.forget(slot);
        if let Some(target) = target {
            self.by_target.insert(target, other);
        }
        let Some(peer) = self.peers.get_mut(other) else {
            return Ok(());
        };
        match peer.state {
            State::Up(link) => self.put_through(adapter, now, link, waiting),
            _ => peer.waiting.extend(waiting),
        }
        Ok(())
    }

    fn answer_hello(&mut self, slot: Slot, hello: &Hello, fds: Vec<OwnedFd>) -> Result<(), Broken> {
        let taken: usize = self.peers.iter().map(|(_, peer)| peer.mapped).sum();
        let Some(peer) = self.peers.get_mut(slot) else {
            return Ok(());
        };
        if peer.engine.is_some_and(|engine| engine != hello.engine) {
            return Err(Broken::Nonsense);
        }
        peer.engine = Some(hello.engine);
        // Nobody speaks for the queue pairs of another host.
        find_address(&host_addresses()?, hello.gid.into()).ok_or(Broken::Nonsense)?;
        peer.gid = (!hello.everywhere).then_some(hello.gid);
        let arena = self.identity.accept_arena(fds, MAPPED_MAX.saturating_sub(taken))?;
        peer.mapped = arena.len();
        peer.peer_arena = Some(arena);
        let number = self.identity.read_number(hello, peer.pid);
        if peer.own_arena.is_none() {
            peer.own_arena = Some(self.identity.introduce(&peer.fd)?);
        }
        socket::send(&peer.fd, &Message::Ready(number).encode(), &[])?;
        peer.state = State::AwaitReady;
        Ok(())
    }

    fn answer_ready(&mut self, slot: Slot, number: Option<Number>) -> Result<(), Broken> {
        let Some(peer) = self.peers.get_mut(slot) else {
            return Ok(());
        };
        peer.admitted = self.identity.admit(&peer.fd, number)?;
        peer.state = State::AwaitAdmission;
        Ok(())
    }

    /// Both sides are ready: the adapter gets the link.
    fn stand(
        &mut self,
        adapter: &mut Adapter,
        now: Time,
        slot: Slot,
        admits: bool,
        fds: &[OwnedFd],
    ) -> Result<(), Broken> {
        let Some(peer) = self.peers.get_mut(slot) else {
            return Ok(());
        };
        let (Some(own), Some(arena)) = (peer.own_arena.take(), peer.peer_arena.take()) else {
            return Err(Broken::Nonsense);
        };
        // Access is used in both directions or in none, so that the two adapters agree on how
        // bytes move.
        let access = admits && peer.admitted;
        let shown = if access { self.identity.accept_shown(fds)? } else { Shown::default() };
        let memory = || {
            let life = shown.directory.as_ref().map(life::Sight::of);
            let memory = ProcessMemory::new(peer.pid, Arc::clone(&peer.alive)).with_life(life);
            match shown.pages {
                Some(list) => memory.with_windows(list),
                None => memory,
            }
        };
        let link = adapter.handle_link_up(Link {
            own,
            peer: arena,
            peer_gid: peer.gid,
            peer_memory: access.then(|| Arc::new(memory()) as Arc<dyn PeerMemory>),
            peer_directory: shown.directory,
        })?;
        tracing::debug!(pid = peer.pid, access, "a shared-memory link is established");
        socket::take_no_descriptors(&peer.fd);
        peer.state = State::Up(link);
        self.by_link.insert(link, slot);
        self.in_setup.retain(|&other| other != slot);
        let waiting = std::mem::take(&mut peer.waiting);
        self.watch_process(slot);
        self.put_through(adapter, now, link, waiting);
        Ok(())
    }

    /// Gives connections to a link that stands; those for which it has no room go by TCP.
    fn put_through(
        &mut self,
        adapter: &mut Adapter,
        now: Time,
        link: LinkId,
        mut waiting: Vec<Waiting>,
    ) {
        waiting.retain(|waiting| !adapter.handle_reached_link(now, waiting.conn, link));
        self.given_up.append(&mut waiting);
    }
}
