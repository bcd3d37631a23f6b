"""Programs that use sockets, each with a small job whose result is known.

`programs.py NAME` runs one, `programs.py --list` names them. RUN in the environment is what they are started with.
"""

import hashlib
import os
import pwd
import re
import signal
import subprocess
import sys
import threading
import time

import common
from common import check, find, folder, holds, listens, need, noise, port, run, start


def redis():
    """A server, a benchmark, a replica, and a snapshot by fork while clients write."""
    need(redis_server="redis-server", redis_benchmark="redis-tools", redis_cli="redis-tools")
    ports = [port(), port()]
    for number in ports:
        start("redis-server", "--port", number, "--dir", folder, "--dbfilename", f"{number}.rdb", "--save", "")
        listens(number)
    cli = lambda number, *words: run("redis-cli", "-p", number, *words).decode().strip()
    cli(ports[1], "replicaof", "127.0.0.1", ports[0])
    for depth in (1, 16):
        words = ("-t", "set,get,lpush", "-n", 20000, "-r", 1000, "-c", 20, "-P", depth, "-q")
        output = run("redis-benchmark", "-p", ports[0], *words).decode()
        check(f"redis-benchmark with a pipeline of {depth}", output.count("requests per second") >= 3, output)
    common.check_raised()
    cli(ports[0], "bgsave")
    run("redis-benchmark", "-p", ports[0], "-t", "set", "-n", 20000, "-r", 5000, "-q")
    saved = holds(lambda: "rdb_bgsave_in_progress:0" in cli(ports[0], "info", "persistence"))
    check("a snapshot is saved", saved and "rdb_last_bgsave_status:ok" in cli(ports[0], "info", "persistence"))
    cli(ports[0], "config", "set", "save", "")
    check("the replica has the same data", holds(lambda: len({*sizes(cli, ports)}) == 1), sizes(cli, ports))


def sizes(cli, ports):
    return [cli(number, "dbsize") + cli(number, "get", "key:000000000042") for number in ports]


def nginx():
    """Pages of two lengths, and reloads while they are fetched."""
    need(nginx="nginx-light", wrk="wrk", curl="curl")
    number = port()
    temporary = " ".join(
        f"{what}_temp_path {folder};" for what in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    user = "user root; " if os.geteuid() == 0 else ""
    (folder / "nginx.conf").write_text(
        f"{user}daemon off; worker_processes 2; pid {folder}/pid; error_log stderr error; events {{ }}\n"
        f"http {{ access_log off; sendfile on; {temporary} server {{ listen 127.0.0.1:{number}; root {folder}; }} }}\n"
    )
    pages = {name: noise(name, size).read_bytes() for name, size in (("1k", 1024), ("1m", 1 << 20))}
    server = start("nginx", "-e", "stderr", "-c", folder / "nginx.conf")
    listens(number)
    for name, octets in pages.items():
        urls = [f"http://127.0.0.1:{number}/{name}"] * 40
        check(f"40 pages of {name} on one connection", run("curl", "-s", *urls) == octets * 40)
    outputs = []
    load = lambda: outputs.append(run("wrk", "-t1", "-c8", "-d5", f"http://127.0.0.1:{number}/1k").decode())
    loader = threading.Thread(target=load)
    loader.start()
    for _ in range(3):
        time.sleep(1)
        server.send_signal(signal.SIGHUP)
    loader.join()
    output = outputs[0] if outputs else ""
    good = "Requests/sec" in output and "Non-2xx" not in output
    # A reload closes connections between two requests, which wrk counts as errors of reading.
    check("three reloads under load", good and not re.search(r"(connect|write|timeout) [1-9]", output), output)
    common.check_raised()
    check("the server runs on", server.poll() is None and run("curl", "-s", urls[0]) == pages["1m"])


def haproxy():
    """A proxy in front of a web server, and seamless reloads while requests come."""
    need(haproxy="haproxy", wrk="wrk", curl="curl", nginx="nginx-light")
    front, back = port(), port()
    noise("page", 5000)
    start(sys.executable, "-c", SERVER, back, cwd=folder)
    listens(back)
    (folder / "haproxy.cfg").write_text(
        f"global\n  stats socket {folder}/admin mode 600 level admin expose-fd listeners\n"
        "defaults\n  mode http\n  timeout connect 5s\n  timeout client 30s\n  timeout server 30s\n"
        f"frontend f\n  bind 127.0.0.1:{front}\n  default_backend b\nbackend b\n  server s 127.0.0.1:{back}\n"
    )
    proxy = start("haproxy", "-W", "-db", "-f", folder / "haproxy.cfg")
    listens(front)
    url = f"http://127.0.0.1:{front}/page"
    page = (folder / "page").read_bytes()
    check("40 pages on one connection", run("curl", "-s", *[url] * 40) == page * 40)
    failed = []

    def fetch(seconds):
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if run("curl", "-s", url, url, check=False) != page * 2:
                failed.append(time.monotonic())

    fetchers = [threading.Thread(target=fetch, args=(5,)) for _ in range(2)]
    [fetcher.start() for fetcher in fetchers]
    for _ in range(2):
        time.sleep(1.5)
        proxy.send_signal(signal.SIGUSR2)
    [fetcher.join() for fetcher in fetchers]
    check("two reloads lose no request", not failed, failed)
    check("the proxy runs on", proxy.poll() is None and run("curl", "-s", url) == page)


#: A web server that keeps connections.
SERVER = """
import http.server, sys
class Handler(http.server.SimpleHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def log_message(self, *words): pass
http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def http_server():
    """Python's web server and curl."""
    need(curl="curl")
    number = port()
    page = noise("page", 3 << 20).read_bytes()
    start(sys.executable, "-c", SERVER, number, cwd=folder)
    listens(number)
    url = f"http://127.0.0.1:{number}/page"
    check("one page", run("curl", "-s", url) == page)
    check("30 pages on a connection", run("curl", "-s", *[url] * 30) == page * 30)


def postgres():
    """A cluster, pgbench with kept and with fresh connections, and a copy of many rows."""
    need(pgbench="postgresql-contrib", psql="postgresql-client")
    places = [f"/usr/lib/postgresql/{version}/bin" for version in range(30, 9, -1)]
    place = next((place for place in places if os.path.exists(f"{place}/initdb")), None)
    if place is None:
        raise common.Missing("initdb is missing: install postgresql")
    options = {}
    if os.geteuid() == 0:
        try:
            owner = pwd.getpwnam("postgres")
        except KeyError:
            owner = pwd.getpwnam("nobody")
        os.chown(folder, owner.pw_uid, owner.pw_gid)
        options = {"user": owner.pw_uid, "group": owner.pw_gid, "extra_groups": []}
    number = port()
    subprocess.run(
        [f"{place}/initdb", "-D", folder / "data", "-U", "postgres", "-A", "trust", "--no-sync"],
        check=True, capture_output=True, **options,
    )
    words = ("-c", "fsync=off", "-c", f"unix_socket_directories={folder}", "-c", "listen_addresses=127.0.0.1")
    server = start(f"{place}/postgres", "-D", folder / "data", "-p", number, *words, **options)
    where = ("-h", "127.0.0.1", "-p", number, "-U", "postgres")
    psql = lambda text, **more: run("psql", *where, "-Atc", text, "postgres", **more).decode().strip()
    listens(number)
    run("pgbench", *where, "-i", "-q", "postgres")
    for name, words in (("4 clients", ("-c4",)), ("a connection for each transaction", ("-n", "-c2", "-C"))):
        output = run("pgbench", *where, *words, "-T3", "postgres").decode()
        check(f"pgbench, {name}", re.search(r"number of failed transactions: 0 ", output), output)
    sums = psql("select (select sum(abalance) from pgbench_accounts) = (select sum(delta) from pgbench_history)")
    check("the sums are equal", sums == "t", sums)
    psql("create table rows (number int, text text)")
    lines = "".join(f"{number}\t{number * 7919:x}\n" for number in range(200000)).encode()
    psql("copy rows from stdin", input=lines)
    check("200,000 rows come back", psql("copy (select * from rows order by number) to stdout") == lines.decode().strip())
    server.send_signal(signal.SIGINT)


def memcached():
    """Values of many lengths."""
    need(memcached="memcached")
    number = port()
    user = ("-u", "root") if os.geteuid() == 0 else ()
    start("memcached", "-l", "127.0.0.1", "-p", number, "-m", 64, *user)
    listens(number)
    client = """
import socket, sys
with socket.create_connection(("127.0.0.1", int(sys.argv[1]))) as server, server.makefile("rb") as lines:
    for number in range(3000):
        value = b"%d" % number * (number % 500 + 1)
        server.sendall(b"set k%d 0 0 %d\\r\\n%s\\r\\n" % (number, len(value), value))
        assert lines.readline() == b"STORED\\r\\n"
        server.sendall(b"get k%d\\r\\n" % number)
        lines.readline()
        assert lines.read(len(value) + 2) == value + b"\\r\\n" and lines.readline() == b"END\\r\\n"
print("equal")
"""
    check("3000 values", run(sys.executable, "-c", client, number).strip() == b"equal")


def ssh():
    """Commands, and files both ways."""
    need(sshd="openssh-server", ssh="openssh-client", ssh_keygen="openssh-client", scp="openssh-client")
    number = port()
    for key in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / key], check=True)
    (folder / "authorized").write_bytes((folder / "user.pub").read_bytes())
    (folder / "authorized").chmod(0o600)
    if os.geteuid() == 0:
        os.makedirs("/run/sshd", exist_ok=True)
    words = ("-o", "StrictModes=no", "-o", "UsePAM=no", "-o", "PermitRootLogin=yes", "-o", "PidFile=none")
    own = ("-h", folder / "host", "-o", f"AuthorizedKeysFile={folder}/authorized", "-o", "Subsystem=sftp internal-sftp")
    start("sshd", "-D", "-e", "-f", "/dev/null", "-p", number, "-o", "ListenAddress=127.0.0.1", *own, *words)
    listens(number)
    quiet = ("-o", "StrictHostKeyChecking=no", "-o", "UserKnownHostsFile=/dev/null", "-o", "LogLevel=ERROR")
    options = ("-F", "none", "-i", folder / "user", *quiet)
    at = lambda *words, **more: run("ssh", "-p", number, *options, "127.0.0.1", *words, **more)
    check("a command", at("echo", "hello") == b"hello\n")
    check("its exit code", subprocess.run(
        common.command(["ssh", "-p", number, *options, "127.0.0.1", "exit 7"]), stdin=subprocess.DEVNULL
    ).returncode == 7)
    data = noise("data", 10 << 20).read_bytes()
    check("10 MB both ways", at("cat", input=data) == data)
    run("scp", "-q", "-P", number, *options, folder / "data", f"127.0.0.1:{folder}/copy")
    check("scp", (folder / "copy").read_bytes() == data)


def node():
    """A cluster of two, and an echo."""
    need(node="nodejs")
    number = port()
    (folder / "cluster.js").write_text(
        "const cluster = require('cluster'), http = require('http');\n"
        "if (cluster.isPrimary) { cluster.fork(); cluster.fork(); }\n"
        "else http.createServer((q, a) => { const all = []; q.on('data', d => all.push(d));\n"
        "  q.on('end', () => a.end(Buffer.concat(all))); }).listen(+process.argv[2], '127.0.0.1');\n"
    )
    (folder / "client.js").write_text(
        "const http = require('http'), crypto = require('crypto');\n"
        "const agent = new http.Agent({ keepAlive: true, maxSockets: 4 });\n"
        "const ask = body => new Promise((done, failed) => { const q = http.request({ agent, method: 'POST',\n"
        "  host: '127.0.0.1', port: +process.argv[2] }, a => { const all = []; a.on('data', d => all.push(d));\n"
        "  a.on('end', () => Buffer.concat(all).equals(body) ? done() : failed('another body')); });\n"
        "  q.on('error', failed); q.end(body); });\n"
        "(async () => { for (let i = 0; i < 200; i++) await Promise.all([1, 2, 3, 4].map(() =>\n"
        "  ask(crypto.randomBytes(i * 50)))); await ask(crypto.randomBytes(2 << 20)); agent.destroy();\n"
        "  console.log('equal'); })().catch(error => { console.log(error); process.exit(1); });\n"
    )
    start("node", folder / "cluster.js", number)
    listens(number)
    check("800 requests and one of 2 MB", run("node", folder / "client.js", number).strip() == b"equal")


def java():
    """A selector that echoes what four clients send."""
    need(javac="default-jdk-headless", java="default-jre-headless")
    (folder / "Echo.java").write_bytes(open(os.path.join(os.path.dirname(__file__), "Echo.java"), "rb").read())
    subprocess.run(["javac", "-d", folder, folder / "Echo.java"], check=True)
    check("four clients of a selector", run("java", "-cp", folder, "Echo").strip() == b"equal")


def go():
    """A static program, client and server."""
    need(go="golang-go")
    source = open(os.path.join(os.path.dirname(__file__), "echo.go"), "rb").read()
    (folder / "echo.go").write_bytes(source)
    environment = {**os.environ, "CGO_ENABLED": "0", "GO111MODULE": "off"}
    program = folder / "echo"
    subprocess.run([find("go"), "build", "-o", program, folder / "echo.go"], check=True, env=environment)
    for name, words in (("", RUN_WORDS), (", --static", STATIC_WORDS)):
        output = subprocess.run([*words, program], capture_output=True, timeout=common.LIMIT)
        check(f"net/http, 2000 requests{name}", output.stdout.strip() == b"equal", output)


RUN_WORDS = common.RUN
STATIC_WORDS = [*RUN_WORDS[:-1], "--static", "--"] if RUN_WORDS else []


def tree(place):
    """Names and contents of all files in a folder."""
    files = sorted(path for path in place.rglob("*") if path.is_file())
    return [(str(path.relative_to(place)), hashlib.sha256(path.read_bytes()).digest()) for path in files]


def rsync():
    """A tree from and to a daemon."""
    need(rsync="rsync")
    source = folder / "source"
    for number in range(60):
        (source / f"{number % 7}").mkdir(parents=True, exist_ok=True)
        noise(f"source/{number % 7}/{number}", number * number * 500)
    number = port()
    user = "uid = root\ngid = root\n" if os.geteuid() == 0 else ""
    (folder / "rsyncd.conf").write_text(
        f"use chroot = no\n{user}[source]\npath = {source}\n[copy]\npath = {folder}/there\nread only = no\n"
    )
    (folder / "there").mkdir()
    words = ("--address=127.0.0.1", f"--port={number}", f"--config={folder}/rsyncd.conf")
    start("rsync", "--daemon", "--no-detach", *words)
    listens(number)
    run("rsync", "-a", f"rsync://127.0.0.1:{number}/source/", f"{folder}/here/")
    check("a tree from a daemon", tree(folder / "here") == tree(source))
    run("rsync", "-az", f"{source}/", f"rsync://127.0.0.1:{number}/copy/")
    check("a compressed tree to a daemon", tree(folder / "there") == tree(source))


def socat():
    """A program for each connection, by fork and exec."""
    need(socat="socat")
    number = port()
    start("socat", f"TCP-LISTEN:{number},bind=127.0.0.1,reuseaddr,fork", "EXEC:cat")
    listens(number)
    data = noise("data", 1 << 20).read_bytes()
    for turn in range(3):
        check(f"connection {turn + 1}", run("socat", "-t30", "-", f"TCP:127.0.0.1:{number}", input=data) == data)


def iperf3():
    """Streams in one and in both directions, and by sendfile."""
    need(iperf3="iperf3")
    number = port()
    start("iperf3", "-s", "-B", "127.0.0.1", "-p", number, "--forceflush")
    # A connection that only looks whether somebody listens would be a client.
    holds(lambda: b"listening" in (folder / "log-0").read_bytes())
    for words in (("-n", "200M"), ("-t", "2", "--bidir", "-P", "2"), ("-n", "200M", "-Z"), ("-n", "50M", "-l", "1000")):
        run("iperf3", "-c", "127.0.0.1", "-p", number, *words)
        check(" ".join(("iperf3", *words)), True)


def sockperf():
    """Ping-pong and messages under load; nothing is lost or out of order."""
    need(sockperf="sockperf")
    number = port()
    start("sockperf", "server", "--tcp", "-i", "127.0.0.1", "-p", number)
    time.sleep(1)
    for words in (("ping-pong", "-t2"), ("under-load", "-t2", "--mps=20000")):
        output = run("sockperf", words[0], "--tcp", "-i", "127.0.0.1", "-p", number, *words[1:]).decode()
        good = re.search(r"# dropped messages = 0; # duplicated messages = 0; # out-of-order messages = 0", output)
        check(f"sockperf {words[0]}", good, output)


def stress():
    """stress-ng's stressors of sockets and descriptors, which verify what they do."""
    need(stress_ng="stress-ng")
    names = "sock sockfd sockabuse sockmany sockpair sockdiag epoll poll dup sendfile splice close"
    for name in names.split():
        words = ("--verify", f"--{name}", 2, "--timeout", "4s")
        ended = subprocess.run(
            common.command(["stress-ng", *words]), cwd=folder, capture_output=True, timeout=common.LIMIT
        )
        check(name, ended.returncode in (0, 3), ended)


if __name__ == "__main__":
    jobs = [
        redis, nginx, haproxy, http_server, postgres, memcached, ssh, node, java, go, rsync, socat, iperf3, sockperf,
        stress,
    ]
    sys.exit(common.main({job.__name__: job for job in jobs}))
