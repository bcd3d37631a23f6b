//! TAP devices.

use quipu_host::packet::interface::{Setup, set_up};
use quipu_host::packet::{self, PacketLink};

use super::peer;
use super::space::{drop_rights, inside, ip};

fn open(spec: &str) -> Box<dyn PacketLink> {
    packet::open(&spec.parse().unwrap()).unwrap()
}

/// Whether TAP devices can be made here.
pub fn possible() -> bool {
    let possible = std::fs::OpenOptions::new().read(true).write(true).open("/dev/net/tun").is_ok();
    if !possible {
        println!("SKIPPED: no /dev/net/tun here");
    }
    possible
}

#[test]
fn the_kernel_talks_over_a_tap_device() {
    if !inside("tap::the_kernel_talks_over_a_tap_device") || !possible() {
        return;
    }
    let mut link = open("tap:qp0");
    let features = link.features().clone();
    assert_eq!((features.mtu, features.interface.as_str()), (1500, "qp0"));
    assert!(features.checksum && features.segment > 60_000);
    peer::set_up("qp0", link.as_ref());
    peer::talk(link.as_mut(), true);
}

#[test]
fn the_kernel_takes_frames_with_a_priority() {
    if !inside("tap::the_kernel_takes_frames_with_a_priority") || !possible() {
        return;
    }
    let mut link = open("tap:qp0,vlan=0");
    peer::set_up("qp0", link.as_ref());
    peer::talk(link.as_mut(), true);
}

#[test]
fn the_kernels_side_is_set_up() {
    if !inside("tap::the_kernels_side_is_set_up") || !possible() {
        return;
    }
    let name = packet::keep("qp%d", 0).unwrap();
    assert_eq!(name, "qp0");
    let addresses =
        [("10.1.2.3", 24), ("fd01::3", 64)].map(|(ip, prefix)| (ip.parse().unwrap(), prefix));
    let setup = Setup { mtu: Some(9000), addresses: addresses.to_vec() };
    set_up(&name, &setup).unwrap();
    set_up(&name, &setup).unwrap();
    let link = open("tap:qp0,station=02:00:00:00:00:09");
    assert_eq!(link.features().mtu, 9000);
    assert_eq!(link.features().hardware, Some([2, 0, 0, 0, 0, 9]));
    // Addresses that may be used at once: nobody is asked first.
    for (ip, _) in addresses {
        std::net::UdpSocket::bind((ip, 0)).unwrap();
    }
    let busy = packet::open(&"tap:qp0".parse().unwrap()).err().unwrap().to_string();
    assert!(busy.contains("another process uses it"), "{busy}");
    drop(link);
    packet::remove(&name).unwrap();
    assert_eq!(packet::remove(&name).unwrap_err().raw_os_error(), Some(libc::ENODEV));
    assert!(set_up(&name, &setup).is_err());
}

#[test]
fn an_interface_that_is_down_loses_frames_and_one_that_is_gone_says_so() {
    let name = "tap::an_interface_that_is_down_loses_frames_and_one_that_is_gone_says_so";
    if !inside(name) || !possible() {
        return;
    }
    let mut link = open("tap:");
    assert_eq!(link.features().interface, "tap0");
    // As if the cable were out.
    for _ in 0..200 {
        peer::put_as_it_is(link.as_mut(), &[0; 60], None, None);
    }
    assert!(!link.wants_writable());
    assert_eq!(link.receive(8, &mut |_| panic!("nobody sends")).unwrap(), 0);
    // Shorter than Ethernet: refused for good.
    ip("link set tap0 up");
    peer::put_as_it_is(link.as_mut(), &[0; 10], None, None);
    assert!(!link.wants_writable());
    ip("link delete tap0");
    assert!(link.receive(8, &mut |_| {}).is_err());
    let room = link.slot().unwrap();
    assert_eq!(room.len(), 65_549);
    link.send(packet::Outgoing { len: 60, ..Default::default() });
    assert!(link.flush().is_err());
}

#[test]
fn without_rights_the_error_says_what_else_there_is() {
    let name = "tap::without_rights_the_error_says_what_else_there_is";
    if !inside(name) || !possible() {
        return;
    }
    let error = |spec: &str| packet::open(&spec.parse().unwrap()).err().unwrap().to_string();
    // An interface that is no TAP device.
    let said = error("tap:lo");
    assert!(said.starts_with("cannot open the link tap:lo: attaching"), "{said}");
    drop_rights();
    let said = error("tap:qp0");
    assert!(said.contains("ip tuntap add dev qp0 mode tap vnet_hdr user YOU"), "{said}");
    assert!(packet::keep("qp0", 0).is_err());
    assert!(set_up("lo", &Setup { mtu: Some(1500), ..Setup::default() }).is_err());
}
