"""PyTorch's own tests of backends, those of its wheel, with the backend "kccl".

README.md in kccl/interop says what they show. The tests of GPUs skip themselves here.
"""

import json
import subprocess
import sys

import pytest
from mpi_nodes import WORKERS
from ranks import environment

pytest.importorskip("torch", reason="PyTorch is not installed")
pytest.importorskip("expecttest", reason="expecttest, which PyTorch's tests import, is missing")

pytestmark = [pytest.mark.long, pytest.mark.takes(36)]

# What fails, and a part of the error, which says why.
FAILS = {
    "test_sparse_all_reduce_sum": "tensor has layout torch.sparse_coo, must be torch.strided",
    "test_get_backend": "'kccl' != 'gloo'",
}


@pytest.mark.parametrize(
    ("taken", "ranks", "pattern", "fewest"),
    [
        ("gloo", 2, r"test_(?!.*(cuda|nccl|ddp|Distributed)).*", 80),
        ("gloo", 2, r"test_(?!.*(cuda|nccl)).*(ddp|Distributed).*", 5),
        # Those of groups need eight ranks.
        ("gloo", 8, r"test_(all_gather|all_reduce|barrier|broadcast|gather)_group.*", 7),
        ("gloo", 8, r"test_((reduce|scatter)_group|monitored|barrier_timeout_group).*", 7),
        # gloo has these, too, but the tests are for MPI alone.
        ("mpi", 8, r"test_all_to_all_(?!.*cuda).*", 8),
    ],
)
def test_those_for_another_backend_pass(taken, ranks, pattern, fewest):
    program = WORKERS / "torch_backend_tests.py"
    done = subprocess.run(
        [sys.executable, program, taken, str(ranks), pattern],
        env=environment(OMP_NUM_THREADS="1"),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=175,
    )
    assert done.returncode == 0, done.stderr[-5000:]
    outcomes = json.loads(done.stdout.splitlines()[-1])
    failed = {name: why for name, (how, why) in outcomes.items() if how == "failed"}
    for name, why in failed.items():
        assert name in FAILS and FAILS[name] in why, f"{name}: {why[-3000:]}"
    assert failed.keys() == FAILS.keys() & outcomes.keys()
    assert sum(how == "passed" for how, _ in outcomes.values()) >= fewest, outcomes
