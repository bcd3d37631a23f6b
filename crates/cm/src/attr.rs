//! What queue pairs and programs are told of a connection.

use std::net::SocketAddr;

use crate::Cm;
use crate::id::{Id, Options, State};
use crate::keys::IdKey;
use crate::types::{CallError, Path, PortSpace, Protocol, gid_of};

/// The RNR timer code of a queue pair whose peer repeats without end: 0.64 ms.
const RNR_TIMER_SHORT: u8 = 12;
/// And of one whose peer counts, which shall not give up soon: 655 ms, as the kernel has it.
const RNR_TIMER_LONG: u8 = 0;

/// What an identifier knows of its addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Route {
    /// The own address.
    pub src: Option<SocketAddr>,
    /// The peer's.
    pub dst: Option<SocketAddr>,
    /// Whether the identifier belongs to the device.
    pub has_device: bool,
    /// What it speaks, and so which device that is.
    pub protocol: Protocol,
    /// Whether the path to the peer is known.
    pub has_path: bool,
    /// Where the own queue pairs are.
    pub sgid: [u8; 16],
    /// Where the peer's are; before it has said so, made of its address.
    pub dgid: [u8; 16],
    /// Path MTU code.
    pub path_mtu: u8,
    /// Traffic class.
    pub traffic_class: u8,
    /// Service level of the path.
    pub service_level: u8,
}

/// What a queue pair of a connection must be given, on its way to RTS.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct QpParams {
    /// `IBV_QPT_*`.
    pub qp_type: u8,
    /// Whether it is for datagrams.
    pub datagram: bool,
    /// Whether the engine connects it by itself.
    pub of_adapter: bool,
    /// INIT: the peer may write.
    pub remote_write: bool,
    /// INIT: the peer may read, use atomics, and flush.
    pub remote_read: bool,
    /// INIT, datagrams.
    pub qkey: u32,
    /// RTR.
    pub path: Path,
    /// RTR: code.
    pub path_mtu: u8,
    /// RTR.
    pub dest_qpn: u32,
    /// RTR.
    pub rq_psn: u32,
    /// RTR: reads and atomics answered at a time.
    pub max_dest_rd_atomic: u8,
    /// RTR: code.
    pub min_rnr_timer: u8,
    /// RTS.
    pub sq_psn: u32,
    /// RTS: reads and atomics outstanding.
    pub max_rd_atomic: u8,
    /// RTS: 4.096 us << code.
    pub timeout: u8,
    /// RTS.
    pub retry_count: u8,
    /// RTS.
    pub rnr_retry: u8,
}

impl Cm {
    /// What is known of the addresses of an identifier.
    ///
    /// # Errors
    ///
    /// There is none.
    pub fn route(&self, key: IdKey) -> Result<Route, CallError> {
        let id = self.ids.get(key).ok_or(CallError::NoSuchObject)?;
        let before = matches!(id.state, State::Idle | State::AddressResolved | State::Listening(_));
        let of_address = id.dst.map_or([0; 16], |dst| gid_of(dst.ip()));
        Ok(Route {
            src: id.src,
            dst: id.dst,
            has_device: id.has_device(self.config.gid),
            protocol: id.protocol,
            has_path: !before,
            sgid: id.own_gid(&self.own),
            dgid: id.peer.map_or(of_address, |peer| peer.gid),
            path_mtu: self.path_mtu(id),
            traffic_class: id.traffic_class(),
            service_level: id.path_to(&self.own, [0; 16]).service_level,
        })
    }

    fn path_mtu(&self, id: &Id) -> u8 {
        id.peer.map_or(self.config.path_mtu, |peer| peer.path_mtu.min(self.config.path_mtu))
    }

    /// What a queue pair needs to be initialised.
    ///
    /// # Errors
    ///
    /// The identifier belongs to no device yet.
    pub fn init_params(&self, key: IdKey) -> Result<QpParams, CallError> {
        let id = self.ids.get(key).ok_or(CallError::NoSuchObject)?;
        if !id.has_device(self.config.gid) {
            return Err(CallError::WrongState);
        }
        let answers = id.own.map_or(0, |own| own.responder_resources);
        let asked = id.peer.map_or(0, |peer| peer.initiator_depth);
        let of_adapter = id.protocol.is_of_adapter();
        Ok(QpParams {
            qp_type: id.service(),
            datagram: id.is_datagram(),
            of_adapter,
            remote_write: of_adapter || id.own.is_some() || id.peer.is_some(),
            remote_read: of_adapter || answers.max(asked) > 0,
            qkey: crate::lookup::UDP_QKEY,
            sq_psn: id.own.map_or(0, |own| own.psn),
            ..QpParams::default()
        })
    }

    /// What a queue pair needs to be connected. On the side that was asked, whose program has not
    /// accepted yet, what the peer asked for stands in for what the program will say. On the side that
    /// asked, the reply says how many reads and atomics go either way (IBA 12.7.29, 12.7.30).
    ///
    /// # Errors
    ///
    /// The peer is not known yet, or is no more.
    pub fn connect_params(&mut self, key: IdKey) -> Result<QpParams, CallError> {
        let init = self.init_params(key)?;
        let own_psn = self.draw_psn();
        let id = self.ids.get_mut(key).ok_or(CallError::NoSuchObject)?;
        if init.of_adapter {
            return Ok(init);
        }
        if init.datagram {
            return Ok(QpParams { sq_psn: own_psn, ..init });
        }
        let peer = id.peer.ok_or(CallError::WrongState)?;
        // The queue pair of the side that was asked is brought up before it accepts: the PSN is
        // drawn here, and `accept` says it.
        let sq_psn = *id.psn.get_or_insert(own_psn);
        let own = id.own;
        let (answers, has) = match own {
            Some(own) if id.asked => (own.responder_resources, own.initiator_depth),
            Some(own) => (peer.initiator_depth, own.initiator_depth),
            None => (peer.initiator_depth, peer.responder_resources),
        };
        let endless = own.is_none_or(|own| own.rnr_retry_count == 7);
        // Only the side that connects says how often to repeat.
        let retry_count = own.filter(|_| !id.asked).map_or(peer.retry_count, |own| own.retry_count);
        let path = id.path_to(&self.own, peer.gid);
        let (timeout, set) = (id.ack_timeout(), id.options.ack_timeout.is_some());
        let id = self.ids.get(key).ok_or(CallError::NoSuchObject)?;
        Ok(QpParams {
            path,
            path_mtu: self.path_mtu(id),
            dest_qpn: peer.qpn,
            rq_psn: peer.psn,
            max_dest_rd_atomic: answers,
            min_rnr_timer: if endless { RNR_TIMER_SHORT } else { RNR_TIMER_LONG },
            sq_psn,
            max_rd_atomic: has.min(peer.responder_resources),
            timeout: if set { timeout } else { timeout.max(peer.ack_timeout) },
            retry_count,
            rnr_retry: peer.rnr_retry_count,
            ..init
        })
    }

    /// The settings of an identifier.
    ///
    /// # Errors
    ///
    /// There is none.
    pub fn options(&mut self, key: IdKey) -> Result<&mut Options, CallError> {
        self.ids.get_mut(key).map(|id| &mut id.options).ok_or(CallError::NoSuchObject)
    }

    /// `RDMA_OPTION_ID_AFONLY`, which an identifier that is bound may be given, too: its socket takes peers
    /// of both families then, and those of IPv4 are turned away here.
    ///
    /// # Errors
    ///
    /// It listens already, or its socket takes those of IPv6 only; or there is none.
    pub fn set_v6_only(&mut self, key: IdKey, only: bool) -> Result<(), CallError> {
        let id = self.ids.get_mut(key).ok_or(CallError::NoSuchObject)?;
        let narrow = id.src.is_some() && id.options.v6_only == Some(true);
        if !matches!(id.state, State::Idle) || (narrow && !only) {
            return Err(CallError::WrongState);
        }
        id.options.v6_only = Some(only);
        Ok(())
    }

    /// Whether a listener is for peers of this family.
    pub(crate) fn takes_family_of(&self, listener: IdKey, peer: SocketAddr) -> bool {
        self.ids.get(listener).is_some_and(|id| {
            let v6_only = id.options.v6_only == Some(true) && id.src.is_some_and(|it| it.is_ipv6());
            !v6_only || peer.is_ipv6()
        })
    }

    /// Port space of an identifier, and whether it is for datagrams.
    ///
    /// # Errors
    ///
    /// There is none.
    pub fn kind(&self, key: IdKey) -> Result<(PortSpace, bool), CallError> {
        let id = self.ids.get(key).ok_or(CallError::NoSuchObject)?;
        Ok((id.space, id.is_datagram()))
    }
}
