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
    let says = text.contains("not complete") || text.contains("cannot use");
    assert!(!outcome.status.success() && says, "{text}");
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

/// Both ends of a veth pair, each in a network of its own: `here` runs here, where the server is
/// at 10.9.0.2. `None` where that is not allowed.
fn two_hosts(serve: &str, here: &str) -> Option<String> {
    let may = Command::new("unshare").args(["-rn", "true"]).status();
    if !may.is_ok_and(|status| status.success()) || !is_there("ip", "iproute2") {
        eprintln!("skipped: no network namespace is allowed here");
        return None;
    }
    let quipu = env!("CARGO_BIN_EXE_quipu");
    let script = format!(
        "set -e; ip link set lo up; unshare -n sleep 120 & far=$!; \
         trap 'kill $far $server 2>/dev/null' EXIT; \
         for i in $(seq 100); do \
             [ \"$(readlink /proc/$far/ns/net)\" != \"$(readlink /proc/$$/ns/net)\" ] && break; sleep 0.05; \
         done; \
         ip link add here type veth peer name there netns $far; \
         ip address add 10.9.0.1/24 dev here; ip link set here up; \
         nsenter -t $far -n sh -c 'ip link set lo up; ip address add 10.9.0.2/24 dev there; \
             ip link set there up; exec {quipu} nbd serve {serve}' > /dev/null & server=$!; \
         for i in $(seq 100); do {quipu} nbd info nbd+rdma://10.9.0.2 >/dev/null 2>&1 && break; \
             sleep 0.1; done; \
         {here}"
    );
    Some(run("timeout", &["90", "unshare", "-rn", "sh", "-c", &script]))
}

#[test]
fn two_hosts_copy_a_disk_and_a_cut_ends_a_copy_in_bounded_time() {
    let folder = Folder::new("hosts");
    let (source, target, long) =
        (folder.file("source"), folder.file("target"), folder.file("long"));
    fs::write(&source, content(3 << 20)).unwrap();
    fs::File::create(&long).unwrap().set_len(8 << 30).unwrap();
    let quipu = env!("CARGO_BIN_EXE_quipu");
    let uri = "nbd+rdma://10.9.0.2";
    let here = format!(
        "{quipu} nbd copy {source} {uri} && {quipu} nbd copy {uri} {target}; \
         {quipu} nbd copy --timeout 4 --full {long} {uri} 2> {long}.said & copy=$!; \
         sleep 1; ip link set here down; date +%s > {long}.cut; \
         if wait $copy; then exit 1; fi; date +%s > {long}.end"
    );
    if two_hosts("--memory 8G --rdma --listen 10.9.0.2:10809", &here).is_none() {
        return;
    }
    assert!(fs::read(&target).unwrap()[..3 << 20] == content(3 << 20));
    let said = fs::read_to_string(format!("{long}.said")).unwrap();
    assert!(said.contains("not complete"), "{said}");
    let second = |name: &str| -> u64 {
        fs::read_to_string(format!("{long}.{name}")).unwrap().trim().parse().unwrap()
    };
    assert!(second("end") - second("cut") < 30);
}

/// A server that says what it wants to a `quipu nbd info`: its private data, and a message. What
/// the client says.
fn hostile_server(says: &[u8], sends: &[u8]) -> String {
    use quipu::{Access, Config, Device, Listener, Request};
    let address = Some("127.0.0.1".parse().unwrap());
    let device = Device::open(Config { address, ..Config::default() }).unwrap();
    let listener = Listener::bind(&device, "127.0.0.1:0".parse().unwrap()).unwrap();
    let client = Command::new(env!("CARGO_BIN_EXE_quipu"))
        .args(["nbd", "info", &format!("nbd+rdma://{}/", listener.address().unwrap())])
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let (pd, cq) = (device.protection_domain().unwrap(), device.completion_queue(64).unwrap());
    let memory = pd.register(1 << 17, Access::LOCAL_WRITE).unwrap();
    let qp = pd.queue_pair(&cq, &cq).build().unwrap();
    for place in 0..8 {
        qp.post_recv(1, &[memory.sge(place << 13, 8192).unwrap()]).unwrap();
    }
    if let Ok(connection) = listener.next().unwrap().accept(qp, says) {
        memory.write(1 << 16, sends).unwrap();
        let memory = [memory.sge(1 << 16, sends.len()).unwrap()];
        let _ = connection.post_send(&Request::send(&memory).id(2));
        connection.wait_end().unwrap();
    }
    let outcome = client.wait_with_output().unwrap();
    assert_eq!(outcome.status.code(), Some(1));
    String::from_utf8_lossy(&outcome.stderr).into_owned()
}

#[test]
fn a_client_leaves_a_server_that_lies() {
    use quipu_nbd::messages::Terms;
    let terms = Terms { credits: 4, inline: 512 }.to_bytes();
    assert!(hostile_server(b"hello", b"x").contains("private data"));
    assert!(hostile_server(&terms, &[0; 64]).contains("does not speak NBD"));
    let mut greeting = b"NBDMAGICIHAVEOPT\0\0".to_vec();
    assert!(hostile_server(&terms, &greeting).contains("old protocol"));
    // An option's reply of gigabytes.
    greeting[17] = 3;
    greeting.extend(0x0003_e889_0455_65a9_u64.to_be_bytes());
    greeting.extend([0, 0, 0, 8, 0, 0, 0, 1, 0xff, 0xff, 0xff, 0xff]);
    assert!(hostile_server(&terms, &greeting).contains("announced"));
}
