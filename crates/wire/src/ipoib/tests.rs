use super::*;

const LINK: LinkAddress = LinkAddress {
    qpn: 0x48,
    gid: [0xfe, 0x80, 0, 0, 0, 0, 0, 0, 0, 2, 0xc9, 3, 0, 1, 2, 3],
    connects: false,
};

#[test]
fn the_header_says_what_follows() {
    for kind in [Encapsulation::Ipv4, Encapsulation::Ipv6, Encapsulation::Arp] {
        let mut bytes = kind.to_bytes();
        assert_eq!(Encapsulation::parse(&bytes), Ok(kind));
        // RFC 4391 6: the reserved field is ignored.
        bytes[3] = 9;
        assert_eq!(Encapsulation::parse(&bytes), Ok(kind));
    }
    assert_eq!(Encapsulation::Ipv6.to_bytes(), [0x86, 0xdd, 0, 0]);
    assert!(Encapsulation::parse(&[8, 0, 0]).is_err());
    assert!(Encapsulation::parse(&[8, 1, 0, 0]).is_err());
}

#[test]
fn groups_have_the_gids_of_rfc_4391() {
    let gid = |group: &str| Ipv6Addr::from(group_gid(group.parse().unwrap(), 0xffff)).to_string();
    assert_eq!(gid("255.255.255.255"), "ff12:401b:ffff::ffff:ffff");
    assert_eq!(gid("224.0.0.1"), "ff12:401b:ffff::1");
    assert_eq!(gid("239.255.255.255"), "ff12:401b:ffff::fff:ffff");
    assert_eq!(gid("ff02::1"), "ff12:601b:ffff::1");
    assert_eq!(gid("ff02::1:ff00:7"), "ff12:601b:ffff::1:ff00:7");
}

#[test]
fn arp_there_and_back() {
    let asked = Arp {
        operation: Operation::Request,
        sender_link: LINK,
        sender: Ipv4Addr::new(10, 0, 0, 1),
        target_link: [0; 20],
        target: Ipv4Addr::new(10, 0, 0, 2),
    };
    let bytes = asked.to_bytes();
    // RFC 4391 9.2: hardware type 32, lengths 20 and 4; flags, then the number of the queue pair.
    assert_eq!(bytes[..12], [0, 32, 8, 0, 20, 4, 0, 1, 0, 0, 0, 0x48]);
    assert_eq!(bytes[28..32], [10, 0, 0, 1]);
    assert_eq!(bytes[52..], [10, 0, 0, 2]);
    assert_eq!(Arp::parse(&bytes), Ok(asked));
    assert_eq!(Arp::parse(&[&bytes[..], &[0; 9]].concat()), Ok(asked));
    for len in 0..ARP_LEN {
        assert!(Arp::parse(&bytes[..len]).is_err());
    }
    for at in [1, 4, 5, 7] {
        let mut wrong = bytes;
        wrong[at] = 6;
        assert!(Arp::parse(&wrong).is_err(), "{at}");
    }
    // The flags are not part of the number, and only that of RC counts.
    let mut flags = bytes;
    flags[8] = 0x40;
    assert_eq!(Arp::parse(&flags), Ok(asked));
    flags[8] = 0x80;
    let connects = LinkAddress { connects: true, ..LINK };
    let with_flag = Arp { sender_link: connects, ..asked };
    assert_eq!((Arp::parse(&flags), with_flag.to_bytes()), (Ok(with_flag), flags));
    assert!(connects != LINK && connects.is_same_queue_pair(LINK));
}

#[test]
fn private_data_there_and_back() {
    let data = ConnectionData { qpn: 0x12_3456, receive_mtu: 65524 };
    let bytes = data.to_bytes();
    assert_eq!(bytes, [0, 0x12, 0x34, 0x56, 0, 0, 0xff, 0xf4]);
    // They come padded to what a REQ or REP holds.
    let mut padded = [0; 56];
    padded[..8].copy_from_slice(&bytes);
    assert_eq!(ConnectionData::parse(&padded), Ok(data));
    padded[0] = 0xff;
    assert_eq!(ConnectionData::parse(&padded), Ok(data), "the reserved field is ignored");
    for len in 0..ConnectionData::LEN {
        assert!(ConnectionData::parse(&bytes[..len]).is_err());
    }
}

fn discovery() -> (Discovery, Vec<u8>) {
    let asked = Discovery::Solicitation { target: "fd00::2".parse().unwrap(), link: Some(LINK) };
    let (source, group) = ("fd00::1".parse().unwrap(), "ff02::1:ff00:2".parse().unwrap());
    (asked, asked.to_packet(source, group))
}

#[test]
fn discovery_there_and_back() {
    let (asked, packet) = discovery();
    let (message, header) = Discovery::parse(&packet).unwrap();
    assert_eq!((message, header.hop_limit), (asked, 255));
    assert_eq!(packet[64..72], [1, 3, 0, 0, 0, 0, 0, 0x48]);
    assert!(Discovery::is_discovery(&packet));
    let (own, peer) = ("fd00::1".parse().unwrap(), "fd00::2".parse().unwrap());
    for link in [None, Some(LINK)] {
        let answer =
            Discovery::Advertisement { target: peer, solicited: true, overrides: true, link };
        let packet = answer.to_packet(peer, own);
        assert_eq!(Discovery::parse(&packet).unwrap().0, answer);
    }
}

#[test]
fn discovery_that_makes_no_sense_is_refused() {
    let (_, packet) = discovery();
    for len in 0..packet.len() {
        assert!(Discovery::parse(&packet[..len]).is_err(), "{len}");
    }
    for at in 7..packet.len() {
        let mut wrong = packet.clone();
        wrong[at] ^= 1;
        assert!(Discovery::parse(&wrong).is_err(), "byte {at} is covered by a checksum or a rule");
    }
    let group = Discovery::Solicitation { target: "ff02::1".parse().unwrap(), link: None };
    let packet = group.to_packet("fd00::1".parse().unwrap(), "ff02::1".parse().unwrap());
    assert!(Discovery::parse(&packet).is_err());
}

#[test]
fn options_of_length_zero_and_of_other_lengths() {
    assert!(link_option(&[1, 0, 0, 0, 0, 0, 0, 0], 1).is_err());
    assert!(link_option(&[1], 1).is_err());
    assert!(link_option(&[1, 3, 0, 0, 0, 0, 0, 0], 1).is_err());
    // That of Ethernet has 8 bytes: it is none of this link.
    assert_eq!(link_option(&[1, 1, 2, 0, 0, 0, 0, 1], 1), Ok(None));
}

#[test]
fn a_packet_ends_where_its_header_says() {
    let header = ipv4::Repr {
        source: Ipv4Addr::new(10, 0, 0, 1),
        destination: Ipv4Addr::new(10, 0, 0, 2),
        protocol: 17,
        traffic_class: 0,
        hop_limit: 64,
        identification: 0,
        dont_fragment: false,
        more_fragments: false,
        fragment_offset: 0,
        payload_len: 8,
    };
    let mut bytes = [0; 40];
    header.emit(&mut bytes);
    let (source, destination, len) = ends_of(Encapsulation::Ipv4, &bytes).unwrap();
    assert_eq!((source, destination, len), ([10, 0, 0, 1].into(), [10, 0, 0, 2].into(), 28));
    assert!(ends_of(Encapsulation::Ipv4, &bytes[..27]).is_err());
    assert!(ends_of(Encapsulation::Ipv6, &bytes).is_err());
    assert!(ends_of(Encapsulation::Arp, &bytes).is_err());
}
