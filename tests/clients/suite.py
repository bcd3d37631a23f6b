"""Runs modules of rdma-core's own test suite, which the distribution's python3-pyverbs brings along, and says
of each test what became of it: one line `OUTCOME NAME [REASON]` behind a tab.

usage: suite.py DEVICE MODULE...

The suite's files are unpacked into a folder that is gone at the end.
"""

import gzip
import importlib
import pathlib
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
            unittest.defaultTestLoader.loadTestsFromModule(loaded).run(result)
        for _, trace in result.failures + result.errors:
            print(trace, file=sys.stderr)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
