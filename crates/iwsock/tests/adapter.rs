//! An endpoint and a queue pair of plain iWARP (`quipu_iw0`) understand each other.

use quipu_iwsock::{Access, Config, Endpoint, Memory, Operation, Piece, Role, Span, Status};
use quipu_nic::iwarp::setup::Outcome;
use quipu_nic::iwarp::{Initiator, Params, Responder};
use quipu_nic::mem::{self, Segment, Sge};
use quipu_nic::{
    Adapter, Adoption, Completion, ConnId, CqId, Payload, QpCap, QpId, QpInit, QpNum, QpType,
    Region, Role as AdapterRole, SendFlags, SendOp, SendWr, Time, To, WcStatus,
};

/// Memory of the program: address 0 is its first byte.
struct Ram(Vec<u8>);

impl Memory for Ram {
    fn read(&self, address: u64, into: &mut [u8]) {
        into.copy_from_slice(&self.0[address as usize..][..into.len()]);
    }
    fn write(&mut self, address: u64, from: &[u8]) {
        self.0[address as usize..][..from.len()].copy_from_slice(from);
    }
}

/// An endpoint at one end, an adapter at the other.
struct Mixed {
    endpoint: Endpoint,
    ram: Ram,
    adapter: Adapter,
    cq: CqId,
    qp: QpId,
    conn: ConnId,
    segment: Segment,
    region: Region,
    /// Bytes on their way to the adapter.
    held: Vec<u8>,
}

const NOW: Time = Time(1_000_000);

/// What an endpoint has to send; all of it is taken.
fn said(endpoint: &mut Endpoint, ram: &Ram) -> Vec<u8> {
    endpoint.prepare(ram);
    let mut bytes = Vec::new();
    for piece in endpoint.outgoing().0 {
        match piece {
            Piece::Bytes(some) => bytes.extend_from_slice(some),
            Piece::Memory(span) => {
                let begin = bytes.len();
                bytes.resize(begin + span.len, 0);
                ram.read(span.address, &mut bytes[begin..]);
            }
        }
    }
    endpoint.sent(bytes.len());
    bytes
}

fn hear(endpoint: &mut Endpoint, ram: &mut Ram, mut bytes: &[u8]) {
    while !bytes.is_empty() {
        let space = endpoint.space();
        let len = space.len().min(bytes.len());
        space[..len].copy_from_slice(&bytes[..len]);
        endpoint.received(ram, len);
        bytes = &bytes[len..];
    }
}

impl Mixed {
    fn new(role: Role, crc: bool) -> Self {
        let mut ram = Ram(vec![0; 1 << 20]);
        let config = Config { role, crc, names_payload: true, first_stag: 900 };
        let mut endpoint = Endpoint::new(config);
        let mut frame = [0; 1024];
        let params = Params { crc: false, ..Params::peer_to_peer(4, 4) };
        let (own, negotiated) = if role == Role::Initiator {
            let mut responder = Responder::new();
            let request = said(&mut endpoint, &ram);
            responder.handle(&request).unwrap();
            let negotiated = responder.accept(params, b"private data").unwrap();
            let len = responder.poll_transmit(&mut frame);
            hear(&mut endpoint, &mut ram, &frame[..len]);
            (AdapterRole::Responder, negotiated)
        } else {
            let mut initiator = Initiator::new(params, b"private data").unwrap();
            let len = initiator.poll_transmit(&mut frame);
            hear(&mut endpoint, &mut ram, &frame[..len]);
            let reply = said(&mut endpoint, &ram);
            let (_, outcome) = initiator.handle(&reply).unwrap();
            let Some(Outcome::Established(negotiated)) = outcome else { panic!("{outcome:?}") };
            (AdapterRole::Initiator, negotiated)
        };
        assert_eq!(endpoint.is_open(), Ok(true));
        assert_eq!(negotiated.crc, crc, "CRCs are on if either end asks");

        let mut adapter = Adapter::new(quipu_nic::Config::default());
        let pd = adapter.alloc_pd().unwrap();
        let (cq, _) = adapter.create_cq(64, None, 0).unwrap();
        let cap = QpCap {
            max_send_wr: 16,
            max_recv_wr: 16,
            max_send_sge: 2,
            max_recv_sge: 2,
            max_inline_data: 0,
        };
        let qp_type = QpType::Iwarp;
        let init =
            QpInit { pd, send_cq: cq, recv_cq: cq, srq: None, cap, qp_type, sq_sig_all: true };
        let (qp, _) = adapter.create_qp(&init, QpNum::new(4000, 1)).unwrap();
        let segment = Segment::heap(1 << 20);
        let access =
            mem::Access::LOCAL_WRITE | mem::Access::REMOTE_WRITE | mem::Access::REMOTE_READ;
        let region = adapter.reg_segment(pd, &segment, None, access).unwrap();
        let adoption = Adoption { role: own, negotiated, ird: 4, ord: 4, rfc7306: false };
        let conn = adapter.adopt_stream(NOW, qp, &adoption).unwrap();
        let held = Vec::new();
        let mut mixed = Self { endpoint, ram, adapter, cq, qp, conn, segment, region, held };
        mixed.run();
        mixed
    }

    fn run(&mut self) {
        let mut out = vec![0; 1 << 18];
        loop {
            let bytes = said(&mut self.endpoint, &self.ram);
            self.held.extend_from_slice(&bytes);
            let used = self.adapter.handle_stream(NOW, self.conn, &self.held);
            self.held.drain(..used);
            let len = self.adapter.transmit(NOW, self.conn, &mut out);
            hear(&mut self.endpoint, &mut self.ram, &out[..len]);
            if bytes.is_empty() && len == 0 {
                return;
            }
        }
    }

    fn sge(&self, offset: u64, len: u32) -> Sge {
        Sge { addr: self.segment.addr() as u64 + offset, len, lkey: self.region.key }
    }

    fn send(&mut self, wr_id: u64, op: SendOp, sge: Sge) {
        let sges = [sge];
        let payload = Payload::Sges(&sges);
        let wr = SendWr { wr_id, to: To::Peer, op, flags: SendFlags::SIGNALED, payload };
        self.adapter.post_send(self.qp, &wr).unwrap();
    }

    fn polled(&mut self) -> Vec<(u64, WcStatus)> {
        let mut out = [Completion::default(); 64];
        let count = self.adapter.poll_cq(self.cq, &mut out).unwrap();
        out[..count].iter().map(|completion| (completion.wr_id, completion.status)).collect()
    }

    fn done(&mut self) -> Vec<(u64, Status)> {
        let endpoint = &mut self.endpoint;
        std::iter::from_fn(|| endpoint.poll_send().or_else(|| endpoint.poll_receive()))
            .map(|completion| (completion.id, completion.status))
            .collect()
    }
}

#[test]
fn an_endpoint_and_a_queue_pair_exchange_messages_writes_and_reads() {
    for (role, crc) in [(Role::Initiator, true), (Role::Responder, true), (Role::Responder, false)]
    {
        let mut mixed = Mixed::new(role, crc);
        let pattern: Vec<u8> = (0..100_000_u32).map(|at| ((at * 13) >> 4) as u8).collect();
        mixed.ram.0[..100_000].copy_from_slice(&pattern);
        let (ok, good) = (Status::Success, WcStatus::Success);
        let remote = mixed.segment.addr() as u64;
        let here = Span { address: 0, len: 100_000 };

        // The endpoint sends, writes and reads.
        let sge = mixed.sge(0, 100_000);
        mixed.adapter.post_recv(NOW, mixed.qp, 5, &[sge]).unwrap();
        let stag = mixed.region.key.0;
        let sink = Span { address: 200_000, len: 100_000 };
        mixed.endpoint.register(sink, Access::default()).unwrap();
        mixed.endpoint.post(1, Operation::Send, &[here]).unwrap();
        let to = remote + 300_000;
        mixed.endpoint.post(2, Operation::Write { stag, to }, &[here]).unwrap();
        mixed.endpoint.post(3, Operation::Read { stag, to }, &[sink]).unwrap();
        mixed.run();
        assert_eq!(mixed.done(), [(1, ok), (2, ok), (3, ok)]);
        assert_eq!(mixed.polled(), [(5, good)]);
        let mut there = vec![0; 100_000];
        mixed.segment.read(0, &mut there).unwrap();
        assert!(there == pattern && mixed.ram.0[200_000..300_000] == pattern);

        // The queue pair does.
        let both = Access { read: true, write: true };
        let place = Span { address: 400_000, len: 200_000 };
        let rkey = mixed.endpoint.register(place, both).unwrap();
        let into = [Span { address: 700_000, len: 60_000 }, Span { address: 800_000, len: 60_000 }];
        mixed.endpoint.post_receive(&mut mixed.ram, 6, &into).unwrap();
        let (from, back) = (mixed.sge(0, 100_000), mixed.sge(600_000, 100_000));
        mixed.send(10, SendOp::Write { addr: 400_007, rkey }, from);
        mixed.send(11, SendOp::Send, from);
        mixed.send(12, SendOp::Read { addr: 400_007, rkey }, back);
        mixed.run();
        assert_eq!(mixed.polled(), [(10, good), (11, good), (12, good)]);
        assert_eq!(mixed.done(), [(6, ok)]);
        mixed.segment.read(600_000, &mut there).unwrap();
        assert!(there == pattern && mixed.ram.0[400_007..500_007] == pattern);
        assert!(mixed.ram.0[700_000..760_000] == pattern[..60_000]);
        assert!(mixed.ram.0[800_000..840_000] == pattern[60_000..]);

        // A read beyond the region is refused, and both ends hear of it.
        mixed.send(13, SendOp::Read { addr: 599_999, rkey }, mixed.sge(0, 2));
        mixed.run();
        assert!(matches!(mixed.polled()[..], [(13, WcStatus::RemAccessErr)]));
        assert!(mixed.endpoint.is_open().is_err());
    }
}
