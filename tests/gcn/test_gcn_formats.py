"""Formats with scales, as clang packs and multiplies them for gfx942. No AMD GPU took part."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from device_compilers import has_zig
from gcn_machine import Launch, Program
from gcn_world import World, compiled
from kernel_copies import copy_kernels
from long import hunted
from packed_formats import COLUMNS, ROWS, source_of, stored_rows

from kccl.engine.formats.base import Format
from kccl.engine.formats.table import MULTIPLIED
from kccl.engine.monokernel.source import KERNELS

FORMATS = [each for each in MULTIPLIED.values() if each.scale_bytes]
# It compiles a kernel of all formats.
pytestmark = [
    pytest.mark.long,
    pytest.mark.takes(30),
    pytest.mark.skipif(not has_zig(), reason="the ziglang wheel is not installed"),
]


def differing(formats: Sequence[Format], kernels: Path = KERNELS) -> set[str]:
    """The formats of which a number is not the stored one, in a tile or in a table."""
    program = Program(compiled(source_of(formats), f"-I{kernels}"))
    found = set()
    for number, each in enumerate(formats):
        world, rows = World(1), stored_rows(each)
        out, fours = (world.array(0, np.zeros((ROWS, COLUMNS), np.float32)) for _ in range(2))
        packed, staged = (world.array(0, np.zeros(size, np.uint8)) for size in (1 << 14, 128))
        arrays = (out, fours, packed, staged, world.array(0, rows))
        given = np.array([*(array.ctypes.data for array in arrays), number], np.uint64)
        launch = Launch(0, program, program.symbol("_Z8multiply"), given.tobytes())
        report = world.run([launch])
        assert report.finding is None, report.finding
        wanted = each.to_float32(rows)
        if (fours != wanted).any() or (out != wanted).any():
            found.add(each.name)
    return found


def test_a_packed_number_is_the_stored_one():
    assert not differing(FORMATS)


@dataclass(frozen=True)
class Mutation:
    """An edit of the kernels, and a format that it breaks."""

    breaks: str
    file: str
    old: str
    new: str


_UNIT = "targets/mma_hip.cuh"
MUTATIONS = {
    "both threads of a word take the same four": Mutation(
        "int4_128", _UNIT, "warp().index() % 2);", "warp().index() % 1);"
    ),
    "a thread takes the scales of the row of its weights": Mutation(
        "e4m3_128", _UNIT, "return thread_ / 16 * 4;", "return thread_ % 16 / 4 * 4;"
    ),
    "a thread takes the zero points of a row of its sums": Mutation(
        "int4_zeros_64", _UNIT, "zeros + thread_ % 16)", "zeros + thread_ / 4)"
    ),
    "a scale of one byte is another row's": Mutation(
        "mxfp4",
        _UNIT,
        "four >> 8 * BYTES * i",
        "four >> 8 * BYTES * (i ^ 1)",
    ),
    "the last floats of a word lie where FP16 has the first ones": Mutation(
        "nvfp4_128", "formats/mxfp4.cuh", "(pair % 2 == 0 ? 1 : 4)", "(pair % 2 == 0 ? 1 : 3)"
    ),
    "a byte keeps its sign": Mutation(
        "e4m3_32", "targets/e4m3_exact.cuh", "(bits & 0x7f) << 7", "(bits & 0xff) << 7"
    ),
}


@pytest.mark.parametrize("name", hunted(MUTATIONS, lambda name: MUTATIONS[name].file))
def test_a_planted_bug_is_found(name, tmp_path):
    bug = MUTATIONS[name]
    kernels = copy_kernels(tmp_path)
    text = (kernels / bug.file).read_text()
    assert text.count(bug.old) == 1
    (kernels / bug.file).write_text(text.replace(bug.old, bug.new))
    assert differing([MULTIPLIED[bug.breaks]], kernels) == {bug.breaks}
