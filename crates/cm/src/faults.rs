//! What a plan of faults does to identifiers on purpose.

use std::net::IpAddr;

use crate::Cm;
use crate::id::{Group, State};
use crate::keys::IdKey;
use crate::types::{Action, CallError, Event, EventKind, Peer, Protocol};

impl Cm {
    /// In place of what a program has just asked for, or beside it where it is no failure, this event comes:
    ///
    /// | event | in place of |
    /// |---|---|
    /// | [`AddrError`](EventKind::AddrError) | resolving an address |
    /// | [`RouteError`](EventKind::RouteError) | resolving a route |
    /// | [`ConnectError`](EventKind::ConnectError), [`Unreachable`](EventKind::Unreachable), [`Rejected`](EventKind::Rejected) | connecting, or accepting a request, whose peer is refused then |
    /// | [`AddrinfoError`](EventKind::AddrinfoError) | asking for names |
    /// | [`AddrChange`](EventKind::AddrChange), [`TimewaitExit`](EventKind::TimewaitExit) | nothing |
    ///
    /// # Errors
    ///
    /// What was asked for would have been refused in this state, or there is no such identifier. Others than
    /// the events above.
    pub fn strike(&mut self, key: IdKey, kind: EventKind, status: i32) -> Result<(), CallError> {
        let id = self.ids.get(key).ok_or(CallError::NoSuchObject)?;
        let fits = match kind {
            EventKind::AddrError => matches!(id.state, State::Idle),
            EventKind::RouteError => matches!(id.state, State::AddressResolved),
            EventKind::ConnectError | EventKind::Unreachable | EventKind::Rejected => {
                matches!(id.state, State::RouteResolved | State::Requested | State::Asked(_))
            }
            EventKind::AddrinfoError | EventKind::AddrChange | EventKind::TimewaitExit => true,
            _ => return Err(CallError::Invalid("the event")),
        };
        if !fits {
            return Err(CallError::WrongState);
        }
        match kind {
            EventKind::ConnectError | EventKind::Unreachable | EventKind::Rejected => {
                self.part(key);
                self.fail(key, kind, status);
            }
            _ => self.tell(key, kind, status),
        }
        Ok(())
    }

    /// In place of joining a group, [`MulticastError`](EventKind::MulticastError) comes.
    ///
    /// # Errors
    ///
    /// As [`join`](Self::join).
    pub fn strike_join(
        &mut self,
        key: IdKey,
        address: IpAddr,
        cookie: u64,
        status: i32,
    ) -> Result<(), CallError> {
        self.check_join(key, address, cookie)?;
        let id = self.ids.get_mut(key).ok_or(CallError::NoSuchObject)?;
        id.groups.push(Group { cookie, reported: 0 });
        self.push(Event {
            kind: EventKind::MulticastError,
            status,
            id: key,
            cookie: 0,
            listener: 0,
            multicast: cookie,
            arg: 0,
            private_data: Box::default(),
            peer: Peer::default(),
        });
        Ok(())
    }

    /// The device is gone: so are all connections, and each identifier that belongs to it hears
    /// [`DeviceRemoval`](EventKind::DeviceRemoval) (`rdma_get_cm_event(3)`). Requests that no program has
    /// taken vanish, and none is taken any more.
    pub fn handle_device_removed(&mut self) {
        self.removed = true;
        let keys: Vec<IdKey> = self.ids.keys().collect();
        for key in keys {
            let Some(id) = self.ids.get(key) else { continue };
            if id.listener.is_some() {
                self.drop_stream(key, true);
                self.retract(key);
            } else if id.has_device(self.config.gid) {
                self.lose_device(key);
            }
        }
    }

    pub(crate) fn lose_device(&mut self, key: IdKey) {
        self.drop_stream(key, true);
        self.set_deadline(key, None);
        let Some(id) = self.ids.get_mut(key) else { return };
        match (id.protocol, &id.state) {
            // No program decides about it any more, and the adapter would wait for that.
            (Protocol::Qpip, State::Requested) => {
                self.actions.push_back(Action::Refuse { id: key });
            }
            (protocol, _) if protocol.is_of_adapter() => {
                self.actions.push_back(Action::End { id: key });
            }
            _ => {}
        }
        if !matches!(id.state, State::Listening(_)) {
            id.state = State::Over;
        }
        self.tell(key, EventKind::DeviceRemoval, 0);
    }
}
