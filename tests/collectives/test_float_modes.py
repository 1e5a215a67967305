"""A rank whose thread rounds differently gets the same bits, and keeps its way of rounding.

torch.set_flush_denormal, fesetround and libraries linked with -ffast-math change the control word.
"""

import ctypes
import platform
from contextlib import contextmanager, nullcontext

import ml_dtypes
import numpy as np
import pytest
from long import long_beyond_each

import kccl
from kccl.engine import Engine
from kccl.engine.executors import host
from kccl.engine.files.random_weights import random_checkpoint

LIBM = ctypes.CDLL("libm.so.6")
IS_X86 = platform.machine() == "x86_64"
# Where fenv_t has the control word, and the bits there.
OFFSET = 28 if IS_X86 else 0
FLUSH = 0x8040 if IS_X86 else 1 << 24
UP = 0x4000 if IS_X86 else 1 << 22
MODES = {"flush": FLUSH, "up": UP}
WORLD_SIZE = 3
FLOATS = (np.float32, np.float64, np.float16, ml_dtypes.bfloat16)
# Packets, the staging, and the peers' memory on the host.
LENGTHS = {"host": (3, 1 << 12, 1 << 18), "sim": (3, 600)}


def control_word(change=None):
    """This thread's control word; `change`: bits to set in it."""
    environment = (ctypes.c_uint8 * 64)()
    LIBM.fegetenv(environment)
    word = ctypes.c_uint32.from_buffer(environment, OFFSET)
    if change is not None:
        word.value |= change
        LIBM.fesetenv(environment)
    return word.value & ~0x3F


@contextmanager
def rounding(mode):
    """Within it this thread rounds in one of MODES."""
    environment = (ctypes.c_uint8 * 64)()
    LIBM.fegetenv(environment)
    control_word(MODES[mode])
    try:
        yield
    finally:
        LIBM.fesetenv(environment)


def inputs(dtype, count, rank):
    """Denormals, numbers whose sums need rounding, and sums that are denormal."""
    info = ml_dtypes.finfo(dtype)
    tiny = np.array([info.smallest_subnormal, info.smallest_normal], np.float64)
    one = np.float64(info.eps) / 4
    values = np.array([tiny[0] * (rank + 1), tiny[1] / 2, tiny[1] * (1 - rank), 1.0, one, -one])
    values[3] = 1.0 if rank == 0 else one
    return np.resize(values, count).astype(dtype)


def reduced(comm, x, op):
    """The bits of each way of calling."""
    prepared = x.copy()
    comm.all_reduce.prepare(prepared, op=op)()
    found = [comm.all_reduce(x.copy(), op=op), prepared]
    whole = np.tile(x, comm.world_size)
    found.append(comm.all_gather(comm.reduce_scatter(whole, op=op)))
    return [each.tobytes() for each in found]


@pytest.mark.long
@pytest.mark.parametrize(("backend", "mode"), long_beyond_each(LENGTHS, MODES))
def test_one_rank_rounds_in_another_way(backend, mode):
    calls = [
        (dtype, count, op)
        for count in LENGTHS[backend]
        for dtype in FLOATS
        for op in ("sum", "prod", "min", "avg")
        if op == "sum" or (count < 100 and backend == "host")
    ]

    def main(comm):
        own = [(inputs(dtype, count, comm.rank), op) for dtype, count, op in calls]
        usual = [reduced(comm, *each) for each in own]
        with rounding(mode) if comm.rank == 1 else nullcontext():
            before = control_word()
            odd = [reduced(comm, *each) for each in own]
            assert control_word() == before
        return usual, odd

    results = kccl.run_threads(main, WORLD_SIZE, backend=backend)
    usual = results[0][0]
    for its_usual, odd in results:
        for call, one, other, wanted in zip(calls, its_usual, odd, usual, strict=True):
            assert one == wanted and other == wanted, call


def test_the_modes_change_what_numpy_computes():
    """So the test above would see them."""
    tiny = np.full(4, 1e-40, np.float32)
    with rounding("flush"):
        assert not (tiny + tiny).view(np.uint32).any()
    with rounding("up"):
        assert np.float32(1) + tiny[0] > 1


def test_the_engines_threads_round_as_usual(monkeypatch):
    """They inherit the control word of the thread that starts them."""
    checkpoint = random_checkpoint("tiny-laneformer")
    ids = list(range(1, 30))

    def logits():
        with Engine(checkpoint, ranks=2, blocks=1) as engine:
            return engine.logits(ids).tobytes()

    usual = logits()
    real = host.lib

    class Lib:
        def __getattr__(self, name):
            return getattr(real, name)

        def kccl_engine_open(self, *args):
            with rounding("up"):
                return real.kccl_engine_open(*args)

    monkeypatch.setattr(host, "lib", Lib())
    assert logits() == usual
