//! A relay between two TAP devices that loses packets and delays the others, in both directions.
//!
//! Where the kernel has netem that would do; many kernels do not.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{ErrorKind, Read, Write};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use rand_core::RngCore;
use rand_pcg::Pcg64;

use crate::sys;

/// Octets under way at once. A plan that needs more is refused rather than measured wrong.
const ROOM: usize = 64 << 20;
/// Frames taken from a device in a row.
const BATCH: usize = 64;
/// The longest frame of a device, and more.
const LONGEST: usize = 2048;
/// Between two looks whether it is to end.
const LOOK: Duration = Duration::from_millis(50);
/// Where the type of an Ethernet frame is, and that of IPv4.
const TYPE: std::ops::Range<usize> = 12..14;
const IPV4: [u8; 2] = [0x08, 0x00];

/// What is between the devices: which packets are lost, and when the others arrive.
pub(super) struct Wire {
    /// What each direction draws from, so that neither changes the losses of the other.
    chance: [Pcg64; 2],
    /// Lost if less is drawn, of 2^32.
    lost_below: u64,
    delay: Duration,
    /// Frames under way: when each arrives, and from which side it came. All have the same delay, so they
    /// arrive in the order in which they left.
    flying: VecDeque<(Instant, usize, Vec<u8>)>,
    octets: usize,
}

impl Wire {
    /// One that loses the share `loss` (0 to 1) of IP packets, and needs `delay` for each way.
    pub(super) fn new(loss: f64, delay: Duration, seed: u64) -> Self {
        let chance = [0, 1].map(|side| {
            let mut chance = Pcg64::new(seed.into(), side);
            // Neighbouring seeds begin alike.
            for _ in 0..4 {
                chance.next_u64();
            }
            chance
        });
        let lost_below = (loss.clamp(0.0, 1.0) * 2_f64.powi(32)) as u64;
        Self { chance, lost_below, delay, flying: VecDeque::new(), octets: 0 }
    }

    /// Takes a frame that leaves a side now. Only IP is lost: what becomes of a question for an address is
    /// not of interest.
    ///
    /// # Errors
    ///
    /// Too much is under way.
    fn take(&mut self, now: Instant, side: usize, frame: &[u8]) -> Result<()> {
        if frame.get(TYPE) == Some(&IPV4[..]) {
            let drawn = self.chance[side].next_u64() >> 32;
            if drawn < self.lost_below {
                return Ok(());
            }
        }
        self.octets += frame.len();
        ensure!(self.octets <= ROOM, "more than {} MiB are under way", ROOM >> 20);
        self.flying.push_back((now + self.delay, side, frame.to_vec()));
        Ok(())
    }

    /// The next frame that has arrived by now, and the side from which it came.
    fn arrived(&mut self, now: Instant) -> Option<(usize, Vec<u8>)> {
        let (_, side, frame) = self.flying.pop_front_if(|(at, ..)| *at <= now)?;
        self.octets -= frame.len();
        Some((side, frame))
    }

    /// How long nothing arrives.
    fn pause(&self, now: Instant) -> Duration {
        self.flying.front().map_or(LOOK, |(at, ..)| at.saturating_duration_since(now).min(LOOK))
    }
}

/// Carries frames between the devices until it is told to stop. What waited there before is gone.
///
/// # Errors
///
/// A device cannot be read, or too much is under way.
pub(super) fn carry(devices: &[File; 2], mut wire: Wire, stop: &AtomicBool) -> Result<()> {
    let mut frame = [0; LONGEST];
    for device in devices {
        while next(device, &mut frame)?.is_some() {}
    }
    while !stop.load(Ordering::Acquire) {
        sys::wait_readable(devices, wire.pause(Instant::now())).context("waiting for frames")?;
        for (side, device) in devices.iter().enumerate() {
            for _ in 0..BATCH {
                let Some(len) = next(device, &mut frame)? else { break };
                wire.take(Instant::now(), side, &frame[..len])?;
            }
        }
        let now = Instant::now();
        while let Some((side, frame)) = wire.arrived(now) {
            // A device that has no room loses it, as others would.
            let _ = (&devices[1 - side]).write(&frame);
        }
    }
    Ok(())
}

/// Takes a frame from a device; its length. `None`: there is none.
fn next(mut device: &File, frame: &mut [u8]) -> Result<Option<usize>> {
    match device.read(frame) {
        Ok(len) => Ok(Some(len)),
        Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => {
            Ok(None)
        }
        Err(error) => Err(error).context("reading a TAP device"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DELAY: Duration = Duration::from_millis(50);

    fn frame(number: u32) -> Vec<u8> {
        let mut frame = vec![0; 64];
        frame[TYPE].copy_from_slice(&IPV4);
        frame[14..18].copy_from_slice(&number.to_be_bytes());
        frame
    }

    /// The numbers of those of so many packets that arrive.
    fn survivors(wire: &mut Wire, side: usize, count: u32) -> Vec<u32> {
        let now = Instant::now();
        (0..count).for_each(|number| wire.take(now, side, &frame(number)).unwrap());
        let next = || wire.arrived(now + DELAY);
        let number = |(from, frame): (usize, Vec<u8>)| {
            assert_eq!(from, side);
            u32::from_be_bytes(frame[14..18].try_into().unwrap())
        };
        std::iter::from_fn(next).map(number).collect()
    }

    #[test]
    fn the_share_that_was_asked_for_is_lost_in_both_directions() {
        for side in [0, 1] {
            for loss in [0.0, 0.01, 0.2, 1.0] {
                let mut wire = Wire::new(loss, DELAY, 7);
                let lost = 100_000.0 - survivors(&mut wire, side, 100_000).len() as f64;
                // Four standard deviations.
                let slack = 4.0 * (loss * (1.0 - loss) * 100_000.0).sqrt();
                assert!((lost - loss * 100_000.0).abs() <= slack, "{side} {loss}: {lost}");
            }
        }
    }

    #[test]
    fn the_same_seed_loses_the_same_packets_and_another_others() {
        let of = |seed, side| survivors(&mut Wire::new(0.1, DELAY, seed), side, 1_000);
        assert_eq!(of(1, 0), of(1, 0));
        assert_ne!(of(1, 0), of(2, 0));
        assert_ne!(of(1, 0), of(1, 1));
        // However many go the other way.
        let mut wire = Wire::new(0.1, DELAY, 1);
        survivors(&mut wire, 1, 333);
        assert_eq!(survivors(&mut wire, 0, 1_000), of(1, 0));
    }

    #[test]
    fn packets_arrive_in_order_after_the_delay_and_not_before() {
        let (mut wire, now) = (Wire::new(0.0, DELAY, 1), Instant::now());
        let millisecond = Duration::from_millis(1);
        wire.take(now, 0, &frame(1)).unwrap();
        wire.take(now + millisecond, 1, &frame(2)).unwrap();
        assert_eq!(wire.pause(now), DELAY.min(LOOK));
        assert_eq!(wire.pause(now + 20 * millisecond), 30 * millisecond);
        assert_eq!(wire.arrived(now + DELAY - millisecond), None);
        assert_eq!(wire.arrived(now + DELAY), Some((0, frame(1))));
        assert_eq!(wire.arrived(now + DELAY), None);
        assert_eq!(wire.arrived(now + DELAY + millisecond), Some((1, frame(2))));
        assert_eq!((wire.octets, wire.pause(now)), (0, LOOK));
    }

    #[test]
    fn only_ip_is_lost_and_no_more_is_kept_than_there_is_room_for() {
        let (mut wire, now) = (Wire::new(1.0, DELAY, 1), Instant::now());
        let mut question = frame(1);
        question[TYPE].copy_from_slice(&[0x08, 0x06]);
        wire.take(now, 0, &question).unwrap();
        assert_eq!(wire.arrived(now + DELAY), Some((0, question)));
        let mut wire = Wire::new(0.0, DELAY, 1);
        let long = vec![0; ROOM / 4];
        (0..4).for_each(|_| wire.take(now, 0, &long).unwrap());
        assert!(wire.take(now, 0, &[0]).is_err());
    }
}
