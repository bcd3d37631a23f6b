//! Seeded runs: two programs send, read, cancel and change modes at random, and every byte is checked.

use quipu_sdp::{Config, Readable};
use rand_core::{RngCore, SeedableRng};
use rand_pcg::Pcg64;

use crate::bench::Pair;

const STEPS: u32 = 3000;

struct Run {
    pair: Pair,
    rng: Pcg64,
    /// How likely each action is, for the whole run.
    weights: [u32; 11],
}

impl Run {
    fn new(seed: u64) -> Self {
        let mut rng = Pcg64::seed_from_u64(seed);
        let config = |rng: &mut Pcg64| {
            let buffer_size = 64 + rng.next_u32() % 2000;
            Config {
                buffers: 4 + (rng.next_u32() % 20) as u16,
                buffer_size,
                max_buffer_size: buffer_size + rng.next_u32() % 2000,
                wanted_peer_size: 1000,
                urgent_inline: true,
            }
        };
        let configs = [config(&mut rng), config(&mut rng)];
        let mut weights = [0; 11];
        weights.fill_with(|| rng.next_u32() % 8);
        // Messages move and are read in every run.
        for index in [2, 4, 5] {
            weights[index] += 4;
        }
        Self { pair: Pair::new(configs), rng, weights }
    }

    fn below(&mut self, end: u32) -> u32 {
        self.rng.next_u32() % end.max(1)
    }

    fn draw_action(&mut self) -> usize {
        let sum = self.weights.iter().sum();
        let mut left = self.below(sum);
        self.weights
            .iter()
            .position(|weight| match left.checked_sub(*weight) {
                Some(rest) => {
                    left = rest;
                    false
                }
                None => true,
            })
            .unwrap()
    }

    fn step(&mut self) {
        let side = self.below(2) as usize;
        let len = 1 + self.below(3000);
        match self.draw_action() {
            0 => drop(self.pair.send_data(side, len, len.is_multiple_of(16))),
            1 => {
                let room = self.pair.ends[side].connection.data_room();
                if room > 16 {
                    let inline = 1 + self.below((room - 16).min(len));
                    self.pair.advertise(side, len + 1, inline);
                }
            }
            2 if self.pair.ends[side].reading.is_none() => drop(self.pair.receive(side, len)),
            2 | 5 => self.pair.finish_read(side),
            3 => self.pair.ends[side].connection.cancel_source(),
            4 => drop(self.pair.deliver(side).expect("both keep to the protocol")),
            6 => self.pair.ends[side].connection.refuse_sink(),
            7 if len < 300 => drop(self.pair.ends[side].connection.send_buffered()),
            8 => drop(self.pair.ends[side].connection.ask_for_combined()),
            9 if len < 100 => self.pair.ends[side].connection.ask_for_buffers(len * 100),
            _ => self.pair.now += u64::from(len) * 5_000,
        }
        self.pair.source_end(side);
        if self.below(4) > 0 {
            self.pair.pump(side);
        }
        let now = self.pair.now;
        let connection = &mut self.pair.ends[side].connection;
        if connection.poll_timeout().is_some_and(|at| at <= now) {
            connection.handle_timeout(now);
            assert!(connection.poll_timeout().is_none_or(|at| at > now), "a stale deadline");
        }
        assert_eq!(connection.reset(), None);
    }

    /// Both programs send no more and read to the end.
    fn finish(&mut self) {
        for side in [0, 1] {
            self.pair.ends[side].connection.cancel_source();
        }
        for _ in 0..4 {
            self.pair.settle();
            for side in [0, 1] {
                self.pair.finish_read(side);
                self.pair.drain(side);
                self.pair.source_end(side);
            }
        }
        for side in [0, 1] {
            self.pair.ends[side].connection.shut_write();
            self.pair.pump(side);
        }
        self.pair.settle();
        for side in [0, 1] {
            let (own, peer) = (&self.pair.ends[side], &self.pair.ends[1 - side]);
            assert_eq!(own.sent, peer.received, "all that {side} has sent has arrived");
            assert_eq!(own.connection.readable(), Readable::End);
            assert!(own.connection.is_finished());
        }
    }
}

fn run(seed: u64) -> u64 {
    let mut run = Run::new(seed);
    (0..STEPS).for_each(|_| run.step());
    run.finish();
    run.pair.ends.iter().map(|end| end.received).sum()
}

#[test]
fn no_byte_is_lost_doubled_or_reordered() {
    let mut bytes = 0;
    for seed in 0..150 {
        let moved =
            std::panic::catch_unwind(|| run(seed)).unwrap_or_else(|_| panic!("seed {seed} failed"));
        bytes += moved;
    }
    assert!(bytes > 10 << 20, "only {bytes} bytes were moved");
    assert_eq!(run(7), run(7), "a seed determines its run");
}
