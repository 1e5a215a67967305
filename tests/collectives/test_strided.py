"""Arrays that are not C-contiguous: a call copies them, and copies back what it writes."""

import ml_dtypes
import numpy as np
import pytest
from programs import OF_DATA

import kccl
from kccl.base import strided

SHAPE = (6, 4)
LAYOUTS = ("rows", "columns", "fortran", "backwards")


def laid(values, layout):
    """An array with these values that is not C-contiguous, and the memory in which it lies. All
    else in the memory is -1.
    """
    rows, columns = values.shape
    if layout == "rows":
        memory = np.full((2 * rows, columns), -1, values.dtype)
        array = memory[::2]
    elif layout == "columns":
        memory = np.full((rows, columns + 3), -1, values.dtype)
        array = memory[:, 1 : columns + 1]
    elif layout == "fortran":
        memory = np.full((columns, rows), -1, values.dtype)
        array = memory.T
    else:
        memory = np.full((rows, columns), -1, values.dtype)
        array = memory[::-1]
    array[:] = values
    return array, memory


def told(result):
    return None if result is None else np.array(result).tolist()


def call(comm, name, x, **out):
    root = {"root": 1} if name in ("broadcast", "reduce", "gather", "scatter") else {}
    return getattr(comm, name)(x, **root, **out)


def check(comm, name, layout):
    """The result is that of contiguous arrays, in place and out of place."""
    values = np.arange(24, dtype=np.int32).reshape(SHAPE) + 100 * comm.rank
    inputs = np.tile(values, (comm.world_size, 1)) if name in CHUNKS else values
    plain = inputs.copy()
    wanted = call(comm, name, plain)
    after = plain.tolist()

    x, memory = laid(inputs, layout)
    apart = int((memory == -1).sum())
    found = call(comm, name, x)
    assert told(found) == told(wanted) and x.tolist() == after
    assert (found is x) == (wanted is plain)
    assert int((memory == -1).sum()) == apart

    if name == "broadcast":
        return
    shape = np.shape(wanted) if wanted is not None else inputs.shape
    if name == "gather" and wanted is None:
        shape = (comm.world_size, *inputs.shape)
    flat = np.full(shape, -2, np.int32).reshape(-1, SHAPE[1])
    for given in (inputs.copy(), laid(inputs, layout)[0]):
        out, memory = laid(flat, layout)
        found = call(comm, name, given, out=out)
        assert found is (None if wanted is None else out)
        assert told(out) == (flat if wanted is None else np.reshape(wanted, out.shape)).tolist()
        assert (given == inputs).all()
        assert int((memory == -1).sum()) == memory.size - out.size


CHUNKS = ("scatter", "reduce_scatter", "all_to_all")
WORLDS = (("host", 3), ("host", 9), pytest.param("sim", 2, marks=pytest.mark.long))


@pytest.mark.parametrize(("backend", "world_size"), WORLDS)
def test_results_are_those_of_contiguous_arrays(backend, world_size):
    def main(comm):
        for number, name in enumerate(OF_DATA):
            layouts = LAYOUTS if backend == "host" else LAYOUTS[number % 4 :][:1]
            for layout in layouts:
                check(comm, name, layout)

    seeds = {"seed": 1} if backend == "sim" else {}
    kccl.run_threads(main, world_size, backend=backend, **seeds)


def test_rows_and_their_residual():
    def main(comm):
        x, _ = laid(np.arange(24, dtype=np.float32).reshape(SHAPE) + comm.rank, "columns")
        residual, memory = laid(np.ones(SHAPE, np.float32), "fortran")
        weight = np.arange(8, dtype=np.float32)
        plain, rest = x.copy(), residual.copy()
        wanted = comm.all_reduce_rms_norm(plain, rest, weight[::2].copy(), 1e-6)
        assert comm.all_reduce_rms_norm(x, residual, weight[::2], 1e-6) is x
        assert x.tolist() == wanted.tolist() and memory.T.tolist() == rest.tolist()
        assert weight.tolist() == list(range(8))

    kccl.run_threads(main, 2)


def test_one_sided_calls_and_messages():
    def main(comm):
        peer = 1 - comm.rank
        window = comm.window(64)
        table = np.arange(16, dtype=np.float32).reshape(4, 4) + 100 * comm.rank
        comm.put(table[:, 1], peer, window)
        comm.signal(peer)
        comm.wait()
        there = np.zeros((4, 2), np.float32)
        assert comm.get(there[:, 0], comm.rank, window).base is there
        of_peer = table + 100 * (peer - comm.rank)
        assert (there[:, 0] == of_peer[:, 1]).all() and not there[:, 1].any()
        comm.barrier()

        halo = np.zeros((4, 3), np.float32)
        if comm.rank == 0:
            comm.send(table[:, 3], peer)
            comm.recv(halo[:, 2], peer)
        else:
            comm.recv(halo[:, 2], peer)
            comm.send(table[:, 3], peer)
        assert (halo[:, 2] == of_peer[:, 3]).all()
        assert not halo[:, :2].any()
        with comm.group():
            comm.send(table[:, 0], peer)
            comm.recv(row := np.zeros(4, np.float32), peer)
            with pytest.raises(kccl.InvalidArgument, match="not C-contiguous"):
                comm.recv(halo[:, 0], peer)
        assert (row == of_peer[:, 0]).all()
        # As kccl.interop.mpi sets it.
        comm.context.copies_strided = False
        for refused in (comm.send, comm.recv):
            with pytest.raises(kccl.InvalidArgument, match="not C-contiguous"):
                refused(table[:, 0], peer)

    kccl.run_threads(main, 2)


def test_when_a_group_reads_what_it_sends():
    """Within send() if the array is strided; else at the group's end."""
    with kccl.init(backend="host") as comm:
        for step, seen in ((2, 1), (1, 9)):
            x, y = np.ones(8), np.zeros(8)
            with comm.group():
                comm.send(x[::step], 0)
                x[:] = 9
                comm.recv(y[: 8 // step], 0)
            assert (y[: 8 // step] == seen).all()


TYPES = (
    ml_dtypes.bfloat16,
    ml_dtypes.float8_e4m3fn,
    np.longdouble,
    np.complex128,
    bool,
    "M8[s]",
    "S5",
    "U3",
    [("a", "f4"), ("b", "i8")],
)


def test_types_without_a_sum():
    """NumPy gives its arrays of most of them by asarray() only."""

    def main(comm):
        for dtype in TYPES:
            values = np.arange(12).astype("i1").view("?" if dtype is bool else "i1")
            memory = np.zeros(24, dtype)
            memory[::2] = values if isinstance(dtype, list) else values.astype(dtype)
            x, before = memory[::2], memory.copy()
            assert comm.all_gather(x).tolist() == [x.tolist()] * 2
            if comm.rank == 1:
                memory[:] = np.zeros(1, dtype)
            assert comm.broadcast(x) is x
            assert memory.tolist() == before.tolist()
        # One field of the last type.
        field = memory["b"]
        assert comm.all_reduce(field) is field
        assert memory["b"][::2].tolist() == list(range(0, 24, 2))
        assert memory["a"][::2].tolist() == list(range(12))

    kccl.run_threads(main, 2)


def test_numpy_takes_its_own_arrays_without_dlpack(monkeypatch):
    """Before version 2.1, arrays that NumPy takes by DLPack are read-only."""
    monkeypatch.setattr(np, "from_dlpack", lambda array: pytest.fail("from_dlpack was called"))
    with kccl.init(backend="host") as comm:
        x, _ = laid(np.ones(SHAPE, np.float32), "columns")
        assert comm.all_reduce(x) is x
        assert comm.all_gather(np.broadcast_to(x[0], SHAPE)).shape == (1, *SHAPE)


class OfAnother:
    """An array with DLPack alone."""

    def __init__(self, array):
        self._array = array

    def __dlpack__(self, **keywords):
        return self._array.__dlpack__(**keywords)

    def __dlpack_device__(self):
        return self._array.__dlpack_device__()


def test_what_numpy_gives_as_read_only_is_refused_before_the_call(monkeypatch):
    of_dlpack = np.from_dlpack

    def frozen_since(array):
        found = of_dlpack(array)
        if asked.pop():
            found.flags.writeable = False
        return found

    with kccl.init(backend="host") as comm:
        asked = [True, False]
        monkeypatch.setattr(np, "from_dlpack", frozen_since)
        with pytest.raises(kccl.InvalidArgument, match="x is read-only"):
            comm.all_reduce(OfAnother(np.ones((4, 4), np.float32)[:, ::2]))


ROWS = np.zeros((4, 12), np.float32)
OVERLAPS = {
    # x, residual, weight, out: slices of columns
    "x is the residual": ((0, 4), (0, 4), None, None),
    "x in the residual": ((0, 4), (3, 7), None, None),
    "out is the residual": (None, (0, 4), None, (0, 4)),
    "out in the residual": (None, (0, 4), None, (3, 7)),
    "weight in out": (None, None, (0, 4), (0, 4)),
    "weight in x": ((0, 4), None, (0, 4), None),
}


@pytest.mark.parametrize("name", OVERLAPS)
def test_rows_that_are_written_must_not_overlap_others(name):
    x, residual, weight, out = OVERLAPS[name]
    plain = np.ones((4, 4), np.float32)
    memory = ROWS.copy()

    def columns(given, other):
        return other if given is None else memory[:, given[0] : given[1]]

    with kccl.init(backend="host") as comm:
        arrays = columns(x, plain), columns(residual, None)
        weights = np.ones(4, np.float32) if weight is None else memory[2, :4]
        with pytest.raises(kccl.InvalidArgument, match="they must not overlap"):
            comm.all_reduce_rms_norm(*arrays, weights, 1e-6, out=columns(out, None))
        assert not memory.any()
        apart = memory[:, :4], memory[:, 4:8], np.ones(4, np.float32), 1e-6
        assert comm.all_reduce_rms_norm(*apart, out=memory[:, 8:]) is not None


def test_x_may_overlap_out():
    """It is copied, or read, before the result is copied back."""

    def main(comm):
        memory = np.arange(16.0)
        wanted = 2 * memory[0:12:2]
        assert (comm.all_reduce(memory[0:12:2], out=memory[2:14:2]) == wanted).all()
        both = np.full((2, 6), comm.rank + 1.0)[:, ::2]
        assert (comm.all_gather(both[comm.rank], out=both) == [[1] * 3, [2] * 3]).all()
        x, _ = laid(np.ones(SHAPE, np.float32), "columns")
        assert comm.all_reduce(x, out=x) is x
        assert (x == 2).all()

    kccl.run_threads(main, 2)


def test_what_lies_beyond_numpy():
    """A memoryview without a dtype, and a tensor of PyTorch's, of a type that NumPy lacks too."""

    def main(comm):
        memory = np.arange(6, dtype=np.float32)
        view = memoryview(memory)[::2]
        assert comm.all_reduce(view) is view
        assert memory.tolist() == [0, 1, 4, 3, 8, 5]

    kccl.run_threads(main, 2)


@pytest.mark.long
def test_tensors_on_the_host():
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")

    def main(comm):
        for dtype in (torch.float32, torch.bfloat16):
            x = torch.arange(12).reshape(3, 4).to(dtype)
            assert comm.all_reduce(x.t()[1:]) is not None
            assert x[:, 0].tolist() == [0, 4, 8] and x[:, 1].tolist() == [2, 10, 18]
        with torch.inference_mode():
            x = torch.ones(3, 4)
            strided = x[:, ::2]
        assert comm.all_reduce(strided) is strided
        assert x.tolist() == [[2, 1, 2, 1]] * 3
        rows = torch.zeros(4, 8)
        with pytest.raises(kccl.InvalidArgument, match="x and residual lie in the same memory"):
            comm.all_reduce_rms_norm(rows[:, :4], rows[:, 3:7], torch.ones(4), 1e-6)
        comm.all_reduce_rms_norm(rows[:, :4], rows[:, 4:], torch.ones(4), 1e-6)

    kccl.run_threads(main, 2)


@pytest.mark.long
def test_tensors_that_require_grad_are_copied_outside_of_their_graph():
    """On the host PyTorch does not give them, so a GPU's calls alone have them."""
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    leaf = torch.ones(4, 4)[:, ::2].requires_grad_()
    for tensor in (leaf, 2 * torch.ones(4, 4, requires_grad=True)[:, ::2].t()):
        made = strided.of_torch(tensor, "x", is_written=True)
        assert not made.array.requires_grad
        made.array.fill_(7)
        graph = tensor.grad_fn
        made.store()
        assert (tensor == 7).all() and tensor.grad_fn is graph


def frozen():
    x = np.ones((4, 4), np.float32)
    x.flags.writeable = False
    return x[:, ::2]


def in_a_prepared_group(comm, x):
    with comm.group(prepare=True):
        comm.send(x, 0)


def shared():
    return np.lib.stride_tricks.as_strided(np.ones(4, np.float32), (4, 2), (4, 4))


REFUSED = {
    "prepare": (lambda comm, x: comm.all_reduce.prepare(x), "x has shape .* is not C-contiguous"),
    "prepare out": (
        lambda comm, x: comm.all_reduce.prepare(np.ones(8, "f4"), out=x),
        "out has shape .* is not C-contiguous",
    ),
    "put": (lambda comm, x: comm.put.prepare(x, 0, comm.window(64)), "is not C-contiguous"),
    "norm": (lambda comm, x: kccl.rms_norm(x, np.ones(2, "f4"), 1e-6), "is not C-contiguous"),
    "isend": (lambda comm, x: comm.isend(x, 0), "is not C-contiguous"),
    "irecv": (lambda comm, x: comm.irecv(x, 0), "is not C-contiguous"),
    "prepared group": (in_a_prepared_group, "is not C-contiguous"),
    "read-only": (lambda comm, x: comm.all_reduce(frozen()), "x is read-only"),
    "read-only out": (lambda comm, x: comm.all_reduce(x, out=frozen()), "out is read-only"),
    "shared": (lambda comm, x: comm.all_reduce(shared()), "elements may share memory"),
    "sizes": (lambda comm, x: comm.all_reduce(x, out=x[1:]), "out has 6 elements, x has 8"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name):
    make, text = REFUSED[name]
    with kccl.init(backend="host") as comm:
        x = np.ones((4, 4), np.float32)[:, ::2]
        with pytest.raises(kccl.InvalidArgument, match=text):
            make(comm, x)
        assert comm.all_reduce(x) is x


def test_inputs_may_share_memory_and_be_read_only():
    """As what np.broadcast_to() returns."""

    def main(comm):
        row = np.broadcast_to(np.float32(comm.rank), (2, 3))
        assert comm.all_gather(row).tolist() == [[[0] * 3] * 2, [[1] * 3] * 2]
        if comm.rank == 0:
            assert comm.broadcast(row) is row
        else:
            x = np.ones((2, 6), np.float32)
            assert not comm.broadcast(x[:, ::2]).any() and x[:, 1::2].all()

    kccl.run_threads(main, 2)


def test_nothing_is_kept():
    """The copies end with the call, without a collection of cyclic garbage."""
    import gc
    import weakref

    gc.disable()
    try:
        with kccl.init(backend="host") as comm:
            memory = np.ones((4, 4), np.float32)
            kept = weakref.ref(memory)
            comm.all_reduce(memory[:, 1:])
            del memory
            assert kept() is None
    finally:
        gc.enable()
