"""The parts of the cuda backend that need no GPU: NVRTC, its cache, plans, DLPack, messages."""

import gc
import subprocess
import sys

import numpy as np
import pytest
from device_compilers import find_nvrtc

import kccl
from kccl.backends.alone import OnGpu
from kccl.backends.gpu import GpuBackend
from kccl.backends.shapes import launch_shape
from kccl.base import dlpack
from kccl.gpu import arrays, library
from kccl.gpu import driver as gpu
from kccl.gpu.cuda import CUDA
from kccl.jit import names as kernels
from kccl.jit import rtc
from kccl.jit.cache import CSRC
from kccl.jit.nvrtc import NVRTC
from kccl.plan import specs
from kccl.plan.choice import choose
from kccl.plan.spec import Request
from kccl.plan.specs import SPECS
from kccl.plan.tuning import tuning_for

needs_nvrtc = pytest.mark.skipif(
    find_nvrtc() is None, reason="the nvidia-cuda-nvrtc wheel is not installed"
)
KERNEL = "template <class T> __global__ void twice(T* x) { x[threadIdx.x] *= 2; }\n"


def has_gpu():
    try:
        return gpu.num_devices() > 0
    except kccl.BackendError:
        return False


@needs_nvrtc
def test_names_and_code_come_from_the_cache(monkeypatch, tmp_path):
    # An earlier run has filled that of the tests.
    monkeypatch.setenv("KCCL_CACHE", str(tmp_path))
    calls = []
    call = NVRTC.call
    monkeypatch.setattr(NVRTC, "call", lambda name, *args: calls.append(name) or call(name, *args))
    names = ["twice<float>", "twice<int>"]
    path = NVRTC.compile(KERNEL, names, arch="sm_90a")
    assert "CompileProgram" in calls
    lowered, code = rtc.read(path)
    assert lowered == ["_Z5twiceIfEvPT_", "_Z5twiceIiEvPT_"]
    assert code.startswith(b"\x7fELF")
    calls.clear()
    assert NVRTC.compile(KERNEL, names, arch="sm_90a") == path
    assert "CompileProgram" not in calls
    for other in (
        NVRTC.compile(KERNEL, names[:1], arch="sm_90a"),
        NVRTC.compile(KERNEL, names, arch="sm_100a"),
        NVRTC.compile(KERNEL + "//", names, arch="sm_90a"),
    ):
        assert other != path


@needs_nvrtc
def test_ctrl_c_ends_a_wait_behind_a_compilation(monkeypatch, tmp_path):
    """NVRTC's first compilation in a process changes how the process takes signals."""
    program = """
import signal, threading
from kccl.jit.nvrtc import NVRTC
NVRTC.compile("__global__ void f() {}", ["f"], arch="sm_90a")
main = threading.main_thread().ident
threading.Timer(0.1, signal.pthread_kill, [main, signal.SIGINT]).start()
try:
    threading.Event().wait()
except KeyboardInterrupt:
    print("interrupted")
"""
    monkeypatch.setenv("KCCL_CACHE", str(tmp_path))
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=40)
    assert done.stdout == b"interrupted\n", done.stderr


@needs_nvrtc
def test_a_changed_header_compiles_anew(tmp_path):
    header = tmp_path / "factor.h"
    source = '#include "factor.h"\n__global__ void k(int* x) { *x = FACTOR; }'
    paths = []
    for factor in (2, 3):
        header.write_text(f"#define FACTOR {factor}\n")
        paths.append(NVRTC.compile(source, ["k"], arch="sm_90a", include_dirs=[tmp_path]))
    assert paths[0] != paths[1]


@needs_nvrtc
def test_what_does_not_compile_has_its_log():
    with pytest.raises(
        kccl.CompileError, match=r"mine\.cu\(1\): error: identifier \"y\""
    ) as caught:
        NVRTC.compile("__global__ void k(int* x) { *x = y; }", ["k"], arch="sm_90a", name="mine.cu")
    assert "is undefined" in caught.value.log


@needs_nvrtc
@pytest.mark.parametrize("arch", ["sm_70", "sm_75", "sm_999", "gfx942", "90"])
def test_an_unknown_architecture_is_refused(arch):
    with pytest.raises(kccl.InvalidArgument, match=f"arch is '{arch}', must .*sm_80.*sm_90"):
        kccl.compile(KERNEL, ["twice<int>"], target="cuda", arch=arch)


@needs_nvrtc
def test_a_module_needs_a_gpu_only_to_run():
    module = kccl.compile(KERNEL, ["twice<int>"], target="cuda", arch="sm_90a")
    assert (module.target, module.arch, module.names) == ("cuda", "sm_90a", ("twice<int>",))
    with pytest.raises(kccl.InvalidArgument, match="must be one of twice<int>"):
        module.kernel("twice")
    if not has_gpu():
        with pytest.raises(kccl.BackendError, match="driver cannot be loaded"):
            module.kernel("twice<int>")
    with pytest.raises(kccl.InvalidArgument, match="warp_size is 64"):
        kccl.compile(KERNEL, ["twice<int>"], target="cuda", arch="sm_90a", warp_size=64)
    with pytest.raises(kccl.InvalidArgument, match="arch is 'sm_90a'"):
        kccl.compile(KERNEL, ["twice<int>"], target="sim", arch="sm_90a")


@pytest.mark.long
@needs_nvrtc
def test_the_librarys_kernels_compile_for_a_world_size():
    for world_size in (1, 2, 8):
        path = library.compile_kernel(
            "all_reduce_one_shot_ll16", "float16", "avg", world_size, "sm_90a"
        )
        (symbol,) = rtc.read(path)[0]
        assert f"Li{world_size}E" in symbol
    source = kernels.source("put", CSRC)
    name = kernels.expression("put", "float32", "sum", CSRC, 4)
    assert (source.count("\n"), name) == (1, "kccl::kernels::put")


def test_nothing_runs_without_a_gpu():
    if has_gpu():
        pytest.skip("there is a GPU")
    with pytest.raises(kccl.BackendError, match=r"driver cannot be loaded|cuda.bindings cannot"):
        kccl.run_threads(lambda comm: None, 2, backend="cuda")
    with pytest.raises(kccl.BackendError, match=r"driver cannot be loaded|cuda.bindings cannot"):
        kccl.init(backend="cuda")


def test_plans_for_gpus_push():
    for world_size in range(1, 9):
        for collective in {spec.collective for spec in SPECS}:
            for dtype in (kccl.float32, kccl.int64):
                for nbytes in (0, 8, 8192, 2**24):
                    request = Request(collective, nbytes, world_size, "cuda", dtype)
                    plan = choose(request, tuning_for("cuda"))
                    assert "pull" not in plan.name and "cma" not in plan.name
                    (spec,) = (spec for spec in SPECS if spec.name == plan.name)
                    assert spec.why_not(request) is None


def shape(kernel, *args):
    return launch_shape(specs.BY_NAME[kernel], *args, warp_size=32)


def test_each_packet_has_a_thread_while_there_is_room():
    ll16, sentinel = "all_reduce_one_shot_ll16", "all_reduce_one_shot_sentinel"
    assert shape(ll16, 0, "float32", 1024) == (1, 32)
    assert shape(ll16, 64, "float32", 1024) == (1, 32)
    assert shape(ll16, 65, "float32", 1024) == (1, 64)
    assert shape(sentinel, 130, "float32", 1024) == (1, 64)
    assert shape(ll16, 4096, "bfloat16", 1024) == (8, 128)
    assert shape(ll16, 64 * 1024, "float32", 1024) == (128, 256)
    assert shape(ll16, 10**6, "bfloat16", 1024) == (128, 1024)
    assert shape(ll16, 10**6, "bfloat16", 700) == (128, 672)
    assert shape("reduce_scatter_direct_ll16", 400, "bfloat16", 1024) == (1, 128)
    assert shape("reduce_scatter_direct_ll16", 4096, "float64", 1024) == (32, 128)
    assert shape("all_gather_direct_ll16", 800, "float64", 1024) == (1, 128)
    assert shape("broadcast_direct_ll16", 800, "float32", 1024) == (1, 128)
    assert shape("all_gather_push_simple", 1600, "float64", 1024) == (1, 128)
    assert shape("reduce_scatter_push_simple", 4096, "float64", 1024) == (16, 128)
    assert shape("broadcast_push_simple", 4096, "float32", 1024) == (2, 128)
    assert shape("barrier_direct", 0, "float32", 1024) == (1, 32)


def test_a_tuned_shape_bounds_the_blocks_and_their_threads():
    ll16 = "all_reduce_one_shot_ll16"
    assert shape(ll16, 4096, "bfloat16", 1024, 128, 64) == (16, 64)
    assert shape(ll16, 4096, "bfloat16", 1024, 4, 64) == (4, 256)
    assert shape(ll16, 4096, "bfloat16", 1024, 1, 1024) == (1, 1024)
    assert shape(ll16, 64, "bfloat16", 1024, 128, 512) == (1, 32)
    assert shape(ll16, 10**6, "bfloat16", 500, 2, 1024) == (2, 480)
    assert shape("put", 10**6, "bfloat16", 500, 2, 1024) == (1, 480)


def test_results_are_allocated_by_the_arrays_library():
    """By new_empty(), which PyTorch's tensors have. Arrays without it are refused by name."""

    class Tensor:
        def new_empty(self, shape):
            return "a tensor", shape

    assert arrays.like(Tensor(), (2, 3)) == ("a tensor", (2, 3))
    with pytest.raises(kccl.InvalidArgument, match="x is a DeviceArray of kccl: out must be given"):
        arrays.like(arrays.DeviceArray(0, (2,), kccl.float32, 0, None), (2,))


def test_dlpack_says_what_an_array_is():
    x = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    found = dlpack.read(x, "x", CUDA.dlpack_type)
    assert (found.address, found.shape) == (x.ctypes.data, (2, 3, 4))
    assert (found.dtype, found.device_type, found.is_contiguous) == (kccl.float32, 1, True)
    assert not dlpack.read(x[:, :, ::2], "x", CUDA.dlpack_type).is_contiguous
    assert dlpack.read(x[1:], "x", CUDA.dlpack_type).address == x[1:].ctypes.data
    for name in ("uint8", "int16", "uint64", "bool", "complex64", "complex128"):
        found = dlpack.read(np.zeros(3, name), "x", CUDA.dlpack_type)
        assert found.dtype is getattr(kccl, {"bool": "bool_"}.get(name, name))


def test_arrays_have_other_shapes_in_the_same_memory():
    array = arrays.DeviceArray(0x1000, (8,), kccl.bfloat16, 3, keep=None)
    rows = array.reshape(-1, 4)
    assert (rows.address, rows.shape, rows.nbytes) == (0x1000, (2, 4), 16)
    # As NumPy's arrays, which the benches use too, it takes a tuple or a list.
    for shape in ((-1, 4), [2, -1], (np.int64(2), 4)):
        assert array.reshape(shape).shape == array.reshape(*shape).shape == (2, 4)
    assert array[:1].reshape(()).shape == array[:1].reshape().shape == ()
    for shape in ((3, -1), (2, 3), (-1, -1), (-2, -4)):
        with pytest.raises(kccl.InvalidArgument, match="must have 8 elements"):
            array.reshape(*shape)
        with pytest.raises(kccl.InvalidArgument, match="must have 8 elements"):
            array.reshape(shape)


def test_dlpack_capsules_keep_their_owner_and_let_it_go():
    before = len(dlpack._alive)
    array = arrays.DeviceArray(0x1000, (5, 2), kccl.bfloat16, 3, keep=object())
    capsules = [array.__dlpack__()]
    assert array.__dlpack_device__() == (CUDA.dlpack_type, 3)
    assert len(dlpack._alive) == before + 1

    class Taken:
        """The array as another library receives it."""

        def __dlpack_device__(self):
            return CUDA.dlpack_type, 3

        def __dlpack__(self, stream=None):
            assert stream == -1
            return capsules.pop()

    found = dlpack.read(Taken(), "x", CUDA.dlpack_type)
    assert (found.address, found.shape, found.dtype) == (0x1000, (5, 2), kccl.bfloat16)
    assert (found.device_id, found.is_contiguous) == (3, True)
    del found
    gc.collect()
    assert len(dlpack._alive) == before


def test_streams_are_integers_or_have_the_protocol():
    class Stream:
        def __cuda_stream__(self):
            return 0, 1234

    assert arrays.stream_of(7) == 7
    assert arrays.stream_of(Stream()) == 1234
    for wrong in ("7", True, object()):
        with pytest.raises(kccl.InvalidArgument, match="must be None, an integer, or something"):
            arrays.stream_of(wrong)


class OfTypestr:
    """An array in GPU memory of a library that names its type by NumPy's short name only."""

    def __init__(self, typestr):
        facts = {"shape": (3,), "data": (0x4000, False), "strides": None, "stream": None}
        self.__cuda_array_interface__ = {**facts, "typestr": typestr}


@pytest.mark.parametrize(
    ("typestr", "itemsize"),
    [("<M8[ns]", 8), ("<m8[s]", 8), ("<U4", 16), ("|S5", 5), ("|V12", 12), (">f4", 4)],
)
def test_a_typestr_that_is_only_moved(monkeypatch, typestr, itemsize):
    monkeypatch.setattr(arrays, "_device_of", lambda *_: 0)
    found = arrays.view(OfTypestr(typestr), "x", writable=True, device=0)
    assert (found.dtype.itemsize, found.dtype.kind, found.count) == (itemsize, "bytes", 3)


@pytest.mark.parametrize("dtype", [kccl.float16, kccl.uint8, kccl.bool_, kccl.complex128])
def test_a_typestr_of_a_type_that_is_known(monkeypatch, dtype):
    monkeypatch.setattr(arrays, "_device_of", lambda *_: 0)
    typestr = np.dtype(dtype.name).str
    assert arrays.view(OfTypestr(typestr), "x", writable=True, device=0).dtype == dtype


@pytest.mark.parametrize(
    ("typestr", "told"),
    [
        ("|O8", "x: dtype is object, must have no Python objects"),
        ("|V0", r"x: dtype is \|V0, must be one of"),
        ("<t5", "x: typestr is '<t5', must be one of NumPy's"),
        ("<M8[parsec]", "x: typestr is '<M8.parsec.', must be one of NumPy's"),
        ("<", "x: typestr is '<', must be one of NumPy's"),
    ],
)
def test_a_typestr_that_is_refused(typestr, told):
    with pytest.raises(kccl.InvalidArgument, match=told):
        arrays.view(OfTypestr(typestr), "x", writable=True, device=0)


# (code, bits, lanes) of DLPack -> what is told.
WRONG_OF_DLPACK = {
    (2, 0, 1): "x has DLPack type code 2 of 0 bits, must have whole bytes",
    (2, 32, 0): "x has DLPack type code 2 of 0 bits, must have whole bytes",
    (0, 4, 1): "x has DLPack type code 0 of 4 bits, must have whole bytes",
    (3, 64, 1): "x has DLPack type code 3, an opaque handle, must be of a type of plain bytes",
}


@pytest.mark.parametrize("wrong", WRONG_OF_DLPACK)
def test_types_of_dlpack_that_are_refused(wrong):
    class Array:
        def __dlpack_device__(self):
            return CUDA.dlpack_type, 0

        def __dlpack__(self, **_):
            device = CUDA.dlpack_type, 0
            capsule = dlpack.make(0x2000, (3,), kccl.float32, device, None)
            tensor = dlpack._Managed.from_address(dlpack._pointer_in(capsule, b"dltensor")).tensor
            tensor.code, tensor.bits, tensor.lanes = wrong
            return capsule

    with pytest.raises(kccl.InvalidArgument, match=WRONG_OF_DLPACK[wrong]):
        dlpack.read(Array(), "x", CUDA.dlpack_type)


def test_host_arrays_are_refused():
    with pytest.raises(kccl.InvalidArgument, match="must be in GPU memory"):
        arrays.view(np.zeros(3), "x", writable=True, device=0)
    with pytest.raises(kccl.InvalidArgument, match="is a list, must be an array"):
        arrays.view([1.0], "x", writable=True, device=0)


def test_arrays_of_jax_are_inputs_only_and_awaited_by_the_stream_of_the_call():
    """With a fake array of JAX, which is immutable and does not name its stream."""
    streams = []

    class ArrayImpl:
        @property
        def __cuda_array_interface__(self):
            raise AssertionError("it does not wait for what JAX still computes")

        def __dlpack_device__(self):
            return CUDA.dlpack_type, 0

        def __dlpack__(self, *, stream=None):
            streams.append(stream)
            return dlpack.make(0x2000, (3, 4), kccl.bfloat16, (CUDA.dlpack_type, 0), None)

    ArrayImpl.__module__ = "jaxlib._jax"
    found = arrays.view(ArrayImpl(), "x", writable=False, device=0)
    assert (found.address, found.count, found.dtype) == (0x2000, 12, kccl.bfloat16)
    assert streams == [kccl.gpu.LEGACY_STREAM] == [found.stream()]
    # A stream that the caller gives waits for JAX, too; else it would read what JAX still computes.
    backend = GpuBackend.__new__(GpuBackend)
    assert [backend.stream(given, found) for given in (77, 0)] == [77, 0]
    assert streams[1:] == [77, kccl.gpu.LEGACY_STREAM]
    assert backend.stream(None, found) == kccl.gpu.LEGACY_STREAM and len(streams) == 3
    # So does a call's stream where another input than the first is JAX's.
    other = arrays.DeviceView(0x1000, 12, kccl.bfloat16, False, None, stream=lambda: 78)
    for each in (backend, OnGpu.__new__(OnGpu)):
        assert [each.stream(given, other, [other, found]) for given in (77, None)] == [77, 78]
    assert streams[3:] == [77, 78, 77, 78]
    with pytest.raises(kccl.InvalidArgument, match="x is read-only, as arrays of JAX are"):
        arrays.view(ArrayImpl(), "x", writable=True, device=0)
    with pytest.raises(kccl.InvalidArgument, match="out must be given"):
        arrays.like(ArrayImpl(), (3, 4))
