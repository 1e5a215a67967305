"""Arrays of Numba and JAX in collectives: DLPack and __cuda_array_interface__ beyond PyTorch's."""

from importlib.util import find_spec

import numpy as np
import pytest
from gpu_vendor import BACKEND
from preloaded import run

import kccl
from kccl import gpu

COUNT = 777


def has_jax():
    return find_spec("jax") and any(find_spec(f"jax_cuda{n}_plugin") for n in (12, 13))


@pytest.fixture
def cuda(monkeypatch):
    """numba.cuda, where it finds a GPU."""
    cuda = pytest.importorskip("numba.cuda", reason="Numba is not installed")
    if not cuda.is_available():
        pytest.skip("Numba finds no CUDA")
    if not hasattr(np, "row_stack"):
        # Numba's types use it, and NumPy 2.5 no longer has it.
        monkeypatch.setattr(np, "row_stack", np.vstack, raising=False)
    return cuda


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_arrays_of_numba(world_size, cuda):
    def main(comm):
        cuda.select_device(comm.rank)
        total = world_size * (world_size + 1) / 2
        for dtype in (np.float32, np.int64, np.float16):
            x = cuda.to_device(np.full((3, COUNT), comm.rank + 1, dtype))
            assert comm.all_reduce(x) is x
            assert (x.copy_to_host() == total).all()
            out = cuda.device_array((world_size, 3, COUNT), dtype)
            comm.all_gather(x, out=out)
            assert (out.copy_to_host() == total).all()

        # On the stream that the array says it was made on.
        stream = cuda.stream()
        x = cuda.to_device(np.full(COUNT, comm.rank + 1, np.float32), stream=stream)
        comm.all_reduce(x)
        found = x.copy_to_host(stream=stream)
        stream.synchronize()
        assert (found == total).all()

        own = comm.empty(COUNT, kccl.float32)
        y = cuda.as_cuda_array(own)
        y[:] = comm.rank + 1
        comm.all_reduce(own)
        assert (y.copy_to_host() == total).all()
        with pytest.raises(kccl.InvalidArgument, match="contiguous"):
            comm.all_reduce(cuda.to_device(np.zeros((4, 4), np.float32))[:, 1:])
        with pytest.raises(kccl.InvalidArgument, match="out must be given"):
            comm.all_gather(x)
        comm.check()

    kccl.run_threads(main, world_size, backend=BACKEND)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_strided_tensors(world_size):
    """The copies are made on the call's stream, which waits for a slow product before."""
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")

    def main(comm):
        torch.cuda.set_device(comm.rank)
        total = world_size * (world_size + 1) / 2
        slow = torch.ones((4096, 4096), device="cuda")
        for given in (None, torch.cuda.Stream()):
            torch.cuda.synchronize()
            with torch.cuda.stream(given or torch.cuda.current_stream()):
                late = (slow @ slow)[:64] / 4096 * (comm.rank + 1)
                out = torch.zeros((4095, 2 * 64), device="cuda")[:, ::2]
            strided = late.t()[1:]
            assert comm.all_reduce(strided, out=out, op="max", stream=given) is out
            assert comm.all_reduce(strided, stream=given) is strided
            # Memory that is freed is not written while a call still uses it.
            torch.full((4095, 64), 77.0, device="cuda")
            torch.cuda.synchronize()
            assert (late[:, 0] == comm.rank + 1).all() and (late[:, 1:] == total).all()
            assert (out == world_size).all() and not out._base[:, 1::2].any()
        with pytest.raises(kccl.InvalidArgument, match="elements may share memory"):
            comm.all_reduce(torch.ones(1, device="cuda").expand(8))
        shared = torch.full((1,), comm.rank + 1.0, device="cuda").expand(8)
        assert comm.all_gather(shared).sum() == 8 * total
        comm.check()

    kccl.run_threads(main, world_size, backend=BACKEND)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_arrays_of_jax(world_size):
    """Ranks are processes here, because JAX takes memory of every GPU that it sees."""
    if not has_jax():
        pytest.skip("JAX with its CUDA plugin is not installed")
    program = """
import ml_dtypes, jax
comm = kccl.init(backend="cuda")
own_device = jax.devices("cuda")[comm.rank]
total = comm.world_size * (comm.world_size + 1) / 2
stream = kccl.gpu.LEGACY_STREAM
with kccl.gpu.device(comm.rank).current():
    for dtype in (np.float32, np.int32, ml_dtypes.bfloat16):
        # The array is not ready yet when the call is made: a product of matrices comes first.
        ones = jax.device_put(np.ones((2000, 2000), np.float32), own_device)
        late = (ones @ ones)[0, 0] / 2000 * (comm.rank + 1)
        x = jax.numpy.full(777, late, dtype)
        out = comm.empty(777, dtype)
        assert comm.all_reduce(x, out=out) is out
        found = np.frombuffer(kccl.gpu.read(out.address, out.nbytes, stream), dtype)
        assert (found == total).all(), found
        gathered = comm.empty((comm.world_size, 777), dtype)
        comm.all_gather(x, out=gathered)
        found = np.frombuffer(kccl.gpu.read(gathered.address, gathered.nbytes, stream), dtype)
        assert (found.reshape(-1, 777) == 1 + np.arange(comm.world_size)[:, None]).all()
        # JAX takes what KCCL has made.
        assert (np.asarray(jax.dlpack.from_dlpack(out)) == total).all()
        try:
            comm.all_reduce(x)
            raise AssertionError("an immutable array was written")
        except kccl.InvalidArgument as error:
            assert "read-only, as arrays of JAX are" in str(error)
        assert (np.asarray(x) == comm.rank + 1).all()
comm.check()
say(rank=comm.rank)
"""
    variables = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "JAX_PLATFORMS": "cuda"}
    code, facts, err = run(world_size, program, timeout=60, **variables)
    assert code == 0, err
    assert len(facts) == world_size, err


def test_a_device_array_is_not_mistaken_for_another_devices(cuda):
    if gpu.num_devices() < 2:
        pytest.skip("needs 2 GPUs")
    with cuda.gpus[1]:
        x = cuda.to_device(np.zeros(4, np.float32))

    def main(comm):
        with pytest.raises(kccl.InvalidArgument, match="is on device 1, must be on"):
            comm.all_reduce(x)

    kccl.run_threads(main, 1, backend=BACKEND)
