//! nbdsh as a client, nbd-server as a server.

use std::fs;
use std::net::TcpListener;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use super::attach::Attached;
use super::{Folder, Program, Server, content, is_there, quipu, run};

/// What Python does with our server: `h` is connected to it.
const WORK: &str = "
import errno
assert h.get_size() == 8 << 20 and h.can_multi_conn() and h.can_flush() and h.can_fua()
h.pwrite(b'a' * 70000, 1000)
h.pwrite(b'b' * 4096, 4096, nbd.CMD_FLAG_FUA)
h.flush()
assert h.pread(70000, 1000) == b'a' * 3096 + b'b' * 4096 + b'a' * 62808
h.zero(1 << 20, 1 << 20)
h.trim(65536, 65536)
h.cache(4096, 0)
# Many requests under way, whose replies come in any order.
buffers = [nbd.Buffer.from_bytearray(bytearray([i] * 4096)) for i in range(64)]
cookies = [h.aio_pwrite(b, (4 << 20) + 4096 * i) for i, b in enumerate(buffers)]
while h.aio_in_flight():
    h.poll(-1)
    for cookie in cookies[:]:
        if h.aio_command_completed(cookie):
            cookies.remove(cookie)
assert not cookies
for i in range(64):
    assert h.pread(4096, (4 << 20) + 4096 * i) == bytes([i] * 4096)
# What is allocated.
found = []
h.block_status(8 << 20, 0, lambda name, offset, extents, error: found.append((name, extents)))
assert found[0][0] == 'base:allocation' and sum(found[0][1][::2]) <= 8 << 20, found
# What is wrong is an error of the request, after which the connection goes on.
h.set_strict_mode(0)
def fails(number, call):
    try:
        call()
    except nbd.Error as error:
        assert error.errnum == number, error
    else:
        raise AssertionError(number)
fails(errno.EINVAL, lambda: h.pread(4096, (8 << 20) - 100))
fails(errno.ENOSPC, lambda: h.pwrite(b'x' * 4096, (8 << 20) - 100))
fails(errno.EINVAL, lambda: h.pread(4096, (1 << 63) - 4096))
fails(errno.EINVAL, lambda: h.flush(0x80))
assert h.pread(1, 0) == bytes(1)
print('done', h.get_structured_replies_negotiated())
";

#[test]
fn nbdsh_does_all_that_the_protocol_has() {
    if !is_there("nbdsh", "python3-libnbd") {
        return;
    }
    let folder = Folder::new("nbdsh");
    let disk = folder.file("disk");
    fs::File::create(&disk).unwrap().set_len(8 << 20).unwrap();
    for what in [&["--memory", "8M"][..], &[&disk]] {
        let server = Server::tcp(what);
        // Replies in chunks and without, of which the client decides before it connects.
        for structured in ["True", "False"] {
            let line = format!(
                "h.set_request_structured_replies({structured}); h.add_meta_context('base:allocation'); \
                 h.connect_uri('{}')",
                server.uri
            );
            let work = if structured == "True" { WORK } else { "print('done', h.pread(4, 1000))" };
            let said = run("/usr/bin/python3", &["-m", "nbd", "-c", &line, "-c", work]);
            assert!(said.contains("done"), "{said}");
        }
    }
    assert_eq!(fs::read(&disk).unwrap()[1000..1004], *b"aaaa");
}

/// nbd-server with the file `disk` as the export "disk". It serves one connection, and then waits for that to end.
fn nbd_server(folder: &Folder) -> (Program, String) {
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let (config, disk) = (folder.file("config"), folder.file("disk"));
    let text = format!(
        "[generic]\n listenaddr = 127.0.0.1\n port = {port}\n allowlist = true\n\
         [disk]\n exportname = {disk}\n flush = true\n fua = true\n trim = true\n"
    );
    fs::write(&config, text).unwrap();
    let server = Command::new("nbd-server")
        .args(["-C", &config, "-d"])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .spawn();
    let server = Program(server.unwrap());
    // A connection to find out whether it listens would be the only one that it serves.
    let listens = format!("0100007F:{port:04X} 00000000:0000 0A");
    let begun = Instant::now();
    while !fs::read_to_string("/proc/net/tcp").unwrap().contains(&listens) {
        assert!(begun.elapsed().as_secs() < 20, "nbd-server does not listen");
        std::thread::sleep(Duration::from_millis(20));
    }
    (server, format!("nbd://127.0.0.1:{port}/disk"))
}

#[test]
fn nbd_server_that_takes_one_connection_is_copied_and_attached() {
    if !is_there("nbd-server", "nbd-server") {
        return;
    }
    let folder = Folder::new("nbd-server");
    let (disk, target) = (folder.file("disk"), folder.file("target"));
    fs::write(&disk, content(6 << 20)).unwrap();
    let (server, uri) = nbd_server(&folder);
    let told = quipu(&["info", "--json", &uri]);
    // It promises more connections than it takes in this mode.
    assert!(told.contains("\"size\":6291456") && told.contains("multi-conn"), "{told}");
    drop(server);

    let begun = Instant::now();
    let (server, uri) = nbd_server(&folder);
    quipu(&["copy", &uri, &target]);
    assert!(fs::read(&target).unwrap() == content(6 << 20));
    drop(server);
    let (server, uri) = nbd_server(&folder);
    fs::write(&target, content(6 << 20).iter().rev().copied().collect::<Vec<_>>()).unwrap();
    quipu(&["copy", "--full", &target, &uri]);
    assert!(fs::read(&target).unwrap() == fs::read(&disk).unwrap());
    drop(server);
    assert!(begun.elapsed() < Duration::from_secs(30));

    let (_server, uri) = nbd_server(&folder);
    let Some(attached) = Attached::new(&folder, &[&uri]) else { return };
    assert!(fs::read(attached.file()).unwrap() == fs::read(&disk).unwrap());
    if is_there("fio", "fio") {
        let name = format!("--filename={}", attached.file());
        let depth = [
            "--ioengine=libaio",
            "--iodepth=32",
            "--direct=1",
            "--verify=crc32c",
            "--verify_state_save=0",
        ];
        let all = ["--name=t", "--rw=randwrite", "--bs=4k", "--size=6M", &name];
        run("fio", &[&all[..], &depth].concat());
    }
    attached.end();
}
