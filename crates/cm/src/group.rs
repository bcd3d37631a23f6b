//! Multicast groups, as far as connection management has a part in them: it says how to reach one.
//! Membership itself is the affair of queue pairs (`ibv_attach_mcast`).

use std::net::IpAddr;

use crate::Cm;
use crate::id::Group;
use crate::keys::IdKey;
use crate::lookup::UDP_QKEY;
use crate::types::{CallError, Event, EventKind, Peer, gid_of};

/// The queue pair number that stands for all of a group (IBA 9.6.1.2.1).
const GROUP_QPN: u32 = 0x00ff_ffff;
/// Groups of one identifier.
const MAX_GROUPS: usize = 256;

impl Cm {
    /// Joins a group: an event tells how to reach it, and brings back `cookie`, by which the membership is
    /// known. A group may be joined several times, as with the kernel's rdma_cm.
    ///
    /// # Errors
    ///
    /// The address is not one of a group, the identifier is not for datagrams, belongs to no
    /// device, has a membership of that name, or too many.
    pub fn join(&mut self, key: IdKey, address: IpAddr, cookie: u64) -> Result<(), CallError> {
        self.check_join(key, address, cookie)?;
        let id = self.ids.get_mut(key).ok_or(CallError::NoSuchObject)?;
        id.groups.push(Group { cookie, reported: 0 });
        let path = Some(id.path_to(&self.own, gid_of(address)));
        let peer = Peer { qpn: GROUP_QPN, qkey: UDP_QKEY, path, ..Peer::default() };
        let (kind, status, listener, private_data) =
            (EventKind::MulticastJoin, 0, 0, Box::default());
        let multicast = cookie;
        self.push(Event {
            kind,
            status,
            id: key,
            cookie: 0,
            listener,
            multicast,
            arg: 0,
            private_data,
            peer,
        });
        Ok(())
    }

    /// Whether a group may be joined.
    pub(crate) fn check_join(
        &self,
        key: IdKey,
        address: IpAddr,
        cookie: u64,
    ) -> Result<(), CallError> {
        let id = self.ids.get(key).ok_or(CallError::NoSuchObject)?;
        if !address.is_multicast() {
            return Err(CallError::Invalid("the address of the group"));
        }
        if !id.is_datagram() || !id.has_device(self.config.gid) {
            return Err(CallError::WrongState);
        }
        let known = id.groups.iter().any(|group| group.cookie == cookie);
        if known || id.groups.len() >= MAX_GROUPS {
            return Err(CallError::Invalid("the number of memberships"));
        }
        Ok(())
    }

    /// Ends the membership that was joined as `cookie`. How many events of it were taken; one that was not
    /// vanishes.
    ///
    /// # Errors
    ///
    /// There is none.
    pub fn leave(&mut self, key: IdKey, cookie: u64) -> Result<u32, CallError> {
        let id = self.ids.get_mut(key).ok_or(CallError::NoSuchObject)?;
        let at = id.groups.iter().position(|group| group.cookie == cookie);
        let group = id.groups.remove(at.ok_or(CallError::NoSuchObject)?);
        self.take_back(key, |event| event.kind.is_of_group() && event.multicast == group.cookie);
        Ok(group.reported)
    }
}
