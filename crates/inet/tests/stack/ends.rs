//! Ends of connections: what is left of them, and for how long.

use quipu_inet::stack::{Frame, ListenerId, TcpId};
use quipu_inet::tcp::{self, Failure, Mode, SECOND, State};
use quipu_wire::tcp::{Flags, Repr, SeqNumber};

use crate::hostile::{answers, counted, ip, syn};
use crate::net::{Net, V6};
use crate::packets::Packet;
use crate::streams::stream;

/// A peer of host 1 whose segments are written by hand.
struct Peer {
    port: u16,
    /// What host 1 says next.
    ack: SeqNumber,
}

impl Peer {
    /// A connection that stands; its number is 101.
    fn connect(net: &mut Net, port: u16) -> (Self, TcpId) {
        let mut peer = Self { port, ack: SeqNumber(0) };
        peer.ack = peer.says(net, Flags::SYN, 100, &[])[0].seq + 1;
        peer.says(net, Flags::ACK, 101, &[]);
        net.hosts[1].poll_events();
        answers(net);
        (peer, *net.hosts[1].accepted.last().expect("it was accepted"))
    }

    /// What host 1 answers to a segment. Nobody takes what it brings.
    fn says(&self, net: &mut Net, flags: Flags, seq: u32, payload: &[u8]) -> Vec<Repr> {
        let segment = Repr { flags, ack: self.ack, ..syn(self.port, seq) };
        let bytes = Packet::new(ip(V6[0]), ip(V6[1])).segment(&segment, payload);
        net.hosts[1].stack.handle_frame(net.now, &Frame { bytes: &bytes, checked: false });
        answers(net)
    }

    /// Both close, host 1 first.
    fn close(&mut self, net: &mut Net, id: TcpId, seq: u32) {
        net.hosts[1].stack.close(id);
        assert_eq!(answers(net).len(), 1, "its FIN");
        self.ack += 1;
        self.says(net, Flags::FIN | Flags::ACK, seq, &[]);
        let state = net.hosts[1].stack.connection(id).map(|it| it.state());
        assert_eq!(state, Some(State::TimeWait));
    }
}

/// `specs/qpip.md`: what is acknowledged waits for its receives, also where the peer's next connection, or
/// somebody's forged SYN, ends TIME-WAIT before its time.
#[test]
fn messages_outlive_a_connection_in_time_wait_that_gives_way() {
    let mut net = Net::new(V6, 1_500, tcp::Config { mode: Mode::Message, ..stream() }, 1);
    net.listen(1, 80, 2);
    let (mut peer, server) = Peer::connect(&mut net, 5_000);
    let message = Flags::ACK | Flags::PSH;
    peer.says(&mut net, message, 201, &[2; 100]);
    let answer = peer.says(&mut net, message, 101, &[1; 100]);
    assert_eq!(answer[0].ack, SeqNumber(301), "both are acknowledged");
    peer.close(&mut net, server, 301);
    let answer = peer.says(&mut net, Flags::SYN, 9_000, &[]);
    assert_eq!((answer[0].flags, counted(&net).tcp_reused), (Flags::SYN | Flags::ACK, 1));
    net.hosts[1].poll_events();
    assert!(net.hosts[1].knows(server, tcp::Event::Closed));
    let held = net.hosts[1].stack.poll_held(server).expect("it was acknowledged");
    assert_eq!((held.offset, &held.payload[..], held.end_of_message), (100, &[2; 100][..], true));
}

/// A peer may keep one connection in TIME-WAIT for ever (RFC 9293 3.10.7.4: its FIN restarts the timer).
/// Those that end after it leave nothing behind.
#[test]
fn connections_that_are_gone_take_no_memory_behind_one_that_stays() {
    let mut net = Net::new(V6, 1_500, stream(), 1);
    let listener = net.listen(1, 80, 2);
    let end = |net: &mut Net, port: u16| {
        net.hosts[1].stack.set_idle(listener, 1);
        let (mut peer, id) = Peer::connect(net, port);
        peer.close(net, id, 101);
        net.hosts[1].stack.release(id);
        assert!(answers(net).is_empty());
        peer
    };
    end(&mut net, 5_000);
    let come_and_go = |net: &mut Net, count: u16| {
        for n in 0..count {
            let peer = end(net, 6_000 + n);
            // RFC 1337 is about old segments; whoever knows the number may end it.
            peer.says(net, Flags::RST, 102, &[]);
        }
        net.hosts[1].stack.memory()
    };
    let before = come_and_go(&mut net, 100);
    assert_eq!(come_and_go(&mut net, 2_000), before);
}

/// RFC 9293 3.10.7.2: a segment that acknowledges something is no peer's that is kept waiting. Its
/// connection is gone here, and it should not go on for its whole patience.
#[test]
fn who_has_a_connection_that_is_gone_is_reset_though_nobody_is_there() {
    let mut net = Net::new(V6, 1_500, stream(), 1);
    net.listen(1, 80, 0);
    let peer = Peer { port: 5_000, ack: SeqNumber(77) };
    let answer = peer.says(&mut net, Flags::ACK | Flags::PSH, 100, b"hello");
    assert_eq!((answer.len(), counted(&net).tcp_resets), (1, 1));
    assert_eq!((answer[0].flags, answer[0].seq), (Flags::RST, SeqNumber(77)));
}

/// `specs/qpip.md`: a connection waits for the station of its next hop. So does the reset of one that its
/// user has forgotten, or a peer that only listens would never know.
#[test]
fn a_reset_waits_for_the_next_hop() {
    let mut net = Net::ethernet(V6, stream(), 1);
    let [client, server] = net.pair();
    net.run(60 * SECOND);
    // The neighbour falls silent, and is forgotten.
    net.faults.lose = 1_000;
    let (socket, _) = net.hosts[0].stack.bind(0).unwrap();
    let next_hop = net.hosts[1].address;
    net.send_datagram(0, socket, (next_hop, 9).into(), b"hello").unwrap();
    let lost = quipu_inet::stack::Event::Neighbour { next_hop, found: false };
    assert!(net.run_until(60 * SECOND, |net| net.hosts[0].notices.contains(&lost)));
    net.faults.lose = 0;
    net.hosts[0].stack.abort(client);
    net.hosts[0].stack.release(client);
    let reset = tcp::Event::Failed(Failure::Reset);
    assert!(net.run_until(SECOND, |net| net.hosts[1].knows(server, reset)));
    let new = net.connect(0, 81);
    assert_eq!(new.index(), client.index(), "nothing is left of it");
}

/// Connections that came to a listener which is gone do not count at the one in its place.
#[test]
fn a_listener_counts_its_own() {
    let mut net = Net::new(V6, 1_500, stream(), 1);
    let half_open = |net: &mut Net, listener: ListenerId, port| {
        let peer = Peer { port, ack: SeqNumber(0) };
        peer.says(net, Flags::SYN, 100, &[]);
        net.hosts[1].poll_events();
        (peer, net.hosts[1].stack.half_open(listener))
    };
    let old = net.listen(1, 80, 4);
    let (peer, count) = half_open(&mut net, old, 5_000);
    assert_eq!(count, 1);
    net.hosts[1].stack.unlisten(old);
    let new = net.listen(1, 80, 4);
    assert_eq!(half_open(&mut net, new, 6_000).1, 1);
    peer.says(&mut net, Flags::RST, 101, &[]);
    assert_eq!(net.hosts[1].stack.half_open(new), 1);
}
