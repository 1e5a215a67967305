"""Wrong arguments raise InvalidArgument before anything is sent. Right ones of rare kinds work."""

import array
import ctypes
import sys

import ml_dtypes
import numpy as np
import pytest

import kccl
from kccl.base import dtypes


class OnGpu:
    @property
    def __cuda_array_interface__(self):
        return {"shape": (4,), "typestr": "<f4", "data": (4096, False), "version": 3}


class DlpackOnly:
    """An array as of other libraries: it has DLPack and no buffer protocol."""

    def __init__(self, x):
        self._x = x

    def __dlpack__(self, **keywords):
        return self._x.__dlpack__(**keywords)

    def __dlpack_device__(self):
        return self._x.__dlpack_device__()


def frozen(x):
    x.flags.writeable = False
    return x


def reduce(x, **keywords):
    return lambda comm: comm.all_reduce(x, **keywords)


def prepare(x, **keywords):
    return lambda comm: comm.all_reduce.prepare(x, **keywords)


def broadcast(x, *root, **keywords):
    return lambda comm: comm.broadcast(x, *root, **keywords)


FOUR = np.ones(4, np.float32)
TEN = np.ones(10, np.float32)
FLOATS = memoryview(array.array("f", range(8)))

MASKED = np.ma.array(FOUR, mask=[False, True, False, False])

WRONG = {
    "masked": (reduce(MASKED), r"x is a MaskedArray, must be .* x\.filled\(value\), or x\.data"),
    "masked out": (reduce(FOUR, out=MASKED), "out is a MaskedArray, must be an array without a"),
    "masked broadcast": (broadcast(MASKED), "x is a MaskedArray, must be"),
    "masked gather": (lambda comm: comm.all_gather(MASKED), "x is a MaskedArray, must be"),
    "masked scatter": (lambda comm: comm.reduce_scatter(MASKED), "x is a MaskedArray, must be"),
    "masked prepare": (lambda comm: comm.all_reduce.prepare(MASKED), "x is a MaskedArray, must"),
    "object": (reduce(np.ones(4, object)), "x: dtype is object, must have no Python objects"),
    "float8": (reduce(np.ones(4, ml_dtypes.float8_e3m4)), "x: dtype is float8_e3m4, must be one "),
    "swapped": (reduce(np.ones(4, ">f4")), "x: dtype is >f4, must have the machine's byte order"),
    "record": (reduce(np.ones(4, [("a", "f4")])), "x: dtype is .*, must be one of"),
    "out dtype": (reduce(FOUR, out=np.ones(4)), "out has dtype float64, x has float32"),
    "out size": (reduce(FOUR, out=np.ones(5, "f4")), "out has 5 elements, x has 4"),
    "out ahead": (reduce(TEN[:8], out=TEN[1:9]), "out begins at 0x.* and x at 0x.*: they overlap"),
    "out behind": (reduce(TEN[2:], out=TEN[:8]), "out begins at 0x.* and x at 0x.*: they overlap"),
    "out frozen": (
        reduce(FOUR, out=frozen(np.ones(4, "f4"))),
        "out is read-only, must be writable",
    ),
    "out strided": (
        prepare(np.ones(5, "f4"), out=TEN[::2]),
        r"out has shape \(5,\) and is not C-cont",
    ),
    "out on GPU": (
        reduce(FOUR, out=OnGpu()),
        "out is a OnGpu in GPU memory, must be in host memory",
    ),
    "out list": (reduce(FOUR, out=[0.0] * 4), "out is a list, must be an array"),
    "op": (reduce(FOUR, op="xor"), "op is 'xor', must be one of sum, prod, min, max, avg"),
    "op None": (reduce(FOUR, op=None), "op is None, must be one of"),
    "op array": (reduce(FOUR, op=FOUR), "op is array.*, must be one of"),
    "op Ellipsis": (reduce(FOUR, op=...), "op is Ellipsis, must be one of"),
    "avg": (reduce(np.ones(4, np.int32), op="avg"), "op is 'avg' and x has dtype int32"),
    "strided": (prepare(TEN[::2]), r"x has shape \(5,\) and is not C-contiguous, must be"),
    "strided view": (prepare(FLOATS[::2]), r"x has shape \(4,\) and is not C-contiguous"),
    "frozen": (reduce(frozen(np.ones(4, "f4"))), "x is read-only, must be writable"),
    "scalar": (reduce(np.float32(1)), "x is read-only, must be writable"),
    "frozen view": (reduce(memoryview(bytes(8)).cast("f")), "x is read-only"),
    "bytes": (reduce(b"12345678"), "x is read-only, must be writable"),
    "letters": (reduce(array.array("u", "ab")), "x: dtype is buffer format .[uw]., must be one of"),
    "on GPU": (
        reduce(OnGpu()),
        "x is a OnGpu in GPU memory, must be in host memory: .*backend is host",
    ),
    "text": (reduce("text"), "x is a str, must be an array"),
    "None": (reduce(None), "x is a NoneType, must be an array"),
    "list": (reduce([1.0, 2.0]), "x is a list, must be an array"),
    "number": (reduce(1.0), "x is a float, must be an array"),
    "stream": (reduce(FOUR, stream=7), "stream is 7, must be None"),
    "channel": (reduce(FOUR, channel=4), "channel is 4, must be between 0 and 3"),
    "channel below": (broadcast(FOUR, channel=-1), "channel is -1, must be between 0 and 3"),
    "channel text": (reduce(FOUR, channel="0"), "channel is '0', must be an integer"),
    "channel float": (reduce(FOUR, channel=1.5), "channel is 1.5, must be an integer"),
    "algorithm": (reduce(FOUR, algorithm="ring"), "algorithm is 'ring', must .*one_shot_ll16"),
    "other's": (reduce(FOUR, algorithm="barrier_direct"), "algorithm is 'barrier_direct', must"),
    "root": (broadcast(FOUR, 2), "root is 2, must be between 0 and 1"),
    "root below": (broadcast(FOUR, root=-1), "root is -1, must be between 0 and 1"),
    "root None": (broadcast(FOUR, None), "root is None, must be an integer"),
    "root float": (broadcast(FOUR, 0.5), "root is 0.5, must be an integer"),
    "broadcast object": (broadcast(np.ones(4, object)), "x: dtype is object, must have no Python"),
    "broadcast list": (broadcast([1.0]), "x is a list, must be an array"),
    "broadcast frozen": (
        broadcast(frozen(np.ones(4, "f4")), 1),
        "x is read-only, must be writable",
    ),
    "broadcast stream": (broadcast(FOUR, stream=0), "stream is 0, must be None"),
    "barrier": (
        lambda comm: comm.barrier.prepare(channel=4),
        "channel is 4, must be between 0 and 3",
    ),
    "prepare": (prepare(FOUR, op="no"), "op is 'no', must be one of"),
    "prepare root": (lambda comm: comm.broadcast.prepare(FOUR, 9), "root is 9, must be between"),
    "times": (lambda comm: comm.barrier.time(0), "iterations is 0 .*, must be positive"),
    "timeout": (lambda comm: setattr(comm, "timeout", 0), "timeout is 0, must be positive"),
    "timeout inf": (lambda comm: setattr(comm, "timeout", float("inf")), "timeout is inf, must"),
    "timeout nan": (lambda comm: setattr(comm, "timeout", float("nan")), "timeout is nan, must"),
    "timeout text": (lambda comm: setattr(comm, "timeout", "5"), "timeout is '5', must"),
    "channel array": (reduce(FOUR, channel=FOUR), "channel is array.*, must be an integer"),
    "barrier channel": (
        lambda comm: comm.barrier.prepare(channel=0.5),
        "channel is 0.5, must be an integer",
    ),
    "empty below": (lambda comm: comm.empty(-1), "shape is -1, must be an integer or a tuple"),
    "empty shape": (lambda comm: comm.empty((2, -3)), r"shape is \(2, -3\), must be"),
    "empty float": (lambda comm: comm.empty(2.5), "shape is 2.5, must be"),
    "empty None": (lambda comm: comm.empty(None), "shape is None, must be"),
    "empty text": (lambda comm: comm.empty("ab"), "shape is 'ab', must be"),
    "empty dtype": (lambda comm: comm.empty(3, dtype=["f4"]), "dtype is .'f4'., must be one of"),
    "window": (lambda comm: comm.window(1.5), "nbytes is 1.5, must be an integer"),
    "plan dtype": (lambda comm: comm.plan("all_reduce", 8, []), "dtype is .., must be one of"),
    "plan below": (lambda comm: comm.plan("all_reduce", -1), "nbytes is -1, must not be negative"),
    "plan text": (lambda comm: comm.plan("all_reduce", "8"), "nbytes is '8', must be an integer"),
    "plan": (lambda comm: comm.plan("a"), "collective is 'a', must be one of all_gather, "),
    "plan of parts": (
        lambda comm: comm.plan("all_reduce", 7, "float32"),
        "nbytes is 7, must be a multiple of 4, the size of a float32",
    ),
    "algorithms": (
        lambda comm: comm.algorithms("x"),
        "collective is 'x', must be one of all_gather, all_reduce, all_reduce_rms_norm, ",
    ),
}


def test_wrong_arguments_send_nothing():
    """Rank 0 makes all the wrong calls; rank 1 notices nothing."""
    wrong = []

    def main(comm):
        total = np.ones(4, np.float32)
        comm.all_reduce(total)
        for name, (call, message) in WRONG.items() if comm.rank == 0 else ():
            try:
                with pytest.raises(kccl.InvalidArgument, match=message):
                    call(comm)
            except BaseException as error:
                wrong.append(f"{name}: {error!r}")
        comm.all_reduce(total)
        comm.broadcast(total, 1)
        comm.barrier()
        assert (total == 4).all()

    kccl.run_threads(main, 2)
    assert not wrong, "\n".join(wrong)
    assert (FOUR == 1).all() and (TEN == 1).all()


# Calls of a form that Python refuses: in kccl's words.
FORMS = {
    'comm.all_reduce(x, "sum")': (
        "all_reduce() takes 1 positional argument, x, and got 2: out, op, stream, channel, "
        "algorithm are keyword arguments"
    ),
    'comm.all_reduce.prepare(x, "max")': "all_reduce.prepare() takes 1 positional argument, x, ",
    'comm.all_gather(x, "sum")': (
        "all_gather() takes 1 positional argument, x, and got 2: out, counts, stream, channel, "
        "algorithm are keyword arguments"
    ),
    "comm.broadcast(x, 0, 7)": (
        "broadcast() takes 2 positional arguments, x and root, and got 3: stream, channel, "
        "algorithm are keyword arguments"
    ),
    "comm.all_reduce(x, root=0)": (
        "all_reduce(): got an unexpected keyword argument 'root'; its arguments are x, out, op, "
    ),
    "comm.all_reduce()": "all_reduce(): missing a required argument: 'x'; its arguments are x, ",
    "comm.barrier(channel=1)": (
        "barrier(channel=1): on backend host barrier() takes no arguments; a barrier on another "
        "channel is prepared: op = comm.barrier.prepare(channel=1), then op()"
    ),
    "comm.barrier(1)": "barrier(1): on backend host",
    "comm.all_reduce.prepare(x)(x)": "a prepared call takes no arguments: prepare() has taken",
}


@pytest.mark.parametrize("check", ["0", "1"])
def test_calls_of_a_wrong_form_say_the_right_one(monkeypatch, check):
    monkeypatch.setenv("KCCL_CHECK", check)

    def main(comm):
        for call, text in FORMS.items():
            with pytest.raises(TypeError) as caught:
                eval(call, {"comm": comm, "x": np.ones(4, np.float32)})
            assert text in str(caught.value), call

    kccl.run_threads(main, 1)


def test_a_type_error_within_a_call_stays_what_it_is():
    def main(comm):
        with pytest.raises(TypeError, match="unhashable"):
            comm.all_reduce(np.ones(4), algorithm=[])

    kccl.run_threads(main, 1)


@pytest.mark.parametrize(
    "make",
    [
        lambda: array.array("f", [1, 2, 3]),
        lambda: array.array("i", [1, 2, 3]),
        lambda: array.array("q", [1, 2, 3]),
        lambda: array.array("l", [1, 2, 3]),
        lambda: array.array("B", [1, 2, 3]),
        lambda: array.array("h", [1, 2, 3]),
        lambda: bytearray([1, 2, 3]),
        lambda: np.array([1, 2, 3], np.uint32),
        lambda: np.array([1, 2, 3], ml_dtypes.float8_e4m3fn),
        lambda: np.array([1, 2, 3], np.complex64),
        lambda: memoryview(array.array("d", [1, 2, 3])),
        lambda: memoryview(np.array([1, 2, 3], np.float16)),
        lambda: np.array([1, 2, 3], ml_dtypes.bfloat16),
        lambda: np.array([1, 2, 3], np.longlong),
        lambda: DlpackOnly(np.array([1, 2, 3], np.float32)),
        lambda: DlpackOnly(np.array([1, 2, 3], np.int64)),
        lambda: DlpackOnly(np.array([1, 2, 3], np.uint16)),
        lambda: (ctypes.c_float * 3)(1, 2, 3),
        lambda: (ctypes.c_double * 3)(1, 2, 3),
        lambda: (ctypes.c_int * 3)(1, 2, 3),
        lambda: (ctypes.c_long * 3)(1, 2, 3),
        lambda: (ctypes.c_longlong * 3)(1, 2, 3),
    ],
)
def test_kinds_of_arrays(make):
    def main(comm):
        for _ in range(3):
            x, out = make(), make()
            assert comm.all_reduce(x) is x
            assert values(x) == [2, 4, 6]
            assert comm.broadcast(x, 1) is x
            assert comm.all_reduce(x, out=out, op="avg" if is_float(x) else "max") is out
            assert values(out) == [2, 4, 6]

    kccl.run_threads(main, 2)


def is_float(x):
    return getattr(x, "dtype", np.dtype("i4")).kind in "fc"


def values(x):
    if isinstance(x, DlpackOnly):
        return list(x._x)
    return [float(element.real) for element in np.asarray(x)]


@pytest.mark.parametrize("shape", [(), (1,), (2, 3), (0, 3)])
def test_shapes(shape):
    def main(comm):
        x = np.ones(shape, np.float64)
        assert comm.all_reduce(x) is x and (x == 2).all()
        out = np.zeros(x.size)
        comm.all_reduce(x, out=out)
        assert (out == 4).all()

    kccl.run_threads(main, 2)


@pytest.mark.parametrize(
    ("buffer_format", "name"),
    [
        ("f", "float32"),
        ("<f", "float32"),
        ("=d", "float64"),
        ("<d", "float64"),
        ("@e", "float16"),
        ("i", "int32"),
        ("<i", "int32"),
        ("<q", "int64"),
        ("@q", "int64"),
        # "l" is C's long in native mode, and 4 bytes in standard mode.
        ("l", f"int{8 * ctypes.sizeof(ctypes.c_long)}"),
        ("@l", f"int{8 * ctypes.sizeof(ctypes.c_long)}"),
        ("<l", "int32"),
        ("=l", "int32"),
        ("b", "int8"),
        ("B", "uint8"),
        ("<H", "uint16"),
        ("L", f"uint{8 * ctypes.sizeof(ctypes.c_long)}"),
        ("?", "bool"),
        ("Zf", "complex64"),
        ("=Zd", "complex128"),
    ],
)
def test_formats(buffer_format, name):
    if sys.byteorder == "big":
        buffer_format = buffer_format.replace("<", ">")
    assert dtypes.of_format(buffer_format, 4).name == name


@pytest.mark.parametrize("buffer_format", ["", "<", ">f", "!d", "<<f", "@=f", "3f", "ff", "g", "c"])
def test_other_formats_are_bytes(buffer_format):
    if sys.byteorder == "big":
        buffer_format = buffer_format.translate({ord("<"): ">", ord(">"): "<", ord("!"): "<"})
    found = dtypes.of_format(buffer_format, 12)
    assert (found.kind, found.itemsize) == ("bytes", 12)


@pytest.mark.parametrize("buffer_format", ["O", "<O", "3O", "T{<i:a:O:b:}", "T{T{O:x:}:y:i:z:}"])
def test_formats_of_python_objects_are_refused(buffer_format):
    with pytest.raises(kccl.InvalidArgument, match="must have no Python objects"):
        dtypes.of_format(buffer_format, 16)


def test_the_names_of_fields_say_nothing_about_their_types():
    assert dtypes.of_format("T{<i:O:<i:bOO:}", 8).kind == "bytes"


def test_arguments_of_numpy():
    def main(comm):
        x = np.full(3, comm.rank, np.int32)
        for _ in range(3):
            comm.broadcast(x, np.int64(1), channel=np.int8(2))
            comm.all_reduce(x.copy(), channel=np.array(3))
            assert (x == 1).all()
        comm.barrier.prepare(channel=np.int8(1))()
        window = comm.window(np.int64(16))
        array = comm.empty((np.int32(2), 3), np.float64)
        assert array.shape == (2, 3) and comm.empty(np.uint8(3)).shape == (3,)
        other = np.int64(1 - comm.rank)
        comm.put(x, other, window, np.uint16(4))
        comm.signal(other, np.int8(3))
        comm.wait(np.int8(3), count=np.int64(1), peer=other)
        assert list(np.frombuffer(window.local, np.int32)) == [0, 1, 1, 1]
        comm.timeout = np.float32(2.5)
        assert comm.timeout == 2.5
        assert comm.plan("all_reduce", np.int64(8), np.float32).request.nbytes == 8

    kccl.run_threads(main, 2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"color": (1,)}, r"color is \(1,\), must be an integer"),
        ({"color": True}, "color is True, must be an integer"),
        ({"color": 1.0}, "color is 1.0, must be an integer"),
        ({"color": 0, "key": "a"}, "key is 'a', must be an integer"),
    ],
)
def test_colors_and_keys_of_split(options, message):
    def main(comm):
        with pytest.raises(kccl.InvalidArgument, match=message):
            comm.split(**options)
        # All ranks have raised, so they still agree.
        part = comm.split(np.int64(comm.rank % 2), key=np.int32(-comm.rank))
        return part.rank, part.world_size, part.local_rank

    assert kccl.run_threads(main, 3) == [(1, 2, 0), (0, 1, 1), (0, 2, 2)]


def test_a_bool_is_no_integer():
    def main(comm):
        x, window = np.ones(2, np.float32), comm.window(64)
        for call, name in (
            (lambda: comm.put(x, 0, window, offset=True), "offset"),
            (lambda: comm.wait(True), "signal_id"),
            (lambda: comm.broadcast(x, root=True), "root"),
        ):
            with pytest.raises(kccl.InvalidArgument, match=f"{name} is True, must be an integer"):
                call()

    kccl.run_threads(main, 1)
