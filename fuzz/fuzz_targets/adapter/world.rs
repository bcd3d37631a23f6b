//! An adapter with objects of every kind, two peers that mean harm, and memory that nobody may touch.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use quipu_iwarp::wire::hello::{Features, Hello, Kind, Service};
use quipu_iwarp::wire::mpa::MAX_FRAME_LEN;
use quipu_iwarp::{Initiator, Negotiated, Params, Responder, Rtr};
use quipu_nic::mem::ring::{Channel, ChannelConfig};
use quipu_nic::mem::{Access, Segment, Sge};
use quipu_nic::*;

use crate::neighbour::{Neighbour, PeerSpace};
use crate::wires::Wire;

pub const ALL: Access = Access::LOCAL_WRITE
    .union(Access::REMOTE_WRITE)
    .union(Access::REMOTE_READ)
    .union(Access::REMOTE_ATOMIC)
    .union(Access::MW_BIND);
/// Bytes of the region that anybody may use, with as many before and behind it that nobody may.
const LEN: usize = 1 << 14;
/// Where channels begin in the segment of the side that made them.
const FIRST_CHANNEL: usize = 4096;
const PATTERN: u8 = 0x5a;

fn gid(last: u8) -> Gid {
    Gid::from(IpAddr::from([10, 0, 0, last]))
}

/// Whom the queue pairs are to be connected with: the greater GID is asked, the smaller one asks.
const OWN: u8 = 5;
const ASKED: u8 = 9;
const ASKING: u8 = 1;
const PEER_QPN: u32 = 0x1101;

/// The number of the shared receive queue that peers can name.
pub const SRQ_NUMBER: u32 = 1;

/// How the queue pairs carry messages.
#[derive(Clone, Copy)]
pub enum Carriage {
    Reliable,
    Unreliable,
    /// Those with even numbers ask, the others serve.
    Extended(XrcdId),
    /// Streams of plain iWARP.
    Plain,
}

impl Carriage {
    fn qp_type(self, index: u8) -> QpType {
        match (self, index) {
            (Self::Unreliable, _) => QpType::Uc,
            (Self::Plain, _) => QpType::Iwarp,
            (Self::Extended(_), 0 | 2) => QpType::XrcSend,
            (Self::Extended(domain), 1 | 3) => QpType::XrcRecv(domain),
            _ => QpType::Rc,
        }
    }

    /// Whom a request addresses: mostly somebody that there is.
    pub fn to(self, choice: u8) -> To {
        match (self, choice) {
            (Self::Extended(_), 0) => To::Srq(SRQ_NUMBER + 1),
            (Self::Extended(_), _) => To::Srq(SRQ_NUMBER),
            _ => To::Peer,
        }
    }
}

pub struct World {
    pub adapter: Adapter,
    pub now: Time,
    pub pd: PdId,
    /// Where everything completes; but receives of every other queue pair in the second.
    pub cqs: [CqId; 2],
    pub srq: SrqId,
    /// How the queue pairs carry messages.
    pub carriage: Carriage,
    pub qps: Vec<QpId>,
    /// Whether streams have CRCs. Without them long FPDUs are taken as they come, and large payloads are sent
    /// from where they lie.
    pub crc: bool,
    pub region: Option<Region>,
    pub window: (MwId, Key),
    /// Nobody gets its key.
    pub secret: Region,
    pub wires: Vec<Wire>,
    /// Connections that the adapter wants to be made.
    pub wanted: Vec<ConnId>,
    /// The one that asks, and the one that is asked.
    pub neighbours: [Neighbour; 2],
    pub directory: Segment,
    pub channels: Vec<Channel>,
    /// The last messages of the adapter to its peer on this host.
    pub heard: Vec<LinkMessage>,
    pub posted: u64,
    pub completed: u64,
    around: Segment,
    hidden: Segment,
}

impl World {
    pub fn new(kind: u8) -> Self {
        let crc = kind & 64 == 0;
        let config = Config {
            gid: gid(OWN),
            max_mr: 32,
            max_cqe: 64,
            max_qp_wr: 16,
            max_sge: 4,
            max_inline: 64,
            max_half_open: 4,
            copy_limit: 1024,
            offer_looks: 1,
            answer_looks: 2,
            crc: if crc { Crc::Always } else { Crc::Never },
            ..Config::default()
        };
        let mut adapter = Adapter::new(config);
        let pd = adapter.alloc_pd().unwrap();
        let cqs =
            [7, 8].map(|context| adapter.create_cq(64, Some(ChannelId(1)), context).unwrap().0);
        let carriage = match kind / 4 % 4 {
            0 => Carriage::Reliable,
            1 => Carriage::Unreliable,
            2 => Carriage::Plain,
            _ => Carriage::Extended(adapter.alloc_xrcd().unwrap()),
        };
        let srq = match carriage {
            Carriage::Extended(domain) => {
                let (srq, number) = adapter.create_xrc_srq(pd, domain, cqs[0], 16, 4).unwrap();
                assert_eq!(number, SRQ_NUMBER);
                srq
            }
            _ => adapter.create_srq(pd, 16, 4, 0).unwrap(),
        };
        let directory = Segment::heap(4096);
        adapter.publish_regions(&directory).unwrap();
        let around = Segment::heap(3 * LEN);
        around.write(0, &[PATTERN; 3 * LEN]).unwrap();
        let open = around.slice(LEN, LEN).unwrap();
        let region = adapter.reg_segment(pd, &open, None, ALL).unwrap();
        let hidden = Segment::heap(LEN);
        hidden.write(0, &[PATTERN; LEN]).unwrap();
        let secret = adapter.reg_segment(pd, &hidden, None, Access::LOCAL_WRITE).unwrap();
        let window = adapter.alloc_mw(pd, WindowType::Two).unwrap();
        let mut world = Self {
            adapter,
            now: Time(1_000_000),
            pd,
            cqs,
            srq,
            carriage,
            qps: Vec::new(),
            crc,
            region: Some(region),
            window,
            secret,
            wires: Vec::new(),
            wanted: Vec::new(),
            neighbours: [ASKING, ASKED].map(Neighbour::new),
            directory: Segment::heap(4096),
            channels: Vec::new(),
            heard: Vec::new(),
            posted: 0,
            completed: 0,
            around,
            hidden,
        };
        for index in 0..5 {
            let qp = world.create_qp(index);
            world.qps.push(qp);
        }
        // Whoever has access to memory places writes himself, and in order.
        if kind & 128 != 0 && kind % 4 != 1 {
            world.adapter.place_unordered(WriteOrder::Shuffle { seed: 5 }, 1_000_000);
        }
        world.join(kind);
        world
    }

    pub fn create_qp(&mut self, index: u8) -> QpId {
        let cap = QpCap {
            max_send_wr: 16,
            max_recv_wr: 16,
            max_send_sge: 4,
            max_recv_sge: 4,
            max_inline_data: 64,
        };
        let (pd, [send_cq, _], qp_type) = (self.pd, self.cqs, self.carriage.qp_type(index));
        let recv_cq = self.cqs[usize::from(index) % 2];
        let srq = (index == 1 && !matches!(qp_type, QpType::XrcRecv(_))).then_some(self.srq);
        let init = QpInit { pd, send_cq, recv_cq, srq, cap, qp_type, sq_sig_all: index == 3 };
        self.adapter.create_qp(&init, QpNum::new(4005, index)).unwrap().0
    }

    /// The attributes that take queue pair `index` through its states.
    pub fn attr(&self, index: usize, state: QpState) -> (QpAttr, QpAttrMask) {
        type M = QpAttrMask;
        let (dgid, dest_qp_num) = match index {
            0 => (gid(ASKED), PEER_QPN),
            1 => (gid(ASKING), PEER_QPN),
            2 => (gid(OWN), QpNum::new(4005, 3).0),
            3 => (gid(OWN), QpNum::new(4005, 2).0),
            _ => (gid(OWN), QpNum::new(4005, 4).0),
        };
        let attr = QpAttr {
            state,
            port_num: 1,
            access: ALL - Access::MW_BIND - Access::LOCAL_WRITE,
            path_mtu: 3,
            dest_qp_num,
            rq_psn: 7,
            sq_psn: 7,
            max_dest_rd_atomic: 4,
            max_rd_atomic: 4,
            min_rnr_timer: 1,
            timeout: 10,
            retry_cnt: 2,
            rnr_retry: 3,
            av: AddressVector { dgid, is_global: true, port_num: 1, ..AddressVector::default() },
            en_sqd_async_notify: true,
            ..QpAttr::default()
        };
        let mask = match state {
            QpState::Init => M::PKEY_INDEX | M::PORT | M::ACCESS_FLAGS,
            QpState::Rtr => {
                M::AV
                    | M::PATH_MTU
                    | M::DEST_QPN
                    | M::RQ_PSN
                    | M::MAX_DEST_RD_ATOMIC
                    | M::MIN_RNR_TIMER
            }
            QpState::Rts => {
                M::TIMEOUT | M::RETRY_CNT | M::RNR_RETRY | M::SQ_PSN | M::MAX_QP_RD_ATOMIC
            }
            QpState::Sqd => M::EN_SQD_ASYNC_NOTIFY,
            _ => M::empty(),
        };
        let (asking, serving) = (
            M::RETRY_CNT | M::RNR_RETRY | M::MAX_QP_RD_ATOMIC,
            M::MAX_DEST_RD_ATOMIC | M::MIN_RNR_TIMER,
        );
        let lacks = match self.carriage.qp_type(index as u8) {
            QpType::Uc => asking | serving | M::TIMEOUT,
            QpType::XrcSend => serving,
            QpType::XrcRecv(_) => asking,
            _ => M::empty(),
        };
        (attr, (mask - lacks) | M::STATE)
    }

    /// Takes the queue pairs to RTS and connects them: over streams (0), over a link with access to
    /// memory (1) or without (2), or not at all. Those of plain iWARP are given streams.
    fn join(&mut self, kind: u8) {
        let plain = matches!(self.carriage, Carriage::Plain);
        let states = [QpState::Init, QpState::Rtr, QpState::Rts];
        for index in 0..4 {
            for &state in &states[..if plain { 1 } else { 3 }] {
                let (attr, mask) = self.attr(index, state);
                self.adapter.modify_qp(self.now, self.qps[index], &attr, mask).unwrap();
            }
        }
        self.settle();
        match kind % 4 {
            _ if plain => (0..2).for_each(|index| self.adopt(index, kind)),
            0 => self.join_streams(),
            1 => self.join_links(true),
            2 => self.join_links(false),
            _ => return,
        }
        self.settle();
        // Else the rest would test little, without anybody noticing.
        let refused = |message: &LinkMessage| {
            matches!(message, LinkMessage::Reject { .. } | LinkMessage::Close { .. })
        };
        assert_eq!(self.wires.len() + self.channels.len(), 2, "both peers are connected");
        assert!(!self.heard.iter().any(refused));
        self.occupy();
    }

    /// Gives the queue pairs something that peers can answer, refuse or fill.
    fn occupy(&mut self) {
        let key = self.region.map_or(0, |region| region.key.0);
        let (whole, word) = (self.sge(0, 256, key), self.sge(256, 8, key));
        let all = self.sge(0, LEN as u32, key);
        let (addr, rkey) = (0x1000, 0x305);
        for index in 0..4 {
            let (id, now) = (self.qps[index], self.now);
            for room in [whole, all, whole] {
                let posted = match index {
                    1 => self.adapter.post_srq_recv(now, self.srq, 2, &[room]),
                    _ => self.adapter.post_recv(now, id, 2, &[room]),
                };
                self.posted += u64::from(posted.is_ok());
            }
            // The other two are each other's peers, and answer by themselves.
            let add = SendOp::FetchAdd { addr, rkey, add: 1 };
            let asked = [SendOp::Send, SendOp::Read { addr, rkey }, add];
            for op in asked.into_iter().filter(|_| index < 2) {
                let long = matches!(op, SendOp::Read { .. }) && !self.crc;
                let payload = Payload::Sges(std::slice::from_ref(if long { &all } else { &word }));
                let (to, flags) = (self.carriage.to(1), SendFlags::SIGNALED);
                let wr = SendWr { wr_id: 1, to, op, flags, payload };
                let posted = self.adapter.post_send(id, &wr);
                self.posted += u64::from(posted.is_ok());
            }
            self.adapter.ring_doorbell(now, id);
        }
        self.settle();
    }

    /// What the peer of queue pair 1 asks for.
    pub fn hello(&self, last: u8, qp: u8) -> Hello {
        Hello {
            kind: Kind::Request,
            path_mtu: 3,
            features: Features::ALL,
            dest_qpn: QpNum::new(4005, qp).0,
            source_qpn: PEER_QPN,
            rq_psn: 7,
            sq_psn: 7,
            service: match self.carriage {
                Carriage::Reliable | Carriage::Plain => Service::Rc,
                Carriage::Unreliable => Service::Uc,
                Carriage::Extended(_) => Service::XrcRequester,
            },
            source_gid: gid(last).0,
            dest_gid: gid(OWN).0,
        }
    }

    /// The first words of a peer that asks by a stream.
    pub fn request(&self) -> Vec<u8> {
        let hello = self.hello(ASKING, 1).to_bytes();
        let mut initiator = Initiator::new(self.params(), &hello).unwrap();
        let mut out = [0; MAX_FRAME_LEN];
        let len = initiator.poll_transmit(&mut out);
        out[..len].to_vec()
    }

    pub fn accepted(&mut self) -> Option<usize> {
        let peer = SocketAddr::from(([10, 0, 0, ASKING], 999));
        let conn = self.adapter.handle_accepted(self.now, peer).ok()?;
        Some(self.add_wire(conn))
    }

    /// What both ends of streams ask for.
    fn params(&self) -> Params {
        Params { crc: self.crc, ..Params::default() }
    }

    /// Connection management hands a stream to a queue pair, if that may have one: of either end, and with
    /// any ready-to-receive message or none.
    pub fn adopt(&mut self, index: usize, kind: u8) {
        let (rtrs, markers) = ([Rtr::Write, Rtr::Read, Rtr::Send], kind & 16 != 0);
        let negotiated = Negotiated {
            tx_markers: markers,
            rtr: rtrs.get(usize::from(kind % 4)).copied(),
            ord: Some(u16::from(kind & 3)),
            crc: self.crc,
            ..Negotiated::plain()
        };
        let role = if index == 0 { Role::Initiator } else { Role::Responder };
        let adoption = Adoption { role, negotiated, ird: 4, ord: 4, rfc7306: kind & 32 != 0 };
        if let Ok(conn) = self.adapter.adopt_stream(self.now, self.qps[index], &adoption) {
            self.add_wire(conn);
        }
    }

    fn join_streams(&mut self) {
        let request = self.request();
        let asking = self.accepted().unwrap();
        self.say(asking, &request);
        let Some(conn) = self.wanted.first().copied() else { return };
        self.wanted.remove(0);
        let asked = self.add_wire(conn);
        self.adapter.handle_reached_stream(self.now, conn);
        let mut frame = [0; 1024];
        let len = self.adapter.transmit(self.now, conn, &mut frame);
        let mut responder = Responder::new();
        let (_, request) = responder.handle(&frame[..len]).unwrap();
        let hello = Hello::parse(&request.expect("a request").private_data).unwrap();
        let answer = hello.answer(Kind::Accept, Features::ALL, 7, 7);
        responder.accept(self.params(), &answer.to_bytes()).unwrap();
        let len = responder.poll_transmit(&mut frame);
        let reply = frame[..len].to_vec();
        self.say(asked, &reply);
    }

    pub fn link_up(&mut self, which: usize, with_memory: bool) -> Option<LinkId> {
        let usable = (self.around.addr() + LEN, self.around.addr() + 2 * LEN);
        let memory: Arc<dyn PeerMemory> = Arc::new(PeerSpace { usable });
        let neighbour = &mut self.neighbours[which % 2];
        let link = Link {
            own: neighbour.own.clone(),
            peer: neighbour.peer.clone(),
            peer_gid: Some(gid(neighbour.last)),
            peer_memory: with_memory.then_some(memory),
            peer_directory: with_memory.then(|| self.directory.clone()),
        };
        neighbour.link = self.adapter.handle_link_up(link).ok();
        neighbour.link
    }

    fn join_links(&mut self, with_memory: bool) {
        let end = LinkEnd { bell: 3, pd: 1 };
        let config = ChannelConfig::default();
        if let Some(link) = self.link_up(0, with_memory) {
            let channel = Channel::create(&self.neighbours[0].peer, FIRST_CHANNEL, config);
            self.channels.extend(channel.ok());
            let (hello, offset) = (self.hello(ASKING, 1), FIRST_CHANNEL as u64);
            let message = LinkMessage::Request { tag: 11, hello, offset, end };
            self.adapter.handle_link_message(self.now, link, message);
            self.settle();
        }
        let (Some(link), Some(&conn)) = (self.link_up(1, with_memory), self.wanted.first()) else {
            return;
        };
        self.wanted.remove(0);
        if !self.adapter.handle_reached_link(self.now, conn, link) {
            self.adapter.handle_lost(self.now, conn, Loss::Refused);
        }
        self.settle();
        let asked = self.heard.iter().find_map(|message| match message {
            LinkMessage::Request { tag, offset, .. } => Some((*tag, *offset)),
            _ => None,
        });
        let Some((tag, offset)) = asked else { return };
        let message = LinkMessage::Accept { tag, own_tag: 12, end };
        self.adapter.handle_link_message(self.now, link, message);
        let channel = Channel::attach(&self.neighbours[1].own, offset as usize, config);
        self.channels.extend(channel.ok());
    }

    /// A poll by the quickest look, and what it leads to.
    fn glance(&mut self, cq: CqId) {
        let mut taken = 0;
        let glance = self.adapter.glance(self.now, cq, |_| taken += 1);
        assert_eq!(taken, u64::from(glance == Glance::Taken));
        self.completed += taken;
        match glance {
            Glance::Vain => {
                assert!(!self.adapter.progress(self.now), "a poll was said to be in vain");
            }
            Glance::Found(qp) => {
                self.adapter.serve(self.now, qp);
            }
            Glance::Taken | Glance::Unsure => {}
        }
    }

    /// Does what the adapter asks for, and reads what it has to say.
    pub fn settle(&mut self) {
        for cq in self.cqs {
            self.glance(cq);
        }
        for _ in 0..64 {
            self.adapter.progress(self.now);
            self.adapter.release_acks();
            let mut busy = false;
            while let Some((conn, _)) = self.adapter.next_urgency() {
                busy = true;
                self.transmit(conn);
            }
            while let Some(action) = self.adapter.poll_action() {
                busy = true;
                self.act(action);
            }
            while self.adapter.poll_event().is_some() {}
            if !busy {
                return;
            }
        }
    }

    fn act(&mut self, action: Action) {
        match action {
            Action::Connect { conn, peer, .. } if peer.ip() == IpAddr::from([10, 0, 0, OWN]) => {
                self.adapter.handle_reached_self(self.now, conn);
            }
            Action::Connect { conn, .. } => self.wanted.push(conn),
            Action::Close { conn } => {
                self.wires.retain(|wire| wire.conn != conn);
                self.wanted.retain(|&wanted| wanted != conn);
                self.adapter.handle_lost(self.now, conn, Loss::Closed);
            }
            Action::LinkSend { message, .. } => {
                let mut bytes = Vec::new();
                message.encode(&mut bytes);
                assert_eq!(LinkMessage::decode(&bytes).as_ref(), Some(&message));
                self.heard.truncate(15);
                self.heard.insert(0, message);
            }
            Action::Cut { link } => {
                self.neighbours.iter_mut().for_each(|neighbour| {
                    neighbour.link.take_if(|of| *of == link);
                });
                self.adapter.handle_link_down(self.now, link);
            }
            Action::LimitSilence { .. } | Action::RingBell { .. } => {}
        }
    }

    pub fn sge(&self, offset: u32, len: u32, key: u32) -> Sge {
        let addr = self.base().wrapping_add(u64::from(offset));
        Sge { addr, len, lkey: Key(key) }
    }

    /// All of that region.
    pub fn whole(&self, key: u32) -> Sge {
        self.sge(0, LEN as u32, key)
    }

    /// The address of the region that anybody may use.
    pub fn base(&self) -> u64 {
        (self.around.addr() + LEN) as u64
    }

    /// Where a range of that region begins in its segment, which the adapter has named by its address: it
    /// must not name any other memory.
    pub fn place(&self, addr: usize, len: usize) -> (&Segment, usize) {
        let at = addr.wrapping_sub(self.around.addr());
        let fits = (LEN..=2 * LEN).contains(&at) && at + len <= 2 * LEN;
        assert!(fits, "{len} bytes at {at} of foreign memory");
        (&self.around, at)
    }

    pub fn poll(&mut self) {
        let mut out = [Completion::default(); 16];
        for cq in self.cqs {
            while let Ok(found @ 1..) = self.adapter.poll_cq(cq, &mut out) {
                self.completed += found as u64;
                for done in out[..found].iter().filter(|done| done.status == WcStatus::Success) {
                    crate::SHARES.reach(if done.wr_id == 1 {
                        "a send done"
                    } else {
                        "a receive done"
                    });
                }
            }
        }
        assert!(self.completed <= self.posted, "more completions than requests");
    }

    /// Nothing of what happened has touched what nobody may touch.
    pub fn check(mut self) {
        self.poll();
        let untouched = |segment: &Segment, offset: usize| {
            let mut bytes = [0; LEN];
            segment.read(offset, &mut bytes).unwrap();
            bytes == [PATTERN; LEN]
        };
        assert!(untouched(&self.around, 0) && untouched(&self.around, 2 * LEN), "out of bounds");
        assert!(untouched(&self.hidden, 0), "memory without remote rights");
    }
}
