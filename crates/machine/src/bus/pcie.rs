//! PCI Express: what a transfer takes of a link (PCI Express Base Specification 5.0; sections are of it).

use crate::plan::{PciePlan, Rate};

/// Framing, sequence number and link CRC of a packet (2.2, 3.6, 4.2): start, number, LCRC, end.
const FRAMING: u64 = 8;
/// Header of a memory request with 64-bit addresses (2.2.4.1), four double words.
const REQUEST: u64 = FRAMING + 16;
/// Header of a completion (2.2.9), three double words.
const COMPLETION: u64 = FRAMING + 12;
/// Bytes of an acknowledgement or a credit update (3.5).
const DLLP: f64 = 8.0;
/// A SKP ordered set of 4 symbols, after so many (4.2.7).
const SKIP: f64 = 4.0 / 1538.0;

/// Bits of each second of all lanes, line coding taken off (4.2).
#[must_use]
pub fn raw_rate(generation: u32, lanes: u32) -> u64 {
    let lane = match generation {
        1 => 2_000_000_000,
        2 => 4_000_000_000,
        // 128 of 130 bits.
        3 => 7_876_923_077,
        4 => 15_753_846_154,
        _ => 31_507_692_308,
    };
    lane * u64::from(lanes)
}

/// Symbols after which an acknowledgement is due at the latest (3.6.3.1), and a credit update (2.6.1.2):
/// the packet's time by a factor, and an internal delay.
fn dllp_interval(generation: u32, lanes: u32, max_payload: u64) -> f64 {
    let small = max_payload < 512;
    let factor = match lanes {
        1..=4 if small => 1.4,
        8 if small => 2.5,
        _ if small => 3.0,
        1..=8 => 1.0,
        _ => 2.0,
    };
    let delay = match generation {
        1 => 19.0,
        2 => 70.0,
        _ => 115.0,
    };
    // The tables have whole symbols.
    ((max_payload as f64 + 28.0) * factor / f64::from(lanes) + delay).floor()
}

/// Bits of each second that are left for packets: acknowledgements, credit updates and SKP taken off.
#[must_use]
pub fn packet_rate(generation: u32, lanes: u32, max_payload: u64) -> f64 {
    let dllps = 2.0 * DLLP / dllp_interval(generation, lanes, max_payload);
    raw_rate(generation, lanes) as f64 * (1.0 - dllps - SKIP)
}

/// A link.
#[derive(Clone, Debug)]
pub struct Link {
    rate: Rate,
    /// Maximum payload size.
    pub max_payload: u64,
    max_read: u64,
    /// One way, in picoseconds.
    pub latency: u64,
}

impl Link {
    /// The link of a plan.
    #[must_use]
    pub fn new(plan: &PciePlan) -> Self {
        let rate = packet_rate(plan.generation, plan.lanes, plan.max_payload.0);
        Self {
            rate: Rate(rate as u64),
            max_payload: plan.max_payload.0.max(1),
            max_read: plan.max_read.0.max(1),
            latency: plan.latency.0,
        }
    }

    /// How long `bytes` occupy a direction, in picoseconds.
    #[must_use]
    pub fn ps(&self, bytes: u64) -> u64 {
        self.rate.ps(bytes)
    }

    /// Bytes of memory writes that carry `len` bytes.
    #[must_use]
    pub fn write_bytes(&self, len: u64) -> u64 {
        len + len.div_ceil(self.max_payload) * REQUEST
    }

    /// How many requests read `len` bytes.
    #[must_use]
    pub fn read_requests(&self, len: u64) -> u64 {
        len.div_ceil(self.max_read)
    }

    /// Bytes of the requests that read `len` bytes.
    #[must_use]
    pub fn request_bytes(&self, len: u64) -> u64 {
        self.read_requests(len) * REQUEST
    }

    /// Bytes of the completions that carry `len` bytes.
    #[must_use]
    pub fn completion_bytes(&self, len: u64) -> u64 {
        len + len.div_ceil(self.max_payload) * COMPLETION
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::Bytes;

    /// What pcie-bench's model has for frames of 1514 bytes, written and read, in Gb/s.
    const PUBLISHED: [(u32, u32, u64, f64, f64); 5] = [
        (1, 4, 128, 5.23, 5.37),
        (1, 8, 128, 10.2, 10.48),
        (2, 8, 256, 26.19, 26.57),
        (3, 8, 256, 52.86, 53.63),
        (4, 16, 256, 207.65, 210.7),
    ];

    #[test]
    fn bandwidth_is_that_of_pcie_bench() {
        for (generation, lanes, max_payload, write, read) in PUBLISHED {
            let plan = PciePlan {
                generation,
                lanes,
                max_payload: Bytes(max_payload),
                ..PciePlan::default()
            };
            let link = Link::new(&plan);
            let rate = packet_rate(generation, lanes, max_payload) / 1e9;
            let got = [link.write_bytes(1514), link.completion_bytes(1514)]
                .map(|bytes| rate * 1514.0 / bytes as f64);
            for (got, published) in got.into_iter().zip([write, read]) {
                let error = (got / published - 1.0).abs();
                assert!(error < 0.003, "gen{generation} x{lanes}: {got} for {published}");
            }
        }
    }

    #[test]
    fn a_read_of_a_frame() {
        let link = Link::new(&PciePlan::default());
        assert_eq!((link.read_requests(1514), link.request_bytes(1514)), (3, 72));
        assert_eq!(link.completion_bytes(1514), 1514 + 12 * 20);
        assert_eq!(link.write_bytes(0), 0);
    }
}
