//! What a user writes for a link.

use std::fmt;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::str::FromStr;

use super::place::PREFIX;
use super::tag;
use crate::share;

/// The longest name of a network interface.
const MAX_NAME: usize = 15;
/// The highest number of a queue that makes sense.
const MAX_QUEUE: u32 = 4095;

/// A link, as a user names it: `KIND:WHAT`, and behind commas what else there is to say.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LinkSpec {
    /// `tap:NAME[,station=XX:XX:XX:XX:XX:XX][,vlan=NUMBER]`: a TAP device, made for the time that the link is
    /// open unless there is one of this name. Without a name the kernel chooses one.
    Tap {
        /// The interface.
        name: String,
        /// What our end is.
        end: EthernetEnd,
    },
    /// `packet:INTERFACE[,station=XX:XX:XX:XX:XX:XX][,vlan=NUMBER]`: a packet socket on an Ethernet
    /// interface.
    Packet {
        /// The interface.
        interface: String,
        /// What our end is.
        end: EthernetEnd,
    },
    /// `xdp:INTERFACE[,queue=NUMBER][,station=XX:XX:XX:XX:XX:XX]`: an XDP socket on a queue of an Ethernet
    /// interface.
    Xdp {
        /// The interface.
        interface: String,
        /// The queue: 0 if none is given.
        queue: u32,
        /// The station address of our end; drawn if none is given.
        station: Option<Station>,
    },
    /// `ns:NAME[,address=IP/PREFIX]...[,mtu=OCTETS][,station=XX:XX:XX:XX:XX:XX][,vlan=NUMBER]`: a TAP device
    /// in a network namespace of one's own.
    Namespace {
        /// The interface in there; without a name the kernel chooses one.
        name: String,
        /// The kernel's addresses on it, with the lengths of their prefixes.
        addresses: Vec<(IpAddr, u8)>,
        /// The largest IP packet; 1500 if none is given.
        mtu: Option<u32>,
        /// What our end is.
        end: EthernetEnd,
    },
    /// `udp:ADDRESS:PORT[,peer=INNER@ADDRESS:PORT]...`: bare IPv6 packets in UDP.
    Udp {
        /// Where we are found. Port 0: any.
        bind: SocketAddr,
        /// Peers whose place does not follow from their inner address.
        peers: Vec<Peer>,
    },
    /// `share:NAME[,user=USER]`: no link of one's own, but the adapter that another process shares.
    Share {
        /// The name that it was given there.
        name: String,
        /// Whose process that is, by name or number; without one it is this user's, or else root's.
        user: Option<String>,
    },
}

/// What our end of a link of Ethernet is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EthernetEnd {
    /// Its station address; drawn if none is given.
    pub station: Option<Station>,
    /// The VLAN that its frames are in, 0 to 4094; 0: in none, but each has a tag with a priority. None:
    /// frames have no tags.
    pub vlan: Option<u16>,
}

/// A peer of a UDP link, with an address of its own choice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Peer {
    /// Its address inside.
    pub inner: Ipv6Addr,
    /// Where it is.
    pub place: SocketAddr,
}

/// The station address of a link's end: not a group's, not zero.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Station(pub [u8; 6]);

/// What somebody wrote that names no link.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{text:?} is not a link: {problem}")]
pub struct SpecError {
    /// What it was.
    pub text: String,
    /// What is wrong, and what is expected.
    pub problem: &'static str,
}

const KINDS: &str =
    "expected tap:NAME, packet:INTERFACE, xdp:INTERFACE, ns:NAME, udp:ADDRESS:PORT or share:NAME";
const SHARE: &str = "a shared adapter has a name of 1 to 32 letters, digits, dots, - or _";
const OWNER: &str = "expected user=USER once after the comma: the user who shares the adapter";
const NAME: &str = "the name of an interface has 1 to 15 characters, none of them a space, / or :";
const OPTION: &str = "expected station=XX:XX:XX:XX:XX:XX or vlan=NUMBER once after a comma";
const VLAN: &str = "a VLAN has a number from 1 to 4094; vlan=0 sends priority tags without a VLAN";
const XDP: &str = "expected queue=NUMBER or station=XX:XX:XX:XX:XX:XX after a comma";
const QUEUE: &str = "a queue has a number from 0 to 4095";
const NAMESPACE: &str =
    "expected address=IP/PREFIX, mtu=BYTES, station=XX:XX:XX:XX:XX:XX or vlan=NUMBER after a comma";
const ADDRESS: &str = "an address needs a prefix length, like 10.9.0.1/24 or fd09::1/64";
const MTU: &str = "the MTU is a number from 1280 to 65521";
const STATION: &str = "a station address has six bytes like 02:00:00:00:00:01, and is not a \
    multicast address";
const BIND: &str = "expected an address and a port, like 192.0.2.1:4000 or [2001:db8::1]:4000";
const UNSPECIFIED: &str = "expected the address by which peers reach this host, not a wildcard \
    or multicast address";
const TWICE: &str = "expected each inner address and each outer address of a peer once";
const PEER: &str = "expected peer=INNER@ADDRESS:PORT, like peer=fd00::2@[2001:db8::2]:4000";
const FAMILY: &str = "the outer addresses of peers must have the same IP version as the link";
const DERIVED: &str = "expected a peer's inner address outside of fd51:7069:7075::/48, which is \
    derived from IPv4 addresses";

impl LinkSpec {
    /// The network interface that it names, if any.
    #[must_use]
    pub fn interface(&self) -> Option<&str> {
        match self {
            Self::Tap { name: interface, .. }
            | Self::Packet { interface, .. }
            | Self::Xdp { interface, .. } => Some(interface),
            Self::Namespace { .. } | Self::Udp { .. } | Self::Share { .. } => None,
        }
    }

    /// Notes the interface that the kernel has made, where it was to choose the name.
    pub(crate) fn name_interface(&mut self, interface: &str) {
        if let Self::Tap { name, .. } | Self::Namespace { name, .. } = self {
            interface.clone_into(name);
        }
    }

    /// Whether it is another process's.
    #[must_use]
    pub fn is_shared(&self) -> bool {
        matches!(self, Self::Share { .. })
    }
}

impl FromStr for LinkSpec {
    type Err = SpecError;

    fn from_str(text: &str) -> Result<Self, SpecError> {
        parse(text).map_err(|problem| SpecError { text: text.to_owned(), problem })
    }
}

fn parse(text: &str) -> Result<LinkSpec, &'static str> {
    let (kind, rest) = text.split_once(':').ok_or(KINDS)?;
    let mut parts = rest.split(',');
    let what = parts.next().unwrap_or_default();
    match kind {
        "tap" => {
            let (name, end) = (device(what)?, end_options(parts)?);
            Ok(LinkSpec::Tap { name, end })
        }
        "ns" => namespace(device(what)?, parts),
        "packet" => {
            let interface = interface(what)?;
            Ok(LinkSpec::Packet { interface, end: end_options(parts)? })
        }
        "xdp" => xdp(interface(what)?, parts),
        "udp" => {
            let bind: SocketAddr = what.parse().map_err(|_| BIND)?;
            if bind.ip().is_unspecified() || bind.ip().is_multicast() {
                return Err(UNSPECIFIED);
            }
            let peers: Vec<_> = parts.map(peer).collect::<Result<_, _>>()?;
            if peers.iter().any(|peer| peer.place.is_ipv4() != bind.is_ipv4()) {
                return Err(FAMILY);
            }
            let place = |peer: &Peer| (peer.place.ip(), peer.place.port());
            let same = |a: &Peer, b: &Peer| a.inner == b.inner || place(a) == place(b);
            if (1..peers.len()).any(|at| peers[..at].iter().any(|peer| same(peer, &peers[at]))) {
                return Err(TWICE);
            }
            Ok(LinkSpec::Udp { bind, peers })
        }
        "share" if share::is_name(what) => {
            Ok(LinkSpec::Share { name: what.to_owned(), user: user_option(parts)? })
        }
        "share" => Err(SHARE),
        _ => Err(KINDS),
    }
}

/// The name of an interface, as the kernel allows it.
fn interface(name: &str) -> Result<String, &'static str> {
    let allowed = |c: char| c.is_ascii_graphic() && !matches!(c, '/' | ':' | ',');
    let ok = (1..=MAX_NAME).contains(&name.len()) && name.chars().all(allowed);
    if !ok || matches!(name, "." | "..") {
        return Err(NAME);
    }
    Ok(name.to_owned())
}

/// The name of a device that is made, which the kernel may choose.
fn device(name: &str) -> Result<String, &'static str> {
    if name.is_empty() { Ok(String::new()) } else { interface(name) }
}

/// Who shares an adapter.
fn user_option<'a>(
    mut parts: impl Iterator<Item = &'a str>,
) -> Result<Option<String>, &'static str> {
    let Some(part) = parts.next() else { return Ok(None) };
    let user = part.strip_prefix("user=").filter(|user| !user.is_empty()).ok_or(OWNER)?;
    if parts.next().is_some() || user.contains(char::is_whitespace) {
        return Err(OWNER);
    }
    Ok(Some(user.to_owned()))
}

fn xdp<'a>(
    interface: String,
    parts: impl Iterator<Item = &'a str>,
) -> Result<LinkSpec, &'static str> {
    let (mut queue, mut station) = (None, None);
    for part in parts {
        match part.split_once('=') {
            Some(("queue", text)) if queue.is_none() => {
                let number = text.parse().ok().filter(|queue| *queue <= MAX_QUEUE);
                queue = Some(number.ok_or(QUEUE)?);
            }
            Some(("station", text)) if station.is_none() => station = Some(text.parse()?),
            _ => return Err(XDP),
        }
    }
    Ok(LinkSpec::Xdp { interface, queue: queue.unwrap_or(0), station })
}

fn namespace<'a>(
    name: String,
    parts: impl Iterator<Item = &'a str>,
) -> Result<LinkSpec, &'static str> {
    let (mut addresses, mut mtu, mut end) = (Vec::new(), None, EthernetEnd::default());
    for part in parts {
        match part.split_once('=') {
            Some(("address", text)) => addresses.push(address(text)?),
            Some(("mtu", text)) if mtu.is_none() => {
                let octets = text.parse().ok().filter(|mtu| (1280..=65_521).contains(mtu));
                mtu = Some(octets.ok_or(MTU)?);
            }
            _ if end.read(part)? => {}
            _ => return Err(NAMESPACE),
        }
    }
    Ok(LinkSpec::Namespace { name, addresses, mtu, end })
}

/// An address with the length of its prefix.
fn address(text: &str) -> Result<(IpAddr, u8), &'static str> {
    let (ip, prefix) = text.split_once('/').ok_or(ADDRESS)?;
    let ip: IpAddr = ip.parse().map_err(|_| ADDRESS)?;
    let longest = if ip.is_ipv4() { 32 } else { 128 };
    let prefix = prefix.parse().ok().filter(|prefix| *prefix <= longest).ok_or(ADDRESS)?;
    Ok((ip, prefix))
}

fn end_options<'a>(mut parts: impl Iterator<Item = &'a str>) -> Result<EthernetEnd, &'static str> {
    let mut end = EthernetEnd::default();
    parts.try_for_each(|part| end.read(part)?.then_some(()).ok_or(OPTION))?;
    Ok(end)
}

impl EthernetEnd {
    /// Reads an option; whether it is one of these, given for the first time.
    fn read(&mut self, part: &str) -> Result<bool, &'static str> {
        match part.split_once('=') {
            Some(("station", text)) if self.station.is_none() => self.station = Some(text.parse()?),
            Some(("vlan", text)) if self.vlan.is_none() => {
                let number = text.parse().ok().filter(|number| *number <= tag::MAX_VLAN);
                self.vlan = Some(number.ok_or(VLAN)?);
            }
            _ => return Ok(false),
        }
        Ok(true)
    }
}

impl FromStr for Station {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, &'static str> {
        let octet = |part: &str| {
            let digits =
                (1..=2).contains(&part.len()) && part.chars().all(|c| c.is_ascii_hexdigit());
            if digits { u8::from_str_radix(part, 16).ok() } else { None }
        };
        let octets: Option<Vec<u8>> = text.split(':').map(octet).collect();
        let octets: [u8; 6] = octets.and_then(|o| o.try_into().ok()).ok_or(STATION)?;
        if octets[0] & 1 != 0 || octets == [0; 6] {
            return Err(STATION);
        }
        Ok(Self(octets))
    }
}

fn peer(text: &str) -> Result<Peer, &'static str> {
    let pair = text.strip_prefix("peer=").and_then(|rest| rest.split_once('@')).ok_or(PEER)?;
    let inner: Ipv6Addr = pair.0.parse().map_err(|_| PEER)?;
    let place: SocketAddr = pair.1.parse().map_err(|_| PEER)?;
    if inner.is_multicast() || inner.is_unspecified() || place.port() == 0 {
        return Err(PEER);
    }
    if inner.octets().starts_with(&PREFIX) {
        return Err(DERIVED);
    }
    Ok(Peer { inner, place })
}

impl fmt::Display for LinkSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tap { name, end } => write!(f, "tap:{name}{end}"),
            Self::Packet { interface, end } => write!(f, "packet:{interface}{end}"),
            Self::Xdp { interface, queue, station } => {
                write!(f, "xdp:{interface}")?;
                if *queue > 0 {
                    write!(f, ",queue={queue}")?;
                }
                station.map_or(Ok(()), |station| write!(f, ",station={station}"))
            }
            Self::Namespace { name, addresses, mtu, end } => {
                write!(f, "ns:{name}")?;
                addresses.iter().try_for_each(|(ip, len)| write!(f, ",address={ip}/{len}"))?;
                mtu.map_or(Ok(()), |mtu| write!(f, ",mtu={mtu}"))?;
                write!(f, "{end}")
            }
            Self::Udp { bind, peers } => {
                write!(f, "udp:{bind}")?;
                peers.iter().try_for_each(|p| write!(f, ",peer={}@{}", p.inner, p.place))
            }
            Self::Share { name, user } => {
                write!(f, "share:{name}")?;
                user.as_ref().map_or(Ok(()), |user| write!(f, ",user={user}"))
            }
        }
    }
}

impl fmt::Display for EthernetEnd {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.station.map_or(Ok(()), |station| write!(f, ",station={station}"))?;
        self.vlan.map_or(Ok(()), |vlan| write!(f, ",vlan={vlan}"))
    }
}

impl fmt::Display for Station {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [a, b, c, d, e, g] = self.0;
        write!(f, "{a:02x}:{b:02x}:{c:02x}:{d:02x}:{e:02x}:{g:02x}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_names_a_link_says_it_again() {
        for text in [
            "tap:qp0",
            "tap:",
            "tap:qp%d",
            "tap:qp0,station=02:00:00:00:00:0a",
            "packet:eth1",
            "packet:eth1,station=02:00:00:00:00:0a",
            "packet:eth1,station=02:00:00:00:00:0a,vlan=7",
            "tap:qp0,vlan=0",
            "ns:qp0,address=10.9.0.1/24,vlan=4094",
            "xdp:eth1",
            "xdp:eth1,queue=3,station=02:00:00:00:00:0a",
            "ns:",
            "ns:qp0,address=10.9.0.1/24,address=fd09::1/64,mtu=65521,station=02:00:00:00:00:0a",
            "udp:127.0.0.1:4000",
            "udp:[::1]:0",
            "udp:[2001:db8::1]:4000,peer=fd00::2@[2001:db8::2]:4000,peer=fd00::3@[2001:db8::3]:1",
            "udp:192.0.2.1:4000,peer=fd00::2@192.0.2.2:4000",
            "share:lab-1.a_b",
            "share:lab,user=alice",
        ] {
            let spec: LinkSpec = text.parse().unwrap();
            assert_eq!(spec.to_string(), text);
        }
    }

    #[test]
    fn what_names_no_link_is_refused_with_the_reason() {
        for (text, problem) in [
            ("", KINDS),
            ("qp0", KINDS),
            ("tun:qp0", KINDS),
            ("packet:", NAME),
            ("xdp:", NAME),
            ("xdp:eth1,3", XDP),
            ("xdp:eth1,queue=1,queue=1", XDP),
            ("xdp:eth1,queue=4096", QUEUE),
            ("xdp:eth1,queue=-1", QUEUE),
            ("ns:a/b", NAME),
            ("ns:,10.9.0.1", NAMESPACE),
            ("ns:,mtu=1500,mtu=1500", NAMESPACE),
            ("ns:,address=10.9.0.1", ADDRESS),
            ("ns:,address=10.9.0.1/33", ADDRESS),
            ("ns:,mtu=1279", MTU),
            ("ns:,mtu=65522", MTU),
            ("ns:,station=1", STATION),
            ("tap:a/b", NAME),
            ("tap:..", NAME),
            ("tap:sixteen_letters_", NAME),
            ("tap:qp0,mtu=9000", OPTION),
            ("packet:eth1,vlan=1,vlan=1", OPTION),
            ("packet:eth1,vlan=4095", VLAN),
            ("packet:eth1,vlan=", VLAN),
            ("ns:,vlan=-1", VLAN),
            ("xdp:eth1,vlan=1", XDP),
            ("tap:qp0,station=02:00:00:00:00:01,station=02:00:00:00:00:02", OPTION),
            ("tap:qp0,station=01:00:00:00:00:01", STATION),
            ("tap:qp0,station=00:00:00:00:00:00", STATION),
            ("tap:qp0,station=2:0:0:0:0", STATION),
            ("tap:qp0,station=+2:0:0:0:0:1", STATION),
            ("udp:4000", BIND),
            ("share:", SHARE),
            ("share:a/b", SHARE),
            ("share:,user=alice", SHARE),
            ("share:lab,", OWNER),
            ("share:lab,user=", OWNER),
            ("share:lab,user=a b", OWNER),
            ("share:lab,group=wheel", OWNER),
            ("share:lab,user=alice,user=bob", OWNER),
            ("udp:0.0.0.0:4000", UNSPECIFIED),
            ("udp:[ff02::1]:4000", UNSPECIFIED),
            ("udp:127.0.0.1:1,fd00::2", PEER),
            ("udp:127.0.0.1:1,peer=fd00::2", PEER),
            ("udp:127.0.0.1:1,peer=ff02::2@127.0.0.1:2", PEER),
            ("udp:127.0.0.1:1,peer=fd00::2@127.0.0.1:0", PEER),
            ("udp:127.0.0.1:1,peer=fd00::2@[::1]:2", FAMILY),
            ("udp:127.0.0.1:1,peer=fd00::2@127.0.0.1:2,peer=fd00::2@127.0.0.1:3", TWICE),
            ("udp:127.0.0.1:1,peer=fd00::2@127.0.0.1:2,peer=fd00::3@127.0.0.1:2", TWICE),
            ("udp:127.0.0.1:1,peer=fd51:7069:7075::2@127.0.0.1:2", DERIVED),
        ] {
            let error = text.parse::<LinkSpec>().unwrap_err();
            assert_eq!((error.text.as_str(), error.problem), (text, problem));
        }
    }
}
