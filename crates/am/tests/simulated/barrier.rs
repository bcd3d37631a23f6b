//! Barriers of signals, between other messages: nobody leaves one before all have come to it, and all leave.

use super::{MS, Run, plan};
use quipu_am::CallError;

const BARRIERS: u32 = 40;

/// How far a node is.
#[derive(Clone, Default)]
struct Place {
    /// Barriers that it has come to.
    entered: u32,
    /// The round of the last one: its partners are 2^round away.
    round: u32,
    has_sent: bool,
}

/// Goes as far as a node can; which barrier it has left, if any.
fn step(run: &mut Run, node: usize, place: &mut Place) -> Option<u32> {
    let nodes = run.plan.nodes;
    let distance = 1 << place.round;
    if place.entered == 0 || distance >= nodes {
        let left = (place.entered > 0).then_some(place.entered);
        if place.entered < BARRIERS {
            *place = Place { entered: place.entered + 1, ..Place::default() };
        }
        return left;
    }
    let endpoint = run.endpoints[node][0];
    // The first endpoint of each node.
    let index = |node: usize| (node * run.plan.endpoints) as u32;
    let (to, from) = (index((node + distance) % nodes), index((node + nodes - distance) % nodes));
    let engine = &mut run.net.nodes[node];
    if !place.has_sent {
        match engine.signal(endpoint, to) {
            Err(CallError::WouldBlock) => return None,
            sent => sent.unwrap(),
        }
        place.has_sent = true;
    }
    if engine.take_signal(endpoint, from).unwrap() {
        (place.round, place.has_sent) = (place.round + 1, false);
    }
    run.net.take_posts(node);
    None
}

#[test]
fn nobody_leaves_a_barrier_before_all_have_come() {
    for seed in 0..60 {
        let mut drawn = plan(seed);
        // A timeout ends connections that wait for a sleeper, and signals do not come back.
        (drawn.deaths, drawn.sleepers, drawn.config.give_up_ns) = (0, 0, 10_000 * MS);
        let mut run = Run::new(drawn);
        let mut places = vec![Place::default(); run.plan.nodes];
        let mut left = 0;
        for round in 0.. {
            assert!(round < 200_000, "seed {seed} does not end");
            let until = run.net.now + 5000;
            while run.net.step(until) {}
            run.end_handlers();
            for node in 0..run.plan.nodes {
                let now = run.net.now;
                run.net.nodes[node].handle_timeout(now);
                run.send(node);
                run.poll(node);
                run.check_memory(node);
                if let Some(barrier) = step(&mut run, node, &mut places[node]) {
                    let late = places.iter().position(|place| place.entered < barrier);
                    assert_eq!(late, None, "seed {seed}, barrier {barrier}");
                    left = left.max(barrier);
                }
            }
            if left == BARRIERS && run.is_over() {
                break;
            }
        }
    }
}
