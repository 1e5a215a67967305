"""put, get, signal and wait: calls that C answers and prepared ones do what the first ones do."""

import gc
import inspect
import weakref
from functools import wraps

import ml_dtypes
import numpy as np
import pytest

import kccl
from kccl.base.abi import fastcall

BACKENDS = ("host", "sim")
NAMES = ("put", "get", "signal", "wait")


def count_slow(call):
    """Counts the calls of a one-sided call that Python answers."""
    kind = type("Counted", (type(call),), {"slow": 0, "__doc__": ""})
    real = type(call)._slow

    @wraps(real)
    def slow(self, *args, **keywords):
        kind.slow += 1
        return real(self, *args, **keywords)

    kind._slow = slow
    call.__class__ = kind
    return kind


@pytest.mark.parametrize("backend", BACKENDS)
def test_c_makes_known_calls(backend):
    """Each kind goes through Python once, put and get once for each window and type."""

    def main(comm):
        peer = 1 - comm.rank
        windows = [comm.window(64 * number) for number in (1, 2, 3, 4)]
        counted = {name: count_slow(getattr(comm, name)) for name in NAMES}
        back = np.zeros(4, np.float32)
        for number in range(5):
            for window in windows:
                x = np.full(4, 10 * comm.rank + number, np.float32)
                assert comm.put(x, peer, window, 16) is None
                comm.signal(peer, 3)
                comm.wait(3, peer=peer)
                mine = np.frombuffer(window.local, np.float32)
                assert (mine[4:8] == 10 * peer + number).all() and not mine[8:].any()
                assert comm.get(back, peer, window, offset=16) is back
                assert (back == x).all()
                comm.signal(peer=peer, signal_id=4)
                comm.wait(signal_id=4, count=1)
        found = [counted[name].slow for name in NAMES]
        comm.barrier()
        return found

    assert kccl.run_threads(main, 2, backend=backend) == [[4, 4, 1, 1]] * 2


WRONG = [
    ("put", (1, 1), {}, "x is"),
    ("put", ("x", 2, "w"), {}, "peer is 2, must be between 0 and 1"),
    ("put", ("x", -1, "w"), {}, "peer is -1"),
    ("put", ("x", 0, "w", 49), {}, "offset is 49 and x has 16 bytes, must lie within"),
    ("put", ("x", 0, "w", -1), {}, "offset is -1"),
    ("put", ("x", 0, "w"), {"offset": 2**70}, "offset is 1180591620717411303424"),
    ("put", ("big", 0, "w"), {}, "offset is 0 and x has 80 bytes"),
    ("put", ("x", 0, "other"), {}, "window is another communicator's"),
    ("put", ("x", 0, None), {}, "window is None"),
    ("put", ("objects", 0, "w"), {}, "dtype is object, must have no Python objects"),
    ("put", ("x", 0, "w"), {"stream": 1}, "stream"),
    ("get", ("frozen", 0, "w"), {}, "read-only"),
    ("get", ("x", 0, "w", 50), {}, "offset is 50"),
    ("signal", (2,), {}, "peer is 2"),
    ("signal", (0, 64), {}, "signal_id is 64, must be between 0 and 63"),
    ("signal", (0,), {"signal_id": -1}, "signal_id is -1"),
    ("wait", (64,), {}, "signal_id is 64"),
    ("wait", (0,), {"count": 0}, "count is 0"),
    ("wait", (0,), {"count": 2**31}, "count is 2147483648"),
    ("wait", (0,), {"peer": 2}, "peer is 2"),
]


def test_wrong_arguments_send_nothing():
    """Before C knows a call and after; prepare() refuses the same."""

    def main(comm):
        part = comm.split(0)
        frozen = np.ones(4, np.float32)
        frozen.flags.writeable = False
        things = {
            "x": np.ones(4, np.float32),
            "big": np.ones(20, np.float32),
            "objects": np.ones(2, object),
            "frozen": frozen,
            "w": comm.window(64),
            "other": part.window(64),
        }
        window, x = things["w"], things["x"]

        def refused():
            for name, given, keywords, message in WRONG:
                call = getattr(comm, name)
                args = [things.get(each, each) if isinstance(each, str) else each for each in given]
                for form in (call, call.prepare):
                    if len(given) == 2 and name == "put":
                        with pytest.raises(TypeError, match=f"{name}.*window"):
                            form(*args, **keywords)
                        continue
                    with pytest.raises(kccl.InvalidArgument, match=message):
                        form(*args, **keywords)

        refused()
        before = bytes(window.local)
        comm.barrier()
        comm.put(x, comm.rank, window, 32)
        comm.get(x, comm.rank, window, 32)
        comm.signal(comm.rank)
        comm.wait(peer=comm.rank)
        after = bytes(window.local)
        assert before == bytes(64) and after[32:48] == x.tobytes()
        refused()
        comm.barrier()
        assert bytes(window.local) == after
        comm.timeout = 0.01
        with pytest.raises(kccl.Timeout, match="0 signals seen"):
            comm.wait()

    kccl.run_threads(main, 2)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [np.float64, ml_dtypes.bfloat16, np.int32])
def test_prepared_calls(backend, dtype):
    """A halo exchange of prepared calls, in a ring of three."""

    def main(comm):
        left, right = (comm.rank - 1) % 3, (comm.rank + 1) % 3
        x, copy = comm.empty(5, dtype), np.zeros(5, dtype)
        window = comm.window(x.nbytes)
        put = comm.put.prepare(x, right, window)
        get = comm.get.prepare(copy, right, window)
        signal, wait = comm.signal.prepare(right, 7), comm.wait.prepare(7, peer=left)
        free, is_free = comm.signal.prepare(left, 8), comm.wait.prepare(8, count=1, peer=right)
        assert put.plan.name == "put" and "array to a peer's window" in put.plan.explain()
        here = np.frombuffer(window.local, dtype)
        for number in range(4):
            x[:] = 10 * comm.rank + number
            assert put() is None and signal() is None and wait() is None
            assert (here == 10 * left + number).all()
            assert get() is copy and (copy == x).all()
            free()
            is_free()
        with pytest.raises(TypeError, match="takes no arguments"):
            put(x)
        return number

    assert kccl.run_threads(main, 3, backend=backend) == [3] * 3


def test_a_window_that_is_gone_is_not_used():
    """What C knows of a window ends with it, also where a new one has its address."""

    def main(comm):
        x = np.ones(4, np.float32)
        for number in range(9):
            window = comm.window(16 * (1 + number % 3))
            gone = weakref.ref(window)
            comm.put(x * number, comm.rank, window)
            comm.put(x * number, comm.rank, window)
            assert (np.frombuffer(window.local, np.float32)[:4] == number).all()
            del window
            gc.collect()
            assert gone() is None
        comm.close()
        with pytest.raises(kccl.Error, match="closed"):
            comm.signal(comm.rank)

    kccl.run_threads(main, 1)


def test_calls_after_close_and_after_a_failure():
    def main(comm):
        window, x = comm.window(64), np.ones(4, np.float32)
        comm.put(x, 0, window)
        prepared = comm.put.prepare(x, 0, window)
        comm.timeout = 0.01
        with pytest.raises(kccl.Timeout):
            comm.wait(5)
        for call in (prepared, lambda: comm.put(x, 0, window), lambda: comm.signal(0)):
            with pytest.raises(kccl.Timeout, match="signal_id 5"):
                call()
        comm.reset()
        comm.put(x, 0, window)
        comm.close()
        for call in (prepared, lambda: comm.put(x, 0, window), lambda: comm.signal(0)):
            with pytest.raises(kccl.Error, match="closed on rank 0"):
                call()

    kccl.run_threads(main, 1)


@pytest.mark.parametrize("name", NAMES)
def test_help_and_signature(name):
    (call,) = kccl.run_threads(lambda comm: getattr(comm, name), 1)
    assert type(call).__call__ is fastcall.OneSided.__call__
    assert "stream" in inspect.signature(call).parameters
    doc = inspect.getdoc(getattr(kccl.Communicator, name))
    assert doc.startswith(f"{name}(") and "\n\n" in doc
