"""Runs modules of rdma-core's own test suite, which the distribution's python3-pyverbs brings along, and says
of each test what became of it: one line `OUTCOME NAME [REASON]` behind a tab.

usage: suite.py DEVICE MODULE...

The suite's files are unpacked into a folder that is gone at the end.
"""

import gzip
import importlib
import os
import pathlib
import random
import shutil
import sys
import tempfile
import unittest

SUITE = pathlib.Path("/usr/share/doc/rdma-core/tests")


def unpack(folder):
    """Copies the suite, of which the larger files are compressed."""
    tests = folder / "tests"
    tests.mkdir()
    for file in SUITE.iterdir():
        if file.suffix == ".py":
            shutil.copyfile(file, tests / file.name)
        elif file.name.endswith(".py.gz"):
            with gzip.open(file) as packed, open(tests / file.stem, "wb") as plain:
                shutil.copyfileobj(packed, plain)
    # The suite is a package whose modules also import each other by their bare names. What its own file
    # does besides is to load every module, those of vendors too.
    (tests / "__init__.py").write_text("")
    sys.path[:0] = [str(folder), str(tests)]


def replace_card(module):
    """Has tests of dma-buf regions register memory files. Of a graphics card, which they would take the
    buffers from, the distribution's bindings know nothing."""
    from pyverbs.mr import DmaBufMR

    class FileMR(DmaBufMR):
        def __init__(self, pd, length, access=0, offset=0, **_):
            self.file = os.memfd_create("buffer")
            os.ftruncate(self.file, offset + length)
            super().__init__(pd, length, access, self.file, offset)

        def write(self, data, length, offset=0):
            data = data.encode() if isinstance(data, str) else data
            os.pwrite(self.file, data[:length], self.offset + offset)

        def read(self, length, offset):
            return os.pread(self.file, length, self.offset + offset)

        def __del__(self):
            self.close()
            os.close(self.file)

    if hasattr(module, "DmaBufMR"):
        module.DmaBuf, module.DmaBufMR = (lambda size, gpu: None), FileMR


class Result(unittest.TestResult):
    """Tells of each test when it ends."""

    def startTest(self, test):
        super().startTest(test)
        self.outcome = ("ok", "")

    def stopTest(self, test):
        super().stopTest(test)
        outcome, reason = self.outcome
        print(f"\t{outcome} {test.id().removeprefix('tests.')} {reason}".rstrip(), flush=True)

    def addSkip(self, test, reason):
        super().addSkip(test, reason)
        self.outcome = ("skipped", " ".join(reason.split()))

    def addFailure(self, test, err):
        super().addFailure(test, err)
        self.outcome = ("failed", str(err[1]).split("\n")[0])

    def addError(self, test, err):
        super().addError(test, err)
        self.outcome = ("failed", f"{err[0].__name__}: {err[1]}".split("\n")[0])


def main(device, modules):
    """Runs the modules one after the other."""
    with tempfile.TemporaryDirectory() as folder:
        unpack(pathlib.Path(folder))
        parser = importlib.import_module("args_parser").parser
        sys.argv[1:] = ["--dev", device]
        parser.parse_args()
        result = Result()
        for module in modules:
            loaded = importlib.import_module(f"tests.test_{module}")
            replace_card(loaded)
            # The same sizes and flags each time.
            random.seed(module)
            unittest.defaultTestLoader.loadTestsFromModule(loaded).run(result)
        for _, trace in result.failures + result.errors:
            print(trace, file=sys.stderr)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
