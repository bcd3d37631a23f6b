#!/usr/bin/env python3
"""Goodput of QPIP and of the kernel's CUBIC over one lossy, long path, in real time.

Two TAP devices in two network namespaces, and a relay between them that loses and delays packets in both
directions (where the kernel has netem, that would do; many kernels do not). The receiver is a socket of the
kernel in every case; the senders take turns: the kernel with CUBIC, and `quipu qpip ttcp`. Needs no privilege
where user namespaces are allowed:

    unshare -rn tests/goodput.py --quipu target/quipu/bin/quipu --seconds 20 --rounds 3

Several losses, round trips or windows make a table; `--json` prints everything for programs. What QPIP alone
does in simulated time is `quipu sim goodput`.
"""

import argparse
import fcntl
import heapq
import itertools
import json
import os
import random
import select
import socket
import statistics
import struct
import subprocess
import sys
import threading
import time

TUNSETIFF, IFF_TAP, IFF_NO_PI = 0x400454CA, 0x0002, 0x1000
TCP_CONGESTION = 13
PORT = 5001
# In each namespace: the kernel's address, and that of an adapter beside it.
HERE, THERE, ADAPTER = "10.9.0.1", "10.9.0.2", "10.9.0.3"


def ip(*words):
    subprocess.run(["ip", *words], check=True)


def tap(name):
    """A TAP device without offloads: every packet is complete, and no longer than the MTU."""
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TAP | IFF_NO_PI))
    return device


class Path:
    """What the relay does now: the share of packets that is lost, and seconds of delay."""

    loss, delay = 0.0, 0.0


def relay(devices, path, seed):
    """Carries packets between two devices: loses some of IP, and delays the others."""
    chance, flying, count = random.Random(seed), [], 0
    while True:
        wait = max(0, flying[0][0] - time.monotonic()) if flying else 1
        ready, _, _ = select.select(devices, [], [], wait)
        now = time.monotonic()
        for device in ready:
            for _ in range(64):
                try:
                    frame = os.read(device, 2048)
                except BlockingIOError:
                    break
                if frame[12:14] == b"\x08\x00" and chance.random() < path.loss:
                    continue
                count += 1
                heapq.heappush(flying, (now + path.delay, count, devices[1 - devices.index(device)], frame))
        while flying and flying[0][0] <= time.monotonic():
            _, _, device, frame = heapq.heappop(flying)
            try:
                os.write(device, frame)
            except OSError:
                pass


def receive(seconds, window):
    """Octets per second that one connection brings, from its first on; printed for who started this. Offers
    `window` octets at most."""
    listener = socket.create_server((THERE, PORT))
    # The kernel counts its own records too: it doubles what is asked for, and offers half of that.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, window)
    print("ready", flush=True)
    listener.settimeout(60)
    connection, _ = listener.accept()
    octets, begun = len(connection.recv(1 << 16)), time.monotonic()
    connection.settimeout(1)
    while time.monotonic() < begun + seconds:
        try:
            octets += len(connection.recv(1 << 16))
        except TimeoutError:
            pass
    print(octets / seconds, flush=True)


def kernel_sends(control, receiver):
    with socket.socket() as sender:
        sender.setsockopt(socket.IPPROTO_TCP, TCP_CONGESTION, control.encode())
        sender.connect((THERE, PORT))
        sender.settimeout(1)
        while receiver.poll() is None:
            try:
                sender.send(bytes(16384))
            except TimeoutError:
                pass
            except ConnectionError:
                break


def adapter_sends(quipu, receiver):
    command = [quipu, "qpip", "ttcp", "--link", "packet:near", "-a", f"{ADAPTER}/24", "--mode", "stream"]
    command += ["--transmit", THERE, "--port", str(PORT), "-l", "16384", "-n", str(1 << 30), "--wait"]
    sender = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    receiver.wait()
    sender.kill()
    return sender.communicate()[1].decode()


def measure(options, inside, who, window):
    command = [*inside, sys.executable, __file__, "--receive", "--seconds", str(options.seconds)]
    command += ["--window", str(window)]
    receiver = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    receiver.stdout.readline()
    words = None
    if who == "qpip":
        words = adapter_sends(options.quipu, receiver)
    else:
        kernel_sends(who, receiver)
    rate = receiver.stdout.read()
    return float(rate) if rate else sys.exit(f"{who}: nothing has come: {words}")


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quipu", default="quipu", help="the command")
    several = {"nargs": "+", "type": float}
    parser.add_argument("--loss", default=[1], help="percent of the packets, each way", **several)
    parser.add_argument("--rtt", default=[100], help="milliseconds", **several)
    parser.add_argument("--window", default=[256], help="of the receiver, in KiB", **several)
    parser.add_argument("--seconds", type=float, default=20, help="of each run")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each, in turn")
    parser.add_argument("--seed", type=int, default=1, help="of what is lost")
    parser.add_argument("--control", default="cubic", help="the kernel's congestion control")
    parser.add_argument("--json", action="store_true", help="print JSON, and progress to the other stream")
    parser.add_argument("--receive", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def widest_window(most):
    """Windows up to `most` KiB can be asked for: else says what an administrator can do."""
    with open("/proc/sys/net/core/rmem_max") as limit:
        octets = int(limit.read())
    if octets < most * 1024:
        sys.exit(f"--window {most:g}: sockets have {octets} octets at most here; an administrator can change that: "
                 f"sysctl net.core.rmem_max={int(most * 1024)}")


def cell(options, inside, path, loss, rtt, window):
    """All runs over one path: both senders in turn."""
    path.loss, path.delay = loss / 100, rtt / 2000
    rates = {options.control: [], "qpip": []}
    for turn in range(options.rounds):
        for who, list_of in rates.items():
            print(f"\r{loss:g} % {rtt:g} ms {window:g} KiB: {who}, run {turn + 1}   ", end="", file=sys.stderr)
            list_of.append(round(measure(options, inside, who, int(window * 1024))))
    means = {who: statistics.mean(list_of) for who, list_of in rates.items()}
    return {"loss_percent": loss, "rtt_ms": rtt, "window": int(window * 1024), "octets_per_second": rates,
            "qpip_to_kernel": round(means["qpip"] / means[options.control], 3)}


def line(options, done):
    kernel, qpip = (statistics.mean(done["octets_per_second"][who]) / 1000 for who in (options.control, "qpip"))
    return (f"{done['loss_percent']:6g}  {done['rtt_ms']:6g}  {done['window'] >> 10:10}  {kernel:11.0f}  {qpip:9.0f}"
            f"  {done['qpip_to_kernel']:5.2f}")


def main():
    options = arguments()
    if options.receive:
        return receive(options.seconds, int(options.window[0]))
    widest_window(max(options.window))
    devices = [tap("near"), tap("far")]
    keeper = subprocess.Popen(["unshare", "-n", "sleep", "infinity"])
    inside = ["nsenter", "-t", str(keeper.pid), "-n"]
    out = sys.stderr if options.json else sys.stdout
    try:
        while os.readlink(f"/proc/{keeper.pid}/ns/net") == os.readlink("/proc/self/ns/net"):
            time.sleep(0.01)
        ip("link", "set", "far", "netns", str(keeper.pid))
        ip("address", "add", f"{HERE}/24", "dev", "near")
        ip("link", "set", "near", "up")
        subprocess.run([*inside, "ip", "address", "add", f"{THERE}/24", "dev", "far"], check=True)
        subprocess.run([*inside, "ip", "link", "set", "far", "up"], check=True)
        path = Path()
        threading.Thread(target=relay, args=(devices, path, options.seed), daemon=True).start()
        print(f"lost %  rtt ms  window KiB  {options.control + ' KB/s':>11}  QPIP KB/s  ratio", file=out)
        cells = []
        for it in itertools.product(options.loss, options.rtt, options.window):
            cells.append(cell(options, inside, path, *it))
            print(f"\r{'':50}\r", end="", file=sys.stderr, flush=True)
            print(line(options, cells[-1]), file=out, flush=True)
    finally:
        keeper.kill()
    if options.json:
        print(json.dumps(cells, indent=2))


if __name__ == "__main__":
    main()
