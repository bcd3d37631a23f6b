//! TAP devices in namespaces of a user's own.

use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::process::CommandExt as _;
use std::process::Command;

use quipu_host::packet::{self, EthernetEnd, LinkSpec, PacketLink};

use super::peer;
use super::space::inside;
use super::tap;

/// A number that no account has.
const SOMEBODY: u32 = 61_003;
/// Set for the run as somebody.
const AS_SOMEBODY: &str = "AS_SOMEBODY";

fn open(spec: &str) -> Box<dyn PacketLink> {
    packet::open(&spec.parse().unwrap()).unwrap()
}

/// Whether a user may make user namespaces here, and TAP devices in them.
fn possible() -> bool {
    let possible = Command::new("unshare").args(["-rn", "true"]).output();
    let possible = possible.is_ok_and(|output| output.status.success());
    if !possible {
        println!("SKIPPED: no user namespaces here");
    }
    possible && tap::possible()
}

#[test]
fn the_kernel_talks_from_the_namespace() {
    if !inside("namespace::the_kernel_talks_from_the_namespace") || !possible() {
        return;
    }
    let mut link = open("ns:qp0");
    assert_eq!((link.features().mtu, link.features().interface.as_str()), (1500, "qp0"));
    // This thread goes there; the link does not care.
    let path = link.features().enter[3].strip_prefix("--net=").unwrap().to_owned();
    let net = File::open(path).unwrap();
    // SAFETY: takes integers.
    let done = unsafe { libc::setns(net.as_raw_fd(), libc::CLONE_NEWNET) };
    assert_eq!(done, 0, "{}", std::io::Error::last_os_error());
    peer::set_up("qp0", link.as_ref());
    peer::talk(link.as_mut(), true);
}

#[test]
fn somebody_without_rights_gets_a_device_and_enters() {
    let name = "namespace::somebody_without_rights_gets_a_device_and_enters";
    if std::env::var_os(AS_SOMEBODY).is_some() {
        return somebody();
    }
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", name, "--nocapture"]).env(AS_SOMEBODY, "1").current_dir("/");
    // SAFETY: takes nothing and cannot fail.
    if unsafe { libc::geteuid() } == 0 {
        command.uid(SOMEBODY).gid(SOMEBODY);
    }
    let output = match command.output() {
        Ok(output) => output,
        Err(error) if error.kind() == std::io::ErrorKind::PermissionDenied => {
            println!("SKIPPED: other users may not run this file");
            return;
        }
        Err(error) => panic!("{error}"),
    };
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{said}{}", String::from_utf8_lossy(&output.stderr));
    if let Some(line) = said.lines().find(|line| line.starts_with("SKIPPED")) {
        println!("{line}");
    }
}

fn somebody() {
    if !possible() {
        return;
    }
    let link = open("ns:,address=10.9.0.1/24,address=fd09::1/64,mtu=65521");
    let features = link.features();
    assert_eq!((features.mtu, features.interface.as_str()), (65_521, "tap0"));
    let words = &features.enter;
    let inside = |command: &str| {
        let mut nsenter = Command::new(&words[0]);
        let output = nsenter.args(&words[1..]).args(command.split(' ')).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8_lossy(&output.stdout).into_owned()
    };
    let said = inside("ip -o address");
    for address in ["10.9.0.1/24", "fd09::1/64", "127.0.0.1/8"] {
        assert!(said.contains(address), "{said}");
    }
    assert!(inside("ip -o link show tap0").contains("mtu 65521"));
    assert_eq!(inside("id -u"), "0\n");
    // The child has ended, and left nothing to wait for.
    // SAFETY: a null status is allowed.
    let left = unsafe { libc::waitpid(-1, std::ptr::null_mut(), libc::WNOHANG | libc::__WALL) };
    assert_eq!(left, -1);
    // The namespace goes with the link.
    let words = words.clone();
    drop(link);
    let output = Command::new(&words[0]).args(&words[1..]).arg("true").output().unwrap();
    assert!(!output.status.success());
    // No text says so much, but a program may.
    let (name, addresses) = Default::default();
    let end = EthernetEnd::default();
    let wide = LinkSpec::Namespace { name, addresses, mtu: Some(65_535), end };
    let said = packet::open(&wide).err().unwrap().to_string();
    assert!(said.contains("setting up the network device in the user namespace"), "{said}");
    assert!(said.contains("choose an MTU"), "{said}");
}
