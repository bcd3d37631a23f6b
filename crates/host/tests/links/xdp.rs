//! XDP sockets, on one end of a veth pair whose other end is the kernel's.

use std::net::UdpSocket;

use quipu_host::packet::{self, Outgoing, PacketLink};

use super::af_packet::{overflow, pair};
use super::peer;
use super::space::{Offload, drop_rights, inside, ip, offload, wait_until_up};

fn open(spec: &str) -> Box<dyn PacketLink> {
    packet::open(&spec.parse().unwrap()).unwrap()
}

/// Makes a pair, if XDP sockets can be had on its end.
pub fn possible() -> bool {
    pair();
    match packet::open(&"xdp:ours".parse().unwrap()) {
        Ok(_) => true,
        Err(error) => {
            let said = error.to_string();
            assert!(said.contains("packet:ours"), "{said}");
            println!("SKIPPED: {said}");
            false
        }
    }
}

/// A frame of an experimental kind.
fn frame(destination: [u8; 6], mark: u8) -> [u8; 60] {
    let mut frame = [mark; 60];
    frame[..6].copy_from_slice(&destination);
    frame[12..14].copy_from_slice(&[0x88, 0xb5]);
    frame
}

/// The marks of the next `count` such frames.
fn marks(link: &mut dyn PacketLink, count: usize) -> Vec<u8> {
    let mut marks = Vec::new();
    while marks.len() < count {
        marks.extend(peer::next(link, |frame, _| {
            (frame[12..14] == [0x88, 0xb5]).then_some(frame[59])
        }));
    }
    marks
}

#[test]
fn the_kernel_talks_over_an_xdp_socket() {
    if !inside("xdp::the_kernel_talks_over_an_xdp_socket") || !possible() {
        return;
    }
    let mut link = open("xdp:ours");
    let features = link.features();
    assert_eq!((features.mtu, features.interface.as_str()), (1500, "ours"));
    assert!(!features.checksum && features.segment == 0);
    // What a veth's other end leaves undone nobody says here.
    offload("theirs", Offload::Checksum, false);
    peer::set_up("theirs", link.as_ref());
    peer::talk(link.as_mut(), false);
}

#[test]
fn the_kernel_keeps_what_is_not_ours() {
    if !inside("xdp::the_kernel_keeps_what_is_not_ours") || !possible() {
        return;
    }
    let station = [2, 0, 0, 0, 0, 5];
    let mut link = open("xdp:ours,station=02:00:00:00:00:05");
    let mut other = open("packet:theirs,station=02:00:00:00:00:06");
    // Groups come to us as well as to the kernel; others not at all.
    for (destination, mark) in [([2, 0, 0, 0, 0, 4], 1), ([0xff; 6], 2), (station, 3)] {
        peer::put_as_it_is(other.as_mut(), &frame(destination, mark), None, None);
    }
    let mut got = marks(link.as_mut(), 2);
    got.sort_unstable();
    assert_eq!(got, [2, 3]);
    // The kernel finds its neighbour, and talks to it, as if we were not there.
    ip("address add 10.78.0.1/24 dev ours");
    let socket = UdpSocket::bind("10.78.0.1:0").unwrap();
    socket.set_read_timeout(Some(std::time::Duration::from_secs(20))).unwrap();
    let port = socket.local_addr().unwrap().port().to_string();
    let script = format!(
        "while ! ip link show theirs >/dev/null 2>&1; do sleep 0.01; done; \
         ip address add 10.78.0.2/24 dev theirs; ip link set theirs up; \
         for i in $(seq 100); do echo hello > /dev/udp/10.78.0.1/{port}; sleep 0.1; done"
    );
    let mut child =
        std::process::Command::new("unshare").args(["-n", "bash", "-c", &script]).spawn().unwrap();
    drop(other);
    let space = |who: &str| std::fs::read_link(format!("/proc/{who}/ns/net")).unwrap();
    while space("self") == space(&child.id().to_string()) {
        std::thread::yield_now();
    }
    ip(&format!("link set theirs netns {}", child.id()));
    let mut buffer = [0; 100];
    let outcome = socket.recv_from(&mut buffer);
    child.kill().unwrap();
    child.wait().unwrap();
    let (len, from) = outcome.unwrap();
    assert_eq!((&buffer[..len], from.ip().to_string().as_str()), (&b"hello\n"[..], "10.78.0.2"));
}

#[test]
fn a_full_link_takes_nothing_and_loses_nothing() {
    if !inside("xdp::a_full_link_takes_nothing_and_loses_nothing") || !possible() {
        return;
    }
    let mut link = open("xdp:ours");
    let mut other = open("packet:theirs,station=02:00:00:00:00:06");
    let mut taken = 0_usize;
    // The kernel is asked to send when there is no slot left, but takes only some at a time.
    while taken < 512 {
        let slot = link.slot().unwrap();
        assert!(slot.len() >= 1514);
        slot[..60].copy_from_slice(&frame([2, 0, 0, 0, 0, 6], taken as u8));
        link.send(Outgoing { len: 60, ..Outgoing::default() });
        taken += 1;
    }
    let mut got = Vec::new();
    while got.len() < 512 {
        link.flush().unwrap();
        got.extend(marks(other.as_mut(), 1));
    }
    assert_eq!(got, (0..512).map(|mark| mark as u8).collect::<Vec<_>>());
    // Every frame comes back to be used again.
    for mark in 0..=255 {
        peer::put_as_it_is(link.as_mut(), &frame([2, 0, 0, 0, 0, 6], mark), None, None);
        peer::put_as_it_is(other.as_mut(), &frame([0xff; 6], mark), None, None);
        assert_eq!(marks(other.as_mut(), 1), [mark]);
        assert_eq!(marks(link.as_mut(), 1), [mark]);
    }
    assert!(!link.wants_writable());
}

#[test]
fn frames_that_there_is_no_room_for_are_counted() {
    if !inside("xdp::frames_that_there_is_no_room_for_are_counted") || !possible() {
        return;
    }
    let mut link = open("xdp:ours,station=02:00:00:00:00:05");
    let mut other = open("packet:theirs,station=02:00:00:00:00:06");
    overflow(link.as_mut(), other.as_mut());
}

#[test]
fn an_interface_that_is_down_loses_frames() {
    if !inside("xdp::an_interface_that_is_down_loses_frames") || !possible() {
        return;
    }
    let mut link = open("xdp:ours");
    let mut other = open("packet:theirs,station=02:00:00:00:00:06");
    let to = [2, 0, 0, 0, 0, 6];
    for mark in 0..3 {
        ip("link set ours down");
        // More than the ring has places: the link takes them all.
        for _ in 0..2000 {
            peer::put_as_it_is(link.as_mut(), &frame(to, 99), None, None);
        }
        assert!(!link.is_congested());
        ip("link set ours up");
        wait_until_up("ours");
        // The first is what tells it that the interface is up again.
        link.flush().unwrap();
        peer::put_as_it_is(link.as_mut(), &frame(to, mark), None, None);
        let mut came = Vec::new();
        while came.last() != Some(&mark) {
            came.extend(marks(other.as_mut(), 1));
        }
        assert!(came.len() <= 2, "{came:?}");
    }
}

#[test]
fn an_interface_that_is_gone_says_so() {
    if !inside("xdp::an_interface_that_is_gone_says_so") || !possible() {
        return;
    }
    let mut link = open("xdp:ours");
    ip("link set ours down");
    peer::put_as_it_is(link.as_mut(), &[0; 60], None, None);
    link.receive(8, &mut |_| {}).unwrap();
    ip("link delete ours");
    // Anyone who waits is told sooner or later.
    let gone = (0..100).any(|_| {
        peer::wait(link.as_ref(), libc::POLLIN);
        link.receive(8, &mut |_| {}).is_err()
    });
    assert!(gone);
    assert!(link.slot().is_some());
    link.send(Outgoing { len: 60, ..Outgoing::default() });
    assert!(link.flush().is_err());
}

#[test]
fn errors_say_what_to_use_instead() {
    if !inside("xdp::errors_say_what_to_use_instead") || !possible() {
        return;
    }
    let error = |spec: &str| packet::open(&spec.parse().unwrap()).err().unwrap().to_string();
    let said = error("xdp:none");
    assert!(said.contains("give an existing interface"), "{said}");
    let said = error("xdp:lo");
    assert!(said.contains("lo is not an Ethernet interface"), "{said}");
    let said = error("xdp:ours,queue=77");
    assert!(said.contains("give a queue that the interface has"), "{said}");
    let link = open("xdp:ours");
    let said = error("xdp:ours");
    assert!(said.contains("another XDP program or socket uses"), "{said}");
    drop(link);
    drop(open("xdp:ours"));
    drop_rights();
    let said = error("xdp:ours");
    assert!(said.contains("setcap cap_net_raw,cap_net_admin,cap_bpf+ep"), "{said}");
}
