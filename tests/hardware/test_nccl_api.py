"""libkccl_nccl.so before the NCCL of this machine: a program without Python, on two GPUs.

tests/interop/test_interop_nccl.py runs the same program on a stub of NCCL and a fake driver.
"""

import json
import os
import re
import socket
import subprocess
import sys
import time

import pytest
from linked_programs import libcuda
from nccl_program import compile_program, makers, right, told
from source_tree import ROOT

from kccl.base.errors import BackendError
from kccl.interop import nccl, nccl_headers

WORLD_SIZE = 2
pytestmark = [
    pytest.mark.timeout(300),
    # conftest.py takes the number of GPUs from this name.
    pytest.mark.parametrize("world_size", [WORLD_SIZE]),
]


def nccl_library():
    """NCCL of the wheel that has nccl.h, or of the system."""
    try:
        include = nccl_headers.folder_of("nccl.h")
    except BackendError as error:
        pytest.skip(f"there is a GPU, but {error}")
    for folder in (include.parent / "lib", *include.parent.glob("lib/*-linux-gnu")):
        if (folder / "libnccl.so.2").exists():
            return folder / "libnccl.so.2"
    return pytest.skip(f"there is a GPU, but no libnccl.so.2 beside {include}")


# Why NCCL makes all calls on machines other than those of the records (csrc/nccl/peers.cpp).
UNLIKE_MEASURED = "nothing was measured|NCCL_P2P_|ranks share a GPU"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with the library and the program, where KCCL makes calls."""
    made, behind = tmp_path_factory.mktemp("nccl"), nccl_library()
    try:
        nccl.build(made, archs=["sm_90a"], world_sizes=[WORLD_SIZE])
    except BackendError as error:
        pytest.skip(f"there is a GPU, but {error}")
    compile_program(made, behind, libcuda())
    said, log = told(made, "start", WORLD_SIZE)
    assert said == right(WORLD_SIZE)
    answers = [line for line in log if re.match(r"kccl: rank \d of \d: communicator ", line)]
    assert len(answers) == WORLD_SIZE, log
    if not all(line.endswith(": KCCL makes short calls") for line in answers):
        assert all(re.search(UNLIKE_MEASURED, line) for line in answers), answers
        pytest.skip(f"there are GPUs, but NCCL makes all calls: {answers[0]}")
    return made


# Not the part "wrong": NCCL takes an array that is null unless NCCL_CHECK_POINTERS is 1, and its
# words for a wrong call are not the stub's.
@pytest.mark.parametrize(
    ("part", "limit_s"),
    [
        *((part, "20") for part in ("graph", "graphs", "sum", "halves", "move", "group")),
        *((part, "20") for part in ("messages", "streams", "several", "abort", "refused")),
        # A rank is late.
        *((part, "3") for part in ("late", "held")),
    ],
)
def test_a_program_gets_right_results(world_size, folder, part, limit_s):
    said, log = told(folder, part, world_size, KCCL_TIMEOUT=limit_s, NCCL_DEBUG="WARN")
    assert sum(line.endswith(": KCCL makes short calls") for line in log) >= world_size
    assert [line for line in said if line.endswith(": right")] == right(world_size)
    assert not any(": wrong" in line for line in said)
    assert set(makers(log)) - {"NCCL"}


def test_the_program_is_right_without_kccl(world_size, folder):
    said, log = told(folder, "sum", world_size, preloads=False)
    assert said == right(world_size) and not makers(log)


def ends_of(ranks, limit_s):
    """The return codes of ranks that end in time. If one fails, NCCL's other ones wait for ever."""
    until = time.monotonic() + limit_s
    while time.monotonic() < until:
        codes = [rank.poll() for rank in ranks]
        if None not in codes or any(codes):
            break
        time.sleep(0.1)
    for rank in ranks:
        rank.kill()
    return [rank.wait() for rank in ranks]


def in_pytorch(out, **variables):
    """Runs workers/nccl_in_pytorch.py. Returns its times by (who calls, call, bytes, mode), the
    results to compare, and the output of rank 0.
    """
    import torch

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    command = [sys.executable, str(ROOT / "tests/workers/nccl_in_pytorch.py"), str(out)]
    where = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port} | variables
    ranks, outputs = [], [out.with_suffix(f".{rank}") for rank in range(WORLD_SIZE)]
    for rank, output in enumerate(outputs):
        place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(WORLD_SIZE)}
        with output.open("w") as file:
            ranks.append(
                subprocess.Popen(command, env=where | place, stdout=file, stderr=subprocess.STDOUT)
            )
    codes = ends_of(ranks, 100)
    texts = [output.read_text() for output in outputs]
    assert codes == [0] * WORLD_SIZE, "\n".join(text[-2000:] for text in texts)
    rows = json.loads(out.with_suffix(".json").read_text())
    times = {(row["by"], row["call"], row["bytes"], row["mode"]): row["time_us"] for row in rows}
    return times, torch.load(out.with_suffix(".pt")), texts[0]


def test_a_program_of_pytorch_is_faster_and_has_the_same_bits(world_size, folder, tmp_path):
    torch = pytest.importorskip("torch")
    library = str(folder / nccl.LIBRARY)
    kccl = {"LD_PRELOAD": library, "VLLM_NCCL_SO_PATH": library, "KCCL_TIMEOUT": "20"}
    without, wanted, _ = in_pytorch(tmp_path / "without")
    times, found, log = in_pytorch(tmp_path / "with", **kccl, KCCL_NCCL="log")
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    assert makers(log.splitlines())["all_reduce_one_shot_ll16"] > 0
    # Outside of graphs the log takes time in each call.
    for key, time_us in times.items():
        if "graph" in key:
            print(*key, f"NCCL {without[key]} us, KCCL {time_us} us")
    of_8_kib = ("torch", "all_reduce", 8192, "graph")
    assert without[of_8_kib] >= 1.8 * times[of_8_kib]


def test_communicators_may_be_called_in_different_orders(world_size, folder):
    said, log = told(folder, "orders", world_size, KCCL_TIMEOUT="10")
    assert said == right(world_size)
    assert makers(log) and "NCCL" not in makers(log)
