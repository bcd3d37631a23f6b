//! What a probe hears: the stages of QPIP's tables 2 and 3.

use quipu_nic::inet::stack::{self, Frame};
use quipu_nic::inet::tcp::Secret;
use quipu_nic::mem::{Access, Segment, Sge};

use super::net::v6;
use super::*;

#[derive(Default)]
struct Recorder(Vec<Stage>);

impl Probe for Recorder {
    fn stage(&mut self, stage: Stage, _: usize) {
        self.0.push(stage);
    }
}

struct End {
    adapter: Adapter<Recorder>,
    cq: CqId,
    qp: QpId,
    sge: Sge,
}

impl End {
    fn new(n: usize) -> Self {
        let mut adapter = Adapter::with_probe(Config::default(), Recorder::default());
        adapter.attach_inet(stack::Config::new(v6(n), 64, Secret([3, n as u64]))).unwrap();
        let pd = adapter.alloc_pd().unwrap();
        let (cq, _) = adapter.create_cq(16, None, 0).unwrap();
        let init = QpInit {
            pd,
            send_cq: cq,
            recv_cq: cq,
            srq: None,
            cap: QpCap {
                max_send_wr: 4,
                max_recv_wr: 4,
                max_send_sge: 1,
                max_recv_sge: 1,
                max_inline_data: 0,
            },
            qp_type: QpType::Tcp,
            sq_sig_all: true,
        };
        let (qp, _) = adapter.create_qp(&init, QpNum::new(4000, n as u8)).unwrap();
        let attr = QpAttr { state: QpState::Init, ..QpAttr::default() };
        adapter.modify_qp(Time(1), qp, &attr, QpAttrMask::STATE).unwrap();
        let memory = Segment::heap(100);
        let region = adapter.reg_segment(pd, &memory, None, Access::LOCAL_WRITE).unwrap();
        let sge = Sge { addr: memory.addr() as u64, len: 100, lkey: region.key };
        Self { adapter, cq, qp, sge }
    }

    /// What was heard since the last call.
    fn heard(&mut self) -> Vec<Stage> {
        std::mem::take(&mut self.adapter.probe_mut().0)
    }

    fn transmit(&mut self, now: u64) -> Option<Vec<u8>> {
        let mut out = vec![0; 2000];
        let frame = self.adapter.transmit_frame(Time(now), &mut out)?;
        out.truncate(frame.len);
        Some(out)
    }

    fn take(&mut self, now: u64, bytes: &[u8]) {
        self.adapter.handle_frame(Time(now), &Frame { bytes, checked: false });
    }
}

#[test]
fn every_stage_is_heard_in_its_turn() {
    use Stage::*;
    let [mut here, mut there] = [0, 1].map(End::new);
    let settings = TcpSettings::default();
    let (listener, port) = there.adapter.tcp_listen(0, &settings, 1).unwrap();
    there.adapter.tcp_offer(Time(1), listener, there.qp).unwrap();
    let to = std::net::SocketAddr::new(v6(1), port);
    there.adapter.post_recv(Time(1), there.qp, 1, &[there.sge]).unwrap();
    here.adapter.tcp_connect(Time(1), here.qp, to, None, &settings).unwrap();
    let mut now = 1;
    for _ in 0..4 {
        now += 1000;
        while let Some(frame) = here.transmit(now) {
            there.take(now, &frame);
        }
        while let Some(frame) = there.transmit(now) {
            here.take(now, &frame);
        }
    }
    assert_eq!(here.adapter.query_qp(here.qp).unwrap().attr.state, QpState::Rts);
    here.heard();
    there.heard();

    let wr = SendWr {
        wr_id: 1,
        to: To::Peer,
        op: SendOp::Send,
        flags: SendFlags::empty(),
        payload: Payload::Sges(&[here.sge]),
    };
    here.adapter.post_send(here.qp, &wr).unwrap();
    here.adapter.ring_doorbell(Time(now), here.qp);
    assert_eq!(here.heard(), [Doorbell]);
    let frame = here.transmit(now).unwrap();
    assert_eq!(here.heard(), [Schedule, Headers, GetWr, GetData, Send, Update], "table 2, data");
    there.take(now, &frame);
    assert_eq!(there.heard(), [Media, Parse, GetWr, PutData, Update, Update], "table 3, data");
    let mut out = [Completion::default(); 4];
    assert_eq!(there.adapter.poll_cq(there.cq, &mut out), Ok(1));
    let ack = there.transmit(now).unwrap();
    assert_eq!(there.heard(), [Schedule, Headers, Send, Update], "table 2, an acknowledgement");
    here.take(now, &ack);
    assert_eq!(here.heard(), [Media, Parse, Update], "table 3, an acknowledgement");
    assert_eq!(here.adapter.poll_cq(here.cq, &mut out), Ok(1));
}
