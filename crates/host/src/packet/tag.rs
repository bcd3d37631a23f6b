//! The tag of an Ethernet frame that is in a VLAN, or has a priority (IEEE 802.1Q 9.6): four octets between
//! the station addresses and the type.
//!
//! Inside of the adapter, a frame of the link's VLAN has no tag, or one that has its priority only.

use super::ETHERNET;

/// Octets of a tag.
pub(super) const LEN: usize = 4;
/// The greatest number of a VLAN (IEEE 802.1Q 9.6); 0 says that the tag has a priority only.
pub(super) const MAX_VLAN: u16 = 4094;

/// Where a tag is: after both station addresses.
const AT: usize = 12;
/// The tag protocol identifier of a customer VLAN.
const KIND: [u8; 2] = [0x81, 0];
/// The bits of the VLAN in the control information of a tag. The upper three are the priority.
const VLAN: u16 = 0x0fff;
/// The greatest priority.
const MAX_PRIORITY: u8 = 7;

/// The control information of a tag. A priority above 7 counts as 7.
pub(crate) fn control(vlan: u16, priority: u8) -> u16 {
    u16::from(priority.min(MAX_PRIORITY)) << 13 | vlan & VLAN
}

/// The control information of the tag that a frame has.
pub(crate) fn of(frame: &[u8]) -> Option<u16> {
    let [kind @ .., high, low] = *frame.get(AT..)?.first_chunk::<LEN>()?;
    (kind == KIND).then_some(u16::from_be_bytes([high, low]))
}

/// Puts a tag into the frame that begins [`LEN`] octets after the start of `bytes`. It begins at the start
/// then.
///
/// # Panics
/// If `bytes` is too short for an Ethernet header and a tag.
pub(super) fn insert(bytes: &mut [u8], control: u16) {
    bytes.copy_within(LEN..LEN + AT, 0);
    let [a, b] = control.to_be_bytes();
    bytes[AT..AT + LEN].copy_from_slice(&[KIND[0], KIND[1], a, b]);
}

/// Whether a frame that came with its tag is of a VLAN. Leaves only the priority in its tag.
pub(super) fn accept(frame: &mut [u8], vlan: u16) -> bool {
    let Some(control) = of(frame) else { return vlan == 0 };
    if frame.len() < ETHERNET + LEN || control & VLAN != vlan {
        return false;
    }
    frame[AT + 2..AT + LEN].copy_from_slice(&priority_only(control).to_be_bytes());
    true
}

/// The control information without the VLAN.
pub(super) fn priority_only(control: u16) -> u16 {
    control & !VLAN
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A frame without a tag after four octets of room.
    fn frame() -> Vec<u8> {
        (0..4).map(|_| 0xee).chain(1..=12).chain([0x86, 0xdd, 0x60, 0]).collect()
    }

    #[test]
    fn a_tag_goes_between_addresses_and_type() {
        let mut bytes = frame();
        insert(&mut bytes, control(7, 5));
        let addresses: Vec<u8> = (1..=12).collect();
        assert_eq!(bytes[..12], addresses);
        assert_eq!(bytes[12..], [0x81, 0, 0xa0, 7, 0x86, 0xdd, 0x60, 0]);
        assert_eq!((of(&bytes), of(&frame()[LEN..])), (Some(0xa007), None));
        assert_eq!((control(4094, 0), control(0, 15)), (0x0ffe, 0xe000));
    }

    #[test]
    fn frames_of_other_vlans_are_not_accepted() {
        let tagged = |vlan| {
            let mut bytes = frame();
            insert(&mut bytes, control(vlan, 5));
            bytes
        };
        for (link, came, accepted) in
            [(7, Some(7), true), (7, Some(8), false), (7, Some(0), false), (7, None, false)]
                .into_iter()
                .chain([(0, Some(0), true), (0, None, true), (0, Some(7), false)])
        {
            let mut bytes = came.map_or_else(|| frame()[LEN..].to_vec(), tagged);
            assert_eq!(accept(&mut bytes, link), accepted, "{came:?} on {link}");
            if accepted {
                assert_eq!(of(&bytes), came.map(|_| control(0, 5)));
            }
        }
        // Cut off within the tag.
        for len in 0..ETHERNET + LEN {
            assert!(!accept(&mut tagged(7)[..len], 7), "{len}");
        }
    }
}
