//! Plain iWARP over the adapter's own TCP.

use quipu_nic::inet::stack::TcpId;
use quipu_nic::inet::tcp;
use quipu_nic::iwarp::setup::Outcome;
use quipu_nic::iwarp::{Initiator, Negotiated, Params, Responder};
use quipu_nic::mem::Sge;
use quipu_nic::*;
use quipu_wire::tcp::Repr;

use super::net::{Net, SECOND, STORM, Weather, pattern};

/// What start-up asks for.
const PARAMS: fn() -> Params = || Params::peer_to_peer(4, 4);

fn settings() -> TcpSettings {
    TcpSettings { connect_timeout_ns: 20 * SECOND, ..TcpSettings::default() }
}

/// A stream that stands, from host 0 to host 1.
pub fn stream(net: &mut Net) -> [TcpId; 2] {
    let (listener, port) = net.adapter(1).stream_listen(0, &settings(), 16).unwrap();
    let (now, any, to) = (net.now(), "[::]:0".parse().unwrap(), net.address(1, port));
    let near = net.adapter(0).stream_connect(now, any, to, &settings()).unwrap();
    let mut far = None;
    net.run_while(5 * SECOND, |net| {
        far = far.or(net.host(1).events.iter().find_map(|event| match event {
            Event::TcpRequest { connection, flow: Some(_), .. } => Some(*connection),
            _ => None,
        }));
        far.is_none()
    });
    let far = far.expect("it has come");
    let now = net.now();
    net.adapter(1).stream_accept(now, far).unwrap();
    let stands = Event::TcpStream { connection: near, change: TcpStreamChange::Connected };
    net.run_while(5 * SECOND, |net| !net.host(0).events.contains(&stands));
    net.adapter(1).tcp_unlisten(listener);
    for host in 0..2 {
        net.host(host).events.clear();
    }
    [near, far]
}

/// What has come on a stream until `done`.
fn hear<T>(
    net: &mut Net,
    host: usize,
    stream: TcpId,
    mut done: impl FnMut(&[u8]) -> (usize, Option<T>),
) -> (Vec<u8>, T) {
    let (mut heard, mut outcome) = (Vec::new(), None);
    net.run_while(20 * SECOND, |net| {
        let now = net.now();
        heard.extend(net.adapter(host).stream_receive(now, stream));
        let (used, end) = done(&heard);
        heard.drain(..used);
        outcome = end;
        outcome.is_none()
    });
    (heard, outcome.expect("start-up ends"))
}

/// Goes through start-up, and gives the stream to two queue pairs.
pub fn adopt(net: &mut Net, streams: [TcpId; 2], params: [Params; 2]) -> [QpId; 2] {
    let qps = [0, 1].map(|host| net.host(host).qp_with(|init| init.qp_type = QpType::Iwarp));
    let mut initiator = Initiator::new(params[0], b"").unwrap();
    let mut responder = Responder::new();
    let mut frame = [0; 600];
    let len = initiator.poll_transmit(&mut frame);
    let now = net.now();
    net.adapter(0).stream_send(now, streams[0], &frame[..len]).unwrap();
    let (left, _) = hear(net, 1, streams[1], |bytes| responder.handle(bytes).unwrap());
    assert!(left.is_empty());
    let there = responder.accept(params[1], b"").unwrap();
    let len = responder.poll_transmit(&mut frame);
    let now = net.now();
    net.adapter(1).stream_send(now, streams[1], &frame[..len]).unwrap();
    give(net, 1, qps[1], streams[1], &there, &[]);
    let (rest, outcome) = hear(net, 0, streams[0], |bytes| initiator.handle(bytes).unwrap());
    let Outcome::Established(here) = outcome else { panic!("{outcome:?}") };
    give(net, 0, qps[0], streams[0], &here, &rest);
    qps
}

fn give(net: &mut Net, host: usize, qp: QpId, stream: TcpId, negotiated: &Negotiated, rest: &[u8]) {
    let role = [Role::Initiator, Role::Responder][host];
    let negotiated = negotiated.clone();
    let adoption = Adoption { role, negotiated, ird: 4, ord: 4, rfc7306: false };
    let now = net.now();
    net.adapter(host).adopt_tcp_stream(now, qp, &adoption, stream, rest).unwrap();
}

/// Two queue pairs of plain iWARP that are connected.
pub fn connected(net: &mut Net) -> [QpId; 2] {
    let streams = stream(net);
    adopt(net, streams, [PARAMS(); 2])
}

pub fn request(net: &mut Net, host: usize, qp: QpId, wr_id: u64, op: SendOp, sges: &[Sge]) {
    let flags = SendFlags::SIGNALED;
    let wr = SendWr { wr_id, to: To::Peer, op, flags, payload: Payload::Sges(sges) };
    net.post(host, qp, &wr).unwrap();
}

/// Runs until a host has as many completions; those.
pub fn complete(net: &mut Net, host: usize, count: usize) -> Vec<Completion> {
    let mut done = net.poll(host);
    net.run_while(60 * SECOND, |net| {
        done.extend(net.poll(host));
        done.len() < count
    });
    assert_eq!(done.len(), count, "{done:?}");
    assert!(done.iter().all(|it| it.status == WcStatus::Success), "{done:?}");
    done
}

/// Sends, writes and reads of every size, each after the other.
fn exchange(net: &mut Net, qps: [QpId; 2], lens: &[usize]) {
    let most = lens.iter().copied().max().unwrap();
    let (here, there) = (net.buffer(0, most), net.buffer(1, most));
    for (n, &len) in lens.iter().enumerate() {
        let bytes = pattern(n as u64, len);
        here.fill(0, &bytes);
        net.recv(1, qps[1], n as u64, &[there.sge(0, most)]);
        request(net, 0, qps[0], 7, SendOp::Send, &[here.sge(0, len)]);
        assert_eq!(complete(net, 1, 1)[0].byte_len, len as u32);
        complete(net, 0, 1);
        assert!(there.bytes(0, len) == bytes, "{len}");

        let (addr, rkey) = (there.addr(), there.key());
        there.fill(0, &vec![0; len]);
        request(net, 0, qps[0], 8, SendOp::Write { addr, rkey }, &[here.sge(0, len)]);
        complete(net, 0, 1);
        here.fill(0, &vec![0; len]);
        request(net, 0, qps[0], 9, SendOp::Read { addr, rkey }, &[here.sge(0, len)]);
        complete(net, 0, 1);
        assert!(there.bytes(0, len) == bytes, "{len}: a read follows a write");
        assert!(here.bytes(0, len) == bytes, "{len}");
    }
}

/// The TCP payloads that a host has sent, and where in the sequence space they begin.
pub fn payloads(net: &Net, host: usize) -> Vec<(u32, Vec<u8>)> {
    let frames = net.sent[host].iter().filter(|frame| frame[0] >> 4 == 6 && frame[6] == 6);
    let segment = |frame: &Vec<u8>| {
        let (header, at) = Repr::parse(&frame[40..]).unwrap();
        (header.seq.0, frame[40 + at..].to_vec())
    };
    frames.map(segment).filter(|(_, payload)| !payload.is_empty()).collect()
}

#[test]
fn messages_of_every_size_arrive_whole() {
    for v4 in [false, true] {
        let mut net = Net::new();
        net.v4 = v4;
        let qps = connected(&mut net);
        exchange(&mut net, qps, &[0, 1, 5, 1000, 1400, 1500, 64_000, 65_536, 300_000]);
    }
}

/// The traffic classes of the segments of TCP that a host has sent since `from`, without the bits of ECN.
fn classes(net: &Net, host: usize, from: usize) -> Vec<u8> {
    let frames = net.sent[host][from..].iter().filter(|frame| frame[0] >> 4 == 6 && frame[6] == 6);
    let mut classes: Vec<_> = frames.map(|it| (it[0] << 4 | it[1] >> 4) & !3).collect();
    classes.sort_unstable();
    classes.dedup();
    classes
}

#[test]
fn packets_carry_the_service_level_of_their_queue_pair() {
    let mut net = Net::new();
    net.keep = true;
    let qps = connected(&mut net);
    exchange(&mut net, qps, &[5000]);
    assert_eq!([0, 1].map(|host| classes(&net, host, 0)), [[0], [0]]);
    let before = net.sent[0].len();
    net.adapter(0).set_service_level(qps[0], 4, 0).unwrap();
    exchange(&mut net, qps, &[5000]);
    assert_eq!((classes(&net, 0, before), classes(&net, 1, 0)), (vec![0x80], vec![0]));
}

#[test]
fn loss_delay_and_damage_change_nothing() {
    for seed in 1..6 {
        let mut net = Net::with(seed, |_| {});
        let qps = connected(&mut net);
        net.weather = STORM;
        exchange(&mut net, qps, &[1, 3000, 100_000, 400_000]);
    }
}

#[test]
fn small_and_large_links() {
    for mtu in [1280, 9000, 16_000] {
        let mut net = Net::with(1, |config| config.mtu = mtu);
        net.weather = Weather { loss: 10, ..Weather::default() };
        let qps = connected(&mut net);
        exchange(&mut net, qps, &[1, 1100, 100_000]);
    }
}

/// RFC 5044 5: an FPDU begins each segment, and one ends it.
#[test]
fn each_segment_begins_and_ends_with_an_fpdu() {
    for loss in [0, 50] {
        let mut net = Net::new();
        let qps = connected(&mut net);
        net.run_for(SECOND);
        (net.keep, net.weather.loss) = (true, loss);
        exchange(&mut net, qps, &[1, 200, 1000, 1400, 50_000]);
        let segments = payloads(&net, 0);
        assert!(segments.len() > 30);
        for (_, bytes) in segments {
            let mut at = 0;
            while at < bytes.len() {
                let len = usize::from(u16::from_be_bytes([bytes[at], bytes[at + 1]]));
                at += (2 + len + 4).next_multiple_of(4);
            }
            assert_eq!(at, bytes.len(), "it ends with an FPDU");
        }
    }
}

/// More is posted than the window of the peer takes.
#[test]
fn a_stream_waits_for_acknowledgements() {
    let mut net = Net::new();
    let qps = connected(&mut net);
    const LEN: usize = 3 << 20;
    let (here, there) = (net.buffer(0, LEN), net.buffer(1, LEN));
    let bytes = pattern(3, LEN);
    here.fill(0, &bytes);
    let (addr, rkey) = (there.addr(), there.key());
    request(&mut net, 0, qps[0], 1, SendOp::Write { addr, rkey }, &[here.sge(0, LEN)]);
    assert!(net.poll(0).is_empty(), "not all of it is TCP's at once");
    request(&mut net, 0, qps[0], 2, SendOp::Read { addr, rkey }, &[here.sge(0, 1)]);
    complete(&mut net, 0, 2);
    assert!(there.bytes(0, LEN) == bytes);
}

/// More small messages wait than TCP lets programs of QPIP have, while nothing gets through.
#[test]
fn many_small_messages_may_wait() {
    let mut net = Net::new();
    let qps = connected(&mut net);
    let (here, there) = (net.buffer(0, 64), net.buffer(1, 64));
    let (addr, rkey) = (there.addr(), there.key());
    net.filter = Some(Box::new(|to, _| to == 0));
    for n in 0..6000u64 {
        here.fill(0, &n.to_be_bytes());
        request(&mut net, 0, qps[0], n, SendOp::Write { addr, rkey }, &[here.sge(0, 8)]);
        // Each is TCP's alone.
        net.run_for(1000);
        net.poll(0);
    }
    net.filter = None;
    request(&mut net, 0, qps[0], 7, SendOp::Read { addr, rkey }, &[here.sge(8, 8)]);
    complete(&mut net, 0, 1);
    assert_eq!(here.bytes(8, 8), 5999u64.to_be_bytes());
}

/// Who is not known yet has little room, whatever it sends.
#[test]
fn a_stream_that_starts_up_keeps_little() {
    let mut net = Net::new();
    let streams = stream(&mut net);
    let now = net.now();
    net.adapter(0).stream_send(now, streams[0], &[7; 100_000]).unwrap();
    net.run_for(SECOND);
    let now = net.now();
    let heard = net.adapter(1).stream_receive(now, streams[1]).len();
    assert!((1..=5000).contains(&heard), "{heard}");
}

/// What was sent before the end arrives before it, also what was lost on its way.
#[test]
fn the_end_of_a_stream_is_the_end_of_both_queue_pairs() {
    for loss in [0, 100] {
        let mut net = Net::new();
        let qps = connected(&mut net);
        net.weather.loss = loss;
        let (here, there) = (net.buffer(0, 100_000), net.buffer(1, 100_000));
        net.recv(1, qps[1], 5, &[there.sge(0, 100_000)]);
        net.recv(1, qps[1], 6, &[there.sge(0, 100_000)]);
        request(&mut net, 0, qps[0], 1, SendOp::Send, &[here.sge(0, 100_000)]);
        complete(&mut net, 0, 1);
        net.to(0, qps[0], QpState::Err).unwrap();
        net.run_for(30 * SECOND);
        let statuses: Vec<_> = net.poll(1).iter().map(|it| (it.wr_id, it.status)).collect();
        assert_eq!(statuses, [(5, WcStatus::Success), (6, WcStatus::WrFlushErr)]);
        assert_eq!(net.state(1, qps[1]), QpState::Err);
        for host in 0..2 {
            let ended =
                net.host(host).events.iter().any(|event| {
                    matches!(event, Event::Stream { change: StreamChange::Ended, .. })
                });
            assert!(ended, "{host}");
        }
        net.run_for(120 * SECOND);
        assert_eq!([0, 1].map(|host| net.adapter(host).inet().unwrap().connections()), [0; 2]);
    }
}

/// A peer that takes nothing and ends nothing costs a bounded time.
#[test]
fn a_peer_that_never_closes_is_reset() {
    let mut net = Net::new();
    let streams = stream(&mut net);
    let now = net.now();
    net.adapter(0).stream_send(now, streams[0], b"early").unwrap();
    net.adapter(0).stream_close(now, streams[0], false);
    net.run_for(SECOND);
    let now = net.now();
    assert_eq!(net.adapter(1).stream_receive(now, streams[1]), b"early");
    let lost = Event::TcpStream { connection: streams[1], change: TcpStreamChange::Lost(None) };
    assert!(net.host(1).events.contains(&lost));
    net.run_for(20 * SECOND);
    assert_eq!(net.adapter(0).inet().unwrap().connections(), 0);
    let now = net.now();
    net.adapter(1).stream_close(now, streams[1], false);
    net.run_for(SECOND);
    assert_eq!([0, 1].map(|host| net.adapter(host).inet().unwrap().connections()), [0; 2]);
}

#[test]
fn a_stream_to_a_port_without_a_listener_is_lost() {
    let mut net = Net::new();
    let (now, any, to) = (net.now(), "[::]:0".parse().unwrap(), net.address(1, 9));
    let connection = net.adapter(0).stream_connect(now, any, to, &settings()).unwrap();
    net.run_for(SECOND);
    let change = TcpStreamChange::Lost(Some(tcp::Failure::Refused));
    assert!(net.host(0).events.contains(&Event::TcpStream { connection, change }));
    let now = net.now();
    assert_eq!(net.adapter(0).stream_send(now, connection, b"?"), Err(Fault::NoSuchObject));
}

#[test]
fn the_end_of_the_link_ends_all_streams() {
    let mut net = Net::new();
    let qps = connected(&mut net);
    let streams = stream(&mut net);
    let now = net.now();
    net.adapter(0).lose_link(now);
    assert_eq!(net.state(0, qps[0]), QpState::Err);
    net.run_for(0);
    let change = TcpStreamChange::Lost(Some(tcp::Failure::Unreachable));
    assert!(net.host(0).events.contains(&Event::TcpStream { connection: streams[0], change }));
}
