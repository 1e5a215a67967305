"""Up to which sizes libkccl_nccl.so makes calls."""

from kccl.bench.tune import nccl as measured
from kccl.interop import nccl_tables


def test_the_sizes_are_those_of_the_records():
    assert nccl_tables.REACHES.read_text() == measured.text()


def test_lines_of_a_call_ascend_and_end_where_the_records_do():
    kinds = {}
    for line in nccl_tables.lines([2, 4, 8]):
        kinds.setdefault((line.collective, line.world_size, line.dtype), []).append(line)
    assert len(kinds) == 3 * 8
    for lines in kinds.values():
        sizes = [line.up_to_bytes for line in lines]
        assert sizes == sorted(set(sizes)) and sizes[-1] <= 2 << 20
