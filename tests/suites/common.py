"""What the checks of programs share. They print their results in the TAP form."""

import os
import pathlib
import re
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import time

#: What programs are started with: nothing, or "quipu sockets --".
RUN = shlex.split(os.environ.get("RUN", ""))
#: Longest time of one command, in seconds.
LIMIT = 120

folder = pathlib.Path(tempfile.mkdtemp(prefix="quipu-suite-"))
started = []
failures = []
count = 0


class Missing(Exception):
    """A program is not there."""


def check(name, holds, more=""):
    """Prints a result."""
    global count
    count += 1
    print(f"{'ok' if holds else 'not ok'} {count} - {name}", flush=True)
    if not holds:
        failures.append(name)
        print(*(f"# {line}" for line in str(more)[-2000:].splitlines()), sep="\n", flush=True)


def need(**packages):
    """Fails unless each program is there; underscores stand for dashes."""
    for program, package in packages.items():
        program = program.replace("_", "-")
        if not find(program):
            raise Missing(f"{program} is missing: install {package}")


def find(program):
    """The path of a program, also of one that only administrators have in their PATH."""
    return shutil.which(program, path=os.environ["PATH"] + ":/usr/sbin:/sbin:/usr/local/go/bin")


def command(words):
    first, *rest = map(str, words)
    return [*RUN, find(first) or first, *rest]


def run(*words, **options):
    """Runs a program to its end; its output. Its failure is an exception."""
    options = {"timeout": LIMIT, "check": True, **options}
    if "stdout" not in options:
        options["stdout"] = subprocess.PIPE
    return subprocess.run(command(words), stderr=subprocess.PIPE, **options).stdout


def start(*words, **options):
    """Starts a program that is ended at the end."""
    log = open(folder / f"log-{len(started)}", "wb")
    process = subprocess.Popen(
        command(words), stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, **options
    )
    started.append(process)
    return process


def port():
    """A port that nobody uses."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def listens(number, seconds=30):
    """Waits until somebody listens at a port."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", number)) == 0:
                return
        time.sleep(0.05)
    raise TimeoutError(f"nobody listens at port {number}")


def holds(condition, seconds=30):
    """Waits until a condition holds."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def noise(name, size):
    """A file with octets that do not repeat."""
    path = folder / name
    path.write_bytes(os.urandom(size))
    return path


def check_raised():
    """Checks that connections went through memory, where RAISED in the environment asks for it."""
    if RUN and os.environ.get("RAISED"):
        report = lambda: subprocess.run([RUN[0], "sockets", "--report"], stdout=subprocess.PIPE).stdout.decode()
        check("connections are raised", holds(lambda: re.search(r"in all: [1-9]\d* raised", report()), 5), report())


def end_all():
    """Ends what was started, last first."""
    for process in reversed(started):
        for end in (process.terminate, process.kill):
            if process.poll() is None:
                end()
                try:
                    process.wait(10)
                except subprocess.TimeoutExpired:
                    pass
    shutil.rmtree(folder, ignore_errors=True)


def main(checks):
    """Runs the check that the first argument names."""
    name = sys.argv[1] if len(sys.argv) > 1 else "--list"
    if name == "--list":
        print(*checks, sep="\n")
        return 0
    folder.chmod(0o755)
    try:
        checks[name]()
    except Missing as missing:
        print(f"ok 1 - {name} # SKIP {missing}")
    except subprocess.CalledProcessError as error:
        check(f"{name}: {error.cmd[len(RUN)]} ends well", False, f"{error}\n{error.stderr.decode(errors='replace')}")
    except Exception as error:  # Whatever it is, it is this check's result.
        check(f"{name} runs to its end", False, repr(error))
    finally:
        if failures:
            for log in sorted(folder.glob("log-*")):
                text = re.sub("^", "# ", log.read_text(errors="replace")[-1000:], flags=re.M)
                print(f"# {log.name}:\n{text}")
        end_all()
    return 1 if failures else 0
