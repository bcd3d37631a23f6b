//! Recovery from loss: what may be sent while segments are missing (PRR, RFC 9937), and whether the loss
//! was none (F-RTO, RFC 5682; Eifel, RFC 3522).

use super::congestion::Before;

/// Why the congestion window is reduced.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Cause {
    /// Segments are missing, others arrive (RFC 5681 3.2, RFC 8985).
    Loss,
    /// The retransmission timer ran out (RFC 6298).
    Timeout,
    /// The network says so (RFC 3168 6.1.2).
    Ecn,
}

/// Where F-RTO is (RFC 5682 3.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Frto {
    /// Step 2: waits for the first acknowledgement after the timeout.
    First,
    /// Step 3: new data was sent; the next acknowledgement decides.
    Second,
    /// Not applicable, or decided.
    Off,
}

/// An episode of recovery. Only a connection in trouble has one.
#[derive(Clone, Debug)]
pub(crate) struct Recovery {
    pub(crate) cause: Cause,
    /// RecoveryPoint: the episode ends when this is acknowledged.
    pub(crate) high: u64,
    /// To be restored if the episode was a mistake; nothing if the network has marked something: that is
    /// none (RFC 4015 3.2).
    pub(crate) before: Option<Before>,
    /// The timestamp of the first retransmission, and the position behind it; none before.
    pub(crate) resent: Option<(u32, u64)>,
    /// Whether Eifel may still judge; a mark of the network is no mistake, whatever arrives.
    pub(crate) undecided: bool,
    pub(crate) frto: Frto,
    /// Something has arrived that was sent again.
    pub(crate) repaired: bool,
    prr: Prr,
}

#[derive(Clone, Debug, Default)]
struct Prr {
    delivered: u64,
    out: u64,
    /// RecoverFS.
    flight: u64,
}

/// What an acknowledgement says to PRR.
pub(crate) struct Delivery {
    /// DeliveredData.
    pub(crate) delivered: u64,
    /// The octets in the network after it.
    pub(crate) pipe: u64,
    /// SafeACK: it moves SND.UNA, and indicates no further loss.
    pub(crate) safe: bool,
}

impl Recovery {
    /// Begins an episode with `flight` octets between SND.UNA and SND.NXT that were not reported before the
    /// acknowledgement that began it.
    pub(crate) fn new(cause: Cause, high: u64, flight: u64, before: Before) -> Self {
        Self {
            cause,
            high,
            before: Some(before),
            resent: None,
            undecided: cause != Cause::Ecn,
            frto: Frto::Off,
            repaired: false,
            prr: Prr { flight: flight.max(1), ..Prr::default() },
        }
    }

    /// Whether nothing has been acknowledged since a timeout.
    pub(crate) fn awaits_first(&self) -> bool {
        self.cause == Cause::Timeout && self.undecided
    }

    /// A mark within it: the window is reduced once for all (RFC 3168 6.1.2), but then that stays, whatever
    /// else it was for.
    pub(crate) fn note_mark(&mut self, marked: bool) {
        if marked {
            self.before = None;
        }
    }

    /// The congestion window after an acknowledgement (RFC 9937 6.2); none if it delivered nothing.
    pub(crate) fn window(&mut self, delivery: &Delivery, ssthresh: u64, mss: u64) -> Option<u64> {
        let prr = &mut self.prr;
        if delivery.delivered == 0 {
            return None;
        }
        prr.delivered += delivery.delivered;
        let pipe = delivery.pipe;
        let mut count = if pipe > ssthresh {
            // Proportional rate reduction.
            let share = u128::from(prr.delivered) * u128::from(ssthresh);
            let share = share.div_ceil(u128::from(prr.flight)) as u64;
            share.saturating_sub(prr.out)
        } else {
            // Slow start or packet conservation, up to the threshold.
            let count = prr.delivered.saturating_sub(prr.out).max(delivery.delivered);
            let count = if delivery.safe { count + mss } else { count };
            count.min(ssthresh - pipe)
        };
        if prr.out == 0 {
            // The first retransmission goes out in any case.
            count = count.max(mss);
        }
        Some(pipe + count)
    }

    pub(crate) fn sent(&mut self, octets: u64) {
        self.prr.out += octets;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tcp::congestion::Congestion;

    const MSS: u64 = 1_000;

    fn episode(flight: u64) -> (Recovery, u64) {
        let mut congestion = Congestion::new(MSS);
        congestion.cwnd = flight;
        let before = congestion.reduce(flight, MSS);
        (Recovery::new(Cause::Loss, flight, flight, before), congestion.ssthresh)
    }

    #[test]
    fn the_rate_falls_in_proportion() {
        // 100 segments, one lost, 99 acknowledgements: 70 go out, spread evenly (RFC 9937 6).
        let (mut recovery, ssthresh) = episode(100 * MSS);
        let (mut pipe, mut out) = (99 * MSS, 0);
        for _ in 0..99 {
            pipe -= MSS;
            let delivery = Delivery { delivered: MSS, pipe, safe: false };
            let window = recovery.window(&delivery, ssthresh, MSS).unwrap();
            while pipe + MSS <= window {
                recovery.sent(MSS);
                pipe += MSS;
                out += 1;
            }
        }
        assert!((69..=70).contains(&out), "{out}");
        assert!(pipe <= ssthresh);
    }

    #[test]
    fn after_heavy_loss_it_grows_back_to_the_threshold_only() {
        let (mut recovery, ssthresh) = episode(100 * MSS);
        let delivery = Delivery { delivered: MSS, pipe: 10 * MSS, safe: false };
        let window = |recovery: &mut Recovery, delivery: &Delivery| {
            recovery.window(delivery, ssthresh, MSS).unwrap()
        };
        assert_eq!(window(&mut recovery, &delivery), 11 * MSS, "conservation");
        recovery.sent(MSS);
        let safe = Delivery { safe: true, ..delivery };
        assert_eq!(window(&mut recovery, &safe), 12 * MSS, "slow start");
        let near = Delivery { delivered: 50 * MSS, pipe: ssthresh - 1, safe: true };
        assert_eq!(window(&mut recovery, &near), ssthresh);
        let nothing = Delivery { delivered: 0, ..near };
        assert_eq!(recovery.window(&nothing, ssthresh, MSS), None);
    }
}
