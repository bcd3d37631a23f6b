//! UDP queue pairs.

use std::net::SocketAddr;

use super::net::{Net, pattern};
use super::*;

fn post(net: &mut Net, qp: QpId, to: SocketAddr, bytes: &[u8]) -> Result<(), Fault> {
    let flags = SendFlags::SIGNALED;
    let payload = Payload::Inline(bytes);
    net.post(0, qp, &SendWr { wr_id: 5, to: To::Address(to), op: SendOp::Send, flags, payload })
}

#[test]
fn a_datagram_takes_a_receive_which_says_who_sent_it() {
    for v4 in [false, true] {
        let mut net = Net::new();
        net.v4 = v4;
        let qps = [0, 1].map(|host| net.qp(host, QpType::Udp));
        assert_eq!(net.adapter(0).udp_bind(qps[0], 700), Ok(700));
        let port = net.adapter(1).udp_bind(qps[1], 0).unwrap();
        assert_eq!(net.states(qps), [QpState::Rts; 2]);
        let sink = net.buffer(1, 2000);
        net.recv(1, qps[1], 9, &[sink.sge(0, 100), sink.sge(1000, 200)]);
        let to = net.address(1, port);
        let bytes = pattern(3, 250);
        post(&mut net, qps[0], to, &bytes).unwrap();
        assert_eq!(net.poll(0), [], "it is not sent yet");
        net.run_for(200_000);
        assert_eq!(brief(&net.poll(0)), [(5, WcStatus::Success, 250)]);
        let got = only(net.poll(1));
        assert_eq!((got.wr_id, got.byte_len, got.grh), (9, 250, false));
        let WcExtra::From(source) = got.extra else { panic!("nobody sent it") };
        assert_eq!(SocketAddr::from(source), net.address(0, 700));
        assert_eq!([sink.bytes(0, 100), sink.bytes(1000, 150)].concat(), bytes);
    }
}
