//! Queue pairs: RC, and those of QPIP.

use std::fs;
use std::process::{Command, Stdio};

use super::{Folder, Server, content, is_there, quipu, refused, run};

/// A server for queue pairs, and what makes peers on this host use TCP.
fn rdma(arguments: &[&str]) -> Server {
    Server::tcp(&[&["--rdma"], arguments].concat())
}

#[test]
fn queue_pairs_copy_a_disk_there_and_back() {
    let folder = Folder::new("rdma");
    let (source, target) = (folder.file("source"), folder.file("target"));
    // Blocks of more and less than what lies in a message, and zeros.
    let mut bytes = content((3 << 20) + 1000);
    bytes.resize(6 << 20, 0);
    fs::write(&source, &bytes).unwrap();
    let server = rdma(&["--memory", "6M", "--export", "a disk"]);
    assert!(server.uri.starts_with("nbd+rdma://127.0.0.1:"), "{}", server.uri);
    assert!(quipu(&["info", "--list", &server.uri]).contains("\"a disk\""));
    let told = quipu(&["info", "--json", &server.uri]);
    assert!(told.contains("\"size\":6291456") && told.contains("\"allocation\":true"), "{told}");
    quipu(&["copy", &source, &server.uri]);
    let told = quipu(&["copy", "--json", &server.uri, &target]);
    assert!(told.contains("\"bytes\":6291456"), "{told}");
    assert!(fs::read(&target).unwrap() == bytes);
    // The same over TCP.
    fs::remove_file(&target).unwrap();
    let outcome = Command::new(env!("CARGO_BIN_EXE_quipu"))
        .args(["nbd", "copy", &server.uri, &target])
        .env("QUIPU_SAME_HOST", "never")
        .output()
        .unwrap();
    assert!(outcome.status.success(), "{}", String::from_utf8_lossy(&outcome.stderr));
    assert!(fs::read(&target).unwrap() == bytes);
}

#[test]
fn queue_pairs_serve_files_and_refuse_what_is_not_allowed() {
    let folder = Folder::new("rdma-file");
    let (disk, target) = (folder.file("disk"), folder.file("target"));
    fs::write(&disk, content(2 << 20)).unwrap();
    let server = rdma(&[&disk, "--read-only"]);
    quipu(&["copy", &server.uri, &target]);
    assert!(fs::read(&target).unwrap() == content(2 << 20));
    refused(&["copy", &target, &server.uri], "not complete");
    refused(&["info", &format!("{}other", server.uri)], "no export");
    refused(&["info", "nbd+rdma://127.0.0.1:1/"], "rejected");
}

/// A client with a queue pair of its own, that says and sends what it wants.
fn stranger(server: &Server, says: &[u8], sends: &[&[u8]]) -> Option<String> {
    use quipu::{Access, Config, Connection, Device, Request, WcStatus};
    let place = server.uri.trim_start_matches("nbd+rdma://").trim_end_matches('/');
    let address = Some("127.0.0.1".parse().unwrap());
    let device = Device::open(Config { address, ..Config::default() }).unwrap();
    let (pd, cq) = (device.protection_domain().unwrap(), device.completion_queue(64).unwrap());
    let memory = pd.register(1 << 20, Access::LOCAL_WRITE).unwrap();
    let qp = pd.queue_pair(&cq, &cq).build().unwrap();
    for place in 0..8 {
        qp.post_recv(1, &[memory.sge(place << 16, 65536).unwrap()]).unwrap();
    }
    let connection = match Connection::open(qp, place.parse().unwrap(), says) {
        Ok(connection) => connection,
        Err(error) => return Some(error.to_string()),
    };
    for (index, bytes) in sends.iter().enumerate() {
        let at = (1 << 19) + (index << 12);
        memory.write(at, bytes).unwrap();
        let memory = [memory.sge(at, bytes.len()).unwrap()];
        if connection.post_send(&Request::send(&memory).id(2)).is_err() {
            break;
        }
    }
    // The server ends the connection.
    connection.wait_end().unwrap();
    let mut out = [quipu::Completion::default(); 16];
    while cq.wait(&mut out).unwrap() > 0 {
        if out.iter().any(|done| done.status == WcStatus::WrFlushErr) {
            break;
        }
    }
    None
}

#[test]
fn hostile_queue_pairs_lose_their_connection_and_harm_nobody_else() {
    use quipu_nbd::messages::Terms;
    let server = rdma(&["--memory", "1M"]);
    let terms = Terms { credits: 4, inline: 512 }.to_bytes();
    assert!(stranger(&server, b"GET / HTTP/1.0", &[]).unwrap().contains("rejected"));
    assert!(stranger(&server, &[0xff; 56], &[]).is_some());
    // Noise; half an option; a request whose length, and then whose key, is a lie.
    let mut go = 3_u32.to_be_bytes().to_vec();
    go.extend(0x4948_4156_454f_5054_u64.to_be_bytes());
    go.extend([0, 0, 0, 7, 0, 0, 0, 6, 0, 0, 0, 0, 0, 0]);
    let request = |kind: u8, length: u32| {
        let mut bytes = 0x2560_9513_u32.to_be_bytes().to_vec();
        bytes.extend([0, 0, 0, kind, 0, 0, 0, 0, 0, 0, 0, 9]);
        bytes.extend(0_u64.to_be_bytes());
        bytes.extend(length.to_be_bytes());
        bytes.extend([0x5a; 12]);
        bytes
    };
    assert_eq!(stranger(&server, &terms, &[&[0; 64]]), None);
    assert_eq!(stranger(&server, &terms, &[&go, &request(1, 100)]), None);
    assert_eq!(stranger(&server, &terms, &[&go, &request(1, 8192)]), None);
    assert_eq!(stranger(&server, &terms, &[&go, &request(0, 8192)]), None);
    assert_eq!(stranger(&server, &terms, &[&go, &request(2, 0)]), None);
    assert!(quipu(&["info", &server.uri]).contains("1048576"));
}

#[test]
fn a_killed_server_fails_a_copy_in_bounded_time() {
    let folder = Folder::new("killed");
    let source = folder.file("source");
    fs::File::create(&source).unwrap().set_len(4 << 30).unwrap();
    let mut server = rdma(&["--memory", "4G"]);
    let copy = Command::new(env!("CARGO_BIN_EXE_quipu"))
        .args(["nbd", "copy", "--full", &source, &server.uri])
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    std::thread::sleep(std::time::Duration::from_millis(700));
    server.process.kill().unwrap();
    let begun = std::time::Instant::now();
    let outcome = copy.wait_with_output().unwrap();
    let text = String::from_utf8_lossy(&outcome.stderr).into_owned();
    assert!(!outcome.status.success() && text.contains("not complete"), "{text}");
    assert!(begun.elapsed().as_secs() < 15);
}

#[test]
fn qpip_queue_pairs_copy_a_disk_there_and_back() {
    let folder = Folder::new("qpip");
    let (source, target) = (folder.file("source"), folder.file("target"));
    fs::write(&source, content(3 << 20)).unwrap();
    let link = ["--link", "udp:127.0.0.1:0"];
    let server = Server::start(&[&["--qpip", "--memory", "3M"][..], &link].concat());
    assert!(server.uri.starts_with("nbd+qpip://["), "{}", server.uri);
    quipu(&[&["copy", &source, &server.uri][..], &link].concat());
    quipu(&[&["copy", &server.uri, &target][..], &link].concat());
    assert!(fs::read(&target).unwrap() == content(3 << 20));
    refused(&["info", &server.uri], "no link");
}

#[test]
fn programs_with_sockets_are_peers_of_qpip() {
    if !is_there("nbdinfo", "libnbd-bin") || !is_there("ip", "iproute2") {
        return;
    }
    // A network of its own, with a TAP device between the adapter and the kernel.
    let script = format!(
        "ip link set lo up; {quipu} nbd serve --memory 3M --qpip --link tap:qp0 --address 10.9.0.2/24 & \
         server=$!; trap 'kill $server' EXIT; \
         for i in $(seq 50); do ip link show qp0 >/dev/null 2>&1 && break; sleep 0.1; done; \
         ip address add 10.9.0.1/24 dev qp0 && ip link set qp0 up && \
         timeout 20 nbdinfo nbd://10.9.0.2",
        quipu = env!("CARGO_BIN_EXE_quipu")
    );
    let may = Command::new("unshare").args(["-rn", "true"]).status();
    if !may.is_ok_and(|status| status.success()) || !std::path::Path::new("/dev/net/tun").exists() {
        eprintln!("skipped: no network namespace or no TAP device is allowed here");
        return;
    }
    let told = run("unshare", &["-rn", "sh", "-c", &script]);
    assert!(told.contains("export-size: 3145728"), "{told}");
}
