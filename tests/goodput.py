#!/usr/bin/env python3
"""Goodput of QPIP and of the kernel's CUBIC over one lossy, long path, in real time.

Two TAP devices in two network namespaces, and a relay between them that loses and delays packets in both
directions (where the kernel has netem, that would do; many kernels do not). The receiver is a socket of the
kernel in every case; the senders take turns: the kernel with CUBIC, and `quipu qpip ttcp`. Needs no privilege
where user namespaces are allowed:

    unshare -rn tests/goodput.py --quipu target/release/quipu --seconds 20 --rounds 3
"""

import argparse
import fcntl
import heapq
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


def relay(devices, loss, delay, seed):
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
                if frame[12:14] == b"\x08\x00" and chance.random() < loss:
                    continue
                count += 1
                heapq.heappush(flying, (now + delay, count, devices[1 - devices.index(device)], frame))
        while flying and flying[0][0] <= time.monotonic():
            _, _, device, frame = heapq.heappop(flying)
            try:
                os.write(device, frame)
            except OSError:
                pass


def receive(seconds):
    """Octets per second that one connection brings, from its first on; printed for who started this."""
    listener = socket.create_server((THERE, PORT))
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


def measure(options, inside, who):
    command = [*inside, sys.executable, __file__, "--receive", "--seconds", str(options.seconds)]
    receiver = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    receiver.stdout.readline()
    words = None
    if who == "qpip":
        words = adapter_sends(options.quipu, receiver)
    else:
        kernel_sends(who, receiver)
    rate = receiver.stdout.read()
    return float(rate) if rate else sys.exit(f"{who}: nothing has come: {words}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quipu", default="quipu", help="the command")
    parser.add_argument("--loss", type=float, default=1, help="percent of the packets, each way")
    parser.add_argument("--rtt", type=float, default=100, help="milliseconds")
    parser.add_argument("--seconds", type=float, default=20, help="of each run")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each, in turn")
    parser.add_argument("--control", default="cubic", help="the kernel's congestion control")
    parser.add_argument("--receive", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.receive:
        return receive(options.seconds)
    devices = [tap("near"), tap("far")]
    keeper = subprocess.Popen(["unshare", "-n", "sleep", "infinity"])
    inside = ["nsenter", "-t", str(keeper.pid), "-n"]
    try:
        while os.readlink(f"/proc/{keeper.pid}/ns/net") == os.readlink("/proc/self/ns/net"):
            time.sleep(0.01)
        ip("link", "set", "far", "netns", str(keeper.pid))
        ip("address", "add", f"{HERE}/24", "dev", "near")
        ip("link", "set", "near", "up")
        subprocess.run([*inside, "ip", "address", "add", f"{THERE}/24", "dev", "far"], check=True)
        subprocess.run([*inside, "ip", "link", "set", "far", "up"], check=True)
        carrier = (devices, options.loss / 100, options.rtt / 2000, 1)
        threading.Thread(target=relay, args=carrier, daemon=True).start()
        rates = {options.control: [], "qpip": []}
        for _ in range(options.rounds):
            for who, list_of in rates.items():
                list_of.append(round(measure(options, inside, who)))
                print(f"{who}: {list_of[-1] / 1000:.1f} KB/s", file=sys.stderr)
    finally:
        keeper.kill()
    means = {who: statistics.mean(list_of) for who, list_of in rates.items()}
    ratio = means["qpip"] / means[options.control]
    print(json.dumps({"loss_percent": options.loss, "rtt_ms": options.rtt, "octets_per_second": rates,
                      "qpip_to_kernel": round(ratio, 3)}, indent=2))


if __name__ == "__main__":
    main()
