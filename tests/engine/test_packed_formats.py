"""Formats with scales, as the monokernel packs and multiplies them: each number by itself."""

import numpy as np
import pytest
from long import long_after
from packed_formats import COLUMNS, ROWS, source_of, stored_rows

import kccl
from kccl.engine.formats.table import MULTIPLIED
from kccl.engine.monokernel.launching import KERNELS

FORMATS = [each for each in MULTIPLIED.values() if each.scale_bytes]
# It compiles them all, which is long on a busy machine.
pytestmark = pytest.mark.takes(15)


@pytest.mark.parametrize("warp_size", long_after(1, [32, 64]))
def test_a_packed_number_is_the_stored_one(warp_size):
    def main(comm: kccl.Communicator) -> None:
        module = kccl.compile(
            source_of(FORMATS),
            ["multiply"],
            target="sim",
            warp_size=warp_size,
            include_dirs=[KERNELS],
        )
        packed, staged = np.zeros(1 << 14, np.uint8), np.zeros(128, np.uint8)
        for i, each in enumerate(FORMATS):
            rows = stored_rows(each)
            out, fours = np.zeros((2, ROWS, COLUMNS), np.float32)
            arrays = (array.ctypes.data for array in (out, fours, packed, staged, rows))
            module.kernel("multiply")(comm, *arrays, i, grid=1, block=warp_size)
            wanted = each.to_float32(rows)
            np.testing.assert_array_equal(fours, wanted)
            np.testing.assert_array_equal(out, wanted)

    kccl.run_threads(main, 1, backend="sim", warp_size=warp_size)
