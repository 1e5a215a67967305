"""libkccl_nccl.so before the NCCL of this machine: a program without Python, on two GPUs.

tests/interop/test_interop_nccl.py runs the same program on a stub of NCCL and a fake driver.
"""

import pytest
from linked_programs import libcuda
from nccl_program import compile_program, makers, right, told

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


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with the library and the program."""
    made, behind = tmp_path_factory.mktemp("nccl"), nccl_library()
    nccl.build(made, archs=["sm_90a"], world_sizes=[WORLD_SIZE])
    compile_program(made, behind, libcuda())
    return made


@pytest.mark.parametrize(
    ("part", "limit_s"),
    [
        *((part, "20") for part in ("graph", "graphs", "sum", "halves", "move", "group")),
        *((part, "20") for part in ("messages", "streams", "several", "abort", "refused")),
        # A rank is late.
        *((part, "0.5") for part in ("late", "held")),
    ],
)
def test_a_program_gets_right_results(world_size, folder, part, limit_s):
    said, log = told(folder, part, world_size, KCCL_TIMEOUT=limit_s, NCCL_DEBUG="WARN")
    assert [line for line in said if line.endswith(": right")] == right(world_size)
    assert not any(": wrong" in line for line in said)
    # On other machines than those of the records NCCL makes all calls.
    if any("KCCL makes short calls" in line for line in log):
        assert set(makers(log)) - {"NCCL"}


def test_the_program_is_right_without_kccl(world_size, folder):
    said, log = told(folder, "sum", world_size, preloads=False)
    assert said == right(world_size) and not makers(log)
