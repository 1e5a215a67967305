"""PyTorch's own tests of backends, from its wheel, with the backend "kccl" in place of another.

    python torch_backend_tests.py gloo 2 'test_all_reduce.*'

runs those on two ranks that are written for gloo, and prints how each ended, as JSON. The ranks are
forked, because to import PyTorch takes longer than most tests.
"""

import json
import os
import re
import sys
import tempfile
import unittest

TAKEN, RANKS, PATTERN = sys.argv[1:]
# The tests read these when they are imported.
os.environ |= {"BACKEND": TAKEN, "WORLD_SIZE": RANKS, "TEMP_DIR": tempfile.mkdtemp()}
os.environ |= {"DISTRIBUTED_TESTS_DEFAULT_TIMEOUT": "60"}

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch.testing._internal.distributed.distributed_test import (  # noqa: E402
    DistributedTest,
    TestDistBackend,
)

import kccl.interop.torch  # noqa: E402, F401


def in_its_place(make):
    """The function that makes a group, which makes KCCL's where the other backend is asked for."""

    def made(*args, backend=None, **kwargs):
        return make(*args, backend="kccl" if backend == TAKEN else backend, **kwargs)

    return made


for name in ("init_process_group", "new_group"):
    given = in_its_place(getattr(dist, name))
    setattr(dist, name, given)
    setattr(dist.distributed_c10d, name, given)


class Tests(TestDistBackend, DistributedTest._DistTestBase):
    def setUp(self):
        super().setUp()
        self._start_processes(torch.multiprocessing.get_context("fork").Process)


class Outcomes(unittest.TestResult):
    """How each test has ended: its name -> ["passed" | "skipped" | "failed", why]."""

    def __init__(self):
        super().__init__()
        self.of = {}

    def addSuccess(self, test):
        self.of[test._testMethodName] = ["passed", ""]

    def addSkip(self, test, reason):
        self.of[test._testMethodName] = ["skipped", reason]

    def addFailure(self, test, error):
        self.of[test._testMethodName] = ["failed", self._exc_info_to_string(error, test)]

    addError = addFailure


if __name__ == "__main__":
    outcomes = Outcomes()
    for name in unittest.TestLoader().getTestCaseNames(Tests):
        if re.fullmatch(PATTERN, name):
            Tests(name).run(outcomes)
    print(json.dumps(outcomes.of))
