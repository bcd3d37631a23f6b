//! What the stack of QPIP is given: its link, its addresses and the way out.

use std::net::{IpAddr, Ipv6Addr};

use quipu_inet::neighbour::share_prefix;

use super::addresses::{broadcast, flaw};
use crate::config::{ConfigError, Lookup};
use crate::error::OpenError;
use crate::packet::{Features, LinkSpec};

/// The link and the addresses of the stack of QPIP.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct QpipConfig {
    /// The link.
    pub link: LinkSpec,
    /// Own addresses, each with the length of the prefix that it shares with its neighbours. Without any,
    /// the adapter has what the link gives it: on Ethernet a link-local IPv6 address.
    pub addresses: Vec<(IpAddr, u8)>,
    /// Who forwards to everybody else; routers that announce themselves need not be among them.
    pub gateways: Vec<IpAddr>,
}

impl QpipConfig {
    /// A link without addresses of one's own.
    #[must_use]
    pub fn new(link: LinkSpec) -> Self {
        Self { link, addresses: Vec::new(), gateways: Vec::new() }
    }

    /// Whether one station can have the addresses, over a link of this kind.
    ///
    /// # Errors
    ///
    /// [`OpenError::Unusable`], [`OpenError::NoRouter`].
    pub(crate) fn check(&self) -> Result<(), OpenError> {
        let mut before: Vec<IpAddr> = Vec::new();
        for &(address, len) in &self.addresses {
            let twice = before.contains(&address).then_some("it is given twice");
            let carried = !(address.is_ipv4() && matches!(self.link, LinkSpec::Udp { .. }));
            let alien = (!carried).then_some("the link carries IPv6 only");
            if let Some(why) = flaw(address, len).or(twice).or(alien) {
                return Err(OpenError::Unusable { address, len, why });
            }
            before.push(address);
        }
        for &gateway in &self.gateways {
            let own = before.contains(&gateway).then_some("the adapter's own address");
            let is_broadcast = |&(own, len): &(IpAddr, u8)| broadcast(own, len) == Some(gateway);
            let all = self.addresses.iter().any(is_broadcast);
            if let Some(why) = own.or(all.then_some("the broadcast address of its network")) {
                return Err(OpenError::NoRouter { gateway, why });
            }
        }
        Ok(())
    }

    /// Whether a gateway is a neighbour of one of the addresses, on a link with these features.
    pub(crate) fn reaches(&self, gateway: IpAddr, features: &Features) -> bool {
        // On Ethernet every station has a link-local address of IPv6 (RFC 4291 2.1).
        let local = features.hardware.map(|_| (LINK_LOCAL, 64));
        let mut own = self.addresses.iter().copied().chain(features.address).chain(local);
        own.any(|(address, len)| share_prefix(address, gateway, len))
    }

    /// An own address that the link gives to the kernel's end.
    pub(crate) fn kernels(&self) -> Option<IpAddr> {
        let LinkSpec::Namespace { addresses: theirs, .. } = &self.link else { return None };
        let mut own = self.addresses.iter().map(|(address, _)| *address);
        own.find(|address| theirs.iter().any(|(kernels, _)| kernels == address))
    }

    /// What the variables of the environment ask for; `None` without a link.
    pub(crate) fn from_lookup(lookup: &impl Lookup) -> Result<Option<Self>, ConfigError> {
        let Some(link) = lookup("QUIPU_QPIP_LINK")? else {
            return Ok(None);
        };
        let mut config = match link.trim().parse::<LinkSpec>() {
            Ok(link) => Self::new(link),
            Err(error) => {
                let expected = error.problem.trim_start_matches("expected ");
                return Err(bad("QUIPU_QPIP_LINK", link, expected));
            }
        };
        if let Some(list) = lookup("QUIPU_QPIP_ADDRESS")? {
            let read: Option<_> = list.split(',').map(parse_address).collect();
            config.addresses = read.ok_or_else(|| bad("QUIPU_QPIP_ADDRESS", list, ADDRESSES))?;
        }
        if let Some(list) = lookup("QUIPU_QPIP_GATEWAY")? {
            let read: Result<_, _> = list.split(',').map(|word| word.trim().parse()).collect();
            config.gateways = read.map_err(|_| {
                bad(
                    "QUIPU_QPIP_GATEWAY",
                    list,
                    "IP addresses separated by \
                    commas",
                )
            })?;
        }
        Ok(Some(config))
    }
}

/// The network of link-local addresses of IPv6.
const LINK_LOCAL: IpAddr = IpAddr::V6(Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 0, 0));

const ADDRESSES: &str = "addresses with prefix lengths, such as 10.9.0.2/24,fd09::2/64";

fn bad(name: &'static str, value: String, expected: &'static str) -> ConfigError {
    ConfigError { name, value, expected }
}

/// Reads an address with the length of its prefix, such as `10.9.0.2/24`. `None`: it is none, or one that no
/// station can have.
#[must_use]
pub fn parse_address(text: &str) -> Option<(IpAddr, u8)> {
    let (address, len) = text.trim().split_once('/')?;
    let (address, len): (IpAddr, u8) = (address.parse().ok()?, len.parse().ok()?);
    let longest = if address.is_ipv4() { 32 } else { 128 };
    let usable = !address.is_unspecified() && !address.is_multicast() && !address.is_loopback();
    (usable && (1..=longest).contains(&len)).then_some((address, len))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_has_the_length_of_its_prefix() {
        assert_eq!(parse_address(" 10.9.0.2/24"), Some(([10, 9, 0, 2].into(), 24)));
        assert_eq!(parse_address("fd09::2/64"), Some(("fd09::2".parse().unwrap(), 64)));
        for bad in ["10.9.0.2", "10.9.0.2/", "10.9.0.2/33", "fd09::2/129", "::/64", "ff02::1/64"] {
            assert_eq!(parse_address(bad), None, "{bad}");
        }
        for bad in ["127.0.0.1/8", "0.0.0.0/8", "224.0.0.1/4", "10.9.0.2/0", "x/24"] {
            assert_eq!(parse_address(bad), None, "{bad}");
        }
    }

    #[test]
    fn addresses_that_no_station_can_have_are_refused_with_a_reason() {
        let said = |link: &str, own: &[&str], gateways: &[&str]| {
            let mut config = QpipConfig::new(link.parse().unwrap());
            config.addresses = own.iter().map(|it| parse_address(it).unwrap()).collect();
            config.gateways = gateways.iter().map(|it| it.parse().unwrap()).collect();
            config.check().map_err(|error| error.to_string())
        };
        let own = ["10.9.0.2/24", "fd09::2/64"];
        assert_eq!(said("tap:qp0", &own, &["10.9.0.1", "fd09::"]), Ok(()));
        let link = "udp:127.0.0.1:0";
        assert_eq!(said(link, &["fd09::2/64"], &[]), Ok(()));
        for (link, own, gateways, words) in [
            ("tap:qp0", &["10.9.0.255/24"][..], &[][..], ["10.9.0.255/24", "broadcast"]),
            ("tap:qp0", &["10.9.0.2/24", "10.9.0.2/16"], &[], ["10.9.0.2/16", "twice"]),
            ("tap:qp0", &own, &["10.9.0.2"], ["gateway 10.9.0.2", "own"]),
            ("tap:qp0", &own, &["10.9.0.255"], ["gateway 10.9.0.255", "broadcast"]),
            (link, &["10.0.0.1/24"], &[], ["10.0.0.1/24", "IPv6 only"]),
        ] {
            let said = said(link, own, gateways).unwrap_err();
            assert!(words.iter().all(|word| said.contains(word)), "{said}");
        }
    }

    #[test]
    fn the_environment_says_the_link_and_the_addresses() {
        let read = |link: &'static str, address: &'static str, gateway: &'static str| {
            QpipConfig::from_lookup(&move |name| match name {
                "QUIPU_QPIP_LINK" => Ok(Some(link.to_owned())),
                "QUIPU_QPIP_ADDRESS" => Ok(Some(address.to_owned())),
                "QUIPU_QPIP_GATEWAY" => Ok(Some(gateway.to_owned())),
                _ => Ok(None),
            })
        };
        let config = read("tap:qp0", "10.9.0.2/24, fd09::2/64", "10.9.0.1").unwrap().unwrap();
        assert_eq!(config.link, "tap:qp0".parse().unwrap());
        assert_eq!(config.addresses.len(), 2);
        assert_eq!(config.gateways, ["10.9.0.1".parse::<IpAddr>().unwrap()]);
        assert_eq!(
            read("nonsense", "10.9.0.2/24", "10.9.0.1").unwrap_err().name,
            "QUIPU_QPIP_LINK"
        );
        assert_eq!(read("tap:a", "10.9.0.2", "10.9.0.1").unwrap_err().name, "QUIPU_QPIP_ADDRESS");
        assert_eq!(read("tap:a", "10.9.0.2/24", "x").unwrap_err().name, "QUIPU_QPIP_GATEWAY");
        assert_eq!(QpipConfig::from_lookup(&|_| Ok(None)).unwrap(), None);
    }

    #[test]
    fn an_address_is_the_adapters_or_the_kernels() {
        let kernels = |link: &str, own: [&str; 2]| {
            let mut config = QpipConfig::new(link.parse().unwrap());
            config.addresses = own.map(|it| parse_address(it).unwrap()).into();
            config.kernels()
        };
        let own = ["10.9.0.2/24", "fd09::2/64"];
        assert_eq!(kernels("ns:qp0", own), None);
        assert_eq!(kernels("ns:qp0,address=10.9.0.1/24,address=fd09::1/64", own), None);
        assert_eq!(kernels("ns:qp0,address=10.9.0.2/16", own), Some([10, 9, 0, 2].into()));
        let link = "ns:,address=10.9.0.1/24,address=fd09::2/64";
        assert_eq!(kernels(link, own), Some("fd09::2".parse().unwrap()));
        assert_eq!(kernels("tap:qp0", own), None);
    }

    #[test]
    fn a_gateway_is_a_neighbour() {
        let mut config = QpipConfig::new("tap:qp0".parse().unwrap());
        config.addresses = ["10.9.0.2/24", "fd09::2/64", "192.0.2.1/32"]
            .map(|it| parse_address(it).unwrap())
            .into();
        let features = |hardware| Features {
            mtu: 1500,
            hardware,
            checksum: false,
            segment: 0,
            address: None,
            interface: String::new(),
            enter: Vec::new(),
            vlan: None,
        };
        let (ethernet, bare) = (features(Some([2, 0, 0, 0, 0, 1])), features(None));
        for (gateway, reached) in [
            ("10.9.0.1", true),
            ("10.9.1.1", false),
            ("192.0.2.2", false),
            ("fd09::1", true),
            ("fd09:0:0:1::1", false),
        ] {
            assert_eq!(config.reaches(gateway.parse().unwrap(), &ethernet), reached, "{gateway}");
        }
        let local = "fe80::1".parse().unwrap();
        assert!(config.reaches(local, &ethernet) && !config.reaches(local, &bare));
    }
}
