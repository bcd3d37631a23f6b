//! `quipu nbd attach`: a disk as a file, and file systems on it.

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use super::tls::certificates;
use super::{Folder, Program, Server, content, is_there, needs, run};

/// A disk that is attached until the end of the test.
pub(super) struct Attached {
    process: Child,
    folder: String,
}

impl Attached {
    /// `None` where FUSE is not allowed.
    pub(super) fn new(folder: &Folder, arguments: &[&str]) -> Option<Self> {
        if !needs::met(Path::new("/dev/fuse").exists(), "fuse3 (and /dev/fuse)") {
            return None;
        }
        let at = folder.file("mount");
        fs::create_dir_all(&at).unwrap();
        let mut process = Command::new(env!("CARGO_BIN_EXE_quipu"))
            .args(["nbd", "attach"])
            .args(arguments)
            .arg(&at)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        BufReader::new(process.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
        assert!(line.contains("attached"), "{line}");
        Some(Self { process, folder: at })
    }

    pub(super) fn file(&self) -> String {
        format!("{}/nbd", self.folder)
    }

    /// Unmounts, after which the process ends.
    pub(super) fn end(mut self) {
        run("umount", &[&self.folder]);
        assert!(self.process.wait().unwrap().success());
    }
}

impl Drop for Attached {
    fn drop(&mut self) {
        if self.process.try_wait().unwrap().is_none() {
            let _ = Command::new("umount").args(["-l", &self.folder]).output();
            let _ = self.process.kill();
            let _ = self.process.wait();
        }
    }
}

fn fio(file: &str, size: &str) {
    let file = format!("--filename={file}");
    let size = format!("--size={size}");
    run(
        "fio",
        &[
            "--name=t",
            "--rw=randrw",
            "--bsrange=512-256k",
            "--verify=crc32c",
            "--verify_state_save=0",
            "--fsync=50",
            "--randseed=7",
            &file,
            &size,
        ],
    );
}

/// How many requests a server that nbdkit has logged had at a time.
fn most_at_a_time(log: &str) -> usize {
    let (mut now, mut most) = (0_usize, 0);
    for line in log.lines() {
        if line.contains(" Read id=") {
            now += 1;
        } else if line.contains(" ...Read id=") {
            now = now.saturating_sub(1);
        }
        most = most.max(now);
    }
    most
}

#[test]
fn many_requests_are_under_way_at_a_time() {
    if !is_there("nbdkit", "nbdkit") || !is_there("fio", "fio") {
        return;
    }
    let folder = Folder::new("depth");
    let (socket, log) = (folder.file("socket"), folder.file("log"));
    let file = format!("logfile={log}");
    let server = Command::new("nbdkit")
        .args(["-f", "-U", &socket, "--filter=log", "--filter=delay", "memory", "32M"])
        .args(["rdelay=20ms", &file])
        .spawn()
        .unwrap();
    let server = Program(server);
    let begun = Instant::now();
    while !Path::new(&socket).exists() && begun.elapsed().as_secs() < 20 {
        std::thread::sleep(Duration::from_millis(20));
    }
    let uri = format!("nbd+unix:///?socket={socket}");
    // Several requests of a program, and those of the kernel that reads ahead for one that makes one at
    // a time.
    for (arguments, engine, least) in [
        (&[][..], &["--ioengine=libaio", "--iodepth=16", "--direct=1"][..], 8),
        (&["--cache"], &["--ioengine=psync"], 2),
    ] {
        fs::write(&log, "").unwrap();
        let Some(attached) = Attached::new(&folder, &[arguments, &[&uri]].concat()) else { return };
        let name = format!("--filename={}", attached.file());
        let all = ["--name=t", "--rw=read", "--bs=64k", "--size=8M", &name];
        run("fio", &[&all[..], engine].concat());
        attached.end();
        let most = most_at_a_time(&fs::read_to_string(&log).unwrap());
        assert!(most >= least, "{arguments:?}: {most}");
    }
    drop(server);
}

/// Random requests of all lengths, 32 at a time, each of which is read again.
fn verify(attached: &Attached) {
    let file = format!("--filename={}", attached.file());
    let all = ["--name=t", "--rw=randrw", "--bsrange=512-512k", "--size=16M", "--direct=1", &file];
    let depth = ["--ioengine=libaio", "--iodepth=32", "--verify=crc32c", "--verify_state_save=0"];
    run("fio", &[&all[..], &depth].concat());
}

#[test]
fn all_transports_carry_many_requests_at_a_time() {
    if !is_there("fio", "fio") || !is_there("openssl", "openssl") {
        return;
    }
    let folder = Folder::new("transports");
    let pki = certificates(&folder);
    let (chain, key) = (format!("{pki}/server-cert.pem"), format!("{pki}/server-key.pem"));
    let tls = ["--tls-certificate", &chain, "--tls-key", &key];
    let link = ["--link", "udp:127.0.0.1:0"];
    let disk = ["--memory", "16M"];
    for (serve, attach, query) in [
        (&tls[..], &[][..], format!("?tls-certificates={pki}")),
        (&["--rdma"], &[], String::new()),
        (&[&["--qpip"][..], &link].concat(), &link, String::new()),
    ] {
        let server = Server::tcp(&[&disk, serve].concat());
        let uri = server.uri.clone() + &query;
        let Some(attached) = Attached::new(&folder, &[attach, &[&uri]].concat()) else { return };
        verify(&attached);
        attached.end();
    }
}

fn is_root() -> bool {
    run("id", &["-u"]).trim() == "0"
}

#[test]
fn an_attached_disk_is_a_file() {
    let folder = Folder::new("attach");
    let disk = folder.file("disk");
    fs::write(&disk, content(3 << 20)).unwrap();
    let server = Server::tcp(&["--rdma", &disk]);
    let Some(attached) = Attached::new(&folder, &[&server.uri]) else { return };
    assert!(fs::read(attached.file()).unwrap() == content(3 << 20));
    let mut file = fs::File::options().write(true).open(attached.file()).unwrap();
    file.write_all(&[7; 100_000]).unwrap();
    file.sync_all().unwrap();
    assert!(file.set_len(5).is_err());
    drop(file);
    assert_eq!(
        fs::read(&disk).unwrap()[..100_001],
        [&[7; 100_000][..], &content(100_001)[100_000..]].concat()
    );
    let names: Vec<_> =
        fs::read_dir(&attached.folder).unwrap().map(|e| e.unwrap().file_name()).collect();
    assert_eq!(names, ["nbd"]);
    if is_there("fio", "fio") {
        fio(&attached.file(), "3M");
    }
    attached.end();
}

#[test]
fn ext2_on_an_attached_disk_is_sound_after_random_writes() {
    if !is_there("mke2fs", "e2fsprogs") || !is_there("fio", "fio") || !is_root() {
        return;
    }
    // By the kernel's pages of the file, and by a block device with many requests under way.
    for (transport, attach, direct) in [
        (&[][..], &[][..], "off"),
        (&[], &[], "on"),
        (&[], &["--cache"], "off"),
        (&["--rdma"], &[], "off"),
        (&["--rdma"], &[], "on"),
    ] {
        let folder = Folder::new("ext2");
        let server = Server::tcp(&[&["--memory", "32M"][..], transport].concat());
        let Some(attached) = Attached::new(&folder, &[attach, &[&server.uri]].concat()) else {
            return;
        };
        run("mke2fs", &["-q", "-t", "ext2", &attached.file()]);
        let root = folder.file("root");
        fs::create_dir_all(&root).unwrap();
        // In a mount namespace of its own: no other one keeps the file system after it is unmounted.
        let file = attached.file();
        let mount = format!(
            "device=$(losetup --find --show --direct-io={direct} {file}) && \
             {{ mount -t ext2 $device {root}; mounted=$?; losetup --detach $device; [ $mounted = 0 ]; }}"
        );
        let may = Command::new("unshare").args(["-m", "sh", "-c", &mount]).output().unwrap();
        if !may.status.success() {
            eprintln!("skipped: no loop device: {}", String::from_utf8_lossy(&may.stderr));
            return;
        }
        let work = format!(
            "set -e; {mount}; fio --name=t --rw=randrw --bsrange=512-256k --verify=crc32c --verify_state_save=0 --fsync=50 \
             --filename={root}/data --size=8M; sync -f {root}; umount {root}"
        );
        run("unshare", &["-m", "sh", "-c", &work]);
        run("e2fsck", &["-fn", &attached.file()]);
        attached.end();
    }
}

/// A port that was free a moment ago.
fn port() -> String {
    let socket = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    socket.local_addr().unwrap().to_string()
}

#[test]
fn requests_in_flight_are_repeated_after_a_restart_of_the_server() {
    for transport in [&[][..], &["--rdma"]] {
        let folder = Folder::new("reconnect");
        let (disk, place) = (folder.file("disk"), port());
        fs::File::create(&disk).unwrap().set_len(64 << 20).unwrap();
        let start = || Server::start(&[&[&disk, "--listen", &place][..], transport].concat());
        let server = start();
        let Some(attached) = Attached::new(&folder, &["--reconnect", "60", &server.uri]) else {
            return;
        };
        let path = attached.file();
        let writer = std::thread::spawn(move || {
            let mut file = fs::File::options().write(true).open(path).unwrap();
            for piece in content(16 << 20).chunks(1 << 20) {
                file.write_all(piece).unwrap();
                file.sync_all().unwrap();
                std::thread::sleep(Duration::from_millis(20));
            }
        });
        let mut server = Some(server);
        for _ in 0..3 {
            std::thread::sleep(Duration::from_millis(150));
            drop(server.take());
            std::thread::sleep(Duration::from_millis(50));
            server = Some(start());
        }
        writer.join().unwrap();
        assert!(fs::read(&disk).unwrap()[..16 << 20] == content(16 << 20));
        attached.end();
    }
}

#[test]
fn without_reconnect_a_killed_server_is_an_error_soon() {
    for transport in [&[][..], &["--rdma"]] {
        let folder = Folder::new("lost");
        let server = Server::tcp(&[&["--memory", "8M"][..], transport].concat());
        let Some(attached) = Attached::new(&folder, &[&server.uri]) else { return };
        let mut file = fs::File::options().write(true).open(attached.file()).unwrap();
        file.write_all(&[1; 65536]).unwrap();
        drop(server);
        let begun = Instant::now();
        let error = file.write_all(&[2; 65536]).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(5), "{error}");
        assert!(begun.elapsed() < Duration::from_secs(15));
    }
}

#[test]
fn a_disk_of_another_host_goes_on_after_the_network_was_cut() {
    let may = Command::new("unshare").args(["-rnm", "true"]).status();
    if !may.is_ok_and(|status| status.success()) || !is_there("ip", "iproute2") {
        eprintln!("skipped: no network namespace is allowed here");
        return;
    }
    if !needs::met(Path::new("/dev/fuse").exists(), "fuse3 (and /dev/fuse)") {
        return;
    }
    for (transport, scheme) in [("", "nbd"), ("--rdma", "nbd+rdma")] {
        let folder = Folder::new(&format!("cut-{scheme}"));
        let (source, target, at) =
            (folder.file("source"), folder.file("target"), folder.file("mount"));
        fs::write(&source, content(12 << 20)).unwrap();
        fs::create_dir_all(&at).unwrap();
        // The server at one end of a veth pair, the client at the other, whose end goes down for five
        // seconds.
        let script = format!(
            "set -e; ip link set lo up; unshare -n sleep 100 & far=$!; \
             trap 'kill $far $server $client 2>/dev/null || true' EXIT; \
             for i in $(seq 100); do \
                 [ \"$(readlink /proc/$far/ns/net)\" != \"$(readlink /proc/$$/ns/net)\" ] && break; sleep 0.05; \
             done; \
             ip link add here type veth peer name there netns $far; \
             ip address add 10.9.0.1/24 dev here; ip link set here up; \
             nsenter -t $far -n sh -c 'ip link set lo up; ip address add 10.9.0.2/24 dev there; \
                 ip link set there up; exec {quipu} nbd serve --memory 12M {transport} \
                 --listen 10.9.0.2:10809' >/dev/null & server=$!; \
             for i in $(seq 100); do {quipu} nbd info {scheme}://10.9.0.2 >/dev/null 2>&1 && break; sleep 0.1; done; \
             {quipu} nbd attach --reconnect 60 --timeout 2 {scheme}://10.9.0.2 {at} & client=$!; \
             for i in $(seq 100); do [ -e {at}/nbd ] && break; sleep 0.1; done; \
             (for i in $(seq 0 11); do \
                 dd if={source} of={at}/nbd bs=1M count=1 skip=$i seek=$i conv=notrunc,fsync \
                     status=none; \
                 sleep 0.1; done) & writer=$!; \
             sleep 0.5; ip link set here down; sleep 5; ip link set here up; \
             wait $writer; umount {at}; wait $client; \
             {quipu} nbd copy {scheme}://10.9.0.2 {target}",
            quipu = env!("CARGO_BIN_EXE_quipu")
        );
        run("timeout", &["90", "unshare", "-rnm", "sh", "-c", &script]);
        assert!(fs::read(&target).unwrap() == content(12 << 20), "{scheme}");
    }
}
