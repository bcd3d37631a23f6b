//! Attributes of a VI.

use crate::codes::{Code, Outcome, Reliability};

/// Most bytes of one transfer. It is compared at connection set-up, so it is the same in every version.
pub const MAX_TRANSFER: u64 = 64 << 20;

/// Attributes of a VI as the two ends see them (`VIP_VI_ATTRIBUTES` without the tag, which is local).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Attributes {
    /// What is promised of messages.
    pub reliability: Reliability,
    /// Most bytes of a transfer.
    pub max_transfer: u64,
    /// The program's own number; it must be the same at both ends.
    pub qos: u64,
    /// Whether the peer may write memory.
    pub rdma_write: bool,
    /// Whether the peer may read memory.
    pub rdma_read: bool,
}

impl Attributes {
    /// Checks the numbers of a program.
    ///
    /// # Errors
    ///
    /// An unknown reliability level; a transfer size of 0 or above [`MAX_TRANSFER`]; RDMA reads at the
    /// unreliable level.
    pub fn checked(reliability: u16, rest: Self) -> Outcome<Self> {
        let reliability =
            Reliability::from_number(reliability).ok_or(Code::InvalidReliabilityLevel)?;
        if rest.max_transfer == 0 || rest.max_transfer > MAX_TRANSFER {
            return Err(Code::InvalidMtu);
        }
        if rest.rdma_read && reliability == Reliability::Unreliable {
            return Err(Code::InvalidRdmaRead);
        }
        Ok(Self { reliability, ..rest })
    }

    /// Compares what must be equal at both ends of a connection.
    ///
    /// # Errors
    ///
    /// The first difference, in the order of the specification: reliability, transfer size, quality of
    /// service.
    pub fn agree(&self, peer: &Self) -> Outcome {
        if self.reliability != peer.reliability {
            return Err(Code::InvalidReliabilityLevel);
        }
        if self.max_transfer != peer.max_transfer {
            return Err(Code::InvalidMtu);
        }
        if self.qos != peer.qos { Err(Code::InvalidQos) } else { Ok(()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ATTRIBUTES: Attributes = Attributes {
        reliability: Reliability::Delivery,
        max_transfer: 4096,
        qos: 0,
        rdma_write: true,
        rdma_read: true,
    };

    #[test]
    fn numbers_of_programs_are_checked() {
        assert_eq!(Attributes::checked(2, ATTRIBUTES), Ok(ATTRIBUTES));
        assert_eq!(Attributes::checked(3, ATTRIBUTES), Err(Code::InvalidReliabilityLevel));
        assert_eq!(Attributes::checked(1, ATTRIBUTES), Err(Code::InvalidRdmaRead));
        for max_transfer in [0, MAX_TRANSFER + 1] {
            let wrong = Attributes { max_transfer, ..ATTRIBUTES };
            assert_eq!(Attributes::checked(4, wrong), Err(Code::InvalidMtu));
        }
    }

    #[test]
    fn the_first_difference_is_reported() {
        let other = Attributes {
            reliability: Reliability::Reception,
            max_transfer: 1,
            qos: 1,
            rdma_write: false,
            rdma_read: false,
        };
        assert_eq!(ATTRIBUTES.agree(&other), Err(Code::InvalidReliabilityLevel));
        let other = Attributes { reliability: Reliability::Delivery, ..other };
        assert_eq!(ATTRIBUTES.agree(&other), Err(Code::InvalidMtu));
        let other = Attributes { max_transfer: 4096, ..other };
        assert_eq!(ATTRIBUTES.agree(&other), Err(Code::InvalidQos));
        assert_eq!(ATTRIBUTES.agree(&Attributes { qos: 0, ..other }), Ok(()));
    }
}
