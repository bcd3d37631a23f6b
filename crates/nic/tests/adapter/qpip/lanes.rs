//! Two connections in two lanes share a port with a rate as its weights say.

use std::cell::RefCell;
use std::rc::Rc;

use quipu_nic::inet::tcp::Mode;
use quipu_nic::qos::{Config as Qos, Entry};
use quipu_nic::*;

use super::net::Net;

const MESSAGE: usize = 16 << 10;

/// Frames are marked with the service level of the rules where a program names no traffic class.
#[test]
fn frames_carry_the_service_level_of_the_rules() {
    let mut net = Net::new();
    let mut qos = Qos::default();
    qos.dscp[3] = Some(46);
    net.adapter(0).set_qos(qos, None);
    net.adapter(0).set_default_level(3);
    let qps = [0, 1].map(|host| net.qp(host, QpType::Tcp));
    let classes = Rc::new(RefCell::new([Vec::new(), Vec::new()]));
    let seen = Rc::clone(&classes);
    net.filter = Some(Box::new(move |to, frame| {
        let class = match frame[0] >> 4 {
            4 => frame[1],
            _ => frame[0] << 4 | frame[1] >> 4,
        };
        let next_header = if frame[0] >> 4 == 4 { frame[9] } else { frame[6] };
        if matches!(next_header, 6 | 17) {
            seen.borrow_mut()[1 - to].push(class & !3);
        }
        true
    }));
    net.join(qps, Mode::Message);
    let datagrams = [0, 1].map(|host| net.qp(host, QpType::Udp));
    let port = [0, 1].map(|host| net.adapter(host).udp_bind(datagrams[host], 0).unwrap())[1];
    let (flags, payload) = (SendFlags::SIGNALED, Payload::Inline(&[1]));
    let to = To::Address(net.address(1, port));
    let wr = SendWr { wr_id: 5, to, op: SendOp::Send, flags, payload };
    net.post(0, datagrams[0], &wr).unwrap();
    net.run_for(1_000_000_000);
    let seen = classes.borrow();
    assert!(seen[0].len() > 2 && seen[0].iter().all(|&class| class == 46 << 2), "{seen:x?}");
    assert!(!seen[1].is_empty() && seen[1].iter().all(|&class| class == 0), "{seen:x?}");
}

#[test]
fn connections_share_a_port_by_weight() {
    let low = [(0, 1), (1, 4)].map(|(lane, weight)| Entry { lane, weight });
    let qos = Qos { rate: 200_000_000, high: Vec::new(), low: low.into(), ..Qos::default() };
    let mut net = Net::new();
    let flows = [0u8, 0x20].map(|traffic_class| {
        let qps = [0, 1].map(|host| net.qp(host, QpType::Tcp));
        net.join(qps, Mode::Message);
        let carriage = inet::stack::Carriage { traffic_class, ..Default::default() };
        net.adapter(0).set_carriage(qps[0], carriage).unwrap();
        qps
    });
    net.adapter(0).set_qos(qos, None);
    let (from, to) = (net.buffer(0, MESSAGE), net.buffer(1, MESSAGE));
    let (mut posted, mut ready) = ([0usize; 2], [0usize; 2]);
    let mut before = None;
    for step in 0..1200 {
        for (flow, qps) in flows.iter().enumerate() {
            while ready[flow] < 32 {
                net.recv(1, qps[1], flow as u64, &[to.sge(0, MESSAGE)]);
                ready[flow] += 1;
            }
            while posted[flow] < 16 {
                net.send(0, qps[0], flow as u64, &[from.sge(0, MESSAGE)]);
                posted[flow] += 1;
            }
        }
        net.run_for(100_000);
        for (host, waiting) in [&mut posted, &mut ready].into_iter().enumerate() {
            for completion in net.poll(host) {
                assert_eq!(completion.status, WcStatus::Success);
                waiting[completion.wr_id as usize] -= 1;
            }
        }
        if step == 200 {
            before = net.adapter(0).lane_use();
        }
    }
    let (before, after) = (before.unwrap(), net.adapter(0).lane_use().unwrap());
    let sent = [0, 1].map(|lane| (after[lane].octets - before[lane].octets) as f64);
    let ratio = sent[1] / sent[0];
    assert!((ratio / 4.0 - 1.0).abs() < 0.01, "{ratio}");
    // 100 ms at 200 Mbit/s.
    let all = (sent[0] + sent[1]) / 2_500_000.0;
    assert!((all - 1.0).abs() < 0.01, "{all}");
}
