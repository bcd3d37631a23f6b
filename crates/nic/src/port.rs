//! The kind of port that the adapter shows, and how peers are named there.

use std::net::IpAddr;

use crate::error::Fault;
use crate::gids::Gids;
use crate::types::{AddressVector, Gid};

/// The link layer that the port shows, with the values of `ibv_port_attr.link_layer`. What is transmitted is
/// the same for both.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(u8)]
pub enum LinkLayer {
    /// InfiniBand: peers of the subnet are named by LID as well. See [`Gid::lid`].
    InfiniBand = 1,
    /// That of RoCE: peers are named by GID (IBA annex A16).
    #[default]
    Ethernet = 2,
}

impl Gid {
    /// The LID of an InfiniBand port with this address: the last 16 bits. The addresses of a subnet have the
    /// others in common. 0 is none.
    pub const fn lid(self) -> u16 {
        u16::from_be_bytes([self.0[14], self.0[15]])
    }

    /// The address of the port with this LID in the subnet of the port with this address.
    #[must_use]
    pub const fn in_subnet(self, lid: u16) -> Self {
        let mut gid = self;
        [gid.0[14], gid.0[15]] = lid.to_be_bytes();
        gid
    }
}

impl LinkLayer {
    /// The LID of a port with this address; 0, which is none, on Ethernet.
    pub const fn lid(self, address: Gid) -> u16 {
        match self {
            Self::InfiniBand => address.lid(),
            Self::Ethernet => 0,
        }
    }

    /// A route with the GID to which it leads, as a program of a port with the addresses `own` may name it
    /// (IBA 11.2.2.1).
    ///
    /// # Errors
    /// Another source GID than there is, or a route that leads nowhere.
    pub(crate) fn resolve(self, own: &Gids, av: &AddressVector) -> Result<AddressVector, Fault> {
        match (av.is_global, self) {
            (true, _) if own.row(av.sgid_index).is_none() => {
                Err(Fault::Invalid("the GID table has no row with this sgid_index"))
            }
            (true, _) => Ok(*av),
            (false, Self::InfiniBand) if av.dlid != 0 => {
                Ok(AddressVector { dgid: own.row_of(av).in_subnet(av.dlid), ..*av })
            }
            (false, Self::InfiniBand) => Err(Fault::Invalid("a route needs a LID or a GID")),
            (false, Self::Ethernet) => Err(Fault::NoLids),
        }
    }
}

/// Whether the peer that a route names can be reached from the source address that it names.
///
/// # Errors
/// It cannot, ever: of the other family, or on another host while the source is the loopback.
pub(crate) fn check_source(own: &Gids, av: &AddressVector) -> Result<(), Fault> {
    let (source, dest) = (IpAddr::from(own.row_of(av)), IpAddr::from(av.dgid));
    if source.is_ipv4() != dest.is_ipv4() {
        return Err(Fault::Invalid(
            "sgid_index and dgid name addresses of two families; choose another sgid_index",
        ));
    }
    if source.is_loopback() && !own.is_of_host(av.dgid) {
        return Err(Fault::Invalid(
            "sgid_index names the loopback, which reaches this host alone; choose another sgid_index",
        ));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gid(address: &str) -> Gid {
        address.parse::<IpAddr>().unwrap().into()
    }

    #[test]
    fn a_lid_is_the_end_of_an_address() {
        for (own, lid, other) in [
            ("10.1.2.3", 0x0203, "10.1.200.9"),
            ("127.0.0.1", 1, "127.0.0.2"),
            ("fd00::7:102", 0x0102, "fd00::7:ffff"),
        ] {
            assert_eq!(gid(own).lid(), lid);
            assert_eq!(gid(own).in_subnet(gid(other).lid()), gid(other));
        }
    }

    #[test]
    fn a_lid_alone_leads_somewhere_on_infiniband_only() {
        let own = &Gids::of(gid("192.0.2.1"));
        let local = AddressVector { dlid: 0x0205, port_num: 1, ..AddressVector::default() };
        let found = LinkLayer::InfiniBand.resolve(own, &local).unwrap();
        assert_eq!((found.dgid, found.is_global, found.dlid), (gid("192.0.2.5"), false, 0x0205));
        assert!(LinkLayer::Ethernet.resolve(own, &local).is_err());
        let nowhere = AddressVector { dlid: 0, ..local };
        assert!(LinkLayer::InfiniBand.resolve(own, &nowhere).is_err());
        // A GID is looked at first, on both.
        let global = AddressVector { is_global: true, dgid: gid("198.51.100.7"), ..local };
        for layer in [LinkLayer::Ethernet, LinkLayer::InfiniBand] {
            assert_eq!(layer.resolve(own, &global).unwrap(), global);
            let no_row = AddressVector { sgid_index: 4, ..global };
            assert!(layer.resolve(own, &no_row).is_err());
        }
    }
}
