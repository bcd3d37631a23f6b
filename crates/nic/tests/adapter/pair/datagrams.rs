//! Datagrams between the two hosts of a pair, and beyond.

use std::net::SocketAddr;

use quipu_nic::*;

use super::Pair;

/// The Q_Key of queue pairs that name none.
pub const QKEY: u32 = 0x1111_1111;

impl Pair {
    /// A datagram queue pair in RTS.
    pub fn datagram_qp(&mut self, host: usize) -> QpId {
        self.datagram_qp_with(host, |_| {})
    }

    pub fn datagram_qp_with(&mut self, host: usize, change: impl FnOnce(&mut QpInit)) -> QpId {
        let qp = self.hosts[host].qp_with(|init| {
            init.qp_type = QpType::Ud;
            change(init);
        });
        for state in [QpState::Init, QpState::Rtr, QpState::Rts] {
            self.advance(host, qp, state);
        }
        qp
    }

    /// Takes a datagram queue pair to the next state, with the attributes that this needs.
    pub fn advance(&mut self, host: usize, qp: QpId, state: QpState) {
        let attr = QpAttr { state, port_num: 1, qkey: QKEY, sq_psn: 5, ..QpAttr::default() };
        let mask = QpAttrMask::STATE
            | match state {
                QpState::Init => QpAttrMask::PKEY_INDEX | QpAttrMask::PORT | QpAttrMask::QKEY,
                QpState::Rts => QpAttrMask::SQ_PSN,
                _ => QpAttrMask::empty(),
            };
        self.hosts[host].adapter.modify_qp(self.now, qp, &attr, mask).unwrap();
    }

    pub fn number(&self, host: usize, qp: QpId) -> QpNum {
        self.hosts[host].adapter.query_qp(qp).unwrap().num
    }

    /// An address handle of `host` for the other one.
    pub fn ah(&mut self, host: usize) -> AhId {
        let dgid = self.hosts[1 - host].adapter.config().gid;
        self.ah_with(host, dgid, |_| {})
    }

    pub fn ah_with(
        &mut self,
        host: usize,
        dgid: Gid,
        change: impl FnOnce(&mut AddressVector),
    ) -> AhId {
        let mut av =
            AddressVector { dgid, is_global: true, port_num: 1, ..AddressVector::default() };
        change(&mut av);
        let pd = self.hosts[host].pd;
        self.hosts[host].adapter.create_ah(pd, &av).unwrap()
    }

    /// Posts a datagram to a queue pair of the other host.
    pub fn send_datagram(&mut self, host: usize, qp: QpId, wr: &SendWr<'_>) -> Result<(), Fault> {
        let adapter = &mut self.hosts[host].adapter;
        adapter.post_send(qp, wr)?;
        adapter.ring_doorbell(self.now, qp);
        Ok(())
    }

    pub(super) fn transmit_datagrams(&mut self, host: usize) -> bool {
        let mut busy = false;
        let mut out = [0; MAX_DATAGRAM];
        while let Some((id, _)) = self.hosts[host].adapter.next_datagrams() {
            busy = true;
            while !self.full[host]
                && let Some(departure) =
                    self.hosts[host].adapter.transmit_datagram(self.now, id, &mut out)
            {
                self.fly(host, &departure, &out[..departure.len]);
            }
        }
        busy
    }

    fn fly(&mut self, host: usize, departure: &Departure, bytes: &[u8]) {
        assert!(departure.len <= MAX_DATAGRAM);
        let source = self.hosts[host].row(departure.sgid_index);
        let from = SocketAddr::new(source, departure.from.port());
        let arrival = Arrival {
            from,
            to: departure.to.ip(),
            traffic_class: departure.traffic_class,
            hop_limit: 64,
        };
        for to in 0..2 {
            let (host, ip) = (&self.hosts[to], departure.to.ip());
            if host.has(ip) || host.adapter.has_group(ip) {
                self.flying.push_back((to, arrival, bytes.to_vec()));
            }
        }
    }

    pub(super) fn deliver_datagrams(&mut self) -> bool {
        let mut busy = false;
        while !self.hold
            && let Some((to, arrival, bytes)) = self.flying.pop_front()
        {
            busy = true;
            self.hosts[to].adapter.handle_datagram(self.now, &arrival, &bytes);
        }
        busy
    }
}
