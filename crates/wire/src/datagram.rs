//! The header in front of a datagram's payload (`specs/quipu-datagram.md`).

use crate::WireError;
use crate::field::{array, need, put, u32_at};

/// The only version so far.
pub const VERSION: u8 = 1;
/// Length of the header on the wire.
pub const LEN: usize = 20;
/// The destination QPN of a datagram to a multicast group (IBA 10.5.2).
pub const MULTICAST_QPN: u32 = 0x00ff_ffff;

const MAGIC: &[u8; 2] = b"QD";
/// The opcodes of InfiniBand's base transport header (IBA table 38).
const SEND_ONLY: u8 = 0x64;
const SEND_ONLY_WITH_IMMEDIATE: u8 = 0x65;
/// Of those that IBA table 38 leaves to manufacturers.
const ETHERNET_FRAME: u8 = 0xc0;
const SOLICITED: u8 = 1 << 0;
const MAX_24_BIT: u32 = 0x00ff_ffff;

/// The header of a datagram: what an unreliable datagram has in its transport headers (IBA 9.2, 9.3.3).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Datagram {
    /// The queue pair that it is for, 24 bits; [`MULTICAST_QPN`] for a group.
    pub dest_qpn: u32,
    /// The queue pair that sent it, 24 bits.
    pub source_qpn: u32,
    /// Must be that of the receiver.
    pub qkey: u32,
    /// Immediate data, as the sender's program gave it.
    pub imm: Option<u32>,
    /// Whether the receiver's solicited event is to be raised.
    pub solicited: bool,
    /// Whether the message is an Ethernet frame, without Q_Key and immediate data.
    pub frame: bool,
}

impl Datagram {
    /// Reads the header of a UDP payload; the message is what stands behind its [`LEN`] bytes.
    /// Reserved fields are ignored.
    ///
    /// # Errors
    /// Too short, no datagram of Quipu, another version, or an unknown opcode.
    pub fn parse(bytes: &[u8]) -> Result<Self, WireError> {
        need(bytes, LEN)?;
        let bytes: [u8; LEN] = array(bytes, 0);
        if !bytes.starts_with(MAGIC) {
            return Err(WireError::NotDatagram);
        }
        if bytes[2] != VERSION {
            return Err(WireError::DatagramVersion(bytes[2]));
        }
        let (frame, imm) = match bytes[3] {
            SEND_ONLY => (false, None),
            SEND_ONLY_WITH_IMMEDIATE => (false, Some(u32_at(&bytes, 16))),
            ETHERNET_FRAME => (true, None),
            _ => return Err(WireError::OutOfRange("opcode")),
        };
        Ok(Self {
            // The eighth bits before each number are the flags, and reserved.
            dest_qpn: u32_at(&bytes, 4) & MAX_24_BIT,
            source_qpn: u32_at(&bytes, 8) & MAX_24_BIT,
            qkey: u32_at(&bytes, 12),
            imm,
            solicited: bytes[4] & SOLICITED != 0,
            frame,
        })
    }

    /// The header as bytes. Numbers of 24 bits are cut to them.
    pub fn to_bytes(&self) -> [u8; LEN] {
        let mut out = [0; LEN];
        put(&mut out, 0, *MAGIC);
        out[2] = VERSION;
        out[3] = match (self.frame, self.imm) {
            (true, _) => ETHERNET_FRAME,
            (false, Some(_)) => SEND_ONLY_WITH_IMMEDIATE,
            (false, None) => SEND_ONLY,
        };
        put(&mut out, 4, (self.dest_qpn & MAX_24_BIT).to_be_bytes());
        out[4] = if self.solicited { SOLICITED } else { 0 };
        put(&mut out, 8, (self.source_qpn & MAX_24_BIT).to_be_bytes());
        put(&mut out, 12, self.qkey.to_be_bytes());
        put(&mut out, 16, self.imm.unwrap_or(0).to_be_bytes());
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_no_datagram_is_refused() {
        let good = Datagram { dest_qpn: 1, ..Datagram::default() }.to_bytes();
        assert!(Datagram::parse(&good).is_ok());
        for len in 0..LEN {
            let short = WireError::Truncated { need: LEN, have: len };
            assert_eq!(Datagram::parse(&good[..len]), Err(short));
        }
        let changed = |at: usize, value: u8| {
            let mut bytes = good;
            bytes[at] = value;
            Datagram::parse(&bytes)
        };
        assert_eq!(changed(1, b'q'), Err(WireError::NotDatagram));
        assert_eq!(changed(2, 2), Err(WireError::DatagramVersion(2)));
        assert_eq!(changed(3, 4), Err(WireError::OutOfRange("opcode")));
        assert_eq!(changed(4, 0xfe), changed(4, 0), "reserved flags are ignored");
    }
}
