//! Connection management: one method per call of `rdma_cm`, each under the lock for a moment.

use std::net::{IpAddr, SocketAddr};
use std::os::fd::RawFd;
use std::time::Duration;

use quipu_cm::{
    CallError, ChannelKey, Cm, Event, EventKind, IdKey, Param, PortSpace, QpParams, Refusal, Route,
};
use quipu_fault::{Call, CmEvent};
use quipu_nic::{Gid, LinkLayer, Probe, QpNum, Time};

use super::Engine;
use super::core::{Core, HelperMode};
use super::helper::Helper;
use super::wait::{Patience, is_non_blocking, wait_readable};
use crate::cm::Manager;
use crate::config::Device;
use crate::error::EngineError;
use crate::sys;

/// Most private data of InfiniBand in a request, an answer and a refusal, of a connection and of a datagram
/// service, beside the addresses of `rdma_cm` (`specs/quipu-cm.md`, section 2).
const REQ_DATA: [usize; 2] = [56, 180];
const REP_DATA: [usize; 2] = [196, 136];
const REJ_DATA: [usize; 2] = [148, 136];

impl Core {
    /// The connection management, if a program has begun to use it.
    pub(super) fn manager(&mut self) -> Result<&mut Manager, EngineError> {
        self.cm.as_deref_mut().ok_or(EngineError::Connection(CallError::NoSuchObject))
    }

    /// Tells connection management the rules of quality of service, if they have changed.
    fn learn_levels(&mut self) -> Result<(), EngineError> {
        let changes = self.adapter.qos_changes();
        if std::mem::replace(&mut self.manager()?.qos_changes, changes) != changes {
            let levels = crate::qos::levels(&self.adapter);
            self.manager()?.cm.set_levels(levels);
        }
        Ok(())
    }

    /// Takes the next event of a channel. The end of a connection whose completions are unread is kept back
    /// once from a program that asks without waiting. It has looked for completions a moment ago, and would
    /// destroy its queue pair without a further look: to an adapter of hardware that moment is too short.
    fn next_cm_event(&mut self, channel: ChannelKey) -> Result<Option<Event>, EngineError> {
        let end = self.manager()?.next_end(channel);
        if let Some((id, qpn)) = end
            && self.adapter.has_unread(QpNum(qpn))
            && is_non_blocking(self.manager()?.channel_fd(channel)?)
        {
            self.manager()?.keep_end(channel, id);
            return Err(EngineError::WouldBlock);
        }
        self.manager()?.take_event(channel)
    }
}

/// An event of a plan.
fn kind_of(event: CmEvent) -> EventKind {
    match event {
        CmEvent::AddrError => EventKind::AddrError,
        CmEvent::RouteError => EventKind::RouteError,
        CmEvent::ConnectError => EventKind::ConnectError,
        CmEvent::Unreachable => EventKind::Unreachable,
        CmEvent::Rejected => EventKind::Rejected,
        CmEvent::MulticastError => EventKind::MulticastError,
        CmEvent::AddrinfoError => EventKind::AddrinfoError,
        CmEvent::AddrChange => EventKind::AddrChange,
        CmEvent::TimewaitExit => EventKind::TimewaitExit,
    }
}

impl Engine {
    /// Runs a call, and what follows from it.
    fn manage<T>(
        &self,
        call: impl FnOnce(&mut Manager, u64) -> Result<T, EngineError>,
    ) -> Result<T, EngineError> {
        let mut core = self.enter()?;
        let now = core.now().0;
        self.learn_link(&mut core);
        core.learn_levels()?;
        let manager = core.manager()?;
        let outcome = call(manager, now);
        manager.settle(now);
        if manager.has_output() {
            core.settle(Time(now));
        }
        // There may be an earlier deadline than whoever waits knows of.
        core.call_waiter();
        outcome
    }

    /// As [`manage`](Self::manage), for a call about an identifier that a plan of faults knows: the plan may
    /// refuse it, or have an event come in place of what it does.
    fn manage_planned(
        &self,
        planned: Call,
        id: IdKey,
        call: impl FnOnce(&mut Manager, u64) -> Result<(), EngineError>,
    ) -> Result<(), EngineError> {
        let struck = self.enter_for(planned)?.take_cm_event(planned);
        self.manage(|manager, now| {
            let Some((event, status)) = struck else { return call(manager, now) };
            if event.comes_beside() {
                call(manager, now)?;
            }
            Ok(manager.cm.strike(id, kind_of(event), status)?)
        })
    }

    /// Has the strict mode look at the length of private data, of which `most` are possible.
    fn watch_private_data(
        &self,
        call: &str,
        id: IdKey,
        len: usize,
        most: [usize; 2],
    ) -> Result<(), EngineError> {
        let mut core = self.enter()?;
        if core.strict.is_some()
            && let Ok((_, datagram)) = core.manager()?.cm.kind(id)
        {
            core.watch_private_data(call, len, most[usize::from(datagram)]);
        }
        Ok(())
    }

    fn manage_cm<T>(
        &self,
        call: impl FnOnce(&mut Cm, u64) -> Result<T, CallError>,
    ) -> Result<T, EngineError> {
        self.manage(|manager, now| Ok(call(&mut manager.cm, now)?))
    }

    /// Creates an event channel; also its descriptor, which is readable while events are queued.
    /// The first one starts the helper thread.
    ///
    /// # Errors
    ///
    /// No descriptor is left, or no thread.
    pub fn cm_create_channel(&self) -> Result<(ChannelKey, RawFd), EngineError> {
        if !self.is_here() {
            return Err(EngineError::EngineGone);
        }
        Helper::start(&self.inner)?;
        let mut core = self.enter_for(Call::CreateEventChannel)?;
        if core.cm.is_none() {
            let address = &self.inner.address;
            let mut seed = [0; 32];
            sys::random(&mut seed).map_err(|e| EngineError::system("random numbers", e))?;
            let gid = Gid::from(address.ip).0;
            let path_mtu = address.active_mtu();
            let config = quipu_cm::Config {
                gid,
                path_mtu,
                seed,
                takes_quipu: self.inner.config.devices.contains(&Device::Quipu0),
                takes_plain: self.inner.config.devices.contains(&Device::QuipuIw0),
                asks_plain: self.inner.config.cm_device == Device::QuipuIw0,
                ..quipu_cm::Config::default()
            };
            let epoll = std::sync::Arc::clone(&self.inner.epoll);
            let captured = core.adapter.probe_mut().watches();
            let own = std::sync::Arc::clone(&core.own);
            let manager = Manager::new(config, own, epoll, captured)
                .map_err(|e| EngineError::system("a descriptor in reserve", e))?;
            core.cm = Some(Box::new(manager));
        }
        core.manager()?.create_channel()
    }

    /// Destroys an event channel and closes its descriptor.
    ///
    /// # Errors
    ///
    /// Identifiers use it, or there is none.
    pub fn cm_destroy_channel(&self, channel: ChannelKey) -> Result<(), EngineError> {
        self.manage(|manager, _| manager.destroy_channel(channel))
    }

    /// Takes the next event of a channel, and waits for one unless the program has made the
    /// channel's descriptor non-blocking.
    ///
    /// # Errors
    ///
    /// [`EngineError::WouldBlock`], [`EngineError::Interrupted`], or no such channel.
    pub fn cm_get_event(&self, channel: ChannelKey) -> Result<Event, EngineError> {
        self.cm_get_event_within(channel, None)
    }

    /// [`cm_get_event`](Self::cm_get_event), which waits for `most` at most.
    ///
    /// # Errors
    ///
    /// As there; [`EngineError::WaitOn`] if nothing has come in that time.
    pub fn cm_get_event_within(
        &self,
        channel: ChannelKey,
        most: Option<Duration>,
    ) -> Result<Event, EngineError> {
        let (mut first, mut patience) = (true, Patience::new(most));
        loop {
            let mut core = self.enter()?;
            if let Some(event) = core.next_cm_event(channel)? {
                return Ok(event);
            }
            let any = core.run();
            if let Some(event) = core.next_cm_event(channel)? {
                return Ok(event);
            }
            let fd = core.manager()?.channel_fd(channel)?;
            if std::mem::take(&mut first) && is_non_blocking(fd) {
                // The program will wait for the descriptor itself: others must make the progress.
                let call = core.helper == HelperMode::Dozing;
                drop(core);
                if call {
                    self.inner.helper.call();
                }
                return Err(EngineError::WouldBlock);
            }
            let most = patience.left()?;
            if core.driver {
                self.sleep_beside_driver(core, || wait_readable(fd, most))?;
                continue;
            }
            if any {
                core.give_way();
                continue;
            }
            let attend = |core: &mut Core| {
                if let Ok(manager) = core.manager() {
                    manager.attend(Some(channel));
                }
            };
            let leave = |core: &mut Core| {
                let manager = core.manager()?;
                let event = manager.take_event(channel);
                manager.attend(None);
                event
            };
            if let Some(event) = self.drive(core, most, attend, leave)? {
                return Ok(event);
            }
        }
    }

    /// Takes the next event of a channel that is queued already. Makes no progress, and has nobody else make
    /// any: for programs that poll completion queues, and ask for an event of one before they sleep.
    ///
    /// # Errors
    ///
    /// [`EngineError::WouldBlock`], or no such channel.
    pub fn cm_take_event(&self, channel: ChannelKey) -> Result<Event, EngineError> {
        if self.inner.enter_quickly()?.manager()?.has_none(channel)? {
            return Err(EngineError::WouldBlock);
        }
        self.enter()?.next_cm_event(channel)?.ok_or(EngineError::WouldBlock)
    }

    /// Creates an identifier. `qp_type` is `IBV_QPT_*`; `cookie` comes back in its events.
    ///
    /// # Errors
    ///
    /// No such channel.
    pub fn cm_create_id(
        &self,
        channel: ChannelKey,
        space: PortSpace,
        qp_type: u8,
        cookie: u64,
    ) -> Result<IdKey, EngineError> {
        self.note_call(Call::CreateId)?;
        self.manage_cm(|cm, _| cm.create_id(channel, space, qp_type, cookie))
    }

    /// Destroys an identifier in any state; its peer, if connected, is told. How many events of it
    /// were taken.
    ///
    /// # Errors
    ///
    /// No such identifier.
    pub fn cm_destroy_id(&self, id: IdKey) -> Result<u32, EngineError> {
        self.manage(|manager, now| manager.destroy_id(now, id))
    }

    /// Names an identifier in events to come.
    ///
    /// # Errors
    ///
    /// No such identifier.
    pub fn cm_set_cookie(&self, id: IdKey, cookie: u64) -> Result<(), EngineError> {
        self.manage_cm(|cm, _| cm.set_cookie(id, cookie))
    }

    /// Moves an identifier and its events to another channel. How many events of it were taken.
    ///
    /// # Errors
    ///
    /// No such identifier or channel.
    pub fn cm_migrate_id(&self, id: IdKey, channel: ChannelKey) -> Result<u32, EngineError> {
        self.note_call(Call::MigrateId)?;
        self.manage_cm(|cm, _| cm.migrate(id, channel))
    }

    /// Queues an event that the program writes, or that says what became of its question for names.
    ///
    /// # Errors
    ///
    /// No such identifier; another event.
    pub fn cm_write_event(
        &self,
        id: IdKey,
        kind: EventKind,
        status: i32,
        arg: u64,
    ) -> Result<(), EngineError> {
        let write = |cm: &mut Cm| cm.write_event(id, kind, status, arg);
        if kind == EventKind::User {
            return self.manage_cm(|cm, _| write(cm));
        }
        self.manage_planned(Call::ResolveAddrinfo, id, |manager, _| Ok(write(&mut manager.cm)?))
    }

    /// Binds an identifier to an address and port.
    ///
    /// # Errors
    ///
    /// It is bound already; the address is not of this host, or the port is taken.
    pub fn cm_bind_addr(&self, id: IdKey, addr: SocketAddr) -> Result<(), EngineError> {
        // The program may know an address before the engine does.
        self.enter()?.hear_port();
        self.manage_planned(Call::BindAddr, id, |manager, _| manager.bind_addr(id, addr))?;
        self.choose_port_on_link(id)
    }

    /// Finds the way to `dst`. An event tells what came of it.
    ///
    /// # Errors
    ///
    /// It is not the time for that, or `src` cannot be bound to.
    pub fn cm_resolve_addr(
        &self,
        id: IdKey,
        src: Option<SocketAddr>,
        dst: SocketAddr,
    ) -> Result<(), EngineError> {
        self.enter()?.hear_port();
        self.manage_planned(Call::ResolveAddr, id, |manager, _| manager.resolve_addr(id, src, dst))
    }

    /// Finds the route. An event tells.
    ///
    /// # Errors
    ///
    /// The address is not resolved.
    pub fn cm_resolve_route(&self, id: IdKey) -> Result<(), EngineError> {
        self.manage_planned(Call::ResolveRoute, id, |manager, _| {
            Ok(manager.cm.resolve_route(id)?)
        })
    }

    /// Takes requests from now on.
    ///
    /// # Errors
    ///
    /// The identifier is in use, or somebody else listens on its port.
    pub fn cm_listen(&self, id: IdKey, backlog: i32) -> Result<(), EngineError> {
        self.manage_planned(Call::Listen, id, |manager, _| manager.listen(id, backlog))?;
        self.listen_on_link(id)
    }

    /// Asks the peer for a connection. An event tells what came of it.
    ///
    /// # Errors
    ///
    /// The route is not resolved, or there is too much private data.
    pub fn cm_connect(&self, id: IdKey, param: &Param) -> Result<(), EngineError> {
        self.watch_private_data("rdma_connect", id, param.private_data.len(), REQ_DATA)?;
        self.manage_planned(Call::Connect, id, |manager, now| {
            Ok(manager.cm.connect(now, id, param)?)
        })
    }

    /// Accepts a request, or (without `param`) says that the connection stands.
    ///
    /// # Errors
    ///
    /// There is nothing to accept, or too much private data.
    pub fn cm_accept(&self, id: IdKey, param: Option<&Param>) -> Result<(), EngineError> {
        let Some(param) = param else {
            self.note_call(Call::Establish)?;
            return self.manage_cm(|cm, now| cm.accept(now, id, None));
        };
        self.watch_private_data("rdma_accept", id, param.private_data.len(), REP_DATA)?;
        self.manage_planned(Call::Accept, id, |manager, now| {
            Ok(manager.cm.accept(now, id, Some(param))?)
        })
    }

    /// Refuses a request.
    ///
    /// # Errors
    ///
    /// There is nothing to refuse, or too much private data.
    pub fn cm_reject(
        &self,
        id: IdKey,
        why: Refusal,
        private_data: &[u8],
    ) -> Result<(), EngineError> {
        self.watch_private_data("rdma_reject", id, private_data.len(), REJ_DATA)?;
        self.manage_planned(Call::Reject, id, |manager, _| {
            Ok(manager.cm.reject(id, why, private_data)?)
        })
    }

    /// Ends a connection, or agrees to its end.
    ///
    /// # Errors
    ///
    /// There is none.
    pub fn cm_disconnect(&self, id: IdKey) -> Result<(), EngineError> {
        self.manage_planned(Call::Disconnect, id, |manager, now| {
            Ok(manager.cm.disconnect(now, id)?)
        })
    }

    /// Takes it that the connection stands.
    ///
    /// # Errors
    ///
    /// There is none that is about to, or it stands already.
    pub fn cm_establish(&self, id: IdKey) -> Result<(), EngineError> {
        self.manage_cm(|cm, _| cm.establish(id))
    }

    /// Changes the settings of an identifier.
    ///
    /// # Errors
    ///
    /// No such identifier.
    pub fn cm_set_option(
        &self,
        id: IdKey,
        set: impl FnOnce(&mut quipu_cm::Options),
    ) -> Result<(), EngineError> {
        self.note_call(Call::SetOption)?;
        self.manage_cm(|cm, _| cm.options(id).map(set))
    }

    /// Whether an identifier at `::` is for peers of IPv6 only.
    ///
    /// # Errors
    ///
    /// It listens already, or there is none.
    pub fn cm_set_v6_only(&self, id: IdKey, only: bool) -> Result<(), EngineError> {
        self.note_call(Call::SetOption)?;
        self.manage_cm(|cm, _| cm.set_v6_only(id, only))
    }

    /// What is known of the addresses of an identifier.
    ///
    /// # Errors
    ///
    /// No such identifier.
    pub fn cm_route(&self, id: IdKey) -> Result<Route, EngineError> {
        self.manage_cm(|cm, _| cm.route(id))
    }

    /// What a queue pair needs to be initialised.
    ///
    /// # Errors
    ///
    /// The identifier belongs to no device yet.
    pub fn cm_init_params(&self, id: IdKey) -> Result<QpParams, EngineError> {
        self.manage_cm(|cm, _| cm.init_params(id))
    }

    /// What a queue pair needs to be connected.
    ///
    /// # Errors
    ///
    /// The peer is not known.
    pub fn cm_connect_params(&self, id: IdKey) -> Result<QpParams, EngineError> {
        self.manage_cm(|cm, _| cm.connect_params(id))
    }

    /// Joins a multicast group. An event tells how to reach it. On a port of InfiniBand the unspecified
    /// address stands for a group that nobody else has.
    ///
    /// # Errors
    ///
    /// The address is not one of a group; the identifier is not for datagrams, has no device, has a
    /// membership of that name, or too many.
    pub fn cm_join(&self, id: IdKey, group: IpAddr, cookie: u64) -> Result<(), EngineError> {
        let assigns = self.config().link_layer == LinkLayer::InfiniBand;
        let group = if assigns && group.is_unspecified() { new_group()? } else { group };
        let struck = self.enter_for(Call::JoinMulticast)?.take_cm_event(Call::JoinMulticast);
        self.manage_cm(|cm, _| match struck {
            Some((_, status)) => cm.strike_join(id, group, cookie, status),
            None => cm.join(id, group, cookie),
        })
    }

    /// Ends the membership that was joined as `cookie`. How many events of it were taken.
    ///
    /// # Errors
    ///
    /// There is none.
    pub fn cm_leave(&self, id: IdKey, cookie: u64) -> Result<u32, EngineError> {
        self.manage_cm(|cm, _| cm.leave(id, cookie))
    }
}

/// A group as a subnet administrator assigns them (IBA 15.2.5.17): of this link, and not a lasting one.
fn new_group() -> Result<IpAddr, EngineError> {
    let mut octets = [0; 16];
    sys::random(&mut octets).map_err(|error| EngineError::system("random numbers", error))?;
    octets[..4].copy_from_slice(&[0xff, 0x12, 0xa0, 0x1b]);
    Ok(IpAddr::from(octets))
}

#[cfg(test)]
mod tests {
    use super::super::tests::idle;
    use super::*;

    #[test]
    fn an_event_that_is_queued_is_taken_without_a_look_at_descriptors() {
        let engine = idle();
        let (channel, _) = engine.cm_create_channel().unwrap();
        let looks = || engine.inner.core.lock().calls.looks;
        let before = looks();
        for _ in 0..1000 {
            assert!(matches!(engine.cm_take_event(channel), Err(EngineError::WouldBlock)));
        }
        // The helper may have looked now and then.
        assert!(looks() - before < 100);
        let id = engine.cm_create_id(channel, PortSpace::Tcp, 2, 7).unwrap();
        engine.cm_write_event(id, EventKind::User, 0, 5).unwrap();
        let event = engine.cm_take_event(channel).unwrap();
        assert_eq!((event.kind, event.cookie, event.arg), (EventKind::User, 7, 5));
        assert!(matches!(engine.cm_take_event(channel), Err(EngineError::WouldBlock)));
        engine.cm_destroy_id(id).unwrap();
        engine.cm_destroy_channel(channel).unwrap();
        assert!(matches!(engine.cm_take_event(channel), Err(EngineError::Connection(_))));
    }
}
