//! Packet sockets, on one end of a veth pair whose other end is the kernel's.

use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::process::Command;
use std::time::{Duration, Instant};

use quipu_host::packet::{self, Frame, Outgoing, PacketLink};

use super::peer;
use super::space::{Offload, drop_rights, inside, ip, offload, wait_until_up};

fn open(spec: &str) -> Box<dyn PacketLink> {
    packet::open(&spec.parse().unwrap()).unwrap()
}

/// Makes the pair, ours up.
pub fn pair() {
    ip("link add ours type veth peer name theirs");
    ip("link set ours up");
    ip("link set theirs up");
    ["ours", "theirs"].into_iter().for_each(wait_until_up);
}

#[test]
fn the_kernel_talks_over_a_packet_socket() {
    if !inside("af_packet::the_kernel_talks_over_a_packet_socket") {
        return;
    }
    pair();
    let mut link = open("packet:ours");
    let features = link.features().clone();
    assert_eq!((features.mtu, features.interface.as_str()), (1500, "ours"));
    assert!(features.checksum && features.segment > 60_000);
    peer::set_up("theirs", link.as_ref());
    peer::talk(link.as_mut(), true);
    // The kernel has to cut and to compute what we send, before the other end sees it.
    offload("ours", Offload::Checksum, false);
    offload("ours", Offload::Segments, false);
    peer::talk(link.as_mut(), true);
    // The same for what the peer sends.
    offload("theirs", Offload::Checksum, false);
    offload("theirs", Offload::Segments, false);
    peer::talk(link.as_mut(), false);
}

#[test]
fn frames_for_others_and_our_own_are_not_seen() {
    if !inside("af_packet::frames_for_others_and_our_own_are_not_seen") {
        return;
    }
    pair();
    let station = [2, 0, 0, 0, 0, 5];
    let mut link = open("packet:ours,station=02:00:00:00:00:05");
    let mut other = open("packet:theirs,station=02:00:00:00:00:06");
    let to = |destination: [u8; 6], mark: u8| {
        let mut frame = [mark; 60];
        frame[..6].copy_from_slice(&destination);
        // A kind that nobody else uses (IEEE 802, for experiments).
        frame[12..14].copy_from_slice(&[0x88, 0xb5]);
        frame
    };
    // Sent to ourselves it goes out, and does not come back.
    peer::put_as_it_is(link.as_mut(), &to(station, 1), None, None);
    for destination in [[2, 0, 0, 0, 0, 6], [2, 0, 0, 0, 0, 4], [2, 0, 0, 1, 0, 5]] {
        peer::put_as_it_is(other.as_mut(), &to(destination, 2), None, None);
    }
    // With a VLAN's tag, and then for us and for groups.
    let mut tagged = to(station, 3);
    tagged[12..18].copy_from_slice(&[0x81, 0x00, 0xa0, 7, 0x88, 0xb5]);
    peer::put_as_it_is(other.as_mut(), &tagged, None, None);
    // A tag that has a priority only is of no VLAN.
    tagged[14..16].copy_from_slice(&[0xa0, 0]);
    peer::put_as_it_is(other.as_mut(), &tagged, None, None);
    for destination in [station, [0xff; 6], [0x33, 0x33, 0xff, 0, 0, 5]] {
        peer::put_as_it_is(other.as_mut(), &to(destination, 4), None, None);
    }
    let mut marks = Vec::new();
    while marks.len() < 4 {
        // The kernel speaks too, on both ends.
        marks.extend(peer::next(link.as_mut(), |frame, _| {
            (frame[12..14] == [0x88, 0xb5] || frame[12..14] == [0x81, 0]).then_some(frame[20])
        }));
    }
    assert_eq!(marks, [3, 4, 4, 4]);
}

#[test]
fn the_kernel_takes_frames_with_a_priority() {
    if !inside("af_packet::the_kernel_takes_frames_with_a_priority") {
        return;
    }
    pair();
    let mut link = open("packet:ours,vlan=0");
    assert_eq!(link.features().vlan, Some(0));
    peer::set_up("theirs", link.as_ref());
    peer::talk(link.as_mut(), true);
    // The kernel has to cut and to compute what we send.
    offload("ours", Offload::Checksum, false);
    offload("ours", Offload::Segments, false);
    peer::talk(link.as_mut(), true);
}

#[test]
fn frames_have_the_tag_of_their_vlan() {
    if !inside("af_packet::frames_have_the_tag_of_their_vlan") {
        return;
    }
    pair();
    ["ours", "theirs"].into_iter().for_each(|name| ip(&format!("link set {name} mtu 9000")));
    let mut link = open("packet:ours,station=02:00:00:00:00:05,vlan=7");
    let [mut same, mut other, mut none] = [",vlan=7", ",vlan=8", ""]
        .map(|vlan| open(&format!("packet:theirs,station=02:00:00:00:00:06{vlan}")));
    // Of all of them only the frames of the VLAN come, with the priority that they were sent with. The
    // longest does not fit into the ring.
    for (len, mark) in [(60, 0), (9014, 1), (60, 2)] {
        for sender in [&mut other, &mut none, &mut same] {
            peer::put_as_it_is(sender.as_mut(), &marked(len, mark), None, None);
        }
        let [frame] = tagged(link.as_mut()).try_into().unwrap();
        assert_eq!(frame[12..18], [0x81, 0, peer::PRIORITY << 5, 0, 0x88, 0xb5]);
        assert_eq!((frame[..12].to_vec(), frame[16..].to_vec()), {
            let sent = marked(len, mark);
            (sent[..12].to_vec(), sent[12..].to_vec())
        });
    }
    // Nor does anybody else see its frames.
    let mut frame = marked(60, 3);
    frame[..12].rotate_left(6);
    peer::put_as_it_is(link.as_mut(), &frame, None, None);
    assert_eq!(tagged(same.as_mut()).len(), 1);
    for others in [&mut other, &mut none] {
        let each = &mut |frame: &Frame<'_>| assert_ne!(frame.bytes[5], 6, "{:x?}", frame.bytes);
        others.receive(64, each).unwrap();
    }
}

/// The next frames that have a tag and are of a kind that nobody else uses.
fn tagged(link: &mut dyn PacketLink) -> Vec<Vec<u8>> {
    peer::next(link, |frame, _| (frame[16..18] == [0x88, 0xb5]).then(|| frame.to_vec()))
}

#[test]
fn an_interface_that_is_down_loses_frames_and_one_that_is_gone_says_so() {
    let name = "af_packet::an_interface_that_is_down_loses_frames_and_one_that_is_gone_says_so";
    if !inside(name) {
        return;
    }
    pair();
    let mut link = open("packet:ours");
    ip("link set ours down");
    for _ in 0..100 {
        peer::put_as_it_is(link.as_mut(), &[0; 60], None, None);
    }
    assert!(!link.wants_writable());
    link.receive(8, &mut |_| {}).unwrap();
    ip("link set ours up");
    wait_until_up("ours");
    // Too long for the interface: refused for good.
    peer::put_as_it_is(link.as_mut(), &[0; 2000], None, None);
    assert!(!link.wants_writable());
    ip("link delete ours");
    // Frames that the kernel sent before are received first, and it is not asked each time.
    let mut receives = (0..10_000).map(|_| link.receive(8, &mut |_| {}));
    assert!(receives.any(|received| received.is_err()));
    assert!(link.slot().is_some());
    link.send(Outgoing { len: 60, ..Outgoing::default() });
    assert!(link.flush().is_err());
}

#[test]
fn a_full_link_takes_nothing_and_loses_nothing() {
    if !inside("af_packet::a_full_link_takes_nothing_and_loses_nothing") {
        return;
    }
    pair();
    let mut link = open("packet:ours");
    let mut other = open("packet:theirs,station=02:00:00:00:00:06");
    let mut taken = 0;
    while let Some(slot) = link.slot() {
        slot[..60].fill(taken);
        slot[..14].copy_from_slice(&[2, 0, 0, 0, 0, 6, 2, 0, 0, 0, 0, 5, 0x88, 0xb5]);
        link.send(Outgoing { len: 60, ..Outgoing::default() });
        taken += 1;
    }
    assert!(taken >= 16 && link.wants_writable());
    link.flush().unwrap();
    assert!(!link.wants_writable() && link.slot().is_some());
    let mut marks = Vec::new();
    while marks.len() < usize::from(taken) {
        marks.extend(peer::next(other.as_mut(), |frame, _| {
            (frame[12..14] == [0x88, 0xb5]).then_some(frame[59])
        }));
    }
    assert_eq!(marks, (0..taken).collect::<Vec<_>>());
}

/// Sends more to `link`, whose station ends in 5, than it has room for: what it does not hand over it counts.
pub fn overflow(link: &mut dyn PacketLink, other: &mut dyn PacketLink) {
    const SENT: u64 = 10_000;
    let mut frame = [7; 60];
    frame[..14].copy_from_slice(&[2, 0, 0, 0, 0, 5, 2, 0, 0, 0, 0, 6, 0x88, 0xb5]);
    for _ in 0..SENT {
        peer::put_as_it_is(other, &frame, None, None);
    }
    let (mut came, mut misses) = (0, 0);
    while misses < 1000 {
        let each = &mut |frame: &Frame<'_>| came += u64::from(frame.bytes[12..14] == [0x88, 0xb5]);
        misses = if link.receive(64, each).unwrap() == 0 { misses + 1 } else { 0 };
    }
    let missing = SENT - came;
    assert!(came > 0 && missing > 0, "{came} came");
    // The kernel speaks too, now and then.
    let lost = link.lost();
    assert!((missing..missing + 50).contains(&lost), "{lost} of {missing}");
    assert_eq!(link.lost(), lost, "they are not forgotten");
}

#[test]
fn frames_that_there_is_no_room_for_are_counted() {
    if !inside("af_packet::frames_that_there_is_no_room_for_are_counted") {
        return;
    }
    pair();
    let mut link = open("packet:ours,station=02:00:00:00:00:05");
    let mut other = open("packet:theirs,station=02:00:00:00:00:06");
    overflow(link.as_mut(), other.as_mut());
}

#[test]
fn errors_say_what_to_do() {
    if !inside("af_packet::errors_say_what_to_do") {
        return;
    }
    let error = |spec: &str| packet::open(&spec.parse().unwrap()).err().unwrap().to_string();
    let said = error("packet:none");
    assert!(said.contains("packet:none") && said.contains("give an existing interface"), "{said}");
    let said = error("packet:lo");
    assert!(said.contains("lo is not an Ethernet interface"), "{said}");
    pair();
    ip("link set ours address 02:00:00:00:00:05");
    let said = error("packet:ours,station=02:00:00:00:00:05");
    assert!(said.contains("the kernel has this station address"), "{said}");
    ip("link set ours mtu 1279");
    let said = error("packet:ours");
    assert!(said.contains("1279 bytes") && said.contains("ip link set ours mtu 1280"), "{said}");
    drop_rights();
    let said = error("packet:ours");
    assert!(said.contains("cap_net_raw"), "{said}");
}

#[test]
fn a_frame_that_the_interface_always_drops_does_not_stay_for_ever() {
    if !inside("af_packet::a_frame_that_the_interface_always_drops_does_not_stay_for_ever") {
        return;
    }
    pair();
    let [mut ours, mut theirs] = open_both();
    if !try_tc("qdisc add dev theirs root pfifo limit 0") {
        println!("SKIPPED: this kernel has no queue without room");
        return;
    }
    let deadline = Instant::now() + Duration::from_secs(20);
    for mark in 0..100 {
        peer::put_as_it_is(theirs.as_mut(), &marked(60, mark), None, None);
        while theirs.is_congested() {
            assert!(Instant::now() < deadline, "the link stays full");
            std::thread::sleep(Duration::from_millis(1));
            theirs.flush().unwrap();
        }
    }
    assert_eq!(theirs.lost(), 100);
    assert!(try_tc("qdisc del dev theirs root"));
    peer::put_as_it_is(theirs.as_mut(), &marked(60, 100), None, None);
    assert_eq!(marks_until(ours.as_mut(), 100), [(60, 100)]);
}

#[test]
fn a_slow_interface_is_waited_for() {
    if !inside("af_packet::a_slow_interface_is_waited_for") {
        return;
    }
    pair();
    let [mut ours, mut theirs] = open_both();
    if !try_tc("qdisc add dev theirs root tbf rate 1mbit burst 4kb limit 4kb") {
        println!("SKIPPED: this kernel has no shaper");
        return;
    }
    let deadline = Instant::now() + Duration::from_secs(60);
    for mark in 0..60 {
        peer::put_as_it_is(theirs.as_mut(), &marked(1514, mark), None, None);
        while theirs.is_congested() {
            assert!(Instant::now() < deadline, "the link stays full");
            std::thread::sleep(Duration::from_millis(1));
            theirs.flush().unwrap();
        }
    }
    let all: Vec<_> = (0..60).map(|mark| (1514, mark)).collect();
    assert_eq!(marks_until(ours.as_mut(), 59), all);
    assert_eq!(theirs.lost(), 0);
}

/// Sends a train of segments to the station that ends in 5, of more than an IP packet can say to be long, as
/// kernels do that were told to (BIG TCP).
fn send_long_train(interface: &std::ffi::CStr) {
    let mut message = vec![0; 10 + 14 + 40 + 20 + 100_000];
    // struct virtio_net_hdr: a sum to be filled in, segments of TCP over IPv6; octets of headers, of
    // segments; where the sum is of, and where in that it stands.
    message[..2].copy_from_slice(&[1, 4]);
    for (at, word) in [(2, 74_u16), (4, 1400), (6, 54), (8, 16)] {
        message[at..at + 2].copy_from_slice(&word.to_ne_bytes());
    }
    let frame = &mut message[10..];
    frame[..14].copy_from_slice(&[2, 0, 0, 0, 0, 5, 2, 0, 0, 0, 0, 6, 0x86, 0xdd]);
    (frame[14], frame[20], frame[21], frame[54 + 12]) = (0x60, 6, 64, 5 << 4);
    // SAFETY: takes integers only.
    let fd = unsafe { libc::socket(libc::AF_PACKET, libc::SOCK_RAW | libc::SOCK_CLOEXEC, 0) };
    assert!(fd >= 0, "{}", std::io::Error::last_os_error());
    // SAFETY: the descriptor is new, and nobody else's.
    let fd = unsafe { OwnedFd::from_raw_fd(fd) };
    let one: libc::c_int = 1;
    // SAFETY: plain data, for which all zeroes is a valid value.
    let mut to: libc::sockaddr_ll = unsafe { std::mem::zeroed() };
    to.sll_family = libc::AF_PACKET as u16;
    to.sll_protocol = (libc::ETH_P_IPV6 as u16).to_be();
    // SAFETY: the name ends with a zero.
    to.sll_ifindex = unsafe { libc::if_nametoindex(interface.as_ptr()) } as i32;
    // SAFETY: the kernel reads an integer, an address and a message from live variables of these lengths.
    let sent = unsafe {
        let (socket, option) = (fd.as_raw_fd(), (&raw const one).cast());
        libc::setsockopt(socket, libc::SOL_PACKET, libc::PACKET_VNET_HDR, option, 4);
        let (to, len) = ((&raw const to).cast(), size_of_val(&to) as u32);
        libc::sendto(socket, message.as_ptr().cast(), message.len(), 0, to, len)
    };
    assert_eq!(sent, message.len() as isize, "{}", std::io::Error::last_os_error());
}

#[test]
fn trains_that_are_too_long_are_counted_as_lost() {
    if !inside("af_packet::trains_that_are_too_long_are_counted_as_lost") {
        return;
    }
    pair();
    let mut big = Command::new("ip");
    let big = big.args(["link", "set", "theirs", "gso_max_size", "150000"]).status();
    if !big.is_ok_and(|status| status.success()) {
        println!("SKIPPED: this kernel has no longer trains");
        return;
    }
    let [mut ours, mut theirs] = open_both();
    for mark in 0..3 {
        send_long_train(c"theirs");
        peer::put_as_it_is(theirs.as_mut(), &marked(60, mark), None, None);
        assert_eq!(marks_until(ours.as_mut(), mark), [(60, mark)]);
        assert_eq!(ours.lost(), u64::from(mark) + 1);
    }
}

/// Whether `tc` does this.
fn try_tc(arguments: &str) -> bool {
    Command::new("tc").args(arguments.split_whitespace()).status().is_ok_and(|it| it.success())
}

/// A frame of `len` octets between the two links of [`open_both`], of a kind that nobody else uses.
fn marked(len: usize, mark: u16) -> Vec<u8> {
    let mut frame = vec![0; len];
    frame[..14].copy_from_slice(&[2, 0, 0, 0, 0, 5, 2, 0, 0, 0, 0, 6, 0x88, 0xb5]);
    frame[14..16].copy_from_slice(&mark.to_be_bytes());
    frame[len - 2..].copy_from_slice(&mark.to_be_bytes());
    frame
}

/// The marks of what has come, if their frames are whole; waits for the last of them.
fn marks_until(link: &mut dyn PacketLink, last: u16) -> Vec<(usize, u16)> {
    let mut marks = Vec::new();
    while marks.last().is_none_or(|&(_, mark)| mark != last) {
        marks.extend(peer::next(link, |frame, _| {
            let ours = frame[12..14] == [0x88, 0xb5];
            let end = frame.len().checked_sub(2)?;
            (ours && frame[14..16] == frame[end..])
                .then(|| (frame.len(), u16::from_be_bytes([frame[14], frame[15]])))
        }));
    }
    marks
}

fn open_both() -> [Box<dyn PacketLink>; 2] {
    let ours = open("packet:ours,station=02:00:00:00:00:05");
    [ours, open("packet:theirs,station=02:00:00:00:00:06")]
}

#[test]
fn short_and_long_frames_keep_their_order() {
    if !inside("af_packet::short_and_long_frames_keep_their_order") {
        return;
    }
    pair();
    ["ours", "theirs"].into_iter().for_each(|name| ip(&format!("link set {name} mtu 9000")));
    let [mut ours, mut theirs] = open_both();
    // Around what fits into a slot of the ring, and far from it.
    let lens = [60, 9014, 1971, 1972, 1973, 1974, 9000, 9014, 60, 60, 4000];
    let mut sent = Vec::new();
    for round in 0..8 {
        for (mark, len) in (round * 16..).zip(lens) {
            peer::put_as_it_is(theirs.as_mut(), &marked(len, mark), None, None);
            sent.push((len, mark));
        }
        let last = sent[sent.len() - 1].1;
        let from = sent.len() - lens.len();
        assert_eq!(marks_until(ours.as_mut(), last), sent[from..]);
    }
}

#[test]
fn what_comes_while_nobody_looks_is_kept_up_to_a_bound() {
    if !inside("af_packet::what_comes_while_nobody_looks_is_kept_up_to_a_bound") {
        return;
    }
    /// More than there is room for.
    const MANY: u16 = 5000;
    pair();
    ["ours", "theirs"].into_iter().for_each(|name| ip(&format!("link set {name} mtu 9000")));
    let [mut ours, mut theirs] = open_both();
    for len in [60, 9000] {
        for round in 0..3 {
            let first = round * MANY;
            for mark in first..first + MANY - 1 {
                peer::put_as_it_is(theirs.as_mut(), &marked(len, mark), None, None);
            }
            // Taken a few at a time; then what comes is heard again.
            let mut marks = Vec::new();
            while ours
                .receive(7, &mut |frame| {
                    if frame.bytes[12..14] == [0x88, 0xb5] {
                        marks.push(u16::from_be_bytes([frame.bytes[14], frame.bytes[15]]));
                    }
                })
                .unwrap()
                > 0
            {}
            assert!(marks.len() < usize::from(MANY) - 1 && marks.len() >= 8, "{}", marks.len());
            assert!(
                marks.iter().copied().eq(first..first + marks.len() as u16),
                "the first of them"
            );
            peer::put_as_it_is(theirs.as_mut(), &marked(len, first + MANY - 1), None, None);
            assert_eq!(marks_until(ours.as_mut(), first + MANY - 1), [(len, first + MANY - 1)]);
        }
    }
}

#[test]
fn an_interface_that_goes_down_and_up_is_heard_of_once_each_time() {
    if !inside("af_packet::an_interface_that_goes_down_and_up_is_heard_of_once_each_time") {
        return;
    }
    pair();
    let [mut ours, mut theirs] = open_both();
    for mark in 0..3 {
        ip("link set ours down");
        // Looks alone find it out, too.
        while !ours.is_down() {
            ours.receive(8, &mut |_| {}).unwrap();
        }
        assert!(!ours.take_failure().unwrap());
        ip("link set ours up");
        wait_until_up("ours");
        peer::put_as_it_is(theirs.as_mut(), &marked(60, mark), None, None);
        assert_eq!(marks_until(ours.as_mut(), mark), [(60, mark)]);
        assert!(!ours.is_down());
    }
    // A frame that came before it went down says nothing of it.
    peer::put_as_it_is(theirs.as_mut(), &marked(60, 3), None, None);
    ip("link set ours down");
    assert!(ours.take_failure().unwrap() && ours.is_down());
    assert_eq!(marks_until(ours.as_mut(), 3), [(60, 3)]);
    assert!(ours.is_down());
    ip("link delete ours");
    assert!(ours.receive(8, &mut |_| {}).is_err());
}
