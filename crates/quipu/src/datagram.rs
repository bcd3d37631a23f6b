//! Unreliable datagrams: one queue pair sends to many.

use std::net::IpAddr;
use std::sync::Arc;

use quipu_host::nic::{
    AddressVector, AhId, Fault, Gid, QpAttr, QpAttrMask as Mask, QpId, QpNum, QpState, QpType, Sge,
    To,
};

use crate::cq::CompletionQueue;
use crate::device::{EngineHandle, ProtectionDomain};
use crate::error::Error;
use crate::post;
use crate::qp::{QueuePairBuilder, address_of};
use crate::request::Request;
use crate::srq::SharedReceiveQueue;

/// Bytes in front of each message in the memory of its receive: the global route header, of which completions
/// count them too ([`Completion::byte_len`](crate::Completion)).
pub const ROUTE_HEADER: usize = 40;
/// The queue pair number of multicast groups (IBA 10.5.2).
const GROUP: u32 = 0x00ff_ffff;

/// Where a datagram queue pair is. Programs tell each other by any means.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct DatagramAddress {
    /// The device's GID.
    pub gid: Gid,
    /// The queue pair's number.
    pub qp_num: QpNum,
    /// Its Q_Key: whoever does not know it is not heard.
    pub qkey: u32,
}

/// Whom a datagram goes to: a queue pair, or all that have joined a group.
///
/// Clones are the same. It may be dropped once requests with it are posted.
#[derive(Clone, Debug)]
pub struct Destination {
    handle: Arc<Handle>,
    qpn: u32,
    qkey: u32,
}

#[derive(Debug)]
struct Handle {
    pd: ProtectionDomain,
    id: AhId,
}

impl Drop for Handle {
    fn drop(&mut self) {
        let _ = self.pd.device().opened.engine.destroy_ah(self.id);
    }
}

impl ProtectionDomain {
    /// A queue pair that datagrams can be sent to, from queue pairs of this domain.
    ///
    /// # Errors
    ///
    /// Its address is of the other family than the adapter's, or there are no more address handles.
    pub fn destination(&self, to: &DatagramAddress) -> Result<Destination, Error> {
        self.destination_at_level(to, 0)
    }

    /// As [`destination`](Self::destination), for datagrams of a service level, 0 to 15.
    ///
    /// # Errors
    ///
    /// As [`destination`](Self::destination).
    pub fn destination_at_level(
        &self,
        to: &DatagramAddress,
        service_level: u8,
    ) -> Result<Destination, Error> {
        self.address(to.gid, to.qp_num.0, to.qkey, service_level)
    }

    /// A multicast group that datagrams can be sent to; `qkey` is that of its members.
    ///
    /// # Errors
    ///
    /// As [`destination`](Self::destination).
    pub fn group(&self, group: IpAddr, qkey: u32) -> Result<Destination, Error> {
        self.group_at_level(group, qkey, 0)
    }

    /// As [`group`](Self::group), for datagrams of a service level, 0 to 15.
    ///
    /// # Errors
    ///
    /// As [`destination`](Self::destination).
    pub fn group_at_level(
        &self,
        group: IpAddr,
        qkey: u32,
        service_level: u8,
    ) -> Result<Destination, Error> {
        self.address(Gid::from(group), GROUP, qkey, service_level)
    }

    fn address(&self, gid: Gid, qpn: u32, qkey: u32, sl: u8) -> Result<Destination, Error> {
        let av = AddressVector { sl, ..address_of(gid) };
        let id = self.device().opened.engine.create_ah(self.inner.id, &av)?;
        Ok(Destination { handle: Arc::new(Handle { pd: self.clone(), id }), qpn, qkey })
    }
}

impl QueuePairBuilder {
    /// Creates a queue pair for unreliable datagrams (UD), which takes messages that know its `qkey` (below
    /// 2^31). It needs no connection: receives and sends can be posted to it at once.
    ///
    /// # Errors
    ///
    /// As [`build`](Self::build).
    pub fn build_datagram(self, qkey: u32) -> Result<DatagramQueuePair, Error> {
        let (id, qp_num, _) = self.create(QpType::Ud)?;
        let address = DatagramAddress { gid: self.pd.device().gid(), qp_num, qkey };
        let Self { pd, send_cq, recv_cq, srq, .. } = self;
        let qp = DatagramQueuePair { id, address, pd, _queues: (send_cq, recv_cq, srq) };
        qp.bring_up()?;
        Ok(qp)
    }
}

/// A queue pair for unreliable datagrams. A message has at most
/// [`max_message`](DatagramQueuePair::max_message) bytes, and arrives whole or not at all; messages may be
/// lost, come twice and change places, as in the network between.
///
/// ```
/// use quipu::{Access, Config, Device, ROUTE_HEADER, Request};
///
/// # fn main() -> Result<(), quipu::Error> {
/// let config = Config { address: Some("127.0.0.1".parse().unwrap()), ..Config::default() };
/// let device = Device::open(config)?;
/// let (pd, cq) = (device.protection_domain()?, device.completion_queue(16)?);
/// let here = pd.queue_pair(&cq, &cq).build_datagram(0x1111)?;
/// let there = pd.queue_pair(&cq, &cq).build_datagram(0x2222)?;
///
/// let memory = pd.register(4096, Access::LOCAL_WRITE)?;
/// there.post_recv(1, &[memory.sge(0, ROUTE_HEADER + 100)?])?;
/// let to = pd.destination(&there.address())?;
/// here.send_to(&Request::send_inline(b"a postcard").with_imm(7).id(2), &to)?;
///
/// let mut done = [cq.next()?, cq.next()?];
/// done.sort_by_key(|completion| completion.wr_id);
/// assert_eq!(done[0].byte_len as usize, ROUTE_HEADER + 10);
/// assert_eq!(done[0].src_qp, here.address().qp_num);
/// assert_eq!(memory.to_vec(ROUTE_HEADER, 10)?, b"a postcard");
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct DatagramQueuePair {
    id: QpId,
    address: DatagramAddress,
    pd: ProtectionDomain,
    /// They live as long as it does.
    _queues: (CompletionQueue, CompletionQueue, Option<SharedReceiveQueue>),
}

impl DatagramQueuePair {
    fn engine(&self) -> &EngineHandle {
        &self.pd.device().opened.engine
    }

    fn bring_up(&self) -> Result<(), Error> {
        let steps = [
            (QpState::Init, Mask::PKEY_INDEX | Mask::PORT | Mask::QKEY),
            (QpState::Rtr, Mask::empty()),
            (QpState::Rts, Mask::SQ_PSN),
        ];
        for (state, mask) in steps {
            let attr = QpAttr { state, port_num: 1, qkey: self.address.qkey, ..QpAttr::default() };
            self.engine().modify_qp(self.id, &attr, Mask::STATE | mask)?;
        }
        Ok(())
    }

    /// What others must know to send to it.
    #[must_use]
    pub fn address(&self) -> DatagramAddress {
        self.address
    }

    /// Bytes that a message may have; a longer one is not sent, and completes like one that was.
    ///
    /// # Errors
    ///
    /// The engine belongs to the parent of this process.
    pub fn max_message(&self) -> Result<usize, Error> {
        Ok(self.engine().limits()?.datagram_mtu as usize)
    }

    /// Hands memory to the adapter, to be filled by [`ROUTE_HEADER`] bytes and one message. A message that
    /// does not fit is lost.
    ///
    /// # Errors
    ///
    /// The queue is full, there are more pieces than it takes, or receives are shared.
    pub fn post_recv(&self, wr_id: u64, memory: &[Sge]) -> Result<(), Error> {
        Ok(self.engine().post_recv(self.id, wr_id, memory)?)
    }

    /// Hands several receives to the adapter, each with its number and its memory, with one doorbell: cheaper
    /// than one by one.
    ///
    /// # Errors
    ///
    /// As [`post_recv`](Self::post_recv), with the number of receives that were taken before.
    pub fn post_recvs(&self, receives: &[(u64, &[Sge])]) -> Result<(), (usize, Error)> {
        post::receives(self.engine(), self.id, receives)
    }

    /// Sends a message, with or without immediate data. It completes when it is on its way.
    ///
    /// # Errors
    ///
    /// The queue is full, the request is no send or exceeds a limit, or the destination belongs
    /// to another protection domain.
    pub fn send_to(&self, request: &Request<'_>, to: &Destination) -> Result<(), Error> {
        if !Arc::ptr_eq(&self.pd.inner, &to.handle.pd.inner) {
            return Err(
                Fault::Invalid("the destination belongs to another protection domain").into()
            );
        }
        let mut wr = request.wr;
        wr.to = To::Datagram { ah: to.handle.id, qpn: to.qpn, qkey: to.qkey };
        Ok(self.engine().post_send(self.id, &wr)?)
    }

    /// Takes what is sent to a multicast group from now on, also by this queue pair itself.
    ///
    /// # Errors
    ///
    /// It is no multicast address, or the system does not let it be joined.
    pub fn join(&self, group: IpAddr) -> Result<(), Error> {
        Ok(self.engine().attach_multicast(self.id, Gid::from(group))?)
    }

    /// Leaves a group.
    ///
    /// # Errors
    ///
    /// It has not joined it.
    pub fn leave(&self, group: IpAddr) -> Result<(), Error> {
        Ok(self.engine().detach_multicast(self.id, Gid::from(group))?)
    }
}

impl Drop for DatagramQueuePair {
    fn drop(&mut self) {
        let _ = self.engine().detach_all(self.id);
        let _ = self.engine().destroy_qp(self.id);
    }
}
