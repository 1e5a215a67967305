"""The matrix of collectives between threads on the hip backend: through hip-python, with kernels
that the simulator runs with warps of 64 and gfx942's memory model.
"""

import pytest
from hip_matrix import WORLD_SIZES, call_all
from programs import OF_DATA

import kccl


@pytest.mark.long
@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("name", OF_DATA)
def test_bits_are_the_oracles(amd, kernels_are_warm, name, world_size):
    found = kccl.run_threads(lambda comm: call_all(comm, [name]), world_size, backend="hip")
    assert found == [[]] * world_size
