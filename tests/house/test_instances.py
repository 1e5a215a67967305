"""Types share what is compiled for them where the bits of their results agree."""

import re
from collections import defaultdict

from kccl.base import dtypes
from kccl.csrc.host.kernel_table import kernel_table
from kccl.jit import cache, names
from kccl.plan.ops import ops_of

LL16 = "all_reduce_one_shot_ll16"


def expressions(*cases):
    return {names.expression(LL16, dtype, op, cache.CSRC) for dtype, op in cases}


def test_equal_bits_are_one_kernel():
    for op in ("sum", "prod", "band", "bor", "bxor"):
        assert len(expressions(("int16", op), ("uint16", op))) == 1
    for op in ("min", "max"):
        assert len(expressions(("int16", op), ("uint16", op))) == 2
    assert len(expressions(*(("bool", op) for op in ("sum", "max", "bor")))) == 1
    assert len(expressions(*(("bool", op) for op in ("prod", "min", "band")))) == 1
    cases = [(dtype.name, op) for dtype in dtypes.ALL for op in ops_of(dtype)]
    assert len(expressions(*cases)) == 75 < len(cases)


def test_the_host_compiles_few_instances():
    """Set-up takes as long as these take, for each instruction set."""
    table = kernel_table()
    kernels = set(re.findall(r"kccl::kernels::\w+<(?:[^<>]|<\d+>)*>", table))
    reducers = set(re.findall(r"k\w+Reducer<[^>]*>", table))
    assert len(kernels) < 60 and len(reducers) == 75

    by_kernel = defaultdict(set)
    for kernel, instance in re.findall(r"\[(kKccl\w+)\]\[\w+\]\[\w+\] = (.*);", table):
        by_kernel[kernel].add(instance)
    # A kernel that reduces moves bytes. Packets need a second instance for long elements.
    assert len(by_kernel["kKcclAllReduceTwoShotCmaSimple"]) == 1
    assert len(by_kernel["kKcclAllReduceOneShotLl16"]) == 2
