//! Datagrams over a network that loses, doubles and reorders them.

use crate::pair::{Pair, QKEY, Way};
use quipu_iwarp::wire::datagram;
use quipu_nic::*;

/// Bytes before the payload of each message.
const GRH: usize = 40;

/// A generator of numbers that look drawn (Knuth's constants).
struct Dice(u64);

impl Dice {
    fn below(&mut self, bound: usize) -> usize {
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % bound
    }
}

/// Bytes between two receives, of which the first `ROOM` are named by one.
const STRIDE: usize = 256;
const ROOM: usize = GRH + 150;

/// The message number `id` to queue pair `to` of host 1: its length and bytes follow from both.
fn message(id: u32, to: usize) -> Vec<u8> {
    let mut bytes = id.to_be_bytes().to_vec();
    bytes.extend((0..id as usize * 7 % 140).map(|i| (i * 3 + to) as u8));
    bytes
}

/// What a network loses, doubles and reorders arrives unaltered, where it was sent, and no more often than
/// the network delivered it.
#[test]
fn a_bad_network_alters_nothing() {
    for seed in 1..40 {
        let mut dice = Dice(seed);
        let mut pair = Pair::new(Way::Stream(usize::MAX));
        pair.hold = true;
        let senders: Vec<QpId> = (0..3).map(|_| pair.datagram_qp(0)).collect();
        let receivers: Vec<QpId> = (0..4).map(|_| pair.datagram_qp(1)).collect();
        let there = pair.buffer(1, 64 * STRIDE);
        there.fill(0, &[0xee; 64 * STRIDE]);
        for slot in 0..64 {
            let sge = there.sge(slot * STRIDE, ROOM);
            pair.recv(1, receivers[dice.below(4)], slot as u64, &[sge]);
        }
        let ah = pair.ah(0);
        let mut copies = std::collections::BTreeMap::new();
        for id in 0..60_u32 {
            let to = dice.below(4);
            let bytes = message(id, to);
            let qpn = pair.number(1, receivers[to]).0;
            let wr = SendWr {
                wr_id: id.into(),
                to: To::Datagram { ah, qpn, qkey: QKEY },
                op: SendOp::Send,
                flags: SendFlags::empty(),
                payload: Payload::Inline(&bytes),
            };
            pair.send_datagram(0, senders[dice.below(3)], &wr).unwrap();
            pair.run();
        }
        // The network: each datagram is delivered never, once or twice, in any order.
        let mut flying: Vec<_> = pair.flying.drain(..).collect();
        for at in 0..flying.len() {
            if dice.below(3) == 0 {
                flying.push(flying[at].clone());
            }
        }
        while !flying.is_empty() {
            let (to, arrival, bytes) = flying.swap_remove(dice.below(flying.len()));
            if dice.below(4) > 0 {
                let id = u32::from_be_bytes(bytes[datagram::LEN..][..4].try_into().unwrap());
                *copies.entry(id).or_insert(0) += 1;
                pair.hosts[to].adapter.handle_datagram(pair.now, &arrival, &bytes);
            }
        }
        let received = pair.hosts[1].poll();
        assert!(received.len() > 10, "seed {seed}: the network let nothing through");
        for got in &received {
            assert_eq!((got.status, got.grh), (WcStatus::Success, true));
            let (slot, len) = (got.wr_id as usize * STRIDE, got.byte_len as usize - GRH);
            let bytes = there.bytes(slot + GRH, len);
            let id = u32::from_be_bytes(bytes[..4].try_into().unwrap());
            let at = receivers.iter().position(|&qp| pair.number(1, qp) == got.qp_num).unwrap();
            assert_eq!(bytes, message(id, at), "seed {seed}: altered, or for somebody else");
            let left = copies.get_mut(&id).expect("it was delivered");
            *left -= 1;
            assert!(*left >= 0, "seed {seed}: more often than it was delivered");
            let after = there.bytes(slot + GRH + len, STRIDE - GRH - len);
            assert!(after.iter().all(|&byte| byte == 0xee), "seed {seed}: after the message");
        }
        let drops = pair.hosts[1].adapter.datagram_drops();
        let lost = DatagramDrops { no_receive: drops.no_receive, ..DatagramDrops::default() };
        assert_eq!(drops, lost, "seed {seed}: only for want of receives");
        let missing: i32 = copies.values().sum();
        assert_eq!(missing as u64, drops.no_receive, "seed {seed}: each is received or counted");
    }
}
